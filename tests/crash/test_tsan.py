# SPDX-License-Identifier: Apache-2.0
"""The pipeline and the commit under ThreadSanitizer: ranks as threads of one program, saves that go well and saves that
fail. Builds what it needs below the build directory, once (about a minute)."""
import fcntl
import os
import pathlib
import platform
import shutil
import subprocess

import pytest

from crashlib import next_step

ROOT = pathlib.Path(__file__).resolve().parents[2]
CLEAN, FOUND = 0, 66

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def tsan(build):
    """The directory of programs built with -Db_sanitize=thread."""
    if not shutil.which("meson"):
        pytest.skip("no meson")
    at = build / "tsan"
    # several processes of pytest share the module: two builds at once spoil each other
    with open(build / "tsan.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (at / "build.ninja").exists():
            subprocess.run(["meson", "setup", at, ROOT, "-Db_sanitize=thread", "-Db_lundef=false",
                            "-Dbuildtype=debugoptimized"], check=True,
                           capture_output=True, timeout=300)
        done = subprocess.run(["meson", "compile", "-C", at, "rank_saver", "rank_protocol"], capture_output=True,
                              text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:]
    return at / "tests"


def ranks(tsan, store, driver, id_, *options, saves=3, spoil=None, build=None):
    """The program's output; fails where the sanitizer said something."""
    env = dict(os.environ, TSAN_OPTIONS=f"exitcode={FOUND}:halt_on_error=0")
    if spoil:
        env |= {"LD_PRELOAD": str(build / "tests/libinterpose.so"),
                "VCKPT_INTERPOSE": f"root={store.resolve()},{spoil}"}
    # it knows no addresses of 32 random bits
    fixed = ["setarch", platform.machine(), "-R"] if shutil.which("setarch") else []
    done = subprocess.run([*fixed, tsan / driver, store, "r", id_, "0", "4", str(saves), "threads=1", "workers=3",
                           "start_ms=4000", f"step={next_step(tsan.parents[1], store)}",
                           *options], env=env,
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == CLEAN and "ThreadSanitizer" not in done.stderr, (done.returncode, done.stderr[:6000])
    return done.stdout


@pytest.mark.parametrize("driver", ["rank_protocol", "rank_saver"])
@pytest.mark.parametrize("size", [3000, 32000])
def test_small_saves(tsan, store, driver, size):
    assert ranks(tsan, store, driver, "one", f"bytes={size}", saves=6).count("saved") == 24
    assert ranks(tsan, store, driver, "two", f"bytes={size}", saves=2).count("saved") == 8


def test_large_saves(tsan, store, vckpt):
    """Many pieces, several threads a rank, bands that wait for room."""
    assert ranks(tsan, store, "rank_saver", "one", "bytes=5000000").count("saved") == 12
    assert ranks(tsan, store, "rank_saver", "two", "bytes=5000000", saves=1).count("saved") == 4
    vckpt("verify", store)


@pytest.mark.parametrize("at", [25, 40, 55, 70, 90, 120])
def test_saves_that_fail(tsan, store, build, vckpt, at):
    ranks(tsan, store, "rank_saver", "one", spoil=f"do=fail,errno=5,at={at}", build=build)
    assert ranks(tsan, store, "rank_saver", "two", saves=1).count("saved") == 4
    vckpt("verify", store)


@pytest.mark.parametrize("errno", [5, 28])
@pytest.mark.parametrize("at", [40, 70, 120, 300])
def test_saves_that_fail_and_nobody_waits_for(tsan, store, build, vckpt, at, errno):
    """Handles go before, while and after their saves end; one rank's failure is every rank's."""
    ranks(tsan, store, "rank_saver", "one", "drop=1", saves=8, spoil=f"do=fail,errno={errno},at={at}", build=build)
    assert ranks(tsan, store, "rank_saver", "two", saves=1).count("saved") == 4
    vckpt("verify", store)


def test_the_sanitizer_sees(tsan, tmp_path):
    """A race of the test's own."""
    (tmp_path / "race.c").write_text("#include <pthread.h>\nint n;\nstatic void *f(void *a) { n++; return a; }\n"
                                     "int main(void) { pthread_t t; pthread_create(&t, 0, f, 0); n++; pthread_join(t, "
                                     "0); return 0; }\n")
    subprocess.run(["cc", "-fsanitize=thread", "-g", "-o", tmp_path / "race", tmp_path / "race.c", "-lpthread"],
                   check=True)
    done = subprocess.run(["setarch", platform.machine(), "-R", tmp_path / "race"],
                          env=dict(os.environ, TSAN_OPTIONS=f"exitcode={FOUND}"), capture_output=True)
    assert done.returncode == FOUND
