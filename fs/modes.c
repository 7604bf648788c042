/* SPDX-License-Identifier: Apache-2.0
 *
 * modes: whose files a mount shows, and who may read them. The daemon of a mount by root reads everything, and with
 * allow_other everybody may ask it. So the kernel is told modes that let nobody see in the mount what he could not read
 * in the store (default_permissions makes it check them):
 *
 *   a run      owner, group and mode of its directory runs/<run>
 *   for each   of owner, group and others: nothing, unless they may enter the store's directory, runs/ and packs/, too
 *   the root   and .vckpt: owner, group and mode of the store's directory
 *
 * Group and others have no bits to write, the owner keeps his: in a mount, which is read-only, it allows nothing, but
 * cp and rsync give it to copies, whose owners need it to change and remove them. The options uid, gid and umask are
 * the administrator's word, and replace each of these for everything. What was read counts for `refresh`; below a
 * step's directory the kernel keeps what it was told, but no one comes there any more whom the run's directory keeps
 * out. */
#include <stdio.h>

#include "core/base/clock.h"
#include "fs/mount.h"

static const char *const above[] = { "", "runs", "packs" };

/* What may not be looked at is for the daemon's user alone. An error of the storage says nothing of that: it is
 * returned, because the kernel keeps the modes of steps and files for good. */
static int owner_read(const struct fs_mount *m, const char *name, struct store_storage_owner *ret_owner)
{
	struct store_storage *s = m->store->storage;
	int r = s->ops->owner ? s->ops->owner(s, name, ret_owner) : -EOPNOTSUPP;

	if (store_error_passes(r) || r == -EINTR)
		return r;
	if (r < 0)
		*ret_owner = (struct store_storage_owner){.uid = geteuid(), .gid = getegid(),
			.mode = r == -EOPNOTSUPP ? 0755 : 0700};
	return r == -ENOENT;
}

/* The bits that are left of those of `below`, which lies in `dir`: those of the classes that may enter it. Members of
 * one group need not be in the other; an owner of something in there came in as a member or as anybody. */
static mode_t enter(const struct store_storage_owner *dir, const struct store_storage_owner *below)
{
	bool other = dir->mode & 0001, member = dir->mode & 0010;
	bool group = dir->gid == below->gid ? member : other;
	bool user = dir->uid == below->uid ? (dir->mode & 0100) != 0 : member || other;

	return (user ? 0700 : 0) | (group ? 0070 : 0) | (other ? 0007 : 0);
}

static void options_apply(const struct fs_options *o, struct fs_owner *owner)
{
	if (o->uid != FS_NO_ID)
		owner->uid = o->uid;
	if (o->gid != FS_NO_ID)
		owner->gid = o->gid;
	if (o->umask != FS_NO_ID)
		owner->mode = 0777 & ~o->umask;
}

int fs_modes_mount(struct fs_mount *m, struct base_error *err)
{
	struct store_storage_owner store;

	int r = owner_read(m, "", &store);
	if (r < 0)
		return base_error_set(err, r, "%s: its owner and mode cannot be read: %s", m->store->path,
			base_error_name(r));
	m->owner = (struct fs_owner){.uid = store.uid, .gid = store.gid, .mode = store.mode};
	options_apply(m->options, &m->owner);
	return 0;
}

static int run_read(const struct fs_mount *m, const struct fs_run *run, struct fs_owner *ret_owner)
{
	char name[sizeof "runs/" + PROTO_RUN_MAX];
	struct store_storage_owner own, dir;

	snprintf(name, sizeof name, "runs/%s", run->name);
	int r = owner_read(m, name, &own);
	if (r < 0)
		return r;
	*ret_owner = (struct fs_owner){.uid = own.uid, .gid = own.gid, .mode = own.mode,
		.read_ns = base_monotonic_ns()};
	for (size_t i = 0; i < BASE_COUNT(above); i++) {
		r = owner_read(m, above[i], &dir);
		if (r < 0)
			return r;
		if (r == 0) /* else nothing is in there yet */
			ret_owner->mode &= enter(&dir, &own);
	}
	options_apply(m->options, ret_owner);
	return 0;
}

int fs_modes_run(struct fs_mount *m, struct fs_run *run, struct fs_owner *ret_owner)
{
	struct fs_owner known;

	pthread_mutex_lock(&m->lock);
	known = run->owner;
	pthread_mutex_unlock(&m->lock);
	*ret_owner = known;
	if (known.read_ns && base_monotonic_ns() - known.read_ns < (uint64_t)m->options->refresh_ms * 1000000)
		return 0;
	int r = run_read(m, run, ret_owner); /* several threads may: they read the same */
	if (r < 0) {
		*ret_owner = known;
		return known.read_ns ? 0 : r; /* as it was when the storage last answered */
	}
	pthread_mutex_lock(&m->lock);
	run->owner = *ret_owner;
	pthread_mutex_unlock(&m->lock);
	return 0;
}
