/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/vckpt/list/sums.h"

#include <inttypes.h>
#include <stdio.h>

#include "core/pack/codec.h"

static void add_codec(struct tool_sums *s, const struct pack_object_ref *ref)
{
	unsigned i = 0;

	while (i < s->ncodecs && s->codecs[i].word != ref->codec)
		i++;
	if (i == BASE_COUNT(s->codecs))
		return;
	if (i == s->ncodecs)
		s->codecs[s->ncodecs++].word = ref->codec;
	s->codecs[i].pieces++;
	s->codecs[i].raw += ref->raw_len;
	s->codecs[i].stored += ref->stored_len;
}

static void add_object(struct tool_sums *s, enum tensor_dtype dtype, const struct load_object *o,
	const struct load_object *before)
{
	uint64_t n = load_object_piece_count(o);

	s->tensors++;
	s->dtypes[dtype]++;
	s->digest = *load_object_digest(o);
	if (before && base_digest_equal(load_object_digest(o), load_object_digest(before)))
		s->tensors_equal++;
	for (uint64_t i = 0; i < n; i++) {
		const struct store_piece *p = load_object_piece(o, i);

		s->pieces++;
		s->bytes += p->ref.raw_len;
		s->stored += p->ref.stored_len;
		add_codec(s, &p->ref);
		if (before && i < load_object_piece_count(before) &&
			base_digest_equal(&p->ref.digest, &load_object_piece(before, i)->ref.digest)) {
			s->pieces_shared++;
			s->bytes_shared += p->ref.raw_len;
		}
	}
}

int tool_sums_tensor(struct tool_sums *s, struct load_step *step, struct load_step *before, uint32_t number,
	struct base_error *err)
{
	struct load_tensor_info info;
	struct load_object *o, *old = NULL;
	int r = load_tensor_open(step, number, &o, err);
	int64_t same;

	if (r < 0)
		return r;
	load_step_tensor_info(step, number, &info);
	same = before ? load_step_tensor_find(before, info.component, info.name, info.name_len) : -ENOENT;
	if (same >= 0)
		r = load_tensor_open(before, (uint32_t)same, &old, err);
	if (r == 0)
		add_object(s, info.dtype, o, old);
	if (old)
		load_object_unref(old);
	load_object_unref(o);
	return r;
}

/* Appends "NAME N" to a list; what does not fit any more is left out. */
static void append(char text[static TOOL_SUMS_TEXT], const char *name, uint64_t n)
{
	size_t len = strlen(text);

	snprintf(text + len, TOOL_SUMS_TEXT - len, "%s%s %" PRIu64, len ? ", " : "", name, n);
}

char *tool_sums_dtypes(const struct tool_sums *s, char text[static TOOL_SUMS_TEXT])
{
	text[0] = 0;
	for (unsigned i = 0; i < TENSOR_DTYPE_END; i++)
		if (s->dtypes[i])
			append(text, tensor_dtype_name(i), s->dtypes[i]);
	return text[0] ? text : strcpy(text, "-");
}

char *tool_sums_codecs(const struct tool_sums *s, char text[static TOOL_SUMS_TEXT])
{
	text[0] = 0;
	for (unsigned i = 0; i < s->ncodecs; i++)
		append(text, pack_codec_name(s->codecs[i].word), s->codecs[i].pieces);
	return text[0] ? text : strcpy(text, "-");
}

json_t *tool_sums_dtypes_json(const struct tool_sums *s)
{
	json_t *all = json_object();

	for (unsigned i = 0; i < TENSOR_DTYPE_END; i++)
		if (s->dtypes[i])
			json_object_set_new(all, tensor_dtype_name(i), json_integer((json_int_t)s->dtypes[i]));
	return all;
}

json_t *tool_sums_codecs_json(const struct tool_sums *s)
{
	json_t *all = json_array();

	for (unsigned i = 0; i < s->ncodecs; i++)
		json_array_append_new(all,
			json_pack("{s:s, s:I, s:I, s:I}", "codec", pack_codec_name(s->codecs[i].word), "pieces",
				(json_int_t)s->codecs[i].pieces, "bytes", (json_int_t)s->codecs[i].raw, "stored_bytes",
				(json_int_t)s->codecs[i].stored));
	return all;
}

void tool_sums_print_numpy(const struct tool_sums *s, const char *indent)
{
	char text[TENSOR_DTYPE_NUMPY_TEXT];

	for (unsigned i = 0; i < TENSOR_DTYPE_END; i++)
		if (s->dtypes[i] && tensor_dtype_numpy_says(i, text))
			printf("%s%s: %s\n", indent, tensor_dtype_name(i), text);
}
