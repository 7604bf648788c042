# SPDX-License-Identifier: Apache-2.0
"""Handles that go at any moment: while their save fails, while somebody waits for it, before and after it is decided.
Each script runs in a process of its own, whose freed memory is overwritten, so that a use after free is seen without a
sanitizer, too; where a moment has to be met, threads sleep after each lock (unlock_delay.c)."""
import os
import subprocess
import sys

import pytest


START = """
import ctypes, random, sys, threading, time
import numpy
from saverlib import Failed, Vckpt
api = Vckpt(sys.argv[1])
store = api.store(sys.argv[2])
slow = ctypes.CDLL(sys.argv[1] + "/tests/libunlock_delay.so")
delay = slow.unlock_delay
DATA = numpy.arange(5000)


def doomed(saver, n):
    "Submitted, and certain to fail, in some milliseconds."
    return saver.save({"model/w": DATA}, bases=[f"run/{n}"])


def closed(saver):
    "The sentence of what close tells, or nothing."
    try:
        saver.close()
    except Failed as e:
        return e.text
    finally:
        saver.free()
"""


def run(build, tmp_path, script, timeout=90):
    preload = " ".join([os.environ.get("VCKPT_PRELOAD", ""), str(build / "tests/libunlock_delay.so")]).strip()
    done = subprocess.run([sys.executable, "-c", START + script, build, tmp_path / "store"], capture_output=True,
                          text=True, timeout=timeout,
                          env=dict(os.environ, LD_PRELOAD=preload, MALLOC_PERTURB_="165"))
    assert done.returncode == 0, (done.returncode, done.stderr[-3000:])


def test_a_handle_that_goes_while_its_save_fails(build, tmp_path):
    """The handle's thread stands still after its first hold of the lock, until the save is over."""
    run(build, tmp_path, '''
saver = api.saver(store, "run")
saves = [doomed(saver, 900 + i) for i in range(3)]
slow.unlock_delayed(500_000, api.lib.vckpt_save_free, saves[0].p, 0, None, None)
saves[1].free()
text = closed(saver)
assert text and "run/900" in text, text
saves[2].free()
''')


@pytest.mark.parametrize("seed", range(3))
def test_handles_that_go_at_any_moment(build, tmp_path, scale, seed):
    """What close tells is the first that failed and was not asked."""
    run(build, tmp_path, f'''
pick = random.Random({seed})
for turn in range({scale(4, 40)}):
    saver, want, held, kept = api.saver(store, "run"), [], [], []
    for i in range(pick.randint(1, 8)):
        fate = pick.choice(["fails", "fails", "goes well", "given up", "asked"])
        if fate == "given up":
            saver.begin().give_up("no reason")
            continue
        save = saver.save({{"model/w": DATA + i}}) if fate == "goes well" else doomed(saver, 900 + i)
        kept.append(save.keep)
        if fate == "asked":
            try:
                save.committed()
                raise SystemExit("committed")
            except Failed as e:
                assert f"run/{{900 + i}}" in e.text, e.text
            save.free()
            continue
        if fate == "fails":
            want.append(f"run/{{900 + i}}")
        time.sleep(pick.choice([0, 0, 0.001, 0.004, 0.02]))
        delay(pick.choice([0, 200, 2000, 20000]))
        held.append(save) if pick.random() < 0.2 else save.free()
        delay(0)
    text = closed(saver)
    assert want[0] in text if want else text is None, (want, text)
    for save in held:
        save.free()
''')


def test_a_handle_that_goes_while_others_wait(build, tmp_path):
    """They are told all the same, and the saver stays for them."""
    run(build, tmp_path, '''
first, saver = [], []
def open_first():
    first.append(api.saver(store, "run", rank=0, world=2, launch="l"))
opening = threading.Thread(target=open_first)
opening.start()
saver = api.saver(store, "run", rank=1, world=2, launch="l")
opening.join()
save, told = saver.save({"model/w": DATA}, step=5), []
handle = ctypes.c_void_p(save.p.value)
def wait():
    done = (ctypes.c_uint64 * 2)()
    told.append((slow.unlock_delayed(300_000, api.lib.vckpt_save_wait_committed, handle, ctypes.c_long(-1), done,
                                     None), done[0]))
waiters = [threading.Thread(target=wait) for _ in range(3)]
[w.start() for w in waiters]
time.sleep(0.3)
save.free()
closer = threading.Thread(target=saver.free)
closer.start()
other = first[0].save({"model/w": DATA}, step=5)
assert other.committed() == 5
[w.join() for w in waiters]
closer.join()
assert told == [(0, 5)] * 3, told
other.free()
first[0].free()
''')


def test_data_is_the_callers_after_a_refused_submit_and_after_a_failure(build, tmp_path):
    """It is unmapped at once, while the handle is still held: whoever looked at it would not live. The next save
    works."""
    run(build, tmp_path, '''
import mmap
def mapped(value):
    "An array, and what takes its memory away."
    memory = mmap.mmap(-1, 8 << 20)
    array = numpy.frombuffer(memory, dtype="i8")
    array[:] = value
    address, length = array.ctypes.data, len(memory)
    libc = ctypes.CDLL(None, use_errno=True)
    def away():
        assert libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(length), 0) == 0
    return array, away

saver, kept = api.saver(store, "run"), []
for turn in range(4):
    array, away = mapped(turn)
    save = saver.begin(step=10 * turn)
    save.tensor("model/w", array)
    for value in b"1", b"2":
        save.common("group", "name", value)
    try:
        save.submit()
        raise SystemExit("submitted")
    except Failed as e:
        assert e.code == -17 and "name" in e.text, e.text
    away()
    kept += [save, array]
    time.sleep(0.05)
    save.give_up("it was refused")      # the saver goes on only when this is so
    array, away = mapped(turn)
    failed = saver.begin(step=10 * turn + 1, bases=["run/900"])
    failed.tensor("model/w", array)
    failed.submit()
    try:
        failed.staged()                 # or it was staged before it failed: the data is the caller's both ways
    except Failed as e:
        assert "run/900" in e.text, e.text
    away()
    try:
        failed.committed()
        raise SystemExit("committed")
    except Failed as e:
        assert "run/900" in e.text, e.text
    good = saver.save({"model/w": DATA + turn}, step=10 * turn + 2)
    assert good.committed() == 10 * turn + 2
    kept += [failed, good, array]
for save in kept:
    if not isinstance(save, numpy.ndarray):
        save.free()
assert closed(saver) is None
''')
