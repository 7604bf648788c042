/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/vckpt/import/import_numbered.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/base/cleanup.h"
#include "tools/vckpt/import/import_shards.h"

const char *import_base_of(const char *path)
{
	const char *slash = strrchr(path, '/');

	return slash ? slash + 1 : path;
}

static bool digits(const char *text, size_t n, uint32_t *ret)
{
	uint64_t v = 0;

	if (n == 0 || n > 9)
		return false;
	for (size_t i = 0; i < n; i++) {
		if (text[i] < '0' || text[i] > '9')
			return false;
		v = v * 10 + (uint64_t)(text[i] - '0');
	}
	*ret = (uint32_t)v;
	return true;
}

bool import_numbered_parse(const char *name, struct import_numbered *ret)
{
	const char *of = NULL;
	const char *dash;
	size_t after;

	for (const char *at = name; (at = strstr(at, "-of-")); at++)
		of = at;
	if (!of)
		return false;
	dash = memrchr(name, '-', (size_t)(of - name));
	after = strspn(of + 4, "0123456789");
	if (!dash || dash == name || !digits(dash + 1, (size_t)(of - dash - 1), &ret->number) ||
		!digits(of + 4, after, &ret->total) || ret->number > ret->total)
		return false;
	ret->name_len = (int)(dash - name);
	ret->digits = (int)(of - dash - 1);
	ret->tail = of + 4 + after;
	return true;
}

/* How many there are of each name, and which numbers; the rank in a name (shard-00001-model-00002-of-00002)
 * does not count. */
static int count_part(json_t *all, const char *path, struct base_error *err)
{
	const char *base = import_base_of(path);
	char number[16];
	struct import_numbered n;
	size_t skip = import_shards_is(base) ? strlen("shard-") + strspn(base + strlen("shard-"), "0123456789") : 0;
	base_cleanup_free char *key = NULL;
	json_t *seen;

	if (!import_numbered_parse(base, &n) || (int)skip > n.name_len)
		return 0;
	key = tool_string("%.*s%.*s-of-%0*" PRIu32 "%s", (int)(base - path), path,
		n.name_len - (int)skip, base + skip, n.digits, n.total, n.tail);
	snprintf(number, sizeof number, "%" PRIu32, n.number);
	seen = key ? json_object_get(all, key) : NULL;
	if (key && !seen && json_object_set_new(all, key, seen = json_object()) < 0)
		seen = NULL;
	return seen && json_object_set_new(seen, number, json_string(base)) == 0 ? 0
		: base_no_memory_for(err, "%s", path);
}

/* Numbers begin at 1, or at 0 if that is there. */
static int check_parts(const char *key, json_t *seen, struct base_error *err)
{
	struct import_numbered n = {0};
	const char *one = json_string_value(json_object_iter_value(json_object_iter(seen)));
	uint32_t from = json_object_get(seen, "0") ? 0 : 1;

	import_numbered_parse(one, &n);
	for (uint32_t i = from; i < n.total + from; i++) {
		char number[16];

		snprintf(number, sizeof number, "%" PRIu32, i);
		if (json_object_get(seen, number))
			continue;
		return base_error_set(err, -ENOENT, "%.*s%.*s-%0*" PRIu32 "-of-%.*s: it is missing, and %s is there; "
			"nothing was imported: get the file", (int)(import_base_of(key) - key), key, n.name_len, one,
			n.digits, i, (int)strlen(strstr(one + n.name_len, "-of-")) - 4,
			strstr(one + n.name_len, "-of-") + 4, one);
	}
	return 0;
}

int import_numbered_check(const char *const *paths, size_t n, struct base_error *err)
{
	json_auto_t *all = json_object();
	json_t *seen;
	const char *key;
	int r = all ? 0 : base_no_memory(err);

	for (size_t i = 0; r == 0 && i < n; i++)
		r = count_part(all, paths[i], err);
	json_object_foreach(all, key, seen)
		if (r == 0)
			r = check_parts(key, seen, err);
	return r;
}
