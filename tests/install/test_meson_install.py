# SPDX-License-Identifier: Apache-2.0
"""What `meson install` puts where, and a C program built against the installed tree."""
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from commlib import fresh_name

ROOT = pathlib.Path(__file__).resolve().parents[2]
PREFIX = "usr/local"


@pytest.fixture(scope="module")
def built(build):
    if not shutil.which("meson"):
        pytest.skip("meson is not installed")
    return build


def sanitized(build):
    options = json.loads((build / "meson-info/intro-buildoptions.json").read_text())
    return any(option["name"] == "b_sanitize" and option["value"] not in ("none", []) for option in options)


def install(build, destination, *more):
    done = subprocess.run(["meson", "install", "-C", build, "--no-rebuild", "--destdir", destination, *more],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return destination


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    return install(built, tmp_path_factory.mktemp("installed"))


HEADERS = ("vckpt.h",)


def found(folder):
    """The files and links, with the folder of libraries named LIB: it depends on the system."""
    paths = (p.relative_to(folder).as_posix() for p in folder.rglob("*") if not p.is_dir())
    return {re.sub(rf"^{PREFIX}/lib(64|/[\w-]+-linux-\w+)/", f"{PREFIX}/LIB/", path) for path in paths}


def test_everything_is_where_the_system_looks(installed):
    there = found(installed)
    library = {f"{PREFIX}/LIB/{name}"
               for name in ("libvckpt.so", "libvckpt.so.0", "libvckpt.so.0.1.0", "pkgconfig/vckpt.pc")}
    commands = {f"{PREFIX}/bin/vckpt", f"{PREFIX}/sbin/mount.vckpt", "sbin/mount.vckpt",
                f"{PREFIX}/lib/systemd/system/vckpt-mount@.service"}
    shared = {f"{PREFIX}/share/{name}" for name in (
        "man/man1/vckpt.1", "man/man3/vckpt.3", "man/man5/vckpt.5", "man/man8/mount.vckpt.8", "doc/vckpt/LICENSE",
        "bash-completion/completions/vckpt", "zsh/site-functions/_vckpt", "fish/vendor_completions.d/vckpt.fish",
        "doc/vckpt/python.md", "doc/vckpt/format/store.md", "doc/vckpt/examples/train.py",
        "doc/vckpt/examples/save.c", "doc/vckpt/examples/load.c", "doc/vckpt/examples/read.c")}
    assert library | commands | shared | {f"{PREFIX}/include/{name}" for name in HEADERS} <= there
    assert not [name for name in there if "/man/" in name and "doc/vckpt" in name or name.endswith("meson.build")]
    assert os.readlink(installed / "sbin/mount.vckpt") == f"/{PREFIX}/sbin/mount.vckpt"


TAGS = {
    "runtime": ({"bin/vckpt", "sbin/mount.vckpt", "LIB/libvckpt.so.0", "share/doc/vckpt/LICENSE"},
                {"include/vckpt.h", "LIB/libvckpt.so"}),
    "devel": ({f"include/{name}" for name in HEADERS} | {"LIB/libvckpt.so", "LIB/pkgconfig/vckpt.pc"},
              {"bin/vckpt", "LIB/libvckpt.so.0"}),
    "man": ({"share/man/man1/vckpt.1"}, {"bin/vckpt", "share/doc/vckpt/python.md"}),
    "doc": ({"share/doc/vckpt/python.md"}, {"bin/vckpt", "share/man/man1/vckpt.1"}),
}


def test_each_tag_installs_its_part(built, installed, tmp_path):
    parts = []
    for tag, (there, absent) in TAGS.items():
        names = found(install(built, tmp_path / tag, "--tags", tag))
        assert {f"{PREFIX}/{name}" for name in there} <= names and not {f"{PREFIX}/{name}"
                                                                        for name in absent} & names, tag
        parts.append(names)
    assert set().union(*parts) == found(installed) and sum(map(len, parts)) == len(found(installed))


def test_the_library_shows_the_header_and_nothing_else(installed):
    library = next(installed.rglob("libvckpt.so.0"))
    out = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True).stdout
    shown = {line.split()[-1].partition("@")[0] for line in out.splitlines()} - {"VCKPT_0"}
    headers = "".join((ROOT / "core/api" / name).read_text() for name in HEADERS)
    header = re.sub(r"/\*.*?\*/", "", headers, flags=re.S)
    assert shown == set(re.findall(r"\b(vckpt_\w+)\(", header))
    dynamic = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
    assert "soname: [libvckpt.so.0]" in dynamic


@pytest.fixture(scope="module")
def environment(built, installed):
    """For a compiler and a program that use the installed tree alone."""
    if sanitized(built):
        pytest.skip("a library under a sanitizer needs its run time in every program")
    libraries = next(installed.rglob("libvckpt.so")).parent
    env = {k: v for k, v in os.environ.items() if k not in ("LD_PRELOAD", "CFLAGS", "LDFLAGS")}
    return {**env, "PKG_CONFIG_PATH": str(libraries / "pkgconfig"), "PKG_CONFIG_SYSROOT_DIR": str(installed),
            "LD_LIBRARY_PATH": str(libraries)}


def compile_as_its_comment_says(name, environment, folder):
    source = ROOT / f"docs/examples/{name}.c"
    line = re.search(rf"^ \*\s+(cc {name}\.c .*)$", source.read_text(), re.M)[1]
    shutil.copy(source, folder)
    done = subprocess.run(line.replace("cc ", "cc -Wall -Wextra -Werror ", 1), shell=True, cwd=folder,
                          env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def programs(environment, tmp_path_factory):
    """The programs of docs/c.md, compiled as their comments say, in a folder with what they saved."""
    folder = tmp_path_factory.mktemp("programs")
    for name in ("save", "load", "read", "targets"):
        compile_as_its_comment_says(name, environment, folder)
    return folder


def run_programs(environment, *commands):
    """All at once: [(exit status, standard output, standard error), ...]"""
    running = [subprocess.Popen([str(word) for word in command], env=environment, text=True, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE) for command in commands]
    out = [process.communicate(timeout=120) for process in running]
    return [(process.returncode, *said) for process, said in zip(running, out)]


@pytest.fixture(scope="module")
def saved(programs, environment):
    """A step that two processes saved."""
    store, job = programs / "store", fresh_name()
    ends = run_programs(environment, *([programs / "save", store, 100, rank, job] for rank in (0, 1)))
    assert ends == [(0, f"rank {rank} saved example/100\n", "") for rank in (0, 1)]
    return store


def test_the_program_that_saves_refuses_a_step_that_is_there(programs, saved, environment):
    """At both ranks, and a later step is saved."""
    job = fresh_name()
    ends = run_programs(environment, *([programs / "save", saved, 100, rank, job] for rank in (0, 1)))
    assert [end[0] for end in ends] == [1, 1] and all("step 100" in end[2] for end in ends), ends


def test_the_program_that_loads_elsewhere(programs, saved, environment):
    """Each of three ranks loads its rows of what two ranks saved by columns."""
    rows = ["".join(f"{10 * i} {10 * i + 1} {10 * i + 2} {10 * i + 3}\n" for i in (2 * rank, 2 * rank + 1))
            for rank in range(3)]
    ends = run_programs(environment, *([programs / "load", saved, rank] for rank in range(3)))
    assert ends == [(0, f"loaded example/100, epoch 7\n{row}", "") for row in rows]
    [(code, _, said)] = run_programs(environment, [programs / "load", programs / "none", 0])
    assert code == 1 and str(programs / "none") in said


def test_the_program_that_reads_one_tensor(programs, saved, environment):
    ends = run_programs(environment, [programs / "read", saved, 3], [programs / "read", saved, 6])
    assert ends[0] == (0, "model/bias: 24 bytes\nmodel/weight: 96 bytes\n30 31 32 33\n", "")
    assert ends[1][0] == 1 and "the box has 1 items from 6 on in dimension 0, which has 6" in ends[1][2]


def test_the_c_example_of_targets(programs, saved, environment):
    """The weight in two parts, as doubles; the bias under another name, with one more place."""
    [end] = run_programs(environment, [programs / "targets", saved])
    assert end == (0, "".join(f"{10 * i} | {10 * i + 1} {10 * i + 2} {10 * i + 3}\n" for i in range(6)) +
                   "0 ... 5 0\n", "")


@pytest.mark.parametrize("command", ["gcc -std=c99 -pedantic", "g++ -x c++ -Wno-missing-field-initializers"])
def test_the_headers_are_c_and_c_plus_plus(installed, tmp_path, command):
    """Each by itself, twice."""
    if not shutil.which(command.split()[0]):
        pytest.skip(f"{command.split()[0]} is not installed")
    for name in HEADERS:
        (tmp_path / "one.c").write_text(f"#include <{name}>\n#include <{name}>\nint main(void) {{ return 0; }}\n")
        done = subprocess.run([*command.split(), "-Wall", "-Wextra", "-Werror", "-fsyntax-only", "-I",
                               installed / PREFIX / "include", tmp_path / "one.c"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_the_c_example_names_what_fails(programs, environment, tmp_path):
    (tmp_path / "file").write_text("")
    [(code, _, said)] = run_programs(environment, [programs / "save", tmp_path / "file", 1, 0, fresh_name()])
    assert code == 1 and str(tmp_path / "file") in said


def test_the_package_finds_the_library_of_the_system(environment, tmp_path):
    """As python3-vckpt has it: the package without a library, and one that the loader finds."""
    shutil.copytree(ROOT / "tools/python/vckpt", tmp_path / "site/vckpt", ignore=shutil.ignore_patterns("__pycache__"))
    env = {k: v for k, v in environment.items() if not k.startswith("VCKPT_")}

    def version(**more):
        return subprocess.run([sys.executable, "-c", "import vckpt; print(vckpt.version())"], cwd=tmp_path,
                              capture_output=True, text=True,
                              env={**env, "PYTHONPATH": str(tmp_path / "site"), **more})
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", version().stdout), version().stderr
    assert "libvckpt.so is not found" in version(VCKPT_LIBRARY=str(tmp_path / "none.so")).stderr


def read_installed(build):
    return json.loads((build / "meson-info/intro-installed.json").read_text()).values()


def test_a_wheel_goes_without_a_command_whose_library_is_missing(built, tmp_path):
    (tmp_path / "pkg-config").write_text('#!/bin/sh\ncase "$*" in *fuse3*|*jansson*) exit 1 ;; esac\nexec '
                                         'pkg-config "$@"\n')
    (tmp_path / "pkg-config").chmod(0o755)

    def setup(name, *options):
        return subprocess.run(["meson", "setup", tmp_path / name, ROOT, *options], capture_output=True, text=True,
                              timeout=300,
                              env={**os.environ, "PKG_CONFIG": str(tmp_path / "pkg-config"), "CMAKE": "/bin/false"})
    assert setup("whole").returncode != 0
    done = setup("wheel", "-Dpython=true")
    assert done.returncode == 0, done.stdout
    names = {target["name"] for target in json.loads((tmp_path / "wheel/meson-info/intro-targets.json").read_text())}
    assert "vckpt_api" in names and "mount.vckpt" not in names
    assert not [path for path in read_installed(tmp_path / "wheel") if "/bin/" in path]


def test_an_ordinary_build_has_no_test_program_and_avoids_lib64(built, tmp_path):
    """lib64 is what meson takes on Debian without dpkg-dev."""
    if not os.path.exists("/etc/debian_version"):
        pytest.skip("not Debian")
    done = subprocess.run(["meson", "setup", tmp_path / "b", ROOT, "-Dlibdir=lib64"], capture_output=True, text=True,
                          timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    targets = json.loads((tmp_path / "b/meson-info/intro-targets.json").read_text())
    ours = [target for target in targets if f"{ROOT}/tests/" in target["defined_in"]]
    assert {target["name"] for target in ours} >= {"vckpt_internal", "rank_saver", "cuda"}
    assert not [target["name"] for target in ours if target["build_by_default"]]
    multiarch = subprocess.run(["cc", "-print-multiarch"], capture_output=True, text=True, check=True).stdout.strip()
    where = {pathlib.Path(path).name: path for path in read_installed(tmp_path / "b")}
    assert where["libvckpt.so.0"] == f"/usr/local/lib/{multiarch}/libvckpt.so.0"
    assert where["vckpt.pc"] == f"/usr/local/lib/{multiarch}/pkgconfig/vckpt.pc"


@pytest.fixture
def after(tmp_path):
    """Runs the last step of `meson install` with an ldconfig that notes how it is called, and knows what `known`
    names."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "ldconfig").write_text('#!/bin/sh\nif [ "${1:-}" = -p ]; then cat "$0.knows"; else echo called >> '
                                     '"$0.calls"; fi\n')
    (folder / "ldconfig").chmod(0o755)

    def run(known="", **env):
        (folder / "ldconfig.knows").write_text(known)
        (folder / "ldconfig.calls").unlink(missing_ok=True)
        done = subprocess.run([ROOT / "tools/after-install", "/opt/lib"], capture_output=True, text=True, check=True,
                              env={"PATH": f"{folder}:/usr/bin:/bin", **env})
        return done.stdout, (folder / "ldconfig.calls").exists()
    return run


def test_the_loader_learns_of_the_library(after):
    said, called = after("\tlibvckpt.so.0 (libc6,x86-64) => /opt/lib/libvckpt.so.0\n")
    assert (said, called) == ("", os.geteuid() == 0)
    said, called = after()
    assert "LD_LIBRARY_PATH=/opt/lib" in said and "ldconfig" in said
    assert after(DESTDIR="/somewhere") == ("", False)
