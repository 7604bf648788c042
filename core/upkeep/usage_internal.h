/* SPDX-License-Identifier: Apache-2.0
 *
 * usage_internal: files by name, shared by usage.c (steps) and usage_files.c (files). One thread. */
#ifndef CORE_UPKEEP_USAGE_INTERNAL_H
#define CORE_UPKEEP_USAGE_INTERNAL_H

#include "core/upkeep/usage.h"

/* The pack or manifest of that name, with its size; one that came since the listing is looked at. -ENOMEM, or an error
 * of the storage. */
int usage_file(struct store *s, struct upkeep_usage *u, const char *name, bool pack,
	struct upkeep_usage_file **ret_f);
/* Before the lists are read: packs, their notes, and the manifests of the runs. */
int usage_files_list(struct store *s, struct upkeep_usage *u, struct base_error *err);
/* After that: measures of visible steps, and of others. */
int usage_measures_list(struct store *s, struct upkeep_usage *u, struct base_error *err);

#endif
