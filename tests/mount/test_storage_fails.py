# SPDX-License-Identifier: Apache-2.0
"""Each call by which the server looks at the store fails in turn (EIO, EINTR), or reads less than asked for, while a
step is looked up, listed and read for the first time: the reader gets the right bytes or an error, never others, and
does not wait for long; then the same step is read without an error."""
import errno
import os
import threading

import numpy as np
import pytest

from faults import Faults

from .conftest import Tensor, weights, write_safetensors

STEPS = 24
KINDS = {"EIO": f"do=fail,errno={errno.EIO}", "EINTR": f"do=fail,errno={errno.EINTR}", "short": "do=short"}
LIMIT_S = 20        # many times of what the mount waits for a store that fails (3 s)
MAY_BE = (errno.EIO,)


@pytest.fixture(scope="module")
def many(vckpt, tmp_path_factory):
    """A store with steps that share nothing, and what is in the files of each."""
    folder, rng, files = tmp_path_factory.mktemp("fails"), np.random.default_rng(3), {}
    vckpt("init", folder / "store")
    for step in range(1, STEPS + 1):
        source = folder / "source"
        source.mkdir(exist_ok=True)
        whole = write_safetensors(source / "model.safetensors", {
            "raw": Tensor("U8", (150_000 + step,), rng.bytes(150_000 + step)),
            "w": Tensor("BF16", (150, 301), weights(rng, 150 * 301))})
        (source / "blob.bin").write_bytes(rng.bytes(30_000))
        vckpt("import", folder / "store", f"a/{step}", source, "--no-index")
        files[step] = {"model.safetensors": whole, "blob.bin": (source / "blob.bin").read_bytes()}
    return folder / "store", files


@pytest.fixture
def faulty(mount, many, build, tmp_path, monkeypatch):
    """faulty(kind, option...): a mount of it whose calls can be spoiled so, and Faults."""
    def make(kind, *options):
        faults = Faults(tmp_path / "memory")
        with monkeypatch.context() as patch:
            patch.setenv("VCKPT_INTERPOSE", f"root={os.path.realpath(many[0])},reads=1,memory={tmp_path / 'memory'},"
                                            f"{KINDS[kind]}")
            patch.setenv("LD_PRELOAD", str(build / "tests/libinterpose.so"))
            patch.setenv("ASAN_OPTIONS",
                         os.environ.get("ASAN_OPTIONS", "") + ":verify_asan_link_order=0:detect_leaks=0")
            return mount(many[0], *options), faults
    return make


def look(step, want):
    """As a program that copies the step and believes nothing."""
    assert sorted(os.listdir(step.parent.parent)) == [".vckpt", "a"]
    assert set(os.listdir(step.parent)) == {"latest", *(f"step-{number:08}" for number in range(1, STEPS + 1))}
    names = sorted(os.listdir(step))
    assert names == ["blob.bin", "manifest.json", "model", "model.safetensors"], names
    assert sorted(os.listdir(step / "model")) == ["raw.npy", "w.npy"]
    for name, data in want.items():
        path = step / name
        assert os.stat(path).st_size == len(data)
        assert os.stat(path).st_mode & 0o777 == 0o644 and os.getxattr(path, "user.vckpt.serving")
        with open(path, "rb", buffering=0) as f:
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            assert os.pread(f.fileno(), 100, 7) == data[7:107]
            found = b""
            while part := f.read(50_000):
                found += part
            assert found == data
    assert (step / "manifest.json").read_bytes().startswith(b"{")
    assert os.listxattr(step / "model" / "w.npy")


def outcome(step, want):
    """None, or the error that it gave; fails where it hangs or gets what is not so."""
    ended = []

    def one():
        try:
            ended.append(look(step, want))
        except (OSError, AssertionError) as error:
            ended.append(error)
    thread = threading.Thread(target=one, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    assert ended, "it hangs"
    if isinstance(ended[0], AssertionError):
        raise ended[0]
    return ended[0]


def each_call(m, faults, many, numbers):
    """Spoils call n of a first look at a step, for each n; the steps are looked at in turn. {n: its error}"""
    found = {}
    for n in numbers:
        number = n % STEPS + 1
        step, want = m / "a" / f"step-{number:08}", many[1][number]
        faults.at(n)
        found[n] = outcome(step, want)
        made = faults.calls()
        faults.at(0)
        assert found[n] is None or found[n].errno in MAY_BE, (n, found[n])
        look(step, want)
        if made < n:
            return found
    return found


@pytest.mark.parametrize("tier", ["cached", "passthrough"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_call_in_turn(faulty, many, kind, tier):
    m, faults = faulty(kind, f"tier={tier}", "refresh=0.01")
    found = each_call(m, faults, many, range(1, 300))
    errors = [n for n, error in found.items() if error]
    print(len(found), "calls, errors at", errors)
    assert 10 < len(found) < 299 and bool(errors) == (kind == "EIO")


def test_each_call_of_a_first_look(faulty, many, scale, rng):
    """Of a new mount: the run's list, whose it is."""
    for n in sorted(rng.sample(range(1, 40), scale(8, 39))):
        m, faults = faulty("EIO")
        each_call(m, faults, many, [n])
        m.umount()


@pytest.mark.parametrize("before", [True, pytest.param(False, marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", ["EIO", "short"])
def test_all_calls(faulty, many, kind, before):
    """before: the mount has shown a step already, else it waits for the list first."""
    m, faults = faulty(kind)
    if before:
        look(m / "a" / "step-00000001", many[1][1])
    faults.at(1, 1 << 62)
    error = outcome(m / "a" / "step-00000002", many[1][2])
    faults.at(0)
    assert (error and error.errno == errno.EIO) if kind == "EIO" else error is None
    look(m / "a" / "step-00000002", many[1][2])
