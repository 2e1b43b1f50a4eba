"""Does the selftest pass here, and does it notice a fast path that is wrong?"""

from functools import partial

import pytest
import torch
from cuda_twins import cuda_twins

from ngpt_core.cli import main
from ngpt_core.nn import attention
from ngpt_core.optim.pmen import PMEN
from ngpt_core.tools import selftest


def test_every_fast_path_agrees_with_its_twin_here(capsys):
    assert main(["selftest"]) == 0
    table = capsys.readouterr().out
    assert table.count(" ok") >= 4 and "WRONG" not in table


@pytest.mark.parametrize("wrong", [lambda y: y * 1.001, lambda y: y * torch.nan], ids=["off", "nan"])
def test_a_wrong_fast_path_is_noticed(wrong, monkeypatch, capsys):
    right = selftest.ssd_chunked
    monkeypatch.setattr(selftest, "ssd_chunked", lambda *t: (wrong(right(*t)[0]), right(*t)[1]))
    assert selftest.main("cpu") == 1
    table = capsys.readouterr().out
    assert table.count("WRONG") == 1 and "recurrence" in next(line for line in table.splitlines() if "WRONG" in line)


def test_a_leak_between_documents_is_noticed(monkeypatch):
    right = selftest.ssd_chunked
    monkeypatch.setattr(selftest, "ssd_chunked", lambda *t: right(*t[:-1]))
    assert [row.name for row in selftest.run() if not row.passed] == ["scan: chunked / recurrence"]


def test_other_wrong_fast_paths_are_noticed(monkeypatch):
    """A gradient that only the tokens feel, coordinates, weight decay, the other profile of the noise, packed documents."""
    from ngpt_core.nn import moe
    from ngpt_core.optim import fused

    def wrong() -> list[str]:
        return [row.name for row in selftest.run() if not row.passed]

    dispatch, experts, step, conv = moe.dispatch, moe.rows_cpu.experts, fused.fused_step, selftest.causal_conv

    def thrice(x: torch.Tensor) -> torch.Tensor:  # its value, three times its gradient
        return x.detach() + 3 * (x - x.detach())

    with monkeypatch.context() as patch:
        patch.setattr(moe, "dispatch", lambda x, *rest: dispatch(thrice(x), *rest))
        patch.setattr(moe.rows_cpu, "experts", lambda x, *rest: experts(thrice(x), *rest))
        assert wrong() == ["experts: sorted products / loop"]
    with monkeypatch.context() as patch:
        patch.setattr(moe.rows_cpu, "experts", lambda x, *rest: experts(thrice(x), *rest))
        found = [row.name for row in selftest._operators(torch.device("cpu")) if not row.passed]
        assert found == ["nGPT, MoE: C++ / plain torch", "GPT, MoE: C++ / plain torch"]
    for change in (
        lambda rule: rule if rule.dim is not None else rule._replace(lr=3 * rule.lr),
        lambda rule: rule._replace(decay=0.0),
        lambda rule: rule._replace(maximize=False),
        lambda rule: rule._replace(pmen=rule.pmen and PMEN()),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(fused, "fused_step", lambda slots, rule, mask, change=change: step(slots, change(rule), mask))
            assert wrong() == ["optimizer: fused step / plain step"]
    with monkeypatch.context() as patch:
        patch.setattr(selftest, "causal_conv", lambda x, w, bias, *packed: conv(x, w, bias))
        assert wrong() == ["convolution: packed / one by one"]


def test_the_rows_of_a_gpu_compare_what_they_say(monkeypatch):
    """With the kernels' twins in place of the kernels, and a compiler that generates no code."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager", fullgraph=True))
    device = torch.device("cpu")

    def once(name, fast, slow, tolerance, *_):
        return selftest.Row(name, selftest._error(fast(), slow()), tolerance, 1.0)

    monkeypatch.setattr(selftest, "_compare", once)
    with cuda_twins():
        rows = [selftest._attention(device), *selftest._blocks(device)]
        assert len(rows) == 5 and all(row.passed for row in rows), selftest.format_rows(rows)
        monkeypatch.setattr(attention, "document_mask", lambda ids: torch.ones(512, 512, dtype=torch.bool).tril())
        assert not selftest._attention(device).passed  # a leak between documents
    row = selftest._loss(device, torch.bfloat16)
    assert row.passed and row.error > 1e-4


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_device_that_is_not_there_is_named(capsys):
    assert main(["selftest", "--device", "cuda"]) == 1
    assert "finds no CUDA device" in capsys.readouterr().err
    with pytest.raises(ValueError, match="cpu or cuda"):
        selftest.run("tpu")
