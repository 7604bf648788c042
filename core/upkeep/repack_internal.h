/* SPDX-License-Identifier: Apache-2.0
 *
 * repack_internal: what repack*.c share. */
#ifndef CORE_UPKEEP_REPACK_INTERNAL_H
#define CORE_UPKEEP_REPACK_INTERNAL_H

#include "core/base/pool.h"
#include "core/upkeep/repack.h"
#include "core/upkeep/thin_internal.h"

#define WHOLE_BASES 8u /* steps that share whole pieces: the last ones */

/* An object that is written anew, or was by an earlier step of the session. Each is allocated by itself: a pack's
 * writer keeps the address of `to`. */
struct repack_object {
	struct pack_object_ref from, to;
	const char *pack;               /* that `from` is in: the manifest's, while its step is under way */
	uint32_t class, owner;
	uint32_t to_pack;               /* number in the session's packs */
	const struct store_layout *layout; uint32_t tensor; /* of the row that it was found in; THIN_NONE: a blob */
	uint64_t order;                 /* in which it was found */
};

/* A step of the session: it has what was written for it, if that was committed. */
struct repack_owner {
	char run[PROTO_RUN_MAX + 1];
	uint64_t entry;
	struct base_digest manifest;
	bool gone;                      /* nothing of it is used any more */
	uint32_t named;                 /* the last step that named it as its base */
};

/* A pack of which little lives. */
struct repack_drop { char *pack; uint64_t size, live, objects; bool stays; };
struct repack_use { uint32_t step, drop; };

struct upkeep_repack {
	struct store *store;
	const struct upkeep_repack_options *options;
	struct base_pool *pool;         /* NULL: no step was written yet */
	struct commit_list *list;       /* of the last step's run */
	struct commit_list *puts;       /* the same for its attempt: reading on voids what `step` points to */
	char (*classes)[72]; uint32_t nclasses;
	struct repack_pack { char *name; uint64_t size; } *packs; uint32_t npacks; /* that were written */
	struct repack_owner *owners; uint32_t nowners; /* the last one is that of the step under way */
	struct repack_object **objects; struct base_table by_digest;
	struct repack_object **todo; size_t ntodo, todo_room; /* of the step under way */
	uint64_t done_bytes, todo_bytes;
	const struct commit_list_step *step; /* the one under way, as it was seen */
	uint64_t whole_objects, whole_bytes; /* of it, that repack_whole has written */
	const char *last_pack; bool last_drops; uint32_t last_class; /* of the last object that was looked at */
	/* repack_find.c; finds: only these packs are dropped */
	bool finds;
	struct repack_drop *drops; uint32_t ndrops; /* by name */
	struct upkeep_repack_step *steps; size_t nsteps;
	struct repack_use *uses; size_t nuses;
	struct verify_set seen;
};

/* repack_move.c: writes what is to be done into packs of the step's attempt. `prepare` of a struct thin. */
int repack_move(struct thin *t);
/* repack_find.c */
struct repack_drop *repack_drop_find(struct upkeep_repack *p, const char *pack); /* NULL: none */

#endif
