/* SPDX-License-Identifier: Apache-2.0
 *
 * writer: what a save consists of, declared first, checked before anything is written; and the course of a save, which
 * a job's rank goes as its saver says (rank.h), an import in one commit.
 *
 * The attempt is begun before any pack is created, so that whatever a killed save leaves behind belongs to an
 * attempt that the collector sees. A failure anywhere abandons the open packs, aborts the attempt (which deletes its
 * sealed packs when nothing was announced) and leaves the store as it was. */
#include <stdio.h>

#include "core/base/array.h"
#include "core/base/clock.h"
#include "core/base/log.h"
#include "core/commit/list/list_facts.h"
#include "core/save/write/catalog.h"
#include "core/save/write/space.h"
#include "core/save/write/write_internal.h"
#include "core/upkeep/prune.h"

#define WRITER_PROGRESS_NS UINT64_C(50000000)

BASE_CLEANUP_DEFINE(struct save_writer *, save_writer_close)

static int attribute_compare(const void *a, const void *b)
{
	return strcmp(((const struct proto_attribute *)a)->key, ((const struct proto_attribute *)b)->key);
}

static int writer_check_attribute(const struct proto_attribute *at, struct base_error *err)
{
	if (!proto_attribute_key_valid(at->key))
		return base_error_set(err, -EINVAL, "attribute \"%.80s\": a key is [A-Za-z_][A-Za-z0-9_.-]{0,63}",
			at->key);
	if (strlen(at->value) > PROTO_ATTRIBUTE_VALUE_MAX)
		return base_error_set(err, -BASE_ELIMIT, "attribute %s: its value has more than %d bytes", at->key,
			PROTO_ATTRIBUTE_VALUE_MAX);
	if (!proto_utf8_valid(at->value, strlen(at->value)))
		return base_error_set(err, -EINVAL, "attribute %s: its value is not UTF-8", at->key);
	return 0;
}

static int writer_set_attributes(struct save_writer *w, const struct proto_attribute *attributes, size_t n,
	struct base_error *err)
{
	uint64_t bytes = 0;

	if (n > PROTO_ATTRIBUTES_MAX)
		return base_error_set(err, -BASE_ELIMIT, "a step has at most %d attributes", PROTO_ATTRIBUTES_MAX);
	w->attributes = calloc(n + 1, sizeof *w->attributes);
	if (!w->attributes)
		return base_no_memory(err);
	w->options.attributes = w->attributes;
	w->options.nattributes = 0;
	for (size_t i = 0; i < n; i++) {
		int r = writer_check_attribute(&attributes[i], err);
		char *key, *value;

		if (r < 0)
			return r;
		key = strdup(attributes[i].key);
		value = strdup(attributes[i].value);
		w->attributes[w->options.nattributes++] = (struct proto_attribute){key, value};
		if (!key || !value)
			return base_no_memory(err);
		bytes += strlen(key) + strlen(value);
	}
	if (bytes > PROTO_ATTRIBUTES_MAX_BYTES)
		return base_error_set(err, -BASE_ELIMIT, "the attributes have more than %d bytes together",
			PROTO_ATTRIBUTES_MAX_BYTES);
	qsort(w->attributes, w->options.nattributes, sizeof *w->attributes, attribute_compare);
	for (size_t i = 1; i < w->options.nattributes; i++)
		if (strcmp(w->attributes[i - 1].key, w->attributes[i].key) == 0)
			return base_error_set(err, -EINVAL, "attribute %s is given twice", w->attributes[i].key);
	return 0;
}

static int writer_check_step(struct save_writer *w, struct base_error *err)
{
	const struct commit_list_step *now = NULL;
	struct commit_list *list;
	int r;

	if (w->options.step != PROTO_NONE && w->options.step > INT64_MAX)
		return base_error_set(err, -EINVAL, "a step is a number from 0 to 2^63-1");
	r = commit_list_open_newest(w->store, w->options.run, &list, err);
	if (r < 0)
		return r;
	if (w->options.step != PROTO_NONE)
		r = commit_list_know_step(list, w->options.step, err);
	if (r == 0 && w->options.step != PROTO_NONE)
		now = commit_list_find(list, w->options.step);
	if (now && w->options.replace)
		r = commit_list_unpinned(list, now, "replaced", err);
	else if (now)
		r = base_error_set(err, -EEXIST, "%s has a step %llu already, and replace was not asked for",
			w->options.run, (unsigned long long)w->options.step);
	commit_list_close(list);
	return r < 0 ? r : 0;
}

/* The index only ever saves work: whatever is wrong with it, the save goes on without. */
static void writer_open_index(struct save_writer *w)
{
	struct base_error why = {0};
	int r;

	if (w->options.no_index)
		return;
	r = save_index_open(w->store, &w->index, &why);
	if (r < 0) {
		w->index = NULL;
		base_debug("saving without an index: %s", why.code ? why.text : base_error_name(r));
	}
}

int save_writer_open(struct store *s, const struct save_options *o, struct save_writer **ret_w, struct base_error *err)
{
	base_cleanup(save_writer_close_p) struct save_writer *w = NULL;
	struct save_options own;
	int r;

	if (!o->run || !proto_run_valid(o->run))
		return base_error_set(err, -EINVAL,
			"\"%.140s\" is no name for a run: it is [A-Za-z0-9_][A-Za-z0-9._-]{0,127}",
			o->run ? o->run : "");
	r = save_writer_new(s, o->run, o->attributes, o->nattributes, 0, 1, &w, err);
	if (r < 0)
		return r;
	own = w->options;
	w->options = *o;
	w->options.run = own.run;
	w->options.attributes = own.attributes;
	w->options.nattributes = own.nattributes;
	w->builder = store_layout_builder_new(s->info.grid);
	if (!w->builder)
		return base_no_memory(err);
	r = writer_check_step(w, err);
	if (r < 0)
		return r;
	writer_open_index(w);
	*ret_w = base_steal(w);
	return 0;
}

bool save_writer_lookup(const struct save_writer *w, const struct base_digest *digest, enum pack_object_kind kind,
	uint64_t raw_len, struct index_place *ret_place)
{
	return w->index && index_find(w->index, digest, ret_place) == 0 && ret_place->kind == kind
		&& ret_place->raw_len == raw_len;
}

void save_writer_progress(struct save_writer *w, uint64_t bytes, bool now)
{
	uint64_t at;

	w->done_bytes += bytes;
	if (!w->options.progress)
		return;
	at = base_monotonic_ns();
	if (!now && at - w->progress_ns < WRITER_PROGRESS_NS)
		return;
	w->progress_ns = at;
	w->options.progress(w->options.progress_arg, w->done_bytes, w->tensor_bytes + w->blob_bytes);
}

/* ---- declaring ---- */

int save_writer_tensor(struct save_writer *w, const char *component, const char *name, size_t name_len,
	enum tensor_dtype dtype,
	const struct tensor_shape *shape, struct save_source source, struct base_error *err)
{
	uint64_t items, bytes;
	int r;

	if (w->planned)
		return base_error_set(err, -EINVAL, "a tensor was declared after the plan was made");
	if (base_array_room(w->sources, w->sources_room, (size_t)w->ntensors + 1) < 0)
		return base_no_memory(err);
	r = store_layout_builder_add(w->builder, component, name, name_len, dtype, shape, w->ntensors, err);
	if (r < 0)
		return r;
	r = tensor_shape_items(shape, tensor_dtype_bytes(dtype), &items);
	if (r < 0 || base_mul_overflows(items, tensor_dtype_bytes(dtype), &bytes)
		|| base_add_overflows(w->tensor_bytes, bytes, &w->tensor_bytes))
		return base_error_set(err, -EOVERFLOW, "tensor %s/%.*s is too large", component, (int)base_min(name_len,
			400), name);
	w->sources[w->ntensors++] = source;
	return 0;
}

int save_writer_blob(struct save_writer *w, const char *name, bool per_rank, uint64_t len, struct save_source source,
	struct base_error *err)
{
	size_t name_len = strlen(name);

	if (name_len == 0 || name_len > PROTO_NAME_MAX || !proto_utf8_valid(name, name_len))
		return base_error_set(err, -EINVAL,
			"\"%.200s\" is no name for a blob: a name is UTF-8, of 1 to %d bytes", name, PROTO_NAME_MAX);
	if (proto_name_slashes(name) >= STORE_BLOB_PARTS_MAX)
		return base_error_set(err, -EINVAL,
			"blob %.400s: its path has more than %u parts: give it a shorter path", name,
			STORE_BLOB_PARTS_MAX);
	if (len > STORE_OBJECT_MAX_BYTES || base_add_overflows(w->blob_bytes, len, &w->blob_bytes))
		return base_error_set(err, -BASE_ELIMIT, "blob %.400s is too large", name);
	if (base_array_room(w->blobs, w->blobs_room, (size_t)w->nblobs + 1) < 0)
		return base_no_memory(err);
	w->blobs[w->nblobs] = (struct save_blob){.name = strdup(name), .per_rank = per_rank, .len = len,
		.source = source};
	if (!w->blobs[w->nblobs].name)
		return base_no_memory(err);
	w->nblobs++;
	w->blob_slashes += proto_name_slashes(name);
	return 0;
}

int save_writer_blob_given(struct save_writer *w, const char *name, bool per_rank, uint64_t len,
	const struct base_digest *digest, struct save_source source, struct base_error *err)
{
	int r = save_writer_blob(w, name, per_rank, len, source, err);

	if (r == 0) {
		w->blobs[w->nblobs - 1].given = true;
		w->blobs[w->nblobs - 1].digest = *digest;
	}
	return r;
}

int save_writer_plan(struct save_writer *w, const struct store_layout **ret_layout, struct base_error *err)
{
	int r = 0;

	if (!w->planned) {
		r = store_layout_builder_finish(w->builder, &w->whole.layout, &w->whole.layout_object, &w->tags, err);
		if (r < 0)
			w->whole.layout = NULL;
		else
			r = save_planned_whole(&w->whole, err);
	}
	if (r < 0)
		return r;
	w->planned = &w->whole;
	if (ret_layout)
		*ret_layout = w->planned->layout;
	return 0;
}

static int header_compare(const void *a, const void *b)
{
	const struct save_header *x = a, *y = b;
	int d = strcmp(x->component, y->component);

	return d ? d : strcmp(x->view, y->view);
}

static void header_release(struct save_header *h)
{
	free(h->component);
	free(h->view);
	free(h->bytes);
}

int save_writer_header(struct save_writer *w, const char *component, const char *view, const void *bytes, size_t len,
	uint64_t data_bytes, struct base_error *err)
{
	struct save_header h = {.len = len, .data_bytes = data_bytes};
	bool room = base_array_more(w->headers, w->nheaders) == 0;

	if (!proto_component_valid(component) || !view[0])
		return base_error_set(err, -EINVAL, "the %.80s header of %.80s is not one that a step can have", view,
			component);
	if (len > STORE_VIEW_HEADER_MAX_BYTES)
		return base_error_set(err, -BASE_ELIMIT, "the %.80s header of %.80s has %zu bytes; at most %llu are "
			"allowed", view, component, len, (unsigned long long)STORE_VIEW_HEADER_MAX_BYTES);
	h.component = strdup(component);
	h.view = strdup(view);
	h.bytes = malloc(len + 1);
	if (!room || !h.component || !h.view || !h.bytes) {
		header_release(&h);
		return base_no_memory(err);
	}
	memcpy(h.bytes, bytes, len);
	w->headers[w->nheaders++] = h;
	qsort(w->headers, w->nheaders, sizeof *w->headers, header_compare);
	for (uint32_t i = 1; i < w->nheaders; i++)
		if (header_compare(&w->headers[i - 1], &w->headers[i]) == 0)
			return base_error_set(err, -EEXIST, "the %s header of %s is given twice", view, component);
	return 0;
}

/* ---- a rank's ---- */

int save_writer_new(struct store *s, const char *run, const struct proto_attribute *attributes, size_t nattributes,
	uint32_t rank, uint32_t world, struct save_writer **ret_w, struct base_error *err)
{
	base_cleanup(save_writer_close_p) struct save_writer *w = calloc(1, sizeof *w);
	int r;

	if (w)
		w->options.run = strdup(run);
	if (!w || !w->options.run)
		return base_no_memory(err);
	w->store = s;
	w->rank = rank;
	w->world = world;
	w->believes = !base_xxh128_seed_weak(s->info.seed);
	r = base_random(&w->check_seed, sizeof w->check_seed);
	if (r == 0)
		r = writer_set_attributes(w, attributes, nattributes, err);
	if (r < 0)
		return r;
	*ret_w = base_steal(w);
	return 0;
}

bool save_writer_has_blob(const struct save_writer *w, const char *name, bool per_rank)
{
	for (uint32_t i = 0; i < w->nblobs; i++)
		if (w->blobs[i].per_rank == per_rank && strcmp(w->blobs[i].name, name) == 0)
			return true;
	return false;
}

void save_writer_pack_bytes(struct save_writer *w, uint64_t bytes) { w->pack_bytes = bytes; }
void save_writer_layout_elsewhere(struct save_writer *w) { w->layout_elsewhere = true; }

void save_writer_index(struct save_writer *w, struct index *index)
{
	w->index = index;
	w->index_lent = true;
}

uint64_t save_writer_blob_bytes(const struct save_writer *w) { return w->blob_bytes; }
const struct save_result *save_writer_result(const struct save_writer *w) { return &w->result; }

void save_writer_prepared(struct save_writer *w, const struct save_planned *planned)
{
	w->planned = planned;
	w->tensor_bytes = planned->plan.bytes;
}

/* ---- the course of a save ---- */

int save_writer_begin(struct save_writer *w, struct commit_attempt *attempt, struct base_error *err)
{
	if (!proto_blob_slashes_valid(w->blob_slashes, w->nblobs))
		return base_error_set(err, -EINVAL,
			"the paths of the %u blobs have %llu slashes together, and at most %u and %u a blob are "
			"allowed: give them shorter paths", w->nblobs, (unsigned long long)w->blob_slashes,
			STORE_BLOBS_SLASHES_MORE, STORE_BLOBS_SLASHES_EACH);
	w->attempt = attempt;
	w->result = (struct save_result){.step = commit_attempt_step(attempt),
		.tensors = w->planned->layout->m.ntensors, .blobs = w->nblobs,
		.bytes = w->tensor_bytes + w->blob_bytes};
	memccpy(w->result.attempt, commit_attempt_name(attempt), 0, sizeof w->result.attempt);
	commit_notes_release(&w->notes);
	if (commit_notes_read(w->store, &w->notes) < 0)
		return base_no_memory(err);
	w->done_bytes = 0;
	w->dedup.notes = w->bases.notes = &w->notes;
	w->bases.rank = w->rank;
	w->bases.world = w->world;
	w->bases.index = w->index;
	w->bases.layouts = w->world > 1;
	w->dedup.decided = &w->bases;
	return 0;
}

int save_writer_base(struct save_writer *w, const char *run, uint64_t entry, const struct base_digest *manifest,
	struct base_error *err)
{
	int r = save_bases_add(&w->bases, w->store, run, entry, manifest);

	return r < 0 ? base_no_memory(err) : 0;
}

static int writer_decide(struct save_writer *w, struct base_error *err)
{
	if (w->bases.decided)
		return 0;
	return save_bases_decide(&w->bases, w->planned->layout) < 0 ? base_no_memory(err) : 0;
}

int save_writer_name(struct save_writer *w, const char *run, uint64_t entry, struct base_error *err)
{
	struct save_base *base = save_bases_find(&w->bases, run, entry);
	int r = writer_decide(w, err);

	if (r == 0 && base)
		r = save_base_name(base, &w->dedup, w->attempt, err);
	if (r == -ENOENT)
		return 0;
	w->named = r == 0 ? base : NULL;
	return r < 0 ? r : base != NULL;
}

int save_writer_append(struct save_writer *w, struct save_engine *e, const struct save_engine_source *source,
	struct base_error *err)
{
	int r = writer_decide(w, err);

	if (r == 0)
		r = save_appender_open(w, &w->appender, err);
	return r < 0 ? r : save_engine_append(e, w, source, err);
}

int save_writer_seal(struct save_writer *w, struct base_error *err)
{
	int r = save_appender_blobs(w->appender, err);

	if (w->result.pieces_refuted)
		base_warning("%s: for %llu pieces and blobs, steps that others wrote name a place that holds other "
			"bytes or cannot be read: this save stored them anew (vckpt verify names such steps)",
			w->store->path, (unsigned long long)w->result.pieces_refuted);
	return r < 0 ? r : save_appender_class(w->appender, NULL, err);
}

void save_writer_end(struct save_writer *w)
{
	save_appender_free(base_steal(w->appender));
	save_bases_release(&w->bases);
	save_dedup_release(&w->dedup);
	save_taken_release(&w->taken);
	w->named = NULL;
	w->attempt = NULL;
}

void save_last_release(struct save_last *last)
{
	proto_manifest_release(&last->m);
	store_part_kept_release(&last->part);
	*last = (struct save_last){0};
}

void save_writer_leave(struct save_writer *w, struct save_past *past)
{
	save_last_release(&past->last);
	past->last = w->leaves;
	w->leaves = (struct save_last){0};
}

/* ---- an import's commit ---- */

/* Whether the index would learn something by being brought up to date: it need not for a save that only refers to
 * commits that it has, but for what was compared, which is believed from then on. */
static bool writer_index_behind(const struct save_writer *w)
{
	if (!w->index || w->options.replace || w->result.raw_bytes_new || w->result.pieces_compared)
		return true;
	for (uint32_t i = 0; i < w->dedup.nbases; i++)
		if (!w->dedup.bases[i].usable || !index_has_commit(w->index, &w->dedup.bases[i].manifest))
			return true;
	return false;
}

/* The part, with what was measured so far; then the step is visible. */
static int writer_finish_alone(struct save_writer *w, struct base_error *err)
{
	struct save_result *result = &w->result;
	const struct proto_timing timings[] = {{"read", result->read_ns, result->bytes},
		{"digest", result->digest_ns, result->bytes}, {"encode", result->encode_ns, result->raw_bytes_new},
		{"write", result->write_ns, result->piece_bytes_new},
		{.phase = PROTO_TIMING_AGAIN, .bytes = result->bytes_again},
		{.phase = PROTO_TIMING_NO_BASE, .bytes = result->bytes_no_base}};
	const struct save_measured m = {.timings = timings,
		.ntimings = BASE_COUNT(timings) - (result->bytes_again == 0) - (result->bytes_no_base == 0)};
	int r = save_writer_finish(w, &m, &result->entry, err);

	if (r == 0) {
		result->index_behind = writer_index_behind(w);
		save_writer_again_warn(w);
		save_writer_no_base_warn(w);
	}
	return r;
}

/* warn-free of the run's policy, where the options do not say. */
static void writer_policy(struct save_writer *w, struct save_past *past)
{
	if (w->options.warn_free)
		return;
	if (past->list || commit_list_open_newest(w->store, w->options.run, &past->list, NULL) == 0)
		w->options.warn_free = upkeep_policy_warn_free(past->list);
}

static int writer_run(struct save_writer *w, struct commit_attempt *attempt, struct base_error *err)
{
	struct save_past past = {0};
	int r = save_writer_begin(w, attempt, err);

	if (r == 0 && !w->options.no_index)
		r = save_writer_bases(w, &past, w->options.replace, err);
	writer_policy(w, &past);
	save_past_release(&past);
	if (r == 0)
		r = save_writer_append_all(w, w->options.threads, NULL, err);
	if (r == 0)
		r = save_writer_seal(w, err);
	if (r == 0 && w->options.cancelled && w->options.cancelled())
		r = base_error_set(err, -EINTR, "the save was cancelled");
	if (r == 0)
		r = writer_finish_alone(w, err);
	save_writer_end(w);
	return r;
}

int save_writer_commit(struct save_writer *w, struct save_result *ret_r, struct base_error *err)
{
	struct commit_attempt_save o = {.step = w->options.step, .replace = w->options.replace};
	struct commit_attempt *attempt;
	struct save_space space = {.warn_free = w->options.warn_free};
	struct base_error why = {0}, outcome = {0};
	int r = save_writer_plan(w, NULL, err), decided;

	if (r < 0)
		return r;
	if (w->committed)
		return base_error_set(err, -EINVAL, "save_writer_commit was called before on this writer");
	r = save_space_check(w->store, &space, w->options.run, w->tensor_bytes + w->blob_bytes, err);
	if (r < 0)
		return r;
	r = commit_attempt_begin_alone(w->store, w->options.run, &o, &attempt, err);
	if (r == -ENOSPC || r == -EDQUOT)
		return save_space_full(w->store, r, 0, err);
	if (r < 0)
		return r;
	r = writer_run(w, attempt, &why);
	if (r < 0) {
		if (r == -ENOSPC || r == -EDQUOT)
			save_space_full(w->store, r, w->tensor_bytes + w->blob_bytes, &why);
		else if (!why.code)
			base_error_set(&why, r, "the save failed: %s", base_error_name(r));
		decided = commit_attempt_abort(attempt, r == -BASE_EUNDECIDED ? NULL : why.text, &w->result.entry,
			&outcome);
		if (decided == 0 || r == -BASE_EUNDECIDED) { /* what the list says now */
			r = decided;
			why = outcome;
			w->result.index_behind = decided == 0;
		}
		if (r < 0 && err)
			*err = why;
	}
	commit_attempt_free(attempt);
	if (r < 0)
		return r;
	w->committed = true;
	save_writer_progress(w, 0, true);
	space.warn_free = w->options.warn_free;
	save_space_warn(w->store, &space, w->options.run, w->result.piece_bytes_new + w->result.meta_bytes);
	if (ret_r)
		*ret_r = w->result;
	return 0;
}

void save_writer_close(struct save_writer *w)
{
	if (!w)
		return;
	save_writer_end(w);
	if (!w->index_lent)
		index_close(w->index);
	for (size_t i = 0; w->attributes && i < w->options.nattributes; i++) {
		free((char *)w->attributes[i].key);
		free((char *)w->attributes[i].value);
	}
	free(w->attributes);
	free((char *)w->options.run);
	for (uint32_t i = 0; i < w->nblobs; i++)
		free(w->blobs[i].name);
	for (uint32_t i = 0; i < w->nheaders; i++)
		header_release(&w->headers[i]);
	free(w->blobs);
	free(w->headers);
	free(w->sources);
	free(w->tags);
	store_layout_builder_free(w->builder);
	commit_notes_release(&w->notes);
	save_planned_release(&w->whole);
	save_last_release(&w->leaves);
	free(w);
}
