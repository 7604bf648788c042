/* SPDX-License-Identifier: Apache-2.0
 *
 * repack_move: the bytes. Objects are in order of their class and tensor, so that a tensor's pieces of all ranks follow
 * each other, and one pack is open at a time, besides that of the records. Threads read objects and compare them with
 * their digests, a batch ahead of the appender, which takes them as they are stored. A long object (a blob) is read and
 * appended by the appender alone, a part at a time. */
#include <inttypes.h>
#include <string.h>

#include "core/base/array.h"
#include "core/pack/codec.h"
#include "core/upkeep/repack_internal.h"

#define BATCH_BYTES (UINT64_C(32) << 20)
#define LONG_BYTES (UINT64_C(16) << 20) /* of a raw object */
enum { JOB_OBJECTS = 8, BATCH_JOBS = 16 };

struct move_item {
	struct repack_object *o;
	uint8_t *raw, *stored;
	uint64_t *checks; uint32_t *lens; /* lens NULL: raw */
};

struct move_job {
	struct store *store;
	struct move_item items[JOB_OBJECTS]; unsigned n;
	int r;
	struct base_error err;
};

struct move_batch {
	struct move_job jobs[BATCH_JOBS]; unsigned njobs;
	struct repack_object *long_one; /* alone */
	uint8_t *memory; uint64_t room, used;
};

/* ---- reading ---- */

static int item_read(struct move_job *j, struct move_item *it)
{
	const struct repack_object *o = it->o;
	struct pack *pack;
	int r = store_pack_get(j->store, o->pack, &pack, &j->err);

	if (r < 0)
		return r;
	r = pack_object_copy(pack, &o->from, it->stored, it->raw, it->checks, it->lens, &j->err);
	store_pack_put(j->store, pack);
	return r;
}

static int object_wrong(const struct repack_object *o, struct base_error *err)
{
	return base_error_set(err, -BASE_EDAMAGED, "pack %s: the object at offset %llu is not what its digest says "
		"(vckpt verify looks at all of them)", o->pack, (unsigned long long)o->from.offset);
}

static void job_run(void *arg, unsigned worker)
{
	struct base_object objects[JOB_OBJECTS];
	struct move_job *j = arg;

	(void)worker;
	for (unsigned i = 0; j->r == 0 && i < j->n; i++) {
		objects[i] = (struct base_object){.bytes = j->items[i].raw, .len = j->items[i].o->from.raw_len};
		j->r = item_read(j, &j->items[i]);
	}
	if (j->r < 0)
		return;
	base_digests_of(objects, j->n);
	for (unsigned i = 0; j->r == 0 && i < j->n; i++)
		if (!base_digest_equal(&objects[i].digest, &j->items[i].o->from.digest))
			j->r = object_wrong(j->items[i].o, &j->err);
}

/* ---- batches ---- */

static uint8_t *batch_take(struct move_batch *b, uint64_t len)
{
	uint8_t *at = b->memory + b->used;

	b->used += base_align(len, 64);
	return at;
}

static void batch_add(struct upkeep_repack *p, struct move_batch *b, struct repack_object *o)
{
	const bool raw = o->from.codec == PACK_CODEC_RAW;
	const uint64_t blocks = base_block_count(o->from.raw_len);
	struct move_job *j = b->njobs ? &b->jobs[b->njobs - 1] : NULL;
	struct move_item *it;

	if (!j || j->n == JOB_OBJECTS) {
		j = &b->jobs[b->njobs++];
		j->store = p->store;
		j->n = 0;
		j->r = 0;
		j->err = (struct base_error){0};
	}
	it = &j->items[j->n++];
	it->o = o;
	it->raw = batch_take(b, o->from.raw_len);
	it->stored = raw ? it->raw : batch_take(b, o->from.stored_len);
	it->checks = (uint64_t *)(void *)batch_take(b, 8 * blocks);
	it->lens = raw ? NULL : (uint32_t *)(void *)batch_take(b, 4 * blocks);
}

static uint64_t object_room(const struct repack_object *o)
{
	return o->from.raw_len + (o->from.codec == PACK_CODEC_RAW ? 0 : o->from.stored_len) +
		12 * base_block_count(o->from.raw_len) + 4 * 64;
}

/* Lengths are believed here, so they are looked at first. 1: read by itself. */
static int object_is_long(const struct repack_object *o, struct base_error *err)
{
	if (pack_object_ref_check(&o->from, STORE_OBJECT_MAX_BYTES) < 0)
		return base_error_set(err, -BASE_EDAMAGED, "pack %s: no such object at offset %llu", o->pack,
			(unsigned long long)o->from.offset);
	return o->from.codec == PACK_CODEC_RAW && o->from.raw_len > LONG_BYTES;
}

/* Starts to read what comes next, from *at on. */
static int batch_begin(struct upkeep_repack *p, struct move_batch *b, size_t *at, size_t end, struct base_error *err)
{
	int is_long = 0;

	b->njobs = 0;
	b->long_one = NULL;
	b->used = 0;
	for (; *at < end; ++*at) {
		struct repack_object *o = p->todo[*at];
		const uint64_t need = object_room(o);

		is_long = object_is_long(o, err);
		if (is_long < 0 || (b->njobs && (is_long || b->used + need > b->room ||
			(b->njobs == BATCH_JOBS && b->jobs[b->njobs - 1].n == JOB_OBJECTS))))
			break;
		if (is_long) {
			b->long_one = o;
			++*at;
			break;
		}
		if (need > b->room) {
			free(b->memory);
			b->room = base_max(need, BATCH_BYTES);
			if (!(b->memory = aligned_alloc(4096, base_align(b->room, 4096))))
				return base_no_memory(err);
		}
		batch_add(p, b, o);
	}
	for (unsigned i = 0; i < b->njobs; i++)
		base_pool_run(p->pool, job_run, &b->jobs[i]);
	return is_long < 0 ? is_long : 0;
}

/* ---- writing ---- */

static int write_failed(struct upkeep_repack *p, int r, struct base_error *err)
{
	return base_error_set(err, r, "%s: a pack cannot be written: %s", p->store->path, base_error_name(r));
}

static void wrote(struct upkeep_repack *p, struct repack_object *o)
{
	o->to_pack = p->npacks - 1;
	p->done_bytes += o->from.raw_len;
	if (p->options->progress)
		p->options->progress(p->options->arg, p->done_bytes, p->todo_bytes);
}

static int long_copy(struct upkeep_repack *p, struct pack_writer *w, struct repack_object *o, struct pack *pack,
	struct base_error *err)
{
	base_cleanup_free uint8_t *bytes = malloc(LONG_BYTES);
	int r = bytes ? pack_stream_begin(w, &o->from.digest, o->from.kind, o->from.raw_len) : -ENOMEM;

	for (uint64_t at = 0, len; r == 0 && at < o->from.raw_len; at += len) {
		len = base_min(o->from.raw_len - at, LONG_BYTES);
		if (p->options->cancelled && p->options->cancelled())
			return base_error_set(err, -EINTR, "interrupted");
		r = pack_object_read_blocks(pack, &o->from, at / BASE_BLOCK_BYTES, base_block_count(len), bytes, err);
		if (r < 0)
			return r;
		r = pack_stream_add(w, bytes, len);
	}
	if (r == 0)
		r = pack_stream_end(w, &o->to);
	return r == -EBADMSG ? object_wrong(o, err) : r < 0 ? write_failed(p, r, err) : 0;
}

static int long_append(struct upkeep_repack *p, struct pack_writer *w, struct repack_object *o, struct base_error *err)
{
	struct pack *pack;
	int r = store_pack_get(p->store, o->pack, &pack, err);

	if (r < 0)
		return r;
	r = long_copy(p, w, o, pack, err);
	store_pack_put(p->store, pack);
	if (r == 0)
		wrote(p, o);
	return r;
}

/* Its jobs are done. */
static int batch_append(struct upkeep_repack *p, struct move_batch *b, struct pack_writer *w, struct base_error *err)
{
	if (p->options->cancelled && p->options->cancelled())
		return base_error_set(err, -EINTR, "interrupted");
	if (b->long_one)
		return long_append(p, w, b->long_one, err);
	for (unsigned i = 0; i < b->njobs; i++) {
		struct move_job *j = &b->jobs[i];

		if (j->r < 0)
			return base_error_set(err, j->r, "%s", j->err.text);
		for (unsigned k = 0; k < j->n; k++) {
			struct move_item *it = &j->items[k];
			const struct pack_object_ref *ref = &it->o->from;
			int r = pack_append(w, &ref->digest, ref->kind, ref->codec, it->stored, ref->stored_len,
				ref->raw_len, it->checks, it->lens, &it->o->to);

			if (r < 0)
				return write_failed(p, r, err);
			wrote(p, it->o);
		}
	}
	return 0;
}

/* Objects of one class, into an open pack. */
static int class_write(struct upkeep_repack *p, struct pack_writer *w, size_t at, size_t end, struct base_error *err)
{
	struct move_batch *b = calloc(2, sizeof *b);
	int r = b ? batch_begin(p, &b[0], &at, end, err) : base_no_memory(err), next = 0;

	for (unsigned i = 0; r == 0 && (b[i].njobs || b[i].long_one); i ^= 1) {
		base_pool_wait(p->pool);
		next = batch_begin(p, &b[i ^ 1], &at, end, err);
		r = next < 0 ? next : batch_append(p, &b[i], w, err);
	}
	base_pool_wait(p->pool);
	for (unsigned i = 0; b && i < 2; i++)
		free(b[i].memory);
	free(b);
	return r;
}

static int pack_add(struct upkeep_repack *p, const char *name)
{
	if (base_array_more(p->packs, p->npacks) < 0 || !(p->packs[p->npacks].name = strdup(name)))
		return -ENOMEM;
	p->packs[p->npacks++].size = 0;
	return 0;
}

static int class_move(struct thin *t, size_t at, size_t end)
{
	struct upkeep_repack *p = t->arg;
	const char *class = p->classes[p->todo[at]->class];
	char name[PACK_NAME_MAX];
	struct pack_writer *w;
	int r = commit_attempt_pack_open(t->attempt, class, name, &w);

	if (r < 0)
		return write_failed(p, r, t->err);
	r = pack_add(p, name) < 0 ? base_no_memory(t->err) : class_write(p, w, at, end, t->err);
	if (r < 0) {
		pack_abandon(w);
		return r;
	}
	r = commit_attempt_pack_seal(t->attempt, w, &p->packs[p->npacks - 1].size);
	t->new_bytes += r < 0 ? 0 : p->packs[p->npacks - 1].size;
	return r < 0 ? write_failed(p, r, t->err) : 0;
}

/* Small blobs stay with the records. */
static int meta_move(struct thin *t, size_t at, size_t end)
{
	struct upkeep_repack *p = t->arg;
	int r = pack_add(p, t->meta_name) < 0 ? base_no_memory(t->err) : class_write(p, t->meta, at, end, t->err);

	if (r == 0 && (r = pack_extent_end(t->meta)) < 0)
		r = write_failed(p, r, t->err);
	return r;
}

/* ---- order ---- */

static int compare_objects(const void *a, const void *b)
{
	const struct repack_object *x = *(struct repack_object *const *)a, *y = *(struct repack_object *const *)b;
	uint32_t len[2];
	const char *name[2];
	int order;

	if (x->class != y->class)
		return x->class < y->class ? -1 : 1;
	if (x->tensor != THIN_NONE && y->tensor != THIN_NONE && (x->layout != y->layout || x->tensor != y->tensor)) {
		name[0] = store_layout_name(x->layout, x->tensor, &len[0]);
		name[1] = store_layout_name(y->layout, y->tensor, &len[1]);
		order = memcmp(name[0], name[1], base_min(len[0], len[1]));
		if (order || len[0] != len[1])
			return order ? order : len[0] < len[1] ? -1 : 1;
	} else if (x->tensor != y->tensor) {
		return x->tensor == THIN_NONE ? 1 : -1;
	}
	return (x->order > y->order) - (x->order < y->order);
}

int repack_move(struct thin *t)
{
	struct upkeep_repack *p = t->arg;
	int r = 0;

	if (p->ntodo)
		qsort(p->todo, p->ntodo, sizeof *p->todo, compare_objects);
	for (size_t at = 0, end = 0; r == 0 && at < p->ntodo; at = end) {
		while (end < p->ntodo && p->todo[end]->class == p->todo[at]->class)
			end++;
		r = strcmp(p->classes[p->todo[at]->class], "meta") == 0 ? meta_move(t, at, end)
			: class_move(t, at, end);
	}
	t->nplaces = p->npacks;
	return r < 0 ? base_error_prefix(t->err, r, "%s/%" PRIu64, t->run, t->m.step) : 0;
}
