"""`MCMC`: NumPyro's MCMC with the budget planned beforehand, a report afterwards, and results without data."""

import dataclasses
import math
import operator
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compilation_cache import compilation_cache
from numpyro.infer import mcmc as numpyro_mcmc
from tqdm.auto import tqdm

from numpyro_dp.chain.finished import draws_of_parameters, standing
from numpyro_dp.kernels.base import DPKernel
from numpyro_dp.privacy.budget import PrivacyBudget
from numpyro_dp.privacy.passes import StreamedColumn, StreamedTable
from numpyro_dp.report import Posterior, PrivacyReport
from numpyro_dp.statements import some_of


class MCMC(numpyro_mcmc.MCMC):
    """NumPyro's ``MCMC`` for a private kernel. All arguments are NumPyro's.

    It tells the kernel how long the run will be, so that the kernel's `eps` covers all of it (every chain, warmup
    included); refuses a run that the budget does not cover before anything is released; and forgets the table after
    the run, so that pickles and ArviZ see none of it.

    `warmup` and the `run` that follows it are one run, and share its budget.
    """

    progress_bar: bool
    _jit_model_args: bool
    _judged: Posterior | None = None  # what was said of the draws
    _args: tuple
    _kwargs: dict

    def __init__(
        self,
        sampler: DPKernel,
        *,
        num_warmup: int,
        num_samples: int,
        num_chains: int = 1,
        thinning: int = 1,
        postprocess_fn: Callable | None = None,
        chain_method: str | Callable = "parallel",
        progress_bar: bool = True,
        progress_rate: int | None = None,
        jit_model_args: bool = False,
    ):
        if not isinstance(sampler, DPKernel):
            raise TypeError(
                f"numpyro_dp.MCMC needs a private kernel such as DPHMC, got {type(sampler).__name__}; "
                "numpyro.infer.MCMC runs the others"
            )
        super().__init__(
            sampler,
            num_warmup=operator.index(num_warmup),
            num_samples=operator.index(num_samples),
            num_chains=operator.index(num_chains),
            thinning=operator.index(thinning),
            postprocess_fn=postprocess_fn,
            chain_method=chain_method,
            progress_bar=progress_bar,
            progress_rate=progress_rate,
            jit_model_args=jit_model_args,
        )

    @property
    def privacy(self) -> PrivacyReport:
        """What was guaranteed, released and spent; see `PrivacyReport`. What it says of the posterior is about this
        run's draws, also if the kernel has made others since.
        """
        report = self.sampler.privacy
        return report if self._judged is None else dataclasses.replace(report, posterior=self._judged)

    def run(self, rng_key, *args, extra_fields=(), init_params=None, **kwargs) -> None:
        """Run the chains; see NumPyro.

        :raises TypeError: if `rng_key` is no key.
        :raises ValueError: if there are other than one key, or one for each chain.
        :raises PrivacyBudgetError: before anything is released, if the budget does not cover the run.
        :raises ValueError: before anything is paid, if `extra_fields` or `init_params` name what is not there.
        :raises UnsupportedModelError: if the model has no log density per row.
        """
        if not _is_key(rng_key):
            raise TypeError(
                "the first argument of `run` is rng_key, a key of JAX's: mcmc.run(jax.random.key(0), ...); got "
                f"{type(rng_key).__name__}"
            )
        axes = np.shape(rng_key)[: None if jnp.issubdtype(rng_key.dtype, jax.dtypes.prng_key) else -1]
        num_keys = math.prod(axes)
        if num_keys not in (1, self.num_chains):
            raise ValueError(
                f"rng_key has {num_keys} keys for {self.num_chains} chain(s): give one, or one for each chain"
            )
        if axes and num_keys == 1:  # out of its array, which NumPyro would take for one chain's
            rng_key = rng_key[(0,) * len(axes)]
        resumed = self._warmup_state
        steps = self._collection_params["upper"] if resumed is None else self.num_samples
        start = 0 if resumed is None else max(1, int(np.max(resumed.i)))
        collects = resumed is not None or self._collection_params["lower"] < self._collection_params["upper"]
        planned = self.num_warmup + self.num_samples
        jit_model_args = self._jit_model_args
        before = self._states, getattr(self, "_args", ()), getattr(self, "_kwargs", {})
        tables = {leaf.table for leaf in jax.tree.leaves((args, kwargs)) if isinstance(leaf, StreamedColumn)}
        if tables and jit_model_args:
            raise ValueError("jit_model_args=True: a table that is read in pieces is no argument of a compiled program")
        try:
            self.sampler.require_names(extra_fields, init_params, self.num_chains, args, kwargs)
            self.sampler.require_budget(steps, self.num_chains, args, kwargs, planned, start)
            # NumPy would warn of a value that is too large for single precision, which one row may have.
            with _no_compilation_cache_on_disk(), np.errstate(all="ignore"):
                with _announced(self.sampler, self.progress_bar, tables):
                    self.sampler.prepare(*args, **kwargs)
                self._jit_model_args = jit_model_args or self.sampler.wants_table_as_argument(args, kwargs)
                is_whole = resumed is None and self._collection_params["phase"] is None  # warmup included
                again = True
                while again:
                    super().run(rng_key, *args, extra_fields=extra_fields, init_params=init_params, **kwargs)
                    jax.block_until_ready(self._last_state)
                    self._judged = None  # of draws that are replaced by now
                    again = is_whole and self.sampler.thin_more(self._draws_of_parameters())
                    self._forget_programs()
            self.sampler.settle()
            if collects:
                self.sampler.judge(self._draws_of_parameters())
                self._judged = self.sampler.privacy.posterior
        finally:
            self._jit_model_args = jit_model_args
            # Also after an error or an interrupt. What remains has the shapes that ArviZ needs, and nothing private.
            if self._states is None or self._states is not before[0]:
                self._args, self._kwargs = self.sampler.without_data(args, kwargs)
            else:  # the draws are still those of an earlier run
                _, self._args, self._kwargs = before
            self._forget_programs()
            # What a failed `warmup` asked to be collected must not be collected by the next run.
            self._set_collection_params()

    def _forget_programs(self) -> None:
        """They hold the table."""
        self._cache.clear()
        self._init_state_cache.clear()

    def _draws_of_parameters(self) -> dict[str, Any]:
        return draws_of_parameters(self._states[self._sample_field], self._last_state.z, self.num_chains)

    def resume(self, budget: PrivacyBudget) -> None:
        """Go on with a run that was pickled, in another process or after a crash.

        A pickle keeps results, not budget; what is left of that is in the file. Give a long run `num_iterations`, do it
        in parts, and pickle the `MCMC` after each::

            mcmc = MCMC(DPPenalty(model, eps=1.0, budget=budget, num_iterations=5000), num_warmup=500, num_samples=500)
            mcmc.run(random.key(0), X, y=y)
            Path("run.pickle").write_bytes(pickle.dumps(mcmc))

            mcmc = pickle.loads(Path("run.pickle").read_bytes())  # perhaps tomorrow
            mcmc.resume(PrivacyBudget("patients.budget"))
            mcmc.run(mcmc.last_state.rng_key, X, y=y)  # 500 further draws from where the last part ended

        Nothing is paid for twice or made twice: of the releases that are left each is claimed in the file before it is
        made, by whoever goes on with the run. A process that crashes loses what it had claimed, a twentieth of the
        plan at most beyond what it had made. Where the noise changes from iteration to iteration, the chain goes on
        with the first one of which nothing is gone. Pass the same table, which nobody checks, and the same public
        arguments.

        :param budget: that the run was charged to, opened anew.
        :raises PrivacyBudgetError: if it was charged to no budget or to another one, or `noise_seed` was given.
        """
        start = self.sampler.resume(budget)
        if self.last_state is not None:
            self.post_warmup_state = self.last_state._replace(i=jnp.maximum(self.last_state.i, start))

    def _compile(self, rng_key, *args, **options) -> None:
        # With a progress bar NumPyro compiles by making an iteration, which would have to be paid for.
        progress_bar = self.progress_bar
        self.progress_bar = False
        try:
            super()._compile(rng_key, *args, **options)
        finally:
            self.progress_bar = progress_bar

    def print_summary(self, prob: float = 0.9, exclude_deterministic: bool = True) -> None:
        """NumPyro's table, and under it the guarantee; the last line says whether to believe the posterior.

        ``print(mcmc.privacy)`` is the whole report.
        """
        super().print_summary(prob, exclude_deterministic)
        if still := standing(self._draws_of_parameters()):
            print(f"A chain stood still in {some_of(still)}: n_eff and r_hat of these mean nothing.\n")
        print(self.privacy.brief())

    def __getstate__(self):
        state = super().__getstate__()
        state["_init_state_cache"] = {}
        return state


def _is_key(value: Any) -> bool:
    """Whether it can be a key of JAX's, new or old style, or one for each chain; not whether it is a table."""
    dtype = getattr(value, "dtype", None)
    return dtype is not None and (jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key) or dtype == jnp.uint32)


@contextmanager
def _announced(kernel: DPKernel, shown: bool, tables: Iterable[StreamedTable]) -> Iterator[None]:
    """Show what a preparation is at, in the place of NumPyro's bar, which comes later. It goes by released numbers.

    :param tables: that are read in pieces: each shows a bar for each pass, where it may say how many rows there are.
    """
    bars_for_passes = shown and kernel.settings.table_size_is_public
    bars: list[tqdm] = []

    def show(text: str) -> None:
        if not bars:
            bars.append(tqdm(bar_format="{desc}  [{elapsed}]"))
        bars[0].set_description_str(text)

    before = kernel.announce
    bars_before = {table: table.progress_bar for table in tables}
    try:
        kernel.announce = show if shown else before
        for table in tables:
            table.progress_bar = bars_for_passes
        yield
    finally:
        kernel.announce = before
        for table, was in bars_before.items():
            table.progress_bar = was
        for bar in bars:
            bar.close()


_cache_lock = threading.Lock()
_private_runs: set[object] = set()  # that are going on in this process, in whatever thread
_cache_was_enabled: bool | None = None  # before them


@contextmanager
def _no_compilation_cache_on_disk() -> Iterator[None]:
    """NumPyro compiles the model's arguments into its programs, and JAX's persistent cache would keep those on disk.

    The cache is one for the whole process: the first private run switches it off and the last restores what was there.
    It is switched off without a directory, too, since somebody may name one while the run compiles.
    """
    run = object()
    try:
        with _cache_lock:
            _private_runs.add(run)
            _switch_cache_off()
        yield
    finally:
        with _cache_lock:
            _private_runs.discard(run)
            if not _private_runs:
                _restore_cache()


def _switch_cache_off() -> None:
    global _cache_was_enabled
    enabled = jax.config.jax_enable_compilation_cache
    if _cache_was_enabled is None or enabled:  # enabled by somebody while another run is going on
        _cache_was_enabled = enabled
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # forget that it was found enabled


def _restore_cache() -> None:
    global _cache_was_enabled
    if _cache_was_enabled is None:  # this run was interrupted before it switched anything
        return
    if _cache_was_enabled:
        jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()
    _cache_was_enabled = None  # at last: whoever is interrupted before leaves it to the next run
