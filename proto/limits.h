/* SPDX-License-Identifier: Apache-2.0
 *
 * limits: how large the objects of a store may be (docs/format/objects.md, "Maxima"). Writers refuse what is larger,
 * and so do readers. Records and the layers above share these limits, so they begin with STORE_. Limits of a record's
 * fields are beside the record, in the other headers of proto/. */
#ifndef PROTO_LIMITS_H
#define PROTO_LIMITS_H

#include <stdint.h>

#define STORE_OBJECT_MAX_BYTES (UINT64_C(1) << 46)        /* raw bytes of any object */
#define STORE_ENCODED_MAX_BYTES (UINT64_C(64) << 20)      /* raw bytes; longer objects are stored raw */
#define STORE_EXTENT_MAX_BYTES (UINT64_C(64) << 20)       /* stored bytes; or one object */
#define STORE_METADATA_MAX_BYTES (UINT64_C(1) << 30)      /* raw bytes of a layout, a part, a chunk */
#define STORE_VIEW_HEADER_MAX_BYTES UINT64_C(100000008)   /* safetensors takes 100,000,000, behind its u64 */
#define STORE_INLINE_MAX_BYTES 64u                        /* raw bytes of a piece that is stored in its row */
/* The name of a blob is a path, and each of its slashes may make a directory where the step is shown. */
#define STORE_BLOB_PARTS_MAX 64u                          /* of a name: it has fewer slashes than this */
#define STORE_BLOBS_SLASHES_EACH 16u                      /* in the names of a part's blobs: this many a blob, */
#define STORE_BLOBS_SLASHES_MORE 4096u                    /* and this many more */
#define STORE_UNKNOWN_MAX 1024u                           /* unknown fields of a record, layout or part: these, and */
#define STORE_UNKNOWN_EVERY_BYTES 64u                     /* one more for this many bytes of its body */
#define STORE_DECODE_FACTOR 16u                           /* memory to decode a record: bytes for each byte of its */
#define STORE_DECODE_BYTES (UINT64_C(4) << 20)            /* body, and these */
#define STORE_DECODE_OBJECT_FACTOR 5u                     /* the same for a layout or a part, which may be encoded in */
#define STORE_DECODE_OBJECT_BYTES (UINT64_C(20) << 20)    /* a pack as a 200th of its length */

#endif
