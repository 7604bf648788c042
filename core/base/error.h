/* SPDX-License-Identifier: Apache-2.0
 *
 * error: what functions return, and the sentence that a person reads.
 *
 * Functions return 0 or a positive result, or a negative errno. A few errnos have one fixed meaning here (table
 * below). Functions whose failure a person may have to understand take a `struct base_error *` last and fill it
 * with one sentence that names the thing at fault; it may be NULL. No locks; one object belongs to one thread. */
#ifndef CORE_BASE_ERROR_H
#define CORE_BASE_ERROR_H

#include <errno.h>
#include <stdbool.h>

enum {
	BASE_EDAMAGED = EBADMSG,          /* stored bytes do not match their check or digest */
	BASE_EFORMAT = EPROTO,            /* a record or file breaks the rules of its format */
	BASE_EVERSION = EPROTONOSUPPORT,  /* a newer format version, or an unknown required feature */
	BASE_ENOSTORE = EMEDIUMTYPE,      /* the directory is not a vckpt store */
	BASE_EABORTED = ECANCELED,        /* the attempt was aborted: the run's list says so */
	BASE_EUNDECIDED = EINPROGRESS,    /* not known yet: what was asked for may have happened, or may still */
	BASE_EBUSY = EBUSY,               /* another writer or launch is at work */
	BASE_EFORKED = ECHILD,            /* this process is a forked child of the one that opened the object */
	BASE_ELIMIT = E2BIG,              /* a size maximum of the format is exceeded */
	BASE_EPINNED = EADV,              /* the step has to stay as it is: it is pinned, say; no storage answers so */
};

struct base_error {
	int code;        /* negative errno; 0 = nothing set */
	char text[1000]; /* one sentence, no newline */
};

/* Fills `err` (NULL: nothing) and returns `code`, which must be negative. Later calls overwrite earlier ones. */
int base_error_set(struct base_error *err, int code, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* -BASE_EVERSION: what a newer vckpt wrote, and "; update vckpt" after it. */
int base_error_newer(struct base_error *err, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* -ENOMEM: "out of memory", or "WHAT: out of memory". */
int base_no_memory(struct base_error *err);
int base_no_memory_for(struct base_error *err, const char *what, ...) __attribute__((format(printf, 2, 3)));

/* Puts "PREFIX: " before the sentence (sets it from strerror if there is none yet); returns err->code or `code`. */
int base_error_prefix(struct base_error *err, int code, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* Text of a negative errno, with the meanings above; static storage, any thread. */
const char *base_error_name(int code);

#endif
