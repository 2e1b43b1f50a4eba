"""The nGPT training recipe: hyperspherical language models, and the optimizer that trains them.

    import ngpt_core as ng

This file lists all public names. A name is imported from its file when it is first used, so ``import ngpt_core`` stays
fast, and nobody needs the dependencies (plotly, transformers, a compiler) of a part they do not use.
"""

from importlib import import_module

__version__ = "0.2.0.dev0"

_WHERE = {  # public name -> the file that defines it (the same name there, or the module itself)
    "sphere": "sphere",
    # the update
    **dict.fromkeys(("GatedAdamW", "gate"), "optim.gated_adamw"),
    **dict.fromkeys(("SMGC", "growth_clip"), "optim.smgc"),
    "PMEN": "optim.pmen",
    "AutoGate": "optim.auto_gate",
    **dict.fromkeys(("Schedule", "log_decay", "cosine", "linear", "wsd", "match_auc", "warmup_before"), "optim.schedule"),
    "Diagnostics": "optim.diagnostics",
    # the forward pass
    **dict.fromkeys(("logit_scale", "linear_cross_entropy", "lgp_cross_entropy", "row_norms"), "nn.head"),
    "ModelConfig": "config",
    "preset": "presets",
    "LanguageModel": "nn.model",
    **dict.fromkeys(("save", "load"), "nn.io"),
    # everything that combines the two
    "recipe": "recipe",
    "hf": "hf",
}

TYPE_CHECKING = False  # type checkers treat it like typing's; importing typing would take several times as long as this file
if TYPE_CHECKING:  # the same names
    from . import hf, recipe, sphere
    from .config import ModelConfig
    from .nn.head import lgp_cross_entropy, linear_cross_entropy, logit_scale, row_norms
    from .nn.io import load, save
    from .nn.model import LanguageModel
    from .optim.auto_gate import AutoGate
    from .optim.diagnostics import Diagnostics
    from .optim.gated_adamw import GatedAdamW, gate
    from .optim.pmen import PMEN
    from .optim.schedule import Schedule, cosine, linear, log_decay, match_auc, warmup_before, wsd
    from .optim.smgc import SMGC, growth_clip
    from .presets import preset

__all__ = [  # a literal list: type checkers do not run code
    "PMEN", "SMGC", "AutoGate", "Diagnostics", "GatedAdamW", "LanguageModel", "ModelConfig", "Schedule", "__version__",
    "cosine", "gate", "growth_clip", "hf", "lgp_cross_entropy", "linear", "linear_cross_entropy", "load", "log_decay",
    "logit_scale", "match_auc", "preset", "recipe", "row_norms", "save", "sphere", "warmup_before", "wsd",
]  # fmt: skip

if not TYPE_CHECKING:  # with a module __getattr__, a checker would accept any name

    def __getattr__(name: str) -> object:
        if name not in _WHERE:
            moved = " Explorers and figures are in ngpt_book: from ngpt_book import Explorer." if name == "viz" else ""
            raise AttributeError(f"ngpt_core has no name {name!r}.{moved} It has: {', '.join(sorted(_WHERE))}.")
        where = _WHERE[name]
        module = import_module(f"{__name__}.{where}")
        value = module if where.rpartition(".")[2] == name else getattr(module, name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
