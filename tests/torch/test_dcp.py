# SPDX-License-Identifier: Apache-2.0
"""torch's distributed checkpoint over a store: what is saved comes back, bit by bit, in any layout; a path names what
docs/dcp.md says; a failure is everybody's."""
import io
import json
import pickle
import threading
import warnings

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import dcplib
from vckpt import dcp as plug, dcp_state, saver
from vckpt.dcp import StorageReader, StorageWriter

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True, scope="module")
def library(build):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VCKPT_BUILD", str(build))
        patch.setenv("XDG_CACHE_HOME", str(build / "test-cache"))
        yield


@pytest.fixture
def ranks(pool2):
    return dcplib.Ranks(pool2)


@pytest.fixture
def path(tmp_path, vckpt):
    """Whatever stores a test leaves here must verify."""
    yield tmp_path
    saver.close()
    for file in tmp_path.rglob("vckpt.store"):
        done = vckpt("verify", file.parent, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def save(state, path, **options):
    return dcp.save(state, storage_writer=StorageWriter(path, **options))


def load(state, path, **more):
    dcp.load(state, storage_reader=StorageReader(path), **more)
    return state


# ---- two ranks ----

@pytest.mark.parametrize("rows, columns", [(0, 1), (1, 0), (None, None)], ids=["same", "other", "whole"])
def test_what_two_ranks_save_comes_back_in_any_layout(ranks, path, rows, columns):
    store = path / "ckpt"
    places = ranks("save", f"{store}/step-100", 3)[0]
    assert places["model.rows"] == ("default", 100, "model", "rows")
    assert places["optim.state.rows.exp_avg"] == ("default", 100, "optim", "state.rows.exp_avg")
    assert places["epoch"] == ("default", 100, None, None)
    ranks("load", f"{store}/step-100", 3, rows, columns)


def test_one_process_reads_what_two_wrote_and_the_reverse(ranks, path):
    ranks("save", f"{path}/two", 5, 1, 0)
    blank = {"model": {k: torch.zeros_like(dcplib.wanted(5)["model." + k])
                       for k in ("plain", "rows", "columns", "half", "scalar", "none")},
             "optim": {"state": {"rows": {"exp_avg": torch.zeros(37, 16)}}, "step": torch.tensor(0)},
             "epoch": None, "config": {"name": None, "sizes": [None, None, {"deep": None}]}}
    dcplib.check(load(blank, f"{path}/two"), 5)
    blank["epoch"], blank["config"]["name"] = 12, "tiny"
    save(blank, f"{path}/one")
    ranks("load", f"{path}/one", 5)


def test_the_step_shows_tensors_by_name_and_keeps_the_rest_under_dcp(ranks, path, vckpt):
    ranks("save", f"{path}/ckpt/step-1", 0)
    store = path / "ckpt"
    with plug.Step(f"{store}/default/1") as step:
        found = {(t.component, t.name): (t.dtype, t.shape) for t in step.tensors()}
        assert found["model", "half"] == ("bf16", (64, 64)) and found["optim",
                                                                      "state.rows.exp_avg"] == ("f32", (37, 16))
        assert len(found) == len(dcplib.wanted(0))
        document, index = json.loads(step.blob(".dcp/metadata.json")), {}
        for blob in step.blobs():           # byte entries are on the ranks that the planner chose
            if blob.name.endswith(".json") and "bytes" in blob.name:
                index.update({key: (blob.name[:-5], *place) for key, place in json.loads(step.blob(blob.name)).items()})
        name, offset, length = index["epoch"]
        data = step.blob(name)
    assert set(index) == {key for key, entry in document["keys"].items() if "bytes" in entry}
    assert document["keys"]["optim.state.rows.exp_avg"] == {"component": "optim", "name": "state.rows.exp_avg",
                                                            "dtype": "float32",
                                                            "shape": [37, 16],
                                                            "path": ["optim", "state", "rows", "exp_avg"]}
    assert (document["keys"]["config.sizes"]["bytes"] if "config.sizes" in document["keys"]
            else document["keys"]["config.sizes.0"]["bytes"])
    assert torch.load(io.BytesIO(data[offset:offset + length]), weights_only=True) == 7     # as DCP made it, untouched
    shown = vckpt("cat", store, "default/1/.dcp/metadata.json").stdout
    assert json.loads(shown) == document


def test_every_rank_names_all_tensors(ranks, path):
    """Also those that another rank stores, and with plans out of a cache: so there is one layout, not one for each
    rank."""
    assert ranks("rows_declared", f"{path}/ckpt") == [[len(dcplib.wanted(0))] * 3] * 2


def test_saving_again(ranks, path, vckpt):
    """To a path of its own: the next step. To a step that is named: in its place."""
    for seed in (1, 2):
        ranks("save", f"{path}/own", seed)
        ranks("save", f"{path}/ckpt/step-7", seed)
    ranks("load", f"{path}/own", 2)
    ranks("load", f"{path}/own/0", 1)
    ranks("load", f"{path}/ckpt/step-7", 2)
    assert [s for s in saver.steps(f"{path}/own/default")] == [0, 1] and saver.steps(f"{path}/ckpt/default") == [7]


def test_checkpoint_id_names_the_path(ranks, path):
    ranks("save", f"{path}/ckpt/step-3", 4, 0, 1, None, True)
    ranks("load", f"{path}/ckpt/step-3", 4)


@pytest.mark.parametrize("name", ["own", "ckpt/step-7"])
def test_overwrite_false_refuses(ranks, path, name):
    ranks("save", f"{path}/{name}", 1, 0, 1, {"overwrite": False})
    with pytest.raises(dcplib.Failed) as failed:
        ranks("save", f"{path}/{name}", 2, 0, 1, {"overwrite": False})
    assert all("CheckpointException" in text and "exists already" in text for text in failed.value.texts)
    ranks("load", f"{path}/{name}", 1)
    if "step" in name:
        ranks("save", f"{path}/ckpt/step-8", 2, 0, 1, {"overwrite": False})     # another step


def test_cached_plans(ranks, path):
    ranks("save_cached", f"{path}/same", [1, 2, 3])
    ranks("save_cached", f"{path}/grown", [4, 5, 6], True)


@pytest.mark.parametrize("kind", ["THREAD", "PROCESS"])
def test_asynchronous_saves(ranks, path, kind):
    """What changes after staging does not reach the step."""
    ranks("async_save", f"{path}/ckpt", 3, kind, False, 2)
    for i in range(2):
        ranks("load", f"{path}/ckpt/step-{i}", 3 + i)


def test_the_asynchronous_stager(ranks, path):
    ranks("async_save", f"{path}/ckpt", 3, "THREAD", True, 3)
    for i in range(3):
        ranks("load", f"{path}/ckpt/step-{i}", 3 + i)


def test_a_blocking_save_between_asynchronous_ones(ranks, path):
    ranks("async_save", f"{path}/ckpt", 3, "THREAD", False, 1)
    ranks("save", f"{path}/ckpt/5", 9)
    ranks("async_save", f"{path}/ckpt", 4, "THREAD", False, 2)
    for step, seed in ((0, 4), (1, 5), (5, 9)):
        ranks("load", f"{path}/ckpt/{step}", seed)


def test_saves_of_several_processes_in_turn(ranks, path):
    """Each has a launch of its own, and the newest alone may save."""
    ranks("mixed_saves", f"{path}/ckpt")
    assert saver.steps(f"{path}/ckpt/default") == list(range(9))


def test_several_boxes_of_one_tensor_on_a_rank(ranks, path):
    ranks("several_boxes", f"{path}/ckpt/1")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("what, words", [("plan", "cannot plan"), ("data", "lost its rows")])
def test_one_rank_fails(ranks, path, rank, what, words):
    """Everybody is told, nothing is visible, and the next save works: first of all saves, and later."""
    for step in (1, 3):
        with pytest.raises(dcplib.Failed) as failed:
            ranks("save_broken", f"{path}/ckpt/{step}", 1, rank, what)
        assert all("CheckpointException" in text and words in text for text in failed.value.texts), failed.value.texts
        assert (saver.steps(f"{path}/ckpt/default") == ([] if step == 1 else [2])
                if (path / "ckpt" / "vckpt.store").exists() else step == 1)
        ranks("save", f"{path}/ckpt/{step + 1}", step)
        ranks("load", f"{path}/ckpt/{step + 1}", step)


def test_byte_entries_of_every_rank_are_kept(ranks, path):
    ranks("save_bytes_everywhere", f"{path}/ckpt/1")
    with plug.Step(f"{path}/ckpt/default/1") as step:
        assert {b.name for b in step.blobs()} >= {".dcp/bytes.0", ".dcp/bytes.1"}


def test_without_collectives_each_rank_saves_by_itself(ranks, path):
    ranks("save_local", f"{path}/local", 5)
    assert saver.steps(f"{path}/local/default.rank-00001") == [0] and saver.steps(f"{path}/local/default") == []


def test_sharded_tensors_reshard(ranks, path):
    ranks("reshard_sharded_tensors", f"{path}/st")


def test_sharded_becomes_plain_and_the_reverse(ranks, path):
    (path / "tmp12345").mkdir()
    ranks("swap_sharded_and_plain", f"{path}/tmp12345")
    assert saver.steps(f"{path}/tmp12345/default") == list(range(16)) and not (path / "vckpt.store").exists()


def test_fully_sharded_training_goes_on_bit_by_bit(ranks, path):
    """From a step that was saved while it trained; and whole, in one process, up to the order of sums."""
    losses = ranks("fsdp_save", f"{path}/ckpt/step-3")
    assert ranks("fsdp_load", f"{path}/ckpt/step-3") == losses
    assert dcplib.fsdp_load(f"{path}/ckpt/step-3", cut=False) == pytest.approx(losses[0], rel=1e-5)


def test_stateful_objects_and_no_dist(path):
    saved = {"linear": torch.nn.Linear(5, 5), "blob": dcplib.Blob(b"SomeBlobForTesting")}
    dcp.save(saved, storage_writer=StorageWriter(path=path / "s"), no_dist=True)
    loaded = {"linear": torch.nn.Linear(5, 5), "blob": dcplib.Blob(b"")}
    dcp.load(loaded, storage_reader=StorageReader(path=path / "s"), no_dist=True)
    assert loaded["blob"].state == saved["blob"].state and torch.equal(loaded["linear"].weight, saved["linear"].weight)


# ---- one process ----

def odd_tensors():
    base = torch.arange(60, dtype=torch.float32).reshape(6, 10)
    found = {"transposed": base.t(), "every": base[:, ::2], "expanded": torch.ones(1, 4).expand(3, 4),
             "conj": torch.complex(base, base).conj(),
             "negative": torch.complex(base, base).conj().imag, "parameter": torch.nn.Parameter(base.clone()),
             "bool": base > 30,
             "empty": torch.empty(0), "scalar": torch.tensor(-0.0), "nan": torch.tensor([float("nan"), float("inf")])}
    for dtype in ("uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float64", "complex64",
                  "complex128", "uint16", "uint32",
                  "uint64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
                  "complex32"):
        if hasattr(torch, dtype):
            kind = getattr(torch, dtype)
            found[dtype] = torch.arange(16 * kind.itemsize, dtype=torch.uint8).view(kind)
    return found


def raw(tensor):
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(torch.uint8 if tensor.dim() else tensor.dtype)


def test_tensors_of_every_kind(path):
    state = odd_tensors()
    save(state, f"{path}/odd")
    blank = {key: torch.zeros(t.shape, dtype=t.dtype) for key, t in state.items()}
    load(blank, f"{path}/odd")
    for key, tensor in state.items():
        assert blank[key].dtype == tensor.dtype and blank[key].shape == tensor.shape
        assert raw(blank[key]).equal(raw(tensor)) or (key == "nan" and
                                                      torch.equal(blank[key].isnan(), tensor.isnan())), key
    reader = StorageReader(f"{path}/odd")
    kept = reader.read_metadata().state_dict_metadata
    assert kept["parameter"].properties.requires_grad and not kept["bool"].properties.requires_grad
    assert kept["complex32"].properties.dtype == torch.complex32


def test_what_cannot_be_kept_is_refused_by_name(path):
    for name, tensor in (("sparse", torch.eye(3).to_sparse()),
                         ("quantized", torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8))):
        with pytest.raises(CheckpointException, match=name):
            save({"fine": torch.ones(2), name: tensor}, f"{path}/refused")
    assert saver.steps(f"{path}/refused/default") == []
    save({"fine": torch.ones(2)}, f"{path}/refused")


def test_loading_into_other_memory(path):
    """Strided, of another type, of another device's rules."""
    whole = torch.randn(12, 20)
    save({"w": whole}, f"{path}/s")
    around = torch.zeros(20, 30)
    for target in (around.t()[:12, :20], around[:12, :20], torch.zeros(20, 12).t(), torch.zeros(12, 40)[:, ::2]):
        load({"w": target}, f"{path}/s")
        assert torch.equal(target, whole)
    assert (around[12:] == 0).sum() and around[:12, 20:].eq(0).any()
    half = load({"w": torch.zeros(12, 20, dtype=torch.float16)}, f"{path}/s")["w"]
    assert torch.equal(half, whole.half())
    with pytest.raises(CheckpointException, match="Size mismatch"):
        load({"w": torch.zeros(3, 3)}, f"{path}/s")
    with pytest.raises(CheckpointException, match="Missing key"):
        load({"v": torch.zeros(3, 3)}, f"{path}/s")


def test_names(path):
    """Component and name of a key; keys that would meet, and components that cannot be."""
    assert dcp_state.names({"w": ("w",), "model.a.b": ("model", "a.b"), "opt.0.x": ("opt", 0, "x")}) == {
        "w": ("model", "w"), "model.a.b": ("model", "a.b"), "opt.0.x": ("opt", "0.x")}
    assert dcp_state.names({"a": ("a",), "model.a": ("model", "a")}) == {"a": ("keys", "a"), "model.a": ("model", "a")}
    assert dcp_state.names({"a": ("a",), "model.a": ("model", "a"), "keys.a": ("keys", "a")}) == {
        "a": ("keys_", "a"), "model.a": ("model", "a"), "keys.a": ("keys", "a")}
    assert dcp_state.names({"ranks.x": ("ranks", "x"), ".x.y": (".x", "y"), "0.x": (0, "x"), "m.": ("m", "")}) == {
        key: ("model", key) for key in ("ranks.x", ".x.y", "0.x", "m.")}
    state = {"a": torch.ones(2), "model": {"a": torch.zeros(3), "ü/%": torch.ones(1)}, "ranks": {"x": torch.ones(4)},
             "m/n": {"x": torch.ones(5)},
             "layers": [torch.ones(2), {"deep": torch.zeros(2)}]}
    save(state, f"{path}/names")
    blank = {"a": torch.zeros(2), "model": {"a": torch.ones(3), "ü/%": torch.zeros(1)}, "ranks": {"x": torch.zeros(4)},
             "m/n": {"x": torch.zeros(5)}, "layers": [torch.zeros(2), {"deep": torch.ones(2)}]}
    load(blank, f"{path}/names")
    assert torch.equal(blank["a"], state["a"]) and torch.equal(blank["model"]["a"], state["model"]["a"])
    assert (torch.equal(blank["layers"][1]["deep"], state["layers"][1]["deep"]) and
            torch.equal(blank["m/n"]["x"], torch.ones(5)))


def test_a_state_is_built_from_the_step_alone(path):
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict, _load_state_dict_from_keys
    state = {"model": {"w": torch.randn(4, 4), "deep": {"b": torch.ones(2)}}, "epoch": 4,
             "list": [torch.ones(1), torch.zeros(1)]}
    save(state, f"{path}/s")
    found = {}
    _load_state_dict(found, storage_reader=StorageReader(f"{path}/s"), planner=_EmptyStateDictLoadPlanner(),
                     no_dist=True)
    assert (torch.equal(found["model"]["deep"]["b"], torch.ones(2)) and found["epoch"] == 4 and
            torch.equal(found["list"][0], torch.ones(1)))
    part = _load_state_dict_from_keys("model.w", storage_reader=StorageReader(f"{path}/s"))
    assert torch.equal(part["model"]["w"], state["model"]["w"])


def test_a_module_and_its_optimizer_go_on_as_if_nothing_had_happened(path):
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def make():
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1))
        return model, torch.optim.AdamW(model.parameters())

    def train(model, optimizer, times, seed):
        losses = []
        for i in range(times):
            x = torch.randn(5, 8, generator=torch.Generator().manual_seed(seed + i))
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses
    model, optimizer = make()
    train(model, optimizer, 3, 0)
    parts = dict(zip(("model", "optim"), get_state_dict(model, optimizer)))
    save(parts, f"{path}/ckpt/3")
    want = train(model, optimizer, 3, 3)
    model, optimizer = make()
    parts = dict(zip(("model", "optim"), get_state_dict(model, optimizer)))
    load(parts, f"{path}/ckpt/3")
    set_state_dict(model, optimizer, model_state_dict=parts["model"], optim_state_dict=parts["optim"])
    assert train(model, optimizer, 3, 3) == want


def test_a_step_that_dcp_did_not_save_is_read_by_names(path, vckpt):
    import vckpt as package
    package.init(f"{path}/store")
    want = torch.randn(5, 6)
    package.save(f"{path}/store/run/3", {"model": {"w": want}, "note": {"x": 1}})
    found = load({"model": {"w": torch.zeros(5, 6)}}, f"{path}/store/run/3")
    assert torch.equal(found["model"]["w"], want)
    found = load({"model.w": torch.zeros(5, 6)}, f"{path}/store/run/latest")
    assert torch.equal(found["model.w"], want)


def test_what_is_not_there_is_named(path):
    with pytest.raises(CheckpointException, match="no step 4|not a vckpt store|no parent"):
        load({"w": torch.zeros(2)}, f"{path}/absent/step-4")
    save({"w": torch.zeros(2)}, f"{path}/ckpt/1")
    with pytest.raises(CheckpointException, match="no step 4"):
        load({"w": torch.zeros(2)}, f"{path}/ckpt/4")
    with pytest.raises(CheckpointException, match="expected RUN, RUN/STEP or STEP"):
        save({"w": torch.zeros(2)}, f"{path}/ckpt/run/best")
    (path / "full").mkdir()
    (path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointException, match="neither a store nor empty"):
        save({"w": torch.zeros(2)}, f"{path}/full")


def test_options_without_effect_warn_once(path, monkeypatch):
    monkeypatch.setattr(plug, "_warned", set())
    given = {"single_file_per_rank": False, "sync_files": False, "thread_count": 4, "per_thread_copy_ahead": 1,
             "cache_staged_state_dict": True,
             "serialization_format": dcp.filesystem.SerializationFormat.TORCH_SAVE, "_extensions": [object()]}
    for option, value in given.items():
        with pytest.warns(UserWarning, match=f"option {option} has no effect"):
            StorageWriter(path / "x", **{option: value})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        StorageWriter(path / "x", **given)
        StorageWriter(path / "x", True, True, 1, 10_000_000, False, False)      # in FileSystemWriter's order
        StorageWriter(path / "x", _extensions=None, overwrite=False)
    with pytest.raises(TypeError, match="thread_counts"):
        StorageWriter(path / "x", thread_counts=3)


def test_options_are_those_of_file_system_writer():
    import inspect
    ours, theirs = (list(inspect.signature(cls.__init__).parameters) for cls in (StorageWriter, dcp.FileSystemWriter))
    assert ours[:len(theirs)] == theirs


def test_options_of_the_saver(path):
    import vckpt.saver as savers
    save({"w": torch.zeros(2)}, f"{path}/ckpt/1", deadline=600, low_priority=True)
    opened, = savers._natives.values()
    assert (opened.options["deadline"] == 600 and opened.options["low_priority"] is True and
            opened.options["pin"] == "auto")
    save({"w": torch.zeros(2)}, f"{path}/ckpt/2", deadline=600)
    with pytest.raises(CheckpointException, match="open with deadline=600, not 5: close it first"):
        save({"w": torch.zeros(2)}, f"{path}/ckpt/3", deadline=5)
    with pytest.raises(CheckpointException, match="open with deadline=600, not 5: close it first"):
        # in a launch of its own, after the one that failed
        save({"w": torch.zeros(2)}, f"{path}/ckpt/3", deadline=5)
    save({"w": torch.zeros(2)}, f"{path}/ckpt/3")
    opened, = savers._natives.values()
    assert opened.options["deadline"] == 600 and opened.options["low_priority"] is True


def test_attributes_stand_with_the_step(path):
    save({"w": torch.zeros(2)}, f"{path}/ckpt/1", attributes={"loss": "2.5"})
    with plug.Step(f"{path}/ckpt/default/1") as step:
        assert step.attributes == {"loss": "2.5"}


def test_validate_checkpoint_id(path):
    for cls in (StorageWriter, StorageReader):
        assert cls.validate_checkpoint_id(path / "new") and cls.validate_checkpoint_id(str(path / "a" / "b"))
        assert not cls.validate_checkpoint_id("s3://bucket/step-1") and not cls.validate_checkpoint_id("")


def test_writers_and_readers_can_be_pickled(path):
    writer = StorageWriter(path / "ckpt" / "1")
    save({"w": torch.ones(2)}, path / "ckpt" / "0")
    dcp.save({"w": torch.ones(2)}, storage_writer=writer)
    dcp.save({"w": torch.ones(2)}, storage_writer=pickle.loads(pickle.dumps(writer)), checkpoint_id=path / "ckpt" / "2")
    reader = StorageReader(path / "ckpt" / "2")
    load_twice = [reader, None]
    dcp.load({"w": torch.zeros(2)}, storage_reader=reader)
    load_twice[1] = pickle.loads(pickle.dumps(reader))
    for one in load_twice:
        got = {"w": torch.zeros(2)}
        dcp.load(got, storage_reader=one)
        assert torch.equal(got["w"], torch.ones(2))


def test_threads_save_side_by_side(path):
    """Each of its own run: what a plan carries belongs to the thread that received it."""
    wrong = []

    def run(i):
        try:
            for step in range(3):
                save({"w": torch.full((50,), i * 10 + step)}, path / f"own{i}")
            assert torch.equal(load({"w": torch.zeros(50, dtype=torch.int64)}, path / f"own{i}")["w"],
                               torch.full((50,), i * 10 + 2))
        except BaseException as error:
            wrong.append(error)
    threads = [threading.Thread(target=run, args=(i,)) for i in range(3)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not wrong, wrong


# ---- the document ----

def sample():
    from torch.distributed.checkpoint.metadata import (BytesStorageMetadata, ChunkStorageMetadata, Metadata,
                                                       TensorProperties,
                                                       TensorStorageMetadata)
    properties = TensorProperties(dtype=torch.bfloat16, requires_grad=True, memory_format=torch.channels_last)
    tensor = TensorStorageMetadata(properties, torch.Size([4, 0]),
                                   [ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([4, 0]))])
    return Metadata({"m.x": tensor, "e": BytesStorageMetadata()}, planner_data={"m.x": ("m", "x"), "e": ("e",)})


def test_the_document_comes_back():
    from torch.distributed.checkpoint.metadata import Metadata
    metadata = sample()
    again, kept = dcp_state.parse(dcp_state.document(metadata))
    assert again.state_dict_metadata == metadata.state_dict_metadata and again.planner_data == metadata.planner_data
    assert kept == {"m.x": dcp_state.Kept("m", "x", torch.bfloat16, (4, 0))}
    for data in (None, {"other": [1, (2, "x")]}, [b"bytes", 1.5], {"m.x": "no path"}):
        again, _ = dcp_state.parse(dcp_state.document(Metadata(metadata.state_dict_metadata, planner_data=data)))
        assert again.planner_data == data
    assert dcp_state.document(metadata) == dcp_state.document(sample())


def test_the_document_is_checked():
    good = json.loads(dcp_state.document(sample()))
    bad = [b"", b"{", b"[]", b"{}", b'{"keys": 1}', json.dumps({**good, "vckpt.dcp": 2}).encode(),
           b'{"vckpt.dcp": 1, "keys": {"a": 1}}',
           b"[" * 100000]
    tensor = good["keys"]["m.x"]
    for field, values in {"dtype": [None, "Tensor", "float99", "__class__", 3],
                          "shape": [None, [1.5], [-1], [True], "12", [2**63]],
                          "component": [None, 1], "name": [None], "path": [3, [None], [[]]],
                          "layout": ["Tensor", 3, "spiral"],
                          "memory_format": ["wild", 3]}.items():
        for value in values:
            bad.append(json.dumps({**good, "keys": {"m.x": {**tensor, field: value}}}).encode())
    for text in bad:
        with pytest.raises(dcp_state.BadDocument):
            dcp_state.parse(text)
    for text in (b"{", b"[]", b'{"a": 1}', b'{"a": [0]}', b'{"a": [0, 11]}', b'{"a": [-1, 2]}', b'{"a": [true, 1]}'):
        with pytest.raises(dcp_state.BadDocument):
            dcp_state.parse_index(text, 10)
    assert dcp_state.parse_index(b'{"a": [0, 10]}', 10) == {"a": (0, 10)}
