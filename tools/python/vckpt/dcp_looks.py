# SPDX-License-Identifier: Apache-2.0
"""A save of DCP takes every value, since DCP pickles it; a load takes only plain ones (docs/dcp.md). So a save reads
the entries that it writes as a load would, and warns of what that will refuse: once for each class in a process. The
entry is saved all the same.

This must not make a save slower: of each entry only the first bytes are looked at (pickles.refusal), and all entries of
a save together get SECONDS of this thread's processor time. So a large state may hold values that no warning names."""
from __future__ import annotations

import time
import warnings

from . import pickles

SECONDS = 0.05          # of one save

_warned: set[str] = set()


class Looks:
    """The looks of one save."""

    def __init__(self) -> None:
        self.left = SECONDS

    def look(self, key: str, entry: memoryview) -> None:
        if self.left <= 0:
            return
        begin = time.thread_time()
        what = pickles.refusal(entry)
        self.left -= time.thread_time() - begin
        if what is not None and what not in _warned:
            _warned.add(what)
            warnings.warn(f"vckpt.dcp.StorageWriter: entry {key[:300]!r}: {what}. It is saved, but a dcp.load that "
                          "asks for it will fail unless you give StorageReader(..., allow_pickle=True), which runs "
                          "whatever the pickle says: keep plain values instead (numbers, texts, containers, arrays), "
                          "or plan to load with that option", stacklevel=2)
