/* SPDX-License-Identifier: Apache-2.0
 *
 * save: the saving part of vckpt.h over core/save/saver/saver.h: sizes of structs, enums, and pointers are checked
 * here; what tensors, steps and ranks may be is checked below. */
#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "core/api/api_internal.h"
#include "core/base/cleanup.h"
#include "core/save/saver/saver.h"
#include "core/upkeep/retain.h"

_Static_assert((int)VCKPT_PIN_YES == (int)DEVICE_PIN_YES && (int)VCKPT_PIN_NO == (int)DEVICE_PIN_NO, "handed through");
_Static_assert((int)VCKPT_REPLICAS_FULL == (int)SAVE_REPLICAS_FULL && (int)VCKPT_REPLICAS_OFF == (int)SAVE_REPLICAS_OFF,
	"handed through");
_Static_assert((int)VCKPT_COMMITTED == (int)SAVE_COMMITTED && (int)VCKPT_FAILED == (int)SAVE_FAILED, "handed through");
_Static_assert(VCKPT_PHASES == SAVE_PHASES, "handed through");
_Static_assert(sizeof(struct vckpt_attribute) == sizeof(struct proto_attribute), "handed through");
_Static_assert((int)VCKPT_EDAMAGED == (int)BASE_EDAMAGED && (int)VCKPT_EFORMAT == (int)BASE_EFORMAT
	&& (int)VCKPT_EVERSION == (int)BASE_EVERSION && (int)VCKPT_EFORKED == (int)BASE_EFORKED
	&& (int)VCKPT_ENOSTORE == (int)BASE_ENOSTORE && (int)VCKPT_EABORTED == (int)BASE_EABORTED
	&& (int)VCKPT_EUNDECIDED == (int)BASE_EUNDECIDED && (int)VCKPT_ETIMEDOUT == ETIMEDOUT
	&& (int)VCKPT_EPINNED == (int)BASE_EPINNED, "errno(3)");

#define SAVER_THREADS_MAX 1024u

/* A saver stays until its last handle goes, the caller's or a save's: callers free them in any order. */
struct vckpt_saver { struct store *store; struct save_saver *saver; atomic_uint handles; };
/* A save likewise stays until the last call that waits for it has returned. */
struct vckpt_save { struct save_flight *flight; struct vckpt_saver *saver; atomic_uint users; };

/* ---- savers ---- */

/* Before the store is opened: a caller that has none yet need not make one for rules that are refused. */
static int saver_rules_check(const struct vckpt_saver_options *o, struct base_error *err)
{
	struct upkeep_retain *rules = upkeep_retain_new();
	int r = rules ? 0 : base_no_memory(err);

	for (size_t i = 0; r == 0 && i < o->nkeep; i++)
		r = upkeep_retain_add(rules, o->keep[i], err);
	upkeep_retain_free(rules);
	return r;
}

static int saver_options_check(const struct vckpt_saver_options *o, struct base_error *err)
{
	const uint32_t known = VCKPT_SAVER_LOW_PRIORITY | VCKPT_SAVER_NO_BASES | VCKPT_SAVER_KEEP_CACHED;
	int r;

	if (!o)
		return base_error_set(err, -EINVAL, "no options of the saver are given");
	r = api_size_check(o->size, sizeof *o, "vckpt_saver_options", err);
	if (r < 0)
		return r;
	if (o->pin < VCKPT_PIN_AUTO || o->pin > VCKPT_PIN_ALLOCATE)
		return base_error_set(err, -EINVAL, "pin of the saver is %d: it is one of VCKPT_PIN_AUTO to "
			"VCKPT_PIN_ALLOCATE, %d to %d", o->pin, VCKPT_PIN_AUTO, VCKPT_PIN_ALLOCATE);
	if (o->check_replicas < VCKPT_REPLICAS_SAMPLE || o->check_replicas > VCKPT_REPLICAS_OFF)
		return base_error_set(err, -EINVAL, "check_replicas of the saver is %d: it is one of "
			"VCKPT_REPLICAS_SAMPLE to VCKPT_REPLICAS_OFF, %d to %d", o->check_replicas,
			VCKPT_REPLICAS_SAMPLE, VCKPT_REPLICAS_OFF);
	if (o->threads > SAVER_THREADS_MAX)
		return base_error_set(err, -EINVAL, "a saver of %u threads: at most %u are possible", o->threads,
			SAVER_THREADS_MAX);
	r = api_flags_check(o->flags, known, "the saver", "VCKPT_SAVER_...", err);
	return r < 0 ? r : saver_rules_check(o, err);
}

static int saver_open(const struct vckpt_saver_options *o, struct vckpt_saver *v, struct base_error *err)
{
	struct save_saver_options to = {.run = o->run, .launch_id = o->launch_id, .rank = o->rank, .world = o->world,
		.mesh = o->mesh ? o->mesh->mesh : NULL, .heartbeat_ms = o->heartbeat_ms, .start_ms = o->start_ms,
		.deadline_ms = o->deadline_ms, .ring_bytes = o->ring_bytes, .pin = (enum device_pin)o->pin,
		.replicas = (enum save_replicas_mode)o->check_replicas, .threads = o->threads,
		.low_priority = o->flags & VCKPT_SAVER_LOW_PRIORITY, .no_bases = o->flags & VCKPT_SAVER_NO_BASES,
		.warn_free = o->warn_free,
		.keep = o->keep, .nkeep = o->nkeep};
	unsigned flags = o->flags & VCKPT_SAVER_KEEP_CACHED ? STORE_OPEN_KEEP_CACHED : 0;
	int r = api_store_open(o->store, flags, &v->store, err);

	to.store = v->store;
	return r < 0 ? r : save_saver_open(&to, &v->saver, err);
}

int vckpt_saver_open(const struct vckpt_saver_options *o, struct vckpt_saver **ret_saver, struct vckpt_error *err)
{
	struct base_error *e = api_error(err);
	struct vckpt_saver *v;
	int r = saver_options_check(o, e);

	if (r == 0 && !ret_saver)
		r = base_error_set(e, -EINVAL, "no place for the saver is given");
	if (r < 0)
		return r;
	v = calloc(1, sizeof *v);
	if (!v)
		return api_result(-ENOMEM, e);
	r = saver_open(o, v, e);
	if (r < 0) {
		store_close(v->store);
		free(v);
		return api_result(r, e);
	}
	v->handles = 1;
	*ret_saver = v;
	return 0;
}

int vckpt_saver_close(struct vckpt_saver *saver, struct vckpt_error *err)
{
	struct base_error *e = api_error(err);
	int r = api_given(saver, "saver", e);

	return api_result(r < 0 ? r : save_saver_close(saver->saver, e), e);
}

static void saver_unref(struct vckpt_saver *v)
{
	if (atomic_fetch_sub(&v->handles, 1) != 1)
		return;
	save_saver_free(v->saver);
	store_close(v->store);
	free(v);
}

void vckpt_saver_free(struct vckpt_saver *saver)
{
	if (!saver || save_saver_is_child(saver->saver))
		return;
	save_saver_close(saver->saver, NULL);
	saver_unref(saver);
}

/* ---- saves ---- */

static int save_options_check(const struct vckpt_save_options *o, struct base_error *err)
{
	int r;

	if (!o)
		return base_error_set(err, -EINVAL, "no options of the save are given");
	r = api_size_check(o->size, sizeof *o, "vckpt_save_options", err);
	if (r == 0)
		r = api_reserved_check(o->reserved, "vckpt_save_options", err);
	if (r < 0)
		return r;
	for (size_t i = 0; i < o->nattributes; i++)
		if (!o->attributes || !o->attributes[i].key || !o->attributes[i].value)
			return base_error_set(err, -EINVAL, "attribute %zu of the %zu of the save: its key or value is "
				"a null pointer", i, o->nattributes);
	for (size_t i = 0; i < o->nbases; i++)
		if (!o->bases || !o->bases[i])
			return base_error_set(err, -EINVAL, "base %zu of the %zu of the save is a null pointer", i,
				o->nbases);
	return api_flags_check(o->flags, VCKPT_SAVE_REPLACE, "the save", "VCKPT_SAVE_REPLACE", err);
}

int vckpt_save_begin(struct vckpt_saver *saver, const struct vckpt_save_options *o, struct vckpt_save **ret_save,
	struct vckpt_error *err)
{
	struct base_error *e = api_error(err);
	struct save_flight_options to;
	struct vckpt_save *v;
	int r = api_given(saver, "saver", e);

	if (r == 0 && !ret_save)
		r = base_error_set(e, -EINVAL, "no place for the save is given");
	if (r == 0)
		r = save_options_check(o, e);
	if (r < 0)
		return r;
	v = calloc(1, sizeof *v);
	if (!v)
		return api_result(-ENOMEM, e);
	to = (struct save_flight_options){.step = o->step, .replace = o->flags & VCKPT_SAVE_REPLACE,
		.attributes = (const struct proto_attribute *)o->attributes, .nattributes = o->nattributes,
		.bases = o->bases, .nbases = o->nbases, .stream = o->stream};
	r = save_flight_begin(saver->saver, &to, &v->flight, e);
	if (r < 0) {
		free(v);
		return api_result(r, e);
	}
	v->saver = saver;
	v->users = 1;
	atomic_fetch_add(&saver->handles, 1);
	*ret_save = v;
	return 0;
}

static int save_tensor(struct save_flight *f, const struct vckpt_tensor *t, struct base_error *err)
{
	struct tensor_description d;
	int r = api_tensor_describe(t, &d, err);

	if (r < 0)
		return base_error_prefix(err, r, "tensor %.100s/%.200s", t->component ? t->component : "",
			t->name ? t->name : "");
	return save_flight_tensor(f, &d, err);
}

int vckpt_save_tensors(struct vckpt_save *save, const struct vckpt_tensor *tensors, size_t n, struct vckpt_error *err)
{
	struct base_error *e = api_error(err);
	size_t before;
	int r = api_given(save, "save", e);

	if (r == 0 && n)
		r = api_given(tensors, "array of tensors", e);
	if (r < 0)
		return r;
	before = save_flight_count(save->flight);
	for (size_t i = 0; r == 0 && i < n; i++)
		r = save_tensor(save->flight, &tensors[i], e);
	if (r < 0)
		save_flight_truncate(save->flight, before);
	return api_result(r, e);
}

int vckpt_save_blob(struct vckpt_save *save, const char *name, int per_rank, const void *bytes, size_t len,
	struct vckpt_error *err)
{
	struct base_error *e = api_error(err);
	int r = api_given(save, "save", e);

	return api_result(r < 0 ? r : save_flight_blob(save->flight, name, per_rank != 0, bytes, len, e), e);
}

int vckpt_save_common(struct vckpt_save *save, const char *group, const char *name, const void *bytes, size_t len,
	struct vckpt_error *err)
{
	struct base_error *e = api_error(err);
	int r = api_given(save, "save", e);

	return api_result(r < 0 ? r : save_flight_common(save->flight, group, name, bytes, len, e), e);
}

int vckpt_save_submit(struct vckpt_save *save, struct vckpt_error *err)
{
	struct base_error *e = api_error(err);
	int r = api_given(save, "save", e);

	return api_result(r < 0 ? r : save_flight_submit(save->flight, e), e);
}

static void save_leave(struct vckpt_save *v)
{
	if (atomic_fetch_sub(&v->users, 1) != 1)
		return;
	save_flight_free(v->flight);
	if (!save_saver_is_child(v->saver->saver))
		saver_unref(v->saver);
	free(v);
}

int vckpt_save_wait_staged(struct vckpt_save *save, int64_t timeout_ms, struct vckpt_error *err)
{
	struct base_error *e = api_error(err);
	int r = api_given(save, "save", e);

	if (r < 0)
		return r;
	atomic_fetch_add(&save->users, 1);
	r = save_flight_wait_staged(save->flight, timeout_ms, e);
	save_leave(save);
	return api_result(r, e);
}

int vckpt_save_wait_committed(struct vckpt_save *save, int64_t timeout_ms, struct vckpt_committed *ret_committed,
	struct vckpt_error *err)
{
	struct base_error *e = api_error(err);
	struct vckpt_committed done = {0};
	int r = api_given(save, "save", e);

	if (r < 0)
		return r;
	atomic_fetch_add(&save->users, 1);
	r = save_flight_wait_committed(save->flight, timeout_ms, &done.step, &done.entry, e);
	save_leave(save);
	if (r == 0 && ret_committed)
		*ret_committed = done;
	return api_result(r, e);
}

void vckpt_save_free(struct vckpt_save *save)
{
	if (save)
		save_leave(save);
}

void vckpt_save_give_up(struct vckpt_save *save, const char *reason)
{
	if (save)
		save_flight_give_up(save->flight, reason ? reason : "no reason was given");
	vckpt_save_free(save);
}

int vckpt_save_progress(struct vckpt_save *save, struct vckpt_progress *ret_progress)
{
	struct save_flight_info i;
	bool fits = ret_progress && ret_progress->size == sizeof *ret_progress;
	int r = save && fits ? save_flight_info(save->flight, &i) : -EINVAL;

	if (r < 0)
		return r;
	*ret_progress = (struct vckpt_progress){.size = sizeof *ret_progress, .state = (uint32_t)i.state,
		.error = i.error, .bytes_total = i.bytes_total, .bytes_staged = i.stats.bytes_staged,
		.bytes_done = i.bytes_done};
	return 0;
}

int vckpt_save_timings(struct vckpt_save *save, struct vckpt_timings *ret_timings)
{
	struct save_flight_info i;
	const struct proto_stats *m = &i.stats;
	bool fits = ret_timings && ret_timings->size == sizeof *ret_timings;
	int r = save && fits ? save_flight_info(save->flight, &i) : -EINVAL;

	if (r < 0)
		return r;
	*ret_timings = (struct vckpt_timings){.size = sizeof *ret_timings,
		.submitted_ns = m->submitted_ns, .staged_ns = m->staged_ns, .committed_ns = m->committed_ns,
		.bytes_held = m->bytes_held, .bytes_staged = m->bytes_staged,
		.bytes_unchanged = m->bytes_unchanged, .bytes_deduplicated = m->bytes_deduplicated,
		.bytes_encoded = m->bytes_encoded, .bytes_written = m->bytes_written, .pieces = m->pieces,
		.pieces_new = m->pieces_new, .plan_ns = i.plan_ns, .plan_cached = m->plan_cached,
		.plan_hits = i.plan_hits, .plan_misses = i.plan_misses, .ring_waits = (uint32_t)m->ring_waits,
		.bytes_again = i.bytes_again, .bytes_no_base = i.bytes_no_base};
	for (unsigned p = 0; p < VCKPT_PHASES; p++)
		ret_timings->phase[p] = (struct vckpt_phase){save_phase_name(p), i.phase[p].start_ns, i.phase[p].end_ns,
			i.phase[p].busy_ns, i.phase[p].bytes};
	return 0;
}
