/* SPDX-License-Identifier: Apache-2.0
 *
 * load: the loading part of vckpt.h over core/load/loader/loader.h. Sizes of structs, enums, flags and pointers are
 * checked here; what tensors, targets and rules may be is checked below. A vckpt_load is a loader under another
 * name. */
#include <inttypes.h>

#include "core/api/api_comm_internal.h"
#include "core/load/loader/loader.h"
#include "core/tensor/convert.h"

_Static_assert((int)VCKPT_LOAD_REHASH == (int)LOAD_FILL_REHASH
	&& (int)VCKPT_LOAD_SKIP_DAMAGED == (int)LOAD_FILL_SKIP_DAMAGED
	&& (int)VCKPT_LOAD_NOT_STRICT == (int)LOADER_NOT_STRICT && (int)VCKPT_LOAD_DIRECT == (int)LOADER_DIRECT
	&& (int)VCKPT_LOAD_CACHED == (int)LOADER_CACHED
	&& (int)VCKPT_EXCHANGE_AUTO == (int)LOAD_EXCHANGE_AUTO
	&& (int)VCKPT_EXCHANGE_NEVER == (int)LOAD_EXCHANGE_NEVER
	&& (int)VCKPT_EXCHANGE_ALWAYS == (int)LOAD_EXCHANGE_ALWAYS, "handed through");

static struct loader *loader_of(const struct vckpt_load *load) { return (struct loader *)(uintptr_t)load; }

/* ---- begin and free ---- */

static int load_options_check(const struct vckpt_load_options *o, struct base_error *err)
{
	const uint32_t paths = VCKPT_LOAD_DIRECT | VCKPT_LOAD_CACHED;
	const uint32_t known = VCKPT_LOAD_REHASH | VCKPT_LOAD_SKIP_DAMAGED | VCKPT_LOAD_NOT_STRICT | paths;
	int r = api_size_check(o->size, sizeof *o, "vckpt_load_options", err);

	if (r == 0)
		r = api_reserved_check(o->reserved, "vckpt_load_options", err);
	if (r < 0)
		return r;
	if (o->exchange > VCKPT_EXCHANGE_ALWAYS)
		return base_error_set(err, -EINVAL, "exchange of the load is %u: it is one of VCKPT_EXCHANGE_AUTO to "
			"VCKPT_EXCHANGE_ALWAYS, %d to %d", o->exchange, VCKPT_EXCHANGE_AUTO, VCKPT_EXCHANGE_ALWAYS);
	if (o->comm && api_comm_alive(o->comm, err) < 0)
		return -BASE_EFORKED;
	if ((o->flags & paths) == paths)
		return base_error_set(err, -EINVAL, "VCKPT_LOAD_DIRECT and VCKPT_LOAD_CACHED exclude each other");
	if (o->threads > LOADER_THREADS_MAX)
		return base_error_set(err, -EINVAL, "a load of %u threads: at most %u are possible", o->threads,
			LOADER_THREADS_MAX);
	return api_flags_check(o->flags, known, "the load", "VCKPT_LOAD_...", err);
}

int vckpt_load_begin(struct vckpt_step *step, const struct vckpt_load_options *o, struct vckpt_load **ret_load,
	struct vckpt_error *err)
{
	static const struct vckpt_load_options defaults = {.size = sizeof defaults};
	struct base_error *e = api_error(err);
	struct loader_options to;
	int r = api_step_alive(step, e);

	o = o ? o : &defaults;
	if (r == 0 && !ret_load)
		r = base_error_set(e, -EINVAL, "no place for the load is given");
	if (r == 0)
		r = load_options_check(o, e);
	if (r < 0)
		return r;
	to = (struct loader_options){.rank = o->rank, .world = o->world, .threads = o->threads, .flags = o->flags,
		.comm = o->comm ? o->comm->comm : NULL, .exchange = (enum load_exchange_mode)o->exchange};
	return api_result(loader_new(step->step, &to, (struct loader **)ret_load, e), e);
}

void vckpt_load_free(struct vckpt_load *load) { loader_free(loader_of(load)); }

/* ---- what is wanted ---- */

/* Declares all n items, or none: `declare` takes number i. what: what they are. */
static int load_declare(struct vckpt_load *load, const void *items, size_t n, const char *what,
	int (*declare)(struct loader *l, const void *items, size_t i, struct base_error *err), struct vckpt_error *err)
{
	struct base_error *e = api_error(err);
	struct loader_mark mark;
	int r = api_given(load, "load", e);

	if (r == 0)
		r = loader_mark(loader_of(load), &mark, e);
	if (r == 0 && n && !items)
		r = base_error_set(e, -EINVAL, "no %s are given", what);
	if (r < 0)
		return r;
	for (size_t i = 0; r == 0 && i < n; i++)
		r = declare(loader_of(load), items, i, e);
	if (r < 0)
		loader_cut(loader_of(load), &mark);
	return api_result(r, e);
}

static int target_check(const struct vckpt_target *t, struct base_error *err)
{
	const uint32_t known = VCKPT_TARGET_CONVERT | VCKPT_TARGET_RESIZE | VCKPT_TARGET_ZERO;
	int r = api_size_check(t->size, sizeof *t, "vckpt_target", err);

	if (r == 0)
		r = api_given(t->to, "destination of a target", err);
	return r < 0 ? r : api_flags_check(t->flags, known, "the target", "VCKPT_TARGET_...", err);
}

static int target_declare(struct loader *l, const struct vckpt_target *t, size_t i, struct base_error *err)
{
	const struct load_step_info *step = loader_step(l);
	struct tensor_description to;
	const struct loader_target target = {.to = &to, .component = t->component, .name = t->name, .from = t->from,
		.from_ndim = t->from_ndim, .at = t->at, .convert = t->flags & VCKPT_TARGET_CONVERT,
		.resize = t->flags & VCKPT_TARGET_RESIZE, .zero = t->flags & VCKPT_TARGET_ZERO};
	int r = target_check(t, err);

	if (r < 0)
		return base_error_prefix(err, r, "%.100s/%" PRIu64 ": target %zu", step->run, step->step, i);
	r = api_tensor_describe(t->to, &to, err);
	if (r < 0)
		return base_error_prefix(err, r, "%.100s/%" PRIu64 ": tensor %.100s/%.200s", step->run, step->step,
			t->to->component ? t->to->component : "", t->to->name ? t->to->name : "");
	return loader_target(l, &target, err);
}

static int declare_tensor(struct loader *l, const void *tensors, size_t i, struct base_error *err)
{
	const struct vckpt_target t = {.size = sizeof t, .to = (const struct vckpt_tensor *)tensors + i};

	return target_declare(l, &t, i, err);
}

static int declare_target(struct loader *l, const void *targets, size_t i, struct base_error *err)
{
	return target_declare(l, (const struct vckpt_target *)targets + i, i, err);
}

static int declare_rule(struct loader *l, const void *rules, size_t i, struct base_error *err)
{
	const struct vckpt_rename *rule = (const struct vckpt_rename *)rules + i;
	const struct loader_rename to = {rule->component, rule->from, rule->to, rule->flags & VCKPT_RENAME_ANYWHERE};
	int r = api_flags_check(rule->flags, VCKPT_RENAME_ANYWHERE, "the rule", "VCKPT_RENAME_ANYWHERE", err);

	if (r == 0)
		r = loader_rename(l, &to, err);
	return r < 0 ? base_error_prefix(err, r, "rule %zu of a renaming", i) : 0;
}

int vckpt_load_tensors(struct vckpt_load *load, const struct vckpt_tensor *tensors, size_t n, struct vckpt_error *err)
{
	return load_declare(load, tensors, n, "tensors", declare_tensor, err);
}

int vckpt_load_targets(struct vckpt_load *load, const struct vckpt_target *targets, size_t n, struct vckpt_error *err)
{
	return load_declare(load, targets, n, "targets", declare_target, err);
}

int vckpt_load_rename(struct vckpt_load *load, const struct vckpt_rename *rules, size_t n, struct vckpt_error *err)
{
	return load_declare(load, rules, n, "rules", declare_rule, err);
}

int vckpt_load_rename_by(struct vckpt_load *load,
	int (*f)(void *arg, const char *component, const char *name, char *ret_name, size_t room), void *arg,
	struct vckpt_error *err)
{
	int r = load_declare(load, NULL, 0, "", NULL, err);

	if (r == 0)
		loader_rename_by(loader_of(load), f, arg);
	return r;
}

int vckpt_load_stream(struct vckpt_load *load, void *stream, struct vckpt_error *err)
{
	int r = load_declare(load, NULL, 0, "", NULL, err);

	return r < 0 ? r : loader_stream(loader_of(load), stream, (struct base_error *)err);
}

int vckpt_load_expect(struct vckpt_load *load, const char *component, struct vckpt_error *err)
{
	int r = load_declare(load, NULL, 0, "", NULL, err);

	if (r == 0)
		r = api_given(component, "component", (struct base_error *)err);
	if (r == 0)
		loader_expect(loader_of(load), component);
	return r;
}

int vckpt_convert(uint32_t from, uint32_t to, const void *in, void *out, size_t n, struct vckpt_error *err)
{
	struct base_error *e = api_error(err);
	int r = api_dtype_check(from, "the dtype to convert from:", e);

	if (r == 0)
		r = api_dtype_check(to, "the dtype to convert to:", e);
	if (r == 0 && n)
		r = api_given(in, "memory to convert from", e);
	if (r == 0 && n)
		r = api_given(out, "memory to convert into", e);
	if (r < 0)
		return r;
	if (!tensor_convert_possible((enum tensor_dtype)from, (enum tensor_dtype)to))
		return base_error_set(e, -EINVAL, "%s cannot be converted to %s",
			tensor_dtype_name((enum tensor_dtype)from), tensor_dtype_name((enum tensor_dtype)to));
	if (n > 0)
		tensor_convert((enum tensor_dtype)from, (enum tensor_dtype)to, in, out, n);
	return 0;
}

/* ---- the load ---- */

int vckpt_load_start(struct vckpt_load *load, struct vckpt_error *err)
{
	struct base_error *e = api_error(err);
	int r = api_given(load, "load", e);

	return api_result(r < 0 ? r : loader_start(loader_of(load), e), e);
}

int vckpt_load_wait(struct vckpt_load *load, int64_t timeout_ms, struct vckpt_error *err)
{
	struct base_error *e = api_error(err);
	int r = api_given(load, "load", e);

	return api_result(r < 0 ? r : loader_wait(loader_of(load), timeout_ms, e), e);
}

int vckpt_load_run(struct vckpt_load *load, struct vckpt_error *err)
{
	int r = vckpt_load_start(load, err);

	return r < 0 ? r : vckpt_load_wait(load, -1, err);
}

void vckpt_load_stop(struct vckpt_load *load) { loader_stop(loader_of(load)); }

int vckpt_load_progress(struct vckpt_load *load, struct vckpt_load_progress *ret_progress)
{
	bool fits = ret_progress && ret_progress->size == sizeof *ret_progress;
	struct loader_progress p;
	int r = load && fits ? loader_progress(loader_of(load), &p) : -EINVAL;

	if (r < 0)
		return r;
	*ret_progress = (struct vckpt_load_progress){.size = sizeof *ret_progress, .bytes_wanted = p.bytes.wanted,
		.bytes_placed = p.bytes.placed, .bytes_read = p.bytes.read, .pieces = p.bytes.pieces,
		.open_ns = p.times.open_ns, .plan_ns = p.times.plan_ns,
		.read_ns = p.times.read_ns, .threads = p.times.threads, .over = p.over};
	return 0;
}

int vckpt_load_exchanged(struct vckpt_load *load, struct vckpt_load_exchange *ret_exchange)
{
	bool fits = ret_exchange && ret_exchange->size == sizeof *ret_exchange;
	struct load_exchange_result x;
	int r = load && fits ? loader_exchanged(loader_of(load), &x) : -EINVAL;

	if (r < 0)
		return r;
	*ret_exchange = (struct vckpt_load_exchange){.size = sizeof *ret_exchange, .chosen = x.chosen, .ranks = x.ranks,
		.bytes_sent = x.sent, .bytes_got = x.got, .bytes_shared = x.shared, .bytes_wanted = x.wanted,
		.why = x.why};
	return 0;
}

/* ---- lists ---- */

static size_t names_show(const struct loader_names *names, const char *const **ret_names)
{
	if (ret_names)
		*ret_names = (const char *const *)names->all;
	return names->n;
}

size_t vckpt_load_missing(const struct vckpt_load *load, const char *const **ret_names)
{
	return load ? names_show(loader_missing(loader_of(load)), ret_names) : 0;
}

size_t vckpt_load_unexpected(const struct vckpt_load *load, const char *const **ret_names)
{
	return load ? names_show(loader_unexpected(loader_of(load)), ret_names) : 0;
}

size_t vckpt_load_lost_count(const struct vckpt_load *load)
{
	const struct loader_lost *lost;

	return load ? loader_lost(loader_of(load), &lost) : 0;
}

int vckpt_load_lost(const struct vckpt_load *load, size_t i, struct vckpt_load_lost *ret_lost)
{
	const struct loader_lost *lost;

	if (!ret_lost)
		return -EINVAL;
	if (!load || i >= loader_lost(loader_of(load), &lost))
		return -ENOENT;
	*ret_lost = (struct vckpt_load_lost){.component = lost[i].component, .name = lost[i].name, .box = lost[i].box,
		.ndim = lost[i].ndim, .code = lost[i].code, .why = lost[i].why};
	return 0;
}
