/* SPDX-License-Identifier: Apache-2.0
 *
 * store_internal: what the files of the open store share. */
#ifndef CORE_STEP_STORE_INTERNAL_H
#define CORE_STEP_STORE_INTERNAL_H

#include "core/step/store.h"

/* ---- store_packs.c ---- */
struct store_pack_cache *store_pack_cache_new(void); /* NULL: no memory */
void store_pack_cache_free(struct store_pack_cache *c); /* every pack was put back; NULL-safe */
/* Closes all packs that are not in use: what struct storage calls when the process is out of descriptors. */
void store_pack_cache_relieve(void *c);

#endif
