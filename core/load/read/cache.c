/* SPDX-License-Identifier: Apache-2.0
 *
 * cache: segments of decoded, checked bytes under one lock.
 *
 * A segment (struct load_pin) is in one of three states:
 *   FILLING  one thread reads and decodes it; others that want it wait for `filled`
 *   READY    its bytes never change; with pins == 0 it is in the list of the unused, oldest first, and may be evicted
 *   FAILED   out of the table; kept only for the threads that wait for it, which take the error from it
 *
 * A segment whose bytes were all given out in long reads goes with its last pin: a reader from end to end has the
 * bytes, or the kernel's page cache has. So a large file passes through few buffers, which stay in the processor's
 * cache (first reads through the mount: 1.47 of what they were with 256 MiB kept, 1.3 with 8 MiB kept), and evicts
 * nothing of what is read in parts. A segment that several pieces refer to is kept all the same, if two of them were in
 * use at once, or the second one came soon after the first was let go.
 *
 * A segment is known by all that decides its bytes and its length: pack, place, lengths, codec and digest of its
 * object, and its number. The digest alone is not enough: a reference may claim any digest, and bytes that one run
 * claims must not be served to another. Steps that share a piece refer to the same place, so they share segments all
 * the same.
 *
 * A request first takes or makes all its segments under the lock, then fills those that it made (those of a pack in
 * file order, several packs at once), and only then waits for those that other threads fill. So no thread waits while
 * another waits for it, and there is no deadlock.
 *
 * Memory: where fresh pages must be faulted in, a page costs more than the copy into it. So buffers come in a few size
 * classes (four to a power of two), and evicted ones stay in the list of their class. Buffers go back to the kernel
 * only when another class needs their room and more than an eighth of the bound is idle. `bytes` counts all buffers,
 * idle ones included.
 *
 * Invariants: (1) a segment's bytes are written only by the thread that made it, before it is READY; (2) a pinned
 * segment keeps its bytes; (3) no lock is held across a read. Allocation under the lock happens only while the cache
 * grows or its mix of classes changes. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "core/base/array.h"
#include "core/base/log.h"
#include "core/base/table.h"
#include "core/load/read/read_internal.h"
#include "core/storage/spread.h"

#define CACHE_CLASS_MIN 4096u
#define CACHE_CLASSES 33u            /* 4 KiB, 5, 6, 7, 8, 10, ... 1 MiB */
#define CACHE_MARKS 4096u
#define CACHE_GONE 1024u
#define CACHE_WARNED 512u            /* places whose damage was logged */

enum cache_state { CACHE_FILLING, CACHE_READY, CACHE_FAILED };

struct load_pin {
	struct load_cache *cache;
	struct pack_object_ref ref;     /* of the object; its number of the pack means nothing here */
	char *pack;                      /* its name */
	uint64_t segment;
	struct load_pin *next;           /* in its bucket, or in the list of unused structs */
	struct load_pin *newer, *older;  /* among the unused; both NULL when pinned */
	uint8_t *bytes;
	uint32_t len, class;
	unsigned pins, waiters;
	_Atomic uint64_t given;          /* of its bytes, in all */
	const struct load_object *maker; uint64_t piece; /* for which it was made: compared, never read */
	bool shared;                     /* another object or piece took it, too */
	enum cache_state state;
	struct base_error *error;        /* FAILED; may be NULL */
	int code;
};

struct cache_class { void **idle; size_t nidle, room; };
struct cache_gone { uint32_t hash; const struct load_object *maker; uint64_t piece; };

struct load_cache {
	pthread_mutex_t lock;            /* protects all below */
	pthread_cond_t filled;           /* a segment that a thread waits for left FILLING */
	struct load_pin **buckets; size_t nbuckets, nentries;
	struct load_pin *spare;          /* structs for reuse */
	struct load_pin *oldest, *newest;
	struct cache_class classes[CACHE_CLASSES];
	uint64_t idle_bytes;
	struct load_cache_stats stats;
	bool quiet;
	struct cache_gone gone[CACHE_GONE]; /* segments that were read whole and let go, by hash */
	uint32_t marks[CACHE_MARKS];       /* hashes of segments of which a few bytes were read (peek.c), by hash */
	uint64_t warned[CACHE_WARNED]; unsigned nwarned; /* hashes of (pack, offset), a ring; nwarned counts on */
};

static size_t cache_class_bytes(unsigned class)
{
	return (size_t)CACHE_CLASS_MIN / 4 * (4 + class % 4) << class / 4;
}

static unsigned cache_class_of(size_t len)
{
	unsigned class = 0;

	while (cache_class_bytes(class) < len)
		class++;
	return class;
}

struct load_cache *load_cache_new(uint64_t max_bytes)
{
	struct load_cache *c = calloc(1, sizeof *c);

	if (!c)
		return NULL;
	c->nbuckets = 1024;
	c->buckets = calloc(c->nbuckets, sizeof *c->buckets);
	if (!c->buckets) {
		free(c);
		return NULL;
	}
	pthread_mutex_init(&c->lock, NULL);
	pthread_cond_init(&c->filled, NULL);
	c->stats.max_bytes = max_bytes;
	return c;
}

void load_cache_quiet(struct load_cache *c)
{
	c->quiet = true;
}

static void cache_entry_free(struct load_pin *e)
{
	free(e->pack);
	free(e->error);
	free(e->bytes);
	free(e);
}

void load_cache_free(struct load_cache *c)
{
	if (!c)
		return;
	for (size_t i = 0; i < c->nbuckets; i++)
		for (struct load_pin *e = c->buckets[i], *next; e; e = next) {
			next = e->next;
			cache_entry_free(e);
		}
	for (struct load_pin *e = c->spare, *next; e; e = next) {
		next = e->next;
		cache_entry_free(e);
	}
	for (unsigned i = 0; i < CACHE_CLASSES; i++) {
		for (size_t n = 0; n < c->classes[i].nidle; n++)
			free(c->classes[i].idle[n]);
		free(c->classes[i].idle);
	}
	free(c->buckets);
	pthread_cond_destroy(&c->filled);
	pthread_mutex_destroy(&c->lock);
	free(c);
}

void load_cache_stat(struct load_cache *c, struct load_cache_stats *ret_s)
{
	pthread_mutex_lock(&c->lock);
	*ret_s = c->stats;
	pthread_mutex_unlock(&c->lock);
}

/* ---- buffers; all under the lock ---- */

static void cache_class_shrink(struct load_cache *c, unsigned class)
{
	struct cache_class *k = &c->classes[class];

	free(k->idle[--k->nidle]);
	c->idle_bytes -= cache_class_bytes(class);
	c->stats.bytes -= cache_class_bytes(class);
}

/* Gives back an idle buffer, of the largest class that has one. */
static void cache_idle_shrink(struct load_cache *c)
{
	unsigned class = CACHE_CLASSES;

	while (c->classes[--class].nidle == 0)
		;
	cache_class_shrink(c, class);
}

static void cache_buffer_idle(struct load_cache *c, unsigned class, uint8_t *bytes)
{
	struct cache_class *k = &c->classes[class];

	if (base_array_room(k->idle, k->room, k->nidle + 1) < 0) {
		free(bytes);
		c->stats.bytes -= cache_class_bytes(class);
		return;
	}
	k->idle[k->nidle++] = bytes;
	c->idle_bytes += cache_class_bytes(class);
}

static void cache_unlink(struct load_pin *e)
{
	struct load_cache *c = e->cache;

	*(e->older ? &e->older->newer : &c->oldest) = e->newer;
	*(e->newer ? &e->newer->older : &c->newest) = e->older;
	e->newer = e->older = NULL;
}

/* The writer of the records chose the digests and places in them, but cannot choose their hashes. */
uint32_t load_cache_hash(const struct pack_object_ref *ref, const char *pack, uint64_t segment)
{
	uint64_t place[] = {ref->offset, ref->checks, ref->raw_len, ref->stored_len, ref->codec, segment};
	uint64_t of = base_table_hash(pack, strlen(pack));

	return base_table_hash_in(of << 32 | base_table_hash_in(of, place, sizeof place), &ref->digest,
		sizeof ref->digest);
}

static struct load_pin **cache_bucket(const struct load_cache *c, const struct pack_object_ref *ref, const char *pack,
	uint64_t segment)
{
	return &c->buckets[load_cache_hash(ref, pack, segment) & (c->nbuckets - 1)];
}

static void cache_table_remove(struct load_pin *e)
{
	struct load_pin **at = cache_bucket(e->cache, &e->ref, e->pack, e->segment);

	while (*at != e)
		at = &(*at)->next;
	*at = e->next;
	e->cache->nentries--;
}

static void cache_spare(struct load_pin *e)
{
	free(base_steal(e->pack));
	free(base_steal(e->error));
	e->next = e->cache->spare;
	e->cache->spare = e;
}

static void cache_evict_oldest(struct load_cache *c)
{
	struct load_pin *e = c->oldest;

	cache_unlink(e);
	cache_table_remove(e);
	cache_buffer_idle(c, e->class, base_steal(e->bytes));
	cache_spare(e);
	c->stats.evictions++;
}

/* Room for one more buffer: idle ones of other classes go first, if many are idle, then the oldest segments. */
static uint8_t *cache_buffer(struct load_cache *c, unsigned class)
{
	struct cache_class *k = &c->classes[class];
	size_t size = cache_class_bytes(class);
	uint8_t *bytes;

	while (k->nidle == 0 && c->stats.bytes + size > c->stats.max_bytes) {
		if (c->idle_bytes > c->stats.max_bytes / 8 || (!c->oldest && c->idle_bytes))
			cache_idle_shrink(c);
		else if (c->oldest)
			cache_evict_oldest(c);
		else
			break; /* all is pinned: the bound is exceeded rather than a reader blocked */
	}
	if (k->nidle) {
		c->idle_bytes -= size;
		return k->idle[--k->nidle];
	}
	bytes = aligned_alloc(64, size);
	if (bytes)
		c->stats.bytes += size;
	return bytes;
}

/* Over the bound after many pins at once: gives back what is idle. */
static void cache_trim(struct load_cache *c)
{
	while (c->stats.bytes > c->stats.max_bytes && (c->idle_bytes || c->oldest)) {
		if (c->idle_bytes)
			cache_idle_shrink(c);
		else
			cache_evict_oldest(c);
	}
}

void load_cache_shrink(struct load_cache *c)
{
	pthread_mutex_lock(&c->lock);
	while (c->oldest)
		cache_evict_oldest(c);
	for (unsigned i = 0; i < CACHE_CLASSES; i++)
		while (c->classes[i].nidle)
			cache_class_shrink(c, i);
	pthread_mutex_unlock(&c->lock);
}

/* ---- the table ---- */

static void cache_grow(struct load_cache *c)
{
	size_t n = c->nbuckets * 2, old = c->nbuckets;
	struct load_pin **before = c->buckets, **buckets = calloc(n, sizeof *buckets);

	if (!buckets)
		return;
	c->buckets = buckets;
	c->nbuckets = n;
	for (size_t i = 0; i < old; i++)
		for (struct load_pin *e = before[i], *next; e; e = next) {
			struct load_pin **at = cache_bucket(c, &e->ref, e->pack, e->segment);

			next = e->next;
			e->next = *at;
			*at = e;
		}
	free(before);
}

/* Is it the same object, wherever it is referred to? */
static bool cache_same(const struct pack_object_ref *a, const struct pack_object_ref *b)
{
	return a->offset == b->offset && a->checks == b->checks && a->raw_len == b->raw_len &&
		a->stored_len == b->stored_len && a->codec == b->codec && base_digest_equal(&a->digest, &b->digest);
}

static struct load_pin *cache_find(struct load_cache *c, const struct pack_object_ref *ref, const char *pack,
	uint64_t segment)
{
	struct load_pin *e = *cache_bucket(c, ref, pack, segment);

	while (e && (e->segment != segment || !cache_same(&e->ref, ref) || strcmp(e->pack, pack) != 0))
		e = e->next;
	return e;
}

static uint32_t cache_segment_len(uint64_t raw_len, uint64_t segment)
{
	return (uint32_t)base_min(LOAD_SEGMENT_BYTES, raw_len - segment * LOAD_SEGMENT_BYTES);
}

/* Was this segment let go a moment ago, made for another piece of the same object? Then several pieces refer to it. */
static bool cache_comes_again(const struct load_cache *c, const struct load_pin *e)
{
	uint32_t hash = load_cache_hash(&e->ref, e->pack, e->segment);
	const struct cache_gone *gone = &c->gone[hash % CACHE_GONE];

	return gone->hash == hash && gone->maker == e->maker && gone->piece != e->piece;
}

static struct load_pin *cache_make(struct load_cache *c, const struct load_object *o, const struct load_want *w,
	const char *pack)
{
	const struct pack_object_ref *ref = &o->pieces[w->piece].ref;
	uint32_t len = cache_segment_len(ref->raw_len, w->segment);
	unsigned class = cache_class_of(len);
	char *name = strdup(pack);
	uint8_t *bytes = cache_buffer(c, class); /* may evict, and so add to the spare structs: first */
	struct load_pin *e = c->spare, **at;

	if (e)
		c->spare = e->next;
	else
		e = malloc(sizeof *e);
	if (!e || !bytes || !name) {
		free(name);
		if (bytes)
			cache_buffer_idle(c, class, bytes);
		if (e) {
			*e = (struct load_pin){.cache = c};
			cache_spare(e);
		}
		return NULL;
	}
	if (c->nentries > c->nbuckets)
		cache_grow(c);
	at = cache_bucket(c, ref, pack, w->segment);
	*e = (struct load_pin){.cache = c, .ref = *ref, .pack = name, .segment = w->segment, .bytes = bytes, .len = len,
		.class = class, .state = CACHE_FILLING, .pins = 1, .next = *at, .maker = o, .piece = w->piece};
	e->shared = cache_comes_again(c, e);
	*at = e;
	c->nentries++;
	return e;
}

static void cache_let_go(struct load_pin *e)
{
	uint32_t hash = load_cache_hash(&e->ref, e->pack, e->segment);

	e->cache->gone[hash % CACHE_GONE] = (struct cache_gone){hash, e->maker, e->piece};
	cache_table_remove(e);
}

static void cache_unpin_locked(struct load_pin *e)
{
	struct load_cache *c = e->cache;

	if (--e->pins)
		return;
	if (e->state == CACHE_FAILED || (e->given >= e->len && !e->shared)) {
		if (e->state != CACHE_FAILED)
			cache_let_go(e);
		cache_buffer_idle(c, e->class, base_steal(e->bytes));
		cache_spare(e);
	} else {
		e->older = c->newest;
		*(c->newest ? &c->newest->newer : &c->oldest) = e;
		c->newest = e;
	}
	if (c->stats.bytes > c->stats.max_bytes)
		cache_trim(c);
}

bool load_cache_mark(struct load_cache *c, const struct load_object *o, const struct load_want *wants, size_t n)
{
	bool known = false;

	pthread_mutex_lock(&c->lock);
	for (size_t i = 0; i < n; i++) {
		const struct pack_object_ref *ref = &o->pieces[wants[i].piece].ref;
		const char *pack = ref->pack < o->npacks ? o->packs[ref->pack] : "";
		uint32_t hash = load_cache_hash(ref, pack, wants[i].segment) | 1;
		uint32_t *mark = &c->marks[hash / 2 % CACHE_MARKS];

		known |= *mark == hash || cache_find(c, ref, pack, wants[i].segment);
		*mark = hash;
	}
	pthread_mutex_unlock(&c->lock);
	return known;
}

void load_cache_count(struct load_cache *c, uint64_t decoded, uint64_t stored)
{
	pthread_mutex_lock(&c->lock);
	c->stats.decoded_bytes += decoded;
	c->stats.stored_bytes += stored;
	pthread_mutex_unlock(&c->lock);
}

void load_unpin(struct load_pin *pin)
{
	struct load_cache *c;

	if (!pin)
		return;
	c = pin->cache;
	pthread_mutex_lock(&c->lock);
	cache_unpin_locked(pin);
	pthread_mutex_unlock(&c->lock);
}

const uint8_t *load_pin_bytes(const struct load_pin *pin) { return pin->bytes; }

const uint8_t *load_pin_give(struct load_pin *pin, uint64_t len)
{
	atomic_fetch_add_explicit(&pin->given, len, memory_order_relaxed);
	return pin->bytes;
}

/* Step 1: every segment is pinned; those that were missing are ours to fill. */
static int cache_take(struct load_cache *c, const struct load_object *o, struct load_want *wants, size_t n)
{
	int r = 0;

	pthread_mutex_lock(&c->lock);
	for (size_t i = 0; i < n; i++) {
		struct load_want *w = &wants[i];
		const struct store_piece *p = &o->pieces[w->piece];
		const char *pack = p->ref.pack < o->npacks ? o->packs[p->ref.pack] : ""; /* piece_read refuses it */
		struct load_pin *e;

		w->pin = NULL;
		w->mine = false;
		if (p->inline_bytes || r < 0)
			continue;
		e = cache_find(c, &p->ref, pack, w->segment);
		if (!e) {
			w->pin = cache_make(c, o, w, pack);
			w->mine = w->pin != NULL;
			c->stats.misses++;
			r = w->pin ? 0 : -ENOMEM;
			continue;
		}
		if (e->pins++ == 0)
			cache_unlink(e);
		e->shared = e->shared || e->maker != o || e->piece != w->piece;
		*(e->state == CACHE_READY ? &c->stats.hits : &c->stats.waits) += 1;
		w->pin = e;
	}
	pthread_mutex_unlock(&c->lock);
	return r;
}

static int piece_read(const struct load_object *o, uint64_t piece, uint64_t first, uint64_t n, struct pack **pack,
	void *out, struct base_error *err)
{
	const struct pack_object_ref *ref = &o->pieces[piece].ref;
	int r = 0;

	if (!*pack && ref->pack >= o->npacks)
		return base_error_set(err, -BASE_EFORMAT, "pack %u of %u", ref->pack, o->npacks);
	if (!*pack)
		r = store_pack_get(load_step_store(o->step), o->packs[ref->pack], pack, err);
	if (r < 0) {
		*pack = NULL;
		return r;
	}
	return pack_object_read_blocks(*pack, ref, first, n, out, err);
}

int load_piece_read(const struct load_object *o, uint64_t piece, uint64_t first, uint64_t n, struct pack **pack,
	void *out, struct base_error *err)
{
	const struct store_piece *p = &o->pieces[piece];
	uint64_t from = first * BASE_BLOCK_BYTES;
	int r;

	if (p->inline_bytes) {
		memcpy(out, p->inline_bytes + from, base_min(n * BASE_BLOCK_BYTES, p->ref.raw_len - from));
		return 0;
	}
	r = piece_read(o, piece, first, n, pack, out, err);
	if (r == 0)
		return 0;
	base_error_prefix(err, r, "piece %llu", (unsigned long long)piece);
	return load_object_fail(o, r, err);
}

/* The fill has ended, with success or not: threads that wait go on. A failed segment leaves the table, so that the next
 * reader tries again. */
static void cache_filled(struct load_cache *c, struct load_pin *e, int r, const struct base_error *why,
	uint64_t stored)
{
	struct base_error *copy = NULL;

	if (r < 0 && why) {
		copy = malloc(sizeof *copy);
		if (copy)
			*copy = *why;
	}
	pthread_mutex_lock(&c->lock);
	e->state = r < 0 ? CACHE_FAILED : CACHE_READY;
	if (r < 0) {
		cache_table_remove(e);
		e->error = copy;
		e->code = r;
	} else {
		c->stats.decoded_bytes += e->len;
		c->stats.stored_bytes += stored;
	}
	if (e->waiters)
		pthread_cond_broadcast(&c->filled);
	pthread_mutex_unlock(&c->lock);
}

/* Should damage at this place be logged? Once: readers try again (the kernel does, page by page). */
static bool cache_warns(struct load_cache *c, const char *pack, uint64_t offset)
{
	uint64_t hash = base_xxh64_of(offset, pack, strlen(pack));
	bool known = false;

	pthread_mutex_lock(&c->lock);
	for (unsigned i = 0; !known && i < base_min(c->nwarned, CACHE_WARNED); i++)
		known = c->warned[i] == hash;
	if (!known)
		c->warned[c->nwarned++ % CACHE_WARNED] = hash;
	pthread_mutex_unlock(&c->lock);
	return !known;
}

static void cache_fill_one(struct load_cache *c, const struct load_object *o, struct load_want *w,
	struct pack **pack)
{
	const struct pack_object_ref *ref = &o->pieces[w->piece].ref;
	struct base_error why = {0};
	int r = load_piece_read(o, w->piece, w->segment * (LOAD_SEGMENT_BYTES / BASE_BLOCK_BYTES),
		base_block_count(w->pin->len), pack, w->pin->bytes, &why);

	if (r < 0) {
		const char *name = ref->pack < o->npacks ? o->packs[ref->pack] : "?";

		if (!c->quiet && cache_warns(c, name, ref->offset + w->segment))
			base_warning("%s", why.text);
	}
	cache_filled(c, w->pin, r, &why,
		ref->stored_len / base_block_count(ref->raw_len) * base_block_count(w->pin->len));
}

static int cache_want_compare(const void *a, const void *b, void *arg)
{
	const struct load_object *o = arg;
	const struct load_want *x = *(struct load_want *const *)a, *y = *(struct load_want *const *)b;
	const struct pack_object_ref *p = &o->pieces[x->piece].ref, *q = &o->pieces[y->piece].ref;

	if (p->pack != q->pack)
		return p->pack < q->pack ? -1 : 1;
	if (p->offset != q->offset)
		return p->offset < q->offset ? -1 : 1;
	return (x->segment > y->segment) - (x->segment < y->segment);
}

/* Segments to fill, in file order. */
struct cache_filling {
	struct load_cache *c;
	const struct load_object *o;
	struct load_want **order;
	uint32_t *first;                 /* where those of each pack begin, and one past the last */
};

/* All segments of one pack. An error stops nothing, because other threads may wait for the rest. */
static int cache_fill_pack(void *arg, uint32_t i, struct base_error *err)
{
	const struct cache_filling *f = arg;
	struct pack *pack = NULL;

	(void)err;
	for (uint32_t k = f->first[i]; k < f->first[i + 1]; k++)
		cache_fill_one(f->c, f->o, f->order[k], &pack);
	store_pack_put(load_step_store(f->o->step), pack);
	return 0;
}

/* Step 2: ours. Many packs (a tensor of many writers) are read at once. */
static void cache_fill(struct load_cache *c, const struct load_object *o, struct load_want *wants, size_t n)
{
	struct load_want *few[64];
	uint32_t few_first[BASE_COUNT(few) + 1], mine = 0, packs = 0;
	bool sorted = true, large = n > BASE_COUNT(few);
	base_cleanup_free struct load_want **many = large ? malloc(n * sizeof *many) : NULL;
	base_cleanup_free uint32_t *many_first = large ? malloc((n + 1) * sizeof *many_first) : NULL;
	struct cache_filling f = {c, o, large ? many : few, large ? many_first : few_first};

	if (!f.order || !f.first) { /* then a few at a time */
		for (size_t i = 0; i < n; i += BASE_COUNT(few))
			cache_fill(c, o, wants + i, base_min(n - i, BASE_COUNT(few)));
		return;
	}
	for (size_t i = 0; i < n; i++)
		if (wants[i].mine) {
			f.order[mine++] = &wants[i];
			if (mine > 1 && cache_want_compare(&f.order[mine - 2], &f.order[mine - 1], (void *)o) > 0)
				sorted = false;
		}
	if (!sorted)
		qsort_r(f.order, mine, sizeof *f.order, cache_want_compare, (void *)o);
	for (uint32_t i = 0; i < mine; i++)
		if (i == 0 || o->pieces[f.order[i]->piece].ref.pack != o->pieces[f.order[i - 1]->piece].ref.pack)
			f.first[packs++] = i;
	f.first[packs] = mine;
	storage_spread(packs, cache_fill_pack, &f, NULL);
}

/* Step 3: waits for those that other threads fill. Returns the first error, of any segment. */
static int cache_wait(struct load_cache *c, struct load_want *wants, size_t n, struct base_error *err)
{
	int r = 0;

	pthread_mutex_lock(&c->lock);
	for (size_t i = 0; i < n; i++) {
		struct load_pin *e = wants[i].pin;

		if (!e)
			continue;
		while (e->state == CACHE_FILLING) {
			e->waiters++;
			pthread_cond_wait(&c->filled, &c->lock);
			e->waiters--;
		}
		if (e->state == CACHE_FAILED && r == 0) {
			r = e->code;
			if (err && e->error)
				*err = *e->error;
			else
				base_error_set(err, r, "%s", base_error_name(r));
		}
	}
	pthread_mutex_unlock(&c->lock);
	return r;
}

int load_cache_pin(struct load_cache *c, const struct load_object *o, struct load_want *wants, size_t n,
	struct base_error *err)
{
	int r = cache_take(c, o, wants, n);

	cache_fill(c, o, wants, n);
	if (r < 0)
		base_no_memory_for(err, "the cache of decoded pieces");
	else
		r = cache_wait(c, wants, n, err);
	if (r < 0) {
		pthread_mutex_lock(&c->lock);
		for (size_t i = 0; i < n; i++)
			if (wants[i].pin)
				cache_unpin_locked(wants[i].pin);
		pthread_mutex_unlock(&c->lock);
	}
	return r;
}
