/* SPDX-License-Identifier: Apache-2.0
 *
 * vckpt export: a step as a directory of plain files, the same as in a mount that shows the step's tensors in that
 * form. It is made as DEST.incomplete and renamed when it is whole. */
#include <fcntl.h>
#include <ftw.h>
#include <inttypes.h>
#include <string.h>
#include <sys/stat.h>

#include "core/view/tree.h"
#include "tools/vckpt/tool.h"

#define CACHE_BYTES (UINT64_C(64) << 20)

struct export {
	struct tool *t;
	unsigned show; /* of the step's tensors: enum view_show */
	struct load_step *step;
	struct view_tree *tree;
	struct load_cache *cache;
	struct tool_progress progress;
	uint64_t done, total, files;
	struct base_error err;
};

struct sink {
	int fd;
	const char *path;
	struct export *e;
};

static int write_file(void *arg, const void *bytes, size_t len, struct base_error *err)
{
	struct sink *s = arg;
	int r = tool_interrupt_check(err);

	if (r < 0)
		return r;
	for (size_t done = 0; done < len;) {
		ssize_t n = write(s->fd, (const char *)bytes + done, len - done);

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return base_error_set(err, -errno, "%s: %s", s->path, strerror(errno));
		done += (size_t)n;
	}
	s->e->done += len;
	tool_progress_update(&s->e->progress, s->e->done, s->e->total);
	return 0;
}

static int export_file(struct export *e, uint32_t node, const char *path)
{
	struct view_file *file;
	struct sink sink = {open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666), path, e};

	if (sink.fd < 0)
		return base_error_set(&e->err, -errno, "%s: %s", path, strerror(errno));
	int r = view_file_open(e->tree, node, &file, &e->err);
	if (r == 0) {
		r = view_file_stream(file, e->cache, 0, 0, write_file, &sink, &e->err);
		view_file_close(file);
	}
	if (close(sink.fd) < 0 && r == 0)
		r = base_error_set(&e->err, -errno, "%s: %s", path, strerror(errno));
	e->files++;
	return r;
}

static int export_node(struct export *e, uint32_t node, const char *path, bool count_only);

static int export_children(struct export *e, const struct view_node *n, const char *path, bool count_only)
{
	int r = 0;

	for (uint32_t i = 0; i < n->nchildren && r == 0; i++) {
		const struct view_node *child = view_tree_node(e->tree, n->first_child + i);
		base_cleanup_free char *sub = NULL;

		if (asprintf(&sub, "%s/%s", path, child->name) < 0)
			return base_error_set(&e->err, -ENOMEM, "out of memory");
		r = export_node(e, n->first_child + i, sub, count_only);
	}
	return r;
}

/* Directories are made only when a file goes into them. */
static int make_parents(struct export *e, const char *path)
{
	base_cleanup_free char *copy = strdup(path);

	if (!copy)
		return base_error_set(&e->err, -ENOMEM, "out of memory");
	for (char *slash = strchr(copy + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
		*slash = 0;
		if (mkdir(copy, 0777) < 0 && errno != EEXIST)
			return base_error_set(&e->err, -errno, "%s: %s", copy, strerror(errno));
		*slash = '/';
	}
	return 0;
}

static int export_node(struct export *e, uint32_t node, const char *path, bool count_only)
{
	const struct view_node *n = view_tree_node(e->tree, node);

	if (n->kind == VIEW_DIRECTORY)
		return export_children(e, n, path, count_only);
	if (count_only) {
		e->total += n->size;
		return 0;
	}
	int r = make_parents(e, path);
	return r < 0 ? r : export_file(e, node, path);
}

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
	(void)st;
	(void)type;
	(void)ftw;
	return remove(path);
}

static int export_to(struct export *e, const char *dest)
{
	base_cleanup_free char *partial = NULL;
	size_t len = strlen(dest);

	while (len > 1 && dest[len - 1] == '/')
		len--;
	if (asprintf(&partial, "%.*s.incomplete", (int)len, dest) < 0)
		return base_error_set(&e->err, -ENOMEM, "out of memory");
	if (rmdir(dest) < 0 && errno != ENOENT)
		return base_error_set(&e->err, -errno, "%s: %s", dest,
			errno == ENOTEMPTY || errno == EEXIST ? "it is there and not empty" : strerror(errno));
	if (mkdir(partial, 0777) < 0)
		return base_error_set(&e->err, -errno, "%s: %s", partial,
			errno == EEXIST ? "left by an export that did not end: remove it" : strerror(errno));
	export_node(e, 0, partial, true);
	int r = export_node(e, 0, partial, false);
	if (r == 0)
		r = tool_interrupt_check(&e->err);
	if (r == 0 && rename(partial, dest) < 0)
		r = base_error_set(&e->err, -errno, "%s: %s", dest, strerror(errno));
	if (r < 0)
		nftw(partial, remove_one, 16, FTW_DEPTH | FTW_PHYS);
	if (r == -EINTR)
		base_error_set(&e->err, r, "interrupted: nothing was exported, and %s was removed", partial);
	return r;
}

static int option(struct tool *t, void *arg, int val, const char *value)
{
	if (val != 'f')
		return 0;
	int show = view_show_parse(value);

	if (show < 0)
		return tool_usage(t, "--format %s: safetensors, npy or both (npy,safetensors) are wanted", value);
	((struct export *)arg)->show = (unsigned)show;
	return 0;
}

static int export_step(struct export *e, const char *dest)
{
	struct tool *t = e->t;
	char bytes[32];
	int code = TOOL_DONE;

	e->cache = load_cache_new(CACHE_BYTES);
	if (!e->cache)
		base_error_set(&e->err, -ENOMEM, "out of memory");
	tool_interrupt_waits(t, "ended at once; DEST.incomplete holds what was written: remove it");
	tool_progress_start(&e->progress, t->quiet, "export");
	if (!e->cache || view_tree_build(e->step, e->show, &e->tree, &e->err) < 0 || export_to(e, dest) < 0) {
		tool_progress_end(&e->progress);
		code = tool_fail(t, &e->err);
	} else {
		tool_progress_end(&e->progress);
		tool_format_bytes(e->done, bytes);
		if (t->json)
			code = tool_print_json(json_pack("{s:s, s:I, s:I}", "destination", dest, "files",
				(json_int_t)e->files, "bytes", (json_int_t)e->done));
		else if (!t->quiet)
			printf("%s: %" PRIu64 " files, %s\n", dest, e->files, bytes);
	}
	view_tree_unref(e->tree);
	load_cache_free(e->cache);
	return code;
}

static int export_run(struct tool *t, int argc, char **argv)
{
	static const struct option options[] = {{"format", required_argument, NULL, 'f'}, {0}};
	const struct store_list_step *entry;
	struct export e = {.t = t, .show = VIEW_SHOW_SAFETENSORS};
	struct tool_target target;
	struct store_list *l = NULL;
	struct store *s = NULL;
	int code = tool_parse(t, argc, argv, NULL, options, option, &e);

	if (code)
		return code - TOOL_LEAVE;
	if ((code = tool_target_parse(t, t->arguments[1], &target)))
		return code;
	if (!target.has_step || target.rest)
		return tool_usage(t, "%s is not a step: RUN/STEP", t->arguments[1]);
	if ((code = tool_open_store(t, STORE_OPEN_READ_ONLY, &s)))
		return code;
	if ((code = tool_target_find(t, s, &target, &l, &entry)) == 0) {
		if (load_step_open(s, target.run, entry, &e.step, &e.err) < 0)
			code = tool_fail(t, &e.err);
		else {
			code = export_step(&e, t->arguments[2]);
			load_step_unref(e.step);
		}
	}
	store_list_close(l);
	store_close(s);
	return code;
}

const struct tool_command tool_export = {"export", "write a step as plain files",
	"usage: vckpt export STORE RUN/STEP DEST [--format safetensors|npy] [--json] [-q] [-v]\n\n"
	"Writes a step into DEST, a directory that does not exist yet or is empty, its files named as in the\n"
	"mount: a .safetensors for each component (or, with --format npy, a .npy for each tensor), the blobs,\n"
	"and manifest.json, which says what is there. Each tensor is written once, so DEST is as large as the\n"
	"step (vckpt ls shows its size). Tensors that a .safetensors cannot hold come as .npy. DEST appears\n"
	"only when it is whole. vckpt import takes it as a SOURCE and gives the same step.\n",
	export_run};
