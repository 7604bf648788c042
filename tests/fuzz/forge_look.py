# SPDX-License-Identifier: Apache-2.0
"""Looks at forged stores (forge.py) in every way there is: forge_look.py PLAN, a JSON file that forge_many.py writes.

For each case of the plan a store is forged, and read by every command, through a mount, by the Python package in this
process, and by a StorageReader of torch's distributed checkpoint in a process that lives as long as this one
(forge_dcp.py). What is not as it must be is told as one line of JSON a store on standard output, behind a line that
says which one it is, so that whoever reads the lines knows where this process ended if it did:

- a command ends by itself, in time, with an exit code of its manual; so does the daemon of the mount
- an error names a thing; no output has control characters; JSON is JSON
- the package raises its own errors only
- what two ways of reading deliver for a tensor or a blob is the same, or an error in both
- a store that `verify` finds sound is read in every way
- nothing that stands in a store is executed: what a pickle in it would run makes a file in the folder where all of
  these run, and that never appears

Memory is bounded by RLIMIT_AS, which all programs inherit; under the sanitizers by their own limit. Without them no
command may have more than COMMAND_MB at once."""
import contextlib
import errno
import faulthandler
import hashlib
import json
import os
import pathlib
import random
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
import threading
import time

import numpy as np

import vckpt
from forge import forge
from forge_bytes import CANARY

LIMIT_S, MOST_BYTES, MEMORY, COMMAND_MB = 30, 64 << 20, 6 << 30, 1024
TORCH_S = 60                # until a process has imported torch
WATCH_S = LIMIT_S + 20      # mend and gc watch heartbeats that they do not know; an export makes its files durable
SANITIZER = re.compile(r"AddressSanitizer|UndefinedBehaviorSanitizer|runtime error:|LeakSanitizer|hard rss limit")
CONTROL = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f]")
SOUND = {"ls", "info", "du", "log", "cat", "show", "export", "layout", "stalls"}  # commands that a sound store passes


class Torch:
    """The process that imports torch: made when it is asked first, and again after each that ended."""

    def __init__(self, folder, slow):
        self.err, self.slow, self.process, self.seen = folder / "dcp.stderr", slow, None, 0

    def start(self):
        environment = dict(os.environ)
        if environment.get("VCKPT_PRELOAD"):
            environment["LD_PRELOAD"] = environment["VCKPT_PRELOAD"]
        with open(self.err, "wb") as err:
            self.process = subprocess.Popen([sys.executable, pathlib.Path(__file__).with_name("forge_dcp.py"), "serve"],
                                            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=err, env=environment)
        self.seen, self.rest = 0, b""

    def ask(self, question):
        """The answer to a question, and what was said on standard error meanwhile; None: it ended, or was made to."""
        new = self.process is None
        if new:
            self.start()
        end = time.monotonic() + (3 * LIMIT_S + new * TORCH_S) * self.slow
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(question).encode() + b"\n")
            self.process.stdin.flush()
        answer = self.line(end)
        said = self.err.read_bytes()[self.seen:].decode("utf-8", "replace")
        self.seen += len(said.encode())
        if answer is None:
            said += f" ({'no end' if self.process.poll() is None else f'exit {self.process.wait()}'})"
            self.close()
        return answer and json.loads(answer), said

    def line(self, end):
        while b"\n" not in self.rest:
            if not select.select([self.process.stdout], [], [], max(0, end - time.monotonic()))[0]:
                return None
            data = os.read(self.process.stdout.fileno(), 1 << 20)
            if not data:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(LIMIT_S)
                return None
            self.rest += data
        line, self.rest = self.rest.split(b"\n", 1)
        return line

    def close(self):
        if self.process:
            self.process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(LIMIT_S if self.process.poll() is None and not self.rest else 0)
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()
        self.process = None


class Look:
    """One store. found: what is wrong, in words; notes: what is worth a look."""

    def __init__(self, words, store, scratch, rng, told=()):
        self.words, self.store, self.scratch, self.rng = words, store, scratch, rng
        self.slow, self.slowest, self.mb, self.torch_mb = 4 if words["sanitized"] else 1, (0, ""), (0, ""), 0
        self.blobs_lie = any(line.startswith("bytes ") for line in told)    # then dcp may refuse what others read
        self.found, self.notes, self.failed, self.commands, self.ways = [], [], [], 0, {}
        self.commands_s = self.mount_s = self.python_s = self.torch_s = self.entries = 0

    # ---- commands ----

    def run(self, command, *arguments, codes=(0, 1, 3, 4), binary=False, input=None):
        """(exit code, standard output)."""
        out, err = self.scratch / "stdout", self.scratch / "stderr"
        line = f"vckpt {command} {' '.join(map(repr, arguments))}"
        self.commands += 1
        start = time.monotonic()
        with open(out, "wb") as o, open(err, "wb") as e:
            process = subprocess.Popen([self.words["vckpt"], command, *map(os.fsencode, map(str, arguments))], stdout=o,
                                       stderr=e, stdin=subprocess.DEVNULL)
            code, mb = self.ended(process, WATCH_S if command in ("mend", "gc", "export") else LIMIT_S)
        took = time.monotonic() - start
        self.commands_s += took
        self.slowest, self.mb = max(self.slowest, (round(took, 3), line)), max(self.mb, (mb, line))
        if mb > COMMAND_MB and not self.words["sanitized"]:
            self.found.append(f"{line}: it had {mb} MB of memory at once, at most {COMMAND_MB} are expected")
        data, said = out.read_bytes(), err.read_bytes().decode("utf-8", "replace")
        if code not in codes:
            self.found.append(f"{line}: exit {code}: {said[-3000:]}")
        elif code:
            self.failed.append(f"{line}: {said[:300]}")
            text = said + data.decode("utf-8", "replace") * (not binary)
            if not re.search(r"[\w./-]*/[\w./-]+|step|run |tensor|pack|entry", text):
                self.found.append(f"{line}: the error names nothing: {text[:300]!r}")
        self.clean(line, said, "" if binary else data.decode("utf-8", "replace"))
        if "--json" in arguments and code == 0:
            try:
                return code, json.loads(data)
            except ValueError as wrong:
                self.found.append(f"{line}: no JSON: {wrong}: {data[:300]!r}")
                return 1, data
        return code, data

    def ended(self, process, limit_s):
        """(exit code, or "no end"; its peak of memory in MB, at least what this process has)"""
        handle = os.pidfd_open(process.pid)
        late = not select.select([handle], [], [], limit_s * self.slow)[0]
        os.close(handle)
        if late:
            process.kill()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        return "no end" if late else process.returncode, usage.ru_maxrss >> 10

    def clean(self, line, *texts):
        for text in texts:
            if SANITIZER.search(text):
                self.found.append(f"{line}: {text[-3000:]}")
            wrong = CONTROL.search(text)
            if wrong:
                at = wrong.start()
                self.found.append(f"{line}: a control character: {text[max(0, at - 60):at + 40]!r}")

    def every_command(self):
        s = self.store
        self.verified = self.run("verify", s, "--no-notes", "--json")[0]
        self.run("verify", s, "--no-notes", "-v")
        self.run("ls", s)
        self.run("ls", s, "--incoming", "--json")
        self.run("ls", s, "--incoming")
        self.run("du", s, "--packs")
        self.run("metrics", s)
        code, told = self.run("ls", s, "--json")
        runs = [r["run"] for r in told["runs"]] if code == 0 else self.words["runs"]
        self.steps = []
        for run in runs:
            self.run("ls", s, run, "--long")
            code, told = self.run("ls", s, run, "--json")
            steps = [x["step"] for x in told["steps"]] if code == 0 else []
            self.steps += [(run, n) for n in self.rng.sample(steps, min(2, len(steps)))]
            self.run("rm", s, run, "-n", "-y")
            self.run("report", s, run, "--html", self.scratch / "report.html")
            self.run("du", s, run, "--freed", run, "--json")
            self.run("log", s, run, "--long")
            self.run("log", s, run, "--json")
        self.run("find", s, "has tensor and digest != 0000 and not tensor ~ '*x'", "--json")
        self.run("find", s, "shape == [4] or dtype == f32 and component ~ m* or has tag")
        for run, step in self.steps:
            self.commands_of(f"{run}/{step}")

    def commands_of(self, step):
        s = self.store
        code, told = self.run("ls", s, step, "--json", "--long")
        self.run("ls", s, step)
        self.run("info", s, step, "--packs")
        self.run("info", s, step, "--json")
        self.run("du", s, step, "--tensors", "3", "--packs")
        self.run("stalls", s, step)
        self.run("stalls", s, step, "--json")
        self.run("verify", s, step, "--no-notes")
        self.run("cat", s, f"{step}/manifest.json")
        for other in self.steps[:2]:            # 2: of diff, what failed
            self.run("diff", s, step, "/".join(map(str, other)), codes=(0, 1, 2, 3, 4))
            self.run("diff", s, "/".join(map(str, other)), step, "--values", "--json", codes=(0, 1, 2, 3, 4))
        self.run("layout", s, step, "--check", self.words["layout"], codes=(0, 1, 2, 3, 4))
        for component in [c["component"] for c in told["components"]][:3] if code == 0 else []:
            self.run("ls", s, f"{step}/{component}", "--long")
            self.run("ls", s, f"{step}/{component}", "--json", "-l")
            self.run("show", s, f"{step}/{component}/*", "--json")
            self.run("cat", s, f"{step}/mesh/tp=2/rank-1/{component}.safetensors", binary=True)

    def export(self, step, form):
        """{path: bytes} of what it wrote."""
        out = self.scratch / "export"
        code, _ = self.run("export", self.store, step, out, "--format", form, "-q")
        found = None
        if code == 0:
            found = {p.relative_to(out).as_posix(): p.read_bytes() for p in out.rglob("*") if p.is_file()}
        for path in (out, out.with_name("export.incomplete")):
            shutil.rmtree(path, ignore_errors=True)
        return found

    # ---- ways of reading ----

    def way(self, key, way, function):
        """Notes what that way of reading delivers for it: a hash, or that it is an error."""
        try:
            data = function()
            got = hashlib.sha256(data).hexdigest()[:16] + f" ({len(data)} bytes)"
        except (OSError, MemoryError, KeyError) as wrong:
            got = f"error: {wrong}"
        except Exception as wrong:
            self.found.append(f"{key} by {way}: {type(wrong).__name__}: {wrong}")
            return
        self.clean(f"{key} by {way}", got)
        self.ways.setdefault(key, {})[way] = got

    def python(self, run, step):
        """Every tensor whole and in two boxes, and blobs, by the package."""
        start, name = time.monotonic(), f"{run}/{step}"
        faulthandler.dump_traceback_later(3 * LIMIT_S * self.slow, exit=True)
        try:
            with vckpt.open(self.store / run / str(step), framework="numpy") as opened:
                repr(opened)
                self.python_tensors(name, opened)
                self.python_blobs(name, opened)
        except (OSError, MemoryError) as wrong:
            self.failed.append(f"vckpt.open {name}: {wrong}")
            self.clean(f"vckpt.open {name}", str(wrong))
        except Exception as wrong:
            self.found.append(f"vckpt.open {name}: {type(wrong).__name__}: {wrong}")
        faulthandler.cancel_dump_traceback_later()
        self.python_s += time.monotonic() - start

    def dcp(self, run, step):
        """The same tensors, and the byte entries, by torch's distributed checkpoint."""
        name, start = f"{run}/{step}", time.monotonic()
        tensors = [key[1:] for key in self.ways if key[0] == name and len(key) == 3]
        answer, said = self.words["torch"].ask({"store": str(self.store), "run": run, "step": step, "tensors": tensors,
                                                "seed": self.rng.randrange(1 << 30)})
        self.torch_s += time.monotonic() - start
        self.clean(f"dcp {name}", said)
        if answer is None:
            self.found.append(f"dcp {name}: the reading process ended: {said[-3000:]}")
            return
        self.torch_mb = max(self.torch_mb, answer["mb"])
        self.entries += answer["entries"]
        self.failed += answer["failed"]
        self.found += answer["found"]
        self.clean(f"dcp {name}", *answer["failed"])
        for key, way, got in answer["ways"]:
            self.ways.setdefault(tuple(key), {})[way] = got

    def python_tensors(self, name, opened):
        tensors = opened.tensors()
        for t in self.rng.sample(tensors, min(12, len(tensors))):
            key = name, t.component, t.name
            if t.bytes > MOST_BYTES:                # what it claims to be: only its end
                box = [max(n - 1, 0) for n in t.shape], [min(n, 1) for n in t.shape]
                self.way(("end of", *key), "slices", lambda: opened.read(t.component, t.name, box=box).tobytes())
                continue
            self.way(key, "package", lambda: opened.read(t.component, t.name).tobytes())
            if t.shape and t.bytes:
                self.way(key, "slices", lambda: self.slices(opened, t))

    def slices(self, opened, t):
        d = self.rng.randrange(len(t.shape))
        at = self.rng.randrange(t.shape[d] + 1)
        parts = []
        for first, size in ((0, at), (at, t.shape[d] - at)):
            box = [0] * d + [first] + [0] * (len(t.shape) - d - 1), [*t.shape[:d], size, *t.shape[d + 1:]]
            parts.append(opened.read(t.component, t.name, box=box))
        return np.concatenate(parts, axis=d).tobytes()

    def python_blobs(self, name, opened):
        for b in opened.blobs()[:20]:
            if b.bytes <= MOST_BYTES:
                self.way((name, "blob", b.name, b.rank), "package", lambda: opened.blob(b.name, b.rank))

    def files(self, name, way, read):
        """Tensors and blobs by the files of a tree; read(path): its bytes."""
        try:
            text = bytes(read("manifest.json"))
            told = json.loads(text)
        except OSError as wrong:
            self.failed.append(f"{way} {name}: {wrong}")
            for key in [k for k in self.ways if k[0] == name]:
                self.ways[key][way] = f"error: {wrong}"
            return
        self.clean(f"manifest.json of {name} by {way}", text.decode("utf-8", "replace"))
        for t in told["tensors"]:
            key = name, t["component"], t["name"]
            if key in self.ways and t["file"].endswith(".npy"):
                self.way(key, way, lambda: read(t["file"])[4096:])
        for b in told["blobs"][:20]:
            if (name, "blob", b["name"], b.get("rank")) in self.ways:
                self.way((name, "blob", b["name"], b.get("rank")), way, lambda: read(b["file"]))
        for c in told["components"]:
            if c.get("safetensors"):
                self.safetensors(name, f"{way} safetensors", c, read)

    def safetensors(self, name, way, component, read):
        left_out = component.get("left_out", ())
        keys = [k for k in self.ways if k[:2] == (name, component["name"]) and k[2] not in left_out]
        try:
            data = read(component["safetensors"])
            length = int.from_bytes(data[:8], "little")
            header = json.loads(data[8:8 + length])
        except OSError as wrong:
            self.failed.append(f"{way} {name}: {wrong}")
            return
        for key in keys:
            begin, end = header[key[2]]["data_offsets"]
            self.way(key, way, lambda: data[8 + length + begin:8 + length + end])

    def exported(self, run, step):
        name = f"{run}/{step}"
        for form in ("npy", "safetensors"):
            found = self.export(name, form)
            if found is None:
                continue

            def read(path):
                if path not in found:
                    raise OSError(errno.ENOENT, "not exported", path)
                return found[path]
            self.files(name, f"export {form}", read)

    def cat(self):
        """Some tensors, one by one."""
        keys = [k for k in self.ways if len(k) == 3 and "\0" not in k[2]]
        for key in self.rng.sample(keys, min(3, len(keys))):
            code, data = self.run("cat", self.store, "/".join(key), "--raw", binary=True)
            self.ways[key]["cat"] = (hashlib.sha256(data).hexdigest()[:16] + f" ({len(data)} bytes)" if code == 0 else
                                     f"error: exit {code}")

    # ---- the mount ----

    def mounted(self):
        start, point, log = time.monotonic(), self.scratch / "mnt", self.scratch / "log"
        point.mkdir(exist_ok=True)
        with open(log, "wb") as f:
            daemon = subprocess.Popen([self.words["mount"], "-f", str(self.store), str(point)], stdout=f, stderr=f,
                                      stdin=subprocess.DEVNULL)
        late = []
        guard = threading.Timer(2 * LIMIT_S * self.slow, lambda: (late.append(True), daemon.kill()))
        guard.start()
        try:
            while daemon.poll() is None and not os.path.ismount(point):
                time.sleep(.002)
            if daemon.poll() is None:
                self.through(point)
        finally:
            subprocess.run(["umount", "-l", str(point)], capture_output=True)
            try:
                code = daemon.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                daemon.kill()
                late.append(True)
                code = daemon.wait()
            guard.cancel()
        said = log.read_bytes().decode("utf-8", "replace")
        if late or code not in (0, 1, 2, 32):
            self.found.append(f"mount: {'no end' if late else f'exit {code}'}: {said[-3000:]}")
        if code:
            self.failed.append(f"mount: exit {code}: {said[-300:]}")
        self.clean("mount", said)
        self.mount_s += time.monotonic() - start

    def through(self, point):
        seen = 0
        for folder, folders, names in os.walk(point, onerror=lambda wrong: self.failed.append(f"mount: {wrong}")):
            folders[:] = [f for f in folders if f != ".vckpt"][:50]
            for name in names[:200]:
                with contextlib.suppress(OSError):
                    os.stat(os.path.join(folder, name))
                    os.listxattr(os.path.join(folder, name))
                seen += 1
            if seen > 2000:
                break
        for run, step in self.steps:
            def read(path):
                with open(point / run / f"step-{step:08d}" / path, "rb") as f:
                    return f.read(MOST_BYTES + 8192)
            self.files(f"{run}/{step}", "mount", read)

    # ---- what must hold ----

    def compare(self):
        for key, ways in self.ways.items():
            said = ways.get("dcp", "")
            refused = said.startswith("error") or said.endswith(" (0 bytes)")   # of no bytes torch asks for nothing
            if refused and (self.blobs_lie or ".dcp/metadata.json says" in said):
                del ways["dcp"]                     # its document is one of the blobs
            got = {v for v in ways.values() if not v.startswith("error")}
            bad = {w: v for w, v in ways.items() if v.startswith("error")}
            if len(got) > 1:
                self.found.append(f"{key}: other bytes by another way: {ways}")
            elif got and bad:
                (self.notes if set(bad) == {"slices"} or {w for w in ways if w not in bad} == {"slices"} else
                 self.found).append(f"{key}: read by one way and not by another: {ways}")

    def sound(self):
        """What verify finds good is read."""
        if self.verified != 0:
            return
        for line in self.failed:
            if line.startswith("dcp ") and (self.blobs_lie or ".dcp/metadata.json says" in line):
                continue
            if (line.split(" ")[1] in SOUND and "/mesh/" not in line) or not line.startswith("vckpt "):
                self.found.append(f"verify finds the store sound, but: {line}")
        for key, ways in self.ways.items():
            if any(v.startswith("error") for v in ways.values()):
                self.found.append(f"verify finds the store sound, but {key}: {ways}")

    def writers(self):
        """Those that write, at the end: they may fail, and must end."""
        run = self.words["runs"][0]
        if self.words["thorough"] and self.rng.random() < .1:
            self.run("mend", self.store, "-n", "--json")
            self.run("gc", self.store, "--heartbeat", "1s")
            self.run("abort", self.store, run)
        for folder in ("hosts", "incoming"):                        # heartbeats of other machines are watched for 20 s
            shutil.rmtree(self.store / folder, ignore_errors=True)
        self.run("mend", self.store, "-n", "--json")
        self.run("index", self.store)
        self.run("import", self.store, run, self.words["array"])
        self.run("rm", self.store, f"{run}/latest", "-y")
        self.run("gc", self.store, "--grace", "0")
        self.run("mend", self.store)

    def everything(self):
        self.every_command()
        for run, step in self.steps:
            self.python(run, step)
            if self.words["torch"]:
                self.dcp(run, step)
            self.exported(run, step)
        self.cat()
        if self.words["mount"]:
            self.mounted()
        self.compare()
        self.sound()
        self.writers()
        for path in (self.scratch / CANARY, self.store / CANARY):
            if path.exists():
                self.found.append(f"something that stands in the store was executed: it made {path}")
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def outcome(self):
        """What became of what was looked at: all of it was read, some, or nothing."""
        errors = [any(v.startswith("error") for v in ways.values()) for ways in self.ways.values()]
        failed = any(line.split(" ")[1] in SOUND and "/mesh/" not in line for line in self.failed)
        return "refused" if all(errors) else "read in part" if any(errors) or failed else "read"


def one(words, scratch, base, seed):
    store = scratch / "store"
    shutil.rmtree(store, ignore_errors=True)
    start = time.monotonic()
    told = forge(base["path"], store, seed, base["runs"])
    forge_s = time.monotonic() - start
    look = Look({**words, "runs": base["runs"]}, store, scratch, random.Random(f"look {seed}"), told)
    look.everything()
    return {"base": base["name"], "seed": seed, "told": told, "found": look.found, "notes": look.notes,
            "failed": look.failed, "verified": look.verified, "commands": look.commands, "tensors": len(look.ways),
            "entries": look.entries, "outcome": look.outcome(), "slowest": look.slowest, "mb": look.mb,
            "own_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10, "torch_mb": look.torch_mb,
            "whole_s": round(time.monotonic() - start, 3),
            "seconds": [round(x, 3) for x in (forge_s, look.commands_s, look.mount_s, look.python_s, look.torch_s)]}


def main():
    words = json.loads(pathlib.Path(sys.argv[1]).read_text())
    if not words["sanitized"]:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, 1 << 30))
    os.environ.pop("LD_PRELOAD", None)              # the sanitizers' run time, for this process alone
    scratch = pathlib.Path(words["scratch"])
    scratch.mkdir(exist_ok=True)
    os.chdir(scratch)
    words["torch"] = Torch(scratch, 4 if words["sanitized"] else 1) if words["dcp"] else None
    for base, seed in words["cases"]:
        if time.monotonic() > words["end"]:         # a clock that all processes have
            break
        print(json.dumps({"base": base, "seed": seed}), flush=True)
        print(json.dumps(one(words, scratch, words["bases"][base], seed)), flush=True)
    if words["torch"]:
        words["torch"].close()


if __name__ == "__main__":
    main()
