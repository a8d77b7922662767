"""Each sampler at work: its draws at three eps beside the exact posterior, and when it is used as it should not be.

A logistic regression with two coefficients and 20,000 rows; for `DPExponentialFamily`, which takes no covariates, the
means of two columns. Chains of the kernels that do not prepare themselves start one posterior standard deviation around
the truth, which nobody would know.

The pictures of docs/samplers-at-work.md: ``python -m experiments at-work --output docs/_static``, some minutes. (It
also leaves its records there, ``at-work.jsonl``.)
"""

import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC as ExactMCMC
from numpyro.infer import NUTS

from experiments import runs
from experiments.runs import Experiment, Job, Record, Size, markdown
from numpyro_dp import (
    DPHMC,
    DPSGHMC,
    DPSGLD,
    DPSGNHT,
    MCMC,
    DPBarker,
    DPExponentialFamily,
    DPPenalty,
    PrivacyBudgetError,
)

ROWS, TRUTH, CHAINS, EPS = 20_000, np.array([1.0, -0.5]), 4, (1.0, 4.0, 15.0)
_LONGEST = 2**0.5
"""Of a row of covariates: clips nothing."""
_SHORTEST = 0.2


def logistic(X, y=None):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("people", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ b), obs=y)


def means(x):
    b = numpyro.sample("b", dist.Normal(0, 10).expand([2]).to_event(1))
    with numpyro.plate("people", x.shape[0]):
        numpyro.sample("x", dist.Normal(b, 1.0).to_event(1), obs=x)


class Sampler(NamedTuple):
    """:ivar make: a kernel, for eps.
    :ivar misused: one that fails, and at which eps.
    :ivar failure: what is wrong with that one.
    """

    make: Callable[[float], Any]
    misused: Callable[[float], Any]
    failure: str
    eps: float = 15.0
    has_covariates: bool = True
    num_rows: int = ROWS


_PLAIN = {"prepare": False, "clip_ratio": _LONGEST}
_TOO_TIGHT = {"prepare": False, "clip_ratio": _SHORTEST}
SAMPLERS = {
    "DPHMC": Sampler(
        lambda eps: DPHMC(logistic, eps=eps),
        lambda eps: DPHMC(logistic, eps=eps),
        "300 rows: next to the prior",
        0.5,
        num_rows=300,
    ),
    "DPHMC, prepare=False": Sampler(
        lambda eps: DPHMC(logistic, eps=eps, clip_grad=_LONGEST, **_PLAIN),
        lambda eps: DPHMC(logistic, eps=eps, clip_grad=_LONGEST, **_TOO_TIGHT),
        "clip_ratio too small: flattened",
    ),
    "DPPenalty": Sampler(
        lambda eps: DPPenalty(logistic, eps=eps),
        lambda eps: DPPenalty(logistic, eps=eps, **_TOO_TIGHT),
        "prepare=False, clip_ratio too small: flattened",
    ),
    "DPBarker": Sampler(
        lambda eps: DPBarker(logistic, eps=eps, clip_ratio=_LONGEST),
        lambda eps: DPBarker(logistic, eps=eps, clip_ratio=_SHORTEST),
        "clip_ratio too small: flattened",
    ),
    "DPSGLD": Sampler(
        lambda eps: DPSGLD(logistic, eps=eps, clip_grad=_LONGEST),
        lambda eps: DPSGLD(logistic, eps=eps, clip_grad=_SHORTEST),
        "clip_grad too small: moved",
    ),
    "DPSGNHT": Sampler(
        lambda eps: DPSGNHT(logistic, eps=eps, clip_grad=_LONGEST),
        lambda eps: DPSGNHT(logistic, eps=eps, clip_grad=_SHORTEST),
        "clip_grad too small: moved",
    ),
    "DPSGHMC": Sampler(
        lambda eps: DPSGHMC(logistic, eps=eps, clip_grad=_LONGEST),
        lambda eps: DPSGHMC(logistic, eps=eps, clip_grad=_LONGEST, friction=0.0, step_size=1e-3),
        "friction=0: heated by the noise",
        4.0,
    ),
    "DPExponentialFamily": Sampler(
        lambda eps: DPExponentialFamily(means, eps=eps, bounds=(-5.0, 5.0)),
        lambda eps: DPExponentialFamily(means, eps=eps, bounds=(-1.0, 1.0)),
        "bounds too narrow: moved",
        has_covariates=False,
    ),
}


@functools.cache
def table(has_covariates: bool, num_rows: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The model's arguments, and draws of the exact posterior."""
    rng = np.random.default_rng(0)
    if has_covariates:
        X = rng.uniform(-1, 1, (num_rows, 2))
        given = {"X": X, "y": (rng.random(num_rows) < 1 / (1 + np.exp(-X @ TRUTH))).astype(int)}
    else:
        given = {"x": TRUTH + rng.standard_normal((num_rows, 2))}
    nuts = NUTS(logistic if has_covariates else means)
    mcmc = ExactMCMC(nuts, num_warmup=500, num_samples=2000, progress_bar=False)
    mcmc.run(jax.random.key(0), **given)
    return given, np.asarray(mcmc.get_samples()["b"], float)


def _run(kernel: Any, has_covariates: bool, num_rows: int) -> Record:
    given, exact = table(has_covariates, num_rows)
    start = exact.mean(0) + exact.std(0) * np.random.default_rng(1).standard_normal((CHAINS, 2))
    options = {"num_warmup": 250, "num_samples": 500, "num_chains": CHAINS, "chain_method": "vectorized"}
    mcmc = MCMC(kernel, progress_bar=False, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = getattr(kernel, "preparation", None) is None
        more = {"init_params": {"b": jnp.asarray(start)}} if plain else {}
        try:
            mcmc.run(jax.random.key(2), **given, **more)
        except PrivacyBudgetError:
            return {"outcome": "refused"}
    chains = np.asarray(mcmc.get_samples(group_by_chain=True)["b"], float)
    error = (chains.mean((0, 1)) - exact.mean(0)) / exact.std(0)
    return {
        "outcome": "done",
        "mean_error": float(np.sqrt(np.mean(error**2))),
        "sd_ratio": float(np.mean(chains.std((0, 1)) / exact.std(0))),
        "rhat": float(np.max(numpyro.diagnostics.split_gelman_rubin(chains))),
        "flagged": not mcmc.privacy.posterior.trusted,
        "draws": np.round(chains[:, ::5], 5).tolist(),
    }


def _jobs(size: Size) -> list[Job]:
    budgets, _ = size.of((EPS, 1), (EPS, 1))

    def job(name: str, make: Callable, eps: float, misused: bool) -> Job:
        sampler = SAMPLERS[name]
        rows = sampler.num_rows if misused else ROWS
        key = {"method": name, "eps": eps, "misused": misused}
        return Job(key, lambda: _run(make(eps), sampler.has_covariates, rows))

    return [
        one
        for name, sampler in SAMPLERS.items()
        for one in (
            *(job(name, sampler.make, eps, False) for eps in budgets),
            job(name, sampler.misused, sampler.eps, True),
        )
    ]


def _table(records: list[Record]) -> str:
    rows = [
        [
            r["key"]["method"] + (f": {SAMPLERS[r['key']['method']].failure}" if r["key"]["misused"] else ""),
            f"{r['key']['eps']:g}",
            *(f"{r[name]:.2f}" if name in r else "-" for name in ("mean_error", "sd_ratio", "rhat")),
            "yes" if r.get("flagged") else "" if r["outcome"] == "done" else r["outcome"],
        ]
        for r in records
    ]
    return markdown(["sampler", "eps", "mean error", "sd / exact", "R-hat", "flagged"], rows)


def picture(name: str) -> str:
    """The file of a sampler's picture."""
    return f"sampler-{name.split(',')[0].lower()}{'-plain' if ',' in name else ''}.png"


def _draw(records: list[Record], path: Path) -> None:
    import matplotlib.pyplot as plt
    from PIL import Image

    for (name,), group in runs.grouped(records, "method").items():
        figure, axes = plt.subplots(1, len(group), figsize=(2.7 * len(group), 2.9), layout="constrained")
        for ax, record in zip(axes, group, strict=True):
            sampler, misused = SAMPLERS[name], record["key"]["misused"]
            _, exact = table(sampler.has_covariates, sampler.num_rows if misused else ROWS)
            for chain in record.get("draws", []):
                ax.plot(*np.array(chain).T, ".-", markersize=3, linewidth=0.3, alpha=0.7)
            angle = np.linspace(0, 2 * np.pi, 100)
            root = np.linalg.cholesky(np.cov(exact.T))
            ax.plot(*(exact.mean(0)[:, None] + 2.45 * root @ [np.cos(angle), np.sin(angle)]), "k", linewidth=1.5)
            title = f"eps = {record['key']['eps']:g}" + (", refused" if record["outcome"] == "refused" else "")
            ax.set_title(f"{title}, {sampler.failure}" if misused else title, fontsize=8, loc="left", wrap=True)
            ax.tick_params(labelsize=7)
            ax.set_xlabel("b[0]", fontsize=7)
        axes[0].set_ylabel("b[1]", fontsize=7)
        runs.save(figure, path.parent / picture(name))
        with Image.open(path.parent / picture(name)) as drawn:
            few_colours = drawn.convert("RGB").quantize(48)
        few_colours.save(path.parent / picture(name), optimize=True)


EXPERIMENTS = [Experiment("at-work", "each sampler at three eps, and misused", _jobs, _table, _draw)]
