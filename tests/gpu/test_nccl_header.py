# SPDX-License-Identifier: Apache-2.0
"""What core/comm/nccl_internal.h says of NCCL, against NCCL's own header and library: those that are installed, or,
with --full, those of the package nvidia-nccl-cu13 (340 MB). No device is needed."""
import ctypes
import importlib.util
import pathlib
import re
import subprocess
import sys
import zipfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
FLAGS = ["-std=gnu17", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]


def installed():
    """The folder that has include/nccl.h; NVIDIA's package for Python, or Debian's."""
    found = importlib.util.find_spec("nvidia")
    folders = [pathlib.Path(one) / "nccl" for one in (found.submodule_search_locations or [] if found else [])]
    return next((folder for folder in [*folders, pathlib.Path("/usr")] if (folder / "include/nccl.h").exists()), None)


@pytest.fixture(scope="module")
def nccl(request, tmp_path_factory):
    folder = installed()
    if folder:
        return folder
    if not request.config.getoption("--full"):
        pytest.skip("NCCL's header is not installed, and only --full downloads it")
    folder = tmp_path_factory.mktemp("nccl")
    done = subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:",
                           "--dest", folder, "nvidia-nccl-cu13"], capture_output=True, text=True, timeout=1200)
    if done.returncode:
        pytest.skip(f"nvidia-nccl-cu13 cannot be downloaded: {done.stderr.strip()[-200:]}")
    for wheel in folder.glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(folder)
        wheel.unlink()
    return folder / "nvidia/nccl"


def test_the_declarations_are_nccls(nccl, tmp_path):
    for name in ("cuda_runtime.h", "cuda_fp16.h", "cuda_bf16.h"):
        (tmp_path / name).write_text("")
    check = ["gcc", *FLAGS, f"-I{tmp_path}", f"-I{nccl}/include", f"-I{ROOT}", str(ROOT / "tests/gpu/nccl_check.c")]
    done = subprocess.run(check, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for right, wrong in (("int to, nccl_comm c", "long to, nccl_comm c"), ("REMOTE_ERROR = 6", "REMOTE_ERROR = 9"),
                         ("unsigned magic, version;", "unsigned magic;")):
        header = (ROOT / "core/comm/nccl_internal.h").read_text()
        assert right in header
        (tmp_path / "core/comm").mkdir(parents=True, exist_ok=True)
        (tmp_path / "core/comm/nccl_internal.h").write_text(header.replace(right, wrong))
        assert subprocess.run(check, capture_output=True).returncode != 0, wrong


def test_the_library_has_the_functions(nccl):
    library = nccl / "lib/libnccl.so.2"
    if not library.exists():
        pytest.skip("NCCL's library is not beside its header")
    library, version = ctypes.CDLL(str(library)), ctypes.c_int()
    assert library.ncclGetVersion(ctypes.byref(version)) == 0 and version.value >= 21400
    header = (ROOT / "core/comm/nccl_internal.h").read_text()
    functions = set(re.findall(r"^\tF\(\w+, (nccl\w+),", header, re.M)) | {"ncclGetErrorString", "ncclCommSplit"}
    assert len(functions) == 14
    assert [name for name in functions if not hasattr(library, name)] == []
