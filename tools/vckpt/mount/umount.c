/* SPDX-License-Identifier: Apache-2.0
 *
 * vckpt umount: ends a vckpt mount. If it is in use, links in /proc say which processes use it: those of this user, or
 * all, as root. Only links are read, so that a mount that hangs does not block this. */
#include <dirent.h>
#include <string.h>
#include <unistd.h>

#include "fs/mountpoint.h"
#include "tools/vckpt/tool.h"

#define NAMED_MAX 3
#define BUSY_TRIES 20u
#define BUSY_MS 100u

struct users {
	const char *point;
	unsigned n;
	char text[200]; /* "python3 (1234), bash (77)": the first of them */
};

static bool link_inside(const char *link, const char *point)
{
	char to[4096];
	ssize_t n = readlink(link, to, sizeof to - 1);
	size_t len = strlen(point);

	if (n < 0)
		return false;
	to[n] = 0;
	return strncmp(to, point, len) == 0 && (to[len] == 0 || to[len] == '/');
}

static bool any_inside(const char *dir, const char *point)
{
	DIR *d = opendir(dir);
	bool found = false;
	char link[512];

	for (struct dirent *e; d && !found && (e = readdir(d));)
		found = snprintf(link, sizeof link, "%s/%s", dir, e->d_name) < (int)sizeof link &&
			link_inside(link, point);
	if (d)
		closedir(d);
	return found;
}

static bool uses(const char *pid, const char *point)
{
	static const char *const links[] = {"cwd", "root", "exe"}, *const dirs[] = {"fd", "map_files"};
	char path[300];
	bool found = false;

	for (size_t i = 0; i < BASE_COUNT(links) && !found; i++) {
		snprintf(path, sizeof path, "/proc/%s/%s", pid, links[i]);
		found = link_inside(path, point);
	}
	for (size_t i = 0; i < BASE_COUNT(dirs) && !found; i++) {
		snprintf(path, sizeof path, "/proc/%s/%s", pid, dirs[i]);
		found = any_inside(path, point);
	}
	return found;
}

static void add_user(struct users *u, const char *pid)
{
	size_t len = strlen(u->text);
	char path[300], name[64] = "";
	FILE *f;

	if (u->n++ >= NAMED_MAX)
		return;
	snprintf(path, sizeof path, "/proc/%s/comm", pid);
	f = fopen(path, "re");
	if (f && fgets(name, sizeof name, f))
		name[strcspn(name, "\n")] = 0;
	if (f)
		fclose(f);
	snprintf(u->text + len, sizeof u->text - len, "%s%s (%.20s)", len ? ", " : "", name, pid);
}

static void find_users(struct users *u)
{
	DIR *d = opendir("/proc");
	char self[32];

	snprintf(self, sizeof self, "%d", (int)getpid());
	for (struct dirent *e; d && (e = readdir(d));)
		if (e->d_name[strspn(e->d_name, "0123456789")] == 0 && strcmp(e->d_name, self) &&
			uses(e->d_name, u->point))
			add_user(u, e->d_name);
	if (d)
		closedir(d);
}

/* err: of an attempt that failed, maybe because the mount is in use */
static void say_users(const char *point, struct base_error *err)
{
	struct users u = {.point = point};
	char more[40] = "", by[300] = "";

	find_users(&u);
	if (u.n > NAMED_MAX)
		snprintf(more, sizeof more, " and %u more", u.n - NAMED_MAX);
	if (u.n)
		snprintf(by, sizeof by, " by %s%s", u.text, more);
	if (u.n || err->code == -EBUSY)
		base_error_set(err, -EBUSY,
			"%s is in use%s: end what uses it, or give --lazy: the mount vanishes at once, and ends when "
			"no one uses it any more", point, by);
}

/* If no process has the mount in use, a call is under way in it, such as another process's df: that is over soon. */
static int unmount(const char *argument, bool lazy, char **ret_point, struct base_error *err)
{
	int r = fs_mountpoint_unmount(argument, lazy, ret_point, err);

	for (unsigned tries = 0; r == -EBUSY && *ret_point && tries < BUSY_TRIES; tries++) {
		struct users u = {.point = *ret_point};

		find_users(&u);
		if (u.n)
			return r;
		usleep(BUSY_MS * 1000);
		free(base_steal(*ret_point));
		r = fs_mountpoint_unmount(argument, lazy, ret_point, err);
	}
	return r;
}

static int umount_run(struct tool *t, int argc, char **argv)
{
	base_cleanup_free char *point = NULL;
	struct base_error err = {0};
	bool lazy = false;
	int code = tool_parse(t, argc, argv, (const struct tool_option[]){{"lazy", 'l', .flag = &lazy}, {0}}), r;

	if (code)
		return code;
	r = unmount(t->arguments[0], lazy, &point, &err);
	if (r == -EBUSY || (r == -EPERM && point && !fs_mountpoint_stuck()))
		say_users(point, &err);
	if (r < 0)
		return tool_fail(t, &err);
	if (t->json)
		return tool_print_json(json_pack("{s:s}", "mountpoint", point));
	if (!t->quiet)
		printf("%s is unmounted\n", point);
	return TOOL_DONE;
}

const struct tool_command tool_umount = {"umount", "end a mount",
	"usage: vckpt umount MOUNTPOINT [-l] [--json] [-q] [-v]\n\n"
	"Ends a vckpt mount: as root with umount(2), for other users with fusermount3. What is not a vckpt mount\n"
	"is refused. If the mount is in use, its users are named and it stays. Once this command is done, the\n"
	"mount is gone; its daemon ends by itself a moment later.\n\n"
	"  -l, --lazy          unmount also while it is in use: the mount vanishes at once, and ends when no one\n"
	"                      uses it any more\n",
	umount_run};
