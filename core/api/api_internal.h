/* SPDX-License-Identifier: Apache-2.0
 *
 * What the files of core/api share: errors across the public boundary, stores by path, and the mesh handle.
 *
 * vckpt_error and base_error are one struct under two names, so that a public call hands its `err` down and the
 * sentence is written once. Every public function that takes one is
 *
 *     struct base_error *e = api_error(err);
 *     return api_result(the work, e);
 *
 * so that a caller's uninitialised struct is never taken for an earlier error, and that a failure always has a
 * sentence. */
#ifndef CORE_API_API_INTERNAL_H
#define CORE_API_API_INTERNAL_H

#include "core/api/vckpt.h"
#include "core/base/error.h"
#include "core/step/store.h"
#include "core/tensor/mesh.h"

_Static_assert(sizeof(struct vckpt_error) == sizeof(struct base_error) &&
	offsetof(struct vckpt_error, code) == offsetof(struct base_error, code) &&
	offsetof(struct vckpt_error, text) == offsetof(struct base_error, text), "errors are handed through");

struct vckpt_mesh {
	struct tensor_mesh *mesh;
};

/* NULL stays NULL. */
static inline struct base_error *api_error(struct vckpt_error *err)
{
	if (err) {
		err->code = 0;
		err->text[0] = 0;
	}
	return (struct base_error *)err;
}

/* What a public function returns: a failure that nobody put into words gets its errno's. */
static inline int api_result(int r, struct base_error *err)
{
	if (r < 0 && err && !err->code)
		base_error_set(err, r, "%s", base_error_name(r));
	return r;
}

/* flags: enum store_open_flag. A NULL path is refused. */
static inline int api_store_open(const char *path, unsigned flags, struct store **ret_s, struct base_error *err)
{
	if (!path || !path[0])
		return base_error_set(err, -EINVAL, "no path of a store is given");
	return store_open(path, flags, ret_s, err);
}

#endif
