"""How sharp is the output distribution, and how much of that sharpness flows back into the network?

For a unit hidden state and unit output embeddings, u = W h are cosines, so a learned scale s_z sets the sharpness (eq. sz).
Plain backpropagation multiplies the gradient of every layer by the same s_z, which grows during training and so acts as a
hidden learning rate. Logit Gradient Preconditioning (LGP, section 2.1) keeps the forward pass and replaces that multiplier:

    forward    z = s_z * u                                                                              (eq. sz)
    backward   dL/du <- b(s_z) * dL/dz,   b = (s_z / mean(s_z))^q   or   s_z^q / mean(s_z^q)            (section 2.1, LGP)
               dL/ds_z is unchanged

Symbols: h [..., d] hidden states; W [V, d] output embedding; u, z [..., V] cosines and logits; s_z [V]; q LGP's strength.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import sphere
from ..checks import check_tensors, is_number, is_within
from ..config import ModelConfig
from .embedding import readable
from .loss import check_targets, chunk_length, cross_entropy_sum, wide
from .precision import autocast
from .scale import Scale
from .unit import init_rows_, rows

__all__ = ["Head", "PositiveScale", "backward_scale", "lgp_cross_entropy", "linear_cross_entropy", "logit_scale", "row_norms"]

FORMS = ("ratio", "power")


# ---- LGP as pure functions -------------------------------------------------------------------------------------------
def _check_lgp(q: float | None, form: str) -> float | None:
    """q as a Python float, or None."""
    if form not in FORMS:
        raise ValueError(f"form must be 'ratio', (s_z/mean(s_z))^q, or 'power', s_z^q/mean(s_z^q) (section 2.1); got {form!r}.")
    if q is not None and not is_within(q, 0):
        raise ValueError(f"q must be a finite number >= 0 (the paper uses 1), or None for the ordinary gradient; got {q!r}.")
    return None if q is None else float(q)


def needs_positive(q: float | None) -> bool:
    """Whether s_z must be positive: an element-wise power with a non-integer exponent needs that (section 2.1)."""
    return q is not None and q != int(q)


def _check_positive(s_z: Tensor, q: float | None) -> None:
    """Reads the values only if q is not an integer, so q = 1 never waits for a device. Compiled code cannot read them."""
    if needs_positive(q) and not torch.compiler.is_compiling() and not bool((s_z > 0).all()):
        raise ValueError(
            f"A non-integer q = {q} raises s_z to a fractional power, so every entry of s_z must be > 0; the smallest is "
            f"{float(s_z.detach().min()):g}. Use an integer q, or a positive parameterization of s_z (PositiveScale)."
        )


def backward_scale(s_z: Tensor, q: float | None = 1.0, form: str = "ratio") -> Tensor:
    """b(s_z) [V], which LGP uses in place of s_z [V] in the backward pass.

    ``q=None`` is the ordinary gradient, b = s_z. In both forms, q = 0 gives 1 for every
    token and q = 1 gives s_z / mean(s_z). For any other q, only "power" keeps the mean
    of b at 1. The mean of s_z must not be 0; it starts at 1, and the recipe never
    brings it near 0.

    >>> s_z = torch.tensor([1.0, 2.0, 3.0])
    >>> backward_scale(s_z)
    tensor([0.5000, 1.0000, 1.5000])
    >>> backward_scale(s_z, q=2, form="power")
    tensor([0.2143, 0.8571, 1.9286])
    """
    q = _check_lgp(q, form)
    _check_positive(s_z, q)
    if q is None:
        return s_z
    if form == "ratio":
        return (s_z / s_z.mean()) ** q  # section 2.1, LGP
    power = s_z**q
    return power / power.mean()  # section 2.1, b~_q


class _LogitScale(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(u: Tensor, s_z: Tensor, q: float | None, form: str) -> Tensor:
        return u * s_z  # eq. sz

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        u, s_z, ctx.q, ctx.form = inputs
        ctx.save_for_backward(u, s_z)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        u, s_z = ctx.saved_tensors
        du = ds = None
        if ctx.needs_input_grad[0]:
            b = backward_scale(s_z.to(wide(s_z.dtype)), ctx.q, ctx.form)
            du = (g * b).to(u.dtype)  # section 2.1, LGP
        if ctx.needs_input_grad[1]:
            ds = (g * u).sum_to_size(s_z.shape).to(s_z.dtype)  # the ordinary gradient
        return du, ds, None, None


def logit_scale(u: Tensor, s_z: Tensor, q: float | None = 1.0, form: str = "ratio") -> Tensor:
    """z = s_z * u with LGP's backward pass: u receives b(s_z) * dL/dz, and s_z its ordinary gradient.

    u: [..., V] logits before the scale.
    s_z: [V], one scale per token of the vocabulary.
    q: LGP's strength, 1 in the paper; None is the ordinary product. A non-integer q requires every s_z > 0 (ValueError).
    form: "ratio" is (s_z/mean(s_z))^q, the paper's; "power" is s_z^q/mean(s_z^q), its alternative.

    >>> u = torch.zeros(3, requires_grad=True)
    >>> s_z = torch.tensor([10.0, 20.0, 30.0])
    >>> logit_scale(u, s_z).sum().backward()
    >>> u.grad
    tensor([0.5000, 1.0000, 1.5000])
    """
    q = _check_lgp(q, form)
    check_tensors("logit_scale", u=u, s_z=s_z)
    if s_z.dim() != 1 or s_z.shape != u.shape[-1:]:
        raise ValueError(f"s_z must have one entry per token: s_z [V] for u [..., V]; got {_shapes(s_z=s_z, u=u)}.")
    _check_positive(s_z, q)
    return _LogitScale.apply(u, s_z, q, form)


def row_norms(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(W_bar [V, d], s_z [V]) with W = diag(s_z) W_bar: the unit rows and norms of W.

    An ordinary Transformer has no s_z and an output matrix W that is not normalized; its
    row norms are its logit scales (end of section 2.1). To use LGP there:

        W_bar, s_z = row_norms(W)
        loss = linear_cross_entropy(h, W_bar, targets, s_z=s_z)

    If you need logits, ``logit_scale(h @ W_bar.T, s_z)`` gives those of W. In the
    backward pass, b(s_z) replaces s_z in the gradients of h and of the *direction* of
    every row; the gradient of the row's norm is unchanged. So at q = 1, the part that
    rotates a row is divided by mean(s_z), and the part that stretches it stays the same.
    A zero row keeps zero logits.
    """
    # With G = dL/dz^T h, row i of W receives
    # dw_i = (b_i / s_i) (G_i - w_bar_i <w_bar_i, G_i>) + w_bar_i <w_bar_i, G_i>
    s_z = torch.linalg.vector_norm(weight, dim=-1, dtype=wide(weight.dtype))
    return sphere.unit(weight), s_z


def lgp_cross_entropy(h: Tensor, weight: Tensor, targets: Tensor, q: float | None = 1.0, ignore_index: int = -100) -> Tensor:
    """The loss of an ordinary output matrix with LGP, its row norms as s_z: ``row_norms`` and ``linear_cross_entropy`` in one.

    A drop-in for ``F.cross_entropy(h @ weight.T, targets)``: the value is the same, the gradient that enters the network is
    divided by the mean row norm (q = 1). Its rows keep their lengths: do not put this matrix on the sphere as well.

    h: [..., d] hidden states, as the output matrix receives them.
    weight: [V, d], as in ``row_norms``.
    targets, q, ignore_index: as in ``linear_cross_entropy``.
    """
    check_tensors("lgp_cross_entropy", h=h, weight=weight, targets=targets)
    directions, s_z = row_norms(weight)
    return linear_cross_entropy(h, directions, targets, s_z, q, ignore_index)


# ---- the loss --------------------------------------------------------------------------------------------------------
def linear_cross_entropy(
    h: Tensor,
    weight: Tensor,
    targets: Tensor,
    s_z: Tensor | None = None,
    q: float | None = 1.0,
    ignore_index: int = -100,
    chunk: int | None = None,
    form: str = "ratio",
    reduction: str = "mean",
    denominator: float | Tensor | None = None,
    backend: str = "chunked",
) -> Tensor:
    """The cross-entropy of softmax(s_z * (h W^T)) with LGP in its backward pass, without ever storing logits [tokens, V].

    For h [n, d] and a given s_z, its value and gradients are those of
    ``F.cross_entropy(logit_scale(F.linear(h, weight), s_z, q, form), targets)``.

    h: [..., d] hidden states.
    weight: [V, d] output embedding.
    targets: [...] token ids, one per hidden state.
    s_z: [V], or None for plain logits h W^T.
    q, form: LGP's, as in ``logit_scale``. A non-integer q requires every s_z > 0 (ValueError).
    ignore_index: the target to ignore. If all targets are ignored, the loss and the gradients are 0 (torch: NaN).
    chunk: tokens at a time, at most. None: max(256, d), which makes a chunk of logits about as large as the gradient of the
        weight, and max(256, d / 2) on a GPU. All chunks have the same length, give or take one token.
        Memory beyond the inputs: that chunk, and the gradients of h, weight and s_z (for half precisions on a CPU also the
        weight in float32).
    reduction: "mean" over the targets that are not ignored, or "sum".
    denominator: a number > 0 (or a tensor with one) that divides the sum instead, e.g. the token count of all ranks and
        micro-batches.
    backend: "chunked" is ours. "torch" is ``F.linear_cross_entropy`` (torch 2.13 or newer), for q in (1, None) or no s_z, in
        float32 or float64. It gives the same result and needs one more [V, d] for s_z * W and one for its gradient.

    Precision: float64 and float32 are kept; for bfloat16 and float16 the logits, the loss and the gradient of the weight are
    computed in float32. Under autocast, h and weight are cast as for ``F.linear``. The loss is float32 or float64.

    A target outside [0, V) is a ValueError on the CPU. On a GPU, the check would stall the device: the loss becomes NaN, or a
    device-side assertion stops the program, as in ``F.cross_entropy``.

    Gradients are computed in the forward pass, if needed. torch.compile treats the whole loss as one operation.
    ``retain_graph`` works; second derivatives raise. Activation checkpointing gives the right result but computes the loss
    twice; leave the loss outside, since it keeps nothing worth recomputing.
    """
    q = _check_lgp(q, form)
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction must be 'mean' or 'sum' (or pass denominator=); got {reduction!r}.")
    if backend not in ("chunked", "torch"):
        raise ValueError(f"backend must be 'chunked' or 'torch'; got {backend!r}.")
    check_tensors("linear_cross_entropy", h=h, weight=weight, targets=targets, **({} if s_z is None else {"s_z": s_z}))
    h, weight = autocast(h, weight)
    _check_shapes(h, weight, targets, s_z)
    denominator = check_denominator(denominator)
    chunk = chunk_length(h) if chunk is None else int(chunk)
    if chunk < 1:
        raise ValueError(f"chunk must be a number of tokens >= 1, or None to choose one automatically; got {chunk}.")
    h, targets = h.reshape(-1, h.shape[-1]), targets.reshape(-1).long()
    if s_z is not None:
        _check_positive(s_z, q)
        s_z = s_z.to(wide(h.dtype))

    total = (_chunked if backend == "chunked" else _torch)(h, weight, targets, s_z, q, form, ignore_index, chunk)
    if denominator is not None:
        return total / denominator
    return total if reduction == "sum" else total / (targets != ignore_index).sum().clamp_min(1)


def _chunked(
    h: Tensor, weight: Tensor, targets: Tensor, s_z: Tensor | None, q: float | None, form: str, ignore_index: int, chunk: int
) -> Tensor:
    grad = torch.is_grad_enabled()
    need_h, need_weight, need_s = (grad and x is not None and x.requires_grad for x in (h, weight, s_z))
    b = None if s_z is None else backward_scale(s_z.detach(), q, form)
    return cross_entropy_sum(h, weight, targets, s_z, b, ignore_index, chunk, need_h, need_weight, need_s)[0]


def _torch(
    h: Tensor, weight: Tensor, targets: Tensor, s_z: Tensor | None, q: float | None, form: str, ignore_index: int, chunk: int
) -> Tensor:
    """LGP at q = 1 divides the ordinary gradients of h and W by mean(s_z), so it composes with torch's loss."""
    if (s_z is not None and q not in (1, None)) or wide(h.dtype) != h.dtype:
        raise ValueError(f"backend='torch' needs q = 1 or None in float32 or float64; got q = {q}, {h.dtype}. Use 'chunked'.")
    if not hasattr(F, "linear_cross_entropy"):
        raise ValueError(f"backend='torch' needs F.linear_cross_entropy, which torch {torch.__version__} lacks; use 'chunked'.")
    check_targets(targets, weight.shape[0], ignore_index)
    if s_z is not None:
        c = 1.0 if q is None else 1.0 / s_z.detach().mean()
        h = _scale_grad(h, c)
        weight = _LogitScale.apply(weight.T, s_z, q, form).T  # s_z * W by rows: exact to s_z, b(s_z) to W
    options = torch.nn.LinearCrossEntropyOptions(chunking_method=None, batch_chunk_size=chunk, allow_retain_graph=True)
    return F.linear_cross_entropy(h, weight, targets, reduction="sum", ignore_index=ignore_index, options=options)


def _scale_grad(x: Tensor, c: float | Tensor) -> Tensor:
    """x, with its gradient multiplied by c."""
    return x.detach() + c * (x - x.detach())


def check_denominator(value: float | Tensor | None) -> float | Tensor | None:
    """The denominator without dimensions. Its value is checked only where that is free."""
    if value is None:
        return None
    known = readable(value) if isinstance(value, Tensor) else True
    if not is_number(value) or (known and not is_within(value, 0, open=True)):
        raise ValueError(f"denominator must be one number > 0, the number of targets of the global batch; got {value!r}.")
    return value.reshape(()) if isinstance(value, Tensor) else value


def _shapes(**tensors: Tensor) -> str:
    return ", ".join(f"{name} {list(x.shape)}" for name, x in tensors.items())


def _check_shapes(h: Tensor, weight: Tensor, targets: Tensor, s_z: Tensor | None) -> None:
    if h.dim() < 1 or weight.dim() != 2 or h.shape[-1] != weight.shape[-1] or h.shape[:-1] != targets.shape:
        got = _shapes(h=h, weight=weight, targets=targets)
        raise ValueError(f"The shapes must be h [..., d], weight [V, d] and targets [...] with the same d; got {got}.")
    if s_z is not None and s_z.shape != weight.shape[:1]:
        raise ValueError(f"s_z must have one entry per row of weight, [V]; got {_shapes(s_z=s_z, weight=weight)}.")
    if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
        raise ValueError(f"targets must be integer token ids (torch.long); got {targets.dtype}.")
    if h.dtype != weight.dtype or not h.is_floating_point():
        raise ValueError(f"h and weight must have the same floating-point dtype; got {h.dtype} and {weight.dtype}. Cast one.")


# ---- modules ---------------------------------------------------------------------------------------------------------
class PositiveScale(Scale):
    """A ``Scale`` that stays positive, which a non-integer q needs (section 2.1).

    Let x be the plain ``Scale``'s value divided by its init. Then s_eff / init is x where x >= 1, and exp(x - 1) below. It
    starts at the same value with the same derivative, equals the plain scale while it is above its init (s_z only grows), and
    approaches 0 where the plain one would cross it. (With exp everywhere, a step of lr would be a factor of e^lr.)
    """

    def forward(self) -> Tensor:
        """s_eff > 0, the value used in the forward pass."""
        x = self.weight / self.scale
        return self.init * torch.where(x >= 1.0, x, torch.exp(x.clamp_max(1.0) - 1.0))


class Head(nn.Module):
    """weight [V, d] and, in nGPT, s_z [V]: h [..., d] -> logits [..., V], or the loss without storing them.

    GPT has no s_z and plain logits. A non-integer ``config.lgp_q`` (or ``positive_s_z``) makes s_z a
    ``PositiveScale``.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.q, self.form = config.lgp_q, config.lgp_form
        self.weight = rows(config.vocab_size, config.d_model)
        self.s_z = None
        self.unit_dims = {}
        if config.normalized:
            positive = needs_positive(self.q) if config.positive_s_z is None else config.positive_s_z
            self.s_z = (PositiveScale if positive else Scale)(config.vocab_size, *config.scale_of("s_z"))
            self.unit_dims = {"weight": -1}
        self.reset_parameters()

    def reset_parameters(self) -> None:
        init_rows_(self.weight, self.config)

    def forward(self, h: Tensor) -> Tensor:
        """Logits [..., V], in float32 for the half precisions; LGP acts in their backward pass too."""
        u = F.linear(h, self.weight)
        u = u.to(wide(u.dtype))
        return u if self.s_z is None else logit_scale(u, self.s_z().to(u.dtype), self.q, self.form)

    def loss(
        self,
        h: Tensor,
        targets: Tensor,
        ignore_index: int = -100,
        denominator: float | Tensor | None = None,
        chunk: int | None = None,
    ) -> Tensor:
        """Mean cross-entropy over the targets that are not ignored, or its sum divided by ``denominator``."""
        s_z = None if self.s_z is None else self.s_z()
        return linear_cross_entropy(
            h, self.weight, targets, s_z, self.q, ignore_index, chunk, self.form, denominator=denominator
        )
