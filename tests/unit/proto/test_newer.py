# SPDX-License-Identifier: Apache-2.0
"""Records of a later vckpt, made up: what a reader, a writer, the collector and verify do with them
(docs/format/versions.md). None of it is damage, every sentence names the word or the version, nothing that such a
record may reach is deleted, and all else goes on."""
import ctypes as c
import json
import shutil
import struct

import numpy
import pytest
from safetensors.numpy import save_file

from forgelib import CHUNK, LAYOUT, Forge, Message

DAMAGE, BEGIN, TRASH, HEARTBEAT, STATS = 10, 4, 8, 7, 9
WORD = b"shiny_2"
NEWER = 4                                                   # exit code of verify


def model(path, seed):
    rng = numpy.random.default_rng(seed)
    save_file({"v": rng.standard_normal((100, 500)).astype("f4"), "w": rng.standard_normal((64, 512)).astype("f4"),
               "s": numpy.arange(3, dtype="f4")}, path)
    return path


@pytest.fixture(scope="module")
def made(vckpt, tmp_path_factory):
    """A folder with the store of `steps` and its sources, which tests copy."""
    folder = tmp_path_factory.mktemp("made")
    vckpt("init", folder / "store")
    for run, seed in [("run", 1), ("run", 2), ("other", 3)]:
        vckpt("import", folder / "store", run, model(folder / f"{seed}.safetensors", seed), "-q", "--no-index")
    return folder


@pytest.fixture
def steps(made, tmp_path):
    """Two steps of one run, one of another."""
    return shutil.copytree(made, tmp_path, dirs_exist_ok=True) / "store"


def files(store):
    return {p.relative_to(store): p.read_bytes() for p in store.rglob("*") if p.is_file() and "index" not in p.parts}


def refused(done):
    """With a sentence that says why, and what to do."""
    return done.returncode == 1 and "newer vckpt" in done.stderr and "; update vckpt" in done.stderr


# ---- what makes a step newer ----

def with_word(message):
    message.set(2, WORD)


def behind_known_words(message):
    message.set(2, b"grid-2", b"list-2", WORD)


def with_version(message):
    message.set(1, 9)


def object_message(kind):
    def change(forge, how):
        for item in forge.objects:
            if item[0] == kind:
                m = Message(bytes(item[1]))
                how(m)
                item[1] = bytearray(m.encode())
    return change


def of_part(forge, how):
    how(forge.part)


def of_manifest(forge, how):
    how(forge.manifest)


def chunk_bytes(at, form, value):
    def change(forge, _):
        struct.pack_into(form, forge.object(CHUNK), at, value)
    return change


def chunk_codec(forge, _):
    chunk = forge.object(CHUNK)
    rows, runs = struct.unpack_from("<II", chunk, 16)
    struct.pack_into("<H", chunk, 64 + 64 * rows + 24 * runs + 56, 0x0702)


def layout_row(at, form, value):
    def change(forge, _):
        def how(m):
            rows = bytearray(m.get(7))
            struct.pack_into(form, rows, at, value)
            m.set(7, bytes(rows))
        object_message(LAYOUT)(forge, how)
    return change


STEPS = {
    "manifest, a word": (of_manifest, with_word, '"shiny_2"'),
    "manifest, a version": (of_manifest, with_version, "version 9"),
    "layout, a word": (object_message(LAYOUT), with_word, '"shiny_2"'),
    "layout, a version": (object_message(LAYOUT), with_version, "version 9"),
    "layout, a dtype": (layout_row(16, "<B", 77), None, "does not know"),
    "layout, a flag": (layout_row(18, "<H", 1 << 9), None, "does not know"),
    "part, a word": (of_part, with_word, '"shiny_2"'),
    "part, a version": (of_part, with_version, "version 9"),
    "chunk, a feature": (chunk_bytes(12, "<I", 0x40), None, "0x40"),
    "chunk, a version": (chunk_bytes(8, "<H", 5), None, "version 5"),
    "chunk, a codec": (chunk_codec, None, "codec"),
}


@pytest.fixture(params=STEPS, ids=[n.replace(", ", "-").replace(" ", "_") for n in STEPS])
def newer_step(request, vckpt, lib, steps, tmp_path):
    """The last step of `run`, and what the sentence has to name."""
    change, how, name = STEPS[request.param]
    forge = Forge(lib, steps, "run")
    change(forge, how)
    forge.done(tmp_path / "scratch")
    return steps, name, request.param


def test_a_newer_step_is_refused_by_name_and_alone(vckpt, newer_step, tmp_path):
    store, name, what = newer_step
    done = vckpt("cat", store, "run/1/model/v", check=False)
    assert refused(done) and name in done.stderr and "damaged" not in done.stderr, done.stderr
    assert {s["step"] for s in vckpt.json("ls", store, "run")["steps"]} == {0, 1}
    for good in ["run/0", "other/0"]:
        vckpt("info", store, good)
        vckpt("export", store, good, tmp_path / good.replace("/", "-"), "-q")


def test_verify_tells_a_newer_step_apart(vckpt, newer_step):
    store, name, what = newer_step
    for target in [[], ["run"], ["run/1"]]:
        done = vckpt("verify", store, *target, check=False)
        assert done.returncode == NEWER and "damage" not in done.stdout and "sound" not in done.stdout, (
            (target, done.stdout))
        lines = [line for line in done.stdout.splitlines() if line.startswith("newer: ")]
        assert lines and any("newer vckpt" in line and "; update vckpt" in line and name in line
                             and "run/step-00000001" in line for line in lines), done.stdout
        told = vckpt.json("verify", store, *target, check=False)
        assert told["faults"] == 0 and told["damage"] == [] and {d.get("step") for d in told["newer"]} == {1}
    done = vckpt("mend", store, check=False)
    assert refused(done) and "nothing is mended: " in done.stderr, done.stderr
    assert not list((store / "damaged").glob("*")) if (store / "damaged").exists() else True
    for target in ["run/0", "other"]:
        assert vckpt("verify", store, target).returncode == 0


def test_damage_beside_something_newer_is_damage(vckpt, newer_step):
    store, _, _ = newer_step
    pack = next(p for p in store.rglob("*-model.pack") if b"v" and p.stat().st_size > 200_000)
    data = bytearray(pack.read_bytes())
    data[5000] ^= 1
    pack.chmod(0o644)
    pack.write_bytes(data)
    told = vckpt.json("verify", store, check=False)
    assert vckpt("verify", store, check=False).returncode == 3 and told["faults"] == 1 and told["newer"]


def test_a_newer_step_keeps_what_it_may_reach(vckpt, newer_step, tmp_path):
    """The collector finds the packs through the manifest; one that it cannot read ends the collection."""
    store, name, what = newer_step
    vckpt("rm", store, "run/0", "-q")
    before = files(store)
    done = vckpt("gc", store, "--grace", "0", check=False)
    gone = set(before) - set(files(store))
    if what.startswith("manifest"):
        assert done.returncode == 1 and name in done.stderr and "nothing was deleted" in done.stderr and not gone
        return
    manifest = json.loads(vckpt("info", store, "other/0", "--json").stdout)
    assert done.returncode == 0 and gone and manifest
    assert vckpt("verify", store, check=False).returncode == NEWER
    forge_packs = {p.name.split("-")[0] for p in gone if p.suffix == ".pack"}
    kept = {p.name.split("-")[0] for p in store.rglob("*.pack")}
    assert len(forge_packs) == 1 and len(kept) == 2 and not forge_packs & kept


def test_a_newer_step_is_no_base_and_no_hindrance(vckpt, newer_step, tmp_path):
    """The save after it goes on, without what it cannot read."""
    store, _, what = newer_step
    assert vckpt.json("import", store, "run", tmp_path / "2.safetensors", "--no-index")["step"] == 2
    out = vckpt("cat", store, "run/2/2.safetensors", text=False).stdout
    assert out == (tmp_path / "2.safetensors").read_bytes()
    vckpt("index", store, "-q")


# ---- entries ----

def forge_entry(lib, store, run, change):
    forge = Forge(lib, store, run)
    change(forge.entry)
    forge.put_record(forge.entry_path, 2, forge.entry.encode())


@pytest.mark.parametrize("change,name", [(with_word, '"shiny_2"'), (with_version, "version 9"),
                                         (lambda m: m.set(2, b"list-2", WORD), '"shiny_2"')],
                         ids=["a_word", "a_version", "words"])
def test_an_entry_with_a_word_refuses_its_run(vckpt, lib, steps, tmp_path, change, name):
    forge_entry(lib, steps, "run", change)
    before = files(steps)
    for command in (["ls", steps, "run"], ["info", steps, "run/0"], ["rm", steps, "run/0"],
                    ["import", steps, "run", tmp_path / "1.safetensors"]):
        done = vckpt(*command, check=False)
        assert refused(done) and name in done.stderr and "damaged" not in done.stderr, done.stderr
    done = vckpt("ls", steps, check=False)
    assert done.returncode == 1 and "other" in done.stdout and name in done.stderr
    done = vckpt("gc", steps, "--grace", "0", check=False)
    assert done.returncode == 1 and name in done.stderr and "nothing was deleted" in done.stderr
    assert {p: b for p, b in files(steps).items() if p.parts[0] not in ("hosts", "incoming")} == before
    done = vckpt("verify", steps, check=False)
    assert (done.returncode == NEWER and name in done.stdout and "damage" not in done.stdout and
            done.stdout.count("newer: ") == 1), done.stdout
    vckpt("export", steps, "other/0", tmp_path / "out", "-q")
    vckpt("import", steps, "other", tmp_path / "1.safetensors", "-q", "--no-index")


def test_a_word_of_other_entries_is_damage(vckpt, lib, steps):
    """It is known, and this is none of the entries that have it."""
    forge_entry(lib, steps, "run", lambda m: m.set(2, b"list-2"))
    done = vckpt("ls", steps, "run", check=False)
    assert "newer" not in done.stderr and "entry skipped" in done.stderr
    assert {s["step"] for s in vckpt.json("ls", steps, "run")["steps"]} == {0}
    done = vckpt("verify", steps, check=False)
    assert done.returncode == 3 and "newer: " not in done.stdout and "runs/run/000000000001" in done.stdout


def test_an_entry_of_an_unknown_kind_is_passed_over(vckpt, lib, steps, tmp_path):
    """Readers do without it; writers of the run and the collector do not."""
    forge = Forge(lib, steps, "run")
    import hashlib
    entry = Message()
    for number, value in [(1, 2), (3, 77), (5, b"h"), (11, b"run"), (12, 2),
                          (13, hashlib.sha256(forge.record_body(forge.entry_path, 2, forge.id)).digest()), (50, b"?")]:
        entry.set(number, value)
    forge.put_record(forge.entry_path.with_name(f"{2:012d}"), 2, entry.encode())
    assert {s["step"] for s in vckpt.json("ls", steps, "run")["steps"]} == {0, 1}
    vckpt("cat", steps, "run/1/model/v", text=False)
    before = files(steps)
    for command in (["rm", steps, "run/0"], ["import", steps, "run", tmp_path / "1.safetensors", "--no-index"],
                    ["gc", steps, "--grace", "0"]):
        done = vckpt(*command, check=False)
        assert refused(done) and "kind (77)" in done.stderr and "damaged" not in done.stderr, done.stderr
    assert "nothing was deleted" in done.stderr
    assert {p: b for p, b in files(steps).items() if p.parts[0] not in ("hosts", "incoming")} == before
    for target in [[], ["run"]]:
        told = vckpt.json("verify", steps, *target, check=False)
        assert told["faults"] == 0 and len(told["newer"]) == 1 and told["newer"][0]["file"] == "runs/run/000000000002"
    assert vckpt("verify", steps, "run/0", check=False).returncode in (0, NEWER)
    vckpt("import", steps, "other", tmp_path / "1.safetensors", "-q", "--no-index")


# ---- the store, packs ----

def put_single(forge, path, kind, message):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    forge.put_record(path, kind, message.encode())


@pytest.mark.parametrize("change,name", [(with_word, '"shiny_2"'), (with_version, "version 9"),
                                         (behind_known_words, 'feature "shiny_2", which')],
                         ids=["a_word", "a_version", "words"])
def test_a_newer_store_is_refused(vckpt, lib, steps, change, name):
    forge = Forge(lib, steps, "run")
    m = Message(forge.record_body(steps / "vckpt.store", 1, None))
    change(m)
    forge.id = None
    forge.put_record(steps / "vckpt.store", 1, m.encode())
    for command in ("ls", "verify", "gc"):
        done = vckpt(command, steps, check=False)
        assert refused(done) and name in done.stderr, done.stderr


@pytest.mark.parametrize("at,form,value,name", [(8, "<H", 3, "version 3"), (12, "<I", 8, "0x8")],
                         ids=["a_version", "a_feature"])
def test_a_newer_pack_hides_what_lies_in_it(vckpt, lib, steps, at, form, value, name, tmp_path):
    lib.base_xxh64_of.restype = c.c_uint64
    forge = Forge(lib, steps, "run")
    pack = next(steps.rglob(f"{forge.manifest.get(4).decode()}-0-model.pack"))
    data = bytearray(pack.read_bytes())
    struct.pack_into(form, data, at, value)
    struct.pack_into("<Q", data, 4088, lib.base_xxh64_of(c.c_uint64(0), bytes(data[:4088]), c.c_size_t(4088)))
    pack.chmod(0o644)
    pack.write_bytes(data)
    done = vckpt("cat", steps, "run/1/model/v", check=False)
    assert refused(done) and name in done.stderr
    vckpt("info", steps, "run/1")
    for target in [[], ["run/1"]]:
        done = vckpt("verify", steps, *target, check=False)
        assert done.returncode == NEWER and name in done.stdout and "damage" not in done.stdout, done.stdout
    assert not (steps / "damaged").exists() or not any((steps / "damaged").iterdir())
    vckpt("gc", steps, "--grace", "0")
    assert pack.exists()
    assert vckpt.json("import", steps, "run", tmp_path / "2.safetensors", "--no-index")["step"] == 2


# ---- small records ----

def test_a_newer_mark_stays_with_what_it_marks(vckpt, lib, steps):
    forge = Forge(lib, steps, "run")
    vckpt("rm", steps, "run/1", "-q")
    pack = next(steps.rglob(f"{forge.manifest.get(4).decode()}-0-model.pack"))
    mark = steps / "trash" / pack.stem
    m = Message()
    for number, value in [(1, 2), (2, WORD), (3, str(pack.relative_to(steps)).encode())]:
        m.set(number, value)
    put_single(forge, mark, TRASH, m)
    was = mark.read_bytes()
    done = vckpt("gc", steps, "--grace", "0", "-v")
    assert pack.exists() and mark.read_bytes() == was, done.stdout
    assert vckpt("verify", steps, check=False).returncode == NEWER
    m.set(2)
    put_single(forge, mark, TRASH, m)
    vckpt("gc", steps, "--grace", "0")
    assert not pack.exists() and not mark.exists()


def test_a_newer_note_is_left_and_honoured(vckpt, lib, steps, tmp_path):
    """It stands for its whole pack: the same data is stored anew; verify leaves it."""
    forge = Forge(lib, steps, "run")
    pack = next(steps.rglob(f"{forge.manifest.get(4).decode()}-0-model.pack"))
    m = Message()
    for number, value in [(1, 2), (2, WORD), (3, pack.stem.encode()), (4, struct.pack("<QQ", 4096, 1))]:
        m.set(number, value)
    note = steps / "damaged" / pack.stem
    put_single(forge, note, DAMAGE, m)
    was = note.read_bytes()
    assert vckpt("verify", steps, check=False).returncode == NEWER and note.read_bytes() == was
    again = vckpt.json("import", steps, "run", tmp_path / "2.safetensors", "--no-index")
    assert again["piece_bytes_new"] > 100_000


def test_newer_measures_are_left_out(vckpt, lib, steps):
    forge = Forge(lib, steps, "run")
    m = Message()
    for number, value in [(1, 2), (2, WORD), (3, b"run"), (4, forge.manifest.get(4)), (5, 1), (7, 1), (8, b"h"),
                          (23, 1)]:
        m.set(number, value)
    put_single(forge, steps / "stats/run/1.1/0", STATS, m)
    done = vckpt("stalls", steps, "run/1", check=False)
    assert done.returncode == 0 and '"shiny_2"' in done.stderr, (done.stdout, done.stderr)
    assert vckpt("verify", steps, check=False).returncode == NEWER


@pytest.mark.parametrize("kind,last,fields", [
    (BEGIN, "begin", [(3, b"run"), (4, b"00000000000000aa-0"), (5, 9), (6, 1), (7, 1)]),
    (5, "base.0", [(3, b"")])], ids=["begin", "base"])
def test_what_a_newer_attempt_needs_is_not_known(vckpt, lib, steps, kind, last, fields):
    """Of an attempt that lives: its heartbeat is of this process."""
    import os
    forge = Forge(lib, steps, "run")
    space = heartbeat_space()
    beat = Message()
    start = int(open("/proc/self/stat").read().rsplit(")", 1)[1].split()[19])
    for number, value in [(1, 2), (3, b"00000000000000aa"), (4, b"h"), (5, b"run"), (6, space), (7, 0),
                          (9, struct.pack("<IIQQ", 0, 0, os.getpid(), start))]:
        beat.set(number, value)
    put_single(forge, steps / "hosts/00000000000000aa.h.0", HEARTBEAT, beat)
    m = Message()
    for number, value in [(1, 2), (2, WORD), *fields]:
        m.set(number, value)
    put_single(forge, steps / "incoming/run/00000000000000aa-0" / last, kind, m)
    if last != "begin":
        b = Message()
        for number, value in [(1, 2), (3, b"run"), (4, b"00000000000000aa-0"), (5, 9), (6, 1), (7, 1)]:
            b.set(number, value)
        put_single(forge, steps / "incoming/run/00000000000000aa-0/begin", BEGIN, b)
    vckpt("rm", steps, "run/0", "-q")
    before = files(steps)
    done = vckpt("gc", steps, "--grace", "3600", check=False)
    assert done.returncode == 1 and '"shiny_2"' in done.stderr and "nothing was deleted" in done.stderr, done.stderr
    assert files(steps) == before


def heartbeat_space():
    import hashlib
    import os
    import uuid
    boot = open("/proc/sys/kernel/random/boot_id").read().strip()
    return str(
        uuid.UUID(bytes=hashlib.sha256(f"{boot} {os.readlink('/proc/self/ns/pid')}".encode()).digest()[:16])).encode()


def test_a_newer_heartbeat_is_watched_by_its_name(vckpt, lib, steps, tmp_path):
    """One that cannot be read is neither dead nor alive: it is watched, and its launch is not aborted while it
    moves."""
    forge = Forge(lib, steps, "run")
    m = Message()
    for number, value in [(1, 2), (2, WORD), (3, b"00000000000000aa"), (4, b"h"), (5, b"run")]:
        m.set(number, value)
    put_single(forge, steps / "hosts/00000000000000aa.h.3", HEARTBEAT, m)
    assert vckpt("verify", steps, check=False).returncode == NEWER
    done = vckpt("import", steps, "run", tmp_path / "1.safetensors", "--step", "7", "--no-index", check=False)
    assert done.returncode == 0, done.stderr
