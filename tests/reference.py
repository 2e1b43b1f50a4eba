"""The slow twins: every mechanism once more, straight from the paper's equations, in float64, with loops where clearest.

Nothing here imports ngpt_core. A twin is never optimized: it is what the fast code is compared with.
"""

import math

import numpy as np


# ---- optimizer (sections 2.2 and 2.3, appendices A-D) ----------------------------------------------------------------


# ---- logit scale and loss (section 2.1) ------------------------------------------------------------------------------


# ---- model blocks (section 3) ----------------------------------------------------------------------------------------


# ---- state-space scan (section 3.2) ----------------------------------------------------------------------------------
