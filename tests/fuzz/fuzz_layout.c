/* SPDX-License-Identifier: Apache-2.0
 *
 * fuzz_layout: the body of a record (docs/format/layout.md). */
#include "tests/fuzz/fuzz_proto.h"

FUZZ_PROTO(layout)
