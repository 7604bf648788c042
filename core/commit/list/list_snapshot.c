/* SPDX-License-Identifier: Apache-2.0
 *
 * list_snapshot: snapshots, read and made (docs/format/list.md, "Snapshot").
 *
 * Entry 64 n is a snapshot. It goes on from that at 64 (n - (n & -n)), where n & -n is the lowest bit of n: it names
 * the commits since then that are visible, and those of before that are not any more. What is visible at a snapshot is
 * put together from its chain, itself and those that it goes on from, one after another: as many as n has bits. A
 * commit is named by one snapshot of each length at most, so all snapshots together take O(n log n) bytes.
 *
 *     n          1   2   3   4   5   6   7   8
 *     goes on   (0) (0)  2  (0)  4   4   6  (0)        (0): it names all that is visible
 *
 * A writer goes on only from a snapshot whose whole chain it knows to count. So once an entry is accepted as damaged,
 * no later snapshot needs it. In a store without the word "list-2" each snapshot names all.
 *
 * A list may be opened for its newest steps only. Then it reads the newest snapshot and not its chain: of the commits
 * before `rest`, a snapshot of that chain, it knows no more than the highest step that one of them shows, `older`.
 * rest_read reads the chain, as far down as a caller needs: to its end, or until `rest` is low enough.
 *
 * A snapshot that goes on from F says what is behind F, and F's chain has to count. F = n - (n & -n) is in the chain of
 * snapshot n - 1, and those between the two name about as many commits as n does. So a writer reads its chain until
 * `rest` is F or lower: for odd n it reads nothing. The writer of the snapshot above `rest` knew that the chain from
 * there on counts: no accept entry before it names one of these, and a later one makes the list begin anew
 * (apply_accept). If commits of the rest went away, it reads on until it is known whether they were visible, and which
 * step is the highest (rest_enough). */
#include "core/commit/list/list_internal.h"

#include "core/base/array.h"
#include "core/base/bisect.h"
#include "core/base/cleanup.h"
#include "core/base/clock.h"

/* ---- a chain ---- */

static void chain_release(struct list_chain *c)
{
	for (size_t i = 0; i < c->n; i++)
		list_hold_drop(c->all[i]);
	free(c->all);
}

static int chain_add(struct list_chain *c, struct list_hold *h)
{
	if (base_array_more(c->all, c->n) < 0)
		return -ENOMEM;
	h->users++;
	c->all[c->n++] = h;
	return 0;
}

/* Reads the snapshot `from`, which has to have that digest. */
static int chain_next(struct commit_list *l, uint64_t from, const struct base_digest *self, struct list_chain *c,
	struct base_error *err)
{
	struct list_hold *h = calloc(1, sizeof *h);
	int r;

	if (!h)
		return -ENOMEM;
	h->users = 1;
	r = list_accepted(l, from) ? -ENOENT : list_entry_read(l, from, &h->entry, err);
	if (r == 0 && (h->entry.kind != PROTO_ENTRY_SNAPSHOT || !base_digest_equal(&h->entry.self, self)))
		r = -BASE_EDAMAGED;
	if (r == 0)
		r = chain_add(c, h);
	list_hold_drop(h);
	return r == -ENOENT ? -BASE_EDAMAGED : r;
}

/* Reads on from snapshot `from` to the oldest of its chain that is above `until`. -BASE_EDAMAGED: one of them,
 * l->broken, is damaged. */
static int chain_read(struct commit_list *l, uint64_t from, uint64_t until, struct base_digest self,
	struct list_chain *c, struct base_error *err)
{
	int r = 0;

	while (r == 0 && from > until) {
		l->broken = from;
		r = chain_next(l, from, &self, c, err);
		if (r == 0) {
			const struct proto_entry *e = &c->all[c->n - 1]->entry;

			from = e->from;
			self = e->from_digest;
		}
	}
	return r;
}

/* ---- what a chain shows ---- */

struct row { const struct proto_live *live; struct list_hold *hold; };

struct rows {
	struct row *all;
	size_t n, room;
	uint64_t *dead;         /* commit entries that went away, ascending */
	size_t ndead, dead_room;
};

static void rows_release(struct rows *x)
{
	free(x->all);
	free(x->dead);
}

static int row_compare(const void *a, const void *b)
{
	const struct proto_live *x = ((const struct row *)a)->live, *y = ((const struct row *)b)->live;

	if (x->commit.step != y->commit.step)
		return x->commit.step < y->commit.step ? -1 : 1;
	return (x->entry > y->entry) - (x->entry < y->entry);
}

bool list_number_in(const uint64_t *all, size_t n, uint64_t number)
{
	size_t at = base_bisect(i, 0, n, all[i] < number);

	return at < n && all[at] == number;
}

static int rows_dead(struct rows *x, const struct list_chain *c, const struct commit_list *l)
{
	size_t n = l->ndropped;

	for (size_t i = 0; i < c->n; i++)
		n += c->all[i]->entry.ngone;
	if (base_array_room(x->dead, x->dead_room, n) < 0)
		return -ENOMEM;
	for (size_t i = 0; i < l->ndropped; i++)
		x->dead[x->ndead++] = l->dropped[i].entry;
	for (size_t i = 0; i < c->n; i++)
		for (size_t k = 0; k < c->all[i]->entry.ngone; k++)
			x->dead[x->ndead++] = c->all[i]->entry.gone[k];
	if (x->ndead)
		qsort(x->dead, x->ndead, sizeof *x->dead, list_number_order);
	return 0;
}

/* The visible commits that the chain names, by ascending entry. */
static int rows_of(struct rows *x, const struct list_chain *c, const struct commit_list *l)
{
	if (rows_dead(x, c, l) < 0)
		return -ENOMEM;
	for (size_t i = c->n; i-- > 0;) {
		const struct proto_entry *e = &c->all[i]->entry;

		if (base_array_room(x->all, x->room, x->n + e->nlive) < 0)
			return -ENOMEM;
		for (size_t k = 0; k < e->nlive; k++)
			if (!list_number_in(x->dead, x->ndead, e->live[k].entry))
				x->all[x->n++] = (struct row){&e->live[k], c->all[i]};
	}
	return 0;
}

/* ---- what is known of snapshots and of what went away ---- */

int list_node_reserve(struct commit_list *l, size_t more)
{
	return base_array_room(l->nodes, l->nodes_size, l->nnodes + more);
}

void list_node_add(struct commit_list *l, uint64_t n, const struct proto_entry *e)
{
	l->nodes[l->nnodes++] = (struct list_node){n, e->from, e->self, e->from_digest};
}

const struct list_node *list_node_find(const struct commit_list *l, uint64_t n)
{
	size_t at = base_bisect(i, 0, l->nnodes, l->nodes[i].entry < n);

	return at < l->nnodes && l->nodes[at].entry == n ? &l->nodes[at] : NULL;
}

/* The digest of snapshot n, which was read or is the one that the rest ends with; NULL. */
static const struct base_digest *snapshot_digest(const struct commit_list *l, uint64_t n)
{
	const struct list_node *x = list_node_find(l, n);

	return x ? &x->self : n && n == l->rest ? &l->nodes[0].from_digest : NULL;
}

bool commit_list_snapshot_whole(const struct commit_list *l, uint64_t n)
{
	const struct base_digest *self = snapshot_digest(l, n), *said = self;

	while (self && base_digest_equal(self, said) && !list_accepted(l, n)) {
		const struct list_node *x = list_node_find(l, n);

		if (!x || !x->from) /* the rest counts, as the writer of the one above it knew */
			return true;
		said = &x->from_digest;
		n = x->from;
		self = snapshot_digest(l, n);
	}
	return false;
}

int list_dropped_reserve(struct commit_list *l, size_t more)
{
	return base_array_room(l->dropped, l->dropped_size, l->ndropped + more);
}

void list_dropped_add(struct commit_list *l, uint64_t entry, uint64_t at)
{
	l->dropped[l->ndropped++] = (struct list_dropped){entry, at};
}

/* What the snapshots of the chain say themselves goes before what is known already: from older to newer. There is
 * room. */
static void chain_known(struct commit_list *l, const struct list_chain *c, size_t ngone)
{
	size_t at = 0;

	memmove(l->nodes + c->n, l->nodes, l->nnodes * sizeof *l->nodes);
	if (l->ndropped)
		memmove(l->dropped + ngone, l->dropped, l->ndropped * sizeof *l->dropped);
	for (size_t i = c->n; i-- > 0;) {
		const struct list_hold *h = c->all[i];

		l->nodes[c->n - 1 - i] = (struct list_node){h->entry.number, h->entry.from, h->entry.self,
			h->entry.from_digest};
		for (size_t k = 0; k < h->entry.ngone; k++)
			l->dropped[at++] = (struct list_dropped){h->entry.gone[k], h->entry.number};
	}
	l->nnodes += c->n;
	l->ndropped += ngone;
}

static int chain_known_reserve(struct commit_list *l, const struct list_chain *c, size_t *ret_ngone)
{
	*ret_ngone = 0;
	for (size_t i = 0; i < c->n; i++)
		*ret_ngone += c->all[i]->entry.ngone;
	return list_node_reserve(l, c->n) < 0 || list_dropped_reserve(l, *ret_ngone) < 0 ? -ENOMEM : 0;
}

/* ---- starting from a snapshot ---- */

static void rows_show(struct commit_list *l, const struct rows *x)
{
	for (size_t i = 0; i < x->n; i++)
		list_attempt_committed(l, x->all[i].live->commit.attempt, x->all[i].live->entry);
	if (x->n)
		qsort(x->all, x->n, sizeof *x->all, row_compare);
	for (size_t i = 0; i < x->n; i++) /* each behind all others: nothing is moved */
		list_step_set(l, x->all[i].live->entry, &x->all[i].live->commit, x->all[i].hold);
	if (x->n)
		qsort(l->commits, l->ncommits, sizeof *l->commits, list_number_order);
}

/* Its steps take the place of what is visible. Attempts keep what is known of them: a snapshot decides nothing. */
static int chain_adopt(struct commit_list *l, const struct list_chain *c)
{
	struct list_facts facts = {0}, known_facts;
	struct rows x = {0};
	size_t ngone, known = l->ndropped;
	int r;

	l->ndropped = 0; /* what went away in a list with a gap is not known any more */
	r = rows_of(&x, c, l);
	if (r == 0 && (chain_known_reserve(l, c, &ngone) < 0 || list_attempts_reserve(l, x.n) < 0 ||
		list_steps_reserve(l, x.n, true) < 0 || list_facts_chain_reserve(&facts, c) < 0))
		r = -ENOMEM;
	if (r == 0) {
		list_facts_chain(&facts, c, x.dead, x.ndead);
		list_facts_policy(&facts, c->all[0]);
		known_facts = l->facts;
		l->facts = facts;
		facts = known_facts; /* released below */
		l->gap = false;
		l->nnodes = 0;
		l->rest = 0;
		list_steps_clear(l);
		chain_known(l, c, ngone);
		rows_show(l, &x);
	} else {
		l->ndropped = known;
	}
	list_facts_release(&facts);
	rows_release(&x);
	return r;
}

int list_adopt(struct commit_list *l, struct list_hold *h, bool newest, struct base_error *err)
{
	struct list_chain c = {0};
	int r = chain_add(&c, h);

	if (r == 0 && !newest)
		r = chain_read(l, h->entry.from, 0, h->entry.from_digest, &c, err);
	if (r == 0)
		r = chain_adopt(l, &c);
	if (r == 0 && newest && h->entry.from) {
		l->rest = h->entry.from;
		l->older = h->entry.older;
	}
	chain_release(&c);
	return r;
}

/* ---- the rest of a list that was opened for its newest steps ---- */

/* Was it visible at the newest snapshot of the chain? */
static bool chain_shows(const struct list_chain *c, uint64_t entry)
{
	bool shown = false;

	for (size_t i = 0; i < c->n; i++) {
		const struct proto_entry *e = &c->all[i]->entry;
		size_t at = base_bisect(k, 0, e->nlive, e->live[k].entry < entry);

		if (list_number_in(e->gone, e->ngone, entry))
			return false;
		shown |= at < e->nlive && e->live[at].entry == entry;
	}
	return shown;
}

static int gone_compare(const void *a, const void *b)
{
	const struct list_dropped *x = a, *y = b;

	if (x->entry != y->entry)
		return x->entry < y->entry ? -1 : 1;
	return (x->at > y->at) - (x->at < y->at);
}

/* A removal of an entry that was not visible changed nothing. Of what is in the rest still, that is not known. */
static void rest_gone(struct commit_list *l, const struct list_chain *c, uint64_t rest)
{
	size_t n = 0;

	if (l->ndropped)
		qsort(l->dropped, l->ndropped, sizeof *l->dropped, gone_compare);
	for (size_t i = 0; i < l->ndropped; i++)
		if ((n == 0 || l->dropped[n - 1].entry != l->dropped[i].entry) &&
			(l->dropped[i].entry > l->rest || l->dropped[i].entry < rest ||
				chain_shows(c, l->dropped[i].entry)))
			l->dropped[n++] = l->dropped[i];
	l->ndropped = n;
}

/* The steps of the rest, and those that are known. Of two under one number the newer one is visible. */
static void rest_merge(struct commit_list *l, struct rows *x, struct commit_list_step *steps, struct list_hold **holds)
{
	size_t i = 0, j = 0, n = 0;

	while (i < x->n || j < l->nsteps) {
		const struct proto_live *live = i < x->n ? x->all[i].live : NULL;

		if (live && (j == l->nsteps || live->commit.step < l->steps[j].step)) {
			steps[n] = (struct commit_list_step){live->commit.step, live->entry, live->commit};
			holds[n] = x->all[i++].hold;
			holds[n++]->users++;
			continue;
		}
		i += live && live->commit.step == l->steps[j].step;
		steps[n] = l->steps[j];
		holds[n++] = l->holds[j++];
	}
	free(l->steps);
	free(l->holds);
	l->steps = steps;
	l->holds = holds;
	l->nsteps = n;
}

/* By ascending step; of two commits of one step the newer one, as elsewhere. */
static void rows_one_each(struct rows *x)
{
	size_t n = 0;

	for (size_t i = 0; i < x->n; i++) {
		n -= n && x->all[n - 1].live->commit.step == x->all[i].live->commit.step;
		x->all[n++] = x->all[i];
	}
	x->n = n;
}

static int rest_join(struct commit_list *l, struct rows *x, const struct list_chain *c)
{
	const struct proto_entry *oldest = &c->all[c->n - 1]->entry;
	size_t all = x->n + l->nsteps, ngone;
	struct commit_list_step *steps = calloc(all + 1, sizeof *steps);
	struct list_hold **holds = calloc(all + 1, sizeof *holds);

	if (!steps || !holds || list_attempts_reserve(l, x->n) < 0 || chain_known_reserve(l, c, &ngone) < 0 ||
		list_facts_chain_reserve(&l->facts, c) < 0 ||
		base_array_room(l->commits, l->commits_size, l->ncommits + x->n) < 0) {
		free(steps);
		free(holds);
		return -ENOMEM;
	}
	for (size_t i = 0; i < x->n; i++) {
		const struct proto_live *live = x->all[i].live;

		list_attempt_committed(l, live->commit.attempt, live->entry);
		l->commits[l->ncommits++] = (struct list_commit_key){live->entry, live->commit.step};
	}
	if (x->n) {
		qsort(l->commits, l->ncommits, sizeof *l->commits, list_number_order);
		qsort(x->all, x->n, sizeof *x->all, row_compare);
		rows_one_each(x);
	}
	list_facts_chain(&l->facts, c, x->dead, x->ndead);
	rest_gone(l, c, oldest->from);
	chain_known(l, c, ngone);
	rest_merge(l, x, steps, holds);
	l->steps_size = all + 1;
	l->rest = oldest->from;
	l->older = oldest->older;
	return 0;
}

/* Reads of the rest what snapshots above `until` say; 0: all. May read the list anew (commit_list_reopen). */
static int rest_read(struct commit_list *l, uint64_t until, struct base_error *err)
{
	struct list_chain c = {0};
	struct rows x = {0};
	int r;

	if (l->rest <= until)
		return 0;
	r = chain_read(l, l->rest, until, l->nodes[0].from_digest, &c, err);
	if (r == 0)
		r = rows_of(&x, &c, l);
	if (r == 0) {
		list_steps_settle(l);
		r = rest_join(l, &x, &c);
	}
	rows_release(&x);
	chain_release(&c);
	if (r == -BASE_EDAMAGED || list_leaves_out(l, r))
		r = commit_list_reopen(l, err); /* entry by entry */
	return r == -ENOMEM ? base_no_memory_for(err, "run %s", l->run) : r;
}

int commit_list_know_step(struct commit_list *l, uint64_t step, struct base_error *err)
{
	if (!l->rest || l->older == PROTO_NONE || step > l->older || commit_list_find(l, step))
		return 0;
	return rest_read(l, 0, err);
}

int commit_list_know_entry(struct commit_list *l, uint64_t entry, struct base_error *err)
{
	return rest_read(l, entry, err); /* a snapshot above it names it, and none below says that it went away */
}

int commit_list_know_below(struct commit_list *l, uint64_t step, struct base_error *err)
{
	size_t n = base_bisect(i, 0, l->nsteps, l->steps[i].step < step);

	if (!l->rest || l->older == PROTO_NONE || (n && l->steps[n - 1].step >= l->older))
		return 0;
	return rest_read(l, 0, err);
}

int commit_list_know_all(struct commit_list *l, struct base_error *err) { return rest_read(l, 0, err); }

int list_know_newest(struct commit_list *l, struct base_error *err)
{
	if (!l->rest || l->older == PROTO_NONE || (l->nsteps && l->steps[l->nsteps - 1].step >= l->older))
		return 0;
	return rest_read(l, 0, err);
}

/* ---- making one ---- */

/* The snapshot of entry n's number without its lowest bit; 0: none. */
static uint64_t from_next(uint64_t n)
{
	uint64_t i = n / COMMIT_SNAPSHOT_EVERY;

	return (i & (i - 1)) * COMMIT_SNAPSHOT_EVERY;
}

/* The snapshot that the one at entry n goes on from; 0: none. */
static uint64_t from_choose(const struct commit_list *l, uint64_t n)
{
	if (!l->store->info.list_2)
		return 0;
	do
		n = from_next(n);
	while (n && !commit_list_snapshot_whole(l, n));
	return n;
}

/* The highest known step that a commit before entry n makes visible; PROTO_NONE. */
static uint64_t older_known(const struct commit_list *l, uint64_t n)
{
	for (size_t i = l->nsteps; i-- > 0;)
		if (l->steps[i].entry < n)
			return l->steps[i].step;
	return PROTO_NONE;
}

/* Is enough of the rest known for a snapshot that goes on from `from`: which of its commits went away, and its highest
 * step? */
static bool rest_enough(const struct commit_list *l, uint64_t from)
{
	bool gone = false;

	if (from < l->rest || !commit_list_snapshot_whole(l, from) || !list_facts_enough(l, from))
		return false;
	for (size_t i = 0; i < l->ndropped; i++) {
		if (l->dropped[i].entry >= l->rest)
			continue;
		if (!list_node_find(l, l->dropped[i].at))
			return false; /* no snapshot says it: perhaps it was removed before */
		gone |= l->dropped[i].at > l->nodes[0].entry;
	}
	return !gone || older_known(l, from) + 1 >= l->older + 1; /* PROTO_NONE is the lowest */
}

int list_snapshot_know(struct commit_list *l, struct base_error *err)
{
	uint64_t from = from_next(l->next);
	int r = 0;

	while (r == 0 && l->rest && !rest_enough(l, from))
		r = rest_read(l, base_min(from, l->rest - 1), err);
	return r;
}

void list_made_release(struct list_made *m)
{
	free(m->live);
	free(m->gone);
	free(m->facts);
}

static void made_live(const struct commit_list *l, struct proto_entry *e, struct list_made *m)
{
	for (size_t i = 0; i < l->nsteps; i++) {
		const struct commit_list_step *s = &l->steps[i];

		if (s->entry > e->from || !e->from)
			m->live[e->nlive++] = (struct proto_live){.entry = s->entry, .commit = s->commit};
	}
	if (e->nlive)
		qsort(m->live, e->nlive, sizeof *m->live, list_number_order);
	e->live = m->live;
}

static void made_gone(const struct commit_list *l, struct proto_entry *e, struct list_made *m)
{
	for (size_t i = 0; i < l->ndropped; i++)
		if (l->dropped[i].entry < e->from && l->dropped[i].at > e->from)
			m->gone[e->ngone++] = l->dropped[i].entry;
	if (e->ngone)
		qsort(m->gone, e->ngone, sizeof *m->gone, list_number_order);
	e->gone = m->gone;
}

int list_snapshot_make(const struct commit_list *l, struct proto_entry *e, struct list_made *m)
{
	const struct base_digest *from = snapshot_digest(l, e->from);

	m->live = calloc(l->nsteps + 1, sizeof *m->live);
	m->gone = calloc(l->ndropped + 1, sizeof *m->gone);
	if (!m->live || !m->gone)
		return -ENOMEM;
	e->list_2 = l->store->info.list_2;
	e->older = base_max(older_known(l, e->from) + 1, l->rest ? l->older + 1 : 0) - 1; /* PROTO_NONE + 1 is 0 */
	e->newest_launch = list_newest_launch(l);
	e->from_digest = from ? *from : (struct base_digest){0};
	made_live(l, e, m);
	made_gone(l, e, m);
	return list_facts_make(l, e, &m->facts);
}

int list_snapshot_put(struct commit_list *l, struct base_error *err)
{
	struct proto_entry e = {.kind = PROTO_ENTRY_SNAPSHOT, .time_ns = base_realtime_ns(), .host = store_hostname(),
		.from = from_choose(l, l->next)};
	base_cleanup(list_made_release) struct list_made m = {0};

	if (list_snapshot_make(l, &e, &m) < 0)
		return base_no_memory_for(err, "run %s", l->run);
	return list_put_number(l, &e, err);
}

/* ---- comparing one ---- */

bool commit_equal(const struct proto_commit *a, const struct proto_commit *b)
{
	if (a->step != b->step || !base_digest_equal(&a->manifest, &b->manifest) || strcmp(a->attempt, b->attempt) != 0
		|| a->time_ns != b->time_ns || a->replaces != b->replaces || a->tensors != b->tensors ||
		a->bytes != b->bytes || a->new_bytes != b->new_bytes ||
		a->extra_len != b->extra_len || (a->extra_len && memcmp(a->extra, b->extra, a->extra_len) != 0))
		return false;
	return proto_attributes_equal(a->attributes, a->nattributes, b->attributes, b->nattributes);
}

bool list_snapshot_equal(const struct proto_entry *a, const struct proto_entry *b)
{
	if (a->nlive != b->nlive || a->ngone != b->ngone || !base_digest_equal(&a->from_digest, &b->from_digest) ||
		(a->list_2 && (a->older != b->older || a->newest_launch != b->newest_launch)))
		return false;
	for (size_t i = 0; i < a->nlive; i++)
		if (a->live[i].entry != b->live[i].entry || !commit_equal(&a->live[i].commit, &b->live[i].commit))
			return false;
	if (!list_facts_equal(&a->facts, &b->facts))
		return false;
	return !a->ngone || memcmp(a->gone, b->gone, a->ngone * sizeof *a->gone) == 0;
}

int list_snapshot_compare(struct commit_list *l, const struct proto_entry *e, bool *ret_same)
{
	base_cleanup(list_made_release) struct list_made m = {0};
	struct proto_entry mine = {.from = e->from};

	*ret_same = true;
	if (e->from && e->from <= l->head.number && !list_node_find(l, l->head.number))
		return 0; /* the mark stands in for that chain: what it said of commits that went away is not known */
	list_steps_settle(l);
	if (list_snapshot_make(l, &mine, &m) < 0)
		return -ENOMEM;
	*ret_same = list_snapshot_equal(&mine, e);
	return 0;
}
