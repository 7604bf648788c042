/* SPDX-License-Identifier: Apache-2.0
 *
 * standin: a libcuda.so.1 made of host memory and threads, which behaves as badly as the real driver may and says what
 * its user did wrong. These functions are for tests, which play the training program with them; the driver's own
 * functions (driver.c) have the names and types of CUDA's driver API.
 *
 * Each stream is a queue with a thread, which waits for a random time before each piece of work. Order is not judged by
 * what happened to come first but by what was promised: streams, events and the host carry vector clocks (order.c), so
 * that a missing wait is counted in every run. Any thread may call anything. */
#ifndef TESTS_STANDIN_H
#define TESTS_STANDIN_H

#include <stddef.h>
#include <stdint.h>

struct standin_context;
struct standin_stream;

/* ---- the program's part ---- */
struct standin_context *standin_context_new(void);           /* on device 0, not its primary one */
void standin_context_destroy(struct standin_context *c);     /* calls into it answer CUDA_ERROR_CONTEXT_IS_DESTROYED */
void standin_context_set(struct standin_context *c);         /* the calling thread's current one; NULL: none */
unsigned standin_context_depth(void);                        /* what the calling thread has pushed and not popped */
/* Device memory, zeroed, of the current context; without one it is device 0's alone, as mapped memory is. */
void *standin_memory_new(size_t bytes);
void *standin_memory_on(int device, size_t bytes);           /* of that device alone, too */
/* A kernel: `bytes` (copied now) are written to device memory after at least delay_us, in the order of the stream
 * (NULL: the default stream of the current context). 0, or -1: not device memory. */
int standin_write(struct standin_stream *s, void *to, const void *bytes, size_t n, unsigned delay_us);

/* ---- the test's part ---- */
/* How often since the last reset:
 *   premature   a copy is not ordered after a write to its source, or to the device memory that it writes, that was
 *               queued before it
 *   reused      a copy uses host memory that an earlier copy may still be filling, as far as the host can know, or
 *               fills memory that an earlier copy may still be reading
 *   touched     host memory changed while a copy was using it, or before the host waited for that copy
 *   context     a call with another context current than the stream's or event's, or with none
 *   destroyed   a stream, event or context is used after it was destroyed
 *   foreign     a copy reads what is no device memory; a handle that never was; memory unregistered that was not
 *   captured    a call that invalidated a stream capture, or waited for what a graph has taken
 *   calls, copies, copies_2d, copies_3d, bytes, pageable (copies of host memory that is neither registered nor
 *   allocated here): no faults, just counted
 * Of what there is now: streams, events, registrations, allocations, primaries (retained and not
 * released). UINT64_MAX: no such word. */
uint64_t standin_count(const char *what);
uint64_t standin_faults(void);                               /* the sum of the seven */
int standin_busy(const void *memory, size_t bytes);          /* 1: a copy into it is not known to be done */
/* The nth call (1: the next) of a function answers `code` and does nothing. Of the function "copy": the nth copy to be
 * executed fails, and so does every later call in its context. */
void standin_fail(const char *function, unsigned nth, int code);
/* Calls of cuStreamWaitEvent or cuEventSynchronize do nothing until the next reset, as if they had been left out. */
void standin_forget(const char *function);
void standin_delay(unsigned most_us, uint64_t seed);         /* before each piece of work; 0: none */
void standin_slow(const char *function, unsigned us);        /* the next call of it takes so long */
void standin_devices(int n);                                 /* what cuDeviceGetCount answers; < 0: cuInit finds none */
void standin_reset(void); /* waits for all streams, forgets everything; contexts and device memory are gone */

#endif
