/* SPDX-License-Identifier: Apache-2.0
 *
 * The kernel cannot reclaim memory files, so they have to be freed before it kills processes for lack of memory. Its
 * pressure stall information wakes a thread when tasks waited for memory for more than STALL_US within WINDOW_US, on
 * the whole machine or in one control group. A window of 2 s needs no privilege.
 *
 * The machine's pressure includes tasks of control groups that are at their limits. So it is ignored while the machine
 * has a share of the memory that was free when the mount started, unless a limit holds for the mount itself, which may
 * then be one of those tasks. */
#include "fs/pressure.h"

#include <fcntl.h>
#include <malloc.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "core/base/log.h"
#include "core/base/machine.h"
#include "fs/backing.h"

#define STALL_US 100000
#define WINDOW_US 2000000
#define FLOOR_SHARE 4

static int open_trigger(const char *path)
{
	char text[64];
	int fd = open(path, O_RDWR | O_NONBLOCK | O_CLOEXEC);
	int n = snprintf(text, sizeof text, "some %d %d", STALL_US, WINDOW_US);
	int r;

	if (fd < 0)
		return -errno;
	if (write(fd, text, (size_t)n + 1) > 0)
		return fd;
	r = -errno;
	close(fd);
	return r;
}

/* The trigger of the control group (version 2), but not of the root group, which is the machine (it alone has no
 * cgroup.type). Inside a container the mount's own group may be the one at the mount point of cgroupfs. */
static int open_group(void)
{
	static const char *const places[] = {"/sys/fs/cgroup", "/sys/fs/cgroup/unified"};
	char line[512], path[640];
	FILE *f = fopen("/proc/self/cgroup", "re");
	int fd = -ENOENT;

	while (f && fd < 0 && fgets(line, sizeof line, f)) {
		const char *group;

		line[strcspn(line, "\n")] = '\0';
		if (strncmp(line, "0::/", 4) != 0)
			continue;
		group = line[4] ? line + 3 : "";
		for (size_t i = 0; i < 4 && fd < 0; i++) {
			snprintf(path, sizeof path, "%s%s/cgroup.type", places[i % 2], i < 2 ? group : "");
			if (access(path, F_OK) < 0)
				continue;
			snprintf(path, sizeof path, "%s%s/memory.pressure", places[i % 2], i < 2 ? group : "");
			fd = open_trigger(path);
		}
	}
	if (f)
		fclose(f);
	return fd;
}

/* A number of /proc/meminfo, in bytes; 0: unknown. */
static uint64_t meminfo(const struct fs_pressure *p, const char *key)
{
	char text[4096];
	ssize_t n = p->meminfo_fd < 0 ? -1 : pread(p->meminfo_fd, text, sizeof text - 1, 0);
	unsigned long long kib = 0;
	const char *at;

	text[n < 0 ? 0 : n] = '\0';
	at = strstr(text, key);
	return at && sscanf(at + strlen(key), "%llu", &kib) == 1 ? kib * 1024 : 0;
}

static void set_floor(struct fs_pressure *p)
{
	p->meminfo_fd = open("/proc/meminfo", O_RDONLY | O_CLOEXEC);
	if (base_machine_memory_limit("") >= meminfo(p, "MemTotal:"))
		p->floor_bytes = meminfo(p, "MemAvailable:") / FLOOR_SHARE;
}

static bool machine_is_short(const struct fs_pressure *p)
{
	return !p->floor_bytes || meminfo(p, "MemAvailable:") < p->floor_bytes;
}

void fs_pressure_open(struct fs_mount *m)
{
	struct fs_pressure *p = &m->pressure;
	bool machine, group;

	set_floor(p);
	p->fds[0] = open_trigger("/proc/pressure/memory");
	p->fds[1] = open_group();
	p->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	machine = p->fds[0] >= 0;
	group = p->fds[1] >= 0;
	fs_mount_feature(m, "memory_pressure", p->wake_fd >= 0 && (machine || group), "%s", machine && group
		? "of the machine and the control group" : machine ? "of the machine" : group
		? "of the control group" : strerror(-p->fds[0]));
}

static void give_back(struct fs_mount *m)
{
	atomic_fetch_add_explicit(&m->stats.gave_back, 1, memory_order_relaxed);
	fs_backings_give_back(m->backings);
	load_cache_shrink(m->cache);
	fs_scratch_shrink(&m->scratch);
	malloc_trim(0);
}

static void *pressure_main(void *arg)
{
	struct fs_mount *m = arg;
	struct fs_pressure *p = &m->pressure;
	struct pollfd fds[3] = {{.fd = p->wake_fd, .events = POLLIN}, {.fd = p->fds[0], .events = POLLPRI},
		{.fd = p->fds[1], .events = POLLPRI}};

	prctl(PR_SET_NAME, "vckpt-pressure");
	for (;;) {
		int n = poll(fds, 3, -1);
		bool is_short = false;

		if (n > 0 && fds[0].revents)
			return NULL;
		for (int i = 1; n > 0 && i < 3; i++) {
			is_short |= (fds[i].revents & POLLPRI) && (i == 2 || machine_is_short(p));
			if (fds[i].revents & (POLLERR | POLLNVAL))  /* the group is gone */
				fds[i].fd = -1;
		}
		if (is_short)
			give_back(m);
	}
}

void fs_pressure_start(struct fs_mount *m)
{
	struct fs_pressure *p = &m->pressure;
	int r;

	if (p->wake_fd < 0 || (p->fds[0] < 0 && p->fds[1] < 0))
		return;
	r = pthread_create(&p->thread, NULL, pressure_main, m);
	p->running = r == 0;
	if (r)
		fs_mount_feature(m, "memory_pressure", false, "no thread: %s", strerror(r));
}

void fs_pressure_stop(struct fs_mount *m)
{
	struct fs_pressure *p = &m->pressure;
	uint64_t one = 1;

	if (p->running && write(p->wake_fd, &one, sizeof one) == (ssize_t)sizeof one)
		pthread_join(p->thread, NULL);
	p->running = false;
	for (int i = 0; i < 2; i++)
		if (p->fds[i] >= 0)
			close(base_steal_fd(&p->fds[i]));
	if (p->wake_fd >= 0)
		close(base_steal_fd(&p->wake_fd));
	if (p->meminfo_fd >= 0)
		close(base_steal_fd(&p->meminfo_fd));
}
