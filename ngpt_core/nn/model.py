"""What is the whole model?

    h = embedding(tokens);   h = block(h) for each letter of the pattern;   logits = head(h)

In nGPT, h is a unit vector throughout, there are no norm layers, and each block is a step on the sphere (``residual.py``).
GPT is the same list of blocks with RMSNorm before each block and before the head.

Shapes: tokens, targets, documents [B, T]; h [B, T, d]; logits [B, T, V].
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..config import ModelConfig
from . import generate as generation
from .attention import Attention
from .documents import Packed, pack
from .embedding import Embedding, check_integers, check_tokens, readable
from .head import Head, check_denominator
from .mamba2 import Mamba2
from .mlp import MLP
from .moe import MoE
from .residual import Aux, Residual, rms_norm
from .unit import unit_axes

__all__ = ["Cache", "LanguageModel", "unwrap"]

BLOCKS = {"M": Mamba2, "*": Attention, "E": MoE, "-": MLP}


class Cache:
    """What a model remembers of the tokens it has seen: one state per block, room for ``max_len`` tokens, ``length`` filled.

    ``LanguageModel.new_cache`` makes one, for this model only.
    """

    def __init__(self, blocks: list[object], batch: int, max_len: int) -> None:
        self.blocks, self.batch, self.max_len, self.length = blocks, batch, max_len, 0


class LanguageModel(nn.Module):
    """A whole model: embedding, one block per letter of ``config.pattern``, head. GPT also has a final norm.

    Shapes: tokens, targets and documents are integers [B, T] of any width (uint8 for bytes), B sequences of T tokens; h is
    [B, T, d] with d = d_model; logits are [B, T, V] with V = vocab_size.

    >>> import ngpt_core as ng
    >>> model = ng.LanguageModel(ng.preset("pico"))
    >>> model(torch.tensor([[72, 105]])).shape
    torch.Size([1, 2, 256])

    Under ``torch.device("meta")`` it has shapes but uses no memory; then call ``to_empty(device=...)`` and
    ``init_weights()``. For sharded training, ``loss`` is a forward method too: register it with
    ``register_fsdp_forward_method`` of ``torch.distributed.fsdp``.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if not isinstance(config, ModelConfig):
            raise ValueError(f"LanguageModel takes a ModelConfig, such as ngpt_core.preset('pico'); got {config!r}.")
        self.config = config
        self.stats: dict[str, Any] = {}
        self.cache_dtype: torch.dtype | None = None  # where it is not that of the weights: in a bf16 run
        self.embedding = Embedding(config)
        self.blocks = nn.ModuleList(Residual(config, BLOCKS[letter](config)) for letter in config.pattern)
        self.norm_weight = None if config.normalized else nn.Parameter(torch.ones(config.d_model))
        self.head = Head(config)

    def reset_parameters(self) -> None:
        """Reset only this module's own parameters; ``init_weights`` resets all."""
        if self.norm_weight is not None:
            nn.init.ones_(self.norm_weight)

    def init_weights(self) -> None:
        """Initialize every parameter again, in place: the same values as in a new model under the same seed."""
        for module in self.modules():
            if callable(reset := getattr(module, "reset_parameters", None)):
                reset()

    # ---- forward ---------------------------------------------------------------------------------------------------
    def hidden(
        self, tokens: Tensor, documents: Tensor | Packed | None = None, cache: Cache | None = None
    ) -> tuple[Tensor, list[Aux]]:
        """The state h [B, T, d] that the head reads, and the routers' outputs (one ``Aux`` per MoE layer).

        The arguments are those of ``forward``.
        """
        self._check(tokens, documents, cache)
        documents = None if documents is None else pack(documents, tokens.device)  # once, for all layers
        h, aux = self.embedding(tokens), []
        for i, block in enumerate(self.blocks):
            h, a = block(h, documents, None if cache is None else cache.blocks[i])
            if a is not None:
                aux.append(a)
        if cache is not None:
            cache.length += tokens.shape[1]
        if self.norm_weight is not None:
            h = rms_norm(h, self.norm_weight, self.config.norm_eps)
        return h, aux

    def forward(self, tokens: Tensor, documents: Tensor | Packed | None = None, cache: Cache | None = None) -> Tensor:
        """logits [B, T, V], s_z included. Those at position t predict the token at t + 1.

        tokens: integers [B, T] in [0, V).
        documents: [B, T], the ids of the documents in packed sequences, never decreasing along T. Tokens see only their own
            document. None: each sequence is one document. In training on a GPU pass ``documents.pack(ids, device)`` of ids that
            are still on the host; for ids on the GPU, the host waits.
        cache: from ``new_cache``; the tokens follow those it holds. ``documents`` and ``cache`` together are a ValueError.
        """
        return self.head(self.hidden(tokens, documents, cache)[0])

    def loss(
        self,
        tokens: Tensor,
        targets: Tensor,
        documents: Tensor | Packed | None = None,
        denominator: float | Tensor | None = None,
    ) -> Tensor:
        """Mean cross-entropy over the targets that are not -100, plus the routers' balance loss in train() mode.

        tokens, documents: as in ``forward``.
        targets: integers [B, T]; ``targets[b, t]`` is the token after ``tokens[b, t]``. The model does not shift them.
        denominator: the number of targets of the global batch, > 0. The loss is then this part's share of the global mean, so
            that gradients summed over micro-batches and ranks are those of the whole batch. The balance loss, a mean over
            sequences, is multiplied by the same share of targets. None: the number of targets given here.

        Afterwards ``stats`` holds the parts of the loss.
        """
        check_integers("tokens", tokens)
        check_integers("targets", targets)
        if targets.shape != tokens.shape:
            raise ValueError(f"targets must have the shape of tokens, {tuple(tokens.shape)}; got {tuple(targets.shape)}.")
        targets, denominator = targets.long(), check_denominator(denominator)  # long first: in uint8, -100 would be 156
        h, aux = self.hidden(tokens, documents)
        cross_entropy = self.head.loss(h, targets, denominator=denominator)
        balance = cross_entropy.new_zeros(())
        if aux and self.training:
            share = 1.0 if denominator is None else (targets != -100).sum().to(cross_entropy.dtype) / denominator
            balance = torch.stack([a.balance for a in aux]).sum() * (self.config.balance_loss * share)
        self.stats = {"cross_entropy": cross_entropy.detach(), "balance": balance.detach(), "load": [a.load for a in aux]}
        return cross_entropy + balance if aux and self.training else cross_entropy

    @torch.no_grad()
    def update_router_bias(self, load: Sequence[Tensor]) -> None:
        """Move each expert's selection bias by ``router_bias_rate`` toward equal load. Call it once after each optimizer step.
        ``load`` is ``stats["load"]``, summed over the step's micro-batches and ranks."""
        routers = [block.mixer.router for block in self.blocks if isinstance(block.mixer, MoE)]
        shapes, wanted = [tuple(x.shape) for x in load], [tuple(router.bias.shape) for router in routers]
        if shapes != wanted:
            raise ValueError(f"load must hold one tensor [experts] per MoE layer, of the shapes {wanted}; got {shapes}.")
        for router, counts in zip(routers, load):
            router.update(counts)

    # ---- generation ------------------------------------------------------------------------------------------------
    def new_cache(self, batch: int, max_len: int) -> Cache:
        """An empty cache for ``batch`` sequences of up to ``max_len`` tokens, on the device of the weights."""
        w = self.embedding.weight
        dtype = self.cache_dtype or w.dtype
        blocks = [block.new_cache(batch, max_len, w.device, dtype) for block in self.blocks]  # type: ignore[operator]  # torch: a ModuleList holds any modules
        return Cache(blocks, batch, max_len)

    def generate(
        self,
        tokens: Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        use_cache: bool = True,
        stop: int | Sequence[int] | None = (),
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """The prompt [B, T] followed by up to ``max_new_tokens`` new tokens, as one tensor (torch.long).

        temperature: 1 samples from the trained distribution, 0 takes the most likely token.
        top_k: sample only from the k most likely tokens; None: from all.
        top_p: sample only from the smallest set of most likely tokens with total probability >= p; None: from all.
        use_cache: keep keys, values and states, so that each step reads one token. False reads everything again, as a check.
        stop: tokens that end a row, which then repeats its stop token; generation ends when all rows have. None: no such token.
        generator: the random generator; None: torch's default.
        """
        new = list(self.stream(tokens, max_new_tokens, temperature, top_k, top_p, use_cache, stop, generator))
        return torch.cat([tokens.long(), *(t[:, None] for t in new)], 1)

    def stream(self, tokens: Tensor, max_new_tokens: int, *args: Any, **options: Any) -> Iterator[Tensor]:
        """Like ``generate``, but yields the new tokens [B] one step at a time."""
        return generation.stream(self, tokens, max_new_tokens, *args, **options)

    # ---- checks ----------------------------------------------------------------------------------------------------
    def _check(self, tokens: Tensor, documents: Tensor | Packed | None, cache: Cache | None) -> None:
        check_tokens(tokens, self.config.vocab_size)
        total = tokens.shape[1] + (cache.length if cache is not None else 0)
        if self.config.max_seq_len is not None and total > self.config.max_seq_len:
            raise ValueError(f"A sequence may have at most max_seq_len = {self.config.max_seq_len} tokens; got {total}.")
        if documents is not None:
            self._check_documents(documents, tokens)
        if cache is not None:
            if documents is not None:
                raise ValueError("documents and cache cannot be combined: a cache holds one document per row. Pass only one.")
            if tokens.shape[0] != cache.batch:
                raise ValueError(f"The cache was made for a batch of {cache.batch}; got {tokens.shape[0]} rows of tokens.")
            if total > cache.max_len:
                raise ValueError(f"{total} tokens do not fit a cache of {cache.max_len}: create it with max_len >= {total}.")

    @staticmethod
    def _check_documents(documents: Tensor | Packed, tokens: Tensor) -> None:
        documents = documents.ids if isinstance(documents, Packed) else documents
        check_integers("documents", documents)
        if documents.shape != tokens.shape:
            raise ValueError(f"documents must have the shape of tokens, {tuple(tokens.shape)}; got {tuple(documents.shape)}.")
        if readable(documents):  # attention compares ids, Mamba-2 resets where they change: they agree only if ids never fall
            ids = documents.long()
            if len(falls := (ids[:, 1:] < ids[:, :-1]).nonzero()):
                row, t = falls[0].tolist()
                raise ValueError(
                    f"documents must not decrease along time; got {ids[row, t : t + 2].tolist()} at position {t} of row {row}. "
                    "Number the documents of each row 0, 1, 2, ... in order."
                )

    @torch.no_grad()
    def check(self, tolerance: float = 1e-5) -> None:
        """Raise a ValueError that names the place if an invariant of the sphere is broken.

        nGPT: every unit row has norm 1, and on a probe of a few tokens h has norm 1 after every block. Both models: parameters,
        routers' biases and logits are finite. For half precisions, ``tolerance`` is raised to what they can represent.
        """
        for name, x in self.state_dict().items():
            if x.is_meta:
                raise ValueError(f"{name} is on the meta device and has no values. Call to_empty(device=...), init_weights().")
            if not bool(torch.isfinite(x).all()):
                raise ValueError(f"{name} has entries that are not finite.")
        for name, dim in unit_axes(self).items():
            self._check_unit(name, self.get_parameter(name), dim, tolerance)
        V, device = self.config.vocab_size, self.embedding.weight.device
        T = min(16, self.config.max_seq_len or 16)
        probe = torch.arange(T, device=device)[None] * max(1, V // T) % V
        h = self.embedding(probe)
        for i, block in enumerate(self.blocks):
            h, _ = block(h)
            if self.config.normalized:
                self._check_unit(f"h after block {i} ({self.config.pattern[i]})", h, -1, tolerance)
        if not bool(torch.isfinite(self(probe)).all()):
            raise ValueError("The logits of a probe are not finite.")

    @staticmethod
    def _check_unit(name: str, x: Tensor, dim: int, tolerance: float) -> None:
        tolerance = max(tolerance, 4 * torch.finfo(x.dtype).eps)
        error = float((torch.linalg.vector_norm(x.double(), dim=dim) - 1).abs().max())
        if not error <= tolerance:
            raise ValueError(
                f"{name} has left the sphere: a norm differs from 1 by {error:.2e}, more than {tolerance:.0e}. "
                "optimizer.step() normalizes parameters; after loading foreign weights call ngpt_core.nn.unit.normalize_."
            )


def unwrap(model: nn.Module, what: str) -> LanguageModel:
    """The LanguageModel itself, or the one inside a wrapper (compile, DDP); ``what`` names the caller in the error message."""
    for module in model.modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, LanguageModel):
            return module
    raise ValueError(f"{what} takes a LanguageModel, or a wrapper around one (compile, DDP); got {type(model).__name__}.")
