/* SPDX-License-Identifier: Apache-2.0
 *
 * dcp: the file .metadata that torch's distributed checkpoint writes: a pickle, read without Python. It says which
 * tensors and other entries there are, the boxes in which each tensor was saved, and where each box and each entry is.
 * For torch 2.1 and later. Only the pickle is read: that a tensor's boxes cover it exactly is checked here, whether the
 * files agree with it is for the caller to check. */
#ifndef CORE_FOREIGN_DCP_H
#define CORE_FOREIGN_DCP_H

#include "core/foreign/pickle.h"
#include "core/tensor/boxes.h"
#include "core/tensor/dtype.h"

struct foreign_place { struct foreign_text path; uint64_t offset, bytes; };     /* the path need not be UTF-8 */

struct foreign_dcp_entry {
	struct foreign_text key;
	bool is_tensor;
	/* of a tensor */
	const char *dtype;              /* torch's name; static */
	enum tensor_dtype kept;         /* what it is kept as */
	struct tensor_shape shape;
	struct tensor_boxes chunks;
	struct foreign_place *places;   /* of each chunk; an empty one has none */
	bool requires_grad, pin_memory;
	unsigned memory_format;         /* contiguous, channels_last, preserve */
	/* of another entry */
	struct foreign_place place;
	/* from the state's root: a tuple of at most 64 texts and ints; NULL: not given */
	const struct foreign_items *path;
};

struct foreign_dcp {
	struct foreign_dcp_entry *entries; size_t nentries;
	bool paths;                     /* planner_data is a dict of paths by key */
	bool other_data;                /* planner_data is something else */
	void *pickle;
};
/* `bytes` must live as long as the result. -BASE_EFORMAT with a sentence; -ENOMEM. */
int foreign_dcp_read(const void *bytes, size_t len, struct foreign_dcp *ret_d, struct base_error *err);
void foreign_dcp_release(struct foreign_dcp *d);

#endif
