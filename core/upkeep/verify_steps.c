/* SPDX-License-Identifier: Apache-2.0
 *
 * verify_steps: walks every step that is asked for. An object that a verified footer lists is not hashed again; every
 * other reference is hashed by itself, once, in the pool: in a whole store those into damaged packs, else all of them;
 * in a stranger's store always all of them. At the end the files of each step are opened, or read. */
#include "core/upkeep/verify_internal.h"

#include <stdio.h>

#include "core/base/array.h"
#include "core/base/bisect.h"
#include "core/pack/pack_format.h"

enum { REHASH_OBJECTS = 64, REHASH_JOB_BYTES = 16 << 20 };

struct walker {
	struct verify *v;
	size_t number;
};

/* ref NULL: the whole pack. newer: a newer vckpt's, whose bytes are not looked at. */
static void pack_fault(struct verify *v, const char *file, const struct pack_object_ref *ref, bool newer,
	const char *what)
{
	verify_fault(v, (struct verify_fault){.file = file, .what = what, .newer = newer, .pack = true,
		.offset = ref ? ref->offset : 0, .len = ref ? base_max(ref->stored_len, 1) : 0});
}

/* The bytes are right, but the row has another hash of them, which a save would trust without reading the bytes. */
static void hashes_fault(struct verify *v, const char *file, const struct pack_object_ref *ref,
	const struct base_xxh128 *xxh)
{
	verify_fault(v, (struct verify_fault){.file = file, .pack = true, .by_xxh = true, .xxh = *xxh,
		.offset = ref->offset, .len = base_max(ref->stored_len, 1),
		.what = "a piece's bytes match its digest but not the XXH3-128 in its row: a later save could take "
			"other data for this piece"});
}

/* ---- what has been looked at ---- */

/* What a verified footer says of an object; NULL: no footer lists it. */
static const struct verify_seen *footer_lists(const struct verify *v, const char *file,
	const struct pack_object_ref *ref)
{
	int64_t at = base_search(i, 0, v->npacks, strcmp(v->packs[i].file, file));
	uint64_t place = verify_place(NULL, ref, NULL, 0);

	if (at < 0 || !v->packs[at].nseen)
		return NULL;
	return bsearch(&place, v->packs[at].seen, v->packs[at].nseen, sizeof *v->packs[at].seen,
		base_compare_64);
}

/* ---- sets ---- */

int verify_set_add(struct verify_set *s, uint64_t number)
{
	uint32_t hash = base_table_hash_number(number), i;
	size_t at = 0;

	while ((i = base_table_next(&s->by_number, hash, &at)) != BASE_TABLE_NONE)
		if (s->all[i] == number)
			return 0;
	i = (uint32_t)s->by_number.n;
	if (base_array_room(s->all, s->room, (size_t)i + 1) < 0 || base_table_reserve(&s->by_number, 1) < 0)
		return -ENOMEM;
	s->all[i] = number;
	base_table_add(&s->by_number, hash, i);
	return 1;
}

void verify_set_release(struct verify_set *s)
{
	free(s->all);
	base_table_release(&s->by_number);
	*s = (struct verify_set){0};
}

/* The key of a piece includes its XXH3-128, because rows may give different ones for the same bytes. */
static uint64_t item_place(const struct verify_item *it)
{
	return verify_place(it->pack, it->ref, it->xxh, it->xxh ? sizeof *it->xxh : 0);
}

static int add_todo(struct verify *v, const struct verify_item *it)
{
	const char *pack = it->pack;
	const struct pack_object_ref *ref = it->ref;
	int r = verify_set_add(&v->seen, item_place(it));
	char *name;

	if (r <= 0)
		return r;
	if (base_array_more(v->todo, v->ntodo) < 0)
		return -ENOMEM;
	name = strdup(pack);
	if (!name)
		return -ENOMEM;
	v->todo[v->ntodo] = (struct verify_todo){.pack = name, .ref = *ref, .piece = it->xxh != NULL};
	if (it->xxh)
		v->todo[v->ntodo].xxh = *it->xxh;
	v->ntodo++;
	v->total_bytes += ref->stored_len;
	return 0;
}

/* ---- the walk ---- */

/* Checks that a pack that a step names exists and has the manifest's size; once for each pack and size. */
static int check_pack(struct verify *v, const struct verify_item *it, const char *file)
{
	struct pack_object_ref key = {.offset = it->size, .raw_len = 1}, lost = {0};
	uint64_t size;
	char text[160];
	int r = verify_set_add(&v->seen, verify_place(it->pack, &key, NULL, 0));

	if (r <= 0)
		return r;
	r = storage_size(v->store->storage, file, &size);
	if (r == -ENOTDIR)
		return r; /* something else has its directory's place: nothing is known of the pack */
	if (r < 0)
		pack_fault(v, file, NULL, false, r == -ENOENT ? "it is missing" : base_error_name(r));
	else if (size != it->size) {
		snprintf(text, sizeof text, "it has %llu bytes where a step's manifest says %llu",
			(unsigned long long)size, (unsigned long long)it->size);
		lost.offset = base_min(size, it->size); /* the bytes before the cut are not lost */
		lost.stored_len = base_max(size, it->size) - lost.offset;
		pack_fault(v, file, &lost, false, text);
	}
	return 0;
}

static const char *kind_name(uint8_t kind)
{
	static const char *const names[] = {[PACK_OBJECT_PIECE] = "a piece", [PACK_OBJECT_BLOB] = "a blob",
		[PACK_OBJECT_LAYOUT] = "a layout", [PACK_OBJECT_PART] = "a part",
		[PACK_OBJECT_PART_CHUNK] = "a chunk", [PACK_OBJECT_VIEW_HEADER] = "a view header"};

	return kind < BASE_COUNT(names) && names[kind] ? names[kind] : "of an unknown kind";
}

/* The index and mending know objects by footers alone. Reported once for each object; 0 or -ENOMEM. */
static int kind_differs(struct verify *v, const struct verify_item *it, const char *file, uint8_t kind)
{
	char text[120];
	int r = verify_set_add(&v->seen, verify_place(it->pack, it->ref, "kind", 4));

	if (r <= 0)
		return r;
	snprintf(text, sizeof text, "the footer says that this object is %s, and in a step it is %s", kind_name(kind),
		kind_name(it->ref->kind));
	pack_fault(v, file, it->ref, false, text);
	return 0;
}

static int on_item(struct verify_walker *w, const struct verify_item *it)
{
	const struct verify_seen *seen;
	struct walker *k = w->arg;
	char file[STORAGE_NAME_MAX];
	int r;

	if (pack_path(it->pack, file) < 0)
		return 0; /* the manifest's decoder refuses such names */
	if (it->what == VERIFY_PACK)
		return check_pack(k->v, it, file);
	seen = footer_lists(k->v, file, it->ref);
	if (seen && seen->kind != it->ref->kind && (r = kind_differs(k->v, it, file, seen->kind)) < 0)
		return r;
	if (!seen || k->v->o->paranoid)
		return add_todo(k->v, it);
	if (!it->xxh || !seen->hashed || memcmp(it->xxh, &seen->xxh, sizeof seen->xxh) == 0)
		return 0;
	r = verify_set_add(&k->v->seen, item_place(it));
	if (r == 1)
		hashes_fault(k->v, file, it->ref, it->xxh);
	return r < 0 ? r : 0;
}

static void on_broken(struct verify_walker *w, const char *file, const char *pack, const struct pack_object_ref *ref,
	bool newer, const char *text)
{
	struct walker *k = w->arg;
	char path[STORAGE_NAME_MAX];

	if (!file) {
		if (pack_path(pack, path) == 0 && !verify_known(k->v, path, ref))
			pack_fault(k->v, path, ref, newer, text);
		return;
	}
	for (size_t i = 0; i < k->v->nfaults; i++)
		if (!strcmp(k->v->faults[i].file, file) && (newer || !k->v->faults[i].newer))
			return;
	verify_fault(k->v, (struct verify_fault){
		.file = file, .what = text, .newer = newer, .step = k->number + 1, .run = w->step->run});
}

/* ---- re-hashing by reference ---- */

/* Objects to hash, one after another. Those that are no longer than a step are read and checked, and wait until the
 * step is full; then they are hashed together (core/base/digest.h). */
struct rehash {
	struct verify *v;
	const struct verify_todo *todo; /* of the job */
	size_t n;
	uint8_t *bytes; /* a step */
	size_t used;
	const struct verify_todo *waiting[REHASH_OBJECTS]; struct base_object objects[REHASH_OBJECTS]; size_t nwaiting;
};

static void rehash_done(struct verify *v, const struct verify_todo *t)
{
	verify_progress(v, t->ref.stored_len);
	pthread_mutex_lock(&v->lock);
	v->result.objects++;
	pthread_mutex_unlock(&v->lock);
}

/* The pack cannot be opened (ref NULL), or the object cannot be read. */
static void rehash_failed(struct verify *v, const struct verify_todo *t, const struct pack_object_ref *ref, int r,
	const struct base_error *err)
{
	char file[STORAGE_NAME_MAX];

	pack_path(t->pack, file);
	if (ref && r == -ENOMEM)
		verify_error(v, r);
	else
		pack_fault(v, file, ref, r == -BASE_EVERSION, !ref && r == -ENOENT ? "it is missing"
			: err->text[0] ? err->text : base_error_name(r));
}

static void rehash_compare(struct verify *v, const struct verify_todo *t, const struct base_digest *digest,
	const struct base_xxh128 *xxh)
{
	char file[STORAGE_NAME_MAX];

	pack_path(t->pack, file);
	if (!base_digest_equal(digest, &t->ref.digest))
		pack_fault(v, file, &t->ref, false, "an object does not match its digest");
	else if (t->piece && memcmp(xxh, &t->xxh, sizeof *xxh) != 0)
		hashes_fault(v, file, &t->ref, &t->xxh);
}

static void rehash_waiting(struct rehash *h)
{
	base_digests_of(h->objects, h->nwaiting);
	for (size_t i = 0; i < h->nwaiting; i++) {
		const struct base_object *o = &h->objects[i];
		struct base_xxh128 xxh;

		if (h->waiting[i]->piece)
			base_xxh128_of(h->v->store->info.seed, o->bytes, o->len, &xxh);
		rehash_compare(h->v, h->waiting[i], &o->digest, &xxh);
	}
	h->nwaiting = 0;
	h->used = 0;
}

/* 0, or what is wrong in err. */
static int rehash_short(struct rehash *h, const struct verify_todo *t, struct pack *p, struct base_error *err)
{
	uint64_t len = t->ref.raw_len;
	int r;

	if (h->nwaiting == REHASH_OBJECTS || h->used + len > VERIFY_HASH_BYTES)
		rehash_waiting(h);
	r = len ? pack_object_read(p, &t->ref, h->bytes + h->used, err) : 0;
	if (r < 0)
		return r;
	h->objects[h->nwaiting] = (struct base_object){.bytes = h->bytes + h->used, .len = len};
	h->waiting[h->nwaiting++] = t;
	h->used += base_align(len, 64);
	return 0;
}

int verify_object_hash(struct pack *p, const struct pack_object_ref *ref, bool checked, uint64_t seed,
	void *room, struct base_digest *ret_digest, struct base_xxh128 *ret_xxh, struct base_error *err)
{
	struct base_hasher *hasher = base_hasher_new();
	struct base_xxh128_state *x = base_xxh128_state_new();
	int r = hasher && x ? 0 : -ENOMEM;

	if (r == 0)
		base_xxh128_begin(x, seed);
	for (uint64_t at = 0, len; r == 0 && at < ref->raw_len; at += len) {
		len = base_min(ref->raw_len - at, VERIFY_HASH_BYTES);
		if (checked)
			r = pack_object_read_blocks(p, ref, at / BASE_BLOCK_BYTES, base_block_count(len), room, err);
		else
			r = pack_read(p, ref->offset + at, room, len, err);
		if (r == 0)
			base_hasher_update(hasher, room, len);
		if (r == 0 && ret_xxh)
			base_xxh128_update(x, room, len);
	}
	if (r == 0)
		r = base_hasher_final(hasher, ret_digest);
	if (r == 0 && ret_xxh)
		base_xxh128_final(x, ret_xxh);
	base_hasher_free(hasher);
	base_xxh128_state_free(x);
	return r;
}

/* A step at a time. */
static int rehash_long(struct rehash *h, const struct verify_todo *t, struct pack *p, struct base_error *err)
{
	struct base_digest digest;
	struct base_xxh128 xxh;
	int r;

	rehash_waiting(h);
	r = verify_object_hash(p, &t->ref, true, h->v->store->info.seed, h->bytes, &digest, &xxh, err);
	if (r == 0)
		rehash_compare(h->v, t, &digest, &xxh);
	return r;
}

static void rehash_one(struct rehash *h, const struct verify_todo *t)
{
	struct base_error err = {0};
	char file[STORAGE_NAME_MAX];
	struct pack *p;
	bool known;
	int r;

	pack_path(t->pack, file);
	pthread_mutex_lock(&h->v->lock);
	known = verify_known(h->v, file, &t->ref);
	pthread_mutex_unlock(&h->v->lock);
	if (known)
		return;
	r = store_pack_get(h->v->store, t->pack, &p, &err);
	if (r < 0) {
		rehash_failed(h->v, t, NULL, r, &err);
	} else {
		r = (t->ref.raw_len <= VERIFY_HASH_BYTES ? rehash_short : rehash_long)(h, t, p, &err);
		store_pack_put(h->v->store, p);
		if (r < 0)
			rehash_failed(h->v, t, &t->ref, r, &err);
	}
	rehash_done(h->v, t);
}

static void rehash_job(void *arg, unsigned worker)
{
	struct rehash *h = arg;

	(void)worker;
	h->bytes = aligned_alloc(4096, VERIFY_HASH_BYTES); /* as what packs are read into (docs/save.md) */
	if (!h->bytes)
		verify_error(h->v, -ENOMEM);
	for (size_t i = 0; h->bytes && i < h->n; i++)
		rehash_one(h, &h->todo[i]);
	rehash_waiting(h);
	free(h->bytes);
	free(h);
}

static int rehash_all(struct verify *v)
{
	int r = 0;

	for (size_t i = 0, n; r == 0 && i < v->ntodo; i += n) {
		struct rehash *h = calloc(1, sizeof *h);
		uint64_t bytes = 0;

		for (n = 0; i + n < v->ntodo && (n == 0 || bytes < REHASH_JOB_BYTES); n++)
			bytes += base_min(v->todo[i + n].ref.raw_len, REHASH_JOB_BYTES);
		if (h) {
			*h = (struct rehash){.v = v, .todo = &v->todo[i], .n = n};
			base_pool_run(v->pool, rehash_job, h);
		} else {
			r = -ENOMEM;
		}
	}
	base_pool_wait(v->pool);
	return r;
}

/* ---- the files of the steps ---- */

struct opening {
	struct verify *v;
	size_t number;
};

/* Is a fault known that may be why a file cannot be read? Then that fault is reported instead. */
static bool explained(const struct opening *o, int r)
{
	const struct verify_step *s = &o->v->steps[o->number];
	char manifest[STORAGE_NAME_MAX];

	if (store_manifest_path(s->run, &s->step->commit.manifest, manifest) < 0)
		manifest[0] = 0;
	for (size_t i = 0; i < o->v->nfaults; i++) {
		const struct verify_fault *f = &o->v->faults[i];

		if (f->newer && r != -BASE_EVERSION)
			continue;
		if (f->pack ? r != -BASE_EFORMAT : f->step == o->number + 1 || strcmp(f->file, manifest) == 0)
			return true;
	}
	return false;
}

static void file_wrong(void *arg, int r, const char *text)
{
	const struct opening *o = arg;
	const struct verify_step *s = &o->v->steps[o->number];
	char manifest[STORAGE_NAME_MAX];
	bool known;

	pthread_mutex_lock(&o->v->lock);
	known = explained(o, r);
	pthread_mutex_unlock(&o->v->lock);
	if (!known && store_manifest_path(s->run, &s->step->commit.manifest, manifest) == 0)
		verify_fault(o->v, (struct verify_fault){.file = manifest, .what = text, .newer = r == -BASE_EVERSION,
			.step = o->number + 1, .run = s->run});
}

static void file_read(void *arg, uint64_t bytes) { verify_progress(((const struct opening *)arg)->v, bytes); }

static int open_all(struct verify *v)
{
	int r = 0;

	for (size_t i = 0; v->o->paranoid && i < v->nsteps; i++) { /* each is read as .npy and as .safetensors */
		pthread_mutex_lock(&v->lock);
		v->total_bytes += 2 * base_min(v->steps[i].step->commit.bytes, UINT64_C(1) << 50);
		pthread_mutex_unlock(&v->lock);
	}
	for (size_t i = 0; r == 0 && v->o->files && i < v->nsteps; i++) {
		struct opening o = {v, i};

		r = v->o->files(v->store, v->steps[i].run, v->steps[i].step, v->o->paranoid, file_wrong, file_read, &o);
	}
	return r;
}

int verify_steps(struct verify *v)
{
	int r = 0;

	for (size_t i = 0; r == 0 && i < v->nsteps; i++) {
		struct walker k = {v, i};
		struct verify_walker w = {.store = v->store,
			.step = &v->steps[i],
			.item = on_item,
			.broken = on_broken,
			.arg = &k,
			.cover = true,
			.paranoid = v->o->paranoid,
			.header = v->o->header};

		r = verify_walk(&w);
	}
	if (r == 0)
		r = rehash_all(v);
	return r == 0 ? open_all(v) : r;
}
