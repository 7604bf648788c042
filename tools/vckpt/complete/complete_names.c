/* SPDX-License-Identifier: Apache-2.0 */
#include <inttypes.h>
#include <string.h>

#include "core/commit/list/list_facts.h"
#include "core/view/tree.h"
#include "tools/vckpt/complete/complete.h"

static void offer_joined(const struct complete *c, const char *before, const char *name, const char *behind)
{
	base_cleanup_free char *text = tool_string("%s%s%s", before, name, behind);

	if (text)
		complete_offer(c, text);
}

/* mandatory, possible: of a step behind the run */
static void offer_runs(const struct complete *c, struct store *s, bool mandatory, bool possible)
{
	char **names;
	size_t n;

	if (commit_runs(s, &names, &n, NULL) < 0)
		return;
	for (size_t i = 0; i < n; i++) {
		if (!mandatory)
			complete_offer(c, names[i]);
		if (mandatory || possible)
			offer_joined(c, names[i], "/", "");
	}
	commit_runs_free(names, n);
}

/* before: "RUN/" */
static void offer_steps(const struct complete *c, struct store *s, const char *run, const char *behind)
{
	const struct proto_step_facts *facts;
	struct commit_list *l;
	char before[PROTO_RUN_MAX + 2], number[24];

	snprintf(before, sizeof before, "%s/", run);
	offer_joined(c, before, "latest", behind);
	if (commit_list_open(s, run, false, &l, NULL) < 0)
		return;
	for (size_t i = 0; i < commit_list_count(l); i++) {
		snprintf(number, sizeof number, "%" PRIu64, commit_list_at(l, i)->step);
		offer_joined(c, before, number, behind);
		facts = commit_list_facts(l, commit_list_at(l, i)->entry);
		for (size_t tag = 0; facts && tag < facts->ntags; tag++)
			offer_joined(c, before, facts->tags[tag], behind);
	}
	commit_list_close(l);
}

static int open_step(struct store *s, const char *run, const char *text, size_t len, struct load_step **ret_step)
{
	const bool latest = len == 6 && memcmp(text, "latest", 6) == 0;
	const struct commit_list_step *entry = NULL;
	struct commit_list *l;
	uint64_t number;
	int r = -ENOENT;

	if (commit_list_open_newest(s, run, &l, NULL) < 0)
		return r;
	if (latest)
		entry = commit_list_latest(l);
	else if (tool_step_parse(text, len, &number) > 0 && commit_list_know_step(l, number, NULL) >= 0)
		entry = commit_list_find(l, number);
	if (entry)
		r = load_step_open(s, run, entry, ret_step, NULL);
	commit_list_close(l);
	return r;
}

static void offer_components(const struct complete *c, struct load_step *step, const char *before, const char *behind)
{
	uint32_t first, end;

	for (uint32_t i = 0; i < load_step_component_count(step); i++)
		offer_joined(c, before, load_step_component(step, i, &first, &end), behind);
}

static void offer_tensors(const struct complete *c, struct load_step *step, const char *before)
{
	for (uint32_t i = 0; i < load_step_tensor_count(step); i++) {
		struct load_tensor_info t;
		base_cleanup_free char *name = NULL;

		load_step_tensor_info(step, i, &t);
		name = tool_string("%s/%.*s", t.component, (int)t.name_len, t.name);
		if (name)
			offer_joined(c, before, name, "");
	}
}

/* As the mount shows them. before: all of the word up to its last slash; rest: what of it is in the step */
static void offer_files(const struct complete *c, struct load_step *step, const char *before, const char *rest)
{
	base_cleanup_free char *directory = strndup(rest, strrchr(rest, '/') ? (size_t)(strrchr(rest, '/') - rest) : 0);
	const struct view_node *node = NULL;
	struct view_tree *tree;
	int64_t at;

	if (!directory || view_tree_build(step, VIEW_SHOW_ALL, &tree, NULL) < 0)
		return;
	at = directory[0] ? view_tree_walk(tree, directory) : 0;
	node = at >= 0 ? view_tree_node(tree, (uint32_t)at) : NULL;
	for (uint32_t i = 0; node && node->kind == VIEW_DIRECTORY && i < node->nchildren; i++) {
		const struct view_node *child = view_tree_node(tree, node->first_child + i);

		offer_joined(c, before, child->name, child->kind == VIEW_DIRECTORY ? "/" : "");
	}
	view_tree_unref(tree);
}

static void offer_inside(const struct complete *c, struct store *s, const char *run, const char *word)
{
	const char *step = c->current + strlen(run) + 1, *rest = strchr(step, '/') + 1;
	base_cleanup_free char *begin = strndup(c->current, (size_t)(rest - c->current));
	base_cleanup_free char *before = strndup(c->current, (size_t)(strrchr(c->current, '/') + 1 - c->current));
	struct load_step *opened;

	if (!begin || !before || open_step(s, run, step, (size_t)(rest - 1 - step), &opened) < 0)
		return;
	if (strstr(word, "/TENSOR"))
		offer_tensors(c, opened, begin);
	else if (strstr(word, "/COMPONENT"))
		offer_components(c, opened, begin, "");
	else if (strstr(word, "/PATH"))
		offer_files(c, opened, before, rest);
	load_step_unref(opened);
}

static struct store *given_store(const struct complete *c)
{
	struct store *s = NULL;

	return c->ngiven && store_open(c->given[0], STORE_OPEN_READ_ONLY, &s, NULL) == 0 ? s : NULL;
}

void complete_target(const struct complete *c, const char *word)
{
	const char *slash = strchr(c->current, '/');
	const bool mandatory = strncmp(word, "RUN/STEP", 8) == 0 || strncmp(word, "[RUN/STEP", 9) == 0;
	const bool deeper = strstr(word, "STEP/") != NULL;
	char run[PROTO_RUN_MAX + 1];
	struct store *s = given_store(c);

	if (!s)
		return;
	if (!slash) {
		offer_runs(c, s, mandatory, strstr(word, "/STEP"));
	} else if ((size_t)(slash - c->current) < sizeof run && strstr(word, "/STEP")) {
		memcpy(run, c->current, (size_t)(slash - c->current));
		run[slash - c->current] = 0;
		if (!proto_run_valid(run))
			slash = NULL;
		else if (strchr(slash + 1, '/'))
			offer_inside(c, s, run, word);
		else
			offer_steps(c, s, run, deeper && mandatory ? "/" : "");
	}
	store_close(s);
}

void complete_component(const struct complete *c)
{
	const char *target = c->ngiven > 1 ? c->given[1] : "", *slash = strchrnul(target, '/');
	const char *step = slash[0] && slash[1] ? slash + 1 : "latest";
	base_cleanup_free char *run = strndup(target, (size_t)(slash - target));
	struct load_step *opened;
	struct store *s;

	if (!run || !proto_run_valid(run) || !(s = given_store(c)))
		return;
	if (open_step(s, run, step, strcspn(step, "/"), &opened) == 0) {
		offer_components(c, opened, "", "");
		load_step_unref(opened);
	}
	store_close(s);
}

static void offer_attributes(const struct complete *c, struct store *s, const char *run, const char *before)
{
	struct commit_list *l;

	if (commit_list_open(s, run, false, &l, NULL) < 0)
		return;
	for (size_t i = 0; i < commit_list_count(l); i++) {
		base_cleanup_free struct proto_attribute *a = NULL;
		size_t n = 0;

		if (commit_list_attributes(l, commit_list_at(l, i), &a, &n) < 0)
			break;
		for (size_t k = 0; k < n; k++)
			offer_joined(c, before, a[k].key, "");
	}
	commit_list_close(l);
}

static void offer_attributes_of_all(const struct complete *c, struct store *s, const char *before)
{
	char **names;
	size_t n;

	if (commit_runs(s, &names, &n, NULL) < 0)
		return;
	for (size_t i = 0; i < n; i++)
		offer_attributes(c, s, names[i], before);
	commit_runs_free(names, n);
}

void complete_best(const struct complete *c)
{
	const char *colon = strrchr(c->current, ':');
	base_cleanup_free char *before = strndup(c->current, colon ? (size_t)(colon + 1 - c->current) : 0);
	struct store *s;

	if (!colon || !before)
		return;
	if (colon != strchr(c->current, ':')) {
		offer_joined(c, before, "min", "");
		offer_joined(c, before, "max", "");
	} else if ((s = given_store(c))) {
		if (c->ngiven > 1)
			offer_attributes(c, s, c->given[1], before);
		else
			offer_attributes_of_all(c, s, before);
		store_close(s);
	}
}

/* Blanks and the like are \040 in /proc/self/mounts. */
static void unescape(char *text)
{
	char *to = text;

	for (const char *at = text; *at; to++) {
		unsigned byte;

		if (*at == '\\' && sscanf(at + 1, "%3o", &byte) == 1) {
			*to = (char)byte;
			at += 4;
		} else {
			*to = *at++;
		}
	}
	*to = 0;
}

void complete_mounts(const struct complete *c)
{
	FILE *mounts = fopen("/proc/self/mounts", "re");
	char *line = NULL, *path, *type;
	size_t size = 0;

	while (mounts && getline(&line, &size, mounts) > 0) {
		char *rest = line;

		strsep(&rest, " ");
		path = strsep(&rest, " ");
		type = strsep(&rest, " ");
		if (!type || strcmp(type, "fuse.vckpt") != 0)
			continue;
		unescape(path);
		complete_offer(c, path);
	}
	free(line);
	if (mounts)
		fclose(mounts);
}
