"""What may change between steps: the rules, and what is measured."""

from __future__ import annotations

import dataclasses

from fp8pass.inputs import MonitorSpec
from fp8pass.rules import Rules


@dataclasses.dataclass(frozen=True)
class Form:
    """What is asked of every graph for a while. One graph of Dynamo's is compiled once per form: NOTE [a switch] in
    `forms.py`."""

    rules: Rules
    watch: MonitorSpec | None = None
    """What is measured, in a step that is."""
