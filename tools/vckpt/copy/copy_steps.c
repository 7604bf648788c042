/* SPDX-License-Identifier: Apache-2.0
 *
 * copy_steps: one step after another from t->store to the other store. What concerns one step (it differs there, it is
 * damaged here, it was removed meanwhile) ends that step; the others are copied. */
#include "tools/vckpt/copy/copy_steps.h"

#include <inttypes.h>
#include <stdarg.h>
#include <string.h>

#include "core/base/array.h"
#include "core/save/write/catalog.h"
#include "core/save/write/trust.h"
#include "core/view/check.h"
#include "core/view/safetensors.h"

#define RATE_MIN 4096u
#define THREADS_MAX 1024

int copy_steps_rate(struct tool *t, void *arg, const char *value)
{
	struct copy_steps *s = arg;
	static const char units[] = "KMGT";
	const char *unit;
	char *end = NULL;
	uint64_t n;

	errno = 0;
	n = *value >= '0' && *value <= '9' ? strtoull(value, &end, 10) : 0;
	unit = end && *end ? strchr(units, *end) : NULL;
	if (unit && !end[1] && !errno && !base_mul_overflows(n, UINT64_C(1) << 10 * (unit - units + 1), &n) &&
		n >= RATE_MIN) {
		s->options.rate = n;
		return 0;
	}
	return tool_usage(t, "--limit-rate %s: give bytes a second with a unit, 4K at least: 512K, 20M, 1G", value);
}

int copy_steps_threads(struct tool *t, void *arg, const char *value)
{
	struct copy_steps *s = arg;
	char *end;
	unsigned long n = *value >= '0' && *value <= '9' ? strtoul(value, &end, 10) : 0;

	if (n == 0 || *end || n > THREADS_MAX)
		return tool_usage(t, "--threads %s: give a number from 1 to %d", value, THREADS_MAX);
	s->options.threads = (unsigned)n;
	return 0;
}

int copy_steps_open(struct copy_steps *s, struct tool *t, const char *to)
{
	struct base_error err = {0};
	int code = tool_open_store(t, STORE_OPEN_READ_ONLY);
	size_t len;

	if (code)
		return code;
	s->t = t;
	s->options.progress = tool_progress_update;
	s->options.arg = s;
	s->options.cancelled = tool_interrupted;
	s->options.leaves = tool_terminated;
	s->options.header = view_header_check;
	if (store_open(to, 0, &s->to, &err) < 0) {
		len = strlen(err.text);
		if (err.code == -ENOENT || err.code == -BASE_ENOSTORE)
			snprintf(err.text + len, sizeof err.text - len, " (vckpt init %s makes a store there)",
				TOOL_WORD(to));
		return tool_fail(t, &err);
	}
	if (copy_open(t->store, s->to, &s->options, &s->copy, &err) < 0)
		return tool_fail(t, &err);
	s->rows = json_array();
	tool_interrupt_waits(t, "ended at once; steps that were copied stay, and vckpt gc deletes what is of no use");
	return 0;
}

/* ---- the index of the other store ---- */

void copy_steps_index(struct copy_steps *s)
{
	char dir[4096];
	base_cleanup_close int dir_of_store = -1;

	if (!s->nparts || save_index_dir(s->to, &dir_of_store, dir) < 0)
		return;
	if (!tool_update_index(s->to->path, s->parts, s->nparts))
		base_log(s->t->quiet ? BASE_LOG_DEBUG : BASE_LOG_WARNING,
			"the index could not be brought up to date (the steps are whole; vckpt index %s tries again)",
			TOOL_WORD(s->to->path));
	s->nparts = 0;
}

/* The process that updates the index remembers so many parts; of a step of more ranks it believes the last. */
static void index_later(struct copy_steps *s, const struct copy_result *result)
{
	uint32_t first = result->nparts > SAVE_TRUST_PARTS ? result->nparts - SAVE_TRUST_PARTS : 0;

	if (s->nparts + result->nparts > SAVE_TRUST_PARTS)
		copy_steps_index(s);
	for (uint32_t i = first; i < result->nparts && base_array_more(s->parts, s->nparts) == 0; i++)
		s->parts[s->nparts++] = result->parts[i];
}

/* ---- a step ---- */

static void say(struct copy_steps *s, const char *run, const char *as, const struct copy_result *result)
{
	bool done = result->outcome == COPY_DONE;

	if (s->t->json) {
		json_array_append_new(s->rows, json_pack("{s:s, s:s, s:I, s:s, s:I, s:s, s:I, s:I, s:I, s:I, s:I, s:I}",
			"run", run, "as", as, "step", (json_int_t)result->step, "outcome", done ? "copied" : "equal",
			"entry", (json_int_t)result->entry, "attempt", result->attempt, "bytes",
			(json_int_t)result->bytes, "read_bytes", (json_int_t)result->read_bytes, "stored_bytes",
			(json_int_t)result->stored_bytes, "pieces_new", (json_int_t)result->pieces_new, "pieces_reused",
			(json_int_t)result->pieces_reused, "pieces_duplicate", (json_int_t)result->pieces_duplicate));
		return;
	}
	if (s->t->quiet)
		return;
	tool_progress_clear(&s->progress);
	printf("%s/step-%08" PRIu64 ": ", as, result->step);
	if (done)
		printf("%s, read %s, stored %s in %s, %" PRIu64 " there already\n", TOOL_BYTES(result->bytes),
			TOOL_BYTES(result->read_bytes), TOOL_BYTES(result->stored_bytes),
			TOOL_COUNT(result->pieces_new, "new piece", "new pieces"), result->pieces_reused);
	else
		puts("there already");
	fflush(stdout); /* the line is true, whatever comes next */
}

/* Does an error concern this step alone? */
static bool of_one_step(int r)
{
	return r == -EEXIST || r == -BASE_EPINNED || r == -BASE_EDAMAGED || r == -BASE_EFORMAT || r == -BASE_EVERSION ||
		r == -ENOENT || r == -ESTALE;
}

void copy_steps_failed(struct copy_steps *s, const struct base_error *err)
{
	int code;

	tool_progress_clear(&s->progress);
	code = tool_fail(s->t, err);
	s->worst = code > s->worst ? code : s->worst;
}

/* Was the step removed or replaced since it was found? */
static bool is_gone(struct copy_steps *s, const char *run, const struct commit_list_step *step)
{
	struct commit_list *l;
	bool gone;

	if (commit_list_open_newest(s->t->store, run, &l, NULL) < 0)
		return false;
	gone = commit_list_know_step(l, step->step, NULL) >= 0 && !commit_list_entry_live(l, step->entry);
	commit_list_close(l);
	return gone;
}

static void fail(struct copy_steps *s, const char *run, const struct commit_list_step *step,
	struct base_error *err)
{
	if (of_one_step(err->code) && is_gone(s, run, step)) {
		s->gone++;
		if (s->changes)
			return;
		base_error_set(err, -ESTALE, "%s step %" PRIu64 " was removed or replaced while it was copied", run,
			step->step);
	}
	copy_steps_failed(s, err);
	s->failed++;
	s->stop = !of_one_step(err->code);
	json_array_append_new(s->rows, json_pack("{s:s, s:I, s:s, s:o}", "run", run, "step", (json_int_t)step->step,
		"outcome", "failed", "error", tool_json_text(err->text, strlen(err->text))));
}

void copy_steps_one(struct copy_steps *s, const struct commit_list *list, const struct commit_list_step *step,
	const char *as, bool replace)
{
	const char *run = commit_list_run(list);
	struct copy_result result;
	struct base_error err = {0};
	int r = copy_step(s->copy, list, step, as, replace, &result, &err);

	s->read_bytes += result.read_bytes;
	s->stored_bytes += result.stored_bytes;
	if (r == -EINTR && s->is_end)
		return;
	if (r < 0) {
		if (r != -BASE_EUNDECIDED && tool_interrupted())
			base_error_set(&err, -EINTR, "interrupted: %s step %" PRIu64 " was not copied, and what was "
				"written of it %s; steps copied before stay", run, step->step, tool_terminated()
				? "is left for the next copy" : "was removed");
		fail(s, run, step, &err);
		return;
	}
	*(result.outcome == COPY_DONE ? &s->copied : &s->equal) += 1;
	index_later(s, &result);
	say(s, run, as, &result);
}

void copy_steps_policy(struct copy_steps *s, const struct commit_list *list, const char *as)
{
	struct base_error err = {0};

	if (!s->stop && copy_policy(s->copy, list, as, &err) < 0)
		copy_steps_failed(s, &err);
}

void copy_steps_say(struct copy_steps *s, const char *format, ...)
{
	char text[1024];
	va_list args;

	if (s->t->json || s->t->quiet)
		return;
	va_start(args, format);
	vsnprintf(text, sizeof text, format, args);
	va_end(args);
	tool_progress_clear(&s->progress);
	tool_print(stdout, "%s\n", text);
	fflush(stdout);
}

int copy_steps_report(struct copy_steps *s, json_t *more, int code)
{
	if (s->t->json) {
		json_t *all = json_pack("{s:I, s:I, s:I, s:I, s:I, s:O}", "copied", (json_int_t)s->copied, "equal",
			(json_int_t)s->equal, "failed", (json_int_t)s->failed, "read_bytes", (json_int_t)s->read_bytes,
			"stored_bytes", (json_int_t)s->stored_bytes, "steps", s->rows);
		int printed;

		json_object_update(all, more);
		json_decref(more);
		printed = tool_print_json(all);
		return code ? code : printed;
	}
	if (!s->t->quiet && s->copied + s->equal + s->failed != 1)
		printf("%s copied, %zu there already%s; read %s, stored %s\n", TOOL_COUNT(s->copied, "step", "steps"),
			s->equal, s->failed ? ", others failed" : "", TOOL_BYTES(s->read_bytes),
			TOOL_BYTES(s->stored_bytes));
	return code;
}

void copy_steps_close(struct copy_steps *s)
{
	if (s->to && (s->is_end || !tool_interrupted()))
		copy_steps_index(s);
	copy_close(s->copy);
	store_close(s->to);
	json_decref(s->rows);
	free(s->parts);
}
