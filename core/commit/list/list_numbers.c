/* SPDX-License-Identifier: Apache-2.0
 *
 * list_numbers: gaps. A list has none unless files were lost or forged, and a single file at a distance can make one of
 * 2^60 numbers. So after LIST_MISSING_MAX entries that are missing or damaged the run's directory is read, once each
 * time that the list is: from then on reading goes from one number that is there to the next, and costs what the files
 * cost.
 *
 * The directory never says that an entry exists, nor alone where the list ends: a listing may be older than a look at
 * one file. It says over which numbers to pass, and of a short list where a look shows the end (list_end). Numbers that
 * accept entries name are among those that are visited: they are skipped, but not as damage. An accept entry names only
 * numbers below its own, so those that matter for what is ahead were known when reading began. */
#include "core/commit/list/list_internal.h"

#include <stdio.h>

#include "core/base/array.h"
#include "core/base/bisect.h"

#define NUMBER_DIGITS 12u
#define NUMBER_DIGITS_MAX 19u
#define LIST_NEAR (UINT64_C(1) << 21) /* twice as far as looks behind a gap go; in less, numbers can be looked at */

static int number_add(struct list_numbers *x, uint64_t n)
{
	if (base_array_room(x->all, x->size, x->n + 1) < 0)
		return -ENOMEM;
	x->all[x->n++] = n;
	return 0;
}

static int number_listed(void *arg, const struct storage_entry *entry)
{
	const char *name = strrchr(entry->name, '/');
	struct commit_list *l = arg;
	char canonical[STORAGE_NAME_MAX];
	size_t digits;
	uint64_t n;

	digits = name ? strspn(++name, "0123456789") : 0;
	if (digits < NUMBER_DIGITS || digits > NUMBER_DIGITS_MAX || name[digits])
		return 0;
	n = strtoull(name, NULL, 10);
	list_entry_name(l, n, canonical);
	return strcmp(canonical, entry->name) == 0 ? number_add(&l->numbers, n) : 0;
}

int list_number_order(const void *a, const void *b)
{
	uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

	return (x > y) - (x < y);
}

int list_numbers_read(struct commit_list *l, struct base_error *err)
{
	struct list_numbers *x = &l->numbers;
	char dir[STORAGE_NAME_MAX];
	int r;

	if (x->read)
		return 0;
	snprintf(dir, sizeof dir, "runs/%s", l->run);
	do { /* a listing that failed half-way is worth nothing */
		x->n = 0;
		/* names alone, and none of manifests */
		r = storage_list_dirs(l->store->storage, dir, number_listed, l);
	} while (list_again(l, l->next, r));
	for (size_t i = 0; r == 0 && i < l->naccepts; i++)
		r = number_add(x, l->accepts[i]);
	if (r < 0) {
		list_numbers_release(l);
		return list_unreadable(l, r, err);
	}
	if (x->n)
		qsort(x->all, x->n, sizeof *x->all, list_number_order);
	x->read = true;
	return 0;
}

void list_numbers_release(struct commit_list *l)
{
	free(l->numbers.all);
	l->numbers = (struct list_numbers){0};
}

static size_t number_place(const struct list_numbers *x, uint64_t n)
{
	return base_bisect(i, 0, x->n, x->all[i] < n);
}

bool list_number_there(const struct commit_list *l, uint64_t n)
{
	const struct list_numbers *x = &l->numbers;
	size_t at = number_place(x, n);

	return at < x->n && x->all[at] == n;
}

int list_gap_pass(struct commit_list *l, uint64_t end, struct base_error *err)
{
	uint64_t to = end;
	size_t at;
	int r;

	if (l->missing < LIST_MISSING_MAX)
		return 0;
	l->missing = 0;
	r = list_numbers_read(l, err);
	if (r < 0)
		return r;
	if (!list_number_there(l, end - 1) && end - l->next <= LIST_NEAR)
		return 0; /* looks have found that one: the listing is an old one, and may lack others */
	at = number_place(&l->numbers, l->next);
	if (at < l->numbers.n)
		to = base_min(l->numbers.all[at], end);
	if (to == l->next)
		return 0;
	if (list_skip_add(l, l->next, to - l->next, NULL) < 0)
		return base_no_memory_for(err, "run %s", l->run);
	l->next = to;
	return 0;
}

int list_next_listed(struct commit_list *l, struct base_error *err)
{
	int r;

	if (l->missing < LIST_MISSING_MAX)
		return 0;
	l->missing = 0;
	r = list_numbers_read(l, err);
	if (r < 0 || list_number_there(l, l->next))
		return r;
	return base_error_set(err, -EIO, "run %s: a look at entry %llu of its list finds something that the directory "
		"does not list", l->run, (unsigned long long)l->next);
}

int list_number_listed(struct commit_list *l, struct base_error *err)
{
	int r = list_numbers_read(l, err);

	return r < 0 ? r : list_number_there(l, l->next);
}

uint32_t list_numbers_run(const struct commit_list *l, uint32_t most)
{
	const struct list_numbers *x = &l->numbers;
	uint32_t n = 1;
	size_t at;

	if (!x->read)
		return most;
	at = number_place(x, l->next + 1);
	while (n < most && at < x->n && x->all[at] <= l->next + n)
		n += x->all[at++] == l->next + n;
	return n;
}

int list_snapshot_before(struct commit_list *l, uint64_t n, unsigned missing, uint64_t *ret_n, struct base_error *err)
{
	size_t at;
	int r;

	*ret_n = n - COMMIT_SNAPSHOT_EVERY;
	if (missing < LIST_MISSING_MAX)
		return 0;
	r = list_numbers_read(l, err);
	if (r < 0)
		return r;
	at = number_place(&l->numbers, n);
	while (at > 0 && l->numbers.all[at - 1] % COMMIT_SNAPSHOT_EVERY)
		at--;
	*ret_n = at > 0 ? l->numbers.all[at - 1] : 0;
	return 0;
}

int commit_list_unlisted_next(struct commit_list *l, uint64_t end, uint64_t *at, uint64_t *ret_first,
	uint64_t *ret_count,
	struct base_error *err)
{
	const struct list_numbers *x = &l->numbers;
	int r = list_numbers_read(l, err);
	size_t i;

	if (r < 0)
		return r;
	for (i = number_place(x, *at); i < x->n && x->all[i] <= *at; i++)
		*at += x->all[i] == *at;
	*ret_first = *at;
	*ret_count = *at < end ? (i < x->n ? base_min(x->all[i], end) : end) - *at : 0;
	*at += *ret_count;
	if (!*ret_count)
		list_numbers_release(l);
	return *ret_count > 0;
}
