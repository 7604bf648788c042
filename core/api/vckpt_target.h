/* SPDX-License-Identifier: Apache-2.0
 *
 * vckpt_target: loads whose destinations are not simply the step's tensors: slices, other names, other dtypes, other
 * sizes. A part of vckpt.h, which includes it.
 *
 * A target sends a slice of one stored tensor into a slice of one destination. So a merged QKV weight loads into three
 * tensors (three targets with the same stored name), and three weights into a merged one (three targets whose
 * destination is described alike). The destination is described as for vckpt_load_tensors: over all ranks, with mesh
 * and placements, a flat range or boxes, so that each rank gets what it holds of it. */
#ifndef VCKPT_TARGET_H
#define VCKPT_TARGET_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct vckpt_error;
struct vckpt_load;
struct vckpt_tensor;

enum {
	VCKPT_TARGET_CONVERT = 1 << 0,   /* the dtypes may differ: items are converted (docs/load.md) */
	VCKPT_TARGET_RESIZE = 1 << 1,    /* sizes may differ, as those of padded vocabularies do: what fits is loaded */
	VCKPT_TARGET_ZERO = 1 << 2,      /* the rest of the destination becomes zero; else it stays as it is */
};
struct vckpt_target {
	size_t size;                     /* sizeof (struct vckpt_target) */
	const struct vckpt_tensor *to;   /* the destination: shape, dtype, holding and memory are its own */
	const char *component, *name;    /* of the stored tensor; NULL: those of `to` */
	const uint64_t *from;            /* from_ndim pairs (offset, size) in the stored tensor; NULL: all of it */
	const uint64_t *at;              /* where in `to` the slice begins: an offset for each dimension of `to`.
	                                    NULL: it fills all of `to` */
	uint32_t from_ndim;              /* must be the stored tensor's, where `from` is given */
	uint32_t flags;
};
/* Declares n targets, with the rules of vckpt_load_tensors: what they point to is copied, the memory is the load's from
 * load_start until load_wait has told the end, and after an error the load holds what it held before. Without RESIZE
 * the slice must have just the shape of `to`, or lie in it where `at` is given; -EINVAL names both shapes. Where `from`
 * is given, dimensions in which the slice has one index may be missing in `to`: one expert of a stack of experts. Where
 * `at` is given, `to` may have more dimensions in front, in which the slice takes one index: an expert into a stack.
 * -EINVAL also names dtypes between which there is no conversion. ZERO writes first, so that several targets may zero
 * the rest of one destination. */
int vckpt_load_targets(struct vckpt_load *load, const struct vckpt_target *targets, size_t n, struct vckpt_error *err);

/* n items of one dtype (enum vckpt_dtype) as items of another, by the rules of docs/load.md: what CONVERT does, of
 * memory that the caller has. The memory does not overlap, and need not be aligned. -EINVAL: there is no such
 * conversion (with n = 0 that is all that is asked). */
int vckpt_convert(uint32_t from, uint32_t to, const void *in, void *out, size_t n, struct vckpt_error *err);

/* ---- names ---- */
enum { VCKPT_RENAME_ANYWHERE = 1 << 0 };
/* A name that begins with `from` at the caller begins with `to` in the step: {NULL, "_orig_mod.", "", 0}. ANYWHERE:
 * every `from` in the name becomes `to`. */
struct vckpt_rename { const char *component /* NULL: of all */, *from, *to; uint32_t flags; };
/* For all tensors that are declared later, but targets that name the stored tensor: the first rule that fits is used,
 * once. Rules of a second call come after those of the first. The strings are copied. -EINVAL names the rule. */
int vckpt_load_rename(struct vckpt_load *load, const struct vckpt_rename *rules, size_t n, struct vckpt_error *err);
/* The same by a function (NULL: none), which comes before all rules. It is called in the thread that declares: 0: the
 * name is not changed, and rules count; 1: it wrote the step's name to ret_name, of `room` bytes; a negative errno:
 * that tensor is refused with it. vckpt_load_missing lists the caller's names, and the sentence of load_start has
 * both. */
int vckpt_load_rename_by(struct vckpt_load *load,
	int (*f)(void *arg, const char *component, const char *name, char *ret_name, size_t room), void *arg,
	struct vckpt_error *err);

#ifdef __cplusplus
}
#endif
#endif
