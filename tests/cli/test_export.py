# SPDX-License-Identifier: Apache-2.0
"""An export that was interrupted goes on; what is there and not the step's is named, and never written over unasked."""
import fcntl
import os
import random
import re
import subprocess

import numpy as np
import pytest


@pytest.fixture
def filled(vckpt, store, tmp_path):
    """run/1 and run/2: one tensor that differs, two blobs that do not. {step: {path: bytes}}"""
    source, want = tmp_path / "in", {}
    (source / "sub").mkdir(parents=True)
    (source / "config.json").write_text('{"a": 1}')
    (source / "sub" / "big.bin").write_bytes(random.randbytes(300_000))
    for step in (1, 2):
        np.save(tmp_path / "w.npy", np.arange(step, 90000 + step, dtype="f4"))
        vckpt("import", store, f"run/{step}", tmp_path / "w.npy", source)
        vckpt("export", store, f"run/{step}", tmp_path / "first")
        want[step] = files(tmp_path / "first")
        subprocess.run(["rm", "-r", tmp_path / "first"], check=True)
    assert set(want[1]) == {"config.json", "sub/big.bin", "model.safetensors", "manifest.json"} and want[1] != want[2]
    return store, want


def files(path):
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def interposed(vckpt, build, store, words, *args):
    env = dict(os.environ, VCKPT_INTERPOSE=f"root={store},reads=1,{words}",
               LD_PRELOAD=f"{os.environ.get('VCKPT_PRELOAD', '')} {build}/tests/libinterpose.so".strip(),
               ASAN_OPTIONS=os.environ.get("ASAN_OPTIONS", "") + ":verify_asan_link_order=0:detect_leaks=0")
    return subprocess.run([vckpt.path, *map(str, args)], capture_output=True, text=True, env=env, timeout=120)


def test_a_killed_export_goes_on(vckpt, build, filled, tmp_path):
    """Killed at calls that read the store, then repeated: nothing stands under DEST before, and whole files stay."""
    store, want = filled
    assert interposed(vckpt, build, store, f"list={tmp_path}/calls", "export", store, "run/1",
                      tmp_path / "whole").returncode == 0
    calls = len((tmp_path / "calls").read_text().splitlines())
    kept = set()
    for at in range(calls, 0, -max(1, calls // 12)):
        dest, partial = tmp_path / f"out{at}", tmp_path / f"out{at}.incomplete"
        killed = interposed(vckpt, build, store, f"do=kill,at={at}", "export", store, "run/1", dest)
        if killed.returncode == 0:                                          # it came to do with fewer calls
            assert files(dest) == want[1]
            continue
        assert killed.returncode == -9 and not dest.exists(), (at, killed)
        there = files(partial) if partial.exists() else {}
        there.pop(".vckpt-export.incomplete", None)
        assert there.items() <= want[1].items(), at
        again = vckpt.json("export", store, "run/1", dest)
        assert again == {"destination": str(dest), "files": 4, "bytes": sum(map(len, want[1].values())),
                         "kept": len(there)}
        assert files(dest) == want[1] and not partial.exists()
        kept.add(len(there))
    assert max(kept) > 0                                                    # some were killed in the middle


def test_the_file_under_way_is_begun_again(vckpt, filled, tmp_path):
    store, want = filled
    partial = tmp_path / "out.incomplete"
    partial.mkdir()
    (partial / ".vckpt-export.incomplete").write_text("half")
    (partial / "config.json").write_bytes(want[1]["config.json"])
    assert vckpt.json("export", store, "run/1", tmp_path / "out")["kept"] == 1 and files(tmp_path / "out") == want[1]


def test_a_repeated_export_keeps_what_is_there(vckpt, filled, tmp_path):
    store, want = filled
    out = tmp_path / "out"
    vckpt("export", store, "run/1", out)
    before = (out / "sub/big.bin").stat()
    (out / "config.json").unlink()
    done = vckpt("export", store, "run/1", out, "-v")
    lines = done.stdout.splitlines()
    assert (lines[-1] == f"{out}: 4 files, 649 KiB; 3 of them were there already" and set(lines[:-1]) ==
            {"kept  sub/big.bin", "kept  model.safetensors", "kept  manifest.json", "wrote config.json"})
    after = (out / "sub/big.bin").stat()
    assert files(out) == want[1] and (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert vckpt("export", store, "run/1", out, "-q").stdout == ""


def refused(vckpt, store, step, out, names):
    before = files(out)
    done = vckpt("export", store, f"run/{step}", out, check=False)
    assert ((done.returncode, done.stdout) == (1, "") and f"{out} holds files that are not those of run/{step}: "
            f"{names}; nothing was written (--replace " in done.stderr), done
    assert files(out) == before


def test_a_file_of_other_origin(vckpt, filled, tmp_path):
    store, want = filled
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text('{"a": 2}')                            # as long as the step's
    refused(vckpt, store, 1, out, "config.json (other content)")
    (out / "notes.txt").write_text("mine")
    refused(vckpt, store, 1, out, "config.json (other content), notes.txt (not in the step)")
    vckpt("export", store, "run/1", out, "--replace")
    assert files(out) == {**want[1], "notes.txt": b"mine"}
    for name in "abcd":
        (out / name).write_text("")
    refused(vckpt, store, 1, out, "a (not in the step), b (not in the step), c (not in the step) and 2 more")


def test_links_are_not_followed(vckpt, filled, tmp_path):
    store, want = filled
    out, mine = tmp_path / "out", tmp_path / "mine"
    out.mkdir()
    mine.write_bytes(want[1]["config.json"])
    (out / "config.json").symlink_to(mine)
    done = vckpt("export", store, "run/1", out, check=False)
    assert done.returncode == 1 and "config.json (not a plain file)" in done.stderr
    mine.write_text("other")
    vckpt("export", store, "run/1", out, "--replace")
    assert mine.read_text() == "other" and not (out / "config.json").is_symlink() and files(out) == want[1]


def test_another_step(vckpt, filled, tmp_path):
    store, want = filled
    out = tmp_path / "out"
    vckpt("export", store, "run/1", out)
    refused(vckpt, store, 2, out, "manifest.json (other content), model.safetensors (other content)")
    out.rename(tmp_path / "out.incomplete")                                 # as if its export had been interrupted
    done = vckpt("export", store, "run/2", out, check=False)
    assert (done.returncode == 1 and f"{out}.incomplete holds files that are not those of run/2: manifest.json (other "
            f"content), model.safetensors (other content)" in done.stderr)
    assert files(tmp_path / "out.incomplete") == want[1] and not out.exists()
    assert vckpt.json("export", store, "run/2", out, "--replace")["kept"] == 2 and files(out) == want[2]
    vckpt("export", store, "run/2", out, "--format", "npy", "--replace")
    assert set(files(out)) == {*want[2], "model/w.npy"}


def test_a_file_where_the_directory_should_be(vckpt, filled, tmp_path):
    (tmp_path / "out").write_text("mine")
    done = vckpt("export", filled[0], "run/1", tmp_path / "out", check=False)
    assert (done.returncode == 1 and f"{tmp_path}/out: Not a directory" in done.stderr and
            (tmp_path / "out").read_text() == "mine")


def test_one_export_at_a_time(vckpt, filled, tmp_path):
    store, want = filled
    (tmp_path / "out.incomplete").mkdir()
    lock = os.open(tmp_path / "out.incomplete", os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = vckpt("export", store, "run/1", tmp_path / "out", check=False)
        assert done.returncode == 1 and "out.incomplete: another vckpt export writes into it" in done.stderr
    finally:
        os.close(lock)
    vckpt("export", store, "run/1", f"{tmp_path}/out/")
    assert files(tmp_path / "out") == want[1]


def test_damage_is_told_once(vckpt, filled, tmp_path):
    store, _ = filled
    for pack in store.glob("packs/*/*-model.pack"):
        data = bytearray(pack.read_bytes())
        data[len(data) // 2] ^= 0x55
        pack.write_bytes(data)
    for command in (["cat", store, "run/1/model/w"], ["export", store, "run/1", tmp_path / "out"]):
        done = vckpt(*command, check=False, text=False)
        said = done.stderr.decode()
        assert done.returncode == 3 and re.fullmatch(rf"vckpt {command[0]}: run/1: tensor model/w: [^\n]+\n",
                                                     said), said
    assert not list(tmp_path.glob("out*"))


def test_nothing_is_written_through_a_link(vckpt, filled, tmp_path):
    """A directory of the step that is a link in DEST, and a DEST.incomplete that is one: what they point to stays as it
    is."""
    store, want = filled
    out, outside = tmp_path / "out", tmp_path / "outside"
    outside.mkdir()
    (outside / "big.bin").write_text("precious")
    out.mkdir()
    (out / "sub").symlink_to(outside)
    (out / "config.json").write_text("other")
    for options in ([], ["--replace"]):
        done = vckpt("export", store, "run/1", out, *options, check=False)
        assert ((done.returncode, done.stdout) == (1, "") and f"{out}/sub is a symbolic link, where the step has a "
                f"directory; nothing was written" in done.stderr), done
        assert (files(outside) == {"big.bin": b"precious"} and files(out)["config.json"] == b"other" and
                not (out / "manifest.json").exists())
    partial = tmp_path / "new.incomplete"
    partial.symlink_to(outside)
    done = vckpt("export", store, "run/1", tmp_path / "new", "--replace", check=False)
    assert done.returncode == 1 and f"{partial} is a symbolic link" in done.stderr, done
    assert files(outside) == {"big.bin": b"precious"} and not (tmp_path / "new").exists()
    # a DEST that is a link was given: what it points to is filled
    link = tmp_path / "link"
    (tmp_path / "empty").mkdir()
    link.symlink_to(tmp_path / "empty")
    vckpt("export", store, "run/1", link)
    assert link.is_symlink() and files(tmp_path / "empty") == want[1]


@pytest.mark.parametrize("where, what",
                         [("store", "is"), ("store/", "is"), ("store/new", "is in"), ("store/runs/new/", "is in"),
                          ("store/packs", "is in"), ("store/a/b/c", "is in"),
                          ("link", "is"), ("link/new", "is in"), ("out/../store/new", "is in"),
                          ("../here/store/new", "is in")])
def test_a_destination_in_the_store(vckpt, tmp_path, monkeypatch, where, what):
    """It is refused before anything is written, whatever way leads there."""
    here = tmp_path / "here"
    (here / "out").mkdir(parents=True)
    monkeypatch.chdir(here)
    np.save("w.npy", np.arange(10))
    vckpt("init", "store")
    vckpt("import", "store", "run/1", "w.npy")
    (here / "link").symlink_to("store")
    before = sorted(here.rglob("*")), files(here)
    for options in ([], ["--replace"]):
        done = vckpt("export", "store", "run/1", where, *options, check=False)
        assert (done.returncode, done.stdout) == (1, ""), done
        assert (done.stderr == f"vckpt export: {where} {what} the store {here}/store; nothing was written: choose a "
                f"directory outside of the store\n")
        assert (sorted(here.rglob("*")), files(here)) == before
    vckpt("export", "store", "run/1", "store-copy")                         # beside it, and of a name that begins so
    vckpt("init", "other")
    assert f"other/x is in the store {here}/other" in vckpt("export", "store", "run/1", "other/x", check=False).stderr


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o2770, 0o1777, 0o555])
def test_an_empty_destination_keeps_its_mode(vckpt, build, filled, tmp_path, mode):
    """Also after an export that was killed, and where nothing could be exported."""
    store, want = filled
    out, partial = tmp_path / "out", tmp_path / "out.incomplete"

    def empty():
        out.mkdir()
        out.chmod(mode)
    empty()
    owner = out.stat()[4:6]
    vckpt("export", store, "run/1", out)
    assert out.stat().st_mode & 0o7777 == mode and out.stat()[4:6] == owner and files(out) == want[1]
    subprocess.run(["rm", "-r", out], check=True)
    empty()
    partial.mkdir()                                                         # as if an earlier one had been interrupted
    (partial / "notes.txt").write_text("mine")
    assert vckpt("export", store, "run/1", out, check=False).returncode == 1
    assert out.stat().st_mode & 0o7777 == mode and not list(out.iterdir()) and files(partial) == {"notes.txt": b"mine"}
    (partial / "notes.txt").unlink()
    assert interposed(vckpt, build, store, f"path=.pack,list={tmp_path}/calls", "export", store, "run/1",
                      tmp_path / "whole").returncode == 0
    killed = interposed(vckpt, build, store,
                        f"path=.pack,do=kill,at={len((tmp_path / 'calls').read_text().splitlines())}", "export", store,
                        "run/1", out)
    assert killed.returncode == -9 and partial.stat().st_mode & 0o7777 == mode | 0o700
    vckpt("export", store, "run/1", out)
    assert out.stat().st_mode & 0o7777 == mode | 0o700 and files(out) == want[1] and not partial.exists()


@pytest.mark.parametrize("name", ["model.safetensors", "manifest.json", "sub/big.bin"])
@pytest.mark.parametrize("options", [[], ["--replace"]])
def test_a_directory_where_a_file_should_be(vckpt, filled, tmp_path, name, options):
    """It is named before any file of DEST has been changed."""
    store, want = filled
    out = tmp_path / "out"
    (out / name).mkdir(parents=True)
    (out / name / "mine").write_text("precious")
    (out / "config.json").write_text("other")
    before = files(out)
    done = vckpt("export", store, "run/1", out, *options, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert (done.stderr == f"vckpt export: {out}/{name} is a directory, where the step has a file; nothing was "
            f"written: move it away\n")
    assert files(out) == before
    (out / name).rename(tmp_path / "away")
    vckpt("export", store, "run/1", out, "--replace")
    assert files(out) == want[1]
