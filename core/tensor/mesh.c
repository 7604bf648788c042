/* SPDX-License-Identifier: Apache-2.0
 *
 * mesh: see the header.
 *
 * Idea. A mesh is a row-major array of ranks. All questions are asked of positions in that array, 0 .. count-1, which
 * are mixed-radix numbers whose digits are the coordinate: a group is the set of positions that differ in some digits,
 * a neighbour is a position with one digit changed. Ranks enter at the two ends only: `ranks` gives the rank at a
 * position, `order` (the positions sorted by their rank) is searched for the position of a rank. The usual order, rank
 * = position, stores neither; it is recognised also when it was given as a list.
 *
 * Memory. A mesh and its two tables are one allocation. Making one of n listed ranks costs O(n): the sort is by radix,
 * three bytes of a rank, and left out where the ranks ascend, as those of most sub-meshes do.
 *
 * Numbers from outside. A mesh that was made has 1 to 16 dimensions of at least 1 and at most 2^24 ranks, all below
 * 2^24: from there every product and sum fits 32 bits. What a caller passes later (ranks, coordinates, masks, steps)
 * is compared with these before it is used. */
#include "core/tensor/mesh.h"

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "core/base/cleanup.h"
#include "core/base/le.h"

#define MESH_QUOTE_MAX 80u /* bytes of foreign text in a sentence, NUL included */

BASE_CLEANUP_DEFINE(struct tensor_mesh *, tensor_mesh_free)

/* ---- words ------------------------------------------------------------------------------------------------------- */

struct mesh_quote { char text[MESH_QUOTE_MAX]; };

/* Foreign text, fit for a sentence: printable, and cut where it is long. */
static struct mesh_quote mesh_quote(const char *text, size_t len)
{
	struct mesh_quote q;
	size_t n = base_min(len, MESH_QUOTE_MAX - 4);

	for (size_t i = 0; i < n; i++)
		q.text[i] = text[i] >= 0x20 && text[i] < 0x7f ? text[i] : '?';
	memcpy(q.text + n, n < len ? "..." : "", n < len ? 4 : 1);
	return q;
}

static bool mesh_is_digit(char c)
{
	return c >= '0' && c <= '9';
}

/* Of a name; the locale has no say. */
static bool mesh_is_letter(char c)
{
	return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
}

static int mesh_check_name(const char *name, size_t len, struct base_error *err)
{
	bool good = len > 0 && mesh_is_letter(name[0]);

	for (size_t i = 1; i < len && good; i++)
		good = mesh_is_letter(name[i]) || mesh_is_digit(name[i]) || name[i] == '-';
	if (!good)
		return base_error_set(err, -EINVAL, "mesh: \"%s\" is not a name of a dimension (a letter or _, then "
			"letters, digits, _ and -)", mesh_quote(name, len).text);
	if (len >= TENSOR_MESH_NAME_MAX)
		return base_error_set(err, -EINVAL, "mesh: the name \"%s\" is longer than %u bytes",
			mesh_quote(name, len).text, TENSOR_MESH_NAME_MAX - 1);
	return 0;
}

/* ---- making ------------------------------------------------------------------------------------------------------ */

/* Names, sizes and their product into a mesh that has no ranks yet. */
static int mesh_set_dims(struct tensor_mesh *m, uint32_t ndim, const char *const *names, const uint32_t *sizes,
	struct base_error *err)
{
	uint64_t count = 1; /* at most 2^24 times a size of 32 bits */
	int r;

	if (ndim == 0)
		return base_error_set(err, -EINVAL, "mesh: no dimension is given");
	if (ndim > TENSOR_MAX_DIMS)
		return base_error_set(err, -BASE_ELIMIT, "mesh: more than %u dimensions", TENSOR_MAX_DIMS);
	for (uint32_t d = 0; d < ndim; d++) {
		size_t len = strlen(names[d]);

		r = mesh_check_name(names[d], len, err);
		if (r < 0)
			return r;
		if (tensor_mesh_dim(m, names[d]) >= 0)
			return base_error_set(err, -EINVAL, "mesh: dimension \"%s\" stands twice", names[d]);
		if (sizes[d] == 0)
			return base_error_set(err, -EINVAL, "mesh: dimension \"%s\" has size 0", names[d]);
		count *= sizes[d];
		if (count > TENSOR_MESH_RANKS_MAX)
			return base_error_set(err, -BASE_ELIMIT, "mesh: the sizes multiply to more than %u ranks",
				TENSOR_MESH_RANKS_MAX);
		memcpy(m->name[d], names[d], len + 1);
		m->size[d] = sizes[d];
		m->ndim = d + 1;
	}
	m->count = (uint32_t)count;
	return 0;
}

static bool mesh_is_identity(const uint32_t *ranks, uint32_t n)
{
	for (uint32_t i = 0; i < n; i++)
		if (ranks[i] != i)
			return false;
	return true;
}

static bool mesh_ascends(const uint32_t *ranks, uint32_t n)
{
	for (uint32_t i = 1; i < n; i++)
		if (ranks[i - 1] >= ranks[i])
			return false;
	return true;
}

/* One pass of the radix sort: positions `from` (NULL: 0 .. n-1) by byte `shift` of their rank, stable. */
static void mesh_sort_pass(const uint32_t *ranks, uint32_t n, unsigned shift, const uint32_t *from, uint32_t *to)
{
	uint32_t start[257] = {0};

	for (uint32_t i = 0; i < n; i++)
		start[(ranks[i] >> shift & 255) + 1]++;
	for (unsigned b = 0; b < 256; b++)
		start[b + 1] += start[b];
	for (uint32_t i = 0; i < n; i++) {
		uint32_t position = from ? from[i] : i;

		to[start[ranks[position] >> shift & 255]++] = position;
	}
}

/* Positions by ascending rank; ranks are below 2^24, so three bytes tell. */
static int mesh_sort(const uint32_t *ranks, uint32_t n, uint32_t *ret_order)
{
	base_cleanup_free uint32_t *other = NULL;

	if (mesh_ascends(ranks, n)) {
		for (uint32_t i = 0; i < n; i++)
			ret_order[i] = i;
		return 0;
	}
	other = malloc(n * sizeof *other);
	if (!other)
		return -ENOMEM;
	mesh_sort_pass(ranks, n, 0, NULL, ret_order);
	mesh_sort_pass(ranks, n, 8, ret_order, other);
	mesh_sort_pass(ranks, n, 16, other, ret_order);
	return 0;
}

/* The listed ranks, checked, into a mesh with room for its two tables behind it. */
static int mesh_set_ranks(struct tensor_mesh *m, const uint32_t *ranks, struct base_error *err)
{
	uint32_t n = m->count;

	for (uint32_t i = 0; i < n; i++)
		if (ranks[i] >= TENSOR_MESH_RANKS_MAX)
			return base_error_set(err, -BASE_ELIMIT, "mesh: rank %u is beyond %u", ranks[i],
				TENSOR_MESH_RANKS_MAX - 1);
	m->ranks = (uint32_t *)(m + 1);
	m->order = m->ranks + n;
	memcpy(m->ranks, ranks, n * sizeof *ranks);
	if (mesh_sort(m->ranks, n, m->order) < 0)
		return base_error_set(err, -ENOMEM, "mesh: no memory for %u ranks", n);
	for (uint32_t i = 1; i < n; i++)
		if (m->ranks[m->order[i - 1]] == m->ranks[m->order[i]])
			return base_error_set(err, -EINVAL, "mesh: rank %u stands twice", m->ranks[m->order[i]]);
	return 0;
}

int tensor_mesh_new(uint32_t ndim, const char *const *names, const uint32_t *sizes, const uint32_t *ranks,
	uint32_t nranks, struct tensor_mesh **ret_m, struct base_error *err)
{
	base_cleanup(tensor_mesh_free_p) struct tensor_mesh *m = NULL;
	struct tensor_mesh head = {0};
	size_t tables = 0;
	int r;

	r = mesh_set_dims(&head, ndim, names, sizes, err);
	if (r < 0)
		return r;
	if (ranks && nranks != head.count)
		return base_error_set(err, -EINVAL, "mesh: the sizes multiply to %u, but %u ranks are given",
			head.count, nranks);
	if (ranks && !mesh_is_identity(ranks, nranks))
		tables = 2 * (size_t)nranks * sizeof *ranks;
	m = malloc(sizeof *m + tables);
	if (!m)
		return base_error_set(err, -ENOMEM, "mesh: no memory for %u ranks", head.count);
	*m = head;
	if (tables) {
		r = mesh_set_ranks(m, ranks, err);
		if (r < 0)
			return r;
	}
	*ret_m = base_steal(m);
	return 0;
}

void tensor_mesh_free(struct tensor_mesh *m)
{
	free(m);
}

/* ---- text -------------------------------------------------------------------------------------------------------- */

/* Text without the blanks around it. */
static const char *mesh_trim(const char *text, size_t *len)
{
	while (*len > 0 && (*text == ' ' || *text == '\t')) {
		text++;
		(*len)--;
	}
	while (*len > 0 && (text[*len - 1] == ' ' || text[*len - 1] == '\t'))
		(*len)--;
	return text;
}

/* Digits only. false: something else stands there; a number beyond 32 bits becomes UINT32_MAX, which no mesh has. */
static bool mesh_parse_size(const char *text, size_t len, uint32_t *ret_size)
{
	uint64_t v = 0;

	for (size_t i = 0; i < len; i++) {
		if (!mesh_is_digit(text[i]))
			return false;
		v = base_min(v * 10 + (uint64_t)(text[i] - '0'), UINT32_MAX);
	}
	*ret_size = (uint32_t)v;
	return len > 0;
}

/* One word, "tp=8". */
static int mesh_parse_word(const char *word, size_t len, char *ret_name, uint32_t *ret_size, struct base_error *err)
{
	const char *equals = memchr(word, '=', len), *name, *size;
	size_t name_len, size_len;
	int r;

	name_len = equals ? (size_t)(equals - word) : 0;
	size_len = equals ? len - name_len - 1 : 0;
	name = mesh_trim(word, &name_len);
	size = mesh_trim(equals ? equals + 1 : word, &size_len);
	if (name_len == 0 || !mesh_parse_size(size, size_len, ret_size))
		return base_error_set(err, -EINVAL, "mesh: \"%s\" is not NAME=SIZE", mesh_quote(word, len).text);
	r = mesh_check_name(name, name_len, err);
	if (r < 0)
		return r;
	if (*ret_size > TENSOR_MESH_RANKS_MAX)
		return base_error_set(err, -BASE_ELIMIT, "mesh: \"%s\" is more than %u ranks",
			mesh_quote(word, len).text, TENSOR_MESH_RANKS_MAX);
	memcpy(ret_name, name, name_len);
	ret_name[name_len] = 0;
	return 0;
}

int tensor_mesh_parse(const char *text, const uint32_t *ranks, uint32_t nranks, struct tensor_mesh **ret_m,
	struct base_error *err)
{
	char name[TENSOR_MAX_DIMS][TENSOR_MESH_NAME_MAX];
	const char *names[TENSOR_MAX_DIMS], *at = text;
	uint32_t sizes[TENSOR_MAX_DIMS], ndim = 0;

	for (;;) {
		size_t whole = strcspn(at, ","), len = whole;
		const char *word = mesh_trim(at, &len);
		int r;

		if (len == 0 && ndim == 0 && !at[whole])
			return base_error_set(err, -EINVAL, "mesh: no dimension is given");
		if (len == 0)
			return base_error_set(err, -EINVAL, "mesh: word %u of \"%s\" is empty, not NAME=SIZE", ndim + 1,
				mesh_quote(text, strlen(text)).text);
		if (ndim == TENSOR_MAX_DIMS)
			return base_error_set(err, -BASE_ELIMIT, "mesh: more than %u dimensions", TENSOR_MAX_DIMS);
		r = mesh_parse_word(word, len, name[ndim], &sizes[ndim], err);
		if (r < 0)
			return r;
		names[ndim] = name[ndim];
		ndim++;
		if (!at[whole])
			return tensor_mesh_new(ndim, names, sizes, ranks, nranks, ret_m, err);
		at += whole + 1;
	}
}

void tensor_mesh_print(const struct tensor_mesh *m, struct base_buf *b)
{
	for (uint32_t d = 0; d < m->ndim; d++)
		base_buf_printf(b, "%s%s=%u", d ? "," : "", m->name[d], m->size[d]);
}

int tensor_mesh_dim(const struct tensor_mesh *m, const char *name)
{
	for (uint32_t d = 0; d < m->ndim; d++)
		if (strcmp(m->name[d], name) == 0)
			return (int)d;
	return -ENOENT;
}

/* ---- positions --------------------------------------------------------------------------------------------------- */

/* Of a rank: 0 or -ENOENT. */
static int mesh_position(const struct tensor_mesh *m, uint32_t rank, uint32_t *ret_position)
{
	uint32_t low = 0, high = m->count; /* the answer, if any, stands in [low, high) */

	if (!m->ranks) {
		*ret_position = rank;
		return rank < m->count ? 0 : -ENOENT;
	}
	while (low < high) {
		uint32_t middle = low + (high - low) / 2;
		uint32_t there = m->ranks[m->order[middle]];

		if (there == rank) {
			*ret_position = m->order[middle];
			return 0;
		}
		if (there < rank)
			low = middle + 1;
		else
			high = middle;
	}
	return -ENOENT;
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
		return base_error_set(err, -EINVAL, "mesh: there is no dimension %u, only %u dimensions",
			m->ndim + (unsigned)__builtin_ctz(dims >> m->ndim), m->ndim);
	for (uint32_t d = 0; d < m->ndim; d++) {
		if (!(dims >> d & 1))
			continue;
		names[ndim] = m->name[d];
		sizes[ndim++] = m->size[d];
	}
	ranks = malloc(size * sizeof *ranks);
	if (!ranks)
		return base_error_set(err, -ENOMEM, "mesh: no memory for %u ranks", size);
	if (tensor_mesh_group(m, rank, dims, ranks) < 0)
		return base_error_set(err, -ENOENT, "mesh: rank %u is not in the mesh", rank);
	return tensor_mesh_new(ndim, names, sizes, ranks, size, ret_m, err);
}

/* The names of n dimensions with '_' between them. */
static int mesh_join_names(const struct tensor_mesh *m, uint32_t first, uint32_t n, char *ret_name,
	struct base_error *err)
{
	size_t at = 0;

	for (uint32_t d = first; d < first + n; d++) {
		size_t len = strlen(m->name[d]), join = d > first;

		if (at + join + len >= TENSOR_MESH_NAME_MAX)
			return base_error_set(err, -EINVAL, "mesh: the joined name of \"%s\" to \"%s\" is longer than "
				"%u bytes", m->name[first], m->name[first + n - 1], TENSOR_MESH_NAME_MAX - 1);
		if (join)
			ret_name[at++] = '_';
		memcpy(ret_name + at, m->name[d], len);
		at += len;
	}
	ret_name[at] = 0;
	return 0;
}

int tensor_mesh_flatten(const struct tensor_mesh *m, uint32_t first, uint32_t n, const char *name,
	struct tensor_mesh **ret_m, struct base_error *err)
{
	char joined[TENSOR_MESH_NAME_MAX];
	const char *names[TENSOR_MAX_DIMS];
	uint32_t sizes[TENSOR_MAX_DIMS], ndim = 0;
	int r;

	if (n == 0)
		return base_error_set(err, -EINVAL, "mesh: no dimension is given");
	if (first >= m->ndim || n > m->ndim - first)
		return base_error_set(err, -EINVAL, "mesh: there is no dimension %llu, only %u dimensions",
			(unsigned long long)first + n - 1, m->ndim);
	if (!name) {
		r = mesh_join_names(m, first, n, joined, err);
		if (r < 0)
			return r;
	}
	for (uint32_t d = 0; d < m->ndim; d++) {
		if (d > first && d < first + n) {
			sizes[ndim - 1] *= m->size[d];
			continue;
		}
		names[ndim] = d != first ? m->name[d] : name ? name : joined;
		sizes[ndim++] = m->size[d];
	}
	return tensor_mesh_new(ndim, names, sizes, m->ranks, m->count, ret_m, err);
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
		at = (at + k % size + size) % size; /* the remainder lies in (-size, size), whatever k is */
	else if (k < -at || k >= size - at)
		return -ERANGE;
	else
		at += k;
	coordinate[dim] = (uint32_t)at;
	*ret_rank = tensor_mesh_rank_at(m, mesh_ravel(m, coordinate));
	return 0;
}

int tensor_mesh_sub_neighbour(const struct tensor_mesh *m, uint32_t rank, uint32_t dims, uint32_t dim, int64_t k,
	bool wrap, struct tensor_mesh **ret_m, struct base_error *err)
{
	uint32_t other;
	int r;

	if (dim < m->ndim && (dims >> dim & 1))
		return base_error_set(err, -EINVAL, "mesh: dimension \"%s\" is one of the sub-mesh's own",
			m->name[dim]);
	r = tensor_mesh_neighbour(m, rank, dim, k, wrap, &other);
	if (r == -EINVAL)
		return base_error_set(err, r, "mesh: there is no dimension %u, only %u dimensions", dim, m->ndim);
	if (r == -ENOENT)
		return base_error_set(err, r, "mesh: rank %u is not in the mesh", rank);
	if (r < 0)
		return base_error_set(err, r, "mesh: rank %u has no neighbour at %+lld along \"%s\", which ends there",
			rank, (long long)k, m->name[dim]);
	return tensor_mesh_sub(m, other, dims, ret_m, err);
}

int tensor_mesh_map(const struct tensor_mesh *a, const uint32_t *coordinate, const struct tensor_mesh *b,
	uint32_t *ret_coordinate)
{
	uint32_t rank;
	int r = tensor_mesh_rank(a, coordinate, &rank);

	return r < 0 ? r : tensor_mesh_coordinate(b, rank, ret_coordinate);
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
