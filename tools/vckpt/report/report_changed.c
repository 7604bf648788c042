/* SPDX-License-Identifier: Apache-2.0
 *
 * What changed between the two newest steps, by layer and component, and how the newest one's pieces are stored. Found
 * as `info` finds it: from rows and digests, without reading a piece. A layer is what tensors' names have in common up
 * to a number (layers.7), wherever that is in them; a tensor without a number counts by the module that it is in. */
#include <string.h>

#include "core/base/array.h"
#include "core/base/table.h"
#include "tools/vckpt/report/report.h"

#define LAYER_BYTES 64u
#define COMPONENTS_MAX 8u       /* columns; of further ones the bytes are in the last */

struct changed_layer { char name[LAYER_BYTES]; double bytes[COMPONENTS_MAX], changed[COMPONENTS_MAX]; };
struct changed {
	struct changed_layer *layers; size_t nlayers, room;
	struct base_table by_name;
	struct tool_sums sums;
	struct load_step *step, *before;
};

/* The layer of a tensor: the part of its name before a number, and that number; else the last part but one. */
static void layer_of(const char *name, size_t len, char text[static LAYER_BYTES])
{
	const char *end = name + len, *before = name, *at = name, *stop;
	bool number;

	for (;; before = at, at = stop + 1) {
		for (stop = at; stop < end && *stop != '.' && *stop != '/';)
			stop++;
		number = at > name && stop > at && strspn(at, "0123456789") >= (size_t)(stop - at);
		if (number || stop == end)
			break;
	}
	snprintf(text, LAYER_BYTES, "%.*s%s%.*s", (int)base_min((uint64_t)((at > name ? at - 1 : end) - before), 40),
		before, number ? "." : "", number ? (int)base_min((uint64_t)(stop - at), 20) : 0, at);
}

/* NULL: no memory. */
static struct changed_layer *layer_find(struct changed *c, const char *name)
{
	uint32_t hash = base_table_hash(name, strlen(name)), i;
	size_t at = 0;

	while ((i = base_table_next(&c->by_name, hash, &at)) != BASE_TABLE_NONE)
		if (strcmp(c->layers[i].name, name) == 0)
			return &c->layers[i];
	if (base_array_room(c->layers, c->room, c->nlayers + 1) < 0 || base_table_reserve(&c->by_name, 1) < 0)
		return NULL;
	base_table_add(&c->by_name, hash, (uint32_t)c->nlayers);
	c->layers[c->nlayers] = (struct changed_layer){0};
	snprintf(c->layers[c->nlayers].name, LAYER_BYTES, "%s", name);
	return &c->layers[c->nlayers++];
}

/* The tensors of a component. */
static int changed_component(struct changed *c, uint32_t component, struct base_error *err)
{
	unsigned column = component < COMPONENTS_MAX ? component : COMPONENTS_MAX - 1;
	uint32_t i, end;
	int r = 0;

	for (load_step_component(c->step, component, &i, &end); r == 0 && i < end; i++) {
		uint64_t bytes = c->sums.bytes, shared = c->sums.bytes_shared;
		struct load_tensor_info info;
		struct changed_layer *layer;
		char name[LAYER_BYTES];

		load_step_tensor_info(c->step, i, &info);
		layer_of(info.name, info.name_len, name);
		layer = layer_find(c, name);
		r = layer ? tool_sums_tensor(&c->sums, c->step, c->before, i, err) : base_no_memory(err);
		if (r < 0)
			break;
		bytes = c->sums.bytes - bytes;
		layer->bytes[column] += (double)bytes;
		layer->changed[column] += (double)bytes - (double)(c->sums.bytes_shared - shared);
	}
	return r;
}

static int layer_order(const void *a, const void *b)
{
	return strverscmp(((const struct changed_layer *)a)->name, ((const struct changed_layer *)b)->name);
}

static void changed_row(const struct changed *c, struct report_heat *h, unsigned row, size_t first, size_t end)
{
	snprintf(h->rows[row], REPORT_TEXT, "%.40s%s%.40s", c->layers[first].name, end - first > 1 ? " to " : "",
		end - first > 1 ? c->layers[end - 1].name : "");
	for (unsigned k = 0; k < h->ncolumns; k++) {
		struct report_cell *cell = &h->cells[row][k];
		double bytes = 0, changed = 0;

		for (size_t i = first; i < end; i++) {
			bytes += c->layers[i].bytes[k];
			changed += c->layers[i].changed[k];
		}
		cell->value = bytes > 0 ? changed : NAN;
		cell->hot = bytes > 0 ? changed / bytes : 0;
		if (bytes > 0)
			snprintf(cell->text, sizeof cell->text, "%.0f %%", 100 * cell->hot);
		snprintf(cell->more, REPORT_TEXT, "%s of %s changed", REPORT_VALUE(REPORT_BYTES, cell->value),
			REPORT_VALUE(REPORT_BYTES, bytes));
	}
}

static int changed_heat(struct report_page *p, struct changed *c)
{
	base_cleanup_free struct report_heat *h = calloc(1, sizeof *h);
	uint32_t components = load_step_component_count(c->step), first, end;

	if (!h)
		return -ENOMEM;
	h->title = "What changed since the step before";
	h->about = "Bytes of pieces whose digest is another than in the step before, of all bytes of the layer.";
	h->scale = "share of the bytes that changed";
	h->unit = REPORT_BYTES;
	h->ncolumns = components < COMPONENTS_MAX ? components : COMPONENTS_MAX;
	h->nrows = c->nlayers < REPORT_ROWS ? (unsigned)c->nlayers : REPORT_ROWS;
	for (unsigned k = 0; k < h->ncolumns; k++)
		report_short(k == COMPONENTS_MAX - 1 && components > COMPONENTS_MAX ? "others"
			: load_step_component(c->step, k, &first, &end), 40, h->columns[k]);
	qsort(c->layers, c->nlayers, sizeof *c->layers, layer_order);
	for (size_t i = 0; i < h->nrows; i++)
		changed_row(c, h, (unsigned)i, i * c->nlayers / h->nrows, (i + 1) * c->nlayers / h->nrows);
	report_heat(p, h);
	return 0;
}

int report_changed(struct report_page *p, struct report_run *run, struct store *s, struct base_error *err)
{
	struct changed c = {0};
	size_t n = run->ncommits;
	int r = load_step_open(s, run->name, commit_list_at(run->list, n - 1), &c.step, err);

	if (r == 0 && n > 1)
		r = load_step_open(s, run->name, commit_list_at(run->list, n - 2), &c.before, err);
	for (uint32_t i = 0; r == 0 && i < load_step_component_count(c.step); i++)
		r = changed_component(&c, i, err);
	if (r == 0 && c.sums.ncodecs)
		report_tag(p, "p", "Pieces of the newest step: %s, stored as %s (%s).", TOOL_BYTES(c.sums.bytes),
			TOOL_BYTES(c.sums.stored), tool_sums_codecs(&c.sums, (char[TOOL_SUMS_TEXT]){0}));
	if (r == 0 && c.nlayers && c.before)
		r = changed_heat(p, &c);
	else if (r == 0)
		report_put(p, "<p class=\"soft\">What changed is not shown: the run has %s.</p>\n",
			c.before ? "no tensors" : "one step only, and nothing to compare it with");
	load_step_unref(c.before);
	load_step_unref(c.step);
	base_table_release(&c.by_name);
	free(c.layers);
	return r;
}
