"""Everything that a run hands out, by path, in a world where all but the rows is the same."""

import collections
import contextlib
import functools
import gc
import hashlib
import inspect
import io
import itertools
import logging
import pickle
import re
import shutil
import sys
import typing
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import arviz
import jax
import numpy as np
import numpyro
import numpyro.infer
import numpyro.infer.mcmc
import numpyro.util
import pytest

import numpyro_dp
import numpyro_dp.chain.target
import numpyro_dp.kernels.reading
import numpyro_dp.mcmc
import numpyro_dp.preparation.begin
import numpyro_dp.privacy.accounting
import numpyro_dp.privacy.budget
import numpyro_dp.privacy.noise
import numpyro_dp.tools.sums
from helpers.configurations import (
    Configuration,
    InFolder,
    Tables,
)
from helpers.constant_sums import SECRET, ConstantSums, constant_moments, constant_sum
from numpyro_dp import (
    MCMC,
    PrivacyBudget,
    to_arviz,
)
from numpyro_dp.kernels.base import DPKernel
from numpyro_dp.kernels.state import DPState
from numpyro_dp.model.separate import separate
from numpyro_dp.plots import plot_posteriors

# -- The same randomness, and sums that are constants ------------------------------------------------------------------

_known: dict[tuple, Any] = {}
"""What takes long to make and is made once for each table. Never for both: what one left behind would hide there."""


@pytest.fixture(scope="module", autouse=True)
def _known_is_forgotten():
    yield
    _known.clear()


@pytest.fixture(name="stubbed")
def _stubbed(same_world, monkeypatch):
    """The mechanism, told nothing."""
    release = numpyro_dp.privacy.release
    monkeypatch.setattr(release, "StructuredRows", ConstantSums)
    monkeypatch.setattr(release, "clipped_sum", constant_sum)
    monkeypatch.setattr(release, "clipped_moments", constant_moments)
    return same_world


@pytest.fixture(name="same_world")
def _same_world(monkeypatch, tmp_path):
    """Randomness, time and paths that are the same in every run."""
    reading, begin = numpyro_dp.kernels.reading, numpyro_dp.preparation.begin
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "run" / "state"))
    now = numpyro_dp.privacy.budget.datetime.datetime(2000, 1, 1)
    clock = SimpleNamespace(UTC=None, datetime=SimpleNamespace(now=lambda zone: now))
    monkeypatch.setattr(numpyro_dp.privacy.budget, "datetime", clock)
    # Progress bars that are drawn after each iteration, and not because time has passed; as wide as they like.
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(numpyro.util.tqdm, "trange", functools.partial(numpyro.util.tqdm.trange, mininterval=0))
    monkeypatch.setattr(numpyro.util.tqdm.tqdm, "monitor_interval", 0)
    of_plans = functools.cache(numpyro_dp.privacy.accounting.composed_eps)  # often of the same
    monkeypatch.setattr(numpyro_dp.privacy.accounting, "composed_eps", of_plans)
    world = SimpleNamespace(table=None, folder=tmp_path / "run")

    def once(make: Callable, *key: Any) -> Any:
        key = (world.table, jax.config.jax_enable_x64, *key)
        if key not in _known:
            _known[key] = make()
        return _known[key]

    def separate_once(model, args, kwargs, *options):
        kinds = tuple(map(type, jax.tree.leaves((args, kwargs))))
        key = "model", model, reading.signature(args, kwargs), kinds, str(options)
        return once(lambda: separate(model, args, kwargs, *options), *key)

    def cut_once(separated, args, kwargs, *options):
        return once(lambda: (find_cut(separated, args, kwargs, *options), separated), "cut", id(separated), *options)[0]

    def survey_once(of, cut, is_smooth):
        key = "survey", id(cut.coordinates), id(cut.row_log_density), is_smooth, of.vault._relation, of.power
        found = once(lambda: (survey(of, cut, is_smooth), cut), *key)[0]
        found._target = of
        return found

    find_cut, survey = begin.find_cut, begin.Survey
    monkeypatch.setattr(reading, "separate", separate_once)
    monkeypatch.setattr(begin, "find_cut", cut_once)
    monkeypatch.setattr(begin, "Survey", survey_once)
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)  # compiling takes longer than running
    yield world
    jax.config.update("jax_disable_most_optimizations", before)


# -- What is compared --------------------------------------------------------------------------------------------------

ADDRESS = re.compile(r"0x[0-9a-f]{6,}")
OF_TIME = re.compile(r"\d+:\d\d(:\d\d)?<[^,]*, *[\d.?]+(it/s|s/it)|[\d.?]+(it/s|s/it)|\[\d+:\d\d(:\d\d)?\]")
FOREIGN = ("jax", "jaxlib", "numpy", "scipy", "threading", "_thread", "weakref", "concurrent", "queue", "xarray")


def plain_text(text: str) -> str:
    return OF_TIME.sub("", ADDRESS.sub("0x", text))


def root_of(thing: Any) -> str:
    return str(getattr(thing, "__module__", None) or "").split(".")[0]


def contents(thing: Any, path: str, seen: dict[int, Any]) -> Iterator[tuple[str, Any]]:
    """Whatever can be read off it, closures and private attributes included: by path, as values that can be compared.

    :param seen: everything met so far, which is kept alive, since a new object may get the `id` of a dead one.
    """
    kind = type(thing)
    if thing is None or kind in (bool, int, float, complex, str, bytes):
        yield path, plain_text(thing) if kind is str else repr(thing)
        return
    if id(thing) in seen:
        return
    seen[id(thing)] = thing
    if isinstance(thing, np.ndarray | np.generic | jax.Array):
        yield path, bits_of(thing)
    elif isinstance(thing, BaseException):
        yield path, (kind.__qualname__, plain_text(str(thing)))
        yield from contents((thing.args, vars(thing)), f"{path}.args", seen)
    elif isinstance(thing, type | ModuleType | weakref.ref | re.Pattern):
        yield path, f"{kind.__name__} {getattr(thing, '__qualname__', '')}"
    else:
        yield path, kind.__qualname__
        for name, part in parts_of(thing):
            yield from contents(part, f"{path}{name}", seen)


def bits_of(array: Any) -> tuple:
    if isinstance(array, jax.core.Tracer):
        return ("a tracer", str(array.aval))
    if isinstance(array, jax.Array):
        if array.is_deleted():
            return ("a deleted array",)
        if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
            array = jax.random.key_data(array)
    array = np.asarray(array)
    return str(array.dtype), array.shape, repr(array.tolist()) if array.dtype == object else array.tobytes()


def parts_of(thing: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(thing, FunctionType):
        if root_of(thing) in FOREIGN:
            return
        yield ".name", thing.__qualname__
        for k, cell in enumerate(thing.__closure__ or ()):
            with contextlib.suppress(ValueError):  # an empty cell
                yield f".{thing.__code__.co_freevars[k]}", cell.cell_contents
        yield ".defaults", (thing.__defaults__, thing.__kwdefaults__, vars(thing))
    elif isinstance(thing, MethodType):
        yield ".self", thing.__self__
        yield ".function", thing.__func__
    elif isinstance(thing, functools.partial):
        yield ".partial", (thing.func, thing.args, thing.keywords)
    elif is_jitted(thing):
        yield ".jitted", thing.__wrapped__
    elif isinstance(thing, Mapping):
        for key, value in thing.items():
            name = plain_text(repr(key)) if isinstance(key, str | int | bytes | tuple | bool) else type(key).__name__
            yield f"[{name}]", value
            if isinstance(key, tuple):
                yield f"[key {name}]", key
    elif isinstance(thing, set | frozenset):
        yield "", sorted(plain_text(repr(item)) for item in thing)
    elif isinstance(thing, list | tuple | collections.deque):
        names = getattr(thing, "_fields", None)
        yield from ((f".{names[k]}" if names else f"[{k}]", item) for k, item in enumerate(thing))
    elif isinstance(thing, Path):
        yield "", str(thing)
    if root_of(type(thing)) not in FOREIGN and not isinstance(thing, FunctionType | Path):
        slots = [name for base in type(thing).__mro__ for name in getattr(base, "__slots__", ())]
        for name in dict.fromkeys([*getattr(thing, "__dict__", ()), *slots]):
            with contextlib.suppress(AttributeError):
                yield f".{name}", getattr(thing, name)


def is_jitted(thing: Any) -> bool:
    return type(thing).__name__ == "PjitFunction"


def properties_of(thing: Any) -> dict[str, Any]:
    """Values of all public properties, whatever their names are."""
    found = {}
    for name in dir(type(thing)):
        if not name.startswith("_") and isinstance(inspect.getattr_static(type(thing), name), property):
            try:
                found[name] = getattr(thing, name)
            except Exception as error:
                found[name] = told(error)
    return found


def told(error: BaseException) -> tuple[str, str]:
    """An error without its frames, which hold the table."""
    return type(error).__qualname__, str(error)


def pickled(**things: Any) -> tuple[dict[str, bytes], dict[str, Any]]:
    """The bytes of pickles, and what is in them: equal things may be pickled in several ways."""
    made, again = {}, {}
    for name, thing in things.items():
        try:
            made[name] = pickle.dumps(thing)
            again[name] = without_frames(pickle.loads(made[name]))
        except Exception as error:  # a function that has no name, a typed key
            again[name] = told(error)
    return made, again


def without_frames(thing: Any) -> Any:
    """Where Dask has been imported, errors are pickled with the lines that they came by, which hold no values.

    Unpickled, these are frames, and behind them that of whoever unpickles.
    """
    error = thing
    while isinstance(error, BaseException):
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
    return thing


def inference_data(idata: Any) -> dict[str, Any]:
    """All groups: attributes, coordinates and variables."""
    names = idata.groups() if callable(idata.groups) else [g.strip("/") for g in idata.groups if g != "/"]
    groups = {"": getattr(idata, "attrs", {})}
    for name in names:
        group = idata[name]
        groups[name] = {
            "attributes": {key: value for key, value in group.attrs.items() if key != "created_at"},
            "variables": {key: (value.dims, np.asarray(value)) for key, value in group.variables.items()},
        }
    return groups


def modules_of_the_package() -> list[ModuleType]:
    return [module for name, module in sys.modules.items() if name.split(".")[0] == "numpyro_dp"]


def globals_of(module: ModuleType) -> dict[str, Any]:
    """But those that lead to the import system, and from there everywhere."""
    foreign = ("__loader__", "__spec__", "__builtins__")
    return {name: value for name, value in vars(module).items() if name not in foreign}


def package_state() -> dict[str, Any]:
    """What the package itself remembers: globals of its modules, attributes of its classes, caches of its functions."""
    found = {}
    for module in modules_of_the_package():
        for name, value in globals_of(module).items():
            path = f"{module.__name__}.{name}"
            if name == "__warningregistry__":  # but for how often the filters have changed
                found[path] = sorted(plain_text(str(key)) for key in value if key != "version")
            elif is_cached(value):
                found[path] = sorted(str(list(contents(part, "", {}))) for part in remembered_by(value))
            elif inspect.isclass(value) and value.__module__ == module.__name__:
                found[path] = {key: part for key, part in vars(value).items() if not key.startswith("__")}
            elif inspect.isclass(value) or not hasattr(value, "__module__") or root_of(value) == "numpyro_dp":
                found[path] = value
    return found


def is_cached(thing: Any) -> bool:
    return type(thing).__name__ == "_lru_cache_wrapper"


def remembered_by(cached: Any) -> list:
    """Arguments and results that a cached function keeps."""
    known = (dict, tuple, list, int, float, np.ndarray)
    return [part for part in gc.get_referents(cached) if isinstance(part, known) and part is not vars(cached)]


# -- What is kept alive ------------------------------------------------------------------------------------------------


def reachable(roots: Mapping[str, Any]) -> Iterator[tuple[Any, Callable[[], str]]]:
    """All that the garbage collector reaches from there, tracebacks with their frames included, and the way to it.

    Modules and classes of others, and what only the caches of JAX hold, are not entered.
    """
    globals_of_modules = {id(vars(module)) for module in sys.modules.values() if isinstance(module, ModuleType)}
    queue: list[tuple] = [(thing, name, None) for name, thing in roots.items()]
    seen: dict[int, Any] = {}
    while queue:
        item = queue.pop()
        thing = item[0]
        if id(thing) in seen:
            continue
        seen[id(thing)] = thing
        yield thing, functools.partial(way_to, item)
        queue.extend((part, name, item) for name, part in held_by(thing) if id(part) not in globals_of_modules)


def held_by(thing: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(thing, np.ndarray):
        yield "", thing.base
    elif is_jitted(thing):
        yield "", thing.__wrapped__
    elif is_cached(thing):
        yield from (("", part) for part in remembered_by(thing))
    elif inspect.isclass(thing):
        yield from vars(thing).items() if root_of(thing) == "numpyro_dp" else ()
    elif not isinstance(thing, ModuleType) and not type(thing).__module__.startswith("jaxlib"):
        yield from (("", part) for part in gc.get_referents(thing))
        named = thing if isinstance(thing, dict) else getattr(thing, "__dict__", {})  # last, and so entered first
        yield from ((key if isinstance(key, str) else "", value) for key, value in named.items())


def way_to(item: tuple | None) -> str:
    steps = []
    while item is not None:
        thing, name, item = item
        steps.append(f"{name or ''} ({type(thing).__qualname__})")
    return " in ".join(steps)


def rows_kept(roots: Mapping[str, Any], table: Mapping[str, Any], public: Iterable[str] = ()) -> list[str]:
    """Ways to private arrays, views and copies of them, and to numbers, texts and bytes that show a value of a row."""
    private = [array for name, array in table.items() if name not in public]
    package = {module.__name__: globals_of(module) for module in modules_of_the_package()}
    found = []
    for thing, way in reachable(roots | package):
        if isinstance(thing, str):
            kept = str(SECRET)[:6] in thing
        elif isinstance(thing, bytes):
            kept = any(np.array(SECRET, dtype).tobytes() in thing for dtype in (np.float32, np.float64))
        elif isinstance(thing, float):
            kept = abs(thing - SECRET) < 1e-3
        elif isinstance(thing, np.ndarray):
            kept = is_copied(thing, private) or any(np.may_share_memory(thing, array) for array in private)
        elif isinstance(thing, jax.Array) and not isinstance(thing, jax.core.Tracer):
            kept = not thing.is_deleted() and is_copied(thing, private)
        else:
            kept = False
        if kept:
            found.append(way())
    return found


def is_copied(array: Any, private: list[np.ndarray]) -> bool:
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key) or not np.issubdtype(array.dtype, np.number):
        return False
    values = np.asarray(array)
    return bool(np.isclose(values, SECRET).any()) or any(
        values.shape == part.shape and np.array_equal(values, part) for part in private
    )


# -- A run, and all that it hands out ----------------------------------------------------------------------------------


class Run(typing.NamedTuple):
    """What a run handed out, by name; what it left behind; and the table that it was on."""

    released: dict[str, Any]
    left: dict[str, Any]
    table: dict[str, Any]


def observe(world: SimpleNamespace, tables: Tables, which: int, do: Callable, x64: bool = False) -> Run:
    """Everything that `do` hands out, on one of two tables. It returns that by name, and what it leaves behind."""
    table = (tables.first, tables.second)[which]()
    world.table = which
    world.folder.mkdir()
    text, log = io.StringIO(), Records()
    before = jax.config.jax_enable_x64
    with contextlib.ExitStack() as stack:
        jax.config.update("jax_enable_x64", x64)
        stack.callback(jax.config.update, "jax_enable_x64", before)
        stack.enter_context(contextlib.chdir(world.folder))
        stack.enter_context(the_same_entropy())
        stack.enter_context(log.kept())
        warned = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        stack.enter_context(contextlib.redirect_stdout(text))
        stack.enter_context(contextlib.redirect_stderr(text))
        released, left = do(world.folder, table)
    released |= {
        "text": text.getvalue(),
        "warnings": [(w.category.__name__, str(w.message), w.source) for w in warned],
        "log": [(r.name, r.levelname, r.getMessage(), r.exc_text) for r in log.records],
        "files": {str(p.relative_to(world.folder)): p.read_bytes() for p in world.folder.rglob("*") if p.is_file()},
        "package": dict(contents(package_state(), "", {})),  # now: the next run goes on from there
    }
    shutil.rmtree(world.folder)
    # JAX logs errors with their frames.
    own = [record for record in log.records if record.name.startswith("numpyro_dp")]
    return Run(released, left | {"warned": warned, "log": own}, table)


@contextlib.contextmanager
def the_same_entropy() -> Iterator[None]:
    """Operating systems that draw the same in every run."""
    drawn, named = itertools.count(), itertools.count()
    system = SimpleNamespace(urandom=lambda size: hashlib.shake_256(b"%d" % next(drawn)).digest(size))
    uuid = SimpleNamespace(uuid4=lambda: SimpleNamespace(hex=f"{next(named):032x}"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numpyro_dp.privacy.noise, "os", system)
        patch.setattr(numpyro_dp.privacy.budget, "uuid", uuid)
        yield


class Records(logging.Handler):
    """Log records of every logger that lets them through."""

    def __init__(self):
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record):
        self.records.append(record)

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        logging.getLogger().addHandler(self)
        try:
            yield
        finally:
            logging.getLogger().removeHandler(self)


def run(configuration: Configuration, folder: Path, table: dict[str, Any]) -> tuple[dict, dict]:
    """What a run hands out, by name, and what it leaves behind."""
    options = {k: v.make(folder) if isinstance(v, InFolder) else v for k, v in configuration.options.items()}
    kernel = configuration.kernel(configuration.tables.model, **options)
    settings = {"num_warmup": 2, "num_samples": 4, "progress_bar": False} | configuration.mcmc
    mcmc = (numpyro.infer.MCMC if configuration.stock else MCMC)(kernel, **settings)
    first, named = next(iter(table.values())), dict(list(table.items())[1:])
    released, left = {}, {"begun with": None if configuration.stock else mcmc, "kernel": kernel}

    sites = configuration.tables.sites
    uncollected = {"z", "rng_key"} if configuration.typed_key else {"z"}  # NumPyro cannot collect typed keys
    fields = [*(field for field in DPState._fields if field not in uncollected), *(f"z.{site}" for site in sites)]
    asked = dict(configuration.run)
    asked["extra_fields"] = (*fields, *asked.get("extra_fields", ()))
    if not configuration.own_start:
        shape = (settings["num_chains"],) if settings.get("num_chains", 1) > 1 else ()
        asked["init_params"] = {site: np.full(shape, 0.1) for site in sites}
    key = (jax.random.key if configuration.typed_key else jax.random.PRNGKey)(0)
    if configuration.warmup is not None:
        mcmc.warmup(key, first, **named, **configuration.warmup)
        released["warmup"] = mcmc.get_samples(), mcmc.get_extra_fields(), mcmc.post_warmup_state
        asked.pop("init_params", None)
    mcmc.run(key, first, **named, **asked)
    if configuration.then is not None:
        released["first run"] = mcmc.get_samples(), mcmc.get_extra_fields(), mcmc.last_state
        if configuration.then == "resume":
            mcmc = pickle.loads(pickle.dumps(mcmc))
            mcmc.resume(PrivacyBudget(folder / "table.budget"))
        mcmc.post_warmup_state = mcmc.last_state
        asked.pop("init_params", None)
        mcmc.run(mcmc.last_state.rng_key, first, **named, **asked)

    for handed, kept in (of_draws(mcmc), of_kernel(mcmc.sampler, (first,), named), of_results(mcmc, configuration)):
        released |= handed
        left |= kept
    if not configuration.stock:  # NumPyro's keeps the table, and ArviZ would run the model on it
        left["mcmc"] = mcmc
        left["pickle of mcmc"], released["pickle of mcmc"] = pickled(mcmc=mcmc)
        released |= {"mcmc": mcmc, "properties of mcmc": properties_of(mcmc)}
        released["from_numpyro"] = inference_data(arviz.from_numpyro(mcmc))
    if (budget := options.get("budget")) is not None:
        print(budget)
        released["budget"] = budget, properties_of(budget), budget.eps_left_at(1e-7)
    if hasattr(owner := options.get("owners"), "close"):
        owner.close()
        released["sent to other owners"] = owner.sent
    return released, left


def of_draws(mcmc: Any) -> tuple[dict, dict]:
    mcmc.print_summary()
    return {
        "samples": (mcmc.get_samples(), mcmc.get_samples(group_by_chain=True)),
        "extra fields": (mcmc.get_extra_fields(), mcmc.get_extra_fields(group_by_chain=True)),
        "last state": mcmc.last_state,
        "diagnostics": mcmc.sampler.get_diagnostics_str(mcmc.last_state) if mcmc.num_chains == 1 else None,
    }, {}


def of_kernel(kernel: DPKernel, args: tuple, kwargs: dict) -> tuple[dict, dict]:
    report, prepared = kernel.privacy, getattr(kernel, "prepared", None)
    print(kernel, kernel.model, prepared, repr(report))
    pickles, unpickled = pickled(kernel=kernel, report=report, prepared=prepared)
    methods = report.guarantee(), report.to_dict(), report.to_json(), report.eps_at(0.01)
    methods += report.methods(), report.brief(), report.to_registry(), report.label_html()
    return {
        "kernel": kernel,
        "properties of the kernel": {name: of for name, of in properties_of(kernel).items() if name != "algorithm"},
        "the kernel's algorithm": kernel.algorithm,
        "pickles": unpickled,
        "without data": kernel.without_data(args, kwargs),
        "postprocess": kernel.postprocess_fn(args, kwargs),
        "report": report,
        "properties of the report": properties_of(report),
        "methods of the report": (str(report), *methods),
    }, {"report": report, "pickles": pickles}


def of_results(mcmc: Any, configuration: Configuration) -> tuple[dict, dict]:
    idata = to_arviz(mcmc)
    print(mcmc, arviz.summary(idata))
    released, left = {"arviz": inference_data(idata)}, {"idata": idata}
    if "figure" in configuration.parts:
        panels = plot_posteriors({"run": idata, "samples": mcmc.get_samples()})
        left["figure"] = panels[0].figure
        released["figure"] = picture(left["figure"])
    return released, left


def picture(figure: Any) -> tuple:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=40)
    return buffer.getvalue(), [text.get_text() for text in figure.findobj(lambda artist: hasattr(artist, "get_text"))]


def observe_run(world: SimpleNamespace, configuration: Configuration, tables: Tables, which: int) -> Run:
    return observe(world, tables, which, functools.partial(run, configuration), configuration.x64)


def differences(first: Run, second: Run, without: Iterable[str] = ()) -> list[str]:
    """Paths at which what was handed out differs."""
    found = []
    for released in (first.released, second.released):
        by_path: dict[str, list] = {}
        for name, thing in released.items():
            if name not in without:
                # Each of them anew: a leak is then found in all the places where it shows.
                for path, value in contents(thing, name, {}):
                    by_path.setdefault(path, []).append(value)
        found.append(by_path)
    one, other = found
    assert len(one) > 100
    return [path for path in sorted(one.keys() | other.keys()) if one.get(path) != other.get(path)]


IN_MEMORY = ("mcmc", "kernel", "the kernel's algorithm", "properties of mcmc", "postprocess", "package")
"""Holds shapes, which stay with the curator; pickles, texts and all else that leaves the process does not."""
