# SPDX-License-Identifier: Apache-2.0
"""vckpt mend: packs. What a damaged or missing pack held comes back from wherever it lies, byte for byte; the rest is
named."""
import os
import random
import shutil
import subprocess

import numpy
import pytest
from safetensors.numpy import load_file, save_file

from test_mend import lines, mend, spoil, steps, tree


@pytest.fixture(scope="module")
def base(vckpt, tmp_path_factory):
    """A run of three steps with frozen, encoded and changing tensors, blobs; and a copy of the whole store."""
    tmp = tmp_path_factory.mktemp("base")
    rng = numpy.random.default_rng(8)
    source = tmp / "source"
    source.mkdir()
    frozen = rng.integers(0, 1 << 16, (700, 700), dtype="u2")
    for step in range(3):
        save_file({"frozen": frozen, "w": rng.integers(0, 1 << 16, (300, 300), dtype="u2"),
                   "e": (rng.standard_normal((300, 400)) * 0.02).astype("f4")}, source / "model.safetensors")
        (source / "config.json").write_text("{}" * 20000)
        (source / "blob").write_bytes(rng.bytes(40000))
        if step == 0:
            vckpt("init", tmp / "store", "--no-reserve")
        vckpt("import", tmp / "store", "run", source, "-q")
        shutil.copytree(source, tmp / f"source{step}")
    return tmp


@pytest.fixture
def store(base, tmp_path):
    shutil.copytree(base / "store", tmp_path / "store")
    return tmp_path / "store"


@pytest.fixture
def copy(base, tmp_path):
    shutil.copytree(base / "store", tmp_path / "copy")
    return tmp_path / "copy"


@pytest.fixture
def other(vckpt, base, tmp_path):
    """Another store that holds the same steps."""
    vckpt("init", tmp_path / "other", "--no-reserve")
    for step in range(3):
        vckpt("import", tmp_path / "other", "x", base / f"source{step}", "-q")
    return tmp_path / "other"


def packs(store, kind="model"):
    return sorted(store.rglob(f"*-{kind}.pack"), key=lambda p: p.stat().st_size)


def goes_on(vckpt, store, base, tmp_path, shown=(0, 1, 2)):
    assert vckpt.json("verify", store)["faults"] == 0 and not list((store / "damaged").glob("*"))
    for step in shown:
        vckpt("export", store, f"run/{step}", tmp_path / f"out{step}")
        want, have = (load_file(d / "model.safetensors") for d in (base / f"source{step}", tmp_path / f"out{step}"))
        assert all((want[k] == have[k]).all() for k in want)
    vckpt("import", store, "run", base / "source0", "-q")
    vckpt("gc", store, "--grace", "0")
    assert vckpt.json("verify", store)["faults"] == 0


@pytest.mark.parametrize("where", ["same store", "copy", "other"])
def test_an_object(vckpt, base, store, copy, other, tmp_path, where):
    """A frozen tensor's bytes: from another run that stored them again, a copy, a store that holds the same."""
    words = [] if where == "same store" else ["--from", copy if where == "copy" else other]
    pack = packs(store)[-1]
    if where == "same store":   # an import without the index and with a note stores it again
        spoil(pack, range(600_000, 600_010))
        vckpt("verify", store, check=False)
        vckpt("import", store, "later", base / "source2", "-q")
        assert vckpt.json("verify", store, "later/0")["faults"] == 0
    else:
        spoil(pack, range(600_000, 600_010))
    good = (copy / pack.relative_to(store)).read_bytes()
    before = tree(store)
    out = mend(vckpt, store, "-n", *words)
    assert tree(store) == before and out["done"] == 1 and not lines(out, "lost")
    out = mend(vckpt, store, *words)
    assert pack.read_bytes() == good and (out["lost"], out["left"]) == (0, 0)
    goes_on(vckpt, store, base, tmp_path)


@pytest.mark.parametrize("kind", ["model", "meta", "blobs"])
@pytest.mark.parametrize("how", ["missing", "head", "truncated", "empty", "garbage", "longer", "tail"])
def test_whole_packs_from_a_copy(vckpt, base, store, copy, tmp_path, kind, how):
    pack = packs(store, kind)[-1]
    data = pack.read_bytes()
    pack.unlink()
    if how != "missing":
        pack.write_bytes({"head": b"\1" * 100 + data[100:], "truncated": data[:len(data) // 2], "empty": b"",
                          "garbage": random.randbytes(len(data)),
                          "longer": data + b"\1" * 1000, "tail": data[:-70] + b"\1" * 70}[how])
    out = mend(vckpt, store, "--from", copy)
    assert pack.read_bytes() == data and (out["lost"], out["left"]) == (0, 0), out
    goes_on(vckpt, store, base, tmp_path)


@pytest.mark.parametrize("kind", ["model", "meta", "blobs"])
@pytest.mark.parametrize("how", ["footer", "one entry", "tail", "head", "padding", "longer"])
def test_what_needs_no_other_place(vckpt, base, store, tmp_path, kind, how):
    """Footer, tail, head and padding follow from the objects."""
    pack = packs(store, kind)[-1]
    data = pack.read_bytes()
    tail, spots = len(data) - 128, None
    footer = int.from_bytes(data[tail + 8:tail + 16], "little")
    if how == "padding":
        spots = [i for i in range(4096, footer) if data[i] == 0 and data[i - 8:i + 8] == bytes(16)][-1:]
        if not spots:
            pytest.skip("no padding")
    spots = spots or {"footer": range(footer, tail), "one entry": range(footer + 5, footer + 9),
                      "tail": range(tail, tail + 128), "head": range(64)}.get(how)
    if how == "longer":
        pack.chmod(0o600)
        pack.write_bytes(data + b"x" * 5000)
    else:
        spoil(pack, spots)
    out = mend(vckpt, store)
    assert pack.read_bytes() == data and (out["lost"], out["left"]) == (0, 0), out
    goes_on(vckpt, store, base, tmp_path)


def test_checks_of_raw_objects(vckpt, base, store, tmp_path):
    """The bytes are right and hash to the digest: their checks are made again."""
    pack = packs(store)[-1]
    data = pack.read_bytes()
    footer = int.from_bytes(data[-120:-112], "little")
    raw = [e for e in (data[i:i + 80] for i in range(footer, len(data) - 128, 80)) if e[64] == 0]
    checks = int.from_bytes(raw[0][40:48], "little")
    spoil(pack, range(checks, checks + 4))
    mend(vckpt, store)
    assert pack.read_bytes() == data
    goes_on(vckpt, store, base, tmp_path)


def test_what_cannot_be_had_is_named(vckpt, base, store, tmp_path):
    """It stays as it is, noted; the rest is read; the next save stores it anew; and mending again says the same."""
    pack = packs(store)[-1]
    spoil(pack, range(600_000, 600_010))
    before = pack.read_bytes()
    out = mend(vckpt, store, code=3)
    lost = lines(out, "lost")
    assert {(x["run"], x["step"], x["component"], x["tensor"]) for x in lost} == {("run", s, "model", "frozen")
                                                                                  for s in range(3)}
    assert out["done"] == 0 and out["left"] == 1 and pack.read_bytes() == before and list((store / "damaged").iterdir())
    assert mend(vckpt, store, code=3)["lost"] == out["lost"]
    vckpt("cat", store, "run/0/config.json")
    vckpt("import", store, "run", base / "source2", "-q")
    assert vckpt.json("verify", store, "run/3")["faults"] == 0
    mend(vckpt, store)                      # the new save holds what was lost
    goes_on(vckpt, store, base, tmp_path)


def test_a_missing_pack_of_which_a_part_can_be_had(vckpt, base, store, tmp_path):
    """Step 0's pack: the frozen tensor lies in a later run, its own tensors nowhere."""
    pack = packs(store)[-1]
    size = pack.stat().st_size
    (store / "damaged").mkdir()
    (store / "damaged" / pack.stem).write_bytes(b"")    # stands for all of it
    vckpt("import", store, "later", base / "source2", "-q")
    pack.unlink()
    out = mend(vckpt, store, code=3)
    assert pack.stat().st_size == size and {(x["step"], x["tensor"])
                                            for x in lines(out, "lost")} == {(0, "w"), (0, "e")}, out
    vckpt("export", store, "run/1", tmp_path / "one")
    vckpt("rm", store, "run/0")
    vckpt("gc", store, "--grace", "0")
    assert load_file(tmp_path / "one/model.safetensors").keys() == {"frozen", "w", "e"}


@pytest.mark.parametrize("dtype", ["u1", "u2", "u8"])
def test_what_is_encoded_otherwise_elsewhere(vckpt, tmp_path, dtype):
    """The same bytes as items of another width: decoded there, encoded here as they were."""
    bytes_ = (numpy.random.default_rng(2).standard_normal((300, 400)) * 0.02).astype("f4")
    save_file({"t": bytes_}, tmp_path / "a.safetensors")
    save_file({"t": bytes_.view(dtype)}, tmp_path / "b.safetensors")
    for name in "ab":
        vckpt("init", tmp_path / name)
        vckpt("import", tmp_path / name, "r", tmp_path / f"{name}.safetensors", "-q")
    codec, there = (vckpt.json("info", tmp_path / name, "r/0")["codecs"][0]["codec"] for name in "ab")
    assert codec == "lz4+bitplane32" and there != codec
    pack = packs(tmp_path / "a")[-1]
    good = pack.read_bytes()
    spoil(pack, range(6000, 6010))
    mend(vckpt, tmp_path / "a", "--from", tmp_path / "b")
    assert pack.read_bytes() == good


def test_a_footer_with_a_hole(vckpt, base, store, other, tmp_path):
    """Step 0 is gone, and with it what names its own tensors in the pack; their entries in the footer are damaged, too.
    The footer cannot be made again, but the frozen tensor can; what nobody knows stays as it is."""
    vckpt("rm", store, "run/0")
    pack = packs(store)[-1]
    data = pack.read_bytes()
    footer = int.from_bytes(data[-120:-112], "little")
    entries = [(i, int.from_bytes(data[i + 32:i + 40], "little")) for i in range(footer, len(data) - 128, 80)]
    shown = [i for i, at in entries if 500_000 < at < 1_300_000]
    spoil(pack, [i for i, _ in entries if i not in shown])
    spoil(pack, range(600_000, 600_010))
    out = mend(vckpt, store, "--from", other, code=3)
    assert "its footer stays damaged" in lines(out, "mend")[0]["text"] and out["left"] == 1 and not lines(out, "lost")
    now = pack.read_bytes()
    assert now[:footer] == data[:footer] and len(now) == len(data)
    for step in (1, 2):
        vckpt("export", store, f"run/{step}", tmp_path / f"out{step}")


def test_a_pack_that_cannot_be_read_for_a_moment(vckpt, build, store, copy, tmp_path):
    """What gives an error instead of bytes may be right: nothing of it is written over."""
    pack = packs(store)[-1]
    spoil(pack, range(600_000, 600_010))
    before = pack.read_bytes()
    for n in (1, 5, 20, 60):
        env = dict(os.environ, LD_PRELOAD=str(build / "tests/libinterpose.so"),
                   VCKPT_INTERPOSE=f"root={store},reads=1,calls=pread64+pread,path={pack.name},do=fail,errno=5,at={n},last=100000")
        done = subprocess.run([vckpt.path, "mend", store], capture_output=True, text=True, env=env, timeout=120)
        assert done.returncode in (1, 3), done
        now = pack.read_bytes()
        assert now == before


def test_everything_at_once(vckpt, base, store, copy, tmp_path):
    """Whatever rots, a copy of the store gives it back: every pack and every record in turn, all of them together."""
    good = tree(store)
    rng = random.Random(5)
    for p in sorted(good):
        if p.parts[0] in ("packs", "runs"):
            n = len(good[p])
            spoil(store / p, rng.sample(range(n), min(n, 20)))
    mend(vckpt, store, "--from", copy)
    now = tree(store)
    assert {p: b for p, b in now.items() if p.parts[0] in ("packs", "runs")} == {p: b for p, b in good.items()
                                                                                 if p.parts[0] in ("packs", "runs")}
    goes_on(vckpt, store, base, tmp_path)


def faults(vckpt, store):
    return vckpt.json("verify", store, "--no-notes", check=False)["faults"]


@pytest.mark.parametrize("what", ["kill", "eio"])
def test_interrupted_at_every_call(vckpt, build, base, store, copy, tmp_path, scale, what):
    """Killed before, or failed at, each call that changes the store: it is no worse, and mending again ends."""
    good = tree(store)
    for p in (packs(store)[-1], packs(store, "meta")[0], store / "runs/run/000000000001"):
        spoil(p, range(60, 64) if "runs" in p.parts else range(5000, 5004))
    spoil(store / "runs/run/000000000002")
    (store / "runs/run/manifests" / vckpt.json("info", copy, "run/0")["manifest"]).unlink()
    worst = faults(vckpt, store)

    def run(path, words):
        env = dict(os.environ, VCKPT_INTERPOSE=f"root={path}," + words, LD_PRELOAD=str(build / "tests/libinterpose.so"))
        return subprocess.run([vckpt.path, "mend", path, "--from", copy], capture_output=True, text=True, env=env,
                              timeout=120)
    whole = tmp_path / "whole"
    shutil.copytree(store, whole)
    assert run(whole, f"list={tmp_path}/calls").returncode == 0
    calls = len((tmp_path / "calls").read_text().splitlines())
    assert calls > 10
    rng, ended = random.Random(3), 0
    for n in sorted(rng.sample(range(1, calls + 1), min(calls, scale(10, calls)))):
        path = tmp_path / f"at{n}"
        shutil.copytree(store, path)
        done = run(path, f"do=kill,at={n}" if what == "kill" else f"do=fail,errno=5,at={n}")
        ended += done.returncode != 0
        assert faults(vckpt, path) <= worst, n
        again = vckpt("mend", path, "--from", copy)
        assert again.returncode == 0 and faults(vckpt, path) == 0
        assert steps(vckpt, path) == [0, 1, 2]
        now = tree(path)
        assert all(now[p] == b for p, b in good.items() if p.parts[0] in ("packs", "runs")), n
        shutil.rmtree(path)
    assert ended > 3


@pytest.mark.parametrize("kind", ["model", "meta"])
@pytest.mark.parametrize("how", ["exchanged", "copied over"])
def test_a_pack_under_another_name_is_left(vckpt, base, store, copy, tmp_path, kind, how):
    """What it holds may lie nowhere else: a new head in front of it would hide that for good."""
    a, b = packs(store, kind)[:2]
    good = a.read_bytes(), b.read_bytes()
    [p.chmod(0o600) for p in (a, b)]
    a.write_bytes(good[1])
    if how == "exchanged":
        b.write_bytes(good[0])
    before = a.read_bytes(), b.read_bytes()
    out = mend(vckpt, store, code=3)
    assert (a.read_bytes(), b.read_bytes()) == before
    said = [line for line in lines(out, "left") if f"this is pack {b.stem} under another pack's name" in line["text"]]
    assert said[0]["file"] == str(a.relative_to(store)) and str(b.relative_to(store)) in said[0]["text"]
    if how == "exchanged":
        a.write_bytes(good[0])
        b.write_bytes(good[1])
        assert mend(vckpt, store)["left"] == 0
    else:   # the other one is whole, so this one may go
        a.unlink()
        assert mend(vckpt, store, "--from", copy)["left"] == 0
    assert (a.read_bytes(), b.read_bytes()) == good
    goes_on(vckpt, store, base, tmp_path)
