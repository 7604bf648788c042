/* SPDX-License-Identifier: Apache-2.0
 *
 * A rank, or with threads=1 all ranks of a job, each in a thread:
 *
 *   rank_main STORE RUN ID RANK WORLD SAVES [key=value ...]
 *
 * Says a line for each thing that happened, with the rank in front: `open`, `saved STEP ENTRY`, `failed CODE SENTENCE`,
 * `closed`. Goes on with the next save after one that failed. Exit status 0, whatever failed. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "rank.h"

#define MEET_MS 2000u

extern void interpose_mark(const char *text) __attribute__((weak));

struct run { struct rank_job job; unsigned saves, pause_ms; int threads, wait; };

static void say(const struct run *run, const char *what, const char *text)
{
	char mark[64];

	printf("%u %s%s%s\n", run->job.rank, what, text[0] ? " " : "", text);
	fflush(stdout);
	if (!interpose_mark)
		return;
	snprintf(mark, sizeof mark, "%u %s %.40s", run->job.rank, what, text);
	interpose_mark(mark);
}

static void say_failed(const struct run *run, int code, const char *why)
{
	char text[RANK_TEXT + 32];

	snprintf(text, sizeof text, "%d %s", code, why);
	say(run, "failed", text);
}

static void say_saved(const struct run *run, uint64_t step, uint64_t entry)
{
	char text[64];

	snprintf(text, sizeof text, "%llu %llu", (unsigned long long)step, (unsigned long long)entry);
	say(run, "saved", text);
}

/* A rank that fails at once would be gone, and its launch with it, before slower ones have opened: a training job's
 * ranks stay. Waits until all have come so far, or failed, for a while: one may be killed. Beside the store, where
 * calls are not meddled with. */
static void meet(const struct run *run)
{
	char dir[2000], path[2200];
	unsigned all = 0;

	snprintf(dir, sizeof dir, "%s.%s.here", run->job.store, run->job.id);
	mkdir(dir, 0755);
	snprintf(path, sizeof path, "%s/%u", dir, run->job.rank);
	close(open(path, O_CREAT | O_WRONLY | O_CLOEXEC, 0644));
	for (unsigned i = 0; i < MEET_MS / 5 && all < run->job.world; i++) {
		all = 0;
		for (uint32_t rank = 0; rank < run->job.world; rank++) {
			snprintf(path, sizeof path, "%s/%u", dir, rank);
			all += access(path, F_OK) == 0;
		}
		if (all < run->job.world)
			usleep(5000);
	}
}

static void *rank_run(void *arg)
{
	const struct run *run = arg;
	char text[RANK_TEXT] = "";
	struct rank *rank;
	int code = rank_open(&run->job, &rank, text);

	meet(run);
	if (code < 0) {
		say_failed(run, code, text);
		return NULL;
	}
	say(run, "open", "");
	if (run->wait && getchar() == EOF)
		return NULL;
	for (unsigned i = 0; i < run->saves; i++) {
		uint64_t step = 0, entry = 0;

		if (i)
			usleep(run->pause_ms * 1000);
		code = rank_save(rank, i, &step, &entry, text);
		if (code < 0)
			say_failed(run, code, text);
		else
			say_saved(run, step, entry);
	}
	code = rank_close(rank, text);
	if (code < 0)
		say_failed(run, code, text);
	else
		say(run, "closed", "");
	return NULL;
}

static void option(struct run *run, const char *word)
{
	const char *value = strchr(word, '=');
	size_t n = value ? (size_t)(value - word) : 0;
	unsigned long long number = value ? strtoull(value + 1, NULL, 10) : 0;

	if (!strncmp(word, "heartbeat_ms", n))
		run->job.heartbeat_ms = number;
	else if (!strncmp(word, "start_ms", n))
		run->job.start_ms = number;
	else if (!strncmp(word, "bytes", n))
		run->job.bytes = number;
	else if (!strncmp(word, "step", n))
		run->job.step = number;
	else if (!strncmp(word, "replace", n))
		run->job.replace = (int)number;
	else if (!strncmp(word, "workers", n))
		run->job.workers = (uint32_t)number;
	else if (!strncmp(word, "drop", n))
		run->job.drop = (int)number;
	else if (!strncmp(word, "threads", n))
		run->threads = (int)number;
	else if (!strncmp(word, "pause_ms", n)) /* between two saves */
		run->pause_ms = (unsigned)number;
	else if (!strncmp(word, "wait", n)) /* for a line on standard input, once open */
		run->wait = (int)number;
}

int main(int argc, char **argv)
{
	struct run run = {.job = {.bytes = 3000, .step = RANK_NO_STEP}};
	struct run *all;
	pthread_t *threads;

	if (argc < 7) {
		fprintf(stderr, "usage: %s STORE RUN ID RANK WORLD SAVES [key=value ...]\n", argv[0]);
		return 2;
	}
	run.job.store = argv[1];
	run.job.run = argv[2];
	run.job.id = argv[3];
	run.job.rank = (uint32_t)atoi(argv[4]);
	run.job.world = (uint32_t)atoi(argv[5]);
	run.saves = (unsigned)atoi(argv[6]);
	for (int i = 7; i < argc; i++)
		option(&run, argv[i]);
	if (!run.threads) {
		rank_run(&run);
		return 0;
	}
	all = calloc(run.job.world, sizeof *all);
	threads = calloc(run.job.world, sizeof *threads);
	if (!all || !threads)
		return 1;
	for (uint32_t i = 0; i < run.job.world; i++) {
		all[i] = run;
		all[i].job.rank = i;
		if (pthread_create(&threads[i], NULL, rank_run, &all[i]) != 0)
			return 1;
	}
	for (uint32_t i = 0; i < run.job.world; i++)
		pthread_join(threads[i], NULL);
	free(all);
	free(threads);
	return 0;
}

void rank_fill(void *out, size_t len, const char *id, uint64_t seed)
{
	uint8_t *bytes = out;

	for (; *id; id++)
		seed = seed * 31 + (unsigned char)*id;

	for (size_t i = 0; i < len; i++) {
		seed = seed * 6364136223846793005u + 1442695040888963407u;
		bytes[i] = (uint8_t)(seed >> 56);
	}
}
