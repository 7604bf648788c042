/* SPDX-License-Identifier: Apache-2.0 */
#include "core/save/write/space.h"

#include <stdio.h>
#include <string.h>

#include "core/base/le.h"
#include "core/base/log.h"
#include "core/storage/mount.h"

#define FILE_SYSTEM "the file system mounted on"

#define SPACE_TEXT(bytes) space_text(bytes, (char[32]){0})
static const char *space_text(uint64_t bytes, char text[static 32])
{
	if (bytes < UINT64_C(10) << 20)
		snprintf(text, 32, "%llu KiB", (unsigned long long)(bytes >> 10) + (bytes % 1024 != 0));
	else
		snprintf(text, 32, "%llu MiB", (unsigned long long)(bytes >> 20));
	return text;
}

/* false: the medium does not say. */
static bool space_free(struct store *s, uint64_t *ret_bytes)
{
	struct storage_stat st;

	if (!s->storage->ops->stat || s->storage->ops->stat(s->storage, &st) < 0 || st.blocks == 0)
		return false;
	if (base_mul_overflows(st.blocks_available, st.block_bytes, ret_bytes))
		*ret_bytes = UINT64_MAX;
	return true;
}

static const char *space_mount(const struct store *s, char mount[static 4096])
{
	return storage_posix_mount(s->path, mount, 4096) < 0 ? s->path : mount;
}

int save_space_full(struct store *s, int r, uint64_t needed, struct base_error *err)
{
	char mount[4096];
	uint64_t bytes;

	if (err && err->code && strstr(err->text, FILE_SYSTEM))
		return r;
	if (!space_free(s, &bytes))
		return base_error_set(err, r, "%s is full: nothing of this save is kept", s->path);
	return base_error_set(err, r, "%s is full: nothing of this save is kept; %s %s has %s free, and the save "
		"needed %s%s", s->path, FILE_SYSTEM, space_mount(s, mount), SPACE_TEXT(bytes),
		needed > SAVE_SPACE_LEAST ? "up to " : "at least ", SPACE_TEXT(base_max(needed, SAVE_SPACE_LEAST)));
}

int save_space_check(struct store *s, struct save_space *sp, const char *run, uint64_t expect, struct base_error *err)
{
	char mount[4096];
	uint64_t bytes;

	if (!space_free(s, &bytes))
		return 0;
	if (bytes < SAVE_SPACE_LEAST)
		return save_space_full(s, -ENOSPC, 0, err);
	if (bytes >= expect)
		sp->tight = false;
	if (bytes >= expect || sp->tight || sp->warn_free == SAVE_SPACE_QUIET)
		return 0;
	sp->tight = true;
	base_warning("run %s: this save may not fit: %s %s has %s free, and the save may need up to %s (less, as far "
		"as the store has its data already, or it compresses)", run, FILE_SYSTEM, space_mount(s, mount),
		SPACE_TEXT(bytes), SPACE_TEXT(expect));
	return 0;
}

void save_space_warn(struct store *s, struct save_space *sp, const char *run, uint64_t new_bytes)
{
	uint64_t limit = sp->warn_free ? sp->warn_free : 2 * base_min(new_bytes, UINT64_MAX / 2), bytes;
	char mount[4096];
	bool low;

	if (sp->warn_free == SAVE_SPACE_QUIET || !space_free(s, &bytes))
		return;
	low = bytes < limit;
	if (low && !sp->low)
		base_warning("run %s: %s %s has %s free, less than %s %s: vckpt du shows where the bytes are, vckpt rm "
			"and vckpt gc free some (said once, until there is more)", run, FILE_SYSTEM,
			space_mount(s, mount), SPACE_TEXT(bytes),
			sp->warn_free ? "the" : "two more saves like this need,", SPACE_TEXT(limit));
	sp->low = low;
}
