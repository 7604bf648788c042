/* SPDX-License-Identifier: Apache-2.0
 *
 * repack_find: packs of which little lives. The manifests say how much of a pack each step refers to; the step that
 * refers to most of it gives a lower bound. Where that is below the limit, the parts of all steps that use the pack say
 * which objects live, and its footer how much there is, so that heads and alignment do not count. Packs of records are
 * left out: a step that is written anew leaves them behind. */
#include "core/upkeep/repack_internal.h"

#include <string.h>

#include "core/base/array.h"
#include "core/base/bisect.h"
#include "core/base/log.h"
#include "core/upkeep/usage.h"

struct repack_drop *repack_drop_find(struct upkeep_repack *p, const char *pack)
{
	int64_t at = base_search(i, (uint32_t)0, p->ndrops, strcmp(p->drops[i].pack, pack));

	return at < 0 || p->drops[at].stays ? NULL : &p->drops[at];
}

static int compare_drops(const void *a, const void *b)
{
	return strcmp(((const struct repack_drop *)a)->pack, ((const struct repack_drop *)b)->pack);
}

/* limit / 100 of that many bytes */
static bool below(uint64_t live, unsigned limit, uint64_t of)
{
	return (double)live * 100 < (double)limit * (double)of;
}

static int drops_guess(struct upkeep_repack *p, const struct upkeep_usage *u, unsigned limit)
{
	for (uint32_t i = 0; i < u->nfiles; i++) {
		const struct upkeep_usage_file *f = &u->files[i];
		struct pack_name name;

		if (!f->pack || !f->steps || f->base || !below(f->live_bytes, limit, f->size) ||
			pack_name_parse(f->name, &name) < 0 || strcmp(name.class, "meta") == 0)
			continue;
		if (base_array_more(p->drops, p->ndrops) < 0)
			return -ENOMEM;
		p->drops[p->ndrops] = (struct repack_drop){.pack = strdup(f->name), .size = f->size};
		if (!p->drops[p->ndrops].pack)
			return -ENOMEM;
		p->ndrops++;
	}
	if (p->ndrops)
		qsort(p->drops, p->ndrops, sizeof *p->drops, compare_drops);
	return 0;
}

/* ---- what lives ---- */

/* Counts; `place` of a struct thin. */
static int count_live(struct thin *t, const char *pack, const struct pack_object_ref *ref, struct thin_place *ret_p)
{
	struct upkeep_repack *p = t->arg;
	struct repack_drop *d = repack_drop_find(p, pack);
	int r = d ? verify_set_add(&p->seen, verify_place(pack, ref, NULL, 0)) : 0;

	(void)ret_p;
	if (r < 0)
		return base_no_memory(t->err);
	if (r)
		d->live += ref->stored_len;
	return 0;
}

static int step_add(struct upkeep_repack *p, const struct thin *t, const struct upkeep_usage_step *step)
{
	const size_t uses = p->nuses;

	for (uint32_t i = 0; i < t->m.npacks; i++) {
		struct repack_drop *d = repack_drop_find(p, t->m.packs[i].pack);

		if (!d)
			continue;
		if (base_array_more(p->uses, p->nuses) < 0)
			return base_no_memory(t->err);
		p->uses[p->nuses++] = (struct repack_use){(uint32_t)p->nsteps, (uint32_t)(d - p->drops)};
	}
	if (p->nuses == uses)
		return 1;
	if (base_array_more(p->steps, p->nsteps) < 0 || !(p->steps[p->nsteps].run = strdup(t->run)))
		return base_no_memory(t->err);
	p->steps[p->nsteps].step = step->step;
	p->steps[p->nsteps++].entry = step->entry;
	return 0;
}

/* Without the parts of one of its steps it is not known what of a pack lives. */
static void step_unread(struct upkeep_repack *p, struct thin *t, int r)
{
	for (uint32_t i = 0; i < t->m.npacks; i++) {
		struct repack_drop *d = repack_drop_find(p, t->m.packs[i].pack);

		if (d)
			d->stays = true;
	}
	if (r != -ENOENT)
		base_warning("packs that %s uses are not written anew: %s", t->run, t->err->text);
}

static int step_look(struct upkeep_repack *p, const char *run, const struct upkeep_usage_step *step,
	struct base_error *err)
{
	base_cleanup(thin_release) struct thin t = {.store = p->store, .run = run, .err = err, .arg = p,
		.place = count_live};
	const struct commit_list_step named = {.step = step->step, .entry = step->entry,
		.commit.manifest = step->manifest};
	int r = store_manifest_get(p->store, run, &step->manifest, &t.m, err);

	if (r < 0)
		return r == -ENOENT ? 0 : r; /* removed meanwhile */
	r = step_add(p, &t, step);
	if (r != 0)
		return r < 0 ? r : 0;
	proto_manifest_release(&t.m);
	t.m = (struct proto_manifest){0};
	r = thin_open(&t, &named);
	if (r == 0)
		r = thin_ranks(&t);
	if (r < 0 && r != -ENOMEM)
		step_unread(p, &t, r);
	return r == -ENOMEM ? r : 0;
}

static int steps_look(struct upkeep_repack *p, const struct upkeep_usage *u, struct base_error *err)
{
	int r = 0;

	for (uint32_t i = 0; r == 0 && i < u->nsteps; i++) {
		if (p->options->cancelled && p->options->cancelled())
			return base_error_set(err, -EINTR, "interrupted");
		r = step_look(p, u->runs[u->steps[i].run].name, &u->steps[i], err);
	}
	return r;
}

/* ---- what there is ---- */

static int objects_sum(struct store *s, struct repack_drop *d, struct base_error *err)
{
	struct pack_footer f = {0};
	struct pack *pack;
	int r = store_pack_get(s, d->pack, &pack, err);

	if (r < 0)
		return r;
	r = pack_footer_read(pack, &f, err);
	for (uint64_t i = 0; r == 0 && i < f.count; i++)
		d->objects += f.objects[i].stored_len;
	pack_footer_free(&f);
	store_pack_put(s, pack);
	return r;
}

static int drops_decide(struct upkeep_repack *p, unsigned limit, struct upkeep_repack_found *ret_f)
{
	for (uint32_t i = 0; i < p->ndrops; i++) {
		struct repack_drop *d = &p->drops[i];
		struct base_error why = {0};
		int r = d->stays ? 0 : objects_sum(p->store, d, &why);

		if (r == -ENOMEM)
			return r;
		if (r < 0)
			base_warning("%s is not written anew: %s", d->pack, why.text);
		d->stays |= r < 0 || !below(d->live, limit, d->objects);
		ret_f->packs += !d->stays;
		ret_f->pack_bytes += d->stays ? 0 : d->size;
		ret_f->live_bytes += d->stays ? 0 : d->live;
	}
	return 0;
}

/* Steps that use none of them are forgotten. Uses are in order of their steps. */
static void steps_decide(struct upkeep_repack *p)
{
	size_t kept = 0, use = 0;

	for (size_t i = 0; i < p->nsteps; i++) {
		bool any = false;

		for (; use < p->nuses && p->uses[use].step == i; use++)
			any |= !p->drops[p->uses[use].drop].stays;
		if (any)
			p->steps[kept++] = p->steps[i];
		else
			free(p->steps[i].run);
	}
	p->nsteps = kept;
}

int upkeep_repack_find(struct upkeep_repack *p, unsigned percent, struct upkeep_repack_found *ret_f,
	struct base_error *err)
{
	const struct upkeep_usage_question q = {.store = p->store};
	struct base_error own = {0};
	struct upkeep_usage u;
	int r;

	err = err ? err : &own;
	*ret_f = (struct upkeep_repack_found){0};
	p->finds = true;
	r = upkeep_usage_read(&q, &u, err);
	if (r == 0)
		r = drops_guess(p, &u, percent) < 0 ? base_no_memory(err) : 0;
	if (r == 0 && p->ndrops)
		r = steps_look(p, &u, err);
	if (r == 0 && drops_decide(p, percent, ret_f) < 0)
		r = base_no_memory(err);
	upkeep_usage_release(&u);
	verify_set_release(&p->seen);
	if (r < 0)
		return r;
	steps_decide(p);
	ret_f->steps = p->steps;
	ret_f->n = p->nsteps;
	return 0;
}
