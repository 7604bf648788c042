/* SPDX-License-Identifier: Apache-2.0
 *
 * vckpt layout: which rank holds what of one tensor, by shape, mesh and placements. Opens no store. (With --check it is
 * another command: layout_check.c.)
 *
 * Two passes over the ranks that are asked for: the first finds what is wrong for any of them (a flat range past the
 * end of one) and, where all boxes will be written, counts these; the second writes each rank as it goes, so that
 * memory does not grow with the mesh. The table of all ranks shows a few boxes of each, and says how many more there
 * are where that takes no walk. */
#include <inttypes.h>
#include <string.h>

#include "tools/vckpt/layout/layout.h"

#define BOXES_MAX (UINT64_C(1) << 23) /* that are written: some seconds; beyond, --rank picks */
#define SHOWN_BOXES 8 /* of a rank, in the table of all ranks */

int layout_shard(const struct layout *l, uint32_t rank, struct tensor_shard *ret_shard, struct base_error *err)
{
	return tensor_shard_of(&l->on.sharding, rank, l->flat_text ? &l->flat : NULL, ret_shard, err);
}

/* If no dimension is divided by more than one placement, tensor_shard_box_count does not walk. */
static bool countable(const struct tool_sharding *on)
{
	uint32_t parted = 0;

	for (uint32_t m = 0; m < on->mesh.mesh->ndim; m++) {
		const struct tensor_placement *p = &on->placements->at[m];
		uint32_t bit = p->dim < TENSOR_MAX_DIMS ? UINT32_C(1) << p->dim : 0;

		if ((p->kind != TENSOR_STRIDED_SHARD && p->kind != TENSOR_INTERLEAVED_SHARD) ||
			on->mesh.mesh->size[m] == 1)
			continue;
		if (parted & bit)
			return false;
		parted |= bit;
	}
	return true;
}

/* Boxes of a shard; of more than `most`, any larger number. */
static uint64_t count_boxes(const struct layout *l, const struct tensor_shard *shard, uint64_t most)
{
	struct tensor_shard_iter it;
	uint64_t n = 0;

	if (shard->absent || l->countable)
		return shard->absent ? 0 : tensor_shard_box_count(shard);
	for (tensor_shard_first(&it, shard, NULL); !it.done && n <= most; tensor_shard_next(&it))
		n++;
	return n;
}

/* 0 or an exit code. */
static int check_ranks(struct layout *l)
{
	struct base_error err = {0};
	struct tensor_shard shard;
	bool all = l->t->json || (l->ranks.one && !l->draw); /* are written */

	l->countable = countable(&l->on);
	for (uint32_t i = 0; (all || l->flat_text) && i < l->ranks.count; i++) {
		if (layout_shard(l, tool_ranks_at(&l->ranks, i), &shard, &err) < 0)
			return tool_usage(l->t, "--flat %.200s: %s", l->flat_text ? l->flat_text : "",
				err.text[0] ? err.text : base_error_name(err.code));
		if (!all)
			continue;
		if (base_add_overflows(l->boxes, count_boxes(l, &shard, BOXES_MAX - l->boxes), &l->boxes) ||
			l->boxes > BOXES_MAX)
			return tool_failed(l->t, "--place %.200s: more than %" PRIu64 " boxes%s", l->on.place,
				BOXES_MAX, l->ranks.one ? "" : "; --rank N picks one rank");
	}
	return 0;
}

/* ---- JSON ---- */

static void print_rank_json(const struct layout *l, uint32_t rank, const struct tensor_shard *shard)
{
	uint32_t at[TENSOR_MAX_DIMS], ndim = l->shape.ndim;
	struct tensor_shard_iter it;
	const char *comma = "";

	printf("{\"rank\": %" PRIu32 ", \"coordinate\": ", rank);
	if (shard->absent || tensor_mesh_coordinate(l->on.mesh.mesh, rank, at) < 0) {
		fputs("null, \"local_shape\": null, \"boxes\": []}", stdout);
		return;
	}
	tool_json_numbers32(at, l->on.mesh.mesh->ndim);
	printf(", \"local_shape\": %s, \"boxes\": [", TOOL_SHAPE(&shard->local_shape));
	for (tensor_shard_first(&it, shard, NULL); !it.done && !ferror(stdout); tensor_shard_next(&it)) {
		printf("%s{\"offset\": %s, \"size\": %s, \"local_offset\": %" PRIu64 ", \"local_stride\": %s}", comma,
			TOOL_NUMBERS(ndim, it.at.box.offset), TOOL_NUMBERS(ndim, it.at.box.size), it.at.local_offset,
			TOOL_NUMBERS(ndim, it.at.local_stride));
		comma = ", ";
	}
	fputs("]}", stdout);
}

static int print_json(const struct layout *l)
{
	struct base_error err = {0};
	struct tensor_shard shard;

	fputs("{\"mesh\": ", stdout);
	tool_mesh_print_json(l->on.mesh.mesh);
	printf(",\n \"shape\": %s, \"dtype\": \"%s\",\n \"ranks\": [", TOOL_SHAPE(&l->shape),
		tensor_dtype_name(l->dtype));
	for (uint32_t i = 0; i < l->ranks.count && !ferror(stdout); i++) {
		uint32_t rank = tool_ranks_at(&l->ranks, i);

		if (layout_shard(l, rank, &shard, &err) < 0)
			return tool_fail(l->t, &err);
		fputs(i ? ",\n  " : "\n  ", stdout);
		print_rank_json(l, rank, &shard);
	}
	fputs("]}\n", stdout);
	return tool_output_end(l->t);
}

/* ---- tables ---- */

static void print_head(const struct layout *l)
{
	tool_tensor_print(&l->shape, l->dtype);
	fputs(" on", stdout);
	tool_sharding_print(&l->on);
	if (l->flat_text)
		printf(", items %s of each", l->flat_text);
	fputs("\n\n", stdout);
}

static void print_boxes(const struct layout *l, const struct tensor_shard *shard)
{
	struct tensor_shard_iter it;
	uint64_t shown = 0;
	char text[TOOL_BOX_TEXT];

	for (tensor_shard_first(&it, shard, NULL); !it.done && shown < SHOWN_BOXES; tensor_shard_next(&it), shown++) {
		tensor_box_text(l->shape.ndim, &it.at.box, text, sizeof text);
		printf("  %s", text);
	}
	if (!it.done && l->countable)
		printf("  and %" PRIu64 " more", tensor_shard_box_count(shard) - shown);
	else if (!it.done || shown == 0)
		fputs(shown ? "  and more" : "  -", stdout);
	putchar('\n');
}

static int print_table(const struct layout *l)
{
	const struct tensor_mesh *m = l->on.mesh.mesh;
	struct base_error err = {0};
	struct tensor_shard shard;
	/* of the widest local shape, or a little less: a longer one only pushes its line */
	int width = tool_coordinate_width(m), room = (int)base_max(strlen(TOOL_SHAPE(&l->shape)), 11);

	print_head(l);
	printf("%8s  %-*s  %-*s  %9s  boxes\n", "rank", width, TOOL_NAMES(m, UINT32_MAX), room, "local shape", "bytes");
	for (uint32_t i = 0; i < l->ranks.count && !ferror(stdout); i++) {
		uint32_t rank = tool_ranks_at(&l->ranks, i);

		if (layout_shard(l, rank, &shard, &err) < 0)
			return tool_fail(l->t, &err);
		printf("%8" PRIu32 "  %-*s  %-*s  %9s", rank, width, TOOL_COORDINATE(m, rank), room,
			TOOL_SHAPE(&shard.local_shape),
			TOOL_BYTES(tensor_shard_items(&shard) * tensor_dtype_bytes(l->dtype)));
		print_boxes(l, &shard);
	}
	return tool_output_end(l->t);
}

/* Everything of one rank: a line for each box, with its place in the local buffer. */
static int print_rank(const struct layout *l)
{
	const struct tensor_mesh *m = l->on.mesh.mesh;
	char text[TOOL_BOX_TEXT];
	struct base_error err = {0};
	struct tensor_shard_iter it;
	struct tensor_shard shard;

	if (layout_shard(l, l->ranks.rank, &shard, &err) < 0)
		return tool_fail(l->t, &err);
	print_head(l);
	if (shard.absent) {
		printf("rank %" PRIu32 " is not in the mesh: it holds nothing\n", l->ranks.rank);
		return tool_output_end(l->t);
	}
	printf("rank %" PRIu32 " at %s = %s: local shape %s, %s in %s\n", l->ranks.rank, TOOL_NAMES(m, UINT32_MAX),
		TOOL_COORDINATE(m, l->ranks.rank), TOOL_SHAPE(&shard.local_shape),
		TOOL_BYTES(tensor_shard_items(&shard) * tensor_dtype_bytes(l->dtype)),
		TOOL_COUNT(l->boxes, "box", "boxes"));
	for (tensor_shard_first(&it, &shard, NULL); !it.done && !ferror(stdout); tensor_shard_next(&it)) {
		tensor_box_text(l->shape.ndim, &it.at.box, text, sizeof text);
		printf("  %s at item %" PRIu64 " of the buffer, strides %s\n", text, it.at.local_offset,
			TOOL_NUMBERS(l->shape.ndim, it.at.local_stride));
	}
	return tool_output_end(l->t);
}

/* ---- the command ---- */

static int read_arguments(struct layout *l)
{
	int code = tool_tensor_read(l->t, l->shape_text, l->dtype_text, &l->shape, &l->dtype);

	if (!code)
		code = tool_sharding_read(l->t, &l->shape, tensor_dtype_bytes(l->dtype), &l->on);
	if (!code && l->flat_text)
		code = tool_flat_read(l->t, l->flat_text, &l->flat);
	if (!code)
		code = tool_ranks_read(l->t, &l->ranks, &l->on.mesh);
	if (!code && l->draw && l->t->json)
		code = tool_usage(l->t, "--draw and --json exclude each other");
	if (!code && l->draw && l->shape.ndim != 2)
		code = tool_usage(l->t, "--draw: only tensors of 2 dimensions are drawn, --shape %s has %" PRIu32,
			l->shape_text, l->shape.ndim);
	return code ? code : check_ranks(l);
}

static int layout_run(struct tool *t, int argc, char **argv)
{
	struct layout l = {.t = t, .on = {.place_option = "--place",
		.mesh = {.option = "--mesh", .order_option = "--rank-order"}}};
	const char *check = NULL;
	const struct tool_option options[] = {{"shape", .text = &l.shape_text}, {"dtype", .text = &l.dtype_text},
		{"mesh", .text = &l.on.mesh.text}, {"rank-order", .text = &l.on.mesh.order},
		{"place", .text = &l.on.place}, {"flat", .text = &l.flat_text}, {"rank", .text = &l.ranks.text},
		{"draw", .flag = &l.draw}, {"check", .text = &check}, {0}};
	int code = tool_parse(t, argc, argv, options);

	if (code)
		return code;
	if (check && (l.shape_text || l.dtype_text || l.on.mesh.text || l.on.mesh.order || l.on.place ||
		l.flat_text || l.ranks.text || l.draw))
		return tool_usage(t, "--check FILE excludes the options that describe one tensor");
	if (check)
		return layout_check(t, check);
	if (t->narguments)
		return tool_usage(t, "unexpected argument \"%s\": STORE and RUN/STEP belong to --check",
			t->arguments[0]);
	if ((code = read_arguments(&l)) == 0) {
		tool_output_begin();
		if (t->json)
			code = print_json(&l);
		else if (l.draw)
			code = layout_draw(&l);
		else
			code = l.ranks.one ? print_rank(&l) : print_table(&l);
	}
	tool_sharding_release(&l.on);
	return code;
}

const struct tool_command tool_layout = {"layout", "say which boxes of a tensor each rank holds",
	"usage: vckpt layout [STORE] [RUN/STEP] --check FILE [-q] [-v]\n"
	"       vckpt layout --shape N,N,... --dtype TYPE --mesh MESH --place WORDS [--rank-order R,R,...]\n"
	"                    [--flat A:B[/L]] [--rank N] [--draw] [--json] [-q] [-v]\n\n"
	"Says which boxes of a tensor each rank of a mesh holds, and where they are in its buffer. Needs no store.\n"
	"With --check: reads a layout file and says what it gives to each tensor of a step.\n\n"
	"  --check FILE        a layout file, or llama, mixtral, deepseek\n"
	"  --shape 4096,1024   sizes of the tensor; \"scalar\" for one of no dimensions\n"
	"  --dtype bf16        its type; bfloat16 and torch.bfloat16 mean the same\n"
	"  --mesh dp=2,tp=4    names and sizes of the mesh, outermost first; JSON text; or @FILE with JSON\n"
	"  --rank-order 0,4,.. the rank at each place of the mesh, last dimension fastest; by default 0,1,2,...\n"
	"  --place 'R,S(0)'    one word for each dimension of the mesh: R, S(d), SS(d,split), IS(d,k),\n"
	"                      RS(d0,d1,..;u0,u1,..)\n"
	"  --flat A:B[/L]      of each rank only these items of its flattened local tensor, padded to L items\n"
	"  --rank N            this rank only, box by box\n"
	"  --draw              a picture of a 2-d tensor instead of the table\n",
	layout_run};
