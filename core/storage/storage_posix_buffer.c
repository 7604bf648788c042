/* SPDX-License-Identifier: Apache-2.0
 *
 * storage_posix_buffer: the bytes of one write of a pack: memory of its own, and parts of memory that was lent to the
 * writer. A lent part leaves its place in the buffer's own memory free (untouched pages cost nothing), so it can be
 * copied there at any time, and nothing else has to move. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>

#include "core/base/le.h"
#include "core/storage/storage_posix_internal.h"

struct posix_buffer *posix_buffer_new(void)
{
	struct posix_buffer *b = malloc(sizeof *b);

	if (!b)
		return NULL;
	b->nparts = 0;
	b->bytes = aligned_alloc(POSIX_BUFFER_ALIGN, POSIX_BUFFER_BYTES);
	if (b->bytes)
		return b;
	free(b);
	return NULL;
}

void posix_buffer_return(struct posix_buffer *b)
{
	for (; b->nparts; b->nparts--) {
		struct storage_lent *lent = b->parts[b->nparts - 1].lent;

		if (storage_lent_drop(lent))
			lent->back(lent);
	}
}

void posix_buffer_free(struct posix_buffer *b)
{
	if (!b)
		return;
	posix_buffer_return(b);
	free(b->bytes);
	free(b);
}

void posix_buffer_keep(struct posix_buffer *b)
{
	for (unsigned i = 0; i < b->nparts; i++)
		memcpy(b->bytes + b->parts[i].at, b->parts[i].bytes, b->parts[i].len);
	posix_buffer_return(b);
}

bool posix_buffer_lend(struct posix_buffer *b, size_t at, const uint8_t *bytes, size_t len, struct storage_lent *lent)
{
	struct posix_part *last = b->nparts ? &b->parts[b->nparts - 1] : NULL;

	if (last && last->lent == lent && last->at + last->len == at && last->bytes + last->len == bytes) {
		last->len += len;
		return true;
	}
	if (b->nparts == POSIX_BUFFER_PARTS)
		return false;
	lent->users++;
	b->parts[b->nparts++] = (struct posix_part){bytes, at, len, lent};
	return true;
}

/* Where bytes [from, len) of the buffer are. */
static int buffer_find(const struct posix_buffer *b, size_t from, size_t len, struct iovec *iov)
{
	int n = 0;

	for (unsigned i = 0; i < b->nparts; i++) {
		const struct posix_part *p = &b->parts[i];
		size_t skip = from > p->at ? from - p->at : 0;

		if (skip >= p->len)
			continue;
		if (from < p->at)
			iov[n++] = (struct iovec){b->bytes + from, p->at - from};
		iov[n++] = (struct iovec){(void *)(p->bytes + skip), p->len - skip};
		from = p->at + p->len;
	}
	if (from < len)
		iov[n++] = (struct iovec){b->bytes + from, len - from};
	return n;
}

int posix_buffer_write(const struct posix_buffer *b, int fd, uint64_t at, size_t len)
{
	struct iovec iov[2 * POSIX_BUFFER_PARTS + 1];

	for (size_t written = 0; written < len;) {
		ssize_t n = pwritev(fd, iov, buffer_find(b, written, len, iov), (off_t)(at + written));

		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			return n < 0 ? -errno : -EIO;
		written += (size_t)n;
	}
	return 0;
}
