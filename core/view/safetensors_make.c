/* SPDX-License-Identifier: Apache-2.0
 *
 * The order of the data aligns every tensor: first come those whose size is a multiple of 4096, which keep each other's
 * offsets at multiples of 4096, and then the others by falling element size (powers of two), so that each offset is a
 * multiple of the next size.
 *
 * A header is made of one layout before a save, or of a step, where a component may have its tensors in several layouts
 * (pipeline stages). Both go through `struct source`, and for one layout they give the same bytes. */
#include "core/view/view_internal.h"

#include <inttypes.h>

#define DATA_ALIGN 4096u

struct item { uint32_t tensor, element_bytes; bool unaligned; };

/* Tensors [first, end) of a layout, or of a step: sorted by name. mesh: what `rank` of it holds of them. */
struct source {
	const struct store_layout *layout;
	const struct load_step *step;
	const struct view_mesh *mesh; uint32_t rank;
	uint32_t first, end;
};

bool view_safetensors_can(enum tensor_dtype dtype, const struct tensor_shape *shape, const char *name,
	uint32_t name_len)
{
	size_t reserved = strlen(VIEW_SAFETENSORS_METADATA);
	if (!tensor_dtype_safetensors(dtype) ||
	    (name_len == reserved && memcmp(name, VIEW_SAFETENSORS_METADATA, reserved) == 0))
		return false;
	return dtype != TENSOR_F4_E2M1FN_X2 || shape->ndim > 0; /* a scalar of two elements has no shape in elements */
}

/* false: the tensor is in no file of the mesh. */
static bool source_tensor(const struct source *s, uint32_t tensor, struct load_tensor_info *ret_info)
{
	if (s->mesh)
		return view_mesh_info(s->mesh, s->step, tensor, s->rank, ret_info);
	if (s->step) {
		load_step_tensor_info(s->step, tensor, ret_info);
		return true;
	}
	*ret_info = (struct load_tensor_info){.dtype = store_layout_dtype(s->layout, tensor),
		.bytes = store_layout_bytes(s->layout, tensor)};
	ret_info->name = store_layout_name(s->layout, tensor, &ret_info->name_len);
	store_layout_shape(s->layout, tensor, &ret_info->shape);
	return true;
}

static void put_pair(struct base_buf *b, const char *key, const char *value, bool *comma)
{
	if (*comma)
		base_buf_append(b, ",", 1);
	*comma = true;
	view_json_string(b, key, strlen(key));
	base_buf_append(b, ":", 1);
	view_json_string(b, value, strlen(value));
}

/* `format: pt` (transformers refuses files without it) comes at its place among the sorted keys, unless the metadata
 * has a `format` of its own. */
static void put_metadata(struct base_buf *b, const struct proto_attribute *metadata, uint32_t n)
{
	bool comma = false, format = false;
	base_buf_append_text(b, "{\"" VIEW_SAFETENSORS_METADATA "\":{");
	for (uint32_t i = 0; i < n; i++) {
		int order = strcmp(metadata[i].key, "format");
		if (order > 0 && !format)
			put_pair(b, "format", "pt", &comma);
		format = format || order >= 0;
		put_pair(b, metadata[i].key, metadata[i].value, &comma);
	}
	if (!format)
		put_pair(b, "format", "pt", &comma);
	base_buf_append(b, "}", 1);
}

static void put_tensor(struct base_buf *b, const struct load_tensor_info *t, uint64_t begin, uint64_t end)
{
	base_buf_append(b, ",", 1);
	view_json_string(b, t->name, t->name_len);
	base_buf_append_text(b, ":{\"dtype\":\"");
	base_buf_append_text(b, tensor_dtype_safetensors(t->dtype));
	base_buf_append_text(b, "\",\"shape\":[");
	for (uint32_t d = 0; d < t->shape.ndim; d++) {
		bool pairs = t->dtype == TENSOR_F4_E2M1FN_X2 && d + 1 == t->shape.ndim;
		if (d)
			base_buf_append(b, ",", 1);
		view_json_number(b, pairs ? t->shape.dim[d] * 2 : t->shape.dim[d]);
	}
	base_buf_append_text(b, "],\"data_offsets\":[");
	view_json_number(b, begin);
	base_buf_append(b, ",", 1);
	view_json_number(b, end);
	base_buf_append_text(b, "]}");
}

static int by_order(const void *pa, const void *pb)
{
	const struct item *a = pa, *b = pb;
	if (a->unaligned != b->unaligned)
		return a->unaligned ? 1 : -1;
	if (a->element_bytes != b->element_bytes)
		return a->element_bytes > b->element_bytes ? -1 : 1;
	return a->tensor < b->tensor ? -1 : 1; /* sources are sorted by name */
}

static size_t collect(const struct source *s, struct item *items)
{
	size_t n = 0;
	for (uint32_t i = s->first; i < s->end; i++) {
		struct load_tensor_info t;
		if (source_tensor(s, i, &t) && view_safetensors_can(t.dtype, &t.shape, t.name, t.name_len))
			items[n++] = (struct item){i, tensor_dtype_bytes(t.dtype), t.bytes % DATA_ALIGN != 0};
	}
	qsort(items, n, sizeof *items, by_order);
	return n;
}

static int put_tensors(struct view_text *m, const struct source *s, uint64_t *ret_data_bytes)
{
	base_cleanup_free struct item *items = malloc((s->end - s->first) * sizeof *items + 1);
	uint64_t at = 0, next;
	size_t n;

	if (!items)
		return -ENOMEM;
	n = collect(s, items);
	for (size_t i = 0; i < n; i++, at = next) {
		struct load_tensor_info t;
		source_tensor(s, items[i].tensor, &t);
		if (base_add_overflows(at, t.bytes, &next) || view_text_flush(m) > VIEW_SAFETENSORS_MAX_MADE)
			return -EFBIG;
		put_tensor(&m->b, &t, at, next);
	}
	*ret_data_bytes = at;
	return 0;
}

/* Makes the header, padded with spaces. */
static int make(struct view_text *m, const struct source *s, const struct proto_attribute *metadata, uint32_t nmetadata,
	uint64_t *ret_data_bytes)
{
	int r;
	uint64_t len, padded;
	void *spaces;

	base_buf_put64(&m->b, 0);
	put_metadata(&m->b, metadata, nmetadata);
	r = put_tensors(m, s, ret_data_bytes);
	if (r < 0)
		return r;
	base_buf_append(&m->b, "}", 1);
	len = view_text_flush(m);
	padded = base_align(len, DATA_ALIGN);
	if (padded - 8 > VIEW_SAFETENSORS_MAX_MADE)
		return -EFBIG;
	spaces = base_buf_extend(&m->b, padded - len);
	if (m->b.error)
		return m->b.error;
	memset(spaces, ' ', padded - len);
	if (m->keep)
		base_put64(m->b.data, padded - 8);
	return 0;
}

int view_safetensors_make(const struct store_layout *l, uint32_t component, const struct proto_attribute *metadata,
	uint32_t nmetadata,
	struct base_buf *ret_header, uint64_t *ret_data_bytes)
{
	struct view_text m = {.keep = true};
	struct source s = {.layout = l};
	uint64_t len;
	store_layout_component_range(l, component, &s.first, &s.end);
	return view_text_end(&m, make(&m, &s, metadata, nmetadata, ret_data_bytes), ret_header, &len);
}

int view_safetensors_make_step(const struct load_step *step, const struct view_mesh *mesh, uint32_t rank,
	uint32_t component, struct base_buf *ret_header, uint64_t *ret_len, uint64_t *ret_data_bytes)
{
	struct view_text m = {.keep = ret_header != NULL};
	struct source s = {.step = step, .mesh = mesh, .rank = rank};
	load_step_component(step, component, &s.first, &s.end);
	return view_text_end(&m, make(&m, &s, NULL, 0, ret_data_bytes), ret_header, ret_len);
}
