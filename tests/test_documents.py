"""Every code block of the README and of docs/ is run or checked, and every public name is in the reference."""

import functools
import json
import os
import re
import shlex
import subprocess
import sys
from collections import Counter

import pytest
import torch

from fp8pass import fp8_compile
from fp8pass.options import CompileOptions
from tests.support.backend import register_backend
from tests.support.cases import each

pytest.importorskip("sybil", reason="it runs the code of the pages (extra `dev`)")

from markdown_it import MarkdownIt

from tests.support.documents import (
    LANGUAGES,
    PAGES,
    ROOT,
    assert_same_text,
    check_command,
    fences,
    num_blocks,
    run_page,
    sentences,
    skip_conditions,
)
from tests.support.links import broken_links

CONDITION = re.compile(r"(?:next|start) if\((?:missing|no_gpu)\(.*\), reason=\".+\"\)|end")


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
    register_backend()
    try:
        for reason in run_page(path):
            assert reason.startswith("needs "), reason
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


@each("path", PAGES)
def test_every_code_block_is_of_a_kind_that_is_checked(path):
    """No block escapes by its language, by being indented, or because the runner reads Markdown differently."""
    languages = Counter(language for language, _ in fences(path))
    directives = {language for language in languages if language.startswith("{")}
    assert set(languages) - directives <= set(LANGUAGES)
    assert {language: num_blocks(path, language) for language in ("python", "output", "sh")} == {
        language: languages[language] for language in ("python", "output", "sh")
    }


@each("path", PAGES)
def test_blocks_are_skipped_for_what_is_not_installed_only(path):
    for condition in skip_conditions(path):
        assert CONDITION.fullmatch(condition), condition


@each("path", PAGES)
def test_no_sentence_has_more_than_40_words(path):
    assert [s for s in sentences(path) if len(re.findall(r"\w[\w'-]*", s)) > 40] == []


def test_sentences_are_found_in_paragraphs_lists_and_tables(tmp_path):
    path = tmp_path / "page.md"
    prose = "# Title\n\nOne `a b`\ntwo. **Three.** Four.\n\n- Five: six.\n"
    path.write_text(prose + "\n| a | b |\n|---|---|\n| seven | 0.5 |\n\n```sh\nmake docs\n```\n")
    words = [re.findall(r"\w[\w'-]*", sentence) for sentence in sentences(path)]
    assert words == [["Title"], ["One", "two"], ["Three"], ["Four"], ["Five", "six"], ["a"], ["b"], ["seven"], ["0", "5"]]


@pytest.mark.parametrize(
    "page",
    [
        "```python\nraise ValueError\n```",
        "```python\nprint(1.00)\n```\n\n```output\n1.10\n```",
        "```python\nprint('a')\n```\n\n```output\nb\n```",
        "```sh\nmake no_such_target\n```",
        '<!-- skip: next if(missing("no_such_module"), reason="needs no_such_module") -->\n```python\nno python\n```',
    ],
)
def test_a_block_that_is_wrong_is_found(page, tmp_path):
    path = tmp_path / "page.md"
    path.write_text(page + "\n")
    with pytest.raises((ValueError, AssertionError, SyntaxError, subprocess.CalledProcessError)):
        run_page(path)


def test_a_skipped_block_says_why(tmp_path):
    path = tmp_path / "page.md"
    path.write_text(
        '<!-- skip: next if(missing("no_such_module"), reason="needs no_such_module") -->\n```python\nimport x\n```\n'
    )
    assert run_page(path) == ["needs no_such_module"]


def inline_code(path):
    """The inline code of a page: `...` outside of blocks."""
    for token in MarkdownIt("commonmark").enable("table").parse(path.read_text()):
        yield from (part.content for part in token.children or () if part.type == "code_inline")


@each("path", PAGES)
def test_files_and_commands_that_sentences_name_exist(path):
    """Files with their folder, and commands. ROOM, NAME and TEST stand for names, train.py is the reader's."""
    for code in inline_code(path):
        if re.fullmatch(r"(?:tests|fp8pass|lowering|benchmarks|examples|docs)/[\w/.*-]+", code):
            pattern = code.replace("ROOM", "*").replace("NAME", "*").rstrip("/")
            assert list(ROOT.glob(pattern)), f"{code} does not exist"
        elif re.match(r"(?:[A-Z_0-9]+=\S+ )*(?:make|python3?|torchrun|pip install) ", code) and not re.search(
            "NAME|TEST|train.py", code
        ):  # the reader's own
            check_command(shlex.split(code))


def test_figures_of_a_benchmark_are_those_of_its_stored_results():
    """By date and commit; the commands of these letters are on the page."""
    rows = re.findall(r"\| ([CEHM]) \| ([\d-]{10}) \| (\w{7}) \|$", (ROOT / "docs/benchmarks.md").read_text(), re.MULTILINE)
    for letter, name in {"C": "cost_model", "E": "traffic", "H": "overhead", "M": "compile_time"}.items():
        results = [json.loads(path.read_text()) for path in (ROOT / "benchmarks/results").glob(f"{name}-*-cpu.json")]
        results += [json.loads(path.read_text()) for path in (ROOT / "benchmarks/results").glob(f"{name}-cpu.json")]
        stored = {
            (found.get("date", one["date"])[:10], found["commit"][:7])
            for one in results
            for found in (one, *one["rows"])
            if "commit" in found
        }
        assert {row[1:] for row in rows if row[0] == letter} <= stored, letter


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


def test_commits_of_the_benchmarks_are_in_the_history():
    def git(*words):
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)

    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("needs a clone with its history")
    commits = re.findall(r"\| ([0-9a-f]{7}) \|$", (ROOT / "docs/benchmarks.md").read_text(), re.MULTILINE)
    assert commits
    assert [c for c in dict.fromkeys(commits) if git("merge-base", "--is-ancestor", c, "HEAD").returncode] == []


@pytest.mark.exhaustive
@pytest.mark.zoo
def test_the_printed_estimate_is_that_of_the_command():
    pytest.importorskip("transformers", reason="needs transformers")
    (command,) = (content for language, content in fences(ROOT / "docs/which-recipe.md") if language == "sh")
    (printed,) = (content for language, content in fences(ROOT / "docs/which-recipe.md") if language == "text")
    environment = {**os.environ, "COLUMNS": "116"}
    run = [sys.executable, *shlex.split(command)[1:]]
    output = subprocess.run(run, cwd=ROOT, env=environment, check=True, capture_output=True, text=True).stdout
    first_table, rest = output.split("\n\n", 1)
    assert_same_text(first_table, printed)
    assert "\nBest: fp8_compile(" in rest
    assert "\nNot included: norms, the optimizer and communication" in rest


@pytest.mark.parametrize(
    "command",
    ["make nonsense", "python -m benchmarks.nonsense", "python examples/train_gpt.py --nonsense", "pip install .[x]", "ls"],
)
def test_commands_that_do_not_exist_are_found(command):
    with pytest.raises((AssertionError, subprocess.CalledProcessError)):
        check_command(command.split())


def test_broken_links_are_found(tmp_path):
    page = '<a href="other.html">1</a><a href="#there">2</a><a href="#gone">3</a><a id="there" href="https://example.org">4</a>'
    (tmp_path / "index.html").write_text(page + '<img src="index.html#there"><a href="../outside.html">5</a>')
    (tmp_path.parent / "outside.html").write_text("")
    assert broken_links(tmp_path) == [
        "index.html: other.html: no such file in the site",
        "index.html: #gone: no such element in the page",
        "index.html: ../outside.html: no such file in the site",
    ]


def test_every_public_name_is_in_the_reference():
    """`make docs` builds the site, of every page in docs/: what a directive does not find, a page in no table of contents and a
    broken link are errors there."""
    import fp8pass
    import lowering

    directives = re.findall(r"^\.\. auto\w+:: ([\w.]+)", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    public = {f"{package.__name__}.{name}" for package in (fp8pass, lowering) for name in package.__all__}
    assert public - set(directives) == set()
