"""A model run on shapes alone: its sites, what each is computed from, and the arrays it reads from elsewhere.

The check of a model must not read private values, so it runs the model on abstract arrays and reads everything off the
jaxpr (JAX's record of the computation): which arguments a site's value and log density depend on, and which arrays come
from no argument at all. A jaxpr shows only what JAX computes with; `numpyro_dp.model.outside` finds the rest in the
bytecode of the model.

Discrete latents of a row (a mixture's membership) are summed out: here stand the handlers that fix them, and those
that enumerate them with NumPyro's funsor back end, which is imported only where a model has such latents.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from jax.interpreters.partial_eval import dce_jaxpr
from numpyro.distributions import biject_to
from numpyro.handlers import block, condition, infer_config, seed, substitute, trace
from numpyro.infer.initialization import init_to_uniform
from numpyro.primitives import Messenger

from numpyro_dp.model.arguments import (
    Argument,
    UnsupportedModelError,
    abstract,
    canonical,
    describe_place,
    is_array,
    quote,
    raise_if,
    take_arrays,
)

Params = dict[str, jax.Array]
Sites = dict[str, "Site"]  # in the order of the model
Shape = tuple[int, ...]


@dataclasses.dataclass
class Site:
    name: str
    kind: str  # "latent" (continuous), "discrete" (a discrete latent), "observed" or "deterministic"
    factor: bool = False
    closed_over: bool = False  # observed with an array that comes from no argument
    plate_sizes: dict[str, int] = dataclasses.field(default_factory=dict)
    plate_dims: dict[str, int] = dataclasses.field(default_factory=dict)  # axes of the batch shape, from the right
    shape: Any = ()  # of the value; a tree of shapes where a deterministic site holds a tree
    log_prob_shape: Shape = ()
    depends_on: frozenset[int] = frozenset()  # argument leaves that its log density (or value) is computed from
    value_depends_on: frozenset[int] = frozenset()
    value_has_latents: bool = False  # whether the value is computed from latents
    discrete_latents: frozenset[str] = frozenset()  # that its log density or value is computed from
    continuous_latents: frozenset[str] = frozenset()  # likewise

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
    control_flow: bool  # whether the model runs NumPyro's `scan` or `cond`


@contextlib.contextmanager
def explained_errors(arguments: Sequence[Argument], lists: Sequence[str]) -> Iterator[None]:
    """What the model raises while it is traced: with a note on its arguments, or as a refusal if it needs values.

    :param lists: what is wrong with lists among them, which then is what it fails by.
    """
    try:
        yield
    except UnsupportedModelError:
        raise
    except Exception as error:
        if needs_values(error):
            raise UnsupportedModelError([branches_on_values(error)]) from None
        if lists:
            raise UnsupportedModelError(lists) from None
        shapes = ", ".join(f"'{a.name}' {a.shape} {canonical(a.dtype)}" for a in arguments if a.shape is not None)
        lengths = {a.length for a in arguments if a.shape}
        odd = ". Their lengths differ: does one of them lack rows?" if len(lengths - {1}) > 1 else ""
        whole = ". What picks a group or a category must be whole numbers: `.astype(int)`" * ("integer" in str(error))
        error.add_note(
            f"numpyro_dp was tracing the model{describe_place(error)}; its array arguments are {shapes}{odd}{whole}"
        )
        raise


def abstract_trace(model: Callable, args: tuple, kwargs: dict) -> FullTrace:
    """Sites, shapes and dependencies of the model at its real shapes, without evaluating anything."""
    arrays, merge = take_arrays(args, kwargs)
    shapes_in = abstract(arrays)
    prototype, discrete, control_flow = _prototype(model, merge, shapes_in)
    sites: Sites = {}
    subsampled: dict[str, tuple[int, int]] = {}

    def outputs(z: Params, discrete: Params, arrays: list) -> dict[str, tuple]:
        """Log density and value of each site; what they are computed from is read off the jaxpr."""

        def value(site: dict) -> jax.Array | None:
            if site["type"] == "sample" and site["name"] in z:
                return biject_to(site["fn"].support)(z[site["name"]])
            return discrete.get(site["name"]) if site["type"] == "sample" else None

        args, kwargs = merge(arrays)
        result = {}
        substituted = substitute(seed(model, 0), substitute_fn=value)
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

    closed, shapes_out = jax.make_jaxpr(outputs, return_shape=True)(prototype, discrete, shapes_in)
    raise_if(print_problems(closed))
    # The inputs of the jaxpr are the parameters, the discrete latents, then the array arguments; its outputs are
    # numbered likewise.
    inputs = sorted(prototype) + sorted(discrete)
    inputs += [k for k, x in enumerate(jax.tree.leaves((args, kwargs))) if is_array(x)]
    numbered = jax.tree.unflatten(jax.tree.structure(shapes_out), range(len(jax.tree.leaves(shapes_out))))
    for name, (log_prob, value) in numbered.items():
        site = sites[name]
        site.value_depends_on, of_value = _inputs_of(closed.jaxpr, jax.tree.leaves(value), inputs)
        site.depends_on, of_density = _inputs_of(closed.jaxpr, [log_prob], inputs)
        site.value_has_latents = bool(of_value)
        site.discrete_latents = (of_value | of_density) & discrete.keys()
        site.continuous_latents = (of_value | of_density) & prototype.keys()
        if site.kind != "observed":
            site.depends_on |= site.value_depends_on
    return FullTrace(sites, prototype, subsampled, set(array_constants(closed)), control_flow)


def _inputs_of(
    jaxpr: Jaxpr, outputs: Sequence[int], inputs: Sequence[int | str]
) -> tuple[frozenset[int], frozenset[str]]:
    """The argument leaves and the latents that some outputs are computed from."""
    _, flags = dce_jaxpr(jaxpr, [k in outputs for k in range(len(jaxpr.outvars))])
    used = [k for k, flag in zip(inputs, flags, strict=True) if flag]
    return frozenset(k for k in used if isinstance(k, int)), frozenset(k for k in used if isinstance(k, str))


def describe_site(name: str, msg: dict) -> Site:
    sample, value = msg["type"] == "sample", msg["value"]
    concrete = isinstance(value, np.ndarray | jax.Array) and not isinstance(value, jax.core.Tracer)
    frames = msg.get("cond_indep_stack", [])
    return Site(
        name=name,
        kind=_kind(msg) if sample else msg["type"],
        factor=sample and bool(msg["infer"].get("is_auxiliary")),
        closed_over=sample and concrete and value.ndim > 0,
        plate_sizes={frame.name: frame.size for frame in frames},
        plate_dims={frame.name: frame.dim for frame in frames},
        shape=jax.tree.map(jnp.shape, value),
    )


def _kind(msg: dict) -> str:
    if msg["is_observed"]:
        return "observed"
    return "discrete" if msg["fn"].support.is_discrete else "latent"


def _prototype(model: Callable, merge: Callable, shapes_in: list) -> tuple[dict, dict, bool]:
    """Zeros in the shapes of the unconstrained parameters and of the discrete latents, and whether the model has
    control flow; refuses sites that no gradient-based kernel has."""
    handler = _spot_control_flow(initialized(model))

    def latents(arrays: list) -> tuple[Params, Params]:
        args, kwargs = merge(arrays)
        sites = trace(handler).get_trace(*args, **kwargs)
        problems = [_unsupported_site(site) for site in sites.values()]
        if not any(site["type"] == "sample" and site["is_observed"] for site in sites.values()):
            problems.insert(0, _NOTHING_OBSERVED)
        raise_if(p for p in problems if p)
        kinds = {name: _kind(site) for name, site in sites.items() if site["type"] == "sample"}
        return (
            {
                name: biject_to(s["fn"].support).inv(s["value"])
                for name, s in sites.items()
                if kinds.get(name) == "latent"
            },
            {name: s["value"] for name, s in sites.items() if kinds.get(name) == "discrete"},
        )

    shapes = jax.eval_shape(latents, shapes_in)
    prototype, discrete = ({name: np.zeros(s.shape, s.dtype) for name, s in group.items()} for group in shapes)
    if not sum(x.size for x in prototype.values()):
        beside = f" beside the discrete {quote(discrete)}" if discrete else ""
        raise UnsupportedModelError([f"the model has no latent site{beside}: there is nothing to infer"])
    return prototype, discrete, handler.found


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
    if msg["type"] == "sample" and _kind(msg) == "discrete":
        reason = _not_enumerable(msg["fn"])
        if reason:
            return (
                f"latent site '{name}' is discrete and {reason}: give it its data with `obs=` if it is an outcome, "
                "else sum it out by hand; only continuous parameters are sampled"
            )
    return None


def _not_enumerable(fn: dist.Distribution) -> str | None:
    """Why a discrete latent cannot be summed over the values that it takes."""
    if not fn.has_enumerate_support:
        return "has no finite list of values to sum over"
    if fn.event_shape:
        return f"has several values at once (`event_shape={tuple(fn.event_shape)}`; use a plate instead of `to_event`)"
    try:
        support(fn)
    except Exception as error:  # NumPyro's, or JAX's where the size of the support is not known while tracing
        return f"the values that it takes are not the same public ones for all rows ({type(error).__name__})"
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
        f"the model needs the values of an array argument in Python{describe_place(error)}: a branch, an index, a "
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
                if written != self.size and msg["scale"] is not None:  # else it counts once, as somebody has said
                    msg["scale"] = msg["scale"] / (written / self.size)
            if not self.keep(msg["name"]):
                msg["fn"] = msg["fn"].mask(False)


class _spot_control_flow(Messenger):
    """Note whether the model runs NumPyro's `scan` or `cond`."""

    found = False

    def process_message(self, msg):
        self.found |= msg["type"] == "control_flow"


# -- Discrete latents of a row, fixed or summed out --------------------------------------------------------------------


def support(fn: dist.Distribution) -> jax.Array:
    """The values that a discrete scalar takes, as a vector."""
    return jnp.ravel(fn.enumerate_support(expand=False))


def _value_at(fn: dist.Distribution, position: Any) -> jax.Array:
    """The members of a site's support at some positions in [0, 1), in the shape of the site."""
    values = support(fn)
    index = jnp.asarray(position * values.size, int)
    return values[jnp.broadcast_to(index, fn.batch_shape)]


def fix_latents(model: Callable, positions: Mapping[str, Any]) -> Callable:
    """The model with its discrete latents observed, each at some positions in [0, 1) of the list of its values."""
    if not positions:
        return model

    def value(site: dict) -> jax.Array | None:
        is_fixed = site["type"] == "sample" and site["name"] in positions
        return _value_at(site["fn"], positions[site["name"]]) if is_fixed else None

    return condition(model, condition_fn=value)


def first_available_dim(sites: Sites) -> int:
    """The first axis, from the right, that no plate and no site's log density uses."""
    return -1 - max(max([len(s.log_prob_shape), *map(abs, s.plate_dims.values())]) for s in sites.values())


def funsor_is_installed() -> bool:
    try:
        import numpyro.contrib.funsor  # noqa: F401
    except ImportError:
        return False
    return True


def sum_over_latents(
    model: Callable,
    z: Params,
    sites: Collection[str],
    latents: Collection[str],
    first_available_dim: int,
    positions: Mapping[str, Any] | None = None,
) -> Callable[..., jax.Array]:
    """The function ``(*args, **kwargs) -> log of the sum over latents of exp(the sites' log densities)``.

    NumPyro enumerates: it puts all values of each latent on an axis of its own. Beyond what its HMC does, sites that
    are not asked for are hidden, so they need no plates; latents take the values of their supports, where NumPyro
    numbers them from 0; and the sum is taken in the log domain throughout (see `_eliminate`).

    :param z: unconstrained values of the continuous latents; their Jacobians are no part of the result.
    :param sites: what the density is made of, the latents among them.
    :param first_available_dim: the first axis, from the right, that no site's density uses.
    :param positions: if given, only the term of the sum in which the latents have these values (see `fix_latents`).
    """
    from numpyro.contrib.funsor import enum, plate_to_enum_plate
    from numpyro.contrib.funsor import trace as packed_trace

    def value(site: dict) -> jax.Array | None:
        is_given = site["type"] == "sample" and site["name"] in z
        return biject_to(site["fn"].support)(z[site["name"]]) if is_given else None

    given = block(
        substitute(model, substitute_fn=value),
        hide_fn=lambda site: site["type"] == "sample" and site["name"] not in sites,
    )
    marked = infer_config(given, lambda site: {"enumerate": "parallel"} if site["name"] in latents else {})
    enumerated = _take_values(enum(marked, first_available_dim), latents, positions)

    def log_density(*args, **kwargs) -> jax.Array:
        with plate_to_enum_plate():
            traced_sites = packed_trace(enumerated).get_trace(*args, **kwargs)
        return _eliminate({name: msg for name, msg in traced_sites.items() if msg["type"] == "sample"}, latents)

    return log_density


def _eliminate(sites: dict[str, dict], latents: Collection[str]) -> jax.Array:
    """Sum the enumerated latents out of the product of some sites' densities; a scalar logarithm.

    Variable elimination: a latent's factors are multiplied over the axes that the latent itself does not have (the
    measurements that share it), and summed over its values. Latents on the most axes go first, among them the one whose
    table of joint values is the smallest. (NumPyro's HMC multiplies tables outside of the log domain. There, two
    outcomes of a row that speak for different components underflow to a density of zero.)
    """
    import funsor

    def log_factor(msg: dict) -> Any:
        log_prob = msg["fn"].log_prob(msg["value"])
        if msg["scale"] is not None:
            log_prob = msg["scale"] * log_prob
        names = msg["infer"]["dim_to_name"]  # of the axes that are longer than 1
        return funsor.to_funsor(log_prob if names else jnp.sum(log_prob), funsor.Real, dim_to_name=names)

    by_site = {name: log_factor(msg) for name, msg in sites.items()}
    own_axes = {name: by_site[name].inputs.keys() - latents for name in latents}
    factors = list(by_site.values())

    def cost(name: str) -> tuple[int, int]:
        sizes = {k: bound.size for f in factors if name in f.inputs for k, bound in f.inputs.items()}
        return -len(own_axes[name]), math.prod(size for k, size in sizes.items() if k in latents or k in own_axes[name])

    # A latent with a single value has no axis.
    left = {name for f in factors for name in f.inputs if name in latents}
    while left:
        name = min(sorted(left), key=cost)
        table = funsor.Number(0.0)
        for f in (f for f in factors if name in f.inputs):
            axes = f.inputs.keys() - latents - own_axes[name]
            if crossing := [other for other in f.inputs if other in left and own_axes[other] & axes]:
                raise ValueError(
                    f"'{name}' and '{crossing[0]}' meet in one site, but neither's plates hold the other's"
                )
            table += f.reduce(funsor.ops.add, axes)
        factors = [f for f in factors if name not in f.inputs] + [table.reduce(funsor.ops.logaddexp, name)]
        left -= {name}
    return jnp.sum(jnp.stack([jnp.sum(f.data) for f in factors]))


class _take_values(Messenger):
    """Translate the numbers of enumerated latents to the values of their supports, and leave one term of the sum."""

    def __init__(self, fn: Callable, latents: Collection[str], positions: Mapping[str, Any] | None):
        self.latents, self.positions = latents, positions
        super().__init__(fn)

    def process_message(self, msg):
        if msg["type"] != "sample" or msg["name"] not in self.latents:
            return
        fn, msg["value"] = msg["fn"], support(msg["fn"])[msg["value"]]
        if self.positions is not None:
            value = _value_at(fn, self.positions[msg["name"]])
            log_prob = fn.log_prob(value)
            if msg["scale"] is not None:
                log_prob, msg["scale"] = msg["scale"] * log_prob, None
            # The other terms are zero.
            msg["fn"] = dist.Delta(jnp.broadcast_to(value, jnp.shape(log_prob)), log_prob)


# -- What a jaxpr holds, however deep ----------------------------------------------------------------------------------


def array_constants(jaxpr: Any) -> Iterator[Shape]:
    """Shapes of all arrays that the traced function closes over."""
    for part in _jaxprs(jaxpr):
        if isinstance(part, ClosedJaxpr):
            yield from (np.shape(const) for const in part.consts if np.ndim(const))
    for eqn in _equations(jaxpr):
        yield from (np.shape(v.val) for v in eqn.invars if isinstance(v, Literal) and np.ndim(v.val))


def print_problems(jaxpr: Any, whose: str = "the model") -> list[str]:
    """Calls that would show numbers to whoever reads the console.

    JAX keeps them whatever is computed from them, so in a trace of many outputs each seems to need what is shown: they
    are refused before anything is said about dependencies.
    """
    names = sorted({eqn.primitive.name for eqn in _equations(jaxpr)} & _SHOWING.keys())
    return [
        f"{whose} calls `{_SHOWING[name]}`, which would show private rows on the console and wherever its output is "
        "kept: remove it"
        for name in names
    ]


# `jax.debug.print` has a primitive of its own since JAX 0.8; `jax.debug.breakpoint` is a callback.
_SHOWING = {"debug_callback": "jax.debug.callback", "debug_print": "jax.debug.print"}


def _equations(jaxpr: Any) -> Iterator[JaxprEqn]:
    for part in _jaxprs(jaxpr):
        yield from part.eqns


def _jaxprs(jaxpr: Any) -> Iterator[Any]:
    """A jaxpr and those within its operations."""
    yield jaxpr
    for eqn in jaxpr.eqns:
        for param in jax.tree.leaves(eqn.params, is_leaf=lambda p: isinstance(p, ClosedJaxpr | Jaxpr)):
            if isinstance(param, ClosedJaxpr | Jaxpr):
                yield from _jaxprs(param)
