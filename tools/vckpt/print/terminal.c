/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/vckpt/print/terminal.h"

#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

static enum { AUTO, ALWAYS, NEVER } color = AUTO;

bool tool_color_set(const char *when)
{
	static const char *const words[] = {[AUTO] = "auto", [ALWAYS] = "always", [NEVER] = "never"};

	for (int i = AUTO; i <= NEVER; i++)
		if (strcmp(when, words[i]) == 0) {
			color = i;
			return true;
		}
	return false;
}

bool tool_terminal_rewrites(int fd)
{
	const char *term = getenv("TERM");

	return isatty(fd) && term && *term && strcmp(term, "dumb") != 0;
}

/* Asked for each cell of a table, so what is known of a file stays known. */
static bool colored(FILE *to)
{
	static FILE *asked;
	static bool is;
	const char *no = getenv("NO_COLOR");

	if (asked != to)
		is = !(no && *no) && tool_terminal_rewrites(fileno(to));
	asked = to;
	return color == ALWAYS || (color == AUTO && is);
}

const char *tool_style(FILE *to, enum tool_style style)
{
	static const char *const begins[] = {
		[TOOL_PLAIN] = "", [TOOL_BAD] = "\033[31m", [TOOL_GOOD] = "\033[32m", [TOOL_RUN] = "\033[1;34m"};

	return colored(to) ? begins[style] : "";
}

const char *tool_style_end(FILE *to, enum tool_style style)
{
	return style != TOOL_PLAIN && colored(to) ? "\033[m" : "";
}

void tool_print_styled(FILE *to, enum tool_style style, const char *text)
{
	fprintf(to, "%s%s%s", tool_style(to, style), text, tool_style_end(to, style));
}

unsigned tool_terminal_width(int fd)
{
	const char *columns = getenv("COLUMNS");
	struct winsize size = {0};
	unsigned long n;

	if (!isatty(fd))
		return 0;
	n = columns && *columns >= '0' && *columns <= '9' ? strtoul(columns, NULL, 10) : 0;
	if (n == 0 && ioctl(fd, TIOCGWINSZ, &size) == 0)
		n = size.ws_col;
	return n == 0 ? 80 : n > 10000 ? 10000 : (unsigned)n;
}
