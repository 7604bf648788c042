/* SPDX-License-Identifier: Apache-2.0
 *
 * SIGINT, which Ctrl-C sends, and SIGTERM. By default they end a command at once, and the handler first writes one line
 * about what was done. A command that can undo its work takes the first one as a request (tool_interrupted) and ends at
 * once by the second. Either way the process dies of the signal, so that a shell ends its loop, too. The library's
 * threads block signals, so the handler runs in the main thread; a child that was forked from here dies silently. Where
 * SIGINT was ignored from the start, as for background jobs of a script, it stays so. A command that goes on until it
 * is ended ends well by both. */
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

#include "tools/vckpt/tool.h"

static struct {
	char line[400];
	size_t len;
	pid_t pid;
	bool waits, ends;
	atomic_int seen;                /* the signal; 0: none */
} interrupt;

static void end_now(int number)
{
	if (getpid() == interrupt.pid && write(STDERR_FILENO, interrupt.line, interrupt.len) < 0)
		_exit(128 + number);
	signal(number, SIG_DFL);
	raise(number); /* comes when the handler has returned */
}

static void handler(int number)
{
	int saved = errno;

	if (interrupt.waits && !atomic_load(&interrupt.seen))
		atomic_store(&interrupt.seen, number);
	else
		end_now(number);
	errno = saved;
}

static void install(const struct tool *t, const char *text, bool waits)
{
	static const int numbers[] = {SIGINT, SIGTERM};
	struct sigaction action = {.sa_handler = handler, .sa_flags = SA_RESTART}, old;
	sigset_t set, before;

	sigemptyset(&set);
	sigaddset(&set, SIGINT);
	sigaddset(&set, SIGTERM);
	sigprocmask(SIG_BLOCK, &set, &before); /* the line is whole when it is written */
	snprintf(interrupt.line, sizeof interrupt.line, "%svckpt %s: interrupted: %.300s\n",
		isatty(STDERR_FILENO) ? "\n" : "", t->command->name, text);
	interrupt.len = strlen(interrupt.line);
	interrupt.pid = getpid();
	interrupt.waits = waits;
	for (unsigned i = 0; i < BASE_COUNT(numbers); i++)
		if (sigaction(numbers[i], NULL, &old) == 0 && old.sa_handler != SIG_IGN)
			sigaction(numbers[i], &action, NULL);
	sigprocmask(SIG_SETMASK, &before, NULL);
}

void tool_interrupt_ends(const struct tool *t, const char *text)
{
	install(t, text, false);
}

void tool_interrupt_waits(const struct tool *t, const char *text)
{
	install(t, text, true);
}

bool tool_interrupted(void)
{
	return atomic_load(&interrupt.seen) != 0;
}

bool tool_terminated(void)
{
	return atomic_load(&interrupt.seen) == SIGTERM;
}

int tool_interrupt_check(struct base_error *err)
{
	return tool_interrupted() ? base_error_set(err, -EINTR, "interrupted") : 0;
}

void tool_interrupt_is_end(void)
{
	interrupt.ends = true;
}

void tool_interrupt_die(void)
{
	int number = atomic_load(&interrupt.seen);

	if (!number || interrupt.ends)
		return;
	signal(number, SIG_DFL);
	raise(number);
}
