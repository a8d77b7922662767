"""Symmetries of the likelihood, and the warning where a release shows one of several humps that are alike."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from helpers.corpus import GOOD
from helpers.zoo import CASES
from jax.flatten_util import ravel_pytree
from numpyro.distributions.transforms import OrderedTransform
from numpyro.infer import init_to_sample
from numpyro.infer.util import compute_log_probs, constrain_fn

from numpyro_dp import DPHMC, MCMC, PosteriorWarning, Preparation
from numpyro_dp.model.coordinates import find_cut
from numpyro_dp.model.separate import separate
from numpyro_dp.model.symmetry import find_symmetries
from numpyro_dp.preparation.frames import Frame
from numpyro_dp.preparation.mirror import find_mirror
from numpyro_dp.preparation.surrogate import Surrogate

N = 12
_rng = np.random.default_rng(0)
X, y, group = _rng.normal(size=(N, 3)), _rng.normal(size=N), np.arange(N) % 4


def symmetries(model, args, kwargs=None, **options):
    separated = separate(model, args, kwargs or {}, **options)
    keys = jax.random.split(jax.random.key(0), 4)
    draws, _ = separated.init_params(keys, init_to_sample, args, kwargs or {})
    return find_symmetries(separated, args, kwargs or {}, np.asarray(jax.vmap(separated.ravel)(draws)))


def two_components(weights, locations):
    def model(y):
        w = weights()
        locs = numpyro.sample("locs", locations)
        mixing = dist.Categorical(w if jnp.ndim(w) else jnp.stack([w, 1 - w]))
        with numpyro.plate("rows", y.shape[0]):
            numpyro.sample("y", dist.MixtureSameFamily(mixing, dist.Normal(locs, 0.5)), obs=y)

    return model


def shares():
    return numpyro.sample("w", dist.Dirichlet(jnp.ones(2)))


def unequal_shares():
    return numpyro.sample("w", dist.Dirichlet(jnp.array([1.0, 2.0])))


def share():
    return numpyro.sample("w", dist.Beta(2.0, 2.0))


ANY_ORDER = dist.Normal(0, 3).expand([2])
ORDERED = dist.TransformedDistribution(dist.Normal(0, 3).expand([2]).to_event(1), OrderedTransform())


def summed_out(y):
    w = shares()
    with numpyro.plate("components", 2):
        locs = numpyro.sample("locs", dist.Normal(0, 3))
    with numpyro.plate("rows", y.shape[0]):
        k = numpyro.sample("k", dist.Categorical(w))
        numpyro.sample("y", dist.Normal(locs[k], 0.5), obs=y)


def square(y):
    a, sigma = numpyro.sample("a", dist.Normal(0, 1)), numpyro.sample("sigma", dist.HalfNormal(1))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(a**2, sigma), obs=y)


def square_with_a_place(y):
    a, sigma = numpyro.sample("a", dist.Normal(1, 1)), numpyro.sample("sigma", dist.HalfNormal(1))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(a**2, sigma), obs=y)


def network(X, y):
    inner = numpyro.sample("inner", dist.Normal(0, 1).expand([3, 5]).to_event(2))
    outer = numpyro.sample("outer", dist.Normal(0, 1).expand([5]).to_event(1))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Normal(jnp.tanh(X @ inner) @ outer, 1.0), obs=y)


def regression(X, y):
    b, sigma = (
        numpyro.sample("b", dist.Normal(0, 1).expand([3]).to_event(1)),
        numpyro.sample("sigma", dist.HalfNormal(1)),
    )
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ b, sigma), obs=y)


def effects(y, group):
    mu, tau = numpyro.sample("mu", dist.Normal(0, 1)), numpyro.sample("tau", dist.HalfNormal(1))
    with numpyro.plate("groups", 4):
        eta = numpyro.sample("eta", dist.Normal(0, 1))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal((mu + tau * eta)[group], 1.0), obs=y)


def never_finite(y):
    a = numpyro.sample("a", dist.Normal(0, 1))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(jnp.where(jnp.abs(a) > 1e3, a, jnp.nan), 1.0), obs=y)


def two_sites(y):
    first, second = (numpyro.sample(f"mu{k}", dist.Normal(0, 3)) for k in (1, 2))
    w = numpyro.sample("logit", dist.Normal(0, 1))
    mixing = dist.Categorical(logits=jnp.stack([w, jnp.zeros_like(w)]))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.MixtureSameFamily(mixing, dist.Normal(jnp.stack([first, second]), 0.5)), obs=y)


def last_two_alike(y):
    locs = numpyro.sample("locs", dist.Normal(jnp.array([-5.0, 2.0, 2.0]), 3))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.MixtureSameFamily(dist.Categorical(jnp.ones(3) / 3), dist.Normal(locs, 0.5)), obs=y)


def large_numbers(y):
    """The prior says which is which, but not to draws of a standard normal law, which are far from both places."""
    locs = numpyro.sample("locs", dist.Normal(jnp.array([30_000.0, 90_000.0]), 5000))
    w, sd = numpyro.sample("w", dist.Dirichlet(jnp.ones(2))), numpyro.sample("sd", dist.HalfNormal(10_000))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.MixtureSameFamily(dist.Categorical(w), dist.Normal(locs, sd)), obs=y)


def groups_out_of_sight(y, age):
    """Synthetic ages are small integers, or large ones: none is in the first groups."""
    with numpyro.plate("groups", 6):
        e = numpyro.sample("e", dist.Normal(0, 1))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(e[jnp.where(age < 3000, 5, age // 3000)], 1.0), obs=y)


def classes(X, y):
    B = numpyro.sample("B", dist.Normal(0, 1).expand([3, 6]).to_event(2))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Categorical(logits=X @ B), obs=y)


SYMMETRIES = {
    "classes": (classes, (X, group), []),
    "components": (two_components(shares, ANY_ORDER), (y,), ["entries 0 and 1 of 'locs', 'w' change places"]),
    "components that are ordered": (two_components(shares, ORDERED), (y,), []),
    "components with a prior of their own": (
        two_components(unequal_shares, ANY_ORDER),
        (y,),
        ["entries 0 and 1 of 'locs', 'w' change places"],
    ),
    "a share of the first": (
        two_components(share, ANY_ORDER),
        (y,),
        ["entries 0 and 1 of 'locs' change places and 'w' becomes 1 less itself"],
    ),
    "memberships summed out": (summed_out, (y,), ["entries 0 and 1 of 'locs', 'w' change places"]),
    "a square": (square, (y,), ["'a' changes its sign"]),
    "a square whose prior has a place": (square_with_a_place, (y,), ["'a' changes its sign"]),
    "a network": (
        network,
        (X, y),
        [
            "'inner', 'outer' change their signs",
            *(f"entries {k} and {k + 1} of 'inner', 'outer' change places" for k in range(3)),
        ],
    ),
    "components in two sites": (
        two_sites,
        (y,),
        ["'mu1' and 'mu2' change places and 'logit' changes its sign"],
    ),
    "two of three components": (
        last_two_alike,
        (y,),
        [f"entries {k} and {k + 1} of 'locs' change places" for k in range(2)],
    ),
    "components in large numbers": (large_numbers, (y,), ["entries 0 and 1 of 'locs', 'w' change places"]),
    "groups that synthetic rows do not reach": (groups_out_of_sight, (y, group), []),
    "a regression": (regression, (X, y), []),
    "effects of groups": (effects, (y, group), []),
}


OF_UNEQUAL_PRIORS = {
    "components with a prior of their own",
    "a square whose prior has a place",
    "two of three components",
}
SOME = ("a network", "a regression")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in SOME else pytest.mark.nightly) for n in SYMMETRIES])
def test_symmetries_are_found(name):
    model, args, what = SYMMETRIES[name]
    separated = separate(model, args)
    found = symmetries(model, args)
    assert [symmetry.what for symmetry in found] == what
    if separated.row_latents:
        return
    z = np.random.default_rng(1).normal(size=separated.num_params)

    def joint(z):
        values = constrain_fn(model, args, {}, ravel_pytree(separated.prototype)[1](jnp.asarray(z, jnp.float32)))
        return sum(jnp.sum(p) for p in compute_log_probs(model, args, {}, values)[0].values())

    for symmetry in found:
        image, log_odds = symmetry.image(z)
        assert np.abs(image - z).max() > 0.1
        np.testing.assert_allclose(joint(image) - log_odds, joint(z), rtol=1e-4)
        back, odds_back = symmetry.image(image)
        np.testing.assert_allclose(back, z, atol=1e-4)  # each is its own inverse
        assert odds_back == pytest.approx(-log_odds, abs=1e-3)
    odds = [abs(symmetry.image(z)[1]) for symmetry in found]
    assert any(one > 0.01 for one in odds) == (name in OF_UNEQUAL_PRIORS)


WITH_SYMMETRIES = {
    *("membership", "membership_marked", "membership_multivariate", "weighted_membership", "repeated_measures"),
    *("latent_of_each_visit", "dependent_latents", "neural_network", "option_set_by_a_partial", "bag_of_vectors"),
    *("principal_components", "dawid_skene"),
}
MODELS = {entry.name: entry for entry in CASES} | GOOD


WITHOUT = [name for name, entry in MODELS.items() if not getattr(entry, "marks", ()) and name not in WITH_SYMMETRIES]


@pytest.mark.nightly
@pytest.mark.parametrize("name", [*sorted(WITH_SYMMETRIES), *WITHOUT[::3]])  # each third: that takes a minute
def test_models_of_all_kinds_are_asked(name):
    entry = MODELS[name]
    options, kwargs = {k: v for k, v in entry.options.items() if k != "unit"}, getattr(entry, "kwargs", {})
    assert bool(symmetries(entry.model, entry.args, kwargs, **options)) == (name in WITH_SYMMETRIES)


def test_what_no_row_speaks_of_is_no_symmetry(monkeypatch):
    """Nothing is said of a model that is finite on no row, or of parameters on which the rows do not depend."""

    def unused(X, y):
        numpyro.sample("idle", dist.Normal(0, 1))
        regression(X, y)

    assert symmetries(unused, (X, y)) == []
    monkeypatch.setattr("numpyro_dp.model.separate.check_on_synthetic_rows", lambda *_: ([], {}))
    assert symmetries(never_finite, (y,)) == []


def test_of_very_many_numbers_nothing_is_asked(monkeypatch):
    assert symmetries(square, (y,))
    monkeypatch.setattr("numpyro_dp.model.symmetry._MOST_NUMBERS", 1)
    assert symmetries(square, (y,)) == []


def test_debugging_does_not_stop_the_search():
    """Images outside of a support are no numbers, by design."""
    separated = separate(square, (y,))
    with jax.debug_nans(True), jax.debug_infs(True):
        (symmetry,) = find_symmetries(separated, (y,), {}, np.zeros((4, 2)))
        assert symmetry.image(np.array([1.0, 2.0]))[0].tolist() == [-1, 2]


def test_places_that_noise_explains_are_one_hump():
    """In two coordinates that the likelihood knows to .1: what is 4 standard deviations apart may be one hump."""
    model = two_components(lambda: 0.5, ANY_ORDER)
    (symmetry,) = symmetries(model, (y,))
    cut = find_cut(separate(model, (y,)), (y,), {})
    frame = Frame(np.zeros(2), np.eye(2))

    def mirror(apart, **options):
        start = np.array([1.0, 1.0 + apart])
        surrogate = Surrogate(frame, np.zeros(2), options.get("noise", 0) * np.eye(2), 100 * np.eye(2), 0.0)
        return find_mirror([symmetry], cut, surrogate, start)

    assert mirror(0.4 / 2**0.5) is None
    far = mirror(2.0)
    assert far is not None
    assert far.distance == pytest.approx(20 * 2**0.5, rel=1e-3)
    assert mirror(2.0, noise=1e6) is None  # a release that is mostly noise knows of no hump


COMPONENTS = np.where(_rng.random(6_000) < 0.4, -1.5, 1.5) + 0.5 * _rng.normal(size=6_000)


def run(model, mu):
    """Near one of the humps, if there are several."""
    prepare = Preparation(mode="surrogate", start={"locs": mu}, scales={"locs": 0.2})
    mcmc = MCMC(DPHMC(model, eps=3.0, prepare=prepare), num_warmup=100, num_samples=200, progress_bar=False)
    mcmc.run(jax.random.key(0), COMPONENTS)
    return mcmc


@pytest.mark.nightly
def test_a_run_warns_of_a_hump_that_it_does_not_show():
    with pytest.warns(PosteriorWarning, match=r"entries 0 and 1 of 'locs', 'w' change places.*show one of them"):
        mcmc = run(two_components(shares, ANY_ORDER), np.array([-1.4, 1.4]))
    mirror = mcmc.sampler.prepared.mirror
    assert mirror is not None
    assert mirror.distance > 100
    assert any("change places" in reason for reason in mcmc.privacy.posterior.reasons)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:the posterior may be off:numpyro_dp.PosteriorWarning")  # for other reasons
def test_a_run_is_silent_where_the_model_says_which_is_which():
    mcmc = run(two_components(shares, ORDERED), np.array([-1.4, 1.03]))  # log(1.4 + 1.4)
    assert mcmc.sampler.prepared.mirror is None
    assert not any("change places" in reason for reason in mcmc.privacy.posterior.reasons)
    np.testing.assert_allclose(mcmc.get_samples()["locs"].mean(0), [-1.5, 1.5], atol=0.2)
