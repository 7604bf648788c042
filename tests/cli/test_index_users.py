# SPDX-License-Identifier: Apache-2.0
"""Several users of one store: each has an index of its own, and loses it to nobody."""
import json
import os
import pathlib
import subprocess
import tempfile

import numpy
import pytest
from safetensors.numpy import save_file

NOBODY = 65534


@pytest.fixture
def shared(vckpt):
    """A folder that everybody reaches, with a store that everybody may write, and run(user, command...)."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to become nobody")
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        os.chmod(folder, 0o777)
        save_file({"w": numpy.random.default_rng(1).standard_normal((400, 300)).astype("f4")}, folder / "m.safetensors")

        os.chmod(folder / "m.safetensors", 0o644)

        def run(user, *args):
            env = {**os.environ, "XDG_CACHE_HOME": str(folder / f"cache{user}")}
            become = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"] if user else []
            return subprocess.run([*become, vckpt.path, *map(str, args)], capture_output=True, text=True, env=env,
                                  umask=0)
        if run(NOBODY, "--version").returncode:
            pytest.skip("the build folder is not readable for others")
        yield folder, run


def test_an_index_of_a_test_is_not_left_to_the_user(vckpt, store, tmp_path):
    """Where a store has no place for one it is made in the user's cache, which is another one for tests."""
    (store / "index").write_text("")
    save_file({"w": numpy.arange(1000.0)}, tmp_path / "m.safetensors")
    vckpt("import", store, "run", tmp_path / "m.safetensors")
    name = vckpt.json("init", store, "--exist-ok")["id"]
    assert (pathlib.Path(os.environ["XDG_CACHE_HOME"]) / "vckpt" / name / "index.mdb").exists()
    assert not (pathlib.Path.home() / ".cache/vckpt" / name).exists()


def imported(run, user, folder, where):
    done = run(user, "import", folder / "store", where, folder / "m.safetensors", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)["pieces_new"]


@pytest.mark.parametrize("first, second", [(0, NOBODY), (NOBODY, 0)])
def test_each_user_has_an_index(shared, first, second):
    folder, run = shared
    index = folder / "store" / "index" / "index.mdb"
    assert run(first, "init", folder / "store").returncode == 0
    assert imported(run, first, folder, "a") > 0
    assert index.stat().st_uid == first and not (folder / f"cache{first}").exists()
    for path in [folder / "store", *(folder / "store").rglob("*")]:
        if "index" not in path.parts:
            os.chmod(path, 0o777 if path.is_dir() else 0o666)
    made = index.read_bytes()
    done = run(second, "index", folder / "store")
    assert (done.returncode, done.stderr) == (0, "") and (folder / f"cache{second}").exists()
    assert imported(run, second, folder, "b") == 0
    assert run(second, "rm", folder / "store", "b", "--yes").returncode == 0
    assert index.stat().st_uid == first and index.read_bytes() == made
    assert imported(run, first, folder, "c") == 0


@pytest.mark.parametrize("planted", ["index", "index/index.mdb", "index/index.mdb.new", "index/data.mdb"])
def test_root_follows_no_link_of_another_users_store(shared, planted):
    """A link in the place of the index, or of a file in it, in a store of somebody else's: what it leads to stays as it
    is, whatever root does in the store."""
    folder, run = shared
    victim = folder / "victim"
    victim.mkdir()
    for name in ("index.mdb", "index.mdb.new", "data.mdb", "lock.mdb"):
        (victim / name).write_text(name)
    assert run(NOBODY, "init", folder / "store").returncode == 0
    where = folder / "store" / planted
    if planted != "index":
        where.parent.mkdir()
        os.chown(where.parent, NOBODY, NOBODY)
    where.symlink_to(victim if planted == "index" else victim / "index.mdb")
    for command in (["index", folder / "store"], ["import", folder / "store", "a", folder / "m.safetensors"],
                    ["rm", folder / "store", "a", "--yes"], ["gc", folder / "store"],
                    ["index", folder / "store", "--rebuild"]):
        done = run(0, *command, "-q")
        assert (done.returncode, done.stderr) == (0, ""), command
    assert {p.name: p.read_text() for p in victim.iterdir()} == {p.name: p.name for p in victim.iterdir()}
    assert len(list(victim.iterdir())) == 4 and where.is_symlink() and (folder / "cache0").exists()
