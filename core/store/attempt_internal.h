/* SPDX-License-Identifier: Apache-2.0
 *
 * attempt_internal: what attempt.c, attempt_incoming.c and the collector share: listings held in memory, and the
 * folders of incoming/ read whole. */
#ifndef CORE_STORE_ATTEMPT_INTERNAL_H
#define CORE_STORE_ATTEMPT_INTERNAL_H

#include "core/store/attempt.h"
#include "core/store/list_internal.h"

/* A listing, sorted by name. */
struct store_file { char *name; uint64_t size; bool temporary, foreign; };
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
	struct proto_base_record *bases; size_t nbases; /* of base.<n>; those of begin stand in info.begin */
	struct store_files files;
};
struct store_folders { struct store_folder *all; size_t n, size; };
int store_folders_read(struct store *s, struct store_folders *ret_f, struct base_error *err);
void store_folders_release(struct store_folders *f);

bool store_attempt_name_valid(const char *name); /* "<16 hex>-<decimal>" */
/* Deletes the files of one folder, `begin` last, and the folder. Counts what it deleted. */
uint64_t store_folder_delete(struct store *s, const char *run, const char *attempt, uint64_t *ret_files);
/* Appends `abort` after everything that was read of the list says "undecided". 0: aborted, now or before. -EALREADY:
 * committed. */
int store_attempt_abort_put(struct store_list *l, const char *attempt, const char *reason, struct base_error *err);

#endif
