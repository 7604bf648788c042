/* SPDX-License-Identifier: Apache-2.0
 *
 * vckpt: one command over a store. Each sub-command is a file of its own; see docs/man/vckpt.1. */
#include <signal.h>
#include <string.h>

#include "core/base/standard.h"
#include "tools/vckpt/tool.h"

static const struct group {
	const char *title;
	const struct tool_command *commands[16];
} groups[] = {
	{"write", {&tool_init, &tool_import, &tool_copy, &tool_sync, &tool_rm, &tool_set, &tool_tag, &tool_pin,
		&tool_unpin}},
	{"read", {&tool_ls, &tool_find, &tool_info, &tool_du, &tool_log, &tool_cat, &tool_show, &tool_diff,
		&tool_export, &tool_stalls, &tool_report, &tool_wait, &tool_mount, &tool_umount}},
	{"look after a store", {&tool_verify, &tool_mend, &tool_prune, &tool_policy, &tool_gc, &tool_repack,
		&tool_abort, &tool_index, &tool_metrics}},
	{"think about layouts, without a store", {&tool_mesh_command, &tool_layout, &tool_reshard}},
};

const struct tool_command *tool_command_at(size_t i)
{
	for (size_t g = 0; g < BASE_COUNT(groups); g++)
		for (size_t k = 0; groups[g].commands[k]; k++)
			if (i-- == 0)
				return groups[g].commands[k];
	return NULL;
}

static int help(FILE *to, int code)
{
	fputs("usage: vckpt COMMAND [OPTION...] [ARGUMENT...]\n\n"
		"A checkpoint store: steps of training runs as logical tensors, each distinct piece kept once.\n",
		to);
	for (const struct group *g = groups; g < groups + BASE_COUNT(groups); g++) {
		fprintf(to, "\n%s:\n", g->title);
		for (size_t i = 0; g->commands[i]; i++)
			fprintf(to, "  %-8s %s\n", g->commands[i]->name, g->commands[i]->summary);
	}
	fputs("\nvckpt help COMMAND says more; so does vckpt(1). vckpt version prints the version.\n"
		"STORE may be left out where VCKPT_STORE names it.\n"
		"Exit codes: 0 done, 1 failed, 2 usage, 3 damage found, 4 verify met only what a newer vckpt wrote,\n"
		"5 undecided: the storage failed, and the step may be imported or removed, or the save aborted, all\n"
		"the same.\n",
		to);
	return code;
}

/* A command whose output cannot be written has failed, also where only the last of it can be. */
static int output_end(int code)
{
	const bool before = ferror(stdout), now = fflush(stdout) == EOF;

	if (code != TOOL_DONE || (!before && !now))
		return code;
	if (now)
		perror("vckpt: standard output");
	else
		fputs("vckpt: standard output: some of it could not be written\n", stderr);
	return TOOL_FAILED;
}

static int run_command(const struct tool_command *command, int argc, char **argv)
{
	struct tool t = {.command = command};
	int code = command->run(&t, argc, argv);

	load_step_unref(t.step);
	commit_list_close(t.list);
	store_close(t.store);
	free(t.arguments);
	code = output_end(code == TOOL_HELPED ? TOOL_DONE : code);
	tool_interrupt_die();
	return code;
}

/* Characters to insert, delete or change (Levenshtein). `wrong` has at most 31. */
static size_t distance(const char *wrong, const char *name)
{
	size_t row[32], len = strlen(wrong);

	for (size_t i = 0; i <= len; i++)
		row[i] = i;
	for (; *name; name++) {
		size_t diagonal = row[0]++;

		for (size_t i = 0; i < len; i++) {
			size_t changed = diagonal + (wrong[i] != *name);
			size_t least = row[i] < row[i + 1] ? row[i] : row[i + 1];

			diagonal = row[i + 1];
			row[i + 1] = changed < least + 1 ? changed : least + 1;
		}
	}
	return row[len];
}

/* The command that was probably meant, or NULL. */
static const char *nearest(const char *wrong)
{
	const char *found = NULL;
	size_t best = 3, length = strlen(wrong), d;

	for (size_t i = 0; tool_command_at(i) && length < 32; i++)
		if ((d = distance(wrong, tool_command_at(i)->name)) < best && d < length) {
			best = d;
			found = tool_command_at(i)->name;
		}
	return found;
}

static int unknown(const char *name)
{
	const char *meant = nearest(name);

	tool_print(stderr, "vckpt: there is no command \"%s\"%s%s%s (see vckpt --help)\n", name,
		meant ? "; did you mean " : "", meant ? meant : "", meant ? "?" : "");
	return TOOL_USAGE;
}

static bool has_word(const char *list, const char *word)
{
	size_t n = strlen(word);

	for (; *list; list += strcspn(list, ","), list += *list == ',')
		if (!strncmp(list, word, n) && (list[n] == ',' || !list[n]))
			return true;
	return false;
}

/* STORE DIR -o OPTIONS: for `mount -t fuse.vckpt` and `mount -o remount` mount(8) runs the type's name as a command. */
static int mount_words(const char *store, const char *directory, const char *options)
{
	if (has_word(options, "remount"))
		tool_print(stderr, "vckpt: a mounted store cannot be remounted; unmount %s and mount it again (new "
			"steps appear without that)\n", directory);
	else
		tool_print(stderr, "vckpt: mount the store %s on %s with \"mount -t vckpt STORE DIR\" (not fuse.vckpt) "
			"or \"vckpt mount STORE DIR\"\n", store, directory);
	return TOOL_USAGE;
}

static bool is_one_of(const char *text, const char *a, const char *b, const char *c)
{
	return !strcmp(text, a) || !strcmp(text, b) || !strcmp(text, c);
}

int main(int argc, char **argv)
{
	static char line[4096]; /* written at its end at once, so that lines of several processes do not mix */

	base_standard_open();
	base_descriptors_allow();
	setvbuf(stderr, line, _IOLBF, sizeof line);
	signal(SIGCHLD, SIG_DFL); /* if the parent ignored it, no child could be waited for */
	base_log_set_program("vckpt");
	if (argc < 2)
		return help(stderr, TOOL_USAGE);
	if (!strcmp(argv[1], "help") && argc > 2) { /* "help X" is "X --help" */
		argv[1] = argv[2];
		argv[2] = (char *)"--help";
		argc = 3;
	}
	if (is_one_of(argv[1], "help", "--help", "-h"))
		return output_end(help(stdout, TOOL_DONE));
	if (is_one_of(argv[1], "version", "--version", "-V"))
		return output_end(printf("vckpt %s\n", VCKPT_VERSION) < 0 ? TOOL_FAILED : TOOL_DONE);
	if (!strcmp(argv[1], "complete"))
		return tool_complete(argc, argv);
	for (size_t i = 0; tool_command_at(i); i++)
		if (!strcmp(argv[1], tool_command_at(i)->name))
			return run_command(tool_command_at(i), argc - 1, argv + 1);
	return argc > 4 && !strcmp(argv[3], "-o") ? mount_words(argv[1], argv[2], argv[4]) : unknown(argv[1]);
}
