/* SPDX-License-Identifier: Apache-2.0
 *
 * fuzz_entry: the body of a record (docs/format/list.md). */
#include "tests/fuzz/fuzz_proto.h"

FUZZ_PROTO(entry)
