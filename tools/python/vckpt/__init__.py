# SPDX-License-Identifier: Apache-2.0
"""vckpt: checkpoints of training jobs. docs/python.md is the manual.

    state = {"model": model, "optimizer": optimizer, "rng": vckpt.rng_state()}
    vckpt.save("/ckpt/llama", state, attributes={"loss": 2.31})

    with vckpt.Saver("/ckpt/llama") as saver:
        handle = saver.async_save(state, step=1000)
        handle.staged()             # the tensors may change again
        handle.committed()          # visible and durable

    vckpt.load("/ckpt/llama", state, missing_ok=True)       # the newest step back into the state, or None

    with vckpt.open("/ckpt/llama") as step:
        step["model/lm_head.weight"][:16]                   # reads 16 rows

A save uses torch only if the program has imported it. What a step reads by read() and values() is torch's tensors where
torch is installed; it is imported when the first is read, and not with framework="numpy"."""
from typing import TYPE_CHECKING

from . import presets
from ._lib import (
    Aborted,
    Damaged,
    Error,
    Forked,
    FormatError,
    InvalidArgument,
    NotAStore,
    NotFound,
    StepExists,
    StoreExists,
    Timeout,
    Undecided,
    VersionError,
)
from .diffs import Difference
from .exchange import Exchanged
from .facts import pin, set_attributes, tag, unpin, untag
from .lazy import LazyTensor
from .load_handle import Loaded, LoadHandle
from .loading import async_load, load
from .loads import Damage
from .paths import find, init, latest, steps, tags, wait
from .preempt import Stopping, on_sigterm
from .records import Mesh, Record
from .rng import RngState, rng_state, set_rng_state
from .saver import Handle, Saver, async_save, close, save
from .shard import Refused, Shard
from .state import parameter_names
from .step import BlobInfo, Commit, Step, TensorInfo, open

__all__ = ["Aborted", "BlobInfo", "Commit", "Damage", "Damaged", "Difference", "Error", "Exchanged", "Forked",
           "FormatError", "Handle", "InvalidArgument", "LazyTensor", "LoadHandle", "Loaded", "Mesh",
           "NotAStore", "NotFound", "Record", "Refused", "RngState", "Saver", "Shard", "Step",
           "StepExists", "Stopping", "StoreExists", "TensorInfo", "Timeout", "Undecided", "VersionError",
           "async_load", "async_save", "close", "find", "init", "latest", "load", "on_sigterm", "open",
           "parameter_names", "pin", "presets", "rng_state", "save", "set_attributes", "set_rng_state",
           "steps", "tag", "tags", "unpin", "untag", "version", "wait"]


def version() -> str:
    """The version of the library, as in vckpt.__version__."""
    from . import _lib
    found: bytes = _lib.lib().vckpt_version()
    return found.decode()


if TYPE_CHECKING:
    from . import dcp as dcp
    __version__: str            # of the library, and so of meson's project
else:
    def __getattr__(name):
        if name == "dcp":       # imports torch
            import importlib
            return importlib.import_module(".dcp", __name__)
        if name == "__version__":
            try:
                return version()
            except Error as error:      # for hasattr, which asks for an AttributeError
                raise AttributeError(str(error)) from error
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
