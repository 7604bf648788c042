/* SPDX-License-Identifier: Apache-2.0
 *
 * verify_shards: are the rows of a part within what its layout gives the rank? Readers ask only the parts whose shards
 * overlap what they want (core/load/open/holders.c): some of them would see a row outside its shard, and others not.
 *
 * Meshes and placements are made once for each layout, when a row needs them, and those of each tensor are checked
 * against its shape once. One thread. */
#include "core/upkeep/verify_internal.h"

#include <stdio.h>

#include "core/tensor/shard.h"

enum shards_state { SHARDS_NEW, SHARDS_GOOD, SHARDS_NONE };

struct verify_shards {
	const struct store_layout *layout;
	struct tensor_mesh **meshes;           /* by number; NULL: not made yet */
	struct tensor_placements **placements; /* likewise */
	uint8_t *states;                       /* by tensor: enum shards_state */
};

struct verify_shards *verify_shards_new(const struct store_layout *l)
{
	struct verify_shards *k = calloc(1, sizeof *k);

	if (!k)
		return NULL;
	k->layout = l;
	k->meshes = calloc((size_t)l->m.nmeshes + 1, sizeof *k->meshes);
	k->placements = calloc((size_t)l->m.nplacements + 1, sizeof *k->placements);
	k->states = calloc((size_t)l->m.ntensors + 1, sizeof *k->states);
	if (k->meshes && k->placements && k->states)
		return k;
	verify_shards_free(k);
	return NULL;
}

void verify_shards_free(struct verify_shards *k)
{
	if (!k)
		return;
	for (uint32_t i = 0; k->meshes && i < k->layout->m.nmeshes; i++)
		tensor_mesh_free(k->meshes[i]);
	for (uint32_t i = 0; k->placements && i < k->layout->m.nplacements; i++)
		free(k->placements[i]);
	free(k->meshes);
	free(k->placements);
	free(k->states);
	free(k);
}

/* What the layout records of a tensor. An error: err says why it makes no sense. */
static int shards_recorded(struct verify_shards *k, uint32_t tensor, struct tensor_sharding *ret_s,
	struct base_error *err)
{
	const struct proto_layout_tensor *t = &k->layout->m.tensors[tensor];
	struct tensor_mesh **mesh = &k->meshes[t->mesh - 1];
	struct tensor_placements **p = &k->placements[t->placement - 1];
	int r = *mesh ? 0 : store_layout_mesh(k->layout, tensor, mesh, err);

	if (r == 0 && !*p)
		r = store_layout_placements(k->layout, tensor, p, err);
	if (r < 0)
		return r;
	*ret_s = (struct tensor_sharding){.item_bytes = tensor_dtype_bytes(store_layout_dtype(k->layout, tensor)),
		.mesh = *mesh, .placement = (*p)->at};
	store_layout_shape(k->layout, tensor, &ret_s->shape);
	return k->states[tensor] == SHARDS_GOOD ? 0 : tensor_sharding_check(ret_s, (*p)->n, err);
}

static const char *shards_name(const struct verify_shards *k, uint32_t tensor, int *ret_len)
{
	uint32_t len;
	const char *name = store_layout_name(k->layout, tensor, &len);

	*ret_len = store_layout_shown(name, len);
	return name;
}

/* A record that makes no sense is reported once for each tensor. 1, or -ENOMEM. */
static int shards_refused(struct verify_shards *k, uint32_t tensor, int r, const struct base_error *err,
	char text[static VERIFY_SAYS_MAX])
{
	int len;
	const char *name = shards_name(k, tensor, &len);

	if (r == -ENOMEM)
		return r;
	k->states[tensor] = SHARDS_NONE;
	snprintf(text, VERIFY_SAYS_MAX, "its layout shards tensor '%.*s' in a way that is not possible: %.140s", len,
		name, err->code ? err->text : base_error_name(r));
	return 1;
}

int verify_shards_row(struct verify_shards *k, uint32_t rank, const struct store_row *row,
	char text[static VERIFY_SAYS_MAX])
{
	const struct proto_layout_tensor *t = &k->layout->m.tensors[row->tensor];
	struct base_error err = {0};
	struct tensor_sharding s;
	struct tensor_shard shard;
	const char *name;
	char box[120];
	int len, r;

	if (!t->mesh || !t->placement || k->states[row->tensor] == SHARDS_NONE ||
		store_layout_bytes(k->layout, row->tensor) == 0)
		return 0;
	r = shards_recorded(k, row->tensor, &s, &err);
	if (r < 0)
		return shards_refused(k, row->tensor, r, &err, text);
	k->states[row->tensor] = SHARDS_GOOD;
	if (tensor_shard_of(&s, rank, NULL, &shard, NULL) < 0)
		return 0;
	for (uint32_t i = 0; i < row->nboxes; i++) {
		if (tensor_shard_has(&shard, &row->boxes[i]))
			continue;
		name = shards_name(k, row->tensor, &len);
		tensor_box_text(s.shape.ndim, &row->boxes[i], box, sizeof box);
		snprintf(text, VERIFY_SAYS_MAX, "rank %u stored box %s of tensor '%.*s', which is not what the layout "
			"gives this rank", rank, box, len, name);
		return 1;
	}
	return 0;
}
