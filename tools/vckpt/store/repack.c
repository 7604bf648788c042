/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/vckpt/store/repack.h"

#include <inttypes.h>
#include <string.h>

#include "core/copy/whole.h"

int tool_repack_open(struct tool_repack *x, struct tool *t)
{
	struct base_error err = {0};

	x->t = t;
	x->options = (struct upkeep_repack_options){.progress = tool_progress_update, .arg = &x->progress,
		.cancelled = tool_interrupted};
	x->steps = json_array();
	x->kept = json_array();
	x->failed = json_array();
	if (!t->store->info.list_4)
		return tool_failed(t, "%s was made by an older vckpt: its steps cannot be repacked", t->store->path);
	tool_progress_start(&x->progress, t->quiet, "repack");
	return upkeep_repack_open(t->store, &x->options, &x->session, &err) < 0 ? tool_fail(t, &err) : 0;
}

void tool_repack_close(struct tool_repack *x)
{
	upkeep_repack_close(x->session);
	json_decref(x->steps);
	json_decref(x->kept);
	json_decref(x->failed);
}

static void say_done(struct tool_repack *x, const struct upkeep_repack_step *s, const struct upkeep_repacked *now)
{
	json_array_append_new(x->steps, json_pack("{s:s, s:I, s:I, s:b, s:I, s:I, s:I, s:I}", "run", s->run,
		"step", (json_int_t)s->step, "entry", (json_int_t)now->entry, "repacked", !now->before,
		"objects", (json_int_t)now->objects, "bytes", (json_int_t)now->bytes,
		"packs", (json_int_t)now->packs, "packs_before", (json_int_t)now->packs_before));
	if (x->t->json || x->t->quiet)
		return;
	if (now->before)
		tool_print(stdout, "%s/step-%08" PRIu64 " is as it would be: it stays\n", s->run, s->step);
	else
		tool_print(stdout, "%s/step-%08" PRIu64 " repacked: %s, %s in %s, before in %s\n", s->run, s->step,
			TOOL_COUNT(now->objects, "object", "objects"), TOOL_BYTES(now->bytes),
			TOOL_COUNT(now->packs, "pack", "packs"), TOOL_COUNT(now->packs_before, "pack", "packs"));
	fflush(stdout); /* the line is true, whatever comes next */
}

/* It stays as it was. */
static void say_stays(const struct upkeep_repack_step *s, const struct base_error *err, json_t *rows, const char *why)
{
	json_array_append_new(rows, json_pack("{s:s, s:I, s:o}", "run", s->run, "step", (json_int_t)s->step, why,
		tool_json_text(err->text, strlen(err->text))));
}

int tool_repack_steps(struct tool_repack *x, const struct upkeep_repack_step *steps, size_t n)
{
	int r = 0, code, worst = 0;

	for (size_t i = 0; r != -ENOSPC && r != -EDQUOT && r != -EINTR && i < n; i++) {
		struct upkeep_repacked result;
		struct base_error err = {0};

		r = tool_interrupt_check(&err);
		if (r == 0)
			r = upkeep_repack_step(x->session, steps[i].run, steps[i].step, steps[i].entry, &result, &err);
		tool_progress_clear(&x->progress);
		if (r == 0) {
			say_done(x, &steps[i], &result);
		} else if (r == -ESTALE || r == -BASE_EBUSY) {
			say_stays(&steps[i], &err, x->kept, "why");
			if (!x->t->json && !x->t->quiet)
				tool_print(stdout, "%s\n", err.text);
		} else if (r != -EINTR) {
			say_stays(&steps[i], &err, x->failed, "error");
			code = tool_fail(x->t, &err);
			worst = code > worst ? code : worst;
		}
	}
	tool_progress_end(&x->progress);
	tool_interrupt_die();
	return worst;
}

/* ---- the command ---- */

static int find_steps(struct tool *t, struct upkeep_repack_step *steps)
{
	int code = 0;

	for (int i = 1; i < t->narguments && code == 0; i++) {
		const struct commit_list_step *step;
		struct tool_target target;

		code = tool_target_parse(t, t->arguments[i], &target);
		if (code == 0 && (!target.has_step || target.rest))
			code = tool_usage(t, "%s: give a whole step: RUN/STEP", t->arguments[i]);
		if (code || (code = tool_target_find(t, &target, &step)))
			break;
		steps[i - 1] = (struct upkeep_repack_step){strdup(target.run), step->step, step->entry};
	}
	return code;
}

static int repack_steps(struct tool *t, struct upkeep_repack_step *steps, size_t n)
{
	struct tool_repack x = {0};
	int code = tool_repack_open(&x, t), printed;

	x.options.whole = copy_whole;
	if (code == 0) {
		tool_interrupt_waits(t, "steps that were repacked so far stay so; the others are as they were");
		code = tool_repack_steps(&x, steps, n);
		tool_index_follow(t);
		if (code == 0 && json_array_size(x.kept))
			code = TOOL_FAILED;
		printed = t->json ? tool_print_json(json_pack("{s:O, s:O, s:O}", "steps", x.steps, "kept", x.kept,
			"failed", x.failed)) : 0;
		code = code ? code : printed;
		if (!t->json && !t->quiet && json_array_size(x.steps))
			printf("vckpt gc %s gives the space of packs that nothing needs any more back\n",
				TOOL_WORD(t->arguments[0]));
	}
	tool_repack_close(&x);
	return code;
}

static int repack_run(struct tool *t, int argc, char **argv)
{
	const struct tool_option options[] = {{0}};
	struct upkeep_repack_step *steps = NULL;
	int code = tool_parse(t, argc, argv, options);

	if (code || (code = tool_open_store(t, 0)))
		return code;
	steps = calloc((size_t)t->narguments, sizeof *steps);
	if (!steps)
		return tool_failed(t, "out of memory");
	code = find_steps(t, steps);
	if (code == 0)
		code = repack_steps(t, steps, (size_t)t->narguments - 1);
	for (int i = 0; i < t->narguments; i++)
		free(steps[i].run);
	free(steps);
	return code;
}

const struct tool_command tool_repack = {"repack", "write steps anew, in packs of one writer",
	"usage: vckpt repack STORE RUN/STEP... [OPTION...]\n\n"
	"Writes all bytes of each step anew, one pack for each component, tensor by tensor, and replaces the step\n"
	"by an equal one: a step that many ranks saved has whole tensors in few files then, is read as one of one\n"
	"writer is, and shares nothing with steps that are not named. Bytes, meshes, views, time, tags and pins\n"
	"stay. The old packs are left to vckpt gc, and readers go on.\n\n"
	"  --json -q           print JSON; print nothing but errors\n",
	repack_run};
