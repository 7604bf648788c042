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

static int add_entry(struct reshard *c, uint32_t rank, const struct tensor_box *box)
{
	bool full = c->n == RANK_BOXES_MAX;

	if (full || c->seen++ == ALL_BOXES_MAX)
		return base_error_set(&c->err, -BASE_ELIMIT,
			"--from-place %.200s --to-place %.200s: more than %" PRIu64 " boxes%s", c->from.place,
			c->to.place, full ? RANK_BOXES_MAX : ALL_BOXES_MAX, full ? " for one rank"
			: "; --rank N picks one rank");
	if (base_array_room(c->entries, c->room, c->n + 1) < 0)
		return -ENOMEM;
	c->entries[c->n] = (struct entry){rank, (uint32_t)c->n, tensor_box_items(&c->shape, box)};
	c->n++;
	return c->t->json && !c->counting ? tensor_boxes_add(&c->boxes, box) : 0;
}

static int too_many_tries(struct reshard *c)
{
	return base_error_set(&c->err, -BASE_ELIMIT,
		"--from-place %.200s --to-place %.200s: to find what is needed takes too long, more than %"
		PRIu64 " boxes and ranks%s", c->from.place, c->to.place, TRIES_MAX,
		c->ranks.one ? "" : "; --rank N picks one rank");
}

/* A source rank whose shard meets the window. */
static int add_source(void *arg, uint32_t rank, const uint32_t *coordinate)
{
	struct reshard *c = arg;
	struct tensor_shard shard;
	struct tensor_shard_iter it;
	/* the target holds the same: their coordinates differ only in replicated dimensions */
	bool same = c->own;
	int code;

	if (++c->tries > TRIES_MAX)
		return too_many_tries(c);
	for (uint32_t d = 0; same && d < c->from.mesh.mesh->ndim; d++)
		same = c->replicated >> d & 1 || coordinate[d] == c->at[d];
	if ((code = tensor_shard_of(&c->from.sharding, rank, NULL, &shard, &c->err)) < 0)
		return code;
	for (tensor_shard_first(&it, &shard, c->window); !it.done; tensor_shard_next(&it))
		if ((code = add_entry(c, same ? c->rank : rank, &it.at.box)) < 0)
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

/* Fills c->entries for target rank c->rank, by source rank. */
static int find_sources(struct reshard *c)
{
	struct tensor_shard shard;
	struct tensor_shard_iter it;
	uint64_t items = 0, own_items = 0;
	int code = tensor_shard_of(&c->to.sharding, c->rank, NULL, &shard, &c->err);

	c->n = c->boxes.n = 0;
	c->bytes = c->own_bytes = 0;
	c->own = tensor_mesh_coordinate(c->from.mesh.mesh, c->rank, c->at) == 0;
	if (code < 0 || shard.absent)
		return code;
	for (tensor_shard_first(&it, &shard, NULL); !it.done; tensor_shard_next(&it)) {
		if (++c->tries > TRIES_MAX)
			return too_many_tries(c);
		c->window = &it.at.box;
		code = tensor_sharding_holders(&c->from.sharding, c->window, false, add_source, c);
		if (code < 0)
			return code;
	}
	if (c->n)
		qsort(c->entries, c->n, sizeof *c->entries, compare_entry);
	for (size_t i = 0; i < c->n; i++) {
		items += c->entries[i].items;
		own_items += c->entries[i].rank == c->rank ? c->entries[i].items : 0;
	}
	c->own_bytes = own_items * c->from.sharding.item_bytes;
	c->bytes = items * c->from.sharding.item_bytes;
	if (base_add_overflows(c->total, c->bytes, &c->total))
		return base_error_set(&c->err, -EOVERFLOW,
			"--to-place %.200s: all ranks together hold more than 2^64-1 bytes"
			"; --rank N picks one rank", c->to.place);
	c->moved += c->bytes - c->own_bytes; /* at most the total */
	c->readers += c->bytes != c->own_bytes;
	return items == tensor_shard_items(&shard) ? 0
		: base_error_set(&c->err, -EIO, "rank %" PRIu32 " holds %" PRIu64 " items, but %" PRIu64
		" were found: a fault of vckpt", c->rank, tensor_shard_items(&shard), items);
}

/* The entries [first, returned) are of one source rank, and so many bytes. */
static size_t source_end(const struct reshard *c, size_t first, uint64_t *ret_bytes)
{
	size_t end = first;
	uint64_t items = 0;

	for (; end < c->n && c->entries[end].rank == c->entries[first].rank; end++)
		items += c->entries[end].items;
	*ret_bytes = items * c->from.sharding.item_bytes;
	return end;
}

/* ---- writing ---- */

static void print_rank_json(const struct reshard *c)
{
	uint64_t bytes;

	printf("{\"rank\": %" PRIu32 ", \"bytes\": %" PRIu64 ", \"from\": [", c->rank, c->bytes);
	for (size_t i = 0, end; i < c->n && !ferror(stdout); i = end) {
		end = source_end(c, i, &bytes);
		printf("%s{\"rank\": %" PRIu32 ", \"bytes\": %" PRIu64 ", \"boxes\": [", i ? ", " : "",
			c->entries[i].rank, bytes);
		for (size_t k = i; k < end; k++) {
			struct tensor_box box;

			tensor_boxes_get(&c->boxes, c->entries[k].box, &box);
			printf("%s{\"offset\": %s, \"size\": %s}", k > i ? ", " : "",
				TOOL_NUMBERS(c->shape.ndim, box.offset), TOOL_NUMBERS(c->shape.ndim, box.size));
		}
		fputs("]}", stdout);
	}
	fputs("]}", stdout);
}

static void print_line(const struct reshard *c, int width)
{
	size_t sources = 0;
	uint64_t part;

	printf("%8" PRIu32 "  %-*s  %9s  %9s", c->rank, width, TOOL_COORDINATE(c->to.mesh.mesh, c->rank),
		TOOL_BYTES(c->bytes), TOOL_BYTES(c->own_bytes));
	for (size_t i = 0; i < c->n; sources++) {
		uint32_t source = c->entries[i].rank;

		i = source_end(c, i, &part);
		if (sources < SHOWN_SOURCES || c->ranks.one)
			printf("%s%" PRIu32 " (%s)", sources ? ", " : "  ", source, TOOL_BYTES(part));
	}
	if (sources > SHOWN_SOURCES && !c->ranks.one)
		printf(" and %zu more", sources - SHOWN_SOURCES);
	puts(sources ? "" : "  -");
}

static int print_head(const struct reshard *c)
{
	const struct tensor_mesh *m = c->to.mesh.mesh;
	int width = tool_coordinate_width(m);

	tool_tensor_print(&c->shape, c->dtype);
	fputs(" from", stdout);
	tool_sharding_print(&c->from);
	fputs(" to", stdout);
	tool_sharding_print(&c->to);
	printf("\n\n%8s  %-*s  %9s  %9s  from ranks\n", "rank", width, TOOL_NAMES(m, UINT32_MAX), "needs", "has");
	return width;
}

static void print_end(const struct reshard *c, uint32_t count)
{
	if (c->t->json)
		printf("],\n \"bytes\": %" PRIu64 ", \"moved_bytes\": %" PRIu64 "}\n", c->total, c->moved);
	else
		printf("\n%" PRIu32 " of %" PRIu32 " %s from others; %s of %s in all\n", c->readers, count,
			base_plural(count, "rank reads", "ranks read"), TOOL_BYTES(c->moved), TOOL_BYTES(c->total));
}

/* One pass over the target ranks, the first with `counting`. 0 or an exit code. */
static int each_rank(struct reshard *c, int width)
{
	c->seen = c->tries = c->total = c->moved = c->readers = 0;
	for (uint32_t i = 0; i < c->ranks.count && !ferror(stdout); i++) {
		c->rank = tool_ranks_at(&c->ranks, i);
		c->err.code = find_sources(c);
		if (c->err.code < 0)
			return tool_fail(c->t, &c->err);
		if (c->counting)
			continue;
		if (c->t->json) {
			fputs(i ? ",\n  " : "\n  ", stdout);
			print_rank_json(c);
		} else {
			print_line(c, width);
		}
	}
	return 0;
}

static int print_ranks(struct reshard *c)
{
	int width = 0, code;

	if (c->t->json)
		fputs("{\"ranks\": [", stdout);
	else
		width = print_head(c);
	code = each_rank(c, width);
	if (code)
		return code;
	print_end(c, c->ranks.count);
	return tool_output_end(c->t);
}

/* ---- the command ---- */

static int read_arguments(struct reshard *c)
{
	int code = tool_tensor_read(c->t, c->shape_text, c->dtype_text, &c->shape, &c->dtype);

	if (!code)
		code = tool_sharding_read(c->t, &c->shape, tensor_dtype_bytes(c->dtype), &c->from);
	if (!code)
		code = tool_sharding_read(c->t, &c->shape, tensor_dtype_bytes(c->dtype), &c->to);
	if (!code)
		code = tool_ranks_read(c->t, &c->ranks, &c->to.mesh);
	if (code)
		return code;
	c->replicated = tensor_sharding_replicated(&c->from.sharding);
	c->boxes.ndim = c->shape.ndim;
	return 0;
}

static int reshard_run(struct tool *t, int argc, char **argv)
{
	struct reshard c = {.t = t,
		.from = {.place_option = "--from-place", .mesh = {.option = "--from-mesh",
			.order_option = "--from-rank-order"}},
		.to = {.place_option = "--to-place", .mesh = {.option = "--to-mesh",
			.order_option = "--to-rank-order"}}, .counting = true};
	const struct tool_option options[] = {{"shape", .text = &c.shape_text}, {"dtype", .text = &c.dtype_text},
		{"from-mesh", .text = &c.from.mesh.text}, {"from-rank-order", .text = &c.from.mesh.order},
		{"from-place", .text = &c.from.place}, {"to-mesh", .text = &c.to.mesh.text},
		{"to-rank-order", .text = &c.to.mesh.order}, {"to-place", .text = &c.to.place},
		{"rank", .text = &c.ranks.text}, {0}};
	int code = tool_parse(t, argc, argv, options);

	if (code == 0 && (code = read_arguments(&c)) == 0 && (code = each_rank(&c, 0)) == 0) {
		c.counting = false;
		tool_output_begin();
		code = print_ranks(&c);
	}
	tool_sharding_release(&c.from);
	tool_sharding_release(&c.to);
	tensor_boxes_release(&c.boxes);
	free(c.entries);
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
