/* SPDX-License-Identifier: Apache-2.0
 *
 * step: what expressions may ask of any visible step. Who asks more (vckpt find) has names of its own behind these.
 * Pure; any thread. */
#ifndef CORE_QUERY_STEP_H
#define CORE_QUERY_STEP_H

#include "core/query/expr.h"
#include "proto/message.h"

/* The first of an array of names, in the order of the numbers below. */
#define QUERY_STEP_NAMES {"step", QUERY_NUMBER}, {"time", QUERY_TIME}, {"age", QUERY_AGE}, {"bytes", QUERY_BYTES}, \
	{"run", QUERY_TEXT}, {"tag", QUERY_TEXT}, {"pinned", QUERY_FLAG}
enum { QUERY_STEP_NUMBER, QUERY_STEP_TIME, QUERY_STEP_AGE, QUERY_STEP_BYTES, QUERY_STEP_RUN, QUERY_STEP_TAG,
	QUERY_STEP_PINNED, QUERY_STEP_COUNT };

struct query_step { /* borrowed */
	const char *run;
	uint64_t step, bytes;
	int64_t time_ns, now_ns; /* of the commit; of the question */
	bool pinned;
	const char *const *tags; size_t ntags;
	const struct proto_attribute *attributes; size_t nattributes; /* sorted by key */
};

/* Before now, in ns; a time that is later than now has age 0: clocks are set back, and hosts differ. */
uint64_t query_step_age(int64_t time_ns, int64_t now_ns);
const char *query_step_attribute(const struct query_step *s, const char *key); /* NULL: it has none */
/* The function of a query_subject, for known < QUERY_STEP_COUNT. */
bool query_step_value(const struct query_step *s, int known, const char *name, size_t i, struct query_value *ret_value);

#endif
