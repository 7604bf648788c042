/* SPDX-License-Identifier: Apache-2.0
 *
 * note: what verify found damaged in a pack, for writers (docs/format/store.md, `damaged/<pack>`). A save neither
 * trusts nor refers to anything that a note names, so that damaged data is stored anew. Readers do not use notes,
 * because they check every block anyway. Plain data: read it once, share it between threads. */
#ifndef CORE_COMMIT_NOTES_NOTE_H
#define CORE_COMMIT_NOTES_NOTE_H

#include "core/step/store.h"

struct commit_note { char pack[PACK_NAME_MAX]; struct proto_range *ranges; uint32_t nranges; };
struct commit_notes {
	struct commit_note *all; size_t n;       /* by pack */
	bool unknown;                           /* they cannot be listed: any pack may be damaged */
};
/* One listing, and one read a note. A note that cannot be read counts for its whole pack. If the listing fails,
 * `unknown` is set and a warning logged. -ENOMEM. Release it whatever it returns. */
int commit_notes_read(struct store *s, struct commit_notes *ret_notes);
void commit_notes_release(struct commit_notes *notes);
/* Does a note name any of the object's bytes or checks? */
bool commit_notes_name(const struct commit_notes *notes, const char *pack, const struct pack_object_ref *ref);

/* Notes damage of a pack: ranges in any order; a range of length 0 means the whole pack. `all`: the ranges are all that
 * is wrong with the pack, and replace the old note (no ranges: it is deleted). Else they are added to the old note. If
 * that note is damaged, the new one is of the whole pack; if it cannot be read now, it stays, and the error is
 * returned. Durable on return. */
int commit_note_put(struct store *s, const char *pack, const struct proto_range *ranges, size_t n, bool all,
	struct base_error *err);
/* Finds the pack that a file damaged/<pack> speaks of; false: that is not the name of a note. */
bool commit_note_name_parse(const char *file, char pack[static PACK_NAME_MAX]);

#endif
