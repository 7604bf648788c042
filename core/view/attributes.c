/* SPDX-License-Identifier: Apache-2.0
 *
 * Extended attributes as text: facts about a file that its bytes do not show. A tensor's need its row, which is read
 * for them. */
#include "core/view/tree.h"

#include <inttypes.h>
#include <stdio.h>

#include "core/pack/codec.h"
#include "core/view/view_internal.h"

#define CODECS 16 /* distinct codec words named for one tensor */

struct attributes {
	int (*f)(void *arg, const char *key, const char *value);
	void *arg;
	int code;                       /* what f returned; once that is negative, f is not called again */
};

BASE_CLEANUP_DEFINE(struct load_object *, load_object_unref)

static void put(struct attributes *a, const char *key, const char *value)
{
	if (a->code >= 0)
		a->code = a->f(a->arg, key, value);
}

static void put_number(struct attributes *a, const char *key, uint64_t v)
{
	char text[24];
	snprintf(text, sizeof text, "%" PRIu64, v);
	put(a, key, text);
}

static void put_digest(struct attributes *a, const char *key, const struct base_digest *d)
{
	char hex[BASE_DIGEST_HEX];
	base_digest_hex(d, hex);
	put(a, key, hex);
}

static void put_shape(struct attributes *a, const struct tensor_shape *s)
{
	char text[TENSOR_MAX_DIMS * 22 + 3];
	int n = snprintf(text, sizeof text, "[");
	for (uint32_t d = 0; d < s->ndim; d++)
		n += snprintf(text + n, sizeof text - (size_t)n, "%s%" PRIu64, d ? ", " : "", s->dim[d]);
	snprintf(text + n, sizeof text - (size_t)n, "]");
	put(a, "shape", text);
}

/* The stored bytes of all pieces, and the names of their codecs in the order in which they appear: "raw",
 * "lz4+bitplane16,raw". */
static void put_pieces(struct attributes *a, const struct load_object *o)
{
	uint64_t stored = 0, n = load_object_piece_count(o);
	uint16_t words[CODECS];
	unsigned nwords = 0, w;
	char text[CODECS * 32] = "";
	for (uint64_t i = 0; i < n; i++) {
		const struct store_piece *p = load_object_piece(o, i);
		stored += p->inline_bytes ? p->ref.raw_len : p->ref.stored_len;
		for (w = 0; w < nwords && words[w] != p->ref.codec; w++)
			;
		if (w == nwords && nwords < CODECS)
			words[nwords++] = p->ref.codec;
	}
	for (size_t used = 0, i = 0; i < nwords && used < sizeof text; i++)
		used += (size_t)snprintf(text + used, sizeof text - used, "%s%s", i ? "," : "",
			pack_codec_name(words[i]));
	put_number(a, "pieces", n);
	put_number(a, "stored_bytes", stored);
	put(a, "codec", nwords ? text : "raw");
}

/* How to read numbers of a type that numpy lacks and shows as |V1 or |V2; f4 as bytes of two numbers each. */
static void put_numpy(struct attributes *a, enum tensor_dtype dtype)
{
	const char *package = tensor_dtype_ml_dtypes(dtype);
	char text[64];
	snprintf(text, sizeof text, "numpy.load(f).view(%s%s)", package ? "ml_dtypes." : "numpy.uint8",
		package ? package : "");
	if (tensor_dtype_npy(dtype)[1] == 'V')
		put(a, "numpy", text);
}

static int put_tensor(struct attributes *a, struct load_step *step, uint32_t tensor, struct base_error *err)
{
	base_cleanup(load_object_unref_p) struct load_object *o = NULL;
	struct load_tensor_info info;
	base_cleanup_free char *name = NULL;
	int r;

	load_step_tensor_info(step, tensor, &info);
	name = strndup(info.name, info.name_len);
	if (!name)
		return base_no_memory(err);
	r = load_tensor_open(step, tensor, &o, err);
	if (r < 0)
		return r;
	put(a, "name", name);
	put(a, "dtype", tensor_dtype_name(info.dtype));
	put_numpy(a, info.dtype);
	put_shape(a, &info.shape);
	put_digest(a, "digest", load_object_digest(o));
	put_pieces(a, o);
	return 0;
}

static void put_blob(struct attributes *a, struct load_step *step, uint32_t blob)
{
	struct load_blob_info info;
	load_step_blob_info(step, blob, &info);
	put(a, "name", info.name);
	if (info.per_rank)
		put_number(a, "rank", info.rank);
	put_digest(a, "digest", &info.digest);
}

static int put_safetensors(struct attributes *a, struct load_step *step, uint32_t component, unsigned file,
	struct base_error *err)
{
	uint32_t first, end, n = 0;
	const char *name = load_step_component(step, component, &first, &end);
	if (file) { /* some of them */
		base_cleanup_free void *bytes = NULL;
		struct view_safetensors s;
		int r = view_files_header(step, name, file, &bytes, &s, err);
		if (r < 0)
			return r;
		put_number(a, "tensors", s.ntensors);
		view_safetensors_release(&s);
		return 0;
	}
	for (uint32_t i = first; i < end; i++) {
		struct load_tensor_info info;
		load_step_tensor_info(step, i, &info);
		n += view_safetensors_can(info.dtype, &info.shape, info.name, info.name_len);
	}
	put_number(a, "tensors", n);
	return 0;
}

static void put_step(struct attributes *a, struct load_step *step)
{
	const struct load_step_info *info = load_step_info(step);
	char text[VIEW_TIME_BYTES], key[sizeof "attr." + 64];
	view_time_text(info->time_ns, text);
	put(a, "run", info->run);
	put_number(a, "step", info->step);
	put(a, "time", text);
	put(a, "attempt", info->attempt);
	put_digest(a, "manifest", &info->manifest);
	put_number(a, "tensors", info->tensors);
	put_number(a, "bytes", info->bytes);
	for (size_t i = 0; i < info->nattributes; i++) {
		snprintf(key, sizeof key, "attr.%s", info->attributes[i].key);
		put(a, key, info->attributes[i].value);
	}
}

int view_node_attributes(struct view_tree *t, uint32_t node, int (*f)(void *arg, const char *key, const char *value),
	void *arg, struct base_error *err)
{
	const struct view_node *n = view_tree_node(t, node);
	struct load_step *step = view_tree_step(t);
	struct attributes a = {.f = f, .arg = arg};
	int r = 0;
	if (!n)
		return base_error_set(err, -ENOENT, "there is no such file");
	switch ((enum view_kind)n->kind) {
	case VIEW_TENSOR_NPY: r = put_tensor(&a, step, n->item, err); break;
	case VIEW_BLOB: put_blob(&a, step, n->item); break;
	case VIEW_SAFETENSORS: r = put_safetensors(&a, step, n->item, n->file, err); break;
	case VIEW_DIRECTORY: if (node == 0) put_step(&a, step); break;
	case VIEW_MANIFEST_JSON: break;
	}
	if (r < 0)
		return r;
	return a.code < 0 ? a.code : 0;
}
