/* SPDX-License-Identifier: Apache-2.0
 *
 * prune: see prune.h. What goes is decided twice: for all steps at the start, and of each step again under the list's
 * check, by what the list says then. As long as the list has no entries but this writer's removals, nothing can have
 * changed: a removal of what no rule keeps does not make another step one that goes. So the rules are applied again
 * only where others have written, or a snapshot came between; what they said last counts for each step. */
#include "core/upkeep/prune.h"

#include <inttypes.h>
#include <string.h>

#include "core/base/bisect.h"
#include "core/base/cleanup.h"
#include "core/base/le.h"
#include "core/commit/attempt/attempt.h"
#include "core/commit/list/list_facts.h"
#include "core/query/value.h"

struct upkeep_prune {
	struct commit_list *l;
	const struct upkeep_retain *k;
	int64_t now_ns;
	struct upkeep_retain_row *rows; size_t n;
	struct proto_attribute **attributes; /* of rows; NULL: those of the commit */
	uint64_t next; /* the list's next entry when the rows were made */
};

int upkeep_policy_add(const struct commit_list *l, struct upkeep_retain *k, struct base_error *err)
{
	const struct proto_policy *policy = commit_list_policy(l);
	int r = 0;

	for (size_t i = 0; policy && r == 0 && i < policy->nrules; i++)
		r = upkeep_retain_add(k, policy->rules[i], err);
	if (r < 0)
		return base_error_prefix(err, r, "the policy of run %s", commit_list_run(l));
	return policy && policy->nrules ? 0 : 1;
}

uint64_t upkeep_policy_warn_free(const struct commit_list *l)
{
	const struct proto_policy *policy = commit_list_policy(l);
	static const char word[] = "warn-free=";
	uint64_t most = 0, bytes;

	for (size_t i = 0; policy && i < policy->nrules; i++)
		if (strncmp(policy->rules[i], word, sizeof word - 1) == 0 &&
			query_bytes_parse(policy->rules[i] + sizeof word - 1, &bytes))
			most = base_max(most, bytes);
	return most;
}

/* ---- rows ---- */

static void rows_free(struct upkeep_prune *p)
{
	for (size_t i = 0; p->attributes && i < p->n; i++)
		free(p->attributes[i]);
	free(base_steal(p->attributes));
	free(base_steal(p->rows));
	p->n = 0;
}

static int row_make(struct upkeep_prune *p, size_t i)
{
	const struct commit_list_step *s = commit_list_at(p->l, i);
	const struct proto_step_facts *f = commit_list_facts(p->l, s->entry);
	struct upkeep_retain_row *row = &p->rows[i];

	*row = (struct upkeep_retain_row){.entry = s->entry, .rewritten = commit_attempt_rewritten(s->commit.attempt),
		.step = {.run = commit_list_run(p->l), .step = s->step, .bytes = s->commit.bytes,
			.time_ns = s->commit.time_ns, .now_ns = p->now_ns, .attributes = s->commit.attributes,
			.nattributes = s->commit.nattributes}};
	if (!f)
		return 0;
	row->step.pinned = f->pinned;
	row->step.tags = f->tags;
	row->step.ntags = f->ntags;
	if (f->nattributes &&
		commit_list_attributes(p->l, s, &p->attributes[i], &row->step.nattributes) < 0)
		return -ENOMEM;
	row->step.attributes = f->nattributes ? p->attributes[i] : row->step.attributes;
	return 0;
}

static int rows_make(struct upkeep_prune *p, struct base_error *err)
{
	int r = 0;

	rows_free(p);
	p->n = commit_list_count(p->l);
	p->rows = calloc(p->n + 1, sizeof *p->rows);
	p->attributes = calloc(p->n + 1, sizeof *p->attributes);
	if (!p->rows || !p->attributes)
		return base_no_memory(err);
	for (size_t i = 0; r == 0 && i < p->n; i++)
		r = row_make(p, i);
	p->next = commit_list_next(p->l);
	return r < 0 ? base_no_memory(err) : upkeep_retain_apply(p->k, p->rows, p->n, err);
}

int upkeep_prune_new(struct commit_list *l, const struct upkeep_retain *k, int64_t now_ns,
	struct upkeep_prune **ret_p, struct base_error *err)
{
	struct upkeep_prune *p = calloc(1, sizeof *p);
	int r;

	if (!p)
		return base_no_memory(err);
	*p = (struct upkeep_prune){.l = l, .k = k, .now_ns = now_ns};
	r = rows_make(p, err);
	if (r < 0)
		upkeep_prune_free(base_steal(p));
	*ret_p = p;
	return r < 0 ? base_error_prefix(err, r, "run %s", commit_list_run(l)) : 0;
}

void upkeep_prune_free(struct upkeep_prune *p)
{
	if (!p)
		return;
	rows_free(p);
	free(p);
}

const struct upkeep_retain_row *upkeep_prune_rows(const struct upkeep_prune *p, size_t *ret_n)
{
	*ret_n = p->n;
	return p->rows;
}

/* ---- removing ---- */

struct removal { struct upkeep_prune *p; uint64_t step, entry; struct base_error *err; };

static int still_goes(void *arg, struct commit_list *l)
{
	const struct removal *x = arg;
	struct upkeep_prune *p = x->p;
	int64_t row;
	int r = 0;

	if (commit_list_next(l) != p->next && (r = commit_list_know_all(l, x->err)) == 0)
		r = rows_make(p, x->err);
	if (r < 0)
		return r;
	row = base_search(i, (size_t)0, p->n, (p->rows[i].step.step > x->step) - (p->rows[i].step.step < x->step));
	if (row >= 0 && upkeep_prune_goes(&p->rows[row]))
		return 0;
	return base_error_set(x->err, -BASE_EPINNED, "%s/%" PRIu64 " stays: another writer has changed what the rules "
		"keep", commit_list_run(l), x->step);
}

int upkeep_prune_remove(struct upkeep_prune *p, uint64_t step, uint64_t entry, const char *reason,
	struct base_error *err)
{
	struct removal x = {p, step, entry, err};
	int r = commit_list_remove_if(p->l, step, entry, reason, still_goes, &x, err);

	if (r == 0 && commit_list_next(p->l) == p->next + 1)
		p->next++; /* its removal and nothing else */
	return r == -BASE_EPINNED ? 1 : r;
}

struct victim { uint64_t step, entry; };

int upkeep_prune_all(struct upkeep_prune *p, const char *reason, uint64_t *ret_removed, struct base_error *err)
{
	base_cleanup_free struct victim *victims = calloc(p->n + 1, sizeof *victims);
	size_t n = 0;
	int r = victims ? 0 : base_no_memory(err);

	*ret_removed = 0;
	for (size_t i = 0; r == 0 && i < p->n; i++)
		if (upkeep_prune_goes(&p->rows[i]))
			victims[n++] = (struct victim){p->rows[i].step.step, p->rows[i].entry};
	for (size_t i = 0; r >= 0 && i < n; i++) {
		r = upkeep_prune_remove(p, victims[i].step, victims[i].entry, reason, err);
		*ret_removed += r == 0;
		r = r == -ESTALE ? 0 : r;
	}
	return r < 0 ? r : 0;
}
