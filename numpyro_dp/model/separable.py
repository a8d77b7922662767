"""A NumPyro model seen as a data-free log prior plus one log density per row.

Differential privacy needs to know what a single row of the table does to the posterior. `numpyro_dp.model.separate`
reads that off a plain NumPyro model:

    ``log p(z, table) = log_prior(z) + sum_i row_log_density(z, row_i)``

Row i's term is evaluated *on row i alone*: the model is run on one-row slices of its private arguments under `vmap`,
so no row can reach another row's term, whatever the model does. Both halves are NumPyro's own potential energy of the
same model with some of its sites masked out, so scales, masks, Jacobians and reparameterisations mean here what they
mean everywhere in NumPyro.

Discrete latents that each row has to itself (a mixture's membership, whether an outcome is mislabelled) are summed out,
row by row, by NumPyro's enumeration: a row's term is the log of the sum over their values. Scales and masks act before
that sum, as in NumPyro's HMC. This needs funsor (`pip install 'numpyro_dp[enumeration]'`).
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from numpyro.infer.util import constrain_fn, find_valid_initial_params, potential_energy
from numpyro.primitives import Messenger

from numpyro_dp.model.arguments import (
    Argument,
    PublicArguments,
    is_array,
    placeholder_rows,
    traced,
)
from numpyro_dp.model.tracing import (
    CannotDrawError,
    Params,
    draw_outcomes,
    few_outcomes,
    fix_latents,
    keep_sites,
    sum_over_latents,
)


@dataclasses.dataclass(frozen=True)
class SeparableModel:
    """A model that `separate` has checked. Holds no data: every method takes the arguments anew.

    :ivar num_rows: n, the number of rows in each private argument. Where it is private, nothing else depends on it.
    :ivar row_plate: name of the plate whose members are the rows, or None if the model has none.
    :ivar row_plates: all plates over the rows; a model may open one for each observed site.
    :ivar arguments: every argument leaf and whether it is private.
    :ivar row_sites: the sites that make up a row's log density.
    :ivar row_latents: those of them that are discrete latents, and are summed out.
    :ivar outcome_leaves: which private arguments observed values are computed from, by their number among the private
        ones; None if a site observes a public value, as a 1 that stands for "not seen before its time".
    :ivar first_available_dim: the first axis, from the right, that no site's density uses; enumeration may.
    :ivar dropped_sites: deterministic sites that are left out of the samples, with the reason.
    :ivar closed_over: what the model reads besides its arguments and that holds numbers: public, if anything is.
    :ivar prototype: unconstrained parameters of the right shapes and dtypes (zeros).
    """

    model: Callable
    num_rows: int
    row_plate: str | None
    row_plates: frozenset[str]
    arguments: tuple[Argument, ...]
    row_sites: frozenset[str]
    row_latents: frozenset[str]
    outcome_leaves: frozenset[int] | None
    first_available_dim: int
    dropped_sites: dict[str, str]
    closed_over: tuple[str, ...]
    prototype: dict[str, np.ndarray]

    @property
    def of_rows(self) -> "SeparableModel":
        """The model row by row; see `numpyro_dp.model.units`."""
        return self

    @property
    def identity(self) -> str:
        """What a plan and a noise seed shall know of the units."""
        return "row"

    @property
    def rows_per_unit(self) -> int:
        """Rows that one protected unit has at most."""
        return 1

    @property
    def has_public_places(self) -> bool:
        """Whether a change of one unit's rows leaves all others where they are."""
        return True

    def per_unit(self, density: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        """From a row's density (`row_log_density`, `drawn_log_density`) to that of a protected unit's rows together."""
        return density

    @property
    def num_params(self) -> int:
        """Length of the flat vector of unconstrained parameters."""
        return ravel_pytree(self.prototype)[0].size

    @property
    def ravel(self) -> Callable[[Params], jax.Array]:
        """Flatten unconstrained parameters, sites in alphabetical order (as NumPyro's mass matrices have them)."""
        return lambda z: ravel_pytree(z)[0]

    @property
    def unravel(self) -> Callable[[jax.Array], Params]:
        return ravel_pytree(self.prototype)[1]

    def private_arguments(self) -> tuple[Argument, ...]:
        return tuple(a for a in self.arguments if a.private)

    def public_arguments(self) -> tuple[Argument, ...]:
        return tuple(a for a in self.arguments if not a.private)

    def rows(self, args: tuple, kwargs: dict) -> tuple[jax.Array, ...]:
        """The private leaves, each with the rows on its leading axis."""
        leaves = jax.tree.leaves((args, kwargs))
        with np.errstate(all="ignore"):  # NumPy would warn of a value that is too large for single precision
            return tuple(jnp.asarray(leaf) for leaf, a in zip(leaves, self.arguments, strict=True) if a.private)

    def row_log_density(self, args: tuple, kwargs: dict) -> Callable[[jax.Array, tuple], jax.Array]:
        """The function ``(flat z, one-row slices of `rows`) -> log p(row | z)``; public arguments are closed over."""
        if self.row_latents:
            density = self.row_log_density_at(args, kwargs)
            return lambda z, row: density(z, row, None)
        args, kwargs = self.without_private(args, kwargs)  # who keeps the function keeps no table
        model = keep_sites(self.model, self.row_sites.__contains__, self.row_plates, 1)

        @functools.partial(jax.jit, inline=True)  # NumPyro validates concrete values only: no warning shows a row
        def log_density(z: jax.Array, row: tuple) -> jax.Array:
            row_args, row_kwargs = self.with_private(args, kwargs, row)
            return -potential_energy(model, row_args, row_kwargs, self.unravel(z))

        return log_density

    def row_log_density_at(self, args: tuple, kwargs: dict) -> Callable[[jax.Array, tuple, Mapping | None], jax.Array]:
        """The function ``(flat z, one-row slices, latents) -> log p(row, latents | z)``, a term of what is summed.

        The latents are given as positions in [0, 1) of the list of their values; None sums over them.
        """
        args, kwargs = self.without_private(args, kwargs)
        model = keep_sites(self.model, lambda name: True, self.row_plates, 1)

        @functools.partial(jax.jit, inline=True)
        def log_density(z: jax.Array, row: tuple, latents: Mapping | None) -> jax.Array:
            row_args, row_kwargs = self.with_private(args, kwargs, row)
            density = sum_over_latents(
                model, self.unravel(z), self.row_sites, self.row_latents, self.first_available_dim, latents
            )
            return density(*row_args, **row_kwargs)

        return log_density

    def drawn_log_density(self, args: tuple, kwargs: dict) -> Callable[[jax.Array, tuple, jax.Array], jax.Array]:
        """The function ``(flat z, one-row slices, words of a key) -> log p(row' | z)``, where row' is the row with its
        observed sites drawn from the model at z. To derivatives the draw is a constant.

        :raises CannotDrawError: where the model does not say how a row's outcomes come about; the function does, too.
        """
        args, kwargs = self.without_private(args, kwargs)
        outcomes = self.row_sites - self.row_latents
        if self.outcome_leaves is None:
            raise CannotDrawError("a site observes a constant")
        drawn_model = self._drawn_model()

        @functools.partial(jax.jit, inline=True)
        def log_density(z: jax.Array, row: tuple, key: jax.Array) -> jax.Array:
            row_args, row_kwargs = self.with_private(args, kwargs, row)
            key = jax.random.wrap_key_data(key, impl="threefry2x32")
            values = draw_outcomes(drawn_model, self.unravel(z), outcomes, self.row_latents, key, row_args, row_kwargs)
            drawn = dataclasses.replace(self, model=_Observe(self.model, jax.lax.stop_gradient(values)))
            return drawn.row_log_density(args, kwargs)(z, row)

        return log_density

    def enumerated_log_density(self, args: tuple, kwargs: dict) -> Callable[[jax.Array, tuple, jax.Array], jax.Array]:
        """The function ``(flat z, one-row slices, k) -> log p(row' | z)``, where row' is the row with the k-th of all
        values that its outcome can have. Only where `num_outcomes` says that there are few.
        """
        args, kwargs = self.without_private(args, kwargs)

        @functools.partial(jax.jit, inline=True)
        def log_density(z: jax.Array, row: tuple, k: jax.Array) -> jax.Array:
            values = self._few_outcomes(z, *self.with_private(args, kwargs, row))
            assert values is not None
            chosen = {name: jnp.take(value, k, axis=0) for name, value in values.items()}
            return dataclasses.replace(self, model=_Observe(self.model, chosen)).row_log_density(args, kwargs)(z, row)

        return log_density

    def num_outcomes(self, args: tuple, kwargs: dict) -> int | None:
        """How many values a row's outcome can have, if these are few and the model says with which probabilities."""
        found = []

        def count(z: jax.Array, row: tuple) -> None:
            values = self._few_outcomes(z, *self.with_private(*self.without_private(args, kwargs), row))
            found.append(None if values is None else len(*values.values()))

        if self.outcome_leaves is not None:
            jax.eval_shape(count, self.ravel(self.prototype), placeholder_rows(self.arguments))  # type: ignore[arg-type]
        return found[0] if found else None

    def _few_outcomes(self, z: jax.Array, row_args: tuple, row_kwargs: dict) -> dict[str, jax.Array] | None:
        outcomes = self.row_sites - self.row_latents
        model = self._drawn_model()
        return few_outcomes(model, self.unravel(z), outcomes, self.row_latents, row_args, row_kwargs)

    def _drawn_model(self) -> Callable:
        return keep_sites(released_model(self.model), lambda name: True, self.row_plates, 1)

    def log_prior(self, args: tuple, kwargs: dict) -> Callable[[jax.Array], jax.Array]:
        """The function ``flat z -> log p(z)``, Jacobians of the transforms included. Sees no private argument."""
        return traced(
            lambda args, kwargs, z: -potential_energy(self.prior_model, args, kwargs, self.unravel(z)),
            *self.without_private(args, kwargs),
        )

    def constrain(self, args: tuple, kwargs: dict) -> Callable[[Params], dict[str, jax.Array]]:
        """The function that maps one unconstrained draw to the sites that are released."""

        def constrain(args: tuple, kwargs: dict, z: Params) -> dict[str, jax.Array]:
            sites = constrain_fn(self.prior_model, args, kwargs, z, return_deterministic=True)
            return {name: value for name, value in sites.items() if name not in self.dropped_sites}

        return traced(constrain, *self.without_private(args, kwargs))

    def init_params(
        self, rng_key: jax.Array, init_strategy: Callable, args: tuple, kwargs: dict
    ) -> tuple[Params, jax.Array]:
        """A starting point from `init_strategy` at which the *prior* is finite; the rows are not looked at.

        :param rng_key: one key, or a batch of keys for a batch of starting points.
        :return: unconstrained parameters, and whether the prior is finite there.
        """

        def find(args: tuple, kwargs: dict, key: jax.Array) -> tuple[Params, jax.Array]:
            (params, _, _), is_valid = find_valid_initial_params(
                key,
                self.prior_model,
                init_strategy=init_strategy,
                model_args=args,
                model_kwargs=kwargs,
                prototype_params=self.prototype,
            )
            return params, is_valid

        return traced(find, *self.without_private(args, kwargs))(rng_key)

    def public(self, args: tuple, kwargs: dict) -> PublicArguments:
        """The arguments for who must not see the table."""
        leaves, treedef = jax.tree.flatten((args, kwargs))
        supply = iter(placeholder_rows(self.arguments))
        # As they were passed: in a trace, an array of NumPy's that is converted is traced from then on.
        seen = [next(supply) if a.private else leaf for leaf, a in zip(leaves, self.arguments, strict=True)]
        public = [leaf for leaf, a in zip(leaves, self.arguments, strict=True) if not a.private]
        at_hand = not any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
        seen_args, seen_kwargs = jax.tree.unflatten(treedef, seen)
        return PublicArguments(seen_args, seen_kwargs, public, at_hand)

    def without_private(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """The same arguments with one placeholder row in the place of the private rows."""
        return self.with_private(args, kwargs, placeholder_rows(self.arguments))

    def with_private(self, args: tuple, kwargs: dict, rows: Sequence) -> tuple[tuple, dict]:
        """The same arguments with `rows` in the place of the private rows."""
        leaves, treedef = jax.tree.flatten((args, kwargs))
        supply = iter(rows)
        replaced = [
            next(supply) if a.private else jnp.asarray(leaf) if is_array(leaf) else leaf
            for leaf, a in zip(leaves, self.arguments, strict=True)
        ]
        return jax.tree.unflatten(treedef, replaced)

    @property
    def prior_model(self) -> Callable:
        """The model beside a single row, with the densities of the row's sites left out."""
        # Any value of the discrete latents will do: nothing that the prior is made of depends on them.
        model = fix_latents(self.model, dict.fromkeys(self.row_latents, 0.0))
        return keep_sites(model, lambda name: name not in self.row_sites, self.row_plates, 1)


def released_model(model: Callable) -> Callable:
    """The model with nothing observed: what ArviZ and `Predictive` may see.

    ArviZ records observed values (the private outcomes) and pointwise log likelihoods of a model that has observed
    sites; this one has none. Dimension names, priors and predictions are those of `model`.
    """
    return _Unobserve(model)


class _Unobserve(Messenger):
    def process_message(self, msg):
        if msg["type"] == "sample" and msg["is_observed"]:
            if msg["infer"].get("is_auxiliary"):
                msg["stop"] = True  # a factor: it has no value to draw
            else:
                msg["is_observed"], msg["value"] = False, None


class _Observe(Messenger):
    """Observed sites with other values."""

    def __init__(self, fn: Callable, values: Mapping[str, jax.Array]):
        self.values = values
        super().__init__(fn)

    def process_message(self, msg):
        if msg["type"] == "sample" and msg["name"] in self.values:
            msg["value"] = self.values[msg["name"]]
