/* SPDX-License-Identifier: Apache-2.0
 *
 * commons: what ranks hold alike.
 *
 *   digest of a group    SHA-256 of: for each value, by ascending name: length of the name u64, name, SHA-256 of its
 *                        bytes */
#include "core/commit/check/commons.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/base/array.h"
#include "core/base/buf.h"
#include "proto/name.h"

#define BEGIN_NAMES_MAX 8192u           /* values whose names are in `begin` */
#define BEGIN_NAMES_BYTES (UINT64_C(256) << 10)
#define HINT "all ranks of a group hold the same; what differs by rank is kept with per_rank=, a tensor that " \
	"one rank alone has as a Shard with alone=True"

void check_commons_release(struct check_commons *c)
{
	if (!c)
		return;
	for (size_t i = 0; i < c->n; i++) {
		free(c->all[i].group);
		free(c->all[i].name);
	}
	free(c->all);
	free(c->groups);
	free(c->names);
	free(c->digests);
	*c = (struct check_commons){0};
}

static bool text_fits(const char *text, size_t most)
{
	size_t len = text ? strlen(text) : 0;

	return len && len <= most && proto_utf8_valid(text, len);
}

int check_commons_add(struct check_commons *c, const char *group, const char *name, const void *bytes, size_t len,
	struct base_error *err)
{
	struct check_common_value *v;

	if (!text_fits(group, PROTO_COMMON_GROUP_MAX) || !text_fits(name, PROTO_NAME_MAX))
		return base_error_set(err, -EINVAL,
			"\"%.200s\" of the group \"%.200s\": names are UTF-8, of 1 to %u bytes for a group and 1 to %u "
			"for a value", name ? name : "", group ? group : "", PROTO_COMMON_GROUP_MAX, PROTO_NAME_MAX);
	if (base_array_room(c->all, c->room, c->n + 1) < 0)
		return base_no_memory(err);
	v = &c->all[c->n];
	v->group = strdup(group);
	v->name = v->group ? strdup(name) : NULL;
	if (!v->name) {
		free(v->group);
		return base_no_memory(err);
	}
	base_sha256(bytes ? bytes : "", len, &v->digest);
	c->n++;
	return 0;
}

static int value_order(const void *pa, const void *pb)
{
	const struct check_common_value *a = pa, *b = pb;
	int r = strcmp(a->group, b->group);

	return r ? r : strcmp(a->name, b->name);
}

/* The values from `at` on that are of one group; how many. */
static int group_make(struct check_commons *c, size_t at, struct proto_common *g, size_t *ret_n)
{
	base_cleanup_buf struct base_buf rows = BASE_BUF_INIT;
	size_t n = 0;

	for (; at + n < c->n && strcmp(c->all[at + n].group, c->all[at].group) == 0; n++) {
		const struct check_common_value *v = &c->all[at + n];

		c->names[at + n] = v->name;
		memcpy(c->digests + (at + n) * PROTO_COMMON_ROW_BYTES, v->digest.bytes, PROTO_COMMON_ROW_BYTES);
		base_buf_put64(&rows, strlen(v->name));
		base_buf_append_text(&rows, v->name);
		base_buf_append(&rows, v->digest.bytes, sizeof v->digest.bytes);
	}
	if (rows.error)
		return rows.error;
	*g = (struct proto_common){.group = c->all[at].group, .names = c->names + at,
		.digests = c->digests + at * PROTO_COMMON_ROW_BYTES, .nnames = (uint32_t)n};
	base_sha256(rows.data, rows.len, &g->digest);
	*ret_n = n;
	return 0;
}

int check_commons_finish(struct check_commons *c, struct base_error *err)
{
	size_t n = 0, groups = 0;

	if (c->n == 0 || c->groups)
		return 0;
	qsort(c->all, c->n, sizeof *c->all, value_order);
	for (size_t i = 0; i < c->n; i++) {
		if (i && value_order(&c->all[i - 1], &c->all[i]) == 0)
			return base_error_set(err, -EEXIST, "\"%.400s\" is declared twice in the group \"%s\"",
				c->all[i].name, c->all[i].group);
		groups += i == 0 || strcmp(c->all[i - 1].group, c->all[i].group) != 0;
	}
	if (groups > PROTO_COMMONS_MAX)
		return base_error_set(err, -EINVAL,
			"%zu groups of values that ranks hold alike are too many: at most %u", groups,
			PROTO_COMMONS_MAX);
	c->groups = calloc(groups, sizeof *c->groups);
	c->names = calloc(c->n, sizeof *c->names);
	c->digests = malloc(c->n * PROTO_COMMON_ROW_BYTES);
	if (!c->groups || !c->names || !c->digests)
		return base_no_memory(err);
	for (size_t at = 0; at < c->n; at += n)
		if (group_make(c, at, &c->groups[c->ngroups++], &n) < 0)
			return base_no_memory(err);
	return 0;
}

void check_commons_bounded(const struct check_commons *c, struct proto_common *ret_groups)
{
	uint64_t names = 0, bytes = 0;

	for (uint32_t g = 0; g < c->ngroups; g++) {
		uint64_t more = 0;

		ret_groups[g] = c->groups[g];
		for (uint32_t i = 0; i < c->groups[g].nnames; i++)
			more += strlen(c->groups[g].names[i]);
		if (names + c->groups[g].nnames > BEGIN_NAMES_MAX || bytes + more > BEGIN_NAMES_BYTES) {
			ret_groups[g].nnames = 0;
			continue;
		}
		names += c->groups[g].nnames;
		bytes += more;
	}
}

/* ---- two ranks ---- */

/* The first name, by its order, of which the two differ. */
static int group_differ(const struct proto_common *own, const struct proto_common *theirs, uint32_t rank,
	const char *host, struct base_error *err)
{
	uint32_t a = 0, b = 0;

	while (theirs->nnames && (a < own->nnames || b < theirs->nnames)) {
		int c = a == own->nnames ? 1 : b == theirs->nnames ? -1 : strcmp(own->names[a], theirs->names[b]);

		if (c < 0)
			return base_error_set(err, -EINVAL,
				"\"%.300s\" of the group \"%s\" is declared by this rank, but rank %u on %s does not "
				"declare it: " HINT, own->names[a], own->group, rank, host);
		if (c > 0)
			return base_error_set(err, -EINVAL,
				"\"%.300s\" of the group \"%s\" is declared by rank %u on %s, but this rank does not "
				"declare it: " HINT, theirs->names[b], own->group, rank, host);
		if (memcmp(own->digests + a * PROTO_COMMON_ROW_BYTES, theirs->digests + b * PROTO_COMMON_ROW_BYTES,
			    PROTO_COMMON_ROW_BYTES) != 0)
			return base_error_set(err, -EINVAL,
				"\"%.300s\" of the group \"%s\" has another value on this rank than on rank %u on %s: "
				HINT, own->names[a], own->group, rank, host);
		a++;
		b++;
	}
	return base_error_set(err, -EINVAL,
		"a value of the group \"%s\" is not the same on this rank and on rank %u on %s: " HINT, own->group,
		rank, host);
}

int check_commons_compare(const struct check_commons *c, const struct proto_common *theirs, uint32_t n, uint32_t rank,
	const char *host, struct base_error *err)
{
	uint32_t a = 0, b = 0;

	while (c && a < c->ngroups && b < n) {
		int order = strcmp(c->groups[a].group, theirs[b].group);

		if (order == 0 && !base_digest_equal(&c->groups[a].digest, &theirs[b].digest))
			return group_differ(&c->groups[a], &theirs[b], rank, host, err);
		a += order <= 0;
		b += order >= 0;
	}
	return 0;
}

/* ---- all ranks ---- */

struct common_line { const struct proto_common *c; const struct proto_announcement *a; };

static int line_order(const void *pa, const void *pb)
{
	const struct common_line *a = pa, *b = pb;
	int r = strcmp(a->c->group, b->c->group);

	return r ? r : (a->a->rank > b->a->rank) - (a->a->rank < b->a->rank);
}

static int lines_check(const struct common_line *lines, size_t n, struct base_error *err)
{
	const struct common_line *first = lines;

	for (const struct common_line *l = lines; l < lines + n; l++) {
		if (strcmp(l->c->group, first->c->group) != 0)
			first = l;
		if (!base_digest_equal(&l->c->digest, &first->c->digest))
			return base_error_set(err, -EINVAL,
				"a value of the group \"%s\" is not the same on rank %u on %s and on rank %u on %s: "
				HINT, l->c->group, first->a->rank, first->a->host, l->a->rank, l->a->host);
	}
	return 0;
}

int check_commons_announced(const struct proto_announcement *const *all, uint32_t n, struct base_error *err)
{
	base_cleanup_free struct common_line *lines = NULL;
	size_t total = 0, at = 0;

	for (uint32_t i = 0; i < n; i++)
		total += all[i]->ncommons;
	if (total == 0)
		return 0;
	lines = calloc(total, sizeof *lines);
	if (!lines)
		return base_no_memory(err);
	for (uint32_t i = 0; i < n; i++)
		for (uint32_t k = 0; k < all[i]->ncommons; k++)
			lines[at++] = (struct common_line){&all[i]->commons[k], all[i]};
	qsort(lines, total, sizeof *lines, line_order);
	return lines_check(lines, total, err);
}
