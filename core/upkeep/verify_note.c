/* SPDX-License-Identifier: Apache-2.0
 *
 * verify_note: leaves notes of damage in packs for writers (note.h). After a whole store the notes say what was found
 * now and nothing else; after single steps it is added to the notes. */
#include "core/upkeep/verify_internal.h"

#include "core/base/log.h"
#include "core/commit/notes/note.h"

/* Faults of packs, by file. Packs of a newer vckpt are among them: their notes are left as they are. */
struct by_file { const struct verify_fault **all; size_t n; };

static int file_order(const void *a, const void *b)
{
	return strcmp((*(const struct verify_fault *const *)a)->file, (*(const struct verify_fault *const *)b)->file);
}

static int by_file_make(const struct verify *v, struct by_file *ret_b)
{
	ret_b->n = 0;
	ret_b->all = calloc(v->nfaults + 1, sizeof(const struct verify_fault *));
	if (!ret_b->all)
		return -ENOMEM;
	for (size_t i = 0; i < v->nfaults; i++)
		if (v->faults[i].pack && !v->faults[i].gone)
			ret_b->all[ret_b->n++] = &v->faults[i];
	if (ret_b->n)
		qsort(ret_b->all, ret_b->n, sizeof(const struct verify_fault *), file_order);
	return 0;
}

/* Nothing is known of a pack that this user may not read; savers that may read it must not take it for damaged. */
static bool pack_denied(const struct verify *v, const char *pack)
{
	struct pack *p;
	int r = pack_open(v->store->storage, v->store->info.id, pack, 0, &p, NULL);

	if (r == 0)
		pack_close(p);
	return r == -EACCES || r == -EPERM;
}

/* The faults of one file. */
static int note_pack(struct verify *v, const struct verify_fault *const *faults, size_t nfaults, struct base_error *err)
{
	base_cleanup_free struct proto_range *ranges = calloc(nfaults, sizeof *ranges);
	struct file_name name;
	size_t n = 0;

	if (!ranges)
		return -ENOMEM;
	for (size_t i = 0; i < nfaults; i++)
		if (!faults[i]->newer)
			ranges[n++] = (struct proto_range){faults[i]->offset, faults[i]->len};
	if (n == 0 || file_name_parse(faults[0]->file, &name) != FILE_PACK || pack_denied(v, name.pack))
		return 0;
	return commit_note_put(v->store, name.pack, ranges, n, !v->o->run, err);
}

static bool pack_has_fault(const struct by_file *b, const char *pack)
{
	char file[STORAGE_NAME_MAX];
	const struct verify_fault like = {.file = file}, *at = &like;

	return b->n && pack_path(pack, file) == 0
		&& bsearch(&at, b->all, b->n, sizeof(const struct verify_fault *), file_order);
}

/* Deletes notes of packs that have no fault any more, or that are gone. */
static int forget_old(struct verify *v, const struct by_file *b, struct base_error *err)
{
	struct commit_notes notes;
	int r = commit_notes_read(v->store, &notes);

	for (size_t i = 0; r == 0 && i < notes.n; i++)
		if (!pack_has_fault(b, notes.all[i].pack))
			r = commit_note_put(v->store, notes.all[i].pack, NULL, 0, true, err);
	commit_notes_release(&notes);
	return r;
}

int verify_note(struct verify *v)
{
	struct base_error err = {0};
	struct by_file b;
	int r = by_file_make(v, &b);

	for (size_t i = 0, next; r == 0 && i < b.n; i = next) {
		next = i + 1;
		while (next < b.n && strcmp(b.all[next]->file, b.all[i]->file) == 0)
			next++;
		r = note_pack(v, b.all + i, next - i, &err);
	}
	if (r == 0 && !v->o->run)
		r = forget_old(v, &b, &err);
	free(b.all);
	if (r == -ENOMEM)
		return r;
	if (r < 0)
		base_warning("%s: damage could not be noted for later saves: %s", v->store->path,
			err.code ? err.text : base_error_name(r));
	return 0;
}
