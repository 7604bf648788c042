/* SPDX-License-Identifier: Apache-2.0
 *
 * mount.vckpt STORE DIR: shows every committed step of a store as files (docs/man/mount.vckpt.8). */
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/base/log.h"
#include "core/base/standard.h"
#include "core/step/store.h"
#include "core/view/layouts.h"
#include "fs/daemon.h"
#include "fs/mountpoint.h"
#include "fs/options.h"

static int enter_namespace(const char *which, struct base_error *err)
{
	char path[64];
	base_cleanup_close int fd = -1;

	if (which[0] != '\0' && which[strspn(which, "0123456789")] == '\0' && strlen(which) < 20) {
		snprintf(path, sizeof path, "/proc/%s/ns/mnt", which);
		which = path;
	}
	fd = open(which, O_RDONLY | O_CLOEXEC);
	if (fd < 0 || setns(fd, CLONE_NEWNS))
		return base_error_set(err, -errno, "the mount namespace %s cannot be entered: %s", which,
			strerror(errno));
	return 0;
}

static int check_store(const char *path, struct base_error *err)
{
	struct store *store = NULL;

	int r = store_open(path, STORE_OPEN_READ_ONLY, &store, err);
	store_close(store);
	return r;
}

/* What -h, -V and -v print has to arrive. */
static int output_end(int status)
{
	if (fflush(stdout) != EOF || status)
		return status;
	base_error_log("standard output cannot be written: %s", strerror(errno));
	return FS_EXIT_SYSTEM;
}

int main(int argc, char **argv)
{
	struct fs_options o;
	struct base_error err = {0};
	int status = 0, r;

	base_standard_open();
	base_descriptors_allow();
	signal(SIGCHLD, SIG_DFL);  /* the caller may have ignored it: then the end of a child would not be reported */
	base_log_set_program("mount.vckpt");
	r = fs_options_parse(&o, argc, argv, &err);
	if (!r && o.layouts && !o.help && !o.version)
		r = view_layouts_open(o.layouts, &o.rules, &err);
	if (r)
		status = FS_EXIT_USAGE;
	else if (o.help)
		fs_options_help();
	else if (o.version)
		puts("mount.vckpt " VCKPT_VERSION);
	if (!r && !o.help && !o.version) {
		if (o.namespace)
			r = enter_namespace(o.namespace, &err);
		if (!r)
			r = fs_mountpoint_check(&o, &err);
		if (!r && o.fake)
			r = check_store(o.store, &err);
		status = r ? FS_EXIT_MOUNT : 0;
		if (!r && o.fake && o.verbose)
			printf("mount.vckpt: %s could be mounted on %s (-f after the directories: nothing is)\n",
				o.store, o.mountpoint);
		if (!r && !o.fake && fs_mountpoint_stuck())
			base_warning("%s: %s", o.mountpoint, fs_mountpoint_stuck());
		if (!r && !o.fake) {
			/* A daemon that kept what its caller had open would keep locks held, pipes from ending and file
			 * systems busy. Nothing of ours is open yet. */
			closefrom(3);
			status = fs_daemon_run(&o);
		}
	}
	if (r)
		base_error_log("%s", err.text[0] ? err.text : base_error_name(r));
	status = output_end(status);
	fs_options_release(&o);
	return status;
}
