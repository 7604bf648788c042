/* SPDX-License-Identifier: Apache-2.0
 *
 * All of it is best effort: what the kernel or the user does not allow is off and stands in .vckpt/stats. Raw
 * system calls, no library. Order matters: capabilities are dropped while that is still possible, no_new_privs goes
 * before Landlock and seccomp, which need it. */
#include "fs/harden.h"

#include <execinfo.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/landlock.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>

#if defined(__x86_64__)
#define NATIVE_ARCH AUDIT_ARCH_X86_64
#elif defined(__aarch64__)
#define NATIVE_ARCH AUDIT_ARCH_AARCH64
#endif

void fs_harden_process(struct fs_mount *m)
{
	struct rlimit none = {0};
	void *frame;

	backtrace(&frame, 1);  /* loads the unwinder that pthread_cancel needs: no file can be opened for it later */
	tzset();
	bool off = setrlimit(RLIMIT_CORE, &none) != 0;
#ifndef __SANITIZE_ADDRESS__
	off |= prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) != 0;
#endif
	fs_mount_feature(m, "no_core_dumps", !off, "%s", off ? strerror(errno) : "set");
}

/* Keeps only the capability that is needed to read another owner's store. */
static void drop_capabilities(struct fs_mount *m)
{
	struct __user_cap_header_struct header = { .version = _LINUX_CAPABILITY_VERSION_3 };
	struct __user_cap_data_struct data[2] = {0};

	if (geteuid() == 0)
		data[0].effective = data[0].permitted = 1u << CAP_DAC_READ_SEARCH;
	bool off = syscall(SYS_capset, &header, data) != 0;
	fs_mount_feature(m, "capabilities_dropped", !off, "%s",
		off ? strerror(errno) : geteuid() == 0 ? "all but dac_read_search" : "all");
}

static int landlock(const char *store)
{
	struct landlock_ruleset_attr attr = { .handled_access_fs = (LANDLOCK_ACCESS_FS_MAKE_SYM << 1) - 1 };
	struct landlock_path_beneath_attr beneath = {
		.allowed_access = LANDLOCK_ACCESS_FS_READ_FILE | LANDLOCK_ACCESS_FS_READ_DIR,
	};

	long abi = syscall(SYS_landlock_create_ruleset, NULL, 0, LANDLOCK_CREATE_RULESET_VERSION);
	if (abi < 0)
		return -errno;
	if (abi >= 2)
		attr.handled_access_fs |= UINT64_C(1) << 13;  /* refer */
	if (abi >= 3)
		attr.handled_access_fs |= UINT64_C(1) << 14;  /* truncate */
	base_cleanup_close int ruleset = (int)syscall(SYS_landlock_create_ruleset, &attr, sizeof attr, 0);
	base_cleanup_close int directory = open(store, O_PATH | O_CLOEXEC);
	if (ruleset < 0 || directory < 0)
		return -errno;
	beneath.parent_fd = directory;
	if (syscall(SYS_landlock_add_rule, ruleset, LANDLOCK_RULE_PATH_BENEATH, &beneath, 0) ||
			syscall(SYS_landlock_restrict_self, ruleset, 0))
		return -errno;
	return 0;
}

#ifdef NATIVE_ARCH
#define DENY(name) \
	BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_##name, 0, 1), BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM)

/* Refuses system calls that no reader of files makes. It lists what is refused, not what is allowed, so that a C
 * library which makes another call keeps working. */
static int seccomp(void)
{
	static const struct sock_filter filter[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, arch)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, NATIVE_ARCH, 1, 0),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS),
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		DENY(execve), DENY(execveat), DENY(ptrace), DENY(process_vm_readv), DENY(process_vm_writev),
		DENY(mount), DENY(umount2), DENY(pivot_root),
		DENY(chroot), DENY(open_by_handle_at), DENY(bpf), DENY(perf_event_open), DENY(init_module),
		DENY(finit_module), DENY(delete_module),
		DENY(kexec_load), DENY(keyctl), DENY(add_key), DENY(request_key), DENY(userfaultfd), DENY(setns),
		DENY(unshare), DENY(reboot),
		DENY(swapon), DENY(swapoff), DENY(acct), DENY(quotactl), DENY(bind), DENY(listen), DENY(accept4),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_socket, 0, 3),
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[0])),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, AF_UNIX, 1, 0),  /* syslog */
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog program = { .len = BASE_COUNT(filter), .filter = (struct sock_filter *)filter };

	return prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) ? -errno : 0;
}
#else
static int seccomp(void) { return -ENOSYS; }
#endif

void fs_harden_thread(struct fs_mount *m)
{
	drop_capabilities(m);
	bool off = prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0;
	fs_mount_feature(m, "no_new_privs", !off, "%s", off ? strerror(errno) : "set");
	int r = off ? -EPERM : landlock(m->options->store);
	fs_mount_feature(m, "landlock", !r, "%s", r ? strerror(-r) : "the store, for reading");
	r = off ? -EPERM : seccomp();
	fs_mount_feature(m, "seccomp", !r, "%s", r ? strerror(-r) : "set");
}
