"""The backend's name, where the package was not installed with its entry point, or with that of an earlier version."""

from torch._dynamo.backends import registry

from fp8pass.runtime import named_backend


def register_backend() -> None:
    """Let torch know the backend "fp8pass", as the entry point does."""
    registry._lazy_import()  # reads the entry points
    if "fp8pass" not in registry._COMPILER_FNS:
        registry.register_backend(named_backend.fp8pass_backend, name="fp8pass")
    assert registry.lookup_backend("fp8pass") is named_backend.fp8pass_backend
