/* SPDX-License-Identifier: Apache-2.0
 *
 * rename: what the step calls a tensor that the caller calls otherwise. */
#include <stdlib.h>
#include <string.h>

#include "core/base/array.h"
#include "core/load/loader/loader_internal.h"

#define RENAME_ROOM 65536u               /* names have at most 65535 bytes */

/* One piece of memory: the struct and its three strings. */
struct loader_rule { struct loader_rename is; char text[]; };

/* ---- rules ---- */

static char *rule_put(char **at, const char *text)
{
	char *there = *at;

	*at = stpcpy(there, text) + 1;
	return there;
}

static struct loader_rule *rule_copy(const struct loader_rename *from)
{
	size_t component = from->component ? strlen(from->component) : 0;
	struct loader_rule *rule = malloc(sizeof *rule + component + strlen(from->from) + strlen(from->to) + 3);
	char *at;

	if (!rule)
		return NULL;
	at = rule->text;
	rule->is.component = from->component ? rule_put(&at, from->component) : NULL;
	rule->is.from = rule_put(&at, from->from);
	rule->is.to = rule_put(&at, from->to);
	rule->is.anywhere = from->anywhere;
	return rule;
}

int loader_rename(struct loader *l, const struct loader_rename *rule, struct base_error *err)
{
	struct loader_rule *copy;

	if (!rule->from || !rule->to)
		return base_error_set(err, -EINVAL, "it needs both the caller's and the step's word");
	if (rule->anywhere && !rule->from[0])
		return base_error_set(err, -EINVAL, "`from` is empty, so VCKPT_RENAME_ANYWHERE would find it "
			"everywhere: give a word");
	copy = rule_copy(rule);
	if (!copy || base_array_room(l->rules, l->rules_room, l->nrules + 1) < 0) {
		free(copy);
		return base_no_memory(err);
	}
	l->rules[l->nrules++] = copy;
	return 0;
}

void rename_cut(struct loader *l, size_t n)
{
	while (l->nrules > n)
		free(l->rules[--l->nrules]);
}

void loader_rename_by(struct loader *l, loader_rename_function f, void *arg)
{
	l->renamer = f;
	l->renamer_arg = arg;
}

/* ---- names ---- */

static bool rule_meets(const struct loader_rename *rule, const char *component, const char *name)
{
	if (rule->component && strcmp(rule->component, component) != 0)
		return false;
	return rule->anywhere ? strstr(name, rule->from) != NULL : strncmp(name, rule->from, strlen(rule->from)) == 0;
}

/* False: it becomes too long. */
static bool room_add(char *room, size_t *len, const char *text, size_t n)
{
	if (n >= RENAME_ROOM - *len)
		return false;
	memcpy(room + *len, text, n);
	*len += n;
	room[*len] = 0;
	return true;
}

static bool rule_apply(const struct loader_rename *rule, const char *name, char *room)
{
	size_t word = strlen(rule->from), new = strlen(rule->to), len = 0;
	const char *at = name;

	do {
		const char *found = rule->anywhere ? strstr(at, rule->from) : at;

		if (!room_add(room, &len, at, (size_t)(found - at)) || !room_add(room, &len, rule->to, new))
			return false;
		at = found + word;
	} while (rule->anywhere && strstr(at, rule->from));
	return room_add(room, &len, at, strlen(at));
}

/* 1: written to l->renamed; 0: unchanged. */
static int name_by_function(const struct loader *l, const char *component, const char *name, struct base_error *err)
{
	int r = l->renamer(l->renamer_arg, component, name, l->renamed, RENAME_ROOM);

	if (r < 0)
		return base_error_set(err, r, "the function that renames answers %d (%s)", r, base_error_name(r));
	if (r > 0 && !memchr(l->renamed, 0, RENAME_ROOM))
		return base_error_set(err, -EINVAL, "the function that renames wrote no end of the name");
	return r > 0;
}

int rename_find(struct loader *l, const char *component, const char **name, struct base_error *err)
{
	int r;

	if (!l->nrules && !l->renamer)
		return 0;
	if (!l->renamed)
		l->renamed = malloc(RENAME_ROOM);
	if (!l->renamed)
		return base_no_memory(err);
	r = l->renamer ? name_by_function(l, component, *name, err) : 0;
	for (size_t i = 0; r == 0 && i < l->nrules; i++)
		if (rule_meets(&l->rules[i]->is, component, *name)) {
			if (!rule_apply(&l->rules[i]->is, *name, l->renamed))
				return base_error_set(err, -EINVAL, "its name becomes longer than %u bytes",
					RENAME_ROOM - 1);
			r = 1;
		}
	if (r > 0)
		*name = l->renamed;
	return r < 0 ? r : 0;
}
