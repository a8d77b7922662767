"""What every private kernel shares: the `MCMCKernel` shell, the data-free start, the budget, what is state.

A kernel sees the table only through a `PrivateTarget`, whose methods return clipped sums, and turns those into numbers
only through `numpyro_dp.noise.release` with the noise of a `Grant`. Everything in a `DPState` is computed from such
releases and from public randomness, so the whole state may be published; it holds no key from which noise was drawn.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from jax.experimental import io_callback
from numpyro.infer.hmc_util import warmup_adapter
from numpyro.infer.initialization import init_to_median
from numpyro.infer.mcmc import MCMCKernel
from numpyro.util import is_prng_key

from numpyro_dp.accounting import NEIGHBORING_RELATIONS, gaussian_eps
from numpyro_dp.clipping import ClippedSum, UnclippedSum, clipped_sum, require_correct_sums
from numpyro_dp.ledger import Ledger, Plan, PrivacyReport, plan_for_budget, plan_for_noise
from numpyro_dp.model import SeparableModel, released_model, separate
from numpyro_dp.noise import GridNoise, NoiseSource

DEFAULT_CLIP = 1.0
"""For rows whose log densities have slopes of about 1 in unconstrained space; the report says where it was used."""


class DPState(NamedTuple):
    """State of a private chain. Every field is released: it depends on the table through noisy clipped sums only.

    :ivar i: iterations done, warmup included.
    :ivar z: unconstrained parameters, a dict keyed by site.
    :ivar accepted: whether the last proposal was accepted.
    :ivar accept_prob: estimate of its acceptance probability from the *noisy* log ratio.
    :ivar mean_accept_prob: its running mean since the start or the end of warmup.
    :ivar noise_scale: standard deviation of the noise in the last log ratio. About 1 to 2.5 is best; far above, the
        chain stands still.
    :ivar rho_spent: what this chain has released so far costs this much; chains add up (see `accounting`).
    :ivar exhausted: the budget did not allow this iteration; `z` is a copy of the one before and no draw.
    :ivar adapt_state: NumPyro's ``HMCAdaptState``: step size, inverse mass matrix and their adaptation.
    :ivar carry: what the algorithm itself carries along; see the kernel.
    :ivar rng_key: key of the public randomness (proposals, accept draws). Privacy noise does not come from it.
    """

    i: jax.Array
    z: dict[str, jax.Array]
    accepted: jax.Array
    accept_prob: jax.Array
    mean_accept_prob: jax.Array
    noise_scale: jax.Array
    rho_spent: jax.Array
    exhausted: jax.Array
    adapt_state: Any
    carry: Any
    rng_key: Any


class Transition(NamedTuple):
    """What one iteration of an algorithm yields: the next point (flat, unconstrained) and what was released on it."""

    z: jax.Array
    accepted: jax.Array
    accept_prob: jax.Array
    noise_scale: jax.Array
    carry: Any


class Grant(NamedTuple):
    """Leave to release, with the noise to do it: per kind of release, the noise and its multiplier."""

    granted: jax.Array
    noise: dict[str, GridNoise | None]
    noise_multipliers: dict[str, jax.Array]


class PrivateTarget:
    """The posterior as an algorithm may use it: an exact prior, and sums over the rows that are clipped already."""

    def __init__(self, separated: SeparableModel, args: tuple, kwargs: dict):
        self.log_prior = separated.log_prior(args, kwargs)
        self.num_params = separated.num_params
        self._rows = separated.rows(args, kwargs)
        self._row_log_density = separated.row_log_density(args, kwargs)

    def witness(self, state: Any) -> jax.Array:
        """A number of every array that a step depends on, for a callback to depend on them, too.

        Whatever a `vmap` batches (chains, step sizes, tables) must reach the callback that charges a step: without
        batched operands it would be called once, and its noise be shared. The host ignores the numbers.
        """
        leaves = jax.tree.leaves((state, self._rows))
        return jnp.concatenate([jnp.ravel(leaf)[:1].astype(jnp.float32) for leaf in leaves])

    def log_ratio(self, z: jax.Array, z_new: jax.Array, bound: jax.Array | float) -> ClippedSum | UnclippedSum:
        """Sum over rows of the change of the row's log density from `z` to `z_new`, each clipped to +-`bound`."""

        def ratio(row: tuple) -> jax.Array:
            return self._row_log_density(z_new, row) - self._row_log_density(z, row)

        return clipped_sum(ratio, self._rows, bound)

    def gradient(self, z: jax.Array, bound: float) -> ClippedSum | UnclippedSum:
        """Sum over rows of the gradient of the row's log density at `z`, each clipped to norm `bound`."""
        gradient = jax.grad(self._row_log_density)
        return clipped_sum(lambda row: gradient(z, row), self._rows, bound, width=self.num_params)


class DPKernel(MCMCKernel):
    """Base of the private kernels. See `DPHMC` and `DPPenalty` for the arguments."""

    def __init__(
        self,
        model: Callable,
        eps: float | None,
        delta: float | None,
        *,
        noise_multipliers: Mapping[str, float | None],
        shares: Mapping[str, float],
        clips: Mapping[str, float | None],
        neighboring_relation: str,
        num_iterations: int | None,
        num_chains: int,
        step_size: float | None,
        inverse_mass_matrix: Any,
        dense_mass: bool,
        adapt_step_size: bool,
        adapt_mass_matrix: bool,
        target_accept_prob: float,
        init_strategy: Callable | None,
        row_plate: str | None,
        private_args: Sequence[str] | None,
        noise_seed: int | None,
    ):
        if not callable(model):
            raise TypeError(f"model must be a NumPyro model (a callable), got {type(model).__name__}")
        _check_budget(eps, delta, noise_multipliers, neighboring_relation)
        _check_positive_int("num_iterations", num_iterations, optional=True)
        _check_positive_int("num_chains", num_chains)
        private = eps is None or eps < math.inf
        self._default_clips = tuple(name for name, clip in clips.items() if clip is None)
        self._clips = {name: DEFAULT_CLIP if clip is None else clip for name, clip in clips.items()}
        for name, clip in self._clips.items():
            if not clip > 0:
                raise ValueError(f"clip_{name} must be positive, got {clip}")
            if private and math.isinf(clip):
                raise ValueError(f"clip_{name}=inf bounds no row's influence: it is for eps=inf (no privacy) only")
        if step_size is not None and not 0 < step_size < math.inf:
            raise ValueError(f"step_size must be positive, got {step_size}")
        if not 0 < target_accept_prob < 1:
            raise ValueError(f"target_accept_prob must lie strictly between 0 and 1, got {target_accept_prob}")
        self._model = model
        self._eps, self._delta = eps, delta
        self._noise_multipliers = dict(noise_multipliers)
        self._shares = dict(shares)
        self._neighboring_relation = neighboring_relation
        self._num_iterations, self._num_chains = num_iterations, num_chains
        self._step_size = step_size
        self._inverse_mass_matrix = inverse_mass_matrix
        self._dense_mass = dense_mass
        self._adapt_step_size, self._adapt_mass_matrix = adapt_step_size, adapt_mass_matrix
        self._target_accept_prob = target_accept_prob
        self._init_strategy = init_to_median if init_strategy is None else init_strategy
        self._row_plate, self._private_args = row_plate, private_args
        self._ledger = Ledger(NoiseSource(noise_seed))
        self._separated: dict[Any, SeparableModel] = {}
        self._described: dict[str, Any] | None = None
        self._seed_is_guessable = noise_seed is not None and abs(noise_seed) < 2**64

    # -- What an algorithm defines -----------------------------------------------------------------------------------

    @abstractmethod
    def _releases(self, num_iterations: int, num_chains: int, resumed: bool = False) -> dict[str, int]:
        """How many releases of each kind so many iterations need; `resumed` chains have done iterations before."""

    @abstractmethod
    def _noise_shapes(self, num_params: int) -> dict[str, tuple[int, ...]]:
        """Shape of one iteration's noise for each kind of release."""

    @abstractmethod
    def _request(self, carry: Any) -> dict[str, jax.Array | int]:
        """How many releases of each kind the next iteration makes."""

    @abstractmethod
    def _init_carry(self, rng_key: jax.Array, z: jax.Array) -> Any:
        """What the algorithm carries along, at the start. Not from data."""

    @abstractmethod
    def _transition(
        self,
        target: PrivateTarget,
        grant: Grant,
        rng_key: jax.Array,
        i: jax.Array,
        z: jax.Array,
        adapt: Any,
        carry: Any,
    ) -> Transition:
        """One iteration from the flat unconstrained point `z`."""

    # -- The interface of MCMCKernel ---------------------------------------------------------------------------------

    @property
    def sample_field(self) -> str:
        return "z"

    @property
    def default_fields(self) -> tuple[str, ...]:
        return ("z", "accepted", "accept_prob", "exhausted")

    @property
    def model(self) -> Callable:
        """The model with nothing observed: what ArviZ and `Predictive` may see without leaking outcomes."""
        return released_model(self._model)

    def init(self, rng_key, num_warmup, init_params, model_args, model_kwargs) -> DPState:
        """The initial state, computed without looking at the rows.

        :raises UnsupportedModelError: if the model has no log density per row.
        :raises PrivacyBudgetError: if the budget is used up, or was committed for other arrays.
        """
        model_kwargs = {} if model_kwargs is None else model_kwargs
        require_correct_sums()
        separated = self._separate(model_args, model_kwargs)
        self._commit(separated)
        batch = 1 if is_prng_key(rng_key) else rng_key.shape[0]
        self._ledger.require(self._releases(1, batch, resumed=True), f"{batch} more iteration(s)")
        self._ledger.bind_table(_private_leaves(separated, model_args, model_kwargs))
        self._num_warmup = num_warmup
        if is_prng_key(rng_key):
            keys = random.split(rng_key, 4)
        else:
            keys = jnp.moveaxis(jax.vmap(partial(random.split, num=4))(rng_key), 1, 0)
        params_key, *state_keys = keys
        params = self._initial_params(params_key, init_params, separated, model_args, model_kwargs)
        start = partial(self._initial_state, separated)
        return (start if is_prng_key(rng_key) else jax.vmap(start))(params, *state_keys)

    def sample(self, state: DPState, model_args, model_kwargs) -> DPState:
        """One iteration. Without a grant from the ledger the state stays as it is and says so."""
        model_kwargs = {} if model_kwargs is None else model_kwargs
        separated = self._separate(model_args, model_kwargs)
        if not self._ledger.committed:
            raise RuntimeError("this kernel was not initialised: call `init` first, or use it in an MCMC")
        step = partial(self._step, separated, PrivateTarget(separated, model_args, model_kwargs))
        return jax.vmap(step)(state) if jnp.ndim(state.i) else step(state)

    def postprocess_fn(self, model_args, model_kwargs) -> Callable:
        """From an unconstrained draw to the released sites; deterministic sites that use private rows are left out."""
        model_kwargs = {} if model_kwargs is None else model_kwargs
        return self._separate(model_args, model_kwargs).constrain(model_args, model_kwargs)

    def get_diagnostics_str(self, state: DPState) -> str:
        plan = self._ledger.plan
        budget = f"eps {self._eps_spent(plan):.3g} of {plan.eps:.3g} spent" if plan.private else "not private"
        return f"{budget}, acc. prob={state.mean_accept_prob:.2f}, step size {state.adapt_state.step_size:.2e}"

    # -- The budget --------------------------------------------------------------------------------------------------

    def require_budget(
        self,
        num_iterations: int,
        num_chains: int,
        model_args: tuple,
        model_kwargs: dict,
        planned: int,
        resumed: bool = False,
    ) -> None:
        """Check that a run of this size is within the budget, before anything is released; `numpyro_dp.MCMC` asks.

        :param num_iterations: iterations of one chain in the coming run.
        :param planned: iterations of one chain, warmup included, that the budget is for, if the kernel was not given
            `num_iterations`.
        :param resumed: whether the chains go on from a state.
        :raises PrivacyBudgetError: if it is not.
        """
        self._commit(self._separate(model_args, model_kwargs), planned, num_chains)
        self._ledger.require(
            self._releases(num_iterations, num_chains, resumed), f"{num_chains} chain(s) of {num_iterations} iterations"
        )

    def without_data(self, model_args: tuple, model_kwargs: dict) -> tuple[tuple, dict]:
        """The model's arguments with one placeholder row in the place of the table; nothing if they were refused."""
        separated = self._known(model_args, model_kwargs)
        return ((), {}) if separated is None else separated.without_private(model_args, model_kwargs)

    @property
    def privacy(self) -> PrivacyReport:
        """The guarantee and what it rests on, see `PrivacyReport`. Known once the kernel has been initialised."""
        jax.effects_barrier()  # chains may still be running: count what they have released
        if self._described is None or not self._ledger.committed:
            raise RuntimeError("there is no guarantee yet: it is fixed when the run starts. Call `run` first")
        plan, spent = self._ledger.plan, self._ledger.spent()
        rho_spent = plan.rho_of(spent) if plan.private else math.inf
        return PrivacyReport(
            eps=plan.eps,
            delta=plan.delta,
            neighboring_relation=plan.neighboring_relation,
            num_rows=plan.num_rows,
            rho=plan.rho if plan.private else math.inf,
            num_chains=plan.num_chains,
            num_iterations=plan.num_iterations,
            releases={
                kind: {
                    "noise_multiplier": plan.noise_multipliers.get(kind, 0.0),
                    "planned": count,
                    "made": spent[kind],
                    "clip": self._describe_clip(kind),
                }
                for kind, count in plan.counts.items()
            },
            eps_spent=self._eps_spent(plan),
            rho_spent=rho_spent,
            noise=self._describe_noise(plan),
            assumptions=self._assumptions(plan),
            kernel=type(self).__name__,
            **self._described,
        )

    def _describe_table(self, separated: SeparableModel) -> dict[str, Any]:
        """What a report says about the table. Under add/remove no shape of it: the number of rows is private."""
        shapes = self._neighboring_relation == "replace_one"
        return {
            "unit": "row of " + (f"plate '{separated.row_plate}'" if separated.row_plate else "the table"),
            "public_arguments": tuple(map(str, separated.public_arguments())),
            "private_arguments": tuple(str(a) if shapes else a.name for a in separated.private_arguments()),
            "dropped_sites": dict(separated.dropped_sites),
        }

    def _eps_spent(self, plan: Plan) -> float:
        if not plan.private:
            return math.inf
        # The committed eps covers everything; rounding up on the way must not show more.
        return min(gaussian_eps(plan.delta, plan.rho_of(self._ledger.spent())), plan.eps)

    def _describe_noise(self, plan: Plan) -> str:
        if not plan.private:
            return "none"
        if self._ledger.reproducible:
            return (
                "reproducible, derived from noise_seed: the guarantee holds only while that seed is secret, and if it "
                "is used for one run on one table"
                + (
                    ". This seed is below 2**64 and can be found by trying: use secrets.randbits(128)"
                    if self._seed_is_guessable
                    else ""
                )
            )
        return "fresh entropy of the operating system; it cannot be replayed"

    def _describe_clip(self, kind: str) -> str:
        clip = self._clips[kind]
        return f"clip_{kind} {clip:g}" + (" per unit of distance" if kind == "ratio" else "")

    def _assumptions(self, plan: Plan) -> tuple[str, ...]:
        assumptions = [
            "the model, its public arguments, starting values, step sizes and clip bounds were not chosen by looking "
            "at the private rows",
            "the table, the console and this process's memory stay with the curator",
            f"the posterior is exact where no row's log density changes by more than clip_ratio = "
            f"{self._clips['ratio']:g} per unit of distance in unconstrained space; beyond that it is flattened",
        ]
        if self._default_clips:
            names = " and ".join(f"clip_{name}" for name in self._default_clips)
            assumptions.append(
                f"{names} stayed at the default of {DEFAULT_CLIP:g}, not chosen for this model: privacy holds, but "
                "rows may be clipped, and nobody has looked"
            )
        if plan.neighboring_relation == "replace_one":
            assumptions.append("the number of rows is public")
        return tuple(assumptions)

    def _commit(self, separated: SeparableModel, planned: int | None = None, num_chains: int | None = None) -> None:
        """Fix the plan: of the kernel's own `num_iterations` and `num_chains`, or else as MCMC has planned."""
        if self._num_iterations is not None:
            planned, num_chains = self._num_iterations, self._num_chains
        if self._ledger.committed and (planned is None or not self._ledger.untouched):
            return
        if planned is None or num_chains is None:
            raise ValueError(
                "numpyro.infer.MCMC does not tell a kernel how long it will run, and the noise depends on it: give the "
                f"kernel `num_iterations` (warmup + samples of one chain) and `num_chains`, as in {type(self).__name__}"
                "(model, eps=1.0, num_iterations=1500, num_chains=4), or use numpyro_dp.MCMC, which does it for you"
            )
        n = separated.num_rows
        common: dict[str, Any] = {
            "delta": 0.1 / n if self._delta is None else self._delta,
            "neighboring_relation": self._neighboring_relation,
            "counts": self._releases(planned, num_chains),
            "num_iterations": planned,
            "num_chains": num_chains,
            "num_rows": n if self._neighboring_relation == "replace_one" else None,
        }
        if self._eps is not None:
            plan = plan_for_budget(eps=self._eps, shares=self._shares, **common)
        else:
            multipliers = {kind: value for kind, value in self._noise_multipliers.items() if value is not None}
            plan = plan_for_noise(noise_multipliers=multipliers, **common)
        self._described = self._describe_table(separated)
        self._ledger.commit(plan, repr((type(self).__name__, self._settings())))

    def _settings(self) -> list[tuple[str, Any]]:
        """Everything about the kernel that decides what it asks of the table."""
        plain = (int, float, str, dict, tuple, type(None))
        other = {
            "_described",
            "_separated",
            "_num_warmup",
            "_num_iterations",
            "_num_chains",
        }  # the plan has the last two
        return sorted(item for item in vars(self).items() if isinstance(item[1], plain) and item[0] not in other)

    # -- One iteration -----------------------------------------------------------------------------------------------

    def _step(self, separated: SeparableModel, target: PrivateTarget, state: DPState) -> DPState:
        rng_key, nonce_key, move_key = random.split(state.rng_key, 3)
        z = separated.ravel(state.z)
        grant, rho = self._ask(nonce_key, state, target)

        def move() -> Transition:
            return self._transition(target, grant, move_key, state.i, z, state.adapt_state, state.carry)

        def stay() -> Transition:
            return Transition(
                z, jnp.array(False), jnp.zeros_like(state.accept_prob), jnp.zeros_like(state.noise_scale), state.carry
            )

        # Under vmap both branches run; `cond` is then a select, and what comes out is the same.
        z_new, accepted, accept_prob, noise_scale, carry = lax.cond(grant.granted, move, stay)
        moved = DPState(
            i=state.i + 1,
            z=separated.unravel(z_new),
            accepted=accepted,
            accept_prob=accept_prob,
            mean_accept_prob=state.mean_accept_prob
            + (accept_prob - state.mean_accept_prob)
            / (jnp.where(state.i < self._num_warmup, state.i, state.i - self._num_warmup) + 1),
            noise_scale=noise_scale,
            rho_spent=state.rho_spent + rho,
            exhausted=jnp.array(False),
            adapt_state=self._adapt(state.i, accept_prob, z_new, state.adapt_state),
            carry=carry,
            rng_key=None,
        )
        stayed = state._replace(accepted=jnp.array(False), exhausted=jnp.array(True), rng_key=None)
        chosen = jax.tree.map(lambda yes, no: jnp.where(grant.granted, yes, no), moved, stayed)
        return chosen._replace(rng_key=rng_key)

    def _ask(self, nonce_key: jax.Array, state: DPState, target: PrivateTarget) -> tuple[Grant, jax.Array]:
        """Charge the next iteration to the ledger; noise and noise multipliers come from there, at run time.

        Nothing about the budget is compiled into the step or kept in the state, so neither a stale compilation nor a
        state from another kernel can change what a release costs.
        """
        request = self._request(state.carry)
        kinds = tuple(request)
        ledger = self._ledger
        private = ledger.plan.private
        shapes = self._noise_shapes(target.num_params) if private else {}
        dtype = jnp.result_type(float)

        def host(counts, witness, *nonce):
            del witness  # was needed for tracing only
            counts = dict(zip(kinds, np.asarray(counts).tolist(), strict=True))
            granted, noise = ledger.grant(counts, shapes, b"".join(np.asarray(part).tobytes() for part in nonce))
            multipliers = [ledger.plan.noise_multipliers[kind] for kind in kinds]
            rho = ledger.plan.rho_of(counts) if granted and private else 0.0
            return np.bool_(granted), np.asarray(multipliers, dtype), np.asarray(rho, dtype), noise

        granted, multipliers, rho, noise = io_callback(
            host,
            (
                jax.ShapeDtypeStruct((), jnp.bool_),
                jax.ShapeDtypeStruct((len(kinds),), dtype),
                jax.ShapeDtypeStruct((), dtype),
                {kind: jax.ShapeDtypeStruct((2, *shape), jnp.int32) for kind, shape in shapes.items()},
            ),
            jnp.stack([jnp.asarray(request[kind], jnp.int32) for kind in kinds]),
            target.witness(state._replace(rng_key=None)),
            _key_data(nonce_key),
            state.i,
        )
        grant = Grant(
            granted,
            {kind: GridNoise(noise[kind][0], noise[kind][1]) if private else None for kind in kinds},
            dict(zip(kinds, multipliers, strict=True)),
        )
        return grant, rho

    def _adapter(self):
        return warmup_adapter(
            self._num_warmup,
            adapt_step_size=self._adapt_step_size,
            adapt_mass_matrix=self._adapt_mass_matrix,
            dense_mass=self._dense_mass,
            target_accept_prob=self._target_accept_prob,
        )

    def _adapt(self, i: jax.Array, accept_prob: jax.Array, z: jax.Array, adapt_state: Any) -> Any:
        """NumPyro's warmup adaptation, fed with released values only, hence free post-processing."""
        if self._num_warmup == 0 or not (self._adapt_step_size or self._adapt_mass_matrix):
            return adapt_state
        _, update = self._adapter()
        return lax.cond(i < self._num_warmup, lambda: update(i, accept_prob, (z,), adapt_state), lambda: adapt_state)

    # -- The start ---------------------------------------------------------------------------------------------------

    def _initial_state(self, separated: SeparableModel, params, rng_key, adapt_key, carry_key) -> DPState:
        z = separated.ravel(params)
        zero = jnp.zeros((), z.dtype)
        n = separated.num_rows
        step_size = self._step_size
        if step_size is None:  # the width of a posterior whose rows each have information of about 1
            step_size = 1 / math.sqrt(n) if self._neighboring_relation == "replace_one" else 0.01
        init, _ = self._adapter()
        adapt_state = init(
            (z,),
            adapt_key,  # for a step size search, which there is none of: it would look at the rows
            step_size=jnp.asarray(step_size, z.dtype),
            inverse_mass_matrix=self._flat_mass_matrix(separated, z.dtype),
            mass_matrix_size=z.size,
        )._replace(rng_key=None)
        return DPState(
            i=jnp.array(0),
            z=params,
            accepted=jnp.array(False),
            accept_prob=zero,
            mean_accept_prob=zero,
            noise_scale=zero,
            rho_spent=jnp.zeros((), jnp.result_type(float)),
            exhausted=jnp.array(False),
            adapt_state=adapt_state,
            carry=self._init_carry(carry_key, z),
            rng_key=rng_key,
        )

    def _flat_mass_matrix(self, separated: SeparableModel, dtype) -> jax.Array | None:
        """The user's inverse mass matrix over the flat parameter vector: (d,), or (d, d) with `dense_mass`."""
        given = self._inverse_mass_matrix
        if given is None:
            return None
        size = separated.num_params
        if isinstance(given, Mapping):
            unknown = set(given) - set(separated.prototype)
            if unknown:
                raise ValueError(
                    f"inverse_mass_matrix names {sorted(unknown)}, but the sites are {sorted(separated.prototype)}"
                )
            matrix = separated.ravel(
                {
                    name: jnp.broadcast_to(jnp.asarray(given.get(name, 1.0), dtype), jnp.shape(zero))
                    for name, zero in separated.prototype.items()
                }
            )
        else:
            matrix = jnp.asarray(given, dtype)
            matrix = jnp.full((size,), matrix) if matrix.ndim == 0 else matrix
        if matrix.shape not in ((size,), (size, size)):
            raise ValueError(
                f"inverse_mass_matrix has shape {matrix.shape}; the model has {size} unconstrained parameters: give a "
                f"number, ({size},) for a diagonal, ({size}, {size}) for a dense one, or a dict by site"
            )
        if self._dense_mass and matrix.ndim == 1:
            matrix = jnp.diag(matrix)
        if not self._dense_mass and matrix.ndim == 2:
            raise ValueError("a dense inverse_mass_matrix needs dense_mass=True")
        return matrix

    def _initial_params(self, rng_key, init_params, separated: SeparableModel, args, kwargs):
        if init_params is None:
            params, valid = separated.init_params(rng_key, self._init_strategy, args, kwargs)
            if not isinstance(valid, jax.core.Tracer) and not bool(jnp.all(valid)):
                raise ValueError(
                    "init_strategy found no starting point at which the log prior is finite (the rows are not looked "
                    "at): give `init_params=` or `init_strategy=init_to_value(values=...)`"
                )
            return params
        batch = () if is_prng_key(rng_key) else (rng_key.shape[0],)
        expected = {name: (*batch, *jnp.shape(zero)) for name, zero in separated.prototype.items()}
        if not isinstance(init_params, Mapping):
            raise ValueError(f"init_params must be a dict of unconstrained values for the sites {sorted(expected)}")
        found = {name: jnp.shape(value) for name, value in init_params.items()}
        if found != expected:
            raise ValueError(
                f"init_params must hold unconstrained values of shapes {expected} (a leading axis for the chains "
                f"counts), got {found}"
            )
        return {name: jnp.asarray(init_params[name], zero.dtype) for name, zero in separated.prototype.items()}

    def _separate(self, args: tuple, kwargs: dict) -> SeparableModel:
        """The model for arguments of these shapes: checked once, and again only for other shapes."""
        separated = self._known(args, kwargs)
        if separated is None:
            separated = separate(self._model, args, kwargs, self._row_plate, self._private_args)
            self._separated[_signature(args, kwargs)] = separated
        return separated

    def _known(self, args: tuple, kwargs: dict) -> SeparableModel | None:
        return self._separated.get(_signature(args, kwargs))

    def __getstate__(self):
        state = self.__dict__.copy()
        # They hold jitted closures, and shapes: under add/remove the number of rows is private.
        state["_separated"] = {}
        return state


def _key_data(key: jax.Array) -> jax.Array:
    return random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key


def _signature(args: tuple, kwargs: dict) -> tuple:
    """Structure, shapes and dtypes of the arguments, and values of what is no array."""
    leaves, treedef = jax.tree.flatten((args, kwargs))
    return (treedef, *(_leaf_signature(leaf) for leaf in leaves))


def _leaf_signature(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray | np.generic | jax.Array):
        value = leaf.item() if leaf.shape == () and not isinstance(leaf, jax.core.Tracer) else None  # a public number
        return leaf.shape, str(leaf.dtype), value
    return leaf if isinstance(leaf, Hashable) else id(leaf)


def _private_leaves(separated: SeparableModel, args: tuple, kwargs: dict) -> list:
    """The private arrays themselves; none where they are traced, and so have no identity."""
    leaves = jax.tree.leaves((args, kwargs))
    private = [leaf for leaf, a in zip(leaves, separated.arguments, strict=True) if a.private]
    return [] if any(isinstance(leaf, jax.core.Tracer) for leaf in private) else private


def _check_positive_int(name: str, value: Any, optional: bool = False) -> None:
    if optional and value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")


def _check_budget(eps, delta, noise_multipliers: Mapping[str, float | None], neighboring_relation: str) -> None:
    given = [value for value in noise_multipliers.values() if value is not None]
    names = ", ".join(f"noise_multiplier_{kind}" for kind in noise_multipliers)
    if eps is None and len(given) < len(noise_multipliers):
        raise ValueError(f"give the budget `eps`, or all of {names} (noise standard deviation over L2 sensitivity)")
    if eps is not None and given:
        raise ValueError(f"give either `eps` or {names}, not both: each follows from the other")
    if eps is not None and not eps > 0:
        raise ValueError(f"eps must be positive (inf runs without noise, and is not private), got {eps}")
    for value in given:
        if not 0 < value < math.inf:
            raise ValueError(f"noise multipliers must be positive, got {value}")
    if neighboring_relation not in NEIGHBORING_RELATIONS:
        raise ValueError(
            f"neighboring_relation must be one of {', '.join(map(repr, NEIGHBORING_RELATIONS))}, "
            f"got {neighboring_relation!r}"
        )
    if delta is not None and not 0 < delta < 1:
        raise ValueError(f"delta must lie strictly between 0 and 1, got {delta}")
    if delta is None and neighboring_relation == "add_or_remove_one":
        raise ValueError(
            "under 'add_or_remove_one' the number of rows is private, so there is no default delta: give one that is "
            "far below 1 over the order of magnitude of the table's size"
        )
