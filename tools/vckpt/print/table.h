/* SPDX-License-Identifier: Apache-2.0
 *
 * table: the rows that --json prints, as lines of text under a header. For people: columns aligned, two blanks between
 * them, and on a terminal the widest of the columns that may be shortened lose their middle until a row fits a line.
 * For scripts (bare): no header, a tab between fields, nothing shortened. Control bytes are written as \xNN.
 * One thread. */
#ifndef TOOLS_VCKPT_PRINT_TABLE_H
#define TOOLS_VCKPT_PRINT_TABLE_H

#include <jansson.h>
#include <stdbool.h>
#include <stdio.h>

#include "tools/vckpt/print/terminal.h"

/* How an integer is written. A real has three digits, an array is [4096, 1024], an object of texts a=1  b=2. */
enum tool_as { TOOL_AS_NUMBER, TOOL_AS_BYTES, TOOL_AS_STEP };

struct tool_column {
	const char *head;
	const char *key;        /* the member of the row; "-" where the row lacks it */
	enum tool_as as;
	bool right;             /* numbers */
	bool shorten;           /* on a terminal */
	bool more;              /* only with --long */
	enum tool_style style;
	const char *style_if;   /* only of rows with this member; NULL: of all */
};

struct tool_table;
/* `columns` stay the caller's and have to outlive the table. more: those of --long, too; exact: numbers of bytes in
 * full. Release with tool_table_free. NULL: no memory. */
struct tool_table *tool_table_new(const struct tool_column *columns, unsigned n, bool more, bool exact);
void tool_table_free(struct tool_table *t); /* NULL-safe */
/* Takes the row, an object. Both take NULL for the table; any lack of memory is kept for tool_table_print. */
void tool_table_add(struct tool_table *t, json_t *row);
/* The last call before tool_table_free. `width`: columns of the terminal, 0: none. 0 or -ENOMEM. */
int tool_table_print(struct tool_table *t, FILE *to, bool bare, unsigned width);

#endif
