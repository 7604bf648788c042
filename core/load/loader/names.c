/* SPDX-License-Identifier: Apache-2.0
 *
 * names: the tensors that only the caller of a load has (missing) or only the step (unexpected). */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/base/array.h"
#include "core/base/cleanup.h"
#include "core/base/plural.h"
#include "core/load/loader/loader_internal.h"

#define NAMES_SHOWN 10u
#define NAMES_TEXT 390u                  /* two lists and the words around them fit into struct vckpt_error */

/* Takes the text. */
static int names_take(struct loader_names *names, char *text)
{
	if (!text || base_array_room(names->all, names->room, names->n + 1) < 0) {
		free(text);
		return -ENOMEM;
	}
	names->all[names->n++] = text;
	return 0;
}

int names_add(struct loader_names *names, const char *component, const char *name, size_t name_len,
	const char *stored)
{
	char *text;
	int len = asprintf(&text, "%s/%.*s%c%s", component, (int)name_len, name, 0, stored);

	return names_take(names, len < 0 ? NULL : text);
}

void names_cut(struct loader_names *names, size_t n)
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
static void names_sort(struct loader_names *names)
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
static int names_missing(struct loader_names *missing, const struct loader_names *lacking)
{
	names_cut(missing, 0);
	for (size_t i = 0; i < lacking->n; i++)
		if (names_take(missing, name_copy(lacking->all[i])) < 0)
			return -ENOMEM;
	names_sort(missing);
	return 0;
}

static int names_unexpected(struct loader *l)
{
	const struct load_step *step = l->step;
	base_cleanup_free bool *declared = calloc((size_t)load_step_tensor_count(step) + 1, sizeof *declared);
	struct load_tensor_info info;
	uint32_t first, end;

	if (!declared)
		return -ENOMEM;
	for (size_t i = 0; i < l->ndeclared; i++)
		declared[l->declared[i]] = true;
	names_cut(&l->unexpected, 0);
	for (uint32_t c = 0; c < load_step_component_count(step); c++) {
		if (!l->expected[c])
			continue;
		load_step_component(step, c, &first, &end);
		for (uint32_t i = first; i < end; i++) {
			if (declared[i])
				continue;
			load_step_tensor_info(step, i, &info);
			if (names_add(&l->unexpected, info.component, info.name, info.name_len, "") < 0)
				return -ENOMEM;
		}
	}
	names_sort(&l->unexpected);
	return 0;
}

/* "a, b and 3 more": as many as there is room for. */
static void names_text(const struct loader_names *names, char text[static NAMES_TEXT])
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

int names_compare(struct loader *l, struct base_error *err)
{
	const struct load_step_info *step = load_step_info(l->step);
	char missing[NAMES_TEXT], unexpected[NAMES_TEXT], lacks[NAMES_TEXT + 80] = "", has[NAMES_TEXT + 80] = "";

	if (names_missing(&l->missing, &l->lacking) < 0 || names_unexpected(l) < 0)
		return base_no_memory(err);
	if ((l->options.flags & LOADER_NOT_STRICT) || l->missing.n + l->unexpected.n == 0)
		return 0;
	names_text(&l->missing, missing);
	names_text(&l->unexpected, unexpected);
	if (l->missing.n)
		snprintf(lacks, sizeof lacks, "it lacks %zu %s to be loaded: %s", l->missing.n,
			base_plural(l->missing.n, "tensor that is", "tensors that are"), missing);
	if (l->unexpected.n)
		snprintf(has, sizeof has, "%sit has %zu %s not to be loaded: %s", l->missing.n ? "; " : "",
			l->unexpected.n, base_plural(l->unexpected.n, "tensor that is", "tensors that are"),
			unexpected);
	return base_error_set(err, -EINVAL, "%.100s/%" PRIu64 ": %s%s", step->run, step->step, lacks, has);
}
