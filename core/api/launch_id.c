/* SPDX-License-Identifier: Apache-2.0
 *
 * launch_id: how the ranks of a communicator agree on a launch id. Rank 0 draws it, and a gather passes it on: the
 * other ranks give nothing. The id is 16 random bytes in hexadecimal, so it is new at every start. */
#include "core/api/api_comm_internal.h"
#include "core/base/digest.h"

#define ID_LEN (VCKPT_LAUNCH_ID_BYTES - 1u)

static int id_draw(char *ret_id, struct base_error *err)
{
	static const char digits[] = "0123456789abcdef";
	uint8_t random[ID_LEN / 2];
	int r = base_random(random, sizeof random);

	if (r < 0)
		return base_error_set(err, r, "no random number can be had for a launch id: %s", base_error_name(r));
	for (size_t i = 0; i < sizeof random; i++) {
		ret_id[2 * i] = digits[random[i] >> 4];
		ret_id[2 * i + 1] = digits[random[i] & 15];
	}
	return 0;
}

/* What came is a peer's word: a launch id, and from rank 0 alone. */
static int id_check(const struct comm *c, const struct comm_gathered *all, struct base_error *err)
{
	for (uint32_t i = 0; i < c->size; i++) {
		bool sound = all->len[i] == (i == 0 ? ID_LEN : 0);

		for (size_t k = 0; sound && k < all->len[i]; k++)
			sound = (all->bytes[i][k] >= '0' && all->bytes[i][k] <= '9')
				|| (all->bytes[i][k] >= 'a' && all->bytes[i][k] <= 'f');
		if (!sound)
			return base_error_set(err, -BASE_EFORMAT, "what came from rank %u has %llu bytes and is not "
				"its part of a launch id: the communicator has to deliver what each rank gives, in "
				"the order of ranks", i, (unsigned long long)all->len[i]);
	}
	return 0;
}

/* The communicator is this call's. */
static int id_agree(struct comm *c, char *ret_id, struct base_error *err)
{
	struct comm_gathered all = {0};
	char mine[ID_LEN] = "";
	int r = c->rank == 0 ? id_draw(mine, err) : 0;

	if (r < 0) { /* the other ranks wait for it */
		comm_abort(c, "rank 0 could not draw a launch id");
		return r;
	}
	r = comm_gather(c, "launch id", mine, c->rank == 0 ? ID_LEN : 0, ID_LEN, &all, err);
	if (r == 0) {
		r = id_check(c, &all, err);
		if (r < 0)
			comm_abort(c, "the ranks did not get the same launch id");
	}
	if (r == 0) {
		memcpy(ret_id, all.bytes[0], ID_LEN);
		ret_id[ID_LEN] = 0;
	}
	comm_gathered_release(&all);
	return r;
}

int vckpt_launch_id(struct vckpt_comm *comm, char *ret_id, struct vckpt_error *err)
{
	struct base_error *e = api_error(err);
	int r = api_comm_take(comm, e);

	if (r < 0)
		return r;
	r = ret_id ? id_agree(comm->comm, ret_id, e) : base_error_set(e, -EINVAL, "no place for a launch id is given");
	comm_give(comm->comm);
	return api_result(r, e);
}
