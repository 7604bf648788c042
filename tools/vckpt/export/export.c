/* SPDX-License-Identifier: Apache-2.0
 *
 * vckpt export: a step as a directory of plain files, the same as in a mount that shows the step's tensors in that
 * form.
 *
 * It is made as DEST.incomplete and renamed when it is whole. Within, a file is written under another name and renamed
 * when it is whole. So a file that has its name is whole, unless the machine crashed; and after an interruption the
 * same command goes on: files that are there and equal the step's, byte for byte, are kept
 * (export_compare.c). The same holds for a DEST that is there and not empty, which is completed in place. Two
 * exports do not write into one directory: each locks it. */
#include <fcntl.h>
#include <ftw.h>
#include <inttypes.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>

#include "tools/vckpt/export/export.h"

#define CACHE_BYTES (UINT64_C(64) << 20)

struct sink {
	int fd;
	const char *path;
	struct export *e;
};

void export_advance(struct export *e, size_t len)
{
	e->done += len;
	tool_progress_update(&e->progress, e->done, e->total);
}

void export_say(struct export *e, const char *what, const char *path)
{
	if (!e->t->verbose || e->t->json || e->t->quiet)
		return;
	tool_progress_clear(&e->progress);
	tool_print(stdout, "%-5s %s\n", what, path + strlen(e->dir) + 1);
	fflush(stdout);
}

static int write_file(void *arg, const void *bytes, size_t len, struct base_error *err)
{
	struct sink *s = arg;
	int r = tool_interrupt_check(err);

	if (r == 0)
		r = tool_write(s->fd, s->path, bytes, len, err);
	export_advance(s->e, len);
	return r;
}

static int write_temporary(struct export *e, uint32_t node, const char *temporary)
{
	struct view_file *file;
	struct sink sink = {open(temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666), temporary, e};
	int r;

	if (sink.fd < 0)
		return base_error_set(&e->err, -errno, "%s: %s", temporary, strerror(errno));
	r = view_file_open(e->tree, node, &file, &e->err);
	if (r == 0) {
		r = view_file_stream(file, e->cache, 0, 0, write_file, &sink, &e->err);
		view_file_close(file);
	}
	if (close(sink.fd) < 0 && r == 0)
		r = base_error_set(&e->err, -errno, "%s: %s", temporary, strerror(errno));
	return r;
}

/* Recurses as deep as paths of the tree are: STORE_BLOB_PARTS_MAX, and two more below `ranks`. */
static int each_below(struct export *e, uint32_t node, const char *path,
	int (*f)(struct export *e, uint32_t node, const char *path))
{
	const struct view_node *n = view_tree_node(e->tree, node);
	int r = 0;

	if (n->kind != VIEW_DIRECTORY)
		return f(e, node, path);
	for (uint32_t i = 0; i < n->nchildren && r == 0; i++) {
		const struct view_node *child = view_tree_node(e->tree, n->first_child + i);
		base_cleanup_free char *sub = tool_string("%s/%s", path, child->name);

		r = sub ? each_below(e, n->first_child + i, sub, f) : base_no_memory(&e->err);
	}
	return r;
}

int export_each(struct export *e, int (*f)(struct export *e, uint32_t node, const char *path))
{
	return each_below(e, 0, e->dir, f);
}

/* Directories are made only when a file goes into them. */
static int make_parents(struct export *e, const char *path)
{
	base_cleanup_free char *copy = strdup(path);

	if (!copy)
		return base_no_memory(&e->err);
	for (char *slash = strchr(copy + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
		*slash = 0;
		if (mkdir(copy, 0777) < 0 && errno != EEXIST)
			return base_error_set(&e->err, -errno, "%s: %s", copy, strerror(errno));
		*slash = '/';
	}
	return 0;
}

static int count_file(struct export *e, uint32_t node, const char *path)
{
	uint64_t size;
	int r = view_tree_size(e->tree, node, &size);

	if (r < 0)
		return base_error_set(&e->err, r, "%s: %s", path, base_error_name(r));
	e->files++;
	e->total += size;
	return 0;
}

static int export_file(struct export *e, uint32_t node, const char *path)
{
	base_cleanup_free char *temporary = tool_string("%s/" EXPORT_TEMPORARY, e->dir);
	int r;

	if (e->kept[node])
		return 0;
	if (!temporary)
		return base_no_memory(&e->err);
	r = make_parents(e, path);
	if (r == 0)
		r = write_temporary(e, node, temporary);
	if (r == 0 && rename(temporary, path) < 0)
		r = base_error_set(&e->err, -errno, "%s: %s", path, strerror(errno));
	if (r == 0)
		export_say(e, "wrote", path);
	else
		unlink(temporary);
	return r;
}

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
	(void)st;
	(void)type;
	(void)ftw;
	return remove(path);
}

/* Gives `fd` the mode of the DEST that was there, and `more`; also its owner if this user may. */
static int take_over(struct export *e, int fd, const struct stat *now, mode_t more)
{
	bool same = now->st_uid == e->was.st_uid && now->st_gid == e->was.st_gid;

	if (!same && fchown(fd, e->was.st_uid, e->was.st_gid) < 0 && fchown(fd, (uid_t)-1, e->was.st_gid) < 0)
		base_info("the owner of a DEST that was empty cannot be given again: %s", strerror(errno));
	return fchmod(fd, (e->was.st_mode & 07777) | more) < 0 ? -errno : 0;
}

static void put_back(struct export *e, const char *dest)
{
	struct stat now;
	base_cleanup_close int fd = -1;

	if (mkdir(dest, e->was.st_mode & 0777) < 0)
		return;
	fd = open(dest, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	if (fd >= 0 && fstat(fd, &now) == 0)
		take_over(e, fd, &now, 0);
}

/* e->dir: DEST if it is a directory with something in it, else `partial`, made if it is not there. */
static int choose_directory(struct export *e, const char *dest, const char *partial)
{
	bool there = lstat(dest, &e->was) == 0, removed = rmdir(dest) == 0;
	struct stat st;

	e->in_place = !removed && errno != ENOENT;
	e->replaces = there && removed;
	if (e->in_place) {
		int code = -errno;

		if (stat(dest, &st) < 0 || !S_ISDIR(st.st_mode))
			return base_error_set(&e->err, code, "%s: %s", dest, strerror(-code));
	}
	e->dir = strdup(e->in_place ? dest : partial);
	if (!e->dir)
		return base_no_memory(&e->err);
	e->made = !e->in_place && mkdir(partial, e->replaces ? (e->was.st_mode & 0777) | 0700 : 0777) == 0;
	if (!e->in_place && !e->made && errno != EEXIST)
		return base_error_set(&e->err, -errno, "%s: %s", partial, strerror(errno));
	if (e->in_place && access(partial, F_OK) == 0)
		base_warning("%s is left by an export that was interrupted, and is not needed: %s is there", partial,
			dest);
	return 0;
}

static bool is_link(const char *path)
{
	struct stat st;

	return lstat(path, &st) == 0 && S_ISLNK(st.st_mode);
}

/* The lock goes with the descriptor. 1: the directory is gone, because another export has finished it.
 * Where locks are not supported there is none. */
static int lock_directory(struct export *e, int *ret_fd)
{
	struct stat open_stat, named;
	int r;

	/* A link as DEST is what the user asked for; a link as DEST.incomplete is not, so it is not followed. */
	*ret_fd = open(e->dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC | (e->in_place ? 0 : O_NOFOLLOW));
	if (*ret_fd < 0 && errno == ENOENT)
		return 1;
	if (*ret_fd < 0 && !e->in_place && is_link(e->dir))
		return base_error_set(&e->err, -ENOTDIR, "%s is a symbolic link; nothing was written: remove it",
			e->dir);
	if (*ret_fd < 0)
		return base_error_set(&e->err, -errno, "%s: %s", e->dir, strerror(errno));
	if (flock(*ret_fd, LOCK_EX | LOCK_NB) < 0 && errno == EWOULDBLOCK)
		return base_error_set(&e->err, -EBUSY, "%s: another vckpt export writes into it", e->dir);
	if (fstat(*ret_fd, &open_stat) < 0)
		return base_error_set(&e->err, -errno, "%s: %s", e->dir, strerror(errno));
	r = e->replaces ? take_over(e, *ret_fd, &open_stat, 0700) : 0; /* now: an export that is killed keeps it */
	if (r < 0)
		return base_error_set(&e->err, r, "%s: %s", e->dir, strerror(-r));
	return stat(e->dir, &named) < 0 || named.st_ino != open_stat.st_ino || named.st_dev != open_stat.st_dev;
}

/* If the owner could not write to DEST, it becomes read-only again. */
static int take_name(struct export *e, int fd, const char *dest)
{
	bool readonly = e->replaces && (~e->was.st_mode & 0700);

	if (rename(e->dir, dest) < 0 || (readonly && fchmod(fd, e->was.st_mode & 07777) < 0))
		return base_error_set(&e->err, -errno, "%s: %s", dest, strerror(errno));
	return 0;
}

static int fill_directory(struct export *e, int fd, const char *dest)
{
	int r;

	e->kept = calloc(view_tree_count(e->tree), sizeof *e->kept);
	if (!e->kept)
		return base_no_memory(&e->err);
	r = export_each(e, count_file);
	if (r == 0 && !e->made)
		r = export_compare(e);
	if (r == 0)
		r = export_each(e, export_file);
	if (r == 0)
		r = tool_interrupt_check(&e->err);
	return r == 0 && !e->in_place ? take_name(e, fd, dest) : r;
}

/* dest and partial: without a slash at the end */
static int export_as(struct export *e, const char *dest, const char *partial)
{
	base_cleanup_close int lock = -1;
	int r = choose_directory(e, dest, partial);

	if (r == 0)
		r = lock_directory(e, &lock);
	if (r > 0)
		return base_error_set(&e->err, -EBUSY, "%s: another vckpt export has just written it", dest);
	if (r < 0 && e->made)
		rmdir(e->dir);
	if (r < 0)
		return r;
	r = fill_directory(e, lock, dest);
	if (r < 0 && e->made)
		nftw(e->dir, remove_one, 16, FTW_DEPTH | FTW_PHYS);
	if (r == -EINTR && e->made)
		base_error_set(&e->err, r, "interrupted: nothing was exported, and %s was removed", e->dir);
	else if (r == -EINTR)
		base_error_set(&e->err, r, "interrupted: the files that are in %s stay; the same command goes on",
			e->dir);
	return r;
}

static int export_to(struct export *e, const char *dest)
{
	size_t len = strlen(dest);
	base_cleanup_free char *plain = NULL, *partial = NULL;
	int r;

	while (len > 1 && dest[len - 1] == '/')
		len--;
	plain = strndup(dest, len);
	partial = tool_string("%.*s.incomplete", (int)len, dest);
	if (!plain || !partial)
		return base_no_memory(&e->err);
	r = export_as(e, plain, partial);
	if (r < 0 && e->replaces)
		put_back(e, plain);
	return r;
}

static int say(struct export *e, const char *dest)
{
	if (e->t->json)
		return tool_print_json(json_pack("{s:s, s:I, s:I, s:I}", "destination", dest, "files",
			(json_int_t)e->files, "bytes", (json_int_t)e->total, "kept", (json_int_t)e->nkept));
	if (e->t->quiet)
		return TOOL_DONE;
	tool_print(stdout, "%s: %s, %s", dest, TOOL_COUNT(e->files, "file", "files"), TOOL_BYTES(e->total));
	if (e->nkept)
		printf("; %" PRIu64 " of them %s there already", e->nkept, base_plural(e->nkept, "was", "were"));
	putchar('\n');
	return TOOL_DONE;
}

/* gc and verify would find the files, and --replace would write over files of the store. */
static int check_outside(struct export *e, const char *dest)
{
	base_cleanup_free char *around = store_around(dest), *full = realpath(dest, NULL);

	if (!around)
		return 0;
	return base_error_set(&e->err, -EINVAL, "%s %s the store %s; nothing was written: choose a directory outside "
		"of the store", dest, full && strcmp(full, around) == 0 ? "is" : "is in", around);
}

static int build_tree(struct export *e)
{
	uint32_t first, end;

	if (!e->component)
		return view_tree_build(e->t->step, e->show, &e->tree, &e->err);
	for (uint32_t i = 0; i < load_step_component_count(e->t->step); i++)
		if (!strcmp(load_step_component(e->t->step, i, &first, &end), e->component))
			return view_tree_build_component(e->t->step, e->show, i, &e->tree, &e->err);
	return load_step_lacks(e->t->step, "component", e->component, &e->err);
}

static int export_step(struct export *e, const char *dest)
{
	int r;

	e->cache = load_cache_new(CACHE_BYTES);
	r = e->cache ? build_tree(e) : base_no_memory(&e->err);
	if (e->cache)
		load_cache_quiet(e->cache);
	tool_interrupt_waits(e->t, "ended at once; the same command goes on with what was written");
	tool_progress_start(&e->progress, e->t->quiet, "export");
	if (r == 0)
		r = export_to(e, dest);
	tool_progress_end(&e->progress);
	view_tree_unref(e->tree);
	load_cache_free(e->cache);
	free(e->kept);
	free(e->dir);
	return r < 0 ? tool_fail(e->t, &e->err) : say(e, dest);
}

static int export_run(struct tool *t, int argc, char **argv)
{
	struct export e = {.t = t};
	const char *format = "safetensors";
	const struct tool_option options[] = {{"format", .text = &format}, {"replace", .flag = &e.replace}, {0}};
	struct tool_target target;
	int code = tool_parse(t, argc, argv, options), show;

	if (code)
		return code;
	if ((show = view_show_parse(format)) < 0)
		return tool_usage(t, "--format %s: give safetensors, npy or both (npy,safetensors)", format);
	if ((code = tool_target_parse(t, t->arguments[1], &target)))
		return code;
	if (!target.has_step)
		return tool_usage(t, "%s is not a step: RUN/STEP, or RUN/STEP/COMPONENT", t->arguments[1]);
	e.show = (unsigned)show;
	e.component = target.rest;
	if ((code = tool_step_open(t, &target, NULL)))
		return code;
	if (check_outside(&e, t->arguments[2]) < 0)
		return tool_fail(t, &e.err);
	return export_step(&e, t->arguments[2]);
}

const struct tool_command tool_export = {"export", "write a step as plain files",
	"usage: vckpt export STORE RUN/STEP[/COMPONENT] DEST [--format FORMAT] [--replace] [--json] [-q] [-v]\n\n"
	"Writes a step into DEST, its files named as in the mount: a .safetensors for each component (or, with\n"
	"--format npy, a .npy for each tensor), the blobs, and manifest.json, which says what is there. Each\n"
	"tensor is written once, so DEST is as large as the step (vckpt ls shows its size). Tensors that a\n"
	".safetensors cannot hold come as .npy. vckpt import takes DEST as a SOURCE and gives the same step.\n"
	"Files of tensors have the names that they came in with; of a component, its files and what is its own.\n"
	"DEST appears only when it is whole; until then it is DEST.incomplete. After an interruption the same\n"
	"command goes on: files that are there and equal the step's are kept. Anything else that is there is\n"
	"named, and nothing is written.\n\n"
	"  --format npy        a file for each tensor\n"
	"  --replace           write over files that are there with other content; leave what the step does not have\n"
	"  -v                  name each file as it is written or kept\n",
	export_run};
