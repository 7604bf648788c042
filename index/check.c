/* SPDX-License-Identifier: Apache-2.0
 *
 * check: is the index sound? Asked of a child process, because LMDB answers some damage by an assertion, a SIGBUS, a
 * division by zero or an endless loop. The child says yes by exit status 0, and only so; everything else, being killed
 * after the timeout included, is "damaged".
 *
 * It looks twice at one snapshot: at its pages with a reader of its own (pages.c: what LMDB would trust unseen), then
 * through LMDB at every entry of the free list, the main table and all tables, each key and value against the value's
 * check. While it looks, a read transaction keeps writers from using the snapshot's pages again; only where the store
 * cannot be written by this user, so that there is no lock file to note a reader in, it looks without (MDB_NOLOCK), and
 * then a writer at work can make a sound index look damaged, never the other way round for what was read.
 *
 * The child never returns into the caller's code, closes what it inherited (a mount's /dev/fuse would outlive the
 * mount), writes nothing, dumps no core, and dies with its parent. */
#include "core/base/clock.h"
#include "index/index_internal.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>

enum { SAYS_SOUND = 0, SAYS_DAMAGED = 1, SAYS_AGAIN = 3 };

static void on_assert(MDB_env *env, const char *text)
{
	(void)env;
	(void)text;
	_exit(SAYS_DAMAGED);
}

static bool table_sound(MDB_txn *txn, enum index_table t, MDB_dbi dbi)
{
	MDB_cursor *c;
	MDB_val k, v;
	MDB_stat st;
	size_t seen = 0;
	if (mdb_stat(txn, dbi, &st) != 0 || mdb_cursor_open(txn, dbi, &c) != 0)
		return false;
	int rc;
	while ((rc = mdb_cursor_get(c, &k, &v, MDB_NEXT)) == 0) {
		if (!index_value_ok(t, k.mv_data, k.mv_size, v.mv_data, v.mv_size, NULL))
			break;
		seen++;
	}
	mdb_cursor_close(c);
	return rc == MDB_NOTFOUND && seen == st.ms_entries;
}

/* LMDB's own two tables: the free list, and the main one that holds our tables' roots and nothing else. */
static bool own_table_sound(MDB_txn *txn, MDB_dbi dbi, size_t *ret_seen)
{
	MDB_cursor *c;
	MDB_val k, v;
	if (mdb_cursor_open(txn, dbi, &c) != 0)
		return false;
	int rc;
	*ret_seen = 0;
	while ((rc = mdb_cursor_get(c, &k, &v, MDB_NEXT)) == 0)
		*ret_seen += 1;
	mdb_cursor_close(c);
	return rc == MDB_NOTFOUND;
}

static bool snapshot_sound(MDB_txn *txn, const uint8_t store_id[16])
{
	MDB_dbi dbi[INDEX_TABLES], main_dbi;
	size_t entries;
	if (index_tables_open(txn, false, dbi) != 0 || mdb_dbi_open(txn, NULL, 0, &main_dbi) != 0)
		return false;
	if (!own_table_sound(txn, 0, &entries) || !own_table_sound(txn, main_dbi, &entries) || entries != INDEX_TABLES)
		return false;
	for (int t = 0; t < INDEX_TABLES; t++)
		if (!table_sound(txn, t, dbi[t]))
			return false;
	struct index_body next;
	return index_meta_ok(txn, dbi, store_id) && index_get(txn, dbi, INDEX_META, "next", 4, &next) == 0 &&
		next.len == 8;
}

static int look(const char *dir, const uint8_t store_id[16])
{
	MDB_env *env;
	MDB_txn *txn;
	int lock = -1, fd = -1;
	if (index_dir_lock(dir, &lock) < 0)
		return SAYS_DAMAGED;
	int rc = index_env_open(dir, MDB_RDONLY, 0, &env);
	if (rc == EACCES || rc == EROFS || rc == EPERM) {
		mdb_env_close(env);
		rc = index_env_open(dir, MDB_RDONLY | MDB_NOLOCK, 0, &env);
	}
	close(lock);
	if (rc != 0 || mdb_env_set_assert(env, on_assert) != 0 || mdb_env_get_fd(env, &fd) != 0 ||
		mdb_txn_begin(env, NULL, MDB_RDONLY, &txn) != 0)
		return SAYS_DAMAGED;
	uint64_t txnid = mdb_txn_id(txn);
	if (index_pages_check(fd, txnid) == 0)
		return snapshot_sound(txn, store_id) ? SAYS_SOUND : SAYS_DAMAGED;
	/* The page that describes the snapshot may have been written anew before it was read (by the second commit
	 * since). */
	MDB_envinfo info;
	return mdb_env_info(env, &info) == 0 && info.me_last_txnid >= txnid + 2 ? SAYS_AGAIN : SAYS_DAMAGED;
}

static void close_inherited(void)
{
#ifdef SYS_close_range
	if (syscall(SYS_close_range, 3u, ~0u, 0u) == 0)
		return;
#endif
	struct rlimit files;
	int end = getrlimit(RLIMIT_NOFILE, &files) == 0 && files.rlim_cur < 65536 ? (int)files.rlim_cur : 65536;
	for (int fd = 3; fd < end; fd++)
		close(fd);
}

__attribute__((noreturn)) static void child(const char *dir, const uint8_t store_id[16], pid_t parent)
{
	static const int signals[] = {
		SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTERM, SIGINT, SIGHUP, SIGPIPE, SIGALRM};
	for (size_t n = 0; n < BASE_COUNT(signals); n++)
		signal(signals[n], SIG_DFL);
	sigset_t none;
	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (getppid() != parent)
		_exit(SAYS_DAMAGED);
	setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0});
	close_inherited();
	int null = open("/dev/null", O_RDWR); /* LMDB prints what it asserts */
	for (int fd = 0; null >= 0 && fd < 3; fd++)
		dup2(null, fd);
	_exit(look(dir, store_id));
}

/* The exit status of the child, or SAYS_DAMAGED; kills it at the deadline. */
static int await(pid_t pid, uint64_t deadline)
{
	int status;
	long pause_ns = 200 * 1000;
	for (;;) {
		pid_t got = waitpid(pid, &status, WNOHANG);
		if (got == pid)
			return WIFEXITED(status) ? WEXITSTATUS(status) : SAYS_DAMAGED;
		if (got < 0 && errno != EINTR)
			return SAYS_DAMAGED; /* somebody else took the answer (SIGCHLD ignored): not a yes */
		if (base_monotonic_ms() >= deadline) {
			kill(pid, SIGKILL);
			while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
				;
			return SAYS_DAMAGED;
		}
		nanosleep(&(struct timespec){0, pause_ns}, NULL);
		pause_ns = pause_ns < 10 * 1000 * 1000 ? pause_ns * 2 : pause_ns;
	}
}

int index_check(const char *dir, const uint8_t store_id[16], unsigned timeout_ms)
{
	char data[4096];
	struct stat st;
	if (snprintf(data, sizeof data, "%s/data.mdb", dir) >= (int)sizeof data)
		return -ENAMETOOLONG;
	/* never opened here: closing it would drop the locks of an environment that this process has open */
	if (lstat(data, &st) < 0)
		return errno == ENOENT || errno == ENOTDIR ? -ENOENT : -errno;
	if (!S_ISREG(st.st_mode) || st.st_size == 0)
		return -BASE_EDAMAGED;
	uint64_t deadline = base_monotonic_ms() + timeout_ms;
	pid_t self = getpid();
	for (int tries = 0; tries < 3; tries++) {
		pid_t pid = fork();
		if (pid < 0)
			return -errno;
		if (pid == 0)
			child(dir, store_id, self);
		int says = await(pid, deadline);
		if (says != SAYS_AGAIN)
			return says == SAYS_SOUND ? 0 : -BASE_EDAMAGED;
	}
	return -BASE_EDAMAGED;
}
