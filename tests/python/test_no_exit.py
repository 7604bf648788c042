# SPDX-License-Identifier: Apache-2.0
"""A library inside a trainer never ends the process: what a kernel or the C library refuses is an error of the call."""
import errno
import os
import subprocess
import sys

import pytest

HEAD = """
import ctypes, sys
import numpy, vckpt
store = sys.argv[1]
state = {"m": {"w": numpy.arange(5000.0)}}
"""
KEYS = HEAD + """
c, key = ctypes.CDLL(None), ctypes.c_uint()
while c.pthread_key_create(ctypes.byref(key), None) == 0:
    pass
try:
    vckpt.open(store + "/there")["m", "w"].numpy()
    print("read")
except vckpt.Error as error:
    print("error", error.errno, error)
"""
RANDOM = HEAD + """
for path in (store + "/new", store + "-new/run"):
    try:
        vckpt.save(path, state, step=0)
        print("saved")
    except vckpt.Error as error:
        print("error", error.errno, error)
"""


@pytest.fixture
def program(tmp_path):
    def run(text, preload=""):
        environment = dict(os.environ)
        if preload := f"{environment.get('VCKPT_PRELOAD', '')} {preload}".strip():
            environment["LD_PRELOAD"] = preload
        return subprocess.run([sys.executable, "-c", text, str(tmp_path / "store")], capture_output=True, text=True,
                              timeout=60, env=environment)
    assert run(HEAD + 'vckpt.save(store + "/there", state, step=0)').returncode == 0
    return run


def test_no_thread_keys_left(program):
    """glibc has 1024 of them in a process; a reader's buffers take one."""
    done = program(KEYS)
    assert done.returncode == 0 and done.stdout.startswith(f"error {errno.ENOMEM} "), (done.stdout, done.stderr)


def test_a_kernel_without_random_numbers(program, tmp_path):
    """getrandom as an older kernel, or a filter of system calls, answers it."""
    (tmp_path / "no.c").write_text('#include <errno.h>\n#include <sys/types.h>\n'
                                   'ssize_t getrandom(void *p, size_t n, unsigned f) { (void)p, (void)n, (void)f; '
                                   'errno = ENOSYS; return -1; }\n')
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "no.so", tmp_path / "no.c"], check=True)
    done = program(RANDOM, str(tmp_path / "no.so"))
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert [line.split()[:2] for line in done.stdout.splitlines()] == [["error", str(errno.ENOSYS)]] * 2, (
        (done.stdout, done.stderr))
