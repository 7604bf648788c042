/* SPDX-License-Identifier: Apache-2.0
 *
 * JSON as views write it: headers of .safetensors, and manifest.json. */
#include "core/view/view_internal.h"

#include "core/base/text.h"

uint64_t view_text_flush(struct view_text *t)
{
	if (!t->keep) {
		t->dropped += t->b.len;
		t->b.len = 0;
	}
	return t->dropped + t->b.len;
}

int view_text_end(struct view_text *t, int r, struct base_buf *ret_text, uint64_t *ret_len)
{
	r = r < 0 ? r : t->b.error;
	*ret_len = view_text_flush(t);
	if (r == 0 && ret_text)
		*ret_text = t->b;
	else
		base_buf_release(&t->b);
	return r;
}

void view_json_text(struct base_buf *b, const char *text, size_t len)
{
	size_t from = 0;
	for (size_t i = 0; i < len; i++) {
		unsigned char c = (unsigned char)text[i];
		if (c >= 0x20 && c != '"' && c != '\\')
			continue;
		base_buf_append(b, text + from, i - from);
		if (c < 0x20)
			base_buf_printf(b, "\\u%04x", c);
		else
			base_buf_append(b, (char[]){'\\', (char)c}, 2);
		from = i + 1;
	}
	base_buf_append(b, text + from, len - from);
}

void view_json_string(struct base_buf *b, const char *text, size_t len)
{
	base_buf_append(b, "\"", 1);
	view_json_text(b, text, len);
	base_buf_append(b, "\"", 1);
}

void view_json_shape(struct base_buf *b, const struct tensor_shape *shape)
{
	for (uint32_t d = 0; d < shape->ndim; d++) {
		base_buf_append_text(b, d ? ", " : "[");
		view_json_number(b, shape->dim[d]);
	}
	base_buf_append_text(b, shape->ndim ? "]" : "[]");
}

void view_json_number(struct base_buf *b, uint64_t v)
{
	char digits[20];
	unsigned at = sizeof digits;
	do
		digits[--at] = (char)('0' + v % 10);
	while (v /= 10);
	base_buf_append(b, digits + at, sizeof digits - at);
}

/* How many bytes from here on are printable ASCII. Most names consist of nothing else. */
static size_t plain_len(const char *text, size_t len)
{
	size_t n = 0;

	while (n < len && text[n] >= 0x20 && text[n] < 0x7f)
		n++;
	return n;
}

static void json_shown_text(struct base_buf *b, const char *text, size_t len)
{
	for (size_t i = 0, n; i < len; i += n) {
		size_t plain = plain_len(text + i, len - i), unsafe;
		uint32_t c;

		if (plain) {
			view_json_text(b, text + i, plain);
			n = plain;
			continue;
		}
		unsafe = base_text_unsafe(text + i, len - i, &n);
		c = (uint8_t)text[i] & (0x7fu >> n);
		n = n ? n : 1;
		for (size_t k = 1; k < n; k++)
			c = c << 6 | ((uint8_t)text[i + k] & 0x3fu);
		if (unsafe && (uint8_t)text[i] >= 0x7f)
			base_buf_printf(b, "\\u%04x", n > 1 ? c : text[i] == 0x7f ? 0x7fu : 0xfffdu);
		else
			view_json_text(b, text + i, n);
	}
}

void view_json_shown(struct base_buf *b, const char *text, size_t len)
{
	base_buf_append(b, "\"", 1);
	json_shown_text(b, text, len);
	base_buf_append(b, "\"", 1);
}
