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

Continuous latents of a row, or of a unit that has several rows, are integrated out (see `numpyro_dp.model.latents`).
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from numpyro.infer.initialization import init_to_sample
from numpyro.infer.util import constrain_fn, find_valid_initial_params, potential_energy
from numpyro.primitives import Messenger

from numpyro_dp.model.arguments import (
    Argument,
    PublicArguments,
    is_array,
    is_streamed,
    placeholder_rows,
    traced,
)
from numpyro_dp.model.drawing import (
    CannotDrawError,
    are_all_seen,
    draw_outcomes,
    few_outcomes,
    is_count,
    laws_of,
    leaves_of,
    weight_of,
)
from numpyro_dp.model.latents import (
    Latents,
    Parts,
    draw_latents,
    fix_continuous,
    integrated,
    latent_log_density,
    latent_means,
)
from numpyro_dp.model.tracing import Params, fix_latents, keep_sites, sum_over_latents
from numpyro_dp.statements import some_of


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
    :ivar latents: the continuous latents of a row or unit, which are integrated out; None if there are none.
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
    latents: Latents | None

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

    @property
    def plates_of_one(self) -> frozenset[str]:
        """The plates that have one member where one row is evaluated."""
        return self.row_plates if self.latents is None else self.row_plates | self.latents.plates

    @property
    def numbers_per_unit(self) -> int:
        """How many densities of a row that of a unit is made of."""
        return self.rows_per_unit * (1 if self.latents is None else len(self.latents.rule.nodes))

    def require_same(self, unit: str, args: tuple, kwargs: dict) -> None:
        """Make sure that an argument still says what it said when rows were grouped by it, if that is public.

        :raises ValueError: if it does not. What is traced cannot be looked at.
        """

    def per_unit(self, density: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        """From a row's density (`row_log_density`, `drawn_log_density`) to that of a protected unit's rows together."""
        return density

    def integrate(self, parts: Callable[[jax.Array], Parts]) -> Callable[..., jax.Array]:
        """From the factors of a row's density to the density of a protected unit, its latents integrated out.

        :return: the function ``(z, slices of `rows`, *words of a key)``; the words for parts of a row that is drawn.
        """
        latents = self.latents
        assert latents is not None

        def density(z: jax.Array, row: tuple, *words: jax.Array) -> jax.Array:
            keys = [split_words(words[0], 2)] if words else []
            keys = [key for pair in keys for key in (pair[0], pair[1:])]
            rows = tuple(part[None] for part in row)
            return integrated(latents, parts, z, rows, jnp.ones(1, bool), *keys)

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
            private = [leaf for leaf, a in zip(leaves, self.arguments, strict=True) if a.private]
            return tuple(leaf if is_streamed(leaf) else jnp.asarray(saturated(leaf)) for leaf in private)

    def row_log_density(self, args: tuple, kwargs: dict) -> Callable[[jax.Array, tuple], jax.Array]:
        """The function ``(flat z, slices of `rows` for one unit) -> log p(its row or rows | z)``.

        Public arguments are closed over.
        """
        if self.latents is not None:
            return jax.jit(self.integrate(self.parts(args, kwargs)), inline=True)
        density = self._given_log_density(args, kwargs)
        return self.per_unit(lambda z, row: density(self.unravel(z), row))

    def _given_log_density(self, args: tuple, kwargs: dict) -> Callable[[Params, tuple], jax.Array]:
        """The function ``(unconstrained values of all continuous latents, one-row slices) -> log p(row | those)``."""
        density = self.row_log_density_at(args, kwargs)
        return lambda values, row: density(values, row, None)

    def row_log_density_at(self, args: tuple, kwargs: dict) -> Callable[[Params, tuple, Mapping | None], jax.Array]:
        """The function ``(unconstrained values, one-row slices, latents) -> log p(row, latents | values)``.

        That is a term of what is summed. The values are those of all continuous latents; the discrete ones are given as
        positions in [0, 1) of the list of their values, and None sums over them.
        """
        args, kwargs = self.without_private(args, kwargs)  # who keeps the function keeps no table
        model = keep_sites(
            self.model, lambda name: bool(self.row_latents) or name in self.row_sites, self.plates_of_one, 1
        )

        @functools.partial(jax.jit, inline=True)  # NumPyro validates concrete values only: no warning shows a row
        def log_density(values: Params, row: tuple, latents: Mapping | None) -> jax.Array:
            row_args, row_kwargs = self.with_private(args, kwargs, row)
            if not self.row_latents:
                return -potential_energy(model, row_args, row_kwargs, values)
            density = sum_over_latents(
                model, values, self.row_sites, self.row_latents, self.first_available_dim, latents
            )
            return density(*row_args, **row_kwargs)

        return log_density

    def latent_log_density(
        self, args: tuple, kwargs: dict, is_proper: bool = True
    ) -> Callable[[Params, Params, tuple], jax.Array]:
        """The function ``(z, w, one-row slices) -> log p(w | z)``; see `numpyro_dp.model.latents`."""
        args, kwargs = self.without_private(args, kwargs)
        model = self._as_one_row

        @functools.partial(jax.jit, inline=True)
        def log_density(z: Params, w: Params, row: tuple) -> jax.Array:
            return latent_log_density(model, z, w, *self.with_private(args, kwargs, row), is_proper)

        return log_density

    def parts(self, args: tuple, kwargs: dict, drawn: bool = False) -> Callable[[jax.Array], Parts]:
        """From flat z to the factors of a row whose latents are integrated out.

        :param drawn: of a row with its observed sites drawn from the model at z, which are constants to derivatives.
        :raises CannotDrawError: where the model does not say how a row's outcomes come about; the functions do, too.
        """
        latents, (args, kwargs) = self.latents, self.without_private(args, kwargs)
        assert latents is not None
        log_prior, given = self.latent_log_density(args, kwargs), self._given_log_density(args, kwargs)
        if drawn and self.outcome_leaves is None:
            raise CannotDrawError("a site observes a constant")

        def parts(z_flat: jax.Array) -> Parts:
            z = self.unravel(z_flat)

            def prepare(row: tuple, *words: jax.Array) -> tuple:
                row = latents.own(row)
                return row, (self._draw_with_latents(z, row, words, args, kwargs) if words else None)

            def start(prepared: tuple) -> jax.Array:
                row_args, row_kwargs = self.with_private(args, kwargs, prepared[0])
                means = latent_means(self._as_one_row, z, latents.names, row_args, row_kwargs)
                return ravel_pytree(jax.tree.map(lambda x, at: x.astype(at.dtype), means, latents.prototype))[0]

            def of_row(prepared: tuple, w: jax.Array) -> jax.Array:
                row, outcomes = prepared
                density = given
                if outcomes is not None:
                    observed = dataclasses.replace(self, model=_Observe(self.model, outcomes))
                    density = observed._given_log_density(args, kwargs)
                return density({**z, **latents.unravel(w)}, row)

            return Parts(prepare, start, lambda prepared, w: log_prior(z, latents.unravel(w), prepared[0]), of_row)

        return parts

    def _draw_with_latents(
        self, z: Params, row: tuple, words: Sequence[jax.Array], args: tuple, kwargs: dict
    ) -> dict[str, jax.Array]:
        """Values of a row's observed sites: its latents by the unit's key, and these by the row's."""
        assert self.latents is not None
        of_unit, of_row = (jax.random.wrap_key_data(key, impl="threefry2x32") for key in words)
        row_args, row_kwargs = self.with_private(args, kwargs, row)
        model, outcomes = self._drawn_model(), self.outcomes
        w = draw_latents(model, z, self.latents.names, of_unit, row_args, row_kwargs)
        at = {**z, **w}
        values = draw_outcomes(model, at, outcomes, self.row_latents, of_row, row_args, row_kwargs)
        if weight_of(model, at, outcomes, row_args, row_kwargs) is not None:
            raise CannotDrawError("rows whose latents are integrated out are scaled")
        return jax.lax.stop_gradient(values)

    def drawn_log_density(
        self, args: tuple, kwargs: dict, passes: int = 1
    ) -> Callable[[jax.Array, tuple, jax.Array], jax.Array]:
        """The function ``(flat z, one-row slices, words of a key) -> log p(row' | z)``, where row' is the row with its
        observed sites drawn from the model at z. To derivatives the draw is a constant. It is the density of the law
        that they are drawn from: it counts once, however often the row's does (`row_weight`).

        :param passes: how often a row is drawn, by the same key. Each pass draws from laws that use the last pass's
            outcomes: where outcomes depend on one another (a series in a row), k passes settle a chain of k of them.
        :raises CannotDrawError: where the model does not say how a row's outcomes come about; the function does, too.
        """
        if self.latents is not None:
            return jax.jit(self.integrate(self.parts(args, kwargs, drawn=True)), inline=True)
        args, kwargs = self.without_private(args, kwargs)
        outcomes = self.outcomes
        if self.outcome_leaves is None:
            raise CannotDrawError("a site observes a constant")
        drawn_model = self._drawn_model()

        @functools.partial(jax.jit, inline=True)
        def log_density(z: jax.Array, row: tuple, key: jax.Array) -> jax.Array:
            key = jax.random.wrap_key_data(key, impl="threefry2x32")
            at, latents = self.unravel(z), self.row_latents
            for _ in range(passes):
                given = self.with_private(args, kwargs, row)
                values = draw_outcomes(drawn_model, at, outcomes, latents, key, *given, is_checked=True)
                values = jax.lax.stop_gradient(values)
                if passes > 1:
                    leaves = leaves_of(self._as_one_row, at, outcomes, row, *given)
                    new = {k: jnp.reshape(values[name], row[k].shape) for name, k in leaves.items()}
                    row = tuple(new[k].astype(leaf.dtype) if k in new else leaf for k, leaf in enumerate(row))
            drawn = dataclasses.replace(self, model=_Observe(self.model, values, counts_once=True))
            return drawn.row_log_density(args, kwargs)(z, row)

        return log_density

    def enumerated_log_density(self, args: tuple, kwargs: dict) -> Callable[[jax.Array, tuple, jax.Array], jax.Array]:
        """The function ``(flat z, one-row slices, k) -> log p(row' | z)``, where row' is the row with the k-th of all
        values that its outcome can have. Only where `num_outcomes` says that there are few. It counts once, too.
        """
        args, kwargs = self.without_private(args, kwargs)

        @functools.partial(jax.jit, inline=True)
        def log_density(z: jax.Array, row: tuple, k: jax.Array) -> jax.Array:
            values = self._few_outcomes(z, *self.with_private(args, kwargs, row))
            assert values is not None
            chosen = {name: jnp.take(value, k, axis=0) for name, value in values.items()}
            observed = dataclasses.replace(self, model=_Observe(self.model, chosen, counts_once=True))
            return observed.row_log_density(args, kwargs)(z, row)

        return log_density

    def has_count(self, args: tuple, kwargs: dict) -> bool:
        """Whether a row's outcome is one count, of which 0 is the least, and the model says how it comes about."""
        if self.outcome_leaves is None or self.latents is not None:
            return False
        # As observed: to draw takes long to trace.
        return self._look(
            lambda _, z, outcomes, *given: is_count(self._as_one_row, z, outcomes, self.row_latents, *given),
            args,
            kwargs,
        )

    def draw_count(self, args: tuple, kwargs: dict) -> Callable[[jax.Array, tuple, jax.Array], jax.Array]:
        """The function ``(flat z, one-row slices, words of a key) -> count``, drawn from the model; see `has_count`."""
        args, kwargs = self.without_private(args, kwargs)

        def count(z: jax.Array, row: tuple, key: jax.Array) -> jax.Array:
            key = jax.random.wrap_key_data(key, impl="threefry2x32")
            given, at = self.with_private(args, kwargs, row), self.unravel(z)
            (drawn,) = draw_outcomes(self._drawn_model(), at, self.outcomes, frozenset(), key, *given).values()
            return jnp.reshape(drawn, ()).astype(jnp.uint32)

        return count

    def count_log_density(self, args: tuple, kwargs: dict) -> Callable[[jax.Array, tuple, jax.Array], jax.Array]:
        """The function ``(flat z, one-row slices, count) -> log p(row' | z)``, where row' is the row with that outcome.
        It counts once, however often the row's does.
        """
        args, kwargs = self.without_private(args, kwargs)

        def log_density(z: jax.Array, row: tuple, count: jax.Array) -> jax.Array:
            (law,) = laws_of(self._drawn_model(), self.unravel(z), self.outcomes, *self.with_private(args, kwargs, row))
            values = dict.fromkeys(self.outcomes, jnp.full(law.shape(), count).astype(jnp.result_type(int)))
            observed = dataclasses.replace(self, model=_Observe(self.model, values, counts_once=True))
            return observed.row_log_density(args, kwargs)(z, row)

        return log_density

    def num_outcomes(self, args: tuple, kwargs: dict) -> int | None:
        """How many values a row's outcome can have, if these are few and the model says with which probabilities."""
        if self.outcome_leaves is None or self.latents is not None:
            return None
        values = self._look(
            lambda model, z, outcomes, *given: few_outcomes(model, z, outcomes, self.row_latents, *given), args, kwargs
        )
        return None if values is None else len(*values.values())

    def row_weight(self, args: tuple, kwargs: dict) -> Callable[[jax.Array, tuple], jax.Array] | None:
        """The function ``(flat z, one-row slices) -> how often the row's density counts``; None if once.

        :raises CannotDrawError: if what is observed of a row counts differently.
        """
        args, kwargs = self.without_private(args, kwargs)
        model, found = self._as_one_row, []

        def weight(z: jax.Array, row: tuple) -> jax.Array | None:
            return weight_of(model, self.unravel(z), self.outcomes, *self.with_private(args, kwargs, row))

        def look(z: jax.Array, row: tuple) -> None:
            found.append(weight(z, row))

        jax.eval_shape(look, self.ravel(self.prototype), placeholder_rows(self.arguments))  # type: ignore[arg-type]
        return None if found == [None] else weight  # type: ignore[return-value]

    def are_all_seen(self, args: tuple, kwargs: dict) -> Callable[[jax.Array, tuple], jax.Array | None]:
        """The function ``(flat z, one-row slices) -> whether no mask hides a part of the row``; None if none could."""
        args, kwargs = self.without_private(args, kwargs)

        def seen(z: jax.Array, row: tuple) -> jax.Array | None:
            row_args, row_kwargs = self.with_private(args, kwargs, row)
            key = jax.random.key(0, impl="threefry2x32")
            return are_all_seen(self._drawn_model(), self.unravel(z), self.outcomes, key, row_args, row_kwargs)

        return seen

    def are_laws(self, such: Callable[[Any], bool], args: tuple, kwargs: dict) -> list[bool]:
        """Whether the laws of a row's outcomes are such ones, each of them."""
        return self._look(lambda *at: list(map(such, laws_of(*at))), args, kwargs)

    def _look(self, at_laws: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """What laws of outcomes are, by shapes alone: ``at_laws(model, z, outcomes, args, kwargs)``."""
        found = []

        def look(z: jax.Array, row: tuple) -> None:
            given = self.with_private(*self.without_private(args, kwargs), row)
            found.append(at_laws(self._drawn_model(), self.unravel(z), self.outcomes, *given))

        jax.eval_shape(look, self.ravel(self.prototype), placeholder_rows(self.arguments))  # type: ignore[arg-type]
        return found[0]

    def _few_outcomes(self, z: jax.Array, row_args: tuple, row_kwargs: dict) -> dict[str, jax.Array] | None:
        outcomes = self.outcomes
        model = self._drawn_model()
        return few_outcomes(model, self.unravel(z), outcomes, self.row_latents, row_args, row_kwargs)

    def _drawn_model(self) -> Callable:
        """With outcomes to draw, at one row. What else is observed (a parameter that is fixed) stays as it is."""
        return keep_sites(released_model(self.model, self.outcomes), lambda name: True, self.plates_of_one, 1)

    @property
    def outcomes(self) -> frozenset[str]:
        """The observed sites of rows."""
        return frozenset(self.row_sites - self.row_latents)

    @property
    def _as_one_row(self) -> Callable:
        """The model at one row."""
        return keep_sites(self.model, lambda name: True, self.plates_of_one, 1)

    def log_prior(self, args: tuple, kwargs: dict) -> Callable[[jax.Array], jax.Array]:
        """The function ``flat z -> log p(z)``, Jacobians of the transforms included. Sees no private argument."""
        model, unravel = self.prior_model, self.unravel  # who keeps the function does not keep the number of rows
        return traced(
            lambda args, kwargs, z: -potential_energy(model, args, kwargs, unravel(z)),
            *self.without_private(args, kwargs),
        )

    def constrain(self, args: tuple, kwargs: dict) -> Callable[[Params], dict[str, jax.Array]]:
        """The function that maps one unconstrained draw to the sites that are released."""

        def constrain(args: tuple, kwargs: dict, z: Params) -> dict[str, jax.Array]:
            sites = constrain_fn(self.prior_model, args, kwargs, z, return_deterministic=True)
            return {name: value for name, value in sites.items() if name not in self.dropped_sites}

        return traced(constrain, *self.without_private(args, kwargs))

    def sites(self, args: tuple, kwargs: dict) -> Callable[[jax.Array], dict[str, jax.Array]]:
        """The function that maps a flat unconstrained draw to the sites that are released."""
        constrain, unravel = self.constrain(args, kwargs), self.unravel
        return lambda z: constrain(unravel(z))

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

    def prior_draws(self, num: int, args: tuple, kwargs: dict) -> tuple[np.ndarray, dict[str, Any]]:
        """Flat unconstrained draws of the prior, shape (num, d) or fewer; and supports of sites that cannot be drawn.

        From an improper prior nothing can be drawn: its values are uniform in (-2, 2), as NumPyro starts its chains.

        :raises ValueError: if hardly any draw is finite.
        """
        improper: dict[str, Any] = {}
        strategy = functools.partial(_to_sample, improper=improper)
        params, valid = self.init_params(jax.random.split(jax.random.key(0), num), strategy, args, kwargs)
        draws = np.asarray(jax.vmap(self.ravel)(params), float)[np.asarray(valid)]
        if len(draws) < _LEAST_DRAWS * num:
            sites = [name for name, x in params.items() if not np.isfinite(x).all()]
            whose = f" (sites {some_of(sites)})" if sites else ""
            raise ValueError(
                f"of {num:,} draws of the prior, {len(draws):,} are finite{whose}. "
                "Where the search for the posterior begins is taken from them. Nothing was released. Most draws of a "
                "Gamma(0.001, 0.001), say, are 0 in single precision: give a prior that says how large a parameter may "
                "be, such as HalfNormal(scale) for a standard deviation"
            )
        return draws, improper

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
        # Any value of the rows' latents will do: nothing that the prior is made of depends on them.
        names = frozenset() if self.latents is None else self.latents.names
        model = fix_continuous(fix_latents(self.model, dict.fromkeys(self.row_latents, 0.0)), names)
        of_rows = self.row_sites | names
        return keep_sites(model, lambda name: name not in of_rows, self.plates_of_one, 1)


_LEAST_DRAWS = 0.1
"""Of the prior's draws, so many must be finite."""


def _to_sample(site: dict, improper: dict[str, Any]) -> Any:
    """NumPyro's `init_to_sample`; supports of sites from whose law nothing can be drawn are added to `improper`."""
    if site["type"] == "sample" and not site["is_observed"] and not site["fn"].support.is_discrete:
        try:
            jax.eval_shape(site["fn"].sample, jax.random.key(0))
        except NotImplementedError:
            improper[site["name"]] = site["fn"].support
    return init_to_sample()(site)


def saturated(leaf: Any) -> Any:
    """Whole numbers beyond those of JAX's type as the largest and the least of it: JAX would take them modulo 2**32."""
    if not isinstance(leaf, np.ndarray) or leaf.dtype.kind not in "iu":
        return leaf
    kept = jax.dtypes.canonicalize_dtype(leaf.dtype)
    return leaf if kept == leaf.dtype else np.clip(leaf, np.iinfo(kept).min, np.iinfo(kept).max)


def split_words(words: jax.Array, num: int) -> jax.Array:
    """The words of so many keys, shape (num, 2)."""
    return jax.random.key_data(jax.random.split(jax.random.wrap_key_data(words, impl="threefry2x32"), num))


def released_model(model: Callable, outcomes: Collection[str] | None = None) -> Callable:
    """The model without observed outcomes: what ArviZ and `Predictive` may see.

    ArviZ records observed values (the private outcomes) and pointwise log likelihoods of a model that has observed
    sites; this one has none of rows. Dimension names, priors and predictions are those of `model`.

    :param outcomes: the observed sites of rows; None if it is not known which they are: then nothing is observed, and
        parameters that are fixed (`handlers.condition`) are drawn, too.
    """
    return _Unobserve(model, outcomes)


class _Unobserve(Messenger):
    def __init__(self, fn: Callable, outcomes: Collection[str] | None):
        self.outcomes = outcomes
        super().__init__(fn)

    def process_message(self, msg):
        if msg["type"] == "sample" and msg["is_observed"]:
            if msg["infer"].get("is_auxiliary"):
                msg["stop"] = True  # a factor: it has no value to draw
            elif self.outcomes is None or msg["name"] in self.outcomes:
                fn, shape = msg["fn"], jnp.shape(msg["value"])
                # Of a law that is narrower than what it is compared with, as many values are drawn as are observed.
                batch = jnp.broadcast_shapes(fn.batch_shape, shape[: len(shape) - fn.event_dim])
                msg["fn"] = fn if batch == fn.batch_shape else fn.expand(batch)
                msg["is_observed"], msg["value"] = False, None


class _Observe(Messenger):
    """Observed sites with other values.

    :param counts_once: whether their densities are no longer scaled.
    """

    def __init__(self, fn: Callable, values: Mapping[str, jax.Array], counts_once: bool = False):
        self.values, self.counts_once = values, counts_once
        super().__init__(fn)

    def process_message(self, msg):
        if msg["type"] == "sample" and msg["name"] in self.values:
            msg["value"] = self.values[msg["name"]]
            if self.counts_once:
                msg["scale"] = None
