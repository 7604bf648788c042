/* SPDX-License-Identifier: Apache-2.0
 *
 * mesh_ask: what is asked of a mesh. A position in its row-major array of ranks is a mixed-radix number whose digits
 * are the coordinate: a group is the set of positions that differ in some digits, a neighbour is a position with one
 * digit changed, a sub-mesh is a group that was made a mesh.
 *
 * The mesh itself is sound (mesh.c): products and sums of its sizes fit 32 bits. What a caller passes (ranks,
 * coordinates, masks, steps) is compared with these before it is used. */
#include "core/tensor/mesh.h"

#include <stdint.h>
#include <string.h>

#include "core/base/bisect.h"
#include "core/base/cleanup.h"
#include "core/base/plural.h"

/* ---- positions --------------------------------------------------------------------------------------------------- */

static int rank_order(uint32_t a, uint32_t b) { return (a > b) - (a < b); }

/* Of a rank: 0 or -ENOENT. */
static int mesh_position(const struct tensor_mesh *m, uint32_t rank, uint32_t *ret_position)
{
	int64_t n;

	if (!m->ranks) {
		*ret_position = rank;
		return rank < m->count ? 0 : -ENOENT;
	}
	n = base_search(i, 0, m->count, rank_order(m->ranks[m->order[i]], rank));
	if (n < 0)
		return -ENOENT;
	*ret_position = m->order[n];
	return 0;
}

/* Position to coordinate. */
static void mesh_unravel(const struct tensor_mesh *m, uint32_t position, uint32_t *ret_coordinate)
{
	for (uint32_t d = m->ndim; d-- > 0;) {
		ret_coordinate[d] = position % m->size[d];
		position /= m->size[d];
	}
}

/* Coordinate to position; every number of it is below its size. */
static uint32_t mesh_ravel(const struct tensor_mesh *m, const uint32_t *coordinate)
{
	uint32_t position = 0;

	for (uint32_t d = 0; d < m->ndim; d++)
		position = position * m->size[d] + coordinate[d];
	return position;
}

static bool mesh_has_dims(const struct tensor_mesh *m, uint32_t dims)
{
	return dims >> m->ndim == 0; /* ndim <= 16 */
}

int tensor_mesh_coordinate(const struct tensor_mesh *m, uint32_t rank, uint32_t *ret_coordinate)
{
	uint32_t position;
	int r = mesh_position(m, rank, &position);

	if (r == 0)
		mesh_unravel(m, position, ret_coordinate);
	return r;
}

int tensor_mesh_rank(const struct tensor_mesh *m, const uint32_t *coordinate, uint32_t *ret_rank)
{
	for (uint32_t d = 0; d < m->ndim; d++)
		if (coordinate[d] >= m->size[d])
			return -ERANGE;
	*ret_rank = tensor_mesh_rank_at(m, mesh_ravel(m, coordinate));
	return 0;
}

uint32_t tensor_mesh_rank_at(const struct tensor_mesh *m, uint32_t position)
{
	if (position >= m->count)
		return UINT32_MAX;
	return m->ranks ? m->ranks[position] : position;
}

/* ---- groups ------------------------------------------------------------------------------------------------------ */

uint32_t tensor_mesh_group_size(const struct tensor_mesh *m, uint32_t dims)
{
	uint32_t size = 1;

	if (!mesh_has_dims(m, dims))
		return 0;
	for (uint32_t d = 0; d < m->ndim; d++)
		if (dims >> d & 1)
			size *= m->size[d];
	return size;
}

int tensor_mesh_group(const struct tensor_mesh *m, uint32_t rank, uint32_t dims, uint32_t *ret_ranks)
{
	uint32_t coordinate[TENSOR_MAX_DIMS], stride[TENSOR_MAX_DIMS], position, step = 1;
	uint32_t size = tensor_mesh_group_size(m, dims);

	if (size == 0)
		return -EINVAL;
	if (mesh_position(m, rank, &position) < 0)
		return -ENOENT;
	mesh_unravel(m, position, coordinate);
	for (uint32_t d = m->ndim; d-- > 0; step *= m->size[d]) {
		stride[d] = step;
		if (dims >> d & 1) {
			position -= coordinate[d] * step; /* to the first of the group */
			coordinate[d] = 0;
		}
	}
	for (uint32_t i = 0; i < size; i++) {
		ret_ranks[i] = tensor_mesh_rank_at(m, position);
		for (uint32_t d = m->ndim; d-- > 0;) { /* the next one: as an odometer counts */
			if (!(dims >> d & 1))
				continue;
			position += stride[d];
			if (++coordinate[d] < m->size[d])
				break;
			position -= m->size[d] * stride[d];
			coordinate[d] = 0;
		}
	}
	return 0;
}

int64_t tensor_mesh_group_position(const struct tensor_mesh *m, uint32_t rank, uint32_t dims)
{
	uint32_t coordinate[TENSOR_MAX_DIMS], at = 0;
	int r;

	if (!mesh_has_dims(m, dims))
		return -EINVAL;
	r = tensor_mesh_coordinate(m, rank, coordinate);
	if (r < 0)
		return r;
	for (uint32_t d = 0; d < m->ndim; d++)
		if (dims >> d & 1)
			at = at * m->size[d] + coordinate[d];
	return at;
}

/* ---- meshes of a mesh -------------------------------------------------------------------------------------------- */

int tensor_mesh_sub(const struct tensor_mesh *m, uint32_t rank, uint32_t dims, struct tensor_mesh **ret_m,
	struct base_error *err)
{
	base_cleanup_free uint32_t *ranks = NULL;
	const char *names[TENSOR_MAX_DIMS];
	uint32_t sizes[TENSOR_MAX_DIMS], ndim = 0, size = tensor_mesh_group_size(m, dims);

	if (dims == 0)
		return base_error_set(err, -EINVAL, "mesh: no dimension is given");
	if (size == 0)
		return base_error_set(err, -EINVAL, "mesh: there is no dimension %u, only %u %s",
			m->ndim + (unsigned)__builtin_ctz(dims >> m->ndim), m->ndim,
			base_plural(m->ndim, "dimension", "dimensions"));
	for (uint32_t d = 0; d < m->ndim; d++) {
		if (!(dims >> d & 1))
			continue;
		names[ndim] = m->name[d];
		sizes[ndim++] = m->size[d];
	}
	ranks = malloc(size * sizeof *ranks);
	if (!ranks)
		return base_no_memory_for(err, "mesh of %u ranks", size);
	if (tensor_mesh_group(m, rank, dims, ranks) < 0)
		return base_error_set(err, -ENOENT, "mesh: rank %u is not in the mesh", rank);
	return tensor_mesh_new(ndim, names, sizes, ranks, size, ret_m, err);
}

int tensor_mesh_neighbour(const struct tensor_mesh *m, uint32_t rank, uint32_t dim, int64_t k, bool wrap,
	uint32_t *ret_rank)
{
	uint32_t coordinate[TENSOR_MAX_DIMS];
	int64_t size, at;
	int r;

	if (dim >= m->ndim)
		return -EINVAL;
	r = tensor_mesh_coordinate(m, rank, coordinate);
	if (r < 0)
		return r;
	size = m->size[dim];
	at = coordinate[dim];
	if (wrap)
		at = (at + k % size + size) % size; /* the remainder is in (-size, size), whatever k is */
	else if (k < -at || k >= size - at)
		return -ERANGE;
	else
		at += k;
	coordinate[dim] = (uint32_t)at;
	*ret_rank = tensor_mesh_rank_at(m, mesh_ravel(m, coordinate));
	return 0;
}

/* ---- hosts ------------------------------------------------------------------------------------------------------- */

int tensor_hosts_find(const struct tensor_hosts *h, uint32_t rank, uint32_t *ret_host, uint32_t *ret_device)
{
	if (!h->host != !h->device)
		return -EINVAL;
	if (h->host) {
		if (rank >= h->n)
			return -ENOENT;
		*ret_host = h->host[rank];
		*ret_device = h->device[rank];
		return 0;
	}
	if (h->devices == 0)
		return -EINVAL;
	*ret_host = rank / h->devices;
	*ret_device = rank % h->devices;
	return 0;
}
