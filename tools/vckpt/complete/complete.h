/* SPDX-License-Identifier: Apache-2.0
 *
 * complete: what the files of `vckpt complete` share. One thread. */
#ifndef TOOLS_VCKPT_COMPLETE_COMPLETE_H
#define TOOLS_VCKPT_COMPLETE_COMPLETE_H

#include "core/base/table.h"
#include "tools/vckpt/tool.h"

enum complete_shell { COMPLETE_BASH, COMPLETE_ZSH, COMPLETE_FISH };
#define COMPLETE_WORDS 1024u

struct complete_offered { struct base_table by_text; char **texts; size_t n; };

struct complete {
	enum complete_shell shell;
	const char *words[COMPLETE_WORDS]; /* as the program would get them; the last is the one at the cursor */
	size_t nwords;
	const char *current;            /* what of the last word is to be completed: all, or what follows --option= */
	/* bash: bytes of that word that it keeps as they are typed; the quotation mark that is open there, or 0 */
	size_t skip;
	char quote;
	const struct tool_command *command;
	const char *given[COMPLETE_WORDS]; /* arguments before the cursor, the store of the environment first */
	size_t ngiven;
	struct complete_offered *offered;
};

/* The words of a line as bash reads them: quotation marks, \, and ~ and $NAME at the beginning of a word. breaks: where
 * bash begins a word of its own inside one. The words stay allocated. */
void complete_split(struct complete *c, const char *line, const char *breaks);
/* Prints text so that bash reads it as one word, or as the rest of one behind that quotation mark. */
void complete_quote(const char *text, char quote);
/* Prints a candidate once, if it begins with what is typed. */
void complete_offer(const struct complete *c, const char *text);
/* Runs, steps, components, tensors and files, for a word of the usage line: "RUN[/STEP]". */
void complete_target(const struct complete *c, const char *word);
void complete_component(const struct complete *c); /* of the step that is given, or the newest one of the run */
/* K:ATTRIBUTE:min, of the attributes that steps of the run have; without a run, of all runs. */
void complete_best(const struct complete *c);
void complete_mounts(const struct complete *c);

#endif
