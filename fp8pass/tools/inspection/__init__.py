"""`inspect(compiled)`: the decision about every GEMM as a table, a page and pictures, and the difference of two of them."""

from fp8pass.tools.inspection.report import GraphRecord, Inspection, make_inspection

__all__ = ["GraphRecord", "Inspection", "make_inspection"]
