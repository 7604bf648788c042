/* SPDX-License-Identifier: Apache-2.0
 *
 * flight: one save under way, as its caller sees it: declared by one thread, submitted, waited for by any. What is
 * declared is checked and copied at once into an arena of the flight (names, strides, boxes, words), so that submit
 * only has to hand it over. What a caller is told comes from the fields under the saver's lock. */
#include <limits.h>
#include <stdio.h>
#include <unistd.h>

#include "core/base/array.h"
#include "core/base/clock.h"
#include "core/save/saver/saver_internal.h"

#define FLIGHT_ARENA_BYTES 65536u
#define FLIGHT_TENSORS_MAX (UINT32_C(1) << 24)
#define FLIGHT_WORDS_KEPT 8u

struct saver_arena { struct saver_arena *next; size_t used, room; max_align_t bytes[]; };

static const char *const phase_names[SAVE_PHASES] = {"plan", "room", "copy", "digest", "encode", "write", "seal",
	"wait", "commit"};

const char *save_phase_name(enum save_phase phase) { return phase_names[phase]; }

void saver_phase_note(struct save_flight *f, enum save_phase phase, uint64_t start_ns, uint64_t busy_ns, uint64_t bytes)
{
	struct save_phase_time *p = &f->info.phase[phase];
	uint64_t end = start_ns + busy_ns;

	if (!p->start_ns || start_ns < p->start_ns)
		p->start_ns = start_ns;
	p->end_ns = base_max(p->end_ns, end);
	p->busy_ns += busy_ns;
	p->bytes += bytes;
}

struct saver_name saver_name(const struct save_flight *f)
{
	struct saver_name name;

	if (f->options.step == PROTO_NONE)
		snprintf(name.text, sizeof name.text, "the next step of %.*s", PROTO_RUN_MAX, f->s->run);
	else
		snprintf(name.text, sizeof name.text, "%.*s/%llu", PROTO_RUN_MAX, f->s->run,
			(unsigned long long)f->options.step);
	return name;
}

/* Of what is declared. The caller's thread alone sets f->submitted. */
static int flight_is_open(const struct save_flight *f, struct base_error *err)
{
	int r = saver_check(f->s, err);

	if (r == 0 && f->submitted)
		r = base_error_set(err, -EINVAL, "the save of %s was submitted: nothing more can be declared",
			saver_name(f).text);
	return r;
}

int saver_check(const struct save_saver *s, struct base_error *err)
{
	if (!save_saver_is_child(s))
		return 0;
	return base_error_set(err, -BASE_EFORKED,
		"the saver of run %s belongs to process %d: a child of it has to open one of its own", s->run,
		(int)s->pid);
}

/* ---- memory ---- */

static void *flight_room(struct save_flight *f, size_t bytes)
{
	struct saver_arena *a = f->arena;
	void *at;

	if (bytes > SIZE_MAX / 2)
		return NULL;
	bytes = base_align(bytes, _Alignof(max_align_t));
	if (!a || a->room - a->used < bytes) {
		size_t room = base_max(bytes, FLIGHT_ARENA_BYTES);

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

static void *flight_copy(struct save_flight *f, const void *from, size_t bytes)
{
	void *to = flight_room(f, bytes);

	if (to && bytes)
		memcpy(to, from, bytes);
	return to;
}

void saver_flight_release(struct save_flight *f)
{
	pthread_mutex_lock(&f->s->lock);
	saver_pieces_give(f->pieces);
	saver_pieces_give(f->before);
	pthread_mutex_unlock(&f->s->lock);
	save_writer_close(f->w);
	save_plan_cache_give(f->s->plans, f->planned);
	save_replicas_release(&f->replicas);
	device_fence_free(f->fence);
	for (size_t i = 0; i < f->nwords; i++) {
		free(f->words[i].words);
		free(f->words[i].placements);
	}
	for (size_t i = 0; i < f->nbases; i++)
		free(f->bases[i]);
	while (f->arena) {
		struct saver_arena *a = f->arena;

		f->arena = a->next;
		free(a);
	}
	store_commons_release(&f->commons);
	free(f->words);
	free(f->bases);
	free(f->tensors);
	base_table_release(&f->by_name);
	free(f->names);
	free(f->sample_hashes);
	free(f);
}

/* A wait answers -ETIMEDOUT when its time is over and the save goes on. So a save that failed because the storage
 * answered -ETIMEDOUT fails with -EIO: its caller would wait again for ever. */
void saver_flight_fail(struct save_flight *f, int r, const struct base_error *err)
{
	if (!f->failed) {
		f->failed = true;
		f->r = r == -ETIMEDOUT ? -EIO : r;
		if (err && err->code)
			f->err = *err;
		else
			base_error_set(&f->err, r, "the save of %s failed: %s", saver_name(f).text, base_error_name(r));
		f->err.code = f->r;
	}
	pthread_cond_broadcast(&f->s->work);
	pthread_cond_broadcast(&f->s->ready);
	pthread_cond_broadcast(&f->s->told);
}

/* ---- begin ---- */

static int flight_set_bases(struct save_flight *f, const struct save_flight_options *o, struct base_error *err)
{
	f->bases = calloc(o->nbases + 1, sizeof *f->bases);
	if (!f->bases)
		return base_no_memory(err);
	for (size_t i = 0; i < o->nbases; i++) {
		const char *slash = strchr(o->bases[i], '/');
		char *end = NULL;

		errno = 0;
		if (slash && slash - o->bases[i] <= PROTO_RUN_MAX && slash[1] >= '0' && slash[1] <= '9')
			strtoull(slash + 1, &end, 10);
		if (!end || *end || errno)
			return base_error_set(err, -EINVAL, "base \"%.200s\" is not RUN/STEP", o->bases[i]);
		f->bases[f->nbases] = strdup(o->bases[i]);
		if (!f->bases[f->nbases++])
			return base_no_memory(err);
	}
	return 0;
}

static int flight_new(struct save_saver *s, const struct save_flight_options *o, struct save_flight **ret_f,
	struct base_error *err)
{
	struct save_flight *f = calloc(1, sizeof *f);
	int r;

	if (!f)
		return base_no_memory(err);
	f->s = s;
	f->refs = 2; /* the caller's and the queue's */
	f->options = *o;
	r = save_writer_new(s->store, s->run, o->attributes, o->nattributes, s->options.rank, s->options.world,
		&f->w, err);
	if (r == 0)
		r = flight_set_bases(f, o, err);
	if (r < 0) {
		saver_flight_release(f);
		return r;
	}
	f->options.attributes = NULL; /* the writer has copies */
	f->options.bases = NULL;
	*ret_f = f;
	return 0;
}

static int flight_enqueue(struct save_saver *s, struct save_flight *f, struct base_error *err)
{
	pthread_mutex_lock(&s->lock);
	if (s->closing) {
		pthread_mutex_unlock(&s->lock);
		saver_flight_release(f);
		return base_error_set(err, -ESHUTDOWN, "the saver of run %s is closed", s->run);
	}
	f->number = s->count++;
	*(s->last ? &s->last->next : &s->first) = f;
	s->last = f;
	if (f->given_up)
		pthread_cond_signal(&s->ready);
	pthread_mutex_unlock(&s->lock);
	return 0;
}

/* The other ranks may not have refused theirs, and would wait for this one's part: what is refused begins, and gives
 * the step up. */
static int flight_refuse(struct save_saver *s, uint64_t step, int r, const struct base_error *why)
{
	const struct save_flight_options none = {.step = step};
	struct save_flight *f;

	if (flight_new(s, &none, &f, NULL) < 0)
		return r;
	f->refs = 1; /* the queue's */
	f->given_up = f->failed = true;
	f->r = r;
	f->err = *why;
	flight_enqueue(s, f, NULL);
	return r;
}

int save_flight_begin(struct save_saver *s, const struct save_flight_options *o, struct save_flight **ret_f,
	struct base_error *err)
{
	struct base_error why = {0};
	struct save_flight *f = NULL;
	int r = saver_check(s, err);

	if (r < 0)
		return r;
	if (o->step == PROTO_NONE && s->options.world > 1)
		return base_error_set(err, -EINVAL,
			"run %s: a save of %u ranks needs the number of its step (the trainer's count of iterations, "
			"the same on all ranks)", s->run, s->options.world);
	if (o->step != PROTO_NONE && o->step >> 44)
		return base_error_set(err, -EINVAL, "run %s: a job's steps go from 0 to 2^44-1", s->run);
	r = flight_new(s, o, &f, &why);
	if (r < 0) {
		if (err)
			*err = why;
		return flight_refuse(s, o->step, r, &why);
	}
	r = flight_enqueue(s, f, err);
	if (r == 0)
		*ret_f = f;
	return r;
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

/* Equal meshes of all saves are one copy, which lives as long as the saver: callers may free theirs. */
static const struct tensor_mesh *saver_mesh(struct save_saver *s, const struct tensor_mesh *m, struct base_error *err)
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

static const struct tensor_mesh *flight_mesh(struct save_flight *f, const struct tensor_mesh *m, struct base_error *err)
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
static int flight_placements(struct save_flight *f, const char *words, const struct tensor_placements **ret_p,
	struct base_error *err)
{
	size_t kept = base_min(f->nwords, FLIGHT_WORDS_KEPT);
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

static uint32_t flight_hash(const struct saver_tensor *t)
{
	return base_table_hash_in(base_table_hash(t->component, strlen(t->component)), t->name, t->name_len);
}

/* The first tensor of that component and name, or NULL. */
static const struct saver_tensor *flight_find(const struct save_flight *f, const struct saver_tensor *t, uint32_t hash)
{
	size_t at = 0;
	uint32_t i;

	while ((i = base_table_next(&f->by_name, hash, &at)) != BASE_TABLE_NONE)
		if (strcmp(f->tensors[i].name, t->name) == 0 && strcmp(f->tensors[i].component, t->component) == 0)
			return &f->tensors[i];
	return NULL;
}

static int tensor_check_names(const struct save_tensor *t, struct base_error *err)
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

static int tensor_set_holding(struct save_flight *f, const struct save_tensor *t, struct saver_tensor *to,
	struct base_error *err)
{
	static const struct tensor_placement replicate[TENSOR_MAX_DIMS];
	struct tensor_sharding *s = &to->plan.sharding;
	const struct tensor_placements *words = NULL;
	int r = 0;

	*s = (struct tensor_sharding){.shape = t->shape, .item_bytes = tensor_dtype_bytes(t->dtype),
		.placement = replicate};
	if (t->alone)
		return t->mesh || t->placements || t->same_dims || t->has_boxes || t->flat
			? base_error_set(err, -EINVAL,
				"one rank alone holds it, whole: mesh, placements, same_dims, flat and boxes cannot be "
				"given") : 0;
	s->mesh = flight_mesh(f, t->mesh, err);
	if (!s->mesh)
		return -ENOMEM;
	if (t->has_boxes && (t->placements || t->flat))
		return base_error_set(err, -EINVAL, "boxes exclude placements and a flat range");
	if (t->placements)
		r = flight_placements(f, t->placements, &words, err);
	if (r == 0 && words)
		s->placement = words->at;
	if (r == 0)
		r = tensor_sharding_check(s, words ? words->n : s->mesh->ndim, err);
	if (r == 0 && t->same_dims && t->same_dims[0])
		r = tensor_mesh_dims(s->mesh, t->same_dims, &to->plan.same_dims, err);
	return r;
}

static int tensor_set_boxes(struct save_flight *f, const struct save_tensor *t, struct saver_tensor *to,
	struct base_error *err)
{
	uint64_t items = 0, pairs = (uint64_t)t->nboxes * t->shape.ndim * 2;
	struct tensor_boxes *b = flight_room(f, sizeof *b);
	struct tensor_box box;
	int r;

	if (!b)
		return base_no_memory(err);
	if ((t->nboxes && t->shape.ndim && !t->boxes) || pairs > SIZE_MAX / 8)
		return base_error_set(err, -EINVAL, "its boxes are missing");
	*b = (struct tensor_boxes){.ndim = t->shape.ndim, .n = t->nboxes, .room = t->nboxes};
	b->pairs = flight_copy(f, t->boxes, pairs * sizeof *t->boxes);
	if (!b->pairs)
		return base_no_memory(err);
	r = tensor_shard_list_check(&t->shape, b, err);
	for (size_t i = 0; r == 0 && i < b->n; i++) {
		tensor_boxes_get(b, i, &box);
		items += tensor_box_items(&t->shape, &box);
	}
	to->plan.boxes = b;
	to->boxes = true;
	to->local = (struct tensor_shape){.ndim = 1, .dim = {items}};
	return r;
}

static int tensor_set_local(const struct save_tensor *t, struct save_flight *f, struct saver_tensor *to,
	struct base_error *err)
{
	struct tensor_shard shard = {.local_shape = t->shape};
	struct tensor_flat *flat;
	int r = 0;

	if (t->has_boxes)
		return tensor_set_boxes(f, t, to, err);
	if (t->flat) {
		flat = flight_copy(f, t->flat, sizeof *flat);
		if (!flat)
			return base_no_memory(err);
		to->plan.flat = flat;
	}
	if (to->plan.sharding.mesh)
		r = tensor_shard_of(&to->plan.sharding, f->s->options.rank, to->plan.flat, &shard, err);
	if (r == 0 && shard.absent)
		shard.local_shape = (struct tensor_shape){.ndim = 1};
	to->local = shard.local_shape;
	return r;
}

static int tensor_check_local(const struct save_tensor *t, const struct save_flight *f, struct saver_tensor *to,
	struct base_error *err)
{
	uint64_t items;
	int r = tensor_shape_items(&to->local, tensor_dtype_bytes(t->dtype), &items);

	if (r < 0)
		return base_error_set(err, r, "its local shape: %s", base_error_name(r));
	if (items)
		r = tensor_shard_check_local(&to->local, f->s->options.rank, t->local_ndim, t->local_shape, t->strides,
			err);
	if (r < 0)
		return r;
	if (items && !t->data)
		return base_error_set(err, -EINVAL, "its data is a null pointer");
	return 0;
}

static bool tensor_shape_is_empty(const struct tensor_shape *s)
{
	uint32_t d = 0;

	while (d < s->ndim && s->dim[d])
		d++;
	return d < s->ndim;
}

static bool tensor_is_contiguous(const struct save_tensor *t, const struct saver_tensor *to)
{
	uint64_t bytes = tensor_dtype_bytes(t->dtype);

	if (tensor_shape_is_empty(&to->local))
		return true;
	for (uint32_t d = to->local.ndim; t->strides && d-- > 0;) {
		if (to->local.dim[d] > 1 && t->strides[d] != (int64_t)bytes)
			return false;
		bytes *= to->local.dim[d];
	}
	return true;
}

static int flight_fill(struct save_flight *f, const struct save_tensor *t, struct saver_tensor *to,
	struct base_error *err)
{
	const struct proto_store *info = &f->s->store->info;
	const char *before = f->ntensors ? to[-1].component : NULL; /* tensors of one component come together */
	size_t len = strlen(t->name);
	int r;

	*to = (struct saver_tensor){.name = flight_copy(f, t->name, len + 1), .name_len = (uint32_t)len,
		.dtype = t->dtype, .data = t->data, .device = t->device};
	to->component = before && strcmp(before, t->component) == 0 ? before
		: flight_copy(f, t->component, strlen(t->component) + 1);
	if (!to->name || !to->component)
		return base_no_memory(err);
	to->plan.params = info->grid;
	to->plan.buffer = t->buffer;
	to->plan.whole = tensor_dtype_is_integer(t->dtype);
	r = tensor_set_holding(f, t, to, err);
	if (r == 0)
		r = tensor_set_local(t, f, to, err);
	if (r == 0)
		r = tensor_check_local(t, f, to, err);
	if (r < 0 || tensor_is_contiguous(t, to)) /* or without items */
		return r;
	to->strides = flight_copy(f, t->strides, to->local.ndim * sizeof *t->strides);
	return to->strides ? 0 : base_no_memory(err);
}

/* A name may be given again only with more boxes of the same tensor; anything else is a mistake. */
static int tensor_check_again(const struct saver_tensor *first, const struct saver_tensor *t, struct base_error *err)
{
	if (!first->boxes || !t->boxes || t->plan.same_dims || first->plan.same_dims)
		return base_error_set(err, -EEXIST, "it is given twice");
	if (first->dtype != t->dtype || !tensor_shape_equal(&first->plan.sharding.shape, &t->plan.sharding.shape))
		return base_error_set(err, -EINVAL, "its boxes are given twice, with another shape or dtype");
	return 0;
}

int save_flight_tensor(struct save_flight *f, const struct save_tensor *t, struct base_error *err)
{
	const struct saver_tensor *first;
	struct saver_tensor *to;
	uint32_t hash;
	int r = flight_is_open(f, err);

	if (r == 0 && f->ntensors == FLIGHT_TENSORS_MAX)
		r = base_error_set(err, -EINVAL, "the save of %s has %u tensors, and no more are possible",
			saver_name(f).text, FLIGHT_TENSORS_MAX);
	if (r == 0)
		r = tensor_check_names(t, err);
	if (r == 0 && (base_array_room(f->tensors, f->tensors_room, f->ntensors + 1) < 0
			|| base_table_reserve(&f->by_name, 1) < 0))
		r = base_no_memory(err);
	if (r < 0)
		return r;
	to = &f->tensors[f->ntensors];
	r = flight_fill(f, t, to, err);
	hash = r == 0 ? flight_hash(to) : 0;
	first = r == 0 ? flight_find(f, to, hash) : NULL;
	if (first)
		r = tensor_check_again(first, to, err);
	if (r < 0)
		return base_error_prefix(err, r, "tensor %s/%.*s", t->component,
			store_layout_shown(t->name, strlen(t->name)), t->name);
	if (first && tensor_shape_is_empty(&t->shape))
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
		uint32_t hash = flight_hash(&f->tensors[i]);

		if (!flight_find(f, &f->tensors[i], hash))
			base_table_add(&f->by_name, hash, i);
	}
}

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
	int r = flight_is_open(f, err);

	if (r < 0)
		return r;
	if (!name)
		return base_error_set(err, -EINVAL, "a blob of the save of %s has no name", saver_name(f).text);
	if (len && !bytes)
		return base_error_set(err, -EINVAL, "blob %.400s: a null pointer is given for its %zu bytes", name,
			len);
	if (save_writer_has_blob(f->w, name, per_rank))
		return base_error_set(err, -EEXIST, "blob %.400s is given twice", name);
	b = flight_room(f, sizeof *b);
	if (b)
		*b = (struct saver_blob){flight_copy(f, bytes, len), len};
	if (!b || !b->bytes)
		return base_no_memory(err);
	return save_writer_blob(f->w, name, per_rank, len, (struct save_source){blob_read_memory, b}, err);
}

int save_flight_common(struct save_flight *f, const char *group, const char *name, const void *bytes, size_t len,
	struct base_error *err)
{
	int r = flight_is_open(f, err);

	if (r < 0)
		return r;
	if (len && !bytes)
		return base_error_set(err, -EINVAL, "value \"%.200s\" of the group \"%.200s\": a null pointer is given "
			"for its %zu bytes", name ? name : "", group ? group : "", len);
	return store_commons_add(&f->commons, group, name, bytes, len, err);
}

/* ---- submitting and waiting ---- */

int save_flight_submit(struct save_flight *f, struct base_error *err)
{
	struct save_saver *s = f->s;
	int r = saver_check(s, err);

	if (r < 0)
		return r;
	if (f->submitted)
		return base_error_set(err, -EINVAL, "the save of %s was submitted before", saver_name(f).text);
	r = store_commons_finish(&f->commons, err);
	if (r < 0)
		return r;
	r = f->device ? saver_fence_make(f, err) : 0;
	if (r < 0)
		return r;
	pthread_mutex_lock(&s->lock);
	if (f->given_up) {
		r = base_error_set(err, -ESHUTDOWN, "the saver of run %s was closed before this save was submitted",
			s->run);
	} else {
		f->submitted = true;
		f->state = SAVE_QUEUED;
		f->info.submitted_ns = base_realtime_ns();
		pthread_cond_broadcast(&s->work);
		pthread_cond_signal(&s->ready);
	}
	pthread_mutex_unlock(&s->lock);
	return r;
}

/* A caller has now seen the flight's error, so close does not return it again. The lock is held. */
static void flight_was_told(struct save_flight *f)
{
	struct save_flight **at = &f->s->untold;

	f->told = true;
	while (*at && *at != f)
		at = &(*at)->next;
	if (*at)
		*at = f->next;
}

/* Keeps a failed flight whose error no caller has seen, so that close can report it. Once its handle is freed, only the
 * earliest such error is kept. */
static void flight_keep_untold(struct save_flight *f)
{
	struct save_saver *s = f->s;
	struct save_flight **at = &s->untold;

	if (!f->failed || f->told || f->given_up)
		return;
	if (f->refs) {
		while (*at)
			at = &(*at)->next;
		f->next = NULL;
		*at = f;
		return;
	}
	if (!s->first_r || f->number < s->first_failed) {
		s->first_r = f->r;
		s->first_err = f->err;
		s->first_failed = f->number;
	}
	flight_was_told(f);
}

/* Drops the reference and updates `untold` under one hold of the lock. Between two holds the other holder would think
 * that this one is still there, leave the flight in the list for it, and never look again. */
bool saver_flight_drop(struct save_flight *f)
{
	f->refs--;
	if (f->over)
		flight_keep_untold(f);
	return f->refs == 0;
}

/* Waits on `told` until the clock says so. false: the time is over. */
static bool flight_wait(struct save_flight *f, int64_t timeout_ms, const struct timespec *end)
{
	if (timeout_ms < 0)
		return pthread_cond_wait(&f->s->told, &f->s->lock) == 0;
	return pthread_cond_timedwait(&f->s->told, &f->s->lock, end) == 0;
}

static int flight_tell(struct save_flight *f, struct base_error *err)
{
	flight_was_told(f);
	if (err)
		*err = f->err;
	return f->r;
}

/* Takes the lock; the caller lets it go, whatever comes out. */
static int flight_wait_begin(struct save_flight *f, struct base_error *err)
{
	pthread_mutex_lock(&f->s->lock);
	return f->submitted ? 0 : base_error_set(err, -EINVAL,
		"the save of %s was not submitted: there is nothing to wait for before vckpt_save_submit",
		saver_name(f).text);
}

int save_flight_wait_staged(struct save_flight *f, int64_t timeout_ms, struct base_error *err)
{
	struct timespec end = base_clock_in_ms(CLOCK_MONOTONIC, timeout_ms);
	int r = saver_check(f->s, err);

	if (r < 0)
		return r;
	r = flight_wait_begin(f, err);
	while (r == 0 && !f->staged && !(f->failed && f->copying == 0 && f->s->preparing != f))
		if (!flight_wait(f, timeout_ms, &end))
			r = base_error_set(err, -ETIMEDOUT, "the save of %s is not staged yet", saver_name(f).text);
	if (r == 0 && !f->staged)
		r = flight_tell(f, err);
	pthread_mutex_unlock(&f->s->lock);
	return r;
}

int save_flight_wait_committed(struct save_flight *f, int64_t timeout_ms, uint64_t *ret_step, uint64_t *ret_entry,
	struct base_error *err)
{
	struct timespec end = base_clock_in_ms(CLOCK_MONOTONIC, timeout_ms);
	int r = saver_check(f->s, err);

	if (r < 0)
		return r;
	r = flight_wait_begin(f, err);
	while (r == 0 && !f->over)
		if (!flight_wait(f, timeout_ms, &end))
			r = base_error_set(err, -ETIMEDOUT, "the save of %s is not decided yet", saver_name(f).text);
	if (r == 0 && f->state == SAVE_FAILED)
		r = flight_tell(f, err);
	if (r == 0) {
		if (ret_step)
			*ret_step = f->step;
		if (ret_entry)
			*ret_entry = f->entry;
	}
	pthread_mutex_unlock(&f->s->lock);
	return r;
}

int save_flight_info(struct save_flight *f, struct save_flight_info *ret_info)
{
	struct save_plan_cache_stats plans;

	if (save_saver_is_child(f->s))
		return -BASE_EFORKED;
	save_plan_cache_stats(f->s->plans, &plans);
	pthread_mutex_lock(&f->s->lock);
	*ret_info = f->info;
	ret_info->state = f->state;
	ret_info->error = f->state == SAVE_FAILED ? f->r : 0;
	ret_info->plan_hits = plans.hits;
	ret_info->plan_misses = plans.misses;
	pthread_mutex_unlock(&f->s->lock);
	return 0;
}

void save_flight_give_up(struct save_flight *f, const char *reason)
{
	if (save_saver_is_child(f->s))
		return;
	pthread_mutex_lock(&f->s->lock);
	if (!f->submitted && !f->given_up && !f->failed) {
		f->failed = true;
		f->r = base_error_set(&f->err, -BASE_EABORTED, "its caller gave it up before it was submitted: %.800s",
			reason);
	}
	pthread_mutex_unlock(&f->s->lock);
}

void save_flight_free(struct save_flight *f)
{
	struct save_saver *s;
	bool last;

	if (!f || save_saver_is_child(f->s))
		return;
	s = f->s;
	pthread_mutex_lock(&s->lock);
	if (!f->submitted && !f->given_up) {
		f->given_up = true;
		pthread_cond_signal(&s->ready);
		pthread_cond_broadcast(&s->work); /* those behind it may be staged now */
	}
	last = saver_flight_drop(f);
	pthread_mutex_unlock(&s->lock);
	if (last)
		saver_flight_release(f);
}
