/* SPDX-License-Identifier: Apache-2.0
 *
 * vckpt mount: becomes mount.vckpt, which does everything; here it is only found and called. */
#include <libgen.h>
#include <limits.h>
#include <string.h>
#include <unistd.h>

#include "tools/vckpt/tool.h"

#define OPTIONS_MAX 64

struct mount {
	const char *options[OPTIONS_MAX];
	unsigned noptions;
	bool foreground, fake;
};

static int add_option(struct tool *t, void *arg, const char *value)
{
	struct mount *m = arg;

	if (m->noptions == OPTIONS_MAX)
		return tool_usage(t, "more than %d -o", OPTIONS_MAX);
	m->options[m->noptions++] = value;
	return 0;
}

/* Beside this program, as installed and as built, then in PATH, then where mount(8) looks. Returns only if it is
 * nowhere. */
static void become(char **argv)
{
	static const char *const beside[] = {"", "../sbin/", "../../fs/"}, *const others[] = {"/sbin", "/usr/sbin"};
	char self[PATH_MAX], path[2 * PATH_MAX];
	ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
	const char *dir;

	self[n > 0 ? n : 0] = 0;
	dir = n > 0 ? dirname(self) : NULL;
	for (size_t i = 0; dir && i < BASE_COUNT(beside); i++) {
		snprintf(path, sizeof path, "%s/%smount.vckpt", dir, beside[i]);
		execv(path, argv);
	}
	execvp(argv[0], argv);
	for (size_t i = 0; i < BASE_COUNT(others); i++) {
		snprintf(path, sizeof path, "%s/mount.vckpt", others[i]);
		execv(path, argv);
	}
}

static int call(const struct tool *t, const struct mount *m)
{
	const char *argv[2 * OPTIONS_MAX + 8] = {"mount.vckpt"};
	unsigned n = 1;

	if (m->foreground)
		argv[n++] = "--foreground";
	if (m->fake)
		argv[n++] = "--fake";
	if (t->verbose)
		argv[n++] = "-v";
	for (unsigned i = 0; i < m->noptions; i++) {
		argv[n++] = "-o";
		argv[n++] = m->options[i];
	}
	argv[n++] = "--";
	argv[n++] = t->arguments[0];
	argv[n++] = t->arguments[1];
	become((char **)argv);
	return tool_failed(t, "mount.vckpt is not there: neither beside vckpt nor in PATH, /sbin or /usr/sbin");
}

static int mount_run(struct tool *t, int argc, char **argv)
{
	struct mount m = {0};
	const struct tool_option options[] = {{"foreground", 'f', .flag = &m.foreground}, {"fake", .flag = &m.fake},
		{"options", 'o', .call = add_option, .arg = &m}, {0}};
	int code = tool_parse(t, argc, argv, options);

	if (code)
		return code;
	if (t->json)
		return tool_usage(t, "the command has no --json");
	if ((code = tool_open_store(t, STORE_OPEN_READ_ONLY)))
		return code;
	store_close(base_steal(t->store));
	return call(t, &m);
}

const struct tool_command tool_mount = {"mount", "show a store as files",
	"usage: vckpt mount STORE MOUNTPOINT [-f] [-o OPTION,...] [--fake] [-v]\n\n"
	"Shows every committed step of a store as files below MOUNTPOINT, a directory, read-only. This is\n"
	"mount.vckpt STORE MOUNTPOINT: mount.vckpt(8) says what the files are, and all options. The command ends\n"
	"when the mount answers, with a daemon in the background; vckpt umount MOUNTPOINT ends the mount.\n\n"
	"  -f, --foreground    stay in the foreground, until the mount ends\n"
	"  -o OPTION,...       options of the mount: views=npy or views=safetensors (each tensor once),\n"
	"                      allow_other, uid=N, gid=N, umask=OCTAL, cache=SIZE, ...\n"
	"  --fake              check everything, mount nothing\n",
	mount_run};
