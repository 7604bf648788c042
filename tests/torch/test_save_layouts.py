# SPDX-License-Identifier: Apache-2.0
"""Four ranks save what torch makes: DTensors of every placement, slices of meshes, FSDP2, HSDP, tensor parallelism even
and uneven, pipeline stages. What is read back is compared with the whole tensors that all of it was cut from."""

import numpy as np
import pytest
import torch

import vckpt

PIN = {"pin": "no"}


def whole(*shape, seed=0, dtype=torch.float32):
    """The same on all ranks."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def save(path, state, step=None, **more):
    """step None: after the newest one, which all ranks see before any of them saves."""
    import torch.distributed as dist
    if step is None and dist.is_initialized():
        step = max(vckpt.steps(path), default=-1) + 1
        dist.barrier()
    try:
        return vckpt.save(path, state, step=step, **PIN, **more)
    finally:
        vckpt.close(path)


def back(path, state, **more):
    """load: what was saved stands in place again after it was lost, on this rank."""
    held = [tensor for part in state.values()
            for tensor in (part.state_dict() if isinstance(part, torch.nn.Module) else part).values()]
    local = [getattr(tensor, "tensor", getattr(tensor, "_local_tensor", tensor)).detach() for tensor in held]
    before = [tensor.clone() for tensor in local]
    for tensor in local:
        tensor.zero_()
    found = vckpt.load(path, state, **more)
    assert not found.missing and not found.unexpected and not found.values
    assert all(torch.equal(one, other) for one, other in zip(local, before))
    return found.step


@pytest.fixture
def run(tmp_path):
    vckpt.init(tmp_path / "store")
    return tmp_path / "store/run"


def compare(path, wanted, component="model"):
    with vckpt.Step(path) as step:
        assert {t.name for t in step.tensors() if t.component == component} == set(wanted)
        for name, tensor in wanted.items():
            found = step[component, name].torch()
            assert found.dtype == tensor.dtype and found.shape == tensor.shape, name
            assert torch.equal(found.reshape(-1).view(torch.uint8),
                               tensor.detach().contiguous().reshape(-1).view(torch.uint8)), name


# ---- DTensor ----

PLACED = {
    "rows": ((4,), "S0", (8, 5)), "columns": ((4,), "S1", (3, 8)), "uneven": ((4,), "S0", (7, 3)),
    "fewer": ((4,), "S0", (3, 2)),
    "copies": ((4,), "R", (5, 5)), "both": ((2, 2), "S0 S1", (6, 6)), "nested": ((2, 2), "S0 S0", (9, 2)),
    "hybrid": ((2, 2), "R S0", (5, 4)),
    "first": ((2, 2), "S1 R", (4, 7)), "scalar": ((4,), "R", ()), "empty": ((4,), "S0", (0, 3)),
    "three": ((1, 2, 2), "R S0 S1", (4, 6)),
    "half": ((2, 2), "S0 R", (300, 700)),
}


def _placement(word):
    from torch.distributed.tensor import Replicate, Shard
    return Replicate() if word == "R" else Shard(int(word[1:]))


def _dtensors(path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor
    meshes, state = {}, {}
    for name, (sizes, words, shape) in PLACED.items():
        if sizes not in meshes:
            meshes[sizes] = init_device_mesh("cpu", sizes, mesh_dim_names=("a", "b", "c")[:len(sizes)])
        state[name] = distribute_tensor(whole(*shape), meshes[sizes], [_placement(word) for word in words.split()])
    state["bf16"] = distribute_tensor(whole(8, 8, dtype=torch.bfloat16), meshes[4,], [_placement("S0")])
    state["transposed"] = distribute_tensor(whole(8, 6), meshes[4,], [_placement("S0")]).t()
    unnamed = init_device_mesh("cpu", (2, 2))
    state["unnamed"] = distribute_tensor(whole(6, 2), unnamed, [_placement("S0"), _placement("R")])
    save(path, {"model": state})
    return back(path, {"model": state})


def test_dtensors(pool4, run):
    assert pool4(_dtensors, str(run)) == [0] * 4
    wanted = {name: whole(*shape) for name, (_, _, shape) in PLACED.items()}
    wanted.update(bf16=whole(8, 8, dtype=torch.bfloat16), transposed=whole(8, 6).t(), unnamed=whole(6, 2))
    compare(run, wanted)


def _slices(path):
    """A tensor on mesh["tp"] of dp,tp: each data-parallel replica has a device mesh of its own."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    state = {"tp": distribute_tensor(whole(6, 4), mesh["tp"], [Shard(0)]),
             "dp": distribute_tensor(whole(4, 6), mesh["dp"], [Shard(1)]),
             "plain": whole(3), "shard": vckpt.Shard(whole(6, 4)[3 * mesh["tp"].get_local_rank():][:3], shape=(6, 4),
                                                     mesh=mesh["tp"], placements="S(0)"),
             "flat": vckpt.Shard(whole(5)[:3] if mesh["dp"].get_local_rank() == 0 else whole(5)[3:], shape=(5,),
                                 mesh=mesh["dp"],
                                 flat=(0, 3) if mesh["dp"].get_local_rank() == 0 else (3, 5))}
    numbers = [save(path, {"model": state})]
    numbers.append(save(path, {"model": state}, mesh=mesh))
    numbers.append(save(path, {"model": {"flat": distribute_tensor(whole(8, 2), mesh._flatten("all"), [Shard(0)])}}))
    assert back(f"{path}/0", {"model": state}) == 0 and back(f"{path}/1", {"model": state}, mesh=mesh) == 1
    return numbers


def test_slices_of_a_mesh(pool4, run):
    assert pool4(_slices, str(run)) == [[0, 1, 2]] * 4
    for step in 0, 1:
        compare(run / str(step),
                {"tp": whole(6, 4), "dp": whole(4, 6), "plain": whole(3), "shard": whole(6, 4), "flat": whole(5)})
    compare(run / "2", {"flat": whole(8, 2)})


def _stages(path):
    """Two pipeline stages of two ranks: other names, other shapes, and one name that both have."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stage = dist.get_rank() // 2
    state = {f"layers.{stage}.w": distribute_tensor(whole(4 + stage, 3), mesh["dp"], [Shard(0)]),
             f"layers.{stage}.b": whole(5 + stage)}
    number = save(path, {"model": state, "schedule": {"stage": stage}}, mesh=mesh["dp"])
    assert vckpt.load(path, {"schedule": {"stage": -1}}).values == {"schedule": {"stage": stage}}
    return back(path, {"model": state}) + number


def test_pipeline_stages(pool4, run):
    assert pool4(_stages, str(run)) == [0] * 4
    compare(run, {"layers.0.w": whole(4, 3), "layers.0.b": whole(5), "layers.1.w": whole(5, 3), "layers.1.b": whole(6)})
    with vckpt.Step(run) as step:
        assert set(step.values("model")) == {"layers.0.w", "layers.0.b"}
        assert set(step.values("model", rank=2)) == {"layers.1.w", "layers.1.b"}
        assert torch.equal(step.values("model", rank=2)["layers.1.b"], whole(6))
        assert step.values("schedule") == {"stage": 0} and step.values("schedule", rank=2) == {"stage": 1}
        assert (step.values("schedule", rank=3) == {"stage": 1} and
                set(step.values("model", rank=3)) == {"layers.1.w", "layers.1.b"})
        assert {b.rank for b in step.blobs()} == {None, 2,
                                                  3} and max(b.bytes for b in step.blobs() if b.rank == 3) < 100


def _partial(path):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial
    mesh = init_device_mesh("cpu", (4,))
    pending = DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)
    try:
        vckpt.save(path, {"model": {"good": torch.ones(3), "sum": pending}}, step=0, **PIN)
    except vckpt.Refused as error:
        return str(error)
    finally:
        dist.barrier()      # a launch ends with its rank 0, also for ranks that have not come to it
        vckpt.close(path)


def test_partial_is_refused(pool4, run):
    for said in pool4(_partial, str(run)):
        assert said.startswith('state["model"]["sum"]: ') and "reduce" in said
    assert vckpt.steps(run) == []


# ---- FSDP2, HSDP, tensor parallelism ----

class Layer(torch.nn.Module):
    def __init__(self, rows, columns):
        super().__init__()
        self.up = torch.nn.Linear(columns, rows, bias=True)
        self.down = torch.nn.Linear(rows, columns, bias=False)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def model_of(rows, columns=6):
    torch.manual_seed(3)
    return torch.nn.Sequential(Layer(rows, columns), torch.nn.BatchNorm1d(columns), Layer(rows, columns))


def _train(model, optimizer, inputs=4, columns=6):
    optimizer.zero_grad()
    model(torch.ones(inputs, columns) * torch.arange(inputs)[:, None]).square().sum().backward()
    optimizer.step()


def _fsdp(path, sizes, rows):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicas", "shards")[-len(sizes):])
    model = model_of(rows)
    for part in (model[0], model[2]):
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    _train(model, optimizer)
    result = {name: p.full_tensor().detach() for name, p in model.named_parameters()}
    moments = {f"state.{name}.{key}": optimizer.state[p][key].full_tensor() for name, p in model.named_parameters()
               for key in ("exp_avg", "exp_avg_sq")}
    save(path, {"model": model, "optimizer": optimizer})
    other = torch.optim.AdamW(model.parameters(), lr=1)
    back(path, {"model": model})
    vckpt.load(path, {"model": model, "optimizer": other})
    assert other.param_groups[0]["lr"] == 1e-2 and len(other.state) == len(optimizer.state)
    for parameter, kept in optimizer.state.items():
        for key, value in kept.items():
            found = other.state[parameter][key]
            assert type(found) is type(value) and torch.equal(getattr(found, "_local_tensor", found),
                                                              getattr(value, "_local_tensor", value))
    return result, moments


@pytest.mark.parametrize("sizes,rows", [((4,), 8), ((4,), 7), ((2, 2), 8), ((2, 2), 5)],
                         ids=["fsdp", "fsdp uneven", "hsdp", "hsdp uneven"])
def test_fully_shard(pool4, run, sizes, rows):
    weights, moments = pool4(_fsdp, str(run), sizes, rows)[0]
    with vckpt.Step(run) as step:
        for name, tensor in weights.items():
            assert torch.equal(step["model", name].torch(), tensor), name
        for name, tensor in moments.items():
            assert torch.equal(step["optimizer", name].torch(), tensor), name
        assert step["model", "1.running_mean"].shape == (6,)
        tree = step.values("optimizer")
        assert tree["param_groups"][0]["lr"] == 1e-2 and set(tree["param_groups"][0]["params"]) == set(weights)
        assert float(tree["state"]["0.up.weight"]["step"]) == 1


def _tensor_parallel(path, rows, dp):
    """fully_shard over tensor parallelism: weights are never trained, so that they are known whole."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    mesh = init_device_mesh("cpu", (dp, 2), mesh_dim_names=("dp", "tp"))
    model = model_of(rows)
    for part in (model[0], model[2]):
        parallelize_module(part, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(part, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    kinds = sorted({type(p).__name__ for t in model.parameters() for p in t.placements})
    save(path, {"model": model})
    back(path, {"model": model})
    return kinds


@pytest.mark.parametrize("rows", [8, 7, 5])
def test_fully_shard_over_tensor_parallelism(pool4, run, rows):
    assert "_StridedShard" in pool4(_tensor_parallel, str(run), rows, 2)[0]
    compare(run, {name: tensor for name, tensor in model_of(rows).state_dict().items()})


@pytest.mark.parametrize("rows", [7, 13, 12])
def test_where_the_label_is_not_what_the_data_is(pool6, run, rows):
    """On (3, 2) the placements of 7 and 13 rows say another layout than the ranks have (docs/torch.md)."""
    assert "_StridedShard" in pool6(_tensor_parallel, str(run), rows, 3)[0]
    compare(run, {name: tensor for name, tensor in model_of(rows).state_dict().items()})


def _ddp(path):
    import torch.distributed as dist
    model = torch.nn.parallel.DistributedDataParallel(model_of(8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with torch.no_grad():
        model.module[1].running_mean += dist.get_rank()             # statistics differ between replicas
    _train(model, optimizer)
    with torch.no_grad():
        model.module[1].running_mean += dist.get_rank()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    save(path, {"model": model, "optimizer": optimizer, "lr_scheduler": scheduler}, check_replicas="full")
    return {name: tensor.clone() for name, tensor in model.module.state_dict().items()}, scheduler.state_dict()


def test_ddp(pool4, run):
    weights, schedule = pool4(_ddp, str(run))[0]
    compare(run, weights)
    with vckpt.Step(run) as step:
        assert step.values("lr_scheduler") == schedule
        assert "state.0.up.weight.momentum_buffer" in {t.name for t in step.tensors() if t.component == "optimizer"}


def _replicas_differ(path):
    import torch.distributed as dist
    try:
        save(path, {"model": {"w": torch.full((100,), float(dist.get_rank()))}})
    except vckpt.Error as error:
        return type(error).__name__, str(error)


def test_replicas_that_differ_are_refused(pool4, run):
    for _, said in pool4(_replicas_differ, str(run)):
        assert "w" in said
    assert vckpt.steps(run) == []


# ---- what each rank keeps for itself ----

def _rank_state(path):
    import random
    import torch.distributed as dist
    rank = dist.get_rank()
    torch.manual_seed(rank), np.random.seed(rank), random.seed(rank)
    state = {"rng": vckpt.rng_state(),
             "trainer": {"tokens": 5, "queue": torch.arange(rank, dtype=torch.bfloat16), "loss": torch.ones(2)},
             "loader": {"position": rank * 10, "buffer": np.full((2, 2), rank)}}
    save(path, state, per_rank=("trainer.queue", "loader"))
    return torch.rand(2), np.random.rand(2), random.random()


def test_per_rank(pool4, run):
    drawn = pool4(_rank_state, str(run))
    with vckpt.Step(run) as step:
        assert [t.name for t in step.tensors()] == ["loss"]
        assert step.values("trainer", tensors=False)["queue"].type_name == "vckpt.PerRank"
        with pytest.raises(FileNotFoundError, match="give rank="):
            step.values("loader")
        for rank in range(4):
            tree = step.values("trainer", rank=rank)
            assert torch.equal(tree["queue"], torch.arange(rank, dtype=torch.bfloat16)) and tree["tokens"] == 5
            assert torch.equal(tree["loss"], torch.ones(2))
            loader = step.values("loader", rank=rank)
            assert loader["position"] == rank * 10 and loader["buffer"].tolist() == [[rank] * 2] * 2
            import random
            vckpt.set_rng_state(step.values("rng", rank=rank))
            assert torch.equal(torch.rand(2), drawn[rank][0])
            assert (np.random.rand(2) == drawn[rank][1]).all() and random.random() == drawn[rank][2]
        assert {b.name for b in step.blobs() if b.rank == 3} == {"rng.json", "trainer.json", "trainer/queue.npy",
                                                                 "loader.json", "loader/buffer.npy"}


# ---- one saver for a process ----

def _in_turn(path):
    """Asynchronous saves, a blocking one between them, a Saver beside save(): one launch, nothing is aborted."""
    import torch.distributed as dist
    state = {"model": {"w": whole(64, 64)}, "rank": vckpt.rng_state()}
    first = vckpt.async_save(path, state, step=0, **PIN)
    with vckpt.Saver(path) as saver:
        second = saver.save(state, step=1)
        handle = saver.async_save(state, step=2)
        handle.staged()
        state["model"]["w"].fill_(float("nan"))                    # ours again: it must not reach the file
        dist.barrier()
    numbers = [first.committed(), second, handle.committed()]
    vckpt.close(path)
    with vckpt.Saver(path, **PIN) as saver:                         # opened again: a new launch
        numbers.append(saver.save({"model": {"w": whole(4)}}, step=3))
    return numbers


def test_saves_in_turn(pool4, run):
    assert pool4(_in_turn, str(run)) == [[0, 1, 2, 3]] * 4
    for step in 0, 1, 2:
        compare(run / str(step), {"w": whole(64, 64)})
    compare(run / "latest", {"w": whole(4)})


def _one_refuses(path):
    """What rank 2 cannot keep ends the save everywhere, and the next one works."""
    import torch.distributed as dist
    said = ""
    state = {"model": {"w": torch.ones(3)}, "odd": {"x": print if dist.get_rank() == 2 else 0}}
    try:
        vckpt.save(path, state, step=0, **PIN)
    except (vckpt.Error, TypeError) as error:
        said = str(error)
    number = save(path, {"model": {"w": torch.ones(3)}})
    return said, number


def test_a_refusal_at_one_rank_reaches_all(pool4, run):
    found = pool4(_one_refuses, str(run))
    assert found[2][0].startswith('state["odd"]["x"]: ')
    for rank, (said, number) in enumerate(found):
        assert rank == 2 or "rank 2" in said, said
        assert number == found[0][1]
    assert vckpt.steps(run) == [found[0][1]]
