/* SPDX-License-Identifier: Apache-2.0
 *
 * fuzz_manifest: the body of a record (docs/format/manifest.md). */
#include "tests/fuzz/fuzz_proto.h"

FUZZ_PROTO(manifest)
