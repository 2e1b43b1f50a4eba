"""Where is the optimizer as one file to copy? ``gated_adamw.py``, which needs only torch.

readable.py      a short GatedAdamW around ``algorithm.update``, without kernels, plans and sharding
make.py          writes gated_adamw.py: readable.py and everything of ours that it needs
gated_adamw.py   the result, for speed runs and other places where a package cannot be installed
"""
