"""What did every block do at the last byte of a text? The numbers that the page draws, from the package's own model.

``sight(model, text)`` runs a LanguageModel once, with hooks, and returns what view.js draws: the dictionary that trace.js makes
in the page. The book stores one per model, so that a page shows a first example before any weight is loaded; a test compares
the two on texts drawn at random.

The walk is measured where the head sees it: on the directions of h, in GPT after the final norm ("logit lens"), in degrees.

Symbols: n bytes, p = n - 1 the last of them; L blocks; k experts of a byte.
"""

import json
import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

import ngpt_core as ng

__all__ = ["NEXT", "rounded", "sight"]

NEXT = 6  # likely next bytes
LENS = 3  # of which so many are shown per block


@torch.no_grad()
def sight(model: ng.LanguageModel, text: str) -> dict[str, Any]:
    """All that the page draws of a model that has read ``text``."""
    if not text:
        raise ValueError("The text is empty: there is no last byte whose successor could be predicted.")
    data = list(text.encode())
    model = _copy(model)
    seen = _Seen(model)
    logits = model(torch.tensor([data]))[0]
    h = [x[0] for x in seen.h]  # [n, d], L + 1 of them
    lens = [_lens(model, x[-1]) for x in h]
    p = logits[-1].softmax(-1)
    rows, s_z = model.head.weight, None if model.head.s_z is None else model.head.s_z()
    unit_rows, directions = ng.sphere.unit(rows), [ng.sphere.unit(x) for x in lens]
    likely = p.topk(NEXT).indices.tolist()
    scale = rows.norm(dim=-1) * lens[-1].norm() if s_z is None else s_z
    surprise = -logits[:-1].log_softmax(-1).gather(-1, torch.tensor(data[1:], dtype=torch.long)[:, None])[:, 0]
    return {
        "bytes": data,
        "surprise": surprise.tolist(),
        "next": [
            {"byte": b, "p": float(p[b]), "cos": float(unit_rows[b] @ directions[-1]), "scale": float(scale[b])} for b in likely
        ],
        "turn": [_degrees(a, b) for a, b in pairwise(directions)],
        "to": [[_degrees(unit_rows[b], x) for x in directions] for b in likely],
        "length": [float(x[-1].norm()) for x in h],
        "lens": [_most_likely(model.head(x)) for x in lens],
        "alpha": [None if block.alpha is None else float(block.alpha().abs().mean()) for block in model.blocks],
        **seen.looked(),
    }


def _copy(model: ng.LanguageModel) -> ng.LanguageModel:
    """In float64, so that the numbers are exact."""
    copy = ng.LanguageModel(model.config)
    copy.load_state_dict(model.state_dict())
    return copy.double().eval()


def _lens(model: ng.LanguageModel, h: Tensor) -> Tensor:
    """What the head sees of a state."""
    if model.norm_weight is None:
        return h
    return torch.nn.functional.rms_norm(h, h.shape[-1:], model.norm_weight, model.config.norm_eps)


def _degrees(a: Tensor, b: Tensor) -> float:
    return math.degrees(2 * math.atan2(float((a - b).norm()), float((a + b).norm())))  # exact for small angles too


def _most_likely(logits: Tensor) -> list[list[float]]:
    p, byte = logits.softmax(-1).topk(LENS)
    return [[b, x] for b, x in zip(byte.tolist(), p.tolist())]


class _Seen:
    """What hooks caught of a forward pass: h after every block, and the inputs of the mixers and routers."""

    def __init__(self, model: ng.LanguageModel) -> None:
        self.config, self.model = model.config, model
        self.h: list[Tensor] = []
        self.inputs: dict[int, Tensor] = {}
        self.routes: dict[int, tuple[Tensor, Tensor]] = {}
        model.embedding.register_forward_hook(lambda module, args, out: self.h.append(out))
        for i, (letter, block) in enumerate(zip(self.config.pattern, model.blocks)):
            block.register_forward_hook(lambda module, args, out: self.h.append(out[0]))
            block.mixer.register_forward_pre_hook(lambda module, args, i=i: self.inputs.update({i: args[0][0]}))
            if letter == "E":
                block.mixer.router.register_forward_hook(
                    lambda module, args, out, i=i: self.routes.update({i: (out[1][0], out[2][0])})
                )

    def looked(self) -> dict[str, Any]:
        """experts [n][k] of every E block, attention [heads][n] of *, what is left [heads][n] in the state of M."""
        looks: dict[str, Any] = {"experts": {}, "attention": {}, "left": {}}
        for i, letter in enumerate(self.config.pattern):
            if letter == "E":
                looks["experts"][i] = [
                    sorted(zip(e, w), key=lambda x: -x[1]) for e, w in zip(*(x.tolist() for x in self.routes[i]))
                ]
            elif letter == "*":
                looks["attention"][i] = self._attention(i).tolist()
            elif letter == "M":
                looks["left"][i] = self._left(i).tolist()
        return looks

    def _attention(self, i: int) -> Tensor:
        """The weights of the last byte, [heads, n]."""
        mixer, c = self.model.blocks[i].mixer, self.config
        q, k = ((self.inputs[i] @ w.T).unflatten(-1, (-1, c.head_dim)).transpose(0, 1) for w in (mixer.q_proj, mixer.k_proj))
        if mixer.s_qk is not None:
            q, k = ng.sphere.unit(q) * mixer.s_qk(), ng.sphere.unit(k) * mixer.s_qk()
        k = k.repeat_interleave(c.n_heads // c.n_kv_heads, 0)
        return (mixer.softmax_scale * q[:, -1:] @ k.mT).softmax(-1)[:, 0]

    def _left(self, i: int) -> Tensor:
        """How much of what each byte wrote into the state is left at the last: the product of the decays since, [heads, n]."""
        mixer = self.model.blocks[i].mixer
        h = self.inputs[i] if mixer.s_mamba is None else self.inputs[i] * mixer.s_mamba()
        dt = torch.nn.functional.softplus(h @ mixer.in_proj[-self.config.mamba_heads :].T + mixer.dt_bias)
        log_a = -dt * mixer.A_log.exp()
        after = log_a.flip(0).cumsum(0).flip(0) - log_a  # sum over the bytes that follow
        return after.exp().T


def rounded(value: Any, digits: int = 4) -> Any:
    """The same data with numbers of a few digits, and string keys, as JSON has them."""
    short = json.loads(json.dumps(value), parse_float=lambda text: float(f"{float(text):.{digits}g}"))
    return short
