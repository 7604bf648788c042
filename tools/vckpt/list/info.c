/* SPDX-License-Identifier: Apache-2.0
 *
 * vckpt info: what a store has, and what it takes on disk; what a step or one tensor is made of: shape, dtype, digest,
 * pieces, stored bytes, codecs, packs, and what it shares with the step before. */
#include <inttypes.h>
#include <string.h>

#include "core/commit/list/list_facts.h"
#include "core/pack/codec.h"
#include "core/save/plan/keep.h"
#include "core/step/manifest.h"
#include "core/upkeep/usage.h"
#include "tools/vckpt/list/sums.h"
#include "tools/vckpt/list/tensors.h"
#include "tools/vckpt/tool.h"

struct info {
	struct tool *t;
	const char *run;
	bool packs;
	const struct proto_step_facts *facts; /* what the list says of the step; NULL: nothing */
	struct proto_attribute *attributes; size_t nattributes; /* of the save, with those that were set later */
	struct load_step *before; /* the next lower visible step of the run, or NULL */
	uint64_t again, no_base;  /* load_step_again */
	struct base_error err;
};

static json_t *sums_json(const struct tool_sums *s, bool before)
{
	json_t *o = json_pack("{s:I, s:I, s:I, s:o}", "pieces", (json_int_t)s->pieces, "bytes", (json_int_t)s->bytes,
		"stored_bytes", (json_int_t)s->stored, "codecs", tool_sums_codecs_json(s));

	if (before)
		json_object_set_new(o, "shared_with_step_before",
			json_pack("{s:I, s:I, s:I}", "tensors", (json_int_t)s->tensors_equal, "pieces",
				(json_int_t)s->pieces_shared, "bytes", (json_int_t)s->bytes_shared));
	return o;
}

static void print_sums(const struct tool_sums *s, const struct load_step *before)
{
	printf("  pieces       %s, %s, stored as %s\n", TOOL_COUNT(s->pieces, "piece", "pieces"), TOOL_BYTES(s->bytes),
		TOOL_BYTES(s->stored));
	for (unsigned i = 0; i < s->ncodecs; i++)
		printf("  codec        %s: %s, %s as %s\n", pack_codec_name(s->codecs[i].word),
			TOOL_COUNT(s->codecs[i].pieces, "piece", "pieces"), TOOL_BYTES(s->codecs[i].raw),
			TOOL_BYTES(s->codecs[i].stored));
	if (before)
		printf("  shared       with step-%08" PRIu64 ": %" PRIu64 " of %s equal, %s, %s\n",
			load_step_info(before)->step, s->tensors_equal, TOOL_COUNT(s->tensors, "tensor", "tensors"),
			TOOL_COUNT(s->pieces_shared, "piece", "pieces"), TOOL_BYTES(s->bytes_shared));
}

/* ---- the store ---- */

static int store_print(struct info *in, const struct upkeep_usage *u)
{
	const struct proto_store *p = &in->t->store->info;
	char id[33];

	tool_format_id(p->id, id);
	if (in->t->json)
		return tool_print_json(json_pack("{s:o, s:I, s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "store",
			tool_json_text(in->t->store->path, strlen(in->t->store->path)),
			"format", (json_int_t)p->version, "id", id,
			"runs", (json_int_t)u->visible_runs, "steps", (json_int_t)u->nsteps, "logical_bytes",
			(json_int_t)u->logical_bytes, "packs", (json_int_t)u->packs, "disk_bytes",
			(json_int_t)u->pack_bytes, "needed_bytes", (json_int_t)u->needed_bytes, "spare_bytes",
			(json_int_t)u->spare_bytes));
	tool_print(stdout, "%s\n", in->t->store->path);
	printf("  format       %u, id %s\n", p->version, id);
	printf("  content      %s, %s, %s logical\n", TOOL_COUNT(u->visible_runs, "run", "runs"),
		TOOL_COUNT(u->nsteps, "step", "steps"), TOOL_BYTES(u->logical_bytes));
	printf("  on disk      %s in %s, %s of it in packs that these steps need\n", TOOL_BYTES(u->pack_bytes),
		TOOL_COUNT(u->packs, "pack", "packs"), TOOL_BYTES(u->needed_bytes));
	if (u->spare_bytes)
		printf("  the rest     %s, with records, are needed by no step: of removed steps (vckpt gc frees "
			"them), or of saves under way\n", TOOL_BYTES(u->spare_bytes));
	return TOOL_DONE;
}

static int store_info(struct info *in)
{
	const struct upkeep_usage_question q = {.store = in->t->store};
	struct upkeep_usage u;
	int code = upkeep_usage_read(&q, &u, &in->err) < 0 ? tool_fail(in->t, &in->err) : store_print(in, &u);

	upkeep_usage_release(&u);
	return code;
}

/* ---- one tensor ---- */

static int tensor_info(struct info *in, uint32_t tensor)
{
	struct load_tensor_info info;
	struct load_object *o;
	struct tool_sums sums = {0};
	struct tensor_shape tile;

	if (tool_sums_tensor(&sums, in->t->step, in->before, tensor, &in->err) < 0 ||
		load_tensor_open(in->t->step, tensor, &o, &in->err) < 0)
		return tool_fail(in->t, &in->err);
	load_step_tensor_info(in->t->step, tensor, &info);
	tile = (struct tensor_shape){.ndim = info.shape.ndim};
	memcpy(tile.dim, load_object_grid(o)->edge, tile.ndim * sizeof *tile.dim);
	load_object_unref(o);
	if (in->t->json) {
		json_t *all = sums_json(&sums, in->before);

		json_object_update_new(all,
			json_pack("{s:s, s:I, s:s, s:o, s:s, s:o, s:o, s:s}", "run", in->run, "step",
				(json_int_t)load_step_info(in->t->step)->step, "component", info.component, "name",
				tool_json_text(info.name, info.name_len), "dtype", tensor_dtype_name(info.dtype),
				"shape", tool_json_shape(&info.shape), "tile", tool_json_shape(&tile), "digest",
				TOOL_DIGEST(&sums.digest)));
		return tool_print_json(all);
	}
	tool_print(stdout, "%s/step-%08" PRIu64 "/%s/%.*s\n", in->run, load_step_info(in->t->step)->step,
		info.component, (int)info.name_len, info.name);
	printf("  tensor       %s %s, tiles of %s\n  digest       %s\n", tensor_dtype_name(info.dtype),
		TOOL_SHAPE(&info.shape), TOOL_SHAPE(&tile), TOOL_DIGEST(&sums.digest));
	tool_sums_print_numpy(&sums, "  numpy        ");
	print_sums(&sums, in->before);
	return TOOL_DONE;
}

/* ---- a step ---- */

static int packs_json(struct info *in, json_t *all)
{
	const struct upkeep_usage_question q = {.store = in->t->store};
	const struct proto_manifest *m = load_step_manifest(in->t->step);
	struct upkeep_usage u = {0};
	int r = in->packs ? upkeep_usage_read(&q, &u, &in->err) : 0;

	for (uint32_t i = 0; r == 0 && i < m->npacks; i++) {
		const struct upkeep_usage_file *f = upkeep_usage_pack(&u, m->packs[i].pack);
		json_t *o = json_pack("{s:s, s:I, s:I}", "pack", m->packs[i].pack, "bytes",
			(json_int_t)m->packs[i].size, "live_bytes", (json_int_t)m->packs[i].live_bytes);

		if (in->packs)
			json_object_set_new(o, "steps", json_integer(f ? f->steps : 0));
		json_array_append_new(all, o);
	}
	upkeep_usage_release(&u);
	return r;
}

static void print_packs(const json_t *packs)
{
	size_t i;
	json_t *p;

	json_array_foreach(packs, i, p) {
		json_t *steps = json_object_get(p, "steps");

		printf("  pack         %s: %s, %s of it in this step", json_string_value(json_object_get(p, "pack")),
			TOOL_BYTES((uint64_t)json_integer_value(json_object_get(p, "bytes"))),
			TOOL_BYTES((uint64_t)json_integer_value(json_object_get(p, "live_bytes"))));
		if (steps)
			printf(", named by %s",
				TOOL_COUNT((uint64_t)json_integer_value(steps), "step", "steps"));
		putchar('\n');
	}
}

static json_t *step_head(const struct info *in)
{
	const struct load_step_info *i = load_step_info(in->t->step);
	json_t *head = json_pack("{s:s, s:I, s:s, s:I, s:s, s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:o}", "run", in->run,
		"step", (json_int_t)i->step, "attempt", i->attempt, "entry", (json_int_t)i->entry, "time",
		TOOL_TIME(i->time_ns), "manifest", TOOL_DIGEST(&i->manifest), "tensors", (json_int_t)i->tensors,
		"blobs", (json_int_t)load_step_blob_count(in->t->step),
		"logical_bytes", (json_int_t)i->bytes, "new_bytes", (json_int_t)i->new_bytes, "again_bytes",
		(json_int_t)in->again, "no_base_bytes", (json_int_t)in->no_base, "attributes",
		tool_json_attributes(in->attributes, in->nattributes));

	tool_json_facts(head, in->facts);
	return head;
}

static void print_head(const struct info *in)
{
	const struct load_step_info *i = load_step_info(in->t->step);

	printf("%s/step-%08" PRIu64 "\n", in->run, i->step);
	printf("  committed    %s by attempt %s, entry %" PRIu64 "\n", TOOL_TIME(i->time_ns), i->attempt, i->entry);
	printf("  manifest     %s\n", TOOL_DIGEST(&i->manifest));
	printf("  content      %s, %s, %s; it added %s\n", TOOL_COUNT(i->tensors, "tensor", "tensors"),
		TOOL_COUNT(load_step_blob_count(in->t->step), "blob", "blobs"), TOOL_BYTES(i->bytes),
		TOOL_BYTES(i->new_bytes));
	if (in->again > in->no_base)
		printf("  again        %s of unchanged data was written again, because a step refers to packs of at "
			"most %u earlier saves\n", TOOL_BYTES(in->again - in->no_base), SAVE_KEEP_MAX);
	if (in->no_base)
		printf("  again        up to %s of unchanged data was written again, because an earlier step could "
			"not be used\n", TOOL_BYTES(in->no_base));
	for (size_t k = 0; k < in->nattributes; k++)
		tool_print(stdout, "  attribute    %s=%s\n", in->attributes[k].key, in->attributes[k].value);
	for (size_t k = 0; in->facts && k < in->facts->ntags; k++)
		printf("  tag          %s\n", in->facts->tags[k]);
	if (in->facts && in->facts->pinned)
		tool_print(stdout, "  pinned       since %s, on %s%s%s\n", TOOL_TIME(in->facts->pinned_ns),
			in->facts->pinned_by, in->facts->reason && *in->facts->reason ? ": " : "",
			in->facts->reason ? in->facts->reason : "");
}

static int step_info(struct info *in)
{
	struct tool_sums sums = {0};
	json_auto_t *packs = json_array();
	int r = 0;

	for (uint32_t i = 0; i < load_step_tensor_count(in->t->step) && r == 0; i++)
		r = tool_sums_tensor(&sums, in->t->step, in->before, i, &in->err);
	if (r == 0)
		r = packs_json(in, packs);
	if (r < 0)
		return tool_fail(in->t, &in->err);
	if (in->t->json) {
		json_t *all = step_head(in);

		json_object_update_new(all, sums_json(&sums, in->before));
		json_object_set_new(all, "dtypes", tool_sums_dtypes_json(&sums));
		json_object_set(all, "packs", packs);
		return tool_print_json(all);
	}
	print_head(in);
	printf("  types        %s\n", tool_sums_dtypes(&sums, (char[TOOL_SUMS_TEXT]){0}));
	tool_sums_print_numpy(&sums, "  numpy        ");
	print_sums(&sums, in->before);
	print_packs(packs);
	return TOOL_DONE;
}

/* The step before, to compare with. The command goes on without it. */
static void before_open(struct info *in, uint64_t step)
{
	const struct commit_list_step *before = NULL;
	struct commit_list *l = in->t->list;
	int r = commit_list_know_below(l, step, &in->err);

	for (size_t i = 0; r == 0 && i < commit_list_count(l) && commit_list_at(l, i)->step < step; i++)
		before = commit_list_at(l, i);
	if (before)
		r = load_step_open(in->t->store, in->run, before, &in->before, &in->err);
	if (r == 0)
		return;
	base_warning("the step before cannot be opened: %s", in->err.text);
	in->before = NULL;
	in->err = (struct base_error){0};
}

/* What the list says of the step, of which the manifest has the save's attributes. */
static int facts_find(struct info *in)
{
	const struct load_step_info *i = load_step_info(in->t->step);
	size_t n;

	in->facts = commit_list_facts(in->t->list, i->entry);
	n = in->facts ? in->facts->nattributes : 0;
	in->attributes = calloc(i->nattributes + n + 1, sizeof *in->attributes);
	if (!in->attributes)
		return base_no_memory(&in->err);
	in->nattributes = proto_attributes_merge(i->attributes, i->nattributes,
		in->facts ? in->facts->attributes : NULL, n, in->attributes);
	return 0;
}

static int show(struct info *in, const struct tool_target *target)
{
	uint64_t step = load_step_info(in->t->step)->step;
	int64_t tensor;

	if (!target->rest && (load_step_again(in->t->step, &in->again, &in->no_base, &in->err) < 0
		|| load_step_blobs(in->t->step, &in->err) < 0))
		return tool_fail(in->t, &in->err);
	before_open(in, step);
	if (!target->rest)
		return facts_find(in) < 0 ? tool_fail(in->t, &in->err) : step_info(in);
	tensor = tool_tensor_find(in->t->step, target->rest, &in->err);
	if (tensor >= 0)
		return tensor_info(in, (uint32_t)tensor);
	if (!in->err.code)
		base_error_set(&in->err, -ENOENT, "%s/%" PRIu64 " has no tensor %s", in->run, step, target->rest);
	return tool_fail(in->t, &in->err);
}

static int info_run(struct tool *t, int argc, char **argv)
{
	struct tool_target target;
	struct info in = {.t = t, .run = target.run};
	const struct tool_option options[] = {{"packs", .flag = &in.packs}, {0}};
	int code = tool_parse(t, argc, argv, options);

	if (code)
		return code;
	if (t->narguments == 1)
		return (code = tool_open_store(t, STORE_OPEN_READ_ONLY)) ? code : store_info(&in);
	if ((code = tool_target_parse(t, t->arguments[1], &target)) || (code = tool_step_open(t, &target, NULL)))
		return code;
	code = show(&in, &target);
	load_step_unref(in.before);
	free(in.attributes);
	return code;
}

const struct tool_command tool_info = {"info", "say what a store, a step or a tensor is made of",
	"usage: vckpt info STORE [RUN/STEP[/COMPONENT/TENSOR]] [--packs] [--json] [-q] [-v]\n\n"
	"Says of a store: its format, its runs and steps, what it takes on disk, and how much of that its steps\n"
	"need. Says of a step or of one tensor: shape, dtype, digest, pieces, stored bytes, codecs, and what it\n"
	"shares with the step before.\n\n"
	"  --packs   count for each pack how many steps name it (reads the manifests of all steps of the store)\n",
	info_run};
