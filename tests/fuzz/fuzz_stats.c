/* SPDX-License-Identifier: Apache-2.0
 *
 * fuzz_stats: the body of a record (docs/format/stats.md). */
#include "tests/fuzz/fuzz_proto.h"

FUZZ_PROTO(stats)
