/* SPDX-License-Identifier: Apache-2.0
 *
 * proto_internal: what the files of proto/ share: arenas, packing and unpacking of a message, checks of fields,
 * fixed-width rows. Every record has one check function over its C struct; encode and decode both call it, so that
 * nothing is ever written that would be refused when read. */
#ifndef PROTO_PROTO_INTERNAL_H
#define PROTO_PROTO_INTERNAL_H

#include "proto/limits.h"
#include "proto/message.h"
#include "proto/vckpt.pb-c.h"

#define PROTO_REF_BYTES 72u
#define PROTO_CHUNK_ROW_BYTES 88u
#define PROTO_TENSOR_ROW_BYTES 32u
#define PROTO_RANK_ROW_BYTES 96u
#define PROTO_PACK_ROW_BYTES 32u
#define PROTO_ATTEMPT_ROW_BYTES 16u
#define PROTO_ALIVE_ROW_BYTES 24u
#define PROTO_REPLICA_ROW_BYTES 32u
#define PROTO_SAMPLE_ROW_BYTES 36u
#define PROTO_LIVE_ROW_BYTES 112u
#define PROTO_LAUNCH_ROW_BYTES 8u
#define PROTO_RANGE_ROW_BYTES 16u
#define PROTO_CLASS_MAX 71u
#define PROTO_STEP_MAX ((uint64_t)INT64_MAX)
#define PROTO_WORLD_MAX (UINT32_C(1) << 24)
#define PROTO_FILE_MAX_BYTES ((uint64_t)INT64_MAX)
#define PROTO_FILE_NAME_MAX 511u
#define PROTO_WORD_MAX 64u             /* bytes of a view's, phase's or mesh dimension's name */
#define PROTO_TARGET_MAX_BYTES (UINT64_C(4) << 20) /* of grid parameters: pieces stay within 32 bits by far */

/* Object kinds, as packs have them (docs/format/pack.md). */
enum {
	PROTO_KIND_PIECE = 1,
	PROTO_KIND_BLOB,
	PROTO_KIND_LAYOUT,
	PROTO_KIND_PART,
	PROTO_KIND_CHUNK,
	PROTO_KIND_VIEW_HEADER
};

/* ---- arena.c: bump allocation with a bound; freed as a whole ---- */
struct proto_arena {
	struct arena_block *blocks;
	uint8_t *at;
	size_t room, block;     /* bytes of the next block; each is twice the one before */
	uint64_t left;          /* of the bound */
	bool exhausted;         /* the bound was hit */
	bool starved;           /* there was no memory within the bound */
	/* Most records need no more; a commit for 8,192 ranks holds as many records. */
	uint8_t first[1024] __attribute__((aligned(16)));
};
struct proto_arena *proto_arena_new(uint64_t limit_bytes);      /* UINT64_MAX: none; NULL: out of memory */
void proto_arena_free(struct proto_arena *a);                   /* NULL-safe */
/* The same of one that is on the stack. */
void proto_arena_init(struct proto_arena *a, uint64_t limit_bytes);
void proto_arena_release(struct proto_arena *a);
/* NULL: no memory, or over the bound. proto_arena_array() zeroes it. */
void *proto_arena_take(struct proto_arena *a, uint64_t n, size_t size);
void *proto_arena_array(struct proto_arena *a, uint64_t n, size_t size);
char *proto_arena_text(struct proto_arena *a, const char *bytes, size_t len);
ProtobufCAllocator proto_arena_allocator(struct proto_arena *a);

/* ---- scan.c ---- */
/* Before unpacking: -BASE_EFORMAT if the body is not a message, has too many unknown fields, or would certainly take
 * more than `memory` bytes; otherwise 0. */
int proto_scan(const ProtobufCMessageDescriptor *d, const void *body, size_t len, uint64_t memory);
size_t proto_scan_head(const void *body, size_t len);           /* bytes of fields 1 and 2, with which a body begins */

/* ---- wire.c ---- */
/* Unpacks into a new arena (*ret_arena, the caller's; it also owns *ret_message). Refuses newer versions, unknown
 * features and an encoding that is not canonical. */
int proto_unpack(const ProtobufCMessageDescriptor *d, const void *body, size_t len, struct proto_arena **ret_arena,
	void *ret_message);
/* Version and words alone, known or not. */
int proto_head_unpack(const void *body, size_t len, struct proto_arena **ret_arena, Vckpt__Head **ret_head);
/* Unpacks a message that is part of another one: no version, no features. `arena` is there already. */
int proto_unpack_inner(const ProtobufCMessageDescriptor *d, const void *body, size_t len, struct proto_arena *arena,
	void *ret_message);
int proto_pack(const void *message, struct base_buf *b);
/* Unknown fields of a message, unchanged: copied out of it into the arena, and put into one that is to be packed. */
int proto_unknown_take(const ProtobufCMessage *m, struct proto_arena *a, const uint8_t **ret_bytes, size_t *ret_len);
int proto_unknown_put(ProtobufCMessage *m, struct proto_arena *a, const uint8_t *bytes, size_t len);
int proto_no_memory(const struct proto_arena *a);                /* what a failed arena allocation means */
/* whole rows, not too many */
bool proto_rows(const ProtobufCBinaryData *field, size_t row_bytes, uint64_t max_rows, uint32_t *ret_n);
/* Can a reader compute with this grid? The bounds keep its arithmetic in 64 bits and pieces at a few MiB. */
bool proto_grid_valid(const struct tensor_grid_params *g);
/* Words of a message. */
enum { PROTO_GRID_2 = 1, PROTO_LIST_2 = 2, PROTO_LIST_3 = 4, PROTO_LIST_4 = 8 };
char **proto_words(unsigned words, size_t *ret_n);              /* not the caller's to free */
/* Exactly these, in their order? */
bool proto_words_are(char *const *features, size_t n, unsigned words);
bool proto_word_known(const char *word);        /* in a message of some kind */
static inline ProtobufCBinaryData proto_digest_field(const struct base_digest *d)
{
	return (ProtobufCBinaryData){sizeof d->bytes, (uint8_t *)d->bytes};
}
bool proto_digest_get(const ProtobufCBinaryData *field, struct base_digest *ret_d); /* false: not 32 bytes */
/* ---- ref.c, common.c: what several records hold ---- */
#define PROTO_HEADERS_MAX 4096u
bool proto_ref_check(const struct proto_ref *ref, unsigned kind, const struct proto_pack_use *packs, uint32_t npacks);
/* Rules between the items; those of each item are in its table. */
bool proto_attributes_check(const struct proto_attribute *a, size_t n);
bool proto_commons_sorted(const struct proto_common *c, uint32_t n);
bool proto_headers_check(const struct proto_view_header *h, uint32_t n, uint32_t nlayouts,
	const struct proto_pack_use *packs, uint32_t npacks);

/* ---- packs.c: tables of pack names ---- */
int proto_packs_pack(const struct proto_pack_use *p, uint32_t n, struct proto_arena *arena, Vckpt__Packs **ret_message);
int proto_packs_unpack(const Vckpt__Packs *message, struct proto_arena *arena, const struct proto_pack_use **ret_p,
	uint32_t *ret_n);
/* 0, -BASE_EFORMAT, -ENOMEM */
int proto_packs_check(const struct proto_pack_use *p, uint32_t n, bool sorted, bool unknown_sizes);

/* ---- name.c ---- */
struct proto_attempt_number { uint8_t launch[8]; uint64_t count; };
bool proto_launch_valid(const char *launch);                        /* 16 lower-case hex digits */
bool proto_launch_parse(const char *launch, uint8_t ret_id[static PROTO_LAUNCH_ROW_BYTES]);
void proto_launch_format(const uint8_t id[static PROTO_LAUNCH_ROW_BYTES], char text[static 17]);
bool proto_attempt_parse(const char *attempt, struct proto_attempt_number *ret_a);
void proto_attempt_format(const struct proto_attempt_number *a, char text[static PROTO_ATTEMPT_MAX]);
bool proto_pack_name_split(const char *pack, struct proto_attempt_number *ret_a, uint32_t *ret_rank,
	const char **ret_class);
bool proto_attempt_valid(const char *attempt);
bool proto_class_valid(const char *class);
bool proto_word_valid(const char *word);                            /* [A-Za-z_][A-Za-z0-9_]*, <= PROTO_WORD_MAX */
bool proto_host_valid(const char *host);
/* Memory order, then length: the order of all sorted names. */
int proto_name_compare(const char *a, size_t a_len, const char *b, size_t b_len);

#endif
