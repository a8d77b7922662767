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
import itertools
import shutil
import sys
import tempfile
import time
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
_PROGRAMS = Path(os.environ.get("NUMPYRO_DP_PROGRAMS", Path(__file__).resolve().parents[1] / "build" / "programs"))
_MOST_PROGRAMS = 20_000


def _compiled_programs(config) -> str:
    """A folder of this process's own with the programs that earlier runs of the tests have compiled.

    Compiling is about half of a first run's time. JAX does not write a program at once, so processes that share a
    folder could read half of one: each has links to the programs, and in the end links to its new ones are left.
    """
    _PROGRAMS.mkdir(parents=True, exist_ok=True)
    if not hasattr(config, "workerinput"):
        _forget_old_programs()
    own = tempfile.TemporaryDirectory(prefix=".", dir=_PROGRAMS)
    config.add_cleanup(own.cleanup)
    config.add_cleanup(lambda: _link_programs(Path(own.name), _PROGRAMS))  # is called first
    _link_programs(_PROGRAMS, Path(own.name))
    return own.name


def _forget_old_programs() -> None:
    """All, if they have become many; and the folders of processes that were killed."""
    programs = [*_PROGRAMS.glob("[!.]*")]
    for program in programs if len(programs) > _MOST_PROGRAMS else ():
        program.unlink(missing_ok=True)  # processes that run keep their own links
    for folder in _PROGRAMS.glob(".*"):
        with contextlib.suppress(OSError):  # another process was quicker
            if time.time() - folder.stat().st_mtime > 24 * 3600:
                shutil.rmtree(folder, ignore_errors=True)


def _link_programs(from_folder: Path, to_folder: Path) -> None:
    for program in from_folder.glob("[!.]*"):
        with contextlib.suppress(OSError):  # it is there already, or another process has emptied the folder
            os.link(program, to_folder / program.name)


def pytest_configure(config):
    gc.set_threshold(100_000, 20, 50)  # to look for garbage took a twentieth of all time
    jax.config.update("jax_compilation_cache_dir", _compiled_programs(config))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # Most tests run on tables from which no posterior can come; tests/tools/test_planning.py is about the warning.
    config.addinivalue_line("filterwarnings", "ignore:this .* will hardly move:UserWarning")
    # Nor does a chain of a few iterations move; tests/kernels/test_kernels.py is about that warning.
    config.addinivalue_line("filterwarnings", "ignore:the posterior is off. a chain stood still:UserWarning")


def _too_many_programs() -> bool:
    """Each compiled program takes pieces of memory of its own, of which Linux allows a process 65,530."""
    mappings = Path("/proc/self/maps")
    return mappings.exists() and mappings.read_bytes().count(b"\n") > _MOST_MAPPINGS


_tests = itertools.count(1)


@pytest.fixture(autouse=True)
def _programs_are_forgotten():
    yield
    if next(_tests) % 10 == 0 and _too_many_programs():  # to look takes some 10 ms
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
    """Runs keep no programs on disk, which hold the table (see `test_leaks`). Here all tables are made up."""
    if request.module.__name__ != "test_leaks":
        monkeypatch.setattr("numpyro_dp.mcmc._no_compilation_cache_on_disk", contextlib.nullcontext)


_compiled: dict = {}
_separated: dict = {}


@pytest.fixture(autouse=True)
def _models_are_separated_once(monkeypatch):
    """Checking a model takes about a second: tests that run kernels on the same model share the result."""
    from numpyro_dp.kernels import reading

    def separate(model, args, kwargs, *options):
        key = (model, reading.signature(args, kwargs), str(options), jax.config.jax_enable_x64)
        if key not in _separated:
            _separated[key] = original(model, args, kwargs, *options)
        return _separated[key]

    original = reading.separate
    monkeypatch.setattr(reading, "separate", separate)


_cuts: dict = {}
_surveys: dict = {}


@pytest.fixture
def shared_surveys(monkeypatch):
    """Compiling a preparation takes seconds: tests that prepare kernels for the same model share the programs.

    They take the rows as arguments, so other rows need no others.
    """
    from numpyro_dp.preparation import begin
    from numpyro_dp.privacy import release

    def find_cut(separated, args, kwargs, enumerates=True):
        leaves = zip(jax.tree.leaves((args, kwargs)), separated.arguments, strict=True)
        public = tuple(np.asarray(leaf).tobytes() for leaf, argument in leaves if not argument.private)
        key = (id(separated), public, enumerates, jax.config.jax_enable_x64)
        if key not in _cuts:
            _cuts[key] = separated, original_cut(separated, args, kwargs, enumerates)
        return _cuts[key][1]

    def survey(of, cut, is_smooth=True):
        replaced = release.clipped_sum, release.Vault._of  # by some tests
        key = (id(cut), is_smooth, of.vault._relation, of.power, replaced)
        if key not in _surveys:
            _surveys[key] = original_survey(of, cut, is_smooth)
        _surveys[key]._target = of
        return _surveys[key]

    original_cut, original_survey = begin.find_cut, begin.Survey
    monkeypatch.setattr(begin, "find_cut", find_cut)
    monkeypatch.setattr(begin, "Survey", survey)
    yield
    for found in _surveys.values():  # programs are kept, and no table
        found._target = None


@pytest.fixture(autouse=True)
def _pictures_are_closed():
    """Pyplot keeps all, and warns of many."""
    yield
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")


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


@pytest.fixture(autouse=True)
def _state_directory(tmp_path, monkeypatch):
    """Where budgets have their witnesses: not in the directory of whoever runs the tests."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
