/* SPDX-License-Identifier: Apache-2.0
 *
 * thin_internal: a step written anew, as thin.c and repack.c do it. */
#ifndef CORE_UPKEEP_THIN_INTERNAL_H
#define CORE_UPKEEP_THIN_INTERNAL_H

#include "core/commit/attempt/attempt.h"
#include "core/upkeep/thin.h"
#include "core/upkeep/verify_internal.h"

#define THIN_META 0u /* number of the new pack in the table of each new part */
#define THIN_NONE UINT32_MAX

struct thin_layout {
	struct store_layout *from, *to;
	uint32_t *number;               /* by tensor of `from`: in `to`; THIN_NONE: dropped */
	struct base_buf object;         /* of `to` */
	struct pack_object_ref ref;
	bool stored;
};

struct thin_rank {
	struct proto_announcement said;
	struct proto_pack_use *packs;   /* the part's table */
	struct proto_view_header *headers;
	struct pack_object_ref part, *header_refs;
};

struct thin_place { const struct pack_object_ref *ref; const char *pack; uint64_t size; };

struct thin {
	struct store *store;
	const char *run, *component;    /* NULL: no component is dropped */
	struct proto_manifest m;        /* of the step as it is */
	struct thin_layout *layouts;
	struct thin_rank *ranks;
	uint64_t bytes, dropped;        /* raw; that stay, that go */
	bool only;                      /* it has no other component */
	struct commit_list *list;       /* lent to the attempt (attempt.h); NULL: it opens one */
	struct commit_attempt *attempt;
	struct pack_writer *meta;
	char meta_name[PACK_NAME_MAX];
	uint64_t new_bytes;             /* of packs that were written besides `meta` */
	bool writes;                    /* the new parts; else it only looks */
	/* Where an object of this pack is from now on. 1: at *ret_p; 0: it stays. NULL: all stay. */
	int (*place)(struct thin *t, const char *pack, const struct pack_object_ref *ref, struct thin_place *ret_p);
	/* After the first look, before the parts are written. */
	int (*prepare)(struct thin *t);
	/* Before both: writes all rows as rank 0, and announces its part. The other ranks' parts have none then. */
	int (*whole)(struct thin *t);
	void *arg;                      /* of these three */
	uint32_t nplaces;               /* at most so many packs are in places */
	/* the rank under way */
	struct thin_rank *rank;
	struct thin_layout *layout;
	const struct store_opened_part *part;
	uint32_t *renumbered;           /* by pack of `part`: in the new table; 0: not used yet */
	const char *last; uint32_t last_number; /* the last place's pack, and its number in the new table */
	uint32_t tensor;                /* of the row under way; THIN_NONE: blobs */
	struct verify_set seen;         /* objects that were counted as live */
	struct store_part_builder *builder;
	struct store_piece *pieces; size_t pieces_room;
	uint64_t rank_bytes;
	struct base_error *err;
};

/* Reads the manifest and the layouts. 1: it lacks the component. -EINVAL: it has no other. */
int thin_open(struct thin *t, const struct commit_list_step *step);
/* Goes through all parts; writes them anew where t->writes. */
int thin_ranks(struct thin *t);
/* Writes the step anew. Errors as upkeep_thin. */
int thin_attempt(struct thin *t, const struct commit_list_step *step, uint64_t *ret_entry);
void thin_release(struct thin *t);
/* The first rank whose part is written from the one that it has. */
static inline uint32_t thin_first(const struct thin *t) { return t->whole != NULL; }

#endif
