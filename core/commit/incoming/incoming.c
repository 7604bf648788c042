/* SPDX-License-Identifier: Apache-2.0
 *
 * incoming: the folders of incoming/, read and deleted (docs/format/incoming.md).
 *
 * A folder is what one listing finds under incoming/<run>/<attempt>/. Heartbeats are listed after incoming/: a launch
 * puts its heartbeat before anything else, so a folder that was seen without one has lost it. */
#include "core/commit/incoming/incoming.h"

#include <stdio.h>

#include "core/base/array.h"
#include "core/base/text.h"
#include "core/storage/spread.h"

/* ---- listings ---- */

static int files_add(void *arg, const struct storage_entry *entry)
{
	struct commit_files *f = arg;
	char *name;

	if (base_array_room(f->all, f->size, f->n + 1) < 0)
		return -ENOMEM;
	name = strdup(entry->name);
	if (!name)
		return -ENOMEM;
	f->all[f->n++] = (struct commit_file){name, entry->size, entry->names, entry->device, entry->number,
		entry->temporary, entry->foreign};
	return 0;
}

static int file_compare(const void *a, const void *b)
{
	return strcmp(((const struct commit_file *)a)->name, ((const struct commit_file *)b)->name);
}

int commit_files_list(struct store *s, const char *dir, struct commit_files *ret_f, struct base_error *err)
{
	int r = storage_list_files(s->storage, dir, files_add, ret_f);

	if (r < 0 && r != -ENOENT && store_denied_listing(s, r, err))
		return r;
	if (r < 0 && r != -ENOENT)
		return base_error_set(err, r, "%s/%s cannot be listed: %s", s->path, dir, base_error_name(r));
	if (ret_f->n)
		qsort(ret_f->all, ret_f->n, sizeof *ret_f->all, file_compare);
	return 0;
}

void commit_files_release(struct commit_files *f)
{
	for (size_t i = 0; i < f->n; i++)
		free(f->all[i].name);
	free(f->all);
	*f = (struct commit_files){0};
}

const struct commit_file *commit_files_find(const struct commit_files *f, const char *name)
{
	struct commit_file key = {.name = (char *)name};

	return f->n ? bsearch(&key, f->all, f->n, sizeof key, file_compare) : NULL;
}

/* ---- folders ---- */

bool commit_attempt_name_valid(const char *name)
{
	size_t digits = strlen(name) > 17 ? strspn(name + 17, "0123456789") : 0;

	return digits && digits <= 20 && !name[17 + digits] && name[16] == '-' && strspn(name, "0123456789abcdef") == 16
		&& (name[17] != '0' || digits == 1);
}

/* Splits incoming/<run>/<attempt>/<last>; false for anything else. */
static bool folder_name_parse(const char *name, char run[static PROTO_RUN_MAX + 1],
	char attempt[static PROTO_ATTEMPT_MAX], const char **ret_last)
{
	const char *at = name + strlen("incoming/"),
		   *slash = strncmp(name, "incoming/", 9) == 0 ? strchr(at, '/') : NULL;
	const char *last = slash ? strchr(slash + 1, '/') : NULL;

	if (!last || strchr(last + 1, '/') || slash - at > PROTO_RUN_MAX || last - slash - 1 >= PROTO_ATTEMPT_MAX)
		return false;
	snprintf(run, PROTO_RUN_MAX + 1, "%.*s", (int)(slash - at), at);
	snprintf(attempt, PROTO_ATTEMPT_MAX, "%.*s", (int)(last - slash - 1), slash + 1);
	*ret_last = last + 1;
	return proto_run_valid(run) && commit_attempt_name_valid(attempt);
}

static void folder_release(struct commit_folder *f)
{
	if (f->info.begun)
		proto_begin_release(&f->info.begin);
	for (size_t i = 0; i < f->nbases; i++)
		proto_base_release(&f->bases[i]);
	free(f->bases);
	free(f->info.announced);
	free(f->info.missing);
	commit_files_release(&f->files);
}

void commit_folders_release(struct commit_folders *f)
{
	for (size_t i = 0; i < f->n; i++)
		folder_release(&f->all[i]);
	free(f->all);
	*f = (struct commit_folders){0};
}

static void folder_read_begin(struct store *s, struct commit_folder *f, const char *name)
{
	struct proto_begin begin = {0};
	int r = store_record_load(s, name, STORE_RECORD_BEGIN, proto_begin_decode, &begin, name, &f->newer);

	if (r == -ENOENT)
		return; /* deleted meanwhile */
	if (r == 0 && (strcmp(begin.run, f->info.run) != 0 || strcmp(begin.attempt, f->info.attempt) != 0 ||
		(!begin.alone && begin.position && !s->info.list_3))) {
		proto_begin_release(&begin);
		r = -BASE_EFORMAT;
	}
	f->damaged |= r < 0;
	f->info.begun = r == 0;
	f->info.begin = begin;
}

static int folder_read_base(struct store *s, struct commit_folder *f, const char *name)
{
	int r;

	if (base_array_more(f->bases, f->nbases) < 0)
		return -ENOMEM;
	f->bases[f->nbases] = (struct proto_base_record){0};
	r = store_record_load(s, name, STORE_RECORD_BASE, proto_base_decode, &f->bases[f->nbases], name, &f->newer);
	if (r == 0)
		f->nbases++;
	else if (r != -ENOENT)
		f->damaged = true;
	return 0;
}

/* part.<rank>; anything else is left alone. */
static int folder_add_announcement(struct commit_folder *f, const char *digits)
{
	uint64_t rank;

	if (!base_decimal(digits, 0, UINT32_MAX, &rank))
		return 0;
	if (base_array_more(f->info.announced, f->info.nannounced) < 0)
		return -ENOMEM;
	f->info.announced[f->info.nannounced++] = (uint32_t)rank;
	return 0;
}

static int folder_read_file(struct store *s, struct commit_folder *f, const struct commit_file *file, const char *last)
{
	struct storage_entry entry = {file->name, file->size, file->temporary, file->foreign, file->names,
		file->device, file->number};
	int r = files_add(&f->files, &entry);

	if (r < 0 || file->temporary || file->foreign)
		return r;
	if (strcmp(last, "begin") == 0)
		folder_read_begin(s, f, file->name);
	else if (strncmp(last, "base.", 5) == 0)
		return folder_read_base(s, f, file->name);
	else if (strncmp(last, "part.", 5) == 0)
		return folder_add_announcement(f, last + 5);
	return 0;
}

static struct commit_folder *folder_of(struct commit_folders *f, const char *run, const char *attempt)
{
	struct commit_folder *last = f->n ? &f->all[f->n - 1] : NULL; /* the listing is sorted */

	if (last && strcmp(last->info.run, run) == 0 && strcmp(last->info.attempt, attempt) == 0)
		return last;
	if (base_array_room(f->all, f->size, f->n + 1) < 0)
		return NULL;
	last = &f->all[f->n++];
	*last = (struct commit_folder){0};
	snprintf(last->info.run, sizeof last->info.run, "%s", run);
	snprintf(last->info.attempt, sizeof last->info.attempt, "%s", attempt);
	snprintf(last->launch, sizeof last->launch, "%.16s", attempt);
	return last;
}

static void folders_judge(struct commit_folders *f, const struct commit_launch_info *infos, size_t n)
{
	for (size_t i = 0; i < f->n; i++) {
		struct commit_folder *folder = &f->all[i];

		folder->info.state = COMMIT_DEAD;
		for (size_t k = 0; k < n; k++) {
			if (strcmp(infos[k].launch, folder->launch) != 0)
				continue;
			folder->heartbeat = true;
			if (infos[k].state == COMMIT_ALIVE || folder->info.state == COMMIT_DEAD)
				folder->info.state = infos[k].state;
		}
	}
}

/* model: inc */
int commit_folders_read(struct store *s, struct commit_folders *ret_f, struct base_error *err)
{
	char run[PROTO_RUN_MAX + 1], attempt[PROTO_ATTEMPT_MAX];
	struct commit_launch_info *infos = NULL;
	struct commit_files files = {0};
	size_t ninfos = 0;
	int r = commit_files_list(s, "incoming", &files, err);

	*ret_f = (struct commit_folders){0};
	for (size_t i = 0; r >= 0 && i < files.n; i++) {
		struct commit_folder *folder;
		const char *last;

		if (!folder_name_parse(files.all[i].name, run, attempt, &last))
			continue;
		folder = folder_of(ret_f, run, attempt);
		r = folder ? folder_read_file(s, folder, &files.all[i], last) : -ENOMEM;
		if (r < 0)
			base_error_set(err, r, "%s/incoming: %s", s->path, base_error_name(r));
	}
	commit_files_release(&files);
	if (r >= 0)
		r = commit_launches(s, &infos, &ninfos, err);
	if (r < 0) {
		commit_folders_release(ret_f);
		return r;
	}
	folders_judge(ret_f, infos, ninfos);
	free(infos);
	return 0;
}

/* ---- saves under way ---- */

static int rank_compare(const void *a, const void *b)
{
	uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;

	return (x > y) - (x < y);
}

/* Which ranks are missing, of the world that `begin` names. */
static int incoming_missing(struct commit_incoming *i)
{
	uint32_t world = i->begun ? i->begin.world : 0, at = 0;

	if (i->nannounced)
		qsort(i->announced, i->nannounced, sizeof *i->announced, rank_compare);
	i->missing = world > i->nannounced ? calloc(world, sizeof *i->missing) : NULL;
	if (world > i->nannounced && !i->missing)
		return -ENOMEM;
	for (uint32_t rank = 0; i->missing && rank < world; rank++) {
		while (at < i->nannounced && i->announced[at] < rank)
			at++;
		if (at == i->nannounced || i->announced[at] != rank)
			i->missing[i->nmissing++] = rank;
	}
	i->since_ns = i->begun ? i->begin.time_ns : 0;
	return 0;
}

int commit_incoming_read(struct store *s, struct commit_incoming **ret_all, size_t *ret_n, struct base_error *err)
{
	struct commit_incoming *all;
	struct commit_folders f;
	int r = commit_folders_read(s, &f, err);

	if (r < 0)
		return r;
	all = calloc(f.n + 1, sizeof *all);
	for (size_t i = 0; r == 0 && i < f.n; i++)
		r = all ? incoming_missing(&f.all[i].info) : -ENOMEM;
	if (!all || r < 0) {
		free(all);
		commit_folders_release(&f);
		return base_no_memory_for(err, "%s/incoming", s->path);
	}
	for (size_t i = 0; i < f.n; i++) {
		all[i] = f.all[i].info;
		f.all[i].info = (struct commit_incoming){0}; /* moved */
	}
	*ret_all = all;
	*ret_n = f.n;
	commit_folders_release(&f);
	return 0;
}

void commit_incoming_free(struct commit_incoming *all, size_t n)
{
	for (size_t i = 0; i < n; i++) {
		if (all[i].begun)
			proto_begin_release(&all[i].begin);
		free(all[i].announced);
		free(all[i].missing);
	}
	free(all);
}

struct folder_end { struct store *s; struct commit_files files; const char *begin; _Atomic uint64_t bytes, count; };

static void folder_remove(struct folder_end *e, const struct commit_file *file)
{
	if (file->foreign || storage_remove(e->s->storage, file->name) < 0)
		return;
	e->bytes += file->size;
	e->count++;
}

static int folder_remove_one(void *arg, uint32_t i, struct base_error *err)
{
	struct folder_end *e = arg;

	(void)err;
	if (strcmp(e->files.all[i].name, e->begin) != 0)
		folder_remove(e, &e->files.all[i]);
	return 0;
}

uint64_t commit_folder_delete(struct store *s, const char *run, const char *attempt, uint64_t *ret_files)
{
	char dir[STORAGE_NAME_MAX], begin[STORAGE_NAME_MAX];
	struct folder_end e = {.s = s, .begin = begin};
	const struct commit_file *last;

	snprintf(dir, sizeof dir, "incoming/%s/%s", run, attempt);
	snprintf(begin, sizeof begin, "incoming/%s/%s/begin", run, attempt);
	if (commit_files_list(s, dir, &e.files, NULL) == 0 && e.files.n <= UINT32_MAX) {
		storage_spread((uint32_t)e.files.n, folder_remove_one, &e, NULL);
		last = commit_files_find(&e.files, begin);
		if (last)
			folder_remove(&e, last);
		s->storage->ops->remove_dir(s->storage, dir);
	}
	commit_files_release(&e.files);
	if (ret_files)
		*ret_files = e.count;
	return e.bytes;
}
