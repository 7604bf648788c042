/* SPDX-License-Identifier: Apache-2.0
 *
 * Handlers of requests on names and files. A handler turns a node id into a node, opens the step if it must, and
 * replies exactly once. Bytes go from the cache of decoded pieces to the kernel in one writev: no copy here, and
 * the pins are released when the kernel has taken them. All bytes or an error: a short reply in the middle of a
 * file would be shown as zeroes. */
#include <limits.h>
#include <linux/fuse.h>
#include <stdio.h>
#include <string.h>
#include <sys/statvfs.h>

#include "core/base/clock.h"
#include "core/base/log.h"
#include "fs/mount.h"

#define IOV_MOST 1000 /* writev(2) takes 1,024, and the reply's header is one of them */

/* An error inside an existing step is never reported as "no such file". */
static int inside_step(struct fs_commit *commit, int error)
{
	if (error == -ESTALE || error == -ENOMEM || error == -EOPNOTSUPP || error == -EMFILE || error == -ENFILE ||
		error == -EACCES || error == -EISDIR || error == -EINTR)
		return error;
	return fs_commit_live(commit) ? -EIO : -ESTALE;
}

static int lookup_file(const struct fs_step *step, const char *name, struct fs_node *n)
{
	const struct view_node *v = view_tree_node(step->tree, n->file);
	int64_t found;

	if (!v)
		return -ESTALE;
	if (strcmp(name, ".") == 0)
		return 0;
	if (strcmp(name, "..") == 0) {
		n->kind = n->file ? FS_STEP : FS_RUN;
		n->file = v->parent;
		return 0;
	}
	found = view_tree_lookup(step->tree, n->file, name);
	if (found == -ENOENT && n->file == 0 && strcmp(name, VIEW_MESH_DIRECTORY) == 0)
		n->kind = FS_MESHES;
	else if (found < 0)
		return (int)found;
	else
		n->file = (uint32_t)found;
	return 0;
}

/* In a step's directory or below it. n: the parent on entry. What is found counts as known to the kernel. */
static int lookup_below(struct fs_mount *m, const char *name, struct fs_node *n, struct fuse_entry_param *e)
{
	struct fs_commit *commit = n->commit;
	struct fs_step *step;
	bool found;

	int r = n->kind == FS_TAG ? -ENOTDIR : fs_step_get(m->runs, commit, &step);
	if (r)
		return r == -ENOTDIR ? r : inside_step(commit, r);
	r = n->kind == FS_STEP ? lookup_file(step, name, n) : fs_mesh_lookup(m, step, name, n);
	found = r == 0;
	if (found)
		r = fs_node_entry(m, n, step, e);
	fs_step_put(m->runs, step);
	if (r == -ENOENT && !(found && n->kind == FS_STEP)) {
		/* it will never exist: the kernel may remember that */
		*e = (struct fuse_entry_param){.entry_timeout = FS_FOREVER};
		fs_node_release(n);
		return 0;
	}
	if (r == 0 && n->mesh)
		fs_mesh_learnt(n->mesh);
	return r && r != -ENOTDIR ? inside_step(commit, r) : r;
}

/* n: the parent on entry. */
static int lookup_top(struct fs_mount *m, const char *name, struct fs_node *n)
{
	enum fs_kind parent = n->kind;
	uint64_t step;

	if (strcmp(name, ".") == 0)
		return 0;
	n->kind = FS_ROOT;
	if (strcmp(name, "..") == 0)
		return 0;
	switch (parent) {
	case FS_ROOT:
		n->kind = strcmp(name, ".vckpt") == 0 ? FS_CONTROL : FS_RUN;
		return n->kind == FS_CONTROL ? 0 : fs_runs_find(m->runs, name, &n->run);
	case FS_CONTROL:
		n->kind = FS_CONTROL_FILE;
		for (n->control = 0; n->control < fs_control_count(); n->control++)
			if (strcmp(name, fs_control_name(n->control)) == 0)
				return 0;
		return -ENOENT;
	case FS_RUN:
		n->kind = FS_LATEST;
		if (strcmp(name, "latest") == 0)
			return 0;
		n->kind = FS_STEP;
		if (fs_step_parse(name, &step))
			return fs_run_commit(m->runs, n->run, step, &n->commit);
		n->kind = FS_TAG;
		return fs_run_tagged(m->runs, n->run, name, &n->commit);
	default:
		return -ENOTDIR;
	}
}

static void op_lookup(fuse_req_t req, fuse_ino_t parent, const char *name)
{
	struct fs_request q;
	struct fuse_entry_param e;
	base_cleanup(fs_node_release) struct fs_node n = {0};
	int r;

	fs_request_begin(&q, req, FS_OP_LOOKUP);
	r = fs_node_decode(q.m, parent, &n);
	if (!r && n.commit) {
		r = lookup_below(q.m, name, &n, &e);
	} else if (!r) {
		fs_runs_asked(q.m->runs);
		r = lookup_top(q.m, name, &n);
		if (!r)
			r = fs_node_entry(q.m, &n, NULL, &e);
	}
	if (!r && !(fs_request_claim(&q) && fuse_reply_entry(req, &e) == 0) && n.mesh)
		fs_meshes_forget(q.m->meshes, n.mesh->serial, 1);  /* interrupted: the kernel does not have it */
	fs_request_end(&q, r);
}

/* Only nodes under `mesh` are counted: other ids say all that is needed. */
static void forget(struct fs_mount *m, fuse_ino_t id, uint64_t nlookup)
{
	if (id & FS_NODE_MESH)
		fs_meshes_forget(m->meshes, fs_mesh_serial(id), nlookup);
}

static void op_forget(fuse_req_t req, fuse_ino_t id, uint64_t nlookup)
{
	forget(fuse_req_userdata(req), id, nlookup);
	fuse_reply_none(req);
}

static void op_forget_multi(fuse_req_t req, size_t count, struct fuse_forget_data *forgets)
{
	for (size_t i = 0; i < count; i++)
		forget(fuse_req_userdata(req), forgets[i].ino, forgets[i].nlookup);
	fuse_reply_none(req);
}

static void op_getattr(fuse_req_t req, fuse_ino_t id, struct fuse_file_info *fi)
{
	struct fs_request q;
	struct fs_handle *h = fi ? fs_handle_of(fi) : NULL;
	struct fs_step *step = h ? h->step : NULL, *mine = NULL;
	struct fuse_entry_param e;
	base_cleanup(fs_node_release) struct fs_node n = {0};
	int r;

	if (h)
		fs_handle_ref(h);  /* before another thread may answer the request, and the file be released */
	fs_request_begin(&q, req, FS_OP_GETATTR);
	r = fs_node_decode(q.m, id, &n);
	if (!r && fs_node_is_below_step(&n) && !step) {
		r = fs_step_get(q.m->runs, n.commit, &mine);
		r = r ? inside_step(n.commit, r) : 0;
		step = mine;
	}
	if (!r)
		r = fs_node_entry(q.m, &n, step, &e);
	fs_step_put(q.m->runs, mine);
	fs_handle_unref(q.m, h);
	if (!r && fs_request_claim(&q))
		fuse_reply_attr(req, &e.attr, e.attr_timeout);
	fs_request_end(&q, r);
}

static void op_readlink(fuse_req_t req, fuse_ino_t id)
{
	struct fs_request q;
	char name[FS_STEP_NAME];
	base_cleanup(fs_node_release) struct fs_node n = {0};
	uint64_t step;
	int64_t time_ns;
	int r;

	fs_request_begin(&q, req, FS_OP_READLINK);
	r = fs_node_decode(q.m, id, &n);
	if (!r && n.kind != FS_LATEST && n.kind != FS_TAG && !n.alias)
		r = -EINVAL;
	else if (!r && n.alias)
		view_mesh_rank_name(n.rank, name);
	else if (!r && n.kind == FS_TAG)
		fs_step_name(n.commit->step, name);
	else if (!r && fs_run_latest(n.run, &step, &time_ns))
		fs_step_name(step, name);
	else if (!r)
		r = -ENOENT;
	if (!r && fs_request_claim(&q))
		fuse_reply_readlink(req, name);
	fs_request_end(&q, r);
}

/* FOPEN_PASSTHROUGH and struct fuse_open_out as in <linux/fuse.h> since 6.9, and in libfuse since 3.17; Debian 12's are
 * older. */
#define OPEN_PASSTHROUGH (1u << 7)
struct open_out { uint64_t fh; uint32_t flags; int32_t backing_id; };

/* Decides how the file is served (fs/backing.h). The kernel allows few flags beside PASSTHROUGH: it drops the pages
 * that it has of the file, which are not read any more. */
static int reply_open(fuse_req_t req, const struct fuse_file_info *fi, int backing_id)
{
	struct open_out out = {.fh = fi->fh, .flags = OPEN_PASSTHROUGH | FOPEN_NOFLUSH, .backing_id = backing_id};

	return backing_id ? fuse_reply_buf(req, (const char *)&out, sizeof out) : fuse_reply_open(req, fi);
}

static int open_file(struct fs_mount *m, struct fs_handle *h, struct fuse_file_info *fi)
{
	const struct fs_node *n = &h->node;
	struct base_error err = {0};
	int r;

	if (n->kind == FS_CONTROL_FILE) {
		fi->direct_io = 1;  /* its size is unknown */
		return fs_control_text(m, n->control, &h->text, &h->text_len);
	}
	if (!fs_node_is_below_step(n))
		return -EISDIR;
	r = fs_step_get(m->runs, n->commit, &h->step);
	if (!r) {
		r = n->kind == FS_MESH ? fs_mesh_open(h->step, n, &h->file, &err)
			: view_file_open(h->step->tree, n->file, &h->file, &err);
		if (r && r != -EISDIR && err.text[0])
			fs_mount_log_once(m, err.text);
	}
	fi->keep_cache = 1;
	fi->noflush = 1;
	return r ? inside_step(n->commit, r) : 0;
}

static void op_open(fuse_req_t req, fuse_ino_t id, struct fuse_file_info *fi)
{
	struct fs_request q;
	struct fs_handle *h = NULL;
	base_cleanup(fs_node_release) struct fs_node n = {0};
	int r;

	fs_request_begin(&q, req, FS_OP_OPEN);
	r = fs_node_decode(q.m, id, &n);
	if (!r && (fi->flags & O_ACCMODE) != O_RDONLY)
		r = -EROFS;
	if (!r && !(h = fs_handle_new(q.m, &n)))
		r = -ENOMEM;
	if (!r)
		r = open_file(q.m, h, fi);
	if (!r && h->file)
		r = fs_backing_open(q.m->backings, id, h);
	fi->fh = (uintptr_t)h;
	if (r >= 0 && fs_request_claim(&q) && reply_open(req, fi, r) == 0)
		h = NULL;  /* else it was interrupted, and no release will come */
	fs_request_end(&q, r < 0 ? r : 0);
	fs_handle_unref(q.m, h);
}

/* Of files and of directories. */
static void op_release(fuse_req_t req, fuse_ino_t id, struct fuse_file_info *fi)
{
	struct fs_request q;
	(void)id;

	fs_request_begin_short(&q, req, FS_OP_RELEASE);
	fs_backing_release(q.m->backings, fs_handle_of(fi));
	fs_handle_unref(q.m, fs_handle_of(fi));
	fuse_reply_err(req, 0);
	fs_request_end(&q, 0);
}

/* ---- reading ---- */

static void reply_gathered(struct fs_request *q, const struct load_slices *e, size_t len)
{
	base_cleanup_free char *all = malloc(len);
	size_t at = 0;

	for (unsigned i = 0; all && i < e->niov; i++) {
		memcpy(all + at, e->iov[i].iov_base, e->iov[i].iov_len);
		at += e->iov[i].iov_len;
	}
	if (!fs_request_claim(q))
		return;
	if (all)
		fuse_reply_buf(q->req, all, len);
	else
		fuse_reply_err(q->req, ENOMEM);
}

/* Replies with bytes [offset, offset + len), which are inside the file: out of the cache, or gathered in `scratch`. */
static int reply_slices(struct fs_request *q, struct fs_handle *h, uint64_t offset, size_t len, void *scratch)
{
	struct base_error err = {0};
	struct load_slices e = {0};
	size_t total = 0;

	int r = view_file_slices(h->file, q->m->cache, offset, len, scratch, &e, &err);
	if (r < 0) {
		if (err.text[0])
			fs_mount_log_once(q->m, err.text);
		atomic_fetch_add_explicit(&q->m->stats.damaged_reads, 1, memory_order_relaxed);
		return inside_step(h->node.commit, r);
	}
	for (unsigned i = 0; i < e.niov; i++)
		total += e.iov[i].iov_len;
	if (total != len) {
		load_slices_release(&e);
		fs_mount_log_once(q->m, "internal error: a read returned a wrong number of bytes");
		return -EIO;
	}
	if (e.niov > IOV_MOST) {
		atomic_fetch_add_explicit(&q->m->stats.gathered_replies, 1, memory_order_relaxed);
		reply_gathered(q, &e, len);
	} else if (fs_request_claim(q)) {
		fuse_reply_iov(q->req, e.iov, (int)e.niov);
	}
	load_slices_release(&e);
	return 0;
}

static int read_step(struct fs_request *q, struct fs_handle *h, size_t size, uint64_t offset)
{
	uint64_t end = view_file_size(h->file);
	size_t len = offset >= end ? 0 : (size_t)base_min(size, end - offset);
	const void *there;
	int r = 0;

	if (!len) {
		if (fs_request_claim(q))
			fuse_reply_buf(q->req, NULL, 0);
		return 0;
	}
	there = fs_backing_look(q->m->backings, h, offset, len);
	if (there) {
		if (fs_request_claim(q))
			fuse_reply_buf(q->req, there, len);
		fs_backing_looked(q->m->backings, h, len);
	} else {
		void *scratch = fs_scratch_take(&q->m->scratch, len);
		r = scratch ? reply_slices(q, h, offset, len, scratch) : -ENOMEM;
		fs_scratch_give(&q->m->scratch, scratch, len);
	}
	if (r == 0) {
		atomic_fetch_add_explicit(&q->m->stats.read_bytes, len, memory_order_relaxed);
		fs_backing_served(q->m->backings, h, offset, len);
	}
	return r;
}

static void read_slow(struct fs_request *q, struct fs_handle *h, size_t size, uint64_t offset, int64_t ns)
{
	char step[FS_STEP_NAME], what[600];
	const struct view_node *v = view_tree_node(h->step->tree, h->node.file);
	const struct fs_mesh *mesh = h->node.mesh;
	const struct view_node *directory = v && v->parent ? view_tree_node(h->step->tree, v->parent) : NULL;

	fs_step_name(h->node.commit->step, step);
	if (mesh)
		snprintf(what, sizeof what, "%s/%s/" VIEW_MESH_DIRECTORY "/%s/rank-%05u", h->node.run->name, step,
			mesh->name, h->node.rank);
	else
		snprintf(what, sizeof what, "%s/%s/%s%s%s", h->node.run->name, step, directory ? directory->name : "",
			directory ? "/" : "", v ? v->name : "?");
	fs_mount_log_slow(q->m, what, offset, size, ns);
}

static void op_read(fuse_req_t req, fuse_ino_t id, size_t size, off_t offset, struct fuse_file_info *fi)
{
	struct fs_request q;
	struct fs_handle *h = fs_handle_of(fi);
	int r = 0;
	int64_t ns;

	(void)id;

	fs_handle_ref(h);
	fs_request_begin(&q, req, FS_OP_READ);
	if (offset < 0) {
		r = -EINVAL;
	} else if (h->text) {
		size_t at = (size_t)base_min((uint64_t)offset, h->text_len);
		if (fs_request_claim(&q))
			fuse_reply_buf(req, h->text + at, base_min(size, h->text_len - at));
	} else {
		r = read_step(&q, h, size, (uint64_t)offset);
	}
	ns = (int64_t)base_monotonic_ns() - q.start_ns;
	if (ns > FS_SLOW_NS && h->file)
		read_slow(&q, h, size, (uint64_t)offset, ns);
	fs_request_end(&q, r);
	fs_handle_unref(q.m, h);
}

static void op_statfs(fuse_req_t req, fuse_ino_t id)
{
	struct fs_request q;
	struct storage_stat s = {0};
	struct storage *storage;
	int r;
	struct statvfs v;

	(void)id;

	fs_request_begin(&q, req, FS_OP_STATFS);
	storage = q.m->store->storage;
	r = storage->ops->stat ? storage->ops->stat(storage, &s) : -EOPNOTSUPP;
	if (r == -EOPNOTSUPP) {
		s = (struct storage_stat){.block_bytes = 4096};
		r = 0;
	}
	v = (struct statvfs){.f_bsize = 1 << 20, .f_frsize = s.block_bytes, .f_blocks = s.blocks,
		.f_bfree = s.blocks_free, .f_bavail = s.blocks_available,
		.f_files = s.files, .f_ffree = s.files_free, .f_favail = s.files_free, .f_namemax = 255};
	if (!r && fs_request_claim(&q))
		fuse_reply_statfs(req, &v);
	fs_request_end(&q, r);
}

static void op_init(void *userdata, struct fuse_conn_info *c)
{
	struct fs_mount *m = userdata;

	c->want &= ~(unsigned)(FUSE_CAP_AUTO_INVAL_DATA | FUSE_CAP_READDIRPLUS_AUTO |
		FUSE_CAP_SPLICE_READ | FUSE_CAP_SPLICE_WRITE | FUSE_CAP_SPLICE_MOVE |
		FUSE_CAP_WRITEBACK_CACHE | FUSE_CAP_CACHE_SYMLINKS | FUSE_CAP_HANDLE_KILLPRIV);
	c->want |= c->capable & (FUSE_CAP_EXPLICIT_INVAL_DATA | FUSE_CAP_READDIRPLUS | FUSE_CAP_PARALLEL_DIROPS |
		FUSE_CAP_ASYNC_READ | FUSE_CAP_EXPORT_SUPPORT);
	c->max_background = 64;
	c->congestion_threshold = 48;
	c->max_readahead = UINT_MAX;  /* the kernel takes the smaller of this and its own */
	fs_mount_feature(m, "readdirplus", c->want & FUSE_CAP_READDIRPLUS, "%s",
		c->want & FUSE_CAP_READDIRPLUS ? "always" : "the kernel has none");
}

const struct fuse_lowlevel_ops fs_ops = {
	.init = op_init,
	.lookup = op_lookup,
	.forget = op_forget,
	.forget_multi = op_forget_multi,
	.getattr = op_getattr,
	.readlink = op_readlink,
	.open = op_open,
	.read = op_read,
	.release = op_release,
	.opendir = fs_op_opendir,
	.readdir = fs_op_readdir,
	.readdirplus = fs_op_readdirplus,
	.releasedir = op_release,
	.statfs = op_statfs,
	.getxattr = fs_op_getxattr,
	.listxattr = fs_op_listxattr,
};
