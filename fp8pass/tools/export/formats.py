"""The formats of FP8 checkpoints and what they can hold: kinds of scales, names and shapes of tensors, `quantization_config`.

"compressed-tensors" is that of the library of this name and of llm-compressor; "fp8" is DeepSeek-V3's, which transformers
calls fine-grained FP8. Sources:

- compressed-tensors 0.20: quant_scheme.py, utils/match.py, its compressors
- transformers 5.24: integrations/finegrained_fp8.py, integrations/compressed_tensors.py and their quantizers
- vLLM 0.33: layers/quantization/fp8.py, utils/quant_utils.py, compressed_tensors/
- SGLang 0.5.23: these files under srt/layers
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, ClassVar, Literal, get_args

import torch

from fp8pass.errors import ExportError, nearest
from fp8pass.recipes import Quantization, ScaleFrom
from fp8pass.tools.export.weights import Fp8Weight
from lowering.copies import num_blocks
from lowering.formats import BLOCK, E4M3, MX_BLOCK, Granularity

#: Formats of exported checkpoints.
FormatName = Literal["compressed-tensors", "fp8"]


class ScaleKind(enum.Enum):
    """The scales of a weight and its input. The value is the word of reports."""

    STATIC = "one scale per tensor, those of inputs from earlier steps"
    TENSOR = "one scale per tensor"
    TENSOR_TOKEN = "one scale per tensor, of inputs per token"
    ROW = "one scale per row"
    BLOCK = "128x128 blocks, inputs 1x128"
    MX = "blocks of 32"


def kind_of(weight: Fp8Weight) -> ScaleKind | None:
    """The kind of a weight, None where no format has it."""
    if weight.weight.dtype is not E4M3 or weight.input.dtype is not E4M3:
        return None
    return _KINDS.get((_scales(weight.weight), _scales(weight.input)))


def _scales(quantization: Quantization) -> tuple[Granularity, ScaleFrom]:
    return quantization.granularity, quantization.scale_from


_OF_TENSOR, _OF_ROW = (Granularity.TENSOR_WISE, ScaleFrom.VALUE), (Granularity.ROW_WISE, ScaleFrom.VALUE)
_KINDS = {
    ((Granularity.TENSOR_WISE, ScaleFrom.STATE),) * 2: ScaleKind.STATIC,
    (_OF_TENSOR, _OF_TENSOR): ScaleKind.TENSOR,
    ((Granularity.ROW_WISE, ScaleFrom.SHARED), _OF_ROW): ScaleKind.TENSOR_TOKEN,
    (_OF_ROW, _OF_ROW): ScaleKind.ROW,
    ((Granularity.BLOCK_128X128, ScaleFrom.VALUE), (Granularity.BLOCK_1X128, ScaleFrom.VALUE)): ScaleKind.BLOCK,
    ((Granularity.BLOCK_1X32, ScaleFrom.VALUE),) * 2: ScaleKind.MX,
}


@dataclasses.dataclass(frozen=True)
class StoredScheme:
    """The look of the tensors of a weight in a checkpoint. Weights with equal schemes are one group of its config."""

    kind: ScaleKind
    power_of_2: bool = False  # Scales of blocks of 128 are powers of two. Otherwise False: it makes no difference to a reader.

    @classmethod
    def of(cls, kind: ScaleKind, weight: Fp8Weight) -> StoredScheme:
        """The scheme of a weight of a kind."""
        return cls(kind, kind is ScaleKind.BLOCK and weight.weight.power_of_2 and weight.input.power_of_2)

    def scale_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """Shape of the scales of a matrix [rows, columns], as `quantize_weight` returns them."""
        match self.kind:
            case ScaleKind.ROW:
                return rows, 1
            case ScaleKind.BLOCK:
                return num_blocks(rows, BLOCK), num_blocks(columns, BLOCK)
            case ScaleKind.MX:
                return rows, num_blocks(columns, MX_BLOCK)
            case _:
                return ()


ScaleNames = tuple[str, str]
"""The parts of the names of scales, of weights and of inputs, in place of `weight`, the name of a weight's tensor."""

_PLAIN: ScaleNames = ("weight_scale", "input_scale")


# The methods of a format are given matrices of a checkpoint: a Linear's weight, or that of one expert.


class CompressedTensors:
    """The format of the library compressed-tensors."""

    name: ClassVar[FormatName] = "compressed-tensors"
    has_several_schemes = True  # Weights of one checkpoint may have different schemes.

    def kind(self, kind: ScaleKind) -> ScaleKind:
        """The kind as which the format holds weights of a kind."""
        return kind

    def names(self, kind: ScaleKind) -> ScaleNames:
        """The names of the scales of a kind, as engines read them."""
        return _PLAIN

    def names_in_transformers(self, kind: ScaleKind) -> ScaleNames:
        """The names of the scales of a kind, as transformers reads them."""
        return _PLAIN

    def obstacle(self, scheme: StoredScheme, rows: int, columns: int, is_expert: bool) -> str | None:
        """The reason why a matrix cannot be held, or would be read wrongly; None if it can be held."""
        if scheme.kind is ScaleKind.MX and columns % MX_BLOCK:
            return f"shape: K is {columns}, and compressed-tensors divides it into groups of {MX_BLOCK}"
        if is_expert and scheme.kind in (ScaleKind.BLOCK, ScaleKind.MX):
            return "experts: in this format transformers reads one scale per tensor or row of them; format='fp8' has blocks"
        return None

    def stored_scale(self, scheme: StoredScheme, scale: torch.Tensor) -> torch.Tensor:
        """Scales as `quantize_weight` returns them, as the format stores them."""
        return scale.reshape(1) if scale.dim() == 0 else scale

    def config(
        self, schemes: Mapping[StoredScheme, Collection[str]], kept: Collection[str], head: str | None = None
    ) -> dict[str, Any]:
        """`quantization_config`. schemes: their modules; kept: those in high precision; head: the one that makes the logits."""
        kinds: dict[ScaleKind, list[str]] = {}
        for scheme, modules in schemes.items():
            kinds.setdefault(scheme.kind, []).extend(modules)
        # In vLLM and SGLang the head is no Linear: they read it in FP8 if its name is a target.
        everywhere = [*(head for modules in kinds.values() if head in modules), "Linear"]
        # Where transformers dequantizes, it takes the first group for all. Scales of blocks then serve for scales of tensors,
        # too; E8M0 codes would be taken for numbers, without a message, if theirs was the first.
        kinds = dict(sorted(kinds.items(), key=lambda item: {ScaleKind.BLOCK: 0, ScaleKind.MX: 2}.get(item[0], 1)))
        groups = {
            f"group_{i}": {
                "targets": everywhere if len(kinds) == 1 else _exact(modules),
                "weights": _quantization_args(kind, of_input=False),
                "input_activations": _quantization_args(kind, of_input=True),
                "output_activations": None,
                "format": _compressor(kind),
            }
            for i, (kind, modules) in enumerate(kinds.items())
        }
        formats = {_compressor(kind) for kind in kinds}
        return {
            "quant_method": "compressed-tensors",
            "format": formats.pop() if len(formats) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": _exact(kept),
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
        }


def _exact(names: Iterable[str]) -> list[str]:
    """Names of modules as compressed-tensors matches them: the whole name of a module, or the name of a class, unless "re:"
    precedes a regular expression. A name that could be one of the others is written as a regular expression."""

    def is_plain(name: str) -> bool:
        return not name.startswith("re:") and ("." in name or name.islower())

    return sorted(name if is_plain(name) else f"re:{re.escape(name)}$" for name in names)


def _compressor(kind: ScaleKind) -> str:
    return "mxfp8-quantized" if kind is ScaleKind.MX else "float-quantized"


def _quantization_args(kind: ScaleKind, *, of_input: bool) -> dict[str, Any]:
    """compressed-tensors' QuantizationArgs: presets FP8, FP8_DYNAMIC, FP8_BLOCK, MXFP8, and one without a name for TENSOR."""
    args: dict[ScaleKind, tuple[dict[str, Any], dict[str, Any]]] = {
        ScaleKind.STATIC: ({"strategy": "tensor"}, {"strategy": "tensor"}),
        ScaleKind.TENSOR: ({"strategy": "tensor"}, {"strategy": "tensor"}),
        ScaleKind.TENSOR_TOKEN: ({"strategy": "tensor"}, {"strategy": "token"}),
        ScaleKind.ROW: ({"strategy": "channel"}, {"strategy": "token"}),
        ScaleKind.BLOCK: ({"strategy": "block", "block_structure": [BLOCK, BLOCK]}, {"strategy": "group", "group_size": BLOCK}),
        ScaleKind.MX: ({"strategy": "group", "group_size": MX_BLOCK, "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"},)
        * 2,
    }
    chosen = args[kind][of_input]
    is_dynamic = of_input and kind is not ScaleKind.STATIC
    return {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": is_dynamic, **chosen}


class FineGrained:
    """DeepSeek-V3's format, and with one scale per tensor the one that engines call by the same name."""

    name: ClassVar[FormatName] = "fp8"
    has_several_schemes = False

    def kind(self, kind: ScaleKind) -> ScaleKind:
        """The kind as which the format holds it: inputs scaled per token or per tensor are the engine's choice."""
        return ScaleKind.TENSOR if kind is ScaleKind.TENSOR_TOKEN else kind

    def names(self, kind: ScaleKind) -> ScaleNames:
        return self.names_in_transformers(kind) if kind is ScaleKind.BLOCK else _PLAIN

    def names_in_transformers(self, kind: ScaleKind) -> ScaleNames:
        return "weight_scale_inv", "activation_scale"

    def obstacle(self, scheme: StoredScheme, rows: int, columns: int, is_expert: bool) -> str | None:
        if scheme.kind in (ScaleKind.ROW, ScaleKind.MX):
            return (
                f"scales: format 'fp8' has one per tensor or per 128x128 block, not {scheme.kind.value};"
                f" format='compressed-tensors' has"
            )
        if scheme.kind is ScaleKind.BLOCK and (rows % BLOCK or columns % BLOCK):
            return (
                f"shape: [{rows}, {columns}] does not consist of whole {BLOCK}x{BLOCK} blocks, and transformers reads such"
                f" weights of format 'fp8' wrongly"
            )
        return None

    def stored_scale(self, scheme: StoredScheme, scale: torch.Tensor) -> torch.Tensor:
        if scheme.power_of_2:
            return scale.to(torch.float8_e8m0fnu)
        return scale

    def config(
        self, schemes: Mapping[StoredScheme, Collection[str]], kept: Collection[str], head: str | None = None
    ) -> dict[str, Any]:
        ((scheme, modules),) = schemes.items()
        return {
            "quant_method": "fp8",
            "activation_scheme": "static" if scheme.kind is ScaleKind.STATIC else "dynamic",
            "weight_block_size": [BLOCK, BLOCK] if scheme.kind is ScaleKind.BLOCK else None,
            "scale_fmt": "ue8m0" if scheme.power_of_2 else "float",
            "modules_to_not_convert": _patterns(kept, modules),
        }


def _patterns(kept: Iterable[str], converted: Collection[str]) -> list[str]:
    """Names of kept modules as loaders match them. transformers takes them for regular expressions, which match from the start
    of a module's name up to a dot or its end, and for ends of names; engines compare names. So a name stands as it is, unless
    transformers would match a converted module as well, or could not read it: then it is escaped and anchored."""
    found = []
    for name in sorted(kept):
        is_plain = re.fullmatch(r"[\w.-]+", name) is not None
        is_loose = is_plain and any(is_skipped(other, name) for other in converted)
        found.append(name if is_plain and not is_loose else f"^{re.escape(name)}$")
    return found


def is_skipped(module: str, pattern: str) -> bool:
    """Say whether transformers takes a pattern of `modules_to_not_convert` for a module: `should_convert_module`."""
    return re.match(rf"(?:{pattern})(?=\.|$)", module) is not None or module.endswith(pattern)


CheckpointFormat = CompressedTensors | FineGrained
FORMATS: dict[FormatName, CheckpointFormat] = {"compressed-tensors": CompressedTensors(), "fp8": FineGrained()}


def format_called(name: object) -> CheckpointFormat:
    """The format of a name; raises ExportError for another one."""
    for known, found in FORMATS.items():
        if known == name:
            return found
    hint = nearest(name, get_args(FormatName)) if isinstance(name, str) else ""
    raise ExportError(f"format is {name!r}.{hint} Use one of {', '.join(map(repr, FORMATS))}")
