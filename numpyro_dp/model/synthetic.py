"""Does the sum over rows give the model back? The comparison, on synthetic rows of the table's shapes and dtypes.

Evaluating a model on one row at a time would silently change a model that standardises its rows, scales by 1/n, has a
factor over all rows or a branch on n. So the model is compared with the sum over its rows: site by site on a few rows
of many kinds (a model may make sense on positive numbers only, say), then once on as many rows as there are.
No private value is involved.

Discrete latents are fixed at synthetic values for this, as if they were columns of the table: if the model is a product
over rows for all of their values, so is the sum over them. That enumeration gives back the density at such values is
checked beside it (it would not if the model indexed or summed over the axis of the rows). So it is with continuous
latents that are integrated out; where they are a unit's, each synthetic row is of another unit.
"""

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer import init_to_median
from numpyro.infer.util import compute_log_probs, constrain_fn, potential_energy

from numpyro_dp.model.arguments import NO_VALUE, Argument, compiled, describe_error, overlooked, quote
from numpyro_dp.model.separable import SeparableModel
from numpyro_dp.model.tracing import Params, Shape, Site, Sites, fix_latents, keep_sites

Array = Any  # JAX's where it is computed, NumPy's where it is compared

_FEW = 41
"""Rows; one of them can lie more than 6 standard deviations from the mean of all, where a model might clip it."""
_FEWEST = 6
"""Different ones: a single row on which a model makes sense may be a coincidence."""
_AT_PRIOR = " at the prior"
_TOLERANCE = {4: 2e-4, 8: 1e-9}  # by the number of bytes of a float


def tolerance(arguments: Sequence[Argument], dtype: Any) -> float:
    """Of comparisons of densities, relative to their terms, by the coarsest float that is computed with.

    A table of single precision makes some terms of single precision, also beside parameters of double precision.

    :param dtype: of the densities.
    """
    floats = [a.dtype for a in arguments if a.shape is not None and jnp.issubdtype(a.dtype, jnp.floating)]
    return _TOLERANCE[max(4, min(jnp.dtype(d).itemsize for d in (dtype, *floats)))]


def check_on_synthetic_rows(
    separated: SeparableModel, args: tuple, kwargs: dict, sites: Sites
) -> tuple[list[str], dict[str, str]]:
    """Problems that only numbers show, and deterministic sites that depend on the number of rows."""
    try:
        check = _SyntheticCheck(separated, args, kwargs, sites)
    except Exception as error:  # the model cannot be traced with a few rows
        problem = (
            f"the model works with {separated.num_rows} rows but not with another number ({_num_few(separated)}): "
            f"{describe_error(error)}. Take sizes from the arguments' shapes, and pass every array with rows as an "
            "argument. If a row is no person but the counts of a group, pass a row for each person: group and outcome"
        )
        return [problem + overlooked(separated.arguments, separated.num_rows)], {}
    mismatches: dict[str, str] = {}
    enumerated = not separated.row_latents  # whether the sum over latents was compared
    verified: dict[str, set[str]] = {}  # kind of rows: the sites that were compared on it
    # Missing values in one argument are a kind, too: a model might fill them from other rows.
    floats = [a for a in separated.private_arguments() if jnp.issubdtype(a.dtype, jnp.floating)]
    kinds = [*_SYNTHETIC_VALUES, *(f"missing {a.name}" for a in floats)]
    # So are numbers that stand for a missing one.
    kinds += [f"{number} in {a.name}" for a in separated.private_arguments() for number in _STAND_FOR_MISSING]
    # Of a model that makes no sense around 0 in unconstrained space: where its prior is.
    kinds += [kind + _AT_PRIOR for kind in _SYNTHETIC_VALUES]
    members = separated.row_sites if separated.latents is None else separated.row_sites | separated.latents.names
    for kind in kinds:
        if kind.endswith(_AT_PRIOR) and separated.row_sites.issubset(set().union(*verified.values())):
            break
        few = check.few(kind)
        for densities, together in ((few.by_row, few.whole), few.beside_own):
            for name in sorted(members & densities.keys()):
                terms, whole = densities[name], together[name]
                if np.isfinite(whole) and np.all(np.isfinite(terms)):
                    verified.setdefault(kind, set()).add(name)
                with np.errstate(invalid="ignore"):  # rows that make no sense may be inf and -inf
                    by_row, magnitude = np.sum(terms, dtype=float), np.sum(np.abs(terms), dtype=float)
                if _differ(separated, whole, by_row, magnitude):
                    mismatches.setdefault(name, _explain_mismatch(separated, sites[name], check.num_few, whole, by_row))
        if separated.row_latents and not mismatches:
            mismatches |= _enumeration_mismatch(separated, few)
            if np.any(np.isfinite(few.row_log_density)):
                enumerated = True
    problems = list(mismatches.values())
    unverified = sorted(separated.row_sites.difference(*verified.values()) - mismatches.keys())
    if not (unverified or problems or enumerated):
        unverified = sorted(separated.row_sites)  # finite at some values of the latents, but their sum is not
    if unverified and not check.lacks_values:
        problems.append(
            f"the log density of {quote(unverified)} is not finite on any synthetic rows, so it cannot be checked to "
            "be a sum over rows: check that the model runs on ordinary data of these shapes and dtypes, and shift or "
            "scale columns with unusual ranges by public constants"
        )
    if problems or not verified:
        return problems, {}
    most_telling = max(verified, key=lambda kind: len(verified[kind]))
    return _compare_at_full_size(separated, check, most_telling, sites)


def _compare_at_full_size(
    separated: SeparableModel, check: "_SyntheticCheck", kind: str, sites: Sites
) -> tuple[list[str], dict[str, str]]:
    few = check.few(kind)
    every, n = check.all_rows(kind, few), separated.num_rows
    counts, counts_of_latents = check.counts()  # how often each of the few rows occurs
    latents = frozenset() if separated.latents is None else separated.latents.names
    slack = 1 + n / 10_000  # rounding of long sums
    problems, magnitude = [], abs(few.log_prior)
    for name, whole in every.densities.items():
        often = counts_of_latents if name in latents else counts
        terms = few.by_row[name][often > 0]
        if name in separated.row_sites | latents:
            terms = often[often > 0] * terms
            by_row, size = np.sum(terms), np.sum(np.abs(terms))
            magnitude += size
            if _differ(separated, whole, by_row, size, slack):
                problems.append(_explain_mismatch(separated, sites[name], n, whole, by_row))
        elif _differ(separated, whole, terms[0], abs(terms[0])):
            problems.append(
                f"{'the prior of' if sites[name].kind == 'latent' else 'site'} '{name}' depends on the number of "
                "rows: it would be another one for a single row. Take the number from an argument that is a plain "
                "Python number, not from a shape"
            )
    total = few.log_prior + np.sum((counts * few.row_log_density)[counts > 0])
    total += np.sum((counts_of_latents * few.latent_log_density)[counts_of_latents > 0])
    if not problems and _differ(separated, every.total, total, magnitude, slack):
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


def _differ(separated: SeparableModel, whole: Array, by_row: Array, magnitude: Array, slack: float = 1.0) -> bool:
    """Whether two densities differ by more than rounding. Where neither is finite, nothing can be said."""
    if not (np.isfinite(whole) and np.isfinite(by_row)):
        return bool(np.isfinite(whole))  # the rows make sense only together
    return bool(abs(whole - by_row) > slack * tolerance(separated.arguments, whole.dtype) * (1 + magnitude))


def _explain_mismatch(separated: SeparableModel, site: Site, size: int, whole: Array, by_row: Array) -> str:
    ratio = whole / by_row if by_row else np.nan
    if size > 1 and (np.isclose(ratio, 1 / size, rtol=1e-3) or np.isclose(ratio, size, rtol=1e-3)):
        return (
            f"the log density of '{site.name}' is scaled by the number of rows (a scale such as 1/X.shape[0], or a "
            "density counted once per row): take the scale from a public number, not from a shape"
        )
    what = "a factor over all rows" if site.factor else "rows are mixed"
    if separated.latents is not None and separated.latents.plates:
        (code,) = (a.name for k, a in enumerate(separated.private_arguments()) if k == separated.latents.codes)
        what += (
            f", or '{code}' does more than pick a row's own {quote(sorted(separated.latents.names))}: for that pass a "
            "column of its own"
        )
    return (
        f"the log density of '{site.name}' is not a sum over rows ({what}): on {size} synthetic rows the model gives "
        f"{whole:.6g}, and its rows one by one give {by_row:.6g}. If the model standardises, ranks or averages over "
        "the rows inside, do it beforehand with public constants (means and ranges from a codebook); if it looks up "
        "an argument that happens to be as long as there are rows, list the arguments with rows in `private_args=`"
    )


def _enumeration_mismatch(separated: SeparableModel, few: "_Few") -> dict[str, str]:
    """Whether enumeration gives another density at given values of the discrete latents than the model itself."""
    terms = np.stack([few.by_row[name] for name in separated.row_sites])
    with np.errstate(invalid="ignore"):
        expected, magnitudes = np.sum(terms, 0), np.sum(np.abs(terms), 0)
    names = quote(sorted(separated.row_latents))
    for one_by_one, enumerated, magnitude in zip(expected, few.row_log_density, magnitudes, strict=True):
        # Not a number: it is none at other values of the latents.
        if not np.isnan(enumerated) and _differ(separated, one_by_one, enumerated, magnitude):
            return {
                names: f"summing out {names} by enumeration would give another model: on a synthetic row its density "
                f"at given values is {enumerated:.6g} and should be {one_by_one:.6g}. Enumeration puts all values of a "
                "latent on a new axis on the left, so do not index, reshape or sum over the axes of a latent (`z[0]`, "
                "`z.sum()`), and do not use one that is drawn within a nested plate outside of it; or sum it out by "
                "hand"
            }
    return {}


# -- Evaluating the model ----------------------------------------------------------------------------------------------


class _Few(NamedTuple):
    """The model on a few synthetic rows."""

    rows: tuple
    own: "_Own"
    by_row: dict[str, Array]  # log density of each sample site, beside each row alone
    whole: dict[str, Array]  # the same, beside all of these rows
    beside_own: tuple[dict[str, Array], dict[str, Array]]  # both, where units of several rows have one value of latents
    deterministic: dict[str, Any]  # values beside one row
    log_prior: Array
    row_log_density: Array  # beside its latents, if it has any
    latent_log_density: Array  # of each row's continuous latents; 0 without any


class _Own(NamedTuple):
    """Synthetic latents of rows, each in its shape beside one row, with an axis of rows before.

    :ivar positions: of the discrete ones in the lists of their values.
    :ivar values: unconstrained, of the continuous ones.
    """

    positions: dict[str, Array]
    values: dict[str, Array]


class _All(NamedTuple):
    """The model on as many rows as there are."""

    total: Array
    densities: dict[str, Array]
    deterministic: dict[str, Any]


class _SyntheticCheck:
    """The model on synthetic rows in the place of the private ones."""

    def __init__(self, separated: SeparableModel, args: tuple, kwargs: dict, sites: Sites):
        self.separated, self.private = separated, separated.private_arguments()
        self._latents, self.num_few = separated.latents, _num_few(separated)
        self._discrete = {name: _one_row(sites[name], separated.row_plates) for name in sorted(separated.row_latents)}
        self._public = separated.without_private(args, kwargs)
        # Public arguments that are traced where `separate` is called have no value to use here.
        self.lacks_values = any(isinstance(leaf, NO_VALUE) for leaf in jax.tree.leaves(self._public))
        self._few = compiled(self._evaluate_few, *self._public, *self._draw("normal"))

    @functools.cached_property
    def _prior_median(self) -> dict[str, np.ndarray]:
        """Unconstrained parameters around the prior's medians."""

        def medians(args: tuple, kwargs: dict) -> Params:
            return self.separated.init_params(jax.random.key(0), init_to_median, args, kwargs)[0]

        return compiled(medians, *self._public)()

    def few(self, kind: str) -> _Few:
        return self._few(*self._draw(kind))

    def all_rows(self, kind: str, few: _Few) -> _All:
        """The model, as it is, on as many rows as there are: the few ones, repeated."""
        z, *_ = self._draw(kind)
        return compiled(self._evaluate_all, *self._public, z, few.rows, few.own)(z, few.rows, few.own)

    def _draw(self, kind: str) -> tuple[dict[str, np.ndarray], tuple, "_Own", np.ndarray]:
        rng = np.random.default_rng(list(kind.encode()))
        centre = self._prior_median if kind.endswith(_AT_PRIOR) else self.separated.prototype
        kind = kind.removesuffix(_AT_PRIOR)
        rows = tuple(_synthetic(a, _FEW, kind, rng) for a in self.private)
        z = {name: (x + rng.uniform(-1, 1, x.shape)).astype(x.dtype) for name, x in sorted(centre.items())}
        positions = {name: rng.random((_FEW, *shape)) for name, (shape, _) in self._discrete.items()}
        values = {} if self._latents is None else self._latents.prototype
        values = {name: rng.normal(size=(_FEW, *x.shape)).astype(x.dtype) for name, x in sorted(values.items())}
        return z, rows, _Own(positions, values), np.asarray(kind in _SYNTHETIC_VALUES)

    def _join(self, own: "_Own", num_rows: int, num_units: int) -> "_Own":
        """Latents of a few single rows, stacked, as those of a table in which these are repeated."""
        axes = {name: axis for name, (_, axis) in self._discrete.items()}
        sizes = dict.fromkeys(axes, num_rows)
        if self._latents is not None:
            axes |= self._latents.axes
            sizes |= dict.fromkeys(self._latents.names, num_units)

        def join(name: str, x: jax.Array) -> jax.Array:
            repeated = x[jnp.arange(sizes[name]) % self.num_few]
            return jnp.moveaxis(jnp.squeeze(repeated, axes[name]), 0, axes[name])

        return _Own(*({name: join(name, x) for name, x in group.items()} for group in own))

    @property
    def _num_units(self) -> int:
        """Of the whole table: as many as there are rows, if each has its own latents."""
        if self._latents is None or not self._latents.plates:
            return self.separated.num_rows
        return max(self._latents.sizes.values())

    def counts(self) -> tuple[np.ndarray, np.ndarray]:
        """How often each of the few rows, and each of their latents, is there among all rows."""
        numbers = np.arange(self.separated.num_rows), np.arange(self._num_units)
        rows, units = (np.bincount(k % self.num_few, minlength=self.num_few) for k in numbers)
        return rows, units

    def _of_units(self, rows: Sequence, units: jax.Array | None = None) -> tuple:
        """Rows of given units, or of as many as there are different rows."""
        codes = None if self._latents is None else self._latents.codes
        units = jnp.arange(rows[0].shape[0]) % self.num_few if units is None else units
        return tuple(units.astype(x.dtype) if k == codes else x for k, x in enumerate(rows))

    def _sites(
        self,
        args: tuple,
        kwargs: dict,
        z: Params,
        rows: Sequence,
        own: "_Own",
        size: int,
        plates: frozenset[str],
        units: jax.Array | None = None,
    ) -> tuple:
        """Summed log density of each sample site, value of each released deterministic site.

        :param plates: those with `size` members.
        """
        separated = self.separated
        model = keep_sites(fix_latents(separated.model, own.positions), lambda name: True, plates, size)
        args, kwargs = separated.with_private(args, kwargs, self._of_units(rows, units))
        constrained = constrain_fn(model, args, kwargs, {**z, **own.values})
        densities, sites = compute_log_probs(model, args, kwargs, constrained)
        values = {name: site["value"] for name, site in sites.items() if site["type"] == "deterministic"}
        return densities, {name: v for name, v in values.items() if name not in separated.dropped_sites}

    def _evaluate_few(
        self, args: tuple, kwargs: dict, z: Params, candidates: tuple, own: "_Own", prefer_finite: jax.Array
    ) -> _Few:
        separated, few, plates = self.separated, self.num_few, self.separated.plates_of_one
        one_row = jax.tree.map(lambda x: x[:, None], candidates)  # one-row tables, stacked
        by_row, deterministic = jax.vmap(lambda row, own: self._sites(args, kwargs, z, row, own, 1, plates))(
            one_row, own
        )
        finite = jnp.all(jnp.isfinite(jnp.stack([by_row[name] for name in separated.row_sites])), 0)
        # Rows on which the model makes sense, again and again; missing values are there to be met, though.
        usable = finite | ~prefer_finite
        chosen = jnp.argsort(~usable)[jnp.arange(few) % jnp.maximum(jnp.sum(usable), _FEWEST)]
        rows, few_own = jax.tree.map(lambda x: x[chosen], (candidates, own))
        whole, _ = self._sites(args, kwargs, z, rows, self._join(few_own, few, few), few, plates)
        given, of_latents = self._row_log_densities(args, kwargs, z, one_row, own)
        return _Few(
            rows=rows,
            own=few_own,
            by_row={name: d[chosen] for name, d in by_row.items()},
            whole=whole,
            beside_own=self._beside_own(args, kwargs, z, rows, few_own),
            deterministic=jax.tree.map(lambda value: value[0], deterministic),
            log_prior=separated.log_prior(args, kwargs)(separated.ravel(z)),
            row_log_density=given[chosen],
            latent_log_density=of_latents[chosen],
        )

    def _beside_own(self, args: tuple, kwargs: dict, z: Params, rows: tuple, own: "_Own") -> tuple[dict, dict]:
        """Log densities of sites, row by row and together, where rows of one unit differ and all latents are alike.

        Else what a model computes from all rows of a unit (their mean, the row before) would be that of a row alone.
        """
        if self._latents is None or not self._latents.plates:
            return {}, {}
        own = own._replace(values={name: jnp.broadcast_to(x[:1], x.shape) for name, x in own.values.items()})
        one_row, few, plates = jax.tree.map(lambda x: x[:, None], rows), self.num_few, self.separated.plates_of_one
        by_row, _ = jax.vmap(lambda row, own: self._sites(args, kwargs, z, row, own, 1, plates))(one_row, own)
        units = jnp.arange(few) // 2
        return by_row, self._sites(args, kwargs, z, rows, self._join(own, few, few), few, plates, units)[0]

    def _row_log_densities(self, args: tuple, kwargs: dict, z: Params, one_row: tuple, own: "_Own") -> tuple:
        given = self.separated.row_log_density_at(args, kwargs)
        of_latents = self.separated.latent_log_density(args, kwargs, is_proper=False)

        def of_row(row: tuple, own: _Own) -> tuple[jax.Array, jax.Array]:
            row = row if self._latents is None else self._latents.own(row)
            density = given({**z, **own.values}, row, own.positions)
            return density, of_latents(z, own.values, row) if own.values else jnp.zeros_like(density)

        return jax.vmap(of_row)(one_row, own)

    def _evaluate_all(self, args: tuple, kwargs: dict, z: Params, rows: tuple, own: "_Own") -> _All:
        n = self.separated.num_rows
        every_row = self._of_units(jax.tree.map(lambda x: x[jnp.arange(n) % self.num_few], rows))
        own = self._join(own, n, self._num_units)
        model = fix_latents(self.separated.model, own.positions)
        arguments = self.separated.with_private(args, kwargs, every_row)
        total = -potential_energy(model, *arguments, {**z, **own.values})
        return _All(total, *self._sites(args, kwargs, z, every_row, own, n, self.separated.row_plates))


def _num_few(separated: SeparableModel) -> int:
    """How many rows are compared; in a table, each of them may be another unit's."""
    latents = separated.latents
    return _FEW if latents is None or not latents.plates else min(_FEW, *latents.sizes.values())


def _one_row(site: Site, row_plates: frozenset[str]) -> tuple[Shape, int]:
    """Shape of a site in the row plate at a single row, and the axis of the rows, from the right."""
    (axis,) = {site.plate_dims[name] for name in site.plates & row_plates}
    shape = list(site.shape)
    shape[axis] = 1
    return tuple(shape), axis


# -- Synthetic rows ----------------------------------------------------------------------------------------------------


_STAND_FOR_MISSING = (-9, 99, 999)

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


def synthetic_rows(
    arguments: Sequence[Argument], size: int, rng: np.random.Generator, without: Collection[str] = ()
) -> tuple[np.ndarray, ...]:
    """So many rows of each kind, as tables of one row, stacked: an array of shape (rows, 1, ...) for each argument.

    :param without: kinds that are left out.
    """
    kinds = [kind for kind in _SYNTHETIC_VALUES if kind not in without]
    tables = [[_synthetic(a, size, kind, rng)[:, None] for a in arguments] for kind in kinds]
    return tuple(np.concatenate(columns) for columns in zip(*tables, strict=True))


def _synthetic(argument: Argument, size: int, kind: str, rng: np.random.Generator) -> np.ndarray:
    shape = (size, *argument.row_shape)
    if jnp.issubdtype(argument.dtype, jnp.bool_):
        return rng.random(shape) < 0.7
    if jnp.issubdtype(argument.dtype, jnp.integer):
        low, high = {"positive": (1, 3), "wide": (0, 6), "large": (0, 3000)}.get(
            kind, (1, 3) if " in " in kind else (0, 2)
        )
        whole = rng.integers(low, min(high, jnp.iinfo(argument.dtype).max), shape)
        return _with_stand_in(argument, whole, kind).astype(argument.dtype)
    values = _SYNTHETIC_VALUES.get(kind, _SYNTHETIC_VALUES["unit"])(rng, shape)
    if kind == f"missing {argument.name}":
        values[1:] = np.where(rng.random(values[1:].shape) < 0.4, np.nan, values[1:])  # some row is complete
        values.reshape(size, -1)[1, :1] = np.nan
    return _with_stand_in(argument, values, kind).astype(argument.dtype)


def _with_stand_in(argument: Argument, values: np.ndarray, kind: str) -> np.ndarray:
    """Values of which one row's are a number that stands for a missing one, if this kind is about this argument."""
    number, _, name = kind.partition(" in ")
    if name == argument.name and (float(number) >= 0 or not jnp.issubdtype(argument.dtype, jnp.unsignedinteger)):
        values[1] = float(number)
    return values
