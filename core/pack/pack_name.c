/* SPDX-License-Identifier: Apache-2.0
 *
 * pack_name: "<launch, 16 hex>-<count>-<rank>-<class>". One spelling for each: numbers have no leading zeros. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/pack/pack_format.h"

/* Length of the decimal number at `text`, which ends before `stop`; 0: not one, or spelt otherwise, or over `max`. */
static size_t number_parse(const char *text, uint64_t max, uint64_t *ret_n)
{
	size_t len = strspn(text, "0123456789");

	if (len == 0 || (len > 1 && text[0] == '0'))
		return 0;
	errno = 0;
	*ret_n = strtoull(text, NULL, 10);
	return errno == 0 && *ret_n <= max ? len : 0;
}

/* Length of the attempt at the start of `text`, or 0. */
static size_t attempt_parse(const char *text)
{
	uint64_t count;
	size_t len;

	if (strspn(text, "0123456789abcdef") != 16 || text[16] != '-')
		return 0;
	len = number_parse(text + 17, UINT64_MAX, &count);
	return len ? 17 + len : 0;
}

int pack_name_parse(const char *pack, struct pack_name *ret_name)
{
	size_t attempt, len;
	const char *class;
	uint64_t rank;

	if (strnlen(pack, PACK_NAME_MAX) >= PACK_NAME_MAX)
		return -ENAMETOOLONG;
	attempt = attempt_parse(pack);
	if (attempt == 0 || attempt >= sizeof ret_name->attempt || pack[attempt] != '-')
		return -EINVAL;
	len = number_parse(pack + attempt + 1, UINT32_MAX, &rank);
	class = pack + attempt + 1 + len;
	if (len == 0 || class[0] != '-')
		return -EINVAL;
	class++;
	if (class[0] == '\0' || strlen(class) >= sizeof ret_name->class || !storage_name_valid(class) ||
		strchr(class, '/'))
		return -EINVAL;
	memcpy(ret_name->attempt, pack, attempt);
	ret_name->attempt[attempt] = '\0';
	ret_name->rank = (uint32_t)rank;
	strcpy(ret_name->class, class);
	return 0;
}

int pack_name_make(const char *attempt, uint32_t rank, const char *class, char name[static PACK_NAME_MAX])
{
	struct pack_name parsed;
	int n = snprintf(name, PACK_NAME_MAX, "%s-%u-%s", attempt, rank, class), r;

	if (n < 0 || n >= (int)PACK_NAME_MAX)
		return -ENAMETOOLONG;
	r = pack_name_parse(name, &parsed);
	return r < 0 ? r : strcmp(parsed.attempt, attempt) == 0 && strcmp(parsed.class, class) == 0 ? 0 : -EINVAL;
}

int pack_path(const char *pack, char path[static STORAGE_NAME_MAX])
{
	struct pack_name parsed;
	struct base_digest digest;
	int r = pack_name_parse(pack, &parsed);

	if (r < 0)
		return r;
	base_sha256(pack, strlen(pack), &digest);
	snprintf(path, STORAGE_NAME_MAX, "packs/%02x/%s.pack", digest.bytes[0], pack);
	return 0;
}
