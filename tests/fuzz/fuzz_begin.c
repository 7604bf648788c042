/* SPDX-License-Identifier: Apache-2.0
 *
 * fuzz_begin: the body of a record (docs/format/incoming.md). */
#include "tests/fuzz/fuzz_proto.h"

FUZZ_PROTO(begin)
