/* SPDX-License-Identifier: Apache-2.0
 *
 * file_name: which file of a store has a name (docs/format/store.md, the table of names). Pure functions. */
#ifndef CORE_UPKEEP_FILE_NAME_H
#define CORE_UPKEEP_FILE_NAME_H

#include "core/commit/notes/stats.h"
#include "core/pack/pack.h"
#include "core/step/record.h"

/* An enum store_record_kind, or one of these. */
enum { FILE_FOREIGN = 0 /* no vckpt makes such a name */, FILE_PACK = 64, FILE_RESERVE, FILE_INDEX };
struct file_name {
	int kind;
	char run[PROTO_RUN_MAX + 1];           /* of files in runs/ and incoming/, measures */
	char attempt[PROTO_ATTEMPT_MAX];       /* its folder in incoming/, also of a foreign file there; packs */
	uint64_t number;                       /* entry, mark, heartbeat */
	bool collected;                        /* ENTRY: collected.<number> */
	struct base_digest digest;             /* manifest */
	char pack[PACK_NAME_MAX], class[72];   /* pack (`pack` also where its file has another place), note */
	struct commit_stats_name stats;        /* measures */
	char launch[17], host[65];             /* heartbeat */
};
/* Returns the kind. */
int file_name_parse(const char *name, struct file_name *ret_n);

#endif
