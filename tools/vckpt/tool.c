/* SPDX-License-Identifier: Apache-2.0
 *
 * What the sub-commands share; see tool.h. */
#include "tools/vckpt/tool.h"

#include "core/commit/list/list_facts.h"

#include <ctype.h>
#include <getopt.h>
#include <inttypes.h>
#include <spawn.h>
#include <stdarg.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/save/write/catalog.h"

enum { OPTION_JSON = 0x100, OPTION_COLOR, OPTION_OWN }; /* and the numbers of the command's own above */

#define OPTIONS_MAX 64
struct options {
	struct option all[OPTIONS_MAX]; /* as getopt_long wants them; the common ones first */
	char letters[2 * OPTIONS_MAX];
	const struct tool_option *own;
	size_t count;
};

/* "-" in the letters: arguments come as val 1, in order. */
static void options_set(struct options *o, const struct tool_option *own)
{
	static const struct option common[] = {{"json", no_argument, NULL, OPTION_JSON},
		{"color", required_argument, NULL, OPTION_COLOR}, {"quiet", no_argument, NULL, 'q'},
		{"verbose", no_argument, NULL, 'v'}, {"help", no_argument, NULL, 'h'}};

	*o = (struct options){.letters = "-:qvh", .own = own};
	memcpy(o->all, common, sizeof common);
	for (; own[o->count].name && BASE_COUNT(common) + o->count + 1 < OPTIONS_MAX; o->count++) {
		const struct tool_option *option = &own[o->count];
		int value = option->flag ? no_argument : option->optional ? optional_argument : required_argument;

		o->all[BASE_COUNT(common) + o->count] =
			(struct option){option->name, value, NULL, OPTION_OWN + (int)o->count};
		if (option->letter)
			sprintf(o->letters + strlen(o->letters), "%c%s", option->letter, option->flag ? "" : ":");
	}
}

static int own_option(struct tool *t, const struct options *o, int val, const char *value)
{
	const struct tool_option *option = o->own;

	while (val < OPTION_OWN ? option->letter != val : option != o->own + (val - OPTION_OWN))
		option++;
	if (option->flag)
		*option->flag = true;
	else if (option->text)
		*option->text = value;
	return option->call ? option->call(t, option->arg, value) : 0;
}

static int argument(struct tool *t, const struct options *o, const char *value)
{
	const struct tool_option *end = &o->own[o->count];

	tool_argument_add(t, value);
	return end->call ? end->call(t, end->arg, value) : 0;
}

static int any_option(struct tool *t, const struct options *o, int val, char **argv)
{
	switch (val) {
	case '?':
		return tool_usage(t, "unknown option %s", argv[optind - 1]);
	case ':':
		return tool_usage(t, "option %s needs a value", argv[optind - 1]);
	case 1:
		return argument(t, o, optarg);
	case OPTION_JSON:
		t->json = true;
		return 0;
	case OPTION_COLOR:
		return tool_color_set(optarg) ? 0 : tool_usage(t, "--color is auto, always or never");
	case 'q':
		t->quiet = true;
		base_log_set_level(BASE_LOG_ERROR);
		return 0;
	case 'v':
		t->verbose++;
		base_log_set_level(t->verbose > 1 ? BASE_LOG_DEBUG : BASE_LOG_INFO);
		return 0;
	case 'h':
		fputs(t->command->help, stdout);
		return TOOL_HELPED;
	default:
		return own_option(t, o, val, optarg);
	}
}

int tool_parse(struct tool *t, int argc, char **argv, const struct tool_option *own)
{
	struct options o;
	int val, code = 0;

	options_set(&o, own);
	opterr = 0;
	optind = 1;
	t->arguments = calloc((size_t)argc + 1, sizeof *t->arguments); /* and the store of the environment */
	if (!t->arguments)
		return TOOL_FAILED;
	while (code == 0 && (val = getopt_long(argc, argv, o.letters, o.all, NULL)) != -1)
		code = any_option(t, &o, val, argv);
	for (; code == 0 && optind < argc; optind++)
		code = argument(t, &o, argv[optind]);
	return code ? code : tool_arguments_end(t);
}

/* Does the text have this path, or one below it? */
static bool has_path(const char *text, const char *path)
{
	size_t len = strlen(path);

	for (; len && (text = strstr(text, path)); text += len)
		if (!isalnum((unsigned char)text[len]) && (!text[len] || !strchr("._-", text[len])))
			return true;
	return false;
}

/* Messages of the library have the full path; init repeats what was typed. */
static bool names_store(const struct tool *t, const char *text)
{
	char full[8192], here[4096] = "";
	const char *path = t->arguments[0];
	int n;

	if (t->command->makes_store)
		return has_path(text, path);
	if (path[0] != '/' && !getcwd(here, sizeof here))
		return false;
	n = snprintf(full, sizeof full, "%s%s%s", here, here[0] ? "/" : "", path);
	if (n >= (int)sizeof full)
		return false;
	while (n > 1 && full[n - 1] == '/')
		full[--n] = 0;
	return has_path(text, full);
}

/* The text may repeat a user's or a file's words. */
static void complain(const struct tool *t, const char *text)
{
	fprintf(stderr, "vckpt %s: ", t->command->name);
	tool_print_text(stderr, text, strlen(text));
	if (t->from_environment && names_store(t, text))
		fputs(" (VCKPT_STORE names this store)", stderr);
	else if (t->from_environment)
		tool_print(stderr, " (store %s, from VCKPT_STORE)", t->arguments[0]);
}

int tool_usage(const struct tool *t, const char *format, ...)
{
	char text[1024];
	va_list args;

	va_start(args, format);
	vsnprintf(text, sizeof text, format, args);
	va_end(args);
	complain(t, text);
	fprintf(stderr, " (see vckpt %s --help)\n", t->command->name);
	return TOOL_USAGE;
}

bool tool_confirm(const char *question)
{
	char answer[16] = "";

	fprintf(stderr, "%s [y/N] ", question);
	fflush(stderr);
	if (!fgets(answer, sizeof answer, stdin))
		fputc('\n', stderr);
	return answer[0] == 'y' || answer[0] == 'Y';
}

int tool_failed(const struct tool *t, const char *format, ...)
{
	char text[1024];
	va_list args;

	va_start(args, format);
	vsnprintf(text, sizeof text, format, args);
	va_end(args);
	complain(t, text);
	fputc('\n', stderr);
	return TOOL_FAILED;
}

int tool_fail(const struct tool *t, const struct base_error *err)
{
	tool_failed(t, "%s", err->text[0] ? err->text : base_error_name(err->code));
	switch (err->code) {
	case -BASE_EDAMAGED: return TOOL_DAMAGE;
	case -BASE_EUNDECIDED: return TOOL_UNDECIDED;
	}
	return TOOL_FAILED;
}

/* Sets RUN, and where the rest begins, but not STEP. -ENAMETOOLONG, or -EINVAL: that cannot be a run. */
static int target_split(const char *text, struct tool_target *ret_target)
{
	const char *slash = strchrnul(text, '/'), *rest;
	size_t run_len = (size_t)(slash - text);

	*ret_target = (struct tool_target){0};
	if (run_len >= sizeof ret_target->run)
		return -ENAMETOOLONG;
	memcpy(ret_target->run, text, run_len);
	if (!proto_run_valid(ret_target->run))
		return -EINVAL;
	ret_target->has_step = slash[0] && slash[1];
	rest = ret_target->has_step ? strchrnul(slash + 1, '/') : slash;
	if (rest[0] && rest[1])
		ret_target->rest = rest + 1;
	return 0;
}

int tool_missing_run(const struct tool *t, const char *path)
{
	int code = tool_arguments_no_store(t);

	return code ? code : tool_arguments_wrong(t, "RUN is expected where %s is given, which is a file or directory: "
		"is RUN missing before it?", path);
}

/* r: of target_split */
static int refuse_run(const struct tool *t, const char *text, int r)
{
	int code;

	if (access(text, F_OK) == 0)
		return tool_missing_run(t, text);
	if ((code = tool_arguments_no_store(t)))
		return code;
	if (r == -ENAMETOOLONG)
		return tool_usage(t, "run names have at most %d bytes", PROTO_RUN_MAX);
	return tool_arguments_wrong(t, "\"%s\" %s a run's name: [A-Za-z0-9_][A-Za-z0-9._-]*, at most 128 bytes", text,
		t->from_environment ? "is not a store, and does not begin with" : "does not begin with");
}

/* The first argument is no store: maybe it is a run, and STORE was left out. */
static int open_failed(const struct tool *t, struct base_error *err)
{
	struct tool_target target;
	size_t len = strlen(err->text);

	if (t->command == &tool_import && (err->code == -ENOENT || err->code == -BASE_ENOSTORE))
		snprintf(err->text + len, sizeof err->text - len, " (vckpt init %s makes a store there)",
			TOOL_WORD(t->arguments[0]));
	if (!t->from_environment && (err->code == -ENOENT || err->code == -BASE_ENOSTORE) &&
		!tool_arguments_apart(t, err->text, sizeof err->text) && t->narguments == 1 && tool_takes_run(t) &&
		target_split(t->arguments[0], &target) == 0)
		snprintf(err->text + len, sizeof err->text - len, ": if %.100s is a run, give STORE before it",
			t->arguments[0]);
	return tool_fail(t, err);
}

int tool_open_store(struct tool *t, unsigned flags)
{
	struct base_error err = {0};

	return store_open(t->arguments[0], flags, &t->store, &err) < 0 ? open_failed(t, &err) : 0;
}

int tool_count_parse(const struct tool *t, const char *option, const char *value, uint64_t *ret_n)
{
	char *end;

	if (!value)
		return 0;
	errno = 0;
	*ret_n = *value >= '0' && *value <= '9' ? strtoull(value, &end, 10) : 0;
	if (!*ret_n || *end || errno)
		return tool_usage(t, "%s %s: give a number from 1 on", option, value);
	return 0;
}

int tool_step_parse(const char *text, size_t len, uint64_t *ret_step)
{
	static const char *const words[] = {"step", "global_step", "iter", "epoch", "checkpoint", "ckpt"};
	uint64_t step = 0;

	for (size_t i = 0; i < BASE_COUNT(words); i++) {
		size_t n = strlen(words[i]);

		if (len <= n || memcmp(text, words[i], n) != 0)
			continue;
		n += strchr("-_=.", text[n]) != NULL;
		text += n;
		len -= n;
		break;
	}
	if (len == 0 || strspn(text, "0123456789") < len)
		return 0;
	for (size_t i = 0; i < len; i++)
		if (base_mul_overflows(step, 10, &step) || base_add_overflows(step, text[i] - '0', &step) ||
			step > INT64_MAX)
			return -EOVERFLOW;
	*ret_step = step;
	return 1;
}

static int parse_step(const struct tool *t, const char *text, size_t len, struct tool_target *target)
{
	int r;

	target->latest = len == 6 && memcmp(text, "latest", 6) == 0;
	if (target->latest)
		return 0;
	if (len == 0)
		return tool_usage(t, "the step is missing: give RUN/STEP, where STEP is a number, latest or a tag");
	r = tool_step_parse(text, len, &target->step);
	if (r < 0)
		return tool_usage(t, "step %.*s is above 2^63-1", (int)len, text);
	if (r == 0 && len <= PROTO_TAG_MAX) {
		memcpy(target->tag, text, len);
		target->tag[len] = 0;
	}
	return r || proto_tag_valid(target->tag) ? 0 : tool_usage(t, "\"%.*s\" is not a step: a number, alone or after "
		"step, global_step, iter, epoch, checkpoint or ckpt, latest or a tag", (int)len, text);
}

/* A step without a run is in the run `default`, unless a run has that name. */
static bool is_alone(const struct tool *t, const char *text)
{
	char path[4400];
	uint64_t step;

	return t->narguments && (tool_step_parse(text, strlen(text), &step) > 0 || strcmp(text, "latest") == 0) &&
		snprintf(path, sizeof path, "%s/runs/%s", t->arguments[0], text) < (int)sizeof path &&
		access(path, F_OK) != 0;
}

int tool_target_parse(const struct tool *t, const char *text, struct tool_target *ret_target)
{
	int r = tool_arguments_order(t);
	const char *step;

	if (r == 0 && is_alone(t, text)) {
		*ret_target = (struct tool_target){.run = TOOL_DEFAULT_RUN, .has_step = true};
		return parse_step(t, text, strlen(text), ret_target);
	}
	if (r == 0 && (r = target_split(text, ret_target)) < 0)
		return refuse_run(t, text, r);
	if (r || !ret_target->has_step)
		return r;
	step = text + strlen(ret_target->run) + 1;
	return parse_step(t, step, (size_t)(strchrnul(step, '/') - step), ret_target);
}

int tool_run_parse(const struct tool *t, const char *text, const char *why, struct tool_target *ret_target)
{
	int r = tool_arguments_order(t);

	if (r == 0 && strchr(text, '/'))
		r = tool_usage(t, "%s: %s", text, why);
	if (r == 0 && (r = target_split(text, ret_target)) < 0)
		return refuse_run(t, text, r);
	return r;
}

int tool_no_run(const struct tool *t, const char *run)
{
	return tool_failed(t, "there is no run %s (vckpt ls %s lists the runs)%s", run, TOOL_WORD(t->store->path),
		run[strspn(run, "0123456789")] ? "" : "; a step is RUN/STEP");
}

int tool_no_step(const struct tool *t, const struct commit_list *l, const char *which)
{
	const char *run = commit_list_run(l);

	if (commit_list_next(l) == 0)
		return tool_no_run(t, run);
	if (commit_list_count(l) == 0)
		return tool_failed(t, "%s has no step (vckpt ls %s lists the runs)", run, TOOL_WORD(t->store->path));
	return tool_failed(t, "%s has no step %s (vckpt ls %s %s lists them)", run, which, TOOL_WORD(t->store->path),
		run);
}

int tool_target_know(struct commit_list *l, const struct tool_target *target, struct base_error *err)
{
	if (target->tag[0])
		return commit_list_know_all(l, err);
	return !target->has_step || target->latest ? 0 : commit_list_know_step(l, target->step, err);
}

const struct commit_list_step *tool_target_in(const struct commit_list *l, const struct tool_target *target)
{
	if (target->tag[0])
		return commit_list_tagged(l, target->tag);
	return !target->has_step || target->latest ? commit_list_latest(l) : commit_list_find(l, target->step);
}

int tool_no_target(const struct tool *t, const struct commit_list *l, const struct tool_target *target)
{
	char number[24];

	snprintf(number, sizeof number, "%" PRIu64, target->step);
	return target->tag[0] ? tool_no_tag(t, l, target->tag) : tool_no_step(t, l, number);
}

int tool_target_find(struct tool *t, const struct tool_target *target, const struct commit_list_step **ret_step)
{
	struct base_error err = {0};
	int r = tool_list_open(t, target->run, &err);

	if (r == 0)
		r = tool_target_know(t->list, target, &err);
	if (r < 0)
		return tool_fail(t, &err);
	*ret_step = tool_target_in(t->list, target);
	return *ret_step ? 0 : tool_no_target(t, t->list, target);
}

int tool_step_open(struct tool *t, const struct tool_target *target, const struct commit_list_step **ret_step)
{
	const struct commit_list_step *entry = NULL;
	struct base_error err = {0};
	int code = tool_open_store(t, STORE_OPEN_READ_ONLY);

	if (code == 0)
		code = tool_target_find(t, target, &entry);
	if (code == 0 && load_step_open(t->store, target->run, entry, &t->step, &err) < 0)
		code = tool_fail(t, &err);
	if (ret_step)
		*ret_step = entry;
	return code;
}

static int compare_names(const FTSENT **a, const FTSENT **b) { return strcmp((*a)->fts_name, (*b)->fts_name); }

int tool_walk(const char *root, int (*f)(void *arg, const FTSENT *entry), void *arg, struct base_error *err)
{
	char *const paths[] = {(char *)root, NULL};
	FTS *walk = fts_open(paths, FTS_PHYSICAL | FTS_COMFOLLOW | FTS_NOCHDIR, compare_names);
	FTSENT *entry;
	int r = 0;

	while (walk && r >= 0 && (errno = 0, entry = fts_read(walk))) {
		if (entry->fts_info == FTS_DNR || entry->fts_info == FTS_ERR || entry->fts_info == FTS_NS)
			r = base_error_set(err, -entry->fts_errno, "%s: %s", entry->fts_path,
				strerror(entry->fts_errno));
		else if (entry->fts_level > 0 && entry->fts_info != FTS_DP)
			r = f(arg, entry);
		if (r > 0)
			fts_set(walk, entry, FTS_SKIP);
	}
	if (r >= 0 && errno)
		r = base_error_set(err, -errno, "%s: %s", root, strerror(errno));
	if (walk)
		fts_close(walk);
	return r < 0 ? r : 0;
}

int tool_write(int fd, const char *name, const void *bytes, size_t len, struct base_error *err)
{
	for (size_t done = 0; done < len;) {
		ssize_t n = write(fd, (const char *)bytes + done, len - done);

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return base_error_set(err, -errno, "%s: %s", name, strerror(errno));
		done += (size_t)n;
	}
	return 0;
}

/* Jansson escapes all but DEL, which can be only in texts. */
static int print_json_part(const char *text, size_t len, void *to)
{
	const char *end = text + len;

	for (const char *bad; (bad = memchr(text, 0x7f, (size_t)(end - text))); text = bad + 1) {
		fwrite(text, 1, (size_t)(bad - text), to);
		fputs("\\u007f", to);
	}
	fwrite(text, 1, (size_t)(end - text), to);
	return ferror(to) ? -1 : 0;
}

int tool_print_json(json_t *value)
{
	/* names may hold what a terminal obeys */
	size_t flags = JSON_INDENT(2) | JSON_ENCODE_ANY | JSON_ENSURE_ASCII;
	int r = value ? json_dump_callback(value, print_json_part, stdout, flags) : -1;

	json_decref(value);
	if (r < 0 || putchar('\n') == EOF || fflush(stdout) == EOF) {
		fprintf(stderr, "vckpt: cannot write the JSON output\n");
		return TOOL_FAILED;
	}
	return TOOL_DONE;
}

json_t *tool_json_text(const char *bytes, size_t len)
{
	json_t *text = json_stringn(bytes, len);

	return text ? text : json_string("?");
}

json_t *tool_json_attributes(const struct proto_attribute *attributes, size_t n)
{
	json_t *object = json_object();

	for (size_t i = 0; i < n; i++)
		json_object_set_new(object, attributes[i].key, json_string(attributes[i].value));
	return object;
}

json_t *tool_json_shape(const struct tensor_shape *shape)
{
	json_t *a = json_array();

	for (uint32_t i = 0; i < shape->ndim; i++)
		json_array_append_new(a, json_integer((json_int_t)shape->dim[i]));
	return a;
}

void tool_json_touched(json_t *o, const char *run, uint64_t step, const char *component, const char *name)
{
	if (run)
		json_object_set_new(o, "run", json_string(run));
	if (run && step != PROTO_NONE)
		json_object_set_new(o, "step", json_integer((json_int_t)step));
	if (component)
		json_object_set_new(o, "component", json_string(component));
	if (name)
		json_object_set_new(o, component ? "tensor" : "blob", tool_json_text(name, strlen(name)));
}

bool tool_update_index(const char *store, const struct base_digest *wrote, size_t n)
{
	extern char **environ;
	const char *const words[] = {"vckpt", "index", "-q", "--no-wait", store};
	base_cleanup_free char (*parts)[BASE_DIGEST_HEX] = calloc(n + 1, sizeof *parts);
	base_cleanup_free char **argv = calloc(BASE_COUNT(words) + 2 * n + 1, sizeof *argv);
	int status = 0;
	pid_t pid;

	if (!parts || !argv)
		return false;
	memcpy(argv, words, sizeof words);
	for (size_t i = 0; i < n; i++) {
		base_digest_hex(&wrote[i], parts[i]);
		argv[BASE_COUNT(words) + 2 * i] = (char *)"--wrote";
		argv[BASE_COUNT(words) + 2 * i + 1] = parts[i];
	}
	return posix_spawn(&pid, "/proc/self/exe", NULL, NULL, argv, environ) == 0 && waitpid(pid, &status, 0) >= 0 &&
		status == 0;
}

void tool_index_follow(const struct tool *t)
{
	base_cleanup_close int store = -1;
	char dir[4096];

	if (save_index_dir(t->store, &store, dir) == 0 && access(dir, W_OK) == 0 &&
		!tool_update_index(t->store->path, NULL, 0))
		base_debug("the index could not be brought up to date");
}
