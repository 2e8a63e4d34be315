"""Estimates of the speed-up and memory of a model that is not run."""

from fp8pass.tools.estimation.report import Estimation, GemmEstimate, RecipeEstimate
from fp8pass.tools.estimation.tracing import estimate_model

__all__ = ["Estimation", "GemmEstimate", "RecipeEstimate", "estimate_model"]
