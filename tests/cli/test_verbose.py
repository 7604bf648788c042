# SPDX-License-Identifier: Apache-2.0
"""-v says more where there is more to say, -q nothing but errors, everywhere; JSON is the same with both."""
import re

import numpy as np
import pytest


@pytest.fixture
def source(tmp_path):
    source = tmp_path / "in"
    source.mkdir()
    (source / "config.json").write_text("{}")
    np.save(tmp_path / "w.npy", np.arange(100000, dtype="f4"))
    return [tmp_path / "w.npy", source]


@pytest.mark.parametrize("word", ["-v", "--verbose"])
def test_import(vckpt, store, source, word):
    lines = vckpt("import", store, "run", *source, word).stdout.splitlines()
    assert lines[:2] == [f"{source[0]}: 1 tensor, 391 KiB", f"{source[1]}/config.json: blob, 2 B"]
    assert re.fullmatch(r"run/step-00000000: 1 tensor, 1 blob, 391 KiB; stored \d+ KiB in \d+ new pieces?, 0 "
                        r"known already", lines[2])
    assert lines[3:] == ["shared: 0 pieces with other steps, 0 pieces within this one"]
    known = vckpt.json("import", store, "run", *source, word)["pieces_reused"]
    assert known > 0 and vckpt("import", store, "run", *source,
                               word).stdout.splitlines()[-1].startswith(f"shared: {known} piece")
    assert len(vckpt("import", store, "run", *source).stdout.splitlines()) == 1


def test_verify_and_gc(vckpt, store, source):
    vckpt("import", store, "run", *source)
    packs = sorted(str(p.relative_to(store)) for p in store.glob("packs/*/*.pack"))
    *lines, last = vckpt("verify", store, "-v").stdout.splitlines()
    assert sorted(line.split()[1] for line in lines) == packs and all(re.fullmatch(r"read: packs/\S+ [\d.]+ \w+", line)
                                                                      for line in lines)
    assert (vckpt("verify", store).stdout == last + "\n" and
            re.fullmatch(r"1 step, \d+ files, \d+ objects, [\d.]+ \w+ read: sound", last))
    vckpt("rm", store, "run/0")
    deleted = [line.split()[3].rstrip(":") for line in vckpt("gc", store, "--grace", "0", "-v").stdout.splitlines()
               if line.startswith("delete ")]
    assert set(packs) <= set(deleted)


@pytest.mark.parametrize("word", ["-q", "--quiet"])
def test_quiet(vckpt, tmp_path, source, word):
    store = tmp_path / "s"
    for command in (["init", store], ["import", store, "run", *source], ["import", store, "run", *source, "-v"],
                    ["index", store], ["verify", store], ["verify", store, "-v"],
                    ["mend", store], ["export", store, "run/0", tmp_path / "out"],
                    ["export", store, "run/0", tmp_path / "out", "-v"], ["rm", store, "run/0"],
                    ["gc", store, "--grace", "0"]):
        done = vckpt(*command, word)
        assert (done.stdout, done.stderr) == ("", ""), command
    done = vckpt("rm", store, "run/0", word, check=False)
    assert done.returncode == 1 and done.stderr


@pytest.mark.parametrize("command", "init import ls info cat export verify mend rm gc abort index stalls report mesh "
                         "layout reshard".split())
def test_help_names_both(vckpt, command):
    said = vckpt(command, "--help").stdout
    assert "-q" in said and "-v" in said
