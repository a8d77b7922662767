"""Kernels that prepare themselves privately before a chain runs.

The preparation (`numpyro_dp.preparation`) finds where the posterior is and how far it is from Gaussian in the
coordinates in which the parameters meet the data. By released numbers only it then chooses one of the chains in
`numpyro_dp.kernels.chains`.
"""

import dataclasses
import hashlib
import math
import pickle
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import random
from numpyro.infer.initialization import init_to_sample
from numpyro.util import is_prng_key

from numpyro_dp import accounting
from numpyro_dp.accounting import noise_multiplier_for
from numpyro_dp.cut import Cut, find_cut
from numpyro_dp.kernels.base import Algorithm, DPKernel, DPState
from numpyro_dp.kernels.chains import CHAINS, Chain, Prepared
from numpyro_dp.kernels.survey import Frame, Survey
from numpyro_dp.kernels.target import Draw, Grid
from numpyro_dp.ledger import PrivacyBudgetError, Releases, Request, Wanted, flat_releases
from numpyro_dp.mechanisms import Gaussian, Mechanism
from numpyro_dp.model import SeparableModel
from numpyro_dp.noise import GridNoise
from numpyro_dp.planning import DOUBTFUL_UNSEEN, UNCENTRED, walk_draws
from numpyro_dp.preparation import (
    NARROW,
    Check,
    NormalPrior,
    Preparation,
    Round,
    check,
    final_releases,
    final_stages,
    find_mirror,
    locate,
    preparation_releases,
    require_hope,
    require_sight,
    rough_normal,
    start_near,
    unseen_share,
    warn_if_blurred,
)
from numpyro_dp.sharding import Layout
from numpyro_dp.symmetry import Symmetry, find_symmetries

RESERVE = "reserve"
SLOPE_GRID = Grid(2.0**0.5, 6)
PRIOR_DRAWS = 1000
FINAL = ("final bounds", "final curvature", "final gradient")
ENOUGH_DRAWS = 100
FAR = 4.0
"""Distance of the surrogate's mode above which a warning is due."""
QUADRATIC = 0.15
"""Spread of the residuals, in log density, below which nothing is better than a quadratic."""
CURVED = 0.25
"""Spread above which a warning is due where nothing better than a quadratic can be paid for."""
DISAGREE = 0.25
"""Disagreement of the released curvatures, where the posterior's precision is about 1, above which a warning is due."""


_OTHER_PUBLIC = (
    "this kernel was prepared with another model or other public arguments, on which its coordinates and its prior "
    "rest: make a new kernel, whose eps adds to this one's, or pass the same values"
)


class PreparedKernel(DPKernel):
    """A private kernel that prepares itself, unless told not to.

    :param prepare: how; None for a kernel without.
    :param noise_aware: whether draws carry the uncertainty that one-off noise adds (mode "surrogate", "residual").
    """

    def __init__(self, *args: Any, prepare: Preparation | None, noise_aware: bool = True, **options: Any):
        self._preparation, self._noise_aware = prepare, noise_aware
        self._resolved: Preparation | None = None  # with all shares, once the size of the table is known
        self._strategy_given = options.get("init_strategy") is not None
        self._chain: Chain | None = None
        self._public: list | None = None  # the public arguments that it was prepared with
        self._public_hash: str | None = ""  # of them, for whoever resumes a pickled kernel
        self._result: Prepared | None = None
        super().__init__(*args, **options)

    @property
    def prepared(self) -> Prepared | None:
        """What the preparation has found and decided; None before it, or without one."""
        return self._result

    @property
    def _algorithm(self) -> Algorithm:
        if self._preparation is None:
            return self
        return _NotYet() if self._chain is None else self._chain

    # -- The budget --------------------------------------------------------------------------------------------------

    def _wanted(self, num_rows: int, num_iterations: int, num_chains: int) -> dict[str, Wanted]:
        if self._preparation is None:
            return super()._wanted(num_rows, num_iterations, num_chains)
        known = num_rows if self._neighboring_relation == "replace_one" else None
        delta = 0.1 / num_rows if self._delta is None else self._delta
        rho = accounting.gaussian_rho(cast(float, self._eps), delta)
        self._resolved = self._preparation.resolved(self._num_params, known, self._power(num_rows), rho)
        wanted = {}
        for kind, (counts, shares) in preparation_releases(self._resolved).items():
            # A stage's noise multiplier, if the stage alone were to cost its share of a rho of 1/2.
            relative = tuple(math.sqrt(count / share) for count, share in zip(counts, shares, strict=True))
            wanted[kind] = Wanted(_Scaled(relative), counts, math.fsum(shares))
        wanted[RESERVE] = Wanted(_Scaled((1.0,)), (1,), self._resolved.reserve)
        return wanted

    def _describe_clip(self, kind: str) -> str:
        if self._preparation is None:
            return super()._describe_clip(kind)
        if kind in ("bounds", "final bounds", "slope", "check bound"):
            return "counts of rows"
        if kind == "line search":
            return "each row's rise clipped to the linear part's bound"
        if kind in ("ratio", "residual") and self._result is not None and self._result.slope is not None:
            return f"clipped to {self._result.slope:.3g} per unit of distance in whitened coordinates"
        return "clip bounds from the released counts"

    def _describe_exactness(self) -> str:
        if self._preparation is None:
            return super()._describe_exactness()
        where = {
            "surrogate": "the log likelihood is close to a quadratic in the coordinates of the release, and few rows' "
            "gradients are clipped",
            "residual": "no row's residual is clipped",
            "walk": "no row's log ratio is clipped",
        }
        known = "not known yet" if self._result is None else where[self._result.mode]
        centred = (
            ". Clipped gradients are centred by those of outcomes drawn from the model: where the rows are not as the "
            "model says, what the clip takes from them moves the posterior"
        )
        return (
            f"clip bounds, coordinates and step sizes were found privately; the posterior is right where {known}"
            f"{centred if self._result is not None and self._result.centred else ''}"
        )

    def _describe_posterior(self) -> str:
        if self._preparation is None:
            return super()._describe_posterior()
        if self._result is None:
            return "none: the preparation did not end"
        result = self._result
        aware = "noise-aware" if self._noise_aware else "plug-in (its noise is ignored)"
        released = f"the exact prior times a {aware} quadratic likelihood that was released once"
        found = f"mode '{result.mode}': "
        found += {
            "surrogate": f"NUTS draws of {released}. More draws cost nothing",
            "residual": f"a chain on {released}, times the rows' residuals, by an exact test on each",
            "walk": "a chain on the posterior, by an exact test on each proposal",
        }[result.mode]
        if result.check is not None:
            found += (
                f". By the check, the log likelihood is {result.check.spread:.2g} from a quadratic (noise of the check "
                f"{result.check.scale:.1g})"
            )
        return ". It may be off: ".join([found, *_doubts(result)])

    # -- The preparation ---------------------------------------------------------------------------------------------

    def require_budget(self, num_iterations, num_chains, model_args, model_kwargs, planned, start=0) -> None:
        if self._result is not None and self._chain is None and not self._ledger.closed:
            self._take_up(model_args, model_kwargs)
        super().require_budget(num_iterations, num_chains, model_args, model_kwargs, planned, start)
        plan = self._ledger.plan
        if self._preparation is None or self._chain is not None or self._preparation.mode == "surrogate":
            return
        if num_iterations * num_chains > plan.num_iterations * plan.num_chains:
            raise PrivacyBudgetError(
                f"the privacy budget (eps={plan.eps:g}) is planned for {plan.num_chains} chain(s) of "
                f"{plan.num_iterations} iterations. Should the preparation choose a chain whose iterations cost, that "
                f"does not allow {num_chains} chain(s) of {num_iterations}. Nothing was released. Give the kernel the "
                "`num_iterations` and `num_chains` that the run needs, or `prepare=Preparation(mode='surrogate')`"
            )

    def _check_arguments(self, model_args: tuple, model_kwargs: dict) -> None:
        if self._preparation is None:
            return
        leaves = jax.tree.leaves((model_args, model_kwargs))
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            if self._chain is not None:
                return
            raise ValueError(
                "the preparation cannot run on traced arrays: call `kernel.prepare(...)` with the model's arguments "
                "first, or use numpyro_dp.MCMC, which does it for you"
            )
        if self._public is None:
            return
        public = self._public_leaves(model_args, model_kwargs)
        if not (len(public) == len(self._public) and all(map(_equal, public, self._public))):
            raise ValueError(_OTHER_PUBLIC)

    def _public_leaves(self, model_args: tuple, model_kwargs: dict) -> list:
        leaves = jax.tree.leaves((model_args, model_kwargs))
        arguments = self._separate(model_args, model_kwargs).arguments
        return [leaf for leaf, a in zip(leaves, arguments, strict=True) if not a.private]

    def _check_layout(self, layout: Layout) -> None:
        super()._check_layout(layout)
        if self._preparation is not None and layout.num_processes > 1:
            raise ValueError(
                "a kernel with a preparation cannot run in several processes: each would draw noise of its own for the "
                "same sums. Give `prepare=False`, or put the table on the devices of one process"
            )

    def _prepare(self, separated: SeparableModel, model_args: tuple, model_kwargs: dict) -> None:
        if self._preparation is None:
            return
        if self._result is not None and self._chain is None:
            self._take_up(model_args, model_kwargs)
        if self._chain is None:
            with jax.ensure_compile_time_eval():
                search = self._begin_search(separated, model_args, model_kwargs)
                prepared = self._search(search)
                self._chain = self._make_chain(prepared, search.survey.cut, separated, model_args, model_kwargs)
            self._result = prepared
            self._public = self._public_leaves(model_args, model_kwargs)
            self._public_hash = _hash(self._public)
            # Now that what was paid for is kept: a warning may be an error.
            for doubt in () if search.options.force else _doubts(prepared):
                warnings.warn(f"the posterior may be off: {doubt}", RuntimeWarning, stacklevel=2)
        self._chain.num_warmup = getattr(self, "_num_warmup", 0)

    def _settings(self) -> list[tuple[str, Any]]:
        # Not by `repr`, which abbreviates large arrays.
        given = vars(self._preparation) if self._preparation is not None else {}
        leaves, tree = jax.tree.flatten(dict(given))
        values = [leaf.tobytes() if hasattr(leaf, "tobytes") else np.asarray(leaf).tobytes() for leaf in leaves]
        return [*super()._settings(), ("preparation", (str(tree), values))]

    def _begin_search(self, separated: SeparableModel, args: tuple, kwargs: dict) -> "_Search":
        """Everything that comes before the first look at the table.

        :raises PrivacyBudgetError: if there is no hope for a useful answer, or a search was begun before.
        """
        options, plan = self._resolved, self._ledger.plan
        assert options is not None
        cut = _cut_of_units(separated, args, kwargs)
        if not options.force and plan.num_rows is not None:
            rho, counted = _rho(plan.kinds), plan.num_rows / self._power(separated.num_rows)
            require_hope(cut.size, counted, rho, options, plan.eps)
            require_sight(plan.num_rows, rho, options, plan.eps)
            warn_if_blurred(cut.size, counted, rho, options, plan.eps)
        counts = {kind: sum(shares.counts) for kind, shares in preparation_releases(options).items()}
        self._ledger.require(counts, 1, None, "the preparation")
        survey = Survey(self._target(separated, args, kwargs), cut)
        survey.require_derivatives()
        z_draws = self._prior_draws(separated, args, kwargs)
        z_prior = rough_normal(z_draws)
        guess = self._public_guess(separated, z_prior)
        prior = rough_normal(_map(cut.coordinates, z_draws))
        near = prior if guess is None else rough_normal(_map(cut.coordinates, guess))
        return _Search(options, survey, z_prior, prior, near, find_symmetries(separated, args, kwargs, z_draws))

    def _search(self, search: "_Search") -> Prepared:
        """Ask the table, and decide by its noisy answers."""
        options, survey, z_prior, prior, near, _ = search
        cut, rho = survey.cut, _rho(self._ledger.plan.kinds)
        frame, rounds = locate(survey, near, self._draw_for, options, rho)
        found = check(survey, frame, rounds[-1], self._draw_for)
        mode = options.mode or self._choose(found, rounds[-1], options.reserve * rho, survey.power)
        self._ledger.assign(RESERVE, self._spend(mode, options))
        surrogate, last, distance, disagreement = None, rounds[-1], None, None
        if mode != "walk":
            final = _rho({kind: self._ledger.plan.kinds[kind] for kind in FINAL})
            surrogate, last, distance, disagreement = final_releases(
                survey, frame, rounds, prior, self._draw_for, options, final, mode == "residual"
            )
            frame = surrogate.frame
        slope, step = self._proposals(mode, survey, frame, last.bounds) if mode != "surrogate" else (None, 1.0)
        start, covariance = start_near(cut, frame, surrogate, z_prior)
        mirror = None if surrogate is None else find_mirror(search.symmetries, cut, surrogate, start)
        return Prepared(
            mode,
            found,
            cut.names,
            frame,
            surrogate,
            last.bounds,
            slope,
            start,
            covariance,
            step,
            distance,
            mode != "walk" and last.centred,
            0.0 if (num_rows := self._ledger.plan.num_rows) is None else unseen_share(num_rows, rho, options),
            disagreement,
            mirror,
        )

    def _make_chain(self, prepared: Prepared, cut: Cut, separated: SeparableModel, args: tuple, kwargs: dict) -> Chain:
        power = self._power(separated.num_rows)
        return CHAINS[prepared.mode](prepared, cut, separated.log_prior(args, kwargs), self._noise_aware, power)

    def _take_up(self, args: tuple, kwargs: dict) -> None:
        """Make the chain anew that a kernel had chosen before it was pickled; the table is not asked again."""
        separated, prepared = self._separate(args, kwargs), self._result
        assert prepared is not None
        public = self._public_leaves(args, kwargs)
        with jax.ensure_compile_time_eval():
            cut = _cut_of_units(separated, args, kwargs)
            if self._public_hash is None:
                raise ValueError(
                    "this run has a public argument that cannot be pickled: nobody can tell whether it is the same "
                    "now. Make a new kernel, and bind such things to the model with `functools.partial`"
                )
            if _hash(public) != self._public_hash or cut.names != prepared.coordinates:
                raise ValueError(_OTHER_PUBLIC)
            self._chain = self._make_chain(prepared, cut, separated, args, kwargs)
        self._public = public

    def _choose(self, found: Check, last: Round, reserve: float, power: float) -> str:
        """Which chain serves, by released numbers."""
        if found.spread + 2 * found.scale < QUADRATIC:
            return "surrogate"
        if walk_draws(2 * power * last.bounds[0], len(last.score), reserve) >= ENOUGH_DRAWS:
            return "walk"
        return "surrogate" if found.spread < 1 else "residual"

    def _spend(self, mode: str, options: Preparation) -> dict[str, Releases]:
        """What the reserve is spent on."""
        plan = self._ledger.plan
        reserve = _rho({RESERVE: plan.kinds[RESERVE]}) * (1 - 1e-12)
        last = {"surrogate": 1.0, "residual": 0.85, "walk": 0.0}[mode]
        curvature = options.final_curvature or 0.0
        shares = {
            "final bounds": (last * options.final_bounds, 2 * NARROW.num_counts),
            "final curvature": (last * curvature, 1),
            "final gradient": (last * (1 - options.final_bounds - curvature), 1),
        }
        if mode != "surrogate":
            chain = "ratio" if mode == "walk" else "residual"
            shares["slope"] = (0.03, SLOPE_GRID.num_counts)
            shares[chain] = (1 - last - 0.03, plan.num_iterations * plan.num_chains)
        stages = dict.fromkeys(FINAL, final_stages(mode == "residual"))
        return {
            kind: _in_stages(share * reserve, count, stages.get(kind, (1.0,)))
            for kind, (share, count) in shares.items()
            if share
        }

    def _proposals(self, mode: str, survey: Survey, frame: Frame, bounds: np.ndarray) -> tuple[float, float]:
        """Clip bound per unit of distance, and the length of a jump, with which the noise of a test is about right.

        Short jumps need little noise: where the noise decides, one standard deviation of about 2 mixes best for a walk,
        and the more iterations there are, the shorter they are.
        """
        m, chain = survey.size, "ratio" if mode == "walk" else "residual"
        pairs = np.random.default_rng(1).standard_normal((8, 2, m))
        draws = self._draw_for("slope", 0, SLOPE_GRID.num_counts, ())
        slope = 2 * survey.slope(draws, frame, pairs, SLOPE_GRID, 2.0**-30, 1.0, bounds if mode == "residual" else None)
        noise = self._ledger.plan.kinds[chain].mechanisms[0].noise_multiplier * survey.power * slope
        noise *= 2 if self._neighboring_relation == "replace_one" else 1
        if mode == "walk":
            return slope, min(2.38 / math.sqrt(m), 2 / (noise * math.sqrt(m)))
        return slope, min(math.pi / 2, 1.5 / (noise * math.sqrt(2 * m) * m))

    def _draw_for(self, kind: str, stage: int, number: int, shape: tuple[int, ...]) -> Draw:
        """Draws from the ledger, charged to the budget: `numpyro_dp.preparation.Ask`."""
        request = Request(number, (number, *shape))
        granted, drawn = self._ledger.grant({kind: request}, stage, 0, b"preparation")
        noise = drawn[kind].noise
        if not granted or noise is None:
            raise PrivacyBudgetError(
                "the preparation was begun before and did not end, and its budget is spent: make a new kernel, whose "
                "eps adds to this one's"
            )
        return Draw(
            GridNoise(jnp.asarray(noise[0]), jnp.asarray(noise[1])),
            None,
            jnp.full(number, drawn[kind].noise_multiplier, jnp.result_type(float)),
            jnp.ones(number, bool),
            jnp.zeros((number, 1), jnp.uint32),
            jnp.zeros(number, bool),
        )

    def _prior_draws(self, separated: SeparableModel, args: tuple, kwargs: dict) -> np.ndarray:
        """Flat unconstrained draws of the prior, shape (k, d)."""
        keys = random.split(random.key(0), PRIOR_DRAWS)
        params, valid = separated.init_params(keys, init_to_sample, args, kwargs)
        return np.asarray(jax.vmap(separated.ravel)(params), float)[np.asarray(valid)]

    def _public_guess(self, separated: SeparableModel, z_prior: NormalPrior) -> np.ndarray | None:
        """Draws from where the search starts, if the user says so; flat and unconstrained."""
        options = self._preparation
        assert options is not None
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

    # -- The chains --------------------------------------------------------------------------------------------------

    def _starts_at_a_release(self, init_params: Any) -> bool:
        return self._result is not None and init_params is None and not self._strategy_given

    def _initial_params(self, rng_key, init_params, separated, args, kwargs):
        if not self._starts_at_a_release(init_params):
            return super()._initial_params(rng_key, init_params, separated, args, kwargs)
        result = self._result
        assert result is not None

        def draw(key: jax.Array) -> dict[str, jax.Array]:
            normal = random.normal(key, result.start.shape)
            return separated.unravel(jnp.asarray(result.start + np.linalg.cholesky(result.covariance) @ normal))

        return draw(rng_key) if is_prng_key(rng_key) else jax.vmap(draw)(rng_key)

    def get_diagnostics_str(self, state: DPState) -> str:
        if self._result is None or self._result.mode != "surrogate":
            return super().get_diagnostics_str(state)
        # Nothing is spent any more, and the step size is that of NUTS.
        nuts = state.carry
        return (
            f"eps {self._ledger.plan.eps:.3g} spent, NUTS on the surrogate, acc. prob={nuts.mean_accept_prob:.2f}, "
            f"step size {nuts.adapt_state.step_size:.2e}"
        )

    def __getstate__(self):
        return super().__getstate__() | {"_chain": None, "_public": None}


class _Search(NamedTuple):
    """A preparation before it starts.

    :ivar z_prior, prior: in unconstrained parameters, and in the cut's coordinates.
    :ivar near: where to start, in the latter.
    :ivar symmetries: of the joint density.
    """

    options: Preparation
    survey: Survey
    z_prior: NormalPrior
    prior: NormalPrior
    near: NormalPrior
    symmetries: list[Symmetry]


def _cut_of_units(separated: SeparableModel, args: tuple, kwargs: dict) -> Cut:
    cut = find_cut(separated.of_rows, args, kwargs)
    if separated.of_rows is separated:
        return cut
    drawn = cut.drawn_log_density
    return dataclasses.replace(
        cut,
        row_log_density=separated.per_unit(cut.row_log_density),
        drawn_log_density=None if drawn is None else separated.per_unit(drawn),
    )


class _NotYet(Algorithm):
    """In the place of the chain that the preparation will choose."""

    def _releases(self, num_iterations: int, num_chains: int, resumed: bool = False) -> dict[str, int]:
        return {}

    def _noise_shapes(self, num_params: int) -> dict[str, tuple[int, ...]]:
        raise RuntimeError("the kernel is not prepared: call `init` first, or use it in an MCMC")

    _request = _init_carry = _transition = _noise_shapes  # type: ignore[assignment]


@dataclasses.dataclass(frozen=True)
class _Scaled:
    """Gaussian mechanisms with noise multipliers in fixed relations."""

    relative: tuple[float, ...]

    def __call__(self, noise_multiplier: float) -> tuple[Mechanism, ...]:
        return tuple(Gaussian(noise_multiplier * r) for r in self.relative)


def _doubts(result: Prepared) -> list[str]:
    """Why the posterior may be off, by released numbers."""
    doubts, check = [], result.check
    if result.distance is not None and result.distance > FAR:
        doubts.append(
            f"the released likelihood has its mode {result.distance:.1f} times as far from where it was expanded as "
            "its noise explains, and a quadratic may not reach so far. A larger eps, a public start and scales "
            "(`Preparation`), or fewer parameters would help"
        )
    if result.mirror is not None:
        apart = f"about {result.mirror.distance:.0f}" if result.mirror.distance < 1000 else "more than 1,000"
        doubts.append(
            f"prior and likelihood are the same where {result.mirror.what}: the posterior has a hump for each, {apart} "
            "of its standard deviations apart, and the draws show one of them. Say in the model which is which (by a "
            "prior that is ordered or positive), or use only what is the same at both"
        )
    clipped_plainly = result.mode == "surrogate" and not result.centred
    if result.mode != "walk" and result.unseen * (UNCENTRED if clipped_plainly else 1) > DOUBTFUL_UNSEEN:
        doubts.append(
            "clip bounds were searched by counts under whose noise "
            f"{min(result.unseen, 1.0):.0%} of the rows may pass for none: the search for the posterior may have gone "
            "astray, and a scale may be too small. A larger eps, fewer parameters or more rows would help; "
            "`numpyro_dp.rehearse` shows how often it does"
        )
    if result.mode == "surrogate" and result.disagreement is not None and result.disagreement > DISAGREE:
        doubts.append(
            f"the curvature of the log likelihood that was released last is {result.disagreement:.2g} times the "
            "posterior's precision, beyond the noise, from that of all releases together: where they were made, no "
            "single quadratic holds. A larger eps, a public start and scales (`Preparation`), or parameters in which "
            "the likelihood is closer to a normal one would help"
        )
    if result.mode == "surrogate" and check is not None and check.spread - 2 * check.scale > CURVED:
        doubts.append(
            f"within a posterior's width the log likelihood was found to be {check.spread:.2g} from the quadratic that "
            "stands for it, and the budget pays for no chain that would make up for it. A larger eps, or parameters in "
            "which the likelihood is closer to a normal one (degrees of freedom on a log scale, say), would help"
        )
    return doubts


def _in_stages(rho: float, count: int, shares: tuple[float, ...]) -> Releases:
    """As many releases in each stage, of which the whole costs `rho`."""
    mechanisms = tuple(Gaussian(noise_multiplier_for(share * rho, count)) for share in shares)
    return Releases(mechanisms, (count,) * len(shares))


def _rho(kinds: Mapping[str, Releases]) -> float:
    return math.fsum(count * (mechanism.rho or 0.0) for mechanism, count in flat_releases(kinds))


def _hash(leaves: list) -> str | None:
    """Of arrays, numbers and texts, and of what can be pickled; None if something cannot."""
    digest = hashlib.sha256()
    for leaf in leaves:
        if isinstance(leaf, np.generic | np.ndarray | jax.Array):
            is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            array = np.asarray(random.key_data(cast(jax.Array, leaf)) if is_key else leaf)
            digest.update(repr((array.shape, array.dtype)).encode() + array.tobytes())
            continue
        try:
            digest.update(pickle.dumps(leaf, protocol=5) + b"\0")
        except Exception:  # of whatever kind: the preparation is paid for, and must not be lost over this
            return None
    return digest.hexdigest()


def _equal(one: Any, other: Any) -> bool:
    return one is other or bool(np.array_equal(one, other))


def _map(function: Callable[[jax.Array], jax.Array], points: np.ndarray) -> np.ndarray:
    return np.asarray(jax.vmap(function)(jnp.asarray(points, jnp.result_type(float))), float)


def resolve_preparation(prepare: "Preparation | bool | None", eps: float | None, plain: Mapping) -> Preparation | None:
    """What a kernel's argument `prepare` means, beside arguments for the sampler without preparation.

    :param plain: those arguments; None where the user has not given one.
    """
    given = [name for name, value in plain.items() if value is not None and value is not False]
    if prepare is None:
        return None if given or eps is None or math.isinf(eps) else Preparation()
    if prepare is False:
        return None
    if eps is None or math.isinf(eps):
        raise ValueError(f"the preparation needs a finite budget eps, got {eps}: leave `prepare` out")
    if given:
        raise ValueError(
            f"{', '.join(given)}: for the sampler without preparation (`prepare=False`); the preparation finds its own"
        )
    if prepare is not True and not isinstance(prepare, Preparation):
        raise TypeError(f"prepare must be True, False, None or a Preparation, got {prepare!r}")
    return Preparation() if prepare is True else prepare


def without_preparation(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the options that are for a sampler without preparation; None where they are left at their defaults."""
    names = ("owners", "inverse_mass_matrix", "dense_mass", "adapt_mass_matrix", "target_accept_prob")
    given = {name: options.get(name) for name in names}
    return given | {"adapt_step_size": True if options.get("adapt_step_size") is False else None}
