/* SPDX-License-Identifier: Apache-2.0
 *
 * trust: which records a save believes (docs/save.md). The maker of a store can give any bytes any digest, with all
 * checks right. So a record is believed only if it is in a part that this process wrote: all that such a part says
 * was computed from bytes, or compared with them. Any thread. */
#ifndef CORE_SAVE_WRITE_TRUST_H
#define CORE_SAVE_WRITE_TRUST_H

#include "core/base/digest.h"

/* A part, by the digest of its object. The last SAVE_TRUST_PARTS are remembered. */
#define SAVE_TRUST_PARTS 256u
void save_trust_add(const struct base_digest *part);
bool save_trust_has(const struct base_digest *part);

#endif
