# SPDX-License-Identifier: Apache-2.0
"""Standard input, output and error: closed, full, or shared with other processes."""
import os
import socket
import subprocess

import numpy
import pytest


@pytest.fixture
def filled(vckpt, store, tmp_path):
    """r/0 with one tensor, larger than a pipe."""
    numpy.save(tmp_path / "w.npy", numpy.zeros(300_000, "f4"))
    vckpt("import", store, "r/0", tmp_path / "w.npy")
    return store


def test_no_file_of_the_store_gets_a_closed_number(vckpt, filled):
    process = subprocess.Popen(["sh", "-c", 'exec "$@" <&- 2>&-', "sh", vckpt.path, "cat", filled, "r/0/model/w.npy"],
                               stdout=subprocess.PIPE)
    process.stdout.read(1)  # it is at work, and waits for somebody to read the rest
    names = [os.readlink(f"/proc/{process.pid}/fd/{fd}") for fd in (0, 2)]
    process.stdout.read()
    assert names == ["/dev/null"] * 2 and process.wait(120) == 0
    process.stdout.close()


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_output_that_goes_nowhere_is_a_failure(vckpt, filled, closed):
    done = subprocess.run(["sh", "-c", f'exec "$@" {closed}', "sh", vckpt.path, "ls", filled], capture_output=True,
                          text=True, timeout=120)
    assert done.returncode == (">&-" in closed.split())
    assert (closed == ">&-") == ("standard output" in done.stderr)


@pytest.mark.parametrize("arguments", [["-V"], ["version"], ["-h"], ["help"], ["help", "ls"], ["ls", "-h"]])
def test_what_is_asked_for_has_to_be_printed(vckpt, arguments):
    with open("/dev/full", "w") as full:
        done = subprocess.run([vckpt.path, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (1, "vckpt: standard output: No space left on device\n")


def test_output_that_is_lost_before_the_end(vckpt, filled, tmp_path):
    """stdio forgets a write that failed once its buffer is empty."""
    vckpt("init", tmp_path / "other")
    for arguments in (["metrics", filled], ["copy", filled, "--to", tmp_path / "other"]):
        with open("/dev/full", "w") as full:
            done = subprocess.run([vckpt.path, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
        assert (done.returncode, done.stderr) == (1, "vckpt: standard output: some of it could not be written\n")


@pytest.mark.parametrize("arguments", [["what\tis\xff"], ["ls", "--what\x1b\x1b"], ["ls", "/no/such/\x07store/ä"],
                                       ["import", "no", "r"]], ids=lambda a: " ".join(a)[:9])
def test_a_line_of_an_error_is_written_at_once(vckpt, tmp_path, arguments):
    """Each write is one message of such a socket."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with its:
            subprocess.run([vckpt.path, *arguments], stderr=its, cwd=tmp_path, timeout=120)
        said = []
        while message := ours.recv(10000):
            said.append(message)
    assert said and all(m.endswith(b"\n") and m.count(b"\n") == 1 for m in said), said
