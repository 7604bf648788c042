/* SPDX-License-Identifier: Apache-2.0
 *
 * An open file is a head in memory (the header of a .npy or .safetensors, or the text of manifest.json), followed by
 * tensors or a blob without gaps: `places`, sorted, none of them empty. A .npy and a blob have one place, whose object
 * is opened with the file. A .safetensors may have a hundred thousand: objects are opened when they are read, and those
 * that were used last are kept, bounded by count and by memory. `lock` protects these slots; it is not held while an
 * object is opened or read, so two readers may open the same one, and the second copy is dropped.
 *
 * If a .safetensors has no stored header, or one for only one of several layouts, a header is made at each open, which
 * takes no longer than reading one would. The names, dtypes and shapes of a header are compared with the step's
 * tensors; if they differ the open fails.
 *
 * A rank's .safetensors under a mesh is the same with shards in place of tensors: the header and the places are those
 * of what the rank holds (mesh_read.c). */
#include "core/view/tree.h"

#include <inttypes.h>
#include <pthread.h>

#include "core/base/bisect.h"
#include "core/view/view_internal.h"

#define SLOTS VIEW_FILE_SLOTS
#define SLOTS_BYTES (8u << 20)       /* of the objects kept, except the last used one */

/* ---- objects ---- */

static struct load_object *slot_find(struct view_file *f, uint32_t item)
{
	for (unsigned i = 0; i < SLOTS; i++) {
		struct view_slot *s = &f->slots[i];
		if (!s->object || s->item != item)
			continue;
		s->used = ++f->clock;
		return load_object_ref(s->object);
	}
	return NULL;
}

/* Keeps a reference in the oldest slot, and drops the oldest ones while their memory is above the bound. */
static void slot_keep(struct view_file *f, uint32_t item, struct load_object *object,
	struct load_object *dropped[static SLOTS])
{
	size_t total = load_object_memory(object);
	struct view_slot *empty = NULL, *oldest;
	unsigned n = 0;
	for (unsigned i = 0; i < SLOTS; i++)
		total += f->slots[i].object ? load_object_memory(f->slots[i].object) : 0;
	do {
		oldest = NULL;
		for (unsigned i = 0; i < SLOTS; i++) {
			struct view_slot *s = &f->slots[i];
			if (!s->object)
				empty = s;
			else if (!oldest || s->used < oldest->used)
				oldest = s;
		}
		if (oldest && (!empty || total > SLOTS_BYTES)) {
			total -= load_object_memory(oldest->object);
			dropped[n++] = base_steal(oldest->object);
			empty = oldest;
		}
	} while (oldest && total > SLOTS_BYTES);
	*empty = (struct view_slot){load_object_ref(object), ++f->clock, item};
}

/* The tensor, or what the file's rank holds of it. */
static void tensor_info(const struct view_file *f, uint32_t item, struct load_tensor_info *ret_info)
{
	if (f->mesh)
		view_mesh_info(f->mesh, view_tree_step(f->tree), item, f->rank, ret_info);
	else
		load_step_tensor_info(view_tree_step(f->tree), item, ret_info);
}

/* Bytes of the whole object of a place, which may have only a part of it. */
static uint64_t place_bytes(const struct view_file *f, const struct view_place *p)
{
	struct load_tensor_info info;
	if (!f->mesh)
		return p->end - p->begin;
	load_step_tensor_info(view_tree_step(f->tree), p->item, &info);
	return info.bytes;
}

static int open_object(struct view_file *f, uint32_t item, struct load_object **ret_o, struct base_error *err)
{
	struct load_step *step = view_tree_step(f->tree);
	return f->kind == VIEW_BLOB ? load_blob_open(step, item, ret_o, err) : load_tensor_open(step, item, ret_o, err);
}

/* A reference to the object of a place. */
static int get_object(struct view_file *f, const struct view_place *p, struct load_object **ret_o,
	struct base_error *err)
{
	struct load_object *o, *dropped[SLOTS] = {0};
	pthread_mutex_lock(&f->lock);
	o = slot_find(f, p->item);
	pthread_mutex_unlock(&f->lock);
	if (!o) {
		int r = open_object(f, p->item, &o, err);
		struct load_object *other;

		if (r < 0)
			return r;
		if (load_object_bytes(o) != place_bytes(f, p)) {
			load_object_unref(o);
			return base_error_set(err, -BASE_EFORMAT, "a tensor has another length than its file");
		}
		pthread_mutex_lock(&f->lock);
		other = slot_find(f, p->item);
		if (!other)
			slot_keep(f, p->item, o, dropped);
		pthread_mutex_unlock(&f->lock);
		load_object_unref(other);
		for (unsigned i = 0; i < SLOTS && dropped[i]; i++)
			load_object_unref(dropped[i]);
	}
	*ret_o = o;
	return 0;
}

/* ---- opening ---- */

static int set_one_place(struct view_file *f, const struct view_node *node)
{
	uint64_t bytes = node->size - f->head_len;
	if (bytes == 0)
		return 0;
	if (!(f->places = malloc(sizeof *f->places)))
		return -ENOMEM;
	f->places[0] = (struct view_place){0, bytes, node->item};
	f->nplaces = 1;
	return 0;
}

static int open_npy(struct view_file *f, const struct view_node *node)
{
	struct load_tensor_info info;
	load_step_tensor_info(view_tree_step(f->tree), node->item, &info);
	if (!(f->head = malloc(VIEW_NPY_DATA_OFFSET)))
		return -ENOMEM;
	f->head_len = VIEW_NPY_DATA_OFFSET;
	view_npy_header(info.dtype, &info.shape, (char *)f->head);
	return set_one_place(f, node);
}

/* Finds the step's tensor for each tensor of the header; they must agree. */
static int set_places(struct view_file *f, const char *component, const struct view_safetensors *s,
	struct base_error *err)
{
	struct load_step *step = view_tree_step(f->tree);
	if (!(f->places = malloc(s->ntensors * sizeof *f->places + 1)))
		return -ENOMEM;
	for (uint32_t i = 0; i < s->ntensors; i++) {
		const struct view_safetensors_tensor *t = &s->tensors[i];
		struct load_tensor_info info;
		int64_t item = load_step_tensor_find(step, component, t->name, t->name_len);
		if (item >= 0)
			tensor_info(f, (uint32_t)item, &info);
		if (item < 0 || info.dtype != t->dtype || !tensor_shape_equal(&info.shape, &t->shape))
			return base_error_set(err, -BASE_EFORMAT,
				"the header of %s.safetensors names tensor '%.*s', which the step lacks or has with "
				"another dtype or shape",
				component, (int)base_min(t->name_len, 400), t->name);
		if (t->end > t->begin)
			f->places[f->nplaces++] = (struct view_place){t->begin, t->end, (uint32_t)item};
	}
	return 0;
}

/* Reads the stored header, or makes one. */
static int set_safetensors_head(struct view_file *f, uint32_t component, const char *name, uint64_t *ret_data_bytes,
	struct base_error *err)
{
	struct load_step *step = view_tree_step(f->tree);
	char view[VIEW_FILES_VIEW_BYTES];
	struct base_buf made;
	uint64_t len;
	void *head;
	int r = f->mesh ? -ENOENT
		: load_step_header(step, name, view_files_view(f->file, view), STORE_VIEW_HEADER_MAX_BYTES, &head,
			&f->head_len, ret_data_bytes, err);
	if (r != -ENOENT || f->file) {
		f->head = r < 0 ? NULL : head;
		return r;
	}
	r = view_safetensors_make_step(step, f->mesh, f->rank, component, &made, &len, ret_data_bytes);
	if (r < 0)
		return base_error_set(err, r, "%s.safetensors: no header could be made: %s", name,
			base_error_name(r));
	f->head = made.data;
	f->head_len = made.len;
	if (f->mesh && base_add_overflows(len, *ret_data_bytes, &f->size))
		return base_error_set(err, -EFBIG, "%s.safetensors would have more bytes than a file can", name);
	return 0;
}

static int open_safetensors(struct view_file *f, uint32_t component, struct base_error *err)
{
	struct view_safetensors s;
	uint32_t first, end;
	uint64_t data_bytes;
	const char *name = load_step_component(view_tree_step(f->tree), component, &first, &end);
	int r = set_safetensors_head(f, component, name, &data_bytes, err);
	if (r < 0)
		return r;
	if (data_bytes > f->size || f->head_len != f->size - data_bytes)
		return base_error_set(err, -BASE_EFORMAT,
			"the header of %s.safetensors has another length than the manifest says", name);
	r = view_safetensors_parse(f->head, f->head_len, f->size, &s, err);
	if (r < 0)
		return base_error_prefix(err, r, "%s.safetensors", name);
	r = s.data_offset == f->head_len
		? set_places(f, name, &s, err)
		: base_error_set(err, -BASE_EFORMAT,
			  "the header of %s.safetensors is followed by other bytes than spaces", name);
	view_safetensors_release(&s);
	return r;
}

static int open_json(struct view_file *f, struct base_error *err)
{
	struct base_buf b = BASE_BUF_INIT;
	uint64_t len;
	int r = f->mesh ? view_mesh_json(f->mesh, view_tree_step(f->tree), &b, &len)
		: view_manifest_json(f->tree, &b, &len, err);
	if (r < 0)
		return r;
	f->head = b.data;
	f->size = f->head_len = b.len;
	return 0;
}

static int open_kind(struct view_file *f, const struct view_node *node, struct base_error *err)
{
	struct load_object *o = NULL;
	int r = 0;
	switch (f->kind) {
	case VIEW_TENSOR_NPY: r = open_npy(f, node); break;
	case VIEW_SAFETENSORS: return open_safetensors(f, node->item, err);
	case VIEW_BLOB: r = set_one_place(f, node); break;
	case VIEW_MANIFEST_JSON: r = open_json(f, err); break;
	case VIEW_DIRECTORY: return -EISDIR;
	}
	if (r == 0 && f->nplaces) { /* a file that cannot be read fails at open */
		r = get_object(f, &f->places[0], &o, err);
		load_object_unref(o);
	}
	return r;
}

static struct view_file *file_new(struct view_tree *t, enum view_kind kind, struct base_error *err)
{
	struct view_file *f = calloc(1, sizeof *f);
	if (!f) {
		base_no_memory(err);
		return NULL;
	}
	pthread_mutex_init(&f->lock, NULL);
	f->tree = view_tree_ref(t);
	f->kind = kind;
	return f;
}

static int file_opened(struct view_file *f, int r, struct view_file **ret_f, struct base_error *err)
{
	if (r == -ENOMEM)
		base_no_memory(err);
	if (r < 0) {
		view_file_close(f);
		return r;
	}
	*ret_f = f;
	return 0;
}

int view_file_open(struct view_tree *t, uint32_t node, struct view_file **ret_f, struct base_error *err)
{
	const struct view_node *n = view_tree_node(t, node);
	struct view_file *f;

	if (!n)
		return base_error_set(err, -ENOENT, "there is no such file");
	if (n->kind == VIEW_DIRECTORY)
		return base_error_set(err, -EISDIR, "'%s' is a directory", n->name);
	f = file_new(t, n->kind, err);
	if (!f)
		return -ENOMEM;
	f->size = n->size;
	f->file = n->file;
	return file_opened(f, open_kind(f, n, err), ret_f, err);
}

int view_mesh_open(struct view_mesh *m, struct view_tree *t, uint32_t rank, uint32_t component,
	struct view_file **ret_f, struct base_error *err)
{
	struct view_file *f = file_new(t, rank == VIEW_MESH_ALL ? VIEW_MANIFEST_JSON : VIEW_SAFETENSORS, err);
	if (!f)
		return -ENOMEM;
	f->mesh = view_mesh_ref(m);
	f->rank = rank;
	return file_opened(f, rank == VIEW_MESH_ALL ? open_json(f, err) : open_safetensors(f, component, err), ret_f,
		err);
}

void view_file_close(struct view_file *f)
{
	if (!f)
		return;
	for (unsigned i = 0; i < SLOTS; i++)
		load_object_unref(f->slots[i].object);
	pthread_mutex_destroy(&f->lock);
	view_tree_unref(f->tree);
	view_mesh_unref(f->mesh);
	free(f->places);
	free(f->head);
	free(f);
}

uint64_t view_file_size(const struct view_file *f)
{
	return f->size;
}

/* ---- reading ---- */

/* The place that holds byte `at` of the data: there is one. */
static const struct view_place *place_of(const struct view_file *f, uint64_t at)
{
	return &f->places[base_bisect(i, 0, f->nplaces - 1, f->places[i].end <= at)];
}

int64_t view_file_tensor(const struct view_file *f, uint64_t offset)
{
	if (f->kind != VIEW_SAFETENSORS || offset < f->head_len || !f->nplaces)
		return -1;
	return place_of(f, offset - f->head_len) - f->places;
}

static size_t clip(const struct view_file *f, uint64_t offset, size_t len)
{
	return offset >= f->size ? 0 : base_min(len, f->size - offset);
}

struct joined { struct base_buf iov, pins; };

static void join_part(struct joined *j, struct load_slices *part)
{
	base_buf_append(&j->iov, part->iov, part->niov * sizeof *part->iov);
	base_buf_append(&j->pins, part->pins, part->npins * sizeof *part->pins);
	if (j->iov.error || j->pins.error) { /* the pins of this part may not be in */
		if (!j->pins.error)
			j->pins.len -= part->npins * sizeof *part->pins;
		load_slices_release(part);
		return;
	}
	free(part->memory);
}

static int join_finish(struct joined *j, int r, struct load_slices *ret_e)
{
	unsigned npins = j->pins.len / sizeof(struct load_pin *);
	struct load_pin **pins = (void *)j->pins.data;
	char *memory = NULL;
	if (r == 0 && (j->iov.error || j->pins.error || !(memory = malloc(j->iov.len + j->pins.len + 1))))
		r = -ENOMEM;
	if (r == 0) {
		memcpy(memory, j->iov.data, j->iov.len);
		if (npins)
			memcpy(memory + j->iov.len, pins, j->pins.len);
		*ret_e = (struct load_slices){.iov = (void *)memory, .niov = j->iov.len / sizeof(struct iovec),
			.pins = (void *)(memory + j->iov.len),
			.npins = npins, .memory = memory};
	} else {
		for (unsigned i = 0; i < npins; i++)
			load_unpin(pins[i]);
	}
	base_buf_release(&j->iov);
	base_buf_release(&j->pins);
	return r;
}

/* The part of the range that is in the head or in one place. Returns its length; *ret_p NULL: in the head. */
static size_t stretch(const struct view_file *f, uint64_t offset, size_t len, const struct view_place **ret_p)
{
	*ret_p = NULL;
	if (offset < f->head_len)
		return base_min(len, f->head_len - offset);
	*ret_p = place_of(f, offset - f->head_len);
	return base_min(len, (*ret_p)->end - (offset - f->head_len));
}

static int stretch_slices(struct view_file *f, struct load_cache *c, const struct view_place *p, uint64_t offset,
	size_t len, void *scratch,
	struct load_slices *ret_e, struct base_error *err)
{
	struct load_object *o;
	int r = get_object(f, p, &o, err);
	if (r < 0)
		return r;
	offset -= f->head_len + p->begin;
	r = f->mesh ? view_mesh_slices(f->mesh, p->item, f->rank, o, c, offset, len, scratch, ret_e, err)
		: load_object_slices(o, c, offset, len, scratch, ret_e, err);
	load_object_unref(o); /* pins keep the bytes */
	return r;
}

int view_file_slices(struct view_file *f, struct load_cache *c, uint64_t offset, size_t len, void *scratch,
	struct load_slices *ret_e, struct base_error *err)
{
	struct joined j = {BASE_BUF_INIT, BASE_BUF_INIT};
	const struct view_place *p;
	int r = 0;
	*ret_e = (struct load_slices){0};
	len = clip(f, offset, len);
	if (len == 0)
		return 0;
	if (stretch(f, offset, len, &p) == len && p)
		return stretch_slices(f, c, p, offset, len, scratch, ret_e, err);
	for (size_t done = 0, n; done < len && r == 0; done += n) {
		struct load_slices part = {0};
		n = stretch(f, offset + done, len - done, &p);
		if (!p)
			base_buf_append(&j.iov, &(struct iovec){f->head + offset + done, n}, sizeof(struct iovec));
		else if ((r = stretch_slices(f, c, p, offset + done, n, (char *)scratch + done, &part, err)) == 0)
			join_part(&j, &part);
	}
	return join_finish(&j, r, ret_e);
}

int64_t view_file_read(struct view_file *f, struct load_cache *c, uint64_t offset, size_t len, void *out,
	struct base_error *err)
{
	len = clip(f, offset, len);
	for (size_t done = 0, n; done < len; done += n) {
		const struct view_place *p;
		struct load_object *o;
		int r;
		uint64_t at;

		n = stretch(f, offset + done, len - done, &p);
		if (!p) {
			memcpy((char *)out + done, f->head + offset + done, n);
			continue;
		}
		r = get_object(f, p, &o, err);
		if (r < 0)
			return r;
		at = offset + done - f->head_len - p->begin;
		r = f->mesh ? view_mesh_read(f->mesh, p->item, f->rank, o, c, at, n, (char *)out + done, err)
			: load_object_read(o, c, at, n, (char *)out + done, err);
		load_object_unref(o);
		if (r < 0)
			return r;
	}
	return (int64_t)len;
}
