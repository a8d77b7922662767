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

import dataclasses
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.flatten_util import ravel_pytree
from numpyro.distributions import biject_to
from numpyro.handlers import seed, substitute, trace
from numpyro.infer.initialization import init_to_uniform
from numpyro.infer.util import constrain_fn, find_valid_initial_params, potential_energy
from numpyro.ops.provenance import track_deps_jaxpr
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

    full = _abstract_trace(model, args, kwargs, named)
    num_rows, plate, problems = _find_rows(full, named, row_plate)
    _raise_if(problems)
    arguments, problems = _classify_arguments(named, num_rows, private_args, full)
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
        *_closed_over_problems(full, num_rows),
    ]
    _raise_if(problems)

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
    one_row, problems = _one_row_trace(separated, args, kwargs)
    _raise_if(problems)
    _raise_if(_shape_problems(sites, one_row))
    separated = dataclasses.replace(separated, dropped_sites=_dropped_sites(sites, private, one_row))
    _raise_if(_sum_problems(separated, args, kwargs, full))
    return separated


def _raise_if(problems: Sequence[str]) -> None:
    if problems:
        raise UnsupportedModelError(problems)


# -- Arguments ---------------------------------------------------------------------------------------------------------


def _is_array(leaf: Any) -> bool:
    """Whether a leaf is traced. Concrete scalars (sizes, scales) reach the model as they are, and are public."""
    return isinstance(leaf, jax.core.Tracer) or (isinstance(leaf, np.ndarray | jax.Array) and leaf.ndim > 0)


def _name_leaves(model: Callable, args: tuple, kwargs: dict) -> list[Argument]:
    """Every leaf of the arguments under the name of the model's parameter that receives it."""
    positional = _positional_names(model, args)
    leaves = jax.tree_util.tree_flatten_with_path((args, kwargs))[0]
    named = []
    for path, leaf in leaves:
        group, first, *rest = path
        head = positional[first.idx] if group.idx == 0 else str(first.key)
        name = head + jax.tree_util.keystr(tuple(rest))
        shape, dtype = (tuple(leaf.shape), leaf.dtype) if _is_array(leaf) else (None, None)
        named.append(Argument(name, shape, dtype))
    return named


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
        if argument.shape is None and hasattr(leaf, "shape") and hasattr(leaf, "dtypes" if hasattr(leaf, "columns") else "dtype"):
            problems.append(
                f"argument '{argument.name}' is a {type(leaf).__name__}: pass a NumPy or JAX array "
                f"(for pandas, `{argument.name}.to_numpy()`)"
            )
        elif argument.shape is not None and not (
            jnp.issubdtype(argument.dtype, jnp.number) or jnp.issubdtype(argument.dtype, jnp.bool_)
        ):
            problems.append(
                f"argument '{argument.name}' has dtype {argument.dtype}: encode it as numbers before the model sees it"
            )
    for name, length in _number_lists(args, kwargs, _positional_names_of(args, kwargs)):
        problems.append(
            f"argument '{name}' is a list of {length} numbers, which would be treated as public constants: "
            "pass an array (`jnp.array(...)`)"
        )
    return problems


def _positional_names_of(args: tuple, kwargs: dict) -> dict[str, Any]:
    return {**{f"args[{k}]": value for k, value in enumerate(args)}, **kwargs}


def _number_lists(args: tuple, kwargs: dict, named: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Python lists and tuples of numbers that are as long as some array is: rows that no array axis shows."""
    lengths = {leaf.shape[0] for leaf in jax.tree.leaves((args, kwargs)) if _is_array(leaf) and leaf.ndim}
    stack = list(named.items())
    while stack:
        name, value = stack.pop()
        if isinstance(value, dict):
            stack.extend((f"{name}[{key!r}]", item) for key, item in value.items())
        elif isinstance(value, list | tuple):
            numbers = len(value) > 1 and all(isinstance(item, int | float) for item in value)
            if numbers and (len(value) in lengths or not lengths):
                yield name, len(value)
            else:
                stack.extend((f"{name}[{k}]", item) for k, item in enumerate(value))


def _classify_arguments(
    named: list[Argument], num_rows: int, private_args: Sequence[str] | None, full: "_FullTrace"
) -> tuple[tuple[Argument, ...], list[str]]:
    problems = []
    if private_args is not None:
        private_args = [private_args] if isinstance(private_args, str) else list(private_args)
        heads = {a.name: a.name.split("[")[0] for a in named}
        for name in private_args:
            if name not in heads.values() and name not in heads:
                known = ", ".join(repr(a.name) for a in named if a.shape is not None)
                problems.append(f"private_args names '{name}', but the model's array arguments are {known}")
        chosen = [a.shape is not None and (a.name in private_args or heads[a.name] in private_args) for a in named]
    else:
        chosen = [bool(a.shape) and a.shape[0] == num_rows for a in named]

    arguments = tuple(dataclasses.replace(a, private=flag) for a, flag in zip(named, chosen, strict=True))
    for a in arguments:
        if a.private and (not a.shape or a.shape[0] != num_rows):
            problems.append(
                f"private argument '{a.name}' has shape {a.shape}, but its leading axis must hold the {num_rows} rows: "
                "transpose it, or name another `row_plate=`"
            )
        elif not a.private and private_args is None and a.shape and num_rows in a.shape:
            problems.append(
                f"argument '{a.name}' has shape {a.shape}: axis {a.shape.index(num_rows)} is as long as there are "
                f"rows ({num_rows}), but rows must be on the leading axis. Pass it transposed; if it holds no rows, "
                "say which arguments do with `private_args=`"
            )
    if not any(a.private for a in arguments):
        problems.append("no argument is private: pass the table as array arguments of the model")
    return arguments, problems


# -- The abstract trace ------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Site:
    name: str
    kind: str  # "latent", "observed", "deterministic", "param", "plate" or "prng_key"
    factor: bool = False
    discrete: bool = False
    scaled: bool = False
    plates: frozenset[str] = frozenset()
    plate_sizes: dict[str, int] = dataclasses.field(default_factory=dict)
    shape: tuple[int, ...] = ()
    log_prob_shape: tuple[int, ...] = ()
    depends_on: frozenset[int] = frozenset()  # argument leaves that its log density (or value) is computed from
    value_depends_on: frozenset[int] = frozenset()


@dataclasses.dataclass
class _FullTrace:
    sites: "OrderedDict[str, _Site]"
    prototype: Params
    subsampled: dict[str, tuple[int, int]]
    constants: list[tuple[int, ...]]


def _abstract_trace(model: Callable, args: tuple, kwargs: dict, named: list[Argument]) -> _FullTrace:
    """Sites, shapes and dependencies of the model at its real shapes, without evaluating anything."""
    leaves, treedef, is_array = _split_static(args, kwargs)
    abstract = [jax.ShapeDtypeStruct(leaf.shape, jnp.result_type(leaf)) for leaf, f in zip(leaves, is_array, strict=True) if f]
    array_index = [k for k, flag in enumerate(is_array) if flag]

    def latents(arrays: list) -> Params:
        traced_args, traced_kwargs = _merge_static(arrays, leaves, treedef, is_array)
        sites = trace(substitute(seed(model, 0), substitute_fn=init_to_uniform)).get_trace(*traced_args, **traced_kwargs)
        problems = [_unsupported_site(site) for site in sites.values()]
        _raise_if([p for p in problems if p])
        return {
            name: biject_to(site["fn"].support).inv(site["value"])
            for name, site in sites.items()
            if site["type"] == "sample" and not site["is_observed"]
        }

    try:
        shapes = jax.eval_shape(latents, abstract)
    except _VALUE_ERRORS as error:
        raise UnsupportedModelError([_branches_on_values(error)]) from None
    prototype = {name: jnp.zeros(s.shape, s.dtype) for name, s in shapes.items()}
    if not prototype:
        raise UnsupportedModelError(["the model has no latent site: there is nothing to infer"])

    sites: OrderedDict[str, _Site] = OrderedDict()
    subsampled: dict[str, tuple[int, int]] = {}

    def outputs(z: Params, arrays: list) -> dict[str, tuple]:
        traced_args, traced_kwargs = _merge_static(arrays, leaves, treedef, is_array)
        substituted = substitute(seed(model, 0), substitute_fn=lambda site: _to_constrained(site, z))
        result = {}
        for name, msg in trace(substituted).get_trace(*traced_args, **traced_kwargs).items():
            if msg["type"] == "plate":
                size, subsample = msg["args"]
                if subsample is not None and subsample != size:
                    subsampled[name] = (size, subsample)
                continue
            site = sites[name] = _describe(name, msg)
            log_prob = jnp.zeros(())
            if msg["type"] == "sample":
                log_prob = msg["fn"].log_prob(msg["value"])
                site.log_prob_shape = jnp.shape(log_prob)
                if msg["scale"] is not None:
                    log_prob = msg["scale"] * log_prob
                if site.kind == "latent":
                    transform = biject_to(msg["fn"].support)
                    log_prob = jnp.sum(log_prob) + jnp.sum(transform.log_abs_det_jacobian(z[name], msg["value"]))
            result[name] = (log_prob, msg["value"])
        return result

    closed = jax.make_jaxpr(outputs)(prototype, abstract)
    provenance = [frozenset()] * len(jax.tree.leaves(prototype)) + [frozenset({k}) for k in array_index]
    dependencies = track_deps_jaxpr(closed.jaxpr, provenance)
    names = [name for name in sites if sites[name].kind != "plate"]
    out_tree = jax.tree.structure({name: (0, 0) for name in names})
    for name, (log_prob, value) in jax.tree.unflatten(out_tree, dependencies).items():
        sites[name].depends_on = log_prob | value if sites[name].kind != "observed" else log_prob
        sites[name].value_depends_on = value
    return _FullTrace(sites, prototype, subsampled, list(_array_constants(closed)))


_VALUE_ERRORS = (
    jax.errors.TracerBoolConversionError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
)


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
            f"latent site '{name}' is discrete: sum it out by hand (for a mixture, `MixtureSameFamily`); "
            "this kernel samples continuous parameters only"
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
        scaled=msg.get("scale") is not None,
        plates=frozenset(frame.name for frame in frames),
        plate_sizes={frame.name: frame.size for frame in frames},
        shape=jnp.shape(msg["value"]),
    )


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


def _find_rows(
    full: _FullTrace, named: list[Argument], row_plate: str | None
) -> tuple[int, str | None, list[str]]:
    """The number of rows, their plate, and what makes the choice unclear."""
    if full.subsampled:
        return 0, None, [
            f"plate '{name}' is subsampled ({subsample} of {size}): remove `subsample_size`; which rows a step looks at "
            "is the kernel's decision, because the privacy accounting depends on it"
            for name, (size, subsample) in full.subsampled.items()
        ]
    observed = [s for s in full.sites.values() if s.kind == "observed"]
    sizes = {name: size for s in full.sites.values() for name, size in s.plate_sizes.items()}
    if row_plate is not None:
        if row_plate not in sizes:
            known = ", ".join(map(repr, sizes)) or "none"
            return 0, None, [f"row_plate='{row_plate}' is not a plate of the model; its plates are: {known}"]
        return sizes[row_plate], row_plate, []

    leading = {a.shape[0] for a in named if a.shape}
    # The rows of the observed arrays: of those that values come from, or (factors) of what the density reads.
    lengths = {named[k].shape[0] for s in observed for k in s.value_depends_on if named[k].shape}
    lengths = lengths or {named[k].shape[0] for s in observed for k in s.depends_on if named[k].shape}
    lengths = lengths or {size for s in observed for size in s.plate_sizes.values() if size in leading}
    if not observed or not lengths:
        return 0, None, [
            "no observed site is computed from an array argument: pass the outcomes as an argument of the model "
            "and give them to `obs=`"
        ]
    plates = {name: size for s in observed for name, size in s.plate_sizes.items()}
    matching = {name: size for name, size in plates.items() if size in leading}
    if len(lengths) > 1:
        found = ", ".join(map(str, sorted(lengths)))
        return 0, None, [
            f"the observed arrays have different leading axes ({found}), so it is not clear what a row is: "
            "name the plate of the protected rows with `row_plate=`"
        ]
    (num_rows,) = lengths
    for s in observed:
        same = [name for name, size in s.plate_sizes.items() if size == num_rows]
        larger = [name for name, size in s.plate_sizes.items() if size > num_rows and same]
        if len(same) > 1 or larger or (same and len({n: z for n, z in s.plate_sizes.items() if n in matching}) > 1):
            described = ", ".join(f"'{name}' ({size})" for name, size in s.plate_sizes.items())
            return 0, None, [
                f"site '{s.name}' is observed in several plates, {described}, and it is not clear whose members are "
                "to be protected: name that plate with `row_plate=` (its members must be on the leading axis of the "
                "private arguments)"
            ]
    names = [name for name, size in plates.items() if size == num_rows]
    return num_rows, (names[0] if names else None), []


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
                f"fill the missing values with any number and mask them, `numpyro.handlers.mask(mask=...)`, "
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
        "supports and group sizes must come from public knowledge; pass such values as separate public arguments"
        for s in sites.values()
        if s.kind == "latent" and s.depends_on & private
    ]


def _row_site_problems(
    sites, arguments, private, row_plates, row_sites, num_rows, private_args
) -> list[str]:
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


def _closed_over_problems(full: _FullTrace, num_rows: int) -> list[str]:
    shapes = sorted({shape for shape in full.constants if num_rows in shape})
    return [
        f"the model closes over an array of shape {shape}, which has an axis as long as there are rows ({num_rows}): "
        "pass it as an argument, so that it can be split into rows and protected"
        for shape in shapes
    ]


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


def _one_row_trace(separated: SeparableModel, args: tuple, kwargs: dict):
    args, kwargs = separated.without_private(args, kwargs)
    leaves, treedef, is_array = _split_static(args, kwargs)
    abstract = [
        jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf))
        for leaf, f in zip(leaves, is_array, strict=True)
        if f
    ]
    sites: OrderedDict[str, _Site] = OrderedDict()

    def run(arrays: list):
        traced_args, traced_kwargs = _merge_static(arrays, leaves, treedef, is_array)
        model = _keep(seed(separated.model, 0), lambda name: True, separated._row_plates, 1)
        model = substitute(model, substitute_fn=init_to_uniform)
        for name, msg in trace(model).get_trace(*traced_args, **traced_kwargs).items():
            if msg["type"] != "plate":
                sites[name] = _describe(name, msg)
                if msg["type"] == "sample":
                    sites[name].log_prob_shape = jnp.shape(msg["fn"].log_prob(msg["value"]))
        return 0

    try:
        jax.eval_shape(run, abstract)
    except _VALUE_ERRORS as error:
        return sites, [_branches_on_values(error)]
    except Exception as error:  # whatever the model raises at one row; it has seen shapes only
        return sites, [
            "the model cannot be evaluated on a single row, so it is not a product over rows as it stands: "
            f"{type(error).__name__}: {_first_line(error)}. Take sizes from the "
            "arguments' shapes, and pass every array with rows as an argument, rows first"
        ]
    return sites, []


def _shape_problems(full: "OrderedDict[str, _Site]", one_row: "OrderedDict[str, _Site]") -> list[str]:
    problems = []
    for s in full.values():
        if s.kind == "latent" and s.name not in one_row:
            problems.append(f"latent site '{s.name}' exists only for some numbers of rows")
        elif s.kind == "latent" and one_row[s.name].shape != s.shape:
            problems.append(
                f"latent site '{s.name}' has shape {s.shape} with all rows and {one_row[s.name].shape} with one: one "
                "value per protected row would publish that row; sum or integrate it out, or give it a plate over "
                "groups whose number is an argument"
            )
    return problems


# -- Does the sum over rows give the model back? -----------------------------------------------------------------------

_SYNTHETIC_SIZES = (2, 5)
_TOLERANCE = {"float32": 2e-4, "float64": 1e-9}


def _sum_problems(separated: SeparableModel, args: tuple, kwargs: dict, full: _FullTrace) -> list[str]:
    """Compare sum over rows with the whole model on synthetic rows, site by site and at two sizes.

    Shows what one-row evaluation would silently change: rows standardised inside the model, a 1/n scale, a factor over
    all rows, a hard-coded size.
    """
    problems: dict[str, str] = {}
    compared = set()
    for size in _SYNTHETIC_SIZES:
        compare = _comparison(separated, args, kwargs, size)
        for kind in _SYNTHETIC_VALUES:
            try:
                results = compare(kind)
            except Exception as error:  # the model at `size` synthetic rows; no private value is involved
                return [
                    f"the model works with {separated.num_rows} rows but not with {size}: {type(error).__name__}: "
                    f"{_first_line(error)}. Take sizes from the arguments' shapes"
                ]
            for name, (whole, by_row, magnitude) in results.items():
                if not (np.isfinite(whole) and np.isfinite(by_row)):
                    continue
                compared.add(name)
                tolerance = _TOLERANCE[str(whole.dtype)]
                if abs(whole - by_row) > tolerance * (1 + magnitude):
                    problems.setdefault(name, _explain_mismatch(name, size, whole, by_row, full.sites[name]))
        if problems:
            return list(problems.values())
    unverified = sorted(separated.row_sites - compared)
    return [
        f"the log density of '{name}' is not finite on any synthetic rows, so it cannot be checked to be a sum over "
        "rows: check that the model runs on ordinary data of these shapes and dtypes"
        for name in unverified
    ]


def _explain_mismatch(name: str, size: int, whole: float, by_row: float, site: _Site) -> str:
    ratio = whole / by_row if by_row else np.nan
    if np.isclose(ratio, 1 / size, rtol=1e-3) or np.isclose(ratio, size, rtol=1e-3):
        return (
            f"the log density of '{name}' is scaled by the number of rows (a scale such as 1/X.shape[0], or a density "
            "counted once per row): take the scale from a public number, not from a shape"
        )
    what = "a factor over all rows" if site.factor else "rows are mixed"
    return (
        f"the log density of '{name}' is not a sum over rows ({what}): on {size} synthetic rows the model gives "
        f"{whole:.6g}, and its rows one by one give {by_row:.6g}. If the model standardises, ranks or averages over "
        "the rows inside, do it beforehand with public constants (means and ranges from a codebook)"
    )


def _comparison(separated: SeparableModel, args: tuple, kwargs: dict, size: int) -> Callable[[str], dict]:
    """A function from a kind of synthetic rows to each row site's (density of all rows, sum over rows, magnitude)."""
    private = separated.private_arguments()
    args, kwargs = separated._with_private(args, kwargs, [np.zeros((size, *a.shape[1:]), a.dtype) for a in private])
    leaves, treedef, is_array = _split_static(args, kwargs)
    # Public arguments that are traced where `separate` is called have no value to use here.
    arrays = [
        np.ones(leaf.shape, leaf.dtype) if isinstance(leaf, jax.core.Tracer) else leaf
        for leaf, f in zip(leaves, is_array, strict=True)
        if f
    ]

    @jax.jit
    def compare(arrays: list, rows: tuple, z: Params) -> dict:
        args, kwargs = separated._with_private(*_merge_static(arrays, leaves, treedef, is_array), rows)
        result = {}
        for name in sorted(separated.row_sites):
            whole_model = _keep(separated.model, name.__eq__, separated._row_plates, size)
            whole = -potential_energy(whole_model, args, kwargs, z)
            density = dataclasses.replace(separated, row_sites=frozenset({name})).row_log_density(args, kwargs)
            terms = jax.vmap(density, (None, 0))(separated.ravel(z), jax.tree.map(lambda x: x[:, None], rows))
            result[name] = (whole, jnp.sum(terms), jnp.sum(jnp.abs(terms)))
        return result

    def on_synthetic(kind: str) -> dict:
        rng = np.random.default_rng([size, *kind.encode()])
        rows = tuple(_synthetic(a, size, kind, rng) for a in private)
        z = {name: rng.uniform(-1, 1, zero.shape).astype(zero.dtype) for name, zero in separated.prototype.items()}
        with jax.ensure_compile_time_eval():
            return jax.device_get(compare(arrays, rows, z))

    return on_synthetic


_SYNTHETIC_VALUES = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "unit": lambda rng, shape: rng.uniform(0.05, 0.95, shape),
    "positive": lambda rng, shape: rng.gamma(2.0, size=shape),
    "simplex": lambda rng, shape: rng.dirichlet(np.ones(shape[-1]), shape[:-1]),
}


def _synthetic(argument: Argument, size: int, kind: str, rng: np.random.Generator) -> np.ndarray:
    shape = (size, *argument.shape[1:])
    if jnp.issubdtype(argument.dtype, jnp.bool_):
        return rng.random(shape) < 0.7
    if jnp.issubdtype(argument.dtype, jnp.integer):
        return rng.integers(0, 2, shape).astype(argument.dtype)
    return _SYNTHETIC_VALUES[kind](rng, shape).astype(argument.dtype)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]


def _placeholder_rows(arguments: Sequence[Argument]) -> tuple[np.ndarray, ...]:
    return tuple(np.zeros((1, *a.shape[1:]), a.dtype) for a in arguments if a.private)


# -- Handlers and argument plumbing ------------------------------------------------------------------------------------


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
    leaves, treedef, is_array = _split_static(args, kwargs)

    @jax.jit
    def run(arrays: list, *rest):
        return fn(*_merge_static(arrays, leaves, treedef, is_array), *rest)

    arrays = [leaf for leaf, flag in zip(leaves, is_array, strict=True) if flag]
    return lambda *rest: run(arrays, *rest)


def _split_static(args: tuple, kwargs: dict) -> tuple[list, Any, list[bool]]:
    leaves, treedef = jax.tree.flatten((args, kwargs))
    return leaves, treedef, [_is_array(leaf) for leaf in leaves]


def _merge_static(arrays: Sequence, leaves: list, treedef: Any, is_array: list[bool]) -> tuple[tuple, dict]:
    supply = iter(arrays)
    return treedef.unflatten([next(supply) if f else leaf for leaf, f in zip(leaves, is_array, strict=True)])
