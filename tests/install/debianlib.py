# SPDX-License-Identifier: Apache-2.0
"""A Debian of one's own: debootstrap makes it from the mirror of this machine's apt, and scripts run in it."""
import os
import pathlib
import re
import shutil
import subprocess
import urllib.error
import urllib.request

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROXIES = ("http_proxy", "https_proxy", "no_proxy")


def release():
    """Of this machine."""
    return re.search(r"^VERSION_CODENAME=(\w+)", pathlib.Path("/etc/os-release").read_text(), re.M)[1]


def mirror():
    """From which this machine takes its packages."""
    sources = "\n".join(p.read_text() for p in pathlib.Path("/etc/apt").rglob("*.[ls]*") if p.is_file() and
                        "sources" in p.as_posix())
    found = re.search(r"(?:URIs: *|^deb (?:\[.*\] )?)(https?://[^/\s]+/debian/?)\s", sources, re.M)
    return found[1] if found else "http://deb.debian.org/debian"


def check_possible():
    """Skips the test where a system of one's own cannot be made."""
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        pytest.skip("a system of its own needs root and Debian")
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode != 0:
        pytest.skip("mount namespaces are not allowed here")
    done = subprocess.run(["bash", "-euc", ". tools/packages; packages_install $PACKAGES_CHROOT"], cwd=ROOT,
                          capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"debootstrap cannot be installed: {done.stderr[-300:]}")


def minimal_system(root, codename, *packages):
    """A minbase system in the folder `root`, with these packages besides. Skips the test where the release cannot be
    reached."""
    address = f"{mirror().rstrip('/')}/dists/{codename}/Release"
    try:
        urllib.request.urlopen(address, timeout=60).close()
    except (urllib.error.URLError, OSError) as error:
        pytest.skip(f"the packages of {codename} cannot be reached: {address}: {error}")
    done = subprocess.run(["debootstrap", "--variant=minbase", *[f"--include={name}" for name in packages], codename,
                           root, mirror()], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    shutil.copy("/etc/resolv.conf", root / "etc/resolv.conf")


def environment(root):
    """What pip needs to reach PyPI here is the same in there."""
    env = {name: os.environ[name] for name in (*PROXIES, "PIP_INDEX_URL", "PIP_CERT") if os.environ.get(name)}
    if "PIP_CERT" in env:
        shutil.copy(env["PIP_CERT"], root / "certificates")
        env["PIP_CERT"] = "/certificates"
    return {**env, "PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LC_ALL": "C.UTF-8"}


def inside(root, script, check=True, timeout=900):
    """Runs a script in the system, which is a mount point meanwhile and has its /proc, in namespaces that end with it,
    and so does all that the script has started."""
    command = ('mount --bind "$0" "$0" && mount -t proc proc "$0/proc" && mount -t tmpfs tmpfs "$0/dev/shm" && '
               'exec chroot "$0" /bin/sh -euc "$1"')
    if os.path.exists("/dev/fuse") and not (root / "dev/fuse").exists():
        os.mknod(root / "dev/fuse", 0o20666, os.makedev(10, 229))
    (root / "dev/shm").mkdir(exist_ok=True)
    done = subprocess.run(["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", command, root, script],
                          capture_output=True, text=True, timeout=timeout, env=environment(root))
    assert not check or done.returncode == 0, script + "\n" + done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout
