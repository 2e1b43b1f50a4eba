"""How does a trained model leave, as a folder that transformers reads?

    ng.hf.export(run_or_model, folder)        ngpt export RUN --to hf FOLDER

The folder has weights and config (with ``auto_map``), the model's code in one file (``single_file.py``), a generation config,
the tokenizer, a model card with the run's figures and recipe, and a seal for ``ngpt check``.
``AutoModelForCausalLM.from_pretrained(folder)`` reads it where ngpt_core.hf is imported; elsewhere, add
``trust_remote_code=True``. To publish it: ``hf upload NAME FOLDER``.
"""

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .. import __version__
from ..config import ModelConfig
from ..files import new_folder, write_text
from ..nn.model import LanguageModel, unwrap
from ..seal import entry, seal_folder
from ..train.folder import RunFolder
from ..train.metrics import read_metrics
from ..train.trained import open_model, run_of
from .convert import need_transformers, to_transformers
from .single_file import configuration_source, modeling_source

if TYPE_CHECKING:
    from .modeling_ngpt import NGPTForCausalLM

__all__ = ["AUTO_MAP", "export", "write_code"]

AUTO_MAP = {
    "AutoConfig": "configuration_ngpt.NGPTConfig",
    "AutoModel": "modeling_ngpt.NGPTModel",
    "AutoModelForCausalLM": "modeling_ngpt.NGPTForCausalLM",
}


def write_code(folder: str | os.PathLike) -> None:
    """The files that ``auto_map`` names."""
    write_text(Path(folder) / "modeling_ngpt.py", modeling_source())
    write_text(Path(folder) / "configuration_ngpt.py", configuration_source())


def export(run_or_model: "str | Path | LanguageModel | NGPTForCausalLM", folder: str | Path, tokenizer: object = None) -> Path:
    """Write the model as a folder for transformers; returns the folder.

    run_or_model: a run's folder, or a model: a LanguageModel or an NGPTForCausalLM.
    folder: new or empty.
    tokenizer: of transformers or of ours, or the name or folder of one. None: the run's, or bytes for a model of 256 tokens;
        any other model without a run needs it.
    """
    need_transformers()
    from transformers import GenerationConfig

    from .tokenizer import transformers_tokenizer

    folder, run = Path(folder), None
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is not an empty folder: choose a new one for the exported model.")
    model: Any = run_or_model
    if isinstance(run_or_model, str | Path):
        named = tokenizer if isinstance(tokenizer, str) else None if tokenizer is None else "bytes"  # an object is used below
        model, found = open_model(str(run_or_model), torch.device("cpu"), named)
        run, tokenizer = run_of(str(run_or_model)), found if tokenizer is None or named == tokenizer else tokenizer
    size = model.config.vocab_size if hasattr(model, "config") else unwrap(model, "export").config.vocab_size
    if tokenizer is None and size != 256:
        raise ValueError(
            f"A model with a vocabulary of {size} tokens needs its tokenizer: pass tokenizer=, one of transformers, or the "
            "name or folder of one. (Only a vocabulary of 256 is unambiguous: bytes.)"
        )
    words = transformers_tokenizer("bytes" if tokenizer is None else tokenizer)
    if len(words) > size:
        raise ValueError(f"The tokenizer has {len(words)} tokens, more than the model's vocabulary of {size}.")
    ids = {"eos_token_id": words.eos_token_id, "pad_token_id": words.pad_token_id, "bos_token_id": words.bos_token_id}
    if getattr(model.config, "model_type", None) != "ngpt":
        model = to_transformers(unwrap(model, "export"))
    for name, value in ids.items():
        setattr(model.config, name, value)
    # the defaults of ``ngpt generate``
    model.generation_config = GenerationConfig(do_sample=True, temperature=0.8, top_k=0, **ids)
    with new_folder(folder) as new:
        words.save_pretrained(new)
        model.save_pretrained(new)
        write_text(new / "README.md", _card(model, folder.name, run))
        seal_folder(new, {path.name: entry(path) for path in new.iterdir()})
    return folder


def _card(model: "NGPTForCausalLM", name: str, run: RunFolder | None) -> str:
    """The model card: what it is, how it is loaded, how it was trained."""
    c, count = model.config, sum(p.numel() for p in model.parameters())
    kind = "nGPT (normalized Transformer)" if c.normalized else "GPT baseline of nGPT"
    kinds = c.layer_types or []
    names = {"linear_attention": "Mamba-2", "full_attention": "attention", "moe": "mixture of experts", "mlp": "MLP"}
    blocks = ", ".join(f"{kinds.count(kind)} {text}" for kind, text in names.items() if kind in kinds)
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [{"ngpt, hypersphere" if c.normalized else "gpt"}, mamba-2]
---

# {name}

A language model of {count:,} parameters: {kind}, {len(kinds)} blocks ({blocks}), hidden size {c.hidden_size}, vocabulary
{c.vocab_size}. Exported by ngpt_core {__version__}.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}", trust_remote_code=True)  # or: import ngpt_core.hf, and no remote code
tokenizer = AutoTokenizer.from_pretrained("{name}", trust_remote_code=True)  # it reads the model's config first
out = model.generate(**tokenizer("def ", return_tensors="pt"), max_new_tokens=100)
print(tokenizer.decode(out[0], skip_special_tokens=True))
```
{_training(run) if run is not None else ""}"""


def _training(run: RunFolder) -> str:
    """How the run trained the model: figures from metrics.jsonl, settings from config.json."""
    config, record, lines = run.config, run.record, read_metrics(run.path)
    rows = []
    if lines:
        last, held_out = lines[-1], [line["val_loss"] for line in lines if "val_loss" in line]
        rows = [("steps", f"{last['step']:,} of {record['steps']:,}"), ("tokens", f"{last['tokens']:,}")]
        rows.append(("training loss, last step", f"{last['loss']:.4f} nats per token"))
        if held_out:
            rows.append(("held-out loss", f"{held_out[-1]:.4f} nats per token (perplexity {math.exp(held_out[-1]):.3f})"))
        rows.append(("time", f"{last['time']:,.0f} s"))
    recipe = " ".join(config.recipe) or "the paper's numbers"
    model: ModelConfig = run.model
    rate = f"C = {model.C} (peak rate C / sqrt(d_model))" if model.normalized else f"peak rate {model.gpt_lr}"
    rows += [
        ("batch", f"{config.batch_size} sequences of {config.seq_len} tokens"),
        ("optimizer", f"{'GatedAdamW' if model.normalized else 'AdamW'}, {rate}"),
        ("recipe", f"{recipe}"),
        ("seed", str(config.seed)),
        ("tokenizer", f"{record['tokenizer']['spec']}"),
        ("corpora", "; ".join(f"{Path(x['folder']).name} (checksum {x['checksum'][:16]})" for x in record.get("corpora", []))),
        ("versions", ", ".join(f"{k} {v}" for k, v in record.get("versions", {}).items())),
    ]
    table = "\n".join(f"| {name} | {text} |" for name, text in rows)
    return f"\n## Training\n\n| | |\n|---|---|\n{table}\n"
