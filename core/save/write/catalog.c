/* SPDX-License-Identifier: Apache-2.0
 *
 * catalog: which commits the index should hold, and their places.
 *
 * The index evicts commits that were added, or added again, the longest ago. So commits are added oldest first, and
 * those that newer ones would evict again are left out from the start, by an estimate of their places. What cannot be
 * read is skipped: the index is never the judge of damage. */
#include "core/save/write/catalog.h"

#include <fcntl.h>
#include <limits.h>
#include <pwd.h>
#include <stdio.h>
#include <sys/stat.h>

#include "core/base/array.h"
#include "core/base/log.h"
#include "core/commit/list/list.h"
#include "core/save/write/trust.h"
#include "core/save/write/write_internal.h"
#include "core/step/manifest.h"
#include "core/step/open.h"
#include "core/step/part.h"

#define CATALOG_ROUNDS 4u                        /* of looking for commits that came meanwhile */
#define CATALOG_PLACE_BYTES 160u                 /* of the index, for one place: an estimate on the high side */

struct catalog_commit {
	char run[PROTO_RUN_MAX + 1];
	uint64_t entry, bytes;
	int64_t time_ns;
	struct base_digest manifest;
};
struct catalog_commits { struct catalog_commit *all; size_t n, room; };

struct catalog_places {
	struct index_place *all; size_t n, room;
	const char *const *packs; uint32_t npacks;
	bool own;                                /* this user wrote the part */
	bool failed;                             /* out of memory */
};

/* Without HOME: the directory that the system knows, where it is there and may be written. */
static bool catalog_home(char home[static 2048])
{
	const char *named = getenv("HOME");
	struct passwd user, *found = NULL;
	char names[2048];

	if (named && named[0] == '/')
		return snprintf(home, 2048, "%s", named) < 2048;
	return getpwuid_r(geteuid(), &user, names, sizeof names, &found) == 0 && found && found->pw_dir[0] == '/' &&
		snprintf(home, 2048, "%s", found->pw_dir) < 2048 && access(home, W_OK) == 0;
}

static int catalog_cache_dir(const struct store *s, char dir[static 4096])
{
	const char *cache = getenv("XDG_CACHE_HOME");
	char id[33], home[2048];
	int n;

	for (unsigned i = 0; i < 16; i++)
		snprintf(id + 2 * i, 3, "%02x", s->info.id[i]);
	if (cache && cache[0] == '/')
		n = snprintf(dir, 4096, "%s/vckpt/%s", cache, id);
	else if (catalog_home(home))
		n = snprintf(dir, 4096, "%s/.cache/vckpt/%s", home, id);
	else
		return -ENOENT;
	return n < 4096 ? 0 : -ENAMETOOLONG;
}

/* The store's directory, open, where it is this user's and still the one that the store was opened in: a user that may
 * rename a directory on the way to it has no say in where the index is. */
static int catalog_store_open(const struct store *s)
{
	base_cleanup_close int fd = open(s->path, O_PATH | O_DIRECTORY | O_CLOEXEC);
	struct storage_owner owner;
	struct stat st;

	if (fd < 0 || fstat(fd, &st) < 0)
		return -errno;
	if (s->storage->ops->owner(s->storage, "", &owner) < 0 || owner.device != st.st_dev ||
		owner.number != st.st_ino)
		return -ESTALE;
	return st.st_uid == geteuid() ? base_steal_fd(&fd) : -EPERM;
}

/* An index that another user wrote is not believed, and root's would put an end to that of the store's owner. Where
 * others may write in its directory they can lead what is written there astray. */
static bool catalog_may_use(int store)
{
	struct stat st;

	if (fstatat(store, "index", &st, AT_SYMLINK_NOFOLLOW) < 0)
		return errno == ENOENT && faccessat(store, ".", W_OK, AT_EACCESS) == 0;
	return S_ISDIR(st.st_mode) && st.st_uid == geteuid() && !(st.st_mode & 022) &&
		faccessat(store, "index", W_OK, AT_EACCESS) == 0;
}

int save_index_dir(const struct store *s, int *ret_store, char dir[static 4096])
{
	base_cleanup_close int store = -1;
	struct storage_stat stat;

	*ret_store = -1;
	if (s->storage->ops->stat(s->storage, &stat) == 0 && stat.local)
		store = catalog_store_open(s);
	if (store < 0 || !catalog_may_use(store) || snprintf(dir, 4096, "%s/index", s->path) >= 4096)
		return catalog_cache_dir(s, dir);
	*ret_store = base_steal_fd(&store);
	return 0;
}

static int catalog_read(const struct store *s, unsigned flags, struct index **ret_i, struct base_error *err)
{
	base_cleanup_close int store = -1;
	char dir[4096];
	int r = save_index_dir(s, &store, dir);

	return r < 0 ? r : index_open(store, dir, s->info.id, INDEX_MAX_BYTES, flags | INDEX_READ_ONLY, ret_i, err);
}

int save_index_open(const struct store *s, struct index **ret_i, struct base_error *err)
{
	return catalog_read(s, 0, ret_i, err);
}

/* ---- which commits ---- */

static int catalog_add_run(struct catalog_commits *c, struct store *s, const char *run)
{
	struct commit_list *list;

	if (commit_list_open(s, run, false, &list, NULL) < 0)
		return 0;
	for (size_t i = 0; i < commit_list_count(list); i++) {
		const struct commit_list_step *step = commit_list_at(list, i);

		if (base_array_room(c->all, c->room, c->n + 1) < 0) {
			commit_list_close(list);
			return -ENOMEM;
		}
		c->all[c->n] = (struct catalog_commit){.entry = step->entry, .bytes = step->commit.bytes,
			.time_ns = step->commit.time_ns,
			.manifest = step->commit.manifest};
		snprintf(c->all[c->n++].run, sizeof c->all[0].run, "%s", run);
	}
	commit_list_close(list);
	return 0;
}

static int catalog_newest_first(const void *a, const void *b)
{
	const struct catalog_commit *x = a, *y = b;

	if (x->time_ns != y->time_ns)
		return x->time_ns > y->time_ns ? -1 : 1;
	return strcmp(x->run, y->run) ? strcmp(x->run, y->run) : (x->entry < y->entry) - (x->entry > y->entry);
}

/* All visible commits, newest first. */
static int catalog_commits(struct store *s, struct catalog_commits *ret_c, struct base_error *err)
{
	char **runs;
	size_t n;
	int r = commit_runs(s, &runs, &n, err);

	if (r < 0)
		return r;
	for (size_t i = 0; r == 0 && i < n; i++)
		r = catalog_add_run(ret_c, s, runs[i]);
	commit_runs_free(runs, n);
	if (r < 0)
		return base_no_memory(err);
	if (ret_c->n)
		qsort(ret_c->all, ret_c->n, sizeof *ret_c->all, catalog_newest_first);
	return 0;
}

/* ---- places of a commit ---- */

static void catalog_place(struct catalog_places *p, const struct pack_object_ref *ref)
{
	if (ref->pack >= p->npacks || ref->raw_len == 0)
		return;
	if (base_array_room(p->all, p->room, p->n + 1) < 0) {
		p->failed = true;
		return;
	}
	save_place_of(ref, p->packs[ref->pack], &p->all[p->n]);
	p->all[p->n++].own = p->own;
}

static int catalog_row(void *arg, const struct store_row *row)
{
	struct catalog_places *p = arg;

	for (uint64_t i = 0; i < row->npieces; i++)
		if (!row->pieces[i].inline_bytes)
			catalog_place(p, &row->pieces[i].ref);
	return p->failed ? -ENOMEM : 0;
}

static int catalog_part(struct store *s, const struct proto_manifest *m, uint32_t line, const struct store_layout *l,
	struct catalog_places *p, struct base_error *err)
{
	base_cleanup(store_opened_part_release) struct store_opened_part o = {0};
	int r = store_open_part(s, m, line, &o, err);

	if (r < 0)
		return r;
	p->packs = o.packs;
	p->npacks = o.npacks;
	p->own = save_trust_has(&m->ranks[line].part.digest);
	for (uint32_t i = 0; r == 0 && i < o.part.nchunks; i++)
		r = store_part_read_chunk(s, l, &o.part, o.packs, o.npacks, i, catalog_row, p, err);
	for (uint32_t i = 0; i < o.part.nblobs; i++) {
		struct pack_object_ref ref = pack_object_ref_from(&o.part.blobs[i].ref);

		if (o.part.blobs[i].len)
			catalog_place(p, &ref);
	}
	return r < 0 ? r : p->failed ? -ENOMEM : 0;
}

/* Ranks of one layout are usually next to each other, so a layout is kept until another one is needed. */
static int catalog_manifest(struct store *s, const struct proto_manifest *m, struct catalog_places *p,
	struct base_error *err)
{
	struct store_layout *l = NULL;
	uint32_t number = UINT32_MAX;
	int r = 0;

	for (uint32_t i = 0; r == 0 && i < m->nranks; i++) {
		if (m->ranks[i].layout != number) {
			store_layout_free(base_steal(l));
			number = m->ranks[i].layout;
			r = store_open_layout(s, m, number, &l, err);
		}
		if (r == 0)
			r = catalog_part(s, m, i, l, p, err);
	}
	store_layout_free(l);
	return r;
}

static int catalog_add_commit(struct store *s, struct index *index, const struct catalog_commit *c,
	struct catalog_places *p)
{
	struct base_error why = {0};
	struct proto_manifest m;
	int r = store_manifest_get(s, c->run, &c->manifest, &m, &why);

	p->n = 0;
	p->failed = false;
	if (r == 0) {
		r = catalog_manifest(s, &m, p, &why);
		proto_manifest_release(&m);
	}
	if (r == 0)
		return index_add_commit(index, c->run, c->entry, &c->manifest, p->all, p->n);
	base_debug("%s entry %llu stays out of the index: %s", c->run, (unsigned long long)c->entry,
		why.code ? why.text : base_error_name(r));
	return r == -ENOMEM ? r : 0;
}

/* How many of the newest commits the index has room for. */
static size_t catalog_newest(const struct catalog_commits *c)
{
	uint64_t room = INDEX_MAX_BYTES / 2;
	size_t newest = 0;

	while (newest < c->n) {
		uint64_t estimate = (c->all[newest].bytes >> 17) * CATALOG_PLACE_BYTES;

		if (newest && estimate > room)
			break;
		room -= base_min(room, estimate);
		newest++;
	}
	return newest;
}

/* ---- commits that are gone ---- */

struct catalog_gone { const struct base_digest **live; size_t nlive; struct base_digest *all; size_t n, room; };

static int catalog_digest_compare(const void *a, const void *b)
{
	return base_digest_compare(*(const struct base_digest *const *)a, *(const struct base_digest *const *)b);
}

static int catalog_gone_add(void *arg, const struct base_digest *manifest)
{
	struct catalog_gone *g = arg;

	if (g->nlive && bsearch(&manifest, g->live, g->nlive, sizeof *g->live, catalog_digest_compare))
		return 0;
	if (base_array_room(g->all, g->room, g->n + 1) < 0)
		return -ENOMEM;
	g->all[g->n++] = *manifest;
	return 0;
}

/* Commits of the index that no list shows any more; the caller frees ret_g->all, also after a failure. */
static int catalog_gone(struct index *index, const struct catalog_commits *c, struct catalog_gone *ret_g)
{
	int r;

	ret_g->live = malloc((c->n + 1) * sizeof *ret_g->live);
	if (!ret_g->live)
		return -ENOMEM;
	for (size_t i = 0; i < c->n; i++)
		ret_g->live[ret_g->nlive++] = &c->all[i].manifest;
	if (ret_g->nlive)
		qsort(ret_g->live, ret_g->nlive, sizeof *ret_g->live, catalog_digest_compare);
	r = index_each_commit(index, catalog_gone_add, ret_g);
	free(base_steal(ret_g->live));
	return r;
}

/* Forgets commits that no list shows any more. Commits whose places those had taken over are to be added again after
 * this. */
static int catalog_forget(struct index *index, const struct catalog_commits *c)
{
	struct catalog_gone g = {0};
	int r = catalog_gone(index, c, &g);

	for (size_t i = 0; r == 0 && i < g.n; i++) {
		r = index_remove_commit(index, &g.all[i]);
		r = r == -ENOENT ? 0 : r;
	}
	free(g.all);
	return r;
}

/* Whether an update would change nothing, by an index that is only read. */
static bool catalog_up_to_date(struct index *index, const struct catalog_commits *c)
{
	struct catalog_gone g = {0};
	bool is = catalog_gone(index, c, &g) == 0 && g.n == 0;

	free(g.all);
	for (size_t i = catalog_newest(c); is && i-- > 0;)
		is = index_has_commit(index, &c->all[i].manifest);
	return is;
}

/* ---- the whole ---- */

/* Makes the cache directory, which may be the first in ~/.cache; index_open reports a failure. */
static void catalog_make_parents(const char *dir)
{
	char path[4096];

	snprintf(path, sizeof path, "%s", dir);
	for (char *at = strchr(path + 1, '/'); at; at = strchr(at + 1, '/')) {
		*at = 0;
		mkdir(path, 0700);
		*at = '/';
	}
}

static int catalog_open_in(const struct store *s, int parent, const char *dir, unsigned flags, struct index **ret_i,
	struct base_error *err)
{
	int r;

	if (parent < 0)
		catalog_make_parents(dir);
	r = index_open(parent, dir, s->info.id, INDEX_MAX_BYTES, flags, ret_i, err);
	if (r == -BASE_EDAMAGED)
		r = index_open(parent, dir, s->info.id, INDEX_MAX_BYTES, flags | INDEX_ANEW, ret_i, err);
	return r;
}

/* Another user may have made STORE/index meanwhile, or its file system gives it to another user. */
static int catalog_open(const struct store *s, unsigned flags, struct index **ret_i, struct base_error *err)
{
	base_cleanup_close int store = -1;
	char dir[4096];
	int r = save_index_dir(s, &store, dir);

	if (r == 0) {
		r = catalog_open_in(s, store, dir, flags, ret_i, err);
		if (r != -EPERM || catalog_cache_dir(s, dir) < 0)
			return r;
		return catalog_open_in(s, -1, dir, flags, ret_i, err);
	}
	return base_error_set(err, r, "there is no place for an index of %s: set XDG_CACHE_HOME or HOME (all else "
		"works without an index)", s->path);
}

int save_index_open_rows(const struct store *s, unsigned flags, struct index **ret_i, struct base_error *err)
{
	return flags & INDEX_READ_ONLY ? catalog_read(s, flags, ret_i, err) : catalog_open(s, flags, ret_i, err);
}

static int catalog_fill(struct store *s, struct index *index, const struct catalog_commits *c, struct base_error *err)
{
	struct catalog_places places = {0};
	int r = catalog_forget(index, c);

	for (size_t i = catalog_newest(c); r == 0 && i-- > 0;)
		if (!index_has_commit(index, &c->all[i].manifest))
			r = catalog_add_commit(s, index, &c->all[i], &places);
	free(places.all);
	return r < 0 ? base_error_set(err, r, "the index of %s cannot be written: %s", s->path, base_error_name(r))
		: 0;
}

static bool catalog_same(const struct catalog_commits *a, const struct catalog_commits *b)
{
	if (a->n != b->n)
		return false;
	for (size_t i = 0; i < a->n; i++)
		if (base_digest_compare(&a->all[i].manifest, &b->all[i].manifest) != 0)
			return false;
	return true;
}

/* A process that commits while this one has the lock leaves the update to it (INDEX_BRIEFLY), so it looks again. */
static int catalog_follow(struct store *s, struct index *index, struct base_error *err)
{
	struct catalog_commits done = {0};
	bool same = false;
	int r = 0;

	for (unsigned round = 0; r == 0 && !same && round < CATALOG_ROUNDS; round++) {
		struct catalog_commits now = {0};

		r = catalog_commits(s, &now, err);
		same = r == 0 && round && catalog_same(&now, &done);
		if (r == 0 && !same)
			r = catalog_fill(s, index, &now, err);
		free(done.all);
		done = now;
	}
	free(done.all);
	return r;
}

/* A look costs one reading of the index; an update, a copy of it. */
static bool catalog_nothing_to_do(struct store *s, struct index_stats *ret_stats)
{
	struct catalog_commits c = {0};
	struct index *index = NULL;
	bool nothing = save_index_open(s, &index, NULL) == 0 &&
		catalog_commits(s, &c, NULL) == 0 && catalog_up_to_date(index, &c) &&
		(!ret_stats || index_stat(index, ret_stats) == 0);

	free(c.all);
	index_close(index);
	return nothing;
}

void save_index_tidy(const struct store *s)
{
	base_cleanup_close int store = -1;
	char dir[4096];

	if (save_index_dir(s, &store, dir) == 0)
		index_tidy(store, dir);
}

int save_index_update(struct store *s, unsigned flags, struct index_stats *ret_stats, struct base_error *err)
{
	struct index *index = NULL;
	int r;

	/* The caller of a brief update knows that there is something to do. */
	if (flags == 0 && catalog_nothing_to_do(s, ret_stats)) {
		save_index_tidy(s);
		return 0;
	}

	r = catalog_open(s, flags, &index, err);
	if (r == 0)
		r = catalog_follow(s, index, err);
	if (r == 0 && ret_stats)
		r = index_stat(index, ret_stats);
	if (r == 0 && (r = index_publish(index)) < 0)
		base_error_set(err, r, "the index of %s cannot be written: %s", s->path, base_error_name(r));
	index_close(index);
	return r;
}
