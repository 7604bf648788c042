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
from torch.distributed.checkpoint.state_dict import get_model_state_dict
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


def value_of(step, component, saved, parameter, shapes):
    """What the optimizer keeps for a parameter, tensors in place: one of the parameter's shape is cut as the parameter is."""
    if isinstance(saved, dict):
        return {key: value_of(step, component, value, parameter, shapes) for key, value in saved.items()}
    if isinstance(saved, list):
        return [value_of(step, component, value, parameter, shapes) for value in saved]
    if not isinstance(saved, vckpt.Record) or saved.tag != "$tensor":
        return saved
    name = saved["name"]
    if not isinstance(parameter, DTensor) or shapes[name] != tuple(parameter.shape):
        return torch.as_tensor(step.read(component, name))
    local = torch.as_tensor(step.read(component, name, box=box_of(parameter, name))).to(parameter.device)
    return DTensor.from_local(local, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape, stride=parameter.stride())


def model(step, module, component="model"):
    """The state dict of a module shares its memory: to fill that is to fill the module. A tensor that the step lacks is an error."""
    for name, tensor in get_model_state_dict(module).items():
        read(step, component, name, tensor)


def saved_of(step, component, names):
    """An optimizer's state of all ranks by name, and its groups as the ranks have them that hold these parameters: where each rank has a part of
    its own (a pipeline's stage, experts, ZeroRedundancyOptimizer) each has a tree."""
    state, groups = {}, None
    for rank in [None, *step.ranks(component)]:
        saved = step.values(component, rank=rank, tensors=False)
        state.update(saved["state"])
        if groups is None or [name for group in saved["param_groups"] for name in group["params"]] == names:
            groups = saved["param_groups"]
    return state, groups


def optimizer(step, module, optim, component="optimizer"):
    """By parameter names, as it was saved. Not through torch's set_optimizer_state_dict: of an optimizer that has no state yet it
    makes a step first, which runs hooks and counts (pytorch#164929)."""
    shapes = {info.name: info.shape for info in step.tensors() if info.component == component}
    names = vckpt.parameter_names(optim, {"model": module})
    saved, saved_groups = saved_of(step, component, names)
    parameters, state, groups, place = [p for group in optim.param_groups for p in group["params"]], {}, [], 0
    for number, (name, parameter) in enumerate(zip(names, parameters)):
        if name in saved:
            state[number] = value_of(step, component, saved[name], parameter, shapes)
    for own, kept in zip(optim.param_groups, saved_groups, strict=True):
        end = place + len(own["params"])
        if names[place:end] != kept["params"]:
            raise ValueError(f"{component}: the step has {kept['params'][:3]}... where the job has {names[place:end][:3]}...")
        groups.append({**{key: value_of(step, component, value, None, shapes) for key, value in kept.items()}, "params": list(range(place, end))})
        place = end
    optim.load_state_dict({"state": state, "param_groups": groups})
