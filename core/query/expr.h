/* SPDX-License-Identifier: Apache-2.0
 *
 * expr: an expression about a step, such as `loss < 2.3 and not tag == bad` (docs/expressions.md). It is parsed once,
 * with the names that the caller can answer for; every other name is one of an attribute. Evaluating asks the caller
 * for values; it allocates nothing and takes time in proportion to the expression. Read-only once parsed: any thread.
 *
 * A name may have no value, or several (tags). A comparison is true if one of the values makes it true; != is true if
 * there is a value, and none is equal.
 *
 * Names may also be of one of the step's parts: its tensors. Comparisons of these that are joined by `and` ask for one
 * tensor that makes all of them true (a group): the caller goes through the tensors. */
#ifndef CORE_QUERY_EXPR_H
#define CORE_QUERY_EXPR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/base/error.h"

#define QUERY_EXPR_BYTES 4096u /* of an expression */
#define QUERY_EXPR_DEPTH 64u   /* of parentheses and `not` within each other */

enum query_kind {
	QUERY_TEXT,   /* value.text, compared as bytes; ~ is for this kind and for attributes */
	QUERY_NUMBER, /* value.number */
	QUERY_BYTES,  /* value.number; may be written as 10G */
	QUERY_AGE,    /* value.number, ns; written as 7d, 12h */
	QUERY_TIME,   /* value.number, ns since 1970 as int64_t; written as a date */
	QUERY_FLAG,   /* has a value (any), or none; used alone */
	QUERY_DIGEST, /* value.text: the 32 bytes, compared with the first hexadecimal digits of one */
};

struct query_name {
	const char *name;
	enum query_kind kind;
	bool of_tensor; /* value.text may be NULL: it is not known, and every comparison holds */
	/* QUERY_TEXT, QUERY_DIGEST: is this a value (pattern: of ~)? It may be made shorter in place. NULL: any is. */
	bool (*take)(char *text, bool pattern);
	const char *expects; /* what it takes, for an error */
};
struct query_value { const char *text; uint64_t number; };

struct query_subject {
	/* The i-th value (from 0) of names[known], or, where known is -1, of the attribute `name`: `text` then, which
	 * is compared as a number where both sides are numbers. false: there are no more. */
	bool (*value)(const void *arg, int known, const char *name, size_t i, struct query_value *ret_value);
	const void *arg;
	/* Whether one tensor makes group number `group` true; the caller asks query_expr_group_holds of each. May be
	 * NULL where no name is of a tensor. */
	bool (*one)(const void *arg, size_t group);
};

struct query_expr;
/* `names` (borrowed, outlives the expression) are what a bare word may mean; a word in quotation marks is always an
 * attribute. -EINVAL: the error has the column, in bytes from 1 on; -BASE_ELIMIT: too long; -ENOMEM. */
int query_expr_parse(const char *text, const struct query_name *names, size_t nnames, struct query_expr **ret_e,
	struct base_error *err);
void query_expr_free(struct query_expr *e); /* NULL-safe */
bool query_expr_holds(const struct query_expr *e, const struct query_subject *s);
/* For one tensor; s->value is asked for names of tensors only. */
size_t query_expr_groups(const struct query_expr *e);
bool query_expr_group_holds(const struct query_expr *e, size_t group, const struct query_subject *s);
bool query_expr_group_has(const struct query_expr *e, size_t group, int known); /* that name */
/* The names of attributes in it, in order, with repetitions; NULL: no more. A caller asks whether any step has them. */
const char *query_expr_attribute(const struct query_expr *e, size_t i);

#endif
