/* SPDX-License-Identifier: Apache-2.0
 *
 * vckpt metrics: how saving to a store goes, as Prometheus text for node_exporter's textfile collector. Cheap enough
 * for every minute: of each run it reads what is visible, the measures of the step that was saved last, and the newest
 * entries. A run that cannot be read hides no other. */
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "core/base/clock.h"
#include "core/base/text.h"
#include "core/commit/list/list_history.h"
#include "core/commit/notes/note.h"
#include "core/commit/notes/stats.h"
#include "tools/vckpt/tool.h"

#define NEWEST_ENTRIES 128u /* in which failed saves are counted */

enum of_run { READABLE, STEPS, NEWEST_STEP, LAST_COMMIT, DURATION, STALL, SAVED_BYTES, WRITTEN_BYTES, LOGICAL, ADDED,
	FAILED, FAILED_SINCE, LAST_FAILURE, OF_RUN };
enum of_store { PACKS, PACK_BYTES, FREE_BYTES, SIZE_BYTES, DAMAGED, UNDER_WAY, LEFT_OVER, OF_STORE };

struct metric { const char *name; int decimals; const char *help; };
static const struct metric of_run[OF_RUN] = {
	[READABLE] = {"run_readable", 0, "1 if the list of the run can be read, 0 if not."},
	[STEPS] = {"run_steps", 0, "Visible steps."},
	[NEWEST_STEP] = {"run_newest_step", 0, "Number of the step that was saved last, of the visible ones."},
	[LAST_COMMIT] = {"run_last_commit_timestamp_seconds", 3, "When it was committed, by its writer's clock."},
	[DURATION] = {"run_last_save_seconds", 6, "From its call to its commit, of the slowest rank."},
	[STALL] = {"run_last_save_stall_seconds", 6, "How long it held up the training, of the slowest rank."},
	[SAVED_BYTES] = {"run_last_save_bytes", 0, "What it holds."},
	[WRITTEN_BYTES] = {"run_last_save_added_bytes", 0, "What it stored that was not there before."},
	[LOGICAL] = {"run_bytes", 0, "What the visible steps hold, each by itself."},
	[ADDED] = {"run_added_bytes", 0, "What their saves have stored."},
	[FAILED] = {"run_failed_saves", 0, "Failed saves among the newest entries of the run's list."},
	[FAILED_SINCE] = {"run_failed_saves_since_commit", 0, "Failed saves since the newest save that did not."},
	[LAST_FAILURE] = {"run_last_failure_timestamp_seconds", 3, "When the newest failed save was given up."},
};
static const struct metric of_store[OF_STORE] = {
	[PACKS] = {"store_packs", 0, "Packs on disk, needed or not."},
	[PACK_BYTES] = {"store_pack_bytes", 0, "Their bytes."},
	[FREE_BYTES] = {"store_free_bytes", 0, "What the file system has free for users."},
	[SIZE_BYTES] = {"store_size_bytes", 0, "The size of the file system."},
	[DAMAGED] = {"store_damaged_packs", 0, "Packs in which vckpt verify found damage."},
	[UNDER_WAY] = {"store_saves_under_way", 0, "Saves under way whose writers are not known to be dead."},
	[LEFT_OVER] = {"store_saves_left_over", 0, "What dead writers left; vckpt gc deletes it."},
};

/* NAN: not known. */
struct run { const char *name; double value[OF_RUN]; };
struct metrics {
	struct tool *t;
	struct run *runs;
	size_t nruns;
	double store[OF_STORE];
	int worst;
};

/* ---- a run ---- */

struct failures { struct commit_list_history seen; double all, since, last; bool committed; };

static int count_failures(void *arg, const struct commit_list_event *e)
{
	struct failures *f = arg;

	if (f->seen.collected)
		return 1;
	f->committed |= e->kind == COMMIT_LIST_SAVED;
	if (e->kind != COMMIT_LIST_ABORTED)
		return 0;
	if (isnan(f->last))
		f->last = (double)e->time_ns * 1e-9;
	f->all++;
	f->since += !f->committed;
	return 0;
}

static int read_failures(struct commit_list *l, double *value, struct base_error *err)
{
	struct failures f = {.last = NAN};
	int r = commit_list_history_each(l, NEWEST_ENTRIES, count_failures, &f, &f.seen, err);

	if (r < 0)
		return r;
	value[FAILED] = f.all;
	value[FAILED_SINCE] = f.since;
	value[LAST_FAILURE] = f.last;
	return 0;
}

/* Of one rank's clock; a time that was not recorded is 0. */
static void longest(double *seconds, uint64_t from_ns, uint64_t to_ns)
{
	double s = to_ns >= from_ns ? (double)(to_ns - from_ns) * 1e-9 : 0;

	if (from_ns && to_ns >= from_ns && !(*seconds >= s))
		*seconds = s;
}

/* Of imports, and of saves whose measures were lost, nothing is known. */
static void read_measures(struct store *s, const char *run, const struct commit_list_step *step, double *value)
{
	struct proto_stats *all = NULL;
	uint32_t n = 0;

	if (commit_stats_read(s, run, step->step, step->entry, &all, &n, NULL, NULL) < 0)
		return;
	for (uint32_t i = 0; i < n; i++) {
		longest(&value[DURATION], all[i].submitted_ns, all[i].committed_ns);
		longest(&value[STALL], all[i].submitted_ns, all[i].staged_ns);
	}
	commit_stats_free(all, n);
}

static void read_steps(struct store *s, const struct commit_list *l, double *value)
{
	const struct commit_list_step *last = NULL;

	value[STEPS] = (double)commit_list_count(l);
	value[LOGICAL] = value[ADDED] = 0;
	for (size_t i = 0; i < commit_list_count(l); i++) {
		const struct commit_list_step *step = commit_list_at(l, i);

		value[LOGICAL] += (double)step->commit.bytes;
		value[ADDED] += (double)step->commit.new_bytes;
		if (!last || step->entry > last->entry)
			last = step;
	}
	if (!last)
		return;
	value[NEWEST_STEP] = (double)last->step;
	value[LAST_COMMIT] = (double)last->commit.time_ns * 1e-9;
	value[SAVED_BYTES] = (double)last->commit.bytes;
	value[WRITTEN_BYTES] = (double)last->commit.new_bytes;
	read_measures(s, commit_list_run(l), last, value);
}

static void read_run(struct metrics *m, struct run *run)
{
	struct base_error err = {0};
	struct commit_list *l;
	int r = commit_list_open(m->t->store, run->name, false, &l, &err);

	for (unsigned i = 0; i < OF_RUN; i++)
		run->value[i] = NAN;
	if (r == 0) {
		read_steps(m->t->store, l, run->value);
		if (commit_list_damaged(l))
			r = base_error_set(&err, -BASE_EDAMAGED, "run %s: %" PRIu64 " %s of its list damaged (vckpt "
				"verify)", run->name, commit_list_damaged(l),
				base_plural(commit_list_damaged(l), "entry is", "entries are"));
		else
			r = read_failures(l, run->value, &err);
		commit_list_close(l);
	}
	run->value[READABLE] = r == 0;
	if (r < 0)
		m->worst = tool_fail(m->t, &err);
}

/* ---- the store ---- */

static int add_pack(void *arg, const struct storage_entry *e)
{
	double *value = arg;

	value[PACKS] += !e->foreign && !e->temporary;
	value[PACK_BYTES] += e->foreign || e->temporary ? 0 : (double)e->size;
	return 0;
}

static void read_store(struct metrics *m)
{
	struct store *s = m->t->store;
	struct commit_incoming *incoming;
	struct commit_notes notes = {0};
	struct storage_stat st;
	size_t n;

	for (unsigned i = 0; i < OF_STORE; i++)
		m->store[i] = NAN;
	m->store[PACKS] = m->store[PACK_BYTES] = 0;
	if (storage_list_files(s->storage, "packs", add_pack, m->store) < 0)
		m->store[PACKS] = m->store[PACK_BYTES] = NAN;
	if (s->storage->ops->stat(s->storage, &st) == 0) {
		m->store[FREE_BYTES] = (double)st.blocks_available * (double)st.block_bytes;
		m->store[SIZE_BYTES] = (double)st.blocks * (double)st.block_bytes;
	}
	if (commit_notes_read(s, &notes) == 0 && !notes.unknown)
		m->store[DAMAGED] = (double)notes.n;
	commit_notes_release(&notes);
	if (commit_incoming_read(s, &incoming, &n, NULL) < 0)
		return;
	m->store[UNDER_WAY] = m->store[LEFT_OVER] = 0;
	for (size_t i = 0; i < n; i++)
		m->store[incoming[i].state == COMMIT_DEAD ? LEFT_OVER : UNDER_WAY]++;
	commit_incoming_free(incoming, n);
}

/* ---- text ---- */

/* A label's value: UTF-8, and three characters escaped. */
static void write_label(FILE *to, const char *name, const char *text)
{
	json_t *valid = json_string(text); /* NULL: no UTF-8 */

	fprintf(to, "%s=\"", name);
	for (; *text; text++)
		if (*text == '\\' || *text == '"')
			fprintf(to, "\\%c", *text);
		else if (*text == '\n')
			fputs("\\n", to);
		else
			putc(!valid && (unsigned char)*text >= 0x80 ? '?' : *text, to);
	putc('"', to);
	json_decref(valid);
}

static void write_value(FILE *to, const struct metrics *m, const struct metric *x, const char *run, double value)
{
	if (isnan(value))
		return;
	fprintf(to, "vckpt_%s{", x->name);
	write_label(to, "store", m->t->store->path);
	if (run) {
		putc(',', to);
		write_label(to, "run", run);
	}
	fputs("} ", to);
	fprintf(to, "%.*f", x->decimals, value);
	putc('\n', to);
}

static void write_all(FILE *to, const struct metrics *m)
{
	fputs("# HELP vckpt_build_info The vckpt that wrote this.\n# TYPE vckpt_build_info gauge\n"
		"vckpt_build_info{", to);
	write_label(to, "store", m->t->store->path);
	fputs(",version=\"" VCKPT_VERSION "\"} 1\n", to);
	for (unsigned i = 0; i < OF_STORE; i++) {
		fprintf(to, "# HELP vckpt_%s %s\n# TYPE vckpt_%s gauge\n", of_store[i].name, of_store[i].help,
			of_store[i].name);
		write_value(to, m, &of_store[i], NULL, m->store[i]);
	}
	for (unsigned i = 0; i < OF_RUN; i++) {
		fprintf(to, "# HELP vckpt_%s %s\n# TYPE vckpt_%s gauge\n", of_run[i].name, of_run[i].help,
			of_run[i].name);
		for (size_t k = 0; k < m->nruns; k++)
			write_value(to, m, &of_run[i], m->runs[k].name, m->runs[k].value[i]);
	}
}

static int print_all(const struct metrics *m, const char *output)
{
	char *text = NULL;
	size_t len;
	FILE *to = open_memstream(&text, &len);
	struct base_error err = {0};
	int code = TOOL_DONE;

	if (to)
		write_all(to, m);
	if (!to || fclose(to) != 0)
		code = tool_fail(m->t, &(struct base_error){.code = -ENOMEM});
	else if (output && tool_file_put(output, text, len, &err) < 0) /* the collector reads it at any time */
		code = tool_fail(m->t, &err);
	else if (!output)
		fwrite(text, 1, len, stdout);
	free(text);
	return code;
}

static int metrics_run(struct tool *t, int argc, char **argv)
{
	struct metrics m = {.t = t};
	struct base_error err = {0};
	const char *output = NULL;
	const struct tool_option options[] = {{"output", 'o', .text = &output}, {0}};
	int code = tool_parse(t, argc, argv, options);
	char **names;
	size_t n;

	if (code == 0 && t->json)
		code = tool_usage(t, "the command prints the text format of Prometheus and has no --json");
	if (code || (code = tool_open_store(t, STORE_OPEN_READ_ONLY)))
		return code;
	if (commit_runs(t->store, &names, &n, &err) < 0)
		return tool_fail(t, &err);
	m.runs = calloc(n + 1, sizeof *m.runs);
	for (; m.runs && m.nruns < n; m.nruns++) {
		m.runs[m.nruns].name = names[m.nruns];
		read_run(&m, &m.runs[m.nruns]);
	}
	read_store(&m);
	code = m.runs ? print_all(&m, output) : tool_fail(t, &(struct base_error){.code = -ENOMEM});
	free(m.runs);
	commit_runs_free(names, n);
	return code ? code : m.worst;
}

const struct tool_command tool_metrics = {"metrics", "print how saving goes, for Prometheus",
	"usage: vckpt metrics STORE [--output FILE] [-q] [-v]\n\n"
	"Prints in the text format of Prometheus what should be watched: of each run its steps, when the last\n"
	"one was committed, how long its save took and held up the training, its bytes, and saves that failed; of\n"
	"the store its packs, the room that is left, damage that vckpt verify found, and saves under way. A run\n"
	"that cannot be read has vckpt_run_readable 0, and the exit status says so, too.\n\n"
	"  -o, --output FILE   write FILE, in one moment: for the textfile collector of node_exporter\n",
	metrics_run};
