# SPDX-License-Identifier: Apache-2.0
"""Ranks as processes, over gloo: `pool(function, *arguments)` calls function(*arguments) on every rank (module-level
functions only) and gives the list of results; what a rank raises fails the test with its rank and trace. `pool.ask`
gives what each rank answered, whether good or not. The ranks of a pool stay for all tests of a pytest process, unless
one dies. They are forked from a process that has imported torch, because an import takes seconds: a rank begins as a
new process does, with torch imported and nothing of vckpt in use. conftest.py has the fixtures. `programs` runs whole
programs in processes of that kind."""
import atexit
import contextlib
import multiprocessing
import multiprocessing.forkserver
import os
import pathlib
import random
import shutil
import sys
import tempfile
import threading
import traceback

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PATIENCE = 240
IMPORTED = ["torch", "torch.distributed", "torch.distributed.checkpoint", "torch.distributed.fsdp",
            "torch.distributed.optim",
            "torch.distributed.tensor.parallel", "vckpt", "vckpt.dcp", "gloo_pool"]


@contextlib.contextmanager
def environment(**changes):
    """This process's, for what starts within."""
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def forkserver():
    """The context of processes that are forked from one with torch."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    preload = os.environ.get("VCKPT_PRELOAD")       # a sanitizer's run time has to come first there, too
    with environment(OMP_NUM_THREADS="1", **({"LD_PRELOAD": preload} if preload else {})):
        multiprocessing.forkserver.ensure_running()
    return context


def _program(text, arguments, environment, output, errors):
    """What `python -c TEXT` does, from its begin to its end."""
    os.environ.clear()
    os.environ.update(environment)
    for number, path in (1, output), (2, errors):
        with open(path, "wb") as file:
            os.dup2(file.fileno(), number)
    sys.argv, status = ["-c", *arguments], 0
    try:
        exec(compile(text, "<program>", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        status = end.code or 0
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)            # gloo's threads abort a process whose interpreter ends while they let go of a tensor


def programs(text, *environments, arguments=(), patience=120):
    """[(exit status, standard output, standard error)] of a process for each environment, all at once."""
    context, running = forkserver(), []
    with tempfile.TemporaryDirectory(prefix="vckpt-programs-") as folder:
        said = [[pathlib.Path(folder, f"{number}.{name}") for name in ("out", "err")]
                for number in range(len(environments))]
        try:
            for environment, files in zip(environments, said):
                running.append(context.Process(target=_program, args=(text, arguments, environment, *files)))
                running[-1].start()
            for process in running:
                process.join(patience)
        finally:
            for process in running:
                process.kill()
                process.join()
        return [(process.exitcode, *(file.read_text() for file in files)) for process, files in zip(running, said)]


def _rank(rank, world, folder, pipe):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), XDG_CACHE_HOME=f"{folder}/cache")
    import numpy
    import torch
    import torch.distributed as dist

    import vckpt.native
    from saverlib import SMALL_RING
    torch.set_num_threads(1)
    vckpt.native.OPTIONS["ring_bytes"] = SMALL_RING
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    while True:
        job = pipe.recv()
        if job is None:
            break
        function, arguments, seed = job
        random.seed(seed), numpy.random.seed(seed), torch.manual_seed(seed)
        try:
            pipe.send((True, function(*arguments)))
        except BaseException as error:              # the test's answer, whatever it is
            pipe.send((False, (type(error).__name__, str(error), traceback.format_exc())))
    dist.destroy_process_group()


class Pool:
    def __init__(self, world):
        self.world, self.pipes, self.ranks = world, [], []

    def start(self):
        context = forkserver()
        self.folder = tempfile.mkdtemp(prefix="vckpt-gloo-")    # a port that is free now may be another's in a second
        for rank in range(self.world):
            here, there = context.Pipe()
            # no daemon: it may have children
            process = context.Process(target=_rank, args=(rank, self.world, self.folder, there))
            process.start()
            there.close()
            self.pipes.append(here)
            self.ranks.append(process)

    def ask(self, function, *arguments):
        """[(True, result) or (False, (class, text, trace))] of the ranks; ("died", "", "") of one that is killed."""
        if not self.ranks:
            self.start()
        answers, seed = [], random.getrandbits(32)  # of this test, and not of what the ranks did before
        try:
            for pipe in self.pipes:
                pipe.send((function, arguments, seed))
            for rank, pipe in enumerate(self.pipes):
                if not pipe.poll(PATIENCE):
                    raise AssertionError(f"rank {rank} does not answer in {PATIENCE} s; others: {answers}")
                try:
                    answers.append(pipe.recv())
                except EOFError:
                    answers.append((False, ("died", "", "")))
        except BaseException:
            self.close(patience_s=0)                # the next test has new ranks
            raise
        if any(said[0] == "died" for good, said in answers if not good):
            self.close(patience_s=0)
        return answers

    def __call__(self, function, *arguments):
        answers = self.ask(function, *arguments)
        failed = [f"rank {rank}: {said[0]}: {said[1]}" for rank, (good, said) in enumerate(answers) if not good]
        if failed:
            first = next(said for good, said in answers if not good)
            pytest.fail("\n".join([failed[0], first[2], *(text.split("\n")[0] for text in failed[1:])]), pytrace=False)
        return [result for _, result in answers]

    def close(self, patience_s=20):
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self.ranks:
            process.join(patience_s)
            if process.is_alive():
                process.kill()
                process.join()
        if self.ranks:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.pipes, self.ranks = [], []
