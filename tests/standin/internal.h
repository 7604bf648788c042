/* SPDX-License-Identifier: Apache-2.0
 *
 * standin: what its files share. One lock protects everything; work itself runs without it. Streams, events and
 * contexts are kept after they are destroyed, so that a later use is told apart from a wrong pointer; reset frees
 * them. Types and numbers are written down here once more, from NVIDIA's documentation, so that a mistake in the code
 * under test is not repeated. */
#ifndef TESTS_STANDIN_INTERNAL_H
#define TESTS_STANDIN_INTERNAL_H

#include <pthread.h>
#include <stdbool.h>

#include "standin.h"

typedef enum {
	CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1, CUDA_ERROR_OUT_OF_MEMORY = 2, CUDA_ERROR_NOT_INITIALIZED = 3,
	CUDA_ERROR_NO_DEVICE = 100, CUDA_ERROR_INVALID_CONTEXT = 201, CUDA_ERROR_INVALID_HANDLE = 400,
	CUDA_ERROR_NOT_READY = 600,
	CUDA_ERROR_ILLEGAL_ADDRESS = 700, CUDA_ERROR_CONTEXT_IS_DESTROYED = 709,
	CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED = 713,
	CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED = 901,
	CUDA_ERROR_STREAM_CAPTURE_UNMATCHED = 903, CUDA_ERROR_STREAM_CAPTURE_ISOLATION = 905,
	CUDA_ERROR_STREAM_CAPTURE_IMPLICIT = 906, CUDA_ERROR_CAPTURED_EVENT = 907,
	CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD = 908,
} CUresult;
typedef struct standin_context *CUcontext;
typedef struct standin_stream *CUstream;
typedef struct standin_event *CUevent;
typedef unsigned long long CUdeviceptr;
typedef enum { CU_MEMORYTYPE_HOST = 1, CU_MEMORYTYPE_DEVICE = 2 } CUmemorytype;

enum standin_fault {
	STANDIN_PREMATURE, STANDIN_REUSED, STANDIN_TOUCHED, STANDIN_CONTEXT, STANDIN_DESTROYED, STANDIN_FOREIGN,
	STANDIN_CAPTURED, STANDIN_FAULTS,
	STANDIN_CALLS = STANDIN_FAULTS, STANDIN_COPIES, STANDIN_COPIES_2D, STANDIN_COPIES_3D, STANDIN_BYTES,
	STANDIN_PAGEABLE, STANDIN_STREAMS, STANDIN_EVENTS, STANDIN_REGISTRATIONS, STANDIN_ALLOCATIONS,
	STANDIN_PRIMARIES, STANDIN_COUNTS
};

#define STANDIN_CLOCKS 256               /* streams at one time */
struct standin_clock { uint64_t at[STANDIN_CLOCKS]; }; /* by a stream's number: its work up to here came before */

struct standin_context {
	struct standin_context *next;
	int device;
	bool destroyed;
	int sticky;                      /* the error that every call in it answers */
	struct standin_stream *standard; /* its default stream */
};

struct standin_event {
	struct standin_event *next;
	struct standin_context *context;
	bool destroyed, captured;        /* the newest record is a graph's */
	uint64_t recorded, done;         /* the nth time */
	struct standin_clock clock;      /* of the newest record */
};

struct standin_rows { char *at; size_t width, height, pitch; }; /* rows that do not overlap; pitch >= width */

/* A copy until the host knows that it is done. */
struct standin_flight {
	struct standin_flight *next;
	bool out;                        /* to the device: `host` is read */
	struct standin_rows host;
	unsigned stream;
	uint64_t tick, hash;
	bool patterned, executed;
	bool shared;                     /* reused was counted: other bytes are no news */
};

enum standin_kind { STANDIN_COPY, STANDIN_WRITE, STANDIN_RECORD, STANDIN_WAIT, STANDIN_CALL };
struct standin_work {
	struct standin_work *next;
	enum standin_kind kind;
	struct standin_rows to, device;
	struct standin_flight *flight;
	struct standin_event *event;
	uint64_t nth;
	unsigned delay_us;
	void (*call)(void *);
	void *arg;
	char bytes[];
};

enum standin_capture { STANDIN_NO_CAPTURE, STANDIN_CAPTURING, STANDIN_INVALIDATED }; /* CUstreamCaptureStatus */
enum { STANDIN_GLOBAL, STANDIN_THREAD_LOCAL, STANDIN_RELAXED };                      /* CUstreamCaptureMode */
struct standin_stream {
	struct standin_stream *next;
	struct standin_context *context;
	bool destroyed, ended, blocking; /* blocking: with its context's default stream */
	enum standin_capture capture;
	int capture_mode;
	pthread_t capturer;
	unsigned number;
	struct standin_clock clock;      /* what comes before whatever is queued next */
	struct standin_work *first, **last;
	bool working;
};

extern pthread_mutex_t standin_lock;
extern pthread_cond_t standin_changed;
extern uint64_t standin_counts[STANDIN_COUNTS];
extern unsigned standin_delay_us;

/* All below: called with the lock held, but where it says otherwise. */

/* queue.c */
struct standin_stream *standin_stream_start(struct standin_context *c);
void standin_stream_end(struct standin_stream *s);           /* its work is still done */
struct standin_stream *standin_stream_list(void);
void standin_stream_queue(struct standin_stream *s, struct standin_work *w);
void standin_stream_drain(struct standin_stream *s);         /* waits */
void standin_streams_reset(void);                            /* waits, frees */
bool standin_copy_fails(int *ret_code);                      /* control.c: this one is to fail */
uint64_t standin_random(void);

/* order.c */
void standin_order_merge(struct standin_clock *into, const struct standin_clock *from);
void standin_order_write(struct standin_stream *s, const struct standin_rows *to);
/* `device`: what the copy reads there, or writes. */
void standin_order_copy(struct standin_stream *s, const struct standin_rows *device, struct standin_flight *f);
/* Without the lock; false: touched. */
bool standin_order_execute(struct standin_flight *f, const struct standin_rows *device);
void standin_order_host(const struct standin_clock *seen);   /* the host has waited for this */
bool standin_order_busy(const struct standin_rows *rows);
void standin_order_reset(void);

/* capture.c */
/* A call that may be unsafe beside a capture: 0, or the capture is invalidated and the fault counted. */
CUresult standin_capture_allows(void);
/* Work for a stream: CUDA_SUCCESS, and *ret_captured says whether a graph takes it instead of the stream. */
CUresult standin_capture_work(struct standin_stream *s, bool *ret_captured);

/* control.c */
struct standin_memory { char *at; size_t bytes; struct standin_context *context; int device; };
bool standin_memory_find(const void *at, struct standin_memory *ret_m);
bool standin_memory_holds(const struct standin_rows *rows);
bool standin_host_registered(const struct standin_rows *rows);
CUresult standin_host_add(void *memory, size_t bytes);
CUresult standin_host_remove(void *memory);
CUresult standin_host_alloc(void **ret_memory, size_t bytes);
CUresult standin_host_free(void *memory);
CUresult standin_called(const char *function);               /* counts; the failure that a test asked for */
bool standin_forgotten(const char *function);
struct standin_context *standin_current(void);               /* without the lock */
CUresult standin_push(struct standin_context *c);            /* likewise */
CUresult standin_pop(struct standin_context **ret_c);        /* likewise */
int standin_device_count(void);
struct standin_context *standin_context_list(void);
struct standin_context *standin_context_on(int device);      /* a new one */

/* driver.c */
void standin_events_reset(void);
/* What calls begin and end with. 0: the lock is held. */
CUresult driver_begin(const char *function);
CUresult driver_begin_in_context(const char *function);
CUresult driver_begin_unsafe(const char *function);           /* beside a stream capture */
CUresult driver_end(CUresult r);
CUresult driver_fault(enum standin_fault fault, CUresult r);
CUresult driver_find_stream(CUstream handle, struct standin_stream **ret_s);
struct standin_context *standin_primary(int device);         /* NULL: no such device */

#endif
