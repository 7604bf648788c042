/* SPDX-License-Identifier: Apache-2.0
 *
 * What commands share about tags, pins and attributes of steps; see tool.h. The commands that change them are in
 * tools/vckpt/store/facts.c. */
#include <string.h>

#include "core/base/array.h"
#include "core/commit/list/list_facts.h"
#include "tools/vckpt/tool.h"

#define TAGS_NAMED 5 /* in a message */

int tool_no_tag(const struct tool *t, const struct commit_list *l, const char *tag)
{
	base_cleanup_free struct commit_list_tag *tags = NULL;
	base_cleanup_buf struct base_buf said = BASE_BUF_INIT;
	const char *run = commit_list_run(l);
	size_t n;

	if (commit_list_next(l) == 0)
		return tool_no_run(t, run);
	if (commit_list_tags(l, &tags, &n) < 0)
		return tool_fail(t, &(struct base_error){.code = -ENOMEM});
	for (size_t i = 0; i < n && i < TAGS_NAMED; i++)
		base_buf_printf(&said, "%s%s", i ? ", " : "", tags[i].tag);
	if (n > TAGS_NAMED)
		base_buf_printf(&said, " and %zu more", n - TAGS_NAMED);
	if (n == 0)
		return tool_failed(t, "%s has no step or tag %s, and no tags at all (vckpt ls %s %s lists its steps)",
			run, tag, TOOL_WORD(t->store->path), run);
	return tool_failed(t, "%s has no step or tag %s; its tags: %.*s (vckpt tag %s %s lists them)", run, tag,
		(int)said.len, (const char *)said.data, TOOL_WORD(t->store->path), run);
}

void tool_json_facts(json_t *row, const struct proto_step_facts *facts)
{
	json_t *tags = json_array();
	const char *reason = facts && facts->reason ? facts->reason : "";

	for (size_t i = 0; facts && i < facts->ntags; i++)
		json_array_append_new(tags, json_string(facts->tags[i]));
	json_object_set_new(row, "tags", tags);
	if (facts && facts->pinned)
		json_object_set_new(row, "pinned", json_pack("{s:o, s:s, s:s}", "reason",
			tool_json_text(reason, strlen(reason)), "time", TOOL_TIME(facts->pinned_ns), "host",
			facts->pinned_by ? facts->pinned_by : ""));
}

void tool_facts_note(const struct proto_step_facts *facts, struct base_buf *b)
{
	for (size_t i = 0; facts && i < facts->ntags; i++)
		base_buf_printf(b, "%s%s", i ? ", " : "", facts->tags[i]);
	if (facts && facts->pinned)
		base_buf_printf(b, "%spinned%s%s", facts->ntags ? "; " : "",
			facts->reason && *facts->reason ? ": " : "", facts->reason ? facts->reason : "");
}

int tool_list_open(struct tool *t, const char *run, struct base_error *err)
{
	if (t->list && strcmp(commit_list_run(t->list), run) == 0)
		return 0;
	commit_list_close(base_steal(t->list));
	return commit_list_open_newest(t->store, run, &t->list, err);
}

int tool_attribute_add(const struct tool *t, const char *what, const char *text, struct proto_attribute **attributes,
	size_t *n)
{
	const char *equals = strchr(text, '=');
	char *key, *value;
	bool good;

	if (!equals)
		return *what ? tool_usage(t, "%stakes KEY=VALUE", what) : tool_usage(t, "%s: give KEY=VALUE", text);
	key = strndup(text, (size_t)(equals - text));
	value = strdup(equals + 1);
	good = key && value && base_array_more(*attributes, *n) == 0 && proto_attribute_key_valid(key) &&
		proto_utf8_valid(value, strlen(value));
	for (size_t i = 0; good && i < *n; i++)
		good = strcmp((*attributes)[i].key, key) != 0;
	if (good) {
		(*attributes)[(*n)++] = (struct proto_attribute){key, value};
		return 0;
	}
	free(key);
	free(value);
	return tool_usage(t, "%s%s: a key is [A-Za-z_][A-Za-z0-9_.-]{0,63}, given once; a value is UTF-8", what, text);
}
