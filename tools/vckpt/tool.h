/* SPDX-License-Identifier: Apache-2.0
 *
 * tool: what the sub-commands of `vckpt` share: arguments, output, exit codes. One thread. */
#ifndef TOOLS_VCKPT_TOOL_H
#define TOOLS_VCKPT_TOOL_H

#include <getopt.h>
#include <jansson.h>
#include <stdio.h>

#include "core/base/error.h"
#include "core/base/log.h"
#include "core/commit/incoming.h"
#include "core/commit/list.h"
#include "core/step/store.h"
#include "tools/vckpt/print/format.h"
#include "tools/vckpt/print/progress.h"
#include "tools/vckpt/print/terminal.h"

/* NEWER: no damage, but a newer vckpt wrote something that this one cannot look at. UNDECIDED: the storage failed, and
 * what the command was to do may have happened. */
enum tool_exit { TOOL_DONE, TOOL_FAILED, TOOL_USAGE, TOOL_DAMAGE, TOOL_NEWER, TOOL_UNDECIDED };

struct tool {
	const struct tool_command *command;
	bool json, quiet;
	int verbose;
	const char **arguments;
	int narguments; /* positional, in order; the first is the store where the command takes one */
	bool from_environment; /* the store is that of VCKPT_STORE */
};

struct tool_command {
	const char *name, *summary;
	const char *help; /* usage line and options, printed by --help */
	int (*run)(struct tool *t, int argc, char **argv);
	bool makes_store; /* STORE need not be one yet: an argument is always STORE */
};

extern const struct tool_command tool_init, tool_import, tool_ls, tool_info, tool_cat, tool_export, tool_verify,
	tool_mend, tool_mount, tool_umount, tool_rm, tool_gc, tool_abort, tool_index, tool_stalls, tool_mesh_command,
	tool_layout, tool_reshard;

/* Parses the options of a command: its own (called with the option's val and optarg; return 0, or an exit code that
 * ends the command) and the common ones (--json -q -v --help). Positional arguments go to t->arguments, in order, as
 * many as the usage line says, the store first; with `option` they are told too (val 1), so that an option can count
 * for what stands after it. Returns 0 or the exit code to leave with, plus 1000 (so that --help is 1000). */
int tool_parse(struct tool *t, int argc, char **argv, const char *short_options, const struct option *long_options,
	int (*option)(struct tool *t, void *arg, int val, const char *value), void *arg);
#define TOOL_LEAVE 1000

/* says it, points to --help; returns TOOL_USAGE */
int tool_usage(const struct tool *t, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* ---- arguments.c ---- */
void tool_argument_add(struct tool *t, const char *text);
/* After the last. These return 0 or TOOL_USAGE, said: too few or too many; STORE behind its target; no STORE at all. */
int tool_arguments_end(struct tool *t);
int tool_arguments_order(const struct tool *t);
int tool_arguments_no_store(const struct tool *t);
/* STORE/RUN/STEP in one word, as the Python package takes it: says in text how a command takes it. */
bool tool_arguments_apart(const struct tool *t, char *text, size_t size);
/* tool_usage, and the usage line after it */
int tool_arguments_wrong(const struct tool *t, const char *text);

/* says it; returns TOOL_FAILED, TOOL_DAMAGE for damaged data, or TOOL_UNDECIDED */
int tool_fail(const struct tool *t, const struct base_error *err);

int tool_open_store(struct tool *t, unsigned flags, struct store **ret_s);

/* RUN, RUN/STEP or RUN/STEP/REST. STEP: decimal or `latest` (left to the caller: *ret_latest). rest: points into
 * `text`, or NULL. */
struct tool_target {
	char run[PROTO_RUN_MAX + 1];
	bool has_step, latest;
	uint64_t step;
	const char *rest;
};
/* A number, alone or after a word (step-100, ckpt_100: docs/python.md, "What a path names"). 1, 0: it is none, or
 * -EOVERFLOW: it is above 2^63-1. */
int tool_step_parse(const char *text, size_t len, uint64_t *ret_step);
/* The run of a step that is named alone. 0 or TOOL_USAGE, said; also where STORE and the target are swapped */
#define TOOL_DEFAULT_RUN "default"
int tool_target_parse(const struct tool *t, const char *text, struct tool_target *ret_target);
/* a file stands where RUN has to; returns TOOL_USAGE */
int tool_missing_run(const struct tool *t, const char *path);
/* Say that there is no such run, or in this list no such step (a number, or what comes after "no step"); exit codes. */
int tool_no_run(const struct tool *t, const struct store *s, const char *run);
int tool_no_step(const struct tool *t, const struct store *s, const struct store_list *l, const char *which);
/* The visible step that a target means; opens its run's list, for the newest steps and that one. 0, or an exit code,
 * said. */
int tool_target_find(const struct tool *t, struct store *s, const struct tool_target *target, struct store_list **ret_l,
	const struct store_list_step **ret_step);

/* ---- interrupt.c ---- */
/* From now on SIGINT ends the command at once; the line "interrupted: TEXT" goes to standard error first. */
void tool_interrupt_ends(const struct tool *t, const char *text);
/* From now on the first SIGINT is only remembered, and the second one ends the command as above. */
void tool_interrupt_waits(const struct tool *t, const char *text);
bool tool_interrupted(void); /* any thread */
int tool_interrupt_check(struct base_error *err); /* -EINTR when it was; any thread */
void tool_interrupt_die(void); /* dies of a SIGINT that was remembered, else returns */

/* one document and a newline on standard output; takes the reference; TOOL_DONE or TOOL_FAILED */
int tool_print_json(json_t *value);
json_t *tool_json_text(const char *bytes, size_t len); /* a JSON string; never NULL for valid UTF-8 */
json_t *tool_json_attributes(const struct proto_attribute *attributes, size_t n);
/* Brings a store's index up to date, in a process of its own, because a damaged file may make LMDB end the process.
 * Another process that is at it does it. wrote: a part that this process wrote, so that the index believes it; or NULL.
 */
bool tool_update_index(const char *store, const struct base_digest *wrote);

/* vckpt ls --incoming; run NULL: of all runs. */
int tool_list_incoming(struct tool *t, struct store *s, const char *run);
/* One line of it, of an attempt that is undecided. */
struct store_incoming;
void tool_print_incoming(const struct store_incoming *in);

#endif
