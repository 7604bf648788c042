/* SPDX-License-Identifier: Apache-2.0
 *
 * What the files of core/api share: errors across the public boundary, stores by path, and the handles of meshes and
 * steps.
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

#include <sys/types.h>

#include "core/api/vckpt.h"
#include "core/base/cleanup.h"
#include "core/base/error.h"
#include "core/load/open/step.h"
#include "core/step/store.h"
#include "core/tensor/description.h"

_Static_assert(sizeof(struct vckpt_error) == sizeof(struct base_error) &&
	offsetof(struct vckpt_error, code) == offsetof(struct base_error, code) &&
	offsetof(struct vckpt_error, text) == offsetof(struct base_error, text), "errors are handed through");

struct vckpt_mesh {
	struct tensor_mesh *mesh;
};

struct vckpt_step {
	struct store *store;
	struct load_step *step;
	pid_t pid;                       /* that opened it */
	struct proto_entry said;         /* what was said of it when it was opened: facts.steps, or NULL */
	struct vckpt_attribute *attributes; size_t nattributes;
};
/* Copies what the list says of the commit. 0, -ENOMEM. */
int api_facts_take(struct vckpt_step *step, const struct commit_list *l, uint64_t entry);
/* Fills step->attributes: those of the save, with those that were set later. */
int api_facts_attributes(struct vckpt_step *step, struct base_error *err);
/* -EINVAL: NULL; -BASE_EFORKED: this process is a child of the one that opened it. */
int api_step_alive(const struct vckpt_step *step, struct base_error *err);

/* A caller's description, after a check of what it says by numbers alone: shape, dimensions, dtype, flags. It still
 * points to the caller's memory. -EINVAL, without the tensor's name. */
int api_tensor_describe(const struct vckpt_tensor *t, struct tensor_description *ret_d, struct base_error *err);
/* what: "its dtype", "the dtype to convert to:" */
int api_dtype_check(uint32_t dtype, const char *what, struct base_error *err);

static inline int api_given(const void *what, const char *name, struct base_error *err)
{
	return what ? 0 : base_error_set(err, -EINVAL, "no %s is given", name);
}

/* A struct that a caller fills begins with its size: `found`, where the library has `own` bytes of `name`. 0 or
 * -EINVAL. */
static inline int api_size_check(size_t found, size_t own, const char *name, struct base_error *err)
{
	return found == own ? 0 : base_error_set(err, -EINVAL, "struct %s has %zu bytes in this library, and %zu in "
		"the caller's `size`: set it to sizeof (struct %s), and build the program with this library's vckpt.h",
		name, own, found, name);
}

static inline int api_reserved_check(uint32_t found, const char *name, struct base_error *err)
{
	return !found ? 0 : base_error_set(err, -EINVAL, "`reserved` of struct %s is %#x: it must be 0 (zero the "
		"struct before its members are set)", name, (unsigned)found);
}

/* flags: of `what`, which are `known`; words: what they are called. 0 or -EINVAL. */
static inline int api_flags_check(uint32_t flags, uint32_t known, const char *what, const char *words,
	struct base_error *err)
{
	return !(flags & ~known) ? 0 : base_error_set(err, -EINVAL, "flags of %s are %#x: %#x is not in %s", what,
		(unsigned)flags, (unsigned)(flags & ~known), words);
}

/* NULL stays NULL. */
static inline struct base_error *api_error(struct vckpt_error *err)
{
	if (err) {
		err->code = 0;
		err->text[0] = 0;
	}
	return (struct base_error *)err;
}

/* What a public function returns. A failure without a sentence gets that of its errno. */
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
