# SPDX-License-Identifier: Apache-2.0
"""Each call by which a load looks at the store fails, or reads less than was asked for: the load reads on, or gives an
error that names a file; what it delivers is right; all ranks of an exchange end alike; the next load works."""
import errno
import json
import os
import re
import subprocess
import sys

import pytest

import vckpt
from faults import Faults
from loading import tensors

PLACES = re.compile(
    r"run/1: .*(packs?[/ ][\w/.-]+|manifests/\w+)|runs/run/\d+|its list|vckpt.store|/store|rank \d has left")


@pytest.fixture(scope="module")
def store(tmp_path_factory, seed):
    path = tmp_path_factory.mktemp("loads") / "store"
    vckpt.save(path / "run", {"model": tensors(seed), "epoch": 7}, step=1, blobs={"note": b"n" * 40000})
    vckpt.close()
    return path


def loads(build, store, tmp_path, kind, seed, cases, fault):
    preload = f"{os.environ.get('VCKPT_PRELOAD', '')} {build}/tests/libinterpose.so".strip()
    Faults(tmp_path / "memory").at(0)
    done = subprocess.run([sys.executable, "-m", "loading", build, store, kind, str(seed), str(cases),
                           tmp_path / "memory"], capture_output=True, text=True, timeout=900,
                          env={**os.environ, "LD_PRELOAD": preload, "XDG_CACHE_HOME": str(tmp_path), "VCKPT_INTERPOSE":
                               f"root={store},reads=1,memory={tmp_path / 'memory'},{fault}"})
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("fault", ["do=short", f"do=fail,errno={errno.EINTR}"])
@pytest.mark.parametrize("kind", ["package", "exchange"])
def test_a_call_is_interrupted_or_short(build, store, tmp_path, seed, scale, kind, fault):
    """Both are no errors: the call is made again, for what is missing."""
    out = loads(build, store, tmp_path, kind, seed, scale(16 if kind == "package" else 8, 10000), fault)
    assert len(out) >= 8 and not [one for one in out if one[1]]


@pytest.mark.parametrize("kind", ["package", "exchange"])
def test_a_call_fails(build, store, tmp_path, seed, scale, kind):
    """The list is asked again. What else cannot be read is an error that names it."""
    cases = scale(16 if kind == "package" else 12, 10000)
    out = loads(build, store, tmp_path, kind, seed, cases, f"do=fail,errno={errno.EIO}")
    raised = [one[1] for one in out if one[1]]
    assert raised and not [text for text in raised if not PLACES.search(text)], raised
    assert not [text for text in raised if "damaged" in text]
