/* SPDX-License-Identifier: Apache-2.0
 *
 * open: proto_manifest_decode has checked the manifest's own numbers (layouts, map, packs). The functions here check
 * the objects that it names: digest, rank, world, layout and packs. */
#include "core/step/open.h"

#include <stdlib.h>
#include <string.h>

#include "core/base/cleanup.h"
#include "core/step/manifest.h"

int store_open_layout_object(struct store *s, const struct proto_manifest *m, uint32_t number,
	struct store_layout **ret_l, void **ret_object, struct base_error *err)
{
	const struct proto_manifest_layout *from = &m->layouts[number];
	base_cleanup_free void *bytes = NULL;
	int r;

	if (!base_digest_equal(&from->digest, &from->ref.digest))
		return base_error_set(err, -BASE_EFORMAT, "layout %u is not the one that the manifest means", number);
	r = store_manifest_object(s, m, &from->ref, STORE_METADATA_MAX_BYTES, &bytes, err);
	if (r == 0) /* it has been re-hashed */
		r = store_layout_decode_known(bytes, from->ref.raw_len, &from->digest, ret_l, err);
	if (r < 0)
		return base_error_prefix(err, r, "layout %u", number);
	*ret_object = base_steal(bytes);
	return 0;
}

int store_open_layout(struct store *s, const struct proto_manifest *m, uint32_t number, struct store_layout **ret_l,
	struct base_error *err)
{
	base_cleanup_free void *object = NULL;

	return store_open_layout_object(s, m, number, ret_l, &object, err);
}

static int part_packs(const struct proto_manifest *m, const struct proto_manifest_rank *from,
	struct store_opened_part *p, struct base_error *err)
{
	if (p->part.npacks != from->npacks)
		return base_error_set(err, -BASE_EFORMAT, "the part of rank %u lists %u packs, the manifest %u",
			from->rank, p->part.npacks, from->npacks);
	p->packs = calloc((size_t)from->npacks + 1, sizeof *p->packs);
	if (!p->packs)
		return base_no_memory(err);
	p->npacks = from->npacks;
	for (uint32_t i = 0; i < p->npacks; i++) {
		p->packs[i] = m->packs[m->map[from->first_map + i]].pack;
		if (strcmp(p->part.packs[i].pack, p->packs[i]) != 0)
			return base_error_set(err, -BASE_EFORMAT,
				"the part of rank %u lists other packs than the manifest", from->rank);
	}
	return 0;
}

/* Takes over p.part. */
static int part_checked(const struct proto_manifest *m, const struct proto_manifest_rank *from,
	struct store_opened_part p, struct store_opened_part *ret_p, struct base_error *err)
{
	int r = 0;

	if (p.part.rank != from->rank || p.part.world != m->world)
		r = base_error_set(err, -BASE_EFORMAT, "the part of rank %u of %u is that of rank %u of %u",
			from->rank, m->world, p.part.rank, p.part.world);
	else if (!base_digest_equal(&p.part.layout, &m->layouts[from->layout].digest))
		r = base_error_set(err, -BASE_EFORMAT, "the part of rank %u means another layout than the manifest",
			from->rank);
	if (r == 0)
		r = part_packs(m, from, &p, err);
	if (r < 0)
		store_opened_part_release(&p);
	else
		*ret_p = p;
	return r;
}

int store_open_part(struct store *s, const struct proto_manifest *m, uint32_t line, struct store_opened_part *ret_p,
	struct base_error *err)
{
	const struct proto_manifest_rank *from = &m->ranks[line];
	base_cleanup_free void *bytes = NULL;
	struct store_opened_part p = {0};
	int r = store_manifest_object(s, m, &from->part, STORE_METADATA_MAX_BYTES, &bytes, err);

	if (r == 0)
		r = store_part_decode(bytes, from->part.raw_len, &p.part, err);
	return r < 0 ? base_error_prefix(err, r, "part of rank %u", from->rank) : part_checked(m, from, p, ret_p, err);
}

int store_open_part_known(const struct proto_manifest *m, uint32_t line, const struct proto_part *known,
	struct store_opened_part *ret_p, struct base_error *err)
{
	struct store_opened_part p = {.part = *known};

	p.part.arena = NULL;
	return part_checked(m, &m->ranks[line], p, ret_p, err);
}

void store_opened_part_release(struct store_opened_part *p)
{
	proto_part_release(&p->part);
	free(p->packs);
	*p = (struct store_opened_part){0};
}
