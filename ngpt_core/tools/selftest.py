"""Are the fast paths correct on this machine, and how fast are they?

    ngpt selftest [--device cuda]

Each fast path runs next to its slow twin on the same random inputs. The table lists the largest relative error of values and
gradients, the tolerance, and the ratio of their times; it can be pasted into a bug report. On a GPU, it also gives timings that
this project has not measured yet.
"""

import math
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import __version__, native, sphere
from ..config import ModelConfig
from ..data.corpus import embedded
from ..data.loader import Loader
from ..nn import attention, fused
from ..nn.documents import pack
from ..nn.head import linear_cross_entropy, logit_scale
from ..nn.mamba2 import causal_conv, conv
from ..nn.model import LanguageModel
from ..nn.moe import MoE
from ..nn.ssd import kernel_missing, ssd, ssd_chunked, ssd_recurrent
from ..optim.arriving import Arriving
from ..optim.gated_adamw import GatedAdamW
from ..optim.pmen import PMEN
from ..optim.smgc import SMGC
from ..train.feed import Feed

__all__ = ["Row", "format_rows", "main", "run"]

Result = list[Tensor]
Twin = Callable[[], Result]  # a fast path, or its slow twin


@dataclass(frozen=True)
class Row:
    """One comparison. ``error`` is relative to the twin's largest value; ``ratio`` is the fast time over the slow time."""

    name: str
    error: float
    tolerance: float
    ratio: float
    note: str = ""

    @property
    def passed(self) -> bool:
        return self.error <= self.tolerance


def _now(device: torch.device) -> float:
    """CPU time of this process; on an accelerator the wall clock, after all pending work is done."""
    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


def _error(fast: Result, slow: Result) -> float:
    """The largest error of any tensor, relative to its twin's largest value. A nan counts as infinite: max could lose it."""
    pairs = [(x.double(), y.double()) for x, y in zip(fast, slow, strict=True)]
    errors = [float((x - y).abs().max() / y.abs().max().clamp_min(1e-30)) for x, y in pairs]
    return math.inf if any(map(math.isnan, errors)) else max(errors)


def _compare(name: str, fast: Twin, slow: Twin, tolerance: float, device: torch.device, note: str = "") -> Row:
    error = _error(fast(), slow())  # the first calls also compile, allocate and warm up
    times: dict[Twin, list[float]] = {fast: [], slow: []}
    for _ in range(5):
        for which in (fast, slow):  # interleaved: other load on the machine affects both
            start = _now(device)
            which()
            times[which].append(_now(device) - start)
    return Row(name, error, tolerance, median(f / s for f, s in zip(times[fast], times[slow])), note)


def _with_gradients(make: Callable[..., Tensor], *inputs: Tensor) -> Result:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = make(*leaves)
    weight = torch.linspace(-1, 1, out.numel(), device=out.device, dtype=out.dtype).view_as(out)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)]


# ---- the comparisons -------------------------------------------------------------------------------------------------
def _optimizer(device: torch.device) -> Row:
    draw = torch.Generator().manual_seed(0)
    start = sphere.random(512, 384, generator=draw).to(device)
    gradients = [(10 ** (4 * torch.rand(512, 1, generator=draw) - 9) * torch.randn(512, 384, generator=draw)) for _ in range(8)]
    gradients = [g.masked_fill(torch.rand(512, 1, generator=draw) < 0.1, 0.0).to(device) for g in gradients]

    kinds: dict[str, dict] = {  # rows as in the recipe, rows with options that it does not use, coordinates
        "rows": dict(unit_dim=-1, cap=0.0175, pmen=PMEN()),
        "others": dict(unit_dim=-1, pmen=PMEN(profile="smooth", reference="adam"), a=0.3, maximize=True, weight_decay=0.1),
        "coordinates": dict(a=1.0, weight_decay=0.1),
    }

    def pieces(x: Tensor) -> list[Tensor]:
        """Two of one shape, which share a launch on a GPU; one of another shape; one whose memory is not aligned."""
        odd = torch.cat([x.new_zeros(1), x[440:].flatten()])[1:].view(72, 384)
        return [x[:180].clone(), x[180:360].clone(), x[360:440].clone(), odd]

    def trained(fused: bool | None) -> Result:
        params = {name: [torch.nn.Parameter(x) for x in pieces(start)] for name in kinds}
        groups = [{"params": [(f"{name}{i}", p) for i, p in enumerate(params[name])], **kind} for name, kind in kinds.items()]
        optimizer = GatedAdamW(groups, lr=0.01, smgc=SMGC(start=2), fused=fused, nonfinite="off")
        for t, g in enumerate(gradients):
            for members in params.values():
                for p, piece in zip(members, pieces(g)):
                    p.grad = piece
            if device.type == "cuda":  # where training skips steps on the device
                optimizer.found_inf = torch.tensor(float(t == 5), device=device)
            optimizer.step()
        every = [p for members in params.values() for p in members]
        moments = [optimizer.state[p][key] for p in every for key in ("exp_avg", "exp_avg_sq")]
        return [*(torch.cat([p.detach() for p in members]) - start for members in params.values()), *moments]

    from ..optim.fused import usable

    missing = usable(start, start, -1)
    note = f"no fused step here: {missing}" if missing else ""
    return _compare("optimizer: fused step / plain step", lambda: trained(None), lambda: trained(False), 1e-4, device, note)


def _travel(device: torch.device) -> Row:
    """Batches to the device and back: on a GPU from pinned memory, on a separate stream, and read once they arrive."""

    def batches(ahead: bool) -> Result:
        feed, found = Feed(Loader([(embedded(), 1.0)], 8, 256), 4, device, ahead), []
        for _ in range(4):
            for micro in feed.next().micro_batches:
                found += [micro.tokens, micro.targets, *([micro.documents.ids] if micro.documents else [])]
        return [torch.tensor(Arriving(x.flatten()).read() if ahead else x.flatten().tolist()) for x in found]

    return _compare("batches: read ahead / when needed", lambda: batches(True), lambda: batches(False), 0.0, device)


def _packed(b: int, T: int, device: torch.device) -> Tensor:
    """Documents of several lengths, with boundaries inside chunks and at their edges."""
    cuts = torch.tensor([T // 16, T // 4, T // 2, T - 5])
    return (torch.arange(T)[:, None] >= cuts).sum(1).expand(b, T).to(device)


def _absent(package: str) -> str:
    return f"{package} is not installed: plain torch is compared with itself" if kernel_missing(package) else ""


def _scans(device: torch.device) -> Iterator[Row]:
    """With an initial state and packed documents: a leak between documents would show as a large error."""
    draw = torch.Generator().manual_seed(1)
    b, T, H, P, G, N = 2, 256, 8, 64, 2, 64
    shapes = ((b, T, H, P), (b, T, G, N), (b, T, G, N), (H,), (b, H, P, N))
    x, B, C, D, S = (torch.randn(*shape, generator=draw) for shape in shapes)
    dt = F.softplus(torch.randn(b, T, H, generator=draw) - 3)
    A = -torch.exp(torch.rand(H, generator=draw))
    inputs, documents = [t.to(device) for t in (x, dt, A, B, C, D, S)], _packed(b, T, device)

    def scan(form: Callable) -> Twin:
        return lambda: _with_gradients(lambda *t: torch.cat([part.flatten() for part in form(*t, documents)]), *inputs)

    yield _compare("scan: chunked / recurrence", scan(ssd_chunked), scan(ssd_recurrent), 1e-4, device)
    if device.type == "cuda":  # float32 in the kernels is TF32: three digits
        note = _absent("mamba_ssm")
        yield _compare("scan: kernels / chunked", scan(ssd), scan(ssd_chunked), 5e-3, device, note)


def _convolutions(device: torch.device) -> Iterator[Row]:
    draw = torch.Generator().manual_seed(4)
    x, w, bias = (torch.randn(*s, generator=draw).to(device) for s in ((2, 256, 512), (4, 512), (512,)))
    documents = _packed(2, 256, device)

    def by_torch(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        return F.silu(F.conv1d(F.pad(x.mT, (3, 0)), w.mT[:, None], bias, groups=512)).mT

    def one_by_one(x: Tensor, w: Tensor, bias: Tensor, state: None, documents: Tensor) -> Tensor:
        lengths = documents[0].bincount().tolist()
        return torch.cat([by_torch(part, w, bias) for part in x.split(lengths, 1)], 1)

    def by(form: Callable, *packed: Tensor | None) -> Twin:
        return lambda: _with_gradients(lambda *t: form(*t, *packed), x, w, bias)

    yield _compare("convolution: ours / torch's", by(causal_conv), by(by_torch), 1e-4, device)
    packed = None, documents
    yield _compare("convolution: packed / one by one", by(causal_conv, *packed), by(one_by_one, *packed), 1e-4, device)
    if device.type == "cuda":
        note = _absent("causal_conv1d")
        yield _compare("convolution: kernel / ours", by(conv, *packed), by(causal_conv, *packed), 1e-4, device, note)


def _experts(device: torch.device) -> Row:
    """A whole MoE layer, sorted by expert, against a loop over all experts. On CUDA in bfloat16, the type of its kernel."""
    dtype, (E, k, ff, d) = torch.bfloat16 if device.type == "cuda" else torch.float32, (32, 4, 128, 256)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        layer = MoE(ModelConfig(vocab_size=2, d_model=d, pattern="E", n_experts=E, top_k=k, expert_ff=ff)).to(device, dtype)
        h = sphere.random(2, 256, d).to(device, dtype)

    def loop(h: Tensor) -> Tensor:
        x = h * layer.get_submodule("s_moe")()
        _, chosen, weights = layer.router(x)
        x, chosen, weights = (t.flatten(0, 1) for t in (x, chosen, weights))
        out, s_u = torch.zeros_like(x), layer.get_submodule("experts.s_u")()
        for e, (up, down) in enumerate(zip(layer.experts.up.unbind(), layer.experts.down.unbind())):
            token, place = (chosen == e).nonzero(as_tuple=True)
            y = F.relu(F.linear(x[token], up) * s_u).square() @ down
            out = out.index_add(0, token, y * weights[token, place, None].to(dtype))
        return out.view_as(h)

    def with_weights(form: Callable[[Tensor], Tensor]) -> Twin:
        weights = [layer.get_parameter(name) for name in ("experts.up", "experts.down", "experts.s_u.weight", "router.weight")]

        def run() -> Result:
            x = h.clone().requires_grad_()
            out = form(x)
            return [out.detach(), *torch.autograd.grad(out.float().square().sum(), [x, *weights])]

        return run

    tolerance = 5e-2 if dtype == torch.bfloat16 else 1e-4
    fast, slow = with_weights(lambda h: layer(h)[0]), with_weights(loop)
    return _compare("experts: sorted products / loop", fast, slow, tolerance, device)


def _loss(device: torch.device, dtype: torch.dtype = torch.float32) -> Row:
    """On CUDA, the Triton kernel between the products."""
    draw = torch.Generator().manual_seed(3)
    n, d, V = 512, 256, 8192
    h, w = sphere.random(n, d, generator=draw).to(device, dtype), sphere.random(V, d, generator=draw).to(device, dtype)
    s_z = (10 + torch.rand(V, generator=draw)).to(device)
    targets = torch.randint(0, V, (n,), generator=draw).to(device)

    def naive(h: Tensor, w: Tensor, s_z: Tensor) -> Tensor:
        return F.cross_entropy(logit_scale(F.linear(h.float(), w.float()), s_z), targets)

    name, tolerance = ("loss: chunked / whole logits", 1e-4) if dtype == torch.float32 else ("loss: bfloat16 / float32", 2e-2)
    fast = lambda: _with_gradients(lambda h, w, s: linear_cross_entropy(h, w, targets, s_z=s), h, w, s_z)  # noqa: E731
    return _compare(name, fast, lambda: _with_gradients(naive, h, w, s_z), tolerance, device)


def _attention(device: torch.device) -> Row:
    """Packed documents by their offsets, in the precision that the kernel takes, against the dense mask in float32."""
    draw = torch.Generator().manual_seed(5)
    B, T, H, G, d_k = 2, 512, 8, 2, 64
    q, k, v = (torch.randn(B, T, n, d_k, generator=draw).to(device, torch.bfloat16) for n in (H, G, G))
    ids, scale = _packed(B, T, device), 0.125
    documents = pack(ids)

    def fast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention.varlen(q, k, v, documents, scale)

    def slow(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.float().transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attention.document_mask(ids), scale=scale, enable_gqa=True)
        return out.transpose(1, 2).to(torch.bfloat16)

    return _compare(
        "attention: documents by offsets / mask", lambda: _with_gradients(fast, q, k, v),
        lambda: _with_gradients(slow, q, k, v), 2e-2, device,
    )  # fmt: skip


def _four_blocks(device: torch.device, dtype: torch.dtype, normalized: bool = True) -> tuple[LanguageModel, Tensor]:
    """A model with a block of each kind, and states h. Every token sees every expert: no rounding sends it to another one."""
    config = ModelConfig(
        vocab_size=2, d_model=256, pattern="M*E-", n_heads=4, n_kv_heads=2, head_dim=64, mamba_heads=8, state=64, groups=2,
        ff=512, n_experts=4, top_k=4, expert_ff=128, shared_ff=128, normalized=normalized,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(6)
        return LanguageModel(config).to(device, dtype), sphere.random(2, 256, 256).to(device, dtype)


def _by_kind(model: LanguageModel, h: Tensor) -> Iterator[tuple[str, nn.Module, Callable[[Callable], Twin]]]:
    """The kind of each block, the block, and its twin: value and gradients of a forward method over packed documents."""
    documents = pack(_packed(2, 256, h.device))
    for name, block in zip(("Mamba-2", "attention", "MoE", "MLP"), model.blocks):
        leaves = list(block.parameters())

        def passes(forward: Callable, leaves: list = leaves) -> Twin:
            def run() -> Result:
                x = h.clone().requires_grad_()
                out = forward(x, documents)[0]
                weight = torch.linspace(-1, 1, out.numel(), device=h.device).view_as(out)
                found = torch.autograd.grad((out.float() * weight).sum(), [x, *leaves], allow_unused=True)
                return [out.detach(), *(g for g in found if g is not None)]

            return run

        yield name, block, passes


def _blocks(device: torch.device) -> Iterator[Row]:
    """Each kind of block compiled, as in training on a GPU, against itself uncompiled: packed documents, bfloat16."""
    torch.compiler.reset()  # what this process compiled before counts toward Dynamo's limit of recompilations
    for name, block, passes in _by_kind(*_four_blocks(device, torch.bfloat16)):
        fast, slow = passes(torch.compile(block.forward)), passes(block.forward)
        yield _compare(f"block: {name}, compiled / plain", fast, slow, 5e-2, device)


def _operators(device: torch.device) -> Iterator[Row]:
    """The operators in C++ that the CPU takes (``nn/fused.py``) against the plain forms: training, and tokens from a cache."""
    missing = native.compiler() is None
    note = "there is no C++ compiler here: plain torch is compared with itself" if missing else ""

    def plainly(twin: Twin) -> Twin:
        def run() -> Result:
            with fused.plain():
                return twin()

        return run

    for kind, normalized in (("nGPT", True), ("GPT", False)):
        model, h = _four_blocks(device, torch.float32, normalized)
        for name, block, passes in _by_kind(model, h):
            twin = passes(block.forward)
            yield _compare(f"{kind}, {name}: C++ / plain torch", twin, plainly(twin), 1e-4, device, note)

        @torch.no_grad()
        def tokens(model: LanguageModel = model) -> Result:
            cache = model.new_cache(2, 8)
            return [model(torch.full((2, 1), t % 2), cache=cache) for t in range(8)]

        yield _compare(f"{kind}, token by token: C++ / plain torch", tokens, plainly(tokens), 1e-4, device, note)


def run(device: str = "cpu") -> list[Row]:
    """Every comparison on this device."""
    if device.split(":")[0] not in ("cpu", "cuda"):
        raise ValueError(f"--device must be cpu or cuda (cuda:1, ...); got {device!r}.")
    where = torch.device(device)
    if where.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {device}: this torch ({torch.__version__}) finds no CUDA device. Use --device cpu.")
    rows = [_optimizer(where), _travel(where), *_scans(where), *_convolutions(where), _experts(where), _loss(where)]
    if where.type == "cuda":
        return [*rows, _loss(where, torch.bfloat16), _attention(where), *_blocks(where)]
    return [*rows, *_operators(where)]


def format_rows(rows: list[Row], device: str = "cpu") -> str:
    """The table as text, headed by the versions and the machine."""
    where = torch.cuda.get_device_name(torch.device(device)) if device.startswith("cuda") else platform.machine()
    lines = [
        f"ngpt_core {__version__}, torch {torch.__version__}, Python {platform.python_version()}, {device}: {where}",
        "",
        f"{'fast path / slow twin':40s} {'error':>9s} {'allowed':>9s} {'time':>7s}",
    ]
    for row in rows:
        verdict = "ok" if row.passed else "WRONG"
        lines.append(f"{row.name:40s} {row.error:9.1e} {row.tolerance:9.0e} {row.ratio:6.2f}x  {verdict}")
        if row.note:
            lines.append(f"    {row.note}")
    return "\n".join(lines)


def main(device: str = "cpu") -> int:
    """Print the table; 0 if every fast path agrees with its twin, 1 otherwise."""
    rows = run(device)
    print(format_rows(rows, device))
    return 0 if all(row.passed for row in rows) else 1
