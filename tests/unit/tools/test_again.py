# SPDX-License-Identifier: Apache-2.0
"""What `tools/test --again` runs once more: a few tests that failed, unless a sanitizer reported something. With
programs in the place of meson, ninja and pytest."""
import os
import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]
# pytest: the first run prints the file `said`, and the tests in the file `failed` have failed; the second one passes
PYTHON = r"""#!/bin/sh
echo "$@" >> arguments
case " $* " in *" --last-failed "*) exit ;; esac
mkdir -p build/test/pytest-cache/v/cache
sed 's/.*/  "&": true,/; 1s/^/{\n/; $s/,$/\n}/' failed > build/test/pytest-cache/v/cache/lastfailed
cat said
exit 1
"""
MESON = '#!/bin/sh\n[ "$1" = test ] || { mkdir -p "$2"; touch "$2/build.ninja"; }\n'


@pytest.fixture
def again(tmp_path):
    """again(failed, said): exit status and standard output, and whether pytest ran a second time."""
    def put(name, text):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    version = subprocess.run(["python3", "--version"], capture_output=True, text=True, check=True).stdout
    for name, text in (("build/test-env/bin/python", PYTHON), ("bin/meson", MESON), ("bin/ninja", "#!/bin/sh\n"),
                       ("tools/packages", ""), ("tests/requirements.txt", "none\n"),
                       ("build/test-env/.made", f"none\n{version}")):
        put(name, text)
    shutil.copy(ROOT / "tools/test", tmp_path / "tools")

    def call(failed, said):
        put("failed", "".join(f"{name}\n" for name in failed))
        put("said", said)
        done = subprocess.run([tmp_path / "tools/test", "--no-install", "--no-sanitize", "--again"], text=True,
                              capture_output=True, timeout=60,
                              env={**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"})
        return done.returncode, done.stdout, "--last-failed" in (tmp_path / "arguments").read_text()
    return call


# What pytest prints of tests that say something of sanitizers.
WORDS = """
SKIPPED [1] cli/test_index_command.py:74: AddressSanitizer needs /proc
FAILED fuzz/test_forge.py::test_AddressSanitizer - assert 2 == 3
    SANITIZER = re.compile(r"AddressSanitizer|UndefinedBehaviorSanitizer|runtime error:|LeakSanitizer|hard rss limit")
>   assert done.returncode == CLEAN and "ThreadSanitizer" not in done.stderr, (done.returncode, done.stderr[:6000])
E   RuntimeError: a runtime error: LeakSanitizer does not work under ptrace
"""


def test_failures_run_once_more(again):
    failed = ["unit/a.py::test_x[1-y]", "unit/b.py::test_y"]
    status, said, second = again(failed, WORDS)
    assert (status, second) == (0, True) and "once more, alone:\n" + "\n".join(failed) in said, said
    assert said.splitlines()[-2:] == [
        f"tools/test: this test failed, and passed when it ran again alone; find out why: {failed[0]}", failed[1]]


@pytest.mark.parametrize("report", ids=["address", "leak", "check", "undefined", "race"], argvalues=[
    "==7==ERROR: AddressSanitizer: heap-buffer-overflow on address 0x602000000015 at pc 0x55d1 bp 0x7ffd sp 0x7ffd",
    "==31337==ERROR: LeakSanitizer: detected memory leaks",
    "E   AssertionError: ==12==AddressSanitizer: CHECK failed: asan_poisoning.cpp:37 \"((AddrIsInMem(addr))) != (0)\"",
    "../core/base/grid.c:31:12: runtime error: signed integer overflow: 2147483647 + 1 cannot be represented",
    "E   assert 'WARNING: ThreadSanitizer: data race (pid=71)\\n  Write of size 8 at 0x7b0400000010 by thread T1:'"])
def test_a_report_stays_a_failure(again, report):
    status, said, second = again(["unit/a.py::test_x"], WORDS + report + "\n")
    assert (status, second) == (1, False) and "tools/test: pytest: FAILED" in said, said


def test_many_failures_stay(again):
    status, _, second = again([f"unit/a.py::test_x[{i}]" for i in range(4)], "")
    assert (status, second) == (1, False)
