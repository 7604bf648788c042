/* SPDX-License-Identifier: Apache-2.0
 *
 * digest_many_internal: what hashes several messages at once, and what the tests need to try each of them. */
#ifndef CORE_BASE_DIGEST_MANY_INTERNAL_H
#define CORE_BASE_DIGEST_MANY_INTERNAL_H

#include "core/base/digest.h"

enum { BASE_SHA256_WIDTH = 16 }; /* the most messages that one method takes at once */

/* Word i of message m is state[i][m]. */
typedef uint32_t base_sha256_state[8][BASE_SHA256_WIDTH];

struct base_sha256_method {
	unsigned width; /* messages that it takes at once, up to BASE_SHA256_WIDTH */
	/* Hashes `blocks` blocks of 64 bytes of each message m, which are at at[m], into the state. NULL: libcrypto,
	 * which takes one message whole. */
	void (*blocks)(base_sha256_state state, const uint8_t *const at[BASE_SHA256_WIDTH], size_t blocks);
	bool (*has)(void); /* does this processor have it? NULL: each does */
};

/* The least of some times that it takes for `width` messages of 2 KiB; 0 if it does not give what libcrypto gives. */
uint64_t base_sha256_method_ns(const struct base_sha256_method *method);

/* Which method base_sha256_many uses from now on: -1 whichever is quickest here (the default), 0 libcrypto, 1 SHA
 * instructions, 2 AVX2, 3 AVX-512, for any number of messages. For tests: all give the same bytes. 0, or -ENOTSUP when
 * this processor does not have it. */
int base_sha256_select(int which);

#endif
