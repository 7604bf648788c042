# SPDX-License-Identifier: Apache-2.0
"""MPI as a transport, for real: ranks that Open MPI's and MPICH's launchers start on this machine; and what is said
where there is no MPI that can be used."""
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

import commrank
from saverlib import api, store  # noqa: F401 (fixtures)
from test_api_load import save

RANK = pathlib.Path(__file__).resolve().parents[1] / "commrank.py"
LAUNCHERS = {"openmpi": ["mpirun.openmpi", "--oversubscribe", "--allow-run-as-root", "--quiet"],
             "mpich": ["mpiexec.mpich"]}
FUNNELED, SERIALIZED, MULTIPLE = 1, 2, 3
EINVAL, ENOENT = 22, 2


class Ranks:
    """Of an MPI job, or one process by itself; what they do are the parts of commrank.py."""

    def __init__(self, kind, build, folder, seed):
        self.kind, self.build, self.folder, self.seed = kind, build, folder, seed
        if kind and not shutil.which(LAUNCHERS[kind][0]):
            pytest.skip(f"{LAUNCHERS[kind][0]} is not installed")

    def __call__(self, part, *args, ranks=4, env=None):
        """(the exit status, the output)"""
        own = {"LD_PRELOAD": os.environ["VCKPT_PRELOAD"]} if os.environ.get("VCKPT_PRELOAD") else {}
        words = [f"{name}={value}" for name, value in dict(own, **env or {}).items()]
        launcher = [*LAUNCHERS[self.kind], "-n", str(ranks)] if self.kind else []
        command = [*launcher, "env", *words, sys.executable, str(RANK), str(self.build), str(self.folder),
                   str(self.seed), part, *args]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240)
        return done.returncode, done.stdout

    def said(self, part):
        return {int(file.suffix[1:]): file.read_text() for file in self.folder.glob(f"{part}.*")}

    def sentence(self, *args, ranks=1, env=None):
        """(errno, text), the same at all ranks"""
        output = self("sentence", *args, ranks=ranks, env=env)[1]
        said = list(self.said("sentence").values())
        assert len(said) == ranks and len(set(said)) == 1, output
        code, text = said[0].split(" ", 1)
        return int(code), text


# What is the same code for both: Open MPI's ranks by default, MPICH's with --full.
MPICH_FULL = pytest.mark.parametrize("job", ["openmpi", pytest.param("mpich", marks=pytest.mark.full)], indirect=True)


@pytest.fixture(params=LAUNCHERS)
def job(request, build, tmp_path, seed):
    return Ranks(request.param, build, tmp_path, seed)


@pytest.fixture
def alone(build, tmp_path, seed):
    return Ranks(None, build, tmp_path, seed)


def test_gathers_and_passes(job):
    """And MPI, which was initialised for it, is finalised: else the launcher would complain."""
    code, output = job("exchange")
    assert code == 0 and len(job.said("exchange")) == 4, output


def test_every_failure_is_told(job):
    output = job("faults")[1]
    assert [len(job.said(part)) for part in ("order", "gives_up", "silent")] == [4, 4, 4], output


def test_the_programs_own_mpi(job):
    """It is found though it was loaded for the program alone; the ranks are those of the communicator given."""
    level = SERIALIZED if job.kind == "openmpi" else MULTIPLE
    code, output = job("program", job.kind, str(level), ranks=3)
    assert code == 0 and len(job.said("program")) == 3, output


@MPICH_FULL
def test_a_load(job, build, api, store, seed):  # noqa: F811
    arrays = commrank.arrays_of(seed)
    save(api, store, arrays)
    code, output = job("load", str(build), str(store), ranks=3)
    read = [int(text) for text in job.said("load").values()]
    assert code == 0 and len(read) == 3, output
    assert all(read) and sum(read) < 1.1 * sum(array.nbytes for array in arrays.values())


@MPICH_FULL
def test_a_rank_that_dies_ends_the_job(job):
    """The launcher does that, and nobody hangs."""
    code, output = job("dies")
    assert code != 0 and len(job.said("lives")) == 4, output


@MPICH_FULL
def test_mpi_for_the_main_thread_alone_is_refused(job):
    code, text = job.sentence("asked", job.kind, str(FUNNELED))
    assert code == EINVAL and "MPI_THREAD_SERIALIZED" in text


@MPICH_FULL
def test_mpi_is_not_initialised_unasked(job):
    library = "libmpi.so.40" if job.kind == "openmpi" else "libmpich.so.12"
    code, text = job.sentence("", env={"VCKPT_LIBMPI": library})
    assert code == EINVAL and library in text and "call MPI_Init_thread before" in text


def test_a_library_that_is_not_the_launchers(build, tmp_path, seed):
    job = Ranks("mpich", build, tmp_path, seed)
    code, text = job.sentence("init", ranks=2, env={"VCKPT_LIBMPI": "libmpi.so.40"})
    assert code == EINVAL and "the launcher started 2 processes, but the MPI library" in text


def test_no_mpi_in_the_process(alone):
    code, text = alone.sentence("")
    assert (code, text) == (ENOENT, "no MPI library is loaded in this process: call MPI_Init_thread before, or let "
                            "vckpt load and initialise MPI (VCKPT_MPI_INIT)")


@pytest.mark.parametrize("name, code, text", [
    ("libno-such-mpi.so", ENOENT, "no MPI library: libno-such-mpi.so: cannot open"),
    ("{build}/tests/standin/libcuda.so.1", ENOENT, "is no MPI library: it has no MPI_Initialized"),
    ("{build}/tests/standin/libmpi_old.so", ENOENT, "has no MPI_Comm_idup: one that implements MPI 3.0"),
    ("{build}/tests/standin/libmpi_other.so", ENOENT, "neither Open MPI nor of MPICH's family (it says: Other MPI 1)"),
])
def test_a_library_that_cannot_be_used(alone, build, name, code, text):
    got, said = alone.sentence("init", env={"VCKPT_LIBMPI": name.format(build=build)})
    assert got == code and text in said
