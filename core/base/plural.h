/* SPDX-License-Identifier: Apache-2.0
 *
 * plural: the word that goes with a count. */
#ifndef CORE_BASE_PLURAL_H
#define CORE_BASE_PLURAL_H

#include <stdint.h>

static inline const char *base_plural(uint64_t n, const char *one, const char *many) { return n == 1 ? one : many; }

#endif
