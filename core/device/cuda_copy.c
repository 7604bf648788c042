/* SPDX-License-Identifier: Apache-2.0
 *
 * cuda copy: a gather out of device memory, or the reverse. Straight: after folding, bytes that lie together are a row;
 * rows at one distance, and planes of them, are one call, which the copy engine walks by itself; what remains are
 * loops. Reordered (fetch.h says when): cuda_reorder.c. A scatter is always straight: reordered, it would overwrite
 * what is between. */
#include "core/device/cuda.h"
#include "core/device/cuda_internal.h"
#include "core/device/fetch.h"

struct cuda_walk {
	const struct device_gather *g;   /* folded */
	cuda_stream stream;
	bool back;                       /* to the device */
	struct device_copy_dims along;
	uint64_t host_stride[DEVICE_GATHER_DIMS];
};

static cuda_result cuda_copy_rows(const struct cuda_walk *w, char *host, cuda_address device)
{
	size_t pitch = (size_t)w->g->stride[w->along.rows], host_pitch = w->host_stride[w->along.rows];
	struct cuda_copy_2d copy = {
		.src_type = w->back ? CUDA_MEMORY_HOST : CUDA_MEMORY_DEVICE, .src_host = w->back ? host : NULL,
		.src_device = w->back ? 0 : device, .src_pitch = w->back ? host_pitch : pitch,
		.dst_type = w->back ? CUDA_MEMORY_DEVICE : CUDA_MEMORY_HOST, .dst_host = w->back ? NULL : host,
		.dst_device = w->back ? device : 0, .dst_pitch = w->back ? pitch : host_pitch,
		.width_bytes = w->g->item_bytes, .height = w->g->size[w->along.rows],
	};

	return cuda_driver.copy_2d(&copy, w->stream);
}

static cuda_result cuda_copy_planes(const struct cuda_walk *w, char *host, cuda_address device)
{
	uint32_t rows = w->along.rows, planes = w->along.planes;
	size_t pitch = (size_t)w->g->stride[rows], host_pitch = w->host_stride[rows];
	size_t height = (size_t)w->g->stride[planes] / pitch, host_height = w->host_stride[planes] / host_pitch;
	struct cuda_copy_3d copy = {
		.src_type = w->back ? CUDA_MEMORY_HOST : CUDA_MEMORY_DEVICE, .src_host = w->back ? host : NULL,
		.src_device = w->back ? 0 : device, .src_pitch = w->back ? host_pitch : pitch,
		.src_height = w->back ? host_height : height,
		.dst_type = w->back ? CUDA_MEMORY_DEVICE : CUDA_MEMORY_HOST, .dst_host = w->back ? NULL : host,
		.dst_device = w->back ? device : 0, .dst_pitch = w->back ? pitch : host_pitch,
		.dst_height = w->back ? height : host_height,
		.width_bytes = w->g->item_bytes, .height = w->g->size[rows], .depth = w->g->size[planes],
	};

	return cuda_driver.copy_3d(&copy, w->stream);
}

static cuda_result cuda_copy_dim(const struct cuda_walk *w, uint32_t dim, char *host, cuda_address device)
{
	const struct device_gather *g = w->g;
	cuda_result r = CUDA_SUCCESS;

	if (dim >= g->ndim) {
		if (w->along.planes < g->ndim)
			return cuda_copy_planes(w, host, device);
		if (w->along.rows < g->ndim)
			return cuda_copy_rows(w, host, device);
		return w->back ? cuda_driver.copy_to_device(device, host, g->item_bytes, w->stream)
			: cuda_driver.copy_to_host(host, device, g->item_bytes, w->stream);
	}
	if (dim == w->along.rows || dim == w->along.planes)
		return cuda_copy_dim(w, dim + 1, host, device);
	for (uint64_t i = 0; i < g->size[dim] && r == CUDA_SUCCESS; i++)
		r = cuda_copy_dim(w, dim + 1, host + i * w->host_stride[dim], device + i * (uint64_t)g->stride[dim]);
	return r;
}

static int cuda_copy_any(cuda_stream stream, void *host, const struct device_gather *g, bool back,
	struct base_error *err)
{
	struct cuda_walk w = {.g = g, .stream = stream, .back = back};

	device_gather_strides(g, w.host_stride);
	device_fetch_dims(g, w.host_stride, &w.along);
	return cuda_translate(cuda_copy_dim(&w, 0, host, (uintptr_t)g->from),
		back ? "copy to device memory" : "copy from device memory", err);
}

int cuda_copy(cuda_stream stream, void *to, const struct device_gather *g, struct base_error *err)
{
	return cuda_copy_any(stream, to, g, false, err);
}

int device_stream_scatter(struct device_stream *s, const void *from, const struct device_gather *to,
	struct base_error *err)
{
	struct device_gather g = *to;

	device_gather_fold(&g);
	if (g.item_bytes == 0)
		return 0;
	s->back = true;
	return cuda_within(s->context, err,
		cuda_copy_any(s->stream, (void *)(uintptr_t)from, &g, true, err)); /* only read */
}

int device_stream_gather(struct device_stream *s, void *to, const struct device_gather *source, struct base_error *err)
{
	struct device_gather g = *source;

	device_gather_fold(&g);
	if (g.item_bytes == 0)
		return 0;
	return cuda_within(s->context, err, device_fetch_reorders(&g, CUDA_REORDER_BYTES) ? cuda_reorder(s, to, &g, err)
		: cuda_copy(s->stream, to, &g, err));
}
