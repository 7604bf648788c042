/* SPDX-License-Identifier: Apache-2.0
 *
 * An archive as torch.save writes it, with a tensor in it. Input: the archive, which lies somewhere inside of a file.
 * All items of a tensor that is accepted must lie in the archive. */
#include <stdlib.h>
#include <string.h>

#include "core/base/le.h"
#include "core/foreign/tensor.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define BEFORE 1000u

struct file { const uint8_t *data; size_t size; };

static int read_file(void *arg, uint64_t offset, void *bytes, size_t len, struct base_error *err)
{
	const struct file *f = arg;

	(void)err;
	if (offset < BEFORE || offset - BEFORE > f->size || len > f->size - (offset - BEFORE))
		abort(); /* a read outside of the archive */
	if (len)
		memcpy(bytes, f->data + (offset - BEFORE), len);
	return 0;
}

static void check(const struct foreign_tensor *t, size_t size)
{
	enum tensor_dtype dtype;
	const char *word;
	uint64_t items, last = 0;

	if (foreign_dtype(t->dtype, strlen(t->dtype), &word, &dtype) < 0 ||
		tensor_shape_items(&t->shape, tensor_dtype_bytes(dtype), &items) < 0)
		abort();
	if (!items)
		return;
	for (uint32_t d = 0; d < t->shape.ndim; d++)
		last += (t->shape.dim[d] - 1) * t->stride[d];
	if (t->offset < BEFORE || t->offset - BEFORE + (last + 1) * tensor_dtype_bytes(dtype) > size)
		abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct file f = {data, size};
	struct foreign_range range = {read_file, &f, BEFORE, size};
	struct base_error err = {0};
	struct foreign_tensor t;

	if (foreign_tensor_read(&range, &t, &err) == 0)
		check(&t, size);
	else if (err.code == 0 || !*err.text || strchr(err.text, '\n'))
		abort();
	return 0;
}
