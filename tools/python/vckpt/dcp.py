# SPDX-License-Identifier: Apache-2.0
"""torch's distributed checkpoint (DCP) over a vckpt store (docs/dcp.md): StorageWriter and StorageReader, to be given
wherever DCP takes a FileSystemWriter and a FileSystemReader.

A save, rank by rank, as DCP calls it:

    set_up_storage_writer, prepare_local_plan     nothing is looked at yet
    prepare_global_plan (coordinator)             resolves the path, makes the store where there is none, chooses the
                                                  launch id: a Ticket, sent to each rank in its plan
    write_data                                    this rank's save: begun, declared, submitted, and waited for until the
                                                  step is committed, which it is once all ranks have announced
    finish (coordinator)                          the step is there: nothing is left to be done

With plan caching DCP gives write_data the plan of an earlier save, with the Ticket of that save. So a Ticket that
arrives is noted for the thread: a rank's plan is received and written by one thread.

A failure anywhere is DCP's CheckpointException on every rank: one before write_data because DCP stops there, one in it
because a save that is given up is given up for all. Nothing of a failed save is ever visible."""
from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import json
import os
import secrets
import threading
import uuid
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta, TensorProperties
from torch.distributed.checkpoint.planner import LoadItemType, WriteItemType
from torch.distributed.checkpoint.storage import (
    StorageReader as _StorageReader,
    StorageWriter as _StorageWriter,
    WriteResult,
)
from torch.futures import Future

from . import _lib, dcp_reads, dcp_state, loads, paths, pickles, saver
from .dcp_state import Place
from .exchange import Exchanged, Mode, check as check_mode
from .shard import Layout, PlainBox
from .signatures import Options, Path as PathLike, Unpack
from .step import Commit, Step
from .torch_state import DTYPES, TorchEntry
from .values_text import KeyPath

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem

Result: TypeAlias = "tuple[MetadataIndex, int, Place | tuple[()]]"

__all__ = ["StorageReader", "StorageWriter"]

_here = threading.local()       # .ticket: the last one that this thread received
_warned: set[str] = set()
_NOT_GIVEN = object()
RANK_RUN = "{}.rank-{:05d}"     # of a save without collectives: every rank has a run of its own


@dataclasses.dataclass(eq=False)
class Ticket:
    """What the coordinator sends to a rank about the save under way."""
    store: str
    run: str
    step: int | None
    launch: str
    rank: int
    world: int
    replace: bool
    used: bool = False          # by a save: a plan that the planner kept is not taken for a new one

    def __reduce__(self) -> tuple[Callable[..., Ticket], tuple[Any, ...]]:
        return _received, dataclasses.astuple(self)[:-1]


def _received(*fields: Any) -> Ticket:
    ticket = _here.ticket = Ticket(*fields)
    return ticket


@dataclasses.dataclass(frozen=True)
class StorageInfo:
    """Where the step has an item of the state: in Metadata.storage_data of what dcp.save returns."""
    run: str
    step: int
    component: str | None = None       # None: among the byte entries
    name: str | None = None


class _Storage:
    """The path of a writer or a reader."""
    path: Path

    @property
    def checkpoint_id(self) -> PathLike:
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: PathLike) -> bool:
        try:
            path = Path(os.path.abspath(paths.local(checkpoint_id)))
        except (TypeError, ValueError):
            return False
        return any(os.path.isdir(parent) and os.access(parent, os.W_OK) for parent in [path, *path.parents])

    def reset(self, checkpoint_id: PathLike | None = None) -> None:
        if checkpoint_id:
            self.path = Path(paths.local(checkpoint_id))


class StorageWriter(_Storage, _StorageWriter):
    """Saves under `path` (docs/dcp.md says what it names).

    overwrite    False: refuses where the path holds a step already
    attributes   {name: text} of the step, equal on all ranks
    bases        ["RUN/STEP", ...]: further steps whose data may be reused
    options      of the saver, as for vckpt.async_save: deadline, low_priority, ring_bytes, ...
    and the options of DCP's FileSystemWriter, in its order; those that have no effect here warn once."""

    def __init__(self, path: PathLike, single_file_per_rank: Any = _NOT_GIVEN, sync_files: Any = _NOT_GIVEN,
                 thread_count: Any = _NOT_GIVEN, per_thread_copy_ahead: Any = _NOT_GIVEN,
                 cache_staged_state_dict: Any = _NOT_GIVEN, overwrite: bool = True, _extensions: Any = None,
                 serialization_format: Any = _NOT_GIVEN, *, attributes: Mapping[str, str] | None = None,
                 bases: Iterable[PathLike] = (), **options: Unpack[Options]) -> None:
        super().__init__()
        without_effect = {"single_file_per_rank": single_file_per_rank, "sync_files": sync_files,
                          "thread_count": thread_count, "per_thread_copy_ahead": per_thread_copy_ahead,
                          "cache_staged_state_dict": cache_staged_state_dict,
                          "serialization_format": serialization_format, "_extensions": _extensions or _NOT_GIVEN}
        for option, value in without_effect.items():
            if value is not _NOT_GIVEN and option not in _warned:
                _warned.add(option)
                warnings.warn(f"vckpt.dcp.StorageWriter: the option {option} has no effect here", stacklevel=3)
        self.path, self.overwrite = Path(paths.local(path)), overwrite
        self.attributes, self.bases, self.options = dict(attributes or {}), list(bases), saver._options(options)
        self.save_id, self.use_collectives = str(uuid.uuid4()), True
        self.rank: int | None = None
        self.plans: list[SavePlan] | None = None
        self.local: SavePlan | None = None
        self.origin: list[str] | None = None       # launches of the process that sent it here

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=str(self.path), save_id=self.save_id)

    def reset(self, checkpoint_id: PathLike | None = None) -> None:
        super().reset(checkpoint_id)
        self.save_id = str(uuid.uuid4())

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.rank, self.use_collectives = kwargs.get("rank"), kwargs.get("use_collectives", True)
        _here.ticket, self.plans, self.local = None, None, None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self.local = plan if getattr(plan, "usable", True) else None
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        target = paths.resolve(self.path)
        number = paths.saved(self.path, target.step)
        run = target.run if self.use_collectives or self.rank is None else RANK_RUN.format(target.run, self.rank)
        paths.begin(target.store, run)
        there = [] if self.overwrite else paths.steps(os.path.join(target.store, run))
        if there and (number is None or number in there):
            which = there[-1] if number is None else number
            raise _lib.StepExists(errno.EEXIST, f"{self.path}: {run}/{which} exists already: save under another path, "
                                                "or give overwrite=True")
        launch = _launch(target.store, run, (self.rank or 0) if self.use_collectives else 0, len(plans), self.origin)
        step = number if number is not None or len(plans) == 1 else _next_step(target.store, run)
        tickets = [Ticket(store=target.store, run=run, step=step, launch=launch, rank=rank, world=len(plans),
                          replace=self.overwrite and number is not None) for rank in range(len(plans))]
        _here.ticket, self.plans = tickets[0], plans        # without a process group nothing is sent
        return [dataclasses.replace(plan, storage_data=ticket) for plan, ticket in zip(plans, tickets)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        ticket, _here.ticket = getattr(_here, "ticket", None) or plan.storage_data, None
        if not isinstance(ticket, Ticket) or ticket.used:
            raise _lib.invalid(f"{self.path}: the plan has no ticket of this save: write_data needs the plan that the "
                               "coordinator's prepare_global_plan made for this rank")
        ticket.used = True
        try:
            results, step = self._save(_native(ticket, self.options), ticket, plan, planner)
        except BaseException:
            _failed.add((ticket.store, ticket.run))
            raise
        future: Future[list[WriteResult]] = Future()
        future.set_result([WriteResult(index=index, size_in_bytes=size,
                                       storage_data=StorageInfo(ticket.run, step, *place))
                           for index, size, place in results])
        return future

    def _save(self, native: saver.Native, ticket: Ticket, plan: SavePlan,
              planner: SavePlanner) -> tuple[list[Result], int]:
        """This rank's whole save: ([(index, bytes, (component, name) or nothing)], the step's number)."""
        with native.lock:               # begun at once, so that all ranks count alike
            handle = native.begin(step=ticket.step, attributes=self.attributes, base=self.bases, replace=ticket.replace)
            try:
                declared = _Declared(plan, planner, _known(self.local, planner))
                handle.tensors(declared.rows())
                for name, data in declared.blobs(ticket.rank):
                    handle.blob(name, data)
                if self.plans is not None:
                    handle.blob(dcp_state.DOCUMENT, dcp_state.document(self._whole(planner)))
                if native.world > 1:
                    handle.alike(saver._attributes_alike(self.attributes))
                saver._on_device(declared.device, handle, declared.refs)
            except BaseException as error:
                handle.give_up(error)
                raise
        handle.staged()
        declared.refs.clear()
        return declared.results, handle.committed()

    def _whole(self, planner: SavePlanner) -> Metadata:
        """What the planner says of the whole state, or, where it says nothing, what the plans say."""
        if isinstance(getattr(planner, "metadata", None), Metadata):
            return planner.metadata
        plans = self.plans or []
        if not all(getattr(plan, "usable", True) for plan in plans):
            raise _lib.invalid(f"{self.path}: the planner caches plans and has no attribute `metadata` for the whole "
                               "state: give one that has it, or that does not cache plans")
        return dcp_state.from_plans(plans)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """The step was committed before the first rank's write_data ended."""
        metadata.storage_data = {result.index: result.storage_data for some in results for result in some}
        metadata.storage_meta = self.storage_meta()
        self.plans, self.local = None, None

    def __getstate__(self) -> dict[str, Any]:
        global _sent
        _sent += 1
        return {**self.__dict__, "plans": None, "local": None,
                "origin": sorted(native.launch_id for native in saver._natives.values())}


# ---- savers ----
#
# The launch is that of this process's saver of the run, whatever opened it. Unless a vckpt.Saver holds that saver, the
# coordinator takes a new launch where that one may no longer be the run's newest, or where ranks may count their saves
# differently:
#   after a save that failed: a rank may not even have begun it;
#   where a writer has been sent to another process since (torch's checkpoint process), which has a launch of its own;
#   and, in that process, where the sender has opened savers since.

_failed: set[tuple[str, str]] = set()         # (store, run) of saves that this process saw fail
_sent = 0               # writers that were sent away
# launch id -> (_sent, the writer's origin) when it was last used
_made: dict[str, tuple[int, list[str] | None]] = {}


def _open(store: str, run: str, rank: int) -> saver.Native | None:
    return saver._natives.get((os.path.realpath(store), run, rank))


# {(store, run): the last step that this process gave out as coordinator}
_given: dict[tuple[str, str], int] = {}


def _next_step(store: str, run: str) -> int:
    """The step that all ranks save where the path names none: after the newest, and after one that may be under
    way."""
    key = (os.path.realpath(store), run)
    newest = paths.latest(os.path.join(store, run))
    _given[key] = max(_given.get(key, -1), -1 if newest is None else newest) + 1
    return _given[key]


def _launch(store: str, run: str, rank: int, world: int, origin: list[str] | None) -> str:
    native, now = _open(store, run, rank), (_sent, origin)
    launch = secrets.token_hex(16)
    if native is not None and native.world == world:
        fits = (store, run) not in _failed and _made.get(native.launch_id or "", (0, None)) == now
        launch = native.launch_id or launch if fits or native.users else launch
    _failed.discard((store, run))
    _made[launch] = now
    return launch


def _native(ticket: Ticket, options: dict[str, Any]) -> saver.Native:
    native = _open(ticket.store, ticket.run, ticket.rank)
    if native is not None and native.launch_id != ticket.launch:
        if native.users:
            raise _lib.invalid(f"{ticket.store}/{ticket.run} is open in this process by a vckpt.Saver that other ranks "
                               "do not have: close it first")
        native.check_options(options)
        options = native.options                    # they stay until vckpt.close()
        with contextlib.suppress(_lib.Error):       # of an earlier save, raised where that was waited for
            saver._close(native)                    # what is under way is decided first
    return saver.native(ticket.store, ticket.run, rank=ticket.rank, world=ticket.world, launch_id=ticket.launch,
                        user=False, **options)


# ---- a rank's items ----

class _Declared:
    """What this rank stores by its plan, as the library takes it. `refs` live until it is staged."""

    def __init__(self, plan: SavePlan, planner: SavePlanner, known: list[WriteItem]) -> None:
        self.planner = planner
        self.refs: list[object] = []
        self.results: list[Result] = []
        self.device: torch.device | None = None
        self.bytes = [item for item in plan.items if item.type == WriteItemType.BYTE_IO]
        tensors = [item for item in plan.items if item.type != WriteItemType.BYTE_IO]
        places = dcp_state.names(dcp_state.paths_of(planner, plan, [item.index.fqn for item in [*tensors, *known]]))
        held: dict[str, list[WriteItem]] = {}
        for item in tensors:
            held.setdefault(item.index.fqn, []).append(item)
        self.table = [self.row(key, places[key], items) for key, items in held.items()]
        self.table += [self.absent(places[item.index.fqn], item) for item in known if item.index.fqn not in held]

    def rows(self) -> NDArray[np.uint64]:
        return np.frombuffer(b"".join(self.table), np.uint64).reshape(len(self.table), _lib.TENSOR_BYTES // 8)

    def row(self, key: str, place: Place, items: list[WriteItem]) -> bytes:
        """The row of a tensor. Several boxes of this rank are put one after another."""
        tensors, boxes = [], []
        for item in items:
            tensor, chunk = _plain(key, self.planner.resolve_data(item).detach(), item), item.tensor_data.chunk
            if tuple(tensor.shape) != tuple(chunk.sizes):
                raise _lib.invalid(f"{key}: the planner gave a tensor of shape {tuple(tensor.shape)} for a chunk of "
                                   f"shape {tuple(chunk.sizes)}")
            self.results.append((item.index, tensor.numel() * tensor.element_size(), place))
            if tensor.numel():
                tensors.append(tensor)
                boxes.append((tuple(chunk.offsets), tuple(chunk.sizes)))
        if len(tensors) == 1:
            data = tensors[0]
        else:
            dtype = dcp_state.kept_dtype(items[0].tensor_data.properties.dtype)
            # not all types can be joined
            flat = [tensor.resolve_conj().resolve_neg().reshape(-1).view(torch.uint8) for tensor in tensors]
            data = torch.cat(flat).view(dtype) if flat else torch.empty(0, dtype=dtype)
        return self.filled(place, key, data, Layout(tuple(items[0].tensor_data.size), boxes=boxes))

    def absent(self, place: Place, item: WriteItem) -> bytes:
        """A tensor of this rank's state that another rank stores: named all the same, so that ranks agree on one
        layout."""
        data = torch.empty(0, dtype=dcp_state.kept_dtype(item.tensor_data.properties.dtype) or torch.uint8)
        return self.filled(place, item.index.fqn, data, Layout(tuple(item.tensor_data.size), boxes=[]))

    def filled(self, place: Place, key: str, data: torch.Tensor, layout: Layout) -> bytes:
        entry = TorchEntry(*place, key, data, layout, 0)
        row = _lib.Tensor.from_buffer_copy(entry.row)
        row.data = entry.address(data, self.refs) if data.numel() else None
        self.refs += [data, entry]
        self.device = self.device or (entry.device if data.numel() else None)
        return bytes(row)

    def blobs(self, rank: int) -> list[tuple[str, bytes | memoryview]]:
        """Byte entries are kept as they are, one after another, with a document that has the place of each."""
        whole, index, looks = io.BytesIO(), {}, pickles.Looks()
        for item in self.bytes:
            data = self.planner.resolve_data(item).getbuffer()
            looks.look(item.index.fqn, data)
            index[item.index.fqn] = whole.tell(), len(data)
            self.results.append((item.index, len(data), ()))
            whole.write(data)
        return [(dcp_state.BYTES.format(rank), whole.getbuffer()),
                (dcp_state.INDEX.format(rank), json.dumps(index, indent=1).encode())] if self.bytes else []


def _known(local: SavePlan | None, planner: SavePlanner) -> list[WriteItem]:
    """Items of all tensors of this rank's state, also of those that another rank stores: from the planner's cache where
    it caches plans."""
    if local is None and getattr(planner, "_enable_plan_caching", False):
        local = getattr(planner, "_cached_save_plan", {}).get(getattr(planner, "_cached_plans_key", None))
    return [item for item in getattr(local, "items", ()) if item.tensor_data is not None]


def _plain(key: str, tensor: torch.Tensor, item: WriteItem) -> torch.Tensor:
    """A tensor of a type that the store has, the same bytes."""
    kind = dcp_state.kept_dtype(tensor.dtype)
    if tensor.is_quantized or tensor.layout != torch.strided or kind is None:
        what = "quantized tensor" if tensor.is_quantized else f"tensor of {tensor.layout}, {tensor.dtype}"
        raise _lib.invalid(f"{key}: a {what} cannot be kept: give its parts")
    if tensor.dtype != item.tensor_data.properties.dtype:
        raise _lib.invalid(f"{key}: the plan says dtype {item.tensor_data.properties.dtype}, the planner gave a tensor "
                           f"of {tensor.dtype}: they must agree")
    return tensor if kind == tensor.dtype else tensor.resolve_conj().resolve_neg().view(kind)


# ---- reading ----

class StorageReader(_Storage, _StorageReader):
    """Reads what a StorageWriter saved under `path`, in any layout that the planner asks for; and, by names
    COMPONENT.NAME, the tensors and values of any other step of a store. A path that names no step: the newest.

    threads, verify, exchange    as for vckpt.load; with exchange, all ranks of the default process group load together
    allow_pickle                 True: byte entries are given to the planner, which unpickles them, as the store has
                                 them: its author can run any program here. False: only plain values, read and written
                                 anew by vckpt (docs/dcp.md)
    bytes_read, exchanged        once a load is over: bytes of the store's packs that this rank read, checks included,
                                 and what came of the exchange"""

    def __init__(self, path: PathLike, _extension_registry: Any = None, *, threads: int = 0,
                 verify: loads.Verify = "checks", exchange: Mode = "never", allow_pickle: bool = False) -> None:
        super().__init__()
        check_mode(exchange)
        self.allow_pickle = allow_pickle
        self.how, self.bytes_read, self.mode = loads.chosen(threads, verify, "raise"), 0, exchange
        self.exchanged: Exchanged | None = None
        self.path, self.load_id = Path(paths.local(path)), str(uuid.uuid4())
        self.step: Step | None = None
        self.common = True          # the same step at all ranks
        self.kept: dict[str, dcp_state.Kept] = {}
        self.bytes: dict[str, tuple[str, int, int]] = {}
        self.values: dict[str, Any] = {}

    def reset(self, checkpoint_id: PathLike | None = None) -> None:
        super().reset(checkpoint_id)
        self.step, self.load_id = None, str(uuid.uuid4())

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """rank: given without collectives: the metadata of that rank's own save."""
        target, rank = paths.resolve(self.path), kwargs.get("rank")
        run = target.run if rank is None else RANK_RUN.format(target.run, rank)
        self.common = rank is None
        if target.init:
            raise paths.no_store(self.path, target.store)
        self.step = Step(os.path.join(target.store, run, "latest" if target.step is None else str(target.step)),
                         "torch")
        blobs = {blob.name: blob.bytes for blob in self.step.blobs() if blob.rank is None}
        try:
            if dcp_state.DOCUMENT in blobs:
                metadata, self.kept = dcp_state.read_document(self.step, blobs)
                self.values = {}
            else:
                metadata, self.kept, self.values = _of_step(self.step)
            self.bytes = dcp_state.read_places(self.step, blobs)
        except dcp_state.BadDocument as error:
            raise dcp_state.BadDocument(f"{self.path}: {run}/{self.step.number}: {error}") from None
        metadata.storage_data = {}
        metadata.storage_meta = StorageMeta(checkpoint_id=str(self.path))
        if hasattr(metadata.storage_meta, "load_id"):
            metadata.storage_meta.load_id = self.load_id
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if self.step is None:
            self.read_metadata(**({} if kwargs.get("use_collectives", True) else {"rank": kwargs.get("rank")}))

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Each rank opens a step by itself, and says in its plan which."""
        return dataclasses.replace(plan, storage_data=self.opened().commit if self.common else None)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Compares the steps of the ranks, at the coordinator, whose error all raise: none has read anything yet."""
        for rank, plan in enumerate(plans):
            self.compare(plans[0].storage_data, f"rank {rank}", plan.storage_data)
        own = self.opened().commit if self.common else None     # for ranks whose planner made plans anew
        return [plan if plan.storage_data else dataclasses.replace(plan, storage_data=own) for plan in plans]

    def compare(self, first: Commit | None, whose: str, commit: Commit | None) -> None:
        if first != commit:
            said = [f"step {one.step}, entry {one.entry}" if one else "one of a run of its own"
                    for one in (first, commit)]
            raise _lib.invalid(f"{self.path}: ranks opened different steps, or commits of one that was replaced: rank "
                               f"0 {said[0]}, {whose} {said[1]}: the run changed just now; load again, or name a step "
                               "that stays as it is")

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads all items by one load. When this returns, the future is done, and the planner has everything."""
        if self.common and plan.storage_data is not None:
            self.compare(plan.storage_data, "this rank", self.opened().commit)
        reads = dcp_reads.Reads(self.opened(), planner.commit_tensor, self.how, self.mode)
        try:
            for item in plan.items:
                if item.type == LoadItemType.BYTE_IO:
                    planner.load_bytes(item, io.BytesIO(self.entry(item.storage_index.fqn)))
                else:
                    target = planner.resolve_tensor(item).detach()
                    reads.add(item, target, *self.wanted(item, target))
        except BaseException as error:
            reads.refuse(error)
            raise
        reads.run()
        self.bytes_read, self.exchanged = reads.watch.read, reads.found
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def opened(self) -> Step:
        if self.step is None:
            self.read_metadata()
        assert self.step is not None
        return self.step

    def where(self) -> str:
        return f"{self.path}: {self.opened().run}/{self.opened().number}"

    def missing(self, key: str) -> _lib.NotFound:
        return _lib.NotFound(errno.ENOENT, f"{self.where()} has no entry {key!r}")

    def entry(self, key: str) -> bytes:
        if key in self.values:
            return dcp_state.saved_bytes(key, self.values[key])
        if key not in self.bytes:
            raise self.missing(key)
        blob, offset, length = self.bytes[key]
        if getattr(self, "last", (None,))[0] != (self.step, blob):      # entries of a rank follow each other
            self.last = (self.step, blob), self.opened().blob(blob)
        found = bytes(memoryview(self.last[1])[offset:offset + length])
        return found if self.allow_pickle else self.plain(key, found)

    def plain(self, key: str, entry: bytes) -> bytes:
        """An entry that has nothing of the store's pickle."""
        try:
            return pickles.reencoded(entry)
        except pickles.Refused as error:
            raise _lib.invalid(f"{self.where()}: entry {key[:300]!r}: {error}. Python's own reader of pickles may take "
                               "it, and runs whatever it says: if you trust the author of this store, give "
                               "StorageReader(..., allow_pickle=True)") from None

    def wanted(self, item: ReadItem, target: torch.Tensor) -> tuple[dcp_state.Kept, PlainBox]:
        """What an item asks for: the tensor of the step, and the box of it."""
        index, kept = item.storage_index, self.kept.get(item.storage_index.fqn)
        stored = None if kept is None else self.opened()._find(kept.component, kept.name)
        if kept is None or stored is None:
            raise self.missing(index.fqn)
        wrong = None
        if DTYPES.get(dcp_state.kept_dtype(kept.dtype)) != stored[1]:
            wrong = f"says {kept.dtype}, the step has {_lib.DTYPES[stored[1]]}"
        elif kept.shape != stored[2]:
            wrong = f"says shape {list(kept.shape)}, the step has {list(stored[2])}"
        if wrong:
            raise dcp_state.BadDocument(f"{self.where()}: key {index.fqn[:300]!r}: {dcp_state.DOCUMENT} {wrong}")
        if tuple(target.shape) != tuple(item.lengths):
            raise _lib.invalid(f"{index.fqn}: the planner asks for a box of shape {tuple(item.lengths)}, but gives a "
                               f"tensor of shape {tuple(target.shape)}")
        chunk = index.offset or [0] * len(item.lengths)
        return kept, (tuple(a + b for a, b in zip(chunk, item.storage_offsets)), tuple(item.lengths))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "step": None, "last": (None,)}


def _of_step(step: Step) -> tuple[Metadata, dict[str, dcp_state.Kept], dict[str, Any]]:
    """Metadata of a step that DCP did not save: a key COMPONENT.NAME for every tensor, and one for every value of the
    components' trees, by its path. (Metadata, {key: Kept}, {key: value})"""
    keys: dict[str, Any] = {}
    paths: dict[str, KeyPath] = {}
    kept: dict[str, dcp_state.Kept] = {}
    types = {_lib.DTYPES[number]: dtype for dtype, number in DTYPES.items()}
    for info in step.tensors():
        if info.dtype not in types:
            raise _lib.invalid(f"{info.component}/{info.name}: it has dtype {info.dtype} in the step, which torch "
                               f"{torch.__version__} lacks: install a newer torch")
        key, dtype = f"{info.component}.{info.name}", types[info.dtype]
        if key in kept:         # components have dots in their names, too: whose values would it be?
            raise _lib.invalid(f"{kept[key].component}/{kept[key].name} and {info.component}/{info.name} have the same "
                               f"key here, {key}: read the step by vckpt.load or vckpt.Step")
        keys[key] = dcp_state.whole(TensorProperties(dtype=dtype), info.shape)
        paths[key] = info.component, info.name
        kept[key] = dcp_state.Kept(info.component, info.name, dtype, tuple(info.shape))
    found = {key: one for key, one in dcp_state.plain_values(step).items() if key not in keys}
    keys.update((key, BytesStorageMetadata()) for key in found)
    paths.update((key, path) for key, (path, _) in found.items())
    plain = {key: value for key, (_, value) in found.items()}
    return Metadata(state_dict_metadata=keys, planner_data=paths), kept, plain
