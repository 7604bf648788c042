/* SPDX-License-Identifier: Apache-2.0
 *
 * seal: the guard against a damaged file. LMDB trusts every page: damage makes it end the process or loop forever. So a
 * finished index ends with a seal over all of its bytes, and no file is given to LMDB before its seal was checked. A
 * sealed file never changes: a writer works on a copy (index_copy checks the seal on the way), seals it and renames it
 * over the old one. Readers go on with the file that they have. A writer that dies leaves the old index as it was, and
 * an unsealed file that the next writer removes.
 *
 *   index    LMDB's bytes | u64 magic | u64 number of LMDB's bytes | u64 check of both and of LMDB's bytes
 *
 * The check is a chain of XXH3-64 over steps of SEAL_STEP_BYTES, each seeded with the one before, and the first with
 * the identity of the file: inode, owner and birth time. LMDB's pages can be forged so that LMDB writes where it should
 * not, and anyone can compute an XXH3. So an index that comes with a store which was downloaded file by file is not
 * used: its maker could not know the identity of the file here. But the maker of a file-system image can know it, and
 * nearly so without birth times. Files that belong to another user are not trusted either.
 *
 * The check reads all bytes with read(2): a bad sector, or a file that is truncated meanwhile, is an error here. LMDB
 * maps the same file afterwards: a sector that goes bad then, and is no longer in memory, is still a SIGBUS. */
#include "index/index_internal.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#define SEAL_BYTES 24u
#define SEAL_STEP_BYTES (1u << 20)
#define SEAL_MAGIC UINT64_C(0x3158444954504b56) /* "VKPTIDX1" */

static int read_at(int fd, uint64_t offset, uint8_t *out, size_t len)
{
	for (size_t done = 0; done < len;) {
		ssize_t n = pread(fd, out + done, len - done, (off_t)(offset + done));
		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			return n < 0 ? -errno : -BASE_EDAMAGED;
		done += (size_t)n;
	}
	return 0;
}

static int write_at(int fd, uint64_t offset, const uint8_t *bytes, size_t len)
{
	for (size_t done = 0; done < len;) {
		ssize_t n = pwrite(fd, bytes + done, len - done, (off_t)(offset + done));
		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			return n < 0 ? -errno : -EIO;
		done += (size_t)n;
	}
	return 0;
}

int index_identity(int fd, uint64_t *ret_number)
{
	struct statx x;
	uint64_t parts[4];
	bool made;

	if (statx(fd, "", AT_EMPTY_PATH, STATX_INO | STATX_UID | STATX_BTIME, &x) < 0)
		return -errno;
	if (x.stx_uid != geteuid())
		return -EPERM;
	made = x.stx_mask & STATX_BTIME;
	parts[0] = x.stx_ino;
	parts[1] = x.stx_uid;
	parts[2] = made ? (uint64_t)x.stx_btime.tv_sec : 0;
	parts[3] = made ? x.stx_btime.tv_nsec : 0;
	*ret_number = base_xxh64_of(SEAL_MAGIC, parts, sizeof parts);
	return 0;
}

/* The seal of the first `len` bytes, which are copied to `to` unless that is -1. */
static int seal_make(int fd, uint64_t len, int to, uint8_t ret_seal[SEAL_BYTES])
{
	base_cleanup_free uint8_t *step = malloc(SEAL_STEP_BYTES);
	uint64_t check;
	int known = step ? index_identity(fd, &check) : -ENOMEM;
	if (known < 0)
		return known;
	for (uint64_t at = 0; at < len; at += SEAL_STEP_BYTES) {
		size_t n = base_min(len - at, SEAL_STEP_BYTES);
		int r = read_at(fd, at, step, n);
		if (r == 0 && to >= 0)
			r = write_at(to, at, step, n);
		if (r < 0)
			return r;
		check = base_xxh64_of(check, step, n);
	}
	base_put64(ret_seal, SEAL_MAGIC);
	base_put64(ret_seal + 8, len);
	base_put64(ret_seal + 16, base_xxh64_of(check, ret_seal, 16));
	return 0;
}

int index_copy(int fd, int to)
{
	uint8_t stored[SEAL_BYTES], made[SEAL_BYTES];
	struct stat st;
	uint64_t len;
	int r;

	if (fstat(fd, &st) < 0)
		return -errno;
	if (!S_ISREG(st.st_mode) || st.st_size < (off_t)SEAL_BYTES)
		return -BASE_EDAMAGED;
	len = (uint64_t)st.st_size - SEAL_BYTES;
	r = read_at(fd, len, stored, sizeof stored);
	if (r == 0 && (base_get64(stored) != SEAL_MAGIC || base_get64(stored + 8) != len))
		r = -BASE_EDAMAGED; /* often without reading all of it */
	if (r == 0)
		r = seal_make(fd, len, to, made);
	if (r == 0 && memcmp(stored, made, sizeof made) != 0)
		r = -BASE_EDAMAGED;
	return r == -EIO || r == -EPERM ? -BASE_EDAMAGED : r;
}

int index_seal(int fd)
{
	uint8_t seal[SEAL_BYTES];
	struct stat st;
	int r;

	if (fstat(fd, &st) < 0)
		return -errno;
	r = seal_make(fd, (uint64_t)st.st_size, -1, seal);
	if (r == 0)
		r = write_at(fd, (uint64_t)st.st_size, seal, sizeof seal);
	if (r == 0 && fsync(fd) < 0)
		r = -errno;
	return r;
}
