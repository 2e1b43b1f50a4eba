"""How do our models work with transformers?

    nemotron_h.py    the GPT baseline to and from its NemotronH
    modeling_ngpt.py, configuration_ngpt.py   nGPT and GPT as models of transformers, registered with its Auto classes here
    convert.py       between those and LanguageModel         export.py     a folder for from_pretrained and the Hub
    importers.py     other people's nGPT checkpoints         tokenizer.py  bytes as a tokenizer of transformers

Registration needs transformers; without it, everything here can be imported and says what to install when it is used.
"""

from typing import TYPE_CHECKING

from .convert import from_transformers, to_transformers
from .export import export
from .importers import from_lucidrains, from_nvidia
from .nemotron_h import from_nemotron_h, to_nemotron_h

if TYPE_CHECKING:
    from .configuration_ngpt import NGPTConfig
    from .modeling_ngpt import NGPTForCausalLM, NGPTModel
    from .tokenizer import NGPTByteTokenizer

__all__ = [
    "NGPTByteTokenizer", "NGPTConfig", "NGPTForCausalLM", "NGPTModel", "export", "from_lucidrains", "from_nemotron_h",
    "from_nvidia", "from_transformers", "to_nemotron_h", "to_transformers",
]  # fmt: skip


def _register() -> None:
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    from .configuration_ngpt import NGPTConfig
    from .modeling_ngpt import NGPTForCausalLM, NGPTModel
    from .tokenizer import NGPTByteTokenizer

    AutoConfig.register("ngpt", NGPTConfig, exist_ok=True)
    AutoModel.register(NGPTConfig, NGPTModel, exist_ok=True)
    AutoModelForCausalLM.register(NGPTConfig, NGPTForCausalLM, exist_ok=True)
    for value in (NGPTConfig, NGPTModel, NGPTForCausalLM, NGPTByteTokenizer):
        globals()[value.__name__] = value


try:
    _register()
except ImportError:
    if not TYPE_CHECKING:

        def __getattr__(name: str) -> object:
            if name in __all__:
                raise ImportError(f'ngpt_core.hf.{name} needs transformers. Install it: pip install "ngpt-core[hf]"')
            raise AttributeError(f"ngpt_core.hf has no name {name!r}. It has: {', '.join(__all__)}.")
