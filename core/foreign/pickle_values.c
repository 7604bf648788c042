/* SPDX-License-Identifier: Apache-2.0
 *
 * The opcodes that build values. */
#include "core/foreign/pickle_internal.h"

#include <string.h>

#include "core/base/le.h"

/* ---- plain values ---- */

static int push_value(struct foreign_pickle *p, struct foreign_value value)
{
	struct foreign_value *v = foreign_alloc(p, sizeof *v);

	if (v)
		*v = value;
	return foreign_push(p, v);
}

static int push_int(struct foreign_pickle *p, int64_t number)
{
	return push_value(p, (struct foreign_value){FOREIGN_INT, .number = number});
}

static int push_float(struct foreign_pickle *p)
{
	const uint8_t *bytes = foreign_take(p, 8);
	struct foreign_value v = {FOREIGN_FLOAT};
	uint64_t bits;

	if (!bytes)
		return -BASE_EFORMAT;
	memcpy(&bits, bytes, 8);
	bits = be64toh(bits);
	memcpy(&v.real, &bits, 8);
	return push_value(p, v);
}

/* A length of n bytes, then as many bytes. */
static int push_text(struct foreign_pickle *p, enum foreign_kind kind, unsigned n)
{
	const uint8_t *size = foreign_take(p, n), *bytes = NULL;

	if (size)
		bytes = foreign_take(p, n == 1 ? *size : n == 4 ? base_get32(size) : base_get64(size));
	if (!bytes)
		return -BASE_EFORMAT;
	return push_value(p, (struct foreign_value){kind,
		.text = {(const char *)bytes, (size_t)(p->bytes + p->at - bytes)}});
}

/* LONG1, LONG4: two's complement, as many bytes as needed */
static int push_long(struct foreign_pickle *p, unsigned n)
{
	int r = push_text(p, FOREIGN_BIG, n);
	struct foreign_value *v;
	size_t len;
	const uint8_t *bytes;
	uint64_t number;

	if (r < 0)
		return r;
	v = foreign_top(p);
	len = v->text.len;
	bytes = (const uint8_t *)v->text.bytes;
	/* Python writes no redundant bytes; those of other writers are dropped, so that a number has one form */
	while (len > 8 && bytes[len - 1] == (bytes[len - 2] & 0x80 ? 0xff : 0))
		len--;
	v->text.len = len;
	if (len > 8)
		return 0;
	number = len && bytes[len - 1] & 0x80 ? UINT64_MAX : 0;
	for (size_t i = len; i-- > 0;)
		number = number << 8 | bytes[i];
	v->kind = FOREIGN_INT;
	v->number = (int64_t)number;
	return 0;
}

/* ---- containers ---- */

static int items_room(struct foreign_pickle *p, struct foreign_items *items, size_t more)
{
	size_t room;
	struct foreign_value **at;

	if (items->room - items->n >= more)
		return 0;
	room = items->n + more > 2 * items->room ? items->n + more : 2 * items->room;
	at = foreign_alloc(p, room * sizeof *at);
	if (!at)
		return -ENOMEM;
	if (items->n)
		memcpy(at, items->at, items->n * sizeof *at);
	items->at = at;
	items->room = room;
	return 0;
}

/* Moves the values above `floor` into `items`. */
static int items_take(struct foreign_pickle *p, struct foreign_items *items, size_t floor)
{
	size_t n = p->nstack - floor;

	if (items_room(p, items, n) < 0)
		return -ENOMEM;
	if (n)
		memcpy(items->at + items->n, p->stack + floor, n * sizeof *items->at);
	items->n += n;
	p->nstack = floor;
	return 0;
}

static int push_items(struct foreign_pickle *p, enum foreign_kind kind, size_t floor)
{
	struct foreign_value v = {kind};

	if (kind == FOREIGN_DICT && (p->nstack - floor) % 2)
		return foreign_wrong(p, "a dict has a key without a value");
	return items_take(p, &v.items, floor) < 0 ? -ENOMEM : push_value(p, v);
}

static int push_marked(struct foreign_pickle *p, enum foreign_kind kind)
{
	size_t floor = 0;
	int r = foreign_pop_mark(p, &floor);

	return r < 0 ? r : push_items(p, kind, floor);
}

static int push_tuple(struct foreign_pickle *p, size_t n)
{
	size_t floor = p->nmarks ? p->marks[p->nmarks - 1] : 0;

	if (p->nstack - floor < n)
		return foreign_wrong(p, "its stack is empty");
	return push_items(p, FOREIGN_TUPLE, p->nstack - n);
}

/* Puts the values above `floor` into the container below. */
static int fill(struct foreign_pickle *p, size_t floor, bool is_dict)
{
	size_t bottom = p->nmarks ? p->marks[p->nmarks - 1] : 0;
	struct foreign_value *v;
	size_t n;

	if (floor <= bottom)
		return foreign_wrong(p, "it fills no container");
	v = p->stack[floor - 1];
	n = p->nstack - floor;
	if (is_dict && n % 2)
		return foreign_wrong(p, "a dict has a key without a value");
	if (v->kind == (is_dict ? FOREIGN_DICT : FOREIGN_LIST) || (!is_dict && v->kind == FOREIGN_SET))
		return items_take(p, &v->items, floor);
	if (v->kind != FOREIGN_OBJECT || (v->object->items.n && v->object->is_dict != is_dict))
		return foreign_wrong(p, "it fills something that is no container");
	v->object->is_dict = is_dict;
	return items_take(p, &v->object->items, floor);
}

static int fill_marked(struct foreign_pickle *p, bool is_dict)
{
	size_t floor = 0;
	int r = foreign_pop_mark(p, &floor);

	return r < 0 ? r : fill(p, floor, is_dict);
}

static int fill_last(struct foreign_pickle *p, size_t n, bool is_dict)
{
	return p->nstack < n ? foreign_wrong(p, "its stack is empty") : fill(p, p->nstack - n, is_dict);
}

/* ---- classes and objects ---- */

static int push_class(struct foreign_pickle *p, const char *module, size_t module_len, const char *name,
	size_t name_len)
{
	char shown[200];
	size_t n = 0;

	for (const char *const *known = p->known->names; *known; known++) {
		size_t len = strlen(*known);

		if (len != module_len + 1 + name_len || memcmp(*known, module, module_len) != 0 ||
			(*known)[module_len] != '.' || memcmp(*known + module_len + 1, name, name_len) != 0)
			continue;
		return push_value(p, (struct foreign_value){FOREIGN_CLASS, .class = *known});
	}
	for (size_t i = 0; i < module_len + 1 + name_len && n < sizeof shown - 1; i++) {
		char c = i < module_len ? module[i] : i == module_len ? '.' : name[i - module_len - 1];

		shown[n++] = c >= ' ' && c <= '~' ? c : '?';
	}
	shown[n] = 0;
	return base_error_set(p->err, -BASE_EFORMAT, "class %s is not one of %s", shown, p->known->what);
}

static int push_global(struct foreign_pickle *p)
{
	const char *module = (const char *)p->bytes + p->at, *end = (const char *)p->bytes + p->len;
	const char *name = memchr(module, '\n', (size_t)(end - module));
	const char *last = name ? memchr(name + 1, '\n', (size_t)(end - name - 1)) : NULL;

	if (!last)
		return foreign_wrong(p, "it ends too early");
	p->at = (size_t)(last + 1 - (const char *)p->bytes);
	return push_class(p, module, (size_t)(name - module), name + 1, (size_t)(last - name - 1));
}

static int push_stack_global(struct foreign_pickle *p)
{
	struct foreign_value *name = foreign_pop(p), *module = name ? foreign_pop(p) : NULL;

	if (!module)
		return -BASE_EFORMAT;
	if (name->kind != FOREIGN_TEXT || module->kind != FOREIGN_TEXT)
		return foreign_wrong(p, "the name of a class is no text");
	return push_class(p, module->text.bytes, module->text.len, name->text.bytes, name->text.len);
}

static int push_call(struct foreign_pickle *p, enum foreign_kind kind, const char *class, struct foreign_value *args)
{
	struct foreign_object *o = foreign_alloc(p, sizeof *o);

	if (!o)
		return -ENOMEM;
	*o = (struct foreign_object){.class = class, .args = args};
	return push_value(p, (struct foreign_value){kind, .object = o});
}

static int push_object(struct foreign_pickle *p)
{
	struct foreign_value *args = foreign_pop(p), *class = args ? foreign_pop(p) : NULL;

	if (!class)
		return -BASE_EFORMAT;
	if (class->kind != FOREIGN_CLASS || args->kind != FOREIGN_TUPLE)
		return foreign_wrong(p, "it calls something that is no class");
	return push_call(p, FOREIGN_OBJECT, class->class, args);
}

static int push_persistent(struct foreign_pickle *p)
{
	struct foreign_value *id = foreign_pop(p);

	if (!id)
		return -BASE_EFORMAT;
	if (!p->known->persistent)
		return foreign_wrong(p, "it refers to an object outside of it");
	return push_call(p, FOREIGN_PERSISTENT, NULL, id);
}

static int build(struct foreign_pickle *p)
{
	struct foreign_value *state = foreign_pop(p), *v = state ? foreign_top(p) : NULL;

	if (!v)
		return -BASE_EFORMAT;
	if (v->kind != FOREIGN_OBJECT || v->object->state)
		return foreign_wrong(p, "it gives a state to something that takes none");
	v->object->state = state;
	return 0;
}

/* ---- the table ---- */

static int build_plain(struct foreign_pickle *p, uint8_t opcode)
{
	const uint8_t *n;

	switch (opcode) {
	case 'N':
		return push_value(p, (struct foreign_value){FOREIGN_NONE});
	case 0x88:
	case 0x89:
		return push_value(p, (struct foreign_value){FOREIGN_BOOL, .truth = opcode == 0x88});
	case 'J':
		return (n = foreign_take(p, 4)) ? push_int(p, (int32_t)base_get32(n)) : -BASE_EFORMAT;
	case 'K':
		return (n = foreign_take(p, 1)) ? push_int(p, *n) : -BASE_EFORMAT;
	case 'M':
		return (n = foreign_take(p, 2)) ? push_int(p, base_get16(n)) : -BASE_EFORMAT;
	case 0x8a:
		return push_long(p, 1);
	case 0x8b:
		return push_long(p, 4);
	case 'G':
		return push_float(p);
	case 0x8c:
		return push_text(p, FOREIGN_TEXT, 1);
	case 'X':
		return push_text(p, FOREIGN_TEXT, 4);
	case 0x8d:
		return push_text(p, FOREIGN_TEXT, 8);
	case 'C':
		return push_text(p, FOREIGN_BYTES, 1);
	case 'B':
		return push_text(p, FOREIGN_BYTES, 4);
	case 0x8e:
		return push_text(p, FOREIGN_BYTES, 8);
	case 0x96:
		return push_text(p, FOREIGN_BYTEARRAY, 8);
	}
	return 1;
}

static int build_container(struct foreign_pickle *p, uint8_t opcode)
{
	switch (opcode) {
	case ')':
		return push_tuple(p, 0);
	case 0x85:
	case 0x86:
	case 0x87:
		return push_tuple(p, opcode - 0x84u);
	case 't':
		return push_marked(p, FOREIGN_TUPLE);
	case ']':
		return push_items(p, FOREIGN_LIST, p->nstack);
	case 'l':
		return push_marked(p, FOREIGN_LIST);
	case '}':
		return push_items(p, FOREIGN_DICT, p->nstack);
	case 'd':
		return push_marked(p, FOREIGN_DICT);
	case 0x8f:
		return push_items(p, FOREIGN_SET, p->nstack);
	case 0x91:
		return push_marked(p, FOREIGN_FROZENSET);
	case 'a':
		return fill_last(p, 1, false);
	case 'e':
	case 0x90:
		return fill_marked(p, false);
	case 's':
		return fill_last(p, 2, true);
	case 'u':
		return fill_marked(p, true);
	}
	return 1;
}

int foreign_build(struct foreign_pickle *p, uint8_t opcode)
{
	int r = build_plain(p, opcode);

	if (r <= 0)
		return r;
	switch (opcode) {
	case 'c':
		return push_global(p);
	case 0x93:
		return push_stack_global(p);
	case 'R':
	case 0x81: /* NEWOBJ */
		return push_object(p);
	case 'b':
		return build(p);
	case 'Q':
		return push_persistent(p);
	}
	return build_container(p, opcode);
}
