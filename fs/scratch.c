/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>

#include "fs/scratch.h"

#define KEPT_BYTES (1u << 20) /* the kernel's largest read, unless its limit was raised */
#define PAGE_BYTES 4096u

void fs_scratch_init(struct fs_scratch *s)
{
	*s = (struct fs_scratch){0};
	pthread_mutex_init(&s->lock, NULL);
}

void fs_scratch_release(struct fs_scratch *s)
{
	fs_scratch_shrink(s);
	pthread_mutex_destroy(&s->lock);
}

/* An idle buffer begins with a pointer to the next one. */
static void *pop(struct fs_scratch *s)
{
	void *bytes = s->idle;

	if (bytes)
		s->idle = *(void **)bytes;
	return bytes;
}

void *fs_scratch_take(struct fs_scratch *s, size_t len)
{
	void *bytes;

	if (len > KEPT_BYTES)
		return malloc(len);
	pthread_mutex_lock(&s->lock);
	bytes = pop(s);
	pthread_mutex_unlock(&s->lock);
	return bytes ? bytes : aligned_alloc(PAGE_BYTES, KEPT_BYTES);
}

void fs_scratch_give(struct fs_scratch *s, void *bytes, size_t len)
{
	if (!bytes)
		return;
	if (len > KEPT_BYTES) {
		free(bytes);
		return;
	}
	pthread_mutex_lock(&s->lock);
	*(void **)bytes = s->idle;
	s->idle = bytes;
	pthread_mutex_unlock(&s->lock);
}

void fs_scratch_shrink(struct fs_scratch *s)
{
	pthread_mutex_lock(&s->lock);
	for (void *bytes; (bytes = pop(s)) != NULL;)
		free(bytes);
	pthread_mutex_unlock(&s->lock);
}
