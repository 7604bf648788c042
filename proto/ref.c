/* SPDX-License-Identifier: Apache-2.0
 *
 * ref: what several records hold: references, attributes, view headers.
 *
 *   reference, 72 bytes: digest 32 | offset u64 | checks u64 | raw_len u64 | stored_len u64 | pack u32 | codec u16 |
 *   kind u8 | 0 */
#include "proto/proto_internal.h"

#define REF_HEADERS_MAX 4096u

void proto_ref_put(struct base_buf *b, const struct proto_ref *ref)
{
	base_buf_append(b, ref->digest.bytes, sizeof ref->digest.bytes);
	base_buf_put64(b, ref->offset);
	base_buf_put64(b, ref->checks);
	base_buf_put64(b, ref->raw_len);
	base_buf_put64(b, ref->stored_len);
	base_buf_put32(b, ref->pack);
	base_buf_put16(b, ref->codec);
	base_buf_append(b, &ref->kind, 1);
	base_buf_append_zero(b, 1);
}

bool proto_ref_get(const uint8_t *row, struct proto_ref *ret_r)
{
	memcpy(ret_r->digest.bytes, row, sizeof ret_r->digest.bytes);
	ret_r->offset = base_get64(row + 32);
	ret_r->checks = base_get64(row + 40);
	ret_r->raw_len = base_get64(row + 48);
	ret_r->stored_len = base_get64(row + 56);
	ret_r->pack = base_get32(row + 64);
	ret_r->codec = base_get16(row + 68);
	ret_r->kind = row[70];
	return row[71] == 0;
}

bool proto_ref_field_get(const ProtobufCBinaryData *field, struct proto_ref *ret_r)
{
	return field->len == PROTO_REF_BYTES && proto_ref_get(field->data, ret_r);
}

/* Checks of an object: 8 bytes for each block, 4 more where it is encoded. */
static uint64_t ref_checks_bytes(const struct proto_ref *ref)
{
	return base_block_count(ref->raw_len) * ((ref->codec & 0xff) ? 12 : 8);
}

bool proto_ref_check(const struct proto_ref *ref, unsigned kind, uint32_t npacks, uint64_t pack_size)
{
	uint64_t end = pack_size ? pack_size : PROTO_FILE_MAX_BYTES;

	if (ref->kind != kind || ref->pack >= npacks || ref->raw_len > STORE_OBJECT_MAX_BYTES ||
		ref->stored_len > ref->raw_len)
		return false;
	if ((ref->codec & 0xff) == 0 && (ref->codec != 0 || ref->stored_len != ref->raw_len))
		return false;
	if (ref->offset > end || ref->stored_len > end - ref->offset)
		return false;
	return ref->checks >= ref->offset + ref->stored_len && ref->checks <= end &&
		ref_checks_bytes(ref) <= end - ref->checks;
}

bool proto_attributes_equal(const struct proto_attribute *a, size_t na, const struct proto_attribute *b, size_t nb)
{
	for (size_t i = 0; na == nb && i < na; i++)
		if (strcmp(a[i].key, b[i].key) != 0 || strcmp(a[i].value, b[i].value) != 0)
			return false;
	return na == nb;
}

bool proto_attributes_check(const struct proto_attribute *a, size_t n)
{
	size_t total = 0;

	if (n > PROTO_ATTRIBUTES_MAX)
		return false;
	for (size_t i = 0; i < n; i++) {
		if (!proto_attribute_key_valid(a[i].key) || !proto_text_valid(a[i].value, 0, PROTO_ATTRIBUTE_VALUE_MAX))
			return false;
		if (i > 0 && strcmp(a[i - 1].key, a[i].key) >= 0)
			return false;
		total += strlen(a[i].key) + strlen(a[i].value);
	}
	return total <= PROTO_ATTRIBUTES_MAX_BYTES;
}

int proto_attributes_pack(const struct proto_attribute *a, size_t n, struct proto_arena *arena, size_t *ret_n,
	Vckpt__Attribute ***ret_messages)
{
	Vckpt__Attribute **list = proto_arena_array(arena, n, sizeof *list),
			 *all = proto_arena_array(arena, n, sizeof *all);

	if (!list || !all)
		return proto_no_memory(arena);
	for (size_t i = 0; i < n; i++) {
		vckpt__attribute__init(&all[i]);
		all[i].key = (char *)a[i].key;
		all[i].value = (char *)a[i].value;
		list[i] = &all[i];
	}
	*ret_n = n;
	*ret_messages = list;
	return 0;
}

int proto_attributes_unpack(Vckpt__Attribute **messages, size_t n, struct proto_arena *arena,
	const struct proto_attribute **ret_a, size_t *ret_n)
{
	struct proto_attribute *a = proto_arena_array(arena, n, sizeof *a);

	if (!a)
		return proto_no_memory(arena);
	for (size_t i = 0; i < n; i++)
		a[i] = (struct proto_attribute){messages[i]->key, messages[i]->value};
	*ret_a = a;
	*ret_n = n;
	return 0;
}

int proto_headers_pack(const struct proto_view_header *h, uint32_t n, struct proto_arena *arena, size_t *ret_n,
	Vckpt__ViewHeader ***ret_messages)
{
	Vckpt__ViewHeader **list = proto_arena_array(arena, n, sizeof *list),
			  *all = proto_arena_array(arena, n, sizeof *all);

	if (!list || !all)
		return proto_no_memory(arena);
	for (uint32_t i = 0; i < n; i++) {
		struct base_buf row = BASE_BUF_INIT;

		proto_ref_put(&row, &h[i].ref);
		vckpt__view_header__init(&all[i]);
		all[i].component = (char *)h[i].component;
		all[i].view = (char *)h[i].view;
		all[i].data_bytes = h[i].data_bytes;
		all[i].layout = h[i].layout;
		all[i].ref.data = row.error ? NULL : (uint8_t *)proto_arena_text(arena, (char *)row.data, row.len);
		all[i].ref.len = row.len;
		base_buf_release(&row);
		if (!all[i].ref.data)
			return proto_no_memory(arena);
		list[i] = &all[i];
	}
	*ret_n = n;
	*ret_messages = list;
	return 0;
}

int proto_headers_unpack(Vckpt__ViewHeader **messages, size_t n, struct proto_arena *arena,
	const struct proto_view_header **ret_h, uint32_t *ret_n)
{
	struct proto_view_header *h;

	if (n > REF_HEADERS_MAX)
		return -BASE_EFORMAT;
	h = proto_arena_array(arena, n, sizeof *h);
	if (!h)
		return proto_no_memory(arena);
	for (size_t i = 0; i < n; i++) {
		h[i].component = messages[i]->component;
		h[i].view = messages[i]->view;
		h[i].data_bytes = messages[i]->data_bytes;
		h[i].layout = messages[i]->layout;
		if (!proto_ref_field_get(&messages[i]->ref, &h[i].ref))
			return -BASE_EFORMAT;
	}
	*ret_h = h;
	*ret_n = (uint32_t)n;
	return 0;
}

bool proto_headers_check(const struct proto_view_header *h, uint32_t n, uint32_t nlayouts,
	const struct proto_pack_use *packs, uint32_t npacks)
{
	int c;

	if (n > REF_HEADERS_MAX)
		return false;
	for (uint32_t i = 0; i < n; i++) {
		if (!proto_component_valid(h[i].component) || !proto_text_valid(h[i].view, 1, PROTO_WORD_MAX))
			return false;
		if (h[i].ref.pack >= npacks ||
			!proto_ref_check(&h[i].ref, PROTO_KIND_VIEW_HEADER, npacks, packs[h[i].ref.pack].size))
			return false;
		if (h[i].data_bytes > PROTO_FILE_MAX_BYTES || h[i].layout >= nlayouts)
			return false;
		c = i ? strcmp(h[i - 1].component, h[i].component) : -1;
		if (c == 0)
			c = strcmp(h[i - 1].view, h[i].view);
		if (c > 0 || (c == 0 && h[i - 1].layout >= h[i].layout))
			return false;
	}
	return true;
}
