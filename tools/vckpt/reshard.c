/* SPDX-License-Identifier: Apache-2.0
 *
 * vckpt reshard: what every rank of a new layout needs of which ranks of the old one. Opens no store.
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
#include "tools/vckpt/layout_args.h"

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
	bool own;               /* it stands in the source mesh too, at: */
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

static int add_entry(struct reshard *r, uint32_t rank, const struct tensor_box *box)
{
	bool full = r->n == RANK_BOXES_MAX;

	if (full || r->seen++ == ALL_BOXES_MAX)
		return base_error_set(&r->err, -BASE_ELIMIT, "--from-place %.200s --to-place %.200s: more than %" PRIu64
			" boxes%s", r->from.place, r->to.place, full ? RANK_BOXES_MAX : ALL_BOXES_MAX,
			full ? " for one rank" : "; --rank N tells of one rank");
	if (base_array_room(r->entries, r->room, r->n + 1) < 0)
		return -ENOMEM;
	r->entries[r->n] = (struct entry){.rank = rank, .box = (uint32_t)r->n,
		.items = tensor_box_items(&r->shape, box)};
	r->n++;
	return r->t->json && !r->counting ? tensor_boxes_add(&r->boxes, box) : 0;
}

static int too_many_tries(struct reshard *r)
{
	return base_error_set(&r->err, -BASE_ELIMIT, "--from-place %.200s --to-place %.200s: to find what is needed "
		"takes too long, more than %" PRIu64 " boxes and ranks%s", r->from.place, r->to.place, TRIES_MAX,
		r->ranks.one ? "" : "; --rank N tells of one rank");
}

/* A source rank whose shard meets the window. */
static int add_source(void *arg, uint32_t rank, const uint32_t *coordinate)
{
	struct reshard *r = arg;
	struct tensor_shard shard;
	struct tensor_shard_iter it;
	bool same = r->own; /* the target holds what this one does: they differ where the source is replicated only */
	int code;

	if (++r->tries > TRIES_MAX)
		return too_many_tries(r);
	for (uint32_t d = 0; same && d < r->from.mesh.mesh->ndim; d++)
		same = r->replicated >> d & 1 || coordinate[d] == r->at[d];
	if ((code = tensor_shard_of(&r->from.sharding, rank, NULL, &shard, &r->err)) < 0)
		return code;
	for (tensor_shard_first(&it, &shard, r->window); !it.done; tensor_shard_next(&it))
		if ((code = add_entry(r, same ? r->rank : rank, &it.at.box)) < 0)
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

/* Fills r->entries for target rank r->rank, by source rank. */
static int find_sources(struct reshard *r)
{
	struct tensor_shard shard;
	struct tensor_shard_iter it;
	uint64_t items = 0;
	int code = tensor_shard_of(&r->to.sharding, r->rank, NULL, &shard, &r->err);

	r->n = r->boxes.n = 0;
	r->bytes = r->own_bytes = 0;
	r->own = tensor_mesh_coordinate(r->from.mesh.mesh, r->rank, r->at) == 0;
	if (code < 0 || shard.absent)
		return code;
	for (tensor_shard_first(&it, &shard, NULL); !it.done; tensor_shard_next(&it)) {
		if (++r->tries > TRIES_MAX)
			return too_many_tries(r);
		r->window = &it.at.box;
		code = tensor_sharding_holders(&r->from.sharding, r->window, false, add_source, r);
		if (code < 0)
			return code;
	}
	if (r->n)
		qsort(r->entries, r->n, sizeof *r->entries, compare_entry);
	for (size_t i = 0; i < r->n; i++) {
		items += r->entries[i].items;
		r->own_bytes += r->entries[i].rank == r->rank ? r->entries[i].items * r->from.sharding.item_bytes : 0;
	}
	r->bytes = items * r->from.sharding.item_bytes;
	if (base_add_overflows(r->total, r->bytes, &r->total))
		return base_error_set(&r->err, -EOVERFLOW, "--to-place %.200s: all ranks together hold more than 2^64-1"
			" bytes; --rank N tells of one rank", r->to.place);
	r->moved += r->bytes - r->own_bytes; /* at most the total */
	r->readers += r->bytes != r->own_bytes;
	return items == tensor_shard_items(&shard) ? 0 : base_error_set(&r->err, -EIO, "rank %" PRIu32 " holds %" PRIu64
		" items, but %" PRIu64 " were found: a fault of vckpt", r->rank, tensor_shard_items(&shard), items);
}

/* The entries [first, returned) are of one source rank, and so many bytes. */
static size_t source_end(const struct reshard *r, size_t first, uint64_t *ret_bytes)
{
	size_t end = first;
	uint64_t items = 0;

	for (; end < r->n && r->entries[end].rank == r->entries[first].rank; end++)
		items += r->entries[end].items;
	*ret_bytes = items * r->from.sharding.item_bytes;
	return end;
}

/* ---- writing ---- */

static void print_rank_json(const struct reshard *r)
{
	uint64_t bytes;

	printf("{\"rank\": %" PRIu32 ", \"bytes\": %" PRIu64 ", \"from\": [", r->rank, r->bytes);
	for (size_t i = 0, end; i < r->n && !ferror(stdout); i = end) {
		end = source_end(r, i, &bytes);
		printf("%s{\"rank\": %" PRIu32 ", \"bytes\": %" PRIu64 ", \"boxes\": [", i ? ", " : "",
			r->entries[i].rank, bytes);
		for (size_t k = i; k < end; k++) {
			struct tensor_box box;

			tensor_boxes_get(&r->boxes, r->entries[k].box, &box);
			printf("%s{\"offset\": ", k > i ? ", " : "");
			tool_json_numbers(box.offset, r->shape.ndim);
			fputs(", \"size\": ", stdout);
			tool_json_numbers(box.size, r->shape.ndim);
			putchar('}');
		}
		fputs("]}", stdout);
	}
	fputs("]}", stdout);
}

static void print_line(const struct reshard *r, int width)
{
	char at[TOOL_SHAPE_TEXT], bytes[32], own[32];
	size_t sources = 0;
	uint64_t part;

	tool_coordinate_text(r->to.mesh.mesh, r->rank, at);
	tool_format_bytes(r->bytes, bytes);
	tool_format_bytes(r->own_bytes, own);
	printf("%8" PRIu32 "  %-*s  %9s  %9s", r->rank, width, at, bytes, own);
	for (size_t i = 0; i < r->n; sources++) {
		uint32_t source = r->entries[i].rank;

		i = source_end(r, i, &part);
		tool_format_bytes(part, bytes);
		if (sources < SHOWN_SOURCES || r->ranks.one)
			printf("%s%" PRIu32 " (%s)", sources ? ", " : "  ", source, bytes);
	}
	if (sources > SHOWN_SOURCES && !r->ranks.one)
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

static int print_head(const struct reshard *r)
{
	const struct tensor_mesh *m = r->to.mesh.mesh;
	char names[TOOL_NAMES_TEXT];
	int width = tool_coordinate_width(m);

	tool_names_text(m, UINT32_MAX, names);
	tool_tensor_print(&r->shape, r->dtype);
	print_side("from", &r->from);
	print_side("to", &r->to);
	printf("\n\n%8s  %-*s  %9s  %9s  from ranks\n", "rank", width, names, "needs", "has");
	return width;
}

static void print_end(const struct reshard *r, uint32_t count)
{
	char moved[32], total[32];

	tool_format_bytes(r->moved, moved);
	tool_format_bytes(r->total, total);
	if (r->t->json)
		printf("],\n \"bytes\": %" PRIu64 ", \"moved_bytes\": %" PRIu64 "}\n", r->total, r->moved);
	else
		printf("\n%" PRIu32 " of %" PRIu32 " %s from others; %s of %s in all\n", r->readers, count,
			base_plural(count, "rank reads", "ranks read"), moved, total);
}

/* The first pass. 0 or an exit code, said. */
static int count_boxes(struct reshard *r)
{
	uint32_t count = tool_ranks_count(&r->ranks, r->to.mesh.mesh);
	int code = 0;

	r->counting = true;
	for (uint32_t i = 0; i < count && code == 0; i++) {
		r->rank = tool_ranks_at(&r->ranks, r->to.mesh.mesh, i);
		code = find_sources(r);
	}
	r->counting = false;
	r->seen = r->tries = r->total = r->moved = r->readers = 0;
	r->err.code = code;
	return code < 0 ? tool_fail(r->t, &r->err) : 0;
}

static int print_ranks(struct reshard *r)
{
	uint32_t count = tool_ranks_count(&r->ranks, r->to.mesh.mesh);
	int width = 0;

	if (r->t->json)
		fputs("{\"ranks\": [", stdout);
	else
		width = print_head(r);
	for (uint32_t i = 0; i < count && !ferror(stdout); i++) {
		r->rank = tool_ranks_at(&r->ranks, r->to.mesh.mesh, i);
		int code = find_sources(r);

		if (code < 0) {
			r->err.code = code;
			return tool_fail(r->t, &r->err);
		}
		if (r->t->json) {
			fputs(i ? ",\n  " : "\n  ", stdout);
			print_rank_json(r);
		} else {
			print_line(r, width);
		}
	}
	print_end(r, count);
	return tool_output_end(r->t);
}

/* ---- the command ---- */

static int option(struct tool *t, void *arg, int val, const char *value)
{
	struct reshard *r = arg;

	switch (val) {
	case 's': r->shape_text = value; return 0;
	case 'd': r->dtype_text = value; return 0;
	case 'm': r->from.mesh.text = value; return 0;
	case 'o': r->from.mesh.order = value; return 0;
	case 'p': r->from.place = value; return 0;
	case 'M': r->to.mesh.text = value; return 0;
	case 'O': r->to.mesh.order = value; return 0;
	case 'P': r->to.place = value; return 0;
	case 'r': r->ranks.text = value; return 0;
	default: return tool_usage(t, "unexpected argument \"%s\"", value ? value : "");
	}
}

static int read_arguments(struct reshard *r)
{
	int code = tool_tensor_read(r->t, r->shape_text, r->dtype_text, &r->shape, &r->dtype);

	if (!code)
		code = tool_sharding_read(r->t, &r->shape, tensor_dtype_bytes(r->dtype), &r->from);
	if (!code)
		code = tool_sharding_read(r->t, &r->shape, tensor_dtype_bytes(r->dtype), &r->to);
	if (!code)
		code = tool_ranks_read(r->t, &r->ranks);
	if (!code)
		code = tool_ranks_check(r->t, &r->ranks, &r->to.mesh);
	if (code)
		return code;
	r->replicated = tensor_sharding_replicated(&r->from.sharding);
	r->boxes.ndim = r->shape.ndim;
	return 0;
}

static int reshard_run(struct tool *t, int argc, char **argv)
{
	static const struct option options[] = {{"shape", required_argument, NULL, 's'},
		{"dtype", required_argument, NULL, 'd'}, {"from-mesh", required_argument, NULL, 'm'},
		{"from-rank-order", required_argument, NULL, 'o'}, {"from-place", required_argument, NULL, 'p'},
		{"to-mesh", required_argument, NULL, 'M'}, {"to-rank-order", required_argument, NULL, 'O'},
		{"to-place", required_argument, NULL, 'P'}, {"rank", required_argument, NULL, 'r'}, {0}};
	struct reshard r = {.t = t,
		.from = {.place_option = "--from-place", .mesh = {.option = "--from-mesh",
			.order_option = "--from-rank-order"}},
		.to = {.place_option = "--to-place", .mesh = {.option = "--to-mesh",
			.order_option = "--to-rank-order"}}};
	int code = tool_parse(t, argc, argv, NULL, options, option, &r);

	if (code)
		return code - TOOL_LEAVE;
	if ((code = read_arguments(&r)) == 0 && (code = count_boxes(&r)) == 0) {
		tool_output_begin();
		code = print_ranks(&r);
	}
	tool_sharding_release(&r.from);
	tool_sharding_release(&r.to);
	tensor_boxes_release(&r.boxes);
	free(r.entries);
	return code;
}

const struct tool_command tool_reshard = {"reshard", "say what ranks of a new layout need of which old ones",
	"usage: vckpt reshard --shape N,N,... --dtype TYPE --from-mesh MESH --from-place WORDS --to-mesh MESH\n"
	"                     --to-place WORDS [--from-rank-order R,..] [--to-rank-order R,..] [--rank N]\n"
	"                     [--json] [-q] [-v]\n\n"
	"Tells, for every rank of the layout \"to\", of which ranks of the layout \"from\" it needs boxes, and how\n"
	"many bytes. Of ranks that hold the same, a rank takes itself, else the first in mesh order. Needs no\n"
	"store.\n\n"
	"  --shape, --dtype           the tensor, as in vckpt layout\n"
	"  --from-mesh, --to-mesh     names and sizes, outermost first, as dp=2,tp=4; JSON text; or @FILE with JSON\n"
	"  --from-place, --to-place   one word for each dimension of the mesh, as R,S(0)\n"
	"  --from-rank-order, --to-rank-order\n"
	"                             the rank at each place of the mesh; by default 0,1,2,...\n"
	"  --rank N                   of this target rank only\n",
	reshard_run};
