/* SPDX-License-Identifier: Apache-2.0
 *
 * fill_burst: pieces that follow each other in a pack and are wanted whole, read at once (burst_internal.h). */
#include "core/load/burst_internal.h"
#include "core/tensor/boxes.h"

/* Some box wants all of the piece. */
static bool piece_is_whole(const struct load_fill *f, size_t first, size_t end)
{
	for (size_t i = first; i < end; i++) {
		const struct tensor_shape *s = &need_object(f, &f->needs[i])->grid.shape;
		struct tensor_box piece, part;

		fill_need_boxes(f, &f->needs[i], &piece, &part);
		if (tensor_box_items(s, &piece) == tensor_box_items(s, &part))
			return true;
	}
	return false;
}

static uint8_t *piece_place(const struct load_fill *f, size_t first, size_t end)
{
	uint8_t *place = NULL;

	for (size_t i = first; i < end && !place; i++)
		place = fill_need_place(f, &f->needs[i]);
	return place;
}

/* ends: of the needs of each piece. */
static void burst_collect(struct burst *s, const struct load_fill *f, size_t first, size_t end, size_t *ends)
{
	uint32_t pack = f->needs[first].pack;

	for (size_t i = first, next; i < end && f->needs[i].pack == pack; i = next) {
		const struct store_object_ref *ref = need_ref(f, &f->needs[i]);

		next = fill_group_end(f, i);
		if (!burst_fits(s, ref) || !piece_is_whole(f, i, next))
			return;
		ends[s->n] = next;
		burst_add(s, ref, piece_place(f, i, next));
	}
}

size_t fill_burst(struct fill_worker *w, size_t first, size_t end)
{
	size_t ends[BURST_PIECES];
	struct burst s;

	if (!burst_begin(&s, w, w->f->needs[first].pack))
		return first;
	burst_collect(&s, w->f, first, end, ends);
	if (!burst_read(&s))
		return first;
	for (unsigned i = 0; i < s.n; i++) {
		const uint8_t *bytes = burst_take(&s, i);

		if (!bytes)
			return first;
		fill_place(w->f, first, ends[i], bytes, s.piece[i].place);
		first = ends[i];
	}
	return first;
}
