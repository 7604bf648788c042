/* SPDX-License-Identifier: Apache-2.0
 *
 * The manifest.json of an exported step, as vckpt import reads it. Input: its text. Whatever is accepted is found again
 * under its name and its file, and has a name, a dtype and a shape that can be. */
#include <stdlib.h>
#include <string.h>

#include "proto/name.h"
#include "tools/vckpt/import/import_manifest.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void must(bool good)
{
	if (!good)
		abort();
}

static void check_tensor(const struct import_manifest *m, const struct import_manifest_tensor *t)
{
	uint64_t items;

	must(import_manifest_component(m, t->component, strlen(t->component)) && proto_component_valid(t->component));
	must(t->name_len > 0 && t->name_len == strlen(t->name) && proto_utf8_valid(t->name, t->name_len));
	must(import_manifest_tensor(m, t->component, t->name, t->name_len) == t);
	must(tensor_dtype_valid(t->dtype) && tensor_shape_items(&t->shape, tensor_dtype_bytes(t->dtype), &items) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct import_manifest *m = NULL;
	struct base_error err = {0};
	int r = import_manifest_parse("manifest.json", (const char *)data, size, &m, &err);

	if (r < 0)
		must(!m && err.code == r && err.text[0] && !strchr(err.text, '\n'));
	for (size_t i = 0; r == 0 && i < m->ntensors; i++)
		check_tensor(m, &m->tensors[i]);
	for (size_t i = 0; r == 0 && i < m->nblobs; i++)
		must(import_manifest_blob_file(m, m->blobs[i].file) == &m->blobs[i] && m->blobs[i].name[0] &&
			!import_manifest_tensor_file(m, m->blobs[i].file));
	import_manifest_free(m);
	return 0;
}
