/* SPDX-License-Identifier: Apache-2.0
 *
 * mesh: the meshes of vckpt.h over core/tensor/mesh.h: dimensions by name, and a sentence for what is wrong. */
#include <inttypes.h>
#include <stdlib.h>

#include "core/api/api_internal.h"
#include "core/base/plural.h"

/* Takes `inner`, whatever comes out. */
static int mesh_wrap(struct tensor_mesh *inner, struct vckpt_mesh **ret_mesh, struct base_error *err)
{
	struct vckpt_mesh *m = malloc(sizeof *m);

	if (!m) {
		tensor_mesh_free(inner);
		return base_no_memory(err);
	}
	m->mesh = inner;
	*ret_mesh = m;
	return 0;
}

int vckpt_mesh_new(const char *text, const uint32_t *ranks, uint32_t nranks, struct vckpt_mesh **ret_mesh,
	struct vckpt_error *err)
{
	struct base_error *e = api_error(err);
	struct tensor_mesh *inner = NULL;
	int r;

	if (!text || !ret_mesh)
		return base_error_set(e, -EINVAL, "no %s is given", text ? "place for the mesh" : "text of a mesh");
	if (!ranks && nranks)
		return base_error_set(e, -EINVAL, "mesh: ranks is a null pointer, and %" PRIu32 " %s announced", nranks,
			base_plural(nranks, "rank is", "ranks are"));
	r = tensor_mesh_parse(text, ranks, nranks, &inner, e);
	return r < 0 ? api_result(r, e) : mesh_wrap(inner, ret_mesh, e);
}

void vckpt_mesh_free(struct vckpt_mesh *mesh)
{
	if (!mesh)
		return;
	tensor_mesh_free(mesh->mesh);
	free(mesh);
}

/* ---- questions ---- */

/* -EINVAL, where one of them is NULL. `dims` NULL: all dimensions, where `all` allows it. */
static int mesh_asked(const struct vckpt_mesh *mesh, const char *dims, bool all, const void *ret, uint32_t *ret_dims,
	struct base_error *err)
{
	if (!mesh || !ret)
		return base_error_set(err, -EINVAL, "no %s is given", mesh ? "place for the answer" : "mesh");
	*ret_dims = (UINT32_C(1) << mesh->mesh->ndim) - 1;
	if (!dims && all)
		return 0;
	if (!dims)
		return base_error_set(err, -EINVAL, "mesh: no dimension is given");
	return tensor_mesh_dims(mesh->mesh, dims, ret_dims, err);
}

static int mesh_result(int r, uint32_t rank, struct base_error *err)
{
	return r == -ENOENT ? base_error_set(err, r, "mesh: rank %" PRIu32 " is not in the mesh", rank)
		: api_result(r, err);
}

uint32_t vckpt_mesh_ndim(const struct vckpt_mesh *mesh)
{
	return mesh ? mesh->mesh->ndim : 0;
}

const char *vckpt_mesh_dim(const struct vckpt_mesh *mesh, uint32_t dim)
{
	return dim < vckpt_mesh_ndim(mesh) ? mesh->mesh->name[dim] : NULL;
}

int vckpt_mesh_size(const struct vckpt_mesh *mesh, const char *dims, uint32_t *ret_size, struct vckpt_error *err)
{
	struct base_error *e = api_error(err);
	uint32_t mask;
	int r = mesh_asked(mesh, dims, true, ret_size, &mask, e);

	if (r == 0)
		*ret_size = tensor_mesh_group_size(mesh->mesh, mask);
	return api_result(r, e);
}

int vckpt_mesh_coordinate(const struct vckpt_mesh *mesh, uint32_t rank, uint32_t *ret_coordinate,
	struct vckpt_error *err)
{
	struct base_error *e = api_error(err);
	uint32_t mask;
	int r = mesh_asked(mesh, NULL, true, ret_coordinate, &mask, e);

	return r < 0 ? r : mesh_result(tensor_mesh_coordinate(mesh->mesh, rank, ret_coordinate), rank, e);
}

int vckpt_mesh_rank(const struct vckpt_mesh *mesh, const uint32_t *coordinate, uint32_t *ret_rank,
	struct vckpt_error *err)
{
	struct base_error *e = api_error(err);
	uint32_t mask;
	int r = mesh_asked(mesh, NULL, true, ret_rank, &mask, e);

	if (r == 0 && !coordinate)
		r = base_error_set(e, -EINVAL, "mesh: no coordinate is given");
	for (uint32_t d = 0; r == 0 && d < mesh->mesh->ndim; d++)
		if (coordinate[d] >= mesh->mesh->size[d])
			r = base_error_set(e, -EINVAL, "mesh: coordinate %" PRIu32 " in dimension \"%s\", whose size "
				"is %" PRIu32, coordinate[d], mesh->mesh->name[d], mesh->mesh->size[d]);
	return r < 0 ? r : api_result(tensor_mesh_rank(mesh->mesh, coordinate, ret_rank), e);
}

int vckpt_mesh_group(const struct vckpt_mesh *mesh, const char *dims, uint32_t rank, uint32_t *ret_ranks,
	struct vckpt_error *err)
{
	struct base_error *e = api_error(err);
	uint32_t mask;
	int r = mesh_asked(mesh, dims, false, ret_ranks, &mask, e);

	return r < 0 ? r : mesh_result(tensor_mesh_group(mesh->mesh, rank, mask, ret_ranks), rank, e);
}

int vckpt_mesh_sub(const struct vckpt_mesh *mesh, const char *dims, uint32_t rank, struct vckpt_mesh **ret_mesh,
	struct vckpt_error *err)
{
	struct base_error *e = api_error(err);
	struct tensor_mesh *inner = NULL;
	uint32_t mask;
	int r = mesh_asked(mesh, dims, false, ret_mesh, &mask, e);

	if (r == 0)
		r = tensor_mesh_sub(mesh->mesh, rank, mask, &inner, e);
	return r < 0 ? api_result(r, e) : mesh_wrap(inner, ret_mesh, e);
}

int vckpt_mesh_neighbour(const struct vckpt_mesh *mesh, const char *dim, uint32_t rank, int64_t distance, int wrap,
	uint32_t *ret_rank, struct vckpt_error *err)
{
	struct base_error *e = api_error(err);
	uint32_t mask;
	int r = mesh_asked(mesh, dim, false, ret_rank, &mask, e);

	if (r == 0 && (mask & (mask - 1)))
		r = base_error_set(e, -EINVAL, "mesh: a neighbour is along one dimension, not along \"%.100s\"", dim);
	if (r < 0)
		return r;
	r = tensor_mesh_neighbour(mesh->mesh, rank, (uint32_t)__builtin_ctz(mask), distance, wrap != 0, ret_rank);
	return r == -ERANGE ? 0 : r == 0 ? 1 : mesh_result(r, rank, e);
}
