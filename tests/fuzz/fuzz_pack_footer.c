/* SPDX-License-Identifier: Apache-2.0
 *
 * fuzz_pack_footer: a whole pack out of memory. It is tried as it is, then with its head, the digest of its footer and
 * the check of its tail made good, so that what stands behind these gates is reached: entries, runs, objects, verify.
 * What reads must not crash, and objects that read must be the ones that verify finds whole. */
#include <stdlib.h>
#include <string.h>

#include "core/pack/pack_format.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t len);

#define PACK "0123456789abcdef-7-3-model"
static const uint8_t store_id[16] = { 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 };

struct memory { struct storage base; const uint8_t *bytes; size_t len; };

static int memory_open(
	struct storage *s, const char *name, struct storage_file **ret_file, uint64_t *ret_size)
{
	(void)name;
	*ret_file = (struct storage_file *)s;
	*ret_size = ((struct memory *)s)->len;
	return 0;
}

static int memory_read(struct storage_file *f, uint64_t offset, void *bytes, size_t len)
{
	const struct memory *m = (const struct memory *)f;
	if (offset > m->len || len > m->len - offset)
		return -ENODATA;
	memcpy(bytes, m->bytes + offset, len);
	return 0;
}

static void memory_close(struct storage_file *f)
{
	(void)f;
}

static void count_damage(
	void *arg, uint64_t offset, uint64_t len, const struct pack_object_ref *object, const char *what)
{
	(void)offset, (void)len, (void)object, (void)what;
	++*(unsigned *)arg;
}

static void read_objects(struct pack *p, const struct pack_footer *f, unsigned damage)
{
	for (uint64_t i = 0; i < f->count && i < 64; i++) {
		void *bytes = NULL;
		int r = pack_object_load(p, &f->objects[i], 1 << 22, &bytes, NULL);
		uint8_t block[BASE_BLOCK_BYTES];
		uint64_t blocks;

		if (r == -EFBIG)
			continue;
		if (r != 0 && (r != -BASE_EDAMAGED || damage == 0))
			abort();
		free(bytes);
		blocks = base_block_count(f->objects[i].raw_len);
		if (blocks)
			(void)pack_object_read_blocks(p, &f->objects[i], blocks - 1, 1, block, NULL);
	}
}

static void try_pack(const uint8_t *bytes, size_t len)
{
	static const struct storage_ops ops = {
		.file_open = memory_open, .file_read = memory_read, .file_close = memory_close
	};
	struct memory m = { { &ops }, bytes, len };
	struct pack *p = NULL;
	struct pack_footer f;
	unsigned damage = 0;
	const struct pack_verify_calls calls = {.damage = count_damage, .arg = &damage};
	int r, footer;

	if (pack_open(&m.base, store_id, PACK, 0, &p, NULL) < 0)
		return;
	r = pack_verify(p, &calls);
	footer = pack_footer_read(p, &f, NULL);
	if (r < 0 && (r != -BASE_EVERSION || footer != r)) /* only what a newer vckpt made cannot be verified */
		abort();
	if (footer == 0) {
		read_objects(p, &f, damage);
		pack_footer_free(&f);
	} else if (r == 0 && damage == 0) {
		abort();
	}
	pack_close(p);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t len)
{
	uint8_t *good, *tail;
	struct pack_tail t;

	try_pack(bytes, len);
	if (len < PACK_HEAD_BYTES + PACK_TAIL_BYTES)
		return 0;
	good = malloc(len);
	if (!good)
		abort();
	memcpy(good, bytes, len);
	pack_head_encode(store_id, PACK, good);
	tail = good + len - PACK_TAIL_BYTES;
	t = (struct pack_tail){ base_get64(tail + 8), base_get64(tail + 16), base_get64(tail + 24),
		base_get64(tail + 32), { { 0 } } };
	if (t.footer_offset <= len && t.footer_len <= len - t.footer_offset)
		base_sha256(good + t.footer_offset, t.footer_len, &t.footer_digest);
	t.file_size = len;
	pack_tail_encode(&t, tail);
	try_pack(good, len);
	free(good);
	return 0;
}
