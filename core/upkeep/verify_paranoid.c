/* SPDX-License-Identifier: Apache-2.0
 *
 * verify_paranoid: what is reported of a stranger's store only. An unknown field is no damage (a later version may have
 * added it), but nothing has checked what it says: it is reported as a newer vckpt's. An unfinished file may be honest,
 * too; here it is a fault. */
#include "core/upkeep/verify_internal.h"

#include <stdio.h>

#define SAME(name) _Static_assert((int)PROTO_BODY_##name == (int)STORE_RECORD_##name, "they share their numbers")
SAME(STORE);
SAME(ENTRY);
SAME(MANIFEST);
SAME(BEGIN);
SAME(BASE);
SAME(ANNOUNCEMENT);
SAME(HEARTBEAT);
SAME(TRASH);
SAME(STATS);
SAME(DAMAGE);

bool verify_unknown(enum proto_body kind, const void *body, size_t len, char text[static VERIFY_SAYS_MAX])
{
	char field[PROTO_UNKNOWN_BYTES];

	int r = proto_unknown(kind, body, len, field);

	if (r == 0)
		return false;
	if (r < 0)
		snprintf(text, VERIFY_SAYS_MAX, "it could not be searched for fields that this vckpt does not know: %s",
			base_error_name(r));
	else
		snprintf(text, VERIFY_SAYS_MAX, "it has a field that this vckpt does not know and did not check: %s",
			field);
	return true;
}

void verify_paranoid_record(struct verify *v, const char *name, enum store_record_kind kind, const char *run,
	const struct store_record *rec)
{
	enum proto_body body = kind == STORE_RECORD_MARK ? PROTO_BODY_ENTRY : (enum proto_body)kind;
	char text[VERIFY_SAYS_MAX];

	if (v->o->paranoid && verify_unknown(body, rec->body, rec->len, text))
		verify_fault(v, (struct verify_fault){
			.file = name, .what = text, .newer = true, .run = run});
}

bool verify_class_holds(const char *class, uint8_t kind)
{
	bool meta = strcmp(class, "meta") == 0, blobs = strcmp(class, "blobs") == 0;

	return kind == PACK_OBJECT_PIECE ? !meta && !blobs : kind == PACK_OBJECT_BLOB ? blobs || meta : meta;
}

const char *verify_paranoid_file(const struct commit_file *file)
{
	if (file->foreign)
		return UPKEEP_VERIFY_FOREIGN;
	if (file->temporary)
		return "an unfinished file: its writer was killed or is at work, and what it holds is not known";
	if (strncmp(file->name, "index/", 6) == 0 && strncmp(file->name, "index/index.mdb", 15) != 0 &&
		strncmp(file->name, "index/steps.mdb", 15) != 0 && strncmp(file->name, "index/digests.mdb", 17) != 0 &&
		strcmp(file->name, "index/data.mdb") != 0 && strcmp(file->name, "index/lock.mdb") != 0)
		return UPKEEP_VERIFY_FOREIGN;
	return NULL;
}
