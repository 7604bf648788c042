/* SPDX-License-Identifier: Apache-2.0
 *
 * summary: what the values of one tensor are, in one pass and in bounded memory. An item of a complex dtype is two
 * values, as is one of f4_e2m1fn_x2. Quantiles and the histogram come from the values themselves if there are few, else
 * from counters: one for each value of a 16-bit integer, and of all other types one for each pattern of a double's
 * sign, exponent and first 10 bits of its fraction. That is exact for every type of up to 16 bits; wider ones are cut
 * towards zero by at most 2^-10 of the value. One thread. */
#ifndef CORE_DIFF_SUMMARY_H
#define CORE_DIFF_SUMMARY_H

#include "core/base/error.h"
#include "core/load/open/step.h"
#include "core/tensor/dtype.h"

#define DIFF_QUANTILES 9u
#define DIFF_BINS 20u
extern const double diff_quantiles[DIFF_QUANTILES]; /* 0.001, 0.01, 0.05, ... 0.999 */

struct diff_summary {
	uint64_t values, finite, zeros, nan, inf_negative, inf_positive;
	/* below: of finite values; 0 if there are none */
	double min, max, mean, std;     /* std: of all of them (divided by their number) */
	bool integers;
	int64_t least, most;            /* of an integer dtype: min and max, exact; of u64: as its bits */
	double quantile[DIFF_QUANTILES]; /* the least value so that this part of the values are not above it */
	bool exact;                     /* else quantiles and bins are those of values that are cut */
	uint64_t bins[DIFF_BINS];       /* of equal width from min to max, each without its upper end but the last */
};
/* progress: bytes, or NULL. Errors of load_tensor_open and of reads. */
int diff_summarise(struct load_step *step, uint32_t tensor, void (*progress)(void *arg, uint64_t done, uint64_t total),
	void *arg, struct diff_summary *ret_s, struct base_error *err);

#endif
