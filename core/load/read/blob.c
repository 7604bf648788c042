/* SPDX-License-Identifier: Apache-2.0
 *
 * blob: all bytes of a blob, or some blocks of it, checked, straight into the caller's memory and past the cache. The
 * length of a blob is what its part says, and a file with holes may be as long without any bytes stored. So a caller
 * can have both ends checked before it takes the memory. */
#include "core/base/machine.h"
#include "core/load/read/read_internal.h"

/* n blocks from `first` on. */
static int blob_read(const struct load_object *o, uint64_t first, uint64_t n, void *data, struct base_error *err)
{
	const struct pack_object_ref *ref = &o->pieces[0].ref;
	struct store *s = load_step_store(o->step);
	struct pack *pack;
	int r;

	if (ref->pack >= o->npacks)
		return base_error_set(err, -BASE_EFORMAT, "pack %u of %u", ref->pack, o->npacks);
	r = store_pack_get(s, o->packs[ref->pack], &pack, err);
	if (r < 0)
		return r;
	r = pack_object_read_blocks(pack, ref, first, n, data, err);
	store_pack_put(s, pack);
	return r;
}

static int blob_named(const struct load_object *o, int r, struct base_error *err)
{
	return r == 0 ? 0 : load_object_fail(o, r, err);
}

int load_blob_read_blocks(struct load_object *o, uint64_t first, uint64_t n, void *data, struct base_error *err)
{
	if (!o->blob)
		return base_error_set(err, -EINVAL, "%s is not a blob", o->label);
	if (o->bytes && !data)
		return blob_named(o, base_error_set(err, -EINVAL, "no memory is given to read it into"), err);
	return n && o->npieces ? blob_named(o, blob_read(o, first, n, data, err), err) : 0;
}

int load_blob_read(struct load_object *o, void *data, struct base_error *err)
{
	return load_blob_read_blocks(o, 0, base_block_count(o->bytes), data, err);
}

int load_blob_look(struct load_object *o, struct base_error *err)
{
	uint64_t memory = base_machine_memory(""), ends[] = {0, base_block_count(o->bytes) - 1};
	base_cleanup_free void *block = NULL;
	int r = 0;

	if (!o->blob || o->bytes < LOAD_BLOB_LOOK_BYTES)
		return 0;
	block = malloc(BASE_BLOCK_BYTES);
	if (!block)
		return base_no_memory_for(err, "%s", o->label);
	for (unsigned i = 0; r == 0 && i < BASE_COUNT(ends); i++)
		r = blob_read(o, ends[i], 1, block, err);
	if (r == 0 && memory && o->bytes > memory)
		r = base_error_set(err, -ENOMEM, "it has %llu bytes, and this process could take %llu now: read it "
			"with vckpt cat, or from a mount", (unsigned long long)o->bytes, (unsigned long long)memory);
	return blob_named(o, r, err);
}
