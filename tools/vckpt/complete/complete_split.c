/* SPDX-License-Identifier: Apache-2.0
 *
 * split: a line as bash reads it, and text as bash reads it as one word. bash could quote by itself (-o filenames), but
 * where the typed word has a $ or a `, it leaves those of the candidate alone: a name would be a command. */
#include <ctype.h>
#include <string.h>

#include "core/base/buf.h"
#include "core/base/text.h"
#include "tools/vckpt/complete/complete.h"

struct split {
	struct complete *c;
	const char *at, *breaks;
	struct base_buf word;
	bool begun;
	size_t skip;                    /* bytes of the word up to its last break */
};

static void add(struct split *s, const char *bytes, size_t n)
{
	base_buf_append(&s->word, bytes, n);
	s->begun = true;
}

static void end_word(struct split *s)
{
	base_buf_append(&s->word, "", 1);
	if (!s->word.error && s->c->nwords < COMPLETE_WORDS)
		s->c->words[s->c->nwords++] = (char *)s->word.data;
	s->word = (struct base_buf){0};
	s->begun = false;
	s->skip = 0;
}

/* $NAME and ${NAME} of the environment; others stay as they are. */
static void take_variable(struct split *s)
{
	const bool braces = s->at[1] == '{';
	const char *name = s->at + 1 + braces, *end = name, *value;
	char text[128];

	while (isalnum((unsigned char)*end) || *end == '_')
		end++;
	if (end > name && (size_t)(end - name) < sizeof text && (!braces || *end == '}')) {
		memcpy(text, name, (size_t)(end - name));
		text[end - name] = 0;
		if ((value = getenv(text))) {
			add(s, value, strlen(value));
			s->at = end + braces;
			return;
		}
	}
	add(s, s->at++, 1);
}

/* A quotation mark is where bash begins a word of its own, too. */
static void end_quoted(struct split *s, char quote)
{
	if (*s->at)
		s->skip = s->word.len;
	else
		s->c->quote = quote;
	s->at += *s->at != 0;
}

static void take_single_quoted(struct split *s)
{
	const size_t len = strcspn(++s->at, "'");

	s->skip = s->word.len;
	add(s, s->at, len);
	s->at += len;
	end_quoted(s, '\'');
}

static void take_double_quoted(struct split *s)
{
	add(s, "", 0);
	s->skip = s->word.len;
	for (s->at++; *s->at && *s->at != '"';) {
		if (*s->at == '$') {
			take_variable(s);
			continue;
		}
		if (*s->at == '\\' && s->at[1] && strchr("\\\"$`", s->at[1]))
			s->at++;
		add(s, s->at++, 1);
	}
	end_quoted(s, '"');
}

static void take_plain(struct split *s)
{
	const char *home = getenv("HOME");

	if (*s->at == '\\') {
		s->at++;
		add(s, s->at, *s->at != 0);
		s->at += *s->at != 0;
	} else if (*s->at == '~' && !s->begun && home && (s->at[1] == '/' || !s->at[1])) {
		add(s, home, strlen(home));
		s->at++;
	} else {
		const bool is_break = strchr(s->breaks, *s->at) && strchr(":=@", *s->at);

		add(s, s->at++, 1);
		if (is_break)
			s->skip = s->word.len;
	}
}

void complete_split(struct complete *c, const char *line, const char *breaks)
{
	struct split s = {.c = c, .at = line, .breaks = breaks};

	while (*s.at) {
		if (*s.at == ' ' || *s.at == '\t' || *s.at == '\n') {
			if (s.begun)
				end_word(&s);
			s.at++;
		} else if (*s.at == '\'') {
			take_single_quoted(&s);
		} else if (*s.at == '"') {
			take_double_quoted(&s);
		} else if (*s.at == '$') {
			take_variable(&s);
		} else {
			take_plain(&s);
		}
	}
	c->skip = s.skip;
	end_word(&s);
}

/* ---- quoting ---- */

/* unsafe: a terminal might obey it. */
static void put_plain(unsigned char c, bool unsafe)
{
	const bool safe = isalnum(c) || strchr("_./-+,%^:=@", c) || c >= 0x80;

	if (unsafe)
		printf("$'\\%03o'", c);
	else
		printf(safe ? "%c" : "\\%c", c);
}

void complete_quote(const char *text, char quote)
{
	size_t left = 0, n; /* bytes of the character */
	bool unsafe = false;

	for (; *text; text++, left--) {
		const unsigned char c = (unsigned char)*text;

		if (!left) {
			left = base_text_unsafe(text, strnlen(text, 4), &n);
			unsafe = left;
			left = unsafe ? left : n;
		}
		if (!quote) {
			put_plain(c, unsafe);
		} else if (c == (unsigned char)quote || unsafe || c == '!') { /* outside of it */
			putchar(quote);
			put_plain(c, unsafe);
			putchar(quote);
		} else {
			printf(quote == '"' && strchr("\\$`", c) ? "\\%c" : "%c", c);
		}
	}
}
