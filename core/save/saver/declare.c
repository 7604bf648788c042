/* SPDX-License-Identifier: Apache-2.0
 *
 * declare: what a flight is to save: tensors, blobs, values. Each is checked and copied at once into an arena of the
 * flight (names, strides, boxes, words), so that submit only has to hand the flight over. One thread declares. */
#include "core/base/array.h"
#include "core/save/saver/saver_internal.h"

#define DECLARE_ARENA_BYTES 65536u
#define DECLARE_TENSORS_MAX (UINT32_C(1) << 24)
#define DECLARE_WORDS_KEPT 8u

struct saver_arena { struct saver_arena *next; size_t used, room; max_align_t bytes[]; };

/* The caller's thread alone sets f->submitted. */
static int declare_is_open(const struct save_flight *f, struct base_error *err)
{
	int r = saver_check(f->s, err);

	if (r == 0 && f->submitted)
		r = base_error_set(err, -EINVAL, "the save of %s was submitted: nothing more can be declared",
			saver_name(f).text);
	return r;
}

static void *declare_room(struct save_flight *f, size_t bytes)
{
	struct saver_arena *a = f->arena;
	void *at;

	if (bytes > SIZE_MAX / 2)
		return NULL;
	bytes = base_align(bytes, _Alignof(max_align_t));
	if (!a || a->room - a->used < bytes) {
		size_t room = base_max(bytes, DECLARE_ARENA_BYTES);

		a = malloc(sizeof *a + room);
		if (!a)
			return NULL;
		*a = (struct saver_arena){.next = f->arena, .room = room};
		f->arena = a;
	}
	at = (char *)a->bytes + a->used;
	a->used += bytes;
	return at;
}

static void *declare_copy(struct save_flight *f, const void *from, size_t bytes)
{
	void *to = declare_room(f, bytes);

	if (to && bytes)
		memcpy(to, from, bytes);
	return to;
}

void saver_declared_release(struct save_flight *f)
{
	for (size_t i = 0; i < f->nwords; i++) {
		free(f->words[i].words);
		free(f->words[i].placements);
	}
	while (f->arena) {
		struct saver_arena *a = f->arena;

		f->arena = a->next;
		free(a);
	}
	check_commons_release(&f->commons);
	free(f->words);
	free(f->tensors);
	base_table_release(&f->by_name);
}

/* ---- tensors ---- */

static bool saver_mesh_equal(const struct tensor_mesh *a, const struct tensor_mesh *b)
{
	if (a->ndim != b->ndim || a->count != b->count || memcmp(a->size, b->size, a->ndim * sizeof a->size[0]) != 0)
		return false;
	for (uint32_t d = 0; d < a->ndim; d++)
		if (strcmp(a->name[d], b->name[d]) != 0)
			return false;
	if (!a->ranks || !b->ranks)
		return a->ranks == b->ranks;
	return memcmp(a->ranks, b->ranks, a->count * sizeof a->ranks[0]) == 0;
}

const struct tensor_mesh *saver_mesh(struct save_saver *s, const struct tensor_mesh *m, struct base_error *err)
{
	const char *names[TENSOR_MAX_DIMS];
	struct tensor_mesh *copy = NULL;

	pthread_mutex_lock(&s->meshes_lock);
	for (size_t i = 0; i < s->nmeshes && !copy; i++)
		if (saver_mesh_equal(s->meshes[i], m))
			copy = s->meshes[i];
	if (!copy) {
		for (uint32_t d = 0; d < m->ndim; d++)
			names[d] = m->name[d];
		if (base_array_more(s->meshes, s->nmeshes) < 0)
			base_no_memory(err);
		else if (tensor_mesh_new(m->ndim, names, m->size, m->ranks, m->ranks ? m->count : 0, &copy, err) == 0)
			s->meshes[s->nmeshes++] = copy;
	}
	pthread_mutex_unlock(&s->meshes_lock);
	return copy;
}

static const struct tensor_mesh *declare_mesh(struct save_flight *f, const struct tensor_mesh *m,
	struct base_error *err)
{
	if (!m)
		return f->s->mesh;
	if (m != f->last_mesh.from || !saver_mesh_equal(f->last_mesh.to, m)) { /* another one in the same memory */
		const struct tensor_mesh *to = saver_mesh(f->s, m, err);

		if (!to)
			return NULL;
		f->last_mesh.from = m;
		f->last_mesh.to = to;
	}
	return f->last_mesh.to;
}

/* Placements are parsed once as long as the same words come again. */
static int declare_placements(struct save_flight *f, const char *words, const struct tensor_placements **ret_p,
	struct base_error *err)
{
	size_t kept = base_min(f->nwords, DECLARE_WORDS_KEPT);
	struct saver_words new;
	int r;

	for (size_t i = f->nwords; i > f->nwords - kept; i--)
		if (strcmp(f->words[i - 1].words, words) == 0) {
			*ret_p = f->words[i - 1].placements;
			return 0;
		}
	new.words = base_array_more(f->words, f->nwords) == 0 ? strdup(words) : NULL;
	if (!new.words)
		return base_no_memory(err);
	r = tensor_placements_parse(words, &new.placements, err);
	if (r < 0) {
		free(new.words);
		return r;
	}
	f->words[f->nwords++] = new;
	*ret_p = new.placements;
	return 0;
}

static uint32_t tensor_hash(const struct save_tensor *t)
{
	return base_table_hash_in(base_table_hash(t->component, strlen(t->component)), t->name, t->name_len);
}

/* The first tensor of that component and name, or NULL. */
static const struct save_tensor *tensor_find(const struct save_flight *f, const struct save_tensor *t, uint32_t hash)
{
	size_t at = 0;
	uint32_t i;

	while ((i = base_table_next(&f->by_name, hash, &at)) != BASE_TABLE_NONE)
		if (strcmp(f->tensors[i].name, t->name) == 0 && strcmp(f->tensors[i].component, t->component) == 0)
			return &f->tensors[i];
	return NULL;
}

static int tensor_check_names(const struct tensor_description *t, struct base_error *err)
{
	size_t len = t->name ? strlen(t->name) : 0;

	if (!t->component || !proto_component_valid(t->component))
		return base_error_set(err, -EINVAL,
			"\"%.100s\" is no name for a component: it is [A-Za-z0-9_][A-Za-z0-9._-]*, "
			"at most %d bytes, and none that a step uses itself",
			t->component ? t->component : "", PROTO_COMPONENT_MAX);
	if (len == 0 || len > PROTO_NAME_MAX || !proto_utf8_valid(t->name, len))
		return base_error_set(err, -EINVAL,
			"component %s: \"%.200s\" is no name for a tensor: it is UTF-8, of 1 to %d bytes",
			t->component, t->name ? t->name : "", PROTO_NAME_MAX);
	return 0;
}

static int tensor_set_sharding(struct save_flight *f, const struct tensor_description *d, struct save_tensor *t,
	struct base_error *err)
{
	static const struct tensor_placement replicate[TENSOR_MAX_DIMS];
	struct tensor_sharding *s = &t->sharding;
	const struct tensor_placements *words = NULL;
	int r = 0;

	s->item_bytes = tensor_dtype_bytes(t->dtype);
	s->placement = replicate;
	if (d->alone)
		return d->mesh || d->placements || d->same_dims || d->has_boxes || t->flat
			? base_error_set(err, -EINVAL,
				"one rank alone holds it, whole: mesh, placements, same_dims, flat and boxes cannot be "
				"given") : 0;
	s->mesh = declare_mesh(f, d->mesh, err);
	if (!s->mesh)
		return -ENOMEM;
	if (d->has_boxes && (d->placements || t->flat))
		return base_error_set(err, -EINVAL, "boxes exclude placements and a flat range");
	if (d->placements)
		r = declare_placements(f, d->placements, &words, err);
	if (r == 0 && words)
		s->placement = words->at;
	if (r == 0)
		r = tensor_sharding_check(s, words ? words->n : s->mesh->ndim, err);
	if (r == 0 && d->same_dims && d->same_dims[0])
		r = tensor_mesh_dims(s->mesh, d->same_dims, &t->same_dims, err);
	return r;
}

static int tensor_set_boxes(struct save_flight *f, const struct tensor_description *d, struct save_tensor *t,
	struct base_error *err)
{
	const struct tensor_shape *shape = &t->sharding.shape;
	uint64_t items = 0, pairs = (uint64_t)d->nboxes * shape->ndim * 2;
	struct tensor_boxes *b = declare_room(f, sizeof *b);
	struct tensor_box box;
	int r;

	if (!b)
		return base_no_memory(err);
	if ((d->nboxes && shape->ndim && !d->boxes) || pairs > SIZE_MAX / 8)
		return base_error_set(err, -EINVAL, "its boxes are missing");
	*b = (struct tensor_boxes){.ndim = shape->ndim, .n = d->nboxes, .room = d->nboxes};
	b->pairs = declare_copy(f, d->boxes, pairs * sizeof *d->boxes);
	if (!b->pairs)
		return base_no_memory(err);
	r = tensor_shard_list_check(shape, b, err);
	for (size_t i = 0; r == 0 && i < b->n; i++) {
		tensor_boxes_get(b, i, &box);
		items += tensor_box_items(shape, &box);
	}
	t->boxes = b;
	t->local = (struct tensor_shape){.ndim = 1, .dim = {items}};
	return r;
}

static int tensor_set_local(struct save_flight *f, const struct tensor_description *d, struct save_tensor *t,
	struct base_error *err)
{
	struct tensor_shard shard = {.local_shape = t->sharding.shape};
	int r = 0;

	if (d->has_boxes)
		return tensor_set_boxes(f, d, t, err);
	if (t->flat) {
		t->flat = declare_copy(f, t->flat, sizeof *t->flat);
		if (!t->flat)
			return base_no_memory(err);
	}
	if (t->sharding.mesh)
		r = tensor_shard_of(&t->sharding, f->s->options.rank, t->flat, &shard, err);
	if (r == 0 && shard.absent)
		shard.local_shape = (struct tensor_shape){.ndim = 1};
	t->local = shard.local_shape;
	return r;
}

static int tensor_check_local(const struct save_flight *f, const struct tensor_description *d,
	const struct save_tensor *t, struct base_error *err)
{
	uint64_t items;
	int r = tensor_shape_items(&t->local, t->sharding.item_bytes, &items);

	if (r < 0)
		return base_error_set(err, r, "its local shape: %s", base_error_name(r));
	if (items)
		r = tensor_shard_check_local(&t->local, f->s->options.rank, d->local_ndim, d->local_shape, t->strides,
			err);
	if (r < 0)
		return r;
	if (items && !t->data)
		return base_error_set(err, -EINVAL, "its data is a null pointer");
	return 0;
}

static bool tensor_is_contiguous(const struct save_tensor *t)
{
	uint64_t bytes = t->sharding.item_bytes;

	for (uint32_t d = t->local.ndim; t->strides && !tensor_shape_empty(&t->local) && d-- > 0;) {
		if (t->local.dim[d] > 1 && t->strides[d] != (int64_t)bytes)
			return false;
		bytes *= t->local.dim[d];
	}
	return true;
}

/* Completes the caller's description, and copies all that it points to but the data. */
static int tensor_set(struct save_flight *f, const struct tensor_description *d, struct save_tensor *t,
	struct base_error *err)
{
	const char *before = f->ntensors ? t[-1].component : NULL; /* tensors of one component come together */
	int r;

	t->name_len = (uint32_t)strlen(t->name);
	t->name = declare_copy(f, t->name, t->name_len + 1);
	t->component = before && strcmp(before, t->component) == 0 ? before
		: declare_copy(f, t->component, strlen(t->component) + 1);
	if (!t->name || !t->component)
		return base_no_memory(err);
	r = tensor_set_sharding(f, d, t, err);
	if (r == 0)
		r = tensor_set_local(f, d, t, err);
	if (r == 0)
		r = tensor_check_local(f, d, t, err);
	if (r < 0)
		return r;
	if (tensor_is_contiguous(t)) {
		t->strides = NULL;
		return 0;
	}
	t->strides = declare_copy(f, t->strides, t->local.ndim * sizeof *t->strides);
	return t->strides ? 0 : base_no_memory(err);
}

/* A name may be given again only with more boxes of the same tensor; anything else is a mistake. */
static int tensor_check_again(const struct save_tensor *first, const struct save_tensor *t, struct base_error *err)
{
	if (!first->boxes || !t->boxes || t->same_dims || first->same_dims)
		return base_error_set(err, -EEXIST, "it is given twice");
	if (first->dtype != t->dtype || !tensor_shape_equal(&first->sharding.shape, &t->sharding.shape))
		return base_error_set(err, -EINVAL, "its boxes are given twice, with another shape or dtype");
	return 0;
}

int save_flight_tensor(struct save_flight *f, const struct tensor_description *d, struct base_error *err)
{
	const struct save_tensor *first;
	struct save_tensor *to;
	uint32_t hash;
	int r = declare_is_open(f, err);

	if (r == 0 && f->ntensors == DECLARE_TENSORS_MAX)
		r = base_error_set(err, -EINVAL, "the save of %s has %u tensors, and no more are possible",
			saver_name(f).text, DECLARE_TENSORS_MAX);
	if (r == 0)
		r = tensor_check_names(d, err);
	if (r == 0 && (base_array_room(f->tensors, f->tensors_room, f->ntensors + 1) < 0
			|| base_table_reserve(&f->by_name, 1) < 0))
		r = base_no_memory(err);
	if (r < 0)
		return r;
	to = &f->tensors[f->ntensors];
	*to = (struct save_tensor){.component = d->component, .name = d->name, .dtype = d->dtype,
		.sharding.shape = d->shape, .flat = d->flat, .buffer = d->buffer, .device = d->device,
		.strides = d->strides, .data = d->data};
	r = tensor_set(f, d, to, err);
	hash = r == 0 ? tensor_hash(to) : 0;
	first = r == 0 ? tensor_find(f, to, hash) : NULL;
	if (first)
		r = tensor_check_again(first, to, err);
	if (r < 0)
		return base_error_prefix(err, r, "tensor %s/%.*s", d->component,
			store_layout_shown(d->name, strlen(d->name)), d->name);
	if (first && tensor_shape_empty(&d->shape))
		return 0; /* it has no more boxes */
	if (!first)
		base_table_add(&f->by_name, hash, f->ntensors);
	f->ntensors++;
	f->device |= to->device;
	return 0;
}

size_t save_flight_count(const struct save_flight *f) { return f->ntensors; }

void save_flight_truncate(struct save_flight *f, size_t count)
{
	if (count >= f->ntensors || f->submitted)
		return;
	f->ntensors = (uint32_t)count;
	base_table_clear(&f->by_name); /* and keeps its memory, so there is room */
	for (uint32_t i = 0; i < f->ntensors; i++) {
		uint32_t hash = tensor_hash(&f->tensors[i]);

		if (!tensor_find(f, &f->tensors[i], hash))
			base_table_add(&f->by_name, hash, i);
	}
}

/* ---- blobs and values ---- */

static int blob_read_memory(void *arg, uint64_t offset, void *bytes, size_t len, struct base_error *err)
{
	const struct saver_blob *b = arg;

	if (offset > b->len || len > b->len - offset)
		return base_error_set(err, -EINVAL, "beyond its end");
	memcpy(bytes, (const char *)b->bytes + offset, len);
	return 0;
}

int save_flight_blob(struct save_flight *f, const char *name, bool per_rank, const void *bytes, size_t len,
	struct base_error *err)
{
	struct saver_blob *b;
	int r = declare_is_open(f, err);

	if (r < 0)
		return r;
	if (!name)
		return base_error_set(err, -EINVAL, "a blob of the save of %s has no name", saver_name(f).text);
	if (len && !bytes)
		return base_error_set(err, -EINVAL, "blob %.400s: a null pointer is given for its %zu bytes", name,
			len);
	if (save_writer_has_blob(f->w, name, per_rank))
		return base_error_set(err, -EEXIST, "blob %.400s is given twice", name);
	b = declare_room(f, sizeof *b);
	if (b)
		*b = (struct saver_blob){declare_copy(f, bytes, len), len};
	if (!b || !b->bytes)
		return base_no_memory(err);
	return save_writer_blob(f->w, name, per_rank, len, (struct save_source){blob_read_memory, b}, err);
}

int save_flight_common(struct save_flight *f, const char *group, const char *name, const void *bytes, size_t len,
	struct base_error *err)
{
	int r = declare_is_open(f, err);

	if (r < 0)
		return r;
	if (len && !bytes)
		return base_error_set(err, -EINVAL, "value \"%.200s\" of the group \"%.200s\": a null pointer is given "
			"for its %zu bytes", name ? name : "", group ? group : "", len);
	return check_commons_add(&f->commons, group, name, bytes, len, err);
}
