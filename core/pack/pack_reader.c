/* SPDX-License-Identifier: Apache-2.0
 *
 * pack_reader: objects out of a pack.
 *
 * A reference is a hint: it is checked against the pack's size, then the checks of the wanted blocks are read, then
 * their stored bytes; with one read if hardly anything else is between the two. A caller that reads many objects reads
 * their bytes itself, so that neighbours share a read, and has them checked and decoded here (pack_object_take).
 * The checks of an extent follow each other. When those of an object need a read of their own, the rest of their page
 * is kept, or four pages if that was of use the last time, so that objects that are read one after another cost little
 * more than a read each.
 * Raw blocks are read straight into the caller's memory and checked there, so that the bytes that were checked are the
 * ones returned; encoded ones are checked and decoded from a buffer of the thread. Nothing is read twice.
 *
 * Memory: three buffers a thread (checks, stored bytes, scratch of the codec), at most 1.3 MiB, freed when it ends; the
 * kept checks of an open pack, 16 KiB at most, and CHECKS_KEPT_BYTES in the process.
 * Threads: apart from its kept checks an open pack never changes; any number of threads may share it. */
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

#include "core/base/cleanup.h"
#include "core/base/plural.h"
#include "core/pack/pack_format.h"

enum {
	READ_STEP_BLOCKS = 64,           /* stored bytes are read 1 MiB at a time: checked while still in the cache */
	READ_CHECKS_BLOCKS = 4096,       /* checks of raw objects: 32 KiB at a time */
	READ_JOIN_BYTES = 64 << 10,      /* stored bytes and checks that span at most this are read at once, ... */
	READ_GAP_BYTES = 4096,           /* ... if less than a page between them is not wanted, or they are metadata */
	CHECKS_PAGE = 4096,
	CHECKS_KEPT_EACH = 4 * CHECKS_PAGE,
};

struct buffers {
	uint8_t *checks, *stored, *scratch;
	size_t checks_size, stored_size;
};

#define CHECKS_KEPT_BYTES (UINT64_C(16) << 20)

static atomic_uint_fast64_t checks_kept;
static __thread uint64_t thread_bytes_read;
static __thread struct buffers *thread_buffers; /* also the value of buffers_key, whose destructor frees it */
static pthread_key_t buffers_key;
static pthread_once_t buffers_once = PTHREAD_ONCE_INIT;
static bool buffers_keyed; /* false: the process has used up its 1024 keys, and no read succeeds */

static void buffers_free(void *arg)
{
	struct buffers *b = arg;
	free(b->checks);
	free(b->stored);
	free(b->scratch);
	free(b);
	thread_buffers = NULL;
}

static void buffers_init(void)
{
	buffers_keyed = pthread_key_create(&buffers_key, buffers_free) == 0;
}

static struct buffers *buffers_get(void)
{
	struct buffers *b = thread_buffers;
	if (b)
		return b;
	pthread_once(&buffers_once, buffers_init);
	b = buffers_keyed ? calloc(1, sizeof *b) : NULL;
	if (!b)
		return NULL;
	b->scratch = malloc(PACK_CODEC_SCRATCH);
	if (!b->scratch || pthread_setspecific(buffers_key, b) != 0) {
		buffers_free(b);
		return NULL;
	}
	return thread_buffers = b;
}

/* Makes room; the old contents are lost. */
static int buffer_reserve(uint8_t **buffer, size_t *size, size_t need)
{
	if (*size >= need)
		return 0;
	free(*buffer);
	need = base_align(need, 4096);
	*buffer = aligned_alloc(4096, need); /* the kernel copies faster from a page on */
	*size = *buffer ? need : 0;
	return *buffer ? 0 : -ENOMEM;
}

/* ---- checks that are kept ---- */

static void checks_drop(struct pack_checks *c)
{
	if (!c->bytes)
		return;
	atomic_fetch_sub_explicit(&checks_kept, c->end - c->from, memory_order_relaxed);
	free(base_steal(c->bytes));
}

static void checks_forget(struct pack_checks *c)
{
	pthread_mutex_lock(&c->lock);
	checks_drop(c);
	pthread_mutex_unlock(&c->lock);
}

/* Bytes [from, from + len) of the pack, if they are kept. */
static bool checks_find(struct pack_checks *c, uint64_t from, size_t len, uint8_t *out)
{
	bool found;

	pthread_mutex_lock(&c->lock);
	found = c->bytes && from >= c->from && from + len <= c->end;
	if (found)
		memcpy(out, c->bytes + (from - c->from), len);
	pthread_mutex_unlock(&c->lock);
	return found;
}

/* Does a reader that used the kept checks go on at `from`? */
static bool checks_go_on(struct pack_checks *c, uint64_t from)
{
	bool on;

	pthread_mutex_lock(&c->lock);
	on = c->bytes && from > c->from && from <= c->end;
	pthread_mutex_unlock(&c->lock);
	return on;
}

static void checks_keep(struct pack_checks *c, uint64_t from, const uint8_t *bytes, size_t len)
{
	uint8_t *copy;

	if (atomic_load_explicit(&checks_kept, memory_order_relaxed) + len > CHECKS_KEPT_BYTES)
		return;
	copy = malloc(len);
	if (!copy)
		return;
	memcpy(copy, bytes, len);
	pthread_mutex_lock(&c->lock);
	checks_drop(c);
	c->bytes = copy;
	c->from = from;
	c->end = from + len;
	atomic_fetch_add_explicit(&checks_kept, len, memory_order_relaxed);
	pthread_mutex_unlock(&c->lock);
}

/* ---- the pack ---- */

/* Says in words why a read at that offset returned r. */
static int pack_read_said(const struct pack *p, uint64_t offset, int r, struct base_error *err)
{
	if (r == -ENODATA)
		return base_error_set(err, -BASE_EDAMAGED, "pack %s is shorter than it was: nothing at offset %llu",
			p->name, (unsigned long long)offset);
	if (r < 0)
		return base_error_set(err, r, "pack %s, offset %llu: cannot read: %s", p->name,
			(unsigned long long)offset, base_error_name(r));
	return 0;
}

int pack_read(struct pack *p, uint64_t offset, void *bytes, size_t len, struct base_error *err)
{
	thread_bytes_read += len;
	return pack_read_said(p, offset, len ? p->storage->ops->file_read(p->file, offset, bytes, len) : 0, err);
}

static int head_check(struct pack *p, struct base_error *err)
{
	uint8_t head[PACK_HEAD_BYTES], again[PACK_HEAD_BYTES];
	int r;

	if (p->size < PACK_HEAD_BYTES + PACK_TAIL_BYTES)
		return base_error_set(err, -BASE_EDAMAGED, "pack %s is cut short: it has only %llu %s", p->name,
			(unsigned long long)p->size, base_plural(p->size, "byte", "bytes"));
	r = pack_read(p, 0, head, sizeof head, err);
	if (r < 0)
		return r;
	if (memcmp(head, PACK_MAGIC_HEAD, 8) != 0)
		return base_error_set(
			err, -BASE_EDAMAGED, "pack %s is not a pack, or its first bytes are damaged", p->name);
	if (base_get64(head + PACK_HEAD_CHECK_AT) != base_xxh64_of(0, head, PACK_HEAD_CHECK_AT))
		return base_error_set(err, -BASE_EDAMAGED, "pack %s: its head (offset 0) is damaged", p->name);
	if (base_get16(head + 8) != PACK_VERSION || base_get32(head + 12) != 0)
		return base_error_newer(err,
			"pack %s was written by a newer vckpt: it is of version %u and needs the features %#x; this "
			"vckpt knows version %u and no feature",
			p->name, base_get16(head + 8), base_get32(head + 12), PACK_VERSION);
	if (memcmp(head + 16, p->store_id, 16) != 0)
		return base_error_set(err, -BASE_EDAMAGED, "pack %s belongs to another store", p->name);
	pack_head_encode(p->store_id, p->name, again);
	if (memcmp(head, again, sizeof head) != 0)
		return base_error_set(err, -BASE_EDAMAGED,
			"pack %s is another pack under this name, or its head is damaged", p->name);
	return 0;
}

int pack_open(struct storage *s, const uint8_t store_id[16], const char *pack, uint64_t checked_size,
	struct pack **ret_p, struct base_error *err)
{
	char path[STORAGE_NAME_MAX];
	int r = pack_path(pack, path);
	struct pack *p;

	if (r < 0)
		return base_error_set(err, r, "\"%.128s\" cannot be the name of a pack", pack);
	p = calloc(1, sizeof *p);
	if (!p)
		return base_no_memory_for(err, "pack %s", pack);
	p->storage = s;
	pthread_mutex_init(&p->checks.lock, NULL);
	memcpy(p->store_id, store_id, 16);
	strcpy(p->name, pack); /* fits: it has a path */
	r = s->ops->file_open(s, path, &p->file, &p->size);
	if (storage_not_a_file(r))
		r = base_error_set(err, -BASE_EDAMAGED, "%s: %s", path, storage_not_a_file(r));
	else if (r < 0)
		base_error_set(err, r, "%s: %s", path, r == -ENOENT ? "it is missing" : base_error_name(r));
	else if (checked_size == 0 || p->size != checked_size)
		r = head_check(p, err);
	if (r < 0) {
		pack_close(p);
		return r;
	}
	*ret_p = p;
	return 0;
}

void pack_close(struct pack *p)
{
	if (!p)
		return;
	if (p->file)
		p->storage->ops->file_close(p->file);
	checks_forget(&p->checks);
	pthread_mutex_destroy(&p->checks.lock);
	free(p);
}

bool pack_gone(const struct pack *p)
{
	return !p->storage->ops->file_gone || p->storage->ops->file_gone(p->file);
}

const char *pack_name(const struct pack *p)
{
	return p->name;
}

uint64_t pack_size(const struct pack *p)
{
	return p->size;
}

int pack_readv(struct pack *p, uint64_t offset, const struct iovec *iov, unsigned n, struct base_error *err)
{
	int r = 0;

	if (!p->storage->ops->file_readv) {
		for (unsigned i = 0; r == 0 && i < n; offset += iov[i].iov_len, i++)
			r = pack_read(p, offset, iov[i].iov_base, iov[i].iov_len, err);
		return r;
	}
	for (unsigned i = 0; i < n; i++)
		thread_bytes_read += iov[i].iov_len;
	return pack_read_said(p, offset, p->storage->ops->file_readv(p->file, offset, iov, n), err);
}

int pack_read_past(struct pack *p, uint64_t offset, size_t len, void *room, const uint8_t **ret_bytes,
	struct base_error *err)
{
	int r;

	if (!p->storage->ops->file_read_past) {
		*ret_bytes = room;
		return pack_read(p, offset, room, len, err);
	}
	thread_bytes_read += len;
	r = p->storage->ops->file_read_past(p->file, offset, len, room, ret_bytes);
	return r < 0 ? pack_read_said(p, offset, r, err) : r;
}

uint64_t pack_bytes_read(void)
{
	return thread_bytes_read;
}

/* ---- objects ---- */

/* One call of pack_object_read_blocks. */
struct reading {
	struct pack *p;
	const struct pack_object_ref *ref;
	struct buffers *b;
	struct base_error *err;
	const uint8_t *joined; /* stored bytes from `joined_from` of the object on, if they are in memory already */
	uint64_t joined_from;
};

static int damaged(const struct reading *rd, uint64_t block, const char *what)
{
	checks_forget(&rd->p->checks); /* the next reader reads them again */
	return base_error_set(rd->err, -BASE_EDAMAGED, "pack %s, object at offset %llu, block %llu: %s", rd->p->name,
		(unsigned long long)rd->ref->offset, (unsigned long long)block, what);
}

static size_t blocks_raw_len(const struct pack_object_ref *ref, uint64_t first, uint64_t n)
{
	return base_min(n * BASE_BLOCK_BYTES, ref->raw_len - first * BASE_BLOCK_BYTES);
}

/* Reads bytes [from, from + len) of the pack, which are checks, into the thread's buffer, and the rest of their page or
 * more. */
static int checks_read(struct reading *rd, uint64_t from, size_t len)
{
	uint64_t end = base_align(from + len, CHECKS_PAGE);
	size_t more;

	if (checks_go_on(&rd->p->checks, from))
		end = from + CHECKS_KEPT_EACH;
	end = base_min(end, rd->p->size - PACK_TAIL_BYTES);
	more = end >= from + len && end - from <= CHECKS_KEPT_EACH ? end - from : len;

	if (more > len && pack_read(rd->p, from, rd->b->checks, more, NULL) == 0) {
		checks_keep(&rd->p->checks, from, rd->b->checks, more);
		return 0;
	}
	return pack_read(rd->p, from, rd->b->checks, len, rd->err); /* what follows may not be readable */
}

/* Reads the bytes [from, from + len) of the object's checks into memory, together with the stored bytes [stored_from,
 * stored_from + stored_len) that are wanted, if little else is between them. stored_len 0: not known yet. A pack of
 * metadata has few objects, of which most readers want all, and opening a step takes some of each rank's: there a
 * request less is worth more than the bytes. */
static int checks_get(struct reading *rd, uint64_t from, size_t len, uint64_t stored_from, uint64_t stored_len,
	const uint8_t **ret_checks)
{
	const struct pack_object_ref *ref = rd->ref;
	uint64_t span = ref->checks + from + len - ref->offset - stored_from;
	bool metadata = ref->kind != PACK_OBJECT_PIECE && ref->kind != PACK_OBJECT_BLOB;
	int r = buffer_reserve(&rd->b->checks, &rd->b->checks_size, base_max(len, CHECKS_KEPT_EACH));
	*ret_checks = rd->b->checks;
	if (r < 0 || checks_find(&rd->p->checks, ref->checks + from, len, rd->b->checks))
		return r;
	if (stored_len && span <= READ_JOIN_BYTES && (metadata || span - stored_len - len < READ_GAP_BYTES)) {
		r = buffer_reserve(&rd->b->stored, &rd->b->stored_size, span);
		if (r == 0)
			r = pack_read(rd->p, ref->offset + stored_from, rd->b->stored, span, rd->err);
		rd->joined = rd->b->stored;
		rd->joined_from = stored_from;
		*ret_checks = rd->b->stored + span - len;
		return r;
	}
	return checks_read(rd, ref->checks + from, len);
}

/* Checks raw blocks, and copies them unless `out` is `stored`. `stored` and `checks` are those of the first one. */
static int take_raw(const struct reading *rd, uint64_t first, uint64_t n, const uint8_t *stored, const uint8_t *checks,
	uint8_t *out)
{
	for (uint64_t k = 0; k < n; k++) {
		size_t len = blocks_raw_len(rd->ref, first + k, 1);

		if (base_block_check(&rd->ref->digest, first + k, stored, len) != base_get64(checks + 8 * k))
			return damaged(rd, first + k, "the stored bytes do not match their check");
		if (out != stored)
			memcpy(out, stored, len);
		stored += len;
		out += len;
	}
	return 0;
}

static int read_raw(struct reading *rd, uint64_t first, uint64_t n, uint8_t *out)
{
	const struct pack_object_ref *ref = rd->ref;
	const uint8_t *checks = NULL;

	for (uint64_t i = 0; i < n;) {
		uint64_t step = base_min(n - i, READ_STEP_BLOCKS), block = first + i;
		size_t len = blocks_raw_len(ref, block, step);
		const uint8_t *stored;
		int r = 0;

		if (i % READ_CHECKS_BLOCKS == 0) {
			uint64_t some = base_min(n - i, READ_CHECKS_BLOCKS);

			r = checks_get(rd, 8 * block, 8 * some, block * BASE_BLOCK_BYTES,
				blocks_raw_len(ref, block, some), &checks);
		}
		stored = rd->joined ? rd->joined + block * BASE_BLOCK_BYTES - rd->joined_from : out;
		if (r == 0 && !rd->joined)
			r = pack_read(rd->p, ref->offset + block * BASE_BLOCK_BYTES, out, len, rd->err);
		if (r == 0)
			r = take_raw(rd, block, step, stored, checks + 8 * (i % READ_CHECKS_BLOCKS), out);
		if (r < 0)
			return r;
		out += len;
		i += step;
	}
	return 0;
}

/* Sum of the stored lengths of n blocks; at most n times 16 KiB, or -EBADMSG. */
static int64_t lens_sum(const struct reading *rd, const uint8_t *lens, uint64_t block, uint64_t n)
{
	int64_t sum = 0;
	for (uint64_t i = 0; i < n; i++) {
		uint32_t len = base_get32(lens + 4 * i) & ~PACK_BLOCK_RAW;
		if (len == 0 || len > blocks_raw_len(rd->ref, block + i, 1))
			return damaged(rd, block + i, "its stored length is damaged");
		sum += len;
	}
	return sum;
}

/* At most READ_STEP_BLOCKS blocks from `offset` in the stored bytes, which are `stored_len` long. */
static int read_encoded_step(struct reading *rd, uint64_t block, uint64_t n, uint64_t offset, size_t stored_len,
	const uint8_t *checks, const uint8_t *lens, uint8_t *out)
{
	const uint8_t *at = rd->joined ? rd->joined + offset - rd->joined_from : rd->b->stored;
	if (!rd->joined) {
		int r = buffer_reserve(&rd->b->stored, &rd->b->stored_size, READ_STEP_BLOCKS * BASE_BLOCK_BYTES);
		if (r == 0)
			r = pack_read(rd->p, rd->ref->offset + offset, rd->b->stored, stored_len, rd->err);
		if (r < 0)
			return r;
		at = rd->b->stored;
	}
	for (uint64_t k = 0; k < n; k++) {
		uint32_t word = base_get32(lens + 4 * k), len = word & ~PACK_BLOCK_RAW;
		size_t raw_len = blocks_raw_len(rd->ref, block + k, 1);
		if (base_block_check(&rd->ref->digest, block + k, at, len) != base_get64(checks + 8 * k))
			return damaged(rd, block + k, "the stored bytes do not match their check");
		if (pack_codec_decode_block(rd->ref->codec, at, word, out, raw_len, rd->b->scratch) < 0)
			return damaged(rd, block + k, "the stored bytes do not decode");
		at += len;
		out += raw_len;
	}
	return 0;
}

/* checks: one range, with the checks of all blocks from `first` on, and the stored lengths up to the last block that is
 * wanted. */
static int read_encoded_with(struct reading *rd, uint64_t first, uint64_t n, const uint8_t *checks, uint8_t *out)
{
	const struct pack_object_ref *ref = rd->ref;
	const uint8_t *lens = checks + 8 * (base_block_count(ref->raw_len) - first);
	int r;
	int64_t offset = lens_sum(rd, lens, 0, first);
	if (offset < 0)
		return (int)offset;
	for (uint64_t i = 0; i < n;) {
		uint64_t step = base_min(n - i, READ_STEP_BLOCKS), block = first + i;
		int64_t len = lens_sum(rd, lens + 4 * block, block, step);
		if (len < 0)
			return (int)len;
		if ((uint64_t)offset + (uint64_t)len > ref->stored_len)
			return damaged(rd, block, "the stored lengths are damaged");
		r = read_encoded_step(
			rd, block, step, (uint64_t)offset, (size_t)len, checks + 8 * i, lens + 4 * block, out);
		if (r < 0)
			return r;
		offset += len;
		out += blocks_raw_len(ref, block, step);
		i += step;
	}
	return 0;
}

static int read_encoded(struct reading *rd, uint64_t first, uint64_t n, uint8_t *out)
{
	uint64_t blocks = base_block_count(rd->ref->raw_len);
	const uint8_t *checks;
	int r = checks_get(rd, 8 * first, 8 * (blocks - first) + 4 * (first + n), 0,
		n == blocks ? rd->ref->stored_len : 0, &checks);

	return r < 0 ? r : read_encoded_with(rd, first, n, checks, out);
}

static int pack_newer_object(const struct pack *p, const struct pack_object_ref *ref, struct base_error *err)
{
	return base_error_newer(err,
		"pack %s: the object at offset %llu was written by a newer vckpt: this one does not know its codec "
		"(%#x) or kind (%u)",
		p->name, (unsigned long long)ref->offset, ref->codec, ref->kind);
}

static int object_ref_checked(const struct pack *p, const struct pack_object_ref *ref, struct base_error *err)
{
	int r = pack_object_ref_check(ref, p->size - PACK_TAIL_BYTES);
	if (r == -BASE_EVERSION)
		return pack_newer_object(p, ref, err);
	if (r < 0)
		return base_error_set(err, r,
			"pack %s: no object can be at offset %llu with %llu stored bytes and checks at %llu (the pack "
			"has %llu bytes)",
			p->name, (unsigned long long)ref->offset, (unsigned long long)ref->stored_len,
			(unsigned long long)ref->checks, (unsigned long long)p->size);
	return 0;
}

int pack_object_read_blocks(struct pack *p, const struct pack_object_ref *ref, uint64_t first, uint64_t n,
	void *out, struct base_error *err)
{
	struct reading rd = {.p = p, .ref = ref, .err = err, .b = buffers_get()};
	uint64_t blocks = base_block_count(ref->raw_len);
	int r;

	if (!rd.b)
		return base_no_memory_for(err, "pack %s", p->name);
	r = object_ref_checked(p, ref, err);
	if (r < 0)
		return r;
	if (first > blocks || n > blocks - first)
		return base_error_set(err, -EINVAL, "pack %s: the object at offset %llu has no block %llu", p->name,
			(unsigned long long)ref->offset, (unsigned long long)(first + n));
	if (n == 0)
		return 0;
	r = ref->codec == PACK_CODEC_RAW ? read_raw(&rd, first, n, out) : read_encoded(&rd, first, n, out);
	if (r == -ENOMEM)
		base_no_memory_for(err, "pack %s", p->name);
	return r;
}

void pack_object_checks_of(const struct pack_object_ref *ref, uint64_t first, uint64_t n, uint64_t *ret_offset,
	uint64_t *ret_len)
{
	bool raw = ref->codec == PACK_CODEC_RAW;

	*ret_offset = ref->checks + (raw ? 8 * first : 0);
	*ret_len = raw ? 8 * n : pack_object_checks_bytes(ref->codec, ref->raw_len);
}

int pack_object_stored_of(const struct pack_object_ref *ref, uint64_t first, uint64_t n, const void *checks,
	uint64_t *ret_from, uint64_t *ret_len)
{
	struct reading rd = {.p = &(struct pack){0}, .ref = ref};
	const uint8_t *lens = (const uint8_t *)checks + 8 * base_block_count(ref->raw_len);
	int64_t from, len;

	if (ref->codec == PACK_CODEC_RAW) {
		*ret_from = first * BASE_BLOCK_BYTES;
		*ret_len = blocks_raw_len(ref, first, n);
		return 0;
	}
	from = lens_sum(&rd, lens, 0, first);
	len = from < 0 ? from : lens_sum(&rd, lens + 4 * first, first, n);
	if (len < 0 || (uint64_t)from + (uint64_t)len > ref->stored_len)
		return -BASE_EDAMAGED;
	*ret_from = (uint64_t)from;
	*ret_len = (uint64_t)len;
	return 0;
}

int pack_object_take(struct pack *p, const struct pack_object_ref *ref, uint64_t first, uint64_t n,
	const void *stored, const void *checks, void *out, struct base_error *err)
{
	struct reading rd = {.p = p, .ref = ref, .err = err, .b = buffers_get(), .joined = stored};
	uint64_t len;
	int r;

	if (!rd.b)
		return base_no_memory_for(err, "pack %s", p->name);
	r = object_ref_checked(p, ref, err);
	if (r < 0)
		return r;
	if (ref->codec == PACK_CODEC_RAW)
		return take_raw(&rd, first, n, stored, checks, out);
	r = pack_object_stored_of(ref, first, n, checks, &rd.joined_from, &len);
	if (r < 0)
		return damaged(&rd, first, "the stored lengths are damaged");
	return read_encoded_with(&rd, first, n, (const uint8_t *)checks + 8 * first, out);
}

int pack_object_read(struct pack *p, const struct pack_object_ref *ref, void *out, struct base_error *err)
{
	return pack_object_read_blocks(p, ref, 0, base_block_count(ref->raw_len), out, err);
}

int pack_object_load(struct pack *p, const struct pack_object_ref *ref, uint64_t max, void **ret_bytes,
	struct base_error *err)
{
	base_cleanup_free void *bytes = NULL;
	struct base_digest digest;
	int r;

	if (ref->raw_len > max)
		return base_error_set(err, -EFBIG,
			"pack %s: the object at offset %llu has %llu bytes, more than the %llu that one of its kind "
			"may have",
			p->name, (unsigned long long)ref->offset, (unsigned long long)ref->raw_len,
			(unsigned long long)max);
	r = pack_object_ref_check(ref, p->size - PACK_TAIL_BYTES); /* before memory is taken for it */
	if (r == 0) {
		bytes = malloc(ref->raw_len ? ref->raw_len : 1);
		if (!bytes)
			return base_no_memory_for(err, "pack %s", p->name);
	}
	r = pack_object_read(p, ref, bytes, err); /* gives the sentence, if the reference is bad */
	if (r < 0)
		return r;
	base_digest_of(bytes, ref->raw_len, &digest);
	if (!base_digest_equal(&digest, &ref->digest))
		return base_error_set(err, -BASE_EDAMAGED,
			"pack %s: the object at offset %llu is not the one that its digest names", p->name,
			(unsigned long long)ref->offset);
	*ret_bytes = base_steal(bytes);
	return 0;
}

/* ---- the footer ---- */

int pack_footer_load(struct pack *p, struct pack_tail *ret_tail, uint8_t **ret_footer, struct base_error *err)
{
	uint8_t tail[PACK_TAIL_BYTES];
	base_cleanup_free uint8_t *footer = NULL;
	struct base_digest digest;
	int r = pack_read(p, p->size - sizeof tail, tail, sizeof tail, err);

	if (r < 0)
		return r;
	r = pack_tail_decode(tail, p->size, ret_tail);
	if (r < 0)
		return base_error_set(err, r, "pack %s: its tail (offset %llu) is damaged, or the file is cut short",
			p->name, (unsigned long long)(p->size - sizeof tail));
	footer = malloc(ret_tail->footer_len ? ret_tail->footer_len : 1);
	if (!footer)
		return base_no_memory_for(err, "pack %s", p->name);
	r = pack_read(p, ret_tail->footer_offset, footer, ret_tail->footer_len, err);
	if (r < 0)
		return r;
	base_sha256(footer, ret_tail->footer_len, &digest);
	if (!base_digest_equal(&digest, &ret_tail->footer_digest))
		return base_error_set(err, -BASE_EDAMAGED, "pack %s: its footer (offset %llu) is damaged", p->name,
			(unsigned long long)ret_tail->footer_offset);
	*ret_footer = base_steal(footer);
	return 0;
}

int pack_footer_read(struct pack *p, struct pack_footer *ret_f, struct base_error *err)
{
	struct pack_tail tail;
	base_cleanup_free uint8_t *footer = NULL;
	base_cleanup_free struct pack_object_ref *objects = NULL;
	int r = pack_footer_load(p, &tail, &footer, err);

	if (r < 0)
		return r;
	objects = calloc(tail.count ? tail.count : 1, sizeof *objects);
	if (!objects)
		return base_no_memory_for(err, "pack %s", p->name);
	r = pack_footer_decode(footer, &tail, objects);
	if (r == -BASE_EVERSION)
		return base_error_newer(err,
			"pack %s was written by a newer vckpt: its footer lists an object of a codec or kind that this "
			"vckpt does not know", p->name);
	if (r < 0)
		return base_error_set(err, r, "pack %s: its footer names places that no writer makes", p->name);
	ret_f->objects = base_steal(objects);
	ret_f->count = tail.count;
	return 0;
}

void pack_footer_free(struct pack_footer *f)
{
	if (!f)
		return;
	free(f->objects);
	*f = (struct pack_footer){ 0 };
}
