/* SPDX-License-Identifier: Apache-2.0
 *
 * The opened object: a tensor or a blob of a step with its pieces: all of them, or those that are wanted.
 * core/load/read and core/load/fill work on it. */
#ifndef CORE_LOAD_OPEN_OBJECT_H
#define CORE_LOAD_OPEN_OBJECT_H

#include <stdatomic.h>

#include "core/load/open/step.h"
#include "core/tensor/boxes.h"

#define LOAD_LINE_NONE UINT32_MAX

/* The boxes of a tensor that several writers hold, if they are not cut where the whole tensor is cut: they are
 * disjoint, cover the tensor, and are ordered by ascending offset. Or the boxes that meet what is wanted of it, which
 * are disjoint there. */
struct load_boxes {
	struct tensor_boxes list;
	struct tensor_box_index *index;
	uint64_t *first_piece;           /* of each box, among the object's; and their number */
};

struct load_object {
	atomic_uint refs;
	struct load_step *step;          /* a reference */
	char *label;                     /* "tensor model/x": for messages */
	bool blob;
	uint64_t bytes;
	struct base_digest digest;
	struct tensor_grid grid;         /* of a tensor */
	struct tensor_box whole;
	uint64_t stride[TENSOR_MAX_DIMS]; /* bytes between neighbours of the row-major tensor */
	/* bytes of the longest fragment of the whole tensor; with boxes, the mean */
	uint64_t fragment_bytes;
	uint64_t max_piece;              /* bytes of the longest piece */
	struct store_row row;            /* owns the pieces of a tensor */
	struct load_boxes *boxes;        /* NULL: the pieces are those of the whole tensor */
	struct store_piece one;          /* a blob's, or that of an empty tensor which no rank stored */
	const struct store_piece *pieces; uint64_t npieces;
	uint64_t *numbers;               /* of a part of a tensor: by piece, its number among all of its box */
	const char *const *packs; uint32_t npacks; /* of one part, or the step's */
	uint32_t line;                   /* of that part in the manifest; LOAD_LINE_NONE: the packs are the step's */
};

/* Checks the pieces of one box that a writer stored: their number and lengths must be those of the grid, and their
 * packs the writer's. Raises o->max_piece. */
int load_pieces_check(struct load_object *o, const struct tensor_box *box, const struct store_piece *pieces,
	uint64_t npieces, uint32_t npacks, struct base_error *err);
/* Bytes of the longest fragment of the box: contiguous both in the tensor and in a cell of the box. */
uint64_t load_box_fragment_bytes(const struct tensor_grid *g, const struct tensor_box *box);

/* Puts a tensor together from the rows of all parts that have it, by ascending line. Afterwards o->row has the pieces
 * of all boxes, each once, and o packs, pieces, digest, fragment_bytes and, where needed, boxes. */
struct load_row;
int load_boxes_gather(struct load_object *o, const struct load_row *rows, size_t n, struct base_error *err);
void load_boxes_free(struct load_boxes *b); /* NULL-safe */
size_t load_boxes_memory(const struct load_boxes *b);
/* tensor_fragment_at for an object with boxes. False: none has that byte, although they cover the tensor. */
bool load_boxes_fragment(const struct load_object *o, uint64_t at, uint64_t end, struct tensor_fragment *ret_f);

/* An object of the tensor without its pieces, and without its boxes. */
int load_object_new(struct load_step *step, uint32_t tensor, struct load_object **ret_o, struct base_error *err);
/* The fragment at byte `at` of a tensor, in a piece that there is and before `end`. -BASE_EFORMAT. */
int load_fragment_at(const struct load_object *o, uint64_t at, uint64_t end, struct tensor_fragment *ret_f);
/* "RUN/STEP: tensor COMPONENT/NAME: " before the sentence. */
int load_object_fail(const struct load_object *o, int r, struct base_error *err);

/* What is wanted of a tensor, and the object that has just that: the stored boxes and the pieces that meet a wanted box
 * (`boxes` and `numbers`; no digest). */
struct load_wanted {
	uint32_t tensor;
	struct tensor_boxes boxes;       /* not empty, inside the tensor, no box of size 0 */
	struct load_object *object;      /* a reference, or r < 0, with a sentence */
	int r; char *why;
};
void load_wanted_release(struct load_wanted *w);
/* Opens all of them. Reads only parts that may have some of it, several at once. Every wanted item has to be in exactly
 * one stored box (equal boxes count once, the lowest rank's): else w->r of that tensor is -BASE_EFORMAT. Returns errors
 * that are no tensor's fault: -ENOMEM, or -ECANCELED after *stop was set. */
int load_wanted_open(struct load_step *step, struct load_wanted *all, uint32_t n, const atomic_bool *stop,
	struct base_error *err);

/* A step's private side. */
struct load_tensor_place { uint32_t layout, tensor; };
/* The manifest's table of packs, and the number in it of a pack of the part on rank line `line`. */
int load_step_packs(struct load_step *step, const char *const **ret_packs, uint32_t *ret_npacks);
uint32_t load_step_pack(const struct load_step *step, uint32_t line, uint32_t pack);

#endif
