/* SPDX-License-Identifier: Apache-2.0
 *
 * keeper_broker FD: the keeper's half of fs/broker.h alone: answers what comes on that descriptor until it is
 * closed. */
#include <poll.h>
#include <stdlib.h>
#include <unistd.h>

#include "fs/broker.h"

int main(int argc, char **argv)
{
	struct pollfd p = {.fd = argc > 1 ? atoi(argv[1]) : 0, .events = POLLIN};

	do
		poll(&p, 1, -1);
	while (fs_broker_serve(p.fd));
	close(p.fd);  /* as the keeper does, which goes on with what it has */
	return 0;
}
