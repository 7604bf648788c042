/* SPDX-License-Identifier: Apache-2.0
 *
 * The .metadata of torch's distributed checkpoint, which is a pickle. Input: the file. What is accepted must hold what
 * core/foreign/dcp.h promises. */
#include <stdlib.h>
#include <string.h>

#include "core/foreign/dcp.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check_text(const struct foreign_text *t, const uint8_t *data, size_t size)
{
	const uint8_t *bytes = (const uint8_t *)t->bytes;

	if (t->len && (bytes < data || bytes > data + size || t->len > (size_t)(data + size - bytes)))
		abort();
}

static void check(const struct foreign_dcp_entry *e, const uint8_t *data, size_t size)
{
	struct tensor_cover fault;

	check_text(&e->key, data, size);
	if (!e->key.len || (e->path && (!e->path->n || e->path->n > 64)))
		abort();
	if (!e->is_tensor) {
		check_text(&e->place.path, data, size);
		return;
	}
	if (!e->dtype || !tensor_dtype_valid(e->kept) || e->memory_format > 2)
		abort();
	if (tensor_boxes_cover(&e->shape, &e->chunks, &fault) != 0)
		abort();
	for (size_t i = 0; i < e->chunks.n; i++)
		check_text(&e->places[i].path, data, size);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct base_error err = {0};
	struct foreign_dcp d;

	if (foreign_dcp_read(data, size, &d, &err) == 0) {
		for (size_t i = 0; i < d.nentries; i++)
			check(&d.entries[i], data, size);
		foreign_dcp_release(&d);
	} else if (err.code == 0 || !*err.text || strchr(err.text, '\n')) {
		abort();
	}
	return 0;
}
