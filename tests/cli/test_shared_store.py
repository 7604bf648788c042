# SPDX-License-Identifier: Apache-2.0
"""A store that the members of a group share: each does to what the others made whatever a single user may do."""
import multiprocessing
import os
import pathlib
import shutil
import signal
import stat
import subprocess
import tempfile
import time

import numpy
import pytest
from ranklib import Launch
from safetensors.numpy import save_file
from storelib import Api

ANN, BOB, EVE, TEAM = 20001, 20002, 20003, 20100     # users of groups of their own; all but EVE are in TEAM. No names
fork = multiprocessing.get_context("fork")

pytestmark = pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"),
                                reason="needs root and setpriv, to become other users")


class Team:
    def __init__(self, vckpt, folder):
        self.program, self.folder, self.store = vckpt.path, folder, folder / "store"

    def __call__(self, user, *args, umask=0o077, ok=True, before=()):
        env = {k: v for k, v in os.environ.items() if k != "VCKPT_STORE"}
        env["XDG_CACHE_HOME"] = str(self.folder / f"cache{user}")
        groups = ["--clear-groups"] if user == EVE else [f"--groups={TEAM}"]
        done = subprocess.run([*before, "setpriv", f"--reuid={user}", f"--regid={user}", *groups, self.program,
                               *map(str, args)], capture_output=True, text=True, env=env, umask=umask, timeout=120)
        if ok:
            assert (done.returncode, done.stderr) == (0, ""), args
        return done

    def root(self, mode, group=TEAM):
        self.store.mkdir()
        os.chown(self.store, ANN, group)
        os.chmod(self.store, mode)

    def imports(self, user, target, file, **more):
        return self(user, "import", self.store, target, self.folder / f"{file}.safetensors", "-q", **more)

    def refused(self, user, *args):
        done = self(user, *args, umask=0o022, ok=False)
        assert done.returncode == 1 and done.stdout == ""
        return done.stderr.partition(": ")[2].rstrip("\n")

    def modes(self):
        """(of directories, of files, groups) but for those of indexes."""
        all_ = [p for p in [self.store, *self.store.rglob("*")] if "index" not in p.parts]
        return ({stat.S_IMODE(p.stat().st_mode) for p in all_ if p.is_dir()},
                {stat.S_IMODE(p.stat().st_mode) for p in all_ if p.is_file()}, {p.stat().st_gid for p in all_})


@pytest.fixture
def team(vckpt):
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        os.chmod(folder, 0o1777)
        for i, file in enumerate("mn"):
            data = {"w": numpy.random.default_rng(i).standard_normal((300, 200)).astype("f4")}
            save_file(data, folder / f"{file}.safetensors")
            os.chmod(folder / f"{file}.safetensors", 0o644)
        team = Team(vckpt, folder)
        if team(ANN, "--version", ok=False).returncode:
            pytest.skip("the build folder is not readable for others")
        yield team


@pytest.mark.parametrize("umask", [0o022, 0o077])
@pytest.mark.parametrize("mode, files", [(0o2775, 0o664), (0o2770, 0o660), (0o770, 0o660)])
def test_members_do_everything(team, mode, files, umask):
    team.root(mode)
    team(ANN, "init", team.store, umask=umask)
    team.imports(ANN, "r/1", "m", umask=umask)
    team.imports(BOB, "r/2", "n", umask=umask)
    team.imports(BOB, "q/1", "m", umask=umask)
    team.imports(ANN, "q/2", "n", umask=umask)
    assert team.modes() == ({mode}, {files}, {TEAM})
    index = team.store / "index"
    assert index.stat().st_uid == ANN and stat.S_IMODE(index.stat().st_mode) & 0o777 == mode & 0o755
    assert list((team.folder / f"cache{BOB}/vckpt").iterdir())
    team(ANN, "rm", team.store, "r/2")
    team(BOB, "rm", team.store, "r/1")
    for user in (ANN, BOB):
        team(user, "verify", team.store)
        assert "deleted" in team(user, "gc", team.store, "--grace", "0").stdout
        team(user, "mend", team.store)
    assert team(BOB, "ls", team.store, "q", "-q").stdout.count("step-") == 2
    assert team.modes() == ({mode}, {files}, {TEAM})
    done = team(EVE, "verify", team.store, ok=False)
    assert (done.returncode == 0) == bool(mode & 0o007), done.stderr


def test_notes_and_leftovers_of_others(team):
    team.root(0o2770)
    team(ANN, "init", team.store)
    team.imports(ANN, "r/1", "m")
    pack = max((team.store / "packs").rglob("*.pack"), key=lambda p: p.stat().st_size)
    good = pack.read_bytes()
    pack.write_bytes(good[:5000] + b"\0\1\2\3" * 8 + good[5032:])
    assert team(BOB, "verify", team.store, ok=False).returncode == 3
    note, = (team.store / "damaged").iterdir()
    assert note.stat().st_uid == BOB
    pack.write_bytes(good)
    team(ANN, "verify", team.store)
    assert not note.exists()
    (team.store / "directory.tmp.0123456789abcdef").mkdir(mode=0o700)           # of a writer that was killed
    assert "directory.tmp.0123456789abcdef: a directory" in team(BOB, "gc", team.store).stdout
    assert not list(team.store.glob("directory*"))


def save_for_ever(lib, store, say):
    os.setgroups([TEAM])
    os.setresgid(ANN, ANN, ANN)
    os.setresuid(ANN, ANN, ANN)
    os.umask(0o077)
    launch = Launch(Api(lib, store, init=False), "r", "a launch", 0, 1, heartbeat_ms=800)
    say.send(launch.begin().name)
    time.sleep(100)


@pytest.mark.parametrize("hidden", ["0", "1", "2"])
def test_the_save_of_another_member(own_mounts, team, lib, hidden):
    """It is left alone while its process lives, also where /proc does not show that; then its leftovers are cleared."""
    hide = [*own_mounts, "sh", "-c", f'mount -t proc -o hidepid={hidden} proc /proc && exec "$@"', "sh"]
    if subprocess.run([*hide, "true"], capture_output=True).returncode:
        pytest.skip("no /proc can be mounted")
    team.root(0o2770)
    team(ANN, "init", team.store)
    here, there = fork.Pipe()
    saving = fork.Process(target=save_for_ever, args=(lib, team.store, there))
    saving.start()
    there.close()
    try:
        assert here.poll(60)
        folder = team.store / "incoming/r" / here.recv()
        team(BOB, "gc", team.store, "--heartbeat", "20s", before=() if hidden == "0" else hide)
        assert folder.exists()
    finally:
        os.kill(saving.pid, signal.SIGKILL)
        saving.join(60)
    team.imports(BOB, "r/1", "m")
    team(BOB, "gc", team.store)
    assert not folder.exists() and not list((team.store / "hosts").iterdir())


def test_who_is_not_in_the_group(team):
    team.root(0o2775)
    team(ANN, "init", team.store)
    team.imports(ANN, "r/1", "m")
    source = team.folder / "n.safetensors"
    for args in (["import", team.store, "r/2", source], ["rm", team.store, "r/1"]):
        assert team.refused(EVE, *args) == (
            f"you may not write to the store {team.store}: only user {ANN} and the group {TEAM} may, and you are not "
            f"in that group (id shows yours; who was added to a group has to log in again)")


def test_a_store_that_is_shared_later(team):
    """The command of the manual opens what was made before."""
    team.root(0o755, ANN)
    team(ANN, "init", team.store, umask=0o022)
    team.imports(ANN, "r/1", "m", umask=0o022)
    os.chown(team.store, ANN, TEAM)
    os.chmod(team.store, 0o2775)
    for args, where in ((["import", team.store, "r/2", team.folder / "n.safetensors"], "hosts"),
                        (["rm", team.store, "r/1"], "runs/r")):
        assert team.refused(BOB, *args) == (
            f"you may not write in the directory {team.store}/{where} (it belongs to user {ANN}, mode 0755), though "
            f"the group {TEAM} may write to the store; user {ANN} or root can open it to the group: chgrp -R, chmod -R "
            f"g+rwX, and chmod g+s for the directories; vckpt(1), SHARED STORES, has the commands")
    os.chmod(team.store / "runs/r", 0o700)
    assert team.refused(BOB, "gc", team.store).startswith("run r: its list cannot be read: ")
    os.chmod(team.store / "runs/r", 0o755)
    manual = (pathlib.Path(__file__).parents[2] / "docs/man/vckpt.1").read_text()
    commands = manual[manual.index(".Sh SHARED STORES"):].split(".Bd -literal\n")[1].split(".Ed")[0]
    commands = commands.replace("/data/store", str(team.store)).replace("$ ", "").replace("GROUP", str(TEAM))
    subprocess.run(["sh", "-e"], input=commands, text=True, check=True)
    assert team.modes() == ({0o2775}, {0o664}, {TEAM})
    team.imports(BOB, "r/2", "n")
    team.imports(ANN, "r/3", "n")
    team(BOB, "rm", team.store, "r/1")
    team(BOB, "gc", team.store, "--grace", "0")
    assert (team.store / "index").stat().st_uid == ANN


# ---- vckpt init --shared ----

def test_init_shared(team):
    done = team(ANN, "init", team.folder / "a/b", f"--shared={TEAM}", umask=0o022)
    assert done.stdout.splitlines()[-1] == (
        f"{team.folder}/a/b is a store now of all in the group {TEAM}; next: vckpt import {team.folder}/a/b RUN SOURCE")
    for path, group, mode, file in (("a/b", TEAM, 0o2775, 0o664), ("c", ANN, 0o2770, 0o660)):
        if path == "c":
            team(ANN, "init", team.folder / path, "--shared")
        found = [(team.folder / path / name).stat() for name in (".", "vckpt.store", "reserve")]
        assert [(stat.S_IMODE(f.st_mode), f.st_gid) for f in found] == [(m, group) for m in (mode, file, file)]
    assert "nothing was changed" in team(BOB, "init", team.folder / "a/b", "--shared", "--exist-ok").stdout
    assert (team.folder / "a/b").stat().st_mode & 0o7777 == 0o2775


def test_init_shared_takes_an_empty_directory(team):
    team.root(0o700)
    team(ANN, "init", team.store, "--shared")
    assert team.modes() == ({0o2770}, {0o660}, {TEAM})


def test_init_shared_is_refused(team):
    team.root(0o755, 1)
    assert "cannot be opened to its group 1: you have to be in it" in team.refused(ANN, "init", team.store, "--shared")
    assert "cannot be given to the group 1: Op" in team.refused(ANN, "init", team.folder / "new", "--shared=1")
    assert "Operation not permitted" in team.refused(BOB, "init", team.store, "--shared")
    (team.store / "file").touch()
    assert "the directory is not empty" in team.refused(ANN, "init", team.store, f"--shared={TEAM}")
    assert stat.S_IMODE(team.store.stat().st_mode) == 0o755 and not (team.folder / "new").exists()
    done = team(ANN, "init", team.folder / "new", "--shared=no-such", ok=False)
    assert done.returncode == 2 and "--shared=no-such: there is no such group" in done.stderr
