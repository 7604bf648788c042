/* SPDX-License-Identifier: Apache-2.0
 *
 * vckpt info: what a store has, and what it takes on disk; what a step or one tensor is made of: shape, dtype, digest,
 * pieces, stored bytes, codecs, packs, and what it shares with the step before. */
#include <inttypes.h>
#include <string.h>

#include "core/pack/codec.h"
#include "core/save/plan/keep.h"
#include "core/step/manifest.h"
#include "core/upkeep/frees.h"
#include "core/view/tree.h"
#include "tools/vckpt/list/sums.h"
#include "tools/vckpt/tool.h"

struct info {
	struct tool *t;
	const char *run;
	bool packs;
	struct load_step *before; /* the next lower visible step of the run, or NULL */
	struct base_error err;
};

static int add_tensor(struct info *in, uint32_t tensor, struct tool_sums *s)
{
	struct load_tensor_info info;
	struct load_object *o, *before = NULL;
	int r = load_tensor_open(in->t->step, tensor, &o, &in->err);

	if (r < 0)
		return r;
	load_step_tensor_info(in->t->step, tensor, &info);
	int64_t number = -ENOENT;
	if (in->before)
		number = load_step_tensor_find(in->before, info.component, info.name, info.name_len);
	if (number >= 0)
		r = load_tensor_open(in->before, (uint32_t)number, &before, &in->err);
	if (r == 0)
		tool_sums_add(s, info.dtype, o, before);
	if (before)
		load_object_unref(before);
	load_object_unref(o);
	return r;
}

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

static void print_dtypes(const struct tool_sums *s)
{
	char dtypes[TOOL_SUMS_TEXT];

	tool_sums_dtypes(s, dtypes);
	printf("  %-12s %s\n", "types", dtypes);
	tool_sums_print_numpy(s, "  numpy        ");
}

static void print_sums(const struct tool_sums *s, const struct load_step *before)
{
	char a[32], b[32];

	tool_format_bytes(s->bytes, a);
	tool_format_bytes(s->stored, b);
	printf("  %-12s %" PRIu64 " %s, %s, stored as %s\n", "pieces", s->pieces,
		base_plural(s->pieces, "piece", "pieces"), a, b);
	for (unsigned i = 0; i < s->ncodecs; i++) {
		tool_format_bytes(s->codecs[i].raw, a);
		tool_format_bytes(s->codecs[i].stored, b);
		printf("  %-12s %s: %" PRIu64 " %s, %s as %s\n", "codec", store_codec_name(s->codecs[i].word),
			s->codecs[i].pieces, base_plural(s->codecs[i].pieces, "piece", "pieces"), a, b);
	}
	if (!before)
		return;
	tool_format_bytes(s->bytes_shared, a);
	printf("  %-12s with step-%08" PRIu64 ": %" PRIu64 " of %" PRIu64 " %s equal, %" PRIu64 " %s, %s\n", "shared",
		load_step_info(before)->step, s->tensors_equal, s->tensors,
		base_plural(s->tensors, "tensor", "tensors"), s->pieces_shared,
		base_plural(s->pieces_shared, "piece", "pieces"), a);
}

/* ---- the store ---- */

static int store_info(struct info *in)
{
	const struct proto_store *p = &in->t->store->info;
	struct store_needs n;
	uint64_t packs, bytes, spare;
	char id[33], a[32], b[32];

	if (store_needs(in->t->store, NULL, NULL, &n, &in->err) < 0 ||
		store_packs_bytes(in->t->store, &packs, &bytes, &in->err) < 0)
		return tool_fail(in->t, &in->err);
	spare = bytes - base_min(n.kept_bytes, bytes);
	for (unsigned i = 0; i < 16; i++)
		snprintf(id + 2 * i, 3, "%02x", p->id[i]);
	if (in->t->json)
		return tool_print_json(json_pack("{s:o, s:I, s:s, s:I, s:I, s:I, s:I, s:I, s:I}", "store",
			tool_json_text(in->t->store->path, strlen(in->t->store->path)),
			"format", (json_int_t)p->version, "id", id,
			"runs", (json_int_t)n.runs, "steps", (json_int_t)n.steps, "logical_bytes", (json_int_t)n.bytes,
			"packs", (json_int_t)packs, "disk_bytes", (json_int_t)bytes, "needed_bytes",
			(json_int_t)n.kept_bytes));
	tool_print_text(stdout, in->t->store->path, strlen(in->t->store->path));
	printf("\n  %-12s %u, id %s\n", "format", p->version, id);
	tool_format_bytes(n.bytes, a);
	printf("  %-12s %" PRIu64 " %s, %" PRIu64 " %s, %s logical\n", "content", n.runs,
		base_plural(n.runs, "run", "runs"), n.steps, base_plural(n.steps, "step", "steps"), a);
	tool_format_bytes(bytes, a);
	tool_format_bytes(n.kept_bytes, b);
	printf("  %-12s %s in %" PRIu64 " %s, %s of it in packs that these steps need\n", "on disk", a, packs,
		base_plural(packs, "pack", "packs"), b);
	tool_format_bytes(spare, a);
	if (spare)
		printf("  %-12s %s are needed by no step: of removed steps (vckpt gc frees them), or of saves under "
			"way\n", "the rest", a);
	return TOOL_DONE;
}

/* ---- one tensor ---- */

static int tensor_info(struct info *in, uint32_t tensor)
{
	struct load_tensor_info info;
	struct load_object *o;
	struct tool_sums sums = {0};
	char hex[BASE_DIGEST_HEX];

	if (add_tensor(in, tensor, &sums) < 0 || load_tensor_open(in->t->step, tensor, &o, &in->err) < 0)
		return tool_fail(in->t, &in->err);
	load_step_tensor_info(in->t->step, tensor, &info);
	base_digest_hex(load_object_digest(o), hex);
	const struct tensor_grid *g = load_object_grid(o);
	json_t *shape = json_array(), *tile = json_array();
	for (uint32_t i = 0; i < info.shape.ndim; i++) {
		json_array_append_new(shape, json_integer((json_int_t)info.shape.dim[i]));
		json_array_append_new(tile, json_integer((json_int_t)g->edge[i]));
	}
	load_object_unref(o);
	char *shape_text = json_dumps(shape, JSON_COMPACT), *tile_text = json_dumps(tile, JSON_COMPACT);
	int code = TOOL_DONE;
	if (in->t->json) {
		json_t *all = sums_json(&sums, in->before);

		json_object_update_new(all,
			json_pack("{s:s, s:I, s:s, s:o, s:s, s:O, s:O, s:s}", "run", in->run, "step",
				(json_int_t)load_step_info(in->t->step)->step, "component", info.component, "name",
				tool_json_text(info.name, info.name_len), "dtype", tensor_dtype_name(info.dtype),
				"shape", shape, "tile", tile, "digest", hex));
		code = tool_print_json(all);
	} else {
		printf("%s/step-%08" PRIu64 "/%s/", in->run, load_step_info(in->t->step)->step, info.component);
		tool_print_text(stdout, info.name, info.name_len);
		putchar('\n');
		printf("  %-12s %s %s, tiles of %s\n  %-12s %s\n", "tensor", tensor_dtype_name(info.dtype), shape_text,
			tile_text, "digest", hex);
		tool_sums_print_numpy(&sums, "  numpy        ");
		print_sums(&sums, in->before);
	}
	free(shape_text);
	free(tile_text);
	json_decref(shape);
	json_decref(tile);
	return code;
}

/* ---- a step ---- */

/* Steps of the run that name the pack. Reads a manifest for each visible step. */
static int count_steps(struct info *in, const char *const *names, uint32_t n, uint64_t *ret_steps)
{
	struct store_list *l;

	if (store_list_open(in->t->store, in->run, false, &l, &in->err) < 0)
		return -1;
	int r = 0;
	for (size_t i = 0; i < store_list_count(l) && r == 0; i++) {
		struct proto_manifest m;

		r = store_manifest_get(in->t->store, in->run, &store_list_at(l, i)->commit.manifest, &m, &in->err);
		if (r == -BASE_EVERSION) { /* one of a newer vckpt is not counted */
			base_warning("%s; its packs are not counted", in->err.text);
			in->err = (struct base_error){0};
			r = 0;
			continue;
		}
		if (r < 0)
			break;
		for (uint32_t a = 0, b = 0; a < n && b < m.npacks;) { /* both sorted by name */
			int order = strcmp(names[a], m.packs[b].pack);
			if (order == 0)
				ret_steps[a]++;
			if (order <= 0)
				a++;
			if (order >= 0)
				b++;
		}
		proto_manifest_release(&m);
	}
	store_list_close(l);
	return r;
}

static int packs_json(struct info *in, json_t *all)
{
	const struct proto_manifest *m = load_step_manifest(in->t->step);
	base_cleanup_free const char **names = calloc(m->npacks + 1, sizeof *names);
	base_cleanup_free uint64_t *steps = calloc(m->npacks + 1, sizeof *steps);

	if (!names || !steps)
		return base_no_memory(&in->err);
	for (uint32_t i = 0; i < m->npacks; i++)
		names[i] = m->packs[i].pack;
	if (in->packs && count_steps(in, names, m->npacks, steps) < 0)
		return in->err.code;
	for (uint32_t i = 0; i < m->npacks; i++) {
		json_t *o = json_pack("{s:s, s:I, s:I}", "pack", m->packs[i].pack, "bytes",
			(json_int_t)m->packs[i].size, "live_bytes", (json_int_t)m->packs[i].live_bytes);

		if (in->packs)
			json_object_set_new(o, "steps", json_integer((json_int_t)steps[i]));
		json_array_append_new(all, o);
	}
	return 0;
}

static void print_packs(const json_t *packs)
{
	size_t i;
	json_t *p;
	char a[32], b[32];

	json_array_foreach(packs, i, p) {
		tool_format_bytes((uint64_t)json_integer_value(json_object_get(p, "bytes")), a);
		tool_format_bytes((uint64_t)json_integer_value(json_object_get(p, "live_bytes")), b);
		printf("  %-12s %s: %s, %s of it in this step", "pack", json_string_value(json_object_get(p, "pack")),
			a, b);
		json_t *steps = json_object_get(p, "steps");
		if (steps)
			printf(", named by %" JSON_INTEGER_FORMAT " %s of the run", json_integer_value(steps),
				base_plural((uint64_t)json_integer_value(steps), "step", "steps"));
		putchar('\n');
	}
}

static json_t *step_head(const struct info *in)
{
	const struct load_step_info *i = load_step_info(in->t->step);
	uint64_t no_base, again = load_step_again(in->t->step, &no_base);
	char time[40], hex[BASE_DIGEST_HEX];

	tool_format_time(i->time_ns, time);
	base_digest_hex(&i->manifest, hex);
	return json_pack("{s:s, s:I, s:s, s:I, s:s, s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:o}", "run", in->run, "step",
		(json_int_t)i->step, "attempt", i->attempt, "entry", (json_int_t)i->entry, "time", time, "manifest",
		hex, "tensors", (json_int_t)i->tensors, "blobs", (json_int_t)load_step_blob_count(in->t->step),
		"logical_bytes", (json_int_t)i->bytes, "new_bytes", (json_int_t)i->new_bytes, "again_bytes",
		(json_int_t)again, "no_base_bytes", (json_int_t)no_base, "attributes",
		tool_json_attributes(i->attributes, i->nattributes));
}

static void print_head(const struct info *in)
{
	const struct load_step_info *i = load_step_info(in->t->step);
	uint64_t no_base, again = load_step_again(in->t->step, &no_base);
	char time[40], hex[BASE_DIGEST_HEX], bytes[32], added[32];

	tool_format_time(i->time_ns, time);
	base_digest_hex(&i->manifest, hex);
	tool_format_bytes(i->bytes, bytes);
	tool_format_bytes(i->new_bytes, added);
	printf("%s/step-%08" PRIu64 "\n  %-12s %s by attempt %s, entry %" PRIu64 "\n  %-12s %s\n", in->run, i->step,
		"committed", time, i->attempt, i->entry, "manifest", hex);
	printf("  %-12s %" PRIu64 " %s, %" PRIu32 " %s, %s; it added %s\n", "content", i->tensors,
		base_plural(i->tensors, "tensor", "tensors"), load_step_blob_count(in->t->step),
		base_plural(load_step_blob_count(in->t->step), "blob", "blobs"), bytes, added);
	tool_format_bytes(again - no_base, bytes);
	if (again > no_base)
		printf("  %-12s %s of unchanged data was written again, because a step refers to packs of at most %u "
			"earlier saves\n", "again", bytes, SAVE_KEEP_MAX);
	tool_format_bytes(no_base, bytes);
	if (no_base)
		printf("  %-12s up to %s of unchanged data was written again, because an earlier step could "
			"not be used\n", "again", bytes);
	for (size_t k = 0; k < i->nattributes; k++) {
		printf("  %-12s %s=", "attribute", i->attributes[k].key);
		tool_print_text(stdout, i->attributes[k].value, strlen(i->attributes[k].value));
		putchar('\n');
	}
}

static int step_info(struct info *in)
{
	struct tool_sums sums = {0};
	json_t *packs = json_array();
	int code = TOOL_DONE, r = 0;

	for (uint32_t i = 0; i < load_step_tensor_count(in->t->step) && r == 0; i++)
		r = add_tensor(in, i, &sums);
	if (r == 0)
		r = packs_json(in, packs);
	if (r < 0) {
		json_decref(packs);
		return tool_fail(in->t, &in->err);
	}
	if (in->t->json) {
		json_t *all = step_head(in);

		json_object_update_new(all, sums_json(&sums, in->before));
		json_object_set_new(all, "dtypes", tool_sums_dtypes_json(&sums));
		json_object_set(all, "packs", packs);
		code = tool_print_json(all);
	} else {
		print_head(in);
		print_dtypes(&sums);
		print_sums(&sums, in->before);
		print_packs(packs);
	}
	json_decref(packs);
	return code;
}

/* The tensor that a path means: model/NAME as the mount shows it, or the true name. */
static int64_t find_tensor(struct info *in, const char *path)
{
	const char *slash = strchr(path, '/');
	char component[PROTO_COMPONENT_MAX + 1];
	struct view_tree *tree;

	if (!slash || (size_t)(slash - path) >= sizeof component)
		return -ENOENT;
	snprintf(component, sizeof component, "%.*s", (int)(slash - path), path);
	int64_t tensor = load_step_tensor_find(in->t->step, component, slash + 1, strlen(slash + 1));
	if (tensor >= 0 || view_tree_build(in->t->step, VIEW_SHOW_ALL, &tree, &in->err) < 0)
		return tensor;
	int64_t node = view_tree_walk(tree, path);
	const struct view_node *n = node >= 0 ? view_tree_node(tree, (uint32_t)node) : NULL;
	if (n && n->kind == VIEW_TENSOR_NPY)
		tensor = n->item;
	view_tree_unref(tree);
	return tensor;
}

/* The step before it, to compare: without it there is still much to say. */
static void before_open(struct info *in, uint64_t step)
{
	const struct store_list_step *before = NULL;
	struct store_list *l = in->t->list;
	int r = store_list_know_below(l, step, &in->err);

	for (size_t i = 0; r == 0 && i < store_list_count(l) && store_list_at(l, i)->step < step; i++)
		before = store_list_at(l, i);
	if (before)
		r = load_step_open(in->t->store, in->run, before, &in->before, &in->err);
	if (r == 0)
		return;
	base_warning("the step before cannot be opened: %s", in->err.text);
	in->before = NULL;
	in->err = (struct base_error){0};
}

static int show(struct info *in, const struct tool_target *target)
{
	uint64_t step = load_step_info(in->t->step)->step;

	if (!target->rest && (load_step_heads(in->t->step, &in->err) < 0
		|| load_step_blobs(in->t->step, &in->err) < 0))
		return tool_fail(in->t, &in->err);
	before_open(in, step);
	if (!target->rest)
		return step_info(in);
	int64_t tensor = find_tensor(in, target->rest);
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
	return code;
}

const struct tool_command tool_info = {"info", "say what a store, a step or a tensor is made of",
	"usage: vckpt info STORE [RUN/STEP[/COMPONENT/TENSOR]] [--packs] [--json] [-q] [-v]\n\n"
	"Says of a store: its format, its runs and steps, what it takes on disk, and how much of that its steps\n"
	"need. Says of a step or of one tensor: shape, dtype, digest, pieces, stored bytes, codecs, and what it\n"
	"shares with the step before.\n\n"
	"  --packs   count for each pack how many steps of the run name it (reads the manifest of each)\n",
	info_run};
