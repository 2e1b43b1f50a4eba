"""Which inputs does nobody expect? Drawn by hypothesis, for files that are read, flags and public names."""

import importlib.util
import json
from collections import Counter
from collections.abc import Callable

import cases
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from runs import TINY

import ngpt_core as ng
from ngpt_core.data.tokenizers import load_tokenizer

NUMBERS = st.one_of(
    st.integers(-3, 300), st.floats(), st.sampled_from([2**31, 2**70, -1, 0, 1e-46, 1e308, 10**400, True, None, "x", ""])
)
JSON = st.recursive(
    st.one_of(NUMBERS.filter(lambda x: x == x), st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=4,
)
FLAGS = st.sampled_from(
    "--temperature --top-p --top-k --seed --max-new-tokens --prompt --windows --seq-len --batch-size --steps --save-every "
    "--recipe --nonsense".split()
)


def _files(place: cases.Place) -> Callable:
    return cases.Sealed(place).case


def _flags(place: cases.Place) -> Callable:
    def case(command: str, flag: str, value: str) -> str:
        args = {"generate": ["generate", place.run], "eval": ["eval", place.run, "--windows=1"],
                "train": [*place.train(place.folder / "none"), "--dry-run"]}[command]  # fmt: skip
        small = ["--max-new-tokens=1"] if command == "generate" and flag != "--max-new-tokens" else []
        if flag in ("--max-new-tokens", "--windows", "--seq-len", "--batch-size") and value.isdecimal():
            value = str(int(value) % 64)  # a large one is valid, and slow
        return cases.outcome_of(*cases.command(*args, *small, f"{flag}={value}"))

    return case


def _tensors(place: cases.Place) -> Callable:
    weights = (place.run / "export" / "model.safetensors").read_bytes()
    folder = place.folder / "bytes"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_bytes((place.run / "export" / "config.json").read_bytes())
    header = 8 + int.from_bytes(weights[:8], "little")

    def case(at: int, new: bytes, cut: int | None) -> str:
        at %= header
        data = weights[:at] + new + weights[at + len(new) :]
        (folder / "model.safetensors").write_bytes(data if cut is None else data[: cut % len(data)])
        return cases.called(ng.load, folder)

    return case


def _config(place: cases.Place) -> Callable:
    config = ng.preset("pico", **{k: v for k, v in TINY.items() if k != "preset"}).to_dict()
    return lambda at, new: cases.called(ng.ModelConfig.from_dict, {**config, sorted(config)[at % len(config)]: new})


def _states(place: cases.Place) -> Callable:
    p = torch.nn.Parameter(torch.randn(2, 3))
    optimizer = ng.GatedAdamW([p])
    p.grad = torch.ones_like(p)
    optimizer.step()
    schedule = ng.Schedule(optimizer, 10)
    saved, where = optimizer.state_dict(), schedule.state_dict()

    def case(which: str, at: int, new: object) -> str:
        target, value = (optimizer, saved) if which == "optimizer" else (schedule, where)
        places = list(cases.paths_of(value))
        outcome = cases.called(target.load_state_dict, cases.changed(value, places[at % len(places)], new))
        optimizer.load_state_dict(saved)
        schedule.load_state_dict(where)
        return outcome

    return case


def _settings(place: cases.Place) -> Callable:
    """What a user writes into a group between two steps, and what the constructors get."""
    group = ng.GatedAdamW([torch.nn.Parameter(torch.ones(2, 3))]).param_groups[0]
    names = [name for name in group if name not in ("params", "alpha")]  # alpha: of a group, not an argument

    def case(where: str, at: int, new: object) -> str:
        p = torch.nn.Parameter(torch.ones(2, 3))
        optimizer = ng.GatedAdamW([p], unit_dim=-1)
        p.grad = torch.ones_like(p)
        if where == "schedule":
            arguments = {"total_steps": 10} | {("total_steps", "decay", "warmup", "warmup_share", "cap_warmup")[at % 5]: new}
            return cases.called(lambda: ng.Schedule(optimizer, **arguments))
        if where == "constructor":
            return cases.called(lambda: ng.GatedAdamW([p], **{names[at % len(names)]: new}))
        optimizer.step()
        optimizer.param_groups[0][names[at % len(names)]] = new
        return cases.called(optimizer.step)

    return case


def _generation(place: cases.Place) -> Callable:
    model, tokens = ng.load(place.run / "export"), torch.zeros(1, 2, dtype=torch.long)

    def case(count: object, temperature: object, top_k: object, top_p: object) -> str:
        count = count % 3 if isinstance(count, int) and not isinstance(count, bool) else count
        return cases.called(model.generate, tokens, count, temperature=temperature, top_k=top_k, top_p=top_p)

    return case


def _tokenizers(place: cases.Place) -> Callable:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    path, values = place.folder / "tokenizer.json", []
    for model, trainer in (
        (models.BPE(), trainers.BpeTrainer), (models.Unigram(), trainers.UnigramTrainer),
        (models.WordLevel(unk_token="[UNK]"), trainers.WordLevelTrainer),
        (models.WordPiece(unk_token="[UNK]"), trainers.WordPieceTrainer),
    ):  # fmt: skip
        tokenizer = Tokenizer(model)
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.train_from_iterator(
            ["the cat sees a red ball"] * 9, trainer(vocab_size=60, special_tokens=["[UNK]"], show_progress=False)
        )
        values.append(json.loads(tokenizer.to_str()))

    def use() -> None:
        tokenizer = load_tokenizer(str(path))
        (ids,) = tokenizer.encode(["the cat é sees zzz".encode()])
        tokenizer.decode([*ids, 10**6])

    def case(which: int, at: int, new: object) -> str:
        value = values[which % len(values)]
        places = list(cases.paths_of(value))
        path.write_text(json.dumps(cases.changed(value, places[at % len(places)], new)))
        return cases.called(use)

    return case


AT = st.integers(0, 10**6)
FILES = st.sampled_from(
    [
        "straight/config.json", "straight/checkpoints/step-00000006/state.json",
        "straight/checkpoints/step-00000006/index.json", "straight/export/seal.json", "straight/export/config.json",
        "straight/export/ngpt_tokenizer.json", "corpus/manifest.json",
    ]
)  # fmt: skip
COMMANDS, VALUES = st.sampled_from(["generate", "eval", "train"]), st.one_of(NUMBERS.map(str), st.text(max_size=6))
CASES: dict[str, tuple[Callable, tuple]] = {
    "sealed files": (_files, (FILES, AT, JSON)),
    "flags": (_flags, (COMMANDS, FLAGS, VALUES)),
    "safetensors": (_tensors, (AT, st.binary(min_size=1, max_size=8), st.one_of(st.none(), AT))),
    "configs": (_config, (AT, JSON)),
    "states": (_states, (st.sampled_from(["optimizer", "schedule"]), AT, JSON)),
    "settings": (_settings, (st.sampled_from(["group", "schedule", "constructor"]), AT, JSON)),
    "generation": (_generation, (NUMBERS, NUMBERS, NUMBERS, NUMBERS)),
}
if importlib.util.find_spec("tokenizers") is not None:
    CASES["tokenizers"] = (_tokenizers, (AT, AT, JSON | st.sampled_from(["[UNK]", "ByteLevel"])))


def fuzz(place: cases.Place, kind: str, count: int, start: int = 0) -> tuple[Counter, list]:
    """(outcomes, the first failures) of ``count`` cases of that kind."""
    make, strategies = CASES[kind]
    case, outcomes, examples = make(place), Counter(), []

    @seed(start)
    @settings(
        max_examples=count, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )
    @given(st.tuples(*strategies))
    def run(drawn: tuple) -> None:
        outcomes[outcome := case(*drawn)] += 1
        if outcome in cases.BAD and len(examples) < 5:
            examples.append((outcome, drawn))

    run()
    return outcomes, examples
