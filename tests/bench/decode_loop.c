/* SPDX-License-Identifier: Apache-2.0
 *
 * decode_loop: the loops that tests/bench/load.py times beside a load of encoded pieces. Bytes are encoded as a save
 * encodes them, a mebibyte at a time; then threads decode all of them, by LZ4 alone or by the whole codec. */
#include <errno.h>
#include <lz4.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "core/pack/codec.h"

#define PIECE_BYTES (UINT64_C(1) << 20)
#define PIECE_BLOCKS (PIECE_BYTES / BASE_BLOCK_BYTES)
#define THREADS_MAX 256u

struct piece { uint8_t *stored; uint32_t lens[PIECE_BLOCKS]; uint64_t len; uint16_t word; };
struct bench_decode {
	struct piece *pieces; uint64_t n;
	uint8_t *out;
	bool lz4_only;
	atomic_uint_fast64_t next;
	atomic_int failed;
};
struct bench_decode *bench_decode_new(const uint8_t *bytes, uint64_t len, unsigned word_bytes);
void bench_decode_free(struct bench_decode *b);
int64_t bench_decode_run(struct bench_decode *b, uint8_t *out, bool lz4_only, unsigned threads);

static int piece_encode(struct piece *p, const uint8_t *bytes, unsigned word_bytes, void *scratch)
{
	uint64_t stored_len;

	p->stored = malloc(p->len);
	if (!p->stored)
		return -ENOMEM;
	p->word = pack_codec_encode(word_bytes, bytes, p->len, p->stored, p->lens, &stored_len, scratch);
	return p->word == PACK_CODEC_RAW ? -EINVAL : 0;
}

/* NULL: no memory, or the bytes are not worth encoding. */
struct bench_decode *bench_decode_new(const uint8_t *bytes, uint64_t len, unsigned word_bytes)
{
	struct bench_decode *b = calloc(1, sizeof *b);
	void *scratch = malloc(PACK_CODEC_SCRATCH);
	int r = b && scratch ? 0 : -ENOMEM;

	if (r == 0) {
		b->n = (len + PIECE_BYTES - 1) / PIECE_BYTES;
		b->pieces = calloc(b->n, sizeof *b->pieces);
		r = b->pieces ? 0 : -ENOMEM;
	}
	for (uint64_t i = 0; r == 0 && i < b->n; i++) {
		uint64_t rest = len - i * PIECE_BYTES;

		b->pieces[i].len = rest < PIECE_BYTES ? rest : PIECE_BYTES;
		r = piece_encode(&b->pieces[i], bytes + i * PIECE_BYTES, word_bytes, scratch);
	}
	free(scratch);
	if (r == 0)
		return b;
	bench_decode_free(b);
	return NULL;
}

void bench_decode_free(struct bench_decode *b)
{
	if (!b)
		return;
	for (uint64_t i = 0; b->pieces && i < b->n; i++)
		free(b->pieces[i].stored);
	free(b->pieces);
	free(b);
}

static int block_decode(const struct bench_decode *b, const struct piece *p, const uint8_t *stored, uint32_t word,
	uint8_t *out, size_t raw_len, void *scratch)
{
	int len = (int)(word & ~PACK_BLOCK_RAW);

	if (!b->lz4_only || word & PACK_BLOCK_RAW)
		return pack_codec_decode_block(p->word, stored, word, out, raw_len, scratch);
	return LZ4_decompress_safe((const char *)stored, (char *)out, len, (int)raw_len) == (int)raw_len ? 0 : -EBADMSG;
}

static void *decode_main(void *arg)
{
	struct bench_decode *b = arg;
	void *scratch = malloc(PACK_CODEC_SCRATCH);
	uint64_t i;
	int r = scratch ? 0 : -ENOMEM;

	while (r == 0 && (i = atomic_fetch_add(&b->next, 1)) < b->n) {
		const struct piece *p = &b->pieces[i];
		const uint8_t *stored = p->stored;

		for (uint64_t at = 0, k = 0; r == 0 && at < p->len; at += BASE_BLOCK_BYTES, k++) {
			uint64_t raw_len = p->len - at < BASE_BLOCK_BYTES ? p->len - at : BASE_BLOCK_BYTES;

			r = block_decode(b, p, stored, p->lens[k], b->out + i * PIECE_BYTES + at, raw_len, scratch);
			stored += p->lens[k] & ~PACK_BLOCK_RAW;
		}
	}
	if (r < 0)
		atomic_store(&b->failed, r);
	free(scratch);
	return NULL;
}

/* Nanoseconds of wall time, or a negative errno. */
int64_t bench_decode_run(struct bench_decode *b, uint8_t *out, bool lz4_only, unsigned threads)
{
	pthread_t crew[THREADS_MAX];
	struct timespec from, to;
	unsigned n = 0;

	b->out = out;
	b->lz4_only = lz4_only;
	atomic_store(&b->next, 0);
	clock_gettime(CLOCK_MONOTONIC, &from);
	while (n + 1 < threads && n < THREADS_MAX && pthread_create(&crew[n], NULL, decode_main, b) == 0)
		n++;
	decode_main(b);
	while (n > 0)
		pthread_join(crew[--n], NULL);
	clock_gettime(CLOCK_MONOTONIC, &to);
	if (atomic_load(&b->failed) < 0)
		return atomic_load(&b->failed);
	return (to.tv_sec - from.tv_sec) * INT64_C(1000000000) + to.tv_nsec - from.tv_nsec;
}
