# SPDX-License-Identifier: Apache-2.0
"""What a step says of a DCP state, and what a stranger may write there: a document full of lies gives an error of
vckpt's own, and neither the document nor what it makes a reader build is without bounds."""
import collections
import copy
import json
import re

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import vckpt
from vckpt import dcp_state, dcp_tree
from vckpt.dcp import StorageReader, StorageWriter

pytestmark = pytest.mark.filterwarnings("ignore")
ERRORS = vckpt.Error, dcp_state.BadDocument


@pytest.fixture
def path(tmp_path):
    yield str(tmp_path / "ckpt")
    vckpt.close()


def save(state, path, **options):
    dcp.save(state, storage_writer=StorageWriter(path), no_dist=True, **options)


def load(state, path, planner=None, **options):
    dcp.load(state, storage_reader=StorageReader(path, **options), planner=planner, no_dist=True)
    return state


ODD = [None, True, -1, 3, 2**63, 10**300, 1.5, float("nan"), "", "x", "\ud800", "$tensor", "float32", "sparse_coo",
       "bits8", "uint4", "qint8", "__class__", [], {}, [[]], [{}], [None], {"a": 1}, {"$tuple": [1]}, ["a"] * 50,
       [2**62] * 3, [0] * 17, ["a", 2**40], [-1], ["x"] * 101]


def deep(count):
    found = []
    for _ in range(count):
        found = [found]
    return found


def places_in(node, path=()):
    yield path
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, part in items:
        yield from places_in(part, (*path, key))


def put(node, path, value):
    if not path:
        return value
    node = copy.deepcopy(node)
    at = node
    for part in path[:-1]:
        at = at[part]
    at[path[-1]] = value
    return node


def good():
    """A document with all that one can have."""
    tensor = {"component": "model", "name": "w", "dtype": "float32", "shape": [2, 3], "path": ["model", "w"]}
    return {"vckpt.dcp": 1, "torch": "2.13.0", "paths": True, "keys": {
        "model.w": {**tensor, "requires_grad": True, "pin_memory": False, "layout": "strided",
                    "memory_format": "channels_last"},
        "list.0": {**tensor, "component": "list", "name": "0", "path": ["list", 0]},
        "n": {"bytes": True, "path": ["n"]}}, "planner_data": {"$vckpt": 1, "value": {"a": {"$tuple": [1, "x"]}}}}


def test_documents_full_of_lies(rng, scale):
    """Every field in turn becomes something else; then several at once. Nothing but a BadDocument comes out."""
    base = good()
    dcp_state.parse(json.dumps(base).encode())
    cases = [put(base, place, value) for place in places_in(base) for value in [*ODD, deep(300)]]
    for _ in range(scale(100, 20_000)):
        one = base
        for _ in range(rng.randrange(1, 5)):
            one = put(one, rng.choice(list(places_in(one))), rng.choice(ODD))
        cases.append(one)
    taken = 0
    for case in cases:
        try:
            metadata, kept = dcp_state.parse(json.dumps(case).encode())
            taken += 1
        except dcp_state.BadDocument as error:
            assert str(error) and len(str(error)) < 2000
            continue
        assert all(dcp_state.kept_dtype(one.dtype) is not None for one in kept.values())
    assert 0 < taken < len(cases)
    index = {"a": [0, 4], "b": [4, 6]}
    for case in [put(index, place, value) for place in places_in(index) for value in [*ODD, deep(300), [4, 2]]]:
        try:
            assert all(at + size <= 10 for at, size in dcp_state.parse_index(json.dumps(case).encode(), 10).values())
        except dcp_state.BadDocument:
            continue


@pytest.mark.parametrize("field, value, words", [
    ("memory_format", [], "its memory format is \\[\\], expected contiguous, channels_last"),
    ("memory_format", {}, "its memory format"), ("layout", [1], "torch has no layout \\[1\\]"),
    ("dtype", [], "no dtype"), ("dtype", "uint1", ""), ("shape", [1] * 17, "17 dimensions, at most 16"),
    ("path", [], "1 to 100 texts"), ("path", ["x"] * 101, "1 to 100 texts"),
    ("path", ["x", 2**33], "make lists of 8,589,934,594 places")])
def test_what_a_document_says_of_a_key(field, value, words):
    document = put(good(), ("keys", "model.w", field), value)
    try:
        dcp_state.parse(json.dumps(document).encode())
    except dcp_state.BadDocument as error:
        assert re.search(words, str(error)), str(error)
    else:
        assert not words                # it is there in some versions of torch


def test_entries_that_lie_upon_each_other():
    with pytest.raises(dcp_state.BadDocument, match="key 'b': its place \\[3, 2\\] overlaps that of another key"):
        dcp_state.parse_index(b'{"a": [0, 4], "b": [3, 2], "c": [1, 0]}', 10)


def test_a_document_has_a_limit(path, monkeypatch):
    save({"w": torch.ones(2), "n": 1}, path)
    monkeypatch.setattr(dcp_state, "DOCUMENT_MAX_BYTES", 100)
    with pytest.raises(dcp_state.BadDocument, match=r"default/0: \.dcp/metadata\.json: it has \d+ bytes, at most 100"):
        StorageReader(path).read_metadata()
    with pytest.raises(vckpt.Error, match="at most 100 are read"):
        vckpt.load(f"{path}/default/0", {"n": 0})
    with pytest.raises(CheckpointException, match="at most 100 can be read again"):
        save({"w": torch.ones(2), "n": 1}, path)
    monkeypatch.undo()
    assert load({"n": 0}, path)["n"] == 1


def forge(path, monkeypatch, change):
    """A step whose document is what `change` makes of the true one."""
    true = dcp_state.document
    with monkeypatch.context() as patch:
        patch.setattr(dcp_state, "document", lambda metadata: json.dumps(change(json.loads(true(metadata)))).encode())
        save({"model": {"w": torch.ones(2, 3)}, "n": 5, "rest": [torch.ones(1), {"x": 7}]}, path)


def ask(path):
    """By each of the ways in which a step is read: the errors that came out."""
    found = []
    state = {"model": {"w": torch.zeros(2, 3)}, "n": 0, "rest": [torch.zeros(1), {"x": 0}]}
    for way in (lambda: StorageReader(path).read_metadata(), lambda: load(copy.deepcopy(state), path),
                lambda: vckpt.load(f"{path}/default/latest", copy.deepcopy(state))):
        try:
            way()
        except CheckpointException as error:
            found += [one[0] for one in error.failures.values()]
        except Exception as error:
            found.append(error)
    return found


def test_documents_full_of_lies_in_a_store(path, monkeypatch, rng, scale):
    """The exceptions are vckpt's own, and DCP's for keys that the document lacks or has otherwise."""
    seen = collections.Counter()
    forge(path, monkeypatch, lambda document: document)
    assert ask(path) == []
    for case in range(scale(8, 400)):
        def change(document):
            for _ in range(rng.randrange(1, 3)):
                document = put(document, rng.choice(list(places_in(document))), rng.choice(ODD))
            return document
        forge(path, monkeypatch, change)
        for error in ask(path):
            words = "Missing key", "Size mismatch", "missing", "Loading a ", "metadata is None"
            fine = isinstance(error, ERRORS) or (type(error) in (RuntimeError, ValueError, KeyError, AssertionError) and
                                                 any(word in str(error) for word in words))
            seen[type(error).__name__] += 1
            assert fine, (case, type(error), error)
    assert seen


@pytest.mark.parametrize("fields", [{"dtype": "float64"}, {"dtype": "bits8"}, {"dtype": "int32"},
                                    {"component": "rest", "name": "0"}, {"component": "", "name": "\ud800"}])
def test_a_document_that_contradicts_the_step(path, monkeypatch, fields):
    def change(document):
        document["keys"]["model.w"].update(fields)
        return document
    forge(path, monkeypatch, change)
    with pytest.raises(CheckpointException) as error:
        load({"model": {"w": torch.zeros(2, 3)}}, path)
    assert all(isinstance(one[0], ERRORS) for one in error.value.failures.values()), error.value


@pytest.mark.parametrize("shape", [[2000, 3000], [2, 2], [2], []])
def test_a_document_that_says_another_shape(path, monkeypatch, shape):
    """Of a smaller one a part of the tensor would come without a word."""
    def change(document):
        document["keys"]["model.w"]["shape"] = shape
        return document
    forge(path, monkeypatch, change)
    with pytest.raises(CheckpointException) as error:
        load({"model": {"w": torch.zeros(shape)}}, path)
    assert all(isinstance(one[0], ERRORS) for one in error.value.failures.values()), error.value
    assert f"says shape {shape}, the step has [2, 3]" in str(error.value)


def test_groups_with_very_many_values(path, monkeypatch):
    vckpt.save(f"{path}/run", {"optimizer": {"param_groups": [{"params": list(map(str, range(40))), "lr": 1, "b": 2}]}},
               pin="no")
    assert StorageReader(f"{path}/run").read_metadata().state_dict_metadata.keys() >= {"optimizer.param_groups.39.lr"}
    monkeypatch.setattr(dcp_state, "GROUP_VALUES_MAX", 100)
    with pytest.raises(dcp_state.BadDocument, match="run/0: optimizer: its groups have 120 values"):
        StorageReader(f"{path}/run").read_metadata()


def test_a_path_is_named_part_by_part():
    """Parts may be empty, or have dots in them."""
    root = dcp_tree.Node()
    dcp_tree.put(root, ("",), 1)
    with pytest.raises(dcp_state.BadDocument, match=r"at \['', ''\]"):
        dcp_tree.put(root, ("", ""), 2)
