/* SPDX-License-Identifier: Apache-2.0
 *
 * vckpt complete: what a shell offers behind a line, for the scripts in this directory:
 *
 *   vckpt complete --shell bash BREAKS LINE    LINE up to the cursor; BREAKS is COMP_WORDBREAKS
 *   vckpt complete --shell zsh WORD...         words without quotation marks, up to the cursor
 *   vckpt complete --shell fish WORD...
 *
 * It prints candidates, each with a NUL behind it: for bash in quotation marks where they need it, for zsh as they are,
 * because that quotes what it inserts. So a name from a stranger's store never is a part of a command. fish quotes,
 * too; it takes lines, in which a tab begins a description, so it gets no candidate with a control character.
 * Commands, options and arguments are read from the help texts. Where nothing fits, the shell completes file names. It
 * is silent, writes nothing, and gives up after five seconds. */
#include "tools/vckpt/complete/complete.h"

#include <string.h>
#include <unistd.h>

#include "core/base/array.h"
#include "core/base/text.h"
#include "core/tensor/dtype.h"

enum { GIVE_UP_S = 5 };

/* If memory runs out, a text may be offered again. */
static bool offered_before(struct complete_offered *o, const char *text)
{
	const uint32_t hash = base_table_hash(text, strlen(text));
	size_t at = 0;
	uint32_t i;

	while ((i = base_table_next(&o->by_text, hash, &at)) != BASE_TABLE_NONE)
		if (strcmp(o->texts[i], text) == 0)
			return true;
	if (base_table_reserve(&o->by_text, 1) == 0 && base_array_more(o->texts, o->n) == 0 &&
		(o->texts[o->n] = strdup(text)))
		base_table_add(&o->by_text, hash, (uint32_t)o->n++);
	return false;
}

static void offered_release(struct complete_offered *o)
{
	for (size_t i = 0; i < o->n; i++)
		free(o->texts[i]);
	free(o->texts);
	base_table_release(&o->by_text);
}

void complete_offer(const struct complete *c, const char *text)
{
	const char *word = c->words[c->nwords - 1]; /* which may begin with --option= */
	const size_t before = (size_t)(c->current - word), skip = c->skip > before ? c->skip - before : 0;
	size_t n;

	if (strncmp(text, c->current, strlen(c->current)) != 0 || offered_before(c->offered, text))
		return;
	for (const char *at = text; c->shell == COMPLETE_FISH && *at; at += n)
		if (base_text_unsafe(at, strnlen(at, 4), &n))
			return;
	if (c->skip < before)
		printf("%.*s", (int)(before - c->skip), word + c->skip);
	if (c->shell == COMPLETE_BASH)
		complete_quote(text + skip, c->quote); /* the word has `skip` bytes and more of it */
	else
		fputs(text, stdout);
	putchar(c->shell == COMPLETE_FISH ? '\n' : 0);
}

/* ---- words of help texts ---- */

struct piece { const char *text; size_t len; };

static bool is(struct piece p, const char *word)
{
	return p.len == strlen(word) && memcmp(p.text, word, p.len) == 0;
}

/* The next word of a usage line that is an argument. */
static bool next_argument(const char **at, struct piece *ret_p)
{
	*at += strspn(*at, " ");
	*ret_p = (struct piece){*at, strcspn(*at, " \n")};
	*at += ret_p->len;
	return ret_p->len && ret_p->text[0] != '-' && strncmp(ret_p->text, "[-", 2) != 0 &&
		strncmp(ret_p->text, "[OPTION", 7) != 0;
}

/* "--name" at a place of a text: its length; 0: there is none. */
static size_t option_at(const char *at)
{
	return at[0] == '-' && at[1] == '-' && at[2] >= 'a' && at[2] <= 'z'
		? 2 + strspn(at + 2, "abcdefghijklmnopqrstuvwxyz-") : 0;
}

/* Calls f with the usage lines and with those that describe options. */
static void each_line(const char *help, void (*f)(struct complete *c, struct piece line, void *arg), struct complete *c,
	void *arg)
{
	bool usage = true;

	for (const char *at = help; *at; at += strcspn(at, "\n"), at += *at == '\n') {
		const struct piece line = {at, strcspn(at, "\n")};

		usage &= line.len > 0;
		if (usage || strncmp(at, "  -", 3) == 0)
			f(c, line, arg);
	}
}

static void offer_options(struct complete *c, struct piece line, void *arg)
{
	(void)arg;
	for (size_t i = 0; i < line.len; i++) {
		const size_t len = option_at(line.text + i);
		char text[64];

		if (len && len < sizeof text) {
			memcpy(text, line.text + i, len);
			text[len] = 0;
			complete_offer(c, text);
			i += len - 1;
		}
	}
}

/* "  -l, --limit N   the newest": what comes behind the option, if that takes a value. */
struct wanted { const char *option; struct piece value; };
static void look_for_value(struct complete *c, struct piece line, void *arg)
{
	struct wanted *w = arg;
	const char *at = line.text + 2, *end = line.text + line.len;
	bool found = false;

	(void)c;
	if (line.len < 3 || strncmp(line.text, "  -", 3) != 0)
		return;
	while (at < end && *at == '-') {
		const struct piece name = {at, strcspn(at, " ,\n")};

		found |= is(name, w->option);
		at += name.len;
		if (strncmp(at, ", ", 2) != 0)
			break;
		at += 2;
	}
	if (found && at + 1 < end && at[0] == ' ' && at[1] != ' ' && at[1] != '-')
		w->value = (struct piece){at + 1, strcspn(at + 1, " \n")};
}

/* What the value of an option is called; len 0: it takes none. */
static struct piece value_of(struct complete *c, const char *option)
{
	struct wanted w = {.option = option};

	if (option[0] == '-')
		each_line(c->command->help, look_for_value, c, &w);
	return w.value;
}

/* ---- values ---- */

static void offer_words(const struct complete *c, const char *words)
{
	char text[64];

	for (; *words; words += *words == ' ') {
		const size_t len = strcspn(words, " ");

		memcpy(text, words, len);
		text[len] = 0;
		words += len;
		complete_offer(c, text);
	}
}

/* true: the words are known. */
static bool offer_known(const struct complete *c, const char *option)
{
	static const char untyped[] = "bf16 f8_e4m3fn f8_e5m2 f8_e4m3fnuz f8_e5m2fnuz f8_e8m0fnu f4_e2m1fn_x2";
	static const struct { const char *command, *option, *words; } known[] = {
		{NULL, "--color", "auto always never"}, {"export", "--format", "safetensors npy npy,safetensors"},
		{"cat", "--layouts", "llama mixtral deepseek"}, {"layout", "--check", "llama mixtral deepseek"},
		{"ls", "--sort", "name step time size"}, {"import", "--dtype", untyped}};
	const char *command = c->command->name;

	for (size_t i = 0; i < BASE_COUNT(known); i++) {
		if (strcmp(known[i].option, option) || (known[i].command && strcmp(known[i].command, command)))
			continue;
		offer_words(c, known[i].words);
		return true;
	}
	for (unsigned i = 0; strcmp(option, "--dtype") == 0 && i < TENSOR_DTYPE_END; i++)
		if (tensor_dtype_valid(i))
			complete_offer(c, tensor_dtype_name(i));
	return strcmp(option, "--dtype") == 0;
}

/* true: the word at the cursor is the value of this option. */
static bool offer_value(struct complete *c, const char *option)
{
	const struct piece value = value_of(c, option);

	if (option[0] != '-' || offer_known(c, option))
		return option[0] == '-';
	if (is(value, "RUN") || is(value, "RUN/STEP") || is(value, "RUN[/STEP]"))
		complete_target(c, strndupa(value.text, value.len));
	else if (is(value, "COMPONENT") || (value.len && strcmp(option, "--component") == 0))
		complete_component(c);
	else if (is(value, "K:ATTRIBUTE[:min|max]"))
		complete_best(c);
	return value.len > 0;
}

/* ---- arguments ---- */

static bool is_store(const char *path)
{
	char file[4200];

	return snprintf(file, sizeof file, "%s/vckpt.store", path) < (int)sizeof file && access(file, F_OK) == 0;
}

static void find_given(struct complete *c)
{
	const char *store = getenv("VCKPT_STORE"), *at = c->command->help + strlen("usage: vckpt ");
	struct piece first;

	at += strlen(c->command->name);
	for (size_t i = 2; i + 1 < c->nwords; i++) {
		const char *word = c->words[i];

		if (word[0] != '-')
			c->given[c->ngiven++] = word;
		else if (!strchr(word, '=') && value_of(c, word).len)
			i++;
	}
	if (!store || !*store || !next_argument(&at, &first) || !is(first, "STORE") ||
		(c->ngiven && is_store(c->given[0])) || c->ngiven == COMPLETE_WORDS)
		return;
	memmove(c->given + 1, c->given, c->ngiven++ * sizeof *c->given);
	c->given[0] = store;
}

/* "[show|set|clear]" */
static bool is_choice(const char *text)
{
	return text[0] == '[' && text[1] >= 'a' && text[1] <= 'z' && strchr(text, '|') && text[strlen(text) - 1] == ']';
}

static void offer_choice(const struct complete *c, char *text)
{
	text[strlen(text) - 1] = 0;
	for (char *at = text; (at = strchr(at, '|')); at++)
		*at = ' ';
	offer_words(c, text + 1);
}

static void offer_argument(struct complete *c)
{
	const char *at = c->command->help + strlen("usage: vckpt ") + strlen(c->command->name);
	struct piece word = {0}, next;
	char text[64];

	for (size_t i = 0; i <= c->ngiven; i++) {
		const bool again = word.len > 3 && memcmp(word.text + word.len - 3, "...", 3) == 0;

		if (next_argument(&at, &next))
			word = next;
		else if (!again)
			return;
	}
	if (word.len >= sizeof text)
		return;
	memcpy(text, word.text, word.len);
	text[word.len] = 0;
	if (c->ngiven && (strncmp(text, "RUN", 3) == 0 || strncmp(text, "[RUN", 4) == 0))
		complete_target(c, text);
	else if (strcmp(text, "MOUNTPOINT") == 0 && strcmp(c->command->name, "umount") == 0)
		complete_mounts(c);
	else if (is_choice(text))
		offer_choice(c, text);
}

/* ---- the whole ---- */

static void offer_commands(const struct complete *c)
{
	for (size_t i = 0; tool_command_at(i); i++)
		complete_offer(c, tool_command_at(i)->name);
	complete_offer(c, "help");
	complete_offer(c, "version");
}

static void offer(struct complete *c)
{
	const char *before, *equal;

	for (size_t i = 0; c->nwords > 2 && tool_command_at(i); i++)
		if (strcmp(tool_command_at(i)->name, c->words[1]) == 0)
			c->command = tool_command_at(i);
	if (c->nwords == 2 || (c->nwords == 3 && strcmp(c->words[1], "help") == 0))
		offer_commands(c);
	if (!c->command)
		return;
	before = c->words[c->nwords - 2];
	equal = option_at(c->current) ? strchr(c->current, '=') : NULL;
	if (equal) {
		before = strndupa(c->current, (size_t)(equal - c->current));
		c->current = equal + 1;
	} else if (c->current[0] == '-') {
		each_line(c->command->help, offer_options, c, NULL);
		offer_words(c, "--quiet --verbose --help");
		return;
	}
	find_given(c);
	if (!offer_value(c, before))
		offer_argument(c);
}

int tool_complete(int argc, char **argv)
{
	static const char *const shells[] = {"bash", "zsh", "fish"};
	base_cleanup(offered_release) struct complete_offered offered = {0};
	struct complete c = {.shell = BASE_COUNT(shells), .offered = &offered};
	int end = argc < (int)COMPLETE_WORDS ? argc : (int)COMPLETE_WORDS;

	for (unsigned i = 0; argc > 4 && i < BASE_COUNT(shells); i++)
		if (strcmp(argv[2], "--shell") == 0 && strcmp(argv[3], shells[i]) == 0)
			c.shell = i;
	if (c.shell == BASE_COUNT(shells))
		return TOOL_USAGE;
	if (!freopen("/dev/null", "w", stderr))
		return TOOL_FAILED;
	alarm(GIVE_UP_S);
	if (c.shell == COMPLETE_BASH && argc == 6)
		complete_split(&c, argv[5], argv[4]);
	else if (c.shell != COMPLETE_BASH)
		for (int i = 4; i < end; i++)
			c.words[c.nwords++] = argv[i];
	if (c.nwords < 2)
		return TOOL_DONE;
	c.current = c.words[c.nwords - 1];
	offer(&c);
	return fflush(stdout) == EOF ? TOOL_FAILED : TOOL_DONE;
}
