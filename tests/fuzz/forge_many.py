#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Forges many stores (forge.py), has each read in every way (forge_look.py), and counts what became of them:

    forge_many.py --stores 5000 --seed 7 --sanitize

Run it by build/test-env/bin/python, which tools/test makes. --sanitize reads by build/sanitize, a build with
AddressSanitizer and UndefinedBehaviorSanitizer (tools/test --sanitize makes it); else build/test is taken, or what
--build or VCKPT_BUILD names. --lines, with a build that has -Db_coverage=true, tells which lines of the library were
reached. Exit status: 1 if anything is not as it must be.

test_forge.py does the same with few stores. Seeds are numbers of stores: --seed 7 --stores 3 makes those of 7, 8, 9."""
import argparse
import collections
import json
import os
import pathlib
import re
import select
import shutil
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
if __name__ == "__main__":
    # as tests/pytest.ini has it, also for the processes that read
    FOLDERS = [str(ROOT / "tools/python"), *(str(HERE.parent / name) for name in ("unit", "golden", "fuzz"))]
    sys.path[:0] = FOLDERS
    os.environ["PYTHONPATH"] = os.pathsep.join([*FOLDERS, os.environ.get("PYTHONPATH", "")])

import forge  # noqa: E402

GOLDEN = HERE.parent / "golden/v2/store.tar.xz"
CHAINED = HERE.parent / "golden/v2-list-2/store.tar.xz"
SHAPES = {"files": ("golden", ["a", "b"]), "ranks": ("golden", ["d"]), "snapshot": ("golden", ["c"]),
          "wide": ("wide", ["r"]), "many": ("many", ["m"]), "named": ("named", ["n"]),
          "dcp": ("dcp", ["default"]), "chains": ("chained", ["long"])}
# Mostly of those that have most and are small.
TURNS = ["files", "ranks", "dcp", "wide", "files", "ranks", "dcp", "many", "dcp", "snapshot", "named", "chains"]
LINE_S = 300                # the longest that a store may take, whatever is in it

# What is known and not mended yet: (what the forged store says or the finding has, why). Each is for one cause.
KNOWN = []


def has_torch():
    try:
        import importlib.util
        return sys.modules.get("torch", True) is not None and importlib.util.find_spec("torch") is not None
    except ValueError:
        return False


def make_bases(program, folder):
    """{shape: {name, path, runs}}. The golden store has most: files of many dtypes, encoded, inline and shared pieces,
    blobs, two ranks with boxes, flat ranges and replicas, a snapshot. It is the same everywhere, and so is what a seed
    makes of it; the others are made here, that of torch's distributed checkpoint only where torch is."""
    shutil.unpack_archive(GOLDEN, folder)
    (folder / "store").rename(folder / "golden")
    shutil.unpack_archive(CHAINED, folder)
    (folder / "store").rename(folder / "chained")
    forge.make(program, folder)
    if has_torch():
        subprocess.run([sys.executable, HERE / "forge_dcp.py", "make", folder / "dcp"], check=True, env=environment(),
                       stdout=subprocess.DEVNULL, timeout=300)
    return {shape: {"name": shape, "path": str(folder / store), "runs": runs}
            for shape, (store, runs) in SHAPES.items() if (folder / store).exists()}


def environment():
    words = dict(os.environ)
    if words.get("VCKPT_PRELOAD"):
        words["LD_PRELOAD"] = words["VCKPT_PRELOAD"]
        # what malloc refuses is no fault; memory is bounded here, because addresses cannot be
        words["ASAN_OPTIONS"] = f"{words.get('ASAN_OPTIONS', '')}:allocator_may_return_null=1:hard_rss_limit_mb=3000"
    return words


def cases(bases, first, count):
    turns = [shape for shape in TURNS if shape in bases]
    return [[turns[seed % len(turns)], seed] for seed in range(first, first + count)]


class Batch:
    """Runs the cases of a plan in processes of forge_look.py: one after another, a new one after each that died."""

    def __init__(self, build, bases, folder, thorough, told=None):
        """told: called with each result."""
        import numpy as np
        np.save(folder / "x.npy", np.arange(100))
        (folder / "layout").write_text("* R\n")
        self.build, self.folder, self.results, self.told = build, folder, [], told or (lambda result: None)
        mount = build / "fs/mount.vckpt" if os.path.exists("/dev/fuse") else ""
        self.plan = {"vckpt": str(build / "tools/vckpt/vckpt"), "mount": str(mount), "layout": str(folder / "layout"),
                     "array": str(folder / "x.npy"), "sanitized": bool(os.environ.get("VCKPT_PRELOAD")),
                     "thorough": thorough, "dcp": "dcp" in bases,
                     "scratch": str(folder / "scratch"), "bases": bases}

    def run(self, cases, limit_s=1 << 30):
        cases, end = list(cases), time.monotonic() + limit_s
        while cases and time.monotonic() < end:
            plan = self.folder / "plan.json"
            plan.write_text(json.dumps({**self.plan, "cases": cases, "end": end}))
            with open(self.folder / "stderr", "wb") as err:
                process = subprocess.Popen([sys.executable, HERE / "forge_look.py", plan], stdout=subprocess.PIPE,
                                           stderr=err, env={**environment(), "VCKPT_BUILD": str(self.build)})
            begun, done = self.lines(process, end + LINE_S)
            cases = cases[done:]
            said = (self.folder / "stderr").read_text(errors="replace")
            if begun is None:                       # all that it began was done
                assert not cases or done or time.monotonic() > end, said
                self.clean(said)
            else:
                self.add({**begun, "told": [], "found": [f"the reading process ended: {process.returncode}: "
                                                         f"{said[-4000:]}"]})
                cases = cases[1:]

    def lines(self, process, end):
        """Takes its lines until it ends, or is made to: (the case that it was at, or None; how many it finished)"""
        begun, done, rest = None, 0, b""
        with process:
            while True:
                wait = min(LINE_S, end - time.monotonic())
                data = b""
                if wait > 0 and select.select([process.stdout], [], [], wait)[0]:
                    data = os.read(process.stdout.fileno(), 1 << 20)
                if not data:
                    process.terminate()
                    return begun, done
                *whole, rest = (rest + data).split(b"\n")
                for line in map(json.loads, filter(lambda line: line.startswith(b"{"), whole)):
                    begun = None if "found" in line else line
                    if "found" in line:
                        done += 1
                        self.add(line)

    def add(self, result):
        self.results.append(result)
        self.told(result)

    def clean(self, said):
        if self.results and ("runtime error:" in said or "Sanitizer" in said):
            self.results[-1]["found"].append(said[-4000:])

    def wrong(self):
        return [text for result in self.results for text in wrong(result, self.plan["bases"])]


def wrong(result, bases):
    """What is found and not known, in words that repeat it."""
    base, told = bases[result["base"]], result["told"]
    return [f"{result['base']} {result['seed']}: tests/fuzz/forge.py {base['path']} OUT "
            f"--runs {' '.join(base['runs'])} --seed {result['seed']} --show\n  {told}\n  {what}"
            for what in result["found"]
            if not any(re.search(pattern, f"{told} {what}") for pattern, _ in KNOWN)]


# ---- numbers ----

def summary(results):
    """What became of the stores, in lines."""
    def total(key):
        return sum(r.get(key, 0) for r in results)

    def most(key):
        return max((tuple(r[key]) for r in results if key in r), default=(0, ""))
    became = collections.Counter("disagreed" if r["found"] else r["outcome"] for r in results)
    seconds = [sum(r["seconds"][i] for r in results if "seconds" in r) for i in range(5)]
    slow = max(results, key=lambda r: r.get("whole_s", 0))
    yield (f"{len(results)} stores: {became['read']} read, {became['read in part']} read in part, {became['refused']} "
           f"refused, {became['disagreed']} with findings; {sum(r.get('verified') == 0 for r in results)} sound to "
           "verify")
    yield f"{total('commands')} commands, {total('tensors')} tensors and blobs, {total('entries')} byte entries"
    yield "seconds: " + ", ".join(f"{word} {s:.1f}" for word, s in zip(
        ["forging", "commands", "mount", "package", "torch"], seconds)) + f", all {total('whole_s'):.1f}"
    yield f"slowest store: {slow.get('whole_s')} s, {slow['base']} {slow['seed']} {slow['told']}"
    yield "slowest command: {} s, {}".format(*most("slowest"))
    yield (f"most memory: {most('mb')[0]} MB in {most('mb')[1]}; {max(r.get('own_mb', 0) for r in results)} MB in the "
           f"process that forges and reads by the package, {max(r.get('torch_mb', 0) for r in results)} MB with torch")


def lines(build):
    """{folder: (lines reached, lines)} of the library and programs, after what a build with -Db_coverage=true ran."""
    seen = collections.defaultdict(dict)
    for notes in sorted(build.rglob("*.gcno")):
        if "tests" in notes.relative_to(build).parts or not notes.with_suffix(".gcda").exists():
            continue
        out = subprocess.run(["gcov", "--json-format", "--stdout", notes], cwd=build, capture_output=True, check=True)
        for report in filter(None, out.stdout.splitlines()):
            for file in json.loads(report)["files"]:
                path = os.path.relpath(os.path.join(build, file["file"]), ROOT)
                for line in file["lines"]:
                    of = seen[path]
                    of[line["line_number"]] = of.get(line["line_number"], 0) + line["count"]
    found = collections.defaultdict(lambda: [0, 0])
    for path, counts in seen.items():
        if path.endswith(".c") and not path.startswith(("..", "build", "tests")):
            folder = found[os.path.dirname(path)]
            folder[0] += sum(count > 0 for count in counts.values())
            folder[1] += len(counts)
    return dict(sorted(found.items()))


# ---- the command line ----

def sanitized():
    """As tools/test has it."""
    def file(name):
        return subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True,
                              check=True).stdout.strip()
    os.environ["VCKPT_PRELOAD"] = f"{file('libasan.so')} {file('libubsan.so')}"
    os.environ["ASAN_OPTIONS"] = ("detect_leaks=0:quarantine_size_mb=32:thread_local_quarantine_size_kb=64:"
                                  "abort_on_error=1:verify_asan_link_order=0")
    os.environ["UBSAN_OPTIONS"] = "halt_on_error=1:print_stacktrace=1"


def words_of_user():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0].rstrip(":"))
    parser.add_argument("--stores", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1, help="of the first store")
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no store after so many")
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=list(SHAPES), help="only these to begin with")
    parser.add_argument("--build", type=pathlib.Path, help="default: VCKPT_BUILD, build/test")
    parser.add_argument("--sanitize", action="store_true", help="build/sanitize, under its sanitizers")
    parser.add_argument("--quick", action="store_true", help="without the commands that wait for heartbeats")
    parser.add_argument("--lines", action="store_true", help="at the end: the lines that were reached, by folder")
    words = parser.parse_args()
    default = ROOT / "build/sanitize" if words.sanitize else os.environ.get("VCKPT_BUILD", ROOT / "build/test")
    words.build = pathlib.Path(words.build or default).resolve()
    if not (words.build / "tools/vckpt/vckpt").exists():
        parser.error(f"{words.build} has no tools/vckpt/vckpt: build it first (tools/test does), or name another by "
                     "--build")
    return words


def progress(words, bases):
    start, results = time.monotonic(), []

    def told(result):
        results.append(result)
        for text in wrong(result, bases):
            print(text, flush=True)
        if len(results) % 25 == 0:
            s = time.monotonic() - start
            print(f"{len(results)} of {words.stores} stores, {s:.0f} s, {s / len(results):.2f} s each, "
                  f"{sum(bool(r['found']) for r in results)} with findings", flush=True)
    return told


def main():
    words = words_of_user()
    if words.sanitize:
        sanitized()
    os.environ["VCKPT_BUILD"] = str(words.build)
    with tempfile.TemporaryDirectory(prefix="vckpt-forge-") as name:
        folder = pathlib.Path(name)
        os.environ["XDG_CACHE_HOME"] = name             # indexes of these stores are not the user's
        bases = {shape: base for shape, base in make_bases(words.build / "tools/vckpt/vckpt", folder).items()
                 if shape in words.shapes}
        batch = Batch(words.build, bases, folder, not words.quick, progress(words, bases))
        batch.run(cases(bases, words.seed, words.stores), words.minutes * 60)
        found = batch.wrong()
        if batch.results:
            print("\n".join(summary(batch.results)))
    if words.lines:
        for folder, (reached, count) in lines(words.build).items():
            print(f"{folder}: {reached} of {count} lines, {100 * reached / count:.1f} %")
    sys.exit(bool(found) or not batch.results)


if __name__ == "__main__":
    main()
