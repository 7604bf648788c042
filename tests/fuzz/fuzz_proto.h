/* SPDX-License-Identifier: Apache-2.0
 *
 * fuzz_proto: one target a record of proto/. What decodes must encode, and what was encoded must come back the same:
 * the second encoding equals the first (the first may drop what a later version added). Of what is refused as newer, a
 * sentence says why, in plain characters. */
#ifndef FUZZ_PROTO_H
#define FUZZ_PROTO_H

#include <stdlib.h>
#include <string.h>

#include "proto/message.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t len);

static inline int fuzz_refused(const uint8_t *bytes, size_t len, int r)
{
	char text[PROTO_NEWER_BYTES];

	if (r != -BASE_EVERSION)
		return 0;
	proto_newer(bytes, len, text);
	for (size_t i = 0; i == 0 || text[i]; i++)
		if (i == sizeof text || text[i] < 0x20 || text[i] > 0x7e)
			abort();
	return 0;
}

#define FUZZ_PROTO(name) FUZZ_PROTO_IN(name, struct proto_##name)

#define FUZZ_PROTO_IN(name, type) \
	int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t len) \
	{ \
		struct base_buf first = BASE_BUF_INIT, second = BASE_BUF_INIT; \
		type m; \
		int r = proto_##name##_decode(bytes, len, &m); \
		if (r < 0) \
			return fuzz_refused(bytes, len, r); \
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
