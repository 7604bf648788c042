# SPDX-License-Identifier: Apache-2.0
"""Pieces that are recognised by their XXH3-128 alone: what happens where that lies; and the index when imports leave it
alone."""
import pathlib
import shutil
import subprocess

import numpy
import pytest
from safetensors.numpy import save_file

# libxxhash as it is after a miracle: all inputs collide.
COLLISION = """
#include <stddef.h>
#include <stdint.h>
typedef struct { uint64_t low, high; } hash;
hash XXH3_128bits_withSeed_dispatch(const void *p, size_t n, uint64_t seed)
{ (void)p, (void)n, (void)seed; return (hash){1, 2}; }
hash XXH3_128bits_withSeed(const void *p, size_t n, uint64_t seed)
{ (void)p, (void)n, (void)seed; return (hash){1, 2}; }
hash XXH3_128bits_digest(const void *state) { (void)state; return (hash){1, 2}; }
"""


@pytest.fixture
def collide(tmp_path):
    """The environment in which XXH3-128 says nothing."""
    if not shutil.which("cc"):
        pytest.skip("needs a C compiler")
    (tmp_path / "collide.c").write_text(COLLISION)
    library = tmp_path / "collide.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, tmp_path / "collide.c"], check=True)
    return {"LD_PRELOAD": str(library)}


def model(path, seed, count, n, dtype="f2"):
    rng = numpy.random.default_rng(seed)
    save_file({f"t{i:05}": rng.integers(0, 256, n, dtype="u1").view(dtype) for i in range(count)}, path)
    return path


def test_a_collision_fails_the_save(vckpt, store, tmp_path, collide):
    """One recognised piece in 1,024 is hashed in full: of 16,000 wrong ones all escape once in six million times."""
    one, two = model(tmp_path / "one.safetensors", 1, 16000, 256), model(tmp_path / "two.safetensors", 2, 16000, 256)
    vckpt("import", store, "run", one, env=collide)
    before = sorted(p for p in store.rglob("*") if p.is_file() and p.parts[-2] != "index")
    done = vckpt("import", store, "run", two, env=collide, check=False)
    assert done.returncode == 3 and "SHA-256" in done.stderr and "tensor model/t" in done.stderr, done.stderr
    after = sorted(p for p in store.rglob("*") if p.is_file() and p.parts[-2] != "index")
    assert [p for p in after if p.suffix == ".pack"] == [p for p in before if p.suffix == ".pack"]
    assert [s["step"] for s in vckpt.json("ls", store, "run")["steps"]] == [0]
    assert vckpt.json("import", store, "run", two, "--no-index", env=collide)["pieces_new"] == 16000
    vckpt("export", store, "run/1", tmp_path / "out")
    assert next(pathlib.Path(tmp_path / "out").rglob("two.safetensors")).read_bytes() == two.read_bytes()


def test_short_pieces_are_never_believed(vckpt, store, tmp_path, collide):
    one, two = model(tmp_path / "one.safetensors", 1, 50, 240), model(tmp_path / "two.safetensors", 2, 50, 240)
    vckpt("import", store, "run", one, env=collide)
    assert vckpt.json("import", store, "run", two, env=collide)["pieces_new"] == 50
    assert vckpt("cat", store, "run/1/two.safetensors", text=False).stdout == two.read_bytes()


@pytest.mark.parametrize("dtype", ["u1", "i8", "u4"])
def test_integers_are_never_believed(vckpt, store, tmp_path, collide, dtype):
    """Single bits move in them, which XXH3-128 sees less surely than others: they are recognised by SHA-256."""
    one, two = (model(tmp_path / f"{n}.safetensors", n, 50, 4096, dtype) for n in (1, 2))
    vckpt("import", store, "run", one, env=collide)
    assert vckpt.json("import", store, "run", two, env=collide)["pieces_new"] == 50
    again = vckpt.json("import", store, "run", two, env=collide)
    assert (again["pieces_new"], again["pieces_reused"]) == (0, 50)
    assert vckpt("cat", store, "run/1/2.safetensors", text=False).stdout == two.read_bytes()


def test_the_index_learns_later_what_was_known(vckpt, store, tmp_path):
    """An import of known data leaves the index alone; when the step that it stands under goes, the other takes its
    place."""
    source = model(tmp_path / "model.safetensors", 3, 20, 5000)
    vckpt("import", store, "one", source)
    count = vckpt.json("index", store)["commits"]
    assert count == 1 and vckpt.json("import", store, "two", source)["pieces_new"] == 0
    vckpt("rm", store, "one/0")
    assert vckpt.json("import", store, "three", source)["pieces_new"] == 0
    vckpt("verify", store)
