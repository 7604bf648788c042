/* SPDX-License-Identifier: Apache-2.0
 *
 * commons: values that ranks of a job have to hold alike: a learning rate, the names of a state's parts. A rank
 * declares values by name in groups. All ranks that declare anything in one group must declare the same names with the
 * same bytes; ranks that declare nothing in it do not matter. Only digests are kept. `begin` has the rows of the rank
 * that put it, so that another rank can say which value differs before anything is written (begin_compare in
 * attempt_begin.c); an announcement has one digest a group, and the committing rank compares those.
 *
 * One thread at a time; no I/O. */
#ifndef CORE_COMMIT_CHECK_COMMONS_H
#define CORE_COMMIT_CHECK_COMMONS_H

#include "core/base/error.h"
#include "proto/message.h"

struct check_commons {
	struct check_common_value { char *group, *name; struct base_digest digest; } *all;
	size_t n, room;
	/* once finished: sorted by group; the names point into `all` */
	struct proto_common *groups; uint32_t ngroups;
	const char **names; uint8_t *digests;
};
void check_commons_release(struct check_commons *c); /* NULL-safe, zeroes */
/* Group and name are copied, of the bytes a digest. -EINVAL: no such name can be. */
int check_commons_add(struct check_commons *c, const char *group, const char *name, const void *bytes, size_t len,
	struct base_error *err);
/* After the last value: fills in `groups`. -EEXIST: a name was declared twice in a group. */
int check_commons_finish(struct check_commons *c, struct base_error *err);
/* As many groups as fit into `begin` with their rows, the others with their digests alone; n of them. */
void check_commons_bounded(const struct check_commons *c, struct proto_common *ret_groups);
/* Compares the groups that both have. -EINVAL with a sentence: which value differs on rank `rank` on `host`. */
int check_commons_compare(const struct check_commons *c, const struct proto_common *theirs, uint32_t n, uint32_t rank,
	const char *host, struct base_error *err);
/* The digests of all announcements. -EINVAL with a sentence: which ranks differ in which group. */
int check_commons_announced(const struct proto_announcement *const *all, uint32_t n, struct base_error *err);

#endif
