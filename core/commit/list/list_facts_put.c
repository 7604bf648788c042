/* SPDX-License-Identifier: Apache-2.0
 *
 * list_facts_put: changes of the facts of steps, and of the policy. Each is made in the check of its put, on what
 * the list says then: so of two writers the second changes what the first has said. */
#include "core/commit/list/list_internal.h"

#include <stdlib.h>

#include "core/base/clock.h"

/* What check of a put works on: the state that the entry is to say. */
struct facts_put {
	const struct commit_facts_change *c;
	struct proto_entry e;
	struct proto_step_facts row;
	const char **tags;
	struct proto_attribute *attributes;
	bool passed;                    /* a check: what is to be unset was there */
	struct base_error *err;
};

static int facts_invalid(struct base_error *err, const char *what, const char *text)
{
	return base_error_set(err, -EINVAL, "\"%.100s\" cannot be %s", text, what);
}

static int change_valid(const struct commit_facts_change *c, struct base_error *err)
{
	for (size_t i = 0; i < c->ntags; i++)
		if (!proto_tag_valid(c->tags[i]))
			return base_error_set(err, -EINVAL, "\"%.100s\" cannot be a tag: it is 1 to %u letters (a-z), "
				"digits, \"_\", \".\" and \"-\", begins with none of the last two, and is no number, "
				"not \"latest\", and no \"step-...\"", c->tags[i], PROTO_TAG_MAX);
	for (size_t i = 0; i < c->nset; i++) {
		const struct proto_attribute *a = &c->set[i];

		if (!proto_attribute_key_valid(a->key))
			return facts_invalid(err, "the key of an attribute", a->key);
		if (a->value && !proto_text_valid(a->value, 0, PROTO_ATTRIBUTE_VALUE_MAX))
			return base_error_set(err, -EINVAL, "the value of %s has more than %u bytes, or is not UTF-8",
				a->key, PROTO_ATTRIBUTE_VALUE_MAX);
	}
	if (c->reason && !proto_text_valid(c->reason, 0, PROTO_REASON_MAX))
		return base_error_set(err, -EINVAL, "the reason has more than %u bytes, or is not UTF-8",
			PROTO_REASON_MAX);
	return 0;
}

/* ---- the new state of a step ---- */

static void change_pin(struct proto_step_facts *row, const struct commit_facts_change *c)
{
	bool pinned = row->pinned;

	if (c->pin < 0) {
		row->pinned = false;
		row->reason = row->pinned_by = NULL;
		row->pinned_ns = 0;
	} else if (c->pin > 0) {
		row->pinned = true;
		row->reason = c->reason ? c->reason : row->reason;
		row->pinned_ns = pinned ? row->pinned_ns : base_realtime_ns();
		row->pinned_by = pinned ? row->pinned_by : store_hostname();
	}
}

static bool text_in(const char *const *all, size_t n, const char *text)
{
	for (size_t i = 0; i < n; i++)
		if (strcmp(all[i], text) == 0)
			return true;
	return false;
}

static int text_order(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }
static int key_order(const void *a, const void *b)
{
	return strcmp(((const struct proto_attribute *)a)->key, ((const struct proto_attribute *)b)->key);
}

static int change_tags(struct facts_put *x)
{
	const struct commit_facts_change *c = x->c;
	size_t n = 0;

	free(x->tags);
	x->tags = calloc(x->row.ntags + c->ntags + 1, sizeof *x->tags);
	if (!x->tags)
		return base_no_memory(x->err);
	for (size_t i = 0; i < x->row.ntags; i++)
		if (!text_in(c->untags, c->nuntags, x->row.tags[i]) && !text_in(c->tags, c->ntags, x->row.tags[i]))
			x->tags[n++] = x->row.tags[i];
	for (size_t i = 0; i < c->ntags; i++)
		if (!text_in(c->tags, i, c->tags[i]))
			x->tags[n++] = c->tags[i];
	qsort(x->tags, n, sizeof *x->tags, text_order);
	x->row.tags = x->tags;
	x->row.ntags = n;
	return n <= PROTO_TAGS_MAX ? 0
		: base_error_set(x->err, -EINVAL, "a step has at most %u tags", PROTO_TAGS_MAX);
}

static const struct proto_attribute *key_find(const struct proto_attribute *all, size_t n, const char *key)
{
	for (size_t i = 0; i < n; i++)
		if (strcmp(all[i].key, key) == 0)
			return &all[i];
	return NULL;
}

/* Sets or unsets one of what was set later, in x->attributes; there is room. */
static int change_one(struct facts_put *x, const struct commit_list_step *s, const struct proto_attribute *set)
{
	size_t n = x->row.nattributes;
	const struct proto_attribute *mine = key_find(x->attributes, n, set->key),
		*theirs = key_find(s->commit.attributes, s->commit.nattributes, set->key);

	if (!set->value && !mine && x->passed)
		return 0; /* this put, or another writer, has unset it since */
	if (!set->value && !mine)
		return base_error_set(x->err, -ENOENT, "%s was not set later at step %llu%s", set->key,
			(unsigned long long)s->step, theirs ? ": it is the save's own" : "");
	if (!set->value)
		x->attributes[mine - x->attributes] = x->attributes[--x->row.nattributes];
	else if (mine)
		x->attributes[mine - x->attributes].value = set->value;
	else if (!theirs || strcmp(theirs->value, set->value) != 0)
		x->attributes[x->row.nattributes++] = *set;
	return 0;
}

static int change_attributes(struct facts_put *x, const struct commit_list_step *s)
{
	const struct commit_facts_change *c = x->c;
	size_t bytes = 0;
	int r = 0;

	free(x->attributes);
	x->attributes = calloc(x->row.nattributes + c->nset + 1, sizeof *x->attributes);
	if (!x->attributes)
		return base_no_memory(x->err);
	for (size_t i = 0; i < x->row.nattributes; i++)
		x->attributes[i] = x->row.attributes[i];
	for (size_t i = 0; i < c->nset && r == 0; i++)
		r = change_one(x, s, &c->set[i]);
	qsort(x->attributes, x->row.nattributes, sizeof *x->attributes, key_order);
	x->row.attributes = x->attributes;
	for (size_t i = 0; i < x->row.nattributes; i++)
		bytes += strlen(x->attributes[i].key) + strlen(x->attributes[i].value);
	if (r == 0 && (x->row.nattributes > PROTO_ATTRIBUTES_MAX || bytes > PROTO_ATTRIBUTES_MAX_BYTES))
		r = base_error_set(x->err, -EINVAL,
			"a step has at most %u attributes that are set later, of at most %u bytes together",
			PROTO_ATTRIBUTES_MAX, PROTO_ATTRIBUTES_MAX_BYTES);
	return r;
}

/* -EALREADY: the state is so already. */
static int change_check(void *arg, struct commit_list *l)
{
	struct facts_put *x = arg;
	const struct proto_step_facts *old;
	const struct commit_list_step *s;
	struct proto_step_facts none;
	int r = commit_list_know_step(l, x->c->step, x->err);

	if (r < 0)
		return r;
	s = commit_list_find(l, x->c->step);
	if (x->c->entry != PROTO_NONE && (!s || s->entry != x->c->entry))
		return base_error_set(x->err, -ESTALE,
			"%s: step %llu was removed or replaced by another writer just now", commit_list_run(l),
			(unsigned long long)x->c->step);
	if (!s)
		return base_error_set(x->err, -ENOENT, "%s has no step %llu", commit_list_run(l),
			(unsigned long long)x->c->step);
	none = (struct proto_step_facts){.entry = s->entry};
	old = commit_list_facts(l, s->entry);
	x->row = old ? *old : none;
	change_pin(&x->row, x->c);
	r = change_tags(x);
	if (r == 0)
		r = change_attributes(x, s);
	x->e.facts = (struct proto_facts){.there = true, .steps = &x->row, .nsteps = 1};
	x->passed |= r == 0;
	return r == 0 && proto_facts_equal(&x->row, old ? old : &none) ? -EALREADY : r;
}

/* ---- puts ---- */

/* As a removal: where the put fails the list is asked what became of it. 1: check says -EALREADY. frees: a full disk is
 * met with the reserve, since what follows makes room. */
static int facts_put(struct commit_list *l, const struct proto_entry *e, bool frees,
	int (*check)(void *arg, struct commit_list *l), void *arg, struct base_error *err)
{
	struct base_error why;
	int64_t n;
	int r;

	if (!l->store->info.list_4)
		return base_error_set(err, -ENOTSUP, "%s: an earlier vckpt made this store: its lists have no pins, "
			"tags, policies or attributes that are set later (the word list-4); "
			STORE_COPY_ADVICE, l->store->path);
	n = (frees ? list_put_reserved : commit_list_put)(l, e, check, arg, err);
	if (frees)
		store_reserve_restore(l->store);
	if (n >= 0 || n == -EALREADY)
		return n >= 0 || l->open ? 0 : 1; /* open: its own entry says so, and has become durable since */
	if (!commit_list_put_open(l, (int)n))
		return (int)n;
	why = *err;
	r = commit_list_put_known(l) ? check(arg, l) : -BASE_EUNDECIDED;
	*err = why;
	if (r == -EALREADY || r == 0)
		return r == 0 ? (int)n : 0;
	err->code = -BASE_EUNDECIDED;
	return base_error_prefix(err, err->code, "%s: undecided whether this is in its list", l->run);
}

int commit_list_facts_change(struct commit_list *l, const struct commit_facts_change *c, struct base_error *err)
{
	struct base_error own = {0};
	struct facts_put x = {.c = c, .err = err ? err : &own, .e = {.kind = PROTO_ENTRY_FACTS,
		.time_ns = base_realtime_ns(), .host = store_hostname()}};
	int r = change_valid(c, err);

	if (r == 0)
		r = facts_put(l, &x.e, c->pin < 0, change_check, &x, x.err);
	free(x.tags);
	free(x.attributes);
	return r;
}

static int policy_check(void *arg, struct commit_list *l)
{
	const struct proto_entry *e = arg;
	const struct proto_policy *now = commit_list_policy(l), *new = &e->facts.policy;

	for (size_t i = 0; now && now->nrules == new->nrules && i < now->nrules; i++)
		if (strcmp(now->rules[i], new->rules[i]) != 0)
			return 0;
	return (now ? now->nrules : 0) == new->nrules ? -EALREADY : 0;
}

int commit_list_policy_put(struct commit_list *l, const char *const *rules, size_t n, struct base_error *err)
{
	struct proto_entry e = {.kind = PROTO_ENTRY_FACTS, .time_ns = base_realtime_ns(), .host = store_hostname(),
		.facts = {.there = true, .policed = true, .policy = {rules, n, base_realtime_ns(), store_hostname()}}};
	struct base_error own = {0};

	if (n > PROTO_RULES_MAX)
		return base_error_set(err, -EINVAL, "a policy has at most %u rules", PROTO_RULES_MAX);
	for (size_t i = 0; i < n; i++)
		if (!proto_text_valid(rules[i], 1, PROTO_RULE_MAX))
			return base_error_set(err, -EINVAL, "a rule of a policy is UTF-8 of 1 to %u bytes",
				PROTO_RULE_MAX);
	return facts_put(l, &e, false, policy_check, &e, err ? err : &own);
}
