/* SPDX-License-Identifier: Apache-2.0
 *
 * A .npy file is "\x93NUMPY" | u8 major | u8 minor | u16 (1.0) or u32 (2.0, 3.0) length | a Python dict literal |
 * data. The reader accepts exactly the literals that numpy.lib.format writes: a dict with the keys descr (a string),
 * fortran_order (True or False) and shape (a tuple of integers, each with an optional `L`, as Python 2 wrote them), in
 * any order. Nothing is evaluated and nothing recurses. */
#include "core/view/npy.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "core/base/le.h"

#define MAGIC "\x93NUMPY"
#define MAX_HEADER_BYTES 65536u

void view_npy_header(enum tensor_dtype dtype, const struct tensor_shape *shape,
	char header[static VIEW_NPY_DATA_OFFSET])
{
	char dims[TENSOR_MAX_DIMS * 22 + 4];
	int n = 0;
	dims[0] = 0;
	for (uint32_t d = 0; d < shape->ndim && d < TENSOR_MAX_DIMS; d++)
		n += snprintf(dims + n, sizeof dims - (size_t)n, d + 1 < shape->ndim ? "%" PRIu64 ", " : "%" PRIu64,
			shape->dim[d]);
	memcpy(header, MAGIC "\x01", 8); /* version 1.0: the literal's NUL is the minor number */
	base_put16(header + 8, VIEW_NPY_DATA_OFFSET - 10);
	n = 10 + snprintf(header + 10, VIEW_NPY_DATA_OFFSET - 10,
		"{'descr': '%s', 'fortran_order': False, 'shape': (%s%s), }",
		tensor_dtype_npy(dtype), dims, shape->ndim == 1 ? "," : "");
	memset(header + n, ' ', VIEW_NPY_DATA_OFFSET - (size_t)n);
	header[VIEW_NPY_DATA_OFFSET - 1] = '\n';
}

struct literal {
	const char *at, *end;
	struct base_error *err;
	char descr[32];
	bool has_descr, has_order, has_shape, fortran;
	struct tensor_shape shape;
};

static int malformed(struct literal *l, const char *what)
{
	return base_error_set(l->err, -BASE_EFORMAT,
		"the .npy header is not a dict of descr, fortran_order and shape: %s", what);
}

static void skip_space(struct literal *l)
{
	while (l->at < l->end && (*l->at == ' ' || *l->at == '\t' || *l->at == '\n' || *l->at == '\r'))
		l->at++;
}

static bool take(struct literal *l, char c)
{
	skip_space(l);
	if (l->at == l->end || *l->at != c)
		return false;
	l->at++;
	return true;
}

static bool take_word(struct literal *l, const char *word)
{
	size_t n = strlen(word);
	if ((size_t)(l->end - l->at) < n || memcmp(l->at, word, n) != 0)
		return false;
	l->at += n;
	return true;
}

/* A quoted string without escapes, cut to room - 1 bytes (no key or known descr is that long). */
static int take_string(struct literal *l, char *out, size_t room)
{
	char quote;
	size_t n = 0;

	skip_space(l);
	if (l->at == l->end || (*l->at != '\'' && *l->at != '"'))
		return malformed(l, "a quoted string is missing");
	quote = *l->at++;
	for (; l->at < l->end && *l->at != quote; l->at++) {
		if ((unsigned char)*l->at < 0x20 || *l->at == '\\' || (unsigned char)*l->at >= 0x7f)
			return malformed(l, "a string holds more than plain characters");
		if (n + 1 < room)
			out[n++] = *l->at;
	}
	if (l->at == l->end)
		return malformed(l, "a string does not end");
	l->at++;
	out[n] = 0;
	return 0;
}

static int take_integer(struct literal *l, uint64_t *ret)
{
	uint64_t v = 0;
	const char *start = l->at;
	for (; l->at < l->end && *l->at >= '0' && *l->at <= '9'; l->at++)
		if (base_mul_overflows(v, 10, &v) || base_add_overflows(v, (uint64_t)(*l->at - '0'), &v))
			return base_error_set(l->err, -BASE_EFORMAT, "the shape in the .npy header overflows");
	if (l->at == start)
		return malformed(l, "the shape holds something that is not a natural number");
	if (l->at < l->end && *l->at == 'L')
		l->at++;
	*ret = v;
	return 0;
}

static int take_shape(struct literal *l)
{
	if (!take(l, '('))
		return malformed(l, "the shape is not a tuple");
	for (bool comma = true; !take(l, ')'); ) {
		uint64_t v = 0;
		int r;

		if (!comma)
			return malformed(l, "the shape does not end");
		r = take_integer(l, &v);
		if (r < 0)
			return r;
		if (l->shape.ndim == TENSOR_MAX_DIMS)
			return base_error_set(l->err, -BASE_EFORMAT,
				"the shape in the .npy header has more than %u dimensions", TENSOR_MAX_DIMS);
		l->shape.dim[l->shape.ndim++] = v;
		comma = take(l, ',');
		if (!comma && l->shape.ndim == 1)
			return malformed(l, "the shape is not a tuple");
	}
	return 0;
}

static int take_value(struct literal *l, const char *key)
{
	if (strcmp(key, "descr") == 0 && !l->has_descr) {
		l->has_descr = true;
		skip_space(l);
		if (l->at < l->end && *l->at == '[')
			return base_error_set(l->err, -BASE_EFORMAT,
				"the .npy file holds records (a structured dtype), which are not a tensor");
		return take_string(l, l->descr, sizeof l->descr);
	}
	if (strcmp(key, "fortran_order") == 0 && !l->has_order) {
		l->has_order = true;
		skip_space(l);
		l->fortran = take_word(l, "True");
		return l->fortran || take_word(l, "False") ? 0
							   : malformed(l, "fortran_order is neither True nor False");
	}
	if (strcmp(key, "shape") == 0 && !l->has_shape) {
		l->has_shape = true;
		return take_shape(l);
	}
	return malformed(l, "an unknown key, or a key given twice");
}

static int take_dict(struct literal *l)
{
	if (!take(l, '{'))
		return malformed(l, "it does not begin with a brace");
	for (bool comma = true; !take(l, '}'); comma = take(l, ',')) {
		char key[32];
		int r;

		if (!comma)
			return malformed(l, "a comma is missing");
		r = take_string(l, key, sizeof key);
		if (r < 0)
			return r;
		if (!take(l, ':'))
			return malformed(l, "a colon is missing");
		if ((r = take_value(l, key)) < 0)
			return r;
	}
	skip_space(l);
	if (l->at != l->end)
		return malformed(l, "something follows the dict");
	return l->has_descr && l->has_order && l->has_shape ? 0 : malformed(l, "a key is missing");
}

/* Fortran order differs from C order only when two dimensions are longer than 1. */
static bool order_matters(const struct tensor_shape *s)
{
	unsigned longer = 0;
	for (uint32_t d = 0; d < s->ndim; d++) {
		if (s->dim[d] == 0)
			return false;
		longer += s->dim[d] > 1;
	}
	return longer > 1;
}

/* Finds the place and the length of the dict, by the fixed head. */
static int locate(const uint8_t *head, size_t len, uint64_t file_size, uint32_t *ret_at, uint32_t *ret_len,
	struct base_error *err)
{
	if (len < 10 || memcmp(head, MAGIC, 6) != 0)
		return base_error_set(err, -BASE_EFORMAT,
			"this is not a .npy file: it does not begin with the magic bytes");
	if (head[6] < 1 || head[6] > 3 || head[7] != 0)
		return base_error_set(err, -BASE_EFORMAT, "the .npy format version %u.%u is unknown", head[6], head[7]);
	*ret_at = head[6] == 1 ? 10 : 12;
	if (len < *ret_at)
		return base_error_set(err, -BASE_EFORMAT, "the .npy file ends inside its header");
	*ret_len = head[6] == 1 ? base_get16(head + 8) : base_get32(head + 8);
	if (*ret_len > file_size - *ret_at)
		return base_error_set(err, -BASE_EFORMAT, "the .npy header is longer than the file");
	if (*ret_len > MAX_HEADER_BYTES || *ret_len > len - *ret_at)
		return base_error_set(err, -BASE_EFORMAT, "the .npy header is longer than %u bytes", MAX_HEADER_BYTES);
	return 0;
}

/* |V1 or |V2 means bytes without a type. Packages that add types to numpy write it, sometimes with '<' instead of '|'.
 * '>' would be the other byte order. */
static bool is_void(const char *descr)
{
	return (descr[0] == '|' || descr[0] == '<') && (strcmp(descr + 1, "V1") == 0 || strcmp(descr + 1, "V2") == 0);
}

static int take_void(const char *descr, enum tensor_dtype said, enum tensor_dtype *ret_dtype, struct base_error *err)
{
	char may_be[256] = "";
	size_t used = 0;
	if (said && strcmp(tensor_dtype_npy(said) + 1, descr + 1) == 0) {
		*ret_dtype = said;
		return 0;
	}
	if (said)
		return base_error_set(err, -BASE_EFORMAT, "the .npy file holds items without a type ('%s'), not %s",
			descr, tensor_dtype_name(said));
	for (enum tensor_dtype d = TENSOR_BOOL; d < TENSOR_DTYPE_END; d++)
		if (strcmp(tensor_dtype_npy(d) + 1, descr + 1) == 0)
			used += (size_t)snprintf(may_be + used, sizeof may_be - used, "%s%s", used ? ", " : "",
				tensor_dtype_name(d));
	return base_error_set(err, -EINVAL,
		"the .npy file holds items without a type ('%s'), which numpy writes for types that it lacks; say "
		"which dtype they are: %s", descr, may_be);
}

static int take_dtype(const char *descr, enum tensor_dtype void_dtype, enum tensor_dtype *ret_dtype,
	struct base_error *err)
{
	if (is_void(descr))
		return take_void(descr, void_dtype, ret_dtype, err);
	if (tensor_dtype_from_npy(descr, ret_dtype) < 0)
		return base_error_set(err, -BASE_EFORMAT, "the .npy file's dtype '%s' has no counterpart here", descr);
	return 0;
}

int view_npy_parse(const void *head, size_t head_len, uint64_t file_size, enum tensor_dtype void_dtype,
	enum tensor_dtype *ret_dtype, struct tensor_shape *ret_shape, uint64_t *ret_data_offset,
	struct base_error *err)
{
	struct literal l = {.err = err};
	uint32_t at = 0, len = 0;
	uint64_t items = 0, want, has;
	enum tensor_dtype dtype;
	unsigned item_bytes;
	int r;

	if (head_len > file_size)
		head_len = file_size;
	r = locate(head, head_len, file_size, &at, &len, err);
	if (r < 0)
		return r;
	l.at = (const char *)head + at;
	l.end = l.at + len;
	if ((r = take_dict(&l)) < 0)
		return r;
	if ((r = take_dtype(l.descr, void_dtype, &dtype, err)) < 0)
		return r;
	if (l.fortran && order_matters(&l.shape))
		return base_error_set(err, -BASE_EFORMAT,
			"the .npy file is in Fortran order: save it in C order (numpy.ascontiguousarray)");
	item_bytes = tensor_dtype_bytes(dtype);
	if (tensor_shape_items(&l.shape, item_bytes, &items) < 0)
		return base_error_set(err, -BASE_EFORMAT, "the shape in the .npy header overflows");
	want = items * item_bytes;
	has = file_size - at - len;
	if (want != has)
		return base_error_set(err, -BASE_EFORMAT,
			"the .npy file is too %s: its shape needs %" PRIu64 " bytes of data, and it has %" PRIu64,
			has < want ? "short" : "long", want, has);
	*ret_dtype = dtype;
	*ret_shape = l.shape;
	*ret_data_offset = (uint64_t)at + len;
	return 0;
}
