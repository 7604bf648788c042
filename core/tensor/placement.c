/* SPDX-License-Identifier: Apache-2.0
 *
 * placement: reading and writing the words. Grammar, spaces allowed between tokens:
 *
 *   words = word *("," word)
 *   word  = "R" | "P" | "S(" n ")" | "SS(" n "," n ")" | "IS(" n "," n ")" | "RS(" [n *("," n)] ";" n *("," n) ")"
 *
 * What a word can mean for some tensor is checked here (leading dimensions, a split that is not 0); what depends on
 * shape and mesh is checked in shard_check.c. */
#include "core/tensor/placement.h"

#include <errno.h>
#include <string.h>

static const char *const placement_names[] = {"R", "S", "SS", "IS", "RS", "P"}; /* by kind */

struct words {
	const char *at, *word;          /* where reading goes on; where the current word began */
	struct base_error *err;
};

static void words_space(struct words *w)
{
	while (*w->at == ' ')
		w->at++;
}

/* The whole current word, to the comma outside of brackets, for messages. */
static int words_bad(const struct words *w, int code, const char *why)
{
	int len = 0, depth = 0;

	for (const char *c = w->word; *c && (*c != ',' || depth > 0) && len < 60; c++, len++)
		depth += (*c == '(') - (*c == ')');
	return base_error_set(w->err, code,
		"placement \"%.*s\": %s (R, S(d), SS(d,split), IS(d,k), RS(d0,d1;u0,u1), P)", len, w->word, why);
}

static bool words_take(struct words *w, char c)
{
	words_space(w);
	if (*w->at != c)
		return false;
	w->at++;
	return true;
}

static int words_number(struct words *w, uint64_t *ret_n)
{
	uint64_t n = 0;

	words_space(w);
	if (*w->at < '0' || *w->at > '9')
		return words_bad(w, -EINVAL, "a number is missing");
	for (; *w->at >= '0' && *w->at <= '9'; w->at++)
		if (base_mul_overflows(n, 10, &n) || base_add_overflows(n, (uint64_t)(*w->at - '0'), &n))
			return words_bad(w, -EINVAL, "a number is beyond 64 bits");
	*ret_n = n;
	return 0;
}

/* A dimension of the tensor; those past the largest shape are reported when a shape is at hand. */
static int words_dim(struct words *w, uint32_t *ret_dim)
{
	uint64_t n = 0;
	int r = words_number(w, &n);

	if (r == 0 && n >= TENSOR_MAX_DIMS)
		return words_bad(w, -EINVAL, "a tensor has dimensions 0 to 15");
	*ret_dim = (uint32_t)n;
	return r;
}

/* Behind "RS(". */
static int words_ragged(struct words *w, struct tensor_placement *p, uint64_t **ends)
{
	uint32_t dim = 0;
	int r;

	for (words_space(w); *w->at != ';'; p->dim++) {
		if (p->dim > 0 && !words_take(w, ','))
			return words_bad(w, -EINVAL, "\";\" and the units are missing");
		r = words_dim(w, &dim);
		if (r < 0)
			return r;
		if (dim != p->dim)
			return words_bad(w, -EINVAL, "only leading dimensions, 0,1,…, can be ragged");
		words_space(w);
	}
	w->at++;
	p->ends = *ends;
	do {
		uint64_t units = 0, end = p->nends ? p->ends[p->nends - 1] : 0;

		r = words_number(w, &units);
		if (r == 0 && base_add_overflows(end, units, *ends))
			return words_bad(w, -EOVERFLOW, "the units sum to more than 64 bits");
		(*ends)++;
		p->nends++;
	} while (r == 0 && words_take(w, ','));
	return r;
}

static int words_arguments(struct words *w, struct tensor_placement *p, uint64_t **ends)
{
	int r;

	if (!words_take(w, '('))
		return words_bad(w, -EINVAL, "\"(\" is missing");
	if (p->kind == TENSOR_RAGGED_SHARD)
		r = words_ragged(w, p, ends);
	else
		r = words_dim(w, &p->dim);
	if (r == 0 && (p->kind == TENSOR_STRIDED_SHARD || p->kind == TENSOR_INTERLEAVED_SHARD)) {
		if (!words_take(w, ','))
			return words_bad(w, -EINVAL, "the second number is missing");
		r = words_number(w, &p->split);
		if (r == 0 && p->split == 0)
			return words_bad(w, -EINVAL, "the second number is 0");
	}
	if (r == 0 && !words_take(w, ')'))
		return words_bad(w, -EINVAL, "\")\" is missing");
	return r;
}

static int words_one(struct words *w, struct tensor_placement *p, uint64_t **ends)
{
	size_t len;

	words_space(w);
	w->word = w->at;
	len = strspn(w->at, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz");
	for (size_t kind = 0; kind < BASE_COUNT(placement_names); kind++) {
		if (strlen(placement_names[kind]) != len || strncmp(w->at, placement_names[kind], len) != 0)
			continue;
		w->at += len;
		*p = (struct tensor_placement){.kind = (enum tensor_placement_kind)kind};
		return p->kind == TENSOR_REPLICATE || p->kind == TENSOR_PARTIAL ? 0 : words_arguments(w, p, ends);
	}
	return words_bad(w, -EINVAL, len ? "there is no such placement" : "a placement is missing");
}

int tensor_placements_parse(const char *text, struct tensor_placements **ret_p, struct base_error *err)
{
	base_cleanup_free struct tensor_placements *all = NULL;
	struct words w = {text, text, err};
	size_t room = 1;
	uint64_t *ends;

	for (const char *c = text; *c; c++)
		room += *c == ',';              /* at least as many as there are numbers behind a ";" */
	all = calloc(1, sizeof *all + (room + TENSOR_MAX_DIMS) * sizeof *ends);
	if (!all)
		return base_no_memory(err);
	ends = (uint64_t *)(all + 1);
	for (;;) {
		int r;

		if (all->n == TENSOR_MAX_DIMS)
			return base_error_set(err, -BASE_ELIMIT, "placement: more than %u words, one a mesh dimension",
				TENSOR_MAX_DIMS);
		r = words_one(&w, &all->at[all->n++], &ends);
		if (r < 0)
			return r;
		words_space(&w);
		if (*w.at == 0)
			break;
		if (*w.at++ != ',')
			return words_bad(&w, -EINVAL, "there is more text after it");
	}
	*ret_p = base_steal(all);
	return 0;
}

void tensor_placements_print(const struct tensor_placement *p, uint32_t n, struct base_buf *b)
{
	for (uint32_t i = 0; i < n; i++, p++) {
		base_buf_printf(b, "%s%s", i ? "," : "", placement_names[p->kind]);
		if (p->kind == TENSOR_REPLICATE || p->kind == TENSOR_PARTIAL)
			continue;
		if (p->kind != TENSOR_RAGGED_SHARD)
			base_buf_printf(b, "(%u", p->dim);
		if (p->kind == TENSOR_STRIDED_SHARD || p->kind == TENSOR_INTERLEAVED_SHARD)
			base_buf_printf(b, ",%llu", (unsigned long long)p->split);
		if (p->kind == TENSOR_RAGGED_SHARD) {
			base_buf_append_text(b, "(");
			for (uint32_t d = 0; d < p->dim; d++)
				base_buf_printf(b, "%s%u", d ? "," : "", d);
			for (uint32_t u = 0; u < p->nends; u++)
				base_buf_printf(b, "%c%llu", u ? ',' : ';',
					(unsigned long long)(p->ends[u] - (u ? p->ends[u - 1] : 0)));
		}
		base_buf_append_text(b, ")");
	}
}

bool tensor_placement_equal(const struct tensor_placement *a, const struct tensor_placement *b)
{
	if (a->kind != b->kind)
		return false;
	if (a->kind == TENSOR_REPLICATE || a->kind == TENSOR_PARTIAL)
		return true;
	if (a->dim != b->dim)
		return false;
	if (a->kind == TENSOR_RAGGED_SHARD)
		return a->nends == b->nends && memcmp(a->ends, b->ends, a->nends * sizeof *a->ends) == 0;
	return a->kind == TENSOR_SHARD || a->split == b->split;
}
