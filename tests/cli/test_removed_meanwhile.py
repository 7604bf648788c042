# SPDX-License-Identifier: Apache-2.0
"""A step is removed and collected while a command looks at it: no command calls that damage, and each that needs the
step says what became of it."""
import os
import signal
import subprocess
import sys
import tempfile
import time

import numpy
import pytest
from safetensors.numpy import save_file

LOAD = """
import sys, numpy, vckpt
try:
    vckpt.load(sys.argv[1] + "/r/1", {"model": {"w": numpy.zeros((300, 200), "f4")}})
except vckpt.Error as e:
    sys.exit(f"python: {e}")
"""
READ = """
import sys, vckpt
try:
    vckpt.open(sys.argv[1] + "/r/1").read("model", "w")
except vckpt.Error as e:
    sys.exit(f"python: {e}")
"""


@pytest.fixture(scope="module")
def source(vckpt):
    with tempfile.TemporaryDirectory() as name:
        for i in range(3):
            save_file({"w": numpy.random.default_rng(i).standard_normal((300, 200)).astype("f4")},
                      f"{name}/{i}.safetensors")
        yield name


@pytest.fixture
def filled(vckpt, store, source):
    for i in range(2):
        vckpt("import", store, f"r/{i + 1}", f"{source}/{i}.safetensors", "-q")
    return store


class Meanwhile:
    """Stops a command at its nth look at a file whose path contains `path`, removes a step, and lets it go on."""

    def __init__(self, vckpt, build, store):
        self.vckpt, self.store, self.library = vckpt, store, build / "tests/libinterpose.so"

    def __call__(self, *args, path="packs/", at=1, step="r/1", gc=("--grace", "0"), lose=False):
        env = {k: v for k, v in os.environ.items() if k != "VCKPT_STORE"}
        env |= {"VCKPT_INTERPOSE": f"root={self.store},reads=1,calls=open+openat+openat2,path={path},at={at},do=stop",
                "LD_PRELOAD": " ".join(filter(None, [os.environ.get("VCKPT_PRELOAD"), str(self.library)]))}
        running = subprocess.Popen([str(a) for a in args], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                   text=True, start_new_session=True)
        try:
            _, status = os.waitpid(running.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status), "it did not come to look there"
            if lose:
                for pack in (self.store / "packs").rglob("*.pack"):
                    pack.unlink()
            else:
                self.vckpt("rm", self.store, step)
                self.vckpt("gc", self.store, *gc)
            for _ in range(1200):
                os.killpg(running.pid, signal.SIGCONT)      # `vckpt index`, which it starts, stops there, too
                if running.poll() is not None:
                    break
                time.sleep(0.05)
            out, err = running.communicate(timeout=1)
            return running.returncode, out, err
        finally:
            running.kill()
            running.wait()


@pytest.fixture
def meanwhile(vckpt, build, filled):
    return Meanwhile(vckpt, build, filled)


@pytest.mark.parametrize("what", [["verify"], ["verify", "r"], ["mend"], ["mend", "-n"]], ids=" ".join)
def test_no_damage_is_told(vckpt, meanwhile, filled, what):
    code, out, err = meanwhile(vckpt.path, what[0], filled, *what[1:])
    assert (code, err) == (0, "") and "damage" not in out and "lost" not in out, (out, err)
    assert not (filled / "damaged").exists()
    vckpt("verify", filled)


@pytest.mark.parametrize("what", [["verify"], ["verify", "r"], ["mend", "-n"]], ids=" ".join)
def test_what_is_lost_is_told(vckpt, meanwhile, filled, what):
    code, out, _ = meanwhile(vckpt.path, what[0], filled, *what[1:], lose=True)
    assert code == 3 and "it is missing" in out


NEED = {"verify": ["verify", "{}", "r/1"], "export": ["export", "{}", "r/1", "{out}"], "info": ["info", "{}", "r/1"],
        "ls": ["ls", "{}", "r/1"], "cat": ["cat", "{}", "r/1/model/w.npy"], "python load": LOAD, "python read": READ}


@pytest.mark.parametrize("what", NEED)
@pytest.mark.parametrize("path", ["manifests/", "packs/"])
def test_it_was_removed(vckpt, meanwhile, filled, tmp_path, what, path):
    args = NEED[what]
    if isinstance(args, str):
        args = [sys.executable, "-c", args, filled]
    else:
        args = [vckpt.path, *[w.format(filled, out=tmp_path / "out") for w in args]]
    code, out, err = meanwhile(*args, path=path)
    assert code == 1 and "r/1 was removed" in err and "missing" not in err, (code, out, err)
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("at", range(1, 7))
def test_a_base_that_goes(vckpt, meanwhile, filled, source, at):
    """An import that would share pieces with the step."""
    code, out, err = meanwhile(vckpt.path, "import", filled, "q/1", f"{source}/0.safetensors", at=at, gc=())
    assert (code, err) == (0, ""), (out, err)
    vckpt("gc", filled, "--grace", "0")
    vckpt("verify", filled)
    assert vckpt("ls", filled, "q").stdout.count("step-") == 1
