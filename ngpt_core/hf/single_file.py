"""How does an exported model run where ngpt_core is not installed?

``modeling_source()`` writes ``modeling_ngpt.py`` and every definition of ours that it needs, directly or through others, as
one file that imports only torch and transformers. transformers runs it with ``trust_remote_code=True``. Definitions are
copied as ``bundle.py`` copies them, with two more changes: ``einops.rearrange`` becomes the small one below, and our custom
operators get their own namespace, so that the file can be loaded beside ngpt_core, and two exported models beside each other.
"""

import inspect
import re
from typing import Any

from ..bundle import ROOT, definitions, sorted_imports

__all__ = ["configuration_source", "modeling_source"]

HEADER = """# Generated from ngpt_core by ngpt_core/hf/single_file.py. Do not edit: export the model again instead.
# The definitions of ngpt_core that the model needs, and then the model itself (ngpt_core/hf/modeling_ngpt.py).
"""


def rearrange(x: Any, pattern: str, **sizes: int) -> Any:
    """einops.rearrange of a tensor, for patterns of names, one level of brackets, "..." and 1."""
    left, right = (re.findall(r"\([^)]*\)|\S+", side) for side in pattern.split("->"))
    if "..." in left:
        hidden = [f"_{i}" for i in range(x.ndim - len(left) + 1)]
        left, right = ([n for group in side for n in (hidden if group == "..." else [group])] for side in (left, right))
    sizes = dict(sizes)
    names: list[str] = []
    for length, group in zip(x.shape, left):
        inner = [] if group == "1" else group.strip("()").split()
        known = 1
        for name in inner:
            known *= sizes.get(name, 1)
        for name in inner:
            sizes.setdefault(name, length // known)
        names += inner
    groups = [[] if group == "1" else group.strip("()").split() for group in right]
    order = [names.index(name) for group in groups for name in group]
    x = x.reshape([sizes[name] for name in names]).permute(order)
    shape = []
    for group in groups:
        length = 1
        for name in group:
            length *= sizes[name]
        shape.append(length)
    return x.reshape(shape)


def modeling_source() -> str:
    """The text of an exported folder's ``modeling_ngpt.py``."""
    blocks, found = definitions(ROOT / "hf" / "modeling_ngpt.py", beside=("configuration_ngpt",))
    body = re.sub(r'"ngpt_core::(\w+)"', r'f"{_NAMESPACE}::\1"', "\n\n\n".join(blocks))
    head = sorted_imports((found | {"import hashlib", "import re"}) - {"from einops import rearrange"})
    config = "from .configuration_ngpt import NGPTConfig"
    namespace = '_NAMESPACE = "ngpt_" + hashlib.sha256(__name__.encode()).hexdigest()[:16]  # of our custom operators'
    return f"{HEADER}{head}\n\n{config}\n\n{namespace}\n\n\n{inspect.getsource(rearrange)}\n\n{body}\n"


def configuration_source() -> str:
    """The text of an exported folder's ``configuration_ngpt.py``: ours as it is."""
    return (ROOT / "hf" / "configuration_ngpt.py").read_text(encoding="utf-8")
