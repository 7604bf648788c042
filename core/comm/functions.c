/* SPDX-License-Identifier: Apache-2.0
 *
 * functions: hands a communicator's calls to the caller's functions, and makes sentences of what these return. */
#include <stdlib.h>

#include "core/comm/functions.h"

struct comm_by_functions { struct comm comm; struct comm_functions f; };

static struct comm_functions *functions_of(struct comm *c) { return &((struct comm_by_functions *)c)->f; }

static int functions_said(const char *which, int r, struct base_error *err)
{
	if (r == 0)
		return 0;
	if (r > 0 || r < -4095)
		return base_error_set(err, -EIO, "the caller's function \"%s\" returned %d, which is no negative errno",
			which, r);
	return base_error_set(err, r, "the caller's function \"%s\" failed: %s", which, base_error_name(r));
}

static int functions_gather(struct comm *c, const void *mine, const uint64_t *lens, uint8_t *ret_all,
	struct base_error *err)
{
	struct comm_functions *f = functions_of(c);

	return functions_said("gather", f->gather(f->arg, mine, lens, ret_all, c->timeout_ms), err);
}

static int functions_start(struct comm *c, struct comm_pass *p, struct base_error *err)
{
	struct comm_functions *f = functions_of(c);

	return functions_said("start", f->start(f->arg, p, &p->request), err);
}

static int functions_finish(struct comm *c, struct comm_pass *p, struct base_error *err)
{
	struct comm_functions *f = functions_of(c);

	return functions_said("finish", f->finish(f->arg, p, p->request, c->timeout_ms), err);
}

static void functions_abort(struct comm *c, const char *why)
{
	struct comm_functions *f = functions_of(c);

	if (f->abort)
		f->abort(f->arg, why);
}

static void functions_free(struct comm *c)
{
	struct comm_functions *f = functions_of(c);

	if (f->free)
		f->free(f->arg);
	comm_release(c);
	free(c);
}

static const struct comm_ops functions_ops = {.gather = functions_gather, .start = functions_start,
	.finish = functions_finish, .abort = functions_abort, .free = functions_free};

int comm_functions_new(const struct comm_functions *f, uint32_t rank, uint32_t size, uint32_t timeout_ms,
	struct comm **ret_comm, struct base_error *err)
{
	struct comm_by_functions *own;
	int r;

	if (f->size != sizeof *f || !f->gather || !f->start || !f->finish)
		return base_error_set(err, -EINVAL, "a function of the communicator is missing, or the size is not "
			"that of the struct");
	own = calloc(1, sizeof *own);
	if (!own)
		return base_no_memory(err);
	own->f = *f;
	r = comm_init(&own->comm, &functions_ops, rank, size, timeout_ms, err);
	if (r < 0)
		free(own);
	else
		*ret_comm = &own->comm;
	return r;
}
