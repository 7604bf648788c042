/* SPDX-License-Identifier: Apache-2.0
 *
 * mesh: named dimensions over ranks, in any rank order: a permutation, a subset, ranks that do not start at 0. The rank
 * at coordinate c is ranks[row-major position of c], as numpy's `ranks.reshape(sizes)[c]`. It is no process group:
 * nothing here communicates. A mesh is read-only once made and safe from any thread; a set of its dimensions is a mask,
 * bit d for dimension d (0 outermost). Every function is total: what is not in the mesh is an error, never an
 * assertion. */
#ifndef CORE_TENSOR_MESH_H
#define CORE_TENSOR_MESH_H

#include "core/base/buf.h"
#include "core/base/error.h"
#include "core/tensor/box.h"

#define TENSOR_MESH_RANKS_MAX (UINT32_C(1) << 24) /* of one mesh; a rank's number is below it too */
#define TENSOR_MESH_NAME_MAX 65u                  /* bytes of a dimension's name, NUL included */

struct tensor_mesh {
	uint32_t ndim;                  /* 1 to TENSOR_MAX_DIMS, outermost first */
	uint32_t size[TENSOR_MAX_DIMS]; /* each >= 1 */
	/* unique; a letter or _, then letters, digits and _ */
	char name[TENSOR_MAX_DIMS][TENSOR_MESH_NAME_MAX];
	uint32_t count;                 /* ranks: the product of the sizes */
	uint32_t *ranks;                /* by position; NULL: 0 .. count-1 */
	uint32_t *order;                /* positions by ascending rank; NULL likewise */
};

/* ranks NULL: 0 .. count-1; else nranks of them (copied), each once, as many as the product of the sizes. -EINVAL (an
 * argument, named in err), -BASE_ELIMIT (dimensions, ranks), -ENOMEM. Free with tensor_mesh_free. */
int tensor_mesh_new(uint32_t ndim, const char *const *names, const uint32_t *sizes, const uint32_t *ranks,
	uint32_t nranks, struct tensor_mesh **ret_m, struct base_error *err);
/* "pp=2,dp=2,tp=2", outermost first; spaces around the words are allowed. */
int tensor_mesh_parse(const char *text, const uint32_t *ranks, uint32_t nranks, struct tensor_mesh **ret_m,
	struct base_error *err);
void tensor_mesh_free(struct tensor_mesh *m);                          /* NULL-safe */
void tensor_mesh_print(const struct tensor_mesh *m, struct base_buf *b); /* as tensor_mesh_parse reads it */

int tensor_mesh_dim(const struct tensor_mesh *m, const char *name);    /* number of a dimension, or -ENOENT */
/* "dp,tp" as a mask, in any order. -EINVAL names the one that is not there, or is given twice. */
int tensor_mesh_dims(const struct tensor_mesh *m, const char *names, uint32_t *ret_dims, struct base_error *err);
/* Coordinate of a rank, ndim numbers; -ENOENT: the rank is not in the mesh. O(log count), O(1) where ranks is NULL. */
int tensor_mesh_coordinate(const struct tensor_mesh *m, uint32_t rank, uint32_t *ret_coordinate);
int tensor_mesh_rank(const struct tensor_mesh *m, const uint32_t *coordinate, uint32_t *ret_rank); /* or -ERANGE */
uint32_t tensor_mesh_rank_at(const struct tensor_mesh *m, uint32_t position); /* UINT32_MAX: beyond count */

/* Ranks that agree with `rank` in all dimensions but `dims`, in mesh order (row-major over dims). Their number:
 * tensor_mesh_group_size (0 for dims beyond ndim), which is what `ret_ranks` needs room for. -ENOENT, -EINVAL. */
uint32_t tensor_mesh_group_size(const struct tensor_mesh *m, uint32_t dims);
int tensor_mesh_group(const struct tensor_mesh *m, uint32_t rank, uint32_t dims, uint32_t *ret_ranks);
/* The position of `rank` in that group, 0 for its first; -ENOENT, -EINVAL. */
int64_t tensor_mesh_group_position(const struct tensor_mesh *m, uint32_t rank, uint32_t dims);
/* That group as a mesh of the dimensions `dims` (at least one), in the order of m. -EINVAL (dims), -ENOENT (rank),
 * -ENOMEM. */
int tensor_mesh_sub(const struct tensor_mesh *m, uint32_t rank, uint32_t dims, struct tensor_mesh **ret_m,
	struct base_error *err);
/* The rank k further along `dim`, everything else equal; wrap: modulo the size. -ENOENT (rank), -EINVAL (dim), -ERANGE
 * (beyond the end). The neighbour of a sub-mesh along another dimension is the sub-mesh of its members' neighbours:
 * tensor_mesh_sub of the neighbour. */
int tensor_mesh_neighbour(const struct tensor_mesh *m, uint32_t rank, uint32_t dim, int64_t k, bool wrap,
	uint32_t *ret_rank);

/* Where ranks run. Without a table: rank / devices, rank % devices. With one (n entries each, by rank): what it says.
 * -EINVAL (no devices and no table, or half a table), -ENOENT (beyond the table). */
struct tensor_hosts { uint32_t devices; const uint32_t *host, *device; uint32_t n; };
int tensor_hosts_find(const struct tensor_hosts *h, uint32_t rank, uint32_t *ret_host, uint32_t *ret_device);

#endif
