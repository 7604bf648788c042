# SPDX-License-Identifier: Apache-2.0
"""Structs that Python writes down by hand, against what the compiler made of them (DWARF, as readelf prints it): the
size, and each field's place and name. A field that is moved in a header fails here by name, and not in another test by
what it happens to read."""
import collections
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PREFIXES = ("", "base_", "tensor_", "proto_", "index_", "storage_", "pack_", "store_", "commit_", "upkeep_", "device_",
            "query_", "save_", "load_", "diff_", "view_", "foreign_", "vckpt_", "tool_", "check_", "launch_")
# Classes whose struct has another name than theirs. Of those with a `...` only the first fields are written down.
NAMES = {
    "tensorlib.Line": "tensor_reshard_line", "test_grid.Params": "tensor_grid_params",
    "test_grid.Iter": "tensor_piece_iter",
    "storelow.Ref": "pack_object_ref", "protolib.Info": "proto_store", "protolib.Params": "tensor_grid_params",
    "protolib.StoreLayout": "store_layout...", "storelib.Save": "commit_attempt_save", "storelib.Info": "proto_store",
    "factslib.Change": "commit_facts_change",
    "storelib.Store": "store...", "storelib.Ref": "pack_object_ref", "storelib.Rank": "proto_alive",
    "storelow.Entry": "storage_entry", "storelow.Medium": "storage_stat",
    "storelow.Owner": "storage_owner", "test_pace.Pace": "posix_pace",
    "storelow.Ops": "storage_ops", "storelow.StorageHead": "storage",
    "storelow.Footer": "pack_footer",
    "storelow.VerifyCalls": "pack_verify_calls", "test_note.Ref": "pack_object_ref",
    "test_tree.Filling": "view_filling", "measure.Copy2d": "cuda_copy_2d", "gatherlib.Gather": "device_gather",
    "test_layout_part.Held": "store_layout_held",
    "test_base_boxes.Held": "store_layout_held", "test_base.Method": "base_sha256_method",
    "test_part_excerpt.Head": "store_part_excerpt...",
    "test_read_counts.LoadFill": "load_fill...", "test_read_counts.LoadObject": "load_object...",
    "test_plan_cache.Key": "base_digest", "test_plan_cache.Stats": "save_plan_cache_stats",
    "test_plan_cache.Planned": "save_planned",
    "test_replicas.Entry": "save_replica_entry", "test_replicas.Row": "save_replica_tensor",
    "test_replicas.Rows": "save_replicas_rows",
    "test_replicas.Held": "store_layout_held", "test_safetensors.Tensor": "view_safetensors_tensor",
    "test_safetensors.Header": "view_safetensors", "test_safetensors.Buffer": "base_buf",
    "test_safetensors.Params": "tensor_grid_params",
    "test_layout_files.Info": "load_tensor_info", "test_layout_files.Line": "view_layouts_line",
    "test_stats.Name": "commit_stats_name", "test_tree.Buffer": "base_buf", "test_tree.Vector": "iovec",
    "commlib.Functions": "comm_functions", "commlib.Gathered": "comm_gathered", "commlib.Pass": "comm_pass",
    "commrank.Head": "comm...",
    "test_retain.Row": "upkeep_retain_row", "test_verify_index.Index": "verify_index", "_lib.ErrorText": "vckpt_error",
}
FLAT = {"test_save_load.Piece": ("store_piece", {"ref": "pack_object_ref"})}       # a struct within, written out

SHOW = """
import ctypes, importlib, json, sys
found = {}
for name in json.loads(sys.argv[1]):
    module = importlib.import_module(name)
    for kind in vars(module).values():
        if isinstance(kind, type) and issubclass(kind, ctypes.Structure) and hasattr(kind, "_fields_"):
            fields = [(getattr(kind, field[0]).offset, field[0]) for field in kind._fields_]
            module = kind.__module__.split(".")[-1] if kind.__name__ in vars(sys.modules[kind.__module__]) else name
            found.setdefault(f"{module}.{kind.__name__}",
                             (ctypes.sizeof(kind), fields))
print(json.dumps(found))
"""


def structs(library):
    """{name: {(size in bytes, ((offset, member), ...)), ...}}, of the named structs of a library."""
    begin = re.compile(r"^ <(\d+)><[0-9a-f]+>: Abbrev Number: \d+ \((DW_TAG_\w+)\)")
    attribute = re.compile(r"^\s+<[0-9a-f]+>\s+(DW_AT_name|DW_AT_byte_size|DW_AT_data_member_location)\s*: (.*)$")
    found, open_ = collections.defaultdict(set), []

    def close():
        node = open_.pop()
        if node["tag"] == "DW_TAG_structure_type" and "name" in node and "byte_size" in node:
            found[node["name"]].add(
                (node["byte_size"],
                 tuple((m.get("data_member_location", 0), m.get("name", "")) for m in node["members"])))
    text = subprocess.Popen(["readelf", "--wide", "--debug-dump=info", library], stdout=subprocess.PIPE,
                            stderr=subprocess.DEVNULL, text=True)
    for line in text.stdout:
        if m := begin.match(line):
            while open_ and open_[-1]["depth"] >= int(m[1]):
                close()
            node = {"depth": int(m[1]), "tag": m[2], "members": []}
            if m[2] == "DW_TAG_member" and open_:
                open_[-1]["members"].append(node)
            open_.append(node)
        elif (m := attribute.match(line)) and open_:        # "(indirect string, offset: 0x1): name", "(data1) 8", "8"
            value = m[2].split(": ")[-1].strip().split(") ")[-1]
            open_[-1][m[1][6:]] = value if m[1] == "DW_AT_name" else int(value.split()[0], 0)
    while open_:
        close()
    assert text.wait() == 0
    return found


@pytest.fixture(scope="module")
def compiled(build):
    found = collections.defaultdict(set)
    for library in (build / "tests/libvckpt_internal.so", build / "core/api/libvckpt.so",
                    build / "tests/libtool_text.so"):
        for name, kinds in structs(library).items():
            found[name] |= kinds
    assert len(found) > 200
    return found


@pytest.fixture(scope="module")
def written(build):
    """{"module.Class": [size, [[offset, name], ...]]}, of a process of its own, as the tests import them."""
    paths = [p for p in sorted((ROOT / "tests").rglob("*.py")) if "bench" not in p.parts and p != pathlib.Path(__file__)
             and re.search(r"Structure\)|structure\(\"", p.read_text())]
    names = [p.stem for p in paths] + ["vckpt._lib"]
    done = subprocess.run([sys.executable, "-c", SHOW, json.dumps(names)],
                          capture_output=True, text=True, env=dict(os.environ, VCKPT_BUILD=str(build)), cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def wrong(size, fields, kind, begins):
    """What is not as the compiler has it, or nothing."""
    there = dict(kind[1])
    if size > kind[0] if begins else size != kind[0]:
        return f"it has {size} bytes, the compiler's {kind[0]}"
    return next((f"{name} is at {offset}, where the compiler has {there.get(offset, 'no member')}"
                 for offset, name in fields
                 if name.strip("_") not in there.get(offset, "")), None)


def candidates(name, compiled):
    if name in NAMES:
        return [NAMES[name].rstrip(".")]
    snake = re.sub(r"(?<!^)(?=[A-Z])", "_", name.split(".")[1]).lower()
    return [prefix + snake for prefix in PREFIXES if prefix + snake in compiled]


def flat(kinds, inner, compiled):
    for size, members in kinds:
        yield size, tuple(x for offset, name in members for x in
                          ([(offset + o, n) for o, n in next(iter(compiled[inner[name]]))[1]] if name in inner
                           else [(offset, name)]))


@pytest.mark.skipif("asan" in os.environ.get("VCKPT_PRELOAD", "") + os.environ.get("LD_PRELOAD", ""),
                    reason="the same structs without it")
def test_structs_are_as_the_compiler_has_them(compiled, written):
    faults, unused = [], set(NAMES) - set(written)
    for name, (size, fields) in sorted(written.items()):
        if name in FLAT:
            outer, inner = FLAT[name]
            kinds = list(flat(compiled[outer], inner, compiled))
        else:
            kinds = [kind for one in candidates(name, compiled) for kind in compiled.get(one, ())]
        said = [wrong(size, fields, kind, NAMES.get(name, "").endswith("...")) for kind in kinds]
        if not said or all(said):
            faults.append(f"{name}: {said[0] if said else 'no struct of that name: give it in NAMES'}")
    assert not faults and not unused, "\n".join(faults + [f"NAMES has {one}, which is nowhere" for one in unused])
    assert len(written) > 100


def test_a_moved_field_is_found():
    kind = (24, ((0, "dry_run"), (8, "grace_s"), (16, "heartbeat_s")))
    assert wrong(24, [[0, "dry_run"], [8, "grace_s"], [16, "heartbeat_s"]], kind, False) is None
    assert "grace_s is at 16" in wrong(24, [[0, "dry_run"], [16, "grace_s"], [8, "heartbeat_s"]], kind, False)
    assert "it has 32 bytes" in wrong(32, [[0, "dry_run"]], kind,
                                      False) and wrong(16, [[0, "dry_run"]], kind, True) is None


def test_functions_that_tests_call():
    """A function that gets another name fails here, in seconds, and not in a test that is run later."""
    sources = "\n".join(path.read_text() for folder in ("core", "fs", "index", "proto", "tests", "tools")
                        for pattern in ("*.c", "*.h") for path in (ROOT / folder).rglob(pattern))
    known = set(re.findall(r"\b\w+(?=\()", sources))
    called = {(match, str(path.relative_to(ROOT))) for path in (ROOT / "tests").rglob("*.py")
              for match in re.findall(r"\b(?:lib|LIB|internal)\.((?:" + "|".join(filter(None, PREFIXES)) + r")\w+)",
                                      path.read_text())}
    assert len(called) > 300
    assert sorted((name, path) for name, path in called if name not in known) == []
