/* SPDX-License-Identifier: Apache-2.0
 *
 * verify_walk: everything that a step reaches, as items. An item is told before it is loaded; what cannot be loaded is
 * told as broken, and the walk goes on beside it, so that one bad chunk hides no other. */
#include "core/store/verify_internal.h"

#include <stdio.h>

#define METADATA_MAX_BYTES (UINT64_C(1) << 32)

struct walk {
	struct verify_walker *w;
	const struct proto_manifest *m;
	struct store_layout **layouts; /* by the manifest's numbers; NULL: broken */
	char manifest[STORE_NAME_MAX]; /* its file */
	/* the part under way */
	const struct store_layout *layout;
	/* by the part's numbers: names, and numbers in the manifest */
	const char **packs;
	uint32_t *numbers;
	uint32_t npacks;
};

static void broken(struct walk *k, const char *file, const char *pack, const struct store_object_ref *ref,
	const char *text)
{
	k->w->any_broken = true;
	k->w->broken(k->w, file, pack, ref, text);
}

/* Tells an object that the manifest names itself, and loads it if asked to. Returns 0, or what ends the walk;
 * *ret_bytes stays NULL when it is broken. */
static int manifest_object(struct walk *k, struct verify_item it, const struct proto_ref *pref, void **ret_bytes)
{
	struct store_object_ref ref = store_object_ref_from(pref);

	if (ref.pack >= k->m->npacks) {
		broken(k, k->manifest, NULL, NULL, "names a pack that it does not list");
		return 0;
	}
	it.ref = &ref;
	it.number = ref.pack;
	it.pack = k->m->packs[ref.pack].pack;
	int r = k->w->item(k->w, &it);
	if (r != 0 || !ret_bytes)
		return r;
	struct base_error err = {0};
	struct store_pack *p = NULL;
	r = store_pack_get(k->w->store, it.pack, &p, &err);
	if (r == 0) {
		r = store_object_load(p, &ref, METADATA_MAX_BYTES, ret_bytes, &err);
		store_pack_put(k->w->store, p);
	}
	if (r == -ENOMEM)
		return r;
	if (r < 0)
		broken(k, NULL, it.pack, &ref, err.code ? err.text : base_error_name(r));
	return 0;
}

static int walk_layouts(struct walk *k)
{
	int r = 0;

	for (uint32_t n = 0; r == 0 && n < k->m->nlayouts; n++) {
		const struct proto_manifest_layout *l = &k->m->layouts[n];
		base_cleanup_free void *bytes = NULL;
		struct base_error err = {0};

		r = manifest_object(k, (struct verify_item){.what = VERIFY_LAYOUT}, &l->ref, &bytes);
		if (r != 0 || !bytes)
			continue;
		int d = store_layout_decode(bytes, l->ref.raw_len, &k->layouts[n], &err);
		if (d == -ENOMEM)
			return d;
		if (d < 0 || !base_digest_equal(&k->layouts[n]->digest, &l->digest)) {
			store_layout_free(base_steal(k->layouts[n]));
			broken(k, k->manifest, NULL, NULL,
				d < 0 && err.code ? err.text : "names a layout that is another one");
		}
	}
	return r;
}

static int on_row(void *arg, const struct store_row *row)
{
	struct walk *k = arg;

	for (uint64_t n = 0; n < row->npieces; n++) {
		const struct store_piece *p = &row->pieces[n];

		if (p->inline_bytes) {
			struct base_digest d;

			base_digest_of(p->inline_bytes, p->ref.raw_len, &d);
			if (!base_digest_equal(&d, &p->ref.digest))
				broken(k, k->manifest, NULL, NULL,
					"a piece that stands in the part does not match its digest");
			continue;
		}
		if (p->ref.pack >= k->npacks) {
			broken(k, k->manifest, NULL, NULL, "a part names a pack that it does not list");
			continue;
		}
		struct verify_item it = {.what = VERIFY_PIECE,
			.pack = k->packs[p->ref.pack],
			.number = k->numbers[p->ref.pack],
			.ref = &p->ref,
			.layout = k->layout,
			.tensor = row->tensor};
		int r = k->w->item(k->w, &it);
		if (r != 0)
			return r;
	}
	return 0;
}

/* An object that the part names: its pack counts in the part's table. 1: the reference is no good. */
static int part_object(struct walk *k, struct verify_item it, const struct proto_ref *pref,
	struct store_object_ref *ret_ref)
{
	*ret_ref = store_object_ref_from(pref);
	if (ret_ref->pack >= k->npacks) {
		broken(k, k->manifest, NULL, NULL, "a part names a pack that it does not list");
		return 1;
	}
	it.ref = ret_ref;
	it.pack = k->packs[ret_ref->pack];
	it.number = k->numbers[ret_ref->pack];
	return k->w->item(k->w, &it);
}

static int walk_chunks(struct walk *k, const struct proto_part *part)
{
	for (uint32_t n = 0; n < part->nchunks; n++) {
		struct store_object_ref ref;
		struct base_error err = {0};
		int r = part_object(k, (struct verify_item){.what = VERIFY_CHUNK}, &part->chunks[n].ref, &ref);

		if (r == 1)
			continue;
		if (r != 0)
			return r;
		if (!k->layout)
			continue; /* without its layout a chunk says nothing */
		r = store_part_read_chunk(k->w->store, k->layout, part, k->packs, k->npacks, n, on_row, k, &err);
		if (r == -ENOMEM || (r != 0 && !err.code))
			return r;
		if (r != 0)
			broken(k, NULL, k->packs[ref.pack], &ref, err.text);
	}
	return 0;
}

static int walk_blobs(struct walk *k, const struct proto_part *part)
{
	for (uint32_t n = 0; n < part->nblobs; n++) {
		const struct proto_blob *b = &part->blobs[n];
		struct store_object_ref ref;

		if (b->len == 0)
			continue;
		if (b->len != b->ref.raw_len) {
			broken(k, k->manifest, NULL, NULL, "a blob's length is not that of its object");
			continue;
		}
		int r = part_object(k, (struct verify_item){.what = VERIFY_BLOB, .blob = b->name}, &b->ref, &ref);
		if (r != 0 && r != 1)
			return r;
	}
	return 0;
}

/* The part's pack table: names and numbers of the manifest's. */
static int part_packs(struct walk *k, const struct proto_manifest_rank *rank)
{
	k->npacks = 0;
	free(k->packs);
	free(k->numbers);
	k->packs = malloc((rank->npacks + 1) * sizeof *k->packs);
	k->numbers = malloc((rank->npacks + 1) * sizeof *k->numbers);
	if (!k->packs || !k->numbers)
		return -ENOMEM;
	for (uint32_t n = 0; n < rank->npacks; n++) {
		k->numbers[n] = k->m->map[rank->first_map + n];
		k->packs[n] = k->m->packs[k->numbers[n]].pack;
	}
	k->npacks = rank->npacks;
	return 0;
}

static int walk_rank(struct walk *k, const struct proto_manifest_rank *rank)
{
	base_cleanup_free void *bytes = NULL;
	struct proto_part part = {0};
	int r = manifest_object(k, (struct verify_item){.what = VERIFY_PART}, &rank->part, &bytes);

	if (r != 0 || !bytes)
		return r;
	if (rank->first_map > k->m->nmap || rank->npacks > k->m->nmap - rank->first_map ||
		rank->layout >= k->m->nlayouts) {
		broken(k, k->manifest, NULL, NULL, "the line of a rank points out of the manifest's tables");
		return 0;
	}
	r = part_packs(k, rank);
	if (r == 0)
		r = proto_part_decode(bytes, rank->part.raw_len, &part);
	if (r == -ENOMEM)
		return r;
	k->layout = k->layouts[rank->layout];
	bool same = r == 0 && part.rank == rank->rank && part.npacks == rank->npacks &&
		base_digest_equal(&part.layout, &k->m->layouts[rank->layout].digest);
	for (uint32_t n = 0; same && n < part.npacks; n++)
		same = strcmp(part.packs[n].pack, k->packs[n]) == 0;
	if (!same) {
		char text[200];

		snprintf(text, sizeof text, "the part of rank %u %s", rank->rank,
			r < 0 ? "breaks the rules of its format" : "does not agree with the manifest");
		broken(k, k->manifest, NULL, NULL, text);
		r = 0;
	} else {
		r = walk_chunks(k, &part);
		if (r == 0)
			r = walk_blobs(k, &part);
	}
	proto_part_release(&part);
	return r;
}

static int walk_all(struct walk *k)
{
	const struct proto_manifest *m = k->m;
	int r = 0;

	for (uint32_t n = 0; r == 0 && n < m->npacks; n++) {
		struct verify_item it = {
			.what = VERIFY_PACK, .pack = m->packs[n].pack, .number = n, .size = m->packs[n].size};

		r = k->w->item(k->w, &it);
		if (m->packs[n].live_bytes > m->packs[n].size)
			broken(k, k->manifest, NULL, NULL, "says that more bytes of a pack are live than it has");
	}
	if (r == 0)
		r = walk_layouts(k);
	for (uint32_t n = 0; r == 0 && n < m->nheaders; n++)
		r = manifest_object(k,
			(struct verify_item){.what = VERIFY_HEADER, .component = m->headers[n].component},
			&m->headers[n].ref, NULL);
	for (uint32_t n = 0; r == 0 && n < m->nranks; n++)
		r = walk_rank(k, &m->ranks[n]);
	if (r == 0 && k->w->cover && !k->w->any_broken) {
		struct base_error err = {0};

		r = store_manifest_check_cover(k->w->store, m, NULL, &err);
		if (r < 0 && r != -ENOMEM) {
			broken(k, k->manifest, NULL, NULL, err.code ? err.text : base_error_name(r));
			r = 0;
		}
	}
	return r;
}

int verify_walk(struct verify_walker *w)
{
	struct proto_manifest m = {0};
	struct walk k = {.w = w, .m = &m};
	struct base_error err = {0};
	const struct proto_commit *commit = &w->step->step->commit;

	w->any_broken = false;
	int r = store_manifest_path(w->step->run, &commit->manifest, k.manifest);
	if (r < 0)
		return r;
	r = store_manifest_get(w->store, w->step->run, &commit->manifest, &m, &err);
	if (r == -ENOMEM)
		return r;
	if (r < 0) {
		broken(&k, k.manifest, NULL, NULL,
			r == -ENOENT ? "is missing" : err.code ? err.text : base_error_name(r));
		return 0;
	}
	k.layouts = calloc(m.nlayouts + 1, sizeof *k.layouts);
	r = k.layouts ? 0 : -ENOMEM;
	if (r == 0 &&
		(m.step != commit->step || strcmp(m.run, w->step->run) != 0 || strcmp(m.attempt, commit->attempt) != 0))
		broken(&k, k.manifest, NULL, NULL, "is not of the step that names it");
	if (r == 0)
		r = walk_all(&k);
	for (uint32_t n = 0; k.layouts && n < m.nlayouts; n++)
		store_layout_free(k.layouts[n]);
	free(k.layouts);
	free(k.packs);
	free(k.numbers);
	proto_manifest_release(&m);
	return r;
}
