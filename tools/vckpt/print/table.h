/* SPDX-License-Identifier: Apache-2.0
 *
 * table: rows of text under a header. For people: columns aligned, two blanks between them, and on a terminal the
 * widest of the columns that may be shortened lose their middle until a row fits a line. For scripts (bare): no header,
 * a tab between fields, nothing shortened. Control bytes are written as \xNN. One thread. */
#ifndef TOOLS_VCKPT_PRINT_TABLE_H
#define TOOLS_VCKPT_PRINT_TABLE_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "tools/vckpt/print/terminal.h"

struct tool_column {
	const char *head;
	bool right;   /* numbers */
	bool shorten; /* on a terminal */
};

struct tool_table;
/* `columns` stay the caller's and have to outlive the table. Release with tool_table_free. NULL: no memory. */
struct tool_table *tool_table_new(const struct tool_column *columns, unsigned n);
void tool_table_free(struct tool_table *t);
/* The next field of the row under way, left to right. Text is copied; -ENOMEM is kept for tool_table_print. */
void tool_table_add(struct tool_table *t, enum tool_style style, const char *text, size_t len);
void tool_table_text(struct tool_table *t, const char *text);
void tool_table_number(struct tool_table *t, uint64_t n);
/* `width`: columns of the terminal, 0: none. 0 or -ENOMEM. */
int tool_table_print(const struct tool_table *t, FILE *to, bool bare, unsigned width);

#endif
