# SPDX-License-Identifier: Apache-2.0
"""vckpt import of what torch's distributed checkpoint wrote: every tensor equal bit by bit, read back by vckpt.load and
by dcp.load; and what must be refused."""
import os
import pickle
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

import vckpt as library
from dcplib import Ranks, check
from vckpt.dcp import StorageReader


def save(state, path, **more):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=dcp.FileSystemWriter(path, sync_files=False, **more), no_dist=True)


def load(state, path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, storage_reader=StorageReader(path), no_dist=True)


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
                assert bits(step[f"model/{name}"]) == bits(tensor), name
    blank = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in state.items()}
    load(blank, store / "run" / "0")
    assert all(bits(blank[name]) == bits(state[name]) for name in state)


def test_shards_of_two_ranks(vckpt, store, source, pool2):
    Ranks(pool2)("save_by_torch", str(source), 5)
    vckpt("import", store, "run/40", source)
    Ranks(pool2)("load", str(store / "run" / "40"), 5, 1, 0)
    blank = sharded_state_alone()
    load(blank, store / "run" / "40")
    check(blank, 5)


def sharded_state_alone():
    """A state to load into, without ranks."""
    import dcplib
    whole = dcplib.wanted(0)
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
    refused(vckpt, store, source, "w: its chunk [0:4, 0:7] lies outside of it")
    chunks(((0, 0), (2, 6)), ((2, 0), (2, 6)))
    refused(vckpt, store, source, "its item has the shape [4, 6], and .metadata says [2, 6]")
    write_metadata(source, Metadata({"w": whole}, storage_data={}))
    refused(vckpt, store, source, "w: storage_data does not say where its chunk [0:4, 0:6] lies")
    write_metadata(source, Metadata({"w": BytesStorageMetadata()}, storage_data={}))
    refused(vckpt, store, source, "w: storage_data does not say where it lies")


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


def test_keys_that_meet(vckpt, store, source):
    save({"a": {"b.c": torch.ones(1), "b": {"d": torch.ones(1)}}}, source)
    metadata = metadata_of(source)
    metadata.planner_data["a.b.d"] = ("a", "b", "c")
    write_metadata(source, metadata)
    refused(vckpt, store, source, "both have the place a/b.c")


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
