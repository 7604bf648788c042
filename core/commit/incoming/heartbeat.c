/* SPDX-License-Identifier: Apache-2.0
 *
 * heartbeat: files that say "alive", and what those of others mean.
 *
 * Heartbeats decide when to ask, never what is true: a rank that finds one stopped appends `abort` to the list, and a
 * writer that was only slow finds that entry. So nothing here needs to be exact: an error costs time, in both
 * directions.
 *
 * A heartbeat names the process that it speaks for: the space of its pid (kernel boot and pid namespace, hashed into
 * the form of a UUID, since a boot id alone would let a container judge pids that it cannot see), pid and start time.
 * An observer in the same space knows at once whether that process lives. All others watch, by their own monotonic
 * clock, whether the number grows.
 *
 * The thread puts n + 1 before it deletes n, so that a listing finds one of them at all times. A put that failed may
 * still have landed: its number is not used again, and every number since the last good one is deleted with it. Number
 * 0 may be that of another process with the same launch id: it is deleted only if it says what was put.
 *
 * Only number 0 is durable. It is put before anything else of the launch, so that the collector never takes a save that
 * begins for a dead one. The later numbers matter only to observers of the moment. Thousands of ranks beat into one
 * directory for the whole training; if beats were synced, each would wait for the medium twice. */
#include "core/commit/incoming/heartbeat.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>

#include "core/base/array.h"
#include "core/base/clock.h"
#include "core/base/log.h"
#include "core/base/text.h"

#define WRITER_HOST_MAX 52      /* of a host's name in that of a rank's file */
#define IDLE_AFTER 2u           /* usual periods, until they grow */
#define IDLE_PERIODS 12u        /* of the usual length, in the longest */

struct commit_heartbeat {
	struct store *store;
	char launch[17], run[PROTO_RUN_MAX + 1];
	char writer[65];           /* in the name: the host; of a job's rank `<host>.r<rank>` */
	uint64_t every_ms, quick_until_ms; /* monotonic */
	uint8_t nonce[PROTO_NONCE_BYTES];
	bool (*tend)(void *arg, uint64_t *ret_idle_ms);
	void *tend_arg;
	struct proto_alive alive;
	_Atomic uint64_t first, last; /* numbers that may exist: [first, last]; the thread's until it is joined */
	_Atomic uint64_t begun_ms, took_ms; /* monotonic: of a beat under way, or 0; that the last one took */
	bool warned;
	pthread_t thread;
	uint64_t period_ms;        /* as the last beat states, which the next one follows; the thread's */
	pthread_mutex_t lock;      /* protects stop and woken */
	pthread_cond_t wake;
	bool stop, woken;
};

/* ---- this machine ---- */

/* Reads a small file of /proc into text; false if there is none. */
static bool proc_read(const char *path, char *text, size_t size)
{
	base_cleanup_close int fd = open(path, O_RDONLY | O_CLOEXEC);
	ssize_t n = fd < 0 ? -1 : read(fd, text, size - 1);

	if (n <= 0)
		return false;
	text[n] = 0;
	return true;
}

static char space_text[37];

static void space_fill(void)
{
	static const char digit[] = "0123456789abcdef";
	char boot[64] = "", what[256], link[128] = "";
	struct base_digest d;
	size_t at = 0;

	if (!proc_read("/proc/sys/kernel/random/boot_id", boot, sizeof boot))
		snprintf(boot, sizeof boot, "%llu %d", (unsigned long long)base_realtime_ns(),
			(int)getpid()); /* equal to no other: others watch us */
	if (readlink("/proc/self/ns/pid", link, sizeof link - 1) < 0)
		link[0] = 0;
	snprintf(what, sizeof what, "%.36s %s", boot, link);
	base_sha256(what, strlen(what), &d);
	for (unsigned i = 0; i < 16; i++) {
		if (i == 4 || i == 6 || i == 8 || i == 10)
			space_text[at++] = '-';
		space_text[at++] = digit[d.bytes[i] >> 4];
		space_text[at++] = digit[d.bytes[i] & 15];
	}
}

static const char *heartbeat_space(void)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;

	pthread_once(&once, space_fill);
	return space_text;
}

/* Start time of a living process in clock ticks since boot; false: there is none (a zombie writes no more). */
static bool process_start_time(uint64_t pid, uint64_t *ret_start)
{
	char path[64], text[1024], state;
	unsigned long long start;
	const char *after;

	snprintf(path, sizeof path, "/proc/%llu/stat", (unsigned long long)pid);
	if (!proc_read(path, text, sizeof text))
		return false;
	after = strrchr(text, ')'); /* the name before it may hold anything */
	if (!after ||
		sscanf(after, ") %c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %llu",
			&state, &start) != 2)
		return false;
	*ret_start = start;
	return state != 'Z' && state != 'X';
}

/* ---- our own ---- */

static void heartbeat_name(const struct commit_heartbeat *h, uint64_t n, char name[static STORAGE_NAME_MAX])
{
	snprintf(name, STORAGE_NAME_MAX, "hosts/%s.%s.%llu", h->launch, h->writer, (unsigned long long)n);
}

static int heartbeat_body(const struct commit_heartbeat *h, uint64_t n, struct base_buf *body)
{
	struct proto_heartbeat m = {.launch = h->launch, .host = store_hostname(), .run = h->run, .number = n,
		.time_ns = base_realtime_ns(), .ranks = &h->alive, .nranks = 1, .period_ms = (uint32_t)h->period_ms};

	m.boot_id = heartbeat_space();
	memcpy(m.nonce, h->nonce, sizeof m.nonce);
	return proto_heartbeat_encode(&m, body);
}

/* Did a put whose outcome is not known land? */
static bool heartbeat_landed(const struct commit_heartbeat *h, const char *name, const struct base_buf *body)
{
	struct store_record there = {0};
	bool same = store_record_get(h->store->storage, name, STORE_RECORD_HEARTBEAT, h->store->info.id, &there, NULL,
			    NULL) == 0
		&& there.len == body->len && memcmp(there.body, body->data, body->len) == 0;

	store_record_release(&there);
	return same;
}

/* Number 0, durable; what cannot be put is not left there. */
static int heartbeat_first(struct commit_heartbeat *h)
{
	base_cleanup_buf struct base_buf body = BASE_BUF_INIT;
	char name[STORAGE_NAME_MAX];
	int r = heartbeat_body(h, 0, &body);

	if (r < 0)
		return r;
	heartbeat_name(h, 0, name);
	r = store_record_put(h->store->storage, name, STORE_RECORD_HEARTBEAT, h->store->info.id, body.data, body.len);
	if (r < 0 && heartbeat_landed(h, name, &body))
		storage_remove(h->store->storage, name);
	return r == STORAGE_PUT_OTHER ? -EEXIST : r;
}

static int heartbeat_put(struct commit_heartbeat *h, uint64_t n)
{
	base_cleanup_buf struct base_buf body = BASE_BUF_INIT;
	char name[STORAGE_NAME_MAX];
	int r = heartbeat_body(h, n, &body);

	heartbeat_name(h, n, name);
	if (r == 0)
		r = store_record_put_fleeting(h->store->storage, name, STORE_RECORD_HEARTBEAT, h->store->info.id,
			body.data, body.len);
	return r == STORAGE_PUT_OTHER ? -EEXIST : r;
}

static void heartbeat_drop(struct commit_heartbeat *h, uint64_t end)
{
	char name[STORAGE_NAME_MAX];

	for (; h->first < end; h->first++) {
		heartbeat_name(h, h->first, name);
		storage_remove(h->store->storage, name);
	}
}

static bool heartbeat_beat(struct commit_heartbeat *h)
{
	int r;

	h->begun_ms = base_monotonic_ms();
	r = heartbeat_put(h, ++h->last);
	h->took_ms = base_monotonic_ms() - h->begun_ms;
	h->begun_ms = 0;
	if (r == 0)
		heartbeat_drop(h, h->last);
	else if (!h->warned)
		base_warning("%s: heartbeat of launch %s cannot be written: %s", h->store->path, h->launch,
			base_error_name(r));
	h->warned = r != 0;
	return r == 0;
}

uint64_t commit_heartbeat_period_ms(uint64_t every_ms, uint64_t idle_ms)
{
	return idle_ms < IDLE_AFTER * every_ms ? every_ms : base_min(idle_ms, IDLE_PERIODS * every_ms);
}

static uint64_t heartbeat_pause_ms(const struct commit_heartbeat *h)
{
	return base_monotonic_ms() < h->quick_until_ms ? base_min(h->period_ms, COMMIT_HEARTBEAT_QUICK_MS)
						       : h->period_ms;
}

/* The lock is held. false: it is stopped. */
static bool heartbeat_pause(struct commit_heartbeat *h)
{
	const struct timespec next = base_clock_in_ms(CLOCK_MONOTONIC, (int64_t)heartbeat_pause_ms(h));

	while (!h->stop && !(h->woken && h->period_ms > h->every_ms)
	       && pthread_cond_timedwait(&h->wake, &h->lock, &next) != ETIMEDOUT)
		;
	h->woken = false;
	return !h->stop;
}

static void *heartbeat_main(void *arg)
{
	struct commit_heartbeat *h = arg;

	pthread_mutex_lock(&h->lock);
	while (heartbeat_pause(h)) {
		uint64_t idle_ms = 0;
		bool beaten;

		pthread_mutex_unlock(&h->lock);
		beaten = !h->tend || h->tend(h->tend_arg, &idle_ms);
		h->period_ms = commit_heartbeat_period_ms(h->every_ms, idle_ms);
		beaten = beaten && heartbeat_beat(h);
		pthread_mutex_lock(&h->lock);
		if (!beaten) /* the file that is there may state a shorter one */
			h->period_ms = h->every_ms;
	}
	pthread_mutex_unlock(&h->lock);
	return NULL;
}

static int heartbeat_thread(struct commit_heartbeat *h)
{
	pthread_condattr_t monotonic;
	sigset_t all, before;
	int r;

	pthread_condattr_init(&monotonic);
	pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
	pthread_cond_init(&h->wake, &monotonic);
	pthread_condattr_destroy(&monotonic);
	pthread_mutex_init(&h->lock, NULL);
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	r = pthread_create(&h->thread, NULL, heartbeat_main, h);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	return -r;
}

/* The rank alone keeps the name apart from every other of the launch: a long host name is cut without harm. */
static void heartbeat_writer(struct commit_heartbeat *h, const struct commit_heartbeat_options *o)
{
	if (o->job)
		snprintf(h->writer, sizeof h->writer, "%.*s.r%u", WRITER_HOST_MAX, store_hostname(), o->rank);
	else
		snprintf(h->writer, sizeof h->writer, "%s", store_hostname());
}

int commit_heartbeat_start(struct store *s, const struct commit_heartbeat_options *o, struct commit_heartbeat **ret_h,
	struct base_error *err)
{
	struct commit_heartbeat *h = calloc(1, sizeof *h);
	int r;

	if (!h)
		return base_no_memory_for(err, "run %s", o->run);
	h->store = s;
	snprintf(h->launch, sizeof h->launch, "%s", o->launch);
	snprintf(h->run, sizeof h->run, "%s", o->run);
	heartbeat_writer(h, o);
	h->every_ms = o->every_ms ? o->every_ms : COMMIT_HEARTBEAT_EVERY_S * 1000;
	h->period_ms = h->every_ms;
	h->quick_until_ms = o->quick_ms ? base_monotonic_ms() + o->quick_ms : 0;
	if (o->nonce)
		memcpy(h->nonce, o->nonce, sizeof h->nonce);
	h->tend = o->tend;
	h->tend_arg = o->tend_arg;
	h->alive.rank = o->rank;
	h->alive.pid = (uint64_t)getpid();
	process_start_time(h->alive.pid, &h->alive.start_time);
	r = heartbeat_first(h);
	if (r == 0 && (r = heartbeat_thread(h)) < 0)
		heartbeat_drop(h, 1);
	if (r < 0) {
		free(h);
		if (r == -EEXIST)
			return base_error_set(err, r,
				"run %s: the launch id was used before: rank %u of launch %s has shown a heartbeat "
				"on this host already", o->run, o->rank, o->launch);
		return store_denied(s, r, err) ? r : base_error_set(err, r,
			"%s/hosts: the heartbeat cannot be written: %s", s->path, base_error_name(r));
	}
	*ret_h = h;
	return 0;
}

void commit_heartbeat_stop(struct commit_heartbeat *h)
{
	if (!h)
		return;
	pthread_mutex_lock(&h->lock);
	h->stop = true;
	pthread_cond_signal(&h->wake);
	pthread_mutex_unlock(&h->lock);
	pthread_join(h->thread, NULL);
	heartbeat_drop(h, h->last + 1);
	pthread_cond_destroy(&h->wake);
	pthread_mutex_destroy(&h->lock);
	free(h);
}

void commit_heartbeat_wake(struct commit_heartbeat *h)
{
	pthread_mutex_lock(&h->lock);
	h->woken = true;
	pthread_cond_signal(&h->wake);
	pthread_mutex_unlock(&h->lock);
}

uint64_t commit_heartbeat_slow_ms(const struct commit_heartbeat *h)
{
	uint64_t begun = h->begun_ms, took = h->took_ms;

	return begun ? base_max(took, base_monotonic_ms() - begun) : took;
}

bool commit_heartbeat_own(const struct commit_heartbeat *h, const char *host, uint64_t number)
{
	char name[STORAGE_NAME_MAX], own[STORAGE_NAME_MAX];

	commit_heartbeat_name(h->launch, h->alive.rank, host, number, name);
	heartbeat_name(h, number, own);
	return strcmp(name, own) == 0 && number <= h->last; /* a lower one was there when the listing began */
}

/* ---- others' ---- */

/* With the usual period, a quarter of the time-out, that is the time-out. */
uint64_t commit_heartbeat_limit_ms(uint64_t timeout_ms, uint64_t period_ms)
{
	return base_max(timeout_ms, period_ms + timeout_ms / 4 * 3);
}

bool commit_heartbeat_name_parse(const char *base, char launch[static 17], char host[static 65], uint64_t *ret_number)
{
	const char *dot = strrchr(base, '.');
	size_t len = strlen(base);

	if (len < 20 || strspn(base, "0123456789abcdef") != 16 || base[16] != '.' || !dot || dot <= base + 17 ||
		dot - base - 17 > 64 || strlen(dot) > 20 || !base_decimal(dot + 1, 0, UINT64_MAX, ret_number))
		return false;
	snprintf(launch, 17, "%.16s", base);
	snprintf(host, 65, "%.*s", (int)(dot - base - 17), base + 17);
	return true;
}

/* /proc may hide the processes of other users (hidepid). A signal is still answered in another way than where there is
 * no process. */
static bool process_hidden(uint64_t pid)
{
	return (errno == ENOENT || errno == EPERM) && pid > 0 && pid <= INT32_MAX && kill((pid_t)pid, 0) < 0
		&& errno == EPERM;
}

/* If this process cannot look (it has no descriptor left, say), the other counts as alive. A hidden process may be a
 * later one with the same pid. start_time 0: the writer could not look at itself. */
static enum commit_liveness process_judge(uint64_t pid, uint64_t start_time)
{
	uint64_t start;

	errno = 0;
	if (process_start_time(pid, &start))
		return start_time == 0 || start == start_time ? COMMIT_ALIVE : COMMIT_DEAD;
	if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == EIO || errno == EACCES)
		return COMMIT_ALIVE;
	return process_hidden(pid) ? COMMIT_UNKNOWN : COMMIT_DEAD;
}

bool commit_process_lives(uint64_t pid, uint64_t start_time)
{
	return process_judge(pid, start_time) != COMMIT_DEAD;
}

/* The last process that was found alive. Ranks that are threads share one, and it is looked for once. */
struct lived { uint64_t pid, start_time; };

static enum commit_liveness heartbeat_judge(const struct proto_heartbeat *m, struct lived *lived)
{
	enum commit_liveness all = COMMIT_DEAD, state;

	if (strcmp(m->boot_id, heartbeat_space()) != 0)
		return COMMIT_UNKNOWN;
	for (uint32_t i = 0; i < m->nranks && all != COMMIT_ALIVE; i++) {
		struct lived one = {m->ranks[i].pid, m->ranks[i].start_time};

		state = memcmp(&one, lived, sizeof one) == 0 ? COMMIT_ALIVE : process_judge(one.pid, one.start_time);
		if (state == COMMIT_ALIVE)
			*lived = one;
		if (state != COMMIT_DEAD)
			all = state;
	}
	return all;
}

struct launches_found { struct commit_launch_info *all; size_t n, size; };

static int launches_add(void *arg, const struct storage_entry *entry)
{
	const char *slash = strrchr(entry->name, '/'), *base = slash ? slash + 1 : entry->name;
	struct launches_found *f = arg;
	struct commit_launch_info *info;
	char host[65];

	if (entry->foreign || entry->temporary || strlen(entry->name) >= sizeof info->file)
		return 0;
	if (base_array_room(f->all, f->size, f->n + 1) < 0)
		return -ENOMEM;
	info = &f->all[f->n];
	*info = (struct commit_launch_info){0};
	if (!commit_heartbeat_name_parse(base, info->launch, host, &info->number))
		return 0;
	snprintf(info->host, sizeof info->host, "%s", host);
	snprintf(info->file, sizeof info->file, "%s", entry->name);
	f->n++;
	return 0;
}

/* Not inlined: with sanitizers and -O3 gcc 12 takes the inlined comparison for one of no bytes, and warns. */
static __attribute__((noinline)) int launch_writer_order(const struct commit_launch_info *a,
	const struct commit_launch_info *b)
{
	int c = strcmp(a->launch, b->launch);

	return c ? c : strcmp(a->host, b->host);
}

/* Of one writer the highest number first. */
static int launch_order(const void *pa, const void *pb)
{
	const struct commit_launch_info *a = pa, *b = pb;
	int c = launch_writer_order(a, b);

	return c ? c : (a->number < b->number) - (a->number > b->number);
}

/* false: the file is gone. A heartbeat that cannot be read does not count against its launch; it is watched like one of
 * another host. */
static bool launch_read(struct store *s, struct commit_launch_info *info, struct lived *lived)
{
	struct proto_heartbeat m = {0};
	int r = store_record_load(s, info->file, STORE_RECORD_HEARTBEAT, proto_heartbeat_decode, &m, "", NULL);

	if (r == -ENOENT)
		return false;
	info->state = COMMIT_UNKNOWN;
	if (r < 0)
		return true;
	info->state = heartbeat_judge(&m, lived);
	if (m.run && proto_run_valid(m.run))
		snprintf(info->run, sizeof info->run, "%s", m.run);
	proto_heartbeat_release(&m);
	return true;
}

/* Lists the heartbeats, and reads those that `known` lacks, which becomes the new list. Both are sorted by writer. */
static int launches_once(struct store *s, struct launches_found *known, bool *ret_moved)
{
	struct launches_found f = {0};
	struct lived lived = {0};
	size_t kept = 0, at = 0;
	int r = storage_list_files(s->storage, "hosts", launches_add, &f);

	*ret_moved = false;
	if (f.n)
		qsort(f.all, f.n, sizeof *f.all, launch_order);
	for (size_t i = 0; r >= 0 && i < f.n; i++) {
		struct commit_launch_info *info = &f.all[i];

		if (i && launch_writer_order(info, info - 1) == 0)
			continue;
		while (at < known->n && launch_writer_order(&known->all[at], info) < 0)
			at++;
		if (at < known->n && launch_writer_order(&known->all[at], info) == 0)
			f.all[kept++] = known->all[at];
		else if (launch_read(s, info, &lived))
			f.all[kept++] = *info;
		else
			*ret_moved = true;
	}
	f.n = kept;
	free(known->all);
	*known = f;
	return r;
}

/* A heartbeat that goes while it is read was replaced by its next number, or ended: look again, for those alone. */
int commit_launches(struct store *s, struct commit_launch_info **ret_infos, size_t *ret_n, struct base_error *err)
{
	struct launches_found f = {0};
	bool moved = true;
	int r = 0;

	for (unsigned tries = 0; moved && r >= 0 && tries < 10; tries++)
		r = launches_once(s, &f, &moved);
	if (r < 0 && r != -ENOENT) {
		free(f.all);
		if (store_denied_listing(s, r, err))
			return r;
		return base_error_set(err, r, "%s/hosts cannot be listed: %s", s->path, base_error_name(r));
	}
	*ret_infos = f.all;
	*ret_n = f.n;
	return 0;
}

/* ---- a job's ranks ---- */

struct ranks_each { const char *launch; commit_heartbeat_func f; void *arg; };

/* The rank at the end of `<host>.r<rank>`, which is cut off; false: a writer alone. */
static bool writer_cut(char *writer, uint32_t *ret_rank)
{
	char *dot = strrchr(writer, '.');
	uint64_t n;

	if (!dot || dot[1] != 'r' || !base_decimal(dot + 2, 0, UINT32_MAX, &n))
		return false;
	*ret_rank = (uint32_t)n;
	*dot = 0;
	return true;
}

bool commit_heartbeat_may_be_here(const char *host)
{
	return strncmp(host, store_hostname(), WRITER_HOST_MAX) == 0;
}

static int ranks_found(void *arg, const struct storage_entry *entry)
{
	const char *slash = strrchr(entry->name, '/'), *base = slash ? slash + 1 : entry->name;
	struct ranks_each *e = arg;
	char launch[17], writer[65];
	uint64_t number;
	uint32_t rank;

	if (!entry->foreign && !entry->temporary && strncmp(base, e->launch, 16) == 0
	    && commit_heartbeat_name_parse(base, launch, writer, &number) && writer_cut(writer, &rank))
		e->f(e->arg, rank, number, writer, entry->name);
	return 0;
}

int commit_heartbeat_each(struct store *s, const char *launch, commit_heartbeat_func f, void *arg)
{
	struct ranks_each e = {launch, f, arg};

	return storage_list_files(s->storage, "hosts", ranks_found, &e);
}

void commit_heartbeat_name(const char *launch, uint32_t rank, const char *host, uint64_t number,
	char name[static STORAGE_NAME_MAX])
{
	snprintf(name, STORAGE_NAME_MAX, "hosts/%s.%s.r%u.%llu", launch, host, rank, (unsigned long long)number);
}

int commit_heartbeat_look(struct store *s, const char *file, struct commit_heartbeat_rank *ret_r)
{
	struct proto_heartbeat m = {0};
	int r = store_record_load(s, file, STORE_RECORD_HEARTBEAT, proto_heartbeat_decode, &m, "", NULL);

	*ret_r = (struct commit_heartbeat_rank){0};
	if (r == 0) {
		snprintf(ret_r->host, sizeof ret_r->host, "%s", m.host);
		ret_r->here = m.nranks == 1 && strcmp(m.boot_id, heartbeat_space()) == 0;
		ret_r->pid = m.nranks ? m.ranks[0].pid : 0;
		ret_r->start_time = m.nranks ? m.ranks[0].start_time : 0;
		memcpy(ret_r->nonce, m.nonce, sizeof ret_r->nonce);
		ret_r->period_ms = m.period_ms;
	}
	proto_heartbeat_release(&m);
	return r;
}
