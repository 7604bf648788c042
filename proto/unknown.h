/* SPDX-License-Identifier: Apache-2.0
 *
 * unknown: fields of records that this program does not know. No I/O; any thread. */
#ifndef PROTO_UNKNOWN_H
#define PROTO_UNKNOWN_H

#include <stdbool.h>
#include <stddef.h>

/* Records have the numbers of their kinds. */
enum proto_body { PROTO_BODY_STORE = 1, PROTO_BODY_ENTRY, PROTO_BODY_MANIFEST, PROTO_BODY_BEGIN, PROTO_BODY_BASE,
	PROTO_BODY_ANNOUNCEMENT, PROTO_BODY_HEARTBEAT, PROTO_BODY_TRASH, PROTO_BODY_STATS, PROTO_BODY_DAMAGE,
	PROTO_BODY_LAYOUT, PROTO_BODY_PART };
#define PROTO_UNKNOWN_BYTES 80
/* Does a body, which can be decoded, have fields that this program does not know, at any depth? 1: yes; `text`: the
 * first of them, "field 77 of Commit". 0: no. -ENOMEM: it could not be looked at. Fields in a snapshot's rows are
 * not looked for. */
int proto_unknown(enum proto_body kind, const void *body, size_t len, char text[static PROTO_UNKNOWN_BYTES]);

#endif
