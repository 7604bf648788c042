/* SPDX-License-Identifier: Apache-2.0
 *
 * replay_main: runs a fuzz target without a fuzzer.
 *
 *   fuzz_X [--mutations N] [--seed S] FILE|DIRECTORY...
 *
 * Every file (those of a directory in the order of their names), then N mutations of them that depend on S alone. A
 * crash, a sanitizer's report or abort() in the target is the failure; the number of the mutation is then on standard
 * error if VCKPT_FUZZ_TRACE is set. */
#include <dirent.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t len);

enum { SEED_MAX_BYTES = 1 << 20, GROW_BYTES = 64 };

static struct seed { uint8_t *bytes; size_t len; } *seeds;
static size_t nseeds;
static uint64_t state;

static uint64_t next_random(void) /* splitmix64 */
{
	uint64_t z = state += UINT64_C(0x9e3779b97f4a7c15);
	z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
	z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
	return z ^ (z >> 31);
}

static size_t below(size_t n)
{
	return n ? (size_t)(next_random() % n) : 0;
}

/* The target gets memory of exactly this length, so that a sanitizer sees a read past it. */
static void run_target(const uint8_t *bytes, size_t len)
{
	uint8_t *exact = malloc(len ? len : 1);
	if (!exact)
		abort();
	if (len)
		memcpy(exact, bytes, len);
	LLVMFuzzerTestOneInput(exact, len);
	free(exact);
}

static void add_file(const char *path)
{
	FILE *f = fopen(path, "rb");
	uint8_t *bytes = malloc(SEED_MAX_BYTES);
	size_t len;

	if (!f || !bytes) {
		fprintf(stderr, "%s: cannot read\n", path);
		exit(1);
	}
	len = fread(bytes, 1, SEED_MAX_BYTES, f);
	fclose(f);
	seeds = realloc(seeds, (nseeds + 1) * sizeof *seeds);
	if (!seeds)
		abort();
	seeds[nseeds++] = (struct seed){ bytes, len };
}

static void add_path(const char *path)
{
	struct stat st;
	struct dirent **entries;
	int n;

	if (stat(path, &st) < 0) {
		fprintf(stderr, "%s: no such file\n", path);
		exit(1);
	}
	if (!S_ISDIR(st.st_mode)) {
		add_file(path);
		return;
	}
	n = scandir(path, &entries, NULL, alphasort);
	for (int i = 0; i < n; i++) {
		char name[4096];
		if (entries[i]->d_name[0] != '.' &&
			snprintf(name, sizeof name, "%s/%s", path, entries[i]->d_name) < (int)sizeof name)
			add_path(name);
		free(entries[i]);
	}
	if (n >= 0)
		free(entries);
}

static const uint64_t interesting[] = { 0, 1, 2, 7, 8, 16, 64, 127, 128, 255, 256, 4095, 4096, 16384, 65535, 65536,
	0x7fffffff, 0x80000000, 0xffffffff, UINT64_C(1) << 32, UINT64_C(1) << 46, INT64_MAX, UINT64_C(1) << 63,
	UINT64_MAX - 63, UINT64_MAX };

/* One change; the buffer has room for GROW_BYTES more than len. */
static size_t mutate_once(uint8_t *b, size_t len, size_t room)
{
	size_t at = below(len), n = below(16) + 1;
	switch (below(8)) {
	case 0: if (len) b[at] ^= (uint8_t)(1u << below(8)); break;
	case 1: if (len) b[at] = (uint8_t)next_random(); break;
	case 2: { /* a number, little-endian, of 1 to 8 bytes */
		uint64_t v = interesting[below(sizeof interesting / sizeof *interesting)] + below(3) - 1;
		for (size_t i = 0, width = (size_t)1 << below(4); i < width && at + i < len; i++)
			b[at + i] = (uint8_t)(v >> 8 * i);
		break;
	}
	case 3: return at; /* cut short */
	case 4: /* repeat or insert */
		if (len + n <= room) {
			memmove(b + at + n, b + at, len - at);
			if (below(2))
				for (size_t i = 0; i < n; i++)
					b[at + i] = (uint8_t)next_random();
			return len + n;
		}
		break;
	case 5: /* take out */
		if (at + n <= len) {
			memmove(b + at, b + at + n, len - at - n);
			return len - n;
		}
		break;
	case 6: { /* copy from elsewhere */
		size_t from = below(len);
		if (at + n <= len && from + n <= len)
			memmove(b + at, b + from, n);
		break;
	}
	default: { /* copy from another seed */
		const struct seed *s = &seeds[below(nseeds)];
		size_t from = below(s->len);
		if (at + n <= len && from + n <= s->len)
			memcpy(b + at, s->bytes + from, n);
	}
	}
	return len;
}

static void run_mutations(uint64_t count)
{
	uint8_t *work = malloc(SEED_MAX_BYTES + GROW_BYTES);
	bool trace = getenv("VCKPT_FUZZ_TRACE") != NULL;
	if (!work)
		abort();
	for (uint64_t i = 0; i < count; i++) {
		const struct seed *s = &seeds[below(nseeds)];
		size_t len = s->len;
		if (len)
			memcpy(work, s->bytes, len);
		for (size_t k = below(6) + 1; k > 0; k--)
			len = mutate_once(work, len, s->len + GROW_BYTES);
		if (trace)
			fprintf(stderr, "mutation %llu, %zu bytes\n", (unsigned long long)i, len);
		run_target(work, len);
	}
	free(work);
}

int main(int argc, char **argv)
{
	uint64_t mutations = 0;
	for (int i = 1; i < argc; i++) {
		if (strcmp(argv[i], "--mutations") == 0 && i + 1 < argc)
			mutations = strtoull(argv[++i], NULL, 10);
		else if (strcmp(argv[i], "--seed") == 0 && i + 1 < argc)
			state = strtoull(argv[++i], NULL, 10);
		else
			add_path(argv[i]);
	}
	if (nseeds == 0) {
		fprintf(stderr, "usage: %s [--mutations N] [--seed S] FILE|DIRECTORY...\n", argv[0]);
		return 2;
	}
	for (size_t i = 0; i < nseeds; i++)
		run_target(seeds[i].bytes, seeds[i].len);
	run_mutations(mutations);
	printf("%zu seeds, %llu mutations\n", nseeds, (unsigned long long)mutations);
	for (size_t i = 0; i < nseeds; i++)
		free(seeds[i].bytes);
	free(seeds);
	return 0;
}
