"""How good is a trained model on held-out text? ``ngpt eval`` computes and prints it."""

import json
import math

from ..train.config import TrainConfig
from ..train.evaluate import bits_per_byte, evaluate, evaluate_positions
from ..train.memory import room_for
from ..train.run import open_blend
from ..train.trained import description_of, open_model, pick_device, run_of
from ..train.world import World

__all__ = ["evaluate_run", "evaluation_text"]


@room_for("evaluating", "Lower --batch-size or --seq-len, or use --device cpu.")
def evaluate_run(
    folder: str,
    data: list[str] | None,
    windows: int,
    seq_len: int | None,
    rows: int,
    device: str,
    tokenizer: str | None = None,
) -> dict[str, object]:
    """Held-out loss, bits per byte, perplexity and per-position loss."""
    for name, value in (("windows", windows), ("batch-size", rows), ("seq-len", 1 if seq_len is None else seq_len)):
        if value < 1:
            raise ValueError(f"--{name} must be at least 1; got {value}.")
    run, where = run_of(folder), pick_device(device)
    model, own_tokenizer = open_model(folder, where, tokenizer)
    config, described = TrainConfig() if run is None else run.config, None if tokenizer else description_of(folder)
    held_out = tuple(data or config.val_data)  # a token file given here is held out; one of the run's --data is not
    corpora = open_blend(
        held_out or config.data,
        model.config.vocab_size,
        described,
        folder,
        reader=lambda: own_tokenizer,
        split="val" if held_out else "train",
    )
    corpora = [(corpus, weight) for corpus, weight in corpora if corpus.has("val")]
    for corpus, _ in corpora:
        corpus.verify(splits=("val",))
    if not corpora:
        raise ValueError(
            "there is no held-out split to evaluate on: pack the corpus with --val-fraction above 0, or name a token file that "
            "was held out with --data."
        )
    seq_len = seq_len or config.seq_len
    result = evaluate(model, corpora, windows, rows, seq_len, World(where))
    if not result.tokens:
        raise ValueError("the held-out split has no token to predict: its documents are too short. Pack it from more text.")
    positions = evaluate_positions(model, corpora, windows, rows, seq_len)
    return {
        "loss": result.loss,
        "perplexity": math.exp(result.loss),
        "bits_per_byte": bits_per_byte(result.loss, corpora),
        "tokens": result.tokens,
        "seq_len": seq_len,
        "loss_by_position": positions,
    }


def evaluation_text(result: dict, as_json: bool) -> str:
    """The result of ``evaluate_run`` as ``ngpt eval`` prints it."""
    if as_json:
        return json.dumps(result)
    lines = [
        f"loss           {result['loss']:.4f}  (nats per token, {result['tokens']:,} held-out tokens)",
        f"bits per byte  {result['bits_per_byte']:.4f}",
        f"perplexity     {result['perplexity']:.3f}",
        "loss by position of the window",
    ]
    start, losses = 0, result["loss_by_position"]
    while start < len(losses):  # 0, 1, 2-3, 4-7, 8-15, ...
        stop = min(max(2 * start, start + 1), len(losses))
        part = [x for x in losses[start:stop] if not math.isnan(x)]
        if part:
            place = f"{start}" if stop == start + 1 else f"{start}-{stop - 1}"
            lines.append(f"  {place:>11}  {sum(part) / len(part):.4f}")
        start = stop
    return "\n".join(lines)
