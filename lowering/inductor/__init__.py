"""Inductor lowerings of the operations. The backend calls `register_lowerings`; importing `lowering` does not."""

from __future__ import annotations


def register_lowerings() -> None:
    """Tell Inductor how to generate code for the operations; safe to call again."""
    from lowering.inductor import registry

    registry.register_all()
