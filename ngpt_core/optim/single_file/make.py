"""How is the single file made? ``python -m ngpt_core.optim.single_file.make`` writes gated_adamw.py; a test keeps it equal."""

from pathlib import Path

from ...bundle import definitions, sorted_imports

__all__ = ["source"]

FILE = Path(__file__).with_name("gated_adamw.py")
HEAD = '''"""Is this the whole optimizer? Yes: GatedAdamW of "Training nGPT" in one file that needs only torch, to copy.

Generated from ngpt_core by ``python -m ngpt_core.optim.single_file.make``: edit the package instead. Apache-2.0, as ngpt_core.
The class is at the end; ``update`` is Algorithm 1 and everything around it, in the paper's order.
"""
'''


def source() -> str:
    """The text of the single file."""
    blocks, imports = definitions(FILE.with_name("readable.py"))
    text = "\n\n\n".join(blocks)
    return f"{HEAD}\n{sorted_imports(imports)}\n\n\n{text}\n"


if __name__ == "__main__":
    FILE.write_text(source(), encoding="utf-8")
    print(f"wrote {FILE}")
