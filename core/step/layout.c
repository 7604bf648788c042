/* SPDX-License-Identifier: Apache-2.0
 *
 * layout: names, dtypes and shapes of a set of tensors, as one content-addressed object.
 *
 * Its bytes are a function of the set alone: the builder sorts by (component, name), numbers components in that order,
 * and lays names and dimensions out in the order of the tensors (proto/layout.c refuses anything else). So every save
 * of a run stores the same object until the model changes, and the digest says whether two steps have the same
 * tensors. */
#include "core/base/array.h"
#include "core/base/bisect.h"
#include "core/pack/pack.h"
#include "core/step/layout_internal.h"
#include "core/step/record.h"

#include <string.h>

struct layout_item {
	uint32_t component;             /* as added; renumbered when finished */
	uint32_t name_offset, name_len;
	uint32_t first_dim, tag;
	uint32_t mesh, placement;       /* 1 + number as added; 0: none */
	uint8_t dtype, ndim;
	bool buffer;
};

struct store_layout_builder {
	struct tensor_grid_params params;
	struct layout_item *items; uint32_t nitems, items_room;
	char **components; uint32_t ncomponents;
	struct base_buf names, dims;    /* dims: native u64 each */
	struct layout_held held;
};

struct store_layout_builder *store_layout_builder_new(struct tensor_grid_params params)
{
	struct store_layout_builder *b = calloc(1, sizeof *b);

	if (b)
		b->params = params;
	return b;
}

void store_layout_builder_free(struct store_layout_builder *b)
{
	if (!b)
		return;
	for (uint32_t i = 0; i < b->ncomponents; i++)
		free(b->components[i]);
	free(b->components);
	free(b->items);
	base_buf_release(&b->names);
	base_buf_release(&b->dims);
	layout_held_release(&b->held);
	free(b);
}

int store_layout_builder_reserve(struct store_layout_builder *b, uint32_t ntensors, size_t name_bytes)
{
	size_t dim_bytes = 2 * sizeof(uint64_t) * ntensors; /* most have two */

	if (ntensors > PROTO_LAYOUT_MAX_TENSORS)
		return 0; /* adding them fails */
	if (base_array_room(b->items, b->items_room, ntensors) < 0)
		return -ENOMEM;
	if (base_buf_extend(&b->names, name_bytes))
		b->names.len -= name_bytes;
	if (base_buf_extend(&b->dims, dim_bytes))
		b->dims.len -= dim_bytes;
	return b->names.error ? b->names.error : b->dims.error;
}

static int64_t builder_component_find(const struct store_layout_builder *b, const char *component)
{
	for (uint32_t i = b->ncomponents; i-- > 0;) /* tensors of one component come together */
		if (strcmp(b->components[i], component) == 0)
			return i;
	return -ENOENT;
}

static int64_t builder_component_add(struct store_layout_builder *b, const char *component)
{
	if (base_array_more(b->components, b->ncomponents) < 0)
		return -ENOMEM;
	b->components[b->ncomponents] = strdup(component);
	return b->components[b->ncomponents] ? (int64_t)b->ncomponents++ : -ENOMEM;
}

/* known: a tensor of this component was added before. */
static int builder_check(const struct store_layout_builder *b, const char *component, bool known, const char *name,
	size_t name_len, enum tensor_dtype dtype, const struct tensor_shape *shape, struct base_error *err)
{
	uint64_t items;
	int shown, r;

	if (!known && !proto_component_valid(component))
		return base_error_set(err, -EINVAL, "\"%.100s\" cannot be the name of a component", component);
	if (name_len == 0 || name_len > PROTO_NAME_MAX || !proto_utf8_valid(name, name_len))
		return base_error_set(err, -EINVAL,
			"the name of a tensor of %s is not 1 to %u bytes of UTF-8 without NUL", component,
			PROTO_NAME_MAX);
	shown = store_layout_shown(name, name_len);
	if (!tensor_dtype_valid(dtype))
		return base_error_set(err, -EINVAL, "tensor \"%.*s\": unknown dtype %u", shown, name, (unsigned)dtype);
	r = tensor_shape_items(shape, tensor_dtype_bytes(dtype), &items);
	if (r < 0)
		return base_error_set(err, -EINVAL, "tensor \"%.*s\": its shape has too many dimensions or bytes",
			shown, name);
	if (b->nitems >= PROTO_LAYOUT_MAX_TENSORS || b->names.len + name_len > STORE_METADATA_MAX_BYTES)
		return base_error_set(err, -BASE_ELIMIT, "more than %u tensors, or 1 GiB of names",
			PROTO_LAYOUT_MAX_TENSORS);
	return 0;
}

int store_layout_builder_add(struct store_layout_builder *b, const char *component, const char *name, size_t name_len,
	enum tensor_dtype dtype, const struct tensor_shape *shape, uint32_t tag, struct base_error *err)
{
	return store_layout_builder_add_held(b, component, name, name_len, dtype, shape, tag, NULL, err);
}

int store_layout_builder_add_held(struct store_layout_builder *b, const char *component, const char *name,
	size_t name_len, enum tensor_dtype dtype, const struct tensor_shape *shape, uint32_t tag,
	const struct store_layout_held *held, struct base_error *err)
{
	int64_t number = builder_component_find(b, component);
	int r = builder_check(b, component, number >= 0, name, name_len, dtype, shape, err);
	uint32_t mesh, placement;

	if (r < 0)
		return r;
	if (number < 0)
		number = builder_component_add(b, component);
	if (number < 0)
		return base_no_memory(err);
	r = layout_held_add(&b->held, held, &mesh, &placement, err);
	if (r < 0)
		return base_error_prefix(err, r, "tensor \"%.*s\"", store_layout_shown(name, name_len), name);
	if (base_array_room(b->items, b->items_room, b->nitems + 1) < 0)
		return base_no_memory(err);
	b->items[b->nitems] = (struct layout_item){(uint32_t)number, (uint32_t)b->names.len, (uint32_t)name_len,
		(uint32_t)(b->dims.len / 8), tag, mesh, placement, (uint8_t)dtype, (uint8_t)shape->ndim,
		held && held->buffer};
	base_buf_append(&b->names, name, name_len);
	base_buf_append(&b->dims, shape->dim, shape->ndim * sizeof shape->dim[0]);
	if (b->names.error || b->dims.error)
		return base_no_memory(err);
	b->nitems++;
	return 0;
}

static int name_order(const char *a, size_t a_len, const char *b, size_t b_len)
{
	int c = memcmp(a, b, base_min(a_len, b_len));

	return c ? c : (a_len > b_len) - (a_len < b_len);
}

static int item_order(const void *pa, const void *pb, void *arg)
{
	const struct store_layout_builder *b = arg;
	const struct layout_item *x = pa, *y = pb;

	if (x->component != y->component)
		return strcmp(b->components[x->component], b->components[y->component]);
	return name_order((char *)b->names.data + x->name_offset, x->name_len, (char *)b->names.data + y->name_offset,
		y->name_len);
}

static int builder_twice(const struct store_layout_builder *b, struct base_error *err)
{
	for (uint32_t i = 1; i < b->nitems; i++) {
		const struct layout_item *x = &b->items[i];

		if (item_order(x - 1, x, (void *)b) == 0)
			return base_error_set(err, -EEXIST, "tensor \"%.*s\" of %s is there twice",
				store_layout_shown((char *)b->names.data + x->name_offset, x->name_len),
				(char *)b->names.data + x->name_offset, b->components[x->component]);
	}
	return 0;
}

static bool items_sorted(const struct store_layout_builder *b)
{
	for (uint32_t i = 1; i < b->nitems; i++)
		if (item_order(&b->items[i - 1], &b->items[i], (void *)b) >= 0)
			return false;
	return true;
}

static void made_free(struct layout_made *made)
{
	if (!made)
		return;
	for (uint32_t i = 0; i < made->ncomponents; i++)
		free(made->components[i]);
	free(made->components);
	free(made->sorted);
	free(made->tensors);
	base_buf_release(&made->names);
	base_buf_release(&made->dims);
	layout_held_tables_release(&made->held);
	free(made);
}

BASE_CLEANUP_DEFINE(struct layout_made *, made_free)

/* Names and dimensions in the order of the sorted items; if they were added in that order, they are taken over. */
static void made_texts(struct store_layout_builder *b, bool in_order, struct layout_made *made)
{
	struct base_buf names = BASE_BUF_INIT, dims = BASE_BUF_INIT;

	for (uint32_t i = 0; !in_order && i < b->nitems; i++) {
		const struct layout_item *x = &b->items[i];

		base_buf_append(&names, b->names.data + x->name_offset, x->name_len);
		base_buf_append(&dims, b->dims.data ? b->dims.data + 8 * (size_t)x->first_dim : NULL,
			8 * (size_t)x->ndim);
	}
	made->names = in_order ? b->names : names;
	made->dims = in_order ? b->dims : dims;
	if (in_order)
		b->names = b->dims = (struct base_buf)BASE_BUF_INIT;
	made->components = base_steal(b->components);
	made->ncomponents = b->ncomponents;
	b->ncomponents = 0;
}

/* The rows of the sorted items; there is room for them, for the components and the tags. */
static void made_rows(const struct store_layout_builder *b, struct layout_made *made, struct proto_layout *m,
	uint32_t *tags)
{
	uint32_t name_at = 0, dim_at = 0;

	for (uint32_t i = 0; i < b->nitems; i++) {
		const struct layout_item *x = &b->items[i];

		if (i == 0 || x->component != b->items[i - 1].component)
			made->sorted[m->ncomponents++] = made->components[x->component];
		made->tensors[i] = (struct proto_layout_tensor){.component = m->ncomponents - 1,
			.name_offset = name_at,
			.name_len = x->name_len,
			.first_dim = dim_at,
			.dtype = x->dtype,
			.ndim = x->ndim,
			.flags = x->buffer,
			.mesh = x->mesh ? made->held.mesh_at[x->mesh - 1] : 0,
			.placement = x->placement ? made->held.words_at[x->placement - 1] : 0};
		tags[i] = x->tag;
		name_at += x->name_len;
		dim_at += x->ndim;
	}
	m->grid = b->params;
	m->components = made->sorted;
	m->tensors = made->tensors;
	m->ntensors = b->nitems;
	m->names = (const char *)made->names.data;
	m->names_len = made->names.len;
	m->dims = (const uint64_t *)made->dims.data;
	m->ndims = made->dims.len / 8;
	m->meshes = made->held.meshes;
	m->nmeshes = b->held.nmeshes;
	m->placements = (const char *const *)made->held.placements;
	m->nplacements = made->held.nplacements;
}

int store_layout_builder_tables(struct store_layout_builder *b, struct store_layout **ret_l, uint32_t **ret_tags,
	struct base_error *err)
{
	base_cleanup(made_free_p) struct layout_made *made = calloc(1, sizeof *made);
	base_cleanup_free uint32_t *tags = calloc((size_t)b->nitems + 1, sizeof *tags);
	bool in_order = items_sorted(b);
	struct store_layout *l;
	int r;

	if (!made || !tags)
		return base_no_memory(err);
	made->sorted = calloc((size_t)b->ncomponents + 1, sizeof *made->sorted);
	made->tensors = malloc(((size_t)b->nitems + 1) * sizeof *made->tensors);
	if (!made->sorted || !made->tensors)
		return base_no_memory(err);
	if (!in_order)
		qsort_r(b->items, b->nitems, sizeof *b->items, item_order, b);
	r = in_order ? 0 : builder_twice(b, err);
	if (r == 0)
		r = layout_held_finish(&b->held, &made->held, err);
	if (r < 0)
		return r;
	made_texts(b, in_order, made);
	l = made->names.error || made->dims.error ? NULL : calloc(1, sizeof *l);
	if (!l)
		return base_no_memory(err);
	made_rows(b, made, &l->m, tags);
	l->made = base_steal(made);
	*ret_l = l;
	*ret_tags = base_steal(tags);
	return 0;
}

int store_layout_encode(struct store_layout *l, struct base_buf *ret_object, struct base_error *err)
{
	size_t before = ret_object->len;
	int r = proto_layout_encode(&l->m, ret_object);

	if (r < 0)
		return base_error_set(err, r, "the layout cannot be encoded: %s", base_error_name(r));
	if (ret_object->len - before > STORE_METADATA_MAX_BYTES)
		return base_error_set(err, -BASE_ELIMIT,
			"%u tensors with %llu bytes of names are more than one layout may hold, which is 1 GiB",
			l->m.ntensors, (unsigned long long)l->m.names_len);
	base_digest_of(ret_object->data + before, ret_object->len - before, &l->digest);
	return 0;
}

int store_layout_builder_finish(struct store_layout_builder *b, struct store_layout **ret_l,
	struct base_buf *ret_object, uint32_t **ret_tags, struct base_error *err)
{
	struct store_layout *l;
	int r = store_layout_builder_tables(b, &l, ret_tags, err);

	if (r < 0)
		return r;
	r = store_layout_encode(l, ret_object, err);
	if (r < 0) {
		store_layout_free(l);
		free(base_steal(*ret_tags));
		return r;
	}
	*ret_l = l;
	return 0;
}

int store_layout_decode(const void *object, size_t len, struct store_layout **ret_l, struct base_error *err)
{
	struct base_digest digest;

	base_digest_of(object, len, &digest);
	return store_layout_decode_known(object, len, &digest, ret_l, err);
}

int store_layout_decode_known(const void *object, size_t len, const struct base_digest *digest,
	struct store_layout **ret_l, struct base_error *err)
{
	struct store_layout *l = calloc(1, sizeof *l);
	int r = l ? proto_layout_decode(object, len, &l->m) : -ENOMEM;

	if (r < 0)
		free(l);
	if (r == -BASE_EVERSION)
		return store_newer(err, "the layout", object, len);
	if (r < 0)
		return base_error_set(err, r, "a layout cannot be read: %s", base_error_name(r));
	l->digest = *digest;
	*ret_l = l;
	return 0;
}

void store_layout_free(struct store_layout *l)
{
	if (!l)
		return;
	proto_layout_release(&l->m);
	made_free(l->made);
	free(l);
}

/* First tensor whose component is not below `component`. */
static uint32_t component_first(const struct store_layout *l, uint32_t component)
{
	return base_bisect(i, 0, l->m.ntensors, l->m.tensors[i].component < component);
}

void store_layout_component_range(const struct store_layout *l, uint32_t component, uint32_t *ret_first,
	uint32_t *ret_end)
{
	*ret_first = component_first(l, component);
	*ret_end = component_first(l, component + 1);
}

static int64_t component_find(const struct store_layout *l, const char *component)
{
	return base_search(i, 0, l->m.ncomponents, strcmp(l->m.components[i], component));
}

int64_t store_layout_find(const struct store_layout *l, const char *component, const char *name, size_t name_len)
{
	int64_t number = component_find(l, component);
	uint32_t low, high;

	if (number < 0)
		return number;
	store_layout_component_range(l, (uint32_t)number, &low, &high);
	return base_search(i, low, high, name_order(l->m.names + l->m.tensors[i].name_offset, l->m.tensors[i].name_len,
		name, name_len));
}

const char *store_layout_component(const struct store_layout *l, uint32_t tensor)
{
	return l->m.components[l->m.tensors[tensor].component];
}

const char *store_layout_name(const struct store_layout *l, uint32_t tensor, uint32_t *ret_len)
{
	*ret_len = l->m.tensors[tensor].name_len;
	return l->m.names + l->m.tensors[tensor].name_offset;
}

int store_layout_shown(const char *name, size_t name_len)
{
	size_t n = base_min(name_len, 200);

	while (n > 0 && n < name_len && ((uint8_t)name[n] & 0xc0) == 0x80)
		n--;
	return (int)n;
}

enum tensor_dtype store_layout_dtype(const struct store_layout *l, uint32_t tensor)
{
	return (enum tensor_dtype)l->m.tensors[tensor].dtype;
}

void store_layout_shape(const struct store_layout *l, uint32_t tensor, struct tensor_shape *ret_shape)
{
	const struct proto_layout_tensor *t = &l->m.tensors[tensor];

	memset(ret_shape, 0, sizeof *ret_shape);
	ret_shape->ndim = t->ndim;
	if (t->ndim)
		memcpy(ret_shape->dim, l->m.dims + t->first_dim, t->ndim * sizeof *l->m.dims);
}

uint64_t store_layout_bytes(const struct store_layout *l, uint32_t tensor)
{
	unsigned item = tensor_dtype_bytes(store_layout_dtype(l, tensor));
	struct tensor_shape shape;
	uint64_t items = 0;

	store_layout_shape(l, tensor, &shape);
	tensor_shape_items(&shape, item, &items); /* checked when the layout was decoded */
	return items * item;
}

void store_layout_grid(const struct store_layout *l, uint32_t tensor, struct tensor_grid *ret_grid)
{
	struct tensor_shape shape;

	store_layout_shape(l, tensor, &shape);
	tensor_grid_init(ret_grid, &shape, tensor_dtype_bytes(store_layout_dtype(l, tensor)), l->m.grid);
}
