/* SPDX-License-Identifier: Apache-2.0
 *
 * fuzz_base: the body of a record (docs/format/incoming.md). */
#include "tests/fuzz/fuzz_proto.h"

FUZZ_PROTO_IN(base, struct proto_base_record)
