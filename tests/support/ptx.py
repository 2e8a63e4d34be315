"""PTX of the Triton kernels that Inductor generated, compiled for a GPU that is not there."""

from __future__ import annotations

import importlib.util
import pathlib
import re

from tests.support.cross_codegen import fake_h200

_KERNEL = re.compile(r"async_compile\.triton\('(\w+)', '''(.*?)''', device_str='cuda'\)", re.DOTALL)


def compile_kernels(code: str, folder: pathlib.Path, capability: int = 90) -> dict[str, list[str]]:
    """Kernel name -> PTX of each of its configurations, for every kernel in Inductor's generated code."""
    with fake_h200():
        return {name: _compile(name, source, folder, capability) for name, source in _KERNEL.findall(code)}


def _compile(name: str, source: str, folder: pathlib.Path, capability: int) -> list[str]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    path = folder / f"{name}.py"
    path.write_text(source.replace("triton_helpers.set_driver_to_gpu()", ""))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kernel = getattr(module, name)
    (attributes,) = kernel.triton_meta["configs"]
    names = kernel.fn.arg_names
    results = []
    for config in kernel.configs:
        constants = {**kernel.triton_meta.get("constants", {}), **config.kwargs}
        signature = {**kernel.triton_meta["signature"], **dict.fromkeys(config.kwargs, "constexpr")}
        by_position = {(names.index(k),): v for k, v in constants.items()}
        ast = ASTSource(kernel.fn, signature, by_position, getattr(attributes, "attrs", attributes))
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        results.append(triton.compile(ast, target=GPUTarget("cuda", capability, 32), options=options).asm["ptx"])
    return results
