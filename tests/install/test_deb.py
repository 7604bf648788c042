# SPDX-License-Identifier: Apache-2.0
"""tools/deb: its packages in a Debian of their own (debootstrap), used there as a user does, and removed again without
a trace."""
import os
import pathlib
import re
import shutil
import subprocess

import pytest

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]
ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGES = ["vckpt", "libvckpt0", "libvckpt-dev", "python3-vckpt"]
APT = "DEBIAN_FRONTEND=noninteractive apt-get -y -q --no-install-recommends"
USE = """
import numpy, vckpt
assert vckpt.save("/store/run", {"model": {"w": numpy.arange(12.0)}}) == 0
assert (vckpt.Step("/store/run").read("model", "w") == numpy.arange(12.0)).all()
"""


def debian():
    """The release of this machine, and the mirror that it takes it from."""
    release = re.search(r"^VERSION_CODENAME=(\w+)", pathlib.Path("/etc/os-release").read_text(), re.M)[1]
    sources = "\n".join(p.read_text() for p in pathlib.Path("/etc/apt").rglob("*.[ls]*") if p.is_file() and
                        "sources" in p.as_posix())
    mirror = re.search(r"(?:URIs: *|^deb (?:\[.*\] )?)(https?://[^/\s]+/debian/?)\s", sources, re.M)
    return release, mirror[1] if mirror else "http://deb.debian.org/debian"


def minimal_system(root):
    release, mirror = debian()
    done = subprocess.run(["debootstrap", "--variant=minbase", release, root, mirror], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    shutil.copy("/etc/resolv.conf", root / "etc/resolv.conf")


def inside(root, script, check=True):
    """Runs a script in the system; its /proc is there meanwhile, in a mount namespace that ends with it."""
    command = 'mount -t proc proc "$0/proc" && exec chroot "$0" /bin/sh -euc "$1"'
    done = subprocess.run(["unshare", "--mount", "sh", "-c", command, root, script], capture_output=True, text=True,
                          timeout=900,
                          env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LC_ALL": "C.UTF-8"})
    assert not check or done.returncode == 0, script + "\n" + done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def built(own_mounts):
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        pytest.skip("a system of its own needs root and Debian")
    subprocess.run(["bash", "-euc", ". tools/packages; packages_install $PACKAGES_CHROOT"], cwd=ROOT, check=True)
    done = subprocess.run([ROOT / "tools/deb"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [ROOT / line for line in done.stdout.splitlines() if line.endswith(".deb")]


@pytest.fixture(scope="module")
def system(built, tmp_path_factory):
    root = tmp_path_factory.mktemp("deb") / "root"
    minimal_system(root)
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
    assert inside(system, "/debs/save /store") == "saved example/0\n0 1 2 3\n4 5 6 7\n8 9 10 11\n"
    headings = inside(system,
                      "man 1 vckpt | head -n 1; man 5 vckpt | head -n 1; man mount.vckpt | head -n 1").splitlines()
    assert [line.split()[0] for line in headings] == ["VCKPT(1)", "VCKPT(5)", "MOUNT.VCKPT(8)"]
    if os.path.exists("/dev/fuse"):
        script = ("[ -e /dev/fuse ] || mknod /dev/fuse c 10 229; mount -t vckpt /store /mnt; ls /mnt/run/latest/model; "
                  "umount /mnt")
        assert inside(system, script) == "w.npy\n"
    for name in ("usr/lib/systemd/system/vckpt-mount@.service", "usr/share/doc/vckpt/python.md.gz"):
        assert (system / name).exists() or (system / name.removesuffix(".gz")).exists(), name
    inside(system, f"{APT} purge {' '.join(PACKAGES)}")
    assert traces(system) == []
