"""torchtitan's Llama 3 in FP8, by its own trainer, with FSDP2 and torch.compile: a registry file. Nothing of it is changed.

    cd <torchtitan>                      # where assets/hf/Llama-3.1-8B is
    PYTHONPATH=<fp8pass>/examples torchrun --nproc-per-node 8 -m torchtitan.train \
        --module torchtitan_llama3 --config llama3_8b_fp8 --parallelism.spmd_backend partial_dtensor

Written for torchtitan 0.3.0. torch 2.13 trains its compiled models with this backend for parallelism alone, in high precision,
too. Other options of torchtitan work as before, such as `--parallelism.tensor_parallel_degree 2`.
"""

from __future__ import annotations

from torchtitan.config import CompileConfig
from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.config_registry import llama3_8b, llama3_debugmodel
from torchtitan.trainer import Trainer

from fp8pass.integrations.torchtitan import Fp8Converter


def in_fp8(config: Trainer.Config, flavor: str) -> Trainer.Config:
    """A configuration of torchtitan's, with blocks in FP8. The head is in no block, so it runs in high precision."""
    config.model_spec = model_registry(flavor, converters=[Fp8Converter.Config(recipe="delayed")])
    config.compile = CompileConfig(enable=True, components=["model", "loss"])
    return config


def llama3_8b_fp8() -> Trainer.Config:
    """Llama 3.1 8B: 8192 tokens per GPU and step, sharded over all GPUs (FSDP2)."""
    return in_fp8(llama3_8b(), "8B")


def llama3_debugmodel_fp8() -> Trainer.Config:
    """A few small layers: a first try."""
    return in_fp8(llama3_debugmodel(), "debugmodel")
