/* SPDX-License-Identifier: Apache-2.0
 *
 * plan_key: everything that a plan depends on as one byte string, of which the key is the digest (core/base/digest.h:
 * a tree of SHA-256). It is hashed as it comes, so that it stays in a few pages that are touched for the first time.
 *
 * What is written has one reading: texts and lists come with their lengths, and what may be absent with a bit that says
 * so. Fields that are mostly absent cost a bit. A thousand tensors are some 80 KB: a tenth of a millisecond. */
#include "core/save/plan/plan_key.h"

#include <string.h>

#include "core/base/buf.h"

#define KEY_FIXED_ROOM 512u     /* a tensor without its texts, local shape, placements, boxes */
#define KEY_HASHED_BYTES BASE_BLOCK_BYTES

enum { KEY_BUFFER = 1 << 0, KEY_FLAT = 1 << 1, KEY_BOXES = 1 << 2, KEY_STRIDES = 1 << 3 };

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

static void put_placement(struct base_buf *b, const struct tensor_placement *p)
{
	uint8_t bytes[20], *at = put32(bytes, p->kind);

	if (p->kind != TENSOR_REPLICATE && p->kind != TENSOR_PARTIAL)
		at = put32(at, p->dim);
	if (p->kind == TENSOR_STRIDED_SHARD || p->kind == TENSOR_INTERLEAVED_SHARD)
		at = put64(at, p->split);
	if (p->kind == TENSOR_RAGGED_SHARD)
		at = put32(at, p->nends);
	base_buf_append(b, bytes, (size_t)(at - bytes));
	if (p->kind == TENSOR_RAGGED_SHARD)
		base_buf_append(b, p->ends, (size_t)p->nends * sizeof *p->ends);
}

static uint8_t *put_text(uint8_t *at, const char *text, size_t len)
{
	at = put32(at, (uint32_t)len);
	memcpy(at, text, len);
	return at + len;
}

/* All but placements and raw boxes, which have no bound. */
static void put_fixed(struct base_buf *b, const struct save_tensor *t, uint32_t flags)
{
	size_t component = strlen(t->component), name = strlen(t->name);
	size_t room = component + name + KEY_FIXED_ROOM + (size_t)t->local.ndim * 16;
	uint8_t *from = base_buf_extend(b, room), *at = from;
	const struct tensor_sharding *s = &t->sharding;

	if (!from)
		return;
	at = put32(at, flags);
	at = put_text(at, t->component, component);
	at = put_text(at, t->name, name);
	at = put32(at, t->dtype);
	at = put32(at, s->item_bytes);
	at = put32(at, t->same_dims);
	at = put64(at, (uintptr_t)s->mesh);
	at = put32(at, s->shape.ndim);
	for (uint32_t d = 0; d < s->shape.ndim; d++)
		at = put64(at, s->shape.dim[d]);
	if (flags & KEY_FLAT)
		at = put64(put64(put64(at, t->flat->from), t->flat->to), t->flat->len);
	if (flags & KEY_STRIDES)
		at = put_strides(at, t);
	b->len -= room - (size_t)(at - from);
}

static void put_tensor(struct base_buf *b, const struct save_tensor *t)
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
		base_buf_put64(b, t->boxes->n);
		base_buf_append(b, t->boxes->pairs, t->boxes->n * t->boxes->ndim * 2 * sizeof(uint64_t));
	}
}

int save_plan_key(const struct save_tensor *tensors, uint32_t n, struct base_digest *ret_key)
{
	base_cleanup_buf struct base_buf b = BASE_BUF_INIT; /* what is hashed next */
	struct base_hasher *h = base_hasher_new();
	int r;

	base_buf_put32(&b, n);
	for (uint32_t i = 0; h && i < n && !b.error; i++) {
		put_tensor(&b, &tensors[i]);
		if (b.len >= KEY_HASHED_BYTES || i == n - 1) {
			base_hasher_update(h, b.data, b.len);
			b.len = 0;
		}
	}
	r = !h ? -ENOMEM : b.error ? b.error : base_hasher_final(h, ret_key);
	base_hasher_free(h);
	return r;
}
