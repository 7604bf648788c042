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

struct teller {
	int (*f)(void *arg, const char *key, const char *value);
	void *arg;
	int code;                       /* the answer of f; once it is negative, f is not called again */
};

BASE_CLEANUP_DEFINE(struct load_object *, load_object_unref)

static void tell(struct teller *t, const char *key, const char *value)
{
	if (t->code >= 0)
		t->code = t->f(t->arg, key, value);
}

static void tell_number(struct teller *t, const char *key, uint64_t v)
{
	char text[24];
	snprintf(text, sizeof text, "%" PRIu64, v);
	tell(t, key, text);
}

static void tell_digest(struct teller *t, const char *key, const struct base_digest *d)
{
	char hex[BASE_DIGEST_HEX];
	base_digest_hex(d, hex);
	tell(t, key, hex);
}

static void tell_shape(struct teller *t, const struct tensor_shape *s)
{
	char text[TENSOR_MAX_DIMS * 22 + 3];
	int n = snprintf(text, sizeof text, "[");
	for (uint32_t d = 0; d < s->ndim; d++)
		n += snprintf(text + n, sizeof text - (size_t)n, "%s%" PRIu64, d ? ", " : "", s->dim[d]);
	snprintf(text + n, sizeof text - (size_t)n, "]");
	tell(t, "shape", text);
}

/* Stored bytes of all pieces and the names of their codecs in the order in which they appear: "raw",
 * "lz4+bitplane16,raw". */
static void tell_pieces(struct teller *t, const struct load_object *o)
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
			store_codec_name(words[i]));
	tell_number(t, "pieces", n);
	tell_number(t, "stored_bytes", stored);
	tell(t, "codec", nwords ? text : "raw");
}

/* How numpy can read the numbers of a type that it lacks and shows as |V1 or |V2; f4 as bytes that hold two numbers
 * each. */
static void tell_numpy(struct teller *t, enum tensor_dtype dtype)
{
	const char *package = tensor_dtype_ml_dtypes(dtype);
	char text[64];
	snprintf(text, sizeof text, "numpy.load(f).view(%s%s)", package ? "ml_dtypes." : "numpy.uint8",
		package ? package : "");
	if (tensor_dtype_npy(dtype)[1] == 'V')
		tell(t, "numpy", text);
}

static int tell_tensor(struct teller *t, struct load_step *step, uint32_t tensor, struct base_error *err)
{
	base_cleanup(load_object_unref_p) struct load_object *o = NULL;
	struct load_tensor_info info;
	load_step_tensor_info(step, tensor, &info);
	base_cleanup_free char *name = strndup(info.name, info.name_len);
	if (!name)
		return base_no_memory(err);
	int r = load_tensor_open(step, tensor, &o, err);
	if (r < 0)
		return r;
	tell(t, "name", name);
	tell(t, "dtype", tensor_dtype_name(info.dtype));
	tell_numpy(t, info.dtype);
	tell_shape(t, &info.shape);
	tell_digest(t, "digest", load_object_digest(o));
	tell_pieces(t, o);
	return 0;
}

static void tell_blob(struct teller *t, struct load_step *step, uint32_t blob)
{
	struct load_blob_info info;
	load_step_blob_info(step, blob, &info);
	tell(t, "name", info.name);
	if (info.per_rank)
		tell_number(t, "rank", info.rank);
	tell_digest(t, "digest", &info.digest);
}

static int tell_safetensors(struct teller *t, struct load_step *step, uint32_t component, unsigned file,
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
		tell_number(t, "tensors", s.ntensors);
		view_safetensors_release(&s);
		return 0;
	}
	for (uint32_t i = first; i < end; i++) {
		struct load_tensor_info info;
		load_step_tensor_info(step, i, &info);
		n += view_safetensors_can(info.dtype, &info.shape, info.name, info.name_len);
	}
	tell_number(t, "tensors", n);
	return 0;
}

static void tell_step(struct teller *t, struct load_step *step)
{
	const struct load_step_info *info = load_step_info(step);
	char text[VIEW_TIME_BYTES], key[sizeof "attr." + 64];
	view_time_text(info->time_ns, text);
	tell(t, "run", info->run);
	tell_number(t, "step", info->step);
	tell(t, "time", text);
	tell(t, "attempt", info->attempt);
	tell_digest(t, "manifest", &info->manifest);
	tell_number(t, "tensors", info->tensors);
	tell_number(t, "bytes", info->bytes);
	for (size_t i = 0; i < info->nattributes; i++) {
		snprintf(key, sizeof key, "attr.%s", info->attributes[i].key);
		tell(t, key, info->attributes[i].value);
	}
}

int view_node_attributes(struct view_tree *t, uint32_t node, int (*f)(void *arg, const char *key, const char *value),
	void *arg, struct base_error *err)
{
	const struct view_node *n = view_tree_node(t, node);
	struct load_step *step = view_tree_step(t);
	struct teller teller = {.f = f, .arg = arg};
	int r = 0;
	if (!n)
		return base_error_set(err, -ENOENT, "there is no such file");
	switch ((enum view_kind)n->kind) {
	case VIEW_TENSOR_NPY: r = tell_tensor(&teller, step, n->item, err); break;
	case VIEW_BLOB: tell_blob(&teller, step, n->item); break;
	case VIEW_SAFETENSORS: r = tell_safetensors(&teller, step, n->item, n->file, err); break;
	case VIEW_DIRECTORY: if (node == 0) tell_step(&teller, step); break;
	case VIEW_MANIFEST_JSON: break;
	}
	if (r < 0)
		return r;
	return teller.code < 0 ? teller.code : 0;
}
