/* SPDX-License-Identifier: Apache-2.0
 *
 * format: values as people read them. Pure functions but for tool_print*; any thread. */
#ifndef TOOLS_VCKPT_PRINT_FORMAT_H
#define TOOLS_VCKPT_PRINT_FORMAT_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "core/base/digest.h"
#include "core/base/plural.h"
#include "core/tensor/box.h"

/* Prints text from a file or a store so that a terminal shows it as it is: what core/base/text.h calls
 * unsafe as \xNN. */
void tool_print_text(FILE *to, const char *text, size_t len);
/* Like fprintf, of one line or a part of one: what is unsafe is written as above, but for a newline at the end. */
void tool_print(FILE *to, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* As asprintf makes it; free it. NULL: no memory. */
char *tool_string(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Each of these writes into `text` and returns it. */
char *tool_format_bytes(uint64_t bytes, char text[static 32]); /* "512 B", "9.5 KiB", "91 MiB" */
char *tool_format_count(uint64_t n, const char *one, const char *many, char text[static 64]); /* "2 pieces" */
char *tool_format_time(int64_t time_ns, char text[static 40]); /* "2026-11-21T03:34:00Z" */
/* How long before `now_ns`: "12 s ago", "3 h ago", "2 days ago"; "in 5 min" where a clock is wrong. */
char *tool_format_age(int64_t time_ns, int64_t now_ns, char text[static 32]);
char *tool_format_duration(uint64_t ns, char text[static 32]); /* "4.56 ms", "12.3 s", "3 h 20 min" */
/* What is left of some work: "about 25 s left", "about 3 min left", "about 2 h 10 min left". */
char *tool_format_left(double seconds, char text[static 40]);
#define TOOL_SHAPE_TEXT (TENSOR_MAX_DIMS * 22 + 3)
char *tool_format_shape(uint32_t ndim, const uint64_t *dim, char text[static TOOL_SHAPE_TEXT]); /* "[4096, 1024]" */
char *tool_format_digest(const struct base_digest *d, char text[static BASE_DIGEST_HEX]);
char *tool_format_id(const uint8_t id[static 16], char text[static 33]); /* of a store */
#define TOOL_RANKS_TEXT 160
/* Ascending numbers: "0-3, 7, 9-12 and 31 more". */
char *tool_format_ranks(const uint32_t *ranks, size_t n, char text[static TOOL_RANKS_TEXT]);

#define TOOL_WORD_BYTES 1024
/* `text` as one word of a shell, for commands in messages: quoted if that is needed. Returns `word`; or `text` if
 * quoting is not needed or does not fit. */
const char *tool_shell_word(const char *text, char word[static TOOL_WORD_BYTES]);

/* The same in memory of their own, which lasts as long as the block around them. */
#define TOOL_BYTES(n) tool_format_bytes(n, (char[32]){0})
#define TOOL_COUNT(n, one, many) tool_format_count(n, one, many, (char[64]){0})
#define TOOL_TIME(time_ns) tool_format_time(time_ns, (char[40]){0})
#define TOOL_DURATION(ns) tool_format_duration(ns, (char[32]){0})
#define TOOL_SHAPE(shape) tool_format_shape((shape)->ndim, (shape)->dim, (char[TOOL_SHAPE_TEXT]){0})
#define TOOL_DIGEST(d) tool_format_digest(d, (char[BASE_DIGEST_HEX]){0})
#define TOOL_RANKS(ranks, n) tool_format_ranks(ranks, n, (char[TOOL_RANKS_TEXT]){0})
#define TOOL_WORD(text) tool_shell_word(text, (char[TOOL_WORD_BYTES]){0})

#endif
