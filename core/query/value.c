/* SPDX-License-Identifier: Apache-2.0
 *
 * value: see value.h. */
#include "core/query/value.h"

#include <errno.h>
#include <locale.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "core/base/le.h"

#define DIGITS "0123456789"

/* ---- numbers ---- */

static bool is_digit(char c)
{
	return c >= '0' && c <= '9';
}

/* [+-] digits [. digits] [e [+-] digits], with a digit before the exponent; *ret_whole: without point and exponent. */
static bool number_shape(const char *at, bool *ret_whole)
{
	size_t before, behind = 0;

	at += *at == '+' || *at == '-';
	before = strspn(at, DIGITS);
	at += before;
	*ret_whole = *at == 0;
	if (*at == '.') {
		behind = strspn(at + 1, DIGITS);
		at += 1 + behind;
	}
	if (before + behind && (*at == 'e' || *at == 'E')) {
		at += 1 + (at[1] == '+' || at[1] == '-');
		if (!is_digit(*at))
			return false;
		at += strspn(at, DIGITS);
	}
	return before + behind && *at == 0;
}

static bool named_number(const char *text, double *ret)
{
	const char *word = text + (*text == '+' || *text == '-');
	const bool infinite = !strcasecmp(word, "inf") || !strcasecmp(word, "infinity");

	*ret = infinite ? *text == '-' ? -(double)INFINITY : (double)INFINITY : (double)NAN;
	return infinite || !strcasecmp(word, "nan");
}

/* Of at most 15 digits and no exponent both the digits and the power of ten are exact, and so their quotient is the
 * nearest double: ten thousand steps have ten thousand losses. false: it is another number. */
static bool short_double(const char *text, double *ret_real)
{
	static const double tens[] = {1, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10, 1e11, 1e12, 1e13, 1e14,
		1e15};
	const char *at = text + (*text == '+' || *text == '-'), *point = NULL;
	int64_t digits = 0;
	size_t n = 0, behind = 0;

	for (; *at; at++) {
		if (*at == '.') {
			point = at;
			continue;
		}
		if (!is_digit(*at) || ++n > 15)
			return false;
		digits = digits * 10 + (*at - '0');
		behind += point != NULL;
	}
	*ret_real = (*text == '-' ? -(double)digits : (double)digits) / tens[behind];
	return true;
}

/* A program may have any locale, and this is called in it: no sign of a locale is a point here. */
static double to_double(const char *text)
{
	locale_t c;
	double real;

	if (short_double(text, &real))
		return real;
	c = newlocale(LC_NUMERIC_MASK, "C", (locale_t)0);
	if (!c)
		return strtod(text, NULL);
	real = strtod_l(text, NULL, c);
	freelocale(c);
	return real;
}

bool query_number_parse(const char *text, struct query_number *ret_n)
{
	*ret_n = (struct query_number){0};
	if (named_number(text, &ret_n->real))
		return true;
	if (!number_shape(text, &ret_n->whole))
		return false;
	errno = 0;
	ret_n->integer = ret_n->whole ? strtoll(text, NULL, 10) : 0;
	ret_n->whole &= errno == 0;
	ret_n->real = ret_n->whole ? (double)ret_n->integer : to_double(text);
	return true;
}

int query_number_compare(const struct query_number *a, const struct query_number *b)
{
	if (a->whole && b->whole)
		return (a->integer > b->integer) - (a->integer < b->integer);
	if (isnan(a->real) || isnan(b->real))
		return 2;
	return (a->real > b->real) - (a->real < b->real);
}

/* ---- durations, sizes ---- */

/* The digits at *at, which moves behind them. */
static bool take_digits(const char **at, uint64_t *ret_n)
{
	const char *first = *at;

	for (*ret_n = 0; is_digit(**at); ++*at)
		if (base_mul_overflows(*ret_n, 10, ret_n) || base_add_overflows(*ret_n, (uint64_t)(**at - '0'), ret_n))
			return false;
	return *at > first;
}

static uint64_t unit_ns(char c)
{
	const uint64_t s = 1000000000;

	switch (c) {
	case 's': return s;
	case 'm': return 60 * s;
	case 'h': return 3600 * s;
	case 'd': return 86400 * s;
	case 'w': return 7 * 86400 * s;
	default: return 0;
	}
}

bool query_duration_parse(const char *text, uint64_t *ret_ns)
{
	uint64_t total = 0, n, unit;

	do {
		if (!take_digits(&text, &n) || !(unit = unit_ns(*text++)) || base_mul_overflows(n, unit, &n) ||
			base_add_overflows(total, n, &total) || total > INT64_MAX)
			return false;
	} while (*text);
	*ret_ns = total;
	return true;
}

bool query_bytes_parse(const char *text, uint64_t *ret_bytes)
{
	static const char units[] = "KMGT";
	const char *unit;

	if (!take_digits(&text, ret_bytes))
		return false;
	if (!*text)
		return true;
	unit = strchr(units, *text++);
	if (!unit || (*text && strcmp(text, "iB") != 0))
		return false;
	return !base_mul_overflows(*ret_bytes, 1ull << 10 * (unit - units + 1), ret_bytes);
}

/* ---- dates ---- */

static bool is_leap(unsigned year)
{
	return year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
}

static unsigned days_of(unsigned year, unsigned month)
{
	return month == 2 ? 28 + is_leap(year) : month == 4 || month == 6 || month == 9 || month == 11 ? 30 : 31;
}

/* Days from 1970-01-01; year: 1970 to 2261, which nanoseconds in 64 bits can say. */
static int64_t days_since(unsigned year, unsigned month, unsigned day)
{
	int64_t days = (int64_t)day - 1;

	for (unsigned y = 1970; y < year; y++)
		days += 365 + is_leap(y);
	for (unsigned m = 1; m < month; m++)
		days += days_of(year, m);
	return days;
}

/* Digits where the pattern has a 0, and the pattern's own character elsewhere. */
static bool fits_pattern(const char *text, const char *pattern)
{
	for (; *pattern; text++, pattern++)
		if (*pattern == '0' ? !is_digit(*text) : *text != *pattern)
			return false;
	return true;
}

bool query_date_parse(const char *text, int64_t *ret_ns)
{
	unsigned year, month, day, hour = 0, minute = 0, second = 0;
	const char *rest = text + 10;

	if (!fits_pattern(text, "0000-00-00"))
		return false;
	sscanf(text, "%4u-%2u-%2u", &year, &month, &day);
	if (fits_pattern(rest, "T00:00")) {
		const bool exact = fits_pattern(rest + 6, ":00");

		sscanf(rest, "T%2u:%2u:%2u", &hour, &minute, &second);
		rest += exact ? 9 : 6;
		rest += *rest == 'Z';
	}
	if (*rest || year < 1970 || year > 2261 || month < 1 || month > 12 || day < 1 || day > days_of(year, month) ||
		hour > 23 || minute > 59 || second > 59)
		return false;
	*ret_ns = (((days_since(year, month, day) * 24 + hour) * 60 + minute) * 60 + second) * 1000000000;
	return true;
}
