/* SPDX-License-Identifier: Apache-2.0
 *
 * The machine: its memory, its stack and memo, its loop. See pickle.h. All values are in blocks that are freed at once.
 * When an array grows, its old memory stays in its block; so arrays take at most twice what they hold. */
#include "core/foreign/pickle_internal.h"

#include <stdlib.h>
#include <string.h>

#include "core/base/array.h"
#include "core/base/cleanup.h"
#include "core/base/le.h"

#define BLOCK_BYTES ((size_t)64 << 10)

struct foreign_block { struct foreign_block *next; size_t used, size; _Alignas(16) char bytes[]; };

void *foreign_alloc(struct foreign_pickle *p, size_t bytes)
{
	struct foreign_block *b = p->blocks;
	void *found;

	bytes = (bytes + 15) & ~(size_t)15;
	if (!b || b->size - b->used < bytes) {
		size_t size = bytes > BLOCK_BYTES / 4 ? bytes : BLOCK_BYTES;

		b = malloc(sizeof *b + size);
		if (!b) {
			base_no_memory(p->err);
			return NULL;
		}
		b->used = 0;
		b->size = size;
		b->next = p->blocks;
		p->blocks = b;
	}
	found = b->bytes + b->used;
	b->used += bytes;
	return memset(found, 0, bytes);
}

int foreign_wrong(struct foreign_pickle *p, const char *what)
{
	return base_error_set(p->err, -BASE_EFORMAT, "at byte %zu of the pickle: %s", p->at, what);
}

const uint8_t *foreign_take(struct foreign_pickle *p, uint64_t n)
{
	const uint8_t *found = p->bytes + p->at;

	if (n > p->len - p->at) {
		foreign_wrong(p, "it ends too early");
		return NULL;
	}
	p->at += n;
	return found;
}

int foreign_push(struct foreign_pickle *p, struct foreign_value *v)
{
	if (!v)
		return p->err && p->err->code ? p->err->code : -ENOMEM;
	if (base_array_room(p->stack, p->stack_room, p->nstack + 1) < 0)
		return base_no_memory(p->err);
	p->stack[p->nstack++] = v;
	return 0;
}

struct foreign_value *foreign_top(struct foreign_pickle *p)
{
	size_t floor = p->nmarks ? p->marks[p->nmarks - 1] : 0;

	if (p->nstack > floor)
		return p->stack[p->nstack - 1];
	foreign_wrong(p, "its stack is empty");
	return NULL;
}

struct foreign_value *foreign_pop(struct foreign_pickle *p)
{
	struct foreign_value *v = foreign_top(p);

	if (v)
		p->nstack--;
	return v;
}

int foreign_pop_mark(struct foreign_pickle *p, size_t *ret_floor)
{
	if (!p->nmarks)
		return foreign_wrong(p, "it has no mark");
	*ret_floor = p->marks[--p->nmarks];
	return 0;
}

/* ---- opcodes of the machine itself ---- */

static int mark(struct foreign_pickle *p)
{
	if (base_array_room(p->marks, p->marks_room, p->nmarks + 1) < 0)
		return base_no_memory(p->err);
	p->marks[p->nmarks++] = p->nstack;
	return 0;
}

static int pop(struct foreign_pickle *p)
{
	if (p->nmarks && p->marks[p->nmarks - 1] == p->nstack) { /* Python's own reader drops the mark then */
		p->nmarks--;
		return 0;
	}
	return foreign_pop(p) ? 0 : -BASE_EFORMAT;
}

/* A writer numbers fewer values than the pickle has bytes. So a larger number is wrong, and the memo stays small. */
static int memo_put(struct foreign_pickle *p, uint64_t number)
{
	struct foreign_value *v = foreign_top(p);

	if (!v)
		return -BASE_EFORMAT;
	if (number >= p->len)
		return foreign_wrong(p, "a number of its memo is larger than the pickle");
	if (base_array_room(p->memo, p->memo_room, number + 1) < 0)
		return base_no_memory(p->err);
	while (p->nmemo <= number)
		p->memo[p->nmemo++] = NULL;
	if (!p->memo[number])
		p->memoized++;
	p->memo[number] = v;
	return 0;
}

static int memo_get(struct foreign_pickle *p, uint64_t number)
{
	if (number >= p->nmemo || !p->memo[number])
		return foreign_wrong(p, "it uses a value of its memo that is not there");
	return foreign_push(p, p->memo[number]);
}

static int proto(struct foreign_pickle *p)
{
	const uint8_t *version = foreign_take(p, 1);

	if (!version)
		return -BASE_EFORMAT;
	return *version >= 2 && *version <= 5 ? 0 : foreign_wrong(p, "its protocol is none of 2 to 5");
}

/* 1: none of these */
static int run_one(struct foreign_pickle *p, uint8_t opcode)
{
	const uint8_t *n;

	switch (opcode) {
	case 0x80:
		return proto(p);
	case 0x95: /* FRAME: says how much may be read ahead */
		return foreign_take(p, 8) ? 0 : -BASE_EFORMAT;
	case '(':
		return mark(p);
	case '0':
		return pop(p);
	case '1':
		return foreign_pop_mark(p, &p->nstack);
	case '2':
		return foreign_top(p) ? foreign_push(p, foreign_top(p)) : -BASE_EFORMAT;
	case 'q':
		return (n = foreign_take(p, 1)) ? memo_put(p, *n) : -BASE_EFORMAT;
	case 'r':
		return (n = foreign_take(p, 4)) ? memo_put(p, base_get32(n)) : -BASE_EFORMAT;
	case 0x94:
		return memo_put(p, p->memoized);
	case 'h':
		return (n = foreign_take(p, 1)) ? memo_get(p, *n) : -BASE_EFORMAT;
	case 'j':
		return (n = foreign_take(p, 4)) ? memo_get(p, base_get32(n)) : -BASE_EFORMAT;
	}
	return foreign_build(p, opcode);
}

static int run(struct foreign_pickle *p)
{
	for (;;) {
		const uint8_t *opcode = foreign_take(p, 1);
		int r;

		if (!opcode)
			return -BASE_EFORMAT;
		if (*opcode == '.')
			break;
		r = run_one(p, *opcode);
		if (r > 0)
			return base_error_set(p->err, -BASE_EFORMAT,
				"at byte %zu of the pickle: opcode 0x%02x is not known here", p->at - 1, *opcode);
		if (r < 0)
			return r;
	}
	p->root = foreign_pop(p);
	if (!p->root)
		return -BASE_EFORMAT;
	return p->nstack || p->nmarks ? foreign_wrong(p, "it leaves more than one value") : 0;
}

int foreign_pickle_read(const void *bytes, size_t len, const struct foreign_classes *known,
	struct foreign_pickle **ret_p, struct base_error *err)
{
	struct base_error own = {0};
	struct foreign_pickle *p = calloc(1, sizeof *p);
	int r;

	if (!p)
		return base_no_memory(err);
	p->bytes = bytes;
	p->len = len;
	p->known = known;
	p->err = err ? err : &own;
	p->err->code = 0;
	r = run(p);
	free(p->stack);
	free(p->marks);
	free(p->memo);
	p->stack = NULL;
	p->marks = NULL;
	p->memo = NULL;
	p->err = NULL;
	if (r < 0) {
		foreign_pickle_free(p);
		return r;
	}
	*ret_p = p;
	return 0;
}

struct foreign_value *foreign_pickle_root(const struct foreign_pickle *p) { return p->root; }

void foreign_pickle_free(struct foreign_pickle *p)
{
	if (!p)
		return;
	while (p->blocks) {
		struct foreign_block *next = p->blocks->next;

		free(p->blocks);
		p->blocks = next;
	}
	free(p->stack);
	free(p->marks);
	free(p->memo);
	free(p);
}

/* ---- looking at values ---- */

bool foreign_text_is(const struct foreign_value *v, const char *text)
{
	size_t len = strlen(text);

	return v && v->kind == FOREIGN_TEXT && v->text.len == len && (!len || !memcmp(v->text.bytes, text, len));
}

struct foreign_value *foreign_items_find(const struct foreign_items *items, const char *key)
{
	for (size_t i = items->n / 2; i-- > 0;)
		if (foreign_text_is(items->at[2 * i], key))
			return items->at[2 * i + 1];
	return NULL;
}

bool foreign_natural(const struct foreign_value *v, uint64_t *ret_n)
{
	if (!v || v->kind != FOREIGN_INT || v->number < 0)
		return false;
	*ret_n = (uint64_t)v->number;
	return true;
}
