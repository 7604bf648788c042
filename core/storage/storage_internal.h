/* SPDX-License-Identifier: Apache-2.0
 *
 * storage_internal: helpers of the rule of names, shared by the implementations of `storage`. Pure functions. */
#ifndef CORE_STORAGE_STORAGE_INTERNAL_H
#define CORE_STORAGE_STORAGE_INTERNAL_H

#include <stdbool.h>
#include <stddef.h>

bool store_name_part_valid(const char *part, size_t len); /* one part of a name, without `/` */
bool store_name_temporary(const char *name);              /* ends in ".tmp.<16 hex>": an unfinished file */

#endif
