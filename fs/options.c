/* SPDX-License-Identifier: Apache-2.0
 *
 * mount(8) calls a helper as `mount.vckpt SOURCE DIR [-sfnv] [-N namespace] [-t type] [-o options]`, with the two
 * directories first, and means "fake" by `-f`. A person writes options first, and means "stay in the foreground". So -f
 * means the foreground before the directories, and fake after them. `--foreground` is the same in both places. */
#include "fs/options.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/base/buf.h"
#include "core/base/le.h"
#include "core/base/machine.h"
#include "core/view/layouts.h"
#include "core/view/tree.h"

/* Options that mount(8), fstab and systemd pass and that change nothing: the mount is always ro,nosuid,nodev,noexec. */
static const char *const ignored[] = {
	"rw", "ro", "_netdev", "nofail", "user", "users", "nouser", "owner", "group", "auto", "noauto",
	"defaults", "exec", "noexec", "suid", "nosuid", "dev", "nodev", "atime", "noatime", "diratime",
	"nodiratime", "relatime", "norelatime", "strictatime", "nostrictatime", "lazytime", "nolazytime", "sync",
	"async", "dirsync", "iversion", "noiversion", "mand", "nomand", "silent", "loud", "default_permissions",
	"nosymfollow", "kernel_cache",
};
static const char *const ignored_prefix[] = {"x-", "X-", "comment=", "user="};

static int option_unsigned(const char *name, const char *text, int base, uint64_t max, unsigned *ret,
	struct base_error *err)
{
	unsigned long long v;
	char *end;

	errno = 0;
	v = strtoull(text, &end, base);
	if (*text < '0' || *text > '9' || *end || errno || v > max)
		return base_error_set(err, -EINVAL,
			base == 8 ? "option %s=%s: give an octal number up to %llo"
				  : "option %s=%s: give a number up to %llu", name, text, (unsigned long long)max);
	*ret = (unsigned)v;
	return 0;
}

/* Bytes with an optional K, M, G or T (powers of 1024), also as KiB and the like. */
static int option_size(const char *name, const char *text, uint64_t max, uint64_t *ret, struct base_error *err)
{
	static const char units[] = "KMGT";
	unsigned long long v;
	char *end;
	bool bad;
	const char *unit;
	unsigned shift = 0;

	errno = 0;
	v = strtoull(text, &end, 10);
	bad = *text < '0' || *text > '9' || errno;
	unit = *end && !bad ? strchr(units, *end & ~0x20) : NULL;
	if (unit && *unit) {
		shift = 10 * (unsigned)(unit - units + 1);
		end++;
		if (strcmp(end, "iB") == 0 || strcmp(end, "B") == 0)
			end += strlen(end);
	}
	if (bad || *end || v > max >> shift)
		return base_error_set(err, -EINVAL, "option %s=%s: give a size such as 256M, up to %lluG", name, text,
			(unsigned long long)max >> 30);
	*ret = (uint64_t)v << shift;
	return 0;
}

static int option_seconds(const char *name, const char *text, unsigned *ret_ms, struct base_error *err)
{
	char *end;
	double v = strtod(text, &end);

	if (end == text || *end || !isfinite(v) || v < 0.01 || v > 86400)
		return base_error_set(err, -EINVAL, "option %s=%s: give seconds between 0.01 and 86400", name,
			text);
	*ret_ms = (unsigned)(v * 1000 + 0.5);
	return 0;
}

static int option_text(char **field, const char *name, const char *text, struct base_error *err)
{
	if (!*text)
		return base_error_set(err, -EINVAL, "option %s= needs a value", name);
	free(*field);
	*field = strdup(text);
	return *field ? 0 : base_no_memory(err);
}

static int option_context(struct fs_options *o, const char *option, struct base_error *err)
{
	char *joined;

	if (asprintf(&joined, "%s,%s", o->context ? o->context : "", option) < 0)
		return base_no_memory(err);
	free(o->context);
	o->context = joined;
	return 0;
}

static bool option_ignored(const char *option)
{
	for (size_t i = 0; i < BASE_COUNT(ignored); i++)
		if (strcmp(option, ignored[i]) == 0)
			return true;
	for (size_t i = 0; i < BASE_COUNT(ignored_prefix); i++)
		if (strncmp(option, ignored_prefix[i], strlen(ignored_prefix[i])) == 0)
			return true;
	return false;
}

static int option_views(struct fs_options *o, const char *value, struct base_error *err)
{
	int show = view_show_parse(value);

	if (show < 0)
		return base_error_set(err, -EINVAL,
			"option views=%s: give npy, safetensors or both (npy,safetensors)", value);
	o->show = (unsigned)show;
	o->have_show = true;
	return 0;
}

static const char *const tiers[] = {[FS_TIER_AUTO] = "auto", [FS_TIER_CACHED] = "cached",
	[FS_TIER_PASSTHROUGH] = "passthrough"};

const char *fs_tier_name(enum fs_tier tier) { return tiers[tier]; }

static int option_tier(struct fs_options *o, const char *value, struct base_error *err)
{
	for (size_t i = 0; i < BASE_COUNT(tiers); i++)
		if (strcmp(value, tiers[i]) == 0) {
			o->tier = (enum fs_tier)i;
			return 0;
		}
	return base_error_set(err, -EINVAL, "option tier=%s: it is auto, cached or passthrough", value);
}

/* Options with a value. max: the largest number, or bytes. */
enum value { NUMBER, OCTAL, SIZE, SECONDS, TEXT };
static const struct { const char *name; enum value value; size_t at; uint64_t max; } options[] = {
	{"uid", NUMBER, offsetof(struct fs_options, uid), FS_NO_ID - 1},
	{"gid", NUMBER, offsetof(struct fs_options, gid), FS_NO_ID - 1},
	{"umask", OCTAL, offsetof(struct fs_options, umask), 0777},
	{"max_threads", NUMBER, offsetof(struct fs_options, max_threads), 1000},
	{"cache", SIZE, offsetof(struct fs_options, cache_bytes), UINT64_C(1) << 50},
	{"steps", SIZE, offsetof(struct fs_options, steps_bytes), UINT64_C(1) << 50},
	{"readahead", SIZE, offsetof(struct fs_options, readahead_bytes), UINT64_C(1) << 30},
	{"refresh", SECONDS, offsetof(struct fs_options, refresh_ms), 0},
	{"fsname", TEXT, offsetof(struct fs_options, fsname), 0},
	{"subtype", TEXT, offsetof(struct fs_options, subtype), 0},
	{"layouts", TEXT, offsetof(struct fs_options, layouts), 0},
	{"log", TEXT, offsetof(struct fs_options, log), 0},
};

/* 1: no option of that name has a value. */
static int option_with_value(struct fs_options *o, const char *name, const char *value, struct base_error *err)
{
	size_t i = 0;
	void *field;

	if (strcmp(name, "tier") == 0)
		return option_tier(o, value, err);
	if (strcmp(name, "views") == 0)
		return option_views(o, value, err);
	while (i < BASE_COUNT(options) && strcmp(name, options[i].name) != 0)
		i++;
	if (i == BASE_COUNT(options))
		return 1;
	field = (char *)o + options[i].at;
	switch (options[i].value) {
	case NUMBER: return option_unsigned(name, value, 10, options[i].max, field, err);
	case OCTAL: return option_unsigned(name, value, 8, options[i].max, field, err);
	case SIZE: return option_size(name, value, options[i].max, field, err);
	case SECONDS: return option_seconds(name, value, field, err);
	case TEXT: break;
	}
	return option_text(field, name, value, err);
}

static int option_apply(struct fs_options *o, char *option, struct base_error *err)
{
	char *equals = strchr(option, '=');

	if (!*option || option_ignored(option))
		return 0;
	if (strcmp(option, "allow_other") == 0) {
		o->allow_other = true;
	} else if (strcmp(option, "noxattr") == 0) {
		o->noxattr = true;
	} else if (strcmp(option, "debug") == 0) {
		o->debug = true;
	} else if (o->have_show && !equals && view_show_parse(option) > 0) {
		o->show |= (unsigned)view_show_parse(option); /* views=npy,safetensors, split at its comma */
	} else if (strcmp(option, "remount") == 0) {
		return base_error_set(err, -EINVAL,
			"remount is not supported: unmount and mount again (new steps appear without it)");
	} else if (strncmp(option, "context=", 8) == 0 || strncmp(option, "fscontext=", 10) == 0 ||
			strncmp(option, "defcontext=", 11) == 0 || strncmp(option, "rootcontext=", 12) == 0) {
		return option_context(o, option, err);
	} else {
		int r = 1;
		if (equals) {
			*equals = '\0';
			r = option_with_value(o, option, equals + 1, err);
			*equals = '=';
		}
		if (r <= 0)
			return r;
		if (!o->sloppy)
			return base_error_set(err, -EINVAL, "unknown option '%s' (-s ignores those)", option);
	}
	return 0;
}

/* Splits at commas; a character after a backslash is taken as it is. */
static int options_split(struct fs_options *o, const char *list, struct base_error *err)
{
	base_cleanup_free char *copy = malloc(strlen(list) + 1);
	if (!copy)
		return base_no_memory(err);
	for (const char *s = list;;) {
		char *d = copy;
		int r;

		while (*s && *s != ',') {
			if (*s == '\\' && s[1])
				s++;
			*d++ = *s++;
		}
		*d = '\0';
		r = option_apply(o, copy, err);
		if (r < 0)
			return r;
		if (!*s++)
			return 0;
	}
}

struct scan { const char *lists[64]; unsigned nlists; unsigned npositional; bool only_positional; };

static int scan_positional(struct fs_options *o, struct scan *scan, const char *arg, struct base_error *err)
{
	char **field = scan->npositional == 0 ? &o->store : &o->mountpoint;

	if (scan->npositional >= 2)
		return base_error_set(err, -EINVAL, "'%s': give two directories, STORE and DIR", arg);
	if (!*arg)
		return base_error_set(err, -EINVAL, "an empty directory name");
	*field = strdup(arg);
	scan->npositional++;
	return *field ? 0 : base_no_memory(err);
}

/* A cluster of short options; the value of -o, -N and -t follows in it or is the next argument. */
static int scan_short(struct fs_options *o, struct scan *scan, int argc, char **argv, int *i, struct base_error *err)
{
	for (const char *c = argv[*i] + 1; *c; c++) {
		if (strchr("oNt", *c)) {
			const char *value = c[1] ? c + 1 : *i + 1 < argc ? argv[++*i] : NULL;
			if (!value)
				return base_error_set(err, -EINVAL, "option -%c needs a value", *c);
			if (*c == 'o' && scan->nlists == BASE_COUNT(scan->lists))
				return base_error_set(err, -EINVAL, "too many -o");
			if (*c == 'o')
				scan->lists[scan->nlists++] = value;
			return *c == 'N' ? option_text(&o->namespace, "-N", value, err) : 0;
		}
		switch (*c) {
		case 'f': *(scan->npositional ? &o->fake : &o->foreground) = true; break;
		case 's': o->sloppy = true; break;
		case 'v': o->verbose = true; break;
		case 'd': o->debug = true; break;
		case 'h': o->help = true; break;
		case 'V': o->version = true; break;
		case 'n': case 'r': case 'w': break;
		default: return base_error_set(err, -EINVAL, "unknown option -%c (see --help)", *c);
		}
	}
	return 0;
}

static int scan_long(struct fs_options *o, struct scan *scan, const char *arg, struct base_error *err)
{
	if (strcmp(arg, "--") == 0)
		scan->only_positional = true;
	else if (strcmp(arg, "--foreground") == 0)
		o->foreground = true;
	else if (strcmp(arg, "--fake") == 0)
		o->fake = true;
	else if (strcmp(arg, "--verbose") == 0)
		o->verbose = true;
	else if (strcmp(arg, "--help") == 0)
		o->help = true;
	else if (strcmp(arg, "--version") == 0)
		o->version = true;
	else
		return base_error_set(err, -EINVAL, "unknown option %s (see --help)", arg);
	return 0;
}

int fs_options_parse(struct fs_options *o, int argc, char **argv, struct base_error *err)
{
	struct scan scan = {0};
	uint64_t memory = base_machine_memory("");
	int r = 0;

	if (!memory)  /* unknown */
		memory = FS_CACHE_SHARE * FS_PIECES_BYTES;
	*o = (struct fs_options){.uid = FS_NO_ID, .gid = FS_NO_ID, .umask = FS_NO_ID, .memory_bytes = memory,
		.cache_bytes = memory / FS_CACHE_SHARE, .steps_bytes = FS_STEPS_BYTES,
		.readahead_bytes = FS_READAHEAD_BYTES, .refresh_ms = FS_REFRESH_MS,
		.max_threads = FS_MAX_THREADS, .show = VIEW_SHOW_ALL};
	for (int i = 1; i < argc && !r; i++) {
		const char *arg = argv[i];
		if (scan.only_positional || arg[0] != '-' || !arg[1])
			r = scan_positional(o, &scan, arg, err);
		else if (arg[1] == '-')
			r = scan_long(o, &scan, arg, err);
		else
			r = scan_short(o, &scan, argc, argv, &i, err);
	}
	if (!r && (o->help || o->version))
		return 0;
	for (unsigned i = 0; i < scan.nlists && !r; i++)  /* after all flags, so that -s counts in any place */
		r = options_split(o, scan.lists[i], err);
	if (o->max_threads == 0)
		o->max_threads = FS_MAX_THREADS;
	if (!r && scan.npositional < 2)
		r = base_error_set(err, -EINVAL, "usage: mount.vckpt [-f] STORE DIR [-o OPTIONS] (see --help)");
	return r;
}

void fs_options_release(struct fs_options *o)
{
	free(o->store);
	free(o->mountpoint);
	free(o->namespace);
	free(o->fsname);
	free(o->subtype);
	free(o->log);
	free(o->layouts);
	view_layouts_free(o->rules);
	free(o->context);
	*o = (struct fs_options){0};
}

void fs_options_help(void)
{
	puts("usage: mount.vckpt [OPTIONS] STORE DIR [-o OPTION,...]\n"
		"       mount -t vckpt STORE DIR -o OPTION,...\n"
		"Shows every committed step of a vckpt store as files, read-only.\n"
		"\n"
		"  -f, --foreground     stay in the foreground (-f: before STORE; after DIR it means --fake, as "
		"mount(8) passes it)\n"
		"      --fake           check everything, mount nothing\n"
		"  -s                   ignore unknown -o options\n"
		"  -v, --verbose        say what is done\n"
		"  -N NAMESPACE         mount in that mount namespace (a path, or the id of a process in it)\n"
		"  -n, -t TYPE          accepted, as mount(8) passes them\n"
		"  -h, --help           this text\n"
		"  -V, --version        the version\n"
		"\n"
		"  -o allow_other       other users may look in (normal users: needs user_allow_other in "
		"/etc/fuse.conf)\n"
		"  -o uid=N,gid=N       owner and group of all files (default: those of each run's directory)\n"
		"  -o umask=OCTAL       mode bits to take away from 0644 and 0755 (default: the mode of each run's "
		"directory,\n"
		"                       without write bits)\n"
		"  -o cache=SIZE        memory for data: 256M of it at most for decoded pieces, the rest for whole\n"
		"                       files (a quarter of what is free at the start)\n"
		"  -o tier=auto         a file that is opened again is put together in memory, where the kernel reads\n"
		"                       it (as root, Linux 6.9); tier=passthrough: when first opened; tier=cached:\n"
		"                       never\n"
		"  -o steps=SIZE        memory for opened steps that are not in use (64M)\n"
		"  -o readahead=SIZE    the kernel's readahead, as root (2M; 0: leave it alone)\n"
		"  -o refresh=SECONDS   how old the list of steps may be (0.4)\n"
		"  -o views=npy         tensors as .npy files only, or only as .safetensors (views=safetensors);\n"
		"                       default: views=npy,safetensors\n"
		"  -o layouts=FILE      what cuts tensors under a mesh: a layout file, or llama, mixtral, deepseek\n"
		"  -o noxattr           no extended attributes\n"
		"  -o max_threads=N     threads that answer (10)\n"
		"  -o log=FILE          log there (default: standard error in the foreground, else syslog)\n"
		"  -o fsname=, subtype= what df and /proc/mounts show (STORE, vckpt)\n"
		"  -o debug             log more");
}
