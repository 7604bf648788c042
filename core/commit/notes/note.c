/* SPDX-License-Identifier: Apache-2.0
 *
 * note: notes of damage. A note is a small record damaged/<pack>, replaced whole when more is found, deleted when
 * nothing is. If two write one at once, the last one stays, and the next verify adds what is missing. A note that is
 * lost or wrong costs a save some reuse, or lets a step refer to damaged bytes, as without notes; every reader finds
 * those. So nothing waits for a note, and no lock protects one. */
#include "core/commit/notes/note.h"

#include <stdio.h>

#include "core/base/array.h"
#include "core/base/bisect.h"
#include "core/base/cleanup.h"
#include "core/base/log.h"
#include "core/commit/list/list.h"

#define NOTE_FOLDER "damaged"

bool commit_note_name_parse(const char *file, char pack[static PACK_NAME_MAX])
{
	struct pack_name name;
	const char *base = file + sizeof NOTE_FOLDER;

	if (strncmp(file, NOTE_FOLDER "/", sizeof NOTE_FOLDER) != 0 || strlen(base) >= PACK_NAME_MAX ||
		pack_name_parse(base, &name) < 0)
		return false;
	strcpy(pack, base);
	return true;
}

/* ---- ranges ---- */

static int range_compare(const void *a, const void *b)
{
	const struct proto_range *x = a, *y = b;

	return (x->offset > y->offset) - (x->offset < y->offset);
}

static size_t ranges_whole(struct proto_range *ranges)
{
	ranges[0] = (struct proto_range){0, 0};
	return 1;
}

/* Sorts and joins what touches. Returns how many are left; too many become the whole pack. */
static size_t ranges_join(struct proto_range *ranges, size_t n)
{
	size_t kept = 0;

	for (size_t i = 0; i < n; i++)
		if (ranges[i].len == 0 || ranges[i].offset > INT64_MAX || ranges[i].len > INT64_MAX - ranges[i].offset)
			return ranges_whole(ranges);
	if (n)
		qsort(ranges, n, sizeof *ranges, range_compare);
	for (size_t i = 0; i < n; i++) {
		struct proto_range *last = kept ? &ranges[kept - 1] : NULL;

		if (last && ranges[i].offset <= last->offset + last->len)
			last->len = base_max(last->offset + last->len, ranges[i].offset + ranges[i].len) - last->offset;
		else
			ranges[kept++] = ranges[i];
	}
	return kept > PROTO_RANGES_MAX ? ranges_whole(ranges) : kept;
}

static bool range_hits(const struct proto_range *range, uint64_t offset, uint64_t len)
{
	return range->len == 0 || (offset < range->offset + range->len && range->offset < offset + len);
}

/* ---- reading ---- */

/* 0; -ENOENT; -ENOMEM; else the note cannot be read. ret_ranges is malloc'ed. */
static int note_read(struct store *s, const char *pack, struct proto_range **ret_ranges, uint32_t *ret_n)
{
	struct proto_damage m = {0};
	char name[STORAGE_NAME_MAX];
	int r;

	snprintf(name, sizeof name, NOTE_FOLDER "/%s", pack);
	r = store_record_load(s, name, STORE_RECORD_DAMAGE, proto_damage_decode, &m, "", NULL);
	if (r == 0 && strcmp(m.pack, pack) != 0)
		r = -BASE_EFORMAT;
	if (r == 0) {
		*ret_ranges = malloc(m.nranges * sizeof **ret_ranges);
		*ret_n = m.nranges;
		if (*ret_ranges)
			memcpy(*ret_ranges, m.ranges, m.nranges * sizeof **ret_ranges);
		else
			r = -ENOMEM;
	}
	proto_damage_release(&m);
	return r;
}

struct listing { struct store *store; struct commit_notes *notes; };

static int note_listed(void *arg, const struct storage_entry *e)
{
	struct listing *l = arg;
	struct commit_note note = {.nranges = 1};
	int r;

	if (e->foreign || e->temporary || !commit_note_name_parse(e->name, note.pack))
		return 0;
	r = note_read(l->store, note.pack, &note.ranges, &note.nranges);
	if (r == -ENOENT)
		return 0;
	if (r < 0 && r != -ENOMEM) { /* what it named is not known: it may have been the whole pack */
		note.ranges = calloc(1, sizeof *note.ranges);
		note.nranges = 1;
	}
	if (base_array_more(l->notes->all, l->notes->n) < 0 || !note.ranges) {
		free(note.ranges);
		return -ENOMEM;
	}
	l->notes->all[l->notes->n++] = note;
	return 0;
}

static int note_compare(const void *a, const void *b)
{
	return strcmp(((const struct commit_note *)a)->pack, ((const struct commit_note *)b)->pack);
}

int commit_notes_read(struct store *s, struct commit_notes *ret_notes)
{
	struct listing l = {s, ret_notes};
	int r;

	*ret_notes = (struct commit_notes){0};
	r = storage_list_files(s->storage, NOTE_FOLDER, note_listed, &l);
	if (r < 0 && r != -ENOMEM) {
		base_warning("%s/" NOTE_FOLDER " cannot be listed: %s; this save writes all its data anew",
			s->path, base_error_name(r));
		ret_notes->unknown = true;
		r = 0;
	}
	if (ret_notes->n)
		qsort(ret_notes->all, ret_notes->n, sizeof *ret_notes->all, note_compare);
	return r;
}

void commit_notes_release(struct commit_notes *notes)
{
	for (size_t i = 0; i < notes->n; i++)
		free(notes->all[i].ranges);
	free(notes->all);
	*notes = (struct commit_notes){0};
}

static const struct commit_note *notes_find(const struct commit_notes *notes, const char *pack)
{
	int64_t at = base_search(i, 0, notes->n, strcmp(notes->all[i].pack, pack));

	return at < 0 ? NULL : &notes->all[at];
}

bool commit_notes_name(const struct commit_notes *notes, const char *pack, const struct pack_object_ref *ref)
{
	uint64_t checks = pack_object_checks_bytes(ref->codec, ref->raw_len);
	const struct commit_note *note;

	if (!notes || notes->unknown)
		return notes != NULL;
	note = notes->n ? notes_find(notes, pack) : NULL;
	for (uint32_t i = 0; note && i < note->nranges; i++)
		if (range_hits(&note->ranges[i], ref->offset, ref->stored_len) ||
			range_hits(&note->ranges[i], ref->checks, checks))
			return true;
	return false;
}

/* ---- writing ---- */

static int note_write(struct store *s, const char *name, const char *pack, const struct proto_range *ranges, size_t n)
{
	base_cleanup_buf struct base_buf body = BASE_BUF_INIT, file = BASE_BUF_INIT;
	struct proto_damage m = {.pack = pack, .ranges = ranges, .nranges = (uint32_t)n};
	int r = proto_damage_encode(&m, &body);

	if (r == 0)
		r = store_record_encode(STORE_RECORD_DAMAGE, s->info.id, body.data, body.len, &file);
	return r < 0 ? r : storage_replace(s->storage, name, file.data, file.len);
}

int commit_note_put(struct store *s, const char *pack, const struct proto_range *ranges, size_t n, bool all,
	struct base_error *err)
{
	base_cleanup_free struct proto_range *before = NULL, *both = NULL;
	uint32_t nbefore = 0;
	char name[STORAGE_NAME_MAX];
	size_t total;
	int r = note_read(s, pack, &before, &nbefore);

	snprintf(name, sizeof name, NOTE_FOLDER "/%s", pack);
	if (r == -BASE_EVERSION || (r == 0 && n == 0 && !all))
		return 0; /* a note of a newer vckpt counts for the whole pack, and is left as it is */
	if (!all && commit_error_passes(r)) /* it still names what it named: nothing takes its place unread */
		return base_error_set(err, r, "%s cannot be read: %s", name, base_error_name(r));
	both = malloc((n + nbefore + 1) * sizeof *both);
	if (!both || r == -ENOMEM)
		return base_no_memory_for(err, "%s", name);
	if (n)
		memcpy(both, ranges, n * sizeof *both);
	if (!all && nbefore)
		memcpy(both + n, before, nbefore * sizeof *both);
	total = ranges_join(both, n + (all ? 0 : nbefore));
	if (!all && r < 0 && r != -ENOENT) /* what the damaged one named is not known */
		total = ranges_whole(both);
	if (r == 0 && total == nbefore && memcmp(both, before, total * sizeof *both) == 0)
		return 0; /* it says so */
	if (total > 0)
		r = note_write(s, name, pack, both, total);
	else if (r != -ENOENT)
		r = storage_remove(s->storage, name);
	else
		r = 0;
	if (r >= 0 || r == -ENOENT)
		return 0;
	if (store_denied(s, r, err))
		return r;
	return base_error_set(err, r, "%s cannot be written: %s", name, base_error_name(r));
}
