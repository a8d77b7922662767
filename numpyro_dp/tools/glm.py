"""`glm`: a regression by a formula, from a data frame to a posterior that may be published."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from numpyro_dp.formula.columns import names_of
from numpyro_dp.formula.model import FormulaModel
from numpyro_dp.kernels.hmc import DPHMC
from numpyro_dp.mcmc import MCMC


def glm(
    formula: str,
    data: Any,
    family: str = "gaussian",
    *,
    eps: float,
    ranges: Mapping[str, Sequence] | None = None,
    levels: Mapping[str, Sequence] | None = None,
    offset: str | None = None,
    unit: str | None = None,
    num_warmup: int = 500,
    num_samples: int = 1000,
    num_chains: int = 1,
    rng_key: jax.Array | None = None,
    progress_bar: bool = True,
    verbose: bool = True,
    **options: Any,
) -> MCMC:
    """Fit a generalised linear (mixed) model by its formula.

        mcmc = glm(
            "visits ~ age + C(sex) + (1 | clinic)", data, family="poisson", eps=1.0,
            ranges={"age": (0, 100)}, levels={"sex": ["f", "m"], "clinic": range(12)},
        )
        mcmc.print_summary()

    It makes a `FormulaModel`, a plain NumPyro model that it prints, and runs ``MCMC(DPHMC(model, eps))`` with it: the
    guarantee is theirs. Ranges and levels are public: take them from the codebook, not from the table. To look at the
    model before anything is paid, ``print(FormulaModel(...))``. For new people:
    ``Predictive(model, mcmc.get_samples())(key, **model.arguments(people))``, with the `FormulaModel`, which is
    ``mcmc.sampler.settings.model``.

    :param formula, family, ranges, levels, offset: see `FormulaModel`.
    :param data: a pandas, Polars or Arrow table, a mapping from names to arrays, or a `numpyro_dp.scan`; one row per
        person, or `unit`.
    :param eps: the price of all that is handed out.
    :param unit: the column that tells whose each row is: the guarantee is for a person with all rows.
    :param num_warmup, num_samples, num_chains, rng_key, progress_bar: of the `MCMC`.
    :param verbose: whether to print the model.
    :param options: of `DPHMC`: `delta`, `budget`, `prepare`, ...
    :return: the `MCMC` that has run.
    """
    if unit is not None and options.get("neighboring_relation") == "add_or_remove_one":
        raise ValueError(
            "neighboring_relation='add_or_remove_one' with unit: how many units there are would be private, and the "
            "model that is made here takes it for public. Use 'replace_one' or 'zero_out', or write the model"
        )
    if "max_rows_per_unit" in options:
        raise ValueError(
            "max_rows_per_unit: here it is public whose each row is. Copy the model that is printed, and give "
            "MCMC(DPHMC(model, eps, unit=..., max_rows_per_unit=...)) your own arguments"
        )
    model = FormulaModel(formula, family, ranges=ranges, levels=levels, offset=offset, unit=unit)
    outcome = model.columns[-1]
    if outcome not in names_of(data):
        raise ValueError(f"the data have no column {outcome!r}, the outcome; they have {', '.join(names_of(data))}")
    if verbose:
        print(f"{model}\n")
    kernel = DPHMC(model, eps, **(options | ({"unit": model.unit_argument} if unit else {})))
    mcmc = MCMC(
        kernel, num_warmup=num_warmup, num_samples=num_samples, num_chains=num_chains, progress_bar=progress_bar
    )
    mcmc.run(jax.random.key(0) if rng_key is None else rng_key, **model.arguments(data))
    return mcmc
