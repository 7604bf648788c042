/* SPDX-License-Identifier: Apache-2.0
 *
 * pickle: Python's pickles as data. A pickle is a program for a small machine with a stack; here it builds nothing but
 * the values below. No class is looked up and nothing is called: a class is a name, and what would be called is kept as
 * the name and its arguments. A name that the caller does not list is refused, whatever would have been done with it.
 *
 * Memory and work are linear in the pickle's bytes, and nothing recurses. A value may be at many places, also inside
 * itself: a caller that walks through values has to bound depth and steps. Protocols 2 to 5, without what only older
 * Pythons and extension registries write. One thread. */
#ifndef CORE_FOREIGN_PICKLE_H
#define CORE_FOREIGN_PICKLE_H

#include <stddef.h>
#include <stdint.h>

#include "core/base/error.h"

enum foreign_kind {
	FOREIGN_NONE, FOREIGN_BOOL, FOREIGN_INT,
	FOREIGN_BIG,            /* an int beyond 64 bits: `text` has its bytes, little-endian, two's complement */
	FOREIGN_FLOAT, FOREIGN_TEXT, FOREIGN_BYTES, FOREIGN_BYTEARRAY,
	FOREIGN_TUPLE, FOREIGN_LIST, FOREIGN_SET, FOREIGN_FROZENSET,
	FOREIGN_DICT,           /* items: key, value, key, value, ... in order; keys may repeat */
	FOREIGN_CLASS,          /* a name of the caller's list */
	FOREIGN_OBJECT,         /* a class or function, called with arguments */
	FOREIGN_PERSISTENT,     /* object->args: its id outside the pickle */
};

struct foreign_text { const char *bytes; size_t len; };        /* in the file's own memory, not terminated */
struct foreign_value;
struct foreign_items { struct foreign_value **at; size_t n, room; };
struct foreign_object {
	const char *class;              /* of the caller's list; NULL: a persistent one */
	struct foreign_value *args;     /* a tuple, but for a persistent one */
	struct foreign_value *state;    /* what it was built from; NULL: nothing */
	struct foreign_items items;     /* appended; or keys and values in turn, if it was filled as a dict */
	bool is_dict;
};
struct foreign_value {
	enum foreign_kind kind;
	union {
		bool truth;
		int64_t number;
		double real;
		struct foreign_text text;
		struct foreign_items items;
		const char *class;
		struct foreign_object *object;
	};
};

struct foreign_classes {
	const char *const *names;       /* "module.name", NULL at the end */
	const char *what;               /* they are: "class os.system is not one of WHAT" */
	bool persistent;                /* such objects are allowed */
};

struct foreign_pickle;
/* `bytes` must live as long as the pickle. -BASE_EFORMAT; -ENOMEM. */
int foreign_pickle_read(const void *bytes, size_t len, const struct foreign_classes *known,
	struct foreign_pickle **ret_p, struct base_error *err);
struct foreign_value *foreign_pickle_root(const struct foreign_pickle *p);
void foreign_pickle_free(struct foreign_pickle *p); /* NULL-safe */

/* Is it exactly this text? NULL is not. */
bool foreign_text_is(const struct foreign_value *v, const char *text);
/* The value of a text in a list of keys and values; NULL: it has none. Of equal keys the last one counts. */
struct foreign_value *foreign_items_find(const struct foreign_items *items, const char *key);
/* An int in 0 ... INT64_MAX; false: it is something else. */
bool foreign_natural(const struct foreign_value *v, uint64_t *ret_n);

#endif
