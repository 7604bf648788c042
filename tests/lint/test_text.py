# SPDX-License-Identifier: Apache-2.0
"""What .editorconfig asks of editors holds for the tree: UTF-8, lines that end in LF and in nothing else, a newline at
the end, tabs where tabs belong."""
import io
import pathlib
import re
import tokenize

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDERS = ["core", "proto", "index", "fs", "tools", "tests", "docs", ".ci"]
KEPT = ["tests/fuzz/corpus", "tests/golden"]        # bytes that are read by tests, as they were written


def made(path):
    """By tools, as a cache."""
    return any(part == "__pycache__" or part.startswith(".") for part in path.parts)


def texts():
    """(path, text) of every file of the tree that somebody edits."""
    files = [p for p in ROOT.iterdir() if p.is_file() and p.name != ".git"]     # .git is a file in a worktree
    for folder in FOLDERS:
        files += [p for p in (ROOT / folder).rglob("*") if p.is_file() and not made(p.relative_to(ROOT / folder))]
    for path in sorted(files):
        if path.suffix != ".so" and not any(path.is_relative_to(ROOT / kept) and path.suffix != ".py" for kept in KEPT):
            yield path, path.read_bytes()


def wrong_lines(test):
    return [f"{path.relative_to(ROOT)}:{number}" for path, text in texts()
            for number, line in enumerate(text.decode().splitlines(), 1) if test(path, line)]


def test_names_of_test_files_are_unique():
    """But in packages: pytest imports them by their names alone, and of two it collects one."""
    names = [p.name for p in (ROOT / "tests").rglob("test_*.py") if not (p.parent / "__init__.py").exists()]
    assert sorted(names) == sorted(set(names))


def test_files_are_utf8_text_and_end_in_one_newline():
    wrong = []
    for path, text in texts():
        try:
            text.decode()
        except UnicodeDecodeError as error:
            wrong.append(f"{path.relative_to(ROOT)}: {error}")
        if b"\r" in text or (text and (not text.endswith(b"\n") or text.endswith(b"\n\n"))):
            wrong.append(f"{path.relative_to(ROOT)}: a carriage return, no newline at its end, or an empty last line")
    assert not wrong, "\n".join(wrong)


def test_no_line_ends_in_blanks():
    wrong = wrong_lines(lambda path, line: line != line.rstrip(" \t"))
    assert not wrong, "\n".join(wrong)


def test_c_is_indented_by_tabs():
    """Blanks follow them only to align; a line of a macro may be nothing but its backslash."""
    def test(path, line):
        return path.suffix in (".c", ".h") and re.match(r"\t* +\t| {2,}[^ \\]", line)
    wrong = wrong_lines(test)
    assert not wrong, "\n".join(wrong)


def test_python_and_build_files_are_indented_by_blanks():
    """A tab stands in Python only where it is another language's, in a string."""
    def test(path, line):
        return path.suffix in (".build", ".proto", ".toml") and "\t" in line
    wrong = wrong_lines(test)
    for path, text in texts():
        if path.suffix == ".py" and b"\t" in text:
            wrong += [f"{path.relative_to(ROOT)}:{token.start[0]}"
                      for token in tokenize.tokenize(io.BytesIO(text).readline)
                      if token.type in (tokenize.INDENT, tokenize.COMMENT) and "\t" in token.string]
    assert not wrong, "\n".join(wrong)
