# SPDX-License-Identifier: Apache-2.0
"""An open step: its tensors, which are read when they are asked for (lazy.py), its files, its values. Every byte is
verified by the library.

Nothing is made for a tensor before it is asked for: names are looked up in the library, and iterating describes one
tensor after another. So the first tensor of a step with a hundred thousand is there as soon as the step is open.

What the step reads whole, by read() and values(), is torch's tensors where torch is installed, else numpy's arrays;
`framework="torch"` or "numpy" says which. It does not matter what the program has imported: torch is imported when the
first tensor is read. A dtype that numpy lacks (bf16, f8) is that of ml_dtypes where ml_dtypes is installed, else bytes
of its size (`|V2`, `|V1`)."""
from __future__ import annotations

import ctypes
import errno
import functools
import io
import itertools
import operator
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from ctypes import byref, c_void_p
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from . import _lib, paths, values
from .arrays import destination, empty, installed, is_raw, memory_for, numpy_dtype, torch_tensor
from .diffs import Difference, differences
from .lazy import LazyTensor, Stored
from .paths import split
from .shard import _box
from .signatures import Box, Path
from .state import SAME_AS
from .values_text import KeyPath

if TYPE_CHECKING:
    from numpy.typing import NDArray


class TensorInfo(NamedTuple):
    component: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


class BlobInfo(NamedTuple):
    name: str
    bytes: int
    rank: int | None     # None: of the whole step


class Commit(NamedTuple):
    """Which commit a step is. A step may be replaced under its number; a commit is never another one: equal Commits are
    the same data, bit by bit."""
    step: int           # its number
    entry: int          # of the run's list
    manifest: str       # digest, which names all data


TREE = b'{"$vckpt"'             # what a component's document begins with
SAME_AS_BYTES = 200     # a document of more is none


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _bytes_text(count: int) -> str:
    value, units = float(count), ["B", "kB", "MB", "GB", "TB", "PB", "EB"]
    while value >= 999.95 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{count} B" if units[0] == "B" else f"{value:.1f} {units[0]}"


class Step:
    """STORE/RUN/STEP, STORE/RUN/TAG, STORE/RUN/latest or STORE/RUN (its newest step). Use as a context, or close(),
    after which its tensors cannot be read. Any thread.

    framework: "torch" or "numpy", whose tensors read() and values() give; None: torch's where torch is installed,
    whether the program has imported it or not. A LazyTensor gives both: t.numpy(), t.torch().

    It is a mapping from names to LazyTensors: step["model/w"], step["model", "w"], get(), "model/w" in step, len(step),
    `for name in step`, keys(), items(), dict(step). But values() gives a component as it was saved, and a step without
    tensors is true all the same. A pickle or a copy of it opens the same commit again, or fails.

    commit: the Commit that is to be opened, visible or not any more, of the run that the path names. One rank opens a
    step and sends `step.commit` to the others."""

    def __bool__(self) -> bool:
        return True

    def __init__(self, path: Path, framework: Literal["numpy", "torch"] | None = None,
                 commit: Commit | None = None) -> None:
        self.store, self.run, step = split(path)
        if framework not in (None, "numpy", "torch"):
            raise _lib.invalid(f"framework={framework!r}: expected numpy or torch")
        self.framework = framework or installed()
        pointer, run = c_void_p(), _lib.text(self.run, "run")
        if commit is None:
            self._open(run, step, pointer)
        elif step is None or isinstance(step, str) or step == commit[0]:
            _lib.call("vckpt_step_open_commit", os.fsencode(self.store), run, byref(_commit(*commit)), byref(pointer))
        else:
            raise _lib.invalid(f"{path}: the path names step {step}, commit= is of step {commit[0]}: give STORE/RUN "
                               "with commit=")
        self._pointer = pointer.value
        found = _lib.Commit()
        _lib.lib().vckpt_step_commit(self._pointer, byref(found))
        self.commit = Commit(found.step, found.entry, bytes(found.manifest).hex())
        self.number: int = _lib.lib().vckpt_step_number(self._pointer)
        self.world: int = _lib.lib().vckpt_step_world(self._pointer)            # by how many ranks it was saved

    def _open(self, run: bytes, step: int | str | None, pointer: c_void_p) -> None:
        while True:
            number = paths.number(self.store, self.run, step)
            try:
                _lib.call("vckpt_step_open", os.fsencode(self.store), run, _lib.NONE if number is None else number,
                          byref(pointer))
                return
            except _lib.NotFound:           # the tag may have moved, and then the step that had it was removed
                if not isinstance(step, str) or number == paths.number(self.store, self.run, step):
                    raise

    def __enter__(self) -> Step:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        self._at()
        return Step, (os.path.join(self.store, self.run), self.framework, self.commit)

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        pointer, self._pointer = getattr(self, "_pointer", None), None
        if pointer and _lib._loaded is not None:
            _lib._loaded.vckpt_step_close(pointer)

    def __repr__(self) -> str:
        """<vckpt.Step /ckpt/llama/1000: model (147 tensors, 2.5 GB), optimizer (294 tensors, 5.0 GB), 3 files,
        loss=2.31>"""
        sums: dict[str, list[int]] = {}
        for component, *_, size in self.tensors() if self._pointer or "_tensors" in vars(self) else ():
            sums.setdefault(component, []).append(size)
        said = [f"{component} ({_counted(len(sizes), 'tensor')}, {_bytes_text(sum(sizes))})"
                for component, sizes in sums.items()]
        blobs = self._blobs if self._pointer or "_blobs" in vars(self) else {}
        said += [_counted(len(blobs), "file")] if blobs else []
        said += [f"{key}={value}" for key, value in self.attributes.items()] if self._pointer else ["closed"]
        return f"<vckpt.Step {os.path.join(self.store, self.run, str(self.number))}: {', '.join(said) or 'empty'}>"

    def _at(self) -> int:
        if not self._pointer:
            raise _lib.Error(errno.EBADF, f"step {self.run}/{self.number} is closed")
        return self._pointer

    # -- what is here --

    @property
    def attributes(self) -> dict[str, str]:
        """Of the save, and those that were set later (vckpt.set_attributes) when the step was opened."""
        found = ctypes.POINTER(_lib.Attribute)()
        count = _lib.lib().vckpt_step_attributes(self._at(), byref(found))
        return {found[i].key.decode(): found[i].value.decode() for i in range(count)}

    def _facts(self) -> _lib.Facts:
        found = _lib.Facts(size=ctypes.sizeof(_lib.Facts))
        _lib.lib().vckpt_step_facts(self._at(), byref(found))
        return found

    @property
    def pinned(self) -> bool:
        """Was it pinned when it was opened? Then no one removes or replaces it."""
        return bool(self._facts().pinned)

    @property
    def pin_reason(self) -> str:
        """Of the pin; "": it is not pinned, or for no reason."""
        return str(self._facts().reason.decode())

    @property
    def tags(self) -> list[str]:
        """Its tags when it was opened, sorted."""
        found = self._facts()
        return [tag.decode() for tag in found.tags[:found.ntags]]

    def _stored(self, number: int) -> tuple[tuple[str, str], Stored]:
        """((component, name), what is known) of the tensor with that number."""
        info = _lib.TensorInfo()
        if _lib.lib().vckpt_step_tensor(self._at(), number, byref(info)) < 0:
            raise _lib.Error(errno.EIO, f"step {self.run}/{self.number}: tensor {number} cannot be described")
        name = ctypes.string_at(info.name, info.name_len).decode()
        return (info.component.decode(), name), (number, info.dtype, tuple(info.shape[:info.ndim]), info.bytes)

    def _find(self, component: object, name: object) -> Stored | None:
        """What is known of a tensor, or None. It does not need the table of all tensors."""
        if not isinstance(component, str) or not isinstance(name, str):
            return None
        try:
            words = component.encode(), name.encode()
        except UnicodeEncodeError:
            return None
        if any(b"\0" in word for word in words):        # which C cannot be asked for
            return self._tensors.get((component, name))
        at = self._at()
        if "_tensors" in vars(self):
            return self._tensors.get((component, name))
        number = _lib.lib().vckpt_step_find(at, *words)
        return None if number < 0 else self._stored(number)[1]

    @functools.cached_property
    def _infos(self) -> NDArray[np.uint64]:
        """What the library knows of all tensors, in the step's order: a table of struct vckpt_tensor_info in words."""
        infos = np.empty((len(self), ctypes.sizeof(_lib.TensorInfo) // 8), np.uint64)
        if _lib.lib().vckpt_step_tensors(self._at(), 0, len(infos), infos.ctypes.data) < 0:
            raise _lib.Error(errno.EIO, f"step {self.run}/{self.number}: its tensors cannot be described")
        return infos

    @functools.cached_property
    def _tensors(self) -> dict[tuple[str, str], Stored]:
        """Of all tensors, in the step's order. Made at the first use: a step may have a hundred thousand."""
        infos, text = self._infos, ctypes.string_at
        lengths, dtypes, ndims = infos.view(np.uint32)[:, 4:7].T.tolist()
        components = {address: text(address).decode() for address in set(infos[:, 0].tolist())}
        dims = [text(address, 8 * ndim) for ndim, address in zip(ndims, infos[:, 4].tolist())]
        known = {one: struct.unpack(f"{len(one) // 8}Q", one) for one in set(dims)}
        shapes = map(known.__getitem__, dims)
        names = [text(address, length).decode() for address, length in zip(infos[:, 1].tolist(), lengths)]
        keys = zip(map(components.__getitem__, infos[:, 0].tolist()), names)
        return dict(zip(keys, zip(range(len(infos)), dtypes, shapes, infos[:, 5].tolist())))

    @functools.cached_property
    def _names(self) -> tuple[ctypes.Array[ctypes.c_char], NDArray[np.uint64]]:
        """The names of all tensors as C has them, and the address of each. (No stored name has a NUL in it.)"""
        names = [name.encode() + b"\0" for _, name in self._tensors]
        held = ctypes.create_string_buffer(b"".join(names))
        begins = itertools.accumulate(map(len, names), initial=ctypes.addressof(held))
        return held, np.fromiter(begins, np.uint64)

    def _rows(self, numbers: list[int]) -> NDArray[np.uint64]:
        """A table of struct vckpt_tensor in words: these tensors whole, but for the addresses of their data."""
        infos = self._infos[numbers]
        rows = np.zeros((len(numbers), _lib.TENSOR_BYTES // 8), np.uint64)
        rows[:, 0], rows[:, 2], rows[:, 10] = infos[:, 0], infos[:, 4], infos[:, 4]
        rows[:, 1] = self._names[1][numbers]
        rows.view(np.uint32)[:, 22:25] = infos.view(np.uint32)[:, [6, 6, 5]]
        return rows

    @functools.cached_property
    def _by_name(self) -> dict[str, list[tuple[str, str]]]:
        """{name: [(component, name)]}"""
        found: dict[str, list[tuple[str, str]]] = {}
        for key in self._tensors:
            found.setdefault(key[1], []).append(key)
        return found

    @functools.cached_property
    def _blobs(self) -> dict[tuple[str, int | None], int]:
        """{(name, rank): bytes} of all. Made at the first use: it needs something of every rank that has some."""
        blobs = map(self._blob_described, range(_lib.call("vckpt_step_blob_count", self._at())))
        return {(name, rank): size for name, size, rank in blobs}

    def _blob_bytes(self, name: str, rank: int | None) -> int | None:
        """The size of a file, or None where there is none. Reads something of one rank, and not of all."""
        info, place = _lib.BlobInfo(), _place(name, rank)
        if place is None or not _lib.call("vckpt_step_blob_find", self._at(), *place, byref(info)):
            return None
        return int(info.bytes)

    def _blob_ranks(self, name: str) -> Iterator[int]:
        """Ranks that have a file of their own of that name, ascending."""
        place, first, rank = _place(name, None), 0, ctypes.c_uint32()
        while place is not None and _lib.call("vckpt_step_blob_rank", self._at(), place[0], first, byref(rank)):
            yield rank.value
            first = rank.value + 1

    def _described(self, number: int) -> TensorInfo:
        key, (_, dtype, shape, size) = self._stored(number)
        return TensorInfo(*key, _lib.DTYPES[dtype] or "", shape, size)

    def _blob_described(self, number: int) -> BlobInfo:
        info = _lib.BlobInfo()
        if _lib.lib().vckpt_step_blob(self._at(), number, byref(info)) < 0:
            raise _lib.Error(errno.EIO, f"step {self.run}/{self.number}: blob {number} cannot be described")
        return BlobInfo(info.name.decode(), info.bytes, info.rank if info.per_rank else None)

    def diff(self, other: Step | Path, values: bool = False, component: str | None = None) -> list[Difference]:
        """What is different from this step (A) to the other one (B), an open step or the path of one; [] where they are
        equal. Digests decide; data is read only of tensors that ranks cut differently in the two steps. values: also
        how much values changed, most first, which reads the pieces that differ. component: only this one, with its
        files COMPONENT.json and COMPONENT/... Attributes are not compared."""
        if isinstance(other, Step):
            return differences(self, other, component, values)
        with Step(other, self.framework) as opened:
            return differences(self, opened, component, values)

    def tensors(self) -> list[TensorInfo]:
        """[TensorInfo(component, name, dtype, shape, bytes)], in the step's order."""
        return [TensorInfo(*key, _lib.DTYPES[dtype] or "", shape, size)
                for key, (_, dtype, shape, size) in self._tensors.items()]

    def components(self) -> list[str]:
        """Those with tensors, in the step's order, then those with values alone."""
        components = dict.fromkeys(self._infos[:, 0].tolist())
        found = dict.fromkeys(ctypes.string_at(component).decode() for component in components)
        for name, rank in self._blobs:
            component, _, ending = name.rpartition(".")
            # config.json of a model is a file, and no component
            if ending == "json" and component not in found and self.blob(name, rank).startswith(TREE):
                found[component] = None
        return list(found)

    def blobs(self) -> list[BlobInfo]:
        """[BlobInfo(name, bytes, rank)]: rank None for those of the whole step."""
        return [BlobInfo(*key[:1], size, key[1]) for key, size in self._blobs.items()]

    # -- tensors --

    def __contains__(self, key: str | tuple[str, str]) -> bool:
        if isinstance(key, tuple):
            return len(key) == 2 and self._find(*key) is not None
        return bool(self._named(key))

    def __len__(self) -> int:
        """The number of tensors."""
        count: int = _lib.lib().vckpt_step_tensor_count(self._at())
        return count

    def __iter__(self) -> Iterator[str]:
        """The names, "COMPONENT/NAME", in the step's order."""
        for number in range(len(self)):
            yield "/".join(self._stored(number)[0])

    def keys(self) -> list[str]:
        """The names of the tensors as step[...] takes them, "COMPONENT/NAME", in the step's order."""
        return list(map("/".join, self._tensors))

    def items(self) -> Iterator[tuple[str, LazyTensor]]:
        """(name, tensor) of each, in the step's order."""
        for number in range(len(self)):
            key, stored = self._stored(number)
            yield "/".join(key), LazyTensor(self, *key, stored)

    def get(self, key: str | tuple[str, str], default: Any = None) -> Any:
        """step[key], or default where the step has no such tensor."""
        if key not in self:
            return default
        return self[key]

    @functools.cached_property
    def thinned(self) -> tuple[str, ...]:
        """The components that it has lost since it was saved (vckpt prune --thin)."""
        found: list[str] = []
        while (name := _lib.lib().vckpt_step_thinned(self._at(), len(found))) is not None:
            found.append(name.decode())
        return tuple(found)

    def _no_tensor(self, component: str, name: str) -> _lib.NotFound:
        said = (f"component {component!r} of {self.run}/{self.number} was thinned: it was dropped from the step after "
                "it was saved (vckpt prune --thin)" if component in self.thinned
                else f"step {self.run}/{self.number} has no tensor {component}/{name}")
        return _lib.NotFound(errno.ENOENT, said)

    def _named(self, name: object) -> list[tuple[str, str]]:
        if not isinstance(name, str):
            return []
        component, _, rest = name.partition("/")                                # no component has a slash in its name
        return [(component, rest)] if self._find(component, rest) else self._by_name.get(name, [])

    def _key(self, key: str | tuple[str, str]) -> tuple[str, str]:
        """(component, name) of the one tensor that step[key] means."""
        if isinstance(key, tuple):
            if key not in self:
                raise KeyError(key)
            return key
        found = self._named(key)
        if len(found) > 1:
            raise KeyError(f"{key} is in {' and '.join(component for component, _ in found)}: give "
                           "step[COMPONENT, NAME]")
        if not found and isinstance(key, str) and self._blob_bytes(f"{key}.json", None) is not None:
            raise KeyError(f"{key} is a component, not a tensor: step.values({key!r}) gives it")
        if not found:
            raise KeyError(key)
        return found[0]

    def __getitem__(self, key: str | tuple[str, str]) -> LazyTensor:
        """step["model", "w.weight"], step["model/w.weight"], or step["w.weight"] where no other component has that
        name. Nothing of the tensor is read."""
        component, name = self._key(key)
        stored = self._find(component, name)
        if stored is None:
            raise KeyError(key)
        return LazyTensor(self, component, name, stored)

    def read(self, component: str, name: str, box: Box | None = None, out: Any = None) -> Any:
        """A whole tensor of the step's framework, or the box of it: a slice for each dimension, or (offsets, sizes).
        out: an array or CPU tensor of the box's shape and dtype, strided or not, that is filled and returned."""
        stored = self._find(component, name)
        if stored is None:
            raise self._no_tensor(component, name)
        number, dtype, shape, _ = stored
        pairs, size = None, shape
        if box is not None:
            offsets, size = _box(box, shape)
            pairs = _lib.u64s([n for pair in zip(offsets, size) for n in pair])
        made = out is None
        if made:
            out = empty(size, dtype, f"step {self.run}/{self.number}: tensor {component}/{name}")
        address, strides = destination(out, size, dtype)
        turned = any(stride < 0 for stride in strides)                          # of a numpy view: by way of a copy
        held = np.empty(size, out.dtype) if turned else None
        if turned:
            address, strides = destination(held, size, dtype)
        self._read(number, pairs, address, strides)
        if turned:
            out[...] = held
        return self._of_framework(out, dtype) if made else out

    def _of_framework(self, array: NDArray[Any], dtype: int) -> Any:
        """The array, or a tensor over its memory."""
        return torch_tensor(array, dtype) if self.framework == "torch" else array

    def _read(self, number: int, pairs: ctypes.Array[ctypes.c_uint64] | None, address: int,
              strides: Sequence[int]) -> None:
        """pairs: (offset, size) of each dimension, or None; strides in bytes."""
        _lib.call("vckpt_step_read", self._at(), number, pairs, address, _lib.i64s(strides))

    # -- files and values --

    def blob(self, name: str, rank: int | None = None) -> bytes:
        """The bytes of a file of the step; rank: of one that a rank keeps for itself. A file that is longer than the
        memory is a vckpt.Error."""
        size, place = self._blob_bytes(name, rank), _place(name, rank)
        if size is None or place is None:
            whose = "" if rank is None else f" of rank {rank}"
            raise _lib.NotFound(errno.ENOENT, f"step {self.run}/{self.number} has no blob {name}{whose}")
        with memory_for(f"step {self.run}/{self.number}: blob {name}", size):
            data = bytearray(size)
            _lib.call("vckpt_step_blob_get", self._at(), *place,
                      (ctypes.c_char * max(size, 1)).from_buffer(data or bytearray(1)))
            return bytes(data)

    def ranks(self, component: str) -> list[int]:
        """Ranks that have a tree of their own of a component, besides the common one: a pipeline's stages, what is per
        rank, parts of one rank alone."""
        return list(self._ranks(component))

    def _ranks(self, component: str) -> Iterator[int]:
        """As `ranks`, one by one: it reads something of each rank that it passes."""
        return (rank for rank in self._blob_ranks(f"{component}.json") if self._same_as(component, rank) is None)

    def _of_ranks(self, component: str) -> bool:
        """Is there any such rank?"""
        return next(self._ranks(component), None) is not None

    def _same_as(self, component: str, rank: int) -> int | None:
        """The rank whose tree this one shares, or None."""
        name = f"{component}.json"
        size = self._blob_bytes(name, rank)
        if size is None or size >= SAME_AS_BYTES:
            return None
        home = values.decode(self.blob(name, rank))
        return home["rank"] if isinstance(home, values.Record) and home.type_name == SAME_AS else None

    def values(self, component: str, rank: int | None = None, types: Iterable[type] | Mapping[str, type] = (),
               tensors: bool = True) -> Any:
        """A component as it was saved, tensors in place, whole and of the step's framework. rank: as that rank has it,
        where that differs: with what it keeps for itself. tensors=False: vckpt.Record("$tensor") in their place. types:
        classes that come back as themselves."""
        name = f"{component}.json"
        own = rank is not None and self._blob_bytes(name, rank) is not None
        home = self._same_as(component, rank) if own and rank is not None else None
        # this rank shares that one's tree
        if home is not None:
            return self.values(component, home, types, tensors)
        if not own and rank is None and self._blob_bytes(name, None) is None:
            ranks = list(self._blob_ranks(name))
            if ranks:
                raise _lib.NotFound(errno.ENOENT, f"{component} is kept for each rank: give rank=, one of "
                                                  f"{ranks[:8]}{'...' if ranks[8:] else ''}")
        data = self.blob(name, rank if own else None)
        if not tensors:
            return values.decode(data, types=types, path=(component,))

        def fetch(path: KeyPath, tensor: str, members: dict[str, Any]) -> Any:
            if "blob" in members:
                return self._rank_tensor(members, rank)
            return self.read(component, tensor)
        return values.decode(data, types=types, tensor=fetch, path=(component,))

    def _rank_tensor(self, members: Mapping[str, Any], rank: int | None) -> Any:
        array = self._rank_array(members, rank)
        number = _lib.DTYPES.index(members["dtype"])
        if self.framework == "torch":
            return torch_tensor(array, number)
        return array.view(numpy_dtype(number)) if is_raw(array.dtype) else array

    def _rank_array(self, members: Mapping[str, Any], rank: int | None) -> NDArray[Any]:
        blob, word = members.get("blob"), members.get("dtype")
        if not isinstance(blob, str) or word not in _lib.DTYPES[1:]:
            raise _lib.FormatError(_lib.EFORMAT, f"step {self.run}/{self.number}: the reference to a tensor of rank "
                                                 f"{rank} has no known form")
        array = np.lib.format.read_array(io.BytesIO(self.blob(blob, rank)), allow_pickle=False)
        number = _lib.DTYPES.index(word)
        if array.dtype.itemsize != _lib.ITEM_BYTES[number]:
            raise _lib.FormatError(_lib.EFORMAT, f"{blob} of rank {rank}: it has items of {array.dtype.itemsize} "
                                                 f"bytes, {word} has {_lib.ITEM_BYTES[number]}")
        return array


def _place(name: str, rank: int | None) -> tuple[bytes, int] | None:
    """Name and rank of a file as the library takes them, -1: of no rank's own. None: there can be none."""
    number = -1
    try:
        if rank is not None and not 0 <= (number := operator.index(rank)) < 1 << 32:
            return None
        return _lib.text(name, "name"), number
    except (TypeError, _lib.InvalidArgument):
        return None


def _commit(step: int, entry: int, manifest: str) -> _lib.Commit:
    try:
        return _lib.Commit(step, entry, (ctypes.c_uint8 * 32)(*bytes.fromhex(manifest)))
    except (TypeError, ValueError, IndexError):
        raise _lib.invalid(f"commit={(step, entry, manifest)!r}: expected the `commit` of a Step") from None


def open(path: Path, framework: Literal["numpy", "torch"] | None = None, commit: Commit | None = None) -> Step:
    """A step whose tensors are read when they are asked for, and only the parts that are: open(path)["model/w"][2:5]
    reads three rows. path, framework, commit: as for Step. Each process opens what it finds at that moment: several
    that have to read the same step open it by `commit=`, or get the Step of one of them by pickle."""
    return Step(path, framework, commit)
