# SPDX-License-Identifier: Apache-2.0
"""The states of random number generators in a state that is saved."""
from __future__ import annotations

import random
from typing import Any

import numpy as np

from .tensors import torch_module


class RngState:
    """The states of this rank's random number generators when rng_state() was called."""

    def __init__(self, states: dict[str, Any]) -> None:
        self.states = states


def rng_state() -> RngState:
    """The states of Python's, numpy's and torch's generators (of CUDA that of the current device, and beside it those
    of all devices where the process sees several), to be put into the state that is saved. Kept for each rank by
    itself."""
    generator: Any = np.random.get_state()
    kind, keys, position, has_gauss, gauss = generator
    states = {"python": random.getstate(),
              "numpy": {"kind": str(kind), "keys": keys.astype("<u4").tobytes(), "position": int(position),
                        "has_gauss": int(has_gauss), "gauss": float(gauss)}}
    torch = torch_module()
    if torch is not None:
        states["torch"] = torch.get_rng_state().numpy().tobytes()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            states["cuda"] = torch.cuda.get_rng_state().cpu().numpy().tobytes()
            if torch.cuda.device_count() > 1:
                states["cuda_devices"] = {"current": torch.cuda.current_device(),
                                          "states": [state.cpu().numpy().tobytes()
                                                     for state in torch.cuda.get_rng_state_all()]}
    return RngState(states)


def set_rng_state(state: Any, generator: Any = None) -> None:
    """Sets the generators back to what rng_state() gave, or what Step.values gives for it. generator: a
    torch.Generator, set to what Step.values gives for one that was in the state."""
    if generator is not None:
        generator.set_state(_tensor(state["state"]))
        return
    states = state.states if isinstance(state, RngState) else state
    random.setstate(states["python"])
    kept = states["numpy"]
    np.random.set_state((kept["kind"], np.frombuffer(kept["keys"], "<u4").astype(np.uint32), kept["position"],
                         kept["has_gauss"], kept["gauss"]))
    if "torch" in states:
        import torch
        torch.set_rng_state(_tensor(states["torch"]))
        if "cuda" in states and torch.cuda.is_available():
            kept = states.get("cuda_devices")
            if (kept and len(kept["states"]) == torch.cuda.device_count()
                    and kept["current"] == torch.cuda.current_device()):
                torch.cuda.set_rng_state_all([*map(_tensor, kept["states"])])
            torch.cuda.set_rng_state(_tensor(states["cuda"]))


def _tensor(state: bytes) -> Any:
    import torch
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
