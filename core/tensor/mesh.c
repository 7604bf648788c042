/* SPDX-License-Identifier: Apache-2.0
 *
 * mesh: making meshes, from arguments and from text. See the header.
 *
 * Idea. A mesh is a row-major array of ranks. All questions (mesh_ask.c) are asked of positions in that array, 0 to
 * count-1, which are mixed-radix numbers whose digits are the coordinate. Ranks enter at the two ends only: `ranks` is
 * the rank at a position, `order` (the positions sorted by their rank) is searched for the position of a rank. The
 * usual order, rank = position, stores neither; it is recognised also when it was given as a list.
 *
 * Memory. A mesh and its two tables are one allocation. Making one of n listed ranks costs O(n): the sort is by radix,
 * three bytes of a rank, and left out where the ranks ascend, as those of most sub-meshes do.
 *
 * Numbers from outside. A mesh that was made has 1 to 16 dimensions of at least 1 and at most 2^24 ranks, all below
 * 2^24: from there every product and sum fits 32 bits. */
#include "core/tensor/mesh.h"

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "core/base/cleanup.h"
#include "core/base/le.h"
#include "core/base/plural.h"

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

/* May this character be in a name? Independent of the locale. */
static bool mesh_is_letter(char c)
{
	return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
}

static int mesh_check_name(const char *name, size_t len, struct base_error *err)
{
	bool good = len > 0 && mesh_is_letter(name[0]);

	for (size_t i = 1; i < len && good; i++)
		good = mesh_is_letter(name[i]) || mesh_is_digit(name[i]);
	if (!good)
		return base_error_set(err, -EINVAL, "mesh: \"%s\" is not a name of a dimension (a letter or _, then "
			"letters, digits and _)", mesh_quote(name, len).text);
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
			return base_error_set(err, -EINVAL, "mesh: dimension \"%s\" is given twice", names[d]);
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

/* Positions by ascending rank; ranks are below 2^24, so three bytes are enough. */
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
		return base_no_memory_for(err, "mesh of %u ranks", n);
	for (uint32_t i = 1; i < n; i++)
		if (m->ranks[m->order[i - 1]] == m->ranks[m->order[i]])
			return base_error_set(err, -EINVAL, "mesh: rank %u is given twice", m->ranks[m->order[i]]);
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
		return base_error_set(err, -EINVAL, "mesh: the sizes multiply to %u, but %u %s given",
			head.count, nranks, base_plural(nranks, "rank is", "ranks are"));
	if (ranks && !mesh_is_identity(ranks, nranks))
		tables = 2 * (size_t)nranks * sizeof *ranks;
	m = malloc(sizeof *m + tables);
	if (!m)
		return base_no_memory_for(err, "mesh of %u ranks", head.count);
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

/* Digits only. false: there is something else; a number beyond 32 bits becomes UINT32_MAX, which no mesh has. */
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

int tensor_mesh_dims(const struct tensor_mesh *m, const char *names, uint32_t *ret_dims, struct base_error *err)
{
	const char *at = names;
	uint32_t dims = 0;

	for (;;) {
		size_t whole = strcspn(at, ","), len = whole;
		const char *name = mesh_trim(at, &len);
		char text[TENSOR_MESH_NAME_MAX];
		int d = -ENOENT;

		if (len < sizeof text) {
			memcpy(text, name, len);
			text[len] = 0;
			d = tensor_mesh_dim(m, text);
		}
		if (d < 0 || (dims >> d & 1))
			return base_error_set(err, -EINVAL, "mesh: \"%s\": %s", mesh_quote(name, len).text,
				d < 0 ? "there is no such dimension" : "the dimension is given twice");
		dims |= UINT32_C(1) << d;
		if (!at[whole])
			break;
		at += whole + 1;
	}
	*ret_dims = dims;
	return 0;
}

int tensor_mesh_dim(const struct tensor_mesh *m, const char *name)
{
	for (uint32_t d = 0; d < m->ndim; d++)
		if (strcmp(m->name[d], name) == 0)
			return (int)d;
	return -ENOENT;
}
