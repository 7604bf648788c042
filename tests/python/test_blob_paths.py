# SPDX-License-Identifier: Apache-2.0
"""Blobs whose names are long paths: what a save takes, and what a store that was made with intent does to commands."""
import os
import re
import resource
import subprocess

import numpy as np
import pytest
from safetensors.numpy import save_file

import vckpt as package
from forgelib import Forge, Message

DEEPEST = 64
SMALL = 1 << 30     # of address space: what a command needs for a step of a few bytes is far below


def path_of(parts):
    return "/".join(f"d{i}" for i in range(parts))


def save(store, blobs):
    saver = package.Saver(f"{store}/run")
    try:
        saver.save({"model": {"w": np.zeros(3)}}, step=1, blobs=blobs)
    finally:
        saver.close()


def test_the_deepest_path_goes_everywhere(vckpt, store, tmp_path):
    deep = path_of(DEEPEST)
    save(store, {deep: b"there"})
    assert vckpt("cat", store, f"run/1/{deep}").stdout == "there"
    vckpt("export", store, "run/1", tmp_path / "out")
    assert (tmp_path / "out" / deep).read_bytes() == b"there"


@pytest.mark.parametrize("blobs,said", [
    ({path_of(DEEPEST + 1): b""}, "its path has more than 64 parts: give it a shorter path"),
    ({f"{i}/" + path_of(DEEPEST - 1): b"" for i in range(150)}, "blobs have 9450 slashes together, and at most 4096"),
], ids=["deep", "all"])
def test_a_save_is_refused_by_name(store, blobs, said):
    with pytest.raises(package.InvalidArgument, match=re.escape(said)):
        save(store, blobs)


def rename_blob(forge, name):
    blob = Message(forge.part.get(9))
    blob.set(1, name)
    forge.part.set(9, blob.encode())


@pytest.fixture
def forged(vckpt, lib, store, tmp_path):
    """A step whose blob has a name of 32,767 parts."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "note").write_text("here")
    save_file({"w": np.ones(1)}, source / "model.safetensors")
    vckpt("import", store, "run/1", source, "--no-index")
    forge = Forge(lib, store, "run")
    rename_blob(forge, b"/".join([b"a"] * 32767))
    forge.done(tmp_path / "scratch")
    return store


@pytest.mark.parametrize("words", [["ls", "run/1"], ["export", "run/1", "{out}"], ["cat", "run/1/manifest.json"]],
                         ids=lambda words: words[0])
def test_a_path_without_end_is_refused(vckpt, forged, tmp_path, words):
    words = [word.format(out=tmp_path / "out") for word in words]
    done = subprocess.run([vckpt.path, words[0], forged, *words[1:]], capture_output=True, text=True, timeout=60,
                          preexec_fn=None if "asan" in os.environ.get("VCKPT_PRELOAD", "") else limit)
    assert done.returncode > 0 and "part of rank 0" in done.stderr and "run/1" in done.stderr, done
    assert not (tmp_path / "out").exists()


def limit():
    resource.setrlimit(resource.RLIMIT_AS, (SMALL, SMALL))


def test_a_blob_that_the_manifest_lists_and_the_part_lacks(lib, store, tmp_path):
    save(store, {"note": b"here"})
    forge = Forge(lib, store, "run")
    rename_blob(forge, b"nota")
    forge.done(tmp_path / "scratch")
    with pytest.raises(package.Error, match="the manifest lists blob note for rank 0, whose part has no blob of that"):
        package.open(f"{store}/run/1").blob("note")
