/* SPDX-License-Identifier: Apache-2.0
 *
 * storage_posix_pace: how many writes of a pack are made at once, as its first writes are measured.
 *
 * One stream of writes gets 2 to 3 GB/s from a parallel file system or an array of disks that can do ten times that; a
 * single disk, or a file system that takes a file's writes one after the other, is not quicker with several, and may
 * be slower. So a width is kept for some writes, and then doubled: if writes end a quarter more often, it is kept, and
 * doubled again; if not, the one before it is kept, and nothing more is tried.
 *
 * A write counts only if another one waits when it ends: else the disk waits for the save. The first ones of a width,
 * as many as there are at once, do not count: they began under the width before.
 *
 * The next pack begins with half of the width that a pack found best, and measures anew: the disk may be busier by
 * then, or less busy. */
#include "core/base/le.h"
#include "core/storage/storage_posix_internal.h"

#define PACE_WRITES 4u /* are measured, or twice the width */

void posix_pace_init(struct posix_pace *p, unsigned width)
{
	*p = (struct posix_pace){.width = base_max(base_min(width, POSIX_PACE_MAX), 1)};
}

void posix_pace_bound(struct posix_pace *p, unsigned width)
{
	p->width = width;
	p->settled = true;
}

bool posix_pace_note(struct posix_pace *p, bool more, uint64_t now_ns)
{
	unsigned counted = base_max(2 * p->width, PACE_WRITES);
	uint64_t each;

	if (p->settled)
		return false;
	p->writes = more ? p->writes + 1 : 0;
	if (p->writes == p->width)
		p->since_ns = now_ns;
	if (p->writes < p->width + counted)
		return false;
	p->writes = 0;
	each = (now_ns - p->since_ns) / counted;
	if (p->best && each > p->best_ns / 5 * 4) {
		p->width = p->best;
		p->settled = true;
		return false;
	}
	p->best = p->width;
	p->best_ns = each;
	p->settled = 2 * p->width > POSIX_PACE_MAX;
	p->width *= p->settled ? 1 : 2;
	return true;
}
