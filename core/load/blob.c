/* SPDX-License-Identifier: Apache-2.0
 *
 * blob: all bytes of a blob, checked, straight into the caller's memory and past the cache. */
#include "core/load/load_internal.h"

static int blob_read(const struct load_object *o, const struct store_object_ref *ref, void *data,
	struct base_error *err)
{
	struct store *s = load_step_store(o->step);
	struct store_pack *pack;
	int r;

	if (ref->pack >= o->npacks)
		return base_error_set(err, -BASE_EFORMAT, "pack %u of %u", ref->pack, o->npacks);
	r = store_pack_get(s, o->packs[ref->pack], &pack, err);
	if (r < 0)
		return r;
	r = store_object_read(pack, ref, data, err);
	store_pack_put(s, pack);
	return r;
}

int load_blob_read(struct load_object *o, void *data, struct base_error *err)
{
	const struct load_step_info *info = load_step_info(o->step);
	int r;

	if (!o->blob)
		return base_error_set(err, -EINVAL, "%s is not a blob", o->label);
	if (o->npieces == 0)
		return 0;
	r = blob_read(o, &o->pieces[0].ref, data, err);
	return r == 0 ? 0 : base_error_prefix(err, r, "%s/%llu: %s", info->run, (unsigned long long)info->step,
		o->label);
}
