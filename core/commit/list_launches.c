/* SPDX-License-Identifier: Apache-2.0
 *
 * list_launches: all launches that a run has had, for a rank 0 that has to refuse an id that was used before. A launch
 * entry names those of before it as snapshots name commits (list_snapshot.c): number k of a run names the launches
 * after number k - (k & -k), and that one's entry. So a list that began at a snapshot reads as many entries as k has
 * bits, and not the whole list. */
#include "core/commit/list_internal.h"

#include "core/base/array.h"
#include "core/base/cleanup.h"

uint64_t list_newest_launch(const struct store_list *l)
{
	return l->nlaunches ? l->launches[l->nlaunches - 1].entry : l->launch_before;
}

static void id_set(struct list_id *id, const char *launch, uint64_t entry)
{
	memcpy(id->launch, launch, sizeof id->launch);
	id->entry = entry;
}

/* Adds what this launch entry names, the newest first. *nth: of the launch that the newer one goes on from, 0: not
 * known. */
static int before_add(struct store_list *l, uint64_t n, const struct proto_entry *e, uint64_t *nth)
{
	if (e->kind != PROTO_ENTRY_LAUNCH || (*nth && e->nth != *nth))
		return -BASE_EDAMAGED;
	if (base_array_room(l->before, l->before_size, l->nbefore + e->nids + 1) < 0)
		return -ENOMEM;
	id_set(&l->before[l->nbefore++], e->launch, n);
	for (size_t i = e->nids; i-- > 0;)
		id_set(&l->before[l->nbefore++], e->ids[i], PROTO_NONE);
	*nth = e->nth - 1 - e->nids;
	return 0;
}

static int before_read(struct store_list *l, struct base_error *err)
{
	uint64_t n = l->launch_before, nth = 0;
	int r = 0;

	l->nbefore = 0;
	while (r == 0 && n != PROTO_NONE) {
		struct proto_entry e = {0};

		r = list_accepted(l, n) ? -ENOENT : list_entry_read(l, n, &e, err);
		if (r == 0)
			r = before_add(l, n, &e, &nth);
		n = e.from;
		proto_entry_release(&e);
	}
	for (size_t i = 0; r == 0 && i < l->nbefore / 2; i++) {
		struct list_id x = l->before[i];

		l->before[i] = l->before[l->nbefore - 1 - i];
		l->before[l->nbefore - 1 - i] = x;
	}
	return r == -ENOENT ? -BASE_EDAMAGED : r;
}

int list_launches_know(struct store_list *l, struct base_error *err)
{
	int r;

	if (l->before_known)
		return 0;
	r = l->store->info.list_2 ? before_read(l, err) : -BASE_EDAMAGED;
	if (r == -BASE_EDAMAGED) {
		l->nbefore = 0;
		return list_reopen(l, err); /* the entries themselves */
	}
	l->before_known = r == 0;
	return r == -ENOMEM ? base_no_memory_for(err, "run %s", l->run) : r;
}

bool list_launch_used(const struct store_list *l, const char *launch)
{
	for (size_t i = 0; i < l->nbefore; i++)
		if (strcmp(l->before[i].launch, launch) == 0)
			return true;
	return false;
}

/* The launch entry of number k, from 1 on. */
static uint64_t launch_entry_of(const struct store_list *l, uint64_t k)
{
	if (k == 0)
		return PROTO_NONE;
	return k > l->nbefore ? l->launches[k - l->nbefore - 1].entry : l->before[k - 1].entry;
}

int list_launch_fill(const struct store_list *l, struct proto_entry *e, proto_launch_id **ret_ids)
{
	uint64_t k = l->nbefore + l->nlaunches + 1, from = k & (k - 1);
	proto_launch_id *ids;

	if (launch_entry_of(l, from) == PROTO_NONE)
		from = 0;
	ids = calloc(k - from, sizeof *ids);
	if (!ids)
		return -ENOMEM;
	e->list_2 = true;
	e->nth = k;
	e->from = launch_entry_of(l, from);
	e->nids = k - 1 - from;
	for (uint64_t i = from; i < k - 1; i++)
		memcpy(ids[i - from], i < l->nbefore ? l->before[i].launch : l->launches[i - l->nbefore].launch,
			sizeof *ids);
	*ret_ids = ids;
	e->ids = (const proto_launch_id *)ids;
	return 0;
}

int list_launch_compare(struct store_list *l, const struct proto_entry *e, bool *ret_same)
{
	struct proto_entry mine = {0};
	base_cleanup_free proto_launch_id *ids = NULL;
	int r = list_launch_fill(l, &mine, &ids);

	if (r < 0)
		return r;
	*ret_same = mine.nth == e->nth && mine.from == e->from && mine.nids == e->nids &&
		(!mine.nids || memcmp(ids, e->ids, mine.nids * sizeof *ids) == 0);
	return 0;
}
