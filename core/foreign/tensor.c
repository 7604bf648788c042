/* SPDX-License-Identifier: Apache-2.0
 *
 * A tensor in its archive: data.pkl says
 *
 *   _rebuild_tensor_v2(storage, offset, size, stride, requires_grad, hooks)         the storage has a type
 *   _rebuild_tensor_v3(storage, offset, size, stride, requires_grad, hooks, dtype)  the storage has bytes
 *
 * where storage is a persistent ("storage", class, key, device, count), and its bytes are the member data/KEY. */
#include "core/foreign/tensor.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/base/cleanup.h"
#include "core/base/le.h"

#define PICKLE_MAX_BYTES ((uint64_t)1 << 20)

static const char *const classes[] = {FOREIGN_TENSOR_CLASSES, NULL};
static const struct foreign_classes known = {classes, "those of a tensor", true};

static const struct { const char *storage, *dtype; } storages[] = {
	{"torch.FloatStorage", "float32"}, {"torch.DoubleStorage", "float64"}, {"torch.HalfStorage", "float16"},
	{"torch.BFloat16Storage", "bfloat16"}, {"torch.LongStorage", "int64"}, {"torch.IntStorage", "int32"},
	{"torch.ShortStorage", "int16"}, {"torch.CharStorage", "int8"}, {"torch.ByteStorage", "uint8"},
	{"torch.BoolStorage", "bool"}, {"torch.ComplexFloatStorage", "complex64"},
	{"torch.ComplexDoubleStorage", "complex128"},
};
static const char *const dtypes[] = {FOREIGN_DTYPE_CLASSES};

int foreign_dtype(const char *name, size_t len, const char **ret_name, enum tensor_dtype *ret_dtype)
{
	for (size_t i = 0; i < BASE_COUNT(dtypes); i++) {
		const char *word = dtypes[i] + strlen("torch.");

		if (strlen(word) != len || memcmp(word, name, len) != 0)
			continue;
		*ret_name = word;
		if (tensor_dtype_parse(word, ret_dtype) == 0)
			return 0;
		if (!strcmp(word, "complex32"))
			*ret_dtype = TENSOR_U32;
		else
			*ret_dtype = strcmp(word, "bits16") == 0 ? TENSOR_U16 : TENSOR_U8;
		return 0;
	}
	return -EINVAL;
}

int foreign_sizes(const struct foreign_value *v, uint64_t ret_sizes[static TENSOR_MAX_DIMS], uint32_t *ret_n)
{
	if (v && v->kind == FOREIGN_OBJECT && !strcmp(v->object->class, "torch.Size") && v->object->args->items.n == 1)
		v = v->object->args->items.at[0];
	if (!v || (v->kind != FOREIGN_TUPLE && v->kind != FOREIGN_LIST) || v->items.n > TENSOR_MAX_DIMS)
		return -EINVAL;
	for (size_t i = 0; i < v->items.n; i++)
		if (!foreign_natural(v->items.at[i], &ret_sizes[i]))
			return -EINVAL;
	*ret_n = (uint32_t)v->items.n;
	return 0;
}

int foreign_archive_little(struct foreign_archive *a, struct base_error *err)
{
	base_cleanup_free void *bytes = NULL;
	size_t len = 0;
	int r = foreign_archive_read(a, "byteorder", 64, &bytes, &len, err);

	if (r == -ENOENT || (r == 0 && len == 6 && !memcmp(bytes, "little", 6)))
		return 0;
	return r < 0 ? r : base_error_set(err, -BASE_EFORMAT,
		"its byte order is not little: it was written on another kind of machine");
}

/* ---- the storage ---- */

struct storage { const char *dtype; uint64_t offset, bytes; }; /* dtype NULL: bytes */

static int read_storage(struct foreign_archive *a, const struct foreign_value *v, struct storage *ret_s,
	struct base_error *err)
{
	const struct foreign_value *id = v->kind == FOREIGN_PERSISTENT ? v->object->args : NULL;
	const struct foreign_items *items = id && id->kind == FOREIGN_TUPLE ? &id->items : NULL;
	char name[80];

	if (!items || items->n != 5 || !foreign_text_is(items->at[0], "storage") ||
		items->at[1]->kind != FOREIGN_CLASS || items->at[2]->kind != FOREIGN_TEXT ||
		items->at[2]->text.len > 64)
		return base_error_set(err, -BASE_EFORMAT, "its storage is not written as torch.save writes it");
	ret_s->dtype = NULL;
	for (size_t i = 0; i < BASE_COUNT(storages); i++)
		if (!strcmp(storages[i].storage, items->at[1]->class))
			ret_s->dtype = storages[i].dtype;
	if (!ret_s->dtype && strcmp(items->at[1]->class, "torch.storage.UntypedStorage") != 0)
		return base_error_set(err, -BASE_EFORMAT, "%s is no storage", items->at[1]->class);
	snprintf(name, sizeof name, "data/%.*s", (int)items->at[2]->text.len, items->at[2]->text.bytes);
	return foreign_archive_find(a, name, &ret_s->offset, &ret_s->bytes, err);
}

/* ---- the tensor ---- */

/* Every item must be in the storage. */
static int check_extent(const struct foreign_tensor *t, uint64_t first, unsigned item_bytes, const struct storage *s,
	struct base_error *err)
{
	uint64_t items, last = first, bytes;
	bool wrong = tensor_shape_items(&t->shape, item_bytes, &items) < 0;

	for (uint32_t d = 0; !wrong && items && d < t->shape.ndim; d++) {
		uint64_t step;

		wrong = base_mul_overflows(t->shape.dim[d] - 1, t->stride[d], &step) ||
			base_add_overflows(last, step, &last);
	}
	wrong = wrong || base_add_overflows(last, 1, &last) || base_mul_overflows(last, item_bytes, &bytes);
	if (!wrong && (!items || bytes <= s->bytes))
		return 0;
	return base_error_set(err, -BASE_EFORMAT, "its storage has %" PRIu64 " bytes, fewer than its shape needs",
		s->bytes);
}

static int of_call(struct foreign_archive *a, const struct foreign_object *o, bool typed, struct foreign_tensor *ret_t,
	struct base_error *err)
{
	struct foreign_value **arg = o->args->items.at;
	struct storage s = {0};
	uint64_t first, items;
	uint32_t n = 0;
	enum tensor_dtype dtype;
	int r;
	const char *word;
	unsigned item_bytes;

	*ret_t = (struct foreign_tensor){0};
	if (o->args->items.n != (typed ? 6 : 7) || !foreign_natural(arg[1], &first) ||
		foreign_sizes(arg[2], ret_t->shape.dim, &ret_t->shape.ndim) < 0 ||
		foreign_sizes(arg[3], ret_t->stride, &n) < 0 || n != ret_t->shape.ndim)
		return base_error_set(err, -BASE_EFORMAT,
			"it is a tensor of another kind than an ordinary, dense one (conjugate or negated views and "
			"shapes of more than %u dimensions are not read)", TENSOR_MAX_DIMS);
	r = read_storage(a, arg[0], &s, err);
	if (r < 0)
		return r;
	if (typed != (s.dtype != NULL) || (!typed && arg[6]->kind != FOREIGN_CLASS))
		return base_error_set(err, -BASE_EFORMAT, "its storage is not written as torch.save writes it");
	word = typed ? s.dtype : arg[6]->class;
	word = strncmp(word, "torch.", 6) ? word : word + 6;
	if (foreign_dtype(word, strlen(word), &ret_t->dtype, &dtype) < 0)
		return base_error_set(err, -BASE_EFORMAT, "%s is no type of tensors", word);
	item_bytes = tensor_dtype_bytes(dtype);
	r = check_extent(ret_t, first, item_bytes, &s, err);
	if (r == 0 && tensor_shape_items(&ret_t->shape, item_bytes, &items) == 0)
		ret_t->offset = s.offset + (items ? first * item_bytes : 0);
	return r;
}

int foreign_tensor_of(struct foreign_archive *a, const struct foreign_value *v, struct foreign_tensor *ret_t,
	struct base_error *err)
{
	if (v->kind == FOREIGN_OBJECT && !strcmp(v->object->class, "torch._utils._rebuild_parameter") &&
		v->object->args->items.n >= 1)
		v = v->object->args->items.at[0];
	if (v->kind == FOREIGN_OBJECT && !v->object->state && !v->object->items.n) {
		if (!strcmp(v->object->class, "torch._utils._rebuild_tensor_v2"))
			return of_call(a, v->object, true, ret_t, err);
		if (!strcmp(v->object->class, "torch._utils._rebuild_tensor_v3"))
			return of_call(a, v->object, false, ret_t, err);
	}
	return base_error_set(err, -BASE_EFORMAT, "it is no tensor");
}

int foreign_tensor_read(const struct foreign_range *range, struct foreign_tensor *ret_t, struct base_error *err)
{
	struct foreign_archive *a = NULL;
	struct foreign_pickle *p = NULL;
	base_cleanup_free void *bytes = NULL;
	size_t len = 0;
	int r = foreign_archive_open(range, &a, err);

	if (r == 0)
		r = foreign_archive_little(a, err);
	if (r == 0)
		r = foreign_archive_read(a, "data.pkl", PICKLE_MAX_BYTES, &bytes, &len, err);
	if (r == 0)
		r = foreign_pickle_read(bytes, len, &known, &p, err);
	if (r == 0)
		r = foreign_tensor_of(a, foreign_pickle_root(p), ret_t, err);
	foreign_pickle_free(p);
	foreign_archive_close(a);
	return r == -ENOENT || r == -BASE_ELIMIT ? base_error_set(err, -BASE_EFORMAT, "it is no tensor that torch.save "
		"wrote") : r;
}
