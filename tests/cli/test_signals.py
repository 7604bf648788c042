# SPDX-License-Identifier: Apache-2.0
"""SIGINT and SIGTERM in commands that may take long: they die of the signal, and nothing half-done is visible; what
they made for the time being is gone."""
import os
import shutil
import signal
import subprocess

import numpy as np
import pytest
from safetensors.numpy import save_file

SIGNALS = [signal.SIGINT, signal.SIGTERM]


@pytest.fixture(scope="module")
def made(vckpt, tmp_path_factory):
    """A store with r/0 to r/3, each of some MiB, that share nothing."""
    folder = tmp_path_factory.mktemp("signals")
    random = np.random.default_rng(3)
    vckpt("init", folder / "a", "--no-reserve")
    for step in range(4):
        save_file({f"t{i}": random.standard_normal((300, 400)).astype("f4") for i in range(6)},
                  folder / "w.safetensors")
        vckpt("import", folder / "a", f"r/{step}", folder / "w.safetensors", "-q")
    vckpt("copy", folder / "a", "r/1", "--to-tar", folder / "r.tar")
    return folder


class Held:
    """A command that is stopped at a call of its own and gets the signal there."""

    def __init__(self, vckpt, build, folder):
        self.vckpt, self.build, self.folder = vckpt, build, folder
        (folder / "tmp").mkdir()

    def start(self, words, what, root, **more):
        preload = f"{os.environ.get('VCKPT_PRELOAD', '')} {self.build}/tests/libinterpose.so".strip()
        env = dict(os.environ, VCKPT_INTERPOSE=f"root={root},{what},do=stop,at=1", LD_PRELOAD=preload,
                   TMPDIR=str(self.folder / "tmp"),
                   ASAN_OPTIONS=os.environ.get("ASAN_OPTIONS", "") + ":verify_asan_link_order=0:detect_leaks=0")
        return subprocess.Popen([self.vckpt.path, *map(str, words)], env=env, stderr=subprocess.PIPE, text=True,
                                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL), **more)

    def run(self, words, what, root, number):
        p = self.start(words, what, root, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        assert os.WIFSTOPPED(os.waitpid(p.pid, os.WUNTRACED)[1]), p.communicate()
        p.send_signal(number)
        p.send_signal(signal.SIGCONT)
        out, err = p.communicate(timeout=120)
        assert list((self.folder / "tmp").iterdir()) == []
        return p.returncode, out, err


@pytest.fixture
def held(vckpt, build, tmp_path):
    return Held(vckpt, build, tmp_path)


COMMANDS = {
    "copy": (["copy", "A", "--to", "B"], "calls=linkat,path=packs/", "B"),
    "sync": (["sync", "A", "--to", "B"], "calls=linkat,path=packs/", "B"),
    "sync equal": (["sync", "A", "--to", "A2", "--delete"], "calls=linkat,path=runs/r/", "A2"),
    "to a tar": (["copy", "A", "r/1", "--to-tar", "OUT"], "calls=linkat,path=packs/", "TMP"),
    "from a tar": (["copy", "B", "--from-tar", "TAR"], "calls=linkat,path=packs/", "B"),
    "a tar is read": (["copy", "B", "--from-tar", "TAR"], "calls=mkdirat", "TMP"),
    "repack": (["repack", "A2", "r/1", "r/2"], "calls=linkat,path=packs/", "A2"),
    "prune": (["prune", "A2", "r", "--keep-last", "1", "--yes"], "calls=linkat,path=runs/r/", "A2"),
    "gc": (["gc", "A2", "--repack-below", "100%"], "calls=linkat", "A2"),
    "diff": (["diff", "A", "r/1", "r/2", "--values"], "reads=1,path=packs/", "A"),
    "report": (["report", "A", "--html", "OUT"], "reads=1,path=runs/", "A"),
    "report is written": (["report", "A", "--html", "OUT"], "calls=fsync,path=OUT", ""),
}


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("name", COMMANDS)
def test_it_ends(vckpt, made, held, tmp_path, name, number):
    words, what, root = COMMANDS[name]
    shutil.copytree(made / "a", tmp_path / "a2")
    vckpt("init", tmp_path / "b", "--no-reserve")
    places = {"A": made / "a", "A2": tmp_path / "a2", "B": tmp_path / "b", "TAR": made / "r.tar",
              "TMP": tmp_path / "tmp", "OUT": tmp_path / "out", "": tmp_path}
    if name == "sync equal":                                    # it removes a step, and then dies
        vckpt("sync", tmp_path / "a2", "--to", tmp_path / "b")
        vckpt("rm", tmp_path / "a2", "r/0", "r/1", "-q")
        places["A2"], places["A"] = tmp_path / "b", tmp_path / "a2"
    if name == "gc":
        vckpt("rm", tmp_path / "a2", "r/0", "-q")
    words = [places.get(w, w) for w in words]
    code, out, err = held.run(words, what.replace("OUT", "out"), places[root], number)
    done = name == "report is written"                          # it was too late, and the page is whole
    assert code == -number, (code, out, err)
    assert (tmp_path / "out").exists() == done and not list(tmp_path.glob("out?*"))
    for store in tmp_path / "a2", tmp_path / "b":
        assert vckpt.json("verify", store)["faults"] == 0
        vckpt("gc", store, "--grace", "0", "-q")
    vckpt("verify", tmp_path / "a2")
    assert vckpt.json("ls", made / "a", "r")["steps"]


def test_what_sigterm_leaves_of_a_copy(vckpt, made, held, tmp_path):
    """A service that is stopped goes on later; Ctrl-C takes back what was written."""
    for number, left in (signal.SIGINT, []), (signal.SIGTERM, [0]):
        store = tmp_path / str(number)
        vckpt("init", store, "--no-reserve")
        code, _, err = held.run(["copy", made / "a", "--to", store], "calls=openat,path=packs/", store, number)
        assert code == -number and "r step 0 was not copied" in err
        assert [s["step"] for s in vckpt.json("ls", store, "--incoming")["incoming"]] == left
        vckpt("copy", made / "a", "--to", store, "-q")
        assert vckpt.json("ls", store, "--incoming")["incoming"] == []


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("way", ["--to-tar", "--from-tar"])
def test_a_stream_that_stops(vckpt, made, held, tmp_path, way, number):
    vckpt("init", tmp_path / "b", "--no-reserve")
    store = made / "a" if way == "--to-tar" else tmp_path / "b"
    words = [vckpt.path, "copy", store, *(["r/1"] if way == "--to-tar" else []), way, "-", "-q"]
    p = subprocess.Popen([str(w) for w in words], env=dict(os.environ, TMPDIR=str(tmp_path / "tmp")),
                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                         preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    if way == "--to-tar":
        assert p.stdout.read(600)                               # and no more
    else:
        p.stdin.write((made / "r.tar").read_bytes()[:200000])
        p.stdin.flush()
    p.send_signal(number)
    code = p.wait(timeout=120)
    p.communicate()
    assert code == -number and list((tmp_path / "tmp").iterdir()) == []
