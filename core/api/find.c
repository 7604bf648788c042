/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>

#include "core/api/api_internal.h"
#include "core/base/clock.h"
#include "core/find/find.h"

/* The steps, and behind them the names of their runs. */
static int copy(const struct find *f, struct vckpt_found **ret_found, struct base_error *err)
{
	const size_t n = find_count(f);
	size_t bytes = 0;
	struct vckpt_found *found;
	char *names;

	for (size_t i = 0; i < n; i++)
		bytes += strlen(find_at(f, i)->run) + 1;
	found = malloc(n * sizeof *found + bytes + 1);
	if (!found)
		return base_no_memory(err);
	names = (char *)(found + n);
	for (size_t i = 0; i < n; i++) {
		const struct find_step *step = find_at(f, i);

		found[i] = (struct vckpt_found){names, step->step->step};
		names = stpcpy(names, step->run) + 1;
	}
	*ret_found = found;
	return 0;
}

int vckpt_find(const char *store, const char *expression, uint64_t limit, struct vckpt_found **ret_found, size_t *ret_n,
	struct vckpt_error *err)
{
	const struct find_options o = {.expression = expression, .limit = limit, .now_ns = base_realtime_ns()};
	struct base_error *e = api_error(err);
	struct store *s = NULL;
	struct find *f = NULL;
	int r = api_given(expression, "expression", e);

	if (r == 0)
		r = api_store_open(store, STORE_OPEN_READ_ONLY, &s, e);
	if (r == 0)
		r = find_open(s, &o, &f, e);
	if (r == 0)
		r = copy(f, ret_found, e);
	if (r == 0)
		*ret_n = find_count(f);
	find_close(f);
	store_close(s);
	return api_result(r, e);
}
