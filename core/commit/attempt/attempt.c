/* SPDX-License-Identifier: Apache-2.0
 *
 * attempt: one writer's share in a save: of a job's rank, or of a writer alone, which is a launch of one rank without a
 * launch entry (launch_work.h). There is no coordinator.
 *
 * An attempt of a job is called after its step (attempt_tries.c), so all ranks that save the step name it alike. Where
 * some of them save other steps than the rest attempt_passed.c ends the attempt in which they part. In order, each
 * durable before the next (invariants 2, 5 and 6); what the model (tests/model) calls it in brackets:
 *
 *     heartbeat; list, launch entry [lau]      launch.c; attempt_alone.c
 *     begin put, or read and compared [come]   attempt_begin.c             the first rank to come puts it
 *     base.<n>, list again [come]              attempt_base.c              before any byte of that commit is reused
 *     packs [pack]                             the caller
 *     part.<rank> [part]                       commit_attempt_announce      of one rank alone: kept in memory
 *     list's next entry polled [wait]          attempt_wait.c
 *     manifest, check, commit entry [com, chk] attempt_commit.c            rank 0, or one that takes over
 *     outcome, abort entry [yes, no, fail]     attempt_outcome.c           before anything announced is deleted
 *     folder deleted                           best effort; the collector does it otherwise
 *
 * The launch's list is opened before `begin` and only refreshed afterwards, so that it knows every entry since, which a
 * snapshot would not show (list.c). Lists of other runs, where bases are, may start from a snapshot: they are asked
 * only what is live now.
 *
 * Lock order: attempt, launch. */
#include "core/commit/attempt/attempt.h"

#include <stdio.h>
#include <string.h>

#include "core/base/array.h"
#include "core/base/clock.h"
#include "core/commit/attempt/attempt_internal.h"

void commit_attempt_rank(struct commit_attempt *a, uint32_t rank) { a->rank = rank; }
const char *commit_attempt_name(const struct commit_attempt *a) { return a->name; }
uint64_t commit_attempt_step(const struct commit_attempt *a) { return a->step; }
bool commit_attempt_announced(const struct commit_attempt *a) { return a->announced; }
bool commit_attempt_undecided(const struct commit_attempt *a) { return !a->decided; }
uint64_t commit_attempt_commit_ns(const struct commit_attempt *a) { return a->commit_ns; }

/* ---- its folder ---- */

/* The folder is durable with its `begin`, before the first pack: a manifest of an attempt that has no folder, and that
 * the list does not decide, shows that entries of the list are lost. What else is in it matters only while its ranks
 * live. */
int commit_attempt_put(struct commit_attempt *a, const char *last, enum store_record_kind kind,
	const struct base_buf *body, struct base_error *err)
{
	char name[STORAGE_NAME_MAX];
	struct storage *s = a->store->storage;
	const uint8_t *id = a->store->info.id;
	int r = body->error;

	snprintf(name, sizeof name, "incoming/%s/%s/%s", a->run, a->name, last);
	if (r == 0)
		r = kind == STORE_RECORD_BEGIN ? store_record_put(s, name, kind, id, body->data, body->len)
			: store_record_put_passing(s, name, kind, id, body->data, body->len);
	if (r == STORAGE_PUT_OTHER)
		r = -EEXIST;
	if (r >= 0 || store_denied(a->store, r, err))
		return r < 0 ? r : 0;
	return base_error_set(err, r, "%s: %s", name, base_error_name(r));
}

void attempt_folder_delete(struct commit_attempt *a)
{
	if (a->begun)
		commit_folder_delete(a->store, a->run, a->name, NULL);
	a->begun = false;
}

/* Makes it durable before anything of this attempt depends on it. */
int attempt_folder_sync(struct commit_attempt *a, struct base_error *err)
{
	char dir[STORAGE_NAME_MAX];
	int r;

	snprintf(dir, sizeof dir, "incoming/%s/%s", a->run, a->name);
	r = a->store->storage->ops->sync_dir(a->store->storage, dir);
	return r < 0 ? base_error_set(err, r, "%s: %s", dir, base_error_name(r)) : 0;
}

/* ---- packs ---- */

/* Has this attempt such a pack already? */
static bool pack_known(const struct commit_attempt *a, const char *name)
{
	uint32_t hash = base_table_hash(name, strlen(name)), i;
	size_t at = 0;

	while ((i = base_table_next(&a->pack_names, hash, &at)) != BASE_TABLE_NONE)
		if (strcmp(a->packs[i].name, name) == 0)
			return true;
	return false;
}

/* The first name that this attempt does not have, from that of `rank` on. */
static int pack_name_next(const struct commit_attempt *a, uint64_t rank, const char *class,
	char name[static PACK_NAME_MAX])
{
	int r;

	do {
		r = rank > UINT32_MAX ? -EOVERFLOW : pack_name_make(a->name, (uint32_t)rank, class, name);
		rank += a->world;
	} while (r == 0 && pack_known(a, name));
	return r;
}

static int pack_room(struct commit_attempt *a)
{
	return a->npacks + 1 >= BASE_TABLE_NONE || base_array_more(a->packs, a->npacks) < 0 ||
		base_table_reserve(&a->pack_names, 1) < 0 ? -ENOMEM : 0;
}

static void pack_remember(struct commit_attempt *a, const char *name, const struct pack_writer *w)
{
	base_table_add(&a->pack_names, base_table_hash(name, strlen(name)), (uint32_t)a->npacks);
	memcpy(a->packs[a->npacks].name, name, PACK_NAME_MAX);
	a->packs[a->npacks++].w = w;
}

/* model: pack. The pack is remembered once the writer is open, because a name alone does not say whose pack has it. */
int commit_attempt_pack_open(struct commit_attempt *a, const char *class, char name[static PACK_NAME_MAX],
	struct pack_writer **ret_w)
{
	int r = pack_name_next(a, a->rank, class, name);

	if (r == 0)
		r = pack_room(a);
	if (r == 0)
		r = pack_writer_open(a->store->storage, a->store->info.id, name, ret_w);
	if (r == 0)
		pack_remember(a, name, *ret_w);
	return r;
}

/* -EEXIST: another writer has put a pack of that name meanwhile. After any other error this one may be there. */
int commit_attempt_pack_seal(struct commit_attempt *a, struct pack_writer *w, uint64_t *ret_size)
{
	size_t i = a->npacks;
	int r;

	while (i > 0 && a->packs[i - 1].w != w) /* one given up earlier may have had the same address */
		i--;
	r = pack_seal(w, ret_size);
	if (i > 0 && r != -EEXIST) /* what has a writer is never deleted */
		a->packs[i - 1].w = NULL;
	return r;
}

int commit_attempt_pack_take(struct commit_attempt *a, const char *from, char name[static PACK_NAME_MAX])
{
	struct pack_name old;
	int r;

	if (pack_name_parse(from, &old) < 0 ||
		pack_name_next(a, (uint64_t)old.rank + a->world, old.class, name) < 0)
		return -ENOENT; /* no further number is left */
	if (pack_room(a) < 0)
		return -ENOMEM;
	r = pack_take(a->store->storage, a->store->info.id, name, from);
	if (r == -EPERM || r == -EACCES)
		return -ENOENT;
	if (r != -ENOMEM && r != -ENOENT && r != -EEXIST) /* after any other error it may be there */
		pack_remember(a, name, NULL);
	return r;
}

/* Call it once the attempt is aborted or has announced nothing: then no one will ever name the packs. A pack that was
 * not sealed has no file; a file of its name is another writer's. */
void commit_attempt_packs_delete(struct commit_attempt *a)
{
	char path[STORAGE_NAME_MAX];
	bool known;

	/* Where entries since its begin were collected, it may have been committed, and its step removed since: later
	 * steps may have its packs. The collector knows. */
	pthread_mutex_lock(&a->launch->lock);
	known = !a->announced || commit_list_first(a->list) <= a->position;
	pthread_mutex_unlock(&a->launch->lock);
	for (size_t i = 0; i < a->npacks && known; i++)
		if (!a->packs[i].w && pack_path(a->packs[i].name, path) == 0)
			storage_remove(a->store->storage, path);
	a->npacks = 0;
	base_table_clear(&a->pack_names);
}

/* ---- announcement ---- */

/* A launch of one rank has no other that could commit, so what it announces stays in memory. No file of it is put:
 * after an error the attempt has no announcement. */
static int announcement_keep(struct commit_attempt *a, const struct base_buf *body)
{
	int r;

	if (!a->announcements && !(a->announcements = calloc(a->world, sizeof *a->announcements)))
		return -ENOMEM;
	if (a->announcements[a->rank].arena)
		return -EEXIST;
	r = proto_announcement_decode(body->data, body->len, &a->announcements[a->rank]);
	if (r < 0)
		return r;
	a->announced_ms = base_monotonic_ms();
	a->announced = ++a->nannouncements == a->world;
	return 0;
}

/* model: part */
int commit_attempt_announce(struct commit_attempt *a, struct proto_announcement *announcement, struct base_error *err)
{
	base_cleanup_buf struct base_buf body = BASE_BUF_INIT;
	struct base_error why = {0};
	char last[32];
	int r;

	if (a->announced || a->decided)
		return base_error_set(err, -EINVAL, "attempt %s was announced or decided already", a->name);
	r = commit_launch_check(a->launch, err);
	if (r < 0)
		return r;
	announcement->run = a->run;
	announcement->attempt = a->name;
	announcement->step = a->step;
	announcement->rank = a->rank;
	announcement->world = a->world;
	announcement->host = store_hostname();
	announcement->commons = a->commons ? a->commons->groups : NULL;
	announcement->ncommons = a->commons ? a->commons->ngroups : 0;
	r = proto_announcement_encode(announcement, &body);
	if (r == 0 && a->launch->world == 1)
		r = announcement_keep(a, &body);
	if (r < 0)
		return base_error_set(err, r, "run %s: the announcement cannot be encoded: %s", a->run,
			base_error_name(r));
	if (a->launch->world == 1)
		return 0;
	a->announced = true; /* also when the put fails: it may have landed */
	snprintf(last, sizeof last, "part.%u", a->launch->rank);
	r = commit_attempt_put(a, last, STORE_RECORD_ANNOUNCEMENT, &body, &why);
	a->announced_ms = base_monotonic_ms();
	if (r < 0) /* it may land yet, and be committed: only the list decides */
		r = attempt_give_up_own(a, r, why.text, NULL, err);
	return r < 0 ? r : 0;
}

int commit_attempt_commit(struct commit_attempt *a, struct proto_announcement *announcement, uint64_t *ret_entry,
	struct base_error *err)
{
	int r = commit_attempt_announce(a, announcement, err);

	return r == 0 || r == -BASE_EUNDECIDED ? commit_attempt_wait(a, -1, ret_entry, err) : r;
}

/* ---- end ---- */

void commit_attempt_free(struct commit_attempt *a)
{
	if (!a)
		return;
	if (!a->launch->alone && commit_launch_check(a->launch, NULL) == 0 && a->begun && !a->announced
	    && !a->decided)
		commit_attempt_abort(a, "it ended without announcing its part", NULL, NULL);
	for (uint32_t i = 0; a->announcements && i < a->world; i++)
		proto_announcement_release(&a->announcements[i]);
	free(a->announcements);
	for (size_t i = 0; i < a->nlists; i++)
		commit_list_close(a->lists[i]);
	free(a->lists);
	free(a->bases);
	free(a->packs);
	base_table_release(&a->pack_names);
	pthread_mutex_destroy(&a->lock);
	commit_launch_attempt_ends(a->launch);
	if (a->owns_launch)
		commit_launch_close(a->launch);
	free(a);
}
