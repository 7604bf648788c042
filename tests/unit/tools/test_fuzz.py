# SPDX-License-Identifier: Apache-2.0
"""tests/fuzz and tools/fuzz: each decoder of a record has a target, each target a corpus, the corpora are what
make_corpus.py writes, and the command that runs libFuzzer says what was found."""
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]
FUZZ = ROOT / "tests/fuzz"
TARGETS = {path.stem.removeprefix("fuzz_") for path in FUZZ.glob("fuzz_*.c")}


def test_every_record_has_a_target():
    decoders = {name for header in sorted((ROOT / "proto").glob("*.h"))
                for name in re.findall(r"^int proto_(\w+)_decode\(", header.read_text(), re.M)}
    assert len(decoders) >= 12 and not decoders - TARGETS


def test_every_target_is_built_and_has_a_corpus():
    listed = re.search(r"fuzz_targets = \[(.*?)\]", (ROOT / "tests/meson.build").read_text(), re.S)[1]
    assert set(re.findall(r"'(\w+)'", listed)) == TARGETS
    assert {path.name for path in (FUZZ / "corpus").iterdir() if any(path.iterdir())} == TARGETS


def test_the_corpora_are_what_the_program_writes(build, tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("make_corpus", FUZZ / "make_corpus.py")
    make = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make)
    monkeypatch.setattr(make, "OUT", tmp_path)
    make.main(build)
    made = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert len(made) > 60
    assert not [str(name) for name, data in made.items() if (FUZZ / "corpus" / name).read_bytes() != data]


# ---- tools/fuzz, with programs in the place of meson, ninja and the targets ----

GOOD = r"""#!/bin/sh
echo "$@" > arguments
printf '#2\tINITED cov: 12 ft: 13 corp: 1/1b exec/s: 0 rss: 30Mb\n' >&2
printf '#900\tDONE   cov: 34 ft: 56 corp: 7/90b lim: 4096 exec/s: 450 rss: 31Mb\n' >&2
printf 'stat::number_of_executed_units: 900\nstat::average_exec_per_sec:     450\n' >&2
printf 'stat::peak_rss_mb:              31\n' >&2
"""
BAD = r"""#!/bin/sh
echo '==7==ERROR: AddressSanitizer: heap-buffer-overflow on address 0x1' >&2
echo "artifact_prefix='build/fuzz-found/bad-'; Test unit written to build/fuzz-found/bad-crash-0123" >&2
exit 77
"""
MESON = '#!/bin/sh\nmkdir -p "$2/tests"\ntouch "$2/build.ninja"\n'
NINJA = '#!/bin/sh\ncp good "$2/tests/fuzz_good"\ncp bad "$2/tests/fuzz_bad"\n'


@pytest.fixture
def fuzz(tmp_path):
    """Calls tools/fuzz in a tree that has the targets `good` and `bad`."""
    def put(name, text):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    for name, text in (("good", GOOD), ("bad", BAD), ("bin/meson", MESON), ("bin/ninja", NINJA)):
        put(name, text)
    put("tools/packages", "PACKAGES_BUILD= PACKAGES_FUZZ=\npackages_install() { :; }\n")
    shutil.copy(ROOT / "tools/fuzz", tmp_path / "tools")
    for name in "good", "bad":
        put(f"tests/fuzz/fuzz_{name}.c", "")
        put(f"tests/fuzz/corpus/{name}/one", "x")

    def call(*arguments):
        return subprocess.run([tmp_path / "tools/fuzz", *arguments], capture_output=True, text=True, timeout=60,
                              env={**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "VCKPT_SEED": "5"})
    return call


def test_a_row_says_what_a_target_reached(fuzz, tmp_path):
    done = fuzz("good", "--runs", "900")
    assert done.returncode == 0, done.stdout + done.stderr
    row = next(line.split() for line in done.stdout.splitlines() if line.startswith("good"))
    assert row == ["good", "900", "450", "34", "56", "7", "31", "none"]
    arguments = (tmp_path / "arguments").read_text().split()
    assert {"-seed=5", "-runs=900"} < set(arguments) and not any("max_total_time" in a for a in arguments)
    assert arguments[-2:] == ["build/fuzz-corpus/good", "tests/fuzz/corpus/good"]


def test_a_finding_is_named_and_fails_the_command(fuzz, tmp_path):
    done = fuzz("--jobs", "1")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FOUND" in done.stdout and "none" in done.stdout
    assert "bad: ==7==ERROR: AddressSanitizer: heap-buffer-overflow" in done.stdout
    assert "again: build/fuzz/tests/fuzz_bad build/fuzz-found/bad-crash-0123" in done.stdout
    assert "-max_total_time=60" in (tmp_path / "arguments").read_text()


@pytest.mark.parametrize("arguments", [["ugly"], ["--runs"], ["--seconds", "ten"], ["--fast"]])
def test_what_it_does_not_know_it_refuses(fuzz, arguments):
    done = fuzz(*arguments)
    assert done.returncode == 2 and done.stderr and not done.stdout


@pytest.mark.full
def test_with_clang():
    """It builds the targets, which takes some minutes the first time."""
    if not shutil.which("clang") or not list(pathlib.Path("/usr/lib").glob("llvm-*/lib/clang/*/lib/*/*fuzzer*.a")):
        pytest.skip("clang or its libFuzzer is not installed (apt-get install clang libclang-rt-14-dev)")
    done = subprocess.run([ROOT / "tools/fuzz", "--no-install", "--runs", "2000", "base", "record"], text=True,
                          capture_output=True, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.split()[-1:] == ["none"]]
    assert {row[0] for row in rows} == {"base", "record"} and all(int(row[1]) >= 2000 for row in rows)
