"""Which lowering belongs to which operation."""


def register_all() -> None:
    """Register every lowering once."""
