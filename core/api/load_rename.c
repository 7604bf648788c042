/* SPDX-License-Identifier: Apache-2.0
 *
 * load_rename: what the step calls a tensor that the caller calls otherwise. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "core/api/api_load_internal.h"
#include "core/base/array.h"

#define RENAME_ROOM 65536u               /* names have at most 65535 bytes */

/* One piece of memory: the struct and its three strings. */
struct load_rule { const char *component, *from, *to; bool anywhere; char text[]; };

void load_renames_release(struct load_renames *names)
{
	for (size_t i = 0; i < names->n; i++)
		free(names->rules[i]);
	free(names->rules);
	free(names->room);
}

/* ---- rules ---- */

static char *rule_put(char **at, const char *text)
{
	char *there = *at;

	*at = stpcpy(there, text) + 1;
	return there;
}

static struct load_rule *rule_copy(const struct vckpt_rename *said)
{
	size_t component = said->component ? strlen(said->component) : 0;
	struct load_rule *rule = malloc(sizeof *rule + component + strlen(said->from) + strlen(said->to) + 3);
	char *at;

	if (!rule)
		return NULL;
	at = rule->text;
	rule->component = said->component ? rule_put(&at, said->component) : NULL;
	rule->from = rule_put(&at, said->from);
	rule->to = rule_put(&at, said->to);
	rule->anywhere = said->flags & VCKPT_RENAME_ANYWHERE;
	return rule;
}

static int rule_check(const struct vckpt_rename *rule, size_t number, struct base_error *err)
{
	const char *wrong = NULL;

	if (!rule->from || !rule->to)
		wrong = "it needs both the caller's and the step's word";
	else if ((rule->flags & VCKPT_RENAME_ANYWHERE) && !rule->from[0])
		wrong = "`from` is empty, so VCKPT_RENAME_ANYWHERE would find it everywhere: give a word";
	if (wrong)
		base_error_set(err, -EINVAL, "%s", wrong);
	if (wrong || api_flags_check(rule->flags, VCKPT_RENAME_ANYWHERE, "the rule", "VCKPT_RENAME_ANYWHERE", err) < 0)
		return base_error_prefix(err, -EINVAL, "rule %zu of a renaming", number);
	return 0;
}

int load_rename_add(struct vckpt_load *load, const struct vckpt_rename *rules, size_t n, struct base_error *err)
{
	struct load_renames *names = &load->renames;
	size_t before = names->n;
	int r = 0;

	for (size_t i = 0; r == 0 && i < n; i++) {
		struct load_rule *rule;

		r = rule_check(&rules[i], i, err);
		rule = r == 0 ? rule_copy(&rules[i]) : NULL;
		if (rule && base_array_room(names->rules, names->rules_room, names->n + 1) == 0)
			names->rules[names->n++] = rule;
		else if (r == 0)
			r = base_no_memory(err);
		if (r < 0 && rule)
			free(rule);
	}
	while (r < 0 && names->n > before)
		free(names->rules[--names->n]);
	return r;
}

/* ---- names ---- */

static bool rule_meets(const struct load_rule *rule, const char *component, const char *name)
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

static bool rule_apply(const struct load_rule *rule, const char *name, char *room)
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

/* 1: written to the room; 0: unchanged. */
static int name_by_function(const struct vckpt_load *load, const char *component, const char *name,
	struct base_error *err)
{
	const struct load_renames *names = &load->renames;
	int r = names->function(names->arg, component, name, names->room, RENAME_ROOM);

	if (r < 0)
		return base_error_set(err, r, "the function that renames answers %d (%s)", r, base_error_name(r));
	if (r > 0 && !memchr(names->room, 0, RENAME_ROOM))
		return base_error_set(err, -EINVAL, "the function that renames wrote no end of the name");
	return r > 0;
}

int load_renamed(struct vckpt_load *load, const char *component, const char **name, struct base_error *err)
{
	struct load_renames *names = &load->renames;
	int r;

	if (!names->n && !names->function)
		return 0;
	if (!names->room)
		names->room = malloc(RENAME_ROOM);
	if (!names->room)
		return base_no_memory(err);
	r = names->function ? name_by_function(load, component, *name, err) : 0;
	for (size_t i = 0; r == 0 && i < names->n; i++)
		if (rule_meets(names->rules[i], component, *name)) {
			if (!rule_apply(names->rules[i], *name, names->room))
				return base_error_set(err, -EINVAL, "its name becomes longer than %u bytes",
					RENAME_ROOM - 1);
			r = 1;
		}
	if (r > 0)
		*name = names->room;
	return r < 0 ? r : 0;
}
