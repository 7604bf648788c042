/* SPDX-License-Identifier: Apache-2.0
 *
 * Layout files. Input: the text of one. What is accepted must hold what core/view/layouts.h promises; the first line of
 * the text is asked for as a tensor's name. */
#include <stdlib.h>
#include <string.h>

#include "core/view/layouts.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check(const struct view_layouts *l, const char *name, size_t len)
{
	struct load_tensor_info info = {.component = "model", .name = name, .name_len = (uint32_t)len,
		.dtype = TENSOR_F32, .shape = {.ndim = 2, .dim = {8, 8}}};
	int64_t found = view_layouts_find(l, &info);

	if (found >= (int64_t)view_layouts_count(l) || (found < 0 && found != -ENOENT))
		abort();
	for (uint32_t i = 0; i < view_layouts_count(l); i++) {
		const struct view_layouts_line *line = view_layouts_line(l, i);

		if (!line->pattern[0] || line->number == 0 || (line->saved && line->ncuts))
			abort();
		for (uint32_t c = 0; c < line->ncuts; c++)
			if (line->cuts[c].placement.kind > TENSOR_INTERLEAVED_SHARD || !line->cuts[c].dim[0])
				abort();
	}
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct view_layouts *l;
	struct base_error err = {0};
	char *text = malloc(size ? size : 1); /* its own allocation, so that a read behind it is seen */

	if (!text)
		return 0;
	memcpy(text, data, size);
	if (view_layouts_parse("file", text, size, &l, &err) == 0) {
		char *end = memchr(text, '\n', size);

		check(l, text, end ? (size_t)(end - text) : size);
		view_layouts_free(l);
	} else if (err.code == 0 || strchr(err.text, '\n')) {
		abort();
	}
	free(text);
	return 0;
}
