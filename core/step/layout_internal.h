/* SPDX-License-Identifier: Apache-2.0
 *
 * What the files of layouts share: layout.c sorts tensors and makes the object, layout_held.c keeps the tables of
 * meshes and placements meanwhile. One thread, as its builder. */
#ifndef CORE_STEP_LAYOUT_INTERNAL_H
#define CORE_STEP_LAYOUT_INTERNAL_H

#include "core/base/cleanup.h"
#include "core/base/table.h"
#include "core/step/layout.h"

#define LAYOUT_HELD_MESHES_MAX 4096u             /* as proto/layout.c takes them */
#define LAYOUT_HELD_PLACEMENTS_MAX 65536u
#define LAYOUT_HELD_WORDS_MAX (UINT32_C(1) << 20)

struct layout_words;                    /* the placements of one tensor or more, copied */
struct layout_held {                    /* zero-initialise */
	/* each once, in the order in which they came */
	const struct tensor_mesh **meshes; uint32_t nmeshes;
	struct layout_words **words; uint32_t nwords;
	struct base_table by_words;     /* words by what tensor_placement_equal looks at */
	/* of the last call: another pointer to an equal mesh may come again and again */
	const struct tensor_mesh *last_mesh; uint32_t last_mesh_number, last_words;
};
void layout_held_release(struct layout_held *h);
/* 1 + numbers of the mesh and the placements, which are new or were there. -EINVAL, -BASE_ELIMIT, -ENOMEM. */
int layout_held_add(struct layout_held *h, const struct store_layout_held *held, uint32_t *ret_mesh,
	uint32_t *ret_words, struct base_error *err);

struct layout_held_tables {             /* as the object has them, sorted */
	struct proto_mesh *meshes;
	char **placements;
	uint32_t *mesh_at, *words_at;   /* 1 + their positions in the tables, by number */
	void *memory;                   /* what the meshes point to */
	uint32_t nplacements;
};
void layout_held_tables_release(struct layout_held_tables *t);
int layout_held_finish(const struct layout_held *h, struct layout_held_tables *ret_t, struct base_error *err);

/* What the tables of a layout that was built point to. */
struct layout_made {
	char **components; uint32_t ncomponents; /* in the order in which they came */
	const char **sorted;
	struct proto_layout_tensor *tensors;
	struct base_buf names, dims;    /* dims: native u64 each */
	struct layout_held_tables held;
};

#endif
