/* SPDX-License-Identifier: Apache-2.0
 *
 * unknown: fields of a record that this program does not know. A later version may add fields that readers may ignore,
 * so decoders accept them; verify reports them. No message here contains itself, so the walk ends. */
#include "proto/unknown.h"

#include "proto/proto_internal.h"

#include <stdio.h>

static const ProtobufCMessageDescriptor *const unknown_bodies[] = {
	[PROTO_BODY_STORE] = &vckpt__store__descriptor,
	[PROTO_BODY_ENTRY] = &vckpt__entry__descriptor,
	[PROTO_BODY_MANIFEST] = &vckpt__manifest__descriptor,
	[PROTO_BODY_BEGIN] = &vckpt__begin__descriptor,
	[PROTO_BODY_BASE] = &vckpt__base_record__descriptor,
	[PROTO_BODY_ANNOUNCEMENT] = &vckpt__announcement__descriptor,
	[PROTO_BODY_HEARTBEAT] = &vckpt__heartbeat__descriptor,
	[PROTO_BODY_TRASH] = &vckpt__trash__descriptor,
	[PROTO_BODY_STATS] = &vckpt__stats__descriptor,
	[PROTO_BODY_DAMAGE] = &vckpt__damage__descriptor,
	[PROTO_BODY_LAYOUT] = &vckpt__layout__descriptor,
	[PROTO_BODY_PART] = &vckpt__part__descriptor,
};

static bool unknown_in(const ProtobufCMessage *m, char text[static PROTO_UNKNOWN_BYTES]);

/* The messages in one field. */
static bool unknown_below(const ProtobufCMessage *m, const ProtobufCFieldDescriptor *f,
	char text[static PROTO_UNKNOWN_BYTES])
{
	const uint8_t *at = (const uint8_t *)m + f->offset;
	ProtobufCMessage *const *all = (ProtobufCMessage *const *)(const void *)at;
	size_t n = 1;

	if (f->label == PROTOBUF_C_LABEL_REPEATED) {
		memcpy(&n, (const uint8_t *)m + f->quantifier_offset, sizeof n);
		memcpy(&all, at, sizeof all);
	}
	for (size_t i = 0; i < n; i++)
		if (all[i] && unknown_in(all[i], text))
			return true;
	return false;
}

static bool unknown_in(const ProtobufCMessage *m, char text[static PROTO_UNKNOWN_BYTES])
{
	if (m->n_unknown_fields) {
		snprintf(text, PROTO_UNKNOWN_BYTES, "field %u of %s", m->unknown_fields[0].tag,
			m->descriptor->short_name);
		return true;
	}
	for (unsigned i = 0; i < m->descriptor->n_fields; i++) {
		const ProtobufCFieldDescriptor *f = &m->descriptor->fields[i];

		if (f->type == PROTOBUF_C_TYPE_MESSAGE && unknown_below(m, f, text))
			return true;
	}
	return false;
}

int proto_unknown(enum proto_body kind, const void *body, size_t len, char text[static PROTO_UNKNOWN_BYTES])
{
	struct proto_arena *arena;
	ProtobufCMessage *m;
	int found = proto_unpack(unknown_bodies[kind], body, len, &arena, &m);

	if (found < 0)
		return found;
	found = unknown_in(m, text);
	proto_arena_free(arena);
	return found;
}
