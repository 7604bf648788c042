# SPDX-License-Identifier: Apache-2.0
"""vckpt copy --to-tar and --from-tar: any tar reads what is written; what is read is a stranger's."""
import errno
import io
import os
import subprocess
import tarfile

import numpy as np
import pytest
from safetensors.numpy import save_file


@pytest.fixture(scope="module")
def made(vckpt, tmp_path_factory):
    """A store with run/1 and run/2, and a tar of run/2."""
    folder = tmp_path_factory.mktemp("tar")
    vckpt("init", folder / "store", "--no-reserve")
    for step in 1, 2:
        save_file({"w": np.arange(50000, dtype="f4") * step, "s": np.zeros(3, "i1")}, folder / "model.safetensors")
        vckpt("import", folder / "store", f"run/{step}", folder / "model.safetensors", "--set", f"n={step}", "-q")
    vckpt("copy", folder / "store", "run/2", "--to-tar", folder / "t.tar")
    return folder


@pytest.fixture
def room(tmp_path, monkeypatch):
    """$TMPDIR, which is empty before and after."""
    path = tmp_path / "room"
    path.mkdir()
    monkeypatch.setenv("TMPDIR", str(path))
    yield path
    assert list(path.iterdir()) == []


def cat(vckpt, store, step):
    return vckpt("cat", store, f"{step}/model.safetensors", text=False).stdout


def test_a_tar_is_a_store(vckpt, made, tmp_path):
    listed = subprocess.run(["tar", "tf", made / "t.tar"], capture_output=True, text=True, check=True).stdout.split()
    assert listed[0] == "vckpt.store" and all(name.split("/")[0] in ("vckpt.store", "packs", "runs") for name in listed)
    subprocess.run(["tar", "xf", made / "t.tar", "-C", tmp_path], check=True)
    assert cat(vckpt, tmp_path, "run/2") == cat(vckpt, made / "store", "run/2")
    assert [s["step"] for s in vckpt.json("ls", tmp_path, "run")["steps"]] == [2]
    vckpt("verify", tmp_path)


def test_it_comes_back(vckpt, made, store, room):
    done = vckpt.json("copy", store, "--from-tar", made / "t.tar", "--as", "new")
    assert [(s["run"], s["as"], s["step"], s["outcome"]) for s in done["steps"]] == [("run", "new", 2, "copied")]
    assert cat(vckpt, store, "new/2") == cat(vckpt, made / "store", "run/2")
    assert vckpt.json("info", store, "new/2")["attributes"] == {"n": "2"}
    again = subprocess.run(["tar", "cf", "-", "--format=ustar", "-C", made / "store", "vckpt.store", "packs", "runs"],
                           stdout=subprocess.PIPE, check=True).stdout      # another tar's, with directories
    assert vckpt("copy", store, "run/1", "--from-tar", "-", input=again, text=False).returncode == 0
    assert [s["step"] for s in vckpt.json("ls", store, "run")["steps"]] == [1]
    vckpt("verify", store)


def test_through_a_pipe(vckpt, made, store, room):
    out = subprocess.Popen([vckpt.path, "copy", made / "store", "--to-tar", "-"], stdout=subprocess.PIPE)
    into = subprocess.run([vckpt.path, "copy", store, "--from-tar", "-", "-q"], stdin=out.stdout, timeout=120)
    out.stdout.close()
    assert (out.wait(), into.returncode) == (0, 0)
    assert [cat(vckpt, store, f"run/{n}") == cat(vckpt, made / "store", f"run/{n}") for n in (1, 2)] == [True, True]


def test_a_pipe_that_nobody_reads(vckpt, made, room):
    out = subprocess.Popen([vckpt.path, "copy", made / "store", "--to-tar", "-"], stdout=subprocess.PIPE,
                           stderr=subprocess.PIPE)
    out.stdout.close()
    assert out.wait(timeout=120) == 1 and b"Broken pipe" in out.stderr.read()


def test_what_is_there_is_not_written_over(vckpt, made, tmp_path, room):
    path = tmp_path / "x.tar"
    path.write_bytes(b"mine")
    done = vckpt("copy", made / "store", "--to-tar", path, check=False)                       # before it copies
    assert done.returncode == 1 and not done.stdout and path.read_bytes() == b"mine"
    assert f"{path} is there already: name a file that is not" in done.stderr
    done = vckpt("copy", made / "store", "run/7", "--to-tar", tmp_path / "y.tar", check=False)
    assert done.returncode == 1 and not (tmp_path / "y.tar").exists()
    assert vckpt("copy", made / "store", "--to-tar", "-", "--json", check=False).returncode == 2
    assert vckpt("copy", made / "store", "--from-tar", tmp_path / "none", check=False).returncode == 1


def tar_of(*members):
    """(name, bytes or a type and a link)"""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, what in members:
            info = tarfile.TarInfo(name)
            if isinstance(what, bytes):
                info.size = len(what)
                tar.addfile(info, io.BytesIO(what))
            else:
                info.type, info.linkname = what
                tar.addfile(info)
    return out.getvalue()


@pytest.mark.parametrize("members, text", [
    ([("../up", b"x")], "none of a store's"),
    ([("/etc/x", b"x")], "none of a store's"),
    ([("runs/../../up", b"x")], "none of a store's"),
    ([("a\nb", b"x")], "none of a store's"),
    ([("runs/r", (tarfile.SYMTYPE, "/etc"))], "no regular file"),
    ([("a", b"x"), ("b", (tarfile.LNKTYPE, "a"))], "no regular file"),
    ([("a", (tarfile.CHRTYPE, ""))], "no regular file"),
    ([("a", (tarfile.FIFOTYPE, ""))], "no regular file"),
    ([("a", b"x"), ("a", b"y")], "twice"),
    ([("a", b"x"), ("a/b", b"y")], "twice"),
    ([("a/b", b"x"), ("a", b"y")], "twice"),
    ([("vckpt.store", b"x" * 600)], "vckpt.store"),
    ([], "vckpt.store"),
])
def test_tars_of_strangers(vckpt, store, tmp_path, room, members, text):
    (tmp_path / "t.tar").write_bytes(tar_of(*members))
    done = vckpt("copy", store, "--from-tar", tmp_path / "t.tar", check=False)
    assert done.returncode in (1, 3) and text in done.stderr, done
    assert vckpt.json("ls", store)["runs"] == [] and not (tmp_path / "up").exists()


def test_tars_that_are_cut_or_changed(vckpt, made, store, tmp_path, room, scale, rng):
    """An error, or the very step."""
    whole, bad = (made / "t.tar").read_bytes(), tmp_path / "bad.tar"
    want = cat(vckpt, made / "store", "run/2")
    cases = [whole[:rng.randrange(len(whole) - 10240)] for _ in range(scale(4, 60))] + [b"", whole[:512], b"x" * 4000]
    for _ in range(scale(6, 200)):
        at = rng.randrange(len(whole) // 512) * 512 + rng.randrange(160)
        cases.append(whole[:at] + rng.randbytes(1) + whole[at + 1:])
    for data in cases:
        bad.write_bytes(data)
        done = vckpt("copy", store, "--from-tar", bad, check=False)
        if done.returncode == 0:
            assert cat(vckpt, store, "run/2") == want
            vckpt("rm", store, "run", "--yes")
        else:
            assert done.stderr.startswith("vckpt copy: ") and done.returncode in (1, 3, 4), done
            assert vckpt.json("ls", store)["runs"] == [] or "run" in done.stderr
    vckpt("verify", store)


def test_a_tar_that_does_not_last(vckpt, made, build, tmp_path, room):
    """It is written, and the storage says at last that it is not: no file is left that looks whole."""
    preload = f"{os.environ.get('VCKPT_PRELOAD', '')} {build}/tests/libinterpose.so".strip()
    env = dict(os.environ, VCKPT_INTERPOSE=f"root={tmp_path},calls=fsync,path=t.tar,do=fail,errno={errno.EIO},at=1",
               LD_PRELOAD=preload,
               ASAN_OPTIONS=os.environ.get("ASAN_OPTIONS", "") + ":verify_asan_link_order=0:detect_leaks=0")
    done = subprocess.run([vckpt.path, "copy", made / "store", "--to-tar", tmp_path / "t.tar"], env=env,
                          capture_output=True, text=True)
    assert done.returncode == 1 and "t.tar: Input/output error" in done.stderr, done
    assert not (tmp_path / "t.tar").exists()
