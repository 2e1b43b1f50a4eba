"""What did the benchmarks measure? One page from the stored results: benchmarks/results/README.md.

python benchmarks/table.py
"""

import json
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def read(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())


def line(*cells: object) -> str:
    return "| " + " | ".join("" if c is None else f"{c:.2f}" if isinstance(c, float) else str(c) for c in cells) + " |"


def table(*head: str) -> list[str]:
    return [line(*head), "|" + "---|" * len(head)]


def whole_step() -> list[str]:
    """The table of the whole step and its limits, before and after in one run."""
    step, optim, model = read("step"), read("optim"), read("model")
    lines = table("work", "before", "now", "target", "stretch", "limit on this machine")
    rows = {preset: data["rows"] for preset, data in step["presets"].items()}

    def add(name: str, preset: str, row: str, target: object, stretch: object, limit: str = "") -> None:
        x = rows[preset][row]
        lines.append(line(name, x.get("before"), x["now"], target, stretch, limit))

    for preset, target in (("micro", 0.60), ("pico", 0.65)):
        alone = rows[preset]["products alone / NemotronH"]["now"]
        row = "our GPT / NemotronH + fused AdamW"
        add(f"our GPT step / NemotronH + fused AdamW, `{preset}`", preset, row, target, 0.5, f"{alone:.2f}: the products alone")
    add("nGPT, whole recipe / our GPT, `micro`", "micro", "nGPT, whole recipe / our GPT", 1.05, 1.03)
    share = rows["micro"]["products alone / our GPT"]
    add("`micro`, GFLOP/s / those of its matrix products", "micro", "products alone / our GPT", 0.6, 0.7, "1")
    took = step["presets"]["micro"]["milliseconds"]
    limit = f"{1 / share['now']:.2f}: eager / products alone"
    add("compiled over eager, GPT, `micro`", "micro", "eager / compiled, GPT", 1.5, None, limit)
    lines.append(line("... over what eager was before", None, took["before GPT"] / took["GPT compiled"], 1.5, None, ""))
    ways, then = optim["ways"], optim["before"]["ways"]
    moved = ways["whole recipe"]["bytes"] / ways["AdamW fused"]["bytes"]
    for name, way, target, stretch, limit in (
        ("recipe's optimizer step / fused AdamW, 30M in unit rows", "whole recipe", 1.40, 1.25,
         f"{moved:.2f}: bytes moved; {1 + ways['reading g']['ratio']:.2f}: AdamW and a sum of the gradients"),
        ("... without its check of the gradients, as AdamW", "... unchecked", None, None, "1.00: bytes moved"),
        ("readable path / fused AdamW", "readable", 20.0, None,
         f"{ways['its operations']['ratio']:.0f}: its operations alone, in the cache"),
    ):  # fmt: skip
        lines.append(line(name, then[way]["ratio"], ways[way]["ratio"], target, stretch, limit))
    for kind, bound in (("dense eager", "dense bound"), ("dense compiled", "dense compiled bound")):
        now, old = (x.get(kind, {}).get("ratio") for x in (model["results"], model["before"]))
        what = f"{kind.replace('dense', 'dense nGPT')} / nGPT-pytorch, tokens/s"
        lines.append(line(what, old, now, 1.25, None, f"{model['results'][bound]['ratio']:.2f}: products alone"))
    for who in ("our GPT", "nGPT"):
        row = f"decode: tokens/s of {who} / NemotronH's"
        add(f"decode with a cache, `micro`, tokens/s, {who} / transformers'", "micro", row, 2.0, 4.0)
    for who in ("GPT", "nGPT"):
        row = f"peak memory of a step: {who} / NemotronH"
        add(f"{row}, `micro`", "micro", row, 0.8, 0.6)
    return lines


def growth() -> list[str]:
    lines = table("over", "exponent", "of the FLOPs", "microseconds per token")
    for row, x in read("growth")["rows"].items():
        each = ", ".join(f"{size}: {us:.0f}" for size, us in x["microseconds_per_token"].items())
        lines.append(line(row, x["exponent"], x["exponent_of_flops"], each))
    return lines


PAGE = """# How fast is it on a CPU?

Ratios of CPU time on one thread, interleaved, medians over rounds. `benchmarks/step.py`, `optim.py`, `model.py`, `growth.py`
and `threads.py` store them here, and `python benchmarks/table.py` writes this page. *Before* is the commit 4bfa7d9, before the
operators in C++: interleaved with today's code for the step, decoding and memory; in an earlier run for the optimizer and the
dense model, where both are ratios to the same peer. Growth, threads, the demo, and in `model.json` sphere and moe are from
before attention had an operator and products went to oneDNN.

The machine: {cpu}, {cores} cores, torch {torch}, shared with others (load: {loads}).

{step}

Memory is the peak of torch's allocator above weights and optimizer states. The limit of a row is what would be left if
everything else cost nothing; "products" include the operator for attention. Large products go to oneDNN here, because on this
processor MKL, which torch asks, reaches 114 GFLOP/s on one core and oneDNN 250. The peers' products are torch's. On a processor
that is not AMD's with AVX-512, the products are the same for all, and the limits are lower.
Over three runs the optimizer's step was 1.36, 1.39 and 1.46 of AdamW's, and the readable path 20, 26 and 19; in two runs on a
less busy machine the readable path was 18.9. (Its temporaries do not fit into the second-level cache, and the third is shared.)
The check has to read every gradient before the first number changes, and the step reads them again: one thread reads at 36
GB/s, with any number of streams and prefetches, so this takes a fifth of AdamW's time.

## Does anything grow faster than its FLOPs?

Forward and backward pass, CPU time per token; the exponent is the slope of its logarithm over that of the size.

{growth}

With more experts each has fewer tokens, so its matrices are read and their gradients written for less work: the products alone
grow for that reason too.

## Two threads, and the demo

{threads}

The main thread ends last, so its own CPU time shows the speed-up on two idle cores. (The clock, also in `threads.json`, showed
more than 2: two threads get a larger share of a busy machine.) `make` sets one thread because it runs two processes at a time
(tests, notebooks, the demo's runs), which together do more than one process with two threads.
"""


def main() -> None:
    machines = {name: read(name)["machine"] for name in ("step", "optim", "model", "growth", "threads")}
    loads = ", ".join(f"{name} {machine['load']:.0f}" for name, machine in machines.items())
    threads = table("", "ratio") + [line(row, x) for row, x in read("threads")["rows"].items() if "wall" not in row]
    parts = {"step": whole_step(), "growth": growth(), "threads": threads}
    about = {"loads": loads} | {key: machines["step"][key] for key in ("cpu", "cores", "torch")}
    (RESULTS / "README.md").write_text(PAGE.format(**about, **{name: "\n".join(lines) for name, lines in parts.items()}))


if __name__ == "__main__":
    main()
