/* SPDX-License-Identifier: Apache-2.0
 *
 * interpose: what the two halves of the preloaded library share. interpose.c stands before libc's calls and says what
 * happens to them; interpose_log.c writes down those that succeeded. */
#ifndef TESTS_CRASH_INTERPOSE_H
#define TESTS_CRASH_INTERPOSE_H

#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

/* Numbers of the log; tests/crash/powerlib.py has them too. */
enum interpose_kind { INTERPOSE_CREATE = 1, INTERPOSE_WRITE, INTERPOSE_SYNC, INTERPOSE_SYNC_DIR, INTERPOSE_LINK,
	INTERPOSE_UNLINK, INTERPOSE_RMDIR, INTERPOSE_MKDIR, INTERPOSE_RENAME, INTERPOSE_TRUNCATE, INTERPOSE_SYNC_ALL,
	INTERPOSE_MARK };

struct interpose_event {
	enum interpose_kind kind;
	uint64_t ino, offset;           /* TRUNCATE: offset is the length */
	const char *path, *to;
	const struct iovec *iov; int niov; size_t len; /* WRITE: the first len bytes of iov */
};

void interpose_log_open(const char *file);
/* Held around the call and its record, so that the log has the order of all processes' calls. */
void interpose_log_lock(void);
void interpose_log_unlock(void);
void interpose_log_put(const struct interpose_event *e);
/* What a test program says about itself ("committed 3 7"); looked up as a weak symbol. */
void interpose_mark(const char *text);
void interpose_said(const char *text); /* interpose.c hears of it, too */

#endif
