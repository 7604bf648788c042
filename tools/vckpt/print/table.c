/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/vckpt/print/table.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "core/base/cleanup.h"
#include "core/base/le.h"
#include "tools/vckpt/print/format.h"

#define COLUMNS_MAX 12
#define COLUMN_MIN 16 /* no column is shortened below this */
#define DOTS "..."

#define STYLED '\1' /* begins a cell that has the style of its column; texts have no control bytes */

struct tool_table {
	const struct tool_column *columns[COLUMNS_MAX]; /* that are shown */
	unsigned n;
	bool exact, failed;
	FILE *to; /* a stream into `cells` */
	char *cells; /* row by row, each ends with a NUL */
	size_t ncells, size;
};

struct tool_table *tool_table_new(const struct tool_column *columns, unsigned n, bool more, bool exact)
{
	struct tool_table *t = calloc(1, sizeof *t);

	if (!t)
		return NULL;
	t->exact = exact;
	for (unsigned i = 0; i < n; i++)
		if (more || !columns[i].more)
			t->columns[t->n++] = &columns[i];
	t->to = open_memstream(&t->cells, &t->size);
	t->failed = !t->to;
	return t;
}

void tool_table_free(struct tool_table *t)
{
	if (!t)
		return;
	if (t->to)
		fclose(t->to);
	free(t->cells);
	free(t);
}

static void write_number(const struct tool_table *t, uint64_t n, enum tool_as as)
{
	if (as == TOOL_AS_BYTES && !t->exact)
		fputs(TOOL_BYTES(n), t->to);
	else
		fprintf(t->to, as == TOOL_AS_STEP ? "step-%08" PRIu64 : "%" PRIu64, n);
}

static void write_cell(const struct tool_table *t, json_t *value, enum tool_as as)
{
	const char *key, *comma = "";
	json_t *part;
	size_t i;

	if (json_is_string(value))
		tool_print_text(t->to, json_string_value(value), json_string_length(value));
	else if (json_is_integer(value))
		write_number(t, (uint64_t)json_integer_value(value), as);
	else if (json_is_real(value))
		fprintf(t->to, "%.3g", json_real_value(value));
	else if (!json_is_array(value) && !json_is_object(value))
		putc('-', t->to);
	json_object_foreach(value, key, part) {
		fprintf(t->to, "%s%s=", comma, key);
		tool_print_text(t->to, json_string_value(part), json_string_length(part));
		comma = "  ";
	}
	if (!json_is_array(value))
		return;
	putc('[', t->to);
	json_array_foreach(value, i, part)
		fprintf(t->to, "%s%" PRIu64, i ? ", " : "", (uint64_t)json_integer_value(part));
	putc(']', t->to);
}

void tool_table_add(struct tool_table *t, json_t *row)
{
	if (t && !row)
		t->failed = true;
	for (unsigned c = 0; t && c < t->n && !t->failed; c++) {
		const struct tool_column *column = t->columns[c];

		if (column->style && (!column->style_if || json_object_get(row, column->style_if)))
			putc(STYLED, t->to);
		write_cell(t, json_object_get(row, column->key), column->as);
		putc(0, t->to);
		t->ncells++;
	}
	json_decref(row);
}

/* ---- widths, in characters: bytes of UTF-8 that begin one ---- */

static bool begins(char c) { return ((unsigned char)c & 0xc0) != 0x80; }

static unsigned text_width(const char *text)
{
	unsigned n = 0;

	for (; *text; text++)
		n += begins(*text);
	return n;
}

/* Where character `n` of it begins. */
static const char *text_at(const char *text, unsigned n)
{
	for (; *text; text++)
		if (begins(*text) && n-- == 0)
			break;
	return text;
}

static void measure(const struct tool_table *t, unsigned *widths)
{
	const char *cell = t->cells;

	for (unsigned c = 0; c < t->n; c++)
		widths[c] = text_width(t->columns[c]->head);
	for (size_t i = 0; i < t->ncells; i++, cell += strlen(cell) + 1)
		widths[i % t->n] = (unsigned)base_max(widths[i % t->n], text_width(cell + (*cell == STYLED)));
}

/* The column to take a character from, or t->n. */
static unsigned widest(const struct tool_table *t, const unsigned *widths)
{
	unsigned at = t->n;

	for (unsigned c = 0; c < t->n; c++)
		if (t->columns[c]->shorten && widths[c] > COLUMN_MIN && (at == t->n || widths[c] > widths[at]))
			at = c;
	return at;
}

static void fit(const struct tool_table *t, unsigned *widths, unsigned width)
{
	unsigned total = 2 * (t->n - 1), c;

	for (c = 0; c < t->n; c++)
		total += widths[c];
	for (; total > width && (c = widest(t, widths)) < t->n; total--)
		widths[c]--;
}

/* ---- rows ---- */

static void print_shortened(FILE *to, const char *text, unsigned width, unsigned most)
{
	unsigned left = most - (unsigned)strlen(DOTS), head = (left + 1) / 2;

	fwrite(text, 1, (size_t)(text_at(text, head) - text), to);
	fputs(DOTS, to);
	fputs(text_at(text, width - (left - head)), to);
}

static void print_field(const struct tool_table *t, FILE *to, unsigned c, const char *text, unsigned most,
	enum tool_style style)
{
	unsigned width = text_width(text);
	int pad = most > width ? (int)(most - width) : 0;

	fprintf(to, "%s%*s%s", c ? "  " : "", t->columns[c]->right ? pad : 0, "", tool_style(to, style));
	if (width > most)
		print_shortened(to, text, width, most);
	else
		fputs(text, to);
	fputs(tool_style_end(to, style), to);
	if (c + 1 < t->n && !t->columns[c]->right)
		fprintf(to, "%*s", pad, "");
	if (c + 1 == t->n)
		putc('\n', to);
}

int tool_table_print(struct tool_table *t, FILE *to, bool bare, unsigned width)
{
	unsigned widths[COLUMNS_MAX];
	const char *cell;

	if (!t || !t->to || fclose(base_steal(t->to)) != 0 || t->failed)
		return -ENOMEM;
	measure(t, widths);
	if (width)
		fit(t, widths, width);
	for (unsigned c = 0; !bare && c < t->n; c++)
		print_field(t, to, c, t->columns[c]->head, widths[c], TOOL_PLAIN);
	cell = t->cells;
	for (size_t i = 0; i < t->ncells; i++, cell += strlen(cell) + 1) {
		unsigned c = (unsigned)(i % t->n);
		bool styled = *cell == STYLED;

		if (bare)
			fprintf(to, "%s%c", cell + styled, c + 1 < t->n ? '\t' : '\n');
		else
			print_field(t, to, c, cell + styled, widths[c], styled ? t->columns[c]->style : TOOL_PLAIN);
	}
	return 0;
}
