/* SPDX-License-Identifier: Apache-2.0
 *
 * packs: tables of pack names. A name is "<attempt>-<rank>-<class>"; thousands of packs share a few attempts and
 * classes, so these have tables of their own, in order of first use, and a row is 32 bytes. That order (and that each
 * is used and unique) makes the bytes a function of the names. */
#include "proto/proto_internal.h"

#include <string.h>

#include "core/base/cleanup.h"
#include "core/base/table.h"

#define PACKS_NAME_MAX 128u /* NUL included; as core/pack/pack.h */

struct packs_builder {
	struct proto_attempt_number *attempts;
	const char **classes;
	uint32_t nattempts, nclasses;
	struct base_table by_attempt, by_class;
};

static void packs_builder_release(struct packs_builder *b)
{
	base_table_release(&b->by_attempt);
	base_table_release(&b->by_class);
}

/* Rows come in runs: most have the attempt that was found last. */
static uint32_t packs_attempt_number(struct packs_builder *b, const struct proto_attempt_number *a, uint32_t last)
{
	uint32_t hash, i;
	size_t at = 0;

	if (last < b->nattempts && memcmp(b->attempts[last].launch, a->launch, 8) == 0 &&
		b->attempts[last].count == a->count)
		return last;
	hash = base_table_hash_in(a->count, a->launch, 8);
	while ((i = base_table_next(&b->by_attempt, hash, &at)) != BASE_TABLE_NONE)
		if (memcmp(b->attempts[i].launch, a->launch, 8) == 0 && b->attempts[i].count == a->count)
			return i;
	base_table_add(&b->by_attempt, hash, b->nattempts);
	b->attempts[b->nattempts] = *a;
	return b->nattempts++;
}

static uint32_t packs_class_number(struct packs_builder *b, const char *class)
{
	const uint32_t hash = base_table_hash(class, strlen(class));
	size_t at = 0;
	uint32_t i;

	while ((i = base_table_next(&b->by_class, hash, &at)) != BASE_TABLE_NONE)
		if (strcmp(b->classes[i], class) == 0)
			return i;
	base_table_add(&b->by_class, hash, b->nclasses);
	b->classes[b->nclasses] = class;
	return b->nclasses++;
}

static int packs_builder_init(struct packs_builder *b, uint32_t n, struct proto_arena *arena)
{
	b->attempts = proto_arena_array(arena, n, sizeof *b->attempts);
	b->classes = proto_arena_array(arena, n, sizeof *b->classes);
	return b->attempts && b->classes && base_table_reserve(&b->by_attempt, n) == 0 &&
		base_table_reserve(&b->by_class, n) == 0 ? 0 : proto_no_memory(arena);
}

int proto_packs_pack(const struct proto_pack_use *p, uint32_t n, struct proto_arena *arena, Vckpt__Packs **ret_message)
{
	Vckpt__Packs *m = proto_arena_array(arena, 1, sizeof *m);
	uint8_t *rows = proto_arena_array(arena, n, PROTO_PACK_ROW_BYTES), *attempts;
	base_cleanup(packs_builder_release) struct packs_builder b = {0};
	uint32_t at = 0;
	int r;

	*ret_message = NULL; /* an empty table is left out */
	if (n == 0)
		return 0;
	r = packs_builder_init(&b, n, arena);

	if (r < 0 || !m || !rows)
		return r < 0 ? r : proto_no_memory(arena);
	vckpt__packs__init(m);
	for (uint32_t i = 0; i < n; i++) {
		uint8_t *row = rows + (size_t)i * PROTO_PACK_ROW_BYTES;
		struct proto_attempt_number a;
		const char *class;
		uint32_t rank;

		if (!proto_pack_name_split(p[i].pack, &a, &rank, &class))
			return -BASE_EFORMAT;
		at = packs_attempt_number(&b, &a, at);
		base_put32(row, at);
		base_put32(row + 4, rank);
		base_put32(row + 8, packs_class_number(&b, class));
		base_put64(row + 16, p[i].size);
		base_put64(row + 24, p[i].live_bytes);
	}
	attempts = proto_arena_array(arena, b.nattempts, PROTO_ATTEMPT_ROW_BYTES);
	if (!attempts)
		return proto_no_memory(arena);
	for (uint32_t i = 0; i < b.nattempts; i++) {
		memcpy(attempts + (size_t)i * PROTO_ATTEMPT_ROW_BYTES, b.attempts[i].launch, 8);
		base_put64(attempts + (size_t)i * PROTO_ATTEMPT_ROW_BYTES + 8, b.attempts[i].count);
	}
	m->attempts = (ProtobufCBinaryData){(size_t)b.nattempts * PROTO_ATTEMPT_ROW_BYTES, attempts};
	m->classes = (char **)b.classes;
	m->n_classes = b.nclasses;
	m->packs = (ProtobufCBinaryData){(size_t)n * PROTO_PACK_ROW_BYTES, rows};
	*ret_message = m;
	return 0;
}

/* Texts of the attempts, 0-terminated, PROTO_ATTEMPT_MAX apart. */
static int packs_attempt_texts(const Vckpt__Packs *m, struct proto_arena *arena, char **ret_texts, uint32_t *ret_n)
{
	struct proto_attempt_number a;
	uint32_t n;
	char *texts;

	if (!proto_rows(&m->attempts, PROTO_ATTEMPT_ROW_BYTES, UINT32_MAX, &n))
		return -BASE_EFORMAT;
	texts = proto_arena_array(arena, n, PROTO_ATTEMPT_MAX);
	if (!texts)
		return proto_no_memory(arena);
	for (uint32_t i = 0; i < n; i++) {
		const uint8_t *row = m->attempts.data + (size_t)i * PROTO_ATTEMPT_ROW_BYTES;

		memcpy(a.launch, row, 8);
		a.count = base_get64(row + 8);
		proto_attempt_format(&a, texts + (size_t)i * PROTO_ATTEMPT_MAX);
	}
	*ret_texts = texts;
	*ret_n = n;
	return 0;
}

/* "<attempt>-<rank>-<class>" by hand: a manifest has thousands, and snprintf takes a fifth of its decoding. Returns its
 * length, without a NUL; 0: it is too long. */
static size_t packs_name(const char *attempt, uint32_t rank, const char *class, char name[static PACKS_NAME_MAX])
{
	size_t len = strlen(attempt), class_len = strlen(class), n = 0;
	char digits[10];

	do
		digits[n++] = (char)('0' + rank % 10);
	while ((rank /= 10) > 0);
	if (len + n + class_len + 2 >= PACKS_NAME_MAX)
		return 0;
	memcpy(name, attempt, len);
	name[len++] = '-';
	while (n > 0)
		name[len++] = digits[--n];
	name[len++] = '-';
	memcpy(name + len, class, class_len);
	return len + class_len;
}

/* One row; *nattempts and *nclasses: how many were used by the rows before. */
static int packs_row_get(const Vckpt__Packs *m, const uint8_t *row, const char *texts, uint32_t attempts,
	uint32_t *nattempts, uint32_t *nclasses, struct proto_arena *arena, struct proto_pack_use *ret_p)
{
	uint32_t attempt = base_get32(row), rank = base_get32(row + 4), class = base_get32(row + 8);
	char name[PACKS_NAME_MAX];
	size_t len;

	if (attempt >= attempts || attempt > *nattempts || class >= m->n_classes || class > *nclasses ||
		base_get32(row + 12) != 0)
		return -BASE_EFORMAT;
	*nattempts += attempt == *nattempts;
	*nclasses += class == *nclasses;
	len = packs_name(texts + (size_t)attempt * PROTO_ATTEMPT_MAX, rank, m->classes[class], name);
	if (len == 0)
		return -BASE_EFORMAT;
	ret_p->pack = proto_arena_text(arena, name, len);
	ret_p->size = base_get64(row + 16);
	ret_p->live_bytes = base_get64(row + 24);
	return ret_p->pack ? 0 : proto_no_memory(arena);
}

int proto_packs_unpack(const Vckpt__Packs *m, struct proto_arena *arena, const struct proto_pack_use **ret_p,
	uint32_t *ret_n)
{
	uint32_t n, attempts = 0, nattempts = 0, nclasses = 0;
	struct proto_pack_use *p;
	char *texts = NULL;
	int r;

	*ret_p = NULL;
	*ret_n = 0;
	if (!m)
		return 0;
	if (!proto_rows(&m->packs, PROTO_PACK_ROW_BYTES, UINT32_MAX, &n) || n == 0)
		return -BASE_EFORMAT;
	r = packs_attempt_texts(m, arena, &texts, &attempts);
	if (r < 0)
		return r;
	for (size_t i = 0; i < m->n_classes; i++)
		if (!proto_class_valid(m->classes[i]))
			return -BASE_EFORMAT;
	p = proto_arena_array(arena, n, sizeof *p);
	if (!p)
		return proto_no_memory(arena);
	for (uint32_t i = 0; i < n && r == 0; i++)
		r = packs_row_get(m, m->packs.data + (size_t)i * PROTO_PACK_ROW_BYTES, texts, attempts, &nattempts,
			&nclasses, arena, &p[i]);
	if (r == 0 && (nattempts != attempts || nclasses != m->n_classes))
		r = -BASE_EFORMAT;
	*ret_p = p;
	*ret_n = n;
	return r;
}

static int packs_name_compare(const void *a, const void *b)
{
	return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* 0: no name is there twice. */
static int packs_unique(const struct proto_pack_use *p, uint32_t n)
{
	base_cleanup_free const char **names = n ? malloc((size_t)n * sizeof *names) : NULL;

	if (n && !names)
		return -ENOMEM;
	for (uint32_t i = 0; i < n; i++)
		names[i] = p[i].pack;
	if (n)
		qsort(names, n, sizeof *names, packs_name_compare);
	for (uint32_t i = 1; i < n; i++)
		if (strcmp(names[i - 1], names[i]) == 0)
			return -BASE_EFORMAT;
	return 0;
}

int proto_packs_check(const struct proto_pack_use *p, uint32_t n, bool sorted, bool unknown_sizes)
{
	struct proto_attempt_number a;
	const char *class;
	uint32_t rank;

	for (uint32_t i = 0; i < n; i++) {
		if (!proto_pack_name_split(p[i].pack, &a, &rank, &class) || strlen(p[i].pack) >= PACKS_NAME_MAX)
			return -BASE_EFORMAT;
		if (p[i].size > PROTO_FILE_MAX_BYTES || (p[i].size == 0 && !unknown_sizes))
			return -BASE_EFORMAT;
		if (p[i].size && p[i].live_bytes > p[i].size)
			return -BASE_EFORMAT;
		if (sorted && i > 0 && strcmp(p[i - 1].pack, p[i].pack) >= 0)
			return -BASE_EFORMAT;
	}
	return sorted ? 0 : packs_unique(p, n);
}
