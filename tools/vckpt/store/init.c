/* SPDX-License-Identifier: Apache-2.0 */
#include <dirent.h>
#include <fcntl.h>
#include <grp.h>
#include <inttypes.h>
#include <libgen.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "tools/vckpt/tool.h"

#define OTHER_INIT_TRIES 40 /* of 50 ms */

struct init {
	struct tool *t;
	const char *path;
	bool no_reserve, exist_ok, made, shared;
	const char *group;      /* of --shared; NULL: the one that the directory has */
	gid_t gid;
	struct base_error err;
};

/* By name or number. */
static bool group_find(const char *text, gid_t *ret_gid)
{
	const struct group *found = getgrnam(text);
	bool number = *text && strspn(text, "0123456789") == strlen(text) && strlen(text) < 10;

	if (found)
		*ret_gid = found->gr_gid;
	else if (number)
		*ret_gid = (gid_t)strtoul(text, NULL, 10);
	return found || number;
}

static int set_shared(struct tool *t, void *arg, const char *value)
{
	struct init *in = arg;

	if (value && !group_find(value, &in->gid))
		return tool_usage(t, "--shared=%s: there is no such group (getent group lists them)", value);
	in->shared = true;
	in->group = value;
	return 0;
}

/* Makes one directory whose parent is there, durably. 1: it was made. */
static int make_directory(struct init *in, const char *path)
{
	base_cleanup_free char *copy = strdup(path);
	base_cleanup_close int above = -1;

	if (!copy)
		return base_no_memory(&in->err);
	if (mkdir(path, 0777) < 0)
		return errno == EEXIST ? 0
				       : base_error_set(&in->err, -errno, "%s: cannot make the directory %s: %s",
						 in->path, path, strerror(errno));
	above = open(dirname(copy), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (above < 0 || fsync(above) < 0)
		return base_error_set(&in->err, -errno, "%s: %s", path, strerror(errno));
	return 1;
}

static int make_parents(struct init *in)
{
	base_cleanup_free char *copy = strdup(in->path);
	int r = copy ? 0 : base_no_memory(&in->err);

	for (size_t n = copy ? strlen(copy) : 0; n > 1 && copy[n - 1] == '/'; n--)
		copy[n - 1] = 0;
	for (char *slash = copy ? strchr(copy + 1, '/') : NULL; slash && r >= 0; slash = strchr(slash + 1, '/')) {
		*slash = 0;
		r = make_directory(in, copy);
		if (r > 0 && !in->t->json && !in->t->quiet)
			printf("made the directory %s\n", copy);
		*slash = '/';
	}
	return r < 0 ? r : 0;
}

/* ---- --shared ---- */

static bool is_empty(const char *path)
{
	DIR *d = opendir(path);
	unsigned n = 0;

	while (d && readdir(d))
		n++;
	if (d)
		closedir(d);
	return n == 2;
}

/* The rest follows from the mode of this directory: core/storage/storage.h. */
static int share_directory(struct init *in)
{
	base_cleanup_close int fd = open(in->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	struct stat st, now;

	if (fd < 0)
		return base_error_set(&in->err, -errno, "%s: %s", in->path, strerror(errno));
	if (in->group && fchown(fd, (uid_t)-1, in->gid) < 0)
		return base_error_set(&in->err, -errno, "%s cannot be given to the group %s: %s (you have to be in it; "
			"id shows your groups)", in->path, in->group, strerror(errno));
	if (fstat(fd, &st) < 0 || fchmod(fd, (st.st_mode & 07777) | S_ISGID | S_IRWXG) < 0 || fstat(fd, &now) < 0)
		return base_error_set(&in->err, -errno, "%s cannot be opened to its group: %s", in->path,
			strerror(errno));
	in->gid = st.st_gid;
	if (now.st_mode & S_ISGID)
		return 0;
	/* silently left out where the user is not in the group */
	(void)fchmod(fd, st.st_mode & 07777);
	return base_error_set(&in->err, -EPERM, "%s cannot be opened to its group %u: you have to be in it (id shows "
		"your groups; --shared=GROUP names another one)", in->path, (unsigned)st.st_gid);
}

/* While the directory is empty. One that is not is left to store_init, which refuses it. */
static int share(struct init *in)
{
	int made = make_directory(in, in->path), r;

	if (made < 0 || (!made && !is_empty(in->path)))
		return base_min(made, 0);
	r = share_directory(in);
	if (r < 0 && made)
		rmdir(in->path);
	return r;
}

/* Another process was first, or is making the store at this moment; then the directory is not empty. */
static int open_other(struct init *in, int why, struct store **ret_s)
{
	struct base_error err = {0};
	int r = store_open(in->path, STORE_OPEN_READ_ONLY, ret_s, &err);

	for (int i = 0; i < OTHER_INIT_TRIES && r == -BASE_ENOSTORE; i++) {
		nanosleep(&(struct timespec){.tv_nsec = 50000000}, NULL);
		r = store_open(in->path, STORE_OPEN_READ_ONLY, ret_s, &err);
	}
	if (r < 0 && r != -BASE_ENOSTORE)
		in->err = err;
	return r == -BASE_ENOSTORE ? why : r;
}

static int init_store(struct init *in, struct store **ret_s)
{
	int r;
	size_t len;

	if (in->exist_ok && store_open(in->path, STORE_OPEN_READ_ONLY, ret_s, NULL) == 0)
		return 0;
	r = store_init_allowed(in->path, &in->err); /* before anything is made */
	if (r == 0)
		r = make_parents(in);
	if (r == 0 && in->shared)
		r = share(in);
	if (r == 0)
		r = store_init(in->path, in->no_reserve ? 0 : STORE_RESERVE_BYTES, &in->err);
	in->made = r == 0;
	if (r == 0)
		return store_open(in->path, STORE_OPEN_READ_ONLY, ret_s, &in->err);
	if (in->exist_ok && (r == -EEXIST || r == -ENOTEMPTY))
		return open_other(in, r, ret_s);
	len = strlen(in->err.text);
	if (r == -EEXIST)
		snprintf(in->err.text + len, sizeof in->err.text - len, " (--exist-ok takes it as it is)");
	return r;
}

static const char *shared_by(const struct init *in, char text[static 128])
{
	const struct group *found = in->shared ? getgrgid(in->gid) : NULL;

	text[0] = 0;
	if (found)
		snprintf(text, 128, " of all in the group %s", found->gr_name);
	else if (in->shared)
		snprintf(text, 128, " of all in the group %u", (unsigned)in->gid);
	return text;
}

static int init_run(struct tool *t, int argc, char **argv)
{
	struct init in = {.t = t};
	const struct tool_option options[] = {{"no-reserve", .flag = &in.no_reserve},
		{"exist-ok", .flag = &in.exist_ok},
		{"shared", .call = set_shared, .arg = &in, .optional = true}, {0}};
	char group[128], id[33];
	int code = tool_parse(t, argc, argv, options);

	if (code)
		return code;
	in.path = t->arguments[0];
	if (init_store(&in, &t->store) < 0)
		return tool_fail(t, &in.err);
	if (t->json)
		return tool_print_json(json_pack("{s:s, s:s, s:i, s:b}", "store", t->store->path, "id",
			tool_format_id(t->store->info.id, id), "format", (int)t->store->info.version, "made", in.made));
	if (!t->quiet && in.made)
		printf("%s is a store now%s; next: vckpt import %s RUN SOURCE\n", t->store->path,
			shared_by(&in, group), TOOL_WORD(in.path));
	else if (!t->quiet)
		printf("%s is a store already; nothing was changed\n", t->store->path);
	return TOOL_DONE;
}

const struct tool_command tool_init = {"init", "make a store",
	"usage: vckpt init STORE [--shared[=GROUP]] [--exist-ok] [--no-reserve] [--json] [-q] [-v]\n\n"
	"Makes STORE, a directory that does not exist yet or is empty, into a store, and the directories above\n"
	"it where there are none. STORE must not be in another store.\n\n"
	"  --shared[=GROUP]   let all users in its group write to it; give it to GROUP first\n"
	"  --exist-ok         leave a store that is there as it is, instead of failing; several processes may\n"
	"                     do this at once\n"
	"  --no-reserve       do not set 1 MiB aside, which rm and gc need on a full disk\n",
	init_run, .makes_store = true};
