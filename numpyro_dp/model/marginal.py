"""Which latents are a row's or a unit's own, and how many nodes it takes to integrate them out.

Both are found on shapes and on synthetic rows. **No private value is read.**
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.distributions import biject_to
from numpyro.handlers import trace
from numpyro.infer import init_to_sample
from numpyro.infer.util import potential_energy

from numpyro_dp.model.arguments import compiled, quote, take_arrays
from numpyro_dp.model.drawing import CannotDrawError
from numpyro_dp.model.integration import MOST_LATENTS, Rule, grids, rules
from numpyro_dp.model.latents import Latents, integrated
from numpyro_dp.model.separable import SeparableModel
from numpyro_dp.model.synthetic import synthetic_rows
from numpyro_dp.model.tracing import Sites, fix_latents, initialized, keep_sites

_MORE_CODES = 4  # random ones
_PICKING_ROWS = 4  # of each kind
_RULE_ROWS = 4  # units of each kind
_RULE_DRAWS = 6  # of the parameters
_MOST_RULE_ROWS = 12  # of a unit
_PART_OF_SD = 0.1
"""The error of an integral may move the posterior by so many of its standard deviations."""
_AGREE = 1e-3  # two grids, about a log density
_LARGE = 1e100  # numbers whose squares may overflow say nothing
_DOUBTFUL_SD, _DOUBTFUL_ERROR = 0.5, 0.01  # beyond these nobody vouches for a posterior; the latter if n is private
_LEAST_ERROR, _MOST_ERROR = 1e-4, 3e-3
_ERROR_OF_ANY_TABLE = 5e-4


def find_latents(
    separated: SeparableModel, sites: Sites, unit: str | None, args: tuple, kwargs: dict
) -> tuple[Latents | None, list[str]]:
    """The continuous latents of a row, or of the unit that an argument names, and why there can be none.

    :param separated: whose `prototype` holds all continuous latents.
    :param unit: name of the model's argument that says whose each row is; None, if each row is a unit.
    """
    own = [s.name for s in sites.values() if s.kind == "latent" and s.plates & separated.row_plates]
    plates, codes, problems = frozenset[str](), None, list[str]()
    if unit is not None:
        plates, codes = _unit_plates(separated, sites, unit, args, kwargs)
    of_units = [s.name for s in sites.values() if s.kind == "latent" and s.plates & plates]
    if own and of_units:
        problems.append(
            f"each row has latents of its own, {quote(own)}, and each unit has {quote(of_units)}: only one of the two "
            "can be integrated out. Leave out the rows' (a Poisson outcome with an effect for each row is nearly "
            "`GammaPoisson`), or let the latents of a row be its only ones"
        )
    if unit is not None and not of_units and (alone := _plates_of_one(separated, sites)):
        problems.append(
            f"plate {quote(alone)} has one member, so a latent in it is the same for all rows, whatever {unit!r} says. "
            "Tell the model how many units there are (an argument such as num_persons, which may have a default of 1), "
            "or take the plate away. Where there is but one unit, it has nobody to hide among"
        )
    names = own or of_units
    if problems or not names:
        return None, problems
    if table_like := _one_entry_per_unit(separated, sites, plates, names):
        return None, [
            f"argument '{a}' has one entry for each member of plate '{plate}', the units, and would be public. Give "
            f"each row its unit's, as a column: `{a}[{unit}]`, computed beforehand; what the law of a unit's latents "
            "takes from it, rows can add to the latents"
            for a, plate in table_like
        ]
    shapes = _shapes_at_one_row(separated, plates, names, args, kwargs)
    size = sum(math.prod(shape) for shape in shapes.values())
    if size > MOST_LATENTS:
        whose = "unit" if plates else "row"
        return None, [
            f"each {whose} has {size} latent numbers ({quote(names)}), and at most {MOST_LATENTS} are integrated out: "
            "give it fewer (a shorter path, fewer effects), or sum them up in one"
        ]
    dtypes = {name: separated.prototype[name].dtype for name in names}
    counted = plates or separated.row_plates
    axes = {
        name: next(d for plate, d in sites[name].plate_dims.items() if plate in counted)
        - (separated.prototype[name].ndim - len(sites[name].log_prob_shape))
        for name in names
    }
    sizes = {p: sites[name].plate_sizes[p] for name in names for p in sites[name].plates & plates}
    prototype = {name: np.zeros(shapes[name], dtypes[name]) for name in sorted(names)}
    return Latents(prototype, axes, plates, sizes, codes, rules(size)[-2]), []


def _plates_of_one(separated: SeparableModel, sites: Sites) -> list[str]:
    """Plates with a single member, but those of rows, that a latent is in."""
    of_latents = [s for s in sites.values() if s.kind == "latent"]
    return sorted({p for s in of_latents for p in s.plates - separated.row_plates if s.plate_sizes[p] == 1})


def _one_entry_per_unit(
    separated: SeparableModel, sites: Sites, plates: frozenset[str], names: Sequence[str]
) -> list[tuple[str, str]]:
    """Public arguments that are as long as a plate of units, which is then named."""
    sizes = {sites[name].plate_sizes[plate]: plate for name in names for plate in sites[name].plates & plates}
    return [(a.name, sizes[a.shape[0]]) for a in separated.public_arguments() if a.shape and a.shape[0] in sizes]


def _shapes_at_one_row(
    separated: SeparableModel, plates: frozenset[str], names: Sequence[str], args: tuple, kwargs: dict
) -> dict[str, tuple[int, ...]]:
    """Of the unconstrained values."""
    arrays, merge = take_arrays(*separated.without_private(args, kwargs))
    model = keep_sites(separated.model, lambda name: True, separated.row_plates | plates, 1)

    def run(arrays: list) -> dict[str, jax.Array]:
        args, kwargs = merge(arrays)
        found = trace(initialized(model)).get_trace(*args, **kwargs)
        return {name: biject_to(found[name]["fn"].support).inv(found[name]["value"]) for name in names}

    return {name: value.shape for name, value in jax.eval_shape(run, arrays).items()}


def _unit_plates(
    separated: SeparableModel, sites: Sites, unit: str, args: tuple, kwargs: dict
) -> tuple[frozenset[str], int | None]:
    """The plates from whose latents a row picks those of its unit, and the number of the argument that says which.

    A row with the code c must depend on the latents at position c and on no others, whatever c is: so say its
    derivatives, on synthetic rows. All others are parameters.
    """
    private = separated.private_arguments()
    names = [a.name for a in private]
    candidates: dict[str, list[str]] = {}
    for s in sites.values():
        for plate in s.plates - separated.row_plates:
            if s.kind == "latent" and s.plate_sizes[plate] >= 3:
                candidates.setdefault(plate, []).append(s.name)
    codes = names.index(unit) if unit in names else None
    if codes is None or private[codes].row_shape or not jnp.issubdtype(private[codes].dtype, jnp.integer):
        return frozenset(), None
    if not candidates:
        return frozenset(), None
    size_of = {plate: sites[group[0]].plate_sizes[plate] for plate, group in candidates.items()}
    largest, rng = int(jnp.iinfo(private[codes].dtype).max), np.random.default_rng(0)
    own = {plate: _codes_to_try(size, largest, rng) for plate, size in size_of.items()}
    tried = sorted(set().union(*own.values()))
    slopes = _slopes(separated, sorted({n for group in candidates.values() for n in group}), codes, tried, args, kwargs)
    plates = set()
    for plate, group in candidates.items():
        reached = {c: _reached(slopes[tried.index(c)], sites, plate, group) for c in own[plate]}
        within = [c for c in own[plate] if c < size_of[plate]]
        # Beyond the end JAX picks the last one, or nothing; by what else a row picks, it may be any.
        beyond = set().union(*(reached[c] for c in own[plate] if c not in within))
        if all(reached[c] == {c} for c in within) and beyond <= {size_of[plate] - 1}:
            plates.add(plate)
    return frozenset(plates), codes if plates else None


def _codes_to_try(size: int, largest: int, rng: np.random.Generator) -> list[int]:
    codes = {0, 1, 2, size - 1, *rng.integers(0, size, _MORE_CODES).tolist(), size, size + 1, 2 * size + 1}
    return sorted(c for c in codes if c <= largest)


def _slopes(
    separated: SeparableModel, names: Sequence[str], codes: int, tried: Sequence[int], args: tuple, kwargs: dict
) -> list[dict[str, np.ndarray]]:
    """For each of the codes: how synthetic rows that have it depend on some latents, in the shapes of these."""
    rng = np.random.default_rng(0)
    rows = list(synthetic_rows(separated.private_arguments(), _PICKING_ROWS, rng))
    z = {name: rng.normal(size=x.shape).astype(x.dtype) for name, x in sorted(separated.prototype.items())}
    model = fix_latents(separated.model, dict.fromkeys(separated.row_latents, 0.0))
    observed = separated.row_sites - separated.row_latents
    model = keep_sites(model, observed.__contains__, separated.row_plates, 1)

    def slopes(args: tuple, kwargs: dict, rows: tuple, z: dict) -> dict[str, jax.Array]:
        def density(chosen: dict, row: tuple) -> jax.Array:
            return -potential_energy(model, *separated.with_private(args, kwargs, row), {**z, **chosen})

        def add(total: dict, row: tuple) -> tuple[dict, None]:
            found = jax.grad(density)({name: z[name] for name in names}, row)
            return jax.tree.map(lambda t, x: t + jnp.abs(jnp.nan_to_num(x)), total, found), None

        return jax.lax.scan(add, {name: jnp.zeros_like(z[name]) for name in names}, rows)[0]

    def with_code(code: int) -> tuple:
        column = np.full_like(rows[codes], code)
        return tuple(column if k == codes else part for k, part in enumerate(rows))

    of_codes = compiled(slopes, *separated.without_private(args, kwargs), with_code(0), z)
    return [of_codes(with_code(code), z) for code in tried]


def _reached(slopes: dict[str, np.ndarray], sites: Sites, plate: str, group: Sequence[str]) -> set[int]:
    """The positions in a plate whose latents a row depends on."""
    found: set[int] = set()
    for name in group:
        axis = sites[name].plate_dims[plate] - (slopes[name].ndim - len(sites[name].log_prob_shape))
        others = tuple(k for k in range(slopes[name].ndim) if k != slopes[name].ndim + axis)
        found.update(np.flatnonzero(np.any(slopes[name] != 0, others)).tolist())
    return found


# -- How many nodes ----------------------------------------------------------------------------------------------------


def with_rule(separated: SeparableModel, args: tuple, kwargs: dict, num_units: int | None) -> SeparableModel:
    """The model with as many nodes as its latents and its table need; see `choose_rule`."""
    assert separated.latents is not None
    rule, error = choose_rule(separated, args, kwargs, num_units)
    latents = dataclasses.replace(separated.latents, rule=rule, error=error)
    if separated.of_rows is separated:
        return dataclasses.replace(separated, latents=latents)
    row_model = dataclasses.replace(separated.of_rows, latents=latents)
    return dataclasses.replace(separated, latents=latents, row_model=row_model)  # type: ignore[call-arg]


def doubts_of_latents(separated: SeparableModel, num_units: int | None) -> list[str]:
    """Why the integral over latents may not do, if it may not.

    :param num_units: if it is public.
    """
    latents = separated.latents
    if latents is None:
        return []
    reach = ""
    if num_units is not None:
        moved = latents.error * math.sqrt(num_units)
        reach = f", which may move the posterior by {moved:.1f} standard deviations"
    if latents.error <= _DOUBTFUL_ERROR if num_units is None else moved <= _DOUBTFUL_SD:
        return []
    return [
        f"the latents {quote(sorted(latents.names))} are integrated out with an error of {latents.error:.1%} of a "
        f"gradient, by synthetic rows{reach}. A law of the latents that is smoother (one hump, no edges), or fewer "
        "latents, would help"
    ]


def choose_rule(separated: SeparableModel, args: tuple, kwargs: dict, num_units: int | None) -> tuple[Rule, float]:
    """The cheapest rule that is exact enough for a table of this size, and its error.

    Gradients of units' densities are compared with those by a grid; where that is too coarse, and for more than two
    latents, by the largest rule. Errors that units have in common add up, as the gradients of the posterior do: what
    counts is their mean, as a part of the gradients' root mean square.

    :param num_units: None, if nothing may depend on it.
    :return: the rule and its error, a part of the gradients' root mean square.
    """
    latents = separated.latents
    assert latents is not None
    rng, rows = np.random.default_rng(0), min(separated.rows_per_unit if latents.plates else 1, _MOST_RULE_ROWS)
    known = rules(latents.size)
    z = _parameters(separated, args, kwargs, rng)
    tables = synthetic_rows(separated.private_arguments(), _RULE_ROWS * rows, rng)
    units = tuple(part.reshape(-1, rows, *part.shape[1:]) for part in tables)
    keys = rng.integers(0, 2**32, (len(units[0]), 1 + rows, 2), dtype=np.uint32)
    of_rows = separated.of_rows

    def program(alike: Sequence[Rule], drawn: bool) -> Callable[[Rule], tuple[np.ndarray, np.ndarray]]:
        """From one of these rules to log densities by parameters and units, and to their gradients, with entries.

        To compile takes longer than to run: rules share a program, in which all have as many nodes as the largest.
        """
        most = max(len(rule.nodes) for rule in alike)

        def compute(args: tuple, kwargs: dict, z: jax.Array, units: tuple, keys: jax.Array, rule: Rule) -> tuple:
            parts, by_rule = of_rows.parts(args, kwargs, drawn), dataclasses.replace(latents, rule=rule)

            def of_unit(z: jax.Array, unit: tuple, keys: jax.Array) -> tuple:
                words = (keys[0], keys[1:]) if drawn else ()
                present = jnp.ones(rows, bool)
                return jax.value_and_grad(lambda z: integrated(by_rule, parts, z, unit, present, *words))(z)

            return jax.lax.map(lambda z: jax.vmap(lambda u, k: of_unit(z, u, k))(units, keys), z)

        public = separated.without_private(args, kwargs)
        run = compiled(compute, *public, z, units, keys, alike[0].padded(most))

        def derivatives(rule: Rule) -> tuple[np.ndarray, np.ndarray]:
            values, slopes = run(z, units, keys, rule.padded(most))
            return np.asarray(values, float), np.asarray(slopes, float)

        return derivatives

    drawn = True
    try:
        by_rule = program(known, drawn)
    except (CannotDrawError, NotImplementedError):  # the latter of a law that NumPyro has no sampler for
        drawn = False
        by_rule = program(known, drawn)
    _, exact = by_rule(known[-1])
    if latents.size <= 2:
        (one, slopes), (other, _) = map(program(grids(latents.size), drawn), grids(latents.size))
        with np.errstate(invalid="ignore"):
            exact = np.where((np.abs(one - other) < _AGREE)[..., None], slopes, exact)
    enough = _ERROR_OF_ANY_TABLE
    if num_units is not None:
        enough = min(max(_PART_OF_SD / math.sqrt(num_units), _LEAST_ERROR), _MOST_ERROR)
    for rule in known[:-1]:
        error = _relative_error(by_rule(rule)[1], exact)
        if error <= enough:
            break
    return rule, error


def _parameters(separated: SeparableModel, args: tuple, kwargs: dict, rng: np.random.Generator) -> np.ndarray:
    """Flat parameters around 0, and draws of the prior, shape (k, d)."""

    def draw(args: tuple, kwargs: dict, keys: jax.Array) -> jax.Array:
        params, _ = separated.init_params(keys, init_to_sample, args, kwargs)
        return jax.vmap(separated.ravel)(params)

    keys = jax.random.split(jax.random.key(0), _RULE_DRAWS)
    of_prior = compiled(draw, *separated.without_private(args, kwargs), keys)(keys)
    near = 0.5 * rng.normal(size=of_prior.shape)
    return np.concatenate([near, of_prior]).astype(of_prior.dtype)


def _relative_error(gradients: np.ndarray, exact: np.ndarray) -> float:
    """Of the mean over units of a kind, a part of the root mean square.

    Its upper quartile over parameters, and of that the median over kinds: some kinds of synthetic rows make no sense.

    :param gradients, exact: by parameters, units (`_RULE_ROWS` of each kind, one kind after the other) and entries.
    """
    gradients, exact = (x.reshape(len(x), -1, _RULE_ROWS, x.shape[2]) for x in (gradients, exact))
    finite = np.all((np.abs(gradients) < _LARGE) & (np.abs(exact) < _LARGE), 3)
    counts = np.maximum(finite.sum(2), 1)
    gradients, exact = (np.where(finite[..., None], x, 0) for x in (gradients, exact))
    mean = np.linalg.norm(np.sum(gradients - exact, 2) / counts[..., None], axis=2)
    scale = np.sqrt(np.sum(exact**2, (2, 3)) / counts)
    errors = [np.quantile(m[s > 0] / s[s > 0], 0.75) for m, s in zip(mean.T, scale.T, strict=True) if np.any(s > 0)]
    return float(np.median(errors)) if errors else 0.0
