/* SPDX-License-Identifier: Apache-2.0
 *
 * retain: see retain.h. Times are those of the commits; one that is later than now counts as now, so that a clock that
 * ran ahead makes no step older than it is. Days and weeks are those of UTC, weeks begin on Monday (ISO 8601), and only
 * those with steps are counted. Where two steps are equally good or equally new, the higher one stays. */
#include "core/upkeep/retain.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "core/base/array.h"
#include "core/base/bisect.h"
#include "core/base/cleanup.h"
#include "core/base/le.h"
#include "core/base/text.h"
#include "core/query/value.h"

#define DAY_NS INT64_C(86400000000000)
#define RANK_FEW 32u

enum kind { KEEP_LAST, KEEP_EVERY, KEEP_WITHIN, KEEP_DAILY, KEEP_WEEKLY, KEEP_BEST, KEEP_STEP, KEEP_IF, WARN_FREE };

static const char *const words[] = {[KEEP_LAST] = "keep-last", [KEEP_EVERY] = "keep-every",
	[KEEP_WITHIN] = "keep-within", [KEEP_DAILY] = "keep-daily", [KEEP_WEEKLY] = "keep-weekly",
	[KEEP_BEST] = "keep-best", [KEEP_STEP] = "keep-step", [KEEP_IF] = "keep-if", [WARN_FREE] = "warn-free"};

static const struct query_name names[] = {QUERY_STEP_NAMES};
static const char *const of_tensors[] = {"tensor", "component", "dtype", "shape", "digest"}; /* of vckpt find */

const char *const upkeep_retain_always[UPKEEP_RETAIN_ALWAYS] = {"highest", "newest", "last", "pinned", "tagged"};

struct rule {
	enum kind kind;
	char *text;
	uint64_t n;                    /* a count; WITHIN: ns */
	char *attribute; bool highest; /* BEST */
	uint64_t *steps; size_t nsteps; /* STEP, ascending */
	struct query_expr *expr;       /* IF */
};

struct upkeep_retain {
	struct rule rules[UPKEEP_RETAIN_MAX];
	unsigned n;
};

struct upkeep_retain *upkeep_retain_new(void)
{
	return calloc(1, sizeof(struct upkeep_retain));
}

static void rule_release(struct rule *rule)
{
	free(rule->text);
	free(rule->attribute);
	free(rule->steps);
	query_expr_free(rule->expr);
}

void upkeep_retain_free(struct upkeep_retain *k)
{
	for (unsigned i = 0; k && i < k->n; i++)
		rule_release(&k->rules[i]);
	free(k);
}

unsigned upkeep_retain_count(const struct upkeep_retain *k)
{
	return k->n;
}

const char *upkeep_retain_rule(const struct upkeep_retain *k, unsigned i)
{
	return k->rules[i].text;
}

/* ---- rules as text ---- */

static int wrong(struct base_error *err, const struct rule *rule, const char *expected)
{
	return base_error_set(err, -EINVAL, "%.300s: give %s", rule->text, expected);
}

/* K:ATTRIBUTE[:min|max] */
static int parse_best(struct rule *rule, const char *value, struct base_error *err)
{
	const char *attribute = base_decimal(value, ':', UINT32_MAX, &rule->n), *order;

	if (!attribute || !rule->n)
		return wrong(err, rule, "K:ATTRIBUTE or K:ATTRIBUTE:max, K from 1 on");
	order = strchrnul(attribute, ':');
	rule->highest = strcmp(order, ":max") == 0;
	if (*order && !rule->highest && strcmp(order, ":min") != 0)
		return wrong(err, rule, ":min or :max after the attribute");
	rule->attribute = strndup(attribute, (size_t)(order - attribute));
	if (!rule->attribute)
		return base_no_memory(err);
	return proto_attribute_key_valid(rule->attribute) ? 0 : wrong(err, rule, "the name of an attribute after K:");
}

static int parse_steps(struct rule *rule, const char *value, struct base_error *err)
{
	const char *next;

	for (; value; value = next) {
		const bool last = !strchr(value, ',');

		if (base_array_more(rule->steps, rule->nsteps) < 0)
			return base_no_memory(err);
		next = base_decimal(value, last ? 0 : ',', INT64_MAX, &rule->steps[rule->nsteps++]);
		if (!next)
			return wrong(err, rule, "numbers of steps, with a comma between two");
		next = last ? NULL : next;
	}
	rule->nsteps = base_array_unique(rule->steps, rule->nsteps, sizeof *rule->steps, base_compare_64);
	return 0;
}

static int parse_value(struct rule *rule, const char *value, struct base_error *err)
{
	int r;

	switch (rule->kind) {
	case KEEP_WITHIN:
		return query_duration_parse(value, &rule->n) ? 0 : wrong(err, rule, "a duration, such as 7d or 12h");
	case KEEP_BEST:
		return parse_best(rule, value, err);
	case KEEP_STEP:
		return parse_steps(rule, value, err);
	case KEEP_IF:
		r = query_expr_parse(value, names, BASE_COUNT(names), &rule->expr, err);
		return r < 0 ? base_error_prefix(err, r, "keep-if") : 0;
	case WARN_FREE:
		return query_bytes_parse(value, &rule->n) && rule->n ? 0 : wrong(err, rule, "bytes, such as 10G");
	default:
		return base_decimal(value, 0, INT64_MAX, &rule->n) && rule->n ? 0 : wrong(err, rule,
			"a number from 1 on");
	}
}

int upkeep_retain_add(struct upkeep_retain *k, const char *text, struct base_error *err)
{
	const size_t len = strcspn(text, "=");
	struct rule rule = {.kind = 0};
	int r;

	while (rule.kind < BASE_COUNT(words) &&
		(strlen(words[rule.kind]) != len || strncmp(words[rule.kind], text, len) != 0))
		rule.kind++;
	if (rule.kind == BASE_COUNT(words))
		return base_error_newer(err, "the rule '%.100s' is none that this vckpt knows", text);
	if (k->n == UPKEEP_RETAIN_MAX)
		return base_error_set(err, -BASE_ELIMIT, "there are more than %u rules", UPKEEP_RETAIN_MAX);
	if (!(rule.text = strdup(text)))
		return base_no_memory(err);
	r = text[len] ? parse_value(&rule, text + len + 1, err) : wrong(err, &rule, "a value after =");
	if (r == 0 && rule.kind != WARN_FREE) {
		k->rules[k->n++] = rule;
		return 0;
	}
	rule_release(&rule); /* upkeep_policy_warn_free gives warn-free to writers */
	return r;
}

/* ---- applying them ---- */

static int64_t time_of(const struct upkeep_retain_row *row)
{
	return row->step.time_ns < row->step.now_ns ? row->step.time_ns : row->step.now_ns;
}

/* What one rule orders rows by: those that come first are kept. */
struct ranked { double value; int64_t time; size_t row; };

static int compare_ranked(const void *a, const void *b)
{
	const struct ranked *x = a, *y = b;

	if (x->value != y->value)
		return (x->value > y->value) - (x->value < y->value);
	if (x->time != y->time)
		return (x->time < y->time) - (x->time > y->time);
	return (x->row < y->row) - (x->row > y->row);
}

/* Puts the first k of n in order, and maybe all. Steps mostly are in order already, and of the best few are wanted. */
static void rank(struct ranked *order, size_t n, size_t k)
{
	size_t i = 1;

	while (i < n && compare_ranked(&order[i - 1], &order[i]) <= 0)
		i++;
	if (i < n && k > RANK_FEW)
		qsort(order, n, sizeof *order, compare_ranked);
	for (; i < n && k <= RANK_FEW; i++) {
		const struct ranked x = order[i];
		size_t at = i < k ? i : k;

		if (at == k && (k == 0 || compare_ranked(&order[k - 1], &x) <= 0))
			continue;
		if (at == k)
			order[i] = order[--at];
		for (; at > 0 && compare_ranked(&x, &order[at - 1]) < 0; at--)
			order[at] = order[at - 1];
		order[at] = x;
	}
}

/* The number of the day, or of the week: 1970-01-01 was a Thursday. */
static int64_t period_of(const struct rule *rule, int64_t time)
{
	const int64_t day = time / DAY_NS - (time % DAY_NS < 0), monday = day + 3;

	return rule->kind == KEEP_DAILY ? day : monday / 7 - (monday % 7 < 0);
}

/* The newest step of each of the last n days or weeks that have steps. */
static int apply_periods(const struct rule *rule, uint64_t bit, struct upkeep_retain_row *rows, size_t n,
	struct base_error *err)
{
	base_cleanup_free struct ranked *order = calloc(n + 1, sizeof *order);
	uint64_t periods = 0;

	if (!order)
		return base_no_memory(err);
	for (size_t i = 0; i < n; i++)
		order[n - 1 - i] = (struct ranked){0, time_of(&rows[i]), i};
	rank(order, n, n);
	for (size_t i = 0; i < n && periods < rule->n; i++) {
		if (i > 0 && period_of(rule, order[i].time) == period_of(rule, order[i - 1].time))
			continue;
		rows[order[i].row].rules |= bit;
		periods++;
	}
	return 0;
}

static int no_attribute(struct base_error *err, const struct rule *rule, const char *attribute)
{
	const char *more = "";

	for (size_t i = 0; rule->kind == KEEP_IF && i < BASE_COUNT(of_tensors); i++)
		if (strcmp(attribute, of_tensors[i]) == 0)
			more = ", and only vckpt find asks for tensors";
	return base_error_set(err, -EINVAL, "%.300s: no step has attribute '%s'%s", rule->text, attribute, more);
}

static int apply_best(const struct rule *rule, uint64_t bit, struct upkeep_retain_row *rows, size_t n,
	struct base_error *err)
{
	base_cleanup_free struct ranked *order = calloc(n + 1, sizeof *order);
	size_t found = 0, ranked = 0;

	if (!order)
		return base_no_memory(err);
	for (size_t i = 0; i < n; i++) {
		const char *text = query_step_attribute(&rows[i].step, rule->attribute);
		struct query_number number;

		if (!text)
			continue;
		if (!query_number_parse(text, &number))
			return base_error_set(err, -EINVAL,
				"%.300s: step %" PRIu64 " has %s '%.100s', which is no number", rule->text,
				rows[i].step.step, rule->attribute, text);
		found++;
		if (!isnan(number.real))
			order[ranked++] = (struct ranked){rule->highest ? -number.real : number.real, 0, i};
	}
	if (!found)
		return no_attribute(err, rule, rule->attribute);
	rank(order, ranked, rule->n);
	for (size_t i = 0; i < ranked && i < rule->n; i++)
		rows[order[i].row].rules |= bit;
	return 0;
}

static bool value_of(const void *arg, int known, const char *name, size_t i, struct query_value *ret_value)
{
	return query_step_value(arg, known, name, i, ret_value);
}

static int apply_if(const struct rule *rule, uint64_t bit, struct upkeep_retain_row *rows, size_t n,
	struct base_error *err)
{
	const char *name;

	for (size_t i = 0; (name = query_expr_attribute(rule->expr, i)); i++) {
		size_t at = 0;

		while (at < n && !query_step_attribute(&rows[at].step, name))
			at++;
		if (at == n)
			return no_attribute(err, rule, name);
	}
	for (size_t i = 0; i < n; i++) {
		const struct query_subject subject = {value_of, &rows[i].step};

		rows[i].rules |= query_expr_holds(rule->expr, &subject) ? bit : 0;
	}
	return 0;
}

/* A rule that looks at one step alone. i: of n, by ascending step. */
static bool keeps_alone(const struct rule *rule, const struct query_step *s, size_t i, size_t n)
{
	switch (rule->kind) {
	case KEEP_LAST: return n - i <= rule->n;
	case KEEP_EVERY: return s->step % rule->n == 0;
	case KEEP_WITHIN: return query_step_age(s->time_ns, s->now_ns) <= rule->n;
	default: return base_search(k, (size_t)0, rule->nsteps, (rule->steps[k] > s->step) -
			(rule->steps[k] < s->step)) >= 0;
	}
}

static int apply_rule(const struct rule *rule, uint64_t bit, struct upkeep_retain_row *rows, size_t n,
	struct base_error *err)
{
	switch (rule->kind) {
	case KEEP_DAILY: case KEEP_WEEKLY: return apply_periods(rule, bit, rows, n, err);
	case KEEP_BEST: return apply_best(rule, bit, rows, n, err);
	case KEEP_IF: return apply_if(rule, bit, rows, n, err);
	default: break;
	}
	for (size_t i = 0; i < n; i++)
		rows[i].rules |= keeps_alone(rule, &rows[i].step, i, n) ? bit : 0;
	return 0;
}

static void apply_always(struct upkeep_retain_row *rows, size_t n)
{
	size_t newest = 0, last = n;

	for (size_t i = 0; i < n; i++) {
		rows[i].rules = 0;
		rows[i].always = (rows[i].step.pinned ? UPKEEP_RETAIN_PINNED : 0) |
			(rows[i].step.ntags ? UPKEEP_RETAIN_TAGGED : 0);
		newest = rows[i].step.time_ns >= rows[newest].step.time_ns ? i : newest;
		if (!rows[i].rewritten && (last == n || rows[i].entry >= rows[last].entry))
			last = i;
	}
	if (n == 0)
		return;
	rows[n - 1].always |= UPKEEP_RETAIN_HIGHEST;
	rows[newest].always |= UPKEEP_RETAIN_NEWEST;
	if (last < n)
		rows[last].always |= UPKEEP_RETAIN_LAST;
}

uint64_t upkeep_retain_missing(const struct upkeep_retain *k, const struct upkeep_retain_row *rows, size_t n)
{
	uint64_t missing = PROTO_NONE;

	for (unsigned i = 0; i < k->n; i++)
		for (size_t s = 0; s < k->rules[i].nsteps; s++) {
			const uint64_t step = k->rules[i].steps[s];

			if (base_search(j, (size_t)0, n, (rows[j].step.step > step) - (rows[j].step.step < step)) < 0)
				missing = base_min(missing, step);
		}
	return missing;
}

int upkeep_retain_apply(const struct upkeep_retain *k, struct upkeep_retain_row *rows, size_t n,
	struct base_error *err)
{
	int r = 0;

	apply_always(rows, n);
	for (unsigned i = 0; r == 0 && n > 0 && i < k->n; i++)
		r = apply_rule(&k->rules[i], UINT64_C(1) << i, rows, n, err);
	return r;
}
