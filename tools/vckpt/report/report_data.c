/* SPDX-License-Identifier: Apache-2.0
 *
 * The numbers of a run: what its commit entries say of every step, and what the ranks measured of the newest ones. Of
 * many steps only the entries are read, so that 10,000 of them cost what `ls` does; of each measured step a manifest
 * and a file a rank, whose sums are kept. */
#include <inttypes.h>
#include <string.h>

#include "tools/vckpt/report/report.h"

#define MEASURED_STEPS 100u     /* unless the user says how many */
#define MEASURED_FILES 20000u

struct report_commit *report_commits(const struct commit_list *l, size_t *ret_n)
{
	size_t n = commit_list_count(l);
	struct report_commit *c = calloc(n + 1, sizeof *c);

	for (size_t i = 0; c && i < n; i++) {
		const struct commit_list_step *s = commit_list_at(l, i);

		c[i] = (struct report_commit){.time_ns = s->commit.time_ns, .step = s->step,
			.bytes = (double)s->commit.bytes, .added = (double)s->commit.new_bytes};
	}
	*ret_n = n;
	if (c)
		report_commits_sum(c, n);
	return c;
}

void report_commits_sum(struct report_commit *c, size_t n)
{
	for (size_t i = 0; i < n; i++) {
		c[i].all_bytes = c[i].bytes + (i ? c[i - 1].all_bytes : 0);
		c[i].all_added = c[i].added + (i ? c[i - 1].all_added : 0);
	}
}

/* Number of a phase of the run; REPORT_COLUMNS: no more room. */
static int run_phase(struct report_run *run, const char *name)
{
	unsigned i = 0;

	while (i < run->nphases && strcmp(run->phases[i], name) != 0)
		i++;
	run->phases_left_out |= i == REPORT_COLUMNS;
	if (i < run->nphases || i == REPORT_COLUMNS)
		return (int)i;
	run->phases[i] = strdup(name);
	return run->phases[i] ? (int)run->nphases++ : -ENOMEM;
}

static int save_sums(struct report_run *run, struct report_save *save, const struct stalls *st)
{
	for (unsigned row = 0; row < STALLS_MILESTONES + st->nphases; row++) {
		struct stalls_sum sum;
		int at, r = stalls_sum(st, row, &sum);

		if (r < 0)
			return r;
		if (!sum.n)
			continue;
		sum.slowest = st->ranks[sum.slowest].rank;
		at = row < STALLS_MILESTONES ? (int)row : run_phase(run, stalls_row_name(st, row));
		if (at < 0)
			return at;
		if (row < STALLS_MILESTONES || at < (int)REPORT_COLUMNS)
			save->sums[row < STALLS_MILESTONES ? row : STALLS_MILESTONES + (unsigned)at] = sum;
	}
	return 0;
}

/* Bytes that were new to the store, before and after encoding. */
static void save_bytes(struct report_save *save, const struct stalls *st)
{
	bool measured = false;

	save->written = (double)stalls_bytes_total(st, STALLS_WRITTEN);
	for (uint32_t i = 0; i < st->nranks; i++) {
		const uint64_t *b = st->ranks[i].bytes;

		measured |= st->ranks[i].source == STALLS_STATS;
		save->raw += report_most((double)b[STALLS_COPIED] - (double)b[STALLS_UNCHANGED] -
			(double)b[STALLS_DEDUPLICATED], 0);
	}
	if (!measured)
		save->raw = save->written = NAN;
}

/* One step. What is wrong with its files is counted: other steps may be sound all the same. */
static int run_save(struct report_run *run, struct store *s, size_t i, struct base_error *err)
{
	const struct commit_list_step *step = commit_list_at(run->list, i);
	struct report_save *save = &run->saves[run->nsaves];
	struct stalls st;
	int r = stalls_read(&st, s, run->name, step, err);

	if (r == -BASE_EDAMAGED || r == -BASE_EFORMAT || r == -ENOENT || r == -BASE_EVERSION) {
		base_warning("%s/%" PRIu64 " is left out: %s", run->name, step->step, err->text);
		run->unread++;
		run->damaged += r == -BASE_EDAMAGED || r == -BASE_EFORMAT;
		*err = (struct base_error){0};
		r = 0;
	} else if (r == 0) {
		*save = (struct report_save){.step = step->step, .nranks = st.nranks};
		save_bytes(save, &st);
		r = save_sums(run, save, &st);
		run->damaged += st.damaged;
		if (run->nsaves++ == 0) {
			run->newest = st;
			return r;
		}
	}
	stalls_release(&st);
	return r;
}

int report_run_read(struct report_run *run, struct store *s, const char *name, uint64_t most, struct base_error *err)
{
	uint64_t files = 0, want;
	int r = commit_list_open(s, name, false, &run->list, err);

	if (r < 0)
		return r;
	run->name = name;
	run->commits = report_commits(run->list, &run->ncommits);
	want = base_min(most ? most : MEASURED_STEPS, run->ncommits);
	run->saves = calloc(want + 1, sizeof *run->saves);
	if (!run->commits || !run->saves)
		return base_no_memory(err);
	for (uint64_t k = 0; r == 0 && k < want && (most || files < MEASURED_FILES); k++) { /* the newest first */
		tool_progress_update(&run->progress, k, want);
		r = run_save(run, s, run->ncommits - 1 - (size_t)k, err);
		files += run->nsaves ? run->saves[run->nsaves - 1].nranks : 0;
	}
	for (size_t a = 0, b = run->nsaves; a + 1 < b; a++) {
		struct report_save swap = run->saves[--b];

		run->saves[b] = run->saves[a];
		run->saves[a] = swap;
	}
	return r;
}

void report_run_release(struct report_run *run)
{
	for (unsigned i = 0; i < run->nphases; i++)
		free(run->phases[i]);
	stalls_release(&run->newest);
	free(run->saves);
	free(run->commits);
	commit_list_close(run->list);
}
