/* SPDX-License-Identifier: Apache-2.0 */
#include "core/store/verify.h"

#include <inttypes.h>

#include "tools/vckpt/tool.h"

struct verify {
	struct tool *t;
	struct tool_progress progress;
	json_t *damage;
	uint64_t lines;
};

static json_t *damage_json(const struct store_damage *d)
{
	json_t *o = json_pack("{s:s, s:I, s:I, s:s}", "file", d->file, "offset", (json_int_t)d->offset, "length",
		(json_int_t)d->len, "what", d->what);

	if (d->run)
		json_object_set_new(o, "run", json_string(d->run));
	if (d->run && d->step != PROTO_NONE)
		json_object_set_new(o, "step", json_integer((json_int_t)d->step));
	if (d->component)
		json_object_set_new(o, "component", json_string(d->component));
	if (d->tensor)
		json_object_set_new(o, d->component ? "tensor" : "blob", json_string(d->tensor));
	return o;
}

static void damage(void *arg, const struct store_damage *d)
{
	struct verify *v = arg;

	v->lines++;
	if (v->t->json) {
		json_array_append_new(v->damage, damage_json(d));
		return;
	}
	if (v->t->quiet)
		return;
	if (v->progress.shown)
		fputs("\r\033[K", stderr);
	fputs("damage: ", stdout);
	tool_print_text(stdout, d->file, strlen(d->file));
	if (d->len)
		printf(" bytes %" PRIu64 "-%" PRIu64, d->offset, d->offset + d->len - 1);
	fputs(": ", stdout);
	tool_print_text(stdout, d->what, strlen(d->what));
	if (d->run && d->step != PROTO_NONE)
		printf("; touches %s/step-%08" PRIu64, d->run, d->step);
	else if (d->run)
		printf("; touches run %s", d->run);
	else
		printf("; touches no step");
	if (d->tensor)
		printf(" %s %s%s", d->component ? "tensor" : "blob", d->component ? d->component : "",
			d->component ? "/" : "");
	if (d->tensor)
		tool_print_text(stdout, d->tensor, strlen(d->tensor));
	putchar('\n');
}

static void progress(void *arg, uint64_t done, uint64_t total)
{
	struct verify *v = arg;

	tool_progress_update(&v->progress, done, total);
}

static int say(struct verify *v, const struct store_verify_result *r)
{
	char bytes[32];
	int code = r->faults ? TOOL_DAMAGE : TOOL_DONE;

	if (v->t->json) {
		int printed = tool_print_json(json_pack("{s:I, s:I, s:I, s:I, s:I, s:O}", "files", (json_int_t)r->files,
			"objects", (json_int_t)r->objects, "bytes", (json_int_t)r->bytes, "steps", (json_int_t)r->steps,
			"faults", (json_int_t)r->faults, "damage", v->damage));

		return printed ? printed : code;
	}
	tool_format_bytes(r->bytes, bytes);
	if (!v->t->quiet)
		printf("%" PRIu64 " steps, %" PRIu64 " files, %" PRIu64 " objects, %s read: %s", r->steps, r->files,
			r->objects, bytes, r->faults ? "" : "sound\n");
	if (!v->t->quiet && r->faults)
		printf("%" PRIu64 " faults\n", r->faults);
	return code;
}

static int verify_run(struct tool *t, int argc, char **argv)
{
	struct verify v = {.t = t};
	struct store_verify_options options = {.step = PROTO_NONE, .damage = damage, .progress = progress, .arg = &v};
	struct store_verify_result result = {0};
	struct tool_target target = {0};
	struct base_error err = {0};
	struct store *s = NULL;
	int code = tool_parse(t, argc, argv, NULL, NULL, NULL, NULL), used;

	if (code)
		return code - TOOL_LEAVE;
	if (t->narguments > 2)
		return tool_usage(t, "STORE and at most one RUN[/STEP]");
	if (t->narguments == 2 && (code = tool_target_parse(t, t->arguments[1], &target)))
		return code;
	if (target.rest)
		return tool_usage(t, "name a run or a step");
	if ((code = tool_open_store(t, STORE_OPEN_READ_ONLY, &s, &used)))
		return code;
	if (t->narguments == 2) {
		struct store_list *l;
		const struct store_list_step *step;

		if ((code = tool_target_find(t, s, &target, &l, &step))) {
			store_close(s);
			return code;
		}
		options.run = target.run;
		options.step = target.has_step ? step->step : PROTO_NONE;
		store_list_close(l);
	}
	v.damage = json_array();
	tool_progress_start(&v.progress, t, "verify");
	int r = store_verify(s, &options, &result, &err);
	tool_progress_end(&v.progress);
	code = r < 0 ? tool_fail(t, &err) : say(&v, &result);
	json_decref(v.damage);
	store_close(s);
	return code;
}

const struct tool_command tool_verify = {"verify", "re-hash everything and list all damage",
	"usage: vckpt verify STORE [RUN[/STEP]] [--json] [-q] [-v]\n\n"
	"Reads everything, or everything that a run or a step reaches, hashes it anew, and lists each fault\n"
	"with its file, offset, tensor and every step that it touches. Exit code 3 when there is any.\n",
	verify_run};
