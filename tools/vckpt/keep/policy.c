/* SPDX-License-Identifier: Apache-2.0
 *
 * vckpt policy: the rules that a run's list has, for every host: shown, set, or cleared. Rules are checked before they
 * are set; those that are shown may be a newer vckpt's. */
#include <inttypes.h>
#include <string.h>

#include "core/commit/list/list_facts.h"
#include "tools/vckpt/keep/keep.h"

static json_t *policy_json(const struct commit_list *l)
{
	const struct proto_policy *policy = commit_list_policy(l);
	json_t *rules = json_array();

	for (size_t i = 0; policy && i < policy->nrules; i++)
		json_array_append_new(rules, tool_json_text(policy->rules[i], strlen(policy->rules[i])));
	return json_pack("{s:s, s:o, s:o, s:o}", "run", commit_list_run(l), "rules", rules, "time",
		policy ? json_string(TOOL_TIME(policy->time_ns)) : json_null(), "host",
		policy && policy->host ? tool_json_text(policy->host, strlen(policy->host)) : json_null());
}

static int policy_print(struct tool *t)
{
	const struct proto_policy *policy = commit_list_policy(t->list);

	if (t->json)
		return tool_print_json(policy_json(t->list));
	if (t->quiet)
		return TOOL_DONE;
	if (!policy)
		printf("run %s has no policy: its steps stay until they are removed\n", commit_list_run(t->list));
	for (size_t i = 0; policy && i < policy->nrules; i++)
		tool_print(stdout, "%s\n", policy->rules[i]);
	if (policy)
		tool_print(stdout, "set %s on %s\n", TOOL_TIME(policy->time_ns), policy->host);
	return TOOL_DONE;
}

enum what { SHOW, SET, CLEAR };

static int parse_what(struct tool *t, const struct keep *k, enum what *ret_what)
{
	const char *word = t->narguments > 2 ? t->arguments[2] : "show";

	*ret_what = strcmp(word, "set") == 0 ? SET : strcmp(word, "clear") == 0 ? CLEAR : SHOW;
	if (*ret_what == SHOW && strcmp(word, "show") != 0)
		return tool_usage(t, "%s: give show, set or clear after RUN", word);
	if (*ret_what == SET && !k->n)
		return tool_usage(t, "set: give rules, such as --keep-last 3 --keep-every 1000");
	return *ret_what != SET && k->n ? tool_usage(t, "rules are given with set: vckpt policy STORE RUN set ...") : 0;
}

static int policy_run(struct tool *t, int argc, char **argv)
{
	struct keep k = {0};
	const struct tool_option options[] = {KEEP_OPTIONS(&k), KEEP_OPTION(&k, 8, "warn-free"), {0}};
	struct tool_target target;
	struct base_error err = {0};
	enum what what = SHOW;
	int code = tool_parse(t, argc, argv, options), r = 0;

	if (code == 0)
		code = tool_run_parse(t, t->arguments[1], "a policy is that of a RUN", &target);
	if (code == 0 && (code = parse_what(t, &k, &what)) == 0)
		code = tool_open_store(t, what == SHOW ? STORE_OPEN_READ_ONLY : 0);
	if (code == 0 && commit_list_open_newest(t->store, target.run, &t->list, &err) < 0)
		code = tool_fail(t, &err);
	if (code == 0 && commit_list_next(t->list) == 0)
		code = tool_no_run(t, target.run);
	if (code == 0 && what != SHOW)
		r = commit_list_policy_put(t->list, (const char *const *)k.texts, k.n, &err);
	if (r < 0)
		code = tool_fail(t, &err);
	keep_release(&k);
	return code ? code : policy_print(t);
}

const struct tool_command tool_policy = {"policy", "show, set or clear a run's rules of what stays",
	"usage: vckpt policy STORE RUN [show|set|clear] [OPTION...]\n\n"
	"A policy is rules that are kept in the run's list: which steps stay. vckpt prune without rules of its own\n"
	"applies it, and a job's rank 0 does after each step that it saved. set takes the place of all rules that\n"
	"were set before.\n\n"
	KEEP_HELP
	"  --warn-free SIZE    jobs and import warn when less than 10G, 500M, ... is free after a save\n"
	"  --json -q -v        print JSON; print nothing but errors; say more\n",
	policy_run};
