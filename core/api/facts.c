/* SPDX-License-Identifier: Apache-2.0
 *
 * facts: pins, tags and attributes that are set later, of steps (core/commit/list/list_facts.h). An open step has its
 * own copy of what was said of it: the body of an entry that says that, decoded. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "core/api/api_internal.h"
#include "core/commit/list/list_facts.h"

BASE_CLEANUP_DEFINE(struct store *, store_close)
BASE_CLEANUP_DEFINE(struct commit_list *, commit_list_close)

static int run_check(const char *run, struct base_error *err)
{
	return run && proto_run_valid(run) ? 0
		: base_error_set(err, -EINVAL, "%s cannot be the name of a run", run ? run : "NULL");
}

/* ---- of an open step ---- */

int api_facts_take(struct vckpt_step *step, const struct commit_list *l, uint64_t entry)
{
	const struct proto_step_facts *f = commit_list_facts(l, entry);
	struct proto_entry e = {.kind = PROTO_ENTRY_FACTS, .host = "", .run = commit_list_run(l), .number = entry + 1,
		.facts = {.there = true, .steps = f, .nsteps = 1}};
	base_cleanup_buf struct base_buf body = BASE_BUF_INIT;
	int r = f ? proto_entry_encode(&e, &body) : 0;

	return f && r == 0 ? proto_entry_decode(body.data, body.len, &step->said) : r;
}

int api_facts_attributes(struct vckpt_step *step, struct base_error *err)
{
	const struct load_step_info *info = load_step_info(step->step);
	const struct proto_step_facts *f = step->said.facts.steps;
	size_t n = info->nattributes + (f ? f->nattributes : 0);
	base_cleanup_free struct proto_attribute *all = calloc(n + 1, sizeof *all);

	step->attributes = calloc(n + 1, sizeof *step->attributes);
	if (!all || !step->attributes)
		return base_no_memory(err);
	n = proto_attributes_merge(info->attributes, info->nattributes, f ? f->attributes : NULL,
		f ? f->nattributes : 0, all);
	for (size_t i = 0; i < n; i++)
		step->attributes[i] = (struct vckpt_attribute){all[i].key, all[i].value};
	step->nattributes = n;
	return 0;
}

int vckpt_step_facts(const struct vckpt_step *step, struct vckpt_facts *ret_facts)
{
	const struct proto_step_facts *f = step->said.facts.steps;

	if (ret_facts->size != sizeof *ret_facts)
		return -EINVAL;
	*ret_facts = (struct vckpt_facts){.size = sizeof *ret_facts, .reason = "", .pinned_by = ""};
	if (!f)
		return 0;
	ret_facts->pinned = f->pinned;
	ret_facts->reason = f->reason;
	ret_facts->pinned_ns = f->pinned_ns;
	ret_facts->pinned_by = f->pinned_by;
	ret_facts->tags = f->tags;
	ret_facts->ntags = f->ntags;
	return 0;
}

/* ---- changes ---- */

static int change_check(const struct vckpt_facts_change *c, struct base_error *err)
{
	int r = api_given(c, "change of facts", err);

	if (r == 0)
		r = api_size_check(c->size, sizeof *c, "vckpt_facts_change", err);
	if (r == 0)
		r = api_reserved_check(c->reserved, "vckpt_facts_change", err);
	if (r == 0 && (c->pin < -1 || c->pin > 1))
		r = base_error_set(err, -EINVAL, "pin is %d: it is 1, -1 or 0", (int)c->pin);
	for (size_t i = 0; r == 0 && i < c->ntags; i++)
		r = api_given(c->tags ? c->tags[i] : NULL, "tag", err);
	for (size_t i = 0; r == 0 && i < c->nuntags; i++)
		r = api_given(c->untags ? c->untags[i] : NULL, "tag", err);
	for (size_t i = 0; r == 0 && i < c->nattributes; i++)
		r = api_given(c->attributes ? c->attributes[i].key : NULL, "attribute's key", err);
	return r;
}

int vckpt_facts_change(const char *store, const char *run, uint64_t step, const struct vckpt_facts_change *change,
	struct vckpt_error *err)
{
	base_cleanup(commit_list_close_p) struct commit_list *l = NULL;
	base_cleanup(store_close_p) struct store *s = NULL;
	struct base_error *e = api_error(err);
	struct commit_facts_change c = {.step = step, .entry = PROTO_NONE};
	int r = change_check(change, e);

	if (r == 0)
		r = run_check(run, e);
	if (r == 0)
		r = api_store_open(store, 0, &s, e);
	if (r == 0)
		r = commit_list_open_newest(s, run, &l, e);
	if (r < 0)
		return api_result(r, e);
	if (change->commit)
		c.entry = change->commit->entry;
	c.pin = change->pin;
	c.reason = change->reason;
	c.tags = change->tags;
	c.ntags = change->ntags;
	c.untags = change->untags;
	c.nuntags = change->nuntags;
	c.set = (const struct proto_attribute *)change->attributes;
	c.nset = change->nattributes;
	return api_result(commit_list_facts_change(l, &c, e), e);
}

/* ---- the tags of a run ---- */

/* In one piece of memory: the rows, and the texts behind them. */
static int tags_copy(const struct commit_list *l, struct vckpt_tag **ret_tags, size_t *ret_n)
{
	base_cleanup_free struct commit_list_tag *tags = NULL;
	size_t n = 0, bytes = 0;
	char *text;

	if (commit_list_tags(l, &tags, &n) < 0)
		return -ENOMEM;
	for (size_t i = 0; i < n; i++)
		bytes += strlen(tags[i].tag) + 1;
	if (!(*ret_tags = malloc(n * sizeof **ret_tags + bytes + 1)))
		return -ENOMEM;
	text = (char *)(*ret_tags + n);
	for (size_t i = 0; i < n; i++) {
		(*ret_tags)[i] = (struct vckpt_tag){text, tags[i].step->step};
		text = stpcpy(text, tags[i].tag) + 1;
	}
	*ret_n = n;
	return 0;
}

int vckpt_run_tags(const char *store, const char *run, struct vckpt_tag **ret_tags, size_t *ret_n,
	struct vckpt_error *err)
{
	base_cleanup(commit_list_close_p) struct commit_list *l = NULL;
	base_cleanup(store_close_p) struct store *s = NULL;
	struct base_error *e = api_error(err);
	int r = ret_tags && ret_n ? run_check(run, e) : base_error_set(e, -EINVAL, "no place for the tags is given");

	if (r == 0)
		r = api_store_open(store, STORE_OPEN_READ_ONLY, &s, e);
	if (r == 0)
		r = commit_list_open(s, run, false, &l, e);
	if (r == 0 && commit_list_next(l) == 0)
		r = base_error_set(e, -ENOENT, "%s has no run %s", s->path, run);
	return api_result(r < 0 ? r : tags_copy(l, ret_tags, ret_n), e);
}
