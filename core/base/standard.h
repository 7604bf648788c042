/* SPDX-License-Identifier: Apache-2.0
 *
 * standard: descriptors of a program. Before it starts threads or opens anything. */
#ifndef CORE_BASE_STANDARD_H
#define CORE_BASE_STANDARD_H

/* Opens /dev/null as each of 0, 1 and 2 that the caller left closed, so that no file of ours gets one of these numbers
 * and has messages written into it. What was closed stays unusable: to read from 0 or to write to 1 or 2 gives EBADF,
 * so that lost output is a failure as before. */
void base_standard_open(void);

/* As many descriptors as the hard limit allows: a step of many writers has many packs, and a store's own program may
 * have them open. A library leaves the limit as its program has it. */
void base_descriptors_allow(void);

#endif
