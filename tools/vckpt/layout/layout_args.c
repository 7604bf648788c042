/* SPDX-License-Identifier: Apache-2.0
 *
 * Arguments of mesh, layout and reshard, and the words that they write; see layout_args.h. */
#include "tools/vckpt/layout/layout_args.h"

#include <inttypes.h>
#include <signal.h>
#include <string.h>

#define SHOWN 200 /* bytes of a value that an error repeats, at most */

/* The sentence of an error that an option's value caused; for lack of memory no option is named. */
static int refuse(const struct tool *t, const char *option, const char *value, const struct base_error *err)
{
	if (err->code == -ENOMEM || err->code == -EIO)
		return tool_fail(t, err);
	return tool_usage(t, "%s %.*s: %s", option, SHOWN, value,
		err->text[0] ? err->text : base_error_name(err->code));
}

int64_t tool_numbers_read(const char *text, const char *separators, uint64_t max, uint64_t *ret, size_t room)
{
	const char *p = text;
	bool over = false;

	for (size_t n = 0; n < room; p++) {
		uint64_t v = 0;

		p += strspn(p, " ");
		if (*p < '0' || *p > '9')
			return -EINVAL;
		for (; *p >= '0' && *p <= '9'; p++)
			over |= base_mul_overflows(v, 10, &v) || base_add_overflows(v, (uint64_t)(*p - '0'), &v);
		over |= v > max;
		p += strspn(p, " ");
		ret[n++] = v;
		if (!*p)
			return over ? -ERANGE : (int64_t)n;
		if (*p != separators[(n - 1) % strlen(separators)])
			return -EINVAL;
	}
	return -E2BIG;
}

int tool_number_read(const struct tool *t, const char *option, const char *text, uint64_t max, uint64_t *ret)
{
	int64_t n = tool_numbers_read(text, ",", max, ret, 1);

	if (n == -ERANGE)
		return tool_usage(t, "%s %.*s is above %" PRIu64, option, SHOWN, text, max);
	return n == 1 ? 0 : tool_usage(t, "%s %.*s: a number is needed", option, SHOWN, text);
}

int tool_ranks_read(const struct tool *t, struct tool_ranks *ranks, const struct tool_mesh *m)
{
	uint64_t v = 0;
	int code = ranks->text ? tool_number_read(t, "--rank", ranks->text, UINT32_MAX, &v) : 0;

	ranks->one = ranks->text;
	ranks->rank = (uint32_t)v;
	ranks->mesh = m->mesh;
	ranks->count = ranks->one ? 1 : m->mesh->count;
	if (code || ranks->count <= TOOL_RANKS_MAX)
		return code;
	return tool_failed(t, "%s %.*s: %" PRIu32 " ranks are too many to describe; --rank N picks one", m->option,
		SHOWN, m->text, m->mesh->count);
}

uint32_t tool_ranks_at(const struct tool_ranks *ranks, uint32_t i)
{
	return ranks->one ? ranks->rank : tensor_mesh_rank_at(ranks->mesh, i);
}

/* The same dimensions over other ranks: "0,4,1,5". */
static int reorder(const struct tool *t, struct tool_mesh *m)
{
	size_t room = strlen(m->order) / 2 + 1; /* a digit and a comma for each */
	base_cleanup_free uint64_t *numbers = calloc(room, sizeof *numbers);
	base_cleanup_free uint32_t *ranks = calloc(room, sizeof *ranks);
	const char *names[TENSOR_MAX_DIMS];
	struct tensor_mesh *ordered;
	struct base_error err = {0};
	int64_t n;

	if (!numbers || !ranks)
		return tool_fail(t, &(struct base_error){.code = -ENOMEM});
	n = tool_numbers_read(m->order, ",", TENSOR_MESH_RANKS_MAX - 1, numbers, room);
	if (n == -ERANGE)
		return tool_usage(t, "%s %.*s: a rank is above %u", m->order_option, SHOWN, m->order,
			TENSOR_MESH_RANKS_MAX - 1);
	if (n < 0)
		return tool_usage(t, "%s %.*s: give ranks separated by commas", m->order_option, SHOWN, m->order);
	for (int64_t i = 0; i < n; i++)
		ranks[i] = (uint32_t)numbers[i];
	for (uint32_t d = 0; d < m->mesh->ndim; d++)
		names[d] = m->mesh->name[d];
	if (tensor_mesh_new(m->mesh->ndim, names, m->mesh->size, ranks, (uint32_t)n, &ordered, &err) < 0)
		return refuse(t, m->order_option, m->order, &err);
	tensor_mesh_free(m->mesh);
	m->mesh = ordered;
	return 0;
}

int tool_mesh_read(const struct tool *t, struct tool_mesh *m)
{
	struct base_error err = {0};
	int r;

	if (!m->text)
		return tool_usage(t, "%s is missing: as dp=2,tp=4", m->option);
	if (m->text[0] == '@')
		r = tool_mesh_from_json(fopen(m->text + 1, "re"), &m->mesh, &err);
	else if (m->text[strspn(m->text, " \t\r\n")] == '{')
		r = tool_mesh_from_json(fmemopen((char *)m->text, strlen(m->text), "r"), &m->mesh, &err);
	else
		r = tensor_mesh_parse(m->text, NULL, 0, &m->mesh, &err);
	if (r < 0)
		return refuse(t, m->option, m->text, &err);
	return m->order ? reorder(t, m) : 0;
}

int tool_sharding_read(const struct tool *t, const struct tensor_shape *shape, unsigned item_bytes,
	struct tool_sharding *s)
{
	struct base_error err = {0};
	int code = tool_mesh_read(t, &s->mesh);

	if (code)
		return code;
	if (!s->place)
		return tool_usage(t, "%s is missing: a word for each dimension of the mesh, as R,S(0)",
			s->place_option);
	if (tensor_placements_parse(s->place, &s->placements, &err) < 0)
		return refuse(t, s->place_option, s->place, &err);
	s->sharding = (struct tensor_sharding){.shape = *shape, .item_bytes = item_bytes, .mesh = s->mesh.mesh,
		.placement = s->placements->at};
	if (tensor_sharding_check(&s->sharding, s->placements->n, &err) < 0)
		return refuse(t, s->place_option, s->place, &err);
	return 0;
}

void tool_sharding_release(struct tool_sharding *s)
{
	tensor_mesh_free(s->mesh.mesh);
	free(s->placements);
}

static int read_shape(const struct tool *t, const char *text, struct tensor_shape *ret_shape)
{
	int64_t n;

	*ret_shape = (struct tensor_shape){0};
	if (!strcmp(text, "scalar"))
		return 0;
	n = tool_numbers_read(text, ",", UINT64_MAX, ret_shape->dim, TENSOR_MAX_DIMS);
	if (n == -ERANGE)
		return tool_usage(t, "--shape %.*s: a size is above 2^64-1", SHOWN, text);
	if (n == -E2BIG)
		return tool_usage(t, "--shape %.*s: a tensor has at most %u dimensions", SHOWN, text, TENSOR_MAX_DIMS);
	if (n < 0)
		return tool_usage(t, "--shape %.*s: give sizes separated by commas, or \"scalar\"", SHOWN, text);
	ret_shape->ndim = (uint32_t)n;
	return 0;
}

static int refuse_dtype(const struct tool *t, const char *text)
{
	char names[700] = "";
	size_t len = 0;

	for (unsigned i = 1; i < TENSOR_DTYPE_END && len < sizeof names; i++) {
		const char *name = tensor_dtype_name((enum tensor_dtype)i);
		const char *alias = tensor_dtype_alias((enum tensor_dtype)i);
		bool same = strcmp(name, alias) == 0;

		len += (size_t)snprintf(names + len, sizeof names - len, "%s%s%s%s%s", i > 1 ? ", " : "", name,
			same ? "" : " (", same ? "" : alias, same ? "" : ")");
	}
	return tool_usage(t, "--dtype %.*s: there is no such type; there are %s", SHOWN, text, names);
}

int tool_tensor_read(const struct tool *t, const char *shape, const char *dtype, struct tensor_shape *ret_shape,
	enum tensor_dtype *ret_dtype)
{
	uint64_t items;
	int code;

	if (!shape)
		return tool_usage(t, "--shape is missing: as 4096,1024, or \"scalar\"");
	code = read_shape(t, shape, ret_shape);
	if (code)
		return code;
	if (!dtype)
		return tool_usage(t, "--dtype is missing: as bf16");
	if (tensor_dtype_parse(dtype, ret_dtype) < 0)
		return refuse_dtype(t, dtype);
	if (tensor_shape_items(ret_shape, tensor_dtype_bytes(*ret_dtype), &items) < 0)
		return tool_usage(t, "--shape %.*s: more than 2^62 bytes of %s", SHOWN, shape, dtype);
	return 0;
}

int tool_flat_read(const struct tool *t, const char *text, struct tensor_flat *ret_flat)
{
	uint64_t v[3] = {0};
	int64_t n = tool_numbers_read(text, ":/", UINT64_MAX, v, BASE_COUNT(v));

	if (n == -ERANGE)
		return tool_usage(t, "--flat %.*s: a number is above 2^64-1", SHOWN, text);
	if (n < 2)
		return tool_usage(t, "--flat %.*s: give A:B or A:B/L, items of the local tensor", SHOWN, text);
	if (n == 3 && v[2] == 0)
		return tool_usage(t, "--flat %.*s: the padded length must be above 0", SHOWN, text);
	if (v[0] > v[1])
		return tool_usage(t, "--flat %.*s: the range ends before it begins", SHOWN, text);
	*ret_flat = (struct tensor_flat){.from = v[0], .to = v[1], .len = v[2]};
	return 0;
}

/* ---- writing ---- */

char *tool_coordinate_text(const struct tensor_mesh *m, uint32_t rank, char text[static TOOL_SHAPE_TEXT])
{
	uint32_t at[TENSOR_MAX_DIMS];
	size_t len = 0;

	if (tensor_mesh_coordinate(m, rank, at) < 0)
		return strcpy(text, "-");
	for (uint32_t d = 0; d < m->ndim; d++)
		len += (size_t)snprintf(text + len, TOOL_SHAPE_TEXT - len, "%s%" PRIu32, d ? "," : "", at[d]);
	return text;
}

char *tool_names_text(const struct tensor_mesh *m, uint32_t dims, char text[static TOOL_NAMES_TEXT])
{
	size_t len = 0;

	text[0] = 0;
	for (uint32_t d = 0; d < m->ndim; d++)
		if (dims >> d & 1)
			len += (size_t)snprintf(text + len, TOOL_NAMES_TEXT - len, "%s%s", len ? "," : "",
				m->name[d]);
	return text;
}

int tool_coordinate_width(const struct tensor_mesh *m)
{
	int names = (int)strlen(TOOL_NAMES(m, UINT32_MAX)), width = -1;

	for (uint32_t d = 0; d < m->ndim; d++)
		width += tool_digits(m->size[d] - 1) + 1;
	return width > names ? width : names;
}

void tool_ranks_text(const uint32_t *ranks, size_t n, struct base_buf *b)
{
	for (size_t i = 0, end; i < n; i = end) {
		for (end = i + 1; end < n && ranks[end] == ranks[end - 1] + 1; end++)
			;
		if (end - i == 2) /* two neighbours read better as two */
			end--;
		base_buf_printf(b, "%s%" PRIu32, i ? "," : "", ranks[i]);
		if (end - i > 1)
			base_buf_printf(b, "-%" PRIu32, ranks[end - 1]);
	}
}

int tool_digits(uint64_t v)
{
	int n = 1;

	while (v /= 10)
		n++;
	return n;
}

void tool_json_numbers32(const uint32_t *v, uint32_t n)
{
	putchar('[');
	for (uint32_t i = 0; i < n; i++)
		printf("%s%" PRIu32, i ? ", " : "", v[i]);
	putchar(']');
}

void tool_tensor_print(const struct tensor_shape *shape, enum tensor_dtype dtype)
{
	uint64_t items = 0;

	tensor_shape_items(shape, tensor_dtype_bytes(dtype), &items); /* checked when it was read */
	printf("%s %s, %s", TOOL_SHAPE(shape), tensor_dtype_name(dtype), TOOL_BYTES(items * tensor_dtype_bytes(dtype)));
}

void tool_sharding_print(const struct tool_sharding *s)
{
	struct base_buf words base_cleanup_buf = BASE_BUF_INIT;

	tensor_mesh_print(s->mesh.mesh, &words);
	base_buf_append_text(&words, " as ");
	tensor_placements_print(s->placements->at, s->placements->n, &words);
	if (!words.error)
		printf(" %.*s", (int)words.len, (const char *)words.data);
}

void tool_output_begin(void)
{
	signal(SIGPIPE, SIG_IGN);
}

int tool_output_end(const struct tool *t)
{
	if (fflush(stdout) != EOF && !ferror(stdout))
		return TOOL_DONE;
	fprintf(stderr, "vckpt %s: cannot write to standard output: %s\n", t->command->name, strerror(errno));
	return TOOL_FAILED;
}
