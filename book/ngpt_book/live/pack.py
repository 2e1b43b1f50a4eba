"""How do a model's weights become small enough for a page? Eight bits per coordinate of a row.

nGPT   a row is a direction, so its integers are enough:   w = Norm(q)
GPT    a row also has a length:                            w = scale * q,   one float32 per row

Everything else (alpha, the scales, the convolution, decays and biases, 1% of the numbers) stays in float32. The file is a
safetensors file, the config and the run's facts in its metadata; the script of the page (model.js) reads the same bytes. A page
gets them in base64, as scripts of a few hundred kB: unlike other files, scripts also load from a disk (file://), and the number
of those that have arrived is the progress of loading.
"""

import base64
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

import ngpt_core as ng

__all__ = ["WHICH", "dequantized", "facts", "model", "pieces", "quantized", "write"]

WHICH = ("ngpt", "gpt")
PIECES = 8  # scripts per model
LEVELS = 127
SCALE = ".scale"  # the suffix of GPT's scales


def file(which: str) -> Path:
    if which not in WHICH:
        raise ValueError(f"The models in the page are {' and '.join(map(repr, WHICH))}; got {which!r}.")
    return Path(__file__).with_name(f"weights_{which}.safetensors")


# ---- eight bits ------------------------------------------------------------------------------------------------------
def quantized(model: ng.LanguageModel) -> dict[str, Tensor]:
    """The state of a model with every matrix of rows [..., d_model] in int8 (and for GPT, the rows' scales)."""
    state: dict[str, Tensor] = {}
    for name, x in model.state_dict().items():
        if x.ndim < 2 or x.shape[-1] != model.config.d_model:
            state[name] = x.float().contiguous()
            continue
        scale = x.abs().amax(-1, keepdim=True).double() / LEVELS
        state[name] = (x / scale.clamp_min(1e-30)).round().to(torch.int8)
        if not model.config.normalized:
            state[name + SCALE] = scale.squeeze(-1).float()
    return state


def dequantized(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state that ``quantized`` rounded, in float32."""
    found = {}
    for name, x in state.items():
        if x.dtype != torch.int8:
            found[name] = x
        elif name + SCALE in state:
            found[name] = (state[name + SCALE].double()[..., None] * x).float()
        else:
            found[name] = ng.sphere.unit(x.double()).float()  # Norm(q)
    return {name: x for name, x in found.items() if not name.endswith(SCALE)}


# ---- the file --------------------------------------------------------------------------------------------------------
def write(which: str, model: ng.LanguageModel, facts: dict[str, Any]) -> Path:
    """Quantize a model into the file of the book."""
    metadata = json.dumps({"config": model.config.to_dict(), **facts}, sort_keys=True)
    save_file(quantized(model), file(which), metadata={"ngpt": metadata})  # one key: safetensors does not fix the order
    file(which).chmod(0o644)
    return file(which)


def facts(which: str) -> dict[str, Any]:
    """What is known about the training: the command, the seed, the steps, the held-out loss, the tokens."""
    return {name: value for name, value in _metadata(which).items() if name != "config"}


def _metadata(which: str) -> dict[str, Any]:
    with safe_open(file(which), "pt") as stored:
        return json.loads(stored.metadata()["ngpt"])


def model(which: str = "ngpt") -> ng.LanguageModel:
    """The model in the page, "ngpt" or its twin "gpt", with exactly the weights that the page uses; in eval() mode."""
    with safe_open(file(which), "pt") as stored:
        state = {name: stored.get_tensor(name) for name in stored.keys()}
    with torch.device("meta"):
        found = ng.LanguageModel(ng.ModelConfig.from_dict(_metadata(which)["config"]))
    found.load_state_dict(dequantized(state), assign=True)
    return found.eval()


@cache
def pieces(which: str) -> tuple[str, ...]:
    """The scripts that bring the file into a page."""
    data = file(which).read_bytes()
    size = -(-len(data) // (3 * PIECES)) * 3  # a multiple of three bytes: base64 without padding inside
    parts = [base64.b64encode(data[i : i + size]).decode() for i in range(0, len(data), size)]
    return tuple(f'ngptLive.piece("{which}",{i},{len(parts)},"{part}");\n' for i, part in enumerate(parts))


def scripts() -> Iterator[tuple[str, str]]:
    """(name of the file, text) of every piece."""
    for which in WHICH:
        for i, text in enumerate(pieces(which)):
            yield f"{which}-{i}.js", text
