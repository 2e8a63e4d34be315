"""Runs the code blocks of a Markdown page, in order and in one namespace.

    ```python   is executed
    ```output   equals what the page has printed since the last such block; numbers may differ in their third digit
    ```sh       is checked and not executed: its make targets, modules, scripts, options and extras exist
    ```text     is neither: formulas, diagrams, trees of files

What a block needs that not every machine has is written above it, invisible in the rendered page:

    <!-- skip: next if(missing("lightning"), reason="needs lightning") -->

Only such conditions skip a block. Setting up what the page takes for granted is `<!-- invisible-code-block: python ... -->`.
"""

import contextlib
import dataclasses
import importlib.util
import io
import math
import pathlib
import re
import shlex
import subprocess
import tomllib
import unittest
from collections.abc import Iterator
from typing import Any

import torch
from markdown_it import MarkdownIt
from sybil import Document, Example, Sybil
from sybil.document import Document as PlainDocument
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown import CodeBlockParser, SkipParser

ROOT = pathlib.Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
LANGUAGES = ("python", "output", "sh", "text")


def missing(*modules: str) -> bool:
    """True if one of the modules is not installed."""
    return any(importlib.util.find_spec(module) is None for module in modules)


def no_gpu() -> bool:
    """True if no CUDA device with FP8 tensor cores is there."""
    return not (torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9))


@dataclasses.dataclass
class Printed:
    """The text that the blocks of a page have printed since the last output block."""

    stream: io.StringIO = dataclasses.field(default_factory=io.StringIO)

    def take(self) -> str:
        text, self.stream = self.stream.getvalue(), io.StringIO()
        return text


def run_page(path: pathlib.Path) -> list[str]:
    """Run the blocks of a page; the reasons of those that this machine skips. Raises what a block raises."""
    printed = Printed()
    document = _sybil(printed).parse(path)
    document.namespace.update(missing=missing, no_gpu=no_gpu)
    skipped = []
    for example in document.examples():
        try:
            example.evaluate()
        except unittest.SkipTest as reason:
            skipped.append(str(reason))
            if isinstance(example.parsed, str) and example.region.lexemes["arguments"] == "python":
                compile(example.parsed, str(path), "exec")
    return skipped


def _sybil(printed: Printed) -> Sybil:
    run = PythonEvaluator()

    def python(example: Example) -> None:
        with contextlib.redirect_stdout(printed.stream):
            run(example)

    def output(example: Example) -> None:
        assert_same_text(printed.take(), example.parsed)

    def sh(example: Example) -> None:
        for line in example.parsed.replace("\\\n", " ").splitlines():
            check_command(shlex.split(line, comments=True))

    evaluators = {"python": python, "output": output, "sh": sh}
    blocks = [CodeBlockParser(language, evaluator) for language, evaluator in evaluators.items()]
    return Sybil([*blocks, SkipParser()], document_types={".py": PlainDocument})


def fences(path: pathlib.Path) -> Iterator[tuple[str, str]]:
    """(language, content) of each code block of a page; the language of an indented block is "indented"."""
    for token in MarkdownIt("commonmark").parse(path.read_text()):
        if token.type == "fence":
            yield token.info.strip(), token.content
        elif token.type == "code_block":
            yield "indented", token.content


def sentences(path: pathlib.Path) -> Iterator[str]:
    """The sentences of a page's paragraphs, list items, headings and cells of tables, without code."""
    for token in MarkdownIt("commonmark").enable("table").parse(path.read_text()):
        if token.type == "inline":
            text = "".join(
                " " if part.type.endswith("break") else part.content
                for part in token.children or ()
                if part.type != "code_inline"
            )
            yield from re.split(r"(?<=[.!?])\W*\s+", text)


def num_blocks(path: pathlib.Path, language: str) -> int:
    """The number of blocks of a language that the runner found in a page, without the invisible ones."""
    document: Document = _sybil(Printed()).parse(path)
    return sum(
        e.region.lexemes is not None
        and e.region.lexemes.get("arguments") == language
        and document.text[e.region.start :].lstrip(" ").startswith("`")
        for e in document.examples()
    )


def skip_conditions(path: pathlib.Path) -> list[str]:
    """The arguments of every skip comment of a page."""
    return re.findall(r"<!--+\s*skip:\s*(.*?)\s*--+>", path.read_text())


_NUMBER = re.compile(r"-?\d+\.\d+(?:e[+-]?\d+)?")


def assert_same_text(actual: str, expected: str) -> None:
    """Equal but for trailing space and the third digit of numbers with a decimal point."""

    def lines(text: str) -> list[str]:
        return [line.rstrip() for line in text.strip().splitlines()]

    assert [_NUMBER.sub("#", line) for line in lines(actual)] == [_NUMBER.sub("#", line) for line in lines(expected)], actual
    for a, b in zip(_NUMBER.findall(actual), _NUMBER.findall(expected), strict=True):
        assert math.isclose(float(a), float(b), rel_tol=1e-2, abs_tol=1e-4), f"the page says {b}, printed was {a}\n{actual}"


def check_command(words: list[str]) -> None:
    """AssertionError if a command of a page names a target, file, module, option or extra that does not exist."""
    while words and re.fullmatch(r"[A-Z_0-9]+=.*", words[0]):
        words = words[1:]
    if not words:
        return
    tool, *rest = words
    if tool == "make":
        subprocess.run(["make", "-n", *rest], cwd=ROOT, check=True, capture_output=True)
    elif tool == "pip":
        _check_requirements(rest)
    elif tool == "torchrun":
        script = next((i for i, word in enumerate(rest) if word.endswith(".py")), None)
        if script is not None:
            _check_script(rest[script:])
        else:
            _check_registry(rest[rest.index("torchtitan.train") + 1 :])
    elif tool.endswith(("python", "python3")):
        _check_module(rest[1:]) if rest[0] == "-m" else _check_script(rest)
    else:
        raise AssertionError(f"{tool!r} is a command that nothing checks; teach {__name__} to")


def _check_requirements(words: list[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for word in words:
        for extra in re.findall(r"(?:\.|fp8pass)\[(.*)\]", word):
            assert set(extra.split(",")) <= set(extras), f"no extra {extra!r}"


def _check_script(words: list[str]) -> None:
    _check_options((ROOT / words[0]).read_text(), words[1:])


def _check_module(words: list[str]) -> None:
    found = importlib.util.find_spec(words[0])
    assert found is not None, f"no module {words[0]!r}"
    for word in words[1:] if words[0] == "pytest" else ():
        assert "/" not in word or (ROOT / word.partition("::")[0]).exists(), f"no tests in {word}"
    if words[0].split(".")[0] in ("benchmarks", "tests"):
        assert found.origin is not None
        shared = ROOT / "benchmarks" / "common.py"  # the options of all benchmarks
        _check_options(pathlib.Path(found.origin).read_text() + shared.read_text(), words[1:])


def _check_registry(words: list[str]) -> None:
    """The configuration of torchtitan's trainer: a file of examples/ has the configuration."""
    file, name = words[words.index("--module") + 1], words[words.index("--config") + 1]
    assert f"def {name}()" in (ROOT / "examples" / f"{file}.py").read_text(), f"no configuration {name!r}"


def _check_options(source: str, words: list[Any]) -> None:
    for word in words:
        option = word.partition("=")[0]
        assert not option.startswith("--") or f'"{option}"' in source, f"no option {option}"
