# SPDX-License-Identifier: Apache-2.0
"""SIGINT while a command is at work: it says what stands, dies of the signal, and what it says is so.

The command is stopped at one of its calls (tests/crash/interpose.c), gets the signal, and goes on: so the signal comes
at that call, however busy the machine is."""
import os
import shutil
import signal
import subprocess

import numpy
import pytest
from safetensors.numpy import save_file


@pytest.fixture(scope="module")
def template(vckpt, tmp_path_factory):
    folder = tmp_path_factory.mktemp("interrupt")
    (folder / "source").mkdir()
    rng = numpy.random.default_rng(5)
    (folder / "source/config.json").write_text("{}")
    vckpt("init", folder / "store", "--no-reserve")
    for step in range(4):
        save_file({name: rng.standard_normal((300, 300)).astype("f4") for name in "abc"},
                  folder / "source/model.safetensors")
        if step < 3:
            vckpt("import", folder / "store", f"run/{step}", folder / "source", "-q")
    return folder


class Place:
    """A copy of the store (run/0 to run/2), and a source that it does not hold."""

    def __init__(self, vckpt, build, path):
        self.vckpt, self.build, self.path, self.store, self.source = vckpt, build, path, path / "store", path / "source"

    def start(self, words, interpose, ignored=False):
        preload = f"{os.environ.get('VCKPT_PRELOAD', '')} {self.build}/tests/libinterpose.so".strip()
        env = dict({k: v for k, v in os.environ.items() if k != "VCKPT_STORE"}, VCKPT_INTERPOSE=interpose,
                   LD_PRELOAD=preload,
                   ASAN_OPTIONS=os.environ.get("ASAN_OPTIONS", "") + ":verify_asan_link_order=0:detect_leaks=0")
        how = signal.SIG_IGN if ignored else signal.SIG_DFL
        with open(self.path / "out.txt", "w") as out, open(self.path / "err.txt", "w") as err:
            return subprocess.Popen([self.vckpt.path, *map(str, words)], env=env, stdin=subprocess.DEVNULL, stdout=out,
                                    stderr=err,
                                    preexec_fn=lambda: signal.signal(signal.SIGINT, how))

    def calls(self, words, interpose):
        """The calls that count, of a command that runs to its end on a copy."""
        copy = self.path / "other"
        shutil.copytree(self.store, copy / "store")
        words = [copy / "store" if word == self.store else word for word in words]
        assert self.start(words, f"root={copy}/store,{interpose},list={copy}/calls").wait(120) == 0, (
            (self.path / "err.txt").read_text())
        lines = (copy / "calls").read_text().splitlines()
        shutil.rmtree(copy)
        return lines

    def interrupt(self, words, interpose, times=1, ignored=False):
        """Exit code, standard output and error of a command that gets SIGINT at each of `times` stops."""
        process = self.start(words, f"{interpose},do=stop", ignored)
        for _ in range(times):
            status = os.waitpid(process.pid, os.WUNTRACED)[1]
            if not os.WIFSTOPPED(status):
                process.returncode = status
                raise AssertionError(f"it ended before: {(self.path / 'err.txt').read_text()}")
            os.kill(process.pid, signal.SIGINT)
            os.kill(process.pid, signal.SIGCONT)
        code = process.wait(120)
        return code, (self.path / "out.txt").read_text(), (self.path / "err.txt").read_text()

    def steps(self):
        return [s["step"] for s in self.vckpt.json("ls", self.store, "run")["steps"]]

    def sound(self):
        return self.vckpt("verify", self.store, check=False).returncode == 0

    def incoming(self):
        return self.vckpt.json("ls", self.store, "--incoming")["incoming"]


@pytest.fixture
def place(vckpt, build, template, tmp_path):
    for name in ("store", "source"):
        shutil.copytree(template / name, tmp_path / name)
    return Place(vckpt, build, tmp_path)


def packs(store):
    return sorted(p.name for p in store.glob("packs/**/*.pack"))


def test_import_undoes_what_it_wrote(place):
    """At the first read of data from the source: what is read next fails, and the attempt is taken back."""
    before = packs(place.store)
    reads = place.calls(["import", place.store, "run", place.source], "calls=openat,path=packs")
    assert reads
    code, out, err = place.interrupt(["import", place.store, "run", place.source],
                                     f"root={place.store},calls=openat,path=packs,at={len(reads)}")
    assert (code, out) == (-signal.SIGINT, "")
    assert err == "vckpt import: interrupted: nothing was imported, and what was written was removed\n"
    assert place.steps() == [0, 1, 2] and packs(place.store) == before and not place.incoming() and place.sound()
    place.vckpt("import", place.store, "run/3", place.source)


def test_import_before_it_writes(place):
    code, out, err = place.interrupt(["import", place.store, "run", place.source],
                                     f"root={place.source},reads=1,calls=pread,at=1")
    assert (code, out) == (-signal.SIGINT, "") and err.startswith("vckpt import: interrupted: nothing was "
                                                                  "imported") and err.count("\n") == 1
    assert place.steps() == [0, 1, 2]


def test_import_when_it_is_committed(place):
    code, out, err = place.interrupt(["import", place.store, "run/7", place.source],
                                     f"root={place.store},calls=linkat,path=runs/run/0,at=1,when=after")
    assert code == -signal.SIGINT and out.startswith("run/step-00000007: 3 tensors")
    assert err == "vckpt import: interrupted when the step was already imported\n"
    assert place.steps() == [0, 1, 2, 7] and place.sound()


def test_import_twice(place):
    """The second one ends it at once: here at the very next call."""
    words = ["import", place.store, "run", place.source]
    at = next(i for i, line in enumerate(place.calls(words, "at=0"), 1) if line.startswith("linkat incoming/"))
    code, out, err = place.interrupt(words, f"root={place.store},at={at},last={at + 1}", times=2)
    assert (code, out) == (-signal.SIGINT, "")
    assert (err == "vckpt import: interrupted: ended at once; vckpt ls says whether the step is there, and vckpt gc "
            "deletes what is of no use\n")
    assert place.steps() == [0, 1, 2]
    place.vckpt("gc", place.store, "--grace", "0")
    assert not place.incoming() and place.sound()


def test_export(place):
    words = ["export", place.store, "run/1", place.path / "out"]
    reads = len(place.calls(words, "reads=1,calls=pread,path=packs"))
    shutil.rmtree(place.path / "out")
    code, out, err = place.interrupt(words, f"root={place.store},reads=1,calls=pread,path=packs,at={reads}")
    assert (code, out) == (-signal.SIGINT, "")
    assert err == f"vckpt export: interrupted: nothing was exported, and {place.path}/out.incomplete was removed\n"
    assert not list(place.path.glob("out*/"))
    place.vckpt("export", place.store, "run/1", place.path / "out")
    assert (place.path / "out/model.safetensors").exists()


@pytest.mark.parametrize("command, more, sentence", [
    ("verify", [], "not everything was read; faults found so far are listed above"),
    ("verify", ["--json"], "not everything was read, so there is no result"),
    ("mend", [], "what was mended so far stays so; run vckpt mend again"),
    ("mend", ["-n"], "nothing was changed"),
])
def test_verify_and_mend(place, command, more, sentence):
    code, out, err = place.interrupt([command, place.store, *more],
                                     f"root={place.store},reads=1,calls=pread,path=packs,at=3")
    assert (code, out, err) == (-signal.SIGINT, "", f"vckpt {command}: interrupted: {sentence}\n")
    assert place.sound() and place.vckpt("mend", place.store).stdout == "sound: nothing to mend\n"


def test_gc(place):
    place.vckpt("rm", place.store, "run/0", "run/1")
    words = ["gc", place.store, "--grace", "0"]
    calls = place.calls(words, "calls=unlinkat,path=packs")
    assert len(calls) > 1
    code, out, err = place.interrupt(words, f"root={place.store},calls=unlinkat,path=packs,at={len(calls)}")
    assert (code == -signal.SIGINT and err == "vckpt gc: interrupted: what was marked or deleted so far stays so; the "
            "next vckpt gc does the rest\n")
    # what was deleted stands there, though standard output is no terminal
    assert out.count("delete ") >= len(calls) - 1
    assert packs(place.store) and place.sound()
    place.vckpt(*words)
    assert place.sound() and place.steps() == [2]


def test_rm(place):
    code, out, err = place.interrupt(["rm", place.store, "run/0", "run/1", "run/2"],
                                     f"root={place.store},calls=linkat,path=runs/run/0,at=2")
    assert (code == -signal.SIGINT and err == "vckpt rm: interrupted: steps removed so far stay removed; vckpt ls "
            "lists the others\n")
    assert out.startswith("run/step-00000000 removed") and out.count("\n") == 1 and place.steps() == [1, 2]


def test_where_it_is_ignored_it_stays_so(place):
    code, out, err = place.interrupt(["verify", place.store], f"root={place.store},reads=1,calls=pread,path=packs,at=3",
                                     ignored=True)
    assert (code, err) == (0, "") and out.endswith("sound\n")
