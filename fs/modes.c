/* SPDX-License-Identifier: Apache-2.0
 *
 * modes: owners and modes of the files that a mount shows. The daemon of root's mount can read everything, and with
 * allow_other every user may ask it. So the mount shows modes by which no user can read in it what that user cannot
 * read in the store, and the kernel checks them (default_permissions):
 *
 *   a run      owner, group and mode of its directory runs/<run>, but owner, group and others each have no rights
 *   unless they may also enter the store's directory, runs/ and packs/ the root   and .vckpt: owner, group and mode of
 *   the store's directory
 *
 * Group and others have no write bit. The owner keeps it: in a mount, which is read-only, it allows nothing, but cp and
 * rsync copy it, and owners of copies need it to change and remove them. The options uid, gid and umask are the
 * administrator's decision and replace these values everywhere. Values are read again after `refresh`. Below a step's
 * directory the kernel keeps the first ones, but a user whom the run's directory keeps out no longer gets there. */
#include <stdio.h>

#include "core/base/clock.h"
#include "fs/mount.h"

static const char *const above[] = {"", "runs", "packs"};

/* A directory that the daemon may not stat is shown to the daemon's user alone. An error of the storage does not mean
 * that, and is returned, because the kernel keeps the modes of steps and files for good. 1: there is none. */
static int owner_read(const struct fs_mount *m, const char *name, struct storage_owner *ret_owner)
{
	struct storage *s = m->store->storage;
	int r = s->ops->owner ? s->ops->owner(s, name, ret_owner) : -EOPNOTSUPP;

	if (commit_error_passes(r) || r == -EINTR)
		return r;
	if (r < 0)
		*ret_owner = (struct storage_owner){.uid = geteuid(), .gid = getegid(),
			.mode = r == -EOPNOTSUPP ? 0755 : 0700};
	return r == -ENOENT;
}

/* A mask for the mode of `below`, which is in `dir`: the bits of the classes that may enter `dir`. Members of the group
 * of one need not be in that of the other. The owner of `below`, if not of `dir`, enters as a member or as others do.
 */
static mode_t enter(const struct storage_owner *dir, const struct storage_owner *below)
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
	struct storage_owner store;

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
	struct storage_owner own, dir;
	int r;

	snprintf(name, sizeof name, "runs/%s", run->name);
	r = owner_read(m, name, &own);
	if (r < 0)
		return r;
	*ret_owner = (struct fs_owner){.uid = own.uid, .gid = own.gid, .mode = own.mode,
		.read_ns = base_monotonic_ns()};
	for (size_t i = 0; i < BASE_COUNT(above); i++) {
		r = owner_read(m, above[i], &dir);
		if (r < 0)
			return r;
		if (r == 0) /* else it does not exist yet, and nothing in it */
			ret_owner->mode &= enter(&dir, &own);
	}
	options_apply(m->options, ret_owner);
	return 0;
}

int fs_modes_run(struct fs_mount *m, struct fs_run *run, struct fs_owner *ret_owner)
{
	struct fs_owner known;
	int r;

	pthread_mutex_lock(&m->lock);
	known = run->owner;
	pthread_mutex_unlock(&m->lock);
	*ret_owner = known;
	if (known.read_ns && base_monotonic_ns() - known.read_ns < (uint64_t)m->options->refresh_ms * 1000000)
		return 0;
	r = run_read(m, run, ret_owner); /* several threads may do so at once: they read the same */
	if (r < 0) {
		*ret_owner = known;
		return known.read_ns ? 0 : r; /* the values of when the storage last answered */
	}
	pthread_mutex_lock(&m->lock);
	run->owner = *ret_owner;
	pthread_mutex_unlock(&m->lock);
	return 0;
}
