# SPDX-License-Identifier: Apache-2.0
"""The pages are enough: what reader.py, written from docs/format/ alone, finds in a store is what the commands show,
and it refuses what is forged."""
import hashlib
import json
import pathlib
import re
import shutil
import struct
import subprocess
import sys
import threading
import time
import uuid

import numpy
import pytest

import reader
import vckpt as package
from forgelib import Forge, Message

HERE = pathlib.Path(__file__).parent
VERSIONS = sorted(p.name for p in HERE.glob("v*") if p.is_dir())
OPTIONS = {"pin": "no"}


def read(store):
    """What the program reader.py says: its exit status, its sentences, and what it prints."""
    told, found = reader.read(store)
    sentences = [*found.faults, *(f"newer: {sentence}" for sentence in found.newer)]
    return (1 if found.faults else 4 if found.newer else 0, "".join(f"{sentence}\n" for sentence in sentences),
            json.loads(json.dumps(told)))


def sha(data):
    return hashlib.sha256(data).hexdigest()


def files_of(folder):
    return {p.relative_to(folder).as_posix(): sha(p.read_bytes()) for p in folder.rglob("*") if p.is_file()}


def numbered(listed):
    return {"entry": listed["entry"], "attempt": listed["attempt"], "manifest": listed["manifest"],
            "tensors": listed["tensors"], "bytes": listed["bytes"],
            "new_bytes": listed["new_bytes"], "attributes": listed["attributes"]}


def compare(vckpt, store, tmp_path, some=12):
    """What the reader finds is what the commands show: every step's numbers; of `some` steps a run, every file; of
    `some` tensors a component, all."""
    status, sentences, told = read(store)
    assert status == 0 and not sentences, sentences
    assert vckpt.json("verify", store)["faults"] == 0
    runs = [r["run"] for r in vckpt.json("ls", store)["runs"]]
    assert set(runs) <= set(told["runs"])
    assert not any(told["runs"][r]["steps"] for r in set(told["runs"]) - set(runs))
    for run in runs:
        steps = vckpt.json("ls", store, run)["steps"]
        found = told["runs"][run]["steps"]
        for n, facts in told["runs"][run]["facts"].items():
            if n in found:
                found[n]["attributes"] |= facts["attributes"]   # ls shows what was set later, too
        assert {str(s["step"]): numbered(s) for s in steps} == {n: numbered(s) for n, s in found.items()}
        for listed in steps:
            assert time.strftime("%Y-%m-%dT%H:%M:%SZ",
                                 time.gmtime(found[str(listed["step"])]["time_ns"] // 10**9)) == listed["time"]
        for listed in steps[::-(-len(steps) // some)] if len(steps) > some else steps:
            compare_step(vckpt, store, f"{run}/{listed['step']}", found[str(listed["step"])],
                         tmp_path / f"export-{run}-{listed['step']}", some)
    return told


def compare_step(vckpt, store, name, found, out, some):
    out.parent.mkdir(exist_ok=True)
    vckpt("export", store, name, out, "-q")
    assert json.loads((out / "manifest.json").read_text())["manifest"] == found["manifest"]
    (out / "manifest.json").unlink()
    shown = files_of(out)
    of_ranks = {path for path in shown if path.startswith("ranks/")}
    # what the file format has no word for
    alone = {path for path in shown if path.endswith(".npy") and path not in found["files"]}
    assert {path: shown[path] for path in shown.keys() - of_ranks - alone} == found["files"], name
    assert sorted(shown[path] for path in of_ranks) == sorted(b["sha256"] for blobs in found["rank_blobs"].values()
                                                              for b in blobs.values())
    info = vckpt.json("info", store, name)
    assert (info["tensors"], info["blobs"]) == (found["tensors"], len(found["blobs"]) +
                                                sum(map(len, found["rank_blobs"].values()))), name
    for component, tensors in found["components"].items():
        for tensor in list(tensors)[::max(1, len(tensors) // some)]:
            says = vckpt.json("info", store, f"{name}/{component}/{reader.escape(tensor, b'.npy')}"[:-4])
            assert {k: says[k] for k in ("dtype", "shape", "digest", "pieces", "bytes")} == {k: tensors[tensor][k]
                    for k in ("dtype", "shape", "digest", "pieces", "bytes")}
            raw = vckpt("cat", store, f"{name}/{component}/{reader.escape(tensor, b'.npy')}", "--raw",
                        text=False).stdout
            assert sha(raw) == tensors[tensor]["sha256"], (name, tensor)


# ---- stores as they are ----

KEPT = "v2-list-4-kept"


@pytest.mark.parametrize("version", [v for v in VERSIONS if v != KEPT])
def test_a_golden_store(vckpt, tmp_path, version):
    shutil.unpack_archive(HERE / version / "store.tar.xz", tmp_path)
    told = compare(vckpt, tmp_path / "store", tmp_path)
    expected = json.loads((HERE / version / "expected.json").read_text())
    assert {f"{r}/{s}" for r, run in told["runs"].items() for s in run["steps"]} == set(expected)
    assert told["version"] == int(version[1:].partition("-")[0]) and told["runs"]["c"]["snapshots"] == [64]
    if version >= "v2-list-2":
        long = told["runs"]["long"]
        assert long["chains"] == {str(n): chain(n) for n in range(long["head"] or 64, 449, 64)}
        assert len(long["launches"]) == 10
    if version >= "v2-list-4":
        of = {run: {step: (s["pinned"], s["reason"], s["tags"], s["attributes"]) for step, s in r["facts"].items()
                    if s["pinned"] or s["tags"] or s["attributes"]} for run, r in told["runs"].items()}
        assert of["e"] == {"1": (True, "paper", ["best"], {"loss": "1"})}
        assert of["d"] == {"3": (True, "", [], {})} and told["runs"]["d"]["policy"] is None
        assert long["policy"]["rules"] == ["keep-last=3", "of another version"]
        assert of["long"]["248"] == (False, "", ["best", "of-9"], {"eval": "9"})
        assert of["long"]["99"] == (True, 3 * "\u00fc", [], {}) and "49" not in of["long"]
        assert {f"of-{n}" for n in range(10)} == {t for s in of["long"].values() for t in s[2] if t != "best"}
        for run in told["runs"]:
            assert {step: (s["pinned"], s["reason"], s["tags"]) for name, e in expected.items()
                    for step, s in [(name.partition("/")[2], e["facts"])] if name.startswith(f"{run}/") and
                    (s["pinned"] or s["tags"])} == {step: s[:3] for step, s in of[run].items() if s[0] or s[2]}


def test_a_golden_store_of_what_upkeep_leaves(vckpt, tmp_path):
    """Thinned steps in a snapshot and behind it, one written anew, of an import and of a job of two ranks; a step that
    took the place of another keeps its tag."""
    shutil.unpack_archive(HERE / KEPT / "store.tar.xz", tmp_path)
    runs = compare(vckpt, tmp_path / "store", tmp_path)["runs"]
    expected = json.loads((HERE / KEPT / "expected.json").read_text())
    assert {f"{r}/{s}": step["thinned"] for r, run in runs.items() for s, step in run["steps"].items()} == {
        name: e["thinned"] for name, e in expected.items()}
    kept = runs["kept"]
    assert kept["snapshots"] == [64] and kept["policy"]["rules"] == ["keep-last=3", "keep-best=2:loss"]
    thinned = {step: s["entry"] for step, s in kept["steps"].items() if s["thinned"]}
    assert set(thinned) == set("013456") and {n for n, entry in thinned.items() if entry < 64} == set("0134")
    for step, s in kept["steps"].items():
        assert set(s["components"]) == ({"model"} if step in thinned else {"model", "optimizer"})
        assert s["attempt"].endswith(f"-{1 << 63}") == (step in thinned)
    facts = {n: (s["pinned"], s["reason"], s["tags"], s["attributes"]) for n, s in kept["facts"].items()}
    assert facts == {"0": (False, "", ["best"], {}), "1": (True, "\u00fc", [], {}), "2": (True, "paper", [], {}),
                     "4": (False, "", [], {"eval": "59"})}
    of_job = runs["kept-job"]
    assert [(s["world"], s["thinned"]) for s in of_job["steps"].values()] == [(2, ["optimizer"]), (2, [])]
    assert of_job["facts"]["3"]["tags"] == ["sent"] and len(of_job["steps"]["3"]["rank_blobs"]) == 2


@pytest.mark.parametrize("names,words", [([b"b", b"a"], "the table of thinned components is not sorted"),
                                         ([b"a", b"a"], "the table of thinned components is not sorted and unique"),
                                         ([b"model"], "it has tensors of a component that it says was thinned")])
def test_wrong_lists_of_what_was_thinned(copy, lib, tmp_path, names, words):
    forge = Forge(lib, copy, "a")
    for name in names:
        forge.manifest.fields.append((18, 2, name))
    forge.done(tmp_path / "scratch")
    refused(copy, words)


def test_the_program(copy):
    """It says what its function finds."""
    for status in 0, 1:
        done = subprocess.run([sys.executable, HERE / "reader.py", copy], capture_output=True, text=True, timeout=300)
        assert done.returncode == status and (done.returncode, done.stderr, json.loads(done.stdout)) == read(copy)
        flip(copy / "runs/c/000000000003", 100)


COLLECTED = HERE / "v2-list-3/store.tar.xz"     # its run `long` to entry 256


@pytest.fixture(scope="module")
def collected(tmp_path_factory):
    """That store, and the steps of that run."""
    where = tmp_path_factory.mktemp("collected")
    shutil.unpack_archive(COLLECTED, where)
    return where / "store", read(where / "store")[2]["runs"]["long"]["steps"]


@pytest.mark.parametrize("lost, names", [("000000000300", 300), ("000000000256", 256), ("000000000005", None),
                                         ("head.000000000256", 256)])
def test_a_collected_list_that_lost_a_file(collected, tmp_path, lost, names):
    """An entry behind the head, the head itself, a record before it, the mark. What is visible is the same: by the
    chain of the head or by its mark."""
    shutil.copytree(collected[0], tmp_path / "store")
    (tmp_path / "store/runs/long" / lost).unlink()
    status, sentences, told = read(tmp_path / "store")
    assert status == 1 and f"runs/long/{names or int(lost):012}: " in sentences and "missing" in sentences, sentences
    assert told["runs"]["long"]["steps"] == collected[1]
    assert told["runs"]["long"]["head"] == 256


def test_a_collected_list_that_lost_head_and_mark(collected, tmp_path):
    """Then each record is damage, and what was visible at the head is shown by no snapshot that goes on from it."""
    shutil.copytree(collected[0], tmp_path / "store")
    for name in ("000000000256", "head.000000000256"):
        (tmp_path / "store/runs/long" / name).unlink()
    status, sentences, told = read(tmp_path / "store")
    assert status == 1 and sentences.count("at the head is lost") > 200
    left = {step for step, s in collected[1].items() if s["entry"] > 256}
    assert len(left) > 15 and left - set(told["runs"]["long"]["steps"]) <= {"22"}   # it replaced one of before


@pytest.mark.parametrize("how", ["damaged", "another"])
def test_a_mark_that_cannot_be_used(tmp_path, how):
    shutil.unpack_archive(COLLECTED, tmp_path)
    mark = tmp_path / "store/runs/long/head.000000000256"
    if how == "damaged":
        mark.write_bytes(b"x" * 8192)
    else:
        shutil.copy(mark.with_name("000000000256"), mark)
    status, sentences, told = read(tmp_path / "store")
    assert status == 1 and "runs/long/head.000000000256: " in sentences and len(told["runs"]["long"]["steps"]) > 20


def chain(number):
    """What a snapshot goes on from, in a list without damage."""
    n, found = number // 64, []
    while n:
        found.append(64 * n)
        n &= n - 1
    return found


def write(path, tensors, metadata=None):
    header, at, data = ({"__metadata__": metadata} if metadata else {}), 0, b""
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(raw)]}
        at, data = at + len(raw), data + raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def normal(rng, items, dtype="F32"):
    values = (rng.standard_normal(items) * 0.02).astype("f4")
    return (values.view("u4") >> 16).astype("u2").tobytes() if dtype == "BF16" else values.tobytes()


def test_imports(vckpt, store, tmp_path, scale):
    """Many dtypes; pieces of each way to cut a tensor; raw, and with planes of each width; many small tensors; blobs
    that give way."""
    rng = numpy.random.default_rng(7)
    source = tmp_path / "source"
    (source / "meta").mkdir(parents=True)
    (source / "unet").mkdir()
    big = normal(rng, 700 * 900, "BF16")
    tensors = {
        "cut": ("BF16", [700, 900], big), "tied": ("BF16", [700, 900], big),
        "flat": ("F32", [100003], normal(rng, 100003)),
        "conv": ("F32", [96, 64, 3, 3], normal(rng, 96 * 64 * 9)),
        "wide": ("F64", [33, 6553], rng.standard_normal(33 * 6553).tobytes()),
        "tall": ("U8", [300001, 2], bytes(600002)), "random": ("I64", [200, 300], rng.bytes(480000)),
        "scalar": ("F16", [], b"\1\2"),
        "none": ("F32", [3, 0, 2], b""), "inline": ("U8", [64], rng.bytes(64)), "65": ("U8", [65], rng.bytes(65)),
        "pairs": ("F4", [4, 10], rng.bytes(20)),
        "complex": ("C64", [300, 301], normal(rng, 300 * 301 * 2)), "zeros": ("F32", [512, 512], bytes(1 << 20)),
        "x/%\u00e9\x02": ("I8", [3], b"abc"),
        **{f"layers.{i}.norm": ("F32", [70], normal(rng, 70)) for i in range(scale(1000, 3000))},
    }
    write(source / "model.safetensors", tensors, {"format": "pt", "k": "\u00e4\"\\"})
    (source / "config.json").write_text(json.dumps({"text": "word " * 9000}))
    for path in ("manifest.json", "meta/empty", ".hidden", "meta/%25"):
        (source / path).write_bytes(b"" if path.endswith("empty") else path.encode())
    vckpt("import", store, "a", source, "--set", "loss=2.5", "--set", "note=\u00e4", "-q")
    changed = bytearray(big)
    changed[300000:300100] = bytes(100)
    write(source / "model.safetensors", {**tensors, "cut": ("BF16", [700, 900], bytes(changed))})
    vckpt("import", store, "a", source, "--step", 5, "-q")
    for n in (0, 1):
        write(source / f"unet/x-0000{n + 1}-of-00002.safetensors", {f"part{n}": ("F32", [700], normal(rng, 700))})
    write(source / "unet.safetensors", {"t": ("F32", [70], normal(rng, 70))})
    vckpt("import", store, "a", source, "--step", 6, "-q")
    numpy.save(tmp_path / "array.npy", rng.random((130, 77)).astype("c16"))
    vckpt("import", store, "b", "--component", "optimizer", tmp_path / "array.npy", "--component", "model",
          source / "model.safetensors", "-q")
    told = compare(vckpt, store, tmp_path, some=5)
    found = told["runs"]["a"]["steps"]["0"]["components"]["model"]
    assert found["cut"]["digest"] == found["tied"]["digest"] and found["cut"]["pieces"] > 4
    assert all(sha(raw) == found[name]["sha256"] for name, (_, _, raw) in tensors.items())
    assert told["runs"]["a"]["steps"]["5"]["components"]["model"]["cut"]["sha256"] == sha(changed)


def test_a_long_list(vckpt, store, tmp_path, scale):
    """Removed, replaced and saved again; snapshots; what the collector leaves."""
    write(tmp_path / "s.safetensors", {"w": ("U8", [100], bytes(range(100)))})
    write(tmp_path / "t.safetensors", {"w": ("U8", [100], bytes(100))})
    for step in range(steps := scale(58, 130)):
        vckpt("import", store, "a", tmp_path / "s.safetensors", "--step", step, "-q", "--no-index",
              *(["--set", f"step={step}"] if step % 2 else []))
        if step % 13 == 5:
            vckpt("rm", store, f"a/{step}", "-q")
        if step % 13 == 7:
            vckpt("import", store, "a", tmp_path / "t.safetensors", "--step", step, "--replace", "-q", "--no-index")
    told = compare(vckpt, store, tmp_path, some=6)["runs"]["a"]
    assert (told["snapshots"] == list(range(64, told["entries"], 64)) != [] and
            len(told["steps"]) == steps - len(range(5, steps, 13)))
    assert told["chains"] == {str(n): chain(n) for n in told["snapshots"]}
    vckpt("gc", store, "-q")
    assert compare(vckpt, store, tmp_path / "again", some=2)["runs"]["a"] == told


@pytest.mark.parametrize("world", [1, 3])
def test_ranks(vckpt, store, tmp_path, threads, world):
    """Boxes that the grid cuts where it cuts the whole and others, flat ranges, replicas, what each rank has of its
    own; launches, measures, heartbeats."""
    run, launch, rng = store / "job", uuid.uuid4().hex, numpy.random.default_rng(3)
    full, cuts = rng.standard_normal((960, 700)).astype("f4"), [960 * r // world // 7 * 7 for r in range(world)] + [960]
    during, turn = {}, threading.Barrier(world)

    def rank(r):
        a, b = cuts[r:r + 2]
        third = full.size // world
        state = {"m": {
            "rows": package.Shard(full[a:b], shape=full.shape, boxes=[((a, 0), (b - a, 700))]),
            "columns": package.Shard(full[:, 700 * r // world:700 * (r + 1) // world].copy(), shape=full.shape,
                                     boxes=[((0, 700 * r // world), (960, 700 * (r + 1) // world - 700 * r // world))]),
            "flat": package.Shard(full.reshape(-1)[third * r:third * (r + 1)], shape=full.shape,
                                  flat=(third * r, third * (r + 1))),
            "split": package.Shard(full[960 // world * r:960 // world * (r + 1)], shape=full.shape, mesh=f"dp={world}",
                                   placements="S(0)"),
            "same": package.Shard(full, shape=full.shape, mesh=f"dp={world}", placements="R"),
            f"own.{r}": package.Shard(numpy.full(200, r, "f8"), alone=True)},
            "log": {"rank": r, "history": [numpy.ones(r)]}}
        with package.Saver(run, rank=r, world=world, launch_id=launch, per_rank=("log",), **OPTIONS) as saver:
            first = saver.save(state, step=3, attributes={"loss": "1"})
            turn.wait()
            if r == 0:
                during["told"] = read(store)
            turn.wait()
            return first, saver.save(state, step=4)
    assert threads(dict.fromkeys(range(world), rank)) == dict.fromkeys(range(world), (3, 4))
    status, sentences, told = during["told"]
    assert status == 0, sentences
    assert (sum(o["kind"] == "Heartbeat" for o in told["others"].values()) >= 1 and
            set(told["runs"]["job"]["steps"]) == {"3"})
    told = compare(vckpt, store, tmp_path)
    assert {o["kind"] for o in told["others"].values()} == {"Stats"} and len(told["others"]) == 2 * world
    step = told["runs"]["job"]["steps"]["3"]
    assert len(told["runs"]["job"]["launches"]) == 1 and step["world"] == world
    found = step["components"]["m"]
    assert {found[name]["sha256"] for name in ("rows", "columns", "flat", "split", "same")} == {sha(full.tobytes())}
    assert len({found[name]["digest"] for name in ("rows", "columns", "flat", "split", "same")}) == (
        1 if world == 1 else 4)


def test_notes_marks_and_acceptance(vckpt, store, tmp_path):
    """What verify, the collector and mend leave."""
    for name in "ab":
        write(tmp_path / f"{name}.safetensors", {"w": ("U8", [100], name.encode() * 100)})
    for step in range(5):
        vckpt("import", store, "r", tmp_path / "a.safetensors", "--step", step, "-q", "--no-index")
        vckpt("import", store, "r", tmp_path / "b.safetensors", "--step", step, "--replace", "-q", "--no-index")
    vckpt("rm", store, "r/2", "-q")
    for at in (60, 4096 + 60):
        flip(store / "runs/r/000000000000", at)
        flip(store / "runs/r/000000000003", at)
        flip(store / "runs/r/000000000010", at)
    told = refused(store, "runs/r/000000000000: the record does not hold", "runs/r/000000000003", "runs/r/000000000010")
    listed = {str(s["step"]): numbered(s) for s in vckpt.json("ls", store, "r")["steps"]}
    assert told["runs"]["r"]["skipped"] == [0, 3, 10] and {n: numbered(s)
                                                           for n, s in told["runs"]["r"]["steps"].items()} == listed
    vckpt("mend", store, "-q", check=False)
    told = compare(vckpt, store, tmp_path)
    assert told["runs"]["r"]["skipped"] == [0, 3, 10]
    vckpt("gc", store, "-q")
    assert {o["kind"] for o in read(store)[2]["others"].values()} == {"Trash"} and read(store)[0] == 0
    path = pack_of(store, "0-meta")
    flip(path, footer(path)[0] + 9)
    assert vckpt("verify", store, "-q", check=False).returncode == 3
    told = refused(store, path.stem)
    assert told["others"][f"damaged/{path.stem}"]["kind"] == "Damage"


def test_a_save_under_way(vckpt, store, threads):
    """One rank has announced its part, the other is late."""
    launch, seen, late = uuid.uuid4().hex, [], threading.Event()

    def rank(r):
        with package.Saver(store / "job", rank=r, world=2, launch_id=launch, **OPTIONS) as saver:
            if r:
                late.wait(60)
            handle = saver.async_save(
                {"m": {"w": package.Shard(numpy.full((300, 700), r, "f4"), shape=(600, 700),
                                          boxes=[((300 * r, 0), (300, 700))])}}, step=7)
            until = time.monotonic() + 60
            while not r and not list(store.glob("incoming/job/*/part.0")) and time.monotonic() < until:
                time.sleep(0.02)
            if not r:
                seen.append(read(store))
                late.set()
            return handle.committed()
    assert threads({0: rank, 1: rank}) == {0: 7, 1: 7}
    (status, sentences, told), = seen
    assert status == 0, sentences
    assert {o["kind"] for o in told["others"].values()} == {"Begin", "Announcement",
                                                            "Heartbeat"} and told["runs"]["job"]["steps"] == {}
    assert read(store)[2]["runs"]["job"]["steps"].keys() == {"7"}


@pytest.mark.parametrize("size,packs", [(20_000, {"model", "meta"}), (1 << 20, {"model", "meta", "blobs"})])
def test_a_jobs_blobs(vckpt, tmp_path, rng, size, packs):
    """Those of 1 MiB or less together are in the pack of metadata; equal ones once, one of no bytes nowhere."""
    data, store = rng.randbytes(size), tmp_path / "store"
    blobs = {"a": data, "b": b"abcd", "c": b"", "d": data}
    for step in range(2):
        package.save(store / "job", {"model": {"w": numpy.arange(50000.0) + step}}, step=step, rank=0, world=1,
                     blobs=blobs, **OPTIONS)
    assert {p.stem.split("-", 3)[3] for p in store.rglob("*.pack")} == packs
    assert sum(p.stat().st_size for p in store.rglob("*.pack")) < 2 * (size + 500_000)
    compare(vckpt, store, tmp_path)
    assert vckpt.json("verify", store, "--paranoid")["faults"] == 0


# ---- what is not as the pages say ----

@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    where = tmp_path_factory.mktemp("whole")
    shutil.unpack_archive(HERE / "v2-list-2" / "store.tar.xz", where)
    assert read(where / "store")[0] == 0
    return where / "store"


@pytest.fixture
def copy(whole, tmp_path):
    return pathlib.Path(shutil.copytree(whole, tmp_path / "copy"))


def pack_of(store, ending):
    return next(p for p in sorted(store.rglob(f"*-{ending}.pack")) if p.stat().st_size > 100000 or ending != "0-model")


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def footer(path):
    """Of its first object: offset, checks, and of the footer and the file's end."""
    data = path.read_bytes()
    at = struct.unpack_from("<Q", data, len(data) - 120)[0]
    return (*struct.unpack_from("<QQ", data, at + 32), at, len(data))


PLACES = {"object": (lambda o, c, f, e: o + 70, "does not pass its check"),
          "check": (lambda o, c, f, e: c + 1, "does not pass its check"),
          "padding": (lambda o, c, f, e: f - 1, "padding is not zero|footer is not where"),
          "head": (lambda o, c, f, e: 20, "the head of pack"),
          "zeros of the head": (lambda o, c, f, e: 3000, "the head of pack"),
          "footer": (lambda o, c, f, e: f + 40, "its footer is damaged"),
          "tail": (lambda o, c, f, e: e - 60, "has no tail")}


def refused(store, *words, status=1):
    found, sentences, told = read(store)
    assert found == status and all(re.search(word, sentences) for word in words), sentences
    return told


@pytest.mark.parametrize("place", PLACES)
def test_a_flipped_bit_of_a_pack(copy, place):
    path, (where, words) = pack_of(copy, "0-model"), PLACES[place]
    flip(path, where(*footer(path)))
    told = refused(copy, path.stem, words)
    if place in ("object", "check", "head"):
        assert len(told["runs"]["a"]["steps"].get("0",
                                                  {"components": {"model": {}}})["components"].get("model", {})) < 11


def test_a_pack_cut_short_and_one_of_another_name(copy):
    path = pack_of(copy, "0-blobs")
    path.write_bytes(path.read_bytes()[:-64])
    other = pack_of(copy, "0-model")
    name = other.stem.replace("-0-0-", "-0-1-")
    moved = copy / "packs" / hashlib.sha256(name.encode()).hexdigest()[:2] / f"{name}.pack"
    moved.parent.mkdir(exist_ok=True)
    shutil.copy(other, moved)
    refused(copy, f"packs/{path.parent.name}/{path.name}: has no tail", f"pack {name} bears another name")


def test_one_copy_of_an_entry(copy):
    """It is told, and the list is read from the other one."""
    path = copy / "runs/c/000000000003"
    for at, name in ((100, "000000000003"), (path.stat().st_size // 2 + 100, "000000000004")):
        flip(copy / "runs/c" / name, at)
    told = refused(copy, "runs/c/000000000003: one of its two copies", "runs/c/000000000004: one of its two copies")
    assert len(told["runs"]["c"]["steps"]) == 66 and told["runs"]["c"]["skipped"] == []


def test_an_entry_that_is_gone_or_not_of_its_place(copy):
    """Missing, swapped, of another run, of another past."""
    runs = copy / "runs"
    (runs / "b/000000000001").unlink()
    third, fourth = runs / "c/000000000003", runs / "c/000000000004"
    third.rename(runs / "x"), fourth.rename(third), (runs / "x").rename(fourth)
    shutil.copytree(runs / "a", runs / "e")
    told = refused(copy, "runs/b/000000000001: it is missing", "runs/c/000000000003: it is not the entry of this place",
                   "runs/c/000000000004: it is not the entry of this place",
                   "runs/e/000000000000: it is not the entry of this place")
    assert told["runs"]["e"]["steps"] == {} and told["runs"]["c"]["skipped"] == [3, 4]
    assert len(told["runs"]["c"]["steps"]) == 66, "the snapshot brings them back"


def seal(path, kind, change, double=False):
    """The record with another body, and its sum right."""
    store = next(p for p in path.parents if (p / "vckpt.store").exists())
    own = reader.Store(store)
    own.open()
    body, _ = own.record(path.relative_to(store).as_posix(), kind, double)
    body = change(body)
    head = b"VCKPTREC" + struct.pack("<HHI", 1, kind, len(body))
    data = head + reader.sha(head, own.id, body) + body
    path.write_bytes(data.ljust(reader.up(len(data), 4096), b"\0") * 2 if double else data)


def test_an_entry_written_anew(copy):
    """Its own sum is right; what comes behind it says what stood there, and its manifest what it said."""
    seal(copy / "runs/d/000000000001", 2, lambda body: body.replace(b"loss\x12\x013", b"loss\x12\x014"), True)
    told = refused(copy, "runs/d/000000000002: it does not follow the entry before it",
                   "d/3: manifest and commit entry differ in run or attributes")
    assert "3" not in told["runs"]["d"]["steps"]


def test_a_snapshot_that_says_something_else(copy):
    def change(body):
        at = body.index(struct.pack("<QQ", 7, 7))       # entry 7, step 7
        return body[:at + 8] + struct.pack("<Q", 700) + body[at + 16:]
    seal(copy / "runs/c/000000000064", 2, change, True)
    told = refused(copy, "runs/c/000000000064: the snapshot says other steps",
                   "runs/c/000000000065: it does not follow")
    assert "700" not in told["runs"]["c"]["steps"]


def inner(number, **fields):
    """Changes fields of the message that an entry has under that number."""
    def change(body):
        entry = Message(body)
        message = Message(entry.get(number))
        for name, value in fields.items():
            field = int(name[1:])
            message.set(field, value(message.get(field, b"")) if callable(value) else value)
        entry.set(number, message.encode())
        return entry.encode()
    return change


DIGEST = bytes(32)


@pytest.mark.parametrize("number,change,words", [
    (448, inner(10, _5=lambda gone: gone[8:]), "it says that other commits are gone"),
    (448, inner(10, _5=lambda gone: struct.pack("<Q", 2) + gone), "it says that other commits are gone"),
    (448, inner(10, _5=lambda gone: gone[8:] + gone[:8]), "what is gone is not sorted"),
    (448, inner(10, _5=lambda gone: gone + struct.pack("<Q", 384)), "what is gone was not there"),
    (448, inner(10, _6=1000), "another highest step from before"),
    (448, inner(10, _6=0), "another highest step from before"),
    (448, inner(10, _6=(1 << 63) + 1), "its highest step or its launch is none"),
    (448, inner(10, _7=387), "another newest launch"), (448, inner(10, _7=449), "its highest step or its launch is"),
    (448, inner(10, _3=320, _5=b""), "it goes on from 320 which its number does not lead to"),
    (448, inner(10, _3=383), "it goes on from 383 which its number does not lead to"),
    (448, inner(10, _3=448), "it goes on from 448 which its number does not lead to"),
    (448, inner(10, _3=256, _5=b""), "it goes on from what is not the snapshot that it says"),
    (448, inner(10, _3=0, _4=b""), "it speaks of commits before the snapshot"),
    (448, inner(10, _4=DIGEST), "it goes on from what is not the snapshot that it says"),
    (448, inner(10, _4=DIGEST[1:]), "it has no digest of the snapshot"),
    (448, inner(10, _4=b""), "it has no digest of the snapshot"),
    (448, inner(10, _1=b"", _2=b""), "the snapshot says other steps"),
    (256, inner(10, _6=5), "it speaks of commits before the snapshot"),
    (435, inner(6, _4=9), "it is launch 10 and says 9"), (435, inner(6, _4=1), "it names another number of launches"),
    (435, inner(6, _5=0), "it names another number of launches"),
    (435, inner(6, _5=436), "it names another number of launches"),
    (435, inner(6, _5=291), "it names other launches than"), (435, inner(6, _6=b"12345678"), "it names other launches"),
    (435, inner(6, _6=b"1234567"), "its table of launches is not a whole number of rows"),
    (434, lambda body: body[:2] + b"\x12\x06list-2" + body[2:], "of a kind that has none"),
    (448, lambda body: body.replace(b"\x12\x06list-2", b""), "it and its store do not both have the word")])
def test_what_goes_on_from_others(long_list, number, change, words):
    seal(long_list / f"runs/long/{number:012}", 2, change, True)
    faults, found = list_of(long_list, "long")
    assert any(re.match(f"runs/long/{number:012}: .*{words}", f) for f in faults), faults
    assert {str(step) for step in found.visible} == golden_steps("long")


@pytest.fixture
def long_list(whole, tmp_path):
    """The list alone."""
    store = tmp_path / "list"
    store.mkdir()
    shutil.copy(whole / "vckpt.store", store)
    shutil.copytree(whole / "runs/long", store / "runs/long")
    return store


def list_of(store, run):
    found = reader.Store(store)
    found.open()
    return found.faults, reader.List(found, run).read()


def golden_steps(run):
    expected = json.loads((HERE / "v2-list-2" / "expected.json").read_text())
    return {name.partition("/")[2] for name in expected if name.startswith(f"{run}/")}


@pytest.mark.parametrize("damaged", [[384], [256], [448], [339, 435], [384, 435]])
def test_damage_in_what_others_go_on_from(vckpt, long_list, damaged):
    """A snapshot of a chain, and launch entries: nothing is lost, before and after it is accepted."""
    for n in damaged:
        path = long_list / f"runs/long/{n:012}"
        flip(path, 100), flip(path, path.stat().st_size // 2 + 100)
    told = [f"runs/long/{n:012}: the record does not hold" for n in damaged]
    for sentences in (told, []):
        faults, found = list_of(long_list, "long")
        assert sorted(faults) == sentences and sorted(found.skipped) == damaged
        assert {str(step) for step in found.visible} == golden_steps("long")
        for n in found.snapshots:
            assert found.chain(n) == ([] if set(damaged) & set(chain(n)) else chain(n))
        assert {str(s["step"]) for s in vckpt.json("ls", long_list, "long")["steps"]} == golden_steps("long")
        vckpt("mend", long_list, "-q", check=False)


def test_a_store_that_lost_the_word(vckpt, long_list):
    """Each snapshot and each launch entry is damage then, to the program, too."""
    rewrite_store(long_list, lambda body: body.replace(b"\x12\x06list-2", b""))
    faults, found = list_of(long_list, "long")
    named = {n for n in range(found.end) if n and n % 64 == 0} | {0, 48, 96, 144, 191, 242, 290, 338, 386, 435}
    assert found.why.keys() == named and all("do not both have the word" in f for f in faults)
    done = vckpt("ls", long_list, "long", check=False)
    assert {int(n) for n in re.findall(r"runs/long/(\d+): it has the word list-2, and the store lacks it",
                                       done.stderr)} == named


def test_a_store_without_the_word_goes_on(vckpt, tmp_path):
    """Its snapshots name all that is visible, its launch entries name no others, and it stays so."""
    shutil.unpack_archive(HERE / "v2-grid-2/store.tar.xz", tmp_path)
    store = tmp_path / "store"
    record = (store / "vckpt.store").read_bytes()
    write(tmp_path / "s.safetensors", {"w": ("U8", [100], b"s" * 100)})
    vckpt("rm", store, "c/0..56", "-q")
    for launch in range(2):
        with package.Saver(store / "c", rank=0, world=1, launch_id=f"new-{launch}", **OPTIONS) as saver:
            saver.save({"m": {"w": numpy.full(100, launch)}}, step=100 + launch)
    vckpt("import", store, "c", tmp_path / "s.safetensors", "--step", 60, "--replace", "-q", "--no-index")
    vckpt("import", store, "c", tmp_path / "s.safetensors", "--step", 102, "-q", "--no-index")
    vckpt("rm", store, "c/61", "-q")
    vckpt("gc", store, "--grace", "0", "-q")
    told = compare(vckpt, store, tmp_path, some=2)["runs"]["c"]
    assert told["chains"] == {"64": [64], "128": [128]} and len(told["launches"]) == 2 and told["entries"] > 130
    assert set(told["steps"]) == {str(n) for n in range(57, 103) if n < 66 and n != 61 or n > 99}
    assert vckpt.json("verify", store, "--paranoid")["faults"] == 0
    opened = reader.Store(store)
    opened.open()
    entries = reader.List(opened, "c").read().entries
    assert {n for n, e in entries.items() if e["kind"] == 5} == {64, 128}
    assert not opened.list_2 and not any(e["features"] for e in entries.values())
    assert (store / "vckpt.store").read_bytes() == record
    for n in (64, 128):                         # and a reader needs none of them
        path = store / f"runs/c/{n:012}"
        flip(path, 100), flip(path, path.stat().st_size // 2 + 100)
    assert {str(s["step"]) for s in vckpt.json("ls", store, "c")["steps"]} == set(told["steps"])


def rewrite_store(store, change):
    """vckpt.store, whose own id is zeros to its sum."""
    path = store / "vckpt.store"
    data = path.read_bytes()
    body = change(data[48:48 + struct.unpack_from("<I", data, 12)[0]])
    head = data[:12] + struct.pack("<I", len(body))
    path.write_bytes((head + reader.sha(head, bytes(16), body) + body).ljust(4096, b"\0") * 2)


@pytest.mark.parametrize("change,words,status", [
    # unknown fields are passed over
    (lambda body: body + b"\xfa\x07\1x", "runs/d/000000000002: it does not follow the entry before it", 1),
    (lambda body: b"\x08\x02\x12\x01x" + body[2:], "newer: runs/d: needs the word x", 4),
    (lambda body: b"\x08\x03" + body[2:], "newer: runs/d: is of version 3", 4),
    (lambda body: b"\x08\x82\x00" + body[2:], "a varint is padded", 1),
    (lambda body: b"\x08\x02" + body, "version stands twice", 1),
    (lambda body: b"\x08\x01" + body[2:], "is of version 1 in a store of 2", 1)])
def test_bodies(copy, change, words, status):
    seal(copy / "runs/d/000000000001", 2, change, True)
    told = refused(copy, words, status=status)
    assert ("d" in told["runs"]) == (status != 4)


def test_files_under_other_names(copy):
    """A manifest of another step, measures of another rank, a record of another store, a file of none."""
    first, second = sorted((copy / "runs/c/manifests").iterdir())[:2]
    shutil.copy(first, second)
    shutil.copy(copy / "stats/d/3.1/0", copy / "stats/d/3.1/1")
    flip(copy / "stats/d/4.3/0", 60)
    (copy / "packs/notes.txt").write_text("?")
    refused(copy, f"{second.name}: it has another digest than its name",
            "stats/d/3.1/1: it says another run, step or rank", "stats/d/4.3/0: the record does not hold",
            "packs/notes.txt: no file of a store has this name")
    shutil.rmtree(copy / "stats")
    own = reader.Store(copy).record("vckpt.store", 1, True)[1]["id"]
    rewrite_store(copy, lambda body: body.replace(own, bytes([own[0] ^ 1]) + own[1:]))
    assert all(run["steps"] == {}
               for run in refused(copy, "is of another store", "the record does not hold")["runs"].values())


LIES = {"nothing": (lambda f: None, None),
        "XXH3-128": (lambda f: twist(f.object(5), pieces_at(f.object(5)) + 32), "the XXH3-128 of a piece of"),
        "digest of a row": (lambda f: twist(f.object(5), 64 + 40), "has another digest than its pieces"),
        "dtype": (lambda f: twist(f.object(3), f.object(3).index(struct.pack("<BB", 12, 4)), 4),
                  "has another length|another dtype or shape"),
        "rank of a part": (lambda f: f.part.set(3, 1), "it says another rank"),
        "tensors": (lambda f: (f.manifest.set(14, 12), f.commit.set(6, 12)), "another number of tensors"),
        "bytes": (lambda f: (f.manifest.set(15, 9), f.commit.set(7, 9)), "the manifest says 9 bytes"),
        "step": (lambda f: f.manifest.set(5, 3), "differ in step")}


def pieces_at(chunk):
    rows, runs = struct.unpack_from("<II", chunk, 16)
    return 64 + 64 * rows + 24 * runs


def twist(data, at, by=1):
    data[at] ^= by


@pytest.mark.parametrize("lie", LIES)
def test_lies_with_all_sums_right(copy, lib, tmp_path, lie):
    change, words = LIES[lie]
    forge = Forge(lib, copy, "a")
    change(forge)
    forge.done(tmp_path / "scratch")
    if words:
        refused(copy, words)
    else:
        assert read(copy)[:2] == (0, "")
