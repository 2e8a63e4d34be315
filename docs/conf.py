"""The documentation site, built by Sphinx: `make docs`, where warnings are errors.

Pages are Markdown that reads well on a code host too, so links are relative to the file that they are in. README.md,
CONTRIBUTING.md and CHANGELOG.md are pages of the site as well (`PAGES_AT_THE_ROOT`).
"""

from __future__ import annotations

import importlib.util
import pathlib
import posixpath
import re
from typing import Any

from docutils import nodes
from sphinx.ext.napoleon import Config, GoogleDocstring

import fp8pass

DOCS = pathlib.Path(__file__).parent
PAGES_AT_THE_ROOT = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}

project = fp8pass.__name__
release = version = fp8pass.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
highlight_language = "none"
default_role = "code"

# The API reference can be built without the frameworks of fp8pass.integrations.
_FRAMEWORKS = ("accelerate", "lightning", "safetensors", "transformers")
autodoc_mock_imports = [name for name in _FRAMEWORKS if importlib.util.find_spec(name) is None]

myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
# What a recipe overrides has no docstring of its own: its page lists its options alone.
autodoc_inherit_docstrings = False
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 80
python_use_unqualified_type_names = True
_ALIASES = {
    "RecipeName": "fp8pass.recipes",
    "BackendName": "fp8pass.options",
    "FsdpGather": "fp8pass.options",
    "SavedActivations": "fp8pass.options",
    "StepMode": "fp8pass.options",
    "Select": "fp8pass.rules",
    "WeightCopies": "fp8pass.options",
    "Engine": "fp8pass.recipes.engines",
    "AmaxAlgo": "fp8pass.recipes.delayed",
    "FormatName": "fp8pass.tools.export.formats",
}
autodoc_type_aliases = {name: f"{module}.{name}" for name, module in _ALIASES.items()}
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = project
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False

_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)(?=[)#])")
_SECTIONS = ("Args:", "Returns:", "Raises:", "Example:")
_CODE = re.compile(r"(`+)(.+?)\1")


def _as_linked_from_docs(text: str, folder: str) -> str:
    """A Markdown page of `folder`, with the links that it has when it is in docs/."""

    def target(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, link[1]))
        return PAGES_AT_THE_ROOT.get(path) or posixpath.relpath(path, "docs")

    return _LINK.sub(target, text)


# Types of others, by their last name; their inventories would need a network.
_TORCH = "https://docs.pytorch.org/docs/stable"
_PYTHON = "https://docs.python.org/3/library"
_PAGES_OF_OTHERS = {
    "Tensor": f"{_TORCH}/tensors.html#torch.Tensor",
    "Module": f"{_TORCH}/generated/torch.nn.Module.html",
    "GraphModule": f"{_TORCH}/fx.html#torch.fx.GraphModule",
    "Graph": f"{_TORCH}/fx.html#torch.fx.Graph",
    "Node": f"{_TORCH}/fx.html#torch.fx.Node",
    "ProcessGroup": f"{_TORCH}/distributed.html#torch.distributed.ProcessGroup",
    "dtype": f"{_TORCH}/tensor_attributes.html#torch.dtype",
    "device": f"{_TORCH}/tensor_attributes.html#torch.device",
    **{
        name: f"{_PYTHON}/stdtypes.html#{name}" for name in ("bool", "dict", "frozenset", "list", "set", "str", "tuple", "type")
    },
    **{name: f"{_PYTHON}/functions.html#{name}" for name in ("float", "int", "object", "property")},
    "None": f"{_PYTHON}/constants.html#None",
    **{name: f"{_PYTHON}/typing.html#typing.{name}" for name in ("Any", "ClassVar", "Literal")},
    **{
        name: f"{_PYTHON}/collections.abc.html#collections.abc.{name}"
        for name in ("Callable", "Collection", "Iterable", "Iterator", "Mapping", "Sequence")
    },
    "Path": f"{_PYTHON}/pathlib.html#pathlib.Path",
    "PathLike": f"{_PYTHON}/os.html#os.PathLike",
}


def _link_to_others(app: Any, env: Any, node: Any, contnode: Any) -> Any:
    page = _PAGES_OF_OTHERS.get(node["reftarget"].rpartition(".")[2]) if node["refdomain"] == "py" else None
    return nodes.reference("", "", contnode, refuri=page) if page else None


def _name_aliases(app: Any, what: str, name: str, obj: Any, options: Any, signature: str | None, returned: str | None) -> Any:
    """Within unions Sphinx writes the type that stands for an alias, not the alias."""
    if signature is None or "TypeAliasForwardRef" not in signature:
        return None
    return re.sub(r"TypeAliasForwardRef\('([\w.]+)'\)", r"~\1", signature), returned


def _link_pages(app: Any, docname: str, source: list[str]) -> None:
    source[0] = _as_linked_from_docs(source[0], "docs")


def _link_included(app: Any, path: pathlib.Path, parent: str, source: list[str]) -> None:
    source[0] = _as_linked_from_docs(source[0], posixpath.normpath(posixpath.join("docs", posixpath.dirname(str(path)))))


def _read_docstring(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Docstrings are plain text with code between backticks and in indented blocks, and they may have Google's sections.
    Sphinx reads reStructuredText, where `2**margin` would begin bold text, and "::" a block of code."""
    read: list[str] = []
    is_code = is_section = False
    for line in lines:
        if line and not line.startswith(" "):
            is_code, is_section = False, line in _SECTIONS
        elif line and not is_code and not is_section:
            read += ["", "::", ""]
            is_code = True
        read.append(line if is_code else _escaped(line))
    lines[:] = read
    if what in ("function", "method", "class"):
        lines[:] = GoogleDocstring(lines, Config(), app, what, name, obj, options).lines()


def _escaped(line: str) -> str:
    spans = _CODE.split(line)  # text, backticks, code, text, ...
    text = [span.replace("*", r"\*").replace("|", r"\|") for span in spans[0::3]]
    code = [f"``{span}``" for span in spans[2::3]]
    return "".join(part for pair in zip(text, [*code, ""], strict=True) for part in pair)


def setup(app: Any) -> None:
    app.connect("autodoc-process-signature", _name_aliases)
    app.connect("missing-reference", _link_to_others)
    app.connect("source-read", _link_pages)
    app.connect("include-read", _link_included)
    app.connect("autodoc-process-docstring", _read_docstring)
