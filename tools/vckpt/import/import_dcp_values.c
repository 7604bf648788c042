/* SPDX-License-Identifier: Apache-2.0
 *
 * A byte entry is an archive that torch.save wrote of one Python value. What has a form in docs/format/values.md
 * becomes that: plain values and containers, sizes, types and devices of torch, and tensors, which become tensors of
 * the step. Any other class makes the whole value one that only Python reads.
 *
 * A pickle may name one value at many places, and inside itself. So depth and the number of values are bounded here,
 * long texts counting as several; what has more is left to Python, too. */
#include "tools/vckpt/import/import_dcp.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "core/base/array.h"
#include "core/foreign/archive.h"
#include "tools/vckpt/import/import_chunks.h"

#define PICKLE_MAX_BYTES ((uint64_t)16 << 20)
#define DEPTH_MAX 90u           /* of the 100 of a document, its path counted */
#define VALUE_BYTES 16u         /* of a text or bytes, cost as much as a value */
#define TENSOR_COST ((size_t)256)
#define EXACT_MAX ((INT64_C(1) << 53) - 1)

static const char *const classes[] = {
	FOREIGN_TENSOR_CLASSES, "torch.Size", "torch.device", "torch.serialization._get_layout", "_codecs.encode",
	"pathlib.PosixPath", "pathlib._local.PosixPath", "pathlib.PurePosixPath", "builtins.set", "__builtin__.set",
	"builtins.frozenset", "__builtin__.frozenset", "builtins.complex", "__builtin__.complex",
	"builtins.bytes", "__builtin__.bytes",
	"builtins.bytearray", "__builtin__.bytearray", "builtins.range", "__builtin__.xrange", "builtins.slice",
	"__builtin__.slice", NULL,
};
static const struct foreign_classes known = {classes, "those that vckpt has a form for (docs/format/values.md)", true};

struct found { char *name; enum tensor_dtype dtype; struct foreign_tensor t; };

struct values {
	struct import_dcp *d;
	struct foreign_archive *a;
	char component[PROTO_COMPONENT_MAX + 1];
	struct base_buf name;   /* of the place: dots between its parts */
	struct found *tensors; size_t ntensors;
	unsigned depth;
	struct base_error *why;
};

static json_t *convert(struct values *v, const struct foreign_value *x);

static json_t *no_form(struct values *v, const char *what)
{
	base_error_set(v->why, -BASE_EFORMAT, "%s", what);
	return NULL;
}

static bool spend(struct values *v, size_t bytes)
{
	size_t cost = 1 + bytes / VALUE_BYTES;
	bool enough = cost <= v->d->values_left;

	if (enough)
		v->d->values_left -= (unsigned)cost;
	else
		no_form(v, "it has too many values, or too long ones");
	return enough;
}

/* ---- plain ---- */

static json_t *tag(const char *name, json_t *content)
{
	return content ? json_pack("{s:o}", name, content) : NULL;
}

static json_t *convert_int(int64_t n)
{
	char text[24];

	if (n >= -EXACT_MAX && n <= EXACT_MAX)
		return json_integer(n);
	snprintf(text, sizeof text, "%s0x%" PRIx64, n < 0 ? "-" : "", n < 0 ? -(uint64_t)n : (uint64_t)n);
	return tag("$int", json_string(text));
}

/* More than 8 bytes, little-endian, two's complement; the highest may be redundant. */
static json_t *convert_big(struct values *v, const char *bytes, size_t len)
{
	base_cleanup_buf struct base_buf b = BASE_BUF_INIT;
	bool negative = bytes[len - 1] & 0x80, begun = false;
	unsigned carry = 1;
	base_cleanup_free uint8_t *size = NULL;
	base_cleanup_free char *text = NULL;

	if (len > 4096)
		return no_form(v, "a number of more than 32,768 bits");
	if (!spend(v, len))
		return NULL;
	size = malloc(len);
	if (!size)
		return no_form(v, "out of memory");
	for (size_t i = 0; i < len; i++) {
		unsigned byte = negative ? (uint8_t)~bytes[i] + carry : (uint8_t)bytes[i];

		size[i] = (uint8_t)byte;
		carry = negative ? byte >> 8 : 0;
	}
	base_buf_append_text(&b, negative ? "-0x" : "0x");
	for (size_t i = len; i-- > 0;) {
		if (!begun && !size[i] && i)
			continue;
		base_buf_printf(&b, begun ? "%02x" : "%x", size[i]);
		begun = true;
	}
	text = base_buf_steal_text(&b);
	return text ? tag("$int", json_string(text)) : NULL;
}

static json_t *convert_float(double real)
{
	if (isnan(real))
		return tag("$float", json_string("nan"));
	return isinf(real) ? tag("$float", json_string(real < 0 ? "-inf" : "inf")) : json_real(real);
}

static json_t *convert_text(struct values *v, const char *bytes, size_t len)
{
	if (!proto_utf8_valid(bytes, len))
		return no_form(v, "a text that is not UTF-8, or has a NUL");
	return spend(v, len) ? json_stringn(bytes, len) : NULL;
}

static json_t *base64(struct values *v, const uint8_t *bytes, size_t len)
{
	static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
	base_cleanup_free char *text = NULL;
	char *to;

	if (!spend(v, len))
		return NULL;
	text = malloc(len / 3 * 4 + 5);
	to = text;
	if (!text)
		return NULL;
	for (size_t i = 0; i < len; i += 3) {
		uint32_t n = (uint32_t)bytes[i] << 16;

		n |= i + 1 < len ? (uint32_t)bytes[i + 1] << 8 : 0;
		n |= i + 2 < len ? bytes[i + 2] : 0;
		*to++ = digits[n >> 18];
		*to++ = digits[n >> 12 & 63];
		*to++ = i + 1 < len ? digits[n >> 6 & 63] : '=';
		*to++ = i + 2 < len ? digits[n & 63] : '=';
	}
	return json_stringn(text, (size_t)(to - text));
}

/* Protocol 2 has no bytes: they are written as a text with a letter for each. */
static json_t *convert_latin(struct values *v, const struct foreign_value *text, const char *name)
{
	const uint8_t *from = text->kind == FOREIGN_TEXT ? (const uint8_t *)text->text.bytes : NULL;
	base_cleanup_buf struct base_buf b = BASE_BUF_INIT;

	for (size_t i = 0; from && i < text->text.len; i++) {
		uint8_t byte = from[i];

		if ((byte == 0xc2 || byte == 0xc3) && i + 1 < text->text.len && (from[i + 1] & 0xc0) == 0x80)
			byte = (uint8_t)(byte << 6 | (from[++i] & 0x3f));
		else if (byte >= 0x80)
			return no_form(v, "bytes that are not written as Python writes them");
		base_buf_append(&b, &byte, 1);
	}
	return from && !b.error ? tag(name, base64(v, b.data, b.len)) : no_form(v, "bytes that are no text");
}

/* ---- containers ---- */

/* A part of a container; meanwhile the name is longer by `.KEY`. */
static json_t *convert_part(struct values *v, const struct foreign_value *x, const char *key, size_t len)
{
	size_t before = v->name.len;
	json_t *made;

	if (len >= VALUE_BYTES && !spend(v, len))
		return NULL;
	if (before)
		base_buf_append(&v->name, ".", 1);
	base_buf_append(&v->name, key, len);
	made = convert(v, x);
	v->name.len = before;
	return made;
}

static json_t *convert_list(struct values *v, const struct foreign_items *items)
{
	json_auto_t *made = json_array();

	for (size_t i = 0; i < items->n; i++) {
		char number[24];
		int len = snprintf(number, sizeof number, "%zu", i);

		if (json_array_append_new(made, convert_part(v, items->at[i], number, (size_t)len)) < 0)
			return NULL;
	}
	return base_steal(made);
}

/* Can it be hashed? So can a tuple of such keys; the conversion has already checked its depth. */
static bool is_key(const struct foreign_value *x)
{
	for (; x->kind == FOREIGN_TUPLE; x = x->items.at[0]) {
		for (size_t i = 1; i < x->items.n; i++)
			if (x->items.at[i]->kind > FOREIGN_BYTES)
				return false;
		if (!x->items.n)
			return true;
	}
	return x->kind <= FOREIGN_BYTES;
}

/* Refuses a key that is in `seen` already, as a reader would. */
static json_t *convert_key(struct values *v, const struct foreign_value *x, json_t *seen)
{
	json_auto_t *made = convert(v, x);
	base_cleanup_free char *text = made && is_key(x) ? json_dumps(made, JSON_ENCODE_ANY) : NULL;

	if (text && !json_object_get(seen, text) && json_object_set_new(seen, text, json_null()) == 0)
		return base_steal(made);
	return made ? no_form(v, "a dict or set with a key that it has twice, or that cannot be a key") : NULL;
}

static json_t *convert_pairs(struct values *v, const struct foreign_items *items)
{
	json_auto_t *made = json_array(), *seen = json_object();

	for (size_t i = 0; i < items->n / 2; i++) {
		const struct foreign_value *x = items->at[2 * i];
		bool text = x->kind == FOREIGN_TEXT;
		json_auto_t *key = convert_key(v, x, seen);
		json_auto_t *part = key ? convert_part(v, items->at[2 * i + 1], text ? x->text.bytes : "key",
			text ? x->text.len : 3) : NULL;

		if (!part || json_array_append_new(made, json_pack("[O, O]", key, part)) < 0)
			return NULL;
	}
	return base_steal(made);
}

static json_t *convert_dict(struct values *v, const struct foreign_items *items)
{
	bool plain = true;
	json_auto_t *made = NULL;

	for (size_t i = 0; plain && i < items->n / 2; i++) {
		const struct foreign_value *key = items->at[2 * i];

		plain = key->kind == FOREIGN_TEXT && !(key->text.len && *key->text.bytes == '$') &&
			proto_utf8_valid(key->text.bytes, key->text.len);
	}
	if (!plain)
		return tag("$dict", convert_pairs(v, items));
	made = json_object();
	for (size_t i = 0; i < items->n / 2; i++) {
		const struct foreign_text *key = &items->at[2 * i]->text;

		if (json_object_setn_new(made, key->bytes, key->len, convert_part(v, items->at[2 * i + 1], key->bytes,
				key->len)) < 0)
			return NULL;
	}
	return base_steal(made);
}

static json_t *convert_set(struct values *v, const struct foreign_items *items, const char *name)
{
	json_auto_t *made = json_array(), *seen = json_object();

	for (size_t i = 0; i < items->n; i++)
		if (json_array_append_new(made, convert_key(v, items->at[i], seen)) < 0)
			return NULL;
	return tag(name, base_steal(made));
}

/* ---- objects ---- */

static json_t *convert_tensor(struct values *v, const struct foreign_value *x)
{
	struct found f = {0};
	const char *word;
	base_cleanup_free char *place = NULL;

	if (foreign_tensor_of(v->a, x, &f.t, v->why) < 0)
		return NULL;
	if (foreign_dtype(f.t.dtype, strlen(f.t.dtype), &word, &f.dtype) < 0 || tensor_dtype_parse(word, &f.dtype) < 0)
		return no_form(v, "a tensor of a type that the store does not have");
	if (!spend(v, TENSOR_COST + v->name.len))
		return NULL;
	if (!v->name.len || !proto_utf8_valid((char *)v->name.data, v->name.len))
		base_buf_append_text(&v->name, "value");
	place = v->name.error ? NULL
		: tool_string("%s/%.*s", v->component, (int)v->name.len, (char *)v->name.data);
	if (!place)
		return no_form(v, "out of memory");
	if (json_object_get(v->d->taken, place))
		return no_form(v, "a tensor with the name of another one");
	if (base_array_more(v->tensors, v->ntensors) < 0 || json_object_set_new(v->d->taken, place, json_null()) < 0 ||
		!(f.name = strdup(strchr(place, '/') + 1)))
		return no_form(v, "out of memory");
	v->tensors[v->ntensors++] = f;
	return tag("$tensor", json_string(f.name));
}

static json_t *convert_path(struct values *v, const struct foreign_items *parts)
{
	base_cleanup_buf struct base_buf b = BASE_BUF_INIT;

	for (size_t i = 0; i < parts->n; i++) {
		const struct foreign_value *part = parts->at[i];

		if (part->kind != FOREIGN_TEXT || !proto_utf8_valid(part->text.bytes, part->text.len))
			return no_form(v, "a path that is no text");
		if (!spend(v, part->text.len))
			return NULL;
		if (b.len && b.data[b.len - 1] != '/')
			base_buf_append(&b, "/", 1);
		base_buf_append(&b, part->text.bytes, part->text.len);
	}
	return tag("$path", json_stringn(b.len ? (char *)b.data : ".", b.len ? b.len : 1));
}

static size_t strspn_of(const struct foreign_value *text, const char *letters)
{
	size_t n = 0;

	while (n < text->text.len && text->text.bytes[n] && strchr(letters, text->text.bytes[n]))
		n++;
	return n;
}

static json_t *convert_device(struct values *v, const struct foreign_items *args)
{
	uint64_t number = 0;
	char text[64];

	if (!args->n || args->n > 2 || args->at[0]->kind != FOREIGN_TEXT || args->at[0]->text.len > 30 ||
		strspn_of(args->at[0], "abcdefghijklmnopqrstuvwxyz") != args->at[0]->text.len ||
		(args->n == 2 && (!foreign_natural(args->at[1], &number) || number > 65535)))
		return no_form(v, "a device that is not written as torch writes it");
	snprintf(text, sizeof text, args->n == 2 ? "%.*s:%u" : "%.*s", (int)args->at[0]->text.len,
		args->at[0]->text.bytes, (unsigned)number);
	return tag("$torch.device", json_string(text));
}

static bool called(const struct foreign_object *o, const char *name)
{
	return !strcmp(strrchr(o->class, '.') + 1, name);
}

/* bytes(), bytearray(), bytearray(BYTES), or encode(TEXT, "latin1") */
static json_t *convert_bytes(struct values *v, const struct foreign_object *o)
{
	const char *name = called(o, "bytearray") ? "$bytearray" : "$bytes";
	const struct foreign_items *args = &o->args->items;
	const struct foreign_value *x;

	if (!args->n)
		return tag(name, json_string(""));
	if (called(o, "encode") && args->n == 2)
		return convert_latin(v, args->at[0], name);
	if (!called(o, "bytearray") || args->n != 1)
		return no_form(v, "bytes that are not written as Python writes them");
	x = args->at[0];
	if (x->kind == FOREIGN_BYTES)
		return tag(name, base64(v, (const uint8_t *)x->text.bytes, x->text.len));
	if (x->kind == FOREIGN_OBJECT && called(x->object, "encode") && x->object->args->items.n == 2)
		return convert_latin(v, x->object->args->items.at[0], name);
	return no_form(v, "bytes that are not written as Python writes them");
}

static json_t *convert_builtin(struct values *v, const struct foreign_object *o)
{
	const struct foreign_items *args = &o->args->items;
	const struct foreign_value *first = args->n ? args->at[0] : NULL;

	if ((called(o, "set") || called(o, "frozenset")) && first && first->kind == FOREIGN_LIST)
		return convert_set(v, &first->items, called(o, "set") ? "$set" : "$frozenset");
	if (called(o, "complex") && args->n == 2 && first->kind == FOREIGN_FLOAT && args->at[1]->kind == FOREIGN_FLOAT)
		return tag("$complex", convert_list(v, args));
	if ((called(o, "range") || called(o, "xrange")) && args->n == 3 && args->at[2]->kind == FOREIGN_INT &&
		args->at[2]->number && first->kind == FOREIGN_INT && args->at[1]->kind == FOREIGN_INT)
		return tag("$range", convert_list(v, args));
	if (called(o, "slice") && args->n == 3)
		return tag("$slice", convert_list(v, args));
	if (called(o, "bytes") || called(o, "bytearray") || called(o, "encode"))
		return convert_bytes(v, o);
	base_error_set(v->why, -BASE_EFORMAT, "a %s in a form of its own", o->class);
	return NULL;
}

static json_t *convert_object(struct values *v, const struct foreign_value *x)
{
	const struct foreign_object *o = x->object;
	const struct foreign_items *args = &o->args->items;
	uint64_t sizes[TENSOR_MAX_DIMS];
	uint32_t nsizes;

	if (!strncmp(o->class, "torch._utils.", strlen("torch._utils.")))
		return convert_tensor(v, x);
	if (called(o, "OrderedDict") && !args->n && (o->is_dict || !o->items.n))
		return tag("$ordereddict", convert_pairs(v, &o->items));
	if (o->items.n || (o->state && !called(o, "OrderedDict")))
		return no_form(v, "an object with more in it than it has in Python");
	if (called(o, "Size") && args->n == 1 && foreign_sizes(args->at[0], sizes, &nsizes) == 0)
		return tag("$torch.Size", convert_list(v, &args->at[0]->items));
	if (called(o, "device"))
		return convert_device(v, args);
	if (called(o, "_get_layout") && args->n == 1 && foreign_text_is(args->at[0], "torch.strided"))
		return tag("$torch.layout", json_string("strided"));
	if (called(o, "PosixPath") || called(o, "PurePosixPath"))
		return convert_path(v, args);
	return convert_builtin(v, o);
}

static json_t *convert_class(struct values *v, const struct foreign_value *x)
{
	enum tensor_dtype dtype;
	const char *word = strncmp(x->class, "torch.", 6) ? "" : x->class + 6;

	if (foreign_dtype(word, strlen(word), &word, &dtype) == 0)
		return tag("$torch.dtype", json_string(word));
	base_error_set(v->why, -BASE_EFORMAT, "the class %s itself", x->class);
	return NULL;
}

static json_t *convert_kind(struct values *v, const struct foreign_value *x)
{
	switch (x->kind) {
	case FOREIGN_NONE:
		return json_null();
	case FOREIGN_BOOL:
		return json_boolean(x->truth);
	case FOREIGN_INT:
		return convert_int(x->number);
	case FOREIGN_BIG:
		return convert_big(v, x->text.bytes, x->text.len);
	case FOREIGN_FLOAT:
		return convert_float(x->real);
	case FOREIGN_TEXT:
		return convert_text(v, x->text.bytes, x->text.len);
	case FOREIGN_BYTES:
	case FOREIGN_BYTEARRAY:
		return tag(x->kind == FOREIGN_BYTES ? "$bytes" : "$bytearray",
			base64(v, (const uint8_t *)x->text.bytes, x->text.len));
	case FOREIGN_TUPLE:
		return tag("$tuple", convert_list(v, &x->items));
	case FOREIGN_LIST:
		return convert_list(v, &x->items);
	case FOREIGN_SET:
	case FOREIGN_FROZENSET:
		return convert_set(v, &x->items, x->kind == FOREIGN_SET ? "$set" : "$frozenset");
	case FOREIGN_DICT:
		return convert_dict(v, &x->items);
	case FOREIGN_CLASS:
		return convert_class(v, x);
	case FOREIGN_OBJECT:
		return convert_object(v, x);
	case FOREIGN_PERSISTENT:
		break;
	}
	return no_form(v, "a storage without a tensor");
}

static json_t *convert(struct values *v, const struct foreign_value *x)
{
	json_t *made;

	if (v->depth >= DEPTH_MAX)
		return no_form(v, "it has too many values in one another");
	if (!spend(v, 0))
		return NULL;
	v->depth++;
	made = convert_kind(v, x);
	v->depth--;
	return made;
}

/* ---- an entry ---- */

static int add_tensor(struct values *v, struct import_file *file, const struct found *f)
{
	base_cleanup(import_chunks_free_p) struct import_chunks *chunks = NULL;
	struct tensor_box box;
	uint64_t items;
	int r = import_chunks_new(&f->t.shape, tensor_dtype_bytes(f->dtype), &chunks);

	if (r < 0)
		return base_no_memory(v->d->err);
	tensor_box_whole(&f->t.shape, &box);
	if (tensor_shape_items(&f->t.shape, tensor_dtype_bytes(f->dtype), &items) == 0 && items)
		r = import_dcp_chunk(chunks, &box, file, &f->t, v->d->err);
	if (r == 0)
		r = import_chunks_finish(chunks, v->d->err);
	return r < 0 ? r : import_add_chunks(v->d->plan, v->component, f->name, f->dtype, &f->t.shape, v->d->file,
		base_steal(chunks), v->d->err);
}

static json_t *read_value(struct values *v, const struct import_range *range)
{
	struct foreign_range all = {import_dcp_read, range->file, range->offset, range->bytes};
	base_cleanup_free void *bytes = NULL;
	struct foreign_pickle *p = NULL;
	json_t *made = NULL;
	size_t len;

	if (foreign_archive_open(&all, &v->a, v->why) == 0 && foreign_archive_little(v->a, v->why) == 0 &&
		foreign_archive_read(v->a, "data.pkl", PICKLE_MAX_BYTES, &bytes, &len, v->why) == 0 &&
		foreign_pickle_read(bytes, len, &known, &p, v->why) == 0)
		made = convert(v, foreign_pickle_root(p));
	foreign_pickle_free(p);
	return made;
}

/* Compares the size of all its tensors with the bytes of the entry. */
static bool may_grow(struct values *v, uint64_t stored)
{
	uint64_t bytes = 0, items;

	for (size_t i = 0; i < v->ntensors; i++) {
		const struct found *f = &v->tensors[i];
		unsigned item_bytes = tensor_dtype_bytes(f->dtype);

		if (tensor_shape_items(&f->t.shape, item_bytes, &items) < 0 ||
			base_add_overflows(bytes, items * item_bytes, &bytes))
			return false;
	}
	return import_dcp_grow(v->d, bytes, stored);
}

/* Does it fit in a document, with the others? */
static bool fits(struct values *v, const json_t *made)
{
	base_cleanup_buf struct base_buf b = BASE_BUF_INIT;

	if (import_dcp_write(made, v->d->text_left, &b) < 0)
		return false;
	v->d->text_left -= base_min(b.len, v->d->text_left);
	return true;
}

int import_dcp_value(struct import_dcp *d, size_t entry, const struct import_range *range, json_t **ret_value,
	struct base_error *why)
{
	struct values v = {.d = d, .why = why};
	const struct import_place *p = &d->places[entry];
	int r = 0;
	json_auto_t *made = NULL;

	v.depth = d->metadata.entries[entry].path ? (unsigned)d->metadata.entries[entry].path->n : 1;
	import_dcp_component(d, entry, v.component);
	if (!strcmp(v.component, p->component))
		base_buf_append_text(&v.name, p->name);
	made = read_value(&v, range);
	if (made && !may_grow(&v, range->bytes)) {
		json_decref(made);
		made = no_form(&v, "tensors that are far larger than what is stored of them");
	}
	if (made && !fits(&v, made)) {
		json_decref(made);
		made = no_form(&v, "more than a document of the step can hold");
	}
	for (size_t i = 0; i < v.ntensors; i++) {
		if (made && r == 0)
			r = add_tensor(&v, range->file, &v.tensors[i]);
		free(v.tensors[i].name);
	}
	free(v.tensors);
	foreign_archive_close(v.a);
	base_buf_release(&v.name);
	if (r == 0 && !made && why->code == 0)
		r = base_no_memory(d->err);
	if (r < 0 || !made)
		return r < 0 ? r : 1;
	*ret_value = base_steal(made);
	return 0;
}
