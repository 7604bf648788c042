#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Follows a run of train.py: evaluates each new step on a text, as soon as it is there, and reads only those weights
that the step changed.

    python3 docs/examples/evaluate.py --store /tmp/ckpt --name lm --text README.md

It holds the model on one process, however many ranks train it, and under whatever layout. A step that it is late for is
passed over: it takes the newest. A run may be trained with frozen parameters, or only in part: what is the same in a
step as in the one before is one object of the store, and digests tell so without reading."""
import argparse
import pathlib

import torch
import train

import vckpt


class Follower:
    """weights: those of the model, in place; digests: what they were read from."""

    def __init__(self, weights):
        self.weights, self.digests = weights, {}

    def load(self, path):
        """The names of the tensors that were read."""
        with vckpt.open(path) as step:
            found = {name: step["model", name].digest() for name in self.weights}
            new = [name for name in found if found[name] != self.digests.get(name)]
            if new:     # the step, not its path: under that there may be another commit by now
                vckpt.load(step, {"model": {name: self.weights[name] for name in new}}, strict=False)
        self.digests = found
        return new


def loss_of(model, text, length):
    """The mean over a text."""
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    windows = (len(tokens) - 1) // length
    rows = torch.arange(windows)[:, None] * length + torch.arange(length + 1)
    with torch.no_grad():
        return model(tokens[rows[:, :-1]], tokens[rows[:, 1:]]).item()


def main(args):
    """[(step, loss, names that were read)]"""
    model = train.Transformer(args.width, args.depth, args.heads, args.length, dropout=0)
    model.eval()
    run, follower, told = f"{args.store}/{args.name}", Follower(model.state_dict()), []
    text, step = pathlib.Path(args.text).read_bytes(), None
    while step is None or step < args.until:
        step = vckpt.wait(run, after=step, timeout=args.patience)
        new = follower.load(f"{run}/{step}")
        told.append((step, loss_of(model, text, args.length), new))
        print(f"step {step} loss {told[-1][1]:.4f} ({len(new)} of {len(follower.weights)} tensors read)", flush=True)
    return told


def options(argv=None):
    parser = argparse.ArgumentParser(description="evaluates each new step of a run of train.py")
    parser.add_argument("--store", required=True)
    parser.add_argument("--name", default="lm", help="of the run")
    parser.add_argument("--until", type=int, default=40, metavar="STEP", help="the last one")
    parser.add_argument("--patience", type=float, default=3600, help="seconds without a new step, and it ends")
    parser.add_argument("--text", default=__file__)
    for name, value in {"width": 64, "depth": 2, "heads": 4, "length": 64}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(options())
