/* SPDX-License-Identifier: Apache-2.0
 *
 * entry: an entry of a run's list (docs/format/list.md). Part of proto/message.h, whose rules hold here too; include
 * that one. */
#ifndef PROTO_ENTRY_H
#define PROTO_ENTRY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/base/buf.h"
#include "core/base/digest.h"

#define PROTO_NONCE_BYTES 16
#define PROTO_ACCEPTS_MAX (UINT32_C(1) << 16) /* numbers in one accept entry */

#define PROTO_TAGS_MAX 64u                    /* of a step */
#define PROTO_RULES_MAX 64u                   /* of a policy */
#define PROTO_RULE_MAX 1024u                  /* bytes of one */

struct proto_attribute;
typedef char proto_launch_id[17];             /* 16 hexadecimal digits, and a NUL */
enum proto_entry_kind {
	PROTO_ENTRY_LAUNCH = 1, PROTO_ENTRY_COMMIT, PROTO_ENTRY_ABORT, PROTO_ENTRY_REMOVE, PROTO_ENTRY_SNAPSHOT,
	PROTO_ENTRY_ACCEPT,
	PROTO_ENTRY_COLLECTED, /* in place of an entry below `number`, the head: a snapshot with the digest `before` */
	PROTO_ENTRY_FACTS,
	/* a higher one: of a later version; it decides nothing */
};
#define PROTO_ENTRY_KNOWN PROTO_ENTRY_FACTS    /* the highest kind */

/* All facts of a step after its commit: with the word "list-4". Texts may be NULL: as empty. */
struct proto_step_facts {
	uint64_t entry;                 /* of its commit; PROTO_NONE in a commit */
	bool pinned; const char *reason; int64_t pinned_ns; const char *pinned_by; /* the last three: if pinned */
	const char *const *tags; size_t ntags;                        /* ascending, unique */
	const struct proto_attribute *attributes; size_t nattributes; /* set later */
};
bool proto_facts_empty(const struct proto_step_facts *f);
bool proto_facts_equal(const struct proto_step_facts *a, const struct proto_step_facts *b);
/* nrules 0: the run has no policy (any more) */
struct proto_policy { const char *const *rules; size_t nrules; int64_t time_ns; const char *host; };
struct proto_facts {
	bool there;                     /* the entry has them; it has the word then */
	const struct proto_step_facts *steps; size_t nsteps; /* by ascending entry, unique */
	bool policed; struct proto_policy policy;
};

struct proto_commit {
	uint64_t step;                  /* 0 .. 2^63-1 */
	const char *attempt;
	int64_t time_ns;                /* since the epoch, the committer's clock */
	uint64_t replaces;              /* number of the commit entry that this one replaces, or PROTO_NONE */
	struct base_digest manifest;    /* SHA-256 tree digest of the manifest's body: runs/<run>/manifests/<hex> */
	uint64_t tensors, bytes;        /* logical tensors and their raw bytes, blobs' bytes included: for listings */
	uint64_t new_bytes;             /* stored bytes that this attempt's own packs added */
	const struct proto_attribute *attributes; size_t nattributes;
	/* fields of a later version, unchanged; a snapshot that lists the commit writes them again */
	const uint8_t *extra; size_t extra_len;
	const struct proto_step_facts *facts; /* NULL: none; those of a visible step: commit_list_facts */
};
struct proto_entry {
	enum proto_entry_kind kind;
	uint32_t version;                        /* 0 to encode: PROTO_VERSION */
	int64_t time_ns;                         /* of the writer's clock; never used in decisions */
	const char *host;                        /* of the writer */
	/* Its place; since version 2. before: zeros where there is no entry before that can be read. */
	const char *run; uint64_t number; struct base_digest before;
	struct base_digest self;                 /* SHA-256 of the body that was decoded: the next entry's `before` */
	struct proto_commit commit;              /* COMMIT */
	const char *launch; uint64_t newest_step; /* LAUNCH; newest_step PROTO_NONE: none */
	uint8_t nonce[PROTO_NONCE_BYTES];        /* LAUNCH; zeros: none */
	/* Snapshots and launch entries go on from earlier ones; those of a store without that word are not so. */
	bool list_2;
	uint64_t from;                           /* SNAPSHOT: a number, 0: none; LAUNCH: PROTO_NONE: none */
	uint64_t nth;                            /* LAUNCH: 1 for the first of the run */
	const proto_launch_id *ids; size_t nids; /* LAUNCH: rows of 8 bytes on disk */
	const char *attempt, *reason; uint32_t rank; /* ABORT; reason: REMOVE, too */
	uint64_t removes;                        /* REMOVE: number of the commit entry */
	/* SNAPSHOT: by ascending entry; a packed table on disk */
	struct proto_live { uint64_t entry; struct proto_commit commit; } *live; size_t nlive;
	struct base_digest from_digest;          /* SNAPSHOT: `self` of entry `from`; zeros: none */
	const uint64_t *gone; size_t ngone;      /* SNAPSHOT: ascending, below `from` */
	uint64_t older, newest_launch;           /* SNAPSHOT: a step, an entry; PROTO_NONE: none */
	const uint64_t *accepts; size_t naccepts; /* ACCEPT: numbers of entries, ascending, below its own */
	struct proto_facts facts;                /* FACTS, SNAPSHOT */
	void *arena;
};
int proto_entry_encode(const struct proto_entry *m, struct base_buf *b);
int proto_entry_decode(const void *body, size_t len, struct proto_entry *ret_m);
void proto_entry_release(struct proto_entry *m);
/* Has it facts, and so the word "list-4"? */
static inline bool proto_entry_list_4(const struct proto_entry *m) { return m->facts.there || m->commit.facts; }

#endif
