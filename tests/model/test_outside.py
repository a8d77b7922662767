"""What a model reads besides its arguments: refused where it is as long as the table, else listed in the report."""

import array
import collections
import dataclasses
import enum
import functools
import io
import operator
import types

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from helpers import elsewhere
from helpers.elsewhere import Settings, basis, mean_age
from jax.scipy.special import logsumexp

from numpyro_dp import DPPenalty, release_sum
from numpyro_dp.model.arguments import UnsupportedModelError
from numpyro_dp.model.outside import listed, read_outside
from numpyro_dp.model.separate import separate

N = 7
y = np.random.default_rng(0).normal(size=N)
VALUES = [float(value) for value in y]
ARRAY = np.append(y, 0.0)


def reading(read, *of):
    """A model whose prior is at what a function gives of what the model closes over."""

    def model(y):
        b = numpyro.sample("b", dist.Normal(read(*of), 1.0))
        numpyro.sample("y", dist.Normal(b, 1.0), obs=y)

    return model


def mean(values):
    return sum(values) / len(values)


# -- Nine ways for a prior to read the table ---------------------------------------------------------------------------


class Slots:
    __slots__ = ("values",)

    def __init__(self, values):
        self.values = values


class Study:
    """Holds a table."""

    def __init__(self, table=VALUES):
        self.table, self.__hidden = Settings(ages=table), list(table)

    @property
    def typical(self):
        return mean(self.__hidden)

    def nested(self, y):
        reading(lambda: mean(self.table.ages))(y)

    def by_property(self, y):
        reading(lambda: self.typical)(y)

    def __call__(self, y):
        self.nested(y)

    def __getitem__(self, key):
        return self.table.ages[key]


@dataclasses.dataclass(frozen=True)
class Options:
    scale: float
    tables: dict


@functools.partial(jax.tree_util.register_dataclass, data_fields=("x",), meta_fields=("ages",))
@dataclasses.dataclass
class Tree:
    x: np.ndarray
    ages: tuple


Pair = collections.namedtuple("Pair", "scale ages")
STUDY, NESTED, SLOTS = Study(), Settings(of=Settings(ages=VALUES)), Slots(VALUES)
BY_PERSON = {f"person {k}": value for k, value in enumerate(VALUES)}
RECORDS = [{"age": value} for value in VALUES]


@functools.cache
def cached():
    return mean(VALUES)


class Constant(enum.Enum):
    AGES = tuple(VALUES)


def function_with_a_table():
    return mean(function_with_a_table.ages)


function_with_a_table.ages = VALUES


def imported_within():
    from helpers.elsewhere import AGES

    return mean(AGES)


def with_argument(y, options):
    b = numpyro.sample("b", dist.Normal(mean(options.tables["ages"]), 1.0))
    numpyro.sample("y", dist.Normal(b, 1.0), obs=y)


def with_tree(y, tree):
    b = numpyro.sample("b", dist.Normal(mean(tree.ages), 1.0))
    numpyro.sample("y", dist.Normal(b + tree.x[0], 1.0), obs=y)


def with_callable(y, centre):
    reading(centre)(y)


def with_iterator(y, values):
    b = numpyro.sample("b", dist.Normal(sum(values), 1.0))
    numpyro.sample("y", dist.Normal(b, 1.0), obs=y)


WAYS = {
    "global_list": (reading(lambda: mean(VALUES)), {}, "closes over 'VALUES', a list of length 7"),
    "helper_elsewhere": (reading(lambda: mean_age()), {}, "elsewhere.AGES', a list of length 7"),
    "attribute_of_a_module": (reading(lambda: mean(elsewhere.AGES)), {}, "elsewhere.AGES', a list"),
    "function_of_a_module": (reading(lambda: elsewhere.mean_age()), {}, "elsewhere.AGES', a list"),
    "imported_within": (reading(imported_within), {}, "elsewhere.AGES', a list"),
    "nested_attribute_of_a_global": (reading(lambda: mean(NESTED.of.ages)), {}, "'NESTED.of.ages', a list"),
    "nested_attribute_of_self": (STUDY.nested, {}, "'self.table.ages', a list of length 7"),
    "property_of_self": (STUDY.by_property, {}, "'self._Study__hidden', a list"),
    "callable_object": (STUDY, {}, "'self.table.ages', a list"),
    "operator_of_a_global": (reading(lambda: STUDY[0]), {}, "'STUDY.table.ages', a list"),
    "getattr": (reading(lambda: mean(getattr(NESTED, "of").ages)), {}, "'NESTED.of.ages', a list"),  # noqa: B009
    "attrgetter": (reading(lambda: mean(operator.attrgetter("values")(SLOTS))), {}, "'SLOTS.values', a list"),
    "slots": (reading(lambda: mean(SLOTS.values)), {}, "'SLOTS.values', a list"),
    "argument": (with_argument, {"options": Options(1.0, {"ages": VALUES})}, "'options.tables['ages']', a list"),
    "static_field": (with_tree, {"tree": Tree(np.ones(2), tuple(VALUES))}, "'tree (static)[0]', a tuple of length 7"),
    "callable_argument": (with_callable, {"centre": functools.partial(mean, VALUES)}, "a list of length 7"),
    "method_as_argument": (with_callable, {"centre": lambda: STUDY.typical}, "'STUDY._Study__hidden', a list"),
    "keyword_of_a_partial": (functools.partial(with_callable, centre=mean_age), {}, "elsewhere.AGES', a list"),
    "default_of_a_helper": (reading(lambda ages=VALUES: mean(ages)), {}, "'ages', a list"),
    "cached_helper": (reading(lambda: cached()), {}, "'VALUES', a list"),
    "compiled_helper": (reading(jax.jit(lambda: jnp.asarray(VALUES).mean())), {}, "'VALUES', a list"),
    "mapped_helper": (reading(lambda: jax.vmap(lambda x: x * mean(VALUES))(jnp.ones(1))[0]), {}, "'VALUES', a list"),
    "attribute_of_a_function": (reading(function_with_a_table), {}, "'ages', a list"),
    "dict": (reading(lambda: mean(BY_PERSON.values())), {}, "'BY_PERSON', a dict of length 7"),
    "records": (reading(lambda: mean([r["age"] for r in RECORDS])), {}, "'RECORDS', a list of length 7"),
    "columns": (reading(lambda c: mean(c[0]), (VALUES, VALUES)), {}, "'of[0][0]', a list of length 7"),
    "deque": (reading(lambda d: mean(d), collections.deque(VALUES)), {}, "'of[0]', a deque of length 7"),
    "texts": (reading(lambda t: float(t.count("yes")), ["yes"] * N), {}, "'of[0]', a list of length 7"),
    "array_of_the_library": (
        reading(lambda a: mean(a), array.array("d", VALUES)),
        {},
        "'of[0]', an array of length 7",
    ),
    "frozen_dict": (
        reading(lambda m: mean(m.values()), types.MappingProxyType(BY_PERSON)),
        {},
        "'of[0]', a dict of",
    ),
    "namedtuple": (reading(lambda p: mean(p.ages), Pair(1.0, VALUES)), {}, "'of[0][1]', a list of length 7"),
    "dataclass": (
        reading(lambda o: mean(o.tables["a"]), Options(1.0, {"a": VALUES})),
        {},
        "'of[0].tables['a']', a list",
    ),
    "enumeration": (reading(lambda: mean(Constant.AGES.value)), {}, "'Constant.AGES', a tuple of length 7"),
    "distribution": (
        reading(lambda d: d.mean.mean(), dist.Normal(y, 1.0)),
        {},
        "'of[0].loc', an array of shape (7,)",
    ),
    "generator": (reading(lambda g: sum(g), iter(VALUES)), {}, "reads 'of[0]', an iterator (list_iterator)"),
    "iterator_argument": (with_iterator, {"values": map(float, y)}, "reads 'values', an iterator (map)"),
    "file": (reading(lambda f: float(f.read()), io.StringIO("1")), {}, "reads 'of[0]', an iterator (StringIO)"),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_prior_that_reads_the_table_is_refused(way):
    model, kwargs, message = WAYS[way]
    with pytest.raises(UnsupportedModelError, match=r"pass (it as )?an a") as info:
        separate(model, (y,), kwargs)
    assert message in str(info.value)
    assert "person" not in str(info.value)  # a key of a dict may be a name


def test_the_same_in_release_sum():
    with pytest.raises(ValueError, match="closes over an array as long as the table"):
        release_sum(lambda x: x - mean_age(), y, bound=1.0, eps=1.0)
    values = iter(VALUES)
    with pytest.raises(ValueError, match=r"per_row reads 'values', an iterator \(list_iterator\)"):
        release_sum(lambda x: x - next(values), y, bound=1.0, eps=1.0)
    assert next(values) == VALUES[0]


# -- Near misses -------------------------------------------------------------------------------------------------------

SCALE, NAMES, SHAPES = 2.5, ("a", "b"), [np.ones(3), np.ones(4)]


def plain(y):
    b = numpyro.sample("b", dist.Normal(jnp.log(SCALE) + np.sqrt(2.0), 1.0))
    numpyro.sample("y", dist.Normal(logsumexp(jnp.stack([b, b])), 1.0), obs=y)


class Public:
    """Holds a table, which its model does not read, and public settings."""

    width = 2.0

    def __init__(self):
        self.table, self.prior_sd, self.settings = VALUES, 0.5, Settings(scale=1.5, ages=VALUES)

    def model(self, y):
        b = numpyro.sample("table", dist.Normal(self.settings.scale, self.prior_sd * self.width))
        numpyro.sample("y", dist.Normal(b, 1.0), obs=y)


class Hooked:
    """Running any of this would be noticed."""

    scale = 1.0

    def __getattr__(self, name):
        raise AssertionError("the user's code was run")

    __getattribute__ = __len__ = __iter__ = __getattr__
    shape = property(__getattr__)


HOOKED = Hooked()
NEAR = {
    "constants": (plain, {}, ("SCALE",)),
    "knots_of_another_length": (reading(lambda k: k.sum(), elsewhere.KNOTS), {}, ("of (tuple of 1)",)),
    "an_array_one_longer": (reading(lambda: ARRAY.mean()), {}, ("ARRAY (8,)",)),
    "helper_elsewhere": (reading(lambda: basis(1.0)), {}, ("helpers.elsewhere.KNOTS (5,)", "helpers.elsewhere.WEIGHT")),
    "public_settings": (Public().model, {}, ("self.prior_sd", "self.settings.scale", "self.width")),
    "arrays_of_some_lengths": (reading(lambda: SHAPES[0].sum()), {}, ("SHAPES (list of 2)",)),
    "names": (reading(lambda: float(len(NAMES))), {}, ()),
    "functions": (reading(lambda f: f[0](0.0), [np.sin] * N), {}, ()),
    "distribution": (reading(lambda d: d.mean, dist.Normal(0.0, 1.0)), {}, ()),
    "object_as_argument": (
        with_argument,
        {"options": Options(1.0, {"ages": VALUES[:3]})},
        ("options.tables['ages'] (list of 3)",),
    ),
    "hooks": (
        reading(lambda: 0.0 if HOOKED is None else Hooked.__dict__["scale"]),
        {},
        ("HOOKED.scale", "Hooked.scale"),
    ),
}


@pytest.mark.parametrize("case", NEAR)
def test_what_may_be_public_is_listed(case):
    model, kwargs, names = NEAR[case]
    separated = separate(model, (y,), kwargs)
    assert sorted(separated.closed_over) == sorted(names)


def test_the_report_lists_what_the_model_also_reads():
    """Whether an array that is one longer than the table was computed from it, nobody but the curator knows."""
    model = reading(lambda: ARRAY.mean() + SCALE)
    kernel = DPPenalty(model, eps=1.0, prepare=False, num_iterations=1)
    kernel.init(jax.random.key(0), 0, None, (y,), {})
    assert kernel.privacy.closed_over == ("ARRAY (8,)", "SCALE")
    assert "also reads   the model, as public: ARRAY (8,), SCALE\n" in str(kernel.privacy)
    assert kernel.privacy.to_dict()["closed_over"] == ["ARRAY (8,)", "SCALE"]


# -- The walk ends -----------------------------------------------------------------------------------------------------


def test_objects_that_hold_themselves():
    loop = [1.0]
    loop.append(loop)
    circle = Settings(scale=1.0)
    circle.circle = circle
    found = read_outside(lambda: loop[0] * circle.circle.circle.scale)
    assert listed(found) == ("circle.scale", "loop (list of 2)")


def test_work_is_bounded():
    deep = functools.reduce(lambda inner, _: [inner], range(10_000), [1.0])
    wide = [[float(k)] for k in range(1_000_000)]
    chain = functools.reduce(lambda inner, k: lambda: inner(), range(500), lambda: SCALE)
    assert listed(read_outside(lambda: (deep, wide, chain))) == ("wide (list of 1000000)",)


def test_an_iterator_is_not_used_up():
    values = iter(VALUES)
    read_outside(lambda: next(values))
    assert next(values) == VALUES[0]
