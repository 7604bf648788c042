/* SPDX-License-Identifier: Apache-2.0
 *
 * past: memcpy past the caches, for bytes that will not be read soon. It does not read the destination first and evicts
 * nothing. Where the processor has no such stores, it is memcpy. */
#ifndef CORE_BASE_PAST_H
#define CORE_BASE_PAST_H

#include <stddef.h>

void base_copy_past(void *to, const void *from, size_t len);
/* Another thread may read the copies after the copying thread has called it. */
void base_copy_past_end(void);

#endif
