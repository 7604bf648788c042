/* SPDX-License-Identifier: Apache-2.0
 *
 * The index (docs/index.md). Input: u8 mode, then
 *
 *   mode even   pages: u24 place | u8 length | bytes, again and again: they are written over a sealed index, which then
 *               ends at the last place if the mode has bit 1. It is refused unless it is the same as before.
 *   mode odd    rows: u8 table | u8 flags | u8 length | key | u8 length | value, again and again: they are put into an
 *               index beside its own rows, with a good envelope, or as they are if flags has bit 0. The index is
 *               sealed and read; then a writer adds and removes a commit.
 *
 * What stands behind a good seal is never a forged page: LMDB itself trusts pages, and no target gives it any. The
 * indexes lie in a directory of their own, in memory where there is /dev/shm. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "index/index_internal.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define ROWS_MAX 64u
#define PLACES 40u
#define BOUND (1u << 20)        /* LMDB maps twice as much and 64 MiB; a sanitizer takes time for each */

static const uint8_t id[16] = { 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 };
static char top[64], dir[128];   /* dir: of rows */
static int sealed_fd = -1;       /* the index of pages, in `top` itself */
static uint8_t *sealed; static size_t sealed_len;

static void must(bool good)
{
	if (!good)
		abort();
}

static int opened(const char *where, uint64_t max_bytes, unsigned flags, struct index **ret_i)
{
	return index_open(-1, where, id, max_bytes, flags, ret_i, NULL);
}

/* ---- once ---- */

static void folders_remove(void)
{
	static const char *const names[] = {"/rows/" INDEX_FILE, "/rows/" INDEX_NEW_FILE, "/rows", "/" INDEX_FILE, ""};
	char path[160];

	for (size_t i = 0; i < BASE_COUNT(names); i++) {
		snprintf(path, sizeof path, "%s%s", top, names[i]);
		remove(path);
	}
}

static void places_fill(struct index_place places[static PLACES], uint8_t mark)
{
	for (unsigned i = 0; i < PLACES; i++) {
		places[i] = (struct index_place){.offset = 4096 * i, .checks = 9, .raw_len = 64, .stored_len = 64,
			.kind = 1};
		memset(&places[i].digest, (int)i, sizeof places[i].digest);
		snprintf(places[i].pack, sizeof places[i].pack, "%016x-0-0-model%u", mark, i % 3);
	}
}

static void sealed_read(void)
{
	char path[160];
	struct stat st;

	snprintf(path, sizeof path, "%s/" INDEX_FILE, top);
	sealed_fd = open(path, O_RDWR | O_CLOEXEC);
	must(sealed_fd >= 0 && fstat(sealed_fd, &st) == 0);
	sealed_len = (size_t)st.st_size;
	sealed = malloc(sealed_len);
	must(sealed && pread(sealed_fd, sealed, sealed_len, 0) == (ssize_t)sealed_len);
}

static void once(void)
{
	struct index_place places[PLACES];
	struct base_digest manifest;
	struct index *i;

	if (sealed)
		return;
	snprintf(top, sizeof top, "/dev/shm/vckpt-fuzz-XXXXXX");
	if (!mkdtemp(top)) {
		snprintf(top, sizeof top, "/tmp/vckpt-fuzz-XXXXXX");
		must(mkdtemp(top) != NULL);
	}
	atexit(folders_remove);
	snprintf(dir, sizeof dir, "%s/rows", top);
	must(opened(top, BOUND, 0, &i) == 0);
	for (uint8_t mark = 1; mark <= 3; mark++) {
		places_fill(places, mark);
		memset(&manifest, mark, sizeof manifest);
		must(index_add_commit(i, "run", mark, &manifest, places, PLACES) == 0);
	}
	must(index_publish(i) == 0);
	index_close(i);
	sealed_read();
}

/* ---- pages ---- */

/* Writes over the file and returns the length that it is to have. */
static size_t pages_write(const uint8_t *data, size_t size, uint8_t *work)
{
	size_t at = sealed_len;

	for (; size >= 4 && data[3] <= size - 4; size -= 4u + data[3], data += 4u + data[3]) {
		at = (data[0] | (size_t)data[1] << 8 | (size_t)data[2] << 16) % sealed_len;
		memcpy(work + at, data + 4, base_min(data[3], sealed_len - at));
	}
	return at;
}

static void pages(uint8_t mode, const uint8_t *data, size_t size)
{
	base_cleanup_free uint8_t *work = malloc(sealed_len);
	struct index *i;
	size_t len;
	int r;

	must(work != NULL);
	memcpy(work, sealed, sealed_len);
	len = pages_write(data, size, work);
	len = mode & 2 ? len : sealed_len;
	must(pwrite(sealed_fd, work, sealed_len, 0) == (ssize_t)sealed_len && ftruncate(sealed_fd, (off_t)len) == 0);
	r = opened(top, BOUND, INDEX_READ_ONLY, &i);
	must((r == 0) == (len == sealed_len && memcmp(work, sealed, len) == 0));
	must(r == 0 || r == -BASE_EDAMAGED);
	if (r == 0)
		index_close(i);
}

/* ---- rows ---- */

struct row { uint8_t table, flags, key_len, value_len; const uint8_t *key, *value; };

static size_t rows_parse(const uint8_t *data, size_t size, struct row rows[static ROWS_MAX])
{
	size_t n = 0;

	while (n < ROWS_MAX && size >= 4) {
		struct row *row = &rows[n];
		size_t key_len = data[2], value_len = size - 3 > key_len ? data[3 + key_len] : SIZE_MAX;

		if (value_len == SIZE_MAX || size - 4 - key_len < value_len)
			break;
		*row = (struct row){data[0] % INDEX_TABLES, data[1], (uint8_t)key_len, (uint8_t)value_len, data + 3,
			data + 4 + key_len};
		data += 4 + key_len + value_len;
		size -= 4 + key_len + value_len;
		n++;
	}
	return n;
}

static void rows_put(struct index *i, const struct row *rows, size_t n)
{
	MDB_txn *txn;

	must(mdb_txn_begin(i->env, NULL, 0, &txn) == 0);
	for (size_t k = 0; k < n; k++) {
		const struct row *row = &rows[k];
		MDB_val key = {row->key_len, (void *)row->key}, value = {row->value_len, (void *)row->value};

		if (row->flags & 1)
			(void)mdb_put(txn, i->dbi[row->table], &key, &value, 0);
		else
			(void)index_put(txn, i->dbi, row->table, row->key, row->key_len, row->value, row->value_len);
	}
	must(mdb_txn_commit(txn) == 0);
}

/* The key as a digest, zeros behind it. */
static struct base_digest row_digest(const struct row *row)
{
	struct base_digest d = {0};

	memcpy(&d, row->key, base_min(row->key_len, sizeof d));
	return d;
}

static int count(void *arg, const struct base_digest *manifest)
{
	(void)manifest;
	++*(size_t *)arg;
	return 0;
}

static void ask(struct index *i, const struct row *rows, size_t n)
{
	struct index_stats stats;
	size_t commits = 0;

	for (size_t k = 0; k < n; k++) {
		struct base_digest d = row_digest(&rows[k]);
		struct index_place p;

		(void)index_has_commit(i, &d);
		if (index_find(i, &d, &p) == 0)
			must(p.pack[0] && memchr(p.pack, 0, sizeof p.pack) && p.run[0] &&
				memchr(p.run, 0, sizeof p.run) && base_digest_equal(&p.digest, &d));
	}
	must(index_each_commit(i, count, &commits) == 0 && index_stat(i, &stats) == 0);
}

static void change(struct index *i, const struct row *rows, size_t n)
{
	struct base_digest first = row_digest(&rows[0]), last = row_digest(&rows[n - 1]);
	struct index_place places[PLACES];
	int r;

	places_fill(places, 9);
	places[0].digest = last;
	r = index_add_commit(i, "run", 7, &first, places, rows[0].flags & 2 ? PLACES : 1);
	must(r < 0 || index_has_commit(i, &first));
	(void)index_remove_commit(i, rows[0].flags & 4 ? &first : &last);
}

static void rows(const uint8_t *data, size_t size)
{
	struct row all[ROWS_MAX];
	size_t n = rows_parse(data, size, all);
	struct index *i;

	must(opened(dir, BOUND, INDEX_ANEW, &i) == 0);
	rows_put(i, all, n);
	must(index_publish(i) == 0);
	index_close(i);
	if (opened(dir, BOUND, INDEX_READ_ONLY, &i) < 0)
		return; /* its own row is among those that were overwritten */
	ask(i, all, n);
	index_close(i);
	if (n == 0 || opened(dir, n > 32 ? 1 : BOUND, 0, &i) < 0)
		return;
	change(i, all, n);
	if (index_publish(i) == 0) {
		index_close(i);
		must(opened(dir, BOUND, INDEX_READ_ONLY, &i) == 0);
		ask(i, all, n);
	}
	index_close(i);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	if (size == 0)
		return 0;
	once();
	if (data[0] & 1)
		rows(data + 1, size - 1);
	else
		pages(data[0], data + 1, size - 1);
	return 0;
}
