/* SPDX-License-Identifier: Apache-2.0
 *
 * fuzz_store: the body of a record (docs/format/store.md). */
#include "tests/fuzz/fuzz_proto.h"

FUZZ_PROTO(store)
