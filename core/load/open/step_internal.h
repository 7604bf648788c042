/* SPDX-License-Identifier: Apache-2.0
 *
 * What the files of a step share: the step itself (step.c), its parts and blobs, read when first asked for
 * (step_parts.c), who holds what by its layouts (holders.c), and the rows of parts (rows.c).
 *
 * What is made later is published by an atomic pointer, once (step_publish): if two threads make it at the same time,
 * one of them lets its own go. So no lock is held while anything is read. */
#ifndef CORE_LOAD_OPEN_STEP_INTERNAL_H
#define CORE_LOAD_OPEN_STEP_INTERNAL_H

#include <stdatomic.h>

#include "core/load/open/object.h"
#include "core/step/manifest.h"
#include "core/step/open.h"
#include "core/tensor/shard.h"

/* Publishes `mine` at an atomic pointer that was NULL; if another thread was faster, `mine` is let go. Evaluates to
 * what is there now. */
#define step_publish(at, mine, let_go) ({ \
	__typeof__(mine) publish_mine_ = (mine), publish_there_ = NULL; \
	if (atomic_compare_exchange_strong_explicit((at), &publish_there_, publish_mine_, memory_order_acq_rel, \
		memory_order_acquire)) \
		publish_there_ = publish_mine_; \
	else \
		let_go(publish_mine_); \
	publish_there_; })

struct step_other { uint32_t number; struct load_tensor_place place; }; /* a tensor's place in a further layout */
struct step_component { const char *name; uint32_t first, end; };
struct step_blob { uint32_t line, blob; }; /* rank line of the manifest, blob of its part */
struct step_blobs { uint32_t n; struct step_blob all[]; };

struct step_layout {
	struct store_layout *layout;
	/* by number in the layout, made when first asked for */
	struct tensor_mesh *_Atomic *meshes;
	struct tensor_placements *_Atomic *placements;
};

struct load_step {
	atomic_uint refs;
	struct store *store;
	struct load_step_info info;
	char *run, *attempt;
	struct proto_manifest manifest;
	struct step_layout *layouts;
	struct store_opened_part *_Atomic *parts; /* by rank line */
	struct load_tensor_place *tensors; uint32_t ntensors;
	struct base_buf others;          /* struct step_other, ascending */
	const char **_Atomic packs;      /* names by number in the manifest */
	struct step_component *components; uint32_t ncomponents;
	struct step_blobs *_Atomic blobs;
	struct store_chunk_cache *chunks; /* has a lock of its own */
	size_t memory;
};

/* The part of a rank line; reads its head at the first call. */
int load_step_part(const struct load_step *step, uint32_t line, const struct store_opened_part **ret_part,
	struct base_error *err);
void load_step_parts_free(struct load_step *step);

/* ---- blobs (step_parts.c) ---- */

const struct step_blob *load_step_blob_at(const struct load_step *step, uint32_t blob); /* load_step_blobs was called */
/* A blob by its name; rank: whose own it is, -1: none's. 1: found; 0: there is none. */
int load_step_blob_find(struct load_step *step, const char *name, int64_t rank, struct step_blob *ret_b,
	struct base_error *err);
void load_step_blob_look(const struct load_step *step, const struct step_blob *b, struct load_blob_info *ret_info);
int load_step_blob_ref(const struct load_step *step, const struct step_blob *b, struct pack_object_ref *ret_ref,
	const char *const **ret_packs, uint32_t *ret_npacks, struct base_error *err);

/* The place of a tensor in a layout, or -ENOENT. */
int64_t load_step_number_in(const struct load_step *step, uint32_t tensor, uint32_t layout);

/* ---- who holds what (holders.c) ---- */

/* Marks the lines of all parts that may have rows for the boxes, in as many bits as there are lines. NULL: of all of
 * the tensor. -ENOMEM. */
int load_step_holders(const struct load_step *step, uint32_t tensor, const struct tensor_boxes *boxes,
	uint64_t *ret_lines);
/* What the layout of a line gives its rank of tensor `number` there. 1: known; 0: not recorded, anything; -ENOMEM. */
int load_step_shard(const struct load_step *step, uint32_t line, uint32_t number, struct tensor_shard *ret_shard);
void load_step_layouts_free(struct load_step *step);

#endif
