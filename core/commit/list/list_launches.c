/* SPDX-License-Identifier: Apache-2.0
 *
 * list_launches: all launches that a run has had, for a rank 0 that has to refuse an id that was used before. A launch
 * entry names those of before it as snapshots name commits (list_snapshot.c): number k of a run names the launches
 * after number k - (k & -k), and that one's entry. So a list that began at a snapshot reads as many entries as k has
 * bits, and not the whole list. */
#include "core/commit/list/list_internal.h"

#include "core/base/array.h"
#include "core/base/cleanup.h"

uint64_t list_newest_launch(const struct commit_list *l)
{
	return l->nlaunches ? l->launches[l->nlaunches - 1].entry : l->launch_before;
}

bool commit_list_launch_newest(const struct commit_list *l, const char *launch)
{
	const char *newest = l->nlaunches ? l->launches[l->nlaunches - 1].launch
		: l->nbefore ? l->before[l->nbefore - 1].launch : "";

	return strcmp(newest, launch) == 0;
}

static void id_set(struct list_id *id, const char *launch, uint64_t entry)
{
	memcpy(id->launch, launch, sizeof id->launch);
	id->entry = entry;
}

/* Adds what this launch entry names, the newest first. *nth: of the launch that the newer one goes on from, 0: not
 * known. */
static int before_add(struct commit_list *l, uint64_t n, const struct proto_entry *e, uint64_t *nth)
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

/* *ret_bad: the entry that cannot be used, if it is -BASE_EDAMAGED. */
static int before_read(struct commit_list *l, uint64_t *ret_bad, struct base_error *err)
{
	uint64_t n = l->launch_before, nth = 0;
	int r = 0;

	l->nbefore = 0;
	while (r == 0 && n != PROTO_NONE) {
		struct proto_entry e = {0};

		*ret_bad = n;
		r = list_accepted(l, n) ? -ENOENT : list_entry_read(l, n, &e, err);
		if (r == 0)
			r = before_add(l, n, &e, &nth);
		n = e.from;
		proto_entry_release(&e);
	}
	for (size_t i = 0; i < l->nbefore / 2; i++) {
		struct list_id x = l->before[i];

		l->before[i] = l->before[l->nbefore - 1 - i];
		l->before[l->nbefore - 1 - i] = x;
	}
	return r == -ENOENT ? -BASE_EDAMAGED : r;
}

int list_launches_know(struct commit_list *l, struct base_error *err)
{
	uint64_t bad;
	int r;

	if (l->before_known)
		return 0;
	r = l->store->info.list_2 ? before_read(l, &bad, err) : -BASE_EDAMAGED;
	if (r == -BASE_EDAMAGED) {
		l->nbefore = 0;
		return commit_list_reopen(l, err); /* the entries themselves */
	}
	l->before_known = r == 0;
	return r == -ENOMEM ? base_no_memory_for(err, "run %s", l->run) : r;
}

/* The list begins at a head: there is nothing before it to be read instead. An entry that cannot be used is damage;
 * those that it goes on from are not known then, as if each had been accepted as damaged. */
int list_launches_start(struct commit_list *l, struct base_error *err)
{
	struct base_error why = {0};
	uint64_t bad;
	int r = before_read(l, &bad, &why);

	if (r == -BASE_EDAMAGED && l->seen.number > l->first)
		return r; /* it was collected meanwhile */
	l->before_known = r == 0 || r == -BASE_EDAMAGED;
	if (r == -BASE_EDAMAGED && !list_accepted(l, bad)) {
		r = list_skip_add(l, bad, 1, why.code ? why.text : "it is missing, or no launch entry that later ones "
			"can go on from");
		l->unwarned = true;
	}
	if (r == -ENOMEM)
		return base_no_memory_for(err, "run %s", l->run);
	return l->before_known ? 0 : base_error_set(err, r, "%s", why.text);
}

const struct list_id *list_launch_before(const struct commit_list *l, const char name[static 16])
{
	for (size_t i = l->nbefore; i-- > 0;)
		if (memcmp(l->before[i].launch, name, 16) == 0)
			return &l->before[i];
	return NULL;
}

bool commit_list_launch_used(const struct commit_list *l, const char *launch)
{
	return list_launch_before(l, launch) != NULL;
}

/* The launch entry of number k, from 1 on. */
static uint64_t launch_entry_of(const struct commit_list *l, uint64_t k)
{
	if (k == 0)
		return PROTO_NONE;
	return k > l->nbefore ? l->launches[k - l->nbefore - 1].entry : l->before[k - 1].entry;
}

int list_launch_fill(const struct commit_list *l, struct proto_entry *e, proto_launch_id **ret_ids)
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

int list_launch_compare(struct commit_list *l, const struct proto_entry *e, bool *ret_same)
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
