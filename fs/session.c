/* SPDX-License-Identifier: Apache-2.0
 *
 * Three things that libfuse 3.14 does not do. PARALLEL_DIROPS: up to 3.16.2 the library accepts the flag but leaves it
 * out of the answer to INIT, and the kernel then allows one look-up at a time in a directory; the answer passes through
 * fs_writev, which sets the flag. Passthrough: libfuse has it since 3.17, but fs_writev does it for all versions, which
 * is one way instead of two. Readahead: the kernel bounds it by the backing-device info of the mount, 128 KiB by
 * default, whatever INIT says; only root can raise it, in /sys/class/bdi. */
#include "fs/session.h"

#include <fcntl.h>
#include <linux/fuse.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>

#include "core/base/log.h"

#define FLAGS2_PASSTHROUGH (1u << 5)   /* <linux/fuse.h> has it since Linux 6.9 */

static _Atomic uint64_t init_unique;  /* of the INIT request, while it is unanswered */
static _Atomic bool init_parallel;    /* the kernel offers PARALLEL_DIROPS */
static _Atomic bool init_passthrough; /* and passthrough, which is wanted */
static bool passthrough_wanted;       /* set before INIT; it costs a level of stacking, for overlays on the mount */
static _Atomic bool init_patched;
static char libfuse_said[400];        /* its last complaint while mounting (one thread then) */

static ssize_t fs_read(int fd, void *buf, size_t len, void *userdata)
{
	ssize_t n = read(fd, buf, len);
	const struct fuse_in_header *h = buf;
	const struct fuse_init_in *init = (const void *)(h + 1);
	(void)userdata;

	if (n >= (ssize_t)(sizeof *h + 16) && h->opcode == FUSE_INIT) {
		init_parallel = init->flags & FUSE_PARALLEL_DIROPS;
		init_passthrough = passthrough_wanted && n >= (ssize_t)(sizeof *h + 20) &&
			init->flags & FUSE_INIT_EXT && init->flags2 & FLAGS2_PASSTHROUGH;
		init_unique = h->unique;
	}
	return n;
}

/* Sets max_stack_depth, too, which is the first field that was unused before Linux 6.9. It is 1: our backing files are
 * not on a stacked filesystem. */
static void agree_to_passthrough(struct fuse_init_out *out)
{
	out->flags |= FUSE_INIT_EXT;
	out->flags2 |= FLAGS2_PASSTHROUGH;
	memcpy((char *)out + offsetof(struct fuse_init_out, flags2) + sizeof out->flags2, &(uint32_t){1},
		sizeof(uint32_t));
}

static ssize_t fs_writev(int fd, struct iovec *iov, int count, void *userdata)
{
	uint64_t unique = init_unique;
	(void)userdata;

	if (unique && count == 2 && iov[0].iov_len == sizeof(struct fuse_out_header) && iov[1].iov_len >= 16) {
		const struct fuse_out_header *h = iov[0].iov_base;
		if (h->unique == unique && h->error == 0) {
			struct fuse_init_out *out = iov[1].iov_base;
			if (init_parallel && out->major == 7) {
				out->flags |= FUSE_PARALLEL_DIROPS;
				init_patched = true;
			}
			if (init_passthrough && out->major == 7 && iov[1].iov_len >= sizeof *out)
				agree_to_passthrough(out);
			init_unique = 0;
		}
	}
	return writev(fd, iov, count);
}

static void libfuse_log(enum fuse_log_level level, const char *format, va_list args)
{
	char text[400];

	vsnprintf(text, sizeof text, format, args);
	text[strcspn(text, "\n")] = '\0';
	if (level <= FUSE_LOG_ERR)
		memcpy(libfuse_said, text, sizeof text);
	base_log(level <= FUSE_LOG_ERR ? BASE_LOG_ERROR : level <= FUSE_LOG_WARNING ? BASE_LOG_WARNING : BASE_LOG_DEBUG,
		"libfuse: %s", text);
}

static int mount_arguments(const struct fs_options *o, struct fuse_args *args)
{
	base_cleanup_free char *fsname = NULL, *subtype = NULL;
	char *list = NULL;

	int bad = fuse_opt_add_opt(&list, "ro,nosuid,nodev,noexec,default_permissions");
	bad |= o->allow_other && fuse_opt_add_opt(&list, "allow_other");
	bad |= o->context && fuse_opt_add_opt(&list, o->context + 1);  /* past its first comma */
	bad |= asprintf(&fsname, "fsname=%s", o->fsname ? o->fsname : o->store) < 0 ||
		fuse_opt_add_opt_escaped(&list, fsname);
	bad |= asprintf(&subtype, "subtype=%s", o->subtype ? o->subtype : "vckpt") < 0 ||
		fuse_opt_add_opt_escaped(&list, subtype);
	bad |= fuse_opt_add_arg(args, "mount.vckpt") || fuse_opt_add_arg(args, "-o") ||
		fuse_opt_add_arg(args, list ? list : "");
	if (!bad && o->debug && o->foreground)
		bad = fuse_opt_add_arg(args, "-d");
	free(list);
	return bad ? -ENOMEM : 0;
}

static int session_new(const struct fs_options *o, struct fs_mount *m, struct fuse_session **ret_s,
	struct base_error *err)
{
	struct fuse_args args = FUSE_ARGS_INIT(0, NULL);
	int r;

	fuse_set_log_func(libfuse_log);
	r = mount_arguments(o, &args);
	*ret_s = r ? NULL : fuse_session_new(&args, &fs_ops, sizeof fs_ops, m);
	fuse_opt_free_args(&args);
	if (*ret_s)
		return 0;
	return base_error_set(err, r ? r : -EINVAL, "the FUSE session cannot be made%s%s", libfuse_said[0] ? ": " : "",
		libfuse_said);
}

int fs_session_mount(const struct fs_options *o, int *ret_fd, struct base_error *err)
{
	struct fuse_session *s;

	int r = session_new(o, NULL, &s, err);
	if (r)
		return r;
	if (access("/dev/fuse", F_OK) != 0)
		r = base_error_set(err, -ENODEV,
			"there is no /dev/fuse: load the kernel's fuse module, or give the container that device");
	else if (fuse_session_mount(s, o->mountpoint) != 0)
		r = base_error_set(err, -EPERM, "cannot mount on %s%s%s", o->mountpoint, libfuse_said[0] ? ": " : "",
			libfuse_said);
	else
		*ret_fd = fcntl(fuse_session_fd(s), F_DUPFD_CLOEXEC, 3);
	if (!r && *ret_fd < 0)
		r = base_error_set(err, -errno, "no descriptor is left: %s", strerror(errno));
	fuse_session_destroy(s);  /* closes its descriptor and leaves the mount alone */
	return r;
}

int fs_session_open(struct fs_mount *m, int fd, struct base_error *err)
{
	static const struct fuse_custom_io io = {.read = fs_read, .writev = fs_writev};
	char path[32];

	int r = session_new(m->options, m, &m->session, err);
	if (r)
		return r;
	passthrough_wanted = m->options->tier != FS_TIER_CACHED;
	snprintf(path, sizeof path, "/dev/fd/%d", fd);  /* for libfuse this means: mounted already */
	if (fuse_session_mount(m->session, path) != 0)
		return base_error_set(err, -EINVAL, "libfuse does not take the connection to the kernel%s%s",
			libfuse_said[0] ? ": " : "", libfuse_said);
	r = fuse_session_custom_io(m->session, &io, fd);
	if (r)
		fs_mount_feature(m, "parallel_dirops", false, "libfuse refuses a hook on INIT: %s",
			strerror(r < 0 ? -r : r));
	return 0;
}

void fs_session_close(struct fs_mount *m)
{
	if (m->session)
		fuse_session_destroy(base_steal(m->session));
}

int fs_session_loop(struct fs_mount *m)
{
	struct fuse_loop_config *config = fuse_loop_cfg_create();
	int r;

	if (!config)
		return -ENOMEM;
	fuse_loop_cfg_set_clone_fd(config, 0);
	fuse_loop_cfg_set_max_threads(config, m->options->max_threads);
	fuse_loop_cfg_set_idle_threads(config, m->options->max_threads);
	r = fuse_session_loop_mt(m->session, config);
	fuse_loop_cfg_destroy(config);
	return r < 0 ? r : 0;
}

int fs_session_open_readahead(const char *device)
{
	char path[80];
	int fd;

	snprintf(path, sizeof path, "/sys/class/bdi/%s/read_ahead_kb", device);
	fd = open(path, O_WRONLY | O_CLOEXEC);
	return fd < 0 ? -errno : fd;
}

void fs_session_raise_readahead(struct fs_mount *m, int fd, int error)
{
	char text[32];
	int n;

	if (!m->options->readahead_bytes) {
		fs_mount_feature(m, "readahead", false, "left alone, as asked");
		return;
	}
	n = snprintf(text, sizeof text, "%llu", (unsigned long long)base_div_up(m->options->readahead_bytes, 1024));
	if (fd >= 0 && write(fd, text, (size_t)n) == n)
		fs_mount_feature(m, "readahead", true, "%s KiB", text);
	else
		fs_mount_feature(m, "readahead", false, "128 KiB, the kernel's own: /sys/class/bdi: %s",
			geteuid() ? "only root may raise it" : strerror(fd >= 0 ? errno : error));
}

int fs_session_prove(struct fs_mount *m, struct base_error *err)
{
	struct stat st;

	if (stat(m->options->mountpoint, &st))
		return base_error_set(err, -errno, "%s: mounted, but it does not answer: %s", m->options->mountpoint,
			strerror(errno));
	if (st.st_ino != FUSE_ROOT_ID || !S_ISDIR(st.st_mode))
		return base_error_set(err, -EIO, "%s: mounted, but something else answers", m->options->mountpoint);
	if (init_patched)
		fs_mount_feature(m, "parallel_dirops", true, "set");
	else
		fs_mount_feature(m, "parallel_dirops", false,
			"the kernel has none, or libfuse answered in an unknown form");
	return 0;
}
