/* SPDX-License-Identifier: Apache-2.0
 *
 * memfd: memory in which a file is assembled and which is then sealed against any change. Errors: a negative errno. */
#ifndef FS_MEMFD_H
#define FS_MEMFD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

int fs_memfd_new(uint64_t size); /* a descriptor */
/* No mapping of it may be left: -EBUSY. */
int fs_memfd_seal(int fd);

/* To write to where memory was taken for it, [from, taken): to write to what has none would end the process. Once it is
 * sealed, to be read only. bytes NULL: there is none. */
struct fs_memfd_map { uint8_t *bytes; void *area; size_t area_bytes; int fd; uint64_t size, from, taken; };
int fs_memfd_map(int fd, uint64_t size, bool writable, struct fs_memfd_map *ret_m);
/* Memory for bytes [at, end), and some more; huge: in huge pages where they can be had, which may take long. Those that
 * it has stay. Returns how many bytes it was taken for now. */
int64_t fs_memfd_take(struct fs_memfd_map *m, uint64_t at, uint64_t end, bool huge);
/* What was taken of [from, to) goes into huge pages, where they can be had. Readers go on. */
void fs_memfd_collapse(const struct fs_memfd_map *m, uint64_t from, uint64_t to);
void fs_memfd_unmap(struct fs_memfd_map *m); /* and if there is none */

#endif
