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
    """Both sides: ours, and the one that is a terminal. What is typed is not echoed, because the kernel does so at any
    time, between two writes of the program, too."""
    try:
        ours, theirs = pty.openpty()
    except OSError as error:    # a chroot may have none
        pytest.skip(f"there is no pseudo-terminal (/dev/ptmx, /dev/pts): {error}")
    modes = termios.tcgetattr(theirs)
    modes[3] &= ~termios.ECHO
    termios.tcsetattr(theirs, termios.TCSANOW, modes)
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    return ours, theirs


def written(ours):
    """All that was written, until no one has the other side open any more."""
    told = bytearray()
    while True:
        try:
            block = os.read(ours, 65536)
        except OSError:             # the end, on Linux
            return told.decode()
        if not block:
            return told.decode()
        told.extend(block)


def on_terminal(vckpt, *args, columns=80, check=True, **more):
    ours, theirs = open_terminal(columns)
    env = {k: v for k, v in os.environ.items()
           if k not in ("COLUMNS", "NO_COLOR", "VCKPT_STORE")} | {"TERM": "xterm"} | more
    told = []
    reader = threading.Thread(target=lambda: told.append(written(ours)))
    reader.start()
    try:
        done = subprocess.run([vckpt.path, *map(str, args)], stdin=theirs, stdout=theirs, stderr=theirs, env=env,
                              timeout=300)
    finally:
        os.close(theirs)
        reader.join(60)
        os.close(ours)
    text = told[0].replace("\r\n", "\n")
    assert not check or done.returncode == 0, (done, text)
    return text
