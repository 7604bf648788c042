/* SPDX-License-Identifier: Apache-2.0
 *
 * incoming: the records of attempts that are under way: begin, bases, heartbeats; the collector's marks, and notes of
 * damage. Part of proto/message.h, whose rules hold here too; include that one. */
#ifndef PROTO_INCOMING_H
#define PROTO_INCOMING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/base/buf.h"
#include "core/base/digest.h"

/* What ranks that declare anything in one group hold alike. Of each value the first 16 bytes of its SHA-256, by the
 * order of the names, which are sorted and unique; nnames 0: left out. */
#define PROTO_COMMONS_MAX 1024u
#define PROTO_COMMON_GROUP_MAX 255u
#define PROTO_COMMON_ROW_BYTES 16u
struct proto_common {
	const char *group; struct base_digest digest;
	const char *const *names; const uint8_t *digests; uint32_t nnames;
};

struct proto_base { const char *run; uint64_t entry; struct base_digest manifest; };
struct proto_begin {
	const char *run, *attempt; uint64_t step; uint32_t world;
	bool alone;                     /* a save by one writer that is no job's (an import): no launch aborts it */
	uint64_t position;              /* entries of the list that were read; a job's: with the word "list-3" */
	struct base_digest mesh;        /* digest of the world's mesh; zeros for none */
	const struct proto_base *bases; uint32_t nbases;
	/* a job's; an import leaves them out */
	bool replace; uint64_t replaces; /* the entry that is replaced; PROTO_NONE: none, as always without `replace` */
	uint32_t rank; const char *host; int64_t time_ns; /* the writer's, and when; host may be NULL to encode */
	const struct proto_common *commons; uint32_t ncommons; /* by group, unique; the writer's */
	void *arena;
};
int proto_begin_encode(const struct proto_begin *m, struct base_buf *b);
int proto_begin_decode(const void *body, size_t len, struct proto_begin *ret_m);
void proto_begin_release(struct proto_begin *m);

struct proto_base_record { struct proto_base base; void *arena; };
int proto_base_encode(const struct proto_base_record *m, struct base_buf *b);
int proto_base_decode(const void *body, size_t len, struct proto_base_record *ret_m);
void proto_base_release(struct proto_base_record *m);

/* start_time: field 22 of /proc/PID/stat, clock ticks since boot */
struct proto_alive { uint32_t rank; uint64_t pid, start_time; };
struct proto_heartbeat {
	const char *launch, *host, *run, *boot_id;
	uint64_t number; int64_t time_ns;
	const struct proto_alive *ranks; uint32_t nranks;
	uint8_t nonce[16];              /* of the launch entry: rank 0 of a job shows it; zeros: none */
	uint32_t period_ms;             /* the next number comes within it; 0: its writer knows no periods */
	void *arena;
};
int proto_heartbeat_encode(const struct proto_heartbeat *m, struct base_buf *b);
int proto_heartbeat_decode(const void *body, size_t len, struct proto_heartbeat *ret_m);
void proto_heartbeat_release(struct proto_heartbeat *m);

struct proto_trash {
	const char *name;               /* of the file that is marked */
	int64_t time_ns;                /* the marker's clock: it only ever delays a deletion */
	const char *const *heartbeats; uint32_t nheartbeats; /* names of the heartbeat files seen */
	void *arena;
};
int proto_trash_encode(const struct proto_trash *m, struct base_buf *b);
int proto_trash_decode(const void *body, size_t len, struct proto_trash *ret_m);
void proto_trash_release(struct proto_trash *m);

/* Bytes of a pack that verify found damaged. */
struct proto_range { uint64_t offset, len; };
#define PROTO_RANGES_MAX (UINT32_C(1) << 16)
struct proto_damage {
	const char *pack;
	const struct proto_range *ranges; uint32_t nranges; /* ascending, apart, at least one; {0, 0} alone: all */
	void *arena;
};
int proto_damage_encode(const struct proto_damage *m, struct base_buf *b);
int proto_damage_decode(const void *body, size_t len, struct proto_damage *ret_m);
void proto_damage_release(struct proto_damage *m);

#endif
