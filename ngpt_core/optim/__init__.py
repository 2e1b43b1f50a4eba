"""The update: how do parameters move? The paper's optimizer and its schedules.

    gated_adamw.py   GatedAdamW, the torch.optim.Optimizer        algorithm.py    one step of one tensor: Algorithm 1, in order
    smgc.py          Second-Moment Growth Clipping (appendix C)   pmen.py         Post-Moment Exploration Noise (appendix D)
    schedule.py      logarithmic decay and its relatives          diagnostics.py  the paper's figures, live
    auto_gate.py     the gate's threshold from statistics         single_file/    the optimizer as one file to copy
    groups.py        the rules of a parameter group               nonfinite.py    gradients with nan or inf
    paths.py         the plan of a group: each tensor's path      sharding.py     tensors in pieces on many ranks
    fused*           the one-pass kernels                         launches.py     on a GPU: tensors that share a launch
    arriving.py      numbers between host and device, without waiting

To follow one update, read gated_adamw.py (the shell), paths.py (the dispatch) and algorithm.py (the mathematics).
The tangent projection (appendix B) and the angular cap (section 2.3) are ``sphere.tangent`` and ``sphere.cap_angle``.
"""

from .auto_gate import AutoGate
from .diagnostics import Diagnostics
from .gated_adamw import GatedAdamW, gate, gate_power
from .pmen import PMEN
from .smgc import SMGC, growth_clip

__all__ = ["PMEN", "SMGC", "AutoGate", "Diagnostics", "GatedAdamW", "gate", "gate_power", "growth_clip"]
