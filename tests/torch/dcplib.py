# SPDX-License-Identifier: Apache-2.0
"""What two ranks of a pool are told to do, by name, and the states that they save and load."""
import warnings

WORLD = 2


def _run(name, args):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return globals()[name](*args)


class Failed(Exception):
    def __init__(self, results):
        super().__init__("\n".join(str(r) if ok else r[2] for ok, r in results))
        self.results = results
        self.texts = [None if ok else f"{r[0]}: {r[1]}" for ok, r in results]


class Ranks:
    """Calls functions of this file by name, on the ranks of a pool."""

    def __init__(self, pool):
        self.pool = pool

    def __call__(self, name, *args):
        """What the function returned on each rank."""
        results = self.pool.ask(_run, name, args)
        if not all(ok for ok, _ in results):
            raise Failed(results)
        return [result for _, result in results]


# ---- states ----

def mesh():
    from torch.distributed.device_mesh import init_device_mesh
    return init_device_mesh("cpu", (WORLD,))


def full(shape, seed, dtype="float32"):
    import torch
    items = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return items.to(getattr(torch, dtype))


def sharded(shape, seed, *placements, dtype="float32"):
    from torch.distributed.tensor import distribute_tensor
    return distribute_tensor(full(shape, seed, dtype), mesh(), list(placements))


def wanted(seed):
    """{key: tensor} of state(seed), whole."""
    import torch
    return {"model.plain": full((40, 30), seed), "model.rows": full((37, 16), seed + 1),
            "model.columns": full((16, 37), seed + 2),
            "model.half": full((64, 64), seed + 3, "bfloat16"), "model.scalar": torch.tensor(2.5 + seed),
            "model.none": torch.empty(3, 0),
            "optim.state.rows.exp_avg": full((37, 16), seed + 4), "optim.step": torch.tensor(seed)}


def state(seed, rows=0, columns=1, blank=False):
    """The same nested state under another layout; blank: to be loaded into."""
    import torch
    from torch.distributed.tensor import Replicate, Shard

    def cut(shape, seed_, dim, **more):
        return sharded(shape, seed_, Replicate() if dim is None else Shard(dim), **more)
    found = {"model": {"plain": full((40, 30), seed), "rows": cut((37, 16), seed + 1, rows),
                       "columns": cut((16, 37), seed + 2, columns),
                       "half": cut((64, 64), seed + 3, rows, dtype="bfloat16"), "scalar": torch.tensor(2.5 + seed),
                       "none": torch.empty(3, 0)},
             "optim": {"state": {"rows": {"exp_avg": cut((37, 16), seed + 4, rows)}}, "step": torch.tensor(seed)},
             "epoch": 7 + seed, "config": {"name": "tiny", "sizes": [1, 2, {"deep": (3, 4)}]}}
    if blank:
        for part in (found["model"], found["optim"]["state"]["rows"]):
            for tensor in part.values():
                (tensor.to_local() if hasattr(tensor, "to_local") else tensor).fill_(-1)
        found["optim"]["step"].fill_(-1)
        found["epoch"], found["config"]["sizes"][0] = None, None
    return found


def check(got, seed):
    """That a loaded state is that of wanted(seed); bit by bit."""
    import torch
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict
    flat, _ = flatten_state_dict(got)
    for key, want in wanted(seed).items():
        have = flat[key].full_tensor() if hasattr(flat[key], "full_tensor") else flat[key]
        assert have.dtype == want.dtype and torch.equal(have, want), key
    assert got["epoch"] == 7 + seed and got["config"]["sizes"][0] == 1 and got["config"]["sizes"][2]["deep"] == (3, 4)


# ---- what ranks do ----

def writer(path, **options):
    from vckpt.dcp import StorageWriter
    return StorageWriter(path, **options)


def save(path, seed=0, rows=0, columns=1, options=None, by_id=False, **more):
    import torch.distributed.checkpoint as dcp
    if by_id:
        metadata = dcp.save(state(seed, rows, columns), checkpoint_id=path,
                            storage_writer=writer("/nowhere/at/all", **(options or {})), **more)
    else:
        metadata = dcp.save(state(seed, rows, columns), storage_writer=writer(path, **(options or {})), **more)
    return None if metadata is None else {index.fqn: (info.run, info.step, info.component, info.name)
                                          for index, info in metadata.storage_data.items()}


def save_by_torch(path, seed=0, rows=0, columns=1):
    import torch.distributed.checkpoint as dcp
    dcp.save(state(seed, rows, columns), storage_writer=dcp.FileSystemWriter(path, sync_files=False))


def save_as_hugging_face(path, seed=0, rows=0, columns=1, consolidated=False):
    import torch.distributed.checkpoint as dcp
    model = state(seed, rows, columns)["model"]
    dcp.save(model, storage_writer=dcp.HuggingFaceStorageWriter(path, save_distributed=True,
                                                                enable_consolidation=consolidated))


def load(path, seed=0, rows=0, columns=1):
    import torch.distributed.checkpoint as dcp
    from vckpt.dcp import StorageReader
    found = state(seed, rows, columns, blank=True)
    dcp.load(found, storage_reader=StorageReader(path))
    check(found, seed)


def save_cached(path, seeds, grow=False):
    """Several saves by planners of one class that caches plans, each by a new writer."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from vckpt.dcp import StorageReader

    class Planner(DefaultSavePlanner):
        pass
    for at, seed in enumerate(seeds):
        found = state(seed)
        if grow and at == len(seeds) - 1:
            found["model"]["extra"] = torch.arange(5)
        dcp.save(found, storage_writer=writer(f"{path}/step-{10 * (at + 1)}"),
                 planner=Planner(enable_plan_caching=True))
    for at, seed in enumerate(seeds):
        blank = state(seed, blank=True)
        dcp.load(blank, storage_reader=StorageReader(f"{path}/step-{10 * (at + 1)}"))
        check(blank, seed)


def rows_declared(path):
    from vckpt import saver
    seen, tensors = [], saver.Handle.tensors

    def spy(handle, rows):
        seen.append(len(rows))
        tensors(handle, rows)
    saver.Handle.tensors = spy
    try:
        save(f"{path}/1")
        save_cached(f"{path}/cached", [1, 2])
    finally:
        saver.Handle.tensors = tensors
    return seen


def async_save(path, seed, kind, stager=False, times=1):
    """Changes the state as soon as it may; [number of futures that were done at once]"""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
    stage = DefaultStager(StagingOptions(use_pinned_memory=False, use_shared_memory=False, use_async_staging=True,
                                         use_non_blocking_copy=False)) if stager else None
    for i in range(times):
        found = state(seed + i)
        response = dcp.async_save(found, storage_writer=writer(f"{path}/step-{i}"), async_stager=stage,
                                  async_checkpointer_type=AsyncCheckpointerType[kind])
        if hasattr(response, "staging_completion"):
            response.staging_completion.result()
            response = response.upload_completion
        for tensor in found["model"].values():
            (tensor.to_local() if hasattr(tensor, "to_local") else tensor).fill_(-7)
        response.result()
    if stage is not None:
        stage.close()


def save_broken(path, seed, bad_rank, what):
    """A save in which one rank fails."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    class Planner(DefaultSavePlanner):
        def create_local_plan(self):
            if what == "plan" and dist.get_rank() == bad_rank:
                raise RuntimeError("this rank cannot plan")
            return super().create_local_plan()

        def resolve_data(self, item):
            if what == "data" and dist.get_rank() == bad_rank and item.index.fqn == "model.rows":
                raise RuntimeError("this rank has lost its rows")
            return super().resolve_data(item)
    dcp.save(state(seed), storage_writer=writer(path), planner=Planner())


def save_bytes_everywhere(path):
    """A planner that keeps byte entries of every rank."""
    import io
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
    from vckpt.dcp import StorageReader
    rank = dist.get_rank()

    class Planner(DefaultSavePlanner):
        def create_local_plan(self):
            plan = super().create_local_plan()
            key = f"rng.{rank}"
            if not any(item.index.fqn == key for item in plan.items):       # torch plans them on the coordinator only
                plan.items.append(WriteItem(index=MetadataIndex(key), type=WriteItemType.BYTE_IO))
            return plan
    dcp.save({"rng": {str(rank): {"mine": rank * 11}}, "t": torch.ones(3)}, storage_writer=writer(path),
             planner=Planner(flatten_state_dict=True) if False else _Keys(Planner, rank))
    found = {}

    class Loader(DefaultLoadPlanner):
        def load_bytes(self, item, value):
            found[item.dest_index.fqn] = torch.load(io.BytesIO(value.getvalue()), weights_only=True)
    dcp.load({f"rng.{r}": None for r in range(WORLD)}, storage_reader=StorageReader(path),
             planner=Loader(flatten_state_dict=False))
    assert found == {f"rng.{r}": {"mine": r * 11} for r in range(WORLD)}, found


def _Keys(planner, rank):
    """Of nested values that are kept whole: one key for each rank's."""
    import io
    import torch

    class Whole(planner):
        def set_up_planner(self, state_dict, *args, **kwargs):
            flat = {f"rng.{rank}": state_dict["rng"][str(rank)], "t": state_dict["t"]}
            super().set_up_planner(flat, *args, **kwargs)

        def resolve_data(self, item):
            if item.index.fqn == f"rng.{rank}":
                data = io.BytesIO()
                torch.save(self.state_dict[item.index.fqn], data)
                return data
            return super().resolve_data(item)
    return Whole(flatten_state_dict=False)


def save_local(path, seed):
    """Without collectives: every rank by itself, and back."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from vckpt.dcp import StorageReader
    mine = {"w": full((8, 8), seed + dist.get_rank()), "rank": dist.get_rank()}
    dcp.save(mine, storage_writer=writer(path), use_collectives=False)
    blank = {"w": torch.zeros(8, 8), "rank": None}
    dcp.load(blank, storage_reader=StorageReader(path))
    assert torch.equal(blank["w"], mine["w"]) and blank["rank"] == dist.get_rank()


def run_alone(name, *args):
    """On rank 0 only, without the process group: what the other ranks do meanwhile is nothing."""
    import torch.distributed as dist
    if dist.get_rank() == 0:
        return globals()[name](*args)
    return None


def reshard_sharded_tensors(path):
    """ShardedTensor, as DCP's own tests have it: chunks by rows, by columns, boxes of their own choice, several a rank;
    each is loaded into every other layout."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec, EnumerableShardingSpec
    from vckpt.dcp import StorageReader

    def boxes(*given):
        return EnumerableShardingSpec(
            [ShardMetadata(shard_offsets=list(o), shard_sizes=list(s), placement=f"rank:{r}/cpu") for r, o, s in given])
    places = [f"rank:{r}/cpu" for r in range(WORLD)]
    specs = {"rows": ChunkShardingSpec(dim=0, placements=places),
             "columns": ChunkShardingSpec(dim=1, placements=places),
             "ragged": boxes((0, (0, 0), (5, 8)), (1, (5, 0), (8, 8))),
             "tiles": boxes((0, (0, 0), (6, 3)), (1, (0, 3), (6, 5)), (1, (6, 0), (7, 3)), (0, (6, 3), (7, 5)))}
    whole = torch.arange(13 * 8, dtype=torch.float32).reshape(13, 8)

    def make(spec, fill):
        made = sharded_tensor.zeros(spec, 13, 8)
        for shard in made.local_shards():
            at = tuple(slice(o, o + n) for o, n in zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes))
            shard.tensor.copy_(whole[at] if fill else torch.full_like(shard.tensor, -1))
        return made
    for name, spec in specs.items():
        dcp.save({"tensor": make(spec, True)}, storage_writer=writer(f"{path}/{name}"))
        for other in specs.values():
            blank = {"tensor": make(other, False)}
            dcp.load(blank, storage_reader=StorageReader(f"{path}/{name}"))
            for shard in blank["tensor"].local_shards():
                at = tuple(slice(o, o + n) for o, n in zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes))
                assert torch.equal(shard.tensor, whole[at]), (name, shard.metadata)
        plain = {"tensor": torch.zeros(13, 8)}
        dcp.load(plain, storage_reader=StorageReader(f"{path}/{name}"))
        assert torch.equal(plain["tensor"], whole)
    dist.barrier()


def mixed_saves(path):
    """Blocking saves of this process and saves of torch's checkpoint process in turn, into one run."""
    import vckpt
    for step, kind in enumerate(("save", "PROCESS", "save", "PROCESS", "PROCESS", "own", "save", "THREAD", "PROCESS")):
        if kind == "save":
            save(f"{path}/step-{step}", step)
        elif kind == "own":
            vckpt.close()           # what it had open here is of a launch before
            vckpt.save(f"{path}/default/{step}", {"model": {"w": full((3, 3), step)}})
        else:
            import torch.distributed.checkpoint as dcp
            from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
            dcp.async_save(state(step), storage_writer=writer(f"{path}/step-{step}"),
                           async_checkpointer_type=AsyncCheckpointerType[kind]).result()
        if kind != "own":
            load(f"{path}/step-{step}", step)


def several_boxes(path):
    """A rank has several chunks of one tensor, of types that torch does not join."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
    from vckpt.dcp import StorageReader
    wholes = {"f8": full((12, 10), 1).to(torch.float8_e4m3fn), "f4": full((12, 10), 2), "b": full((12, 10), 3) > 0}

    class Planner(DefaultSavePlanner):
        def create_local_plan(self):
            plan = super().create_local_plan()
            items = []
            for item in plan.items:
                for row in range(dist.get_rank(), 12, 4):       # rows r, r + 4, r + 8, and a pair of columns each
                    for first, n in ((0, 3), (3, 7)):
                        offsets, sizes = torch.Size([row, first]), torch.Size([1, n])
                        data = TensorWriteData(ChunkStorageMetadata(offsets, sizes), item.tensor_data.properties,
                                               item.tensor_data.size)
                        items.append(WriteItem(MetadataIndex(item.index.fqn, offsets), WriteItemType.SHARD,
                                               tensor_data=data))
                        data = TensorWriteData(ChunkStorageMetadata(torch.Size([row + 2, first]), sizes),
                                               item.tensor_data.properties, item.tensor_data.size)
                        items.append(WriteItem(MetadataIndex(item.index.fqn, torch.Size([row + 2, first])),
                                               WriteItemType.SHARD, tensor_data=data))
            plan.items[:] = items
            return plan

        def resolve_data(self, item):
            at = tuple(slice(o, o + n) for o, n in zip(item.tensor_data.chunk.offsets, item.tensor_data.chunk.sizes))
            return wholes[item.index.fqn][at]
    dcp.save(wholes, storage_writer=writer(path), planner=Planner())
    blank = {key: torch.zeros(12, 10, dtype=t.dtype) for key, t in wholes.items()}
    dcp.load(blank, storage_reader=StorageReader(path))
    for key, want in wholes.items():
        assert torch.equal(blank[key].view(torch.uint8), want.view(torch.uint8)), key


class Blob:
    """A Stateful that is no module."""

    def __init__(self, value):
        self.state = {"blob": value}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state_dict):
        self.state = state_dict


def swap_sharded_and_plain(path):
    """The calls of before, into a folder that is there already, again and again: what was sharded is loaded plain, and
    the reverse."""
    import torch
    import torch.distributed as dist
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec, EnumerableShardingSpec
    from torch.distributed.checkpoint import load_state_dict, save_state_dict
    from vckpt.dcp import StorageReader
    n = 32

    def cut(at, first, second):
        return EnumerableShardingSpec(
            [ShardMetadata(shard_offsets=[0], shard_sizes=[at], placement=f"rank:{first}/cpu"),
             ShardMetadata(shard_offsets=[at], shard_sizes=[n - at], placement=f"rank:{second}/cpu")])
    specs = [ChunkShardingSpec(dim=0, placements=["rank:0/cpu", "rank:1/cpu"]),
             ChunkShardingSpec(dim=0, placements=["rank:0/cpu", "rank:1/cpu", "rank:1/cpu", "rank:0/cpu"]),
             cut(8, 1, 0), cut(10, 0, 1)]
    for i, save_spec in enumerate(specs):
        for k, load_spec in enumerate(specs):
            saved = {"sharded": sharded_tensor.rand(save_spec, n), "replicated": torch.rand(n),
                     "blob": Blob(b"bytes %d %d" % (i, k))}
            dist.broadcast(saved["replicated"], src=0)
            save_state_dict({**saved, "blob": saved["blob"].state_dict()}, storage_writer=writer(path),
                            coordinator_rank=(i + k) % 2)
            loaded = {"sharded": torch.zeros(n), "replicated": sharded_tensor.zeros(load_spec, n),
                      "blob": {"blob": b""}}
            load_state_dict(loaded, storage_reader=StorageReader(path))
            whole = [torch.zeros(n) if dist.get_rank() == 0 else None for _ in range(2)]
            saved["sharded"].gather(out=whole[0])
            loaded["replicated"].gather(out=whole[1])
            if dist.get_rank() == 0:
                assert torch.equal(whole[0], loaded["sharded"]) and torch.equal(whole[1], saved["replicated"]), (i, k)
            assert loaded["blob"] == saved["blob"].state, (i, k)


def fsdp_model(cut=True):
    import torch
    from torch.distributed.fsdp import fully_shard
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(7, 13), torch.nn.ReLU(), torch.nn.Linear(13, 5))
    if cut:
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh())
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def fsdp_steps(model, optimizer, first, times):
    import torch
    losses = []
    for i in range(first, first + times):
        x = torch.randn(6, 7, generator=torch.Generator().manual_seed(i))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def fsdp_state(model, optimizer):
    from torch.distributed.checkpoint.state_dict import get_state_dict
    return dict(zip(("model", "optim"), get_state_dict(model, optimizer)))


def fsdp_save_by_torch(path):
    """Trains and saves; losses after the save."""
    import torch.distributed.checkpoint as dcp
    model, optimizer = fsdp_model()
    fsdp_steps(model, optimizer, 0, 3)
    dcp.save(fsdp_state(model, optimizer), storage_writer=dcp.FileSystemWriter(path, sync_files=False))
    return fsdp_steps(model, optimizer, 3, 3)


def fsdp_save(path):
    """Trains, saves asynchronously while it goes on training; losses after the save."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    model, optimizer = fsdp_model()
    fsdp_steps(model, optimizer, 0, 3)
    apart = dist.new_group(backend="gloo")      # DCP's own messages must not meet those of the training
    future = dcp.async_save(fsdp_state(model, optimizer), storage_writer=writer(path), process_group=apart)
    losses = fsdp_steps(model, optimizer, 3, 3)
    future.result()
    return losses


def fsdp_load(path, cut=True):
    """Losses after a restart from it."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import set_state_dict
    from vckpt.dcp import StorageReader
    model, optimizer = fsdp_model(cut)
    parts = fsdp_state(model, optimizer)
    dcp.load(parts, storage_reader=StorageReader(path))
    set_state_dict(model, optimizer, model_state_dict=parts["model"], optim_state_dict=parts["optim"])
    return fsdp_steps(model, optimizer, 3, 3)
