# SPDX-License-Identifier: Apache-2.0
"""vckpt wait: new steps of a run, and a command for each of them."""
import json
import signal
import subprocess
import sys

import numpy as np
import pytest

SHOW = [sys.executable, "-c", "import os, sys; print(sys.argv[1:], *(os.environ['VCKPT_' + w] for w in "
        "('STORE', 'RUN', 'STEP', 'PATH')), flush=True)"]


@pytest.fixture
def save(vckpt, store, tmp_path):
    np.save(tmp_path / "w.npy", np.arange(10, dtype="f4"))

    def save(target, *more):
        vckpt("import", store, *target.split("/")[:1], tmp_path / "w.npy", "--step", target.split("/")[1], "-q", *more)
    return save


@pytest.fixture
def waiting(vckpt, store):
    """Starts vckpt wait, and says when it has begun to look."""
    started = []

    def waiting(*words, stdin=None):
        process = subprocess.Popen([vckpt.path, "wait", "-v", store, *map(str, words)], stdin=stdin,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=reset)
        started.append(process)
        assert "waiting for" in process.stderr.readline()
        return process
    yield waiting
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def reset():
    for number in signal.SIGINT, signal.SIGTERM, signal.SIGHUP:
        signal.signal(number, signal.SIG_DFL)


def test_a_new_step(save, waiting):
    save("run/1")
    process = waiting("run")
    save("run/2")
    assert process.communicate(timeout=120)[0] == "run/2\n" and process.returncode == 0


def test_a_run_that_is_not_there_yet_and_a_step(save, waiting):
    run, step, latest = waiting("later"), waiting("later/7"), waiting("later/latest")
    save("later/3")
    assert run.communicate(timeout=120)[0] == latest.communicate(timeout=120)[0] == "later/3\n"
    save("later/7")
    assert step.communicate(timeout=120)[0] == "later/7\n"


def test_a_tag(vckpt, store, save, waiting):
    """The step that gets it, whichever that is."""
    save("run/1")
    save("run/2")
    process = waiting("run/best")
    vckpt("tag", store, "run/1", "best", "-q")
    assert process.communicate(timeout=120)[0] == "run/1\n" and process.returncode == 0
    done = vckpt("wait", store, "run/other", "--timeout", "0", check=False)
    assert done.returncode == 1 and "run has no step with the tag other\n" in done.stderr


def test_what_is_there(vckpt, save, store):
    for step in 1, 5, 3:
        save(f"run/{step}")
    assert vckpt("wait", store, "run/3").stdout == "run/3\n"
    assert vckpt("wait", store, "run/latest").stdout == "run/5\n"
    assert vckpt("wait", store, "run", "--after", 2).stdout == "run/5\n"           # it was committed before 3
    line = json.loads(vckpt("wait", store, "run", "--after", 3, "--json").stdout)
    assert line.pop("time") and line == {"run": "run", "step": 5, "entry": 1}
    for words in ["run", "--after", 5], ["run/9"], ["other/latest"]:
        done = vckpt("wait", store, *words, "--timeout", 0, check=False)
        assert done.returncode == 1 and " has no " in done.stderr and " after " not in done.stderr, done
    assert "run has no step 9\n" in vckpt("wait", store, "run/9", "--timeout", 0, check=False).stderr


def test_a_command_for_each(vckpt, save, waiting, store):
    """In the order of the commits; one that was removed before its turn comes is passed over."""
    process = waiting("run", "--follow", "--json", "--exec", sys.executable, "-c",
                      "import sys; print('go', flush=True); sys.stdin.readline(); sys.exit(sys.argv[1] == '4')",
                      "{step}", stdin=subprocess.PIPE)

    def end():
        process.stdin.write("\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())
    save("run/9")
    assert process.stdout.readline() == "go\n"
    save("run/2")
    save("run/4")
    vckpt("rm", store, "run/2", "-q", "--yes")
    line = end()
    assert (line["step"], line["status"]) == (9, 0)
    assert process.stdout.readline() == "go\n"
    line = end()
    assert (line["step"], line["status"]) == (4, 1)
    process.terminate()
    assert process.communicate(timeout=120)[1] == f"vckpt wait: {sys.executable} exited with 1 for run/4\n"
    assert process.returncode == -signal.SIGTERM


def test_what_a_command_gets(vckpt, save, store):
    """No shell looks at any of it."""
    save("run/3")
    done = vckpt("wait", store, "run/latest", "--exec", *SHOW, "{}", "a{run}b{step}", "{store} {path}", "$(x) {y} {",
                 "--follow")
    assert done.stdout == (f"['run/3', 'arunb3', '{store} {store}/run/3', '$(x) {{y}} {{', '--follow'] {store} run 3 "
                           f"{store}/run/3\n")


@pytest.mark.parametrize("command, said", [(["false"], "false exited with 1 for run/3"),
                                           (["sh", "-c", "kill -9 $$"], "sh was ended by signal 9 (Killed) for run/3"),
                                           (["/no/such"], "/no/such cannot be run: No such file")])
def test_a_command_fails(vckpt, save, store, command, said):
    save("run/3")
    done = vckpt("wait", store, "run/3", "--exec", *command, check=False)
    assert done.returncode == 1 and said in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals(waiting, number):
    process = waiting("run", "--follow")
    process.send_signal(number)
    assert process.communicate(timeout=120) == ("", "") and process.returncode == -number


def test_a_signal_ends_the_command_too(save, waiting, tmp_path):
    """It is passed on, and the end of the command is awaited; its own signals are as they were."""
    save("run/3")
    program = ("import signal, sys, time, pathlib\n"
               "signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path(sys.argv[1], 'end').touch(), sys.exit(0)))\n"
               "print(len(signal.pthread_sigmask(signal.SIG_BLOCK, [])), flush=True)\n"
               "while True: time.sleep(60)")
    process = waiting("run/3", "--exec", sys.executable, "-c", program, tmp_path)
    assert process.stdout.readline() == "0\n"
    process.terminate()
    assert process.communicate(timeout=120)[1] == "" and process.returncode == -signal.SIGTERM
    assert (tmp_path / "end").exists()


@pytest.mark.parametrize("words, said", [
    (["run", "--after", "x"], "--after x: give the number of a step"),
    (["run", "--timeout", "soon"], "--timeout soon: give seconds"),
    (["run/3", "--follow"], "run/3 is one step"), (["run/3", "--after", "1"], "run/3 is one step"),
    (["run", "--exec"], "--exec needs a command"), ([], "RUN[/STEP] is missing"),
])
def test_wrong(vckpt, store, words, said):
    done = vckpt("wait", store, *words, check=False)
    assert done.returncode == 2 and said in done.stderr
