/* SPDX-License-Identifier: Apache-2.0
 *
 * step: see step.h. */
#include "core/query/step.h"

#include <string.h>

#include "core/base/bisect.h"

uint64_t query_step_age(int64_t time_ns, int64_t now_ns)
{
	return time_ns < now_ns ? (uint64_t)now_ns - (uint64_t)time_ns : 0;
}

const char *query_step_attribute(const struct query_step *s, const char *key)
{
	const int64_t at = base_search(i, (size_t)0, s->nattributes, strcmp(s->attributes[i].key, key));

	return at < 0 ? NULL : s->attributes[at].value;
}

bool query_step_value(const struct query_step *s, int known, const char *name, size_t i, struct query_value *ret_value)
{
	if (known == QUERY_STEP_TAG) {
		ret_value->text = i < s->ntags ? s->tags[i] : NULL;
		return i < s->ntags;
	}
	if (i > 0)
		return false;
	switch (known) {
	case QUERY_STEP_NUMBER: ret_value->number = s->step; return true;
	case QUERY_STEP_TIME: ret_value->number = (uint64_t)s->time_ns; return true;
	case QUERY_STEP_AGE: ret_value->number = query_step_age(s->time_ns, s->now_ns); return true;
	case QUERY_STEP_BYTES: ret_value->number = s->bytes; return true;
	case QUERY_STEP_RUN: ret_value->text = s->run; return true;
	case QUERY_STEP_PINNED: return s->pinned;
	default: ret_value->text = query_step_attribute(s, name); return ret_value->text != NULL;
	}
}
