"""PTX of the Triton kernels that Inductor generated, compiled for a GPU that is not there."""

from __future__ import annotations

import pathlib
import re
from typing import Any

from tests.support.cross_codegen import fake_gpu
from tests.support.replay import load_kernel

_KERNEL = re.compile(r"async_compile\.triton\('(\w+)', '''(.*?)''', device_str='cuda'\)", re.DOTALL)


def sources(code: str) -> dict[str, str]:
    """Kernel name -> source, of every kernel in Inductor's generated code."""
    return dict(_KERNEL.findall(code))


def compile_kernels(code: str, folder: pathlib.Path, capability: int = 90) -> dict[str, list[str]]:
    """Kernel name -> PTX of each of its configurations, for every kernel in Inductor's generated code."""
    found = {}
    for name, source in sources(code).items():
        kernel = load_kernel(name, source, folder / f"{name}.py")
        found[name] = [compile_config(kernel, config, capability).asm["ptx"] for config in kernel.configs]
    return found


def compile_config(kernel: Any, config: Any, capability: int = 90) -> Any:
    """Triton's compiled form of one configuration of Inductor's kernel."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    (attributes,) = kernel.triton_meta["configs"]
    names = kernel.fn.arg_names
    constants = {**kernel.triton_meta.get("constants", {}), **config.kwargs}
    signature = {**kernel.triton_meta["signature"], **dict.fromkeys(config.kwargs, "constexpr")}
    by_position = {(names.index(k),): v for k, v in constants.items()}
    ast = ASTSource(kernel.fn, signature, by_position, getattr(attributes, "attrs", attributes))
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    with fake_gpu():
        return triton.compile(ast, target=GPUTarget("cuda", capability, 32), options=options)
