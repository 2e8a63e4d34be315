"""What an export has written in FP8, and what it has not and why."""

from __future__ import annotations

import dataclasses
import pathlib

from fp8pass.graph.names import family


@dataclasses.dataclass(frozen=True)
class Written:
    """A weight that was written in FP8."""

    name: str
    """In the model."""
    scales: str
    recipe: str
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True, repr=False)
class ExportReport:
    """What an export did. `print` shows it, equal layers in one line."""

    folder: pathlib.Path
    format: str
    files: list[str]
    """The files of tensors, in order; none on a rank that writes nothing."""
    num_bytes: int
    """Bytes of all tensors, without the scales that are written once more for transformers."""
    written: list[Written]
    """Weights in FP8."""
    kept: dict[str, str]
    """Parameters with two dimensions or more that are in high precision -> why."""
    remarks: tuple[str, ...] = ()

    def __str__(self) -> str:
        files = "1 file" if len(self.files) == 1 else f"{len(self.files)} files"
        lines = [f"{len(self.written)} weights in FP8 as {self.format!r}, {self.num_bytes:,} bytes in {files}: {self.folder}"]
        for title, held in (
            ("in FP8", {w.name: f"{w.recipe}: {w.scales}" for w in self.written}),
            ("in high precision", self.kept),
        ):
            counts: dict[tuple[str, str], int] = {}
            for name, text in held.items():
                counts[family(name), text] = counts.get((family(name), text), 0) + 1
            for (name, text), count in counts.items():
                lines.append(f"  {title}: {name}{f' (x{count})' if count > 1 else ''}: {text}")
        return "\n".join([*lines, *self.remarks])

    def __repr__(self) -> str:
        return str(self)
