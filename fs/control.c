/* SPDX-License-Identifier: Apache-2.0
 *
 * The files of .vckpt: `stats` in the Prometheus text format, `version`, and `slow`, the latest slow reads. The text of
 * a file is made when it is opened. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "core/base/buf.h"
#include "core/base/log.h"
#include "fs/mount.h"

static const char *const op_names[FS_OP_COUNT] = {"lookup", "getattr", "readlink", "opendir", "readdir",
	"readdirplus", "open", "read", "release", "statfs",
	"getxattr", "listxattr"};

/* The type follows from the name, by the rules of Prometheus. */
static void head(struct base_buf *b, const char *name, const char *help)
{
	const char *end = strrchr(name, '_');

	base_buf_printf(b, "# HELP vckpt_%s %s\n# TYPE vckpt_%s %s\n", name, help, name,
		end && strcmp(end, "_total") == 0 ? "counter" : "gauge");
}

static void metric(struct base_buf *b, const char *name, const char *help, uint64_t value)
{
	head(b, name, help);
	base_buf_printf(b, "vckpt_%s %llu\n", name, (unsigned long long)value);
}

static void quoted(struct base_buf *b, const char *text)
{
	for (; *text; text++)
		if (*text == '\n')
			base_buf_append(b, "\\n", 2);
		else if (*text == '"' || *text == '\\')
			base_buf_printf(b, "\\%c", *text);
		else
			base_buf_append(b, text, 1);
}

static void ops_metric(struct base_buf *b, const char *name, const char *help, const _Atomic uint64_t *values,
	bool are_ns)
{
	head(b, name, help);
	for (unsigned i = 0; i < FS_OP_COUNT; i++) {
		base_buf_printf(b, "vckpt_%s{op=\"%s\"} ", name, op_names[i]);
		base_buf_printf(b, "%.*f\n", are_ns ? 6 : 0, (double)values[i] * (are_ns ? 1e-9 : 1));
	}
}

static void write_ops(struct base_buf *b, const struct fs_stats *s)
{
	ops_metric(b, "requests_total", "Requests of the kernel, answered.", s->requests, false);
	ops_metric(b, "request_errors_total", "Those answered with an error.", s->errors, false);
	ops_metric(b, "request_seconds_total", "Time spent in handlers.", s->ns, true);
}

static void write_cache(struct base_buf *b, struct fs_mount *m)
{
	struct load_cache_stats c;

	load_cache_stat(m->cache, &c);
	metric(b, "cache_hits_total", "Pieces found decoded.", c.hits);
	metric(b, "cache_misses_total", "Pieces read and decoded.", c.misses);
	metric(b, "cache_waits_total", "Pieces that another reader was decoding.", c.waits);
	metric(b, "cache_evictions_total", "Pieces dropped to make room.", c.evictions);
	metric(b, "cache_bytes", "Bytes of decoded pieces kept.", c.bytes);
	metric(b, "cache_max_bytes", "Their bound.", c.max_bytes);
	metric(b, "decoded_bytes_total", "Bytes decoded and checked.", c.decoded_bytes);
	metric(b, "stored_bytes_total", "Bytes read from packs for them.", c.stored_bytes);
}

static void write_backings(struct base_buf *b, struct fs_mount *m)
{
	struct fs_backings_stats s;

	fs_backings_stat(m->backings, &s);
	metric(b, "assembled_files", "Whole files in memory.", s.files);
	metric(b, "assembled_bytes", "Their bytes.", s.bytes);
	metric(b, "assembled_max_bytes", "Their bound.", s.max_bytes);
	metric(b, "assembled_reserve_bytes", "Memory kept at hand for the next one.", s.reserve_bytes);
	metric(b, "assemblies_total", "Files assembled.", s.assembled);
	metric(b, "assemblies_early_total", "Files that a loader was reading when that began.", s.early);
	metric(b, "assemblies_given_up_total", "Those whose loader closed them early.", s.given_up);
	metric(b, "assemblies_bytes_total", "Their bytes.", s.assembled_bytes);
	metric(b, "assemblies_read_bytes_total", "Bytes that the server gave the kernel out of files in memory.",
		s.read_bytes);
	metric(b, "assemblies_failed_total", "Files that could not be.", s.failed);
	metric(b, "assemblies_refused_total", "Files for which there was no room.", s.refused);
	metric(b, "assemblies_dropped_total", "Files dropped to make room.", s.dropped);
	metric(b, "assemblies_pages_dropped_total",
		"Files whose pages the kernel was asked to drop, since it reads them in memory.", s.pages_dropped);
	head(b, "assembly_seconds_total", "Time that it took.");
	base_buf_printf(b, "vckpt_assembly_seconds_total %.6f\n", (double)s.assembled_ns * 1e-9);
	head(b, "open_files", "Files of steps that are open, by what serves them.");
	base_buf_printf(b, "vckpt_open_files{tier=\"cached\"} %llu\nvckpt_open_files{tier=\"passthrough\"} %llu\n",
		(unsigned long long)s.open_cached, (unsigned long long)s.open_passthrough);
	metric(b, "passthrough_opens_total", "Files that were opened for the kernel to read by itself.",
		s.opens_passthrough);
}

static void write_steps(struct base_buf *b, struct fs_mount *m)
{
	struct fs_runs *all = m->runs;
	uint64_t runs, commits, open, bytes;

	pthread_mutex_lock(&all->lock);
	runs = all->nruns;
	commits = all->ncommits - 1;
	open = all->steps_open;
	bytes = all->steps_bytes;
	pthread_mutex_unlock(&all->lock);
	metric(b, "runs", "Runs of the store.", runs);
	metric(b, "steps_seen", "Commits that were looked up since the mount.", commits);
	metric(b, "steps_open", "Steps kept open.", open);
	metric(b, "steps_open_bytes", "Memory of the steps kept open, roughly.", bytes);
	metric(b, "steps_opened_total", "Steps opened.", all->steps_opened);
	metric(b, "steps_evicted_total", "Steps closed to make room.", all->steps_evicted);
}

static void write_meshes(struct base_buf *b, struct fs_mount *m)
{
	struct fs_meshes_stats s;

	fs_meshes_stat(m->meshes, &s);
	metric(b, "meshes", "Names of meshes that the kernel knows, or that are in use.", s.known);
	metric(b, "meshes_looked_up_total", "Names of meshes that were made known.", s.looked_up);
	metric(b, "meshes_dropped_total", "Those that the kernel was asked to drop.", s.dropped);
	metric(b, "mesh_refusals_total", "Names looked up that are no mesh of their step.", m->stats.mesh_refusals);
}

static void write_memory(struct base_buf *b, const struct fs_mount *m)
{
	char text[128] = "";
	unsigned long long size = 0, resident = 0;

	if (m->statm_fd >= 0 && pread(m->statm_fd, text, sizeof text - 1, 0) > 0 &&
			sscanf(text, "%llu %llu", &size, &resident) == 2)
		metric(b, "resident_bytes", "Resident memory of the daemon.",
			resident * (unsigned long long)sysconf(_SC_PAGESIZE));
}

static void write_features(struct base_buf *b, struct fs_mount *m)
{
	head(b, "feature", "What is on (1) or off (0), and why.");
	pthread_mutex_lock(&m->lock);
	for (unsigned i = 0; i < m->nfeatures; i++) {
		base_buf_printf(b, "vckpt_feature{name=\"%s\",why=\"", m->features[i].name);
		quoted(b, m->features[i].why);
		base_buf_printf(b, "\"} %d\n", m->features[i].on);
	}
	pthread_mutex_unlock(&m->lock);
}

static void write_stats(struct base_buf *b, struct fs_mount *m)
{
	struct fs_stats *s = &m->stats;

	head(b, "info", "The mount.");
	base_buf_printf(b, "vckpt_info{version=\"" VCKPT_VERSION "\",tier=\"%s\",store=\"",
		fs_tier_name(m->options->tier));
	quoted(b, m->options->store);
	base_buf_printf(b, "\",pid=\"%d\"} 1\n", (int)getpid());
	head(b, "start_time_seconds", "When it was mounted.");
	base_buf_printf(b, "vckpt_start_time_seconds %.3f\n", (double)m->start_ns * 1e-9);
	write_ops(b, s);
	metric(b, "read_bytes_total", "Bytes handed to the kernel.", s->read_bytes);
	metric(b, "interrupted_total", "Requests given up after their caller got a signal.", s->interrupted);
	metric(b, "memory_given_back_total", "Times that the kernel reported that memory is short.", s->gave_back);
	metric(b, "damaged_reads_total", "Reads answered with an error.", s->damaged_reads);
	metric(b, "slow_reads_total", "Reads of more than a quarter of a second (see the file slow).", s->slow_reads);
	metric(b, "gathered_replies_total", "Reads of so many fragments that they were copied together.",
		s->gathered_replies);
	write_cache(b, m);
	write_backings(b, m);
	write_steps(b, m);
	write_meshes(b, m);
	metric(b, "refreshes_total", "Times the lists of runs were read on.", s->refreshes);
	metric(b, "refresh_errors_total", "Times that failed.", s->refresh_errors);
	metric(b, "new_entries_total", "Entries found so.", s->new_entries);
	metric(b, "invalidations_total", "Names that the kernel was asked to forget.", s->invalidations);
	write_memory(b, m);
	write_features(b, m);
}

static void write_slow(struct base_buf *b, struct fs_mount *m)
{
	uint64_t first;

	pthread_mutex_lock(&m->lock);
	first = m->nslow > FS_SLOW_LINES ? m->nslow - FS_SLOW_LINES : 0;
	for (uint64_t i = first; i < m->nslow; i++)
		if (m->slow[i % FS_SLOW_LINES])
			base_buf_append_text(b, m->slow[i % FS_SLOW_LINES]);
	pthread_mutex_unlock(&m->lock);
}

static const char *const names[] = {"stats", "version", "slow"};

unsigned fs_control_count(void) { return BASE_COUNT(names); }
const char *fs_control_name(unsigned i) { return names[i]; }

int fs_control_text(struct fs_mount *m, unsigned i, char **ret_text, size_t *ret_len)
{
	struct base_buf b = BASE_BUF_INIT;

	if (i == 0)
		write_stats(&b, m);
	else if (i == 1)
		base_buf_append_text(&b, "vckpt " VCKPT_VERSION "\n");
	else
		write_slow(&b, m);
	*ret_len = b.len;
	*ret_text = base_buf_steal_text(&b);
	return *ret_text ? 0 : -ENOMEM;
}

void fs_mount_log_slow(struct fs_mount *m, const char *what, uint64_t offset, size_t len, int64_t ns)
{
	char *line, stamp[32] = "", **place;
	time_t now = time(NULL);
	struct tm tm;

	if (gmtime_r(&now, &tm))
		strftime(stamp, sizeof stamp, "%Y-%m-%dT%H:%M:%SZ", &tm);
	atomic_fetch_add(&m->stats.slow_reads, 1);
	if (asprintf(&line, "%s %.3f s %zu bytes at %llu %s\n", stamp, (double)ns * 1e-9, len,
			(unsigned long long)offset, what) < 0)
		return;
	pthread_mutex_lock(&m->lock);
	place = &m->slow[m->nslow++ % FS_SLOW_LINES];
	free(*place);
	*place = line;
	pthread_mutex_unlock(&m->lock);
}

void fs_mount_feature(struct fs_mount *m, const char *name, bool on, const char *why, ...)
{
	unsigned i = 0;
	va_list args;

	pthread_mutex_lock(&m->lock);
	while (i < m->nfeatures && strcmp(m->features[i].name, name) != 0)
		i++;
	if (i < BASE_COUNT(m->features)) {
		struct fs_feature *f = &m->features[i];
		m->nfeatures += i == m->nfeatures;
		snprintf(f->name, sizeof f->name, "%s", name);
		f->on = on;
		va_start(args, why);
		vsnprintf(f->why, sizeof f->why, why, args);
		va_end(args);
	}
	pthread_mutex_unlock(&m->lock);
}

void fs_mount_log_once(struct fs_mount *m, const char *text)
{
	uint64_t hash = base_xxh64_of(0, text, strlen(text));
	bool known = false, full, last;

	pthread_mutex_lock(&m->lock);
	for (unsigned i = 0; i < m->nlogged && !known; i++)
		known = m->logged[i] == hash;
	full = m->nlogged == BASE_COUNT(m->logged);
	if (!known && !full)
		m->logged[m->nlogged++] = hash;
	last = !known && m->nlogged == BASE_COUNT(m->logged) && !full;
	pthread_mutex_unlock(&m->lock);
	if (known || full)
		return;
	base_warning("%s", text);
	if (last)
		base_warning("%u different errors were logged: later ones are only counted", m->nlogged);
}
