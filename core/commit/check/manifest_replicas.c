/* SPDX-License-Identifier: Apache-2.0
 *
 * manifest_replicas: do the replicas of a step hold the same? Each rank announces one digest for each group of replicas
 * that it is in (core/save/plan/replica.h). Announcements are all that is read while those of a group are equal: a sort
 * of a few lines a rank. Where they differ, one rank of the most that agree and one of the fewest are compared by what
 * their parts say of each tensor, and the sentence names the first tensor that differs, by their names: ranks of one
 * group may have different layouts, whose order is that of the names. Ranks that announce nothing of a group are not
 * asked. */
#include "core/commit/check/manifest_check.h"

#include <stdio.h>
#include <string.h>

#include "core/base/bisect.h"
#include "core/base/cleanup.h"
#include "core/step/part.h"

#define REMEDY "make it equal first (reduce, broadcast), keep it for each rank (per_rank=), declare it as a buffer " \
	"if it may differ, name the mesh and placements along which it is replicated, or save with check_replicas=off"

struct replica_line { struct proto_replica replica; uint32_t rank; };
struct replica_votes { const struct replica_line *lines; uint32_t n; }; /* of one group and digest, ascending ranks */
/* Of a group: how many announced it, how many digests there are, the most that agree, the fewest. */
struct replica_vote { uint32_t n, digests; struct replica_votes most, fewest; };

/* What a rank's part says. */
struct replica_side {
	const struct proto_announcement *a;
	struct proto_part part;
	struct store_layout *layout;
	uint32_t at;                    /* in part.samples */
};

static void side_release(struct replica_side *s)
{
	proto_part_release(&s->part);
	store_layout_free(s->layout);
}

/* ---- votes ---- */

static int line_order(const void *pa, const void *pb)
{
	const struct replica_line *a = pa, *b = pb;
	int c = memcmp(&a->replica, &b->replica, sizeof a->replica);

	return c ? c : (a->rank > b->rank) - (a->rank < b->rank);
}

static bool group_same(const struct replica_line *a, const struct replica_line *b)
{
	return memcmp(a->replica.group, b->replica.group, sizeof a->replica.group) == 0;
}

/* Among digests of equally many ranks the one with the lowest rank counts as most, and among the others as fewest. */
static void vote_count(struct replica_vote *v, struct replica_votes votes)
{
	bool more = votes.n > v->most.n || (votes.n == v->most.n && votes.lines->rank < v->most.lines->rank);

	v->n += votes.n;
	v->digests++;
	if (v->digests == 1) {
		v->most = votes;
		return;
	}
	if (more) {
		struct replica_votes was = v->most;

		v->most = votes;
		votes = was;
	}
	if (v->digests == 2 || votes.n < v->fewest.n ||
		(votes.n == v->fewest.n && votes.lines->rank < v->fewest.lines->rank))
		v->fewest = votes;
}

/* The vote of the group that begins at `line`; returns where the next one does. */
static const struct replica_line *group_vote(const struct replica_line *line, const struct replica_line *end,
	struct replica_vote *ret_vote)
{
	const struct replica_line *group = line;

	*ret_vote = (struct replica_vote){0};
	while (line < end && group_same(line, group)) {
		struct replica_votes votes = {line, 0};

		for (; line < end && memcmp(&line->replica, &votes.lines->replica, sizeof line->replica) == 0; line++)
			votes.n++;
		vote_count(ret_vote, votes);
	}
	return line;
}

/* ---- parts ---- */

static int object_load(struct store *s, const struct proto_announcement *a, const struct proto_ref *from,
	void **ret_bytes, struct base_error *err)
{
	struct pack_object_ref ref = pack_object_ref_from(from);

	if (ref.pack >= a->npacks)
		return base_error_set(err, -BASE_EFORMAT, "rank %u announces pack %u of %u", a->rank, ref.pack,
			a->npacks);
	return store_object_load(s, a->packs[ref.pack].pack, &ref, STORE_METADATA_MAX_BYTES, ret_bytes, err);
}

static int side_layout(struct replica_side *side, struct store *s, const struct proto_announcement *const *all,
	uint32_t n, struct base_error *err)
{
	for (uint32_t i = 0; i < n; i++) {
		base_cleanup_free void *bytes = NULL;
		int r;

		if (!all[i]->stores_layout || !base_digest_equal(&all[i]->layout, &side->a->layout))
			continue;
		r = object_load(s, all[i], &all[i]->layout_ref, &bytes, err);
		return r < 0 ? r : store_layout_decode(bytes, all[i]->layout_ref.raw_len, &side->layout, err);
	}
	return base_error_set(err, -BASE_EFORMAT, "no rank stored the layout of rank %u", side->a->rank);
}

static int side_load(struct replica_side *side, struct store *s, const struct proto_announcement *const *all,
	uint32_t n, struct base_error *err)
{
	base_cleanup_free void *bytes = NULL;
	int r = object_load(s, side->a, &side->a->part, &bytes, err);

	if (r < 0)
		return r;
	r = store_part_decode(bytes, side->a->part.raw_len, &side->part, err);
	if (r < 0)
		return base_error_prefix(err, r, "rank %u", side->a->rank);
	r = side_layout(side, s, all, n, err);
	for (uint32_t i = 0; r == 0 && i < side->part.nsamples; i++)
		if (side->part.samples[i].tensor >= side->layout->m.ntensors)
			r = base_error_set(err, -BASE_EFORMAT, "the part of rank %u names tensor %u of %u",
				side->a->rank, side->part.samples[i].tensor, side->layout->m.ntensors);
	return r;
}

/* ---- which tensor ---- */

/* Its current sample of the group; NULL: that was all. */
static const struct proto_sample *side_sample(struct replica_side *s, const uint8_t group[16])
{
	for (; s->at < s->part.nsamples; s->at++)
		if (memcmp(s->part.samples[s->at].group, group, 16) == 0)
			return &s->part.samples[s->at];
	return NULL;
}

static void sample_text(const struct replica_side *s, const struct proto_sample *sample, char text[static 320])
{
	uint32_t len;
	const char *name = store_layout_name(s->layout, sample->tensor, &len);

	snprintf(text, 320, "%s/%.*s", store_layout_component(s->layout, sample->tensor), store_layout_shown(name, len),
		name);
}

static int sample_order(const struct replica_side *a, const struct proto_sample *x, const struct replica_side *b,
	const struct proto_sample *y)
{
	uint32_t x_len, y_len;
	const char *x_name = store_layout_name(a->layout, x->tensor, &x_len),
		   *y_name = store_layout_name(b->layout, y->tensor, &y_len);
	int c = strcmp(store_layout_component(a->layout, x->tensor), store_layout_component(b->layout, y->tensor));

	if (c == 0)
		c = memcmp(x_name, y_name, base_min(x_len, y_len));
	return c ? c : (x_len > y_len) - (x_len < y_len);
}

struct replica_difference { char tensor[320]; uint32_t n; const struct replica_side *only; /* one of them lists it */ };

static void sides_compare(struct replica_side *a, struct replica_side *b, const uint8_t group[16],
	struct replica_difference *ret_d)
{
	const struct proto_sample *x, *y;

	*ret_d = (struct replica_difference){.n = 0};
	while ((x = side_sample(a, group)), (y = side_sample(b, group)), x || y) {
		int c = !x ? 1 : !y ? -1 : sample_order(a, x, b, y);

		if (c != 0 || memcmp(x->hash, y->hash, sizeof x->hash) != 0) {
			if (ret_d->n++ == 0) {
				sample_text(c <= 0 ? a : b, c <= 0 ? x : y, ret_d->tensor);
				ret_d->only = c < 0 ? a : c > 0 ? b : NULL;
			}
		}
		a->at += c <= 0;
		b->at += c >= 0;
	}
}

/* ---- the sentence ---- */

static void vote_text(const struct replica_vote *v, const struct replica_side *a, const struct replica_side *b,
	char text[static 700])
{
	uint32_t x = a->a->rank, y = b->a->rank;

	if (v->n == 2)
		snprintf(text, 700, "rank %u on host %.200s and rank %u on host %.200s", x, a->a->host, y,
			b->a->host);
	else if (v->most.n == 1)
		snprintf(text, 700, "rank %u and rank %u (no two of %u replicas agree)", x, y, v->n);
	else if (v->fewest.n == 1)
		snprintf(text, 700, "rank %u and rank %u (of %u replicas, only rank %u on host %.200s differs)", x, y,
			v->n, y, b->a->host);
	else
		snprintf(text, 700, "rank %u and rank %u (of %u replicas, %u agree with rank %u and %u with rank %u)",
			x, y, v->n, v->most.n, x, v->fewest.n, y);
}

/* The announcement of a rank; `all` are sorted by rank. */
static const struct proto_announcement *announcement_of(const struct proto_announcement *const *all, uint32_t n,
	uint32_t rank)
{
	return all[base_bisect(i, 0, n - 1, all[i]->rank < rank)];
}

static int vote_refuse(struct store *s, const struct proto_announcement *const *all, uint32_t n,
	const struct replica_vote *v, struct base_error *err)
{
	base_cleanup(side_release) struct replica_side a = {.a = announcement_of(all, n, v->most.lines->rank)};
	base_cleanup(side_release) struct replica_side b = {.a = announcement_of(all, n, v->fewest.lines->rank)};
	struct replica_difference d = {.n = 0};
	struct base_error why = {0};
	char who[700], more[64] = "";
	int r = side_load(&a, s, all, n, &why);

	if (r == 0)
		r = side_load(&b, s, all, n, &why);
	if (r == 0)
		sides_compare(&a, &b, v->most.lines->replica.group, &d);
	vote_text(v, &a, &b, who);
	if (d.n == 0)
		return base_error_set(err, -BASE_EFORMAT,
			"a replicated tensor differs between %s; which one is not known: %.200s", who,
			r < 0 ? why.text : "their parts do not say");
	if (d.n > 1)
		snprintf(more, sizeof more, ", and %u more with it", d.n - 1);
	if (d.only)
		return base_error_set(err, -BASE_EFORMAT, "tensor \"%s\"%s is saved by only one of %s: every replica "
			"has to save it, or to name the mesh along which it is replicated", d.tensor, more, who);
	return base_error_set(err, -BASE_EFORMAT, "tensor \"%s\"%s differs between %s: " REMEDY, d.tensor, more, who);
}

/* A group has two ranks at least; one that a single rank announces is none to the others: they disagree about which
 * ranks hold the same, so nothing was compared. */
static int alone_refuse(struct store *s, const struct proto_announcement *const *all, uint32_t n,
	const struct replica_line *line, struct base_error *err)
{
	base_cleanup(side_release) struct replica_side a = {.a = announcement_of(all, n, line->rank)};
	const struct proto_sample *sample = NULL;
	char tensor[320] = "?";

	if (side_load(&a, s, all, n, NULL) == 0)
		sample = side_sample(&a, line->replica.group);
	if (sample)
		sample_text(&a, sample, tensor);
	return base_error_set(err, -BASE_EFORMAT,
		"tensor \"%s\": rank %u on host %.200s announces that other ranks hold the same, but no other rank "
		"does: give all of them the same mesh, placements and check_replicas", tensor, line->rank, a.a->host);
}

int check_manifest_replicas(struct store *s, const struct proto_announcement *const *all, uint32_t n,
	struct base_error *err)
{
	base_cleanup_free struct replica_line *lines = NULL;
	const struct replica_line *line, *end, *alone = NULL;
	struct replica_vote v;
	size_t count = 0;

	for (uint32_t i = 0; i < n; i++)
		count += all[i]->nreplicas;
	if (count == 0)
		return 0;
	lines = malloc(count * sizeof *lines);
	if (!lines)
		return base_no_memory(err);
	count = 0;
	for (uint32_t i = 0; i < n; i++)
		for (uint32_t j = 0; j < all[i]->nreplicas; j++)
			lines[count++] = (struct replica_line){all[i]->replicas[j], all[i]->rank};
	qsort(lines, count, sizeof *lines, line_order);
	for (line = lines, end = lines + count; line < end;) {
		line = group_vote(line, end, &v);
		if (v.digests > 1)
			return vote_refuse(s, all, n, &v, err);
		if (v.n == 1 && !alone)
			alone = v.most.lines;
	}
	return alone ? alone_refuse(s, all, n, alone, err) : 0;
}
