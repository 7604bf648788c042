/* SPDX-License-Identifier: Apache-2.0
 *
 * control: what tests call (standin.h), the memory that the stand-in knows, and each thread's stack of contexts. */
#include "internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define CONTROL_STACK 64
#define CONTROL_FAILURES 16
#define CONTROL_DEVICES 8

struct control_range {
	struct control_range *next;
	char *at;
	size_t bytes;
	bool allocated;                  /* host memory: by the driver */
	struct standin_context *context; /* device memory: NULL: of the device alone */
	int device;
};
struct control_failure { char function[48]; unsigned nth; int code; };

pthread_mutex_t standin_lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t standin_changed = PTHREAD_COND_INITIALIZER;
uint64_t standin_counts[STANDIN_COUNTS];
unsigned standin_delay_us;
static uint64_t control_seed = 1;
static int control_devices = 1;
static struct standin_context *control_contexts, *control_primary[CONTROL_DEVICES];
static struct control_range *control_device, *control_host;
static struct control_failure control_failures[CONTROL_FAILURES];
static struct { char function[48]; unsigned us; } control_slow;
static char control_forgotten[CONTROL_FAILURES][48];
static __thread struct standin_context *control_stack[CONTROL_STACK];
static __thread unsigned control_depth, control_set;

static const char *const control_words[STANDIN_COUNTS] = {
	[STANDIN_PREMATURE] = "premature", [STANDIN_REUSED] = "reused", [STANDIN_TOUCHED] = "touched",
	[STANDIN_CONTEXT] = "context", [STANDIN_DESTROYED] = "destroyed", [STANDIN_FOREIGN] = "foreign",
	[STANDIN_CAPTURED] = "captured",
	[STANDIN_CALLS] = "calls", [STANDIN_COPIES] = "copies", [STANDIN_COPIES_2D] = "copies_2d",
	[STANDIN_COPIES_3D] = "copies_3d",
	[STANDIN_BYTES] = "bytes", [STANDIN_PAGEABLE] = "pageable",
	[STANDIN_STREAMS] = "streams", [STANDIN_EVENTS] = "events",
	[STANDIN_REGISTRATIONS] = "registrations", [STANDIN_ALLOCATIONS] = "allocations",
	[STANDIN_PRIMARIES] = "primaries",
};

/* ---- contexts ---- */

struct standin_context *standin_context_on(int device)
{
	struct standin_context *c = calloc(1, sizeof *c);

	if (c) {
		c->device = device;
		c->standard = standin_stream_start(c);
		c->next = control_contexts;
		control_contexts = c;
	}
	return c;
}

struct standin_context *standin_context_new(void)
{
	struct standin_context *c;

	pthread_mutex_lock(&standin_lock);
	c = standin_context_on(0);
	pthread_mutex_unlock(&standin_lock);
	return c;
}

struct standin_context *standin_primary(int device)
{
	if (device < 0 || device >= control_devices || device >= CONTROL_DEVICES)
		return NULL;
	if (!control_primary[device])
		control_primary[device] = standin_context_on(device);
	return control_primary[device];
}

void standin_context_destroy(struct standin_context *c)
{
	pthread_mutex_lock(&standin_lock);
	c->destroyed = true;
	c->sticky = CUDA_ERROR_CONTEXT_IS_DESTROYED;
	pthread_mutex_unlock(&standin_lock);
}

struct standin_context *standin_context_list(void)
{
	return control_contexts;
}

/* The program's own context is the bottom of the stack, so that pushes can be told from it. */
void standin_context_set(struct standin_context *c)
{
	control_depth = control_set = c != NULL;
	control_stack[0] = c;
}

unsigned standin_context_depth(void)
{
	return control_depth - control_set;
}

struct standin_context *standin_current(void)
{
	return control_depth ? control_stack[control_depth - 1] : NULL;
}

CUresult standin_push(struct standin_context *c)
{
	if (control_depth == CONTROL_STACK)
		return CUDA_ERROR_OUT_OF_MEMORY;
	control_stack[control_depth++] = c;
	return CUDA_SUCCESS;
}

CUresult standin_pop(struct standin_context **ret_c)
{
	if (control_depth == 0)
		return CUDA_ERROR_INVALID_CONTEXT;
	control_depth--;
	control_set = control_depth < control_set ? control_depth : control_set;
	*ret_c = control_stack[control_depth];
	return CUDA_SUCCESS;
}

/* ---- memory ---- */

static bool control_holds(const struct control_range *list, const struct standin_rows *rows)
{
	size_t bytes = (rows->height - 1) * rows->pitch + rows->width;

	for (; list; list = list->next)
		if (rows->at >= list->at && rows->at - list->at <= list->bytes &&
			bytes <= list->bytes - (rows->at - list->at))
			return true;
	return false;
}

bool standin_memory_holds(const struct standin_rows *rows)
{
	return control_holds(control_device, rows);
}

bool standin_host_registered(const struct standin_rows *rows)
{
	return control_holds(control_host, rows);
}

static bool control_add(struct control_range **list, void *at, size_t bytes)
{
	struct control_range *range = calloc(1, sizeof *range);

	if (range) {
		*range = (struct control_range){.next = *list, .at = at, .bytes = bytes};
		*list = range;
	}
	return range;
}

bool standin_memory_find(const void *at, struct standin_memory *ret_m)
{
	for (struct control_range *range = control_device; range; range = range->next)
		if ((const char *)at >= range->at && (const char *)at < range->at + range->bytes) {
			*ret_m = (struct standin_memory){range->at, range->bytes, range->context, range->device};
			return true;
		}
	return false;
}

static void *control_memory(size_t bytes, struct standin_context *context, int device)
{
	void *memory = calloc(1, bytes ? bytes : 1);

	pthread_mutex_lock(&standin_lock);
	if (memory && !control_add(&control_device, memory, bytes)) {
		free(memory);
		memory = NULL;
	}
	if (memory) {
		control_device->context = context;
		control_device->device = device;
	}
	pthread_mutex_unlock(&standin_lock);
	return memory;
}

void *standin_memory_new(size_t bytes)
{
	struct standin_context *c = standin_current();

	return control_memory(bytes, c, c ? c->device : 0);
}

void *standin_memory_on(int device, size_t bytes) { return control_memory(bytes, NULL, device); }

CUresult standin_host_add(void *memory, size_t bytes)
{
	char *at = memory;

	for (struct control_range *range = control_host; range; range = range->next)
		if (at < range->at + range->bytes && range->at < at + bytes)
			return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
	if (!memory || !bytes)
		return CUDA_ERROR_INVALID_VALUE;
	if (!control_add(&control_host, memory, bytes))
		return CUDA_ERROR_OUT_OF_MEMORY;
	standin_counts[STANDIN_REGISTRATIONS]++;
	return CUDA_SUCCESS;
}

/* The memory is not freed here. */
static CUresult control_remove(void *memory, bool allocated)
{
	for (struct control_range **at = &control_host, *range; (range = *at); at = &range->next)
		if (range->at == memory && range->allocated == allocated) {
			*at = range->next;
			free(range);
			standin_counts[allocated ? STANDIN_ALLOCATIONS : STANDIN_REGISTRATIONS]--;
			return CUDA_SUCCESS;
		}
	standin_counts[STANDIN_FOREIGN]++;
	return CUDA_ERROR_INVALID_VALUE;
}

CUresult standin_host_remove(void *memory)
{
	CUresult r = control_remove(memory, false);

	return r ? CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED : r;
}

CUresult standin_host_alloc(void **ret_memory, size_t bytes)
{
	void *memory = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);

	if (!memory || !control_add(&control_host, memory, bytes)) {
		free(memory);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	control_host->allocated = true;
	standin_counts[STANDIN_ALLOCATIONS]++;
	*ret_memory = memory;
	return CUDA_SUCCESS;
}

CUresult standin_host_free(void *memory)
{
	CUresult r = control_remove(memory, true);

	if (r == CUDA_SUCCESS)
		free(memory);
	return r;
}

/* ---- what tests ask and say ---- */

uint64_t standin_count(const char *what)
{
	uint64_t n = UINT64_MAX;

	pthread_mutex_lock(&standin_lock);
	for (unsigned i = 0; i < STANDIN_COUNTS; i++)
		if (strcmp(what, control_words[i]) == 0)
			n = standin_counts[i];
	pthread_mutex_unlock(&standin_lock);
	return n;
}

uint64_t standin_faults(void)
{
	uint64_t n = 0;

	pthread_mutex_lock(&standin_lock);
	for (unsigned i = 0; i < STANDIN_FAULTS; i++)
		n += standin_counts[i];
	pthread_mutex_unlock(&standin_lock);
	return n;
}

int standin_busy(const void *memory, size_t bytes)
{
	struct standin_rows rows = {(char *)memory, bytes, 1, bytes};
	bool busy;

	if (bytes == 0)
		return 0;
	pthread_mutex_lock(&standin_lock);
	busy = standin_order_busy(&rows);
	pthread_mutex_unlock(&standin_lock);
	return busy;
}

void standin_fail(const char *function, unsigned nth, int code)
{
	pthread_mutex_lock(&standin_lock);
	for (unsigned i = 0; i < CONTROL_FAILURES; i++)
		if (control_failures[i].nth == 0) {
			snprintf(control_failures[i].function, sizeof control_failures[i].function, "%s", function);
			control_failures[i].nth = nth;
			control_failures[i].code = code;
			break;
		}
	pthread_mutex_unlock(&standin_lock);
}

static int control_failing(const char *function)
{
	for (unsigned i = 0; i < CONTROL_FAILURES; i++)
		if (control_failures[i].nth > 0 && strcmp(control_failures[i].function, function) == 0 &&
		    --control_failures[i].nth == 0)
			return control_failures[i].code;
	return 0;
}

bool standin_copy_fails(int *ret_code)
{
	return (*ret_code = control_failing("copy")) != 0;
}

void standin_slow(const char *function, unsigned us)
{
	pthread_mutex_lock(&standin_lock);
	snprintf(control_slow.function, sizeof control_slow.function, "%s", function);
	control_slow.us = us;
	pthread_mutex_unlock(&standin_lock);
}

static void control_wait(const char *function)
{
	struct timespec t = {control_slow.us / 1000000, control_slow.us % 1000000 * 1000L};

	if (!control_slow.us || strcmp(control_slow.function, function) != 0)
		return;
	control_slow.us = 0;
	nanosleep(&t, NULL);
}

CUresult standin_called(const char *function)
{
	standin_counts[STANDIN_CALLS]++;
	control_wait(function);
	return (CUresult)control_failing(function);
}

void standin_forget(const char *function)
{
	pthread_mutex_lock(&standin_lock);
	for (unsigned i = 0; i < CONTROL_FAILURES; i++)
		if (!control_forgotten[i][0]) {
			snprintf(control_forgotten[i], sizeof control_forgotten[i], "%s", function);
			break;
		}
	pthread_mutex_unlock(&standin_lock);
}

bool standin_forgotten(const char *function)
{
	bool found = false;

	for (unsigned i = 0; i < CONTROL_FAILURES; i++)
		found |= strcmp(control_forgotten[i], function) == 0;
	return found;
}

void standin_delay(unsigned most_us, uint64_t seed)
{
	pthread_mutex_lock(&standin_lock);
	standin_delay_us = most_us;
	control_seed = seed ? seed : 1;
	pthread_mutex_unlock(&standin_lock);
}

uint64_t standin_random(void)
{
	control_seed ^= control_seed << 13;
	control_seed ^= control_seed >> 7;
	control_seed ^= control_seed << 17;
	return control_seed;
}

void standin_devices(int n)
{
	pthread_mutex_lock(&standin_lock);
	control_devices = n;
	pthread_mutex_unlock(&standin_lock);
}

int standin_device_count(void)
{
	return control_devices;
}

static void control_free_ranges(struct control_range **list, bool memory)
{
	for (struct control_range *range; (range = *list); free(range)) {
		*list = range->next;
		if (memory || range->allocated)
			free(range->at);
	}
}

void standin_reset(void)
{
	standin_context_set(NULL);
	pthread_mutex_lock(&standin_lock);
	standin_streams_reset();
	standin_order_reset();
	standin_events_reset();
	for (struct standin_context *c; (c = control_contexts); free(c))
		control_contexts = c->next;
	memset(control_primary, 0, sizeof control_primary);
	control_free_ranges(&control_device, true);
	control_free_ranges(&control_host, false);
	memset(standin_counts, 0, sizeof standin_counts);
	memset(control_failures, 0, sizeof control_failures);
	memset(control_forgotten, 0, sizeof control_forgotten);
	standin_delay_us = 0;
	control_slow.us = 0;
	control_devices = 1;
	pthread_mutex_unlock(&standin_lock);
}
