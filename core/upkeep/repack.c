/* SPDX-License-Identifier: Apache-2.0
 *
 * repack: see repack.h. A step is written anew as prune --thin does it (thin.c), with this besides: on a first look at
 * its parts each object that is to be written anew is noted, once; then they are written (repack_move.c); then the
 * parts are, with where the objects are now. An object of an earlier step of the session is used if that step is still
 * visible after it was named as a base, as any save would do. */
#include "core/upkeep/repack_internal.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "core/base/array.h"
#include "core/base/le.h"
#include "core/commit/incoming/incoming.h"
#include "core/step/open.h"

/* ---- the session ---- */

int upkeep_repack_open(struct store *s, const struct upkeep_repack_options *o, struct upkeep_repack **ret_p,
	struct base_error *err)
{
	struct upkeep_repack *p = *ret_p = calloc(1, sizeof *p);

	if (!p)
		return base_no_memory(err);
	p->store = s;
	p->options = o;
	return 0;
}

void upkeep_repack_close(struct upkeep_repack *p)
{
	if (!p)
		return;
	for (size_t i = 0; i < p->by_digest.n; i++)
		free(p->objects[i]);
	for (uint32_t i = 0; i < p->npacks; i++)
		free(p->packs[i].name);
	for (uint32_t i = 0; i < p->ndrops; i++)
		free(p->drops[i].pack);
	for (size_t i = 0; i < p->nsteps; i++)
		free(p->steps[i].run);
	base_table_release(&p->by_digest);
	verify_set_release(&p->seen);
	commit_list_close(p->list);
	commit_list_close(p->puts);
	base_pool_free(p->pool);
	free(p->objects);
	free(p->packs);
	free(p->drops);
	free(p->steps);
	free(p->uses);
	free(p->classes);
	free(p->owners);
	free(p->todo);
	free(p);
}

/* ---- objects ---- */

static int class_number(struct upkeep_repack *p, const char *class, uint32_t *ret_class)
{
	uint32_t i = 0;

	while (i < p->nclasses && strcmp(p->classes[i], class) != 0)
		i++;
	if (i == p->nclasses) {
		if (base_array_more(p->classes, p->nclasses) < 0)
			return -ENOMEM;
		snprintf(p->classes[p->nclasses++], sizeof *p->classes, "%s", class);
	}
	*ret_class = i;
	return 0;
}

/* Is what is in this pack written anew? Blobs in a pack of records are in any case, because all records are. */
static int look_at_pack(struct upkeep_repack *p, const char *pack)
{
	struct pack_name name;

	if (p->last_pack == pack)
		return 0;
	if (pack_name_parse(pack, &name) < 0)
		return -EINVAL;
	p->last_drops = !p->finds || repack_drop_find(p, pack) || strcmp(name.class, "meta") == 0;
	p->last_pack = pack;
	return class_number(p, name.class, &p->last_class);
}

static struct repack_object *object_find(struct upkeep_repack *p, const struct pack_object_ref *ref, uint32_t hash)
{
	size_t next = 0;
	uint32_t at;

	while ((at = base_table_next(&p->by_digest, hash, &next)) != BASE_TABLE_NONE) {
		struct repack_object *o = p->objects[at];

		if (o->class == p->last_class && o->from.kind == ref->kind && o->from.raw_len == ref->raw_len &&
			base_digest_equal(&o->from.digest, &ref->digest))
			return o;
	}
	return NULL;
}

/* Is what that step has written to be used? It is named as a base once a step. */
static int owner_holds(struct thin *t, uint32_t number, bool *ret_holds)
{
	struct upkeep_repack *p = t->arg;
	struct repack_owner *o = &p->owners[number];
	int r = 0;

	if (!o->gone && number != p->nowners - 1 && o->named != p->nowners) {
		r = commit_attempt_base(t->attempt, o->run, o->entry, &o->manifest, t->err);
		o->gone = r == -ESTALE;
		o->named = p->nowners;
	}
	*ret_holds = !o->gone;
	return r == -ESTALE ? 0 : r;
}

static int object_add(struct thin *t, struct repack_object *o, uint32_t hash, const char *pack,
	const struct pack_object_ref *ref)
{
	struct upkeep_repack *p = t->arg;
	const uint32_t n = (uint32_t)p->by_digest.n;

	if (base_array_room(p->todo, p->todo_room, p->ntodo + 1) < 0)
		return base_no_memory(t->err);
	if (!o) {
		if (base_array_more(p->objects, n) < 0 || base_table_reserve(&p->by_digest, 1) < 0 ||
			!(p->objects[n] = calloc(1, sizeof **p->objects)))
			return base_no_memory(t->err);
		o = p->objects[n];
		base_table_add(&p->by_digest, hash, n);
	}
	*o = (struct repack_object){.from = *ref, .pack = pack, .class = p->last_class, .owner = p->nowners - 1,
		.layout = t->layout->from, .tensor = t->tensor, .order = p->ntodo};
	p->todo[p->ntodo++] = o;
	p->todo_bytes += ref->raw_len;
	return 0;
}

static int repack_place(struct thin *t, const char *pack, const struct pack_object_ref *ref, struct thin_place *ret_p)
{
	struct upkeep_repack *p = t->arg;
	const uint32_t hash = base_table_hash(ref->digest.bytes, sizeof ref->digest.bytes);
	struct repack_object *o;
	bool holds = false;
	int r = look_at_pack(p, pack);

	if (r < 0)
		return base_error_set(t->err, r, "pack %s: %s", pack, base_error_name(r));
	if (!p->last_drops)
		return 0;
	o = object_find(p, ref, hash);
	if (o && (r = owner_holds(t, o->owner, &holds)) < 0)
		return r;
	if (!t->writes)
		return holds ? 0 : object_add(t, o, hash, pack, ref);
	if (!holds)
		return base_error_set(t->err, -BASE_EFORMAT, "a part was read twice, and its rows were not the same");
	*ret_p = (struct thin_place){&o->to, p->packs[o->to_pack].name, p->packs[o->to_pack].size};
	return 1;
}

/* ---- the step ---- */

/* Opens the run's list, or reads on. */
static int list_read(struct upkeep_repack *p, const char *run, struct commit_list **l, struct base_error *err)
{
	int r;

	if (*l && strcmp(commit_list_run(*l), run) != 0)
		commit_list_close(base_steal(*l));
	r = *l ? commit_list_refresh(*l, err) : commit_list_open_newest(p->store, run, l, err);
	return r < 0 ? r : 0;
}

static int list_turn(struct upkeep_repack *p, const char *run, uint64_t step, uint64_t entry,
	struct commit_list_step *ret_step, struct base_error *err)
{
	const struct commit_list_step *now;
	int r = list_read(p, run, &p->list, err);

	if (r == 0)
		r = commit_list_know_step(p->list, step, err);
	if (r < 0)
		return r;
	now = commit_list_find(p->list, step);
	if (!now || now->entry != entry)
		return base_error_set(err, -ESTALE, "%s: step %" PRIu64 " was removed or replaced by another writer "
			"just now", run, step);
	*ret_step = *now;
	return 0;
}

/* A save names its base and then looks whether it is still there; if not, it writes everything again. So the steps that
 * a job goes on from stay as they are while it is alive: the highest, and the one that was committed last. */
static int step_is_free(struct upkeep_repack *p, const struct commit_list_step *step, struct base_error *err)
{
	const char *run = commit_list_run(p->list);
	base_cleanup_free struct commit_launch_info *infos = NULL;
	uint64_t newest = 0;
	size_t n;
	int r;

	for (size_t i = 0; i < commit_list_count(p->list); i++)
		newest = base_max(newest, commit_list_at(p->list, i)->entry);
	if (step->entry != newest && step->step != commit_list_latest(p->list)->step)
		return 0;
	r = commit_launches(p->store, &infos, &n, err);
	for (size_t i = 0; r == 0 && i < n; i++)
		if (infos[i].state != COMMIT_DEAD && strcmp(infos[i].run, run) == 0)
			r = base_error_set(err, -BASE_EBUSY, "%s/%" PRIu64 ": a writer%s on %s, and may go on from "
				"this step: repack it when a newer step is there", run, step->step, infos[i].state ==
				COMMIT_ALIVE ? " is at work" : " may be at work", infos[i].host);
	return r;
}

/* Has it nothing to write anew? Packs of its own repacking have only what it needs. */
static bool done_before(struct upkeep_repack *p, const struct thin *t, const char *attempt)
{
	const size_t len = strlen(attempt);
	bool own = commit_attempt_rewritten(attempt), drops = false;

	for (uint32_t i = 0; i < t->m.npacks; i++) {
		own &= strncmp(t->m.packs[i].pack, attempt, len) == 0 && t->m.packs[i].pack[len] == '-';
		drops |= repack_drop_find(p, t->m.packs[i].pack) != NULL;
	}
	return p->finds ? !drops : own;
}

/* What was written belongs to the step as it is now, or, if it is not visible, to no one. */
static void step_owns(struct upkeep_repack *p, struct thin *t, uint64_t entry, int r, struct upkeep_repacked *ret_r)
{
	struct repack_owner *o = &p->owners[p->nowners - 1];
	struct commit_list_step now;

	o->gone = r < 0 || list_turn(p, t->run, t->m.step, entry, &now, NULL) < 0;
	if (o->gone)
		return;
	o->entry = entry;
	o->manifest = now.commit.manifest;
	for (uint32_t i = 0; i < p->npacks; i++)
		if (strcmp(p->packs[i].name, t->meta_name) == 0)
			p->packs[i].size = t->ranks[thin_first(t)].packs[THIN_META].size;
	for (size_t i = 0; i < p->ntodo; i++)
		ret_r->bytes += p->todo[i]->to.stored_len;
	ret_r->objects += p->ntodo;
}

/* That it needs now; not known where it is replaced already. */
static uint32_t packs_count(struct upkeep_repack *p, const struct thin *t)
{
	struct proto_manifest m = {0};
	uint32_t n = 0;

	if (store_manifest_get(p->store, t->run, &p->owners[p->nowners - 1].manifest, &m, NULL) == 0)
		n = m.npacks;
	proto_manifest_release(&m);
	return n;
}

/* ---- whole tensors ---- */

/* Has another rank than 0 a row? */
static int step_is_cut(struct thin *t)
{
	int r = 0;

	for (uint32_t i = 1; r == 0 && i < t->m.nranks; i++) {
		struct store_opened_part part = {0};

		r = store_open_part(t->store, &t->m, i, &part, t->err);
		if (r == 0)
			r = part.part.nchunks > 0;
		store_opened_part_release(&part);
	}
	return r;
}

/* As rank 0, with what earlier steps of the session have. */
static int repack_whole(struct thin *t)
{
	struct upkeep_repack *p = t->arg;
	struct upkeep_whole_base bases[WHOLE_BASES];
	struct upkeep_whole w = {.store = p->store, .run = t->run, .step = p->step, .m = &t->m,
		.attempt = t->attempt, .bases = bases, .threads = p->options->threads, .progress = p->options->progress,
		.arg = p->options->arg, .cancelled = p->options->cancelled};
	int r;

	for (uint32_t i = p->nowners - 1; i-- > 0 && w.nbases < WHOLE_BASES;)
		if (!p->owners[i].gone)
			bases[w.nbases++] = (struct upkeep_whole_base){p->owners[i].run, p->owners[i].entry,
				p->owners[i].manifest};
	r = p->options->whole(&w, t->err);
	p->whole_objects = w.objects;
	p->whole_bytes = w.bytes;
	return r < 0 ? base_error_prefix(t->err, r, "%s/%" PRIu64, t->run, t->m.step) : 0;
}

static int step_write(struct upkeep_repack *p, struct thin *t, const struct commit_list_step *step,
	struct upkeep_repacked *ret_r)
{
	int r;

	if (base_array_more(p->owners, p->nowners) < 0)
		return base_no_memory(t->err);
	p->owners[p->nowners] = (struct repack_owner){.entry = PROTO_NONE};
	snprintf(p->owners[p->nowners++].run, sizeof p->owners->run, "%s", t->run);
	if (!p->pool && !(p->pool = base_pool_new(p->options->threads, 64)))
		return base_no_memory(t->err);
	p->ntodo = 0;
	p->done_bytes = p->todo_bytes = 0;
	p->last_pack = NULL;
	t->place = repack_place;
	t->prepare = repack_move;
	t->arg = p;
	p->step = step;
	p->whole_objects = p->whole_bytes = 0;
	r = thin_attempt(t, step, &ret_r->entry);
	ret_r->objects = p->whole_objects;
	ret_r->bytes = p->whole_bytes;
	step_owns(p, t, ret_r->entry, r, ret_r);
	ret_r->packs = packs_count(p, t);
	p->last_pack = NULL;
	return r;
}

int upkeep_repack_step(struct upkeep_repack *p, const char *run, uint64_t step, uint64_t entry,
	struct upkeep_repacked *ret_r, struct base_error *err)
{
	struct base_error own = {0};
	base_cleanup(thin_release) struct thin t = {.store = p->store, .run = run, .err = err ? err : &own};
	struct commit_list_step now;
	int r;

	*ret_r = (struct upkeep_repacked){.entry = entry};
	if (!p->store->info.list_4)
		return base_error_set(err, -ENOTSUP, "%s was made by an older vckpt: its steps cannot be repacked",
			p->store->path);
	r = list_turn(p, run, step, entry, &now, t.err);
	if (r == 0)
		r = thin_open(&t, &now);
	if (r < 0)
		return r;
	ret_r->packs = ret_r->packs_before = t.m.npacks;
	r = p->options->whole && t.m.nranks > 1 ? step_is_cut(&t) : 0;
	t.whole = r > 0 ? repack_whole : NULL;
	ret_r->before = r == 0 && done_before(p, &t, now.commit.attempt);
	if (r < 0 || ret_r->before)
		return r;
	r = step_is_free(p, &now, t.err);
	if (r == 0)
		r = list_read(p, run, &p->puts, t.err);
	t.list = p->puts;
	if (r == 0)
		r = step_write(p, &t, &now, ret_r);
	if (r == -ENOSPC || r == -EDQUOT)
		return base_error_set(err, r, "%s is full: %s/%" PRIu64 " stays as it was", p->store->path, run, step);
	return r;
}
