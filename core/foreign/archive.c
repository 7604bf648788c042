/* SPDX-License-Identifier: Apache-2.0
 *
 * A zip archive is read from its end: the end record says where the list of members is (with larger numbers in a zip64
 * end record before it), the list where each member begins. torch's members are small apart from the data, so the
 * first and the last bytes of the range are read once and kept. */
#include "core/foreign/archive.h"

#include <stdlib.h>
#include <string.h>

#include "core/base/array.h"
#include "core/base/cleanup.h"
#include "core/base/le.h"
#include "core/base/table.h"

#define KEPT_BYTES 4096u
#define LIST_MAX_BYTES ((uint64_t)64 << 20)
#define END_BYTES 22u
#define LOCATOR_BYTES 20u
#define END64_BYTES 56u
#define ENTRY_BYTES 46u
#define LOCAL_BYTES 30u

struct member { const char *name; size_t name_len; uint64_t offset, bytes; }; /* offset: in the range */

struct foreign_archive {
	struct foreign_range range;
	uint8_t head[KEPT_BYTES], tail[KEPT_BYTES];
	uint64_t kept;                  /* bytes in each of them */
	uint8_t *list;                  /* the members' names are in it */
	struct member *members; size_t nmembers;
	size_t folder_len;              /* of the folder's name, with its slash */
	struct base_table names;        /* of the members in the folder, without it */
};

static int wrong(struct base_error *err, const char *what)
{
	return base_error_set(err, -BASE_EFORMAT, "not an archive as torch.save writes it: %s", what);
}

/* Exactly len bytes at an offset in the range. */
static int read_at(const struct foreign_archive *a, uint64_t offset, void *bytes, size_t len, struct base_error *err)
{
	if (len > a->range.bytes || offset > a->range.bytes - len)
		return wrong(err, "something is past its end");
	if (!len)
		return 0;
	if (offset + len <= a->kept) {
		memcpy(bytes, a->head + offset, len);
		return 0;
	}
	if (offset >= a->range.bytes - a->kept) {
		memcpy(bytes, a->tail + (offset - (a->range.bytes - a->kept)), len);
		return 0;
	}
	return a->range.read(a->range.arg, a->range.begin + offset, bytes, len, err);
}

/* Numbers too large for the end record are in another one. */
static int read_end64(const struct foreign_archive *a, uint64_t *ret_offset, uint64_t *ret_bytes,
	struct base_error *err)
{
	uint8_t locator[LOCATOR_BYTES], end[END64_BYTES];
	int r;

	if (a->range.bytes < END_BYTES + LOCATOR_BYTES + END64_BYTES)
		return 0;
	r = read_at(a, a->range.bytes - END_BYTES - LOCATOR_BYTES, locator, sizeof locator, err);
	if (r < 0 || base_get32(locator) != 0x07064b50)
		return r;
	r = read_at(a, base_get64(locator + 8), end, sizeof end, err);
	if (r < 0)
		return r;
	if (base_get32(end) != 0x06064b50)
		return wrong(err, "its zip64 end record is missing");
	*ret_bytes = base_get64(end + 40);
	*ret_offset = base_get64(end + 48);
	return 0;
}

static int read_end(const struct foreign_archive *a, uint64_t *ret_offset, uint64_t *ret_bytes, struct base_error *err)
{
	uint8_t end[END_BYTES];
	int r;

	if (a->range.bytes < END_BYTES)
		return wrong(err, "it is too short");
	r = read_at(a, a->range.bytes - END_BYTES, end, sizeof end, err);
	if (r < 0)
		return r;
	if (base_get32(end) != 0x06054b50)
		return wrong(err, "its end record is missing, as if it were cut short");
	*ret_bytes = base_get32(end + 12);
	*ret_offset = base_get32(end + 16);
	return read_end64(a, ret_offset, ret_bytes, err);
}

/* Large numbers of a member: each that is saturated in its entry is in the extra field 1, in this order. */
static int read_extra(const uint8_t *extra, size_t len, uint64_t *numbers[static 3], struct base_error *err)
{
	while (len >= 4) {
		size_t id = base_get16(extra), n = base_get16(extra + 2);

		extra += 4;
		len -= 4;
		if (n > len)
			break;
		for (unsigned i = 0, at = 0; id == 1 && i < 3; i++) {
			if (*numbers[i] != UINT32_MAX)
				continue;
			if (at + 8 > n)
				return wrong(err, "a member's size is missing");
			*numbers[i] = base_get64(extra + at);
			at += 8;
		}
		extra += n;
		len -= n;
	}
	return 0;
}

/* One entry of the list; *ret_len: its bytes. */
static int read_entry(const uint8_t *entry, size_t left, struct member *ret_m, size_t *ret_len, struct base_error *err)
{
	size_t name_len, extra_len, len;
	uint64_t packed, bytes, offset, *numbers[] = {&bytes, &packed, &offset};
	int r;

	if (left < ENTRY_BYTES || base_get32(entry) != 0x02014b50)
		return wrong(err, "its list of members is damaged");
	name_len = base_get16(entry + 28);
	extra_len = base_get16(entry + 30);
	len = ENTRY_BYTES + name_len + extra_len + base_get16(entry + 32);
	packed = base_get32(entry + 20);
	bytes = base_get32(entry + 24);
	offset = base_get32(entry + 42);
	if (len > left)
		return wrong(err, "its list of members is damaged");
	if (base_get16(entry + 8) & 1 || base_get16(entry + 10) != 0)
		return wrong(err, "a member is compressed or encrypted");
	r = read_extra(entry + ENTRY_BYTES + name_len, extra_len, numbers, err);
	if (r < 0)
		return r;
	if (packed != bytes)
		return wrong(err, "a member has two sizes");
	*ret_m = (struct member){(const char *)entry + ENTRY_BYTES, name_len, offset, bytes};
	*ret_len = len;
	return 0;
}

static int read_list(struct foreign_archive *a, struct base_error *err)
{
	uint64_t offset = 0, bytes = 0;
	int r = read_end(a, &offset, &bytes, err);

	if (r < 0)
		return r;
	if (bytes > a->range.bytes || offset > a->range.bytes - bytes || bytes > LIST_MAX_BYTES)
		return wrong(err, "its list of members is not within it");
	a->list = malloc(bytes + 1);
	if (!a->list)
		return base_no_memory(err);
	r = read_at(a, offset, a->list, bytes, err);
	for (size_t at = 0, len = 0; r == 0 && at < bytes; at += len) {
		if (base_array_more(a->members, a->nmembers) < 0)
			return base_no_memory(err);
		r = read_entry(a->list + at, bytes - at, &a->members[a->nmembers], &len, err);
		if (r == 0)
			a->nmembers++;
	}
	return r;
}

/* All members are in one folder, whose name is of no interest. */
static int find_folder(struct foreign_archive *a, struct base_error *err)
{
	const struct member *m = a->members;
	const char *slash = a->nmembers ? memchr(m->name, '/', m->name_len) : NULL;

	if (!slash)
		return wrong(err, "it has no data.pkl");
	a->folder_len = (size_t)(slash + 1 - m->name);
	if (base_table_reserve(&a->names, a->nmembers) < 0)
		return base_no_memory(err);
	for (size_t i = 0; i < a->nmembers; i++) {
		const struct member *other = &a->members[i];

		if (other->name_len >= a->folder_len && !memcmp(other->name, m->name, a->folder_len))
			base_table_add(&a->names, base_table_hash(other->name + a->folder_len,
				other->name_len - a->folder_len), (uint32_t)i);
	}
	return 0;
}

static int keep_ends(struct foreign_archive *a, struct base_error *err)
{
	const struct foreign_range *range = &a->range;
	uint64_t kept = base_min(range->bytes, KEPT_BYTES);
	int r = kept ? range->read(range->arg, range->begin, a->head, kept, err) : 0;

	if (r == 0 && range->bytes > kept)
		r = range->read(range->arg, range->begin + range->bytes - kept, a->tail, kept, err);
	a->kept = r == 0 ? kept : 0;
	return r;
}

int foreign_archive_open(const struct foreign_range *range, struct foreign_archive **ret_a, struct base_error *err)
{
	struct foreign_archive *a = calloc(1, sizeof *a);
	int r = 0;

	if (!a)
		return base_no_memory(err);
	a->range = *range;
	if ((r = keep_ends(a, err)) < 0 || (r = read_list(a, err)) < 0 || (r = find_folder(a, err)) < 0) {
		foreign_archive_close(a);
		return r;
	}
	*ret_a = a;
	return 0;
}

void foreign_archive_close(struct foreign_archive *a)
{
	if (!a)
		return;
	free(a->list);
	free(a->members);
	base_table_release(&a->names);
	free(a);
}

static const struct member *find(const struct foreign_archive *a, const char *name)
{
	size_t len = strlen(name), at = 0;
	const struct member *found = NULL;
	uint32_t hash = base_table_hash(name, len), i;

	while ((i = base_table_next(&a->names, hash, &at)) != BASE_TABLE_NONE) {
		const struct member *m = &a->members[i];

		if (m->name_len == a->folder_len + len && !memcmp(m->name + a->folder_len, name, len) &&
			(!found || m < found))
			found = m;
	}
	return found;
}

int foreign_archive_find(struct foreign_archive *a, const char *name, uint64_t *ret_offset, uint64_t *ret_bytes,
	struct base_error *err)
{
	const struct member *m = find(a, name);
	uint8_t local[LOCAL_BYTES];
	int r;
	uint64_t begin;

	if (!m)
		return base_error_set(err, -ENOENT, "the archive has no member %s", name);
	r = read_at(a, m->offset, local, sizeof local, err);
	if (r < 0)
		return r;
	if (base_get32(local) != 0x04034b50)
		return wrong(err, "a member does not begin where the list says");
	begin = m->offset + LOCAL_BYTES + base_get16(local + 26) + base_get16(local + 28);
	if (m->bytes > a->range.bytes || begin > a->range.bytes - m->bytes)
		return wrong(err, "a member is not within it");
	*ret_offset = a->range.begin + begin;
	*ret_bytes = m->bytes;
	return 0;
}

int foreign_archive_read(struct foreign_archive *a, const char *name, uint64_t most, void **ret_bytes, size_t *ret_len,
	struct base_error *err)
{
	uint64_t offset, len;
	int r = foreign_archive_find(a, name, &offset, &len, err);
	base_cleanup_free void *bytes = NULL;

	if (r < 0)
		return r;
	if (len > most)
		return base_error_set(err, -BASE_ELIMIT, "member %s has more bytes than are read here", name);
	bytes = malloc(len + 1);
	if (!bytes)
		return base_no_memory(err);
	r = read_at(a, offset - a->range.begin, bytes, len, err);
	if (r < 0)
		return r;
	*ret_bytes = base_steal(bytes);
	*ret_len = len;
	return 0;
}
