/* SPDX-License-Identifier: Apache-2.0
 *
 * JSON as the Python package writes values: what fits 100 columns is on one line, longer containers are broken and
 * indented by two, and a float has the fewest digits that give the same bits back. */
#include "tools/vckpt/import/import_dcp.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#define COLUMNS 100u

static void put_text(struct base_buf *b, const json_t *text)
{
	char *made = json_dumps(text, JSON_ENCODE_ANY);

	if (made)
		base_buf_append_text(b, made);
	else
		b->error = -ENOMEM;
	free(made);
}

static void put_real(struct base_buf *b, double real)
{
	char text[40];

	for (int digits = 15; digits <= 17; digits++) {
		snprintf(text, sizeof text, "%.*g", digits, real);
		if (strtod(text, NULL) == real)
			break;
	}
	base_buf_append_text(b, text);
	if (!strpbrk(text, ".e"))
		base_buf_append_text(b, ".0");
}

static void put_plain(struct base_buf *b, const json_t *v)
{
	if (json_is_string(v))
		put_text(b, v);
	else if (json_is_real(v))
		put_real(b, json_real_value(v));
	else if (json_is_integer(v))
		base_buf_printf(b, "%" PRId64, (int64_t)json_integer_value(v));
	else
		base_buf_append_text(b, json_is_null(v) ? "null" : json_is_true(v) ? "true" : "false");
}

static void put(struct base_buf *b, const json_t *v, int indent, size_t most);

static void put_key(struct base_buf *b, const char *key)
{
	json_t *text = json_string(key);

	put_text(b, text);
	base_buf_append_text(b, ": ");
	json_decref(text);
}

/* One part of a container: on the line, or with `indent` on one of its own. false: it is too long by now. */
static bool put_part(struct base_buf *b, const char *key, const json_t *item, bool first, int indent, size_t most)
{
	if (b->len > most || b->error)
		return false;
	if (indent < 0)
		base_buf_append_text(b, first ? "" : ", ");
	else
		base_buf_printf(b, "%s\n%*s", first ? "" : ",", indent + 2, "");
	if (key)
		put_key(b, key);
	put(b, item, indent < 0 ? indent : indent + 2, most);
	return true;
}

/* On one line where `indent` is negative; stops when that is longer than `most`, which the caller sees. */
static void put_parts(struct base_buf *b, const json_t *v, int indent, size_t most)
{
	bool array = json_is_array(v), go_on = true;
	size_t i, n = 0;
	const char *key;
	json_t *item;

	base_buf_append_text(b, array ? "[" : "{");
	json_array_foreach(v, i, item)
		if (go_on)
			go_on = put_part(b, NULL, item, i == 0, indent, most);
	json_object_foreach((json_t *)v, key, item)
		if (go_on)
			go_on = put_part(b, key, item, n++ == 0, indent, most);
	if (indent >= 0)
		base_buf_printf(b, "\n%*s", indent, "");
	base_buf_append_text(b, array ? "]" : "}");
}

static void put(struct base_buf *b, const json_t *v, int indent, size_t most)
{
	size_t before = b->len, end = before + COLUMNS - base_min((uint64_t)indent, COLUMNS - 20);

	if (!json_is_array(v) && !json_is_object(v))
		return put_plain(b, v);
	if (indent < 0)
		return put_parts(b, v, indent, most);
	if (b->len > most || b->error)
		return;
	put_parts(b, v, -1, end);
	if (b->len <= end || b->error)
		return;
	b->len = before;
	put_parts(b, v, indent, most);
}

int import_dcp_write(const json_t *value, size_t most, struct base_buf *b)
{
	put(b, value, 0, most);
	base_buf_append_text(b, "\n");
	return b->error ? b->error : b->len > most ? -EFBIG : 0;
}
