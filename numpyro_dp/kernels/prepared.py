"""Kernels that prepare themselves privately before a chain runs.

The preparation (`numpyro_dp.preparation`) finds where the posterior is and how far it is from Gaussian in the
coordinates in which the parameters meet the data. One of the chains in `numpyro_dp.preparation.chains` follows.
"""

import hashlib
import math
import pickle
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import random
from numpyro.util import is_prng_key

from numpyro_dp.chain.algorithm import Algorithm
from numpyro_dp.chain.finished import should_thin_more, uninformed
from numpyro_dp.chain.target import PrivateTarget
from numpyro_dp.kernels.base import DPKernel
from numpyro_dp.kernels.options import OF_PLAIN_SAMPLERS
from numpyro_dp.kernels.state import DPState
from numpyro_dp.model.arguments import PublicArguments
from numpyro_dp.model.coordinates import Cut, entry_names
from numpyro_dp.model.separable import SeparableModel
from numpyro_dp.preparation.begin import Begun, OwnAlgorithm, asked_in_search, begin, cut_of_units, widths_of_prior
from numpyro_dp.preparation.chains import (
    Chain,
    NutsChain,
    OwnChain,
    Prepared,
    WalkChain,
    shape_of_carry,
    surrogate_chain,
)
from numpyro_dp.preparation.fund import RESERVE, tell
from numpyro_dp.preparation.options import Preparation
from numpyro_dp.preparation.prepare import prepare
from numpyro_dp.preparation.verdict import reasons, untold
from numpyro_dp.privacy.accounting import gaussian_rho, noise_multiplier_for
from numpyro_dp.privacy.fingerprint import fingerprint
from numpyro_dp.privacy.ledger import PrivacyBudgetError, Wanted
from numpyro_dp.privacy.mechanisms import Gaussian
from numpyro_dp.privacy.sharding import Layout

RHO_WITHOUT_PRIVACY = 1e6
"""Of a preparation for ``eps=inf``: its noise is as large as a thousandth of what one row may add."""
OWN_SHARE = 0.3
"""Of the budget, for the preparation of a kernel that goes on with its own chain."""
_CLIPS = {
    "count": "one for each row",
    "weights": "counts of rows",
    "scales": "counts of rows",
    "row counts": "one for each coordinate of a row",
    "rare scales": "counts of rows",
    "bounds": "counts of rows",
    "derivatives": "clip bounds from the released counts",
    "unclipped": "one for each row",
    "long rows": "counts of rows",
    "line search": "each row's rise clipped to the linear part's bound",
    "last bounds": "counts of rows",
    "last release": "clip bounds by n, the number of coordinates, and eps, or from the released counts",
    "fit bound": "counts of rows",
    "fit": "clip bounds from the released counts",
    "slope": "counts of rows",
    "ratio": "per unit of distance in whitened coordinates, from the released counts",
    RESERVE: "not spent",
}
_OTHER_PUBLIC = (
    "this kernel was prepared with another model or other public arguments, on which its coordinates and its prior "
    "rest: make a new kernel, whose eps adds to this one's, or pass the same values"
)


class PreparedKernel(DPKernel):
    """A private kernel that prepares itself, unless told not to.

    :param prepare: how; None for a kernel without.
    :param noise_aware: whether draws carry the uncertainty that one-off noise adds (mode "surrogate").
    """

    _has_own_chain = False
    """Whether the kernel goes on with its own algorithm, in the coordinates that were found."""

    def _worth(self, slope: float, size: int, num_rows: int) -> float:
        """About how many independent draws the planned iterations make in these coordinates, if it does.

        :param slope: clip bound, not tempered.
        """
        raise NotImplementedError

    def __init__(self, *args: Any, prepare: Preparation | None, noise_aware: bool = True, **options: Any):
        if not noise_aware and (prepare is None or prepare.mode == "walk"):
            raise ValueError(
                "noise_aware=False is about a likelihood that is released once, and here none is: leave it out"
            )
        self.preparation, self._noise_aware = prepare, noise_aware
        self._strategy_given = options.get("init_strategy") is not None
        self._chain: Chain | OwnChain | None = None
        self._public: list | None = None  # the public arguments that it was prepared with
        self._public_hash: str | None = ""  # of them, for whoever resumes a pickled kernel
        self._prior_hash: str | None = None  # of the prior's density, which may read more than arguments
        self._result: Prepared | None = None
        self._prior_widths: dict[str, float] = {}
        self._uninformed: list[str] = []
        self._untold: list[str] = []
        super().__init__(*args, **options)

    @property
    def prepared(self) -> Prepared | None:
        """What the preparation has found and decided; None before it, or without one."""
        return self._result

    @property
    def released_log_likelihood(self) -> Callable[[jax.Array], jax.Array]:
        """The likelihood that was released, as a function of flat unconstrained parameters, up to a constant.

        It was paid for with the run: whatever is computed from it costs nothing more.

        :raises ValueError: if none was, or the kernel has been pickled since, which forgets the coordinates.
        """
        if not isinstance(self._chain, NutsChain):
            why = "the kernel was pickled since" if self._result is not None else "the kernel has not run"
            if self.preparation is None or (self._result is not None and not self._result.draws_are_free):
                why = "its draws are those of a chain that asks the table in each iteration"
            raise ValueError(f"there is no released likelihood at hand: {why}")
        return self._chain.log_likelihood

    @property
    def log_prior(self) -> Callable[[jax.Array], jax.Array]:
        """The prior's log density of flat unconstrained parameters, Jacobians and data-free factors included.

        :raises ValueError: as `released_log_likelihood`.
        """
        _ = self.released_log_likelihood
        return cast(NutsChain, self._chain).log_prior

    def clip(self, kind: str) -> float:
        found = self._result.slope if self._result is not None and self._has_own_chain else None
        return super().clip(kind) if found is None else found

    @property
    def algorithm(self) -> Algorithm:
        if self.preparation is None:
            return self
        return self._chain or _NotYet(self if self._has_own_chain else None, self.preparation.mode == "walk")

    # -- The budget --------------------------------------------------------------------------------------------------

    def _wanted(self, num_rows: int, num_iterations: int, num_chains: int) -> dict[str, Wanted]:
        if self.preparation is None:
            return super()._wanted(num_rows, num_iterations, num_chains)
        if not self._has_own_chain:
            if self.settings.eps == math.inf:
                # Stages and clip bounds go by what a stage may cost, so there must be a price; no number of it.
                return {RESERVE: Wanted(lambda _: (Gaussian(noise_multiplier_for(RHO_WITHOUT_PRIVACY, 1)),), (1,))}
            return {RESERVE: Wanted(lambda noise_multiplier: (Gaussian(noise_multiplier),), (1,))}
        # Its price is fixed beforehand: what noise the chain's releases then need follows from what is left.
        rho = OWN_SHARE * gaussian_rho(cast(float, self.settings.eps), self.settings.delta_for(num_rows))
        reserve = Gaussian(noise_multiplier_for(rho, 1))
        own = super()._wanted(num_rows, num_iterations, num_chains)
        own = {kind: wanted._replace(share=(1 - OWN_SHARE) * wanted.share) for kind, wanted in own.items()}
        return {RESERVE: Wanted(lambda _: (reserve,), (1,), OWN_SHARE), **own}

    def _ready(self, target: PrivateTarget) -> PrivateTarget:
        return target.of(self._chain.parameters) if isinstance(self._chain, OwnChain) else target

    @property
    def _space(self) -> str:
        return super()._space if self.preparation is None else "whitened coordinates"

    def _initial_step_size(self, num_rows: int) -> float:
        if not isinstance(self._chain, OwnChain):
            return super()._initial_step_size(num_rows)
        return 2.38 / math.sqrt(len(self._chain.prepared.start))  # of a walk on N(0, I)

    def describe_clip(self, kind: str) -> str:
        if self.preparation is None or (self._has_own_chain and kind in self.settings.clips):
            return super().describe_clip(kind)
        return _CLIPS.get(kind, "")

    def describe_exactness(self) -> str:
        if self.preparation is None or self._has_own_chain:
            return super().describe_exactness()
        where = {
            "surrogate": "the log likelihood is close to a quadratic in the coordinates of the release, and few rows' "
            "gradients are clipped",
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

    def describe_posterior(self) -> str:
        if self.preparation is None:
            return super().describe_posterior()
        if self._result is None:
            return "none: the preparation did not end"
        if self._has_own_chain:
            return f"{super().describe_posterior()}. It moves in whitened coordinates that were found privately"
        result = self._result
        aware = "noise-aware" if self._noise_aware else "plug-in (its noise is ignored)"
        released = f"the exact prior times a {aware} quadratic likelihood that was released once"
        found = f"mode '{result.mode}': "
        found += {
            "surrogate": f"NUTS draws of {released}. More draws cost nothing",
            "walk": "a chain on the posterior, by an exact test on each proposal",
        }[result.mode]
        return found

    def doubts(self) -> list[str]:
        if self.preparation is None:
            return super().doubts()
        if self._result is None:
            return ["the preparation did not end"]
        found = reasons(self._result)
        if self._uninformed and len(self._uninformed) == len(self._prior_widths):
            found.append(
                "the draws are hardly narrower than the prior along every parameter: the rows say next to nothing, "
                "since they are too few for this eps, or all masked (missing values, values outside of the levels or "
                "of the law's support)"
            )
        return found + self._reader.doubts + self._doubts_of_draws

    def uninformed(self) -> list[str]:
        return list(dict.fromkeys([*self._uninformed, *self._untold]))

    def thin_more(self, draws: Any) -> bool:
        return isinstance(self._chain, NutsChain) and should_thin_more(draws) and self._chain.thin_more()

    def judge(self, draws: Any) -> None:
        self._uninformed = uninformed(draws, self._prior_widths)
        super().judge(draws)

    def _warning(self, draws: Any) -> str:
        if self.preparation is None:
            return super()._warning(draws)
        doubts = [] if self.preparation.force else self.doubts()
        return f"the posterior may be off: {'; '.join(doubts)}" if doubts else ""

    # -- The preparation ---------------------------------------------------------------------------------------------

    def _check_run(self, num_iterations: int, num_chains: int) -> None:
        plan = self.ledger.plan
        if self.preparation is None or self._chain is not None or self.preparation.mode != "walk":
            return
        if num_iterations * num_chains > plan.num_iterations * plan.num_chains:
            raise PrivacyBudgetError(
                f"the privacy budget (eps={plan.eps:g}) is planned for {plan.num_chains} chain(s) of "
                f"{plan.num_iterations} iterations. For a walk, whose iterations cost, that does not allow "
                f"{num_chains} chain(s) of {num_iterations}. Nothing was released. Give the kernel the "
                "`num_iterations` and `num_chains` that the run needs"
            )

    def _check_arguments(self, public: PublicArguments) -> None:
        if self.preparation is None:
            return
        if not public.at_hand:
            if self._chain is not None:
                return
            raise ValueError(
                "the preparation cannot run on traced arrays: call `kernel.prepare(...)` with the model's arguments "
                "first, or use numpyro_dp.MCMC, which does it for you"
            )
        if self._public is not None and not same_values(public.leaves, self._public):
            raise ValueError(_OTHER_PUBLIC)

    @property
    def _asks_beforehand(self) -> bool:  # type: ignore[override]
        options = self.preparation
        return options is not None and not self._has_own_chain and options.mode != "walk"

    def _check_layout(self, layout: Layout) -> None:
        super()._check_layout(layout)
        if self.preparation is not None and layout.num_processes > 1:
            raise ValueError(
                "a kernel with a preparation cannot run in several processes: each would draw noise of its own for the "
                "same sums. Give `prepare=False`, or put the table on the devices of one process"
            )

    def _prepare(self, separated: SeparableModel, public: PublicArguments, target: Callable[[], PrivateTarget]) -> None:
        if self.preparation is None:
            return
        self._take_up(separated, public)
        prior_hash = _hash_of_prior(separated, public)
        if self._chain is not None and None not in (prior_hash, self._prior_hash) and prior_hash != self._prior_hash:
            raise ValueError(_OTHER_PUBLIC)
        if self._chain is None:
            tell(self.announce, "preparing: reading the model")
            with _now():
                begun = self.before_asking(separated, public, target)
            # Not above, where JAX may fold constants: then the same computation would have another hash.
            if isinstance(begun, Begun):  # of a search
                begun = begun._replace(asked=asked_in_search(begun, self.ledger))
            with _now():
                prepared = self.ask_table(begun)
                self._chain = self._make_chain(prepared, begun.cut, separated, public)
                self._prior_widths = widths_of_prior(separated, public, begun.z_draws, begun.improper)
                if prepared.surrogate is not None:
                    names = entry_names(separated)
                    self._untold = untold(prepared.surrogate, begun.cut, prepared.start, names)
            self._result = prepared
            self._public = copied(public.leaves)
            self._public_hash, self._prior_hash = _hash(self._public), prior_hash
        self._chain.num_warmup = getattr(self, "_num_warmup", 0)

    def _asked_by(self) -> list[tuple[str, Any]]:
        # Not by `repr`, which abbreviates large arrays.
        given = vars(self.preparation) if self.preparation is not None else {}
        leaves, tree = jax.tree.flatten(dict(given))
        values = [leaf.tobytes() if hasattr(leaf, "tobytes") else np.asarray(leaf).tobytes() for leaf in leaves]
        return [*super()._asked_by(), ("preparation", (str(tree), values))]

    def before_asking(
        self, separated: SeparableModel, public: PublicArguments, target: Callable[[], PrivateTarget]
    ) -> Begun:
        """Everything that comes before the first look at the table; see `numpyro_dp.preparation.begin`.

        :param target: makes one on all rows.
        """
        assert self.preparation is not None
        own, power = None, self.settings.power_for(separated.num_rows)
        if self._has_own_chain:
            (kind,) = self.settings.clips
            own = OwnAlgorithm(kind, self._worth)
        return begin(self.preparation, separated, public, target, self.ledger, power, own)

    def ask_table(self, begun: Begun) -> Prepared:
        """Ask the table, and decide by its noisy answers; see `numpyro_dp.preparation.prepare`."""
        return prepare(begun, self.ledger, self.announce)

    def _make_chain(
        self, prepared: Prepared, cut: Cut, separated: SeparableModel, public: PublicArguments
    ) -> Chain | OwnChain:
        if self._has_own_chain:
            return OwnChain(prepared, self)
        prior = separated.log_prior(public.args, public.kwargs)
        if prepared.mode == "walk":
            return WalkChain(prepared, cut, prior)
        return surrogate_chain(prepared, cut, prior, self._noise_aware)

    def _take_up(self, separated: SeparableModel, public: PublicArguments) -> None:
        """Rebuild the chain of a kernel that was unpickled; the table is not asked again."""
        prepared = self._result
        if prepared is None or self._chain is not None:
            return
        with _now():
            cut = self._find_cut(separated, public)
            if self._public_hash is None:
                raise ValueError(
                    "this run has a public argument that cannot be pickled: nobody can tell whether it is the same "
                    "now. Make a new kernel, and bind such things to the model with `functools.partial`"
                )
            if _hash(public.leaves) != self._public_hash or cut.names != prepared.coordinates:
                raise ValueError(_OTHER_PUBLIC)
            self._chain = self._make_chain(prepared, cut, separated, public)
        self._public = copied(public.leaves)

    def _find_cut(self, separated: SeparableModel, public: PublicArguments) -> Any:
        """The coordinates in which the parameters meet the data, with their names."""
        return cut_of_units(separated, public.args, public.kwargs)

    # -- The chains --------------------------------------------------------------------------------------------------

    def _starts_at_a_release(self, init_params: Any) -> bool:
        return self._result is not None and init_params is None and not self._strategy_given

    def _initial_params(self, rng_key, init_params, separated, public):
        if not self._starts_at_a_release(init_params):
            return super()._initial_params(rng_key, init_params, separated, public)
        result = self._result
        assert result is not None

        def draw(key: jax.Array) -> dict[str, jax.Array]:
            normal = random.normal(key, result.start.shape)
            return separated.unravel(jnp.asarray(result.start + np.linalg.cholesky(result.covariance) @ normal))

        return jax.jit(draw if is_prng_key(rng_key) else jax.vmap(draw))(rng_key)

    def get_diagnostics_str(self, state: DPState) -> str:
        if self._result is None or not self._result.draws_are_free:
            return super().get_diagnostics_str(state)
        # Nothing is spent any more, and the step size is that of NUTS.
        nuts = state.carry
        return (
            f"eps {self.ledger.plan.eps:.3g} spent, NUTS on what was released, acc. prob={nuts.mean_accept_prob:.2f}, "
            f"step size {nuts.adapt_state.step_size:.2e}"
        )

    def __getstate__(self):
        return super().__getstate__() | {"_chain": None, "_public": None}


def _now() -> AbstractContextManager:
    """Compute what follows now, also in a trace. Outside of one that is so anyway, and programs compile faster."""
    in_a_trace = isinstance(jnp.zeros(()), jax.core.Tracer)
    return jax.ensure_compile_time_eval() if in_a_trace else nullcontext()


class _NotYet(Algorithm):
    """In the place of the chain that the preparation will choose, or for which it will find coordinates (`own`)."""

    def __init__(self, own: Algorithm | None, walks: bool):
        self._own, self._walks = own, walks

    def releases(self, num_iterations: int, num_chains: int, resumed: bool = False) -> dict[str, int]:
        return self._own.releases(num_iterations, num_chains, resumed) if self._own else {}

    def noise_shapes(self, num_params: int) -> dict[str, tuple[int, ...]]:
        raise RuntimeError("the kernel is not prepared: call `init` first, or use it in an MCMC")

    request = transition = noise_shapes  # type: ignore[assignment]

    def init_carry(self, rng_key: jax.Array, z: jax.Array) -> Any:
        """What that chain will carry, for its names and shapes."""
        if self._own is not None:
            return self._own.init_carry(rng_key, z)
        return jnp.zeros((), z.dtype) if self._walks else shape_of_carry(z)


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


def _hash_of_prior(separated: SeparableModel, public: PublicArguments) -> str | None:
    """A model may also read variables around it; None where values are not known."""
    if not public.at_hand:
        return None
    z = jax.eval_shape(separated.ravel, separated.prototype)
    with jax.ensure_compile_time_eval():
        return fingerprint([(separated.log_prior(public.args, public.kwargs), (z,))], ())


def copied(leaves: list[Any]) -> list[Any]:
    """The same values, also after somebody has changed an array of NumPy's in place."""
    return [leaf.copy() if isinstance(leaf, np.ndarray) else leaf for leaf in leaves]


def same_values(first: list[Any], second: list[Any]) -> bool:
    """Whether two lists hold the same values; traced ones, whose values are not known, count as the same."""

    def same(a: Any, b: Any) -> bool:
        if a is b or isinstance(a, jax.core.Tracer) or isinstance(b, jax.core.Tracer):
            return True
        are_real = all(np.issubdtype(getattr(x, "dtype", object), np.floating) for x in (a, b))
        return bool(np.array_equal(a, b, equal_nan=are_real))

    return len(first) == len(second) and all(map(same, first, second))


def resolve_preparation(prepare: "Preparation | bool | None", eps: float | None, plain: Mapping) -> Preparation | None:
    """What a kernel's argument `prepare` means, beside arguments for the sampler without preparation.

    :param plain: those arguments; None where the user has not given one.
    :raises ValueError: if some are given, and the user has not said that they want that sampler: with a habit of HMC's
        (`dense_mass`, `step_size`) they would get another algorithm than the default without a word.
    """
    if prepare is False or (prepare is None and eps is None):
        return None
    if eps is None:
        raise ValueError("the preparation needs a budget eps, got None: leave `prepare` out")
    given = [name for name, value in plain.items() if value is not None and value is not False]
    if given and prepare is None and math.isinf(eps):
        return None  # to see what that sampler itself does
    if given:
        names, them = ", ".join(given), "it" if len(given) == 1 else "them"
        raise ValueError(
            f"{names}: for the sampler without preparation, which asks the table in each iteration. Leave {them} out, "
            "and the preparation finds what it needs; or say prepare=False, and set step size and clip bounds yourself"
        )
    if prepare is not None and prepare is not True and not isinstance(prepare, Preparation):
        raise TypeError(f"prepare must be True, False, None or a Preparation, got {prepare!r}")
    return prepare if isinstance(prepare, Preparation) else Preparation()


def prepare_own_chain(prepare: Preparation | bool, eps: float | None, plain: Mapping) -> Preparation | None:
    """The same of a kernel that goes on with its own chain, whose default is no preparation."""
    if prepare is not None and prepare is not False and (eps is None or math.isinf(eps)):
        raise ValueError(f"the preparation of this kernel needs a finite budget eps, got {eps}: leave `prepare` out")
    preparation = resolve_preparation(False if prepare is None else prepare, eps, plain)
    if preparation is not None and preparation.mode is not None:
        raise ValueError(
            f"mode {preparation.mode!r} is for DPHMC and DPPenalty: this kernel goes on with its own chain"
        )
    return preparation


def without_preparation(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the options that are for a sampler without preparation; None where they are left at their defaults."""
    given = {name: options.get(name) for name in OF_PLAIN_SAMPLERS}
    return given | {"adapt_step_size": True if options.get("adapt_step_size") is False else None}
