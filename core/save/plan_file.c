/* SPDX-License-Identifier: Apache-2.0
 *
 * plan_file: a plan as a file, DIR/<first two digits of the key>/<key>, 64 hex digits. Little-endian:
 *
 *   head, 104 bytes   "vckptpln" | version u32 | tensors u32 | key 32 | rank u32 | 0 u32 | boxes u64 | pieces u64 |
 *                     bytes u64 | shared u64 | held u64 | length of what follows but the digest u64
 *   boxes             tensor u32 | dimensions u32 | pieces u64 | local offset u64 | offset, size, local stride u64 each
 *   digest            SHA-256 of all before it
 *
 * A file is written under another name and renamed; nothing is synced: what a crash leaves of it has another digest.
 * What is read is believed only if the digest, the key and every sum are right and every box lies within its tensor
 * and, by its strides, within the tensor's local buffer. Directories are kept short by 256 parts, each of which is
 * looked through when a file is put into it: thousands of ranks may start at once over one directory. */
#include "core/save/plan_cache_internal.h"

#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

#define FILE_MAGIC "vckptpln"
#define FILE_VERSION 1u
#define FILE_HEAD_BYTES 104u
#define FILE_BOX_BYTES 24u              /* without its dimensions */
#define FILE_PARTS 256u
#define FILE_KNOWN 8u
#define FILE_TEMPORARY_S 3600           /* left behind by a process that died */

_Static_assert(sizeof FILE_MAGIC - 1 + 4 + 4 + BASE_DIGEST_BYTES + 4 + 4 + 5 * 8 + 8 == FILE_HEAD_BYTES, "head");

/* ---- bytes ---- */

static void box_encode(struct base_buf *b, const struct save_plan_box *box, uint32_t ndim)
{
	base_buf_put32(b, box->tensor);
	base_buf_put32(b, ndim);
	base_buf_put64(b, box->pieces);
	base_buf_put64(b, box->at.local_offset);
	for (uint32_t d = 0; d < ndim; d++) {
		base_buf_put64(b, box->at.box.offset[d]);
		base_buf_put64(b, box->at.box.size[d]);
		base_buf_put64(b, box->at.local_stride[d]);
	}
}

static uint64_t boxes_bytes(const struct save_plan *p, const struct save_plan_tensors *tensors)
{
	uint64_t bytes = 0;

	for (uint64_t i = 0; i < p->nboxes; i++)
		bytes += FILE_BOX_BYTES
			+ 24 * (uint64_t)save_plan_tensor_at(tensors, p->boxes[i].tensor)->sharding.shape.ndim;
	return bytes;
}

static int file_encode(const struct save_plan_key *key, const struct save_plan_tensors *tensors,
	const struct save_plan *p, struct base_buf *b)
{
	struct base_digest digest;

	base_buf_append(b, FILE_MAGIC, sizeof FILE_MAGIC - 1);
	base_buf_put32(b, FILE_VERSION);
	base_buf_put32(b, key->ntensors);
	base_buf_append(b, &key->digest, sizeof key->digest);
	base_buf_put32(b, key->rank);
	base_buf_put32(b, 0);
	base_buf_put64(b, p->nboxes);
	base_buf_put64(b, p->pieces);
	base_buf_put64(b, p->bytes);
	base_buf_put64(b, p->shared_bytes);
	base_buf_put64(b, p->held_bytes);
	base_buf_put64(b, boxes_bytes(p, tensors));
	for (uint64_t i = 0; i < p->nboxes; i++)
		box_encode(b, &p->boxes[i], save_plan_tensor_at(tensors, p->boxes[i].tensor)->sharding.shape.ndim);
	if (b->error)
		return b->error;
	base_sha256(b->data, b->len, &digest);
	base_buf_append(b, &digest, sizeof digest);
	return b->error;
}

/* What a box of a tensor is checked against. The next layer of a model has tensors of the same shapes: what was made
 * for one is found again by its shape and by where its mesh and placements lie. */
struct file_known {
	const struct save_plan_tensor *of;      /* NULL: nothing yet */
	struct tensor_grid grid;
	uint64_t local_items;                   /* of its local buffer */
};

/* What is being read of a file, and of the tensor that the last box was of. */
struct file_reading {
	const struct save_plan_key *key;
	const struct save_plan_tensors *tensors;
	const uint8_t *at, *end;
	struct save_plan plan;
	uint32_t tensor;
	const struct file_known *now; /* of that tensor; NULL: none yet */
	struct file_known known[FILE_KNOWN];
	uint64_t pieces, bytes; /* of all boxes so far */
};

static void file_reading_release(struct file_reading *f)
{
	save_plan_release(&f->plan);
}

static uint64_t listed_items(const struct tensor_shape *s, const struct tensor_boxes *boxes)
{
	uint64_t items = 0;
	struct tensor_box box;

	for (size_t i = 0; i < boxes->n; i++) {
		tensor_boxes_get(boxes, i, &box);
		if (base_add_overflows(items, tensor_box_items(s, &box), &items))
			return 0;
	}
	return items;
}

static bool known_fill(const struct file_reading *f, const struct save_plan_tensor *t, struct file_known *k)
{
	const struct tensor_sharding *s = &t->sharding;
	struct tensor_shard shard;

	k->of = NULL; /* until all is right */
	if (tensor_grid_init(&k->grid, &s->shape, s->item_bytes, t->params) < 0)
		return false;
	if (t->boxes) {
		k->local_items = listed_items(&s->shape, t->boxes);
		return t->boxes->ndim == s->shape.ndim;
	}
	if (t->flat) {
		k->local_items = t->flat->to - t->flat->from;
		return t->flat->from <= t->flat->to;
	}
	if (!s->mesh) { /* this rank alone has it, whole */
		if (tensor_shape_items(&s->shape, s->item_bytes, &k->local_items) < 0)
			return false;
	} else if (tensor_shard_of(s, f->key->rank, NULL, &shard, NULL) < 0 || shard.absent ||
		tensor_shape_items(&shard.local_shape, s->item_bytes, &k->local_items) < 0)
		return false;
	k->of = t;
	return true;
}

static bool known_alike(const struct save_plan_tensor *a, const struct save_plan_tensor *b)
{
	return a->sharding.mesh == b->sharding.mesh && a->sharding.placement == b->sharding.placement &&
		a->sharding.item_bytes == b->sharding.item_bytes &&
		tensor_shape_equal(&a->sharding.shape, &b->sharding.shape) &&
		memcmp(&a->params, &b->params, sizeof a->params) == 0;
}

static uint32_t known_slot(const struct save_plan_tensor *t)
{
	uint64_t hash = (uintptr_t)t->sharding.placement ^ t->sharding.item_bytes;

	for (uint32_t d = 0; d < t->sharding.shape.ndim; d++)
		hash = (hash ^ t->sharding.shape.dim[d]) * UINT64_C(0x9e3779b97f4a7c15);
	return (uint32_t)(hash >> 32) % FILE_KNOWN;
}

/* The tensor that the next boxes are of; false: there is none, or they cannot be. */
static bool tensor_enter(struct file_reading *f, uint32_t tensor)
{
	const struct save_plan_tensor *t;
	struct file_known *k;

	if (f->now && tensor == f->tensor)
		return true;
	if (tensor >= f->key->ntensors || (f->now && tensor < f->tensor))
		return false;
	f->tensor = tensor;
	t = save_plan_tensor_at(f->tensors, tensor);
	k = &f->known[known_slot(t)];
	f->now = k;
	return (k->of && !t->boxes && !t->flat && known_alike(k->of, t)) || known_fill(f, t, k);
}

/* Are all items of the box in the tensor, and in its local buffer? A box without items needs no buffer. */
static bool box_check(struct file_reading *f, const struct save_plan_box *box)
{
	const struct tensor_grid *g = &f->now->grid;
	const struct tensor_shape *s = &g->shape;
	uint64_t last = box->at.local_offset, span, items;

	if (!tensor_box_inside(s, &box->at.box))
		return false;
	items = tensor_box_items(s, &box->at.box);
	if (box->pieces != tensor_piece_count(g, &box->at.box) ||
		base_add_overflows(f->pieces, box->pieces, &f->pieces) ||
		base_add_overflows(f->bytes, items * g->item_bytes, &f->bytes))
		return false;
	if (items == 0)
		return true;
	for (uint32_t d = 0; d < s->ndim; d++)
		if (base_mul_overflows(box->at.box.size[d] - 1, box->at.local_stride[d], &span) ||
			base_add_overflows(last, span, &last))
			return false;
	return last < f->now->local_items;
}

static bool box_decode(struct file_reading *f, struct save_plan_box *box)
{
	uint32_t ndim;

	if ((size_t)(f->end - f->at) < FILE_BOX_BYTES || !tensor_enter(f, base_get32(f->at)))
		return false;
	ndim = base_get32(f->at + 4);
	if (ndim != f->now->grid.shape.ndim || (size_t)(f->end - f->at) < FILE_BOX_BYTES + 24 * (size_t)ndim)
		return false;
	memset(box, 0, sizeof *box);
	box->tensor = f->tensor;
	box->pieces = base_get64(f->at + 8);
	box->at.local_offset = base_get64(f->at + 16);
	f->at += FILE_BOX_BYTES;
	for (uint32_t d = 0; d < ndim; d++, f->at += 24) {
		box->at.box.offset[d] = base_get64(f->at);
		box->at.box.size[d] = base_get64(f->at + 8);
		box->at.local_stride[d] = base_get64(f->at + 16);
	}
	return box_check(f, box);
}

/* Is it whole, and of this key? Leaves `at` at the boxes. */
static bool head_decode(struct file_reading *f, const uint8_t *bytes, size_t len)
{
	struct base_digest digest;
	struct save_plan *p = &f->plan;

	if (len < FILE_HEAD_BYTES + sizeof digest || memcmp(bytes, FILE_MAGIC, sizeof FILE_MAGIC - 1) != 0 ||
		base_get32(bytes + 8) != FILE_VERSION)
		return false;
	base_sha256(bytes, len - sizeof digest, &digest);
	if (memcmp(&digest, bytes + len - sizeof digest, sizeof digest) != 0)
		return false;
	if (base_get32(bytes + 12) != f->key->ntensors || memcmp(bytes + 16, &f->key->digest, sizeof digest) != 0 ||
		base_get32(bytes + 48) != f->key->rank || base_get32(bytes + 52) != 0)
		return false;
	p->nboxes = base_get64(bytes + 56);
	p->pieces = base_get64(bytes + 64);
	p->bytes = base_get64(bytes + 72);
	p->shared_bytes = base_get64(bytes + 80);
	p->held_bytes = base_get64(bytes + 88);
	f->at = bytes + FILE_HEAD_BYTES;
	f->end = bytes + len - sizeof digest;
	return base_get64(bytes + 96) == (uint64_t)(f->end - f->at) &&
		p->nboxes <= (uint64_t)(f->end - f->at) / FILE_BOX_BYTES;
}

static bool file_decode(struct file_reading *f, const uint8_t *bytes, size_t len)
{
	const struct save_plan *p = &f->plan;
	struct save_plan_box *boxes;

	if (!head_decode(f, bytes, len))
		return false;
	boxes = reallocarray(p->boxes, p->nboxes + 1, sizeof *boxes);
	if (!boxes)
		return false;
	f->plan.boxes = boxes;
	for (uint64_t i = 0; i < p->nboxes; i++)
		if (!box_decode(f, &boxes[i]))
			return false;
	return f->at == f->end && f->pieces == p->pieces && f->bytes == p->bytes && p->shared_bytes <= p->bytes &&
		p->bytes <= p->held_bytes;
}

/* ---- files ---- */

static bool part_path(const char *dir, const struct save_plan_key *key, char path[static PATH_MAX])
{
	int n = snprintf(path, PATH_MAX, "%s/%02x", dir, key->digest.bytes[0]);

	return n > 0 && n < PATH_MAX;
}

static void *file_load(int fd, uint64_t most, size_t *ret_len)
{
	base_cleanup_free uint8_t *bytes = NULL;
	struct stat st;
	size_t at = 0;

	if (fstat(fd, &st) < 0 || !S_ISREG(st.st_mode) || st.st_size <= 0 || (uint64_t)st.st_size > most)
		return NULL;
	*ret_len = (size_t)st.st_size;
	bytes = malloc(*ret_len);
	while (bytes && at < *ret_len) {
		ssize_t n = read(fd, bytes + at, *ret_len - at);

		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			return NULL;
		at += (size_t)n;
	}
	return base_steal(bytes);
}

bool save_plan_file_read(const char *dir, uint64_t max_bytes, const struct save_plan_key *key,
	const struct save_plan_tensors *tensors, struct save_plan_box *spare, struct save_plan *ret_plan)
{
	base_cleanup(file_reading_release) struct file_reading f = {.key = key, .tensors = tensors,
		.plan.boxes = spare};
	base_cleanup_free uint8_t *bytes = NULL;
	base_cleanup_close int part = -1, fd = -1;
	char path[PATH_MAX], hex[BASE_DIGEST_HEX];
	size_t len;

	if (!part_path(dir, key, path))
		return false;
	part = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	base_digest_hex(&key->digest, hex);
	if (part >= 0)
		fd = openat(part, hex, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC); /* not to wait at a pipe */
	if (fd < 0)
		return false;
	bytes = file_load(fd, max_bytes / FILE_PARTS, &len);
	if (!bytes || !file_decode(&f, bytes, len))
		return false;
	(void)!futimens(fd, NULL); /* of what is thrown away, what was not used for long comes first */
	*ret_plan = f.plan;
	f.plan = (struct save_plan){0};
	return true;
}

/* mkdir -p, for this user alone. */
static int part_make(const char *path)
{
	char at[PATH_MAX];

	snprintf(at, sizeof at, "%s", path);
	for (char *c = at + 1; *c; c++) {
		if (*c != '/')
			continue;
		*c = 0;
		if (mkdir(at, 0700) < 0 && errno != EEXIST && errno != EROFS && errno != EACCES)
			return -errno;
		*c = '/';
	}
	return mkdir(at, 0700) < 0 && errno != EEXIST ? -errno : 0;
}

static bool bytes_write(int fd, const uint8_t *bytes, size_t len)
{
	while (len > 0) {
		ssize_t n = write(fd, bytes, len);

		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			return false;
		bytes += n;
		len -= (size_t)n;
	}
	return true;
}

static void file_put(int part, const char *hex, const struct base_buf *b)
{
	char temporary[BASE_DIGEST_HEX + 32];
	uint64_t random;
	bool whole;
	int fd;

	if (base_random(&random, sizeof random) < 0)
		return;
	snprintf(temporary, sizeof temporary, ".%s.%016llx", hex, (unsigned long long)random);
	fd = openat(part, temporary, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
	if (fd < 0)
		return;
	whole = bytes_write(fd, b->data, b->len);
	whole &= close(fd) == 0;
	if (!whole || renameat(part, temporary, part, hex) < 0)
		unlinkat(part, temporary, 0);
}

/* ---- what is thrown away ---- */

struct file_seen { char name[BASE_DIGEST_HEX]; uint64_t bytes; struct timespec time; };

static int seen_order(const void *pa, const void *pb)
{
	const struct file_seen *a = pa, *b = pb;

	if (a->time.tv_sec != b->time.tv_sec)
		return a->time.tv_sec < b->time.tv_sec ? -1 : 1;
	return (a->time.tv_nsec > b->time.tv_nsec) - (a->time.tv_nsec < b->time.tv_nsec);
}

static bool is_digest(const char *name, size_t len)
{
	struct base_digest d;

	return len >= BASE_DIGEST_HEX - 1 && base_digest_parse(name, BASE_DIGEST_HEX - 1, &d) == 0;
}

/* Plans are noted, old temporary files go, and what is not ours is left alone. */
static bool file_see(int part, const char *name, struct base_buf *seen)
{
	struct file_seen f = {0};
	struct stat st;
	bool temporary = name[0] == '.' && is_digest(name + 1, strlen(name + 1));

	if (!temporary && !(is_digest(name, strlen(name)) && strlen(name) == sizeof f.name - 1))
		return true;
	if (fstatat(part, name, &st, AT_SYMLINK_NOFOLLOW) < 0 || !S_ISREG(st.st_mode))
		return true;
	if (temporary) {
		if (time(NULL) - st.st_mtime > FILE_TEMPORARY_S)
			unlinkat(part, name, 0);
		return true;
	}
	memcpy(f.name, name, sizeof f.name);
	f.bytes = (uint64_t)st.st_size;
	f.time = st.st_mtim;
	base_buf_append(seen, &f, sizeof f);
	return seen->error == 0;
}

static void part_trim(int part, uint64_t most)
{
	base_cleanup_buf struct base_buf seen = BASE_BUF_INIT;
	base_cleanup_close int again = openat(part, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	const struct file_seen *files;
	const struct dirent *e;
	uint64_t bytes = 0;
	size_t n;
	DIR *d = again < 0 ? NULL : fdopendir(again);

	if (!d)
		return;
	base_steal_fd(&again); /* the stream's now */
	while ((e = readdir(d)) && file_see(part, e->d_name, &seen))
		;
	closedir(d);
	files = (const struct file_seen *)seen.data;
	n = seen.error ? 0 : seen.len / sizeof *files;
	for (size_t i = 0; i < n; i++)
		bytes += files[i].bytes;
	if (bytes <= most)
		return;
	qsort(seen.data, n, sizeof *files, seen_order);
	for (size_t i = 0; i < n && bytes > most; i++) {
		unlinkat(part, files[i].name, 0);
		bytes -= files[i].bytes;
	}
}

void save_plan_file_write(const char *dir, uint64_t max_bytes, const struct save_plan_key *key,
	const struct save_plan_tensors *tensors, const struct save_plan *plan)
{
	base_cleanup_buf struct base_buf b = BASE_BUF_INIT;
	base_cleanup_close int part = -1;
	char path[PATH_MAX], hex[BASE_DIGEST_HEX];
	uint64_t most = max_bytes / FILE_PARTS;

	if (FILE_HEAD_BYTES + boxes_bytes(plan, tensors) + BASE_DIGEST_BYTES > most || !part_path(dir, key, path))
		return;
	if (file_encode(key, tensors, plan, &b) < 0 || part_make(path) < 0)
		return;
	part = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (part < 0)
		return;
	base_digest_hex(&key->digest, hex);
	file_put(part, hex, &b);
	part_trim(part, most);
}
