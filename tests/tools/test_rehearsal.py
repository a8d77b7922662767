"""Rehearsals: outcomes are simulated from the model, and what is reported is what happened."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.handlers import condition

import numpyro_dp.tools.rehearsal
from numpyro_dp import DPHMC, DPPenalty, Preparation, PrivacyBudget, rehearse
from numpyro_dp.tools.rehearsal import _simulated

N = 2000


def logistic(X, y=None):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ b), obs=y)


def hierarchical(group, score=None, num_groups=3):
    scale = numpyro.sample("scale", dist.HalfNormal(1))
    with numpyro.plate("groups", num_groups):
        effect = numpyro.sample("effect", dist.Normal(0, scale))
    with numpyro.plate("rows", group.shape[0]):
        numpyro.sample("obs", dist.Normal(effect[group], 1), obs=score)


def on_log_scale(x, y):
    b = numpyro.sample("b", dist.Normal(0, 1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("log_y", dist.Normal(b * x, 1), obs=jnp.log(y))


X = np.random.default_rng(0).uniform(-1, 1, (N, 2)).astype(np.float32)
GROUP = np.arange(N) % 3


def simulated(model, args, kwargs=None, truth=None, outcomes=None, seed=0):
    return _simulated(DPPenalty(model, eps=1.0), jax.random.key(seed), args, kwargs or {}, truth or {}, outcomes)


def test_outcomes_are_those_of_the_model_at_the_truth():
    truth = {"b": np.array([2.0, -1.0])}
    (covariates, y), _, values = simulated(logistic, (X, None), truth=truth)
    assert covariates is X
    assert np.array_equal(values["b"], truth["b"])
    p = 1 / (1 + np.exp(-X @ truth["b"]))
    assert abs(y.mean() - p.mean()) < 5 * np.sqrt(np.mean(p * (1 - p)) / N)
    assert abs(np.mean(y * X[:, 0]) - np.mean(p * X[:, 0])) < 5 * np.sqrt(np.mean(p * (1 - p) * X[:, 0] ** 2) / N)


def test_a_parameter_that_is_fixed_is_not_drawn():
    def normal(x, y):
        b, sigma = numpyro.sample("b", dist.Normal(0, 1)), numpyro.sample("sigma", dist.HalfNormal(100))
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("y", dist.Normal(b * x, sigma), obs=y)

    fixed = condition(normal, {"sigma": 1e-3})
    (x, y), _, values = simulated(fixed, (X[:, 0], np.zeros(N, np.float32)))
    np.testing.assert_allclose(y, values["b"] * x, atol=0.01)


def test_outcomes_are_not_cut_to_the_type_of_a_placeholder():
    place = np.zeros(N, int)
    with pytest.raises(ValueError, match="'score' was given as int64, and the model draws outcomes that are none"):
        simulated(hierarchical, (GROUP, place), outcomes={"score": "obs"})
    (_, scores), _, _ = simulated(hierarchical, (GROUP, place.astype(np.float32)), outcomes={"score": "obs"})
    assert len(np.unique(scores)) == N
    (_, y), _, _ = simulated(logistic, (X, np.zeros(N, bool)))
    assert y.dtype == bool


def test_truths_differ_from_table_to_table_and_outcomes_follow_them():
    values = [simulated(logistic, (X, None), seed=seed) for seed in range(2)]
    assert not np.array_equal(values[0][2]["b"], values[1][2]["b"])
    assert not np.array_equal(values[0][0][1], values[1][0][1])


def test_outcomes_are_found_by_name_by_value_or_as_told():
    score = np.arange(N, dtype=np.float32)
    for args, kwargs, outcomes in (
        ((GROUP, score), {}, None),
        ((GROUP,), {"score": score}, None),
        ((GROUP, None), {}, {"score": "obs"}),
    ):
        args, kwargs, values = simulated(hierarchical, args, kwargs, outcomes=outcomes)
        found = {**dict(zip(("group", "score"), args, strict=False)), **kwargs}["score"]
        assert np.array_equal(found, values["obs"])
    whole = np.zeros(N, np.int64)
    (_, y), _, _ = simulated(logistic, (X, whole))
    assert y.dtype == whole.dtype
    assert y.sum() > 0


@pytest.mark.parametrize(
    ("model", "args", "options", "message"),
    [
        (hierarchical, (GROUP, None), {}, "not clear which outcomes to simulate: 'score'"),
        (on_log_scale, (X[:, 0], np.ones(N)), {}, "not clear which argument of the model holds the values of site 'lo"),
        (logistic, (X, None), {"truth": {"c": 1.0}}, "`truth` has c, which the model has no site of: it has b"),
        (logistic, (X, None), {"outcomes": {"z": "y"}}, "no such argument, or no such site"),
    ],
)
def test_unclear_outcomes_are_refused(model, args, options, message):
    with pytest.raises(ValueError, match=message):
        simulated(model, args, **options)


def test_a_rehearsal_charges_nothing_and_needs_new_kernels(tmp_path):
    with pytest.warns(UserWarning, match="a new privacy budget was made"):
        budget = PrivacyBudget(tmp_path / "budget", eps=1.0, delta=1e-3, witness=False)
    run = {"repetitions": 2, "progress_bar": False, "num_warmup": 5, "num_samples": 5, "compare": False}
    with pytest.raises(ValueError, match="spends no budget: leave `budget` out"):
        rehearse(lambda: DPPenalty(logistic, eps=1.0, budget=budget), (X, None), **run)
    assert not budget.charges
    with pytest.raises(TypeError, match="must return a private kernel"):
        rehearse(lambda: logistic, (X, None), **run)
    kernel = DPPenalty(logistic, eps=50.0, prepare=False, clip_ratio=2.0)
    with pytest.raises(ValueError, match=r"the kernel is tempered .*: compare=False"):
        rehearse(lambda: DPPenalty(logistic, eps=1.0, power=0.1), (X, None), **(run | {"compare": True}))
    with pytest.raises(ValueError, match="must make a new kernel each time"):
        rehearse(lambda: kernel, (X, None), **run)
    with pytest.raises(ValueError, match="`truth` is for simulated outcomes"):
        rehearse(lambda: kernel, (X, None), simulate=False, truth={"b": 0}, **run)
    with pytest.raises(TypeError, match="the tuple or the dict"):
        rehearse(lambda: kernel, X, **run)


@pytest.mark.nightly
def test_a_rehearsal_compares_with_the_truth_and_with_nuts(tmp_path):
    def make():
        return DPHMC(logistic, eps=3.0, prepare=Preparation(mode="surrogate", force=True))

    found = rehearse(make, (X, None), repetitions=2, num_warmup=200, num_samples=300, progress_bar=False)
    assert found.names == ("b[0]", "b[1]")
    for column in (found.truth, found.mean, found.sd, found.rank, found.exact_mean, found.exact_sd):
        assert column.shape == (2, 2)
        assert np.isfinite(column).all()
    assert not np.array_equal(found.truth[0], found.truth[1])
    # Without privacy, 5 sds and their Monte Carlo error.
    assert (np.abs(found.exact_mean - found.truth) < 5.5 * found.exact_sd).all()
    assert (np.abs(found.mean - found.truth) < 6 * found.sd).all()
    assert np.array_equal(found.error, (found.mean - found.exact_mean) / found.exact_sd)
    text = str(found)
    assert "DPHMC at eps 3, n = 2,000: 2 simulated table(s)" in text
    assert "b[1]" in text
    left, _ = found.plot()
    assert "too few to judge coverage by" in left.get_title(loc="left")
    left.figure.savefig(tmp_path / "rehearsal.png")


def test_a_public_table_is_taken_as_it_is(monkeypatch):
    y = (np.arange(N) % 2).astype(np.int32)
    seen = []
    run = numpyro_dp.tools.rehearsal.MCMC.run
    monkeypatch.setattr(
        numpyro_dp.tools.rehearsal.MCMC,
        "run",
        lambda self, key, *args, **kw: (seen.append(args), run(self, key, *args, **kw)),
    )
    options = {"num_warmup": 5, "num_samples": 5, "compare": False, "progress_bar": False}
    found = rehearse(
        lambda: DPPenalty(logistic, eps=50.0, prepare=False, clip_ratio=2.0),
        (X, y),
        repetitions=1,
        simulate=False,
        **options,
    )
    assert seen[0][0] is X
    assert seen[0][1] is y
    assert np.isnan(found.truth).all()
    assert np.isnan(found.coverage()).all()
    assert np.isnan(found.error).all()
    assert "-" in str(found)
    found.plot()


def test_ranks_count_the_draws_below_the_truth():
    truth, draws = jnp.array([0.0, 1.0]), jnp.stack([jnp.linspace(-1, 1, 100), jnp.linspace(0.5, 0.9, 100)], -1)

    class Run:
        def get_samples(self):
            return {"b": draws}

    record = numpyro_dp.tools.rehearsal._record(Run(), {}, {"b": truth})
    assert record["rank"] == {"b[0]": 0.5, "b[1]": 1.0}
