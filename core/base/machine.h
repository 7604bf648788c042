/* SPDX-License-Identifier: Apache-2.0
 *
 * machine: how much memory and how many processors this process may use, by /proc and the control groups, which are
 * looked for below `root` ("": this machine). Any thread; reads a few small files at each call. */
#ifndef CORE_BASE_MACHINE_H
#define CORE_BASE_MACHINE_H

#include <stdint.h>

uint64_t base_machine_memory(const char *root); /* bytes that could be allocated now; 0: it does not say */
uint64_t base_machine_memory_limit(const char *root); /* bytes that the groups allow in all; UINT64_MAX: no limit */
uint64_t base_machine_cpus(const char *root);   /* processors that the groups allow, rounded up; UINT64_MAX: no limit */
/* Ranks of this node, of a job of `world`: what the launcher says in the environment (LOCAL_WORLD_SIZE and its like).
 * 0: it does not say. */
unsigned base_machine_node_ranks(uint32_t world);

#endif
