/* SPDX-License-Identifier: Apache-2.0
 *
 * The .npy header, and file names. Input: u64 little-endian bytes behind the input (the low 20 bits count; the highest
 * byte is what items of |V1 and |V2 are said to be), then the file's head. */
#include <stdlib.h>
#include <string.h>

#include "core/base/le.h"
#include "core/view/name.h"
#include "core/view/npy.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void name(const char *bytes, size_t len)
{
	char file[VIEW_FILE_NAME_BYTES], *back;
	size_t back_len;
	view_name_escape(bytes, len, ".npy", file);
	if (len && (strlen(file) < 5 || strchr(file, '/') || file[0] == '.'))
		abort();
	if (view_name_unescape(bytes, len, &back, &back_len) == 0) {
		view_name_escape(back, back_len, "", file);
		if (strlen(file) != len || memcmp(file, bytes, len) != 0)
			abort();
		free(back);
	}
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct base_error err = {0};
	struct tensor_shape shape;
	enum tensor_dtype dtype, said;
	uint64_t offset, items, file_size;
	size_t len;
	char *head;

	if (size < 8)
		return 0;
	len = size - 8;
	file_size = len + (base_get64(data) & 0xfffff);
	head = malloc(len + 1);
	if (!head)
		return 0;
	memcpy(head, data + 8, len);
	said = data[7] % TENSOR_DTYPE_END;
	if (view_npy_parse(head, len, file_size, said, &dtype, &shape, &offset, &err) == 0) {
		if (tensor_shape_items(&shape, tensor_dtype_bytes(dtype), &items) < 0 ||
			offset + items * tensor_dtype_bytes(dtype) != file_size)
			abort();
	} else if (err.code == 0 || strchr(err.text, '\n')) {
		abort();
	}
	name(head, len);
	free(head);
	return 0;
}
