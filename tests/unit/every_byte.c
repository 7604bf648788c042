/* SPDX-License-Identifier: Apache-2.0
 *
 * every_byte STORE STRIDE FIRST: flips one bit of every STRIDE-th byte of every file of a small store outside index/,
 * one at a time, in process:
 *
 *   - every file of every step reads as before or gives an error, never other bytes (manifest.json may say that a
 *     digest is not known), and no step is missing without an error;
 *   - verify finds the flip, padding included.
 *
 * Prints "flips N, wrong W, unseen U, errors E"; exits with 1 when W or U is not 0. The store is left as it was. */
#include <ftw.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "core/base/buf.h"
#include "core/base/log.h"
#include "core/upkeep/verify.h"
#include "core/view/tree.h"

#define FILES_MAX 512

static char *files[FILES_MAX];
static size_t nfiles;
static const char *root;

static int collect(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
	(void)st; (void)ftw;
	if (type == FTW_F && !strstr(path, "/index/") && nfiles < FILES_MAX)
		files[nfiles++] = strdup(path);
	return 0;
}

/* All bytes of all files of all steps, in order; each file either "=<bytes>" or "!". Returns the number of errors,
 * or -1 when a list cannot be read. */
struct content { struct base_buf data; size_t *ends; size_t n; bool *failed; unsigned errors; };

static void content_add(struct content *c, const void *bytes, size_t len, bool failed)
{
	base_buf_append(&c->data, bytes, len);
	c->ends = realloc(c->ends, (c->n + 1) * sizeof *c->ends);
	c->failed = realloc(c->failed, (c->n + 1) * sizeof *c->failed);
	c->ends[c->n] = c->data.len;
	c->failed[c->n++] = failed;
	c->errors += failed;
}

static void content_release(struct content *c)
{
	base_buf_release(&c->data);
	free(c->ends);
	free(c->failed);
	*c = (struct content){0};
}

static int append(void *arg, const void *bytes, size_t len, struct base_error *err)
{
	struct base_buf *b = arg;
	(void)err;
	base_buf_append(b, bytes, len);
	return b->error;
}

static void read_step(struct store *s, const char *run, const struct commit_list_step *entry, struct load_cache *cache,
	struct content *c)
{
	struct load_step *step;
	struct view_tree *tree;
	if (load_step_open(s, run, entry, &step, NULL) < 0) {
		content_add(c, "step", 4, true);
		return;
	}
	if (view_tree_build(step, VIEW_SHOW_ALL, &tree, NULL) < 0) {
		content_add(c, "tree", 4, true);
		load_step_unref(step);
		return;
	}
	for (uint32_t i = 0; i < view_tree_count(tree); i++) {
		const struct view_node *n = view_tree_node(tree, i);
		struct view_file *f;
		uint64_t size = 0;
		int64_t sized, got;
		char *bytes;

		if (n->kind == VIEW_DIRECTORY)
			continue;
		sized = view_tree_size(tree, i, &size);
		bytes = malloc(size + 1);
		got = view_file_open(tree, i, &f, NULL);
		if (got == 0) {
			struct base_buf all = BASE_BUF_INIT;
			got = view_file_stream(f, cache, 0, 1, append, &all, NULL);
			got = got < 0 ? got : (int64_t)all.len;
			memcpy(bytes, all.data ? all.data : (const uint8_t *)"", base_min(all.len, size));
			base_buf_release(&all);
			view_file_close(f);
		}
		content_add(c, n->name, strlen(n->name), false);
		content_add(c, bytes, got == (int64_t)size ? size : 0, sized < 0 || got != (int64_t)size);
		free(bytes);
	}
	view_tree_unref(tree);
	load_step_unref(step);
}

static int read_all(struct content *c)
{
	struct store *s;
	char **runs;
	size_t nruns;
	struct load_cache *cache = load_cache_new(1 << 20);
	int r;

	*c = (struct content){0};
	if (store_open(root, STORE_OPEN_READ_ONLY, &s, NULL) < 0) {
		load_cache_free(cache);
		return -1;
	}
	r = commit_runs(s, &runs, &nruns, NULL);
	for (size_t i = 0; r == 0 && i < nruns; i++) {
		struct commit_list *l;
		if (commit_list_open(s, runs[i], false, &l, NULL) < 0) {
			r = -1;
			break;
		}
		content_add(c, runs[i], strlen(runs[i]), false);
		for (size_t k = 0; k < commit_list_count(l); k++)
			read_step(s, runs[i], commit_list_at(l, k), cache, c);
		commit_list_close(l);
	}
	if (r == 0)
		commit_runs_free(runs, nruns);
	store_close(s);
	load_cache_free(cache);
	return r;
}

/* A manifest.json says so of each tensor that cannot be read: its digest is null, with spaces up to its length. Makes
 * `now`, of an item with as many bytes, what it was. */
static void known_digests(const uint8_t *want, uint8_t *now, size_t len)
{
	char unknown[128];
	size_t n = (size_t)snprintf(unknown, sizeof unknown, "\"digest\": %-*s", BASE_DIGEST_HEX + 1, "null");

	for (size_t at = 0; at + n <= len; at++)
		if (!memcmp(now + at, unknown, n))
			memcpy(now + at, want + at, n);
}

/* Every item of `now` equals the one of `want` or says that it failed; none is missing unless its step failed. */
static bool same(const struct content *want, struct content *now)
{
	if (now->errors == 0 && now->data.len == want->data.len)
		known_digests(want->data.data, now->data.data, now->data.len);
	if (now->errors == 0)
		return now->n == want->n && now->data.len == want->data.len &&
			!memcmp(now->data.data, want->data.data, want->data.len);
	if (now->n != want->n)
		return true;  /* a whole step or tree failed: said so */
	for (size_t i = 0; i < want->n; i++) {
		size_t a = i ? want->ends[i - 1] : 0, b = i ? now->ends[i - 1] : 0;
		if (now->failed[i])
			continue;
		if (want->ends[i] - a == now->ends[i] - b)
			known_digests(want->data.data + a, now->data.data + b, want->ends[i] - a);
		if (want->ends[i] - a != now->ends[i] - b ||
			memcmp(want->data.data + a, now->data.data + b, want->ends[i] - a))
			return false;
	}
	return true;
}

static void ignore_damage(void *arg, const struct upkeep_damage *d) { (void)arg; (void)d; }

static bool verify_finds(void)
{
	struct store *s;
	struct upkeep_verify_options o = {.step = PROTO_NONE, .threads = 1, .damage = ignore_damage};
	struct upkeep_verify_result result = {0};
	int code;

	if (store_open(root, STORE_OPEN_READ_ONLY, &s, NULL) < 0)
		return true;
	code = upkeep_verify(s, &o, &result, NULL);
	store_close(s);
	return code < 0 || result.faults > 0;
}

static void quiet(enum base_log_level level, const char *text) { (void)level; (void)text; }

int main(int argc, char **argv)
{
	size_t stride, at, flips = 0, wrong = 0, unseen = 0, errors = 0;
	struct content want, now;

	if (argc != 4)
		return fprintf(stderr, "usage: every_byte STORE STRIDE FIRST\n"), 2;
	root = argv[1];
	stride = strtoul(argv[2], NULL, 10);
	at = strtoul(argv[3], NULL, 10);
	base_log_set_sink(quiet);
	nftw(root, collect, 16, FTW_PHYS);
	if (read_all(&want) < 0 || want.errors || verify_finds())
		return fprintf(stderr, "the store is damaged to begin with\n"), 2;
	for (size_t f = 0; f < nfiles; f++) {
		FILE *file = fopen(files[f], "r+b");
		size_t size;

		if (!file)
			return perror(files[f]), 2;
		fseek(file, 0, SEEK_END);
		size = (size_t)ftell(file);
		for (; at < size; at += stride, flips++) {
			int byte, bit;

			fseek(file, (long)at, SEEK_SET);
			byte = fgetc(file);
			bit = 1 << ((at / stride) % 8);
			fseek(file, (long)at, SEEK_SET);
			fputc(byte ^ bit, file);
			fflush(file);
			if (read_all(&now) == 0) {
				errors += now.errors;
				if (!same(&want, &now)) {
					wrong++;
					printf("wrong bytes: %s byte %zu\n", files[f], at);
				}
				content_release(&now);
			} else {
				errors++;
			}
			if (!verify_finds()) {
				unseen++;
				printf("not found by verify: %s byte %zu\n", files[f], at);
			}
			fseek(file, (long)at, SEEK_SET);
			fputc(byte, file);
			fflush(file);
		}
		at -= size;
		fclose(file);
		free(files[f]);
	}
	printf("flips %zu, wrong %zu, unseen %zu, errors %zu\n", flips, wrong, unseen, errors);
	content_release(&want);
	return wrong || unseen;
}
