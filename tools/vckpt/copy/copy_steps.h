/* SPDX-License-Identifier: Apache-2.0
 *
 * copy_steps: what vckpt copy and vckpt sync share: two open stores, their options, steps one after another, what is
 * printed of each. One thread. */
#ifndef TOOLS_VCKPT_COPY_COPY_STEPS_H
#define TOOLS_VCKPT_COPY_COPY_STEPS_H

#include "core/copy/copy.h"
#include "tools/vckpt/tool.h"

struct copy_steps {
	struct tool_progress progress;  /* first: gets the library's calls, too */
	struct tool *t;                 /* t->store is the source */
	struct copy_options options;
	struct store *to;
	struct copy *copy;
	json_t *rows;                   /* of --json */
	bool replace;                   /* steps that are there and differ */
	/* A step of the source that was removed or replaced meanwhile is no failure. */
	bool changes;
	bool is_end;                    /* an interruption is no failure */
	size_t copied, equal, failed, gone;
	uint64_t read_bytes, stored_bytes;
	struct base_digest *parts; size_t nparts; /* that the index has not been given yet */
	int worst;                      /* exit code so far */
	bool stop;                      /* an error that concerns every step */
};

/* Values of --limit-rate and --threads; as tool_option calls them, arg: the struct. */
int copy_steps_rate(struct tool *t, void *arg, const char *value);
int copy_steps_threads(struct tool *t, void *arg, const char *value);
/* Opens both stores, and the session. An exit code. */
int copy_steps_open(struct copy_steps *s, struct tool *t, const char *to);
/* Copies one visible step and prints the line. A failure is in s->worst. */
void copy_steps_one(struct copy_steps *s, const struct commit_list *list, const struct commit_list_step *step,
	const char *as, bool replace);
/* The run's policy, after its steps. */
void copy_steps_policy(struct copy_steps *s, const struct commit_list *list, const char *as);
/* An error that is no step's. */
void copy_steps_failed(struct copy_steps *s, const struct base_error *err);
/* A line that is no step's, for people. */
void copy_steps_say(struct copy_steps *s, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* The last output: the document of --json, with `more` (takes the reference; NULL: none) beside its members; or a sum.
 * Returns the exit code, which was `code`. */
int copy_steps_report(struct copy_steps *s, json_t *more, int code);
/* Brings the index of the other store up to date. */
void copy_steps_index(struct copy_steps *s);
/* The same, and closes all. */
void copy_steps_close(struct copy_steps *s);

#endif
