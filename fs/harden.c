/* SPDX-License-Identifier: Apache-2.0
 *
 * All of it is best effort: what the kernel does not support or the user may not do stays off, and .vckpt/stats says
 * so. Raw system calls, no library. Order matters: capabilities are dropped while that is still possible, and
 * no_new_privs comes before Landlock and seccomp, which need it. Threads that start later inherit everything. */
#include "fs/harden.h"

#include <execinfo.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/landlock.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <stddef.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>

#include "core/base/log.h"

#if defined(__x86_64__)
#define NATIVE_ARCH AUDIT_ARCH_X86_64
#elif defined(__aarch64__)
#define NATIVE_ARCH AUDIT_ARCH_AARCH64
#endif

static void no_core_dumps(struct fs_mount *m)
{
	struct rlimit none = {0};
	void *frame;
	bool off;

	backtrace(&frame, 1);  /* loads the unwinder that pthread_cancel needs: later no file can be opened */
	tzset();
	off = setrlimit(RLIMIT_CORE, &none) != 0;
#ifndef __SANITIZE_ADDRESS__
	off |= prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) != 0;
#endif
	fs_mount_feature(m, "no_core_dumps", !off, "%s", off ? strerror(errno) : "set");
}

/* Root keeps the capabilities in `mask`; other users lose all. */
static int keep_capabilities(uint32_t mask)
{
	struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
	struct __user_cap_data_struct data[2] = {0};

	if (geteuid() == 0)
		data[0].effective = data[0].permitted = mask;
	return syscall(SYS_capset, &header, data) ? -errno : 0;
}

/* Keeps only the capability that is needed to read another owner's store. */
static void drop_capabilities(struct fs_mount *m)
{
	int r = keep_capabilities(1u << CAP_DAC_READ_SEARCH);

	fs_mount_feature(m, "capabilities_dropped", !r, "%s",
		r ? strerror(-r) : geteuid() == 0 ? "all but dac_read_search" : "all");
}

/* struct landlock_ruleset_attr as in Linux 6.12; older headers have only its first field. */
struct landlock_rules { uint64_t fs, net, scoped; };

/* Rights that kernels newer than the header handle: their bits, by ABI version. */
static struct landlock_rules landlock_handled(long abi)
{
	struct landlock_rules all = {.fs = (LANDLOCK_ACCESS_FS_MAKE_SYM << 1) - 1};

	if (abi >= 2)
		all.fs |= UINT64_C(1) << 13;  /* refer */
	if (abi >= 3)
		all.fs |= UINT64_C(1) << 14;  /* truncate */
	if (abi >= 4)
		all.net = 3;                  /* bind and connect TCP */
	if (abi >= 5)
		all.fs |= UINT64_C(1) << 15;  /* ioctl of devices that are opened from now on */
	if (abi >= 6)
		all.scoped = 3;               /* abstract UNIX sockets and signals of other processes */
	return all;
}

static int landlock(const char *store)
{
	struct landlock_path_beneath_attr beneath = {
		.allowed_access = LANDLOCK_ACCESS_FS_READ_FILE | LANDLOCK_ACCESS_FS_READ_DIR,
	};
	struct landlock_rules rules;
	size_t size;
	base_cleanup_close int ruleset = -1;
	base_cleanup_close int directory = -1;

	long abi = syscall(SYS_landlock_create_ruleset, NULL, 0, LANDLOCK_CREATE_RULESET_VERSION);
	if (abi < 0)
		return -errno;
	rules = landlock_handled(abi);
	size = abi >= 6 ? sizeof rules : abi >= 4 ? 2 * sizeof rules.fs : sizeof rules.fs;
	ruleset = (int)syscall(SYS_landlock_create_ruleset, &rules, size, 0);
	directory = open(store, O_PATH | O_CLOEXEC);
	if (ruleset < 0 || directory < 0)
		return -errno;
	beneath.parent_fd = directory;
	if (syscall(SYS_landlock_add_rule, ruleset, LANDLOCK_RULE_PATH_BENEATH, &beneath, 0) ||
			syscall(SYS_landlock_restrict_self, ruleset, 0))
		return -errno;
	return 0;
}

#ifdef NATIVE_ARCH
#define REFUSE(error) BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (error))
#define DENY(name) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_##name, 0, 1), REFUSE(EPERM)
#define ARGUMENT(n) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[n]))
#define X32_BIT 0x40000000u /* x86-64's x32 system calls have numbers of their own */

/* Refuses system calls that a reader of files never makes. It is a list of what is refused, not of what is allowed, so
 * that a C library which makes other calls keeps working. Landlock does not cover changes of a file's mode, owner,
 * times or attributes, so they are refused here. clone3 takes its flags in memory, which a filter cannot read; when it
 * is refused the C library falls back to clone. */
static int seccomp(void)
{
	struct sock_filter filter[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, arch)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, NATIVE_ARCH, 1, 0), REFUSE(ENOSYS),
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
#ifdef __x86_64__
		BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, X32_BIT, 0, 1), REFUSE(ENOSYS),
		DENY(chmod), DENY(chown), DENY(lchown), DENY(utime), DENY(utimes), DENY(futimesat), DENY(mknod),
		DENY(link), DENY(symlink), DENY(rename), DENY(unlink), DENY(mkdir), DENY(rmdir), DENY(fork),
		DENY(vfork),
#endif
		DENY(fchmod), DENY(fchmodat), DENY(fchown), DENY(fchownat), DENY(utimensat), DENY(setxattr),
		DENY(lsetxattr), DENY(fsetxattr), DENY(removexattr), DENY(lremovexattr), DENY(fremovexattr),
		DENY(mknodat), DENY(linkat), DENY(symlinkat), DENY(renameat), DENY(renameat2), DENY(unlinkat),
		DENY(mkdirat), DENY(truncate),
		DENY(execve), DENY(execveat), DENY(ptrace), DENY(process_vm_readv), DENY(process_vm_writev), DENY(kill),
		DENY(tkill), DENY(rt_sigqueueinfo), DENY(rt_tgsigqueueinfo), DENY(pidfd_open), DENY(pidfd_getfd),
		DENY(pidfd_send_signal), DENY(kcmp),
		DENY(mount), DENY(umount2), DENY(pivot_root), DENY(fsopen), DENY(fspick), DENY(open_tree),
		DENY(move_mount), DENY(mount_setattr),
		DENY(chroot), DENY(open_by_handle_at), DENY(name_to_handle_at), DENY(bpf), DENY(perf_event_open),
		DENY(io_uring_setup), DENY(init_module), DENY(finit_module), DENY(delete_module),
		DENY(kexec_load), DENY(keyctl), DENY(add_key), DENY(request_key), DENY(userfaultfd), DENY(setns),
		DENY(unshare), DENY(reboot), DENY(syslog), DENY(sethostname), DENY(setdomainname), DENY(settimeofday),
		DENY(clock_settime), DENY(adjtimex), DENY(clock_adjtime),
		DENY(swapon), DENY(swapoff), DENY(acct), DENY(quotactl), DENY(bind), DENY(listen), DENY(accept),
		DENY(accept4),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_clone3, 0, 1), REFUSE(ENOSYS),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_tgkill, 0, 4), /* its own threads only */
		ARGUMENT(0),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)getpid(), 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW), REFUSE(EPERM),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_clone, 0, 4), /* threads only */
		ARGUMENT(0),
		BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, CLONE_THREAD, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW), REFUSE(EPERM),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_socket, 0, 3),
		ARGUMENT(0),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, AF_UNIX, 1, 0),  /* syslog */
		REFUSE(EPERM),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog program = {.len = BASE_COUNT(filter), .filter = filter};

	return prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) ? -errno : 0;
}
#else
static int seccomp(void) { return -ENOSYS; }
#endif

void fs_harden(struct fs_mount *m)
{
	bool off;
	int r;

	no_core_dumps(m);
	drop_capabilities(m);
	off = prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0;
	fs_mount_feature(m, "no_new_privs", !off, "%s", off ? strerror(errno) : "set");
	r = off ? -EPERM : landlock(m->options->store);
	fs_mount_feature(m, "landlock", !r, "%s", r ? strerror(-r) : "the store, for reading");
	r = off ? -EPERM : seccomp();
	fs_mount_feature(m, "seccomp", !r, "%s", r ? strerror(-r) : "set");
}

void fs_harden_keeper(void)
{
	int r;

	if (geteuid() != 0)
		return;  /* it has no privileges, and needs fusermount3, which is setuid */
	r = keep_capabilities(1u << CAP_SYS_ADMIN | 1u << CAP_DAC_READ_SEARCH | 1u << CAP_KILL);
	if (r || prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
		base_debug("the keeper cannot give up its privileges: %s", strerror(r ? -r : errno));
}
