# SPDX-License-Identifier: Apache-2.0
"""Ranks as processes: a pool of them stays, for a start takes seconds, and runs one function after another on all ranks,
over gloo. `pool(function, *arguments)` calls function(*arguments) on every rank (module-level functions only) and gives the
list of results; what a rank raises is raised here with its rank and trace."""
import multiprocessing
import os
import pathlib
import shutil
import tempfile
import traceback

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PATIENCE = 240


def _rank(rank, world, rendezvous, pipe):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), OMP_NUM_THREADS="1", LOCAL_RANK=str(rank))
    import torch
    import torch.distributed as dist
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}/file", rank=rank, world_size=world)
    while True:
        job = pipe.recv()
        if job is None:
            break
        function, arguments = job
        try:
            pipe.send((True, function(*arguments)))
        except BaseException as error:              # the test's answer, whatever it is
            pipe.send((False, f"rank {rank}: {type(error).__name__}: {error}\n{traceback.format_exc()}"))
    dist.destroy_process_group()


class Pool:
    def __init__(self, world):
        self.world, context = world, multiprocessing.get_context("spawn")
        self.rendezvous = tempfile.mkdtemp(prefix="vckpt-gloo-")    # a port that is free now may be another's in a second
        before = os.environ.get("LD_PRELOAD")
        if os.environ.get("VCKPT_PRELOAD"):         # a sanitizer's run time has to come first there, too
            os.environ["LD_PRELOAD"] = os.environ["VCKPT_PRELOAD"]
        try:
            self.pipes, self.ranks = [], []
            for rank in range(world):
                here, there = context.Pipe()
                process = context.Process(target=_rank, args=(rank, world, self.rendezvous, there), daemon=True)
                process.start()
                self.pipes.append(here)
                self.ranks.append(process)
        finally:
            os.environ.pop("LD_PRELOAD", None)
            if before is not None:
                os.environ["LD_PRELOAD"] = before

    def __call__(self, function, *arguments):
        for pipe in self.pipes:
            pipe.send((function, arguments))
        results, failed = [], []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(PATIENCE):
                raise AssertionError(f"rank {rank} does not answer in {PATIENCE} s; others: {failed}")
            good, result = pipe.recv()
            results.append(result)
            if not good:
                failed.append(result)
        if failed:
            pytest.fail("\n".join([failed[0], *(text.split("\n")[0] for text in failed[1:])]), pytrace=False)
        return results

    def close(self):
        for pipe in self.pipes:
            try:
                pipe.send(None)
            except OSError:
                pass
        for process in self.ranks:
            process.join(20)
            if process.is_alive():
                process.kill()
        shutil.rmtree(self.rendezvous)


@pytest.fixture(scope="session")
def pool4():
    """Four ranks."""
    pool = Pool(4)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def pool6():
    """Six ranks."""
    pool = Pool(6)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def pool2():
    """Two ranks."""
    pool = Pool(2)
    yield pool
    pool.close()
