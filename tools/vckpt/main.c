/* SPDX-License-Identifier: Apache-2.0
 *
 * vckpt: one command over a store. Each sub-command is a file of its own; see docs/man/vckpt.1. */
#include <string.h>

#include "tools/vckpt/tool.h"

static const struct tool_command *const commands[] = {
	&tool_init,
	&tool_import,
	&tool_ls,
	&tool_info,
	&tool_cat,
	&tool_export,
	&tool_verify,
	&tool_mend,
	&tool_rm,
	&tool_gc,
	&tool_abort,
	&tool_index,
	&tool_stalls,
	&tool_mesh_command,
	&tool_layout,
	&tool_reshard,
};

static int help(FILE *to, int code)
{
	fputs("usage: vckpt COMMAND [OPTION...] [ARGUMENT...]\n\n"
		"A checkpoint store: steps of training runs as logical tensors, each distinct piece kept once.\n\n",
		to);
	for (size_t i = 0; i < BASE_COUNT(commands); i++)
		fprintf(to, "  %-8s %s\n", commands[i]->name, commands[i]->summary);
	fputs("\nvckpt COMMAND --help tells more; so does vckpt(1). mount.vckpt(8) shows a store as files.\n"
		"STORE may be left out where VCKPT_STORE names it and no other argument is given.\n"
		"Exit codes: 0 done, 1 failed, 2 usage, 3 damage found, 4 verify met only what a newer vckpt wrote.\n",
		to);
	return code;
}

int main(int argc, char **argv)
{
	base_log_set_program("vckpt");
	if (argc < 2)
		return help(stderr, TOOL_USAGE);
	if (!strcmp(argv[1], "help") && argc > 2) { /* "help X" is "X --help" */
		argv[1] = argv[2];
		argv[2] = (char *)"--help";
		argc = 3;
	}
	if (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h") || !strcmp(argv[1], "help"))
		return help(stdout, TOOL_DONE);
	if (!strcmp(argv[1], "--version"))
		return printf("vckpt %s\n", VCKPT_VERSION) < 0;
	for (size_t i = 0; i < BASE_COUNT(commands); i++) {
		struct tool t = {.command = commands[i]};

		if (strcmp(argv[1], commands[i]->name))
			continue;
		int code = commands[i]->run(&t, argc - 1, argv + 1);
		free(t.arguments);
		if (fflush(stdout) == EOF && code == TOOL_DONE) {
			perror("vckpt: standard output");
			code = TOOL_FAILED;
		}
		return code;
	}
	fputs("vckpt: there is no command \"", stderr);
	tool_print_text(stderr, argv[1], strlen(argv[1]));
	fputs("\" (see vckpt --help)\n", stderr);
	return TOOL_USAGE;
}
