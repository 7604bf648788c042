/* SPDX-License-Identifier: Apache-2.0
 *
 * thin: see thin.h. In order: the step is read and looked at; the attempt begins, and names the step as its base, so
 * that no collection takes what it goes on needing; layouts, headers and parts are written, and the pack is sealed; the
 * step's entry is replaced, if it is still the one that was seen. A writer that is killed before that leaves an attempt
 * that the collector ends, and the step as it was. */
#include "core/upkeep/thin_internal.h"

#include <inttypes.h>
#include <stdio.h>

#include "core/base/array.h"
#include "core/base/bisect.h"
#include "core/step/open.h"

void thin_release(struct thin *t)
{
	for (uint32_t i = 0; t->layouts && i < t->m.nlayouts; i++) {
		store_layout_free(t->layouts[i].from);
		store_layout_free(t->layouts[i].to);
		free(t->layouts[i].number);
		base_buf_release(&t->layouts[i].object);
	}
	for (uint32_t i = 0; t->ranks && i < t->m.nranks; i++) {
		free(t->ranks[i].packs);
		free(t->ranks[i].headers);
		free(t->ranks[i].header_refs);
	}
	pack_abandon(t->meta);
	free(t->layouts);
	free(t->ranks);
	free(t->pieces);
	verify_set_release(&t->seen);
	proto_manifest_release(&t->m);
}

/* ---- layouts ---- */

static int layout_add(struct thin *t, struct store_layout_builder *b, const struct store_layout *l, uint32_t i,
	struct tensor_mesh **meshes)
{
	const struct proto_layout_tensor *x = &l->m.tensors[i];
	base_cleanup_free struct tensor_placements *p = NULL;
	struct store_layout_held held = {.buffer = x->flags & 1};
	struct tensor_shape shape;
	uint32_t len;
	const char *name = store_layout_name(l, i, &len);
	int r = 0;

	store_layout_shape(l, i, &shape);
	if (x->mesh && !meshes[x->mesh - 1])
		r = store_layout_mesh(l, i, &meshes[x->mesh - 1], t->err);
	if (r == 0 && x->placement)
		r = store_layout_placements(l, i, &p, t->err);
	if (r < 0)
		return r;
	if (x->mesh && p)
		held = (struct store_layout_held){held.buffer, meshes[x->mesh - 1], p->at, p->n};
	return store_layout_builder_add_held(b, store_layout_component(l, i), name, len, store_layout_dtype(l, i),
		&shape, i, &held, t->err);
}

BASE_CLEANUP_DEFINE(struct store_layout_builder *, store_layout_builder_free)

/* Both layouts are sorted alike, so that rows stay in order. */
static int layout_make(struct thin *t, struct thin_layout *y, struct tensor_mesh **meshes)
{
	base_cleanup(store_layout_builder_free_p) struct store_layout_builder *b =
		store_layout_builder_new(y->from->m.grid);
	base_cleanup_free uint32_t *tags = NULL;
	int r = b ? 0 : base_no_memory(t->err);

	for (uint32_t i = 0; r == 0 && i < y->from->m.ntensors; i++) {
		y->number[i] = THIN_NONE;
		if (strcmp(store_layout_component(y->from, i), t->component) == 0)
			t->dropped++;
		else
			r = layout_add(t, b, y->from, i, meshes);
	}
	if (r == 0)
		r = store_layout_builder_finish(b, &y->to, &y->object, &tags, t->err);
	for (uint32_t i = 0; r == 0 && i < y->to->m.ntensors; i++)
		y->number[tags[i]] = i;
	return r;
}

/* Nothing is dropped: the same object again. */
static int layout_same(struct thin *t, uint32_t i)
{
	struct thin_layout *y = &t->layouts[i];
	base_cleanup_free void *object = NULL;
	int r = store_open_layout_object(t->store, &t->m, i, &y->to, &object, t->err);

	if (r < 0)
		return r;
	base_buf_append(&y->object, object, t->m.layouts[i].ref.raw_len);
	for (uint32_t k = 0; k < y->to->m.ntensors; k++)
		y->number[k] = k;
	return y->object.error ? base_no_memory(t->err) : 0;
}

static int layout_open(struct thin *t, uint32_t i)
{
	struct thin_layout *y = &t->layouts[i];
	struct tensor_mesh **meshes;
	int r = store_open_layout(t->store, &t->m, i, &y->from, t->err);

	if (r < 0)
		return r;
	y->number = calloc((size_t)y->from->m.ntensors + 1, sizeof *y->number);
	if (!t->component)
		return y->number ? layout_same(t, i) : base_no_memory(t->err);
	meshes = calloc((size_t)y->from->m.nmeshes + 1, sizeof *meshes);
	r = y->number && meshes ? layout_make(t, y, meshes) : base_no_memory(t->err);
	for (uint32_t k = 0; meshes && k < y->from->m.nmeshes; k++)
		tensor_mesh_free(meshes[k]);
	free(meshes);
	return r;
}

/* 1: there is no such component. */
static int layouts_open(struct thin *t)
{
	uint64_t left = 0;
	int r = 0;

	t->layouts = calloc((size_t)t->m.nlayouts + 1, sizeof *t->layouts);
	t->ranks = calloc((size_t)t->m.nranks + 1, sizeof *t->ranks);
	if (!t->layouts || !t->ranks)
		return base_no_memory(t->err);
	for (uint32_t i = 0; r == 0 && i < t->m.nlayouts; i++) {
		r = layout_open(t, i);
		left += r == 0 ? t->layouts[i].to->m.ntensors : 0;
	}
	if (r < 0 || !t->component || !t->dropped)
		return r < 0 || !t->component ? r : 1;
	t->dropped = 0; /* bytes from now on */
	t->only = !left;
	return left ? 0 : base_error_set(t->err, -EINVAL, "%s/%" PRIu64 " has no tensors but those of '%s', so it "
		"stays as it is (vckpt rm removes it)", t->run, t->m.step, t->component);
}

/* ---- parts ---- */

/* The number of a pack in the new table. */
static uint32_t use_pack(struct thin *t, const char *pack, uint64_t size)
{
	struct thin_rank *k = t->rank;
	uint32_t i = THIN_META;

	while (i < k->said.npacks && strcmp(k->packs[i].pack, pack) != 0)
		i++;
	if (i == k->said.npacks)
		k->packs[k->said.npacks++] = (struct proto_pack_use){pack, size, 0};
	return i;
}

static int use_place(struct thin *t, const struct pack_object_ref *ref, struct pack_object_ref *to)
{
	const struct thin_rank *k = t->rank;
	const uint32_t pack = ref->pack;
	const struct proto_pack_use *from;
	struct thin_place place;
	int r;

	if (pack >= t->part->npacks)
		return base_error_set(t->err, -BASE_EFORMAT, "a part of %s/%" PRIu64 " names a pack that it does not "
			"list", t->run, t->m.step);
	from = &t->m.packs[t->m.map[t->m.ranks[k->said.rank].first_map + pack]];
	r = t->place ? t->place(t, from->pack, ref, &place) : 0;
	if (r < 0)
		return r;
	*to = r ? *place.ref : *ref;
	if (r && place.pack != t->last) {
		t->last = place.pack;
		t->last_number = use_pack(t, place.pack, place.size);
	} else if (!r && !t->renumbered[pack]) {
		t->renumbered[pack] = use_pack(t, from->pack, from->size);
	}
	to->pack = r ? t->last_number : t->renumbered[pack];
	return 0;
}

/* The object as the new part refers to it; it is live there. */
static int use(struct thin *t, const struct pack_object_ref *ref, struct pack_object_ref *to)
{
	int r = use_place(t, ref, to);

	if (r < 0)
		return r;
	r = verify_set_add(&t->seen, verify_place(NULL, to, &to->pack, sizeof to->pack));
	if (r < 0)
		return base_no_memory(t->err);
	t->rank->packs[to->pack].live_bytes += r ? to->stored_len : 0;
	return 0;
}

static int on_row(void *arg, const struct store_row *row)
{
	struct thin *t = arg;
	const uint32_t number = t->layout->number[row->tensor];
	int r = base_array_room(t->pieces, t->pieces_room, row->npieces) < 0 ? base_no_memory(t->err) : 0;

	t->tensor = row->tensor;
	for (uint64_t i = 0; r == 0 && i < row->npieces; i++) {
		if (number == THIN_NONE) {
			t->dropped += row->pieces[i].ref.raw_len;
			continue;
		}
		t->rank_bytes += row->pieces[i].ref.raw_len;
		t->pieces[i] = row->pieces[i];
		if (!row->pieces[i].inline_bytes)
			r = use(t, &row->pieces[i].ref, &t->pieces[i].ref);
	}
	if (r < 0 || number == THIN_NONE || !t->builder)
		return r;
	return store_part_add_row(t->builder, number, row->whole ? NULL : row->boxes, row->whole ? 0 : row->nboxes,
		t->pieces, row->npieces, t->err);
}

static struct proto_ref ref_said(const struct pack_object_ref *ref)
{
	return (struct proto_ref){.digest = ref->digest, .offset = ref->offset, .checks = ref->checks,
		.raw_len = ref->raw_len, .stored_len = ref->stored_len, .pack = ref->pack, .codec = ref->codec,
		.kind = ref->kind};
}

static int part_blobs(struct thin *t, struct proto_blob *blobs)
{
	const struct proto_part *from = &t->part->part;
	int r = 0;

	for (uint32_t i = 0; r == 0 && i < from->nblobs; i++) {
		struct pack_object_ref ref = pack_object_ref_from(&from->blobs[i].ref), to;

		blobs[i] = from->blobs[i];
		t->rank_bytes += blobs[i].len;
		if (!blobs[i].len || (r = use(t, &ref, &to)) < 0)
			continue;
		blobs[i].ref = ref_said(&to);
	}
	return r;
}

static uint32_t part_samples(const struct thin *t, struct proto_sample *samples)
{
	const struct proto_part *from = &t->part->part;
	uint32_t n = 0;

	for (uint32_t i = 0; i < from->nsamples; i++) {
		const uint32_t tensor = from->samples[i].tensor;

		if (tensor >= t->layout->from->m.ntensors || t->layout->number[tensor] == THIN_NONE)
			continue;
		samples[n] = from->samples[i];
		samples[n++].tensor = t->layout->number[tensor];
	}
	return n;
}

static int part_write(struct thin *t, const struct proto_blob *blobs, const struct proto_sample *samples,
	uint32_t nsamples)
{
	struct thin_rank *k = t->rank;
	struct proto_part part = {.rank = k->said.rank, .world = t->m.world, .host = k->said.host,
		.layout = t->layout->to->digest, .packs = k->packs, .npacks = k->said.npacks, .blobs = blobs,
		.nblobs = t->part->part.nblobs, .timings = t->part->part.timings, .ntimings = t->part->part.ntimings,
		.samples = samples, .nsamples = nsamples};
	int r = store_part_finish(t->builder, &part, &k->part, t->err);

	for (uint32_t i = 0; r == 0 && i < part.nchunks; i++)
		k->packs[THIN_META].live_bytes += part.chunks[i].ref.stored_len;
	return r < 0 ? r : 0;
}

/* The rows of a part, with its blobs and samples, into the new part. */
static int part_copy(struct thin *t)
{
	const struct proto_part *from = &t->part->part;
	base_cleanup_free struct proto_blob *blobs = calloc((size_t)from->nblobs + 1, sizeof *blobs);
	base_cleanup_free struct proto_sample *samples = calloc((size_t)from->nsamples + 1, sizeof *samples);
	int r = blobs && samples ? 0 : base_no_memory(t->err);

	for (uint32_t i = 0; r == 0 && !t->whole && i < from->nchunks; i++)
		r = store_part_read_chunk(t->store, t->layout->from, from, t->part->packs, t->part->npacks, i, on_row,
			t, t->err);
	t->tensor = THIN_NONE;
	if (r == 0)
		r = part_blobs(t, blobs);
	return r == 0 && t->builder ? part_write(t, blobs, samples, part_samples(t, samples)) : r;
}

/* The layout and its view headers go with the first rank that has it. */
static int layout_write(struct thin *t)
{
	struct thin_layout *y = t->layout;
	struct thin_rank *k = t->rank;
	const uint32_t number = t->m.ranks[k->said.rank].layout;
	int r = pack_append_encoded(t->meta, PACK_OBJECT_LAYOUT, y->object.data, y->object.len, &y->ref);

	k->headers = calloc((size_t)t->m.nheaders + 1, sizeof *k->headers);
	k->header_refs = calloc((size_t)t->m.nheaders + 1, sizeof *k->header_refs);
	if (!k->headers || !k->header_refs)
		return base_no_memory(t->err);
	for (uint32_t i = 0; r >= 0 && i < t->m.nheaders; i++) {
		const struct proto_view_header *h = &t->m.headers[i];
		base_cleanup_free void *bytes = NULL;

		if (h->layout != number || (t->component && strcmp(h->component, t->component) == 0))
			continue;
		r = store_manifest_object(t->store, &t->m, &h->ref, STORE_METADATA_MAX_BYTES, &bytes, t->err);
		if (r < 0)
			return r;
		k->headers[k->said.nheaders] = *h;
		r = pack_append_encoded(t->meta, PACK_OBJECT_VIEW_HEADER, bytes, h->ref.raw_len,
			&k->header_refs[k->said.nheaders++]);
	}
	y->stored = k->said.stores_layout = true;
	return r < 0 ? base_error_set(t->err, r, "%s: %s", t->meta_name, base_error_name(r)) : 0;
}

BASE_CLEANUP_DEFINE(struct store_part_builder *, store_part_builder_free)

static int rank_copy(struct thin *t, const struct store_opened_part *part)
{
	base_cleanup(store_part_builder_free_p) struct store_part_builder *b = NULL;
	base_cleanup_free uint32_t *renumbered = calloc((size_t)part->npacks + 1, sizeof *renumbered);
	struct thin_rank *k = t->rank;
	int r = 0;

	free(k->packs);
	k->packs = calloc((size_t)part->npacks + t->nplaces + 2, sizeof *k->packs);
	if (!renumbered || !k->packs)
		return base_no_memory(t->err);
	k->packs[THIN_META].pack = t->meta_name;
	k->said.npacks = THIN_META + 1;
	t->renumbered = renumbered;
	t->part = part;
	t->rank_bytes = 0;
	t->last = NULL;
	verify_set_release(&t->seen);
	if (t->writes && !t->layout->stored)
		r = layout_write(t);
	if (r == 0 && t->writes && !(b = store_part_builder_new(t->layout->to, t->meta, THIN_META)))
		r = base_no_memory(t->err);
	t->builder = b;
	if (r == 0)
		r = part_copy(t);
	t->builder = NULL;
	t->bytes += t->rank_bytes;
	k->said.bytes = t->rank_bytes;
	return r;
}

int thin_ranks(struct thin *t)
{
	int r = 0;

	t->bytes = 0;
	for (uint32_t i = thin_first(t); r == 0 && i < t->m.nranks; i++) {
		struct store_opened_part part = {0};

		t->rank = &t->ranks[i];
		t->layout = &t->layouts[t->m.ranks[i].layout];
		t->rank->said = (struct proto_announcement){.rank = i, .host = t->m.hosts[t->m.ranks[i].host],
			.layout = t->layout->to->digest, .tensors = t->layout->to->m.ntensors,
			.attributes = t->m.attributes, .nattributes = t->m.nattributes};
		r = store_open_part(t->store, &t->m, i, &part, t->err);
		if (r == 0)
			r = rank_copy(t, &part);
		store_opened_part_release(&part);
	}
	return r < 0 ? base_error_prefix(t->err, r, "%s/%" PRIu64, t->run, t->m.step) : 0;
}

/* ---- writing ---- */

/* References are complete once the pack is sealed. */
static void announce(struct thin *t, uint64_t size)
{
	for (uint32_t i = thin_first(t); i < t->m.nranks; i++) {
		struct thin_rank *k = &t->ranks[i];
		const struct thin_layout *y = &t->layouts[t->m.ranks[i].layout];
		struct proto_pack_use *meta = &k->packs[THIN_META];

		k->said.part = ref_said(&k->part);
		k->said.layout_ref = ref_said(&y->ref);
		meta->live_bytes += k->part.stored_len + (k->said.stores_layout ? y->ref.stored_len : 0);
		for (uint32_t h = 0; h < k->said.nheaders; h++) {
			k->headers[h].ref = ref_said(&k->header_refs[h]);
			k->headers[h].layout = 0;
			meta->live_bytes += k->header_refs[h].stored_len;
		}
		meta->size = size;
		k->said.packs = k->packs;
		k->said.headers = k->headers;
		k->said.new_bytes = i == thin_first(t) ? size + t->new_bytes : 0;
	}
}

static int thin_commit(struct thin *t, const struct commit_list_step *step, uint64_t *ret_entry)
{
	base_cleanup_free struct proto_announcement *all = calloc((size_t)t->m.nranks + 1, sizeof *all);
	base_cleanup_free const char **thinned = calloc((size_t)t->m.nthinned + 1, sizeof *thinned);
	const struct commit_attempt_rewrite w = {.all = all, .n = t->m.nranks, .replaces = step->entry,
		.thinned = thinned, .nthinned = t->m.nthinned + (t->component != NULL), .loses = t->component != NULL};
	uint32_t at = 0;

	if (!all || !thinned)
		return base_no_memory(t->err);
	for (uint32_t i = 0; i < t->m.nranks; i++)
		all[i] = t->ranks[i].said;
	if (t->whole)
		all[0].host = t->m.hosts[t->m.ranks[0].host];
	for (; at < t->m.nthinned && (!t->component || strcmp(t->m.thinned[at], t->component) < 0); at++)
		thinned[at] = t->m.thinned[at];
	if (t->component)
		thinned[at] = t->component;
	for (; at < t->m.nthinned; at++)
		thinned[at + 1] = t->m.thinned[at];
	return commit_attempt_rewrite(t->attempt, &w, ret_entry, t->err);
}

static int thin_write(struct thin *t, const struct commit_list_step *step, uint64_t *ret_entry)
{
	uint64_t size;
	int r = commit_attempt_base(t->attempt, t->run, step->entry, &step->commit.manifest, t->err);

	if (r == 0 && t->whole && (r = t->whole(t)) == 0)
		commit_attempt_rank(t->attempt, 1); /* its pack of records */
	if (r == 0) {
		r = commit_attempt_pack_open(t->attempt, "meta", t->meta_name, &t->meta);
		if (r < 0)
			return base_error_set(t->err, r, "%s: a pack cannot be written: %s", t->store->path,
				base_error_name(r));
		if (t->prepare && (r = thin_ranks(t)) == 0)
			r = t->prepare(t);
		t->writes = true;
		if (r == 0)
			r = thin_ranks(t);
	}
	if (r < 0)
		return r;
	r = commit_attempt_pack_seal(t->attempt, base_steal(t->meta), &size);
	if (r < 0)
		return base_error_set(t->err, r, "%s: %s", t->meta_name, base_error_name(r));
	announce(t, size);
	return thin_commit(t, step, ret_entry);
}

int thin_attempt(struct thin *t, const struct commit_list_step *step, uint64_t *ret_entry)
{
	const struct commit_attempt_save o = {.step = step->step, .replace = true, .keep_facts = true,
		.count = COMMIT_ATTEMPT_REWRITES, .time_ns = step->commit.time_ns,
		.world = t->whole ? t->m.world : 0, .list = t->list};
	struct base_error why;
	int r = commit_attempt_begin_alone(t->store, t->run, &o, &t->attempt, t->err), decided;

	if (r < 0)
		return r;
	r = thin_write(t, step, ret_entry);
	pack_abandon(base_steal(t->meta));
	if (r < 0) {
		decided = commit_attempt_abort(t->attempt, t->err ? t->err->text : "it failed", ret_entry, &why);
		if (decided == 0 || decided == -BASE_EUNDECIDED)
			r = decided == 0 ? 0 : base_error_set(t->err, decided, "%s", why.text);
	}
	commit_attempt_free(base_steal(t->attempt));
	return r;
}

/* ---- the step ---- */

static bool thinned_before(const struct thin *t)
{
	return base_search(i, (uint32_t)0, t->m.nthinned, strcmp(t->m.thinned[i], t->component)) >= 0;
}

int thin_open(struct thin *t, const struct commit_list_step *step)
{
	int r = store_manifest_get(t->store, t->run, &step->commit.manifest, &t->m, t->err);

	if (r == 0 && (t->m.step != step->step))
		r = base_error_set(t->err, -BASE_EFORMAT, "the manifest of %s/%" PRIu64 " is that of step %" PRIu64,
			t->run, step->step, t->m.step);
	return r < 0 ? r : layouts_open(t);
}

static int say_kept(struct thin *t, int (*keeps)(void *arg, const char *pack), void *arg)
{
	int r = 0;

	for (uint32_t i = 0; i < t->m.nranks; i++)
		for (uint32_t k = THIN_META + 1; r == 0 && k < t->ranks[i].said.npacks; k++)
			r = keeps(arg, t->ranks[i].packs[k].pack);
	return r < 0 ? base_no_memory(t->err) : 0;
}

int upkeep_thin_look(struct store *s, const char *run, const struct commit_list_step *step, const char *component,
	int (*keeps)(void *arg, const char *pack), void *arg, struct upkeep_thinned *ret_t, struct base_error *err)
{
	base_cleanup(thin_release) struct thin t = {.store = s, .run = run, .component = component, .err = err};
	int r = thin_open(&t, step);

	if (r == 0 && keeps && (r = thin_ranks(&t)) == 0)
		r = say_kept(&t, keeps, arg);
	*ret_t = (struct upkeep_thinned){0, t.dropped, thinned_before(&t), t.only};
	return r;
}

int upkeep_thin(struct store *s, const char *run, const struct commit_list_step *step, const char *component,
	struct upkeep_thinned *ret_t, struct base_error *err)
{
	struct base_error own = {0};
	base_cleanup(thin_release) struct thin t = {.store = s, .run = run, .component = component,
		.err = err ? err : &own};
	int r;

	*ret_t = (struct upkeep_thinned){0};
	if (!s->info.list_4)
		return base_error_set(err, -ENOTSUP, "%s was made by an older vckpt: its steps cannot be thinned; "
			STORE_COPY_ADVICE, s->path);
	r = thin_open(&t, step);
	if (r == 0)
		r = thin_attempt(&t, step, &ret_t->entry);
	ret_t->bytes = t.dropped;
	return r;
}
