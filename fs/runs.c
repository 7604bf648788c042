/* SPDX-License-Identifier: Apache-2.0
 *
 * Runs, their lists and the commits that were looked up. A commit_list has one owner: here it is changed only under the
 * run's write lock (when it is first read, and by the refresh thread) and read under the read lock. A struct fs_commit
 * is made when a step is looked up or listed with attributes, and stays until the mount ends: 64 bytes a step. */
#include "fs/runs.h"

#include <stdio.h>
#include <string.h>

#include "core/base/array.h"
#include "core/base/clock.h"
#include "core/base/log.h"

static void run_free(struct fs_run *run)
{
	if (!run)
		return;
	commit_list_close(run->list);
	pthread_rwlock_destroy(&run->lock);
	free(run->commits);
	base_table_release(&run->by_entry);
	free(run->name);
	free(run);
}

int fs_runs_open(struct store *store, uint64_t max_bytes, unsigned show, struct fs_runs **ret_r, struct base_error *err)
{
	struct fs_runs *runs = calloc(1, sizeof *runs);
	int n;

	if (!runs)
		return base_no_memory(err);
	runs->store = store;
	runs->max_bytes = max_bytes;
	runs->show = show;
	runs->ncommits = 1;
	runs->stale_ns = UINT64_MAX;
	pthread_mutex_init(&runs->lock, NULL);
	pthread_cond_init(&runs->opened, NULL);
	TAILQ_INIT(&runs->steps);
	n = fs_runs_scan(runs, err);
	if (n < 0) {
		fs_runs_close(runs);
		return n;
	}
	*ret_r = runs;
	return 0;
}

void fs_runs_close(struct fs_runs *runs)
{
	if (!runs)
		return;
	fs_steps_free(&runs->steps);
	for (uint32_t i = 1; i < runs->ncommits; i++)
		free(runs->commits[i]);
	for (uint32_t i = 0; i < runs->nruns; i++)
		run_free(runs->runs[i]);
	free(runs->commits);
	free(runs->runs);
	base_table_release(&runs->by_name);
	pthread_cond_destroy(&runs->opened);
	pthread_mutex_destroy(&runs->lock);
	free(runs);
}

/* Under runs->lock. */
static struct fs_run *run_named(const struct fs_runs *runs, const char *name, uint32_t hash)
{
	size_t at = 0;
	uint32_t i;

	while ((i = base_table_next(&runs->by_name, hash, &at)) != BASE_TABLE_NONE)
		if (strcmp(runs->runs[i]->name, name) == 0)
			return runs->runs[i];
	return NULL;
}

static struct fs_run *run_by_name(struct fs_runs *runs, const char *name)
{
	struct fs_run *found;

	pthread_mutex_lock(&runs->lock);
	found = run_named(runs, name, base_table_hash(name, strlen(name)));
	pthread_mutex_unlock(&runs->lock);
	return found;
}

/* Under runs->lock. 0: there is one of that name already; 1: it is in the table. */
static int run_put(struct fs_runs *runs, struct fs_run *run)
{
	uint32_t hash = base_table_hash(run->name, strlen(run->name));

	if (run_named(runs, run->name, hash))
		return 0;
	if (runs->nruns >= FS_RUNS_MAX)
		return -ENOSPC;
	if (base_array_room(runs->runs, runs->runs_size, (size_t)runs->nruns + 1) < 0 ||
		base_table_reserve(&runs->by_name, 1) < 0)
		return -ENOMEM;
	run->number = runs->nruns;
	base_table_add(&runs->by_name, hash, run->number);
	runs->runs[runs->nruns++] = run;
	return 1;
}

/* 1: it is new; 0: it is known already. */
static int run_add(struct fs_runs *runs, const char *name)
{
	struct fs_run *run = calloc(1, sizeof *run);
	char *copy = strdup(name);
	int r;

	if (!run || !copy) {
		free(run);
		free(copy);
		return -ENOMEM;
	}
	run->name = copy;
	run->ino = base_xxh64_of(0, name, strlen(name)) | 2;  /* never 0 or 1 */
	pthread_rwlock_init(&run->lock, NULL);
	pthread_mutex_lock(&runs->lock);
	r = run_put(runs, run);
	pthread_mutex_unlock(&runs->lock);
	if (r <= 0)
		run_free(run);
	return r;
}

int fs_runs_scan(struct fs_runs *runs, struct base_error *err)
{
	char **names;
	size_t n;
	int found = 0;

	int r = commit_runs(runs->store, &names, &n, err);
	if (r < 0)
		return r;
	for (size_t i = 0; i < n && r >= 0; i++)
		if (proto_run_valid(names[i]) && !run_by_name(runs, names[i])) {
			r = run_add(runs, names[i]);
			found += r > 0;
		}
	commit_runs_free(names, n);
	if (r == -ENOSPC)
		return base_error_set(err, r, "the store has more than %u runs, which is all that a mount shows",
			FS_RUNS_MAX);
	return r < 0 ? base_no_memory_for(err, "the list of runs") : found;
}

/* Asks the store for one run that is not known yet, without a scan: a program may ask over and over for a name that
 * does not exist. */
static int run_look(struct fs_runs *runs, const char *name, struct fs_run **ret_run)
{
	char path[STORAGE_NAME_MAX];
	uint64_t size;
	int r;

	snprintf(path, sizeof path, "runs/%s", name);
	r = storage_size(runs->store->storage, path, &size);
	if (r == 0 || storage_not_a_file(r)) /* something other than a directory counts as a run that cannot be read */
		r = run_add(runs, name);
	*ret_run = r < 0 ? NULL : run_by_name(runs, name);
	return r < 0 ? r : 0;
}

uint32_t fs_runs_count(struct fs_runs *runs)
{
	uint32_t n;

	pthread_mutex_lock(&runs->lock);
	n = runs->nruns;
	pthread_mutex_unlock(&runs->lock);
	return n;
}

struct fs_run *fs_runs_at(struct fs_runs *runs, uint32_t number)
{
	struct fs_run *run;

	pthread_mutex_lock(&runs->lock);
	run = number < runs->nruns ? runs->runs[number] : NULL;
	pthread_mutex_unlock(&runs->lock);
	return run;
}

static void run_log(struct fs_run *run, const char *what, const struct base_error *err)
{
	if (!atomic_exchange(&run->logged, true))
		base_warning("run %s: %s: %s", run->name, what, err->text[0] ? err->text : base_error_name(err->code));
}

int fs_run_ready(struct fs_runs *runs, struct fs_run *run)
{
	struct base_error err = {0};
	struct commit_list *list = NULL;
	bool ready;
	int r;

	pthread_rwlock_rdlock(&run->lock);
	ready = run->list;
	pthread_rwlock_unlock(&run->lock);
	if (ready)
		return 0;
	/* held across the read: all others that need this run have to wait for its list anyway */
	pthread_rwlock_wrlock(&run->lock);
	r = run->list ? 0 : commit_list_open(runs->store, run->name, false, &list, &err);
	if (list)
		run->list = list;
	run->failed = r < 0 ? r : 0;
	pthread_rwlock_unlock(&run->lock);
	if (r < 0)
		run_log(run, "its list cannot be read", &err);
	else if (list)
		fs_runs_wake(runs);
	return r < 0 ? r : 0;
}

int fs_run_refresh(struct fs_run *run)
{
	struct base_error err = {0};
	int r;

	pthread_rwlock_wrlock(&run->lock);
	r = run->list ? commit_list_refresh(run->list, &err) : 0;
	pthread_rwlock_unlock(&run->lock);
	if (r < 0)
		run_log(run, "new entries of its list cannot be read", &err);
	return r;
}

void fs_runs_asked(struct fs_runs *runs)
{
	uint64_t stale = atomic_load_explicit(&runs->stale_ns, memory_order_relaxed);

	if (base_monotonic_ns() >= stale && atomic_compare_exchange_strong(&runs->stale_ns, &stale, UINT64_MAX))
		fs_runs_wake(runs);
}

int fs_runs_find(struct fs_runs *runs, const char *name, struct fs_run **ret_run)
{
	struct fs_run *run;
	int r;

	if (!proto_run_valid(name))
		return -ENOENT;
	run = run_by_name(runs, name);
	r = run ? 0 : run_look(runs, name, &run);
	if (!r)
		r = fs_run_ready(runs, run);
	if (r)
		return r;
	*ret_run = run;
	return fs_run_steps(run) ? 0 : -ENOENT;
}

size_t fs_run_steps(struct fs_run *run)
{
	size_t n;

	pthread_rwlock_rdlock(&run->lock);
	n = run->list ? commit_list_count(run->list) : 0;
	pthread_rwlock_unlock(&run->lock);
	return n;
}

bool fs_run_latest(struct fs_run *run, uint64_t *ret_step, int64_t *ret_time_ns)
{
	const struct commit_list_step *latest;

	pthread_rwlock_rdlock(&run->lock);
	latest = run->list ? commit_list_latest(run->list) : NULL;
	if (latest) {
		*ret_step = latest->step;
		*ret_time_ns = latest->commit.time_ns;
	}
	pthread_rwlock_unlock(&run->lock);
	return latest;
}

/* Under run->lock. */
static int tags_copy(const struct fs_run *run, struct fs_tag **ret_tags, size_t *ret_n)
{
	base_cleanup_free struct commit_list_tag *tags = NULL;
	size_t n = 0;

	if (run->list && commit_list_tags(run->list, &tags, &n) < 0)
		return -ENOMEM;
	*ret_n = n;
	*ret_tags = calloc(n + 1, sizeof **ret_tags);
	for (size_t i = 0; *ret_tags && i < n; i++)
		snprintf((*ret_tags)[i].name, sizeof (*ret_tags)[i].name, "%s", tags[i].tag);
	return *ret_tags ? 0 : -ENOMEM;
}

int fs_run_snapshot(struct fs_run *run, uint64_t **ret_steps, size_t *ret_n, struct fs_tag **ret_tags,
	size_t *ret_ntags)
{
	uint64_t *steps;
	size_t n;
	int r;

	*ret_tags = NULL;
	*ret_ntags = 0;
	pthread_rwlock_rdlock(&run->lock);
	n = run->list ? commit_list_count(run->list) : 0;
	steps = calloc(n + 1, sizeof *steps);
	for (size_t i = 0; steps && i < n; i++)
		steps[i] = commit_list_at(run->list, i)->step;
	r = tags_copy(run, ret_tags, ret_ntags);
	pthread_rwlock_unlock(&run->lock);
	*ret_steps = steps;
	*ret_n = steps ? n : 0;
	return steps ? r : -ENOMEM;
}

/* ---- commits ---- */

/* Under run->lock. */
static struct fs_commit *commit_find(const struct fs_run *run, uint64_t entry)
{
	uint32_t hash = base_table_hash_number(entry), i;
	size_t at = 0;

	while ((i = base_table_next(&run->by_entry, hash, &at)) != BASE_TABLE_NONE)
		if (run->commits[i]->entry == entry)
			return run->commits[i];
	return NULL;
}

static int commit_append(struct fs_runs *runs, struct fs_commit *commit)
{
	int r;

	pthread_mutex_lock(&runs->lock);
	r = runs->ncommits < FS_COMMITS_MAX ? 0 : -ENFILE;
	if (!r)
		r = base_array_room(runs->commits, runs->commits_size, (size_t)runs->ncommits + 1);
	if (!r) {
		commit->number = runs->ncommits;
		runs->commits[runs->ncommits++] = commit;
	}
	pthread_mutex_unlock(&runs->lock);
	return r;
}

/* Under run->lock for writing. */
static int commit_make(struct fs_runs *runs, struct fs_run *run, const struct commit_list_step *s,
	struct fs_commit **ret_commit)
{
	uint8_t identity[16];
	struct fs_commit *commit;
	int r;

	if (base_array_more(run->commits, run->ncommits) < 0 || base_table_reserve(&run->by_entry, 1) < 0)
		return -ENOMEM;
	commit = calloc(1, sizeof *commit);
	if (!commit)
		return -ENOMEM;
	base_put64(identity, s->entry);
	memcpy(identity + 8, s->commit.manifest.bytes, 8);
	*commit = (struct fs_commit){.run = run, .entry = s->entry, .step = s->step, .time_ns = s->commit.time_ns,
		.ino = base_xxh64_of(run->ino, identity, sizeof identity) | 2};
	r = commit_append(runs, commit);
	if (r) {
		free(commit);
		return r;
	}
	base_table_add(&run->by_entry, base_table_hash_number(commit->entry), (uint32_t)run->ncommits);
	run->commits[run->ncommits++] = commit;
	*ret_commit = commit;
	return 0;
}

int fs_run_commit(struct fs_runs *runs, struct fs_run *run, uint64_t step, struct fs_commit **ret_commit)
{
	struct fs_commit *commit = NULL;
	int r = -ENOENT;
	const struct commit_list_step *s;

	pthread_rwlock_rdlock(&run->lock);
	s = run->list ? commit_list_find(run->list, step) : NULL;
	if (s)
		commit = commit_find(run, s->entry);
	pthread_rwlock_unlock(&run->lock);
	if (!commit && s) {
		pthread_rwlock_wrlock(&run->lock);
		s = commit_list_find(run->list, step);
		if (s)
			commit = commit_find(run, s->entry);
		if (s && !commit)
			r = commit_make(runs, run, s, &commit);
		pthread_rwlock_unlock(&run->lock);
	}
	*ret_commit = commit;
	return commit ? 0 : r;
}

int fs_run_tagged(struct fs_runs *runs, struct fs_run *run, const char *tag, struct fs_commit **ret_commit)
{
	const struct commit_list_step *s;
	uint64_t step = 0;

	pthread_rwlock_rdlock(&run->lock);
	s = run->list ? commit_list_tagged(run->list, tag) : NULL;
	if (s)
		step = s->step;
	pthread_rwlock_unlock(&run->lock);
	return s ? fs_run_commit(runs, run, step, ret_commit) : -ENOENT;
}

int fs_commit_said(struct fs_commit *commit, int (*f)(void *arg, const struct proto_step_facts *facts), void *arg)
{
	struct fs_run *run = commit->run;
	int r;

	pthread_rwlock_rdlock(&run->lock);
	r = f(arg, run->list ? commit_list_facts(run->list, commit->entry) : NULL);
	pthread_rwlock_unlock(&run->lock);
	return r;
}

struct fs_commit *fs_runs_commit(struct fs_runs *runs, uint32_t number)
{
	struct fs_commit *commit;

	pthread_mutex_lock(&runs->lock);
	commit = number && number < runs->ncommits ? runs->commits[number] : NULL;
	pthread_mutex_unlock(&runs->lock);
	return commit;
}

bool fs_commit_live(struct fs_commit *commit)
{
	bool live;

	pthread_rwlock_rdlock(&commit->run->lock);
	live = commit->run->list && commit_list_entry_live(commit->run->list, commit->entry);
	pthread_rwlock_unlock(&commit->run->lock);
	return live;
}

void fs_step_name(uint64_t step, char name[static FS_STEP_NAME])
{
	snprintf(name, FS_STEP_NAME, "step-%08llu", (unsigned long long)step);
}

bool fs_step_parse(const char *name, uint64_t *ret_step)
{
	char again[FS_STEP_NAME];

	if (strncmp(name, "step-", 5) != 0 || name[5] < '0' || name[5] > '9' || strlen(name) >= FS_STEP_NAME)
		return false;
	errno = 0;
	*ret_step = strtoull(name + 5, NULL, 10);
	if (errno || *ret_step > INT64_MAX)
		return false;
	fs_step_name(*ret_step, again);
	return strcmp(name, again) == 0;
}
