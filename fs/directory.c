/* SPDX-License-Identifier: Apache-2.0
 *
 * Reading directories. An entry's cookie is its number in the directory plus one: 0 `.`, 1 `..`, then the rest.
 * Below a step nothing changes, so the kernel may cache what it read. For the root and for runs, a handle takes a copy
 * of the list whenever it is read from its start, so no entry is seen twice or missed because steps come and go between
 * two calls; one that has gone meanwhile is left out. */
#include <string.h>

#include "fs/mount.h"

struct entry { const char *name; struct fuse_entry_param e; char text[256]; };

static int snapshot_root(struct fs_mount *m, struct fs_handle *h)
{
	uint32_t n = fs_runs_count(m->runs);

	free(h->runs);
	h->runs = calloc(n + 1, sizeof *h->runs);
	h->n = 0;
	if (!h->runs)
		return -ENOMEM;
	for (uint32_t i = 0; i < n; i++) {
		struct fs_run *run = fs_runs_at(m->runs, i);
		/* a run whose list cannot be read is shown: looking it up gives the error */
		if (fs_run_ready(m->runs, run) < 0 || fs_run_steps(run))
			h->runs[h->n++] = run;
	}
	return 0;
}

/* Under h->lock. */
static int snapshot(struct fs_mount *m, struct fs_handle *h)
{
	fs_runs_asked(m->runs);
	switch (h->node.kind) {
	case FS_ROOT:
		return snapshot_root(m, h);
	case FS_RUN:
		free(h->steps);
		free(h->tags);
		return fs_run_snapshot(h->node.run, &h->steps, &h->n, &h->tags, &h->ntags);
	default:
		return 0;
	}
}

void fs_op_opendir(fuse_req_t req, fuse_ino_t id, struct fuse_file_info *fi)
{
	struct fs_request q;
	struct fs_handle *h = NULL;
	base_cleanup(fs_node_release) struct fs_node n = {0};
	int r;

	fs_request_begin(&q, req, FS_OP_OPENDIR);
	r = fs_node_decode(q.m, id, &n);
	if (!r && !(h = fs_handle_new(q.m, &n)))
		r = -ENOMEM;
	if (!r && n.kind == FS_TAG) {
		r = -ENOTDIR;
	} else if (!r && n.commit) {
		const struct view_node *v;

		r = fs_step_get(q.m->runs, n.commit, &h->step);
		if (!r && n.kind != FS_STEP)
			r = fs_mesh_opendir(h);
		if (r && r != -ESTALE && r != -ENOMEM && r != -EOPNOTSUPP && r != -ENOTDIR)
			r = -EIO;
		v = r || n.kind != FS_STEP ? NULL : view_tree_node(h->step->tree, n.file);
		if (!r && n.kind == FS_STEP && (!v || v->kind != VIEW_DIRECTORY))
			r = -ENOTDIR;
		fi->cache_readdir = fi->keep_cache = 1;
	} else if (!r) {
		r = snapshot(q.m, h);
	}
	fi->fh = (uintptr_t)h;
	if (!r && fs_request_claim(&q) && fuse_reply_open(req, fi) == 0)
		h = NULL;
	fs_request_end(&q, r);
	fs_handle_unref(q.m, h);
}

/* `.` and `..`: only their st_ino is used. */
static void entry_dot(struct fs_mount *m, struct fs_handle *h, bool up, struct entry *d)
{
	struct fs_node n = h->node;
	bool decoded = true;

	d->name = up ? ".." : ".";
	if (up && n.kind == FS_STEP && n.file) {
		const struct view_node *v = view_tree_node(h->step->tree, n.file);
		decoded = v;
		n.file = v ? v->parent : 0;
	} else if (up && n.kind == FS_MESH) {
		n.kind = n.rank == VIEW_MESH_ALL ? FS_MESHES : FS_MESH;
		n.rank = VIEW_MESH_ALL;
	} else if (up) {
		n.kind = n.kind == FS_STEP ? FS_RUN : n.kind == FS_MESHES ? FS_STEP : FS_ROOT;
	}
	if (!decoded || fs_node_entry(m, &n, h->step, &d->e))
		d->e = (struct fuse_entry_param){.attr = {.st_ino = FUSE_ROOT_ID, .st_mode = S_IFDIR}};
	d->e.ino = 0;
}

/* Entry i of the rest. 1: it is set, with d->e.ino 0 if it has no attributes; 0: past the end; -EAGAIN: it has gone
 * meanwhile. */
static int entry_at(struct fs_mount *m, struct fs_handle *h, uint64_t i, uint64_t ino, struct entry *d)
{
	struct fs_node n = h->node;
	const struct view_node *v;
	bool known;
	int r;

	switch (n.kind) {
	case FS_ROOT:
		if (i > h->n)
			return 0;
		n.kind = i ? FS_RUN : FS_CONTROL;
		n.run = i ? h->runs[i - 1] : NULL;
		d->name = i ? n.run->name : ".vckpt";
		break;
	case FS_CONTROL:
		if (i >= fs_control_count())
			return 0;
		n.kind = FS_CONTROL_FILE;
		n.control = (unsigned)i;
		d->name = fs_control_name(n.control);
		break;
	case FS_RUN:
		if (i > h->n + h->ntags)
			return 0;
		n.kind = i > h->n ? FS_TAG : i ? FS_STEP : FS_LATEST;
		d->name = i > h->n ? h->tags[i - h->n - 1].name : i ? d->text : "latest";
		if (n.kind == FS_TAG && fs_run_tagged(m->runs, n.run, d->name, &n.commit))
			return -EAGAIN;
		if (n.kind != FS_STEP)
			break;
		fs_step_name(h->steps[i - 1], d->text);
		if (fs_run_commit(m->runs, n.run, h->steps[i - 1], &n.commit))
			return -EAGAIN;
		break;
	case FS_MESHES:
	case FS_MESH:
		d->name = d->text;
		d->e = (struct fuse_entry_param){0};  /* without a node: the kernel looks it up if it needs one */
		return fs_mesh_child(h, i, d->text, sizeof d->text, &d->e.attr);
	default:
		v = view_tree_node(h->step->tree, n.file);
		if (!v || i >= v->nchildren)
			return 0;
		n.file = v->first_child + (uint32_t)i;
		v = view_tree_node(h->step->tree, n.file);
		if (!v)
			return 0;
		d->name = v->name;
		known = v->size != VIEW_SIZE_UNKNOWN;
		if (fs_tree_entry(m, n.commit, n.file, v, fs_tree_ino(ino, v->name), known ? v->size : 0, &d->e) ||
				!known)
			d->e.ino = 0;  /* the kernel looks it up when a program asks for its attributes */
		return 1;
	}
	r = fs_node_entry(m, &n, NULL, &d->e);
	if (r == -ENOENT)
		return -EAGAIN;
	if (r || (n.kind == FS_RUN && n.run->failed))
		d->e.ino = 0;  /* the kernel looks it up and gets the error */
	return 1;
}

static size_t add(fuse_req_t req, char *buf, size_t room, const struct entry *d, bool plus, uint64_t cookie)
{
	if (plus)
		return fuse_add_direntry_plus(req, buf, room, d->name, &d->e, (off_t)cookie);
	return fuse_add_direntry(req, buf, room, d->name, &d->e.attr, (off_t)cookie);
}

static int read_entries(fuse_req_t req, struct fs_mount *m, struct fs_handle *h, char *buf, size_t size,
	uint64_t offset, bool plus, size_t *ret_len)
{
	uint64_t ino = h->node.kind == FS_STEP ? fs_node_ino(h->node.commit, h->step->tree, h->node.file) : 0;
	struct entry d;
	int r = 1;

	*ret_len = 0;
	for (uint64_t i = offset; r; i++) {
		size_t used;

		if (i < 2)
			entry_dot(m, h, i == 1, &d);
		else
			r = entry_at(m, h, i - 2, ino, &d);
		if (r == -EAGAIN)
			continue;
		if (r <= 0)
			return r;
		used = add(req, buf + *ret_len, size - *ret_len, &d, plus, i + 1);
		if (used > size - *ret_len)
			return 0;
		*ret_len += used;
	}
	return 0;
}

static void read_directory(fuse_req_t req, enum fs_op op, size_t size, off_t offset, struct fuse_file_info *fi)
{
	struct fs_request q;
	struct fs_handle *h = fs_handle_of(fi);
	size_t len = 0;
	base_cleanup_free char *buf = NULL;
	int r;

	fs_handle_ref(h);
	fs_request_begin(&q, req, op);
	buf = size <= 16 << 20 ? malloc(size + 1) : NULL;
	r = buf ? 0 : -ENOMEM;
	if (offset < 0)
		r = -EINVAL;
	pthread_mutex_lock(&h->lock);
	if (!r && offset == 0)  /* opened just now, or rewound */
		r = snapshot(q.m, h);
	if (!r)
		r = read_entries(req, q.m, h, buf, size, (uint64_t)offset, op == FS_OP_READDIRPLUS, &len);
	pthread_mutex_unlock(&h->lock);
	if (!r && fs_request_claim(&q))
		fuse_reply_buf(req, buf, len);
	fs_request_end(&q, r);
	fs_handle_unref(q.m, h);
}

void fs_op_readdir(fuse_req_t req, fuse_ino_t id, size_t size, off_t offset, struct fuse_file_info *fi)
{
	(void)id;
	read_directory(req, FS_OP_READDIR, size, offset, fi);
}

void fs_op_readdirplus(fuse_req_t req, fuse_ino_t id, size_t size, off_t offset, struct fuse_file_info *fi)
{
	(void)id;
	read_directory(req, FS_OP_READDIRPLUS, size, offset, fi);
}
