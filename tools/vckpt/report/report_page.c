/* SPDX-License-Identifier: Apache-2.0
 *
 * The page around the charts, and how text gets into it. A policy in its head forbids the browser every load, and every
 * script but the one whose hash it names: a text that an error here let through unescaped would still not run. */
#include <inttypes.h>
#include <stdarg.h>
#include <string.h>

#include "core/base/clock.h"
#include "core/base/text.h"
#include "tools/vckpt/report/report.h"

void report_put(struct report_page *p, const char *format, ...)
{
	va_list args;

	va_start(args, format);
	vfprintf(p->to, format, args);
	va_end(args);
}

static void say_escaped(FILE *to, const char *format, va_list args)
{
	static const char special[] = "&<>\"'", *const names[] = {"&amp;", "&lt;", "&gt;", "&quot;", "&#39;"};
	base_cleanup_free char *text = NULL;
	int len = vasprintf(&text, format, args);

	for (size_t i = 0, n; i < (size_t)(len < 0 ? 0 : len); i += n) {
		size_t unsafe = base_text_unsafe(text + i, (size_t)len - i, &n);
		const char *found = unsafe ? NULL : memchr(special, text[i], sizeof special - 1);

		n = unsafe ? unsafe : n;
		if (found)
			fputs(names[found - special], to);
		else
			tool_print_text(to, text + i, n);
	}
	if (len < 0)
		text = NULL;
}

void report_say(struct report_page *p, const char *format, ...)
{
	va_list args;

	va_start(args, format);
	say_escaped(p->to, format, args);
	va_end(args);
}

void report_tag(struct report_page *p, const char *tag, const char *format, ...)
{
	va_list args;

	va_start(args, format);
	fprintf(p->to, "<%s>", tag);
	say_escaped(p->to, format, args);
	fprintf(p->to, "</%.*s>", (int)strcspn(tag, " "), tag);
	va_end(args);
}

void report_label(struct report_page *p, double x, double y, const char *anchor, const char *text)
{
	report_put(p, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\">", x, y, anchor);
	report_say(p, "%s", text);
	report_put(p, "</text>");
}

char *report_value(enum report_unit unit, double value, char text[static 32])
{
	uint64_t n = value >= 1.8e19 ? UINT64_MAX : value > 0 ? (uint64_t)(value + 0.5) : 0;

	if (isnan(value))
		return strcpy(text, "-");
	if (unit == REPORT_NS)
		return tool_format_duration(n, text);
	if (unit == REPORT_BYTES)
		return tool_format_bytes(n, text);
	snprintf(text, 32, "%" PRIu64, n);
	return text;
}

void report_number(struct report_page *p, enum report_unit unit, double value)
{
	if (isnan(value))
		report_put(p, "<td>-</td>");
	else
		report_put(p, "<td data-v=\"%.0f\">%s</td>", value, REPORT_VALUE(unit, value));
}

void report_table(struct report_page *p, const char *id)
{
	if (id)
		report_put(p, "<div class=\"scroll\"><table id=\"%s\"><thead><tr>", id);
	else
		report_put(p, "<details><summary>Numbers</summary><div class=\"scroll\"><table id=\"t%u\"><thead><tr>",
			++p->tables);
}

void report_table_end(struct report_page *p, bool folded)
{
	report_put(p, "</tbody></table></div>%s\n", folded ? "</details>" : "");
}

char *report_short(const char *text, size_t most, char out[static REPORT_TEXT])
{
	size_t n = strnlen(text, base_min(most, REPORT_TEXT - 4));

	while (n > 0 && (text[n] & 0xc0) == 0x80)
		n--;
	snprintf(out, REPORT_TEXT, "%.*s%s", (int)n, text, text[n] ? "\u2026" : "");
	return out;
}

void report_begin(struct report_page *p, const char *title)
{
	report_put(p, "<!DOCTYPE html>\n<html xmlns=\"http://www.w3.org/1999/xhtml\" lang=\"en\">\n<head>\n"
		"<meta charset=\"utf-8\"/>\n<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n"
		"<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
		"script-src '%s'\"/>\n<meta name=\"referrer\" content=\"no-referrer\"/>\n", report_script_hash);
	report_tag(p, "title", "%s", title);
	report_put(p, "\n<style>%s</style>\n</head>\n<body>\n<svg width=\"0\" height=\"0\" class=\"defs\" "
		"aria-hidden=\"true\"><defs><pattern id=\"hatch\" width=\"6\" height=\"6\" "
		"patternUnits=\"userSpaceOnUse\" patternTransform=\"rotate(45)\"><rect width=\"6\" height=\"6\" "
		"class=\"ground\"/><rect width=\"2\" height=\"6\" class=\"k1\"/></pattern>", report_style);
	for (unsigned i = 0; i < 3; i++) /* marks on lines: a circle, a square, a diamond */
		report_put(p, "<marker id=\"m%u\" viewBox=\"0 0 10 10\" refX=\"5\" refY=\"5\" "
			"markerUnits=\"userSpaceOnUse\" markerWidth=\"10\" markerHeight=\"10\"><rect class=\"k%u\" "
			"x=\"1.5\" y=\"1.5\" width=\"7\" height=\"7\" rx=\"%s\"%s/></marker>", i, i, i ? "0" : "3.5",
			i == 2 ? " transform=\"rotate(45 5 5)\"" : "");
	report_put(p, "</defs></svg>\n<main>\n");
}

void report_end(struct report_page *p)
{
	report_put(p, "<footer>Made by vckpt %s on %s. Nothing on this page is loaded from "
		"elsewhere.</footer>\n</main>\n<div id=\"tip\" role=\"status\" "
		"hidden=\"hidden\"></div>\n<script>%s</script>\n</body>\n</html>\n",
		VCKPT_VERSION, TOOL_TIME(base_realtime_ns()), report_script);
}
