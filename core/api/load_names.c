/* SPDX-License-Identifier: Apache-2.0
 *
 * load_names: the names that only the caller of a load has (missing) or only the step (unexpected). */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/api/api_load_internal.h"
#include "core/base/array.h"
#include "core/base/cleanup.h"
#include "core/base/plural.h"

#define NAMES_SHOWN 10u
#define NAMES_TEXT 390u                  /* two lists and the words around them fit into struct vckpt_error */

/* Takes the text. */
static int names_take(struct load_names *names, char *text)
{
	if (!text || base_array_room(names->all, names->room, names->n + 1) < 0) {
		free(text);
		return -ENOMEM;
	}
	names->all[names->n++] = text;
	return 0;
}

int load_names_add(struct load_names *names, const char *component, const char *name, size_t name_len,
	const char *stored)
{
	size_t len = strlen(component);
	char *text = malloc(len + name_len + strlen(stored) + 3);

	if (!text)
		return -ENOMEM;
	memcpy(text, component, len);
	text[len] = '/';
	memcpy(text + len + 1, name, name_len);
	text[len + 1 + name_len] = 0;
	strcpy(text + len + 2 + name_len, stored);
	return names_take(names, text);
}

void load_names_cut(struct load_names *names, size_t n)
{
	while (names->n > n)
		free(names->all[--names->n]);
}

static int name_compare(const void *a, const void *b)
{
	return strcmp(*(char *const *)a, *(char *const *)b);
}

static const char *name_stored(const char *text) { return text + strlen(text) + 1; }

static char *name_copy(const char *text)
{
	size_t len = strlen(text) + 1;
	char *copy;

	len += strlen(text + len) + 1;
	copy = malloc(len);
	return copy ? memcpy(copy, text, len) : NULL;
}

/* Sorted, each once. */
static void names_sort(struct load_names *names)
{
	size_t kept = 0;

	if (names->n)
		qsort(names->all, names->n, sizeof *names->all, name_compare);
	for (size_t i = 0; i < names->n; i++) {
		if (kept && strcmp(names->all[kept - 1], names->all[i]) == 0)
			free(names->all[i]);
		else
			names->all[kept++] = names->all[i];
	}
	names->n = kept;
}

/* A copy, because the caller may look at it while more is declared. */
static int names_missing(struct load_names *missing, const struct load_names *lacking)
{
	load_names_cut(missing, 0);
	for (size_t i = 0; i < lacking->n; i++)
		if (names_take(missing, name_copy(lacking->all[i])) < 0)
			return -ENOMEM;
	names_sort(missing);
	return 0;
}

/* The tensors of the step that are on the tape. */
static void names_mark(const struct vckpt_load *load, bool *declared)
{
	struct load_entry entry;

	for (size_t at = 0; load_tape_next(load, &at, &entry);)
		declared[entry.tensor] = true;
}

static int names_unexpected(struct vckpt_load *load)
{
	const struct load_step *step = load->step->step;
	base_cleanup_free bool *declared = calloc((size_t)load_step_tensor_count(step) + 1, sizeof *declared);
	struct load_tensor_info info;
	uint32_t first, end;

	if (!declared)
		return -ENOMEM;
	names_mark(load, declared);
	load_names_cut(&load->unexpected, 0);
	for (uint32_t c = 0; c < load_step_component_count(step); c++) {
		if (!load->expected[c])
			continue;
		load_step_component(step, c, &first, &end);
		for (uint32_t i = first; i < end; i++) {
			if (declared[i])
				continue;
			load_step_tensor_info(step, i, &info);
			if (load_names_add(&load->unexpected, info.component, info.name, info.name_len, "") < 0)
				return -ENOMEM;
		}
	}
	names_sort(&load->unexpected);
	return 0;
}

/* "a, b and 3 more": as many as there is room for. */
static void names_text(const struct load_names *names, char text[static NAMES_TEXT])
{
	size_t len = 0, i = 0;

	text[0] = 0;
	for (; i < names->n && i < NAMES_SHOWN && len < NAMES_TEXT - 250; i++) {
		const char *stored = name_stored(names->all[i]);

		len += (size_t)snprintf(text + len, NAMES_TEXT - len, "%s%.100s%s%.100s%s", i ? ", " : "",
			names->all[i], *stored ? " (" : "", stored, *stored ? " in the step)" : "");
	}
	if (i < names->n)
		snprintf(text + len, NAMES_TEXT - len, " and %zu more", names->n - i);
}

int load_names_compare(struct vckpt_load *load, struct base_error *err)
{
	const struct load_step_info *step = load_step_info(load->step->step);
	char missing[NAMES_TEXT], unexpected[NAMES_TEXT], lacks[NAMES_TEXT + 80] = "", has[NAMES_TEXT + 80] = "";

	if (names_missing(&load->missing, &load->lacking) < 0 || names_unexpected(load) < 0)
		return base_no_memory(err);
	if ((load->flags & VCKPT_LOAD_NOT_STRICT) || load->missing.n + load->unexpected.n == 0)
		return 0;
	names_text(&load->missing, missing);
	names_text(&load->unexpected, unexpected);
	if (load->missing.n)
		snprintf(lacks, sizeof lacks, "it lacks %zu %s to be loaded: %s", load->missing.n,
			base_plural(load->missing.n, "tensor that is", "tensors that are"), missing);
	if (load->unexpected.n)
		snprintf(has, sizeof has, "%sit has %zu %s not to be loaded: %s", load->missing.n ? "; " : "",
			load->unexpected.n, base_plural(load->unexpected.n, "tensor that is", "tensors that are"),
			unexpected);
	return base_error_set(err, -EINVAL, "%.100s/%" PRIu64 ": %s%s", step->run, step->step, lacks, has);
}
