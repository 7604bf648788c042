/* SPDX-License-Identifier: Apache-2.0
 *
 * A header comes from anywhere and nothing in it can be trusted, so it is read by a parser for exactly its grammar: one
 * object of objects with the keys dtype, shape and data_offsets, and one object of strings, __metadata__. The parser
 * does not recurse (a nested value is refused at its first bracket) and builds no tree (a header of 100 MB of brackets
 * costs nothing), and every error names the tensor. A general JSON library would drop the first of two equal keys, or
 * fail without naming the key.
 *
 * Memory: names and metadata are decoded into one buffer, which is never longer than the header. While it grows, struct
 * entry has offsets into it, which become pointers at the end. ret_s->memory owns everything: tensors, metadata, then
 * text. */
#include "core/view/safetensors.h"

#include <inttypes.h>
#include <stdio.h>

#include "core/base/plural.h"
#include "core/base/text.h"
#include "core/view/view_internal.h"

#define EXCERPT_BYTES 256

struct entry {
	uint64_t name, begin, end;      /* name: offset in text */
	uint32_t name_len;
	uint8_t dtype;
	struct tensor_shape shape;
};
struct pair { uint64_t key, value; };

struct header {
	const uint8_t *start, *at, *end;
	struct base_error *err;
	struct base_buf text;           /* decoded strings, each with a NUL */
	struct base_buf entries, pairs; /* struct entry, struct pair */
	bool has_metadata;
	char name[EXCERPT_BYTES];       /* the tensor under way, for sentences; empty: none */
};

/* A name for an error message: control and broken bytes as \xNN, and a long name cut. */
static void excerpt(const char *name, size_t len, char out[static EXCERPT_BYTES])
{
	size_t used = 0, i = 0;
	while (i < len && used < EXCERPT_BYTES - 16) {
		unsigned char c = (unsigned char)name[i];
		size_t n = base_utf8_sequence(name + i, len - i);
		if (n == 0 || c < 0x20 || c == 0x7f) {
			used += (size_t)snprintf(out + used, 5, "\\x%02x", c);
			i++;
			continue;
		}
		memcpy(out + used, name + i, n);
		used += n;
		i += n;
	}
	memcpy(out + used, i < len ? "..." : "", i < len ? 4 : 1);
}

/* ---- tokens ---- */

static int malformed(struct header *h, const char *what)
{
	size_t at = (size_t)(h->at - h->start);
	if (h->name[0])
		return base_error_set(h->err, -BASE_EFORMAT, "tensor '%s': the header is not valid at byte %zu: %s",
			h->name, at, what);
	return base_error_set(h->err, -BASE_EFORMAT, "the header is not a JSON object of tensors: at byte %zu %s", at,
		what);
}

static void skip_space(struct header *h)
{
	while (h->at < h->end && (*h->at == ' ' || *h->at == '\t' || *h->at == '\n' || *h->at == '\r'))
		h->at++;
}

static bool take(struct header *h, char c)
{
	skip_space(h);
	if (h->at == h->end || *h->at != (uint8_t)c)
		return false;
	h->at++;
	return true;
}

static int expect(struct header *h, char c, const char *what)
{
	return take(h, c) ? 0 : malformed(h, what);
}

static int hex4(struct header *h, uint32_t *ret)
{
	uint32_t v = 0;
	if (h->end - h->at < 4)
		return malformed(h, "a \\u escape is cut short");
	for (unsigned i = 0; i < 4; i++, h->at++) {
		uint8_t c = *h->at, lower = c | 0x20;
		if (c >= '0' && c <= '9')
			v = v << 4 | (uint32_t)(c - '0');
		else if (lower >= 'a' && lower <= 'f')
			v = v << 4 | (uint32_t)(lower - 'a' + 10);
		else
			return malformed(h, "a \\u escape has other characters than hex digits");
	}
	*ret = v;
	return 0;
}

static void put_utf8(struct base_buf *b, uint32_t c)
{
	static const uint8_t first[] = {0, 0, 0xc0, 0xe0, 0xf0};
	size_t n = c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
	uint8_t s[4];
	for (size_t i = n; i-- > 1; c >>= 6)
		s[i] = (uint8_t)(0x80 | (c & 63));
	s[0] = (uint8_t)(first[n] | c);
	base_buf_append(b, s, n);
}

/* Behind a backslash. A NUL is kept as a byte: the check of the whole string refuses it together with broken UTF-8. */
static int take_escape(struct header *h)
{
	static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
	uint32_t c = 0, low = 0;
	const char *simple;
	int r;

	if (h->at == h->end)
		return malformed(h, "a string does not end");
	simple = *h->at ? strchr(from, *h->at) : NULL;
	if (simple) {
		h->at++;
		base_buf_append(&h->text, &to[simple - from], 1);
		return 0;
	}
	if (*h->at != 'u')
		return malformed(h, "a string has an unknown escape");
	h->at++;
	r = hex4(h, &c);
	if (r < 0)
		return r;
	if (c >= 0xdc00 && c < 0xe000)
		return malformed(h, "a string has half of a surrogate pair");
	if (c >= 0xd800 && c < 0xdc00) {
		if (h->end - h->at < 2 || h->at[0] != '\\' || h->at[1] != 'u')
			return malformed(h, "a string has half of a surrogate pair");
		h->at += 2;
		if ((r = hex4(h, &low)) < 0)
			return r;
		if (low < 0xdc00 || low >= 0xe000)
			return malformed(h, "a string has half of a surrogate pair");
		c = 0x10000 + ((c - 0xd800) << 10) + (low - 0xdc00);
	}
	put_utf8(&h->text, c);
	return 0;
}

/* Decodes a string into h->text, with a NUL behind it. */
static int take_string(struct header *h, const char *what, uint64_t *ret_at, uint32_t *ret_len)
{
	int r = expect(h, '"', what);
	size_t from = h->text.len;
	if (r < 0)
		return r;
	for (;;) {
		const uint8_t *plain = h->at;
		while (h->at < h->end && *h->at != '"' && *h->at != '\\' && *h->at >= 0x20)
			h->at++;
		base_buf_append(&h->text, plain, (size_t)(h->at - plain));
		if (h->at == h->end)
			return malformed(h, "a string does not end");
		if (*h->at == '"')
			break;
		if (*h->at++ != '\\')
			return malformed(h, "a string holds a bare control character");
		if ((r = take_escape(h)) < 0)
			return r;
	}
	h->at++;
	*ret_at = from;
	*ret_len = (uint32_t)(h->text.len - from);
	base_buf_append_zero(&h->text, 1);
	return h->text.error;
}

static int take_integer(struct header *h, const char *what, uint64_t *ret)
{
	uint64_t v = 0;
	const uint8_t *from;
	bool more;

	skip_space(h);
	from = h->at;
	for (; h->at < h->end && *h->at >= '0' && *h->at <= '9'; h->at++)
		if (base_mul_overflows(v, 10, &v) || base_add_overflows(v, (uint64_t)(*h->at - '0'), &v))
			return base_error_set(h->err, -BASE_EFORMAT, "tensor '%s': a number in its %s overflows",
				h->name, what);
	more = h->at < h->end && (*h->at == '.' || *h->at == 'e' || *h->at == 'E');
	if (h->at == from || more || (*from == '0' && h->at - from > 1))
		return base_error_set(h->err, -BASE_EFORMAT,
			"tensor '%s': its %s holds something that is not a natural number", h->name, what);
	*ret = v;
	return 0;
}

/* ---- a tensor ---- */

static int take_dtype(struct header *h, struct entry *e)
{
	uint64_t at;
	uint32_t len;
	enum tensor_dtype dtype;
	int r = take_string(h, "its dtype is not a string", &at, &len);
	const char *name;

	if (r < 0)
		return r;
	name = (const char *)h->text.data + at;
	if (strlen(name) != len || tensor_dtype_from_safetensors(name, &dtype) < 0) {
		char shown[EXCERPT_BYTES];
		excerpt(name, len, shown);
		return base_error_set(h->err, -BASE_EFORMAT, "tensor '%s': unknown dtype '%s'", h->name, shown);
	}
	h->text.len = at; /* its text is no longer needed */
	e->dtype = (uint8_t)dtype;
	return 0;
}

static int take_shape(struct header *h, struct entry *e)
{
	int r = expect(h, '[', "its shape is not a list");
	if (r < 0 || take(h, ']'))
		return r;
	do {
		uint64_t v;
		if ((r = take_integer(h, "shape", &v)) < 0)
			return r;
		if (e->shape.ndim == TENSOR_MAX_DIMS)
			return base_error_set(h->err, -BASE_EFORMAT,
				"tensor '%s': its shape has more than %u dimensions", h->name, TENSOR_MAX_DIMS);
		e->shape.dim[e->shape.ndim++] = v;
	} while (take(h, ','));
	return expect(h, ']', "its shape does not end");
}

static int take_offsets(struct header *h, struct entry *e)
{
	int r = expect(h, '[', "its data_offsets are not a list");
	if (r < 0 || (r = take_integer(h, "data_offsets", &e->begin)) < 0 || (r = expect(h, ',',
		"its data_offsets are not two")) < 0 ||
	    (r = take_integer(h, "data_offsets", &e->end)) < 0)
		return r;
	return expect(h, ']', "its data_offsets are not two");
}

static int take_field(struct header *h, struct entry *e, unsigned *seen)
{
	static const struct { const char *key; int (*f)(struct header *h, struct entry *e); } fields[] = {
		{"dtype", take_dtype}, {"shape", take_shape}, {"data_offsets", take_offsets}};
	const char *key;
	char shown[EXCERPT_BYTES];
	uint64_t at;
	uint32_t len;
	int r = take_string(h, "a key is missing", &at, &len);
	if (r < 0)
		return r;
	key = (const char *)h->text.data + at;
	for (unsigned i = 0; i < BASE_COUNT(fields); i++) {
		if (strlen(fields[i].key) != len || memcmp(key, fields[i].key, len) != 0)
			continue;
		if (*seen & 1u << i)
			return base_error_set(h->err, -BASE_EFORMAT, "tensor '%s': its %s is given twice", h->name,
				fields[i].key);
		*seen |= 1u << i;
		h->text.len = at;
		r = expect(h, ':', "a colon is missing");
		return r < 0 ? r : fields[i].f(h, e);
	}
	excerpt(key, len, shown);
	return base_error_set(h->err, -BASE_EFORMAT, "tensor '%s': unknown key '%s'", h->name, shown);
}

/* Shape, dtype and offsets have to agree. F4 counts elements in the file and pairs of them here. */
static int check_entry(struct header *h, struct entry *e)
{
	uint64_t items;
	unsigned item_bytes = tensor_dtype_bytes(e->dtype);
	if (e->dtype == TENSOR_F4_E2M1FN_X2) {
		if (e->shape.ndim == 0 || e->shape.dim[e->shape.ndim - 1] % 2)
			return base_error_set(h->err, -BASE_EFORMAT,
				"tensor '%s': the last dimension of an F4 tensor must be even", h->name);
		e->shape.dim[e->shape.ndim - 1] /= 2;
	}
	if (tensor_shape_items(&e->shape, item_bytes, &items) < 0)
		return base_error_set(h->err, -BASE_EFORMAT, "tensor '%s': the product of its shape overflows",
			h->name);
	if (e->end < e->begin)
		return base_error_set(h->err, -BASE_EFORMAT,
			"tensor '%s': its data_offsets run backwards (%" PRIu64 " to %" PRIu64 ")", h->name, e->begin,
			e->end);
	if (e->end - e->begin != items * item_bytes)
		return base_error_set(h->err, -BASE_EFORMAT,
			"tensor '%s': its shape needs %" PRIu64 " bytes, and its data_offsets span %" PRIu64,
			h->name, items * item_bytes, e->end - e->begin);
	return 0;
}

static int take_tensor(struct header *h, uint64_t name, uint32_t name_len)
{
	static const char *const missing[] = {"dtype", "shape", "data_offsets"};
	struct entry e = {.name = name, .name_len = name_len};
	unsigned seen = 0;
	int r = expect(h, '{', "its description is not an object");
	if (r < 0)
		return r;
	if (!take(h, '}')) {
		do
			if ((r = take_field(h, &e, &seen)) < 0)
				return r;
		while (take(h, ','));
		if ((r = expect(h, '}', "its description does not end")) < 0)
			return r;
	}
	for (unsigned i = 0; i < 3; i++)
		if (!(seen & 1u << i))
			return base_error_set(h->err, -BASE_EFORMAT, "tensor '%s': its %s is missing", h->name,
				missing[i]);
	if ((r = check_entry(h, &e)) < 0)
		return r;
	base_buf_append(&h->entries, &e, sizeof e);
	return h->entries.error;
}

/* ---- __metadata__ and the whole ---- */

static int take_pair(struct header *h)
{
	struct pair p;
	uint32_t key_len, value_len;
	char shown[EXCERPT_BYTES];
	int r = take_string(h, "a key of __metadata__ is missing", &p.key, &key_len);
	if (r < 0)
		return r;
	excerpt((const char *)h->text.data + p.key, key_len, shown);
	if (!proto_utf8_valid((const char *)h->text.data + p.key, key_len))
		return base_error_set(h->err, -BASE_EFORMAT, "__metadata__: the key '%s' holds a NUL or broken UTF-8",
			shown);
	if ((r = expect(h, ':', "a colon is missing in __metadata__")) < 0)
		return r;
	skip_space(h);
	if (h->at == h->end || *h->at != '"')
		return base_error_set(h->err, -BASE_EFORMAT, "__metadata__: the value of '%s' is not a string", shown);
	if ((r = take_string(h, "", &p.value, &value_len)) < 0)
		return r;
	if (!proto_utf8_valid((const char *)h->text.data + p.value, value_len))
		return base_error_set(h->err, -BASE_EFORMAT,
			"__metadata__: the value of '%s' holds a NUL or broken UTF-8", shown);
	base_buf_append(&h->pairs, &p, sizeof p);
	return h->pairs.error;
}

static int take_metadata(struct header *h)
{
	int r;

	if (h->has_metadata)
		return base_error_set(h->err, -BASE_EFORMAT, "__metadata__ is given twice");
	h->has_metadata = true;
	r = expect(h, '{', "__metadata__ is not an object");
	if (r < 0 || take(h, '}'))
		return r;
	do
		if ((r = take_pair(h)) < 0)
			return r;
	while (take(h, ','));
	return expect(h, '}', "__metadata__ does not end");
}

static int take_member(struct header *h)
{
	uint64_t at;
	uint32_t len;
	int r;
	const char *name;

	h->name[0] = 0;
	r = take_string(h, "a tensor's name is missing", &at, &len);
	if (r < 0)
		return r;
	name = (const char *)h->text.data + at;
	if (len == 0)
		return base_error_set(h->err, -BASE_EFORMAT, "a tensor's name is empty");
	excerpt(name, len, h->name);
	if (!proto_utf8_valid(name, len))
		return base_error_set(h->err, -BASE_EFORMAT, "tensor '%s': its name holds a NUL or broken UTF-8",
			h->name);
	if (len > PROTO_NAME_MAX)
		return base_error_set(h->err, -BASE_EFORMAT, "tensor '%s': its name is longer than %d bytes", h->name,
			PROTO_NAME_MAX);
	if (len == strlen(VIEW_SAFETENSORS_METADATA) && memcmp(name, VIEW_SAFETENSORS_METADATA, len) == 0) {
		h->text.len = at;
		h->name[0] = 0;
		r = expect(h, ':', "a colon is missing");
		return r < 0 ? r : take_metadata(h);
	}
	r = expect(h, ':', "a colon is missing");
	return r < 0 ? r : take_tensor(h, at, len);
}

static int take_header(struct header *h)
{
	int r;
	if (h->at == h->end || *h->at != '{')
		return malformed(h, "there is no opening brace");
	h->at++;
	if (!take(h, '}')) {
		do
			if ((r = take_member(h)) < 0)
				return r;
		while (take(h, ','));
		h->name[0] = 0;
		if ((r = expect(h, '}', "neither a comma nor the end follows a tensor")) < 0)
			return r;
	}
	h->name[0] = 0;
	while (h->at < h->end && *h->at == ' ')
		h->at++;
	return h->at == h->end ? 0 : malformed(h, "other bytes than spaces follow it");
}

/* ---- order, uniqueness, cover ---- */

static int compare_names(const struct view_safetensors_tensor *a, const struct view_safetensors_tensor *b)
{
	int c = memcmp(a->name, b->name, base_min(a->name_len, b->name_len));
	return c ? c : (a->name_len > b->name_len) - (a->name_len < b->name_len);
}

static int by_place(const void *pa, const void *pb)
{
	const struct view_safetensors_tensor *a = pa, *b = pb;
	if (a->begin != b->begin)
		return a->begin < b->begin ? -1 : 1;
	return a->end != b->end ? (a->end < b->end ? -1 : 1) : compare_names(a, b);
}

static int by_name(const void *pa, const void *pb)
{
	return compare_names(*(const struct view_safetensors_tensor *const *)pa,
		*(const struct view_safetensors_tensor *const *)pb);
}

static int by_key(const void *pa, const void *pb)
{
	return strcmp(((const struct proto_attribute *)pa)->key, ((const struct proto_attribute *)pb)->key);
}

static int check_unique(const struct view_safetensors *s, struct base_error *err)
{
	char shown[EXCERPT_BYTES];
	base_cleanup_free const struct view_safetensors_tensor **sorted = malloc(s->ntensors * sizeof *sorted + 1);
	if (!sorted)
		return -ENOMEM;
	for (uint32_t i = 0; i < s->ntensors; i++)
		sorted[i] = &s->tensors[i];
	qsort(sorted, s->ntensors, sizeof *sorted, by_name);
	for (uint32_t i = 1; i < s->ntensors; i++) {
		if (compare_names(sorted[i - 1], sorted[i]) != 0)
			continue;
		excerpt(sorted[i]->name, sorted[i]->name_len, shown);
		return base_error_set(err, -BASE_EFORMAT, "tensor '%s': its name is given twice", shown);
	}
	for (uint32_t i = 1; i < s->nmetadata; i++)
		if (strcmp(s->metadata[i - 1].key, s->metadata[i].key) == 0) {
			excerpt(s->metadata[i].key, strlen(s->metadata[i].key), shown);
			return base_error_set(err, -BASE_EFORMAT, "__metadata__: the key '%s' is given twice", shown);
		}
	return 0;
}

/* The tensors, which are sorted by place, have to fill the data exactly. */
static int check_cover(const struct view_safetensors *s, struct base_error *err)
{
	char shown[EXCERPT_BYTES], before[EXCERPT_BYTES] = "";
	uint64_t at = 0;
	for (uint32_t i = 0; i < s->ntensors; i++) {
		const struct view_safetensors_tensor *t = &s->tensors[i];
		excerpt(t->name, t->name_len, shown);
		if (t->end > s->data_bytes)
			return base_error_set(err, -BASE_EFORMAT,
				"tensor '%s': its data ends at byte %" PRIu64
				" of the data, and the file holds %" PRIu64,
				shown, t->end, s->data_bytes);
		if (t->begin > at)
			return base_error_set(err, -BASE_EFORMAT,
				"tensor '%s': there is a gap of %" PRIu64 " %s before its data", shown,
				t->begin - at, base_plural(t->begin - at, "byte", "bytes"));
		if (t->begin < at)
			return base_error_set(err, -BASE_EFORMAT, "tensor '%s': its data overlaps that of tensor '%s'",
				shown, before);
		at = t->end;
		memcpy(before, shown, sizeof before);
	}
	if (at != s->data_bytes && s->ntensors)
		return base_error_set(err, -BASE_EFORMAT,
			"tensor '%s' is the last one, and %" PRIu64 " %s its data", shown,
			s->data_bytes - at, base_plural(s->data_bytes - at, "byte follows", "bytes follow"));
	if (at != s->data_bytes)
		return base_error_set(err, -BASE_EFORMAT, "the header names no tensor, and %" PRIu64 " %s it",
			s->data_bytes, base_plural(s->data_bytes, "byte follows", "bytes follow"));
	return 0;
}

/* Moves what was read into one block of memory and turns offsets into pointers. */
static int assemble(struct header *h, struct view_safetensors *s)
{
	size_t n = h->entries.len / sizeof(struct entry), m = h->pairs.len / sizeof(struct pair);
	const struct entry *e = (const void *)h->entries.data;
	const struct pair *p = (const void *)h->pairs.data;
	char *memory = malloc(n * sizeof *s->tensors + m * sizeof *s->metadata + h->text.len + 1);
	char *text;

	if (!memory)
		return -ENOMEM;
	s->memory = memory;
	s->tensors = (void *)memory;
	s->metadata = (void *)(s->tensors + n);
	s->ntensors = (uint32_t)n;
	s->nmetadata = (uint32_t)m;
	text = (char *)(s->metadata + m);
	if (h->text.len)
		memcpy(text, h->text.data, h->text.len);
	for (size_t i = 0; i < n; i++)
		s->tensors[i] = (struct view_safetensors_tensor){.name = text + e[i].name, .name_len = e[i].name_len,
			.dtype = e[i].dtype,
			.shape = e[i].shape, .begin = e[i].begin, .end = e[i].end};
	for (size_t i = 0; i < m; i++)
		s->metadata[i] = (struct proto_attribute){text + p[i].key, text + p[i].value};
	qsort(s->tensors, n, sizeof *s->tensors, by_place);
	qsort(s->metadata, m, sizeof *s->metadata, by_key);
	return 0;
}

static int parse(struct header *h, struct view_safetensors *s)
{
	int r = take_header(h);
	if (r == 0)
		r = assemble(h, s);
	if (r == 0)
		r = check_unique(s, h->err);
	if (r == 0)
		r = check_cover(s, h->err);
	return r == -ENOMEM ? base_no_memory_for(h->err, "the header") : r;
}

int view_safetensors_parse(const void *header, size_t len, uint64_t file_size, struct view_safetensors *ret_s,
	struct base_error *err)
{
	struct header h = {.err = err};
	struct view_safetensors s = {0};
	uint64_t n;
	int r;

	if (len < 8 || file_size < 8)
		return base_error_set(err, -BASE_EFORMAT, "this is not a safetensors file: it is shorter than 8 bytes");
	n = base_get64(header);
	if (n > VIEW_SAFETENSORS_MAX_HEADER)
		return base_error_set(err, -BASE_EFORMAT,
			"its header claims %" PRIu64 " bytes, more than the format's limit of %u", n,
			VIEW_SAFETENSORS_MAX_HEADER);
	if (n > file_size - 8 || n > len - 8)
		return base_error_set(err, -BASE_EFORMAT,
			"its header claims %" PRIu64 " bytes, and the file ends after %" PRIu64, n, file_size - 8);
	h.start = h.at = (const uint8_t *)header + 8;
	h.end = h.at + n;
	s.data_offset = 8 + n;
	s.data_bytes = file_size - s.data_offset;
	r = parse(&h, &s);
	base_buf_release(&h.text);
	base_buf_release(&h.entries);
	base_buf_release(&h.pairs);
	if (r < 0) {
		view_safetensors_release(&s);
		return r;
	}
	*ret_s = s;
	return 0;
}

void view_safetensors_release(struct view_safetensors *s)
{
	free(s->memory);
	*s = (struct view_safetensors){0};
}
