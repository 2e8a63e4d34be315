"""Searches for the GEMMs that FP8 hurts, as rules: by measuring effects on the loss, or by the structure of a model."""

from fp8pass.tools.search.suggest import last_blocks, suggest_rules

__all__ = ["last_blocks", "suggest_rules"]
