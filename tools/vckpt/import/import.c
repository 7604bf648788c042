/* SPDX-License-Identifier: Apache-2.0
 *
 * vckpt import: files in, one step. The plan is made and checked from headers alone (import_plan.c,
 * import_directory.c); then one writer saves it (core/save); then a process of its own brings the index up to date. */
#include "tools/vckpt/import/import.h"

#include <inttypes.h>
#include <string.h>

#include "core/base/array.h"
#include "core/save/write/catalog.h"

#define THREADS_MAX 1024
#define NUMBER_TRIES 8 /* for the next free number, while others take it */

/* Each --dtype: the type of .npy files whose items have none. */
struct dtype_option {
	const char *name;
	enum tensor_dtype dtype;
	bool used; /* there was such a file */
};

struct source {
	const char *component;
	struct dtype_option *dtype; /* NULL: none */
};

struct import {
	struct import_plan plan;
	struct save_options options;
	struct proto_attribute *attributes;
	size_t nattributes;
	struct source source;   /* the options for the sources that come next */
	struct source *sources; /* of each positional argument */
	struct dtype_option *dtypes;
	size_t ndtypes;
	bool taken;        /* everything was written, and then another writer had the step's number */
	const char *stray; /* --component for which no source has come yet */
	struct tool_target target;
	struct base_error err;
};

static bool is_set(const struct import *in, const char *key)
{
	for (size_t i = 0; i < in->nattributes; i++)
		if (!strcmp(in->attributes[i].key, key))
			return true;
	return false;
}

static int set_attribute(struct tool *t, void *arg, const char *value)
{
	struct import *in = arg;

	return tool_attribute_add(t, "--set ", value, &in->attributes, &in->nattributes);
}

static int set_step(struct tool *t, void *arg, const char *value)
{
	struct import *in = arg;
	struct tool_target target;
	char text[64];
	int code;

	if (snprintf(text, sizeof text, "r/%s", value) >= (int)sizeof text)
		return tool_usage(t, "--step %s is not a number", value);
	code = tool_target_parse(t, text, &target);
	if (code)
		return code;
	if (target.latest || target.tag[0] || target.rest)
		return tool_usage(t, "--step takes a number");
	in->options.step = target.step;
	return 0;
}

static int set_threads(struct tool *t, void *arg, const char *value)
{
	struct import *in = arg;
	char *end;
	unsigned long n = *value >= '0' && *value <= '9' ? strtoul(value, &end, 10) : 0;

	if (n == 0 || *end || n > THREADS_MAX)
		return tool_usage(t, "--threads %s: give a number from 1 to %d", value, THREADS_MAX);
	in->options.threads = (unsigned)n;
	return 0;
}

static int set_component(struct tool *t, void *arg, const char *value)
{
	struct import *in = arg;

	if (!proto_component_valid(value))
		return tool_usage(t, "--component %s: [A-Za-z0-9_][A-Za-z0-9._-]*, at most 64 bytes, and no name that "
			"a step's directory uses", value);
	in->source.component = in->stray = value;
	return 0;
}

static int set_dtype(struct tool *t, void *arg, const char *value)
{
	struct import *in = arg;
	struct dtype_option *o = &in->dtypes[in->ndtypes++];

	*o = (struct dtype_option){.name = value};
	in->source.dtype = o;
	if (tensor_dtype_parse(value, &o->dtype) < 0 || tensor_dtype_npy(o->dtype)[1] != 'V')
		return tool_usage(t,
			"--dtype %s: it is for .npy files whose items have no type (|V1, |V2), which are bf16, "
			"f8_e4m3fn, f8_e5m2, f8_e4m3fnuz, f8_e5m2fnuz, f8_e8m0fnu or f4_e2m1fn_x2",
			value);
	return 0;
}

/* A run may have such a name, but if there is such a file, RUN was forgotten. */
static bool is_source_file(const char *text)
{
	const char *dot = strrchr(text, '.');

	return dot && (strcmp(dot, ".safetensors") == 0 || strcmp(dot, ".npy") == 0) && access(text, F_OK) == 0;
}

/* A positional argument: each source keeps the options before it. */
static int argument(struct tool *t, void *arg, const char *value)
{
	struct import *in = arg;
	int code;

	in->sources[t->narguments - 1] = in->source;
	if (t->narguments > 2)
		in->stray = NULL;
	if (t->narguments != 2 || !value[0]) /* one that is empty is refused with the others' sentence */
		return 0;
	if (is_source_file(value))
		return tool_missing_run(t, value);
	code = tool_target_parse(t, value, &in->target);
	if (code == 0 && (in->target.rest || in->target.latest || in->target.tag[0]))
		return tool_usage(t, "%s is not RUN or RUN/STEP, where STEP is a number", value);
	return code;
}

/* Attributes of exported steps, but those that --set sets. */
static int keep_attributes(struct import *in)
{
	struct import_plan *p = &in->plan;

	for (size_t i = 0; i < p->nattributes; i++) {
		if (is_set(in, p->attributes[i].key))
			continue;
		if (base_array_more(in->attributes, in->nattributes) < 0)
			return base_no_memory(&in->err);
		in->attributes[in->nattributes++] = p->attributes[i];
		p->attributes[i] = (struct proto_attribute){0};
	}
	return 0;
}

static int add_source(struct import *in, const char *path, const struct source *s)
{
	struct import_plan *p = &in->plan;
	size_t first = p->ntensors;
	int r = import_add_source(p, path, s->component, s->dtype ? s->dtype->dtype : 0, &in->err);

	if (r == 0 && s->dtype && p->ntensors > first && import_has_suffix(path, ".npy"))
		s->dtype->used |= !strcmp(p->tensors[first].file->path, path) &&
			tensor_dtype_npy(p->tensors[first].dtype)[1] == 'V';
	return r;
}

/* Options that no source after them uses may be in the wrong place. */
static int check_options(const struct tool *t, const struct import *in)
{
	if (in->stray)
		return tool_usage(t,
			"--component %s comes after the last SOURCE: put it before the SOURCEs that it is for",
			in->stray);
	for (size_t i = 0; i < in->ndtypes; i++)
		if (!in->dtypes[i].used)
			return tool_usage(t,
				"--dtype %s is for .npy files after it whose items have no type (|V1, |V2), and there "
				"is none: put it before such a file, or leave it out", in->dtypes[i].name);
	return 0;
}

static int add_sources(struct tool *t, struct import *in)
{
	int code;

	if (in->target.has_step && in->options.step != PROTO_NONE && in->options.step != in->target.step)
		return tool_usage(t, "two different steps are given");
	if (in->target.has_step)
		in->options.step = in->target.step;
	for (int i = 2; i < t->narguments; i++)
		if (add_source(in, t->arguments[i], &in->sources[i]) < 0)
			return tool_fail(t, &in->err);
	if ((code = check_options(t, in)))
		return code;
	if (import_plan_check(&in->plan, &in->err) < 0 || keep_attributes(in) < 0)
		return tool_fail(t, &in->err);
	return 0;
}

static int read_source(void *arg, uint64_t offset, void *bytes, size_t len, struct base_error *err)
{
	struct import_tensor *t = arg;
	int r = tool_interrupt_check(err);

	return r < 0 ? r : import_tensor_read(t, offset, bytes, len, err);
}

static int read_blob(void *arg, uint64_t offset, void *bytes, size_t len, struct base_error *err)
{
	int r = tool_interrupt_check(err);

	return r < 0 ? r : import_blob_read(arg, offset, bytes, len, err);
}

static int declare(struct import *in, struct save_writer *w)
{
	for (size_t i = 0; i < in->plan.ntensors; i++) {
		struct import_tensor *t = &in->plan.tensors[i];
		int r = save_writer_tensor(w, t->component, t->name, t->name_len, t->dtype, &t->shape,
			(struct save_source){read_source, t}, &in->err);

		if (r < 0)
			return base_error_prefix(&in->err, r, "%s", t->file->path);
	}
	for (size_t i = 0; i < in->plan.nblobs; i++) {
		struct import_blob *b = &in->plan.blobs[i];
		int r = save_writer_blob(w, b->name, b->per_rank, b->bytes, (struct save_source){read_blob, b},
			&in->err);

		if (r < 0)
			return base_error_prefix(&in->err, r, "%s", b->file->path);
	}
	return 0;
}

/* A component keeps the header of its .safetensors if all of its tensors came from that one file. Others get one made
 * from the layout, even if each of their files has its own. */
static int add_headers(struct import *in, struct save_writer *w)
{
	const struct store_layout *layout;
	int r = save_writer_plan(w, &layout, &in->err);

	for (uint32_t i = 0; r == 0 && i < layout->m.ncomponents; i++) {
		struct import_component *c = NULL;
		base_cleanup_buf struct base_buf made = BASE_BUF_INIT;
		uint64_t data_bytes = 0;

		for (size_t k = 0; k < in->plan.ncomponents; k++)
			if (!strcmp(in->plan.components[k].name, layout->m.components[i]))
				c = &in->plan.components[k];
		if (c && c->named)
			r = import_names_add(c, w, &in->err);
		if (r == 0 && c && c->nheaders == 1) {
			r = save_writer_header(w, c->name, "safetensors", c->headers[0].bytes, c->headers[0].len,
				c->headers[0].data_bytes, &in->err);
			continue;
		}
		if (r < 0)
			break;
		r = view_safetensors_make(layout, i, c ? c->metadata : NULL, c ? c->nmetadata : 0, &made, &data_bytes);
		/* such a component has no .safetensors; manifest.json says so */
		if (r == -EFBIG)
			r = 0;
		else if (r < 0)
			base_error_set(&in->err, r, "component %s: no header could be made: %s",
				layout->m.components[i], strerror(-r));
		else
			r = save_writer_header(w, layout->m.components[i], "safetensors", made.data, made.len,
				data_bytes, &in->err);
	}
	return r;
}

static json_t *result_json(const struct import *in, const struct save_result *result)
{
	json_t *pickles = json_array(), *opaque = json_array();

	for (size_t i = 0; i < in->plan.npickles; i++)
		json_array_append_new(pickles, json_string(in->plan.pickles[i]));
	for (size_t i = 0; i < in->plan.nopaque; i++)
		json_array_append_new(opaque, json_string(in->plan.opaque[i].key));
	return json_pack(
		"{s:s, s:I, s:I, s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:o, s:o, s:o}",
		"run", in->target.run, "step", (json_int_t)result->step, "entry", (json_int_t)result->entry, "attempt",
		result->attempt, "tensors", (json_int_t)result->tensors, "blobs", (json_int_t)result->blobs, "bytes",
		(json_int_t)result->bytes, "pieces", (json_int_t)result->pieces, "pieces_new",
		(json_int_t)result->pieces_new, "pieces_reused", (json_int_t)result->pieces_reused, "pieces_duplicate",
		(json_int_t)result->pieces_duplicate, "piece_bytes_new", (json_int_t)result->piece_bytes_new,
		"raw_bytes_new", (json_int_t)result->raw_bytes_new, "bytes_again",
		(json_int_t)result->bytes_again, "bytes_no_base", (json_int_t)result->bytes_no_base,
		"meta_bytes", (json_int_t)result->meta_bytes, "bases", (json_int_t)result->bases,
		"attributes", tool_json_attributes(in->attributes, in->nattributes),
		"pickles_left_out", pickles, "values_unread", opaque);
}

/* Values that vckpt cannot interpret. */
static void say_opaque(const struct import_plan *p)
{
	enum { SHOWN = 5 };

	for (size_t i = 0; i < p->nopaque && i < SHOWN; i++)
		tool_print(stderr, "vckpt import: %s: kept as it is, for dcp.load alone: %s\n", p->opaque[i].key,
			p->opaque[i].why);
	if (p->nopaque > SHOWN)
		fprintf(stderr, "vckpt import: so are %zu more values (--json lists them)\n", p->nopaque - SHOWN);
}

static int report(struct tool *t, const struct import *in, const struct save_result *result)
{
	for (size_t i = 0; i < in->plan.npickles && !t->quiet; i++)
		tool_print(stderr, "vckpt import: %s: a pickle; left out (--keep-pickles stores it as it is)\n",
			in->plan.pickles[i]);
	if (!t->quiet)
		say_opaque(&in->plan);
	if (t->json)
		return tool_print_json(result_json(in, result));
	if (t->quiet)
		return TOOL_DONE;
	printf("%s/step-%08" PRIu64 ": %s, %s, %s; stored %s in %s, %" PRIu64 " known already", in->target.run,
		result->step, TOOL_COUNT(result->tensors, "tensor", "tensors"),
		TOOL_COUNT(result->blobs, "blob", "blobs"), TOOL_BYTES(result->bytes),
		TOOL_BYTES(result->piece_bytes_new), TOOL_COUNT(result->pieces_new, "new piece", "new pieces"),
		result->pieces_reused + result->pieces_duplicate);
	if (result->bytes_again)
		printf("; %s%s of unchanged data was written again", result->bytes_no_base ? "up to " : "",
			TOOL_BYTES(result->bytes_again));
	putchar('\n');
	return TOOL_DONE;
}

/* -v: what comes from where, before it is read. Tensors of one file are together. */
static void say_sources(const struct import_plan *p)
{
	for (size_t i = 0, first; i < p->ntensors;) {
		uint64_t bytes = 0;

		for (first = i; i < p->ntensors && p->tensors[i].file == p->tensors[first].file; i++)
			bytes += p->tensors[i].bytes;
		tool_print(stdout, "%s: %s, %s\n", p->tensors[first].file->path,
			TOOL_COUNT(i - first, "tensor", "tensors"), TOOL_BYTES(bytes));
	}
	for (size_t i = 0; i < p->nblobs; i++)
		tool_print(stdout, "%s: blob, %s\n", p->blobs[i].file->path,
			TOOL_BYTES((uint64_t)p->blobs[i].file->stat.st_size));
	fflush(stdout);
}

static bool says_more(const struct tool *t)
{
	return t->verbose && !t->json && !t->quiet;
}

static int save(struct tool *t, struct import *in, struct save_result *ret_r)
{
	struct save_writer *w = NULL;
	struct tool_progress progress;
	int r;

	*ret_r = (struct save_result){0};
	in->options.run = in->target.run;
	in->options.attributes = in->attributes;
	in->options.nattributes = in->nattributes;
	in->options.progress = tool_progress_update;
	in->options.progress_arg = &progress;
	in->options.cancelled = tool_interrupted;
	tool_interrupt_waits(t,
		"ended at once; vckpt ls says whether the step is there, and vckpt gc deletes what is of no use");
	tool_progress_start(&progress, t->quiet, "import");
	r = save_writer_open(t->store, &in->options, &w, &in->err);
	if (r == 0)
		r = declare(in, w);
	if (r == 0)
		r = add_headers(in, w);
	if (r == 0) {
		r = save_writer_commit(w, ret_r, &in->err);
		in->taken = r == -EEXIST;
	}
	save_writer_close(w);
	tool_progress_end(&progress);
	if (r < 0 && r != -BASE_EUNDECIDED && tool_interrupted())
		base_error_set(&in->err, -EINTR, "interrupted: nothing was imported, and what was written was removed");
	else if (!tool_interrupted())
		tool_interrupt_ends(t, r == -EEXIST ? "nothing was imported"
			: "the step is imported, the index may not know it yet");
	return r;
}

/* The step gets the number that its source had, unless another one is named; not while a job is at work in the run,
 * since the number may be the job's: then one has to be named. */
static int take_number(struct tool *t, struct import *in)
{
	base_cleanup_free struct commit_launch_info *launches = NULL;
	uint64_t number = in->plan.number;
	size_t n;
	int r;

	if (in->options.step != PROTO_NONE || !in->plan.nnumbers || number == PROTO_NONE)
		return 0;
	r = commit_launches(t->store, &launches, &n, &in->err);
	for (size_t i = 0; r == 0 && i < n; i++)
		if (launches[i].state != COMMIT_DEAD && strcmp(launches[i].run, in->target.run) == 0)
			return 0;
	if (r == 0)
		r = commit_list_open(t->store, in->target.run, false, &t->list, &in->err);
	if (r < 0)
		return r;
	if (in->options.replace || !commit_list_find(t->list, number))
		in->options.step = number;
	else if (!t->quiet)
		fprintf(stderr,
			"vckpt import: %s/%" PRIu64 " is there already: the step gets the next number (--replace "
			"replaces it, --step N names one)\n", in->target.run, number);
	commit_list_close(base_steal(t->list));
	return 0;
}

/* Of concurrent imports that name no step all but one find their number taken when they commit; they take the next. */
static int save_numbered(struct tool *t, struct import *in, struct save_result *ret_r)
{
	bool named = in->options.step != PROTO_NONE;
	size_t len;
	int r = take_number(t, in);

	if (r < 0)
		return r;
	for (unsigned tries = 1;; tries++) {
		r = save(t, in, ret_r);
		if (r != -EEXIST || named || !in->taken || tries == NUMBER_TRIES)
			break;
		base_info("%s; everything is read again, for the next number", in->err.text);
		in->err = (struct base_error){0};
		in->taken = false;
		in->options.step = PROTO_NONE;
	}
	len = strlen(in->err.text);
	if (r == -EEXIST && (named || in->taken))
		snprintf(in->err.text + len, sizeof in->err.text - len, "%s", named ? " (--replace replaces it)"
			: " (as with each number tried before; the same command tries again)");
	return r;
}

static void update_index(const struct tool *t, const struct base_digest *part)
{
	char dir[4096];
	base_cleanup_close int dir_of_store = -1;

	if (save_index_dir(t->store, &dir_of_store, dir) < 0)
		base_info("the user has no place for an index: XDG_CACHE_HOME and HOME are not set");
	else if (!tool_update_index(t->store->path, part, 1))
		base_log(t->quiet ? BASE_LOG_DEBUG : BASE_LOG_WARNING,
			"the index could not be brought up to date (the step is whole; vckpt index %s tries again)",
			TOOL_WORD(t->store->path));
}

static int import_run(struct tool *t, int argc, char **argv)
{
	struct import in = {.options.step = PROTO_NONE};
	struct save_result result = {0};
	bool keep_cached = false;
	const struct tool_option options[] = {{"component", .call = set_component, .arg = &in},
		{"dtype", .call = set_dtype, .arg = &in}, {"step", .call = set_step, .arg = &in},
		{"set", .call = set_attribute, .arg = &in}, {"replace", .flag = &in.options.replace},
		{"keep-pickles", .flag = &in.plan.keep_pickles}, {"follow", .flag = &in.plan.follow},
		{"threads", .call = set_threads, .arg = &in}, {"no-index", .flag = &in.options.no_index},
		{"keep-cached", .flag = &keep_cached}, {.call = argument, .arg = &in}};
	int code;

	in.sources = calloc((size_t)argc + 1, sizeof *in.sources);
	in.dtypes = calloc((size_t)argc + 1, sizeof *in.dtypes);
	code = in.sources && in.dtypes ? tool_parse(t, argc, argv, options) : TOOL_FAILED;
	if (code == 0) {
		tool_interrupt_ends(t, "nothing was imported");
		code = add_sources(t, &in);
	}
	if (code == 0)
		code = tool_open_store(t, keep_cached ? STORE_OPEN_KEEP_CACHED : 0);
	if (code == 0 && says_more(t))
		say_sources(&in.plan);
	if (code == 0 && save_numbered(t, &in, &result) < 0)
		code = tool_fail(t, &in.err);
	if (code == 0) {
		if (!in.options.no_index && result.index_behind && !tool_interrupted())
			update_index(t, &result.part);
		code = report(t, &in, &result);
		if (code == 0 && says_more(t))
			printf("shared: %s with other steps, %s within this one\n",
				TOOL_COUNT(result.pieces_reused, "piece", "pieces"),
				TOOL_COUNT(result.pieces_duplicate, "piece", "pieces"));
		if (tool_interrupted())
			fputs("vckpt import: interrupted when the step was already imported\n", stderr);
	}
	import_plan_release(&in.plan);
	import_attributes_free(in.attributes, in.nattributes);
	free(in.sources);
	free(in.dtypes);
	return code;
}

const struct tool_command tool_import = {"import",
	"take safetensors, .npy, a Hugging Face directory, a DCP checkpoint or an exported step in",
	"usage: vckpt import STORE RUN[/STEP] SOURCE... [OPTION...]\n\n"
	"Takes files in as one step. A SOURCE is a .safetensors or .npy file, a directory in Hugging Face\n"
	"layout: the tensors of its .safetensors, folders being components, and everything else in it as\n"
	"files (blobs) at their own path; a checkpoint that torch's distributed checkpoint (DCP) wrote, with\n"
	"its .metadata: pickles in it are read as data, nothing is called; or a step that vckpt export wrote\n"
	"or that was copied from a mount, with its manifest.json: it comes back with its components, dtypes,\n"
	"blobs and attributes.\n"
	"Of a directory without either, .npy files are tensors only if they are named themselves: DIR/*.npy.\n"
	"Bytes that the store holds already, in whatever run, are not stored again. The step appears whole\n"
	"or not at all.\n\n"
	"  --step N            the step's number; by default that of an exported step (of a DCP checkpoint: of its\n"
	"                      directory's name, such as step-1000), else, or if that is taken, the next free one\n"
	"  --replace           replace the step if it is there\n"
	"  --component NAME    tensors of the SOURCEs after it belong to component NAME (default: model), and one\n"
	"                      that is a .safetensors is shown as NAME.safetensors (default: by its own name)\n"
	"  --dtype DTYPE       what .npy files after it hold that numpy shows as |V2 or |V1: bf16, f8_e4m3fn, ...\n"
	"  --set KEY=VALUE     an attribute of the step, e.g. --set loss=2.31 (may be given again)\n"
	"  --keep-pickles      store pickled files as they are (they are never opened); by default they are left out\n"
	"  --follow            import files that links in a directory lead to outside of it, too\n"
	"  --threads N         threads to work with; by default all cores\n"
	"  --no-index          do not look for equal content in other steps\n"
	"  --keep-cached       leave what is written in the page cache, for a reader that comes at once\n"
	"  --json -q -v        print JSON; print nothing but errors; name the files, count\n"
	"                      what is shared\n",
	import_run};
