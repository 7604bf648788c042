# SPDX-License-Identifier: Apache-2.0
"""vckpt rm and gc: what they say is what they did."""
import os
import subprocess

import numpy
from safetensors.numpy import save_file

from ranklib import api  # noqa: F401
from storelib import Attempt, save
from terminal import open_terminal, written


def test_gc_says_what_it_marks_and_when_it_deletes(vckpt, store, tmp_path):
    for step in range(2):
        save_file({"a": numpy.full(4000, step, "f4")}, tmp_path / "m.safetensors")
        vckpt("import", store, "run", tmp_path / "m.safetensors")
    vckpt("rm", store, "run/0")
    marked = vckpt.json("gc", store, "-n")["marked"]
    assert marked > 0
    first = vckpt("gc", store).stdout.splitlines()
    assert len(first) == marked + 1 and all(line.startswith("mark ") for line in first[:-1])
    assert first[-1].startswith(f"0 files deleted, 0 B; {marked} files marked") and "--grace" in first[-1]
    assert f"; {marked} files, " in vckpt("gc", store).stdout.splitlines()[-1]      # now they wait
    last = vckpt("gc", store, "--grace", "0").stdout.splitlines()[-1]
    assert last.startswith(f"{marked} files deleted, ") and "marked" not in last
    assert vckpt("verify", store).returncode == 0
    assert [s["step"] for s in vckpt.json("ls", store, "run")["steps"]] == [1]


def removed(vckpt, store, tmp_path):
    for step in range(3):
        save_file({"a": numpy.full(4000, step, "f4")}, tmp_path / "m.safetensors")
        vckpt("import", store, "run", tmp_path / "m.safetensors")
    vckpt("rm", store, "run/0", "run/1")


def test_gc_says_first_what_it_frees_and_when(vckpt, store, tmp_path):
    """As a table with -n and on a terminal, as members of the JSON document; and that is what it does."""
    removed(vckpt, store, tmp_path)
    would = vckpt.json("gc", store, "-n")
    assert would["reasons"] == vckpt.json("gc", store)["reasons"]
    now, later = ([r for r in would["reasons"] if (r["after_s"] == 0) == is_now] for is_now in (True, False))
    assert sum(r["bytes"] for r in now) == would["deleted_bytes"] == 0
    assert sum(r["bytes"] for r in later) == would["marked_bytes"] > 0 and {r["after_s"] for r in later} == {86400}
    assert {(r["action"], r["why"]) for r in later} == {("mark", "no visible step needs it"),
                                                       ("mark", "no visible step names it")}
    waits = vckpt.json("gc", store, "-n")
    assert {r["action"] for r in waits["reasons"]} == {"keep"}
    assert all(86000 < r["after_s"] <= 86400 for r in waits["reasons"])
    assert sum(r["bytes"] for r in waits["reasons"]) == waits["waiting_bytes"] == would["marked_bytes"]
    lines = vckpt("gc", store, "-n", "--grace", "0").stdout.splitlines()
    assert lines[0].split() == ["AFTER", "FILES", "SIZE", "WHY"] and lines[1].startswith("now ")
    total = next(line for line in lines if " by a later vckpt gc" in line)
    assert total.endswith(" now, 0 B by a later vckpt gc") and not total.startswith("0 B")
    deleted = vckpt.json("gc", store, "--grace", "0")
    assert deleted["deleted_bytes"] == would["marked_bytes"]
    assert vckpt("gc", store, "-n").stdout.startswith("there is nothing to free\n")


def test_gc_says_it_on_a_terminal_before_it_begins(vckpt, store, tmp_path):
    removed(vckpt, store, tmp_path)
    ours, theirs = open_terminal()
    subprocess.run([vckpt.path, "gc", str(store), "--grace", "0"], stdout=theirs, stderr=theirs, timeout=60, check=True)
    os.close(theirs)
    said = written(ours)
    os.close(ours)
    assert said.startswith("AFTER") and said.index("by a later vckpt gc") < said.index("\ndelete ")
    assert "AFTER" not in vckpt("gc", store).stdout


def test_a_note_of_damage_goes_with_its_pack(vckpt, store, tmp_path):
    """And counts, in what a removal frees and in what was deleted."""
    removed(vckpt, store, tmp_path)
    vckpt("gc", store, "--grace", "0")
    pack = max((store / "packs").rglob("*.pack"), key=lambda path: path.stat().st_size)
    with open(pack, "r+b") as file:
        file.seek(4200)
        file.write(b"\xff\xfe\xfd")
    assert vckpt("verify", store, check=False).returncode == 3
    note = store / "damaged" / pack.stem
    assert note.stat().st_size > 0
    freed = vckpt.json("rm", store, "run", "-n", "-y")["freed_bytes"]
    assert freed == vckpt.json("du", store)["stored_bytes"]
    vckpt("rm", store, "run", "-y")
    assert vckpt.json("gc", store, "--grace", "0")["deleted_bytes"] == freed
    assert not note.exists()


def test_a_save_under_way_keeps_its_base(api, vckpt):  # noqa: F811
    """What it may refer to is not freed by a removal, as the collector keeps it, until it has ended."""
    base, _ = save(api, "r", 1), save(api, "r", 2)
    alone = vckpt.json("rm", api.path, "r", "-y", "-n")["freed_bytes"]
    attempt = Attempt(api, "r", 3)
    attempt.base("r", base.entry, base.manifest)
    freed = vckpt.json("rm", api.path, "r", "-y", "-n")["freed_bytes"]
    sizes = [step["unique_bytes"] for step in vckpt.json("du", api.path, "r")["steps"]]
    assert sizes[0] == 0 and sizes[1] == freed > 0 and alone > freed
    api.remove_step("r", 1)
    api.remove_step("r", 2)
    assert vckpt.json("du", api.path)["spare_bytes"] == freed == vckpt.json("gc", api.path, "-n")["marked_bytes"]
    attempt.free()
    assert vckpt.json("du", api.path)["spare_bytes"] == alone
