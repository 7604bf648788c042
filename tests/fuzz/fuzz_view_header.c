/* SPDX-License-Identifier: Apache-2.0
 *
 * A stored view header against its layout (docs/format/header.md). Input: u32 length | layout object | u8 component |
 * u64 bytes of data | header. A header that is made from the layout must fit it; what is said to fit has every tensor
 * of the component that such a file can have, with its bytes, and no other. */
#include <stdlib.h>
#include <string.h>

#include "core/view/safetensors.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void must(bool good)
{
	if (!good)
		abort();
}

/* Tensors of the component that can be in such a file. */
static uint32_t tensors_that_can(const struct store_layout *l, uint32_t component)
{
	uint32_t first, end, n = 0;

	store_layout_component_range(l, component, &first, &end);
	for (uint32_t i = first; i < end; i++) {
		struct tensor_shape shape;
		uint32_t len;
		const char *name = store_layout_name(l, i, &len);

		store_layout_shape(l, i, &shape);
		n += view_safetensors_can(store_layout_dtype(l, i), &shape, name, len);
	}
	return n;
}

/* The header was said to fit. */
static void fits(const struct store_layout *l, uint32_t component, const uint8_t *header, size_t len,
	uint64_t data_bytes)
{
	struct view_safetensors s;
	uint64_t bytes = 0;

	must(view_safetensors_parse(header, len, len + data_bytes, &s, NULL) == 0);
	must(s.data_offset == len && s.data_bytes == data_bytes && s.ntensors == tensors_that_can(l, component));
	for (uint32_t i = 0; i < s.ntensors; i++) {
		const struct view_safetensors_tensor *t = &s.tensors[i];
		int64_t number = store_layout_find(l, l->m.components[component], t->name, t->name_len);

		must(number >= 0 && store_layout_bytes(l, (uint32_t)number) == t->end - t->begin);
		must(store_layout_dtype(l, (uint32_t)number) == t->dtype);
		bytes += t->end - t->begin;
	}
	must(bytes == data_bytes);
	view_safetensors_release(&s);
}

static void try_header(const struct store_layout *l, uint32_t component, const uint8_t *header, size_t len,
	uint64_t data_bytes)
{
	struct base_error err = {0};
	int r = view_header_check(l, l->m.components[component], "safetensors", header, len, data_bytes, &err);

	if (r == 0)
		fits(l, component, header, len, data_bytes);
	else
		must(err.code == r && err.text[0] && !strchr(err.text, '\n'));
}

static void made_header(const struct store_layout *l, uint32_t component)
{
	struct base_buf header = BASE_BUF_INIT;
	struct base_error err = {0};
	uint64_t data_bytes;

	if (view_safetensors_make(l, component, NULL, 0, &header, &data_bytes) < 0)
		return;
	if (data_bytes <= INT64_MAX)
		must(view_header_check(l, l->m.components[component], "safetensors", header.data, header.len,
			data_bytes, &err) == 0);
	base_buf_release(&header);
}

/* The header in memory of exactly its length, so that a sanitizer sees a read past it. */
static void given_header(const struct store_layout *l, uint32_t component, const uint8_t *data, size_t size)
{
	uint8_t *header = size < 8 ? NULL : malloc(size - 8 ? size - 8 : 1);

	if (!header)
		return;
	memcpy(header, data + 8, size - 8);
	try_header(l, component, header, size - 8, base_get64(data));
	free(header);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct store_layout *l;
	uint32_t n = size < 5 ? UINT32_MAX : base_get32(data);

	if (size < 5 || n > size - 5 || store_layout_decode(data + 4, n, &l, NULL) < 0)
		return 0;
	for (uint32_t i = 0; i < l->m.ncomponents; i++)
		made_header(l, i);
	if (l->m.ncomponents)
		given_header(l, data[4 + n] % l->m.ncomponents, data + 5 + n, size - 5 - n);
	store_layout_free(l);
	return 0;
}
