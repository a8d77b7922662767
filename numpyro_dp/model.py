"""A NumPyro model seen as a data-free log prior plus one log density per row.

Differential privacy needs to know what a single row of the table does to the posterior. `separate` reads that off a
plain NumPyro model:

    ``log p(z, table) = log_prior(z) + sum_i row_log_density(z, row_i)``

Row i's term is evaluated *on row i alone*: the model is run on one-row slices of its private arguments under `vmap`,
so no row can reach another row's term, whatever the model does. Both halves are NumPyro's own potential energy of the
same model with some of its sites masked out, so scales, masks, Jacobians and reparameterisations mean here what they
mean everywhere in NumPyro.

Whether that sum *is* the posterior the user meant is checked beforehand, on abstract traces and on synthetic rows of
the same shapes. **No private value is read** by anything in this module outside `row_log_density`; every refusal
depends on shapes, dtypes and the model's code only. All problems are reported in one `UnsupportedModelError`.
"""

import contextlib
import dataclasses
import dis
import functools
import inspect
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.flatten_util import ravel_pytree
from jax.interpreters.partial_eval import dce_jaxpr
from numpyro.distributions import biject_to
from numpyro.handlers import seed, substitute, trace
from numpyro.infer.initialization import init_to_uniform
from numpyro.infer.util import compute_log_probs, constrain_fn, find_valid_initial_params, potential_energy
from numpyro.primitives import Messenger

Params = dict[str, jax.Array]


class UnsupportedModelError(ValueError):
    """The model cannot be written as a data-free prior times one factor per row; the message lists every reason."""

    def __init__(self, problems: Sequence[str]):
        self.problems = tuple(problems)
        lines = "\n".join(f"  {k}. {problem}" for k, problem in enumerate(problems, 1))
        super().__init__(f"numpyro_dp cannot protect the rows of this model:\n{lines}")


@dataclasses.dataclass(frozen=True)
class Argument:
    """One leaf of the model's arguments: its name, its shape and how it is treated."""

    name: str
    shape: tuple[int, ...] | None  # None: not an array, passed to the model as it is
    dtype: Any
    private: bool = False

    def __str__(self) -> str:
        return self.name if self.shape is None else f"{self.name} {self.shape}"


@dataclasses.dataclass(frozen=True)
class SeparableModel:
    """A model that `separate` has checked. Holds no data: every method takes the arguments anew.

    :ivar num_rows: n, the number of rows in each private argument.
    :ivar row_plate: name of the plate whose members are the rows, or None if the model has none.
    :ivar arguments: every argument leaf and whether it is private.
    :ivar row_sites: the sites that make up a row's log density.
    :ivar dropped_sites: deterministic sites that are left out of the samples, with the reason.
    :ivar prototype: unconstrained parameters of the right shapes and dtypes (zeros).
    """

    model: Callable
    num_rows: int
    row_plate: str | None
    arguments: tuple[Argument, ...]
    row_sites: frozenset[str]
    dropped_sites: dict[str, str]
    prototype: Params
    _row_plates: frozenset[str]

    @property
    def num_params(self) -> int:
        """Length of the flat vector of unconstrained parameters."""
        return ravel_pytree(self.prototype)[0].size

    @property
    def ravel(self) -> Callable[[Params], jax.Array]:
        """Flatten unconstrained parameters, sites in alphabetical order (as NumPyro's mass matrices have them)."""
        return lambda z: ravel_pytree(z)[0]

    @property
    def unravel(self) -> Callable[[jax.Array], Params]:
        return ravel_pytree(self.prototype)[1]

    def private_arguments(self) -> tuple[Argument, ...]:
        return tuple(a for a in self.arguments if a.private)

    def public_arguments(self) -> tuple[Argument, ...]:
        return tuple(a for a in self.arguments if not a.private)

    def rows(self, args: tuple, kwargs: dict) -> tuple[jax.Array, ...]:
        """The private leaves, each with the rows on its leading axis."""
        leaves = jax.tree.leaves((args, kwargs))
        return tuple(jnp.asarray(leaf) for leaf, a in zip(leaves, self.arguments, strict=True) if a.private)

    def row_log_density(self, args: tuple, kwargs: dict) -> Callable[[jax.Array, tuple], jax.Array]:
        """The function ``(flat z, one-row slices of `rows`) -> log p(row | z)``; public arguments are closed over."""
        model = _keep(self.model, self.row_sites.__contains__, self._row_plates, 1)

        @functools.partial(jax.jit, inline=True)  # NumPyro validates concrete values only: no warning shows a row
        def log_density(z: jax.Array, row: tuple) -> jax.Array:
            row_args, row_kwargs = self._with_private(args, kwargs, row)
            return -potential_energy(model, row_args, row_kwargs, self.unravel(z))

        return log_density

    def log_prior(self, args: tuple, kwargs: dict) -> Callable[[jax.Array], jax.Array]:
        """The function ``flat z -> log p(z)``, Jacobians of the transforms included. Sees no private argument."""
        return _traced(
            lambda args, kwargs, z: -potential_energy(self._prior_model, args, kwargs, self.unravel(z)),
            *self.without_private(args, kwargs),
        )

    def constrain(self, args: tuple, kwargs: dict) -> Callable[[Params], dict[str, jax.Array]]:
        """The function that maps one unconstrained draw to the sites that are released."""

        def constrain(args: tuple, kwargs: dict, z: Params) -> dict[str, jax.Array]:
            sites = constrain_fn(self._prior_model, args, kwargs, z, return_deterministic=True)
            return {name: value for name, value in sites.items() if name not in self.dropped_sites}

        return _traced(constrain, *self.without_private(args, kwargs))

    def init_params(
        self, rng_key: jax.Array, init_strategy: Callable, args: tuple, kwargs: dict
    ) -> tuple[Params, jax.Array]:
        """A starting point from `init_strategy` at which the *prior* is finite; the rows are not looked at.

        :param rng_key: one key, or a batch of keys for a batch of starting points.
        :return: unconstrained parameters, and whether the prior is finite there.
        """

        def find(args: tuple, kwargs: dict, key: jax.Array) -> tuple[Params, jax.Array]:
            (params, _, _), is_valid = find_valid_initial_params(
                key,
                self._prior_model,
                init_strategy=init_strategy,
                model_args=args,
                model_kwargs=kwargs,
                prototype_params=self.prototype,
            )
            return params, is_valid

        return _traced(find, *self.without_private(args, kwargs))(rng_key)

    def without_private(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """The same arguments with one placeholder row in the place of the private rows."""
        return self._with_private(args, kwargs, _placeholder_rows(self.arguments))

    @property
    def _prior_model(self) -> Callable:
        return _keep(self.model, lambda name: name not in self.row_sites, self._row_plates, 1)

    def _with_private(self, args: tuple, kwargs: dict, rows: Sequence) -> tuple[tuple, dict]:
        leaves, treedef = jax.tree.flatten((args, kwargs))
        supply = iter(rows)
        return treedef.unflatten(
            [
                next(supply) if a.private else jnp.asarray(leaf) if _is_array(leaf) else leaf
                for leaf, a in zip(leaves, self.arguments, strict=True)
            ]
        )


def released_model(model: Callable) -> Callable:
    """The model with nothing observed: what ArviZ and `Predictive` may see.

    ArviZ records observed values (the private outcomes) and pointwise log likelihoods of a model that has observed
    sites; this one has none. Dimension names, priors and predictions are those of `model`.
    """
    return _Unobserve(model)


class _Unobserve(Messenger):
    def process_message(self, msg):
        if msg["type"] == "sample" and msg["is_observed"]:
            if msg["infer"].get("is_auxiliary"):
                msg["stop"] = True  # a factor: it has no value to draw
            else:
                msg["is_observed"], msg["value"] = False, None


# -- Separating a model ------------------------------------------------------------------------------------------------


def separate(
    model: Callable,
    args: tuple = (),
    kwargs: dict | None = None,
    row_plate: str | None = None,
    private_args: Sequence[str] | None = None,
) -> SeparableModel:
    """Split `model` into a data-free prior and one factor per row, or refuse it.

    :param model: a NumPyro model.
    :param args, kwargs: its arguments. Only shapes and dtypes of arrays are used; other leaves are public.
    :param row_plate: the plate whose members are the protected rows. Default: the plate of the observed sites whose
        size is the leading axis of the observed arrays; without plates, that leading axis itself.
    :param private_args: names of the arguments that hold rows. Default: every array whose leading axis is the rows'.
    :raises UnsupportedModelError: with every reason why the model has no such form, and the way out of each.
    """
    kwargs = {} if kwargs is None else kwargs
    named = _name_leaves(model, args, kwargs)
    _raise_if(_argument_problems(named, args, kwargs))

    if not any(a.shape for a in named):
        _raise_if(_list_problems(model, args, kwargs, None))

    full = _abstract_trace(model, args, kwargs)
    named = _mark_chosen(named, private_args)
    num_rows, plate = _find_rows(full, named, row_plate)
    _raise_if(_list_problems(model, args, kwargs, num_rows))
    arguments, problems = _classify_arguments(named, num_rows, plate, full)
    _raise_if(problems)

    private = frozenset(k for k, a in enumerate(arguments) if a.private)
    sites = full.sites
    row_plates = _row_plates(sites, num_rows, plate)
    row_sites = frozenset(
        s.name for s in sites.values() if s.kind == "observed" and (s.depends_on & private or s.plates & row_plates)
    )
    problems = [
        *_latent_problems(sites, row_plates),
        *_prior_problems(sites, arguments, private, row_sites),
        *_row_site_problems(sites, arguments, private, row_plates, row_sites, num_rows, private_args),
    ]
    separated = SeparableModel(
        model=model,
        num_rows=num_rows,
        row_plate=plate,
        arguments=arguments,
        row_sites=row_sites,
        dropped_sites=_dropped_sites(sites, private),
        prototype=full.prototype,
        _row_plates=row_plates,
    )
    one_row, constants, failure = _one_row_trace(separated, args, kwargs)
    # What is as long as there are rows beside a single row, too, does not come from the arguments.
    constants = full.constants if failure else full.constants & constants
    problems += _closed_over_problems(separated, sites, constants)
    _raise_if(problems)
    _raise_if(failure)
    _raise_if(_shape_problems(sites, one_row))
    dropped = _dropped_sites(sites, private, one_row)
    separated = dataclasses.replace(separated, dropped_sites=dropped)
    problems, depend_on_size = _check_on_synthetic_rows(separated, args, kwargs, full)
    _raise_if(problems)
    return dataclasses.replace(separated, dropped_sites=dropped | depend_on_size)


def _raise_if(problems: Iterable[str]) -> None:
    if problems := list(problems):
        raise UnsupportedModelError(problems)


# -- Arguments ---------------------------------------------------------------------------------------------------------


_NO_VALUE = (jax.core.Tracer, jax.ShapeDtypeStruct)


def _is_array(leaf: Any) -> bool:
    """Whether a leaf is traced. Concrete scalars (sizes, scales) reach the model as they are, and are public."""
    return isinstance(leaf, _NO_VALUE) or (isinstance(leaf, np.ndarray | jax.Array) and leaf.ndim > 0)


def _name_leaves(model: Callable, args: tuple, kwargs: dict) -> list[Argument]:
    """Every leaf of the arguments under the name of the model's parameter that receives it."""
    positional = _positional_names(model, args)
    leaves = jax.tree_util.tree_flatten_with_path((args, kwargs))[0]
    named = []
    for path, leaf in leaves:
        group, first, *rest = path
        head = positional[first.idx] if group.idx == 0 else str(first.key)
        name = head + jax.tree_util.keystr(tuple(rest))
        shape, dtype = (tuple(leaf.shape), _canonical(leaf.dtype)) if _is_array(leaf) else (None, None)
        named.append(Argument(name, shape, dtype))
    return named


def _canonical(dtype: Any) -> Any:
    """The dtype that JAX gives to an array of this one; unknown ones are refused later, by name."""
    try:
        return jax.dtypes.canonicalize_dtype(dtype)
    except (TypeError, ValueError):
        return dtype


def _positional_names(model: Callable, args: tuple) -> list[str]:
    while isinstance(model, Messenger):
        model = model.fn
    names = [f"args[{k}]" for k in range(len(args))]
    try:
        parameters = list(inspect.signature(model).parameters.values())
    except (TypeError, ValueError):
        return names
    for k, parameter in enumerate(parameters[: len(args)]):
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            break
        names[k] = parameter.name
    return names


def _argument_problems(named: list[Argument], args: tuple, kwargs: dict) -> list[str]:
    problems = []
    for argument, leaf in zip(named, jax.tree.leaves((args, kwargs)), strict=True):
        name, kind = argument.name, type(leaf).__name__
        if argument.shape is None:
            if _shape_of(leaf):
                problems.append(
                    f"argument '{name}' is a {kind}: pass a NumPy or JAX array (for pandas, `{name}.to_numpy()`)"
                )
        elif isinstance(leaf, np.ma.MaskedArray):
            problems.append(
                f"argument '{name}' is a {kind}, whose mask JAX ignores: pass `{name}.filled(0.0)`, pass the mask as "
                "an array of its own, and use it in the model with `numpyro.handlers.mask`"
            )
        elif not _is_numeric(argument.dtype):
            problems.append(
                f"argument '{name}' has dtype {argument.dtype}: encode it as numbers before the model sees it"
            )
        elif argument.shape[:1] == (0,):
            problems.append(f"argument '{name}' has no rows: its shape is {argument.shape}")
    return problems


def _is_numeric(dtype: Any) -> bool:
    if jnp.issubdtype(dtype, jnp.floating):
        return dtype.itemsize <= 8  # JAX has no long doubles
    return jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool_)


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, int | float | np.number) or (isinstance(leaf, np.ndarray | jax.Array) and leaf.ndim == 0)


def _shape_of(leaf: Any) -> tuple[int, ...]:
    """The shape of anything that looks like an array (a DataFrame, a tensor), and () for all else."""
    shape = getattr(leaf, "shape", ())
    return tuple(shape) if isinstance(shape, tuple | list) else ()


def _list_problems(model: Callable, args: tuple, kwargs: dict, num_rows: int | None) -> list[str]:
    """Python lists of numbers that are as long as there are rows (None: of any length): they would pass as public."""
    problems = []
    stack = [*zip(_positional_names(model, args), args, strict=True), *kwargs.items()]
    while stack:
        name, value = stack.pop(0)
        if isinstance(value, dict):
            stack.extend((f"{name}[{key!r}]", item) for key, item in value.items())
        elif isinstance(value, list | tuple) and len(value) > 1:
            leaves = jax.tree.leaves(value)
            if leaves and all(map(_is_number, leaves)) and num_rows in (None, len(value)):
                problems.append(
                    f"argument '{name}' is a {type(value).__name__} of {len(value)} numbers or lists of numbers, which "
                    f"the model would see as public constants: pass an array, `jnp.array({name})`"
                )
            else:
                stack.extend((f"{name}[{k}]", item) for k, item in enumerate(value))
    return problems


def _mark_chosen(named: list[Argument], private_args: Sequence[str] | None) -> list[Argument]:
    """Mark the arguments that the user calls private, by the name of the parameter or of one leaf in it."""
    if private_args is None:
        return named
    names = [private_args] if isinstance(private_args, str) else list(private_args)
    known = [{a.name, a.name.split("[")[0]} if a.shape is not None else set() for a in named]
    arrays = _quote([a.name for a in named if a.shape is not None]) or "none"
    _raise_if(
        f"private_args names '{name}', but the model's array arguments are: {arrays}"
        for name in names
        if not any(name in group for group in known)
    )
    return [dataclasses.replace(a, private=not k.isdisjoint(names)) for a, k in zip(named, known, strict=True)]


def _classify_arguments(
    named: list[Argument], num_rows: int, plate: str | None, full: "_FullTrace"
) -> tuple[tuple[Argument, ...], list[str]]:
    """Mark the private arguments unless the user has, and say where shapes leave it open what holds rows."""
    if any(a.private for a in named):
        return tuple(named), [
            f"private argument '{a.name}' has shape {a.shape}, but its leading axis must hold the {num_rows} rows: "
            "transpose it, or name another `row_plate=`"
            for a in named
            if a.private and a.shape[:1] != (num_rows,)
        ]
    arguments = tuple(dataclasses.replace(a, private=bool(a.shape) and a.shape[0] == num_rows) for a in named)
    problems = _axis_problems(arguments, num_rows, full)
    if not problems and not any(a.private for a in arguments):
        shapes = ", ".join(str(a) for a in named if a.shape) or "none"
        whose = f"the {num_rows} members of plate '{plate}'" if plate else f"{num_rows} rows"
        problems = [
            f"no argument is private: none has {whose} on its leading axis (array arguments: {shapes}). Pass the "
            "table as array arguments of the model, rows first"
        ]
    return arguments, problems


def _axis_problems(arguments: Sequence[Argument], num_rows: int, full: "_FullTrace") -> list[str]:
    """Arguments that would pass as public although an axis other than the leading one may be the rows'."""
    problems = []
    outcomes = {k for s in full.sites.values() if s.kind == "observed" and not s.factor for k in s.value_depends_on}
    for a in arguments:
        if a.private or not a.shape:
            continue
        if num_rows in a.shape:
            problems.append(
                f"argument '{a.name}' has shape {a.shape}: axis {a.shape.index(num_rows)} is as long as there are "
                f"rows ({num_rows}), but rows must be on the leading axis. Pass it transposed; if it holds no rows, "
                "say which arguments do with `private_args=`"
            )
            continue
        for k in sorted(outcomes):
            y = arguments[k]
            if y.private and a.shape[0] in y.shape[1:] and a.shape[0] > 1:
                problems.append(
                    f"the leading axis of argument '{a.name}' {a.shape} is as long as axis "
                    f"{y.shape.index(a.shape[0], 1)} of the outcomes '{y.name}' {y.shape}, so it is not clear which "
                    "of them holds the rows. Rows must be on the leading axis: pass the outcomes transposed, or, "
                    f"if '{a.name}' holds no rows, say which arguments do with `private_args=`"
                )
    return problems


# -- The abstract trace ------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Site:
    name: str
    kind: str  # "latent", "observed", "deterministic", "param", "plate" or "prng_key"
    factor: bool = False
    closed_over: bool = False  # observed with an array that comes from no argument
    plates: frozenset[str] = frozenset()
    plate_sizes: dict[str, int] = dataclasses.field(default_factory=dict)
    shape: Any = ()  # of the value; a tree of shapes where a deterministic site holds a tree
    log_prob_shape: tuple[int, ...] = ()
    depends_on: frozenset[int] = frozenset()  # argument leaves that its log density (or value) is computed from
    value_depends_on: frozenset[int] = frozenset()


@dataclasses.dataclass
class _FullTrace:
    sites: "OrderedDict[str, _Site]"
    prototype: Params
    subsampled: dict[str, tuple[int, int]]
    constants: set[tuple[int, ...]]


def _abstract_trace(model: Callable, args: tuple, kwargs: dict) -> _FullTrace:
    """Sites, shapes and dependencies of the model at its real shapes, without evaluating anything."""
    arrays, merge = _take_arrays(args, kwargs)
    abstract = _abstract(arrays)
    prototype = _prototype(model, merge, abstract)
    sites: OrderedDict[str, _Site] = OrderedDict()
    subsampled: dict[str, tuple[int, int]] = {}

    def outputs(z: Params, arrays: list) -> dict[str, tuple]:
        """Log density and value of each site; what they are computed from is read off the jaxpr."""
        args, kwargs = merge(arrays)
        substituted = substitute(seed(model, 0), substitute_fn=lambda site: _to_constrained(site, z))
        result = {}
        for name, msg in trace(substituted).get_trace(*args, **kwargs).items():
            if msg["type"] == "plate":
                size, subsample = msg["args"]
                if subsample is not None and subsample != size:
                    subsampled[name] = (size, subsample)
            elif msg["type"] in ("sample", "deterministic"):
                site = sites[name] = _describe(name, msg)
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

    closed, shapes = jax.make_jaxpr(outputs, return_shape=True)(prototype, abstract)
    # The inputs are the parameters, then the array arguments.
    inputs = [None] * len(prototype) + [k for k, x in enumerate(jax.tree.leaves((args, kwargs))) if _is_array(x)]
    outputs_of = jax.tree.unflatten(jax.tree.structure(shapes), range(len(jax.tree.leaves(shapes))))
    for name, (log_prob, value) in outputs_of.items():
        site = sites[name]
        site.value_depends_on = _inputs_of(closed.jaxpr, jax.tree.leaves(value), inputs)
        site.depends_on = _inputs_of(closed.jaxpr, [log_prob], inputs)
        if site.kind != "observed":
            site.depends_on |= site.value_depends_on
    return _FullTrace(sites, prototype, subsampled, set(_array_constants(closed)))


def _inputs_of(jaxpr: Jaxpr, outputs: Sequence[int], inputs: Sequence[int | None]) -> frozenset[int]:
    """The argument leaves that some outputs are computed from."""
    _, used = dce_jaxpr(jaxpr, [k in outputs for k in range(len(jaxpr.outvars))])
    return frozenset(k for k, flag in zip(inputs, used, strict=True) if flag and k is not None)


def _prototype(model: Callable, merge: Callable, abstract: list) -> Params:
    """Zeros in the shapes of the unconstrained parameters; refuses sites that no gradient-based kernel has."""

    def latents(arrays: list) -> Params:
        args, kwargs = merge(arrays)
        sites = trace(_initialized(model)).get_trace(*args, **kwargs)
        problems = [_unsupported_site(site) for site in sites.values()]
        if not any(site["type"] == "sample" and site["is_observed"] for site in sites.values()):
            problems.insert(0, _NOTHING_OBSERVED)
        _raise_if([p for p in problems if p])
        return {
            name: biject_to(site["fn"].support).inv(site["value"])
            for name, site in sites.items()
            if site["type"] == "sample" and not site["is_observed"]
        }

    try:
        shapes = jax.eval_shape(latents, abstract)
    except Exception as error:
        if not _needs_values(error):
            raise
        raise UnsupportedModelError([_branches_on_values(error)]) from None
    if not shapes:
        raise UnsupportedModelError(["the model has no latent site: there is nothing to infer"])
    return {name: np.zeros(s.shape, s.dtype) for name, s in shapes.items()}


def _initialized(model: Callable) -> Callable:
    """The model with some value at each latent site."""

    def value(site: dict) -> jax.Array | None:
        return init_to_uniform(site) if site["type"] == "sample" and site["value"] is None else None

    return substitute(seed(_not_random(model), 0), substitute_fn=value)


_NOTHING_OBSERVED = (
    "no site of the model is observed: pass the outcomes as an argument of the model and give them to `obs=`"
)


_VALUE_ERRORS = (
    jax.errors.TracerBoolConversionError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
)


def _needs_values(error: Exception) -> bool:
    """Whether an error says that Python asked for a value that is not known while tracing."""
    return isinstance(error, _VALUE_ERRORS) or (isinstance(error, TypeError) and "concrete values" in str(error))


def _branches_on_values(error: Exception) -> str:
    kind = type(error).__name__
    return (
        f"the model needs the values of an array argument in Python ({kind}): a branch, an index, a size such as "
        "`len(np.unique(g))`, or a NumPy function applied to it. Compute sizes beforehand and pass them as numbers; "
        "use jax.numpy, `jnp.where` or `handlers.mask` instead of Python branches"
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


def _to_constrained(site: dict, z: Params) -> jax.Array | None:
    if site["type"] == "sample" and site["name"] in z:
        return biject_to(site["fn"].support)(z[site["name"]])
    return None


def _describe(name: str, msg: dict) -> _Site:
    frames = msg.get("cond_indep_stack", [])
    sample = msg["type"] == "sample"
    kind = ("observed" if msg["is_observed"] else "latent") if sample else msg["type"]
    return _Site(
        name=name,
        kind=kind,
        factor=sample and bool(msg["infer"].get("is_auxiliary")),
        closed_over=sample and isinstance(msg["value"], np.ndarray | jax.Array) and _is_concrete_array(msg["value"]),
        plates=frozenset(frame.name for frame in frames),
        plate_sizes={frame.name: frame.size for frame in frames},
        shape=jax.tree.map(jnp.shape, msg["value"]),
    )


def _is_concrete_array(value: Any) -> bool:
    return value.ndim > 0 and not isinstance(value, jax.core.Tracer)


def _array_constants(jaxpr: Any) -> Iterator[tuple[int, ...]]:
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
                yield from _array_constants(param)


# -- Which rows --------------------------------------------------------------------------------------------------------


def _find_rows(full: _FullTrace, named: list[Argument], row_plate: str | None) -> tuple[int, str | None]:
    """The number of rows and their plate; refuses what leaves the choice open."""
    _raise_if(
        f"plate '{name}' is subsampled ({subsample} of {size}): remove `subsample_size`; which rows a step looks at is "
        "the kernel's decision, because the privacy accounting depends on it"
        for name, (size, subsample) in full.subsampled.items()
    )
    sizes = {name: size for s in full.sites.values() for name, size in s.plate_sizes.items()}
    if row_plate is not None:
        if row_plate not in sizes:
            known = _quote(list(sizes)) or "none"
            _raise_if([f"row_plate='{row_plate}' is not a plate of the model; its plates are: {known}"])
        return sizes[row_plate], row_plate

    observed = [s for s in full.sites.values() if s.kind == "observed"]
    chosen = any(a.private for a in named)
    length = {k: a.shape[0] for k, a in enumerate(named) if a.shape and (a.private or not chosen)}
    leading = set(length.values())
    # The rows of the observed arrays: of those that values come from, or (factors) of what the density reads.
    lengths = {length[k] for s in observed for k in s.value_depends_on & length.keys()}
    lengths = lengths or {length[k] for s in observed for k in s.depends_on & length.keys()}
    if not lengths:
        _raise_if(
            [
                "no observed site is computed from an array argument: pass the outcomes as an argument of the model "
                "and give them to `obs=`"
            ]
        )
    if len(lengths) > 1:
        _raise_if(
            [
                f"the observed arrays have different leading axes ({', '.join(map(str, sorted(lengths)))}), so it is "
                "not clear what a row is: name the plate of the protected rows with `row_plate=`"
            ]
        )
    (num_rows,) = lengths
    for s in observed:
        same = [name for name, size in s.plate_sizes.items() if size == num_rows]
        rivals = [name for name, size in s.plate_sizes.items() if size > num_rows or size in leading]
        if same and set(rivals) - {same[0]}:
            described = ", ".join(f"'{name}' ({size})" for name, size in s.plate_sizes.items())
            _raise_if(
                [
                    f"site '{s.name}' is observed in several plates, {described}, and it is not clear whose "
                    "members are to be protected: name that plate with `row_plate=` (its members must be on the "
                    "leading axis of the private arguments)"
                ]
            )
    names = [name for s in observed for name, size in s.plate_sizes.items() if size == num_rows]
    return num_rows, (names[0] if names else None)


def _row_plates(sites: "OrderedDict[str, _Site]", num_rows: int, plate: str | None) -> frozenset[str]:
    """All plates over the rows: a model may open one for each observed site."""
    if plate is None:
        return frozenset()
    names = {plate}
    for s in sites.values():
        if s.kind == "observed" and plate not in s.plates:
            names |= {name for name, size in s.plate_sizes.items() if size == num_rows}
    return frozenset(names)


# -- Reasons to refuse -------------------------------------------------------------------------------------------------


def _quote(names: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)


def _used(indices: frozenset[int], arguments: Sequence[Argument]) -> str:
    return _quote([arguments[k].name for k in sorted(indices)])


def _latent_problems(sites: "OrderedDict[str, _Site]", row_plates: frozenset[str]) -> list[str]:
    problems = []
    for s in sites.values():
        if s.kind == "latent" and s.plates & row_plates:
            hint = (
                "fill the missing values with any number and mask them, `numpyro.handlers.mask(mask=...)`, "
                "instead of `obs_mask`"
                if s.name.endswith("_unobserved")
                else "sum or integrate it out (for a mixture, `MixtureSameFamily`), or give it a plate over groups"
            )
            problems.append(
                f"latent site '{s.name}' lives in the row plate {_quote(sorted(s.plates & row_plates))}: one value per "
                f"protected row would publish that row; {hint}"
            )
    return problems


def _prior_problems(sites, arguments, private: frozenset[int], row_sites: frozenset[str]) -> list[str]:
    return [
        f"the prior of '{s.name}' uses private argument {_used(s.depends_on & private, arguments)}: priors, their "
        "supports and group sizes must come from public knowledge; pass such values as separate public arguments, and "
        f"if {_used(s.depends_on & private, arguments)} holds no rows, list the arguments that do with `private_args=`"
        for s in sites.values()
        if s.kind == "latent" and s.depends_on & private
    ]


def _row_site_problems(sites, arguments, private, row_plates, row_sites, num_rows, private_args) -> list[str]:
    problems = []
    for s in sites.values():
        if s.kind != "observed":
            continue
        if s.name not in row_sites:
            public = s.value_depends_on - private
            if public and not s.factor and private_args is None:
                problems.append(
                    f"site '{s.name}' is observed with {_used(public, arguments)}, whose leading axis is not the "
                    f"{num_rows} rows': it would be treated as public. Put it into the same table, or list the "
                    "private arguments with `private_args=` if it is public indeed"
                )
            continue
        if s.factor and not s.plates & row_plates and s.log_prob_shape[:1] != (num_rows,):
            problems.append(
                f"factor '{s.name}' is computed from private argument {_used(s.depends_on & private, arguments)} over "
                "all rows at once: put one factor per row into the row plate, "
                f"`with numpyro.plate('rows', n): numpyro.factor('{s.name}', per_row_values)`"
            )
        if s.log_prob_shape.count(num_rows) > 1 and num_rows > 1 and len(s.plates) < 2:
            problems.append(
                f"the log density of '{s.name}' has shape {s.log_prob_shape}: arrays of shapes (n, 1) and (n,) were "
                "broadcast against each other; give both the same shape"
            )
    if not row_sites:
        problems.append("no observed site depends on a private argument: there is nothing to protect")
    return problems


def _closed_over_problems(
    separated: SeparableModel, sites: "OrderedDict[str, _Site]", constants: set[tuple[int, ...]]
) -> list[str]:
    """Data that reach the model by another way than its arguments."""
    n = separated.num_rows
    shapes = {shape for shape in constants if n in shape and n > 1}
    named = {name: shape for name, shape in _outside_arrays(separated) if n in shape}
    found = [f"'{name}', an array of shape {shape}," for name, shape in sorted(named.items())]
    found += [f"an array of shape {shape}," for shape in sorted(shapes - set(named.values()))]
    problems = [
        f"the model closes over {what} which has an axis as long as there are rows ({n}): pass it as an argument, so "
        "that it can be split into rows and protected (if it holds no rows, list the arguments that do with "
        "`private_args=`)"
        for what in found
    ]
    problems += [
        f"site '{s.name}' is observed with an array that the model closes over: pass it as an argument (to fix a "
        "parameter, use its value in the place of the site)"
        for s in sites.values()
        if s.kind == "observed" and s.closed_over and s.name not in separated.row_sites and n not in s.shape
    ]
    return problems


def _outside_arrays(separated: SeparableModel) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of what looks like an array in a model's globals, closure, defaults, partials or object.

    The jaxpr shows arrays that JAX computes with; this also finds those that NumPy or pandas reduce while it is traced.
    """
    model, outside = separated.model, {}
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
        passed = {a.name.split("[")[0] for a in separated.arguments}
        defaults = {name: p.default for name, p in inspect.signature(function).parameters.items()}
        outside |= {name: value for name, value in defaults.items() if name not in passed}
        outside |= _read_by(function, owner)
    for name, value in outside.items():
        for leaf in jax.tree.leaves(value):
            if not callable(leaf) and _shape_of(leaf):
                yield name, _shape_of(leaf)


def _read_by(function: types.FunctionType, owner: Any) -> dict[str, Any]:
    """Globals, closed-over variables and attributes of `owner` that a function and its module's functions read."""
    read, todo, seen = {}, [function], set()
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


def _dropped_sites(
    sites: "OrderedDict[str, _Site]", private: frozenset[int], one_row: "OrderedDict[str, _Site] | None" = None
) -> dict[str, str]:
    dropped = {}
    for s in sites.values():
        if s.kind != "deterministic":
            continue
        if s.depends_on & private:
            dropped[s.name] = "computed from private rows"
        elif one_row is not None and (s.name not in one_row or one_row[s.name].shape != s.shape):
            dropped[s.name] = "has one value per row"
    return dropped


def _one_row_trace(
    separated: SeparableModel, args: tuple, kwargs: dict
) -> tuple["OrderedDict[str, _Site]", set[tuple[int, ...]], list[str]]:
    """The sites of the model at a single row, the shapes of the constants that it closes over, and why it has none."""
    arrays, merge = _take_arrays(*separated.without_private(args, kwargs))
    sites: OrderedDict[str, _Site] = OrderedDict()

    def run(arrays: list) -> dict[str, jax.Array]:
        args, kwargs = merge(arrays)
        model = _initialized(_keep(separated.model, lambda name: True, separated._row_plates, 1))
        log_probs = {}
        for name, msg in trace(model).get_trace(*args, **kwargs).items():
            if msg["type"] in ("sample", "deterministic"):
                sites[name] = _describe(name, msg)
            if msg["type"] == "sample":
                log_probs[name] = msg["fn"].log_prob(msg["value"])
        return log_probs

    try:
        return sites, set(_array_constants(jax.make_jaxpr(run)(_abstract(arrays)))), []
    except Exception as error:  # whatever the model raises at one row; it has seen shapes only
        if _needs_values(error):
            return sites, set(), [_branches_on_values(error)]
        problem = (
            "the model cannot be evaluated on a single row, so it is not a product over rows as it stands: "
            f"{type(error).__name__}: {_first_line(error)}. Take sizes from the arguments' shapes, do not squeeze axes "
            "away or decompose the table as a matrix, and pass every array with rows as an argument, rows first"
        )
        return sites, set(), [problem + _overlooked(separated)]


def _shape_problems(full: "OrderedDict[str, _Site]", one_row: "OrderedDict[str, _Site]") -> list[str]:
    missing = [name for name, s in full.items() if s.kind in ("latent", "observed") and name not in one_row]
    problems = [
        f"a site exists only for some numbers of rows: {_quote(missing[:3])}. Give all rows to one site, in a plate"
        for _ in missing[:1]
    ]
    for s in full.values():
        if s.name in missing:
            continue
        if s.kind == "latent" and one_row[s.name].shape != s.shape:
            problems.append(
                f"latent site '{s.name}' has shape {s.shape} with all rows and {one_row[s.name].shape} with one: one "
                "value per protected row would publish that row; sum or integrate it out, or give it a plate over "
                "groups whose number is an argument"
            )
    return problems


# -- Does the sum over rows give the model back? -----------------------------------------------------------------------

_FEW = 3  # rows; small enough to be cheap, and neither one row nor (in practice) all of them
_CANDIDATES = 24
_TOLERANCE = {4: 2e-4, 8: 1e-9}  # by the number of bytes of a float


def _check_on_synthetic_rows(
    separated: SeparableModel, args: tuple, kwargs: dict, full: _FullTrace
) -> tuple[list[str], dict[str, str]]:
    """Problems that only numbers show, and deterministic sites that depend on the number of rows.

    One-row evaluation would silently change a model that standardises its rows, scales by 1/n, has a factor over all
    rows or a branch on n. So the model is compared, on synthetic rows, with the sum over its rows: site by site on a
    few rows of many kinds, then once on as many rows as there are.
    """
    try:
        check = _SyntheticCheck(separated, args, kwargs)
    except Exception as error:  # the model cannot be traced with a few rows; no private value is involved
        return [_other_size_problem(separated, error)], {}
    problems: dict[str, str] = {}
    verified: dict[str, str] = {}  # site: the kind of rows that it was compared on
    for kind in [*_SYNTHETIC_VALUES, *_missing_in(separated)]:
        few = check.few(kind)
        for name in sorted(separated.row_sites):
            terms, whole = few.by_row[name], few.whole[name]
            if np.isfinite(whole) and np.all(np.isfinite(terms)):
                verified.setdefault(name, kind)
            if _differ(whole, np.sum(terms), np.sum(np.abs(terms))):
                problems.setdefault(name, _explain_mismatch(full.sites[name], _FEW, whole, np.sum(terms)))
    unverified = sorted(separated.row_sites - verified.keys() - problems.keys())
    if unverified and not check.lacks_values:
        problems[""] = (
            f"the log density of {_quote(unverified)} is not finite on any synthetic rows, so it cannot be checked to "
            "be a sum over rows: check that the model runs on ordinary data of these shapes and dtypes, and shift or "
            "scale columns with unusual ranges by public constants"
        )
    if problems or not verified:
        return list(problems.values()), {}
    return _compare_at_full_size(separated, check, next(iter(verified.values())), full)


def _compare_at_full_size(
    separated: SeparableModel, check: "_SyntheticCheck", kind: str, full: _FullTrace
) -> tuple[list[str], dict[str, str]]:
    few = check.few(kind)
    every, n = check.all_rows(kind, few.rows), separated.num_rows
    counts = np.bincount(np.arange(n) % _FEW, minlength=_FEW)
    slack = 1 + n / 10_000  # rounding of long sums
    problems, magnitude = [], abs(few.log_prior)
    for name, whole in every.densities.items():
        terms = few.by_row[name][counts > 0]
        if name in separated.row_sites:
            terms = counts[counts > 0] * terms
            by_row, size = np.sum(terms), np.sum(np.abs(terms))
            magnitude += size
            if _differ(whole, by_row, size, slack):
                problems.append(_explain_mismatch(full.sites[name], n, whole, by_row))
        elif _differ(whole, terms[0], abs(terms[0])):
            problems.append(
                f"{'the prior of' if full.sites[name].kind == 'latent' else 'site'} '{name}' depends on the number of "
                "rows: it would be another one for a single row. Take the number from an argument that is a plain "
                "Python number, not from a shape"
            )
    total = few.log_prior + np.sum((counts * few.row_log_density)[counts > 0])
    if not problems and _differ(every.total, total, magnitude, slack):
        problems.append(
            f"the model's log density on {n} synthetic rows is {every.total:.6g}, but its prior and its rows one by "
            f"one add up to {total:.6g}: it depends on the number of rows in a way that no single site shows"
        )
    close = functools.partial(np.allclose, rtol=1e-3, atol=1e-6, equal_nan=True)
    dropped = {
        name: "depends on the number of rows"
        for name, value in few.deterministic.items()
        if not jax.tree.all(jax.tree.map(close, value, every.deterministic[name]))
    }
    return problems, dropped


def _differ(whole: np.ndarray, by_row: np.ndarray, magnitude: float, slack: float = 1.0) -> bool:
    """Whether two densities differ by more than rounding. Where neither is finite, nothing can be said."""
    if not (np.isfinite(whole) and np.isfinite(by_row)):
        return bool(np.isfinite(whole))  # the rows make sense only together
    return bool(abs(whole - by_row) > slack * _TOLERANCE[max(4, whole.dtype.itemsize)] * (1 + magnitude))


def _explain_mismatch(site: _Site, size: int, whole: float, by_row: float) -> str:
    ratio = whole / by_row if by_row else np.nan
    if size > 1 and (np.isclose(ratio, 1 / size, rtol=1e-3) or np.isclose(ratio, size, rtol=1e-3)):
        return (
            f"the log density of '{site.name}' is scaled by the number of rows (a scale such as 1/X.shape[0], or a "
            "density counted once per row): take the scale from a public number, not from a shape"
        )
    what = "a factor over all rows" if site.factor else "rows are mixed"
    return (
        f"the log density of '{site.name}' is not a sum over rows ({what}): on {size} synthetic rows the model gives "
        f"{whole:.6g}, and its rows one by one give {by_row:.6g}. If the model standardises, ranks or averages over "
        "the rows inside, do it beforehand with public constants (means and ranges from a codebook); if it looks up "
        "an argument that happens to be as long as there are rows, list the arguments with rows in `private_args=`"
    )


def _other_size_problem(separated: SeparableModel, error: Exception) -> str:
    return (
        f"the model works with {separated.num_rows} rows but not with {_FEW}: {type(error).__name__}: "
        f"{_first_line(error)}. Take sizes from the arguments' shapes, and pass every array with rows as an argument"
        + _overlooked(separated)
    )


def _overlooked(separated: SeparableModel) -> str:
    names = [a.name for a in separated.public_arguments() if a.shape and a.shape[0] == separated.num_rows]
    return f"; {_quote(names)} is as long as there are rows, but not listed in `private_args=`" if names else ""


class _Few(NamedTuple):
    """The model on a few synthetic rows."""

    rows: tuple
    by_row: dict[str, np.ndarray]  # log density of each sample site, beside each row alone
    whole: dict[str, np.ndarray]  # the same, beside all of these rows
    deterministic: dict[str, np.ndarray]  # values beside one row
    log_prior: np.ndarray
    row_log_density: np.ndarray


class _All(NamedTuple):
    """The model on as many rows as there are."""

    total: np.ndarray
    densities: dict[str, np.ndarray]
    deterministic: dict[str, np.ndarray]


class _SyntheticCheck:
    """The model on synthetic rows in the place of the private ones."""

    def __init__(self, separated: SeparableModel, args: tuple, kwargs: dict):
        self.separated, self.private = separated, separated.private_arguments()
        leaves, treedef = jax.tree.flatten(separated.without_private(args, kwargs))
        # Public arguments that are traced where `separate` is called have no value to use here.
        self.lacks_values = any(isinstance(leaf, _NO_VALUE) for leaf in leaves)
        leaves = [np.ones(x.shape, _canonical(x.dtype)) if isinstance(x, _NO_VALUE) else x for x in leaves]
        self._arrays, self._merge = _take_arrays(*treedef.unflatten(leaves))
        self._few = self._compile(self._evaluate_few, *self._draw("normal"))

    def _compile(self, evaluate: Callable, *inputs) -> Callable:
        """Compiled ahead of time, a function gives numbers even where `separate` itself is being traced."""

        def run(arrays: list, *inputs):
            return evaluate(*self._merge(arrays), *inputs)

        compiled = jax.jit(run).lower(self._arrays, *inputs).compile()
        return lambda *inputs: jax.device_get(compiled(self._arrays, *inputs))

    def few(self, kind: str) -> _Few:
        return self._few(*self._draw(kind))

    def all_rows(self, kind: str, rows: tuple) -> _All:
        """The model, as it is, on as many rows as there are: the few `rows`, repeated."""
        z, *_ = self._draw(kind)
        return self._compile(self._evaluate_all, z, rows)(z, rows)

    def _draw(self, kind: str) -> tuple[Params, tuple, np.ndarray]:
        rng = np.random.default_rng(list(kind.encode()))
        rows = tuple(_synthetic(a, _CANDIDATES, kind, rng) for a in self.private)
        z = {name: rng.uniform(-1, 1, zero.shape).astype(zero.dtype) for name, zero in self.separated.prototype.items()}
        return z, rows, np.asarray(kind in _SYNTHETIC_VALUES)

    def _sites(self, args: tuple, kwargs: dict, z: Params, rows: Sequence, size: int) -> tuple[dict, dict]:
        """Summed log density of each sample site, value of each released deterministic site."""
        model = _keep(self.separated.model, lambda name: True, self.separated._row_plates, size)
        args, kwargs = self.separated._with_private(args, kwargs, rows)
        constrained = constrain_fn(model, args, kwargs, z)
        densities, sites = compute_log_probs(model, args, kwargs, constrained)
        values = {name: site["value"] for name, site in sites.items() if site["type"] == "deterministic"}
        return densities, {name: v for name, v in values.items() if name not in self.separated.dropped_sites}

    def _evaluate_few(self, args: tuple, kwargs: dict, z: Params, candidates: tuple, prefer_finite: jax.Array) -> _Few:
        one_row, separated = _each(candidates), self.separated
        by_row, deterministic = jax.vmap(lambda row: self._sites(args, kwargs, z, row, 1))(one_row)
        finite = jnp.all(jnp.isfinite(jnp.stack([by_row[name] for name in separated.row_sites])), 0)
        # Rows on which the model makes sense; missing values are there to be met, though.
        chosen = jnp.argsort(~finite & prefer_finite)[:_FEW]
        rows = jax.tree.map(lambda x: x[chosen], candidates)
        whole, _ = self._sites(args, kwargs, z, rows, _FEW)
        flat = separated.ravel(z)
        return _Few(
            rows=rows,
            by_row={name: d[chosen] for name, d in by_row.items()},
            whole=whole,
            deterministic=jax.tree.map(lambda value: value[0], deterministic),
            log_prior=separated.log_prior(args, kwargs)(flat),
            row_log_density=jax.vmap(separated.row_log_density(args, kwargs), (None, 0))(flat, one_row)[chosen],
        )

    def _evaluate_all(self, args: tuple, kwargs: dict, z: Params, rows: tuple) -> _All:
        n = self.separated.num_rows
        every_row = jax.tree.map(lambda x: x[jnp.arange(n) % _FEW], rows)
        total = -potential_energy(self.separated.model, *self.separated._with_private(args, kwargs, every_row), z)
        return _All(total, *self._sites(args, kwargs, z, every_row, n))


def _each(rows: Sequence) -> Sequence:
    """One-row tables, stacked."""
    return jax.tree.map(lambda x: x[:, None], rows)


_SYNTHETIC_VALUES: dict[str, Callable] = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "unit": lambda rng, shape: rng.uniform(0.05, 0.95, shape),
    "positive": lambda rng, shape: rng.gamma(2.0, size=shape),
    "simplex": lambda rng, shape: rng.dirichlet(np.ones(shape[-1]), shape[:-1]) if shape[-1] else np.zeros(shape),
    "binary": lambda rng, shape: rng.integers(0, 2, shape).astype(float),  # outcomes are often whole numbers in floats
    "counts": lambda rng, shape: rng.integers(0, 6, shape).astype(float),
    "wide": lambda rng, shape: 30 * rng.normal(size=shape),
    "large": lambda rng, shape: 200 * rng.gamma(2.0, size=shape),
    "matrix": lambda rng, shape: _covariances(rng, shape) if shape[-2:-1] == shape[-1:] else rng.normal(size=shape),
}


def _covariances(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    root = rng.normal(size=shape)
    return root @ np.swapaxes(root, -1, -2) + np.eye(shape[-1])


def _missing_in(separated: SeparableModel) -> list[str]:
    """More kinds of rows: missing values in one argument, which a model might fill from other rows."""
    floats = [a for a in separated.private_arguments() if jnp.issubdtype(a.dtype, jnp.floating)]
    return [f"missing {a.name}" for a in floats]


def _synthetic(argument: Argument, size: int, kind: str, rng: np.random.Generator) -> np.ndarray:
    shape = (size, *argument.shape[1:])
    if jnp.issubdtype(argument.dtype, jnp.bool_):
        return rng.random(shape) < 0.7
    if jnp.issubdtype(argument.dtype, jnp.integer):
        low, high = {"positive": (1, 3), "wide": (0, 6), "large": (0, 3000)}.get(kind, (0, 2))
        return rng.integers(low, min(high, jnp.iinfo(argument.dtype).max), shape).astype(argument.dtype)
    values = _SYNTHETIC_VALUES.get(kind, _SYNTHETIC_VALUES["unit"])(rng, shape)
    if kind == f"missing {argument.name}":
        values[1:] = np.where(rng.random(values[1:].shape) < 0.4, np.nan, values[1:])  # some row is complete
    return values.astype(argument.dtype)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]


def _placeholder_rows(arguments: Sequence[Argument]) -> tuple[np.ndarray, ...]:
    return tuple(np.zeros((1, *a.shape[1:]), a.dtype) for a in arguments if a.private)


# -- Handlers and argument plumbing ------------------------------------------------------------------------------------


class _not_random(Messenger):
    """Refuse a model that draws random numbers by itself."""

    def process_message(self, msg):
        if msg["type"] == "prng_key":
            _raise_if(
                [
                    "the model draws random numbers (it calls `numpyro.prng_key`, or a handler such as `block` hides a "
                    "latent site), but a density must not be random: pass a key as an argument, or observe the site"
                ]
            )


class _keep(Messenger):
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


def _traced(fn: Callable, args: tuple, kwargs: dict) -> Callable:
    """``(*rest) -> fn(args, kwargs, *rest)`` with the array arguments traced: NumPyro validates concrete values only,
    and a placeholder row need not be a valid one."""
    arrays, merge = _take_arrays(args, kwargs)

    @jax.jit
    def run(arrays: list, *rest):
        return fn(*merge(arrays), *rest)

    return lambda *rest: run(arrays, *rest)


def _take_arrays(args: tuple, kwargs: dict) -> tuple[list, Callable[[Sequence], tuple[tuple, dict]]]:
    """The array leaves of the arguments, and a function that puts others in their places."""
    leaves, treedef = jax.tree.flatten((args, kwargs))
    is_array = [_is_array(leaf) for leaf in leaves]
    static = [None if flag else leaf for leaf, flag in zip(leaves, is_array, strict=True)]

    def merge(arrays: Sequence) -> tuple[tuple, dict]:
        supply = iter(arrays)
        return treedef.unflatten([next(supply) if f else leaf for leaf, f in zip(static, is_array, strict=True)])

    return [leaf for leaf, flag in zip(leaves, is_array, strict=True) if flag], merge


def _abstract(arrays: Sequence) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(x.shape, _canonical(x.dtype)) for x in arrays]
