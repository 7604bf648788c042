# SPDX-License-Identifier: Apache-2.0
"""Pseudo-terminals. `on_terminal` runs the command on one, and gives what it wrote, standard output and standard error
together."""
import fcntl
import os
import pty
import struct
import subprocess
import termios
import threading

import pytest


def open_terminal(columns=80):
    """Both sides: ours, and the one that is a terminal."""
    try:
        ours, theirs = pty.openpty()
    except OSError as error:    # a chroot may have none
        pytest.skip(f"there is no pseudo-terminal (/dev/ptmx, /dev/pts): {error}")
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    return ours, theirs


def on_terminal(vckpt, *args, columns=80, check=True, **more):
    ours, theirs = open_terminal(columns)
    env = {k: v for k, v in os.environ.items()
           if k not in ("COLUMNS", "NO_COLOR", "VCKPT_STORE")} | {"TERM": "xterm"} | more
    told = bytearray()

    def read():
        while True:
            try:
                block = os.read(ours, 65536)
            except OSError:             # no one has the other side open any more
                return
            if not block:
                return
            told.extend(block)
    reader = threading.Thread(target=read)
    reader.start()
    try:
        done = subprocess.run([vckpt.path, *map(str, args)], stdin=theirs, stdout=theirs, stderr=theirs, env=env,
                              timeout=300)
    finally:
        os.close(theirs)
        reader.join(60)
        os.close(ours)
    text = told.decode().replace("\r\n", "\n")
    assert not check or done.returncode == 0, (done, text)
    return text
