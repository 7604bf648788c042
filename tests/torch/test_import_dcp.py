# SPDX-License-Identifier: Apache-2.0
"""vckpt import of what torch's distributed checkpoint wrote: every tensor equal bit by bit, read back by vckpt.load and
by dcp.load; and what must be refused."""
import collections
import copy
import enum
import io
import json
import math
import os
import pathlib
import pickle
import shutil
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import vckpt as library
from dcplib import Ranks, check, wanted as wanted_of
from vckpt.dcp import StorageReader, StorageWriter


def save(state, path, **more):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=dcp.FileSystemWriter(path, sync_files=False, **more), no_dist=True)


def load(state, path, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, storage_reader=StorageReader(path, **options), no_dist=True)


def bits(tensor):
    return tensor.dtype, tuple(tensor.shape), tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def metadata_of(path):
    return pickle.loads((path / ".metadata").read_bytes())


def write_metadata(path, metadata):
    (path / ".metadata").write_bytes(metadata if isinstance(metadata, bytes) else pickle.dumps(metadata, 4))


def refused(vckpt, store, path, *texts):
    result = vckpt("import", store, "run", path, check=False)
    assert result.returncode == 1, result.stderr
    for text in texts:
        assert text in result.stderr, result.stderr
    assert not (store / "runs" / "run").exists() or not vckpt.json("ls", store, "run")["steps"]


@pytest.fixture
def source(tmp_path):
    return tmp_path / "source"


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_tensors_of_all_kinds(vckpt, store, source):
    state = {"w": torch.randn(300, 200), "turned": torch.randn(70, 301).t(), "scalar": torch.tensor(2.5),
             "last": torch.randn(2, 3, 40, 50).to(memory_format=torch.channels_last), "none": torch.empty(3, 0),
             "part": torch.randn(10, 10)[2:5, 1:7], "wide": torch.zeros(1, 1).expand(20, 30),
             "bool": torch.tensor([True, False]), "complex": torch.randn(3, dtype=torch.complex64),
             "half": torch.zeros(3, dtype=torch.complex64).to(torch.complex32)}
    for name in ("float8_e4m3fn", "float8_e5m2", "bfloat16", "float16", "float64"):
        state[name] = torch.randn(5, 7).to(getattr(torch, name))
    for name in ("uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"):
        state[name] = torch.arange(99).to(getattr(torch, name))
    save(state, source, thread_count=2)
    vckpt("import", store, "run", source)
    with library.Step(store / "run" / "latest", "torch") as step:
        for name, tensor in state.items():
            if name != "half":
                assert bits(step[f"model/{name}"].torch()) == bits(tensor), name
    blank = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in state.items()}
    load(blank, store / "run" / "0")
    assert all(bits(blank[name]) == bits(state[name]) for name in state)


class OlderEnums(pickle.Pickler):
    """Writes members of enumerations as Python 3.11.0 to 3.11.3 do, Debian 12's among them."""
    def reducer_override(self, value):
        return (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented


def test_enumerations_as_older_pythons_write_them(vckpt, store, source):
    state = {"w": torch.randn(30, 20), "last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)}
    save(state, source)
    text = io.BytesIO()
    OlderEnums(text, 4).dump(metadata_of(source))
    assert b"getattr" in text.getvalue()
    write_metadata(source, text.getvalue())
    vckpt("import", store, "run", source)
    with library.Step(store / "run" / "latest", "torch") as step:
        assert all(bits(step[f"model/{name}"].torch()) == bits(state[name]) for name in state)
    old = text.getvalue().replace(b"TORCH_CONTIGUOUS_FORMAT", b"TORCH_CONTIGUOUS_FORMER")
    write_metadata(source, old)
    result = vckpt("import", store, "run", source, check=False)
    assert result.returncode == 1 and "its memory format is unknown" in result.stderr


def test_shards_of_two_ranks(vckpt, store, source, pool2):
    Ranks(pool2)("save_by_torch", str(source), 5)
    vckpt("import", store, "run/40", source)
    Ranks(pool2)("load", str(store / "run" / "40"), 5, 1, 0)
    blank = sharded_state_alone()
    load(blank, store / "run" / "40")
    check(blank, 5)


def sharded_state_alone():
    """A state to load into, without ranks."""
    whole = wanted_of(0)
    return {"model": {key.removeprefix("model."): torch.zeros_like(value) for key, value in whole.items()
                      if key.startswith("model.")},
            "optim": {"state": {"rows": {"exp_avg": torch.zeros(37, 16)}}, "step": torch.tensor(-1)},
            "epoch": None, "config": {"name": None, "sizes": [None, 2, {"deep": None}]}}


def test_names_are_those_of_the_storage_writer(vckpt, store, source):
    state = {"model": {"a.b": torch.ones(2), "list": [torch.zeros(1), {"x": torch.ones(1)}]}, "plain": torch.ones(3),
             "ranks": {"in": torch.ones(4)}}
    save(state, source)
    vckpt("import", store, "run", source)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=library.dcp.StorageWriter(store / "other" / "0"), no_dist=True)
    with library.Step(store / "run" / "0") as one, library.Step(store / "other" / "0") as other:
        assert one.keys() == other.keys()


def test_a_flat_state(vckpt, store, source):
    model = torch.nn.Linear(3, 2)
    save({**model.state_dict(), "model": 3, "x.y": 1, "epoch": 5}, source)
    vckpt("import", store, "run", source)
    other = torch.nn.Linear(3, 2)
    loaded = library.load(store / "run" / "latest", {"model": other, "epoch": None})
    assert loaded.values["epoch"] == 5 and torch.equal(model.weight, other.weight)
    with library.Step(store / "run" / "0") as step:
        assert step.values("model", tensors=False)["x.y"] == 1


@pytest.mark.parametrize("form", ["torch", "safetensors", "files", "vckpt"])
def test_a_flattened_optimizer_is_an_optimizer(vckpt, store, source, form):
    """Whichever writer wrote it, and however deep it is in the state."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    def job(seed):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Linear(5, 2))
        groups = [{"params": model[0].parameters(), "lr": seed / 8}, {"params": model[1].parameters(), "lr": seed / 16}]
        optimizer = torch.optim.AdamW(groups)
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
        return model, optimizer
    (model, optimizer), (other, empty) = job(1), job(2)
    weights, moments = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    assert "state.0.weight.exp_avg" in moments and "param_groups.1.bias.lr" in moments
    state = {"model": weights, "optimizer": moments, "app": {"optim": copy.deepcopy(moments)}}
    if form == "vckpt":
        dcp.save(state, storage_writer=StorageWriter(store / "run/0"), no_dist=True)
        library.close()
    else:
        more = {"torch": {}, "files": {"single_file_per_rank": False},
                "safetensors": {"serialization_format": dcp.filesystem.SerializationFormat.SAFETENSORS}}
        save(state, source, **more[form])
        vckpt("import", store, "run", source)
    inner = torch.optim.AdamW([{"params": part.parameters()} for part in other])
    library.load(store / "run", {"model": other, "optimizer": empty, "app": {"optim": inner}})
    for found in empty, inner:
        assert [group["lr"] for group in found.param_groups] == [1 / 8, 1 / 16]
        for mine, saved in zip(other.parameters(), model.parameters()):
            assert torch.equal(mine, saved)
            for key in ("exp_avg", "exp_avg_sq", "step"):
                assert torch.equal(found.state[mine][key], optimizer.state[saved][key])


def test_the_number_in_the_name_of_the_directory(vckpt, store, tmp_path):
    for name, number in (("step-1000", 1000), ("epoch=3", 3), ("ckpt_000020", 20), ("best", 1001)):
        save({"w": torch.ones(3)}, tmp_path / name)
        assert vckpt.json("import", store, "run", tmp_path / name)["step"] == number
    assert vckpt.json("import", store, "run", f"{tmp_path}/step-1000/.")["step"] == 1002


class Bad:
    def __reduce__(self):
        return os.system, ("touch BAD",)


def test_a_pickle_that_calls_something_is_refused_and_does_nothing(vckpt, store, source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save({"w": torch.ones(3)}, source)
    write_metadata(source, pickle.dumps(Bad(), 4))
    refused(vckpt, store, source, "class posix.system is not one of DCP's metadata")
    metadata = Metadata({}, planner_data=Bad())
    for protocol in range(2, 6):
        write_metadata(source, pickle.dumps(metadata, protocol))
        refused(vckpt, store, source, "posix.system")
    assert not (tmp_path / "BAD").exists()


def test_chunks_that_overlap_or_leave_gaps(vckpt, store, source):
    save({"w": torch.ones(4, 6)}, source)
    metadata = metadata_of(source)
    whole = metadata.state_dict_metadata["w"]
    place = next(iter(metadata.storage_data.values()))

    def chunks(*boxes):
        found = [ChunkStorageMetadata(torch.Size(at), torch.Size(size)) for at, size in boxes]
        changed = TensorStorageMetadata(whole.properties, whole.size, found)
        write_metadata(source, Metadata({"w": changed}, storage_data={MetadataIndex("w", at): place
                                                                      for at, _ in boxes}))
    chunks(((0, 0), (2, 6)))
    refused(vckpt, store, source, "w: no chunk has its part [2:4, 0:6]")
    chunks(((0, 0), (3, 6)), ((2, 0), (2, 6)))
    refused(vckpt, store, source, "w: its chunks [0:3, 0:6] and [2:4, 0:6] overlap in [2:3, 0:6]")
    chunks(((0, 0), (4, 7)))
    refused(vckpt, store, source, "w: its chunk [0:4, 0:7] is outside of it")
    chunks(((0, 0), (2, 6)), ((2, 0), (2, 6)))
    refused(vckpt, store, source, "its item has the shape [4, 6], and .metadata says [2, 6]")
    write_metadata(source, Metadata({"w": whole}, storage_data={}))
    refused(vckpt, store, source, "w: storage_data does not say where its chunk [0:4, 0:6] is")
    write_metadata(source, Metadata({"w": BytesStorageMetadata()}, storage_data={}))
    refused(vckpt, store, source, "w: storage_data does not say where it is")


def test_places_that_lie(vckpt, store, source, tmp_path):
    save({"w": torch.ones(4, 6), "x": 1}, source)
    metadata, data = metadata_of(source), (source / "__0_0.distcp").read_bytes()
    item = next(place for index, place in metadata.storage_data.items() if index.fqn == "w")
    (source / "__0_0.distcp").write_bytes(data[:-1])
    refused(vckpt, store, source, "__0_0.distcp: it has", "cut short")
    (source / "__0_0.distcp").write_bytes(data)
    for path, text in (("../outside", "leads out of the directory"), (str(tmp_path / "outside"), "No such file"),
                       ("link", "leads out of the directory"), ("", "without a name"), ("gone", "No such file")):
        (tmp_path / "outside").write_bytes(data)
        (source / "link").unlink(missing_ok=True)
        (source / "link").symlink_to(tmp_path / "outside")
        item.relative_path = path
        write_metadata(source, metadata)
        refused(vckpt, store, source, text)
    item.relative_path = "__0_0.distcp"
    for offset, length in ((item.offset, item.length - 5), (item.offset + 1, item.length - 1),
                           (item.offset, 2**62), (2**62, item.length), (0, len(data) - item.length)):
        old, (item.offset, item.length) = (item.offset, item.length), (offset, length)
        write_metadata(source, metadata)
        refused(vckpt, store, source, "w: ")
        item.offset, item.length = old
    item.transform_descriptors = ["stream.zstd/1"]
    write_metadata(source, metadata)
    refused(vckpt, store, source, "w: ", "extension stream.zstd/1")
    item.transform_descriptors = None
    metadata.state_dict_metadata["v"] = metadata.state_dict_metadata["w"]
    metadata.storage_data[MetadataIndex("v", torch.Size([0, 0]))] = item
    write_metadata(source, metadata)
    refused(vckpt, store, source, "its items overlap")


def test_items_that_many_tensors_share(vckpt, store, source):
    """Under other names of the file, or as an item that is said to have no bytes."""
    save({"w": torch.ones(100, 100)}, source)
    metadata = metadata_of(source)
    [(index, item)] = metadata.storage_data.items()
    for i in range(1, 5):
        metadata.state_dict_metadata[f"v{i}"] = metadata.state_dict_metadata["w"]
        metadata.storage_data[MetadataIndex(f"v{i}", index.offset)] = _StorageInfo("./" * i + "__0_0.distcp",
                                                                                  item.offset, item.length)
    write_metadata(source, metadata)
    refused(vckpt, store, source, "v1: ", "its items overlap")


def test_tensors_far_larger_than_what_is_stored(vckpt, store, source):
    save({"w": torch.zeros(1)}, source)
    metadata, wide = metadata_of(source), torch.zeros(1).expand(1 << 25)
    torch.save(wide, source / "__0_0.distcp")
    metadata.state_dict_metadata["w"].size = torch.Size([1 << 25])
    metadata.state_dict_metadata["w"].chunks[0].sizes = torch.Size([1 << 25])
    next(iter(metadata.storage_data.values())).length = (source / "__0_0.distcp").stat().st_size
    write_metadata(source, metadata)
    refused(vckpt, store, source, "w: ", "makes 134217728 bytes of a tensor out of ")
    save({"wide": (wide, 1), "shared": (torch.ones(9),) * 9}, source.with_name("values"))
    result = vckpt("import", store, "run", source.with_name("values"))
    assert "wide: kept as it is" in result.stderr and "far larger than what is stored" in result.stderr
    with library.Step(store / "run" / "latest", "torch") as step:
        assert [key for key in step.keys() if key.startswith("shared")]


def test_links_inside_the_directory_are_followed(vckpt, store, source):
    save({"w": torch.ones(4, 6)}, source)
    (source / "data").mkdir()
    os.rename(source / "__0_0.distcp", source / "data" / "items")
    (source / "__0_0.distcp").symlink_to("data/items")
    vckpt("import", store, "run", source)
    with library.Step(store / "run" / "0", "torch") as step:
        assert torch.equal(step["model/w"].torch(), torch.ones(4, 6))


def test_keys_that_meet(vckpt, store, source):
    save({"a": {"b.c": torch.ones(1), "b": {"d": torch.ones(1)}}}, source)
    metadata = metadata_of(source)
    metadata.planner_data["a.b.d"] = ("a", "b", "c")
    write_metadata(source, metadata)
    refused(vckpt, store, source, "both have the place a/b.c")


def test_paths_that_would_be_far_more_than_the_file(vckpt, store, source):
    """A part of 64 KiB that all keys share; lists of which each has its last item only; too many components."""
    n = 2000
    save({str(i): i for i in range(n)}, source)
    metadata, long = metadata_of(source), "x" * 65536
    for path, text in ((lambda i: ("a", long, str(i)), "the path of key 0 is far longer than the key"),
                       (lambda i: ("a", f"x{i}", n - 1), "the lists of a lack more than 1048576 items")):
        metadata.planner_data = {str(i): path(i) for i in range(n)}
        write_metadata(source, metadata)
        refused(vckpt, store, source, text)
    save({"w": torch.ones(2, 2500)}, source)
    metadata = metadata_of(source)
    empty = metadata.state_dict_metadata["w"]
    empty.size, empty.chunks = torch.Size([0]), []
    metadata.state_dict_metadata = {f"c{i}.w": empty for i in range(4097)}
    metadata.planner_data = {f"c{i}.w": (f"c{i}", "w") for i in range(4097)}
    write_metadata(source, metadata)
    refused(vckpt, store, source, "more ways than the 4096 components that a step can have")


def test_names_that_are_not_utf8(vckpt, store, source):
    save({"wxyz": torch.ones(2)}, source)
    metadata = (source / ".metadata").read_bytes()
    for old, new, text in ((b"wxyz", b"w\xffyz", "not UTF-8"), (b"__0_0", b"__\xff_0", "a file that is not UTF-8")):
        write_metadata(source, metadata.replace(old, new))
        refused(vckpt, store, source, text)


def test_saves_that_are_no_checkpoint_of_all(vckpt, store, source):
    save({"w": torch.ones(1)}, source)
    os.rename(source / ".metadata", source / "__0.metadata")
    refused(vckpt, store, source, "use_collectives=False")
    os.remove(source / "__0.metadata")
    refused(vckpt, store, source, "no .metadata")
    (source / ".metadata").write_bytes(b"")
    refused(vckpt, store, source, "it ends too early")


def test_files_beside_it_are_blobs(vckpt, store, source):
    save({"w": torch.ones(1)}, source)
    (source / "config.json").write_text("{}")
    (source / "__9_0.distcp").write_bytes(b"of an older save")
    vckpt("import", store, "run", source)
    assert {blob["name"] for blob in vckpt.json("ls", store, "run/0")["blobs"]} == {
        ".dcp/metadata.json", "config.json", "model.json"}


# ---- values ----

PLAIN = {"epoch": 3, "name": "tiny", "lr": 0.1, "small": 1e-300, "nothing": None, "yes": True, "minus": -0.0,
         "huge": [2**53, -2**53, 2**63, -2**63, 2**64, -2**64 - 1, 3**500, -3**500], "bytes": b"\x00\xff ab",
         "array": bytearray(b"\xe9x"),
         "empty": (b"", bytearray(), "", (), [], {}, set()), "odd": [float("inf"), -float("inf")], "complex": 1 - 2j,
         "tuple": (1, (2, "ä"), []), "sets": [{1, 2}, frozenset(["a"])], "keys": ({1: "a", (2, "b"): None, "$x": 0},),
         "ordered": (collections.OrderedDict([("b", 1), ("a", 2)]),), "size": [torch.Size([2, 3])],
         "types": [torch.float32, torch.bfloat16, torch.strided], "device": [torch.device("cuda:1")],
         "path": [pathlib.PosixPath("/data/c4")], "range": range(0, 9, 2), "slice": slice(None, 3),
         "text": "line\nline \"quoted\" \\ \x7f €𝄞"}


def test_values_come_back(vckpt, store, source):
    save({"all": {"v": PLAIN}, **PLAIN}, source)
    vckpt("import", store, "run", source)
    loaded = library.load(store / "run" / "latest", {"all": None, **dict.fromkeys(PLAIN)}, strict=False).values
    for key, value in PLAIN.items():
        assert loaded[key] == value and loaded["all"]["v"][key] == value, key
    assert str(loaded["minus"]) == "-0.0" and [type(x) for x in loaded["sets"]] == [set, frozenset]
    assert type(loaded["ordered"][0]) is collections.OrderedDict and type(loaded["array"]) is bytearray


def test_tensors_inside_values(vckpt, store, source):
    state = {"model": {"w": torch.ones(2)}, "pair": (1, {"x": torch.arange(6).view(2, 3).t()}),
             "deep": {"a": [(torch.zeros(0), torch.tensor(7))]}}
    save(state, source)
    vckpt("import", store, "run", source)
    found = library.load(store / "run" / "latest", {"pair": None, "deep": None}, strict=False).values
    assert found["pair"][0] == 1 and torch.equal(found["pair"][1]["x"], state["pair"][1]["x"])
    assert [bits(t) for t in found["deep"]["a"][0]] == [bits(t) for t in state["deep"]["a"][0]]


class Own:
    def __init__(self):
        self.inside = 1


def test_values_that_only_python_reads(vckpt, store, source):
    cycle: list = [1]
    cycle.append((cycle,))
    many: list = [1]
    for _ in range(60):
        many = [(many, many)]
    state = {"w": torch.ones(2), "own": {"good": 1, "bad": [Own()]}, "cycle": (cycle,), "many": many}
    save(state, source)
    result = vckpt("import", store, "run", source)
    assert "own.bad: kept as it is, for dcp.load alone: class test_import_dcp.Own is not one of" in result.stderr
    assert vckpt.json("import", store, "run", source)["values_unread"] == ["own.bad", "cycle", "many"]
    loaded = library.load(store / "run" / "latest", {"own": None}, strict=False).values
    assert loaded["own"] == {"good": 1}
    blank = {"own": {"good": None, "bad": None}}
    with pytest.raises(dcp.api.CheckpointException, match="entry 'own.bad': the class test_import_dcp.Own"):
        load(blank, store / "run" / "0")
    load(blank, store / "run" / "0", allow_pickle=True)
    assert blank["own"]["good"] == 1 and blank["own"]["bad"][0].inside == 1


def test_values_that_are_larger_than_their_pickles(vckpt, store, source):
    """One long text at many places, as a value and as a key; very many values deep in others."""
    text, deep = "x" * (1 << 20), [0] * 400_000
    for _ in range(80):
        deep = [deep]
    save({"v": 1}, source)
    metadata, item = metadata_of(source), source / "__0_0.distcp"
    for value, why in (([text] * 200, "too many values, or too long ones"),
                       ([{text: None}] * 200, "too many values, or too long ones"),
                       (deep, "more than a document of the step can hold"), ([text[:9]] * 99, "")):
        torch.save(value, item)
        next(iter(metadata.storage_data.values())).length = item.stat().st_size
        write_metadata(source, metadata)
        result = vckpt("import", store, "run", source)
        assert why in result.stderr and bool(why) == ("v: kept as it is" in result.stderr), result.stderr
    with library.Step(store / "run" / "latest") as step:
        assert step.values("v") == [text[:9]] * 99


def test_training_goes_on(vckpt, store, source, pool2):
    """Sharded parameters and an optimizer's state: by dcp.load on the same ranks, by vckpt.load on one process."""
    import dcplib
    ranks = Ranks(pool2)
    losses = ranks("fsdp_save_by_torch", str(source))
    vckpt("import", store, "run/3", source)
    assert ranks("fsdp_load", str(store / "run" / "3")) == losses
    model, optimizer = dcplib.fsdp_model(cut=False)
    library.load(store / "run" / "3", {"model": model, "optim": optimizer})
    assert dcplib.fsdp_steps(model, optimizer, 3, 3) == pytest.approx(losses[0], rel=1e-5)


# ---- any boxes ----

def cut(rng, box):
    """A box in one or several."""
    dims = [d for d, (low, high) in enumerate(box) if high - low > 1]
    if not dims or rng.random() < 0.35:
        return [box]
    d = rng.choice(dims)
    at = rng.randrange(box[d][0] + 1, box[d][1])
    return [part for low, high in ((box[d][0], at), (at, box[d][1]))
            for part in cut(rng, [*box[:d], (low, high), *box[d + 1:]])]


def item_of(rng, tensor):
    """What torch.save writes of a tensor with these items, in some order in memory."""
    order = rng.sample(range(tensor.dim()), tensor.dim())
    back = [order.index(d) for d in range(tensor.dim())]
    tensor = tensor.permute(order).contiguous().permute(back)
    if rng.random() < 0.3 and tensor.dim():
        room = torch.zeros(*[n + rng.randrange(3) for n in tensor.shape], dtype=tensor.dtype)
        part = room[tuple(slice(0, n) for n in tensor.shape)]
        tensor = part.copy_(tensor)
    out = io.BytesIO()
    torch.save(tensor, out)
    return out.getvalue()


def write_checkpoint(rng, path, state):
    """As a save by ranks that hold boxes of any kind would be."""
    files, entries, places = [b""] * 3, {}, {}
    for name, tensor in state.items():
        boxes = cut(rng, [(0, n) for n in tensor.shape]) if tensor.numel() else [[(0, n) for n in tensor.shape]]
        rng.shuffle(boxes)
        chunks = []
        for box in boxes:
            at, file = torch.Size([low for low, _ in box]), rng.randrange(3)
            item = item_of(rng, tensor[tuple(slice(*span) for span in box)])
            chunks.append(ChunkStorageMetadata(at, torch.Size([high - low for low, high in box])))
            places[MetadataIndex(name, at)] = _StorageInfo(f"__{file}_0.distcp", len(files[file]), len(item))
            files[file] += item
        entries[name] = TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), tensor.shape, chunks)
    path.mkdir()
    for number, data in enumerate(files):
        (path / f"__{number}_0.distcp").write_bytes(data)
    write_metadata(path, Metadata(entries, storage_data=places))


def test_any_boxes_of_any_tensors(vckpt, store, tmp_path, rng, scale):
    for case in range(scale(6, 100)):
        state = {}
        for number in range(rng.randrange(1, 6)):
            shape = [rng.choice([1, 2, 3, 5, 8, 17, 64]) for _ in range(rng.randrange(5))]
            while math.prod(shape) > 1 << 17:
                shape.pop()
            if rng.random() < 0.1 and shape:
                shape[rng.randrange(len(shape))] = 0
            dtype = rng.choice([torch.float32, torch.bfloat16, torch.uint8, torch.complex128, torch.int64])
            state[f"t.{number}"] = (torch.randn(shape) * 100).to(dtype)
        write_checkpoint(rng, tmp_path / f"{case}", state)
        vckpt("import", store, f"run/{case}", tmp_path / f"{case}", "--no-index")
        with library.Step(store / "run" / f"{case}", "torch") as step:
            assert {name: bits(step[f"model/{name}"].torch()) for name in state} == {name: bits(t) for name, t in
                                                                                    state.items()}


def test_a_large_tensor_by_columns(vckpt, store, tmp_path, rng):
    """Larger than what is read at once; one part of it is turned."""
    tensor = torch.randn(1100, 3000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("test_import_dcp.cut", lambda _, box: [[box[0], (0, 1000)], [(0, 600), (1000, 3000)],
                                                             [(600, 1100), (1000, 3000)]])
        write_checkpoint(rng, tmp_path / "c", {"w": tensor})
    vckpt("import", store, "run", tmp_path / "c", "--threads", 2)
    with library.Step(store / "run" / "0", "torch") as step:
        assert torch.equal(step["model/w"].torch(), tensor)


# ---- safetensors ----

def check_model(path, wanted):
    with library.Step(path, "torch") as step:
        assert {key: bits(t.torch()) for key, t in step.items()} == {f"model/{key}": bits(t) for key, t in
                                                                     wanted.items()}


@pytest.mark.parametrize("consolidated", [False, True])
def test_what_the_hugging_face_writer_wrote(vckpt, store, source, pool2, consolidated):
    Ranks(pool2)("save_as_hugging_face", str(source), 3, 0, 1, consolidated)
    assert bool(list(source.glob("shard-*"))) is not consolidated
    (source / "config.json").write_text("{}")
    vckpt("import", store, "run", source)
    wanted = {key.removeprefix("model."): tensor for key, tensor in wanted_of(3).items() if key.startswith("model.")}
    if consolidated:    # torch 2.13 makes zeros of a scalar then
        wanted["scalar"] = load_file(source / "model-00001-of-00001.safetensors")["scalar"]
    check_model(store / "run" / "0", wanted)
    assert [blob["name"] for blob in vckpt.json("ls", store, "run/0")["blobs"]] == [
        "config.json", *["model.safetensors.index.json"] * consolidated]


def test_shards_that_do_not_fit(vckpt, store, source):
    name = "shard-{:05d}-model-00001-of-00001.safetensors"

    def write(*parts):
        shutil.rmtree(source, ignore_errors=True)
        source.mkdir()
        for number, (tensor, offsets) in enumerate(parts):
            info = json.dumps({"w": {"saved_offsets": offsets}})
            save_file({"w": tensor}, source / name.format(number + 1), metadata={"DCP_SHARDING_INFO": info})
    half = torch.ones(2, 3)
    write((half, [0, 0]), (half, [2, 0]))
    vckpt("import", store, "good", source)
    for parts, text in (([(half, [0, 0]), (half, [3, 0])], "no file has its part [2:3, 0:3]"),
                        ([(half, [0, 0]), (half, [1, 0])], "overlap in [1:2, 0:3]"),
                        ([(half, [0, 0]), (half.double(), [2, 0])], "another dtype or other dimensions"),
                        ([(half, [0, 0]), (torch.ones(6), [2])], "another dtype or other dimensions"),
                        ([(half, [0])], "no offset for each of its dimensions"),
                        ([(half, [-1, 0])], "no offset for each of its dimensions"),
                        ([(half, [2**63 - 1, 0])], "no offset for each of its dimensions"),
                        ([(half, [2**62, 0])], "larger than a tensor can be")):
        write(*parts)
        refused(vckpt, store, source, "w", text)
    for info in ("[1]", '{"w": ', "[" * 3000):
        save_file({"w": half}, source / name.format(1), metadata={"DCP_SHARDING_INFO": info})
        refused(vckpt, store, source, "its DCP_SHARDING_INFO is no JSON object")


def test_items_in_safetensors(vckpt, store, source):
    state = {"w": torch.randn(40, 30), "model": {"half": torch.randn(5, 7).bfloat16(), "none": torch.empty(0, 3)},
             "x": 3}
    save(state, source, serialization_format=dcp.filesystem.SerializationFormat.SAFETENSORS)
    vckpt("import", store, "good", source)
    blank = {"w": torch.zeros(40, 30), "model": {"half": torch.zeros(5, 7).bfloat16(), "none": torch.empty(0, 3)},
             "x": None}
    load(blank, store / "good" / "0")
    assert bits(blank["w"]) == bits(state["w"]) and bits(blank["model"]["half"]) == bits(state["model"]["half"])
    assert blank["x"] == 3
    metadata = metadata_of(source)
    index = next(index for index in metadata.storage_data if index.fqn == "w")
    metadata.state_dict_metadata["v"] = metadata.state_dict_metadata["w"]
    metadata.storage_data[MetadataIndex("v", index.offset)] = metadata.storage_data.pop(index)
    del metadata.state_dict_metadata["w"]
    write_metadata(source, metadata)
    refused(vckpt, store, source, "v: ", "no tensor there has its name")


def test_changed_bytes_are_refused_or_other_values(vckpt, store, source, rng, scale):
    """Nothing but an exit code: the sanitizers' run sees what is done with them."""
    save({"model": {"w": torch.randn(5, 6), "t": torch.randn(4, 3).t()}, "lr": 0.1, "mixed": (1, torch.ones(2), "a")},
         source)
    files = {path: path.read_bytes() for path in source.iterdir()}
    for _ in range(scale(30, 3000)):
        path = rng.choice(sorted(files))
        data = bytearray(files[path])
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(data))
            data[at:at + rng.randrange(3)] = rng.choice([bytes([rng.randrange(256)]), b"", data[:9], b"\xff" * 4])
        path.write_bytes(data)
        result = vckpt("import", store, "run", source, "--no-index", check=False)
        assert (result.returncode, bool(result.stdout)) in ((0, True), (1, False)), result
        path.write_bytes(files[path])
