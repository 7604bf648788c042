/* SPDX-License-Identifier: Apache-2.0
 *
 * A mount's parts: the store opened for reading, the cache and the runs. */
#include "core/base/clock.h"
#include "fs/mount.h"
#include "fs/pressure.h"

#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>

static void show_forms(struct fs_mount *m, unsigned show)
{
	static const char *const why[] = {"left out, as asked", "shown"};
	bool npy = show & VIEW_SHOW_NPY, safetensors = show & VIEW_SHOW_SAFETENSORS;

	fs_mount_feature(m, "npy", npy, "%s", why[npy]);
	fs_mount_feature(m, "safetensors", safetensors, "%s", why[safetensors]);
}

int fs_mount_init(struct fs_mount *m, const struct fs_options *options, struct base_error *err)
{
	uint32_t generation = 0;
	int r = base_random(&generation, sizeof generation);

	*m = (struct fs_mount){.options = options, .generation = generation >> 1 | 1,
		.refresh_s = options->refresh_ms / 1000.0,
		.start_ns = base_realtime_ns(),
		.statm_fd = open("/proc/self/statm", O_RDONLY | O_CLOEXEC)};
	pthread_mutex_init(&m->lock, NULL);
	fs_interrupts_init(&m->interrupts);
	fs_scratch_init(&m->scratch);
	fs_pressure_open(m);
	if (r < 0)
		return base_error_set(err, r, "no random number can be had: %s", base_error_name(r));
	return 0;
}

int fs_mount_open(struct fs_mount *m, struct base_error *err)
{
	const struct fs_options *options = m->options;
	uint64_t pieces;

	int r = store_open(options->store, STORE_OPEN_READ_ONLY, &m->store, err);
	if (r)
		return r;
	r = fs_modes_mount(m, err);
	if (r)
		return r;
	/* Whatever cache= says, pieces take no more than a share of the memory that was free, or a small control group
	 * would get the server killed. Files in memory need no bound here: each checks what is free (backing.c). */
	pieces = base_min(base_min(options->cache_bytes, FS_PIECES_BYTES), options->memory_bytes / FS_CACHE_SHARE);
	m->cache = load_cache_new(pieces);
	m->backings = fs_backings_new(m, options->tier, options->cache_bytes - pieces);
	m->meshes = fs_meshes_new(options->rules);
	if (!m->cache || !m->meshes || !m->backings)
		return base_no_memory(err);
	fs_mount_feature(m, "xattr", !options->noxattr, "%s", options->noxattr ? "left out, as asked" : "user.vckpt.*");
	fs_mount_feature(m, "allow_other", options->allow_other, "%s", options->allow_other ? "set" : "not asked for");
	show_forms(m, options->show);
	fs_mount_feature(m, "layouts", options->rules, "%s", options->rules ? options->layouts
		: "none given: meshes show the placements of the saves");
	return fs_runs_open(m->store, base_min(options->steps_bytes, options->memory_bytes / (2 * FS_CACHE_SHARE)),
		options->show, &m->runs, err);
}

void fs_mount_release(struct fs_mount *m)
{
	fs_pressure_stop(m);
	while (!LIST_EMPTY(&m->handles))  /* still open at the end: no release will come */
		fs_handle_unref(m, LIST_FIRST(&m->handles));
	fs_backings_free(m->backings);
	fs_meshes_free(m->meshes);
	fs_runs_close(m->runs);
	load_cache_free(m->cache);
	store_close(m->store);
	if (m->statm_fd >= 0)
		close(m->statm_fd);
	for (unsigned i = 0; i < FS_SLOW_LINES; i++)
		free(m->slow[i]);
	fs_interrupts_release(&m->interrupts);
	fs_scratch_release(&m->scratch);
	pthread_mutex_destroy(&m->lock);
}
