"""What `inspect(compiled)` gives: what was rewritten, what was not and why.

`report.py`  records of GEMMs and gathers of all graphs, unmatched rules
`graphs.py`  one compiled graph: before and after the pass, its forward and backward
`rules.py`   rules that decided nothing, and why
`checks.py`  what a compiled model warns of by itself
`eager.py`   how it is said that something ran eagerly, and its rows
`diff.py`    what two inspections decided differently
`picture.py` one layer of a graph as boxes and edges
`html.py`    the page: `page.html.jinja` is its template
`table.py`   the table that is printed, equal layers folded into one row
"""

from fp8pass.tools.inspection.graphs import GraphRecord
from fp8pass.tools.inspection.report import Inspection, make_inspection

__all__ = ["GraphRecord", "Inspection", "make_inspection"]
