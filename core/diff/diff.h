/* SPDX-License-Identifier: Apache-2.0
 *
 * diff: what is different from one side, A, to another, B: two steps, of one store or of two, or a step and something
 * else that has tensors. Names, dtypes, shapes and digests decide, and no piece is read, where both sides cut a tensor
 * alike; where they do not, its bytes are compared. A digest of a step is believed (docs/security.md). Pieces that
 * differ are read for their values if the caller wants these. Blocks; any thread; several differ beside each other. */
#ifndef CORE_DIFF_DIFF_H
#define CORE_DIFF_DIFF_H

#include "core/load/open/step.h"

/* A side that is no step. Its tensors are sorted as diff_names_compare says, no name twice. */
struct diff_other {
	void *arg;
	uint32_t ntensors, nblobs;
	void (*tensor)(void *arg, uint32_t i, struct load_tensor_info *ret_info);
	void (*blob)(void *arg, uint32_t i, struct load_blob_info *ret_info);
	/* The items of a box, row-major; several threads at once. */
	int (*read)(void *arg, uint32_t tensor, const struct tensor_box *box, void *out, struct base_error *err);
};
/* One of the two. A is a step. */
struct diff_side { struct load_step *step; const struct diff_other *other; };
int diff_names_compare(const struct load_tensor_info *a, const struct load_tensor_info *b);

/* RETYPED: its shape may be another one, too. */
enum diff_change { DIFF_ADDED, DIFF_REMOVED, DIFF_RETYPED, DIFF_RESHAPED, DIFF_CHANGED };
extern const char *const diff_change_words[]; /* "added", ...; by enum diff_change */

/* Of the values of pieces that differ (all values, where sides cut a tensor differently). An item of a complex dtype is
 * two values, as is one of f4_e2m1fn_x2. */
struct diff_values {
	uint64_t changed;               /* values whose bits differ */
	uint64_t nan_a, nan_b, inf_a, inf_b;
	double max;                     /* of |b - a|, where both are finite, as in the next two */
	double rms;                     /* of b - a over all values of the tensor: 0 for those of equal pieces */
	double relative;                /* the norm of b - a by that of a, which may be infinite; 0 if b - a is 0 */
};

#define DIFF_NONE UINT32_MAX
struct diff_row {
	enum diff_change change;
	bool blob, has_values;
	uint32_t a, b;                  /* numbers of the tensor or blob on each side; DIFF_NONE: it has none */
	struct diff_values values;
};
/* What is different, by component and name, tensors before blobs; with values, the tensors that have some come after
 * the other tensors: the one that changed most first, which is one that got a NaN or an infinity, or else has the
 * highest `relative`. */
struct diff {
	struct diff_row *rows; size_t n;
	/* Of each component (the sides' memory), and last of all blobs (NULL): how many there are of each enum
	 * diff_change, and of equal ones. */
	struct diff_count { const char *component; uint64_t n[DIFF_CHANGED + 2]; } *counts; size_t ncounts;
};

struct diff_options {
	const char *component;          /* only this one; NULL: all. Its blobs are COMPONENT.json and COMPONENT/... */
	bool values;
	void (*progress)(void *arg, uint64_t done, uint64_t total); /* bytes of each side; or NULL */
	void *arg;
};
/* -ENOENT: neither side has the component. -BASE_EDAMAGED: also, that two pieces have other digests and equal bytes.
 * The sides outlive the result only as far as its numbers are to be understood. */
int diff_run(const struct diff_side *a, const struct diff_side *b, const struct diff_options *options,
	struct diff **ret_d, struct base_error *err);
void diff_free(struct diff *d); /* NULL-safe */

void diff_side_tensor(const struct diff_side *s, uint32_t i, struct load_tensor_info *ret_info);
void diff_side_blob(const struct diff_side *s, uint32_t i, struct load_blob_info *ret_info);

#endif
