# SPDX-License-Identifier: Apache-2.0
"""The blocks of Python on the pages that a user reads first run as they stand there, one after another."""
import re
import signal
import unittest.mock

import pytest
import torch

from gloo_pool import ROOT

import readme
import vckpt


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(8, 256)])

    def forward(self, *batch):
        return self.layers[0](batch[0]).mean()


class Loader:
    def __init__(self):
        self.place = 0

    def next(self):
        self.place += 1
        return (torch.full((2, 8), float(self.place)),)

    def __iter__(self):
        return iter([self.next() for _ in range(201)])

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


def train(model, optimizer, batch):
    loss = model(*batch)
    loss.backward()
    optimizer.step()
    return loss.item()


def names(tmp_path):
    """What the blocks take for given."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    return {"vckpt": vckpt, "plan": {"parallel": "none"}, "model": model, "optimizer": optimizer,
            "scheduler": scheduler, "loader": Loader(),
            "train": train, "train_one_step": lambda: None, "step": 0, "last": 200,
            "state": lambda: {"model": model}, "tensor": torch.empty(128, 8)}


def blocks(page, tmp_path):
    text = (ROOT / page).read_text()
    found = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    return [block.replace('"/ckpt', f'"{tmp_path}/ckpt').replace('"/data/store', f'"{tmp_path}/ckpt')
            for block in found]


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield
    vckpt.close()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_python_md(tmp_path):
    saving, loading, reading, saying, following, parts = blocks("docs/python.md", tmp_path)
    known = names(tmp_path)
    exec(saving, known)
    assert vckpt.steps(tmp_path / "ckpt/llama") == [900, 1000] and known["handle"].done
    vckpt.save(tmp_path / "ckpt/llama", known["state"], step=1001, blobs={"config.json": b"{}"})
    exec(loading, known)
    assert known["found"].step == 1001 and known["found"].rng and known["found"].values == {"plan": known["plan"]}
    exec(reading.replace("rank=3", "rank=0"), known)    # one process saved it
    assert known["step"].number == 1001 and torch.equal(known["tensor"], known["model"].layers[0].weight[:128])
    exec(saying, known)
    with vckpt.open(tmp_path / "ckpt/llama/best") as said:
        assert said.number == 1000 and said.pinned and said.attributes["eval_loss"] == "2.2"
    exec("import numpy as np\n" + parts, known)
    assert known["w"].shape == (256, 8) and known["step"].number == 1001
    follow(following, tmp_path / "ckpt/llama", known)


def follow(loop, run, known):
    """The loop of an evaluation: the second step has another scale, and only that is read."""
    seen, read = [], []

    def evaluate(weights):
        seen.append({name: tensor.clone() for name, tensor in weights.items()})
        if len(seen) == 2:
            raise StopIteration
        read.clear()
        with torch.no_grad():
            next(known["model"].parameters()).mul_(2)
        vckpt.save(run, known["state"], step=1002)
    with unittest.mock.patch.object(vckpt.LazyTensor, "torch", autospec=True,
                                    side_effect=lambda tensor, torch=vckpt.LazyTensor.torch: read.append(tensor.name)
                                    or torch(tensor)):
        with pytest.raises(StopIteration):
            exec(loop, known | {"run": run, "weights": {}, "evaluate": evaluate})
    changed = [name for name in seen[0] if not torch.equal(seen[0][name], seen[1][name])]
    assert len(changed) == 1 == len(read) and changed[0].endswith(read[0])


def test_training_md(tmp_path):
    _, loop, ending = blocks("docs/training.md", tmp_path)      # the first: test_loop.py
    known = names(tmp_path)
    exec(loop, known)
    assert vckpt.steps(tmp_path / "ckpt/llama") == [100, 200]
    known.update(step=200, last=300)
    exec(ending, known)
    assert vckpt.steps(tmp_path / "ckpt/llama") == [100, 200, 300]


def test_readme():
    """Its program is that of docs/training.md, which test_loop.py runs."""
    assert readme.block("Resume", language="python") == readme.block("A loop that can be started again",
                                                                     "docs/training.md", "python")


def test_from_torch_save(tmp_path, monkeypatch):
    """Both programs resume to the same weights, and old files come in and go out."""
    before, after, whole, named, back = blocks("docs/from-torch-save.md", tmp_path)
    monkeypatch.chdir(tmp_path)

    def train(script, last):
        known = {}
        exec(script.replace("21)", f"{last + 1})"), known)
        return known
    weights = [[p.clone() for p in train(script, last)["model"].parameters()]
               for script in (before, after) for last in (10, 20)]
    straight = train(before.replace("last.pt", "straight.pt"), 20)
    assert all(torch.equal(a, b) for a, b in zip(weights[1], weights[3]))
    assert all(torch.equal(a, b) for a, b in zip(weights[1], straight["model"].parameters()))
    assert vckpt.steps("ckpt/demo") == [10, 20]

    known = {"torch": torch, "vckpt": vckpt, **{k: straight[k] for k in ("model", "optimizer", "scheduler")}}
    exec(whole, known)
    with vckpt.open("ckpt/old/20") as step:
        assert step.values("step") == 20 and step.values("optimizer")["param_groups"][0]["params"] == [0, 1, 2, 3]
    fresh = train(before.replace("last.pt", "none.pt").replace("21)", "1)"), 20)
    vckpt.load("ckpt/old", {"model": fresh["model"]})
    assert all(torch.equal(a, b) for a, b in zip(weights[1], fresh["model"].parameters()))
    exec(named, known)
    vckpt.load("ckpt/taken", {key: fresh[key] for key in ("model", "optimizer", "scheduler")})
    saved, now = straight["optimizer"].state_dict(), fresh["optimizer"].state_dict()
    assert saved["param_groups"] == now["param_groups"]
    assert all(torch.equal(saved["state"][i][k], now["state"][i][k]) for i in range(4) for k in ("exp_avg", "step"))
    exec(back, known)
    assert torch.load("model.pt", weights_only=True)["step"] == 20
