"""The nGPT training recipe: hyperspherical language models, and the optimizer that trains them.

    import ngpt_core as ng

This page is the whole public surface. A name is imported from its file when it is first used, so that ``import ngpt_core``
stays quick and what one part needs (plotly, transformers, a compiler) never stands in another's way.
"""

from importlib import import_module

__version__ = "0.2.0.dev0"

_WHERE = {  # public name -> the file that defines it (the same name there, or the module itself)
    "sphere": "sphere",
    # the update
    "GatedAdamW": "optim.gated_adamw",
    "gate": "optim.gated_adamw",
    "SMGC": "optim.smgc",
    "growth_clip": "optim.smgc",
    "PMEN": "optim.pmen",
    "log_decay": "optim.schedule",
    "cosine": "optim.schedule",
    "linear": "optim.schedule",
    "wsd": "optim.schedule",
    "match_auc": "optim.schedule",
    "Schedule": "optim.schedule",
    "warmup_before": "optim.schedule",
    "Diagnostics": "optim.diagnostics",
    # the forward pass
    "logit_scale": "nn.head",
    "linear_cross_entropy": "nn.head",
    "row_norms": "nn.head",
    "ModelConfig": "config",
    "preset": "presets",
    "LanguageModel": "nn.model",
    "save": "nn.io",
    "load": "nn.io",
    # both together, and around them
    "recipe": "recipe",
    "hf": "hf",
}

__all__ = [*_WHERE, "__version__"]


def __getattr__(name: str):
    if name not in _WHERE:
        raise AttributeError(f"ngpt_core has no name {name!r}. It has: {', '.join(sorted(_WHERE))}.")
    where = _WHERE[name]
    module = import_module(f"{__name__}.{where}")
    value = module if where.rpartition(".")[2] == name else getattr(module, name)
    globals()[name] = value
    return value


def __dir__():
    return sorted(__all__)
