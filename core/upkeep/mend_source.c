/* SPDX-License-Identifier: Apache-2.0
 *
 * mend_source: other places of bad objects, found by the footers of all packs of this store and of the other one. A
 * place counts if its bytes were read whole and have the digest. A raw object whose bytes are right, and only its
 * checks are damaged, is its own source. */
#include "core/upkeep/mend_pack.h"

#include <stdio.h>

#include "core/base/bisect.h"
#include "core/upkeep/verify_internal.h"

struct sources {
	struct mend *m;
	struct mend_object **wanted; size_t n; /* by digest; those that are found have `from` */
	size_t missing;
};

/* Are the object's bytes right, and its checks (if `checked`)? 1; 0; -ENOMEM. */
static int object_right(struct pack *p, const struct pack_object_ref *ref, bool checked)
{
	base_cleanup_free void *room = malloc(VERIFY_HASH_BYTES);
	struct base_digest d;
	int r = room ? verify_object_hash(p, ref, checked, 0, room, &d, NULL, NULL) : -ENOMEM;

	return r == 0 ? base_digest_equal(&d, &ref->digest) : r == -ENOMEM ? r : 0;
}

int mend_object_good(struct pack *p, const struct pack_object_ref *ref) { return object_right(p, ref, true); }

static int object_order(const void *a, const void *b)
{
	const struct mend_object *x = *(struct mend_object *const *)a, *y = *(struct mend_object *const *)b;

	return base_digest_compare(&x->ref.digest, &y->ref.digest);
}

/* The first of them with that digest. */
static size_t wanted_first(const struct sources *k, const struct base_digest *d)
{
	return base_bisect(i, 0, k->n, base_digest_compare(&k->wanted[i]->ref.digest, d) < 0);
}

/* Is it certain that the object from there fits its place here? If it has to be encoded again, its length may
 * differ. */
static bool fits(const struct mend_object *o, const struct pack_object_ref *there)
{
	return o->ref.codec == PACK_CODEC_RAW
		|| (there->codec == o->ref.codec && there->stored_len == o->ref.stored_len);
}

static int source_try(struct sources *k, struct store *s, struct pack *p, const struct pack_object_ref *there)
{
	int good = -1;

	for (size_t i = wanted_first(k, &there->digest);
		i < k->n && base_digest_equal(&k->wanted[i]->ref.digest, &there->digest); i++) {
		struct mend_object *o = k->wanted[i];

		if (there->raw_len != o->ref.raw_len || (o->from && (fits(o, &o->there) || !fits(o, there))))
			continue;
		if (good < 0)
			good = mend_object_good(p, there);
		if (good <= 0)
			return good;
		o->from = s;
		o->there = *there;
		snprintf(o->pack, sizeof o->pack, "%s", pack_name(p));
		k->missing -= fits(o, there);
	}
	return 0;
}

static int sources_pack(struct sources *k, struct store *s, const char *name)
{
	struct pack_footer footer = {0};
	struct pack *p;
	int r = 0;

	if (pack_open(s->storage, s->info.id, name, 0, &p, NULL) < 0)
		return 0;
	if (pack_footer_read(p, &footer, NULL) == 0)
		for (uint64_t i = 0; r == 0 && i < footer.count; i++)
			r = source_try(k, s, p, &footer.objects[i]);
	pack_footer_free(&footer);
	pack_close(p);
	return r;
}

static int sources_store(struct sources *k, struct store *s)
{
	struct commit_files files = {0};
	int r = commit_files_list(s, "packs", &files, k->m->err);

	for (size_t i = 0; r == 0 && k->missing && i < files.n; i++) {
		struct file_name n;

		if (!files.all[i].foreign && file_name_parse(files.all[i].name, &n) == FILE_PACK)
			r = sources_pack(k, s, n.pack);
	}
	commit_files_release(&files);
	return r;
}

/* Raw objects whose bytes are right, and only their checks are not. */
static int sources_own(struct sources *k, struct mend_pack *p)
{
	struct pack *file;
	int r = 0;

	if (mend_pack_open(k->m->store, p->name, p->path, p->size, &file) < 0)
		return 0;
	for (size_t i = 0; r >= 0 && i < p->n; i++) {
		struct mend_object *o = &p->objects[i];

		r = o->bad && o->ref.codec == PACK_CODEC_RAW ? object_right(file, &o->ref, false) : 0;
		if (r == 1) {
			o->from = k->m->store;
			o->pack[0] = 0;
			k->missing--;
		}
	}
	pack_close(file);
	return r < 0 ? r : 0;
}

int mend_sources_find(struct mend *m, struct mend_pack *const *packs, size_t n)
{
	struct sources k = {.m = m};
	size_t room = 0;
	int r = 0;

	for (size_t i = 0; i < n; i++)
		room += packs[i]->n;
	k.wanted = calloc(room + 1, sizeof(struct mend_object *));
	if (!k.wanted)
		return -ENOMEM;
	for (size_t i = 0; i < n; i++)
		for (size_t j = 0; j < packs[i]->n; j++)
			if (packs[i]->objects[j].bad)
				k.wanted[k.n++] = &packs[i]->objects[j];
	k.missing = k.n;
	if (k.n)
		qsort(k.wanted, k.n, sizeof *k.wanted, object_order);
	for (size_t i = 0; r == 0 && k.missing && i < n; i++)
		r = sources_own(&k, packs[i]);
	if (r == 0 && k.missing)
		r = sources_store(&k, m->store);
	if (r == 0 && k.missing && m->from)
		r = sources_store(&k, m->from);
	free(k.wanted);
	return r;
}
