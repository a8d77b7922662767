"""`find_cut`: the rows see the parameters through phi alone, which is small, unconstrained and near to the data."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from helpers.tiers import single_every_day, some_every_day
from helpers.zoo import BY_NAME, CASES, COORDINATES

import numpyro_dp.model.separable
from numpyro_dp.model import coordinates as cut_module
from numpyro_dp.model.coordinates import find_cut
from numpyro_dp.model.separate import separate

N, GROUPS = 7, 8
_rng = np.random.default_rng(3)
X, y, bits, group = _rng.normal(size=(N, 3)), _rng.normal(size=N), _rng.integers(0, 2, N), np.arange(N) % GROUPS


def _separate(model, args, kwargs=None, **options):
    """What is compared on synthetic rows is tested elsewhere, and takes a second per model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numpyro_dp.model.separate, "check_on_synthetic_rows", lambda *_: ([], {}))
        return separate(model, args, kwargs or {}, **options)


def _without_values(separated, args, kwargs):
    """The arguments with shapes in the place of private values."""
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in separated.private_arguments()]
    leaves, treedef = jax.tree.flatten((args, kwargs))
    supply = iter(shapes)
    kept = [next(supply) if a.private else leaf for leaf, a in zip(leaves, separated.arguments, strict=True)]
    return jax.tree.unflatten(treedef, kept)


def _find(model, args, kwargs=None, **options):
    separated = _separate(model, args, kwargs, **options)
    return separated, find_cut(separated, *_without_values(separated, args, kwargs or {}))


def _points(separated, count=3):
    rng = np.random.default_rng(2)
    return rng.uniform(-1, 1, (count, separated.num_params)).astype(separated.ravel(separated.prototype).dtype)


def _one_row(separated, args, kwargs, i=0):
    return tuple(r[i : i + 1] for r in separated.rows(args, kwargs))


def _assert_same_density(separated, cut, args, kwargs=None):
    kwargs = kwargs or {}
    density = separated.row_log_density(args, kwargs)

    @jax.jit
    def both(z, rows):
        def total(density, at):
            terms = jax.vmap(lambda row: density(at, row))(rows)
            return jnp.sum(terms), terms

        direct = jax.value_and_grad(lambda z: total(density, z), has_aux=True)(z)
        return direct, jax.value_and_grad(lambda z: total(cut.row_log_density, cut.coordinates(z)), has_aux=True)(z)

    rows = tuple(r[:, None] for r in separated.rows(args, kwargs))
    for z in _points(separated):
        assert cut.coordinates(z).shape == (cut.size,)
        ((_, expected), expected_grad), ((_, terms), grad) = both(z, rows)
        assert terms.dtype == expected.dtype
        assert np.all(np.isfinite(expected))
        tolerance = 50 * jnp.finfo(terms.dtype).eps * (10 + np.max(np.abs(expected)))
        np.testing.assert_allclose(terms, expected, rtol=0, atol=tolerance)
        np.testing.assert_allclose(grad, expected_grad, rtol=0, atol=20 * N * tolerance)


# -- All models --------------------------------------------------------------------------------------------------------

_SMALLER = {
    "hierarchical": 7,
    "non_centred": 7,
    "horseshoe": 3,
    "crossed_effects": 7,
    "varying_slopes": 8,
    "transform_reparam": 1,
    "explicit_reparam": 1,
    "narrow_dtypes": 7,
    "latent_class_by_group": 7,
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=c.name, marks=() if c.name in COORDINATES else pytest.mark.nightly) for c in CASES],
)
def test_the_density_is_that_of_the_model(case, x64):
    separated, cut = _find(case.model, case.args, case.kwargs, **case.options)
    assert cut.size == _SMALLER.get(case.name, separated.num_params)
    assert len(set(cut.names)) == len(cut.names) == cut.size
    if cut.trivial:
        assert cut.size == separated.num_params
        (z,) = _points(separated, 1)
        assert cut.coordinates(z) is z  # and the density is the one that `separated` has
    else:
        _assert_same_density(separated, cut, case.args, case.kwargs)


# What is seen of an outcome that is masked row by row is no draw of its law, a loss has none, a 1 that stands for "not
# seen before its time" is not drawn, a series is not drawn beside its observed past, and some laws are not known well.
# Of a density that is scaled, draws have another information than it says (test_scaled_likelihoods); their score is 0.
_NOT_DRAWN = {
    "row_factor",
    "item_response",
    "censored_by_masks",
    "censored_by_factor",
    "latent_zeros",
    "latent_size",
    "short_series",
    "shared_random_walk",
    "weighted_membership",
    "missing_covariate",
}
_DRAWS = 4000


def _assert_expected_score_is_0(cut, phi, rows):
    """Over all outcomes, each with its probability."""

    def expected(row):
        words = jnp.stack([jnp.arange(cut.num_outcomes, dtype=jnp.uint32)] * 2, 1)
        values, scores = jax.vmap(lambda k: jax.value_and_grad(cut.drawn_log_density)(phi, row, k))(words)
        chances = jax.nn.softmax(values)
        return chances @ scores, jnp.max(jnp.abs(scores))

    mean, largest = jax.vmap(expected)(rows)
    assert np.all(np.abs(mean) <= 1e-9 * largest.max())
    assert np.all(largest > 0)


@pytest.mark.nightly
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_are_drawn_from_the_model(case, x64):
    """The expectation of the score is 0: of all laws that outcomes may have, at the model's own only.

    In double precision: in single, the draws of a beta law may be 1.
    """
    args, kwargs = case.args, case.kwargs
    separated, cut = _find(case.model, args, kwargs, **case.options)
    assert (cut.drawn_log_density is None) == (case.name in _NOT_DRAWN)
    if cut.drawn_log_density is None:
        return
    cut = find_cut(separated, args, kwargs)
    rng = np.random.default_rng(4)
    z = rng.uniform(-1, 1, separated.num_params).astype(separated.ravel(separated.prototype).dtype)
    rows = tuple(r[:, None] for r in separated.rows(args, kwargs))
    if cut.num_outcomes is not None:
        _assert_expected_score_is_0(cut, cut.coordinates(z), rows)
        return
    words = jnp.asarray(rng.integers(0, 2**32, (_DRAWS, 2), np.uint32))
    scores = jax.jit(
        lambda phi: jax.lax.map(
            lambda key: jnp.mean(jax.vmap(lambda row: jax.grad(cut.drawn_log_density)(phi, row, key))(rows), 0),
            words,
            batch_size=100,
        )
    )(cut.coordinates(z))
    mean, spread = np.mean(scores, 0, dtype=float), np.std(scores, 0, dtype=float)
    assert np.any(spread > 0)
    assert np.all(np.abs(mean) <= 5.5 * spread / np.sqrt(_DRAWS) + 1e-5 * np.abs(scores).max(0)), mean / spread


class _Flat(dist.Normal):
    """A user's law, whose sampler is not that of its density."""

    def sample(self, key, sample_shape=()):
        return jax.random.uniform(key, sample_shape + self.batch_shape)


def _observe(law, value):
    def model(y):
        a = numpyro.sample("a", dist.LogNormal(0, 1))
        with numpyro.plate("rows", len(y)):
            numpyro.sample("y", law(a, y), obs=value(y))

    return model


def _weighted_by_the_outcome(y):
    a = numpyro.sample("a", dist.Normal(0, 1))
    with numpyro.plate("rows", len(y)), numpyro.handlers.scale(scale=jnp.where(y > 0, 20.0, 1.0)):
        numpyro.sample("y", dist.Normal(a, 1), obs=y)


def _series(y):
    a = numpyro.sample("a", dist.Normal(0, 1))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Normal(a * y[:, :-1], 1).to_event(1), obs=y[:, 1:])


def _zeros_without_a_plate(y):
    a = numpyro.sample("a", dist.Normal(0, 1))
    numpyro.sample("zeros", dist.Poisson((y - a) ** 2), obs=jnp.zeros_like(y))


def _masked_latent(y, seen):
    a = numpyro.sample("a", dist.Normal(0, 1))
    with numpyro.plate("rows", len(y)):
        with numpyro.handlers.mask(mask=seen):
            k = numpyro.sample("k", dist.Bernoulli(0.2), infer={"enumerate": "parallel"})
        numpyro.sample("y", dist.Normal(a * k, 1), obs=y)


@pytest.mark.parametrize(
    ("model", "args"),
    [
        (_observe(lambda a, y: dist.RightCensoredDistribution(dist.Exponential(a), y > 1), jnp.abs), (y,)),
        (_observe(lambda a, y: _Flat(a, 1), lambda y: y), (y,)),
        (_observe(lambda a, y: dist.Poisson(a * y**2), lambda y: 0 * y), (y,)),
        (_weighted_by_the_outcome, (y,)),
        (_series, (X,)),
        (_zeros_without_a_plate, (y,)),
        (_masked_latent, (y, bits > 0)),
    ],
)
def test_rows_are_not_drawn_from_laws_that_are_not_theirs(model, args):
    assert _find(model, args)[1].drawn_log_density is None


@pytest.mark.nightly
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_graph_is_the_model(case, x64):
    """The jaxpr, written out and evaluated by this package, at z itself."""
    separated = _separate(case.model, case.args, case.kwargs, **case.options)
    graph = cut_module.trace(separated, case.args, case.kwargs)
    public = cut_module._public_arrays(separated, case.args, case.kwargs)
    phi = cut_module._Phi(np.arange(graph.num_params), (), (graph.z,), graph.num_params)
    cut = cut_module.Cut(
        size=phi.size,
        trivial=False,
        names=(),
        coordinates=lambda z: z,
        row_log_density=functools.partial(cut_module._row_log_density, graph, phi, public),
    )
    _assert_same_density(separated, cut, case.args, case.kwargs)


def _visits(X, y, group):
    """On raw scales: of the parameters that are tried out, some are so far out that a rate overflows."""
    effect = numpyro.sample("a", dist.Normal(0, 1).expand([GROUPS]).to_event(1))
    slopes = [numpyro.sample(f"b{k}", dist.Normal(0, 0.1)) for k in range(3)]
    intercept = numpyro.sample("c", dist.Normal(0, 2.5))
    with numpyro.plate("rows", X.shape[0]):
        rate = jnp.exp(intercept + (X - jnp.array([50.0, 0.5, 20.0])) @ jnp.stack(slopes) + effect[group])
        numpyro.sample("y", dist.Poisson(rate), obs=y)


def test_a_rate_that_overflows_hides_no_coordinates():
    _, cut = _find(_visits, (X, bits, group))
    assert cut.size == GROUPS + 3


# -- What phi is -------------------------------------------------------------------------------------------------------


def banana(x, y):
    a = numpyro.sample("a", dist.Normal(0, 1))
    b = numpyro.sample("b", dist.Normal(0, 1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("x", dist.Normal(a, 0.5), obs=x)
        numpyro.sample("y", dist.Normal(b + 2.0 * a**2, 0.5), obs=y)


def test_a_curve_lies_before_the_cut():
    separated, cut = _find(banana, (y, X[:, 0]))
    assert (cut.size, cut.trivial, cut.names[0]) == (2, False, "a")
    (z,) = _points(separated, 1)
    np.testing.assert_allclose(cut.coordinates(z), [z[0], z[1] + 2 * z[0] ** 2], rtol=1e-6)
    _assert_same_density(separated, cut, (y, X[:, 0]))
    row = _one_row(separated, (y, X[:, 0]), {})
    hessian = jax.hessian(cut.row_log_density)
    for phi in (jnp.zeros(2), jnp.array([3.0, -1.0])):
        np.testing.assert_allclose(hessian(phi, row), -4.0 * np.eye(2), atol=1e-5)


def _grouped(centred):
    def model(X, bits, group):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        sigma = numpyro.sample("sigma", dist.HalfNormal(1))
        b = numpyro.sample("b", dist.Normal(0, 1).expand([3]))
        with numpyro.plate("groups", GROUPS):
            if centred:
                alpha = numpyro.sample("alpha", dist.Normal(mu, sigma))
            else:
                alpha = mu + sigma * numpyro.sample("eta", dist.Normal(0, 1))
        with numpyro.plate("rows", X.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=alpha[group] + X @ b), obs=bits)

    return model


@single_every_day
@pytest.mark.parametrize("centred", some_every_day([False, True], [False]))
def test_rows_see_the_effects_of_groups(centred, precision):
    args = (X, bits, group)
    separated, cut = _find(_grouped(centred), args)
    assert cut.size == GROUPS + 3
    (z,) = _points(separated, 1)
    sites = separated.unravel(jnp.asarray(z))
    effects = sites["alpha"] if centred else sites["mu"] + jnp.exp(sites["sigma"]) * sites["eta"]
    expected = np.concatenate([effects, sites["b"]])
    np.testing.assert_allclose(np.sort(cut.coordinates(z)), np.sort(expected), rtol=1e-6)
    assert {"b[0]", "b[1]", "b[2]"} <= set(cut.names)
    assert cut.names[:2] == (("alpha[0]", "alpha[1]") if centred else ("b[0]", "b[1]"))
    _assert_same_density(separated, cut, args)


# Where a row picks a group's entry, it may be scaled and shifted before or after; in what order makes no difference.
_PREDICTORS = {
    "effects first": (lambda p, X, g: (p["mu"] + p["tau"] * p["eta"])[g] + X @ p["b"], GROUPS + 3),
    "intercept first": (lambda p, X, g: p["mu"] + p["tau"] * p["eta"][g] + X @ p["b"], GROUPS + 3),
    "intercept elsewhere": (lambda p, X, g: p["mu"] + X @ p["b"] + p["tau"] * p["eta"][g], GROUPS + 3),
    "intercept last": (lambda p, X, g: X @ p["b"] - p["eta"][g] / p["tau"] + p["mu"], GROUPS + 3),
    "negative": (lambda p, X, g: -(p["tau"] * p["eta"][g]) - p["mu"] + X @ p["b"], GROUPS + 3),
    "taken": (lambda p, X, g: p["mu"] + p["tau"] * jnp.take(p["eta"], g) + X @ p["b"], GROUPS + 3),
    "from the end": (lambda p, X, g: p["mu"] + p["tau"] * p["eta"][-1 - g] + X @ p["b"], GROUPS + 3),
    "two of a group": (lambda p, X, g: p["tau"] * p["eta"][g] + p["mu"] * p["gamma"][g, 0] + X @ p["b"], GROUPS + 3),
    "slope": (lambda p, X, g: (p["mu"] + p["tau"] * p["eta"][g]) * X[:, 0] + p["gamma"][g, 1], 2 * GROUPS),
    "slopes": (lambda p, X, g: jnp.sum((p["b"][:2] + p["tau"] * p["gamma"][g]) * X[:, :2], 1), 2 * GROUPS),
    "column of picked": (lambda p, X, g: p["mu"] + p["tau"] * p["gamma"][g][:, 0] + X @ p["b"], 2 * GROUPS + 5),
    "crossed": (lambda p, X, g: p["mu"] + p["tau"] * p["eta"][g] + p["tau"] * p["eta"][g // 2], GROUPS + 1),
    "two factors": (lambda p, X, g: p["tau"] * p["eta"][g] + p["mu"] * p["gamma"][g // 2, 0], 2 * GROUPS),
    "by two indices": (lambda p, X, g: p["mu"] + p["tau"] * p["gamma"][g, g % 2] + X @ p["b"], 2 * GROUPS + 3),
    "several of a row": (
        lambda p, X, g: p["mu"] + jnp.sum(p["tau"] * p["eta"][jnp.stack([g, g // 2], 1)], 1),
        GROUPS + 1,
    ),
    "by row": (lambda p, X, g: X[:, 0] * (p["tau"] * p["eta"][g]) + X[:, 1] * p["mu"] + X @ p["b"], GROUPS + 4),
    "factor of a product": (lambda p, X, g: p["mu"] + p["tau"] * (X @ p["b"]), 4),
    "factor of covariates": (lambda p, X, g: p["mu"] + (p["tau"] * X) @ p["b"], 4),
    "factor of each": (lambda p, X, g: p["mu"] + jnp.sum(p["tau"] * X * p["b"], 1), 4),
    "factor of a sum": (lambda p, X, g: p["tau"] * (p["mu"] - jnp.sum(X * p["b"], 1)), 4),
    "over a factor": (lambda p, X, g: p["mu"] + (X @ p["b"] / 7) / p["tau"], 4),
    "factor of groups": (lambda p, X, g: p["tau"] * (p["eta"][g] + X @ p["b"]), GROUPS + 3),
    "factor of a row": (lambda p, X, g: p["tau"] * (X @ p["b"] + X[:, 0]), 4),
    "also without a factor": (lambda p, X, g: X @ p["b"] + p["mu"] * jnp.exp(p["tau"] * (X @ p["b"])), 5),
}


def _predicting(predictor):
    def model(X, y, g):
        laws = {"mu": (), "eta": (GROUPS,), "b": (3,), "gamma": (GROUPS, 2)}
        values = {
            name: numpyro.sample(name, dist.Normal(0, 1).expand(shape).to_event()) for name, shape in laws.items()
        }
        values["tau"] = numpyro.sample("tau", dist.HalfNormal(1))
        with numpyro.plate("rows", X.shape[0]):
            numpyro.sample("y", dist.Normal(predictor(values, X, g), 1), obs=y)

    return model


@single_every_day
@pytest.mark.parametrize(
    "name",
    some_every_day(
        _PREDICTORS,
        [
            "negative",
            "slope",
            "two factors",
            "by row",
            "factor of covariates",
            "factor of groups",
            "also without a factor",
        ],
    ),
)
def test_what_is_the_same_for_all_rows_comes_before_they_have_a_part(name, precision):
    predictor, size = _PREDICTORS[name]
    args = (X, y, group)
    separated, cut = _find(_predicting(predictor), args)
    assert (cut.size, len(set(cut.names))) == (size, size)
    assert cut.drawn_log_density is not None
    _assert_same_density(separated, cut, args)


def _couplings(separated, cut, args, kwargs):
    """Pairs of coordinates on both of which some row's log density depends, by second derivatives and slopes."""
    rows = tuple(r[:, None] for r in separated.rows(args, kwargs))
    found = np.zeros((cut.size, cut.size), bool)
    derivatives = jax.hessian(cut.row_log_density), jax.grad(cut.row_log_density)
    of_rows = jax.jit(lambda phi: tuple(jax.vmap(of, (None, 0))(phi, rows) for of in derivatives))
    for z in _points(separated):
        hessians, slopes = (np.asarray(found) != 0 for found in of_rows(jnp.asarray(cut.coordinates(z))))
        found |= hessians.any(0) | (slopes[:, :, None] & slopes[:, None]).any(0)
    return found


# Of GROUPS groups: pairs within each value that is picked, and between those that are picked by the same index.
_APART = {
    "effects first": GROUPS * (GROUPS - 1),
    "intercept last": GROUPS * (GROUPS - 1),
    "two of a group": GROUPS * (GROUPS - 1),
    "slope": 4 * GROUPS * (GROUPS - 1),
    "slopes": 4 * GROUPS * (GROUPS - 1),
    "column of picked": 4 * GROUPS * (GROUPS - 1),
    "crossed": 0,
    "two factors": 2 * GROUPS * (GROUPS - 1),
    "by two indices": 0,
    "several of a row": 0,
    "by row": GROUPS * (GROUPS - 1),
}


@single_every_day
@pytest.mark.parametrize(
    "name", some_every_day(_APART, ["slope", "crossed", "two factors", "several of a row", "by row"])
)
def test_effects_of_different_groups_are_apart_where_a_row_has_one(name, precision):
    args = (X, y, group)
    separated, cut = _find(_predicting(_PREDICTORS[name][0]), args)
    assert cut.apart.sum() == _APART[name]
    assert not (cut.apart & _couplings(separated, cut, args, {})).any()


@pytest.mark.nightly
@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_row_depends_on_coordinates_that_are_apart(case, x64):
    separated, cut = _find(case.model, case.args, case.kwargs, **case.options)
    assert cut.apart.shape == (cut.size, cut.size)
    assert not (cut.apart & _couplings(separated, cut, case.args, case.kwargs)).any()


def test_a_value_that_is_changed_on_the_way_is_noticed(monkeypatch):
    """What the graph computes is compared with what the model computes."""
    monkeypatch.setattr("numpyro_dp.model.graph._signed_sum", lambda values, signs: sum(values))
    separated, cut = _find(_predicting(lambda p, X, g: p["tau"] * p["eta"][g] - p["mu"]), (X, y, group))
    assert cut.trivial
    assert cut.size == separated.num_params


def test_a_curvature_is_kept_where_a_function_has_derivatives_of_its_own():
    """Those of `logaddexp` at a tie are lost if it is written out."""
    separated, cut = _find(_grouped(False), (X, bits, group))
    row = _one_row(separated, (X, bits, group), {})
    at_zero = jnp.diag(jax.hessian(cut.row_log_density)(jnp.zeros(cut.size), row))
    assert math.isclose(at_zero[3:].sum(), -0.25, rel_tol=1e-5)


def test_a_parameter_twice_is_one_coordinate():
    def model(x, y):
        b = numpyro.sample("b", dist.Normal(0, 1).expand([3]))
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("x", dist.Normal(b[0], 1.0), obs=x)
            numpyro.sample("y", dist.Normal(b[0] * x + jnp.sin(b[0] * x), jnp.exp(b[1])), obs=y)

    assert _find(model, (y, y))[1].names == ("b[0]", "b[1]")


def test_overlapping_parts_are_counted_once():
    def model(X, y):
        b = numpyro.sample("b", dist.Normal(0, 1).expand([5]))
        with numpyro.plate("rows", y.shape[0]):
            numpyro.sample("y", dist.Normal(X[:, :2] @ b[:2] + jnp.tanh(X[:, :2] @ b[1:3]), 1.0), obs=y)

    separated, cut = _find(model, (X, y))
    assert cut.names == ("b[0]", "b[1]", "b[2]")
    _assert_same_density(separated, cut, (X, y))


# -- Phi ranges over everything ----------------------------------------------------------------------------------------


def test_a_scale_enters_by_its_unconstrained_parameter():
    def model(X, y):
        b = numpyro.sample("b", dist.Normal(0, 1).expand([3]))
        tau = numpyro.sample("tau", dist.HalfNormal(1))
        sigma = numpyro.sample("sigma", dist.HalfNormal(1))
        eta = numpyro.sample("eta", dist.Normal(0, 1))
        with numpyro.plate("rows", y.shape[0]):
            numpyro.sample("y", dist.Normal(tau * eta + X @ b, 2.0 * sigma), obs=y)

    separated, cut = _find(model, (X, y))
    assert cut.size == 5
    assert cut.names[:4] == ("b[0]", "b[1]", "b[2]", "sigma")
    row = _one_row(separated, (X, y), {})
    for far in (-3.0, 3.0):
        assert np.isfinite(cut.row_log_density(jnp.full(5, far), row))


def test_a_product_of_scales_stays_two_coordinates():
    """It is positive, and no value of its size ranges over all numbers."""

    def model(y):
        tau = numpyro.sample("tau", dist.HalfNormal(1))
        lam = numpyro.sample("lam", dist.HalfNormal(1))
        with numpyro.plate("rows", y.shape[0]):
            numpyro.sample("y", dist.Normal(0.0, tau * lam), obs=y)

    assert _find(model, (y,))[1].trivial


@pytest.mark.nightly
def test_ordered_and_bounded_values_are_not_left():
    def ordered(x, categories):
        steps = numpyro.sample("steps", dist.Normal(0, 1).expand([3]))
        scale = numpyro.sample("scale", dist.HalfNormal(1))
        # Differences of the cut points are positive by a function that no list knows.
        points = scale * jnp.cumsum(steps * jnp.arctan2(steps, 1.0 + 0.0 * steps))
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("y", dist.OrderedLogistic(x, points), obs=categories)

    assert _find(ordered, (y, bits))[1].trivial
    for name in ("ordinal", "mixture", "multivariate", "directions", "dynamic_support", "mislabelled"):
        case = BY_NAME[name]
        assert _find(case.model, case.args, case.kwargs, **case.options)[1].trivial


@single_every_day
def test_a_smaller_cut_is_left_where_the_density_goes_on_beyond_its_values(precision):
    """Of a sum of squares; in the parameters themselves the likelihood is a ring, of which a quadratic sees a piece."""

    def ring(y):
        a = numpyro.sample("a", dist.Normal(0, 1))
        b = numpyro.sample("b", dist.Normal(0, 1))
        with numpyro.plate("rows", y.shape[0]):
            numpyro.sample("y", dist.Normal(a**2 + b**2, 1.0), obs=y)

    separated, cut = _find(ring, (y,))
    assert cut.size == 1
    (z,) = _points(separated, 1)
    np.testing.assert_allclose(cut.coordinates(z), [z[0] ** 2 + z[1] ** 2], rtol=1e-6)
    _assert_same_density(separated, cut, (y,))
    row = _one_row(separated, (y,), {})
    for phi in (-4.0, 0.0, 4.0):
        np.testing.assert_allclose(jax.hessian(cut.row_log_density)(jnp.array([phi]), row), [[-1.0]], rtol=1e-5)


@pytest.mark.parametrize(
    "law",
    [
        lambda a, b: dist.Normal(0.0, jnp.exp(a) + jnp.exp(b)),  # no numbers below 0
        lambda a, b: dist.Gamma(jnp.exp(a) + jnp.exp(b), 1.0),
        lambda a, b: dist.Bernoulli(probs=jnp.exp(a) / (jnp.exp(a) + jnp.exp(b))),  # flat on both sides
    ],
)
def test_a_smaller_cut_is_not_left_where_the_density_ends(law):
    def model(y):
        a = numpyro.sample("a", dist.Normal(0, 1))
        b = numpyro.sample("b", dist.Normal(0, 1))
        with numpyro.plate("rows", y.shape[0]):
            numpyro.sample("y", law(a, b), obs=y)

    outcomes = bits if isinstance(law(0.0, 0.0), dist.BernoulliProbs) else np.abs(y)
    assert _find(model, (outcomes,))[1].trivial


# -- Public arguments --------------------------------------------------------------------------------------------------


def _with_public_table(y, item, table, offset):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    slope = numpyro.sample("slope", dist.Normal(0, 1).expand([2]))
    noise = numpyro.sample("noise", dist.Normal(0, 1).expand([4]))
    level = mu + table @ slope + jnp.exp(mu) * noise + offset
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(level[item], 1.0), obs=y)


def test_public_arrays_may_be_traced():
    table, offset = _rng.normal(size=(4, 2)), 0.5
    args = (y, group % 4, table, offset)
    separated, cut = _find(_with_public_table, args, private_args=["y", "item"])
    assert cut.size == 4
    _assert_same_density(separated, cut, args)
    row, (z,) = _one_row(separated, args, {}), _points(separated, 1)

    @jax.jit
    def inside(table, z, row):
        within = find_cut(separated, (y, group % 4, table, offset), {})
        assert within.names == cut.names
        phi = within.coordinates(z)
        return phi, within.row_log_density(phi, row)

    phi, density = inside(jnp.asarray(table), z, row)
    np.testing.assert_allclose(phi, cut.coordinates(z), rtol=1e-5)
    np.testing.assert_allclose(density, cut.row_log_density(phi, row), rtol=1e-5)


def test_an_array_that_is_closed_over_is_one_value_in_the_density_and_in_the_draw():
    """Else the draw would need parameters that are not in phi, and could not be made."""
    turn = np.array([[1.0, 0.5], [-0.5, 1.0]], np.float32)

    def model(x):
        b = numpyro.sample("b", dist.Normal(0, 1).expand([2]).to_event(1))
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("x", dist.Normal(turn @ b, 1.0).to_event(1), obs=x)

    cut = find_cut(_separate(model, (np.zeros((5, 2), np.float32),)), (np.zeros((5, 2), np.float32),), {})
    assert not cut.trivial
    assert cut.drawn_log_density is not None


def test_a_model_that_reads_tracers_from_elsewhere_has_a_cut_without_numbers():
    @jax.jit
    def inside(shift):
        def model(x, y):
            a, b = (numpyro.sample(name, dist.Normal(0, 1)) for name in "ab")
            with numpyro.plate("rows", x.shape[0]):
                numpyro.sample("x", dist.Normal(a, 0.5), obs=x)
                numpyro.sample("y", dist.Normal(b + shift * a**2, 0.5), obs=y)

        separated = _separate(model, (y, y))
        cut = find_cut(separated, (y, y), {})
        assert cut.trivial
        return cut.row_log_density(jnp.ones(2), _one_row(separated, (y, y), {}))

    assert np.isfinite(inside(2.0))


# -- Positive weights --------------------------------------------------------------------------------------------------


def _weighted(prior):
    def model(X, y):
        a = numpyro.sample("a", dist.Normal(0, 3))
        w = numpyro.sample("w", prior.expand([2]).to_event(1))
        s = numpyro.sample("s", dist.HalfNormal(3))
        with numpyro.plate("rows", len(y)):
            numpyro.sample("y", dist.Normal(a + X @ w, s), obs=y)

    return model


@pytest.mark.parametrize("prior", [dist.HalfNormal(1), dist.Beta(2, 2)], ids=["half-normal", "beta"])
def test_a_positive_weight_is_a_coordinate_itself(prior, x64):
    """Not its logarithm, along which a likelihood that goes on below 0 would be bent. A scale stays a logarithm."""
    X, y = np.random.default_rng(0).normal(size=(9, 2)), np.ones(9)
    separated = separate(_weighted(prior), (X, y))
    cut = find_cut(separated, (X, y), {})
    z = jnp.asarray(np.random.default_rng(1).normal(size=4))
    weights = np.asarray(separated.constrain((X, y), {})(separated.unravel(z))["w"])
    phi = dict(zip(cut.names, np.asarray(cut.coordinates(z)), strict=True))
    np.testing.assert_allclose([phi[f"w[{k}]"] for k in range(2)], weights)
    assert phi["s"] == pytest.approx(float(separated.unravel(z)["s"]))
    row = jnp.asarray(X[:1]), jnp.asarray(y[:1])
    at_z = separated.row_log_density((X, y), {})(z, row)
    np.testing.assert_allclose(cut.row_log_density(cut.coordinates(z), row), at_z, rtol=1e-12)


def _by_group(g, y):
    with numpyro.plate("groups", 12):
        a = numpyro.sample("a", dist.HalfNormal(2))
        s = numpyro.sample("s", dist.HalfNormal(3))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Normal(a[g], s[g]), obs=y)


def _by_condition(g, y):
    a = numpyro.sample("a", dist.HalfNormal(2))
    s = numpyro.sample("s", dist.HalfNormal(3))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Normal(jnp.where(g > 0, a, 0.0), s), obs=y)


@pytest.mark.parametrize("model", [_by_group, _by_condition])
def test_so_are_positive_effects_that_a_row_picks(model):
    """Also if the few rows by which it is checked do not pick each of them. Scales that they pick stay logarithms."""
    g, y = np.arange(9, dtype=np.int32), np.ones(9)
    separated, cut = _find(model, (g, y))
    z = jnp.linspace(-1.0, 1.0, separated.num_params)
    effects = np.asarray(separated.constrain((g, y), {})(separated.unravel(z))["a"])
    phi = dict(zip(cut.names, np.asarray(cut.coordinates(z)), strict=True))
    np.testing.assert_allclose([phi[k] for k in phi if k.startswith("a")], effects.ravel(), rtol=1e-6)
    scales = np.ravel(separated.unravel(z)["s"])
    np.testing.assert_allclose([phi[k] for k in phi if k.startswith("s")], scales, rtol=1e-6)
    assert np.isfinite(cut.row_log_density(jnp.full(cut.size, -2.0), _one_row(separated, (g, y), {})))


def test_rates_that_a_row_picks_stay_logarithms():
    """The likelihood of a rate ends at 0."""

    def model(g, y):
        with numpyro.plate("groups", 5):
            rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
        with numpyro.plate("rows", len(y)):
            numpyro.sample("y", dist.Poisson(rate[g]), obs=y)

    assert _find(model, (np.arange(5, dtype=np.int32), np.ones(5, np.int32)))[1].trivial
