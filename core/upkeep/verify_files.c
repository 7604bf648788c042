/* SPDX-License-Identifier: Apache-2.0
 *
 * verify_files: checks every file of the store by itself, each as a job of the pool. What a file must be follows from
 * its name alone. */
#include "core/upkeep/verify_internal.h"

#include <stdio.h>

#include "core/base/array.h"
#include "core/upkeep/lost.h"

/* One file, or names of one file in one directory. */
struct job {
	struct verify *v;
	const struct commit_file **files;
	size_t n;
};

static void file_fault(struct verify *v, const char *name, const char *run, const char *what)
{
	verify_fault(v, (struct verify_fault){.file = name, .what = what, .run = run});
}

/* Nothing is wrong with it; a newer vckpt wrote it. */
static void file_newer(struct verify *v, const char *name, bool pack, const char *run, const char *what)
{
	verify_fault(v, (struct verify_fault){.file = name, .what = what, .newer = true, .pack = pack, .run = run});
}

/* ---- packs ---- */

struct pack_job {
	struct verify *v;
	const char *file, *class; /* the class in its name */
	struct verify_pack pack;
	bool mixed;               /* an object of another class was reported */
};

static void on_damage(void *arg, uint64_t offset, uint64_t len, const struct pack_object_ref *object, const char *what)
{
	struct pack_job *j = arg;

	(void)object; /* what it touches follows from the steps' references */
	verify_fault(j->v, (struct verify_fault){
		.file = j->file, .what = what, .pack = true, .offset = offset, .len = len});
}

static void on_progress(void *arg, uint64_t bytes)
{
	verify_progress(((struct pack_job *)arg)->v, bytes);
}

/* Remembers an object's place, and the hash of its bytes, so that references to it need not be hashed again. */
static void on_object(void *arg, const struct pack_object_ref *object, const struct base_xxh128 *xxh)
{
	struct pack_job *j = arg;
	struct verify_pack *p = &j->pack;

	if (j->v->o->paranoid && !j->mixed && !verify_class_holds(j->class, object->kind)) {
		on_damage(j, object->offset, base_max(object->stored_len, 1), object,
			"the footer lists an object of a kind that packs of this class do not hold");
		j->mixed = true;
	}
	if (base_array_more(p->seen, p->nseen) < 0) {
		verify_error(j->v, -ENOMEM);
		return;
	}
	p->seen[p->nseen] = (struct verify_seen){
		.place = verify_place(NULL, object, NULL, 0), .hashed = xxh != NULL, .kind = object->kind};
	if (xxh)
		p->seen[p->nseen].xxh = *xxh;
	p->nseen++;
}

static void keep_pack(struct verify *v, struct verify_pack pack)
{
	if (pack.nseen)
		qsort(pack.seen, pack.nseen, sizeof *pack.seen, base_compare_64);
	pthread_mutex_lock(&v->lock);
	v->result.objects += pack.nseen;
	if (base_array_more(v->packs, v->npacks) == 0 && pack.file) {
		v->packs[v->npacks++] = pack;
		pack = (struct verify_pack){0};
	} else if (!v->error) {
		v->error = -ENOMEM;
	}
	pthread_mutex_unlock(&v->lock);
	free(pack.file);
	free(pack.seen);
}

static void check_pack(struct verify *v, const struct commit_file *file, const struct file_name *n)
{
	struct pack_job j = {.v = v, .file = file->name, .class = n->class};
	struct base_error err = {0};
	const struct pack_verify_calls calls = {.damage = on_damage, .progress = on_progress, .object = on_object,
		.arg = &j, .seed = v->store->info.seed};
	struct pack *p;
	int r = pack_open(v->store->storage, v->store->info.id, n->pack, 0, &p, &err);

	if (r == -BASE_EVERSION) {
		file_newer(v, file->name, true, NULL, err.text);
		return;
	}
	if (r < 0) {
		on_damage(&j, 0, 0, NULL, err.text[0] ? err.text : base_error_name(r));
		return;
	}
	j.pack.file = strdup(file->name);
	r = pack_verify(p, &calls);
	if (r == -BASE_EVERSION) {
		base_error_newer(&err,
			"it was written by a newer vckpt: its footer lists an object of a codec or kind that this "
			"vckpt does not know");
		file_newer(v, file->name, true, NULL, err.text);
	} else if (r < 0)
		on_damage(&j, 0, 0, NULL, base_error_name(r));
	keep_pack(v, j.pack);
	pack_close(p);
	pthread_mutex_lock(&v->lock);
	if (v->o->pack)
		v->o->pack(v->o->arg, file->name, file->size);
	pthread_mutex_unlock(&v->lock);
}

/* ---- records ---- */

static int decode_body(enum store_record_kind kind, const struct store_record *rec)
{
	union {
		struct proto_store store;
		struct proto_entry entry;
		struct proto_manifest manifest;
		struct proto_begin begin;
		struct proto_base_record base;
		struct proto_announcement part;
		struct proto_heartbeat heartbeat;
		struct proto_trash trash;
		struct proto_stats stats;
		struct proto_damage damage;
	} m;
	int r = 0;

	switch (kind) {
#define BODY(KIND, name, release) \
	case KIND: \
		r = proto_##name##_decode(rec->body, rec->len, (void *)&m); \
		if (r == 0) \
			proto_##release##_release((void *)&m); \
		return r
		BODY(STORE_RECORD_STORE, store, store);
		BODY(STORE_RECORD_ENTRY, entry, entry);
		BODY(STORE_RECORD_MANIFEST, manifest, manifest);
		BODY(STORE_RECORD_BEGIN, begin, begin);
		BODY(STORE_RECORD_BASE, base, base);
		BODY(STORE_RECORD_ANNOUNCEMENT, announcement, announcement);
		BODY(STORE_RECORD_HEARTBEAT, heartbeat, heartbeat);
		BODY(STORE_RECORD_TRASH, trash, trash);
		BODY(STORE_RECORD_STATS, stats, stats);
		BODY(STORE_RECORD_DAMAGE, damage, damage);
		BODY(STORE_RECORD_MARK, entry, entry);
#undef BODY
	}
	return -BASE_EFORMAT;
}

/* 0; -BASE_EFORMAT; -BASE_EVERSION: reported as a newer vckpt's, but of an entry, which is reported with its run. */
static int check_body(struct verify *v, const char *name, enum store_record_kind kind, const char *run,
	const struct store_record *rec)
{
	struct base_error why = {0};
	int r = decode_body(kind, rec);

	if (r != -BASE_EVERSION)
		return r;
	store_newer(&why, "it", rec->body, rec->len);
	if (kind != STORE_RECORD_ENTRY)
		file_newer(v, name, false, run, why.text);
	return r;
}

/* A manifest's name is the digest of its body. */
static bool manifest_named(const struct file_name *n, const struct store_record *rec)
{
	struct base_digest d;

	base_digest_of(rec->body, rec->len, &d);
	return base_digest_equal(&d, &n->digest);
}

/* Is the attempt that measures name the one that their entry committed? An entry that the list does not have (yet) is
 * reported elsewhere. */
static bool stats_attempt(const struct verify *v, const struct proto_stats *m, const struct commit_stats_name *n)
{
	const struct commit_list *l = upkeep_list_among(v->lists, v->nlists, n->run);
	uint64_t entry;

	if (!l || commit_list_commit_step(l, n->entry) != n->step)
		return true;
	return commit_list_attempt(l, m->attempt, NULL, &entry) == COMMIT_ATTEMPT_COMMITTED && entry == n->entry;
}

/* Do measures agree with their name, and with what the list says of their step? NULL: yes; else what is wrong. */
static const char *stats_wrong(const struct verify *v, const struct file_name *n, const struct store_record *rec)
{
	struct proto_stats m;
	const char *wrong = NULL;

	if (proto_stats_decode(rec->body, rec->len, &m) < 0)
		return "its body breaks the rules of its format";
	if (!commit_stats_named(&m, &n->stats))
		wrong = "its content gives another run, step, entry or rank than its name";
	else if (!stats_attempt(v, &m, &n->stats))
		wrong = "it gives another attempt than the commit entry that it belongs to";
	proto_stats_release(&m);
	return wrong;
}

/* Did the list skip this entry? Then it was reported already, or is accepted as damaged. */
static bool entry_skipped(const struct verify *v, const struct file_name *n)
{
	const struct commit_list *l = upkeep_list_among(v->lists, v->nlists, n->run);

	return l && !n->collected && commit_list_skipped(l, n->number);
}

/* Is an entry behind the end of the list not part of it? Entries that writers have put since are: they put each number
 * after the one before it. */
static bool entry_unreached(const struct verify *v, const char *run, uint64_t n)
{
	const struct commit_list *l = upkeep_list_among(v->lists, v->nlists, run);
	char before[STORAGE_NAME_MAX];
	uint64_t size;

	if (!l || n <= commit_list_next(l))
		return false;
	commit_list_entry_name(run, n - 1, before);
	return storage_size(v->store->storage, before, &size) == -ENOENT;
}

/* Readers find entries by number, from the first to the end of the list: they never see what is elsewhere. */
static bool entry_stray(const struct verify *v, const struct file_name *n, const struct store_record *rec,
	struct base_error *why)
{
	const struct commit_list *l = upkeep_list_among(v->lists, v->nlists, n->run);
	struct proto_entry e = {0};
	int r = proto_entry_decode(rec->body, rec->len, &e);
	bool source = n->collected;

	if (r == 0)
		r = commit_list_entry_placed(v->store, n->run, source ? n->number - 1 : n->number, &e, why);
	if (r == 0 && source && (e.kind != PROTO_ENTRY_COLLECTED || e.number != n->number))
		r = base_error_set(why, -BASE_EFORMAT, "it is no collected record of that number");
	if (r == 0 && l && !source && e.kind == PROTO_ENTRY_COLLECTED && !commit_list_head_right(l, &e))
		r = base_error_set(why, -BASE_EFORMAT,
			"it says that entries below %llu were collected, but there is no such snapshot at that entry",
			(unsigned long long)e.number);
	if (r == 0 && !source && entry_unreached(v, n->run, n->number))
		r = base_error_set(why, -BASE_EFORMAT,
			"it is behind the end of the run's list: entry %llu before it is missing",
			(unsigned long long)n->number - 1);
	proto_entry_release(&e);
	return r == -BASE_EFORMAT;
}

/* A record as it was read; whole: both copies are. */
struct read_record { int r; bool whole; struct store_record rec; struct base_error err; };

static void record_read(struct verify *v, const char *name, const struct file_name *n, struct read_record *ret_x)
{
	*ret_x = (struct read_record){.whole = true};
	ret_x->r = store_record_get(v->store->storage, name, (enum store_record_kind)n->kind,
		n->kind == STORE_RECORD_STORE ? NULL : v->store->info.id, &ret_x->rec, &ret_x->whole, &ret_x->err);
}

/* Of that size, under this name. */
static void record_judge(struct verify *v, const char *name, const struct file_name *n, uint64_t size,
	const struct read_record *x)
{
	enum store_record_kind kind = (enum store_record_kind)n->kind;
	const char *run = n->run[0] ? n->run : NULL, *wrong;
	const struct store_record rec = x->rec;
	struct base_error err = x->err;
	bool whole = x->whole;
	int r = x->r;

	if (kind == STORE_RECORD_ENTRY && entry_skipped(v, n))
		;
	else if (r == -BASE_EVERSION)
		file_newer(v, name, false, run, err.text);
	else if (r < 0 && kind == STORE_RECORD_HEARTBEAT && n->number != 0 && !v->o->paranoid)
		; /* it need not be durable, and after a power loss it may be anything */
	else if (r < 0)
		file_fault(v, name, run, err.text[0] ? err.text : base_error_name(r));
	else if (!whole)
		verify_fault(v, (struct verify_fault){.file = name, .len = size, .run = run,
			.what = "one of its two copies, or the padding between, is damaged; the other serves"});
	else if ((r = check_body(v, name, kind, run, &rec)) == -BASE_EVERSION)
		;
	else if (r < 0)
		file_fault(v, name, run, "its body breaks the rules of its format");
	else if (kind == STORE_RECORD_ENTRY && entry_stray(v, n, &rec, &err))
		file_fault(v, name, run, err.text);
	else if (kind == STORE_RECORD_MANIFEST && !manifest_named(n, &rec))
		file_fault(v, name, run, "its body is not the one that its name says");
	else if (kind == STORE_RECORD_STATS && (wrong = stats_wrong(v, n, &rec)))
		file_fault(v, name, run, wrong);
	else
		verify_paranoid_record(v, name, kind, run, &rec);
}

void verify_record(struct verify *v, const char *name, const struct file_name *n)
{
	struct read_record x;
	uint64_t size = 0;

	record_read(v, name, n, &x);
	if (x.r != -ENOENT && storage_size(v->store->storage, name, &size) >= 0)
		verify_progress(v, size);
	if (x.r != -ENOENT) /* gone meanwhile: what needs it will say so */
		record_judge(v, name, n, size, &x);
	store_record_release(&x.rec);
}

static void check_reserve(struct verify *v, const struct commit_file *file)
{
	void *bytes = NULL;
	size_t len = 0, at = 0;
	int r = storage_read_whole(v->store->storage, file->name, v->store->info.reserve_bytes, &bytes, &len);

	verify_progress(v, len);
	while (r == 0 && at < len && ((uint8_t *)bytes)[at] == 0)
		at++;
	if (r == -ENOENT)
		r = 0;
	else if (r < 0 || len != v->store->info.reserve_bytes)
		file_fault(v, file->name, NULL, "its size is not the one that vckpt.store gives");
	else if (at < len)
		verify_fault(v, (struct verify_fault){
			.file = file->name, .offset = at, .len = 1, .what = "a byte that must be zero is not"});
	free(bytes);
}

/* ---- all ---- */

/* *x: what was read under another name of that file, which is not read again; x->rec.body NULL: nothing yet. */
static void check_record(struct verify *v, const struct commit_file *file, const struct file_name *n,
	struct read_record *x)
{
	/* another collection may have replaced what is under all these names but for the one that says which it is */
	bool number = n->kind == STORE_RECORD_ENTRY && !n->collected;
	bool again = !x->rec.body || !number;
	struct read_record own;

	if (again)
		record_read(v, file->name, n, &own);
	if (again && own.r != -ENOENT)
		verify_progress(v, file->size);
	if (!again || own.r != -ENOENT)
		record_judge(v, file->name, n, file->size, again ? &own : x);
	if (again && own.r == 0 && number)
		*x = own;
	else if (again)
		store_record_release(&own.rec);
}

static void check_file(struct verify *v, const struct commit_file *file, struct read_record *x)
{
	struct file_name n;

	if (file->temporary) /* it has no content to check yet */
		;
	else if (file_name_parse(file->name, &n) == FILE_FOREIGN || file->foreign)
		file_fault(v, file->name, NULL, UPKEEP_VERIFY_FOREIGN);
	else if (n.kind == FILE_PACK)
		check_pack(v, file, &n);
	else if (n.kind == FILE_RESERVE)
		check_reserve(v, file);
	else
		check_record(v, file, &n, x);
}

static void check_files(void *arg, unsigned worker)
{
	struct read_record x = {0};
	struct job *j = arg;

	(void)worker;
	for (size_t i = 0; i < j->n; i++)
		check_file(j->v, j->files[i], &x);
	store_record_release(&x.rec);
	free(j);
}

static int compare_packs(const void *a, const void *b)
{
	return strcmp(((const struct verify_pack *)a)->file, ((const struct verify_pack *)b)->file);
}

/* Is this a file of a run that cannot be read, or in the place of its directory? Such files are not judged. */
static bool is_unread(const struct verify *v, const char *name)
{
	for (size_t i = 0; i < v->nunread; i++) {
		size_t n = strlen(v->unread[i]);

		if (!strncmp(name, "runs/", 5) && !strncmp(name + 5, v->unread[i], n) &&
			(!name[5 + n] || name[5 + n] == '/'))
			return true;
	}
	return false;
}

/* Names of files that have only one come first, then those of each other file one after another; by name. */
static int compare_files(const void *a, const void *b)
{
	const struct commit_file *x = *(const struct commit_file *const *)a, *y = *(const struct commit_file *const *)b;

	if ((x->names > 1) != (y->names > 1))
		return x->names > 1 ? 1 : -1;
	if (x->names > 1 && x->device != y->device)
		return x->device < y->device ? -1 : 1;
	if (x->names > 1 && x->number != y->number)
		return x->number < y->number ? -1 : 1;
	return strcmp(x->name, y->name);
}

/* Are both names of one file, in one directory? A stranger's store is read under each name. */
static bool same_file(const struct verify *v, const struct commit_file *a, const struct commit_file *b)
{
	const char *slash = strrchr(a->name, '/');
	size_t len = slash ? (size_t)(slash + 1 - a->name) : 0;

	return !v->o->paranoid && a->names > 1 && b->names > 1 && a->number && a->number == b->number
		&& a->device == b->device && strncmp(a->name, b->name, len) == 0 && !strchr(b->name + len, '/');
}

/* The files that are looked at, in *ret_all, malloc'ed. */
static int files_choose(struct verify *v, const struct commit_files *files, const struct commit_file ***ret_all,
	size_t *ret_n)
{
	const struct commit_file **all = malloc((files->n + 1) * sizeof *all);
	size_t n = 0;

	if (!all)
		return -ENOMEM;
	for (size_t i = 0; i < files->n; i++) {
		const struct commit_file *file = &files->all[i];
		const char *said = v->o->paranoid && !is_unread(v, file->name) ? verify_paranoid_file(file) : NULL;

		if (said)
			file_fault(v, file->name, NULL, said);
		if (!(said && file->foreign) && strncmp(file->name, "index/", 6) != 0 && !is_unread(v, file->name))
			all[n++] = file;
	}
	if (n)
		qsort(all, n, sizeof *all, compare_files);
	*ret_all = all;
	*ret_n = n;
	return 0;
}

static int files_run(struct verify *v, const struct commit_file **all, size_t n)
{
	size_t end;

	for (size_t i = 0; i < n; i++)
		if (i == 0 || !same_file(v, all[i - 1], all[i]))
			v->total_bytes += all[i]->size;
	for (size_t i = 0; i < n; i = end) {
		struct job *j = malloc(sizeof *j);

		if (!j)
			return -ENOMEM;
		for (end = i + 1; end < n && same_file(v, all[i], all[end]);)
			end++;
		*j = (struct job){v, &all[i], end - i};
		v->result.files += j->n;
		base_pool_run(v->pool, check_files, j);
	}
	return 0;
}

int verify_files(struct verify *v, struct base_error *err)
{
	base_cleanup_free const struct commit_file **all = NULL;
	struct commit_files files = {0};
	struct base_error why = {0};
	size_t n = 0;
	int r = commit_files_list(v->store, "", &files, &why);

	/* because of an unread run's directory; references of the other runs' steps are hashed instead */
	if (r < 0 && r != -ENOMEM && v->nunread)
		r = 0, v->unlisted = true;
	else if (r < 0)
		base_error_set(err, r, "%s", why.text);
	if (r >= 0)
		r = files_choose(v, &files, &all, &n);
	if (r >= 0)
		r = files_run(v, all, n);
	base_pool_wait(v->pool);
	if (v->npacks)
		qsort(v->packs, v->npacks, sizeof *v->packs, compare_packs);
	commit_files_release(&files);
	return r < 0 ? r : 0;
}
