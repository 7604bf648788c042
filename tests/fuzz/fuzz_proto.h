/* SPDX-License-Identifier: Apache-2.0
 *
 * fuzz_proto: one target a record of proto/. What decodes must encode, and what was encoded must come back the same:
 * the second encoding equals the first (the first may drop what a later version added). */
#ifndef FUZZ_PROTO_H
#define FUZZ_PROTO_H

#include <stdlib.h>
#include <string.h>

#include "proto/message.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t len);

#define FUZZ_PROTO(name) \
	int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t len) \
	{ \
		struct base_buf first = BASE_BUF_INIT, second = BASE_BUF_INIT; \
		struct proto_##name m; \
		if (proto_##name##_decode(bytes, len, &m) < 0) \
			return 0; \
		if (proto_##name##_encode(&m, &first) < 0) \
			abort(); \
		proto_##name##_release(&m); \
		if (proto_##name##_decode(first.data, first.len, &m) < 0 || proto_##name##_encode(&m, &second) < 0) \
			abort(); \
		if (first.len > len || first.len != second.len || memcmp(first.data, second.data, first.len) != 0) \
			abort(); \
		proto_##name##_release(&m); \
		base_buf_release(&first); \
		base_buf_release(&second); \
		return 0; \
	}

#endif
