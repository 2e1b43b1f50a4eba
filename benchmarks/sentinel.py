"""How many flipped bits does ``--sentinel`` find, where, and what does it cost?

    python benchmarks/sentinel.py [--presets pico micro] [--flips 500] [--trials 3] [--rounds 60] [--out FILE.json]

    at rest     one bit of a parameter or moment flips, from another thread, at a random time of a whole step; then all numbers
                are compared, as before a checkpoint. The rate also for the flips that matter: those that change a weight by
                more than 1e-3 (a flipped moment by the update that uses it). Few flips of a moment do, so there is a second
                series, where the cap is at its full value: the upper exponent bits of moments, until 300 of each kind have
                moved a weight by that much (1,500 at most)
    by bit      one bit flips between two steps: every kind of tensor, every bit
    transient   one bit of a gradient or an activation flips while a step is computed: found in an ordinary step, and found in a
                step that is computed twice; the rate also for the flips that change a weight at all
    overhead    CPU time with --sentinel 100 over that without it, the repeated step included: in each round some steps with it
                and some without, the first of each not counted; medians over rounds of the ratios within a round (timing.py),
                and the interval that holds 95% of the medians of rounds drawn again. On a busy machine it is wide, so that
                what the sentinel adds to an ordinary step is also timed in place: its parts, and the difference of the update

Every trial starts from the same state. One thread, float32, the embedded corpus, nGPT; "overhead" with the presets and
"at rest" with the first of them, on the default batch of 8 x 256 tokens; the others with a smaller model and 20 ms per step.
"""

import argparse
import json
import os
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from timing import machine, ratio
from torch import Tensor

from ngpt_core.train.run import open_blend, prepare
from ngpt_core.train.sentinel import Corrupted
from ngpt_core.train.trainer import Trainer
from ngpt_core.train.world import World

SMALL = dict(
    preset="pico", d_model=64, pattern="ME*E", n_heads=2, n_kv_heads=1, mamba_heads=4, mamba_head_dim=16, state=8, groups=2,
    chunk=16, n_experts=4, top_k=2, expert_ff=32, shared_ff=32,
)  # fmt: skip
BITS = {"mantissa 0-11": range(12), "mantissa 12-22": range(12, 23), "exponent": range(23, 31), "sign": range(31, 32)}
MATTERS = 1e-3
EVERY = 100
PARTS = ["by bit", "transient", "overhead", "at rest", "moments"]
MOMENTS = ("exp_avg", "exp_avg_sq")
ENOUGH = 300  # flips of a moment that matter


def make_trainer(model: dict, sentinel: int, **settings: Any) -> Trainer:
    """A trainer after three steps."""
    settings = {"out": f"{os.devnull}/run", "steps": 10_000, "diagnostics_every": 0, "sentinel": sentinel, **settings}
    run = prepare(settings, model, resume=False)
    trainer = Trainer(run, World(torch.device("cpu")), open_blend(run.config.data, run.model.vocab_size))
    for _ in range(3):
        trainer.step()
    return trainer


def flip(x: Tensor, index: int, bit: int) -> float:
    """Flip a bit in memory, where torch does not notice it, and return by how much the number has changed."""
    numbers = x.detach().view(-1).numpy()
    before = float(numbers[index])
    numbers.view(np.uint32)[index] ^= np.uint32(1 << bit)
    return abs(float(numbers[index]) - before)


def back(trainer: Trainer, start: Any) -> None:
    """Undo everything since ``start`` was stored."""
    assert trainer.sentinel is not None
    trainer.optimizer.zero_grad(set_to_none=True)
    trainer.sentinel._restore(start)
    trainer.sentinel.reset()


def weights(trainer: Trainer) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for group in trainer.optimizer.param_groups for p in group["params"]])


def largest(x: Tensor) -> float:
    return float(x.abs().nan_to_num(1e9).max())


def rates(trials: Iterable[tuple[str, bool, bool]]) -> dict[str, dict[str, float]]:
    """Per label: the number of flips, the share found, and the same for those that matter. A trial: (label, matters, found)."""
    trials, table = list(trials), {}
    for label in dict.fromkeys(label for label, _, _ in trials):
        mine = [(matters, found) for name, matters, found in trials if name == label]
        serious = [found for matters, found in mine if matters]
        table[label] = {
            "flips": len(mine), "found": statistics.mean(found for _, found in mine),
            "that matter": len(serious), "found of those": statistics.mean(serious) if serious else None,
        }  # fmt: skip
    return table


# ---- at rest -----------------------------------------------------------------------------------------------------------
def at_rest(trainer: Trainer, flips: int) -> dict[str, dict]:
    """Flips at random times: from the end of one step to the end of the next, the update included."""
    watch, pick, trials = trainer.sentinel, random.Random(0), []
    assert watch is not None
    tensors = [x for x in watch.seals.tensors if x.kind in ("parameter", *MOMENTS)]
    start, seconds = watch._stored(), []
    for _ in range(5):
        back(trainer, start)
        begin = time.perf_counter()
        trainer.step()
        seconds.append(time.perf_counter() - begin)
    clean, whole = weights(trainer), statistics.median(seconds)

    def trial(among: list, bits: Sequence[int]) -> tuple[str, bool, bool] | None:
        """(kind, matters, found); None if nothing happened, because the step was shorter than expected."""
        back(trainer, start)
        victim = pick.choices(among, [x.here.numel() for x in among])[0]
        index, bit, wait = pick.randrange(victim.here.numel()), pick.choice(bits), pick.random() * whole
        over, struck = threading.Event(), list[float]()

        def strike() -> None:
            if not over.wait(wait):
                struck.append(flip(victim.here, index, bit))

        thread = threading.Thread(target=strike)
        thread.start()
        found, moved = False, 1e9  # what a loss that is not finite does not let happen
        try:
            trainer.step()
            over.set()
            thread.join()
            moved = largest(weights(trainer) - clean)
            watch.verify()
        except Corrupted:
            found = True
        except ValueError:  # not finite, but no number was damaged
            pass
        over.set()
        thread.join()
        return (victim.kind, moved > MATTERS or (victim.kind == "parameter" and struck[0] > MATTERS), found) if struck else None

    while len(trials) < 2 * flips:
        if one := trial(tensors, range(32)):
            trials += [one, ("all", *one[1:])]
    return rates(trials)


def of_moments(trainer: Trainer) -> dict[str, dict]:
    """Flips of the upper exponent bits of moments between two steps, each with the sentinel (is it found?) and without it (by
    how much does the update that uses it move a weight?)."""
    watch, pick, trials = trainer.sentinel, random.Random(3), []
    assert watch is not None
    start = watch._stored()
    trainer.step()
    clean = weights(trainer)
    for kind in MOMENTS:
        among, matter = [x for x in watch.seals.tensors if x.kind == kind], 0
        for _ in range(5 * ENOUGH):
            victim = pick.choices(among, [x.here.numel() for x in among])[0]
            index, bit, moved, found = pick.randrange(victim.here.numel()), pick.choice(range(27, 31)), 1e9, False
            for on in (False, True):
                trainer.sentinel = watch
                back(trainer, start)
                flip(victim.here, index, bit)
                if not on:
                    trainer.sentinel, trainer.optimizer.seals = None, {}  # type: ignore[union-attr]
                try:
                    trainer.step()
                    if on:
                        watch.verify()
                    else:
                        moved = largest(weights(trainer) - clean)
                except Corrupted:
                    found = True
                except ValueError:  # not finite
                    pass
            trials.append((f"{kind}, upper exponent bits", moved > MATTERS, found))
            matter += moved > MATTERS
            if matter >= ENOUGH:
                break
    return rates(trials)


# ---- by bit ------------------------------------------------------------------------------------------------------------
def by_bit(trainer: Trainer, trials: int) -> dict[str, dict]:
    """Flips between two steps: in every kind of tensor, every bit, ``trials`` times."""
    watch, pick, results = trainer.sentinel, random.Random(1), []
    assert watch is not None
    start = watch._stored()
    for kind in ("parameter", "exp_avg", "exp_avg_sq", "buffer", "step"):
        tensors = [x for x in watch.seals.tensors if x.kind == kind]
        for name, bits in BITS.items():
            for bit in bits:
                for _ in range(trials):
                    back(trainer, start)
                    victim = pick.choice(tensors)
                    change = flip(victim.here, pick.randrange(max(1, victim.here.numel())), bit)
                    try:
                        trainer.step()
                        watch.verify()
                        found = False
                    except Corrupted:
                        found = True
                    results.append((f"{kind}, {name}", change > MATTERS, found))
    back(trainer, start)
    return rates(results)


# ---- transient ---------------------------------------------------------------------------------------------------------
def transient(trainer: Trainer, trials: int) -> dict[str, dict]:
    """Flips while a step is computed, ``trials`` times for every bit: in h, in a block's output, in a gradient."""
    watch, pick, results = trainer.sentinel, random.Random(2), []
    assert watch is not None
    start = watch._stored()
    trainer.step()
    clean, large = weights(trainer), [p for p in trainer.model.parameters() if p.numel() > 1000]
    places = {"h after a block": trainer.model.blocks, "a block's output before Norm": [b.mixer for b in trainer.model.blocks]}
    for place in (*places, "a gradient"):
        for name, bit in [(name, bit) for name, bits in BITS.items() for bit in bits for _ in range(trials)]:
            victim, where = pick.choice(list(places.get(place, large))), pick.random()
            matters, found = True, list[bool]()
            for every in (EVERY, 1):  # an ordinary step, and one that is computed twice
                back(trainer, start)
                watch.every, handle = every, arm(victim, where, bit)
                try:
                    watch.step(False)
                    if every == EVERY:
                        matters = largest(weights(trainer) - clean) > 0
                    watch.verify()
                    found.append(False)
                except ValueError:  # Corrupted; or the loss is not finite, which ends every run
                    found.append(True)
                handle.remove()
            results.append((f"{place}, {name}, ordinary step", matters, found[0]))
            results.append((f"{place}, {name}, computed twice", matters, found[1]))
    return rates(results)


def arm(victim: Any, where: float, bit: int) -> Any:
    """Flip a bit of a module's next output, or of a parameter's next gradient. Only once."""

    def spoil_output(module: object, args: object, output: Any) -> Any:
        handle.remove()
        first, *rest = output if isinstance(output, tuple) else (output,)
        spoiled = first.detach().clone()
        flip(spoiled, int(where * spoiled.numel()), bit)
        new = torch.where(spoiled == first.detach(), first, spoiled)
        return (new, *rest) if isinstance(output, tuple) else new

    def spoil_gradient(p: Tensor) -> None:
        handle.remove()
        assert p.grad is not None
        flip(p.grad, int(where * p.numel()), bit)

    if isinstance(victim, Tensor):
        handle = victim.register_post_accumulate_grad_hook(spoil_gradient)
    else:
        handle = victim.register_forward_hook(spoil_output, prepend=True)
    return handle


# ---- overhead ----------------------------------------------------------------------------------------------------------
def overhead(preset: str, rounds: int) -> dict[str, Any]:
    """What --sentinel 100 adds to the CPU time of a step, as a share: 99 ordinary steps and one that is computed twice."""
    trainer = make_trainer({"preset": preset}, 10**9)  # one for all ways: another one lies elsewhere in memory
    watch, blocks, steps = trainer.sentinel, list(trainer.model.blocks), 3
    assert watch is not None
    spent, updates = list[float](), dict[str, list[float]]()  # CPU seconds in the parts of the sentinel, and in the update

    def timed(work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            begin = time.thread_time()
            result = work(*args)
            spent.append(time.thread_time() - begin)
            return result

        return call

    for part in ("alarm", "check", "seal"):
        setattr(watch, part, timed(getattr(watch, part)))
    for block in blocks:
        for key, hook in block._forward_hooks.items():
            block._forward_hooks[key] = timed(hook)
    trainer.optimizer.step, parts = timed(trainer.optimizer.step), list[float]()  # type: ignore[method-assign]  # for its time
    hooks, seconds = [dict(block._forward_hooks) for block in blocks], dict[str, list[float]]()
    for i in range(rounds):
        for name in ("off", "on", "twice", "full check")[:: 1 if i % 2 else -1]:
            off = name == "off"
            trainer.sentinel, watch.every = (None if off else watch), (1 if name == "twice" else 10**9)
            for j, (block, own) in enumerate(zip(blocks, hooks)):
                block._forward_hooks.clear()
                block._forward_hooks.update({} if off else own)
                block.off = None if off else watch.read[j : j + 1]  # type: ignore[assignment]  # a block has it
            watch.reset()
            if off:
                trainer.optimizer.seals = {}  # type: ignore[union-attr]
            work = trainer.step if off else watch.verify if name == "full check" else partial(watch.step, False)
            for k in range(2 if name == "twice" else steps + 1):
                spent.clear()
                begin = time.process_time()
                work()
                if k:
                    seconds.setdefault(name, []).append(time.process_time() - begin)
                    if name in ("on", "off"):  # in order: the blocks, alarm, check, update, seal
                        update = spent.pop(-2) if name == "on" else spent.pop()
                        updates.setdefault(name, []).append(update)
                        parts.append(sum(spent)) if name == "on" else None
    grouped = {name: [statistics.mean(x[i * len(x) // rounds : (i + 1) * len(x) // rounds]) for i in range(rounds)]
               for name, x in seconds.items()}  # fmt: skip

    def share(which: Sequence[int]) -> tuple[float, float, float]:
        drawn = {name: [x[i] for i in which] for name, x in grouped.items()}
        on, twice = ratio(drawn, "on", "off") - 1, ratio(drawn, "twice", "off") - 1
        return on, twice, ((EVERY - 1) * on + twice) / EVERY

    pick = random.Random(0)
    again = zip(*(share(pick.choices(range(rounds), k=rounds)) for _ in range(1000)))
    intervals = [[sorted(x)[25], sorted(x)[975]] for x in again]
    on, twice, total = share(range(rounds))
    update = statistics.median(updates["on"]) - statistics.median(updates["off"])
    return {
        "cpu seconds per step": statistics.median(grouped["off"]),
        "rounds": rounds,
        "ordinary step, its parts timed in place": (statistics.median(parts) + update) / statistics.median(grouped["off"]),
        "ordinary step": on, "ordinary step, 95%": intervals[0],
        "repeated step": twice, "repeated step, 95%": intervals[1],
        f"--sentinel {EVERY}": total, f"--sentinel {EVERY}, 95%": intervals[2],
        "check before a checkpoint": ratio(grouped, "full check", "off"),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--presets", nargs="+", default=["pico", "micro"])
    parser.add_argument("--flips", type=int, default=500, help="at rest")
    parser.add_argument("--trials", type=int, default=3, help="per kind of tensor and bit")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--only", nargs="+", choices=PARTS, help="the others keep their results")
    parser.add_argument("--out", help="write the result as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = json.loads(Path(args.out).read_text()) if args.out and Path(args.out).exists() else {}
    result["machine"] = machine()
    only = args.only or PARTS
    for part, work in (("by bit", by_bit), ("transient", transient)):
        if part in only:
            result[part] = work(make_trainer(SMALL, EVERY, batch_size=4, seq_len=32), args.trials)
            show(part, result[part])
    if "overhead" in only:
        for preset in args.presets:
            result.setdefault("overhead", {})[preset] = overhead(preset, args.rounds)
            print(f"overhead, {preset}: {json.dumps(result['overhead'][preset])}", flush=True)
    if "at rest" in only:
        preset = args.presets[0]
        result["at rest"] = {preset: at_rest(make_trainer({"preset": preset}, EVERY), args.flips)}
        show(f"at rest, {preset}", result["at rest"][preset])
    if "moments" in only:  # 30 steps: the cap has reached its full value after three of them
        result["moments"] = of_moments(make_trainer(SMALL, EVERY, batch_size=4, seq_len=32, steps=30))
        show("moments", result["moments"])
    if args.out:
        Path(args.out).write_text(json.dumps(result, indent=1) + "\n")


def show(title: str, table: dict[str, dict]) -> None:
    print(f"{title:60} flips    found    that matter    found of those")
    for label, row in table.items():
        of = "" if row["found of those"] is None else f"{row['found of those']:.1%}"
        print(f"  {label:58} {row['flips']:5}   {row['found']:6.1%}    {row['that matter']:11}    {of:>14}", flush=True)


if __name__ == "__main__":
    main()
