/* SPDX-License-Identifier: Apache-2.0
 *
 * copy_facts: pins, tags and attributes that were set after the commit. Of a step that is written they are in its
 * commit entry. Of one that is there already they follow as a change: what is said here is said there, too. A mirror
 * also takes away tags and attributes that are not said here any more. A pin is never taken away: it is a promise of
 * the other store's owner.
 *
 * A policy says what may be removed. It comes along only to a run that has nothing but copies of this one, so that no
 * rule of a stranger ever applies to steps of one's own; and only if it is newer than the one there. */
#include "core/copy/copy_internal.h"

#include <string.h>

#include "core/base/log.h"
#include "core/commit/list/list_facts.h"

bool copy_facts_able(struct copy *c)
{
	if (c->to->info.list_4)
		return true;
	if (!c->no_facts)
		base_warning("%s: an earlier vckpt made this store: pins, tags, policies, and attributes that were set "
			"after the save do not come along (the word list-4)", c->to->path);
	c->no_facts = true;
	return false;
}

static bool has_tag(const struct proto_step_facts *f, const char *tag)
{
	for (size_t i = 0; f && i < f->ntags; i++)
		if (strcmp(f->tags[i], tag) == 0)
			return true;
	return false;
}

static const char *value_of(const struct proto_step_facts *f, const char *key)
{
	for (size_t i = 0; f && i < f->nattributes; i++)
		if (strcmp(f->attributes[i].key, key) == 0)
			return f->attributes[i].value;
	return NULL;
}

/* What makes `there` say what `here` says; NULL: nothing is said. The arrays have room. */
static void facts_difference(const struct proto_step_facts *here, const struct proto_step_facts *there, bool mirror,
	struct commit_facts_change *c, const char **tags, struct proto_attribute *set)
{
	c->pin = here && here->pinned && !(there && there->pinned);
	c->reason = c->pin ? here->reason : NULL;
	c->tags = tags;
	for (size_t i = 0; here && i < here->ntags; i++)
		if (!has_tag(there, here->tags[i]))
			tags[c->ntags++] = here->tags[i];
	c->untags = tags + c->ntags;
	for (size_t i = 0; mirror && there && i < there->ntags; i++)
		if (!has_tag(here, there->tags[i]))
			tags[c->ntags + c->nuntags++] = there->tags[i];
	c->set = set;
	for (size_t i = 0; here && i < here->nattributes; i++) {
		const char *value = value_of(there, here->attributes[i].key);

		if (!value || strcmp(value, here->attributes[i].value) != 0)
			set[c->nset++] = here->attributes[i];
	}
	for (size_t i = 0; mirror && there && i < there->nattributes; i++)
		if (!value_of(here, there->attributes[i].key))
			set[c->nset++] = (struct proto_attribute){there->attributes[i].key, NULL};
}

int copy_facts(struct copy *c, const struct commit_list *list, const struct commit_list_step *step,
	struct commit_list *there, const struct commit_list_step *step_there, bool mirror, struct base_error *err)
{
	const struct proto_step_facts *f = commit_list_facts(list, step->entry);
	const struct proto_step_facts *g = commit_list_facts(there, step_there->entry);
	size_t ntags = (f ? f->ntags : 0) + (g ? g->ntags : 0), nset = (f ? f->nattributes : 0)
		+ (g ? g->nattributes : 0);
	base_cleanup_free const char **tags = calloc(ntags + 1, sizeof *tags);
	base_cleanup_free struct proto_attribute *set = calloc(nset + 1, sizeof *set);
	struct commit_facts_change change = {.step = step_there->step, .entry = step_there->entry};
	int r;

	if (!tags || !set)
		return base_no_memory(err);
	facts_difference(f, g, mirror, &change, tags, set);
	if ((!change.pin && !change.ntags && !change.nuntags && !change.nset) || !copy_facts_able(c))
		return 0;
	/* What is said there now may go when the list is read on. */
	for (size_t i = 0; i < change.nuntags; i++)
		tags[change.ntags + i] = strdupa(tags[change.ntags + i]);
	for (size_t i = 0; i < change.nset; i++)
		if (!set[i].value)
			set[i].key = strdupa(set[i].key);
	r = commit_list_facts_change(there, &change, err);
	return r == -ESTALE || r == -ENOENT ? 0 : r < 0 ? r : r == 0; /* another writer was faster */
}

static bool copies_alone(const struct copy *c, const char *run, const struct commit_list *there)
{
	for (size_t i = 0; i < commit_list_count(there); i++)
		if (!copy_is_from(commit_list_at(there, i)->commit.attempt, c->from, run, NULL))
			return false;
	return true;
}

int copy_policy(struct copy *c, const struct commit_list *list, const char *as, struct base_error *err)
{
	const struct proto_policy *p = commit_list_policy(list), *q;
	struct commit_list *there;
	int r;

	if (!p || !p->nrules || !copy_facts_able(c))
		return 0;
	r = commit_list_open(c->to, as, false, &there, err);
	if (r < 0)
		return r;
	q = commit_list_policy(there);
	if ((!q || q->time_ns < p->time_ns) && copies_alone(c, commit_list_run(list), there))
		r = commit_list_policy_put(there, p->rules, p->nrules, err);
	commit_list_close(there);
	return r < 0 ? r : 0;
}
