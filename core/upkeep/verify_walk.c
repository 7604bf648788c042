/* SPDX-License-Identifier: Apache-2.0
 *
 * verify_walk: everything that a step reaches, as items. An item is reported before it is loaded; one that cannot be
 * loaded is reported as broken, and the walk goes on without it, so that one bad chunk hides no other. */
#include "core/upkeep/verify_internal.h"

#include <stdio.h>

struct walk {
	struct verify_walker *w;
	const struct proto_manifest *m;
	struct store_layout **layouts; /* by the manifest's numbers; NULL: broken */
	char manifest[STORAGE_NAME_MAX]; /* its file */
	struct verify_says *says;      /* NULL: not asked for */
	struct verify_shards **shards; /* by the manifest's layouts, made when needed */
	/* the part under way */
	const struct store_layout *layout;
	uint32_t rank, layout_number;
	bool misplaced;                /* a row outside its rank's shard was reported */
	/* by the part's numbers: the pack's name, and its number in the manifest */
	const char **packs;
	uint32_t *numbers;
	uint32_t npacks;
};

static void report(struct walk *k, int r, const char *file, const char *pack, const struct pack_object_ref *ref,
	const char *text)
{
	if (k->w->broken)
		k->w->broken(k->w, file, pack, ref, r == -BASE_EVERSION, text);
}

static void leave_out(struct walk *k)
{
	k->w->any_broken = true;
	if (k->says)
		verify_says_leave_out(k->says);
}

/* An object cannot be used. r: why. */
static void object_broken(struct walk *k, int r, const char *pack, const struct pack_object_ref *ref, const char *text)
{
	leave_out(k);
	report(k, r, NULL, pack, ref, text);
}

/* The manifest, or a record that it names, cannot be used. r: why, or 0. */
static void broken(struct walk *k, int r, const char *text)
{
	leave_out(k);
	report(k, r, k->manifest, NULL, NULL, text);
}

/* Two records, both of which can be read, do not agree. */
static void disagrees(struct walk *k, const char *file, const char *text)
{
	report(k, 0, file, NULL, NULL, text);
}

/* Unknown fields of a layout or a part that can be decoded. */
static void report_unknown(struct walk *k, enum proto_body kind, const void *bytes, size_t len)
{
	char text[VERIFY_SAYS_MAX], all[VERIFY_SAYS_MAX + 40];

	if (!k->says || !k->w->paranoid || !verify_unknown(kind, bytes, len, text))
		return;
	snprintf(all, sizeof all, "%s of the step: %s", kind == PROTO_BODY_LAYOUT ? "a layout" : "a part", text);
	report(k, -BASE_EVERSION, k->manifest, NULL, NULL, all);
}

/* Reports an object that the manifest itself names, and loads it if ret_bytes is not NULL. Returns 0, or what ends the
 * walk; *ret_bytes stays NULL if the object is broken. */
static int manifest_object(struct walk *k, struct verify_item it, const struct proto_ref *pref, void **ret_bytes)
{
	struct pack_object_ref ref = pack_object_ref_from(pref);
	struct base_error err = {0};
	int r;

	if (ref.pack >= k->m->npacks) {
		broken(k, 0, "names a pack that it does not list");
		return 0;
	}
	it.ref = &ref;
	it.number = ref.pack;
	it.pack = k->m->packs[ref.pack].pack;
	r = k->w->item(k->w, &it);
	if (r != 0 || !ret_bytes)
		return r;
	r = store_object_load(k->w->store, it.pack, &ref, STORE_METADATA_MAX_BYTES, ret_bytes, &err);
	if (r == -ENOMEM)
		return r;
	if (r < 0)
		object_broken(k, r, it.pack, &ref, err.code ? err.text : base_error_name(r));
	return 0;
}

static int walk_layouts(struct walk *k)
{
	int r = 0;

	for (uint32_t n = 0; r == 0 && n < k->m->nlayouts; n++) {
		const struct proto_manifest_layout *l = &k->m->layouts[n];
		base_cleanup_free void *bytes = NULL;
		struct base_error err = {0};
		int d;

		r = manifest_object(k, (struct verify_item){.what = VERIFY_LAYOUT}, &l->ref, &bytes);
		if (r != 0 || !bytes)
			continue;
		d = store_layout_decode(bytes, l->ref.raw_len, &k->layouts[n], &err);
		if (d == -ENOMEM)
			return d;
		if (d < 0 || !base_digest_equal(&k->layouts[n]->digest, &l->digest)) {
			store_layout_free(base_steal(k->layouts[n]));
			broken(k, d, d < 0 && err.code ? err.text : "names a layout whose bytes have another digest");
		} else {
			report_unknown(k, PROTO_BODY_LAYOUT, bytes, l->ref.raw_len);
		}
	}
	return r;
}

/* Of each step one row that is not where the layout says is reported. */
static int check_shard(struct walk *k, const struct store_row *row)
{
	struct verify_shards **shards = &k->shards[k->layout_number];
	char text[VERIFY_SAYS_MAX];
	int r;

	if (!*shards)
		*shards = verify_shards_new(k->layout);
	if (!*shards)
		return -ENOMEM;
	r = verify_shards_row(*shards, k->rank, row, text);
	if (r > 0 && !k->misplaced)
		disagrees(k, k->manifest, text);
	k->misplaced = k->misplaced || r > 0;
	return r < 0 ? r : 0;
}

static int on_row(void *arg, const struct store_row *row)
{
	struct walk *k = arg;
	int r = k->says ? check_shard(k, row) : 0;

	for (uint64_t n = 0; r == 0 && n < row->npieces; n++) {
		const struct store_piece *p = &row->pieces[n];
		struct verify_item it = {.what = VERIFY_PIECE, .ref = &p->ref, .xxh = &p->xxh, .layout = k->layout,
			.tensor = row->tensor};

		if (k->says)
			verify_says_bytes(k->says, p->ref.raw_len);
		if (p->inline_bytes) {
			struct base_digest d;
			struct base_xxh128 x;

			base_digest_of(p->inline_bytes, p->ref.raw_len, &d);
			base_xxh128_of(k->w->store->info.seed, p->inline_bytes, p->ref.raw_len, &x);
			if (!base_digest_equal(&d, &p->ref.digest))
				broken(k, 0, "a piece that is in the part itself does not match its digest");
			else if (memcmp(&x, &p->xxh, sizeof x) != 0)
				broken(k, 0, "a piece that is in the part itself does not match its XXH3-128");
			continue;
		}
		if (p->ref.pack >= k->npacks) {
			broken(k, 0, "a part names a pack that it does not list");
			continue;
		}
		it.pack = k->packs[p->ref.pack];
		it.number = k->numbers[p->ref.pack];
		r = k->w->item(k->w, &it);
		if (r == 0 && k->says)
			r = verify_says_object(k->says, it.number, it.ref);
	}
	return r == 0 && k->w->records ? k->w->records->row(k->w->records->arg, k->layout, row) : r;
}

/* An object that the part names, whose pack is a number in the part's table. 1: the reference is bad. */
static int part_object(struct walk *k, struct verify_item it, const struct proto_ref *pref,
	struct pack_object_ref *ret_ref)
{
	int r;

	*ret_ref = pack_object_ref_from(pref);
	if (ret_ref->pack >= k->npacks) {
		broken(k, 0, "a part names a pack that it does not list");
		return 1;
	}
	it.ref = ret_ref;
	it.pack = k->packs[ret_ref->pack];
	it.number = k->numbers[ret_ref->pack];
	r = k->w->item(k->w, &it);
	return r == 0 && k->says ? verify_says_object(k->says, it.number, ret_ref) : r;
}

static int walk_chunks(struct walk *k, const struct proto_part *part)
{
	for (uint32_t n = 0; n < part->nchunks; n++) {
		struct pack_object_ref ref;
		struct base_error err = {0};
		int r = part_object(k, (struct verify_item){.what = VERIFY_CHUNK}, &part->chunks[n].ref, &ref);

		if (r == 1)
			continue;
		if (r != 0)
			return r;
		if (!k->layout)
			continue; /* without its layout a chunk cannot be read */
		r = store_part_read_chunk(k->w->store, k->layout, part, k->packs, k->npacks, n, on_row, k, &err);
		if (r == -ENOMEM || (r != 0 && !err.code))
			return r;
		if (r != 0)
			object_broken(k, r, k->packs[ref.pack], &ref, err.text);
	}
	return 0;
}

static int walk_blobs(struct walk *k, const struct proto_part *part)
{
	for (uint32_t n = 0; n < part->nblobs; n++) {
		const struct proto_blob *b = &part->blobs[n];
		struct pack_object_ref ref;
		int r;

		if (k->says)
			verify_says_bytes(k->says, b->len);
		if (b->len == 0)
			continue;
		if (b->len != b->ref.raw_len) {
			broken(k, 0, "a blob's length is not that of its object");
			continue;
		}
		r = part_object(k, (struct verify_item){.what = VERIFY_BLOB, .blob = b->name}, &b->ref, &ref);
		if (r != 0 && r != 1)
			return r;
	}
	return 0;
}

/* Fills packs and numbers for the part of this rank. */
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

/* Samples give tensors by their numbers in the layout. */
static void check_samples(struct walk *k, const struct proto_part *part)
{
	char text[200];

	for (uint32_t n = 0; k->layout && n < part->nsamples; n++) {
		if (part->samples[n].tensor < k->layout->m.ntensors)
			continue;
		snprintf(text, sizeof text, "the part of rank %u has a sample of tensor %u, and its layout has %u",
			part->rank, part->samples[n].tensor, k->layout->m.ntensors);
		disagrees(k, k->manifest, text);
		return;
	}
}

static int walk_part(struct walk *k, const struct proto_manifest_rank *rank, const struct proto_part *part)
{
	struct pack_object_ref self = pack_object_ref_from(&rank->part);
	int r = 0;

	if (k->says) {
		verify_says_rank(k->says);
		r = verify_says_object(k->says, self.pack, &self);
	}
	if (r == 0)
		r = walk_chunks(k, part);
	if (r == 0)
		r = walk_blobs(k, part);
	if (r == 0 && k->says) {
		r = verify_says_part(k->says, rank, part);
		check_samples(k, part);
	}
	if (r == 0 && k->w->records)
		r = ((struct base_error *)k->w->arg)->code ? -ECANCELED
			: k->w->records->rank(k->w->records->arg, rank->rank, k->layout, part, k->packs);
	return r;
}

static int walk_rank(struct walk *k, const struct proto_manifest_rank *rank)
{
	base_cleanup_free void *bytes = NULL;
	struct proto_part part = {0};
	struct base_error err = {0};
	bool same;
	int r = manifest_object(k, (struct verify_item){.what = VERIFY_PART}, &rank->part, &bytes);

	if (r != 0 || !bytes)
		return r;
	if (rank->first_map > k->m->nmap || rank->npacks > k->m->nmap - rank->first_map ||
		rank->layout >= k->m->nlayouts) {
		broken(k, 0, "the line of a rank points out of the manifest's tables");
		return 0;
	}
	r = part_packs(k, rank);
	if (r == 0)
		r = store_part_decode(bytes, rank->part.raw_len, &part, &err);
	if (r == -ENOMEM)
		return r;
	k->layout = k->layouts[rank->layout];
	k->layout_number = rank->layout;
	k->rank = rank->rank;
	same = r == 0 && part.rank == rank->rank && part.npacks == rank->npacks &&
		base_digest_equal(&part.layout, &k->m->layouts[rank->layout].digest);
	for (uint32_t n = 0; same && n < part.npacks; n++)
		same = strcmp(part.packs[n].pack, k->packs[n]) == 0;
	if (!same) {
		char text[sizeof err.text];

		snprintf(text, sizeof text, "the part of rank %u %s", rank->rank,
			r < 0 ? "breaks the rules of its format" : "does not agree with the manifest");
		if (r == -BASE_EVERSION)
			snprintf(text, sizeof text, "rank %u: %.900s", rank->rank, err.text);
		broken(k, r, text);
		r = 0;
	} else {
		report_unknown(k, PROTO_BODY_PART, bytes, rank->part.raw_len);
		r = walk_part(k, rank, &part);
	}
	proto_part_release(&part);
	return r;
}

static int walk_packs(struct walk *k)
{
	const struct proto_manifest *m = k->m;
	int r = 0;

	for (uint32_t n = 0; r == 0 && n < m->npacks; n++) {
		struct verify_item it = {
			.what = VERIFY_PACK, .pack = m->packs[n].pack, .number = n, .size = m->packs[n].size};

		r = k->w->item(k->w, &it);
	}
	return r;
}

static int walk_header(struct walk *k, const struct proto_view_header *h)
{
	const struct store_layout *l = h->layout < k->m->nlayouts ? k->layouts[h->layout] : NULL;
	bool look = k->w->cover && k->w->header && l;
	base_cleanup_free void *bytes = NULL;
	struct base_error err = {0};
	int r = manifest_object(k, (struct verify_item){.what = VERIFY_HEADER, .component = h->component}, &h->ref,
		look ? &bytes : NULL);

	if (r != 0 || !bytes)
		return r;
	r = k->w->header(l, h->component, h->view, bytes, h->ref.raw_len, h->data_bytes, &err);
	if (r == -ENOMEM)
		return r;
	if (r < 0)
		disagrees(k, k->manifest, err.code ? err.text : base_error_name(r));
	return 0;
}

/* After everything was walked. */
static int walk_says(struct walk *k)
{
	char text[VERIFY_SAYS_MAX], entry[STORAGE_NAME_MAX];
	struct base_error err = {0};
	uint64_t tensors;
	int r = 0;

	if (!k->w->any_broken && !verify_says_wrong(k->says)) {
		r = k->w->records ? 0 : check_manifest_cover(k->w->store, k->m, &tensors, &err);
		if (r == -ENOMEM)
			return r;
		if (r < 0)
			broken(k, r, err.code ? err.text : base_error_name(r));
		else if (!k->w->records)
			verify_says_tensors(k->says, tensors);
		if (verify_says_blobs(k->says) < 0)
			return -ENOMEM;
	}
	verify_says_packs(k->says);
	if (verify_says_wrong(k->says))
		disagrees(k, k->manifest, verify_says_wrong(k->says));
	commit_list_entry_name(k->w->step->run, k->w->step->step->entry, entry);
	if (!verify_says_entry(k->w->step, k->m, text))
		disagrees(k, entry, text);
	return 0;
}

static int walk_all(struct walk *k)
{
	const struct proto_manifest *m = k->m;
	int r = walk_packs(k);

	if (r == 0)
		r = walk_layouts(k);
	for (uint32_t n = 0; r == 0 && n < m->nheaders; n++)
		r = walk_header(k, &m->headers[n]);
	for (uint32_t n = 0; r == 0 && n < m->nranks; n++)
		r = walk_rank(k, &m->ranks[n]);
	return r == 0 && k->says ? walk_says(k) : r;
}

int verify_walk(struct verify_walker *w)
{
	struct proto_manifest m = {0};
	struct walk k = {.w = w, .m = &m};
	struct base_error err = {0};
	const struct proto_commit *commit = &w->step->step->commit;
	int r = store_manifest_path(w->step->run, &commit->manifest, k.manifest);

	w->any_broken = false;
	if (r < 0)
		return r;
	r = store_manifest_get(w->store, w->step->run, &commit->manifest, &m, &err);
	if (r == -ENOMEM)
		return r;
	if (r < 0) {
		broken(&k, r, r == -ENOENT ? "is missing" : err.code ? err.text : base_error_name(r));
		return 0;
	}
	k.layouts = calloc(m.nlayouts + 1, sizeof *k.layouts);
	k.shards = calloc(m.nlayouts + 1, sizeof *k.shards);
	k.says = w->cover ? verify_says_new(&m) : NULL;
	r = k.layouts && k.shards && (k.says || !w->cover) ? 0 : -ENOMEM;
	if (r == 0 &&
		(m.step != commit->step || strcmp(m.run, w->step->run) != 0 || strcmp(m.attempt, commit->attempt) != 0))
		broken(&k, 0, "has another run, step or attempt than the commit entry that names it");
	if (r == 0)
		r = walk_all(&k);
	for (uint32_t n = 0; k.shards && n < m.nlayouts; n++)
		verify_shards_free(k.shards[n]);
	for (uint32_t n = 0; k.layouts && n < m.nlayouts; n++)
		store_layout_free(k.layouts[n]);
	free(k.shards);
	verify_says_free(k.says);
	free(k.layouts);
	free(k.packs);
	free(k.numbers);
	proto_manifest_release(&m);
	return r;
}

/* ---- for a reader of the records ---- */

static int records_item(struct verify_walker *w, const struct verify_item *it)
{
	(void)w;
	(void)it;
	return 0;
}

static void records_broken(struct verify_walker *w, const char *file, const char *pack,
	const struct pack_object_ref *ref, bool newer, const char *text)
{
	struct base_error *err = w->arg;

	(void)ref;
	if (!err->code)
		base_error_set(err, newer ? -BASE_EVERSION : -BASE_EDAMAGED, "%s%s: %s", file ? "" : "pack ",
			file ? file : pack, text);
}

int upkeep_records_walk(struct store *s, const char *run, const struct commit_list_step *step,
	const struct upkeep_records *calls, struct base_error *err)
{
	const struct verify_step of = {.run = run, .step = step};
	struct base_error why = {0};
	struct verify_walker w = {.store = s, .step = &of, .item = records_item, .broken = records_broken,
		.arg = &why, .cover = true, .header = calls->header, .records = calls};
	int r = verify_walk(&w);

	if (why.code)
		return base_error_set(err, why.code, "%s", why.text);
	return r == -ENOMEM ? base_no_memory(err) : r;
}
