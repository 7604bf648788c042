/* SPDX-License-Identifier: Apache-2.0
 *
 * layout_args: what `vckpt mesh`, `layout` and `reshard` share: their arguments, and how ranks, shapes and coordinates
 * are written. These commands open no store and write as they go: a mesh may have millions of ranks. One thread.
 * Functions that read arguments return 0 or the exit code to leave with; the message, with the option and its
 * value, has then been printed. */
#ifndef TOOLS_VCKPT_LAYOUT_LAYOUT_ARGS_H
#define TOOLS_VCKPT_LAYOUT_LAYOUT_ARGS_H

#include "core/tensor/boxes.h"
#include "core/tensor/dtype.h"
#include "core/tensor/shard.h"
#include "tools/vckpt/tool.h"

#define TOOL_RANKS_MAX (UINT32_C(1) << 20) /* that one command describes: some seconds; beyond, --rank picks */

/* A decimal number of at most `max`. */
int tool_number_read(const struct tool *t, const char *option, const char *text, uint64_t max, uint64_t *ret);
/* Numbers with blanks around them, separated by the characters of `separators` in turn. How many there are; -EINVAL:
 * something else is there; -ERANGE: one is above `max`; -E2BIG: there are more than `room`. */
int64_t tool_numbers_read(const char *text, const char *separators, uint64_t max, uint64_t *ret, size_t room);

/* --mesh and --rank-order. Zero-initialise with the names of the options and their values (NULL: not given). */
struct tool_mesh {
	const char *option, *text, *order_option, *order;
	struct tensor_mesh *mesh;
};
/* "dp=2,tp=4", JSON text {"dims": [["dp",2],["tp",4]], "ranks": [...]}, or @FILE with such JSON. */
int tool_mesh_read(const struct tool *t, struct tool_mesh *m);
/* That JSON as a mesh. Closes the file; NULL: errno says why it cannot be opened. -EINVAL, -BASE_ELIMIT, -ENOMEM, or
 * the error of reading the file; the sentence is in err. */
int tool_mesh_from_json(FILE *file, struct tensor_mesh **ret_m, struct base_error *err);
void tool_mesh_print_json(const struct tensor_mesh *m); /* as it is read */

/* The ranks that a command describes: with --rank this one, which may be outside of the mesh, else all in mesh order.
 * Zero-initialise with the option's value (NULL: not given). */
struct tool_ranks { const char *text; bool one; uint32_t rank, count; const struct tensor_mesh *mesh; };
/* TOOL_FAILED: more than TOOL_RANKS_MAX. */
int tool_ranks_read(const struct tool *t, struct tool_ranks *ranks, const struct tool_mesh *m);
uint32_t tool_ranks_at(const struct tool_ranks *ranks, uint32_t i); /* the i-th of them */

/* A mesh and the placements on it. */
struct tool_sharding {
	struct tool_mesh mesh;
	const char *place_option, *place;
	struct tensor_placements *placements;
	struct tensor_sharding sharding;
};
int tool_sharding_read(const struct tool *t, const struct tensor_shape *shape, unsigned item_bytes,
	struct tool_sharding *s);
void tool_sharding_release(struct tool_sharding *s);
int tool_tensor_read(const struct tool *t, const char *shape, const char *dtype, struct tensor_shape *ret_shape,
	enum tensor_dtype *ret_dtype);
/* "A:B" or "A:B/L" */
int tool_flat_read(const struct tool *t, const char *text, struct tensor_flat *ret_flat);

/* ---- writing ---- */

#define TOOL_BOX_TEXT (TENSOR_MAX_DIMS * 43 + 3)
#define TOOL_NAMES_TEXT (TENSOR_MAX_DIMS * TENSOR_MESH_NAME_MAX) /* names, each with a comma or the NUL */
/* These write into `text` and return it; the macros have memory that lasts as long as the block around them.
 * "0,3"; "-" for a rank outside the mesh. */
char *tool_coordinate_text(const struct tensor_mesh *m, uint32_t rank, char text[static TOOL_SHAPE_TEXT]);
char *tool_names_text(const struct tensor_mesh *m, uint32_t dims, char text[static TOOL_NAMES_TEXT]); /* "dp,tp" */
#define TOOL_COORDINATE(m, rank) tool_coordinate_text(m, rank, (char[TOOL_SHAPE_TEXT]){0})
#define TOOL_NAMES(m, dims) tool_names_text(m, dims, (char[TOOL_NAMES_TEXT]){0}) /* dims: UINT32_MAX: all */
/* Width, in characters, of a column of coordinates under the names of all dimensions. */
int tool_coordinate_width(const struct tensor_mesh *m);
/* Ascending ranks, neighbours joined: "0-3,8". */
void tool_ranks_text(const uint32_t *ranks, size_t n, struct base_buf *b);
int tool_digits(uint64_t v); /* how many */
#define TOOL_NUMBERS(n, v) tool_format_shape(n, v, (char[TOOL_SHAPE_TEXT]){0}) /* "[4096, 1024]"; n: at most 16 */
void tool_json_numbers32(const uint32_t *v, uint32_t n);
void tool_tensor_print(const struct tensor_shape *shape, enum tensor_dtype dtype); /* "[4096, 1024] bf16, 8.0 MiB" */
void tool_sharding_print(const struct tool_sharding *s); /* " dp=2,tp=4 as R,S(0)" */

/* Call it before the first byte: if the reader of standard output leaves, writing then fails and no signal comes. */
void tool_output_begin(void);
/* After the last byte: TOOL_DONE or TOOL_FAILED. */
int tool_output_end(const struct tool *t);

#endif
