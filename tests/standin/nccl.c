/* SPDX-License-Identifier: Apache-2.0
 *
 * nccl: a libnccl.so.2 whose ranks are threads of one process, over the stand-in for the driver. A kernel is a call on
 * the stream, which waits there for the other ranks' kernels, as a real one does, until its communicator is aborted.
 *
 * A non-blocking communicator gives its work to the stream only when it has been asked for its state a few times: an
 * event that is recorded too early, or a call that comes too early, is seen. Types and numbers are written down here
 * once more, from NCCL's documentation. One lock protects everything; it is never held together with the driver's. */
#include "internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef enum { ncclSuccess, ncclUnhandledCudaError, ncclSystemError, ncclInternalError, ncclInvalidArgument,
	ncclInvalidUsage, ncclRemoteError, ncclInProgress } ncclResult_t;
typedef enum { ncclInt8, ncclUint8 } ncclDataType_t;
typedef struct { char internal[128]; } ncclUniqueId;
typedef struct ncclComm *ncclComm_t;
typedef struct { size_t size; unsigned magic, version; int blocking, more[32]; } ncclConfig_t;

#define NCCL_RANKS 16
#define NCCL_OPS 64                      /* in a group of calls */

enum nccl_fault { NCCL_EARLY, NCCL_ORDER, NCCL_MEMORY, NCCL_CONTEXT, NCCL_DEAD, NCCL_FAULTS, NCCL_COMMS = NCCL_FAULTS,
	NCCL_COUNTS };
static const char *const nccl_words[NCCL_COUNTS] = {"early", "order", "memory", "context", "dead", "comms"};

/* What one rank offers and others take; `nth` of its kind. */
struct nccl_offer { struct nccl_offer *next; int from, to; uint64_t nth; const void *at; size_t n; int taken; };
struct nccl_clique {
	struct nccl_clique *next;
	char id[128];
	int size, joined, children[NCCL_RANKS]; /* splits, of each rank */
	struct nccl_offer *offers;
};
struct nccl_op { int from, to; uint64_t nth; const void *out; void *into; size_t n; bool done; }; /* to -1: all */
struct nccl_kernel { ncclComm_t comm; struct standin_stream *stream; int nops; struct nccl_op ops[NCCL_OPS]; };
struct ncclComm {
	struct ncclComm *next;
	struct nccl_clique *clique;
	int rank, asks, running;         /* asks: how often it has to be asked until it has given its work */
	bool blocking, dead, aborted;
	ncclResult_t error;
	struct nccl_kernel *given;
	uint64_t broadcasts, sent[NCCL_RANKS], received[NCCL_RANKS];
	ncclComm_t child, *ret_child;
};

static pthread_mutex_t nccl_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t nccl_changed = PTHREAD_COND_INITIALIZER;
static struct nccl_clique *nccl_cliques;
static struct ncclComm *nccl_comms;
static uint64_t nccl_counts[NCCL_COUNTS], nccl_ids;
static char nccl_hanging[48];
static __thread int nccl_depth;
static __thread struct nccl_kernel *nccl_group;

ncclResult_t ncclGetUniqueId(ncclUniqueId *id);
ncclResult_t ncclCommInitRankConfig(ncclComm_t *ret, int size, ncclUniqueId id, int rank, ncclConfig_t *config);
ncclResult_t ncclCommSplit(ncclComm_t c, int color, int key, ncclComm_t *ret, ncclConfig_t *config);
ncclResult_t ncclCommDestroy(ncclComm_t c);
ncclResult_t ncclCommAbort(ncclComm_t c);
ncclResult_t ncclCommGetAsyncError(ncclComm_t c, ncclResult_t *ret);
ncclResult_t ncclCommCount(ncclComm_t c, int *ret);
ncclResult_t ncclCommUserRank(ncclComm_t c, int *ret);
ncclResult_t ncclBroadcast(const void *out, void *into, size_t n, ncclDataType_t type, int root, ncclComm_t c,
	struct standin_stream *s);
ncclResult_t ncclSend(const void *out, size_t n, ncclDataType_t type, int to, ncclComm_t c, struct standin_stream *s);
ncclResult_t ncclRecv(void *into, size_t n, ncclDataType_t type, int from, ncclComm_t c, struct standin_stream *s);
ncclResult_t ncclGroupStart(void);
ncclResult_t ncclGroupEnd(void);
const char *ncclGetErrorString(ncclResult_t r);
uint64_t standin_nccl_count(const char *what);
void standin_nccl_hang(const char *function);
void standin_nccl_reset(void);
ncclComm_t standin_nccl_join(const char *name, int size, int rank, int blocking);

/* ---- what tests ask and say ---- */

uint64_t standin_nccl_count(const char *what)
{
	uint64_t n = UINT64_MAX;

	pthread_mutex_lock(&nccl_lock);
	for (int i = 0; i < NCCL_COUNTS; i++)
		n = strcmp(what, nccl_words[i]) == 0 ? nccl_counts[i] : n;
	pthread_mutex_unlock(&nccl_lock);
	return n;
}

/* Its calls do not return until another function, or none (""), is named. */
void standin_nccl_hang(const char *function)
{
	pthread_mutex_lock(&nccl_lock);
	snprintf(nccl_hanging, sizeof nccl_hanging, "%s", function);
	pthread_cond_broadcast(&nccl_changed);
	pthread_mutex_unlock(&nccl_lock);
}

/* When no kernel runs, and no other thread is in a call. */
void standin_nccl_reset(void)
{
	pthread_mutex_lock(&nccl_lock);
	for (struct ncclComm *c; (c = nccl_comms); free(c)) {
		nccl_comms = c->next;
		free(c->given);
	}
	for (struct nccl_clique *q; (q = nccl_cliques); free(q)) {
		for (struct nccl_offer *o; (o = q->offers); free(o))
			q->offers = o->next;
		nccl_cliques = q->next;
	}
	memset(nccl_counts, 0, sizeof nccl_counts);
	pthread_mutex_unlock(&nccl_lock);
}

/* What each call begins with: the failure that a test asked for. */
static ncclResult_t nccl_called(const char *function)
{
	CUresult r;

	pthread_mutex_lock(&standin_lock);
	r = standin_called(function);
	pthread_mutex_unlock(&standin_lock);
	pthread_mutex_lock(&nccl_lock);
	while (strcmp(nccl_hanging, function) == 0)
		pthread_cond_wait(&nccl_changed, &nccl_lock);
	pthread_mutex_unlock(&nccl_lock);
	return (ncclResult_t)r;
}

static ncclResult_t nccl_fault(enum nccl_fault fault)
{
	nccl_counts[fault]++;
	return ncclInvalidUsage;
}

/* ---- kernels ---- */

static struct nccl_offer *nccl_offer_of(struct nccl_clique *q, const struct nccl_op *op)
{
	for (struct nccl_offer *o = q->offers; o; o = o->next)
		if (o->from == op->from && o->to == op->to && o->nth == op->nth)
			return o;
	return NULL;
}

static void nccl_offer_new(struct nccl_clique *q, const struct nccl_op *op)
{
	struct nccl_offer *o = calloc(1, sizeof *o);

	*o = (struct nccl_offer){q->offers, op->from, op->to, op->nth, op->out, op->n, 0};
	q->offers = o;
	pthread_cond_broadcast(&nccl_changed);
}

static bool nccl_op_try(ncclComm_t c, struct nccl_op *op)
{
	struct nccl_offer *o = nccl_offer_of(c->clique, op);

	if (op->from == c->rank) {
		if (!o)
			nccl_offer_new(c->clique, op);
		return o && o->taken == (op->to < 0 ? c->clique->size - 1 : 1);
	}
	if (!o || !o->at)
		return false;
	if (o->n != op->n)
		nccl_fault(NCCL_ORDER);
	memcpy(op->into, o->at, o->n < op->n ? o->n : op->n);
	o->taken++;
	pthread_cond_broadcast(&nccl_changed);
	return true;
}

static void nccl_run(void *arg)
{
	struct nccl_kernel *k = arg;
	int left = k->nops;

	pthread_mutex_lock(&nccl_lock);
	while (left && !k->comm->aborted) {
		int before = left;

		for (int i = 0; i < k->nops; i++)
			if (!k->ops[i].done && nccl_op_try(k->comm, &k->ops[i])) {
				k->ops[i].done = true;
				left--;
			}
		if (left == before)
			pthread_cond_wait(&nccl_changed, &nccl_lock);
	}
	k->comm->running--;
	pthread_cond_broadcast(&nccl_changed);
	pthread_mutex_unlock(&nccl_lock);
	free(k);
}

/* Without a lock. */
static void nccl_launch(struct nccl_kernel *k)
{
	struct standin_work *w = calloc(1, sizeof *w);

	w->kind = STANDIN_CALL;
	w->call = nccl_run;
	w->arg = k;
	pthread_mutex_lock(&standin_lock);
	standin_stream_queue(k->stream, w);
	pthread_mutex_unlock(&standin_lock);
}

/* With the lock, which is let go. */
static ncclResult_t nccl_give(struct nccl_kernel *k)
{
	ncclComm_t c = k->comm;
	bool blocking = c->blocking;

	c->running++;
	if (!blocking) {
		c->given = k;
		c->asks = 1 + (int)(c->broadcasts % 3);
	}
	pthread_mutex_unlock(&nccl_lock);
	if (blocking)
		nccl_launch(k);
	return blocking ? ncclSuccess : ncclInProgress;
}

static bool nccl_memory_is_known(const void *at, size_t n)
{
	struct standin_rows rows = {(char *)at, n, 1, n};
	bool known;

	pthread_mutex_lock(&standin_lock);
	known = standin_host_registered(&rows) || standin_memory_holds(&rows);
	pthread_mutex_unlock(&standin_lock);
	return known;
}

static ncclResult_t nccl_op(const char *function, ncclComm_t c, struct standin_stream *s, struct nccl_op op)
{
	struct nccl_kernel *k = nccl_group;
	ncclResult_t r = nccl_called(function);
	bool known = nccl_memory_is_known(op.out ? op.out : op.into, op.n);

	if (r)
		return r;
	pthread_mutex_lock(&nccl_lock);
	r = c->dead ? nccl_fault(NCCL_DEAD) : c->asks ? nccl_fault(NCCL_EARLY) : !known ? nccl_fault(NCCL_MEMORY) :
		standin_current() != s->context ? nccl_fault(NCCL_CONTEXT) : ncclSuccess;
	if (r == ncclSuccess) {
		op.nth = op.to < 0 ? c->broadcasts++ : op.from == c->rank ? c->sent[op.to]++ : c->received[op.from]++;
		k = k ? k : calloc(1, sizeof *k);
		k->comm = c;
		k->stream = s;
		k->ops[k->nops++] = op;
		if (nccl_depth == 0)
			return nccl_give(k);
		nccl_group = k;
	}
	pthread_mutex_unlock(&nccl_lock);
	return r;
}

ncclResult_t ncclBroadcast(const void *out, void *into, size_t n, ncclDataType_t type, int root, ncclComm_t c,
	struct standin_stream *s)
{
	(void)type;
	return nccl_op("ncclBroadcast", c, s,
		(struct nccl_op){.from = root, .to = -1, .out = out, .into = into, .n = n});
}

ncclResult_t ncclSend(const void *out, size_t n, ncclDataType_t type, int to, ncclComm_t c, struct standin_stream *s)
{
	(void)type;
	return nccl_op("ncclSend", c, s, (struct nccl_op){.from = c->rank, .to = to, .out = out, .n = n});
}

ncclResult_t ncclRecv(void *into, size_t n, ncclDataType_t type, int from, ncclComm_t c, struct standin_stream *s)
{
	(void)type;
	return nccl_op("ncclRecv", c, s, (struct nccl_op){.from = from, .to = c->rank, .into = into, .n = n});
}

ncclResult_t ncclGroupStart(void)
{
	ncclResult_t r = nccl_called("ncclGroupStart");

	nccl_depth += r == ncclSuccess;
	return r;
}

ncclResult_t ncclGroupEnd(void)
{
	ncclResult_t r = nccl_called("ncclGroupEnd");
	struct nccl_kernel *k = nccl_group;

	if (nccl_depth == 0)
		return ncclInvalidUsage;
	nccl_depth = 0;
	nccl_group = NULL;
	if (r || !k) {
		free(k);
		return r;
	}
	pthread_mutex_lock(&nccl_lock);
	return nccl_give(k);
}

/* ---- communicators ---- */

static struct nccl_clique *nccl_clique_of(const char *id, int size)
{
	struct nccl_clique *q = nccl_cliques;

	while (q && memcmp(q->id, id, sizeof q->id) != 0)
		q = q->next;
	if (!q) {
		q = calloc(1, sizeof *q);
		memcpy(q->id, id, sizeof q->id);
		q->size = size;
		q->next = nccl_cliques;
		nccl_cliques = q;
	}
	return q;
}

/* With the lock; a blocking one waits for the others. */
static ncclComm_t nccl_join(const char *id, int size, int rank, const ncclConfig_t *config, const bool *aborted)
{
	struct nccl_clique *q = nccl_clique_of(id, size);
	ncclComm_t c = calloc(1, sizeof *c);

	c->clique = q;
	c->rank = rank;
	c->blocking = !config || config->blocking != 0;
	c->asks = c->blocking ? 0 : 2;
	c->next = nccl_comms;
	nccl_comms = c;
	nccl_counts[NCCL_COMMS]++;
	q->joined++;
	pthread_cond_broadcast(&nccl_changed);
	while (c->blocking && q->joined < q->size && !(aborted && *aborted))
		pthread_cond_wait(&nccl_changed, &nccl_lock);
	return c;
}

/* The program's: a rank of a communicator of that name, as of ncclCommInitRankConfig. Waits for the others. */
ncclComm_t standin_nccl_join(const char *name, int size, int rank, int blocking)
{
	char id[128] = "";
	ncclComm_t c;

	snprintf(id, sizeof id, "%s", name);
	pthread_mutex_lock(&nccl_lock);
	c = nccl_join(id, size, rank, NULL, NULL);
	c->blocking = blocking;
	pthread_mutex_unlock(&nccl_lock);
	return c;
}

/* Every byte of an id counts. */
static void nccl_id_of(uint64_t number, ncclUniqueId *id)
{
	int n = snprintf(id->internal, sizeof id->internal, "id %llu", (unsigned long long)number);

	memset(id->internal + n, 'x', sizeof id->internal - (size_t)n);
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id)
{
	ncclResult_t r = nccl_called("ncclGetUniqueId");

	pthread_mutex_lock(&nccl_lock);
	nccl_id_of(++nccl_ids, id);
	pthread_mutex_unlock(&nccl_lock);
	return r;
}

/* NCCL waits for ever for the ranks of an id that it never gave; here that is an error. */
static bool nccl_id_was_given(const ncclUniqueId *id)
{
	ncclUniqueId given;
	bool found = false;

	pthread_mutex_lock(&nccl_lock);
	for (uint64_t number = 1; number <= nccl_ids && !found; number++) {
		nccl_id_of(number, &given);
		found = memcmp(&given, id, sizeof given) == 0;
	}
	pthread_mutex_unlock(&nccl_lock);
	return found;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *ret, int size, ncclUniqueId id, int rank, ncclConfig_t *config)
{
	ncclResult_t r = nccl_called("ncclCommInitRankConfig");

	*ret = NULL;
	if (r || (config && (config->magic != 0xcafebeef || config->version < 21400 || config->size < 24)))
		return r ? r : ncclInvalidArgument;
	if (rank < 0 || rank >= size || size > NCCL_RANKS || !standin_current() || !nccl_id_was_given(&id))
		return ncclInvalidArgument;
	pthread_mutex_lock(&nccl_lock);
	*ret = nccl_join(id.internal, size, rank, config, NULL);
	pthread_mutex_unlock(&nccl_lock);
	return (*ret)->blocking ? ncclSuccess : ncclInProgress;
}

ncclResult_t ncclCommSplit(ncclComm_t c, int color, int key, ncclComm_t *ret, ncclConfig_t *config)
{
	ncclResult_t r = nccl_called("ncclCommSplit");
	char id[128] = "";

	*ret = NULL;
	if (r || color != 0 || key != c->rank)
		return r ? r : ncclInvalidArgument;
	pthread_mutex_lock(&nccl_lock);
	snprintf(id, sizeof id, "%.60s, child %d", c->clique->id, c->clique->children[c->rank]++);
	c->child = nccl_join(id, c->clique->size, key, config, &c->aborted);
	c->ret_child = ret;
	while (c->blocking && c->child->clique->joined < c->child->clique->size && !c->aborted)
		pthread_cond_wait(&nccl_changed, &nccl_lock);
	if (c->blocking)
		*ret = c->child;
	c->asks = c->blocking ? 0 : 2;
	r = c->aborted ? ncclInternalError : c->blocking ? ncclSuccess : ncclInProgress;
	pthread_mutex_unlock(&nccl_lock);
	return r;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t c, ncclResult_t *ret)
{
	ncclResult_t failed = nccl_called("ncclAsync"), r = nccl_called("ncclCommGetAsyncError");
	struct nccl_kernel *k = NULL;

	if (r)
		return r;
	pthread_mutex_lock(&nccl_lock);
	c->error = failed ? failed : c->error;
	if (c->dead)
		c->error = nccl_fault(NCCL_DEAD);
	if (c->asks == 1 && (c->clique->joined < c->clique->size ||
		(c->child && c->child->clique->joined < c->child->clique->size)))
		c->asks++;
	if (c->asks && --c->asks == 0) {
		k = c->given;
		c->given = NULL;
		if (c->child)
			*c->ret_child = c->child;
		c->child = NULL;
	}
	*ret = c->error ? c->error : c->asks ? ncclInProgress : ncclSuccess;
	pthread_mutex_unlock(&nccl_lock);
	if (k)
		nccl_launch(k);
	return ncclSuccess;
}

static ncclResult_t nccl_close(ncclComm_t c, bool abort)
{
	ncclResult_t r = ncclSuccess;

	pthread_mutex_lock(&nccl_lock);
	if (c->dead)
		r = nccl_fault(NCCL_DEAD);
	c->aborted |= abort;
	c->running -= abort && c->given;         /* it never ran */
	pthread_cond_broadcast(&nccl_changed);
	while (c->running > 0)
		pthread_cond_wait(&nccl_changed, &nccl_lock);
	for (struct nccl_offer *o = c->clique->offers; o; o = o->next)
		if (o->from == c->rank)
			o->at = NULL;            /* nobody takes it any more */
	nccl_counts[NCCL_COMMS] -= !c->dead;
	c->dead = true;
	pthread_mutex_unlock(&nccl_lock);
	return r;
}

ncclResult_t ncclCommDestroy(ncclComm_t c)
{
	ncclResult_t r = nccl_called("ncclCommDestroy");

	return r ? r : nccl_close(c, false);
}

ncclResult_t ncclCommAbort(ncclComm_t c)
{
	ncclResult_t r = nccl_called("ncclCommAbort");

	return r ? r : nccl_close(c, true);
}

ncclResult_t ncclCommCount(ncclComm_t c, int *ret)
{
	*ret = c->clique->size;
	return ncclSuccess;
}

ncclResult_t ncclCommUserRank(ncclComm_t c, int *ret)
{
	*ret = c->rank;
	return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t r)
{
	static const char *const words[] = {"no error", "unhandled cuda error", "unhandled system error",
		"internal error", "invalid argument", "invalid usage",
		"remote process exited or there was a network error", "NCCL operation in progress"};

	return (unsigned)r < sizeof words / sizeof *words ? words[r] : "unknown result code";
}
