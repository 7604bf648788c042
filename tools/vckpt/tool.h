/* SPDX-License-Identifier: Apache-2.0
 *
 * tool: what the sub-commands of `vckpt` share: arguments, output, exit codes. A function that returns an exit code
 * other than TOOL_DONE has printed why. One thread. */
#ifndef TOOLS_VCKPT_TOOL_H
#define TOOLS_VCKPT_TOOL_H

#include <fts.h>
#include <jansson.h>
#include <stdio.h>

#include "core/base/error.h"
#include "core/base/log.h"
#include "core/commit/incoming/incoming.h"
#include "core/load/open/step.h"
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
	/* What the command has opened; closed when it has returned. */
	struct store *store;
	struct commit_list *list;
	struct load_step *step;
};

struct tool_command {
	const char *name, *summary;
	const char *help; /* usage line and options, printed by --help */
	int (*run)(struct tool *t, int argc, char **argv); /* an exit code, or TOOL_HELPED */
	bool makes_store; /* STORE need not be one yet: an argument is always STORE */
};

/* One option of a command. It has one of: a flag that it sets, a text that becomes its value (the last one, where it is
 * given again), or a function that is called each time with its value. */
struct tool_option {
	const char *name;
	char letter; /* of the short form; 0: there is none */
	bool *flag;
	const char **text;
	int (*call)(struct tool *t, void *arg, const char *value); /* 0, or an exit code that ends the command */
	void *arg;
	bool optional; /* the value may be left out; it is NULL then */
};

extern const struct tool_command tool_init, tool_import, tool_ls, tool_info, tool_cat, tool_show, tool_diff,
	tool_export, tool_verify, tool_mend, tool_mount, tool_umount, tool_rm, tool_gc, tool_abort, tool_index,
	tool_stalls, tool_mesh_command, tool_layout, tool_reshard, tool_du, tool_log, tool_metrics, tool_report,
	tool_find, tool_wait, tool_copy, tool_sync, tool_prune, tool_policy, tool_set, tool_pin, tool_unpin, tool_tag,
	tool_repack;

const struct tool_command *tool_command_at(size_t i); /* the i-th of all, or NULL */
int tool_complete(int argc, char **argv); /* of the completions of shells; an exit code */

/* Parses the options of a command: its own, up to one without a name, and the common ones (--json -q -v --help).
 * Positional arguments go to t->arguments, in order, as many as the usage line says, the store first. An option without
 * a name that has a function is called with each of them, so that an option can apply to the arguments after it.
 * Returns 0, or what the command has to return. */
int tool_parse(struct tool *t, int argc, char **argv, const struct tool_option *options);
#define TOOL_HELPED 1000 /* --help was printed: the exit code is TOOL_DONE */

/* prints the sentence and points to --help; returns TOOL_USAGE */
int tool_usage(const struct tool *t, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* ---- arguments.c ---- */
void tool_argument_add(struct tool *t, const char *text);
/* After the last. These return 0 or TOOL_USAGE: too few or too many; STORE behind its target; no STORE at all. */
int tool_arguments_end(struct tool *t);
int tool_arguments_order(const struct tool *t);
int tool_arguments_no_store(const struct tool *t);
bool tool_takes_run(const struct tool *t); /* by its help */
/* STORE/RUN/STEP in one word, as the Python package takes it: writes into `text` how a command takes it. */
bool tool_arguments_apart(const struct tool *t, char *text, size_t size);
/* tool_usage, and the usage line after it */
int tool_arguments_wrong(const struct tool *t, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Asks on standard error, "QUESTION [y/N] "; false: anything but yes. */
bool tool_confirm(const char *question);

/* prints the sentence; returns TOOL_FAILED */
int tool_failed(const struct tool *t, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* the same of an error; TOOL_DAMAGE for damaged data, or TOOL_UNDECIDED */
int tool_fail(const struct tool *t, const struct base_error *err);

int tool_open_store(struct tool *t, unsigned flags); /* t->store; 0 or an exit code */

/* RUN, RUN/STEP or RUN/STEP/REST. STEP: a number, `latest` or a tag, tried in this order; which step the last two mean
 * is known with the list only. rest: points into `text`, or NULL. */
struct tool_target {
	char run[PROTO_RUN_MAX + 1];
	bool has_step, latest;
	char tag[PROTO_TAG_MAX + 1]; /* "": none */
	uint64_t step;
	const char *rest;
};
/* A number, alone or after a word (step-100, ckpt_100: docs/python.md, "What a path names"). 1, 0: it is none, or
 * -EOVERFLOW: it is above 2^63-1. */
int tool_step_parse(const char *text, size_t len, uint64_t *ret_step);
/* The value of an option that is a number from 1 on; NULL changes nothing. 0 or TOOL_USAGE. */
int tool_count_parse(const struct tool *t, const char *option, const char *value, uint64_t *ret_n);
/* The run of a step that is named alone. 0 or TOOL_USAGE, also if STORE and the target are swapped */
#define TOOL_DEFAULT_RUN "default"
int tool_target_parse(const struct tool *t, const char *text, struct tool_target *ret_target);
/* The same where only a RUN makes sense, so a number is the name of one. why: the sentence for what has a step. */
int tool_run_parse(const struct tool *t, const char *text, const char *why, struct tool_target *ret_target);
/* RUN/FIRST..LAST, steps by number; one of both may be left out. Else it is a target: range->given is false. Of a range
 * the target is the run alone. 0 or TOOL_USAGE. */
struct tool_range { bool given; uint64_t first, last; };
int tool_steps_parse(const struct tool *t, const char *text, struct tool_target *ret_target,
	struct tool_range *ret_range);
bool tool_range_has(const struct tool_range *range, uint64_t step); /* one that is not given has all */
/* a file is given where RUN should be; returns TOOL_USAGE */
int tool_missing_run(const struct tool *t, const char *path);
/* Say that there is no such run, or in this list no such step (a number, or what comes after "no step"); exit codes. */
int tool_no_run(const struct tool *t, const char *run);
int tool_no_step(const struct tool *t, const struct commit_list *l, const char *which);
int tool_no_range(const struct tool *t, const struct commit_list *l, const struct tool_range *range);
/* The step that a target means in a list that knows it (NULL: there is none), the sentence that there is none and its
 * exit code, and what makes a list know it. A RUN alone means its newest step. */
const struct commit_list_step *tool_target_in(const struct commit_list *l, const struct tool_target *target);
int tool_no_target(const struct tool *t, const struct commit_list *l, const struct tool_target *target);
int tool_target_know(struct commit_list *l, const struct tool_target *target, struct base_error *err);
/* The visible step that a target means, in t->list: its run's list, open for the newest steps and that one. 0, or an
 * exit code. */
int tool_target_find(struct tool *t, const struct tool_target *target, const struct commit_list_step **ret_step);
/* The same with t->store, open for reading, and t->step. ret_step may be NULL. */
int tool_step_open(struct tool *t, const struct tool_target *target, const struct commit_list_step **ret_step);

/* ---- facts.c: what a run's list says of its steps (core/commit/list/list_facts.h) ---- */
struct proto_step_facts;
/* A sentence that no step of the run has the tag, and which tags there are; an exit code. */
int tool_no_tag(const struct tool *t, const struct commit_list *l, const char *tag);
/* Adds "tags", and "pinned" if it is; facts NULL: there are none. */
void tool_json_facts(json_t *row, const struct proto_step_facts *facts);
/* For people: "best, sent; pinned: REASON"; b stays empty where there are none. */
void tool_facts_note(const struct proto_step_facts *facts, struct base_buf *b);
/* The list of a run, in t->list, where it stays until that of another run is asked for; the newest steps of it are
 * known. 0, or a negative errno. */
int tool_list_open(struct tool *t, const char *run, struct base_error *err);

/* Adds KEY=VALUE of an option or argument to the array, whose strings are the caller's. what: "--set " or "". */
int tool_attribute_add(const struct tool *t, const char *what, const char *text, struct proto_attribute **attributes,
	size_t *n);

/* Calls f for each entry below a directory, sorted by name, so that the order is the same everywhere; links are not
 * followed. f returns 0, 1 to leave out what is below the entry, or a negative errno. */
int tool_walk(const char *root, int (*f)(void *arg, const FTSENT *entry), void *arg, struct base_error *err);
/* Writes all of it; `name` of the file is for the sentence. */
int tool_write(int fd, const char *name, const void *bytes, size_t len, struct base_error *err);
/* The whole file, or nothing: into a file beside it that takes its name. What is no file (a terminal, a pipe) is
 * written to as it is, and a link stays one. */
int tool_file_put(const char *path, const char *bytes, size_t len, struct base_error *err);

/* ---- interrupt.c ---- */
/* From now on SIGINT ends the command at once; the line "interrupted: TEXT" goes to standard error first. */
void tool_interrupt_ends(const struct tool *t, const char *text);
/* From now on the first SIGINT is only remembered, and the second one ends the command as above. */
void tool_interrupt_waits(const struct tool *t, const char *text);
bool tool_interrupted(void); /* any thread */
bool tool_terminated(void);  /* by SIGTERM; any thread */
int tool_interrupt_check(struct base_error *err); /* -EINTR when it was; any thread */
/* Behind tool_interrupt_waits: SIGTERM does the same as SIGINT, and the process does not die of the first one, which is
 * how the command is meant to end. */
void tool_interrupt_is_end(void);
void tool_interrupt_die(void); /* dies of a SIGINT that was remembered, else returns */

/* one document and a newline on standard output; takes the reference; TOOL_DONE or TOOL_FAILED */
int tool_print_json(json_t *value);
json_t *tool_json_text(const char *bytes, size_t len); /* a JSON string; never NULL for valid UTF-8 */
json_t *tool_json_attributes(const struct proto_attribute *attributes, size_t n);
json_t *tool_json_shape(const struct tensor_shape *shape);
/* What a fault touches: run, step, component, and tensor or blob, as far as they are given (NULL; PROTO_NONE). */
void tool_json_touched(json_t *o, const char *run, uint64_t step, const char *component, const char *name);
/* Brings a store's index up to date, in a process of its own, because a damaged file may make LMDB end the process. If
 * another process is at it, that is left to it. wrote: parts that this process wrote, so that the index believes them;
 * at most SAVE_TRUST_PARTS. */
bool tool_update_index(const char *store, const struct base_digest *wrote, size_t n);
/* The same after steps were removed, if the store has an index: it may have steps under their names only. */
void tool_index_follow(const struct tool *t);

/* vckpt ls --incoming; run NULL: of all runs. */
int tool_list_incoming(struct tool *t, const char *run);
extern const char *const tool_liveness[]; /* names, by enum commit_liveness */
/* One line of it, of an attempt that is undecided. */
struct commit_incoming;
void tool_print_incoming(const struct commit_incoming *in);

#endif
