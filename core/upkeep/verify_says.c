/* SPDX-License-Identifier: Apache-2.0
 *
 * verify_says: do the records of a step agree, each of which is whole by itself? Sums are computed again from what the
 * parts reach:
 *
 *   tensors    those of its layouts; what several of them list counts once
 *   bytes      raw bytes of all pieces of all rows, and of blobs
 *   new_bytes  sizes of the attempt's own packs
 *   live bytes of a pack: stored bytes of the objects in it that a rank reaches, each once, added up over the ranks; at
 *              most its size. Of a `meta` pack the ranks may say more: a layout or a header that several ranks stored
 *              is named once in the manifest
 *
 * The entry has to agree with the manifest, and a part with the manifest's line of its rank. The first disagreement of
 * a step is reported. */
#include "core/upkeep/verify_internal.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>

#include "core/base/plural.h"
#include "core/commit/check/manifest_check.h"

struct verify_says {
	const struct proto_manifest *m;
	uint64_t bytes;
	uint64_t *live;          /* by the manifest's packs: of all ranks */
	uint64_t *rank_live;     /* the same of the rank under way */
	struct verify_set seen;  /* places that the rank under way reached */
	struct check_blob_names blobs; /* of all parts */
	bool nothing_left_out;   /* every part was added up */
	char wrong[VERIFY_SAYS_MAX]; /* the first disagreement */
};

static void says_wrong(struct verify_says *s, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void says_wrong(struct verify_says *s, const char *format, ...)
{
	va_list args;

	if (s->wrong[0])
		return;
	va_start(args, format);
	vsnprintf(s->wrong, sizeof s->wrong, format, args);
	va_end(args);
}

struct verify_says *verify_says_new(const struct proto_manifest *m)
{
	struct verify_says *s = calloc(1, sizeof *s);

	if (!s)
		return NULL;
	*s = (struct verify_says){.m = m, .nothing_left_out = true};
	check_blob_names_init(&s->blobs);
	s->live = calloc((size_t)m->npacks + 1, sizeof *s->live);
	s->rank_live = calloc((size_t)m->npacks + 1, sizeof *s->rank_live);
	if (s->live && s->rank_live)
		return s;
	verify_says_free(s);
	return NULL;
}

void verify_says_free(struct verify_says *s)
{
	if (!s)
		return;
	free(s->live);
	free(s->rank_live);
	verify_set_release(&s->seen);
	check_blob_names_release(&s->blobs);
	free(s);
}

const char *verify_says_wrong(const struct verify_says *s) { return s->wrong[0] ? s->wrong : NULL; }

void verify_says_leave_out(struct verify_says *s) { s->nothing_left_out = false; }

/* ---- what a rank reaches ---- */

void verify_says_rank(struct verify_says *s)
{
	memset(s->rank_live, 0, s->m->npacks * sizeof *s->rank_live);
	base_table_clear(&s->seen.by_number);
}

int verify_says_object(struct verify_says *s, uint32_t number, const struct pack_object_ref *ref)
{
	int r = verify_set_add(&s->seen, verify_place(NULL, ref, &number, sizeof number));

	if (r <= 0)
		return r;
	s->rank_live[number] += ref->stored_len;
	s->live[number] += ref->stored_len;
	return 0;
}

void verify_says_bytes(struct verify_says *s, uint64_t bytes) { s->bytes += bytes; }

static bool is_meta(const char *pack)
{
	struct pack_name name;

	return pack_name_parse(pack, &name) == 0 && strcmp(name.class, "meta") == 0;
}

/* Compares the part's own table. A part knows neither the size of its own `meta` pack nor all that is live in it. */
int verify_says_part(struct verify_says *s, const struct proto_manifest_rank *line, const struct proto_part *part)
{
	if (part->world != s->m->world)
		says_wrong(s, "the part of rank %u says a world of %u %s, the manifest one of %u", line->rank,
			part->world, base_plural(part->world, "rank", "ranks"), s->m->world);
	if (strcmp(part->host, s->m->hosts[line->host]) != 0)
		says_wrong(s, "the part of rank %u says host %.100s, the manifest %.100s", line->rank, part->host,
			s->m->hosts[line->host]);
	for (uint32_t n = 0; n < part->npacks; n++) {
		const struct proto_pack_use *p = &part->packs[n];
		uint32_t number = s->m->map[line->first_map + n];
		const struct proto_pack_use *q = &s->m->packs[number];

		if (p->size && p->size != q->size)
			says_wrong(s, "the part of rank %u says that pack %s has %" PRIu64 " bytes, the manifest %"
				PRIu64, line->rank, p->pack, p->size, q->size);
		if (s->nothing_left_out && !is_meta(p->pack) && p->live_bytes != s->rank_live[number])
			says_wrong(s, "the part of rank %u says that %" PRIu64 " bytes of pack %s are live, and it "
				"reaches %" PRIu64, line->rank, p->live_bytes, p->pack, s->rank_live[number]);
	}
	return check_blob_names_add(&s->blobs, part);
}

/* ---- the step ---- */

/* Layouts and headers belong to the manifest, whichever rank stored them. */
static void says_shared(struct verify_says *s)
{
	const struct proto_manifest *m = s->m;

	for (uint32_t n = 0; n < m->nlayouts; n++)
		s->live[m->layouts[n].ref.pack] += m->layouts[n].ref.stored_len;
	for (uint32_t n = 0; n < m->nheaders; n++)
		s->live[m->headers[n].ref.pack] += m->headers[n].ref.stored_len;
}

void verify_says_packs(struct verify_says *s)
{
	const struct proto_manifest *m = s->m;
	uint64_t own = 0, live;
	size_t len = strlen(m->attempt);

	says_shared(s);
	for (uint32_t n = 0; n < m->npacks; n++) {
		const struct proto_pack_use *p = &m->packs[n];

		if (strncmp(p->pack, m->attempt, len) == 0 && p->pack[len] == '-')
			own += p->size;
		live = base_min(s->live[n], p->size);
		if (s->nothing_left_out && (is_meta(p->pack) ? p->live_bytes < live : p->live_bytes != live))
			says_wrong(s, "it says that %" PRIu64 " bytes of pack %s are live, and its parts reach %"
				PRIu64, p->live_bytes, p->pack, live);
	}
	if (own != m->new_bytes)
		says_wrong(s, "it says %" PRIu64 " new bytes, and its attempt's packs have %" PRIu64, m->new_bytes,
			own);
	if (s->nothing_left_out && s->bytes != m->bytes)
		says_wrong(s, "it says %" PRIu64 " bytes, and its parts have %" PRIu64, m->bytes, s->bytes);
}

int verify_says_blobs(struct verify_says *s)
{
	struct proto_manifest is = *s->m;
	const char *name;

	if (!s->m->names_blobs)
		return 0;
	if (check_blob_names_set(&s->blobs, &is) < 0)
		return -ENOMEM;
	if (!is.names_blobs)
		says_wrong(s, "it claims to list the blobs of all ranks, but its parts have more than a manifest can "
			"list");
	name = check_blob_names_differ(s->m, &is);
	if (name)
		says_wrong(s, "the ranks that it lists for blob %.400s are not those whose parts have it", name);
	return 0;
}

void verify_says_tensors(struct verify_says *s, uint64_t tensors)
{
	if (tensors != s->m->tensors)
		says_wrong(s, "it says %" PRIu64 " %s, and its layouts have %" PRIu64, s->m->tensors,
			base_plural(s->m->tensors, "tensor", "tensors"), tensors);
}

bool verify_says_entry(const struct verify_step *step, const struct proto_manifest *m,
	char text[static VERIFY_SAYS_MAX])
{
	const struct proto_commit *c = &step->step->commit;
	const struct { const char *what; uint64_t said, is; } numbers[] = {
		{"tensors", c->tensors, m->tensors}, {"bytes", c->bytes, m->bytes},
		{"new bytes", c->new_bytes, m->new_bytes}};

	for (size_t i = 0; i < BASE_COUNT(numbers); i++) {
		if (numbers[i].said == numbers[i].is)
			continue;
		snprintf(text, VERIFY_SAYS_MAX, "it says %" PRIu64 " %s of step %" PRIu64 ", its manifest %" PRIu64,
			numbers[i].said, numbers[i].what, c->step, numbers[i].is);
		return false;
	}
	if (proto_attributes_equal(c->attributes, c->nattributes, m->attributes, m->nattributes))
		return true;
	snprintf(text, VERIFY_SAYS_MAX, "it says other attributes of step %" PRIu64 " than its manifest", c->step);
	return false;
}
