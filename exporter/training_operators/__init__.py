"""What one aten operator of a traced training graph is in ONNX, opset 20: a file for each kind of operator.

A rule takes the writer and the node and gives the names of the node's results. An operator without a rule here is
refused by exporter.training_onnx, so that nothing is written that has not been thought about.
"""

from exporter.training_operators import elementwise, maps, shapes, sums  # noqa: F401  they fill RULES
from exporter.training_operators._writer import RULES, TYPES, Writer

__all__ = ["RULES", "TYPES", "Writer"]
