/* SPDX-License-Identifier: Apache-2.0 */
#include <inttypes.h>
#include <string.h>

#include "tools/vckpt/tool.h"

static int option(struct tool *t, void *arg, int val, const char *value)
{
	(void)t;
	(void)value;
	if (val == 'r')
		*(uint64_t *)arg = 0;
	return 0;
}

static json_t *store_json(const struct store *s)
{
	char id[33];

	for (int i = 0; i < 16; i++)
		snprintf(id + 2 * i, 3, "%02x", s->info.id[i]);
	return json_pack("{s:s, s:s, s:i}", "store", s->path, "id", id, "format", (int)s->info.version);
}

static int init_run(struct tool *t, int argc, char **argv)
{
	static const struct option options[] = {{"no-reserve", no_argument, NULL, 'r'}, {0}};
	uint64_t reserve = STORE_RESERVE_BYTES;
	struct base_error err = {0};
	struct store *s = NULL;
	int code = tool_parse(t, argc, argv, NULL, options, option, &reserve);

	if (code)
		return code - TOOL_LEAVE;
	const char *path = t->arguments[0];
	if (store_init(path, reserve, &err) < 0 || store_open(path, STORE_OPEN_READ_ONLY, &s, &err) < 0)
		return tool_fail(t, &err);
	if (t->json)
		code = tool_print_json(store_json(s));
	else if (!t->quiet)
		printf("%s is a store now; next: vckpt import %s RUN SOURCE\n", s->path, path);
	store_close(s);
	return code;
}

const struct tool_command tool_init = {"init", "make a store",
	"usage: vckpt init STORE [--no-reserve] [--json] [-q] [-v]\n\n"
	"Makes STORE, a directory that does not exist yet or is empty, into a store.\n\n"
	"  --no-reserve   do not set 1 MiB aside, which rm and gc need on a full disk\n",
	init_run, .makes_store = true};
