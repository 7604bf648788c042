# SPDX-License-Identifier: Apache-2.0
"""README's tour, line by line as it stands there, in a folder that holds what tools/quickstart leaves. .ci/run types it
after the real one."""
import os
import pathlib
import subprocess
import sys

import pytest

from readme import block

from .conftest import Mount, mount_of


@pytest.fixture
def clone(program, vckpt, minilm, build, tmp_path):
    folder = tmp_path / "a clone"                       # a path with a space in it
    for part in "tools/vckpt", "fs":
        (folder / "build/release" / part).parent.mkdir(parents=True, exist_ok=True)
        (folder / "build/release" / part).symlink_to(pathlib.Path(build, part).resolve())
    (folder / "build/python").symlink_to(sys.prefix)
    vckpt("init", folder / ".vckpt/store")
    vckpt("import", folder / ".vckpt/store", "minilm", minilm)
    m = Mount(program, folder / ".vckpt/store", folder / ".vckpt/mnt")
    yield folder
    m.end()


def test_the_tour(clone):
    tour = block("A first tour")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("VCKPT_", "PYTHONPATH"))}
    for attempt in "once", "again":                     # a reader may begin anew
        done = subprocess.run(["bash", "-euxo", "pipefail", "-c", tour], cwd=clone, env=environment, text=True,
                              capture_output=True, timeout=300)
        assert done.returncode == 0, f"{attempt}: {done.stdout}{done.stderr}"
        assert mount_of(clone / ".vckpt/mnt") is None
        if attempt == "once":
            subprocess.run([clone / "build/release/fs/mount.vckpt", ".vckpt/store", ".vckpt/mnt"], cwd=clone,
                           check=True)
