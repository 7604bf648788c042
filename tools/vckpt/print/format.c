/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/vckpt/print/format.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "core/base/le.h"
#include "core/base/text.h"

void tool_print_text(FILE *to, const char *text, size_t len)
{
	for (size_t i = 0, n; i < len; i += n) {
		size_t unsafe = base_text_unsafe(text + i, len - i, &n);

		for (size_t k = 0; k < unsafe; k++)
			fprintf(to, "\\x%02x", (unsigned char)text[i + k]);
		if (!unsafe)
			fwrite(text + i, 1, n, to);
		n = unsafe ? unsafe : n;
	}
}

void tool_print(FILE *to, const char *format, ...)
{
	char *text;
	int len;
	bool line;
	va_list args;

	va_start(args, format);
	len = vasprintf(&text, format, args);
	va_end(args);
	if (len < 0)
		return;
	line = len && text[len - 1] == '\n';
	tool_print_text(to, text, (size_t)len - line);
	fputs(line ? "\n" : "", to);
	free(text);
}

char *tool_string(const char *format, ...)
{
	char *text;
	int len;
	va_list args;

	va_start(args, format);
	len = vasprintf(&text, format, args);
	va_end(args);
	return len < 0 ? NULL : text;
}

const char *tool_shell_word(const char *text, char word[static TOOL_WORD_BYTES])
{
	bool plain = text[0] != 0;
	size_t n = 0;

	word[n++] = '\'';
	for (const char *c = text; *c; c++) {
		plain &= (*c >= '0' && *c <= '9') || (*c >= 'A' && *c <= 'Z') || (*c >= 'a' && *c <= 'z') ||
			(*c & 0x80) || strchr("%+,-./:=@_", *c);
		if (n + 6 > TOOL_WORD_BYTES)
			return text;
		if (*c == '\'') {
			memcpy(word + n, "'\\'", 3); /* out of the quotes, a quote, and in again */
			n += 3;
		}
		word[n++] = *c;
	}
	memcpy(word + n, "'", 2);
	return plain ? text : word;
}

char *tool_format_bytes(uint64_t bytes, char text[static 32])
{
	static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
	double value = (double)bytes;
	size_t unit = 0;

	while (value >= 1023.5 && unit + 1 < BASE_COUNT(units)) { /* 1023.5 would be shown as 1024 */
		value /= 1024;
		unit++;
	}
	snprintf(text, 32, unit && value < 9.95 ? "%.1f %s" : "%.0f %s", value, units[unit]);
	return text;
}

char *tool_format_count(uint64_t n, const char *one, const char *many, char text[static 64])
{
	snprintf(text, 64, "%" PRIu64 " %s", n, base_plural(n, one, many));
	return text;
}

char *tool_format_time(int64_t time_ns, char text[static 40])
{
	time_t seconds = time_ns / 1000000000;
	struct tm tm;

	if (!gmtime_r(&seconds, &tm) || !strftime(text, 40, "%Y-%m-%dT%H:%M:%SZ", &tm))
		snprintf(text, 40, "?");
	return text;
}

/* In the largest unit of which there are at least two. */
static void format_span(uint64_t seconds, char text[static 24])
{
	uint64_t days = seconds / 86400;

	if (seconds < 120)
		snprintf(text, 24, "%" PRIu64 " s", seconds);
	else if (seconds < 120 * 60)
		snprintf(text, 24, "%" PRIu64 " min", seconds / 60);
	else if (days < 2)
		snprintf(text, 24, "%" PRIu64 " h", seconds / 3600);
	else if (days < 731)
		snprintf(text, 24, "%" PRIu64 " days", days);
	else
		snprintf(text, 24, "%" PRIu64 " years", days * 4 / 1461);
}

char *tool_format_age(int64_t time_ns, int64_t now_ns, char text[static 32])
{
	char span[24];
	bool past = time_ns <= now_ns;
	uint64_t ns = past ? (uint64_t)now_ns - (uint64_t)time_ns : (uint64_t)time_ns - (uint64_t)now_ns;

	format_span(ns / UINT64_C(1000000000), span);
	snprintf(text, 32, past ? "%s ago" : "in %s", span);
	return text;
}

char *tool_format_duration(uint64_t ns, char text[static 32])
{
	static const struct { uint64_t below, unit; const char *name; } units[] = {
		{UINT64_C(1000), 1, "ns"}, {UINT64_C(1000000), UINT64_C(1000), "us"},
		{UINT64_C(1000000000), UINT64_C(1000000), "ms"}, {UINT64_C(600000000000), UINT64_C(1000000000), "s"}};
	uint64_t minutes = ns / UINT64_C(60000000000);

	for (size_t i = 0; i < BASE_COUNT(units); i++)
		if (ns < units[i].below) {
			double value = (double)ns / (double)units[i].unit;
			int digits = i == 0 || value >= 100 ? 0 : value >= 10 ? 1 : 2;

			snprintf(text, 32, "%.*f %s", digits, value, units[i].name);
			return text;
		}
	if (minutes < 60)
		snprintf(text, 32, "%" PRIu64 " min %" PRIu64 " s", minutes, ns / UINT64_C(1000000000) % 60);
	else if (minutes < 48 * 60)
		snprintf(text, 32, "%" PRIu64 " h %" PRIu64 " min", minutes / 60, minutes % 60);
	else
		snprintf(text, 32, "%" PRIu64 " days", minutes / (24 * 60));
	return text;
}

char *tool_format_left(double seconds, char text[static 40])
{
	double minutes = seconds / 60;

	if (seconds <= 57.5) /* in steps of 5 s, so that it does not flicker */
		snprintf(text, 40, "about %d s left", seconds < 5 ? 5 : (int)(seconds / 5 + 0.5) * 5);
	else if (minutes < 99.5)
		snprintf(text, 40, "about %.0f min left", minutes);
	else if (minutes < 48 * 60)
		snprintf(text, 40, "about %d h %d min left", (int)minutes / 60, (int)minutes % 60);
	else
		snprintf(text, 40, "about %.0f days left", minutes > 1e9 ? 1e9 / 1440 : minutes / 1440);
	return text;
}

char *tool_format_shape(uint32_t ndim, const uint64_t *dim, char text[static TOOL_SHAPE_TEXT])
{
	int len = snprintf(text, TOOL_SHAPE_TEXT, "[");

	for (uint32_t d = 0; d < ndim && d < TENSOR_MAX_DIMS; d++)
		len += sprintf(text + len, "%s%" PRIu64, d ? ", " : "", dim[d]);
	strcpy(text + len, "]");
	return text;
}

char *tool_format_digest(const struct base_digest *d, char text[static BASE_DIGEST_HEX])
{
	base_digest_hex(d, text);
	return text;
}

char *tool_format_id(const uint8_t id[static 16], char text[static 33])
{
	for (int i = 0; i < 16; i++)
		sprintf(text + 2 * i, "%02x", id[i]);
	return text;
}

char *tool_format_ranks(const uint32_t *ranks, size_t n, char text[static TOOL_RANKS_TEXT])
{
	size_t at = 0, end;

	text[0] = 0;
	for (size_t i = 0; i < n; i = end) {
		for (end = i + 1; end < n && ranks[end] == ranks[end - 1] + 1;)
			end++;
		if (at > TOOL_RANKS_TEXT - 60) {
			snprintf(text + at, TOOL_RANKS_TEXT - at, " and %zu more", n - i);
			return text;
		}
		at += (size_t)snprintf(text + at, TOOL_RANKS_TEXT - at, "%s%" PRIu32, i ? ", " : "", ranks[i]);
		if (end - i > 1)
			at += (size_t)snprintf(text + at, TOOL_RANKS_TEXT - at, "-%" PRIu32, ranks[end - 1]);
	}
	return text;
}
