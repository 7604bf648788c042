# SPDX-License-Identifier: Apache-2.0
"""Every sentence by which the public functions refuse what a caller gives, provoked once: a table of what is done, and
the whole sentence. The last test finds the sentences that no row provokes.

In the sentences * is what differs from run to run, such as a path."""
import ctypes as c
import errno
import fnmatch
import pathlib
import re

import numpy as np
import pytest

import loadlib
from commlib import Functions
from saverlib import (ALONE, Attribute, BOXES, Failed, NONE, SaveOptions, SaverOptions, Tensor, api,  # noqa: F401
                      numbers)

ROOT = pathlib.Path(__file__).resolve().parents[3]
W = np.arange(12, dtype="f4").reshape(3, 4)
SAVER, SAVE, LOAD, TARGET = map(c.sizeof, (SaverOptions, SaveOptions, loadlib.LoadOptions, loadlib.Target))
BUILD = "and build the program with this library's vckpt.h"
DTYPES = "is not known: it is one of enum vckpt_dtype, 1 to 21"
OPEN = "nothing more can be declared"
ZERO = "it must be 0 (zero the struct before its members are set)"
NO = c.c_size_t(0)


class World:
    """What the rows use: a store with the step run/0, opened; a mesh, a saver, and one save and load that are open."""

    def __init__(self, api, path):  # noqa: F811
        self.api, self.lib, self.store, self.out = api, api.lib, api.store(path / "store"), c.c_void_p()
        self.path, self.keep = str(path).encode(), []
        self.saver = api.saver(self.store, "run")
        self.saver.save({"model/w": W, "model/b": W[0]}, blobs=[("x/y", False, b"12")]).committed()
        self.mesh = api.mesh("dp=2,tp=2")
        self.step = loadlib.Opened(api, self.store)
        self.load = self.step.load()
        self.save = self.saver.begin(step=7)
        self.done = self.saver.begin(step=8)        # submitted, and waits behind the other

    def close(self):
        self.save.free()
        self.done.free()
        self.load.__exit__()
        self.step.__exit__()
        self.lib.vckpt_mesh_free(self.mesh)
        self.saver.free()

    def call(self, name, *arguments):
        """An int is passed as 64 bits, str as UTF-8, a struct by its address."""
        given = [c.byref(a) if isinstance(a, c.Structure) else a.encode() if isinstance(a, str) else
                 c.c_int64(a) if isinstance(a, int) else a for a in arguments]
        self.keep = given
        self.api.call(f"vckpt_{name}", *given)

    @property
    def ret(self):
        return c.byref(self.out)


def saver(**options):
    """Opens a saver with these options."""
    def act(w):
        o = {"size": SAVER, "store": w.store.encode(), "run": b"run", "world": 1, **options}
        w.call("saver_open", SaverOptions(**o), w.ret)
    return act


def begin(**options):
    return lambda w: w.call("save_begin", w.saver.p, SaveOptions(**{"size": SAVE, "step": 9, **options}), w.ret)


def tensor(name="model/t", **fields):
    """Declares a tensor of a save: of 3 x 4 floats, but for these fields."""
    def act(w):
        w.call("save_tensors", w.save.p, described(w, name, fields), c.c_size_t(1))
    return act


def loaded(name="model/w", **fields):
    """Declares a tensor of a load."""
    def act(w):
        w.call("load_tensors", w.load.p, described(w, name, fields), c.c_size_t(1))
    return act


def described(w, name, fields):
    component, _, name = name.partition("/")
    t = Tensor(component=component.encode(), name=name.encode(), shape=numbers(c.c_uint64, (3, 4)), ndim=2, dtype=12,
               data=W.ctypes.data)
    for field, value in fields.items():
        if field == "mesh":
            value = w.mesh
        elif isinstance(value, tuple):
            value = numbers(c.c_int64 if field == "strides" else c.c_uint64, value)
        setattr(t, field, value)
    return t


def target(size=TARGET, to=True, take=None, at=None, flags=0, name=None, **fields):
    def act(w):
        t = loadlib.Target(size, name=name, from_ndim=len(take or ()), flags=flags)
        if to:
            t.to = c.pointer(described(w, "model/w", fields))
        if take:
            t.from_ = numbers(c.c_uint64, [n for pair in take for n in pair])
        if at:
            t.at = numbers(c.c_uint64, at)
        w.call("load_targets", w.load.p, t, c.c_size_t(1))
    return act


def rename(*rule):
    return lambda w: w.call("load_rename", w.load.p, loadlib.Rename(*rule), c.c_size_t(1))


def load(size=LOAD, **options):
    return lambda w: w.call("load_begin", w.step.p, loadlib.LoadOptions(size, **options), w.ret)


def does(name, *arguments):
    """Calls a function; an argument that is a function is asked for its value."""
    return lambda w: w.call(name, *(a(w) if callable(a) else a for a in arguments))


def ret(w):
    return w.ret


def of(name):
    return lambda w: getattr(getattr(w, name), "p", getattr(w, name))


def boxes(**fields):
    return lambda w: w.call("tensor_boxes", described(w, "model/t", fields), 0, w.ret, w.ret)


def renamed_by(function):
    def act(w):
        w.function = loadlib.RENAMER(function)
        w.call("load_rename_by", w.load.p, w.function, None)
        try:
            loaded()(w)
        finally:
            w.call("load_rename_by", w.load.p, None, None)
    return act


def submitted(w):
    w.done.submit()
    w.done.submit()


def overlapping(w):
    with w.step.load() as two:
        for name in ("model/w", "model/b"):
            fields = {"shape": (4,), "ndim": 1} if name == "model/b" else {}
            w.call("load_tensors", two.p, described(w, name, fields), c.c_size_t(1))
        two.start()


def strict(w):
    with w.step.load() as one:
        w.call("load_tensors", one.p, described(w, "model/none", {}), c.c_size_t(1))
        one.expect("model")
        one.start()


def reading(w):
    with w.step.load() as one:
        one.start()
        one.start()


def closed(w):
    other = w.api.saver(w.store, "other")
    other.close()
    try:
        other.begin()
    finally:
        other.free()


ROWS = [
    # ---- stores, runs, steps
    (does("store_init", None), "no path of a store is given"),
    (does("store_init", of("store")), "* is a vckpt store already"),
    (does("store_check", ""), "no path of a store is given"),
    (does("store_check", of("path")), "* is not a vckpt store*"),
    (does("run_steps", of("store"), "run", None, None), "no place for the steps is given"),
    (does("run_steps", of("store"), "a/b", ret, ret), "a/b cannot be the name of a run"),
    (does("run_steps", of("store"), "none", ret, ret), "* has no run none"),
    (does("run_latest", of("store"), "run", None), "no place for the step's number is given"),
    (does("step_open", of("store"), "run", 0, None), "no place for the step is given"),
    (does("step_open", of("store"), None, 0, ret), "NULL cannot be the name of a run"),
    (does("step_open", of("store"), "run", 5, ret), "run run of * has no step 5"),
    (does("step_open_commit", of("store"), "run", None, ret), "no commit of a step is given"),
    (does("step_open_commit", of("store"), "a/b", (c.c_uint64 * 6)(), ret), "a/b cannot be the name of a run"),
    (does("step_read", None, 0, None, None, None), "no step is given"),
    (does("step_read", of("step"), 2, None, None, None), "run/0: there is no tensor 2"),
    (does("step_read", of("step"), 1, None, None, None), "run/0: tensor model/w: no memory is given to read into"),
    (does("step_read", of("step"), 1, (c.c_uint64 * 4)(2, 2, 0, 4), None, None),
     "run/0: tensor model/w: the box has 2 items from 2 on in dimension 0, which has 3"),
    (does("step_read", of("step"), 1, None, None, (c.c_int64 * 2)(16, -4)),
     "run/0: tensor model/w: the stride in dimension 1 is negative (-4)"),
    (does("step_read", of("step"), 1, None, None, (c.c_int64 * 2)(8, 4)),
     "run/0: tensor model/w: with a stride of 8 bytes in dimension 0 items would overlap"),
    (does("step_read", of("step"), 1, None, None, (c.c_int64 * 2)(2**62, 4)),
     "run/0: tensor model/w: a stride of 4611686018427387904 bytes in dimension 0 leads out of memory"),
    (does("step_digest", of("step"), 0, None), "no place for the digest is given"),
    (does("step_blob_read", of("step"), 0, None), "run/0: blob x/y: no memory is given to read it into"),
    (does("step_blob_get", of("step"), "x/y", -1, None), "run/0: blob x/y: no memory is given to read it into"),
    (does("step_blob_get", of("step"), "x/z", -1, None), "run/0: there is no blob x/z"),
    (does("step_blob_get", of("step"), None, -1, None), "no name of a blob is given"),
    (does("step_blob_rank", of("step"), None, 0, None), "no name of a blob is given, or no place for a rank"),
    (does("step_next_blob", of("step"), "z", 0), "there is no further blob"),
    # ---- meshes
    (does("mesh_new", None, None, 0, ret), "no text of a mesh is given"),
    (does("mesh_new", "dp=2", None, 0, None), "no place for the mesh is given"),
    (does("mesh_new", "dp=2", None, 3, ret), "mesh: ranks is a null pointer, and 3 ranks are announced"),
    (does("mesh_new", "dp", None, 0, ret), 'mesh: "dp" is not NAME=SIZE'),
    (does("mesh_size", None, None, ret), "no mesh is given"),
    (does("mesh_size", of("mesh"), None, None), "no place for the answer is given"),
    (does("mesh_size", of("mesh"), "pp", ret), 'mesh: "pp": there is no such dimension'),
    (does("mesh_group", of("mesh"), None, 0, ret), "mesh: no dimension is given"),
    (does("mesh_coordinate", of("mesh"), 4, ret), "mesh: rank 4 is not in the mesh"),
    (does("mesh_rank", of("mesh"), None, ret), "mesh: no coordinate is given"),
    (does("mesh_rank", of("mesh"), (c.c_uint32 * 2)(0, 2), ret),
     'mesh: coordinate 2 in dimension "tp", whose size is 2'),
    (does("mesh_neighbour", of("mesh"), "dp,tp", 0, 1, 0, ret),
     'mesh: a neighbour is along one dimension, not along "dp,tp"'),
    # ---- communicators and launches
    (does("comm_shared", None, 0, 1, 0, ret), "no name for the ranks to meet under is given"),
    (does("comm_shared", "x", 0, 1, 0, None), "no place for the communicator is given"),
    (does("comm_shared", "x", 1, 1, 0, ret), "there is no rank 1 among 1"),
    (does("comm_functions", None, 0, 1, 0, ret), "no struct vckpt_comm_functions is given"),
    (does("comm_functions", Functions(8), 0, 1, 0, ret), "struct vckpt_comm_functions has 56 bytes in this "
                                                         "library, and "
     f"8 in the caller's `size`: set it to sizeof (struct vckpt_comm_functions), {BUILD}"),
    (does("comm_mpi", None, 6, 0, ret), "flags of vckpt_comm_mpi are 0x6: 0x6 is not in VCKPT_MPI_INIT"),
    (does("comm_nccl", None, 0, ret), "no communicator is given"),
    (does("comm_nccl_split", None, 0, ret), "no ncclComm_t is given"),
    (does("launch_id", None, None), "no communicator is given"),
    # ---- savers
    (does("saver_open", None, ret), "no options of the saver are given"),
    (saver(size=8), f"struct vckpt_saver_options has {SAVER} bytes in this library, and 8 in the caller's "
                    f"`size`: set it "
                    f"to sizeof (struct vckpt_saver_options), {BUILD}"),
    (does("saver_open", SaverOptions(SAVER), None), "no place for the saver is given"),
    (saver(pin=4), "pin of the saver is 4: it is one of VCKPT_PIN_AUTO to VCKPT_PIN_ALLOCATE, 0 to 3"),
    (saver(check_replicas=-1), "check_replicas of the saver is -1: it is one of VCKPT_REPLICAS_SAMPLE to "
                               "VCKPT_REPLICAS_OFF, 0 to 2"),
    (saver(flags=24), "flags of the saver are 0x18: 0x18 is not in VCKPT_SAVER_..."),
    (saver(threads=1025), "a saver of 1025 threads: at most 1024 are possible"),
    (saver(store=None), "no path of a store is given"),
    (saver(run=b"a/b"), '"a/b" is not the name of a run'),
    (saver(rank=1), "there is no rank 1 in a world of 1"),
    (saver(world=2), "a job of 2 ranks needs a launch id: text that all ranks share and that is new at every start, *"),
    (does("saver_close", None), "no saver is given"),
    (closed, "the saver of run other is closed"),
    # ---- saves
    (does("save_begin", None, None, ret), "no saver is given"),
    (does("save_begin", of("saver"), SaveOptions(SAVE), None), "no place for the save is given"),
    (does("save_begin", of("saver"), None, ret), "no options of the save are given"),
    (begin(reserved=3), f"`reserved` of struct vckpt_save_options is 0x3: {ZERO}"),
    (tensor(reserved=1), f"*`reserved` of struct vckpt_tensor is 0x1: {ZERO}"),
    (begin(size=8), f"struct vckpt_save_options has {SAVE} bytes in this library, and 8 in the caller's `size`: set it "
                    f"to sizeof (struct vckpt_save_options), {BUILD}"),
    (begin(flags=2), "flags of the save are 0x2: 0x2 is not in VCKPT_SAVE_REPLACE"),
    (begin(nattributes=2), "attribute 0 of the 2 of the save: its key or value is a null pointer"),
    (begin(nbases=1), "base 0 of the 1 of the save is a null pointer"),
    (begin(bases=(c.c_char_p * 1)(b"x"), nbases=1), 'base "x" is not RUN/STEP'),
    (begin(attributes=(Attribute * 1)(Attribute(b"a b", b"")), nattributes=1),
     'attribute "a b": a key is [A-Za-z_][A-Za-z0-9_.-]{0,63}'),
    (begin(step=2**44), "run run: a job's steps go from 0 to 2^44-1"),
    (does("save_tensors", None, None, NO), "no save is given"),
    (does("save_tensors", of("save"), None, c.c_size_t(1)), "no array of tensors is given"),
    (tensor("/t"), '"" is no name for a component: it is [A-Za-z0-9_][A-Za-z0-9._-]*, at most 64 bytes, and '
                   'none that a '
                   "step uses itself"),
    (tensor("model/"), 'component model: "" is no name for a tensor: it is UTF-8, of 1 to 65535 bytes'),
    (tensor(dtype=0), f"tensor model/t: its dtype 0 {DTYPES}"),
    (tensor(dtype=22), f"tensor model/t: its dtype 22 {DTYPES}"),
    (tensor(ndim=17), "tensor model/t: it has 17 dimensions (0 in the local shape): at most 16 are possible"),
    (tensor(shape=None), "tensor model/t: its shape is a null pointer, for 2 dimensions"),
    (tensor(flags=48), "tensor model/t: flags of the tensor are 0x30: 0x30 is not in VCKPT_TENSOR_..."),
    (tensor(data=None), "tensor model/t: its data is a null pointer"),
    (tensor(flags=ALONE, placements=b"R"), "tensor model/t: one rank alone holds it, whole: mesh, placements, "
                                           "same_dims, "
                                           "flat and boxes cannot be given"),
    (tensor(flags=BOXES, placements=b"R"), "tensor model/t: boxes exclude placements and a flat range"),
    (tensor(flags=BOXES, nboxes=1), "tensor model/t: its boxes are missing"),
    (tensor(placements=b"S(0),R", mesh=1, local_shape=(3, 4), local_ndim=2),
     "tensor model/t: the local tensor is (3,4), but rank 0 holds (2,4) of it by its placements"),
    (tensor(placements=b"S(0)", mesh=1), "tensor model/t: placement: 1 word for a mesh of 2 dimensions, one for "
                                         "each is "
                                         "needed"),
    (tensor(placements=b"X"), "tensor model/t: placement*"),
    (does("save_blob", None, "x/y", 0, None, NO), "no save is given"),
    (does("save_blob", of("save"), None, 0, None, NO), "a blob of the save of run/7 has no name"),
    (does("save_blob", of("save"), "x/y", 0, None, c.c_size_t(3)),
     "blob x/y: a null pointer is given for its 3 bytes"),
    (does("save_common", None, "g", "n", None, NO), "no save is given"),
    (does("save_common", of("save"), "g", "n", None, c.c_size_t(3)),
     'value "n" of the group "g": a null pointer is given for its 3 bytes'),
    (does("save_submit", None), "no save is given"),
    (does("save_wait_staged", None, 0), "no save is given"),
    (does("save_wait_staged", of("save"), 0),
     "the save of run/7 was not submitted: there is nothing to wait for before vckpt_save_submit"),
    (submitted, "the save of run/8 was submitted before"),
    (does("save_wait_staged", of("done"), 0), "the save of run/8 is not staged yet"),
    (does("save_wait_committed", of("done"), 0, None), "the save of run/8 is not decided yet"),
    (does("save_blob", of("done"), "x/y", 0, None, NO), f"the save of run/8 was submitted: {OPEN}"),
    # ---- tensors
    (does("tensor_boxes", None, 0, ret, ret), "no tensor is given"),
    (does("tensor_boxes", Tensor(), 0, None, ret), "no place for the boxes is given"),
    (boxes(), "tensor model/t: no mesh is given"),
    (boxes(mesh=1, flags=ALONE), "tensor model/t: boxes are computed of a mesh and placements, which "
                                 "VCKPT_TENSOR_BOXES "
                                 "and VCKPT_TENSOR_ALONE exclude"),
    # ---- loads
    (load(reserved=2), f"`reserved` of struct vckpt_load_options is 0x2: {ZERO}"),
    (does("load_begin", of("step"), None, None), "no place for the load is given"),
    (load(8), f"struct vckpt_load_options has {LOAD} bytes in this library, and 8 in the caller's `size`: set it to "
              f"sizeof (struct vckpt_load_options), {BUILD}"),
    (load(exchange=3), "exchange of the load is 3: it is one of VCKPT_EXCHANGE_AUTO to VCKPT_EXCHANGE_ALWAYS, 0 to 2"),
    (load(flags=32), "flags of the load are 0x20: 0x20 is not in VCKPT_LOAD_..."),
    (load(flags=24), "VCKPT_LOAD_DIRECT and VCKPT_LOAD_CACHED exclude each other"),
    (load(threads=257), "a load of 257 threads: at most 256 are possible"),
    (does("load_tensors", None, None, NO), "no load is given"),
    (does("load_tensors", of("load"), None, c.c_size_t(1)), "no tensors are given"),
    (does("load_targets", of("load"), None, c.c_size_t(1)), "no targets are given"),
    (does("load_rename", of("load"), None, c.c_size_t(1)), "no rules are given"),
    (does("load_expect", of("load"), None), "no component is given"),
    (loaded(component=None), "run/0: tensor /w: a tensor needs a component and a name"),
    (loaded(dtype=13), "run/0: tensor model/w: the step has it as f32 (3,4), and it is to be loaded as f64 (3,4): a "
                       "target with VCKPT_TARGET_CONVERT converts it"),
    (loaded(shape=(4, 4)), "run/0: tensor model/w: the step has it as f32 (3,4), and it is to be loaded as f32 "
                           "(4,4): a "
                           "target with VCKPT_TARGET_RESIZE loads what fits"),
    (loaded(ndim=1), "run/0: tensor model/w: the step has it as f32 (3,4), and it is to be loaded as f32 (3)"),
    (loaded(dtype=0), f"run/0: tensor model/w: its dtype 0 {DTYPES}"),
    (loaded(data=None), "run/0: tensor model/w: its data is a null pointer"),
    (loaded(flags=ALONE, mesh=1), "run/0: tensor model/w: one rank alone holds it, whole: mesh, placements, same_dims, "
                                  "flat and boxes cannot be given"),
    (loaded(flags=BOXES, placements=b"R"), "run/0: tensor model/w: boxes exclude placements and a flat range"),
    (loaded(flags=BOXES, nboxes=1), "run/0: tensor model/w: its boxes are missing"),
    (loaded(placements=b"R"), "run/0: tensor model/w: placements are given, but no mesh"),
    (strict, "run/0: it lacks 1 tensor that is to be loaded: model/none; it has 2 tensors that are not to be loaded: "
             "model/b, model/w"),
    (overlapping, "run/0: the destinations of tensor model/b and of tensor model/w overlap: each byte can be loaded "
                  "once only"),
    (does("load_wait", of("load"), 0), "the load does not read yet: vckpt_load_start comes first"),
    (reading, "the load has begun to read: nothing can be declared or started any more"),
    # ---- targets, renaming, conversion
    (target(8), f"run/0: target 0: struct vckpt_target has {TARGET} bytes in this library, and 8 in the "
                f"caller's `size`: "
                f"set it to sizeof (struct vckpt_target), {BUILD}"),
    (target(to=False), "run/0: target 0: no destination of a target is given"),
    (target(flags=8), "run/0: target 0: flags of the target are 0x8: 0x8 is not in VCKPT_TARGET_..."),
    (target(take=[(0, 1)]), "run/0: tensor model/w: the slice has 1 dimensions, and the stored tensor 2"),
    (target(take=[(2, 2), (0, 4)]), "run/0: tensor model/w: the slice has 2 items from 2 on in dimension 0 of "
                                    "the stored "
                                    "tensor, which has 3"),
    (target(at=(4, 0)), "run/0: tensor model/w: the slice is to begin at 4 in dimension 0 of the destination, "
                        "which has "
                        "3"),
    (target(at=(1, 0)), "run/0: tensor model/w: a slice (3,4) of what the step has as f32 (3,4) is to be loaded "
                        "into f32 "
                        "(3,4) at (1,0): a target with VCKPT_TARGET_RESIZE loads what fits"),
    (rename(b"model", None, b""), "rule 0 of a renaming: it needs both the caller's and the step's word"),
    (rename(b"model", b"", b"a", 1), "rule 0 of a renaming: `from` is empty, so VCKPT_RENAME_ANYWHERE "
     "would find it everywhere: give a word"),
    (rename(b"model", b"a", b"b", 2),
     "rule 0 of a renaming: flags of the rule are 0x2: 0x2 is not in VCKPT_RENAME_ANYWHERE"),
    (renamed_by(lambda *_: -errno.EPERM),
     "run/0: tensor model/w: the function that renames answers -1 (Operation not permitted)"),
    (renamed_by(lambda _, component, name, to, room: c.memset(to, 65, room) and 1),
     "run/0: tensor model/w: the function that renames wrote no end of the name"),
    (does("convert", 0, 12, None, None, NO), f"the dtype to convert from: 0 {DTYPES}"),
    (does("convert", 12, 99, None, None, NO), f"the dtype to convert to: 99 {DTYPES}"),
    (does("convert", 14, 12, None, None, NO), "c64 cannot be converted to f32"),
    (does("convert", 12, 13, None, None, c.c_size_t(1)), "no memory to convert from is given"),
    (does("convert", 12, 13, "....", None, c.c_size_t(1)), "no memory to convert into is given"),
]


def said(row, world):
    with pytest.raises(Failed) as failed:
        row[0](world)
    return failed.value.text


def test_each_row_is_refused_with_its_sentence(api, tmp_path):  # noqa: F811
    world, wrong = World(api, tmp_path), []
    for row in ROWS:
        sentence = said(row, world)
        if not fnmatch.fnmatchcase(sentence, row[1].replace("[", "[[]")):
            wrong.append(f"\n  wanted {row[1]}\n  said   {sentence}")
    world.close()
    assert not wrong, "".join(wrong)


# Sentences that need a machine or a store in trouble, a fork, other ranks, or names too long for a table: other tests
# have them.
ELSEWHERE = {
    "no thread can be started for the load: %s", "no random number can be had for a launch id: %s",
    "what came from rank %u has %llu bytes and is not its part of a launch id: the communicator has to deliver what "
    "each rank gives, in the order of ranks", "no place for a launch id is given",
    "the step was opened before this process was forked: open it again",
    "the load was begun before this process was forked: begin one of its own",
    "the communicator was made before this process was forked: make one of its own",
    "the saver of run %s belongs to process %d: a child of it has to open one of its own",
    "run %s of %s has another commit in entry %PRIu64 of its list than the one of step %PRIu64 that was asked "
    "for: this "
    "is another store, or a copy that went on by itself",
    "run %s of %s has no commit entry %PRIu64",             # test_api_step
    "pin is %d: it is 1, -1 or 0", "no place for the tags is given",    # test_api_facts
    "run %s of %s has no step",                             # a list that only a launch has put
    "its name becomes longer than %u bytes", "its local shape: %s", "the save of %s failed: %s",
    "the load is not over yet",                             # a load that reads for long
    "the save of %s has %u tensors, and no more are possible", "blob %.400s is given twice", "beyond its end",
    "run %s: a save of %u ranks needs the number of its step (the trainer's count of iterations, the same on "
    "all ranks)",
    "it is given twice", "its boxes are given twice, with another shape or dtype",
    "the saver of run %s was closed before this save was submitted",
    "its caller gave it up before it was submitted: %.800s",
}


def formats():
    """The sentences of core/api, of the loader, of flight.c and declare.c, as their sources have them."""
    for path in [*sorted((ROOT / "core/api").glob("*.c")), ROOT / "core/api/api_internal.h",
                 *sorted((ROOT / "core/load/loader").glob("*.c")), ROOT / "core/tensor/strides.c",
                 ROOT / "core/save/saver/flight.c", ROOT / "core/save/saver/declare.c"]:
        text = re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.S)
        for call in re.findall(r"base_error_set\([^;]*?((?:\"(?:\\.|[^\"])*\"|PRI\w+|\s)+)[,)]", text):
            one = "".join(a or b for a, b in re.findall(r"\"((?:\\.|[^\"])*)\"|(PRI\w+)", call))
            if one.strip("%s"):
                yield path.name, one.replace('\\"', '"')


def test_every_sentence_has_a_row_or_another_test():
    found = {}
    for name, one in formats():
        pattern = re.sub(r"%(?:PRI\w+|[-+#.0-9]*(?:\.\*)?l*z?[a-z])", "\0", one)
        found[one] = (name, re.compile(".*".join(re.escape(part) for part in pattern.split("\0"))))
    assert len(found) > 60
    sentences = [row[1] for row in ROWS]
    lacking = [f"{name}: {one}" for one, (name, pattern) in found.items()
               if one not in ELSEWHERE and not any(pattern.search(sentence) for sentence in sentences)]
    assert not lacking, "\n".join(lacking)
    assert not ELSEWHERE - found.keys(), "these are sentences no longer"
