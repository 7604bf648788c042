/* SPDX-License-Identifier: Apache-2.0
 *
 * pack_format: the bytes of a pack (docs/format/pack.md), shared by writer, reader and verify.
 *
 *   head   0 magic "VCKPTPAK" | 8 u16 version | 10 u16 zero | 12 u32 required features | 16 store id (16)
 *          | 32 u16 length of the name | 34 name (128, zero padded) | 162 zeros | 4088 XXH3-64 of bytes 0..4087
 *   entry  0 digest (32) | 32 offset | 40 checks | 48 raw length | 56 stored length | 64 u16 codec | 66 u8 kind
 *          | 67 zeros (13)
 *   tail   0 magic "VCKPTEND" | 8 offset of the footer | 16 its length | 24 count | 32 file size
 *          | 40 SHA-256 of the footer (32) | 72 zeros | 120 XXH3-64 of bytes 0..119 */
#ifndef CORE_PACK_PACK_FORMAT_H
#define CORE_PACK_PACK_FORMAT_H

#include <pthread.h>

#include "core/base/le.h"
#include "core/pack/codec.h"
#include "core/pack/pack.h"

enum {
	PACK_VERSION = 1,
	PACK_ENTRY_BYTES = 80,
	PACK_FOOTER_ALIGN = 64,
	PACK_CHECKS_ALIGN = 8,
	PACK_HEAD_CHECK_AT = PACK_HEAD_BYTES - 8,
	PACK_TAIL_CHECK_AT = PACK_TAIL_BYTES - 8,
};
#define PACK_MAGIC_HEAD "VCKPTPAK"
#define PACK_MAGIC_TAIL "VCKPTEND"

/* Bytes [from, end) of a pack, checks of objects, as they were read. */
struct pack_checks { pthread_mutex_t lock; uint8_t *bytes; uint64_t from, end; };

struct pack {
	struct storage *storage;
	struct pack_checks checks;
	struct storage_file *file;
	uint64_t size;
	uint8_t store_id[16];
	char name[PACK_NAME_MAX];
};

struct pack_tail {
	uint64_t footer_offset, footer_len, count, file_size;
	struct base_digest footer_digest;
};

void pack_head_encode(const uint8_t store_id[16], const char *name, uint8_t head[static PACK_HEAD_BYTES]);
void pack_tail_encode(const struct pack_tail *t, uint8_t tail[static PACK_TAIL_BYTES]);
/* Checks everything in it, against the size of the file too. -EBADMSG. */
int pack_tail_decode(const uint8_t tail[static PACK_TAIL_BYTES], uint64_t file_size, struct pack_tail *ret_t);
void pack_entry_encode(const struct pack_object_ref *ref, uint8_t entry[static PACK_ENTRY_BYTES]);
/* `end`: where objects and checks end. -EBADMSG for anything that no writer makes. */
int pack_entry_decode(const uint8_t entry[static PACK_ENTRY_BYTES], uint64_t end, struct pack_object_ref *ret_ref);
/* Decodes all entries of a footer; checks each by itself, and their places by the arithmetic of extents. `out`: room
 * for count of them. */
int pack_footer_decode(const uint8_t *footer, const struct pack_tail *t, struct pack_object_ref *out);

/* The bounds of the extent that begins with objects[first]: *ret_next is the first object after it, *ret_end is where
 * its checks end. -EBADMSG if the places do not follow the arithmetic. */
int pack_extent_bounds(
	const struct pack_object_ref *objects, uint64_t count, uint64_t first, uint64_t *ret_next, uint64_t *ret_end);

/* Reads all bytes from a pack, or gives an error; -EBADMSG past the end (the file shrank). */
int pack_read(struct pack *p, uint64_t offset, void *bytes, size_t len, struct base_error *err);
/* Tail and raw footer; *ret_footer is malloc'ed, its SHA-256 checked. */
int pack_footer_load(struct pack *p, struct pack_tail *ret_tail, uint8_t **ret_footer, struct base_error *err);

#endif
