/* SPDX-License-Identifier: Apache-2.0
 *
 * verify_steps: walks every step that is asked for. A reference that a verified footer lists needs no second look;
 * every other one is re-hashed by itself, once, in the pool: all of them when single steps are verified, those into
 * damaged packs when it is the whole store; and all of them, too, in a stranger's store. Last the files of each step
 * are opened, or read. */
#include "core/upkeep/verify_internal.h"

#include <stdio.h>

#include "core/base/array.h"
#include "core/base/bisect.h"

enum { STEP_BLOCKS = 256 };

struct walker {
	struct verify *v;
	size_t number;
};

/* A newer vckpt's: its bytes are not looked at. */
static void pack_newer(struct verify *v, const char *file, const struct store_object_ref *ref, const char *what)
{
	verify_fault(v,
		(struct verify_fault){.file = (char *)file,
			.what = (char *)what,
			.newer = true,
			.pack = true,
			.offset = ref ? ref->offset : 0,
			.len = ref ? base_max(ref->stored_len, 1) : 0});
}

static void pack_fault(struct verify *v, const char *file, const struct store_object_ref *ref, const char *what)
{
	verify_fault(v,
		(struct verify_fault){.file = (char *)file,
			.what = (char *)what,
			.pack = true,
			.offset = ref ? ref->offset : 0,
			.len = ref ? base_max(ref->stored_len, 1) : 0});
}

/* The bytes are right; what the row says about them is not. But a save would trust the row without reading them. */
static void hashes_fault(struct verify *v, const char *file, const struct store_object_ref *ref,
	const struct base_xxh128 *xxh)
{
	verify_fault(v,
		(struct verify_fault){.file = (char *)file,
			.what = (char *)"a piece's bytes match its digest but not the XXH3-128 in its row: a later "
					"save could take other data for this piece",
			.pack = true,
			.by_xxh = true,
			.xxh = *xxh,
			.offset = ref->offset,
			.len = base_max(ref->stored_len, 1)});
}

/* ---- what has been looked at ---- */

/* What is known about an object from a verified footer; NULL: no footer lists it. */
static const struct verify_seen *footer_lists(const struct verify *v, const char *file,
	const struct store_object_ref *ref)
{
	int64_t at = base_search(i, 0, v->npacks, strcmp(v->packs[i].file, file));
	uint64_t place = verify_place(NULL, ref, NULL, 0);

	if (at < 0 || !v->packs[at].nseen)
		return NULL;
	return bsearch(&place, v->packs[at].seen, v->packs[at].nseen, sizeof *v->packs[at].seen,
		verify_compare_places);
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

/* A piece counts with its XXH3-128: rows may say different ones of the same bytes. */
static uint64_t item_place(const struct verify_item *it)
{
	return verify_place(it->pack, it->ref, it->xxh, it->xxh ? sizeof *it->xxh : 0);
}

static int add_todo(struct verify *v, const struct verify_item *it)
{
	const char *pack = it->pack;
	const struct store_object_ref *ref = it->ref;
	int r = verify_set_add(&v->seen, item_place(it));

	if (r <= 0)
		return r;
	if (base_array_more(v->todo, v->ntodo) < 0)
		return -ENOMEM;
	char *name = strdup(pack);
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

/* Checks that a pack which a step names exists and has the size that the manifest says; once for each pack and size. */
static int check_pack(struct verify *v, const struct verify_item *it, const char *file)
{
	struct store_object_ref key = {.offset = it->size, .raw_len = 1};
	uint64_t size;
	char text[160];
	int r = verify_set_add(&v->seen, verify_place(it->pack, &key, NULL, 0));

	if (r <= 0)
		return r;
	r = store_size(v->store->storage, file, &size);
	if (r == -ENOTDIR)
		return r; /* its directory is not there: that says nothing of the pack */
	if (r < 0)
		pack_fault(v, file, NULL, r == -ENOENT ? "it is missing" : base_error_name(r));
	else if (size != it->size) {
		snprintf(text, sizeof text, "it has %llu bytes where a step's manifest says %llu",
			(unsigned long long)size, (unsigned long long)it->size);
		struct store_object_ref lost = {.offset = base_min(size, it->size),
			.stored_len = base_max(size, it->size) - base_min(size, it->size)};
		pack_fault(v, file, &lost, text); /* the bytes before the cut are not lost */
	}
	return 0;
}

static const char *kind_name(uint8_t kind)
{
	static const char *const names[] = {[STORE_OBJECT_PIECE] = "a piece", [STORE_OBJECT_BLOB] = "a blob",
		[STORE_OBJECT_LAYOUT] = "a layout", [STORE_OBJECT_PART] = "a part",
		[STORE_OBJECT_PART_CHUNK] = "a chunk", [STORE_OBJECT_VIEW_HEADER] = "a view header"};

	return kind < BASE_COUNT(names) && names[kind] ? names[kind] : "of an unknown kind";
}

/* Index and mending know objects by footers alone. Told once for each object; 0 or -ENOMEM. */
static int kind_differs(struct verify *v, const struct verify_item *it, const char *file, uint8_t kind)
{
	char text[120];
	int r = verify_set_add(&v->seen, verify_place(it->pack, it->ref, "kind", 4));

	if (r <= 0)
		return r;
	snprintf(text, sizeof text, "the footer says that this object is %s, and in a step it is %s", kind_name(kind),
		kind_name(it->ref->kind));
	pack_fault(v, file, it->ref, text);
	return 0;
}

static int on_item(struct verify_walker *w, const struct verify_item *it)
{
	struct walker *k = w->arg;
	char file[STORE_NAME_MAX];
	int r;

	if (store_pack_path(it->pack, file) < 0)
		return 0; /* the manifest's decoder lets no such name through */
	if (it->what == VERIFY_PACK)
		return check_pack(k->v, it, file);
	const struct verify_seen *seen = footer_lists(k->v, file, it->ref);
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

static void on_broken(struct verify_walker *w, const char *file, const char *pack, const struct store_object_ref *ref,
	const char *text)
{
	struct walker *k = w->arg;
	char path[STORE_NAME_MAX];

	if (file) {
		bool known = false;

		for (size_t i = 0; i < k->v->nfaults && !known; i++)
			known = !strcmp(k->v->faults[i].file, file) && (w->newer || !k->v->faults[i].newer);
		if (!known)
			verify_fault(k->v,
				(struct verify_fault){.file = (char *)file,
					.what = (char *)text,
					.newer = w->newer,
					.step = k->number + 1,
					.run = (char *)w->step->run});
		return;
	}
	if (store_pack_path(pack, path) == 0 && !verify_known(k->v, path, ref))
		(w->newer ? pack_newer : pack_fault)(k->v, path, ref, text);
}

/* ---- re-hashing by reference ---- */

struct job {
	struct verify *v;
	const struct verify_todo *todo;
};

/* Reads the object STEP_BLOCKS at a time; 0, or what is wrong in err. */
static int rehash(struct verify *v, const struct verify_todo *t, struct store_pack *p, struct base_xxh128 *ret_xxh,
	struct base_error *err)
{
	uint64_t blocks = base_block_count(t->ref.raw_len);
	uint64_t room = base_min(t->ref.raw_len, (uint64_t)STEP_BLOCKS * BASE_BLOCK_BYTES);
	base_cleanup_free uint8_t *bytes = malloc(base_max(room, 1));
	struct base_hasher *h = base_hasher_new();
	struct base_xxh128_state *x = base_xxh128_state_new();
	struct base_digest d;
	int r = bytes && h && x ? 0 : -ENOMEM;

	if (r == 0)
		base_xxh128_begin(x, v->store->info.seed);
	for (uint64_t at = 0; r == 0 && at < blocks; at += STEP_BLOCKS) {
		uint64_t n = base_min(STEP_BLOCKS, blocks - at);

		uint64_t len = base_min(n * BASE_BLOCK_BYTES, t->ref.raw_len - at * BASE_BLOCK_BYTES);

		r = store_object_read_blocks(p, &t->ref, at, n, bytes, err);
		if (r == 0) {
			base_hasher_update(h, bytes, len);
			base_xxh128_update(x, bytes, len);
		}
	}
	if (r == 0)
		r = base_hasher_final(h, &d);
	if (r == 0) {
		base_xxh128_final(x, ret_xxh);
		if (!base_digest_equal(&d, &t->ref.digest))
			r = base_error_set(err, -BASE_EDAMAGED, "an object does not match its digest");
	}
	base_hasher_free(h);
	base_xxh128_state_free(x);
	verify_progress(v, t->ref.stored_len);
	return r;
}

static void check_todo(void *arg, unsigned worker)
{
	struct job *j = arg;
	struct base_error err = {0};
	struct base_xxh128 xxh;
	struct store_pack *p;
	char file[STORE_NAME_MAX];

	(void)worker;
	store_pack_path(j->todo->pack, file);
	int r = store_pack_get(j->v->store, j->todo->pack, &p, &err);
	if (r == -BASE_EVERSION)
		pack_newer(j->v, file, NULL, err.text);
	else if (r < 0)
		pack_fault(j->v, file, NULL,
			r == -ENOENT ? "it is missing" : err.text[0] ? err.text : base_error_name(r));
	else {
		r = rehash(j->v, j->todo, p, &xxh, &err);
		store_pack_put(j->v->store, p);
		if (r == -ENOMEM)
			verify_error(j->v, r);
		else if (r == -BASE_EVERSION)
			pack_newer(j->v, file, &j->todo->ref, err.text);
		else if (r < 0)
			pack_fault(j->v, file, &j->todo->ref, err.text[0] ? err.text : base_error_name(r));
		else if (j->todo->piece && memcmp(&xxh, &j->todo->xxh, sizeof xxh) != 0)
			hashes_fault(j->v, file, &j->todo->ref, &j->todo->xxh);
	}
	pthread_mutex_lock(&j->v->lock);
	j->v->result.objects++;
	pthread_mutex_unlock(&j->v->lock);
	free(j);
}

static int rehash_all(struct verify *v)
{
	int r = 0;

	for (size_t i = 0; i < v->ntodo && r == 0; i++) {
		char file[STORE_NAME_MAX];
		struct job *j = malloc(sizeof *j);

		if (!j) {
			r = -ENOMEM;
			break;
		}
		*j = (struct job){v, &v->todo[i]};
		store_pack_path(v->todo[i].pack, file);
		pthread_mutex_lock(&v->lock);
		bool known = verify_known(v, file, &v->todo[i].ref);
		pthread_mutex_unlock(&v->lock);
		if (known)
			free(j);
		else
			base_pool_run(v->pool, check_todo, j);
	}
	base_pool_wait(v->pool);
	return r;
}

/* ---- the files of the steps ---- */

struct opening {
	struct verify *v;
	size_t number;
};

/* Is a fault known that may be why a file cannot be read? Then the fault is what is told. */
static bool explained(const struct opening *o, int r)
{
	const struct verify_step *s = &o->v->steps[o->number];
	char manifest[STORE_NAME_MAX];

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
	char manifest[STORE_NAME_MAX];

	pthread_mutex_lock(&o->v->lock);
	bool known = explained(o, r);
	pthread_mutex_unlock(&o->v->lock);
	if (!known && store_manifest_path(s->run, &s->step->commit.manifest, manifest) == 0)
		verify_fault(o->v, (struct verify_fault){.file = manifest, .what = (char *)text,
			.newer = r == -BASE_EVERSION, .step = o->number + 1, .run = (char *)s->run});
}

static void file_read(void *arg, uint64_t bytes) { verify_progress(((const struct opening *)arg)->v, bytes); }

static int open_all(struct verify *v)
{
	int r = 0;

	for (size_t i = 0; v->o->paranoid && i < v->nsteps; i++) { /* a .npy and a .safetensors each */
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

int verify_steps(struct verify *v, struct base_error *err)
{
	(void)err;
	for (size_t i = 0; i < v->nsteps; i++) {
		struct walker k = {v, i};
		struct verify_walker w = {.store = v->store,
			.step = &v->steps[i],
			.item = on_item,
			.broken = on_broken,
			.arg = &k,
			.cover = true,
			.paranoid = v->o->paranoid,
			.header = v->o->header};
		int r = verify_walk(&w);

		if (r < 0)
			return r;
	}
	int r = rehash_all(v);
	return r < 0 ? r : open_all(v);
}
