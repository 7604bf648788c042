/* SPDX-License-Identifier: Apache-2.0
 *
 * message: the records of a store as plain C structs, and their protobuf form (proto/vckpt.proto; byte level in
 * docs/format/). The only user of protobuf-c. No I/O, no locks; any thread.
 *
 * Rules for all: encode appends to a buffer and is deterministic; decode checks everything that the struct promises
 * (lengths of fixed-width tables, indices into other tables, UTF-8, counts against the body's length) before it
 * allocates, keeps unknown optional fields where it says so, refuses an unknown required feature with -BASE_EVERSION
 * and anything malformed with -BASE_EFORMAT. Decoded structs own one arena: free it with proto_NAME_release (NULL-safe,
 * zeroes). Strings are NUL-terminated and contain no NUL. Bodies over the record's maximum were refused before. */
#ifndef PROTO_MESSAGE_H
#define PROTO_MESSAGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/base/buf.h"
#include "core/base/digest.h"
#include "core/base/error.h"
#include "core/tensor/box.h"
#include "core/tensor/dtype.h"
#include "core/tensor/grid.h"
#include "proto/entry.h"
#include "proto/incoming.h"
#include "proto/name.h"
#include "proto/stats.h"

#define PROTO_VERSION 2u         /* of what is written; 1 is read (docs/format/versions.md) */
#define PROTO_RUN_MAX 128        /* bytes of a run's name */
#define PROTO_COMPONENT_MAX 64   /* bytes of a component's name: [A-Za-z0-9_][A-Za-z0-9._-]* */
#define PROTO_COMPONENTS_MAX 4096u       /* of a step */
#define PROTO_NAME_MAX 65535     /* bytes of a tensor's or blob's name (UTF-8, no NUL, not empty) */
#define PROTO_ATTEMPT_MAX 48     /* "<16 hex>-<decimal>", NUL included */
#define PROTO_HOST_MAX 256
#define PROTO_REASON_MAX 1024
#define PROTO_TAG_MAX 64
#define PROTO_ATTRIBUTES_MAX 1024       /* a step's */
#define PROTO_ATTRIBUTE_VALUE_MAX 4096  /* bytes of one value */
#define PROTO_ATTRIBUTES_MAX_BYTES 65536 /* keys and values of a step together */
#define PROTO_NONE UINT64_MAX    /* "no entry", "no step" */

struct proto_attribute { const char *key, *value; };   /* sorted by key, keys unique */
/* Those of a, with those of b in the place of equal keys. ret_all has room for na + nb. Returns how many. */
size_t proto_attributes_merge(const struct proto_attribute *a, size_t na, const struct proto_attribute *b, size_t nb,
	struct proto_attribute *ret_all);
bool proto_attributes_equal(const struct proto_attribute *a, size_t na, const struct proto_attribute *b, size_t nb);

/* Why decoding `body` gave -BASE_EVERSION, as the end of a sentence: "it needs the feature "x", which this vckpt does
 * not know". */
#define PROTO_NEWER_BYTES 400
void proto_newer(const void *body, size_t len, char text[static PROTO_NEWER_BYTES]);

/* ---- vckpt.store ---- */
struct proto_store {
	uint32_t version;               /* of the store's format: PROTO_VERSION, or an older one */
	uint8_t id[16];
	uint64_t seed;                  /* of XXH3-128 */
	struct tensor_grid_params grid; /* of new layouts */
	uint64_t reserve_bytes;         /* size of the file `reserve`; 0: none */
	bool list_2;                    /* snapshots go on from earlier ones: the word "list-2" */
	bool list_3;                    /* entries may be collected: the word "list-3"; with list_2 only */
	bool list_4;                    /* lists have facts of steps: the word "list-4"; with list_3 only */
	void *arena;
};
int proto_store_encode(const struct proto_store *m, struct base_buf *b);
int proto_store_decode(const void *body, size_t len, struct proto_store *ret_m);
void proto_store_release(struct proto_store *m);

/* ---- references, in manifests, parts and announcements ---- */
struct proto_ref {                  /* 72 bytes packed on disk: see docs/format/manifest.md */
	struct base_digest digest;
	uint64_t offset, checks, raw_len, stored_len;
	uint32_t pack;                  /* number in the pack table of the record that holds it */
	uint16_t codec; uint8_t kind;
};

/* ---- layout object: names, dtypes, shapes, grid, and which rank holds what ---- */
struct proto_layout_tensor {        /* 32 bytes packed on disk */
	uint32_t component;             /* index into components */
	uint32_t name_offset, name_len; /* in names */
	uint32_t first_dim;             /* in dims */
	uint8_t dtype, ndim;
	uint16_t flags;                 /* bit 0: a buffer (not compared between replicas) */
	/* 1 + index into meshes, placements; 0: nothing recorded, the parts' rows say which rank stored what */
	uint32_t mesh, placement;
	uint32_t reserved;              /* 0: rows are in memory as they are stored */
};
struct proto_mesh {
	const char *const *dim_names; const uint32_t *dim_sizes; uint32_t ndims;
	const uint32_t *ranks; uint32_t nranks;
};
struct proto_layout {
	struct tensor_grid_params grid;
	const char *const *components; uint32_t ncomponents; /* sorted, unique */
	const struct proto_layout_tensor *tensors; uint32_t ntensors; /* sorted by (component, name bytes), unique */
	const char *names; uint64_t names_len;             /* not NUL-terminated each */
	const uint64_t *dims; uint64_t ndims;
	const struct proto_mesh *meshes; uint32_t nmeshes;
	/* canonical words, one a mesh dimension: "R,S(0)"; "flat a:b/L" and boxes come with features */
	const char *const *placements; uint32_t nplacements;
	void *arena;
};
#define PROTO_LAYOUT_MAX_TENSORS (UINT32_C(1) << 24)
int proto_layout_encode(const struct proto_layout *m, struct base_buf *b);
int proto_layout_decode(const void *body, size_t len, struct proto_layout *ret_m);
void proto_layout_release(struct proto_layout *m);

/* ---- part object: one writer's; its rows are in chunk objects (docs/format/part.md, core/step/part.h) ---- */
/* tensors: indices into the layout */
struct proto_chunk { uint32_t first_tensor, last_tensor, nrows; struct proto_ref ref; };
/* len 0: ref unused but its digest */
struct proto_blob { const char *name; bool per_rank; uint64_t len; struct proto_ref ref; };
/* live: stored bytes that this record reaches in it */
struct proto_pack_use { const char *pack; uint64_t size, live_bytes; };
struct proto_part {
	uint32_t rank, world;
	const char *host;
	struct base_digest layout;                              /* of the layout object that its tensor numbers mean */
	/* own packs first; `pack` of every reference and extent below counts in here */
	const struct proto_pack_use *packs; uint32_t npacks;
	const struct proto_chunk *chunks; uint32_t nchunks;     /* by ascending tensor */
	const struct proto_blob *blobs; uint32_t nblobs;        /* sorted by (per_rank, name) */
	const struct proto_timing *timings; uint32_t ntimings;  /* phases up to the part */
	const struct proto_sample *samples; uint32_t nsamples;  /* sorted by (tensor, group), unique; may be none */
	void *arena;
};
int proto_part_encode(const struct proto_part *m, struct base_buf *b);
int proto_part_decode(const void *body, size_t len, struct proto_part *ret_m);
void proto_part_release(struct proto_part *m);

/* ---- announcement incoming/<run>/<attempt>/part.<rank>: what the manifest will say of this rank ---- */
struct proto_view_header {          /* of the component's tensors in one layout: a rank knows its own layout only */
	const char *component; const char *view; struct proto_ref ref; uint64_t data_bytes;  /* view: "safetensors" */
	uint32_t layout;                /* index into the manifest's layouts; announcement: 0, the rank's own */
};
struct proto_announcement {
	const char *run, *attempt; uint64_t step; uint32_t rank, world;
	const char *host;
	struct base_digest layout;
	bool stores_layout; struct proto_ref layout_ref;
	const struct proto_view_header *headers; uint32_t nheaders;
	struct proto_ref part;
	/* numbers of the refs above count in here; same table as the part's, plus its meta pack's final size */
	const struct proto_pack_use *packs; uint32_t npacks;
	uint64_t tensors, bytes, new_bytes;
	const struct proto_attribute *attributes; size_t nattributes; /* equal on all ranks */
	const struct proto_replica *replicas; uint32_t nreplicas;     /* sorted by group, unique; may be none */
	const struct proto_common *commons; uint32_t ncommons;        /* by group, unique; their names are left out */
	void *arena;
};
int proto_announcement_encode(const struct proto_announcement *m, struct base_buf *b);
int proto_announcement_decode(const void *body, size_t len, struct proto_announcement *ret_m);
void proto_announcement_release(struct proto_announcement *m);

/* ---- manifest: everything that a step consists of; deterministic ---- */
struct proto_manifest_layout { struct base_digest digest; struct proto_ref ref; };
struct proto_manifest_rank {        /* one line per rank, fixed width on disk */
	uint32_t rank, layout;          /* layout: index */
	uint32_t host;                  /* index into hosts */
	uint32_t first_map, npacks;     /* pack n of this rank's part is packs[map[first_map + n]] */
	struct proto_ref part;
};
/* Which ranks' parts have a blob: ascending, gaps between them. Of one that is not per_rank the lowest rank. */
struct proto_rank_range { uint32_t first, n; };
struct proto_blob_name { const char *name; bool per_rank; const struct proto_rank_range *ranges; uint32_t nranges; };
#define PROTO_BLOB_NAMES_MAX 1024u
#define PROTO_THINNED_MAX 1024u
struct proto_manifest {
	const char *run, *attempt; uint64_t step; uint32_t world;
	const struct proto_attribute *attributes; size_t nattributes;
	const struct proto_manifest_layout *layouts; uint32_t nlayouts;
	const struct proto_view_header *headers; uint32_t nheaders;      /* sorted by (component, view, layout) */
	const char *const *hosts; uint32_t nhosts;
	const struct proto_manifest_rank *ranks; uint32_t nranks;        /* by ascending rank */
	const uint32_t *map; uint32_t nmap;
	const struct proto_pack_use *packs; uint32_t npacks;             /* sorted by name, unique */
	uint64_t tensors, bytes, new_bytes;
	bool names_blobs;               /* false: it does not say which there are */
	const struct proto_blob_name *blobs; uint32_t nblobs;            /* sorted by (per_rank, name) */
	/* components that were dropped since it was saved (core/upkeep/thin.h); sorted, unique */
	const char *const *thinned; uint32_t nthinned;
	void *arena;
};
int proto_manifest_encode(const struct proto_manifest *m, struct base_buf *b);
int proto_manifest_decode(const void *body, size_t len, struct proto_manifest *ret_m);
void proto_manifest_release(struct proto_manifest *m);

#endif
