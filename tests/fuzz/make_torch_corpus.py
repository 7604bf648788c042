#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the seed corpora of the targets that read what torch writes: make_torch_corpus.py, with torch 2.13.
Deterministic."""
import io
import pathlib
import pickle

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

HERE = pathlib.Path(__file__).resolve().parent
OLD = "torch.distributed._shard.sharded_tensor.metadata"        # where torch 2.1 had TensorProperties


def write(target, name, data):
    path = HERE / "corpus" / target
    path.mkdir(parents=True, exist_ok=True)
    (path / name).write_bytes(data)


def metadata(tensors, values=(), paths=None):
    """tensors: {key: (dtype, shape, [(offset, size)])}"""
    entries, places, at = {}, {}, 0
    for key, (dtype, shape, boxes) in tensors.items():
        chunks = [ChunkStorageMetadata(torch.Size(low), torch.Size(size)) for low, size in boxes]
        entries[key] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), chunks)
        for number, chunk in enumerate(chunks):
            places[MetadataIndex(key, chunk.offsets, number)] = _StorageInfo(f"__{number}_0.distcp", at, 1180)
            at += 1180
    for key in values:
        entries[key] = BytesStorageMetadata()
        places[MetadataIndex(key)] = _StorageInfo("__0_0.distcp", at, 864)
        at += 864
    meta = StorageMeta(checkpoint_id=pathlib.PurePosixPath("/ckpt/3"), save_id="0123", load_id=None)
    return Metadata(entries, planner_data=paths, storage_data=places, storage_meta=meta, version="1.0.0")


def metadata_files():
    one = metadata({"w": (torch.float32, (2, 3), [((0, 0), (2, 3))])})
    two = metadata({"model.w": (torch.bfloat16, (5, 4), [((0, 0), (3, 4)), ((3, 0), (2, 4))]),
                    "optim.state.w.step": (torch.int64, (), [((), ())]),
                    "model.e": (torch.uint16, (3, 0), [((0, 0), (3, 0))])}, ["optim.param_groups.0.lr", "epoch"],
                   {"model.w": ("model", "w"), "optim.state.w.step": ("optim", "state", "w", "step"),
                    "model.e": ("model", "e"), "optim.param_groups.0.lr": ("optim", "param_groups", 0, "lr"),
                    "epoch": ("epoch",)})
    for protocol in range(2, 6):
        write("dcp_metadata", f"one-{protocol}", pickle.dumps(one, protocol))
    write("dcp_metadata", "two", pickle.dumps(two, 4))
    old = pickle.dumps(one, 2).replace(b"torch.distributed.checkpoint.metadata\nTensorProperties",
                                       f"{OLD}\nTensorProperties".encode())
    write("dcp_metadata", "old", old.replace(b"torch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING",
                                             f"{OLD}\nMEM_FORMAT_ENCODING".encode()))
    write("dcp_metadata", "other-planner", pickle.dumps(metadata({}, ["x"], {"x": [1.5, None, True, {2}, b"b"]}), 4))


def archive(value):
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def archives():
    numbers = torch.arange(24, dtype=torch.float32)
    for name, value in (("plain", numbers.view(4, 6)), ("turned", numbers.view(4, 6).t()), ("part", numbers[3:20:4]),
                        ("scalar", torch.tensor(2.5)), ("empty", torch.zeros(3, 0)), ("u16", numbers.to(torch.uint16)),
                        ("f8", numbers.to(torch.float8_e4m3fn)), ("parameter", torch.nn.Parameter(numbers)),
                        ("conjugate", numbers.to(torch.complex64).conj()), ("value", {"a": (1, numbers)})):
        write("torch_archive", name, archive(value))


if __name__ == "__main__":
    metadata_files()
    archives()
