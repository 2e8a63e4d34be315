"""What FP8 does to the tensors of a model in training, in numbers.

`provider.py`    inputs of measured graphs, which take their statistics
`measurement.py` the numbers of one step, as records, as a flat dict and as a table
`monitor.py`     which steps are measured, and where their numbers go
"""

from fp8pass.tools.monitoring.measurement import GemmNumbers, Measurement, TensorNumbers
from fp8pass.tools.monitoring.monitor import Monitor, start

__all__ = ["GemmNumbers", "Measurement", "Monitor", "TensorNumbers", "start"]
