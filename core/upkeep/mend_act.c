/* SPDX-License-Identifier: Apache-2.0
 *
 * mend_act: what mending does, one action after another. Only one order matters, in which they were planned: a list's
 * entries are accepted before steps are committed in it again. Each action looks again at what is there by then. */
#include "core/base/array.h"
#include "core/base/clock.h"
#include "core/commit/list/list_facts.h"
#include "core/upkeep/mend_pack.h"

#include <stdio.h>

struct mend_action *mend_act(struct mend *m, enum mend_kind kind, const char *file, const char *run)
{
	struct mend_action *a;

	if (base_array_more(m->actions, m->nactions) < 0)
		return NULL;
	a = &m->actions[m->nactions];
	*a = (struct mend_action){
		.kind = kind, .file = file ? strdup(file) : NULL, .run = run ? strdup(run) : NULL};
	if ((file && !a->file) || (run && !a->run)) {
		free(a->file);
		free(a->run);
		return NULL;
	}
	m->nactions++;
	return a;
}

int mend_act_record(struct mend *m, const char *file, enum store_record_kind kind, const void *body, size_t len)
{
	struct mend_action *a = mend_act(m, MEND_PUT, file, NULL);
	const uint8_t *id = kind == STORE_RECORD_STORE ? NULL : m->store->info.id;

	return a ? store_record_encode(kind, id, body, len, &a->bytes) : -ENOMEM;
}

void mend_actions_release(struct mend *m)
{
	for (size_t i = 0; i < m->nactions; i++) {
		free(m->actions[i].file);
		free(m->actions[i].run);
		free(m->actions[i].numbers);
		base_buf_release(&m->actions[i].bytes);
		mend_pack_free(m->actions[i].pack);
	}
	free(m->actions);
	m->actions = NULL;
	m->nactions = 0;
}

/* ---- lists ---- */

static int do_accept(struct mend *m, const struct mend_action *a)
{
	struct commit_list *l;
	int64_t n = commit_list_open(m->store, a->run, true, &l, m->err);

	if (n < 0)
		return (int)n;
	n = commit_list_accept(l, a->numbers, a->n, m->err);
	if (n == -ENOSPC || n == -EDQUOT) {
		store_reserve_release(m->store);
		n = commit_list_accept(l, a->numbers, a->n, m->err);
	}
	commit_list_close(l);
	return n < 0 ? (int)n : 0;
}

/* Aborts an attempt that the list does not mention and that has no writer any more. */
static int attempt_end(struct store *s, struct commit_list *l, const char *attempt, struct base_error *err)
{
	char reason[160];
	uint64_t entry;
	int r;

	if (commit_list_attempt(l, attempt, NULL, NULL) != COMMIT_ATTEMPT_UNDECIDED)
		return 0;
	snprintf(reason, sizeof reason, "the list entry that decided this save is lost (vckpt mend on %s)",
		store_hostname());
	r = commit_attempt_stop(s, l, attempt, reason, &entry, err);
	return r == -EALREADY || r > 0 ? 0 : r;
}

static int do_abort(struct mend *m, const struct mend_action *a)
{
	struct commit_list *l;
	int r = commit_list_open(m->store, a->run, true, &l, m->err);

	if (r < 0)
		return r;
	r = attempt_end(m->store, l, a->file, m->err);
	if (r == 0) /* it is decided: its folder has no meaning any more */
		commit_folder_delete(m->store, a->run, a->file, NULL);
	commit_list_close(l);
	return r;
}

static int step_free(void *arg, struct commit_list *l)
{
	return commit_list_find(l, *(const uint64_t *)arg) ? -EEXIST : 0;
}

/* Makes the step's manifest again for a new attempt, because the old one is decided, or may be. */
static int commit_make(struct mend *m, const struct mend_action *a, const char *attempt, struct proto_manifest *man,
	char old[static PROTO_ATTEMPT_MAX], struct proto_commit *ret_c)
{
	base_cleanup_buf struct base_buf body = BASE_BUF_INIT;
	int r = store_manifest_get(m->store, a->run, &a->manifest, man, m->err);

	if (r < 0)
		return r;
	snprintf(old, PROTO_ATTEMPT_MAX, "%s", man->attempt);
	man->attempt = attempt;
	man->new_bytes = 0; /* this attempt has no packs of its own */
	*ret_c = (struct proto_commit){.step = a->step, .attempt = attempt, .replaces = PROTO_NONE,
		.time_ns = a->time_ns ? a->time_ns : base_realtime_ns(), .tensors = man->tensors, .bytes = man->bytes,
		.attributes = man->attributes, .nattributes = man->nattributes};
	r = proto_manifest_encode(man, &body);
	if (r < 0)
		return base_error_set(m->err, r, "run %s, step %llu: %s", a->run, (unsigned long long)a->step,
			base_error_name(r));
	base_digest_of(body.data, body.len, &ret_c->manifest);
	r = store_manifest_check_packs(m->store, man, m->err);
	return r < 0 ? r : store_manifest_put(m->store, a->run, &body, &ret_c->manifest, m->err);
}

/* What entry a->said says of the lost commit, for the one that takes its place, but for tags that other steps have. 1:
 * it is in *ret_f, and *e has the texts; 0: nothing. */
static int commit_said(struct mend *m, const struct mend_action *a, const struct commit_list *l, struct proto_entry *e,
	struct proto_step_facts *ret_f, const char ***ret_tags)
{
	const struct proto_step_facts *f;
	size_t n = 0;

	if (a->said == PROTO_NONE || !m->store->info.list_4 || mend_entry_read(m->store, a->run, a->said, e) < 0)
		return 0;
	f = e->commit.facts;
	for (size_t i = 0; i < e->facts.nsteps && !f; i++)
		if (e->facts.steps[i].entry == a->entry)
			f = &e->facts.steps[i];
	*ret_tags = f ? calloc(f->ntags + 1, sizeof **ret_tags) : NULL;
	if (!*ret_tags)
		return f ? base_no_memory(m->err) : 0;
	*ret_f = *f;
	for (size_t i = 0; i < f->ntags; i++)
		if (!commit_list_tagged(l, f->tags[i]))
			(*ret_tags)[n++] = f->tags[i];
	ret_f->entry = PROTO_NONE;
	ret_f->tags = *ret_tags;
	ret_f->ntags = n;
	return 1;
}

static int do_commit(struct mend *m, const struct mend_action *a)
{
	struct proto_entry e = {.kind = PROTO_ENTRY_COMMIT, .time_ns = base_realtime_ns(), .host = store_hostname()};
	char attempt[PROTO_ATTEMPT_MAX], old[PROTO_ATTEMPT_MAX] = "";
	base_cleanup_free const char **tags = NULL;
	struct proto_manifest man = {0};
	struct proto_step_facts facts;
	struct proto_entry said = {0};
	struct commit_list *l;
	uint64_t random, step = a->step;
	int64_t n;

	n = base_random(&random, sizeof random);
	if (n < 0)
		return base_error_set(m->err, (int)n, "run %s: no random number for an attempt: %s", a->run,
			base_error_name((int)n));
	snprintf(attempt, sizeof attempt, "%016llx-0", (unsigned long long)random);
	n = commit_list_open(m->store, a->run, true, &l, m->err);
	if (n < 0)
		return (int)n;
	n = commit_make(m, a, attempt, &man, old, &e.commit);
	if (n == 0)
		n = commit_said(m, a, l, &said, &facts, &tags);
	e.commit.facts = n > 0 ? &facts : NULL;
	if (n >= 0)
		n = commit_list_put(l, &e, step_free, &step, m->err);
	if (n >= 0 || n == -EEXIST) /* so that the list decides the old attempt, too */
		n = attempt_end(m->store, l, old, m->err);
	commit_list_close(l);
	proto_entry_release(&said);
	proto_manifest_release(&man);
	return n < 0 ? (int)n : 0;
}

/* A pin cannot keep what is gone. */
static int step_unpin(struct mend *m, const struct mend_action *a)
{
	const struct commit_facts_change unpin = {.step = a->step, .entry = PROTO_NONE, .pin = -1};
	struct commit_list *l;
	int r;

	if (!m->store->info.list_4)
		return 0;
	r = commit_list_open_newest(m->store, a->run, &l, m->err);
	if (r < 0)
		return r;
	r = commit_list_facts_change(l, &unpin, m->err);
	commit_list_close(l);
	return r;
}

static int do_remove(struct mend *m, const struct mend_action *a)
{
	int r = step_unpin(m, a);

	if (r >= 0)
		r = commit_step_remove(m->store, a->run, a->step, "its manifest is gone", m->err);
	return r == -ENOENT || r == -ESTALE ? 0 : r;
}

/* ---- all ---- */

static int do_delete(struct mend *m, const struct mend_action *a)
{
	int r = storage_remove(m->store->storage, a->file);

	if (r == 0 || r == -ENOENT)
		return 0;
	if (store_denied(m->store, r, m->err))
		return r;
	return base_error_set(m->err, r, "%s cannot be deleted: %s", a->file, base_error_name(r));
}

static int do_put(struct mend *m, const struct mend_action *a)
{
	int r = storage_replace(m->store->storage, a->file, a->bytes.data, a->bytes.len);

	if (r >= 0 || store_denied(m->store, r, m->err))
		return r < 0 ? r : 0;
	return base_error_set(m->err, r, "%s cannot be written: %s", a->file, base_error_name(r));
}

int mend_apply(struct mend *m)
{
	int r = 0;

	for (size_t i = 0; r == 0 && i < m->nactions; i++) {
		const struct mend_action *a = &m->actions[i];

		switch (a->kind) {
		case MEND_PUT: r = do_put(m, a); break;
		case MEND_ACCEPT: r = do_accept(m, a); break;
		case MEND_COMMIT: r = do_commit(m, a); break;
		case MEND_REMOVE: r = do_remove(m, a); break;
		case MEND_ABORT: r = do_abort(m, a); break;
		case MEND_DELETE: r = do_delete(m, a); break;
		case MEND_PACK: r = mend_image_write(m, a->pack); break;
		}
	}
	store_reserve_restore(m->store);
	return r;
}
