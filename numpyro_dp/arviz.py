"""Results for ArviZ, without private data: works with ArviZ 0.2x (`InferenceData`) and 1.x (`DataTree`)."""

import importlib.metadata
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from numpyro.distributions import biject_to
from numpyro.handlers import seed, substitute, trace
from numpyro.infer.initialization import init_to_sample
from numpyro.infer.mcmc import MCMC

from numpyro_dp.chain.finished import draws_of_parameters
from numpyro_dp.kernels.base import DPKernel
from numpyro_dp.kernels.prepared import PreparedKernel
from numpyro_dp.report import PrivacyReport

_ARVIZ_MAJOR = int(importlib.metadata.version("arviz").split(".")[0])

_STAT_NAMES = {"accept_prob": "acceptance_rate", "adapt_state.step_size": "step_size"}

_ROUNDING = 1e-3


def to_arviz(
    mcmc: MCMC,
    coords: Mapping[str, Sequence] | None = None,
    dims: Mapping[str, Sequence[str]] | None = None,
    posterior_predictive: Mapping[str, Any] | None = None,
    log_densities: bool = False,
) -> Any:
    """The released draws and statistics of a private run, for ``az.summary``, ``az.plot_trace``, ``az.to_netcdf``.

    Holds the groups ``posterior`` and ``sample_stats`` and nothing computed from the table otherwise: no observed data,
    no pointwise log likelihood. The guarantee stands in the attributes (``privacy_eps``, ``privacy_delta``, ...; the
    whole report as JSON in ``privacy_report``), of the whole and of the posterior group.

    Iterations that the budget did not cover are no draws, and are left out.

    :param mcmc: a finished run of a private kernel, in `numpyro_dp.MCMC` or in ``numpyro.infer.MCMC``.
    :param coords, dims: as in ArviZ. Dimensions default to the names of the model's plates; a `FormulaModel` names the
        levels of its groups.
    :param posterior_predictive: of ``Predictive(model, mcmc.get_samples())(key, ...)``, for *public* arguments: what is
        computed for the table's rows tells what they are, and the guarantee does not cover it.
    :param log_densities: whether to add the groups ``log_prior``, by site, and ``log_likelihood``: the likelihood that
        was released, one number for each draw, for ``psense`` and what else reweights draws. Costs nothing; `DPHMC` has
        it, in the process in which it ran.
    :return: ``InferenceData`` (ArviZ 0.2x) or ``DataTree`` (ArviZ 1.x).
    :raises ValueError: if a prediction is as long as the table, which is most likely one for its rows. With `unit=`,
        the table is as long as it has units: predictions for several rows of each are not noticed.
    """
    import arviz  # takes seconds

    kernel = mcmc.sampler
    if not isinstance(kernel, DPKernel):
        raise TypeError(
            f"to_arviz needs a run of a private kernel, got one of {type(kernel).__name__}; use az.from_numpyro"
        )
    if hasattr(mcmc, "privacy"):
        report = mcmc.privacy
    else:  # NumPyro's own, which asks nobody what the draws are worth
        drawn = mcmc.get_samples(group_by_chain=True)
        kernel.judge(draws_of_parameters(drawn, mcmc.last_state.z, mcmc.num_chains))
        report = kernel.privacy
    stats: dict[str, Any] = dict(mcmc.get_extra_fields(group_by_chain=True))
    kept = _number_of_draws(stats.get("exhausted"))
    draws = _named_arrays(mcmc.get_samples(group_by_chain=True))
    posterior = {name: values[:, :kept] for name, values in draws.items()}
    sample_stats = {
        _STAT_NAMES.get(name, name): np.asarray(values)[:, :kept]
        for name, values in stats.items()
        if isinstance(values, jax.Array | np.ndarray) and not jax.dtypes.issubdtype(values.dtype, jax.dtypes.prng_key)
    }
    dims = {**_plate_dims(kernel.model, mcmc._args, mcmc._kwargs), **(dims or {})}
    groups = {"posterior": posterior, "sample_stats": sample_stats}
    if posterior_predictive is not None:
        shape = next(iter(draws.values())).shape[:2]
        predicted = _by_chain(posterior_predictive, shape, _public_lengths(report))
        groups["posterior_predictive"] = {name: values[:, :kept] for name, values in predicted.items()}
    named = {name for group in groups.values() for name in group}
    coords = {**getattr(kernel.settings.model, "coords", {}), **(coords or {})}
    options = {"coords": coords, "dims": {name: list(names) for name, names in dims.items() if name in named}}
    results = arviz.from_dict(groups, **options) if _ARVIZ_MAJOR >= 1 else arviz.from_dict(**groups, **options)
    if log_densities:  # by draw, without the dimensions of the sites
        log_prior, log_likelihood = _log_densities(kernel, posterior, mcmc._args, mcmc._kwargs)
        added = {"log_prior": log_prior, "log_likelihood": {"released": log_likelihood}}
        if _ARVIZ_MAJOR >= 1:
            results.update(arviz.from_dict(added).children)
        else:
            results.add_groups(added)

    attributes = {
        "inference_library": "numpyro_dp",
        "privacy_eps": report.eps,
        "privacy_delta": report.delta,
        "privacy_neighboring_relation": report.neighboring_relation,
        "privacy_unit": report.unit,
        "privacy_guarantee": report.guarantee(),
        "privacy_posterior": report.posterior.description,
        "privacy_posterior_trusted": int(report.posterior.trusted),  # netCDF has no truth values
        "privacy_posterior_reasons": "; ".join(report.posterior.reasons),
        "privacy_report": report.to_json(),
    }
    results.attrs.update(attributes)
    results["posterior"].attrs.update(attributes)
    return results


def _named_arrays(samples: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """An array for each site; of a deterministic site that holds several, "site.part" for each."""
    leaves = jax.tree_util.tree_flatten_with_path(dict(samples))[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(values) for path, values in leaves}


def _public_lengths(report: PrivacyReport) -> set[int]:
    """How many rows, and units, the table has, where that is public."""
    shapes = (re.search(r"\((\d+)", argument) for argument in report.private_arguments)
    return {*(int(found[1]) for found in shapes if found), *(() if report.num_rows is None else (report.num_rows,))}


def _by_chain(predicted: Mapping[str, Any], shape: tuple[int, ...], lengths: set[int]) -> dict[str, np.ndarray]:
    """Predictions (draws of all chains, ...) as (chain, draw, ...).

    :param lengths: of the table.
    """
    found = {}
    for name, values in predicted.items():
        values = np.asarray(values)
        if values.ndim == 0 or values.shape[0] != shape[0] * shape[1]:
            raise ValueError(
                f"posterior_predictive[{name!r}] has shape {values.shape}; of {shape[0]} chain(s) of {shape[1]} draws, "
                f"as `mcmc.get_samples()` returns them, its first axis would be {shape[0] * shape[1]}"
            )
        if as_many := lengths & set(values.shape[1:]):
            raise ValueError(
                f"posterior_predictive[{name!r}] has shape {values.shape}, and the table has {min(as_many)} rows: "
                "predictions for its rows tell what their covariates are, and the guarantee does not cover them. "
                "Predict for public covariates: a grid, made-up people, cells of a census "
                "(notebooks/prediction.ipynb). If these are public and as many by chance, add some more"
            )
        found[name] = values.reshape(*shape, *values.shape[1:])
    return found


def _log_densities(
    kernel: DPKernel, draws: Mapping[str, np.ndarray], args: tuple, kwargs: dict
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Of the prior, by site, and of the released likelihood, at each draw of each chain.

    What a model adds to its prior by `numpyro.factor` is "factors".

    :param args, kwargs: of the model, without data.
    """
    if not isinstance(kernel, PreparedKernel):
        raise ValueError(f"log_densities: {type(kernel).__name__} releases no likelihood; DPHMC does")
    log_likelihood, log_prior = kernel.released_log_likelihood, kernel.log_prior

    def of_draw(draw: dict[str, jax.Array]) -> tuple[dict[str, jax.Array], jax.Array, jax.Array]:
        sites = trace(substitute(seed(kernel.model, 0), draw)).get_trace(*args, **kwargs)
        prior = {name: site for name, site in sites.items() if site["type"] == "sample" and name in draw}
        densities = {name: jnp.sum(_scaled(site, site["fn"].log_prob(site["value"]))) for name, site in prior.items()}
        transforms = {name: biject_to(site["fn"].support) for name, site in prior.items()}
        unconstrained = {name: transforms[name].inv(site["value"]) for name, site in prior.items()}
        jacobians = [
            jnp.sum(transforms[name].log_abs_det_jacobian(unconstrained[name], site["value"]))
            for name, site in prior.items()
        ]
        z = ravel_pytree(unconstrained)[0]
        factors = log_prior(z) - sum(densities.values()) - sum(jacobians)
        return densities, factors, log_likelihood(z)

    of_draws = jax.jit(jax.vmap(jax.vmap(of_draw)))
    found = of_draws({name: jnp.asarray(values) for name, values in draws.items()})
    densities, factors, released = jax.tree.map(np.asarray, found)
    size = 1 + sum(np.abs(values).max() for values in densities.values())
    if np.ptp(factors) > _ROUNDING * size:  # it differs between draws
        densities["factors"] = factors
    return densities, released


def _scaled(site: Mapping[str, Any], log_prob: jax.Array) -> jax.Array:
    return log_prob if site["scale"] is None else site["scale"] * log_prob


def _number_of_draws(exhausted: Any) -> int | None:
    """How many draws every chain really made; the rest are copies, made after the budget was used up."""
    if exhausted is None:
        return None
    exhausted = np.asarray(exhausted)
    made = int((~exhausted).sum(1).min())
    if made == exhausted.shape[1]:
        return None
    if made == 0:
        raise ValueError("the privacy budget was used up before the first draw: there is no posterior to convert")
    warnings.warn(
        f"the privacy budget was used up after {made} of {exhausted.shape[1]} draws; the rest are copies, and left out",
        RuntimeWarning,
        stacklevel=3,
    )
    return made


def _names_of_axes(name: str, site: Mapping[str, Any]) -> list[str] | None:
    """A name for each axis of a site's value, where there is one for any; others have ArviZ's own."""
    shape, frames = jnp.shape(site["value"]) if hasattr(site["value"], "shape") else (), site["cond_indep_stack"]
    event_names = list(site.get("infer", {}).get("event_dims", []))
    named: dict[int, str] = {}
    # How many axes are those of an event; a deterministic site does not tell: as few plates as fit, from the left.
    least = max((-frame.dim for frame in frames), default=0)
    events = [site["fn"].event_dim] if site["type"] == "sample" else range(len(shape) - least, -1, -1)
    for event_dim in events:
        axes = {len(shape) - event_dim + frame.dim: frame for frame in frames}
        if all(axis >= 0 and shape[axis] == frame.size for axis, frame in axes.items()):
            named = {axis: frame.name for axis, frame in axes.items()}
            break
    for axis, event_name in enumerate(event_names, len(shape) - len(event_names)):
        named[axis] = event_name
    return [named.get(axis, f"{name}_dim_{axis}") for axis in range(len(shape))] if named else None


def _plate_dims(model: Callable, args: tuple, kwargs: dict) -> dict[str, list[str]]:
    """Names of each site's dimensions: its plates, and ``infer={"event_dims": [...]}``; from an abstract trace."""
    leaves, treedef = jax.tree.flatten((args, kwargs))
    is_array = [isinstance(leaf, jax.Array | np.ndarray) and leaf.ndim > 0 for leaf in leaves]
    found: dict[str, list[str]] = {}

    def run(arrays: list) -> int:
        supply = iter(arrays)
        traced_args, traced_kwargs = jax.tree.unflatten(
            treedef, [next(supply) if flag else leaf for leaf, flag in zip(leaves, is_array, strict=True)]
        )
        sites = trace(substitute(seed(model, 0), substitute_fn=init_to_sample)).get_trace(*traced_args, **traced_kwargs)
        for name, site in sites.items():
            if site["type"] in ("sample", "deterministic"):
                names = _names_of_axes(name, site)
                if names:
                    found[name] = names
        return 0

    jax.eval_shape(run, [leaf for leaf, flag in zip(leaves, is_array, strict=True) if flag])
    return found
