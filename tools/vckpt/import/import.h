/* SPDX-License-Identifier: Apache-2.0
 *
 * import: what an import found, before a byte of data is read: files, tensors in them, blobs, pickles left out.
 * One thread builds it; afterwards its files are read from many (pread only; never mapped: a mapped file can be cut
 * short under us). */
#ifndef TOOLS_VCKPT_IMPORT_IMPORT_H
#define TOOLS_VCKPT_IMPORT_IMPORT_H

#include <sys/stat.h>

#include "core/base/table.h"
#include "core/save/write/writer.h"
#include "core/view/safetensors.h"
#include "tools/vckpt/tool.h"

struct import_file {
	char *path; /* for messages */
	char *name; /* of a .safetensors: the path under which the step shows it again; NULL: its component's */
	bool pointer; /* of Git LFS, in place of the file */
	int fd; /* -1: opened for each read */
	struct stat stat; /* when it was opened: a file that changes while it is read fails the import */
};

struct import_chunks; /* import_chunks.h */

struct import_tensor {
	char component[PROTO_COMPONENT_MAX + 1];
	char *name;
	uint32_t name_len;
	enum tensor_dtype dtype;
	struct tensor_shape shape;
	uint64_t offset, bytes; /* in the file */
	struct import_file *file;
	struct import_chunks *chunks; /* where its boxes are; NULL: it is in the file as a whole, at the offset */
	bool in_header; /* in that of a .safetensors: this tensor, or one with the same bytes */
};

/* A .safetensors of a component. */
struct import_header {
	struct import_file *file;
	void *bytes;
	size_t len;
	uint64_t data_bytes;
};

struct import_range {
	struct import_file *file;
	uint64_t offset, bytes;
};

struct import_blob {
	char *name;
	bool per_rank; /* rank 0's own */
	struct import_file *file;    /* that it comes from */
	uint64_t bytes;
	char *text;                  /* what it is, if it was made here */
	struct import_range *ranges; /* or the parts that make it, one after another; else it is the whole file */
	size_t nranges;
};

struct import_opaque {
	char *key, *why;
};

struct import_component {
	char name[PROTO_COMPONENT_MAX + 1];
	struct import_header *headers; /* of its .safetensors; none if these lack tensors that they could hold */
	uint32_t nheaders;
	bool named;            /* the step shows them under their own names */
	struct proto_attribute *metadata;
	uint32_t nmetadata; /* of all its safetensors, merged */
	struct base_table by_key; /* metadata by key, until import_plan_check */
};

struct import_plan {
	struct import_file **files;
	size_t nfiles;
	struct import_tensor *tensors;
	size_t ntensors;
	struct import_blob *blobs;
	size_t nblobs;
	struct import_component *components;
	size_t ncomponents;
	struct proto_attribute *attributes;
	size_t nattributes; /* of exported steps */
	char **pickles;
	size_t npickles; /* paths of pickled files that were left out */
	bool keep_pickles;
	struct import_opaque *opaque;
	size_t nopaque; /* values that only Python can read; kept as they are */
	bool exported; /* a source was an exported step or a DCP checkpoint, which may have no tensors */
	uint64_t number; /* that the sources had as steps; PROTO_NONE: several */
	size_t nnumbers; /* sources that had one */
	bool follow; /* links that lead out of a source, too */
	const char *directory; /* the first SOURCE that is one */
	char *bound; /* of the directory that is being added: its links must end in it; NULL: they need not */
};

#define IMPORT_COMPONENT "model" /* where none is named */
#define IMPORT_INDEX_NAME "model.safetensors.index.json"
#define IMPORT_SHARDED_FOLDER "sharded/"

void import_plan_release(struct import_plan *p);
/* Adds one SOURCE: a directory in Hugging Face layout or an exported step, a .safetensors or a .npy, its tensors under
 * the component `asked`. NULL: none was asked for. dtype: of a .npy whose items have no type; 0: none was named. */
int import_add_source(struct import_plan *p, const char *path, const char *asked, enum tensor_dtype dtype,
	struct base_error *err);
/* Call it after the last source: compares tensors that are in two files byte for byte and keeps one of them; refuses
 * sources that hold nothing but pickles. */
int import_plan_check(struct import_plan *p, struct base_error *err);

/* ---- within the import ---- */
/* A source was this step. */
void import_add_number(struct import_plan *p, uint64_t number);
int import_file_open(struct import_plan *p, const char *path, struct import_file **ret_file, struct base_error *err);
/* exactly len */
int import_file_read(struct import_file *f, uint64_t offset, void *bytes, size_t len, struct base_error *err);
/* The 8 bytes and the JSON of a safetensors file that begins at an offset in f, which is not behind its end. */
int import_read_header(struct import_file *f, uint64_t offset, void **ret_header, size_t *ret_len,
	struct base_error *err);
/* rel: the path under which the step shows it again, escaped as files are; NULL: its component's. 1: it has no tensors,
 * and is no part of the component: a blob keeps it. */
int import_add_safetensors(struct import_plan *p, const char *path, const char *rel, const char *component,
	struct base_error *err);
int import_add_directory(struct import_plan *p, const char *path, const char *component, struct base_error *err);
/* Row-major bytes of a tensor, from any thread. */
int import_tensor_read(const struct import_tensor *t, uint64_t offset, void *bytes, size_t len, struct base_error *err);
/* Takes `chunks` in any case. */
int import_add_chunks(struct import_plan *p, const char *component, const char *name, enum tensor_dtype dtype,
	const struct tensor_shape *shape, struct import_file *file, struct import_chunks *chunks,
	struct base_error *err);
/* A blob made here from `file`. Takes `text` in any case. */
int import_add_text(struct import_plan *p, struct import_file *file, const char *name, char *text, size_t len,
	struct base_error *err);
/* Takes `ranges` in any case. */
int import_add_ranges(struct import_plan *p, struct import_file *file, const char *name, struct import_range *ranges,
	size_t nranges, struct base_error *err);
/* -BASE_EFORMAT: it is a pointer of Git LFS. */
int import_refuse_pointer(const struct import_file *f, struct base_error *err);
/* ---- import_names.c ---- */
/* The true name of a file by its path: parts that look escaped are unescaped, so that what was exported comes in under
 * its old name. Free it; NULL: no memory. */
char *import_true_name(const char *rel);
/* Which components are shown under the names of their files; after duplicates are settled. */
int import_names_settle(struct import_plan *p, struct base_error *err);
/* Gives them to the writer. */
int import_names_add(const struct import_component *c, struct save_writer *w, struct base_error *err);
int import_blob_read(const struct import_blob *b, uint64_t offset, void *bytes, size_t len, struct base_error *err);
/* ---- import_links.c ---- */
/* The directory in which the files must be that a directory's links lead to; free it. */
int import_links_bound(const char *directory, char **ret_bound, struct base_error *err);
/* A descriptor for reading. -EINVAL: links lead out of the bound. */
int import_links_open(const char *bound, const char *path, struct base_error *err);

/* A file of a directory, by the path `rel` in a description. Paths and links that lead out of it are refused. */
int import_file_within(struct import_plan *p, const char *directory, const char *rel, struct import_file **ret_file,
	struct base_error *err);
/* A directory that torch's distributed checkpoint wrote: it has .metadata. */
int import_add_dcp(struct import_plan *p, const char *directory, struct base_error *err);
int import_add_blob(struct import_plan *p, const char *path, const char *name, bool per_rank, struct base_error *err);
/* name NULL: the file's; dtype as in import_add_source */
int import_add_npy(struct import_plan *p, const char *path, const char *component, const char *name,
	enum tensor_dtype dtype, struct base_error *err);
void import_attributes_free(struct proto_attribute *attributes, size_t n);
/* -ENOMEM; a key that is there already is not added again */
int import_add_attribute(struct import_plan *p, const struct proto_attribute *a);
#define IMPORT_JSON_MAX_BYTES (200u << 20)
/* the whole file, at most IMPORT_JSON_MAX_BYTES */
int import_file_text(struct import_file *f, char **ret_text, struct base_error *err);

/* A directory's manifest.json. *ret_m NULL: it has none, or one that is not vckpt's. */
struct import_manifest;
int import_exported_open(struct import_plan *p, const char *directory, struct import_manifest **ret_m,
	struct base_error *err);
/* A file of such a directory, rel its path there. 1: the manifest does not name it. */
int import_exported_file(struct import_plan *p, struct import_manifest *m, const char *path, const char *rel,
	struct base_error *err);
/* After the last file; first: number of the plan's tensors before the directory's. */
int import_exported_check(struct import_plan *p, struct import_manifest *m, size_t first, struct base_error *err);
/* by its first bytes: a pickle, or a zip archive as torch.save writes it */
bool import_is_pickle(struct import_file *f);
bool import_may_be_pickle(const char *path); /* by its name */
/* Is a file of this name taken only with the directory that it is in? */
bool import_is_part(const char *name);
bool import_has_suffix(const char *text, const char *suffix);

#endif
