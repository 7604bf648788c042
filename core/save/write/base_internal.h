/* SPDX-License-Identifier: Apache-2.0
 *
 * What the files of bases share: base.c opens commits and their layouts and parts, and keeps rows; base_row.c gathers a
 * row from the lines that may have something of it; base_fit.c says of which components it has something; base_keep.c
 * decides which attempts may be referred to. */
#ifndef CORE_SAVE_WRITE_BASE_INTERNAL_H
#define CORE_SAVE_WRITE_BASE_INTERNAL_H

#include "core/save/write/write_internal.h"
#include "core/step/open.h"
#include "core/tensor/reshard.h"

#define BASE_ROWS 16u
#define BASE_NO_LINE UINT32_MAX

struct base_layout { bool tried; struct store_layout *layout; struct tensor_mesh **meshes; }; /* meshes as asked for */
struct base_line { bool tried, good, trusted; struct store_opened_part opened; };

struct base_fit { bool known; enum save_fit fit; };
struct base_attempt { char name[PROTO_ATTEMPT_MAX]; struct save_keep keep; };

struct save_base {
	struct store *store;
	char run[PROTO_RUN_MAX + 1];
	uint64_t entry;
	struct base_digest manifest;
	atomic_bool gone;
	bool open;                              /* false: nothing is recognised by it */
	atomic_bool unread;                     /* it, or some of it, could not be read, and `why` says why */
	struct base_error why;                  /* set before `unread` is, then read-only */
	/* What the last save left: then m is its excerpt, and the layout this save's; borrowed. NULL: m is whole. */
	const struct save_last *excerpt;
	uint32_t rank;                          /* that saves */
	bool own;                               /* the user's index says that the user wrote all of it */
	const struct commit_notes *notes;
	struct proto_manifest m;
	struct save_component *components; uint32_t ncomponents;
	struct base_fit *fits;                  /* by component of the layout that is saved; one thread's. NULL: none */
	struct base_attempts attempts;          /* that were decided on with this base; then read-only */
	uint32_t own_line;                      /* line of the rank that saves, or BASE_NO_LINE */
	pthread_mutex_t lock;                   /* protects all below */
	struct base_layout *layouts; uint32_t nlayouts; /* by number in the manifest; how many were tried */
	struct base_line *lines; uint32_t nlines; /* by rank line of the manifest; how many were tried */
	uint32_t near;                          /* line that had something the last time */
	struct store_chunk_cache *chunks;
	struct save_base_row *rows[BASE_ROWS]; unsigned next;
	struct save_base *whole;                /* of an excerpt that is not enough: the base with all of it */
};
/* The base with all of its manifest; b itself unless it is an excerpt. NULL: out of memory. Under the lock, or while no
 * other thread knows the base. */
struct save_base *save_base_whole(struct save_base *b);
/* base_keep.c: decides about the attempts of a base that were not decided on with another; *room: how many more may be
 * kept. -ENOMEM. */
int save_base_decide(struct save_bases *all, struct save_base *b, size_t *room);
/* Some of it cannot be read: the first reason stays. Under the lock, or while no other thread knows the base. */
void save_base_unread(struct save_base *b, const struct base_error *why);
bool save_base_has_layout(const struct save_base *b, const struct base_digest *layout); /* and can be read */
/* base_fit.c: length of the attempt in a pack's name, and the pack's class; 0: it has none. */
size_t save_pack_attempt(const char *pack, const char **ret_class);
/* base_fit.c: of one base, by the thread that adds bases. */
enum save_fit save_base_fit(struct save_base *b, uint32_t world, const struct store_layout *l, uint32_t component);
/* Under the lock. NULL: it cannot be read, or enough others were. */
const struct store_layout *save_base_open_layout(struct save_base *b, uint32_t layout);
const struct tensor_mesh *save_base_mesh(struct save_base *b, uint32_t layout, uint32_t tensor);
const struct store_opened_part *save_base_part(struct save_base *b, uint32_t line);
uint32_t save_base_find_line(const struct save_base *b, uint32_t rank); /* any thread; or BASE_NO_LINE */

struct base_part { struct store_row row; const char *const *packs; bool trusted; }; /* of one line */
struct base_from { uint32_t part; uint64_t first; };                  /* a box: whose, number of its first piece */
struct base_row {                       /* read-only once made */
	struct save_base_row row;       /* first: what callers see */
	uint32_t tensor;                /* in the layout that is being saved */
	struct tensor_box box;          /* that was asked for */
	struct tensor_grid grid;
	struct base_part *parts; uint32_t nparts;
	struct tensor_boxes boxes;      /* of all parts, each once */
	struct base_from *from;         /* by box */
	struct tensor_box_index *index; /* NULL: one box or none */
};
/* Under the lock. NULL: out of memory. */
struct base_row *save_base_gather(struct save_base *b, const struct store_layout *l, uint32_t tensor,
	const struct tensor_box *box);
void save_base_row_free(struct base_row *row);
bool save_base_row_full(const struct base_row *row); /* does it cover all of its box? */
/* Does it have all that the base has in that box? */
bool save_base_row_covers(const struct base_row *row, const struct tensor_box *box);
/* Number of the box that has exactly this piece, and of the piece in it; false: none has. */
bool save_base_row_find(const struct base_row *row, const struct tensor_box *piece, size_t *ret_box,
	uint64_t *ret_number);

#endif
