"""What would a training step do on a cluster: how much memory, which messages, which waits, how long? ``ngpt simulate``.

step.py      runs Trainer.step and watches it             storage.py   memory by kind, and its peak
ranks.py     a process group without processes            meter.py     operators, FLOPs, messages; the roofline
corpus.py    what the loader reads                        kernels.py   CUDA's kernels, by their shapes
machine.py   the device: every operator passes through    values.py    the routing that is assumed
result.py    the report: text, JSON, HTML
"""

from .result import Result
from .step import simulate, simulate_for

__all__ = ["Result", "simulate", "simulate_for"]
