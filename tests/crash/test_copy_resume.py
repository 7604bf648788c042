# SPDX-License-Identifier: Apache-2.0
"""A copy that was killed goes on: what it has written durably is neither read nor written again, whoever else is at
work in the store, and whatever a leftover claims to be."""
import ctypes
import os
import pathlib
import shutil
import signal
import struct
import subprocess
import sys
import textwrap
import uuid

import numpy as np
import pytest
import xxhash
from safetensors.numpy import save_file

import storelow
from saverlib import Vckpt, ranks
from powerlib import LINK, RENAME, Disk, Files, choices, durable, read_log, state
from test_commands import Commands

READER = pathlib.Path(__file__).resolve().parents[1] / "golden/reader.py"


class Resumes(Commands):
    """A step of three components, each about a third of it; and an empty store."""

    def __init__(self, vckpt, build, folder):
        self.vckpt, self.build, self.dir, self.from_ = vckpt, build, folder, folder / "from"
        random = np.random.default_rng(5)
        for name in "model", "optimizer", "state":
            (folder / "src" / name).mkdir(parents=True)
            save_file({f"{name}{i}": random.standard_normal((200, 300)).astype("f4") for i in range(4)},
                      folder / "src" / name / "a.safetensors")
        (folder / "src" / "long").write_bytes(random.bytes(100000))
        vckpt("init", self.from_, "--no-reserve")
        vckpt("import", self.from_, "r/1", folder / "src", "-q")
        self.want = self.files(self.from_)
        self.bytes = sum(s.st_size for s in packs(self.from_).values())

    def store(self, path):
        self.vckpt("init", path, "--no-reserve")
        return path

    def words(self, path):
        return ["copy", self.from_, "--to", path, "-q"]

    def killed(self, path, at, what="calls=linkat,path=packs/"):
        done = self.run(path, self.words(path), f"{what},do=kill,at={at}")
        assert done.returncode == -9, done
        return path

    def files(self, store):
        out = self.dir / "out"
        shutil.rmtree(out, ignore_errors=True)
        self.vckpt("export", store, "r/1", out)
        return {p.relative_to(out): p.read_bytes() for p in out.rglob("*") if p.is_file() and p.name != "manifest.json"}

    def check(self, path):
        assert self.files(path) == self.want
        self.vckpt("verify", path)
        assert self.vckpt.json("ls", path, "--incoming")["incoming"] == []

    def goes_on(self, path, litter=False):
        done = self.vckpt.json("copy", self.from_, "--to", path)
        assert (done["copied"], done["failed"]) == (1, 0)
        if litter:                                              # what is wrong with it concerns no step
            lines = self.vckpt("verify", path, check=False).stderr.splitlines()
            assert all(line.endswith("; touches no step") for line in lines if line.startswith("damage: ")), lines
            self.vckpt("repack", path, "r/1", "-q")
            self.vckpt("gc", path, "--grace", "0", "-q")
        self.check(path)
        return done["steps"][0]


def packs(path):
    return {p.name: p.stat() for p in path.glob("packs/*/*.pack")}


@pytest.fixture(scope="module")
def resumes(vckpt, build, tmp_path_factory):
    return Resumes(vckpt, build, tmp_path_factory.mktemp("resumes"))


def test_what_was_written_is_not_written_again(resumes, tmp_path):
    path = resumes.killed(resumes.store(tmp_path / "b"), 4)     # three packs, and not the blob's
    before = packs(path)
    step = resumes.goes_on(path)
    after = packs(path)
    assert len(before) == 3 and {s.st_ino for s in before.values()} <= {s.st_ino for s in after.values()}
    assert not set(before) & set(after)                         # they are the second attempt's now
    assert 100000 <= step["read_bytes"] < 110000 and step["pieces_new"] == 0
    resumes.vckpt("gc", path, "--grace", "0", "-q")
    assert packs(path).keys() == after.keys()
    resumes.check(path)


@pytest.mark.parametrize("act", ["kill", "fail,errno=5", "fail,errno=1"])
def test_killed_again_and_again(resumes, tmp_path, scale, rng, act):
    """At each call with which the first one is ended, packs are taken, and the step is written; or the call fails."""
    names, path, listed, most = resumes.store(tmp_path / "n"), tmp_path / "b", tmp_path / "list", scale(5, 1000)
    resumes.killed(names, 3)
    shutil.copytree(names, path)
    assert resumes.run(path, resumes.words(path), f"list={listed}").returncode == 0
    lines = listed.read_text().splitlines()
    of_packs = [i for i, line in enumerate(lines, 1) if "packs/" in line]
    assert any(line.startswith("renameat ") for line in lines) and any("runs/r/0" in line for line in lines)
    for at in rng.sample(of_packs, min(most, len(of_packs))) + rng.sample(range(1, len(lines) + 1),
                                                                           min(most, len(lines))):
        shutil.rmtree(path)
        shutil.copytree(names, path)
        done = resumes.run(path, resumes.words(path), f"do={act},at={at}")
        assert done.returncode in ((-9, 0) if act == "kill" else (0, 1)) and "sound" not in done.stderr, (at, done)
        assert done.returncode != 1 or done.stderr.startswith("vckpt copy: "), (at, done)
        again = resumes.vckpt.json("copy", resumes.from_, "--to", path)
        assert again["copied"] + again["equal"] == 1, (at, again)
        if act == "kill" and again["copied"]:
            assert again["read_bytes"] < resumes.bytes * 0.8, (at, again)   # of two packs it lost one at most
        resumes.vckpt("gc", path, "--grace", "0", "-q")
        resumes.check(path)


def test_a_storage_that_fails(resumes, tmp_path):
    path = resumes.store(tmp_path / "b")
    done = resumes.run(path, resumes.words(path), "calls=linkat,path=packs/,do=fail,errno=5,at=3")
    assert done.returncode == 1 and "nput/output error" in done.stderr, done
    assert resumes.goes_on(path)["read_bytes"] < resumes.bytes * 0.5


def test_after_a_collection(resumes, tmp_path):
    path = resumes.killed(resumes.store(tmp_path / "b"), 3)
    resumes.vckpt("gc", path, "-q")
    assert resumes.goes_on(path)["read_bytes"] > resumes.bytes * 0.9       # its attempt was ended: it begins anew
    resumes.vckpt("gc", path, "--grace", "0", "-q")
    resumes.check(path)


@pytest.mark.parametrize("wrong", ["bytes", "footer", "short", "links", "reversed"])
def test_leftovers_that_are_wrong(resumes, tmp_path, wrong):
    path = resumes.killed(resumes.store(tmp_path / "b"), 3)
    for pack in path.glob("packs/*/*.pack"):
        data = bytearray(pack.read_bytes())
        if wrong == "bytes":
            data[4096:len(data) // 2] = bytes(len(data) // 2 - 4096)
        elif wrong == "footer":
            data[-200:-128] = bytes(72)
        elif wrong == "short":
            del data[5000:]
        elif wrong == "links":
            os.link(pack, tmp_path / pack.name)                 # a backup has it, too
        pack.write_bytes(data) if wrong != "reversed" else pack.write_bytes(pack.read_bytes()[::-1])
    kept = {p: p.read_bytes() for p in tmp_path.glob("*.pack")}
    assert resumes.goes_on(path, litter=True)["read_bytes"] > resumes.bytes * (0.5 if wrong == "bytes" else 0.9)
    assert kept == {p: p.read_bytes() for p in kept}


def record_body(lib, path, store_id):
    data, record, whole = path.read_bytes(), storelow.Record(), ctypes.c_bool()
    assert lib.store_record_decode(4, store_id, data, len(data), ctypes.byref(record), ctypes.byref(whole)) == 0
    body = ctypes.string_at(record.body, record.len)
    lib.store_record_release(ctypes.byref(record))
    return body


def put_record(lib, path, store_id, body):
    file = storelow.Buf()
    assert lib.store_record_encode(4, store_id, body, len(body), ctypes.byref(file)) == 0
    path.write_bytes(ctypes.string_at(file.data, file.len))
    lib.base_buf_release(ctypes.byref(file))


def stopped(resumes, path, words, what):
    preload = f"{os.environ.get('VCKPT_PRELOAD', '')} {resumes.build}/tests/libinterpose.so".strip()
    env = dict(os.environ, VCKPT_INTERPOSE=f"root={path},{what},do=stop", LD_PRELOAD=preload,
               ASAN_OPTIONS=os.environ.get("ASAN_OPTIONS", "") + ":verify_asan_link_order=0:detect_leaks=0")
    p = subprocess.Popen([resumes.vckpt.path, *map(str, words)], env=env, stdout=subprocess.PIPE,
                         stderr=subprocess.PIPE, text=True)
    assert os.WIFSTOPPED(os.waitpid(p.pid, os.WUNTRACED)[1])
    return p


def ended(p):
    p.send_signal(signal.SIGCONT)
    out, err = p.communicate(timeout=240)
    return p.returncode, out + err


@pytest.mark.parametrize("seen", [True, False])
@pytest.mark.parametrize("call", ["calls=linkat,path=packs/,at=4", "calls=linkat,path=runs/r/,at=1"])
def test_a_writer_that_was_only_silent(resumes, tmp_path, seen, call):
    """It is stopped before its last pack, or before its commit entry. `seen`: its heartbeat shows that it lives. Its
    step is there when it goes on, and it takes nothing away."""
    path = resumes.store(tmp_path / "b")
    p = stopped(resumes, path, resumes.words(path), call)
    if not seen:
        for file in path.glob("hosts/*"):
            file.unlink()
    done = resumes.vckpt.json("copy", resumes.from_, "--to", path)
    assert (done["read_bytes"] > resumes.bytes * 0.9) == seen and done["copied"] == 1
    code, said = ended(p)
    assert code in (0, 1) and "sound" not in said, said
    resumes.vckpt("gc", path, "-q")
    resumes.vckpt("gc", path, "--grace", "0", "-q")
    resumes.check(path)


def test_a_collection_at_the_same_time(resumes, tmp_path):
    """It has listed the packs of the dead attempt, and stops before it marks the first one."""
    path = resumes.killed(resumes.store(tmp_path / "b"), 4)
    for words, what in ((["gc", path, "-q"], "calls=linkat,path=trash/,at=1"),
                        (["gc", path, "--grace", "0", "-q"], "calls=unlinkat,path=packs/,at=1")):
        copy = tmp_path / f"c{len(words)}"
        shutil.copytree(path, copy)
        p = stopped(resumes, copy, [copy if w == path else w for w in words], what)
        resumes.goes_on(copy)
        assert ended(p)[0] == 0
        resumes.vckpt("gc", copy, "--grace", "0", "-q")
        resumes.check(copy)


def test_two_at_once(resumes, tmp_path, scale):
    for i in range(scale(2, 20)):
        path = resumes.killed(resumes.store(tmp_path / str(i)), 4)
        words = [resumes.vckpt.path, *map(str, resumes.words(path))]
        two = [subprocess.Popen(words, stderr=subprocess.PIPE, text=True) for _ in range(2)]
        assert [(p.communicate(timeout=240)[1], p.returncode) for p in two] == [("", 0)] * 2
        resumes.vckpt("gc", path, "-q")
        resumes.check(path)
        resumes.vckpt("gc", path, "--grace", "0", "-q")
        resumes.check(path)


def test_what_many_ranks_saved(resumes, vckpt, build, tmp_path):
    """Each rank's packs go on as packs of that rank; also when the second copy is killed, with one that has no name."""
    source, path, api, random = tmp_path / "a", tmp_path / "b", Vckpt(build), np.random.default_rng(6)

    def one(rank, saver):
        mesh = api.mesh("dp=4")
        tensors = {f"{name}/w": (random.standard_normal((100, 100)).astype("f4"),
                                 {"shape": (400, 100), "mesh": mesh, "placements": "S(0)"}) for name in ("model", "o")}
        save = saver.save(tensors, blobs=[("loader", True, bytes([rank]) * 5000)], step=1)
        save.committed()
        save.free()

    vckpt("init", source, "--no-reserve")
    assert ranks(api, source, "r", 4, one) == [None] * 4
    words, want = ["copy", source, "--to", resumes.store(path), "-q"], resumes.files(source)
    for at in 8, 3:
        assert resumes.run(path, words, f"calls=linkat,path=packs/,do=kill,at={at}").returncode == -9
    before = {s.st_ino for name, s in packs(path).items() if not name.endswith("-meta.pack")}
    done = vckpt.json("copy", source, "--to", path)
    assert len(before) == 4 and before <= {s.st_ino for s in packs(path).values()} and done["copied"] == 1
    assert max(int(name.split("-")[2]) for name in packs(path)) >= 8    # of rank + 2 * 4
    for words in [], ["gc", path, "--grace", "0", "-q"]:
        assert not words or vckpt(*words)
        assert resumes.files(path) == want
        vckpt("verify", path)
    done = subprocess.run([sys.executable, READER, path], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done


def test_a_backup_that_is_made_meanwhile(resumes, tmp_path):
    """`cp -al` has given a pack a second name since it was looked at: the backup's pack stays as it is."""
    path, backup = resumes.killed(resumes.store(tmp_path / "b"), 3), tmp_path / "backup"
    p = stopped(resumes, path, resumes.words(path), "calls=renameat,path=packs/,at=1")
    subprocess.run(["cp", "-al", path, backup], check=True)
    kept = {f: f.read_bytes() for f in backup.glob("packs/*/*.pack")}
    assert len(kept) == 2 and ended(p)[0] == 0
    assert kept == {f: f.read_bytes() for f in kept}
    resumes.check(path)


def test_a_pack_that_a_newer_vckpt_wrote(resumes, tmp_path):
    path = resumes.killed(resumes.store(tmp_path / "b"), 3)
    for pack in path.glob("packs/*/*.pack"):
        data = bytearray(pack.read_bytes())
        data[8:10] = struct.pack("<H", 2)
        data[4088:4096] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(data[:4088])))
        pack.write_bytes(data)
    before = {pack: pack.read_bytes() for pack in path.glob("packs/*/*.pack")}
    assert resumes.vckpt.json("copy", resumes.from_, "--to", path)["read_bytes"] > resumes.bytes * 0.9
    assert before == {pack: pack.read_bytes() for pack in before}


def test_an_attempt_that_another_run_has_committed(resumes, lib, tmp_path):
    """A folder claims that the attempt of a visible step of another run is one of this run, and died."""
    path, lib = resumes.store(tmp_path / "b"), storelow.bind(lib)
    resumes.vckpt("copy", resumes.from_, "r", "--to", path, "--as", "s")
    attempt = resumes.vckpt.json("info", path, "s/1")["attempt"]
    resumes.killed(path, 1)
    (begin,) = path.glob("incoming/r/*/begin")
    store_id, old = uuid.UUID(resumes.vckpt.json("info", path)["id"]).bytes, begin.parent.name
    body = record_body(lib, begin, store_id)
    assert len(attempt) == len(old) and old.encode() in body
    shutil.rmtree(begin.parent)
    (begin.parent.parent / attempt).mkdir()
    put_record(lib, begin.parent.parent / attempt / "begin", store_id, body.replace(old.encode(), attempt.encode()))
    before = packs(path)
    resumes.vckpt("copy", resumes.from_, "r", "--to", path)
    assert before.keys() <= packs(path).keys()
    resumes.vckpt("verify", path)


def test_the_power_goes_while_packs_are_taken(resumes, tmp_path, rng, scale):
    """Whatever of it was not synced: a step that is visible is whole, and the next copy goes on."""
    path, log, names = resumes.killed(resumes.store(tmp_path / "b"), 4), tmp_path / "log", set()
    before = Files(path, inodes=True)
    done = resumes.run(path, resumes.words(path), f"log={log}")
    assert done.returncode == 0, done
    events, now = read_log(log), Files(path)
    files, _ = state(before, events, lambda i: True)
    now.files.pop("index/index.mdb")
    assert files == now.files                                   # the log is all that happened
    taken = [i for i, e in enumerate(events) if e.kind == RENAME and e.path.startswith("packs/")]
    last = max(i for i, e in enumerate(events) if e.kind == LINK and e.path.startswith("runs/r/0"))
    keeps, disk = durable(events), Disk(tmp_path / "power")
    states = sorted({(cut, frozenset(kept)) for cut in range(taken[0], last + 3)
                     for kept in choices(events, keeps, cut, rng, 2)}, key=lambda s: (s[0], sorted(s[1])))
    assert len(taken) == 3 and len(states) > 100
    for cut, kept in rng.sample(states, min(scale(20, 1000), len(states))) + states[-4:]:
        disk.become(*state(before, events, kept.__contains__))
        copy = tmp_path / "copy"
        disk.copy(copy)
        lines = resumes.vckpt("verify", copy, check=False).stderr.splitlines()
        assert all(line.endswith("; touches no step") for line in lines if line.startswith("damage: ")), (cut, lines)
        if resumes.vckpt("info", copy, "r/1", check=False).returncode == 0:
            assert resumes.files(copy) == resumes.want, cut
            names.add("visible")
        done = resumes.vckpt.json("copy", resumes.from_, "--to", copy)
        assert done["copied"] + done["equal"] == 1 and resumes.files(copy) == resumes.want, cut
        names.add("goes on" if done["read_bytes"] < resumes.bytes / 2 else "anew")
        shutil.rmtree(copy)
    assert {"visible", "goes on"} <= names, names


PIECEMEAL = """
    import ctypes as c, os, sys
    lib = c.CDLL(sys.argv[1])
    class Options(c.Structure):
        _fields_ = [("plain", c.c_bool), ("threads", c.c_uint), ("rate", c.c_uint64), ("pack_bytes", c.c_uint64),
                    ("total_bytes", c.c_uint64)] + \
                   [(n, c.c_void_p) for n in "progress arg cancelled leaves header".split()]
    lib.commit_list_at.restype = c.c_void_p
    stores = [c.c_void_p(), c.c_void_p()]
    for path, store, flags in zip(sys.argv[2:], stores, (0, 0)):
        assert lib.store_open(path.encode(), flags, c.byref(store), None) == 0
    options, copy, rows, result = Options(pack_bytes=200000), c.c_void_p(), c.c_void_p(), c.create_string_buffer(4096)
    assert lib.copy_open(stores[0], stores[1], c.byref(options), c.byref(copy), None) == 0
    assert lib.commit_list_open(stores[0], b"r", False, c.byref(rows), None) == 0
    step = c.c_void_p(lib.commit_list_at(rows, c.c_size_t(0)))
    why = c.create_string_buffer(8192)
    r = lib.copy_step(copy, rows, step, b"r", False, result, why)
    assert r == 0, (r, why.raw[:300])
    lib.copy_close(copy)
"""


def test_a_long_pack_is_several(resumes, build, tmp_path):
    """A rank's component is in packs of a bounded length, so that of a long one little is lost."""
    path = resumes.store(tmp_path / "b")
    library = build / "tests/libvckpt_internal.so"
    words = [sys.executable, "-c", textwrap.dedent(PIECEMEAL), library, resumes.from_, path]
    preload = f"{os.environ.get('VCKPT_PRELOAD', '')} {build}/tests/libinterpose.so".strip()
    for at in 4, 5, 0:                                          # the second one takes what the first one has written
        env = dict(os.environ, VCKPT_INTERPOSE=f"root={path},calls=linkat,path=packs/,do=kill,at={at}",
                   LD_PRELOAD=preload)
        done = subprocess.run([str(w) for w in words], env=env, capture_output=True, text=True, timeout=240)
        assert done.returncode == (-9 if at else 0), done
        if at:
            assert len(packs(path)) == at - 1, packs(path)
    made = [name.split("-")[2:] for name in packs(path)]
    assert len([1 for rank, name in made if name == "optimizer.pack"]) >= 3, made
    resumes.check(path)
