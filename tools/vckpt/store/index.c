/* SPDX-License-Identifier: Apache-2.0 */
#include <inttypes.h>
#include <string.h>

#include "core/base/log.h"
#include "core/save/write/catalog.h"
#include "core/save/write/trust.h"
#include "tools/vckpt/tool.h"

static int add_part(struct tool *t, void *arg, const char *value)
{
	struct base_digest part;

	(void)arg;
	if (base_digest_parse(value, strlen(value), &part) < 0)
		return tool_usage(t, "--wrote %s: a digest has 64 lower-case hexadecimal digits", value);
	save_trust_add(&part);
	return 0;
}

static int index_run(struct tool *t, int argc, char **argv)
{
	bool anew = false, briefly = false;
	const struct tool_option options[] = {{"rebuild", .flag = &anew}, {"no-wait", .flag = &briefly},
		{"wrote", .call = add_part}, {0}};
	struct index_stats stats = {0};
	struct base_error err = {0};
	int code = tool_parse(t, argc, argv, options);
	int r;

	if (code || (code = tool_open_store(t, STORE_OPEN_READ_ONLY)))
		return code;
	r = save_index_update(t->store, (anew ? INDEX_ANEW : 0) | (briefly ? INDEX_BRIEFLY : 0), &stats, &err);
	if (r == -EBUSY && briefly)
		base_debug("another process is at it: %s", err.text);
	else if (r < 0)
		code = tool_fail(t, &err);
	else if (t->json)
		code = tool_print_json(json_pack("{s:I, s:I, s:I}", "commits", (json_int_t)stats.commits, "places",
			(json_int_t)stats.places, "bytes", (json_int_t)stats.bytes));
	else if (!t->quiet)
		printf("%s, %s, %s\n", TOOL_COUNT(stats.commits, "commit", "commits"),
			TOOL_COUNT(stats.places, "object", "objects"), TOOL_BYTES(stats.bytes));
	return code;
}

const struct tool_command tool_index = {"index", "bring the index up to date, or make it anew",
	"usage: vckpt index STORE [--rebuild] [--no-wait] [--wrote DIGEST] [--json] [-q] [-v]\n\n"
	"The index finds equal content of other steps for vckpt import, which keeps it up to date by itself.\n"
	"It is derived from the steps and may be deleted at any moment.\n\n"
	"  --rebuild   start from nothing\n"
	"  --no-wait   do nothing if another vckpt is at it\n"
	"  --wrote DIGEST  whose part you wrote: what it says of its bytes is believed from now on; vckpt import\n"
	"              says so of its own\n",
	index_run};
