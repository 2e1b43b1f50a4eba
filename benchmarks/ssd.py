"""How fast is the Mamba-2 block compared with transformers', on a CPU?

    python benchmarks/ssd.py [--d 256] [--heads 8] [--state 128] [--groups 2] [--tokens 1024] [--batch 2] [--out FILE]

One block, forward and backward, float32. The peer is transformers' NemotronH mixer in plain torch with the same weights, at
three lengths of its chunk: 256, the default of its Mamba-2; 128, the default of its NemotronH; and 64. Both compute the same
function: outputs and gradients are compared before anything is timed.

Process CPU time on one thread, all variants interleaved, the median over rounds of the ratio within a round. Times are context.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import transformers
from torch import nn
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer

from ngpt_core.config import ModelConfig
from ngpt_core.nn.mamba2 import Mamba2

TARGETS = {256: 0.40, 64: 0.60}  # ours, compiled, over theirs


def peer(ours: Mamba2, chunk: int) -> NemotronHMamba2Mixer:
    """transformers' mixer with our weights."""
    c = ours.config
    config = transformers.NemotronHConfig(
        hidden_size=c.d_model, layers_block_type=["linear_attention"], mamba_num_heads=c.mamba_heads,
        mamba_head_dim=c.mamba_head_dim, ssm_state_size=c.state, n_groups=c.groups, conv_kernel=c.conv, chunk_size=chunk,
        time_step_min=1e-30,
    )  # fmt: skip
    mixer = NemotronHMamba2Mixer(config, layer_idx=0)
    with torch.no_grad():
        mixer.in_proj.weight.copy_(ours.in_proj)
        mixer.out_proj.weight.copy_(ours.out_proj.mT)
        mixer.conv1d.weight.copy_(ours.conv_weight.mT[:, None])
        mixer.conv1d.bias.copy_(ours.conv_bias)
        for name in ("A_log", "D", "dt_bias"):
            getattr(mixer, name).copy_(getattr(ours, name))
        mixer.norm.weight.copy_(ours.norm_weight)
    return mixer


def step(layer: nn.Module, h: torch.Tensor, grad: torch.Tensor) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """One forward and backward pass; returns the output and the gradient of the input."""

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        layer.zero_grad()
        h.grad = None
        out = layer(h)
        out.backward(grad)
        return out.detach(), h.grad

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = {"d": 256, "heads": 8, "head-dim": 64, "state": 128, "groups": 2, "tokens": 1024, "batch": 2, "chunk": 64}
    for name, value in (sizes | {"rounds": 11}).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--out")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()

    config = ModelConfig(
        vocab_size=2, d_model=args.d, pattern="M", mamba_heads=args.heads, mamba_head_dim=args.head_dim, state=args.state,
        groups=args.groups, chunk=args.chunk, normalized=False,
    )  # fmt: skip
    ours = Mamba2(config)
    h, grad = torch.randn(2, args.batch, args.tokens, args.d)
    h.requires_grad_()
    ways = {f"transformers, chunk {chunk}": step(peer(ours, chunk), h, grad) for chunk in (256, 128, 64)}
    ways["transformers, chunk 64, compiled"] = step(torch.compile(peer(ours, 64)), h, grad)
    ways["ours"] = step(ours, h, grad)
    ways["ours, compiled"] = step(torch.compile(ours, fullgraph=True), h, grad)
    expected = None
    for way in ways.values():  # the first run compiles; it also shows that all compute the same
        results = [t.clone() for t in way()]
        expected = expected or results
        for a, b in zip(results, expected):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 * b.abs().max().item())
        way()

    seconds = {name: [] for name in ways}
    for _ in range(args.rounds):
        for name, way in ways.items():
            start = time.process_time()
            way()
            seconds[name].append(time.process_time() - start)

    def ratio(name: str, chunk: int) -> float:
        return statistics.median(a / b for a, b in zip(seconds[name], seconds[f"transformers, chunk {chunk}"]))

    rows = {
        name: {"milliseconds": 1e3 * statistics.median(s)} | {f"over {c}": ratio(name, c) for c in (256, 128, 64)}
        for name, s in seconds.items()
    }
    print(f"Mamba-2 block, forward and backward: {vars(args)}")
    print(f"{'':34}{'ms':>8}{'over 256':>10}{'over 128':>10}{'over 64':>10}")
    for name, row in rows.items():
        print(f"{name:34}{row['milliseconds']:8.1f}" + "".join(f"{row[f'over {c}']:10.3f}" for c in (256, 128, 64)))
    for chunk, target in TARGETS.items():
        value = rows["ours, compiled"][f"over {chunk}"]
        print(f"target at chunk {chunk}: {target:.2f}, measured {value:.3f}: {'reached' if value <= target else 'missed'}")
    if args.out:
        machine = {
            "cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "threads": 1,
            "system": platform.system(), "python": platform.python_version(),
            "torch": torch.__version__, "transformers": transformers.__version__,
        }  # fmt: skip
        setting = {k: v for k, v in vars(args).items() if k != "out"}
        with open(args.out, "w") as f:
            json.dump({"machine": machine, "setting": setting, "ways": rows}, f, indent=1)
            f.write("\n")


if __name__ == "__main__":
    main()
