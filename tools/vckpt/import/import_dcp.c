/* SPDX-License-Identifier: Apache-2.0
 *
 * A directory that torch's distributed checkpoint wrote (FileSystemWriter): .metadata, which core/foreign reads, and
 * .distcp files, which hold an item for each box of a tensor and for each other entry, one after another. Items of
 * tensors are looked at here, so that all faults are found before anything is saved; their data are
 * read while the step is saved. Other entries are kept as they are, in one blob, beside an index of them:
 *
 *   .dcp/bytes.00000        their bytes, one after another
 *   .dcp/bytes.00000.json   {key: [offset, length]} */
#include "tools/vckpt/import/import_dcp.h"

#include <inttypes.h>
#include <string.h>

#include "core/base/array.h"
#include "core/base/cleanup.h"
#include "core/foreign/tensor.h"
#include "tools/vckpt/import/import_chunks.h"

#define METADATA_MAX_BYTES ((uint64_t)1 << 30)
#define VALUES_MAX 8000000u
#define GROWN_MAX_BYTES ((uint64_t)64 << 20)
#define TEXT_MAX_BYTES ((size_t)48 << 20)       /* of the 64 MiB that a document may have, with names of tensors */
#define BYTES_NAME ".dcp/bytes.0"

int import_dcp_read(void *arg, uint64_t offset, void *bytes, size_t len, struct base_error *err)
{
	return import_file_read(arg, offset, bytes, len, err);
}

/* Counts the bytes of a file once, even if several names lead to it. */
static int count_file(struct import_dcp *d, const struct import_file *f)
{
	char key[64];

	/* no path in the directory begins so */
	snprintf(key, sizeof key, "//%" PRIx64 ":%" PRIx64, (uint64_t)f->stat.st_dev, (uint64_t)f->stat.st_ino);
	if (json_object_get(d->files, key))
		return 0;
	d->file_bytes += (uint64_t)f->stat.st_size;
	return json_object_set_new(d->files, key, json_null()) < 0 ? base_no_memory(d->err) : 0;
}

/* The file that a place names; opened once. */
static int place_file(struct import_dcp *d, const struct foreign_place *place, struct import_file **ret_file)
{
	base_cleanup_free char *rel = strndup(place->path.bytes, place->path.len);
	json_t *known;
	int r;

	if (!rel)
		return base_no_memory(d->err);
	if (!proto_utf8_valid(place->path.bytes, place->path.len))
		return base_error_set(d->err, -BASE_EFORMAT, "it names a file that is not UTF-8");
	known = json_object_get(d->files, rel);
	if (json_is_integer(known)) {
		*ret_file = d->plan->files[json_integer_value(known)];
		return 0;
	}
	r = import_file_within(d->plan, d->directory, rel, ret_file, d->err);
	if (r < 0)
		return r;
	if (json_object_set_new(d->files, rel, json_integer((json_int_t)d->plan->nfiles - 1)) < 0)
		return base_no_memory(d->err);
	return count_file(d, *ret_file);
}

/* A place as a range of its file; the file must be long enough. */
static int place_range(struct import_dcp *d, const struct foreign_place *place, struct import_range *ret_range)
{
	int r = place_file(d, place, &ret_range->file);
	uint64_t size;

	if (r < 0)
		return r;
	size = (uint64_t)ret_range->file->stat.st_size;
	ret_range->offset = place->offset;
	ret_range->bytes = place->bytes;
	if (place->bytes <= size && place->offset <= size - place->bytes) {
		/* or the work could be far more than the files are large */
		d->item_bytes += place->bytes;
		if (d->item_bytes <= d->file_bytes)
			return 0;
		return base_error_set(d->err, -BASE_EFORMAT, "%s: its items overlap: together they are longer than "
			"the files", ret_range->file->path);
	}
	return base_error_set(d->err, -BASE_EFORMAT,
		"%s: it has %" PRIu64 " bytes and should have at least %" PRIu64 ": it was cut short, or belongs to "
		"another save", ret_range->file->path, size, place->offset + place->bytes);
}

/* Compares the item with the metadata. */
static int check_item(struct import_dcp *d, const struct foreign_dcp_entry *e, const struct tensor_box *box,
	const struct foreign_tensor *t)
{
	char said[TOOL_SHAPE_TEXT];

	if (strcmp(t->dtype, e->dtype) != 0)
		return base_error_set(d->err, -BASE_EFORMAT, "its item is %s, and .metadata says %s", t->dtype,
			e->dtype);
	if (t->shape.ndim == e->shape.ndim && !memcmp(t->shape.dim, box->size, e->shape.ndim * sizeof *box->size))
		return 0;
	return base_error_set(d->err, -BASE_EFORMAT, "its item has the shape %s, and .metadata says %s",
		TOOL_SHAPE(&t->shape), tool_format_shape(e->shape.ndim, box->size, said));
}

int import_dcp_chunk(struct import_chunks *c, const struct tensor_box *box, struct import_file *file,
	const struct foreign_tensor *t, struct base_error *err)
{
	struct import_chunk chunk = {.file = file, .offset = t->offset};
	uint64_t stride = 1;
	bool dense = true;

	for (uint32_t d = t->shape.ndim; d-- > 0; stride *= box->size[d])
		dense = dense && (box->size[d] == 1 || t->stride[d] == stride);
	if (!dense) {
		chunk.stride = calloc(t->shape.ndim, sizeof *chunk.stride);
		if (!chunk.stride)
			return base_no_memory(err);
		memcpy(chunk.stride, t->stride, t->shape.ndim * sizeof *chunk.stride);
	}
	if (import_chunks_add(c, box, &chunk) == 0)
		return 0;
	free(chunk.stride);
	return base_no_memory(err);
}

bool import_dcp_grow(struct import_dcp *d, uint64_t bytes, uint64_t stored)
{
	uint64_t more = bytes > stored ? bytes - stored : 0;

	if (more > GROWN_MAX_BYTES - d->grown)
		return false;
	d->grown += more;
	return true;
}

static int check_growth(struct import_dcp *d, const struct foreign_dcp_entry *e, const struct tensor_box *box,
	uint64_t stored)
{
	uint64_t bytes = tensor_dtype_bytes(e->kept);

	for (uint32_t i = 0; i < e->shape.ndim; i++)
		bytes *= box->size[i]; /* within the tensor, whose bytes were counted without an overflow */
	if (import_dcp_grow(d, bytes, stored))
		return 0;
	return base_error_set(d->err, -BASE_EFORMAT, "it makes %" PRIu64 " bytes of a tensor out of %" PRIu64 ", by "
		"strides of 0 or with another item's data: load the checkpoint with torch and save it again", bytes,
		stored);
}

/* A file may end in one safetensors file with all its tensors; its begin is then the place of each item. */
static int find_parts(struct import_dcp *d, const struct import_range *place, const struct import_parts **ret_parts)
{
	base_cleanup_free char *key = tool_string("%s@%" PRIu64, place->file->path, place->offset);
	json_t *known;
	int r;

	if (!key)
		return base_no_memory(d->err);
	known = json_object_get(d->parts_at, key);
	if (known) {
		*ret_parts = &d->parts[json_integer_value(known)];
		return 0;
	}
	if (base_array_more(d->parts, d->nparts) < 0)
		return base_no_memory(d->err);
	r = import_parts_read(place->file, place->offset, &d->parts[d->nparts], d->err);
	if (r < 0)
		return r;
	*ret_parts = &d->parts[d->nparts];
	if (json_object_set_new(d->parts_at, key, json_integer((json_int_t)d->nparts++)) < 0)
		return base_no_memory(d->err);
	return 0;
}

static int read_part(struct import_dcp *d, const struct foreign_dcp_entry *e, const struct tensor_box *box,
	const struct import_range *place, struct foreign_tensor *ret_t)
{
	const struct import_parts *parts = NULL;
	struct tensor_box is;
	int r = find_parts(d, place, &parts);
	int64_t i;
	const struct view_safetensors_tensor *t;
	uint64_t stride = 1;

	if (r < 0)
		return r;
	i = import_parts_find(parts, e->key.bytes, e->key.len);
	if (i < 0)
		return base_error_set(d->err, -BASE_EFORMAT, "no tensor there has its name");
	r = import_parts_box(parts, (uint32_t)i, &is, d->err);
	if (r < 0)
		return r;
	t = &parts->s.tensors[i];
	if (t->dtype != e->kept || memcmp(is.offset, box->offset, e->shape.ndim * sizeof *is.offset) != 0)
		return base_error_set(d->err, -BASE_EFORMAT,
			"the tensor of its name there has another type, or is another part of it");
	*ret_t = (struct foreign_tensor){.dtype = e->dtype, .shape = t->shape,
		.offset = parts->offset + parts->s.data_offset + t->begin};
	for (uint32_t k = t->shape.ndim; k-- > 0; stride *= t->shape.dim[k])
		ret_t->stride[k] = stride;
	return 0;
}

static int read_item(struct import_dcp *d, const struct foreign_dcp_entry *e, const struct tensor_box *box,
	const struct import_range *place, struct foreign_tensor *ret_t)
{
	struct foreign_range item = {import_dcp_read, place->file, place->offset, place->bytes};
	uint8_t begin[9];
	int r;

	if ((uint64_t)place->file->stat.st_size - place->offset < sizeof begin)
		return base_error_set(d->err, -BASE_EFORMAT, "the file has no item there");
	r = import_file_read(place->file, place->offset, begin, sizeof begin, d->err);
	if (r < 0)
		return r;
	if (begin[8] == '{' && memcmp(begin, "PK", 2) != 0)
		return read_part(d, e, box, place, ret_t);
	return foreign_tensor_read(&item, ret_t, d->err);
}

static int add_chunk(struct import_dcp *d, const struct foreign_dcp_entry *e, size_t number, struct import_chunks *c)
{
	struct import_range place;
	struct foreign_tensor t;
	struct tensor_box box;
	int r;

	tensor_boxes_get(&e->chunks, number, &box);
	if (tensor_box_empty(e->shape.ndim, &box))
		return 0;
	r = place_range(d, &e->places[number], &place);
	if (r < 0)
		return r;
	r = read_item(d, e, &box, &place, &t);
	if (r == 0)
		r = check_item(d, e, &box, &t);
	if (r == 0)
		r = check_growth(d, e, &box, place.bytes);
	if (r < 0)
		return base_error_prefix(d->err, r, "%s, byte %" PRIu64, place.file->path, place.offset);
	return import_dcp_chunk(c, &box, place.file, &t, d->err);
}

static int add_tensor(struct import_dcp *d, size_t entry)
{
	const struct foreign_dcp_entry *e = &d->metadata.entries[entry];
	const struct import_place *p = &d->places[entry];
	base_cleanup(import_chunks_free_p) struct import_chunks *chunks = NULL;
	int r = import_chunks_new(&e->shape, tensor_dtype_bytes(e->kept), &chunks);
	base_cleanup_free char *place = NULL;

	if (r < 0)
		return base_no_memory(d->err);
	for (size_t i = 0; r == 0 && i < e->chunks.n; i++) {
		r = tool_interrupt_check(d->err);
		if (r == 0)
			r = add_chunk(d, e, i, chunks);
	}
	if (r == 0)
		r = import_chunks_finish(chunks, d->err);
	if (r < 0)
		return base_error_prefix(d->err, r, "%.*s", (int)base_min(e->key.len, 300), e->key.bytes);
	place = tool_string("%s/%s", p->component, p->name);
	if (!place || json_object_set_new(d->taken, place, json_null()) < 0)
		return base_no_memory(d->err);
	r = import_add_chunks(d->plan, p->component, p->name, e->kept, &e->shape, d->file, base_steal(chunks), d->err);
	if (r == 0 && d->plan->ncomponents > PROTO_COMPONENTS_MAX)
		r = base_error_set(d->err, -BASE_ELIMIT, "%s: the paths of its keys begin in more ways than the %u "
			"components that a step can have", d->file->path, PROTO_COMPONENTS_MAX);
	return r < 0 ? r : import_dcp_leaf(d, entry, json_pack("{s:s}", "$tensor", p->name));
}

/* ---- what is no tensor ---- */

static int add_opaque(struct import_dcp *d, const struct foreign_text *key, const struct base_error *why)
{
	struct import_plan *p = d->plan;
	struct import_opaque *o;

	if (base_array_more(p->opaque, p->nopaque) < 0)
		return base_no_memory(d->err);
	o = &p->opaque[p->nopaque];
	*o = (struct import_opaque){strndup(key->bytes, key->len), strdup(why->text)};
	p->nopaque++;
	return o->key && o->why ? 0 : base_no_memory(d->err);
}

/* The entry becomes a value of the step, or is listed as opaque. */
static int add_value(struct import_dcp *d, size_t entry, const struct import_range *range)
{
	struct base_error why = {0};
	json_t *value = NULL;
	int r = import_dcp_value(d, entry, range, &value, &why);

	if (r > 0)
		return add_opaque(d, &d->metadata.entries[entry].key, &why);
	return r < 0 ? r : import_dcp_leaf(d, entry, value);
}

static int add_bytes(struct import_dcp *d, size_t entry, struct import_range *range, json_t *index, uint64_t *at)
{
	const struct foreign_dcp_entry *e = &d->metadata.entries[entry];
	int r = tool_interrupt_check(d->err);

	if (r < 0)
		return r;
	r = place_range(d, &e->place, range);
	if (r < 0)
		return base_error_prefix(d->err, r, "%.*s", (int)base_min(e->key.len, 300), e->key.bytes);
	if (json_object_setn_new(index, e->key.bytes, e->key.len,
			json_pack("[I, I]", (json_int_t)*at, (json_int_t)range->bytes)) < 0)
		return base_no_memory(d->err);
	*at += range->bytes;
	return add_value(d, entry, range);
}

static int add_all_bytes(struct import_dcp *d)
{
	base_cleanup_free struct import_range *ranges = calloc(d->metadata.nentries + 1, sizeof *ranges);
	json_auto_t *index = json_object();
	uint64_t at = 0;
	size_t n = 0;
	int r = ranges && index ? 0 : base_no_memory(d->err);
	char *text;

	for (size_t i = 0; r == 0 && i < d->metadata.nentries; i++)
		if (!d->metadata.entries[i].is_tensor)
			r = add_bytes(d, i, &ranges[n++], index, &at);
	if (r < 0 || !n)
		return r;
	if ((r = import_add_ranges(d->plan, d->file, BYTES_NAME, base_steal(ranges), n, d->err)) < 0)
		return r;
	text = json_dumps(index, JSON_INDENT(1) | JSON_ENSURE_ASCII);
	return text ? import_add_text(d->plan, d->file, BYTES_NAME ".json", text, strlen(text), d->err)
		: base_no_memory(d->err);
}

/* ---- the whole ---- */

static int read_metadata(struct import_dcp *d, void **ret_bytes)
{
	uint64_t size = (uint64_t)d->file->stat.st_size;
	base_cleanup_free void *bytes = NULL;
	int r;

	if (size > METADATA_MAX_BYTES)
		return base_error_set(d->err, -BASE_EFORMAT, "%s: larger than 1 GiB", d->file->path);
	bytes = malloc(size + 1);
	if (!bytes)
		return base_no_memory_for(d->err, "%s", d->file->path);
	r = import_file_read(d->file, 0, bytes, size, d->err);
	if (r < 0)
		return r;
	r = foreign_dcp_read(bytes, size, &d->metadata, d->err);
	if (r < 0)
		return base_error_prefix(d->err, r, "%s", d->file->path);
	*ret_bytes = base_steal(bytes);
	return 0;
}

static int add_entries(struct import_dcp *d)
{
	int r = import_dcp_names(d);

	for (size_t i = 0; r == 0 && i < d->metadata.nentries; i++)
		if (d->metadata.entries[i].is_tensor)
			r = add_tensor(d, i);
	if (r == 0)
		r = add_all_bytes(d);
	if (r == 0)
		r = import_dcp_documents(d);
	if (r == 0 && d->metadata.other_data)
		base_warning("%s: planner_data of a planner of your own are not kept", d->file->path);
	return r;
}

int import_add_dcp(struct import_plan *p, const char *directory, struct base_error *err)
{
	struct import_dcp d = {.plan = p, .directory = directory, .values_left = VALUES_MAX,
		.text_left = TEXT_MAX_BYTES, .err = err};
	base_cleanup_free void *bytes = NULL;
	int r = import_file_within(p, directory, ".metadata", &d.file, err);

	if (r < 0)
		return r;
	p->exported = true;
	d.files = json_object();
	d.trees = json_object();
	d.taken = json_object();
	d.parts_at = json_object();
	r = d.files && d.trees && d.taken && d.parts_at ? read_metadata(&d, &bytes) : base_no_memory(err);
	if (r == 0)
		r = add_entries(&d);
	for (size_t i = 0; d.places && i < d.metadata.nentries; i++)
		free(d.places[i].name);
	free(d.places);
	json_decref(d.files);
	json_decref(d.trees);
	json_decref(d.taken);
	json_decref(d.parts_at);
	for (size_t i = 0; i < d.nparts; i++)
		import_parts_release(&d.parts[i]);
	free(d.parts);
	foreign_dcp_release(&d.metadata);
	return r;
}
