# SPDX-License-Identifier: Apache-2.0
"""kill -9 during an import, at random moments: old steps verify, the new one is whole or absent, the next import works,
gc frees the rest."""
import os
import signal
import subprocess
import time

import numpy
import pytest
from safetensors.numpy import save_file


def make(path, seed, mib):
    rng = numpy.random.default_rng(seed)
    save_file({f"w{i}": rng.integers(0, 1 << 16, (256, 512 * mib), dtype="u2") for i in range(4)}, path)


def space(store):
    return sum(p.stat().st_size for p in store.rglob("*") if p.is_file() and "index" not in p.parts)


@pytest.fixture
def two(vckpt, store, tmp_path):
    for i in range(2):
        make(tmp_path / f"m{i}.safetensors", i, 8)
    vckpt("import", store, "old", tmp_path / "m0.safetensors")
    return tmp_path / "m0.safetensors", tmp_path / "m1.safetensors"


def test_kill_an_import(vckpt, store, two, scale, rng):
    start = time.monotonic()
    vckpt("import", store, "timing", two[1], "--no-index")
    whole = time.monotonic() - start
    vckpt("rm", store, "timing/0")
    vckpt("gc", store, "--grace", "0")
    landed = 0
    for i in range(scale(20, 200)):
        p = subprocess.Popen([vckpt.path, "import", str(store), "new", str(two[1]), "--no-index", "-q"],
                             start_new_session=True)
        time.sleep(rng.uniform(0, whole * 1.1))
        try:
            os.killpg(p.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        p.wait()
        steps = [s["step"] for r in vckpt.json("ls", store)["runs"] if r["run"] == "new"
                 for s in vckpt.json("ls", store, "new")["steps"]]
        if len(steps) > landed:
            assert len(steps) == landed + 1
            landed += 1
            vckpt("verify", store, f"new/{steps[-1]}")
        if i % 10 == 0:
            vckpt("verify", store, "old")
            vckpt("gc", store, "--grace", "0")
    print("landed", landed)
    assert vckpt.json("import", store, "new", two[1], "--no-index")["step"] == landed
    vckpt("verify", store)
    for i in range(landed + 1):
        vckpt("rm", store, f"new/{i}")
    vckpt("gc", store, "--grace", "0")
    vckpt("verify", store)
    assert space(store) < two[0].stat().st_size * 1.05 + (4 << 20)
    left = [a for a in vckpt.json("gc", store, "--dry-run")["actions"] if a["action"] != "keep"]
    assert not left


def test_the_leftovers_of_a_killed_import_are_listed(vckpt, store, two):
    """Stopped while it is surely at work (SIGSTOP as soon as its begin is there), then killed."""
    p = subprocess.Popen([vckpt.path, "import", str(store), "new", str(two[1]), "--no-index", "-q"])
    incoming = store / "incoming" / "new"
    while not list(incoming.rglob("begin")) and p.poll() is None:
        time.sleep(0.0005)
    os.kill(p.pid, signal.SIGSTOP)
    alive = vckpt("gc", store, "--grace", "0", check=False)
    assert alive.returncode == 1 and "is saving run new" in alive.stderr
    os.kill(p.pid, signal.SIGKILL)
    p.wait()
    listed = vckpt.json("gc", store, "--dry-run")
    assert any("incoming/new" in a["name"] or "new" in a["name"] for a in listed["actions"]), listed
    vckpt("gc", store, "--grace", "0")
    assert not list(incoming.rglob("begin"))
    assert vckpt.json("gc", store, "--dry-run")["actions"] == []
    assert vckpt.json("import", store, "new", two[1])["step"] == 0
    vckpt("verify", store)


def test_two_imports_at_once(vckpt, store, two):
    """Both of one number: one gets it; both without a number: two steps."""
    command = [vckpt.path, "import", str(store), "both", str(two[1]), "-q"]
    ps = [subprocess.Popen([*command, "--step", "5"], stderr=subprocess.PIPE) for _ in range(2)]
    codes = sorted(p.wait() for p in ps)
    assert codes == [0, 1]
    ps = [subprocess.Popen(command, stderr=subprocess.PIPE) for _ in range(3)]
    errors = [p.communicate()[1] for p in ps]
    done = [p.returncode for p in ps]
    steps = [s["step"] for s in vckpt.json("ls", store, "both")["steps"]]
    assert len(steps) == 1 + done.count(0) and all(e for e, c in zip(errors, done) if c)
    vckpt("verify", store)
