/* SPDX-License-Identifier: Apache-2.0
 *
 * memory: device_free_memory of a system whose /proc and /sys lie below `root` ("": this one). Any thread. */
#ifndef CORE_DEVICE_MEMORY_INTERNAL_H
#define CORE_DEVICE_MEMORY_INTERNAL_H

#include <stdbool.h>
#include <stdint.h>

uint64_t device_free_memory_under(const char *root); /* 0: it does not say */

#endif
