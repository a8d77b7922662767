"""Two CPU devices for parallel chains, and float64 on request. Warnings are errors (pyproject.toml)."""

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MPLBACKEND", "Agg")
# NumPyro switches its progress bar off where it sees these.
os.environ.pop("CI", None)

import jax
import pytest


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
