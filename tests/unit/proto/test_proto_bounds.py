# SPDX-License-Identifier: Apache-2.0
"""What decoding a body takes in memory goes by its length, and what cannot be honest is refused before any is taken."""
import subprocess
import sys

import numpy
import pytest
from safetensors.numpy import save_file

from forgelib import PART, Forge
from protolib import EFORMAT, EVERSION, VERSION, Proto, field, parse, samples, unparse

RECORDS = ["store", "entry", "layout", "part", "announcement", "manifest", "begin", "base", "heartbeat", "trash",
           "stats", "damage"]
BIG = 16 << 20  # bytes of a bomb here; an encoded object may have 64 MiB

# Decodes the bytes of stdin as each of argv's records; prints how far the peak of memory rose, in bytes.
CHILD = """
import ctypes, resource, sys
lib = ctypes.CDLL(sys.argv[1])
data, message = sys.stdin.buffer.read(), ctypes.create_string_buffer(4096)
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
for name in sys.argv[2:]:
    before = peak()
    r = getattr(lib, f"proto_{name}_decode")(data, ctypes.c_size_t(len(data)), message)
    assert r < 0, (name, r)
    print(name, r, peak() - before)
"""


def rises(lib, data, *names):
    done = subprocess.run([sys.executable, "-c", CHILD, lib._name, *names], input=data, stdout=subprocess.PIPE,
                          check=True, timeout=60)
    return {name: (int(r), int(rise)) for name, r, rise in (line.split() for line in done.stdout.decode().splitlines())}


@pytest.fixture(scope="module")
def proto(lib):
    return Proto(lib)


@pytest.fixture(scope="module")
def bodies(proto):
    return samples(proto)


HEAD = field(1, VERSION)
BOMBS = {
    "unknown numbers": (HEAD, field(1000, 1), RECORDS),
    "unknown texts": (HEAD, field(1000, b""), RECORDS),
    "zeros": (b"", bytes(2), RECORDS),
    "empty blobs": (HEAD, field(9, b""), ["part"]),
    "empty timings": (HEAD, field(10, b""), ["part"]),
    "words": (HEAD, field(2, b""), RECORDS),
    "empty meshes": (HEAD, field(10, b""), ["layout"]),
    "empty placements": (HEAD, field(11, b""), ["layout"]),
    "empty hosts": (HEAD, field(10, b""), ["manifest"]),
    "empty headers": (HEAD, field(11, b""), ["announcement"]),
    "empty bases": (HEAD, field(10, b""), ["begin"]),
    "empty marks": (HEAD, field(5, b""), ["trash"]),
}


@pytest.mark.parametrize("what", BOMBS)
def test_bombs(lib, what):
    """Tiny fields, millions of them: protobuf-c would take 100 bytes and more for each."""
    head, one, names = BOMBS[what]
    for name, (r, rise) in rises(lib, head + one * (BIG // len(one)), *names).items():
        assert r in (EFORMAT, EVERSION) and rise < 4 << 20, (name, r, rise)


def test_unknown_fields_have_a_limit(proto, bodies):
    for name in RECORDS:
        for body in bodies[name]:
            assert proto.again(name, body + field(1000, 1) * 1024) == body
            assert proto.again(name, body + field(1000, 1) * (1100 + len(body) // 60)) == EFORMAT
    part = bodies["part"][0]
    assert proto.again("part", part + field(1000, bytes(100)) * 5000) == part  # few for so many bytes


def test_a_bomb_of_a_later_version_is_newer(proto, bodies):
    """It says so, whatever it is: nobody takes it for damage."""
    for name in RECORDS:
        fields = parse(bodies[name][0])
        bomb = field(1000, 1) * 100000
        assert proto.decode(name, unparse([(1, 0, VERSION + 1)] + fields[1:]) + bomb) == EVERSION
        assert proto.decode(name, unparse([fields[0], (2, 2, b"shiny")] + fields[1:]) + bomb) == EVERSION


# Runs argv; its peak of memory in bytes, and its status. (Of a large process like pytest's a child would inherit it.)
RUN = """
import os, subprocess, sys
p = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
_, status, usage = os.wait4(p.pid, 0)
print(os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024)
"""


def command_peak(*words):
    done = subprocess.run([sys.executable, "-c", RUN, *map(str, words)], stdout=subprocess.PIPE, check=True, timeout=60)
    return map(int, done.stdout.split())


class Encoded(Forge):
    """A forge that stores the part encoded, as a writer may."""

    def append(self, w, data, kind):
        if kind == PART:
            w.append(data, 1, kind)
        else:
            w.append_raw(data, kind)


def test_a_small_part_that_is_large(vckpt, lib, store, tmp_path):
    """60 MiB of unknown fields are 0.3 MB in a pack. Commands refuse the step, in the memory that the bytes take."""
    save_file({"w": numpy.arange(5000, dtype="u4")}, tmp_path / "a.safetensors")
    vckpt("import", store, "run", tmp_path / "a.safetensors", "-q")
    forge = Encoded(lib, store, "run")
    body = forge.part.encode
    forge.part.encode = lambda: body() + field(1000, 1) * ((60 << 20) // 3)
    forge.done(tmp_path / "scratch")
    assert forge.pack_path.stat().st_size < 1 << 20
    for words in (["verify", store], ["cat", store, "run/0/a/w.npy"], ["gc", store]):
        code, peak = command_peak(vckpt.path, *words)
        assert (code != 0 or words[0] == "gc") and peak < 200 << 20, (words[0], code, peak)
