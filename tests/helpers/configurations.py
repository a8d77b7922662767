"""Kernels with options, and how each is run: each option of each kernel is in one of them."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import numpyro.infer
import numpyro.infer.mcmc
import numpyro.util
from numpyro.infer import init_to_sample, init_to_uniform, init_to_value

from helpers.constant_sums import SECRET
from numpyro_dp import (
    DPHMC,
    DPSGHMC,
    DPSGLD,
    DPSGNHT,
    DPBarker,
    DPExponentialFamily,
    DPPenalty,
    ExponentialFamily,
    FixedBatches,
    PoissonBatches,
    Preparation,
    PrivacyBudget,
    decreasing_steps,
)
from numpyro_dp.kernels.base import DPKernel
from tests.helpers.local_owners import LocalExchange

N = 37  # rows; no other number here is this one
MORE = 41  # rows of a table whose number of rows is private
UNITS = 9

# -- Tables ------------------------------------------------------------------------------------------------------------


def line(x, y=None, kind=None, person=None):
    """Parameters of a few kinds, a deterministic site that may be released and one that may not."""
    a = numpyro.sample("a", dist.Normal(0, 1))
    b = numpyro.sample("b", dist.Normal(0, 1))
    numpyro.deterministic("contrast", b - a)
    with numpyro.plate("rows", x.shape[0]):
        eta = numpyro.deterministic("eta", a + x * b + 0.1 * kind)
        numpyro.sample("y", dist.Normal(eta, 1.0), obs=y)


def location(y=None):
    """A likelihood with sufficient statistics."""
    a = numpyro.sample("a", dist.Normal(0, 3))
    numpyro.deterministic("twice", 2 * a)
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(a, 1.0), obs=y)


def memberships(y=None):
    """Each row has a discrete latent to itself, which is summed out."""
    a = numpyro.sample("a", dist.Normal(0, 1))
    b = numpyro.sample("b", dist.Normal(1, 1))
    with numpyro.plate("rows", y.shape[0]):
        component = numpyro.sample("component", dist.Bernoulli(0.3))
        numpyro.sample("y", dist.Normal(jnp.where(component == 1, a, b), 1.0), obs=y)


def visits(x, y=None, kind=None, person=None, num_persons=20):
    """Each person has an intercept, which is integrated out; what is computed from it is not released."""
    a = numpyro.sample("a", dist.Normal(0, 1))
    b = numpyro.sample("b", dist.Normal(0, 1))
    with numpyro.plate("persons", num_persons):
        u = numpyro.deterministic("u", a + numpyro.sample("u_decentered", dist.Normal(0, 1)))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.StudentT(5.0, u[person] + x * b + 0.1 * kind, 1.0), obs=y)


def hostile(n: int, seed: int) -> np.ndarray:
    values = np.random.default_rng(seed).normal(size=n)
    values[:6] = np.nan, np.inf, -np.inf, 1e30, -1e-30, 0.0
    return values


def kinds(n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 3, n)


def secret_rows(n: int) -> dict[str, np.ndarray]:
    return {"x": np.full(n, SECRET), "y": np.full(n, SECRET), "kind": kinds(n, 1)}


def other_rows(n: int) -> dict[str, np.ndarray]:
    return {"x": hostile(n, 2), "y": np.full(n, np.nan), "kind": kinds(n, 3)}


def persons(n: int, seed: int, units: int = UNITS) -> np.ndarray:
    """Whose each row is."""
    return np.concatenate([np.arange(units), np.random.default_rng(seed).integers(0, units, n - units)])


@dataclasses.dataclass(frozen=True)
class Tables:
    """A model, and two tables for it that everything released must be the same for.

    :ivar first, second: make the keyword arguments; all rows of the first are `SECRET`.
    :ivar public: arguments that are as long as the table and public all the same, equal in both.
    :ivar sites: its unconstrained parameters, all of them scalars.
    """

    model: Callable
    first: Callable[[], dict[str, Any]]
    second: Callable[[], dict[str, Any]]
    public: tuple[str, ...] = ()
    sites: tuple[str, ...] = ("a", "b")


LINE = Tables(line, lambda: secret_rows(N), lambda: other_rows(N))
NAMED = Tables(
    line,
    lambda: secret_rows(N) | {"person": persons(N, 4)},
    lambda: other_rows(N) | {"person": persons(N, 4)},
    public=("person",),
)
WHOSE = dataclasses.replace(NAMED, second=lambda: other_rows(N) | {"person": persons(N, 5)}, public=())
VISITS = dataclasses.replace(NAMED, model=visits)
VISITS_OF_WHOM = dataclasses.replace(WHOSE, model=visits)
LOCATION = Tables(location, lambda: {"y": np.full(N, SECRET)}, lambda: {"y": hostile(N, 6)}, sites=("a",))
MEMBERSHIPS = Tables(memberships, lambda: {"y": np.full(N, SECRET)}, lambda: {"y": hostile(N, 7)})


# -- Configurations ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class InFolder:
    """An option that is made anew for each run, in a folder of the run's own."""

    make: Callable[[Path], Any]


@dataclasses.dataclass(frozen=True)
class Configuration:
    """A kernel, its options, and how it is run.

    :ivar options: of the constructor, all that are given.
    :ivar mcmc: options of `MCMC`.
    :ivar run: options of `MCMC.run`.
    :ivar warmup: options of `MCMC.warmup`, which is called first, if there are any.
    :ivar then: "again" for a second run that goes on from the first, "resume" for one of the unpickled `MCMC`.
    :ivar stock: whether NumPyro's own `MCMC` drives the kernel. It keeps the table, which is documented.
    :ivar parts: what else is drawn or asked; costs time, so not everywhere.
    """

    kernel: type[DPKernel]
    options: Mapping[str, Any]
    tables: Tables = LINE
    mcmc: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    run: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    warmup: Mapping[str, Any] | None = None
    then: str | None = None
    stock: bool = False
    x64: bool = False
    typed_key: bool = False
    parts: tuple[str, ...] = ()

    @property
    def hides_its_size(self) -> bool:
        """Whether neighbouring tables may have other numbers of rows."""
        return "max_rows_per_unit" in self.options or self.options.get("neighboring_relation") == "add_or_remove_one"

    @property
    def own_start(self) -> bool:
        """Whether the kernel finds where to start; a start that is given saves compiling."""
        return "init_strategy" in self.options or (self.options.get("prepare") is not False and "start" in self.parts)


def new_budget(**options: Any) -> InFolder:
    return InFolder(lambda folder: PrivacyBudget(folder / "table.budget", eps=50.0, delta=0.1, **options))


def exchange(folder: Path) -> LocalExchange:
    (owner,) = LocalExchange.group(1)
    owner.sent = []
    return owner


ADDED = {"neighboring_relation": "add_or_remove_one", "delta": 1e-4}
SEED = {"noise_seed": 11}
NAMES = {"row_plate": "rows", "private_args": ["x", "y", "kind"]}
TWO = {"num_chains": 2, "chain_method": "vectorized"}
CAPPED = {"unit": "person", "max_rows_per_unit": 3}
ALTERNATING = np.arange(N) % 2
OF_UNITS = np.arange(N) // 4

EVERYTHING_SAID = Preparation(start={"a": 0.1}, scales={"a": 0.5, "b": 2.0}, mode="surrogate", force=True)


def own_family() -> ExponentialFamily:
    return ExponentialFamily(
        statistic=lambda row: jnp.clip(row["y"], -8.0, 8.0)[None],
        natural_parameters=lambda sites: sites["a"][None],
        log_partition=lambda sites: sites["a"] ** 2 / 2,
        bound=8.0,
    )


def told_bound(before, after):
    """What a row with ``|x| <= 3`` and a residual of at most 2 can change by."""
    return 2 * (jnp.abs(after["a"] - before["a"]) + 3 * jnp.abs(after["b"] - before["b"]))


def falling(t):
    return 1e-4 / t


def unconstrained(z):
    return z


CONFIGURATIONS = {
    # -- DPHMC
    "hmc": Configuration(
        DPHMC,
        {"eps": 3.0, "prepare": Preparation(mode="surrogate", force=True)} | SEED,
        parts=("figure", "start"),
    ),
    "hmc_told_to": Configuration(DPHMC, {"eps": 90.0, "prepare": True, "adapt_step_size": True, "noise_aware": True}),
    "hmc_everything_said": Configuration(
        DPHMC,
        {"eps": 3.0, "prepare": EVERYTHING_SAID, "noise_aware": False, "power": 0.5, "init_strategy": init_to_sample}
        | NAMES
        | ADDED,
        mcmc={"progress_bar": True},
    ),
    "hmc_walk": Configuration(
        DPHMC,
        {
            "eps": 3.0,
            "prepare": Preparation(mode="walk", force=True),
            "num_iterations": 12,
            "num_chains": 1,
            "budget": new_budget(),
        }
        | CAPPED,
        WHOSE,
        then="resume",
    ),
    "hmc_tempered": Configuration(
        DPHMC,
        {"eps": 3.0, "prepare": Preparation(force=True), "n0": 20.0, "neighboring_relation": "zero_out"} | SEED,
        mcmc={"jit_model_args": True},
    ),
    "hmc_plain": Configuration(
        DPHMC,
        {
            "eps": 3.0,
            "prepare": False,
            "num_steps": 2,
            "leapfrog": "reuse",
            "clip_ratio": 2.0,
            "clip_grad": 2.0,
            "step_size": 0.05,
            "grad_share": 0.4,
            "jitter": 0.1,
            "inverse_mass_matrix": np.array([0.5, 2.0]),
            "adapt_mass_matrix": True,
            "target_accept_prob": 0.6,
        }
        | SEED,
        mcmc={"progress_bar": True, "progress_rate": 2, "chain_method": "sequential"},
        run={"extra_fields": ("carry.gradient", "carry.has_gradient", "adapt_state.mass_matrix_sqrt", "~z.a")},
    ),
    "hmc_fresh": Configuration(
        DPHMC,
        {
            "noise_multiplier_ratio": 3.0,
            "noise_multiplier_grad": 2.0,
            "leapfrog": "fresh",
            "step_size": 0.05,
            "trajectory_length": 0.1,
            "owners": ALTERNATING,
            "dense_mass": True,
            "inverse_mass_matrix": np.array([[1.0, 0.1], [0.1, 1.0]]),
            "adapt_step_size": False,
        }
        | SEED,
        mcmc={"num_chains": 2, "chain_method": "parallel"},
    ),
    "hmc_position": Configuration(
        DPHMC,
        {
            "eps": 3.0,
            "prepare": False,
            "num_steps": 2,
            "leapfrog": "position",
            "power": 0.5,
            "owners": InFolder(exchange),
            "budget": new_budget(neighboring_relation="add_or_remove_one"),
        }
        | ADDED,
        mcmc=TWO,
    ),
    "hmc_rate": Configuration(
        DPHMC,
        {
            "noise_multiplier_ratio": 3.0,
            "noise_multiplier_grad": 2.0,
            "leapfrog": "reuse",
            "num_steps": 2,
            "batch_size": PoissonBatches(rate=0.3),
            "power": 0.5,
        }
        | ADDED
        | SEED,
        mcmc=TWO,
    ),
    "hmc_fixed": Configuration(
        DPHMC,
        {"eps": 3.0, "prepare": False, "num_steps": 2, "batch_size": FixedBatches(5), "step_size": 0.05} | SEED,
        mcmc=TWO,
    ),
    "hmc_memberships": Configuration(DPHMC, {"eps": 3.0, "prepare": Preparation(force=True)} | SEED, MEMBERSHIPS),
    "hmc_visits": Configuration(
        DPHMC, {"eps": 3.0, "prepare": Preparation(force=True), "unit": "person"} | SEED, VISITS
    ),
    # -- DPPenalty
    "penalty_visits": Configuration(
        DPPenalty, {"eps": 3.0, "prepare": Preparation(force=True)} | CAPPED | ADDED, VISITS_OF_WHOM
    ),
    "penalty": Configuration(
        DPPenalty,
        {
            "eps": 3.0,
            "prepare": False,
            "one_component": True,
            "guided": True,
            "clip_ratio": 2.0,
            "step_size": 0.3,
            "unit": OF_UNITS,
            "budget": new_budget(),
        },
        mcmc=TWO | {"thinning": 2, "num_samples": 8},
    ),
    "penalty_resumed": Configuration(
        DPPenalty,
        {"eps": 3.0, "prepare": False, "budget": new_budget(), "num_iterations": 12, "num_chains": 2},
        mcmc=TWO,
        then="resume",
    ),
    "penalty_prepared": Configuration(
        DPPenalty, {"eps": 300.0, "prepare": True, "adapt_step_size": True} | NAMES | SEED, mcmc=TWO
    ),
    "penalty_hidden": Configuration(
        DPPenalty,
        {"eps": 3.0, "prepare": Preparation(force=True), "power": 0.5} | CAPPED | ADDED,
        WHOSE,
    ),
    "penalty_rate": Configuration(
        DPPenalty,
        {
            "noise_multiplier_ratio": 3.0,
            "batch_size": PoissonBatches(rate=0.3),
            "power": 0.5,
            "dense_mass": True,
            "adapt_mass_matrix": True,
            "init_strategy": init_to_uniform,
        }
        | ADDED
        | SEED,
        mcmc={"jit_model_args": True} | TWO,
    ),
    "penalty_number": Configuration(
        DPPenalty,
        {
            "eps": 3.0,
            "prepare": False,
            "batch_size": 10,
            "n0": 20.0,
            "target_accept_prob": 0.3,
            "adapt_step_size": False,
            "budget": new_budget(other=(5.0, 0.05)),
        }
        | SEED,
        mcmc={"num_chains": 2, "chain_method": jax.vmap},
    ),
    "penalty_told_bound": Configuration(
        DPPenalty, {"eps": 3.0, "prepare": False, "clip_ratio": told_bound, "step_size": 0.05} | SEED, mcmc=TWO
    ),
    "penalty_fixed": Configuration(
        DPPenalty,
        {"eps": 3.0, "prepare": False, "batch_size": FixedBatches(5), "inverse_mass_matrix": 0.5} | SEED,
        mcmc={"num_chains": 2, "chain_method": "sequential"},
        x64=True,
    ),
    "penalty_owners": Configuration(
        DPPenalty,
        {"eps": 3.0, "prepare": False, "owners": ALTERNATING, "inverse_mass_matrix": {"b": 2.0}, "delta": 1e-3} | SEED,
        mcmc=TWO,
    ),
    "penalty_exchange": Configuration(
        DPPenalty, {"eps": 3.0, "prepare": False, "owners": InFolder(exchange)}, mcmc=TWO
    ),
    "penalty_exhausted": Configuration(
        DPPenalty,
        {"eps": 3.0, "prepare": False, "num_iterations": 4, "num_chains": 1} | SEED,
        stock=True,
    ),
    "penalty_memberships": Configuration(
        DPPenalty, {"eps": 3.0, "prepare": False, "neighboring_relation": "zero_out"} | SEED, MEMBERSHIPS
    ),
    # -- DPBarker
    "barker": Configuration(
        DPBarker,
        {
            "eps": 3.0,
            "clip_ratio": 2.0,
            "step_size": 0.3,
            "one_component": True,
            "guided": True,
            "power": 0.5,
            "budget": new_budget(other=(5.0, 0.05)),
            "num_iterations": 6,
            "num_chains": 1,
        }
        | NAMES
        | SEED,
    ),
    "barker_gaussian": Configuration(
        DPBarker,
        {
            "noise_multiplier_ratio": 3.0,
            "variance": 1.0,
            "correction": "exponential",
            "dense_mass": True,
            "inverse_mass_matrix": np.array([[1.0, 0.1], [0.1, 1.0]]),
            "adapt_step_size": False,
            "init_strategy": init_to_value(values={"a": 0.1, "b": 0.2}),
        }
        | ADDED
        | SEED,
        mcmc={"num_chains": 2, "chain_method": "parallel"},
    ),
    "barker_logistic": Configuration(
        DPBarker,
        {
            "eps": 3.0,
            "variance": 2.0,
            "correction": "logistic",
            "adapt_mass_matrix": True,
            "target_accept_prob": 0.3,
        }
        | CAPPED
        | SEED,
        WHOSE,
        mcmc=TWO,
    ),
    "barker_batch": Configuration(
        DPBarker,
        {"eps": 3.0, "batch_size": 10, "n0": 20.0} | SEED,
        warmup={
            "collect_warmup": True,
            "extra_fields": ("noise_scale",),
            "init_params": {"a": np.zeros(()), "b": np.zeros(())},
        },
    ),
    "barker_owners": Configuration(
        DPBarker, {"eps": 3.0, "owners": ALTERNATING, "correction": "logistic", "delta": 1e-3} | SEED
    ),
    "penalty_owners_batch": Configuration(
        DPPenalty, {"eps": 3.0, "prepare": False, "owners": ALTERNATING, "batch_size": 10, "delta": 1e-3} | SEED
    ),
    "penalty_exchange_batch": Configuration(
        DPPenalty,
        {"eps": 3.0, "prepare": False, "owners": InFolder(exchange), "batch_size": PoissonBatches(rate=0.3)},
        mcmc=TWO,
    ),
    "barker_exchange": Configuration(DPBarker, {"eps": 3.0, "owners": InFolder(exchange)}, mcmc=TWO),
    "barker_prepared": Configuration(
        DPBarker, {"eps": 3.0, "prepare": Preparation(force=True), "one_component": True} | SEED, mcmc=TWO
    ),
    # -- DPExponentialFamily
    "statistics": Configuration(
        DPExponentialFamily,
        {
            "eps": 3.0,
            "bounds": (-8.0, 8.0),
            "prepare": False,
            "one_component": True,
            "guided": True,
            "step_size": 0.3,
            "budget": new_budget(),
            "num_iterations": 6,
            "num_chains": 1,
            "row_plate": "rows",
            "private_args": ["y"],
        },
        LOCATION,
    ),
    "statistics_once": Configuration(
        DPExponentialFamily, {"eps": 3.0, "bounds": (-8.0, 8.0), "power": 0.5} | SEED, LOCATION, mcmc=TWO
    ),
    "statistics_once_added": Configuration(
        DPExponentialFamily, {"eps": 3.0, "bounds": (-8.0, 8.0)} | ADDED, LOCATION, mcmc=TWO
    ),
    "statistics_of_ones_own": Configuration(
        DPExponentialFamily,
        {"eps": 3.0, "family": InFolder(lambda folder: own_family()), "owners": InFolder(exchange), "power": 0.5}
        | ADDED,
        LOCATION,
        mcmc={"jit_model_args": True},
    ),
    "statistics_owners": Configuration(
        DPExponentialFamily,
        {
            "noise_multiplier_statistics": 3.0,
            "bounds": (-8.0, 8.0),
            "owners": ALTERNATING,
            "n0": 20.0,
            "dense_mass": True,
            "inverse_mass_matrix": np.array([[2.0]]),
            "adapt_mass_matrix": True,
            "adapt_step_size": False,
            "target_accept_prob": 0.3,
            "init_strategy": init_to_sample,
        }
        | SEED,
        LOCATION,
        mcmc={"num_chains": 2, "chain_method": "parallel"},
    ),
    # -- DPSGLD
    "sgld": Configuration(
        DPSGLD,
        {
            "eps": 3.0,
            "delta": 0.01,
            "clip_grad": 2.0,
            "step_size": decreasing_steps(1e-6),
            "batch_size": PoissonBatches(10, max_batch_size=12),
            "num_steps": 2,
            "budget": new_budget(other=(5.0, 0.05)),
            "num_iterations": 6,
            "num_chains": 2,
        }
        | NAMES,
        mcmc=TWO,
        run={"extra_fields": ("carry.step_size",)},
    ),
    "sgld_matched": Configuration(
        DPSGLD,
        {
            "noise_multiplier_grad": "matched",
            "step_size": 1e-6,
            "owners": ALTERNATING,
            "inverse_mass_matrix": {"a": 0.5, "b": 1.0},
            "n0": 20.0,
            "init_strategy": init_to_sample,
        }
        | SEED,
        warmup={"collect_warmup": False},
    ),
    "sgld_of_persons": Configuration(DPSGLD, {"eps": 3.0, "unit": "person", "power": 0.5} | SEED, NAMED),
    "sgld_hidden": Configuration(
        DPSGLD,
        {"noise_multiplier_grad": 3.0, "step_size": 1e-6, "batch_size": PoissonBatches(rate=0.3)} | CAPPED | ADDED,
        WHOSE,
    ),
    "sgld_prepared": Configuration(
        DPSGLD,
        {
            "eps": 3.0,
            "prepare": Preparation(force=True),
            "batch_size": 10,
            "budget": new_budget(other=(5.0, 0.05)),
            "num_iterations": 12,
            "num_chains": 1,
        },
        then="resume",
    ),
    # -- DPSGNHT
    "sgnht": Configuration(
        DPSGNHT,
        {
            "eps": 3.0,
            "clip_grad": 2.0,
            "step_size": falling,
            "friction": 5.0,
            "batch_size": FixedBatches(5),
            "num_steps": 2,
            "n0": 20.0,
            "budget": new_budget(other=(5.0, 0.05)),
            "num_iterations": 6,
            "num_chains": 1,
        }
        | NAMES,
        run={"extra_fields": ("carry.dynamics.momentum", "carry.dynamics.friction")},
        mcmc={"postprocess_fn": unconstrained},
    ),
    "sgnht_hidden": Configuration(
        DPSGNHT,
        {"noise_multiplier_grad": 3.0, "power": 0.5, "init_strategy": init_to_sample, "inverse_mass_matrix": 0.5}
        | CAPPED
        | ADDED
        | SEED,
        WHOSE,
        mcmc=TWO,
    ),
    "sgnht_owners": Configuration(DPSGNHT, {"eps": 3.0, "owners": ALTERNATING} | SEED, x64=True),
    "sgnht_prepared": Configuration(
        DPSGNHT, {"eps": 3.0, "prepare": Preparation(force=True), "power": 0.5} | CAPPED | ADDED, WHOSE
    ),
    # -- DPSGHMC
    "sghmc": Configuration(
        DPSGHMC,
        {
            "eps": 3.0,
            "clip_grad": 2.0,
            "step_size": 1e-4,
            "friction": 5.0,
            "gradient_noise": 0.5,
            "num_steps": 2,
            "batch_size": 10,
            "n0": 20.0,
            "budget": new_budget(other=(5.0, 0.05)),
            "num_iterations": 6,
            "num_chains": 2,
        }
        | NAMES,
        mcmc=TWO,
        typed_key=True,
    ),
    "sghmc_hidden": Configuration(
        DPSGHMC,
        {
            "noise_multiplier_grad": 3.0,
            "num_steps": 2,
            "num_iterations": 12,
            "power": 0.5,
            "init_strategy": init_to_sample,
            "inverse_mass_matrix": np.array([0.5, 2.0]),
        }
        | CAPPED
        | ADDED
        | SEED,
        WHOSE,
        then="again",
    ),
    "sghmc_prepared": Configuration(
        DPSGHMC,
        {"eps": 3.0, "prepare": Preparation(force=True), "num_steps": 2, "num_iterations": 12, "num_chains": 1} | SEED,
        x64=True,
        then="again",
    ),
    "sghmc_owners": Configuration(DPSGHMC, {"eps": 3.0, "owners": ALTERNATING, "num_steps": 2} | SEED, mcmc=TWO),
}
