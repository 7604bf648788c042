# SPDX-License-Identifier: Apache-2.0
"""A step back into a job, whatever its layout: each rank reads the boxes that it holds, straight into its own memory, out of
the logical tensors that the step consists of. How the step was saved, and by how many ranks, does not matter.

    with vckpt.Step("/ckpt/llama") as step:         # the newest; or "/ckpt/llama/1000"
        restore.model(step, model)                  # a module, wrapped and sharded as it is to train
        restore.optimizer(step, model, optimizer)
        scheduler.load_state_dict(step.values("lr_scheduler"))

Values (a scheduler's, a data loader's, a plan) come back by Step.values. Random number generators are another matter: their
states are those of ranks, so they fit the layout that they were saved under and no other (train.py shows what to do)."""
import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

import vckpt


def box_of(tensor, name):
    """(offsets, sizes), in the logical tensor, of what this rank holds of a DTensor."""
    for placement in tensor.placements:
        split = getattr(placement, "split_factor", 1)
        if split > 1 and tensor.shape[placement.dim] % split:       # the placements say another layout than the data has
            raise ValueError(f"{name}: fully_shard over tensor parallelism where {split} does not divide {tensor.shape[placement.dim]} rows "
                             "(docs/torch.md)")
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return offsets, sizes


def read(step, component, name, tensor):
    """Fills a tensor of the job, or this rank's part of it, and nothing besides."""
    tensor, box = tensor.detach(), None
    if isinstance(tensor, DTensor):
        tensor, box = tensor.to_local(), box_of(tensor, name)
    if tensor.device.type == "cpu":
        step.read(component, name, box=box, out=tensor)
    else:
        tensor.copy_(torch.as_tensor(step.read(component, name, box=box)))


def fill(step, component, saved, own, path=()):
    """The saved tree with `own`'s tensors in it, read into the memory that they have."""
    if isinstance(saved, vckpt.Record) and saved.tag == "$tensor":
        name = saved["name"]
        if not isinstance(own, torch.Tensor):
            raise KeyError(f"{component}/{name} has no place in the job")
        read(step, component, name, own)
        return own
    if isinstance(saved, dict):
        own = own if isinstance(own, dict) else {}
        return {key: fill(step, component, value, own.get(key), (*path, key)) for key, value in saved.items()}
    return saved


def model(step, module, component="model"):
    """The state dict of a module shares its memory: to fill that is to fill the module. A tensor that the step lacks is an error."""
    for name, tensor in get_model_state_dict(module).items():
        read(step, component, name, tensor)


def optimizer(step, module, optim, component="optimizer"):
    """By parameter names, as it was saved: torch makes a state of the right shapes where the optimizer has made no step yet."""
    own = get_optimizer_state_dict(module, optim)
    saved = step.values(component, tensors=False)
    set_optimizer_state_dict(module, optim, fill(step, component, saved, own))
