/* SPDX-License-Identifier: Apache-2.0
 *
 * past: whole lines of the cache are written with stores that do not read them first. */
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "core/base/le.h"
#include "core/base/past.h"

#ifdef __SSE2__

#define PAST_LINE 64u

void base_copy_past(void *to, const void *from, size_t len)
{
	size_t head = base_min(len, -(uintptr_t)to % PAST_LINE), end;
	const uint8_t *in = from;
	uint8_t *out = to;

	memcpy(out, in, head);
	end = head + (len - head) / PAST_LINE * PAST_LINE;
	for (size_t i = head; i < end; i += PAST_LINE) {
		__m128i a = _mm_loadu_si128((const __m128i *)(const void *)(in + i));
		__m128i b = _mm_loadu_si128((const __m128i *)(const void *)(in + i + 16));
		__m128i c = _mm_loadu_si128((const __m128i *)(const void *)(in + i + 32));
		__m128i d = _mm_loadu_si128((const __m128i *)(const void *)(in + i + 48));

		_mm_stream_si128((__m128i *)(void *)(out + i), a);
		_mm_stream_si128((__m128i *)(void *)(out + i + 16), b);
		_mm_stream_si128((__m128i *)(void *)(out + i + 32), c);
		_mm_stream_si128((__m128i *)(void *)(out + i + 48), d);
	}
	memcpy(out + end, in + end, len - end);
}

void base_copy_past_end(void) { _mm_sfence(); }

#else

void base_copy_past(void *to, const void *from, size_t len) { memcpy(to, from, len); }
void base_copy_past_end(void) {}

#endif
