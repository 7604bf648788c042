/* SPDX-License-Identifier: Apache-2.0
 *
 * mpi library: which one, and of which family.
 *
 * A process that uses MPI has its library already, linked or loaded (mpi4py loads it with RTLD_LOCAL, so that its
 * symbols are in no one's scope; by its name it is still found). Several may be loaded; the one that counts is the one
 * that is initialised. Only if the caller wants MPI to be initialised here, a library is loaded that was not there:
 * first of the family whose launcher started the process, because ranks that load another one's library do not see
 * each other, but are each a world of one rank.
 *
 * MPI can be initialised once in the life of a process. What was initialised here is finalised when the process exits,
 * but not with a status of failure, nor if a communicator is left: MPI_Finalize waits for the other ranks,
 * and they may wait for this one. The launcher sees that such a process has not called it, and ends the job. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/base/le.h"
#include "core/comm/mpi_internal.h"

#define MPI_LIBRARY_ENV "VCKPT_LIBMPI"

/* "" is what the process has in its global scope. libmpi.so.12 is MPICH's and Intel's, and an old Open MPI's. */
static const char *const mpi_names[] = {"", "libmpi.so.40", "libmpich.so.12", "libmpi.so.12", "libmpi.so.20"};
static const char *const mpi_names_open[] = {"libmpi.so.40", "libmpi.so.20", "libmpi.so.12"};
static const char *const mpi_names_mpich[] = {"libmpich.so.12", "libmpi.so.12"};

/* Protects what follows; mpi_found is constant once it is chosen. */
static pthread_mutex_t mpi_lock = PTHREAD_MUTEX_INITIALIZER;
static bool mpi_chosen;
static struct mpi_library mpi_found;
static pid_t mpi_initialiser;                    /* the process that initialised it here; 0: none */
static unsigned mpi_users;

/* ---- one library ---- */

static void mpi_find_handles(void *handle, struct mpi_library *l)
{
	if (l->pointers) {
		l->world.pointer = dlsym(handle, "ompi_mpi_comm_world");
		l->byte.pointer = dlsym(handle, "ompi_mpi_byte");
		l->errors_return.pointer = dlsym(handle, "ompi_mpi_errors_return");
		l->any_source = -1;
	} else {
		l->world.number = 0x44000000;
		l->byte.number = 0x4c00010d;
		l->errors_return.number = 0x54000001;
		l->any_source = -2;
	}
}

/* MPI 5.0 has a third family, whose handles are small numbers in pointers; such a library has the name libmpi_abi. */
static int mpi_find_family(void *handle, struct mpi_library *l, struct base_error *err)
{
	int (*version)(char *, int *);
	char text[MPI_TEXT_BYTES] = "";
	int len = 0;

	l->pointers = dlsym(handle, "ompi_mpi_comm_world") != NULL;
	if (l->pointers || dlsym(handle, "MPII_Version_string") || dlsym(handle, "MPIR_Version_string"))
		return 0;
	*(void **)&version = dlsym(handle, "MPI_Get_library_version");
	if (version && !strstr(l->name, "mpi_abi") && version(text, &len) == MPI_SUCCEEDED &&
	    (strstr(text, "MPICH") || strstr(text, "Intel(R) MPI") || strstr(text, "MVAPICH")))
		return 0;
	return base_error_set(err, -ENOENT, "the MPI library %s is neither Open MPI nor of MPICH's family (it says: "
		"%.60s): set " MPI_LIBRARY_ENV " to the path of one that is", l->name, text);
}

static int mpi_find_symbols(void *handle, struct mpi_library *l, struct base_error *err)
{
	const char *missing = NULL;

#define MPI_FIND(member, symbol, arguments)                                                            \
	*(void **)&l->call.p.member = dlsym(handle, #symbol); /* and n.member, which is in its place */ \
	if (!l->call.p.member)                                                                         \
		missing = #symbol;
	MPI_FUNCTIONS(MPI_FIND, void *)
#undef MPI_FIND
	if (missing)
		return base_error_set(err, -ENOENT, "the MPI library %s has no %s: one that implements MPI 3.0 or "
			"later is needed", l->name, missing);
	return 0;
}

/* 0: `l` is filled. -ENOENT: it is not there, or is not MPI. `flags` are dlopen's. */
static int mpi_open(const char *name, int flags, struct mpi_library *l, struct base_error *err)
{
	void *handle = dlopen(*name ? name : NULL, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE | flags);
	const char *why = handle ? NULL : dlerror();
	Dl_info info;
	void *known;
	int r;

	if (!handle)
		return base_error_set(err, -ENOENT, "no MPI library: %s", why ? why : name);
	known = dlsym(handle, "MPI_Initialized");
	if (!known) {
		dlclose(handle);
		return base_error_set(err, -ENOENT, "%s is no MPI library: it has no MPI_Initialized", name);
	}
	*l = (struct mpi_library){.name = dladdr(known, &info) && info.dli_fname ? info.dli_fname : name};
	r = mpi_find_family(handle, l, err);
	if (r == 0)
		r = mpi_find_symbols(handle, l, err);
	if (r == 0)
		mpi_find_handles(handle, l);
	else
		dlclose(handle);
	return r;
}

/* ---- the one of this process ---- */

/* Not asked through mpi_found, so that libraries can be tried. */
static bool mpi_flag(const struct mpi_library *l, bool finalized)
{
	int flag = 0;

	return (finalized ? l->call.p.finalized : l->call.p.initialized)(&flag) == MPI_SUCCEEDED && flag;
}

/* Of those in the process the one that is initialised, or else the first. */
static int mpi_look(struct mpi_library *ret_l, struct base_error *err)
{
	int found = base_error_set(err, -ENOENT, "no MPI library is loaded in this process: call MPI_Init_thread "
		"before, or let vckpt load and initialise MPI (VCKPT_MPI_INIT)");
	struct mpi_library l;

	for (size_t i = 0; i < BASE_COUNT(mpi_names); i++) {
		struct base_error why = {0};
		int r = mpi_open(mpi_names[i], RTLD_NOLOAD, &l, &why);

		if (r == 0 && (found < 0 || mpi_flag(&l, false))) {
			*ret_l = l;
			found = 0;
		}
		if (r == 0 && mpi_flag(&l, false))
			return 0;
	}
	return found;
}

static int mpi_load(struct mpi_library *ret_l, struct base_error *err)
{
	bool mpich = getenv("PMI_SIZE") && !getenv("OMPI_COMM_WORLD_SIZE");
	struct base_error why = {0};

	for (size_t i = 0; mpich && i < BASE_COUNT(mpi_names_mpich); i++)
		if (mpi_open(mpi_names_mpich[i], 0, ret_l, &why) == 0)
			return 0;
	for (size_t i = 0; i < BASE_COUNT(mpi_names_open); i++)
		if (mpi_open(mpi_names_open[i], 0, ret_l, &why) == 0)
			return 0;
	for (size_t i = 0; !mpich && i < BASE_COUNT(mpi_names_mpich); i++)
		if (mpi_open(mpi_names_mpich[i], 0, ret_l, &why) == 0)
			return 0;
	return base_error_set(err, -ENOENT, "no MPI library can be loaded (%s): install Open MPI or MPICH, or set "
		MPI_LIBRARY_ENV " to the library's path", why.text);
}

static void mpi_at_exit(int status, void *arg)
{
	(void)arg;
	if (status == 0 && mpi_initialiser == getpid() && mpi_users == 0 && !mpi_flag(&mpi_found, true))
		mpi_finalize(&mpi_found);
}

/* A launcher says how many ranks there are, in words that another family's library does not understand. */
static int mpi_check_world(const struct mpi_library *l, struct base_error *err)
{
	const char *ranks = getenv("OMPI_COMM_WORLD_SIZE");
	int world = 0;

	ranks = ranks ? ranks : getenv("PMI_SIZE");
	if (!ranks || atoi(ranks) <= 1 || mpi_comm_size(l, l->world, &world) != MPI_SUCCEEDED || world != 1)
		return 0;
	return base_error_set(err, -EINVAL, "the launcher started %s processes, but the MPI library %s knows one: it "
		"is not the launcher's own, set " MPI_LIBRARY_ENV " to the path of that one", ranks, l->name);
}

static int mpi_init(const struct mpi_library *l, struct base_error *err)
{
	int level = 0, code = mpi_init_thread(l, MPI_LEVEL_MULTIPLE, &level);
	Dl_info own;

	if (code != MPI_SUCCEEDED)
		return mpi_translate(l, code, "MPI_Init_thread", err);
	mpi_initialiser = getpid();
	if (dladdr((void *)(uintptr_t)mpi_library_put, &own) && own.dli_fname)
		dlopen(own.dli_fname, RTLD_NOW | RTLD_NOLOAD | RTLD_NODELETE); /* the next line keeps a pointer */
	on_exit(mpi_at_exit, NULL);
	return mpi_check_world(l, err);
}

static int mpi_choose(bool init, struct base_error *err)
{
	const char *path = secure_getenv(MPI_LIBRARY_ENV);
	struct mpi_library l;
	int r;

	if (path && *path)
		r = mpi_open(path, 0, &l, err);
	else
		r = mpi_look(&l, err);
	if (r < 0 && init && !(path && *path))
		r = mpi_load(&l, err);
	if (r < 0)
		return r;
	if (!init && !mpi_flag(&l, false))
		return base_error_set(err, -EINVAL, "MPI is not initialised (%s): call MPI_Init_thread before, or let "
			"vckpt initialise it (VCKPT_MPI_INIT)", l.name);
	mpi_found = l;
	mpi_chosen = true;
	return 0;
}

static int mpi_check_level(struct mpi_library *l, struct base_error *err)
{
	int level = 0, code = mpi_query_thread(l, &level);

	if (code != MPI_SUCCEEDED)
		return mpi_translate(l, code, "MPI_Query_thread", err);
	if (level < MPI_LEVEL_SERIALIZED)
		return base_error_set(err, -EINVAL, "MPI was initialised for calls of its main thread alone, and vckpt "
			"has threads of its own: ask MPI_Init_thread for MPI_THREAD_MULTIPLE, or at least for "
			"MPI_THREAD_SERIALIZED");
	if (l->serial != (level < MPI_LEVEL_MULTIPLE)) /* the first time: others read it later */
		l->serial = !l->serial;
	return 0;
}

/* Called with the lock held. */
static int mpi_get(bool init, struct base_error *err)
{
	int r = mpi_chosen ? 0 : mpi_choose(init, err);

	if (r == 0 && !mpi_flag(&mpi_found, false))
		r = init ? mpi_init(&mpi_found, err) : base_error_set(err, -EINVAL, "MPI is not initialised");
	if (r < 0)
		return r;
	if (mpi_flag(&mpi_found, true))
		return base_error_set(err, -EINVAL, "MPI is finalised already, and cannot be used again in this "
			"process");
	return mpi_check_level(&mpi_found, err);
}

int mpi_library_get(bool init, const struct mpi_library **ret_l, struct base_error *err)
{
	int r;

	pthread_mutex_lock(&mpi_lock);
	r = mpi_get(init, err);
	mpi_users += r == 0;
	pthread_mutex_unlock(&mpi_lock);
	*ret_l = &mpi_found;
	return r;
}

void mpi_library_put(void)
{
	pthread_mutex_lock(&mpi_lock);
	mpi_users--;
	pthread_mutex_unlock(&mpi_lock);
}

bool mpi_library_works(const struct mpi_library *l)
{
	return !mpi_flag(l, true);
}
