/* SPDX-License-Identifier: Apache-2.0
 *
 * newer: why a record cannot be read that a later version wrote (docs/format/versions.md). Every record begins with a
 * version and words: that much of it is read, whatever else it holds. */
#include "proto/proto_internal.h"

#include <stdio.h>

struct newer_text { char *text; size_t at; };

static void newer_put(struct newer_text *t, const char *part)
{
	size_t n = strlen(part);

	if (n < PROTO_NEWER_BYTES - t->at) {
		memcpy(t->text + t->at, part, n + 1);
		t->at += n;
	}
}

/* At most 64 bytes of it, without control characters. */
static void newer_word(struct newer_text *t, const char *word)
{
	char shown[PROTO_WORD_MAX + 3];
	size_t n = 1;

	shown[0] = '"';
	for (; word[n - 1] && n <= PROTO_WORD_MAX; n++)
		shown[n] = word[n - 1] > 0x20 && word[n - 1] < 0x7f && word[n - 1] != '"' ? word[n - 1] : '?';
	shown[n] = '"';
	shown[n + 1] = 0;
	newer_put(t, shown);
}

static void newer_head(struct newer_text *t, const Vckpt__Head *h)
{
	char number[80];
	size_t n = 0;

	if (h->version > PROTO_VERSION) {
		snprintf(number, sizeof number, "it is of version %u, and this vckpt knows versions up to %u",
			h->version, PROTO_VERSION);
		newer_put(t, number);
	}
	for (size_t i = 0; i < h->n_features; i++) {
		if (proto_word_known(h->features[i]))
			continue;
		newer_put(t, n++ ? ", " : t->at ? "; it needs the feature " : "it needs the feature ");
		newer_word(t, h->features[i]);
	}
	if (n)
		newer_put(t, ", which this vckpt does not know");
}

void proto_newer(const void *body, size_t len, char text[static PROTO_NEWER_BYTES])
{
	struct newer_text t = {text, 0};
	struct proto_arena *arena;
	Vckpt__Head *h = NULL;

	text[0] = 0;
	if (proto_head_unpack(body, len, &arena, &h) == 0) {
		newer_head(&t, h);
		proto_arena_free(arena);
	}
	if (t.at == 0)
		newer_put(&t, "it holds a number that this vckpt does not know");
}
