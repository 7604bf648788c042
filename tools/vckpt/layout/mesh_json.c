/* SPDX-License-Identifier: Apache-2.0
 *
 * Meshes as JSON: {"dims": [["dp",2],["tp",4]], "ranks": [0,1,...]}. What `vckpt layout --json` prints can be given
 * back; without "ranks" the mesh is over 0, 1, 2 and so on. */
#include <inttypes.h>
#include <string.h>

#include "tools/vckpt/layout/layout_args.h"

#define TEXT_MAX (UINT64_C(192) << 20) /* bytes: 2^24 ranks fit */
#define MARKS_MAX 64u
#define COMMAS_MAX ((UINT64_C(1) << 24) + MARKS_MAX)

/* Counts of a text. A parser's values are far larger than their text, and memory follows their number; so what cannot
 * be a mesh is refused before it is parsed. Marks within strings count, too: no name has any. */
struct scan { uint64_t bytes, marks, commas; };

static bool scan_fits(struct scan *s, const char *text, size_t n)
{
	s->bytes += n;
	for (size_t i = 0; i < n; i++) {
		s->marks += text[i] == '{' || text[i] == '[' || text[i] == ':';
		s->commas += text[i] == ',';
	}
	return s->bytes <= TEXT_MAX && s->marks <= MARKS_MAX && s->commas <= COMMAS_MAX;
}

static int refuse_scan(const struct scan *s, struct base_error *err)
{
	if (s->bytes > TEXT_MAX)
		return base_error_set(err, -BASE_ELIMIT, "the file is longer than %" PRIu64 " bytes", TEXT_MAX);
	if (s->marks > MARKS_MAX)
		return base_error_set(err, -BASE_ELIMIT, "not JSON of a mesh: more than %u \"{\", \"[\" and \":\"",
			MARKS_MAX);
	return base_error_set(err, -BASE_ELIMIT, "not JSON of a mesh: more than %" PRIu64 " commas", COMMAS_MAX);
}

/* A number of at most 32 bits. */
static bool number(const json_t *value, uint32_t *ret)
{
	json_int_t v = json_integer_value(value);

	*ret = (uint32_t)v;
	return json_is_integer(value) && v >= 0 && v <= UINT32_MAX;
}

static int read_dims(const json_t *dims, const char **names, uint32_t *sizes, struct base_error *err)
{
	if (!json_is_array(dims))
		return base_error_set(err, -EINVAL, "\"dims\" must be an array, as [[\"dp\",2],[\"tp\",4]]");
	if (json_array_size(dims) > TENSOR_MAX_DIMS)
		return base_error_set(err, -BASE_ELIMIT, "a mesh has at most %u dimensions, not %zu", TENSOR_MAX_DIMS,
			json_array_size(dims));
	for (size_t d = 0; d < json_array_size(dims); d++) {
		const json_t *pair = json_array_get(dims, d);

		names[d] = json_string_value(json_array_get(pair, 0));
		if (json_array_size(pair) != 2 || !names[d] || !number(json_array_get(pair, 1), &sizes[d]))
			return base_error_set(err, -EINVAL, "dimension %zu of \"dims\" must be a name and a size, as "
				"[\"dp\",2]", d);
	}
	return 0;
}

static int read_ranks(const json_t *list, uint32_t **ret_ranks, uint32_t *ret_n, struct base_error *err)
{
	size_t n = json_array_size(list);
	base_cleanup_free uint32_t *ranks = NULL;

	if (!json_is_array(list))
		return base_error_set(err, -EINVAL, "\"ranks\" must be an array of numbers");
	if (n > TENSOR_MESH_RANKS_MAX)
		return base_error_set(err, -BASE_ELIMIT, "a mesh has at most %u ranks, not %zu",
			TENSOR_MESH_RANKS_MAX, n);
	ranks = calloc(n + 1, sizeof *ranks);
	if (!ranks)
		return base_no_memory_for(err, "mesh of %zu ranks", n);
	for (size_t i = 0; i < n; i++)
		if (!number(json_array_get(list, i), &ranks[i]))
			return base_error_set(err, -EINVAL, "number %zu of \"ranks\" is not a rank", i);
	*ret_ranks = base_steal(ranks);
	*ret_n = (uint32_t)n;
	return 0;
}

static int from_value(const json_t *value, struct tensor_mesh **ret_m, struct base_error *err)
{
	const json_t *dims = json_object_get(value, "dims"), *list = json_object_get(value, "ranks");
	const char *names[TENSOR_MAX_DIMS];
	uint32_t sizes[TENSOR_MAX_DIMS], n = 0;
	base_cleanup_free uint32_t *ranks = NULL;
	int r;

	if (!json_is_object(value) || !dims)
		return base_error_set(err, -EINVAL, "a mesh is {\"dims\": [[name, size], ...], \"ranks\": [...]}");
	if (json_object_size(value) > (list ? 2u : 1u))
		return base_error_set(err, -EINVAL, "a mesh has \"dims\" and \"ranks\", nothing else");
	r = read_dims(dims, names, sizes, err);
	if (r == 0 && list)
		r = read_ranks(list, &ranks, &n, err);
	if (r < 0)
		return r;
	return tensor_mesh_new((uint32_t)json_array_size(dims), names, sizes, ranks, n, ret_m, err);
}

struct source { FILE *file; struct scan scan; bool over; };

static size_t read_some(void *buffer, size_t len, void *arg)
{
	struct source *s = arg;
	size_t n = fread(buffer, 1, len, s->file);

	s->over = s->over || !scan_fits(&s->scan, buffer, n);
	return ferror(s->file) || s->over ? (size_t)-1 : n;
}

int tool_mesh_from_json(FILE *file, struct tensor_mesh **ret_m, struct base_error *err)
{
	struct source s = {.file = file};
	json_error_t fault = {0};
	json_t *value;
	int r;

	if (!file)
		return base_error_set(err, -errno, "cannot open the file: %s", strerror(errno));
	errno = 0;
	value = json_load_callback(read_some, &s, JSON_REJECT_DUPLICATES, &fault);
	if (value)
		r = from_value(value, ret_m, err);
	else if (ferror(file))
		r = base_error_set(err, -EINVAL, "cannot read the file: %s", strerror(errno));
	else if (s.over)
		r = refuse_scan(&s.scan, err);
	else
		r = base_error_set(err, -EINVAL, "not JSON: %s, line %d column %d", fault.text, fault.line,
			fault.column);
	json_decref(value);
	fclose(file);
	return r;
}

void tool_mesh_print_json(const struct tensor_mesh *m)
{
	fputs("{\"dims\": [", stdout);
	for (uint32_t d = 0; d < m->ndim; d++) /* a name has no character that JSON would escape */
		printf("%s[\"%s\", %" PRIu32 "]", d ? ", " : "", m->name[d], m->size[d]);
	fputs("], \"ranks\": [", stdout);
	for (uint32_t i = 0; i < m->count && !ferror(stdout); i++)
		printf("%s%" PRIu32, i ? ", " : "", tensor_mesh_rank_at(m, i));
	fputs("]}", stdout);
}
