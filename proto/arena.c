/* SPDX-License-Identifier: Apache-2.0
 *
 * arena: memory of one decoded record. Blocks are taken as they are needed, never moved, and freed together; single
 * frees do nothing. The bound is what keeps a hostile body from costing more than a fixed multiple of its own length:
 * protobuf-c allocates some 40 bytes for each field that it meets, before any check of ours. */
#include "proto/proto_internal.h"

#define ARENA_BLOCK_BYTES (size_t)(16 << 10)
#define ARENA_ALIGN 16u

struct arena_block { struct arena_block *next; uint64_t unused; };

void proto_arena_init(struct proto_arena *a, uint64_t limit_bytes)
{
	a->blocks = NULL;
	a->at = a->first;
	a->room = sizeof a->first;
	a->block = 2 * sizeof a->first;
	a->left = limit_bytes;
	a->exhausted = a->starved = false;
}

struct proto_arena *proto_arena_new(uint64_t limit_bytes)
{
	struct proto_arena *a = malloc(sizeof *a);

	if (a)
		proto_arena_init(a, limit_bytes);
	return a;
}

void proto_arena_release(struct proto_arena *a)
{
	struct arena_block *next;

	for (struct arena_block *b = a->blocks; b; b = next) {
		next = b->next;
		free(b);
	}
}

void proto_arena_free(struct proto_arena *a)
{
	if (a)
		proto_arena_release(a);
	free(a);
}

static void *arena_block_add(struct proto_arena *a, size_t n)
{
	struct arena_block *b = malloc(sizeof *b + n);

	if (!b) {
		a->starved = true;
		return NULL;
	}
	b->next = a->blocks;
	a->blocks = b;
	return b + 1;
}

static void *arena_alloc(struct proto_arena *a, uint64_t n)
{
	void *p;

	if (n > a->left) {
		a->exhausted = true;
		return NULL;
	}
	n = n ? base_align(n, ARENA_ALIGN) : ARENA_ALIGN;
	a->left -= base_min(n, a->left);
	if (n > ARENA_BLOCK_BYTES / 4)
		return arena_block_add(a, n);
	if (n > a->room) {
		size_t size = base_max(a->block, n);

		a->at = arena_block_add(a, size);
		a->room = a->at ? size : 0;
		if (!a->at)
			return NULL;
		a->block = base_min(2 * size, ARENA_BLOCK_BYTES);
	}
	p = a->at;
	a->at += n;
	a->room -= n;
	return p;
}

void *proto_arena_take(struct proto_arena *a, uint64_t n, size_t size)
{
	uint64_t len;

	if (base_mul_overflows(n, size, &len) || len > SIZE_MAX / 2) {
		a->exhausted = true;
		return NULL;
	}
	return arena_alloc(a, len);
}

void *proto_arena_array(struct proto_arena *a, uint64_t n, size_t size)
{
	void *p = proto_arena_take(a, n, size);

	return p && n ? memset(p, 0, n * size) : p;
}

char *proto_arena_text(struct proto_arena *a, const char *bytes, size_t len)
{
	char *text = arena_alloc(a, (uint64_t)len + 1);

	if (text) {
		memcpy(text, bytes, len);
		text[len] = 0;
	}
	return text;
}

static void *arena_protobuf_alloc(void *data, size_t size)
{
	return size > SIZE_MAX / 2 ? NULL : arena_alloc(data, size);
}

static void arena_protobuf_free(void *data, void *p)
{
	(void)data;
	(void)p;
}

ProtobufCAllocator proto_arena_allocator(struct proto_arena *a)
{
	return (ProtobufCAllocator){arena_protobuf_alloc, arena_protobuf_free, a};
}
