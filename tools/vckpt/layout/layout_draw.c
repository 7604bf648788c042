/* SPDX-License-Identifier: Apache-2.0
 *
 * The picture of `vckpt layout --draw`: a 2-d tensor with the ranks that hold its parts.
 *
 * The edges of all boxes cut each axis into bands; a box is some neighbouring rows of bands by some neighbouring
 * columns. A band is as wide as its share of the tensor, but at least one character, and wide enough for what is
 * written in it; the numbers along the border are the true indices. Where an axis has more bands than fit, those in the
 * middle are left out (~), and the ranks that are seen nowhere then are listed below. What no rank holds is dotted.
 * Replicas share a box: "0,4", or where that is too long "0+7 more" or "0+7", spelled out below. */
#include <inttypes.h>
#include <langinfo.h>
#include <locale.h>
#include <string.h>

#include "tools/vckpt/layout/layout.h"

#define DRAW_BOXES_MAX 65536u  /* boxes of all ranks together */
#define DRAW_BANDS 24          /* on an axis */
#define DRAW_COLUMNS 64u       /* characters that are shared out */
#define DRAW_LINES 24u
#define DRAW_WIDTH_MAX 110u    /* what the texts in it may widen it to */
#define LABEL_MAX 13           /* of a label; where columns are many, only */
#define LABEL_SHORT 5
#define NO_RANK (-1)
#define LEFT_OUT (-2)
#define OUTSIDE (-3)

struct held { uint64_t edge[2][2]; uint32_t rank; };    /* a box of a rank: [axis][from, to] */
struct group {                                          /* the same box of n ranks: held[first ...] */
	size_t first, n;
	bool seen, spelled;
	char label[32];
};
struct band { uint64_t from, to; bool gap; unsigned chars, at; }; /* at: the border before it, as a character */
struct axis { struct band band[DRAW_BANDS + 1]; int n; unsigned chars; uint64_t *edges; size_t nedges; };

struct drawing {
	const struct layout *l;
	struct held *held;
	size_t nheld;
	struct group *groups;
	size_t ngroups;
	struct axis axis[2];    /* rows, columns */
	int owner[DRAW_BANDS + 1][DRAW_BANDS + 1];
	unsigned char *canvas;  /* 1 to 15: a line with arms up 1, right 2, down 4, left 8; else a character */
};

static void drawing_release(struct drawing *d)
{
	free(d->held);
	free(d->groups);
	free(d->axis[0].edges);
	free(d->axis[1].edges);
	free(d->canvas);
}

/* ---- collecting ---- */

static int compare_held(const void *x, const void *y)
{
	const struct held *a = x, *b = y;

	for (int i = 0; i < 4; i++)
		if (a->edge[i / 2][i % 2] != b->edge[i / 2][i % 2])
			return a->edge[i / 2][i % 2] < b->edge[i / 2][i % 2] ? -1 : 1;
	return a->rank < b->rank ? -1 : a->rank > b->rank;
}

static int compare_number(const void *x, const void *y)
{
	const uint64_t *a = x, *b = y;

	return *a < *b ? -1 : *a > *b;
}

/* 0, or -BASE_ELIMIT. */
static int collect(struct drawing *d, struct base_error *err)
{
	const struct layout *l = d->l;
	struct tensor_shard_iter it;
	struct tensor_shard shard;

	d->held = calloc(DRAW_BOXES_MAX, sizeof *d->held);
	if (!d->held)
		return -ENOMEM;
	for (uint32_t i = 0; i < l->ranks.count; i++) {
		uint32_t rank = tool_ranks_at(&l->ranks, i);
		int r = layout_shard(l, rank, &shard, err);

		if (r < 0)
			return r;
		if (shard.absent)
			continue;
		for (tensor_shard_first(&it, &shard, NULL); !it.done; tensor_shard_next(&it)) {
			struct held *h = &d->held[d->nheld];

			if (d->nheld++ == DRAW_BOXES_MAX)
				return base_error_set(err, -BASE_ELIMIT, "--draw: more than %u boxes are too many%s",
					DRAW_BOXES_MAX, l->ranks.one ? "" : "; --rank N draws those of one rank");
			h->rank = rank;
			for (int a = 0; a < 2; a++) {
				h->edge[a][0] = it.at.box.offset[a];
				h->edge[a][1] = it.at.box.offset[a] + it.at.box.size[a];
			}
		}
	}
	qsort(d->held, d->nheld, sizeof *d->held, compare_held);
	return 0;
}

/* Free it; NULL: no memory. */
static uint32_t *ranks_of(const struct drawing *d, const struct group *g)
{
	uint32_t *ranks = calloc(g->n, sizeof *ranks);

	for (size_t i = 0; ranks && i < g->n; i++)
		ranks[i] = d->held[g->first + i].rank;
	return ranks;
}

static int make_groups(struct drawing *d)
{
	d->groups = calloc(d->nheld + 1, sizeof *d->groups);
	if (!d->groups)
		return -ENOMEM;
	for (size_t i = 0; i < d->nheld; i++) {
		if (i == 0 || memcmp(d->held[i].edge, d->held[i - 1].edge, sizeof d->held[i].edge) != 0)
			d->groups[d->ngroups++].first = i;
		d->groups[d->ngroups - 1].n++;
	}
	return 0;
}

/* Labels of at most `room` characters, or as few as will do: "0,4", "0+7 more", "0+7". */
static int make_labels(struct drawing *d, size_t room)
{
	for (size_t i = 0; i < d->ngroups; i++) {
		struct group *g = &d->groups[i];
		base_cleanup_free uint32_t *ranks = ranks_of(d, g);
		struct base_buf text base_cleanup_buf = BASE_BUF_INIT;

		if (ranks)
			tool_ranks_text(ranks, g->n, &text);
		if (!ranks || text.error)
			return -ENOMEM;
		g->spelled = g->n == 1 || text.len <= room;
		if (g->spelled)
			snprintf(g->label, sizeof g->label, "%.*s", (int)text.len, (const char *)text.data);
		else
			snprintf(g->label, sizeof g->label, "%" PRIu32 "+%zu", d->held[g->first].rank, g->n - 1);
		if (!g->spelled && strlen(g->label) + 5 <= room)
			strcat(g->label, " more");
	}
	return 0;
}

static int make_edges(struct drawing *d, int a)
{
	struct axis *x = &d->axis[a];
	size_t n = 0;

	x->edges = calloc(2 * d->nheld + 2, sizeof *x->edges);
	if (!x->edges)
		return -ENOMEM;
	x->edges[n++] = 0;
	x->edges[n++] = d->l->shape.dim[a];
	for (size_t i = 0; i < d->nheld; i++) {
		x->edges[n++] = d->held[i].edge[a][0];
		x->edges[n++] = d->held[i].edge[a][1];
	}
	qsort(x->edges, n, sizeof *x->edges, compare_number);
	for (size_t i = 0; i < n; i++)
		if (i == 0 || x->edges[i] != x->edges[x->nedges - 1])
			x->edges[x->nedges++] = x->edges[i];
	return 0;
}

/* ---- bands ---- */

/* At most `limit` bands, the middle ones left out; `room` characters for the whole tensor. */
static void make_bands(struct axis *x, int limit, double room)
{
	size_t all = x->nedges - 1, head = all, tail = 0;
	double total = (double)x->edges[all];

	if (all > (size_t)limit) {
		head = (size_t)limit / 2;
		tail = (size_t)limit - 1 - head;
	}
	x->n = 0;
	for (size_t i = 0; i < all; i++) {
		struct band *b = &x->band[x->n++];
		double share;

		*b = (struct band){.from = x->edges[i], .to = x->edges[i + 1]};
		if (i == head) {
			i = all - tail - 1;
			*b = (struct band){.from = b->from, .to = x->edges[i + 1], .gap = true, .chars = 1};
			continue;
		}
		share = (double)(b->to - b->from) / total * room - 1; /* less its border */
		b->chars = share < 1 ? 1 : (unsigned)(share + 0.5);
	}
}

/* Cells [0, 1] that a box covers on an axis: bands of it that are drawn; false: none. */
static bool covered(const struct axis *x, const uint64_t edge[2], int at[2])
{
	at[0] = at[1] = -1;
	for (int i = 0; i < x->n; i++)
		if (!x->band[i].gap && x->band[i].from >= edge[0] && x->band[i].to <= edge[1]) {
			at[0] = at[0] < 0 ? i : at[0];
			at[1] = i;
		}
	return at[0] >= 0;
}

static void assign_owners(struct drawing *d)
{
	for (int i = 0; i < d->axis[0].n; i++)
		for (int j = 0; j < d->axis[1].n; j++)
			d->owner[i][j] = d->axis[0].band[i].gap || d->axis[1].band[j].gap ? LEFT_OUT : NO_RANK;
	for (size_t g = 0; g < d->ngroups; g++) {
		const struct held *h = &d->held[d->groups[g].first];
		int rows[2] = {0}, columns[2] = {0};

		d->groups[g].seen = covered(&d->axis[0], h->edge[0], rows) && covered(&d->axis[1], h->edge[1], columns);
		for (int i = rows[0]; d->groups[g].seen && i <= rows[1]; i++)
			for (int j = columns[0]; j <= columns[1]; j++)
				if (d->owner[i][j] == NO_RANK)
					d->owner[i][j] = (int)g;
	}
}

/* The part of a group's box, up to a gap, that has its label: [rows, columns][first, last band]. */
static void label_part(const struct drawing *d, size_t g, int part[2][2])
{
	const struct held *h = &d->held[d->groups[g].first];

	for (int a = 0; a < 2; a++) {
		const struct axis *x = &d->axis[a];
		int last = part[a][0];

		covered(x, h->edge[a], part[a]);
		for (last = part[a][0]; last < part[a][1] && !x->band[last + 1].gap; last++)
			;
		part[a][1] = last;
	}
}

/* Makes room for the labels: the first column of each box grows as far as needed. */
static void widen(struct drawing *d)
{
	struct axis *x = &d->axis[1];

	for (size_t g = 0; g < d->ngroups; g++) {
		int part[2][2] = {{0}};
		unsigned have, need = (unsigned)strlen(d->groups[g].label);

		if (!d->groups[g].seen)
			continue;
		label_part(d, g, part);
		have = (unsigned)(part[1][1] - part[1][0]); /* the borders between */
		for (int j = part[1][0]; j <= part[1][1]; j++)
			have += x->band[j].chars;
		if (have < need)
			x->band[part[1][0]].chars += need - have;
	}
}

static void place_bands(struct axis *x)
{
	x->chars = 1;
	for (int i = 0; i < x->n; i++) {
		x->band[i].at = x->chars - 1;
		x->chars += x->band[i].chars + 1;
	}
}

/* ---- painting ---- */

static int owner_at(const struct drawing *d, int i, int j)
{
	return i < 0 || j < 0 || i >= d->axis[0].n || j >= d->axis[1].n ? OUTSIDE : d->owner[i][j];
}

static unsigned border_at(const struct axis *x, int i)
{
	return i < x->n ? x->band[i].at : x->chars - 1;
}

static unsigned char fill_of(int owner)
{
	return owner == NO_RANK ? '.' : owner == LEFT_OUT ? '~' : ' ';
}

/* The corner before cell (i, j), the border above it, the border to its left, and its inside. */
static void paint_cell(struct drawing *d, int i, int j)
{
	int here = owner_at(d, i, j), up = owner_at(d, i - 1, j), left = owner_at(d, i, j - 1);
	int corner = owner_at(d, i - 1, j - 1);
	unsigned y0 = border_at(&d->axis[0], i), x0 = border_at(&d->axis[1], j), width = d->axis[1].chars;
	unsigned y1 = i < d->axis[0].n ? border_at(&d->axis[0], i + 1) : y0 + 1;
	unsigned x1 = j < d->axis[1].n ? border_at(&d->axis[1], j + 1) : x0 + 1;
	unsigned arms = (corner != up) | (unsigned)(up != here) << 1 | (unsigned)(left != here) << 2 |
		(unsigned)(corner != left) << 3;

	d->canvas[y0 * width + x0] = arms ? (unsigned char)arms : fill_of(here);
	for (unsigned x = x0 + 1; x < x1; x++)
		d->canvas[y0 * width + x] = up != here ? 2 | 8 : fill_of(here);
	for (unsigned y = y0 + 1; y < y1; y++) {
		d->canvas[y * width + x0] = left != here ? 1 | 4 : fill_of(here);
		for (unsigned x = x0 + 1; x < x1; x++)
			d->canvas[y * width + x] = fill_of(here);
	}
}

static int paint(struct drawing *d)
{
	d->canvas = calloc((size_t)d->axis[0].chars, d->axis[1].chars);
	if (!d->canvas)
		return -ENOMEM;
	for (int i = 0; i <= d->axis[0].n; i++)
		for (int j = 0; j <= d->axis[1].n; j++)
			paint_cell(d, i, j);
	for (size_t g = 0; g < d->ngroups; g++) {
		int part[2][2] = {{0}};
		size_t len = strlen(d->groups[g].label), x;
		unsigned top, bottom, from, to;

		if (!d->groups[g].seen)
			continue;
		label_part(d, g, part);
		top = border_at(&d->axis[0], part[0][0]);
		bottom = border_at(&d->axis[0], part[0][1] + 1);
		from = border_at(&d->axis[1], part[1][0]);
		to = border_at(&d->axis[1], part[1][1] + 1);
		x = from + 1 + (to - from - 1 - len) / 2; /* widen made it fit */
		memcpy(&d->canvas[(top + bottom) / 2 * d->axis[1].chars + x], d->groups[g].label, len);
	}
	return 0;
}

/* ---- writing ---- */

static void print_canvas(const struct drawing *d)
{
	static const char *const lines[16] = {" ", "│", "─", "└", "│", "│", "┌", "├",
		"─", "┘", "─", "┴", "┐", "┤", "┬", "┼"};
	static const char ascii[] = " |-+||++-+-+++++";
	const struct axis *rows = &d->axis[0], *columns = &d->axis[1];
	int margin = tool_digits(d->l->shape.dim[0]), row = 0;
	bool unicode = isatty(STDOUT_FILENO) && setlocale(LC_CTYPE, "") && !strcmp(nl_langinfo(CODESET), "UTF-8");
	unsigned at = 0;

	printf("%*s ", margin, "");
	for (int j = 0; j <= columns->n; j++) { /* the index of each border, where there is room for it */
		uint64_t index = j < columns->n ? columns->band[j].from : d->l->shape.dim[1];

		if (j == 0 || border_at(columns, j) > at)
			at += (unsigned)printf("%*s%" PRIu64, (int)(border_at(columns, j) - at), "", index);
	}
	putchar('\n');
	for (unsigned y = 0; y < rows->chars; y++) {
		if (y == border_at(rows, row))
			printf("%*" PRIu64 " ", margin, row < rows->n ? rows->band[row].from : d->l->shape.dim[0]);
		else
			printf("%*s ", margin, "");
		row += y == border_at(rows, row);
		for (unsigned x = 0; x < columns->chars; x++) {
			unsigned char c = d->canvas[y * columns->chars + x];

			if (c < 16 && unicode)
				fputs(lines[c], stdout);
			else
				putchar(c < 16 ? ascii[c] : c);
		}
		putchar('\n');
	}
}

/* "WHAT 0-3,8", if there are any. */
static int print_ranks(const char *what, const uint32_t *ranks, size_t n)
{
	struct base_buf text base_cleanup_buf = BASE_BUF_INIT;

	tool_ranks_text(ranks, n, &text);
	if (n && !text.error)
		printf("%s: %s %.*s\n", what, base_plural(n, "rank", "ranks"), (int)text.len,
			(const char *)text.data);
	return text.error;
}

static int compare_rank(const void *x, const void *y)
{
	const uint32_t *a = x, *b = y;

	return *a < *b ? -1 : *a > *b;
}

/* Ranks whose every box is in what was left out, and those that hold nothing. */
static int print_unseen(const struct drawing *d)
{
	uint32_t count = d->l->ranks.count, n[3] = {0};
	base_cleanup_free uint32_t *all = calloc(count, sizeof *all), *picked = calloc(count, sizeof *picked);
	base_cleanup_free unsigned char *state = calloc(count, 1); /* of all[i]: 0 holds nothing, 1 is not seen, 2 is */

	if (!all || !picked || !state)
		return -ENOMEM;
	for (uint32_t i = 0; i < count; i++)
		all[i] = tool_ranks_at(&d->l->ranks, i);
	qsort(all, count, sizeof *all, compare_rank);
	for (size_t g = 0; g < d->ngroups; g++)
		for (size_t i = 0; i < d->groups[g].n; i++) {
			const uint32_t *rank = bsearch(&d->held[d->groups[g].first + i].rank, all, count, sizeof *all,
				compare_rank);

			if (rank)
				state[rank - all] |= d->groups[g].seen ? 2 : 1;
		}
	for (int want = 1; want >= 0; want--) {
		const char *what;

		for (uint32_t i = 0; i < count; i++)
			if (state[i] == want)
				picked[n[want]++] = all[i];
		what = want ? "left out (~)" : base_plural(n[want], "holds nothing", "hold nothing");

		if (print_ranks(what, picked, n[want]) < 0)
			return -ENOMEM;
	}
	return 0;
}

static int print_legend(const struct drawing *d)
{
	for (size_t g = 0; g < d->ngroups; g++) {
		const struct group *group = &d->groups[g];
		base_cleanup_free uint32_t *ranks = NULL;

		if (!group->seen || group->spelled)
			continue;
		ranks = ranks_of(d, group);
		if (!ranks || print_ranks(group->label, ranks, group->n) < 0)
			return -ENOMEM;
	}
	return print_unseen(d);
}

/* At most `limit` columns of bands; the width that this comes to. */
static unsigned try_columns(struct drawing *d, int limit, double room)
{
	make_bands(&d->axis[1], limit, room);
	assign_owners(d);
	widen(d);
	place_bands(&d->axis[1]);
	return d->axis[1].chars;
}

/* Characters that each axis gets: one of a column is about half as wide as a line is high. Where labels make it too
 * wide they are shortened first, then columns are left out. */
static int fit(struct drawing *d)
{
	double rows = (double)d->l->shape.dim[0], columns = (double)d->l->shape.dim[1];
	double scale = DRAW_LINES / rows < DRAW_COLUMNS / 2 / columns ? DRAW_LINES / rows : DRAW_COLUMNS / 2 / columns;
	int r;

	make_bands(&d->axis[0], DRAW_BANDS, scale * rows);
	place_bands(&d->axis[0]);
	r = make_labels(d, LABEL_MAX);
	if (r < 0 || try_columns(d, DRAW_BANDS, scale * columns * 2) <= DRAW_WIDTH_MAX)
		return r;
	r = make_labels(d, LABEL_SHORT);
	for (int limit = DRAW_BANDS; r == 0 && limit > 2; limit--)
		if (try_columns(d, limit, scale * columns * 2) <= DRAW_WIDTH_MAX)
			break;
	return r;
}

int layout_draw(const struct layout *l)
{
	base_cleanup(drawing_release) struct drawing d = {.l = l};
	struct base_error err = {0};
	int r = collect(&d, &err);

	if (r == 0 && (l->shape.dim[0] == 0 || l->shape.dim[1] == 0)) {
		puts("nothing to draw: the tensor has no items");
		return tool_output_end(l->t);
	}
	if (r < 0 || (r = make_groups(&d)) < 0 || (r = make_edges(&d, 0)) < 0 || (r = make_edges(&d, 1)) < 0 ||
		(r = fit(&d)) < 0 || (r = paint(&d)) < 0) {
		err.code = r;
		return tool_fail(l->t, &err);
	}
	print_canvas(&d);
	if (print_legend(&d) < 0)
		return tool_fail(l->t, &(struct base_error){.code = -ENOMEM});
	return tool_output_end(l->t);
}
