"""A row is evaluated alone: what is mapped over rows is checked first, operation by operation (P11, P17).

Sums over rows have the sensitivity that is claimed for them only if a row's contribution depends on that row and on
public numbers. `jax.vmap` evaluates a function for each row, but operations have rules of their own for many rows at
once, and these may do anything: a rule of the user's own (``custom_vmap``, callbacks, also within the derivative rules
of ``custom_vjp`` and ``custom_jvp``), a generator of random numbers that takes one row's key for all, a loop that goes
on for all rows until the slowest has converged.

So a function of a row is traced once. In its jaxpr, the very one that is mapped afterwards, derivatives included, rows
may meet only operations of a list: those that are known to give each row what they would give it alone, in a time that
hardly depends on it. Whatever is not on the list is refused by name, foreign calls and the operations of future
versions of JAX among it.

Proof: docs/proofs/isolation.md.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core.primitives
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive, jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr

CALLS = frozenset(("closed_call", "custom_jvp_call", "custom_vjp_call", "jit", "remat2"))
"""Operations that evaluate a jaxpr as it stands."""

_LISTED = frozenset(
    (
        # of each element by itself
        "abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e bitcast_convert_type cbrt "
        "ceil clamp clz complex conj copy convert_element_type cos cosh digamma div eq eq_to erf erf_inv erfc exp "
        "exp2 expm1 floor ge gt imag integer_pow is_finite le le_to lgamma log log1p log2 logistic lt lt_to max min "
        "mul mulhi name ne neg nextafter not one_minus_square optimization_barrier or polygamma polynomial "
        "population_count pow real reduce_precision rem round rsqrt select_n shift_left shift_right_arithmetic "
        "shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh xor zeta "
        # of a row's elements among one another
        "argmax argmin broadcast_in_dim concatenate conv_general_dilated cumlogsumexp cummax cummin cumprod cumsum "
        "dot_general dynamic_slice dynamic_update_slice fft gather iota pad reduce reduce_and reduce_max reduce_min "
        "reduce_or reduce_prod reduce_sum reduce_window reduce_window_max reduce_window_min reduce_window_sum "
        "reduce_xor reshape rev scatter scatter-add scatter-max scatter-min scatter-mul scatter-sub "
        "select_and_gather_add select_and_scatter_add slice sort split squeeze stack tile top_k transpose unstack "
        # of a row's matrices, one after the other
        "cholesky householder_product lu lu_pivots_to_permutation qr triangular_solve tridiagonal_solve "
        # of a row's random keys, if these are threefry's
        "random_bits random_fold_in random_seed random_split random_unwrap random_wrap threefry2x32 "
        # which do for each row, equally often, what they hold; that is checked
        "custom_linear_solve scan "
    ).split()
)
_OF_KEYS = frozenset(("random_bits", "random_fold_in", "random_seed", "random_split"))
_ON_CPUS = frozenset(("eigh", "svd"))
"""LAPACK's, which takes one row's matrix after the other; what libraries for other devices do is not known."""
_LOOPING = frozenset(("random_gamma",))
"""Rejection samplers: each row's numbers are its own, and all rows wait for the last one."""
_BETAINC = "regularized_incomplete_beta"


class RowsMeetError(ValueError):
    """A function of a row has operations by which rows could act on one another.

    :ivar hazards: their names, as `hazards` gives them.
    """

    def __init__(self, hazards: Sequence[str]):
        self.hazards = tuple(hazards)
        super().__init__("; ".join(describe_hazard(name, "what is computed from a row") for name in self.hazards))


class Alone(NamedTuple):
    """A function of one row, as it was when it was checked.

    :ivar jaxpr: without what no output depends on. Derivatives leave such operations behind.
    :ivar used: which of the flat arguments are inputs of it.
    :ivar shapes: of what it gives.
    """

    jaxpr: ClosedJaxpr
    used: list[bool]
    shapes: Any

    def of(self, *args: Any) -> Any:
        """What it gives for a row; for `jax.vmap` to map."""
        leaves = [leaf for leaf, use in zip(jax.tree.leaves(args), self.used, strict=True) if use]
        return jax.tree.unflatten(jax.tree.structure(self.shapes), jaxpr_as_fun(self.jaxpr)(*leaves))


def alone(function: Callable, *example: Any, of_rows: Sequence[bool] | None = None, may_loop: bool = False) -> Alone:
    """A function of one row, checked and ready to be mapped.

    **Formal guarantee.** Mapped over rows, it gives each of them what it gives that row alone, up to what a compiler
    does to last bits (see docs/floating-point.md).

    :param function: of `example`.
    :param example: its arguments, or shapes of them, for one row.
    :param of_rows: which of the arguments differ from row to row; default: all of them.
    :param may_loop: whether it may draw random numbers by rejection, as NumPyro's samplers do. Only for samplers that
        are known to end, whatever a row holds.
    :raises RowsMeetError: naming the operations that are not known to keep rows apart.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*example)
    if not _is_plain(shapes):
        raise ValueError(f"a row contributes arrays in tuples, lists and dicts, and not {type(shapes).__name__}")
    flags = [True] * len(example) if of_rows is None else of_rows
    marked = [flag for flag, part in zip(flags, example, strict=True) for _ in jax.tree.leaves(part)]
    jaxpr, used = dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    if found := sorted(hazards(jaxpr, [mark for mark, use in zip(marked, used, strict=True) if use], may_loop)):
        raise RowsMeetError(found)
    return Alone(ClosedJaxpr(jaxpr, closed.consts), used, shapes)


def one_row(rows: Sequence[Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes of a one-row slice of arrays with the rows on their leading axes."""
    return tuple(jax.ShapeDtypeStruct((1, *row.shape[1:]), row.dtype) for row in rows)


def hazards(jaxpr: Jaxpr, marked: Sequence[bool], may_loop: bool = False) -> set[str]:
    """Operations on marked inputs that are not known to keep rows apart when they are mapped over rows.

    "while": a loop that goes on or ends as marked inputs say, and so goes on for all rows until the last one is done.
    Calls, branches and loops are followed; where another operation holds a computation of its own, all of that
    counts as marked as soon as one of its inputs is.

    :param marked: which inputs differ from row to row.
    """
    return _Follower(may_loop).follow(jaxpr, marked)[1]


def describe_hazard(name: str, whose: str = "the model") -> str:
    """What is wrong with an operation that `hazards` found, and the way out."""
    if name == "while":
        return (
            f"{whose} has a loop that goes on or ends as a row says (`lax.while_loop`, or `lax.fori_loop` with bounds "
            "that rows give): one row could keep the run from ending, and how long it takes would tell of it. Use a "
            "fixed number of steps: `lax.scan`, or `fori_loop` with public bounds"
        )
    if name == _BETAINC:
        return (
            f"{whose} computes the incomplete beta function of a row (the cdf of a Student's t, Beta or Binomial, as "
            f"for censored or truncated outcomes). In JAX {jax.__version__} one row changes the last digits of all "
            "others there. Install JAX 0.12 or newer"
        )
    if name in ("igamma", "igammac", "igamma_grad_a", "random_gamma_grad"):
        return (
            f"{whose} computes the incomplete gamma function of a row (`{name}`; the cdf of a Gamma, InverseGamma or "
            "Poisson, as for censored or truncated outcomes). It takes up to 1e5 times as long for some values as for "
            "others, and all rows wait for the slowest: one row could stall the run, and how long it takes would tell "
            "of it. Use an outcome whose cdf has a closed form (Weibull, LogNormal, Exponential), or write the cdf "
            "with a fixed number of steps"
        )
    if "callback" in name or name == "debug_print":
        return (
            f"{whose} calls Python with a row (`{name}`: `jax.pure_callback`, `io_callback`, `jax.debug.print`): what "
            "Python does with it, nobody can see. Write it with `jax.numpy`, and leave out what prints"
        )
    return (
        f"{whose} applies `{name}` to a row, which is not known to treat each of many rows as it would treat it alone: "
        "they could act on one another. Write it with `jax.numpy`, and pass random numbers as an argument"
    )


def _is_plain(shapes: Any) -> bool:
    """Whether a result is arrays in Python's own containers, and no class that would be handed all rows' values."""
    if type(shapes) in (tuple, list, dict):
        return all(map(_is_plain, shapes.values() if type(shapes) is dict else shapes))
    return shapes is None or type(shapes) is jax.ShapeDtypeStruct


class _Follower:
    """Follows the marks through a jaxpr."""

    def __init__(self, may_loop: bool, everything: bool = False):
        """
        :param everything: whether also operations without marked inputs are looked at, as in a loop that rows end: how
            often it does what it does tells of them.
        """
        self.may_loop, self.everything = may_loop, everything

    def follow(self, jaxpr: Jaxpr, marked: Sequence[bool]) -> tuple[list[bool], set[str]]:
        """Which outputs depend on marked inputs, and the hazards on the way."""
        reached = {var for var, mark in zip(jaxpr.invars, marked, strict=True) if mark}
        found: set[str] = set()
        for eqn in jaxpr.eqns:
            inputs = [not isinstance(v, Literal) and v in reached for v in eqn.invars]
            if not any(inputs) and not self.everything:
                continue
            outputs, inner = self._operation(eqn, inputs)
            found |= inner
            reached.update(var for var, mark in zip(eqn.outvars, outputs, strict=True) if mark)
        return [not isinstance(v, Literal) and v in reached for v in jaxpr.outvars], found

    def _operation(self, eqn: JaxprEqn, inputs: list[bool]) -> tuple[list[bool], set[str]]:
        name = eqn.primitive.name
        if _is_wrapped(eqn):
            return [True] * len(eqn.outvars), set()
        if not _is_jaxs(eqn):
            return [True] * len(eqn.outvars), {_shown_name(eqn)}
        if name in CALLS:
            return self.follow(called(eqn).jaxpr, inputs)
        if name == "cond":
            return self._branches(eqn, inputs)
        if name == "while":
            return self._loop(eqn, inputs)
        found = set() if self._is_listed(eqn) else {_shown_name(eqn)}
        for part in jaxprs_in(eqn.params):
            found |= self.follow(part, [True] * len(part.invars))[1]
        return [True] * len(eqn.outvars), found

    def _is_listed(self, eqn: JaxprEqn) -> bool:
        name = eqn.primitive.name
        if name in _OF_KEYS:
            return _is_threefry(eqn)
        if name == _BETAINC:
            return betainc_is_elementwise(jax.default_backend())
        if name in _ON_CPUS:
            return jax.default_backend() == "cpu"
        return name in _LISTED or (self.may_loop and name in _LOOPING)

    def _branches(self, eqn: JaxprEqn, inputs: list[bool]) -> tuple[list[bool], set[str]]:
        followed = [self.follow(branch.jaxpr, inputs[1:]) for branch in eqn.params["branches"]]
        outputs = [inputs[0] or any(marks) for marks in zip(*(outputs for outputs, _ in followed), strict=True)]
        return outputs, set().union(*(found for _, found in followed))

    def _loop(self, eqn: JaxprEqn, inputs: list[bool]) -> tuple[list[bool], set[str]]:
        params = eqn.params
        of_test, of_body = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        carry, before = inputs[of_body:], None
        found: set[str] = set()
        while carry != before:
            before = carry
            after, found = self.follow(params["body_jaxpr"].jaxpr, [*inputs[of_test:of_body], *carry])
            carry = [one or other for one, other in zip(carry, after, strict=True)]
        (ends,), inner = self.follow(params["cond_jaxpr"].jaxpr, [*inputs[:of_test], *carry])
        if ends:
            whole = _Follower(self.may_loop, everything=True)
            for part in params["body_jaxpr"].jaxpr, params["cond_jaxpr"].jaxpr:
                inner = inner | whole.follow(part, [True] * len(part.invars))[1]
        return carry, found | inner | ({"while"} if ends and not self.may_loop else set())


def called(eqn: JaxprEqn) -> ClosedJaxpr:
    """The jaxpr that one of the `CALLS` evaluates."""
    part = eqn.params["jaxpr"] if "jaxpr" in eqn.params else eqn.params["call_jaxpr"]
    return part if isinstance(part, ClosedJaxpr) else ClosedJaxpr(part, [])


def jaxprs_in(params: dict) -> Iterator[Jaxpr]:
    """The computations that an operation holds, by its parameters."""
    for part in jax.tree.leaves(params, is_leaf=lambda p: isinstance(p, ClosedJaxpr | Jaxpr)):
        if isinstance(part, ClosedJaxpr | Jaxpr):
            yield part.jaxpr if isinstance(part, ClosedJaxpr) else part


def _shown_name(eqn: JaxprEqn) -> str:
    name = eqn.primitive.name if "_prim" not in eqn.params else type(eqn.params["_prim"]).__name__
    return f"{name} of other keys than threefry's" if name in _OF_KEYS else name


def _is_threefry(eqn: JaxprEqn) -> bool:
    dtypes = [getattr(var.aval, "dtype", None) for var in (*eqn.invars, *eqn.outvars)]
    keys = [d for d in dtypes if d is not None and jnp.issubdtype(d, jax.dtypes.prng_key)]
    return bool(keys) and all(key == _threefry() for key in keys)


@functools.cache
def _threefry() -> Any:
    """The type of its keys: a generator of somebody else's may call itself the same."""
    return jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32")).dtype


def _is_jaxs(eqn: JaxprEqn) -> bool:
    """Whether an operation is JAX's own, and not another one that goes by the same name."""
    return eqn.primitive in _jaxs_own().get(eqn.primitive.name, ())


def _is_wrapped(eqn: JaxprEqn) -> bool:
    """Whether JAX wraps the operation, as 0.12 does with `jnp.searchsorted` (of `jnp.interp`) and `jnp.ldexp`.

    Both are of each number by itself.
    """
    if "_prim" not in eqn.params:
        return False
    wrapper = eqn.params["_prim"]
    kind = type(wrapper)
    is_changed = any(hasattr(kind, name) for name in vars(wrapper))  # a method of the class, put into its object
    return not is_changed and any(eqn.primitive is prim and kind is wrapped for prim, wrapped in _jaxs_wrapped())


@functools.cache
def _jaxs_wrapped() -> tuple[tuple[Any, type], ...]:
    """JAX's own wrapping operations, and the classes of what they wrap: of the two functions, as they are traced."""
    number = jax.ShapeDtypeStruct((), jnp.float32)
    numbers = jax.ShapeDtypeStruct((3,), jnp.float32)
    traced = (
        jax.make_jaxpr(jnp.searchsorted)(numbers, number),
        jax.make_jaxpr(lambda x: jnp.ldexp(x, 2))(number),
    )
    found: list[tuple[Any, type]] = []

    def look_into(jaxpr: Jaxpr) -> None:
        for eqn in jaxpr.eqns:
            if "_prim" in eqn.params:
                found.append((eqn.primitive, type(eqn.params["_prim"])))
            for part in jaxprs_in(eqn.params):
                look_into(part)

    for closed in traced:
        look_into(closed.jaxpr)
    return tuple(found)


@functools.cache
def _jaxs_own() -> dict[str, list]:
    """JAX's operations by name: those that it exports, and two of random keys that it does not."""
    found: dict[str, list] = {}
    for module in (jax.extend.core.primitives, lax, lax.linalg):
        for key in dir(module):
            primitive = getattr(module, key)
            if isinstance(primitive, Primitive):
                found.setdefault(primitive.name, []).append(primitive)
    key_data = jax.ShapeDtypeStruct((2,), jnp.uint32)
    wrapping = jax.make_jaxpr(lambda x: jax.random.key_data(jax.random.wrap_key_data(x, impl="threefry2x32")))(key_data)
    for eqn in wrapping.jaxpr.eqns:
        found.setdefault(eqn.primitive.name, []).append(eqn.primitive)
    return found


@functools.cache
def betainc_is_elementwise(backend: str) -> bool:
    """Whether an element of JAX's incomplete beta function is the same whatever stands beside it.

    Before JAX 0.12 the iteration went on for all elements until the slowest of them had converged.
    """
    betainc, slowest = jax.jit(jax.scipy.special.betainc), np.array([1e6, 1e6, 0.5])
    numbers = np.random.default_rng(0).lognormal(0.5, 1.0, (30, 2))
    with jax.ensure_compile_time_eval():
        for a, b in numbers:
            equal = np.full((32, 3), [a, b, 0.3], np.float32)
            beside = np.concatenate([equal[1:], [slowest]]).astype(np.float32)
            alone, together = (np.asarray(betainc(*jnp.asarray(x).T)) for x in (equal, beside))
            if not np.array_equal(alone[:-1], together[:-1]):
                return False
    return True
