/* SPDX-License-Identifier: Apache-2.0
 *
 * pack_writer: lays objects one after another into a pack.
 *
 * An extent is open from its first object until it would pass 64 MiB, or its owner ends it; its checks gather in memory
 * and are written after its last object. Until then the `checks` offset of the references handed out is not known, so
 * the writer remembers where the references are and completes them. The footer gathers likewise, 80 bytes an object, in
 * the form in which it will be written. The first error sticks: every later call returns it and seal makes no file. A
 * writer belongs to one thread at a time. */
#include <string.h>

#include "core/base/buf.h"
#include "core/base/cleanup.h"
#include "core/pack/pack_format.h"

struct stream {
	bool open;
	struct base_digest digest; /* as announced */
	enum pack_object_kind kind;
	uint64_t offset, len, done;
	struct base_hasher *hasher;
	size_t used;               /* bytes of the block that is not yet whole */
	uint8_t block[BASE_BLOCK_BYTES];
};

struct pack_writer {
	struct storage *storage;
	struct storage_writer *out;
	uint64_t at;               /* where the next byte goes */
	int error;                 /* sticky */
	uint64_t count;            /* objects of the pack */
	uint64_t extent_start;     /* offset of the extent's first object; meaningless while extent_count is 0 */
	uint64_t extent_count;
	struct base_buf extent_refs;  /* extent_count pointers to references that wait for the end of the extent */
	struct base_buf extent_checks;
	struct base_buf footer;
	struct stream stream;
};

static int fail(struct pack_writer *w, int r)
{
	if (r < 0 && w->error == 0)
		w->error = r;
	return r;
}

/* lent: the memory that the bytes are in, or NULL. */
static int put_lent(struct pack_writer *w, const void *bytes, uint64_t len, struct storage_lent *lent)
{
	const struct storage_ops *ops = w->storage->ops;
	int r = lent && ops->writer_append_lent ? ops->writer_append_lent(w->out, bytes, len, lent)
						: ops->writer_append(w->out, bytes, len);
	if (r == 0)
		w->at += len;
	return fail(w, r);
}

static int put(struct pack_writer *w, const void *bytes, uint64_t len)
{
	return put_lent(w, bytes, len, NULL);
}

static int pad(struct pack_writer *w, uint64_t align)
{
	static const uint8_t zeros[4096];
	uint64_t n = base_align(w->at, align) - w->at;
	return n ? put(w, zeros, n) : 0;
}

int pack_writer_open(
	struct storage *s, const uint8_t store_id[16], const char *pack, struct pack_writer **ret_w)
{
	uint8_t head[PACK_HEAD_BYTES];
	char path[STORAGE_NAME_MAX];
	struct pack_writer *w;
	int r = pack_path(pack, path);

	if (r < 0)
		return r;
	w = calloc(1, sizeof *w);
	if (!w)
		return -ENOMEM;
	w->storage = s;
	r = s->ops->writer_open(s, path, &w->out);
	if (r < 0) {
		free(w);
		return r;
	}
	pack_head_encode(store_id, pack, head);
	r = put(w, head, sizeof head);
	if (r < 0) {
		pack_abandon(w);
		return r;
	}
	*ret_w = w;
	return 0;
}

/* Opens the next object: ends the extent if this one no longer fits into it, and pads. */
static int object_begin(struct pack_writer *w, uint16_t codec, uint64_t stored_len)
{
	uint64_t align = pack_object_align(codec, stored_len);
	int r = 0;

	if (w->extent_count > 0 && base_align(w->at, align) + stored_len - w->extent_start > STORE_EXTENT_MAX_BYTES)
		r = pack_extent_end(w);
	if (r == 0)
		r = pad(w, align);
	if (r == 0 && w->extent_count == 0)
		w->extent_start = w->at;
	return r;
}

/* Enters an object whose stored bytes are written and whose checks are in extent_checks. */
static int object_end(struct pack_writer *w, struct pack_object_ref *ret_ref)
{
	uint8_t *entry = base_buf_extend(&w->footer, PACK_ENTRY_BYTES);
	base_buf_append(&w->extent_refs, &ret_ref, sizeof ret_ref);
	if (!entry || w->extent_refs.error || w->extent_checks.error)
		return fail(w, -ENOMEM);
	pack_entry_encode(ret_ref, entry);
	w->extent_count++;
	w->count++;
	return 0;
}

static int append_refuse(const struct pack_writer *w, enum pack_object_kind kind, uint16_t codec,
	uint64_t stored_len, uint64_t raw_len, const uint32_t *lens)
{
	uint64_t sum = 0, blocks = base_block_count(raw_len);
	bool raw = codec == PACK_CODEC_RAW;

	if (w->error < 0)
		return w->error;
	if (w->stream.open || kind < PACK_OBJECT_PIECE || kind > PACK_OBJECT_VIEW_HEADER || !pack_codec_valid(codec))
		return -EINVAL;
	if (raw_len > (raw ? STORE_OBJECT_MAX_BYTES : STORE_ENCODED_MAX_BYTES))
		return -BASE_ELIMIT;
	if (raw)
		return stored_len == raw_len ? 0 : -EINVAL;
	for (uint64_t i = 0; lens && i < blocks; i++)
		sum += lens[i] & ~PACK_BLOCK_RAW;
	return lens && sum == stored_len && stored_len < raw_len ? 0 : -EINVAL;
}

int pack_append_lent(struct pack_writer *w, const struct base_digest *digest, enum pack_object_kind kind,
	uint16_t codec, const void *stored, uint64_t stored_len, uint64_t raw_len, const uint64_t *checks,
	const uint32_t *lens, struct storage_lent *lent, struct pack_object_ref *ret_ref)
{
	uint64_t blocks = base_block_count(raw_len);
	int r = append_refuse(w, kind, codec, stored_len, raw_len, lens);

	if (r == 0)
		r = object_begin(w, codec, stored_len);
	if (r < 0)
		return r;
	*ret_ref = (struct pack_object_ref){.digest = *digest,
		.offset = w->at,
		.raw_len = raw_len,
		.stored_len = stored_len,
		.codec = codec,
		.kind = (uint8_t)kind};
	r = put_lent(w, stored, stored_len, lent);
	if (r < 0)
		return r;
	for (uint64_t i = 0; i < blocks; i++)
		base_buf_put64(&w->extent_checks, checks[i]);
	for (uint64_t i = 0; codec != PACK_CODEC_RAW && i < blocks; i++)
		base_buf_put32(&w->extent_checks, lens[i]);
	return object_end(w, ret_ref);
}

int pack_append(struct pack_writer *w, const struct base_digest *digest, enum pack_object_kind kind,
	uint16_t codec, const void *stored, uint64_t stored_len, uint64_t raw_len, const uint64_t *checks,
	const uint32_t *lens, struct pack_object_ref *ret_ref)
{
	return pack_append_lent(w, digest, kind, codec, stored, stored_len, raw_len, checks, lens, NULL, ret_ref);
}

void pack_keep(struct pack_writer *w)
{
	if (w->storage->ops->writer_keep)
		w->storage->ops->writer_keep(w->out);
}

int pack_append_raw(struct pack_writer *w, enum pack_object_kind kind, const void *bytes, uint64_t len,
	struct pack_object_ref *ret_ref)
{
	struct base_digest digest;
	int r;

	base_digest_of(bytes, len, &digest);
	r = pack_stream_begin(w, &digest, kind, len);
	if (r == 0)
		r = pack_stream_add(w, bytes, len);
	return r < 0 ? r : pack_stream_end(w, ret_ref);
}

int pack_stream_begin(
	struct pack_writer *w, const struct base_digest *digest, enum pack_object_kind kind, uint64_t len)
{
	struct stream *st = &w->stream;
	int r = append_refuse(w, kind, PACK_CODEC_RAW, len, len, NULL);
	if (r < 0)
		return r;
	if (!st->hasher)
		st->hasher = base_hasher_new();
	if (!st->hasher)
		return -ENOMEM;
	base_hasher_reset(st->hasher);
	r = object_begin(w, PACK_CODEC_RAW, len);
	if (r < 0)
		return r;
	st->open = true;
	st->digest = *digest;
	st->kind = kind;
	st->offset = w->at;
	st->len = len;
	st->done = 0;
	st->used = 0;
	return 0;
}

static void stream_check(struct pack_writer *w, const void *block, size_t len)
{
	struct stream *st = &w->stream;
	base_buf_put64(&w->extent_checks, base_block_check(&st->digest, st->done / BASE_BLOCK_BYTES, block, len));
	st->done += len;
}

int pack_stream_add(struct pack_writer *w, const void *bytes, size_t len)
{
	struct stream *st = &w->stream;
	const uint8_t *at = bytes;
	int r;

	if (w->error < 0)
		return w->error;
	if (!st->open)
		return -EINVAL;
	if (len > st->len - st->done - st->used)
		return fail(w, -BASE_EDAMAGED); /* more than announced */
	if (len == 0)
		return 0;
	r = put(w, bytes, len);
	if (r < 0)
		return r;
	base_hasher_update(st->hasher, bytes, len);
	while (len > 0) {
		size_t step;

		if (st->used == 0 && len >= BASE_BLOCK_BYTES) {
			stream_check(w, at, BASE_BLOCK_BYTES);
			at += BASE_BLOCK_BYTES, len -= BASE_BLOCK_BYTES;
			continue;
		}
		step = base_min(len, BASE_BLOCK_BYTES - st->used);
		memcpy(st->block + st->used, at, step);
		st->used += step;
		at += step, len -= step;
		if (st->used == BASE_BLOCK_BYTES) {
			stream_check(w, st->block, st->used);
			st->used = 0;
		}
	}
	return 0;
}

int pack_stream_end(struct pack_writer *w, struct pack_object_ref *ret_ref)
{
	struct stream *st = &w->stream;
	struct base_digest digest;
	int r;

	if (w->error < 0)
		return w->error;
	if (!st->open)
		return -EINVAL;
	st->open = false;
	if (st->used > 0)
		stream_check(w, st->block, st->used);
	r = base_hasher_final(st->hasher, &digest);
	if (r < 0)
		return fail(w, r);
	if (st->done != st->len || !base_digest_equal(&digest, &st->digest))
		return fail(w, -BASE_EDAMAGED);
	*ret_ref = (struct pack_object_ref){.digest = digest,
		.offset = st->offset,
		.raw_len = st->len,
		.stored_len = st->len,
		.codec = PACK_CODEC_RAW,
		.kind = (uint8_t)st->kind};
	return object_end(w, ret_ref);
}

int pack_extent_end(struct pack_writer *w)
{
	struct pack_object_ref **refs = (struct pack_object_ref **)(void *)w->extent_refs.data;
	uint8_t *entry;
	uint64_t at;
	int r;

	if (w->error < 0)
		return w->error;
	if (w->stream.open)
		return -EINVAL;
	if (w->extent_count == 0)
		return 0;
	r = pad(w, PACK_CHECKS_ALIGN);
	if (r < 0)
		return r;
	at = w->at;
	entry = w->footer.data + w->footer.len - w->extent_count * PACK_ENTRY_BYTES;
	for (uint64_t i = 0; i < w->extent_count; i++, entry += PACK_ENTRY_BYTES) {
		refs[i]->checks = at;
		base_put64(entry + 40, at);
		at += pack_object_checks_bytes(base_get16(entry + 64), base_get64(entry + 48));
	}
	w->extent_count = 0;
	w->extent_refs.len = 0;
	r = w->extent_checks.len ? put(w, w->extent_checks.data, w->extent_checks.len) : 0;
	w->extent_checks.len = 0;
	return r;
}

uint64_t pack_writer_size(const struct pack_writer *w)
{
	return w->at;
}

static void writer_free(struct pack_writer *w)
{
	base_buf_release(&w->extent_refs);
	base_buf_release(&w->extent_checks);
	base_buf_release(&w->footer);
	base_hasher_free(w->stream.hasher);
	free(w);
}

static int write_footer(struct pack_writer *w)
{
	uint8_t tail[PACK_TAIL_BYTES];
	struct pack_tail t;
	int r = pack_extent_end(w);

	if (r == 0)
		r = pad(w, PACK_FOOTER_ALIGN);
	if (r < 0)
		return r;
	t = (struct pack_tail){.footer_offset = w->at, .footer_len = w->footer.len, .count = w->count,
		.file_size = w->at + w->footer.len + PACK_TAIL_BYTES};
	base_sha256(w->footer.data, w->footer.len, &t.footer_digest);
	pack_tail_encode(&t, tail);
	r = w->footer.len ? put(w, w->footer.data, w->footer.len) : 0;
	return r < 0 ? r : put(w, tail, sizeof tail);
}

int pack_seal(struct pack_writer *w, uint64_t *ret_size)
{
	int r = write_footer(w);
	if (r < 0) {
		pack_abandon(w);
		return r;
	}
	if (ret_size)
		*ret_size = w->at;
	r = w->storage->ops->writer_seal(w->out);
	writer_free(w);
	return r;
}

void pack_abandon(struct pack_writer *w)
{
	if (!w)
		return;
	w->storage->ops->writer_abandon(w->out);
	writer_free(w);
}

int pack_take(struct storage *s, const uint8_t store_id[16], const char *pack, const char *from)
{
	char path[STORAGE_NAME_MAX], of[STORAGE_NAME_MAX];
	uint8_t head[PACK_HEAD_BYTES];
	struct pack *p;
	int r = pack_path(pack, path);

	if (r == 0)
		r = pack_path(from, of);
	if (r == 0)
		r = pack_open(s, store_id, from, 0, &p, NULL);
	if (r < 0)
		return r == -ENOMEM ? r : -ENOENT;
	pack_close(p);
	pack_head_encode(store_id, pack, head);
	return s->ops->take(s, path, of, head, sizeof head);
}
