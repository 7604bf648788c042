/* SPDX-License-Identifier: Apache-2.0
 *
 * archive: the zip archives that torch.save writes; a .distcp file has them one after another. All members are stored
 * as they are; compressed and encrypted ones are refused. Sums over members (CRC-32) are not compared: torch does not
 * compare them either, and has an option to write none. An archive belongs to one thread. */
#ifndef CORE_FOREIGN_ARCHIVE_H
#define CORE_FOREIGN_ARCHIVE_H

#include <stddef.h>
#include <stdint.h>

#include "core/base/error.h"

/* Some bytes of a file. read: exactly len bytes at an offset of the file; 0 or a negative errno with a sentence. */
struct foreign_range {
	int (*read)(void *arg, uint64_t offset, void *bytes, size_t len, struct base_error *err);
	void *arg;
	uint64_t begin, bytes;
};

struct foreign_archive;
/* Looks for the list of members at the range's end. -BASE_EFORMAT: it is no such archive; -ENOMEM; read's errors. */
int foreign_archive_open(const struct foreign_range *range, struct foreign_archive **ret_a, struct base_error *err);
void foreign_archive_close(struct foreign_archive *a); /* NULL-safe */
/* Where the bytes of a member are, in the file; name without the folder that all of them are in ("data.pkl"). -ENOENT:
 * it is not there. */
int foreign_archive_find(struct foreign_archive *a, const char *name, uint64_t *ret_offset, uint64_t *ret_bytes,
	struct base_error *err);
/* The same, and its bytes, which the caller frees. -BASE_ELIMIT: they are more than `most`. */
int foreign_archive_read(struct foreign_archive *a, const char *name, uint64_t most, void **ret_bytes, size_t *ret_len,
	struct base_error *err);

#endif
