/* SPDX-License-Identifier: Apache-2.0
 *
 * finish: once every piece and blob has its place: the part into the meta pack, the meta pack sealed (last: what it
 * names is durable by then), and the announcement, which commit_attempt_commit turns into the manifest and the commit
 * entry (invariants 2, 4, 6). */
#include <stdio.h>

#include "core/base/clock.h"
#include "core/base/log.h"
#include "core/save/write/trust.h"
#include "core/save/write/write_internal.h"

static const char *again_text(uint64_t bytes, char text[static 32])
{
	bool large = bytes >= 10 << 20;

	snprintf(text, 32, "%llu %s", (unsigned long long)(bytes >> (large ? 20 : 10)), large ? "MiB" : "KiB");
	return text;
}

/* Are these bytes, which were written again, more than what changed, and at least 1 % of the save? */
static bool again_much(const struct save_writer *w, uint64_t again)
{
	return again > w->result.raw_bytes_new - w->result.bytes_again &&
		again >= (w->tensor_bytes + w->blob_bytes) / 100;
}

bool save_writer_no_base_warn(const struct save_writer *w)
{
	char bytes[32];

	if (!again_much(w, w->result.bytes_no_base))
		return false;
	base_warning("run %s step %llu: wrote %s that an earlier step has or may have, because it could not be used "
		"(%s); nothing is lost, but the data may be stored twice: vckpt verify checks the store",
		w->options.run, (unsigned long long)w->result.step, again_text(w->result.bytes_no_base, bytes),
		w->no_base.text[0] ? w->no_base.text : base_error_name(w->no_base.code));
	return true;
}

bool save_writer_again_warn(const struct save_writer *w)
{
	uint64_t again = w->result.bytes_again - w->result.bytes_no_base;
	uint64_t changed = w->result.raw_bytes_new - w->result.bytes_again;
	char bytes[2][32];

	if (!again_much(w, again))
		return false;
	base_warning("run %s step %llu: wrote %s of unchanged data again, and %s of changed data, because a "
		"step refers to at most %u earlier saves; vckpt info and vckpt stalls show such bytes of each step",
		w->options.run, (unsigned long long)w->result.step, again_text(again, bytes[0]),
		again_text(changed, bytes[1]), SAVE_KEEP_MAX);
	return true;
}

static struct proto_ref finish_ref(const struct pack_object_ref *ref, uint32_t pack)
{
	return (struct proto_ref){.digest = ref->digest, .offset = ref->offset, .checks = ref->checks,
		.raw_len = ref->raw_len,
		.stored_len = ref->stored_len, .pack = pack, .codec = ref->codec, .kind = ref->kind};
}

static struct proto_blob *finish_blobs(const struct save_writer *w)
{
	struct proto_blob *blobs = calloc(w->nblobs + 1, sizeof *blobs);

	for (uint32_t i = 0; blobs && i < w->nblobs; i++) {
		const struct save_blob *b = &w->blobs[i];

		blobs[i] = (struct proto_blob){.name = b->name, .per_rank = b->per_rank, .len = b->len};
		if (b->known)
			blobs[i].ref = finish_ref(&b->known->ref, b->known->pack);
		else
			blobs[i].ref = (struct proto_ref){.digest = b->digest, .kind = PACK_OBJECT_BLOB};
	}
	return blobs;
}

static struct proto_pack_use *finish_packs(const struct save_writer *w)
{
	struct proto_pack_use *packs = calloc(w->dedup.npacks + 1, sizeof *packs);

	for (uint32_t i = 0; packs && i < w->dedup.npacks; i++)
		packs[i] = (struct proto_pack_use){w->dedup.packs[i].name, w->dedup.packs[i].size,
			w->dedup.packs[i].live_bytes};
	return packs;
}

static struct proto_view_header *finish_headers(const struct save_appender *a)
{
	const struct save_writer *w = a->w;
	struct proto_view_header *headers = calloc(w->nheaders + 1, sizeof *headers);

	for (uint32_t i = 0; headers && i < w->nheaders; i++)
		headers[i] = (struct proto_view_header){.component = w->headers[i].component,
			.view = w->headers[i].view,
			.ref = finish_ref(&w->headers[i].ref, a->meta_number), .data_bytes = w->headers[i].data_bytes};
	return headers;
}

static uint64_t finish_meta_live(const struct save_appender *a, const struct proto_part *part,
	const struct pack_object_ref *part_ref)
{
	uint64_t live = part_ref->stored_len + a->meta_blob_bytes;

	if (a->layout_pack == a->meta_number) /* another commit's was counted when it was admitted */
		live += a->layout_ref.stored_len;

	for (uint32_t i = 0; i < a->w->nheaders; i++)
		live += a->w->headers[i].ref.stored_len;
	for (uint32_t i = 0; i < part->nchunks; i++)
		live += part->chunks[i].ref.stored_len;
	return live;
}

/* Writes the part and seals the meta pack; its size in the part's own table stays 0, because it is not known yet. */
static int finish_part(struct save_appender *a, struct proto_part *part, struct pack_object_ref *ret_ref,
	struct base_error *err)
{
	struct save_writer *w = a->w;
	uint64_t begin = base_monotonic_ns();
	int r = store_part_finish(a->part, part, ret_ref, err);

	if (r == 0) {
		r = pack_extent_end(a->meta);
		if (r < 0)
			save_write_failed(w, "meta", r, err);
	}
	if (r < 0)
		return r;
	w->dedup.packs[a->meta_number].live_bytes = finish_meta_live(a, part, ret_ref);
	r = commit_attempt_pack_seal(w->attempt, base_steal(a->meta), &w->dedup.packs[a->meta_number].size);
	if (r < 0)
		return save_write_failed(w, "meta", r, err);
	w->result.write_ns += base_monotonic_ns() - begin;
	w->result.part = ret_ref->digest;
	save_trust_add(&ret_ref->digest);
	w->result.meta_bytes = w->dedup.packs[a->meta_number].size - a->meta_blob_bytes;
	return 0;
}

/* For the next save, which reads the manifest if there is no memory for it. */
static void finish_leave(struct save_writer *w, const struct proto_announcement *ann)
{
	if (store_manifest_excerpt(ann, &w->leaves.m, NULL) == 0)
		w->leaves.attempts = save_bases_attempts(&w->bases, &w->leaves.base);
}

static int finish_announce(struct save_appender *a, const struct proto_part *part,
	const struct pack_object_ref *part_ref, const struct save_measured *m, uint64_t *ret_entry,
	struct base_error *err)
{
	struct save_writer *w = a->w;
	base_cleanup_free struct proto_view_header *headers = finish_headers(a);
	struct proto_announcement ann = {.layout = w->planned->layout->digest, .stores_layout = !w->layout_elsewhere,
		.layout_ref = finish_ref(&a->layout_ref, a->layout_pack),
		.headers = headers, .nheaders = w->nheaders, .part = finish_ref(part_ref, a->meta_number),
			.packs = part->packs, .npacks = part->npacks,
		.tensors = w->planned->layout->m.ntensors, .bytes = w->tensor_bytes + w->blob_bytes,
		.replicas = m->replicas, .nreplicas = m->nreplicas,
		.attributes = w->attributes, .nattributes = w->options.nattributes};

	if (!headers)
		return base_no_memory(err);
	for (uint32_t i = 0; i < w->dedup.npacks; i++)
		ann.new_bytes += w->dedup.packs[i].own ? w->dedup.packs[i].size : 0;
	if (!ret_entry) {
		int r = commit_attempt_announce(w->attempt, &ann, err);

		if (r == 0 || r == -BASE_EUNDECIDED)
			finish_leave(w, &ann);
		return r;
	}
	return commit_attempt_commit(w->attempt, &ann, ret_entry, err);
}

int save_writer_finish(struct save_writer *w, const struct save_measured *m, uint64_t *ret_entry,
	struct base_error *err)
{
	struct save_appender *a = w->appender;
	base_cleanup_free struct proto_blob *blobs = finish_blobs(w);
	base_cleanup_free struct proto_pack_use *packs = finish_packs(w);
	struct proto_part part = {.rank = w->rank, .world = w->world, .host = m->host ? m->host : store_hostname(),
		.layout = w->planned->layout->digest,
		.packs = packs, .npacks = w->dedup.npacks,
		.blobs = blobs, .nblobs = w->nblobs, .timings = m->timings, .ntimings = m->ntimings,
		.samples = m->samples, .nsamples = m->nsamples};
	struct pack_object_ref part_ref;
	int r = blobs && packs ? 0 : base_no_memory(err);

	if (r == 0)
		r = finish_part(a, &part, &part_ref, err);
	if (r == 0) {
		packs[a->meta_number].size = w->dedup.packs[a->meta_number].size;
		packs[a->meta_number].live_bytes = w->dedup.packs[a->meta_number].live_bytes;
		r = finish_announce(a, &part, &part_ref, m, ret_entry, err);
	}
	if (r == 0)
		w->result.bases = w->dedup.nattempts;
	return r;
}
