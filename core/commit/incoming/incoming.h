/* SPDX-License-Identifier: Apache-2.0
 *
 * incoming: which launches are at work in a store, by their heartbeats, and what attempts have left in incoming/, read
 * whole for the collector and for `vckpt ls --incoming` (docs/format/incoming.md). Each reading shows one moment. */
#ifndef CORE_COMMIT_INCOMING_INCOMING_H
#define CORE_COMMIT_INCOMING_INCOMING_H

#include "core/step/store.h"

/* Is a launch alive, as others see it? */
enum store_liveness { STORE_DEAD, STORE_ALIVE, STORE_UNKNOWN /* another host: watch it for the time-out */ };
struct store_launch_info {
	char launch[17];
	char host[PROTO_HOST_MAX];
	char run[PROTO_RUN_MAX + 1];
	enum store_liveness state;
	char file[STORAGE_NAME_MAX];
	uint64_t number;
};
/* free() the array */
int store_launches(struct store *s, struct store_launch_info **ret_infos, size_t *ret_n, struct base_error *err);

/* An attempt that has a folder: a save under way, or what is left of one. */
struct store_incoming {
	char run[PROTO_RUN_MAX + 1];
	char attempt[PROTO_ATTEMPT_MAX];
	bool begun;
	struct proto_begin begin;
	/* ranks, ascending; missing (of `begin.world`): only where the attempt has begun */
	uint32_t *announced, nannounced, *missing, nmissing;
	/* by the clock of the host that began it, since the epoch; 0: not known (an import's begin has no time) */
	int64_t since_ns;
	enum store_liveness state;
};
/* Reads all of them; store_incoming_free. */
int store_incoming_read(struct store *s, struct store_incoming **ret_all, size_t *ret_n, struct base_error *err);
void store_incoming_free(struct store_incoming *all, size_t n);

/* A listing, sorted by name. */
struct store_file { char *name; uint64_t size, names, device, number; bool temporary, foreign; };
struct store_files { struct store_file *all; size_t n, size; };
/* adds to what is there */
int store_files_list(struct store *s, const char *dir, struct store_files *ret_f, struct base_error *err);
void store_files_release(struct store_files *f);
const struct store_file *store_files_find(const struct store_files *f, const char *name);

/* One folder of incoming/, with everything that the collector wants to know. */
struct store_folder {
	struct store_incoming info;            /* state: of its launch's heartbeats; STORE_DEAD without any */
	char launch[17];
	bool heartbeat;                        /* its launch has a heartbeat file */
	bool damaged;                          /* begin or a base cannot be read */
	struct base_error newer;               /* ... because a newer vckpt wrote it */
	struct proto_base_record *bases; size_t nbases; /* of base.<n>; those of begin are in info.begin */
	struct store_files files;
};
struct store_folders { struct store_folder *all; size_t n, size; };
int store_folders_read(struct store *s, struct store_folders *ret_f, struct base_error *err);
void store_folders_release(struct store_folders *f);

bool store_attempt_name_valid(const char *name); /* "<16 hex>-<decimal>" */
/* Deletes the files of one folder, `begin` last, and the folder. Counts what it deleted. */
uint64_t store_folder_delete(struct store *s, const char *run, const char *attempt, uint64_t *ret_files);
#endif
