/* SPDX-License-Identifier: Apache-2.0
 *
 * stats: one small record a rank and step, put after the commit. The directory's name holds the number of the commit
 * entry, so that a step that is saved again has measures of its own, and the collector knows from the name alone
 * whether the list still shows what they belong to. */
#include "core/commit/notes/stats.h"

#include <inttypes.h>
#include <stdio.h>

#include "core/base/log.h"
#include "core/base/text.h"
#include "core/commit/incoming/incoming.h"

/* ---- names ---- */

static int stats_dir(const char *run, uint64_t step, uint64_t entry, char dir[static STORAGE_NAME_MAX])
{
	int n = snprintf(dir, STORAGE_NAME_MAX, "stats/%s/%" PRIu64 ".%" PRIu64, run, step, entry);

	return n < STORAGE_NAME_MAX ? 0 : -ENAMETOOLONG;
}

bool commit_stats_name_parse(const char *name, struct commit_stats_name *ret_n)
{
	const char *run = name + strlen("stats/"), *at = strncmp(name, "stats/", 6) == 0 ? strchr(run, '/') : NULL;
	uint64_t rank = 0;

	if (!at || at - run > PROTO_RUN_MAX)
		return false;
	snprintf(ret_n->run, sizeof ret_n->run, "%.*s", (int)(at - run), run);
	at = base_decimal(at + 1, '.', INT64_MAX, &ret_n->step);
	at = at ? base_decimal(at, '/', UINT64_MAX - 1, &ret_n->entry) : NULL;
	at = at ? base_decimal(at, 0, UINT32_MAX, &rank) : NULL;
	ret_n->rank = (uint32_t)rank;
	return at && proto_run_valid(ret_n->run);
}

/* ---- writing ---- */

int commit_stats_put(struct store *s, const struct proto_stats *m, uint64_t entry, struct base_error *err)
{
	base_cleanup_buf struct base_buf body = BASE_BUF_INIT;
	char dir[STORAGE_NAME_MAX], name[STORAGE_NAME_MAX + 16];
	struct proto_stats placed = *m;
	int r;

	placed.entry = entry;
	r = proto_stats_encode(&placed, &body);

	if (r < 0)
		return base_error_set(err, r, "the timings of a rank cannot be encoded: %s", base_error_name(r));
	r = stats_dir(m->run, m->step, entry, dir);
	snprintf(name, sizeof name, "%s/%" PRIu32, dir, m->rank);
	if (r == 0)
		r = store_record_put_passing(s->storage, name, STORE_RECORD_STATS, s->info.id, body.data, body.len);
	if (r == STORAGE_PUT_OTHER)
		r = -EEXIST;
	return r < 0 ? base_error_set(err, r, "%s: %s", name, base_error_name(r)) : 0;
}

/* ---- reading ---- */

bool commit_stats_named(const struct proto_stats *m, const struct commit_stats_name *n)
{
	return strcmp(m->run, n->run) == 0 && m->step == n->step && m->rank == n->rank
		&& (m->version == 1 || m->entry == n->entry);
}

/* 0; or why it is left out. */
static int stats_read_one(struct store *s, const char *name, const struct commit_stats_name *n,
	struct proto_stats *ret_m)
{
	struct base_error why = {0};
	int r = store_record_load(s, name, STORE_RECORD_STATS, proto_stats_decode, ret_m, name, &why);

	if (r == -BASE_EVERSION) {
		base_warning("%s: %s; these timings are left out", s->path, why.text);
		r = -ENOENT;
	}
	if (r == 0 && !commit_stats_named(ret_m, n)) {
		proto_stats_release(ret_m);
		r = -BASE_EFORMAT;
	}
	return r;
}

static int stats_order(const void *a, const void *b)
{
	const struct proto_stats *x = a, *y = b;

	return (x->rank > y->rank) - (x->rank < y->rank);
}

int commit_stats_read(struct store *s, const char *run, uint64_t step, uint64_t entry, struct proto_stats **ret_all,
	uint32_t *ret_n, uint32_t *ret_damaged, struct base_error *err)
{
	struct commit_files files = {0};
	struct proto_stats *all = NULL;
	uint32_t n = 0, damaged = 0;
	char dir[STORAGE_NAME_MAX];
	int r = stats_dir(run, step, entry, dir);

	if (r == 0)
		r = commit_files_list(s, dir, &files, err);
	if (r == 0 && files.n)
		r = (all = calloc(files.n, sizeof *all)) ? 0 : -ENOMEM;
	for (size_t i = 0; r == 0 && i < files.n; i++) {
		struct commit_stats_name name;
		int one;

		if (files.all[i].temporary || files.all[i].foreign || !commit_stats_name_parse(files.all[i].name,
				&name))
			continue; /* no one's: the collector and verify report it */
		one = stats_read_one(s, files.all[i].name, &name, &all[n]);
		n += one == 0;
		damaged += one < 0 && one != -ENOENT;
		r = one == -ENOMEM ? one : 0;
	}
	commit_files_release(&files);
	if (r < 0) {
		commit_stats_free(all, n);
		return base_error_prefix(err, r, "the measures in %s cannot be read", dir);
	}
	if (n)
		qsort(all, n, sizeof *all, stats_order);
	*ret_all = all;
	*ret_n = n;
	if (ret_damaged)
		*ret_damaged = damaged;
	return 0;
}

void commit_stats_free(struct proto_stats *all, uint32_t n)
{
	for (uint32_t i = 0; i < n; i++)
		proto_stats_release(&all[i]);
	free(all);
}
