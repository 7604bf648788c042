/* SPDX-License-Identifier: Apache-2.0
 *
 * text: what of a text that others chose may go to a terminal or into a log; numbers in names; patterns. Pure
 * functions; any thread. */
#ifndef CORE_BASE_TEXT_H
#define CORE_BASE_TEXT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Length of the well-formed UTF-8 sequence at `text` (Unicode 15, table 3-7), or 0: there is none, or it is a NUL. */
size_t base_utf8_sequence(const char *text, size_t left);

/* How many bytes at `text` a reader should not get as they are: a control character (C0, DEL, C1: terminals obey
 * some), a mark that changes in which order text is shown (Unicode TR 9), a separator of lines or paragraphs, or a byte
 * that is no UTF-8. 0: the character there may be shown; *ret_len is its length. */
size_t base_text_unsafe(const char *text, size_t left, size_t *ret_len);

/* Puts '?' in place of each such byte, up to the NUL. */
void base_text_clean(char *text);

/* Reads a decimal number of at most `max`, without leading zeros, that the character `end` (or the NUL, if that is 0)
 * follows. Returns where the text behind `end` begins; NULL: there is no such number. */
const char *base_decimal(const char *at, char end, uint64_t max, uint64_t *ret_n);

/* A pattern has `*`, `?`, and sets [abc], [a-z], [!abc] (or [^abc]); each is of bytes, whatever the locale. No byte is
 * special to `*` and `?`, and none takes away the meaning of the next. valid: each [ has its ].
 *
 * Both texts may be a stranger's: it takes at most (length of the pattern) x (length of the name) steps, without
 * recursion, for only the last `*` is ever matched again with more characters. */
bool base_glob_valid(const char *pattern);
bool base_glob_fits(const char *pattern, const char *name, size_t len); /* of a valid one */

#endif
