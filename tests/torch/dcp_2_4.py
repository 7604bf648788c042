# SPDX-License-Identifier: Apache-2.0
"""DCP's classes with the signatures that they had in torch 2.4, as far as a storage plug-in meets them, and the calls
that its save and load made: so that a torch of that age is not needed to see that a plug-in fits it."""
import abc
import enum
import io
import pickle
import threading
import types
from dataclasses import dataclass, field, replace
from typing import Any, Dict, List, Optional, Union

import torch

# ---- metadata ----


@dataclass
class ChunkStorageMetadata:
    offsets: torch.Size
    sizes: torch.Size


@dataclass
class TensorProperties:
    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    layout: torch.layout = field(default=torch.strided)
    requires_grad: bool = False
    memory_format: torch.memory_format = field(default=torch.contiguous_format)
    pin_memory: bool = False

    def __getstate__(self):
        return self.dtype, self.requires_grad, self.pin_memory

    def __setstate__(self, state):
        self.dtype, self.requires_grad, self.pin_memory = state
        self.layout, self.memory_format = torch.strided, torch.contiguous_format


@dataclass
class TensorStorageMetadata:
    properties: TensorProperties
    size: torch.Size
    chunks: List[ChunkStorageMetadata]


@dataclass
class BytesStorageMetadata:
    pass


@dataclass
class StorageMeta:
    checkpoint_id: Optional[str] = None
    save_id: Optional[str] = None
    load_id: Optional[str] = None


@dataclass
class Metadata:
    state_dict_metadata: Dict[str, Union[TensorStorageMetadata, BytesStorageMetadata]]
    planner_data: Any = None
    storage_data: Any = None
    storage_meta: Optional[StorageMeta] = None


@dataclass(frozen=True)
class MetadataIndex:
    fqn: str
    offset: Optional[torch.Size] = None
    index: Optional[int] = field(hash=False, compare=False, default=None)


# ---- planner ----

class WriteItemType(enum.Enum):
    TENSOR = enum.auto()
    SHARD = enum.auto()
    BYTE_IO = enum.auto()


class LoadItemType(enum.Enum):
    TENSOR = enum.auto()
    BYTE_IO = enum.auto()


@dataclass(frozen=True)
class TensorWriteData:
    chunk: ChunkStorageMetadata
    properties: TensorProperties
    size: torch.Size


@dataclass(frozen=True)
class WriteItem:
    index: MetadataIndex
    type: WriteItemType
    bytes_io_data: Any = None
    tensor_data: Optional[TensorWriteData] = None


@dataclass(frozen=True)
class ReadItem:
    type: LoadItemType
    dest_index: MetadataIndex
    dest_offsets: torch.Size
    storage_index: MetadataIndex
    storage_offsets: torch.Size
    lengths: torch.Size


@dataclass(frozen=True)
class SavePlan:
    items: List[WriteItem]
    storage_data: Any = None
    planner_data: Any = None


@dataclass
class LoadPlan:
    items: List[ReadItem]
    storage_data: Any = None
    planner_data: Any = None


# ---- storage ----

@dataclass(frozen=True)
class WriteResult:
    index: MetadataIndex
    size_in_bytes: int
    storage_data: Any


class StorageWriter(abc.ABC):
    @abc.abstractmethod
    def reset(self, checkpoint_id=None) -> None: ...

    @abc.abstractmethod
    def set_up_storage_writer(self, is_coordinator: bool) -> None: ...

    @abc.abstractmethod
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan: ...

    @abc.abstractmethod
    def prepare_global_plan(self, plans: List[SavePlan]) -> List[SavePlan]: ...

    @abc.abstractmethod
    def write_data(self, plan: SavePlan, planner): ...

    @abc.abstractmethod
    def finish(self, metadata: Metadata, results: List[List[WriteResult]]) -> None: ...

    @classmethod
    @abc.abstractmethod
    def validate_checkpoint_id(cls, checkpoint_id) -> bool: ...

    def storage_meta(self):
        return None


class StorageReader(abc.ABC):
    @abc.abstractmethod
    def reset(self, checkpoint_id=None) -> None: ...

    @abc.abstractmethod
    def read_metadata(self) -> Metadata: ...

    @abc.abstractmethod
    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None: ...

    @abc.abstractmethod
    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan: ...

    @abc.abstractmethod
    def prepare_global_plan(self, plans: List[LoadPlan]) -> List[LoadPlan]: ...

    @abc.abstractmethod
    def read_data(self, plan: LoadPlan, planner): ...

    @classmethod
    @abc.abstractmethod
    def validate_checkpoint_id(cls, checkpoint_id) -> bool: ...


PREFIX = "torch.distributed.checkpoint."
METADATA = ("ChunkStorageMetadata", "TensorProperties", "TensorStorageMetadata", "BytesStorageMetadata", "StorageMeta",
            "Metadata", "MetadataIndex")
PLANNER = ("WriteItemType", "LoadItemType", "TensorWriteData", "WriteItem", "ReadItem", "SavePlan", "LoadPlan")


def modules():
    """{name: module} to stand in sys.modules while a plug-in is imported."""
    found = {}
    for name, members in (("metadata", METADATA), ("planner", PLANNER),
                          ("storage", ("WriteResult", "StorageWriter", "StorageReader"))):
        found[PREFIX + name] = types.ModuleType(PREFIX + name)
        found[PREFIX + name].__dict__.update({member: globals()[member] for member in members})
    return found


# ---- a rank of a job ----

class Planner:
    """Rows of 2-d tensors, cut over the ranks; byte entries on rank 0."""

    def __init__(self, state, rank, world):
        self.state, self.rank, self.world = state, rank, world

    def rows(self, tensor):
        each = -(-tensor.shape[0] // self.world)
        return range(min(self.rank * each, tensor.shape[0]), min((self.rank + 1) * each, tensor.shape[0]))

    def local_plan(self):
        items = []
        for key, value in self.state.items():
            if isinstance(value, torch.Tensor):
                rows = self.rows(value)
                chunk = ChunkStorageMetadata(torch.Size([rows.start, 0]), torch.Size([len(rows), value.shape[1]]))
                items.append(WriteItem(MetadataIndex(key, chunk.offsets), WriteItemType.SHARD,
                                       tensor_data=TensorWriteData(chunk, TensorProperties(dtype=value.dtype),
                                                                   value.shape)))
            elif self.rank == 0:
                items.append(WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO))
        return SavePlan(items, planner_data={key: tuple(key.split(".")) for key in self.state})

    def resolve_data(self, item):
        value = self.state[item.index.fqn]
        return (io.BytesIO(pickle.dumps(value)) if item.type == WriteItemType.BYTE_IO
                else value[self.rows(value).start:self.rows(value).stop])


class Group:
    """Ranks that are threads: what one sends, the others unpickle."""

    def __init__(self, world):
        self.world, self.barrier, self.slots = world, threading.Barrier(world, timeout=60), [None] * world

    def gather(self, rank, value):
        self.slots[rank] = pickle.dumps(value)
        self.barrier.wait()
        found = [pickle.loads(slot) for slot in self.slots] if rank == 0 else None
        self.barrier.wait()
        return found

    def scatter(self, rank, values):
        if rank == 0:
            self.slots = [pickle.dumps(value) for value in values]
        self.barrier.wait()
        found = pickle.loads(self.slots[rank])
        self.barrier.wait()
        return found


def whole(plans):
    """As create_default_global_save_plan."""
    keys = {}
    for plan in plans:
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                keys[item.index.fqn] = BytesStorageMetadata()
            else:
                keys.setdefault(item.index.fqn, TensorStorageMetadata(item.tensor_data.properties,
                                                                      item.tensor_data.size, [])).chunks.append(
                    item.tensor_data.chunk)
    return Metadata(keys)


def save(state, writer, group, rank):
    planner, metadata = Planner(state, rank, group.world), None
    writer.storage_meta()
    writer.set_up_storage_writer(rank == 0)
    plans = group.gather(rank, writer.prepare_local_plan(planner.local_plan()))
    if rank == 0:
        metadata = whole(plans)
        plans = writer.prepare_global_plan([replace(plan) for plan in plans])
    futures = writer.write_data(group.scatter(rank, plans), planner)
    futures.wait()
    results = group.gather(rank, futures.value())
    if rank == 0:
        writer.finish(metadata=metadata, results=results)
    return metadata


class LoadPlanner:
    def __init__(self, state):
        self.state = state

    def resolve_tensor(self, item):
        at = tuple(slice(o, o + n) for o, n in zip(item.dest_offsets, item.lengths))
        return self.state[item.dest_index.fqn][at]

    def commit_tensor(self, item, tensor):
        pass

    def load_bytes(self, item, value):
        self.state[item.dest_index.fqn] = pickle.loads(value.getvalue())


def load(state, reader):
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, True)
    items = []
    for key, kept in metadata.state_dict_metadata.items():
        if isinstance(kept, BytesStorageMetadata):
            items.append(ReadItem(LoadItemType.BYTE_IO, MetadataIndex(key), torch.Size([0]), MetadataIndex(key),
                                  torch.Size([0]), torch.Size([0])))
            continue
        for i, chunk in enumerate(kept.chunks):         # in two halves, by columns
            half = chunk.sizes[1] // 2
            for first, n in ((0, half), (half, chunk.sizes[1] - half)):
                dest = torch.Size([chunk.offsets[0], chunk.offsets[1] + first])
                items.append(ReadItem(LoadItemType.TENSOR, MetadataIndex(key, chunk.offsets), dest,
                                      MetadataIndex(key, chunk.offsets, i),
                                      torch.Size([0, first]), torch.Size([chunk.sizes[0], n])))
    plan = reader.prepare_global_plan([reader.prepare_local_plan(LoadPlan(items))])[0]
    reader.read_data(plan, LoadPlanner(state)).wait()
    return metadata
