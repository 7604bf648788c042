/* SPDX-License-Identifier: Apache-2.0
 *
 * band: the unit of work of a save, some megabytes of pieces that lie together in their source (band.c), and the walk
 * over all bands of a plan. A band belongs to one thread at a time. */
#ifndef CORE_SAVE_WRITE_BAND_H
#define CORE_SAVE_WRITE_BAND_H

#include "core/save/plan/planned.h"
#include "core/save/write/writer.h"
#include "index/index.h"

#define SAVE_STRIP_BYTES 2048u                   /* of a piece that is cut, hashed, copied: in the nearest cache */
#define SAVE_BAND_BYTES (UINT64_C(9) << 20)      /* source bytes of a band, unless one piece has more */
/* What files are read into begins at a page: where it is 16 bytes behind one, as malloc gives large memory, the
 * kernel's copy takes five times as long on some processors (rep movsb; measured on AMD's third generation of EPYC). */
#define SAVE_ALIGN 4096u
#define SAVE_BASES_MAX 12u                       /* commits that recognise pieces by position */

struct save_band;
struct save_base;
struct save_base_row;
struct store_piece;

struct save_piece {                 /* a piece on its way through the pipeline */
	struct tensor_box box;
	uint64_t offset, len;           /* in the band's raw bytes */
	struct base_digest digest; struct base_xxh128 xxh;
	bool checked;                   /* was believed and hashed all the same */
	bool absent;                    /* its bytes are not there: it is sure to be believed (save_writer_has) */
	/* `digest` is that of the piece with this XXH3-128 at this position of that base; or NULL */
	struct save_base *believed;
	bool looked, found;             /* the index was asked; `place` is where it says that the piece is */
	/* Records that are not believed: a base's, whose place has the piece's bytes (NULL: none); so has `place`; a
	 * place that was to have them has others, or cannot be read. */
	const struct store_piece *compared;
	bool place_compared, refuted;
	bool taken;                     /* `place` is in a pack that the save has taken over, and was compared */
	bool repeats;                   /* an equal one was hashed before, so it is hardly new */
	bool encoded;                   /* the fields below are set */
	struct index_place place;
	uint16_t codec; uint64_t stored_len;
	uint32_t first_block;           /* in checks and lens */
};

/* Bytes that repeat their first eight, as those of zeros: what was hashed of them before. */
#define SAVE_REPEATS 4u
struct save_repeat { uint64_t word, len; struct base_digest digest; struct base_xxh128 xxh; };

/* Pieces of which another store says what they are (a copy). Their bytes are fetched only if this store lacks them, and
 * hashed then. */
#define SAVE_GIVEN_GROUP 64u
struct save_given {
	/* Of the band, in order; NULL: its bytes are at hand. The XXH3-128 of each is set to that under this store's
	 * seed, once it is known. */
	struct store_piece *pieces;
	struct store_piece **first;     /* by piece: an equal one before it in this save; NULL: there is none */
	/* Of each of the pieces, at most SAVE_GIVEN_GROUP and in order: reads its stored bytes into b->out (a raw one's
	 * into b->raw), their checks and lengths into b->checks and b->lens, decodes them to b->raw; sets codec and
	 * stored_len. Any thread. Fills b->err too. */
	int (*fetch)(void *arg, struct save_band *b, struct save_piece *const *pieces, unsigned n);
	void *arg;
	bool (*cancelled)(void);        /* any thread; may be NULL. true: the band fails with -EINTR */
};

/* What encoding a piece is worth; one that is worth nothing is not encoded. */
enum save_worth { SAVE_WORTH_UNKNOWN, SAVE_WORTH_IT, SAVE_WORTH_NOTHING } __attribute__((packed));

struct save_band {                  /* belongs to one thread at a time: worker, then appender */
	struct save_band *next;         /* free ones */
	uint64_t sequence;
	uint64_t at; uint32_t tensor;   /* box of the plan; its tensor in the layout */
	struct tensor_grid grid; unsigned word_bytes;
	bool believe;                   /* its pieces may be recognised by their XXH3-128 alone */
	uint64_t first_piece; uint32_t npieces; /* in that box */
	struct save_piece *pieces; uint32_t pieces_room;
	struct tensor_box box;          /* of all its pieces */
	struct save_base_row *rows[SAVE_BASES_MAX]; unsigned nrows; /* of the tensor, in the first bases; NULL: none */
	uint64_t len;
	uint8_t *memory[2]; size_t memory_room[2];
	uint8_t *in;                    /* the box's bytes, row-major: memory[0], or a part of the ring's slot */
	struct storage_lent *lent;      /* `in` is lent with this: a pack may write it from there. NULL: it is not */
	uint8_t *raw, *out;             /* pieces one after another; encoded ones at the same offsets */
	/* The band was cut before it came: `in` has its pieces one after another, with these hashes. NULL: its box. */
	const struct base_xxh128 *staged;
	const bool *absent;             /* these pieces are not in `in`; NULL: all are. `in` is NULL if none is */
	enum save_worth *worth;         /* by piece: what encoding it was worth, set to what it is. NULL: not known */
	struct save_given given;        /* then in is NULL */
	bool cut;                       /* all pieces are in `raw`; else they are in `in` only, which is as it was */
	uint64_t *checks; uint32_t *lens; uint32_t blocks_room;
	uint8_t *scratch;
	struct base_xxh128_state *hash;
	struct save_repeat repeats[SAVE_REPEATS]; unsigned nrepeats; /* so many were added; the oldest give way */
	uint64_t begin_ns, read_ns, digest_ns, encode_ns; /* begin: of the work on it, CLOCK_REALTIME */
	int r; struct base_error err;
};
void save_band_release(struct save_band *b);
/* Walks the bands of a plan; the same walk gives the same bands. A copy goes on from where it was made. */
struct save_cursor {
	uint64_t at; bool inside; struct tensor_grid grid; struct tensor_piece_iter it;
};
/* 1: the band has the next pieces; 0: there are no more; -ENOMEM. */
int save_cursor_take(struct save_cursor *c, const struct save_writer *w, struct save_band *b);
/* May the piece be recognised by its XXH3-128 alone, where a base's record of it is believed? Is it one of those that
 * are hashed in full all the same, which chance chooses? */
bool save_band_may_believe(const struct save_band *b, const struct save_piece *p);
bool save_band_is_checked(const struct save_band *b, const struct save_writer *w, const struct save_piece *p);
void save_band_forget(struct save_band *b); /* lets the bases' rows go */
/* Reads what an import is made of. Fills b->err too. */
int save_band_read(struct save_band *b, const struct save_source *source);
/* The same by a function that gets the band with memory for its box, row-major, in b->in, and fills b->err. */
int save_band_read_by(struct save_band *b, int (*read)(void *arg, struct save_band *b), void *arg);

#endif
