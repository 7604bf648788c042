/* SPDX-License-Identifier: Apache-2.0
 *
 * keep_internal: which steps stay after a commit of a saver (keep.c). The persister's, but for init and release. */
#ifndef CORE_SAVE_SAVER_KEEP_INTERNAL_H
#define CORE_SAVE_SAVER_KEEP_INTERNAL_H

#include "core/upkeep/prune.h"

struct saver_keep {
	struct upkeep_retain *rules; /* of the saver's options alone */
	struct base_error err;       /* of the last time: a reason is given once */
};
struct save_saver;
/* -EINVAL, -BASE_EVERSION: a rule that cannot be. */
int saver_keep_init(struct saver_keep *k, const char *const *rules, size_t n, struct base_error *err);
void saver_keep_release(struct saver_keep *k);
/* Below how many free bytes to warn: as the options say, else as the run's policy did when the bases of this save were
 * chosen. 0: neither says. */
uint64_t saver_keep_warn_free(struct save_saver *s);
/* After a commit: removes the steps that neither these rules nor the run's policy keep. */
void saver_keep_apply(struct save_saver *s);

#endif
