/* SPDX-License-Identifier: Apache-2.0
 *
 * scan: checks a message's bytes before protobuf-c unpacks it, in one pass and without memory. The bytes of strings, of
 * tables and of unknown fields are skipped.
 *
 * protobuf-c allocates for every field that it meets: some 100 bytes for an unknown one of two bytes, and a message for
 * two bytes that claim to be one. An object of 64 MiB may have 0.3 MB in its pack, so the bound of the arena alone
 * would let a small file take much memory before it is refused. Here such a body is refused first: more unknown fields
 * than a later version could have meant, or messages, texts and tables that would need more memory than the arena has.
 * The count is a lower bound of what unpacking takes, so a body that fits the arena is never refused here. */
#include "proto/proto_internal.h"

#define SCAN_MEMBER_BYTES 32u /* of protobuf-c's note of one field; the first 16 of a message are on its stack */
#define SCAN_MEMBERS_FREE 16u
#define SCAN_TAG_MAX ((UINT32_C(1) << 29) - 1)

enum { WIRE_VARINT, WIRE_64, WIRE_BYTES, WIRE_32 = 5 };

struct scan {
	uint64_t memory;  /* left */
	uint64_t unknown; /* fields left */
};

struct scan_field { uint32_t tag; unsigned wire; const uint8_t *bytes; uint64_t len; };

static bool scan_varint(const uint8_t **at, const uint8_t *end, unsigned most, uint64_t *ret)
{
	uint64_t v = 0;

	if (*at < end && **at < 0x80) {
		*ret = *(*at)++;
		return true;
	}
	for (unsigned i = 0; i < most && *at < end; i++) {
		uint8_t byte = *(*at)++;

		v |= (uint64_t)(byte & 0x7f) << (7 * i);
		if (byte < 0x80) {
			*ret = v;
			return true;
		}
	}
	return false;
}

/* The next field; false: the bytes are none. */
static bool scan_next(const uint8_t **at, const uint8_t *end, struct scan_field *ret_f)
{
	uint64_t key, v;

	if (!scan_varint(at, end, 5, &key) || key >> 3 == 0 || key >> 3 > SCAN_TAG_MAX)
		return false;
	*ret_f = (struct scan_field){.tag = (uint32_t)(key >> 3), .wire = key & 7};
	switch (ret_f->wire) {
	case WIRE_VARINT: return scan_varint(at, end, 10, &v);
	case WIRE_64: ret_f->len = 8; break;
	case WIRE_32: ret_f->len = 4; break;
	case WIRE_BYTES:
		if (!scan_varint(at, end, 5, &ret_f->len))
			return false;
		break;
	default: return false;
	}
	if (ret_f->len > (uint64_t)(end - *at))
		return false;
	ret_f->bytes = *at;
	*at += ret_f->len;
	return true;
}

static bool scan_take(struct scan *s, uint64_t bytes)
{
	if (bytes > s->memory)
		return false;
	s->memory -= bytes;
	return true;
}

static bool scan_message(struct scan *s, const ProtobufCMessageDescriptor *d, const uint8_t *at, const uint8_t *end);

/* Numbers go up from 1, mostly without gaps: a field's descriptor is where its number says. */
static const ProtobufCFieldDescriptor *scan_known(const ProtobufCMessageDescriptor *d, uint32_t tag)
{
	if (tag <= d->n_fields && d->fields[tag - 1].id == tag)
		return &d->fields[tag - 1];
	return protobuf_c_message_descriptor_get_field(d, tag);
}

static bool scan_one(struct scan *s, const ProtobufCMessageDescriptor *d, const struct scan_field *f)
{
	const ProtobufCFieldDescriptor *known = scan_known(d, f->tag);

	if (!known)
		return s->unknown-- > 0 && scan_take(s, sizeof(ProtobufCMessageUnknownField) + f->len);
	if (known->label == PROTOBUF_C_LABEL_REPEATED && !scan_take(s, sizeof(void *)))
		return false;
	if (f->wire != WIRE_BYTES)
		return true;
	if (known->type == PROTOBUF_C_TYPE_MESSAGE)
		return scan_message(s, known->descriptor, f->bytes, f->bytes + f->len);
	return scan_take(s, f->len);
}

/* No message here nests into itself, so this goes five messages deep. */
static bool scan_message(struct scan *s, const ProtobufCMessageDescriptor *d, const uint8_t *at, const uint8_t *end)
{
	struct scan_field f;

	if (!scan_take(s, d->sizeof_message))
		return false;
	for (uint64_t n = 0; at < end; n++)
		if (!scan_next(&at, end, &f) || !scan_one(s, d, &f)
		    || (n >= SCAN_MEMBERS_FREE && !scan_take(s, SCAN_MEMBER_BYTES)))
			return false;
	return true;
}

int proto_scan(const ProtobufCMessageDescriptor *d, const void *body, size_t len, uint64_t memory)
{
	struct scan s = {.memory = memory, .unknown = STORE_UNKNOWN_MAX + len / STORE_UNKNOWN_EVERY_BYTES};

	return scan_message(&s, d, body, (const uint8_t *)body + len) ? 0 : -BASE_EFORMAT;
}

size_t proto_scan_head(const void *body, size_t len)
{
	const uint8_t *at = body, *end = at + len;
	struct scan_field f;
	size_t n = 0;

	for (unsigned i = 0; i <= STORE_UNKNOWN_MAX && at < end && scan_next(&at, end, &f) && f.tag <= 2; i++)
		n = (size_t)(at - (const uint8_t *)body);
	return n;
}
