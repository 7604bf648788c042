/* SPDX-License-Identifier: Apache-2.0
 *
 * looping: a library for LD_PRELOAD that takes the place of a decoder which never ends with what
 * is at least VCKPT_LOOPING bytes long: 16384 are the whole blocks of tensors, 1 the tables of a small step as well. */
#include <dlfcn.h>
#include <stdlib.h>
#include <time.h>

int LZ4_decompress_safe(const char *from, char *to, int size, int room);
int LZ4_decompress_safe(const char *from, char *to, int size, int room)
{
	static int (*decode)(const char *, char *, int, int);

	const char *least = getenv("VCKPT_LOOPING");

	while (least && room >= atoi(least))
		nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
	if (!decode)
		*(void **)&decode = dlsym(RTLD_NEXT, "LZ4_decompress_safe");
	return decode(from, to, size, room);
}
