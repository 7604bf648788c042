/* SPDX-License-Identifier: Apache-2.0
 *
 * attempt_base: the commits whose data an attempt may use again. Each is named by a file base.<n> in the attempt's
 * folder, and then its run's list is read again: so the collector sees the name before it can have deleted anything, or
 * the attempt sees that the commit is gone. */
#include <stdio.h>

#include "core/base/array.h"
#include "core/commit/attempt/attempt_internal.h"

#define BASE_TRIES 8192u

/* ---- the file ---- */

/* Is that the body of base.<n>? 1, 0, -ENOENT or another error. */
static int base_same(struct commit_attempt *a, const char *last, const struct base_buf *body)
{
	struct store_record record = {0};
	char name[STORAGE_NAME_MAX];
	int r;

	snprintf(name, sizeof name, "incoming/%s/%s/%s", a->run, a->name, last);
	r = store_record_get(a->store->storage, name, STORE_RECORD_BASE, a->store->info.id, &record, NULL, NULL);
	if (r == 0)
		r = record.len == body->len && memcmp(record.body, body->data, body->len) == 0;
	store_record_release(&record);
	return r;
}

/* If another rank has named it already, its file serves, once it is durable. */
static int base_put(struct commit_attempt *a, const struct base_buf *body, struct base_error *err)
{
	for (unsigned i = 0; i < BASE_TRIES; i++) {
		char last[32];
		int r;

		snprintf(last, sizeof last, "base.%u", a->next_base);
		r = base_same(a, last, body);
		if (r == 1)
			return attempt_folder_sync(a, err);
		if (r == -ENOENT) {
			r = commit_attempt_put(a, last, STORE_RECORD_BASE, body, err);
			if (r == 0)
				a->next_base++;
			if (r != -EEXIST)
				return r;
			continue; /* another rank was faster: look at what it says */
		}
		if (r < 0 && commit_error_passes(r)) /* the next number would not answer either */
			return base_error_set(err, r, "attempt %s: %s cannot be read: %s", a->name, last,
				base_error_name(r));
		a->next_base++; /* another base, or one that cannot be read: the collector will say so */
	}
	return base_error_set(err, -BASE_ELIMIT, "attempt %s: base.0 to base.%u are all taken", a->name,
		BASE_TRIES - 1);
}

/* ---- the list ---- */

/* The list of another run, read to its end after the base was named. */
static int base_list(struct commit_attempt *a, const char *run, struct commit_list **ret_l,
	struct base_error *err)
{
	int r;

	for (size_t i = 0; i < a->nlists; i++)
		if (strcmp(commit_list_run(a->lists[i]), run) == 0) {
			*ret_l = a->lists[i];
			r = commit_list_refresh(*ret_l, err);
			return r < 0 ? r : 0;
		}
	if (base_array_more(a->lists, a->nlists) < 0)
		return base_no_memory_for(err, "run %s", run);
	r = commit_list_open_newest(a->store, run, &a->lists[a->nlists], err);
	if (r == 0)
		*ret_l = a->lists[a->nlists++];
	return r;
}

static bool base_live(const struct commit_list *l, uint64_t entry, const struct base_digest *manifest)
{
	uint64_t step = commit_list_commit_step(l, entry);
	const struct commit_list_step *now = step == PROTO_NONE ? NULL : commit_list_find(l, step);

	return now && now->entry == entry && base_digest_equal(&now->commit.manifest, manifest);
}

/* The base is named. Is its commit still visible? The list of the attempt's own run is the launch's. */
static int base_look(struct commit_attempt *a, const struct attempt_base *b, bool *ret_gone, struct base_error *err)
{
	bool own = strcmp(b->run, a->run) == 0;
	struct commit_list *l = a->list;
	int r;

	if (own)
		pthread_mutex_lock(&a->launch->lock);
	r = own ? commit_list_refresh(l, err) : base_list(a, b->run, &l, err);
	if (r >= 0)
		r = commit_list_know_entry(l, b->entry, err);
	if (r >= 0)
		r = commit_list_sync(l, err);
	*ret_gone = r == 0 && !base_live(l, b->entry, &b->manifest);
	if (own)
		pthread_mutex_unlock(&a->launch->lock);
	return r;
}

/* model: begin. Named first, then looked at again (rule BASE). The attempt's lock is held. */
static int base_name(struct commit_attempt *a, const struct attempt_base *b, bool *ret_gone, struct base_error *err)
{
	struct proto_base_record m = {.base = {.run = b->run, .entry = b->entry, .manifest = b->manifest}};
	base_cleanup_buf struct base_buf body = BASE_BUF_INIT;
	int r = proto_base_encode(&m, &body);

	if (r < 0)
		return base_error_set(err, r, "run %s: the name of a base cannot be encoded: %s", a->run,
			base_error_name(r));
	if (!a->launch->alone)
		a->next_base = 0; /* a rank that named it earlier may have any number */
	r = base_put(a, &body, err);
	return r < 0 ? r : base_look(a, b, ret_gone, err);
}

int commit_attempt_base(struct commit_attempt *a, const char *run, uint64_t entry, const struct base_digest *manifest,
	struct base_error *err)
{
	struct attempt_base b = {.entry = entry, .manifest = *manifest};
	bool known = false;
	int r = 0;

	if (!proto_run_valid(run))
		return base_error_set(err, -EINVAL, "\"%s\" is not the name of a run", run);
	if ((r = commit_launch_check(a->launch, err)) < 0)
		return r;
	snprintf(b.run, sizeof b.run, "%s", run);
	pthread_mutex_lock(&a->lock);
	for (size_t i = 0; !known && i < a->nbases; i++)
		if (a->bases[i].entry == entry && strcmp(a->bases[i].run, run) == 0 &&
			base_digest_equal(&a->bases[i].manifest, manifest)) {
			b.gone = a->bases[i].gone;
			known = true;
		}
	if (!known) {
		bool room = base_array_more(a->bases, a->nbases) == 0;

		r = room ? base_name(a, &b, &b.gone, err) : base_no_memory_for(err, "run %s", a->run);
		if (room) {
			b.gone |= r < 0; /* base.<n> may be there: its number is used up, its data is not used */
			a->bases[a->nbases++] = b;
		}
	}
	pthread_mutex_unlock(&a->lock);
	if (r < 0)
		return r;
	return b.gone
		? base_error_set(err, -ESTALE, "run %s: the step of commit entry %llu is not visible any more", run,
			(unsigned long long)entry)
		: 0;
}
