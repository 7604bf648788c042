/* SPDX-License-Identifier: Apache-2.0
 *
 * Reading layout files.
 *
 *   line       = pattern cut... | pattern "R" | pattern "saved" | "preset" name | comment or nothing
 *   cut        = mesh dimension "=" placement
 *   comment    = "#" at the beginning of a word, up to the end of the line
 *
 * Patterns are those of core/base/text.h. */
#include "core/view/layouts.h"

#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>

#include "core/base/array.h"
#include "core/base/text.h"

#define BLANKS " \t\r"
#define WORDS_MAX (TENSOR_MAX_DIMS + 2)

struct view_layouts {
	struct view_layouts_line *lines; uint32_t nlines;
	char **texts; size_t ntexts;            /* each a file's: names and patterns point into them */
	struct view_layouts_cut **cuts; size_t ncuts;
};

struct parse { struct view_layouts *l; const char *file; uint32_t number; struct base_error *err; };

static int bad(const struct parse *p, const char *what, const char *word)
{
	return base_error_set(p->err, -EINVAL, "%.200s:%u: %s%s%.200s%s", p->file, p->number, what, word ? " '" : "",
		word ? word : "", word ? "'" : "");
}

/* ---- patterns ---- */

static int check_pattern(const struct parse *p, const char *pattern)
{
	return base_glob_valid(pattern) ? 0 : bad(p, "a set without its ] in", pattern);
}

/* ---- lines ---- */

static int parse_cut(const struct parse *p, char *word, struct view_layouts_cut *cut)
{
	struct tensor_placements *found = NULL;
	struct tensor_mesh *mesh = NULL;
	struct base_error err = {0};
	const char *name = word;
	char *equals = strchr(word, '=');
	uint32_t one = 1;
	int r;

	if (!equals)
		return bad(p, "give DIMENSION=PLACEMENT such as tp=S(0), R, or saved, not", word);
	*equals = '\0';
	r = tensor_mesh_new(1, &name, &one, NULL, 0, &mesh, &err);
	tensor_mesh_free(mesh);
	if (r == 0)
		r = tensor_placements_parse(equals + 1, &found, &err);
	if (r == 0 && found->n != 1)
		r = base_error_set(&err, -EINVAL, "one placement for each dimension, not '%.100s'", equals + 1);
	if (r == 0 && (found->at[0].kind == TENSOR_RAGGED_SHARD || found->at[0].kind == TENSOR_PARTIAL))
		r = base_error_set(&err, -EINVAL, "%.100s: only R, S, SS and IS have shards that are rectangles",
			equals + 1);
	if (r == 0)
		cut->placement = found->at[0];
	free(found);
	if (r < 0)
		return r == -ENOMEM ? base_no_memory(p->err) : bad(p, err.text, NULL);
	memcpy(cut->dim, name, strlen(name) + 1);
	return 0;
}

static int parse_cuts(const struct parse *p, char **words, uint32_t n, struct view_layouts_line *line)
{
	struct view_layouts_cut *cuts = calloc(n + 1, sizeof *cuts);

	if (!cuts || base_array_more(p->l->cuts, p->l->ncuts) < 0) {
		free(cuts);
		return base_no_memory(p->err);
	}
	p->l->cuts[p->l->ncuts++] = cuts;
	line->cuts = cuts;
	line->ncuts = n;
	for (uint32_t i = 0; i < n; i++) {
		int r = parse_cut(p, words[i], &cuts[i]);
		if (r < 0)
			return r;
		for (uint32_t j = 0; j < i; j++)
			if (strcmp(cuts[i].dim, cuts[j].dim) == 0)
				return bad(p, "two placements for", cuts[i].dim);
	}
	return 0;
}

static int parse_file(struct view_layouts *l, const char *file, const char *text, size_t len, unsigned depth,
	struct base_error *err);

static int parse_preset(const struct parse *p, char **words, uint32_t n, unsigned depth)
{
	const char *text;

	if (depth || n != 2)
		return bad(p, "give one name of a preset: preset llama", NULL);
	text = view_layouts_preset(words[1]);
	if (!text)
		return bad(p, "there is no preset", words[1]);
	return parse_file(p->l, words[1], text, strlen(text), 1, p->err);
}

static int parse_words(const struct parse *p, char **words, uint32_t n, unsigned depth)
{
	struct view_layouts_line line = {.file = p->file, .number = p->number, .pattern = words[0]};
	int r;

	if (strcmp(words[0], "preset") == 0)
		return parse_preset(p, words, n, depth);
	if (n == 1)
		return bad(p, "no placement for", words[0]);
	r = check_pattern(p, words[0]);
	if (r < 0)
		return r;
	line.component = strchr(words[0], '/');
	if (n == 2 && strcmp(words[1], "saved") == 0)
		line.saved = true;
	else if (n != 2 || strcmp(words[1], "R") != 0)
		r = parse_cuts(p, words + 1, n - 1, &line);
	if (r < 0)
		return r;
	if (p->l->nlines == VIEW_LAYOUTS_LINES)
		return base_error_set(p->err, -BASE_ELIMIT, "%.200s:%u: more than %u lines", p->file, p->number,
			VIEW_LAYOUTS_LINES);
	if (base_array_more(p->l->lines, p->l->nlines) < 0)
		return base_no_memory(p->err);
	p->l->lines[p->l->nlines++] = line;
	return 0;
}

static int parse_line(const struct parse *p, char *text, unsigned depth)
{
	char *words[WORDS_MAX], *state = NULL;
	uint32_t n = 0;

	if (strlen(text) > VIEW_LAYOUTS_LINE)
		return base_error_set(p->err, -BASE_ELIMIT, "%.200s:%u: a line of more than %u bytes", p->file,
			p->number, VIEW_LAYOUTS_LINE);
	for (char *word = strtok_r(text, BLANKS, &state); word && *word != '#'; word = strtok_r(NULL, BLANKS, &state)) {
		if (n == WORDS_MAX)
			return bad(p, "more words than a mesh can have dimensions", NULL);
		words[n++] = word;
	}
	return n ? parse_words(p, words, n, depth) : 0;
}

/* Keeps a copy of text that lines point into. */
static char *keep(struct view_layouts *l, const char *text, size_t len)
{
	char *copy = base_array_more(l->texts, l->ntexts) < 0 ? NULL : malloc(len + 1);

	if (!copy)
		return NULL;
	memcpy(copy, text, len);
	copy[len] = '\0';
	return l->texts[l->ntexts++] = copy;
}

static int parse_file(struct view_layouts *l, const char *file, const char *text, size_t len, unsigned depth,
	struct base_error *err)
{
	char *name = keep(l, file, strlen(file)), *copy = name ? keep(l, text, len) : NULL;
	struct parse p = {l, name, 0, err};
	int r = copy ? 0 : base_no_memory(err);

	for (char *line = copy, *end; r == 0 && line && *line; line = end) {
		p.number++;
		end = line + strcspn(line, "\n");
		if (*end)
			*end++ = '\0';
		r = parse_line(&p, line, depth);
	}
	return r;
}

int view_layouts_parse(const char *file, const char *text, size_t len, struct view_layouts **ret_l,
	struct base_error *err)
{
	struct view_layouts *l = calloc(1, sizeof *l);
	int r = l ? 0 : base_no_memory(err);

	if (r == 0 && len > VIEW_LAYOUTS_BYTES)
		r = base_error_set(err, -BASE_ELIMIT, "%.200s: a layout file has at most %u bytes", file,
			VIEW_LAYOUTS_BYTES);
	if (r == 0 && memchr(text, 0, len))
		r = base_error_set(err, -EINVAL, "%.200s: this is not a layout file: it has a NUL byte", file);
	if (r == 0)
		r = parse_file(l, file, text, len, 0, err);
	if (r < 0) {
		view_layouts_free(l);
		return r;
	}
	*ret_l = l;
	return 0;
}

int view_layouts_open(const char *path, struct view_layouts **ret_l, struct base_error *err)
{
	const char *preset = view_layouts_preset(path);
	struct stat st;
	base_cleanup_close int fd = -1;
	base_cleanup_free char *text = NULL;
	size_t len = 0;
	ssize_t n = 1;

	if (preset)
		return view_layouts_parse(path, preset, strlen(preset), ret_l, err);
	fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
	if (fd < 0 || fstat(fd, &st) < 0)
		return base_error_set(err, -errno, "the layout file %.200s cannot be read: %s (presets: llama, "
			"mixtral, deepseek)", path, strerror(errno));
	if (!S_ISREG(st.st_mode))
		return base_error_set(err, -EINVAL, "the layout file %.200s is not a regular file", path);
	text = malloc(VIEW_LAYOUTS_BYTES + 1);
	if (!text)
		return base_no_memory(err);
	while (len <= VIEW_LAYOUTS_BYTES && n > 0) {
		n = read(fd, text + len, VIEW_LAYOUTS_BYTES + 1 - len);
		if (n < 0 && errno == EINTR)
			n = 1;
		else if (n < 0)
			return base_error_set(err, -errno, "the layout file %.200s: %s", path, strerror(errno));
		else
			len += (size_t)n;
	}
	return view_layouts_parse(path, text, len, ret_l, err);
}

void view_layouts_free(struct view_layouts *l)
{
	if (!l)
		return;
	for (size_t i = 0; i < l->ntexts; i++)
		free(l->texts[i]);
	for (size_t i = 0; i < l->ncuts; i++)
		free(l->cuts[i]);
	free(l->texts);
	free(l->cuts);
	free(l->lines);
	free(l);
}

/* ---- asking ---- */

uint32_t view_layouts_count(const struct view_layouts *l) { return l->nlines; }
const struct view_layouts_line *view_layouts_line(const struct view_layouts *l, uint32_t i) { return &l->lines[i]; }

/* Do the placements on this line fit the tensor's number of dimensions? */
static bool line_applies(const struct view_layouts_line *line, uint32_t ndim)
{
	for (uint32_t i = 0; i < line->ncuts; i++)
		if (line->cuts[i].placement.kind != TENSOR_REPLICATE && line->cuts[i].placement.dim >= ndim)
			return false;
	return true;
}

int64_t view_layouts_find(const struct view_layouts *l, const struct load_tensor_info *info)
{
	char few[512];
	size_t component = strlen(info->component), len = component + 1 + info->name_len;
	base_cleanup_free char *many = len > sizeof few ? malloc(len) : NULL;
	char *whole = many ? many : few;

	if (len > sizeof few && !many)
		return -ENOMEM;
	memcpy(whole, info->component, component);
	whole[component] = '/';
	memcpy(whole + component + 1, info->name, info->name_len);
	for (uint32_t i = 0; i < l->nlines; i++) {
		const struct view_layouts_line *line = &l->lines[i];
		size_t skip = line->component ? 0 : component + 1;

		if (line_applies(line, info->shape.ndim) && base_glob_fits(line->pattern, whole + skip, len - skip))
			return i;
	}
	return -ENOENT;
}
