/* SPDX-License-Identifier: Apache-2.0
 *
 * store: identity and reserve. store_packs.c has the cache of open packs.
 *
 * The file `vckpt.store` is put last of what makes a directory a store, and whole: a stopped `init` leaves an empty
 * directory or a store. The reserve is only convenience and is made afterwards. */
#include <pthread.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/step/store_internal.h"

#define RESERVE_FILE "reserve"
#define RESERVE_MAX_BYTES (UINT64_C(1) << 30)

/* ---- host name ---- */

static char hostname_text[65];

static void hostname_fill(void)
{
	char raw[256] = "";

	if (gethostname(raw, sizeof raw - 1) != 0 || !raw[0])
		snprintf(raw, sizeof raw, "localhost");
	snprintf(hostname_text, sizeof hostname_text, "%.64s", raw);
	for (char *p = hostname_text; *p; p++)
		if (!strchr("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.=-", *p))
			*p = '_';
}

/* Already in the form that file names need: [A-Za-z0-9_.=-], at most 64 bytes. */
const char *store_hostname(void)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;

	pthread_once(&once, hostname_fill);
	return hostname_text;
}

/* ---- reserve ---- */

void store_reserve_release(struct store *s)
{
	storage_remove(s->storage, RESERVE_FILE);
}

void store_reserve_restore(struct store *s)
{
	uint64_t size, want = s->info.reserve_bytes;
	void *zeros;

	if (want == 0 || want > RESERVE_MAX_BYTES || storage_size(s->storage, RESERVE_FILE, &size) != -ENOENT)
		return;
	zeros = calloc(1, want);
	if (zeros)
		storage_put(s->storage, RESERVE_FILE, zeros, want);
	free(zeros);
}

/* ---- open, init, close ---- */

int store_path_check(const char *path, struct base_error *err)
{
	size_t n = 0;

	while ((path[n] >= 'a' && path[n] <= 'z') || (path[n] >= 'A' && path[n] <= 'Z') ||
		(n && path[n] && strchr("0123456789+.-", path[n])))
		n++;
	if (n == 0 || strncmp(path + n, ":/", 2) != 0)
		return 0;
	if (path[n + 2] != '/') { /* pathlib takes the other slash away; but a folder may have such a name */
		base_cleanup_free char *first = strndup(path, n + 1);
		struct stat st;

		if (n == 1 || !first || (stat(first, &st) == 0 && S_ISDIR(st.st_mode)))
			return 0;
	}
	return base_error_set(err, -EINVAL, "%s: this is a URL, and vckpt has no storage for %.*s://: give a directory "
		"of a mounted file system", path, (int)n, path);
}

static int store_path_set(struct store *s, const char *path, struct base_error *err)
{
	char here[sizeof s->path] = "";
	int n = store_path_check(path, err);

	if (n < 0)
		return n;
	if (path[0] != '/' && !getcwd(here, sizeof here))
		return base_error_set(err, -errno, "%s: the working directory is not known", path);
	n = snprintf(s->path, sizeof s->path, "%s%s%s", here, here[0] ? "/" : "", path);
	if (n < 0 || (size_t)n >= sizeof s->path)
		return base_error_set(err, -ENAMETOOLONG, "%s: the path is too long", path);
	while (n > 1 && s->path[n - 1] == '/')
		s->path[--n] = 0;
	return 0;
}

static int store_identity_read(struct store *s, struct base_error *err)
{
	struct store_record record = {0};
	struct base_error why = {0};
	int r = store_record_get(s->storage, STORE_FILE, STORE_RECORD_STORE, NULL, &record, NULL, &why);

	if (r == -ENOENT)
		return base_error_set(err, -BASE_ENOSTORE, "%s is not a vckpt store (no file %s in it)", s->path,
			STORE_FILE);
	if (r == -EACCES)
		return base_error_set(err, r, "%s: you may not read the file %s in it; its owner or root can change "
			"that (vckpt(1), SHARED STORES)", s->path, STORE_FILE);
	if (r < 0)
		return base_error_set(err, r, "%s: %s", s->path, why.code ? why.text : base_error_name(r));
	r = proto_store_decode(record.body, record.len, &s->info);
	if (r == -BASE_EVERSION) {
		store_newer(&why, STORE_FILE, record.body, record.len);
		base_error_set(err, r, "%s: %s", s->path, why.text);
	} else if (r < 0) {
		base_error_set(err, r, "%s/%s: %s", s->path, STORE_FILE, base_error_name(r));
	}
	store_record_release(&record);
	return r;
}

/* The only place that refuses a writer because the store has an older format. */
static int store_writable(const struct store *s, struct base_error *err)
{
	if (s->info.version == PROTO_VERSION)
		return 0;
	return base_error_set(err, -EROFS,
		"%s: this store is of format %u, which this vckpt reads and does not write; make a store of format %u "
		"with vckpt init, and bring the steps there with vckpt copy",
		s->path, s->info.version, PROTO_VERSION);
}

int store_open(const char *path, unsigned flags, struct store **ret_s, struct base_error *err)
{
	struct store *s = calloc(1, sizeof *s);
	int r;

	if (s)
		s->packs = store_pack_cache_new();
	if (!s || !s->packs) {
		free(s);
		return base_no_memory_for(err, "%s", path);
	}
	s->read_only = flags & STORE_OPEN_READ_ONLY;
	r = store_path_set(s, path, err);
	if (r == 0)
		r = storage_open_posix(s->path, flags, &s->storage, err);
	if (r == 0) {
		s->storage->relieve = store_pack_cache_relieve;
		s->storage->relieve_arg = s->packs;
		r = store_identity_read(s, err);
	}
	if (r == 0 && !(flags & STORE_OPEN_READ_ONLY))
		r = store_writable(s, err);
	if (r < 0) {
		store_close(s);
		return r;
	}
	*ret_s = s;
	return 0;
}

void store_close(struct store *s)
{
	if (!s)
		return;
	store_pack_cache_free(s->packs);
	if (s->storage)
		s->storage->ops->close(s->storage);
	proto_store_release(&s->info);
	free(s);
}

static int store_identity_put(struct storage *storage, uint64_t reserve_bytes)
{
	struct proto_store info = {.version = PROTO_VERSION, .grid = {.min_bytes = 128 << 10, .target_bytes = 1 << 20,
		.row_bytes = 256, .small_bytes = 32 << 10}, .reserve_bytes = reserve_bytes, .list_2 = true,
		.list_3 = true, .list_4 = true};
	base_cleanup_buf struct base_buf body = BASE_BUF_INIT;
	int r;

	r = base_random(info.id, sizeof info.id);
	do
		r = r < 0 ? r : base_random(&info.seed, sizeof info.seed);
	while (r == 0 && base_xxh128_seed_weak(info.seed));
	if (r == 0)
		r = proto_store_encode(&info, &body);
	if (r == 0)
		r = store_record_put(storage, STORE_FILE, STORE_RECORD_STORE, NULL, body.data, body.len);
	return r == STORAGE_PUT_OTHER ? -EEXIST : r;
}

/* Another process may make the store meanwhile: it is a store then. */
int store_init_allowed(const char *path, struct base_error *err)
{
	base_cleanup_free char *around = store_around(path), *full = realpath(path, NULL);

	if (around && full && strcmp(around, full) == 0)
		return base_error_set(err, -EEXIST, "%s is a vckpt store already", path);
	if (around)
		return base_error_set(err, -EINVAL, "%s is in the store %s; nothing was made: choose a directory "
			"outside of that store", path, around);
	return 0;
}

int store_init(const char *path, uint64_t reserve_bytes, struct base_error *err)
{
	struct storage *storage;
	struct store *s;
	int r;

	if (reserve_bytes > RESERVE_MAX_BYTES)
		return base_error_set(err, -EINVAL, "a reserve of %llu bytes is too large",
			(unsigned long long)reserve_bytes);
	r = store_path_check(path, err);
	if (r == 0)
		r = store_init_allowed(path, err);
	if (r < 0)
		return r;
	r = storage_open_posix(path, STORAGE_CREATE, &storage, err);
	if (r < 0)
		return r;
	r = store_identity_put(storage, reserve_bytes);
	storage->ops->close(storage);
	if (r < 0)
		return base_error_set(err, r, "%s: cannot write %s: %s", path, STORE_FILE, base_error_name(r));
	r = store_open(path, 0, &s, err); /* reads back what was written */
	if (r < 0)
		return r;
	store_reserve_restore(s);
	store_close(s);
	return 0;
}
