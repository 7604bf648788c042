/* SPDX-License-Identifier: Apache-2.0
 *
 * incoming: which launches are at work in a store, by their heartbeats, and what attempts have left in incoming/, read
 * whole for the collector and for `vckpt ls --incoming` (docs/format/incoming.md). Each reading shows one moment. */
#ifndef CORE_COMMIT_INCOMING_INCOMING_H
#define CORE_COMMIT_INCOMING_INCOMING_H

#include "core/step/store.h"

/* Is a launch alive, as others see it? */
enum commit_liveness { COMMIT_DEAD, COMMIT_ALIVE, COMMIT_UNKNOWN /* another host: watch it for the time-out */ };
struct commit_launch_info {
	char launch[17];
	char host[PROTO_HOST_MAX];
	char run[PROTO_RUN_MAX + 1];
	enum commit_liveness state;
	char file[STORAGE_NAME_MAX];
	uint64_t number;
};
/* free() the array */
int commit_launches(struct store *s, struct commit_launch_info **ret_infos, size_t *ret_n, struct base_error *err);

/* An attempt that has a folder: a save under way, or what is left of one. */
struct commit_incoming {
	char run[PROTO_RUN_MAX + 1];
	char attempt[PROTO_ATTEMPT_MAX];
	bool begun;
	struct proto_begin begin;
	/* ranks, ascending; missing (of `begin.world`): only where the attempt has begun */
	uint32_t *announced, nannounced, *missing, nmissing;
	/* by the clock of the host that began it, since the epoch; 0: not known (an import's begin has no time) */
	int64_t since_ns;
	enum commit_liveness state;
};
/* Reads all of them; commit_incoming_free. */
int commit_incoming_read(struct store *s, struct commit_incoming **ret_all, size_t *ret_n, struct base_error *err);
void commit_incoming_free(struct commit_incoming *all, size_t n);

/* A listing, sorted by name. */
struct commit_file { char *name; uint64_t size, names, device, number; bool temporary, foreign; };
struct commit_files { struct commit_file *all; size_t n, size; };
/* adds to what is there */
int commit_files_list(struct store *s, const char *dir, struct commit_files *ret_f, struct base_error *err);
void commit_files_release(struct commit_files *f);
const struct commit_file *commit_files_find(const struct commit_files *f, const char *name);

/* One folder of incoming/, with everything that the collector wants to know. */
struct commit_folder {
	struct commit_incoming info;            /* state: of its launch's heartbeats; COMMIT_DEAD without any */
	char launch[17];
	bool heartbeat;                        /* its launch has a heartbeat file */
	bool damaged;                          /* begin or a base cannot be read */
	struct base_error newer;               /* ... because a newer vckpt wrote it */
	struct proto_base_record *bases; size_t nbases; /* of base.<n>; those of begin are in info.begin */
	struct commit_files files;
};
struct commit_folders { struct commit_folder *all; size_t n, size; };
int commit_folders_read(struct store *s, struct commit_folders *ret_f, struct base_error *err);
void commit_folders_release(struct commit_folders *f);

bool commit_attempt_name_valid(const char *name); /* "<16 hex>-<decimal>" */
/* Deletes the files of one folder, `begin` last, and the folder. Counts what it deleted. */
uint64_t commit_folder_delete(struct store *s, const char *run, const char *attempt, uint64_t *ret_files);
#endif
