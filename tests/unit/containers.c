/* SPDX-License-Identifier: Apache-2.0
 *
 * containers SEED COUNT: arrays and tables of core/base, which are macros and inline code, against the plainest way to
 * do the same. Each allocation fails once before it works: nothing may have changed then. Also errors and
 * clocks. Prints "sound". */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/base/array.h"
#include "core/base/clock.h"
#include "core/base/error.h"
#include "core/base/le.h"
#include "core/base/table.h"

#define CHECK(x) do { if (!(x)) { fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #x); exit(1); } } while (0)

extern void *__libc_calloc(size_t n, size_t size);
extern void *__libc_realloc(void *p, size_t n);

static bool fail; /* the next allocation fails */

static bool fails(void)
{
	bool now = fail;

	fail = false;
	return now;
}

void *calloc(size_t n, size_t size) { return fails() ? NULL : __libc_calloc(n, size); }
void *reallocarray(void *p, size_t n, size_t size)
{
	return (size && n > SIZE_MAX / size) || fails() ? NULL : __libc_realloc(p, n * size);
}

static uint64_t state;

static uint64_t next(uint64_t below)
{
	state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
	return (state >> 33) % below;
}

static void arrays(size_t count)
{
	uint64_t *a = NULL, *b = NULL, *held;
	uint16_t room = 0; /* ends at 65,535 items */
	size_t n = 0, big = 0;

	CHECK(base_array_room(a, room, 0) == 0 && !a && room == 0);
	for (n = 0; n < count; n++) {
		size_t more = n + 1 + next(3);
		uint16_t before = room;

		held = a;
		fail = more > room;
		if (more > UINT16_MAX) {
			CHECK(base_array_room(a, room, more) == -ENOMEM && a == held && room == before);
			fail = false;
			break;
		}
		CHECK(base_array_room(a, room, more) == (more > before ? -ENOMEM : 0) && a == held && room == before);
		CHECK(base_array_room(a, room, more) == 0 && room >= more);
		CHECK(room == before || room == UINT16_MAX || room >= 2 * before);
		held = b;
		fail = (n & (n - 1)) == 0;
		if (fail)
			CHECK(base_array_more(b, n) == -ENOMEM && b == held);
		CHECK(base_array_more(b, n) == 0 && !fail);
		a[n] = b[n] = n * n;
	}
	for (size_t i = 0; i < n; i++)
		CHECK(a[i] == i * i && b[i] == i * i);
	CHECK(!base_array_grow(NULL, &big, SIZE_MAX / 8 + 1, 8, SIZE_MAX) && big == 0);
	held = a;
	big = room;
	CHECK(base_array_room(a, big, SIZE_MAX) == -ENOMEM && a == held && big == room);
	free(a);
	free(b);
}

static uint32_t found(const struct base_table *t, const uint64_t *keys, uint64_t key, uint32_t hash)
{
	size_t at = 0;
	uint32_t i;

	while ((i = base_table_next(t, hash, &at)) != BASE_TABLE_NONE)
		if (keys[i] == key)
			return i;
	return BASE_TABLE_NONE;
}

/* `hashes` different ones: 1 puts every key into one slot. */
static void table(size_t count, uint64_t hashes)
{
	uint64_t keys[4096] = {0};
	uint32_t where[8192], n = 0; /* by key: its number, or none */
	struct base_table t = {0};

	CHECK(found(&t, keys, 7, 7) == BASE_TABLE_NONE);
	for (size_t i = 0; i < BASE_COUNT(where); i++)
		where[i] = BASE_TABLE_NONE;
	for (size_t i = 0; i < count; i++) {
		uint64_t key = next(BASE_COUNT(where));
		uint32_t hash = base_table_hash_number(hashes ? key % hashes : key);
		size_t before = t.nslots;

		CHECK(found(&t, keys, key, hash) == where[key]);
		if (where[key] != BASE_TABLE_NONE || n == BASE_COUNT(keys))
			continue;
		fail = true;
		if (base_table_reserve(&t, 1) < 0) {
			CHECK(t.nslots == before && t.n == n && !fail);
			CHECK(base_table_reserve(&t, 1) == 0);
		}
		fail = false;
		keys[n] = key;
		base_table_add(&t, hash, n);
		where[key] = n++;
		CHECK(t.n == n && t.n <= t.nslots / 4 * 3);
	}
	for (uint64_t key = 0; key < BASE_COUNT(where); key++)
		CHECK(found(&t, keys, key, base_table_hash_number(hashes ? key % hashes : key)) == where[key]);
	CHECK(base_table_reserve(&t, UINT32_MAX) == -ENOMEM && t.n == n);
	base_table_clear(&t);
	CHECK(t.n == 0 && t.nslots && found(&t, keys, keys[0], base_table_hash_number(keys[0])) == BASE_TABLE_NONE);
	base_table_release(&t);
	CHECK(!t.slots && !t.nslots);
}

static void errors(void)
{
	struct base_error err = {0};

	CHECK(base_no_memory(NULL) == -ENOMEM && base_no_memory_for(NULL, "x") == -ENOMEM);
	CHECK(base_no_memory(&err) == -ENOMEM && err.code == -ENOMEM && !strcmp(err.text, "out of memory"));
	CHECK(base_no_memory_for(&err, "run %s", "a") == -ENOMEM && !strcmp(err.text, "run a: out of memory"));
}

static int64_t ahead_ns(clockid_t clock, int64_t ms)
{
	struct timespec t = base_clock_in_ms(clock, ms), now;

	CHECK(t.tv_nsec >= 0 && t.tv_nsec < 1000000000);
	clock_gettime(clock, &now);
	return ((int64_t)t.tv_sec - now.tv_sec) * 1000000000 + t.tv_nsec - now.tv_nsec;
}

static void clocks(void)
{
	static const int64_t waits_ms[] = {0, 1, 999, 1000, 1001, 86400999};

	for (size_t i = 0; i < sizeof waits_ms / sizeof *waits_ms; i++) {
		int64_t early_ns = waits_ms[i] * 1000000 - ahead_ns(CLOCK_MONOTONIC, waits_ms[i]);

		/* What passed between two looks at the clock. */
		CHECK(early_ns >= 0 && early_ns < INT64_C(60000000000));
	}
	CHECK(ahead_ns(CLOCK_REALTIME, 3600000) > INT64_C(1800000000000));
	CHECK(ahead_ns(CLOCK_MONOTONIC, -5) <= 0 && ahead_ns(CLOCK_MONOTONIC, INT64_MIN) <= 0);
	CHECK(ahead_ns(CLOCK_MONOTONIC, INT64_MAX) > INT64_C(2000000000000000000));
}

int main(int argc, char **argv)
{
	size_t count = argc == 3 ? strtoul(argv[2], NULL, 10) : 0;

	if (!count)
		return 2;
	state = strtoul(argv[1], NULL, 10);
	arrays(count);
	table(count, 0);
	table(count, 100);
	table(count / 8, 1);
	errors();
	clocks();
	puts("sound");
	return 0;
}
