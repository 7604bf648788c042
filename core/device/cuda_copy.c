/* SPDX-License-Identifier: Apache-2.0
 *
 * cuda copy: a gather out of device memory. Straight: after folding, bytes that lie together are a row; rows at one
 * distance, and planes of them, are one call, which the copy engine walks by itself; what remains are loops. Turned
 * (fetch.h says when): cuda_turn.c. */
#include "core/device/cuda.h"
#include "core/device/cuda_internal.h"
#include "core/device/fetch.h"

struct cuda_walk {
	const struct device_gather *g;   /* folded */
	cuda_stream stream;
	struct device_copy_dims along;
	uint64_t to_stride[DEVICE_GATHER_DIMS];
};

static cuda_result cuda_copy_rows(const struct cuda_walk *w, char *to, cuda_address from)
{
	struct cuda_copy_2d copy = {
		.src_type = CUDA_MEMORY_DEVICE, .src_device = from, .src_pitch = (size_t)w->g->stride[w->along.rows],
		.dst_type = CUDA_MEMORY_HOST, .dst_host = to, .dst_pitch = w->to_stride[w->along.rows],
		.width_bytes = w->g->item_bytes, .height = w->g->size[w->along.rows],
	};

	return cuda_driver.copy_2d(&copy, w->stream);
}

static cuda_result cuda_copy_planes(const struct cuda_walk *w, char *to, cuda_address from)
{
	uint32_t rows = w->along.rows, planes = w->along.planes;
	size_t pitch = (size_t)w->g->stride[rows], to_pitch = w->to_stride[rows];
	struct cuda_copy_3d copy = {
		.src_type = CUDA_MEMORY_DEVICE, .src_device = from, .src_pitch = pitch,
		.src_height = (size_t)w->g->stride[planes] / pitch,
		.dst_type = CUDA_MEMORY_HOST, .dst_host = to, .dst_pitch = to_pitch,
		.dst_height = w->to_stride[planes] / to_pitch,
		.width_bytes = w->g->item_bytes, .height = w->g->size[rows], .depth = w->g->size[planes],
	};

	return cuda_driver.copy_3d(&copy, w->stream);
}

static cuda_result cuda_copy_dim(const struct cuda_walk *w, uint32_t dim, char *to, cuda_address from)
{
	const struct device_gather *g = w->g;
	cuda_result r = CUDA_SUCCESS;

	if (dim >= g->ndim) {
		if (w->along.planes < g->ndim)
			return cuda_copy_planes(w, to, from);
		return w->along.rows < g->ndim ? cuda_copy_rows(w, to, from) :
			cuda_driver.copy_to_host(to, from, g->item_bytes, w->stream);
	}
	if (dim == w->along.rows || dim == w->along.planes)
		return cuda_copy_dim(w, dim + 1, to, from);
	for (uint64_t i = 0; i < g->size[dim] && r == CUDA_SUCCESS; i++)
		r = cuda_copy_dim(w, dim + 1, to + i * w->to_stride[dim], from + i * (uint64_t)g->stride[dim]);
	return r;
}

int cuda_copy(cuda_stream stream, void *to, const struct device_gather *g, struct base_error *err)
{
	struct cuda_walk w = {.g = g, .stream = stream};

	device_fetch_strides(g, w.to_stride);
	device_fetch_dims(g, w.to_stride, &w.along);
	return cuda_translate(cuda_copy_dim(&w, 0, to, (uintptr_t)g->from), "copy from device memory", err);
}

int device_stream_gather(struct device_stream *s, void *to, const struct device_gather *source, struct base_error *err)
{
	struct device_gather g = *source;
	int r;

	device_gather_fold(&g);
	if (g.item_bytes == 0)
		return 0;
	r = cuda_enter(s->context, err);
	if (r < 0)
		return r;
	r = device_fetch_turns(&g, CUDA_TURN_BYTES) ? cuda_turn(s, to, &g, err) : cuda_copy(s->stream, to, &g, err);
	cuda_leave();
	return r;
}
