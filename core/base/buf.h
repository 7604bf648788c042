/* SPDX-License-Identifier: Apache-2.0
 *
 * buf: a growable byte buffer. An error stays set, so that many appends need one check at their end. Not thread-safe.
 * Zero-initialise with BASE_BUF_INIT; `data` is malloc'ed and may be stolen. */
#ifndef CORE_BASE_BUF_H
#define CORE_BASE_BUF_H

#include "core/base/cleanup.h"
#include "core/base/le.h"

struct base_buf {
	uint8_t *data;
	size_t len, size; /* bytes used, bytes allocated */
	int error;        /* 0 or -ENOMEM; once set, appends do nothing */
};
#define BASE_BUF_INIT {0}

void base_buf_release(struct base_buf *b);            /* frees and zeroes; NULL-safe */
void *base_buf_extend(struct base_buf *b, size_t n);  /* n more uninitialised bytes, or NULL */
void base_buf_append(struct base_buf *b, const void *bytes, size_t n);
void base_buf_append_zero(struct base_buf *b, size_t n);
void base_buf_append_text(struct base_buf *b, const char *text);
void base_buf_printf(struct base_buf *b, const char *format, ...) __attribute__((format(printf, 2, 3)));
static inline void base_buf_put16(struct base_buf *b, uint16_t v)
{
	uint8_t t[2];
	base_put16(t, v);
	base_buf_append(b, t, 2);
}
static inline void base_buf_put32(struct base_buf *b, uint32_t v)
{
	uint8_t t[4];
	base_put32(t, v);
	base_buf_append(b, t, 4);
}
static inline void base_buf_put64(struct base_buf *b, uint64_t v)
{
	uint8_t t[8];
	base_put64(t, v);
	base_buf_append(b, t, 8);
}
/* NUL-terminated string, owned by the caller; the buffer is empty afterwards. NULL when b->error. */
char *base_buf_steal_text(struct base_buf *b);

#define base_cleanup_buf base_cleanup(base_buf_release)

#endif
