/* SPDX-License-Identifier: Apache-2.0
 *
 * list_facts: the facts of steps, as entries and snapshots say them (docs/format/list.md, "Facts"); list_facts_put.c
 * changes it.
 *
 * A row says the whole state of one commit, and is kept by the commit's number, whether the commit is known here or
 * not: a list that was opened for its newest steps knows rows of commits in the rest. A caller asks for a commit that
 * is visible, and all its facts are behind it: a list that knows the commit knows that, too.
 *
 * A tag is one step's. The step of which it is said last has it, and the one that had it loses it: `tags` has for each
 * tag whose it is. If the other may be in the rest, it loses the tag when the rest is read (list_facts_chain): a tag
 * that newer entries have said is not taken from an older snapshot any more. A snapshot says the state of a step that
 * has lost a tag so, and so needs to know it (`unsure`, list_facts_enough).
 *
 * Nothing here goes through all facts for one entry or one row: 10,000 entries of 1,000 rows each cost what they have
 * in bytes. */
#include "core/commit/list/list_internal.h"

#include <stdlib.h>

#include "core/base/array.h"

/* ---- by commit, by tag ---- */

static struct list_fact *fact_find(const struct list_facts *f, uint64_t entry)
{
	uint32_t hash, i;
	size_t at = 0;

	if (!f->n)
		return NULL;
	hash = base_table_hash_number(entry);
	while ((i = base_table_next(&f->by_entry, hash, &at)) != BASE_TABLE_NONE)
		if (f->all[i].is.entry == entry)
			return &f->all[i];
	return NULL;
}

static struct list_tag *tag_find(const struct list_facts *f, const char *name)
{
	uint32_t hash, i;
	size_t at = 0;

	if (!f->ntags)
		return NULL;
	hash = base_table_hash(name, strlen(name));
	while ((i = base_table_next(&f->by_tag, hash, &at)) != BASE_TABLE_NONE)
		if (strcmp(f->tags[i].name, name) == 0)
			return &f->tags[i];
	return NULL;
}

static void tag_add(struct list_facts *f, const char *name, uint64_t owner, uint64_t first)
{
	struct list_tag *t = &f->tags[f->ntags];

	*t = (struct list_tag){.owner = owner, .first = first};
	memcpy(t->name, name, strnlen(name, PROTO_TAG_MAX));
	base_table_add(&f->by_tag, base_table_hash(name, strlen(name)), (uint32_t)f->ntags++);
}

int list_facts_reserve(struct list_facts *f, const struct proto_step_facts *rows, size_t n)
{
	size_t tags = 0;

	for (size_t i = 0; i < n; i++)
		tags += rows[i].ntags;
	if (n == 0)
		return 0;
	if (base_array_room(f->all, f->size, f->n + n) < 0 || base_table_reserve(&f->by_entry, n) < 0)
		return -ENOMEM;
	return base_array_room(f->tags, f->tags_size, f->ntags + tags) < 0 || base_table_reserve(&f->by_tag, tags) < 0
		? -ENOMEM : 0;
}

/* ---- entries ---- */

static struct list_fact *fact_add(struct list_facts *f, uint64_t entry)
{
	struct list_fact *x = &f->all[f->n];

	*x = (struct list_fact){.is.entry = entry};
	base_table_add(&f->by_entry, base_table_hash_number(entry), (uint32_t)f->n++);
	return x;
}

static void fact_set(struct list_fact *x, uint64_t at, const struct proto_step_facts *is, struct list_hold *h)
{
	uint64_t entry = x->is.entry;

	if (h)
		h->users++;
	list_hold_drop(x->hold);
	*x = (struct list_fact){*is, at, h};
	x->is.entry = entry;
}

/* The array is of the entry that was decoded for this list, and of this fact alone. */
static void fact_tag_remove(struct list_fact *x, size_t i)
{
	const char **tags = (const char **)(uintptr_t)x->is.tags;

	memmove(&tags[i], &tags[i + 1], (--x->is.ntags - i) * sizeof *tags);
}

static void fact_untag(struct list_facts *f, uint64_t entry, const char *name, uint64_t at)
{
	struct list_fact *x = fact_find(f, entry);

	for (size_t i = 0; x && i < x->is.ntags; i++)
		if (strcmp(x->is.tags[i], name) == 0) {
			fact_tag_remove(x, i);
			x->at = at;
			return;
		}
}

/* Its tags are no one's. */
static void fact_tags_leave(struct list_facts *f, const struct list_fact *x)
{
	for (size_t i = 0; i < x->is.ntags; i++) {
		struct list_tag *t = tag_find(f, x->is.tags[i]);

		if (t && t->owner == x->is.entry)
			t->owner = PROTO_NONE;
	}
}

void list_facts_say(struct commit_list *l, uint64_t entry, const struct proto_step_facts *row, uint64_t at,
	struct list_hold *h)
{
	struct list_facts *f = &l->facts;
	struct list_fact *x = fact_find(f, entry);

	if (x)
		fact_tags_leave(f, x);
	else
		x = fact_add(f, entry);
	fact_set(x, at, row, h);
	for (size_t i = 0; i < row->ntags; i++) {
		struct list_tag *t = tag_find(f, row->tags[i]);

		if (!t) {
			tag_add(f, row->tags[i], entry, at);
			f->unsure |= l->rest != 0;
			continue;
		}
		if (t->owner != PROTO_NONE)
			fact_untag(f, t->owner, t->name, at);
		t->owner = entry;
	}
}

void list_facts_drop(struct commit_list *l, uint64_t entry, uint64_t at)
{
	struct list_fact *x = fact_find(&l->facts, entry);

	if (!x)
		return;
	fact_tags_leave(&l->facts, x);
	fact_set(x, at, &(struct proto_step_facts){0}, NULL);
}

int list_facts_know(struct commit_list *l, const struct proto_facts *facts, struct base_error *err)
{
	int r = 0;

	for (size_t i = 0; r == 0 && i < facts->nsteps; i++)
		if (facts->steps[i].ntags)
			r = commit_list_know_entry(l, facts->steps[i].entry, err);
	return r;
}

static void policy_set(struct list_facts *f, struct list_hold *h, uint64_t at)
{
	h->users++;
	list_hold_drop(f->policy);
	f->policy = h;
	f->policy_at = at;
}

int list_facts_apply(struct commit_list *l, uint64_t n, struct list_hold *h)
{
	const struct proto_facts *said = &h->entry.facts;

	if (list_facts_reserve(&l->facts, said->steps, said->nsteps) < 0)
		return -ENOMEM;
	for (size_t i = 0; i < said->nsteps; i++) {
		const struct proto_step_facts *row = &said->steps[i];

		if (row->entry < l->rest || commit_list_entry_live(l, row->entry))
			list_facts_say(l, row->entry, row, n, h);
	}
	if (said->policed)
		policy_set(&l->facts, h, n);
	return 0;
}

/* ---- snapshots ---- */

int list_facts_chain_reserve(struct list_facts *f, const struct list_chain *c)
{
	size_t n = f->n, ntags = f->ntags;
	int r = 0;

	for (size_t i = 0; i < c->n && r == 0; i++) {
		const struct proto_facts *said = &c->all[i]->entry.facts;

		r = list_facts_reserve(f, said->steps, said->nsteps);
		f->n += said->nsteps; /* as if it had them: the next needs room behind these */
		for (size_t k = 0; k < said->nsteps; k++)
			f->ntags += said->steps[k].ntags;
	}
	if (r == 0 && (base_table_reserve(&f->by_entry, f->n - n) < 0 ||
		base_table_reserve(&f->by_tag, f->ntags - ntags) < 0))
		r = -ENOMEM;
	f->n = n;
	f->ntags = ntags;
	return r;
}

/* A row of an older snapshot than all that is known. */
static void chain_say(struct list_facts *f, const struct proto_step_facts *row, struct list_hold *h)
{
	uint64_t at = h->entry.number;
	struct list_fact *x = fact_add(f, row->entry);

	fact_set(x, at, row, h);
	for (size_t i = row->ntags; i-- > 0;) {
		const struct list_tag *t = tag_find(f, row->tags[i]);

		if (!t) {
			tag_add(f, row->tags[i], row->entry, at);
			continue;
		}
		x->at = base_max(x->at, t->first);
		fact_tag_remove(x, i);
	}
}

/* Of two rows of one snapshot that say the same tag the later one has it. */
void list_facts_chain(struct list_facts *f, const struct list_chain *c, const uint64_t *dead, size_t ndead)
{
	for (size_t i = 0; i < c->n; i++) {
		const struct proto_facts *said = &c->all[i]->entry.facts;

		for (size_t k = said->nsteps; k-- > 0;)
			if (!fact_find(f, said->steps[k].entry) &&
				!list_number_in(dead, ndead, said->steps[k].entry))
				chain_say(f, &said->steps[k], c->all[i]);
	}
	f->unsure &= c->all[c->n - 1]->entry.from != 0;
}

void list_facts_policy(struct list_facts *f, struct list_hold *snapshot)
{
	if (snapshot->entry.facts.policed)
		policy_set(f, snapshot, snapshot->entry.number);
}

bool list_facts_enough(const struct commit_list *l, uint64_t from)
{
	const struct list_facts *f = &l->facts;

	for (size_t i = 0; i < f->n; i++)
		if (f->all[i].is.entry < l->rest && f->all[i].at > from && f->all[i].hold &&
			!list_node_find(l, f->all[i].at))
			return false; /* no snapshot says it: perhaps the commit is not visible */
	return !f->unsure;
}

/* Does a snapshot that goes on from `from` say it? */
static bool fact_made(const struct commit_list *l, const struct list_fact *x, uint64_t from)
{
	if (!x->hold || x->at <= from)
		return false;
	if (proto_facts_empty(&x->is) && (!from || x->is.entry > from))
		return false;
	return x->is.entry < l->rest || commit_list_entry_live(l, x->is.entry);
}

int list_facts_make(const struct commit_list *l, struct proto_entry *e, struct proto_step_facts **ret_made)
{
	const struct proto_policy *policy = commit_list_policy(l);
	const struct list_facts *f = &l->facts;
	struct proto_step_facts *made = calloc(f->n + 1, sizeof *made);
	size_t n = 0;

	if (!made)
		return -ENOMEM;
	for (size_t i = 0; i < f->n; i++)
		if (fact_made(l, &f->all[i], e->from))
			made[n++] = f->all[i].is;
	qsort(made, n, sizeof *made, list_number_order);
	*ret_made = made;
	e->facts = (struct proto_facts){.there = n || policy, .steps = made, .nsteps = n, .policed = policy != NULL};
	if (policy)
		e->facts.policy = *policy;
	return 0;
}

static bool text_same(const char *a, const char *b) { return strcmp(a ? a : "", b ? b : "") == 0; }

static bool policy_equal(const struct proto_policy *a, const struct proto_policy *b)
{
	if (a->nrules != b->nrules || a->time_ns != b->time_ns || !text_same(a->host, b->host))
		return false;
	for (size_t i = 0; i < a->nrules; i++)
		if (strcmp(a->rules[i], b->rules[i]) != 0)
			return false;
	return true;
}

bool list_facts_equal(const struct proto_facts *a, const struct proto_facts *b)
{
	if (a->there != b->there || a->nsteps != b->nsteps || a->policed != b->policed ||
		(a->policed && !policy_equal(&a->policy, &b->policy)))
		return false;
	for (size_t i = 0; i < a->nsteps; i++)
		if (!proto_facts_equal(&a->steps[i], &b->steps[i]))
			return false;
	return true;
}

bool commit_list_facts_same(const struct commit_list *a, const struct commit_list *b)
{
	const struct proto_policy *p = commit_list_policy(a), *q = commit_list_policy(b);
	bool same = p && q ? policy_equal(p, q) : !p && !q;

	for (size_t i = 0; same && i < a->nsteps; i++) {
		const struct proto_step_facts *x = commit_list_facts(a, a->steps[i].entry),
			*y = commit_list_facts(b, a->steps[i].entry);

		same = x && y ? proto_facts_equal(x, y) : !x && !y;
	}
	return same;
}

bool list_facts_true(const struct commit_list *l, const struct proto_entry *mark)
{
	const struct proto_facts *said = &mark->facts;
	const struct proto_policy *policy = commit_list_policy(l);
	size_t at = 0;

	for (size_t i = 0; i < mark->nlive; i++) {
		uint64_t entry = mark->live[i].entry;
		const struct list_fact *mine = fact_find(&l->facts, entry);
		struct proto_step_facts none = {.entry = entry};

		while (at < said->nsteps && said->steps[at].entry < entry)
			at++;
		if (mine && (mine->at > mark->number || !mine->hold))
			continue;
		if (!proto_facts_equal(mine ? &mine->is : &none, at < said->nsteps && said->steps[at].entry == entry
			? &said->steps[at] : &none))
			return false;
	}
	if (l->facts.policy_at > mark->number)
		return true;
	return said->policed == (policy != NULL) && (!policy || policy_equal(policy, &said->policy));
}

void list_facts_release(struct list_facts *f)
{
	for (size_t i = 0; i < f->n; i++)
		list_hold_drop(f->all[i].hold);
	list_hold_drop(f->policy);
	free(f->all);
	base_table_release(&f->by_entry);
	free(f->tags);
	base_table_release(&f->by_tag);
	*f = (struct list_facts){0};
}

/* ---- what is said ---- */

const struct proto_step_facts *commit_list_facts(const struct commit_list *l, uint64_t entry)
{
	const struct list_fact *x = fact_find(&l->facts, entry);

	return x && !proto_facts_empty(&x->is) && commit_list_entry_live(l, entry) ? &x->is : NULL;
}

int commit_list_attributes(const struct commit_list *l, const struct commit_list_step *s,
	struct proto_attribute **ret_a, size_t *ret_n)
{
	const struct proto_step_facts *f = commit_list_facts(l, s->entry);
	size_t nset = f ? f->nattributes : 0;
	struct proto_attribute *all = calloc(s->commit.nattributes + nset + 1, sizeof *all);

	if (!all)
		return -ENOMEM;
	*ret_n = proto_attributes_merge(s->commit.attributes, s->commit.nattributes, f ? f->attributes : NULL, nset,
		all);
	*ret_a = all;
	return 0;
}

const struct commit_list_step *commit_list_tagged(const struct commit_list *l, const char *tag)
{
	const struct list_tag *t = tag_find(&l->facts, tag);

	return t && t->owner != PROTO_NONE ? list_step_of_entry(l, t->owner) : NULL;
}

static int tag_order(const void *a, const void *b)
{
	return strcmp(((const struct commit_list_tag *)a)->tag, ((const struct commit_list_tag *)b)->tag);
}

int commit_list_tags(const struct commit_list *l, struct commit_list_tag **ret_tags, size_t *ret_n)
{
	struct commit_list_tag *tags = calloc(l->facts.ntags + 1, sizeof *tags);
	size_t n = 0;

	if (!tags)
		return -ENOMEM;
	for (size_t i = 0; i < l->facts.ntags; i++) {
		const char *name = l->facts.tags[i].name;
		const struct commit_list_step *s = commit_list_tagged(l, name);

		if (s)
			tags[n++] = (struct commit_list_tag){name, s};
	}
	qsort(tags, n, sizeof *tags, tag_order);
	*ret_tags = tags;
	*ret_n = n;
	return 0;
}

const struct proto_policy *commit_list_policy(const struct commit_list *l)
{
	const struct list_hold *h = l->facts.policy;

	return h && h->entry.facts.policy.nrules ? &h->entry.facts.policy : NULL;
}

int commit_list_unpinned(const struct commit_list *l, const struct commit_list_step *s, const char *done,
	struct base_error *err)
{
	const struct proto_step_facts *f = commit_list_facts(l, s->entry);
	bool why = f && f->reason && f->reason[0];

	if (!f || !f->pinned)
		return 0;
	return base_error_set(err, -BASE_EPINNED,
		"%s/%llu is pinned%s%.300s%s, so it is not %s (vckpt unpin %s/%llu)", l->run,
		(unsigned long long)s->step, why ? " (" : "", why ? f->reason : "", why ? ")" : "", done, l->run,
		(unsigned long long)s->step);
}
