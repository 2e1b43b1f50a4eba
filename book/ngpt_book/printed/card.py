"""What hangs on the wall while one trains an nGPT? The recipe on one page, drawn from the numbers of the package.

    python -m ngpt_book.printed.card            writes book/_assets/recipe_card.pdf and .png (needs Chromium; seconds)

The numbers come from ``ngpt_core.recipe`` and the presets. ``book/_assets/recipe_card.txt`` holds the words of the card that
was printed last; a test compares them with today's.
"""

import html
import re
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

import ngpt_core as ng
from ngpt_core.presets import LADDER
from ngpt_core.recipe import TABLE, Baseline, Line, Settings

from ..sphinx import mathematics
from . import chromium

ASSETS = Path(__file__).parents[2] / "_assets"
STYLE = Path(__file__).with_name("card.css")
PIXELS = (1123, 794)  # A4 across at 96 dots per inch
GPT_ONLY = {key for key in TABLE if key.endswith(".norm_weight")}

# What a row of the card covers: every parameter of nGPT once, and all parameters of a row have the same line in TABLE.
ROWS = {
    "input and output embeddings": ("Embedding.weight", "Head.weight"),
    "q, k, v, o; MLP; Mamba out": (
        "Attention.q_proj", "Attention.k_proj", "Attention.v_proj", "Attention.o_proj", "Mamba2.out_proj",
        "MLP.up", "MLP.gate", "MLP.down",
    ),
    "Mamba in": ("Mamba2.in_proj",),
    "experts, routed and shared": ("Experts.up", "Experts.down", "Shared.up", "Shared.down"),
    "router": ("Router.weight",),
    r"\(\alpha_A, \alpha_M\)": ("Residual.alpha",),
    r"\(s_{qk}\)": ("Attention.s_qk",),
    r"\(s_z\)": ("Head.s_z",),
    r"\(s_u, s_\mathrm{moe}\)": ("MLP.s_u", "Experts.s_u", "Shared.s_u", "MoE.s_moe"),
    r"Mamba: conv, \(A_\mathrm{log}\), \(D\), dt bias, \(s_\mathrm{mamba}\)": (
        "Mamba2.conv_weight", "Mamba2.conv_bias", "Mamba2.A_log", "Mamba2.D", "Mamba2.dt_bias", "Mamba2.s_mamba",
    ),
}  # fmt: skip

FORWARD = (
    ("All rows of all matrices", r"\|\mathbf w\|_2 = 1", "Norm after every update, of what the optimizer holds"),
    (
        "Residual step",
        r"\mathbf h \leftarrow \mathrm{Norm}\bigl(\mathbf h + \alpha \odot "
        r"(\mathrm{Norm}(\mathrm{block}(\mathbf h)) - \mathbf h)\bigr)",
        r"instead of RMSNorm and addition; \(\alpha\) starts at 0.1",
    ),
    (
        "Attention",
        r"\mathbf q \leftarrow \mathrm{Norm}(\mathbf q) \odot \mathbf s_{qk}, \quad "
        r"\mathbf k \leftarrow \mathrm{Norm}(\mathbf k) \odot \mathbf s_{qk}",
        r"softmax scale \(\sqrt{d_k}\) instead of \(1/\sqrt{d_k}\); \(\mathbf s_{qk}\) starts at 1",
    ),
    ("MLP and experts", r"\mathbf u \leftarrow \mathbf u \odot \mathbf s_u", r"\(\mathbf s_u\) starts at 1"),
    (
        "Mamba-2, MoE",
        r"s_\mathrm{mamba}\,\mathbf h, \qquad s_\mathrm{moe}\,\mathbf h",
        r"scale the input; scalars; both start at \(0.5\sqrt{d_\mathrm{model}}\)",
    ),
    (
        "Logits",
        r"\mathbf z = \mathbf s_z \odot \mathbf u, \qquad \frac{\partial L}{\partial \mathbf u} \leftarrow "
        r"\frac{\mathbf s_z}{\mathrm{mean}(\mathbf s_z)} \odot \frac{\partial L}{\partial \mathbf z}",
        r"LGP, q = 1; \(\mathbf s_z\) starts at 1 and has its ordinary gradient",
    ),
)


def update(s: Settings) -> tuple[tuple[str, str, str], ...]:
    """One step of GatedAdamW for a row, in order."""
    return (
        (
            "Project",
            r"\mathbf g \leftarrow \mathbf g - "
            r"\mathbf w\,\langle \mathbf w, \mathbf g\rangle / \langle \mathbf w, \mathbf w\rangle",
            "unit rows",
        ),
        (
            "Clip growth",
            r"|g_i| \le \sqrt{\tfrac{R-\beta_2}{1-\beta_2}\,\bar v_i}",
            f"R = {s.smgc.R:g}, after {s.smgc.start} steps; every coordinate",
        ),
        (
            "Moments",
            r"\mathbf m, \mathbf v, \hat{\mathbf m}, \hat{\mathbf v}",
            rf"as Adam, \(\beta_1 = {s.betas[0]:g}, \beta_2 = {s.betas[1]:g}\)",
        ),
        (
            "Gate",
            r"\mathbf d = \sqrt{\hat{\mathbf v}} + \epsilon_\mathrm{num}, \quad "
            r"\gamma = \frac{\mathbf d^a}{\mathbf d^a + \epsilon_\mathrm{gate}^a}",
            rf"\(\epsilon_\mathrm{{num}} = {tex(s.eps_num)}, \epsilon_\mathrm{{gate}} = {tex(s.eps_gate)}\)",
        ),
        ("Step", r"\tilde{\mathbf w} = \mathbf w - \alpha_t\, \gamma \odot \hat{\mathbf m} / \mathbf d", "no weight decay"),
        (
            "Explore",
            r"\tilde w_i \leftarrow \tilde w_i \pm \alpha_t\, \lambda_\mathrm{noise} / \sqrt{d_j} \ "
            r"\text{ where } \sqrt{v_i} \le \tau_v",
            rf"\(\lambda_\mathrm{{noise}} = {s.pmen.strength:g}, \tau_v = {tex(s.pmen.tau)}\)",
        ),
        (
            "Cap",
            r"\angle(\mathbf w, \tilde{\mathbf w}) \le \theta_\mathrm{max}(t)",
            rf"from 0 to {s.cap_degrees:g}° over the first {s.warmup_share:.0%}, then constant",
        ),
        ("Return", r"\mathbf w \leftarrow \mathrm{Norm}(\tilde{\mathbf w})", "the retraction"),
    )


def tex(x: float) -> str:
    """A power of ten."""
    mantissa, exponent = f"{x:e}".split("e")
    if float(mantissa) != 1:
        raise ValueError(f"the card writes powers of ten; got {x:g}.")
    return f"10^{{{int(exponent)}}}"


def lines() -> list[tuple[str, Line]]:
    """The rows of the card with their lines of TABLE; ValueError if a parameter is missing, or two of a row differ."""
    placed = [key for keys in ROWS.values() for key in keys]
    if sorted(placed) != sorted(TABLE.keys() - GPT_ONLY):
        raise ValueError(
            f"card: each parameter of nGPT stands in one row; {sorted(set(placed) ^ (TABLE.keys() - GPT_ONLY))} does not."
        )
    found = []
    for words, keys in ROWS.items():
        same = {replace(TABLE[key], embedding="", decays=False) for key in keys}
        if len({(line.unit, line.cap, line.warmup, Settings().rates(ng.preset("pico"))[line.rate]) for line in same}) != 1:
            raise ValueError(f"card: the parameters of {words!r} are trained in different ways.")
        found.append((words, same.pop()))
    return found


def rate(line: Line, s: Settings) -> str:
    factors = {"global": 1.0, "embedding": s.embedding_multiplier, "expert": s.expert_multiplier, "router": s.router_multiplier}
    if line.rate not in factors:
        return f"{ {'s_z': s.s_z_lr, 'alpha': s.alpha_lr, 's_qk': s.s_qk_lr}[line.rate]:g}"
    factor = factors[line.rate]
    return rf"\({factor:g}\,C/\sqrt{{d_\mathrm{{model}}}}\)" if factor != 1 else r"\(C/\sqrt{d_\mathrm{model}}\)"


def table(s: Settings) -> str:
    names = ("parameters", "peak rate", "warmup", "gate\u00a0a", "sphere", "noise", "cap")
    head, rows = f"<tr>{''.join(f'<th>{name}</th>' for name in names)}</tr>", []
    for words, line in lines():
        a, noise = (s.a if line.unit else s.a_other), s.noise(line) is not None
        cells = (words, rate(line, s), f"{s.warmup_share:.0%}" if line.warmup else "", f"{a:g}", "yes" if line.unit else "")
        rows.append("".join(f"<td>{cell}</td>" for cell in (*cells, "yes" if noise else "", "yes" if line.cap else "")))
    return f"<table>{head}{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"


def ladder() -> str:
    configs = {name: ng.preset(name) for name in LADDER}
    head = "".join(f"<th>{name}</th>" for name in configs)
    C = "".join(f"<td>{config.C:g}</td>" for config in configs.values())
    lr = "".join(f"<td>{config.gpt_lr * 1e3:.1f}e-3</td>" for config in configs.values())
    return f"<table><tr><th></th>{head}</tr><tr><td>nGPT: C</td>{C}</tr><tr><td>GPT: peak rate</td>{lr}</tr></table>"


def decay(rho: float, width: int = 330, height: int = 96) -> str:
    """The schedule as a small drawing."""
    r = np.linspace(0, 1, 101)
    x, y = 8 + r * (width - 16), 8 + (1 - np.array([ng.log_decay(float(t), rho=rho) for t in r])) * (height - 26)
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))
    base = height - 18
    said = (
        f'<text x="{width - 6}" y="{height - 4}" text-anchor="end">r, from the first step to the last</text>'
        f'<text x="{width / 2}" y="20">η falls early, with a long tail</text>'
    )
    return (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}"><path d="M8 4V{base}H{width - 4}" fill="none" '
        f'stroke="#999"/><polyline points="{points}" fill="none" stroke="#2166f3" stroke-width="2.5"/>{said}</svg>'
    )


def _steps(rows: tuple[tuple[str, str, str], ...], kind: str) -> str:
    items = (f"<li><b>{a}</b><span>\\({b}\\)</span><i>{c}</i></li>" for a, b, c in rows)
    return f'<{kind} class="steps">{"".join(items)}</{kind}>'


def page(base: str = "_static") -> str:
    """The card as HTML; ``base`` is the folder of mathematics.css."""
    s, b = Settings(), Baseline()
    schedule = (
        rf"\(\eta(r) = 1 - \dfrac{{\log(1 + r/\rho)}}{{\log(1 + 1/\rho)}}\), \(\rho = {s.rho:g}\), from the first step, to zero"
    )
    gpt = (
        f"AdamW, betas {b.betas[0]:g} and {b.betas[1]:g}, eps {b.eps:g}, weight decay {b.weight_decay:g} on matrices "
        f"and embeddings; linear warmup over {b.warmup_tokens / 1e9:g}B tokens, then WSD to {b.eta_min:.0%} of the peak"
    )
    body = (
        "<header><h1>The nGPT training recipe</h1><p>Language models with every vector on a sphere, after <i>Training nGPT</i> "
        "(Loshchilov and Ginsburg)</p></header>"
        f'<section class="forward"><h2>The model</h2>{_steps(FORWARD, "ul")}'
        f"<h2>The schedule</h2><p>{schedule}; a warmup is one more factor.</p>{decay(s.rho)}"
        f"<h2>The baseline, GPT</h2><p>The same blocks with RMSNorm and a plain residual. {gpt}.</p>{ladder()}</section>"
        f'<section class="update"><h2>One update of a row: GatedAdamW</h2>{_steps(update(s), "ol")}'
        f"<h2>Which parameter, how</h2>{table(s)}</section>"
        "<footer>Numbers: the paper's, for models of 1B to 30B and their long runs; small models and short runs: "
        "<code>ng.recipe.scaled</code>. In code: <code>optimizer, schedule = ng.recipe.build(model, steps)</code></footer>"
    )
    drawn = re.sub(r"\\\((.+?)\\\)", lambda found: mathematics.render(found[1]), body)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>The nGPT training recipe</title><link rel="stylesheet" '
        f'href="{base}/mathematics.css"><style>{STYLE.read_text(encoding="utf-8")}</style><body>{drawn}</body></html>'
    )


def words() -> str:
    """What the card says, without its markup: what a test compares."""
    text = re.sub(r"<mjx-math.*?</mjx-math>", " ", page(), flags=re.DOTALL)  # MathML says it again, as text
    text = re.sub(r"<style>.*?</style>|<[^>]*>", " ", text, flags=re.DOTALL)
    return "\n".join(re.findall(r".{1,100}(?:\s|$)", " ".join(html.unescape(text).split()))) + "\n"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        static = Path(folder) / "_static"
        static.mkdir()
        mathematics.copy_files(static)
        source = Path(folder) / "card.html"
        source.write_text(page(), encoding="utf-8")
        try:
            chromium.pdf(source, Path(folder) / "card.pdf", seconds=120)
            chromium.png(source, Path(folder) / "card.png", *PIXELS, scale=2)
        except chromium.NotFound as error:
            sys.exit(f"card: {error}")
        for kind in ("pdf", "png"):
            shutil.copyfile(Path(folder) / f"card.{kind}", ASSETS / f"recipe_card.{kind}")
    (ASSETS / "recipe_card.txt").write_text(words(), encoding="utf-8")
    for path in sorted(ASSETS.glob("recipe_card.*")):
        print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
