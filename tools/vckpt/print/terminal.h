/* SPDX-License-Identifier: Apache-2.0
 *
 * terminal: is standard output or error a terminal, how wide is it, and may it be coloured. There are three colours:
 * for damage, for what is sound or the latest, and for names of runs. The choice of --color is one for the process; one
 * thread. */
#ifndef TOOLS_VCKPT_PRINT_TERMINAL_H
#define TOOLS_VCKPT_PRINT_TERMINAL_H

#include <stdbool.h>
#include <stdio.h>

enum tool_style { TOOL_PLAIN, TOOL_BAD, TOOL_GOOD, TOOL_RUN };

/* auto, always or never; false: another word */
bool tool_color_set(const char *when);
/* What begins and ends a style on `to`; "" where it is not to be coloured: with auto, what is no terminal, TERM unset
 * or dumb, NO_COLOR set. */
const char *tool_style(FILE *to, enum tool_style style);
const char *tool_style_end(FILE *to, enum tool_style style);
void tool_print_styled(FILE *to, enum tool_style style, const char *text);

/* Columns of the terminal `fd`: COLUMNS, what the terminal says, or 80. 0: it is no terminal. */
unsigned tool_terminal_width(int fd);
/* Can a line on it be written over? */
bool tool_terminal_rewrites(int fd);

#endif
