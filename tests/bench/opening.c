/* SPDX-License-Identifier: Apache-2.0
 *
 * opening: what it costs to open a step of very many writers and to read what one rank of another mesh wants.
 *
 *     opening make STORE DP TP TENSORS            a step r/0 of DP * TP writers
 *     opening load STORE DP TP RANK TENSORS       the shares of one rank of such a mesh, of the first tensors
 *     opening parts STORE RANK                    one tensor's share of a writer, call by call
 *
 * A tensor has 16 rows for each of DP ranks and 16 bytes a row for each of TP, is placed as "S(0),S(1)", and every
 * writer stores its share of it: one piece of 256 bytes. The step is made by core/step and the list alone, without the
 * protocol of a save, whose cost writers.c measures. load and parts print one JSON object; who calls them drops the
 * caches of the machine before. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "core/base/cleanup.h"
#include "core/base/clock.h"
#include "core/commit/list/list.h"
#include "core/load/fill/fill.h"
#include "core/step/manifest.h"
#include "core/step/open.h"
#include "core/tensor/shard.h"

#define EDGE 16u                /* items of a share in each dimension */
#define ATTEMPT "0123456789abcdef-1"

struct opening {
	struct store *store;
	uint32_t dp, tp, ntensors;
	struct tensor_mesh *mesh;
	struct tensor_placements *words;
	struct store_layout *layout;
	struct base_buf object;
	struct base_error err;
};

static void must(int r, const struct opening *o, const char *what)
{
	if (r >= 0)
		return;
	fprintf(stderr, "%s: %s (%s)\n", what, o->err.text, base_error_name(r));
	exit(1);
}

static double ms(uint64_t since) { return (double)(base_monotonic_ns() - since) / 1e6; }

static void mesh_make(struct opening *o)
{
	char text[64];

	snprintf(text, sizeof text, "dp=%u,tp=%u", o->dp, o->tp);
	must(tensor_mesh_parse(text, NULL, 0, &o->mesh, &o->err), o, "mesh");
	must(tensor_placements_parse("S(0),S(1)", &o->words, &o->err), o, "placements");
}

/* ---- a step ---- */

static void layout_make(struct opening *o)
{
	struct tensor_grid_params params = {128 << 10, 1 << 20, 512};
	struct tensor_shape shape = {2, {(uint64_t)EDGE * o->dp, (uint64_t)EDGE * o->tp}};
	struct store_layout_held held = {.mesh = o->mesh, .placements = o->words->at, .nplacements = o->words->n};
	struct store_layout_builder *b = store_layout_builder_new(params);
	base_cleanup_free uint32_t *tags = NULL;
	char name[32];

	for (uint32_t t = 0; t < o->ntensors; t++) {
		snprintf(name, sizeof name, "layers.%06u.weight", t);
		must(store_layout_builder_add_held(b, "model", name, strlen(name), TENSOR_U8, &shape, t, &held,
			&o->err), o, name);
	}
	must(store_layout_builder_finish(b, &o->layout, &o->object, &tags, &o->err), o, "layout");
	store_layout_builder_free(b);
}

struct share {
	char model[PACK_NAME_MAX], meta[PACK_NAME_MAX];
	struct proto_pack_use packs[2];
	struct store_piece *pieces;
	struct pack_object_ref layout_ref, part_ref;
};

static struct proto_ref ref_of(const struct pack_object_ref *ref)
{
	return (struct proto_ref){.digest = ref->digest, .offset = ref->offset, .checks = ref->checks,
		.raw_len = ref->raw_len, .stored_len = ref->stored_len, .pack = ref->pack, .codec = ref->codec,
		.kind = ref->kind};
}

static uint8_t item(uint32_t rank, uint32_t tensor, unsigned i) { return (uint8_t)(rank * 31 + tensor * 7 + i); }

static void pieces_write(struct opening *o, struct share *s, uint32_t rank)
{
	struct pack_writer *w;
	uint8_t bytes[EDGE * EDGE];

	must(pack_writer_open(o->store->storage, o->store->info.id, s->model, &w), o, "pack");
	for (uint32_t t = 0; t < o->ntensors; t++) {
		for (unsigned i = 0; i < sizeof bytes; i++)
			bytes[i] = item(rank, t, i);
		must(pack_append_raw(w, PACK_OBJECT_PIECE, bytes, sizeof bytes, &s->pieces[t].ref), o, "piece");
		s->pieces[t].base = STORE_PIECE_NO_BASE;
		base_xxh128_of(o->store->info.seed, bytes, sizeof bytes, &s->pieces[t].xxh);
	}
	s->packs[0].live_bytes = (uint64_t)o->ntensors * sizeof bytes;
	must(pack_seal(w, &s->packs[0].size), o, "seal");
}

static void part_write(struct opening *o, struct share *s, uint32_t rank)
{
	struct proto_part part = {.rank = rank, .world = o->dp * o->tp, .host = "h", .layout = o->layout->digest,
		.packs = s->packs, .npacks = 2};
	struct tensor_box box = {.offset = {(uint64_t)rank / o->tp * EDGE, (uint64_t)(rank % o->tp) * EDGE},
		.size = {EDGE, EDGE}};
	struct store_part_builder *b;
	struct pack_writer *w;

	must(pack_writer_open(o->store->storage, o->store->info.id, s->meta, &w), o, "pack");
	if (rank == 0)
		must(pack_append_raw(w, PACK_OBJECT_LAYOUT, o->object.data, o->object.len, &s->layout_ref), o,
			"layout");
	b = store_part_builder_new(o->layout, w, 1);
	for (uint32_t t = 0; t < o->ntensors; t++)
		must(store_part_add_row(b, t, part.world > 1 ? &box : NULL, part.world > 1, &s->pieces[t], 1, &o->err),
			o, "row");
	must(pack_extent_end(w), o, "extent");
	must(store_part_finish(b, &part, &s->part_ref, &o->err), o, "part");
	s->packs[1].live_bytes = s->part_ref.stored_len;
	store_part_builder_free(b);
	must(pack_seal(w, &s->packs[1].size), o, "seal");
	s->layout_ref.pack = s->part_ref.pack = 1;
}

static void rank_make(struct opening *o, struct share *s, uint32_t rank, struct proto_announcement *ret_a)
{
	s->pieces = calloc(o->ntensors, sizeof *s->pieces);
	snprintf(s->model, sizeof s->model, ATTEMPT "-%u-model", rank);
	snprintf(s->meta, sizeof s->meta, ATTEMPT "-%u-meta", rank);
	s->packs[0].pack = s->model;
	s->packs[1].pack = s->meta;
	pieces_write(o, s, rank);
	part_write(o, s, rank);
	free(base_steal(s->pieces));
	*ret_a = (struct proto_announcement){.run = "r", .attempt = ATTEMPT, .rank = rank, .world = o->dp * o->tp,
		.host = "h", .layout = o->layout->digest, .stores_layout = rank == 0, .part = ref_of(&s->part_ref),
		.packs = s->packs, .npacks = 2, .tensors = o->ntensors, .bytes = s->packs[0].live_bytes,
		.new_bytes = s->packs[0].size + s->packs[1].size};
	if (rank == 0)
		ret_a->layout_ref = ref_of(&s->layout_ref);
}

static void step_make(struct opening *o)
{
	uint32_t world = o->dp * o->tp;
	struct share *shares = calloc(world, sizeof *shares);
	struct proto_announcement *all = calloc(world, sizeof *all);
	const struct proto_announcement **each = calloc(world, sizeof *each);
	struct proto_entry e = {.kind = PROTO_ENTRY_COMMIT, .host = "h", .commit = {.attempt = ATTEMPT,
		.replaces = PROTO_NONE, .tensors = o->ntensors, .time_ns = 1}};
	base_cleanup_buf struct base_buf body = BASE_BUF_INIT;
	struct commit_list *list;

	layout_make(o);
	for (uint32_t i = 0; i < world; i++) {
		rank_make(o, &shares[i], i, &all[i]);
		each[i] = &all[i];
		e.commit.bytes += all[i].bytes;
		e.commit.new_bytes += all[i].new_bytes;
	}
	must(store_manifest_make(each, world, &body, &e.commit.manifest, &o->err), o, "manifest");
	must(store_manifest_put(o->store, "r", &body, &e.commit.manifest, &o->err), o, "manifest");
	must(commit_list_open(o->store, "r", true, &list, &o->err), o, "list");
	must((int)commit_list_put(list, &e, NULL, NULL, &o->err), o, "entry");
	commit_list_close(list);
	store_layout_free(o->layout);
	base_buf_release(&o->object);
	free(shares);
	free(all);
	free(each);
}

/* ---- a load ---- */

/* The share of one rank of every tensor, of whatever shape it was saved in. */
static uint8_t *fill_add(struct opening *o, struct load_step *step, struct load_fill *f, uint32_t rank)
{
	struct tensor_sharding s = {.item_bytes = 1, .mesh = o->mesh, .placement = o->words->at};
	struct load_tensor_info info;
	struct tensor_shard_iter it;
	struct tensor_shard shard;
	uint8_t *memory, *to;

	load_step_tensor_info(step, 0, &info);
	s.shape = info.shape;
	must(tensor_sharding_check(&s, o->words->n, &o->err), o, "sharding");
	must(tensor_shard_of(&s, rank, NULL, &shard, &o->err), o, "shard");
	memory = to = malloc((size_t)tensor_shard_items(&shard) * o->ntensors + 1);
	for (uint32_t t = 0; t < o->ntensors; t++)
		for (tensor_shard_first(&it, &shard, NULL); !it.done; tensor_shard_next(&it)) {
			uint64_t stride[2] = {it.at.local_stride[0], 1};

			must(load_fill_add(f, t, &it.at.box, to + it.at.local_offset, stride, &o->err), o, "box");
			to += tensor_box_items(&s.shape, &it.at.box);
		}
	return memory;
}

static void load(struct opening *o, const char *path, uint32_t rank)
{
	uint64_t begin = base_monotonic_ns(), from = begin;
	clock_t used = clock();
	struct load_fill_progress done;
	struct load_fill_times times;
	struct commit_list *list;
	struct load_step *step;
	struct load_fill *f;
	uint8_t *memory;

	must(store_open(path, STORE_OPEN_READ_ONLY, &o->store, &o->err), o, "store");
	must(commit_list_open(o->store, "r", false, &list, &o->err), o, "list");
	printf("{\"list_ms\": %.3f, ", ms(from));
	from = base_monotonic_ns();
	must(load_step_open(o->store, "r", commit_list_latest(list), &step, &o->err), o, "step");
	printf("\"step_ms\": %.3f, ", ms(from));
	f = load_fill_new(step, 0, 0);
	mesh_make(o);
	memory = fill_add(o, step, f, rank);
	must(load_fill_run(f, &o->err), o, "load");
	load_fill_times(f, &times);
	load_fill_progress(f, &done);
	printf("\"rows_ms\": %.3f, \"plan_ms\": %.3f, \"read_ms\": %.3f, \"all_ms\": %.3f, \"cpu_ms\": %.3f, "
		"\"pieces\": %llu, \"bytes\": %llu}\n", (double)times.open_ns / 1e6, (double)times.plan_ns / 1e6,
		(double)times.read_ns / 1e6, ms(begin), 1e3 * (double)(clock() - used) / CLOCKS_PER_SEC,
		(unsigned long long)done.pieces, (unsigned long long)done.placed);
	free(memory);
	load_fill_free(f);
	load_step_unref(step);
	commit_list_close(list);
}

/* ---- the same, call by call ---- */

static void parts(struct opening *o, const char *path, uint32_t rank)
{
	struct store_opened_part part;
	uint8_t bytes[EDGE * EDGE];
	struct proto_manifest m;
	struct commit_list *list;
	struct pack *pack;
	struct store_row row;
	uint64_t from = base_monotonic_ns();

	must(store_open(path, STORE_OPEN_READ_ONLY, &o->store, &o->err), o, "store");
	must(commit_list_open(o->store, "r", false, &list, &o->err), o, "list");
	printf("{\"list_ms\": %.3f, ", ms(from));
	from = base_monotonic_ns();
	must(store_manifest_get(o->store, "r", &commit_list_latest(list)->commit.manifest, &m, &o->err), o, "manifest");
	printf("\"manifest_ms\": %.3f, ", ms(from));
	from = base_monotonic_ns();
	must(store_open_layout(o->store, &m, 0, &o->layout, &o->err), o, "layout");
	printf("\"layouts_ms\": %.3f, ", ms(from));
	from = base_monotonic_ns();
	must(store_open_part(o->store, &m, rank, &part, &o->err), o, "part");
	printf("\"heads_ms\": %.3f, ", ms(from));
	from = base_monotonic_ns();
	must(store_part_read_row_cached(NULL, o->store, o->layout, &part.part, part.packs, part.npacks, 0, &row,
		&o->err), o, "row");
	printf("\"chunks_ms\": %.3f, ", ms(from));
	from = base_monotonic_ns();
	must(store_pack_get(o->store, part.packs[row.pieces[0].ref.pack], &pack, &o->err), o, "pack");
	must(pack_object_read(pack, &row.pieces[0].ref, bytes, &o->err), o, "piece");
	printf("\"read_ms\": %.3f}\n", ms(from));
	for (unsigned i = 0; i < sizeof bytes; i++)
		if (bytes[i] != item(rank, 0, i))
			must(-EIO, o, "another byte");
	store_pack_put(o->store, pack);
	store_row_release(&row);
	store_opened_part_release(&part);
	store_layout_free(o->layout);
	proto_manifest_release(&m);
	commit_list_close(list);
}

static uint32_t number(int argc, char **argv, int i) { return argc > i ? (uint32_t)strtoul(argv[i], NULL, 10) : 0; }

int main(int argc, char **argv)
{
	struct opening o = {0};

	if (argc == 6 && strcmp(argv[1], "make") == 0) {
		o.dp = number(argc, argv, 3), o.tp = number(argc, argv, 4), o.ntensors = number(argc, argv, 5);
		mesh_make(&o);
		must(store_open(argv[2], 0, &o.store, &o.err), &o, "store");
		step_make(&o);
	} else if (argc == 7 && strcmp(argv[1], "load") == 0) {
		o.dp = number(argc, argv, 3), o.tp = number(argc, argv, 4), o.ntensors = number(argc, argv, 6);
		load(&o, argv[2], number(argc, argv, 5));
	} else if (argc == 4 && strcmp(argv[1], "parts") == 0) {
		parts(&o, argv[2], number(argc, argv, 3));
	} else {
		fprintf(stderr, "usage: opening make STORE DP TP TENSORS | load STORE DP TP RANK TENSORS | "
			"parts STORE RANK\n");
		return 2;
	}
	tensor_mesh_free(o.mesh);
	free(o.words);
	store_close(o.store);
	return 0;
}
