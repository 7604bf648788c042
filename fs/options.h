/* SPDX-License-Identifier: Apache-2.0
 *
 * options: the command line of mount.vckpt, as a person types it and as mount(8) passes it to a helper
 * (docs/man/mount.vckpt.8). Pure parsing: nothing is looked up on disk. Not thread-safe; read-only after parsing. */
#ifndef FS_OPTIONS_H
#define FS_OPTIONS_H

#include <stdint.h>
#include <sys/types.h>

#include "core/base/error.h"

#define FS_PIECES_BYTES (UINT64_C(256) << 20)  /* decoded pieces, at most */
#define FS_CACHE_SHARE 4                       /* a mount takes a quarter of the memory that is free */
#define FS_STEPS_BYTES (UINT64_C(64) << 20)    /* opened steps that are not in use */
#define FS_REFRESH_MS 400u
#define FS_READAHEAD_BYTES (UINT64_C(2) << 20)
#define FS_MAX_THREADS 10u
#define FS_NO_ID UINT32_MAX

enum { FS_EXIT_USAGE = 1, FS_EXIT_SYSTEM = 2, FS_EXIT_MOUNT = 32 }; /* as mount(8) */

enum fs_tier { FS_TIER_AUTO, FS_TIER_CACHED, FS_TIER_PASSTHROUGH }; /* how files are served: fs/backing.h */

struct fs_options {
	bool takes_over;                              /* set by fs_mountpoint_check: a dead vckpt mount is in place */
	char *store, *mountpoint;                     /* as given; fs_mountpoint_check makes them absolute */
	/* -N: the mount namespace to mount in, a path or a process id; NULL: our own */
	char *namespace;
	bool help, version, foreground, fake, sloppy, verbose, debug;
	bool allow_other, noxattr;
	uid_t uid; gid_t gid; mode_t umask;           /* FS_NO_ID: not given */
	/* cache_bytes: for decoded pieces and whole files together */
	uint64_t cache_bytes, steps_bytes, readahead_bytes;
	uint64_t memory_bytes;                  /* free at the start, also by the control group's limit */
	unsigned refresh_ms, max_threads;
	enum fs_tier tier;
	unsigned show; bool have_show;                /* enum view_show; given by views= */
	char *layouts;                                /* a layout file, or a preset's name; NULL: none */
	struct view_layouts *rules;                   /* its content; read by main */
	char *fsname, *subtype, *log;                 /* NULL: the default */
	/* SELinux options for the kernel, each with a comma before it; NULL: none */
	char *context;
};

const char *fs_tier_name(enum fs_tier tier);

/* Fills *o (release it whatever is returned). -EINVAL with a sentence: a usage error, such as an unknown option without
 * -s. */
int fs_options_parse(struct fs_options *o, int argc, char **argv, struct base_error *err);
void fs_options_release(struct fs_options *o);
void fs_options_help(void); /* on standard output */

#endif
