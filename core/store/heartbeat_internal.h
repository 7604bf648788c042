/* SPDX-License-Identifier: Apache-2.0
 *
 * heartbeat_internal: a launch's sign of life while a save is under way (docs/format/incoming.md). */
#ifndef CORE_STORE_HEARTBEAT_INTERNAL_H
#define CORE_STORE_HEARTBEAT_INTERNAL_H

#include "core/store/attempt.h"

#define STORE_HEARTBEAT_EVERY_S 5u

struct store_heartbeat;
/* Puts number 0 (durable on return), then n + 1 every 5 s from a thread of its own, deleting n after it. */
int store_heartbeat_start(struct store *s, const char *launch, const char *run, struct store_heartbeat **ret_h,
	struct base_error *err);
void store_heartbeat_stop(struct store_heartbeat *h); /* joins, deletes the file; NULL-safe */

/* "<launch>.<host>.<number>", the last part of a name under hosts/. */
bool store_heartbeat_name_parse(const char *base, char launch[static 17], char host[static 65], uint64_t *ret_number);

#endif
