"""How do our models work with transformers? ``nemotron_h.py``: the GPT baseline to and from its NemotronH."""

from .nemotron_h import from_nemotron_h, to_nemotron_h

__all__ = ["from_nemotron_h", "to_nemotron_h"]
