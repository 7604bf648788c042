# SPDX-License-Identifier: Apache-2.0
"""vckpt abort: ends a save that is stuck, says whose it was, and leaves the run as if a rank had given up."""
import json
import threading

import pytest

from ranklib import Launch, Ranks, api  # noqa: F401
from storelib import EABORTED, Attempt, Failed, save
from test_incoming import SELDOM_MS, close, elsewhere, opened, write
from test_schema import check, manual

ABORTED = 2


def abort(vckpt, api, *words, code=0):  # noqa: F811
    done = vckpt("abort", api.path, *words, "--json", check=False)
    assert done.returncode == code, done
    out = json.loads(done.stdout)
    check(out, manual()["abort"])
    return out, done.stderr


def test_nothing_to_abort(api, vckpt):  # noqa: F811
    save(api, "r")
    for words, text in ((("r",), "no save under way"), (("x",), "there is no run x"),
                        (("r", "0123456789abcdef-7"), "whose attempt is 0123456789abcdef-7"),
                        (("../r",), "is not the name of a run")):
        done = vckpt("abort", api.path, *words, check=False)
        assert done.returncode == 1 and text in done.stderr, done
    assert vckpt("abort", api.path, check=False).returncode == 2
    assert vckpt("abort", api.path, "r", "--reason", "x" * 801, check=False).returncode == 2
    with api.list("r") as l:
        assert l.next == 1


def test_the_ranks_are_told(api, vckpt):  # noqa: F811
    """Both ranks live; one waits for the other. Its wait ends with the person's words, and its packs go."""
    launches = opened(api, "r", "one", 2)
    attempts = [launch.begin() for launch in launches]
    write(attempts[0])
    told = []

    def wait():
        try:
            attempts[0].wait()
        except Failed as e:
            told.append(e)
    t = threading.Thread(target=wait)
    t.start()
    out, warned = abort(vckpt, api, "r", "--reason", "the node is to be repaired")
    t.join(120)
    assert (not t.is_alive() and told[0].code == EABORTED and
            "the node is to be repaired, says vckpt abort on" in told[0].text)
    assert (out["attempt"], out["step"], out["state"], out["undecided"]) == (attempts[0].name, 0, "alive", [])
    assert "a writer of this save is alive on" in warned
    assert not (api.path / "incoming/r" / attempts[0].name).exists()
    with pytest.raises(Failed) as e:
        write(attempts[1])
        attempts[1].wait()
    assert e.value.code == EABORTED
    close([], attempts)
    assert not list(api.path.glob("packs/*/*.pack"))
    again = [launch.begin() for launch in launches]     # and the next save works
    for a in again:
        write(a)
    assert len({a.wait() for a in again}) == 1
    close(launches, again)


def die(api, rank):  # noqa: F811
    launch = Launch(api, "r", "dead", rank, 2)
    if rank == 0:
        write(launch.begin())
    api.say("here")
    api.hear()


def test_what_the_dead_left(api, vckpt):  # noqa: F811
    with Ranks(api, 2, die) as ranks:
        ranks.said(range(2), "here")
        for r in range(2):
            ranks.kill(r)
    out, warned = abort(vckpt, api, "r")
    assert out["state"] == "dead" and "given up by hand, says vckpt abort on" in out["reason"] and not warned
    with api.list("r", whole=True) as l:
        assert l.next == 2 and l.attempt(out["attempt"])[0] == ABORTED
    text = vckpt("abort", api.path, "r", out["attempt"]).stdout
    assert "was aborted before: it was given up by hand" in text
    with api.list("r") as l:
        assert l.next == 2
    vckpt("gc", api.path, "--grace", "0")
    assert not list(api.path.glob("packs/*/*.pack")) and not list((api.path / "incoming").glob("*/*"))


def test_several_are_listed_and_one_is_named(api, vckpt):  # noqa: F811
    """A second launch of a run would abort the first one's; two imports stand beside each other."""
    attempts = [Attempt(api, "r", n) for n in (3, 4)]
    names = sorted(a.name for a in attempts)
    out, said = abort(vckpt, api, "r", code=1)
    assert (sorted(out["undecided"]) == names and out["attempt"] is None and
            "has 2 saves under way: name the attempt" in said)
    done = vckpt("abort", api.path, "r", check=False)
    assert done.returncode == 1 and all(name in done.stdout for name in names) and "step-00000004" in done.stdout
    with api.list("r") as l:
        assert l.next == 0
    out, _ = abort(vckpt, api, "r", attempts[1].name)
    assert (out["attempt"], out["step"], out["undecided"]) == (attempts[1].name, 4, [attempts[0].name])
    for a in attempts:
        a.free()


def test_what_has_committed_stays(api, vckpt):  # noqa: F811
    a = save(api, "r")
    done = vckpt("abort", api.path, "r", a.name, check=False)
    assert done.returncode == 1 and "has committed: its step is visible" in done.stderr
    assert [s["step"] for s in vckpt.json("ls", api.path, "r")["steps"]] == [0]


def test_another_hosts_writer(api, vckpt):  # noqa: F811
    launches = opened(api, "r", "one", 2, heartbeat_ms=SELDOM_MS)
    attempts = [launch.begin() for launch in launches]
    with elsewhere(api, launches[0]):
        out, warned = abort(vckpt, api, "r")
    assert out["state"] == "unknown" and "may be alive on elsewhere" in warned
    close(launches, attempts)


def test_a_begin_that_cannot_be_read(api, vckpt):  # noqa: F811
    """It keeps the collector from deleting anything; an abort gives the store back."""
    a = Attempt(api, "r", 3)
    begin = api.path / "incoming/r" / a.name / "begin"
    begin.chmod(0o600)
    begin.write_bytes(b"x" * begin.stat().st_size)
    (heart,) = (api.path / "hosts").iterdir()
    assert vckpt("gc", api.path, check=False).returncode == 3
    out, _ = abort(vckpt, api, "r")
    assert out["step"] is None and heart.exists()
    vckpt("gc", api.path)
    a.free()
