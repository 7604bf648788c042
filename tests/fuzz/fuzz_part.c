/* SPDX-License-Identifier: Apache-2.0
 *
 * fuzz_part: the body of a record (docs/format/part.md). */
#include "tests/fuzz/fuzz_proto.h"

FUZZ_PROTO(part)
