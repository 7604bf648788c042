# SPDX-License-Identifier: Apache-2.0
"""Documents: links lead somewhere, lines are short, manual pages are sound, sizes that a format page gives are those of
the code, and the tree speaks of nothing but itself."""
import pathlib
import re
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "tests").rglob("*.md")])
MANUALS = sorted((ROOT / "docs/man").glob("*.[1-8]"))
EXAMPLES = sorted(p for p in (ROOT / "docs/examples").rglob("*") if p.is_file() and "__pycache__" not in p.parts)
FOLDERS = ["core", "proto", "index", "fs", "tools", "tests", "docs"]
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+)$", re.M)


def anchors(text):
    """As forges make them: lower case, punctuation away, blanks to hyphens."""
    return {re.sub(r"[^\w\- ]", "", h.strip().lower()).replace(" ", "-") for h in HEADING.findall(text)}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    wrong = []
    for target in LINK.findall(re.sub(r"```.*?```", "", page.read_text(), flags=re.S)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        if not file.exists() or ROOT not in [file.resolve(), *file.resolve().parents]:
            wrong.append(target)
        elif anchor and file.suffix == ".md" and anchor not in anchors(file.read_text()):
            wrong.append(target)
    assert not wrong, wrong


@pytest.mark.parametrize("page", PAGES + MANUALS + EXAMPLES, ids=lambda p: str(p.relative_to(ROOT)))
def test_lines_of_pages_have_120_columns(page):
    """Of manuals and examples too. Tables, and lines that hold an address, may be longer."""
    wrong = [f"{number}: {len(line)} columns" for number, line in enumerate(page.read_text().splitlines(), 1)
             if len(line.expandtabs(8)) > 120 and not line.lstrip().startswith("|") and "://" not in line]
    assert not wrong, "\n".join(wrong)


def test_files_that_documents_name_are_there():
    """`core/commit/list/list.c` and the like, in backquotes."""
    wrong = [f"{page.relative_to(ROOT)}: {name}" for page in PAGES
             for name in re.findall(r"`((?:core|proto|index|fs|tools|tests|docs)/[\w./-]+\.\w+)`", page.read_text())
             if not (ROOT / name).exists()]
    assert not wrong, "\n".join(wrong)


def test_files_that_sources_name_are_there():
    names = {p.name for folder in FOLDERS for p in (ROOT / folder).rglob("*") if p.is_file()}
    wrong = []
    for path in sorted(p for folder in FOLDERS[:5] for p in (ROOT / folder).rglob("*.[ch]")):
        for comment in re.findall(r"/\*.*?\*/", path.read_text(), re.S):
            for name in re.findall(r"(?<![\w/.<-])((?:[a-z_]+/)*[a-z][a-z_0-9]{2,}\.(?:c|h|md|proto))\b", comment):
                if name.split("/")[-1] not in names or ("/" in name and not any(
                        (ROOT / base / name).exists() for base in ("", "core"))):
                    wrong.append(f"{path.relative_to(ROOT)}: {name}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("manual", MANUALS, ids=lambda p: p.name)
def test_manual_pages_are_sound(manual):
    if shutil.which("mandoc"):
        done = subprocess.run(["mandoc", "-T", "lint", "-W", "warning", manual], capture_output=True, text=True)
        assert done.returncode == 0 and not done.stdout, done.stdout
    elif shutil.which("man"):
        done = subprocess.run(["man", "-l", "--warnings", "-P", "cat", manual], capture_output=True, text=True,
                              env={"PATH": "/usr/bin:/bin", "MANWIDTH": "80", "LC_ALL": "C.UTF-8"})
        assert done.returncode == 0 and not done.stderr, done.stderr
    else:
        pytest.skip("neither mandoc nor man is installed")
    text = manual.read_text()
    assert text.index(".Sh NAME") < text.index(".Sh SYNOPSIS" if ".Sh SYNOPSIS" in text else ".Sh DESCRIPTION")


def prototypes(text):
    """[(section, [prototype, ...]), ...] of C: comments, types and preprocessor lines away, blanks alike."""
    found = []
    for part in re.split(r"^/\* ---- (?=[a-z])", text, flags=re.M)[1:]:
        code = re.sub(r"/\*.*?\*/|^#[^\n]*$", "", "/* " + part, flags=re.S | re.M)
        code = re.sub(r"^(?:enum|struct)[ \w]* \{.*?^\};", "", code, flags=re.S | re.M)
        found.append((part.partition(" --")[0], [" ".join(one.split()) for one in code.split(";") if "(" in one]))
    return found


def test_the_manual_of_the_library_is_its_header():
    """Its parts are the header's sections, with the same prototypes in the same order; errors have the same names."""
    header, manual = (ROOT / "core/api/vckpt.h").read_text(), (ROOT / "docs/man/vckpt.3").read_text()
    description = manual.partition(".Sh DESCRIPTION\n")[2].partition("\n.Sh ")[0]
    parts = [(part.partition("\n")[0].lower(), [" ".join(one.split()) for block in re.findall(
        r"^\.Bd -literal\n(.*?)^\.Ed", part, re.S | re.M) for one in block.split(";") if one.strip()])
        for part in description.split(".Ss ")[1:]]
    assert len(parts) > 10 and sum(len(names) for _, names in parts) > 70
    assert parts == prototypes(header)
    assert re.findall(r"^\.It Dv -(VCKPT_E\w+)", manual, re.M) == re.findall(r"^\t(VCKPT_E\w+) = ", header, re.M)


def test_the_header_lists_its_sections():
    header = (ROOT / "core/api/vckpt.h").read_text()
    listed = re.findall(r"^ \*   ([a-z][a-z ]*?)  +", header.partition("#ifndef")[0], re.M)
    assert listed == [section for section, _ in prototypes(header)]


def test_the_page_of_c_shows_the_programs():
    """Which tests/install compiles and runs."""
    page = (ROOT / "docs/c.md").read_text()
    shown = re.findall(r"^```c\n(.*?)^```$", page, re.S | re.M)
    assert shown == [(ROOT / f"docs/examples/{name}.c").read_text() for name in ("save", "load", "read")]


# A constant, and what the page of its format says of it.
SIZES = [
    ("core/base/digest.h", "BASE_BLOCK_BYTES", 16384, "objects.md", "16 KiB|16,384|16384"),
    ("core/step/record.h", "STORE_RECORD_HEAD_BYTES", 48, "record.md", r"\b48\b"),
    ("core/pack/pack.h", "PACK_HEAD_BYTES", 4096, "pack.md", r"\b4,?096\b"),
    ("core/pack/pack_format.h", "PACK_ENTRY_BYTES", None, "pack.md", None),
    ("core/pack/pack.h", "PACK_TAIL_BYTES", 128, "pack.md", r"\b128\b"),
    ("proto/limits.h", "STORE_OBJECT_MAX_BYTES", 1 << 46, "objects.md", r"raw object \| 2\^46 bytes"),
    ("proto/limits.h", "STORE_OBJECT_MAX_BYTES", 1 << 46, "messages.md", r"raw length, at most 2\^46"),
    ("proto/limits.h", "STORE_ENCODED_MAX_BYTES", 64 << 20, "objects.md", r"encoded object \| 64 MiB raw"),
    ("proto/limits.h", "STORE_EXTENT_MAX_BYTES", 64 << 20, "objects.md", "at most 64 MiB, or one object"),
    ("proto/limits.h", "STORE_METADATA_MAX_BYTES", 1 << 30, "layout.md", "at most 1 GiB"),
    ("proto/limits.h", "STORE_METADATA_MAX_BYTES", 1 << 30, "part.md", "at most 1 GiB"),
    ("proto/limits.h", "STORE_METADATA_MAX_BYTES", 1 << 30, "objects.md", "1 GiB raw"),
    ("proto/limits.h", "STORE_VIEW_HEADER_MAX_BYTES", 100_000_008, "objects.md", r"view header \| 100,000,008 bytes"),
    ("proto/limits.h", "STORE_VIEW_HEADER_MAX_BYTES", 100_000_008, "header.md", "at most 100,000,008"),
    ("proto/limits.h", "STORE_INLINE_MAX_BYTES", 64, "part.md", "at most 64 raw bytes"),
    ("proto/limits.h", "STORE_BLOB_PARTS_MAX", 64, "names.md", "at most 64 parts"),
    ("proto/limits.h", "STORE_BLOB_PARTS_MAX", 64, "objects.md", "63 slashes, so 64 parts"),
    ("proto/limits.h", "STORE_BLOBS_SLASHES_EACH", 16, "names.md", "at most 16 slashes a blob"),
    ("proto/limits.h", "STORE_BLOBS_SLASHES_MORE", 4096, "names.md", "4,096 more"),
    ("proto/limits.h", "STORE_UNKNOWN_MAX", 1024, "messages.md", "at most 1,024 unknown fields"),
    ("proto/limits.h", "STORE_UNKNOWN_EVERY_BYTES", 64, "messages.md", "for each 64 bytes of it"),
    ("proto/limits.h", "STORE_DECODE_FACTOR", 16, "messages.md", "at most 16 bytes of memory for each byte of body"),
    ("proto/limits.h", "STORE_DECODE_BYTES", 4 << 20, "messages.md", "and 4 MiB"),
    ("proto/limits.h", "STORE_DECODE_OBJECT_FACTOR", 5, "messages.md", "5 bytes for each byte"),
    ("proto/limits.h", "STORE_DECODE_OBJECT_BYTES", 20 << 20, "messages.md", "and 20 MiB"),
    ("core/commit/list/list_numbers_internal.h", "LIST_END_MAX", 1 << 61, "list.md", r"below 2\^61"),
    ("core/commit/list/list.c", "AGAIN_MAX", 16, "list.md", "16 times at most"),
    ("core/step/chunk_internal.h", "CHUNK_HEAD_BYTES", None, "part.md", None),
    ("core/step/chunk_internal.h", "CHUNK_ROW_BYTES", None, "part.md", None),
    ("core/step/chunk_internal.h", "CHUNK_EXTENT_BYTES", None, "part.md", None),
    ("core/step/chunk_internal.h", "CHUNK_PIECE_BYTES", None, "part.md", None),
    ("proto/proto_internal.h", "PROTO_REF_BYTES", 72, "messages.md", r"\b72\b"),
    ("proto/proto_internal.h", "PROTO_CHUNK_ROW_BYTES", 88, "part.md", r"\b88\b"),
    ("proto/proto_internal.h", "PROTO_TENSOR_ROW_BYTES", 32, "layout.md", r"\b32\b"),
    ("proto/proto_internal.h", "PROTO_RANK_ROW_BYTES", 96, "manifest.md", r"\b96\b"),
    ("proto/proto_internal.h", "PROTO_LIVE_ROW_BYTES", 112, "list.md", r"\b112\b"),
    ("core/commit/list/list.h", "COMMIT_SNAPSHOT_EVERY", 64, "list.md", r"\b64"),
    ("proto/proto_internal.h", "PROTO_LAUNCH_ROW_BYTES", 8, "list.md", r"rows of 8 bytes"),
]


@pytest.mark.parametrize("source,name,value,page,pattern", SIZES, ids=[f"{s[1]}-{s[3]}" for s in SIZES])
def test_sizes_stand_in_the_format_pages(source, name, value, page, pattern):
    found = re.search(rf"\b{name}\b\s*=?\s*\(?(?:UINT64_C\()?(\d+)u?\)?(?: << (\d+)\))?", (ROOT / source).read_text())
    assert found, f"{source} has no {name}"
    number = int(found[1]) << int(found[2] or 0)
    assert value in (None, number)
    assert re.search(pattern or rf"\b{number}\b", (ROOT / "docs/format" / page).read_text()), f"{page}: {name} {number}"


def test_words_stand_in_the_format_pages():
    """Each word that the library knows has a row on the page of versions, and no other has; messages.md says where."""
    known = re.findall(r'\(char\[\]\)\{"([a-z0-9-]+)"\}', (ROOT / "proto/wire.c").read_text())
    page = (ROOT / "docs/format/versions.md").read_text().partition("## Words")[2].partition("\n## ")[0]
    assert known and known == sorted(known) == sorted(re.findall(r"^\| `([a-z0-9-]+)` \|", page, re.M))
    assert all(f"`{word}`" in (ROOT / "docs/format/messages.md").read_text() for word in known)


def test_the_tree_speaks_of_itself():
    """No working arrangements: machine paths of a checkout, persons, tickets."""
    words = re.compile(r"/work/|(?<![\w.])/tmp/(?:build|venv|brief)|\bthe lead\b|\bcolleagues?\b|\bissue \d", re.I)
    wrong = []
    endings = (".c", ".h", ".md", ".py", ".proto", ".build", ".1", ".5", ".8", "")
    for path in sorted(p for folder in FOLDERS for p in (ROOT / folder).rglob("*")):
        if path.suffix not in endings or not path.is_file() or path == pathlib.Path(__file__):
            continue
        if {"golden", "corpus", "__pycache__"} & set(path.parts):
            continue
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        wrong += [f"{path.relative_to(ROOT)}: {m[0]}" for m in words.finditer(text)]
    assert not wrong, "\n".join(wrong)


def test_licence_is_there():
    assert "Apache License" in (ROOT / "LICENSE").read_text()
