"""Generation: the same with and without the cache, sampling as expected, stop tokens, streaming, limits."""

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ngpt_core as ng
from ngpt_core.nn.generate import probabilities

BOTH = pytest.mark.parametrize("normalized", [True, False], ids=["nGPT", "GPT"])


def make(normalized=True, **change):
    return ng.LanguageModel(ng.preset("pico", normalized, **dict(pattern="ME*-M", ff=64, chunk=8) | change))


def prompt(batch=2, length=7):
    return torch.randint(0, 256, (batch, length))


@BOTH
@pytest.mark.parametrize("parts", [(20, 1, 1, 1, 1), (5, 9, 1, 9), (1,) * 24])
def test_cached_logits_are_the_uncached_ones(normalized, parts):
    model, x = make(normalized), prompt(3, 24)
    cache = model.new_cache(3, 24)
    with torch.no_grad():
        got = torch.cat([model(part, cache=cache) for part in x.split(parts, 1)], 1)
        torch.testing.assert_close(got, model(x), atol=1e-5, rtol=0)
    assert cache.length == 24


@BOTH
def test_greedy_decoding_is_the_same_with_and_without_cache_and_rope(normalized):
    for change in ({}, dict(pattern="*-*-", rope_theta=1e4)):
        model, x = make(normalized, **change), prompt()
        with_cache = model.generate(x, 30, temperature=0.0)
        assert with_cache.shape == (2, 37) and (with_cache[:, :7] == x).all()
        assert (with_cache == model.generate(x, 30, temperature=0.0, use_cache=False)).all()
        assert (with_cache[:, 7] == model(x)[:, -1].argmax(-1)).all()


def test_sampling_is_reproducible_and_the_same_with_and_without_cache():
    model, x = make(), prompt()
    a, b = (model.generate(x, 20, generator=torch.Generator().manual_seed(5), use_cache=c) for c in (True, False))
    assert (a == b).all()
    assert (a != model.generate(x, 20, generator=torch.Generator().manual_seed(6))).any()


def test_a_batch_is_generated_as_its_rows_alone():
    model, x = make(), prompt(3)
    whole = model.generate(x, 15, temperature=0.0)
    assert (whole == torch.cat([model.generate(row[None], 15, temperature=0.0) for row in x])).all()


def test_temperature_divides_the_logits_of_the_loss_with_s_z_in_them():
    model, x = make(), prompt(1)
    with torch.no_grad():
        model.head.s_z.weight.fill_(20.0)
        p = model(x)[:, -1].softmax(-1)
    draws = torch.cat([t for _ in range(10) for t in model.stream(x.expand(300, -1), 1)])
    best = p[0].argmax()
    assert abs((draws == best).float().mean() - p[0, best]) < 0.05
    torch.testing.assert_close(probabilities(model(x)[:, -1].detach()), p)


@settings(deadline=None)
@given(st.integers(0, 99), st.floats(0.5, 3.0), st.integers(1, 12), st.floats(0.01, 1.0))
def test_the_filters_keep_what_they_say(seed, temperature, k, top_p):
    logits = torch.randn(2, 10, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3
    p = (logits / temperature).softmax(-1)
    top = probabilities(logits, temperature, top_k=k)
    assert ((top > 0).sum(-1) == min(k, 10)).all()
    torch.testing.assert_close(top.sum(-1), torch.ones(2, dtype=torch.float64))
    nucleus = probabilities(logits, temperature, top_p=top_p)
    for row, q in zip(p, nucleus):
        ordered, index = row.sort(descending=True)
        kept = (q > 0).sum()
        assert (q[index[:kept]] > 0).all()  # the likeliest,
        assert ordered[:kept].sum() >= top_p - 1e-9 and ordered[: kept - 1].sum() < top_p + 1e-9  # and no more than needed
        torch.testing.assert_close(q[q > 0] * row[q > 0].sum(), row[q > 0])


def test_zero_temperature_and_top_1_are_greedy():
    logits = torch.randn(4, 10)
    one_hot = torch.nn.functional.one_hot(logits.argmax(-1), 10).float()
    torch.testing.assert_close(probabilities(logits, 0.0), one_hot)
    torch.testing.assert_close(probabilities(logits, 1.0, top_k=1), one_hot)
    torch.testing.assert_close(probabilities(logits, 1.0, top_p=1e-6), one_hot)


def test_a_stopped_row_repeats_its_stop_token_and_all_stopped_ends_early():
    model, x = make(), prompt()
    free = model.generate(x, 12, temperature=0.0)[:, 7:]
    stop = int(free[0, 2])
    out = model.generate(x, 12, temperature=0.0, stop=stop)[:, 7:]
    first = free[0].tolist().index(stop)
    assert (out[0, : first + 1] == free[0, : first + 1]).all() and (out[0, first:] == stop).all()
    both = model.generate(x, 12, temperature=0.0, stop=free[:, 0].tolist())
    assert both.shape == (2, 8)


def test_streaming_yields_the_same_tokens_one_step_at_a_time():
    model, x = make(), prompt()
    stream = model.stream(x, 5, temperature=0.0)
    first = next(stream)
    assert first.shape == (2,)
    rest = list(stream)
    assert (torch.stack([first, *rest], 1) == model.generate(x, 5, temperature=0.0)[:, 7:]).all()
    assert not first.requires_grad and torch.is_grad_enabled()


def test_it_generates_under_autocast():
    model, x = make(), prompt()
    with torch.autocast("cpu", torch.bfloat16):
        assert model.generate(x, 3).shape == (2, 10)


def test_nothing_new_is_the_prompt_and_no_row_has_the_length_of_the_others():
    model, x = make(), prompt()
    assert (model.generate(x, 0) == x).all()
    assert model.generate(x[:0], 3).shape == (0, x.shape[1] + 3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(max_new_tokens=-1), "max_new_tokens"),
        (dict(temperature=-0.5), "temperature"),
        (dict(temperature=float("nan")), "temperature"),
        (dict(top_k=0), "top_k"),
        (dict(top_k=2.5), "top_k"),
        (dict(max_new_tokens=2.5), "max_new_tokens"),
        (dict(max_new_tokens=1e29), r"max_new_tokens .* below 2\^63"),
        (dict(top_p=0.0), "top_p"),
        (dict(top_p=1.5), "top_p"),
        (dict(stop="ab"), "stop must be a token"),
        (dict(generator=5), "generator must be a torch.Generator"),
        (dict(use_cache="no"), "use_cache must be True or False"),
        (dict(stop=[1, None]), "stop must be a token"),
        (dict(stop=2.5), "stop must be a token"),
        (dict(stop=256), r"stop must be a token in \[0, 256\)"),
        (dict(tokens=torch.zeros(7, dtype=torch.long)), r"\[batch, time\].*got \(7,\)"),
        (dict(tokens=[[1, 2]]), "tokens must be a tensor .*got list"),
        (dict(max_new_tokens=30), r"7 \+ 30 new tokens exceed max_seq_len = 32"),
    ],
)
def test_bad_settings_are_errors_that_name_them(options, words):
    with pytest.raises(ValueError, match=words):
        make(max_seq_len=32).generate(**dict(tokens=prompt(), max_new_tokens=3) | options)


@pytest.mark.parametrize("count", [2**50, 2**62])
def test_a_cache_larger_than_memory_is_a_sentence(count):
    with pytest.raises(ValueError, match="new tokens does not fit into memory: ask for fewer"):
        make().generate(prompt(), count)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_an_error_whether_greedy_or_not(temperature, bad):
    model = make()
    with torch.no_grad():
        model.head.weight[3, 0] = bad
    with pytest.raises(ValueError, match=r"logits of the next token are not finite; model\.check\(\)"):
        model.generate(prompt(), 3, temperature=temperature)


@pytest.mark.parametrize("stop", [np.int64(3), torch.tensor(3), [3], np.array([3]), 3.0])
def test_numbers_of_any_kind_are_accepted(stop):
    model, x = make(), prompt()
    free = model.generate(x, 9, temperature=0.0)
    assert torch.equal(model.generate(x, np.int64(9), temperature=torch.tensor(0.0), stop=None), free)
    assert torch.equal(model.generate(x, 9.0, 0.0, top_k=5.0), free)
    assert torch.equal(model.generate(x, 9, 0.0, stop=stop), model.generate(x, 9, 0.0, stop=3))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int32])
@pytest.mark.parametrize("use_cache", [True, False])
def test_a_prompt_of_bytes_is_continued(dtype, use_cache):
    model, x = make(), prompt()
    out = model.generate(x.to(dtype), 4, temperature=0.0, use_cache=use_cache)
    assert out.dtype == torch.long and torch.equal(out, model.generate(x, 4, temperature=0.0))


@pytest.mark.parametrize("temperature", [1e-30, 1e-40, 1e-60, 5e-324])
def test_the_smallest_temperatures_are_greedy(temperature):
    logits = 30 * torch.randn(4, 10)
    assert torch.equal(probabilities(logits, temperature), probabilities(logits, 0.0))
    assert torch.equal(probabilities(logits, temperature, top_k=3, top_p=0.5), probabilities(logits, 0.0))


def test_a_sequence_longer_than_the_cache_is_an_error_before_any_state_changes():
    model, x = make(), prompt(2, 9)
    cache = model.new_cache(2, 12)
    with torch.no_grad():
        model(x, cache=cache)
        before = copy.deepcopy([vars(c) for c in cache.blocks if c is not None])
        with pytest.raises(ValueError, match=r"18 tokens do not fit a cache of 12.*max_len >= 18"):
            model(x, cache=cache)
        with pytest.raises(ValueError, match="batch of 2; got 1"):
            model(x[:1, :1], cache=cache)
        with pytest.raises(ValueError, match="documents and cache cannot be combined"):
            model(x[:, :1], torch.zeros(2, 1, dtype=torch.long), cache)
    assert cache.length == 9 and len(before) == 3  # two Mamba layers and one of attention
    for was, now in zip(before, (vars(c) for c in cache.blocks if c is not None)):
        for key, value in was.items():
            if isinstance(value, torch.Tensor):  # places that are not filled yet hold anything, nan too
                torch.testing.assert_close(value, now[key], rtol=0, atol=0, equal_nan=True)
            else:
                assert value == now[key]


def test_a_top_p_below_the_smallest_float_keeps_the_most_likely_token():
    p = probabilities(torch.tensor([[1.0, 2.0, 0.5]]), 1.0, None, 1e-46)
    assert p.tolist() == [[0.0, 1.0, 0.0]]
