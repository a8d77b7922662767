"""What every private kernel shares: the `MCMCKernel` shell, the data-free start, the budget, what is state.

A kernel sees the table only through a `PrivateTarget`, whose methods return released numbers: sums of clipped rows
with the noise of a `Grant`. Everything in a `DPState` is computed from such releases and from public randomness, so the
whole state may be published; it holds no key from which noise was drawn.
"""

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from jax.experimental import multihost_utils
from numpyro.infer.hmc_util import warmup_adapter
from numpyro.infer.mcmc import MCMCKernel
from numpyro.util import is_prng_key

from numpyro_dp.chain.algorithm import Algorithm, Step, Transition
from numpyro_dp.chain.finished import standing, unmixed
from numpyro_dp.chain.target import PrivateTarget
from numpyro_dp.kernels.commitment import make_plan, require_own_bound, warn_if_hopeless
from numpyro_dp.kernels.description import describe_table, described_together, report
from numpyro_dp.kernels.options import require_budget_type
from numpyro_dp.kernels.reading import ModelReader, private_arrays, require_streamable
from numpyro_dp.kernels.settings import Settings, is_plain
from numpyro_dp.kernels.state import (
    DPState,
    batched_with,
    flat_mass_matrix,
    initial_params,
    origin_of,
    require_fields,
    require_init_params,
)
from numpyro_dp.model.arguments import PublicArguments, is_streamed, placeholder_rows
from numpyro_dp.model.separable import SeparableModel, released_model
from numpyro_dp.preparation.fund import silent
from numpyro_dp.privacy.batches import ALL_ROWS, AllRows, Batches
from numpyro_dp.privacy.budget import PrivacyBudget
from numpyro_dp.privacy.clipping import OwnerIndex, require_correct_sums
from numpyro_dp.privacy.draws import Grant, ask_ledger
from numpyro_dp.privacy.fingerprint import computed_by, fingerprint
from numpyro_dp.privacy.ledger import Ledger, Plan, PrivacyBudgetError, Wanted
from numpyro_dp.privacy.mechanisms import Mechanism
from numpyro_dp.privacy.noise import NoiseSource
from numpyro_dp.privacy.release import Exchange, Vault
from numpyro_dp.privacy.sharding import Layout, layout_of
from numpyro_dp.privacy.vmap import vmap_chains
from numpyro_dp.report import PosteriorWarning, PrivacyReport

_LARGE_TABLE = 2**27  # bytes
_OF_A_RUN = {"_described", "_layout", "_num_warmup", "_prior_widths", "_public_hash", "_prior_hash", "_read_with"}
"""What a kernel remembers of a run, not what it asks."""


class DPKernel(MCMCKernel, Algorithm):
    """Base of the private kernels. `KernelOptions` and `MetropolisOptions` tell what all of them take."""

    def __init__(
        self,
        model: Callable,
        eps: float | None,
        delta: float | None,
        *,
        budget: PrivacyBudget | None = None,
        noise_seed: int | None = None,
        **settings: Any,
    ):
        """
        :param settings: of `Settings`.
        """
        if budget is not None:
            require_budget_type(budget)
        self._settings = Settings(
            model=model,
            eps=eps,
            delta=delta,
            shared=None if budget is None else (budget.eps, budget.delta),
            seed_is_short=noise_seed is not None and abs(noise_seed) < 2**64,
            **settings,
        )
        if noise_seed is not None and self._settings.has_exchange:
            raise ValueError(
                "noise_seed makes noise that whoever knows it can take away, and data owners in separate processes who "
                "run one script know it of one another: leave it out"
            )
        name = getattr(model, "__name__", type(model).__name__)
        self._ledger = Ledger(NoiseSource(noise_seed), budget, f"{type(self).__name__} of {name}")
        self._reader = ModelReader(self._settings)
        self._layout: Layout | None = None
        self._described: dict[str, Any] | None = None
        self._doubts_of_draws: list[str] = []  # doubts about a finished run
        self.announce: Callable[[str], None] = silent  # what goes on, to who waits

    @property
    def settings(self) -> Settings:
        """The kernel's arguments."""
        return self._settings

    @property
    def ledger(self) -> Ledger:
        """What may be released, and what was."""
        return self._ledger

    @property
    def algorithm(self) -> Algorithm:
        """What decides on the next iteration: the kernel itself, unless it has chosen another algorithm."""
        return self

    def clip(self, kind: str) -> float:
        """The clip bound of a kind of release."""
        return self._settings.clips[kind]

    def _mechanisms(
        self, kind: str, noise_multiplier: float, num_rows: int, num_iterations: int
    ) -> tuple[Mechanism, ...]:
        """What the accountant shall see: one mechanism, or one for each iteration where the noise changes."""
        return (self._settings.batches.mechanism(noise_multiplier, num_rows),)

    # -- The interface of MCMCKernel ---------------------------------------------------------------------------------

    @property
    def sample_field(self) -> str:
        return "z"

    @property
    def default_fields(self) -> tuple[str, ...]:
        return ("z", "accepted", "accept_prob", "exhausted", "diverging")

    @property
    def model(self) -> Callable:
        """The model without observed outcomes: what ArviZ and `Predictive` may see without leaking them."""
        return released_model(self._settings.model, self._reader.outcomes)

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
        self._ledger.require(self.algorithm.releases(1, batch, resumed=True), 1, None, f"{batch} more iteration(s)")
        if is_prng_key(rng_key):
            keys = random.split(rng_key, 4)
        else:
            keys = jnp.moveaxis(jax.vmap(partial(random.split, num=4))(rng_key), 1, 0)
        params_key, *state_keys = keys
        params = self._initial_params(params_key, init_params, separated, separated.public(model_args, model_kwargs))
        start = partial(self._initial_state, separated, self._starts_at_a_release(init_params))
        state = jax.jit(start if is_prng_key(rng_key) else jax.vmap(start))(params, *state_keys)
        if self._layout is not None and isinstance(state.i, jax.core.Tracer):
            raise ValueError(
                "a table that is spread over devices cannot run chain_method='parallel', for which each chain has a "
                "device: use 'vectorized' or 'sequential'"
            )
        if self._settings.owners is not None and not isinstance(self._settings.owners, OwnerIndex):
            self._agree_with_other_owners(self._settings.owners, state)
        return state

    def sample(self, state: DPState, model_args, model_kwargs) -> DPState:
        """One iteration. Without a grant from the ledger the state stays as it is and says so."""
        model_kwargs = {} if model_kwargs is None else model_kwargs
        separated = self.separate(model_args, model_kwargs)
        if not self._ledger.committed:
            raise RuntimeError("this kernel was not initialised: call `init` first, or use it in an MCMC")
        self._require_same_table(separated)
        target = self.target(separated, model_args, model_kwargs)
        if {"ratio", "grad"} & self.algorithm.noise_shapes(separated.num_params).keys():
            target.find_structure()
        step = partial(self._step, separated, target, _traced((model_args, model_kwargs)))
        return vmap_chains(step)(state) if jnp.ndim(state.i) else step(state)

    def postprocess_fn(self, model_args, model_kwargs) -> Callable:
        """From an unconstrained draw to the released sites; deterministic sites that use private rows are left out."""
        model_kwargs = {} if model_kwargs is None else model_kwargs
        return self.separate(model_args, model_kwargs).constrain(model_args, model_kwargs)

    def get_diagnostics_str(self, state: DPState) -> str:
        accept_prob = float(state.mean_accept_prob)  # of a finished iteration: by now its releases are counted
        plan = self._ledger.plan
        made = sum(map(sum, self._ledger.spent().values())) / sum(sum(kind.counts) for kind in plan.kinds.values())
        budget = f"{made:.0%} of eps {plan.eps:.3g} spent" if plan.private else "not private"
        return f"{budget}, acc. prob={accept_prob:.2f}, step size {state.adapt_state.step_size:.2e}"

    # -- The budget --------------------------------------------------------------------------------------------------

    def require_names(
        self, extra_fields: Any, init_params: Any, num_chains: int, model_args: tuple, model_kwargs: dict
    ) -> None:
        """Check what names parts of the state or of the model before anything is paid; `numpyro_dp.MCMC` asks.

        :raises ValueError: if a field or a site is not there, or a starting value has another shape.
        """
        separated = self.separate(model_args, model_kwargs)
        public = separated.public(model_args, model_kwargs)
        released = jax.eval_shape(separated.constrain(public.args, public.kwargs), separated.prototype)
        z = jnp.zeros(separated.num_params, jnp.result_type(float))
        carry = partial(jax.eval_shape, self.algorithm.init_carry, random.key(0), z)
        require_fields(extra_fields, separated.prototype, released, carry)
        if init_params is not None:
            require_init_params(init_params, separated, (num_chains,) if num_chains > 1 else ())

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
        separated = self.separate(model_args, model_kwargs)
        public = separated.public(model_args, model_kwargs)
        if not self._ledger.closed:
            self._take_up(separated, public)
        self._commit(separated, public, planned, num_chains)
        self._ledger.require(
            self.algorithm.releases(num_iterations, num_chains, start > 0),
            num_iterations,
            start,
            f"{num_chains} chain(s) of {num_iterations} iterations",
        )
        self._check_run(num_iterations, num_chains)

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
        if self._settings.has_exchange:
            raise PrivacyBudgetError("owners in separate processes cannot resume a run: nobody sees whether all do")
        self._ledger.resume(budget)
        return self._ledger.first_iteration_left()

    def settle(self) -> None:
        """Tell the budget of the table, if there is one, what has not been released; `numpyro_dp.MCMC` does."""
        if self._layout is not None and self._layout.num_processes > 1:  # the first one has counted
            self._ledger.take_over(multihost_utils.broadcast_one_to_all(self._ledger.spent()))
        self._ledger.settle()

    def _admit(self, model_args: tuple, model_kwargs: dict) -> SeparableModel:
        """Check that the budget is for these arguments, and make the kernel ready for them."""
        separated = self.separate(model_args, model_kwargs)
        rows = private_arrays(separated, model_args, model_kwargs)
        require_streamable(type(self).__name__, self._asks_beforehand, separated, model_args, model_kwargs)
        self._layout = layout_of(rows)
        if self._layout is not None:
            self._check_layout(self._layout)
        public = separated.public(model_args, model_kwargs)
        self._commit(separated, public)
        self._require_same_table(separated)
        self._check_arguments(public)
        if self._described is not None:  # a later run may have further arguments
            self._described = described_together(self._described, describe_table(self._settings, separated))
        self._ledger.bind_table(rows)

        def target() -> PrivateTarget:  # no `partial`, which would show the arguments
            return self.target(separated, model_args, model_kwargs, ALL_ROWS)

        self._prepare(separated, public, target)
        return separated

    _asks_beforehand = False
    """Whether all that is asked of the table is asked before the chains start."""

    def _check_layout(self, layout: Layout) -> None:
        """Refuse to spread over devices what cannot be."""
        if self._settings.unit is not None:
            raise ValueError(
                "a table with `unit` cannot be spread over devices, because its rows are grouped anew: keep it on one"
            )
        if layout.num_processes > 1 and (self._ledger.budget is not None or self._settings.has_exchange):
            raise ValueError(
                "several processes that share a table cannot charge a `budget` or exchange sums with other owners, "
                "because each of them would. Leave these out, and count this run's eps by hand"
            )

    def wants_table_as_argument(self, model_args: tuple, model_kwargs: dict) -> bool:
        """Whether compiled programs should be given the table rather than hold it as a constant.

        On several devices each would hold all of it; and while JAX compiles a constant it copies it up to four times.
        Where the number of rows is private, how large the table is must not decide by which program rows are computed.
        """
        if self._reads_rows_once:
            return self._layout is not None
        rows = private_arrays(self.separate(model_args, model_kwargs), model_args, model_kwargs)
        if any(map(is_streamed, rows)):  # no compiled program holds a table that is read in pieces
            return False
        size = sum(getattr(row, "nbytes", 0) for row in rows)
        is_large = size > _LARGE_TABLE or not self._settings.size_is_public
        return self._layout is not None or (is_large and self._settings.unit is None)

    def _require_same_table(self, separated: SeparableModel) -> None:
        """Refuse a table of which the budget says, without looking at the rows, that it is another one."""
        if separated.identity != self._ledger.plan.unit:  # a run that is resumed has grouped its rows anew
            raise ValueError("other rows belong together here than when this run began (`unit=`): pass the same column")
        self._ledger.require_size(separated.num_rows)

    # What a subclass may do beside. In these methods it sees placeholders in the place of private arguments.

    def _see(self, separated: SeparableModel, public: PublicArguments, is_new: bool) -> None:
        """Read something off the model.

        :param is_new: whether the kernel has not seen arguments of these shapes before.
        """

    def _take_up(self, separated: SeparableModel, public: PublicArguments) -> None:
        """Make anew what was lost when this kernel was pickled."""

    def _check_run(self, num_iterations: int, num_chains: int) -> None:
        """Refuse a run of this size, before anything is released."""

    def _check_arguments(self, public: PublicArguments) -> None:
        """Refuse arguments that this kernel cannot go on with, before anything is bound to them."""

    def _prepare(self, separated: SeparableModel, public: PublicArguments, target: Callable[[], PrivateTarget]) -> None:
        """What `prepare` does in the end.

        :param target: makes one on all rows.
        """

    def _ready(self, target: PrivateTarget) -> PrivateTarget:
        """The target as the algorithm wants it."""
        return target

    _reads_rows_once = False
    """Whether every iteration needs the same exact sums, so that these are computed once."""

    def without_data(self, model_args: tuple, model_kwargs: dict) -> tuple[tuple, dict]:
        """The model's arguments with one placeholder row in the place of the table; nothing if they were refused."""
        separated = self._reader.known(model_args, model_kwargs)
        return ((), {}) if separated is None else separated.without_private(model_args, model_kwargs)

    @property
    def privacy(self) -> PrivacyReport:
        """The guarantee and what it rests on, see `PrivacyReport`. Known once the kernel has been initialised."""
        jax.effects_barrier()  # chains may still be running: count what they have released
        if self._described is None or not self._ledger.committed:
            raise RuntimeError("there is no guarantee yet: it is fixed when the run starts. Call `run` first")
        return report(self, self._described)

    def describe_clip(self, kind: str) -> str:
        clip = self.clip(kind)
        if callable(clip):
            return f"clip_{kind}, a function of both places"
        return f"clip_{kind} {clip:g}" + (" per unit of distance" if kind == "ratio" else "")

    def describe_missing(self) -> str:
        """What becomes of missing values."""
        return (
            "a row that is no number at some point (a missing value, say) counts for nothing there; no exact count of "
            "such rows is told"
        )

    def describe_posterior(self) -> str:
        """What the draws are draws of."""
        tempered = "tempered " if self._settings.is_tempered else ""
        return f"a chain on the {tempered}posterior; see what it assumes"

    def doubts(self) -> list[str]:
        """Why released numbers do not vouch for the posterior."""
        found = "no release looked whether clip bounds and step sizes suit the rows (`prepare=False`)"
        return [found, *self._reader.doubts, *self._doubts_of_draws]

    def uninformed(self) -> list[str]:
        """Parameters of which the draws of a finished run say hardly more than the prior does, if the kernel tells."""
        return []

    def thin_more(self, draws: Any) -> bool:
        """Whether the chains of a finished run should run again, with more iterations to a draw that ask no row.

        :param draws: of each site, chains and draws leading.
        """
        return False

    def judge(self, draws: Any) -> None:
        """Look at the draws of a finished run, and warn if released numbers do not vouch for the posterior.

        :param draws: of each site, chains and draws leading.
        """
        self._doubts_of_draws = unmixed(draws)
        if found := self._warning(draws):
            warnings.warn(found, PosteriorWarning, stacklevel=3)

    def _warning(self, draws: Any) -> str:
        """What `judge` warns of; nothing if it is empty."""
        return f"the posterior is off: {self._doubts_of_draws[0]}" if standing(draws) else ""

    @property
    def _space(self) -> str:
        """In which clip bounds are meant."""
        return "unconstrained space"

    def describe_exactness(self) -> str:
        """On what the posterior rests, as far as this kernel's approximations go."""
        clip = self.clip("ratio")
        most = "(before, after)" if callable(clip) else f" = {clip:g} per unit of distance in {self._space}"
        return (
            f"the posterior is exact where no row's log density changes by more than clip_ratio{most}; beyond that it "
            "is flattened"
            + (
                ""
                if isinstance(self._settings.batches, AllRows)
                else "; and as far as the estimates from batches are normal, with a variance of about 1 or less"
            )
        )

    def _commit(
        self,
        separated: SeparableModel,
        public: PublicArguments,
        planned: int | None = None,
        num_chains: int | None = None,
    ) -> None:
        """Fix the plan: of the kernel's own `num_iterations` and `num_chains`, or else as MCMC has planned."""
        settings = self._settings
        if settings.num_iterations is not None:
            planned, num_chains = settings.num_iterations, settings.num_chains
        if self._ledger.committed:
            jax.effects_barrier()  # chains of an earlier run may be on their way to their first release
            if planned is None or not self._ledger.untouched:
                return
        if planned is None or num_chains is None:
            raise ValueError(
                "numpyro.infer.MCMC does not tell a kernel how long it will run, and the noise depends on it: give the "
                f"kernel `num_iterations` (warmup + samples of one chain) and `num_chains`, as in {type(self).__name__}"
                "(model, eps=1.0, num_iterations=1500, num_chains=4), or use numpyro_dp.MCMC, which does it for you"
            )
        plan = make_plan(settings, separated, self._wanted, planned, num_chains)
        self._check_plan(plan, separated)
        require_own_bound(settings, separated, public)
        if self._ledger.budget is not None:
            self._ledger.budget.require(plan)
        described = describe_table(settings, separated)
        context = [type(self).__name__, self._asked_by()]
        if self._ledger.reproducible and not self._ledger.closed:
            context.append(self._fingerprint(separated, public))
        self._ledger.commit(plan, repr(tuple(context)))
        self._described = described
        if self.algorithm is self:
            warn_if_hopeless(type(self).__name__, plan, separated.num_params, settings.power_for(separated.num_rows))

    def _wanted(self, num_rows: int, num_iterations: int, num_chains: int) -> dict[str, Wanted]:
        """Everything that the budget is for."""

        def wanted(kind: str, count: int) -> Wanted:
            mechanisms = partial(self._mechanisms, kind, num_rows=num_rows, num_iterations=num_iterations)
            stages = len(mechanisms(1.0))
            return Wanted(mechanisms, (count // stages,) * stages, self._settings.shares[kind])

        counts = self.releases(num_iterations, num_chains)
        return {kind: wanted(kind, count) for kind, count in counts.items()}

    def _check_plan(self, plan: Plan, separated: SeparableModel) -> None:
        """Refuse a plan with which the algorithm cannot work, before anything is released."""

    def _asked_by(self) -> list[tuple[str, Any]]:
        """Everything about the kernel that decides what it asks of the table, but for the model and the plan."""
        own = vars(self).items()
        return [*self._settings.plain, *sorted((name, x) for name, x in own if is_plain(x) and name not in _OF_A_RUN)]

    def _fingerprint(self, separated: SeparableModel, public: PublicArguments) -> str:
        """A hash of what else decides what is asked of the table: the model, its public values, the mass matrix.

        Of private arguments it knows shapes and dtypes only. Where a chain starts is in its state (`DPState.origin`).
        """
        values = public.leaves, self._settings.inverse_mass_matrix, computed_by()
        with jax.ensure_compile_time_eval():  # constants stay constants in chains that run in parallel
            return fingerprint(self._queries(separated, public), values)

    def _queries(self, separated: SeparableModel, public: PublicArguments) -> list[tuple[Callable, tuple]]:
        """The functions of which sums are released or which decide where, with arguments of the right shapes."""
        model, rows = separated.of_rows, placeholder_rows(separated.arguments)
        z = jax.eval_shape(separated.ravel, separated.prototype)
        args, kwargs = public.args, public.kwargs
        asked: list[tuple[Callable, tuple]] = [
            (model.log_prior(args, kwargs), (z,)),
            (model.row_log_density(args, kwargs), (z, rows)),
        ]
        if callable(clip := self._settings.clips.get("ratio")):
            sites = model.sites(args, kwargs)
            asked.append((lambda z, to: clip(sites(z), sites(to)), (z, z)))
        return asked

    def target(
        self, separated: SeparableModel, args: tuple, kwargs: dict, batches: Batches | None = None
    ) -> PrivateTarget:
        """What algorithms and preparations ask: sums over the rows, by draws of this ledger.

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
            rows_per_unit=separated.numbers_per_unit,
            public_places=separated.has_public_places,
            batches=self._settings.batches if batches is None else batches,
            owners=self._settings.owners,
            layout=self._layout,
            ledger=self._ledger,
            at_hand=at_hand,
        )
        target = PrivateTarget(
            vault,
            separated.log_prior(args, kwargs),
            separated.row_log_density(args, kwargs),
            num_params=separated.num_params,
            num_rows=separated.num_rows,
            power=self._settings.power_for(separated.num_rows),
            sites=separated.sites(args, kwargs) if callable(self._settings.clips.get("ratio")) else None,
        )
        return self._ready(target)

    def _agree_with_other_owners(self, owners: Exchange, state: DPState) -> None:
        """Make sure that all owners run the same chains, before anything is exchanged."""
        if isinstance(state.i, jax.core.Tracer):
            raise ValueError(
                "owners in separate processes cannot run chain_method='parallel': use 'vectorized' or 'sequential'"
            )
        own = ("eps", "delta", "noise_multipliers")  # these may differ from owner to owner
        plan = self._ledger.plan
        settings = (
            [item for item in self._asked_by() if item[0] not in own],
            (plan.num_iterations, self._num_warmup, plan.num_chains, plan.neighboring_relation, type(self).__name__),
        )
        numbers = [np.asarray(leaf) for leaf in jax.tree.leaves(state._replace(rng_key=random.key_data(state.rng_key)))]
        owners.check(b"settings", repr(settings).encode())
        owners.check(b"random key, starting point and step size", b"".join(x.tobytes() for x in numbers))

    # -- One iteration -----------------------------------------------------------------------------------------------

    def _step(self, separated: SeparableModel, target: PrivateTarget, traced: list, state: DPState) -> DPState:
        """One iteration: what is granted, where the algorithm moves with it, and the next state.

        :param traced: arguments of the model that may be batched, as the state may.
        """
        rng_key, nonce_key, move_key = random.split(state.rng_key, 3)
        z = separated.ravel(state.z)
        grant = self._ask(nonce_key, state, traced, separated.num_rows, target.num_params)

        def move(grant: Grant) -> Transition:
            start = Step(target, grant, move_key, state.i, z, state.adapt_state, state.carry)
            return self.algorithm.transition(start)

        def stay() -> Transition:
            return Transition(
                z, jnp.array(False), jnp.zeros_like(state.accept_prob), jnp.zeros_like(state.noise_scale), state.carry
            )

        # An exchange with other owners cannot be in a branch, so it looks itself whether it may send.
        if self._settings.has_exchange:
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
        shapes, request = self.algorithm.noise_shapes(num_params), self.algorithm.request(state.carry)
        if not shapes:
            return Grant(jnp.array(True), {})
        return ask_ledger(
            self._ledger,
            {kind: (request[kind], shape) for kind, shape in shapes.items()},
            batches=self._settings.batches,
            owners=self._settings.owners,
            num_rows=num_rows,
            batched=batched_with((state._replace(rng_key=None), traced)),
            nonce_key=nonce_key,
            origin=state.origin,
            i=state.i,
            accepted=state.accepted,
        )

    def _adapter(self):
        return warmup_adapter(
            self._num_warmup,
            adapt_step_size=self._settings.adapt_step_size,
            adapt_mass_matrix=self._settings.adapt_mass_matrix,
            dense_mass=self._settings.dense_mass,
            target_accept_prob=self._settings.target_accept_prob,
        )

    def _adapt(self, i: jax.Array, accept_prob: jax.Array, z: jax.Array, adapt_state: Any) -> Any:
        """NumPyro's warmup adaptation, fed with released values only, hence free post-processing."""
        if self._num_warmup == 0 or not (self._settings.adapt_step_size or self._settings.adapt_mass_matrix):
            return adapt_state
        _, update = self._adapter()
        return lax.cond(i < self._num_warmup, lambda: update(i, accept_prob, (z,), adapt_state), lambda: adapt_state)

    # -- The start ---------------------------------------------------------------------------------------------------

    def _starts_at_a_release(self, init_params: Any) -> bool:
        """Whether the start follows from what this kernel has released, and from the random key."""
        return False

    def _initial_state(
        self, separated: SeparableModel, released: bool, params: dict, rng_key, adapt_key, carry_key
    ) -> DPState:
        z = separated.ravel(params)
        init, _ = self._adapter()
        adapt_state = init(
            (z,),
            adapt_key,  # for a step size search, which there is none of: it would look at the rows
            step_size=jnp.asarray(self._initial_step_size(separated.num_rows), z.dtype),
            inverse_mass_matrix=flat_mass_matrix(self._settings, separated, z.dtype),
            mass_matrix_size=z.size,
        )._replace(rng_key=None)
        # Of a released start the last bits depend on how rows are added up, and nothing else about it is free.
        origin = origin_of(jnp.zeros_like(z) if released else z, self._num_warmup)
        carry = self.algorithm.init_carry(carry_key, z)
        zero, no = jnp.zeros((), z.dtype), jnp.array(False)
        return DPState(
            i=jnp.array(0),
            z=params,
            accepted=no,
            accept_prob=zero,
            mean_accept_prob=zero,
            noise_scale=zero,
            exhausted=no,
            diverging=no,
            adapt_state=adapt_state,
            carry=carry,
            rng_key=rng_key,
            origin=origin,
        )

    def _initial_step_size(self, num_rows: int) -> float:
        given = self._settings.step_size
        return self._settings.width_for(num_rows) if given is None else given

    def _initial_params(self, rng_key, init_params, separated: SeparableModel, public: PublicArguments) -> dict:
        return initial_params(self._settings, rng_key, init_params, separated, public.args, public.kwargs)

    def separate(self, args: tuple, kwargs: dict) -> SeparableModel:
        """The model for arguments of these shapes: checked once, and again only for other shapes."""
        is_new = self._reader.known(args, kwargs) is None
        separated = self._reader.read(args, kwargs)
        self._see(separated, separated.public(args, kwargs), is_new)
        return separated

    def __getstate__(self):
        state = self.__dict__.copy()
        state["_reader"] = copy.copy(self._reader)  # which forgets what was read
        state["_layout"] = None  # devices are those of this process
        return state


def _traced(arguments: Any) -> list:
    return [leaf for leaf in jax.tree.leaves(arguments) if isinstance(leaf, jax.core.Tracer)]
