/* SPDX-License-Identifier: Apache-2.0
 *
 * writers: a save of very many ranks, played by one process over core/commit: what the protocol, the announcements, the
 * manifest and the checks cost, with next to no data.
 *
 *     writers STORE WORLD [rank 0 waits from: first|last] [latency of a request, µs] [layouts] [still]
 *
 * What is real: every call of the storage that a rank makes, its launch with a heartbeat thread, begin, two packs with
 * the real part, announcement; rank 0's wait and commit. What is played: the ranks prepare one after another in one
 * thread, share one open store (so one host, one process, one set of cached packs), and the ranks but 0 look at the
 * list once, after the commit, instead of polling. Storage is the real one behind counters, which may add a wait to
 * each request from the last announcement on, as a network would. With `still` every rank's heartbeat remains the one
 * that it begins with until all is counted: how many others fall into a phase depends on time. Prints one JSON object.
 */
#include <errno.h>
#include <malloc.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "core/base/cleanup.h"
#include "core/base/clock.h"
#include "core/commit/attempt/attempt.h"
#include "core/commit/incoming/incoming.h"
#include "core/commit/launch/launch_work.h"
#include "core/commit/check/manifest_check.h"
#include "core/load/open/step.h"
#include "core/save/write/known_internal.h"
#include "core/step/layout.h"
#include "core/step/part.h"

#define PIECE_BYTES 100u
#define TENSORS 16u
#define LAYOUTS_MAX 64u

/* ---- storage that counts ---- */

enum kind { PUT, READ_WHOLE, SIZE, LIST, LIST_DIRS, REMOVE, REMOVE_DIR, SYNC_DIR, FILE_OPEN, FILE_READ, WRITER_OPEN,
	WRITER_APPEND, WRITER_SEAL, KINDS };
static const char *const kind_name[KINDS] = {"put", "read_whole", "size", "list", "list_dirs", "remove", "remove_dir",
	"sync_dir", "file_open", "file_read", "writer_open", "writer_append", "writer_seal"};
/* What rank 0 does from the last announcement on, by what it touches. */
enum phase { READ_PARTS, PUT_MANIFEST, CHECK_PACKS, READ_ROWS, PUT_ENTRY, DELETE_FOLDER, PHASES };
static const char *const phase_name[PHASES] = {"announcements", "manifest_put", "check_packs", "cover", "entry",
	"folder"};

static const struct storage_ops *inner;
static struct storage_ops counting;
static atomic_ullong counts[KINDS], beats, shown, bytes_read;
static atomic_ullong phase_begin[PHASES], phase_end[PHASES];
static atomic_uint latency_us;
static pthread_rwlock_t still = PTHREAD_RWLOCK_INITIALIZER; /* held for writing: heartbeats' threads wait */
static _Thread_local bool plays; /* a rank or more: no heartbeat's thread */

/* Where the thread of a heartbeat lists others, or beats: all else that it does comes after that. */
static void heartbeat_waits(void)
{
	if (plays)
		return;
	pthread_rwlock_rdlock(&still);
	pthread_rwlock_unlock(&still);
}

static uint64_t called(enum kind kind, const char *name)
{
	unsigned wait_us = atomic_load(&latency_us);

	if (name && strncmp(name, "hosts/", 6) == 0)
		atomic_fetch_add(&beats, 1);
	else
		atomic_fetch_add(&counts[kind], 1);
	if (wait_us && kind != WRITER_APPEND)
		usleep(wait_us);
	return base_monotonic_ns();
}

static void touched(enum phase phase, uint64_t begin)
{
	unsigned long long none = 0, now = base_monotonic_ns(), end = atomic_load(&phase_end[phase]);

	atomic_compare_exchange_strong(&phase_begin[phase], &none, begin);
	while (end < now && !atomic_compare_exchange_weak(&phase_end[phase], &end, now))
		;
}

static int c_put(struct storage *s, const char *name, const void *bytes, size_t len)
{
	uint64_t begin = called(PUT, name);
	int r = inner->put(s, name, bytes, len);

	if (strstr(name, "/manifests/"))
		touched(PUT_MANIFEST, begin);
	else if (strncmp(name, "runs/", 5) == 0)
		touched(PUT_ENTRY, begin);
	return r;
}

static int c_put_fleeting(struct storage *s, const char *name, const void *bytes, size_t len)
{
	heartbeat_waits();
	called(PUT, name);
	return inner->put_fleeting(s, name, bytes, len);
}

static int c_put_passing(struct storage *s, const char *name, const void *bytes, size_t len)
{
	called(PUT, name);
	return inner->put_passing(s, name, bytes, len);
}

static int c_read_whole(struct storage *s, const char *name, size_t max, void **ret_bytes, size_t *ret_len)
{
	uint64_t begin = called(READ_WHOLE, name);
	int r = inner->read_whole(s, name, max, ret_bytes, ret_len);

	atomic_fetch_add(&bytes_read, r == 0 ? *ret_len : 0);
	if (strstr(name, "/part.") && r == 0)
		touched(READ_PARTS, begin);
	return r;
}

static int c_size(struct storage *s, const char *name, uint64_t *ret_size)
{
	uint64_t begin = called(SIZE, name);
	int r = inner->size(s, name, ret_size);

	if (strncmp(name, "packs/", 6) == 0)
		touched(CHECK_PACKS, begin);
	return r;
}

struct shown_each { storage_list_func f; void *arg; };

static int c_shown(void *arg, const struct storage_entry *e)
{
	struct shown_each *each = arg;

	atomic_fetch_add(&shown, 1);
	return each->f(each->arg, e);
}

static int c_list(struct storage *s, const char *dir, storage_list_func f, void *arg)
{
	struct shown_each each = {f, arg};

	if (strcmp(dir, "hosts") == 0)
		heartbeat_waits();
	called(LIST, NULL);
	return inner->list(s, dir, c_shown, &each);
}

static int c_list_dirs(struct storage *s, const char *dir, storage_list_func f, void *arg)
{
	called(LIST_DIRS, NULL);
	return inner->list_dirs(s, dir, f, arg);
}

static int c_remove(struct storage *s, const char *name)
{
	uint64_t begin = called(REMOVE, name);
	int r = inner->remove(s, name);

	if (strncmp(name, "incoming/", 9) == 0)
		touched(DELETE_FOLDER, begin);
	return r;
}

static int c_remove_dir(struct storage *s, const char *name)
{
	called(REMOVE_DIR, name);
	return inner->remove_dir(s, name);
}

static int c_sync_dir(struct storage *s, const char *name)
{
	called(SYNC_DIR, name);
	return inner->sync_dir(s, name);
}

static int c_file_open(struct storage *s, const char *name, struct storage_file **ret_f, uint64_t *ret_size)
{
	uint64_t begin = called(FILE_OPEN, name);
	int r = inner->file_open(s, name, ret_f, ret_size);

	touched(READ_ROWS, begin);
	return r;
}

static int c_file_read(struct storage_file *f, uint64_t offset, void *bytes, size_t len)
{
	uint64_t begin = called(FILE_READ, NULL);
	int r = inner->file_read(f, offset, bytes, len);

	atomic_fetch_add(&bytes_read, len);
	touched(READ_ROWS, begin);
	return r;
}

static int c_writer_open(struct storage *s, const char *name, struct storage_writer **ret_w)
{
	called(WRITER_OPEN, name);
	return inner->writer_open(s, name, ret_w);
}

static int c_writer_append(struct storage_writer *w, const void *bytes, size_t len)
{
	called(WRITER_APPEND, NULL);
	return inner->writer_append(w, bytes, len);
}

static int c_writer_seal(struct storage_writer *w)
{
	called(WRITER_SEAL, NULL);
	return inner->writer_seal(w);
}

static void count_install(struct store *s)
{
	inner = s->storage->ops;
	counting = *inner;
	counting.put = c_put;
	counting.put_fleeting = c_put_fleeting;
	counting.put_passing = c_put_passing;
	counting.read_whole = c_read_whole;
	counting.size = c_size;
	counting.list = c_list;
	counting.list_dirs = c_list_dirs;
	counting.remove = c_remove;
	counting.remove_dir = c_remove_dir;
	counting.sync_dir = c_sync_dir;
	counting.file_open = c_file_open;
	counting.file_read = c_file_read;
	counting.writer_open = c_writer_open;
	counting.writer_append = c_writer_append;
	counting.writer_seal = c_writer_seal;
	s->storage->ops = &counting;
}

static void count_print(const char *what)
{
	bool first = true;

	printf("\"%s\": {", what);
	for (unsigned i = 0; i < KINDS; i++) {
		unsigned long long n = atomic_exchange(&counts[i], 0);

		if (n)
			printf("%s\"%s\": %llu", first ? "" : ", ", kind_name[i], n), first = false;
	}
	printf("%s\"heartbeats\": %llu", first ? "" : ", ", atomic_exchange(&beats, 0));
	printf(", \"bytes_read\": %llu", atomic_exchange(&bytes_read, 0));
	printf(", \"listed\": %llu}, ", atomic_exchange(&shown, 0));
}

/* ---- a rank ---- */

struct job {
	struct store *store;
	uint32_t world, nlayouts;
	struct store_layout *layout[LAYOUTS_MAX];
	struct base_buf object[LAYOUTS_MAX];
	struct commit_launch **launches;
	struct commit_attempt **attempts;
	struct base_error err;
	uint64_t entry, ended_ns;
	int r;
	unsigned latency_us;
};

static void must(int r, const struct job *j, const char *what)
{
	if (r >= 0)
		return;
	fprintf(stderr, "%s: %s (%s)\n", what, j->err.text, base_error_name(r));
	exit(1);
}

/* The tensors are the same in all layouts but for one: ranks of a stage share one. */
static void layouts_make(struct job *j)
{
	struct tensor_grid_params params = {128 << 10, 1 << 20, 512};
	struct tensor_shape shape = {1, {(uint64_t)PIECE_BYTES * j->world}}, one = {1, {PIECE_BYTES}};

	for (uint32_t i = 0; i < j->nlayouts; i++) {
		struct store_layout_builder *b = store_layout_builder_new(params);
		base_cleanup_free uint32_t *tags = NULL;
		char name[32];

		for (unsigned t = 0; t < TENSORS; t++) {
			snprintf(name, sizeof name, "layers.%02u.weight", t);
			must(store_layout_builder_add(b, "model", name, strlen(name), TENSOR_U8, &shape, t, &j->err), j,
				name);
		}
		snprintf(name, sizeof name, "stage.%02u", i);
		must(store_layout_builder_add(b, "model", name, strlen(name), TENSOR_U8, &one, TENSORS, &j->err), j,
			name);
		must(store_layout_builder_finish(b, &j->layout[i], &j->object[i], &tags, &j->err), j, "layout");
		store_layout_builder_free(b);
	}
}

static struct proto_ref ref_of(const struct pack_object_ref *ref)
{
	return (struct proto_ref){.digest = ref->digest, .offset = ref->offset, .checks = ref->checks,
		.raw_len = ref->raw_len, .stored_len = ref->stored_len, .pack = ref->pack, .codec = ref->codec,
		.kind = ref->kind};
}

struct share {
	char model[PACK_NAME_MAX], meta[PACK_NAME_MAX];
	struct proto_pack_use packs[2];
	struct store_piece pieces[TENSORS], small;
	struct pack_object_ref layout_ref, part_ref;
};

static void pieces_write(struct job *j, struct share *s, struct commit_attempt *a, uint32_t rank)
{
	struct pack_writer *w;
	uint8_t bytes[PIECE_BYTES];
	uint64_t size;

	must(commit_attempt_pack_open(a, "model", s->model, &w), j, "pack");
	for (unsigned t = 0; t < TENSORS; t++) {
		for (unsigned i = 0; i < sizeof bytes; i++)
			bytes[i] = (uint8_t)(rank * 31 + t * 7 + i);
		must(pack_append_raw(w, PACK_OBJECT_PIECE, bytes, sizeof bytes, &s->pieces[t].ref), j, "piece");
		s->pieces[t].base = STORE_PIECE_NO_BASE;
		base_xxh128_of(j->store->info.seed, bytes, sizeof bytes, &s->pieces[t].xxh);
	}
	bytes[0]++;
	must(pack_append_raw(w, PACK_OBJECT_PIECE, bytes, sizeof bytes, &s->small.ref), j, "piece");
	s->small.base = STORE_PIECE_NO_BASE;
	base_xxh128_of(j->store->info.seed, bytes, sizeof bytes, &s->small.xxh);
	must(commit_attempt_pack_seal(a, w, &size), j, "seal");
	/* only the first rank of a layout has the small one in its part */
	s->packs[0] = (struct proto_pack_use){s->model, size, (TENSORS + (rank < j->nlayouts)) * PIECE_BYTES};
}

/* The first rank of each layout stores it. */
static void part_write(struct job *j, struct share *s, struct commit_attempt *a, uint32_t rank)
{
	uint32_t l = rank % j->nlayouts;
	struct proto_blob blobs[] = {{.name = "model.json"}, {.name = "rng.json", .per_rank = true}};
	struct proto_part part = {.rank = rank, .world = j->world, .host = store_hostname(),
		.layout = j->layout[l]->digest, .packs = s->packs, .npacks = 2,
		.blobs = rank == 0 ? blobs : blobs + 1, .nblobs = rank == 0 ? 2 : 1};
	struct tensor_box box = {.offset = {(uint64_t)rank * PIECE_BYTES}, .size = {PIECE_BYTES}};
	struct store_part_builder *b;
	struct pack_writer *w;
	uint64_t size;

	base_digest_of("", 0, &blobs[0].ref.digest);
	blobs[1].ref.digest = blobs[0].ref.digest;
	must(commit_attempt_pack_open(a, "meta", s->meta, &w), j, "pack");
	s->packs[1] = (struct proto_pack_use){s->meta, 0, 0};
	if (rank == l)
		must(pack_append_raw(w, PACK_OBJECT_LAYOUT, j->object[l].data, j->object[l].len,
			&s->layout_ref), j, "layout");
	b = store_part_builder_new(j->layout[l], w, 1);
	for (uint32_t t = 0; t < TENSORS; t++)
		must(store_part_add_row(b, t, &box, 1, &s->pieces[t], 1, &j->err), j, "row");
	if (rank == l)
		must(store_part_add_row(b, TENSORS, NULL, 0, &s->small, 1, &j->err), j, "row");
	must(pack_extent_end(w), j, "run");
	must(store_part_finish(b, &part, &s->part_ref, &j->err), j, "part");
	s->packs[1].live_bytes = s->part_ref.stored_len + s->layout_ref.stored_len;
	for (size_t i = 0; i < part.nchunks; i++)
		s->packs[1].live_bytes += part.chunks[i].ref.stored_len;
	store_part_builder_free(b);
	must(commit_attempt_pack_seal(a, w, &size), j, "seal");
	s->packs[1].size = size;
	s->layout_ref.pack = s->part_ref.pack = 1;
}

static void rank_announce(struct job *j, uint32_t rank)
{
	struct proto_replica replica = {.group = {1}, .digest = {2}};
	struct commit_attempt_save o = {0};
	struct proto_announcement m = {.layout = j->layout[rank % j->nlayouts]->digest, .tensors = TENSORS + 1,
		.stores_layout = rank < j->nlayouts, .npacks = 2,
		.bytes = (TENSORS + (rank < j->nlayouts)) * PIECE_BYTES,
		.replicas = &replica, .nreplicas = 1};
	struct share s = {0};

	must(commit_attempt_begin(j->launches[rank], &o, &j->attempts[rank], &j->err), j, "begin");
	pieces_write(j, &s, j->attempts[rank], rank);
	part_write(j, &s, j->attempts[rank], rank);
	m.part = ref_of(&s.part_ref);
	if (m.stores_layout)
		m.layout_ref = ref_of(&s.layout_ref);
	m.packs = s.packs;
	m.new_bytes = s.packs[0].size + s.packs[1].size;
	must(commit_attempt_announce(j->attempts[rank], &m, &j->err), j, "announce");
}

/* ---- the parts of the commit by themselves: nothing of the store but memory ---- */

static double seconds(uint64_t since) { return (double)(base_monotonic_ns() - since) / 1e9; }

static size_t heap(void)
{
	struct mallinfo2 m = mallinfo2();

	return m.uordblks + m.hblkhd;
}

static size_t peak_kib(void)
{
	char line[128];
	size_t kib = 0;
	FILE *f = fopen("/proc/self/status", "r");

	while (f && fgets(line, sizeof line, f))
		if (sscanf(line, "VmHWM: %zu", &kib) == 1)
			break;
	if (f)
		fclose(f);
	return kib;
}

static void peak_reset(void)
{
	FILE *f = fopen("/proc/self/clear_refs", "w");

	if (f) {
		fputs("5", f);
		fclose(f);
	}
}

static void parts_alone(struct job *j)
{
	struct proto_announcement *parts = calloc(j->world, sizeof *parts);
	const struct proto_announcement **all = calloc(j->world, sizeof *all);
	base_cleanup_buf struct base_buf body = BASE_BUF_INIT;
	struct proto_manifest m = {0};
	struct base_digest digest;
	size_t before = heap(), peak;
	uint64_t begin = base_monotonic_ns();

	for (uint32_t i = 0; i < j->world; i++) {
		struct store_record record = {0};
		char name[STORAGE_NAME_MAX];

		snprintf(name, sizeof name, "incoming/r/%s/part.%u", commit_attempt_name(j->attempts[0]), i);
		must(store_record_get(j->store->storage, name, STORE_RECORD_ANNOUNCEMENT, j->store->info.id, &record,
			NULL, &j->err), j, name);
		must(proto_announcement_decode(record.body, record.len, &parts[i]), j, name);
		store_record_release(&record);
		all[i] = &parts[i];
	}
	printf("\"announcements_s\": %.4f, \"announcements_bytes\": %zu, ", seconds(begin), heap() - before);
	begin = base_monotonic_ns();
	must(store_manifest_make(all, j->world, &body, &digest, &j->err), j, "manifest");
	printf("\"make_s\": %.4f, \"manifest_bytes\": %zu, ", seconds(begin), body.len);
	begin = base_monotonic_ns();
	must(check_manifest_replicas(j->store, all, j->world, &j->err), j, "replicas");
	printf("\"replicas_s\": %.4f, ", seconds(begin));
	must(proto_manifest_decode(body.data, body.len, &m), j, "manifest");
	begin = base_monotonic_ns();
	must(store_manifest_check_packs(j->store, &m, &j->err), j, "packs");
	printf("\"packs_s\": %.4f, ", seconds(begin));
	malloc_trim(0);
	peak_reset();
	peak = peak_kib();
	begin = base_monotonic_ns();
	must(check_manifest_cover(j->store, &m, NULL, &j->err), j, "cover");
	printf("\"cover_s\": %.4f, \"cover_kib\": %zu, ", seconds(begin), peak_kib() - peak);
	proto_manifest_release(&m);
	for (uint32_t i = 0; i < j->world; i++)
		proto_announcement_release(&parts[i]);
	free(parts);
	free(all);
}

/* ---- the save ---- */

static void *rank_0_waits(void *arg)
{
	struct job *j = arg;

	plays = true;
	j->r = commit_attempt_wait(j->attempts[0], -1, &j->entry, &j->err);
	j->ended_ns = base_monotonic_ns();
	return NULL;
}

static void launches_open(struct job *j)
{
	for (uint32_t i = 0; i < j->world; i++) {
		struct commit_launch_options o = {.run = "r", .id = "one job", .rank = i, .world = j->world,
			.heartbeat_ms = 120000};

		must(commit_launch_open(j->store, &o, &j->launches[i], &j->err), j, "launch");
	}
}

static void commit(struct job *j, bool first)
{
	uint64_t announced, begin;
	pthread_t thread;

	rank_announce(j, 0);
	if (first)
		pthread_create(&thread, NULL, rank_0_waits, j);
	for (uint32_t i = 1; i + 1 < j->world; i++)
		rank_announce(j, i);
	if (!first) { /* with one missing */
		struct commit_incoming *in;
		size_t n;

		count_print("prepare");
		begin = base_monotonic_ns();
		must(commit_incoming_read(j->store, &in, &n, &j->err), j, "incoming");
		printf("\"incoming_s\": %.4f, \"incoming_missing\": %u, ", seconds(begin), n ? in[0].nmissing : 0);
		commit_incoming_free(in, n);
		count_print("incoming");
	}
	rank_announce(j, j->world - 1);
	if (!first) {
		parts_alone(j);
		count_print("alone");
	}
	for (unsigned p = 0; p < PHASES && !first; p++)
		atomic_store(&phase_begin[p], 0), atomic_store(&phase_end[p], 0);
	latency_us = j->latency_us;
	announced = base_monotonic_ns();
	if (!first)
		rank_0_waits(j);
	else
		pthread_join(thread, NULL);
	latency_us = 0;
	must(j->r, j, "wait");
	printf("\"commit_s\": %.4f, \"commit_ns\": %llu, ", (double)(j->ended_ns - announced) / 1e9,
		(unsigned long long)commit_attempt_commit_ns(j->attempts[0]));
	count_print(first ? "prepare_and_commit" : "commit");
	printf("\"phases\": {");
	for (unsigned p = 0; p < PHASES; p++)
		printf("%s\"%s\": %.4f", p ? ", " : "", phase_name[p],
			(double)(atomic_load(&phase_end[p]) - atomic_load(&phase_begin[p])) / 1e9);
	printf("}, ");
}

/* What the next save of one rank asks the store before it recognises its pieces: commit, own line, own chunks. */
static void base_lookup(struct job *j, const char *path, const struct commit_list_step *step)
{
	struct store *s; /* with no pack open */
	struct save_bases bases = {.rank = j->world / 2};
	struct tensor_box box = {.offset = {(uint64_t)bases.rank * PIECE_BYTES}, .size = {PIECE_BYTES}};
	unsigned found = 0;
	uint64_t begin;

	must(store_open(path, 0, &s, &j->err), j, "open");
	s->storage->ops = &counting;
	begin = base_monotonic_ns();
	must(save_bases_add(&bases, s, "r", step->entry, &step->commit.manifest), j, "base");
	for (uint32_t t = 0; t < TENSORS && save_bases_count(&bases); t++) {
		struct save_base_row *row = save_base_row_get(bases.all[0], j->layout[bases.rank % j->nlayouts], t,
			&box);
		const char *pack;

		found += row && save_base_piece(row, &box, PIECE_BYTES, &pack);
		save_base_row_put(row);
	}
	printf("\"base_s\": %.4f, \"base_found\": %u, ", seconds(begin), found);
	save_bases_release(&bases);
	store_close(s);
	count_print("base");
}

/* What a rank of a load looks for: the document of all ranks, its own, and whether there are others. */
static void blobs_find(struct job *j, struct load_step *step)
{
	struct load_object *o;
	uint64_t begin = base_monotonic_ns();
	uint32_t rank;

	must(load_blob_open_named(step, "model.json", -1, NULL, &o, &j->err) - 1, j, "the blob of all");
	load_object_unref(o);
	must(load_blob_open_named(step, "rng.json", j->world / 2, NULL, &o, &j->err) - 1, j, "a blob of its own");
	load_object_unref(o);
	must(-load_step_blob_rank(step, "model.json", 0, &rank, &j->err), j, "a rank's own blob of that name");
	printf("\"blobs_s\": %.4f, ", seconds(begin));
	count_print("blobs");
}

static void afterwards(struct job *j, const char *path)
{
	struct load_step *step;
	struct store *fresh; /* with no pack open */
	struct commit_list *list;
	uint64_t begin = base_monotonic_ns(), entry;

	for (uint32_t i = 1; i < j->world; i++)
		must(commit_attempt_wait(j->attempts[i], 0, &entry, &j->err), j, "wait of another");
	printf("\"others_s\": %.4f, ", seconds(begin));
	count_print("others");
	for (uint32_t i = 0; i < j->world; i++)
		commit_attempt_free(j->attempts[i]);
	must(store_open(path, 0, &fresh, &j->err), j, "open");
	fresh->storage->ops = &counting;
	latency_us = j->latency_us;
	begin = base_monotonic_ns();
	must(commit_list_open(fresh, "r", false, &list, &j->err), j, "list");
	must(load_step_open(fresh, "r", commit_list_latest(list), &step, &j->err), j, "open");
	printf("\"open_s\": %.4f, \"open_bytes\": %zu, \"tensors\": %llu, \"listed_tensors\": %llu, ", seconds(begin),
		load_step_memory(step), (unsigned long long)load_step_info(step)->tensors,
		(unsigned long long)commit_list_latest(list)->commit.tensors);
	latency_us = 0;
	count_print("open");
	blobs_find(j, step);
	base_lookup(j, path, commit_list_latest(list));
	load_step_unref(step);
	commit_list_close(list);
	store_close(fresh);
}

int main(int argc, char **argv)
{
	bool first = argc > 3 && strcmp(argv[3], "first") == 0, holds = argc > 6 && strcmp(argv[6], "still") == 0;
	struct job j = {.world = argc > 2 ? (uint32_t)strtoul(argv[2], NULL, 10) : 0};
	pthread_attr_t small;
	uint64_t begin;

	j.nlayouts = argc > 5 ? (uint32_t)strtoul(argv[5], NULL, 10) : 1;
	if (j.world < 2 || j.nlayouts < 1 || j.nlayouts > LAYOUTS_MAX || j.nlayouts >= j.world) {
		fprintf(stderr, "usage: writers STORE WORLD [first|last] [latency, us] [layouts] [still]\n");
		return 2;
	}
	pthread_attr_init(&small); /* a thread for each heartbeat */
	pthread_attr_setstacksize(&small, 128 << 10);
	if (j.world > 1000) /* a sanitizer's own part of a stack may be larger */
		pthread_setattr_default_np(&small);
	plays = true;
	if (holds)
		pthread_rwlock_wrlock(&still);
	must(store_open(argv[1], 0, &j.store, &j.err), &j, "open");
	count_install(j.store);
	layouts_make(&j);
	j.launches = calloc(j.world, sizeof *j.launches);
	j.attempts = calloc(j.world, sizeof *j.attempts);
	printf("{\"world\": %u, ", j.world);
	begin = base_monotonic_ns();
	launches_open(&j);
	printf("\"launch_s\": %.4f, ", seconds(begin));
	count_print("launch");
	j.latency_us = argc > 4 ? (unsigned)strtoul(argv[4], NULL, 10) : 0;
	begin = base_monotonic_ns();
	commit(&j, first);
	printf("\"save_s\": %.4f, ", seconds(begin));
	afterwards(&j, argv[1]);
	if (holds)
		pthread_rwlock_unlock(&still);
	for (uint32_t i = 0; i < j.world; i++)
		commit_launch_close(j.launches[i]);
	printf("\"peak_kib\": %zu}\n", peak_kib());
	for (uint32_t i = 0; i < j.nlayouts; i++) {
		store_layout_free(j.layout[i]);
		base_buf_release(&j.object[i]);
	}
	free(j.launches);
	free(j.attempts);
	store_close(j.store);
	return 0;
}
