/* SPDX-License-Identifier: Apache-2.0
 *
 * tar: headers of 512 bytes ("ustar"), each followed by its file's bytes, zero padded to 512; two blocks of zeros at
 * the end. The names of a store's files fit into name and prefix; a size of 8 GiB or more is in binary, as all tars
 * read it. */
#include "tools/vckpt/copy/tar.h"

#include <fcntl.h>
#include <fts.h>
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/step/store.h"
#include "tools/vckpt/tool.h"

#define TAR_BLOCK 512u
#define TAR_OCTAL_MAX UINT64_C(077777777777)
#define TAR_BUFFER (256u << 10)
#define TAR_LOOK_MS 200         /* until the next look whether it is cancelled */

struct tar_header {
	char name[100], mode[8], uid[8], gid[8], size[12], mtime[12], sum[8], type, link[100], magic[6], version[2];
	char user[32], group[32], major[8], minor[8], prefix[155], pad[12];
};
_Static_assert(sizeof(struct tar_header) == TAR_BLOCK, "a header is a block");

/* The sum of its bytes, those of `sum` as blanks. */
static unsigned header_sum(const struct tar_header *h)
{
	const uint8_t *bytes = (const uint8_t *)h;
	unsigned sum = 0;

	for (size_t i = 0; i < TAR_BLOCK; i++)
		sum += i >= offsetof(struct tar_header, sum) && i < offsetof(struct tar_header, type) ? ' ' : bytes[i];
	return sum;
}

/* ---- out ---- */

struct out { int fd; const char *name; size_t root; bool first; struct base_error *err; };

/* A reader of the stream may stand still: then a signal is seen all the same. */
static int stream_ready(int fd, short events, struct base_error *err)
{
	struct pollfd p = {.fd = fd, .events = events};

	while (!tool_interrupted() && poll(&p, 1, TAR_LOOK_MS) == 0)
		;
	return tool_interrupt_check(err);
}

static int out_write(struct out *o, const void *bytes, size_t len)
{
	for (size_t done = 0; done < len;) {
		int r = stream_ready(o->fd, POLLOUT, o->err);
		ssize_t n = r < 0 ? r : write(o->fd, (const char *)bytes + done, len - done);

		if (r < 0)
			return r;
		if (n < 0 && errno != EINTR)
			return base_error_set(o->err, -errno, "%s: %s", o->name, strerror(errno));
		done += n < 0 ? 0 : (size_t)n; /* a signal ends a write of which a part is done */
	}
	return 0;
}

/* A name that is too long is split at a slash. */
static int out_header(struct out *o, const char *path, uint64_t size)
{
	struct tar_header h = {.mode = "0000644", .uid = "0000000", .gid = "0000000", .mtime = "00000000000",
		.type = '0', .magic = "ustar", .version = {'0', '0'}};
	const char *slash = strlen(path) > sizeof h.name ? strrchr(path, '/') : NULL, *last = slash ? slash + 1 : path;

	if (strlen(last) > sizeof h.name || (size_t)(last - path) > sizeof h.prefix)
		return base_error_set(o->err, -ENAMETOOLONG, "%s: a tar has no room for this name", path);
	memcpy(h.name, last, strlen(last));
	memcpy(h.prefix, path, slash ? (size_t)(slash - path) : 0);
	if (size <= TAR_OCTAL_MAX)
		snprintf(h.size, sizeof h.size, "%011" PRIo64, size);
	else
		h.size[0] = (char)0x80;
	for (unsigned i = 0; i < 8 && size > TAR_OCTAL_MAX; i++)
		h.size[sizeof h.size - 1 - i] = (char)(size >> 8 * i);
	snprintf(h.sum, sizeof h.sum, "%06o", header_sum(&h));
	h.sum[7] = ' ';
	return out_write(o, &h, sizeof h);
}

static int out_pad(struct out *o, uint64_t size)
{
	static const char zeros[TAR_BLOCK];

	return out_write(o, zeros, (TAR_BLOCK - size % TAR_BLOCK) % TAR_BLOCK);
}

static int out_bytes(struct out *o, const char *file, int from, uint64_t size)
{
	base_cleanup_free char *buffer = malloc(TAR_BUFFER);

	if (!buffer)
		return base_no_memory(o->err);
	for (uint64_t left = size; left;) {
		ssize_t n = read(from, buffer, base_min(left, TAR_BUFFER));
		int r;

		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			return base_error_set(o->err, n < 0 ? -errno : -EIO, "%s: %s", file, n < 0 ? strerror(errno)
				: "it is shorter than it was");
		if ((r = out_write(o, buffer, (size_t)n)) < 0)
			return r;
		left -= (size_t)n;
	}
	return out_pad(o, size);
}

static int out_file(void *arg, const FTSENT *entry)
{
	struct out *o = arg;
	const char *path = entry->fts_path + o->root;
	base_cleanup_close int from = -1;
	int r;

	if (entry->fts_info != FTS_F || (strcmp(path, STORE_FILE) == 0) != o->first)
		return 0;
	from = open(entry->fts_path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
	if (from < 0)
		return base_error_set(o->err, -errno, "%s: %s", entry->fts_path, strerror(errno));
	r = out_header(o, path, (uint64_t)entry->fts_statp->st_size);
	return r < 0 ? r : out_bytes(o, entry->fts_path, from, (uint64_t)entry->fts_statp->st_size);
}

int tar_write(const char *root, int fd, const char *name, struct base_error *err)
{
	static const char end[2 * TAR_BLOCK];
	struct out o = {.fd = fd, .name = name, .root = strlen(root) + 1, .first = true, .err = err};
	int r = tool_walk(root, out_file, &o, err);

	o.first = false;
	if (r == 0)
		r = tool_walk(root, out_file, &o, err);
	return r < 0 ? r : out_write(&o, end, sizeof end);
}

/* ---- in ---- */

struct in { int fd, root; const char *name; struct base_error *err; };

static int in_wrong(struct in *in, const char *what)
{
	return base_error_set(in->err, -BASE_EFORMAT, "%s is no tar of vckpt copy --to-tar: %s", in->name, what);
}

static int in_read(struct in *in, void *to, size_t len)
{
	for (size_t done = 0; done < len;) {
		int r = stream_ready(in->fd, POLLIN, in->err);
		ssize_t n = r < 0 ? r : read(in->fd, (char *)to + done, len - done);

		if (r < 0)
			return r;
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return base_error_set(in->err, -errno, "%s: %s", in->name, strerror(errno));
		if (n == 0)
			return in_wrong(in, "it ends early");
		done += (size_t)n;
	}
	return 0;
}

/* Octal digits up to a NUL or blank, or a binary number behind 0x80. */
static bool in_number(const char *field, size_t len, uint64_t *ret_n)
{
	size_t i = 0;

	if ((uint8_t)field[0] == 0x80 && len == 12) {
		*ret_n = 0;
		for (i = 4; i < len; i++)
			*ret_n = *ret_n << 8 | (uint8_t)field[i];
		return *ret_n <= INT64_MAX && !field[1] && !field[2] && !field[3];
	}

	for (*ret_n = 0; i < len && field[i] >= '0' && field[i] <= '7'; i++)
		*ret_n = *ret_n * 8 + (uint64_t)(field[i] - '0');
	return i > 0 && (i == len || field[i] == 0 || field[i] == ' ');
}

/* Opens it for writing, in directories that are made as they are needed. */
static int in_open(struct in *in, char *path)
{
	int fd;

	for (char *slash = strchr(path, '/'); slash; slash = strchr(slash + 1, '/')) {
		*slash = 0;
		if (mkdirat(in->root, path, 0700) < 0 && errno != EEXIST)
			return base_error_set(in->err, -errno, "%s: %s", path, strerror(errno));
		*slash = '/';
	}
	fd = openat(in->root, path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
	if (fd < 0 && (errno == EEXIST || errno == ENOTDIR || errno == EISDIR))
		return in_wrong(in, "a file is in it twice, or is in the place of a directory");
	return fd < 0 ? base_error_set(in->err, -errno, "%s: %s", path, strerror(errno)) : fd;
}

static int in_file(struct in *in, char *path, uint64_t size)
{
	base_cleanup_free char *buffer = malloc(TAR_BUFFER);
	base_cleanup_close int fd = -1;
	int r = 0;

	while (strncmp(path, "./", 2) == 0)
		path += 2;
	if (!storage_name_valid(path))
		return in_wrong(in, "it has a file that is none of a store's");
	if (!buffer)
		return base_no_memory(in->err);
	fd = in_open(in, path);
	if (fd < 0)
		return fd;
	for (uint64_t left = base_align(size, TAR_BLOCK), data = size; r == 0 && left;) {
		size_t n = base_min(left, TAR_BUFFER);

		r = in_read(in, buffer, n);
		if (r == 0)
			r = tool_write(fd, path, buffer, base_min(n, data), in->err);
		left -= n;
		data -= base_min(n, data);
	}
	return r;
}

/* 1: the end; 0: go on. */
static int in_next(struct in *in)
{
	static const struct tar_header zeros;
	char path[sizeof zeros.prefix + sizeof zeros.name + 2];
	struct tar_header h;
	uint64_t size, sum;
	int r = in_read(in, &h, sizeof h);

	if (r < 0)
		return r;
	if (memcmp(&h, &zeros, sizeof h) == 0)
		return 1;
	if (memcmp(h.magic, "ustar", 5) != 0 || !in_number(h.sum, sizeof h.sum, &sum) || sum != header_sum(&h) ||
		!in_number(h.size, sizeof h.size, &size))
		return in_wrong(in, "a header is wrong");
	snprintf(path, sizeof path, "%.*s%s%.*s", (int)sizeof h.prefix, h.prefix, h.prefix[0] ? "/" : "",
		(int)sizeof h.name, h.name);
	if (h.type == '5' && size == 0) /* directories are made as they are needed */
		return 0;
	return h.type == '0' || h.type == 0 ? in_file(in, path, size)
		: in_wrong(in, "it has something that is no regular file");
}

int tar_read(int fd, const char *name, const char *root, struct base_error *err)
{
	base_cleanup_close int dir = open(root, O_DIRECTORY | O_RDONLY | O_CLOEXEC);
	struct in in = {.fd = fd, .root = dir, .name = name, .err = err};
	char rest[64 * TAR_BLOCK];
	int r = dir < 0 ? base_error_set(err, -errno, "%s: %s", root, strerror(errno)) : 0;

	while (r == 0)
		r = in_next(&in);
	if (r == 1)
		for (ssize_t n = 1, all = 0; n > 0 && all < (ssize_t)sizeof rest; all += n) /* what fills the record */
			n = read(fd, rest, sizeof rest);
	return r < 0 ? r : 0;
}

/* ---- room ---- */

int tar_room(const char *parent, char **ret_path, struct base_error *err)
{
	const char *tmp = parent ? parent : getenv("TMPDIR");
	char *path = tool_string("%s/vckpt-copy-XXXXXX", tmp && *tmp ? tmp : "/var/tmp");

	if (!path)
		return base_no_memory(err);
	if (!mkdtemp(path)) {
		base_error_set(err, -errno, "%s: no directory can be made there: %s (--tmp names another place)", path,
			strerror(errno));
		free(path);
		return err->code;
	}
	*ret_path = path;
	return 0;
}

void tar_room_remove(char *path)
{
	char *const paths[] = {path, NULL};
	FTS *walk = path ? fts_open(paths, FTS_PHYSICAL | FTS_NOCHDIR, NULL) : NULL;

	for (FTSENT *entry; walk && (entry = fts_read(walk));)
		if (entry->fts_info == FTS_DP)
			rmdir(entry->fts_accpath);
		else if (entry->fts_info != FTS_D)
			unlink(entry->fts_accpath);
	if (walk)
		fts_close(walk);
	free(path);
}
