# SPDX-License-Identifier: Apache-2.0
"""vckpt mesh against numpy, and what is wrong in the arguments of mesh, layout and reshard."""
import itertools
import json
import math
import random
import resource
import subprocess
import sys

import numpy
import pytest


def expected(names, ranks, rank, host, wrap=True):
    """One entry of the JSON, by indexing an array of ranks."""
    at = [int(x[0]) for x in numpy.where(ranks == rank)]
    sets = [(d,) for d in range(ranks.ndim)] + list(itertools.combinations(range(ranks.ndim), 2))
    groups = {",".join(names[d] for d in dims): ranks[tuple(slice(None) if d in dims else at[d]
                                                            for d in range(ranks.ndim))].ravel().tolist()
              for dims in sets}

    def neighbours(k):
        found = {}
        for d, name in enumerate(names):
            i = at[d] + k
            inside = 0 <= i < ranks.shape[d]
            found[name] = int(ranks[tuple(at[:d] + [i % ranks.shape[d]] + at[d + 1:])]) if inside or wrap else None
        return found

    return {"rank": rank, "coordinate": at, "host": host[0], "device": host[1], "groups": groups,
            "next": neighbours(1), "previous": neighbours(-1)}


def test_rank_6(vckpt):
    assert vckpt.json("mesh", "--mesh", "pp=2,dp=2,tp=2", "--devices-per-host", 4, "--rank", 6) == {"ranks": [{
        "rank": 6, "coordinate": [1, 1, 0], "host": 1, "device": 2,
        "groups": {"pp": [2, 6], "dp": [4, 6], "tp": [6, 7], "pp,dp": [0, 2, 4, 6], "pp,tp": [2, 3, 6, 7],
                   "dp,tp": [4, 5, 6, 7]},
        "next": {"pp": 2, "dp": 4, "tp": 7}, "previous": {"pp": 2, "dp": 4, "tp": 7}}]}


def test_meshes_are_what_numpy_says(vckpt, scale):
    rng = random.Random(4)
    for case in range(scale(40, 300)):
        sizes = [rng.randint(1, 4) for _ in range(rng.randint(1, 4))]
        names = rng.sample(["dp", "tp", "pp", "ep", "cp", "a_b", "_x"], len(sizes))
        n, wrap, devices = math.prod(sizes), rng.random() < 0.5, rng.randint(1, 9)
        order = rng.sample(range(3 * n), n) if rng.random() < 0.7 else list(range(n))
        ranks = numpy.array(order).reshape(sizes)
        mesh = ",".join(f"{k}={v}" for k, v in zip(names, sizes))
        if rng.random() < 0.3:
            mesh = json.dumps({"dims": list(zip(names, sizes)), "ranks": order})
            more = []
        else:
            more = ["--rank-order", ",".join(map(str, order))]
        got = vckpt.json("mesh", "--mesh", mesh, *more, "--devices-per-host", devices, *([] if wrap else ["--no-wrap"]))
        assert got == {"ranks": [expected(names, ranks, r, divmod(r, devices), wrap) for r in order]}, (mesh, order)
        assert vckpt.json("mesh", "--mesh", mesh, *more, "--devices-per-host", devices, "--rank", order[-1],
                          *([] if wrap else ["--no-wrap"]))["ranks"] == got["ranks"][-1:]


def test_device_table(vckpt):
    got = vckpt.json("mesh", "--mesh", "tp=3", "--device-table", "5:1,4:0,5:0")["ranks"]
    assert [(r["host"], r["device"]) for r in got] == [(5, 1), (4, 0), (5, 0)]
    assert vckpt.json("mesh", "--mesh", "tp=9", "--rank", 8)["ranks"][0]["host"] == 1      # eight a host by default


def test_tables(vckpt):
    lines = vckpt("mesh", "--mesh", "pp=2,dp=2,tp=2", "--devices-per-host", 4, "--no-wrap").stdout.splitlines()
    assert lines[0].split() == ["rank", "pp,dp,tp", "host", "device", "next", "previous"]
    assert lines[7].split() == ["6", "1,1,0", "1", "2", "-,-,7", "2,4,-"]
    assert ["pp,dp", "0,2,4,6", "1,3,5,7"] in [line.split() for line in lines]
    text = vckpt("mesh", "--mesh", "pp=2,dp=2,tp=2", "--rank", 6).stdout
    assert ["dp", "4", "4", "1", "4,6"] in [line.split() for line in text.splitlines()]
    text = vckpt("mesh", "--mesh", "dp=5000,tp=2").stdout
    assert text.count("\n") < 5010 + 10000 and "5000 of 2 ranks each" in text


def test_a_mesh_is_read_from_a_file(vckpt, tmp_path):
    first = vckpt.json("layout", "--shape", "8", "--dtype", "u8", "--mesh", "a=2,b=2", "--rank-order", "7,3,5,1",
                       "--place", "R,S(0)")
    assert first["mesh"] == {"dims": [["a", 2], ["b", 2]], "ranks": [7, 3, 5, 1]}
    (tmp_path / "mesh").write_text(json.dumps(first["mesh"]))
    assert vckpt.json("layout", "--shape", "8", "--dtype", "u8", "--mesh", f"@{tmp_path}/mesh", "--place",
                      "R,S(0)") == first
    (tmp_path / "short").write_text('{"dims": [["a", 2], ["b", 2]]}')
    assert [r["rank"] for r in vckpt.json("mesh", "--mesh", f"@{tmp_path}/short")["ranks"]] == [0, 1, 2, 3]
    assert [r["rank"] for r in vckpt.json("mesh", "--mesh", f"@{tmp_path}/mesh", "--rank-order",
                                          "9,8,7,6")["ranks"]] == [9, 8, 7, 6]


LAYOUT = ["layout", "--shape", "4,4", "--dtype", "bf16", "--mesh", "dp=2,tp=2", "--place", "R,S(0)"]
RESHARD = ["reshard", "--shape", "4,4", "--dtype", "bf16", "--from-mesh", "dp=2", "--from-place", "S(0)", "--to-mesh",
           "tp=2",
           "--to-place", "S(1)"]


def change(base, option, value):
    """The same arguments with another value of an option; None: without it."""
    base = list(base)
    at = base.index(option) if option in base else len(base)
    base[at:at + 2] = [] if value is None else [option, value]
    return base


BAD = [
    *((["mesh", "--mesh", text], word) for text, word in [
        ("", "--mesh"), ("dp", "--mesh dp"), ("dp=", "--mesh dp="), ("dp=0", "--mesh dp=0"), ("dp=-1", "--mesh"),
        ("dp=2,dp=2", "dp"), ("dp=2,", "--mesh"), ("dp=99999999999999999999", "--mesh"), ("dp=4294967297", "--mesh"),
        ("a=4096,b=4097", "--mesh"), ("a=65536,b=65536", "--mesh"), ("1x=2", "--mesh"), ("a b=2", "--mesh"),
        (",".join(f"d{i}=1" for i in range(17)), "16"), ("x" * 65 + "=2", "--mesh"), ("a-b=2", "--mesh a-b=2"),
        ("a=2;b=2", "--mesh"),
        ("{", "JSON"), ("{}", "dims"), ('{"dims": 3}', "dims"), ('{"dims": [["a"]]}', "dims"),
        ('{"dims": [["a", -1]]}', "dims"),
        ('{"dims": [["a", 2.5]]}', "dims"), ('{"dims": [[1, 2]]}', "dims"), ('{"dims": []}', "--mesh"),
        ('{"dims": [["a", 2]], "x": 1}', "nothing else"),
        ('{"dims": [["a", 2]], "ranks": [0]}', "--mesh"), ('{"dims": [["a", 2]], "ranks": [0, 0]}', "--mesh"),
        ('{"dims": [["a", 2]], "ranks": [0, -1]}', "ranks"),
        ('{"dims": [["a", 2]], "ranks": [0, 99999999999]}', "ranks"),
        ('{"dims": [["a", 99999999999999999999]]}', "JSON"), ('{"dims": [["a", 2]], "ranks": {}}', "ranks"),
        ('{"dims": ' + json.dumps([["a", 1]] * 17) + "}", "16"), ("[" * 3000, "--mesh"),
        ('{"dims": ' + "[" * 3000, "JSON"),
        ('{"dims": [["a", 2]], "ranks": [' + "{}," * 99 + "{}]}", '64 "{"'),
        ('{"dims": [["a", 2]]' + ', "a": 1' * 99 + "}", '64 "{"'),
        ("@/nowhere/mesh", "/nowhere/mesh"), ("@/", "@/"), ("@/dev/null", "JSON"), ("@/dev/zero", "JSON"),
        ("@/dev/urandom", "JSON")]),
    *((["mesh", "--mesh", "dp=2,tp=2", *more], word) for more, word in [
        (["--rank-order", "0,1,2"], "--rank-order 0,1,2"), (["--rank-order", "0,1,2,2"], "--rank-order"),
        (["--rank-order", "0,1,2,x"], "--rank-order"),
        (["--rank-order", ""], "--rank-order"), (["--rank-order", "0,1,2,"], "--rank-order"),
        (["--rank-order", "0,1,2,16777216"], "16777215"),
        (["--rank-order", "0,1,2,99999999999999999999"], "--rank-order"),
        (["--rank-order", "-1,1,2,3"], "--rank-order"),
        (["--rank-order", "0,1,2,3,4"], "--rank-order"), (["--rank", "4"], "--rank 4"), (["--rank", "-1"], "--rank -1"),
        (["--rank", "x"], "--rank x"),
        (["--rank", "4294967296"], "--rank 4294967296"), (["--rank", ""], "--rank"),
        (["--devices-per-host", "0"], "--devices-per-host 0"),
        (["--devices-per-host", "4x"], "--devices-per-host 4x"),
        (["--devices-per-host", "4294967296"], "--devices-per-host"),
        (["--device-table", "0:0,0:1"], "rank 2"), (["--device-table", "0:0,0"], "--device-table"),
        (["--device-table", "0:0,0:99999999999"], "--device-table"),
        (["--device-table", "0:0", "--devices-per-host", "2"], "exclude"), (["extra"], "extra"), (["--what"], "--what"),
        (["--rank"], "--rank")]),
    (["mesh"], "--mesh is missing"),
    *((change(LAYOUT, option, value), word) for option, value, word in [
        ("--shape", None, "--shape is missing"), ("--dtype", None, "--dtype is missing"),
        ("--mesh", None, "--mesh is missing"),
        ("--place", None, "--place is missing"),
        ("--shape", "", "--shape"), ("--shape", "4,,4", "--shape 4,,4"), ("--shape", "4,-1", "--shape 4,-1"),
        ("--shape", "4,", "--shape 4,"),
        ("--shape", "4.5", "--shape 4.5"), ("--shape", "Scalar", "--shape Scalar"),
        ("--shape", "18446744073709551616", "2^64-1"),
        ("--shape", "18446744073709551615", "2^62"), ("--shape", "4294967296,4294967296", "2^62"),
        ("--shape", "0,4294967296,4294967296", "2^62"),
        ("--shape", ",".join(["1"] * 17), "16"), ("--shape", ",".join(["9" * 30] * 300), "--shape"),
        ("--shape", "scalar", "--place"),
        ("--dtype", "bf17", "bf17"), ("--dtype", "", "--dtype"),
        ("--place", "", "--place"), ("--place", "R", "--place R"), ("--place", "R,R,R", "--place"),
        ("--place", "R,S(2)", "S(2)"),
        ("--place", "R,S(-1)", "--place"), ("--place", "R,S(18446744073709551616)", "--place"),
        ("--place", "R,S", "--place"), ("--place", "R,S(0", "--place"),
        ("--place", "R,X(0)", "X(0)"), ("--place", "P,S(0)", "reduce"), ("--place", "R,IS(0,3)", "IS(0,3)"),
        ("--place", "R,IS(0,4)", "IS(0,4)"),
        ("--place", "R,IS(0,0)", "--place"), ("--place", "R,SS(0,0)", "--place"), ("--place", "R,SS(0)", "--place"),
        ("--place", "R,RS(0;1)", "RS"),
        ("--place", "R,RS(0;1,2)", "RS"), ("--place", "R,RS(0;0,0)", "RS"), ("--place", "R,RS(1;1,1)", "--place"),
        ("--place", "R,RS(0;18446744073709551615,1)", "RS"),
        ("--place", "RS(0;1,1),RS(0;1,1)", "--place"), ("--place", ",".join(["R"] * 17), "--place"),
        ("--flat", "", "--flat"), ("--flat", "3", "--flat 3"), ("--flat", "3:", "--flat 3:"),
        ("--flat", "5:3", "--flat 5:3"), ("--flat", "0:9", "--flat 0:9"),
        ("--flat", "0:9/8", "--flat 0:9/8"), ("--flat", "0:1/7", "--flat 0:1/7"), ("--flat", "0:1/0", "--flat 0:1/0"),
        ("--flat", "0:1/", "--flat 0:1/"),
        ("--flat", "0:18446744073709551616", "2^64-1"), ("--flat", "0:18446744073709551615", "--flat"),
        ("--flat", "-1:2", "--flat"),
        ("--flat", "0:1/9/9", "--flat"),
        ("--rank", "one", "--rank one"), ("--rank-order", "0,1,2", "--rank-order")]),
    ([*LAYOUT, "--draw", "--json"], "--draw"), ([*change(LAYOUT, "--shape", "4"), "--draw"], "--draw"),
    ([*change(change(LAYOUT, "--shape", "scalar"), "--place", "R,R"), "--draw"], "--draw"), ([*LAYOUT, "more"], "more"),
    *((change(RESHARD, option, value), word) for option, value, word in [
        ("--from-mesh", None, "--from-mesh is missing"),
        ("--to-mesh", None, "--to-mesh is missing"), ("--from-place", None, "--from-place is missing"),
        ("--to-place", None, "--to-place is missing"), ("--from-mesh", "dp", "--from-mesh dp"),
        ("--to-mesh", "dp", "--to-mesh dp"),
        ("--from-place", "P", "--from-place P"), ("--to-place", "P", "--to-place P"),
        ("--to-place", "S(0),R", "--to-place"),
        ("--from-rank-order", "1", "--from-rank-order"), ("--to-rank-order", "1,1", "--to-rank-order"),
        ("--shape", "x", "--shape x"),
        ("--rank", "x", "--rank x")]),
]


@pytest.mark.parametrize("arguments,word", BAD, ids=lambda v: " ".join(v)[:60] if isinstance(v, list) else v)
def test_bad_input_is_named(vckpt, arguments, word):
    done = vckpt(*arguments, check=False)
    assert done.returncode == 2 and done.stdout == "", (done.returncode, done.stderr)
    assert word in done.stderr and done.stderr.count("\n") == 1, done.stderr


@pytest.mark.parametrize("command", ["mesh", "layout", "reshard"])
def test_help(vckpt, command):
    text = vckpt(command, "--help").stdout
    assert text.startswith(f"usage: vckpt {command} ") and vckpt("help", command).stdout == text
    assert f"\n  {command} " in vckpt("--help").stdout


@pytest.mark.parametrize("more", [[], ["--json"]])
@pytest.mark.parametrize("arguments",
                         [["mesh", "--mesh", "dp=3000"],
                          ["layout", "--shape", "99999", "--dtype", "u8", "--mesh", "dp=9999", "--place", "S(0)"],
                          ["reshard", "--shape", "4000,4000", "--dtype", "u8", "--from-mesh", "a=90", "--from-place",
                           "S(0)", "--to-mesh",
                           "b=500", "--to-place", "S(1)"]], ids=lambda a: a[0])
def test_output_that_cannot_be_written_is_a_failure(vckpt, arguments, more):
    with open("/dev/full", "w") as full:
        done = subprocess.run([vckpt.path, *arguments, *more], stdout=full, stderr=subprocess.PIPE, text=True,
                              timeout=120)
    assert done.returncode == 1 and "standard output" in done.stderr and done.stderr.count("\n") == 1
    process = subprocess.Popen([vckpt.path, *arguments, *more], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               text=True)
    process.stdout.read(10)
    process.stdout.close()
    assert process.wait(120) == 1 and "standard output" in process.stderr.read()
    process.stderr.close()


def children_s():
    """Processor time of the commands so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize("arguments", [
    ["mesh", "--mesh", "dp=1000,tp=1000"],
    ["layout", "--shape", "1099511627776", "--dtype", "u8", "--mesh", "dp=1000,tp=1000", "--place", "S(0),S(0)"],
    ["layout", "--shape", "1048576,1048576", "--dtype", "f64", "--mesh", "dp=1000,tp=1000", "--place", "S(0),S(1)"],
    ["reshard", "--shape", "1099511627776", "--dtype", "u8", "--from-mesh", "a=1000000", "--from-place", "S(0)",
     "--to-mesh", "b=1000,c=1000",
     "--to-place", "S(0),S(0)"]], ids=lambda a: a[0])
def test_one_of_a_million_ranks_is_told_at_once(vckpt, arguments):
    start = children_s()
    for more in ([], ["--json"]):
        assert "777777" in vckpt(*arguments, "--rank", 777777, *more).stdout
    assert children_s() - start < 10


def test_a_million_ranks_are_written_as_they_go(vckpt):
    command = [vckpt.path, "layout", "--shape", "1099511627776", "--dtype", "u8", "--mesh", "dp=1000000", "--place",
               "S(0)", "--json"]
    limited = subprocess.Popen(["sh", "-c", 'ulimit -v 262144; exec "$@"', "sh", *command], stdout=subprocess.PIPE,
                               stderr=subprocess.DEVNULL)
    if limited.stdout.read(1) == b"":
        pytest.skip("does not start within 256 MiB of addresses (a sanitizer)")
    count = 0
    while chunk := limited.stdout.read(1 << 20):
        count += chunk.count(b"\n")
    assert limited.wait() == 0 and count == 3 + 1000000      # a line for each, and the head
    limited.stdout.close()


@pytest.mark.parametrize("arguments,words", [
    (["mesh", "--mesh", "dp=1000,tp=1000", "--json"], ["--mesh dp=1000,tp=1000", "--rank N"]),
    (["layout", "--shape", "16777216,16777216", "--dtype", "u8", "--mesh", "a=2,b=2", "--place",
      "IS(0,65536),IS(1,65536)", "--json"], ["--place", "--rank N"]),
    (["layout", "--shape", "16777216,16777216", "--dtype", "u8", "--mesh", "a=2,b=2", "--place",
      "IS(0,65536),IS(1,65536)", "--rank", "1"], ["--place"]),
    (["layout", "--shape", "16777216,16777216", "--dtype", "u8", "--mesh", "a=2,b=2", "--place",
      "IS(0,65536),IS(1,65536)", "--draw"], ["--draw"]),
    (["reshard", "--shape", "16777216,64", "--dtype", "u8", "--from-mesh", "a=2", "--from-place", "IS(0,8388608)",
      "--to-mesh", "b=2", "--to-place", "S(1)",
      "--rank", "0"], ["--from-place", "for one rank"]),
    (["reshard", "--shape", "16777216", "--dtype", "u8", "--from-mesh", "a=100000", "--from-place", "S(0)", "--to-mesh",
      "b=1000", "--to-place", "R"],
     ["--from-place", "--rank N"])])
def test_what_would_be_too_much_is_refused_before_it_begins(vckpt, arguments, words):
    done = vckpt(*arguments, check=False)
    assert done.returncode == 1 and done.stdout == "" and all(w in done.stderr for w in words), done.stderr


# Each: what it may take of a machine that does other things, too.
@pytest.mark.parametrize("arguments,says", [
    (["layout", "--shape", f"{2**50}", "--dtype", "u8", "--mesh", "a=1024", "--place", "SS(0,1048576)"],
     "and 1048568 more"),
    (["layout", "--shape", f"{2**50},1", "--dtype", "u8", "--mesh", "a=1024", "--place", "SS(0,1048576)", "--draw"],
     "--draw: more than 65536 boxes"),
    (["layout", "--shape", f"{2**50},1", "--dtype", "u8", "--mesh", "a=1024,b=8", "--place", "SS(0,4096),SS(0,4096)"],
     "and more"),
    (["layout", "--shape", f"{2**50},1", "--dtype", "u8", "--mesh", "a=1024,b=8", "--place", "SS(0,4096),SS(0,4096)",
      "--flat", "0:1"], "8191  1023,7"),
    (["layout", "--shape", f"{2**50},1", "--dtype", "u8", "--mesh", "a=1024,b=8", "--place", "SS(0,4096),SS(0,4096)",
      "--json"], "8388608 boxes"),
    (["layout", "--shape", f"{2**50},1", "--dtype", "u8", "--mesh", "a=2,b=8", "--place", "SS(0,4096),SS(0,4096)",
      "--rank", "15"], "[1125882726973440:1125899906842624, 0:1]"),
    (["layout", "--shape", f"{2**50},1", "--dtype", "u8", "--mesh", "a=16777216", "--place", "SS(0,1048576)"],
     "16777216 ranks are too many"),
    (["layout", "--shape", f"{2**50},1", "--dtype", "u8", "--mesh", "a=16777216", "--place", "SS(0,1048576)", "--draw"],
     "too many"),
    (["layout", "--shape", f"{2**50},1", "--dtype", "u8", "--mesh", "a=16777216", "--place", "S(0)", "--rank",
      "16777215"], "[67108864, 1]"),
    (["mesh", "--mesh", "a=16777216"], "16777216 ranks are too many"),
    (["mesh", "--mesh", "a=16777216", "--json"], "16777216 ranks are too many"),
    pytest.param(["reshard", "--shape", "4000000", "--dtype", "u8", "--from-mesh", "dp=1000000", "--from-place",
                  "SS(0,2)", "--to-mesh", "dp=1000000",
                  "--to-place", "S(0)"], "1000000 of 1000000 ranks read from others", marks=pytest.mark.full),
    pytest.param(["reshard", "--shape", f"{2**50}", "--dtype", "u8", "--from-mesh", "a=16777216", "--from-place",
                  "SS(0,16)", "--to-mesh",
                  "a=1048576", "--to-place", "SS(0,64)"], "8388608 boxes", marks=pytest.mark.full),
    (["reshard", "--shape", f"{2**50}", "--dtype", "u8", "--from-mesh", "a=16777216", "--from-place", "S(0)",
      "--to-mesh", "a=16777216",
      "--to-place", "S(0)"], "--to-mesh a=16777216: 16777216 ranks"),
    (["reshard", "--shape", "2,600000", "--dtype", "u8", "--from-mesh", "a=60000", "--from-place",
      f"RS(0,1;{','.join('1' * 60000)})", "--to-mesh",
      "a=600000", "--to-place", "S(1)"], "of 600000 ranks read from others"),
    (["reshard", "--shape", "2,60000", "--dtype", "u8", "--from-mesh", "a=60000", "--from-place",
      f"RS(0,1;{','.join('1' * 60000)})", "--to-mesh",
      "a=1000,b=60", "--to-place", "R,S(1)", "--rank", "59999"], "1 of 1 rank reads from others; 2.0 KiB of 2.0 KiB"),
    (["reshard", "--shape", "60000,2", "--dtype", "u8", "--from-mesh", "a=60000", "--from-place",
      f"RS(0,1;{','.join('1' * 60000)})", "--to-mesh",
      "a=20000", "--to-place", "S(0)"], "of 20000 ranks read from others")], ids=lambda v: " ".join(v)[:90]
                         if isinstance(v, list) else v)
def test_large_ones_are_answered_or_refused_in_seconds(vckpt, arguments, says):
    start = children_s()
    done = vckpt(*arguments, check=False)
    assert done.returncode == (not done.stdout) and says in done.stdout[-2000:] + done.stderr
    assert children_s() - start < 40


@pytest.mark.parametrize("json_output", [[], ["--json"]])
def test_bytes_beyond_64_bits_are_refused(vckpt, json_output):
    arguments = ["reshard", "--shape", f"{2**62}", "--dtype", "u8", "--from-mesh", "a=2", "--from-place", "R",
                 "--to-place", "R", *json_output]
    done = vckpt(*arguments, "--to-mesh", "b=4", check=False)
    assert (done.returncode == 1 and done.stdout == "" and
            "--to-place R: all ranks together hold more than 2^64-1 bytes" in done.stderr)
    assert vckpt(*arguments, "--to-mesh", "b=3").stdout and vckpt(*arguments, "--to-mesh", "b=4", "--rank", 3).stdout


@pytest.mark.parametrize("repeated,times,says", [("{},", 3_000_000, '64 "{"'), ('"a":1,', 3_000_000, '":"'),
                                                 pytest.param("1,", 2**24 + 64, "commas", marks=pytest.mark.full),
                                                 pytest.param("1" * 1024, 192 << 10, "201326592 bytes",
                                                              marks=pytest.mark.full)])
def test_files_that_are_no_mesh_take_no_memory(vckpt, tmp_path, repeated, times, says):
    (tmp_path / "mesh").write_text('{"dims":[["a",2]],"ranks":[' + repeated * times + "1]}")
    code = "import resource, subprocess, sys; r = subprocess.run(sys.argv[1:]).returncode; " \
           "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss); sys.exit(r)"
    done = subprocess.run([sys.executable, "-c", code, vckpt.path, "mesh", "--mesh", f"@{tmp_path}/mesh"],
                          capture_output=True, text=True)
    assert done.returncode == 2 and says in done.stderr, done.stderr
    assert int(done.stdout) < 1 << 20                        # KiB: 40 bytes for each of 2^24 values


@pytest.mark.parametrize("arguments", [["mesh", "--mesh", "dp=\x1b[31m2"],
                                       ["mesh", "--mesh", "dp=2", "--rank", "\x1b]0;x\x07"], ["mesh", "\x9b31m"],
                                       ["mesh", "--mesh", '{"dims": [["\x9b31m", 2]]}'],
                                       ["mesh", "--mesh", '{"dims": [["a\x1b", 2]]}'],
                                       ["mesh", "--mesh", '{"dims": "\\u009b31m\x9b"'], ["mesh", "--\x1bc"],
                                       ["mesh", "--mesh", "@/no\x1b\x9bwhere\n"],
                                       change(LAYOUT, "--place", "R,\x1b[0m"), change(LAYOUT, "--shape", "4,\x9b"),
                                       change(LAYOUT, "--dtype", "\x7fbf16"),
                                       [*LAYOUT, "--flat", "\x85:3"], change(RESHARD, "--to-place", "\u200e\x9cS")],
                         ids=repr)
def test_control_characters_do_not_reach_the_terminal(vckpt, arguments):
    done = vckpt(*arguments, check=False)
    assert done.returncode == 2 and done.stderr.endswith(" --help)\n")
    assert not [c for c in done.stderr[:-1] if ord(c) < 32 or 127 <= ord(c) < 160], repr(done.stderr)


def test_control_characters_of_a_file_do_not_either(vckpt, tmp_path):
    (tmp_path / "mesh").write_text('{"dims": [["a", 2]], "ranks": [\x9b31m\x1b[2J]}')
    done = vckpt("mesh", "--mesh", f"@{tmp_path}/mesh", check=False)
    assert done.returncode == 2 and "JSON" in done.stderr and "\x9b" not in done.stderr and "\x1b" not in done.stderr


def test_boxes_without_end_still_make_a_table(vckpt):
    text = vckpt("layout", "--shape", "16777216,16777216", "--dtype", "u8", "--mesh", "a=2,b=2", "--place",
                 "IS(0,65536),IS(1,65536)").stdout
    assert text.count(f"and {65536 ** 2 - 8} more") == 4
