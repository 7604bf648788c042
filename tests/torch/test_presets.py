# SPDX-License-Identifier: Apache-2.0
"""Optimizer states of other frameworks, and of torch's wrappers: saved under each and loaded under each other, by four
ranks. What a step then has, and what the flat buffers then hold, padding too, is compared with known whole tensors.
frameworks.py builds the look-alikes; FSDP1, FSDP2 and DDP are torch's own."""
import warnings

import pytest
import torch

import frameworks
from frameworks import KEYS, LR, SHAPES, STEPS, value

import vckpt
from vckpt import presets
from vckpt.presets import SplitOptimizer

PIN = {"pin": "no"}
MASTERS = {"megatron 2x2", "megatron 4", "zero12", "zero3"}
KINDS = ["ddp", "megatron 2x2", "megatron 4", "zero12", "zero3", "fsdp1", "fsdp2", "vescale"]


def net():
    """A module with the parameters of SHAPES."""
    model = torch.nn.Module()
    for name in SHAPES:
        *path, last = name.split(".")
        part = model
        for word in path:
            part.add_module(word, getattr(part, word, torch.nn.Module()))
            part = getattr(part, word)
        part.register_parameter(last, torch.nn.Parameter(value(name, "weight")))
    return model


def adamw(model):
    """Two groups, by the names that parameters have without wrappers."""
    named = {presets.clean(name): parameter for name, parameter in model.named_parameters()}
    return torch.optim.AdamW([{"params": [named[name] for name in names], "lr": lr, "betas": (0.9, 0.95)}
                              for names, lr in zip(frameworks.groups(), LR.values())]), named


class Inner:
    """A look-alike under its preset, or torch's: `state` for vckpt, `check` against the known values."""

    def __init__(self, kind, rank, filled, master, path):
        self.kind, self.rank, self.master, self.model = kind, rank, master, None
        self.made, self.model = self.of(filled)
        self.state = {"optimizer": self.preset(self.made, self.model)}

    def of(self, filled):
        import torch.distributed as dist
        dp, tp = (2, 2) if self.kind == "megatron 2x2" else (4, 1)
        if self.kind.startswith("megatron"):
            return frameworks.megatron(self.rank, dp, tp, filled, subgroups() if tp > 1 else dist.group.WORLD)
        return getattr(frameworks, self.kind)(self.rank, 4, filled)

    def preset(self, made, model):
        if self.kind.startswith("megatron"):
            return presets.megatron(made, model, "dp=2,tp=2" if self.kind == "megatron 2x2" else "dp=4",
                                    master=self.master)
        return getattr(presets, self.kind)(made, model, master=self.master)

    def check(self):
        wanted = self.of(True)[0].optimizer
        for group, theirs in zip(self.made.optimizer.param_groups, wanted.param_groups):
            for flat, their in zip(group["params"], theirs["params"]):
                assert not self.master or torch.equal(flat, their), "master"
                found, saved = self.made.optimizer.state.get(flat), wanted.state[their]
                if found is None:               # nothing but padding: it gets state at the first step
                    assert not their.any()
                    continue
                assert set(found) == set(saved), (set(found), set(saved))
                assert all(torch.equal(found[key], saved[key]) for key in KEYS)
                assert found.get("step") == saved.get("step")
            assert {k: v for k, v in group.items() if k not in ("params", "weight_decay", "eps")} == {
                k: v for k, v in theirs.items() if k not in ("params", "weight_decay", "eps")}


_subgroups = []


def subgroups():
    """The data-parallel group of this rank of 2 × 2."""
    import torch.distributed as dist
    if not _subgroups:
        _subgroups.extend(dist.new_group([tp, tp + 2]) for tp in (0, 1))
    return _subgroups[dist.get_rank() % 2]


class Torchs:
    def __init__(self, kind, rank, filled, master, path):
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        self.kind, self.mesh, self.model = kind, init_device_mesh("cpu", (4,)), net()
        if kind == "ddp":
            self.model = torch.nn.parallel.DistributedDataParallel(self.model)
        elif kind == "fsdp1":
            from torch.distributed.fsdp import FullyShardedDataParallel
            self.model = FullyShardedDataParallel(self.model, use_orig_params=True, device_mesh=self.mesh,
                                                  device_id=torch.device("cpu"))
        else:
            from torch.distributed.fsdp import fully_shard
            fully_shard(self.model, mesh=self.mesh)
        self.optimizer, self.named = adamw(self.model)
        self.state = {"model": self.model, "optimizer": self.optimizer}
        if filled and kind == "fsdp1":          # nobody else knows where it has what: checked by torch's own words
            vckpt.load(f"{path}/0", self.state)
            self.check()
        elif filled:
            for name, parameter in self.named.items():
                self.optimizer.state[parameter] = {"step": torch.tensor(float(STEPS)),
                                                   **{key: self.cut(value(name, key)) for key in KEYS}}
        else:
            for group in self.optimizer.param_groups:
                group["lr"] = 9.0
        dist.barrier()

    def cut(self, whole):
        from torch.distributed.tensor import Shard, distribute_tensor
        return distribute_tensor(whole, self.mesh, [Shard(0)]) if self.kind == "fsdp2" else whole.clone()

    def check(self):
        found = sharded_state(self.model, self.optimizer) if self.kind == "fsdp1" else {}
        assert [group["lr"] for group in self.optimizer.param_groups] == list(LR.values())
        if self.kind != "fsdp1":
            found = {name: self.optimizer.state[parameter] for name, parameter in self.named.items()}
        assert set(found) == set(SHAPES)
        for name, state in found.items():
            assert set(state) == {"step", *KEYS} and float(state["step"]) == STEPS
            for key in KEYS:
                wanted = value(name, key) if self.kind == "fsdp1" else self.cut(value(name, key))
                local, their = (getattr(one, "_local_tensor", one) for one in (state[key], wanted))
                assert torch.equal(local, their), (name, key)


def sharded_state(model, optimizer):
    """What torch itself takes FSDP1's flat state for, whole. (On CPUs FULL_STATE_DICT gives exp_avg_sq for exp_avg.)"""
    from torch.distributed import fsdp
    kind = fsdp.FullyShardedDataParallel
    with kind.state_dict_type(model, fsdp.StateDictType.SHARDED_STATE_DICT, fsdp.ShardedStateDictConfig(),
                              fsdp.ShardedOptimStateDictConfig()):
        found = kind.optim_state_dict(model, optimizer)["state"]
    return {name: {key: one.full_tensor() if hasattr(one, "full_tensor") else one for key, one in state.items()}
            for name, state in found.items()}


class Vescale:
    def __init__(self, kind, rank, filled, master, path):
        self.rank, self.made = rank, frameworks.vescale(rank, filled)
        state = {name: {"step": torch.tensor(float(STEPS * filled)), **kept} for name, kept in self.made.items()}
        groups = [{"lr": lr if filled else 0, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.5, "params": names}
                  for names, lr in zip(frameworks.groups(), LR.values())]
        self.state = {"optimizer": {"state": state, "param_groups": groups}}

    def check(self):
        for name, kept in frameworks.vescale(self.rank, True).items():
            for key, wanted in kept.items():
                assert torch.equal(self.made[name][key]._local_tensor, wanted._local_tensor), (name, key)


def maker(kind):
    return Inner if kind in MASTERS else Vescale if kind == "vescale" else Torchs


def _matrix(path, pairs):
    import torch.distributed as dist
    warnings.simplefilter("ignore")
    frameworks.GROUP, rank = dist.group.WORLD, dist.get_rank()
    for number, kind in enumerate(KINDS):
        vckpt.save(path, maker(kind)(kind, rank, True, True, path).state, step=number, **PIN)
    vckpt.close(path)
    wrong = [said for saved, loaded in pairs for said in _loaded(path, saved, loaded, rank)]
    model, to = (frameworks.zero3(rank, 4, filled)[1] for filled in (True, False))
    vckpt.save(path, {"model": presets.zero3_weights(model)}, step=len(KINDS), **PIN)
    vckpt.close(path)
    vckpt.load(path, {"model": presets.zero3_weights(to)})
    same = all(torch.equal(one.ds_tensor, to[name].ds_tensor) for name, one in model.items())
    return wrong if same else [*wrong, "zero3_weights"]


def _loaded(path, saved, loaded, rank):
    """[what went wrong]: told, not raised, since others may wait for this rank in what comes next."""
    import torch.distributed as dist
    to = maker(loaded)(loaded, rank, False, saved in MASTERS, path)
    part = {"optimizer": to.state["optimizer"], **({"model": to.model} if loaded in ("fsdp1", "fsdp2", "ddp") else {})}
    try:
        found = vckpt.load(f"{path}/{KINDS.index(saved)}", part, strict=False)
        assert set(found.missing) <= {"model"}, found.missing
        assert not found.unexpected or loaded == "vescale", found.unexpected
    except Exception as error:
        good, said = False, f"{saved} -> {loaded}: {type(error).__name__}: {error}"
    else:
        good, said = True, ""
    told = [None] * 4
    dist.all_gather_object(told, good)
    if good and all(told):
        try:
            to.check()
        except Exception as error:
            said = f"{saved} -> {loaded}: {error}"
    return [said] if said else []


def test_each_under_each(pool4, tmp_path, scale):
    pairs = [(saved, loaded) for saved in KINDS for loaded in KINDS]
    if scale(False, True) is False:             # each is saved, and each is loaded from two others
        pairs = [(saved, KINDS[(at + further) % len(KINDS)]) for at, saved in enumerate(KINDS) for further in (1, 3)]
    assert pool4(_matrix, str(tmp_path / "store/run"), pairs) == [[]] * 4
    for number, kind in enumerate(KINDS):
        with vckpt.Step(tmp_path / f"store/run/{number}") as step:
            for name in SHAPES:
                for key in KEYS + ("master",) * (kind in MASTERS):
                    found = step["optimizer", f"state.{name}.{key}"].torch()
                    assert torch.equal(found, value(name, key)), (kind, name, key)
                assert float(step["optimizer", f"state.{name}.step"].torch()) == STEPS
            groups = step.values("optimizer")["param_groups"]
            assert [group["lr"] for group in groups] == list(LR.values())
            assert [sorted(group["params"]) for group in groups] == [sorted(names) for names in frameworks.groups()]
    with vckpt.Step(tmp_path / "store/run") as step:
        assert all(torch.equal(step["model", name].torch(), value(name, "weight")) for name in SHAPES)


def test_what_is_no_such_optimizer(tmp_path):
    model = net()
    optimizer, named = adamw(model)
    for preset, words in ((presets.megatron, "AdamW has no gbuf_ranges, .* expected a DistributedOptimizer of Mega"),
                          (presets.zero12, "expected a DeepSpeedZeroOptimizer of stage 1 or 2"),
                          (presets.zero3, "AdamW has no fp16_groups, .* expected a DeepSpeedZeroOptimizer_Stage3")):
        with pytest.raises(vckpt.InvalidArgument, match=words):
            preset(optimizer, model)
    with pytest.raises(vckpt.InvalidArgument, match="Parameter has no ds_shape, ds_numel, ds_tensor: expected a param"):
        presets.zero3_weights(model)
    made, model = frameworks.zero12(0, 1, True)
    with pytest.raises(vckpt.InvalidArgument, match="a parameter of shape .* that the model does not have: give the"):
        presets.zero12(made, {"up.weight": model["up.weight"]})


def one(filled, master=True, rank=0, world=1):
    return presets.zero12(*frameworks.zero12(rank, world, filled), master=master)


def test_masters_of_a_preset_are_no_state_of_torchs(tmp_path):
    """What a preset called `master` is left in the step; what an optimizer itself calls so comes back."""
    run = tmp_path / "store/run"
    vckpt.save(run, {"optimizer": one(True)}, step=0, **PIN)
    model = net()
    optimizer, named = adamw(model)
    vckpt.load(run, {"model": model, "optimizer": optimizer}, strict=False)
    assert all(set(optimizer.state[named[name]]) == {"step", *KEYS} for name in SHAPES)
    for name in SHAPES:
        optimizer.state[named[name]]["master"] = value(name, "master")
    vckpt.save(run, {"model": model, "optimizer": optimizer}, step=1, **PIN)
    fresh = net()
    optimizer, named = adamw(fresh)
    vckpt.load(run, {"model": fresh, "optimizer": optimizer})
    assert all(torch.equal(optimizer.state[named[name]]["master"], value(name, "master")) for name in SHAPES)
    vckpt.close()


def test_what_does_not_fit(tmp_path):
    """Said before anything is filled, as of any optimizer; what the step lacks may be left out."""
    run = tmp_path / "store/run"
    vckpt.save(run, {"optimizer": one(True, master=False)}, step=0, **PIN)
    to = one(False)
    with pytest.raises(vckpt.InvalidArgument, match="the step lacks optimizer, master of its parameter"):
        vckpt.load(run, {"optimizer": to})
    assert not to.optimizer.state and to.optimizer.param_groups[0]["lr"] == 9.0
    found = vckpt.load(run, {"optimizer": to}, strict=False)
    assert "optimizer, master of its parameter bias" in found.missing and not found.unexpected
    assert not any(flat.any() for group in to.optimizer.param_groups for flat in group["params"])
    assert to.optimizer.param_groups[0]["lr"] == LR["decay"]
    other = one(False, master=False)
    vckpt.load(run, {"optimizer": other})
    for group, theirs in zip(other.optimizer.param_groups, to.optimizer.param_groups):
        for flat, their in zip(group["params"], theirs["params"]):
            assert all(torch.equal(other.optimizer.state[flat][key], to.optimizer.state[their][key]) for key in KEYS)
    other.parts = [part._replace(group=1 - part.group) for part in other.parts]
    with pytest.raises(vckpt.InvalidArgument, match="its groups have other parameters in the step than in the state"):
        vckpt.load(run, {"optimizer": other})
    other.parts = other.parts[1:]
    with pytest.raises(vckpt.InvalidArgument, match="the state lacks optimizer, its parameter"):
        vckpt.load(run, {"optimizer": SplitOptimizer(other.optimizer, one(False).parts[1:])})
    vckpt.save(run, {"optimizer": one(False, master=False)}, step=1, **PIN)         # before its first step
    fresh = one(False, master=False)
    vckpt.load(run, {"optimizer": fresh})
    assert not fresh.optimizer.state
    vckpt.close()
