/* SPDX-License-Identifier: Apache-2.0
 *
 * Extended attributes user.vckpt.*. Other names, which ls asks about for every file, are refused without a look at the
 * file. The listed attributes change only where something was said of a step after its save. `serving` changes, so it
 * is not listed and exists only for a request by name: a backup then sees no change after a file was read. */
#include <stdio.h>
#include <string.h>

#include "fs/mount.h"

#define PREFIX "user.vckpt."

struct wanted { const char *key; char *value; size_t len; bool found; };

static int take_value(void *arg, const char *key, const char *value)
{
	struct wanted *w = arg;

	if (w->found || strcmp(key, w->key) != 0)
		return 0;
	w->found = true;
	w->len = strlen(value);
	w->value = strdup(value);
	return w->value ? 0 : -ENOMEM;
}

static int take_key(void *arg, const char *key, const char *value)
{
	struct base_buf *b = arg;
	(void)value;

	base_buf_append_text(b, PREFIX);
	base_buf_append(b, key, strlen(key) + 1);
	return b->error;
}

/* ---- a step's directory ---- */

struct said {
	struct view_tree *tree;
	int (*f)(void *arg, const char *key, const char *value);
	void *arg;
	struct base_error *err;
	const struct proto_step_facts *facts;
};

/* An attribute of the save, unless it has another value by now. */
static int give_unset(void *arg, const char *key, const char *value)
{
	const struct said *s = arg;

	for (size_t i = 0; s->facts && strncmp(key, "attr.", 5) == 0 && i < s->facts->nattributes; i++)
		if (strcmp(key + 5, s->facts->attributes[i].key) == 0)
			return 0;
	return s->f(s->arg, key, value);
}

static int give_tags(const struct said *s)
{
	base_cleanup_buf struct base_buf tags = BASE_BUF_INIT;

	for (size_t i = 0; i < s->facts->ntags; i++)
		base_buf_printf(&tags, "%s%s", i ? "," : "", s->facts->tags[i]);
	base_buf_append_zero(&tags, 1);
	return tags.error ? tags.error : s->f(s->arg, "tags", (const char *)tags.data);
}

/* Nothing is read for it, so the run's lock may be held. */
static int step_attributes(void *arg, const struct proto_step_facts *facts)
{
	struct said *s = arg;
	char key[sizeof "attr." + 64];
	int r;

	s->facts = facts;
	r = view_node_attributes(s->tree, 0, give_unset, s, s->err);
	for (size_t i = 0; facts && i < facts->nattributes && r >= 0; i++) {
		snprintf(key, sizeof key, "attr.%s", facts->attributes[i].key);
		r = s->f(s->arg, key, facts->attributes[i].value);
	}
	if (r >= 0 && facts && facts->pinned)
		r = s->f(s->arg, "pinned", facts->reason ? facts->reason : "");
	return r >= 0 && facts && facts->ntags ? give_tags(s) : r;
}

/* Calls f for the attributes of the node; with `all` also for the one that is not listed. */
static int attributes(struct fs_mount *m, fuse_ino_t id, bool all,
	int (*f)(void *arg, const char *key, const char *value), void *arg)
{
	struct base_error err = {0};
	struct fs_step *step;
	base_cleanup(fs_node_release) struct fs_node n;
	char hex[33];

	int r = fs_node_decode(m, id, &n);
	if (r)
		return r;
	if (n.kind == FS_ROOT) {
		for (unsigned i = 0; i < 16; i++)
			snprintf(hex + 2 * i, 3, "%02x", m->store->info.id[i]);
		r = f(arg, "store", hex);
		return r;
	}
	if (n.kind != FS_STEP)
		return 0;
	r = fs_step_get(m->runs, n.commit, &step);
	if (r)
		return r;
	if (n.file)
		r = view_node_attributes(step->tree, n.file, f, arg, &err);
	else
		r = fs_commit_said(n.commit, step_attributes, &(struct said){step->tree, f, arg, &err, NULL});
	if (!r && all && view_tree_node(step->tree, n.file)->kind != VIEW_DIRECTORY)
		r = f(arg, "serving", fs_backing_ready(m->backings, id) ? "passthrough" : "cached");
	fs_step_put(m->runs, step);
	if (r < 0 && err.text[0])
		fs_mount_log_once(m, err.text);
	return r < 0 ? r : 0;
}

/* size: of the caller's buffer; 0: it asks for the length. */
static void reply(struct fs_request *q, int r, const char *value, size_t len, size_t size)
{
	if (!r && fs_request_claim(q)) {
		if (size)
			fuse_reply_buf(q->req, value, len);
		else
			fuse_reply_xattr(q->req, len);
	}
	fs_request_end(q, r);
}

void fs_op_getxattr(fuse_req_t req, fuse_ino_t id, const char *name, size_t size)
{
	struct fs_request q;
	struct wanted w = {0};
	int r = 0;

	fs_request_begin(&q, req, FS_OP_GETXATTR);
	if (q.m->options->noxattr)
		r = -ENOSYS;  /* the kernel will not ask again */
	else if (strncmp(name, "user.", 5) != 0)
		r = -EOPNOTSUPP;  /* security.*, system.posix_acl_*: ls does not ask again either */
	else if (strncmp(name, PREFIX, strlen(PREFIX)) != 0)
		r = -ENODATA;
	if (!r) {
		w.key = name + strlen(PREFIX);
		r = attributes(q.m, id, true, take_value, &w);
		if (!r && !w.found)
			r = -ENODATA;
		if (!r && size && w.len > size)
			r = -ERANGE;
	}
	reply(&q, r, w.value, w.len, size);
	free(w.value);
}

void fs_op_listxattr(fuse_req_t req, fuse_ino_t id, size_t size)
{
	struct fs_request q;
	base_cleanup_buf struct base_buf b = BASE_BUF_INIT;
	int r;

	fs_request_begin(&q, req, FS_OP_LISTXATTR);
	r = q.m->options->noxattr ? -ENOSYS : attributes(q.m, id, false, take_key, &b);
	if (!r && size && b.len > size)
		r = -ERANGE;
	if (!r && b.len > 65536)
		r = -E2BIG;
	reply(&q, r, (const char *)b.data, b.len, size);
}
