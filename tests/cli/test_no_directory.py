# SPDX-License-Identifier: Apache-2.0
"""Something else is where a directory of a store should be: every command ends, with a sentence that names it; nothing
is taken for damage of what is behind it, and nothing is lost."""
import os
import pathlib
import shutil
import subprocess
import tempfile

import numpy
import pytest
from safetensors.numpy import save_file

LINK, OTHER = "is a symbolic link, where a directory should be", "is no directory, where a directory should be"
# what each command says of it, where it needs the directory
COMMANDS = {"ls": ["ls", "{}"], "ls run": ["ls", "{}", "r"], "info": ["info", "{}", "r/1"], "verify": ["verify", "{}"],
            "verify run": ["verify", "{}", "r"], "gc": ["gc", "{}", "--grace", "0"],
            "abort": ["abort", "{}", "r", "aaaaaaaaaaaaaaaa-1-0"], "import": ["import", "{}", "r/9", "{source}"],
            "import next": ["import", "{}", "r", "{source}"], "export": ["export", "{}", "r/1", "{out}"],
            "cat": ["cat", "{}", "r/1/manifest.json"], "mend": ["mend", "{}"], "stalls": ["stalls", "{}", "r/1"],
            "report": ["report", "{}", "r", "--html", "{out}.html"],
            "rm": ["rm", "{}", "r/1", "-q"]}
ALL = set(COMMANDS)
NEEDED_BY = {"runs": ALL, "runs/r": ALL,
             "runs/r/manifests": ALL - {"ls", "ls run", "abort", "rm"},
             "incoming": {"verify", "verify run", "gc", "abort", "import", "import next", "mend"},
             "incoming/r": {"import", "import next"},
             "hosts": {"verify", "verify run", "gc", "abort", "import", "import next", "mend"},
             "trash": set(), "index": set()}


@pytest.fixture(scope="module")
def filled(vckpt):
    with tempfile.TemporaryDirectory() as name:
        for i in range(2):
            save_file({"w": numpy.full((300, 200), i, "f4")}, f"{name}/{i}.safetensors")
        vckpt("init", f"{name}/store")
        vckpt("import", f"{name}/store", "r/1", f"{name}/0.safetensors", "-q")
        vckpt("import", f"{name}/store", "q/1", f"{name}/1.safetensors", "-q")
        yield name


def replace(path, kind):
    """Moves the directory away; returns what puts it back."""
    store = next(p for p in path.parents if (p / "vckpt.store").exists())
    aside = store.parent / f"{path.name}.aside"
    path.rename(aside)
    if kind == "link":
        path.symlink_to(aside)
    elif kind == "dangling":
        path.symlink_to("nowhere")
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.write_text("a file")

    def back():
        path.unlink()
        aside.rename(path)
    return back


def packs(store):
    return {p.name: p.stat().st_ino for p in (store / "packs").rglob("*.pack")}


@pytest.mark.parametrize("kind", ["link", "dangling", "file", "fifo"])
@pytest.mark.parametrize("name", NEEDED_BY)
def test_every_command_ends(vckpt, filled, tmp_path, name, kind):
    store = tmp_path / "s/store"
    shutil.copytree(f"{filled}/store", store)
    (store / name).mkdir(exist_ok=True)
    before, back = packs(store), replace(store / name, kind)
    sentence = f"{store}/{name} {LINK if kind in ('link', 'dangling') else OTHER}: move the directory there"
    for command, words in COMMANDS.items():
        args = [w.format(store, source=f"{filled}/1.safetensors", out=tmp_path / "out") for w in words]
        done = vckpt(*args, check=False, timeout=60)
        assert len(done.stderr) < 1000, command
        if command in NEEDED_BY[name]:
            assert done.returncode == 1 and sentence in done.stderr, (command, done.stderr)
        elif command == "verify":
            assert done.returncode == 3 and name in done.stdout, done.stdout
        else:
            assert sentence not in done.stderr, (command, done.stderr)
    done = vckpt("ls", store, check=False).stdout
    assert ("q" in done) == (name != "runs")                    # another run's steps are there
    back()
    assert set(before) <= set(packs(store))
    vckpt("verify", store)


@pytest.mark.parametrize("name, kind", [("runs/r", "link"), ("runs/r", "fifo"), ("runs/q", "file"),
                                        ("runs/r/manifests", "dangling"), ("runs/q/manifests", "file")])
def test_verify_goes_on_with_other_runs(vckpt, filled, tmp_path, name, kind):
    """A run that cannot be read is named; damage in another is found, and this one's says so."""
    store, bad, good = tmp_path / "s/store", name.split("/")[1], "q" if "/r" in name else "r"
    shutil.copytree(f"{filled}/store", store)
    back = replace(store / name, kind)
    for more in [], ["--paranoid"]:
        done = vckpt("verify", store, *more, check=False, timeout=60)
        assert done.returncode == 1 and "1 step," in done.stdout and "no faults, 1 run could not be read" in done.stdout
        assert done.stderr.startswith(f"vckpt verify: run {bad}: {store}/{name} is ")
        assert done.stderr.count("\n") == 1 and "damage" not in done.stdout
    listed = vckpt.json("verify", store, check=False)
    assert [u["run"] for u in listed["unread"]] == [bad] and listed["faults"] == 0 and listed["steps"] == 1
    assert vckpt("verify", store, good).returncode == 0
    manifest, = (store / "runs" / good / "manifests").iterdir()
    manifest.write_bytes(manifest.read_bytes()[:-9] + b"x" * 9)
    done = vckpt("verify", store, check=False)
    assert done.returncode == 3 and f"touches {good}/step-00000001" in done.stdout and f"run {bad}: " in done.stderr
    for pack in store.rglob("*-model.pack"):
        pack.write_bytes(pack.read_bytes()[:-1])
    done = vckpt("verify", store, check=False)
    assert done.returncode == 3 and done.stdout.count("; touches no step of the runs that could be read\n") == 2, done
    back()
    done = vckpt("verify", store, check=False)
    assert done.returncode == 3 and not done.stderr


@pytest.mark.parametrize("kind", ["link", "dangling", "file", "fifo"])
def test_marks_have_no_place(vckpt, filled, tmp_path, kind):
    """gc deletes nothing whose mark it cannot put, and nothing behind a link."""
    store = tmp_path / "s/store"
    shutil.copytree(f"{filled}/store", store)
    (store / "trash").mkdir(exist_ok=True)
    replace(store / "trash", kind)
    behind = tmp_path / "s/trash.aside/keep"
    behind.write_text("kept")
    vckpt("rm", store, "q/1", "-q")
    for _ in range(2):
        done = vckpt("gc", store, check=False, timeout=60)
        what = LINK if kind in ("link", "dangling") else OTHER
        assert done.returncode == 1 and f"{store}/trash {what}" in done.stderr
        assert len(packs(store)) == 4, "nothing was marked, so nothing is deleted"
    assert vckpt("gc", store, "--grace", "0").returncode == 0 and len(packs(store)) == 2
    assert behind.read_text() == "kept" and os.path.lexists(store / "trash")


def test_a_directory_that_cannot_be_entered(vckpt, filled):
    if os.geteuid() != 0 or not shutil.which("setpriv"):
        pytest.skip("needs root and setpriv, to become another user")
    place = pathlib.Path(tempfile.mkdtemp())                    # which the other user may enter
    os.chmod(place, 0o755)
    store = place / "store"
    shutil.copytree(f"{filled}/store", store)
    for name in ("runs/r", "runs"):
        os.chmod(store / name, 0o600)
        for words in (["ls", "{}"], ["ls", "{}", "r"], ["verify", "{}"], ["gc", "{}"]):
            # setpriv itself runs the program: who it becomes may not enter every folder of a build
            done = subprocess.run(["setpriv", "--reuid=20001", "--clear-groups", vckpt.path,
                                   *[w.format(store) for w in words]], capture_output=True, text=True, timeout=60,
                                  env={name: value for name, value in os.environ.items() if name != "VCKPT_STORE"})
            assert done.returncode == 1 and len(done.stderr) < 1000, done.stderr
            assert "Permission denied" in done.stderr or (
                f"you may not read the directory {store}/runs" in done.stderr and
                ": root can change that" in done.stderr)
            if words == ["verify", "{}"] and name == "runs/r":
                assert "1 step," in done.stdout and "1 run could not be read" in done.stdout, done
        os.chmod(store / name, 0o755)
    vckpt("verify", store)
    shutil.rmtree(place)


def test_a_directory_in_the_place_of_packs(vckpt, filled, tmp_path):
    """A step whose packs cannot be reached says so; no one is asked to look for damage in what is not here."""
    store = tmp_path / "s/store"
    shutil.copytree(f"{filled}/store", store)
    back = replace(store / "packs", "link")
    for words in (["info", store, "r/1"], ["export", store, "r/1", tmp_path / "out"], ["verify", store],
                  ["verify", store, "r/1"], ["mend", store], ["import", store, "r", f"{filled}/1.safetensors"]):
        done = vckpt(*words, check=False, timeout=60)
        assert done.returncode == 1 and f"{store}/packs {LINK}" in done.stderr, (words, done.stderr)
    assert not (store / "damaged").exists()
    back()
    vckpt("verify", store)
