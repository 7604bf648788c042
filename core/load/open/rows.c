/* SPDX-License-Identifier: Apache-2.0
 *
 * rows: see rows_internal.h.
 *
 *   which parts  the layouts say which may have rows of what is wanted (holders.c); the chunks of a part, whether the
 *                tensor's number can be in it
 *   when         in rounds. In the first one each question goes to the lowest rank that may have it, since that often
 *                has all of the tensor; then to twice as many each time, and to all that are left once one has a box
 *   how          the questions of a round are sorted by part. A job is some questions to one part, by ascending tensor,
 *                so that its chunks are read in order; several jobs are done at once
 *   answers      rows come back by ascending rank, and of several failures the lowest rank's counts, so the answer does
 *                not depend on threads
 */
#include <stdlib.h>

#include "core/base/cleanup.h"
#include "core/load/open/rows_internal.h"
#include "core/load/open/step_internal.h"
#include "core/storage/spread.h"

#define ROWS_ASKED_MAX 512u     /* parts asked at once before one is known to have something of the tensor */
#define ROWS_JOB_MAX 512u       /* questions to one part that one thread takes at once */

/* The parts that one question goes to. */
struct rows_asked { uint32_t *lines, n, next; bool over; };

struct rows_one { uint32_t question, line; int r; struct load_row *row; char *why; }; /* one question to one part */

struct rows_asking {
	const struct load_step *step;
	struct load_question *questions; uint32_t n;
	const atomic_bool *stop;
	struct rows_asked *asked;
	uint64_t *lines;                 /* a bit for each */
	/* the round */
	struct rows_one *ones; size_t nones;
	size_t *order;                   /* numbers of ones, by line */
	size_t *jobs; uint32_t njobs;    /* where each begins in order, and the end of the last */
};

static void round_release(struct rows_asking *a)
{
	for (size_t i = 0; i < a->nones; i++) {
		if (a->ones[i].row)
			load_row_release(a->ones[i].row);
		free(a->ones[i].row);
		free(a->ones[i].why);
	}
	free(base_steal(a->ones));
	free(base_steal(a->order));
	free(base_steal(a->jobs));
	a->nones = a->njobs = 0;
}

static void asking_release(struct rows_asking *a)
{
	round_release(a);
	for (uint32_t i = 0; a->asked && i < a->n; i++)
		free(a->asked[i].lines);
	free(a->asked);
	free(a->lines);
}

void load_question_release(struct load_question *q)
{
	for (uint32_t i = 0; i < q->nrows; i++)
		load_row_release(&q->rows[i]);
	free(q->rows);
	free(q->why);
}

/* ---- one question to one part ---- */

/* Is every box of a row in the shard of its rank? */
static int row_agrees(const struct load_step *step, uint32_t line, uint32_t number, const struct tensor_box *boxes,
	const struct tensor_boxes *packed, struct base_error *err)
{
	struct tensor_shard shard;
	size_t n = packed->n;
	int r = load_step_shard(step, line, number, &shard);

	if (r < 0)
		return base_no_memory(err);
	for (size_t i = 0; r > 0 && i < n; i++) {
		struct tensor_box box;
		char text[800];

		if (boxes)
			box = boxes[i];
		else
			tensor_boxes_get(packed, i, &box);
		if (tensor_shard_has(&shard, &box))
			continue;
		tensor_box_text(packed->ndim, &box, text, sizeof text);
		return base_error_set(err, -BASE_EFORMAT,
			"rank %u stored box %s, which is not what the layout gives this rank",
			step->manifest.ranks[line].rank, text);
	}
	return 0;
}

/* A short row, with its chunk; or all of a long one. */
static int row_read(const struct load_step *step, const struct load_question *q, const struct store_opened_part *part,
	uint32_t number, struct load_row *row, struct base_error *err)
{
	uint32_t line = row->line;
	struct store_row all;
	int r = store_part_read_row_cached(step->chunks, step->store,
		step->layouts[step->manifest.ranks[line].layout].layout, &part->part, part->packs, part->npacks,
		number, &all, err);

	if (r < 0)
		return r;
	row->whole = all.whole;
	r = row_agrees(step, line, number, all.boxes,
		&(struct tensor_boxes){.ndim = q->grid->shape.ndim, .n = all.nboxes}, err);
	if (r == 0 && !q->wanted) {
		row->row = all;
		return 0;
	}
	if (r == 0)
		r = load_row_take(q, &all, row);
	store_row_release(&all);
	return r == -ENOMEM ? base_no_memory(err) : r;
}

static int row_read_long(const struct load_step *step, const struct load_question *q,
	const struct store_opened_part *part, uint32_t number, struct load_row *row, struct base_error *err)
{
	struct store_part_excerpt *e;
	int r = store_part_excerpt_open(step->store, step->layouts[step->manifest.ranks[row->line].layout].layout,
		&part->part, part->packs, part->npacks, number, &e, err);

	if (r < 0)
		return r;
	row->whole = e->whole;
	r = row_agrees(step, row->line, number, NULL, &e->boxes, err);
	if (r == 0)
		r = load_row_excerpt(q, e, row, err);
	store_part_excerpt_close(e);
	return r;
}

/* -ENODATA: the part has nothing that is wanted. */
static int one_ask(const struct load_step *step, const struct load_question *q, struct rows_one *one,
	struct base_error *err)
{
	const struct proto_manifest_rank *rank = &step->manifest.ranks[one->line];
	int64_t number = load_step_number_in(step, q->tensor, rank->layout);
	const struct store_opened_part *part;
	struct load_row row = {.line = one->line};
	int r = load_step_part(step, one->line, &part, err);

	if (r < 0)
		return r;
	if (number < 0)
		return -ENODATA;
	row.npacks = part->npacks;
	if (q->wanted && store_part_excerpt_pays(&part->part, (uint32_t)number))
		r = row_read_long(step, q, part, (uint32_t)number, &row, err);
	else
		r = row_read(step, q, part, (uint32_t)number, &row, err);
	if (r < 0)
		return r == -ENODATA ? r : base_error_prefix(err, r, "part of rank %u", rank->rank);
	one->row = malloc(sizeof row);
	if (!one->row) {
		load_row_release(&row);
		return base_no_memory(err);
	}
	*one->row = row;
	return 0;
}

static int asking_job(void *arg, uint32_t job, struct base_error *err)
{
	const struct rows_asking *a = arg;

	for (size_t i = a->jobs[job]; i < a->jobs[job + 1]; i++) {
		struct rows_one *one = &a->ones[a->order[i]];
		struct base_error why = {0};

		if (a->stop && atomic_load(a->stop))
			return base_error_set(err, -ECANCELED, "the load was stopped");
		one->r = one_ask(a->step, &a->questions[one->question], one, &why);
		if (one->r < 0 && one->r != -ENODATA && !(one->why = strdup(why.text)))
			return base_no_memory(err);
	}
	return 0;
}

/* ---- rounds ---- */

static int asked_find(struct rows_asking *a, uint32_t question)
{
	const struct load_question *q = &a->questions[question];
	struct rows_asked *asked = &a->asked[question];
	size_t words = a->step->manifest.nranks / 64 + 1;
	uint32_t n = 0;

	memset(a->lines, 0, words * sizeof *a->lines);
	if (load_step_holders(a->step, q->tensor, q->wanted, a->lines) < 0)
		return -ENOMEM;
	for (size_t i = 0; i < words; i++)
		n += (uint32_t)__builtin_popcountll(a->lines[i]);
	asked->lines = malloc(((size_t)n + 1) * sizeof *asked->lines);
	if (!asked->lines)
		return -ENOMEM;
	for (size_t i = 0; i < words; i++)
		for (uint64_t bits = a->lines[i]; bits; bits &= bits - 1)
			asked->lines[asked->n++] = (uint32_t)(64 * i) + (uint32_t)__builtin_ctzll(bits);
	return 0;
}

static uint32_t asked_next(const struct rows_asking *a, uint32_t question)
{
	const struct rows_asked *asked = &a->asked[question];
	uint32_t left = asked->n - asked->next;

	if (asked->over)
		return 0;
	return a->questions[question].nrows ? left : base_min(base_min(asked->next + 1, ROWS_ASKED_MAX), left);
}

/* The questions of this round, and the part that each goes to. */
static int round_fill(struct rows_asking *a)
{
	size_t n = 0;

	for (uint32_t q = 0; q < a->n; q++)
		n += asked_next(a, q);
	if (n == 0)
		return 0;
	a->ones = calloc(n, sizeof *a->ones);
	a->order = malloc(n * sizeof *a->order);
	a->jobs = malloc((n + 1) * sizeof *a->jobs);
	if (!a->ones || !a->order || !a->jobs)
		return -ENOMEM;
	for (uint32_t q = 0; q < a->n; q++)
		for (uint32_t i = 0, more = asked_next(a, q); i < more; i++)
			a->ones[a->nones++] = (struct rows_one){.question = q, .r = -ENODATA,
				.line = a->asked[q].lines[a->asked[q].next + i]};
	return 0;
}

/* Sorts them by line, keeps the order of those to one part, and cuts them into jobs. */
static int round_sort(struct rows_asking *a)
{
	base_cleanup_free size_t *at = calloc((size_t)a->step->manifest.nranks + 1, sizeof *at);

	if (!at)
		return -ENOMEM;
	for (size_t i = 0; i < a->nones; i++)
		at[a->ones[i].line + 1]++;
	for (uint32_t i = 0; i < a->step->manifest.nranks; i++)
		at[i + 1] += at[i];
	for (size_t i = 0; i < a->nones; i++)
		a->order[at[a->ones[i].line]++] = i;
	for (size_t i = 0; i < a->nones; i++)
		if (i == 0 || a->ones[a->order[i]].line != a->ones[a->order[i - 1]].line
			|| i - a->jobs[a->njobs - 1] >= ROWS_JOB_MAX)
			a->jobs[a->njobs++] = i;
	a->jobs[a->njobs] = a->nones;
	return 0;
}

static void question_failed(struct load_question *q, struct rows_one *one)
{
	q->r = one->r;
	q->why = base_steal(one->why);
}

/* What the parts answered to one question: [one, end). A failure counts unless a lower rank has all of the tensor. */
static int question_take(struct rows_asking *a, struct rows_one *one, const struct rows_one *end)
{
	struct load_question *q = &a->questions[one->question];
	struct rows_asked *asked = &a->asked[one->question];
	struct load_row *rows = realloc(q->rows, (q->nrows + (size_t)(end - one)) * sizeof *rows);

	if (!rows)
		return -ENOMEM;
	q->rows = rows;
	asked->next += (uint32_t)(end - one);
	for (; one < end && !asked->over; one++) {
		if (one->r == -ENODATA)
			continue;
		asked->over = true;
		if (one->r < 0) {
			question_failed(q, one);
			continue;
		}
		q->rows[q->nrows++] = *one->row;
		free(base_steal(one->row));
		asked->over = q->nrows == 1 && q->rows[0].whole;
	}
	return 0;
}

static int round_take(struct rows_asking *a)
{
	int r = 0;

	for (size_t i = 0, end; r == 0 && i < a->nones; i = end) {
		for (end = i + 1; end < a->nones && a->ones[end].question == a->ones[i].question;)
			end++;
		r = question_take(a, a->ones + i, a->ones + end);
	}
	return r;
}

int load_rows_ask(const struct load_step *step, struct load_question *questions, uint32_t n, const atomic_bool *stop,
	struct base_error *err)
{
	base_cleanup(asking_release) struct rows_asking a = {.step = step, .questions = questions, .n = n,
		.stop = stop};
	int r = 0;

	a.asked = calloc((size_t)n + 1, sizeof *a.asked);
	a.lines = malloc((step->manifest.nranks / 64 + 1) * sizeof *a.lines);
	if (!a.asked || !a.lines)
		return base_no_memory(err);
	for (uint32_t i = 0; r == 0 && i < n; i++)
		r = asked_find(&a, i);
	if (r == 0)
		r = round_fill(&a);
	while (r == 0 && a.nones) {
		r = round_sort(&a);
		if (r == 0)
			r = storage_spread(a.njobs, asking_job, &a, err);
		if (r < 0)
			return r == -ENOMEM ? base_no_memory(err) : r;
		r = round_take(&a);
		round_release(&a);
		if (r == 0)
			r = round_fill(&a);
	}
	return r < 0 ? base_no_memory(err) : 0;
}

/* ---- without pieces ---- */

int load_tensor_row_digest(struct load_step *step, uint32_t tensor, struct base_digest *ret_d, struct base_error *err)
{
	uint64_t lines[4] = {0};
	uint32_t line = 0, nranks = step->manifest.nranks;
	const struct store_opened_part *part;
	struct tensor_shard shard;
	struct tensor_shape shape;
	struct tensor_box box;
	int64_t number;
	bool whole;
	int r;

	if (nranks > 64 * BASE_COUNT(lines))
		return 0;
	if (load_step_holders(step, tensor, NULL, lines) < 0)
		return base_no_memory(err);
	while (line < nranks && !(lines[line / 64] >> line % 64 & 1))
		line++;
	number = line < nranks ? load_step_number_in(step, tensor, step->manifest.ranks[line].layout) : -ENOENT;
	if (number < 0)
		return 0;
	r = load_step_part(step, line, &part, err);
	if (r == 0)
		r = store_part_row_digest(step->chunks, step->store,
			step->layouts[step->manifest.ranks[line].layout].layout, &part->part, part->packs, part->npacks,
			(uint32_t)number, &whole, ret_d, err);
	if (r < 0)
		return r == -ENODATA ? 0 : load_step_tensor_failed(step, tensor, base_error_prefix(err, r,
			"part of rank %u", step->manifest.ranks[line].rank), err);
	r = load_step_shard(step, line, (uint32_t)number, &shard);
	if (r < 0)
		return base_no_memory(err);
	store_layout_shape(step->layouts[step->tensors[tensor].layout].layout, step->tensors[tensor].tensor, &shape);
	tensor_box_whole(&shape, &box);
	return whole && (r == 0 || tensor_shard_has(&shard, &box)); /* a row that may not be whole is refused there */
}
