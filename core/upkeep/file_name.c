/* SPDX-License-Identifier: Apache-2.0
 *
 * file_name: see file_name.h. */
#include "core/upkeep/file_name.h"

#include <stdio.h>

#include "core/commit/incoming/heartbeat.h"
#include "core/commit/incoming/incoming.h"
#include "core/commit/list/list.h"
#include "core/commit/notes/note.h"

/* What follows the slash after a part of a name, which is copied; NULL: there is none, or the part is too long. */
static const char *part_take(const char *at, char *ret_part, size_t room)
{
	const char *slash = strchr(at, '/');

	if (!slash || (size_t)(slash - at) >= room)
		return NULL;
	snprintf(ret_part, room, "%.*s", (int)(slash - at), at);
	return slash + 1;
}

static bool under(const char *name, const char *dir) { return strncmp(name, dir, strlen(dir)) == 0; }

static bool all_digits(const char *text) { return *text && !text[strspn(text, "0123456789")]; }

static int parse_pack(const char *name, struct file_name *n)
{
	const char *base = strrchr(name, '/') + 1;
	char path[STORAGE_NAME_MAX];
	struct pack_name parsed;
	size_t len = strlen(base);

	if (len < 6 || len - 5 >= sizeof n->pack)
		return FILE_FOREIGN;
	snprintf(n->pack, sizeof n->pack, "%.*s", (int)(len - 5), base);
	if (pack_path(n->pack, path) < 0 || strcmp(path, name) != 0)
		return FILE_FOREIGN;
	pack_name_parse(n->pack, &parsed);
	snprintf(n->attempt, sizeof n->attempt, "%s", parsed.attempt);
	snprintf(n->class, sizeof n->class, "%s", parsed.class);
	return FILE_PACK;
}

static int parse_run(const char *name, struct file_name *n)
{
	const char *at = part_take(name + strlen("runs/"), n->run, sizeof n->run);
	enum commit_list_mark_file mark;

	if (!at || !proto_run_valid(n->run))
		return FILE_FOREIGN;
	if (under(at, "manifests/"))
		return base_digest_parse(at + 10, strlen(at + 10), &n->digest) == 0 ? STORE_RECORD_MANIFEST
			: FILE_FOREIGN;
	mark = commit_list_mark_parse(at, &n->number);
	n->collected = mark == COMMIT_LIST_COLLECTED;
	if (mark != COMMIT_LIST_NO_MARK)
		return n->collected ? STORE_RECORD_ENTRY : STORE_RECORD_MARK;
	/* 12 digits, and more only where the number needs them */
	if (!all_digits(at) || strlen(at) < 12 || strlen(at) > 19 || (at[0] == '0' && strlen(at) > 12))
		return FILE_FOREIGN;
	n->number = strtoull(at, NULL, 10);
	return STORE_RECORD_ENTRY;
}

static int parse_incoming(const char *name, struct file_name *n)
{
	const char *at = part_take(name + strlen("incoming/"), n->run, sizeof n->run);

	at = at ? part_take(at, n->attempt, sizeof n->attempt) : NULL;
	if (!at || strchr(at, '/') || !proto_run_valid(n->run) || !commit_attempt_name_valid(n->attempt)) {
		n->attempt[0] = 0;
		return FILE_FOREIGN;
	}
	if (strcmp(at, "begin") == 0)
		return STORE_RECORD_BEGIN;
	if (under(at, "base.") && all_digits(at + 5))
		return STORE_RECORD_BASE;
	return under(at, "part.") && all_digits(at + 5) ? STORE_RECORD_ANNOUNCEMENT : FILE_FOREIGN;
}

int file_name_parse(const char *name, struct file_name *ret_n)
{
	struct file_name *n = ret_n;

	*n = (struct file_name){0};
	if (under(name, "packs/")) {
		n->kind = parse_pack(name, n);
	} else if (under(name, "runs/")) {
		n->kind = parse_run(name, n);
	} else if (under(name, "incoming/")) {
		n->kind = parse_incoming(name, n);
	} else if (commit_stats_name_parse(name, &n->stats)) {
		n->kind = STORE_RECORD_STATS;
		memcpy(n->run, n->stats.run, sizeof n->run);
	} else if (under(name, "hosts/") && commit_heartbeat_name_parse(name + 6, n->launch, n->host, &n->number)) {
		n->kind = STORE_RECORD_HEARTBEAT;
	} else if (under(name, "trash/") && !strchr(name + 6, '/')) {
		n->kind = STORE_RECORD_TRASH;
	} else if (commit_note_name_parse(name, n->pack)) {
		n->kind = STORE_RECORD_DAMAGE;
	} else if (strcmp(name, STORE_FILE) == 0) {
		n->kind = STORE_RECORD_STORE;
	} else if (strcmp(name, "reserve") == 0) {
		n->kind = FILE_RESERVE;
	} else if (under(name, "index/")) {
		n->kind = FILE_INDEX;
	}
	return n->kind;
}
