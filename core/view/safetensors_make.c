/* SPDX-License-Identifier: Apache-2.0
 *
 * The order of the data makes every tensor aligned: those whose size is a multiple of 4096 keep the offset a multiple
 * of 4096 for each other, and behind them falling element sizes (powers of two) keep each a multiple of the next. */
#include "core/view/view_internal.h"

#include <inttypes.h>

#define DATA_ALIGN 4096u

struct item { uint32_t tensor, element_bytes; bool unaligned; };

bool view_safetensors_can(enum tensor_dtype dtype, const struct tensor_shape *shape, const char *name,
	uint32_t name_len)
{
	size_t reserved = strlen(VIEW_SAFETENSORS_METADATA);
	if (!tensor_dtype_safetensors(dtype) ||
	    (name_len == reserved && memcmp(name, VIEW_SAFETENSORS_METADATA, reserved) == 0))
		return false;
	return dtype != TENSOR_F4_E2M1FN_X2 || shape->ndim > 0; /* a scalar of two elements has no shape in elements */
}

const struct proto_view_header *view_safetensors_stored(const struct load_step *step, const char *component)
{
	const struct proto_manifest *m = load_step_manifest(step);
	const struct proto_view_header *found = NULL;
	for (uint32_t i = 0; i < m->nheaders; i++)
		if (strcmp(m->headers[i].component, component) == 0 &&
			strcmp(m->headers[i].view, VIEW_SAFETENSORS_VIEW) == 0) {
			if (found)
				return NULL; /* several layouts have one each: none of them is the component's */
			found = &m->headers[i];
		}
	return found;
}

void view_json_text(struct base_buf *b, const char *text, size_t len)
{
	size_t from = 0;
	for (size_t i = 0; i < len; i++) {
		unsigned char c = (unsigned char)text[i];
		if (c >= 0x20 && c != '"' && c != '\\')
			continue;
		base_buf_append(b, text + from, i - from);
		if (c < 0x20)
			base_buf_printf(b, "\\u%04x", c);
		else
			base_buf_append(b, (char[]){'\\', (char)c}, 2);
		from = i + 1;
	}
	base_buf_append(b, text + from, len - from);
}

void view_json_string(struct base_buf *b, const char *text, size_t len)
{
	base_buf_append(b, "\"", 1);
	view_json_text(b, text, len);
	base_buf_append(b, "\"", 1);
}

void view_json_number(struct base_buf *b, uint64_t v)
{
	char digits[20];
	unsigned at = sizeof digits;
	do
		digits[--at] = (char)('0' + v % 10);
	while (v /= 10);
	base_buf_append(b, digits + at, sizeof digits - at);
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

/* `format: pt` (transformers refuses files without it) takes its place among the sorted keys unless the metadata has
 * its own. */
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

static void put_tensor(struct base_buf *b, const struct store_layout *l, uint32_t tensor, uint64_t begin, uint64_t end)
{
	struct tensor_shape shape;
	uint32_t len;
	const char *name = store_layout_name(l, tensor, &len);
	enum tensor_dtype dtype = store_layout_dtype(l, tensor);
	store_layout_shape(l, tensor, &shape);
	base_buf_append(b, ",", 1);
	view_json_string(b, name, len);
	base_buf_append_text(b, ":{\"dtype\":\"");
	base_buf_append_text(b, tensor_dtype_safetensors(dtype));
	base_buf_append_text(b, "\",\"shape\":[");
	for (uint32_t d = 0; d < shape.ndim; d++) {
		bool pairs = dtype == TENSOR_F4_E2M1FN_X2 && d + 1 == shape.ndim;
		if (d)
			base_buf_append(b, ",", 1);
		view_json_number(b, pairs ? shape.dim[d] * 2 : shape.dim[d]);
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
	return a->tensor < b->tensor ? -1 : 1; /* layouts are sorted by name */
}

static size_t collect(const struct store_layout *l, uint32_t first, uint32_t end, struct item *items)
{
	size_t n = 0;
	for (uint32_t i = first; i < end; i++) {
		struct tensor_shape shape;
		uint32_t len;
		const char *name = store_layout_name(l, i, &len);
		enum tensor_dtype dtype = store_layout_dtype(l, i);
		store_layout_shape(l, i, &shape);
		if (view_safetensors_can(dtype, &shape, name, len))
			items[n++] = (struct item){
				i, tensor_dtype_bytes(dtype), store_layout_bytes(l, i) % DATA_ALIGN != 0};
	}
	qsort(items, n, sizeof *items, by_order);
	return n;
}

int view_safetensors_make(const struct store_layout *l, uint32_t component, const struct proto_attribute *metadata,
	uint32_t nmetadata,
	struct base_buf *ret_header, uint64_t *ret_data_bytes)
{
	base_cleanup_buf struct base_buf b = BASE_BUF_INIT;
	uint32_t first, end;
	uint64_t at = 0;
	store_layout_component_range(l, component, &first, &end);
	base_cleanup_free struct item *items = malloc((end - first) * sizeof *items + 1);
	if (!items)
		return -ENOMEM;
	size_t n = collect(l, first, end, items);
	base_buf_put64(&b, 0);
	put_metadata(&b, metadata, nmetadata);
	for (size_t i = 0; i < n; i++) {
		uint64_t next;
		if (base_add_overflows(at, store_layout_bytes(l, items[i].tensor), &next) ||
			b.len > VIEW_SAFETENSORS_MAX_MADE)
			return -EFBIG;
		put_tensor(&b, l, items[i].tensor, at, next);
		at = next;
	}
	base_buf_append(&b, "}", 1);
	size_t padded = base_align(b.len, DATA_ALIGN);
	if (padded - 8 > VIEW_SAFETENSORS_MAX_MADE)
		return -EFBIG;
	size_t pad = padded - b.len;
	void *spaces = base_buf_extend(&b, pad);
	if (b.error)
		return b.error;
	memset(spaces, ' ', pad);
	base_put64(b.data, padded - 8);
	*ret_header = b;
	b = (struct base_buf)BASE_BUF_INIT;
	*ret_data_bytes = at;
	return 0;
}
