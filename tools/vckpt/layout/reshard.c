/* SPDX-License-Identifier: Apache-2.0
 *
 * vckpt reshard: what every rank of a new layout needs, and which ranks of the old one have it. Opens no store.
 *
 * For each target rank, each of its boxes is a window into the source layout; the ranks whose shards meet it are found
 * by coordinate, not tried one by one. Of ranks that hold the same data one is read: the target itself where it is one
 * of them (the same rank number), else the first in mesh order. So every item of a target is read exactly once, and
 * the bytes of all sources of a rank add up to what it holds; that is checked.
 *
 * Two passes over the target ranks: the first only counts, so that too many boxes, and sums that do not fit, are
 * refused before the first byte. Memory: the boxes of one target rank. */
#include <inttypes.h>
#include <string.h>

#include "core/base/array.h"
#include "tools/vckpt/layout/layout_args.h"

#define RANK_BOXES_MAX (UINT64_C(1) << 22) /* of one target rank */
#define ALL_BOXES_MAX (UINT64_C(1) << 23)  /* of all: some seconds */
#define TRIES_MAX (UINT64_C(1) << 25)      /* boxes and ranks looked at to find them */
#define SHOWN_SOURCES 6

struct entry { uint32_t rank, box; uint64_t items; }; /* source rank, number in boxes */

struct reshard {
	struct tool *t;
	const char *shape_text, *dtype_text;
	struct tensor_shape shape;
	enum tensor_dtype dtype;
	struct tool_sharding from, to;
	struct tool_ranks ranks;
	bool counting;
	struct base_error err;
	/* of the target rank at hand */
	uint32_t rank;
	bool own;               /* it is in the source mesh too, at: */
	uint32_t at[TENSOR_MAX_DIMS], replicated;
	const struct tensor_box *window;
	struct entry *entries;
	size_t n, room;
	struct tensor_boxes boxes; /* JSON only */
	uint64_t bytes, own_bytes;
	/* of all */
	uint64_t seen, tries, total, moved;
	uint32_t readers;
};

static int add_entry(struct reshard *reshard, uint32_t rank, const struct tensor_box *box)
{
	bool full = reshard->n == RANK_BOXES_MAX;

	if (full || reshard->seen++ == ALL_BOXES_MAX)
		return base_error_set(&reshard->err, -BASE_ELIMIT,
			"--from-place %.200s --to-place %.200s: more than %" PRIu64 " boxes%s", reshard->from.place,
			reshard->to.place, full ? RANK_BOXES_MAX : ALL_BOXES_MAX, full ? " for one rank"
			: "; --rank N picks one rank");
	if (base_array_room(reshard->entries, reshard->room, reshard->n + 1) < 0)
		return -ENOMEM;
	reshard->entries[reshard->n] = (struct entry){.rank = rank, .box = (uint32_t)reshard->n,
		.items = tensor_box_items(&reshard->shape, box)};
	reshard->n++;
	return reshard->t->json && !reshard->counting ? tensor_boxes_add(&reshard->boxes, box) : 0;
}

static int too_many_tries(struct reshard *reshard)
{
	return base_error_set(&reshard->err, -BASE_ELIMIT,
		"--from-place %.200s --to-place %.200s: to find what is needed takes too long, more than %"
		PRIu64 " boxes and ranks%s", reshard->from.place, reshard->to.place, TRIES_MAX,
		reshard->ranks.one ? "" : "; --rank N picks one rank");
}

/* A source rank whose shard meets the window. */
static int add_source(void *arg, uint32_t rank, const uint32_t *coordinate)
{
	struct reshard *reshard = arg;
	struct tensor_shard shard;
	struct tensor_shard_iter it;
	/* the target holds the same: their coordinates differ only in replicated dimensions */
	bool same = reshard->own;
	int code;

	if (++reshard->tries > TRIES_MAX)
		return too_many_tries(reshard);
	for (uint32_t d = 0; same && d < reshard->from.mesh.mesh->ndim; d++)
		same = reshard->replicated >> d & 1 || coordinate[d] == reshard->at[d];
	if ((code = tensor_shard_of(&reshard->from.sharding, rank, NULL, &shard, &reshard->err)) < 0)
		return code;
	for (tensor_shard_first(&it, &shard, reshard->window); !it.done; tensor_shard_next(&it))
		if ((code = add_entry(reshard, same ? reshard->rank : rank, &it.at.box)) < 0)
			return code;
	return 0;
}

static int compare_entry(const void *x, const void *y)
{
	const struct entry *a = x, *b = y;

	if (a->rank != b->rank)
		return a->rank < b->rank ? -1 : 1;
	return a->box < b->box ? -1 : a->box > b->box;
}

/* Fills reshard->entries for target rank reshard->rank, by source rank. */
static int find_sources(struct reshard *reshard)
{
	struct tensor_shard shard;
	struct tensor_shard_iter it;
	uint64_t items = 0;
	int code = tensor_shard_of(&reshard->to.sharding, reshard->rank, NULL, &shard, &reshard->err);

	reshard->n = reshard->boxes.n = 0;
	reshard->bytes = reshard->own_bytes = 0;
	reshard->own = tensor_mesh_coordinate(reshard->from.mesh.mesh, reshard->rank, reshard->at) == 0;
	if (code < 0 || shard.absent)
		return code;
	for (tensor_shard_first(&it, &shard, NULL); !it.done; tensor_shard_next(&it)) {
		if (++reshard->tries > TRIES_MAX)
			return too_many_tries(reshard);
		reshard->window = &it.at.box;
		code = tensor_sharding_holders(&reshard->from.sharding, reshard->window, false, add_source, reshard);
		if (code < 0)
			return code;
	}
	if (reshard->n)
		qsort(reshard->entries, reshard->n, sizeof *reshard->entries, compare_entry);
	for (size_t i = 0; i < reshard->n; i++) {
		items += reshard->entries[i].items;
		reshard->own_bytes += reshard->entries[i].rank == reshard->rank
			? reshard->entries[i].items * reshard->from.sharding.item_bytes : 0;
	}
	reshard->bytes = items * reshard->from.sharding.item_bytes;
	if (base_add_overflows(reshard->total, reshard->bytes, &reshard->total))
		return base_error_set(&reshard->err, -EOVERFLOW,
			"--to-place %.200s: all ranks together hold more than 2^64-1 bytes"
			"; --rank N picks one rank", reshard->to.place);
	reshard->moved += reshard->bytes - reshard->own_bytes; /* at most the total */
	reshard->readers += reshard->bytes != reshard->own_bytes;
	return items == tensor_shard_items(&shard) ? 0
		: base_error_set(&reshard->err, -EIO, "rank %" PRIu32 " holds %" PRIu64 " items, but %" PRIu64
		" were found: a fault of vckpt", reshard->rank, tensor_shard_items(&shard), items);
}

/* The entries [first, returned) are of one source rank, and so many bytes. */
static size_t source_end(const struct reshard *reshard, size_t first, uint64_t *ret_bytes)
{
	size_t end = first;
	uint64_t items = 0;

	for (; end < reshard->n && reshard->entries[end].rank == reshard->entries[first].rank; end++)
		items += reshard->entries[end].items;
	*ret_bytes = items * reshard->from.sharding.item_bytes;
	return end;
}

/* ---- writing ---- */

static void print_rank_json(const struct reshard *reshard)
{
	uint64_t bytes;

	printf("{\"rank\": %" PRIu32 ", \"bytes\": %" PRIu64 ", \"from\": [", reshard->rank, reshard->bytes);
	for (size_t i = 0, end; i < reshard->n && !ferror(stdout); i = end) {
		end = source_end(reshard, i, &bytes);
		printf("%s{\"rank\": %" PRIu32 ", \"bytes\": %" PRIu64 ", \"boxes\": [", i ? ", " : "",
			reshard->entries[i].rank, bytes);
		for (size_t k = i; k < end; k++) {
			struct tensor_box box;

			tensor_boxes_get(&reshard->boxes, reshard->entries[k].box, &box);
			printf("%s{\"offset\": %s, \"size\": %s}", k > i ? ", " : "",
				TOOL_NUMBERS(reshard->shape.ndim, box.offset),
				TOOL_NUMBERS(reshard->shape.ndim, box.size));
		}
		fputs("]}", stdout);
	}
	fputs("]}", stdout);
}

static void print_line(const struct reshard *reshard, int width)
{
	char at[TOOL_SHAPE_TEXT];
	size_t sources = 0;
	uint64_t part;

	tool_coordinate_text(reshard->to.mesh.mesh, reshard->rank, at);
	printf("%8" PRIu32 "  %-*s  %9s  %9s", reshard->rank, width, at, TOOL_BYTES(reshard->bytes),
		TOOL_BYTES(reshard->own_bytes));
	for (size_t i = 0; i < reshard->n; sources++) {
		uint32_t source = reshard->entries[i].rank;

		i = source_end(reshard, i, &part);
		if (sources < SHOWN_SOURCES || reshard->ranks.one)
			printf("%s%" PRIu32 " (%s)", sources ? ", " : "  ", source, TOOL_BYTES(part));
	}
	if (sources > SHOWN_SOURCES && !reshard->ranks.one)
		printf(" and %zu more", sources - SHOWN_SOURCES);
	puts(sources ? "" : "  -");
}

static void print_side(const char *word, const struct tool_sharding *s)
{
	struct base_buf words base_cleanup_buf = BASE_BUF_INIT;

	base_buf_printf(&words, "%s ", word);
	tensor_mesh_print(s->mesh.mesh, &words);
	base_buf_append_text(&words, " as ");
	tensor_placements_print(s->placements->at, s->placements->n, &words);
	if (!words.error)
		printf(" %.*s", (int)words.len, (const char *)words.data);
}

static int print_head(const struct reshard *reshard)
{
	const struct tensor_mesh *m = reshard->to.mesh.mesh;
	char names[TOOL_NAMES_TEXT];
	int width = tool_coordinate_width(m);

	tool_names_text(m, UINT32_MAX, names);
	tool_tensor_print(&reshard->shape, reshard->dtype);
	print_side("from", &reshard->from);
	print_side("to", &reshard->to);
	printf("\n\n%8s  %-*s  %9s  %9s  from ranks\n", "rank", width, names, "needs", "has");
	return width;
}

static void print_end(const struct reshard *reshard, uint32_t count)
{
	if (reshard->t->json)
		printf("],\n \"bytes\": %" PRIu64 ", \"moved_bytes\": %" PRIu64 "}\n", reshard->total, reshard->moved);
	else
		printf("\n%" PRIu32 " of %" PRIu32 " %s from others; %s of %s in all\n", reshard->readers, count,
			base_plural(count, "rank reads", "ranks read"), TOOL_BYTES(reshard->moved),
			TOOL_BYTES(reshard->total));
}

/* The first pass. 0 or an exit code. */
static int count_boxes(struct reshard *reshard)
{
	int code = 0;

	reshard->counting = true;
	for (uint32_t i = 0; i < reshard->ranks.count && code == 0; i++) {
		reshard->rank = tool_ranks_at(&reshard->ranks, i);
		code = find_sources(reshard);
	}
	reshard->counting = false;
	reshard->seen = reshard->tries = reshard->total = reshard->moved = reshard->readers = 0;
	reshard->err.code = code;
	return code < 0 ? tool_fail(reshard->t, &reshard->err) : 0;
}

static int print_ranks(struct reshard *reshard)
{
	uint32_t count = reshard->ranks.count;
	int width = 0;

	if (reshard->t->json)
		fputs("{\"ranks\": [", stdout);
	else
		width = print_head(reshard);
	for (uint32_t i = 0; i < count && !ferror(stdout); i++) {
		reshard->rank = tool_ranks_at(&reshard->ranks, i);
		int code = find_sources(reshard);

		if (code < 0) {
			reshard->err.code = code;
			return tool_fail(reshard->t, &reshard->err);
		}
		if (reshard->t->json) {
			fputs(i ? ",\n  " : "\n  ", stdout);
			print_rank_json(reshard);
		} else {
			print_line(reshard, width);
		}
	}
	print_end(reshard, count);
	return tool_output_end(reshard->t);
}

/* ---- the command ---- */

static int read_arguments(struct reshard *reshard)
{
	int code = tool_tensor_read(reshard->t, reshard->shape_text, reshard->dtype_text, &reshard->shape,
		&reshard->dtype);

	if (!code)
		code = tool_sharding_read(reshard->t, &reshard->shape, tensor_dtype_bytes(reshard->dtype),
			&reshard->from);
	if (!code)
		code = tool_sharding_read(reshard->t, &reshard->shape, tensor_dtype_bytes(reshard->dtype),
			&reshard->to);
	if (!code)
		code = tool_ranks_read(reshard->t, &reshard->ranks, &reshard->to.mesh);
	if (code)
		return code;
	reshard->replicated = tensor_sharding_replicated(&reshard->from.sharding);
	reshard->boxes.ndim = reshard->shape.ndim;
	return 0;
}

static int reshard_run(struct tool *t, int argc, char **argv)
{
	struct reshard reshard = {.t = t,
		.from = {.place_option = "--from-place", .mesh = {.option = "--from-mesh",
			.order_option = "--from-rank-order"}},
		.to = {.place_option = "--to-place", .mesh = {.option = "--to-mesh",
			.order_option = "--to-rank-order"}}};
	const struct tool_option options[] = {{"shape", .text = &reshard.shape_text},
		{"dtype", .text = &reshard.dtype_text}, {"from-mesh", .text = &reshard.from.mesh.text},
		{"from-rank-order", .text = &reshard.from.mesh.order}, {"from-place", .text = &reshard.from.place},
		{"to-mesh", .text = &reshard.to.mesh.text}, {"to-rank-order", .text = &reshard.to.mesh.order},
		{"to-place", .text = &reshard.to.place}, {"rank", .text = &reshard.ranks.text}, {0}};
	int code = tool_parse(t, argc, argv, options);

	if (code == 0 && (code = read_arguments(&reshard)) == 0 && (code = count_boxes(&reshard)) == 0) {
		tool_output_begin();
		code = print_ranks(&reshard);
	}
	tool_sharding_release(&reshard.from);
	tool_sharding_release(&reshard.to);
	tensor_boxes_release(&reshard.boxes);
	free(reshard.entries);
	return code;
}

const struct tool_command tool_reshard = {"reshard", "say what ranks of a new layout need of which old ones",
	"usage: vckpt reshard --shape N,N,... --dtype TYPE --from-mesh MESH --from-place WORDS --to-mesh MESH\n"
	"                     --to-place WORDS [--from-rank-order R,..] [--to-rank-order R,..] [--rank N]\n"
	"                     [--json] [-q] [-v]\n\n"
	"Says, for every rank of the layout \"to\", of which ranks of the layout \"from\" it needs boxes, and how\n"
	"many bytes. Of ranks that hold the same, a rank takes itself, else the first in mesh order. Needs no\n"
	"store.\n\n"
	"  --shape, --dtype           the tensor, as in vckpt layout\n"
	"  --from-mesh, --to-mesh     names and sizes, outermost first, as dp=2,tp=4; JSON text; or @FILE with JSON\n"
	"  --from-place, --to-place   one word for each dimension of the mesh, as R,S(0)\n"
	"  --from-rank-order, --to-rank-order\n"
	"                             the rank at each place of the mesh; by default 0,1,2,...\n"
	"  --rank N                   of this target rank only\n",
	reshard_run};
