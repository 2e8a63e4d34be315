"""The command line: `python -m fp8pass` for the environment, `python -m fp8pass estimate` for an estimate of a model.

The model is that of a configuration of transformers, or what a function returns: `fp8pass/tools/named_models.py`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import pathlib
import platform
import sys
from collections.abc import Sequence

import torch

from fp8pass.cost import DEVICES
from fp8pass.errors import Fp8Error
from fp8pass.recipes import PRESETS
from fp8pass.tools.named_models import load
from fp8pass.tools.tables import counted
from lowering import hardware
from lowering.formats import E4M3, Granularity

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
#: The packages that fp8pass works with, and is built on.
_PACKAGES = ("triton", "transformers", "accelerate", "peft", "lightning", "torchtitan", "torchao", "numpy", "rich")
#: Folders in that of torch's caches, and what is in them.
_CACHES = {
    "aotautograd": "compiled graphs, with the decisions of fp8pass",
    "fxgraph": "generated code",
    "fp8pass": "the extra inputs of each graph",
    "triton": "kernels",
}
_SCALES = {
    "delayed, current": (Granularity.TENSOR_WISE, Granularity.TENSOR_WISE),
    "rowwise": (Granularity.ROW_WISE, Granularity.ROW_WISE),
    "blockwise": (Granularity.BLOCK_1X128, Granularity.BLOCK_128X128),
    "mxfp8": (Granularity.BLOCK_1X32, Granularity.BLOCK_1X32),
}
_EXAMPLES = """examples:
  python -m fp8pass estimate LlamaConfig hidden_size=4096 intermediate_size=14336 num_key_value_heads=8 vocab_size=128256
  python -m fp8pass estimate path/to/config.json --gpu h100 --tokens 16384
  python -m fp8pass estimate my_project.model:build --recipe blockwise --html > estimate.html
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit status."""
    parser = _parser()
    given, rest = parser.parse_known_args(arguments)
    if any(text.startswith("-") or "=" not in text for text in rest) or (rest and given.command is None):
        parser.error(f"unrecognized arguments: {' '.join(rest)}; see `{parser.prog} estimate --help`")
    if given.command is None:
        print(report())
        return 0
    given.sizes = [*given.sizes, *rest]  # those behind an option
    try:
        print(_estimate(given))
    except Fp8Error as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fp8pass",
        description="Print the installed versions and the operations that run natively on this machine.",
    )
    commands = parser.add_subparsers(dest="command", metavar="estimate")
    estimate = commands.add_parser(
        "estimate",
        help="the expected speed-up of a model's training step",
        description="Estimate the gain of FP8 in a training step of a model. Needs no GPU and no weights, and runs nothing.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = estimate.add_argument
    add("model", help="a config.json of transformers, its folder, a class such as LlamaConfig, or module:function that returns"
        " (model, *args)")  # fmt: skip
    add("sizes", nargs="*", default=[], metavar="NAME=VALUE", help="values that replace those of the configuration")
    add("--tokens", type=_positive, default=8192, help="tokens, or patches of images, of one forward (%(default)s)")
    add("--sequence", type=_positive, default=8192, help="tokens of one text (%(default)s)")
    add("--gpu", default="h200", help=f"{', '.join(DEVICES)} (%(default)s)")
    add("--recipe", default="all", help=f"all, {', '.join(PRESETS)} (%(default)s)")
    add("--dtype", choices=_DTYPES, default="bfloat16", help="of the Parameters of a configuration's model (%(default)s)")
    output = estimate.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print every GEMM as JSON")
    output.add_argument("--html", action="store_true", help="print a page of HTML")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _estimate(given: argparse.Namespace) -> str:
    from fp8pass.cost import device_called
    from fp8pass.tools.estimation import estimate_model

    device = device_called(given.gpu)  # before anything that takes time
    model, args, kwargs, note = load(given.model, given.sizes, given.tokens, given.sequence, _DTYPES[given.dtype])
    if note:
        print(f"note: {note}", file=sys.stderr)
    found = estimate_model(model, args, kwargs, device, given.recipe)
    return found.to_json() if given.json else found.to_html() if given.html else str(found).rstrip("\n")


# -- the environment, for bug reports


def report() -> str:
    """Versions, GPUs, and for each GPU and recipe what multiplies FP8 operands."""
    import fp8pass

    lines = [f"fp8pass       {fp8pass.__version__}"]
    lines += [f"Python        {platform.python_version()}, {platform.platform()}"]
    lines += [f"torch         {torch.__version__}, CUDA {torch.version.cuda or 'no'}, {torch.get_num_threads()} CPU threads"]
    lines += [f"{name:13} {version(name) or 'not installed'}" for name in _PACKAGES]
    lines += _caches()
    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())] if torch.version.cuda else []
    if not devices:
        return "\n".join([*lines, "GPU           none: FP8 is emulated, slower than float32, for development and tests"])
    for device in devices:
        lines += _gpu(device)
    return "\n".join(lines)


def _caches() -> list[str]:
    """Torch's compile caches: whether they are on, where, and what is in them."""
    from torch._functorch import config as functorch_config
    from torch._inductor import config
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    is_on = functorch_config.enable_autograd_cache and config.fx_graph_cache and not config.force_disable_caches
    found = [f"caches        {'on' if is_on else 'off'}, in {cache_dir()}"]
    for name, what in _CACHES.items():
        files = [path for path in pathlib.Path(cache_dir(), name).rglob("*") if path.is_file()]
        size = sum(path.stat().st_size for path in files) / 1e6
        found.append(f"  {name:18} {counted(len(files), 'file', 'files')}, {size:.1f} MB: {what}")
    return found


def version(package: str) -> str | None:
    """The installed version of a package; None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpu(device: torch.device) -> list[str]:
    capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
    memory = torch.cuda.get_device_properties(device).total_memory / 1e9
    lines = [f"GPU {device.index}         {torch.cuda.get_device_name(device)}, capability {capability}, {memory:.0f} GB"]
    if not hardware.has_fp8_tensor_cores(device):
        return [*lines, f"  no FP8: it requires compute capability {'.'.join(map(str, hardware.FP8_CAPABILITY))}"]
    return [*lines, *(f"  {name:18} {_native(scales, device)}" for name, scales in _SCALES.items())]


def _native(scales: tuple[Granularity, Granularity], device: torch.device) -> str:
    gemm = hardware.Gemm(E4M3, E4M3, *scales)
    refusal = hardware.refusal(gemm, device)
    if refusal is None:
        return "torch's GEMM"
    if not gemm.has_blocks or Granularity.BLOCK_1X32 in scales:
        return f"no: {refusal}"
    return "MXFP8 GEMMs with the same numbers" if hardware.has_mx_scaled_mm(device) else f"Triton's GEMM: {refusal}"


if __name__ == "__main__":
    sys.exit(main())
