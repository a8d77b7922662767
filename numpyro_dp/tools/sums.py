"""One noisy sum over the rows, for whatever is worth its price: a count, a table, a check of the model.

A posterior predictive check compares outcomes with what the model predicts for them. Done exactly, it publishes the
outcomes. Done with `release_sum`, it costs eps and may be published, too.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from numpyro_dp.model.arguments import argument_problems, is_streamed, name_leaves
from numpyro_dp.model.outside import iterator_problems, read_outside
from numpyro_dp.model.separable import saturated
from numpyro_dp.model.tracing import array_constants, print_problems
from numpyro_dp.privacy.budget import PrivacyBudget
from numpyro_dp.privacy.clipping import require_correct_sums
from numpyro_dp.privacy.draws import draws_now
from numpyro_dp.privacy.isolation import describe_hazard, hazards, one_row
from numpyro_dp.privacy.ledger import Ledger, PrivacyBudgetError, Request, Wanted, plan_for_budget
from numpyro_dp.privacy.mechanisms import Gaussian, check_relation, size_is_public
from numpyro_dp.privacy.noise import NoiseSource
from numpyro_dp.privacy.passes import table_of
from numpyro_dp.privacy.release import RowSum, Vault

SMALLEST_BOUND = 1e-30


@dataclass(frozen=True)
class NoisySum:
    """What `release_sum` released. Holds nothing private.

    :ivar value: the sum, with noise; a number, or an array of shape (k,).
    :ivar noise_sd: standard deviation of the noise, which is normal and independent in each entry.
    :ivar bound: largest norm of one row's contribution.
    :ivar eps, delta: what it cost, under `neighboring_relation`.
    """

    value: np.ndarray
    noise_sd: float
    bound: float
    eps: float
    delta: float
    neighboring_relation: str

    def __str__(self) -> str:
        shown = np.array2string(np.asarray(self.value), precision=4, threshold=20)
        return (
            f"{shown} with noise of sd {self.noise_sd:.4g}; ({self.eps:g}, {self.delta:.3g})-differentially private "
            f"under {self.neighboring_relation}, rows clipped to norm {self.bound:g}"
        )


def release_sum(
    per_row: Callable[..., Any],
    rows: Any,
    *,
    bound: float,
    eps: float,
    delta: float | None = None,
    neighboring_relation: str = "replace_one",
    budget: PrivacyBudget | None = None,
) -> NoisySum:
    """The sum over rows of a number or a vector that is computed from each, clipped to norm `bound`, with noise.

        # How many patients are above 80, and how many more outcomes they had than was predicted.
        released = release_sum(
            lambda age, y, p: jnp.where(age > 80, jnp.array([1.0, y - p]), 0.0),
            (age, y, predicted),
            bound=1.5, eps=0.2, budget=budget,
        )

    **Formal guarantee.** One Gaussian mechanism, ``(eps, delta)``-DP for one row under `neighboring_relation`: the sum
    is one of integers (`numpyro_dp.privacy.clipping`), of sensitivity ``2 bound`` (replace-one) or ``bound``. Every
    call is a release of its own, which adds to all others on the table: with a `budget` it is charged before the table
    is read.

    :param per_row: JAX function of one row of each array, without the leading axis; gives a number or shape (k,). NaN
        counts as 0.
    :param rows: a NumPy or JAX array, or a tuple of them, with the n rows on the leading axis; or columns of a
        `numpyro_dp.scan`. What `per_row` closes over is public, also a mean of the table that was computed outside.
    :param bound: largest norm of one row's contribution that is counted in full. From what is public.
    :param eps, delta: the price; delta is ``0.1 / n`` by default under replace-one.
    :param budget: of the table; of rows, not of units with many rows.
    :return: the noisy sum. Where n is public and the sum is over a 0/1 indicator, clip it to [0, n] if you like: that
        costs nothing.
    :raises ValueError: if an argument is out of range, or rows could act on one another through `per_row`.
    :raises PrivacyBudgetError: if the budget does not allow it. Nothing is released then.
    """
    require_correct_sums()
    arrays = _as_arrays(per_row, rows if isinstance(rows, tuple) else (rows,), neighboring_relation)
    num_rows = arrays[0].shape[0]
    bound, eps = float(bound), float(eps)
    delta = _check(bound, eps, delta, neighboring_relation, num_rows)
    function, shape = _checked(per_row, arrays, neighboring_relation)
    ledger = Ledger(NoiseSource(None), budget, f"release_sum of {getattr(per_row, '__name__', 'a function')}")
    plan = plan_for_budget(
        eps=eps,
        delta=delta,
        neighboring_relation=neighboring_relation,
        wanted={"sum": Wanted(lambda multiplier: (Gaussian(multiplier),), (1,))},
        num_iterations=1,
        num_chains=1,
        num_rows=num_rows if size_is_public(neighboring_relation) else None,
    )
    if budget is not None:
        budget.require(plan)
    ledger.commit(plan)
    draws = draws_now(ledger, {"sum": Request(1, (1, *shape))}, b"")
    if draws is None:
        raise PrivacyBudgetError("the budget of this table does not allow this sum. Nothing was released")
    vault = Vault(arrays, neighboring_relation=neighboring_relation, ledger=ledger)
    query = RowSum(function, bound, math.prod(shape))
    value, scale = vault.program(lambda vault, draw: vault.ask(draw, query))(vault, draws["sum"])
    return NoisySum(np.asarray(value), float(scale), bound, plan.eps, plan.delta, neighboring_relation)


def _as_arrays(per_row: Callable, rows: tuple, relation: str) -> tuple[Any, ...]:
    """The arguments, those in memory as JAX arrays.

    :raises ValueError: naming an argument of `per_row` that is no array of numbers on this machine. It quotes no value.
    """
    for k, array in enumerate(rows):
        if isinstance(array, jax.core.Tracer):
            raise ValueError("release_sum cannot be called within jit, grad or vmap: noise is drawn on the host")
        if is_streamed(array):
            continue
        if not isinstance(array, np.ndarray | jax.Array) or array.ndim == 0:
            raise ValueError(f"rows[{k}] must be a NumPy or JAX array with the rows on its first axis")
        if isinstance(array, jax.Array) and not array.is_fully_addressable:
            raise ValueError(
                "several processes share this table, and each would draw noise of its own: use one process"
            )
    named = name_leaves(per_row, rows, {})
    if not size_is_public(relation):  # then there may be none
        named = [replace(a, shape=(1, *a.row_shape)) for a in named]
    if problems := list(argument_problems(named, rows, {})):
        raise ValueError("; ".join(problems))
    if not rows or len({array.shape[0] for array in rows}) > 1:
        raise ValueError("the arrays in `rows` must have the same first axis, that of the rows")
    with np.errstate(all="ignore"):  # NumPy would warn of a value that is too large for single precision
        return rows if table_of(rows) is not None else tuple(jnp.asarray(saturated(array)) for array in rows)


def _check(bound: float, eps: float, delta: float | None, relation: str, num_rows: int) -> float:
    check_relation(relation)
    if not 0 < eps < math.inf:
        raise ValueError(f"eps must be positive and finite, got {eps!r}")
    if not SMALLEST_BOUND <= bound <= 1 / SMALLEST_BOUND:
        raise ValueError(f"bound must lie between {SMALLEST_BOUND:g} and {1 / SMALLEST_BOUND:g}, got {bound!r}")
    if delta is None:
        if not size_is_public(relation):
            raise ValueError("under 'add_or_remove_one' the number of rows is private: give delta, a public number")
        delta = 0.1 / num_rows
    if not 0 < delta < 1:
        raise ValueError(f"delta must lie strictly between 0 and 1, got {delta!r}")
    return float(delta)


def _checked(
    per_row: Callable[..., Any], arrays: tuple[jax.Array, ...], relation: str
) -> tuple[Callable[[tuple], jax.Array], tuple[int, ...]]:
    """The function of one-row slices, as it was when it was checked, and the shape of what it gives.

    :raises ValueError: if it gives something else than numbers, or rows could act on one another through it.
    """
    outside = read_outside(per_row)
    if problems := iterator_problems(outside, "per_row"):
        raise ValueError("; ".join(problems))

    def of_slices(row: tuple) -> jax.Array:
        return jnp.asarray(per_row(*(part[0] for part in row)))

    closed, result = jax.make_jaxpr(of_slices, return_shape=True)(one_row(arrays))
    problems = print_problems(closed, "per_row")
    problems += [describe_hazard(name, "per_row") for name in sorted(hazards(closed.jaxpr, [True] * len(arrays)))]
    if jnp.issubdtype(result.dtype, jnp.complexfloating):
        problems.append(f"per_row must give real numbers, and gives {result.dtype}: take their parts, or the modulus")
    elif not (result.dtype == bool or jnp.issubdtype(result.dtype, jnp.integer) or result.dtype.itemsize > 1):
        problems.append(f"per_row must give numbers of 16 bits or more, and gives {result.dtype}: convert them")
    if math.prod(result.shape) == 0:
        problems.append(f"per_row gives shape {result.shape}, which has no number in it")
    if len(result.shape) > 1:
        problems.append(f"per_row must give a number or a vector, and gives shape {result.shape}: ravel it")
    size = arrays[0].shape[0]
    if size_is_public(relation) and size > 1:  # else a refusal would tell how many rows there are
        shapes = [*array_constants(closed), *(item.shape for item in outside)]
        if any(size in shape for shape in shapes):
            problems.append("per_row closes over an array as long as the table: pass it in `rows`")
    if problems:
        raise ValueError("; ".join(problems))
    return lambda row: jaxpr_as_fun(closed)(*row)[0], result.shape
