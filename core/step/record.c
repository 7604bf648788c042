/* SPDX-License-Identifier: Apache-2.0
 *
 * record: the envelope of small files. The digest covers the store's id, so that a file of another store never passes.
 * It is checked first: version and kind are read only in a copy whose digest is right, so damage is never taken for a
 * newer version. */
#include "core/step/record.h"

#include <string.h>

#include "core/base/cleanup.h"
#include "proto/message.h"

enum { RECORD_HALF_ALIGN = 4096, RECORD_DIGEST_AT = 16, RECORD_ID_BYTES = 16 };
static const char record_magic[8] = { 'V', 'C', 'K', 'P', 'T', 'R', 'E', 'C' };

uint64_t store_record_max(enum store_record_kind kind)
{
	switch (kind) {
	case STORE_RECORD_STORE: return UINT64_C(64) << 10;
	case STORE_RECORD_ENTRY: return UINT64_C(64) << 20; /* a snapshot names every live step */
	case STORE_RECORD_MANIFEST: return UINT64_C(256) << 20;
	case STORE_RECORD_BEGIN: return UINT64_C(1) << 20;
	case STORE_RECORD_BASE: return UINT64_C(1) << 20;
	case STORE_RECORD_ANNOUNCEMENT: return UINT64_C(64) << 20;
	case STORE_RECORD_HEARTBEAT: return UINT64_C(1) << 20;
	case STORE_RECORD_TRASH: return UINT64_C(1) << 20;
	case STORE_RECORD_STATS: return UINT64_C(16) << 20;
	case STORE_RECORD_DAMAGE: return UINT64_C(2) << 20;
	case STORE_RECORD_MARK: return UINT64_C(64) << 20; /* as an entry: it is a snapshot */
	}
	return 0;
}

/* Are there two copies of it? */
static bool record_is_double(enum store_record_kind kind)
{
	return kind == STORE_RECORD_STORE || kind == STORE_RECORD_ENTRY || kind == STORE_RECORD_MARK;
}

void store_record_release(struct store_record *record)
{
	if (!record)
		return;
	free(record->body);
	*record = (struct store_record){ 0 };
}

/* SHA-256(magic..len | store id or zeros | body) */
static void record_digest(const uint8_t head[RECORD_DIGEST_AT], const uint8_t *id, const void *body, size_t len,
	struct base_digest *ret_d)
{
	uint8_t before[RECORD_DIGEST_AT + RECORD_ID_BYTES] = { 0 };

	memcpy(before, head, RECORD_DIGEST_AT);
	if (id)
		memcpy(before + RECORD_DIGEST_AT, id, RECORD_ID_BYTES);
	base_sha256_after(before, sizeof before, body, len, ret_d);
}

int store_record_encode(
	enum store_record_kind kind, const uint8_t id[16], const void *body, size_t len, struct base_buf *ret_file)
{
	uint64_t max = store_record_max(kind), half;
	uint8_t head[RECORD_DIGEST_AT];
	struct base_digest digest;

	if (max == 0)
		return -EINVAL;
	if (len > max)
		return -BASE_ELIMIT;
	memcpy(head, record_magic, 8);
	base_put16(head + 8, STORE_RECORD_VERSION);
	base_put16(head + 10, (uint16_t)kind);
	base_put32(head + 12, (uint32_t)len);
	record_digest(head, id, body, len, &digest);
	half = record_is_double(kind) ? base_align(STORE_RECORD_HEAD_BYTES + len, RECORD_HALF_ALIGN) : 0;
	for (int copy = 0; copy < (half ? 2 : 1); copy++) {
		base_buf_append(ret_file, head, sizeof head);
		base_buf_append(ret_file, &digest, sizeof digest);
		base_buf_append(ret_file, body, len);
		if (half)
			base_buf_append_zero(ret_file, half - STORE_RECORD_HEAD_BYTES - len);
	}
	return ret_file->error;
}

struct copy { const uint8_t *body; uint64_t len; unsigned version, kind; };

/* Is this a good copy, with the right digest? 0, else -EBADMSG. */
static int copy_parse(const uint8_t *id, const uint8_t *at, uint64_t room, struct copy *ret_c)
{
	struct base_digest digest;

	if (room < STORE_RECORD_HEAD_BYTES || memcmp(at, record_magic, 8) != 0)
		return -BASE_EDAMAGED;
	*ret_c = (struct copy){ at + STORE_RECORD_HEAD_BYTES, base_get32(at + 12), base_get16(at + 8),
		base_get16(at + 10) };
	if (ret_c->len > room - STORE_RECORD_HEAD_BYTES)
		return -BASE_EDAMAGED;
	record_digest(at, id, ret_c->body, ret_c->len, &digest);
	return memcmp(at + RECORD_DIGEST_AT, &digest, sizeof digest) == 0 ? 0 : -BASE_EDAMAGED;
}

/* Finds the good copy to use: of a double record the second one where the first is damaged. */
static int find_copy(enum store_record_kind kind, const uint8_t *id, const uint8_t *file, size_t len,
	struct copy *ret_c)
{
	int r = copy_parse(id, file, len, ret_c);

	if (!record_is_double(kind))
		return r == 0 && ret_c->len != len - STORE_RECORD_HEAD_BYTES ? -BASE_EDAMAGED : r;
	if (r == -BASE_EDAMAGED && len % (2 * RECORD_HALF_ALIGN) == 0)
		return copy_parse(id, file + len / 2, len / 2, ret_c); /* in the middle of a file of its right length */
	return r;
}

/* Is a file that has a good copy byte for byte what a writer of this version makes? */
static bool file_is_whole(enum store_record_kind kind, const uint8_t *file, size_t len, const struct copy *c)
{
	uint64_t half = base_align(STORE_RECORD_HEAD_BYTES + c->len, RECORD_HALF_ALIGN);

	if (!record_is_double(kind))
		return true;
	if (c->body != file + STORE_RECORD_HEAD_BYTES || len != 2 * half || memcmp(file, file + half, half) != 0)
		return false;
	for (uint64_t i = STORE_RECORD_HEAD_BYTES + c->len; i < half; i++)
		if (file[i] != 0)
			return false;
	return true;
}

static int decode_copy(enum store_record_kind kind, const uint8_t id[16], const uint8_t *file, size_t len,
	struct copy *ret_c, bool *ret_whole)
{
	int r = find_copy(kind, id, file, len, ret_c);

	if (r < 0)
		return r;
	if (ret_c->version != STORE_RECORD_VERSION)
		return -BASE_EVERSION;
	if (ret_c->kind != (unsigned)kind || store_record_max(kind) == 0 || ret_c->len > store_record_max(kind))
		return -BASE_EFORMAT; /* no kind at all has the maximum 0 */
	if (ret_whole)
		*ret_whole = file_is_whole(kind, file, len, ret_c);
	return 0;
}

int store_record_decode(enum store_record_kind kind, const uint8_t id[16], const void *file, size_t len,
	struct store_record *ret_r, bool *ret_whole)
{
	struct copy c = { 0 };
	uint8_t *body;
	int r = decode_copy(kind, id, file, len, &c, ret_whole);

	if (r < 0)
		return r;
	body = malloc(c.len + 1); /* and a NUL, for callers that print it */
	if (!body)
		return -ENOMEM;
	memcpy(body, c.body, c.len);
	body[c.len] = 0;
	*ret_r = (struct store_record){ kind, body, c.len };
	return 0;
}

int store_record_put(struct storage *s, const char *name, enum store_record_kind kind, const uint8_t id[16],
	const void *body, size_t len)
{
	base_cleanup_buf struct base_buf file = BASE_BUF_INIT;
	int r = store_record_encode(kind, id, body, len, &file);
	return r < 0 ? r : storage_put(s, name, file.data, file.len);
}

int store_newer(struct base_error *err, const char *what, const void *body, size_t len)
{
	char why[PROTO_NEWER_BYTES];

	if (!body)
		return base_error_newer(err,
			"%s was written by a newer vckpt: its envelope has another version than %u", what,
			STORE_RECORD_VERSION);
	proto_newer(body, len, why);
	return base_error_newer(err, "%s was written by a newer vckpt: %s", what, why);
}

int store_record_put_fleeting(struct storage *s, const char *name, enum store_record_kind kind,
	const uint8_t id[16], const void *body, size_t len)
{
	base_cleanup_buf struct base_buf file = BASE_BUF_INIT;
	int r = store_record_encode(kind, id, body, len, &file);

	return r < 0 ? r : s->ops->put_fleeting(s, name, file.data, file.len);
}
int store_record_put_passing(struct storage *s, const char *name, enum store_record_kind kind,
	const uint8_t id[16], const void *body, size_t len)
{
	base_cleanup_buf struct base_buf file = BASE_BUF_INIT;
	int r = store_record_encode(kind, id, body, len, &file);

	return r < 0 ? r : s->ops->put_passing(s, name, file.data, file.len);
}

/* Reads a file that cannot be read at once, block by block. Blocks that cannot be read become zeros, which no digest
 * matches. So a bad sector spoils only one of two copies. */
static int read_blocks(struct storage *s, const char *name, uint64_t max, void **ret_file, size_t *ret_len)
{
	struct storage_file *f;
	uint64_t size;
	uint8_t *file;
	int r = s->ops->file_open(s, name, &f, &size);

	if (r < 0)
		return r;
	file = size <= max ? calloc(1, size + 1) : NULL;
	if (!file)
		r = size <= max ? -ENOMEM : -EFBIG;
	for (uint64_t at = 0; r == 0 && at < size; at += RECORD_HALF_ALIGN) {
		r = s->ops->file_read(f, at, file + at, base_min(size - at, RECORD_HALF_ALIGN));
		r = r == -EIO ? 0 : r;
	}
	s->ops->file_close(f);
	if (r < 0) {
		free(file);
		return r;
	}
	*ret_file = file;
	*ret_len = size;
	return 0;
}

/* The body takes the place of the head before it; there is room for a NUL, for callers that print it. */
static struct store_record record_take(enum store_record_kind kind, uint8_t *file, const struct copy *c)
{
	memmove(file, c->body, c->len);
	file[c->len] = 0;
	return (struct store_record){ kind, file, c->len };
}

int store_record_get(struct storage *s, const char *name, enum store_record_kind kind, const uint8_t id[16],
	struct store_record *ret_r, bool *ret_whole, struct base_error *err)
{
	uint64_t max = 2 * base_align(STORE_RECORD_HEAD_BYTES + store_record_max(kind), RECORD_HALF_ALIGN);
	base_cleanup_free void *file = NULL;
	struct copy c = { 0 };
	size_t len;
	int r = storage_read_whole(s, name, max, &file, &len);
	bool blocks = r == -EIO && record_is_double(kind);
	if (blocks)
		r = read_blocks(s, name, max, &file, &len);
	if (r == -EFBIG || r == -ENODATA) /* longer than any record; or it shrank while it was read */
		r = -BASE_EDAMAGED;
	if (r == 0)
		r = decode_copy(kind, id, file, len, &c, ret_whole);
	if (blocks && r == -BASE_EDAMAGED)
		r = -EIO; /* neither copy could be read: they may be undamaged */
	switch (r) {
	case 0:
		*ret_r = record_take(kind, base_steal(file), &c);
		return 0;
	case -BASE_EDAMAGED: return base_error_set(err, r, "%s is damaged, or is a file of another store", name);
	case -BASE_EVERSION: return store_newer(err, name, NULL, 0);
	case -BASE_EFORMAT: return base_error_set(err, r, "%s is a record of another kind", name);
	default: return base_error_set(err, r, "%s: %s", name, base_error_name(r));
	}
}
