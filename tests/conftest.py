"""Two CPU devices for parallel chains, and float64 on request. Warnings are errors (pyproject.toml)."""

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MPLBACKEND", "Agg")
# Programs from the cache on disk (below) are said to be for a machine with "prefer-no-gather", which none has: two long
# lines for each, in which a failing test's output would be lost.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# NumPyro switches its progress bar off where it sees these.
os.environ.pop("CI", None)

import contextlib
import gc
import re
import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import settings

# The same examples in each run: what fails is what was changed. `--hypothesis-profile=search` looks for new ones.
settings.register_profile("everyday", derandomize=True, deadline=None)
settings.register_profile("search", deadline=None)
settings.load_profile("everyday")

_MOST_MAPPINGS = 20_000


def pytest_configure(config):
    # Tests compile the same small programs again and again. Each process has a cache of its own: writing is not atomic.
    cache = tempfile.TemporaryDirectory(prefix="numpyro_dp-programs-")
    config.add_cleanup(cache.cleanup)
    jax.config.update("jax_compilation_cache_dir", cache.name)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # Most tests run on tables from which no posterior can come; tests/test_planning.py is about the warning.
    config.addinivalue_line("filterwarnings", "ignore:this .* will hardly move:UserWarning")


def _too_many_programs() -> bool:
    """Each compiled program takes pieces of memory of its own, of which Linux allows a process 65,530."""
    mappings = Path("/proc/self/maps")
    return mappings.exists() and mappings.read_bytes().count(b"\n") > _MOST_MAPPINGS


@pytest.fixture(autouse=True)
def _programs_are_forgotten():
    yield
    if _too_many_programs():
        for cache in (_separated, _cuts, _surveys):
            cache.clear()
        jax.clear_caches()
        gc.collect()


@pytest.fixture(autouse=True)
def _programs_are_compiled_quickly(request):
    """Most of the time of most tests is the compiler's, and a third of it goes where its work is left out.

    Tests that run for longer than they compile, and those about the last bit, have programs as users have them.
    """
    quickly = request.node.get_closest_marker("optimized") is None
    if _compiled.setdefault("quickly", not quickly) != quickly:
        _compiled["quickly"] = quickly
        jax.config.update("jax_disable_most_optimizations", quickly)
        _surveys.clear()


@pytest.fixture(autouse=True)
def _programs_are_kept(request, monkeypatch):
    """Runs keep no programs on disk, which hold the table; see tests/test_leaks.py. Here all tables are made up."""
    if request.module.__name__ != "test_leaks":
        monkeypatch.setattr("numpyro_dp.mcmc._no_compilation_cache_on_disk", contextlib.nullcontext)


_compiled: dict = {}
_separated: dict = {}


@pytest.fixture(autouse=True)
def _models_are_separated_once(monkeypatch):
    """Checking a model takes about a second: tests that run kernels on the same model share the result."""
    from numpyro_dp.kernels import base

    def separate(model, args, kwargs, *options):
        key = (model, base._signature(args, kwargs), str(options), jax.config.jax_enable_x64)
        if key not in _separated:
            _separated[key] = original(model, args, kwargs, *options)
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


# Run with the slow tests only, since others show the same every day: by another kernel, driver or model. The everyday
# tests must stay quick enough to be run often.
SHOWN_BY_OTHERS = re.compile(
    r"""
    test_kernels.py::(?!test_runs_and_moves\[|test_the_chain_goes_on_over_hostile_rows)\w+\[(.*-)?hmc\]
    | test_kernels.py::test_runs_and_moves_in_float64\[penalty_prepared\]
    | test_kernels.py::test_every_chain_method_gives\w+\[numpyro_dp-(sequential|vmap)-(sgld_poisson|penalty_prepared)\]
    | test_kernels.py::test_warmup_then_run_is_one_run\[numpyro-penalty\]
    | test_kernels.py::test_one_budget_one_table\[penalty_prepared\]
    | test_kernels.py::test_copies_have_no_budget\[(copy|deepcopy)-penalty_prepared\]
    | test_kernels.py::test_the_budget_cannot_be_overrun_by_the_stock_mcmc\[(parallel|vectorized)-penalty_prepared\]
    | test_kernels.py::test_random_keys_are_never_reused\[penalty_prepared\]
    | test_kernels.py::test_(one_trace_for|every_chain_method|options_of_mcmc|copies_have)\w+\[(.*-)?penalty_prepared\]
    | test_leaks.py::test_everything_released_is\w+\[(?!penalty-)
    | test_leaks.py::test_(pickles_hold_no_row|no_row_can_be_reached|also_in_the_stock_mcmc)\w*\[(?!penalty\])
    | test_taint.py::test_everything_handed_out\w+\[(?!hmc\]|penalty\])
    | test_owners_chain.py::
    | test_exponential_family.py::test_every_chain_method_gives_the_same_chains\[parallel\]
    | test_exponential_family.py::(test_it_runs_moves_and_spends\w+\[float64\]|test_the_number_of_passes_does_not)
    | test_statistics.py::test_noise_leaves_the_exact_posterior_invariant_quick\[(?!hmc_position\])
    | test_statistics.py::test_(chains_of_models_with_latent|latent_memberships_are|gaussian_noise_alone)
    | test_statistics.py::test_(acceptance_tends_to_one|without_the_penalty)\w+\[(?!position\]|hmc\])
    | test_model.py::test_potential_is_that_of_numpyros_hmc\[(membership_marked|repeated_measures)\]
    | test_model.py::test_prior_plus_rows_is_the_model\[\w+-float64\]
    | test_audit.py::test_one_iteration_costs_no_more_than_claimed_and_half_the_noise_is_noticed\[(family_add|hmc)\]
    | test_chains.py::test_noise_leaves_the_stated_target_invariant\[residual\]
    | test_cut.py::test_ordered_and_bounded_values_are_not_left
    """,
    re.VERBOSE,
)


STATISTICAL = {
    "test_audit",
    "test_audit_runs",
    "test_calibration",
    "test_chains",
    "test_exponential_family",
    "test_statistics",
    "test_stochastic_gradient",
}
"""Files whose slow tests are about laws: .ci/run has them, and .ci/nightly the other slow tests, which are variants."""


def pytest_collection_modifyitems(items):
    for item in items:
        if SHOWN_BY_OTHERS.search(item.nodeid):
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("slow"):
            item.add_marker("statistical" if item.module.__name__ in STATISTICAL else "nightly")
