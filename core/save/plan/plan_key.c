/* SPDX-License-Identifier: Apache-2.0
 *
 * plan_key: everything that a plan depends on as one byte string, of which the key is the digest (core/base/digest.h:
 * a tree of SHA-256). It is hashed as it comes, so that it stays in a few pages that are touched for the first time.
 *
 * What is written has one reading: texts and lists come with their lengths, and what may be absent with a bit that says
 * so. A mesh is hashed by itself, once for each pointer, and stands in the tensors by the number of its content:
 * tensors of thousands share a few meshes, whose ranks may be thousands too. Fields that are mostly the same from
 * tensor to tensor, or mostly absent, cost a bit. A thousand tensors are some 80 KB: a tenth of a millisecond. */
#include "core/save/plan/plan_key.h"

#include <string.h>

#include "core/base/array.h"

#define KEY_NO_MESH UINT32_MAX
#define KEY_FIXED_ROOM 512u     /* a tensor without its texts, local shape, placements, boxes */
#define KEY_HASHED_BYTES BASE_BLOCK_BYTES

enum { KEY_BUFFER = 1 << 0, KEY_FLAT = 1 << 1, KEY_BOXES = 1 << 2, KEY_STRIDES = 1 << 3 };

static void key_fail(struct save_plan_key_builder *b)
{
	b->error = -ENOMEM;
}

static void key_hash(struct save_plan_key_builder *b)
{
	if (!b->hasher)
		b->hasher = base_hasher_new();
	if (!b->hasher)
		return key_fail(b);
	base_hasher_update(b->hasher, b->bytes.data, b->bytes.len);
	b->bytes.len = 0;
}

/* ---- meshes ---- */

/* The number of a mesh's content. */
static uint32_t mesh_intern(struct save_plan_key_builder *b, const struct tensor_mesh *m)
{
	base_cleanup_buf struct base_buf bytes = BASE_BUF_INIT;
	struct base_digest digest;

	base_buf_put32(&bytes, m->ndim);
	for (uint32_t d = 0; d < m->ndim; d++) {
		base_buf_put32(&bytes, m->size[d]);
		base_buf_append(&bytes, m->name[d], strlen(m->name[d]) + 1);
	}
	base_buf_put32(&bytes, m->ranks != NULL);
	if (m->ranks)
		base_buf_append(&bytes, m->ranks, (size_t)m->count * sizeof *m->ranks);
	if (bytes.error) {
		key_fail(b);
		return 0;
	}
	base_sha256(bytes.data, bytes.len, &digest);
	for (uint32_t i = 0; i < b->nmeshes; i++)
		if (memcmp(b->meshes.data + (size_t)i * sizeof digest, &digest, sizeof digest) == 0)
			return i;
	base_buf_append(&b->meshes, &digest, sizeof digest);
	return b->nmeshes++;
}

static uint32_t mesh_number(struct save_plan_key_builder *b, const struct tensor_mesh *m)
{
	uint32_t hash, i;
	size_t at = 0;

	if (!m)
		return KEY_NO_MESH;
	if (b->last.mesh == m)
		return b->last.number;
	hash = base_table_hash(&m, sizeof m);
	while ((i = base_table_next(&b->by_pointer, hash, &at)) != BASE_TABLE_NONE)
		if (b->seen[i].mesh == m)
			break;
	if (i == BASE_TABLE_NONE) {
		if (base_array_more(b->seen, b->nseen) < 0 || base_table_reserve(&b->by_pointer, 1) < 0) {
			key_fail(b);
			return 0;
		}
		i = b->nseen++;
		b->seen[i] = (struct save_plan_key_mesh){m, mesh_intern(b, m)};
		base_table_add(&b->by_pointer, hash, i);
	}
	b->last = b->seen[i];
	return b->last.number;
}

/* ---- tensors ---- */

static uint8_t *put32(uint8_t *at, uint32_t v)
{
	base_put32(at, v);
	return at + 4;
}

static uint8_t *put64(uint8_t *at, uint64_t v)
{
	base_put64(at, v);
	return at + 8;
}

static uint8_t *put_strides(uint8_t *at, const struct save_tensor *t)
{
	at = put32(at, t->local.ndim);
	for (uint32_t d = 0; d < t->local.ndim; d++) {
		at = put64(at, t->local.dim[d]);
		at = put64(at, t->local.dim[d] > 1 ? (uint64_t)t->strides[d] : 0);
	}
	return at;
}

static void put_placement(struct save_plan_key_builder *b, const struct tensor_placement *p)
{
	uint8_t bytes[20], *at = put32(bytes, p->kind);

	if (p->kind != TENSOR_REPLICATE && p->kind != TENSOR_PARTIAL)
		at = put32(at, p->dim);
	if (p->kind == TENSOR_STRIDED_SHARD || p->kind == TENSOR_INTERLEAVED_SHARD)
		at = put64(at, p->split);
	if (p->kind == TENSOR_RAGGED_SHARD)
		at = put32(at, p->nends);
	base_buf_append(&b->bytes, bytes, (size_t)(at - bytes));
	if (p->kind == TENSOR_RAGGED_SHARD)
		base_buf_append(&b->bytes, p->ends, (size_t)p->nends * sizeof *p->ends);
}

static uint8_t *put_text(uint8_t *at, const char *text, size_t len)
{
	at = put32(at, (uint32_t)len);
	memcpy(at, text, len);
	return at + len;
}

/* All but placements and raw boxes, which have no bound. */
static void put_fixed(struct save_plan_key_builder *b, const struct save_tensor *t, uint32_t flags)
{
	size_t component = strlen(t->component), name = strlen(t->name);
	size_t room = component + name + KEY_FIXED_ROOM + (size_t)t->local.ndim * 16;
	uint8_t *from = base_buf_extend(&b->bytes, room), *at = from;
	const struct tensor_sharding *s = &t->sharding;

	if (!from)
		return;
	at = put32(at, flags);
	at = put_text(at, t->component, component);
	at = put_text(at, t->name, name);
	at = put32(at, t->dtype);
	at = put32(at, s->item_bytes);
	at = put32(at, t->same_dims);
	at = put32(at, mesh_number(b, s->mesh));
	at = put32(at, s->shape.ndim);
	for (uint32_t d = 0; d < s->shape.ndim; d++)
		at = put64(at, s->shape.dim[d]);
	if (flags & KEY_FLAT)
		at = put64(put64(put64(at, t->flat->from), t->flat->to), t->flat->len);
	if (flags & KEY_STRIDES)
		at = put_strides(at, t);
	b->bytes.len -= room - (size_t)(at - from);
}

void save_plan_key_tensor(struct save_plan_key_builder *b, const struct save_tensor *t)
{
	const struct tensor_sharding *s = &t->sharding;
	uint32_t flags = 0;

	flags |= t->buffer ? KEY_BUFFER : 0;
	flags |= t->flat ? KEY_FLAT : 0;
	flags |= t->boxes ? KEY_BOXES : 0;
	flags |= t->strides ? KEY_STRIDES : 0;
	put_fixed(b, t, flags);
	for (uint32_t m = 0; s->mesh && m < s->mesh->ndim; m++)
		put_placement(b, &s->placement[m]);
	if (t->boxes) {
		base_buf_put64(&b->bytes, t->boxes->n);
		base_buf_append(&b->bytes, t->boxes->pairs, t->boxes->n * t->boxes->ndim * 2 * sizeof(uint64_t));
	}
	b->ntensors++;
	if (b->bytes.len >= KEY_HASHED_BYTES && !b->bytes.error)
		key_hash(b);
}

void save_plan_key_init(struct save_plan_key_builder *b, uint32_t rank, uint32_t world, const struct tensor_mesh *mesh)
{
	memset(b, 0, sizeof *b);
	base_buf_put32(&b->bytes, rank);
	base_buf_put32(&b->bytes, world);
	base_buf_put32(&b->bytes, mesh_number(b, mesh));
}

int save_plan_key_final(struct save_plan_key_builder *b, struct base_digest *ret_key)
{
	int r;

	base_buf_append(&b->bytes, b->meshes.data, b->meshes.len);
	base_buf_put32(&b->bytes, b->nmeshes);
	base_buf_put32(&b->bytes, b->ntensors);
	if (!b->bytes.error)
		key_hash(b);
	r = b->error ? b->error : b->meshes.error ? b->meshes.error : b->bytes.error;
	if (r == 0)
		r = base_hasher_final(b->hasher, ret_key);
	base_hasher_free(b->hasher);
	base_buf_release(&b->bytes);
	base_buf_release(&b->meshes);
	free(b->seen);
	base_table_release(&b->by_pointer);
	memset(b, 0, sizeof *b);
	return r;
}
