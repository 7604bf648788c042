# SPDX-License-Identifier: Apache-2.0
"""tools/deb: its packages in a Debian of their own (debootstrap), used there as a user does, and removed again without
a trace."""
import os
import pathlib
import re
import shutil
import subprocess

import pytest

from debianlib import check_possible, inside, minimal_system, release

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]
ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGES = ["vckpt", "libvckpt0", "libvckpt-dev", "python3-vckpt"]
APT = "DEBIAN_FRONTEND=noninteractive apt-get -y -q --no-install-recommends"
USE = """
import numpy, vckpt
assert vckpt.save("/store/run", {"model": {"w": numpy.arange(12.0)}}) == 0
assert (vckpt.Step("/store/run").read("model", "w") == numpy.arange(12.0)).all()
"""


@pytest.fixture(scope="module")
def built(own_mounts):
    check_possible()
    done = subprocess.run([ROOT / "tools/deb"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [ROOT / line for line in done.stdout.splitlines() if line.endswith(".deb")]


@pytest.fixture(scope="module")
def system(built, tmp_path_factory):
    root = tmp_path_factory.mktemp("deb") / "root"
    minimal_system(root, release())
    (root / "debs").mkdir()
    for path in built:
        shutil.copy(path, root / "debs")
    yield root
    shutil.rmtree(root)


# What the test brought, and what man(1) and the library keep for the user who ran them.
NOT_OF_THE_PACKAGES = ("debs/", "store/", "proc/", "root/.cache/", "var/cache/man/")


def traces(root):
    names = (p.relative_to(root).as_posix() for p in root.rglob("*vckpt*"))
    return [name for name in names if not name.startswith(NOT_OF_THE_PACKAGES)]


def test_the_packages(system):
    """Installed, used and purged, in this order."""
    assert sorted(p.name.partition("_")[0] for p in (system / "debs").iterdir()) == sorted(PACKAGES)
    inside(system, f"{APT} update; {APT} install /debs/*.deb gcc libc6-dev pkg-config man-db")
    version = re.search(r"version: '([^']+)'", (ROOT / "meson.build").read_text())[1]
    assert inside(system, "vckpt --version; mount.vckpt --version") == f"vckpt {version}\nmount.vckpt {version}\n"
    inside(system, f"cat > /use.py <<'END'\n{USE}\nEND\npython3 /use.py")
    assert "1 tensor" in inside(system, "vckpt ls /store run; vckpt info /store run/0; vckpt verify /store")
    inside(system, "cd /debs; zcat -f /usr/share/doc/libvckpt-dev/examples/save.c* > save.c; cc save.c $(pkg-config "
           "--cflags --libs vckpt) -o save")
    saved = inside(system, "/debs/save /store 100 1 j >/dev/null & /debs/save /store 100 0 j && wait")
    assert saved == "rank 0 saved example/100\n"
    headings = inside(system, "for page in '1 vckpt' '3 vckpt' '5 vckpt' '8 mount.vckpt'; do man $page | head -n 1; "
                              "done")
    assert [line.split()[0] for line in headings.splitlines()] == ["VCKPT(1)", "VCKPT(3)", "VCKPT(5)", "MOUNT.VCKPT(8)"]
    if os.path.exists("/dev/fuse"):
        script = "mount -t vckpt /store /mnt; ls /mnt/run/latest/model; umount /mnt"
        assert inside(system, script) == "w.npy\n"
    for name in ("usr/lib/systemd/system/vckpt-mount@.service", "usr/share/doc/vckpt/python.md.gz"):
        assert (system / name).exists() or (system / name.removesuffix(".gz")).exists(), name
    inside(system, f"{APT} purge {' '.join(PACKAGES)}")
    assert traces(system) == []
