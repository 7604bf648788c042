/* SPDX-License-Identifier: Apache-2.0
 *
 * order: who may rely on what. Each piece of work is a tick of its stream; a clock holds, for each stream, the last
 * tick that is certain to come before. A stream's clock grows by its own work and by the clocks of events that it waits
 * for; the host's by what it has waited for (of all threads together: what one of them knows, it may have told).
 *
 * premature: a write to the device memory that a copy reads or writes, queued before the copy, that the copying
 * stream's clock does not cover. A copy to the device is such a write, too.
 * reused: a copy into host memory of an earlier copy that the host's clock does not cover, or out of memory that such a
 * copy fills.
 * touched: host memory given to a copy is filled with a pattern first; the pattern must be there when the copy is
 * executed, and the copied bytes when the host's clock comes to cover it. Of a copy to the device the bytes must stay
 * what they were when it was queued. */
#include "internal.h"

#include <stdlib.h>
#include <string.h>

#define ORDER_PATTERN 0xcb

struct order_write {
	struct order_write *next;
	struct standin_rows to;
	unsigned stream;
	uint64_t tick;
};

static struct standin_clock order_host;
static struct order_write *order_writes;         /* that the host does not know to be done */
static struct standin_flight *order_flights;     /* likewise */

static char *order_end(const struct standin_rows *rows)
{
	return rows->at + (rows->height - 1) * rows->pitch + rows->width;
}

/* A row that reaches past the row of `rows` that begins last before it meets the next one, or none. */
static bool order_row_meets(const char *at, size_t width, const struct standin_rows *rows)
{
	size_t first = at > rows->at ? (size_t)(at - rows->at) / rows->pitch : 0;

	for (size_t i = first; i < rows->height && i <= first + 1; i++) {
		const char *row = rows->at + i * rows->pitch;

		if (row < at + width && at < row + rows->width)
			return true;
	}
	return false;
}

static bool order_meets(const struct standin_rows *a, const struct standin_rows *b)
{
	const struct standin_rows *few = a->height < b->height ? a : b, *many = few == a ? b : a;

	if (a->at >= order_end(b) || b->at >= order_end(a))
		return false;
	for (size_t i = 0; i < few->height; i++)
		if (order_row_meets(few->at + i * few->pitch, few->width, many))
			return true;
	return false;
}

static uint64_t order_hash(const struct standin_rows *rows)
{
	uint64_t hash = 1469598103934665603u;

	for (size_t i = 0; i < rows->height; i++) {
		const char *row = rows->at + i * rows->pitch;
		size_t at = 0;

		for (uint64_t word; at + 8 <= rows->width; at += 8) {
			memcpy(&word, row + at, 8);
			hash = (hash ^ word) * 1099511628211u + (hash >> 29);
		}
		for (; at < rows->width; at++)
			hash = (hash ^ (unsigned char)row[at]) * 1099511628211u + (hash >> 29);
	}
	return hash;
}

void standin_order_merge(struct standin_clock *into, const struct standin_clock *from)
{
	for (unsigned i = 0; i < STANDIN_CLOCKS; i++)
		if (into->at[i] < from->at[i])
			into->at[i] = from->at[i];
}

/* Work given by the host comes after what the host has waited for. */
static void order_tick(struct standin_stream *s)
{
	standin_order_merge(&s->clock, &order_host);
	s->clock.at[s->number]++;
}

static void order_written(struct standin_stream *s, const struct standin_rows *to)
{
	struct order_write *w = calloc(1, sizeof *w);

	if (!w)
		abort();
	*w = (struct order_write){order_writes, *to, s->number, s->clock.at[s->number]};
	order_writes = w;
}

void standin_order_write(struct standin_stream *s, const struct standin_rows *to)
{
	order_tick(s);
	order_written(s, to);
}

void standin_order_copy(struct standin_stream *s, const struct standin_rows *device, struct standin_flight *f)
{
	bool premature = false, reused = false;

	order_tick(s);
	for (struct order_write *w = order_writes; w; w = w->next)
		premature |= w->tick > s->clock.at[w->stream] && order_meets(&w->to, device);
	if (f->out)
		order_written(s, device);
	for (struct standin_flight *other = order_flights; other; other = other->next)
		if (!(f->out && other->out) && order_meets(&other->host, &f->host))
			reused = f->shared = other->shared = true;
	standin_counts[STANDIN_PREMATURE] += premature;
	standin_counts[STANDIN_REUSED] += reused;
	f->stream = s->number;
	f->tick = s->clock.at[s->number];
	f->next = order_flights;
	order_flights = f;
	f->patterned = !reused && !f->out;
	if (f->out)
		f->hash = order_hash(&f->host);
	for (size_t i = 0; i < f->host.height && f->patterned; i++)
		memset(f->host.at + i * f->host.pitch, ORDER_PATTERN, f->host.width);
}

static bool order_execute_out(const struct standin_flight *f, const struct standin_rows *device)
{
	bool intact = order_hash(&f->host) == f->hash;

	for (size_t i = 0; i < f->host.height; i++)
		memcpy(device->at + i * device->pitch, f->host.at + i * f->host.pitch, f->host.width);
	return intact;
}

bool standin_order_execute(struct standin_flight *f, const struct standin_rows *device)
{
	bool intact = true;

	if (f->out)
		return order_execute_out(f, device);
	for (size_t i = 0; i < f->host.height; i++) {
		char *row = f->host.at + i * f->host.pitch;

		for (size_t j = 0; j < f->host.width && intact && f->patterned; j++)
			intact = (unsigned char)row[j] == ORDER_PATTERN;
		memcpy(row, device->at + i * device->pitch, f->host.width);
	}
	f->hash = order_hash(&f->host);
	return intact;
}

static void order_forget_writes(void)
{
	for (struct order_write **at = &order_writes, *w; (w = *at);) {
		if (w->tick > order_host.at[w->stream]) {
			at = &w->next;
			continue;
		}
		*at = w->next;
		free(w);
	}
}

void standin_order_host(const struct standin_clock *seen)
{
	standin_order_merge(&order_host, seen);
	order_forget_writes();
	for (struct standin_flight **at = &order_flights, *f; (f = *at);) {
		if (f->tick > order_host.at[f->stream]) {
			at = &f->next;
			continue;
		}
		standin_counts[STANDIN_TOUCHED] += f->executed && !f->shared && order_hash(&f->host) != f->hash;
		*at = f->next;
		free(f);
	}
}

bool standin_order_busy(const struct standin_rows *rows)
{
	for (struct standin_flight *f = order_flights; f; f = f->next)
		if (order_meets(&f->host, rows))
			return true;
	return false;
}

void standin_order_reset(void)
{
	struct standin_clock all;

	for (struct standin_flight *f; (f = order_flights); free(f)) /* their memory may be gone: not looked at */
		order_flights = f->next;
	memset(&all, 0xff, sizeof all);
	order_host = all;
	order_forget_writes();
	memset(&order_host, 0, sizeof order_host);
}
