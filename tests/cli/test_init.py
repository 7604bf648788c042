# SPDX-License-Identifier: Apache-2.0
"""vckpt init: what it makes, and a store that is there already."""
import os
import subprocess

import pytest


def files(path):
    return {p.relative_to(path): p.read_bytes() if p.is_file() else None for p in path.rglob("*")}


@pytest.mark.parametrize("end", ["", "/", "//"])
def test_directories_above_it_are_made(vckpt, tmp_path, monkeypatch, end):
    monkeypatch.chdir(tmp_path)
    assert vckpt("init", f"a/b/c{end}").stdout.splitlines()[:-1] == ["made the directory a", "made the directory a/b"]
    done = vckpt("init", f"{tmp_path}/a/d{end}")
    assert done.stdout == f"{tmp_path}/a/d is a store now; next: vckpt import {tmp_path}/a/d{end} RUN SOURCE\n"
    assert vckpt("init", f"{tmp_path}/e/f", "-q").stdout == ""
    for store in ("a/b/c", "a/d", "e/f"):
        assert vckpt.json("ls", store) == {"runs": []}


def test_a_directory_above_that_cannot_be_made(vckpt, tmp_path):
    (tmp_path / "file").write_text("")
    done = vckpt("init", tmp_path / "file/a/b", check=False)
    assert (done.returncode == 1 and done.stderr == f"vckpt init: {tmp_path}/file/a/b: cannot make the directory "
            f"{tmp_path}/file/a: Not a directory\n")
    done = vckpt("init", tmp_path / "file", check=False)
    assert done.returncode == 1 and "Not a directory" in done.stderr


def test_a_store_that_is_there(vckpt, store):
    before = files(store)
    done = vckpt("init", store, check=False)
    assert (done.returncode, done.stderr) == (1, f"vckpt init: {store} is a vckpt store already (--exist-ok takes it "
                                              f"as it is)\n")
    assert vckpt("init", store, "--exist-ok").stdout == f"{store} is a store already; nothing was changed\n"
    assert vckpt.json("init", store, "--exist-ok")["made"] is False
    assert files(store) == before


def test_exist_ok_makes_a_store_where_there_is_none(vckpt, tmp_path):
    assert vckpt.json("init", tmp_path / "a/b", "--exist-ok")["made"] is True
    (tmp_path / "full").mkdir()
    (tmp_path / "full/x").write_text("")
    done = vckpt("init", tmp_path / "full", "--exist-ok", check=False)
    assert (done.returncode, done.stderr) == (1, f"vckpt init: {tmp_path}/full: the directory is not empty\n")


def test_many_at_once(vckpt, tmp_path):
    """All of them end well, and there is one store."""
    for i in range(5):
        command = [vckpt.path, "init", "--exist-ok", "--json", str(tmp_path / f"{i}/a/b")]
        running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True,
                                    env={k: v for k, v in os.environ.items() if k != "VCKPT_STORE"}) for _ in range(8)]
        said = [p.communicate()[0] for p in running]
        assert [p.returncode for p in running] == [0] * 8
        assert len({text.split('"id"')[1].split('"')[1] for text in said}) == 1
        assert vckpt("verify", tmp_path / f"{i}/a/b").returncode == 0


@pytest.mark.parametrize("where", ["new", "a/b/c/", "packs", "empty", "link"])
def test_a_store_in_a_store(vckpt, store, tmp_path, where):
    (store / "empty").mkdir()
    (store / "link").symlink_to(store / "empty")
    before = files(store)
    for options in ([], ["--exist-ok"]):
        done = vckpt("init", store / where, *options, check=False)
        assert (done.returncode, done.stdout) == (1, "")
        assert (done.stderr == f"vckpt init: {store / where} is in the store {store}; nothing was made: choose a "
                f"directory outside of that store\n")
    assert files(store) == before
    vckpt("init", f"{store}-2")                                             # beside it
    (tmp_path / "link").symlink_to(store / "empty")
    (tmp_path / "plain").mkdir()
    for way in [f"new/../{store.name}/x", f"new/a/../.././{store.name}//x/", f"plain/../new/../{store.name}/x",
                "link/../x"]:
        assert f"/{way} is in the store {store};" in vckpt("init", f"{tmp_path}/{way}", check=False).stderr
    assert files(store) == before and not (tmp_path / "new").exists()
    assert f"{tmp_path}/link is in the store {store};" in vckpt("init", tmp_path / "link", check=False).stderr
