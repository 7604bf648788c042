/* SPDX-License-Identifier: Apache-2.0
 *
 * The safetensors header. Input: u64 little-endian bytes of data behind the header (the low 20 bits count), then the
 * file's head. What is accepted must hold what core/view/safetensors.h promises. */
#include <stdlib.h>
#include <string.h>

#include "core/view/safetensors.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check(const struct view_safetensors *s, uint64_t file_size)
{
	uint64_t at = 0;
	if (s->data_offset + s->data_bytes != file_size)
		abort();
	for (uint32_t i = 0; i < s->ntensors; i++) {
		const struct view_safetensors_tensor *t = &s->tensors[i];
		uint64_t items;
		if (t->begin != at || t->end < t->begin || !tensor_dtype_valid(t->dtype))
			abort();
		if (tensor_shape_items(&t->shape, tensor_dtype_bytes(t->dtype), &items) < 0 ||
			items * tensor_dtype_bytes(t->dtype) != t->end - t->begin)
			abort();
		if (t->name_len == 0 || !proto_utf8_valid(t->name, t->name_len) || t->name[t->name_len] != 0)
			abort();
		at = t->end;
	}
	for (uint32_t i = 0; i < s->nmetadata; i++)
		if (!proto_utf8_valid(s->metadata[i].key, strlen(s->metadata[i].key)) ||
			!proto_utf8_valid(s->metadata[i].value, strlen(s->metadata[i].value)))
			abort();
	if (at != s->data_bytes)
		abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct view_safetensors s;
	struct base_error err = {0};
	uint64_t more, file_size;
	size_t len;
	uint8_t *head;

	if (size < 8)
		return 0;
	more = base_get64(data) & 0xfffff;
	len = size - 8;
	head = malloc(len + 1); /* its own allocation, so that a read behind it is seen */
	if (!head)
		return 0;
	memcpy(head, data + 8, len);
	file_size = len + more;
	if (view_safetensors_parse(head, len, file_size, &s, &err) == 0) {
		check(&s, file_size);
		view_safetensors_release(&s);
	} else if (err.code == 0 || strchr(err.text, '\n')) {
		abort();
	}
	free(head);
	return 0;
}
