"""Two CPU devices for parallel chains, and float64 on request. Warnings are errors (pyproject.toml)."""

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MPLBACKEND", "Agg")
# NumPyro switches its progress bar off where it sees these.
os.environ.pop("CI", None)

import jax
import numpy as np
import pytest

_separated: dict = {}


@pytest.fixture(autouse=True)
def _models_are_separated_once(monkeypatch):
    """Checking a model takes about a second: tests that run kernels on the same model share the result."""
    from numpyro_dp.kernels import base

    def separate(model, args, kwargs, row_plate, private_args):
        key = (model, base._signature(args, kwargs), row_plate, str(private_args), jax.config.jax_enable_x64)
        if key not in _separated:
            _separated[key] = original(model, args, kwargs, row_plate, private_args)
        return _separated[key]

    original = base.separate
    monkeypatch.setattr(base, "separate", separate)


_cuts: dict = {}
_surveys: dict = {}


@pytest.fixture
def shared_surveys(monkeypatch):
    """Compiling a preparation takes seconds: tests that prepare kernels for the same model share the programs.

    They take the rows as arguments, so other rows need no others.
    """
    from numpyro_dp.kernels import prepared, target

    def find_cut(separated, args, kwargs):
        leaves = zip(jax.tree.leaves((args, kwargs)), separated.arguments, strict=True)
        public = tuple(np.asarray(leaf).tobytes() for leaf, argument in leaves if not argument.private)
        key = (id(separated), public, jax.config.jax_enable_x64)
        if key not in _cuts:
            _cuts[key] = separated, original_cut(separated, args, kwargs)
        return _cuts[key][1]

    def survey(of, cut):
        key = (id(cut), of._relation, of.power, target.clipped_sum)  # tests replace the last one
        if key not in _surveys:
            _surveys[key] = original_survey(of, cut)
        _surveys[key]._target = of
        return _surveys[key]

    original_cut, original_survey = prepared.find_cut, prepared.Survey
    monkeypatch.setattr(prepared, "find_cut", find_cut)
    monkeypatch.setattr(prepared, "Survey", survey)


@pytest.fixture(autouse=True)
def _progress_bar_under_xdist(monkeypatch):
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)


@pytest.fixture(params=["float32", "float64"])
def precision(request):
    """Run a test in both precisions."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", request.param == "float64")
    yield request.param
    jax.config.update("jax_enable_x64", before)


@pytest.fixture
def x64():
    """Run a test in float64."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)
