/* SPDX-License-Identifier: Apache-2.0
 *
 * Opened steps: opened when something inside a step is first looked up, and kept while memory allows; those unused for
 * longest go first. References keep a step that is in use, whatever the bound says. A step that was evicted and is
 * opened again has the same node ids, since these are a pure function of the step. One thread opens a step while others
 * that need it wait; the lock is not held meanwhile. */
#include <stdio.h>

#include "core/base/clock.h"
#include "core/base/log.h"
#include "fs/mount.h"

#define ABANDONED_MS 50                  /* how often a thread that waits for a step checks fs_request_abandoned */

/* Under runs->lock. Moves the steps unused for longest to `gone`, which is freed without the lock, until the bound
 * holds. */
static void steps_evict(struct fs_runs *runs, struct fs_steps *gone)
{
	struct fs_step *step = TAILQ_LAST(&runs->steps, fs_steps), *next;

	for (; step && runs->steps_bytes > runs->max_bytes; step = next) {
		next = TAILQ_PREV(step, fs_steps, by_use);
		if (step->refs)
			continue;
		TAILQ_REMOVE(&runs->steps, step, by_use);
		TAILQ_INSERT_TAIL(gone, step, by_use);
		step->commit->opened = NULL;
		runs->steps_bytes -= step->memory;
		runs->steps_open--;
		atomic_fetch_add(&runs->steps_evicted, 1);
	}
}

void fs_steps_free(struct fs_steps *steps)
{
	for (struct fs_step *step; (step = TAILQ_FIRST(steps)) != NULL;) {
		TAILQ_REMOVE(steps, step, by_use);
		view_tree_unref(step->tree);
		free(step);
	}
}

/* A copy of the step in the list, with as much as opening it takes: its attributes are the manifest's. */
static int step_of(struct fs_commit *commit, char attempt[static PROTO_ATTEMPT_MAX], struct commit_list_step *ret_step,
	struct base_error *err)
{
	struct fs_run *run = commit->run;
	const struct commit_list_step *s;
	bool there;

	pthread_rwlock_rdlock(&run->lock);
	s = run->list ? commit_list_find(run->list, commit->step) : NULL;
	there = s && s->entry == commit->entry;
	if (there) {
		*ret_step = *s;
		snprintf(attempt, PROTO_ATTEMPT_MAX, "%s", s->commit.attempt);
		ret_step->commit.attempt = attempt;
		ret_step->commit.attributes = NULL;
		ret_step->commit.nattributes = 0;
	}
	pthread_rwlock_unlock(&run->lock);
	return there ? 0 : base_error_set(err, -ESTALE, "removed or replaced");
}

static int step_open(struct fs_runs *runs, struct fs_commit *commit, struct fs_step **ret_step, struct base_error *err)
{
	struct load_step *loaded = NULL;
	struct view_tree *tree = NULL;
	struct commit_list_step entry;
	char attempt[PROTO_ATTEMPT_MAX];
	size_t memory;
	struct fs_step *step;

	int r = step_of(commit, attempt, &entry, err);
	if (!r)
		r = load_step_open(runs->store, commit->run->name, &entry, &loaded, err);
	if (r)
		return r;
	memory = load_step_memory(loaded);
	r = view_tree_build(loaded, runs->show, &tree, err);
	load_step_unref(loaded);  /* the tree keeps its own reference */
	step = r ? NULL : calloc(1, sizeof *step);
	if (!step) {
		view_tree_unref(tree);
		return r ? r : base_no_memory(err);
	}
	*step = (struct fs_step){.commit = commit, .tree = tree,
		.memory = sizeof *step + memory + view_tree_memory(tree)};
	*ret_step = step;
	return 0;
}

static void open_failed(struct fs_commit *commit, int r, bool logged, const struct base_error *err)
{
	char name[FS_STEP_NAME];

	if (r == -ESTALE || logged)
		return;
	fs_step_name(commit->step, name);
	base_warning("%s/%s cannot be opened: %s", commit->run->name, name,
		err->text[0] ? err->text : base_error_name(r));
}

int fs_step_get(struct fs_runs *runs, struct fs_commit *commit, struct fs_step **ret_step)
{
	struct fs_steps gone = TAILQ_HEAD_INITIALIZER(gone);
	struct base_error err = {0};
	struct fs_step *step = NULL;
	int r;
	bool logged;

	pthread_mutex_lock(&runs->lock);
	while (!commit->opened && commit->opening) {
		struct timespec until = base_clock_in_ms(CLOCK_MONOTONIC, ABANDONED_MS);
		pthread_cond_clockwait(&runs->opened, &runs->lock, CLOCK_MONOTONIC, &until);
		if (fs_request_abandoned()) {
			pthread_mutex_unlock(&runs->lock);
			return -EINTR;
		}
	}
	if (commit->opened) {
		step = *ret_step = commit->opened;
		TAILQ_REMOVE(&runs->steps, step, by_use);
		TAILQ_INSERT_HEAD(&runs->steps, step, by_use);
		step->refs++;
		pthread_mutex_unlock(&runs->lock);
		return 0;
	}
	commit->opening = true;
	pthread_mutex_unlock(&runs->lock);

	r = step_open(runs, commit, &step, &err);

	pthread_mutex_lock(&runs->lock);
	commit->opening = false;
	logged = commit->logged;
	if (step) {
		commit->opened = step;
		step->refs = 1;
		TAILQ_INSERT_HEAD(&runs->steps, step, by_use);
		runs->steps_bytes += step->memory;
		runs->steps_open++;
		atomic_fetch_add(&runs->steps_opened, 1);
		steps_evict(runs, &gone);
	} else if (r != -ESTALE) {
		commit->logged = true;
	}
	pthread_cond_broadcast(&runs->opened);
	pthread_mutex_unlock(&runs->lock);
	fs_steps_free(&gone);
	if (r)
		open_failed(commit, r, logged, &err);
	*ret_step = step;
	return r;
}

void fs_step_put(struct fs_runs *runs, struct fs_step *step)
{
	struct fs_steps gone = TAILQ_HEAD_INITIALIZER(gone);

	if (!step)
		return;
	pthread_mutex_lock(&runs->lock);
	if (--step->refs == 0)
		steps_evict(runs, &gone);
	pthread_mutex_unlock(&runs->lock);
	fs_steps_free(&gone);
}

void fs_run_gone(struct fs_run *run, void (*f)(void *arg, struct fs_commit *commit), void *arg)
{
	base_cleanup_free struct fs_commit **gone = NULL;
	size_t n = 0;

	pthread_rwlock_wrlock(&run->lock);
	gone = calloc(run->ncommits + 1, sizeof *gone);
	for (size_t i = 0; gone && i < run->ncommits; i++) {
		struct fs_commit *commit = run->commits[i];
		if (!commit->gone && !commit_list_entry_live(run->list, commit->entry)) {
			commit->gone = true;
			gone[n++] = commit;
		}
	}
	pthread_rwlock_unlock(&run->lock);
	for (size_t i = 0; i < n; i++)
		f(arg, gone[i]);
}
