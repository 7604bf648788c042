# SPDX-License-Identifier: Apache-2.0
"""torch's distributed checkpoint and forged stores: forge_dcp.py make STORE saves one to begin with, forge_dcp.py serve
reads steps, each named by a line of JSON on standard input, and answers each by a line of JSON. A process of its own,
because to import torch takes seconds and much memory.

Of a step it reads the metadata, tensors, byte entries and blobs by a StorageReader, as dcp.load does, and the whole as
torch makes it of a checkpoint that nobody describes. An answer has
    ways     [[key, way, what was delivered, or an error]], for forge_look.py to compare with other ways of reading
    failed   errors of the package's own        found    whatever else came out        mb   the peak of memory
The value of an entry must be what torch's own careful reader makes of the stored bytes, where that takes them."""
import contextlib
import hashlib
import io
import json
import os
import pickle
import random
import resource
import sys
import warnings

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import vckpt
from vckpt.dcp import StorageReader, StorageWriter
from vckpt.dcp_state import BadDocument

MOST_BYTES, MOST_ITEMS = 64 << 20, 12
OWN = OSError, MemoryError, BadDocument     # vckpt.Error is an OSError


# ---- a store to begin with ----

class Raw(DefaultSavePlanner):
    """Keeps values that are bytes as entries, as a planner of one's own may."""

    def resolve_data(self, item):
        if item.type == WriteItemType.BYTE_IO and isinstance(self.state_dict[item.index.fqn], bytes):
            return io.BytesIO(self.state_dict[item.index.fqn])
        return super().resolve_data(item)


class Either(DefaultLoadPlanner):
    """Unpickles entries that are no archives by itself, with Python's own reader: what it is given must be harmless."""

    def load_bytes(self, item, value):
        if value.getvalue().startswith(b"PK"):
            super().load_bytes(item, value)
        else:
            self.state_dict[item.dest_index.fqn] = pickle.load(value)


def state(step):
    """A model, its optimizer taken apart, and entries: the optimizer's whole state, generators, arrays, pickles."""
    torch.manual_seed(step)
    model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.Linear(40, 5))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 30)).sum().backward()
    optimizer.step()
    whole = io.BytesIO()
    torch.save(optimizer.state_dict(), whole)
    views = io.BytesIO()
    torch.save([torch.arange(12.).reshape(3, 4).t(), torch.ones(3, dtype=torch.bfloat16)], views)
    return {"model": model.state_dict(), "optim": optimizer.state_dict(), "epoch": step, "name": "a run",
            "loader": {"seen": {1, 2}, "best": np.float64(.5), "order": np.arange(5), "on": torch.device("cpu")},
            "rng": np.random.RandomState(step).get_state(legacy=False), "pickled": pickle.dumps({"a": (1, {2})}, 4),
            "optimizer": whole.getvalue(), "views": views.getvalue(), "scalar": torch.tensor(step)}


def make(store):
    for step in (1, 2):
        dcp.save(state(step), storage_writer=StorageWriter(f"{store}/step-{step}"), planner=Raw(), no_dist=True)
    vckpt.close()


# ---- what a value is, in words that two ways of reading it give alike ----

class Endless(Exception):
    """A value holds itself, or far too much."""


def words_of(value, depth=0, left=None):
    left = [20000] if left is None else left
    left[0] -= 1
    if depth > 60 or left[0] < 0:
        raise Endless
    kind = type(value).__name__
    if isinstance(value, torch.Tensor):
        whole = value.detach().resolve_conj().resolve_neg().contiguous()
        return f"{kind} {value.dtype} {tuple(value.shape)} {bytes(whole.reshape(-1).view(torch.uint8).numpy())!r:.4000}"
    if isinstance(value, dict):
        return kind + str([(words_of(k, depth + 1, left), words_of(v, depth + 1, left)) for k, v in value.items()])
    if isinstance(value, (set, frozenset)):
        return kind + str(sorted(words_of(part, depth + 1, left) for part in value))
    if isinstance(value, (list, tuple)):
        return kind + str([words_of(part, depth + 1, left) for part in value])
    return f"{kind} {value!r:.4000}"


def short(data):
    return hashlib.sha256(data).hexdigest()[:16] + f" ({len(data)} bytes)"


# ---- reading ----

def cause_of(error):
    """What a StorageReader raised, out of what dcp.load made of it."""
    if isinstance(error, CheckpointException) and error.failures:
        return next(iter(error.failures.values()))[0]
    return error


class Reading:
    """One step."""

    def __init__(self, words):
        self.name, self.path = f"{words['run']}/{words['step']}", f"{words['store']}/{words['run']}/{words['step']}"
        self.rng, self.wanted, self.entries = random.Random(words["seed"]), set(map(tuple, words["tensors"])), 0
        self.ways, self.failed, self.found = [], [], []

    def own(self, what, function):
        """What it gives; None, and a note, for an error of vckpt's own; a finding for any other."""
        try:
            return function()
        except BaseException as error:
            cause = cause_of(error)
            (self.failed if isinstance(cause, OWN) else self.found).append(
                f"dcp {what} of {self.name}: {type(cause).__name__}: {str(cause)[:2000]}")
            self.error = f"error: {str(cause)[:2000]}"
            return None

    def way(self, key, way, function):
        data = self.own(repr(key), function)
        self.ways.append([[self.name, *key], way, self.error if data is None else data])

    def everything(self):
        self.reader = StorageReader(self.path)
        metadata = self.own("metadata", self.reader.read_metadata)
        if metadata is None:
            return
        keys = list(metadata.state_dict_metadata.items())
        tensors = [(k, m) for k, m in keys if isinstance(m, TensorStorageMetadata)]
        entries = [k for k, m in keys if not isinstance(m, TensorStorageMetadata)]
        places = {key: (kept.component, kept.name) for key, kept in self.reader.kept.items()}
        compared = [(k, m) for k, m in tensors if places[k] in self.wanted]
        for key, m in compared + self.rng.sample(tensors, min(MOST_ITEMS // 4, len(tensors))):
            self.tensor(key, m)
        for key in entries[:60]:
            self.entry(key)
        if sum(self.bytes_of(m) for _, m in tensors) <= MOST_BYTES:
            self.whole()

    @staticmethod
    def bytes_of(m):
        count = m.properties.dtype.itemsize
        for n in m.size:
            count *= n
        return count

    def load(self, asked):
        dcp.load(asked, storage_reader=StorageReader(self.path), planner=Either(), no_dist=True)
        return asked

    def tensor(self, key, m):
        if self.bytes_of(m) > MOST_BYTES:
            return
        kept = self.reader.kept[key]
        target = torch.zeros(self.bytes_of(m), dtype=torch.uint8).view(m.properties.dtype).reshape(m.size)

        def read():
            self.load({key: target})
            return short(target.reshape(-1).view(torch.uint8).numpy().tobytes())
        self.way((kept.component, kept.name), "dcp", read)

    def entry(self, key):
        """Its value as dcp.load gives it, and as torch's careful reader does."""
        self.entries += 1
        found = self.own(f"entry {key!r}", lambda: self.load({key: None}))
        place = self.reader.bytes.get(key)
        if found is None or place is None:
            return
        name, offset, length = place
        data = bytes(memoryview(self.reader.opened().blob(name))[offset:offset + length])
        if not data.startswith(b"PK"):
            return
        try:
            careful = torch.load(io.BytesIO(data), weights_only=True)
        except Exception:                   # its list is shorter
            return
        with contextlib.suppress(Endless):
            values = words_of(found[key]), words_of(careful)
            if values[0] != values[1]:
                self.found.append(f"dcp entry {key!r} of {self.name}: torch.load(weights_only=True) gives "
                                  f"{values[1]:.1000}, a StorageReader gives {values[0]:.1000}")

    def whole(self):
        """As torch does where it is asked for all: by the paths that the step tells. What torch says of them is torch's
        own; what it makes must end, and have bounds."""
        try:
            _load_state_dict({}, storage_reader=StorageReader(self.path), planner=_EmptyStateDictLoadPlanner(),
                             no_dist=True)
        except (CheckpointException, *OWN):
            pass
        except Exception as error:
            self.failed.append(f"dcp all of {self.name}: {type(error).__name__}: {error}")

    def answer(self):
        return {"ways": self.ways, "failed": self.failed, "found": self.found, "entries": self.entries,
                "mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10}


def serve():
    """Standard output is for answers alone."""
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        for line in sys.stdin:
            reading = Reading(json.loads(line))
            reading.own("all", reading.everything)
            print(json.dumps(reading.answer()), file=out, flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if sys.argv[1] == "make":
        make(sys.argv[2])
    else:
        serve()
