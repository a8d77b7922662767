"""A model run on shapes alone: its sites, what each is computed from, and the arrays it reads from elsewhere.

The check of a model must not read private values, so it runs the model on abstract arrays and reads everything off the
jaxpr (JAX's record of the computation): which arguments a site's value and log density depend on, and which arrays
come from no argument at all. A jaxpr shows only what JAX computes with; `outside_arrays` finds the rest in the
bytecode of the model.
"""

import contextlib
import dataclasses
import dis
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.interpreters.partial_eval import dce_jaxpr
from numpyro.distributions import biject_to
from numpyro.handlers import seed, substitute, trace
from numpyro.infer.initialization import init_to_uniform
from numpyro.primitives import Messenger

from numpyro_dp.arguments import UnsupportedModelError, abstract, is_array, raise_if, shape_of, take_arrays

Params = dict[str, jax.Array]
Sites = dict[str, "Site"]  # in the order of the model
Shape = tuple[int, ...]


@dataclasses.dataclass
class Site:
    name: str
    kind: str  # "latent", "observed" or "deterministic"
    factor: bool = False
    closed_over: bool = False  # observed with an array that comes from no argument
    plate_sizes: dict[str, int] = dataclasses.field(default_factory=dict)
    shape: Any = ()  # of the value; a tree of shapes where a deterministic site holds a tree
    log_prob_shape: Shape = ()
    depends_on: frozenset[int] = frozenset()  # argument leaves that its log density (or value) is computed from
    value_depends_on: frozenset[int] = frozenset()

    @property
    def plates(self) -> frozenset[str]:
        return frozenset(self.plate_sizes)


@dataclasses.dataclass
class FullTrace:
    """The model at its real shapes."""

    sites: Sites
    prototype: dict[str, np.ndarray]  # zeros in the shapes of the unconstrained parameters
    subsampled: dict[str, tuple[int, int]]  # plate: its size, and how many members it draws
    constants: set[Shape]  # of the arrays that come from no argument


def abstract_trace(model: Callable, args: tuple, kwargs: dict) -> FullTrace:
    """Sites, shapes and dependencies of the model at its real shapes, without evaluating anything."""
    arrays, merge = take_arrays(args, kwargs)
    shapes_in = abstract(arrays)
    prototype = _prototype(model, merge, shapes_in)
    sites: Sites = {}
    subsampled: dict[str, tuple[int, int]] = {}

    def outputs(z: Params, arrays: list) -> dict[str, tuple]:
        """Log density and value of each site; what they are computed from is read off the jaxpr."""

        def constrained(site: dict) -> jax.Array | None:
            is_latent = site["type"] == "sample" and site["name"] in z
            return biject_to(site["fn"].support)(z[site["name"]]) if is_latent else None

        args, kwargs = merge(arrays)
        result = {}
        substituted = substitute(seed(model, 0), substitute_fn=constrained)
        for name, msg in trace(substituted).get_trace(*args, **kwargs).items():
            if msg["type"] == "plate":
                size, subsample = msg["args"]
                if subsample is not None and subsample != size:
                    subsampled[name] = (size, subsample)
            elif msg["type"] in ("sample", "deterministic"):
                site = sites[name] = describe_site(name, msg)
                log_prob = jnp.zeros(())
                if msg["type"] == "sample":
                    log_prob = msg["fn"].log_prob(msg["value"])
                    site.log_prob_shape = jnp.shape(log_prob)
                    if msg["scale"] is not None:
                        log_prob = msg["scale"] * log_prob
                    if site.kind == "latent":
                        jacobian = biject_to(msg["fn"].support).log_abs_det_jacobian(z[name], msg["value"])
                        log_prob = jnp.sum(log_prob) + jnp.sum(jacobian)
                result[name] = (log_prob, msg["value"])
        return result

    closed, shapes_out = jax.make_jaxpr(outputs, return_shape=True)(prototype, shapes_in)
    # The inputs of the jaxpr are the parameters, then the array arguments; its outputs are numbered likewise.
    inputs = [None] * len(prototype) + [k for k, x in enumerate(jax.tree.leaves((args, kwargs))) if is_array(x)]
    numbered = jax.tree.unflatten(jax.tree.structure(shapes_out), range(len(jax.tree.leaves(shapes_out))))
    for name, (log_prob, value) in numbered.items():
        site = sites[name]
        site.value_depends_on = _inputs_of(closed.jaxpr, jax.tree.leaves(value), inputs)
        site.depends_on = _inputs_of(closed.jaxpr, [log_prob], inputs)
        if site.kind != "observed":
            site.depends_on |= site.value_depends_on
    return FullTrace(sites, prototype, subsampled, set(array_constants(closed)))


def _inputs_of(jaxpr: Jaxpr, outputs: Sequence[int], inputs: Sequence[int | None]) -> frozenset[int]:
    """The argument leaves that some outputs are computed from."""
    _, used = dce_jaxpr(jaxpr, [k in outputs for k in range(len(jaxpr.outvars))])
    return frozenset(k for k, flag in zip(inputs, used, strict=True) if flag and k is not None)


def describe_site(name: str, msg: dict) -> Site:
    sample, value = msg["type"] == "sample", msg["value"]
    concrete = isinstance(value, np.ndarray | jax.Array) and not isinstance(value, jax.core.Tracer)
    return Site(
        name=name,
        kind=("observed" if msg["is_observed"] else "latent") if sample else msg["type"],
        factor=sample and bool(msg["infer"].get("is_auxiliary")),
        closed_over=sample and concrete and value.ndim > 0,
        plate_sizes={frame.name: frame.size for frame in msg.get("cond_indep_stack", [])},
        shape=jax.tree.map(jnp.shape, value),
    )


def _prototype(model: Callable, merge: Callable, shapes_in: list) -> dict[str, np.ndarray]:
    """Zeros in the shapes of the unconstrained parameters; refuses sites that no gradient-based kernel has."""

    def latents(arrays: list) -> Params:
        args, kwargs = merge(arrays)
        sites = trace(initialized(model)).get_trace(*args, **kwargs)
        problems = [_unsupported_site(site) for site in sites.values()]
        if not any(site["type"] == "sample" and site["is_observed"] for site in sites.values()):
            problems.insert(0, _NOTHING_OBSERVED)
        raise_if(p for p in problems if p)
        return {
            name: biject_to(site["fn"].support).inv(site["value"])
            for name, site in sites.items()
            if site["type"] == "sample" and not site["is_observed"]
        }

    try:
        shapes = jax.eval_shape(latents, shapes_in)
    except Exception as error:
        if not needs_values(error):
            raise
        raise UnsupportedModelError([branches_on_values(error)]) from None
    if not shapes:
        raise UnsupportedModelError(["the model has no latent site: there is nothing to infer"])
    return {name: np.zeros(s.shape, s.dtype) for name, s in shapes.items()}


def initialized(model: Callable) -> Callable:
    """The model with some value at each latent site."""

    def value(site: dict) -> jax.Array | None:
        return init_to_uniform(site) if site["type"] == "sample" and site["value"] is None else None

    return substitute(seed(_not_random(model), 0), substitute_fn=value)


_NOTHING_OBSERVED = (
    "no site of the model is observed: pass the outcomes as an argument of the model and give them to `obs=`"
)


def _unsupported_site(msg: dict) -> str | None:
    name = msg["name"]
    if msg["type"] in ("param", "mutable"):
        return (
            f"'{name}' is a numpyro.{msg['type']} site, which has no prior: make it a `numpyro.sample` site, "
            "or pass its value as an argument"
        )
    if msg["type"] == "sample" and not msg["is_observed"] and msg["fn"].support.is_discrete:
        return (
            f"latent site '{name}' is discrete: give it its data with `obs=` if it is an outcome, else sum it out by "
            "hand (for a mixture, `MixtureSameFamily`); only continuous parameters are sampled"
        )
    return None


_VALUE_ERRORS = (
    jax.errors.TracerBoolConversionError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
)


def needs_values(error: Exception) -> bool:
    """Whether an error says that Python asked for a value that is not known while tracing."""
    return isinstance(error, _VALUE_ERRORS) or (isinstance(error, TypeError) and "concrete values" in str(error))


def branches_on_values(error: Exception) -> str:
    return (
        f"the model needs the values of an array argument in Python ({type(error).__name__}): a branch, an index, a "
        "size such as `len(np.unique(g))`, or a NumPy function applied to it. Compute sizes beforehand and pass them "
        "as numbers; use jax.numpy, `jnp.where` or `handlers.mask` instead of Python branches"
    )


# -- Handlers ----------------------------------------------------------------------------------------------------------


class _not_random(Messenger):
    """Refuse a model that draws random numbers by itself."""

    def process_message(self, msg):
        if msg["type"] == "prng_key":
            raise UnsupportedModelError(
                [
                    "the model draws random numbers (it calls `numpyro.prng_key`, or a handler such as `block` hides a "
                    "latent site), but a density must not be random: pass a key as an argument, or observe the site"
                ]
            )


class keep_sites(Messenger):
    """Mask the density of every sample site but those that `keep` names, and give the row plates `size` members.

    A row plate's size may be written as a number in the model; the plate rescales its sites when told of another
    number of members, which is undone here.
    """

    def __init__(self, fn: Callable, keep: Callable[[str], bool], row_plates: frozenset[str], size: int):
        self.keep, self.row_plates, self.size = keep, row_plates, size
        self._written_sizes: dict[str, int] = {}
        super().__init__(fn)

    def process_message(self, msg):
        if msg["type"] == "plate" and msg["name"] in self.row_plates:
            self._written_sizes[msg["name"]] = msg["args"][0]
            msg["args"], msg["value"] = (self.size, None), jnp.arange(self.size)
        elif msg["type"] == "sample":
            for frame in msg["cond_indep_stack"]:
                written = self._written_sizes.get(frame.name, self.size)
                if written != self.size:
                    msg["scale"] = msg["scale"] / (written / self.size)
            if not self.keep(msg["name"]):
                msg["fn"] = msg["fn"].mask(False)


# -- Arrays that come from no argument ---------------------------------------------------------------------------------


def array_constants(jaxpr: Any) -> Iterator[Shape]:
    """Shapes of all arrays that the traced function closes over, however deep they sit."""
    if isinstance(jaxpr, ClosedJaxpr):
        yield from (np.shape(const) for const in jaxpr.consts if np.ndim(const))
        jaxpr = jaxpr.jaxpr
    for eqn in jaxpr.eqns:
        for var in eqn.invars:
            if isinstance(var, Literal) and np.ndim(var.val):
                yield np.shape(var.val)
        for param in jax.tree.leaves(eqn.params, is_leaf=lambda p: isinstance(p, ClosedJaxpr | Jaxpr)):
            if isinstance(param, ClosedJaxpr | Jaxpr):
                yield from array_constants(param)


def outside_arrays(model: Callable, passed: set[str]) -> Iterator[tuple[str, Shape]]:
    """Names and shapes of what looks like an array in a model's globals, closure, defaults, partials or object.

    The jaxpr shows arrays that JAX computes with; this also finds those that NumPy or pandas reduce while it is traced.

    :param passed: the parameters of the model that are given a value, whose defaults are not used.
    """
    outside: dict[str, Any] = {}
    while isinstance(model, Messenger | functools.partial):
        if isinstance(model, functools.partial):
            outside |= {f"args[{k}] of the partial": value for k, value in enumerate(model.args)} | model.keywords
            model = model.func
        else:
            model = model.fn
    owner = getattr(model, "__self__", None if inspect.isfunction(model) else model)
    function = inspect.unwrap(model if inspect.isroutine(model) else type(model).__call__)
    function = getattr(function, "__func__", function)
    if inspect.isfunction(function):
        defaults = {name: p.default for name, p in inspect.signature(function).parameters.items()}
        outside |= {name: value for name, value in defaults.items() if name not in passed}
        outside |= _read_by(function, owner)
    for name, value in outside.items():
        for leaf in jax.tree.leaves(value):
            if not callable(leaf) and shape_of(leaf):
                yield name, shape_of(leaf)


def _read_by(function: types.FunctionType, owner: Any) -> dict[str, Any]:
    """Globals, closed-over variables and attributes of `owner` that a function and its module's functions read."""
    read: dict[str, Any] = {}
    todo, seen = [function], set()
    while todo:
        current = todo.pop()
        seen.add(current)
        names = set(_loaded_names(current.__code__, "LOAD_GLOBAL"))
        found = {name: current.__globals__[name] for name in names & current.__globals__.keys()}
        if owner is not None:
            for operation in ("LOAD_ATTR", "LOAD_METHOD"):
                attributes = _loaded_names(current.__code__, operation)
                found |= {name: inspect.getattr_static(owner, name, None) for name in attributes}
        for name, cell in zip(current.__code__.co_freevars, current.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # an empty cell
                found[name] = cell.cell_contents
        helpers = [f for f in found.values() if inspect.isfunction(f) and f.__module__ == function.__module__]
        todo += [f for f in helpers if f not in seen]
        read |= found
    return read


def _loaded_names(code: types.CodeType, operation: str) -> Iterator[str]:
    """Names that a function, or a function defined within it, loads by an operation of the interpreter."""
    yield from (i.argval for i in dis.get_instructions(code) if i.opname == operation)
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _loaded_names(const, operation)
