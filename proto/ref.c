/* SPDX-License-Identifier: Apache-2.0
 *
 * ref: what several records hold: references, attributes, view headers.
 *
 *   reference, 72 bytes: digest 32 | offset u64 | checks u64 | raw_len u64 | stored_len u64 | pack u32 | codec u16 |
 *   kind u8 | 0 */
#include "proto/codec_internal.h"

const struct codec_row proto_ref_row = CODEC_ROW_OF(struct proto_ref, PROTO_REF_BYTES,
	CODEC_REF_COLUMNS(struct proto_ref, ));

/* Checks of an object: 8 bytes for each block, 4 more where it is encoded. */
static uint64_t ref_checks_bytes(const struct proto_ref *ref)
{
	return base_block_count(ref->raw_len) * ((ref->codec & 0xff) ? 12 : 8);
}

bool proto_ref_check(const struct proto_ref *ref, unsigned kind, const struct proto_pack_use *packs, uint32_t npacks)
{
	uint64_t size = ref->pack < npacks ? packs[ref->pack].size : 0, end = size ? size : PROTO_FILE_MAX_BYTES;

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

/* ---- attributes ---- */

static const struct codec_field attribute_fields[] = {
	CODEC_FIELD(TEXT, Attribute, attribute, key, .valid = proto_attribute_key_valid),
	CODEC_FIELD(TEXT, Attribute, attribute, value, .text = {0, PROTO_ATTRIBUTE_VALUE_MAX}),
};
const struct codec_message proto_attribute_message = CODEC_MESSAGE_OF(attribute, struct proto_attribute,
	attribute_fields);

bool proto_attributes_equal(const struct proto_attribute *a, size_t na, const struct proto_attribute *b, size_t nb)
{
	for (size_t i = 0; na == nb && i < na; i++)
		if (strcmp(a[i].key, b[i].key) != 0 || strcmp(a[i].value, b[i].value) != 0)
			return false;
	return na == nb;
}

size_t proto_attributes_merge(const struct proto_attribute *a, size_t na, const struct proto_attribute *b, size_t nb,
	struct proto_attribute *ret_all)
{
	size_t i = 0, k = 0, n = 0;

	while (i < na || k < nb) {
		int order = i == na ? 1 : k == nb ? -1 : strcmp(a[i].key, b[k].key);

		ret_all[n++] = order < 0 ? a[i] : b[k];
		i += order <= 0;
		k += order >= 0;
	}
	return n;
}

bool proto_attributes_check(const struct proto_attribute *a, size_t n)
{
	size_t total = 0;

	for (size_t i = 0; i < n; i++) {
		if (i > 0 && strcmp(a[i - 1].key, a[i].key) >= 0)
			return false;
		total += strlen(a[i].key) + strlen(a[i].value);
	}
	return total <= PROTO_ATTRIBUTES_MAX_BYTES;
}

/* ---- view headers ---- */

static const struct codec_field header_fields[] = {
	CODEC_FIELD(TEXT, ViewHeader, view_header, component, .valid = proto_component_valid),
	CODEC_FIELD(TEXT, ViewHeader, view_header, view, .text = {1, PROTO_WORD_MAX}),
	CODEC_FIELD(ROW, ViewHeader, view_header, ref, .row = &proto_ref_row),
	CODEC_FIELD(NUMBER, ViewHeader, view_header, data_bytes, .max = PROTO_FILE_MAX_BYTES),
	CODEC_FIELD(NUMBER, ViewHeader, view_header, layout),
};
const struct codec_message proto_view_header_message = CODEC_MESSAGE_OF(view_header, struct proto_view_header,
	header_fields);

bool proto_headers_check(const struct proto_view_header *h, uint32_t n, uint32_t nlayouts,
	const struct proto_pack_use *packs, uint32_t npacks)
{
	int c;

	for (uint32_t i = 0; i < n; i++) {
		if (!proto_ref_check(&h[i].ref, PROTO_KIND_VIEW_HEADER, packs, npacks) || h[i].layout >= nlayouts)
			return false;
		c = i ? strcmp(h[i - 1].component, h[i].component) : -1;
		if (c == 0)
			c = strcmp(h[i - 1].view, h[i].view);
		if (c > 0 || (c == 0 && h[i - 1].layout >= h[i].layout))
			return false;
	}
	return true;
}
