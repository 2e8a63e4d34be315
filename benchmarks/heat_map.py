"""The expected speed-up of one linear over its sizes, as pictures for the documentation. Nothing is timed.

    python -m benchmarks.heat_map [--device h200] [--out docs/_static]

Of an nn.Linear of K features into N, with M tokens: its three GEMMs together, over bfloat16, by the cost model. The input and
the gradient of the output are quantized once for two GEMMs each, in a launch of their own (where a cast fuses with what makes
its input, it costs less), and the weight once for two.
"""

from __future__ import annotations

import argparse
import pathlib
from typing import Any

from benchmarks.cost_model import RECIPES, speedup_of_linears
from fp8pass.cost import Device, device_called

TOKENS = (2048, 8192, 32768)
SIZES = (512, 1024, 2048, 4096, 8192, 16384)


def draw(device: Device, path: pathlib.Path) -> None:
    """One square per N and K, a panel per recipe and number of tokens."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(
        len(TOKENS), len(RECIPES), figsize=(11, 8.2), sharex=True, sharey=True, layout="constrained", squeeze=False
    )
    labels = [str(size) if size < 1024 else f"{size // 1024}k" for size in SIZES]
    image: Any = None
    for row, m in zip(panels, TOKENS, strict=True):
        for panel, recipe in zip(row, RECIPES, strict=True):
            values = [[speedup_of_linears(recipe, m, [(k, n)], device) for n in SIZES] for k in SIZES]
            image = panel.imshow(values, cmap="RdYlGn", vmin=0.4, vmax=1.6, origin="lower")
            for y, line in enumerate(values):
                for x, value in enumerate(line):
                    panel.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=8)
            panel.set(title=f"{recipe}, M = {m}", xticks=range(len(SIZES)), yticks=range(len(SIZES)))
            panel.set_xticklabels(labels)
            panel.set_yticklabels(labels)
    figure.supxlabel("N, features of the output")
    figure.supylabel("K, features of the input")
    figure.suptitle(f"Expected speed-up of a linear over bfloat16, {device.name} (an estimate)")
    figure.colorbar(image, ax=panels, shrink=0.6)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    """Draw the picture of one device."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="h200")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).parents[1] / "docs" / "_static")
    given = parser.parse_args(argv)
    given.out.mkdir(parents=True, exist_ok=True)
    draw(device_called(given.device), given.out / f"speedup-{given.device}.png")


if __name__ == "__main__":
    main()
