/* SPDX-License-Identifier: Apache-2.0
 *
 * buf: see the header. Grows by half again, so that n appends copy O(n) bytes. */
#include "core/base/buf.h"

#include <stdarg.h>
#include <stdio.h>

void base_buf_release(struct base_buf *b)
{
	if (!b)
		return;
	base_cleanup_free_p(&b->data);
	*b = (struct base_buf)BASE_BUF_INIT;
}

static bool buf_reserve(struct base_buf *b, size_t n)
{
	uint64_t need;
	size_t size;
	void *data;

	if (b->error)
		return false;
	if (base_add_overflows(b->len, n, &need) || need > PTRDIFF_MAX) {
		b->error = -ENOMEM;
		return false;
	}
	if (need <= b->size && b->data)
		return true;
	size = base_max(need, base_max(64, b->size + b->size / 2)); /* size <= PTRDIFF_MAX: no wrap */
	data = realloc(b->data, size);
	if (!data) {
		b->error = -ENOMEM;
		return false;
	}
	b->data = data;
	b->size = size;
	return true;
}

void *base_buf_extend(struct base_buf *b, size_t n)
{
	void *at;

	if (!buf_reserve(b, n))
		return NULL;
	at = b->data + b->len;
	b->len += n;
	return at;
}

void base_buf_append(struct base_buf *b, const void *bytes, size_t n)
{
	void *at = base_buf_extend(b, n);

	if (at && n)
		memcpy(at, bytes, n);
}

void base_buf_append_zero(struct base_buf *b, size_t n)
{
	void *at = base_buf_extend(b, n);

	if (at)
		memset(at, 0, n);
}

void base_buf_append_text(struct base_buf *b, const char *text)
{
	base_buf_append(b, text, strlen(text));
}

void base_buf_printf(struct base_buf *b, const char *format, ...)
{
	va_list args, again;
	int n;

	va_start(args, format);
	va_copy(again, args);
	n = vsnprintf(NULL, 0, format, args);
	if (n < 0)
		b->error = b->error ? b->error : -ENOMEM;
	else if (buf_reserve(b, (size_t)n + 1)) { /* the NUL needs room, but is not counted */
		vsnprintf((char *)b->data + b->len, (size_t)n + 1, format, again);
		b->len += n;
	}
	va_end(again);
	va_end(args);
}

char *base_buf_steal_text(struct base_buf *b)
{
	char *text = NULL;

	if (buf_reserve(b, 1)) {
		b->data[b->len] = 0;
		text = (char *)base_steal(b->data);
	}
	base_buf_release(b);
	return text;
}
