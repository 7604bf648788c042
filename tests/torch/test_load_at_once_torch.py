# SPDX-License-Identifier: Apache-2.0
"""That vckpt.load reads torch's states by one load of the library."""
import pytest
import torch

import vckpt
from vckpt import loads


@pytest.fixture
def calls(monkeypatch):
    """The names of the tensors of each load of the library."""
    seen, real = [], loads._Load.run

    def counted(self, rows):
        seen.append(sorted(row.name.decode() for row in rows))
        real(self, rows)
    monkeypatch.setattr(loads._Load, "run", counted)
    return seen


@pytest.fixture
def run(tmp_path):
    yield tmp_path / "store/run"
    vckpt.close()


def trained(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_a_module_and_its_optimizer(run, calls):
    """One load; the optimizer gets its state after it, whose memory is that which was read into."""
    model, optimizer = trained(1)
    vckpt.save(run, {"model": model, "optimizer": optimizer}, pin="no")
    other = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 3))
    fresh = torch.optim.AdamW(other.parameters())
    vckpt.load(run, {"model": other, "optimizer": fresh})
    assert len(calls) == 1 and len(calls[0]) == 4 + 3 * 4, calls
    for (name, a), b in zip(model.named_parameters(), other.parameters()):
        assert torch.equal(a, b) and "0.weight" in calls[0]
        for key, value in optimizer.state[a].items():
            assert torch.equal(value, fresh.state[b][key]), (name, key)


def test_tied_weights(run, calls):
    """Two names of one parameter, which are equal in the step, are read once."""
    def made():
        model = torch.nn.Sequential(torch.nn.Embedding(300, 200), torch.nn.Linear(200, 300, bias=False))
        model[1].weight = model[0].weight
        return model
    one, other = made(), made()
    vckpt.save(run, {"model": one}, pin="no")
    vckpt.load(run, {"model": other})
    assert calls == [["0.weight"]] and torch.equal(one[0].weight, other[1].weight)
    assert other[0].weight is other[1].weight


def test_what_cannot_be_read_into_is_copied(run, calls):
    w = torch.randn(4, 6)
    vckpt.save(run, {"m": {"w": w, "c": torch.complex(w, w), "half": w.half(), "t": w}}, pin="no")
    to = {"w": torch.zeros(4, 6, dtype=torch.float64), "c": torch.zeros(4, 6, dtype=torch.complex64).conj(),
          "half": torch.zeros(4, 6).half(), "t": torch.zeros(6, 4).t()}
    vckpt.load(run, {"m": to})
    assert calls == [["half", "t"], ["c", "w"]] and torch.equal(to["w"], w.double()) and torch.equal(to["t"], w)
    assert torch.equal(to["c"].resolve_conj(), torch.complex(w, w)) and torch.equal(to["half"], w.half())
