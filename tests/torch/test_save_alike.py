# SPDX-License-Identifier: Apache-2.0
"""What ranks have to hold alike: plain values, names of tensors, files and attributes that differ are refused by path,
on every rank and before anything is written; what each rank keeps for itself comes back at that rank. Two and four gloo
ranks."""

import pytest
import torch

import vckpt

PIN = {"pin": "no"}


@pytest.fixture
def run(tmp_path):
    vckpt.init(tmp_path / "store")
    return tmp_path / "store/run"


class Loader:
    """As a data loader that cuts its data by rank has it: the state is of this rank."""

    def __init__(self, rank):
        self.rank = rank

    def state_dict(self):
        return {"epoch": 3, "seen": [self.rank * 100, self.rank], "workers": {"0": {"offset": self.rank}}}


def _rank():
    import torch.distributed as dist
    return dist.get_rank()


class Odd:
    """What rank 1 alone has otherwise, by name."""

    @staticmethod
    def loader(rank):
        return {"model": {"w": torch.ones(3)}, "loader": Loader(rank)}

    @staticmethod
    def float(rank):
        return {"model": {"w": torch.ones(3)}, "scheduler": {"lr": 0.1 + rank * 2.0**-55, "last": 1}}

    @staticmethod
    def key(rank):
        return {"model": {"w": torch.ones(3)}, "trainer": {"a": 1, **({"b": 2} if rank else {})}}

    @staticmethod
    def kind(rank):
        return {"model": {"w": torch.ones(3)}, "trainer": {"a": True if rank else 1}}

    @staticmethod
    def inside(rank):
        return {"model": {"w": torch.ones(3), "blocks": [{"b": torch.zeros(2), "rate": [0.1, rank]}]}}

    @staticmethod
    def beside(rank):
        return {"trainer": {"queue": [rank], "tokens": 5 + rank}}

    @staticmethod
    def component(rank):
        return {"model": {"w": torch.ones(3)}, **({"debug": {"x": 1}} if rank else {})}

    @staticmethod
    def tensor(rank):
        return {"model": {"w": torch.ones(3), **({} if rank else {"v": torch.ones(2)})}}

    @staticmethod
    def many(rank):
        return {"table": {f"k{i}": {f"v{j}": j + (rank and i == 40 and j == 77) for j in range(100)}
                          for i in range(50)}}

    @staticmethod
    def only_value(rank):
        return {"model": {"w": torch.ones(3), **({"a": 1} if rank else {})}}

    @staticmethod
    def only_value_of_home(rank):
        return {"model": {"w": torch.ones(3), **({} if rank else {"a": 1})}}

    @staticmethod
    def empty_part(rank):
        return {"model": {"w": torch.ones(3), **({"b": {}} if rank else {})}}

    @staticmethod
    def beside_own(rank):
        return {"rng": vckpt.rng_state(), **({"debug": {"x": 1}} if rank else {})}

    @staticmethod
    def none_for_tensor(rank):
        return {"model": {"w": None if rank else torch.ones(3)}}

    @staticmethod
    def none_for_component(rank):
        return {"model": None if rank else {"w": torch.ones(3)}}

    @staticmethod
    def nothing(rank):
        return {} if rank else {"model": {"w": torch.ones(3)}}

    @staticmethod
    def nothing_at_home(rank):
        return {"model": {"w": torch.ones(3)}} if rank else {}

    @staticmethod
    def generator(rank):
        return {"model": {"w": torch.ones(3)}, "loader": {"generator": torch.Generator().manual_seed(rank)}}


NAMED = {
    "loader": 'state["loader"]["seen"]', "float": 'state["scheduler"]["lr"]', "key": 'state["trainer"]["b"]',
    "kind": 'state["trainer"]["a"]',
    "inside": 'state["model"]["blocks"][0]["rate"]', "beside": 'state["trainer"]["tokens"]',
    "component": 'state["debug"]',
    "tensor": "the tensors v", "only_value": 'state["model"]["a"]', "only_value_of_home": 'state["model"]["a"]',
    "empty_part": 'state["model"]["b"]',
    "beside_own": 'state["debug"]', "none_for_tensor": 'state["model"]["w"]', "none_for_component": 'state["model"]',
    "nothing": 'state["model"]',
    "nothing_at_home": 'state["model"]', "many": 'state["table"]["k40"]', "generator": 'state["loader"]["generator"]',
}


def said_of(function, *arguments, **more):
    try:
        return function(*arguments, **more)
    except (vckpt.Error, TypeError) as error:
        return f"{type(error).__name__}: {error}"


def _odd(path, name, **more):
    """A save of what differs, then one of what does not."""
    rank = _rank()
    said = said_of(vckpt.save, path, getattr(Odd, name)(rank), step=1, **PIN, **more)
    number = vckpt.save(path, {"model": {"w": torch.ones(3)}}, step=2)
    vckpt.close(path)
    return said, number


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("check", ["sample", "off"])
def test_what_differs_is_refused_by_path(pool2, run, name, check):
    per_rank = ("trainer.queue",) if name == "beside" else ()
    for said, number in pool2(_odd_with, str(run), name, per_rank, check):
        assert NAMED[name].replace('"', '') in str(said).replace('"', '').replace("\\", ""), said
        assert "per_rank=" in said and "rank 0 on" in said and "rank 1 on" in said, said
        assert number == 2
    assert vckpt.steps(run) == [2]


def _odd_with(path, name, per_rank, check):
    return _odd(path, name, per_rank=per_rank, check_replicas=check)


def _empty(path, given):
    """A component of which only some ranks have anything: what a rank gives of it comes back at that rank."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor
    stages, rank = [DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",)),
                    DeviceMesh("cpu", [2, 3], mesh_dim_names=("dp",))], _rank()
    stage, nothing = rank // 2, None if given else {}
    part = {"w": distribute_tensor(torch.ones(4, 3), stages[stage], [Shard(0)]), "lr": 0.5}
    state = {"layers": {f"{stage}.w": part["w"]}, "embedding": nothing if stage else part,
             "head": part if stage else nothing, "scaler": nothing}
    vckpt.save(path, state, step=1, mesh=stages[stage] if given else None, **PIN)
    vckpt.close(path)
    with vckpt.Step(path) as step:
        found = [step.values(name, rank=rank) for name in ("embedding", "head", "scaler")]
    return [one and {"w": tuple(one["w"].shape), "lr": one["lr"]} for one in found]


@pytest.mark.parametrize("given", [True, False])
def test_a_component_of_some_ranks(pool4, run, given):
    whole, nothing = {"w": (4, 3), "lr": 0.5}, None if given else {}
    for rank, found in enumerate(pool4(_empty, str(run), given)):
        assert found == [nothing if rank > 1 else whole, whole if rank > 1 else nothing, nothing]


def _nothing_anywhere(path):
    vckpt.save(path, {"model": {"w": torch.ones(3)}, "scaler": {}, "ema": None}, step=1, **PIN)
    vckpt.close(path)
    with vckpt.Step(path) as step:
        return [step.values(name, rank=_rank()) for name in ("scaler", "ema")], {blob.name for blob in step.blobs()
                                                                                 if blob.rank is not None}


def test_a_component_of_no_rank(pool4, run):
    """Nothing is kept for each rank where all have the same nothing."""
    assert pool4(_nothing_anywhere, str(run)) == [([{}, None], set())] * 4


def _per_rank(path):
    """The same with per_rank=: each rank has its own back."""
    rank = _rank()
    generator = torch.Generator().manual_seed(rank)
    state = {"loader": Loader(rank), "trainer": {"tokens": 5, "generator": generator}}
    vckpt.save(path, state, step=1, per_rank=("loader", "trainer.generator"), **PIN)
    drawn = torch.rand(3, generator=generator)
    vckpt.close(path)
    with vckpt.Step(path) as step:
        fresh = torch.Generator()
        vckpt.set_rng_state(step.values("trainer", rank=rank)["generator"], generator=fresh)
        return step.values("loader",
                           rank=rank) == Loader(rank).state_dict(), torch.equal(torch.rand(3, generator=fresh), drawn)


def test_what_differs_is_kept_with_per_rank(pool2, run):
    assert pool2(_per_rank, str(run)) == [(True, True)] * 2


def _alike(path):
    """Odd, but alike: keys in another order, a component of nothing but what each rank has for itself, equal
    generators."""
    rank = _rank()
    pairs = [("a", 1), ("b", {"x": float("nan")}), ("c", {3: "x", "3": "y", None: [], (1, 2): {}}),
             ("g", torch.Generator().manual_seed(7))]
    state = {"model": {"w": torch.ones(3)}, "trainer": dict(pairs if rank else pairs[::-1]),
             **({"rng": vckpt.rng_state()} if rank else {}),
             "own": {"x": rank}}
    number = vckpt.save(path, state, step=1, per_rank="own", blobs={"config.json": b"{}"} if rank == 0
                        else {"more.txt": b"x"}, **PIN)
    vckpt.close(path)
    return number


def test_what_is_merely_odd_is_saved(pool2, run):
    assert pool2(_alike, str(run)) == [1, 1]
    with vckpt.Step(run) as step:
        assert (step.values("own", rank=1) == {"x": 1} and step.blob("config.json") == b"{}" and
                step.blob("more.txt") == b"x")
        assert {b.name for b in step.blobs() if b.rank == 1} == {"rng.json", "own.json"}


def _files(path):
    rank = _rank()
    said = said_of(vckpt.save, path, {"model": {"w": torch.ones(3)}}, step=1,
                   blobs={"config.json": b"%d" % rank, "same": b"x"}, **PIN)
    losses = said_of(vckpt.save, path, {"model": {"w": torch.ones(3)}}, step=1,
                     attributes={"loss": 1.5 + rank, "lr": 1}, **PIN)
    number = vckpt.save(path, {"model": {"w": torch.ones(3)}}, step=1, attributes={"loss": 2.0}, blobs={"same": b"x"},
                        **PIN)
    vckpt.close(path)
    return said, losses, number


def test_files_and_attributes(pool2, run):
    for said, losses, number in pool2(_files, str(run)):
        assert "config.json" in said and "rank 1 on" in said
        assert '"loss" of the group "attributes"' in losses and "rank 1 on" in losses
        assert number == 1


def _again(path):
    """A value that is alike at the first saves and differs at a later one; the memory of the last save does not hide
    it."""
    rank, found = _rank(), []
    weights = {"w": torch.ones(3), "layers": {str(i): torch.ones(2) for i in range(5)}}
    for step in range(4):
        state = {"model": weights, "trainer": {"lr": 1.0 + (step == 2) * rank}}
        if step == 3:
            weights["layers"]["extra"] = torch.ones(1)
        found.append(said_of(vckpt.save, path, state, step=step, **PIN))
    vckpt.close(path)
    return found


def test_at_a_later_save(pool2, run):
    for first, second, third, fourth in pool2(_again, str(run)):
        assert (first, second, fourth) == (0, 1, 3) and "lr" in third


# ---- whose document a rank gets ----

def _stages(path, odd):
    """Two pipeline stages of two ranks. Rank 3 differs from rank 2, whose document stands for it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    mesh, rank = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp")), _rank()
    stage = rank // 2
    state = {"model": {f"layers.{stage}.w": distribute_tensor(torch.ones(4, 3), mesh["dp"], [Shard(0)])},
             "schedule": {"stage": stage, "lr": 0.5 + (odd and rank == 3)}}
    said = said_of(vckpt.save, path, state, step=1, mesh=mesh["dp"], **PIN)
    vckpt.close(path)
    if odd:
        return said
    with vckpt.Step(path) as step:
        return step.values("schedule", rank=rank), set(step.values("model", rank=rank))


def test_stages(pool4, run):
    for rank, (schedule, names) in enumerate(pool4(_stages, str(run), False)):
        assert schedule == {"stage": rank // 2, "lr": 0.5} and names == {f"layers.{rank // 2}.w"}


def test_a_stage_that_differs(pool4, run):
    for said in pool4(_stages, str(run), True):
        assert 'group "schedule of rank 2"' in said and "rank 3 on" in said and "per_rank=" in said


def _own_parts(path):
    """Ranks whose trees differ by design: a tensor of one rank alone, and flat parts of what a rank holds."""
    rank = _rank()
    flat = vckpt.Shard(torch.arange(3.0) + 3 * rank, shape=(6,), flat=(3 * rank, 3 * rank + 3))
    state = {"model": {"w": flat, f"only{rank}": vckpt.Shard(torch.ones(2) * rank, shape=(2,), boxes=[((0,), (2,))])},
             "cache": {f"mine{rank}": vckpt.Shard(torch.ones(2), alone=True), "rank": rank}}
    vckpt.save(path, state, step=1, **PIN)
    vckpt.close(path)
    with vckpt.Step(path) as step:
        return step.values("cache", rank=rank)["rank"], {t.name for t in step.tensors()}


def test_parts_of_one_rank(pool2, run):
    for rank, (found, names) in enumerate(pool2(_own_parts, str(run))):
        assert found == rank and names == {"w", "only0", "only1", "mine0", "mine1"}


# ---- statistics of replicas ----

def _statistics(path, give):
    """BatchNorm statistics that differ between replicas, of a module's state dict rather than of the module."""
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    with torch.no_grad():
        for p in net.parameters():
            p.fill_(1.0)
        net[1].running_mean += _rank()
        net[1].num_batches_tracked += _rank()
    state = {"model": dict(net.state_dict()) if give == "dict" else net.state_dict()}
    said = said_of(vckpt.save, path, state, step=1, check_replicas="full", **PIN)
    vckpt.close(path)
    return said


@pytest.mark.parametrize("give", ["dict", "state dict"])
def test_statistics_in_a_state_dict(pool2, run, give):
    assert pool2(_statistics, str(run), give) == [1, 1]
    with vckpt.Step(run) as step:
        assert torch.equal(step["model", "1.running_mean"].torch(), torch.zeros(4))
        assert step["model", "1.num_batches_tracked"].torch() == 0


def test_other_tensors_of_such_names_are_compared():
    from vckpt import _lib, state
    from test_state_numpy import described
    tensors = {"a": {"running_mean": torch.ones(3)}, "b.running_mean": torch.ones(3), "b.running_var": torch.ones(3),
               "c.running_mean": torch.ones(3), "c.running_var": torch.ones(4)}
    flags = {row[1]: bool(row[4] & _lib.BUFFER) for row in described(state.collect({"m": tensors}))}
    assert flags == {"a.running_mean": False, "b.running_mean": True, "b.running_var": True, "c.running_mean": False,
                     "c.running_var": False}
