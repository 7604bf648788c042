/* SPDX-License-Identifier: Apache-2.0
 *
 * exchange_rule: when it pays to read once and pass on (exchange.h). A pure function. */
#include "core/load/exchange/exchange.h"

/* What was too quick to measure, or was not measured, costs nothing. */
static double rule_seconds(double bytes, double rate) { return rate > 0 ? bytes / rate : 0; }

bool load_exchange_pays(const struct load_exchange_measured *m, struct load_exchange_times *ret_times)
{
	double readers = m->reader * m->ranks, together = readers > 0 && readers < m->store ? readers : m->store;

	ret_times->alone = rule_seconds(m->wanted, m->store);
	ret_times->shared = m->setup + rule_seconds(m->distinct, together) + rule_seconds(m->distinct, m->link);
	return ret_times->alone > LOAD_EXCHANGE_GAIN * ret_times->shared;
}
