# SPDX-License-Identifier: Apache-2.0
"""Three gloo ranks and one failure of a save, at one of them or at all: the same class of error at every rank, with the
rank and the reason; and the next save works."""
import copy
import pickle
import re

import pytest

from test_meeting import ranks

import vckpt
from vckpt import _lib

SCRIPT = """
import json, pickle, resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
OPTIONS = dict(pin="no", start_timeout=2.0)
big = np.random.default_rng(rank).random(1 << 20)

def good(data=big):
    own = vckpt.Shard(data, shape=(3 << 20,), flat=(rank << 20, rank + 1 << 20))
    return {"m": {"w": np.arange(6.0)}, "own": {"big": own}}

class Raises:
    def state_dict(self):
        raise RuntimeError("the loader is gone")

def full():                                     # the disk of rank 1: no file of more than 1 MiB
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limit[1]))
    try:
        return vckpt.save(run, good(np.random.default_rng(9 + rank).random(1 << 20)), step=10)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)

def odd(**members): return {**good(), **(members if rank == 1 else {})}

KINDS = {
    "option": lambda: vckpt.save(run, good(), step=1, **{**OPTIONS, "threads": -1 if rank == 1 else 1}),
    "unknown option": lambda: vckpt.save(run, good(), step=2, **{**OPTIONS, **({"pni": 1} if rank == 1 else {})}),
    "good": lambda: vckpt.save(run, good(), step=3, **OPTIONS),
    "disk": full,
    "function": lambda: vckpt.save(run, odd(f={"hook": lambda: 0}), step=11),
    "tensor": lambda: vckpt.save(run, odd(f={"mask": np.array(["a"])}), step=12),
    "raises": lambda: vckpt.save(run, odd(f=Raises()), step=13),
    "attribute": lambda: vckpt.save(run, good(), step=14, attributes={"loss": None if rank == 1 else 1.0}),
    "value": lambda: vckpt.save(run, {**good(), "lr": {"lr": 0.5 + (rank == 1)}}, step=15),
    "shape": lambda: vckpt.save(run, {"m": {"w": np.arange(6.0 + (rank == 1))}}, step=16),
    "exists": lambda: vckpt.save(run, good(), step=3),
    "base": lambda: vckpt.save(run, good(), step=17, base="run/99" if rank == 1 else None),
}
for number, (kind, call) in enumerate(KINDS.items()):
    dist.barrier()                              # a step of training
    try:
        found = call()
    except Exception as e:
        again = pickle.loads(pickle.dumps(e))
        found = dict(aborted=isinstance(e, vckpt.Aborted), kind=type(e).__name__,
                     also=[k.__name__ for k in type(e).__mro__], text=str(e),
                     pickled=isinstance(again, vckpt.Aborted) and str(again) == str(e) and type(again) is type(e),
                     code=e.errno)
    dist.barrier()
    if number > 2:
        assert vckpt.save(run, good(), step=100 + number) == 100 + number
    print(json.dumps([kind, found]), flush=True)
"""

# what stands in the sentence of every rank; what it is at rank 1 besides
SAID = {
    "option": ("threads=-1", "InvalidArgument"), "unknown option": ("unknown option 'pni'", "TypeError"),
    "disk": ("", "OSError"),
    "function": ('state["f"]["hook"]', "TypeError"), "tensor": ('state["f"]["mask"]', "Refused"),
    "raises": ("the loader is gone", "Aborted"),
    "attribute": ("attribute 'loss'", "InvalidArgument"), "value": ("lr", "Aborted"), "shape": ("w", "Aborted"),
    "exists": ("has a step 3 already", "StepExists"), "base": ("run/99", "NotFound"),
}


def test_one_class_at_all_ranks(tmp_path):
    import json
    found = [[json.loads(line) for line in out] for out, _ in ranks(3, tmp_path, SCRIPT)]
    for of_kind in zip(*found):
        kind = of_kind[0][0]
        if kind == "good":
            assert [one for _, one in of_kind] == [3] * 3
            continue
        said, also = SAID[kind]
        for rank, (_, one) in enumerate(of_kind):
            assert isinstance(one, dict) and one["aborted"] and one["pickled"], (kind, rank, one)
            assert said in one["text"].replace("\\", ""), (kind, rank, one)
            assert rank == 1 or kind == "exists" or re.search("ranks? 1", one["text"]), (kind, rank, one)
        assert also in of_kind[1][1]["also"] or (kind == "exists" and any(also in one["also"] for _, one in of_kind)), (
            (kind, of_kind))
    assert vckpt.steps(tmp_path / "store/run") == [3, *range(103, 112)]


@pytest.mark.parametrize("kind", sorted(_lib.KINDS, key=lambda kind: kind.__name__))
def test_an_error_that_is_aborted_too(kind):
    """What it was stays: a program that waits for that class still meets it."""
    error = (kind("a", "b") if kind is vckpt.Refused else kind(5, "the disk") if issubclass(kind, vckpt.Error)
             else kind("the disk"))
    found = _lib.aborted(error)
    assert (isinstance(found, kind) and isinstance(found, vckpt.Aborted) and
            str(found) == (str(error) if issubclass(kind, vckpt.Error) else found.text))
    assert _lib.aborted(found) is found and found.errno == (error.errno if issubclass(kind, vckpt.Error)
                                                            else _lib.EABORTED)
    for again in pickle.loads(pickle.dumps(found)), copy.copy(found):
        assert type(again) is type(found) and (again.errno, str(again)) == (found.errno, str(found))
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) and str(again) == str(error)
