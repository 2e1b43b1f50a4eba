"""What does every test share? One thread, one seed, nothing compiled yet, and a packed corpus."""

import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest
import torch
from runs import sentences

from ngpt_core.data.packing import pack
from ngpt_core.data.tokenizers import ByteTokenizer

torch.set_num_threads(1)
hypothesis.settings.register_profile("patient", deadline=None)  # a slow shared machine must not fail a test
hypothesis.settings.load_profile("patient")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()  # what earlier tests have compiled counts toward Dynamo's limit of recompilations


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A packed corpus of generated sentences, a tenth of them held out: the path of its folder."""
    folder = tmp_path_factory.mktemp("corpus") / "packed"
    pack(sentences(400), folder, ByteTokenizer(), val_fraction=0.1)
    return str(folder)
