/* SPDX-License-Identifier: Apache-2.0
 *
 * store_denied: the messages for a user who may not write to a store or read it: which directory, its owner, and who
 * can change that; for a medium that takes no change; and for something else in the place of a directory. */
#include <grp.h>
#include <pwd.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/base/cleanup.h"
#include "core/step/store.h"

#define DENIED_NAME_MAX 64

struct denied {
	struct storage_owner store, at;   /* of the store's directory, and of the one at hand */
	char dir[STORAGE_NAME_MAX];
	char store_owner[DENIED_NAME_MAX], store_group[DENIED_NAME_MAX], owner[DENIED_NAME_MAX]; /* by name */
};

static void user_name(uint32_t uid, char name[static DENIED_NAME_MAX])
{
	char names[1024];
	struct passwd user, *found = NULL;

	snprintf(name, DENIED_NAME_MAX, "user %u", uid);
	if (getpwuid_r(uid, &user, names, sizeof names, &found) == 0 && found)
		snprintf(name, DENIED_NAME_MAX, "%s", found->pw_name);
}

static void group_name(uint32_t gid, char name[static DENIED_NAME_MAX])
{
	char names[4096];
	struct group group, *found = NULL;

	snprintf(name, DENIED_NAME_MAX, "group %u", gid);
	if (getgrgid_r(gid, &group, names, sizeof names, &found) == 0 && found)
		snprintf(name, DENIED_NAME_MAX, "group %s", found->gr_name);
}

/* True if it cannot be found out. */
static bool is_member(uint32_t gid)
{
	int n = getgroups(0, NULL);
	base_cleanup_free gid_t *groups = n > 0 ? malloc((size_t)n * sizeof *groups) : NULL;
	bool is = getegid() == gid || n < 0 || (n > 0 && !groups);

	n = groups ? getgroups(n, groups) : 0;
	for (int i = 0; i < n; i++)
		is |= groups[i] == gid;
	return is || n < 0;
}

static void denied_look(const struct store *s, struct denied *d)
{
	struct storage *storage = s->storage;

	if (!storage->ops->denied || storage->ops->denied(storage, d->dir, &d->at) < 0) {
		d->dir[0] = 0;
		d->at = d->store;
	}
	user_name(d->at.uid, d->owner);
	user_name(d->store.uid, d->store_owner);
	group_name(d->store.gid, d->store_group);
}

/* Besides the owner. */
static const char *or_root(const struct denied *d) { return d->at.uid ? " or root" : ""; }

/* In a store that is open to its group. */
static void denied_explain(const struct store *s, const struct denied *d, int r, struct base_error *err)
{
	if (geteuid() != 0 && !is_member(d->store.gid))
		base_error_set(err, r, "you may not write to the store %s: only %s and the %s may, and you are not in "
			"that group (id shows yours; who was added to a group has to log in again)", s->path,
			d->store_owner, d->store_group);
	else if (d->at.mode & S_ISVTX && d->at.mode & S_IWGRP)
		base_error_set(err, r, "you may not change what others have in the directory %s/%s: it is sticky (mode "
			"%04o); %s%s can change that with chmod -t", s->path, d->dir, d->at.mode, d->owner,
			or_root(d));
	else
		base_error_set(err, r, "you may not write in the directory %s/%s (it belongs to %s, mode %04o), though "
			"the %s may write to the store; %s%s can open it to the group: chgrp -R, chmod -R "
			"g+rwX, and chmod g+s for the directories; vckpt(1), SHARED STORES, has the commands", s->path,
			d->dir, d->owner, d->at.mode, d->store_group, d->owner, or_root(d));
}

bool store_no_directory(const struct store *s, int r, struct base_error *err)
{
	struct denied d = {0};

	if (r != -ENOTDIR || !s->storage->ops->denied || s->storage->ops->denied(s->storage, d.dir, &d.at) < 0 ||
		d.at.kind == S_IFDIR)
		return false;
	base_error_set(err, r, "%s/%s is %s, where a directory should be: move the directory there, or mount it "
		"there (vckpt follows no links inside a store)", s->path, d.dir,
		d.at.kind == S_IFLNK ? "a symbolic link" : "no directory");
	return true;
}

bool store_denied_listing(const struct store *s, int r, struct base_error *err)
{
	struct denied d = {0};

	if (store_no_directory(s, r, err))
		return true;
	if ((r != -EACCES && r != -EPERM) || !s->storage->ops->denied ||
		s->storage->ops->denied(s->storage, d.dir, &d.at) < 0)
		return false;
	user_name(d.at.uid, d.owner);
	base_error_set(err, r, "you may not read the directory %s/%s (it belongs to %s, mode %04o), and so not all of "
		"the store: %s%s can change that (vckpt(1), SHARED STORES)", s->path, d.dir, d.owner, d.at.mode,
		d.owner, or_root(&d));
	return true;
}

/* If the directory is the user's own, something else denies the write, and the caller names the file. */
bool store_denied(const struct store *s, int r, struct base_error *err)
{
	struct denied d = {0};
	bool open;

	if (r == -EROFS) {
		base_error_set(err, r, "%s: %s: the store can be read there, and not changed", s->path,
			base_error_name(r));
		return true;
	}
	if (store_no_directory(s, r, err))
		return true;
	if ((r != -EACCES && r != -EPERM) || !s->storage->ops->owner ||
		s->storage->ops->owner(s->storage, "", &d.store) < 0)
		return false;
	open = d.store.mode & S_IWGRP;
	denied_look(s, &d);
	if (r == -EPERM && d.at.fixed) {
		base_error_set(err, r, "%s%s%s is protected from changes (chattr +i or +a; lsattr -d shows it)",
			s->path, d.dir[0] ? "/" : "", d.dir);
		return true;
	}
	if ((open ? d.at.uid : d.store.uid) == geteuid())
		return false;
	if (open) {
		denied_explain(s, &d, r, err);
		return true;
	}
	base_error_set(err, r, "you may not write to the store %s (it belongs to %s)", s->path, d.store_owner);
	return true;
}
