/* SPDX-License-Identifier: Apache-2.0
 *
 * vckpt copy: steps into another store. First everything that was asked for is found, then the steps are copied, each
 * run's by ascending number, so that each has the one before it as its base. */
#include <inttypes.h>
#include <string.h>

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include "tools/vckpt/copy/copy_steps.h"
#include "tools/vckpt/copy/tar.h"

struct copying {
	struct copy_steps steps;        /* first: gets the library's calls, too */
	struct tool *t;
	const char *as, *to, *to_tar, *from_tar, *tmp; /* NULL: not given */
	char *room;                     /* of the tar's files, on their way */
	/* lent: the list is that of the one before */
	struct wanted { struct tool_target target; struct commit_list *list; bool lent; } *wanted;
	size_t nwanted;
};

/* ---- what is asked for ---- */

static int parse_all(struct copying *c)
{
	struct tool *t = c->t;
	int code = 0;

	c->wanted = calloc((size_t)t->narguments, sizeof *c->wanted);
	if (!c->wanted)
		return TOOL_FAILED;
	for (int i = 1; i < t->narguments && code == 0; i++) {
		struct tool_target *target = &c->wanted[c->nwanted++].target;

		code = tool_target_parse(t, t->arguments[i], target);
		if (code == 0 && target->rest)
			code = tool_usage(t, "%s: only whole steps are copied: RUN/STEP", t->arguments[i]);
	}
	if (code == 0 && c->as && !proto_run_valid(c->as))
		code = tool_usage(t, "--as %s: a run's name is [A-Za-z0-9_][A-Za-z0-9._-]{0,127}", c->as);
	return code;
}

/* No argument: all runs. */
static int all_runs(struct copying *c)
{
	struct base_error err = {0};
	char **runs;
	size_t n;

	if (c->nwanted)
		return 0;
	if (commit_runs(c->t->store, &runs, &n, &err) < 0)
		return tool_fail(c->t, &err);
	free(c->wanted);
	c->wanted = calloc(n + 1, sizeof *c->wanted);
	for (size_t i = 0; c->wanted && i < n; i++)
		snprintf(c->wanted[c->nwanted++].target.run, PROTO_RUN_MAX + 1, "%s", runs[i]);
	commit_runs_free(runs, n);
	return c->wanted ? 0 : TOOL_FAILED;
}

static int find(struct copying *c, struct wanted *w)
{
	struct base_error err = {0};

	w->lent = w > c->wanted && strcmp(w[-1].target.run, w->target.run) == 0;
	if (w->lent)
		w->list = w[-1].list;
	else if (commit_list_open(c->t->store, w->target.run, false, &w->list, &err) < 0)
		return tool_fail(c->t, &err);
	if (w->target.has_step && !tool_target_in(w->list, &w->target))
		return tool_no_target(c->t, w->list, &w->target);
	if (commit_list_next(w->list) == 0)
		return tool_no_run(c->t, w->target.run);
	for (size_t i = 0; i < (w->target.has_step ? 1 : commit_list_count(w->list)); i++)
		c->steps.options.total_bytes += (w->target.has_step ? tool_target_in(w->list, &w->target)
			: commit_list_at(w->list, i))->commit.bytes;
	return 0;
}

/* ---- copying ---- */

static void copy_wanted(struct copying *c, const struct wanted *w)
{
	const char *as = c->as ? c->as : w->target.run;

	if (w->target.has_step) {
		copy_steps_one(&c->steps, w->list, tool_target_in(w->list, &w->target), as, c->steps.replace);
		return;
	}
	for (size_t i = 0; i < commit_list_count(w->list) && !c->steps.stop && !tool_interrupted(); i++)
		copy_steps_one(&c->steps, w->list, commit_list_at(w->list, i), as, c->steps.replace);
	if (!tool_interrupted())
		copy_steps_policy(&c->steps, w->list, as);
}

static int copy_all(struct copying *c, const char *from, const char *to)
{
	int code;

	c->t->arguments[0] = from;
	code = copy_steps_open(&c->steps, c->t, to);
	if (code == 0)
		code = all_runs(c);
	if (code == 0 && c->as && c->nwanted != 1)
		code = tool_usage(c->t, "--as is for one RUN or RUN/STEP");
	for (size_t i = 0; i < c->nwanted && code == 0; i++)
		code = find(c, &c->wanted[i]);
	if (code)
		return code;
	tool_progress_start(&c->steps.progress, c->t->quiet, "copy");
	for (size_t i = 0; i < c->nwanted && !c->steps.stop && !tool_interrupted(); i++)
		copy_wanted(c, &c->wanted[i]);
	tool_progress_end(&c->steps.progress);
	return c->steps.worst || !tool_interrupted() ? c->steps.worst : TOOL_FAILED;
}

/* ---- as one stream ---- */

static bool is_stream(const char *name) { return strcmp(name, "-") == 0; }

static int out_fail(struct copying *c, int fd, const struct base_error *err)
{
	if (fd > STDOUT_FILENO) {
		unlink(c->to_tar);
		close(fd);
	}
	return tool_fail(c->t, err);
}

static int out_exists(struct copying *c)
{
	return tool_failed(c->t, "%s is there already: name a file that is not, or remove it", c->to_tar);
}

/* The steps go into a new store, whose files are the stream. */
static int copy_out(struct copying *c)
{
	struct base_error err = {0};
	int fd = STDOUT_FILENO, code;

	if (is_stream(c->to_tar) && (c->t->json || isatty(fd)))
		return tool_usage(c->t, "--to-tar -: standard output is %s", c->t->json ? "what --json is printed to"
			: "a terminal");
	signal(SIGPIPE, SIG_IGN); /* it would leave the files behind */
	c->t->quiet |= is_stream(c->to_tar);
	c->steps.options.plain = true;
	if (!is_stream(c->to_tar) && faccessat(AT_FDCWD, c->to_tar, F_OK, AT_SYMLINK_NOFOLLOW) == 0)
		return out_exists(c);
	tool_interrupt_waits(c->t, "ended at once");
	if (tar_room(c->tmp, &c->room, &err) < 0 || store_init(c->room, 0, &err) < 0)
		return tool_fail(c->t, &err);
	code = copy_all(c, c->t->arguments[0], c->room);
	if (code)
		return code;
	if (!is_stream(c->to_tar))
		fd = open(c->to_tar, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
	if (fd < 0)
		return errno == EEXIST ? out_exists(c) : tool_failed(c->t, "%s: %s", c->to_tar, strerror(errno));
	if (tar_write(c->room, fd, is_stream(c->to_tar) ? "standard output" : c->to_tar, &err) < 0)
		return out_fail(c, fd, &err);
	if (fd > STDOUT_FILENO && fsync(fd) < 0) {
		base_error_set(&err, -errno, "%s: %s", c->to_tar, strerror(errno));
		return out_fail(c, fd, &err);
	}
	if (fd > STDOUT_FILENO)
		close(fd);
	return 0;
}

static int copy_in(struct copying *c)
{
	const char *to = c->t->arguments[0];
	struct base_error err = {0};
	int fd = is_stream(c->from_tar) ? STDIN_FILENO : open(c->from_tar, O_RDONLY | O_CLOEXEC), r;

	if (fd < 0)
		return tool_failed(c->t, "%s: %s", c->from_tar, strerror(errno));
	tool_interrupt_waits(c->t, "ended at once");
	if (tar_room(c->tmp, &c->room, &err) < 0)
		return tool_fail(c->t, &err);
	r = tar_read(fd, is_stream(c->from_tar) ? "standard input" : c->from_tar, c->room, &err);
	if (fd != STDIN_FILENO)
		close(fd);
	return r < 0 ? tool_fail(c->t, &err) : copy_all(c, c->room, to);
}

static int options_check(struct copying *c)
{
	int ways = (c->to != NULL) + (c->to_tar != NULL) + (c->from_tar != NULL);

	if (ways == 1)
		return 0;
	return ways ? tool_usage(c->t, "--to, --to-tar and --from-tar: one of them at once")
		: tool_usage(c->t, "--to STORE2 is missing: the store to copy to");
}

static int copy_run(struct tool *t, int argc, char **argv)
{
	struct copying c = {.t = t};
	const struct tool_option options[] = {{"to", .text = &c.to}, {"as", .text = &c.as},
		{"to-tar", .text = &c.to_tar}, {"from-tar", .text = &c.from_tar}, {"tmp", .text = &c.tmp},
		{"replace", .flag = &c.steps.replace}, {"limit-rate", .call = copy_steps_rate, .arg = &c.steps},
		{"threads", .call = copy_steps_threads, .arg = &c.steps}, {0}};
	int code = tool_parse(t, argc, argv, options);

	if (code == 0 && (code = options_check(&c)) == 0 && (code = parse_all(&c)) == 0)
		code = c.to ? copy_all(&c, t->arguments[0], c.to) : c.to_tar ? copy_out(&c) : copy_in(&c);
	if (code == 0 || c.steps.copied + c.steps.equal + c.steps.failed)
		code = copy_steps_report(&c.steps, NULL, code);
	copy_steps_close(&c.steps);
	tar_room_remove(c.room);
	for (size_t i = 0; i < c.nwanted; i++)
		if (!c.wanted[i].lent)
			commit_list_close(c.wanted[i].list);
	free(c.wanted);
	return code;
}

const struct tool_command tool_copy = {"copy", "copy steps into another store",
	"usage: vckpt copy STORE [RUN[/STEP]]... --to STORE2 | --to-tar FILE | --from-tar FILE [OPTION...]\n\n"
	"Copies steps as they were saved: tensors, blobs, who held what, attributes, the time. Bytes that STORE2\n"
	"has already, in whatever run, are not read from STORE. All bytes are compared with their digests on the\n"
	"way. Each step appears whole or not at all, and stays when the command is ended later: the same command\n"
	"goes on with the next one. Without RUN all runs are copied.\n\n"
	"  --to STORE2         the store to copy to; vckpt init makes one\n"
	"  --to-tar FILE       write them to FILE (-: standard output) as one tar, with all that they need\n"
	"  --from-tar FILE     take what such a tar holds into STORE\n"
	"  --tmp DIR           where a tar's files are meanwhile; by default in $TMPDIR, else in /var/tmp\n"
	"  --as RUN            name of the run there, for one RUN or RUN/STEP\n"
	"  --replace           replace steps that are there and differ; equal ones are passed over in any case\n"
	"  --limit-rate RATE   read at most so many bytes a second from STORE: 512K, 20M, 1G\n"
	"  --threads N         threads to work with; by default all cores\n"
	"  --json -q -v        print JSON; print nothing but errors; say more\n",
	copy_run};
