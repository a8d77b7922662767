"""A noise seed knows the model: same script, same noise; another number anywhere, another noise."""

import functools
import os
import pickle
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import numpyro.infer
import pytest
from helpers.laplace import laplace, laplace_family

import numpyro_dp.kernels.base
import numpyro_dp.privacy.fingerprint
from numpyro_dp import MCMC, DPExponentialFamily, DPPenalty
from numpyro_dp.privacy.fingerprint import fingerprint
from numpyro_dp.privacy.ledger import Request

N = 20
X = np.random.default_rng(0).normal(size=(N, 2)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.float32)
CONSTANT = np.linspace(0, 1, 5000).astype(np.float32)
CHANGED = CONSTANT.copy()
CHANGED[2500] += 1e-3  # which is not seen where a text shows the first and the last entries


def regression(mean=0.0, sd=1.0, factor=1.0, likelihood=dist.Bernoulli, constant=CONSTANT):
    def model(x, y, offset=0.0, how="plain"):
        b = numpyro.sample("b", dist.Normal(mean, sd).expand([2]).to_event(1))
        shift = jnp.sum(b[0] * constant) + offset
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("y", likelihood(logits=factor * (x @ b) + 1e-3 * jnp.sum(shift)), obs=y)

    return model


def noise_of(kernel, table=(X, Y), kwargs=None):
    """The noise that the kernel's first release would have."""
    kernel.init(jax.random.key(0), 0, None, table, kwargs or {})
    _, drawn = kernel.ledger.grant({kind: Request(1, (1,)) for kind in kernel.ledger.plan.kinds}, 0, N, b"nonce")
    return {kind: draw.noise.tolist() for kind, draw in drawn.items()}


def seeded(model, make=DPPenalty, **options):
    plain = {"prepare": False} if make is DPPenalty else {}
    return make(model, eps=1.0, **plain | {"step_size": 0.1, "num_iterations": 4, "noise_seed": 1} | options)


@pytest.fixture(scope="module")
def first():
    return noise_of(seeded(regression()))


def test_one_model_has_one_noise(first):
    assert noise_of(seeded(regression())) == first


@pytest.mark.parametrize(
    "changes",
    [
        {"mean": 1e-7},
        {"sd": 1.0000001},
        {"factor": 1.0000001},
        {"likelihood": functools.partial(dist.Binomial, 1)},
        {"constant": CHANGED},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_two_models_never_share_their_noise(first, changes):
    """The difference of what is released would be the exact difference of two sums."""
    assert noise_of(seeded(regression(**changes))) != first


@pytest.mark.parametrize("changed", ["jaxlib", "numpyro_dp"])
def test_another_version_of_a_library_has_another_noise(changed, first, monkeypatch):
    """It may compute a row's value with other last bits, and this package may ask for another one."""
    as_it_is = numpyro_dp.privacy.fingerprint.version
    other = lambda name: "0.0" if name == changed else as_it_is(name)  # noqa: E731
    monkeypatch.setattr(numpyro_dp.privacy.fingerprint, "version", other)
    assert noise_of(seeded(regression())) != first


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param({"offset": 1.0}, {"offset": 2.0}, id="number", marks=pytest.mark.nightly),
        pytest.param({"offset": np.ones(3)}, {"offset": np.array([1.0, 1.0, 1.001])}, id="array"),
        pytest.param({"how": "one"}, {"how": "other"}, id="text"),
    ],
)
def test_public_arguments_decide_on_the_noise(one, other):
    first, second = (noise_of(seeded(regression()), kwargs=kwargs) for kwargs in (one, other))
    assert first != second
    assert noise_of(seeded(regression()), kwargs=one) == first


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"inverse_mass_matrix": np.ones(2)}, {"inverse_mass_matrix": np.full(2, 1.1)}),
        ({"inverse_mass_matrix": {"b": 1.0}}, {"inverse_mass_matrix": {"b": np.array([1.0, 2.0])}}),
    ],
    ids=["array", "dict"],
)
def test_arrays_among_the_settings_decide_on_the_noise(one, other):
    assert noise_of(seeded(regression(), **one)) != noise_of(seeded(regression(), **other))
    assert noise_of(seeded(regression(), **one)) == noise_of(seeded(regression(), **one))


def test_a_bound_of_ones_own_decides_on_the_noise():
    def told(factor):
        return lambda before, after: factor * abs(after["b"] - before["b"]).sum()

    first, same, other = (noise_of(seeded(regression(), clip_ratio=told(factor))) for factor in (2.0, 2.0, 3.0))
    assert first == same != other


def with_family(**changes):
    return seeded(laplace, DPExponentialFamily, family=laplace_family(**changes))


def test_the_statistics_of_a_family_decide_on_the_noise():
    first, same, other = (noise_of(with_family(center=c), (X[:, 0],)) for c in (4.0, 4.0, 3.0))
    assert first == same != other


def test_private_values_do_not_decide_on_the_noise(first):
    for table in ((X + 1, 1 - Y), (np.full_like(X, np.nan), np.full_like(Y, np.inf))):
        assert noise_of(seeded(regression()), table) == first


def test_without_a_seed_there_is_no_fingerprint(monkeypatch):
    monkeypatch.setattr(numpyro_dp.kernels.base, "fingerprint", lambda *args: pytest.fail("it was computed"))
    kernel = seeded(regression(), noise_seed=None)
    assert noise_of(kernel) != noise_of(kernel)


def test_it_is_in_no_pickle(monkeypatch):
    """It may depend on the number of rows, which may be private."""
    monkeypatch.setattr(numpyro_dp.kernels.base, "fingerprint", lambda *args: "a fingerprint")
    kernel = seeded(laplace)
    noise_of(kernel, (X[:, 0],))
    assert b"a fingerprint" in kernel.ledger._context
    assert b"a fingerprint" not in pickle.dumps(kernel)


def noises():
    kernel = seeded(regression(), inverse_mass_matrix={"b": 1.0})
    return noise_of(kernel, kwargs={"offset": CONSTANT[:3], "how": "plain"}), noise_of(with_family(), (X[:, 0],))


@pytest.mark.nightly
def test_another_process_has_the_same_noise():
    """Nothing of it is an address, or an order that a process makes up."""
    script = "import sys; sys.path[:0] = sys.argv[1:]; import test_fingerprint as t; print(t.noises())"
    there = subprocess.run(
        [
            sys.executable,
            "-c",
            script,
            *map(str, Path(__file__).parents[:2]),
            str(Path(numpyro_dp.__file__).parents[1]),
        ],
        env=os.environ | {"PYTHONHASHSEED": "1", "JAX_PLATFORMS": "cpu"},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert there.strip() == repr(noises())
    assert "'ratio': [[" in there


def test_a_public_array_that_is_traced_is_refused():
    kernel = seeded(regression())
    start = functools.partial(kernel.init, jax.random.key(0), 0, None)
    with pytest.raises(ValueError, match=r"noise_seed: .* they are traced"):
        jax.jit(lambda offset: start((X, Y), {"offset": offset}))(np.ones(3))
    assert not kernel.ledger.committed


@pytest.mark.nightly
@pytest.mark.parametrize("stock", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["numpyro_dp", "numpyro"])
def test_chains_in_parallel_have_the_same_noise(stock):
    """Their start is traced, the arguments are not."""

    def draws(stock, chain_method):
        kernel = seeded(regression(), num_chains=2)
        options = {"num_warmup": 2, "num_samples": 2, "num_chains": 2, "progress_bar": False}
        mcmc = (numpyro.infer.MCMC if stock else MCMC)(kernel, chain_method=chain_method, **options)
        mcmc.run(jax.random.key(0), X, Y, offset=np.ones(3), extra_fields=("accept_prob",))
        return mcmc.get_extra_fields()["accept_prob"]

    np.testing.assert_allclose(draws(stock, "parallel"), draws(False, "vectorized"), rtol=1e-3)


# -- The hash alone ----------------------------------------------------------------------------------------------------


def of(function, *values):
    return fingerprint([(function, (jnp.ones(3),))], values)


def closed_over(array):
    return jax.jit(lambda z: jnp.sum(z) + jnp.sum(jnp.asarray(array)))


def with_derivative(factor):
    @jax.custom_jvp
    def function(z):
        return jnp.sum(jnp.sin(z))

    function.defjvp(lambda z, dz: (function(*z), factor * jnp.sum(dz[0])))
    return function


def with_pullback(factor):
    @jax.custom_vjp
    def function(z):
        return jnp.sum(jnp.sin(z))

    function.defvjp(lambda z: (function(z), z), lambda z, g: (factor * g * z,))
    return function


def in_a_branch(factor):
    return lambda z: jax.lax.cond(z[0] > 0, lambda z: jnp.sum(z * factor), lambda z: jnp.sum(z), z)


def drawn_with(seed):
    key = jax.random.key(seed)
    return lambda z: jnp.sum(z * jax.random.normal(key, (3,)))


def in_a_loop(factor):
    return lambda z: jax.lax.while_loop(lambda s: s < 10.0, lambda s: s * factor, jnp.sum(z))


@pytest.mark.parametrize(
    ("make", "one", "other"),
    [
        (closed_over, CONSTANT, CHANGED),
        (closed_over, 1.0, 1.0000001),
        (drawn_with, 1, 2),
        (with_derivative, 1.0, 2.0),
        (with_pullback, 1.0, 2.0),
        (in_a_branch, 1.0, 2.0),
        (in_a_branch, CONSTANT[:3], CONSTANT[1:4]),
        (in_a_loop, 2.0, 3.0),
        (lambda order: lambda z: z[0] - z[1] if order else z[1] - z[0], True, False),
        (lambda axis: lambda z: jnp.sum(jnp.cumsum(z[None] * z[:, None], axis)), 0, 1),
    ],
    ids=["array", "number", "key", "jvp", "vjp", "branch", "branch_array", "loop", "order", "parameter"],
)
def test_another_number_is_another_function(make, one, other):
    assert of(make(one)) == of(make(one)) != of(make(other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (CONSTANT, CHANGED),
        (np.float32(1), np.float64(1)),
        (np.zeros((2, 3)), np.zeros((3, 2))),
        (np.array(["a", None], object), np.array(["b", None], object)),
        ({"a": 1, "b": 2}, {"a": 2, "b": 1}),
        ([1, 2, 3], [[1, 2], 3]),
        (["ab", "c"], ["a", "bc"]),
        (lambda t: 0.1 / t, lambda t: 0.2 / t),
        (lambda t, a=1: t, lambda t, a=2: t),
        (functools.partial(of, a=1), functools.partial(of, a=2)),
        ({"x", "y"}, {"x", "z"}),
        (b"a", b"b"),
        (None, 0),
        (1, True),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_are_known_by_their_content(one, other):
    assert of(jnp.sum, one) != of(jnp.sum, other)


def test_keys_are_known_by_their_content():
    assert of(jnp.sum, jax.random.key(1)) == of(jnp.sum, jax.random.key(1)) != of(jnp.sum, jax.random.key(2))


def test_what_says_the_same_is_the_same():
    class Object:
        pass

    def recursive(n):
        return recursive(n - 1) if n else 0

    def schedule(size):
        return lambda t: size / t

    assert of(jnp.sum, Object()) == of(jnp.sum, Object())
    assert of(jnp.sum, {"a": 1, "b": 2}) == of(jnp.sum, {"b": 2, "a": 1})
    assert of(jnp.sum, recursive) == of(jnp.sum, recursive)
    assert of(jnp.sum, schedule(1.0)) == of(jnp.sum, schedule(1.0)) != of(jnp.sum, schedule(2.0))


def test_what_jax_makes_of_a_key_decides_on_the_noise():
    """Proposals follow from it."""
    first = noise_of(seeded(regression()))
    with jax.threefry_partitionable(not jax.config.jax_threefry_partitionable):
        second = noise_of(seeded(regression()))
    assert first != second
    assert noise_of(seeded(regression())) == first
