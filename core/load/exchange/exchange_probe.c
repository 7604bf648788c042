/* SPDX-License-Identifier: Apache-2.0
 *
 * exchange_probe: the rates of storage and link, measured with the first buckets of the load itself.
 *
 * All ranks at once read the first tenth of what they own, at most what their rooms hold. What they get together is
 * what the store gives to all of them, whether the store or the readers are the limit. The time of reading includes
 * checks, decoding and placing, as in a rank that reads for itself; what owners do only for other ranks counts as
 * passing on. Then these buckets are passed on, and placed by the ranks that want them. The rate of reading is the mean
 * of the ranks: a probe takes milliseconds, and a rank that shares a processor may have waited as long for it. The rate
 * of passing on is that of the slowest. All ranks know all times, and decide in the same way. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/base/cleanup.h"
#include "core/base/clock.h"
#include "core/load/exchange/exchange_internal.h"
#include "core/load/exchange/exchange_words.h"

/* ---- the probe ---- */

struct probe_owner { uint64_t all, bytes; uint32_t n; }; /* n: its first buckets that are read for the probe */

/* A tenth of the bytes of each owner, and no more than its rooms take. */
static void probe_count(const struct exchange_plan *p, struct probe_owner *owners)
{
	for (size_t i = 0; i < p->nbuckets; i++)
		owners[p->buckets[i].owner].all += p->buckets[i].bytes;
	for (size_t i = 0; i < p->nbuckets; i++) {
		struct probe_owner *o = &owners[p->buckets[i].owner];

		o->bytes += p->buckets[i].bytes;
		if (p->buckets[i].own < COMM_ROOMS && o->bytes <= base_min(o->all / 10, EXCHANGE_PROBE_BYTES))
			o->n = p->buckets[i].own + 1;
	}
}

int exchange_probe_order(struct load_exchange *x, size_t *ret_n, uint64_t *ret_bytes)
{
	struct exchange_plan *p = &x->plan;
	base_cleanup_free struct probe_owner *owners = calloc(x->comm->size, sizeof *owners);
	struct exchange_bucket *sorted = malloc((p->nbuckets + 1) * sizeof *sorted);
	size_t n = 0;

	*ret_n = 0;
	*ret_bytes = 0;
	if (!owners || !sorted) {
		free(sorted);
		return -ENOMEM;
	}
	probe_count(p, owners);
	for (unsigned pass = 0; pass < 2; pass++) {
		for (size_t i = 0; i < p->nbuckets; i++) {
			const struct exchange_bucket *b = &p->buckets[i];

			if ((b->own < owners[b->owner].n) == (pass == 0))
				sorted[n++] = *b;
			if (pass == 0 && b->own < owners[b->owner].n)
				*ret_bytes += b->bytes;
		}
		*ret_n = pass == 0 ? n : *ret_n;
	}
	free(p->buckets);
	p->buckets = sorted;
	p->buckets_room = p->nbuckets;
	return 0;
}

/* How many buckets of the probe are this rank's; they all need a room at the same time. */
static uint32_t probe_own(const struct load_exchange *x, size_t n, uint64_t *ret_bytes)
{
	uint32_t own = 0;

	*ret_bytes = 0;
	for (size_t i = 0; i < n; i++)
		if (x->plan.buckets[i].owner == x->comm->rank) {
			*ret_bytes += x->plan.buckets[i].bytes;
			own++;
		}
	return own;
}

/* Reads this rank's buckets of the probe. numbers[1]: their bytes; [0]: how long that took; [3]: how long more, only
 * because others are to have them. */
static void probe_read(struct load_exchange *x, size_t n, uint64_t *numbers)
{
	uint64_t from = base_monotonic_ns(), ns;
	uint32_t own = probe_own(x, n, &numbers[1]);
	double for_others;

	pthread_mutex_lock(&x->lock);
	x->own_limit = own;
	pthread_cond_broadcast(&x->work);
	for (uint32_t i = 0; i < own; i++)
		while (!x->ready[i].ready)
			pthread_cond_wait(&x->news, &x->lock);
	pthread_mutex_unlock(&x->lock);
	ns = base_monotonic_ns() - from;
	for_others = (double)atomic_load(&x->pass_ns) / (double)base_max(atomic_load(&x->bucket_ns), 1);
	numbers[3] = (uint64_t)((double)ns * for_others);
	numbers[0] = base_max(ns - base_min(numbers[3], ns), 1);
}

/* Until everything that has arrived is placed. */
static void wait_placed(struct load_exchange *x)
{
	pthread_mutex_lock(&x->lock);
	while (x->placing)
		pthread_cond_wait(&x->news, &x->lock);
	pthread_mutex_unlock(&x->lock);
}

static double per_second(uint64_t bytes, uint64_t ns) { return ns ? (double)bytes * 1e9 / (double)ns : 0; }

static bool probe_decide(struct load_exchange *x, const struct exchange_vote *read, const struct exchange_vote *passed,
	uint64_t probed)
{
	struct load_exchange_measured m = {.distinct = (double)(x->plan.distinct - probed), .ranks = x->comm->size};
	struct load_exchange_times t;
	uint64_t bytes = 0, ns = 0, readers = 0, link_ns = 0, setup_ns = 0;
	bool pays;

	m.wanted = m.distinct * (double)x->plan.wanted / (double)x->plan.distinct;
	for (uint32_t i = 0; i < x->comm->size; i++) {
		bytes += read[i].number[1];
		ns += read[i].number[1] ? read[i].number[0] : 0;
		readers += read[i].number[1] > 0;
		m.reader = base_max((uint64_t)m.reader, (uint64_t)per_second(read[i].number[1], read[i].number[0]));
		setup_ns = base_max(setup_ns, read[i].number[2]);
		link_ns = base_max(link_ns, passed[i].number[0] + read[i].number[3]);
	}
	m.store = per_second(bytes, readers ? ns / readers : 0);
	m.link = per_second(probed, link_ns);
	m.setup = (double)setup_ns / 1e9 * (2 + (double)x->plan.nbuckets / EXCHANGE_ROUND / x->comm->size);
	pays = load_exchange_pays(&m, &t);
	snprintf(x->why, sizeof x->why, "%s: %u ranks want %.1f MiB, of which %.1f MiB differ; %.1f MiB of these were "
		"read at %.0f MiB/s and passed on at %.0f MiB/s; so %.3f s are expected if they share, and %.3f s if "
		"each reads for itself", pays ? "shared" : "not shared", x->comm->size,
		(double)x->plan.wanted / 1048576, (double)x->plan.distinct / 1048576, (double)probed / 1048576,
		m.store / 1048576, m.link / 1048576, t.shared, t.alone);
	return pays;
}

int exchange_probe(struct load_exchange *x, size_t n, uint64_t bytes, bool *ret_shares, struct base_error *err)
{
	base_cleanup_free struct exchange_vote *read = NULL, *passed = NULL;
	uint64_t numbers[EXCHANGE_VOTE_NUMBERS] = {0}, from;
	int r;

	exchange_rooms(x, probe_own(x, n, &numbers[1]));
	r = exchange_agree(x, "memory for a probe", NULL, NULL, err); /* so that all begin together */
	from = base_monotonic_ns();
	if (r == 0)
		r = exchange_agree(x, "a probe", NULL, NULL, err);
	numbers[2] = base_monotonic_ns() - from;
	if (r == 0)
		probe_read(x, n, numbers);
	if (r == 0)
		r = exchange_agree(x, "what was read for a probe", numbers, &read, err);
	from = base_monotonic_ns();
	if (r == 0)
		r = exchange_turns(x, 0, n, err);
	if (r < 0)
		return r;
	wait_placed(x);
	numbers[0] = base_monotonic_ns() - from;
	r = exchange_agree(x, "what was passed on for a probe", numbers, &passed, err);
	if (r == 0)
		*ret_shares = probe_decide(x, read, passed, bytes);
	return r;
}
