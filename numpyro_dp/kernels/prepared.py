"""Kernels that prepare themselves privately, and the three chains that may follow.

The preparation (`numpyro_dp.preparation`) finds where the posterior is and how far it is from Gaussian in the
coordinates in which the parameters meet the data. Then, by released numbers only:

===========  ==============================================  =============================================  ==========
mode         chain                                           target                                         draws cost
===========  ==============================================  =============================================  ==========
"surrogate"  NumPyro's NUTS on the released surrogate        ``prior(z) * S(phi(z))``, S noise-aware: what  nothing
                                                             the release says about z
"residual"   leapfrog on the surrogate, penalty test on the  ``prior(z) * S(phi(z)) * prod_i                each one
             noisy residuals of the rows                     exp(r_i(phi(z)))``: the posterior where S is
                                                             the expansion without noise
"walk"       random walk in whitened coordinates, penalty    the posterior                                  each one
             test on the noisy log ratio
===========  ==============================================  =============================================  ==========

``r_i`` is row i's log density minus its quadratic expansion of clipped derivatives. Residuals change little from point
to point, so the noise of a test is small where that of a log ratio is not. Where no residual, or no ratio, is clipped,
both tests leave their target invariant exactly. The targets of the first two differ from the posterior by the one-off
noise, and by design: see `numpyro_dp.surrogate`.
"""

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from numpyro.infer.hmc import hmc
from numpyro.infer.initialization import init_to_sample
from numpyro.util import is_prng_key
from scipy.optimize import least_squares

from numpyro_dp.accounting import noise_multiplier_for
from numpyro_dp.cut import Cut, find_cut
from numpyro_dp.kernels.base import Algorithm, DPKernel, Transition
from numpyro_dp.kernels.penalty_test import accept_with_penalty
from numpyro_dp.kernels.survey import Frame, Survey, distance, residual_distance
from numpyro_dp.kernels.target import Draw, Grant, Grid, PrivateTarget
from numpyro_dp.ledger import Plan, PrivacyBudgetError, Releases, Request, Wanted
from numpyro_dp.mechanisms import Gaussian, Mechanism
from numpyro_dp.model import SeparableModel
from numpyro_dp.noise import GridNoise
from numpyro_dp.preparation import (
    NARROW,
    Check,
    NormalPrior,
    Preparation,
    Round,
    check,
    final_release,
    locate,
    preparation_releases,
    rough_normal,
)
from numpyro_dp.surrogate import Surrogate

RESERVE = "reserve"
SLOPE_GRID = Grid(2.0**0.5, 6)
PRIOR_DRAWS = 1000
GAUSSIAN = 0.3
"""Spread of the residuals, in log density, below which a quadratic serves."""
MAX_CURVATURE_NOISE = 1.0


class Prepared(NamedTuple):
    """What a preparation has found. Released as a whole.

    :ivar mode: "surrogate", "residual" or "walk"; see `numpyro_dp.kernels.prepared`.
    :ivar check: how far the log likelihood is from a quadratic, or None if nobody asked.
    :ivar coordinates: names of the coordinates in which the parameters meet the data.
    :ivar frame: in which the posterior is about N(0, I).
    :ivar surrogate: the released likelihood, or None in mode "walk".
    :ivar bounds: clip bounds of the rows' gradients and Hessians in the frame.
    :ivar slope: clip bound of a row's log ratio, or of its residual, per unit of distance; None in mode "surrogate".
    :ivar start: unconstrained parameters near the posterior, shape (d,).
    :ivar covariance: about the posterior's, shape (d, d); from prior and frame.
    :ivar step: length of the proposals: in posterior standard deviations, or as an angle in mode "residual".
    """

    mode: str
    check: Check | None
    coordinates: tuple[str, ...]
    frame: Frame
    surrogate: Surrogate | None
    bounds: np.ndarray
    slope: float | None
    start: np.ndarray
    covariance: np.ndarray
    step: float


class _Chain(Algorithm):
    """A chain that a preparation has chosen.

    :param cut: the coordinates in which the parameters meet the data.
    """

    def __init__(self, prepared: Prepared, cut: Cut, log_prior: Callable, noise_aware: bool, power: float):
        self._prepared, self._cut, self._log_prior = prepared, cut, log_prior
        self._noise_aware, self._power = noise_aware, power
        self.num_warmup = 0

    def _u(self, z: jax.Array) -> jax.Array:
        """Whitened coordinates of the flat unconstrained `z`."""
        inverse = jnp.asarray(np.linalg.inv(self._prepared.frame.whitening), z.dtype)
        return inverse @ (self._cut.coordinates(z) - jnp.asarray(self._prepared.frame.center, z.dtype))

    def _log_surrogate(self, u: jax.Array) -> jax.Array:
        surrogate = self._prepared.surrogate
        assert surrogate is not None
        return surrogate.noise_aware(u) if self._noise_aware else surrogate.plug_in(u)

    def _releases(self, num_iterations: int, num_chains: int, resumed: bool = False) -> dict[str, int]:
        return {kind: num_iterations * num_chains for kind in self._noise_shapes(0)}

    def _request(self, carry: Any) -> dict[str, jax.Array | int]:
        return dict.fromkeys(self._noise_shapes(0), 1)

    def _init_carry(self, rng_key: jax.Array, z: jax.Array) -> Any:
        return jnp.zeros((), z.dtype)


class SurrogateChain(_Chain):
    """NumPyro's NUTS on ``prior(z) * S(phi(z))``. No row is asked; any number of draws. The carry is its `HMCState`."""

    def _noise_shapes(self, num_params: int) -> dict[str, tuple[int, ...]]:
        return {}

    def _start(self, rng_key: jax.Array, z: jax.Array) -> tuple[Any, Callable]:
        """NUTS's first state at `z`, and its step."""

        def potential(z: jax.Array) -> jax.Array:
            return -self._log_prior(z) - self._log_surrogate(self._u(z))

        init, sample = hmc(potential_fn=potential, algo="NUTS")
        state = init(
            z,
            self.num_warmup,
            step_size=0.5,
            inverse_mass_matrix=jnp.asarray(self._prepared.covariance, z.dtype),
            dense_mass=True,
            trajectory_length=None,
            find_heuristic_step_size=False,
            rng_key=rng_key,
        )
        return state._replace(rng_key=None), sample

    def _init_carry(self, rng_key: jax.Array, z: jax.Array) -> Any:
        return self._start(rng_key, z)[0]

    def _transition(self, target, grant, rng_key, i, z, adapt, carry) -> Transition:
        _, sample = self._start(rng_key, z)  # NumPyro's step keeps what its start was told; the state is not used
        state = sample(carry._replace(rng_key=rng_key), (), {})
        return Transition(
            state.z, jnp.array(True), state.accept_prob, jnp.zeros((), z.dtype), state._replace(rng_key=None)
        )


class ResidualChain(_Chain):
    """Leapfrog on ``prior(z) * S(phi(z))``, and a penalty test on the rows' noisy residuals."""

    num_steps = 8

    def _noise_shapes(self, num_params: int) -> dict[str, tuple[int, ...]]:
        return {"residual": (1,)}

    def _transition(self, target, grant, rng_key, i, z, adapt, carry) -> Transition:
        momentum_key, angle_key, accept_key = random.split(rng_key, 3)
        prepared = self._prepared
        root = jnp.asarray(np.linalg.cholesky(prepared.covariance), z.dtype)

        def log_density(x: jax.Array) -> jax.Array:
            at = z + root @ x
            return self._log_prior(at) + self._log_surrogate(self._u(at))

        angle = prepared.step * random.uniform(angle_key, (), z.dtype, 0.5, 1.0)
        step = angle / self.num_steps
        momentum = random.normal(momentum_key, z.shape, z.dtype)
        gradient = jax.grad(log_density)

        def kick_drift(state: tuple, _: Any) -> tuple:
            x, p = state
            p = p + step * gradient(x)
            return (x + step * p, p), None

        zero = jnp.zeros_like(z)
        (x, p), _ = lax.scan(kick_drift, (zero + step / 2 * momentum, momentum), None, self.num_steps)
        x = x - step / 2 * p
        z_new = z + root @ x
        u, u_new = self._u(z), self._u(z_new)
        slope = prepared.slope
        assert slope is not None
        released = residual_ratio(
            target,
            self._cut,
            prepared.frame,
            prepared.bounds,
            grant.first("residual"),
            u,
            u_new,
            slope * residual_distance(u, u_new),
        )
        public = log_density(x) - log_density(zero) + (momentum @ momentum - p @ p) / 2
        accepted, accept_prob, scale = accept_with_penalty(
            accept_key, self._power * released.value + public, self._power * released.scale, z_new
        )
        return Transition(jnp.where(accepted, z_new, z), accepted, accept_prob, scale, carry)


class WalkChain(_Chain):
    """A random walk in whitened coordinates with the penalty test on the noisy log ratio."""

    def _noise_shapes(self, num_params: int) -> dict[str, tuple[int, ...]]:
        return {"ratio": (1,)}

    def _transition(self, target, grant, rng_key, i, z, adapt, carry) -> Transition:
        jump_key, accept_key = random.split(rng_key)
        prepared = self._prepared
        root = jnp.asarray(np.linalg.cholesky(prepared.covariance), z.dtype)
        z_new = z + prepared.step * root @ random.normal(jump_key, z.shape, z.dtype)
        slope = prepared.slope
        assert slope is not None
        ratio, scale = target.log_ratio(
            grant.first("ratio"), z, z_new, slope * distance(self._u(z), self._u(z_new))
        )
        public = self._log_prior(z_new) - self._log_prior(z)
        accepted, accept_prob, scale = accept_with_penalty(accept_key, ratio + public, scale, z_new)
        return Transition(jnp.where(accepted, z_new, z), accepted, accept_prob, scale, carry)


_CHAINS: dict[str, type[_Chain]] = {"surrogate": SurrogateChain, "residual": ResidualChain, "walk": WalkChain}


class PreparedKernel(DPKernel):
    """A private kernel that prepares itself, unless told not to.

    :param prepare: how; None for a kernel without.
    :param noise_aware: whether draws carry the uncertainty that one-off noise adds (mode "surrogate", "residual").
    """

    def __init__(self, *args: Any, prepare: Preparation | None, noise_aware: bool = True, **options: Any):
        self._preparation, self._noise_aware = prepare, noise_aware
        self._chain: _Chain | None = None
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
        wanted = {}
        for kind, (counts, shares) in preparation_releases(self._preparation).items():
            # A stage's noise multiplier, if the stage alone were to cost its share of a rho of 1/2.
            relative = tuple(math.sqrt(count / share) for count, share in zip(counts, shares, strict=True))
            wanted[kind] = Wanted(_Scaled(relative), counts, math.fsum(shares))
        wanted[RESERVE] = Wanted(_Scaled((1.0,)), (1,), self._preparation.reserve)
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
        return "clip bounds, coordinates and step sizes were found privately; " + self._describe_posterior()

    def _describe_posterior(self) -> str:
        """What the draws are draws of."""
        if self._result is None:
            return "nothing has been released yet"
        aware = "noise-aware" if self._noise_aware else "plug-in"
        return {
            "surrogate": f"the draws are NUTS draws of the exact prior times a {aware} quadratic likelihood, released "
            "once, in the coordinates in which the parameters meet the data",
            "residual": f"the draws are of the exact prior times a {aware} quadratic likelihood, released once, times "
            "the rows' residuals, by an exact test where no residual is clipped",
            "walk": "the draws are of the posterior, by an exact test where no row's log ratio is clipped",
        }[self._result.mode]

    # -- The preparation ---------------------------------------------------------------------------------------------

    def _prepare(self, separated: SeparableModel, model_args: tuple, model_kwargs: dict) -> None:
        options = self._preparation
        if options is None:
            return
        if self._chain is not None:
            self._chain.num_warmup = getattr(self, "_num_warmup", 0)
            return
        leaves = jax.tree.leaves((model_args, model_kwargs))
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            raise ValueError(
                "the preparation cannot run on traced arrays: call `kernel.prepare(...)` with the model's arguments first, "
                "or use numpyro_dp.MCMC, which does it for you"
            )
        with jax.ensure_compile_time_eval():
            self._chain = self._run_preparation(options, separated, model_args, model_kwargs)
        self._result = self._chain._prepared
        self._chain.num_warmup = getattr(self, "_num_warmup", 0)

    def _run_preparation(self, options: Preparation, separated: SeparableModel, args: tuple, kwargs: dict) -> "_Chain":
        ledger, plan = self._ledger, self._ledger.plan
        rho = math.fsum(count * (m.rho or 0) for k in plan.kinds.values() for m, count in zip(k.mechanisms, k.counts))
        cut = find_cut(separated, args, kwargs)
        power = self._power(separated.num_rows)
        if not options.force and plan.num_rows is not None:
            require_hope(cut.size, plan.num_rows / power, rho, plan.eps)
        counts = {kind: sum(shares.counts) for kind, shares in preparation_releases(options).items()}
        ledger.require(counts, 1, None, "the preparation")
        target = self._target(separated, args, kwargs)
        survey = Survey(target, cut)
        ask = self._asker(separated.num_rows)
        z_draws = self._prior_draws(separated, args, kwargs)
        z_prior = rough_normal(z_draws)
        prior = rough_normal(np.asarray(jax.vmap(cut.coordinates)(jnp.asarray(z_draws, survey.dtype)), float))
        guess = self._public_guess(separated, cut, z_prior)
        frame, rounds = locate(survey, prior if guess is None else guess, ask, options, rho)
        found = check(survey, frame, rounds[-1], ask)
        mode = options.mode or self._choose(found, rounds[-1], frame, options.reserve * rho, power)
        return self._finish(
            mode, found, survey, cut, frame, rounds, z_prior, options, separated.log_prior(args, kwargs), power
        )

    def _choose(self, found: Check, last: Round, frame: Frame, reserve: float, power: float) -> str:
        """Which chain serves, by released numbers."""
        if found.spread + 2 * found.scale < GAUSSIAN:
            return "surrogate"
        size = len(frame.center)
        walk = 0.78 * reserve / (8 * (power * 2 * last.bounds[0]) ** 2 * size)  # effective draws of a walk, about
        if walk >= 100:
            return "walk"
        return "surrogate" if found.spread < 1 else "residual"

    def _finish(
        self,
        mode: str,
        found: Check,
        survey: Survey,
        cut: Cut,
        frame: Frame,
        rounds: list[Round],
        z_prior: NormalPrior,
        options: Preparation,
        log_prior: Callable,
        power: float,
    ) -> "_Chain":
        """Spend the reserve on what `mode` needs, and set up its chain."""
        plan = self._ledger.plan
        reserve = math.fsum(m.rho or 0.0 for m in plan.kinds[RESERVE].mechanisms)
        ask = self._asker(survey.num_rows)
        m = survey.size
        per_chain = plan.num_iterations * plan.num_chains
        release = {"surrogate": 1.0, "residual": 0.85, "walk": 0.0}[mode]
        kinds: dict[str, tuple[float, int]] = {}
        if release:
            kinds |= {
                "final bounds": (release * options.final_bounds, 2 * NARROW.num_counts),
                "final curvature": (release * options.final_curvature, 1),
                "final gradient": (release * (1 - options.final_bounds - options.final_curvature), 1),
            }
        step, slope, multiplier = 1.0, None, 0.0
        if mode != "surrogate":
            kinds["slope"] = (0.03, SLOPE_GRID.num_counts)
            kinds["ratio" if mode == "walk" else "residual"] = (1 - release - 0.03, per_chain)
        self._ledger.assign(
            RESERVE,
            {
                kind: Releases((Gaussian(noise_multiplier_for(share * reserve * (1 - 1e-12), count)),), (count,))
                for kind, (share, count) in kinds.items()
            },
        )
        bounds, surrogate = rounds[-1].bounds, None
        if release:
            surrogate, bounds = final_release(survey, frame, rounds, ask, options, release * reserve)
        if mode != "surrogate":
            kind = "ratio" if mode == "walk" else "residual"
            multiplier = self._ledger.plan.kinds[kind].mechanisms[0].noise_multiplier
            points = np.random.default_rng(1).standard_normal((8, 2, m))
            draws = ask("slope", 0, SLOPE_GRID.num_counts, ())
            slope = 2 * survey.slope(
                draws, frame, points, SLOPE_GRID, 2.0**-40, 1.0, bounds if mode == "residual" else None
            )
            sensitivity = (2 if self._neighboring_relation == "replace_one" else 1) * power * slope
            typical = math.sqrt(2 * m) * m if mode == "residual" else math.sqrt(m)
            noise = sensitivity * multiplier * typical  # of a jump of length 1
            step = min(math.pi / 2, 1.5 / noise) if mode == "residual" else min(2.38 / math.sqrt(m), 2 / noise)
        start, covariance = _start(cut, frame, rounds[-1] if surrogate is None else None, surrogate, z_prior)
        prepared = Prepared(mode, found, cut.names, frame, surrogate, bounds, slope, start, covariance, step)
        return _CHAINS[mode](prepared, cut, log_prior, self._noise_aware, power)

    def _asker(self, num_rows: int) -> Callable[[str, int, int, tuple[int, ...]], Draw]:
        def ask(kind: str, stage: int, number: int, shape: tuple[int, ...]) -> Draw:
            request = Request(number, (number, *shape))
            granted, drawn = self._ledger.grant({kind: request}, stage, num_rows, b"preparation")
            if not granted:
                raise PrivacyBudgetError(
                    "the preparation was begun before and did not end, and its budget is spent: make a new kernel, whose "
                    "eps adds to this one"
                )
            noise = drawn[kind].noise
            assert noise is not None
            return Draw(
                GridNoise(jnp.asarray(noise[0]), jnp.asarray(noise[1])),
                None,
                jnp.full(number, drawn[kind].noise_multiplier, jnp.result_type(float)),
                jnp.ones(number, bool),
                jnp.zeros((number, 1), jnp.uint32),
                jnp.zeros(number, bool),
            )

        return ask

    def _prior_draws(self, separated: SeparableModel, args: tuple, kwargs: dict) -> np.ndarray:
        """Flat unconstrained draws of the prior, shape (k, d)."""
        keys = random.split(random.key(0), PRIOR_DRAWS)
        params, valid = separated.init_params(keys, init_to_sample, args, kwargs)
        return np.asarray(jax.vmap(separated.ravel)(params), float)[np.asarray(valid)]

    def _public_guess(self, separated: SeparableModel, cut: Cut, z_prior: NormalPrior) -> NormalPrior | None:
        """Where the search starts, if the user says so."""
        options = self._preparation
        assert options is not None
        if options.start is None and options.scales is None:
            return None

        def flat(given: Any, default: np.ndarray) -> np.ndarray:
            sites = separated.unravel(jnp.asarray(default, jnp.result_type(float)))
            unknown = set(given or {}) - set(sites)
            if unknown:
                raise ValueError(f"there is no site {sorted(unknown)}; the sites are {sorted(sites)}")
            full = {name: jnp.broadcast_to((given or {}).get(name, x), x.shape) for name, x in sites.items()}
            return np.asarray(separated.ravel(full), float)

        mean = flat(options.start, z_prior.mean)
        scale = flat(options.scales, np.sqrt(np.diag(z_prior.covariance)))
        draws = mean + scale * np.random.default_rng(0).standard_normal((PRIOR_DRAWS, len(mean)))
        return rough_normal(np.asarray(jax.vmap(cut.coordinates)(jnp.asarray(draws, jnp.result_type(float))), float))

    # -- The chains --------------------------------------------------------------------------------------------------

    def _initial_params(self, rng_key, init_params, separated, args, kwargs):
        if self._result is None or init_params is not None:
            return super()._initial_params(rng_key, init_params, separated, args, kwargs)
        result = self._result

        def draw(key: jax.Array) -> dict[str, jax.Array]:
            normal = random.normal(key, result.start.shape)
            return separated.unravel(jnp.asarray(result.start + np.linalg.cholesky(result.covariance) @ normal))

        return draw(rng_key) if is_prng_key(rng_key) else jax.vmap(draw)(rng_key)

    def __getstate__(self):
        return super().__getstate__() | {"_chain": None}  # it holds closures over the model's public arguments


class _NotYet(Algorithm):
    """In the place of the chain that the preparation will choose."""

    def _releases(self, num_iterations: int, num_chains: int, resumed: bool = False) -> dict[str, int]:
        return {}

    def _missing(self, *args: Any) -> Any:
        raise RuntimeError("the kernel is not prepared: call `init` first, or use it in an MCMC")

    _noise_shapes = _request = _init_carry = _transition = _missing


@dataclasses.dataclass(frozen=True)
class _Scaled:
    """Gaussian mechanisms with noise multipliers in fixed relations."""

    relative: tuple[float, ...]

    def __call__(self, noise_multiplier: float) -> tuple[Mechanism, ...]:
        return tuple(Gaussian(noise_multiplier * r) for r in self.relative)


def resolve_preparation(prepare: "Preparation | bool | None", eps: float | None, plain: Mapping) -> Preparation | None:
    """What a kernel's argument `prepare` means, beside arguments for the sampler without preparation.

    :param plain: those arguments; None where the user has not given one.
    """
    given = [name for name, value in plain.items() if value is not None]
    if prepare is None:
        return None if given or eps is None or math.isinf(eps) else Preparation()
    if prepare is False:
        return None
    if eps is None or math.isinf(eps):
        raise ValueError(f"the preparation needs a finite budget eps, got {eps}: leave `prepare` out")
    if given:
        raise ValueError(
            f"{', '.join(given)}: for the sampler without a preparation (`prepare=False`); the preparation finds its own"
        )
    return Preparation() if prepare is True else prepare


def without_preparation(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the options that are for a sampler without preparation; None where they are left at their defaults."""
    names = ("owners", "inverse_mass_matrix", "dense_mass", "adapt_mass_matrix", "target_accept_prob")
    return {name: options.get(name) or None for name in names}


def residual_ratio(
    target: PrivateTarget,
    cut: Cut,
    frame: Frame,
    bounds: np.ndarray,
    draw: Draw,
    u: jax.Array,
    u_new: jax.Array,
    bound: jax.Array,
) -> Any:
    """The change of the rows' residuals from `u` to `u_new`, not tempered, with noise."""
    survey = Survey(target, cut)
    cast = Frame(*(jnp.asarray(part, u.dtype) for part in frame))
    residual = survey._row_residual(cast, jnp.asarray(bounds, u.dtype))

    def change(row: tuple) -> jax.Array:
        before, after = residual(jnp.stack([u, u_new]), row)
        return after - before

    return target.release_sum(draw, change, bound, cut.size**2)


def _start(
    cut: Cut, frame: Frame, last: Round | None, surrogate: Surrogate | None, z_prior: NormalPrior
) -> tuple[np.ndarray, np.ndarray]:
    """A point near the posterior, and its covariance there, by Gauss-Newton with a rough normal prior of z.

    Not the mode: where group effects have a prior of unknown scale, that is at scale 0.
    """
    inverse = np.linalg.inv(frame.whitening)
    root_prior = np.linalg.inv(np.linalg.cholesky(z_prior.covariance))
    dtype = jnp.result_type(float)
    phi, slope = jax.jit(cut.coordinates), jax.jit(jax.jacobian(cut.coordinates))
    shift = np.zeros(cut.size)
    if surrogate is not None:  # from the frame's centre to where the surrogate's mode would be
        information = surrogate.curvature + surrogate.score_covariance
        solved = surrogate.curvature @ np.linalg.solve(information, surrogate.curvature)
        shift = np.linalg.solve(
            solved + 1e-3 * np.eye(cut.size), surrogate.curvature @ np.linalg.solve(information, surrogate.score)
        )

    def misfit(z: np.ndarray) -> np.ndarray:
        u = inverse @ (np.asarray(phi(jnp.asarray(z, dtype)), float) - frame.center)
        return np.concatenate([u - shift, root_prior @ (z - z_prior.mean)])

    def jacobian(z: np.ndarray) -> np.ndarray:
        return np.concatenate([inverse @ np.asarray(slope(jnp.asarray(z, dtype)), float), root_prior])

    start = least_squares(misfit, z_prior.mean, jacobian, max_nfev=200).x
    root = jacobian(start)
    return start, np.linalg.inv(root.T @ root)


def require_hope(size: int, num_rows: float, rho: float, eps: float) -> None:
    """Refuse a run from which no useful posterior can come, by public numbers only.

    :param size: m, coordinates in which the parameters meet the data.
    :param num_rows: n over the power of the likelihood.
    :raises PrivacyBudgetError: if the curvature's noise would drown it, or the score's noise the posterior.
    """
    curvature = 4 * size / num_rows * math.sqrt(size / (0.11 * rho))
    shift = 3 * math.sqrt(2 * size / (0.5 * num_rows * rho))
    if curvature > MAX_CURVATURE_NOISE:
        raise PrivacyBudgetError(
            f"eps={eps:g} with {num_rows:.6g} rows cannot give a posterior of the {size} numbers in which this model's "
            f"parameters meet the data: the noise in its curvature would be about {curvature:.2g} of the curvature, and "
            f"would shift the posterior by about {shift:.2g} standard deviations. Nothing was released. Raise eps, use "
            "fewer parameters, or go on all the same with `prepare=Preparation(force=True)`"
        )
