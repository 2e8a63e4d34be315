"""Every code block of the README and of docs/ is run or checked, and every public name is in the reference."""

import functools
import re
import shlex
import subprocess
from collections import Counter

import pytest
import torch

from fp8pass import fp8_compile
from fp8pass.options import CompileOptions
from tests.support.cases import each

pytest.importorskip("sybil", reason="it runs the code of the pages (extra `dev`)")

from markdown_it import MarkdownIt

from tests.support.documents import (
    LANGUAGES,
    PAGES,
    ROOT,
    check_command,
    fences,
    num_blocks,
    run_page,
    sentences,
    skip_conditions,
)


def name(path):
    return path.relative_to(ROOT).as_posix()


@pytest.fixture
def no_code_generation(request, monkeypatch):
    """Code is generated for one page, the quick start: on the others it is not the subject, and without it they run ten times
    faster."""
    if name(request.getfixturevalue("path")) != "docs/quick-start.md":
        for function in (fp8_compile, CompileOptions.__init__):
            monkeypatch.setitem(function.__kwdefaults__, "backend", "aot_eager")
        monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))


@pytest.mark.slow
@pytest.mark.usefixtures("no_code_generation")
@pytest.mark.filterwarnings("ignore:'pin_memory' argument:UserWarning")  # the Trainer's, without a GPU
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # Lightning's use of torch
@pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning")  # Lightning's advice
@pytest.mark.filterwarnings("ignore:.*The number of training batches:UserWarning")
@pytest.mark.parametrize("path", [p for p in PAGES if any(language in LANGUAGES for language, _ in fences(p))], ids=name)
def test_the_code_blocks_of_a_page_run(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        for reason in run_page(path):
            assert reason.startswith("needs "), reason
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


@each("path", PAGES)
def test_every_code_block_is_of_a_kind_that_is_checked(path):
    """No block escapes by its language, by being indented, by a skip, or because the runner reads Markdown differently."""
    languages = Counter(language for language, _ in fences(path))
    directives = {language for language in languages if language.startswith("{")}
    assert set(languages) - directives <= set(LANGUAGES)
    for language in ("python", "output", "sh"):
        assert num_blocks(path, language) == languages[language]
    for condition in skip_conditions(path):  # for what is not installed only
        assert re.fullmatch(r"(?:next|start) if\((?:missing|no_gpu)\(.*\), reason=\".+\"\)|end", condition), condition


@each("path", PAGES)
def test_no_sentence_has_more_than_40_words(path):
    assert [s for s in sentences(path) if len(re.findall(r"\w[\w'-]*", s)) > 40] == []


@pytest.mark.parametrize(
    "page",
    [
        "```python\nraise ValueError\n```",
        "```python\nprint(1.00)\n```\n\n```output\n1.10\n```",
        "```sh\nmake no_such_target\n```",
        "```sh\npython -m benchmarks.nonsense\n```",
        "```sh\npython examples/train_gpt.py --nonsense\n```",
        "```sh\npip install .[x]\n```",
        '<!-- skip: next if(missing("no_such_module"), reason="needs no_such_module") -->\n```python\nno python\n```',
    ],
)
def test_a_block_that_is_wrong_is_found(page, tmp_path):
    path = tmp_path / "page.md"
    path.write_text(page + "\n")
    with pytest.raises((ValueError, AssertionError, SyntaxError, subprocess.CalledProcessError)):
        run_page(path)


@each("path", PAGES)
def test_files_and_commands_that_sentences_name_exist(path):
    """Files with their folder, and commands. ROOM, NAME and TEST stand for names, train.py is the reader's."""
    tokens = MarkdownIt("commonmark").enable("table").parse(path.read_text())
    inline = [part.content for token in tokens for part in token.children or () if part.type == "code_inline"]
    for code in inline:
        if re.fullmatch(r"(?:tests|fp8pass|lowering|benchmarks|examples|docs)/[\w/.*-]+", code):
            pattern = code.replace("ROOM", "*").replace("NAME", "*").rstrip("/")
            assert list(ROOT.glob(pattern)), f"{code} does not exist"
        elif re.match(r"(?:[A-Z_0-9]+=\S+ )*(?:make|python3?|torchrun|pip install) ", code) and not re.search(
            "NAME|TEST|train.py", code
        ):  # the reader's own
            check_command(shlex.split(code))


def test_rows_of_the_readme_are_rows_of_the_benchmarks():
    """Each with six figures: bf16 and five recipes."""

    def figures(path, first, width):
        tables = (line.strip("| ").split(" | ") for line in (ROOT / path).read_text().splitlines() if line.startswith("| "))
        return [
            cells[first : first + 6] for cells in tables if len(cells) == width and cells[first].strip("-.0123456789") == ""
        ]

    summary, rows = figures("README.md", 1, 9), figures("docs/benchmarks.md", 4, 13)
    assert len(summary) >= 6
    assert [row for row in summary if row not in rows] == [], "in the README alone"


def test_every_public_name_is_in_the_reference():
    """`make docs` builds the site, of every page in docs/: what a directive does not find, a page in no table of contents and a
    broken link are errors there."""
    import fp8pass
    import lowering

    directives = re.findall(r"^\.\. auto\w+:: ([\w.]+)", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    public = {f"{package.__name__}.{name}" for package in (fp8pass, lowering) for name in package.__all__}
    assert public - set(directives) == set()
