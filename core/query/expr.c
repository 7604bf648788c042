/* SPDX-License-Identifier: Apache-2.0
 *
 * Expressions.
 *
 *   or      = and ("or" and)...
 *   and     = not ("and" not)...
 *   not     = "not" not | "(" or ")" | "has" name | flag | name operator value
 *   value   = a word, or text in quotation marks ('…' or "…", where \ takes the meaning of the next character away)
 *
 * The parser descends at most QUERY_EXPR_DEPTH levels and leaves steps in postfix order: evaluating them needs no
 * recursion. In a chain of `and`, or of `or`, what asks for tensors only comes last, behind the step `one` if anything
 * else is in the chain: that is a group, which is evaluated for one tensor at a time. There is no shortcut
 * in `and` and `or` (expr_hold.c): nothing has an effect, and time stays bounded by the length. */
#include "core/query/expr_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/base/array.h"
#include "core/base/cleanup.h"
#include "core/base/le.h"
#include "core/base/text.h"
#include "core/query/value.h"
#include "proto/name.h"

BASE_CLEANUP_DEFINE(struct query_expr *, query_expr_free)

enum token { TOKEN_END, TOKEN_OPEN, TOKEN_CLOSE, TOKEN_OPERATOR, TOKEN_WORD, TOKEN_QUOTED };

struct parser {
	struct query_expr *e;
	size_t nnames;
	const char *text, *at; /* at: behind the token */
	const char *token_at; enum token token; /* the one to be looked at */
	const char *word;      /* WORD, QUOTED: without quotation marks */
	enum operation op;     /* OPERATOR */
	char *free;            /* of the words' memory */
	unsigned depth;
	bool of_tensor;        /* what was parsed last asks for tensors only, and is in no group yet */
	struct base_error *err;
};

static const char *const operators[] = {[OP_LESS] = "<", [OP_LESS_EQUAL] = "<=", [OP_MORE] = ">",
	[OP_MORE_EQUAL] = ">=", [OP_EQUAL] = "==", [OP_NOT_EQUAL] = "!=", [OP_GLOB] = "~", [OP_NOT_GLOB] = "!~"};

/* ---- tokens ---- */

static int bad_at(struct parser *p, const char *at, const char *what)
{
	return base_error_set(p->err, -EINVAL, "column %zu of '%.300s': %s", (size_t)(at - p->text) + 1, p->text, what);
}

/* "... is expected, not 'TOKEN'" */
static int expected(struct parser *p, const char *what)
{
	const int len = (int)base_min((size_t)(p->at - p->token_at), (size_t)100);
	char text[400];

	if (p->token == TOKEN_END)
		snprintf(text, sizeof text, "%s is expected at the end", what);
	else
		snprintf(text, sizeof text, "%s is expected, not %.*s", what, len, p->token_at);
	return bad_at(p, p->token_at, text);
}

static int take_quoted(struct parser *p)
{
	const char quote = *p->at++;

	p->word = p->free;
	for (; *p->at && *p->at != quote; p->at++) {
		p->at += *p->at == '\\' && p->at[1];
		*p->free++ = *p->at;
	}
	*p->free++ = 0;
	p->token = TOKEN_QUOTED;
	if (!*p->at++)
		return bad_at(p, p->token_at, "this quotation mark has no second one");
	return 0;
}

static void take_word(struct parser *p)
{
	const size_t inside = *p->at == '[' ? 1 + strspn(p->at + 1, "0123456789, ") : 0; /* of a shape */
	const size_t shape = p->at[inside] == ']' ? inside : 0;
	const size_t len = shape + strcspn(p->at + shape, " \t\r\n()<>=!~'\"");

	p->word = p->free;
	memcpy(p->free, p->at, len);
	p->free[len] = 0;
	p->free += len + 1;
	p->at += len;
	p->token = TOKEN_WORD;
}

static int take_operator(struct parser *p)
{
	size_t found = BASE_COUNT(operators);

	for (size_t i = 0; i < BASE_COUNT(operators); i++) /* the longest that fits */
		if (strncmp(p->at, operators[i], strlen(operators[i])) == 0 &&
			(found == BASE_COUNT(operators) || strlen(operators[i]) > strlen(operators[found])))
			found = i;
	if (found == BASE_COUNT(operators))
		return bad_at(p, p->at, *p->at == '=' ? "= is no operator: equal is ==" : "there is no operator !");
	p->op = (enum operation)found;
	p->at += strlen(operators[found]);
	p->token = TOKEN_OPERATOR;
	return 0;
}

static int next(struct parser *p)
{
	p->at += strspn(p->at, " \t\r\n");
	p->token_at = p->at;
	p->token = TOKEN_END;
	if (!*p->at)
		return 0;
	if (*p->at == '(' || *p->at == ')') {
		p->token = *p->at++ == '(' ? TOKEN_OPEN : TOKEN_CLOSE;
		return 0;
	}
	if (*p->at == '\'' || *p->at == '"')
		return take_quoted(p);
	if (strchr("<>=!~", *p->at))
		return take_operator(p);
	take_word(p);
	return 0;
}

static bool is_word(const struct parser *p, const char *word)
{
	return p->token == TOKEN_WORD && strcmp(p->word, word) == 0;
}

/* ---- parsing ---- */

static int put(struct parser *p, const struct expr_step *s)
{
	if (base_array_more(p->e->steps, p->e->nsteps) < 0)
		return base_no_memory(p->err);
	p->e->steps[p->e->nsteps++] = *s;
	return 0;
}

/* One name; the token is behind it then. */
static int parse_name(struct parser *p, struct expr_step *s)
{
	static const char *const keywords[] = {"and", "or", "not", "has"};

	for (size_t i = 0; i < BASE_COUNT(keywords); i++)
		if (is_word(p, keywords[i]))
			return expected(p, "a name");
	if (p->token != TOKEN_WORD && p->token != TOKEN_QUOTED)
		return expected(p, "a name");
	s->name = p->word;
	s->known = -1;
	for (size_t i = 0; p->token == TOKEN_WORD && i < p->nnames; i++)
		if (strcmp(p->e->names[i].name, p->word) == 0)
			s->known = (int)i;
	if (s->known < 0 && !proto_attribute_key_valid(s->name))
		return expected(p, "the name of an attribute, which comes first (loss < 2.3),");
	return next(p);
}

static int parse_glob(struct parser *p, const struct expr_step *s, enum query_kind kind)
{
	if (s->known >= 0 && kind != QUERY_TEXT)
		return bad_at(p, p->token_at, "~ compares text, and what is before it is none");
	return base_glob_valid(s->text) ? 0 : bad_at(p, p->token_at, "this pattern has a [ without its ]");
}

static int parse_known(struct parser *p, struct expr_step *s, enum query_kind kind)
{
	int64_t time_ns;

	switch (kind) {
	case QUERY_NUMBER:
		return base_decimal(s->text, 0, UINT64_MAX, &s->wanted) ? 0 : expected(p, "a number");
	case QUERY_BYTES:
		return query_bytes_parse(s->text, &s->wanted) ? 0 : expected(p, "a number of bytes, such as 10G,");
	case QUERY_AGE:
		return query_duration_parse(s->text, &s->wanted) ? 0 : expected(p, "a duration, such as 7d or 1d12h,");
	case QUERY_TIME:
		if (!query_date_parse(s->text, &time_ns))
			return expected(p, "a date, such as 2026-11-21 or 2026-11-21T03:34:00Z (UTC),");
		s->wanted = (uint64_t)time_ns;
		return 0;
	default:
		return 0;
	}
}

static int parse_value(struct parser *p, struct expr_step *s)
{
	const struct query_name *name = s->known < 0 ? NULL : &p->e->names[s->known];
	const enum query_kind kind = name ? name->kind : QUERY_TEXT;
	const bool is_pattern = s->op == OP_GLOB || s->op == OP_NOT_GLOB;
	int r;

	if (p->token != TOKEN_WORD && p->token != TOKEN_QUOTED)
		return expected(p, "a value");
	s->text = p->word;
	s->is_number = s->known < 0 && query_number_parse(s->text, &s->number);
	if (name && name->take && !name->take((char *)s->text, is_pattern)) /* in e->words */
		return expected(p, name->expects);
	r = is_pattern ? parse_glob(p, s, kind) : parse_known(p, s, kind);
	return r < 0 ? r : next(p);
}

/* `has` name, a flag, or a comparison */
static int parse_leaf(struct parser *p)
{
	struct expr_step s = {.op = OP_HAS};
	const bool has = is_word(p, "has");
	int r = has ? next(p) : 0;

	if (r < 0 || (r = parse_name(p, &s)) < 0)
		return r;
	if (!has && (s.known < 0 || p->e->names[s.known].kind != QUERY_FLAG)) {
		if (p->token != TOKEN_OPERATOR)
			return expected(p, "one of < <= > >= == != ~");
		s.op = p->op;
		if ((r = next(p)) < 0 || (r = parse_value(p, &s)) < 0)
			return r;
	}
	p->of_tensor = s.known >= 0 && p->e->names[s.known].of_tensor;
	return put(p, &s);
}

/* The steps from `at` on become a group. */
static int group(struct parser *p, size_t at)
{
	struct query_expr *e = p->e;
	const struct expr_step one = {.op = OP_ONE, .wanted = e->nsteps - at};
	int r = put(p, &one);

	if (r < 0)
		return r;
	memmove(&e->steps[at + 1], &e->steps[at], (size_t)one.wanted * sizeof one);
	e->steps[at] = one;
	p->of_tensor = false;
	return 0;
}

static int parse_or(struct parser *p);

/* Behind `not`, or an opening parenthesis. */
static int parse_inner(struct parser *p, bool negated, int (*parse)(struct parser *p))
{
	const size_t at = p->e->nsteps;
	int r = next(p);

	if (r < 0 || (r = parse(p)) < 0 || (negated && p->of_tensor && (r = group(p, at)) < 0))
		return r;
	if (negated)
		return put(p, &(struct expr_step){.op = OP_NOT});
	return p->token == TOKEN_CLOSE ? next(p) : expected(p, "and, or, or )");
}

static int parse_not(struct parser *p)
{
	const bool negated = is_word(p, "not");
	int r;

	if (!negated && p->token != TOKEN_OPEN)
		return parse_leaf(p);
	if (p->depth == QUERY_EXPR_DEPTH)
		return bad_at(p, p->token_at, "too many parentheses and nots are within each other");
	p->depth++;
	r = parse_inner(p, negated, negated ? parse_not : parse_or);
	p->depth--;
	return r;
}

/* The steps from `from` on go before those from `to` on. */
static int move_back(struct parser *p, size_t to, size_t from)
{
	struct expr_step *steps = p->e->steps;
	const size_t n = p->e->nsteps - from;
	base_cleanup_free struct expr_step *moved = malloc(n * sizeof *moved);

	if (!moved)
		return base_no_memory(p->err);
	memcpy(moved, steps + from, n * sizeof *moved);
	memmove(steps + to + n, steps + to, (from - to) * sizeof *steps);
	memcpy(steps + to, moved, n * sizeof *moved);
	return 0;
}

/* One member of a chain from `start` on, whose steps that ask for tensors only begin at *tensors. */
static int parse_member(struct parser *p, const struct expr_step *join, size_t start, size_t *tensors,
	int (*parse)(struct parser *p))
{
	const size_t at = p->e->nsteps;
	int r = parse(p);

	if (r >= 0 && (p->of_tensor ? at > *tensors : *tensors > start))
		r = put(p, join);
	if (r < 0 || p->of_tensor)
		return r;
	r = at > *tensors ? move_back(p, *tensors, at) : 0;
	*tensors += p->e->nsteps - at;
	return r;
}

static int parse_chain(struct parser *p, const char *word, enum operation op, int (*parse)(struct parser *p))
{
	const struct expr_step join = {.op = op};
	const size_t start = p->e->nsteps;
	size_t tensors = start;
	int r = parse_member(p, &join, start, &tensors, parse);

	while (r >= 0 && is_word(p, word))
		if ((r = next(p)) >= 0)
			r = parse_member(p, &join, start, &tensors, parse);
	p->of_tensor = tensors == start;
	if (r < 0 || tensors == start || tensors == p->e->nsteps)
		return r;
	r = group(p, tensors);
	return r < 0 ? r : put(p, &join);
}

static int parse_and(struct parser *p)
{
	return parse_chain(p, "and", OP_AND, parse_not);
}

static int parse_or(struct parser *p)
{
	return parse_chain(p, "or", OP_OR, parse_and);
}

/* All is parsed. */
static int number_groups(struct parser *p)
{
	struct query_expr *e = p->e;

	if (p->of_tensor && group(p, 0) < 0)
		return -ENOMEM;
	for (size_t i = 0; i < e->nsteps; i++) {
		if (e->steps[i].op != OP_ONE)
			continue;
		if (base_array_more(e->groups, e->ngroups) < 0)
			return base_no_memory(p->err);
		e->steps[i].known = (int)e->ngroups;
		e->groups[e->ngroups++] = i + 1;
	}
	return 0;
}

int query_expr_parse(const char *text, const struct query_name *names, size_t nnames, struct query_expr **ret_e,
	struct base_error *err)
{
	base_cleanup(query_expr_free_p) struct query_expr *e = calloc(1, sizeof *e);
	const size_t len = strlen(text);
	struct parser p = {.e = e, .nnames = nnames, .text = text, .at = text, .err = err};
	int r;

	if (len > QUERY_EXPR_BYTES)
		return base_error_set(err, -BASE_ELIMIT, "an expression has at most %u bytes, and this one has %zu",
			QUERY_EXPR_BYTES, len);
	if (!e || !(e->words = malloc(2 * len + 1))) /* a word of one byte has two here */
		return base_no_memory(err);
	e->names = names;
	p.free = e->words;
	if ((r = next(&p)) < 0 || (r = parse_or(&p)) < 0)
		return r;
	if (p.token != TOKEN_END)
		return expected(&p, "and, or, or the end");
	if ((r = number_groups(&p)) < 0)
		return r;
	*ret_e = base_steal(e);
	return 0;
}

void query_expr_free(struct query_expr *e)
{
	if (!e)
		return;
	free(e->steps);
	free(e->groups);
	free(e->words);
	free(e);
}

const char *query_expr_attribute(const struct query_expr *e, size_t i)
{
	for (size_t k = 0; k < e->nsteps; k++)
		if (e->steps[k].name && e->steps[k].known < 0 && i-- == 0)
			return e->steps[k].name;
	return NULL;
}
