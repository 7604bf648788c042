/* SPDX-License-Identifier: Apache-2.0
 *
 * expr_internal: a parsed expression, as expr.c makes it and expr_hold.c evaluates it. */
#ifndef CORE_QUERY_EXPR_INTERNAL_H
#define CORE_QUERY_EXPR_INTERNAL_H

#include "core/query/expr.h"
#include "core/query/value.h"

enum operation { OP_LESS, OP_LESS_EQUAL, OP_MORE, OP_MORE_EQUAL, OP_EQUAL, OP_NOT_EQUAL, OP_GLOB,
	OP_NOT_GLOB, OP_HAS, OP_NOT, OP_AND, OP_OR, OP_ONE };

struct expr_step {
	enum operation op;
	int known;                    /* of names, or -1: an attribute; OP_ONE: number of the group */
	const char *name, *text;      /* in `words` */
	bool is_number;
	struct query_number number;   /* of an attribute's value */
	uint64_t wanted;              /* of other kinds, as `value` in order() wants it; OP_ONE: steps of the group */
};

struct query_expr {
	const struct query_name *names;
	struct expr_step *steps; size_t nsteps;
	size_t *groups, ngroups; /* their first steps, behind OP_ONE */
	char *words; /* of all names and values, each with its NUL */
};

#endif
