/* SPDX-License-Identifier: Apache-2.0
 *
 * made_step: from a description to the files of a store (made_step.h). Order: layouts, then for each rank the pack of
 * its pieces and blobs, its chunks, its part, the pack of these; the manifest, the list's entry, and at last damage. */
#include "tests/fuzz/made_step.h"

#include <stdio.h>

#include "core/commit/list/list.h"
#include "core/step/chunk_internal.h"
#include "core/step/manifest.h"
#include "core/view/safetensors.h"

MADE_NOT_COVERED

#define ATTEMPT "0123456789abcdef-0"
#define LIES_KEEP 0x80u                 /* digests of rows stay as they are */
#define META 1u                         /* number of the meta pack in a part's table */

/* ---- the description ---- */

uint8_t made_byte(const struct made_record *record, size_t i)
{
	return i < record->len ? record->at[i] : 0;
}

uint32_t made_u16(const struct made_record *record, size_t i)
{
	return made_byte(record, i) | (uint32_t)made_byte(record, i + 1) << 8;
}

static uint32_t made_u24(const struct made_record *record, size_t i)
{
	return made_u16(record, i) | (uint32_t)made_byte(record, i + 2) << 16;
}

static void records_read(struct made *made, const uint8_t *data, size_t size)
{
	while (size >= 2 && made->nrecords < MADE_RECORDS) {
		size_t len = base_min(data[1], size - 2);

		made->records[made->nrecords++] = (struct made_record){data[0] % 7, (uint8_t)len, data + 2};
		data += 2 + len;
		size -= 2 + len;
	}
}

static void head_take(struct made *made, const struct made_record *record)
{
	unsigned shift = made_byte(record, 9) % 12;
	uint64_t target = base_min(base_max(made_u16(record, 5), 2) << shift, 4 << 20);
	uint64_t min = (uint64_t)made_u16(record, 3) << shift, row = (uint64_t)made_u16(record, 7) << shift;

	made->nranks = 1 + made_byte(record, 0) % MADE_RANKS;
	for (uint32_t i = 0; i < made->nranks; i++)
		made->layout_of[i] = made_byte(record, 1) >> i & 1;
	made->flags = made_byte(record, 2);
	made->params = (struct tensor_grid_params){.target_bytes = target,
		.min_bytes = base_max(base_min(min, target), 1), .row_bytes = base_max(base_min(row, target / 2), 1)};
	if (made_byte(record, 10)) /* the newer rule */
		made->params.small_bytes = base_max(made->params.min_bytes >> made_byte(record, 10) % 8, 1);
}

/* Bytes that tell where they belong, and are about as hard to encode as the content says. */
static uint8_t *content_make(uint64_t len, unsigned item, uint32_t salt, unsigned content)
{
	uint8_t *bytes = malloc(len + 1);

	must(bytes != NULL);
	for (uint64_t i = 0; i < len; i++) {
		uint64_t x = (i / item + 1) * UINT64_C(0x9e3779b97f4a7c15) + salt * UINT64_C(0xbf58476d1ce4e5b9);

		x = (x ^ x >> 29) * UINT64_C(0x94d049bb133111eb);
		bytes[i] = (uint8_t)(content == 0 ? x >> (8 * (i % item % 7) + 8) : content == 1 ? i / 40 + salt
			: content == 2 && i % item == 0 ? i / item * 7 + salt : 0);
	}
	return bytes;
}

/* The sizes, as far as the tensor stays short. */
static void tensor_shape(struct made *made, struct made_tensor *t, const struct made_record *record)
{
	uint64_t most = base_min(MADE_BYTES, made->room) / tensor_dtype_bytes(t->dtype), items;

	t->shape.ndim = made_byte(record, 4) % 6;
	for (uint32_t d = 0; d < t->shape.ndim; d++) {
		t->shape.dim[d] = base_min(made_u16(record, 8 + 2 * d), most);
		most /= base_max(t->shape.dim[d], 1);
	}
	must(tensor_shape_items(&t->shape, tensor_dtype_bytes(t->dtype), &items) == 0);
	t->len = items * tensor_dtype_bytes(t->dtype);
	made->room -= t->len;
}

static void tensor_take(struct made *made, const struct made_record *record)
{
	struct made_tensor *t = &made->tensors[made->ntensors];

	if (made->ntensors == MADE_TENSORS)
		return;
	*t = (struct made_tensor){.layouts = made_byte(record, 0) & 3, .how = made_byte(record, 5) % MADE_HOWS,
		.arg = made_byte(record, 6), .content = made_byte(record, 7) & 7,
		.dtype = 1 + made_byte(record, 3) % (TENSOR_DTYPE_END - 1)};
	snprintf(t->component, sizeof t->component, "c%u", made_byte(record, 1) & 3);
	snprintf(t->name, sizeof t->name, "t%u", made_byte(record, 2));
	if (made_tensor_find(made, t->component, t->name, strlen(t->name)))
		return;
	tensor_shape(made, t, record);
	t->bytes = content_make(t->len, tensor_dtype_bytes(t->dtype), made_u16(record, 1), t->content & 3);
	made->ntensors++;
}

static void blob_take(struct made *made, const struct made_record *record)
{
	struct made_blob *b = &made->blobs[made->nblobs];

	if (made->nblobs == MADE_BLOBS)
		return;
	*b = (struct made_blob){.rank = made_byte(record, 0) % made->nranks, .per_rank = made_byte(record, 1) & 1,
		.len = made_u16(record, 3)};
	snprintf(b->name, sizeof b->name, "b%s%u", made_byte(record, 2) & 1 ? "/" : "", made_byte(record, 2));
	for (uint32_t i = 0; i < made->nblobs; i++) /* global ones: of the first rank */
		if (strcmp(made->blobs[i].name, b->name) == 0
			&& (made->blobs[i].rank == b->rank || !made->blobs[i].per_rank || !b->per_rank))
			return;
	b->bytes = content_make(b->len, 1, made_byte(record, 2), made_byte(record, 5) & 3);
	made->nblobs++;
}

static void description_take(struct made *made)
{
	static const struct made_record none;

	head_take(made, &none);
	made->params = (struct tensor_grid_params){128 << 10, 1 << 20, 512};
	for (size_t i = 0; i < made->nrecords; i++)
		if (made->records[i].kind == 0)
			head_take(made, &made->records[i]);
	made->room = made->flags & MADE_MANY ? MADE_MANY_BYTES : MADE_ALL_BYTES;
	for (size_t i = 0; i < made->nrecords; i++) {
		if (made->records[i].kind == 1)
			tensor_take(made, &made->records[i]);
		if (made->records[i].kind == 3)
			blob_take(made, &made->records[i]);
	}
}

const struct made_tensor *made_tensor_find(const struct made *made, const char *component, const char *name,
	size_t name_len)
{
	for (uint32_t i = 0; i < made->ntensors; i++) {
		const struct made_tensor *t = &made->tensors[i];

		if (strcmp(t->component, component) == 0 && strlen(t->name) == name_len
			&& memcmp(t->name, name, name_len) == 0)
			return t;
	}
	return NULL;
}

const struct made_blob *made_blob_find(const struct made *made, const char *name, bool per_rank, uint32_t rank)
{
	for (uint32_t i = 0; i < made->nblobs; i++)
		if (strcmp(made->blobs[i].name, name) == 0 && made->blobs[i].per_rank == per_rank
			&& (!per_rank || made->blobs[i].rank == rank))
			return &made->blobs[i];
	return NULL;
}

uint32_t made_ranks(const struct made *made, uint32_t layout, uint32_t ranks[static MADE_RANKS])
{
	uint32_t n = 0;

	for (uint32_t i = 0; i < made->nranks; i++)
		if (made->layout_of[i] == layout)
			ranks[n++] = i;
	return n;
}

/* ---- lies ---- */

static void lie_put(const struct made_record *record, struct base_buf *b)
{
	size_t at = made_u24(record, 2) % (b->len + 1), gone = base_min(made_byte(record, 5), b->len - at);
	size_t come = record->len > 6 ? record->len - 6u : 0;
	struct base_buf after = BASE_BUF_INIT;

	base_buf_append(&after, b->data, at);
	base_buf_append(&after, record->at + 6, come);
	base_buf_append(&after, b->data + at + gone, b->len - at - gone);
	must(after.error == 0);
	base_buf_release(b);
	*b = after;
}

bool made_lie(const struct made *made, enum made_structure what, unsigned number, struct base_buf *b)
{
	bool any = false;

	for (size_t i = 0; i < made->nrecords; i++) {
		const struct made_record *record = &made->records[i];

		if (record->kind != 5 || (made_byte(record, 0) & 0x7f) % MADE_LIES != what
			|| made_byte(record, 1) % 16 != number)
			continue;
		if (b->len) /* or memory of no bytes would be moved */
			lie_put(record, b);
		any = true;
	}
	return any;
}

static bool lies_any(const struct made *made, unsigned kind)
{
	for (size_t i = 0; i < made->nrecords; i++)
		if (made->records[i].kind == kind)
			return true;
	return false;
}

static bool lies_keep(const struct made *made)
{
	for (size_t i = 0; i < made->nrecords; i++)
		if (made->records[i].kind == 5 && made_byte(&made->records[i], 0) & LIES_KEEP)
			return true;
	return false;
}

/* ---- layouts ---- */

/* The words of a placement for a dimension that the tensor has; some are wrong for some sizes. */
static void placement_word(const struct made_tensor *t, uint32_t ranks, char text[static 64])
{
	static const char *const units[MADE_RANKS] = {"1", "1,0", "2,1,0", "1,0,2,1"};
	unsigned dim = t->shape.ndim ? t->arg % t->shape.ndim : 0, kind = t->arg >> 2 & 3;

	if (t->shape.ndim == 0)
		snprintf(text, 64, "R");
	else if (kind == 0)
		snprintf(text, 64, "S(%u)", dim);
	else if (kind == 1)
		snprintf(text, 64, "SS(%u,2)", dim);
	else if (kind == 2)
		snprintf(text, 64, "IS(%u,2)", dim);
	else
		snprintf(text, 64, "RS(0;%s)", units[ranks - 1]);
}

/* Bit 4 of the argument: two mesh dimensions of which the first one replicates, or (bit 5) shards dimension 0. */
static void tensor_mesh_make(struct made *made, struct made_tensor *t, uint32_t layout)
{
	uint32_t ranks[MADE_RANKS], n = made_ranks(made, layout, ranks);
	bool two = t->arg & 16 && n % 2 == 0;
	char mesh[32], word[64], words[96];
	struct tensor_sharding s = {.shape = t->shape, .item_bytes = tensor_dtype_bytes(t->dtype)};

	snprintf(mesh, sizeof mesh, two ? "a=2,b=%u" : "a=%u", two ? n / 2 : n);
	placement_word(t, two ? n / 2 : n, word);
	snprintf(words, sizeof words, "%s%s", two ? t->arg & 32 && t->shape.ndim ? "S(0)," : "R," : "", word);
	if (tensor_mesh_parse(mesh, ranks, n, &t->mesh[layout], NULL) < 0)
		return;
	if (tensor_placements_parse(words, &t->placements[layout], NULL) == 0) {
		s.mesh = t->mesh[layout];
		s.placement = t->placements[layout]->at;
		if (tensor_sharding_check(&s, t->placements[layout]->n, NULL) == 0)
			return;
	}
	tensor_mesh_free(base_steal(t->mesh[layout]));
}

static void layout_add(struct made *made, struct store_layout_builder *b, uint32_t number, uint32_t layout)
{
	struct made_tensor *t = &made->tensors[number];
	struct store_layout_held held = {0};

	if (t->how == MADE_MESH)
		tensor_mesh_make(made, t, layout);
	if (t->mesh[layout])
		held = (struct store_layout_held){.mesh = t->mesh[layout], .placements = t->placements[layout]->at,
			.nplacements = t->placements[layout]->n};
	must(store_layout_builder_add_held(b, t->component, t->name, strlen(t->name), t->dtype, &t->shape, number,
		&held, NULL) == 0);
}

/* A tensor of no layout is put into the first that a rank has. */
static void layout_make(struct made *made, uint32_t layout)
{
	struct store_layout_builder *b = store_layout_builder_new(made->params);
	struct base_buf *object = &made->objects[layout];

	must(b != NULL);
	for (uint32_t i = 0; i < made->ntensors; i++) {
		if (!made->tensors[i].layouts)
			made->tensors[i].layouts = (uint8_t)(1u << layout);
		if (made->tensors[i].layouts >> layout & 1)
			layout_add(made, b, i, layout);
	}
	must(store_layout_builder_finish(b, &made->layouts[layout], object, &made->tags[layout], NULL) == 0);
	store_layout_builder_free(b);
	made_lie(made, MADE_LIE_LAYOUT, layout, object);
	base_digest_of(object->data, object->len, &made->digests[layout]);
}

/* All ranks that have a tensor have it in one layout, and store all of it. */
static bool tensor_complete(const struct made *made, const struct made_tensor *t)
{
	uint32_t ranks[MADE_RANKS], layouts = 0;

	for (uint32_t l = 0; l < MADE_LAYOUTS; l++)
		layouts += t->layouts >> l & 1 && made_ranks(made, l, ranks);
	return t->how != MADE_LISTED && (layouts == 1 || t->how == MADE_WHOLE || t->len == 0);
}

static void layouts_make(struct made *made)
{
	uint32_t ranks[MADE_RANKS];

	for (uint32_t l = 0; l < MADE_LAYOUTS; l++)
		if (made_ranks(made, l, ranks))
			layout_make(made, l);
	made->complete = true;
	for (uint32_t i = 0; i < made->ntensors; i++)
		made->complete = made->complete && tensor_complete(made, &made->tensors[i]);
}

/* ---- a rank ---- */

struct rank_files {
	struct made_rank k;
	char data[PACK_NAME_MAX], meta[PACK_NAME_MAX], scratch[PACK_NAME_MAX];
	struct pack_object_ref blob_refs[MADE_BLOBS], header_refs[4], layout_ref, part_ref;
	struct proto_blob blobs[MADE_BLOBS]; uint32_t nblobs;
	struct proto_pack_use packs[2];
	struct proto_view_header headers[4]; uint32_t nheaders;
	struct pack_object_ref *chunk_refs;
	struct proto_chunk *chunks; uint32_t nchunks;
	struct proto_announcement announcement;
};

static struct proto_ref ref_of(const struct pack_object_ref *ref, uint32_t pack)
{
	return (struct proto_ref){.digest = ref->digest, .offset = ref->offset, .checks = ref->checks,
		.raw_len = ref->raw_len, .stored_len = ref->stored_len, .pack = pack, .codec = ref->codec,
		.kind = ref->kind};
}

static struct pack_writer *writer(struct made *made, const char *pack)
{
	struct pack_writer *w;

	must(pack_writer_open(&made->m.base, memory_store(&made->m).info.id, pack, &w) == 0);
	return w;
}

static int blob_order(const void *a, const void *b)
{
	const struct proto_blob *x = a, *y = b;

	return x->per_rank != y->per_rank ? x->per_rank - y->per_rank : strcmp(x->name, y->name);
}

static void rank_data(struct rank_files *f)
{
	struct made *made = f->k.made;
	struct pack_writer *w = writer(made, f->data);

	made_rows_plan(&f->k);
	made_rows_append(&f->k, w);
	for (uint32_t i = 0; i < made->nblobs; i++) {
		const struct made_blob *b = &made->blobs[i];

		if (b->rank == f->k.rank && b->len)
			must(pack_append_raw(w, PACK_OBJECT_BLOB, b->bytes, b->len, &f->blob_refs[i]) == 0);
	}
	must(pack_seal(w, &f->packs[0].size) == 0);
	f->packs[0].pack = f->data;
	f->packs[0].live_bytes = f->packs[0].size;
	made_rows_settle(&f->k);
	for (uint32_t i = 0; i < made->nblobs; i++) {
		const struct made_blob *b = &made->blobs[i];
		struct proto_blob *to = &f->blobs[f->nblobs];

		if (b->rank != f->k.rank)
			continue;
		*to = (struct proto_blob){.name = b->name, .per_rank = b->per_rank, .len = b->len};
		if (b->len)
			to->ref = ref_of(&f->blob_refs[i], 0);
		else
			base_digest_of("", 0, &to->ref.digest);
		f->nblobs++;
	}
	qsort(f->blobs, f->nblobs, sizeof *f->blobs, blob_order);
}

/* Digests of rows, from those of their pieces; what does not fit stays as it is. */
static void chunk_mend(struct base_buf *b)
{
	uint64_t at = 0, nrows, first, npieces;

	if (b->len < CHUNK_HEAD_BYTES)
		return;
	nrows = base_get32(b->data + 16);
	npieces = base_get64(b->data + 24);
	first = CHUNK_HEAD_BYTES + nrows * CHUNK_ROW_BYTES + (uint64_t)base_get32(b->data + 20) * CHUNK_EXTENT_BYTES;
	if (first > b->len || npieces > (b->len - first) / CHUNK_PIECE_BYTES)
		return;
	for (uint64_t i = 0; i < nrows; i++) {
		uint8_t *row = b->data + CHUNK_HEAD_BYTES + i * CHUNK_ROW_BYTES;
		uint64_t n = base_get64(row + 16);
		struct base_digest d;
		struct store_piece *pieces;

		if (n > npieces - at)
			return;
		pieces = calloc(n + 1, sizeof *pieces);
		must(pieces != NULL);
		for (uint64_t k = 0; k < n; k++)
			memcpy(&pieces[k].ref.digest, b->data + first + (at + k) * CHUNK_PIECE_BYTES, sizeof d);
		must(store_row_digest(pieces, n, &d) == 0);
		memcpy(row + 32, &d, sizeof d);
		free(pieces);
		at += n;
	}
}

/* What the part says of a chunk's rows follows from the chunk, as far as there are such rows. */
static void chunk_describe(const struct base_buf *b, struct proto_chunk *c)
{
	uint32_t n = b->len >= CHUNK_HEAD_BYTES ? base_get32(b->data + 16) : 0;

	if (n == 0 || (b->len - CHUNK_HEAD_BYTES) / CHUNK_ROW_BYTES < n)
		return;
	c->nrows = n;
	c->first_tensor = base_get32(b->data + CHUNK_HEAD_BYTES);
	c->last_tensor = base_get32(b->data + CHUNK_HEAD_BYTES + (n - 1) * CHUNK_ROW_BYTES);
}

/* The chunks of the rank's rows, as the builder of parts makes them, go with their lies into the meta pack. */
static void rank_chunks(struct rank_files *f, const struct proto_part *made_part, struct pack_writer *meta)
{
	struct made *made = f->k.made;
	struct pack *scratch;

	must(pack_open(&made->m.base, memory_store(&made->m).info.id, f->scratch, 0, &scratch, NULL) == 0);
	f->chunks = calloc(made_part->nchunks + 1, sizeof *f->chunks);
	f->chunk_refs = calloc(made_part->nchunks + 1, sizeof *f->chunk_refs);
	must(f->chunks && f->chunk_refs);
	f->nchunks = made_part->nchunks;
	for (uint32_t i = 0; i < f->nchunks; i++) {
		struct pack_object_ref from = pack_object_ref_from(&made_part->chunks[i].ref);
		struct base_buf b = BASE_BUF_INIT;
		void *bytes;

		f->chunks[i] = made_part->chunks[i];
		must(pack_object_load(scratch, &from, MADE_BYTES * 64, &bytes, NULL) == 0);
		base_buf_append(&b, bytes, from.raw_len);
		free(bytes);
		if (made_lie(made, MADE_LIE_CHUNK, 4 * i + f->k.rank, &b)) {
			if (!lies_keep(made))
				chunk_mend(&b);
			chunk_describe(&b, &f->chunks[i]);
		}
		must((b.len > STORE_CHUNK_TARGET_BYTES ? pack_append_raw : pack_append_encoded)(meta,
			PACK_OBJECT_PART_CHUNK, b.data, b.len, &f->chunk_refs[i]) == 0);
		made->long_rows |= b.len > STORE_CHUNK_TARGET_BYTES;
		base_buf_release(&b);
	}
	pack_close(scratch);
}

static void rank_headers(struct rank_files *f, struct pack_writer *meta)
{
	const struct made *made = f->k.made;
	const struct store_layout *l = made->layouts[f->k.layout];

	for (uint32_t c = 0; made->flags & MADE_HEADERS && c < l->m.ncomponents && c < BASE_COUNT(f->headers); c++) {
		struct base_buf b = BASE_BUF_INIT;
		uint64_t bytes;

		must(view_safetensors_make(l, c, NULL, 0, &b, &bytes) == 0);
		made_lie(made, MADE_LIE_HEADER, c, &b);
		must(pack_append_encoded(meta, PACK_OBJECT_VIEW_HEADER, b.data, b.len, &f->header_refs[c]) == 0);
		f->headers[f->nheaders++] = (struct proto_view_header){.component = l->m.components[c],
			.view = "safetensors", .data_bytes = bytes};
		base_buf_release(&b);
	}
}

/* Rows and part of the scratch pack, which only serves to have them made. */
static void rank_scratch(struct rank_files *f, struct store_part_builder *b, struct proto_part *part,
	struct pack_writer *scratch)
{
	struct pack_object_ref ref;

	for (uint32_t i = 0; i < f->k.nrows; i++) {
		const struct made_row *row = &f->k.rows[i];

		must(store_part_add_row(b, row->tensor, row->boxes, row->nboxes, f->k.pieces + row->first, row->n,
			NULL) == 0);
	}
	must(store_part_finish(b, part, &ref, NULL) == 0);
	must(pack_seal(scratch, NULL) == 0);
}

/* The part object, lies included; its chunks lie in the meta pack, whose extent with them has ended. */
static bool rank_part(struct rank_files *f, struct pack_writer *meta)
{
	struct made *made = f->k.made;
	struct base_buf b = BASE_BUF_INIT;
	struct proto_part part = {.rank = f->k.rank, .world = made->nranks, .host = "h",
		.layout = made->digests[f->k.layout], .packs = f->packs, .npacks = 2, .chunks = f->chunks,
		.nchunks = f->nchunks, .blobs = f->blobs, .nblobs = f->nblobs};
	bool good;

	for (uint32_t i = 0; i < f->nchunks; i++)
		f->chunks[i].ref = ref_of(&f->chunk_refs[i], META);
	good = proto_part_encode(&part, &b) == 0;
	if (good)
		made_lie(made, MADE_LIE_PART, f->k.rank, &b);
	if (good)
		must(pack_append_encoded(meta, PACK_OBJECT_PART, b.data, b.len, &f->part_ref) == 0);
	base_buf_release(&b);
	return good;
}

static bool rank_meta(struct rank_files *f, const struct proto_part *made_part)
{
	struct made *made = f->k.made;
	const struct base_buf *layout = &made->objects[f->k.layout];
	struct pack_writer *meta = writer(made, f->meta);
	bool good;

	must(pack_append_encoded(meta, PACK_OBJECT_LAYOUT, layout->data, layout->len, &f->layout_ref) == 0);
	rank_chunks(f, made_part, meta);
	rank_headers(f, meta);
	must(pack_extent_end(meta) == 0);
	f->packs[META] = (struct proto_pack_use){.pack = f->meta};
	good = rank_part(f, meta);
	must(pack_seal(meta, &f->packs[META].size) == 0);
	f->packs[META].live_bytes = f->packs[META].size;
	for (uint32_t i = 0; i < f->nheaders; i++)
		f->headers[i].ref = ref_of(&f->header_refs[i], META);
	return good;
}

static bool rank_make(struct rank_files *f)
{
	struct made *made = f->k.made;
	struct proto_part part = {.rank = f->k.rank, .world = made->nranks, .host = "h",
		.layout = made->layouts[f->k.layout]->digest, .packs = f->packs, .npacks = 2};
	struct pack_writer *scratch;
	struct store_part_builder *b;
	char path[STORAGE_NAME_MAX];
	bool good;

	snprintf(f->data, sizeof f->data, ATTEMPT "-%u-model", f->k.rank);
	snprintf(f->meta, sizeof f->meta, ATTEMPT "-%u-meta", f->k.rank);
	snprintf(f->scratch, sizeof f->scratch, ATTEMPT "-%u-scratch", f->k.rank);
	rank_data(f);
	f->packs[META].pack = f->meta;
	scratch = writer(made, f->scratch);
	b = store_part_builder_new(made->layouts[f->k.layout], scratch, META);
	must(b != NULL);
	rank_scratch(f, b, &part, scratch);
	good = rank_meta(f, &part);
	store_part_builder_free(b);
	must(pack_path(f->scratch, path) == 0 && memory_remove(&made->m.base, path) == 0);
	f->announcement = (struct proto_announcement){.run = MADE_RUN, .attempt = ATTEMPT, .step = MADE_STEP,
		.rank = f->k.rank, .world = made->nranks, .host = "h", .layout = made->digests[f->k.layout],
		.stores_layout = true, .layout_ref = ref_of(&f->layout_ref, META), .headers = f->headers,
		.nheaders = f->nheaders, .part = ref_of(&f->part_ref, META), .packs = f->packs, .npacks = 2,
		.tensors = made->ntensors};
	return good;
}

/* ---- the step ---- */

static void entry_put(struct made *made, const struct base_digest *manifest)
{
	struct proto_entry e = {.kind = PROTO_ENTRY_COMMIT, .host = "h", .run = MADE_RUN,
		.commit = {.step = MADE_STEP, .attempt = ATTEMPT, .replaces = PROTO_NONE, .manifest = *manifest,
			.tensors = made->ntensors}};
	struct base_buf b = BASE_BUF_INIT;

	must(proto_entry_encode(&e, &b) == 0);
	made_lie(made, MADE_LIE_ENTRY, 0, &b);
	memory_put(&made->m, "runs/" MADE_RUN "/000000000000", STORE_RECORD_ENTRY, b.data, b.len);
	base_buf_release(&b);
}

/* false: what the ranks say cannot be one step. */
static bool manifest_put(struct made *made, const struct proto_announcement *const *all)
{
	struct base_buf b = BASE_BUF_INIT;
	struct base_digest digest;
	char path[STORAGE_NAME_MAX];
	bool good = store_manifest_make(all, made->nranks, &b, &digest, NULL) == 0;

	if (good) {
		made_lie(made, MADE_LIE_MANIFEST, 0, &b);
		base_digest_of(b.data, b.len, &digest);
		must(store_manifest_path(MADE_RUN, &digest, path) == 0);
		memory_put(&made->m, path, STORE_RECORD_MANIFEST, b.data, b.len);
		entry_put(made, &digest);
	}
	base_buf_release(&b);
	return good;
}

static bool ranks_make(struct made *made)
{
	const struct proto_announcement *all[MADE_RANKS];
	struct rank_files *files = calloc(MADE_RANKS, sizeof *files);
	bool good = true;

	must(files != NULL);
	for (uint32_t i = 0; i < made->nranks; i++) {
		files[i].k = (struct made_rank){.made = made, .rank = i, .layout = made->layout_of[i]};
		good = rank_make(&files[i]) && good;
		all[i] = &files[i].announcement;
	}
	good = good && manifest_put(made, all);
	for (uint32_t i = 0; i < made->nranks; i++) {
		made_rank_release(&files[i].k);
		free(files[i].chunks);
		free(files[i].chunk_refs);
	}
	free(files);
	return good;
}

static void identity_put(struct made *made)
{
	struct proto_store info = memory_store(&made->m).info;
	struct base_buf body = BASE_BUF_INIT, file = BASE_BUF_INIT;

	info.seed = MADE_SEED;
	info.grid = (struct tensor_grid_params){.min_bytes = 128 << 10, .target_bytes = 1 << 20, .row_bytes = 256,
		.small_bytes = 32 << 10};
	must(proto_store_encode(&info, &body) == 0);
	must(store_record_encode(STORE_RECORD_STORE, NULL, body.data, body.len, &file) == 0);
	must(memory_replace(&made->m.base, STORE_FILE, file.data, file.len) == 0);
	base_buf_release(&body);
	base_buf_release(&file);
}

/* Packs by the order in which they were written: data and meta of each rank. */
static void damage_put(struct made *made)
{
	for (size_t i = 0; i < made->nrecords; i++) {
		const struct made_record *record = &made->records[i];
		size_t packs = 0, number = made_byte(record, 0) % (2 * made->nranks);

		for (size_t n = 0; record->kind == 6 && n < made->m.n; n++) {
			struct memory_file *file = &made->m.files[n];

			if (strncmp(file->name, "packs/", 6) == 0 && packs++ == number)
				file->bytes[made_u24(record, 1) % file->len] ^= made_byte(record, 4);
		}
	}
}

bool made_step(struct made *made, const uint8_t *data, size_t size)
{
	*made = (struct made){.m = {.base = {&memory_pack_ops}}, .honest = true};
	records_read(made, data, size);
	description_take(made);
	made->honest = !lies_any(made, 5);
	identity_put(made);
	layouts_make(made);
	if (!ranks_make(made))
		return false;
	made->sound = made->honest && !lies_any(made, 6);
	damage_put(made);
	return true;
}

void made_release(struct made *made)
{
	for (uint32_t i = 0; i < made->ntensors; i++) {
		free(made->tensors[i].bytes);
		for (uint32_t l = 0; l < MADE_LAYOUTS; l++) {
			tensor_mesh_free(made->tensors[i].mesh[l]);
			free(made->tensors[i].placements[l]);
		}
	}
	for (uint32_t i = 0; i < made->nblobs; i++)
		free(made->blobs[i].bytes);
	for (uint32_t l = 0; l < MADE_LAYOUTS; l++) {
		store_layout_free(made->layouts[l]);
		free(made->tags[l]);
		base_buf_release(&made->objects[l]);
	}
	memory_release(&made->m);
}

MADE_COVERED
