/* SPDX-License-Identifier: Apache-2.0
 *
 * What the ranks of an exchange send each other. Input: a byte that says what it is, and the message: a greeting, a
 * vote, or two lists, the first as long as the next two bytes say, from which both ranks make a plan.
 * What is accepted is in its bounds, and both plans are equal. */
#include <stdlib.h>
#include <string.h>

#include "core/load/exchange/exchange_internal.h"
#include "core/load/exchange/exchange_words.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void must(bool good)
{
	if (!good)
		abort();
}

static void greeting(const uint8_t *data, size_t size)
{
	struct exchange_greeting g = {0}, again = {0};
	base_cleanup_buf struct base_buf b = BASE_BUF_INIT;
	struct base_error err;

	if (exchange_greeting_take(data, size, &g) < 0)
		return;
	must(g.error.code <= 0 && strlen(g.step) < sizeof g.step && strlen(g.error.text) < sizeof g.error.text);
	exchange_greeting_put(&b, &g);
	must(b.error || exchange_greeting_take(b.data, b.len, &again) == 0);
	must(b.error || exchange_greetings_compare(&g, &again, 1, &err) == 0);
}

static void vote(const uint8_t *data, size_t size)
{
	struct exchange_vote v = {0};

	if (exchange_vote_take(data, size, &v) == 0)
		must(v.error.code <= 0 && strlen(v.error.text) < sizeof v.error.text);
}

static void plan_check(const struct exchange_plan *p)
{
	uint64_t bytes = 0;

	for (size_t i = 0; i < p->nbuckets; i++) {
		const struct exchange_bucket *b = &p->buckets[i];
		uint64_t inside = 0;

		must(b->owner < 2 && b->group < p->ngroups && b->nsegments <= EXCHANGE_BUCKET_SEGMENTS &&
			b->first + b->nsegments <= p->nsegments && b->bytes <= EXCHANGE_BUCKET_BYTES);
		for (uint32_t k = 0; k < b->nsegments; k++) {
			const struct exchange_segment *s = &p->segments[b->first + k];

			must(s->object < p->nobjects && s->n > 0);
			inside += exchange_bytes(p->objects[s->object].key.raw_len, s->first, s->n);
		}
		must(inside == b->bytes);
		bytes += inside;
	}
	must(bytes == p->distinct);
}

static void plan(const uint8_t *data, size_t size)
{
	static const uint32_t ranks[] = {0, 1};
	size_t first = size < 2 ? 0 : base_min(base_get16(data), size - 2);
	const struct exchange_list lists[] = {
		{.bytes = data + 2, .len = first, .ranks = &ranks[0], .nranks = 1},
		{.bytes = data + 2 + first, .len = size < 2 ? 0 : size - 2 - first, .ranks = &ranks[1], .nranks = 1},
	};
	uint64_t sum = 0;
	int said = 0;

	for (uint32_t rank = 0; size >= 2 && rank < 2; rank++) {
		const struct exchange_terms terms = {.rank = rank, .size = 2, .npacks = 3, .small = data[0] & 1};
		struct exchange_plan p;
		struct base_error err = {0};
		int r = exchange_plan_make(lists, 2, &terms, &p, &err);

		must(r == 0 || err.code == r);
		must(rank == 0 || (r == said && (r < 0 || p.sum == sum)));
		if (r == 0 && p.distinct < UINT64_C(1) << 32)
			plan_check(&p);
		said = r;
		sum = p.sum;
		exchange_plan_release(&p);
	}
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	if (size == 0)
		return 0;
	switch (data[0] % 3) {
	case 0:
		greeting(data + 1, size - 1);
		break;
	case 1:
		vote(data + 1, size - 1);
		break;
	default:
		plan(data + 1, size - 1);
	}
	return 0;
}
