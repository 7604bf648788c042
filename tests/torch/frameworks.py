# SPDX-License-Identifier: Apache-2.0
"""Look-alikes of other frameworks' optimizers and tensors: classes with the attributes that theirs have, filled by
their rules, which are written down here anew. Each is made of known values (`value`), or of zeros and without state."""
import types

import torch

SHAPES = {"up.weight": (8, 6), "qkv.weight": (12, 5), "norm.weight": (6,), "down.weight": (6, 8), "odd.weight": (5, 3),
          "bias": (7,)}
KEYS = ("exp_avg", "exp_avg_sq")
LR = {"decay": 0.25, "plain": 0.125}
STEPS = 7
TP = {"up.weight": (0, 1), "qkv.weight": (0, 3), "down.weight": (1, 1)}         # Megatron's partition_dim and stride


def value(name, key, dtype=torch.float32):
    """The whole tensor that is kept for a parameter under a key."""
    shape = SHAPES[name]
    seed = list(SHAPES).index(name) * 10 + ["weight", "master", *KEYS].index(key)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).abs().to(dtype)


def groups():
    """Names by group: tensors of two dimensions decay."""
    return [[name for name in SHAPES if len(SHAPES[name]) == 2], [name for name in SHAPES if len(SHAPES[name]) == 1]]


def parameters():
    return {name: torch.nn.Parameter(value(name, "weight")) for name in SHAPES}


class Inner:
    """A flat optimizer, as apex and DeepSpeed have: not torch's class."""

    def __init__(self, groups):
        self.param_groups = [{"lr": lr, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.5 * (lr == LR["decay"]),
                              "params": list(params)} for params, lr in zip(groups, LR.values())]
        self.state = {}

    def fill(self, pieces, filled, step):
        """pieces: {flat tensor: {key: flat values}}; step: where the count is kept."""
        for group in self.param_groups:
            group.update({"lr": 9.0} if not filled else {})
            for flat in group["params"]:
                if filled:
                    self.state[flat] = {key: pieces[flat][key] for key in KEYS}
                    if step == "state":
                        self.state[flat]["step"] = STEPS
            if step == "group":
                group["step"] = STEPS if filled else 0


# ---- Megatron ----

def tp_local(whole, name, tp, tp_size):
    """What tensor parallelism leaves on a rank: with a stride its share of each of so many sections."""
    if name not in TP:
        return whole
    dim, stride = TP[name]
    return torch.cat([part.chunk(tp_size, dim)[tp] for part in whole.chunk(stride, dim)], dim)


def megatron(rank, dp, tp, filled, group):
    """dp × tp ranks, tensor-parallel neighbours first. One buffer of two buckets, in the reverse order of the model,
    every bucket padded to the data-parallel size and cut evenly. (optimizer, {name: parameter})"""
    at, place = rank % tp, rank // tp
    model = {}
    for name in SHAPES:
        parameter = torch.nn.Parameter(tp_local(value(name, "weight"), name, at, tp))
        parameter.tensor_model_parallel = name in TP
        parameter.partition_dim, parameter.partition_stride = TP.get(name, (-1, 1))
        model[name] = parameter
    start, index, buckets = 0, {}, []
    order = list(reversed(SHAPES))
    for names in order[:3], order[3:]:
        begin = start
        for name in names:
            index[model[name]] = (start, start + model[name].numel(), len(buckets))
            start += model[name].numel()
        start = begin + -(-(start - begin) // dp) * dp
        buckets.append((begin, start))
    held, ranges = [[], []], []
    for number, (begin, end) in enumerate(buckets):
        size = (end - begin) // dp
        low, found = begin + place * size, {}
        for parameter, (first, last, bucket) in index.items():
            a, b = max(first, low), min(last, low + size)
            if bucket == number and a < b:
                found[parameter] = {"param": types.SimpleNamespace(start=a - first, end=b - first)}
        ranges.append({"param_map": found})
    names = {parameter: name for name, parameter in model.items()}
    place_of, pieces = {}, {}
    for bucket in ranges:
        for parameter, found in bucket["param_map"].items():
            name, a, b = names[parameter], found["param"].start, found["param"].end
            number = next(number for number, group in enumerate(groups()) if name in group)
            cut = {key: tp_local(value(name, key), name, at, tp).reshape(-1)[a:b].clone() for key in ("master", *KEYS)}
            flat = cut["master"] if filled else torch.zeros(b - a)
            place_of[parameter] = number, len(held[number])
            held[number].append(flat)
            pieces[flat] = cut
    inner = Inner(held)
    inner.fill(pieces, filled, "group")
    return types.SimpleNamespace(optimizer=inner, gbuf_ranges=[{(torch.float32, torch.float32): ranges}],
                                 buffers=[types.SimpleNamespace(param_index_map=index)],
                                 model_param_group_index_map=place_of, data_parallel_group=group), model


# ---- DeepSpeed ----

def zero12(rank, world, filled):
    """Each group one flat buffer, padded at its end; the order in it is not the model's (round robin)."""
    model, flats, pieces, orders = parameters(), [], {}, []
    for names in groups():
        order = names[1::2] + names[::2]
        flat = {key: torch.cat([value(name, key).reshape(-1) for name in order]) for key in ("master", *KEYS)}
        size = -(-flat["master"].numel() // world) + 1              # aligned: more than needed
        cut = {key: torch.cat([one, torch.zeros(size * world - one.numel())])[rank * size:][:size].clone()
               for key, one in flat.items()}
        orders.append([model[name] for name in order])
        flats.append(cut["master"] if filled else torch.zeros(size))
        pieces[flats[-1]] = cut
    inner = Inner([[flat] for flat in flats])
    inner.fill(pieces, filled, "state")
    return types.SimpleNamespace(optimizer=inner, round_robin_bit16_groups=orders,
                                 single_partition_of_fp32_groups=flats, real_dp_process_group=[GROUP, GROUP]), model


GROUP = None            # the default process group: place_in(None) is 0, so the ranks set it


def zero3(rank, world, filled):
    """Each parameter cut evenly, the last part padded; sub-groups of at most two parameters, flat each."""
    model, subs, flats, pieces, number_of = parameters(), [], [], {}, {}
    for number, names in enumerate(groups()):
        for first in range(0, len(names), 2):
            sub, cuts = names[first:first + 2], {key: [] for key in ("master", *KEYS)}
            for name in sub:
                parameter = model[name]
                size = -(-parameter.numel() // world)
                for key in cuts:
                    whole = value(name, key).reshape(-1)
                    cuts[key].append(torch.cat([whole, torch.zeros(size * world - whole.numel())])[rank * size:][:size])
                weight = value(name, "weight").reshape(-1)
                parameter.ds_shape, parameter.ds_numel = parameter.shape, parameter.numel()
                parameter.ds_tensor = torch.cat([weight, torch.zeros(size * world - weight.numel())])[rank * size:][
                    :size] if filled else torch.zeros(size)
                parameter.data = torch.empty(0)
            flat = {key: torch.cat(cut) for key, cut in cuts.items()}
            number_of[len(subs)] = number
            subs.append([model[name] for name in sub])
            flats.append(flat["master"] if filled else torch.zeros_like(flat["master"]))
            pieces[flats[-1]] = flat
    inner = Inner([[flat for sub, flat in enumerate(flats) if number_of[sub] == number] for number in (0, 1)])
    inner.fill(pieces, filled, "state")
    return types.SimpleNamespace(optimizer=inner, fp16_groups=subs, fp32_partitioned_groups_flat=flats,
                                 sub_group_to_group_id=number_of, dp_process_group=GROUP), model


# ---- veScale ----

class InterleavedShard:
    def __init__(self, dim, interleaved_size):
        self.dim, self.interleaved_size = dim, interleaved_size


class RaggedShard:
    def __init__(self, dims, local_units):
        self.dims, self.local_units = dims, local_units


class Replicate:
    pass


class DTensor(torch.Tensor):
    """A class of its own, as veScale's is: with a spec, and a local tensor."""

    @staticmethod
    def __new__(cls, local, mesh, placements, shape):
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=local.dtype)
        made._local_tensor = local
        made._spec = types.SimpleNamespace(mesh=mesh, placements=tuple(placements))
        return made

    @classmethod
    def __torch_dispatch__(cls, function, kinds, arguments=(), more=None):
        raise NotImplementedError(f"{function} of a look-alike")


def vescale(rank, filled):
    """{name: {key: DTensor}} on a mesh of 2 × 2: merged weights interleaved over tp, others ragged over dp or over
    all, in unequal units."""
    at, place = rank % 2, rank // 2
    mesh = types.SimpleNamespace(mesh=torch.arange(4).reshape(2, 2), mesh_dim_names=("dp", "tp"))
    flat = types.SimpleNamespace(mesh=torch.arange(4), mesh_dim_names=("fsdp",))
    found = {}
    for name, shape in SHAPES.items():
        for key in KEYS:
            whole = value(name, key)
            if name == "qkv.weight":
                local = torch.cat([part.chunk(2)[at] for part in whole.chunk(3)])
                made = local, mesh, [Replicate(), InterleavedShard(0, 3)]
            elif name == "up.weight":                   # 8 rows in 4 units: 1 and 3; the columns over tp
                local = whole.chunk(2, 1)[at][[slice(0, 2), slice(2, 8)][place]].reshape(-1)
                made = local, mesh, [RaggedShard((0,), (1, 3)), _shard(1)]
            elif name == "odd.weight":                  # 15 items in 5 units: 2, 0, 3, 0
                local = whole.reshape(-1)[[slice(0, 6), slice(6, 6), slice(6, 15), slice(15, 15)][rank]]
                made = local, flat, [RaggedShard((0, 1), (2, 0, 3, 0))]
            elif name == "bias":                        # all of it at rank 2
                local = whole if rank == 2 else whole[:0]
                made = local, flat, [RaggedShard((), (0, 0, 1, 0))]
            else:
                made = whole, flat, [Replicate()]
            local = made[0].clone() if filled else torch.zeros_like(made[0])
            found.setdefault(name, {})[key] = DTensor(local, made[1], made[2], shape)
    return found


def _shard(dim):
    from torch.distributed.tensor import Shard
    return Shard(dim)
