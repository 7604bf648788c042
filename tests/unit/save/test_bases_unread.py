# SPDX-License-Identifier: Apache-2.0
"""A base that cannot be used costs writing again what did not change. The save says so, in its timings, in its part and
in a warning with the reason; bytes that certainly changed do not count."""
import ctypes
import errno
import json
import os
import shutil
import types

import numpy as np
import pytest

import storelib
from ranklib import Meddler
from saverlib import api, store  # noqa: F401 (fixtures)
from test_kept_attempts import Model, saved, written

SIZE, N = 4096, 10
WARNING = "because it could not be used"


@pytest.fixture
def model(rng):
    return Model(rng, [SIZE] * N)


@pytest.fixture
def warned(capfd):
    """The warnings since the last call."""
    return lambda: [line for line in capfd.readouterr().err.splitlines() if WARNING in line]


def meddler(saver):
    return Meddler(types.SimpleNamespace(p=ctypes.cast(saver.p, ctypes.POINTER(ctypes.POINTER(storelib.Store)))[0]))


def spoil(path, write):
    """Calls write(path) on a file that may not be written; returns what brings it back."""
    with open(path, "rb") as f:
        was = f.read()
    os.chmod(path, 0o644)
    write(path)

    def back():
        with open(path, "wb") as f:
            f.write(was)
        os.chmod(path, 0o444)
    return back


def flip(path):
    with open(path, "r+b") as f:
        data = bytearray(f.read())
        data[len(data) // 2:len(data) // 2 + 64] = bytes(64)
        f.seek(0)
        f.write(data)


def manifest_of(vckpt, store, step):  # noqa: F811
    return os.path.join(store, "runs/run/manifests", vckpt.json("info", store, f"run/{step}")["manifest"])


def failing(saver, named):
    """Reading files of these names fails."""
    m = meddler(saver)

    def answer(args):
        return -errno.EIO if named in ctypes.string_at(args[1]) else None
    for call in ("read_whole", "file_open", "list"):
        m.answer[call] = answer
    return m


def check(vckpt, store, step, timings, again):  # noqa: F811
    """All that was written may be what the step before has."""
    assert timings.bytes_again == timings.bytes_no_base == again
    at = f"run/{step}"
    for command in ("info", "ls"):
        said = vckpt.json(command, store, at)
        assert said["again_bytes"] == said["no_base_bytes"] == again
        assert ("up to 40 KiB of unchanged data was written again" in vckpt(command, store, at).stdout) == bool(again)
    stalls = vckpt.json("stalls", store, at)
    assert stalls["bytes"]["again"] == stalls["bytes"]["no_base"] == again
    assert {"again", "no_base"}.isdisjoint(p["name"] for p in stalls["phases"])
    assert (["no_base", "40", "KiB"] in [x.split() for x in vckpt("stalls", store, at).stdout.splitlines()]) == bool(
        again)


@pytest.mark.parametrize("how", ["damaged", "cannot be read", "gone", "newer"])
def test_a_manifest(api, store, vckpt, model, warned, how):  # noqa: F811
    """Of the step that a new launch goes on from; of this launch's own step the saver knows what it needs."""
    saver = api.saver(store, "run")
    assert saved(saver, model.tensors()).bytes_no_base == 0
    saver.free()
    path, m = manifest_of(vckpt, store, 0), None
    saver = api.saver(store, "run")
    if how == "cannot be read":
        m = failing(saver, os.path.basename(path).encode())
    back = spoil(path, {"damaged": flip, "gone": os.unlink, "newer": newer}.get(how, lambda path: None))
    model.change([3])
    timings = saved(saver, model.tensors())
    said = warned()
    if m:
        m.end()
    assert len(said) == 1 and "run run step 1: wrote 40 KiB" in said[0] and os.path.basename(path) in said[0], said
    check(vckpt, store, 1, timings, N * SIZE)
    model.change([4])
    assert written(saved(saver, model.tensors())) == SIZE and not warned()
    check(vckpt, store, 2, types.SimpleNamespace(bytes_again=0, bytes_no_base=0), 0)
    saver.free()
    back()


def newer(path):
    with open(path, "r+b") as f:
        f.seek(8)
        f.write(b"\xff\xff")


def test_the_list(api, store, vckpt, model, warned):  # noqa: F811
    saver = api.saver(store, "run")
    saved(saver, model.tensors())
    saver.free()
    saver = api.saver(store, "run", start_ms=300)
    m = failing(saver, b"runs/run/000000000001")        # that the launch has read by now
    timings = saved(saver, model.tensors())
    m.end()
    said = warned()
    assert len(said) == 1 and "runs/run/000000000001" in said[0] and "Input/output error" in said[0], said
    check(vckpt, store, 1, timings, N * SIZE)
    assert written(saved(saver, model.tensors())) == 0
    saver.free()


@pytest.mark.parametrize("kind", ["meta", "model"])
def test_a_pack(api, store, vckpt, model, warned, kind):  # noqa: F811
    """That of the part, and that of the data."""
    saver = api.saver(store, "run")
    saved(saver, model.tensors())
    saver.free()
    pack, = [os.path.join(d, f) for d, _, files in os.walk(os.path.join(store, "packs")) for f in files
             if f.endswith(f"-{kind}.pack")]
    back = spoil(pack, os.unlink)
    saver = api.saver(store, "run")
    timings = saved(saver, model.tensors())
    saver.free()
    said = warned()
    assert len(said) == 1 and os.path.basename(pack)[:16] in said[0], said
    back()
    check(vckpt, store, 1, timings, N * SIZE)


def test_a_note_of_damage(api, store, vckpt, model, warned):  # noqa: F811
    saver = api.saver(store, "run")
    saved(saver, model.tensors())
    pack, = [os.path.join(d, f) for d, _, files in os.walk(os.path.join(store, "packs")) for f in files
             if f.endswith("-model.pack")]
    back = spoil(pack, flip)
    assert vckpt("verify", store, check=False).returncode == 3
    timings = saved(saver, model.tensors())
    saver.free()
    back()
    assert 0 < timings.bytes_no_base == timings.bytes_again == written(timings) < N * SIZE
    said = warned()
    assert len(said) == 1 and "vckpt verify found data of pack" in said[0], said


def test_a_step_that_is_removed_meanwhile(api, store, vckpt, model, warned):  # noqa: F811
    saver = api.saver(store, "run")
    saved(saver, model.tensors())
    saver.free()
    saver = api.saver(store, "run")
    m = meddler(saver)

    def put(args):
        if b"/base." in ctypes.string_at(args[1]) and not removed:
            removed.append(vckpt("rm", store, "run/0"))
    removed = []
    m.answer["put"] = m.answer["put_passing"] = put
    timings = saved(saver, model.tensors())
    m.end()
    said = warned()
    assert removed and len(said) == 1 and "was removed meanwhile" in said[0], said
    check(vckpt, store, 1, timings, N * SIZE)
    saver.free()


def test_what_changed_for_sure(api, store, vckpt, model, warned):  # noqa: F811
    """A base that cannot be read counts only for what no base before it has at its place."""
    other, saver = api.saver(store, "other"), api.saver(store, "run")
    saved(other, model.tensors())
    other.free()
    saved(saver, model.tensors())
    path = os.path.join(store, "runs/other/manifests", vckpt.json("info", store, "other/0")["manifest"])
    back = spoil(path, flip)
    model.change([1, 2])
    timings = saved(saver, {**model.tensors(), "model/new": np.ones(SIZE, "u1")}, bases=["other/0"])
    saver.free()
    back()
    assert timings.bytes_again == timings.bytes_no_base == SIZE and written(timings) == 3 * SIZE
    assert not warned()         # less than what changed


def test_a_base_that_is_not_there(api, store, model):  # noqa: F811
    saver = api.saver(store, "run")
    for base in ("other/1", "run/7"):
        with pytest.raises(Exception, match=f"base {base}: there is no such step"):
            saver.save(model.tensors(), bases=[base]).committed()
    saver.free()


def test_an_import(api, store, vckpt, model, tmp_path):  # noqa: F811
    """Nor does a first import of a run warn of anything."""
    from safetensors.numpy import save_file
    file = tmp_path / "m.safetensors"
    save_file({name: np.frombuffer(a.tobytes(), "f4") for name, a in model.tensors().items()}, file)
    for step, again in ((0, 0), (1, N * SIZE)):
        path = manifest_of(vckpt, store, 0) if step else None
        back = spoil(path, flip) if path else lambda: None
        shutil.rmtree(os.path.join(store, "index"), ignore_errors=True)     # it would know
        done = vckpt("import", store, f"run/{step}", file, "--json")
        back()
        said = json.loads(done.stdout)
        assert said["bytes_again"] == said["bytes_no_base"] == again
        assert (WARNING in done.stderr) == bool(again), done.stderr
