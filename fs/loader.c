/* SPDX-License-Identifier: Apache-2.0
 *
 * The kernel reads in pieces of its own, up to AROUND_BYTES before and behind the byte that was touched, and several at
 * once, which arrive in any order. So only a distance of more than FAR_BYTES counts as a jump, and the tensor that was
 * touched may be any of those around its goal. */
#include "fs/loader.h"

#include "core/base/le.h"

#define AROUND_BYTES (UINT64_C(2) << 20)
#define FAR_BYTES (UINT64_C(8) << 20)

void fs_loader_opened(struct fs_loader *l, uint64_t served)
{
	if (served <= FAR_BYTES)
		*l = (struct fs_loader){.again = true, .found = l->found};
}

/* One of the tensors from `first` to `last` is touched. */
static bool touch(struct fs_loader *l, int64_t first, int64_t last)
{
	if (last < 0)
		return false;            /* the header */
	if (l->touched)
		return first > l->last || last < l->first;
	l->touched = true;
	l->first = first;
	l->last = last;
	return false;
}

static int64_t tensor_around(const struct view_file *f, uint64_t at)
{
	return view_file_tensor(f, base_min(at, view_file_size(f) - 1));
}

/* The read goes on where the last one ended: all of it was touched, except what the kernel reads ahead. */
static bool read_on(struct fs_loader *l, const struct view_file *f, uint64_t end)
{
	int64_t last;

	l->end = base_max(l->end, end);
	if (!l->again || l->end - l->begin <= AROUND_BYTES + FAR_BYTES)
		return false;
	last = tensor_around(f, l->end - FAR_BYTES);
	return touch(l, last, last);
}

bool fs_loader_read(struct fs_loader *l, const struct view_file *f, uint64_t offset, uint64_t len)
{
	bool begins = !l->end && !l->again && offset <= FAR_BYTES; /* a copy, or the header */

	if (l->found)
		return false;
	if (l->end && offset <= l->end + FAR_BYTES && offset + FAR_BYTES >= l->begin) {
		l->found = read_on(l, f, offset + len);
		return l->found;
	}
	l->begin = offset;
	l->end = offset + len;
	if (!begins)
		l->found = touch(l, tensor_around(f, offset), tensor_around(f, offset + AROUND_BYTES));
	return l->found;
}

/* A loader that has read what is before the tensor it is at goes on from there. One that has only touched tensors, as
 * load_file does with each of them before it gives one away, reads all of them later, from the first on. */
uint64_t fs_loader_from(const struct view_file *f, uint64_t offset, uint64_t served)
{
	uint64_t from = view_file_from(f, offset + AROUND_BYTES);

	return served >= from / 2 ? from : 0;
}
