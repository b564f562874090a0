"""Measure sentence shapes that make text hard to read, per package, and fail above the ceilings of `pyproject.toml`.

    python tools/prose.py                      every package of `[tool.prose]`; exit 1 above a ceiling
    python tools/prose.py --show SHAPE PATH... the sentences with this shape, with their places

A rate counts per 1,000 sentences of 5 to 80 words. A Python file gives its docstrings, its comments and its string
literals of six words or more. A Markdown file gives its paragraphs and table cells outside code blocks. A ceiling may
only be lowered.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
SHAPES = {
    "people": re.compile(r"\b(who|whoever|whom|nobody|somebody|anybody)\b", re.I),
    "headless": re.compile(
        r"(What|Who|Whoever|Where|Of|That which|One that|Those|So is|So are|So do|So does|Nor|Such)\b"
    ),
    "pronouns": re.compile(r"(?:\b(?:one|ones|that|those|it|they|them|others?)\b.*){3,}", re.I),
    "where": re.compile(r"\bwhere (it|that|there|they|this|one|those|nobody|somebody|nothing|none|no)\b", re.I),
    "none": re.compile(r"\b(is|are|of|was) none\b|\b(is|are) no\b(?! longer)", re.I),
}
# A colon does not end a sentence.
END_OF_SENTENCE = re.compile(r"(?<=[.;!?])\s+|\n\s*\n")


def texts_of_python(source: str) -> Iterator[tuple[int, str]]:
    """Docstrings, comments and messages with their lines."""
    nodes = list(ast.walk(ast.parse(source)))
    pieces = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in pieces:
            yield node.lineno, node.value if len(node.value.split()) >= 6 else ""
        elif isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
            yield node.lineno, text if len(text.split()) >= 6 else ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("#: ")


def texts_of_markdown(source: str) -> Iterator[tuple[int, str]]:
    """Paragraphs, items of lists and cells of tables with their lines."""
    in_code, begun, paragraph = False, 1, list[str]()
    for number, line in enumerate([*source.splitlines(), ""], start=1):
        is_fence = line.lstrip().startswith("```")
        in_code ^= is_fence
        if in_code or is_fence or line.startswith("    "):
            continue
        if line.startswith("|"):
            yield from ((number, cell) for cell in line.strip("|").split("|"))
        elif line.strip():
            begun = begun if paragraph else number
            paragraph.append(line.lstrip("#>-* "))
        else:
            yield begun, " ".join(paragraph)
            paragraph = []


def sentences(path: Path) -> Iterator[tuple[int, str]]:
    """The sentences of 5 to 80 words in a file, with the lines where their texts begin."""
    source = path.read_text(encoding="utf-8")
    for line, text in texts_of_markdown(source) if path.suffix == ".md" else texts_of_python(source):
        for part in END_OF_SENTENCE.split(text):
            words = part.split()
            if 5 <= len(words) <= 80:
                yield line, " ".join(words)


def is_of(shape: str, sentence: str) -> bool:
    """Whether a sentence has the shape; a headless one begins with it and is no question."""
    if shape == "headless":
        return bool(SHAPES[shape].match(sentence)) and not sentence.endswith("?")
    return bool(SHAPES[shape].search(sentence))


def files_of(path: Path) -> list[Path]:
    """A file itself, or the Python and Markdown files of a folder."""
    assert path.exists(), f"{path} does not exist"
    return [path] if path.is_file() else sorted([*path.rglob("*.py"), *path.rglob("*.md")])


def rates(path: Path) -> dict[str, float]:
    """Sentences with each shape, per 1,000 sentences."""
    found = [sentence for file in files_of(path) for _, sentence in sentences(file)]
    counts = Counter(shape for sentence in found for shape in SHAPES if is_of(shape, sentence))
    return {shape: 1000 * counts[shape] / max(len(found), 1) for shape in SHAPES}


def check() -> int:
    """Compare each package with its ceilings and print one line per package."""
    ceilings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["prose"]
    is_above = False
    for name, highest in ceilings.items():
        measured = rates(ROOT / name)
        above = [shape for shape in SHAPES if measured[shape] > highest[shape]]
        is_above |= bool(above)
        figures = ", ".join(f"{shape} {measured[shape]:.1f}/{highest[shape]}" for shape in SHAPES)
        print(f"{name}: {figures}" + (f"  ABOVE ITS CEILING: {', '.join(above)}" if above else ""))
    if is_above:
        print("Rewrite sentences with the subject first. To list them: python tools/prose.py --show SHAPE PATH")
    return int(is_above)


def show(shape: str, paths: list[Path]) -> int:
    """Print the sentences of a shape."""
    if shape not in SHAPES:
        print(f"{shape!r} is no shape: expected one of {', '.join(SHAPES)}")
        return 2
    for file in [file for path in paths for file in files_of(path)]:
        for line, sentence in sentences(file):
            if is_of(shape, sentence):
                print(f"{file}:{line}: {sentence}")
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--show"] and len(sys.argv) > 3:
        sys.exit(show(sys.argv[2], [Path(name) for name in sys.argv[3:]]))
    sys.exit(check())
