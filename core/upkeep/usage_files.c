/* SPDX-License-Identifier: Apache-2.0
 *
 * usage_files: what is on disk. Packs and manifests are listed before any list is read, so that what a listed file is
 * not named by then is needed by no step; a file that a later step names is looked at by itself. */
#include <errno.h>
#include <stdio.h>

#include "core/base/array.h"
#include "core/base/bisect.h"
#include "core/upkeep/file_name.h"
#include "core/upkeep/usage_internal.h"

struct listing { struct store *store; struct upkeep_usage *u; int r; };

uint64_t upkeep_bytes_add(uint64_t a, uint64_t b)
{
	uint64_t sum;

	return base_add_overflows(a, b, &sum) ? UINT64_MAX : sum;
}

static struct upkeep_usage_file *file_find(const struct upkeep_usage *u, const char *name, uint32_t hash)
{
	size_t at = 0;
	uint32_t i;

	while ((i = base_table_next(&u->by_name, hash, &at)) != BASE_TABLE_NONE)
		if (strcmp(u->files[i].name, name) == 0)
			return &u->files[i];
	return NULL;
}

const struct upkeep_usage_file *upkeep_usage_pack(const struct upkeep_usage *u, const char *pack)
{
	return file_find(u, pack, base_table_hash(pack, strlen(pack)));
}

static int file_add(struct upkeep_usage *u, const char *name, bool pack, uint64_t size,
	struct upkeep_usage_file **ret_f)
{
	uint32_t hash = base_table_hash(name, strlen(name));
	struct upkeep_usage_file *f = file_find(u, name, hash);

	if (!f) {
		if (u->nfiles + 1 >= BASE_TABLE_NONE || base_array_more(u->files, u->nfiles) < 0 ||
			base_table_reserve(&u->by_name, 1) < 0)
			return -ENOMEM;
		f = &u->files[u->nfiles];
		*f = (struct upkeep_usage_file){.name = strdup(name), .size = size, .pack = pack};
		if (!f->name)
			return -ENOMEM;
		base_table_add(&u->by_name, hash, u->nfiles++);
		u->packs += pack;
		u->pack_bytes = upkeep_bytes_add(u->pack_bytes, pack ? size : 0);
	}
	*ret_f = f;
	return 0;
}

int usage_file(struct store *s, struct upkeep_usage *u, const char *name, bool pack,
	struct upkeep_usage_file **ret_f)
{
	char path[STORAGE_NAME_MAX];
	uint64_t size = 0;
	int r = 0;

	*ret_f = file_find(u, name, base_table_hash(name, strlen(name)));
	if (*ret_f)
		return 0;
	if (pack)
		r = pack_path(name, path);
	if (r == 0)
		r = storage_size(s->storage, pack ? path : name, &size);
	if (r < 0 && r != -ENOENT && !storage_not_a_file(r))
		return r;
	return file_add(u, name, pack, size, ret_f);
}

static int listed_file(void *arg, const struct storage_entry *e)
{
	struct listing *l = arg;
	struct upkeep_usage_file *f;
	struct file_name n;
	int kind;

	if (e->foreign || e->temporary)
		return 0;
	kind = file_name_parse(e->name, &n);
	if (kind == FILE_PACK)
		l->r = file_add(l->u, n.pack, true, e->size, &f);
	else if (kind == STORE_RECORD_MANIFEST)
		l->r = file_add(l->u, e->name, false, e->size, &f);
	else if (kind == STORE_RECORD_DAMAGE && upkeep_usage_pack(l->u, n.pack))
		file_find(l->u, n.pack, base_table_hash(n.pack, strlen(n.pack)))->note_bytes = e->size;
	return l->r;
}

static int list_files(struct listing *l, const char *dir, storage_list_func f, struct base_error *err)
{
	int r = storage_list_files(l->store->storage, dir, f, l);

	if (l->r == -ENOMEM)
		return base_no_memory(err);
	if (r == 0 || r == -ENOENT || store_denied_listing(l->store, r, err))
		return r == -ENOENT ? 0 : r;
	return base_error_set(err, r, "%s/%s cannot be listed: %s", l->store->path, dir, base_error_name(r));
}

int usage_files_list(struct store *s, struct upkeep_usage *u, struct base_error *err)
{
	struct listing l = {s, u, 0};
	char dir[STORAGE_NAME_MAX];
	int r = list_files(&l, "packs", listed_file, err);

	if (r == 0)
		r = list_files(&l, "damaged", listed_file, err);
	for (uint32_t i = 0; r == 0 && i < u->nruns; i++) {
		snprintf(dir, sizeof dir, "runs/%s/manifests", u->runs[i].name);
		r = list_files(&l, dir, listed_file, err);
	}
	return r;
}

/* ---- measures ---- */

static struct upkeep_usage_run *run_find(const struct upkeep_usage *u, const char *name)
{
	uint32_t at = base_bisect(i, 0, u->nruns, strcmp(u->runs[i].name, name) < 0);

	return at < u->nruns && strcmp(u->runs[at].name, name) == 0 ? &u->runs[at] : NULL;
}

static struct upkeep_usage_step *step_find(const struct upkeep_usage *u, const struct upkeep_usage_run *run,
	uint64_t step)
{
	uint32_t end = run->first + run->n, at = base_bisect(i, run->first, end, u->steps[i].step < step);

	return at < end && u->steps[at].step == step ? &u->steps[at] : NULL;
}

static int listed_measures(void *arg, const struct storage_entry *e)
{
	struct listing *l = arg;
	struct upkeep_usage_step *step;
	struct upkeep_usage_run *run;
	struct commit_stats_name n;

	if (e->foreign || e->temporary || !commit_stats_name_parse(e->name, &n))
		return 0;
	run = run_find(l->u, n.run);
	if (!run || n.entry >= run->next)
		return 0; /* of a step that came since */
	step = step_find(l->u, run, n.step);
	if (step && step->entry == n.entry)
		step->measures = upkeep_bytes_add(step->measures, e->size);
	else
		l->u->spare_bytes = upkeep_bytes_add(l->u->spare_bytes, e->size);
	return 0;
}

int usage_measures_list(struct store *s, struct upkeep_usage *u, struct base_error *err)
{
	struct listing l = {s, u, 0};

	return list_files(&l, "stats", listed_measures, err);
}
