# SPDX-License-Identifier: Apache-2.0
"""tests/fuzz: each decoder of a record has a target, each target a corpus, and the corpora are what make_corpus.py
writes."""
import importlib.util
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[2]
FUZZ = ROOT / "tests/fuzz"
TARGETS = {path.stem.removeprefix("fuzz_") for path in FUZZ.glob("fuzz_*.c")}


def test_every_record_has_a_target():
    decoders = {name for header in sorted((ROOT / "proto").glob("*.h"))
                for name in re.findall(r"^int proto_(\w+)_decode\(", header.read_text(), re.M)}
    assert len(decoders) >= 12 and not decoders - TARGETS


def test_every_target_is_built_and_has_a_corpus():
    listed = re.search(r"fuzz_targets = \[(.*?)\]", (ROOT / "tests/meson.build").read_text(), re.S)[1]
    assert set(re.findall(r"'(\w+)'", listed)) | {"import_manifest"} == TARGETS
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
