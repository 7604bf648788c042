/* SPDX-License-Identifier: Apache-2.0
 *
 * The machine that reads a pickle: pickle.c has its memory and its loop, pickle_values.c what the opcodes build. */
#ifndef CORE_FOREIGN_PICKLE_INTERNAL_H
#define CORE_FOREIGN_PICKLE_INTERNAL_H

#include "core/foreign/pickle.h"

struct foreign_block;

struct foreign_pickle {
	const uint8_t *bytes;
	size_t len, at;                 /* at: of the next byte */
	const struct foreign_classes *known;
	struct foreign_value **stack; size_t nstack, stack_room;
	size_t *marks, nmarks, marks_room;      /* heights of the stack */
	struct foreign_value **memo; size_t nmemo, memo_room;
	size_t memoized;                /* the number that MEMOIZE gives next */
	struct foreign_block *blocks;
	struct foreign_value *root;
	struct base_error *err;
};

void *foreign_alloc(struct foreign_pickle *p, size_t bytes);   /* zeroed; NULL: no memory, in p->err */
int foreign_wrong(struct foreign_pickle *p, const char *what);
/* The next n bytes; NULL: there are fewer; the error is in p->err. */
const uint8_t *foreign_take(struct foreign_pickle *p, uint64_t n);
int foreign_push(struct foreign_pickle *p, struct foreign_value *v);
/* NULL: nothing is above the last mark; the error is in p->err. */
struct foreign_value *foreign_pop(struct foreign_pickle *p);
struct foreign_value *foreign_top(struct foreign_pickle *p);
/* The height of the stack at the last mark, which goes. */
int foreign_pop_mark(struct foreign_pickle *p, size_t *ret_floor);
/* Executes one opcode that builds values. 1: it is none of them. */
int foreign_build(struct foreign_pickle *p, uint8_t opcode);

#endif
