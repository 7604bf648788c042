# SPDX-License-Identifier: Apache-2.0
"""The model of the commit protocol (README.md): each scenario holds with every rule, and fails without each of its
rules.

As a command it shows the steps of a violation: python3 tests/model/test_model_commit.py SCENARIO RULE...
"""
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

import pytest

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MODEL = HERE / "commit.pml"
RULES = re.findall(r"^ \*   ([A-Z]+)  +\S", MODEL.read_text(), re.M)
PACK, COMES_BACK = r"pm\[vi\]&", r"vis&retired"
FAILED, COMMITTED = r"vcom&toldF", r"toldC&"
TORN, WAITS = r"vis&mixed", "invalid end state"
TRACE = r"~\(late_mf\)"

# name: (flags, {rule, or rules, without which something goes wrong: what that is})
SMALL = {
    "remove": ("A1 REM=2 CLEAN", {"UNDEC": COMES_BACK}),
    "replace": ("NR=1 A1 IMP REM=1 R1=1 R4=1", {"ENTRY": r"rp==was"}),
    "heartbeat": ("A1 HB", {"ABORT": FAILED}),
    "announcement": ("A1 ERR", {"DEL": PACK, "ABORT": "invalid end state"}),
    "snapshot": ("A1 SNAP HB", {"HIST": COMMITTED}),
    "relaunch": ("NR=1 A1 L2 S3=2 DELAY", {"LAUNCH": r"vcom&frozen"}),
    "reopen": ("REOPEN SNAP HB", {"FRESH": r"assertion violated mine", "HIST": COMMITTED}),
    "collect": ("NR=1 IMP REM=1 COL=2 CLEAN", {"BASE": PACK, "BEGIN": PACK, "OWN": PACK, "NAMED": PACK}),
    "grace": ("NR=1 IMP REM=1 COL=1 CLEAN NOGRACE", {"CAND": PACK, "AGAIN": PACK}),
    "cover": ("NR=3 A1 HB WRONG", {"COVER": r"vis&wrong"}),
    "two runs": ("NR=1 A1 OTHER", {"NAME": r"assertion violated made", "NAME MADE": PACK}),
    "twin": ("A1 TWIN", {"MADE": PACK}),
    "reused id": ("REUSE L2", {"NONCE": TORN, "LIVES": TORN}),
    "phase": ("A2 SKIP=2", {"TAG": TORN, "PASSED": WAITS}),
    "tries": ("A2 S2=1 TRIES SKIP=1 FAULTS=1", {"TOLD": WAITS}),
    "abort lost": ("A2 FAULTS=2", {"KEEP": WAITS}),
    "unreadable": ("A1 FAULTS=1 EIO=1", {"WAITS": WAITS}),
    "passed over": ("A1 HB EIO=2", {"SEEN": COMMITTED}),
    "stuck": ("A1 STUCK", {"BEAT": WAITS}),
    "head": ("HEAD NR=1 SNAP COL=1 REM=1 READER", {}),
    "head, used": ("HEAD NR=1 SNAP=2 COL=1 REM=1", {"USED": TRACE}),
    "head, under way": ("HEAD NR=1 A1 SNAP=2 COL=1", {"POS": r"slow\|\|", "TOP": r"slow\|\|"}),
    "head, misjudged": ("HEAD NR=1 A1 SNAP COL=2 CLEAN HB", {"OVER": r"vis==vis2", "ENDS": TRACE, "MANI": TRACE}),
    "head, damaged": ("HEAD NR=1 SNAP COL=1 REM=1 DAMAGE", {"ROWS": TRACE}),
}
MEDIUM = {
    "import": ("NR=1 IMP REM=1 COL=2 HB CLEAN", {"OWN": PACK}),
    "crash": ("A1 L2 CRASH", {"SYNC": r"vis& ~\(mf\)"}),
}
LARGE = {
    "launches": ("A1 L2 S3=2", {"LAUNCH": r"vcom&frozen"}),
    "three ranks": ("NR=3 A1 HB REM=1 WRONG ERR", {"COVER": r"vis&wrong"}),
    "head, restart": ("HEAD NR=1 A1 L2 SNAP COL=1", {"PAST": TRACE}),
    "head, removal": ("HEAD NR=1 A1 SNAP COL=1 REM=1 CLEAN", {"MANI": TRACE, "TOP": TRACE}),
    "head, reader": ("HEAD NR=1 A1 SNAP COL=1 CLEAN READER HB", {}),
    "two ranks": ("A1 REM=1 COL=2 CLEAN", {}),
    "three launches": ("NR=1 REOPEN L2 HB IMP SNAP", {}),
    "two collectors": ("NR=1 IMP REM=1 COL=1 COLS=2 CLEAN", {"BASE": PACK}),
    "trouble": ("A2 SKIP=1 FAULTS=2 EIO=2 STUCK", {}),
    "three out of phase": ("NR=3 A2 SKIP=2 FAULTS=1 EIO=1", {}),
    "three tries": ("NR=3 A2 S2=1 TRIES SKIP=2 ERR", {}),
    "chain": ("NR=1 CHAIN=2 REM=2 COL=1 CLEAN NOGRACE", {"SINCE": PACK}),
}
SCENARIOS = {**SMALL, **MEDIUM, **LARGE}


def need(program, package):
    if not shutil.which(program):
        pytest.fail(f"{program} is not installed: the model needs the Debian package {package} (apt-get install "
                    f"{package})")


def make(flags, off, folder, optimise):
    """Spin's checker for a scenario, in a folder of its own. Returns the -D flags."""
    off = off.split() if off else []
    assert set(off) <= set(RULES)
    define = [f"-D{word}" for word in flags.split()] + [f"-DF_{rule}" for rule in RULES if rule not in off]
    shutil.copy(MODEL, folder)
    done = subprocess.run(["spin", "-a", *define, MODEL.name], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0 and "rror" not in done.stdout, done.stdout + done.stderr
    # the same words give the same checker: most of a run is gcc
    cached = ["ccache"] if shutil.which("ccache") else []
    subprocess.run([*cached, "gcc", optimise, "-w", "-DSAFETY", "-DCOLLAPSE", "-DMEMLIM=4000", "-c", "pan.c"],
                   cwd=folder, check=True)
    subprocess.run(["gcc", "-o", "pan", "pan.o"], cwd=folder, check=True)
    return define


def check(flags, off, folder, optimise="-O0"):
    """Runs the checker. Returns its output."""
    need("spin", "spin")
    need("gcc", "gcc")
    make(flags, off, folder, optimise)
    crash = ["-E"] if "CRASH" in flags else []      # who was cut off by a power loss does not reach its end
    # its stack: a million take as long to make as the checker
    depth = "-m1000000" if optimise == "-O2" else "-m100000"
    began = time.monotonic()
    out = subprocess.run(["./pan", depth, *crash], cwd=folder, capture_output=True, text=True).stdout
    states = re.search(r"(\d+) states, stored", out)
    print(f"{flags}, without {off}: {states[1] if states else '?'} states, {time.monotonic() - began:.1f} s,",
          re.search(r"errors: \d+", out)[0])
    return out


def holds(scenario, folder, optimise="-O0"):
    out = check(SCENARIOS[scenario][0], None, folder, optimise)
    assert re.search(r"errors: 0\n", out) and "max search depth too small" not in out and "MEMLIM" not in out, out


def fails(scenario, rule, folder, optimise="-O0"):
    flags, needed = SCENARIOS[scenario]
    out = check(flags, rule, folder, optimise)
    assert "errors: 1" in out and re.search(needed[rule], out), out


def each(scenarios):
    return [(name, rule) for name, (_, needed) in scenarios.items() for rule in [None, *needed]]


def either(name, rule, folder, optimise="-O0"):
    return fails(name, rule, folder, optimise) if rule else holds(name, folder, optimise)


def named(pair):
    name = pair[0].replace(" ", "-")
    return f"{name}-without-{pair[1].replace(' ', '-')}" if pair[1] else name


QUICK = {"relaunch": {"LAUNCH"}, "collect": {"OWN"}, "head, under way": {"POS"}}


def sized(pairs):
    """The scenarios of QUICK always, the others with --full."""
    return [pytest.param(pair, marks=[] if pair[0] in QUICK and pair[1] in [None, *QUICK[pair[0]]]
                         else pytest.mark.full) for pair in pairs]


@pytest.mark.parametrize("pair", sized(each(SMALL)), ids=named)
def test_small(pair, tmp_path):
    either(*pair, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("pair", each(MEDIUM), ids=named)
def test_medium(pair, tmp_path):
    either(*pair, tmp_path, "-O1")


@pytest.mark.full
@pytest.mark.parametrize("pair", each(LARGE), ids=named)
def test_large(pair, tmp_path):
    either(*pair, tmp_path, "-O2")


def test_every_rule_is_needed_somewhere():
    assert len(RULES) > 10
    assert set(RULES) == {rule for _, needed in SCENARIOS.values() for rule in needed if " " not in rule}
    assert set(RULES) == set(re.findall(r"\bF_([A-Z]+)", MODEL.read_text()))


# ---- model and code name each other ----

def model_names():
    """{label, inline or process of the model: functions that it names}"""
    lines, found, at = MODEL.read_text().splitlines(), {}, None
    for line in lines:
        label = re.match(r"(?:end_)?(\w+):(?:\s|$)", line) or re.match(r"(?:inline|proctype|#define) (\w+)", line) \
            or re.search(r"vk == ([A-Z]+) &?&?.*->", line)
        at = label[1] if label else at
        for names in re.findall(r"/\* code: ([\w, ]+?) \*/", line):
            found.setdefault(at, set()).update(n for n in names.split(", ") if n != "later")
    return found


def code_names():
    """{function: labels that the comment above it names}"""
    found = {}
    for path in sorted((ROOT / "core").rglob("*.c")):
        # a comment, then at once the head of a function
        for comment, head in re.findall(r"/\*((?:(?!\*/).)*?)\*/\n((?:[a-z_][^\n;{}]*\n(?:\t[^\n;{}]*\n)*))\{",
                                        path.read_text(), re.S):
            labels = re.search(r"^\s*model: (\w+(?:, \w+)*)(?:\.|\s*$)", comment)
            if labels:
                name = re.search(r"(\w+)\(", head)[1]
                assert name not in found, f"{path}: {name} twice"
                found[name] = set(labels[1].split(", "))
    return found


def test_model_and_code_name_each_other():
    model = {(label, function) for label, functions in model_names().items() for function in functions}
    code = {(label, function) for function, labels in code_names().items() for label in labels}
    assert len(model) > 25
    assert not model - code, f"named by the model, not by the code: {sorted(model - code)}"
    assert not code - model, f"named by the code, not by the model: {sorted(code - model)}"


def test_every_mention_is_read():
    """None that stands where code_names() does not look."""
    mentions = sum(len(re.findall(r"/\* model: \w", p.read_text())) for p in (ROOT / "core").rglob("*.[ch]"))
    assert mentions == len(code_names())


# ---- the steps of a violation ----

def explain(scenario, rule):
    lines = MODEL.read_text().splitlines()
    with tempfile.TemporaryDirectory() as folder:
        define = make(SCENARIOS[scenario][0], rule, folder, "-O1")
        out = subprocess.run(["./pan", "-m1000000"], cwd=folder, capture_output=True, text=True).stdout
        print(re.search(r"errors: \d+", out)[0], *re.findall(r"^pan:1:.*", out, re.M))
        steps = subprocess.run(["spin", "-t", "-p", *define, MODEL.name], cwd=folder, capture_output=True,
                               text=True).stdout
    last = None
    for number, process, line in re.findall(r"^ *(\d+):\s+proc +(\d+ \(\w+).*?commit\.pml:(\d+)", steps, re.M):
        at = int(line) - 1
        while at and not re.match(r"\w+:|proctype|inline|init", lines[at]):
            at -= 1
        where = (process, lines[at].split(":")[0].split("{")[0].split("(")[0])
        if not where[1].startswith(("inline", "init")) and where != last:
            print(f"{number:>4}  {process.replace(' (', ' '):14} {where[1]}")
            last = where


if __name__ == "__main__":
    explain(sys.argv[1], " ".join(sys.argv[2:]))
