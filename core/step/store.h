/* SPDX-License-Identifier: Apache-2.0
 *
 * store: an open store directory: its identity and parameters, its storage, and a cache of open packs.
 * Safe from any thread after open. Opening costs the same for one step and for ten thousand. */
#ifndef CORE_STEP_STORE_H
#define CORE_STEP_STORE_H

#include "core/pack/pack.h"
#include "core/step/record.h"
#include "core/storage/storage.h"
#include "proto/message.h"

struct store {
	struct storage *storage;
	struct proto_store info;        /* id, seed, grid parameters */
	char path[4096];                /* absolute, for messages */
	struct store_pack_cache *packs; /* private */
	bool read_only;                 /* opened so */
};

/* Without STORE_OPEN_READ_ONLY a store of an older format is refused (-EROFS): it is read and never written. */
enum store_open_flag { STORE_OPEN_READ_ONLY = STORAGE_READ_ONLY, /* each as in storage.h */
	STORE_OPEN_NAMED_TEMPS = STORAGE_NAMED_TEMPS, STORE_OPEN_KEEP_CACHED = STORAGE_KEEP_CACHED };

#define STORE_FILE "vckpt.store" /* what makes a directory a store */
/* What to do where a store is too old for something. */
#define STORE_COPY_ADVICE "make a new store with vckpt init, and bring the steps there with vckpt copy"
#define STORE_RESERVE_BYTES (UINT64_C(1) << 20)
/* -EINVAL: it is no path, but a URL (SCHEME://..., or SCHEME:/... where SCHEME: is no directory). store_init and
 * store_open call this. */
int store_path_check(const char *path, struct base_error *err);
/* Makes the directory (its parent must exist) or takes an empty one. reserve_bytes 0: no reserve. -ENOTEMPTY,
 * -EEXIST, -EINVAL: as store_init_allowed. */
int store_init(const char *path, uint64_t reserve_bytes, struct base_error *err);
/* May a store be made there? -EEXIST: it is a store already; -EINVAL: it is in another store. store_init calls this. */
int store_init_allowed(const char *path, struct base_error *err);
/* -BASE_ENOSTORE, -BASE_EVERSION, -EROFS, ... */
int store_open(const char *path, unsigned flags, struct store **ret_s, struct base_error *err);
void store_close(struct store *s); /* NULL-safe */
/* The store that `path` is or is in, as a full path without links; NULL: none. `path`, and directories above it, need
 * not exist. The caller frees the result. */
char *store_around(const char *path);

/* Reads a record of the store and decodes its body into *ret by `decode`, a function of proto/message.h. Evaluates to 0
 * or an error; after -BASE_EVERSION `err` (may be NULL) says of `what` that a newer vckpt wrote it. */
#define store_record_load(s, name, kind, decode, ret, what, err) ({ \
	struct store_record load_record_ = {0}; \
	int load_rc_ = store_record_get((s)->storage, (name), (kind), (s)->info.id, &load_record_, NULL, NULL); \
	if (load_rc_ == 0) \
		load_rc_ = decode(load_record_.body, load_record_.len, (ret)); \
	if (load_rc_ == -BASE_EVERSION) \
		store_newer((err), (what), load_record_.body, load_record_.len); \
	store_record_release(&load_record_); \
	load_rc_; })

/* An open pack out of a cache, by name (store_packs.c: how many stay open, and how long). Put it back when done.
 * If its file vanished or shrank, every call fails with an error that names it. */
int store_pack_get(struct store *s, const char *pack, struct pack **ret_p, struct base_error *err);
void store_pack_put(struct store *s, struct pack *p);
/* pack_object_load of such a pack. */
int store_object_load(struct store *s, const char *pack, const struct pack_object_ref *ref, uint64_t max,
	void **ret_bytes, struct base_error *err);

/* release deletes the reserve file, so that abort, rm and gc have room; restore makes it again when there is room. Best
 * effort. */
void store_reserve_release(struct store *s);
void store_reserve_restore(struct store *s);

/* Did a write fail with r because the user may not write to the store, or because no one can? Then err names the
 * directory and its owner, and says what to do. */
bool store_denied(const struct store *s, int r, struct base_error *err);
/* The same for a listing that failed: err names the directory that the user may not read. */
bool store_denied_listing(const struct store *s, int r, struct base_error *err);
/* Did anything fail with r (-ENOTDIR) because something else is in the place of a directory? The two above call it. */
bool store_no_directory(const struct store *s, int r, struct base_error *err);

/* of this machine, as file names need it: [A-Za-z0-9_.=-], at most 64 bytes; static */
const char *store_hostname(void);

#endif
