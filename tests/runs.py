"""What does a test need to train a run in a second? A tiny hybrid, a generated text, and a run made from them."""

from ngpt_core.train.metrics import read_metrics
from ngpt_core.train.run import prepare

# A hybrid with every kind of block, small enough that a step costs a few milliseconds.
TINY = dict(
    preset="pico", d_model=32, pattern="ME*E", n_heads=2, n_kv_heads=1, mamba_heads=2, mamba_head_dim=16, state=8, groups=2,
    chunk=16, n_experts=4, top_k=2, expert_ff=16, shared_ff=16,
)  # fmt: skip
SMALL = dict(
    batch_size=4,
    seq_len=32,
    eval_windows=4,
    eval_every=0,
    save_every=0,
    sample_tokens=0,
    diagnostics_every=0,
    tensorboard=False,
)


def sentences(count: int) -> list[bytes]:
    """A generated corpus: the same on every machine, with something to learn."""
    state, found = 1, []
    words = "the a red blue cat dog sees takes gives finds ball tree and then".split()
    for i in range(count):
        picked = []
        for _ in range(12 + i % 17):
            state = (1103515245 * state + 12345) % 2**31
            picked.append(words[state >> 16 & 15 if (state >> 16 & 15) < len(words) else 0])
        found.append((" ".join(picked) + ".\n").encode())
    return found


def new_run(corpus, out, model=None, **settings):
    return prepare(
        {**SMALL, "data": [corpus], "out": str(out), "steps": 6, **settings}, {**TINY, **(model or {})}, resume=False
    )


def losses(folder) -> list[float]:
    return [r["loss"] for r in read_metrics(folder)]
