"""Everything that comes before the first look at the table: what the search needs to know of the model.

No row is read here. The model, its prior and synthetic rows decide in which coordinates the table will be asked, where
the search starts, and whether there is hope for a useful answer.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.distributions import constraints

from numpyro_dp.chain.finished import by_coordinate, widths
from numpyro_dp.chain.target import PrivateTarget
from numpyro_dp.chain.worth import TYPICAL_CLIP, tight_slope
from numpyro_dp.model.arguments import PublicArguments
from numpyro_dp.model.coordinates import Cut, find_cut
from numpyro_dp.model.separable import SeparableModel
from numpyro_dp.model.symmetry import Symmetry, find_symmetries
from numpyro_dp.model.synthetic import synthetic_rows
from numpyro_dp.preparation.discontinuities import find_discontinuities
from numpyro_dp.preparation.frames import NormalPrior, place_of, rough_normal
from numpyro_dp.preparation.fund import BEGUN, RESERVE, Fund
from numpyro_dp.preparation.options import Preparation, require_draws, require_hope, warn_if_blurred
from numpyro_dp.preparation.row_scores import has_kinks
from numpyro_dp.preparation.survey import Survey, is_centred
from numpyro_dp.privacy.fingerprint import fingerprint
from numpyro_dp.privacy.ledger import Ledger, PrivacyBudgetError
from numpyro_dp.statements import some_of

PRIOR_DRAWS = 1000
MANY_LATENTS = 50
"""So many values of one site may be one for each person."""
_WITHOUT_SCALE = (
    constraints.ordered_vector,
    constraints.simplex,
    constraints.corr_cholesky,
    constraints.corr_matrix,
    constraints.sphere,
)
"""Supports beside intervals of which the unconstrained values are a few units in size."""


class OwnAlgorithm(NamedTuple):
    """That of a kernel which goes on with its own chain, in the coordinates that the preparation finds.

    :ivar kind: of its releases, "ratio" or "grad"; it needs a clip bound for these.
    :ivar worth: about how many independent draws its planned iterations make, by the clip bound (not tempered), the
        number of parameters and that of rows.
    """

    kind: str
    worth: Callable[[float, int, int], float]


class Begun(NamedTuple):
    """A preparation before it asks the table.

    :ivar z_draws: of the prior; flat and unconstrained.
    :ivar improper: supports of sites whose prior is: their draws are what the user says of them.
    :ivar z_prior, prior: rough normal laws of them, in unconstrained parameters, and in the cut's coordinates.
    :ivar near: where to start, in the latter.
    :ivar symmetries: of the joint density.
    :ivar target: on all rows.
    :ivar row_log_density: of unconstrained parameters and a row.
    :ivar steps: see `Prepared`.
    :ivar own: the kernel's own algorithm; None where the preparation chooses one.
    :ivar asked: see `asked_in_search`; None where nobody has found it yet.
    """

    options: Preparation
    survey: Survey
    z_draws: np.ndarray
    improper: Mapping[str, Any]
    z_prior: NormalPrior
    prior: NormalPrior
    near: NormalPrior
    symmetries: list[Symmetry]
    target: PrivateTarget
    row_log_density: Callable[[jax.Array, tuple], jax.Array]
    steps: tuple[str, ...]
    own: OwnAlgorithm | None
    asked: str | None = None

    @property
    def cut(self) -> Cut:
        return self.survey.cut


def begin(
    options: Preparation,
    separated: SeparableModel,
    public: PublicArguments,
    target: Callable[[], PrivateTarget],
    ledger: Ledger,
    power: float,
    own: OwnAlgorithm | None = None,
) -> Begun:
    """What the search needs to know of the model, without a look at the table.

    :param target: makes one on all rows.
    :param power: of the likelihood.
    :raises PrivacyBudgetError: if there is no hope for a useful answer, or a search was begun before.
    :raises ValueError: if nothing says how large a parameter may be, or `options` name a site that is not there.
    """
    args, kwargs = public.args, public.kwargs
    cut = cut_of_units(separated, args, kwargs)
    if RESERVE not in ledger.plan.kinds:
        raise PrivacyBudgetError(BEGUN)
    _require_hope(options, separated, cut, ledger, power, own)
    ledger.require({RESERVE: 1}, 1, None, "the preparation")
    z_draws, improper = separated.prior_draws(PRIOR_DRAWS, args, kwargs)
    z_draws = _scaled_draws(options, separated, z_draws, improper)
    of_rows = target()
    # Outcomes that are drawn tell the information, but only where rows have public places.
    is_smooth = is_centred(cut, of_rows) or not _has_kinks(cut, separated, args, kwargs, z_draws)
    survey = Survey(of_rows, cut, is_smooth)
    survey.require_derivatives()
    z_prior = rough_normal(z_draws)
    guess = _public_guess(options, separated, z_prior)
    prior = rough_normal(_map(cut.coordinates, z_draws))
    near = rough_normal(_map(cut.coordinates, z_draws if guess is None else guess))
    if guess is None:
        near = near._replace(mean=_map(cut.coordinates, place_of(z_draws)[None])[0])
    symmetries = find_symmetries(separated, args, kwargs, z_draws)
    steps = tuple(_steps(cut, separated, args, kwargs, _map(cut.coordinates, z_draws), prior))
    of_row = separated.row_log_density(args, kwargs)
    return Begun(options, survey, z_draws, improper, z_prior, prior, near, symmetries, of_rows, of_row, steps, own)


def asked_in_search(begun: Begun, ledger: Ledger) -> str:
    """A hash of where the search starts, and of what it asks of a row; with a noise seed only.

    Draws of the prior and of outcomes decide on both. They follow from densities only as far as samplers do.
    """
    if not ledger.reproducible or ledger.closed:
        return ""
    return fingerprint([], (begun.survey.of_one_row(), begun.prior, begun.near))


def cut_of_units(separated: SeparableModel, args: tuple, kwargs: dict) -> Cut:
    """The coordinates in which the parameters meet the data; where a unit has several rows, these are its rows."""
    cut = find_cut(separated.of_rows, args, kwargs, separated.of_rows is separated)
    if separated.of_rows is separated:
        return cut
    of_unit: Callable = separated.per_unit if cut.parts is None else separated.integrate
    given, drawn = (cut.row_log_density, cut.drawn_log_density) if cut.parts is None else (cut.parts, cut.drawn_parts)
    if cut.row_weight is not None:  # rows of a unit may count differently
        drawn = None
    return dataclasses.replace(
        cut,
        row_weight=None,
        draw_count=None,
        count_log_density=None,
        apart=None,  # the rows of a unit may be of different groups
        row_log_density=of_unit(given),
        drawn_log_density=None if drawn is None else of_unit(drawn),
    )


def widths_of_prior(
    separated: SeparableModel, public: PublicArguments, z_draws: np.ndarray, improper: Mapping[str, Any]
) -> dict[str, float]:
    """Of each parameter as users know it, from flat unconstrained draws; an improper prior has no width."""

    def parameters(z: jax.Array) -> dict[str, jax.Array]:
        sites = separated.constrain(public.args, public.kwargs)(separated.unravel(z))
        return {name: sites[name] for name in separated.prototype if name in sites.keys() - improper}

    free = {name: np.size(value) for name, value in separated.prototype.items()}
    values = jax.jit(jax.vmap(parameters))(jnp.asarray(z_draws, jnp.result_type(float)))
    single = by_coordinate(values, free, 1)
    return widths({name: value for name, value in single.items() if value.ndim == 1})


def _require_hope(
    options: Preparation,
    separated: SeparableModel,
    cut: Cut,
    ledger: Ledger,
    power: float,
    own: OwnAlgorithm | None,
) -> None:
    """Refuse or warn, by public numbers only; under add/remove the number of rows is none."""
    plan = ledger.plan
    if options.force or plan.num_rows is None:
        return
    rho, counted, size = Fund(ledger).left, plan.num_rows / power, separated.num_params
    units = "rows" if separated.of_rows is separated else "units"
    require_hope(cut.size, counted, rho, options, plan.eps, plan.delta, units, _advice_on_units(separated))
    if own is None:
        warn_if_blurred(cut.size, counted, rho, options, plan.eps, plan.delta, units)
        return
    slope = TYPICAL_CLIP * tight_slope(plan.num_rows, size, power) / power
    require_draws(own.worth(slope, size, plan.num_rows), plan.num_rows, plan.eps, units)


def _advice_on_units(separated: SeparableModel) -> str:
    """What to do about a latent for each of many people, if there is one; by shapes alone."""
    sizes = {name: np.size(value) for name, value in separated.prototype.items()}
    name = max(sizes, key=lambda name: sizes[name])
    if sizes[name] < MANY_LATENTS or separated.of_rows is not separated:
        return ""
    return (
        f"Site {name!r} has {sizes[name]:,} values: if each is of a person with rows of their own, name the column "
        "that says whose a row is (`unit=`), and they are integrated out. "
    )


def _scaled_draws(
    options: Preparation, separated: SeparableModel, z_draws: np.ndarray, improper: Mapping[str, Any]
) -> np.ndarray:
    """Draws of the prior, those of improper sites replaced by what the user says of their place and scale.

    :param improper: supports of these sites.
    :raises ValueError: if the user does not say how large one may be, and its support does not, either.
    """
    scales, start = options.scales or {}, options.start or {}
    unknown = sorted(name for name, support in improper.items() if name not in scales and _has_scale(support))
    if unknown and not options.force:
        raise ValueError(
            f"improper prior of {some_of(unknown)}: it does not say how large a parameter may be, with which the "
            "search for the posterior begins. Nothing was released. Give a proper prior, rather too wide than too "
            "narrow. Or say by `prepare=Preparation(scales={...})`, for each of these sites, how far from 0 (or "
            "from its `start`) it may be; of a positive one, how far its logarithm"
        )
    said = sorted(improper.keys() & set(scales))
    if not said:
        return z_draws
    sites = jax.vmap(separated.unravel)(jnp.asarray(z_draws, jnp.result_type(float)))
    rng = np.random.default_rng(0)
    for name in said:
        normal = rng.standard_normal(sites[name].shape)
        sites[name] = jnp.asarray(start.get(name, 0.0) + scales[name] * normal, sites[name].dtype)
    return np.asarray(jax.vmap(separated.ravel)(sites), float)


def _has_scale(support: Any) -> bool:
    """Whether unconstrained values may be of any size: not within bounds, nor those of cut points on a link's scale."""
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    return not isinstance(support, constraints.interval) and support not in _WITHOUT_SCALE


def _public_guess(options: Preparation, separated: SeparableModel, z_prior: NormalPrior) -> np.ndarray | None:
    """Draws from where the search starts, if the user says so; flat and unconstrained."""
    if options.start is None and options.scales is None:
        return None

    def flat(given: Mapping[str, Any], default: np.ndarray) -> np.ndarray:
        sites = separated.unravel(jnp.asarray(default, jnp.result_type(float)))
        unknown = set(given) - set(sites)
        if unknown:
            raise ValueError(f"Preparation names {sorted(unknown)}, but the sites are {sorted(sites)}")
        return np.asarray(
            separated.ravel({name: jnp.broadcast_to(given.get(name, x), x.shape) for name, x in sites.items()}),
            float,
        )

    mean = flat(options.start or {}, z_prior.mean)
    scale = flat(options.scales or {}, np.sqrt(np.diag(z_prior.covariance)))
    return mean + scale * np.random.default_rng(0).standard_normal((PRIOR_DRAWS, len(mean)))


def _steps(
    cut: Cut, separated: SeparableModel, args: tuple, kwargs: dict, phi_draws: np.ndarray, prior: NormalPrior
) -> list[str]:
    """`find_discontinuities` on synthetic rows, of the model as it is row by row."""
    if not cut.has_thresholds:
        return []
    cut, rows = _row_by_row(cut, separated, args, kwargs)
    return find_discontinuities(cut.row_log_density, rows, cut.names, phi_draws[:4], np.sqrt(np.diag(prior.covariance)))


def _has_kinks(cut: Cut, separated: SeparableModel, args: tuple, kwargs: dict, z_draws: np.ndarray) -> bool:
    """By synthetic rows, of the model as it is row by row."""
    cut, rows = _row_by_row(cut, separated, args, kwargs)
    return has_kinks(cut, _map(cut.coordinates, z_draws[:8]), rows)


def _row_by_row(cut: Cut, separated: SeparableModel, args: tuple, kwargs: dict) -> tuple[Cut, tuple]:
    """The cut of the model as it is row by row, and synthetic rows for it."""
    model = separated.of_rows
    rows = synthetic_rows(model.private_arguments(), 16, np.random.default_rng(0))
    return cut if model is separated else find_cut(model, args, kwargs), rows


def _map(function: Callable[[jax.Array], jax.Array], points: np.ndarray) -> np.ndarray:
    return np.asarray(jax.vmap(function)(jnp.asarray(points, jnp.result_type(float))), float)
