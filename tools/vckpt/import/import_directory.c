/* SPDX-License-Identifier: Apache-2.0
 *
 * A directory: which of its files hold the tensors of the component, which become blobs at their own path, and which
 * are pickles that are left out. In one with a manifest.json of vckpt's, the manifest says so (import_exported.c); else
 * one with .metadata is a checkpoint of DCP's (import_dcp.c); else it is one in Hugging Face layout:
 *
 *   tensors   every .safetensors (import_weights.c says of which components); but shard-*-model-*.safetensors, where
 *             there are no other weights at the top, hold boxes of tensors (import_shards.c)
 *   pickles   *.bin *.pt *.pth *.ckpt *.pkl *.pickle whose first bytes are a pickle's or a torch archive's: left out
 *             and listed, or kept as blobs
 *   skipped   .git
 *   links     followed when they end in a regular file inside (import_links.c says what that is) or --follow is given;
 *             one to a regular file outside is an error, others are left out with a warning */
#include "tools/vckpt/import/import.h"

#include <string.h>

#include "core/base/array.h"
#include "core/base/buf.h"
#include "core/base/log.h"
#include "core/view/name.h"
#include "tools/vckpt/import/import_manifest.h"
#include "tools/vckpt/import/import_shards.h"
#include "tools/vckpt/import/import_weights.h"

#define METADATA_NAME ".metadata"
#define GIT_NAME ".git"
#define DEPTH_MAX 32

struct walk {
	struct import_plan *plan;
	const char *root;
	struct import_found *found;     /* every regular file, by the names in each folder */
	size_t nfound;
	struct import_manifest *manifest;
	struct import_weights *weights;
	struct import_shards *shards; /* its tensors are in files that hold boxes of them; NULL: they are not */
	bool dcp;           /* its .metadata says what the .distcp files hold */
	const char *component;
	struct base_error *err;
};

/* Does DCP give its own files such names? */
static bool is_dcp_file(const char *rel)
{
	return !strncmp(rel, METADATA_NAME, strlen(METADATA_NAME)) ||
		(!strncmp(rel, "__", 2) && import_has_suffix(rel, ".distcp"));
}

bool import_is_part(const char *name)
{
	return is_dcp_file(name) || !strcmp(name, "manifest.json") || strstr(name, ".safetensors.index.");
}

bool import_may_be_pickle(const char *path)
{
	static const char *const suffixes[] = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"};

	for (size_t i = 0; i < BASE_COUNT(suffixes); i++)
		if (import_has_suffix(path, suffixes[i]))
			return true;
	return false;
}

/* Leaves a pickle out: takes the blob just added back and lists its path. */
static int leave_out(struct import_plan *p, const char *path)
{
	if (base_array_more(p->pickles, p->npickles) < 0)
		return -ENOMEM;
	if (!(p->pickles[p->npickles] = strdup(path)))
		return -ENOMEM;
	p->npickles++;
	free(p->blobs[--p->nblobs].name);
	return 0;
}

static int take_file(struct walk *w, struct import_found *f)
{
	struct import_plan *p = w->plan;
	int r = w->manifest ? import_exported_file(p, w->manifest, f->path, f->rel, w->err) : 1;
	base_cleanup_free char *name = NULL;
	struct import_file *file;

	if (r <= 0)
		return r;
	if (w->dcp && is_dcp_file(f->rel))
		return 0;
	if (w->shards && import_shards_is(f->rel))
		return import_shards_add(w->shards, f->path, w->err);
	if (w->weights && import_weights_skips(w->weights, f))
		return 0;
	if (f->set && (r = import_weights_take(w->weights, f, w->err)) <= 0)
		return r;
	name = import_true_name(f->rel);
	if (!name)
		return base_no_memory_for(w->err, "%s", f->path);
	r = import_add_blob(p, f->path, name, false, w->err);
	if (r < 0)
		return r;
	file = p->blobs[p->nblobs - 1].file;
	if (file->pointer)
		base_warning("%s: a Git LFS pointer in place of the file; kept as it is (git lfs pull gets the file)",
			f->path);
	if (p->keep_pickles || !import_may_be_pickle(f->rel) || !import_is_pickle(file))
		return r;
	return leave_out(p, f->path) < 0 ? base_no_memory_for(w->err, "%s", f->path) : 0;
}

static int take_files(struct walk *w)
{
	int r = 0;

	for (size_t i = 0; r == 0 && i < w->nfound; i++)
		r = take_file(w, &w->found[i]);
	return r;
}

static int add_found(struct walk *w, const char *path, const char *rel)
{
	struct import_found f = {.path = strdup(path), .rel = strdup(rel)};

	if (!f.path || !f.rel || base_array_more(w->found, w->nfound) < 0) {
		free(f.path);
		free(f.rel);
		return base_no_memory_for(w->err, "%s", path);
	}
	w->found[w->nfound++] = f;
	return 0;
}

static int take_entry(void *arg, const FTSENT *entry)
{
	struct walk *w = arg;
	const char *path = entry->fts_path, *rel = path + strlen(w->root);
	struct stat st;

	if (!strcmp(entry->fts_name, GIT_NAME)) {
		base_warning("%s: a repository's own; left out", path);
		return 1;
	}
	if (entry->fts_info == FTS_D)
		return entry->fts_level <= DEPTH_MAX ? 0
			: base_error_set(w->err, -ELOOP, "%s: more than %d directories deep", path, DEPTH_MAX);
	if (stat(path, &st) == 0 && S_ISREG(st.st_mode))
		return add_found(w, path, rel + strspn(rel, "/"));
	if (stat(path, &st) == 0)
		base_warning("%s: %s; left out", path,
			S_ISDIR(st.st_mode) ? "a link to a directory" : "not a regular file");
	else if (entry->fts_info == FTS_SL)
		base_warning("%s: a link that leads nowhere; left out", path);
	else
		return base_error_set(w->err, -errno, "%s: %s", path, strerror(errno));
	return 0;
}

static int add_exported(struct walk *w, size_t first)
{
	int r;

	if (strcmp(w->component, IMPORT_COMPONENT))
		return base_error_set(w->err, -EINVAL,
			"%s: its manifest.json says which components its tensors belong to; leave out --component %s",
			w->root, w->component);
	r = take_files(w);
	return r == 0 ? import_exported_check(w->plan, w->manifest, first, w->err) : r;
}

/* Does it hold boxes of tensors, and no weights that are whole? */
static bool holds_shards(const struct walk *w)
{
	bool any = false;

	for (size_t i = 0; i < w->nfound; i++) {
		const char *rel = w->found[i].rel;

		if (!strcmp(rel, IMPORT_INDEX_NAME) || !strcmp(rel, "model.safetensors"))
			return false;
		any = any || import_shards_is(rel);
	}
	return any;
}

static int add_shards(struct walk *w)
{
	int r = import_shards_new(w->plan, w->component, &w->shards);

	if (r < 0)
		return base_no_memory_for(w->err, "%s", w->root);
	r = take_files(w);
	if (r == 0)
		r = import_shards_finish(w->shards, w->err);
	import_shards_free(w->shards);
	return r;
}

/* DCP writes no number of a step: programs put it into the directory's name. */
static void number_by_name(struct walk *w)
{
	base_cleanup_free char *full = realpath(w->root, NULL);
	const char *name = full ? strrchr(full, '/') + 1 : "";
	uint64_t number;

	if (tool_step_parse(name, strlen(name), &number) > 0)
		import_add_number(w->plan, number);
}

static int add_dcp(struct walk *w)
{
	int r;

	if (strcmp(w->component, IMPORT_COMPONENT))
		return base_error_set(w->err, -EINVAL,
			"%s: the keys of its tensors say which components they belong to; leave out --component %s",
			w->root, w->component);
	w->dcp = true;
	number_by_name(w);
	r = import_add_dcp(w->plan, w->root, w->err);
	return r == 0 ? take_files(w) : r;
}

static int add_weights(struct walk *w)
{
	int r = import_weights_new(w->plan, w->root, w->component, w->found, w->nfound, &w->weights, w->err);

	if (r == 0)
		r = take_files(w);
	if (r == 0)
		r = import_weights_check(w->weights, w->err);
	import_weights_free(w->weights);
	return r;
}

/* Refuses what is left of a save that was broken off, or that each rank made for itself. */
static int refuse_parts(const struct walk *w)
{
	base_cleanup_free char *own = tool_string("%s/__0" METADATA_NAME, w->root);
	base_cleanup_free char *data = tool_string("%s/__0_0.distcp", w->root);
	struct stat st;

	if (!own || !data)
		return base_no_memory_for(w->err, "%s", w->root);
	if (stat(own, &st) == 0)
		return base_error_set(w->err, -EINVAL,
			"%s: each rank saved for itself here (use_collectives=False), so that no file describes the "
			"whole: save it with collectives, or load it with torch and use vckpt.dcp.StorageWriter",
			w->root);
	if (stat(data, &st) == 0)
		return base_error_set(w->err, -BASE_EFORMAT,
			"%s: it has .distcp files and no " METADATA_NAME ", as if the save had not come to its end",
			w->root);
	return 0;
}

static int add_found_files(struct walk *w)
{
	base_cleanup_free char *metadata = tool_string("%s/" METADATA_NAME, w->root);
	size_t first = w->plan->ntensors;
	struct stat st;
	int r;

	if (!metadata)
		return base_no_memory_for(w->err, "%s", w->root);
	if ((r = import_exported_open(w->plan, w->root, &w->manifest, w->err)) < 0)
		return r;
	if (w->manifest) {
		r = add_exported(w, first);
		import_manifest_free(w->manifest);
		return r;
	}
	if (stat(metadata, &st) == 0 && S_ISREG(st.st_mode))
		return add_dcp(w);
	if ((r = refuse_parts(w)) < 0)
		return r;
	return holds_shards(w) ? add_shards(w) : add_weights(w);
}

int import_add_directory(struct import_plan *p, const char *path, const char *component, struct base_error *err)
{
	struct walk w = {.plan = p, .root = path, .component = component, .err = err};
	int r = tool_walk(path, take_entry, &w, err);

	if (r == 0)
		r = add_found_files(&w);
	for (size_t i = 0; i < w.nfound; i++) {
		free(w.found[i].path);
		free(w.found[i].rel);
	}
	free(w.found);
	return r;
}
