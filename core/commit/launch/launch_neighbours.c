/* SPDX-License-Identifier: Apache-2.0
 *
 * launch_neighbours: how many ranks of a launch run on this machine, as their heartbeats say: those whose file names
 * this host are read for the boot id. A file that gave way to the next one is listed once more. */
#include "core/commit/launch/launch_work.h"

#define LIST_TRIES 3u

struct neighbours { struct store *store; uint32_t world; bool *here; bool missed; };

static void neighbours_found(void *arg, uint32_t rank, uint64_t number, const char *host, const char *file)
{
	struct neighbours *n = arg;
	struct store_heartbeat_rank who;

	(void)number;
	if (rank >= n->world || n->here[rank] || !store_heartbeat_may_be_here(host))
		return;
	if (store_heartbeat_look(n->store, file, &who) < 0)
		n->missed = true;
	else
		n->here[rank] = who.here;
}

uint32_t store_launch_neighbours(const struct store_launch *l)
{
	struct neighbours n = {.store = l->store, .world = l->world, .here = calloc(l->world, sizeof *n.here),
		.missed = true};
	uint32_t count = 0;

	if (!n.here || store_launch_check(l, NULL) < 0) {
		free(n.here);
		return 1;
	}
	n.here[l->rank] = true;
	for (unsigned i = 0; i < LIST_TRIES && n.missed; i++) {
		n.missed = false;
		if (store_heartbeat_each(l->store, l->name, neighbours_found, &n) < 0)
			break;
	}
	for (uint32_t i = 0; i < l->world; i++)
		count += n.here[i];
	free(n.here);
	return count;
}
