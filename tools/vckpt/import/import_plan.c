/* SPDX-License-Identifier: Apache-2.0
 *
 * The plan of an import: opens files, reads headers, declares tensors and blobs. See import.h. */
#include "tools/vckpt/import/import.h"

#include <fcntl.h>
#include <inttypes.h>
#include <string.h>

#include "core/base/array.h"
#include "core/view/name.h"
#include "core/view/npy.h"
#include "tools/vckpt/import/import_chunks.h"
#include "tools/vckpt/import/import_numbered.h"

/* Files that stay open; further ones are opened for each read, since 1024 descriptors are a usual limit. */
#define FILES_OPEN_MAX 256

bool import_has_suffix(const char *text, const char *suffix)
{
	size_t a = strlen(text), b = strlen(suffix);

	return a >= b && !strcmp(text + a - b, suffix);
}

/* Never hangs on a pipe. */
static int open_source(const struct import_plan *p, const char *path, struct base_error *err)
{
	int fd;

	if (p->bound)
		return import_links_open(p->bound, path, err);
	fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
	return fd < 0 ? base_error_set(err, -errno, "%s: %s", path, strerror(errno)) : fd;
}

static bool is_pointer(int fd, const struct stat *st)
{
	static const char first[] = "version https://git-lfs.github.com/spec/";
	enum { POINTER_MAX_BYTES = 1024 };
	char head[sizeof first - 1];

	return st->st_size < POINTER_MAX_BYTES && pread(fd, head, sizeof head, 0) == (ssize_t)sizeof head &&
		!memcmp(head, first, sizeof head);
}

int import_refuse_pointer(const struct import_file *f, struct base_error *err)
{
	if (!f->pointer)
		return 0;
	return base_error_set(err, -BASE_EFORMAT, "%s: a Git LFS pointer in place of the file: run git lfs pull in its "
		"repository", f->path);
}

int import_file_open(struct import_plan *p, const char *path, struct import_file **ret_file, struct base_error *err)
{
	base_cleanup_close int fd = open_source(p, path, err);
	struct import_file *f;
	int r = -ENOMEM;

	if (fd < 0)
		return fd;
	f = calloc(1, sizeof *f);
	if (!f || base_array_more(p->files, p->nfiles) < 0)
		goto fail;
	if (fstat(fd, &f->stat) < 0) {
		r = -errno;
		goto fail;
	}
	if (!S_ISREG(f->stat.st_mode)) {
		r = S_ISDIR(f->stat.st_mode) ? -EISDIR : -EINVAL;
		goto fail;
	}
	f->path = strdup(path);
	if (!f->path)
		goto fail;
	f->pointer = is_pointer(fd, &f->stat);
	f->fd = p->nfiles < FILES_OPEN_MAX ? base_steal_fd(&fd) : -1;
	*ret_file = p->files[p->nfiles++] = f;
	return 0;
fail:
	free(f);
	return base_error_set(err, r, "%s: %s", path, r == -EINVAL ? "not a regular file" : strerror(-r));
}

/* A file that changed since it was opened fails every read from then on, so a step never mixes two states of a file. */
static int check_unchanged(const struct import_file *f, int fd, struct base_error *err)
{
	struct stat now;

	if (fstat(fd, &now) < 0)
		return base_error_set(err, -errno, "%s: %s", f->path, strerror(errno));
	if (now.st_dev == f->stat.st_dev && now.st_ino == f->stat.st_ino && now.st_size == f->stat.st_size &&
		now.st_mtim.tv_sec == f->stat.st_mtim.tv_sec && now.st_mtim.tv_nsec == f->stat.st_mtim.tv_nsec)
		return 0;
	return base_error_set(err, -BASE_EBUSY, "%s: it was changed while it was read; nothing was imported", f->path);
}

static int read_all(const struct import_file *f, int fd, uint64_t offset, void *bytes, size_t len,
	struct base_error *err)
{
	size_t done = 0;

	while (done < len) {
		ssize_t n = pread(fd, (char *)bytes + done, len - done, (off_t)(offset + done));

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return base_error_set(err, -errno, "%s: %s", f->path, strerror(errno));
		if (n == 0)
			return base_error_set(err, -ENODATA, "%s: it became shorter while it was read", f->path);
		done += (size_t)n;
	}
	return check_unchanged(f, fd, err);
}

int import_file_read(struct import_file *f, uint64_t offset, void *bytes, size_t len, struct base_error *err)
{
	int fd, r;

	if (f->fd >= 0)
		return read_all(f, f->fd, offset, bytes, len, err);
	fd = open(f->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
	if (fd < 0)
		return base_error_set(err, -errno, "%s: %s", f->path, strerror(errno));
	r = read_all(f, fd, offset, bytes, len, err);
	close(fd);
	return r;
}

int import_file_text(struct import_file *f, char **ret_text, struct base_error *err)
{
	base_cleanup_free char *text = NULL;
	int r;

	if (f->stat.st_size > IMPORT_JSON_MAX_BYTES)
		return base_error_set(err, -BASE_EFORMAT, "%s: larger than %u bytes", f->path, IMPORT_JSON_MAX_BYTES);
	text = malloc((size_t)f->stat.st_size + 1);
	if (!text)
		return base_no_memory_for(err, "%s", f->path);
	r = import_file_read(f, 0, text, (size_t)f->stat.st_size, err);
	if (r == 0)
		*ret_text = base_steal(text);
	return r;
}

bool import_is_pickle(struct import_file *f)
{
	uint8_t head[4] = {0};

	if (f->stat.st_size < 4 || import_file_read(f, 0, head, 4, NULL) < 0)
		return false;
	return (head[0] == 0x80 && head[1] >= 2 && head[1] <= 5) || !memcmp(head, "PK\3\4", 4);
}

static struct import_component *component_get(struct import_plan *p, const char *name)
{
	struct import_component *c;

	for (size_t i = 0; i < p->ncomponents; i++)
		if (!strcmp(p->components[i].name, name))
			return &p->components[i];
	if (base_array_more(p->components, p->ncomponents) < 0)
		return NULL;
	c = &p->components[p->ncomponents++];
	*c = (struct import_component){0};
	snprintf(c->name, sizeof c->name, "%s", name);
	return c;
}

static int add_tensor(struct import_plan *p, const char *component, const char *name, uint32_t name_len,
	enum tensor_dtype dtype, const struct tensor_shape *shape, uint64_t offset, struct import_file *file)
{
	char *copy = malloc(name_len + 1);
	uint64_t items;
	struct import_tensor *t;

	if (!copy || tensor_shape_items(shape, tensor_dtype_bytes(dtype), &items) < 0 || !component_get(p, component) ||
		base_array_more(p->tensors, p->ntensors) < 0) {
		free(copy);
		return -ENOMEM;
	}
	memcpy(copy, name, name_len);
	copy[name_len] = 0;
	t = &p->tensors[p->ntensors++];
	*t = (struct import_tensor){.name = copy, .name_len = name_len, .dtype = dtype, .shape = *shape,
		.offset = offset, .bytes = items * tensor_dtype_bytes(dtype), .file = file};
	snprintf(t->component, sizeof t->component, "%s", component);
	return 0;
}

static bool metadata_known(const struct import_component *c, const char *key, uint32_t hash)
{
	size_t at = 0;
	uint32_t i;

	while ((i = base_table_next(&c->by_key, hash, &at)) != BASE_TABLE_NONE)
		if (!strcmp(c->metadata[i].key, key))
			return true;
	return false;
}

/* Keys of all files of a component together; of equal keys the first value stays. */
static int add_metadata(struct import_component *c, const struct view_safetensors *s)
{
	if (base_table_reserve(&c->by_key, s->nmetadata) < 0)
		return -ENOMEM;
	for (uint32_t i = 0; i < s->nmetadata; i++) {
		const char *key = s->metadata[i].key;
		uint32_t hash = base_table_hash(key, strlen(key));
		struct proto_attribute *a;

		if (metadata_known(c, key, hash))
			continue;
		if (base_array_more(c->metadata, c->nmetadata) < 0)
			return -ENOMEM;
		a = &c->metadata[c->nmetadata];
		a->key = strdup(key);
		a->value = strdup(s->metadata[i].value);
		base_table_add(&c->by_key, hash, c->nmetadata++);
		if (!a->key || !a->value)
			return -ENOMEM;
	}
	return 0;
}

static int refuse_pickle(const char *path, struct base_error *err)
{
	return base_error_set(err, -EINVAL, "%s: vckpt opens no pickled file; Python takes its state over: "
		"vckpt.save(\"STORE/RUN\", torch.load(\"%s\"), step=N)", path, path);
}

int import_read_header(struct import_file *f, uint64_t offset, void **ret_header, size_t *ret_len,
	struct base_error *err)
{
	uint8_t prefix[8];
	uint64_t size = (uint64_t)f->stat.st_size - offset;
	uint64_t len;
	base_cleanup_free uint8_t *header = NULL;

	if (import_refuse_pointer(f, err) < 0)
		return err->code;
	if (size < 8)
		return base_error_set(err, -BASE_EFORMAT, "%s: %" PRIu64 " %s too few for a safetensors file",
			f->path, size, base_plural(size, "byte is", "bytes are"));
	if (import_file_read(f, offset, prefix, 8, err) < 0)
		return err->code;
	len = base_get64(prefix);
	if (len > base_min(size - 8, VIEW_SAFETENSORS_MAX_HEADER) && !offset && import_is_pickle(f))
		return refuse_pickle(f->path, err);
	if (len > VIEW_SAFETENSORS_MAX_HEADER)
		return base_error_set(err, -BASE_EFORMAT,
			"%s: it says that its header has %" PRIu64 " bytes; at most %u are allowed", f->path, len,
			VIEW_SAFETENSORS_MAX_HEADER);
	if (len > size - 8)
		return base_error_set(err, -BASE_EFORMAT,
			"%s: it says that its header has %" PRIu64 " bytes, more than the file", f->path, len);
	header = malloc(8 + len);
	if (!header)
		return base_no_memory_for(err, "%s: its header", f->path);
	if (import_file_read(f, offset, header, 8 + len, err) < 0)
		return err->code;
	*ret_header = base_steal(header);
	*ret_len = 8 + len;
	return 0;
}

/* Takes *header, and makes it NULL. */
static int take_safetensors(struct import_plan *p, struct import_file *f, void **header, size_t len,
	const struct view_safetensors *s, const char *component)
{
	struct import_component *c = component_get(p, component);

	if (!c || add_metadata(c, s) < 0 || base_array_more(c->headers, c->nheaders) < 0)
		return -ENOMEM;
	c->headers[c->nheaders++] = (struct import_header){f, base_steal(*header), len, s->data_bytes};
	for (uint32_t i = 0; i < s->ntensors; i++) {
		const struct view_safetensors_tensor *t = &s->tensors[i];

		if (add_tensor(p, component, t->name, t->name_len, t->dtype, &t->shape, s->data_offset + t->begin,
				f) < 0)
			return -ENOMEM;
		p->tensors[p->ntensors - 1].in_header = true;
	}
	return 0;
}

int import_add_safetensors(struct import_plan *p, const char *path, const char *rel, const char *component,
	struct base_error *err)
{
	struct import_file *f;
	base_cleanup_free void *header = NULL;
	struct view_safetensors s = {0};
	size_t len = 0;
	int r = import_file_open(p, path, &f, err);

	if (r < 0 || (r = import_read_header(f, 0, &header, &len, err)) < 0)
		return r;
	r = view_safetensors_parse(header, len, (uint64_t)f->stat.st_size, &s, err);
	if (r < 0)
		return base_error_prefix(err, r, "%s", path);
	if (s.ntensors == 0)
		r = 1;
	else if (rel && !(f->name = import_true_name(rel)))
		r = -ENOMEM;
	else
		r = take_safetensors(p, f, &header, len, &s, component);
	view_safetensors_release(&s);
	return r < 0 ? base_no_memory_for(err, "%s", path) : r;
}

/* The name of a tensor from that of its .npy. */
static int npy_name(const char *path, char **ret_name, struct base_error *err)
{
	const char *base = import_base_of(path);
	size_t base_len = strlen(base) - strlen(".npy"), len;
	base_cleanup_free char *name = NULL;

	if (view_name_unescape(base, base_len, &name, &len) < 0) { /* not an escaped name: taken as it is */
		name = strndup(base, base_len);
		len = base_len;
	}
	if (!name || !len || !proto_utf8_valid(name, len))
		return base_error_set(err, -EINVAL, "%s: a tensor's name must not be empty and must be UTF-8", path);
	*ret_name = base_steal(name);
	return 0;
}

/* Type, shape and place of a .npy's data. */
static int read_npy(struct import_file *f, enum tensor_dtype void_dtype, enum tensor_dtype *ret_dtype,
	struct tensor_shape *ret_shape, uint64_t *ret_offset, struct base_error *err)
{
	size_t head_len;
	base_cleanup_free void *head = NULL;
	int r;

	if (import_refuse_pointer(f, err) < 0 || (import_is_pickle(f) && refuse_pickle(f->path, err) < 0))
		return err->code;
	head_len = base_min((uint64_t)f->stat.st_size, 65536 + 12);
	head = malloc(head_len + 1);
	if (!head)
		return base_no_memory_for(err, "%s", f->path);
	r = import_file_read(f, 0, head, head_len, err);
	if (r < 0)
		return r;
	r = view_npy_parse(head, head_len, (uint64_t)f->stat.st_size, void_dtype, ret_dtype, ret_shape, ret_offset,
		err);
	if (r == -EINVAL)
		return base_error_set(err, r, "%s: %s (--dtype DTYPE before the file)", f->path, err->text);
	return r < 0 ? base_error_prefix(err, r, "%s", f->path) : 0;
}

int import_add_npy(struct import_plan *p, const char *path, const char *component, const char *name,
	enum tensor_dtype dtype, struct base_error *err)
{
	base_cleanup_free char *own = NULL;
	struct tensor_shape shape;
	struct import_file *f;
	uint64_t offset;
	int r = import_file_open(p, path, &f, err);

	if (r < 0 || (r = read_npy(f, dtype, &dtype, &shape, &offset, err)) < 0)
		return r;
	if (!name && (r = npy_name(path, &own, err)) < 0)
		return r;
	name = name ? name : own;
	return add_tensor(p, component, name, (uint32_t)strlen(name), dtype, &shape, offset, f) < 0
		? base_no_memory_for(err, "%s", path) : 0;
}

int import_add_attribute(struct import_plan *p, const struct proto_attribute *a)
{
	struct proto_attribute *to;

	for (size_t i = 0; i < p->nattributes; i++)
		if (!strcmp(p->attributes[i].key, a->key))
			return 0;
	if (base_array_more(p->attributes, p->nattributes) < 0)
		return -ENOMEM;
	to = &p->attributes[p->nattributes++];
	*to = (struct proto_attribute){strdup(a->key), strdup(a->value)};
	return to->key && to->value ? 0 : -ENOMEM;
}

int import_tensor_read(const struct import_tensor *t, uint64_t offset, void *bytes, size_t len, struct base_error *err)
{
	if (t->chunks)
		return import_chunks_read(t->chunks, offset, bytes, len, err);
	return import_file_read(t->file, t->offset + offset, bytes, len, err);
}

int import_add_chunks(struct import_plan *p, const char *component, const char *name, enum tensor_dtype dtype,
	const struct tensor_shape *shape, struct import_file *file, struct import_chunks *chunks,
	struct base_error *err)
{
	if (add_tensor(p, component, name, (uint32_t)strlen(name), dtype, shape, 0, file) < 0) {
		import_chunks_free(chunks);
		return base_no_memory_for(err, "%s", file->path);
	}
	p->tensors[p->ntensors - 1].chunks = chunks;
	return 0;
}

/* A file that is no SOURCE. */
static int refuse_file(struct import_plan *p, const char *path, struct base_error *err)
{
	struct import_file *f;
	int r = import_file_open(p, path, &f, err);

	if (r < 0 || (r = import_refuse_pointer(f, err)) < 0)
		return r;
	if (import_is_part(import_base_of(path)))
		return base_error_set(err, -EINVAL, "%s: one file of a checkpoint: give the directory that it is in",
			path);
	if (import_may_be_pickle(path) || import_is_pickle(f))
		return refuse_pickle(path, err);
	return base_error_set(err, -EINVAL, "%s: not a SOURCE: give a .safetensors or .npy file, or a directory: one "
		"in Hugging Face layout, a checkpoint of torch's distributed checkpoint (DCP), or an exported step",
		TOOL_WORD(path));
}

/* A store's own directories hold no files that an import could take. */
static int refuse_store(const char *path, struct base_error *err)
{
	base_cleanup_free char *store = store_around(path), *real = realpath(path, NULL);
	size_t n = store ? strlen(store) : 0;
	const char *rel;

	if (!store || !real || strncmp(real, store, n) != 0)
		return 0;
	rel = real + n + (real[n] == '/');
	if (*rel && !(strncmp(rel, "runs", 4) == 0 && (rel[4] == '/' || !rel[4])))
		return 0;
	return base_error_set(err, -EINVAL, "%s: %s the store %s; export the step that you mean, and import that: "
		"vckpt export %s RUN/STEP DEST", path, *rel ? "a part of" : "it is", store, TOOL_WORD(store));
}

/* A .safetensors that the user named: by its own name, or by that of the component that was asked for. One without
 * tensors is a file like any other. */
static int add_safetensors(struct import_plan *p, const char *path, const char *asked, struct base_error *err)
{
	const char *rel = import_base_of(path);
	int r = import_add_safetensors(p, path, asked ? NULL : rel, asked ? asked : IMPORT_COMPONENT, err);
	base_cleanup_free char *name = NULL;

	if (r <= 0)
		return r;
	name = import_true_name(rel);
	return name ? import_add_blob(p, path, name, false, err) : base_no_memory_for(err, "%s", path);
}

/* A directory that the user named: where its links may lead is decided here. */
static int add_directory(struct import_plan *p, const char *path, const char *component, struct base_error *err)
{
	int r = refuse_store(path, err);

	if (r == 0 && !p->follow)
		r = import_links_bound(path, &p->bound, err);
	if (r == 0)
		r = import_add_directory(p, path, component, err);
	free(base_steal(p->bound));
	return r;
}

int import_add_source(struct import_plan *p, const char *path, const char *asked, enum tensor_dtype dtype,
	struct base_error *err)
{
	const char *component = asked ? asked : IMPORT_COMPONENT;
	struct stat st;

	if (stat(path, &st) < 0)
		return base_error_set(err, -errno, "%s: %s", path, strerror(errno));
	if (S_ISDIR(st.st_mode)) {
		p->directory = p->directory ? p->directory : path;
		return add_directory(p, path, component, err);
	}
	if (import_has_suffix(path, ".safetensors"))
		return add_safetensors(p, path, asked, err);
	if (import_has_suffix(path, ".npy"))
		return import_add_npy(p, path, component, NULL, dtype, err);
	return refuse_file(p, path, err);
}

/* ---- tensors that are in two files ---- */

static int compare_tensors(const void *a, const void *b)
{
	const struct import_tensor *x = a, *y = b;
	int order = strcmp(x->component, y->component);

	if (order == 0)
		order = memcmp(x->name, y->name, base_min(x->name_len, y->name_len));
	return order ? order : (x->name_len > y->name_len) - (x->name_len < y->name_len);
}

static int same_bytes(const struct import_tensor *a, const struct import_tensor *b, struct base_error *err)
{
	enum { READ_BYTES = 1 << 20 };
	base_cleanup_free char *x = malloc(READ_BYTES), *y = malloc(READ_BYTES);
	bool same = a->dtype == b->dtype && tensor_shape_equal(&a->shape, &b->shape);
	if (!x || !y)
		return base_no_memory(err);
	for (uint64_t at = 0; same && at < a->bytes; at += READ_BYTES) {
		size_t n = base_min(READ_BYTES, a->bytes - at);

		if (import_tensor_read(a, at, x, n, err) < 0 || import_tensor_read(b, at, y, n, err) < 0)
			return err->code;
		same = !memcmp(x, y, n);
	}
	if (!same)
		return base_error_set(err, -EEXIST, "tensor %s is in %s and in %s, and they differ%s", a->name,
			a->file->path, b->file->path, a->in_header && b->in_header
			? ": import files that are models of their own each after a --component NAME" : "");
	return 0;
}

/* Sorts the tensors and keeps each once. */
static int settle_duplicates(struct import_plan *p, struct base_error *err)
{
	size_t kept = 0;
	int r = 0;

	if (p->ntensors)
		qsort(p->tensors, p->ntensors, sizeof *p->tensors, compare_tensors);
	for (size_t i = 0; i < p->ntensors; i++) {
		if (r < 0 || !kept || compare_tensors(&p->tensors[kept - 1], &p->tensors[i]) != 0) {
			p->tensors[kept++] = p->tensors[i];
			continue;
		}
		r = same_bytes(&p->tensors[kept - 1], &p->tensors[i], err);
		p->tensors[kept - 1].in_header |= p->tensors[i].in_header;
		free(p->tensors[i].name);
		import_chunks_free(p->tensors[i].chunks);
	}
	p->ntensors = kept;
	return r;
}

/* Numbered files of weights, tensors or blobs; pickles that are left out do not count. */
static int check_numbered(const struct import_plan *p, struct base_error *err)
{
	base_cleanup_free const char **paths = malloc((p->nfiles + p->nblobs + 1) * sizeof *paths);
	size_t n = 0;

	if (!paths)
		return base_no_memory(err);
	for (size_t i = 0; i < p->nfiles; i++)
		if (import_has_suffix(p->files[i]->path, ".safetensors"))
			paths[n++] = p->files[i]->path;
	for (size_t i = 0; i < p->nblobs; i++)
		if (p->keep_pickles && import_is_pickle(p->blobs[i].file))
			paths[n++] = p->blobs[i].file->path;
	return import_numbered_check(paths, n, err);
}

static int compare_blobs(const void *a, const void *b)
{
	const struct import_blob *x = a, *y = b;

	return x->per_rank != y->per_rank ? (int)x->per_rank - (int)y->per_rank : strcmp(x->name, y->name);
}

static int compare_attributes(const void *a, const void *b)
{
	return strcmp(((const struct proto_attribute *)a)->key, ((const struct proto_attribute *)b)->key);
}

/* Blobs alone: a .npy becomes one where its directory was named, so the message says how it comes in as a tensor. */
static int no_tensors(const struct import_plan *p, struct base_error *err)
{
	const char *npy = NULL;
	size_t n = 0;
	base_cleanup_free char *dir = NULL;

	for (size_t i = p->nblobs; i-- > 0;)
		if (import_has_suffix(p->blobs[i].file->path, ".npy")) {
			npy = p->blobs[i].file->path;
			n++;
		}
	if (!p->directory)
		return base_error_set(err, -EINVAL, "%s: it has no tensors, and no other SOURCE has any",
			p->blobs[0].file->path);
	if (!npy)
		return base_error_set(err, -EINVAL, "no tensors: %s has no .safetensors file with tensors, and is "
			"neither a DCP checkpoint (.metadata) nor an exported step (manifest.json)", p->directory);
	dir = strndup(npy, (size_t)(strrchr(npy, '/') - npy));
	if (!dir)
		return base_no_memory(err);
	return base_error_set(err, -EINVAL, "no tensors: .npy files of a directory are not taken unless they are named "
		"(%zu of them here): vckpt import STORE RUN %s/*.npy", n, TOOL_WORD(dir));
}

int import_plan_check(struct import_plan *p, struct base_error *err)
{
	int r = settle_duplicates(p, err);

	if (r < 0)
		return r;
	if ((r = import_names_settle(p, err)) < 0 || (r = check_numbered(p, err)) < 0)
		return r;
	for (size_t i = 0; i < p->ncomponents; i++) { /* sorted, as the view's header wants it */
		base_table_release(&p->components[i].by_key);
		if (p->components[i].nmetadata)
			qsort(p->components[i].metadata, p->components[i].nmetadata, sizeof *p->components[i].metadata,
				compare_attributes);
	}
	if (p->nblobs)
		qsort(p->blobs, p->nblobs, sizeof *p->blobs, compare_blobs);
	for (size_t i = 1; i < p->nblobs; i++)
		if (compare_blobs(&p->blobs[i - 1], &p->blobs[i]) == 0)
			return base_error_set(err, -EEXIST, "two sources have a file %s: %s and %s", p->blobs[i].name,
				p->blobs[i - 1].file->path, p->blobs[i].file->path);
	if (p->ntensors || p->ncomponents || p->exported)
		return 0;
	if (p->npickles)
		return base_error_set(err, -EINVAL, "%s (%zu in all): only pickled files hold weights here, and vckpt "
			"opens none; Python takes their state over: vckpt.save(\"STORE/RUN\", torch.load(FILE), "
			"step=N)",
			p->pickles[0], p->npickles);
	return no_tensors(p, err);
}

void import_add_number(struct import_plan *p, uint64_t number)
{
	p->number = p->nnumbers++ == 0 || p->number == number ? number : PROTO_NONE;
}

void import_attributes_free(struct proto_attribute *attributes, size_t n)
{
	for (size_t i = 0; i < n; i++) {
		free((char *)attributes[i].key);
		free((char *)attributes[i].value);
	}
	free(attributes);
}

void import_plan_release(struct import_plan *p)
{
	for (size_t i = 0; i < p->nfiles; i++) {
		if (p->files[i]->fd >= 0)
			close(p->files[i]->fd);
		free(p->files[i]->path);
		free(p->files[i]->name);
		free(p->files[i]);
	}
	for (size_t i = 0; i < p->ntensors; i++) {
		free(p->tensors[i].name);
		import_chunks_free(p->tensors[i].chunks);
	}
	for (size_t i = 0; i < p->nblobs; i++) {
		free(p->blobs[i].name);
		free(p->blobs[i].text);
		free(p->blobs[i].ranges);
	}
	for (size_t i = 0; i < p->nopaque; i++) {
		free(p->opaque[i].key);
		free(p->opaque[i].why);
	}
	free(p->opaque);
	for (size_t i = 0; i < p->npickles; i++)
		free(p->pickles[i]);
	for (size_t i = 0; i < p->ncomponents; i++) {
		import_attributes_free(p->components[i].metadata, p->components[i].nmetadata);
		base_table_release(&p->components[i].by_key);
		for (uint32_t k = 0; k < p->components[i].nheaders; k++)
			free(p->components[i].headers[k].bytes);
		free(p->components[i].headers);
	}
	import_attributes_free(p->attributes, p->nattributes);
	free(p->files);
	free(p->tensors);
	free(p->blobs);
	free(p->pickles);
	free(p->components);
	*p = (struct import_plan){0};
}
