/* SPDX-License-Identifier: Apache-2.0 */
#include <inttypes.h>
#include <unistd.h>

#include "core/save/catalog.h"
#include "tools/vckpt/tool.h"

static bool has_index(const struct store *s)
{
	char dir[4096];

	return save_index_dir(s, dir) == 0 && access(dir, W_OK) == 0;
}

static int rm_run(struct tool *t, int argc, char **argv)
{
	struct tool_target target;
	const struct store_list_step *step;
	struct store_list *l = NULL;
	struct base_error err = {0};
	struct store *s = NULL;
	int code = tool_parse(t, argc, argv, NULL, NULL, NULL, NULL);

	if (code)
		return code - TOOL_LEAVE;
	if ((code = tool_target_parse(t, t->arguments[1], &target)))
		return code;
	if (!target.has_step || target.rest)
		return tool_usage(t, "name one step: RUN/STEP");
	if ((code = tool_open_store(t, 0, &s)))
		return code;
	if ((code = tool_target_find(t, s, &target, &l, &step)) == 0) {
		uint64_t number = step->step, entry = step->entry;

		if (store_step_remove(s, target.run, number, &err) < 0)
			code = tool_fail(t, &err);
		else if (t->json)
			code = tool_print_json(json_pack("{s:s, s:I, s:I}", "run", target.run, "step",
				(json_int_t)number, "entry", (json_int_t)entry));
		else if (!t->quiet)
			printf("%s/step-%08" PRIu64 " removed; vckpt gc %s gives its space back\n", target.run, number,
				t->arguments[0]);
	}
	/* Steps that share its data may stand in the index under its name only. */
	if (code == TOOL_DONE && has_index(s) && !tool_update_index(s->path))
		base_debug("the index could not be brought up to date");
	store_list_close(l);
	store_close(s);
	return code;
}

const struct tool_command tool_rm = {"rm", "remove a step",
	"usage: vckpt rm STORE RUN/STEP [--json] [-q] [-v]\n\n"
	"Removes a step: it vanishes from ls and from mounts. What it shares with other steps stays; what\n"
	"only it used is deleted by vckpt gc.\n",
	rm_run};
