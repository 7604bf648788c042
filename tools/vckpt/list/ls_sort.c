/* SPDX-License-Identifier: Apache-2.0
 *
 * The order of vckpt ls: by one key, ascending; equal ones keep their order. Attributes that are numbers are compared
 * as numbers and come before those that are not; what lacks the attribute comes last. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tools/vckpt/list/ls.h"

struct order {
	unsigned key;
	const char *attribute;
};

static const struct { const char *word; unsigned key; } words[] = {
	{"name", LS_NAME}, {"step", LS_STEP}, {"time", LS_TIME}, {"size", LS_SIZE}};

static int compare_numbers(double a, double b) { return (a > b) - (a < b); }

static int compare_names(const struct ls_item *a, const struct ls_item *b)
{
	int order = a->name && b->name ? memcmp(a->name, b->name, base_min(a->name_len, b->name_len)) : 0;

	return order ? order : (a->name_len > b->name_len) - (a->name_len < b->name_len);
}

static const char *attribute_of(const struct ls_item *item, const char *key)
{
	for (size_t i = 0; i < item->nattributes; i++)
		if (strcmp(item->attributes[i].key, key) == 0)
			return item->attributes[i].value;
	return NULL;
}

static bool number_of(const char *text, double *ret)
{
	char *end;

	*ret = strtod(text, &end);
	return end != text && !*end && !isnan(*ret);
}

static int compare_attributes(const char *a, const char *b)
{
	double x, y;
	bool a_number, b_number;

	if (!a || !b)
		return !a - !b;
	a_number = number_of(a, &x);
	b_number = number_of(b, &y);
	if (a_number && b_number)
		return compare_numbers(x, y);
	return a_number || b_number ? b_number - a_number : strcmp(a, b);
}

static int compare_by(const struct ls_item *a, const struct ls_item *b, const struct order *o)
{
	switch (o->key) {
	case LS_NAME:
		return compare_names(a, b);
	case LS_STEP:
		return (a->step > b->step) - (a->step < b->step);
	case LS_TIME:
		return (a->time_ns > b->time_ns) - (a->time_ns < b->time_ns);
	case LS_SIZE:
		return (a->bytes > b->bytes) - (a->bytes < b->bytes);
	default:
		return compare_attributes(attribute_of(a, o->attribute), attribute_of(b, o->attribute));
	}
}

static int compare(const void *x, const void *y, void *arg)
{
	const struct ls_item *a = x, *b = y;
	int order = compare_by(a, b, arg);

	return order ? order : (a->index > b->index) - (a->index < b->index);
}

static void reverse(struct ls_item *items, size_t n)
{
	for (size_t i = 0; i < n / 2; i++) {
		struct ls_item item = items[i];

		items[i] = items[n - 1 - i];
		items[n - 1 - i] = item;
	}
}

static int refuse(const struct ls *ls, const char *what, unsigned keys)
{
	char text[100] = "";

	for (size_t i = 0; i < BASE_COUNT(words); i++)
		if (keys & words[i].key)
			snprintf(text + strlen(text), sizeof text - strlen(text), "%s%s", *text ? ", " : "",
				words[i].word);
	return tool_usage(ls->t, "--sort %.100s: %s are sorted by %s%s", ls->sort, what, text,
		keys & LS_ATTRIBUTE ? ", or an attribute that one of them has" : "");
}

int ls_sort(const struct ls *ls, const char *what, unsigned keys, struct ls_item *items, size_t n)
{
	struct order order = {.key = LS_ATTRIBUTE, .attribute = ls->sort};
	bool known = false;

	for (size_t i = 0; ls->sort && i < BASE_COUNT(words); i++)
		if (strcmp(words[i].word, ls->sort) == 0)
			order.key = words[i].key;
	for (size_t i = 0; ls->sort && order.key == LS_ATTRIBUTE && i < n && !known; i++)
		known = attribute_of(&items[i], ls->sort);
	if (ls->sort && (!(order.key & keys) || (order.key == LS_ATTRIBUTE && !known && n)))
		return refuse(ls, what, keys);
	if (ls->sort)
		qsort_r(items, n, sizeof *items, compare, &order);
	if (ls->reverse)
		reverse(items, n);
	return 0;
}
