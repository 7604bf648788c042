/* SPDX-License-Identifier: Apache-2.0
 *
 * find_internal: find.c has the steps and the expression, find_groups.c asks for tensors, find_known.c knows what the
 * tensors of a step are, find_keep.c writes the index. */
#ifndef CORE_FIND_FIND_INTERNAL_H
#define CORE_FIND_FIND_INTERNAL_H

#include "core/base/table.h"
#include "core/find/find.h"
#include "core/query/step.h"
#include "core/step/layout.h"
#include "index/index.h"

/* Names of tensors, behind those of steps. */
enum { FIND_TENSOR = QUERY_STEP_COUNT, FIND_COMPONENT, FIND_DTYPE, FIND_SHAPE, FIND_DIGEST, FIND_NAMES };
extern const struct query_name find_names[FIND_NAMES];

struct find_layout {
	struct base_digest digest;
	struct store_layout *layout;
	void *object; size_t len;       /* read from the store; NULL: the index has it */
};
/* What a group says of a set: the tensors for which it is true, whatever their digests are. */
struct find_asked { bool known; uint32_t *tensors, n; };
/* The tensors of steps with the same layouts: those of the layouts, one after another. One that several layouts have
 * comes again. */
struct find_set {
	struct base_digest id;          /* of the digests of its layouts, one after another */
	uint32_t *layouts, nlayouts;    /* numbers */
	uint64_t *ends, tensors;        /* by layout: tensors up to its last one; all */
	bool kept;                      /* the index has it */
	struct find_asked *asked;       /* by group */
};
/* What the index lacked: the set of a step, or the digests of its tensors. */
struct find_row { struct base_digest manifest; uint32_t set; uint8_t *digests; size_t len; };
/* One file of the index: what this process read from it, and what it writes. */
struct find_file {
	unsigned flag;                  /* INDEX_STEPS, INDEX_DIGESTS */
	struct index *reads, *writes;   /* NULL: none, or not open */
	bool opened, refused;           /* reads was tried; writes failed */
	struct find_row *rows; size_t nrows;
};

struct find_known {
	struct store *store;
	size_t groups;
	bool no_index;
	struct find_layout *layouts; size_t nlayouts; struct base_table layouts_by_digest;
	struct find_set *sets; size_t nsets; struct base_table sets_by_id;
	struct find_file steps, digests;
	/* manifests of all visible steps, sorted: a writer drops the others */
	const struct base_digest **visible; size_t nvisible;
	uint8_t *read; size_t read_room; /* digests that were read last */
	char *name;                     /* room for a tensor's name */
	bool all;                       /* every visible step was asked for its set */
};

/* The set of a visible step; *ret_set is void after the next call. 1: it was read from the store; 0: known; or an
 * error. */
int find_known_set(struct find_known *k, const char *run, const struct commit_list_step *step,
	struct find_set **ret_set, struct base_error *err);
/* The digests of its tensors, 32 bytes each, in the order of the set; borrowed until the next call. 1, 0, or an
 * error. */
int find_known_digests(struct find_known *k, const char *run, const struct commit_list_step *step,
	const struct find_set *set, const uint8_t **ret_digests, struct base_error *err);
struct find_set *find_known_set_of(const struct find_known *k, const struct base_digest *id); /* NULL: not known */
int64_t find_known_layout(const struct find_known *k, const struct base_digest *digest); /* its number, or -ENOENT */
const struct store_layout *find_known_tensor(const struct find_known *k, const struct find_set *set, uint64_t tensor,
	uint32_t *ret_number); /* the layout that has it, and its number there */
void find_known_release(struct find_known *k);

/* ---- find_keep.c. A failure to write costs time at the next question, and nothing else. ---- */
/* Copies the row. Writes once there are enough of them; too few are not worth a new file. */
void find_keep_row(struct find_known *k, struct find_file *file, const struct find_row *row);
void find_keep_end(struct find_known *k); /* publishes what was written */

/* ---- find_groups.c ---- */
/* One step that is asked: the `arg` of the expression's subject. */
struct find_asking {
	struct find_known *known;
	const struct query_expr *expr;
	struct query_step step;
	const char *run; const struct commit_list_step *entry;
	int r;                          /* the first failure: what the expression says does not count */
	bool read;                      /* something was read from the store */
	struct base_error *err;
};
bool find_groups_one(const void *asking, size_t group);
bool find_groups_value(const void *asking, int known, const char *name, size_t i, struct query_value *ret_value);

#endif
