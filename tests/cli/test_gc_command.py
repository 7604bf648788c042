# SPDX-License-Identifier: Apache-2.0
"""vckpt rm and gc: what they say is what they did."""
import numpy
from safetensors.numpy import save_file


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
