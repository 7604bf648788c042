/* SPDX-License-Identifier: Apache-2.0
 *
 * manifest: joins the announcements of all ranks into one record, stores it, reads it back.
 *
 * Determinism: every table is sorted (packs by name, layouts by digest, headers by component, view and layout, hosts)
 * or is in the order of the ranks; nothing depends on the committer. If several ranks announce the same layout or
 * header, the lowest rank's reference is taken. */
#include "core/step/manifest.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "core/base/cleanup.h"
#include "core/base/plural.h"
#include "core/storage/spread.h"

typedef const struct proto_announcement *const *announcements;

struct manifest_build {
	struct proto_manifest m;
	announcements all; uint32_t n;
	struct proto_pack_use *packs;
	struct proto_manifest_layout *layouts;
	struct proto_view_header *headers;
	const char **hosts;
	struct proto_manifest_rank *ranks;
	uint32_t *map;
};

static void build_release(struct manifest_build *b)
{
	free(b->packs);
	free(b->layouts);
	free(b->headers);
	free(b->hosts);
	free(b->ranks);
	free(b->map);
}

static int build_agree(const struct manifest_build *b, struct base_error *err)
{
	const struct proto_announcement *first = b->n ? b->all[0] : NULL;

	if (!first || first->world != b->n)
		return base_error_set(err, -BASE_EFORMAT, "%u %s for a world of %u %s", b->n,
			base_plural(b->n, "announcement", "announcements"), first ? first->world : 0,
			base_plural(first ? first->world : 0, "rank", "ranks"));
	for (uint32_t i = 0; i < b->n; i++) {
		const struct proto_announcement *a = b->all[i];

		if (a->rank != i)
			return base_error_set(err, -BASE_EFORMAT,
				"the announcement of rank %u is in the place of that of rank %u", a->rank, i);
		if (strcmp(a->run, first->run) != 0 || strcmp(a->attempt, first->attempt) != 0 ||
			a->step != first->step || a->world != first->world)
			return base_error_set(err, -BASE_EFORMAT,
				"rank %u announces step %" PRIu64 " of %s with world size %u (%s), rank 0 step %" PRIu64
				" of %s with %u (%s)",
				i, a->step, a->run, a->world, a->attempt, first->step, first->run, first->world,
				first->attempt);
		if (!proto_attributes_equal(a->attributes, a->nattributes, first->attributes, first->nattributes))
			return base_error_set(err, -BASE_EFORMAT, "ranks 0 and %u give the step different attributes",
				i);
	}
	return 0;
}

static int pack_order(const void *a, const void *b)
{
	return strcmp(((const struct proto_pack_use *)a)->pack, ((const struct proto_pack_use *)b)->pack);
}

/* Joins equal names of the sorted table: live bytes are added up, at most to the size of the pack, because ranks may
 * reach the same object. */
static int packs_fold(struct manifest_build *b, uint32_t count, struct base_error *err)
{
	uint32_t n = 0;

	for (uint32_t i = 0; i < count; i++) {
		struct proto_pack_use *last = n ? &b->packs[n - 1] : NULL, *p = &b->packs[i];

		if (!last || strcmp(last->pack, p->pack) != 0) {
			b->packs[n++] = *p;
			continue;
		}
		if (last->size != p->size)
			return base_error_set(err, -BASE_EFORMAT,
				"ranks announce pack %s with %" PRIu64 " and with %" PRIu64 " bytes", p->pack,
				last->size, p->size);
		last->live_bytes = base_min(p->live_bytes > UINT64_MAX - last->live_bytes
				? UINT64_MAX
				: last->live_bytes + p->live_bytes,
			last->size);
	}
	b->m.packs = b->packs;
	b->m.npacks = n;
	return 0;
}

static int build_packs(struct manifest_build *b, struct base_error *err)
{
	uint64_t total = 0;
	uint32_t count = 0;

	for (uint32_t i = 0; i < b->n; i++)
		total += b->all[i]->npacks;
	if (total > UINT32_MAX / 2)
		return base_error_set(err, -BASE_ELIMIT, "too many packs for one step");
	b->packs = calloc((size_t)total + 1, sizeof *b->packs);
	if (!b->packs)
		return base_no_memory(err);
	for (uint32_t i = 0; i < b->n; i++)
		for (uint32_t j = 0; j < b->all[i]->npacks; j++) {
			const struct proto_pack_use *p = &b->all[i]->packs[j];

			b->packs[count++] = (struct proto_pack_use){p->pack, p->size, p->live_bytes};
		}
	qsort(b->packs, count, sizeof *b->packs, pack_order);
	return packs_fold(b, count, err);
}

static uint32_t pack_number(const struct manifest_build *b, const char *pack)
{
	struct proto_pack_use key = {.pack = pack},
				   *found = bsearch(&key, b->packs, b->m.npacks, sizeof key, pack_order);

	return (uint32_t)(found - b->packs); /* all names are in the table */
}

/* A rank's reference, with the pack's number in the manifest's table. */
static struct proto_ref build_ref(const struct manifest_build *b, const struct proto_announcement *a,
	const struct proto_ref *from)
{
	struct proto_ref ref = *from;

	ref.pack = pack_number(b, a->packs[from->pack].pack);
	return ref;
}

static int layout_order(const void *a, const void *b)
{
	return base_digest_compare(&((const struct proto_manifest_layout *)a)->digest,
		&((const struct proto_manifest_layout *)b)->digest);
}

/* Takes only the layouts that were stored, *ret_n of them, sorted; counts the tensors of each once. */
static int build_layouts(struct manifest_build *b, struct base_error *err)
{
	uint32_t count = 0, n = 0;

	b->layouts = calloc((size_t)b->n + 1, sizeof *b->layouts);
	if (!b->layouts)
		return base_no_memory(err);
	for (uint32_t i = 0; i < b->n; i++) /* .ref.pack is the rank until the table is folded */
		if (b->all[i]->stores_layout) {
			b->layouts[count].digest = b->all[i]->layout;
			b->layouts[count++].ref.pack = i;
		}
	qsort(b->layouts, count, sizeof *b->layouts, layout_order);
	for (uint32_t i = 0; i < count; i++) {
		if (n && base_digest_equal(&b->layouts[n - 1].digest, &b->layouts[i].digest)) {
			b->layouts[n - 1].ref.pack = (uint32_t)base_min(b->layouts[n - 1].ref.pack,
				b->layouts[i].ref.pack);
			continue;
		}
		b->layouts[n++] = b->layouts[i];
	}
	for (uint32_t i = 0; i < n; i++) {
		const struct proto_announcement *a = b->all[b->layouts[i].ref.pack];

		b->layouts[i].ref = build_ref(b, a, &a->layout_ref);
		b->m.tensors += a->tensors;
	}
	b->m.layouts = b->layouts;
	b->m.nlayouts = n;
	return 0;
}

static int header_order(const struct proto_view_header *a, const struct proto_view_header *b)
{
	int c = strcmp(a->component, b->component);

	if (c == 0)
		c = strcmp(a->view, b->view);
	return c ? c : (a->layout > b->layout) - (a->layout < b->layout);
}

/* Equal ones keep the order of the ranks, which is that of the array behind the pointers. */
static int header_pointer_order(const void *pa, const void *pb)
{
	const struct proto_view_header *a = *(const struct proto_view_header *const *)pa,
				       *b = *(const struct proto_view_header *const *)pb;
	int c = header_order(a, b);

	return c ? c : (a > b) - (a < b);
}

/* Takes one line per header out of `sorted`: the lowest rank's. */
static int headers_fold(struct manifest_build *b, struct proto_view_header **sorted, uint32_t count,
	struct base_error *err)
{
	uint32_t n = 0;

	b->headers = calloc((size_t)count + 1, sizeof *b->headers);
	if (!b->headers)
		return base_no_memory(err);
	for (uint32_t i = 0; i < count; i++) {
		const struct proto_view_header *last = n ? &b->headers[n - 1] : NULL, *h = sorted[i];

		if (!last || header_order(last, h) != 0)
			b->headers[n++] = *h;
		else if (!base_digest_equal(&last->ref.digest, &h->ref.digest) || last->data_bytes != h->data_bytes)
			return base_error_set(err, -BASE_EFORMAT, "ranks announce different %s headers of %s", h->view,
				h->component);
	}
	b->m.headers = b->headers;
	b->m.nheaders = n;
	return 0;
}

static const struct proto_manifest_layout *build_layout_of(const struct manifest_build *b, uint32_t rank)
{
	struct proto_manifest_layout key = {.digest = b->all[rank]->layout};

	return bsearch(&key, b->layouts, b->m.nlayouts, sizeof key, layout_order);
}

/* A header belongs to its rank's layout: each stage of a pipeline has one. */
static int build_headers(struct manifest_build *b, struct base_error *err)
{
	base_cleanup_free struct proto_view_header *all = NULL;
	base_cleanup_free struct proto_view_header **sorted = NULL;
	uint64_t total = 0;
	uint32_t count = 0;

	for (uint32_t i = 0; i < b->n; i++)
		total += b->all[i]->nheaders;
	if (total > UINT32_MAX)
		return base_error_set(err, -BASE_ELIMIT, "too many view headers for one step");
	all = calloc((size_t)total + 1, sizeof *all);
	sorted = calloc((size_t)total + 1, sizeof *sorted);
	if (!all || !sorted)
		return base_no_memory(err);
	for (uint32_t i = 0; i < b->n; i++) {
		const struct proto_manifest_layout *layout = build_layout_of(b, i);

		/* without a layout: build_rank refuses */
		for (uint32_t j = 0; layout && j < b->all[i]->nheaders; j++) {
			all[count] = b->all[i]->headers[j];
			all[count].layout = (uint32_t)(layout - b->layouts);
			all[count].ref = build_ref(b, b->all[i], &b->all[i]->headers[j].ref);
			sorted[count] = &all[count];
			count++;
		}
	}
	qsort(sorted, count, sizeof *sorted, header_pointer_order);
	return headers_fold(b, sorted, count, err);
}

static int host_order(const void *a, const void *b)
{
	return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static int build_hosts(struct manifest_build *b, struct base_error *err)
{
	uint32_t n = 0;

	b->hosts = calloc((size_t)b->n + 1, sizeof *b->hosts);
	if (!b->hosts)
		return base_no_memory(err);
	for (uint32_t i = 0; i < b->n; i++)
		b->hosts[i] = b->all[i]->host;
	qsort(b->hosts, b->n, sizeof *b->hosts, host_order);
	for (uint32_t i = 0; i < b->n; i++)
		if (n == 0 || strcmp(b->hosts[n - 1], b->hosts[i]) != 0)
			b->hosts[n++] = b->hosts[i];
	b->m.hosts = b->hosts;
	b->m.nhosts = n;
	return 0;
}

static int build_rank(struct manifest_build *b, uint32_t i, struct base_error *err)
{
	const struct proto_announcement *a = b->all[i];
	const struct proto_manifest_layout *layout = build_layout_of(b, i);
	const char **host = bsearch(&a->host, b->hosts, b->m.nhosts, sizeof *b->hosts, host_order);
	struct proto_manifest_rank *k = &b->ranks[i];

	if (!layout)
		return base_error_set(err, -BASE_EFORMAT, "no rank stored the layout of rank %u", i);
	k->rank = i;
	k->layout = (uint32_t)(layout - b->layouts);
	k->host = (uint32_t)(host - b->hosts);
	k->part = build_ref(b, a, &a->part);
	k->first_map = b->m.nmap;
	k->npacks = a->npacks;
	for (uint32_t j = 0; j < a->npacks; j++)
		b->map[b->m.nmap++] = pack_number(b, a->packs[j].pack);
	b->m.bytes += a->bytes;
	b->m.new_bytes += a->new_bytes;
	return 0;
}

static int build_ranks(struct manifest_build *b, struct base_error *err)
{
	uint64_t total = 0;
	int r = 0;

	for (uint32_t i = 0; i < b->n; i++)
		total += b->all[i]->npacks;
	b->ranks = calloc((size_t)b->n + 1, sizeof *b->ranks);
	b->map = calloc((size_t)total + 1, sizeof *b->map);
	if (!b->ranks || !b->map)
		return base_no_memory(err);
	for (uint32_t i = 0; i < b->n && r == 0; i++)
		r = build_rank(b, i, err);
	b->m.ranks = b->ranks;
	b->m.nranks = b->n;
	b->m.map = b->map;
	return r;
}

static int build_all(struct manifest_build *b, struct base_error *err)
{
	int r = build_agree(b, err);

	if (r == 0)
		r = build_packs(b, err);
	if (r == 0)
		r = build_layouts(b, err);
	if (r == 0)
		r = build_headers(b, err);
	if (r == 0)
		r = build_hosts(b, err);
	return r < 0 ? r : build_ranks(b, err);
}

int store_manifest_make(const struct proto_announcement *const *all, uint32_t n, struct base_buf *ret_body,
	struct base_digest *ret_digest, struct base_error *err)
{
	base_cleanup(build_release) struct manifest_build b = {.all = all, .n = n};
	size_t before = ret_body->len;
	int r = build_all(&b, err);

	if (r < 0)
		return r;
	b.m.run = all[0]->run;
	b.m.attempt = all[0]->attempt;
	b.m.step = all[0]->step;
	b.m.world = n;
	b.m.attributes = all[0]->attributes;
	b.m.nattributes = all[0]->nattributes;
	r = proto_manifest_encode(&b.m, ret_body);
	if (r < 0)
		return base_error_set(err, r, "the manifest cannot be encoded: %s", base_error_name(r));
	base_digest_of(ret_body->data + before, ret_body->len - before, ret_digest);
	return 0;
}

/* Made and read back as the manifest of a step of that rank alone, which then gets its number and world. */
int store_manifest_excerpt(const struct proto_announcement *a, struct proto_manifest *ret_m, struct base_error *err)
{
	struct proto_announcement alone = *a;
	const struct proto_announcement *all[] = {&alone};
	base_cleanup_buf struct base_buf body = BASE_BUF_INIT;
	struct base_digest digest;
	int r;

	alone.rank = 0;
	alone.world = 1;
	alone.nattributes = 0;
	alone.nheaders = 0;
	r = store_manifest_make(all, 1, &body, &digest, err);
	if (r == 0 && proto_manifest_decode(body.data, body.len, ret_m) < 0)
		r = base_no_memory(err);
	if (r < 0)
		return r;
	((struct proto_manifest_rank *)ret_m->ranks)->rank = a->rank;
	ret_m->world = a->world;
	return 0;
}

/* ---- in the store ---- */

int store_manifest_path(const char *run, const struct base_digest *digest, char path[static STORAGE_NAME_MAX])
{
	char hex[BASE_DIGEST_HEX];

	if (!proto_run_valid(run))
		return -EINVAL;
	base_digest_hex(digest, hex);
	snprintf(path, STORAGE_NAME_MAX, "runs/%s/manifests/%s", run, hex);
	return 0;
}

int store_manifest_put(struct store *s, const char *run, const struct base_buf *body, const struct base_digest *digest,
	struct base_error *err)
{
	char path[STORAGE_NAME_MAX];
	int r = store_manifest_path(run, digest, path);

	if (r < 0)
		return base_error_set(err, r, "\"%.128s\" cannot be the name of a run", run);
	r = store_record_put(s->storage, path, STORE_RECORD_MANIFEST, s->info.id, body->data, body->len);
	if (r < 0)
		return store_denied(s, r, err) ? r
			: base_error_set(err, r, "%s cannot be written: %s", path, base_error_name(r));
	if (r == STORAGE_PUT_OTHER)
		return base_error_set(err, -BASE_EDAMAGED, "%s exists with other bytes: it is damaged", path);
	return 0;
}

int store_manifest_get(struct store *s, const char *run, const struct base_digest *digest, struct proto_manifest *ret_m,
	struct base_error *err)
{
	base_cleanup(store_record_release) struct store_record record = {0};
	struct base_digest found;
	char path[STORAGE_NAME_MAX];
	int r = store_manifest_path(run, digest, path);

	memset(ret_m, 0, sizeof *ret_m);
	if (r < 0)
		return base_error_set(err, r, "\"%.128s\" cannot be the name of a run", run);
	r = store_record_get(s->storage, path, STORE_RECORD_MANIFEST, s->info.id, &record, NULL, err);
	if (storage_not_a_file(r))
		return base_error_set(err, -BASE_EDAMAGED, "%s: %s", path, storage_not_a_file(r));
	if (r < 0) {
		store_no_directory(s, r, err);
		return r;
	}
	base_digest_of(record.body, record.len, &found);
	if (!base_digest_equal(&found, digest))
		return base_error_set(err, -BASE_EDAMAGED, "%s does not match its digest", path);
	r = proto_manifest_decode(record.body, record.len, ret_m);
	if (r == -BASE_EVERSION)
		return store_newer(err, path, record.body, record.len);
	if (r < 0)
		return base_error_set(err, r, "%s: %s", path, base_error_name(r));
	if (strcmp(ret_m->run, run) != 0) {
		r = base_error_set(err, -BASE_EFORMAT, "%s is a manifest of run %s", path, ret_m->run);
		proto_manifest_release(ret_m);
	}
	return r;
}

int store_manifest_object(struct store *s, const struct proto_manifest *m, const struct proto_ref *from, uint64_t max,
	void **ret_bytes, struct base_error *err)
{
	struct pack_object_ref ref = pack_object_ref_from(from);

	if (ref.pack >= m->npacks)
		return base_error_set(err, -BASE_EFORMAT, "a reference of the manifest names pack %u of %u", ref.pack,
			m->npacks);
	return store_object_load(s, m->packs[ref.pack].pack, &ref, max, ret_bytes, err);
}

struct packs_check { struct store *s; const struct proto_manifest *m; };

static int pack_check(void *arg, uint32_t i, struct base_error *err)
{
	const struct packs_check *c = arg;
	const struct proto_pack_use *p = &c->m->packs[i];
	char path[STORAGE_NAME_MAX];
	uint64_t size;
	int r = pack_path(p->pack, path);

	if (r == 0)
		r = storage_size(c->s->storage, path, &size);
	if (r == -ENOENT)
		return base_error_set(err, r, "pack %s is gone", p->pack);
	if (storage_not_a_file(r))
		return base_error_set(err, -BASE_EDAMAGED, "%s: %s", path, storage_not_a_file(r));
	if (r < 0 && store_no_directory(c->s, r, err))
		return r;
	if (r < 0)
		return base_error_set(err, r, "pack %s: %s", p->pack, base_error_name(r));
	if (size != p->size)
		return base_error_set(err, -BASE_EDAMAGED, "pack %s has %" PRIu64 " bytes instead of %" PRIu64, p->pack,
			size, p->size);
	return 0;
}

int store_manifest_check_packs(struct store *s, const struct proto_manifest *m, struct base_error *err)
{
	struct packs_check c = {s, m};

	return storage_spread(m->npacks, pack_check, &c, err);
}
