/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/vckpt/keep/keep.h"

#include "core/base/array.h"

int keep_option(struct tool *t, void *arg, const char *value)
{
	const struct keep_word *w = arg;
	struct keep *k = w->keep;
	struct base_error err = {0};
	char *text = tool_string("%s=%s", w->word, value);

	if (!k->rules)
		k->rules = upkeep_retain_new();
	if (!text || !k->rules || base_array_more(k->texts, k->n) < 0) {
		free(text);
		return tool_failed(t, "out of memory");
	}
	k->texts[k->n++] = text;
	return upkeep_retain_add(k->rules, text, &err) < 0 ? tool_usage(t, "--%s", err.text) : 0;
}

void keep_release(struct keep *k)
{
	for (size_t i = 0; i < k->n; i++)
		free(k->texts[i]);
	free(k->texts);
	upkeep_retain_free(k->rules);
}
