/* SPDX-License-Identifier: Apache-2.0
 *
 * vckpt show: what the values of tensors are: their range, quantiles, a histogram; and where the tensor is. Every value
 * is read once. */
#include <inttypes.h>
#include <langinfo.h>
#include <locale.h>
#include <math.h>
#include <string.h>
#include <unistd.h>

#include "core/base/array.h"
#include "core/diff/summary.h"
#include "core/load/open/object.h"
#include "tools/vckpt/list/sums.h"
#include "tools/vckpt/list/tensors.h"
#include "tools/vckpt/tool.h"

#define BAR_MAX 60u
#define NARROW 80u              /* columns, where there is no terminal */

struct show {
	struct tool *t;
	struct tool_target target;      /* of the step that is open */
	json_t *all;                    /* with --json */
	bool later;                     /* something was printed */
	struct base_error err;
};

/* One tensor. */
struct shown {
	struct load_tensor_info info;
	struct tool_sums sums;
	struct tensor_shape tile;
	const char **packs; size_t npacks; /* that have some of it, each once, by name */
	char *mesh; const char *placements; /* NULL: not recorded */
	struct diff_summary s;
};

static void shown_release(struct shown *n)
{
	free(n->packs);
	free(n->mesh);
}

/* ---- where it is ---- */

static int name_compare(const void *a, const void *b)
{
	return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static int shown_packs(struct shown *n, const struct load_object *o)
{
	n->packs = malloc((load_object_piece_count(o) + 1) * sizeof *n->packs);
	if (!n->packs)
		return -ENOMEM;
	for (uint64_t i = 0; i < load_object_piece_count(o); i++) {
		uint32_t pack = load_object_piece(o, i)->ref.pack;

		if (!load_object_piece(o, i)->inline_bytes && pack < o->npacks &&
			!(n->npacks && n->packs[n->npacks - 1] == o->packs[pack]))
			n->packs[n->npacks++] = o->packs[pack];
	}
	n->npacks = base_array_unique(n->packs, n->npacks, sizeof *n->packs, name_compare);
	return 0;
}

static int shown_layout(struct shown *n, const struct load_step *step, uint32_t tensor)
{
	uint32_t at;
	const struct store_layout *l = load_step_layout(step, tensor, &at);
	const struct proto_layout_tensor *t = &l->m.tensors[at];
	base_cleanup_buf struct base_buf b = BASE_BUF_INIT;

	if (!t->mesh || !t->placement)
		return 0;
	for (uint32_t i = 0; i < l->m.meshes[t->mesh - 1].ndims; i++) {
		const struct proto_mesh *m = &l->m.meshes[t->mesh - 1];
		char size[16];

		snprintf(size, sizeof size, "=%u", m->dim_sizes[i]);
		base_buf_append_text(&b, i ? "," : "");
		base_buf_append_text(&b, m->dim_names[i]);
		base_buf_append_text(&b, size);
	}
	base_buf_append(&b, "", 1);
	n->mesh = b.error ? NULL : strdup((char *)b.data);
	n->placements = l->m.placements[t->placement - 1];
	return n->mesh ? 0 : -ENOMEM;
}

static int shown_place(struct show *w, struct shown *n, uint32_t tensor)
{
	struct load_object *o;
	int r = load_tensor_open(w->t->step, tensor, &o, &w->err);

	if (r < 0)
		return r;
	n->tile.ndim = n->info.shape.ndim;
	memcpy(n->tile.dim, load_object_grid(o)->edge, n->tile.ndim * sizeof *n->tile.dim);
	r = shown_packs(n, o);
	if (r == 0)
		r = shown_layout(n, w->t->step, tensor);
	load_object_unref(o);
	return r < 0 ? base_no_memory(&w->err) : tool_sums_tensor(&n->sums, w->t->step, NULL, tensor, &w->err);
}

/* ---- JSON ---- */

static json_t *real(double value) { return isfinite(value) ? json_real(value) : json_null(); }

/* An integer where it is one and fits. */
static json_t *extreme(const struct shown *n, int64_t integer, double value)
{
	if (!n->s.finite)
		return json_null();
	if (!n->s.integers || (n->info.dtype == TENSOR_U64 && integer < 0))
		return real(n->s.integers ? (double)(uint64_t)integer : value);
	return json_integer(integer);
}

static double bin_at(const struct diff_summary *s, unsigned bin)
{
	double width = s->max / DIFF_BINS - s->min / DIFF_BINS, from = width * bin;

	if (bin == DIFF_BINS)
		return s->max;
	return isfinite(from) ? s->min + from : 2 * (s->min / 2 + width / 2 * bin);
}

static void values_json(json_t *o, const struct shown *n)
{
	const struct diff_summary *s = &n->s;
	json_t *quantiles = json_object(), *bins = json_array();
	char key[16];

	for (unsigned i = 0; s->finite && i < DIFF_QUANTILES; i++) {
		snprintf(key, sizeof key, "%g", diff_quantiles[i]);
		json_object_set_new(quantiles, key, real(s->quantile[i]));
	}
	for (unsigned i = 0; s->finite && i < DIFF_BINS; i++)
		json_array_append_new(bins, json_pack("{s:o, s:o, s:I}", "from", real(bin_at(s, i)), "to",
			real(bin_at(s, i + 1)), "values", (json_int_t)s->bins[i]));
	json_object_update_new(o, json_pack("{s:I, s:I, s:I, s:I, s:I, s:o, s:o, s:o, s:o, s:o, s:b, s:o}",
		"values", (json_int_t)s->values, "zeros", (json_int_t)s->zeros, "nan", (json_int_t)s->nan,
		"inf_negative", (json_int_t)s->inf_negative, "inf_positive", (json_int_t)s->inf_positive,
		"min", extreme(n, s->least, s->min), "max", extreme(n, s->most, s->max),
		"mean", s->finite ? real(s->mean) : json_null(), "std", s->finite ? real(s->std) : json_null(),
		"quantiles", quantiles, "quantiles_exact", s->exact, "histogram", bins));
}

static json_t *shown_json(const struct show *w, const struct shown *n)
{
	const struct load_step_info *step = load_step_info(w->t->step);
	json_t *packs = json_array(), *o;

	for (size_t i = 0; i < n->npacks; i++)
		json_array_append_new(packs, json_string(n->packs[i]));
	o = json_pack("{s:s, s:I, s:s, s:o, s:s, s:o, s:o, s:s, s:I, s:I, s:I, s:o}", "run", step->run,
		"step", (json_int_t)step->step, "component", n->info.component,
		"name", tool_json_text(n->info.name, n->info.name_len), "dtype", tensor_dtype_name(n->info.dtype),
		"shape", tool_json_shape(&n->info.shape), "tile", tool_json_shape(&n->tile),
		"digest", TOOL_DIGEST(&n->sums.digest), "pieces", (json_int_t)n->sums.pieces,
		"bytes", (json_int_t)n->sums.bytes, "stored_bytes", (json_int_t)n->sums.stored, "packs", packs);
	if (n->mesh) {
		json_object_set_new(o, "mesh", json_string(n->mesh));
		json_object_set_new(o, "placements", json_string(n->placements));
	}
	values_json(o, n);
	return o;
}

/* ---- text ---- */

static void print_extremes(const struct shown *n)
{
	const struct diff_summary *s = &n->s;

	if (n->info.dtype == TENSOR_U64)
		printf("%" PRIu64 " to %" PRIu64, (uint64_t)s->least, (uint64_t)s->most);
	else if (s->integers)
		printf("%" PRId64 " to %" PRId64, s->least, s->most);
	else
		printf("%.6g to %.6g", s->min, s->max);
}

/* A bar of `eighths` eighths of a column. */
static void print_bar(unsigned eighths, bool blocks)
{
	static const char *const parts[] = {"", "▏", "▎", "▍", "▌", "▋", "▊", "▉"};

	for (unsigned i = 0; i < eighths / 8; i++)
		fputs(blocks ? "█" : "#", stdout);
	fputs(blocks ? parts[eighths % 8] : eighths % 8 >= 4 ? "#" : "", stdout);
}

static void print_histogram(const struct diff_summary *s)
{
	bool blocks = setlocale(LC_CTYPE, "") && strcmp(nl_langinfo(CODESET), "UTF-8") == 0;
	unsigned width = tool_terminal_width(STDOUT_FILENO), bar;
	uint64_t most = 1;

	width = width ? width : NARROW;
	bar = width > 52 ? (unsigned)base_min(BAR_MAX, width - 42) : 10;
	for (unsigned i = 0; i < DIFF_BINS; i++)
		most = base_max(most, s->bins[i]);
	for (unsigned i = 0; i < DIFF_BINS && (i == 0 || s->min < s->max); i++) {
		unsigned eighths = (unsigned)((double)s->bins[i] / (double)most * 8 * bar);

		printf("  %12.4g  %10" PRIu64 "  ", bin_at(s, i), s->bins[i]);
		print_bar(s->bins[i] ? (unsigned)base_max(eighths, blocks ? 1 : 4) : 0, blocks);
		putchar('\n');
	}
}

static void print_values(const struct shown *n)
{
	const struct diff_summary *s = &n->s;

	printf("  values       %" PRIu64 ": %" PRIu64 " zero, %" PRIu64 " NaN, %" PRIu64 " -Inf, %" PRIu64 " +Inf\n",
		s->values, s->zeros, s->nan, s->inf_negative, s->inf_positive);
	if (!s->finite)
		return;
	printf("  range        ");
	print_extremes(n);
	printf(", mean %.6g, std %.6g\n  quantiles   ", s->mean, s->std);
	for (unsigned i = 0; i < DIFF_QUANTILES; i++)
		printf("%s %g%% %.4g", i ? "," : "", diff_quantiles[i] * 100, s->quantile[i]);
	puts(s->exact ? "" : " (cut towards zero by at most 0.1%)");
	print_histogram(s);
}

static void print_place(const struct shown *n)
{
	printf("  pieces       %s, %s, stored as %s\n", TOOL_COUNT(n->sums.pieces, "piece", "pieces"),
		TOOL_BYTES(n->sums.bytes), TOOL_BYTES(n->sums.stored));
	for (size_t i = 0; i < n->npacks; i++)
		printf("  %-12s %s\n", i ? "" : "packs", n->packs[i]);
	if (n->mesh)
		tool_print(stdout, "  layout       %s: %s\n", n->mesh, n->placements);
}

static void shown_print(struct show *w, const struct shown *n)
{
	const struct load_step_info *step = load_step_info(w->t->step);

	if (w->later)
		putchar('\n');
	tool_print(stdout, "%s/step-%08" PRIu64 "/%s/%.*s\n", step->run, step->step,
		n->info.component, (int)n->info.name_len, n->info.name);
	printf("  tensor       %s %s, tiles of %s\n  digest       %s\n", tensor_dtype_name(n->info.dtype),
		TOOL_SHAPE(&n->info.shape), TOOL_SHAPE(&n->tile), TOOL_DIGEST(&n->sums.digest));
	print_place(n);
	print_values(n);
	w->later = true;
}

/* ---- the command ---- */

static int show_tensor(void *arg, uint32_t tensor)
{
	struct show *w = arg;
	base_cleanup(shown_release) struct shown n = {0};
	struct tool_progress progress;
	int r;

	load_step_tensor_info(w->t->step, tensor, &n.info);
	r = shown_place(w, &n, tensor);
	if (r < 0)
		return r;
	tool_progress_start(&progress, w->t->quiet, "show");
	r = diff_summarise(w->t->step, tensor, tool_progress_update, &progress, &n.s, &w->err);
	tool_progress_end(&progress);
	if (r == 0 && w->all)
		json_array_append_new(w->all, shown_json(w, &n));
	else if (r == 0)
		shown_print(w, &n);
	return r;
}

/* Opens the step of the target, unless it is that of the argument before. */
static int show_open(struct show *w, const struct tool_target *target)
{
	const struct commit_list_step *entry;

	if (w->t->step && strcmp(w->target.run, target->run) == 0 && w->target.step == target->step &&
		w->target.latest == target->latest && w->target.has_step == target->has_step &&
		strcmp(w->target.tag, target->tag) == 0)
		return 0;
	load_step_unref(base_steal(w->t->step));
	commit_list_close(base_steal(w->t->list));
	w->target = *target;
	if (!w->t->store)
		return tool_step_open(w->t, target, NULL);
	if (tool_target_find(w->t, target, &entry))
		return TOOL_FAILED;
	return load_step_open(w->t->store, target->run, entry, &w->t->step, &w->err) < 0 ? tool_fail(w->t, &w->err) : 0;
}

static int show_argument(struct show *w, const char *text)
{
	struct tool_target target;
	int code = tool_target_parse(w->t, text, &target);

	if (code == 0 && !target.rest)
		code = tool_usage(w->t, "%s does not name a tensor: give RUN/STEP/COMPONENT/TENSOR", text);
	if (code == 0)
		code = show_open(w, &target);
	if (code == 0 && tool_tensors_match(w->t->step, target.rest, show_tensor, w, &w->err) < 0)
		code = tool_fail(w->t, &w->err);
	return code;
}

static int show_run(struct tool *t, int argc, char **argv)
{
	const struct tool_option options[] = {{0}};
	struct show w = {.t = t};
	int code = tool_parse(t, argc, argv, options);

	if (code)
		return code;
	w.all = t->json ? json_array() : NULL;
	for (int i = 1; code == 0 && i < t->narguments; i++)
		code = show_argument(&w, t->arguments[i]);
	if (code == 0 && w.all)
		return tool_print_json(json_pack("{s:o}", "tensors", w.all));
	json_decref(w.all);
	return code;
}

const struct tool_command tool_show = {"show", "say what the values of tensors are",
	"usage: vckpt show STORE RUN/STEP/COMPONENT/TENSOR... [--json] [-q] [-v]\n\n"
	"Says of a tensor: shape, dtype, digest, its pieces and packs; how many values are zero, NaN or infinite;\n"
	"range, mean, standard deviation and quantiles of the others, and a histogram. It reads the whole tensor,\n"
	"in bounded memory. COMPONENT/TENSOR may be a pattern: \"model/*.weight\" (* goes past slashes, too).\n",
	show_run};
