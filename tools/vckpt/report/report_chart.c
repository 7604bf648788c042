/* SPDX-License-Identifier: Apache-2.0
 *
 * Charts as SVG: lines or stacked bars over points, and heat maps; each with a title, a description and a table of its
 * numbers, which is also what the script shows at the pointer. */
#include <string.h>

#include "tools/vckpt/report/report.h"

/* Of the drawing, in its own units. */
struct frame { double width, height, left, right, top, bottom; };
static const struct frame large = {900, 236, 70, 892, 8, 212}, small = {300, 104, 62, 294, 6, 84};

double report_step(enum report_unit unit, double max)
{
	static const double nice[] = {2, 2.5, 2};
	double step = unit == REPORT_NS && max > 600e9 ? 60e9 : 1;

	for (unsigned i = 0; step * 5 < max; i++)
		step *= unit == REPORT_BYTES ? 2 : nice[i % 3];
	return step;
}

/* NAN: no item of the point has a value. */
static double point_value(const struct report_chart *c, unsigned series, unsigned point)
{
	const struct report_series *s = &c->series[series];
	size_t first = c->points[point].first, end = c->points[point].end;
	double value = s->items == REPORT_LARGEST ? NAN : 0;

	for (size_t i = first; i < end; i++) {
		double one = s->get(c->of, i, s->what);

		if (s->items != REPORT_LARGEST)
			value += isnan(one) ? 0 : one;
		else if (!isnan(one) && !(one <= value))
			value = one;
	}
	return s->items == REPORT_MEAN && end > first ? value / (double)(end - first) : value;
}

static double chart_max(const struct report_chart *c)
{
	double max = 0;

	for (unsigned i = 0; i < c->npoints; i++) {
		double sum = 0;

		for (unsigned s = 0; s < c->nseries; s++) {
			double value = point_value(c, s, i);

			sum = c->bars && !isnan(value) ? sum + value : value;
			max = sum > max ? sum : max;
		}
	}
	return max;
}

static double point_x(const struct report_chart *c, const struct frame *f, unsigned i)
{
	return f->left + (i + 0.5) / c->npoints * (f->right - f->left);
}

static void chart_axes(struct report_page *p, const struct report_chart *c, const struct frame *f, double step,
	double top)
{
	unsigned most = c->small ? 2 : 6, n = c->npoints < most ? c->npoints : most;
	double every = c->small ? top : step;

	for (unsigned k = 0; k * every <= top; k++) {
		double y = f->bottom - k * every / top * (f->bottom - f->top);

		report_put(p, "<path class=\"grid\" d=\"M%.0f %.1fH%.0f\"/>", f->left, y, f->right);
		report_label(p, f->left - 6, y + 4, "end", k ? REPORT_VALUE(c->unit, k * every) : "0");
	}
	for (unsigned k = 0; k < n; k++) {
		unsigned i = n > 1 ? (unsigned)((uint64_t)k * (c->npoints - 1) / (n - 1)) : 0;
		double half = (c->small ? 3.6 : 3.9) * (double)strlen(c->points[i].tick);

		report_label(p, report_least(point_x(c, f, i), f->width - half), f->bottom + 16, "middle",
			c->points[i].tick);
	}
}

static void chart_line(struct report_page *p, const struct report_chart *c, const struct frame *f, unsigned s,
	double scale)
{
	bool on = false;

	report_put(p, "<path class=\"l%u%s\" d=\"", s, c->npoints == 1 || (c->npoints <= 30 && !c->small) ? " p" : "");
	for (unsigned i = 0; i < c->npoints; i++) {
		double value = point_value(c, s, i);

		if (!isnan(value))
			report_put(p, "%c%.1f %.1f", on ? 'L' : 'M', point_x(c, f, i), f->bottom - value * scale);
		on = !isnan(value);
	}
	report_put(p, "\"/>");
}

static void chart_bars(struct report_page *p, const struct report_chart *c, const struct frame *f, double scale)
{
	double width = report_least((f->right - f->left) / c->npoints * 0.8, 48);

	for (unsigned i = 0; i < c->npoints; i++) {
		double y = f->bottom;

		for (unsigned s = 0; s < c->nseries; s++) {
			double value = point_value(c, s, i), height = report_most(value * scale, 0.6);

			if (value > 0)
				report_put(p, "<rect class=\"%s\" x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" "
					"height=\"%.1f\"/>",
					s ? "b1" : "k0", point_x(c, f, i) - width / 2, y -= height, width, height);
		}
	}
}

static void chart_legend(struct report_page *p, const struct report_chart *c)
{
	report_put(p, "<p>%s</p></figcaption>\n<ul class=\"legend\">", c->about);
	for (unsigned s = 0; s < c->nseries; s++) {
		report_put(p, "<li><svg viewBox=\"0 0 26 12\" aria-hidden=\"true\">");
		if (c->bars)
			report_put(p, "<rect class=\"%s\" y=\"1\" width=\"26\" height=\"10\"/>", s ? "b1" : "k0");
		else
			report_put(p, "<path class=\"l%u%s\" d=\"M0 6L13 6L26 6\"/>", s, c->npoints <= 30 ? " q" : "");
		report_put(p, "</svg>%s</li>", c->series[s].name);
	}
	report_put(p, "</ul>\n");
}

void report_chart_table(struct report_page *p, const struct report_chart *all, unsigned n)
{
	report_table(p, NULL);
	report_put(p, "<th></th>");
	for (unsigned k = 0; k < n; k++)
		for (unsigned s = 0; s < all[k].nseries; s++)
			report_tag(p, "th", "%s%s%s", all[k].small ? all[k].title : "", all[k].small ? ", " : "",
				all[k].series[s].name);
	report_put(p, "</tr></thead><tbody>\n");
	for (unsigned i = 0; i < all->npoints; i++) {
		report_put(p, "<tr><td>%s</td>", all->points[i].label);
		for (unsigned k = 0; k < n; k++)
			for (unsigned s = 0; s < all[k].nseries; s++)
				report_put(p, "<td>%s</td>", REPORT_VALUE(all[k].unit, point_value(&all[k], s, i)));
		report_put(p, "</tr>\n");
	}
	report_table_end(p, true);
}

void report_chart(struct report_page *p, const struct report_chart *c)
{
	const struct frame *f = c->small ? &small : &large;
	double max = chart_max(c), step = report_step(c->unit, max), top = step, scale;

	while (top < max)
		top += step;
	scale = (f->bottom - f->top) / top;
	report_put(p, "<figure><figcaption>");
	report_tag(p, "h3", "%s", c->title);
	if (c->small)
		report_put(p, "</figcaption>\n");
	else
		chart_legend(p, c);
	report_put(p, "<svg viewBox=\"0 0 %.0f %.0f\" role=\"img\" data-t=\"t%u\" data-c=\"%u\" data-e=\"%u\" "
		"data-n=\"%u\" data-l=\"%.0f\" data-r=\"%.0f\">", f->width, f->height, p->tables + 1, c->column + 1,
		c->column + 1 + c->nseries, c->npoints, f->left, f->right);
	report_tag(p, "title", "%s", c->title);
	report_tag(p, "desc", "%s The table below has the numbers.", c->about);
	chart_axes(p, c, f, step, top);
	if (c->bars)
		chart_bars(p, c, f, scale);
	for (unsigned s = 0; s < c->nseries && !c->bars; s++)
		chart_line(p, c, f, s, scale);
	report_put(p, "</svg>\n");
	if (!c->small)
		report_chart_table(p, c, 1);
	report_put(p, "</figure>\n");
}

/* ---- heat maps ---- */

static void heat_cell(struct report_page *p, const struct report_heat *h, unsigned row, unsigned column, double x,
	double y, double width, double height)
{
	const struct report_cell *cell = &h->cells[row][column];
	unsigned equal = 0;
	bool top = cell->hot > 0.05; /* it may have two rows: its own, and that of its neighbours */

	for (unsigned i = 0; i < h->nrows; i++) {
		top &= h->cells[i][column].hot <= cell->hot;
		equal += h->cells[i][column].hot == cell->hot;
	}
	report_put(p, "<g><rect class=\"%s%s\" x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\" "
		"fill-opacity=\"%.2f\"/>",
		isnan(cell->value) ? "none" : "hot", top && equal <= 2 ? " top" : "", x, y, width - 2, height - 2,
		0.06 + 0.94 * cell->hot);
	if (width >= 7 * strlen(cell->text))
		report_put(p, "<text class=\"cell%s\" x=\"%.1f\" y=\"%.1f\">%s</text>", cell->hot > 0.5 ? " on" : "",
			x + width / 2 - 1, y + height / 2 + 3, cell->text);
	report_tag(p, "title", "%s, %s: %s", h->rows[row], h->columns[column], cell->more);
	report_put(p, "</g>");
}

static void heat_table(struct report_page *p, const struct report_heat *h)
{
	report_table(p, NULL);
	report_put(p, "<th></th>");
	for (unsigned k = 0; k < h->ncolumns; k++)
		report_tag(p, "th", "%s", h->columns[k]);
	report_put(p, "</tr></thead><tbody>\n");
	for (unsigned i = 0; i < h->nrows; i++) {
		report_put(p, "<tr>");
		report_tag(p, "td", "%s", h->rows[i]);
		for (unsigned k = 0; k < h->ncolumns; k++)
			report_number(p, h->unit, h->cells[i][k].value);
		report_put(p, "</tr>\n");
	}
	report_table_end(p, true);
}

void report_heat(struct report_page *p, const struct report_heat *h)
{
	const double left = 200, head = 22, height = h->nrows > 16 ? 16 : 24;
	double width = report_least((892 - left) / h->ncolumns, 150);
	char text[REPORT_TEXT];

	report_put(p, "<figure><figcaption><h3>%s</h3><p>%s</p></figcaption>\n<ul class=\"legend\"><li><svg "
		"viewBox=\"0 0 26 12\" aria-hidden=\"true\">", h->title, h->about);
	for (unsigned i = 0; i < 3; i++)
		report_put(p, "<rect class=\"hot\" x=\"%u\" width=\"8\" height=\"12\" fill-opacity=\"%.2f\"/>", i * 9,
			0.06 + 0.47 * i);
	report_put(p, "</svg>%s; framed: the most of a column</li></ul>\n<svg viewBox=\"0 0 900 %.0f\" "
		"role=\"img\"><title>%s</title><desc>%s The table below has the "
		"numbers.</desc>", h->scale, head + h->nrows * height + 10, h->title,
		h->about);
	for (unsigned k = 0; k < h->ncolumns; k++)
		report_label(p, left + (k + 0.5) * width - 1, 14, "middle",
			report_short(h->columns[k], (size_t)(width / 6.2), text));
	for (unsigned i = 0; i < h->nrows; i++) {
		double y = head + i * height + (h->apart && i >= h->apart ? 10 : 0);

		report_label(p, left - 8, y + height / 2 + 3, "end", report_short(h->rows[i], 26, text));
		for (unsigned k = 0; k < h->ncolumns; k++)
			heat_cell(p, h, i, k, left + k * width, y, width, height);
		report_put(p, "\n");
	}
	report_put(p, "</svg>\n");
	heat_table(p, h);
	report_put(p, "</figure>\n");
}
