/* SPDX-License-Identifier: Apache-2.0
 *
 * pack: an append-only file of objects (docs/format/pack.md).
 *
 *   head (4096 bytes) | extents | footer | tail (128 bytes)
 *   extent  objects one after another, each at the next multiple of 64 (raw and >= 64 KiB: of 4096), zero padded,
 *           then, at a multiple of 8, the checks of all of them in order; at most 64 MiB of stored bytes, or one object
 *   checks of an object: u64 check for each block, then, if encoded, u32 stored length for each block
 *   footer  one fixed-width entry an object (so a pack explains itself: verify, index and mending read it)
 *
 * A reference says where an object is. The place is a hint: bytes are used only after their checks passed, and these
 * are seeded by the digest in the reference. A writer belongs to one thread; any thread may read. */
#ifndef CORE_PACK_PACK_H
#define CORE_PACK_PACK_H

#include "core/base/digest.h"
#include "core/storage/storage.h"
#include "proto/limits.h"

#define PACK_NAME_MAX 128  /* NUL included */
#define PACK_HEAD_BYTES 4096u
#define PACK_TAIL_BYTES 128u

enum pack_object_kind { PACK_OBJECT_PIECE = 1, PACK_OBJECT_BLOB = 2, PACK_OBJECT_LAYOUT = 3, PACK_OBJECT_PART = 4,
	PACK_OBJECT_PART_CHUNK = 5, PACK_OBJECT_VIEW_HEADER = 6 };

struct pack_object_ref {
	struct base_digest digest;
	uint64_t offset;      /* of the first stored byte in the pack */
	uint64_t checks;      /* offset of this object's checks */
	uint64_t raw_len, stored_len;
	uint16_t codec;       /* word of codec.h */
	uint8_t kind;
	uint32_t pack;        /* number in a table that the owner of the reference has */
};
struct proto_ref;
/* From the reference that a record of the store holds. */
struct pack_object_ref pack_object_ref_from(const struct proto_ref *ref);
/* The arithmetic of an extent: alignment of an object's stored bytes, and bytes of its checks. */
uint64_t pack_object_align(uint16_t codec, uint64_t stored_len);
uint64_t pack_object_checks_bytes(uint16_t codec, uint64_t raw_len);
/* Can this be a reference into a pack whose data ends at `end`? Checks lengths, codec, alignment and places. */
int pack_object_ref_check(const struct pack_object_ref *ref, uint64_t end);

/* packs/<xx>/<pack>.pack; -ENAMETOOLONG or -EINVAL for a name that no vckpt makes. */
int pack_path(const char *pack, char path[static STORAGE_NAME_MAX]);
/* "<launch16>-<count>-<rank>-<class>" and back. attempt: "<launch16>-<count>". */
int pack_name_make(const char *attempt, uint32_t rank, const char *class, char name[static PACK_NAME_MAX]);
struct pack_name { char attempt[48]; uint32_t rank; char class[72]; };
int pack_name_parse(const char *pack, struct pack_name *ret_name);

/* ---- writing ---- */
struct pack_writer;
int pack_writer_open(struct storage *s, const uint8_t store_id[16], const char *pack,
	struct pack_writer **ret_w);
/* Appends an object whose blocks are already encoded and checked: `checks` has base_block_count(raw_len) entries,
 * `lens` likewise or NULL for raw. Fills ret_ref, but its `checks` offset only when the extent is ended
 * (pack_extent_end or seal); ret_ref must stay where it is until then. The memory of the object may be reused on
 * return. */
int pack_append(struct pack_writer *w, const struct base_digest *digest, enum pack_object_kind kind,
	uint16_t codec, const void *stored, uint64_t stored_len, uint64_t raw_len, const uint64_t *checks,
	const uint32_t *lens, struct pack_object_ref *ret_ref);
/* The same with lent memory (storage.h); NULL: as above. pack_keep copies bytes of such memory that wait for more
 * to be written. */
int pack_append_lent(struct pack_writer *w, const struct base_digest *digest, enum pack_object_kind kind,
	uint16_t codec, const void *stored, uint64_t stored_len, uint64_t raw_len, const uint64_t *checks,
	const uint32_t *lens, struct storage_lent *lent, struct pack_object_ref *ret_ref);
void pack_keep(struct pack_writer *w);
/* Convenience for small things: digests, checks and appends raw bytes (codec raw). */
int pack_append_raw(struct pack_writer *w, enum pack_object_kind kind, const void *bytes, uint64_t len,
	struct pack_object_ref *ret_ref);
/* The same, encoded where that gains (metadata: chunks, layouts, view headers). */
int pack_append_encoded(struct pack_writer *w, enum pack_object_kind kind, const void *bytes, uint64_t len,
	struct pack_object_ref *ret_ref);
/* A long object (a blob) that arrives in pieces of any size: begin, add, end. It is stored raw, and its digest has to
 * be known beforehand. */
int pack_stream_begin(struct pack_writer *w, const struct base_digest *digest, enum pack_object_kind kind,
	uint64_t len);
int pack_stream_add(struct pack_writer *w, const void *bytes, size_t len);
/* -EBADMSG: the bytes do not have that digest or length */
int pack_stream_end(struct pack_writer *w, struct pack_object_ref *ret_ref);
/* Ends the open extent: writes its checks. Every ret_ref that was handed to append since the last end is complete
 * now. */
int pack_extent_end(struct pack_writer *w);
uint64_t pack_writer_size(const struct pack_writer *w);
/* ends the extent, writes footer and tail, makes the pack durable; always frees w */
int pack_seal(struct pack_writer *w, uint64_t *ret_size);
void pack_abandon(struct pack_writer *w);                  /* NULL-safe */
/* Gives the sealed pack `from`, which no one needs, the free name `pack`. Errors: storage.h, take; -ENOENT also if it
 * cannot be opened, as one of a newer vckpt. Its objects are not looked at. */
int pack_take(struct storage *s, const uint8_t store_id[16], const char *pack, const char *from);

/* ---- reading ---- */
/* an open pack: head checked (magic, version, name, store id), size known. Reference-counted by its cache. */
struct pack;
/* checked_size: the size of this pack when its head was checked before in this process; 0: it was not. If the pack
 * still has that size, its head is not read again. */
int pack_open(struct storage *s, const uint8_t store_id[16], const char *pack, uint64_t checked_size,
	struct pack **ret_p, struct base_error *err);
/* Has its file been deleted, so that it cannot be opened again? True where the storage does not know. */
bool pack_gone(const struct pack *p);
void pack_close(struct pack *p); /* NULL-safe */
const char *pack_name(const struct pack *p);
uint64_t pack_size(const struct pack *p);

/* Reads and checks blocks [first, first + n) of an object and decodes them into `out` (room for exactly their raw
 * bytes). -EBADMSG names in err: pack, offset, block. Every length and offset of `ref` is checked against the pack's
 * size first. */
int pack_object_read_blocks(struct pack *p, const struct pack_object_ref *ref, uint64_t first, uint64_t n,
	void *out, struct base_error *err);
/* The whole object, checks only (not re-hashed). `out` has raw_len bytes. */
int pack_object_read(struct pack *p, const struct pack_object_ref *ref, void *out, struct base_error *err);
/* The whole object into fresh memory, re-hashed with SHA-256 too (metadata: layouts, parts). raw_len > max is
 * -EFBIG. */
int pack_object_load(struct pack *p, const struct pack_object_ref *ref, uint64_t max, void **ret_bytes,
	struct base_error *err);

/* Bytes of a pack from `offset` on into several pieces of memory, one after another; n <= 1024. They are not checked:
 * pack_object_take does that. */
int pack_readv(struct pack *p, uint64_t offset, const struct iovec *iov, unsigned n,
	struct base_error *err);
/* Bytes of a pack from `offset` on that are read once, past the page cache where that is possible and pays. `room` and
 * ret_bytes as in storage.h, file_read_past. STORAGE_PAST_CACHE: they came past it. They are not checked. */
int pack_read_past(struct pack *p, uint64_t offset, size_t len, void *room, const uint8_t **ret_bytes,
	struct base_error *err);
/* For a caller that reads several objects at once: where the checks of blocks [first, first + n) are in the pack. Of a
 * raw object these alone, of an encoded one all checks and the stored lengths behind them. */
void pack_object_checks_of(const struct pack_object_ref *ref, uint64_t first, uint64_t n, uint64_t *ret_offset,
	uint64_t *ret_len);
/* Where the stored bytes of these blocks are, from the object's first one on. `checks`: the bytes of
 * pack_object_checks_of; of a raw object they are not looked at. -EBADMSG: the stored lengths are damaged. */
int pack_object_stored_of(const struct pack_object_ref *ref, uint64_t first, uint64_t n, const void *checks,
	uint64_t *ret_from, uint64_t *ret_len);
/* Blocks [first, first + n), whose stored bytes and checks the caller has read: checked and decoded as by
 * pack_object_read_blocks. `stored` may be `out` where the codec is raw. */
int pack_object_take(struct pack *p, const struct pack_object_ref *ref, uint64_t first, uint64_t n,
	const void *stored, const void *checks, void *out, struct base_error *err);
/* The whole object as it is stored, for a writer of another pack: `stored` has room for stored_len bytes, `checks` and
 * (of an encoded one) `lens` for an entry a block. Checked and decoded into `out`, which has raw_len bytes and may be
 * `stored` where the codec is raw; the caller hashes that. */
int pack_object_copy(struct pack *p, const struct pack_object_ref *ref, void *stored, void *out, uint64_t *checks,
	uint32_t *lens, struct base_error *err);
/* The same, where the caller has read the stored bytes and, into `read`, all of pack_object_checks_of. */
int pack_object_take_whole(struct pack *p, const struct pack_object_ref *ref, const void *stored, const void *read,
	void *out, uint64_t *checks, uint32_t *lens, struct base_error *err);
/* Bytes that this thread has read from packs so far: those that reads asked for, checks and footers included. */
uint64_t pack_bytes_read(void);

/* The footer: count entries, checked with SHA-256. Free with pack_footer_free. */
struct pack_footer { struct pack_object_ref *objects; uint64_t count; };
int pack_footer_read(struct pack *p, struct pack_footer *ret_f, struct base_error *err);
void pack_footer_free(struct pack_footer *f);

/* Verifies every byte: head, objects (re-hashed), checks, padding, footer, tail. Returns 0 when it could look at
 * everything, damage or not; -BASE_EVERSION: the footer lists a codec or kind that is not known. If the footer itself
 * is damaged, the objects are not known: it reports one damage, and does not look at what is before the footer. */
typedef void (*pack_damage_func)(void *arg, uint64_t offset, uint64_t len, const struct pack_object_ref *object,
	const char *what);
struct pack_verify_calls {
	/* Each fault, with the bytes that are hit and, where an object is hit, its reference (from the footer). */
	pack_damage_func damage;
	void (*progress)(void *arg, uint64_t bytes); /* counts bytes; may be NULL */
	/* Each object that the footer lists; may be NULL. xxh: the XXH3-128 of its raw bytes under `seed`; NULL where
	 * it is damaged, or no piece. */
	void (*object)(void *arg, const struct pack_object_ref *object, const struct base_xxh128 *xxh);
	void *arg;
	uint64_t seed;
};
int pack_verify(struct pack *p, const struct pack_verify_calls *calls);

#endif
