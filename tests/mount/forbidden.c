/* SPDX-License-Identifier: Apache-2.0
 *
 * forbidden: a library for LD_PRELOAD that takes the place of a decoder which a hostile piece has taken over. The first
 * time that a piece is decoded, it tries what the process that serves a mount must not be able to do, and writes a line
 * "NAME ERRNO" for each into the file VCKPT_FORBIDDEN, which it mapped before privileges were given up.
 * VCKPT_FORBIDDEN_STORE and VCKPT_FORBIDDEN_MOUNT: directories. */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/xattr.h>
#include <unistd.h>

#define ROOM 8192

static char *page, record[4096], fresh[4096];
static const char *mountpoint;
static size_t used;

__attribute__((constructor)) static void map_page(void)
{
	const char *path = getenv("VCKPT_FORBIDDEN"), *store = getenv("VCKPT_FORBIDDEN_STORE");
	int fd = path && store ? open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600) : -1;

	if (fd < 0 || ftruncate(fd, ROOM))
		return;
	page = mmap(NULL, ROOM, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (page == MAP_FAILED)
		page = NULL;
	close(fd);
	mountpoint = getenv("VCKPT_FORBIDDEN_MOUNT");
	snprintf(record, sizeof record, "%s/vckpt.store", store);
	snprintf(fresh, sizeof fresh, "%s/fresh", store);
}

static void tell(const char *name, long result)
{
	used += (size_t)snprintf(page + used, ROOM - used, "%s %d\n", name, result < 0 ? errno : 0);
}

#define TRY(name, call) do { errno = 0; tell(name, (long)(call)); } while (0)

static void try_files(void)
{
	TRY("read a file outside the store", open("/etc/passwd", O_RDONLY));
	TRY("list a directory outside the store", open("/", O_RDONLY | O_DIRECTORY));
	TRY("write a file of the store", open(record, O_WRONLY));
	TRY("make a file in the store", open(fresh, O_WRONLY | O_CREAT, 0600));
	TRY("make a directory", mkdir(fresh, 0700));
	TRY("remove a file", unlink(record));
	TRY("rename a file", rename(record, fresh));
	TRY("link a file", link(record, fresh));
	TRY("make a link", symlink("/etc/passwd", fresh));
	TRY("cut a file", truncate(record, 0));
	TRY("change a mode", chmod(record, 0777));
	TRY("change an owner", chown(record, 1, 1));
	TRY("change times", utimensat(AT_FDCWD, record, NULL, 0));
	TRY("change an attribute", setxattr(record, "user.x", "y", 1, 0));
}

static int raise_capability(void)
{
	struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
	const unsigned admin = 1u << CAP_SYS_ADMIN;
	struct __user_cap_data_struct data[2] = { {.effective = admin, .permitted = admin} };

	return (int)syscall(SYS_capset, &header, data);
}

static void try_processes(void)
{
	char byte, program[] = "true", *argv[] = { program, NULL };
	struct iovec here = { &byte, 1 }, there = { &byte, 1 };
	pid_t keeper = getppid();

	TRY("run a program", execve("/bin/true", argv, NULL));
	TRY("start a process", syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0));
	TRY("signal the keeper", kill(keeper, 0));
	TRY("signal a thread of the keeper", syscall(SYS_tgkill, keeper, keeper, 0));
	TRY("trace the keeper", ptrace(PTRACE_SEIZE, keeper, 0, 0));
	TRY("read the keeper's memory", process_vm_readv(keeper, &here, 1, &there, 1, 0));
	TRY("open the keeper's memory", open("/proc/1/mem", O_RDONLY));
	TRY("take a capability", raise_capability());
}

static void try_system(void)
{
	TRY("mount", mount("none", "/mnt", "tmpfs", 0, NULL));
	TRY("unmount", umount2(mountpoint, MNT_DETACH));
	TRY("make a namespace", unshare(CLONE_NEWUSER));
	TRY("use the network", socket(AF_INET, SOCK_STREAM, 0));
	TRY("use netlink", socket(AF_NETLINK, SOCK_RAW, 0));
	TRY("make an io_uring", syscall(SYS_io_uring_setup, 1, NULL));
#ifdef __x86_64__
	TRY("use the calls of x32", syscall(0x40000000 | SYS_getpid));
#endif
}

int LZ4_decompress_safe(const char *from, char *to, int size, int room);

int LZ4_decompress_safe(const char *from, char *to, int size, int room)
{
	static int (*decode)(const char *, char *, int, int);
	static atomic_flag tried = ATOMIC_FLAG_INIT;

	if (!decode)
		*(void **)&decode = dlsym(RTLD_NEXT, "LZ4_decompress_safe");
	if (page && !atomic_flag_test_and_set(&tried)) {
		try_files();
		try_processes();
		try_system();
		tell("done", 0);
	}
	return decode(from, to, size, room);
}
