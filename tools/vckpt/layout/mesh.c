/* SPDX-License-Identifier: Apache-2.0
 *
 * vckpt mesh: coordinates, groups, neighbours, hosts and devices of the ranks of a mesh. Opens no store.
 *
 * A group for each dimension and each pair of dimensions. Numbers printed with --json grow with the square of the mesh;
 * so they are counted before the first byte, and too many are refused. */
#include <inttypes.h>
#include <string.h>

#include "tools/vckpt/layout/layout_args.h"

#define DEVICES_DEFAULT 8
#define MEMBERS_MAX (UINT64_C(1) << 26) /* ranks in groups that are written as JSON: some seconds */
#define SHOWN_RANKS 8           /* of one group, in tables */
#define SHOWN_MESH 4096u        /* groups of a larger mesh are counted, not listed */

struct mesh_command {
	struct tool *t;
	struct tool_mesh mesh;
	const char *devices_text, *table_text;
	bool no_wrap;
	struct tool_ranks ranks;
	struct tensor_hosts hosts;
	uint32_t *table[2];             /* host and device by rank; NULL without --device-table */
	uint32_t *members;              /* room for the largest group */
};

/* ---- sets of dimensions: each one, then each pair ---- */

static uint32_t set_count(const struct tensor_mesh *m)
{
	return m->ndim + m->ndim * (m->ndim - 1) / 2;
}

static uint32_t set_at(const struct tensor_mesh *m, uint32_t i)
{
	if (i < m->ndim)
		return UINT32_C(1) << i;
	i -= m->ndim;
	for (uint32_t d = 0;; i -= m->ndim - 1 - d, d++)
		if (i < m->ndim - 1 - d)
			return UINT32_C(1) << d | UINT32_C(1) << (d + 1 + i);
}

/* false: there is none, at an end with --no-wrap */
static bool neighbour(const struct mesh_command *c, uint32_t rank, uint32_t dim, int k, uint32_t *ret)
{
	return tensor_mesh_neighbour(c->mesh.mesh, rank, dim, k, !c->no_wrap, ret) == 0;
}

/* ---- JSON ---- */

static void print_neighbours(const struct mesh_command *c, uint32_t rank, const char *key, int k)
{
	uint32_t other;

	printf(", \"%s\": {", key);
	for (uint32_t d = 0; d < c->mesh.mesh->ndim; d++) {
		printf("%s\"%s\": ", d ? ", " : "", c->mesh.mesh->name[d]);
		if (neighbour(c, rank, d, k, &other))
			printf("%" PRIu32, other);
		else
			fputs("null", stdout);
	}
	putchar('}');
}

static void print_rank_json(const struct mesh_command *c, uint32_t rank)
{
	const struct tensor_mesh *m = c->mesh.mesh;
	uint32_t at[TENSOR_MAX_DIMS], host = 0, device = 0;

	tensor_mesh_coordinate(m, rank, at);
	tensor_hosts_find(&c->hosts, rank, &host, &device); /* checked before the first byte */
	printf("{\"rank\": %" PRIu32 ", \"coordinate\": ", rank);
	tool_json_numbers32(at, m->ndim);
	printf(", \"host\": %" PRIu32 ", \"device\": %" PRIu32 ", \"groups\": {", host, device);
	for (uint32_t i = 0; i < set_count(m) && !ferror(stdout); i++) {
		tensor_mesh_group(m, rank, set_at(m, i), c->members);
		printf("%s\"%s\": ", i ? ", " : "", TOOL_NAMES(m, set_at(m, i)));
		tool_json_numbers32(c->members, tensor_mesh_group_size(m, set_at(m, i)));
	}
	putchar('}');
	print_neighbours(c, rank, "next", 1);
	print_neighbours(c, rank, "previous", -1);
	putchar('}');
}

static int print_json(const struct mesh_command *c)
{
	uint64_t numbers = 0;

	for (uint32_t i = 0; i < set_count(c->mesh.mesh); i++)
		numbers += tensor_mesh_group_size(c->mesh.mesh, set_at(c->mesh.mesh, i));
	numbers *= c->ranks.count; /* 136 groups of 2^24, 2^24 times: fits */
	if (numbers > MEMBERS_MAX)
		return tool_failed(c->t, "--mesh %.200s: groups of %" PRIu64 " ranks in all are too many for JSON%s",
			c->mesh.text, numbers, c->ranks.one ? "" : "; --rank N picks one rank");
	tool_output_begin();
	fputs("{\"ranks\": [", stdout);
	for (uint32_t i = 0; i < c->ranks.count && !ferror(stdout); i++) {
		fputs(i ? ",\n  " : "\n  ", stdout);
		print_rank_json(c, tool_ranks_at(&c->ranks, i));
	}
	fputs("]}\n", stdout);
	return tool_output_end(c->t);
}

/* ---- tables ---- */

static void print_members(const uint32_t *ranks, uint32_t n)
{
	for (uint32_t i = 0; i < n && i < SHOWN_RANKS; i++)
		printf("%s%" PRIu32, i ? "," : "", ranks[i]);
	if (n > SHOWN_RANKS)
		printf(",... %" PRIu32 " (%" PRIu32 " ranks)", ranks[n - 1], n);
}

/* "4,2,-": neighbours along each dimension */
static void neighbours_text(const struct mesh_command *c, uint32_t rank, int k, char text[static TOOL_SHAPE_TEXT])
{
	uint32_t other = 0;
	int len = 0;

	for (uint32_t d = 0; d < c->mesh.mesh->ndim; d++) {
		bool there = neighbour(c, rank, d, k, &other);

		len += sprintf(text + len, there ? "%s%" PRIu32 : "%s-", d ? "," : "", other);
	}
}

static int wider(int a, int b) { return a > b ? a : b; }

static void print_ranks(const struct mesh_command *c)
{
	const struct tensor_mesh *m = c->mesh.mesh;
	char next[TOOL_SHAPE_TEXT], previous[TOOL_SHAPE_TEXT];
	int last = m->ranks ? (int)m->ranks[m->order[m->count - 1]] : (int)m->count - 1;
	int width = tool_coordinate_width(m), room = wider((int)m->ndim * (tool_digits((uint64_t)last) + 1) - 1, 8);

	printf("%8s  %-*s  %8s  %6s  %-*s  %s\n", "rank", width, TOOL_NAMES(m, UINT32_MAX), "host",
		"device", room, "next", "previous");
	for (uint32_t i = 0; i < m->count && !ferror(stdout); i++) {
		uint32_t rank = tensor_mesh_rank_at(m, i), host = 0, device = 0;

		tensor_hosts_find(&c->hosts, rank, &host, &device);
		neighbours_text(c, rank, 1, next);
		neighbours_text(c, rank, -1, previous);
		printf("%8" PRIu32 "  %-*s  %8" PRIu32 "  %6" PRIu32 "  %-*s  %s\n", rank, width,
			TOOL_COORDINATE(m, rank), host, device, room, next, previous);
	}
}

/* Of the names of all sets. */
static int along_width(const struct tensor_mesh *m)
{
	int width = 8;

	for (uint32_t i = 0; i < set_count(m); i++)
		width = wider(width, (int)strlen(TOOL_NAMES(m, set_at(m, i))));
	return width;
}

/* The groups of a set, each once: at its first rank. */
static void print_groups(const struct mesh_command *c, uint32_t dims)
{
	const struct tensor_mesh *m = c->mesh.mesh;
	uint32_t size = tensor_mesh_group_size(m, dims);

	if (m->count > SHOWN_MESH) {
		printf("%" PRIu32 " of %s each", m->count / size, TOOL_COUNT(size, "rank", "ranks"));
		return;
	}
	for (uint32_t i = 0; i < m->count; i++) {
		uint32_t rank = tensor_mesh_rank_at(m, i);

		if (tensor_mesh_group_position(m, rank, dims) != 0)
			continue;
		tensor_mesh_group(m, rank, dims, c->members);
		fputs(i ? "  " : "", stdout);
		print_members(c->members, size);
	}
}

static int print_table(const struct mesh_command *c)
{
	const struct tensor_mesh *m = c->mesh.mesh;
	int width = along_width(m);

	print_ranks(c);
	printf("\ngroups%s\n", m->count > SHOWN_MESH ? " (--rank N lists those of a rank)" : "");
	for (uint32_t i = 0; i < set_count(m) && !ferror(stdout); i++) {
		printf("%*s  ", width, TOOL_NAMES(m, set_at(m, i)));
		print_groups(c, set_at(m, i));
		putchar('\n');
	}
	return tool_output_end(c->t);
}

static int print_rank(const struct mesh_command *c)
{
	const struct tensor_mesh *m = c->mesh.mesh;
	uint32_t host = 0, device = 0, other;
	int width = along_width(m);

	tensor_hosts_find(&c->hosts, c->ranks.rank, &host, &device);
	printf("rank %" PRIu32 " at %s = %s, host %" PRIu32 ", device %" PRIu32 "\n\n", c->ranks.rank,
		TOOL_NAMES(m, UINT32_MAX), TOOL_COORDINATE(m, c->ranks.rank), host, device);
	printf("%*s  %8s  %8s  %8s  ranks\n", width, "along", "previous", "next", "position");
	for (uint32_t i = 0; i < set_count(m); i++) {
		uint32_t dims = set_at(m, i);

		printf("%*s", width, TOOL_NAMES(m, dims));
		for (int k = -1; k <= 1; k += 2) {
			if (i < m->ndim && neighbour(c, c->ranks.rank, i, k, &other))
				printf("  %8" PRIu32, other);
			else
				printf("  %8s", i < m->ndim ? "-" : "");
		}
		tensor_mesh_group(m, c->ranks.rank, dims, c->members);
		printf("  %8" PRId64 "  ", tensor_mesh_group_position(m, c->ranks.rank, dims));
		print_members(c->members, tensor_mesh_group_size(m, dims));
		putchar('\n');
	}
	return tool_output_end(c->t);
}

/* ---- the command ---- */

/* "0:0,0:1,1:0": host and device of ranks 0, 1, 2 */
static int read_table(struct mesh_command *c)
{
	size_t room = strlen(c->table_text) / 2 + 1; /* a digit and a separator for each */
	base_cleanup_free uint64_t *numbers = calloc(room, sizeof *numbers);
	int64_t n;

	c->table[0] = calloc(room, sizeof *c->table[0]);
	c->table[1] = calloc(room, sizeof *c->table[1]);
	if (!numbers || !c->table[0] || !c->table[1])
		return tool_fail(c->t, &(struct base_error){.code = -ENOMEM});
	n = tool_numbers_read(c->table_text, ":,", UINT32_MAX, numbers, room);
	if (n == -ERANGE)
		return tool_usage(c->t, "--device-table %.200s: a number is above 2^32-1", c->table_text);
	if (n < 0 || n % 2)
		return tool_usage(c->t, "--device-table %.200s: give HOST:DEVICE of each rank, separated by commas",
			c->table_text);
	for (int64_t i = 0; i < n; i++)
		c->table[i % 2][i / 2] = (uint32_t)numbers[i];
	c->hosts = (struct tensor_hosts){.host = c->table[0], .device = c->table[1], .n = (uint32_t)n / 2};
	return 0;
}

static int read_hosts(struct mesh_command *c)
{
	uint64_t devices = DEVICES_DEFAULT;
	int code;

	if (c->devices_text && c->table_text)
		return tool_usage(c->t, "--devices-per-host and --device-table exclude each other");
	if (c->table_text)
		return read_table(c);
	code = c->devices_text ? tool_number_read(c->t, "--devices-per-host", c->devices_text, UINT32_MAX, &devices)
		: 0;
	if (!code && devices == 0)
		code = tool_usage(c->t, "--devices-per-host %s: a host has at least one device", c->devices_text);
	c->hosts = (struct tensor_hosts){.devices = (uint32_t)devices};
	return code;
}

/* Every rank that is described is in the mesh and has a host; the largest group fits. */
static int check_ranks(struct mesh_command *c)
{
	const struct tensor_mesh *m = c->mesh.mesh;
	uint32_t at[TENSOR_MAX_DIMS], host, device, largest = 1;

	if (c->ranks.one && tensor_mesh_coordinate(m, c->ranks.rank, at) < 0)
		return tool_usage(c->t, "--rank %" PRIu32 " is not in the mesh %.200s of %s", c->ranks.rank,
			c->mesh.text, TOOL_COUNT(m->count, "rank", "ranks"));
	for (uint32_t i = 0; i < c->ranks.count; i++)
		if (tensor_hosts_find(&c->hosts, tool_ranks_at(&c->ranks, i), &host, &device) < 0)
			return tool_usage(c->t, "--device-table %.200s: nothing for rank %" PRIu32, c->table_text,
				tool_ranks_at(&c->ranks, i));
	for (uint32_t i = 0; i < set_count(m); i++)
		largest = (uint32_t)base_max(largest, tensor_mesh_group_size(m, set_at(m, i)));
	c->members = calloc(largest, sizeof *c->members);
	return c->members ? 0 : tool_fail(c->t, &(struct base_error){.code = -ENOMEM});
}

static int mesh_run(struct tool *t, int argc, char **argv)
{
	struct mesh_command c = {.t = t, .mesh = {.option = "--mesh", .order_option = "--rank-order"}};
	const struct tool_option options[] = {{"mesh", .text = &c.mesh.text}, {"rank-order", .text = &c.mesh.order},
		{"devices-per-host", .text = &c.devices_text}, {"device-table", .text = &c.table_text},
		{"rank", .text = &c.ranks.text}, {"no-wrap", .flag = &c.no_wrap}, {0}};
	int code = tool_parse(t, argc, argv, options);

	if (!code)
		code = tool_mesh_read(t, &c.mesh);
	if (!code)
		code = read_hosts(&c);
	if (!code)
		code = tool_ranks_read(t, &c.ranks, &c.mesh);
	if (!code)
		code = check_ranks(&c);
	if (!code && t->json) {
		code = print_json(&c);
	} else if (!code) {
		tool_output_begin();
		code = c.ranks.one ? print_rank(&c) : print_table(&c);
	}
	tensor_mesh_free(c.mesh.mesh);
	free(c.table[0]);
	free(c.table[1]);
	free(c.members);
	return code;
}

const struct tool_command tool_mesh_command = {"mesh", "say where ranks are in a mesh, their groups and neighbours",
	"usage: vckpt mesh --mesh MESH [--rank-order R,R,...] [--devices-per-host N | --device-table HOST:DEVICE,...]\n"
	"                  [--rank N] [--no-wrap] [--json] [-q] [-v]\n\n"
	"Says of the ranks of a mesh: coordinate, host and device, the group along every dimension and every pair\n"
	"of dimensions, and the next and the previous rank along each dimension. Needs no store.\n\n"
	"  --mesh pp=2,dp=2,tp=2  names and sizes, outermost first; JSON text; or @FILE with JSON\n"
	"  --rank-order 0,4,..    the rank at each place of the mesh, last dimension fastest; by default 0,1,2,...\n"
	"  --devices-per-host N   rank r is on host r/N, device r%N (default 8)\n"
	"  --device-table 0:0,..  instead: host and device of rank 0, of rank 1, and so on\n"
	"  --rank N               this rank only\n"
	"  --no-wrap              the last rank of a dimension has no next one, the first no previous one\n",
	mesh_run};
