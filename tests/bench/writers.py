#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Saves of 64 to 8,192 writers: requests to the storage a writer, and the time from the last announcement to the
commit.

    tests/bench/run --only writers
    tests/bench/writers.py --build BUILD --dir DIR [--worlds 64,256,1024]      figures as JSON lines

writers.c in this folder plays all ranks in one process and says what is played. Three saves a world: rank 0 comes last,
when all others have announced (the commit finds everything undone); rank 0 waits from the start; and rank 0 last with
every request from the last announcement on taking 1 ms more, as over a network. Use a directory in memory: the disk is
not what is measured.
"""
import argparse
import json
import pathlib
import shutil
import subprocess
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
WORLDS = (64, 256, 1024, 8192)


def save(build, where, world, mode, latency=0, layouts=1):
    """One save in a store of its own: what writers.c prints."""
    path = pathlib.Path(tempfile.mkdtemp(prefix="writers-", dir=where))
    try:
        subprocess.run([build / "tools/vckpt/vckpt", "init", path / "s", "-q"], check=True)
        done = subprocess.run([build / "tests/bench_writers", path / "s", str(world), mode, str(latency), str(layouts)],
                              check=True,
                              capture_output=True, text=True)
        return json.loads(done.stdout)
    finally:
        shutil.rmtree(path)


def requests(counts):
    """Of the storage; appends to a pack go through a buffer and are not counted, nor are heartbeats."""
    return sum(n for kind, n in counts.items() if kind not in ("writer_append", "heartbeats", "listed", "bytes_read"))


def figures(build, where, world):
    last, first = save(build, where, world, "last"), save(build, where, world, "first")
    network = save(build, where, world, "last", 1000)
    return {"world": world,
            "requests_own": (requests(last["launch"]) + requests(last["prepare"])) / world,
            "requests_commit": requests(last["commit"]) / world,
            "requests_told": requests(last["others"]) / world, "commit_last_s": last["commit_s"],
            "commit_first_s": first["commit_s"],
            "commit_network_s": network["commit_s"], "announcements_s": last["announcements_s"],
            "announcement_bytes": last["announcements_bytes"] / world, "make_s": last["make_s"],
            "manifest_bytes": last["manifest_bytes"] / world,
            "packs_s": last["packs_s"], "replicas_s": last["replicas_s"], "cover_s": last["cover_s"],
            "cover_kib": last["cover_kib"],
            "entry_s": last["phases"]["entry"], "folder_s": last["phases"]["folder"], "incoming_s": last["incoming_s"],
            "base_requests": requests(last["base"]), "base_s": last["base_s"], "open_s": last["open_s"],
            "open_network_s": network["open_s"], "open_bytes": last["open_bytes"] / world}


def rows(bench):
    """For tests/bench/run. Bars are ratios of counts: times are told, not judged."""
    done = {world: figures(bench.build, bench.dir, world) for world in WORLDS}
    bench.notes["writers"] = list(done.values())
    for world, f in done.items():
        name = f"{world:,} writers"
        for key, what in (("requests_own", "requests of a writer up to its announcement"),
                          ("requests_commit", "requests of who commits, a writer"),
                          ("requests_told", "requests of a writer to be told"),
                          ("base_requests", "requests of a writer to look a base up")):
            small = done[WORLDS[0]][key]
            bench.figure(f"{name}: {what}", f[key], "", bar=None if world == WORLDS[0] else 1.3 * small)
        for key, what in (("commit_last_s", "last announcement to commit, rank 0 last"),
                          ("commit_first_s", "last announcement to commit, rank 0 first"),
                          ("commit_network_s", "the same, rank 0 last, 1 ms a request"), ("open_s", "step opened"),
                          ("incoming_s", "saves under way listed")):
            bench.figure(f"{name}: {what}", f[key], "s")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build/release")
    parser.add_argument("--dir", default="/dev/shm")
    parser.add_argument("--worlds", default=",".join(map(str, WORLDS)))
    o = parser.parse_args()
    for world in o.worlds.split(","):
        print(json.dumps(figures(o.build, o.dir, int(world))), flush=True)


if __name__ == "__main__":
    main()
