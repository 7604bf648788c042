/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/vckpt/print/table.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "core/base/array.h"
#include "core/base/cleanup.h"
#include "tools/vckpt/print/format.h"

#define COLUMN_MIN 16 /* no column is shortened below this */
#define DOTS "..."

struct table_cell {
	enum tool_style style;
	char *text;
};

struct tool_table {
	const struct tool_column *columns;
	unsigned n;
	struct table_cell *cells; /* row by row */
	size_t ncells, room;
	bool failed;
};

struct tool_table *tool_table_new(const struct tool_column *columns, unsigned n)
{
	struct tool_table *t = calloc(1, sizeof *t);

	if (t)
		*t = (struct tool_table){.columns = columns, .n = n};
	return t;
}

void tool_table_free(struct tool_table *t)
{
	if (!t)
		return;
	for (size_t i = 0; i < t->ncells; i++)
		free(t->cells[i].text);
	free(t->cells);
	free(t);
}

static char *escaped(const char *text, size_t len)
{
	char *copy = NULL;
	size_t size;
	FILE *to = open_memstream(&copy, &size);

	if (!to)
		return NULL;
	tool_print_text(to, text, len);
	if (fclose(to) == 0)
		return copy;
	free(copy);
	return NULL;
}

void tool_table_add(struct tool_table *t, enum tool_style style, const char *text, size_t len)
{
	char *copy;

	if (t->failed || base_array_room(t->cells, t->room, t->ncells + 1) < 0 || !(copy = escaped(text, len))) {
		t->failed = true;
		return;
	}
	t->cells[t->ncells++] = (struct table_cell){style, copy};
}

void tool_table_text(struct tool_table *t, const char *text)
{
	tool_table_add(t, TOOL_PLAIN, text, strlen(text));
}

void tool_table_number(struct tool_table *t, uint64_t n)
{
	char text[24];

	snprintf(text, sizeof text, "%" PRIu64, n);
	tool_table_text(t, text);
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
	for (unsigned c = 0; c < t->n; c++)
		widths[c] = text_width(t->columns[c].head);
	for (size_t i = 0; i < t->ncells; i++) {
		unsigned width = text_width(t->cells[i].text);

		if (width > widths[i % t->n])
			widths[i % t->n] = width;
	}
}

/* The column to take a character from, or t->n. */
static unsigned widest(const struct tool_table *t, const unsigned *widths)
{
	unsigned at = t->n;

	for (unsigned c = 0; c < t->n; c++)
		if (t->columns[c].shorten && widths[c] > COLUMN_MIN && (at == t->n || widths[c] > widths[at]))
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

static void print_field(const struct tool_table *t, FILE *to, unsigned c, const struct table_cell *cell, unsigned most)
{
	unsigned width = text_width(cell->text);
	int pad = most > width ? (int)(most - width) : 0;

	fprintf(to, "%s%*s%s", c ? "  " : "", t->columns[c].right ? pad : 0, "", tool_style(to, cell->style));
	if (width > most)
		print_shortened(to, cell->text, width, most);
	else
		fputs(cell->text, to);
	fputs(tool_style_end(to, cell->style), to);
	if (c + 1 < t->n && !t->columns[c].right)
		fprintf(to, "%*s", pad, "");
	if (c + 1 == t->n)
		putc('\n', to);
}

static void print_bare(const struct tool_table *t, FILE *to)
{
	for (size_t i = 0; i < t->ncells; i++)
		fprintf(to, "%s%c", t->cells[i].text, (i + 1) % t->n ? '\t' : '\n');
}

int tool_table_print(const struct tool_table *t, FILE *to, bool bare, unsigned width)
{
	base_cleanup_free unsigned *widths = calloc(t->n, sizeof *widths);

	if (t->failed || !widths)
		return -ENOMEM;
	if (bare) {
		print_bare(t, to);
		return 0;
	}
	measure(t, widths);
	if (width)
		fit(t, widths, width);
	for (unsigned c = 0; c < t->n; c++)
		print_field(t, to, c, &(struct table_cell){TOOL_PLAIN, (char *)t->columns[c].head}, widths[c]);
	for (size_t i = 0; i < t->ncells; i++)
		print_field(t, to, (unsigned)(i % t->n), &t->cells[i], widths[i % t->n]);
	return 0;
}
