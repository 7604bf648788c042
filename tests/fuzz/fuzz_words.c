/* SPDX-License-Identifier: Apache-2.0
 *
 * Mesh and placement words, and the shards that they make. Input: four lines: shape ("4,1024"), mesh, placements, flat
 * range ("" or three numbers). Whatever is accepted prints and reads back equal, and the boxes of its first and last
 * rank lie in the tensor, follow each other in the buffer, and have as many items as the shard says. */
#include <stdlib.h>
#include <string.h>

#include "core/tensor/shard.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define BOXES_MAX 5000u /* of a shard that are walked */

static void must(bool good)
{
	if (!good)
		abort();
}

static void placements_round(const struct tensor_placements *p)
{
	base_cleanup_buf struct base_buf text = BASE_BUF_INIT;
	base_cleanup_free struct tensor_placements *back = NULL;
	struct base_error err;

	tensor_placements_print(p->at, p->n, &text);
	base_buf_append_zero(&text, 1);
	if (text.error)
		return;
	must(tensor_placements_parse((const char *)text.data, &back, &err) == 0 && back->n == p->n);
	for (uint32_t i = 0; i < p->n; i++)
		must(tensor_placement_equal(&p->at[i], &back->at[i]));
}

static void mesh_round(const struct tensor_mesh *m)
{
	base_cleanup_buf struct base_buf text = BASE_BUF_INIT;
	struct tensor_mesh *back = NULL;
	struct base_error err;

	tensor_mesh_print(m, &text);
	base_buf_append_zero(&text, 1);
	if (text.error)
		return;
	must(tensor_mesh_parse((const char *)text.data, NULL, 0, &back, &err) == 0);
	must(back->ndim == m->ndim && memcmp(back->size, m->size, sizeof m->size) == 0);
	tensor_mesh_free(back);
}

static void shard_walk(const struct tensor_sharding *s, uint32_t rank, const struct tensor_flat *flat)
{
	struct base_error err = {0};
	struct tensor_shard shard;
	struct tensor_shard_iter it;
	uint64_t items = 0, last = 0, n = 0;

	if (tensor_shard_of(s, rank, flat, &shard, &err) < 0) {
		must(flat && err.code != 0 && err.text[0]);
		return;
	}
	for (tensor_shard_first(&it, &shard, NULL); !it.done && n < BOXES_MAX; tensor_shard_next(&it), n++) {
		must(tensor_box_inside(&s->shape, &it.at.box));
		must(n == 0 || it.at.local_offset > last);
		last = it.at.local_offset;
		items += tensor_box_items(&s->shape, &it.at.box);
	}
	must(items <= tensor_shard_items(&shard));
	if (it.done)
		must(items == tensor_shard_items(&shard) && n == tensor_shard_box_count(&shard));
}

/* Numbers with a comma between them; false: too many. */
static bool numbers(const char *text, uint64_t *out, uint32_t room, uint32_t *ret_n)
{
	char *end;

	for (*ret_n = 0; *text; text = end + (*end == ',')) {
		uint64_t v = strtoull(text, &end, 10);

		if (end == text || *ret_n == room)
			return false;
		out[(*ret_n)++] = v;
	}
	return true;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	base_cleanup_free struct tensor_placements *p = NULL;
	struct tensor_mesh *mesh = NULL;
	struct base_error err = {0};
	struct tensor_sharding s = {.item_bytes = 2};
	uint64_t range[3] = {0};
	uint32_t n;
	char *line[4], *text = malloc(size + 1), *rest = text;

	if (!text)
		return 0;
	memcpy(text, data, size);
	text[size] = 0;
	for (unsigned i = 0; i < 4; i++)
		line[i] = rest ? strsep(&rest, "\n") : text + size;
	if (tensor_placements_parse(line[2], &p, &err) == 0)
		placements_round(p);
	else
		must(err.code != 0 && !strchr(err.text, '\n'));
	if (tensor_mesh_parse(line[1], NULL, 0, &mesh, &err) == 0)
		mesh_round(mesh);
	if (p && mesh && numbers(line[0], s.shape.dim, TENSOR_MAX_DIMS, &s.shape.ndim)
	    && numbers(line[3], range, 3, &n)) {
		const struct tensor_flat flat = {range[0], range[1], range[2]};

		s.mesh = mesh;
		s.placement = p->at;
		if (tensor_sharding_check(&s, p->n, &err) == 0) {
			shard_walk(&s, 0, NULL);
			shard_walk(&s, mesh->count - 1, n ? &flat : NULL);
		} else {
			must(err.code != 0 && err.text[0]);
		}
	}
	tensor_mesh_free(mesh);
	free(text);
	return 0;
}
