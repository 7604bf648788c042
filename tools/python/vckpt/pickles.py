# SPDX-License-Identifier: Apache-2.0
"""Byte entries of a DCP state, which are archives of torch.save or pickles, without Python's or torch's reader of
pickles: `tree` gives the value, `reencoded` the entry written anew from the value: to unpickle that runs nothing of the
store. What is not plain is Refused, by the name of its class.

Why not torch.load(weights_only=True): any module can add classes to its list for the whole process; it calls torch's
own constructors with whatever arguments the pickle has; it had holes (CVE-2025-32434, mended in torch 2.6, and this
package takes torch 2.4); and it refuses numpy's scalars, frozensets and deques, which states have."""
from __future__ import annotations

import functools
import io
import pickle
import time
import warnings
import zipfile
from typing import Any

import torch

from .pickles_known import ITEMS, KNOWN, PAIRS, STORAGES, Storage, check
from .pickles_machine import COPIES, Machine, Name, Refused

__all__ = ["Looks", "Refused", "decoded", "reencoded", "refusal", "tree"]

NO_ENTRY = "it is neither an archive of torch.save nor a pickle"
ARCHIVE, PICKLE = b"PK\3\4", b"\x80"    # what they begin with
SPREAD_BYTES = 64 << 20         # of all tensors of an entry, beyond what is stored (strides of 0); as for vckpt import
LOOK_BYTES, LOOK_S = 8192, 0.05         # of a pickle, which `refusal` looks at; of one save
SMALL_BYTES = 4096              # entries that are kept with what became of them: many are the same number
TREE_DEPTH, TREE_PARTS = 100, 16        # of what `tree` gives: containers in one another; values, for each byte
DEVICES = "cuda", "xpu"         # whose tensors come back there


class Archive:
    """The members of what torch.save wrote. All are stored uncompressed. Their CRC-32 are not compared, since torch can
    be set to write none."""

    def __init__(self, data: bytes) -> None:
        self.data, self.left = data, len(data)
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as found:
                infos = found.infolist()
        except Exception:               # by classes of many kinds, some of them struct's and codecs'
            raise Refused("it is no archive that torch.save wrote") from None
        self.members = {info.filename: info for info in infos}
        heads = [name for name in self.members if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(heads) != 1:
            raise Refused("it is no archive that torch.save wrote: it has no data.pkl")
        self.folder = heads[0].removesuffix("data.pkl")
        if f"{self.folder}byteorder" in self.members and self.read("byteorder") != b"little":
            raise Refused("its byte order is not little: it was written on another kind of machine")

    def read(self, name: str) -> bytes:
        info = self.members.get(self.folder + name)
        if info is None:
            raise Refused(f"its archive has no {name!r}")
        if info.compress_type or info.flag_bits & 1 or info.compress_size != info.file_size:
            raise Refused(f"{name!r} of its archive is compressed or encrypted")
        head = self.data[info.header_offset:info.header_offset + 30] if info.header_offset >= 0 else b""
        begin = info.header_offset + 30 + sum(int.from_bytes(head[at:at + 2], "little") for at in (26, 28))
        self.left -= info.file_size     # members may overlap
        if not head.startswith(ARCHIVE) or len(head) != 30 or begin + info.file_size > len(self.data) or self.left < 0:
            raise Refused(f"{name!r} of its archive is not within it")
        return self.data[begin:begin + info.file_size]


class Entry(Machine):
    """The pickle of an entry, and the tensors beside it."""

    def __init__(self, data: bytes, archive: Archive | None) -> None:
        super().__init__(data, KNOWN)
        self.archive, self.room = archive, SPREAD_BYTES
        self.storages: dict[tuple[str, str], Any] = {}

    def spread(self, count: int) -> None:
        self.room -= count
        if self.room < 0:
            raise self.wrong(f"its tensors are more than {SPREAD_BYTES >> 20} MiB larger than what is stored of them")

    def persistent(self, identity: Any) -> Storage:
        """("storage", class, key, device, how many items)"""
        if type(identity) is not tuple or len(identity) != 5:
            raise self.wrong("it refers to an object outside of it")
        word, kind, key, device, count = identity
        if word != "storage" or type(kind) is not Name or kind.text not in STORAGES or not (
                type(key) is type(device) is str and len(key) <= 64):
            raise self.wrong("a storage that is not written as torch.save writes it")
        if (key, device) not in self.storages:
            self.storages[key, device] = self.stored(key, device, STORAGES[kind.text], count)
        return Storage(STORAGES[kind.text], self.storages[key, device])

    def stored(self, key: str, device: str, dtype: Any, count: Any) -> Any:
        if self.archive is None:
            raise self.wrong("it refers to an object outside of it")
        return stored(self.archive.read(f"data/{key}"), device)


class Glance(Entry):
    """The first bytes of the pickle of an entry, without the bytes of its tensors."""

    def __init__(self, data: bytes, is_archive: bool, whole_bytes: int) -> None:
        super().__init__(data, None)
        self.most = whole_bytes if is_archive else -1           # bytes of a tensor
        self.left += COPIES * (whole_bytes - len(data))

    def stored(self, key: str, device: str, dtype: Any, count: Any) -> Any:
        size = count * (1 if dtype is None else dtype.itemsize) if type(count) is int else -1
        if not 0 <= size <= self.most:
            return super().stored(key, device, dtype, count)    # which refuses it
        return torch.empty(size, dtype=torch.uint8, device="meta")

    def refusal(self) -> str | None:
        try:
            check(self.value())
        except Refused as error:
            return None if self.at > len(self.data) else error.what     # it goes on after what is here
        return None


def stored(data: bytes, device: str) -> Any:
    """A tensor of these bytes, where it was if this machine has the device, else on the CPU."""
    found = torch.frombuffer(bytearray(data), dtype=torch.uint8).clone() if data else torch.empty(0, dtype=torch.uint8)
    kind, _, number = device.partition(":")
    if kind not in DEVICES or not (number or "0").isascii() or not (number or "0").isdigit() or len(number) > 3:
        return found
    module = getattr(torch, kind, None)
    there = module is not None and module.is_available() and int(number or 0) < module.device_count()
    return found.to(device) if there else found


def decoded(data: bytes) -> Any:
    """The value of an entry."""
    if data.startswith(ARCHIVE):
        archive = Archive(data)
        machine = Entry(archive.read("data.pkl"), archive)
    elif data.startswith(PICKLE):
        machine = Entry(data, None)
    else:
        raise Refused(NO_ENTRY)
    value = machine.run()
    check(value)
    return value


def refusal(entry: memoryview) -> str | None:
    """Why `decoded` will refuse an entry that this process has just written, as far as its first bytes show: the
    sentence without the place. Takes the time of some thousand steps at most, however large the entry."""
    head = bytes(entry[:30])
    if not head.startswith((ARCHIVE, PICKLE)):
        return NO_ENTRY
    # torch.save writes the pickle first: after the names and padding of its head
    begin = 30 + sum(int.from_bytes(head[at:at + 2], "little") for at in (26, 28)) if head.startswith(ARCHIVE) else 0
    first = bytes(entry[begin:begin + LOOK_BYTES])
    return (_small_refusal if len(first) <= SMALL_BYTES else _refusal)(first, begin > 0, len(entry))


def _refusal(first: bytes, is_archive: bool, whole_bytes: int) -> str | None:
    return Glance(first, is_archive, whole_bytes).refusal()


def tree(data: bytes) -> Any:
    """The value of an entry, for a recursive walk that does not remember where it was: so values that a stranger can
    make deep, or large by references, are refused."""
    value = decoded(data)
    rest, left = [(value, 0)], TREE_PARTS * len(data)
    while rest:
        part, depth = rest.pop()
        kind = type(part)
        if kind not in ITEMS and kind not in PAIRS:
            continue
        left -= 2 * len(part)
        if left < 0 or depth >= TREE_DEPTH:
            raise Refused("it has too many values in one another")
        rest.extend((one, depth + 1) for one in part)
        if kind in PAIRS:
            rest.extend((one, depth + 1) for one in part.values())
    return value


def written(value: Any, like: bytes) -> bytes:
    """A value in the form of an entry: an archive, or a pickle of the same protocol."""
    if not like.startswith(ARCHIVE):
        return pickle.dumps(value, like[1])
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def reencoded(data: bytes) -> bytes:
    """The entry, written anew from its value."""
    return _small(data) if len(data) <= SMALL_BYTES else _reencoded(data)


def _reencoded(data: bytes) -> bytes:
    value = decoded(data)
    try:
        return written(value, data)
    except RecursionError:
        raise Refused("it has too many values in one another") from None
    except RuntimeError as error:       # torch.save: tensors of two types in one storage
        raise Refused(f"torch.save does not take its value: {error}") from None


class Looks:
    """A save of DCP takes every value, since DCP pickles it; a load takes only plain ones (docs/dcp.md). So a save
    reads the entries that it writes as a load would, and warns of what that will refuse: once for each class in a
    process. The entry is saved all the same.

    This must not make a save slower: only the first bytes of an entry are looked at (`refusal`), and all entries of a
    save together get LOOK_S of this thread's processor time. So a large state may hold values that no warning names."""

    def __init__(self) -> None:
        self.left = LOOK_S

    def look(self, key: str, entry: memoryview) -> None:
        if self.left <= 0:
            return
        begin = time.thread_time()
        what = refusal(entry)
        self.left -= time.thread_time() - begin
        if what is not None and what not in _warned:
            _warned.add(what)
            warnings.warn(f"vckpt.dcp.StorageWriter: entry {key[:300]!r}: {what}. It is saved, but a dcp.load that "
                          "asks for it will fail unless you give StorageReader(..., allow_pickle=True), which runs "
                          "whatever the pickle says: keep plain values instead (numbers, texts, containers, arrays), "
                          "or plan to load with that option", stacklevel=2)


_warned: set[str] = set()
_small = functools.lru_cache(1024)(_reencoded)
_small_refusal = functools.lru_cache(1024)(_refusal)
