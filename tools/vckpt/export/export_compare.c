/* SPDX-License-Identifier: Apache-2.0
 *
 * Looks at the directory of an export before it goes on: whole files of the step are kept; files that are not the
 * step's are kept, too, and named as an error unless --replace was given. Every byte is compared: sizes alone would
 * take another step's file, or one that a crash has filled with zeros, for this one's. */
#include <fcntl.h>
#include <inttypes.h>
#include <string.h>
#include <sys/stat.h>

#include "tools/vckpt/export/export.h"

#define NAMED 3

/* Files that are not the step's: the first few by name. */
struct export_others {
	uint64_t n;
	char names[700];
};

static void others_add(struct export *e, const char *path, const char *what)
{
	struct export_others *o = e->others;
	size_t len = strlen(o->names);

	if (o->n++ < NAMED)
		snprintf(o->names + len, sizeof o->names - len, "%s%.200s (%s)", len ? ", " : "",
			path + strlen(e->dir) + 1, what);
}

/* ---- one file ---- */

struct compare {
	struct export *e;
	const char *path;
	int fd;
	bool differs;
};

static int compare_bytes(void *arg, const void *bytes, size_t len, struct base_error *err)
{
	struct compare *c = arg;
	char block[65536];
	int r = tool_interrupt_check(err);

	export_advance(c->e, len);
	for (size_t done = 0; r == 0 && done < len;) {
		ssize_t n = read(c->fd, block, base_min(len - done, sizeof block));

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return base_error_set(err, -errno, "%s: %s", c->path, strerror(errno));
		if (n == 0 || memcmp(block, (const char *)bytes + done, (size_t)n) != 0) {
			c->differs = true;
			return -ECANCELED;
		}
		done += (size_t)n;
	}
	return r;
}

/* 1: the file has what the node has; 0: it has not. */
static int compare_content(struct export *e, uint32_t node, const char *path, int fd)
{
	struct compare c = {.e = e, .path = path, .fd = fd};
	struct view_file *file;
	uint64_t done = e->done;
	int r = view_file_open(e->tree, node, &file, &e->err);

	if (r < 0)
		return r;
	r = view_file_stream(file, e->cache, 0, 1, compare_bytes, &c, &e->err);
	view_file_close(file);
	if (c.differs) {
		e->err = (struct base_error){0};
		e->done = done;
		return 0;
	}
	return r < 0 ? r : 1;
}

static int compare_file(struct export *e, uint32_t node, const char *path)
{
	base_cleanup_close int fd = open(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
	struct stat st;
	uint64_t size;
	int r;

	if (fd < 0 && (errno == ENOENT || errno == ENOTDIR))
		return 0;
	if (fd < 0 && errno != ELOOP)
		return base_error_set(&e->err, -errno, "%s: %s", path, strerror(errno));
	if (fd >= 0 && fstat(fd, &st) == 0 && S_ISDIR(st.st_mode)) /* no file can be renamed over it */
		return base_error_set(&e->err, -EISDIR, "%s is a directory, where the step has a file; nothing was "
			"written: move it away", path);
	if (fd < 0 || fstat(fd, &st) < 0 || !S_ISREG(st.st_mode)) {
		others_add(e, path, "not a plain file");
		return 0;
	}
	r = view_tree_size(e->tree, node, &size);
	if (r < 0)
		return base_error_set(&e->err, r, "%s: %s", path, base_error_name(r));
	r = (uint64_t)st.st_size == size ? compare_content(e, node, path, fd) : 0;
	if (r < 0)
		return r;
	if (r == 0)
		others_add(e, path, "other content");
	e->kept[node] = r == 1;
	e->nkept += r == 1;
	if (r == 1)
		export_say(e, "kept", path);
	return 0;
}

/* ---- what the step does not have ---- */

enum here { HERE_NOTHING, HERE_FILE, HERE_DIRECTORY };

static enum here step_has(const struct export *e, const char *path)
{
	base_cleanup_free char *copy = strdup(path);
	int64_t node = 0;
	char *rest, *name = copy ? strtok_r(copy, "/", &rest) : NULL;

	for (; name && node >= 0; name = strtok_r(NULL, "/", &rest))
		node = view_tree_lookup(e->tree, (uint32_t)node, name);
	if (!copy || node <= 0)
		return HERE_NOTHING;
	return view_tree_node(e->tree, (uint32_t)node)->kind == VIEW_DIRECTORY ? HERE_DIRECTORY : HERE_FILE;
}

/* If the step has a directory where a file is, the file is in the way even with --replace: if it is a link,
 * files would be written to where it points. */
static int check_foreign(void *arg, const FTSENT *entry)
{
	struct export *e = arg;
	enum here here;

	if (entry->fts_info == FTS_D)
		return 0;
	here = step_has(e, entry->fts_path + strlen(e->dir) + 1);
	if (here == HERE_DIRECTORY)
		return base_error_set(&e->err, -ENOTDIR, "%s is %s, where the step has a directory; nothing was "
			"written: move it away", entry->fts_path, entry->fts_info == FTS_SL ||
			entry->fts_info == FTS_SLNONE ? "a symbolic link" : "a file");
	if (here == HERE_NOTHING)
		others_add(e, entry->fts_path, "not in the step");
	return 0;
}

static int refuse(struct export *e, const struct export_others *o)
{
	const struct load_step_info *info = load_step_info(e->t->step);
	char more[40] = "";

	if (o->n > NAMED)
		snprintf(more, sizeof more, " and %" PRIu64 " more", o->n - NAMED);
	return base_error_set(&e->err, -EEXIST, "%s holds files that are not those of %s/%" PRIu64 ": %s%s; nothing "
		"was written (--replace writes over other content and leaves the rest)", e->dir, info->run,
		info->step, o->names, more);
}

int export_compare(struct export *e)
{
	struct export_others found = {0};
	base_cleanup_free char *temporary = tool_string("%s/" EXPORT_TEMPORARY, e->dir);
	int r;

	if (!temporary)
		return base_no_memory(&e->err);
	if (unlink(temporary) < 0 && errno != ENOENT)
		return base_error_set(&e->err, -errno, "%s: %s", temporary, strerror(errno));
	e->others = &found;
	r = export_each(e, compare_file);
	if (r == 0)
		r = tool_walk(e->dir, check_foreign, e, &e->err);
	e->others = NULL;
	return r == 0 && found.n && !e->replace ? refuse(e, &found) : r;
}
