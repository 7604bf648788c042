/* SPDX-License-Identifier: Apache-2.0
 *
 * What a save knows already and need not store again (docs/save.md).
 *
 *   dedup.c  objects that it may refer to, by digest, and their packs                -> struct save_dedup
 *   base.c   commits whose pieces are recognised by position; in base_fit.c, which components they have; in
 *            base_keep.c, which of their attempts the save goes on referring to      -> struct save_bases
 *   trust.c  whose records are believed, and what replaces belief                    -> save_trust_...
 *   taken.c  packs that an attempt left which will never be visible                  -> struct save_taken
 *
 * dedup belongs to the appender's thread but where a function says otherwise; bases are read by any thread. */
#ifndef CORE_SAVE_WRITE_KNOWN_INTERNAL_H
#define CORE_SAVE_WRITE_KNOWN_INTERNAL_H

#include <stdatomic.h>
#include <string.h>

#include "core/base/table.h"
#include "core/commit/notes/note.h"
#include "core/save/plan/keep.h"
#include "core/save/write/band.h"
#include "index/index.h"

/* ---- dedup: objects that this save may refer to, and their packs ---- */

struct save_known {                 /* never moves; its `checks` is complete once its extent has ended */
	struct pack_object_ref ref;    /* `pack` is not used: see pack */
	uint32_t pack;                  /* number in the part's pack table */
};
struct save_pack { char name[PACK_NAME_MAX]; uint64_t size, live_bytes; bool own; };
struct save_dedup {
	struct save_known **slabs; uint32_t count;
	struct base_table by_digest;    /* and kind */
	struct save_pack *packs; uint32_t npacks, packs_room;
	/* does not change any more once it is full: then any thread may read it */
	char attempts[SAVE_KEEP_MAX][PROTO_ATTEMPT_MAX]; uint32_t nattempts;
	atomic_bool full;
	const struct save_bases *decided; /* whose attempts are kept or not */
	bool refused;                   /* an object was, for its attempt is not kept; callers reset it */
	struct save_named { struct base_digest manifest; bool usable; } *bases; uint32_t nbases;
	const struct commit_notes *notes; /* what they name is not referred to; NULL: there are none */
};
void save_dedup_release(struct save_dedup *d);
struct save_known *save_dedup_find(const struct save_dedup *d, const struct base_digest *digest,
	enum pack_object_kind kind);
/* NULL: out of memory. The caller fills ref (its digest and kind are set) and pack. */
struct save_known *save_dedup_add(struct save_dedup *d, const struct base_digest *digest, enum pack_object_kind kind);
int64_t save_dedup_pack(struct save_dedup *d, const char *name, bool own); /* number, or -ENOMEM */
/* Any thread: false if pieces and blobs of that pack would be refused for sure, for its attempt is not kept, or too
 * many others are in use. */
bool save_dedup_may(const struct save_dedup *d, const char *pack);
/* Any thread: may this place of a piece be used, and is its pack there? */
bool save_dedup_fits(const struct save_dedup *d, struct store *s, const struct index_place *place, uint64_t raw_len);
/* Names a commit as a base, once; one that is gone is not asked for again: -ENOENT. */
int save_dedup_name(struct save_dedup *d, struct commit_attempt *a, const char *run, uint64_t entry,
	const struct base_digest *manifest, struct base_error *err);
/* May this place be used? Not if a note of damage names it. Names its commit as a base. 0: *ret_known refers to it;
 * -ENOENT: no, write it anew; other: an error. */
int save_dedup_admit(struct save_dedup *d, struct store *s, struct commit_attempt *a, const struct index_place *place,
	enum pack_object_kind kind,
	uint64_t raw_len, struct save_known **ret_known, struct base_error *err);

/* ---- bases: pieces recognised by position ---- */

/* What a base may have of a component (base_fit.c): nothing; something, but in other boxes or of other tensors, as far
 * as is known; some of its tensors, in the same boxes; all of them. */
enum save_fit { SAVE_FIT_NOT, SAVE_FIT_HAS, SAVE_FIT_SOME, SAVE_FIT_ALL };
/* The components that a step has packs of, sorted. */
struct save_component { char name[PROTO_COMPONENT_MAX + 1]; };
int save_components(const struct proto_manifest *m, struct save_component **ret_all, uint32_t *ret_n); /* or -ENOMEM */
/* The same of what a rank of that layout has. */
int save_layout_components(const struct store_layout *l, struct save_component **ret_all, uint32_t *ret_n);
int64_t save_component_find(const struct save_component *all, uint32_t n, const char *name); /* or -ENOENT */

struct save_base_row {              /* what a base has of a tensor in a box; lives no longer than its base */
	struct save_base *base;
	atomic_uint refs;
	bool trusted;                   /* some of it is in records that are believed (trust.h) */
};
struct base_attempts { struct base_attempt *all; size_t n; };
struct save_bases {
	struct save_base *all[SAVE_BASES_MAX]; atomic_uint n;
	/* the rank that saves, set before the first is added: its line of a base is asked first; and how many save */
	uint32_t rank, world;
	const struct commit_notes *notes; /* what they name is not recognised; set like rank; NULL: none */
	struct index *index;            /* knows commits that are the user's own; set like rank; NULL: none */
	bool layouts;                   /* set like rank: ranks refer to layouts of the bases */
	atomic_bool merges;             /* some attempt is not kept */
	struct base_attempts attempts;  /* that the save most likely refers to, decided on first; then read-only */
	struct base_error unread;       /* why bases were not looked for everywhere; code 0: they were */
	bool decided; size_t room;      /* after save_bases_decide: how many attempts one more base may keep */
	size_t taken;                   /* attempts that are kept or named, at most */
	const struct save_last *last;   /* what the last save left; NULL: nothing */
	struct store_layout *layout;    /* of this save; where last is there */
};
static inline unsigned save_bases_count(const struct save_bases *all)
{
	return atomic_load_explicit(&all->n, memory_order_acquire);
}
/* Opens a commit and publishes it; one that cannot be read recognises nothing. One thread. 0 or -ENOMEM. */
int save_bases_add(struct save_bases *all, struct store *s, const char *run, uint64_t entry,
	const struct base_digest *manifest);
/* The same of a step of the run. Of one that the last save left, with the layout of this save, that alone is held
 * until more is needed. */
int save_bases_add_step(struct save_bases *all, struct store *s, const char *run, const struct commit_list_step *step);
/* Decides which attempts of the bases so far are kept (keep.h) by a save of that layout; for one that is added later
 * that happens when it is added. Before any band is processed. -ENOMEM. */
int save_bases_decide(struct save_bases *all, const struct store_layout *l);
/* The attempts that the step will name, its own included, at most; SIZE_MAX: not known. *ret_base: the entry of its
 * base; 0: not known. */
size_t save_bases_attempts(const struct save_bases *all, uint64_t *ret_base);
/* Any thread: may objects of that pack be referred to? Where no base names its attempt nothing was decided: yes. */
bool save_bases_keep(const struct save_bases *all, const char *pack, bool layout);
/* The base that is this commit, if it could be opened; else NULL. */
struct save_base *save_bases_find(const struct save_bases *all, const char *run, uint64_t entry);
/* The best fit among them of a component of the layout that is saved. The thread that adds bases. */
enum save_fit save_bases_fit(const struct save_bases *all, const struct store_layout *l, uint32_t component);
void save_bases_release(struct save_bases *all);
/* What the base has of the tensor's items in `box` (inside the tensor). For the pieces of a box that this save stores
 * ask once with that box, not piece by piece. It may read the store. Any thread. NULL: the base has nothing. */
struct save_base_row *save_base_row_get(struct save_base *b, const struct store_layout *l, uint32_t tensor,
	const struct tensor_box *box);
void save_base_row_put(struct save_base_row *row); /* NULL-safe */
/* The base's piece of exactly that box, under whatever layout it was saved, if it has that length and may be referred
 * to; else NULL (as for row NULL). Both results live as long as the row. No I/O, about log of the row's boxes. */
const struct store_piece *save_base_piece(const struct save_base_row *row, const struct tensor_box *piece, uint64_t len,
	const char **ret_pack);
/* Of a piece with that digest, which is written: may a base have it all the same? That is, one that could not be read
 * comes before any that has other bytes at its position; or a base has it, and it is not to be had from there. The
 * reason, filled into err; false: the piece is new. `rows`: of the first n bases. */
bool save_bases_lost(const struct save_bases *all, struct save_base_row *const *rows, unsigned n,
	const struct tensor_box *piece, uint64_t len, const struct base_digest *digest, struct base_error *err);
/* Is what it says of its bytes believed? Else it is the piece only if these are compared (save_trust_compare). */
bool save_base_trusts(const struct save_base_row *row, const struct store_piece *p);
void save_base_place(const struct save_base_row *row, const struct store_piece *p, const char *pack,
	struct index_place *ret_place);
/* Where the base has the layout object of that digest, which is read and hashed, once; -ENOENT: it has none. Any
 * thread. */
int save_base_layout_place(struct save_base *b, const struct base_digest *layout, struct index_place *ret_place);
/* The blob of that digest that the saving rank has in the base, if it may be referred to. false: it has none. The
 * appender's thread. */
bool save_base_blob(struct save_base *b, const struct base_digest *digest, uint64_t len,
	struct index_place *ret_place, bool *ret_trusted);
/* Names it; -ENOENT: it is gone, and recognises nothing any more. The appender's thread. */
int save_base_name(struct save_base *b, struct save_dedup *d, struct commit_attempt *a, struct base_error *err);

/* ---- trust.c: where a record is not this user's ---- */

/* Are the object's bytes in the store these, raw_len of them? `room` for as many. false: it cannot be read, too. */
bool save_trust_compare(struct store *s, const struct index_place *place, const void *bytes, void *room);
/* Have the object's bytes in the store its digest? ret_xxh (may be NULL): their XXH3-128 under the store's seed. */
bool save_trust_rehash(struct store *s, const struct index_place *place, struct base_xxh128 *ret_xxh);

/* ---- taken.c: packs of this attempt that it has not written ---- */

struct save_taken {                 /* does not change once bands are processed */
	struct pack_object_ref *objects; size_t n, room; /* by their footers; pack: in `packs` */
	struct base_table by_digest;
	struct save_pack *packs; uint32_t npacks;
};
void save_taken_release(struct save_taken *t);
/* Any thread: is it in one of them, by its bytes? ret_xxh: as save_trust_rehash. */
bool save_taken_find(const struct save_writer *w, const struct base_digest *digest, enum pack_object_kind kind,
	uint64_t raw_len, struct base_xxh128 *ret_xxh, struct index_place *ret_place);
/* What was found becomes an object of this save. 0, or -ENOMEM. */
int save_taken_admit(struct save_writer *w, const struct index_place *place, struct save_known **ret_known,
	struct base_error *err);

/* Where the object is that `ref` names, in this pack; run, entry and manifest are zero. And the reverse. */
static inline void save_place_of(const struct pack_object_ref *ref, const char *pack, struct index_place *ret_place)
{
	*ret_place = (struct index_place){.digest = ref->digest, .offset = ref->offset, .checks = ref->checks,
		.raw_len = ref->raw_len, .stored_len = ref->stored_len, .codec = ref->codec, .kind = ref->kind};
	memccpy(ret_place->pack, pack, 0, sizeof ret_place->pack - 1);
}
static inline struct pack_object_ref save_place_ref(const struct index_place *p)
{
	return (struct pack_object_ref){.digest = p->digest, .offset = p->offset, .checks = p->checks,
		.raw_len = p->raw_len, .stored_len = p->stored_len, .codec = p->codec, .kind = p->kind};
}

#endif
