"""The backend where the entry points of environments that were installed before `fp8pass.runtime` look for it."""

from fp8pass.runtime.named_backend import fp8pass_backend as fp8pass_backend
