"""Packed documents: where they begin and end, and attention over them without a mask."""

import warnings
from itertools import pairwise

import pytest
import torch
from cuda_twins import cuda_twins
from test_attention import make

from ngpt_core.nn import attention
from ngpt_core.nn.attention import Attention, document_mask
from ngpt_core.nn.documents import Packed, pack, segments
from ngpt_core.rehearsal import rehearse


def draw(B, T, share, seed):
    """Ids that never fall, with steps of several sizes."""
    g = torch.Generator().manual_seed(seed)
    return ((torch.rand(B, T, generator=g) < share) * torch.randint(1, 4, (B, T), generator=g)).cumsum(1)


@pytest.mark.parametrize("share", [0.0, 0.2, 1.0])
@pytest.mark.parametrize(("B", "T"), [(1, 1), (1, 7), (3, 40)])
def test_offsets_cut_the_flattened_batch_into_its_documents(B, T, share):
    documents = draw(B, T, share, B + T)
    with rehearse("cuda"):
        found = pack(documents)
    tokens = [(row, int(i)) for row in range(B) for i in documents[row]]
    cuts = [i for i in range(B * T) if i == 0 or tokens[i] != tokens[i - 1]] + [B * T]
    assert found.offsets.tolist() == cuts and found.offsets.dtype == torch.int32
    longest = max(b - a for a, b in pairwise(cuts))
    assert longest <= found.longest < 2 * longest and found.longest.bit_count() == 1
    assert torch.equal(found.ids, segments(documents)) and found.ids.dtype == torch.int32 and found.shape == (B, T)
    assert pack(found) is found and segments(found) is found.ids


def test_on_a_cpu_there_are_only_numbers():
    assert pack(draw(2, 9, 0.3, 0))[1:] == (None, 0)


def test_a_batch_without_rows_has_no_documents():
    with rehearse("cuda"):
        assert pack(torch.zeros(0, 5, dtype=torch.long)).offsets.tolist() == [0]


@pytest.mark.parametrize("theta", [None, 1e4])
@pytest.mark.parametrize("kv", [2, 6])
@pytest.mark.parametrize("normalized", [True, False])
def test_attention_without_a_mask_is_attention_with_it(monkeypatch, normalized, kv, theta):
    """In float64, which the kernel would not take: the layout, the offsets and the scale are exact."""
    module = make(normalized, n_kv_heads=kv, rope_theta=theta)
    h = torch.randn(2, 23, 24, dtype=torch.float64, requires_grad=True)
    documents, g = draw(2, 23, 0.2, 5), torch.randn(2, 23, 24, dtype=torch.float64)
    want = module(h, documents)
    monkeypatch.setattr(attention, "_takes_varlen", lambda *_: True)
    monkeypatch.setattr(attention, "document_mask", None)
    with cuda_twins():
        found = module(h, documents)
        torch.testing.assert_close(found, want)
        grads = torch.autograd.grad(found, [h, *module.parameters()], g)
    for one, two in zip(grads, torch.autograd.grad(want, [h, *module.parameters()], g)):
        torch.testing.assert_close(one, two)


def test_half_precision_takes_the_kernel_and_stays_close():
    module, documents = make().bfloat16(), draw(2, 23, 0.2, 5)
    h = torch.randn(2, 23, 24).bfloat16()
    with cuda_twins(), warnings.catch_warnings():
        warnings.simplefilter("error")
        found = module(h, documents)
    torch.testing.assert_close(found, module(h, documents), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "reason"),
    [(torch.float32, 8, "--precision bf16"), (torch.bfloat16, 264, "up to 256"), (torch.bfloat16, 12, "multiple of 8")],
)
def test_where_the_kernel_is_missing_the_mask_takes_over_with_one_warning(dtype, head_dim, reason):
    attention._warn.cache_clear()
    module = make(head_dim=head_dim).to(dtype)
    h, documents = torch.randn(2, 11, 24).to(dtype), draw(2, 11, 0.3, 1)
    want = module(h, documents)
    with rehearse("cuda"), pytest.warns(UserWarning, match="dense mask") as seen:
        for _ in range(3):
            assert torch.equal(module(h, documents), want)
    assert len(seen) == 1 and reason in str(seen[0].message)
    attention._warn.cache_clear()


def test_a_layer_takes_ids_and_packed_documents_alike():
    module, h, documents = make(), torch.randn(2, 9, 24, dtype=torch.float64), draw(2, 9, 0.3, 2)
    assert isinstance(module, Attention) and isinstance(pack(documents), Packed)
    assert torch.equal(module(h, pack(documents)), module(h, documents))
    assert torch.equal(document_mask(pack(documents).ids), document_mask(documents))
