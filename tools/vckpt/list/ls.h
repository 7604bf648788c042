/* SPDX-License-Identifier: Apache-2.0
 *
 * ls: what the listings of `vckpt ls` share: options, order, and cells of their tables. One thread. */
#ifndef TOOLS_VCKPT_LIST_LS_H
#define TOOLS_VCKPT_LIST_LS_H

#include "core/load/open/step.h"
#include "tools/vckpt/print/table.h"
#include "tools/vckpt/tool.h"

struct ls {
	struct tool *t;
	const char *sort; /* NULL: as it comes */
	bool reverse, bytes, time, bare, more, incoming;
	int64_t now_ns;
	struct tool_table *table; /* of the listing under way; NULL with --json: */
	json_t *rows;
};

/* What a row is sorted by; `index`: its place before. A step has a number in place of a name. */
struct ls_item {
	const char *name;
	size_t name_len;
	uint64_t step;
	int64_t time_ns;
	uint64_t bytes;
	struct proto_attribute *attributes; /* with those that were set later; the array is the item's */
	size_t nattributes;
	size_t index;
};
enum { LS_NAME = 1 << 0, LS_STEP = 1 << 1, LS_TIME = 1 << 2, LS_SIZE = 1 << 3, LS_ATTRIBUTE = 1 << 4 };
/* Sorts as asked for; `keys`: what these items (called `what`) have. 0 or TOOL_USAGE. */
int ls_sort(const struct ls *ls, const char *what, unsigned keys, struct ls_item *items, size_t n);

char *ls_format_bytes(const struct ls *ls, uint64_t bytes, char text[static 32]); /* as --bytes asks for; text */
#define LS_BYTES(ls, n) ls_format_bytes(ls, n, (char[32]){0})

/* Begins a listing; its rows, in order: the same for people and with --json, but for members that only its columns
 * name. ls_add takes the row. */
void ls_begin(struct ls *ls, const struct tool_column *columns, unsigned n);
void ls_add(struct ls *ls, json_t *row);
/* With --json the rows since the last call, which are the caller's, else NULL. */
json_t *ls_take(struct ls *ls);
/* With --json prints the document, else the rows. Takes the document. An exit code. */
int ls_print(struct ls *ls, json_t *document);
void ls_add_when(const struct ls *ls, json_t *row, int64_t time_ns); /* for the table: the member "when" */
bool ls_says(const struct ls *ls); /* are totals and notes wanted? */
/* What the list says of a visible step; attributes: with those that were set later. */
json_t *ls_step_json(const struct commit_list *l, const struct commit_list_step *s,
	const struct proto_attribute *attributes, size_t n);

/* The components and blobs of a step; the tensors of a component. An exit code. */
int ls_step(struct ls *ls, struct load_step *step, const struct commit_list_step *entry);
int ls_tensors(struct ls *ls, struct load_step *step, const char *component);

#endif
