/* SPDX-License-Identifier: Apache-2.0
 *
 * groups: does one tensor of a step make a group of conditions true? Names, dtypes and shapes are those of the set, so
 * each set is asked once. If the group asks for digests, too, the set says which tensors may do (a group has no `not`,
 * so more that is true makes no less of it), and these are asked again with the digests of each step: first for these
 * alone, which rules out nearly all at little cost. */
#include "core/find/find_internal.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/base/array.h"
#include "core/base/cleanup.h"

/* ---- values as they are written in expressions ---- */

static bool take_dtype(char *text, bool pattern)
{
	enum tensor_dtype dtype;
	const char *name;

	if (pattern)
		return true;
	if (tensor_dtype_parse(text, &dtype) < 0)
		return false;
	name = tensor_dtype_name(dtype);
	if (strlen(name) <= strlen(text)) /* numpy's names are longer */
		memcpy(text, name, strlen(name) + 1);
	return true;
}

/* "[4096, 1024]" or "4096,1024" into the latter. */
static bool take_shape(char *text, bool pattern)
{
	const size_t len = strlen(text);
	char *to = text;

	if (len >= 2 && text[0] == '[' && text[len - 1] == ']') {
		memmove(text, text + 1, len - 2);
		text[len - 2] = 0;
	}
	for (const char *at = text; *at; at++)
		if (*at != ' ')
			*to++ = *at;
	*to = 0;
	return pattern || strspn(text, "0123456789,") == strlen(text);
}

static bool take_digest(char *text, bool pattern)
{
	const size_t len = strlen(text);

	for (char *at = text; *at; at++)
		*at = (char)tolower((unsigned char)*at);
	return !pattern && len >= 4 && len <= 2 * BASE_DIGEST_BYTES && strspn(text, "0123456789abcdef") == len;
}

const struct query_name find_names[FIND_NAMES] = {QUERY_STEP_NAMES,
	[FIND_TENSOR] = {"tensor", QUERY_TEXT, true},
	[FIND_COMPONENT] = {"component", QUERY_TEXT, true},
	[FIND_DTYPE] = {"dtype", QUERY_TEXT, true, take_dtype, "a dtype, such as bf16 or f32,"},
	[FIND_SHAPE] = {"shape", QUERY_TEXT, true, take_shape, "a shape, such as [4096,1024] (of a pattern '4096,*'),"},
	[FIND_DIGEST] = {"digest", QUERY_DIGEST, true, take_digest,
		"the first 4 to 64 hexadecimal digits of a digest"}};

/* ---- one tensor ---- */

struct tensor {
	const struct store_layout *layout; /* NULL: any */
	uint32_t number;
	const uint8_t *digest;          /* NULL: any */
	char *name;                     /* room for it */
	char shape[TENSOR_MAX_DIMS * 21 + 1];
};

static const char *name_of(struct tensor *t)
{
	uint32_t len;
	const char *name = store_layout_name(t->layout, t->number, &len);

	memcpy(t->name, name, len);
	t->name[len] = 0;
	return t->name;
}

static const char *shape_of(struct tensor *t)
{
	struct tensor_shape shape;
	int at = 0;

	store_layout_shape(t->layout, t->number, &shape);
	t->shape[0] = 0;
	for (uint32_t d = 0; d < shape.ndim; d++)
		at += snprintf(t->shape + at, sizeof t->shape - (size_t)at, "%s%llu", d ? "," : "",
			(unsigned long long)shape.dim[d]);
	return t->shape;
}

static bool tensor_value(const void *arg, int known, const char *name, size_t i, struct query_value *ret_value)
{
	struct tensor *t = (struct tensor *)arg; /* with room for texts */

	(void)name;
	ret_value->text = known == FIND_DIGEST ? (const char *)t->digest : NULL;
	switch (t->layout ? known : FIND_DIGEST) {
	case FIND_TENSOR: ret_value->text = name_of(t); break;
	case FIND_COMPONENT: ret_value->text = store_layout_component(t->layout, t->number); break;
	case FIND_DTYPE: ret_value->text = tensor_dtype_name(store_layout_dtype(t->layout, t->number)); break;
	case FIND_SHAPE: ret_value->text = shape_of(t); break;
	default: break;
	}
	return i == 0;
}

static bool tensor_holds(const struct find_asking *a, size_t group, const struct find_set *set, uint64_t number,
	const uint8_t *digest)
{
	struct tensor t = {.digest = digest, .name = a->known->name};
	const struct query_subject subject = {.value = tensor_value, .arg = &t};

	t.layout = find_known_tensor(a->known, set, number, &t.number);
	return query_expr_group_holds(a->expr, group, &subject);
}

/* ---- a set, a step ---- */

static int ask_set(const struct find_asking *a, size_t group, struct find_set *set)
{
	const bool one = !query_expr_group_has(a->expr, group, FIND_DIGEST); /* is enough */
	struct find_asked *asked = &set->asked[group];

	if (!a->known->name && !(a->known->name = malloc(PROTO_NAME_MAX + 1)))
		return -ENOMEM;
	for (uint64_t t = 0; t < set->tensors && !(one && asked->n); t++) {
		if (!tensor_holds(a, group, set, t, NULL))
			continue;
		if (base_array_more(asked->tensors, asked->n) < 0)
			return -ENOMEM;
		asked->tensors[asked->n++] = (uint32_t)t;
	}
	asked->known = true;
	return 0;
}

static int ask_digests(struct find_asking *a, size_t group, const struct find_set *set, bool *ret_holds)
{
	const struct find_asked *asked = &set->asked[group];
	struct tensor t = {.layout = NULL};
	const struct query_subject alone = {.value = tensor_value, .arg = &t};
	const uint8_t *digests;
	int r = find_known_digests(a->known, a->run, a->entry, set, &digests, a->err);

	for (uint32_t i = 0; r >= 0 && i < asked->n && !*ret_holds; i++) {
		t.digest = digests + (size_t)asked->tensors[i] * BASE_DIGEST_BYTES;
		*ret_holds = query_expr_group_holds(a->expr, group, &alone) &&
			tensor_holds(a, group, set, asked->tensors[i], t.digest);
	}
	a->read |= r > 0;
	return r;
}

bool find_groups_one(const void *asking, size_t group)
{
	struct find_asking *a = (struct find_asking *)asking;
	struct find_set *set;
	bool holds = false;
	int r;

	if (a->r < 0)
		return false;
	r = find_known_set(a->known, a->run, a->entry, &set, a->err);
	a->read |= r > 0;
	if (r >= 0 && !set->asked[group].known && (r = ask_set(a, group, set)) < 0)
		base_no_memory(a->err);
	if (r >= 0 && set->asked[group].n) {
		holds = !query_expr_group_has(a->expr, group, FIND_DIGEST);
		r = holds ? 0 : ask_digests(a, group, set, &holds);
	}
	a->r = r < 0 ? r : 0;
	return holds && r >= 0;
}

bool find_groups_value(const void *asking, int known, const char *name, size_t i, struct query_value *ret_value)
{
	const struct find_asking *a = asking;

	return query_step_value(&a->step, known, name, i, ret_value);
}
