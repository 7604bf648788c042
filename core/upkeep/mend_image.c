/* SPDX-License-Identifier: Apache-2.0
 *
 * mend_image: writes a pack again. From front to back: the head; every object and its checks at their places, from
 * wherever they are right, else as they are; between them zeros if all objects are known, else what is there; footer
 * and tail, made from the objects if all are known. So references to the pack stay right, and nothing that was right is
 * lost.
 *
 * The new file is written beside the pack, made durable, read back whole, and only then renamed over it. */
#include "core/upkeep/mend_pack.h"

struct extent { uint64_t offset, len; struct mend_object *object; bool checks; };
struct image {
	struct mend *m;
	struct mend_pack *p;
	struct pack *old;         /* NULL: there is none that can be opened */
	struct storage_writer *out;
	uint64_t at;
	struct extent *extents; size_t n;
	uint8_t *buffer;                /* IMAGE_STEP */
};
enum { IMAGE_STEP = 1 << 20 };

static int emit(struct image *k, const void *bytes, uint64_t len)
{
	int r = k->m->store->storage->ops->writer_append(k->out, bytes, len);

	k->at += len;
	return r;
}

static int emit_zeros(struct image *k, uint64_t end)
{
	int r = 0;

	memset(k->buffer, 0, IMAGE_STEP);
	while (r == 0 && k->at < end)
		r = emit(k, k->buffer, base_min(end - k->at, IMAGE_STEP));
	return r;
}

/* Copies what the file has there now; zeros past its end. An error of the storage ends the work, because the bytes may
 * be right. */
static int emit_old(struct image *k, uint64_t end)
{
	int r = 0;

	while (r == 0 && k->at < end) {
		size_t len = base_min(end - k->at, 4096 - k->at % 4096);

		r = k->old ? pack_read(k->old, k->at, k->buffer, len, NULL) : -BASE_EDAMAGED;
		if (r == -BASE_EDAMAGED) {
			memset(k->buffer, 0, len);
			r = 0;
		}
		if (r < 0)
			return base_error_set(k->m->err, r,
				"pack %s cannot be read at byte %llu (%s): it is left as it was", k->p->name,
				(unsigned long long)k->at, base_error_name(r));
		r = emit(k, k->buffer, len);
	}
	return r;
}

/* ---- an object from elsewhere ---- */

/* Raw here: its bytes, many blocks at once, with new checks. */
static int emit_raw(struct image *k, struct mend_object *o, struct pack *from)
{
	uint64_t blocks = base_block_count(o->ref.raw_len);
	enum { STEP_BLOCKS = IMAGE_STEP / BASE_BLOCK_BYTES };
	int r = 0;

	for (uint64_t at = 0; r == 0 && at < blocks; at += STEP_BLOCKS) {
		uint64_t n = base_min(STEP_BLOCKS, blocks - at);
		uint64_t len = base_min(n * BASE_BLOCK_BYTES, o->ref.raw_len - at * BASE_BLOCK_BYTES);

		if (o->pack[0])
			r = pack_object_read_blocks(from, &o->there, at, n, k->buffer, k->m->err);
		else
			r = pack_read(k->old, o->ref.offset + at * BASE_BLOCK_BYTES, k->buffer, len, k->m->err);
		for (uint64_t b = 0; r == 0 && b < n; b++) {
			const uint8_t *block = k->buffer + b * BASE_BLOCK_BYTES;
			size_t block_len = base_min(len - b * BASE_BLOCK_BYTES, BASE_BLOCK_BYTES);

			base_buf_put64(&o->checks, base_block_check(&o->ref.digest, at + b, block, block_len));
		}
		if (r == 0)
			r = emit(k, k->buffer, len);
	}
	return r < 0 ? r : o->checks.error;
}

/* Stored alike there: bytes and checks are copied; checks are seeded by the digest, not by the place. */
static int emit_same(struct image *k, struct mend_object *o, struct pack *from)
{
	uint64_t checks = pack_object_checks_bytes(o->ref.codec, o->ref.raw_len);
	void *room = base_buf_extend(&o->checks, checks);
	int r = room ? pack_read(from, o->there.checks, room, checks, k->m->err) : -ENOMEM;

	for (uint64_t at = 0; r == 0 && at < o->ref.stored_len; at += IMAGE_STEP) {
		size_t len = base_min(o->ref.stored_len - at, IMAGE_STEP);

		r = pack_read(from, o->there.offset + at, k->buffer, len, k->m->err);
		if (r == 0)
			r = emit(k, k->buffer, len);
	}
	return r;
}

static void checks_put(struct mend_object *o, const uint8_t *stored, const uint32_t *lens, uint64_t blocks)
{
	for (uint64_t i = 0; i < blocks; i++) {
		uint32_t len = lens[i] & ~PACK_BLOCK_RAW;

		base_buf_put64(&o->checks, base_block_check(&o->ref.digest, i, stored, len));
		stored += len;
	}
	for (uint64_t i = 0; i < blocks; i++)
		base_buf_put32(&o->checks, lens[i]);
}

/* Encoded here and raw there: it is encoded again, and has to get the same length. */
static int emit_encoded(struct image *k, struct mend_object *o, struct pack *from)
{
	uint64_t blocks = base_block_count(o->ref.raw_len), stored_len = 0;
	base_cleanup_free uint8_t *raw = malloc(o->ref.raw_len), *stored = malloc(o->ref.raw_len);
	base_cleanup_free uint32_t *lens = malloc(blocks * sizeof *lens);
	base_cleanup_free void *scratch = malloc(PACK_CODEC_SCRATCH);
	int r = raw && stored && lens && scratch ? 0 : -ENOMEM;

	if (r == 0)
		r = pack_object_read_blocks(from, &o->there, 0, blocks, raw, k->m->err);
	for (unsigned word = 1; r == 0 && word <= 8; word *= 2)
		if (pack_codec_encode(word, raw, o->ref.raw_len, stored, lens, &stored_len, scratch) == o->ref.codec
		    && stored_len == o->ref.stored_len) {
			checks_put(o, stored, lens, blocks);
			return o->checks.error ? o->checks.error : emit(k, stored, stored_len);
		}
	return r < 0 ? r : emit_old(k, k->at + o->ref.stored_len); /* it stays damaged */
}

static int emit_object(struct image *k, struct mend_object *o)
{
	struct pack *from = NULL;
	int r = o->pack[0] ? pack_open(o->from->storage, o->from->info.id, o->pack, 0, &from, k->m->err) : 0;

	if (r < 0)
		return r;
	if (o->ref.codec == PACK_CODEC_RAW)
		r = emit_raw(k, o, from);
	else if (o->there.codec == o->ref.codec && o->there.stored_len == o->ref.stored_len)
		r = emit_same(k, o, from);
	else
		r = emit_encoded(k, o, from);
	pack_close(from);
	return r;
}

/* ---- the whole ---- */

static int extent_order(const void *a, const void *b)
{
	const struct extent *x = a, *y = b;

	return (x->offset > y->offset) - (x->offset < y->offset);
}

static int extents_make(struct image *k)
{
	k->extents = calloc(2 * k->p->n + 1, sizeof *k->extents);
	if (!k->extents)
		return -ENOMEM;
	for (size_t i = 0; i < k->p->n; i++) {
		struct mend_object *o = &k->p->objects[i];

		k->extents[k->n++] = (struct extent){o->ref.offset, o->ref.stored_len, o, false};
		k->extents[k->n++] = (struct extent){
			o->ref.checks, pack_object_checks_bytes(o->ref.codec, o->ref.raw_len), o, true};
	}
	qsort(k->extents, k->n, sizeof *k->extents, extent_order);
	return 0;
}

static int emit_extents(struct image *k)
{
	int r = 0;

	for (size_t i = 0; r == 0 && i < k->n; i++) {
		const struct extent *e = &k->extents[i];
		struct mend_object *o = e->object;

		if (e->len == 0)
			continue;
		if (e->offset < k->at)
			return base_error_set(k->m->err, -BASE_EDAMAGED, "pack %s: its objects overlap",
				k->p->name);
		r = k->p->complete ? emit_zeros(k, e->offset) : emit_old(k, e->offset);
		if (r == 0 && !e->checks && o->bad && o->from)
			r = emit_object(k, o);
		else if (r == 0 && e->checks && o->checks.len == e->len)
			r = emit(k, o->checks.data, e->len);
		else if (r == 0)
			r = emit_old(k, e->offset + e->len);
	}
	return r;
}

static int emit_end(struct image *k)
{
	base_cleanup_buf struct base_buf footer = BASE_BUF_INIT;
	struct pack_tail t = {.count = k->p->n, .footer_len = k->p->n * PACK_ENTRY_BYTES, .file_size = k->p->size};
	uint8_t tail[PACK_TAIL_BYTES];
	int r;

	if (!k->p->complete)
		return emit_old(k, k->p->size);
	r = emit_zeros(k, base_align(k->at, PACK_FOOTER_ALIGN));
	t.footer_offset = k->at;
	for (size_t i = 0; r == 0 && i < k->p->n; i++) {
		uint8_t *entry = base_buf_extend(&footer, PACK_ENTRY_BYTES);

		if (!entry)
			return -ENOMEM;
		pack_entry_encode(&k->p->objects[i].ref, entry);
	}
	base_sha256(footer.data, footer.len, &t.footer_digest);
	pack_tail_encode(&t, tail);
	if (r == 0 && footer.len)
		r = emit(k, footer.data, footer.len);
	return r < 0 ? r : emit(k, tail, sizeof tail);
}

/* ---- the new file is checked before it takes the pack's place ---- */

struct image_check { struct mend_pack *p; unsigned wrong; };

/* Damage that cannot be mended is expected to be there still. */
static void on_damage(void *arg, uint64_t offset, uint64_t len, const struct pack_object_ref *object, const char *what)
{
	struct image_check *c = arg;

	(void)object;
	(void)what;
	for (size_t i = 0; i < c->p->n; i++) {
		const struct mend_object *o = &c->p->objects[i];

		if (o->bad && !o->checks.len && mend_object_hit(&o->ref, offset, len))
			return;
	}
	c->wrong++;
}

static int image_check(void *arg, const char *name)
{
	struct image *k = arg;
	struct image_check c = {.p = k->p};
	const struct pack_verify_calls calls = {
		.damage = on_damage, .arg = &c, .seed = k->m->store->info.seed};
	struct pack *p;
	int r = mend_pack_open(k->m->store, k->p->name, name, k->p->size, &p);

	if (r < 0)
		return r;
	if (k->p->complete) /* its footer lists all objects */
		r = pack_verify(p, &calls);
	for (size_t i = 0; r == 0 && !k->p->complete && i < k->p->n; i++) {
		const struct mend_object *o = &k->p->objects[i];

		if (o->bad && !o->checks.len)
			continue;
		r = mend_object_good(p, &o->ref);
		c.wrong += r == 0;
		r = r < 0 ? r : 0;
	}
	pack_close(p);
	if (r == 0 && c.wrong)
		r = base_error_set(k->m->err, -EIO,
			"pack %s: the new file does not read back as it was written: the old one stays", k->p->name);
	return r;
}

static int image_fill(struct image *k)
{
	uint8_t head[PACK_HEAD_BYTES];
	int r = extents_make(k);

	pack_head_encode(k->m->store->info.id, k->p->name, head);
	if (r == 0)
		r = emit(k, head, sizeof head);
	if (r == 0)
		r = emit_extents(k);
	if (r == 0)
		r = emit_end(k);
	if (r == 0 && k->at != k->p->size)
		r = base_error_set(k->m->err, -BASE_EDAMAGED, "pack %s: its objects do not fill it", k->p->name);
	return r;
}

int mend_image_write(struct mend *m, struct mend_pack *p)
{
	const struct storage_ops *ops = m->store->storage->ops;
	struct image k = {.m = m, .p = p, .buffer = malloc(IMAGE_STEP)};
	int r = k.buffer ? mend_pack_open(m->store, p->name, p->path, p->size, &k.old) : -ENOMEM;

	if (r == -ENOENT)
		r = 0;
	if (r == 0)
		r = ops->writer_reopen(m->store->storage, p->path, &k.out);
	if (r == 0) {
		r = image_fill(&k);
		if (r == 0)
			r = ops->writer_seal_over(k.out, image_check, &k);
		else
			ops->writer_abandon(k.out);
	}
	pack_close(k.old);
	free(k.extents);
	free(k.buffer);
	if (r < 0 && !m->err->code && !store_denied(m->store, r, m->err))
		base_error_set(m->err, r, "%s cannot be written: %s", p->path, base_error_name(r));
	return r;
}
