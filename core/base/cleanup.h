/* SPDX-License-Identifier: Apache-2.0
 *
 * cleanup: scope-bound release of memory and descriptors, and `steal` to hand them on. */
#ifndef CORE_BASE_CLEANUP_H
#define CORE_BASE_CLEANUP_H

#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

#define base_cleanup(function) __attribute__((cleanup(function)))

static inline void base_cleanup_free_p(void *p) { int saved = errno; free(*(void **)p); errno = saved; }
static inline void base_cleanup_close_p(int *fd) { if (*fd >= 0) { int saved = errno; close(*fd); errno = saved; } }

#define base_cleanup_free base_cleanup(base_cleanup_free_p)
#define base_cleanup_close base_cleanup(base_cleanup_close_p)

/* Takes the pointer out of a variable that cleans up. */
#define base_steal(p) ({ __typeof__(p) steal_ = (p); (p) = NULL; steal_; })
static inline int base_steal_fd(int *fd) { int taken = *fd; *fd = -1; return taken; }

/* Declares a cleanup helper NAME_p for a destructor that takes NULL. */
#define BASE_CLEANUP_DEFINE(type, function) \
	static inline void function##_p(type *p) { if (*p) function(*p); }

#endif
