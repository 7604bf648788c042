# SPDX-License-Identifier: Apache-2.0
"""Runs the command on a terminal: `on_terminal` gives what stands on it, standard output and standard error
together."""
import fcntl
import os
import pty
import struct
import subprocess
import termios
import threading


def on_terminal(vckpt, *args, columns=80, check=True, **more):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    env = {k: v for k, v in os.environ.items()
           if k not in ("COLUMNS", "NO_COLOR", "VCKPT_STORE")} | {"TERM": "xterm"} | more
    told = bytearray()

    def read():
        while True:
            try:
                block = os.read(ours, 65536)
            except OSError:             # nobody has the other side open any more
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
