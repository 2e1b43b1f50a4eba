"""Does the selftest pass here, and does it notice a fast path that is wrong?"""

import pytest
import torch

from ngpt_core import selftest
from ngpt_core.cli import main


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_device_that_is_not_there_is_named(capsys):
    assert main(["selftest", "--device", "cuda"]) == 1
    assert "sees no CUDA device" in capsys.readouterr().err
    with pytest.raises(ValueError, match="cpu or cuda"):
        selftest.run("tpu")
