/* SPDX-License-Identifier: Apache-2.0
 *
 * mend_pack: what the files of mend that know packs share.
 *
 *   mend_pack.c    which objects a damaged pack has to hold, which of them are bad, and what can be done
 *   mend_source.c  other places that hold the same objects
 *   mend_image.c   the pack written anew, whole, in the place of the old one */
#ifndef CORE_UPKEEP_MEND_PACK_H
#define CORE_UPKEEP_MEND_PACK_H

#include "core/pack/pack_format.h"
#include "core/upkeep/mend_internal.h"

struct mend_object {
	struct pack_object_ref ref;
	bool bad;                       /* its bytes or checks are damaged in this pack */
	struct store *from;             /* of a bad one: a store that holds it; NULL: none does */
	char pack[PACK_NAME_MAX];       /* in that store; empty: in this pack itself, where only the checks are bad */
	struct pack_object_ref there;
	struct base_buf checks;         /* made while its bytes are written */
};
struct mend_pack {
	char name[PACK_NAME_MAX], path[STORAGE_NAME_MAX];
	uint64_t size;                  /* what it should be; 0: not known */
	bool complete;                  /* all objects are known: footer and padding follow from them */
	bool footer_good;
	struct mend_object *objects; size_t n; /* by offset */
};
void mend_pack_free(struct mend_pack *p); /* NULL-safe */

/* Opens a pack as one of that size, without looking at its head. storage_name: of its file. */
int mend_pack_open(struct store *s, const char *name, const char *storage_name, uint64_t size,
	struct pack **ret_p);
/* Checks every block, and the digest. 1: right; 0: damaged; -ENOMEM. */
int mend_object_good(struct pack *p, const struct pack_object_ref *ref);

/* Are these bytes among the object's or its checks? */
bool mend_object_hit(const struct pack_object_ref *ref, uint64_t offset, uint64_t len);

/* Looks for the bad objects of all these packs, in this store and in `from`. */
int mend_sources_find(struct mend *m, struct mend_pack *const *packs, size_t n);

int mend_image_write(struct mend *m, struct mend_pack *p);

#endif
