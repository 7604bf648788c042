#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains a small transformer on the bytes of a text, saves while it trains, and goes on from the newest step when it is
started again: to the same losses, bit by bit.

    torchrun --nproc-per-node 4 docs/examples/train.py --store /tmp/ckpt --parallel fsdp
    torchrun --nproc-per-node 4 docs/examples/train.py --store /tmp/ckpt --parallel tp-fsdp --name other --resume lm/20

--parallel none (no torchrun), ddp, fsdp (FSDP2 over all ranks), tp (tensor parallelism over all ranks) or tp-fsdp
(tensor parallelism by --tp, FSDP2 over the rest). --resume goes on from a step of another run, under any of these.
docs/training.md says why things are in this order."""
import argparse
import math
import os
import pathlib
import signal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import vckpt

# ---- what is trained ----

class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.head = width // heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x):
        parts = self.query, self.key, self.value
        q, k, v = (part(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for part in parts)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.down(F.gelu(self.up(self.mlp_norm(x)))))


class Transformer(nn.Module):
    def __init__(self, width, depth, heads, length, dropout):
        super().__init__()
        self.embedding, self.position = nn.Embedding(256, width), nn.Parameter(torch.randn(length, width) * 0.02)
        self.layers = nn.ModuleList(Layer(width, heads, dropout) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, tokens, wanted):
        """The loss."""
        x = self.embedding(tokens) + self.position[:tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), wanted.flatten())


# ---- how it is cut ----

TENSOR_PARALLEL = {
    "embedding": "rows in", "layers.*.attention.query": "columns", "layers.*.attention.key": "columns",
    "layers.*.attention.value": "columns", "layers.*.attention.out": "rows", "layers.*.up": "columns",
    "layers.*.down": "rows", "head": "columns out",
}


def parallelize(model, kind, tp):
    """(the model to be called, names and sizes of the mesh, which part of each batch this rank computes, of how many
    parts)."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if kind == "none":
        return model, {}, rank, world
    from torch.distributed.device_mesh import init_device_mesh
    if kind == "ddp":
        # DDP orders its buckets anew after the first iteration, and so adds in another order then: not with this flag
        return nn.parallel.DistributedDataParallel(model, find_unused_parameters=True), {"dp": world}, rank, world
    from torch.distributed.fsdp import fully_shard
    sizes = {"dp": world} if kind == "fsdp" else {"tp": world} if kind == "tp" else {"dp": world // tp, "tp": tp}
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    if "tp" in sizes:
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
        styles = {"rows": RowwiseParallel(), "rows in": RowwiseParallel(input_layouts=Replicate()),
                  "columns": ColwiseParallel(), "columns out": ColwiseParallel(output_layouts=Replicate())}
        parallelize_module(model, mesh["tp"], {name: styles[style] for name, style in TENSOR_PARALLEL.items()})
    if kind == "tp":
        return model, sizes, 0, 1
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model, sizes, mesh["dp"].get_local_rank(), mesh["dp"].size()


def plan_of(model, kind, sizes):
    """The parallelisation plan as plain values: kept with each step, and compared when one is restored."""
    return {"parallel": kind, "mesh": sizes, "styles": TENSOR_PARALLEL if "tp" in sizes else {},
            "placements": {name: p.placements for name, p in model.named_parameters() if hasattr(p, "placements")}}


# ---- what it is trained on ----

class Loader:
    """Windows of a text in an order that is new in each epoch. Its state is of the whole job, however many ranks
    share a batch."""

    def __init__(self, text, length, batch):
        self.tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.length, self.batch, self.epoch, self.place = length, batch, 0, 0
        self.windows = (len(text) - 1) // length

    def next(self, part, parts):
        """(tokens, those that follow them) of this rank's part of the next batch."""
        if self.place + self.batch > self.windows:
            self.epoch, self.place = self.epoch + 1, 0
        order = torch.randperm(self.windows, generator=torch.Generator().manual_seed(self.epoch))
        chosen = order[self.place:self.place + self.batch].tensor_split(parts)[part] * self.length
        self.place += self.batch
        rows = chosen[:, None] + torch.arange(self.length + 1)
        return self.tokens[rows[:, :-1]], self.tokens[rows[:, 1:]]

    def state_dict(self):
        return {"epoch": self.epoch, "place": self.place}

    def load_state_dict(self, state):
        self.epoch, self.place = state["epoch"], state["place"]


def mean(value):
    """Over all ranks: where several compute the same part, each counts as often."""
    total = value.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(total)
        total /= dist.get_world_size()
    return total.item()


# ---- a job ----

class Job:
    """All that a step consists of."""

    def __init__(self, args):
        self.args, self.done = args, 0
        torch.manual_seed(args.seed)                    # all ranks begin with the same weights
        bare = Transformer(args.width, args.depth, args.heads, args.length, args.dropout)
        self.model, sizes, self.part, self.parts = parallelize(bare, args.parallel, args.tp)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=1000, eta_min=args.lr / 10)
        self.loader = Loader(pathlib.Path(args.text).read_bytes(), args.length, args.batch)
        self.plan = plan_of(self.model, args.parallel, sizes)
        self.seed(0)

    def seed(self, step):
        """Ranks that compute the same part of a batch (tensor parallelism) drop out the same."""
        torch.manual_seed(self.args.seed + 1000 * step + self.part)

    def state(self):
        return {"plan": self.plan, "model": self.model, "optimizer": self.optimizer, "lr_scheduler": self.scheduler,
                "loader": self.loader, "rng": vckpt.rng_state()}

    def restore(self, path):
        """Whether there is a step, and whether all of it fits: then the losses will be the same, bit by bit."""
        found = vckpt.load(path, self.state(), missing_ok=True)
        if found is None:
            return False, False
        self.done, same = found.step, found.values["plan"] == self.plan
        if not same:                                    # the ranks of that step were others, or computed other parts
            self.seed(self.done)
        return True, same

    def train(self, saver, stopping, report):
        """Saves while it computes. Staging has the time of a forward and a backward pass, which change no weights."""
        args, handle, losses, stop = self.args, None, {}, False
        while self.done < args.steps and not stop:
            loss = self.model(*self.loader.next(self.part, self.parts))
            self.optimizer.zero_grad()
            loss.backward()
            first_start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
            if self.done + 1 == args.crash_at and saver.rank == saver.world - 1 and first_start:
                os.kill(os.getpid(), signal.SIGKILL)
            if handle:
                handle.staged()                         # before anything changes what is being saved
            self.optimizer.step()
            self.scheduler.step()
            self.done += 1
            losses[self.done] = mean(loss)
            report(self.done, losses[self.done])
            stop = stopping(self.done)                  # a SIGTERM came: the same answer at all ranks
            if stop or self.done % args.every == 0 or self.done == args.steps:
                if handle:
                    handle.committed()                  # raises what the save before failed with
                handle = saver.async_save(self.state(), step=self.done, attributes={"loss": losses[self.done]})
        return losses


def options(argv=None):
    parser = argparse.ArgumentParser(description="trains a small transformer, and saves while it trains")
    parser.add_argument("--store", required=True, help="made if it is not there")
    parser.add_argument("--name", default="lm", help="of the run")
    parser.add_argument("--resume", metavar="RUN/STEP", help="where to begin if the run has no step yet")
    parser.add_argument("--parallel", choices=["none", "ddp", "fsdp", "tp", "tp-fsdp"], default="none")
    parser.add_argument("--tp", type=int, default=2, help="ranks that share one tensor")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=5, help="steps from one save to the next")
    parser.add_argument("--text", default=__file__)
    for name, value in {"width": 64, "depth": 2, "heads": 4, "length": 64, "batch": 16, "seed": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--crash-at", type=int, metavar="STEP",
                        help="kill -9 of the last rank in this step, at the first start only")
    return parser.parse_args(argv)


def main(args):
    """{step: loss}"""
    first = not dist.is_initialized() or dist.get_rank() == 0
    run, job = f"{args.store}/{args.name}", Job(args)

    def report(step, loss):
        if first:
            print(f"step {step} loss {loss:.4f} {loss.hex()}", flush=True)
    # The saver first: from here on nothing that an earlier start left can become a step, and all ranks see the same
    # newest one.
    with vckpt.on_sigterm() as stopping, vckpt.Saver(run, base=args.resume) as saver:
        found, same = job.restore(run)
        if not found and args.resume:
            found, same = job.restore(f"{args.store}/{args.resume}")
        if found and first:
            how = "as if nothing had happened" if same else "under another layout: losses will be close"
            print(f"from step {job.done}, {how}", flush=True)
        losses = job.train(saver, stopping, report)
    if first and losses:
        print(f"done: perplexity {math.exp(losses[job.done]):.2f}")
    elif first and job.done >= args.steps:
        print(f"{run} has step {job.done}, and --steps is {args.steps}: nothing is left to train")
    return losses


if __name__ == "__main__":
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    main(options())
    if dist.is_initialized():
        dist.destroy_process_group()
