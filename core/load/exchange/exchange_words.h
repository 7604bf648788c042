/* SPDX-License-Identifier: Apache-2.0
 *
 * exchange_words: what the ranks of an exchange send each other beside buckets. A peer may be wrong: every length is
 * checked, and texts have no control characters. */
#ifndef CORE_LOAD_EXCHANGE_EXCHANGE_WORDS_H
#define CORE_LOAD_EXCHANGE_EXCHANGE_WORDS_H

#include "core/base/buf.h"
#include "core/base/digest.h"
#include "core/base/error.h"

/* What a rank asks for. It has the digest of the rank's list, which is sent later. */
struct exchange_greeting {
	struct base_error error;         /* .code 0: none */
	uint32_t flags, mode;
	uint8_t store[16];
	struct base_digest manifest, list;
	uint64_t list_len;
	char step[300];                  /* "RUN/NUMBER" */
};
void exchange_greeting_put(struct base_buf *b, const struct exchange_greeting *g);
int exchange_greeting_take(const uint8_t *bytes, uint64_t len, struct exchange_greeting *ret_g); /* -BASE_EFORMAT */
/* Do both ask for the same? Else -EINVAL and what differs. `first` is rank 0's. */
int exchange_greetings_compare(const struct exchange_greeting *first, const struct exchange_greeting *other,
	uint32_t rank, struct base_error *err);

/* What a rank says between two rounds: whether it has failed, and numbers whose meaning depends on the round. */
#define EXCHANGE_VOTE_NUMBERS 4u
struct exchange_vote { struct base_error error; uint64_t number[EXCHANGE_VOTE_NUMBERS]; };
void exchange_vote_put(struct base_buf *b, const struct exchange_vote *v);
int exchange_vote_take(const uint8_t *bytes, uint64_t len, struct exchange_vote *ret_v); /* -BASE_EFORMAT */

#endif
