/* SPDX-License-Identifier: Apache-2.0
 *
 * mend_record: records other than entries.
 *
 *     vckpt.store             its good copy
 *     manifest                its own bytes if only the envelope is damaged, or another store's, or made again from
 *                             announcements that are still in incoming/: its name is the digest of its body, which
 *                             proves what is found
 *     begin, base, part       their attempt is aborted and the folder deleted: no writer is alive
 *     measures                those of a copy; else deleted, since no step needs them
 *     marks, notes, heartbeats, the reserve   deleted: they are made again when they are needed */
#include "core/upkeep/mend_internal.h"

#include <stdio.h>

#include "core/commit/check/manifest_check.h"

/* ---- manifests ---- */

/* 1: the body has the digest, and an action puts it. */
static int manifest_put(struct mend *m, const char *file, const struct base_digest *want, const void *body, size_t len,
	const char *how)
{
	struct base_digest d;
	int r;

	base_digest_of(body, len, &d);
	if (!base_digest_equal(&d, want))
		return 0;
	r = mend_act_record(m, file, STORE_RECORD_MANIFEST, body, len);
	if (r == 0)
		mend_line(m, UPKEEP_MEND_MEND, file, "%s", how);
	return r < 0 ? r : 1;
}

static int manifest_own(struct mend *m, const char *file, const struct base_digest *want)
{
	base_cleanup_free void *bytes = NULL;
	size_t len;

	if (storage_read_whole(m->store->storage, file, store_record_max(STORE_RECORD_MANIFEST) + 4096, &bytes,
			&len) < 0
	    || len < STORE_RECORD_HEAD_BYTES)
		return 0;
	return manifest_put(m, file, want, (uint8_t *)bytes + STORE_RECORD_HEAD_BYTES, len - STORE_RECORD_HEAD_BYTES,
		"written again: only its envelope was damaged");
}

static int record_read(struct store *s, const char *file, enum store_record_kind kind, struct store_record *ret_r)
{
	return store_record_get(s->storage, file, kind, s->info.id, ret_r, NULL, NULL);
}

static int manifest_from(struct mend *m, const char *file, const struct base_digest *want)
{
	struct store_record record = {0};
	char how[200];
	int r = 0;

	if (!m->from || record_read(m->from, file, STORE_RECORD_MANIFEST, &record) < 0)
		return 0;
	snprintf(how, sizeof how, "from %.150s", m->from->path);
	r = manifest_put(m, file, want, record.body, record.len, how);
	store_record_release(&record);
	return r;
}

/* All announcements of a folder, by rank. */
static int parts_read(struct mend *m, const struct commit_incoming *in, struct proto_announcement *all)
{
	char name[STORAGE_NAME_MAX];
	int r = 0;

	for (uint32_t i = 0; r == 0 && i < in->nannounced; i++) {
		struct store_record record = {0};

		snprintf(name, sizeof name, "incoming/%s/%s/part.%u", in->run, in->attempt, i);
		r = record_read(m->store, name, STORE_RECORD_ANNOUNCEMENT, &record);
		if (r == 0)
			r = proto_announcement_decode(record.body, record.len, &all[i]);
		store_record_release(&record);
	}
	return r;
}

/* The manifest that a commit made from what the announcements give; or the one of an older version, which did not say
 * which ranks have which blobs. If a part cannot be read, the announced count of tensors may be the right one. */
static int manifest_completed(struct mend *m, const char *file, const struct base_digest *want,
	struct proto_manifest *man)
{
	static const char *const how = "made anew from the announcements and parts of its ranks";
	base_cleanup_buf struct base_buf body = BASE_BUF_INIT, older = BASE_BUF_INIT;
	struct base_digest d;
	int r = 0;

	if (check_manifest_finish(m->store, man, &body, &d, NULL) == 0)
		r = manifest_put(m, file, want, body.data, body.len, how);
	if (r == 0 && proto_manifest_encode(man, &older) == 0)
		r = manifest_put(m, file, want, older.data, older.len, how);
	return r;
}

static int manifest_of_parts(struct mend *m, const struct commit_incoming *in, const char *file,
	const struct base_digest *want)
{
	struct proto_announcement *all = calloc(in->nannounced + 1, sizeof *all);
	const struct proto_announcement **order = calloc(in->nannounced + 1, sizeof *order);
	base_cleanup_buf struct base_buf made = BASE_BUF_INIT;
	struct proto_manifest man = {0};
	struct base_digest d;
	int r = all && order ? 0 : -ENOMEM;

	for (uint32_t i = 0; r == 0 && i < in->nannounced; i++)
		order[i] = &all[i];
	if (r == 0 && parts_read(m, in, all) == 0
	    && store_manifest_make(order, in->nannounced, &made, &d, NULL) == 0
	    && proto_manifest_decode(made.data, made.len, &man) == 0)
		r = manifest_completed(m, file, want, &man);
	for (uint32_t i = 0; all && i < in->nannounced; i++)
		proto_announcement_release(&all[i]);
	proto_manifest_release(&man);
	free(all);
	free(order);
	return r;
}

static int manifest_made(struct mend *m, const char *run, const char *file, const struct base_digest *want)
{
	struct commit_incoming *all = NULL;
	size_t n = 0;
	int r = commit_incoming_read(m->store, &all, &n, m->err);

	for (size_t i = 0; r == 0 && i < n; i++)
		if (strcmp(all[i].run, run) == 0 && all[i].nannounced)
			r = manifest_of_parts(m, &all[i], file, want);
	commit_incoming_free(all, n);
	return r;
}

/* ---- saves without a writer ---- */

static bool abort_planned(const struct mend *m, const char *run, const char *attempt)
{
	for (size_t i = 0; i < m->nactions; i++)
		if (m->actions[i].kind == MEND_ABORT && !strcmp(m->actions[i].run, run)
		    && !strcmp(m->actions[i].file, attempt))
			return true;
	return false;
}

/* Appends an abort if the list does not mention the attempt. The folder of a decided attempt has no meaning. */
static int attempt_over(struct mend *m, const char *file, const char *run, const char *attempt)
{
	if (abort_planned(m, run, attempt))
		return 1;
	mend_line(m, UPKEEP_MEND_DELETE, file, "the save that it belongs to is aborted");
	return mend_act(m, MEND_ABORT, attempt, run) ? 1 : -ENOMEM;
}

static int manifest_mend(struct mend *m, const struct mend_fault *f, const char *run, const struct base_digest *want)
{
	struct proto_manifest man = {0};
	int r = store_manifest_get(m->store, run, want, &man, NULL);

	if (r == 0 && f->ntouches == 0) {
		r = attempt_over(m, f->file, run, man.attempt);
		proto_manifest_release(&man);
		return r;
	}
	proto_manifest_release(&man);
	if (r == 0 || commit_error_passes(r))
		return 0; /* its bytes are right: what they say is wrong */
	r = manifest_own(m, f->file, want);
	if (r == 0)
		r = manifest_from(m, f->file, want);
	if (r == 0)
		r = manifest_made(m, run, f->file, want);
	if (r == 0 && f->ntouches == 0) {
		r = mend_act(m, MEND_DELETE, f->file, NULL) ? 1 : -ENOMEM;
		mend_line(m, UPKEEP_MEND_DELETE, f->file, "no visible step names it");
	}
	return r;
}

/* ---- other records ---- */

static int upkeep_mend_record(struct mend *m, const char *file)
{
	struct store_record record = {0};
	bool whole;
	int r = store_record_get(m->store->storage, file, STORE_RECORD_STORE, NULL, &record, &whole, NULL);

	if (r < 0 || whole) {
		store_record_release(&record);
		return 0;
	}
	r = mend_act_record(m, file, STORE_RECORD_STORE, record.body, record.len);
	store_record_release(&record);
	mend_line(m, UPKEEP_MEND_MEND, file, "written again from its good copy");
	return r < 0 ? r : 1;
}

static int stats_mend(struct mend *m, const char *file, uint32_t rank)
{
	struct store_record record = {0}, here = {0};
	bool good = record_read(m->store, file, STORE_RECORD_STATS, &here) == 0;
	int r;

	store_record_release(&here);
	if (!good && m->from && memcmp(m->from->info.id, m->store->info.id, 16) == 0
	    && record_read(m->from, file, STORE_RECORD_STATS, &record) == 0) {
		r = mend_act_record(m, file, STORE_RECORD_STATS, record.body, record.len);
		store_record_release(&record);
		mend_line(m, UPKEEP_MEND_MEND, file, "from %s, a copy of this store", m->from->path);
		return r < 0 ? r : 1;
	}
	mend_line(m, UPKEEP_MEND_DELETE, file, "measures of rank %u, which no step needs", rank);
	return mend_act(m, MEND_DELETE, file, NULL) ? 1 : -ENOMEM;
}

/* 1: an action makes it good. */
static int record_mend(struct mend *m, const struct mend_fault *f)
{
	struct file_name n;

	file_name_parse(f->file, &n);
	if (strcmp(f->what, UPKEEP_VERIFY_FOREIGN) == 0)
		return 0;
	if (strncmp(f->file, "incoming/", 9) == 0)
		return n.attempt[0] ? attempt_over(m, f->file, n.run, n.attempt) : 0;
	switch (n.kind) {
	case STORE_RECORD_STORE: return upkeep_mend_record(m, f->file);
	case STORE_RECORD_MANIFEST: return manifest_mend(m, f, n.run, &n.digest);
	case STORE_RECORD_STATS: return stats_mend(m, f->file, n.stats.rank);
	case STORE_RECORD_TRASH: case STORE_RECORD_DAMAGE: case STORE_RECORD_HEARTBEAT: case FILE_RESERVE:
		mend_line(m, UPKEEP_MEND_DELETE, f->file, "vckpt makes it again when it is needed");
		return mend_act(m, MEND_DELETE, f->file, NULL) ? 1 : -ENOMEM;
	}
	return 0;
}

int mend_records(struct mend *m)
{
	int r = 0;

	for (size_t i = 0; r >= 0 && i < m->nfaults; i++) {
		if (m->faults[i].treated || strncmp(m->faults[i].file, "packs/", 6) == 0)
			continue;
		r = record_mend(m, &m->faults[i]);
		if (r > 0)
			mend_treat(m, m->faults[i].file);
	}
	return r < 0 ? r : 0;
}
