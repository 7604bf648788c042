/* SPDX-License-Identifier: Apache-2.0
 *
 * mend_pack: damaged packs. The footer of a pack lists its objects. If the footer is damaged, the objects are known
 * from the same pack in a copy of the store, or from those footer entries whose objects are right, and from the steps'
 * references. If these objects follow each other by the arithmetic of extents and fill the file, they are all that
 * there are, and the footer is made again.
 *
 * A file whose head is good and names another pack is that pack in the wrong place. It stays, since its objects may be
 * nowhere else, and mend says where it belongs. A pack of another store ends the mending: vckpt.store itself may be the
 * wrong file, and a pack that is written again becomes one of this store.
 *
 * Bad objects are looked for elsewhere (mend_source.c). If any is found, or if footer, head or padding can be made
 * good, the pack is written again (mend_image.c); what stays lost is copied as it is. */
#include "core/upkeep/mend_pack.h"

#include <stdio.h>

#include "core/base/array.h"
#include "core/base/plural.h"
#include "core/upkeep/verify_internal.h"

#define GUESS_STRANGE 256 /* after so many entries in a row without an object the footer has ended */

struct packs { struct mend *m; struct mend_pack **all; size_t n; };

void mend_pack_free(struct mend_pack *p)
{
	if (!p)
		return;
	for (size_t i = 0; i < p->n; i++)
		base_buf_release(&p->objects[i].checks);
	free(p->objects);
	free(p);
}

int mend_pack_open(struct store *s, const char *name, const char *storage_name, uint64_t size,
	struct pack **ret_p)
{
	struct pack *p = calloc(1, sizeof *p);
	int r = p ? s->storage->ops->file_open(s->storage, storage_name, &p->file, &p->size) : -ENOMEM;

	if (r < 0) {
		free(p);
		return r;
	}
	p->storage = s->storage;
	memcpy(p->store_id, s->info.id, sizeof p->store_id);
	snprintf(p->name, sizeof p->name, "%s", name);
	if (size)
		p->size = size;
	*ret_p = p;
	return 0;
}

/* ---- whose packs ---- */

/* Which pack a file of packs/ is, by its head if that is good: */
enum mend_whose {
	MEND_PACK_OWN,                  /* the one that its name says; or its head is damaged or not read */
	MEND_PACK_OTHER,                /* another one of this store: `other` */
	MEND_PACK_STRANGE,              /* one of another store */
};

static enum mend_whose pack_whose(struct store *s, const char *file, char other[static PACK_NAME_MAX])
{
	struct file_name n;
	uint8_t head[PACK_HEAD_BYTES], good[PACK_HEAD_BYTES];
	struct storage_file *f;
	uint64_t size;
	size_t len;
	int r = s->storage->ops->file_open(s->storage, file, &f, &size);

	if (r < 0)
		return MEND_PACK_OWN;
	r = size < sizeof head ? -ENODATA : s->storage->ops->file_read(f, 0, head, sizeof head);
	s->storage->ops->file_close(f);
	len = r < 0 ? PACK_NAME_MAX : base_get16(head + 32);
	if (len >= PACK_NAME_MAX)
		return MEND_PACK_OWN;
	snprintf(other, PACK_NAME_MAX, "%.*s", (int)len, (const char *)head + 34);
	pack_head_encode(head + 16, other, good);
	if (memcmp(head, good, sizeof head) != 0)
		return MEND_PACK_OWN;
	if (memcmp(head + 16, s->info.id, 16) != 0)
		return MEND_PACK_STRANGE;
	file_name_parse(file, &n);
	return strcmp(n.pack, other) == 0 ? MEND_PACK_OWN : MEND_PACK_OTHER;
}

int mend_packs_own(struct mend *m)
{
	char name[PACK_NAME_MAX];

	for (size_t i = 0; i < m->nfaults; i++)
		if (strncmp(m->faults[i].file, "packs/", 6) == 0
		    && pack_whose(m->store, m->faults[i].file, name) == MEND_PACK_STRANGE)
			return base_error_set(m->err, -EINVAL,
				"%s is a pack of another store: either files of two stores are mixed here, or "
				"vckpt.store comes from another store. Put the right vckpt.store back, or move the "
				"other store's files away; until then vckpt mend changes nothing", m->faults[i].file);
	return 0;
}

/* 1: the file is another pack's, which is reported once. */
static int pack_misplaced(struct mend *m, const char *file)
{
	char other[PACK_NAME_MAX], path[STORAGE_NAME_MAX];

	if (pack_whose(m->store, file, other) != MEND_PACK_OTHER || pack_path(other, path) < 0)
		return 0;
	if (!m->again)
		mend_line(m, UPKEEP_MEND_LEFT, file, "this is pack %s under another pack's name: move it to %s, or, if "
			"that file is whole, move this one away; then mend again. Until then vckpt mend leaves it as "
			"it is", other, path);
	return 1;
}

/* ---- which packs ---- */

static int packs_add(struct packs *k, const char *file)
{
	struct file_name n;
	struct mend_pack *p;

	for (size_t i = 0; i < k->n; i++)
		if (strcmp(k->all[i]->path, file) == 0)
			return 0;
	if (pack_misplaced(k->m, file) || file_name_parse(file, &n) != FILE_PACK)
		return 0;
	p = base_array_more(k->all, k->n) == 0 ? calloc(1, sizeof *p) : NULL;
	if (!p)
		return -ENOMEM;
	snprintf(p->name, sizeof p->name, "%s", n.pack);
	snprintf(p->path, sizeof p->path, "%s", file);
	k->all[k->n++] = p;
	return 0;
}

static int object_add(struct mend_pack *p, const struct pack_object_ref *ref)
{
	if (base_array_more(p->objects, p->n) < 0)
		return -ENOMEM;
	p->objects[p->n] = (struct mend_object){.ref = *ref};
	p->objects[p->n++].ref.pack = 0;
	return 0;
}

/* ---- what steps refer to ---- */

static int on_item(struct verify_walker *w, const struct verify_item *it)
{
	struct packs *k = w->arg;

	for (size_t i = 0; i < k->n; i++) {
		struct mend_pack *p = k->all[i];

		if (strcmp(p->name, it->pack) != 0)
			continue;
		if (it->what != VERIFY_PACK && !p->footer_good)
			return object_add(p, it->ref);
		if (it->what == VERIFY_PACK && !p->footer_good)
			p->size = it->size;
	}
	return 0;
}

static int walk_list(struct packs *k, struct commit_list *l)
{
	int r = 0;

	for (size_t i = 0; r == 0 && i < commit_list_count(l); i++) {
		const struct verify_step step = {commit_list_run(l), commit_list_at(l, i)};
		struct verify_walker w = {.store = k->m->store, .step = &step, .item = on_item, .arg = k};

		r = verify_walk(&w);
	}
	return r;
}

static int walk_all(struct packs *k)
{
	char **runs;
	size_t n;
	int r = commit_runs(k->m->store, &runs, &n, k->m->err);

	if (r < 0)
		return r;
	for (size_t i = 0; r == 0 && i < n; i++) {
		struct commit_list *l;

		r = commit_list_open(k->m->store, runs[i], true, &l, k->m->err);
		if (r == 0) {
			r = walk_list(k, l);
			commit_list_close(l);
		}
	}
	commit_runs_free(runs, n);
	return r;
}

/* ---- the table of objects ---- */

static int ref_order(const void *a, const void *b)
{
	const struct mend_object *x = a, *y = b;

	if (x->ref.offset != y->ref.offset)
		return x->ref.offset < y->ref.offset ? -1 : 1;
	return (x->ref.stored_len > y->ref.stored_len) - (x->ref.stored_len < y->ref.stored_len);
}

/* Sorts by offset and keeps each object once; drops those that cannot be at their place or that overlap another. */
static void table_sort(struct mend_pack *p)
{
	uint64_t room = p->size > PACK_TAIL_BYTES ? p->size - PACK_TAIL_BYTES : 0, end = 0;
	size_t kept = 0;

	if (p->n)
		qsort(p->objects, p->n, sizeof *p->objects, ref_order);
	for (size_t i = 0; i < p->n; i++) {
		const struct pack_object_ref *ref = &p->objects[i].ref;

		if (pack_object_ref_check(ref, room) < 0 || ref->offset < end)
			continue;
		end = ref->offset + base_max(ref->stored_len, 1);
		p->objects[kept++] = p->objects[i];
	}
	p->n = kept;
}

/* Do the objects follow each other without a gap, up to the footer that they make? */
static int table_complete(struct mend_pack *p)
{
	struct pack_object_ref *refs = calloc(p->n + 1, sizeof *refs);
	uint64_t end = PACK_HEAD_BYTES;
	int r = refs ? 0 : -ENOMEM;

	for (size_t i = 0; refs && i < p->n; i++)
		refs[i] = p->objects[i].ref;
	for (uint64_t i = 0; r == 0 && i < p->n;) {
		if (refs[i].offset != base_align(end, pack_object_align(refs[i].codec, refs[i].stored_len)))
			r = -BASE_EDAMAGED;
		else
			r = pack_extent_bounds(refs, p->n, i, &i, &end);
	}
	free(refs);
	p->complete = r == 0 && p->size == base_align(end, PACK_FOOTER_ALIGN) + p->n * PACK_ENTRY_BYTES +
		PACK_TAIL_BYTES;
	return r == -ENOMEM ? r : 0;
}

/* The footer of a file of that size; false: it is damaged. */
static bool table_footer(struct mend_pack *p, struct store *s, uint64_t size, int *ret_error)
{
	struct pack_footer footer = {0};
	struct pack *file;
	bool good;

	if (mend_pack_open(s, p->name, p->path, size, &file) < 0)
		return false;
	good = file->size >= PACK_HEAD_BYTES + PACK_TAIL_BYTES &&
		pack_footer_read(file, &footer, NULL) == 0;
	if (good && !p->size)
		p->size = file->size;
	pack_close(file);
	if (good)
		p->n = 0;
	for (uint64_t i = 0; good && *ret_error == 0 && i < footer.count; i++)
		*ret_error = object_add(p, &footer.objects[i]);
	pack_footer_free(&footer);
	return good;
}

/* Takes the entries of a damaged footer whose objects are right: only there are objects known to which no step
 * refers. */
static int table_guess(struct mend *m, struct mend_pack *p)
{
	uint8_t bytes[PACK_ENTRY_BYTES];
	struct pack *file;
	unsigned strange = 0;
	int r = 0;

	if (!p->size || mend_pack_open(m->store, p->name, p->path, p->size, &file) < 0)
		return 0;
	for (uint64_t at = p->size - PACK_TAIL_BYTES;
		r == 0 && at >= PACK_HEAD_BYTES + PACK_ENTRY_BYTES && strange < GUESS_STRANGE;) {
		struct pack_object_ref ref;
		int good = 0;

		at -= PACK_ENTRY_BYTES;
		if (pack_read(file, at, bytes, sizeof bytes, NULL) == 0 && pack_entry_decode(bytes, at, &ref) == 0)
			good = mend_object_good(file, &ref);
		strange = good > 0 ? 0 : strange + 1;
		r = good > 0 ? object_add(p, &ref) : good;
	}
	pack_close(file);
	return r;
}

static int table_make(struct mend *m, struct mend_pack *p)
{
	bool copy = m->from && memcmp(m->from->info.id, m->store->info.id, 16) == 0;
	int r = 0;

	if (!p->footer_good && p->size) /* the file may have grown */
		p->footer_good = table_footer(p, m->store, p->size, &r);
	if (!p->footer_good && !(copy && p->size && table_footer(p, m->from, p->size, &r)))
		r = r < 0 ? r : table_guess(m, p);
	table_sort(p);
	return r < 0 ? r : table_complete(p);
}

/* ---- what is bad ---- */

bool mend_object_hit(const struct pack_object_ref *ref, uint64_t offset, uint64_t len)
{
	uint64_t checks = pack_object_checks_bytes(ref->codec, ref->raw_len);

	return (offset < ref->offset + ref->stored_len && ref->offset < offset + len)
		|| (offset < ref->checks + checks && ref->checks < offset + len);
}

static bool fault_overlaps(const struct mend_fault *f, const struct pack_object_ref *ref)
{
	return f->len == 0 || mend_object_hit(ref, f->offset, f->len);
}

static bool object_suspect(const struct mend *m, const struct mend_pack *p, const struct mend_object *o)
{
	for (size_t i = 0; p->footer_good && i < m->nfaults; i++)
		if (strcmp(m->faults[i].file, p->path) == 0 && fault_overlaps(&m->faults[i], &o->ref))
			return true;
	return !p->footer_good;
}

static int objects_look(struct mend *m, struct mend_pack *p)
{
	struct pack *file = NULL;
	int r = 0;

	if (mend_pack_open(m->store, p->name, p->path, p->size, &file) < 0)
		file = NULL;
	for (size_t i = 0; r >= 0 && i < p->n; i++) {
		if (!object_suspect(m, p, &p->objects[i]))
			continue;
		r = file ? mend_object_good(file, &p->objects[i].ref) : 0;
		p->objects[i].bad = r == 0;
	}
	pack_close(file);
	return r < 0 ? r : 0;
}

/* ---- what can be done ---- */

/* Is a fault outside all objects: in the head, padding, footer or tail, or of the whole file? */
static bool fault_beside(const struct mend *m, const struct mend_pack *p)
{
	for (size_t i = 0; i < m->nfaults; i++) {
		bool object = false;

		if (strcmp(m->faults[i].file, p->path) != 0)
			continue;
		for (size_t k = 0; k < p->n && !object; k++)
			object = m->faults[i].len && fault_overlaps(&m->faults[i], &p->objects[k].ref);
		if (!object)
			return true;
	}
	return false;
}

static void pack_treat(struct mend *m, const struct mend_pack *p)
{
	for (size_t i = 0; i < m->nfaults; i++) {
		struct mend_fault *f = &m->faults[i];
		bool lost = strcmp(f->file, p->path) != 0, any = false;

		for (size_t k = 0; k < p->n && !lost; k++)
			if (fault_overlaps(f, &p->objects[k].ref)) {
				any |= p->objects[k].bad;
				lost = p->objects[k].bad && !p->objects[k].from;
			}
		if (!lost && (any || p->complete))
			f->treated = true;
	}
}

/* Takes p over. */
static int pack_plan(struct mend *m, struct mend_pack *p)
{
	size_t bad = 0, found = 0, other = 0;
	struct mend_action *a;
	char how[200] = "";

	for (size_t i = 0; i < p->n; i++) {
		bad += p->objects[i].bad;
		found += p->objects[i].bad && p->objects[i].from;
		other += p->objects[i].from && p->objects[i].from == m->from;
	}
	if (!p->size || (!found && !(p->complete && bad < base_max(p->n, 1) && fault_beside(m, p)))) {
		mend_pack_free(p);
		return 0;
	}
	a = mend_act(m, MEND_PACK, p->path, NULL);
	if (!a) {
		mend_pack_free(p);
		return -ENOMEM;
	}
	a->pack = p;
	if (other)
		snprintf(how, sizeof how, ", %zu of them from %.120s", other, m->from->path);
	mend_line(m, UPKEEP_MEND_MEND, p->path, "written anew: %zu of %zu damaged %s found elsewhere%s%s",
		found, bad, base_plural(bad, "object was", "objects were"), how,
		p->footer_good ? "" : p->complete ? "; its footer is built again" : "; its footer stays damaged");
	pack_treat(m, p);
	return 0;
}

int mend_packs(struct mend *m)
{
	struct packs k = {.m = m};
	int r = 0;

	for (size_t i = 0; r == 0 && i < m->nfaults; i++)
		if (!m->faults[i].treated && strncmp(m->faults[i].file, "packs/", 6) == 0)
			r = packs_add(&k, m->faults[i].file);
	for (size_t i = 0; r == 0 && i < k.n; i++)
		k.all[i]->footer_good = table_footer(k.all[i], m->store, 0, &r);
	if (r == 0 && k.n)
		r = walk_all(&k);
	for (size_t i = 0; r == 0 && i < k.n; i++)
		r = table_make(m, k.all[i]);
	for (size_t i = 0; r == 0 && i < k.n; i++)
		r = objects_look(m, k.all[i]);
	if (r == 0 && k.n)
		r = mend_sources_find(m, k.all, k.n);
	for (size_t i = 0; i < k.n; i++) {
		struct mend_pack *p = k.all[i];

		if (r == 0)
			r = pack_plan(m, p);
		else
			mend_pack_free(p);
	}
	free(k.all);
	return r;
}
