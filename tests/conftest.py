"""What every test shares: one thread, one seed, and a helper that asserts closeness and says by how much it failed."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest
import torch

torch.set_num_threads(1)
hypothesis.settings.register_profile("patient", deadline=None)  # a shared machine is no reason to fail
hypothesis.settings.load_profile("patient")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
