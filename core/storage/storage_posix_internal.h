/* SPDX-License-Identifier: Apache-2.0
 *
 * storage_posix_internal: what the files of the POSIX storage share.
 *
 *   storage_posix.c        open and close, reading, removing, media figures, watches
 *   storage_posix_direct.c reads past the page cache
 *   storage_posix_path.c   resolution beneath the root, directories that are made and made durable
 *   storage_posix_denied.c where access was refused
 *   storage_posix_list.c   listings
 *   storage_posix_modes.c  modes and group of new files and directories
 *   storage_posix_write.c  temporaries, put
 *   storage_posix_replace.c  files that take the place of others: mending, notes
 *   storage_posix_pack.c   packs
 *   storage_posix_pace.c   how many of their writes are made at once
 */
#ifndef CORE_STORAGE_STORAGE_POSIX_INTERNAL_H
#define CORE_STORAGE_STORAGE_POSIX_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>
#include <sys/stat.h>

#include "core/storage/storage.h"

enum { POSIX_DURABLE_MAX = 4096 }; /* directories remembered as durable; forgotten all at once when full */
enum { POSIX_SUSPECT_MAX = 64 };   /* directories whose fsync failed; with more of them all are suspect */

struct posix_inode { dev_t dev; ino_t ino; };

/* Of new files and directories; storage_posix_modes.c. Never changes. */
struct posix_modes {
	bool given;             /* set once a file is made, with its group; else the umask decides */
	mode_t file, dir;
	gid_t group;
};

struct posix_storage {
	struct storage base;
	int root;                   /* never changes */
	unsigned flags;
	struct posix_modes modes;
	bool shared, alone;         /* other hosts may change it, too; certainly none can; never change */
	atomic_bool named_temps;    /* O_TMPFILE does not work here */
	atomic_bool no_links;       /* hard links do not work here: renameat2 */
	atomic_uint writes_at_once; /* the number that the last pack's writer found best; 0: none was measured */
	pthread_mutex_t lock;       /* protects all below */
	struct posix_inode suspect[POSIX_SUSPECT_MAX];
	size_t suspect_count;
	bool suspect_all;
	bool was_denied;
	char denied[STORAGE_NAME_MAX]; /* the directory of the last -EACCES, -EPERM or -ENOTDIR, which may be missing */
	uint64_t *durable;          /* sorted keys of directories whose entries upwards are known durable */
	size_t durable_count;
};

static inline struct posix_storage *posix_of(struct storage *s) { return (struct posix_storage *)(void *)s; }

/* ---- storage.c ---- */
bool storage_name_part_valid(const char *part, size_t len); /* one part of a name, without `/` */
bool storage_name_temporary(const char *name);              /* ends in ".tmp.<16 hex>": an unfinished file */

/* ---- storage_posix_path.c ---- */
/* An open returned r. true: the process was out of descriptors, some were closed, and the open is to be tried again. */
bool posix_relieved(struct posix_storage *p, int r);
/* Opens `name` beneath the root without following any link; a descriptor or a negative errno. "" is the root itself. */
int posix_open_beneath(struct posix_storage *p, const char *name, int flags);
/* Opens the directory that holds `name`; *ret_last is its last part. Missing directories are made, or not; with
 * POSIX_DURABLE everything up to the root is durable on return. */
enum posix_make { POSIX_FIND, POSIX_MAKE, POSIX_DURABLE };
int posix_open_parent(struct posix_storage *p, const char *name, enum posix_make make, const char **ret_last);
/* 0: it is a regular file; else the error that storage.h gives to such a node. */
int posix_not_regular(const struct stat *st);
/* A regular file, open for reading, and its size. */
int posix_open_regular(struct posix_storage *p, const char *name, uint64_t *ret_size);
int posix_sync(int fd);
/* Makes the names in an open directory durable, also those that other processes made. Every fsync of a directory goes
 * through here: after one has failed, a later one counts only together with a change of this process. */
int posix_sync_names(struct posix_storage *p, int dir);

/* ---- storage_posix.c ---- */
int posix_owner(struct storage *s, const char *name, struct storage_owner *ret_owner);
int posix_read_at(int fd, uint64_t offset, void *bytes, size_t len); /* all or -ENODATA or another error */

int posix_directory_empty(int dir); /* 0, or -ENOTEMPTY */

/* ---- storage_posix_modes.c ---- */
#define POSIX_DIRECTORY "directory" /* ".tmp.<16 hex>" follows: a directory that has no place yet */
int posix_modes_read(struct posix_storage *p); /* of the root */
int posix_modes_give(const struct posix_storage *p, int fd, mode_t mode);
/* 0: it was made, with its mode. -EEXIST: it is there. Not yet durable. */
int posix_directory_make(struct posix_storage *p, int at, const char *part);
bool posix_directory_unplaced(const char *name); /* it is being made, or its maker was killed */

/* ---- storage_posix_denied.c ---- */
/* Both return r. If r is -EACCES, -EPERM or -ENOTDIR they remember a directory: that of the file `name`; or `dir`, its
 * first len bytes. */
int posix_denied(struct posix_storage *p, const char *name, int r);
int posix_denied_in(struct posix_storage *p, const char *dir, size_t len, int r);
int posix_denied_where(struct storage *s, char dir[static STORAGE_NAME_MAX], struct storage_owner *ret_owner);

/* ---- storage_posix_direct.c ---- */
/* fd: a second descriptor of a file, with O_DIRECT. advised: the kernel does not read ahead on the first one. */
struct posix_direct { atomic_int fd; atomic_bool advised; };
/* The multiples at which memory has to begin for O_DIRECT on this file, if the file system can, with blocks of 4096
 * bytes; else 0. */
size_t posix_direct_align(int fd);
void posix_direct_init(struct posix_direct *d);
void posix_direct_release(struct posix_direct *d);
/* file_read_past (storage.h) of a file whose ordinary descriptor is `fd`. */
int posix_read_past(struct posix_direct *d, int fd, uint64_t offset, size_t len, void *room, const uint8_t **ret_bytes);

/* ---- storage_posix_list.c ---- */
/* Names that are no entries of a directory: ".", "..", and in the root of a file system fsck's folder. */
bool posix_name_passed(const char *name, bool root);
int posix_list(struct storage *s, const char *dir, storage_list_func f, void *arg);
int posix_list_dirs(struct storage *s, const char *dir, storage_list_func f, void *arg);

/* ---- storage_posix_write.c ---- */
#define POSIX_TEMP_NAME_MAX 256
struct posix_temp {
	int fd;         /* -1: none */
	char name[POSIX_TEMP_NAME_MAX]; /* empty: it has none */
};
/* "LAST.tmp." and 16 random digits. 0, or the error of base_random, which leaves `name` as it was. */
int posix_random_name(const char *last, char name[static POSIX_TEMP_NAME_MAX]);
int posix_temp_open(struct posix_storage *p, int dir, const char *last, struct posix_temp *t);
/* Gives the file its final name: 0, -EEXIST, or an error of unknown outcome. Not yet durable. */
int posix_temp_publish(struct posix_storage *p, int dir, struct posix_temp *t, const char *last);
/* Closes the temporary, and removes its name if it still has one. */
void posix_temp_drop(int dir, struct posix_temp *t);
int posix_write_at(int fd, uint64_t offset, const void *bytes, size_t len); /* all or an error */
int posix_put(struct storage *s, const char *name, const void *bytes, size_t len);
int posix_put_fleeting(struct storage *s, const char *name, const void *bytes, size_t len);
int posix_put_passing(struct storage *s, const char *name, const void *bytes, size_t len);
/* Finds out in the root how files can be published here; -EOPNOTSUPP: in no way. */
int posix_probe(struct posix_storage *p);

/* ---- storage_posix_replace.c ---- */
/* Gives the file a name of its own beside `last`, if it has none. */
int posix_temp_name(int dir, struct posix_temp *t, const char *last);
/* Puts the file, which has a name, in the place of `last`. Not yet durable. */
int posix_temp_replace(int dir, struct posix_temp *t, const char *last);
int posix_replace(struct storage *s, const char *name, const void *bytes, size_t len);
int posix_replace_by_name(struct storage *s, const char *name, const char *of);
int posix_take(struct storage *s, const char *name, const char *of, const void *bytes, size_t len);

/* ---- storage_posix_pace.c ---- */
enum { POSIX_PACE_MAX = 16 };
struct posix_pace {
	unsigned width;         /* writes at once */
	unsigned best;          /* the width that was measured as the best; 0: none yet */
	uint64_t best_ns;       /* with that width: from the end of a write to the end of the next */
	unsigned writes;        /* that have ended since the width was set, or since nothing was left to write */
	uint64_t since_ns;
	bool settled;           /* nothing more is tried */
};
/* Begins with that width, at least 1. */
void posix_pace_init(struct posix_pace *p, unsigned width);
/* A write ended at `now`; more: another waits to be made. true: there is another best width. */
bool posix_pace_note(struct posix_pace *p, bool more, uint64_t now_ns);
/* There is no memory for more than `width` at once: nothing more is tried. */
void posix_pace_bound(struct posix_pace *p, unsigned width);

/* ---- storage_posix_buffer.c ---- */
enum {
	POSIX_BUFFER_BYTES = 4 << 20,
	POSIX_BUFFER_ALIGN = STORAGE_PAST_ALIGN, /* for O_DIRECT; and the kernel copies faster from a page on */
	POSIX_BUFFER_PART = 32 << 10, /* less is copied */
	POSIX_BUFFER_PARTS = POSIX_BUFFER_BYTES / POSIX_BUFFER_PART,
};
struct posix_part { const uint8_t *bytes; size_t at, len; struct storage_lent *lent; };
struct posix_buffer {
	uint8_t *bytes;         /* POSIX_BUFFER_BYTES; where there are parts they are not used */
	unsigned nparts;
	struct posix_part parts[POSIX_BUFFER_PARTS]; /* by place; do not overlap */
};
struct posix_buffer *posix_buffer_new(void);   /* NULL: no memory */
void posix_buffer_free(struct posix_buffer *b); /* NULL-safe */
/* The bytes are a part at `at`, which is behind all others and inside the buffer. false: it has too many parts. */
bool posix_buffer_lend(struct posix_buffer *b, size_t at, const uint8_t *bytes, size_t len, struct storage_lent *lent);
void posix_buffer_return(struct posix_buffer *b); /* gives lent memory back; its places hold nothing then */
void posix_buffer_keep(struct posix_buffer *b);   /* copies lent memory, and gives it back */
/* Writes its first len bytes at `at` of the file: all or an error. */
int posix_buffer_write(const struct posix_buffer *b, int fd, uint64_t at, size_t len);

/* ---- storage_posix_pack.c ---- */
int posix_writer_open(struct storage *s, const char *name, struct storage_writer **ret_writer);
int posix_writer_append(struct storage_writer *w, const void *bytes, size_t len);
int posix_writer_append_lent(struct storage_writer *w, const void *bytes, size_t len, struct storage_lent *lent);
void posix_writer_keep(struct storage_writer *w);
int posix_writer_reopen(struct storage *s, const char *name, struct storage_writer **ret_writer);
int posix_writer_seal(struct storage_writer *w);
int posix_writer_seal_over(struct storage_writer *w, int (*check)(void *arg, const char *name), void *arg);
void posix_writer_abandon(struct storage_writer *w);

#endif
