/* SPDX-License-Identifier: Apache-2.0
 *
 * format: values as people read them. Pure functions but for tool_print_text; any thread. */
#ifndef TOOLS_VCKPT_PRINT_FORMAT_H
#define TOOLS_VCKPT_PRINT_FORMAT_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "core/base/plural.h"

/* Prints text from a file or a store so that a terminal shows it as it is: what core/base/text.h calls
 * unsafe as \xNN. */
void tool_print_text(FILE *to, const char *text, size_t len);

#define TOOL_WORD_BYTES 1024
/* `text` as one word of a shell, for commands in messages: quoted if that is needed. Returns `word`; or `text` if
 * quoting is not needed or does not fit. */
const char *tool_shell_word(const char *text, char word[static TOOL_WORD_BYTES]);

void tool_format_bytes(uint64_t bytes, char text[static 32]); /* "512 B", "9.5 KiB", "91 MiB" */
void tool_format_time(int64_t time_ns, char text[static 40]); /* "2026-11-21T03:34:00Z" */
/* How long before `now_ns`: "12 s ago", "3 h ago", "2 days ago"; "in 5 min" where a clock is wrong. */
void tool_format_age(int64_t time_ns, int64_t now_ns, char text[static 32]);
void tool_format_duration(uint64_t ns, char text[static 32]); /* "4.56 ms", "12.3 s", "3 h 20 min" */
/* What is left of some work: "about 25 s left", "about 3 min left", "about 2 h 10 min left". */
void tool_format_left(double seconds, char text[static 40]);

#define TOOL_RANKS_TEXT 160
/* Ascending numbers: "0-3, 7, 9-12 and 31 more". */
void tool_format_ranks(const uint32_t *ranks, size_t n, char text[static TOOL_RANKS_TEXT]);

#endif
