/* SPDX-License-Identifier: Apache-2.0
 *
 * same: pieces that are as this saver's last step has them. They are hashed where they are in the caller's memory and
 * not copied; so they need no room in the ring, and half of the time (docs/save.md, Unchanged data is not copied).
 *
 * A piece that is not copied cannot be written any more once the caller may change its memory. So before a save is
 * staged it has to be sure that it can refer to every such piece:
 *
 *   compare  a worker: its XXH3-128 is the one that the last step's save had, which the saver remembers
 *   answer   the persister, meanwhile: that step's commit is still visible, and is named as a base, so nothing of it is
 *            collected from here on; and it is known which attempts the save goes on referring to
 *   settle   a worker: the base's own records have that piece, in an attempt that is kept, in a pack that is there
 *
 * What fails is copied after all, from memory that is still the caller's to leave alone. Only the save at the head of
 * the queue asks, since the others' base is not decided yet; and only pieces are compared that did not change the last
 * time, because one that is compared in vain is hashed twice.
 *
 * No trainer waits for a store. A save asks only if comparing takes as long as the last save's answer took; and if the
 * answer is late, it waits for about as long as copying takes. Then everything is copied, and by the next SAME_REST
 * saves, too.
 *
 * If the caller breaks the rule and changes the memory meanwhile, the hash is that of what was read. If it is that of
 * the base's piece, then what was read is that piece, so the step has bytes that were there, and the part has their
 * hash. */
#include <stdlib.h>
#include <string.h>

#include "core/base/clock.h"
#include "core/save/saver/saver_internal.h"

#define SAME_COMPARED_EACH_NS 8u        /* bytes that a worker compares in that time */
#define SAME_COPIED_EACH_NS 4u
#define SAME_REST 16u

struct saver_patience saver_same_patience;

int saver_same_prepare(struct save_flight *f, const struct base_digest *key, struct base_error *err)
{
	uint64_t n = f->planned->plan.pieces;
	struct saver_pieces *p = calloc(1, sizeof *p);

	f->pieces = p;
	if (p) {
		p->refs = 1;
		p->key = *key;
		p->xxh = malloc((n + 1) * sizeof *p->xxh);
		p->moves = malloc(n + 1);
		p->same = calloc(n + 1, 1);
		p->worth = calloc(n + 1, sizeof *p->worth);
	}
	if (!p || !p->xxh || !p->moves || !p->same || !p->worth)
		return base_no_memory(err);
	memset(p->moves, true, n);
	return 0;
}

void saver_pieces_give(struct saver_pieces *p)
{
	if (!p || --p->refs)
		return;
	free(p->xxh);
	free(p->moves);
	free(p->same);
	free(p->worth);
	free(p);
}

void saver_same_keep(struct save_flight *f)
{
	saver_pieces_give(f->s->pieces);
	f->s->pieces = f->pieces;
	f->pieces->refs++;
	f->pieces->entry = f->entry;
}

void saver_same_ask(struct save_flight *f)
{
	struct save_saver *s = f->s;
	struct saver_pieces *p = s->pieces;
	bool rests = s->same_rest && s->same_rest--;

	if (!p || !base_digest_equal(&p->key, &f->pieces->key))
		return;
	f->before = p;
	p->refs++;
	if (p->steady_bytes && f == s->first && !rests && !s->options.no_bases
		&& p->steady_bytes / SAME_COMPARED_EACH_NS + saver_same_patience.asks_ns >= s->answer_ns)
		f->same = SAME_ASKED;
}

bool saver_same_in(const struct save_flight *f, const struct saver_batch *b)
{
	return f->same != SAME_NO && b->cut && memchr(f->before->moves + b->first_piece, false, b->npieces);
}

struct saver_batch *saver_same_next(const struct save_flight *f)
{
	struct saver_batch *b = f->formed;

	while (b && b->state != BATCH_TO_COMPARE && (b->state != BATCH_COMPARED || f->same == SAME_ASKED))
		b = b->next;
	return b;
}

uint64_t saver_same_wait(struct save_flight *f)
{
	uint64_t now = base_monotonic_ns();

	if (!f->same_until_ns)
		f->same_until_ns = now + f->before->steady_bytes / SAME_COPIED_EACH_NS + saver_same_patience.waits_ns;
	if (now < f->same_until_ns)
		return f->same_until_ns;
	f->same = SAME_NO;
	f->s->same_rest = SAME_REST;
	return 0;
}

int saver_same_answer(struct save_flight *f, struct base_error *err)
{
	struct save_saver *s = f->s;
	bool asked;
	int r = 0;

	pthread_mutex_lock(&s->lock);
	asked = f->same == SAME_ASKED;
	pthread_mutex_unlock(&s->lock);
	if (asked)
		r = save_writer_name(f->w, s->run, f->before->entry, err);
	pthread_mutex_lock(&s->lock);
	s->answer_ns = base_monotonic_ns() - f->persisted_ns;
	if (f->same == SAME_ASKED)
		f->same = r == 1 ? SAME_YES : SAME_NO;
	pthread_cond_broadcast(&s->work);
	pthread_mutex_unlock(&s->lock);
	return r < 0 ? r : 0;
}

/* ---- one batch ---- */

static void same_strip(void *arg, const void *bytes, size_t len) { base_xxh128_update(arg, bytes, len); }

/* Of a piece of the walker's band, which is at `g`. */
static void same_hash(struct save_flight *f, struct saver_worker *w, const struct save_piece *p,
	const struct device_gather *g, const uint64_t *stride, struct base_xxh128 *ret_xxh)
{
	const struct save_band *b = &w->walker;
	uint64_t seed = f->s->store->info.seed;
	const uint8_t *at = g->from;

	if (tensor_piece_lies(&b->grid, &p->box, stride)) {
		for (uint32_t d = 0; d < g->ndim; d++)
			at += (p->box.offset[d] - b->box.offset[d]) * stride[d];
		base_xxh128_of(seed, at, p->len, ret_xxh);
		return;
	}
	base_xxh128_begin(w->hash, seed);
	tensor_piece_stream(&b->grid, &p->box, g->from, b->box.offset, stride, w->room, SAVE_STRIP_BYTES, true,
		same_strip, w->hash);
	base_xxh128_final(w->hash, ret_xxh);
}

/* The walker's band, whose first piece has that number. */
static void same_compare_band(struct save_flight *f, struct saver_worker *w, struct saver_batch *b, uint64_t piece)
{
	const struct saver_pieces *before = f->before;
	uint64_t stride[TENSOR_MAX_DIMS];
	struct device_gather g;

	saver_band_gather(f, w, &g, stride);
	for (uint32_t i = 0; i < w->walker.npieces; i++, piece++) {
		const struct save_piece *p = &w->walker.pieces[i];
		struct base_xxh128 xxh;

		if (before->moves[piece] || save_band_is_checked(&w->walker, f->w, p))
			continue;
		same_hash(f, w, p, &g, stride, &xxh);
		if (memcmp(&before->xxh[piece], &xxh, sizeof xxh) != 0)
			continue;
		f->pieces->xxh[piece] = xxh;
		f->pieces->same[piece] = b->same = true;
	}
}

/* The walker's band. Pieces that the base has are not copied; the others are added to what the batch copies. */
static void same_settle_band(struct save_flight *f, struct saver_worker *w, struct saver_batch *b, uint64_t piece)
{
	struct saver_pieces *found = f->pieces;
	uint64_t copied = 0;

	for (uint32_t i = 0; i < w->walker.npieces; i++, piece++) {
		struct save_piece *p = &w->walker.pieces[i];

		p->xxh = found->xxh[piece];
		if (found->same[piece] && !save_writer_has(f->w, &w->walker, p))
			found->same[piece] = false;
		found->moves[piece] = !found->same[piece];
		b->differs |= !found->same[piece];
		b->steady_bytes += found->same[piece] ? p->len : 0;
		copied += found->same[piece] ? 0 : p->len;
	}
	save_band_forget(&w->walker);
	b->bytes += copied ? saver_band_room(w->walker.len) : 0;
	b->data_bytes += copied;
}

static int same_walk(struct save_flight *f, struct saver_worker *w, struct saver_batch *b,
	void (*each)(struct save_flight *f, struct saver_worker *w, struct saver_batch *b, uint64_t piece),
	struct base_error *err)
{
	struct save_cursor c = b->from;
	uint64_t piece = b->first_piece;

	for (uint64_t i = 0; i < b->nbands; i++, piece += w->walker.npieces) {
		if (save_cursor_take(&c, f->w, &w->walker) != 1)
			return base_no_memory(err);
		each(f, w, b, piece);
	}
	return 0;
}

int saver_same_batch(struct save_flight *f, struct saver_worker *w, struct saver_batch *b, bool compared,
	enum saver_same same, struct base_error *err)
{
	int r = 0;

	if (!compared && same != SAME_NO)
		r = saver_worker_room(w) ? same_walk(f, w, b, same_compare_band, err) : base_no_memory(err);
	if (r == 0 && b->same && same == SAME_ASKED)
		return 0;
	if (r == 0 && b->same && same == SAME_YES) {
		b->bytes = b->data_bytes = 0;
		b->differs = false;
		r = same_walk(f, w, b, same_settle_band, err);
	} else if (r == 0 && b->same) {
		memset(f->pieces->same + b->first_piece, false, b->npieces);
		b->same = false;
	}
	return r < 0 ? r : 1;
}
