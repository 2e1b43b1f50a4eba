"""Learning rate schedules as functions of progress, and the object that writes them into an optimizer (sections 2.2, 4.1)."""

import json
import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import log_decay as log_decay_twin
from reference import scheduled

import ngpt_core as ng
from ngpt_core.optim.schedule import SCHEDULES, Schedule, area, cosine, linear, log_decay, match_auc, warmup_before, wsd

R = np.linspace(0, 1, 101)


# ---- functions ---------------------------------------------------------------------------------------------------------
@given(st.floats(0, 1), st.floats(1e-4, 1e3), st.floats(0, 1), st.floats(1, 3))
@settings(max_examples=100, deadline=None)
def test_log_decay_is_the_papers_formula(r, rho, eta_min, eta_max):
    assert log_decay(r, rho, eta_max, eta_min) == pytest.approx(log_decay_twin(r, rho, eta_max, eta_min), abs=1e-10)


@pytest.mark.parametrize("schedule", [*SCHEDULES.values(), partial(log_decay, rho=1e-3), partial(log_decay, rho=math.inf)])
def test_every_schedule_falls_from_eta_max_to_eta_min(schedule):
    values = [schedule(r, eta_max=2.0, eta_min=0.25) for r in R]
    assert values[0] == 2.0 and values[-1] == 0.25
    assert values == sorted(values, reverse=True)
    assert schedule(0.0) == 1.0 and schedule(1.0) == 0.0 and isinstance(schedule(0.3), float)


def test_large_rho_approaches_linear_decay_without_losing_digits():
    line = linear(R)
    assert np.array_equal(log_decay(R, rho=math.inf), line)
    for rho in (1e2, 1e4, 1e8, 1e12, 1e300):  # the difference is r (1 - r) / (2 rho) to first order
        assert np.abs(log_decay(R, rho=rho) - line).max() <= 0.13 / rho + 1e-15
    assert log_decay(0.5, rho=1e-300) < 2e-3  # the other end: all of the fall at the start


def test_smaller_rho_spends_the_budget_earlier():
    """Figure 3: of schedules with the same area, the smaller rho starts higher and has a longer, lower tail."""
    scaled = [match_auc(partial(log_decay, rho=rho), cosine) for rho in (0.01, 0.05, 0.5, math.inf)]
    peaks = [s(0.0) for s in scaled]
    assert peaks == sorted(peaks, reverse=True) and peaks[0] > 2 and peaks[-1] == pytest.approx(1.0, abs=1e-9)
    early = [area(lambda r, s=s: s(r / 10)) / 10 for s in scaled]  # what is spent in the first tenth
    assert early == sorted(early, reverse=True)


def test_the_other_schedules_in_closed_form():
    assert [cosine(r) for r in (0, 0.25, 0.5)] == pytest.approx([1, (1 + math.sqrt(0.5)) / 2, 0.5])
    assert [linear(r, 1.0, 0.2) for r in (0, 0.5, 1)] == pytest.approx([1, 0.6, 0.2])
    assert [wsd(r, eta_min=0.01) for r in (0, 0.8, 0.9, 1)] == pytest.approx([1, 1, 0.505, 0.01])
    assert wsd(0.4, decay=0.75) == pytest.approx(0.8)
    assert wsd(0.4, decay=1) == linear(0.4)


@pytest.mark.parametrize("rho", [1e-4, 0.05, 1.0, 50.0])
def test_areas_are_exact_where_a_formula_exists(rho):
    L = math.log1p(1 / rho)
    assert area(partial(log_decay, rho=rho)) == pytest.approx(1 - ((1 + rho) * L - 1) / L, abs=1e-9)
    assert area(wsd) == pytest.approx(0.9, abs=1e-9)
    assert area(warmup_before(cosine, 0.1)) == pytest.approx(0.05 + 0.45, abs=1e-9)
    assert area(warmup_before(linear)) == pytest.approx(0.5, abs=1e-9) and warmup_before(linear)(0.05) == pytest.approx(0.5)
    assert area(lambda r: 1.0 if r < 1 / 3 else 0.0) == pytest.approx(1 / 3, abs=1e-9)  # even a jump


@pytest.mark.parametrize("rho", [1e-4, 0.05, 1.0])
def test_areas_of_schedules_with_noise_or_large_values_are_found_in_the_end(rho):
    def rough(r):
        return float(torch.cos(torch.tensor(1.5 * r, dtype=torch.float32)))

    assert area(rough) == pytest.approx(math.sin(1.5) / 1.5, rel=1e-8)
    assert area(partial(log_decay, rho=rho, eta_max=1e7)) == pytest.approx(1e7 * area(partial(log_decay, rho=rho)), rel=1e-12)


@pytest.mark.parametrize("teeth", [4, 16, 64, 100, 128])
def test_the_area_of_a_periodic_schedule_does_not_depend_on_where_its_period_falls(teeth):
    """Restarts: at multiples of 1/64 this is always 1."""
    assert area(lambda r: 0.5 * (1 + math.cos(math.pi * ((teeth * r) % 1)))) == pytest.approx(0.5, abs=1e-3)  # 10,000 intervals
    assert area(lambda r: 1 + math.cos(2 * math.pi * teeth * r)) == pytest.approx(1, abs=1e-9)


@given(st.floats(1e-3, 100), st.sampled_from(sorted(SCHEDULES)), st.floats(0, 0.5), st.floats(0, 0.5))
@settings(max_examples=25, deadline=None)
def test_matched_schedules_have_the_same_area_and_keep_their_shape(rho, name, eta_min, share):
    schedule = warmup_before(partial(log_decay, rho=rho), share)
    reference = warmup_before(partial(SCHEDULES[name], eta_min=eta_min), share)
    matched = match_auc(schedule, reference)
    grid = (np.arange(20000) + 0.5) / 20000
    assert np.mean(matched(grid)) == pytest.approx(np.mean(reference(grid)), rel=2e-4)  # midpoint rule: an independent area
    assert matched(0.7) / schedule(0.7) == pytest.approx(matched.scale)


@pytest.mark.parametrize("tiny", [1e-9, 1e-308, 5e-324])
@pytest.mark.parametrize("make", [lambda x: warmup_before(log_decay, x), lambda x: partial(wsd, decay=x)], ids=["up", "down"])
def test_shares_of_almost_nothing_overflow_nowhere(make, tiny):
    with np.errstate(all="raise", under="ignore"):
        eta = make(tiny)(R)
    assert np.isfinite(eta).all() and eta.min() >= 0 and eta.max() <= 1


def test_numbers_arrays_and_tensors_give_their_own_kind():
    for schedule in (log_decay, cosine, linear, wsd, warmup_before(wsd)):
        floats = [schedule(float(r)) for r in R]
        assert isinstance(schedule(R), np.ndarray) and schedule(R) == pytest.approx(floats, abs=1e-15)
        for dtype, tol in ((torch.float32, 1e-5), (torch.float64, 1e-15), (torch.bfloat16, 0.1), (torch.float16, 0.02)):
            out = schedule(torch.tensor(R, dtype=dtype))
            torch.testing.assert_close(out, torch.tensor(floats, dtype=dtype), rtol=0, atol=tol)
    assert isinstance(log_decay(np.float64(0.5)), float) and isinstance(log_decay(1), float)


def test_a_warmup_before_shifts_the_decay_behind_it():
    """Section 2.2 and figure 3: eta(t_warmup) = eta_max, eta(t_decay) = eta_min, r counted from t_warmup."""
    warmed = warmup_before(log_decay, 0.1)
    assert [warmed(r) for r in (0, 0.05, 0.1, 1)] == pytest.approx([0, 0.5, 1, 0])
    assert warmed(0.4) == pytest.approx(log_decay_twin((0.4 - 0.1) / 0.9, 0.05))
    assert warmup_before(log_decay, 0.0) is log_decay
    assert warmup_before("log", 0.1)(0.4) == warmed(0.4) and warmup_before("cosine", 0.0) is cosine


# ---- writing -----------------------------------------------------------------------------------------------------------
def optimizer(*groups, lr=0.5):
    groups = groups or ({},)
    return torch.optim.AdamW([{"params": [torch.ones(2, requires_grad=True)]} | dict(g) for g in groups], lr=lr)


def run(schedule, steps):
    """(lr, cap) of the first group as optimizer steps would find them."""
    seen = []
    for _ in range(steps):
        group = schedule.optimizer.param_groups[0]
        seen.append((float(group["lr"]), group.get("cap")))
        schedule.optimizer.step()
        schedule.step()
    return seen


@pytest.mark.parametrize("warmup, peak_cap", [(0.0, None), (0.1, None), (0.1, math.radians(1)), (0.0, math.radians(1))])
@pytest.mark.parametrize("T", [1, 7, 100])
def test_every_step_finds_the_rate_and_cap_of_the_equations(warmup, peak_cap, T):
    opt = optimizer({"warmup": warmup, "peak_cap": peak_cap})
    seen = run(Schedule(opt, T), T)
    for t, (lr, cap) in enumerate(seen, 1):
        lr_twin, cap_twin = scheduled(t, T, 0.5, 0.05, warmup, peak_cap)
        assert lr == pytest.approx(lr_twin, abs=1e-15)
        assert cap is None if peak_cap is None else cap == pytest.approx(cap_twin)
    assert seen[-1][0] == 0  # to zero at the last step


def test_lr_scale_multiplies_the_rate_of_its_group():
    groups = [{"params": [torch.zeros(1, requires_grad=True)], "lr_scale": scale} for scale in (0.5, 1.0)]
    half, whole = Schedule(torch.optim.AdamW(groups, lr=0.1), 10, linear).get_last_lr()
    assert half == 0.5 * whole == pytest.approx(0.045)


def test_groups_have_their_own_peaks_and_warmups_and_no_cap_appears_where_none_was():
    opt = optimizer({}, {"lr": 2.0, "warmup": 0.5}, {"peak_lr": 3.0, "peak_cap": 0.2})
    schedule = Schedule(opt, 10, "wsd")
    assert schedule.get_last_lr() == pytest.approx([0.5, 2.0 * 1 / 5, 3.0])
    assert ["cap" in g for g in opt.param_groups] == [False, False, True]
    for _ in range(4):
        schedule.step()
    assert schedule.get_last_lr() == pytest.approx([0.5, 2.0, 3.0]) and opt.param_groups[2]["cap"] == pytest.approx(0.2)
    assert Schedule(optimizer({"peak_cap": 0.0}), 10).at(5)[0][1] == 0.0  # a cap that lets no vector turn
    assert schedule.at(1) == [(0.5, None), (pytest.approx(0.4), None), (3.0, pytest.approx(0.2))]
    assert schedule.t == 5  # looking does not move it
    opt.add_param_group({"params": [torch.ones(1, requires_grad=True)], "lr": 7.0})
    schedule.step()
    assert schedule.get_last_lr()[-1] == pytest.approx(7.0)


def test_warmup_before_is_one_for_all_groups_and_the_decay_waits_for_it():
    opt = optimizer({}, {"warmup": 0.1})
    schedule = Schedule(opt, 100, warmup="before", warmup_share=0.2)
    for t in range(1, 101):
        expected = 0.5 * (t / 20 if t < 20 else log_decay_twin((t - 20) / 80, 0.05))
        assert schedule.get_last_lr() == pytest.approx([expected, expected], abs=1e-12)
        schedule.step()


def test_beyond_the_end_the_last_values_stay():
    schedule = Schedule(optimizer({"peak_cap": 1.0}), 5, partial(wsd, eta_min=0.01))
    seen = run(schedule, 9)
    assert seen[4:] == [(pytest.approx(0.005), 1.0)] * 5


def test_a_tensor_rate_is_written_in_place():
    opt = optimizer({"lr": torch.tensor(0.5), "cap": torch.tensor(9.0), "peak_cap": 1.0})
    group = opt.param_groups[0]
    lr, cap = group["lr"], group["cap"]
    schedule = Schedule(opt, 10, "linear")
    schedule.step()
    assert group["lr"] is lr and group["cap"] is cap
    assert float(lr) == pytest.approx(0.4) and float(cap) == 1.0


def test_one_tensor_rate_for_several_groups_becomes_one_for_each():
    opt = optimizer({"warmup": 0.0}, {"warmup": 0.5}, lr=torch.tensor(0.01))  # torch hands the default to every group
    schedule = Schedule(opt, 10)
    assert [float(g["lr"]) for g in opt.param_groups] == pytest.approx([lr for lr, _ in schedule.at(1)])
    held = [g["lr"] for g in opt.param_groups]
    schedule.step()
    assert all(g["lr"] is lr for g, lr in zip(opt.param_groups, held))  # and from then on they stay in place
    assert [float(lr) for lr in held] == pytest.approx([lr for lr, _ in schedule.at(2)])


def test_a_tensor_cap_without_a_peak_is_left_alone():
    cap = torch.tensor(0.25)
    group = {"params": [torch.ones(3, requires_grad=True)], "lr": torch.tensor(0.5), "cap": cap, "unit_dim": -1}
    opt = ng.GatedAdamW([group], lr=0.5, capturable=True)
    schedule = Schedule(opt, 10, "linear")
    schedule.step()
    assert opt.param_groups[0]["cap"] is cap and float(cap) == 0.25 and float(opt.param_groups[0]["lr"]) == pytest.approx(0.4)


@pytest.mark.parametrize("eta", [math.nan, math.inf, -0.5, None, "1", torch.ones(2), np.ones(2)], ids=str)
def test_a_multiplier_that_is_not_finite_is_never_written(eta):
    opt = optimizer()
    schedule = Schedule(opt, 10, lambda r: eta if r > 0.15 else 1.0)
    with pytest.raises(ValueError, match=r"eta must be a finite number >= 0; got .* at t=2 \(r = 0.2\)"):
        schedule.step()
    assert opt.param_groups[0]["lr"] == 0.5
    with pytest.raises(ValueError, match="at t=1 "):
        Schedule(opt, 10, lambda r: eta)


@pytest.mark.parametrize(
    "optimizer, steps", [(None, 10), ("adam", 10), ([], 10), (..., 10**400), (..., "10"), (..., 0)], ids=str
)
def test_what_is_no_optimizer_or_no_number_of_steps_is_refused(optimizer, steps):
    with pytest.raises(ValueError, match=r"takes an optimizer|total_steps is the number"):
        ng.Schedule(ng.GatedAdamW([torch.nn.Parameter(torch.ones(2))]) if optimizer is ... else optimizer, steps)


@pytest.mark.parametrize("kind", [np.float32, np.asarray, torch.tensor, int])
def test_a_multiplier_may_be_any_kind_of_one_number(kind):
    assert Schedule(optimizer(), 10, lambda r: kind(1.0)).get_last_lr() == [0.5]


@pytest.mark.parametrize("stop", [0, 3, 10])
def test_a_resumed_schedule_goes_on_as_if_nothing_had_happened(stop):
    kw = {"warmup": 0.3, "peak_cap": 0.1}
    whole = run(Schedule(optimizer(kw), 10), 10)
    first = Schedule(optimizer(kw), 10)
    run(first, stop)
    state = json.loads(json.dumps(first.state_dict()))  # plain data
    saved = first.optimizer.state_dict()
    again = Schedule(optimizer(kw), 10)
    again.optimizer.load_state_dict(saved)
    again.load_state_dict(state)
    assert again.t == stop + 1
    assert run(again, 10 - stop) == whole[stop:]


def test_making_a_schedule_on_a_loaded_optimizer_keeps_the_peaks():
    first = Schedule(optimizer(), 10)
    run(first, 6)
    fresh = optimizer(lr=123.0)
    fresh.load_state_dict(first.optimizer.state_dict())
    assert Schedule(fresh, 10).at(3) == first.at(3)


def test_another_length_is_refused_or_continues_without_a_jump():
    first = Schedule(optimizer(), 10, "linear")
    run(first, 4)  # the next step is t = 5
    for T in (8, 20):
        longer = Schedule(optimizer(), T, "linear")
        with pytest.raises(ValueError, match=f"10 steps and this schedule has {T}.*re_anchor=True"):
            longer.load_state_dict(first.state_dict())
        assert longer.t == 1
        longer.load_state_dict(first.state_dict(), re_anchor=True)
        rates = [lr for lr, _ in run(longer, T - 4)]
        assert rates == pytest.approx([0.5 * 0.6 * (1 - i / (T - 4)) for i in range(1, T - 3)])  # 0.6 is left after 4 of 10
        third = Schedule(optimizer(), T, "linear")  # and that state can be saved and loaded again
        third.load_state_dict(longer.state_dict())
        assert third.get_last_lr() == longer.get_last_lr()
    with pytest.raises(ValueError, match="completed 4 steps"):
        Schedule(optimizer(), 4, "linear").load_state_dict(first.state_dict(), re_anchor=True)
    run(first, 6)
    with pytest.raises(ValueError, match="nothing of it is left"):
        Schedule(optimizer(), 20, "linear").load_state_dict(first.state_dict(), re_anchor=True)


# ---- bad input ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: log_decay(0.5, rho=0.0), "rho must be > 0"),
        (lambda: log_decay(0.5, rho=-1), "rho must be > 0"),
        (lambda: log_decay(0.5, rho=math.nan), "rho must be > 0"),
        (lambda: log_decay(0.5, rho="0.05"), "rho must be > 0.*got '0.05'"),
        (lambda: log_decay(1.5), r"must be in \[0, 1\]; got 1.5"),
        (lambda: cosine(-0.1), r"must be in \[0, 1\]"),
        (lambda: log_decay("0.5"), r"must be in \[0, 1\]; got '0.5'"),
        (lambda: cosine("half"), r"must be in \[0, 1\]; got 'half'"),
        (lambda: linear([0.5]), r"must be in \[0, 1\]; got \[0.5\]"),
        (lambda: wsd(np.array(["0.5"])), r"must be in \[0, 1\]; got array"),
        (lambda: warmup_before(wsd)(None), r"must be in \[0, 1\]; got None"),
        (lambda: linear(math.nan), r"must be in \[0, 1\]"),
        (lambda: cosine(0.1, eta_max=0.1, eta_min=0.2), "eta_min <= eta_max"),
        (lambda: linear(0.1, eta_min=-1), "0 <= eta_min"),
        (lambda: log_decay(0.1, eta_max="1"), "eta_max='1'"),
        (lambda: wsd(0.1, decay="0.2"), r"in \(0, 1\]; got '0.2'"),
        (lambda: warmup_before(cosine, "0.1"), r"in \[0, 1\); got '0.1'"),
        (lambda: Schedule(optimizer(), None), "total_steps.*got None"),
        (lambda: Schedule(optimizer(), math.inf), "total_steps.*got inf"),
        (lambda: Schedule(optimizer(), math.nan), "total_steps.*got nan"),
        (lambda: Schedule(optimizer(), 5, 0.5), "log, cosine, linear, wsd; got 0.5"),
        (lambda: Schedule(optimizer({"warmup": "0.1"}), 5), "A group's warmup.*got '0.1'"),
        (lambda: wsd(0.1, decay=0), r"in \(0, 1\]"),
        (lambda: wsd(0.1, decay=1.01), r"in \(0, 1\]"),
        (lambda: warmup_before(wsd, 1.0), r"in \[0, 1\)"),
        (lambda: match_auc(lambda r: 0.0, cosine), "positive area"),
        (lambda: match_auc(cosine, lambda r: 0.0), "positive area"),
        (lambda: match_auc(lambda r: math.nan, cosine), "one finite number for each r .*got nan"),
        (lambda: match_auc("log", cosine), "A schedule is a function .*got 'log'"),
        (lambda: Schedule(optimizer(), 0), "total_steps"),
        (lambda: Schedule(optimizer(), 2.5), "total_steps"),
        (lambda: Schedule(optimizer(), 5, "exp"), "log, cosine, linear, wsd"),
        (lambda: Schedule(optimizer(), 5, warmup="first"), "'group'"),
        (lambda: Schedule(optimizer(), 5, cap_warmup=2), "cap_warmup"),
        (lambda: Schedule(optimizer({"warmup": 100}), 5), "A group's warmup"),
        (lambda: Schedule(optimizer({"peak_cap": "x"}), 5), "A group's peak_cap .*got 'x'"),
        (lambda: Schedule(optimizer({"peak_cap": -0.1}), 5), "A group's peak_cap .*got -0.1"),
        (lambda: Schedule(optimizer({"peak_lr": math.nan}), 5), "A group's peak_lr .*got nan"),
        (lambda: Schedule(optimizer(), 5, ["log"]), r"log, cosine, linear, wsd; got \['log'\]"),
        (lambda: warmup_before("exp"), "log, cosine, linear, wsd; got 'exp'"),
    ],
)
def test_a_mistake_is_a_value_error_that_states_the_rule(call, message):
    with pytest.raises(ValueError, match=message):
        call()
