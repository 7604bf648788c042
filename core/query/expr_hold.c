/* SPDX-License-Identifier: Apache-2.0
 *
 * expr_hold: whether an expression holds. */
#include <string.h>

#include "core/base/digest.h"
#include "core/base/le.h"
#include "core/base/text.h"
#include "core/query/expr_internal.h"

/* Do the bytes begin with these hexadecimal digits? */
static bool begins_with(const char *bytes, const char *digits)
{
	for (size_t i = 0; digits[i] && i < 2 * BASE_DIGEST_BYTES; i++) {
		const unsigned half = (uint8_t)bytes[i / 2] >> (i % 2 ? 0 : 4) & 15;

		if (digits[i] != "0123456789abcdef"[half])
			return false;
	}
	return true;
}

/* -1, 0, 1: value against what is wanted; 2: in no order */
static int order(const struct query_expr *e, const struct expr_step *s, const struct query_value *v)
{
	struct query_number number;
	int order;

	if (s->known >= 0 && e->names[s->known].kind == QUERY_TIME)
		return ((int64_t)v->number > (int64_t)s->wanted) - ((int64_t)v->number < (int64_t)s->wanted);
	if (s->known >= 0 && e->names[s->known].kind == QUERY_DIGEST)
		return begins_with(v->text, s->text) ? 0 : 2;
	if (s->known >= 0 && e->names[s->known].kind != QUERY_TEXT)
		return (v->number > s->wanted) - (v->number < s->wanted);
	if (s->is_number && query_number_parse(v->text, &number))
		return query_number_compare(&number, &s->number);
	order = strcmp(v->text, s->text);
	return (order > 0) - (order < 0);
}

static bool is_denied(enum operation op)
{
	return op == OP_NOT_EQUAL || op == OP_NOT_GLOB;
}

/* Does this value make the comparison true? Of OP_NOT_EQUAL and OP_NOT_GLOB: the opposite one? */
static bool one_fits(const struct query_expr *e, const struct expr_step *s, const struct query_value *v)
{
	int o;

	if (s->op == OP_HAS)
		return true;
	if (!v->text && s->known >= 0 && e->names[s->known].of_tensor) /* not known */
		return !is_denied(s->op);
	if (s->op == OP_GLOB || s->op == OP_NOT_GLOB)
		return base_glob_fits(s->text, v->text, strlen(v->text));
	o = order(e, s, v);
	switch (s->op) {
	case OP_LESS: return o == -1;
	case OP_LESS_EQUAL: return o == -1 || o == 0;
	case OP_MORE: return o == 1;
	case OP_MORE_EQUAL: return o == 1 || o == 0;
	default: return o == 0;
	}
}

static bool leaf_holds(const struct query_expr *e, const struct expr_step *s, const struct query_subject *q)
{
	struct query_value v = {0};
	bool any = false;
	size_t i = 0;

	for (; !any && q->value(q->arg, s->known, s->name, i, &v); i++)
		any = one_fits(e, s, &v);
	return is_denied(s->op) ? i && !any : any;
}

/* A leaf takes two bytes and more (with what parts it from the next), and each but the first is joined by an `and` or
 * `or`: fewer than that many results wait. */
static bool steps_hold(const struct query_expr *e, const struct expr_step *at, size_t nsteps,
	const struct query_subject *s)
{
	const struct expr_step *const end = at + nsteps;
	bool stack[QUERY_EXPR_BYTES / 2 + 2];
	size_t n = 0;

	for (; at < end; at++) {
		if (at->op == OP_NOT) {
			stack[n - 1] = !stack[n - 1];
		} else if (at->op == OP_AND || at->op == OP_OR) {
			n--;
			stack[n - 1] = at->op == OP_AND ? stack[n - 1] && stack[n] : stack[n - 1] || stack[n];
		} else if (at->op == OP_ONE) {
			stack[n++] = s->one(s->arg, (size_t)at->known);
			at += at->wanted;
		} else {
			stack[n++] = leaf_holds(e, at, s);
		}
	}
	return stack[0];
}

bool query_expr_holds(const struct query_expr *e, const struct query_subject *s)
{
	return steps_hold(e, e->steps, e->nsteps, s);
}

/* ---- groups ---- */

size_t query_expr_groups(const struct query_expr *e)
{
	return e->ngroups;
}

bool query_expr_group_holds(const struct query_expr *e, size_t number, const struct query_subject *s)
{
	const struct expr_step *first = &e->steps[e->groups[number]];

	return steps_hold(e, first, first[-1].wanted, s);
}

bool query_expr_group_has(const struct query_expr *e, size_t number, int known)
{
	const struct expr_step *first = &e->steps[e->groups[number]];

	for (const struct expr_step *at = first; at < first + first[-1].wanted; at++)
		if (at->op < OP_NOT && at->known == known)
			return true;
	return false;
}
