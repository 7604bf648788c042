/* SPDX-License-Identifier: Apache-2.0
 *
 * A step that was exported, or copied from a mount: a directory with a manifest.json of vckpt's. Its tensors keep their
 * components, true names and dtypes, its blobs their names, the step its attributes; manifest.json itself is no blob.
 *
 *   tensors   COMPONENT/NAME.npy and COMPONENT.safetensors, whichever are there; a tensor that is in both must be
 *             the same in both (import_plan_check)
 *   blobs     the files that manifest.json names, and, as in any directory, those that it does not */
#include "tools/vckpt/import/import.h"
#include "tools/vckpt/import/import_manifest.h"

#include <inttypes.h>
#include <string.h>

#define MANIFEST_NAME "manifest.json"
#define HEAD_BYTES 4096u /* enough to see whether a file that is too large is vckpt's */

/* One that is too large to be read is refused only if it is vckpt's. */
static int too_large(struct import_file *f, struct base_error *err)
{
	char head[HEAD_BYTES];
	int r = import_file_read(f, 0, head, sizeof head, err);

	if (r < 0 || !import_manifest_begins(head, sizeof head))
		return r;
	return base_error_set(err, -BASE_EFORMAT, "%s: larger than %u bytes", f->path, IMPORT_JSON_MAX_BYTES);
}

int import_exported_open(struct import_plan *p, const char *directory, struct import_manifest **ret_m,
	struct base_error *err)
{
	base_cleanup_free char *path = tool_string("%s/" MANIFEST_NAME, directory), *text = NULL;
	struct import_file *f;
	struct stat st;
	int r;
	const json_t *number;

	*ret_m = NULL;
	if (!path)
		return base_no_memory_for(err, "%s", directory);
	if (stat(path, &st) < 0 || !S_ISREG(st.st_mode))
		return 0;
	if ((r = import_file_open(p, path, &f, err)) < 0)
		return r;
	if (f->stat.st_size > IMPORT_JSON_MAX_BYTES)
		return too_large(f, err);
	if ((r = import_file_text(f, &text, err)) < 0)
		return r;
	r = import_manifest_parse(path, text, (size_t)f->stat.st_size, ret_m, err);
	if (r != 0)
		return r < 0 ? r : 0;
	p->exported = true;
	number = json_object_get((*ret_m)->root, "step");
	if (json_is_integer(number) && json_integer_value(number) >= 0)
		import_add_number(p, (uint64_t)json_integer_value(number));
	return 0;
}

static int take_npy(struct import_plan *p, const struct import_manifest *m, const struct import_manifest_tensor *t,
	const char *path, struct base_error *err)
{
	int r = import_add_npy(p, path, t->component, t->name, t->dtype, err);

	if (r == -BASE_EFORMAT)
		base_error_set(err, r, "%s (tensors[%zu] of %s)", err->text, (size_t)(t - m->tensors), m->path);
	return r;
}

/* An import is rank 0. So rank 0's own files stay per-rank blobs; those of other ranks become blobs of the step. */
static int take_blob(struct import_plan *p, struct import_manifest_blob *b, const char *path, struct base_error *err)
{
	base_cleanup_free char *name = tool_string("ranks/%05" PRIu32 "/%s", b->rank, b->name);

	if (!name)
		return base_no_memory_for(err, "%s", path);
	b->found = true; /* its content may have changed since the export; that is allowed */
	return import_add_blob(p, path, b->rank ? name : b->name, b->per_rank && !b->rank, err);
}

/* Adds to the sentence what can be done if the files no longer fit the manifest. */
static int say_way_out(const struct import_manifest *m, int r, struct base_error *err)
{
	struct base_error was = *err;

	return r != -BASE_EFORMAT ? r : base_error_set(err, r, "%.600s; remove %.300s to import the files as they are",
		was.text, m->path);
}

/* A .npy in a component's directory that the manifest does not name: its tensor and component are unknown. */
static bool stray_tensor(const struct import_manifest *m, const char *rel)
{
	const char *slash = strchr(rel, '/');

	return slash && !strchr(slash + 1, '/') && import_has_suffix(rel, ".npy") &&
		import_manifest_component(m, rel, (size_t)(slash - rel));
}

int import_exported_file(struct import_plan *p, struct import_manifest *m, const char *path, const char *rel,
	struct base_error *err)
{
	struct import_manifest_tensor *t = import_manifest_tensor_file(m, rel);
	struct import_manifest_blob *b = import_manifest_blob_file(m, rel);
	const char *component = import_manifest_weights_file(m, rel);

	if (strcmp(rel, MANIFEST_NAME) == 0)
		return 0;
	if (t)
		return take_npy(p, m, t, path, err);
	if (b)
		return take_blob(p, b, path, err);
	if (component) {
		int r = import_add_safetensors(p, path, rel, component, err);

		return r > 0 ? 0 : r; /* none of its component's tensors can be in a .safetensors */
	}
	if (stray_tensor(m, rel)) {
		base_error_set(err, -BASE_EFORMAT, "%s: %s does not name it", path, m->path);
		return say_way_out(m, err->code, err);
	}
	return 1;
}

/* Compares a tensor of a file with the manifest. */
static int check_tensor(struct import_manifest *m, const struct import_tensor *t, struct base_error *err)
{
	struct import_manifest_tensor *said = import_manifest_tensor(m, t->component, t->name, t->name_len);

	if (!said)
		return base_error_set(err, -BASE_EFORMAT, "%s: it holds tensor %.300s, which %s does not name",
			t->file->path, t->name, m->path);
	said->found = true;
	if (said->dtype != t->dtype)
		return base_error_set(err, -BASE_EFORMAT, "%s: tensors[%zu].dtype of %.300s is %s, and %s holds %s",
			m->path, (size_t)(said - m->tensors), t->name, tensor_dtype_name(said->dtype), t->file->path,
			tensor_dtype_name(t->dtype));
	if (tensor_shape_equal(&said->shape, &t->shape))
		return 0;
	return base_error_set(err, -BASE_EFORMAT, "%s: tensors[%zu].shape of %.300s is %s, and %s holds %s", m->path,
		(size_t)(said - m->tensors), t->name, TOOL_SHAPE(&said->shape), t->file->path, TOOL_SHAPE(&t->shape));
}

static int check_blobs(const struct import_manifest *m, struct base_error *err)
{
	size_t of_others = 0;

	for (size_t i = 0; i < m->nblobs; i++) {
		if (!m->blobs[i].found)
			return base_error_set(err, -BASE_EFORMAT, "%s: blobs[%zu].file is not in the directory: %.300s",
				m->path, i, m->blobs[i].file);
		of_others += m->blobs[i].rank != 0;
	}
	if (of_others)
		base_warning("%s: files of single ranks (%zu) are kept as files of the whole step, under ranks/: an "
			"import has rank 0 alone", m->path, of_others);
	return 0;
}

int import_exported_check(struct import_plan *p, struct import_manifest *m, size_t first, struct base_error *err)
{
	int r = 0;

	for (size_t i = first; r == 0 && i < p->ntensors; i++)
		r = check_tensor(m, &p->tensors[i], err);
	for (size_t i = 0; r == 0 && i < m->ntensors; i++)
		if (!m->tensors[i].found)
			r = base_error_set(err, -BASE_EFORMAT,
				"%s: tensors[%zu], %.300s of component %s, is in no file of the directory", m->path, i,
				m->tensors[i].name, m->tensors[i].component);
	if (r == 0)
		r = check_blobs(m, err);
	r = say_way_out(m, r, err);
	for (size_t i = 0; r == 0 && i < m->nattributes; i++) /* of equal keys the first source's value stays */
		if (import_add_attribute(p, &m->attributes[i]) < 0)
			r = base_no_memory_for(err, "%s", m->path);
	return r;
}
