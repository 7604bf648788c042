/* SPDX-License-Identifier: Apache-2.0
 *
 * record: the envelope of every small file of a store (docs/format/record.md).
 *
 *   copy     magic "VCKPTREC" | u16 version | u16 kind | u32 len | SHA-256(magic..len | store id or zeros
 *            | body) | body
 *   single   one copy; the file ends with it
 *   double   two equal copies, the second at half = round_up(48 + len, 4096); zeros between; the file is 2 * half long
 *
 * Pure functions over memory; no I/O but in store_record_put/get. */
#ifndef CORE_STEP_RECORD_H
#define CORE_STEP_RECORD_H

#include "core/base/buf.h"
#include "core/base/digest.h"
#include "core/storage/storage.h"

#define STORE_RECORD_HEAD_BYTES 48u
#define STORE_RECORD_VERSION 1u

enum store_record_kind {
	STORE_RECORD_STORE = 1,
	STORE_RECORD_ENTRY = 2,
	STORE_RECORD_MANIFEST = 3,
	STORE_RECORD_BEGIN = 4,
	STORE_RECORD_BASE = 5,
	STORE_RECORD_ANNOUNCEMENT = 6, /* announcement */
	STORE_RECORD_HEARTBEAT = 7,
	STORE_RECORD_TRASH = 8,
	STORE_RECORD_STATS = 9,
	STORE_RECORD_DAMAGE = 10,
	STORE_RECORD_MARK = 11, /* of a list's head */
};
/* The largest body of each kind; readers and writers refuse a longer one. */
uint64_t store_record_max(enum store_record_kind kind);

struct store_record { enum store_record_kind kind; uint8_t *body; size_t len; }; /* body malloc'ed */
void store_record_release(struct store_record *record);

/* The bytes of a record's file. id: the store's (16 bytes), so that a file of another store never passes; NULL for kind
 * store. */
int store_record_encode(enum store_record_kind kind, const uint8_t id[16], const void *body, size_t len,
	struct base_buf *ret_file);
/* 0; or -EBADMSG (no good copy), -BASE_EVERSION, -BASE_EFORMAT. *ret_whole (may be NULL) is false if a copy or the
 * padding is bad although the other copy is good: readers go on, verify reports it. */
int store_record_decode(enum store_record_kind kind, const uint8_t id[16], const void *file, size_t len,
	struct store_record *ret_r, bool *ret_whole);

/* Reports that a newer vckpt wrote `what` (a file's name, "the layout", ...), and which word or version of `body` is
 * not known (NULL: that of its envelope). Returns -BASE_EVERSION. */
int store_newer(struct base_error *err, const char *what, const void *body, size_t len);

int store_record_put(struct storage *s, const char *name, enum store_record_kind kind, const uint8_t id[16],
	const void *body, size_t len);
int store_record_put_fleeting(struct storage *s, const char *name, enum store_record_kind kind,
	const uint8_t id[16], const void *body, size_t len);
int store_record_put_passing(struct storage *s, const char *name, enum store_record_kind kind,
	const uint8_t id[16], const void *body, size_t len);
int store_record_get(struct storage *s, const char *name, enum store_record_kind kind, const uint8_t id[16],
	struct store_record *ret_r, bool *ret_whole, struct base_error *err);

#endif
