# SPDX-License-Identifier: Apache-2.0
"""vckpt report: one page, well-formed and self-contained, whose numbers are those of the other commands, whatever a
store says."""
import base64
import ctypes as c
import hashlib
import html
import html.parser
import json
import os
import re
import shutil
import stat
import subprocess
import xml.etree.ElementTree as ET

import numpy
import pytest
from safetensors.numpy import save_file

import saverlib
from protolib import PackUse, Proto, Timing, manifest_make, sample_announcement, table
from storelib import COMMIT, NONE, fresh
from storelib import Digest as StoreDigest
from test_stalls import MS, T0, put_stats, ranks_save

EVIL = "</script><script>alert(1)</script>\"'&<!--]]>"
DAY = 86400 * 10**9


@pytest.fixture
def api(lib):
    with fresh(lib) as api:
        yield api


class Checker(html.parser.HTMLParser):
    """Every element that is opened is closed, in order; nothing names anything outside of the page."""
    VOID = {"meta"}

    def __init__(self, text):
        super().__init__()
        self.open, self.scripts, self.text = [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        assert tag not in {"link", "img", "iframe", "object", "embed", "form", "a", "base"}, tag
        for name, value in attrs:
            assert not name.startswith("on") and name not in {"src", "href", "srcset", "action"}, (tag, name)
        self.open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        self.text.append(data)


def page_of(vckpt, *args, code=0):
    """The text of a page, after all that holds for every one."""
    done = vckpt("report", *args, "--html", "-", check=False)
    assert done.returncode == code and (not code or "vckpt report: " in done.stderr), done.stderr
    text = done.stdout
    checker = Checker(text)
    assert len(checker.scripts) == 1 and not re.search("[\0-\x08\x0b-\x1f\x7f-\x9f]", text)
    ET.fromstring(text.partition("\n")[2])
    assert len(text) < 600_000 and not re.search(r"\b(nan|inf)\b", text)
    assert not re.search(r"https?:(?!//www\.w3\.org/1999/xhtml)|url\((?!#)|@import", text)
    for svg in re.findall(r"<svg [^>]*role=\"img\".*?</svg>", text, re.S):
        assert "<title>" in svg and "<desc>" in svg
    return text


def tables(text):
    """{id: rows of (texts, exact numbers)}"""
    out = {}
    for t in ET.fromstring(text.partition("\n")[2]).iter("{http://www.w3.org/1999/xhtml}table"):
        rows = [[("".join(cell.itertext()), cell.get("data-v")) for cell in row] for row in t.iter()
                if row.tag.endswith("}tr")]
        out[t.get("id")] = rows
    return out


def under(text, title):
    """The rows of the table that belongs to a chart."""
    after = text.partition(f"<h3>{title}</h3>")[2]
    return tables(text)[re.search(r'<table id="(\w+)"', after)[1]]


def write_files(folder, step):
    save_file({f"model.layers.{n}.w": numpy.full((300, 100), step if n == 2 else 1, "f4") for n in range(12)} |
              {"model.embed.weight": numpy.full((50, 100), step, "f4")}, folder / "m.safetensors")


def test_numbers_are_those_of_stalls(api, vckpt):
    for step in range(3):
        saved = ranks_save(api, "r", 4)
        for rank, copy in enumerate((2, 9 + step, 3, 4)):
            put_stats(api, "r", saved, rank, 4, rank * MS, copy)
    text, stalls = page_of(vckpt, api.path, "r"), vckpt.json("stalls", api.path, "r/latest")
    sums = {row[0][0]: row for row in tables(text)["sums"][1:]}
    rows = [("until ", row) for row in stalls["milestones"]] + [("busy in ", row) for row in stalls["phases"]]
    assert len(sums) == len(rows)
    for before, row in rows:
        cells = sums[before + row["name"]]
        assert [int(cell[1]) for cell in cells[1:6]] == [row[key] for key in ("median_ns", "max_ns", "min_ns", "ranks",
                                                                             "rank")]
        assert cells[6][0] == row["host"]
    heat = under(text, "Which rank was slow at what")
    names = [cell[0] for cell in heat[0][1:]]
    assert names == ["stall", "announced", *(p["name"] for p in stalls["phases"])] and len(heat) == 5
    for row, rank in zip(heat[1:], stalls["ranks"]):
        assert row[0][0] == f"rank {rank['rank']} on {rank['host']}"
        busy = {p["name"]: p["busy_ns"] for p in rank["phases"]}
        assert [int(cell[1]) for cell in row[1:]] == [rank["stall_ns"], rank["announced_ns"] - rank["submitted_ns"],
                                                      *(busy[name] for name in names[2:])]
    stall = under(text, "What the trainer waits for")
    assert [row[0][0] for row in stall[1:]] == ["step 0", "step 1", "step 2"]
    assert [row[2][0] for row in stall[1:]] == ["10.0 ms", "11.0 ms", "12.0 ms"]
    assert "Rank 1 was the last to be staged in 3 of 3 saves" in text
    ranks = text.partition("<h3>Which rank was slow at what</h3>")[2].partition("<h3>Timeline</h3>")[0]
    assert ranks.count("fill-opacity=\"1.00\"") == 2      # the legend's, and rank 1 at copy
    assert "rank 1 on node-0, copy: 22.0 ms, rank 1; the median is 7.00 ms" in ranks
    assert "step 0" not in "".join(row[0][0] for row in under(page_of(vckpt, api.path, "r", "-n", "2"),
                                                             "What the trainer waits for"))


def test_growth_and_what_changed(vckpt, store, tmp_path):
    """Imports: no stall, and the page says so; bytes are those of ls, changed ones those of info."""
    for step in range(3):
        write_files(tmp_path, step)
        vckpt("import", store, f"r/{step * 10}", tmp_path / "m.safetensors", "-q")
    text, listed = page_of(vckpt, store), vckpt.json("ls", store, "r")["steps"]
    assert "No stall is shown" in text and "no rank measured" in text and "Which rank was slow" not in text
    growth, each = under(text, "Growth"), under(text, "Bytes of each step")
    assert [row[0][0] for row in growth[1:]] == ["step 0", "step 10", "step 20"]
    info = vckpt.json("info", store, "r/20")
    changed = under(text, "What changed since the step before")
    assert [row[0][0] for row in changed[1:]] == ["embed", *(f"layers.{n}" for n in range(12))]
    bytes_of = {row[0][0]: int(row[1][1]) for row in changed[1:]}
    assert bytes_of == {"embed": 20000, **{f"layers.{n}": 120000 * (n == 2) for n in range(12)}}
    assert sum(bytes_of.values()) == info["bytes"] - info["shared_with_step_before"]["bytes"]
    assert ", ".join(f"{x['codec']} {x['pieces']}" for x in info["codecs"]) in text
    assert len(each) == 4 and len(under(text, "Which steps there are")) > 1
    runs = tables(text)["runs"]
    assert [cell[0] for cell in runs[1][:3]] == ["r", "3", "20"]
    assert int(runs[1][4][1]) == sum(s["bytes"] for s in listed)
    assert int(runs[1][5][1]) == sum(s["new_bytes"] for s in listed)


def test_one_step_and_no_step(vckpt, store, tmp_path):
    assert "The store has no step" in page_of(vckpt, store)
    write_files(tmp_path, 0)
    vckpt("import", store, "r", tmp_path / "m.safetensors", "-q")
    assert "one step only, and nothing to compare it with" in page_of(vckpt, store, "r")
    write_files(tmp_path, 0)
    vckpt("import", store, "q", tmp_path / "m.safetensors", "-q")
    text = page_of(vckpt, store)
    assert "<h1>Run q</h1>" in text and "<h1>Run r</h1>" not in text and "Bytes committed" in text
    vckpt("rm", store, "r/0", "-q")
    assert "The run has no step" in page_of(vckpt, store, "r")
    done = vckpt("report", store, "none", "--html", "-", check=False)
    assert (done.returncode, done.stdout) == (1, "") and "there is no run none" in done.stderr


def test_a_real_save(build, vckpt, tmp_path):
    """Raw and written bytes are those that the ranks measured."""
    lib, store = saverlib.Vckpt(build), tmp_path / "store"
    lib.store(store)
    data = [numpy.random.default_rng(r).standard_normal((512, 600)).astype("f4") for r in range(3)]

    def rank(r, saver):
        for _ in range(2):
            save = saver.save({f"model/layers.{r}.w": (data[r], {"flags": saverlib.ALONE})})
            save.committed()
            save.free()
    saverlib.ranks(lib, store, "r", 3, rank)
    text = page_of(vckpt, store, "r")
    said = [vckpt.json("stalls", store, f"r/{step}")["bytes"] for step in (0, 1)]
    rows = under(text, "Compression")
    assert [row[1][0] for row in rows[1:]] == ["3.5 MiB", "0 B"] and said[0]["staged"] == 3 * data[0].nbytes
    assert "</title></g>" in text.partition("<h3>Timeline</h3>")[2]
    assert [row[1][1] for row in under(text, "What changed since the step before")[1:]] == ["0"] * 3


def test_what_a_store_says_is_only_text(api, vckpt, tmp_path):
    """Names of hosts and phases, with tags, quotes, control characters and bytes that are no UTF-8."""
    for _ in range(2):
        saved = ranks_save(api, "r", 2)
        for rank in range(2):
            put_stats(api, "r", saved, rank, 2, host=f"{EVIL}{rank}\x1b[31m\u202e".encode(),
                      timings=[Timing(EVIL[:30].encode() + bytes([k]), 5 * MS, 1, T0, T0 + MS) for k in range(1, 9)] +
                      [Timing(b"<b>%d" % k, MS, 1, T0 + k, T0 + MS) for k in range(30)])
    text = page_of(vckpt, api.path, "r")
    assert "<script>alert" not in text and "&lt;/script&gt;" in text and "\\x1b[31m" in text and "<b>0" not in text
    assert "further phases are left out" in text
    saved = ranks_save(api, "clock", 2)
    top = 2**64 - 1
    put_stats(api, "clock", saved, 0, 2, submitted_ns=1, staged_ns=top, committed_ns=top, bytes_staged=top,
              timings=[Timing(b"copy", top, top, 1, top), Timing(b"x", top, 5, top, 1)])
    put_stats(api, "clock", saved, 1, 2, 10**18)
    page_of(vckpt, api.path, "clock")
    with api.list("far") as l:
        for step, at in ((5, -2**63), (2**63 - 1, 2**63 - 1)):
            e = api.entry(COMMIT, step=step, attempt=b"%016x-0" % (step % 99), replaces=NONE)
            e.commit.bytes = e.commit.new_bytes = top
            e.commit.time_ns = at
            l.put(e)
    assert "9223372036854775807" in page_of(vckpt, api.path, "far")


def test_tensors_with_names_that_play_tricks(vckpt, store, tmp_path):
    for step in range(2):
        save_file({f"{EVIL}.{n}.\x1b[2J": numpy.full(3000, step, "f4") for n in range(3)} |
                  {f"{'y' * 500}.{n}": numpy.full(30, step, "f4") for n in range(200)},
                  tmp_path / "m.safetensors")
        vckpt("import", store, "r", tmp_path / "m.safetensors", "-q")
    text = page_of(vckpt, store, "r")
    rows = under(text, "What changed since the step before")
    assert "&lt;!--]]&gt;" in text and len(rows) == 49
    assert sum(int(row[1][1]) for row in rows[1:]) == 3 * 12000 + 200 * 120


def test_damage_is_counted(api, vckpt):
    """A page is made of the rest, and the exit status says so."""
    for _ in range(3):
        saved = ranks_save(api, "r", 2)
        for rank in range(2):
            put_stats(api, "r", saved, rank, 2)
    path = api.path / f"stats/r/2.{saved[1]}/1"
    path.write_bytes(path.read_bytes()[:-3])
    text = page_of(vckpt, api.path, "r", code=3)
    assert "0 steps and 1 file of measures cannot be read" in text
    manifest = vckpt.json("info", api.path, "r/1")["manifest"]
    path = api.path / "runs/r/manifests" / manifest
    raw = bytearray(path.read_bytes())
    raw[60] ^= 1
    path.write_bytes(raw)
    text = page_of(vckpt, api.path, "r", code=3)
    assert "1 step and" in text and "What changed is not shown" in text
    assert len(under(text, "What the trainer waits for")) == 3


def forged(api, run, world, step, time_ns=0, nbytes=1000, new=10):
    """A step whose manifest names parts that are not there: its measures and its entry are all that is read."""
    attempt, parts = b"%016x-0" % step, []
    for r in range(world):
        a = sample_announcement(r, world, r == 0, run=run.encode(), attempt=attempt, step=step)
        a.packs, a.npacks = table(PackUse, [PackUse(attempt + b"-%d-meta" % r, 1 << 20, 64)]), 1
        a.part.pack = a.layout_ref.pack = 0
        if r == 0:
            a.headers[0].ref.pack = 0
        parts.append(a)
    code, body, hex_ = manifest_make(Proto(api.lib).lib, parts)
    assert code == 0, body
    assert api.lib.store_record_put(c.c_void_p(api.p.contents.storage), f"runs/{run}/manifests/{hex_.hex()}".encode(),
                                    3, (c.c_uint8 * 16)(*api.id), body, c.c_size_t(len(body))) == 0
    with api.list(run) as l:
        e = api.entry(COMMIT, step=step, attempt=attempt, replaces=NONE, manifest=StoreDigest.from_buffer_copy(hex_))
        e.commit.time_ns, e.commit.bytes, e.commit.new_bytes = time_ns, nbytes, new
        return step, l.put(e), attempt.decode()


def test_many_ranks(api, vckpt, scale):
    """Neighbours share a row, and the slowest has one of its own."""
    world = scale(300, 1000)
    saved = forged(api, "r", world, 3)
    for r in range(world):
        put_stats(api, "r", saved, r, world, copy_ms=90 if r == 217 else 2 + r % 3)
    rows = under(page_of(vckpt, api.path, "r"), "Which rank was slow at what")
    assert len(rows) == 49 and rows[1][0][0].startswith("rank 217 on ")
    assert max(int(row[1][1]) for row in rows[2:6]) < 10 * MS
    bins = [re.fullmatch(r"ranks (\d+) to (\d+)", row[0][0]) for row in rows[6:]]
    assert [int(b[1]) for b in bins] == [0, *(int(b[2]) + 1 for b in bins[:-1])] and int(bins[-1][2]) == world - 1
    slow = [row for row, b in zip(rows[6:], bins) if int(b[1]) <= 217 <= int(b[2])][0]
    assert slow[1][1] == rows[1][1][1] == str(91 * MS)


def test_many_steps(api, vckpt, scale):
    """The page does not grow with the steps, and only the newest manifests are read."""
    n = scale(300, 3000)
    for step in range(n):
        saved = forged(api, "r", 1, step, step * DAY, 1000 + step, 10)
        if step >= n - 100:
            put_stats(api, "r", saved, 0, 1)
    text = page_of(vckpt, api.path, "r")
    assert len(text) < 250_000
    growth = under(text, "Growth")
    assert len(growth) == 201 and growth[-1][0][0].endswith(f"to {n - 1}") and "mean of neighbouring" in text
    there = under(text, "Which steps there are")
    assert len(there) == 101 and sum(int(row[1][0]) for row in there[1:]) == n
    keep = {row["manifest"] for row in vckpt.json("ls", api.path, "r")["steps"][-5:]}
    for path in (api.path / "runs/r/manifests").rglob("*"):
        if path.is_file() and path.name not in keep:
            path.unlink()
    assert len(keep) == 5 and "cannot be read" not in page_of(vckpt, api.path, "r", "-n", "5")
    assert "1 step and" in page_of(vckpt, api.path, "r", "-n", "6")


def test_the_script_is_the_one_that_the_page_allows(vckpt, store):
    text = page_of(vckpt, store)
    script = re.search(r"<script>(.*?)</script>", text, re.S)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in text and "default-src 'none'" in text


def test_the_file(vckpt, store, tmp_path):
    """It appears at once or not at all, with the mode that files get; a link stays one."""
    page = tmp_path / "page.html"
    assert vckpt("report", store, "--html", page).stdout.startswith(f"{page}: ")
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(page.stat().st_mode) == 0o666 & ~mask
    (tmp_path / "link").symlink_to("page.html")
    page.write_text("old")
    page.chmod(0o640)
    vckpt("report", store, "--html", tmp_path / "link", "-q")
    assert (tmp_path / "link").is_symlink() and page.read_text().startswith("<!DOCTYPE html>")
    assert stat.S_IMODE(page.stat().st_mode) == 0o640
    done = vckpt("report", store, "--html", tmp_path / "no/page", check=False)
    assert done.returncode == 1 and "No such file" in done.stderr
    for where in ("/dev/full", "-"):
        with open("/dev/full", "w") as full:
            done = subprocess.run([vckpt.path, "report", store, "--html", where], stdout=full, stderr=subprocess.PIPE)
        assert done.returncode == 1 and b"No space left" in done.stderr
    assert sorted(os.listdir(tmp_path)) == ["link", "page.html", "store"]


@pytest.mark.parametrize("args", [(), ("--html", ""), ("--html", "-", "--json"), ("r/1", "--html", "-"),
                                  ("--html", "-", "-n", "0"), ("--html", "-", "-n", "x"), ("a", "b", "--html", "-")])
def test_usage(vckpt, store, args):
    done = vckpt("report", store, *args, check=False)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.startswith("vckpt report: ")


# ---- in a browser ----

PROBE = """<script>
function at(el, dx, dy) { var b = el.getBoundingClientRect(); el.dispatchEvent(new PointerEvent('pointermove',
  {bubbles: true, clientX: b.left + dx * b.width, clientY: b.top + dy * b.height})); }
var tip = document.getElementById('tip'), out = [], wide = [];
at(document.querySelector('svg[data-t]'), 0.97, 0.5); out.push(tip.hidden ? '' : tip.textContent);
at(document.querySelector('svg g rect.hot'), 0.5, 0.5); out.push(tip.hidden ? '' : tip.textContent);
at(document.body, 0, 0); out.push(String(tip.hidden));
document.querySelectorAll('svg text').forEach(function (t) { var a = t.getBoundingClientRect(),
  b = t.closest('svg').getBoundingClientRect();
  if (a.left < b.left - 1 || a.right > b.right + 1) wide.push(t.textContent); });
var said = document.createElement('pre'); said.id = 'said';
said.textContent = JSON.stringify([out, wide, document.documentElement.scrollWidth <= innerWidth]);
document.body.appendChild(said);
</script></body>"""


@pytest.mark.full
@pytest.mark.parametrize("world", [1, 8, 300])
def test_in_a_browser(api, vckpt, tmp_path, world):
    """It shows at the pointer what the tables say; no label leaves its picture; no forged script runs."""
    if not shutil.which("chromium"):
        pytest.skip("chromium is not installed (Debian: chromium)")
    for step in range(3):
        saved = forged(api, "r", world, step, T0 + step * DAY)
        for rank in range(world):
            put_stats(api, "r", saved, rank, world, rank * MS, 2 + rank % 5, host=f"{EVIL}-{rank}".encode())
    page = tmp_path / "page.html"
    vckpt("report", api.path, "r", "--html", page, check=False)
    text = page.read_text()
    text = re.sub(r'<meta http-equiv="Content-Security-Policy".*?/>', "", text).replace("</body>", PROBE)
    if world == 1:  # no map
        text = text.replace("'svg g rect.hot'", "'svg g rect.k0'")
    page.write_text(text)
    done = subprocess.run(["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1040,1600",
                           f"--user-data-dir={tmp_path}/profile", "--dump-dom", page.as_uri()], capture_output=True,
                          text=True, timeout=120)
    said = re.search(r'<pre id="said">(.*?)</pre>', done.stdout, re.S)
    assert said, done.stderr[-2000:]
    (point, cell, hidden), wide, fits = json.loads(html.unescape(said[1]))
    assert point.startswith("step 2\nstall, median rank: ") and point.count("\n") == 3
    assert cell.startswith("rank ") and (EVIL[:9] in cell or world == 1) and hidden == "true" and not wide and fits
