/* SPDX-License-Identifier: Apache-2.0
 *
 * fuzz_record: u8 kind | file. Tried as it is, then with the digest of its first copy made good. What decodes is of a
 * kind that there is; what is whole, too, must encode to the same file. */
#include <stdlib.h>
#include <string.h>

#include "core/step/record.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t len);

static const uint8_t id[16] = { 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 };

static void try_record(enum store_record_kind kind, const uint8_t *file, size_t len)
{
	struct store_record record;
	bool whole;
	struct base_buf again = BASE_BUF_INIT;

	if (store_record_decode(kind, id, file, len, &record, &whole) < 0)
		return;
	if (store_record_encode(kind, id, record.body, record.len, &again) < 0)
		abort();
	if (whole && (again.len != len || memcmp(again.data, file, len) != 0))
		abort();
	base_buf_release(&again);
	store_record_release(&record);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t len)
{
	enum store_record_kind kind;
	uint32_t body;
	uint8_t *good, *work;
	struct base_digest digest;

	if (len < 1)
		return 0;
	kind = bytes[0] % (STORE_RECORD_DAMAGE + 2); /* 0 and the last one are none */
	bytes++, len--;
	try_record(kind, bytes, len);
	if (len < STORE_RECORD_HEAD_BYTES)
		return 0;
	body = base_get32(bytes + 12);
	if (body > len - STORE_RECORD_HEAD_BYTES)
		return 0;
	good = malloc(len);
	work = malloc(32 + (size_t)body);
	if (!good || !work)
		abort();
	memcpy(good, bytes, len);
	memcpy(work, good, 16);
	memcpy(work + 16, id, 16);
	memcpy(work + 32, good + STORE_RECORD_HEAD_BYTES, body);
	base_sha256(work, 32 + (size_t)body, &digest);
	memcpy(good + 16, &digest, sizeof digest);
	try_record(kind, good, len);
	free(work);
	free(good);
	return 0;
}
