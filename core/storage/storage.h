/* SPDX-License-Identifier: Apache-2.0
 *
 * storage: the one small interface to the medium that a store is on. Nothing above it calls the filesystem.
 *
 * Names are relative paths of `/`-separated parts ("runs/a/000000000000"): parts of [A-Za-z0-9_.=-], never empty, `.`
 * or `..`. An implementation is an object behind `struct storage_ops`; POSIX is the first one, an object store
 * with conditional put must be able to be the second without a change above. No locks, no modification times, no clocks
 * of other hosts. All functions may block, may be called from any thread, and return a negative errno on failure
 * (-ENOENT, -ENOSPC, -EROFS, -EACCES, -EIO, ...). They never leave a file under its final name that is not whole.
 *
 * What an error is about: only -EISDIR, -ELOOP and -ENXIO say that the name itself is a directory, a link, or another
 * node that is no regular file (storage_not_a_file). -ENOTDIR says that something else has the place of a directory, on
 * the way to the name or under it. */
#ifndef CORE_STORAGE_STORAGE_H
#define CORE_STORAGE_STORAGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/uio.h>

#include "core/base/error.h"

#define STORAGE_NAME_MAX 512 /* bytes of a name, NUL included; longer ones are -ENAMETOOLONG */
#define STORAGE_TEMP_SUFFIX_LEN 21u /* ".tmp." and 16 hexadecimal digits, of an unfinished file */

enum { STORAGE_PAST_ALIGN = 4096, STORAGE_PAST_CACHE = 1 };
enum storage_put { STORAGE_PUT_MINE = 0, STORAGE_PUT_OTHER = 1 };

struct storage;
struct storage_file;   /* a pack or other file, open for reading */
struct storage_writer; /* a pack being made */

/* Memory lent to writers: `users` are they and its owner; the last one (storage_lent_drop: true) calls `back`. */
struct storage_lent { _Atomic unsigned users; void (*back)(struct storage_lent *l); };
static inline bool storage_lent_drop(struct storage_lent *l) { return --l->users == 0; }

struct storage_entry {
	const char *name;   /* full name; valid during the callback */
	uint64_t size;      /* bytes (0 where `temporary` and unknown) */
	bool temporary;     /* unfinished: of a put or a pack whose writer may be dead */
	bool foreign;       /* not a regular file, or a name that no vckpt makes: never opened */
	uint64_t names, device, number; /* of a listed file: its hard links, or 1, and what these share, or 0 */
};
/* Return 0 to go on; anything else ends the listing and is returned. */
typedef int (*storage_list_func)(void *arg, const struct storage_entry *entry);

struct storage_stat { /* of the medium, for statfs and df */
	uint64_t block_bytes, blocks, blocks_free, blocks_available, files, files_free;
	bool local;             /* a filesystem of this host: watches work, directory changes are seen at once */
};
/* Of the root. A directory that has another number on that device is another one. kind: S_IFDIR ...; fixed: chattr
 * +i or +a forbids changes. */
struct storage_owner { uint32_t uid, gid, mode, kind; bool fixed; int64_t ctime_ns; uint64_t device, number; };

struct storage_ops {
	/* Puts a whole immutable file if absent. STORAGE_PUT_MINE: the file of that name has these bytes (also when an
	 * earlier try of unknown outcome put them); STORAGE_PUT_OTHER: it has others. Returns only when the file that
	 * it made or found is durable, its directory included. Missing directories are made. */
	int (*put)(struct storage *s, const char *name, const void *bytes, size_t len);
	int (*read_whole)(struct storage *s, const char *name, size_t max_len, void **ret_bytes,
		size_t *ret_len); /* malloc'ed; -EFBIG over max */
	/* exists: 0; -ENOENT; an error of storage_not_a_file: something else has the name */
	int (*size)(struct storage *s, const char *name, uint64_t *ret_size);
	/* Files directly and below; a missing directory lists nothing. All of them or an error: never a part. */
	int (*list)(struct storage *s, const char *prefix_dir, storage_list_func f, void *arg);
	/* immediate sub-directories; anything else is shown as foreign, without its size: only names are read */
	int (*list_dirs)(struct storage *s, const char *dir, storage_list_func f, void *arg);
	int (*remove)(struct storage *s, const char *name);     /* -ENOENT when it is not there */
	int (*remove_dir)(struct storage *s, const char *name); /* an empty one; best effort */
	/* Makes the names in it durable. After an error (-EROFS, too) every call fails until it is certain that nothing
	 * was lost, although the kernel reports such an error only once. 0 in a store opened for reading. */
	int (*sync_dir)(struct storage *s, const char *dir);

	int (*file_open)(struct storage *s, const char *name, struct storage_file **ret_file,
		uint64_t *ret_size);
	/* all bytes or an error: -ENODATA past the end */
	int (*file_read)(struct storage_file *f, uint64_t offset, void *bytes, size_t len);
	void (*file_close)(struct storage_file *f);

	/* A pack: create, append in order, seal. It has its name only once it is sealed, and is durable then. -EEXIST
	 * at seal: the name is taken. Bytes given to append may be reused when it returns. */
	int (*writer_open)(struct storage *s, const char *name, struct storage_writer **ret_writer);
	int (*writer_append)(struct storage_writer *w, const void *bytes, size_t len);
	int (*writer_seal)(struct storage_writer *w);   /* frees w, whatever it returns */
	void (*writer_abandon)(struct storage_writer *w); /* frees w and what it wrote */

	/* Optional: -EOPNOTSUPP is always a valid answer. */
	int (*stat)(struct storage *s, struct storage_stat *ret_stat);
	/* of a file or directory; "": of the store's root */
	int (*owner)(struct storage *s, const char *name, struct storage_owner *ret_owner);
	/* readable when a file appears in or leaves one of them */
	int (*watch)(struct storage *s, const char *const *dirs, size_t n, int *ret_fd);
	void (*close)(struct storage *s);

	/* Puts a whole file under the name, whether the name is taken or not, in one moment: a reader that opens the
	 * name gets the old bytes or the new ones; one that has the file open keeps the old ones. Durable on return.
	 * For mending and notes; only this and replace_by_name ever change the file of a name. */
	int (*replace)(struct storage *s, const char *name, const void *bytes, size_t len);
	/* As writer_open, whether the name is taken or not: ends with writer_seal_over. */
	int (*writer_reopen)(struct storage *s, const char *name, struct storage_writer **ret_writer);
	/* Instead of writer_seal, for a writer from writer_reopen: shows the finished file to `check` under a name of
	 * its own. If that returns 0, puts the file under its name, as `replace` does. Frees w. */
	int (*writer_seal_over)(struct storage_writer *w, int (*check)(void *arg, const char *name), void *arg);

	/* As put, but it syncs nothing: after a power loss the file may be gone, empty or torn. It is for heartbeats,
	 * which matter only while their writers live. The directory exists. */
	int (*put_fleeting)(struct storage *s, const char *name, const void *bytes, size_t len);
	/* Optional (NULL). As file_read, into several pieces of memory, one after another; n <= 1024. */
	int (*file_readv)(struct storage_file *f, uint64_t offset, const struct iovec *iov, unsigned n);

	/* Optional (NULL). As file_read, for many bytes that are read once: past the page cache, if the medium can and
	 * does not have most of them there. `room` starts at a multiple of STORAGE_PAST_ALIGN and has room for len and
	 * twice STORAGE_PAST_ALIGN bytes; ret_bytes points to the first wanted byte in it. STORAGE_PAST_CACHE: they
	 * came past the cache; 0: in the ordinary way. */
	int (*file_read_past)(struct storage_file *f, uint64_t offset, size_t len, void *room,
		const uint8_t **ret_bytes);

	/* Optional (NULL). The directory in which something was refused last (-EACCES, -EPERM), or what was found in
	 * the place of one (-ENOTDIR), in any thread; or the nearest above it that can be looked at. -ENOENT: none. */
	int (*denied)(struct storage *s, char dir[static STORAGE_NAME_MAX], struct storage_owner *ret_owner);

	/* As put, for files that matter only while their writers live, or only to people: after a power loss of this
	 * host the file may be gone, but is never torn. On a medium that other hosts may use: as put, because their
	 * writers may outlive this host. */
	int (*put_passing)(struct storage *s, const char *name, const void *bytes, size_t len);
	/* Optional (NULL). Has the open file lost its name? True where that is not known. */
	bool (*file_gone)(struct storage_file *f);
	/* Optional (NULL, both). As writer_append, of lent bytes, used until seal or abandon at the latest; `back` is
	 * called in any thread. writer_keep: copies those that wait for more bytes to be written. */
	int (*writer_append_lent)(struct storage_writer *w, const void *, size_t, struct storage_lent *);
	void (*writer_keep)(struct storage_writer *w);
	/* Optional (NULL). Makes `name` a further name of the file `of`, in one moment, as `replace`; not durably.
	 * -ENOENT: there is no `of`; -EMLINK: it has all it can have; -EOPNOTSUPP, -EPERM: the medium has none. */
	int (*replace_by_name)(struct storage *s, const char *name, const char *of);
	/* Moves `of`, a file that no one needs, to the free name `name`, with other bytes at its beginning; durable on
	 * return. -ENOENT: it is not there; -EPERM: another user's, or has other names; else it may be gone. */
	int (*take)(struct storage *s, const char *name, const char *of, const void *bytes, size_t len);
};

struct storage {
	const struct storage_ops *ops;
	/* NULL, or called when the process is out of descriptors, before the open that failed is tried once more:
	 * closes those that can be opened again. In any thread, also in several at once. Set before the first use. */
	void (*relieve)(void *arg);
	void *relieve_arg;
	/* how long all callers together have waited for the medium in writer_append and writer_seal */
	_Atomic uint64_t write_wait_ns;
};

enum storage_flag {
	STORAGE_READ_ONLY = 1 << 0,   /* every change is -EROFS */
	/* do not use O_TMPFILE even where it works (tests; NFS takes this path by itself) */
	STORAGE_NAMED_TEMPS = 1 << 1,
	/* packs are written through the page cache and left there, for readers that come at once */
	STORAGE_KEEP_CACHED = 1 << 2,
	/* make the directory if it is missing; refuse one that is not empty (-ENOTEMPTY) */
	STORAGE_CREATE = 1 << 3,
};
/* POSIX: opens beneath one directory descriptor, without following links (openat2 where there is it). Refuses by
 * name a filesystem that has neither hard links nor renameat2(RENAME_NOREPLACE).
 *
 * Modes: where the group of the directory may not write in it, files 0644, directories 0755, under the umask. Where it
 * may, whatever the umask is, the directory's group and permission bits: directories with its setgid and sticky bits,
 * files without the bits to execute. The directory is looked at once, here. */
int storage_open_posix(const char *path, unsigned flags, struct storage **ret_s, struct base_error *err);

static inline int storage_put(struct storage *s, const char *name, const void *bytes, size_t len)
{
	return s->ops->put(s, name, bytes, len);
}
static inline int storage_replace(struct storage *s, const char *name, const void *bytes, size_t len)
{
	return s->ops->replace(s, name, bytes, len);
}
static inline int storage_read_whole(struct storage *s, const char *name, size_t max, void **ret_bytes,
	size_t *ret_len)
{
	return s->ops->read_whole(s, name, max, ret_bytes, ret_len);
}
static inline int storage_size(struct storage *s, const char *name, uint64_t *ret_size)
{
	return s->ops->size(s, name, ret_size);
}
static inline int storage_list_files(struct storage *s, const char *dir, storage_list_func f, void *arg)
{
	return s->ops->list(s, dir, f, arg);
}
static inline int storage_list_dirs(struct storage *s, const char *dir, storage_list_func f, void *arg)
{
	return s->ops->list_dirs(s, dir, f, arg);
}
static inline int storage_remove(struct storage *s, const char *name) { return s->ops->remove(s, name); }

bool storage_name_valid(const char *name); /* the rule above */
/* If the error of a size, an open or a read says that the name is no regular file: what it is, in words; else NULL. */
const char *storage_not_a_file(int r);

#endif
