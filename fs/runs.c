/* SPDX-License-Identifier: Apache-2.0
 *
 * Runs, their lists and slots. A store_list has one owner: here it is changed under the run's write lock only
 * (reading it the first time, and the refresh thread), and read under the read lock. Slots are made when a step is
 * looked up or listed with attributes, and are never freed: 64 bytes a step. */
#include "fs/runs.h"

#include <stdio.h>
#include <string.h>

#include "core/base/array.h"
#include "core/base/log.h"

static void run_free(struct fs_run *run)
{
	if (!run)
		return;
	store_list_close(run->list);
	pthread_rwlock_destroy(&run->lock);
	free(run->slots);
	base_table_release(&run->by_entry);
	free(run->name);
	free(run);
}

int fs_runs_open(struct store *store, uint64_t max_bytes, unsigned show, struct fs_runs **ret_r, struct base_error *err)
{
	struct fs_runs *r = calloc(1, sizeof *r);

	if (!r)
		return base_no_memory(err);
	r->store = store;
	r->max_bytes = max_bytes;
	r->show = show;
	r->nslots = 1;
	pthread_mutex_init(&r->lock, NULL);
	pthread_cond_init(&r->opened, NULL);
	int n = fs_runs_scan(r, err);
	if (n < 0) {
		fs_runs_close(r);
		return n;
	}
	*ret_r = r;
	return 0;
}

void fs_runs_close(struct fs_runs *r)
{
	if (!r)
		return;
	while (r->oldest) {
		struct fs_step *step = r->oldest;
		r->oldest = step->newer;
		view_tree_unref(step->tree);
		free(step);
	}
	for (uint32_t i = 1; i < r->nslots; i++)
		free(r->slots[i]);
	for (uint32_t i = 0; i < r->nruns; i++)
		run_free(r->runs[i]);
	free(r->slots);
	free(r->runs);
	pthread_cond_destroy(&r->opened);
	pthread_mutex_destroy(&r->lock);
	free(r);
}

static struct fs_run *run_by_name(struct fs_runs *r, const char *name)
{
	struct fs_run *found = NULL;

	pthread_mutex_lock(&r->lock);
	for (uint32_t i = 0; i < r->nruns && !found; i++)
		if (strcmp(r->runs[i]->name, name) == 0)
			found = r->runs[i];
	pthread_mutex_unlock(&r->lock);
	return found;
}

static int run_add(struct fs_runs *r, const char *name)
{
	struct fs_run *run = calloc(1, sizeof *run);
	char *copy = strdup(name);

	if (!run || !copy) {
		free(run);
		free(copy);
		return -ENOMEM;
	}
	run->name = copy;
	run->ino = base_xxh64_of(0, name, strlen(name)) | 2;  /* never 0 or 1 */
	pthread_rwlock_init(&run->lock, NULL);
	pthread_mutex_lock(&r->lock);
	int result = r->nruns < FS_RUNS_MAX ? 0 : -ENOSPC;
	if (!result)
		result = base_array_room(r->runs, r->runs_size, (size_t)r->nruns + 1);
	if (!result) {
		run->number = r->nruns;
		r->runs[r->nruns++] = run;
	}
	pthread_mutex_unlock(&r->lock);
	if (result)
		run_free(run);
	return result;
}

int fs_runs_scan(struct fs_runs *r, struct base_error *err)
{
	static pthread_mutex_t one = PTHREAD_MUTEX_INITIALIZER;  /* two scans would add a run twice */
	char **names;
	size_t n;
	int found = 0;

	int result = store_runs(r->store, &names, &n, err);
	if (result < 0)
		return result;
	pthread_mutex_lock(&one);
	for (size_t i = 0; i < n && result >= 0; i++)
		if (proto_run_valid(names[i]) && !run_by_name(r, names[i])) {
			result = run_add(r, names[i]);
			found += result == 0;
		}
	pthread_mutex_unlock(&one);
	store_runs_free(names, n);
	if (result == -ENOSPC)
		return base_error_set(err, result, "the store has more than %u runs, which is all that a mount shows",
			FS_RUNS_MAX);
	return result < 0 ? base_no_memory_for(err, "the list of runs") : found;
}

uint32_t fs_runs_count(struct fs_runs *r)
{
	pthread_mutex_lock(&r->lock);
	uint32_t n = r->nruns;
	pthread_mutex_unlock(&r->lock);
	return n;
}

struct fs_run *fs_runs_at(struct fs_runs *r, uint32_t number)
{
	pthread_mutex_lock(&r->lock);
	struct fs_run *run = number < r->nruns ? r->runs[number] : NULL;
	pthread_mutex_unlock(&r->lock);
	return run;
}

static void run_log(struct fs_run *run, const char *what, const struct base_error *err)
{
	if (!atomic_exchange(&run->logged, true))
		base_warning("run %s: %s: %s", run->name, what, err->text[0] ? err->text : base_error_name(err->code));
}

int fs_run_ready(struct fs_runs *r, struct fs_run *run)
{
	struct base_error err = {0};
	struct store_list *list = NULL;

	pthread_rwlock_rdlock(&run->lock);
	bool ready = run->list;
	pthread_rwlock_unlock(&run->lock);
	if (ready)
		return 0;
	/* held across the read: whoever else wants this run must wait for its list anyway */
	pthread_rwlock_wrlock(&run->lock);
	int result = run->list ? 0 : store_list_open(r->store, run->name, false, &list, &err);
	if (list)
		run->list = list;
	run->failed = result < 0 ? result : 0;
	pthread_rwlock_unlock(&run->lock);
	if (result < 0)
		run_log(run, "its list cannot be read", &err);
	else if (list && r->wake)
		r->wake(r->wake_arg);
	return result < 0 ? result : 0;
}

int fs_run_refresh(struct fs_runs *r, struct fs_run *run)
{
	struct base_error err = {0};
	(void)r;

	pthread_rwlock_wrlock(&run->lock);
	int result = run->list ? store_list_refresh(run->list, &err) : 0;
	pthread_rwlock_unlock(&run->lock);
	if (result < 0)
		run_log(run, "new entries of its list cannot be read", &err);
	return result;
}

int fs_runs_find(struct fs_runs *r, const char *name, struct fs_run **ret_run)
{
	if (!proto_run_valid(name))
		return -ENOENT;
	struct fs_run *run = run_by_name(r, name);
	/* perhaps a new one: failed look-ups are asked again and again only by programs that wait for it */
	if (!run) {
		int found = fs_runs_scan(r, NULL);
		run = found > 0 ? run_by_name(r, name) : NULL;
		if (!run)
			return found < 0 ? found : -ENOENT;
	}
	int result = fs_run_ready(r, run);
	if (result)
		return result;
	*ret_run = run;
	return fs_run_steps(run) ? 0 : -ENOENT;
}

size_t fs_run_steps(struct fs_run *run)
{
	pthread_rwlock_rdlock(&run->lock);
	size_t n = run->list ? store_list_count(run->list) : 0;
	pthread_rwlock_unlock(&run->lock);
	return n;
}

bool fs_run_latest(struct fs_run *run, uint64_t *ret_step, int64_t *ret_time_ns)
{
	pthread_rwlock_rdlock(&run->lock);
	const struct store_list_step *latest = run->list ? store_list_latest(run->list) : NULL;
	if (latest) {
		*ret_step = latest->step;
		*ret_time_ns = latest->commit.time_ns;
	}
	pthread_rwlock_unlock(&run->lock);
	return latest;
}

int fs_run_snapshot(struct fs_run *run, struct fs_run_step **ret_steps, size_t *ret_n)
{
	pthread_rwlock_rdlock(&run->lock);
	size_t n = run->list ? store_list_count(run->list) : 0;
	struct fs_run_step *steps = calloc(n + 1, sizeof *steps);
	for (size_t i = 0; steps && i < n; i++) {
		const struct store_list_step *s = store_list_at(run->list, i);
		steps[i] = (struct fs_run_step){ s->step, s->entry };
	}
	pthread_rwlock_unlock(&run->lock);
	*ret_steps = steps;
	*ret_n = n;
	return steps ? 0 : -ENOMEM;
}

/* ---- slots ---- */

/* Under run->lock. */
static struct fs_slot *slot_find(const struct fs_run *run, uint64_t entry)
{
	uint32_t hash = base_table_hash_number(entry), i;
	size_t at = 0;

	while ((i = base_table_next(&run->by_entry, hash, &at)) != BASE_TABLE_NONE)
		if (run->slots[i]->entry == entry)
			return run->slots[i];
	return NULL;
}

static int slot_append(struct fs_runs *r, struct fs_slot *slot)
{
	int result;

	pthread_mutex_lock(&r->lock);
	result = base_array_room(r->slots, r->slots_size, (size_t)r->nslots + 1);
	if (!result) {
		slot->number = r->nslots;
		r->slots[r->nslots++] = slot;
	}
	pthread_mutex_unlock(&r->lock);
	return result;
}

/* Under run->lock for writing. */
static int slot_make(struct fs_runs *r, struct fs_run *run, const struct store_list_step *s, struct fs_slot **ret_slot)
{
	uint8_t identity[16];

	if (base_array_more(run->slots, run->nslots) < 0 || base_table_reserve(&run->by_entry, 1) < 0)
		return -ENOMEM;
	struct fs_slot *slot = calloc(1, sizeof *slot);
	if (!slot)
		return -ENOMEM;
	base_put64(identity, s->entry);
	memcpy(identity + 8, s->commit.manifest.bytes, 8);
	*slot = (struct fs_slot){ .run = run, .entry = s->entry, .step = s->step, .time_ns = s->commit.time_ns,
		.ino = base_xxh64_of(run->ino, identity, sizeof identity) | 2 };
	int result = slot_append(r, slot);
	if (result) {
		free(slot);
		return result;
	}
	base_table_add(&run->by_entry, base_table_hash_number(slot->entry), (uint32_t)run->nslots);
	run->slots[run->nslots++] = slot;
	*ret_slot = slot;
	return 0;
}

int fs_run_slot(struct fs_runs *r, struct fs_run *run, uint64_t step, struct fs_slot **ret_slot)
{
	struct fs_slot *slot = NULL;
	int result = -ENOENT;

	pthread_rwlock_rdlock(&run->lock);
	const struct store_list_step *s = run->list ? store_list_find(run->list, step) : NULL;
	if (s)
		slot = slot_find(run, s->entry);
	pthread_rwlock_unlock(&run->lock);
	if (!slot && s) {
		pthread_rwlock_wrlock(&run->lock);
		s = store_list_find(run->list, step);
		if (s)
			slot = slot_find(run, s->entry);
		if (s && !slot)
			result = slot_make(r, run, s, &slot);
		pthread_rwlock_unlock(&run->lock);
	}
	*ret_slot = slot;
	return slot ? 0 : result;
}

struct fs_slot *fs_runs_slot(struct fs_runs *r, uint32_t number)
{
	pthread_mutex_lock(&r->lock);
	struct fs_slot *slot = number && number < r->nslots ? r->slots[number] : NULL;
	pthread_mutex_unlock(&r->lock);
	return slot;
}

bool fs_slot_live(struct fs_slot *slot)
{
	pthread_rwlock_rdlock(&slot->run->lock);
	bool live = slot->run->list && store_list_entry_live(slot->run->list, slot->entry);
	pthread_rwlock_unlock(&slot->run->lock);
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
