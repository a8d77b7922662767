"""What every private kernel shares: the `MCMCKernel` shell, the data-free start, the budget, what is state.

A kernel sees the table only through a `PrivateTarget`, whose methods return released numbers: sums of clipped rows
with the noise of a `Grant`. Everything in a `DPState` is computed from such releases and from public randomness, so the
whole state may be published; it holds no key from which noise was drawn.
"""

import dataclasses
import math
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from jax.experimental import multihost_utils
from numpyro.infer.hmc_util import warmup_adapter
from numpyro.infer.initialization import init_to_median
from numpyro.infer.mcmc import MCMCKernel
from numpyro.util import is_prng_key

from numpyro_dp.chain.algorithm import Algorithm, Step, Transition
from numpyro_dp.chain.target import PrivateTarget
from numpyro_dp.chain.worth import FEW_DRAWS, most_draws, tight_slope
from numpyro_dp.kernels.options import check_budget, check_positive_int, check_power, check_unit, require_budget_type
from numpyro_dp.model.arguments import placeholder_rows
from numpyro_dp.model.separable import SeparableModel, released_model
from numpyro_dp.model.separate import separate
from numpyro_dp.model.units import group_rows, require_same_groups
from numpyro_dp.privacy.accounting import composed_eps
from numpyro_dp.privacy.batches import AllRows, Batches, as_batches
from numpyro_dp.privacy.budget import PrivacyBudget
from numpyro_dp.privacy.clipping import OwnerIndex, require_correct_sums
from numpyro_dp.privacy.draws import Grant, ask_ledger
from numpyro_dp.privacy.fingerprint import fingerprint
from numpyro_dp.privacy.ledger import (
    Ledger,
    Plan,
    PrivacyBudgetError,
    Wanted,
    flat_releases,
    merged_stages,
    plan_for_budget,
    plan_for_noise,
)
from numpyro_dp.privacy.mechanisms import Gaussian, Mechanism, size_is_public
from numpyro_dp.privacy.noise import NoiseSource
from numpyro_dp.privacy.release import Exchange, Vault
from numpyro_dp.privacy.sharding import Layout, layout_of
from numpyro_dp.privacy.vmap import vmap_chains
from numpyro_dp.report import Posterior, PrivacyReport, round_up

DEFAULT_CLIP = 1.0
"""For rows whose log densities have slopes of about 1 in unconstrained space; the report says where it was used."""

_LARGE_TABLE = 2**27  # bytes


class DPState(NamedTuple):
    """State of a private chain. Every field is released: it depends on the table through noisy clipped sums only.

    :ivar i: iterations done, warmup included.
    :ivar z: unconstrained parameters, a dict keyed by site.
    :ivar accepted: whether the last proposal was accepted.
    :ivar accept_prob: estimate of its acceptance probability from the *noisy* log ratio.
    :ivar mean_accept_prob: its running mean since the start or the end of warmup.
    :ivar noise_scale: standard deviation of the privacy noise in the last log ratio (about 1 to 2.5 is best; far above,
        the chain stands still); for kernels without an acceptance test, in each entry of the last gradient.
    :ivar exhausted: the budget did not allow this iteration; `z` is a copy of the one before and no draw.
    :ivar diverging: NUTS's warning that its trajectory went astray, where a prepared kernel runs NUTS on a released
        likelihood.
    :ivar adapt_state: NumPyro's ``HMCAdaptState``: step size, inverse mass matrix and their adaptation.
    :ivar carry: what the algorithm itself carries along; see the kernel.
    :ivar rng_key: key of the public randomness (proposals, accept draws). Privacy noise does not come from it.
    :ivar origin: hash of where the chain began and of the length of its warmup, shape (2,): with `noise_seed`, chains
        that begin elsewhere ask something else, and so must not have the same noise.
    """

    i: jax.Array
    z: dict[str, jax.Array]
    accepted: jax.Array
    accept_prob: jax.Array
    mean_accept_prob: jax.Array
    noise_scale: jax.Array
    exhausted: jax.Array
    diverging: jax.Array
    adapt_state: Any
    carry: Any
    rng_key: Any
    origin: jax.Array


class DPKernel(MCMCKernel, Algorithm):
    """Base of the private kernels. `KernelOptions` and `MetropolisOptions` tell what all of them take."""

    def __init__(
        self,
        model: Callable,
        eps: float | None,
        delta: float | None,
        *,
        noise_multipliers: Mapping[str, float | None],
        clips: Mapping[str, float | None],
        shares: Mapping[str, float] | None = None,
        batch_size: "float | Batches | None" = None,
        step_size: Any = None,
        power: float = 1.0,
        n0: float | None = None,
        neighboring_relation: str = "replace_one",
        num_iterations: int | None = None,
        num_chains: int = 1,
        inverse_mass_matrix: Any = None,
        dense_mass: bool = False,
        adapt_step_size: bool = True,
        adapt_mass_matrix: bool = False,
        target_accept_prob: float = 0.5,
        init_strategy: Callable | None = None,
        row_plate: str | None = None,
        private_args: Sequence[str] | None = None,
        unit: Any = None,
        max_rows_per_unit: int | None = None,
        owners: Any = None,
        budget: PrivacyBudget | None = None,
        noise_seed: int | None = None,
    ):
        if not callable(model):
            raise TypeError(f"model must be a NumPyro model (a callable), got {type(model).__name__}")
        # Of numbers of lower precision the accounting would be in theirs.
        eps, delta = (None if value is None else float(value) for value in (eps, delta))
        noise_multipliers = {k: None if value is None else float(value) for k, value in noise_multipliers.items()}
        clips = {name: None if clip is None else float(clip) for name, clip in clips.items()}
        check_budget(eps, delta, noise_multipliers, neighboring_relation)
        check_positive_int("num_iterations", num_iterations, optional=True)
        check_positive_int("num_chains", num_chains)
        private = eps is None or eps < math.inf
        self._default_clips = tuple(name for name, clip in clips.items() if clip is None)
        self._clips = {name: DEFAULT_CLIP if clip is None else clip for name, clip in clips.items()}
        for name, clip in self._clips.items():
            if not clip > 0:
                raise ValueError(f"clip_{name} must be positive, got {clip}")
            if private and math.isinf(clip):
                raise ValueError(f"clip_{name}=inf bounds no row's influence: it is for eps=inf (no privacy) only")
        if step_size is not None and not callable(step_size) and not 0 < step_size < math.inf:
            raise ValueError(f"step_size must be positive, got {step_size}")
        if not 0 < target_accept_prob < 1:
            raise ValueError(f"target_accept_prob must lie strictly between 0 and 1, got {target_accept_prob}")
        check_power(power, n0, neighboring_relation)
        check_unit(unit, max_rows_per_unit, n0, owners, neighboring_relation)
        self._model = model
        self._eps, self._delta = eps, delta
        self._noise_multipliers = dict(noise_multipliers)
        self._shares = dict(shares or dict.fromkeys(noise_multipliers, 1.0))
        self._batches = as_batches(batch_size)
        self._given_power, self._n0 = float(power), None if n0 is None else float(n0)
        self._neighboring_relation = neighboring_relation
        self._num_iterations, self._num_chains = num_iterations, num_chains
        self._step_size = step_size
        self._inverse_mass_matrix = inverse_mass_matrix
        self._dense_mass = dense_mass
        self._adapt_step_size, self._adapt_mass_matrix = adapt_step_size, adapt_mass_matrix
        self._target_accept_prob = float(target_accept_prob)
        self._init_strategy = init_to_median if init_strategy is None else init_strategy
        self._row_plate, self._private_args = row_plate, private_args
        self._unit = unit if unit is None or isinstance(unit, str) else np.array(unit)
        self._max_rows_per_unit = max_rows_per_unit
        self._unit_hash = "row"  # until rows are grouped
        self._owners = self._known_owners(owners)
        if budget is not None:
            require_budget_type(budget)
        self._budget, self._shared = budget, None if budget is None else (budget.eps, budget.delta)
        name = getattr(model, "__name__", type(model).__name__)
        self._ledger = Ledger(NoiseSource(noise_seed), budget, f"{type(self).__name__} of {name}")
        self._separated: dict[Any, SeparableModel] = {}
        self._layout: Layout | None = None
        self._described: dict[str, Any] | None = None
        self._seed_is_guessable = noise_seed is not None and abs(noise_seed) < 2**64

    @property
    def _algorithm(self) -> Algorithm:
        """What decides on the next iteration: the kernel itself, unless it has chosen another algorithm."""
        return self

    def _mechanisms(
        self, kind: str, noise_multiplier: float, num_rows: int, num_iterations: int
    ) -> tuple[Mechanism, ...]:
        """What the accountant shall see: one mechanism, or one for each iteration where the noise changes."""
        return (self._batches.mechanism(noise_multiplier, num_rows),)

    # -- The interface of MCMCKernel ---------------------------------------------------------------------------------

    @property
    def sample_field(self) -> str:
        return "z"

    @property
    def default_fields(self) -> tuple[str, ...]:
        return ("z", "accepted", "accept_prob", "exhausted", "diverging")

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
        self._num_warmup = num_warmup
        batch = 1 if is_prng_key(rng_key) else rng_key.shape[0]
        separated = self._admit(model_args, model_kwargs)
        self._ledger.require(self._algorithm.releases(1, batch, resumed=True), 1, None, f"{batch} more iteration(s)")
        if is_prng_key(rng_key):
            keys = random.split(rng_key, 4)
        else:
            keys = jnp.moveaxis(jax.vmap(partial(random.split, num=4))(rng_key), 1, 0)
        params_key, *state_keys = keys
        params = self._initial_params(params_key, init_params, separated, model_args, model_kwargs)
        start = partial(self._initial_state, separated, self._starts_at_a_release(init_params))
        state = jax.jit(start if is_prng_key(rng_key) else jax.vmap(start))(params, *state_keys)
        if self.is_spread and isinstance(state.i, jax.core.Tracer):
            raise ValueError(
                "a table that is spread over devices cannot run chain_method='parallel', for which each chain has a "
                "device: use 'vectorized' or 'sequential'"
            )
        if self._owners is not None and not isinstance(self._owners, OwnerIndex):
            self._agree_with_other_owners(self._owners, state)
        return state

    def sample(self, state: DPState, model_args, model_kwargs) -> DPState:
        """One iteration. Without a grant from the ledger the state stays as it is and says so."""
        model_kwargs = {} if model_kwargs is None else model_kwargs
        separated = self._separate(model_args, model_kwargs)
        if not self._ledger.committed:
            raise RuntimeError("this kernel was not initialised: call `init` first, or use it in an MCMC")
        self._require_same_table(separated)
        target = self._target(separated, model_args, model_kwargs)
        if {"ratio", "grad"} & self._algorithm.noise_shapes(separated.num_params).keys():
            target.find_structure()
        step = partial(self._step, separated, target, _traced((model_args, model_kwargs)))
        return vmap_chains(step)(state) if jnp.ndim(state.i) else step(state)

    def postprocess_fn(self, model_args, model_kwargs) -> Callable:
        """From an unconstrained draw to the released sites; deterministic sites that use private rows are left out."""
        model_kwargs = {} if model_kwargs is None else model_kwargs
        return self._separate(model_args, model_kwargs).constrain(model_args, model_kwargs)

    def get_diagnostics_str(self, state: DPState) -> str:
        accept_prob = float(state.mean_accept_prob)  # of a finished iteration: by now its releases are counted
        plan = self._ledger.plan
        made = sum(map(sum, self._ledger.spent().values())) / sum(sum(kind.counts) for kind in plan.kinds.values())
        budget = f"{made:.0%} of eps {plan.eps:.3g} spent" if plan.private else "not private"
        return f"{budget}, acc. prob={accept_prob:.2f}, step size {state.adapt_state.step_size:.2e}"

    # -- The budget --------------------------------------------------------------------------------------------------

    def require_budget(
        self,
        num_iterations: int,
        num_chains: int,
        model_args: tuple,
        model_kwargs: dict,
        planned: int,
        start: int = 0,
    ) -> None:
        """Check that a run of this size is within the budget, before anything is released; `numpyro_dp.MCMC` asks.

        :param num_iterations: iterations of one chain in the coming run.
        :param planned: iterations of one chain, warmup included, that the budget is for, if the kernel was not given
            `num_iterations`.
        :param start: iterations that the chains have done before, if they go on from a state.
        :raises PrivacyBudgetError: if it is not.
        """
        self._commit(self._separate(model_args, model_kwargs), model_args, model_kwargs, planned, num_chains)
        self._ledger.require(
            self._algorithm.releases(num_iterations, num_chains, start > 0),
            num_iterations,
            start,
            f"{num_chains} chain(s) of {num_iterations} iterations",
        )

    def prepare(self, *model_args: Any, **model_kwargs: Any) -> None:
        """Do what has to be done once, before any chain starts; `init` does it otherwise. Here: nothing."""
        self._admit(model_args, model_kwargs)

    def resume(self, budget: PrivacyBudget) -> int:
        """Take up what is left of the budget of a kernel that was copied or pickled; see `numpyro_dp.MCMC.resume`.

        :param budget: that the run was charged to.
        :return: the first iteration of a chain that can be made, where each has noise of its own; or 0.
        :raises PrivacyBudgetError: if it was not, or `noise_seed` was given, or owners in other processes go on, too.
        :raises TypeError: if `budget` is something else, which could forget what it was charged.
        """
        require_budget_type(budget)
        if hasattr(self._owners, "exchange"):
            raise PrivacyBudgetError("owners in separate processes cannot resume a run: nobody sees whether all do")
        self._ledger.resume(budget)
        self._budget = budget
        return self._ledger.first_iteration_left()

    def settle(self) -> None:
        """Tell the budget of the table, if there is one, what has not been released; `numpyro_dp.MCMC` does."""
        if self._layout is not None and self._layout.num_processes > 1:  # the first one has counted
            self._ledger.take_over(multihost_utils.broadcast_one_to_all(self._ledger.spent()))
        self._ledger.settle()

    def _admit(self, model_args: tuple, model_kwargs: dict) -> SeparableModel:
        """Check that the budget is for these arguments, and make the kernel ready for them."""
        separated = self._separate(model_args, model_kwargs)
        rows = _private_leaves(separated, model_args, model_kwargs)
        self._layout = layout_of(rows)
        if self._layout is not None:
            self._check_layout(self._layout)
        self._commit(separated, model_args, model_kwargs)
        self._require_same_table(separated)
        self._check_arguments(model_args, model_kwargs)
        self._ledger.bind_table(rows)
        self._prepare(separated, model_args, model_kwargs)
        return separated

    def _check_layout(self, layout: Layout) -> None:
        """Refuse to spread over devices what cannot be."""
        if self._unit is not None:
            raise ValueError(
                "a table with `unit` cannot be spread over devices, because its rows are grouped anew: keep it on one"
            )
        if layout.num_processes > 1 and (self._budget is not None or hasattr(self._owners, "exchange")):
            raise ValueError(
                "several processes that share a table cannot charge a `budget` or exchange sums with other owners, "
                "because each of them would. Leave these out, and count this run's eps by hand"
            )

    @property
    def is_spread(self) -> bool:
        """Whether the table lies on several devices."""
        return self._layout is not None

    def wants_table_as_argument(self, model_args: tuple, model_kwargs: dict) -> bool:
        """Whether compiled programs should be given the table rather than hold it as a constant.

        On several devices each would hold all of it; and while JAX compiles a constant it copies it up to four times.
        """
        rows = _private_leaves(self._separate(model_args, model_kwargs), model_args, model_kwargs)
        size = sum(getattr(row, "nbytes", 0) for row in rows)
        return self.is_spread or (size > _LARGE_TABLE and self._unit is None)

    def _require_same_table(self, separated: SeparableModel) -> None:
        """Refuse a table of which the budget says, without looking at the rows, that it is another one."""
        if self._unit_hash != self._ledger.plan.unit:  # a run that is resumed has grouped its rows anew
            raise ValueError("other rows belong together here than when this run began (`unit=`): pass the same column")
        self._ledger.require_size(separated.num_rows)

    def _check_arguments(self, model_args: tuple, model_kwargs: dict) -> None:
        """Refuse arguments that this kernel cannot go on with, before anything is bound to them."""

    def _prepare(self, separated: SeparableModel, model_args: tuple, model_kwargs: dict) -> None:
        """What `prepare` does in the end."""

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
        plan = self._ledger.plan
        kinds = merged_stages(plan.kinds)
        return PrivacyReport(
            eps=plan.eps,
            delta=plan.delta,
            neighboring_relation=plan.neighboring_relation,
            num_rows=plan.num_rows,
            num_chains=plan.num_chains,
            num_iterations=plan.num_iterations,
            kinds=kinds,  # a reader who changes theirs does not change the plan
            committed=self._ledger.committed_releases,
            made=merged_stages(self._ledger.spent()),
            clips={kind: self._describe_clip(kind) for kind in kinds},
            noise=self._describe_noise(plan),
            assumptions=self._assumptions(plan),
            kernel=type(self).__name__,
            posterior=Posterior(self._describe_posterior(), tuple(self._doubts())),
            **self._described,
        )

    def _describe_table(self, separated: SeparableModel) -> dict[str, Any]:
        """What a report says about the table. No shape of it where the number of rows is private."""
        shapes = self._table_size_is_public
        return {
            "unit": self._describe_unit(separated),
            "public_arguments": tuple(map(str, separated.public_arguments())),
            "private_arguments": tuple(str(a) if shapes else a.name for a in separated.private_arguments()),
            "closed_over": separated.closed_over,
            "dropped_sites": dict(separated.dropped_sites),
        }

    @property
    def _table_size_is_public(self) -> bool:
        """Whether neighbouring tables have as many rows: not if one unit may be added, or may have more of them."""
        return size_is_public(self._neighboring_relation) and self._max_rows_per_unit is None

    def _describe_unit(self, separated: SeparableModel) -> str:
        row = "row of " + (f"plate '{separated.row_plate}'" if separated.row_plate else "the table")
        if self._unit is None:
            return row
        name = f"unit '{self._unit}'" if isinstance(self._unit, str) else "unit"
        units = f"{separated.num_rows} units" if size_is_public(self._neighboring_relation) else "units"
        if self._max_rows_per_unit is None:
            return f"{name} with all of its rows ({units}, with up to {separated.rows_per_unit} rows each)"
        return (
            f"{name} with all of its rows, whichever and however many they are ({units}; the first "
            f"{self._max_rows_per_unit} rows of each count)"
        )

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

    def _describe_posterior(self) -> str:
        """What the draws are draws of."""
        tempered = "" if self._n0 is None and self._given_power == 1 else "tempered "
        return f"a chain on the {tempered}posterior; see what it assumes"

    def _doubts(self) -> list[str]:
        """Why released numbers do not vouch for the posterior."""
        return ["no release looked whether clip bounds and step sizes suit the rows (`prepare=False`)"]

    def judge(self, draws: Any) -> None:
        """Look at the draws of a finished run, and warn if released numbers do not vouch for the posterior.

        :param draws: a tree of arrays, chains and draws leading.
        """

    @property
    def _space(self) -> str:
        """In which clip bounds are meant."""
        return "unconstrained space"

    def _describe_exactness(self) -> str:
        """On what the posterior rests, as far as this kernel's approximations go."""
        return (
            f"the posterior is exact where no row's log density changes by more than clip_ratio = "
            f"{self._clips['ratio']:g} per unit of distance in {self._space}; beyond that it is flattened"
            + (
                ""
                if isinstance(self._batches, AllRows)
                else "; and as far as the estimates from batches are normal, with a variance of about 1 or less"
            )
        )

    def _describe_target(self, plan: Plan) -> list[str]:
        if self._n0 is None and self._given_power == 1:
            return []
        power = f"{self._given_power:g}" if self._n0 is None else f"n0 / n = {self._n0:g} / n"
        return [f"the posterior is tempered: each row's likelihood counts with the power {power}"]

    def _describe_owners(self, plan: Plan) -> list[str]:
        if self._owners is None:
            return []
        count = self._owners.num_owners
        lines = [
            f"the rows belong to {count} data owners, each row to one of them. The guarantee is that of each owner's "
            "rows against the other owners, who see its noisy sums; no owner chooses its noise after seeing theirs"
        ]
        if isinstance(self._owners, OwnerIndex) and plan.private:
            outside = [
                (dataclasses.replace(mechanism, noise_multiplier=mechanism.noise_multiplier * math.sqrt(count)), made)
                for mechanism, made in flat_releases(plan.kinds)
            ]
            eps = composed_eps(tuple(outside), plan.delta, plan.neighboring_relation)
            lines.append(f"against who sees only the chains, the noise of all owners counts: eps is {round_up(eps, 4)}")
        return lines

    def _describe_budget(self) -> str:
        if self._shared is None:
            return "other runs on this table add to its cost: `PrivacyBudget` keeps count of them"
        return "this run is charged to a budget of eps {:g}, delta {:g}, which other runs on this table share".format(
            *self._shared
        )

    def _assumptions(self, plan: Plan) -> tuple[str, ...]:
        assumptions = [
            "the model, its public arguments, starting values, step sizes and clip bounds were not chosen by looking "
            "at the private rows",
            "the table, the console and this process's memory stay with the curator",
            self._describe_exactness(),
            *self._describe_target(plan),
            *self._describe_owners(plan),
            self._describe_budget(),
        ]
        if self._default_clips and self._algorithm is self:
            names = " and ".join(f"clip_{name}" for name in self._default_clips)
            assumptions.append(
                f"{names} stayed at the default of {DEFAULT_CLIP:g}, not chosen for this model: privacy holds, but "
                "rows may be clipped, and nobody has looked"
            )
        if self._private_args is None and not self._table_size_is_public:
            assumptions.append(
                "no public argument is a number that goes by how long the table is. Each array argument was taken for "
                "rows: `private_args` says which are"
            )
        if self._max_rows_per_unit is not None:
            assumptions.append(
                f"rows of a unit beyond the first {self._max_rows_per_unit} are left out: the posterior is that of the "
                "others"
            )
            if size_is_public(plan.neighboring_relation):
                assumptions.append("the number of units is public; which rows belong to which unit is private")
        elif self._unit is not None:
            assumptions.append("which rows belong to which unit is public")
        elif size_is_public(plan.neighboring_relation):
            assumptions.append("the number of rows is public")
        return tuple(assumptions)

    def _commit(
        self,
        separated: SeparableModel,
        args: tuple,
        kwargs: dict,
        planned: int | None = None,
        num_chains: int | None = None,
    ) -> None:
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
        n, self._num_params = separated.num_rows, separated.num_params
        self._batches.check(n, self._neighboring_relation)
        if isinstance(self._owners, OwnerIndex) and self._owners.of_row.shape != (n,):
            raise ValueError(f"owners has shape {self._owners.of_row.shape}, but there are {n} rows")
        common: dict[str, Any] = {
            "delta": 0.1 / n if self._delta is None else self._delta,
            "neighboring_relation": self._neighboring_relation,
            "wanted": self._wanted(n, planned, num_chains),
            "num_iterations": planned,
            "num_chains": num_chains,
            "num_rows": n if size_is_public(self._neighboring_relation) else None,
        }
        if self._eps is not None:
            plan = plan_for_budget(eps=self._eps, **common)
        else:
            multipliers = {kind: value for kind, value in self._noise_multipliers.items() if value is not None}
            plan = plan_for_noise(noise_multipliers=multipliers, **common)
        plan = dataclasses.replace(plan, unit=self._unit_hash)
        self._check_plan(plan, n)
        if self._budget is not None:
            self._budget.require(plan)
        described = self._describe_table(separated)
        context = [type(self).__name__, self._settings()]
        if self._ledger.reproducible and not self._ledger.closed:
            context.append(self._fingerprint(separated, args, kwargs))
        self._ledger.commit(plan, repr(tuple(context)))
        self._described = described
        self._warn_if_hopeless(plan)

    def _warn_if_hopeless(self, plan: Plan) -> None:
        """Warn of a chain that noise will keep where it is; by public numbers only."""
        ratio = plan.kinds.get("ratio")
        if self._algorithm is not self or plan.num_rows is None or ratio is None:
            return
        if not isinstance(ratio.mechanisms[0], Gaussian):  # of all rows
            return
        slope = tight_slope(plan.num_rows, self._num_params, self._power(plan.num_rows))
        tau, iterations = ratio.mechanisms[0].noise_multiplier, plan.num_iterations * plan.num_chains
        draws, without_noise = most_draws(self._num_params, slope, tau, iterations, "grad" in plan.kinds)
        if draws < FEW_DRAWS and draws < without_noise / 10:
            warnings.warn(
                f"this {type(self).__name__} will hardly move: with clip bounds as tight as can be, eps={plan.eps:.3g} "
                f"over {plan.num_chains} chain(s) of {plan.num_iterations} iterations pays for about {draws:.1g} "
                f"effective draws of {self._num_params} parameters, if the {plan.num_rows} rows inform all of them. "
                "Use DPHMC with its default preparation, which releases the likelihood once, raise eps, or temper the "
                "likelihood (power, n0); numpyro_dp.plan says how far",
                stacklevel=2,
            )

    def _wanted(self, num_rows: int, num_iterations: int, num_chains: int) -> dict[str, Wanted]:
        """Everything that the budget is for."""

        def wanted(kind: str, count: int) -> Wanted:
            mechanisms = partial(self._mechanisms, kind, num_rows=num_rows, num_iterations=num_iterations)
            stages = len(mechanisms(1.0))
            return Wanted(mechanisms, (count // stages,) * stages, self._shares[kind])

        counts = self.releases(num_iterations, num_chains)
        return {kind: wanted(kind, count) for kind, count in counts.items()}

    def _check_plan(self, plan: Plan, num_rows: int) -> None:
        """Refuse a plan with which the algorithm cannot work, before anything is released."""

    def _settings(self) -> list[tuple[str, Any]]:
        """Everything about the kernel that decides what it asks of the table."""
        plain = (int, float, str, dict, tuple, type(None), *Batches.__args__)
        other = {
            "_described",
            "_layout",  # where it is computed
            "_public_hash",
            "_shared",
            "_separated",
            "_num_warmup",
            "_num_params",
            "_num_iterations",
            "_num_chains",
        }  # the plan has the last two
        return sorted(item for item in vars(self).items() if isinstance(item[1], plain) and item[0] not in other)

    def _fingerprint(self, separated: SeparableModel, args: tuple, kwargs: dict) -> str:
        """A hash of what else decides what is asked of the table: the model, its public values, the mass matrix.

        Of private arguments it knows shapes and dtypes only. Where a chain starts is in its state (`DPState.origin`).
        """
        leaves = jax.tree.leaves((args, kwargs))
        public = [leaf for leaf, a in zip(leaves, separated.arguments, strict=True) if not a.private]
        with jax.ensure_compile_time_eval():  # constants stay constants in chains that run in parallel
            return fingerprint(self._queries(separated, args, kwargs), (public, self._inverse_mass_matrix))

    def _queries(self, separated: SeparableModel, args: tuple, kwargs: dict) -> list[tuple[Callable, tuple]]:
        """The functions of which sums are released or which decide where, with arguments of the right shapes."""
        model, rows = separated.of_rows, placeholder_rows(separated.arguments)
        z = jax.eval_shape(separated.ravel, separated.prototype)
        return [(model.log_prior(args, kwargs), (z,)), (model.row_log_density(args, kwargs), (z, rows))]

    def _power(self, num_rows: int) -> float:
        """Exponent of the likelihood."""
        if self._n0 is None:
            return self._given_power
        if self._n0 > num_rows:
            raise ValueError(f"n0 is {self._n0:g}, more than the {num_rows} rows: give at most as many")
        return self._n0 / num_rows

    def _target(
        self, separated: SeparableModel, args: tuple, kwargs: dict, batches: Batches | None = None
    ) -> PrivateTarget:
        """
        :param batches: of its releases, if they are not the kernel's own.
        """
        plan = self._ledger.plan
        at_hand = not _traced((args, kwargs))
        with jax.ensure_compile_time_eval() if at_hand else nullcontext():
            rows = separated.rows(args, kwargs)
        vault = Vault(
            rows,
            neighboring_relation=plan.neighboring_relation,
            private=plan.private,
            rows_per_unit=separated.rows_per_unit,
            public_places=separated.has_public_places,
            batches=self._batches if batches is None else batches,
            owners=self._owners,
            layout=self._layout,
            ledger=self._ledger,
            at_hand=at_hand,
        )
        return PrivateTarget(
            vault,
            separated.log_prior(args, kwargs),
            separated.row_log_density(args, kwargs),
            num_params=separated.num_params,
            num_rows=separated.num_rows,
            power=self._power(separated.num_rows),
        )

    def _agree_with_other_owners(self, owners: Exchange, state: DPState) -> None:
        """Make sure that all owners run the same chains, before anything is exchanged."""
        if isinstance(state.i, jax.core.Tracer):
            raise ValueError(
                "owners in separate processes cannot run chain_method='parallel': use 'vectorized' or 'sequential'"
            )
        own = ("_eps", "_delta", "_noise_multipliers", "_described")  # these may differ from owner to owner
        plan = self._ledger.plan
        settings = (
            [item for item in self._settings() if item[0] not in own],
            (plan.num_iterations, self._num_warmup, plan.num_chains, plan.neighboring_relation, type(self).__name__),
        )
        numbers = [np.asarray(leaf) for leaf in jax.tree.leaves(state._replace(rng_key=_key_data(state.rng_key)))]
        owners.check(b"settings", repr(settings).encode())
        owners.check(b"random key, starting point and step size", b"".join(x.tobytes() for x in numbers))

    def _known_owners(self, owners: Any) -> "OwnerIndex | Exchange | None":
        if owners is None or hasattr(owners, "exchange"):
            if owners is not None and self._eps == math.inf:
                raise ValueError("eps=inf would send exact sums of rows to the other owners: give a finite eps")
            if owners is not None and not isinstance(self._batches, AllRows):
                raise ValueError("data owners in separate processes use all of their rows: leave batch_size out")
            if owners is not None and self._n0 is not None:
                raise ValueError("n0 needs the number of rows of all owners, which is not known here: give power")
            return owners
        if not size_is_public(self._neighboring_relation):
            raise ValueError("an index of owners tells n, which is private under 'add_or_remove_one'")
        index = np.asarray(owners)
        if index.ndim != 1 or not np.issubdtype(index.dtype, np.integer) or index.size == 0 or index.min() < 0:
            raise ValueError(
                "owners must be each row's owner as integers from 0, shape (n,), or an exchange such as "
                f"numpyro_dp.owners.JaxProcesses(); got {type(owners).__name__} of shape {index.shape}, {index.dtype}"
            )
        if not isinstance(self._batches, AllRows):
            raise ValueError("each owner uses all of its rows: leave batch_size out")
        return OwnerIndex(index.astype(np.int32), int(index.max()) + 1)

    # -- One iteration -----------------------------------------------------------------------------------------------

    def _step(self, separated: SeparableModel, target: PrivateTarget, traced: list, state: DPState) -> DPState:
        """
        :param traced: arguments of the model that may be batched, as the state may.
        """
        rng_key, nonce_key, move_key = random.split(state.rng_key, 3)
        z = separated.ravel(state.z)
        grant = self._ask(nonce_key, state, traced, separated.num_rows, target.num_params)

        def move(grant: Grant) -> Transition:
            start = Step(target, grant, move_key, state.i, z, state.adapt_state, state.carry)
            return self._algorithm.transition(start)

        def stay() -> Transition:
            return Transition(
                z, jnp.array(False), jnp.zeros_like(state.accept_prob), jnp.zeros_like(state.noise_scale), state.carry
            )

        # An exchange with other owners cannot be in a branch, so it looks itself whether it may send.
        if hasattr(self._owners, "exchange"):
            moved = jax.tree.map(partial(jnp.where, grant.granted), move(grant), stay())
        else:
            moved = grant.cond(move, stay)
        z_new, accepted, accept_prob, noise_scale, carry, diverging = moved
        moved = DPState(
            i=state.i + 1,
            z=separated.unravel(z_new),
            accepted=accepted,
            accept_prob=accept_prob,
            mean_accept_prob=state.mean_accept_prob
            + (accept_prob - state.mean_accept_prob)
            / (jnp.where(state.i < self._num_warmup, state.i, state.i - self._num_warmup) + 1),
            noise_scale=noise_scale,
            exhausted=jnp.array(False),
            diverging=jnp.asarray(diverging),
            adapt_state=self._adapt(state.i, accept_prob, z_new, state.adapt_state),
            carry=carry,
            rng_key=None,
            origin=state.origin,
        )
        stayed = state._replace(
            accepted=jnp.array(False), exhausted=jnp.array(True), diverging=jnp.array(False), rng_key=None
        )
        chosen = jax.tree.map(lambda yes, no: jnp.where(grant.granted, yes, no), moved, stayed)
        return chosen._replace(rng_key=rng_key)

    def _ask(self, nonce_key: jax.Array, state: DPState, traced: list, num_rows: int, num_params: int) -> Grant:
        """Leave for the next iteration, from the ledger."""
        shapes, request = self._algorithm.noise_shapes(num_params), self._algorithm.request(state.carry)
        if not shapes:
            return Grant(jnp.array(True), {})
        return ask_ledger(
            self._ledger,
            {kind: (request[kind], shape) for kind, shape in shapes.items()},
            batches=self._batches,
            owners=self._owners,
            num_rows=num_rows,
            witness=_witness((state._replace(rng_key=None), traced)),
            nonce_key=nonce_key,
            origin=state.origin,
            i=state.i,
            accepted=state.accepted,
        )

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

    def _starts_at_a_release(self, init_params: Any) -> bool:
        """Whether the start follows from what this kernel has released, and from the random key."""
        return False

    def _initial_state(
        self, separated: SeparableModel, released: bool, params, rng_key, adapt_key, carry_key
    ) -> DPState:
        z = separated.ravel(params)
        zero = jnp.zeros((), z.dtype)
        step_size = self._initial_step_size(separated.num_rows)
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
            exhausted=jnp.array(False),
            diverging=jnp.array(False),
            adapt_state=adapt_state,
            carry=self._algorithm.init_carry(carry_key, z),
            rng_key=rng_key,
            # Of a released start the last bits depend on how rows are added up, and nothing else about it is free.
            origin=_origin(jnp.zeros_like(z) if released else z, self._num_warmup),
        )

    def _initial_step_size(self, num_rows: int) -> float:
        if self._step_size is not None:
            return self._step_size
        # The width of a posterior whose rows each have information of about 1.
        return 1 / math.sqrt(self._power(num_rows) * num_rows) if size_is_public(self._neighboring_relation) else 0.01

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
            options = self._row_plate, self._private_args, self._table_size_is_public
            separated = separate(self._model, args, kwargs, *options)
            if self._unit is not None:
                are_counted = size_is_public(self._neighboring_relation)
                separated = group_rows(separated, self._unit, args, kwargs, self._max_rows_per_unit, are_counted)
                self._unit_hash = separated.identity
            self._separated[_signature(args, kwargs)] = separated
        elif isinstance(self._unit, str):
            require_same_groups(separated, self._unit, args, kwargs)
        return separated

    def _known(self, args: tuple, kwargs: dict) -> SeparableModel | None:
        return self._separated.get(_signature(args, kwargs))

    def __getstate__(self):
        state = self.__dict__.copy()
        # They hold jitted closures, and shapes: under add/remove the number of rows is private.
        state["_separated"] = {}
        state["_budget"] = None  # a copy has none
        state["_layout"] = None  # devices are those of this process
        return state


def _traced(arguments: Any) -> list:
    return [leaf for leaf in jax.tree.leaves(arguments) if isinstance(leaf, jax.core.Tracer)]


def _witness(tree: Any) -> jax.Array:
    """A number of every array that a step depends on; see `ask_ledger`. Nobody reads it."""
    leaves = jax.tree.leaves(tree)
    return jnp.concatenate([jnp.ravel(leaf[:1] if leaf.ndim else leaf)[:1].astype(jnp.float32) for leaf in leaves])


def _origin(z: jax.Array, num_warmup: int) -> jax.Array:
    """64 bits that are others for another start or another length of the warmup."""
    z = z.astype(jnp.promote_types(z.dtype, jnp.float32))  # of at least one word
    words = jnp.ravel(lax.bitcast_convert_type(z, jnp.uint32))
    key = random.key(num_warmup, impl="threefry2x32")
    return random.key_data(lax.scan(lambda key, word: (random.fold_in(key, word), None), key, words)[0])


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
