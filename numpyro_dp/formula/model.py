"""`FormulaModel`: a formula as a plain NumPyro model, whose text can be read, copied and changed."""

import keyword
import linecache
import math
import re
import unicodedata
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from numpyro_dp.formula.columns import (
    Levels,
    Public,
    Range,
    are_missing,
    code,
    describe,
    names_of,
    num_rows_of,
    numbers,
    quietly,
    read,
    require_each_once,
    require_public,
)
from numpyro_dp.formula.design import Design, Effects, Outcome, split
from numpyro_dp.formula.families import CAN_BE, CANNOT_BE, FAMILIES, Family, law_refuses, predictor_scale

_OTHER_NAMES = {
    "binomial": "bernoulli",
    "logistic": "bernoulli",
    "normal": "gaussian",
    "negbinomial": "negative_binomial",
}


class FormulaModel:
    """A NumPyro model that is made of a formula and of what is public about the columns.

        model = FormulaModel("visits ~ age + C(sex) + (1 | clinic)", "poisson", ranges={"age": (0, 100)}, levels=...)
        print(model)  # a plain NumPyro model
        mcmc = MCMC(DPHMC(model, eps=1.0), num_warmup=500, num_samples=1000)
        mcmc.run(jax.random.key(0), **model.arguments(data))

    Nothing in it comes from a table: levels, knots of splines and centres are those of the public ranges. Columns are
    centred at the middle of what is public, so `Intercept` is for somebody there. Effects of a group are normal and
    independent of one another.

    :param formula: outcome, terms as formulaic reads them, and effects of groups, ``(1 | clinic)`` or
        ``(age | clinic)``.
    :param family: one of `numpyro_dp.formula.families.FAMILIES`.
    :param ranges: for each column of numbers or dates, (lowest, highest); a row with a value outside says nothing. That
        of the outcome, which families with a scale of their own need (``gaussian``, ``gamma``), says how wide priors
        are; outcomes may lie outside.
    :param levels: for each column of categories, groups included, its values; a row with another one says nothing.
    :param offset: arithmetic with columns that is added to the linear predictor, such as ``log(years)``.
    :param unit: a column that tells whose each row is, which is public here. Effects of it, ``(1 | person)``, are each
        person's.
    :raises ValueError: if the formula uses what may mix rows, or a column about which nothing is public.
    :ivar source: the model's text.
    :ivar columns: of the table, that it needs; the outcome's is the last.
    """

    def __init__(
        self,
        formula: str,
        family: str = "gaussian",
        *,
        ranges: Mapping[str, Sequence] | None = None,
        levels: Mapping[str, Sequence] | None = None,
        offset: str | None = None,
        unit: str | None = None,
    ):
        if not isinstance(formula, str):
            raise TypeError(f"formula must be a text, 'outcome ~ terms', got a {type(formula).__name__}")
        family = _OTHER_NAMES.get(family, family)
        if family not in FAMILIES:
            raise ValueError(
                f"family must be one of {', '.join(FAMILIES)}, got {family!r}. For another law, or censored outcomes, "
                "change the text of a model that is near: print(FormulaModel(...))"
            )
        self.formula, self.family, self.unit = formula, family, unit
        self._public = describe(ranges, levels)
        _require_printable(self._public, formula, offset or "")
        outcome, terms, self._effects = split(formula)
        self._outcome = Outcome(outcome)
        self._design = Design(terms, self._public)
        self._designs = [Design(effect.terms, self._public) for effect in self._effects]
        self._offset = None if offset is None else Outcome(offset)
        self._check()
        self._require_names()
        self.source = "\n".join(self._lines())
        sites = re.findall(r'numpyro\.(?:sample|plate)\("([^"]+)"', self.source)
        if twice := sorted({name for name in sites if sites.count(name) > 1}):
            raise ValueError(f"rename column {twice[0]!r}: the model has something else of that name")
        self._function = _compiled(self.source)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._function(*args, **kwargs)

    @property
    def __signature__(self) -> Any:
        import inspect

        return inspect.signature(self._function)

    def __str__(self) -> str:
        return self.source

    def __repr__(self) -> str:
        return f"FormulaModel({self.formula!r}, {self.family!r})"

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_function": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._function = _compiled(self.source)

    @property
    def tells_num_units(self) -> bool:
        """Whether its arguments have the number of units in a table, as public."""
        return self._has_unit_effects

    @property
    def _law(self) -> Family:
        return FAMILIES[self.family]

    @property
    def columns(self) -> list[str]:
        used = {*self._design.columns, *(name for design in self._designs for name in design.columns)}
        used |= {effect.group for effect in self._effects} | ({self.unit} if self.unit else set())
        used |= {self._offset.column} if self._offset else set()
        return [*sorted(used - {self._outcome.column}), self._outcome.column]

    def _check(self) -> None:
        groups = [effect.group for effect in self._effects if effect.group != self.unit]
        require_public(groups, self._public)
        for group in groups:
            if not isinstance(self._public[group], Levels):
                raise ValueError(f"(... | {group}): give levels={{{group!r}: [...]}}, not a range")
        if self._offset is not None:
            require_public([self._offset.column], self._public)
            of_offset = self._public[self._offset.column]
            if not isinstance(of_offset, Range):
                raise ValueError(f"offset {self._offset.text!r}: a number needs a range, not levels")
            self._offset.require_finite(of_offset)
        column, law = self._outcome.column, self._law
        given = self._public.get(column)
        if law.has_levels and not isinstance(given, Levels):
            raise ValueError(f"family {self.family!r} needs the outcome's levels: levels={{{column!r}: [...]}}")
        if (law.is_identity or law.outcomes == "positive") and not isinstance(given, Range):
            raise ValueError(
                f"family {self.family!r} needs a public range of the outcome, by which priors are made: "
                f"ranges={{{column!r}: (lowest, highest)}}, from the codebook and not from the table"
            )
        if "Intercept" in self.columns:
            raise ValueError("rename column 'Intercept': formulas have a constant of that name")
        if without := [str(e) for e, design in zip(self._effects, self._designs, strict=True) if not design.names]:
            raise ValueError(f"({without[0]}): no effect of the group is left")
        if isinstance(given, Levels) and self._outcome.text != column:
            raise ValueError(f"the outcome {self._outcome.text!r} is arithmetic, but {column!r} has levels")
        if isinstance(given, Levels) and not law.has_levels and (self.family != "bernoulli" or len(given.values) != 2):
            raise ValueError(f"the outcome {column!r} has levels, but the family is {self.family!r}")
        if not law.has_intercept and "Intercept" not in self._design.names:
            raise ValueError(f"family {self.family!r}: leave '0 +' out; the cut points are the intercepts")
        names = [effect.group for effect in self._effects]
        if len(set(names)) != len(names):
            raise ValueError(f"write all effects of a group in one bracket: {self.formula!r}")
        if self._law.is_multiple and (self._effects or self._offset):
            raise ValueError(
                "family 'categorical' with effects of groups or an offset: write the model (print(FormulaModel(...)))"
            )

    def _require_names(self) -> None:
        """:raises ValueError: if two parts of the text would have one name."""
        names = [_name(effect.group) for effect in self._effects]
        made = [f"X_{name}" for name in names]
        for name, design in zip(names, self._designs, strict=True):
            made += [
                f"{name}_sd",
                *(f"{name}_{what}{k}" for what in ("sd", "effect") for k in range(len(design.names))),
            ]
        if clash := sorted(set(made) & {*names, _name(self.unit or "")}):
            raise ValueError(f"rename column {clash[0]!r}: the model has something else of that name")

    # -- The model's text --------------------------------------------------------------------------------------------

    def _lines(self) -> list[str]:
        law, column = self._law, self._outcome.column
        given = self._public.get(column)
        ends = None
        if isinstance(given, Range):
            ends = tuple(float(end) for end in self._outcome(np.asarray(given.ends, float)))
            if not (np.isfinite(ends).all() and ends[0] < ends[1]):
                raise ValueError(
                    f"{self._outcome.text} is not finite, or falls, on the range {given.low:g} to {given.high:g} of "
                    f"{column!r}: narrow the range"
                )
            if law.outcomes in ("counts", "positive") and not ends[1] > 0:
                raise ValueError(f"family {self.family!r}: the range of {column!r} must reach above 0")
        middle, scale = predictor_scale(law, ends)  # type: ignore[arg-type]
        num_levels = len(given.values) if isinstance(given, Levels) else 2
        arguments = ["X", *(_name(effect.group) for effect in self._effects)]
        with_slopes = [e for e, d in zip(self._effects, self._designs, strict=True) if d.names != ["Intercept"]]
        arguments += [f"X_{_name(effect.group)}" for effect in with_slopes]
        arguments += ["offset"] if self._offset else []
        if self.unit and not self._has_unit_effects:
            arguments.append(self.unit_argument)
        arguments += ["observed=True", "y=None"] + (["num_units=1"] if self._has_unit_effects else [])
        lines = [f"def model({', '.join(arguments)}):", f'    """{_site(self.formula)}, {self.family}']
        if names := [self._design.names[k] for k in self._in_x]:
            is_centred = bool(self._design.center.any())
            lines += ["", f"    Columns of X{', less their means over the public ranges' * is_centred}:"]
            lines += [f"    {_site(name)}{f' - {_exact(at)}' if at else ''}" for name, at in self._centers(names)]
        lines += ['    """'] if names else []
        lines[-1] += "" if names else '"""'
        offset, reach = self._place_of_offset()
        lines += self._population_lines(middle - offset, scale, math.hypot(2.5 * scale, reach), num_levels)
        for effect, design in zip(self._effects, self._designs, strict=True):
            lines += self._effect_lines(effect, design, scale)
        if self._offset:
            lines.append(f"    eta = eta + offset  # {self._offset.text}")
        lines += [f"    {line.format(scale=_short(scale), levels=num_levels)}" for line in law.priors]
        lines += ['    with numpyro.plate("rows", X.shape[0]), numpyro.handlers.mask(mask=observed):']
        return [*lines, f'        numpyro.sample("{column}", {law.likelihood}, obs=y)']

    def _place_of_offset(self) -> tuple[float, float]:
        """The middle of the offset over its public range, and how far it is from there to the ends."""
        if self._offset is None:
            return 0.0, 0.0
        low, high = self._offset(np.asarray(self._public[self._offset.column].ends, float))  # type: ignore[union-attr]
        return (low + high) / 2, abs(high - low) / 2

    @property
    def unit_argument(self) -> str:
        """The name of the model's argument that says whose a row is."""
        return _name(self.unit or "")

    @property
    def _has_unit_effects(self) -> bool:
        return any(effect.group == self.unit for effect in self._effects)

    def _population_lines(self, middle: float, scale: float, width: float, num_levels: int) -> list[str]:
        """:param width: how far from `middle` the predictor's level may be, as a standard deviation."""
        law, design, of_x = self._law, self._design, self._in_x
        each = f".expand([{num_levels - 1}]).to_event(1)" if law.is_multiple else ""
        lines, terms = [], []
        if "Intercept" in design.names and law.has_intercept:
            prior = f"dist.Normal({_exact(middle)}, {_short(width)}){each}"
            lines.append(f'    intercept = numpyro.sample("Intercept", {prior})')
            terms.append("intercept")
        if len(of_x):
            # Where no intercept says where outcomes are, the coefficients must reach there.
            reach = 2.5 * scale if "Intercept" in design.names else math.hypot(width, middle)
            lines.append("    slopes = [")
            for k in of_x:
                prior = f"dist.Normal(0.0, {_short(reach / design.spread[k])}){each}"
                lines.append(f'        numpyro.sample("{_site(design.names[k])}", {prior}),')
            lines.append("    ]")
            terms.append("X @ jnp.stack(slopes)")
        else:
            terms.append(f"jnp.zeros((X.shape[0], {num_levels - 1}))" if law.is_multiple else "jnp.zeros(X.shape[0])")
        return [*lines, f"    eta = {' + '.join(terms)}"]

    @property
    def _in_x(self) -> np.ndarray:
        """Columns of the design that are columns of `X`: all but the intercept."""
        return np.array([k for k, name in enumerate(self._design.names) if name != "Intercept"], int)

    def _centers(self, names: Sequence[str]) -> list[tuple[str, float]]:
        centers = dict(zip(self._design.names, self._design.center, strict=True))
        return [(name, centers[name]) for name in names]

    def _effect_lines(self, effect: Effects, design: Design, scale: float) -> list[str]:
        group = _name(effect.group)
        of_unit = effect.group == self.unit
        size = "num_units" if of_unit else str(len(self._public[effect.group].values))  # type: ignore[union-attr]
        lines, effects = [], []
        for k, name in enumerate(design.names):
            site = f"{'1' if name == 'Intercept' else _site(name)}|{effect.group}"
            sd = f"{group}_sd{k}" if len(design.names) > 1 else f"{group}_sd"
            prior = _short(2.5 * scale / design.spread[k])
            lines.append(f'    {sd} = numpyro.sample("{site}_sigma", dist.HalfNormal({prior}))')
            effects.append((site, sd))
        lines.append(f'    with numpyro.plate("{self._plate(effect.group)}", {size}):')
        for k, (site, sd) in enumerate(effects):
            lines.append(f'        {group}_effect{k} = numpyro.sample("{site}", dist.Normal(0.0, {sd}))')
        of_x = [k for k, name in enumerate(design.names) if name != "Intercept"]
        for k, name in enumerate(design.names):
            times = "" if name == "Intercept" else f" * X_{group}[:, {of_x.index(k)}]"
            lines.append(f"    eta = eta + {group}_effect{k}[{group}]{times}")
        return lines

    def _plate(self, group: str) -> str:
        taken = {"rows", self._outcome.column, *self._design.names}
        return f"{group}_" if group in taken else group

    @property
    def coords(self) -> dict[str, list]:
        """Names of groups, by dimension of the posterior; `numpyro_dp.to_arviz` uses them."""
        groups = [effect.group for effect in self._effects if effect.group != self.unit]
        return {self._plate(group): list(self._public[group].values) for group in groups}  # type: ignore[union-attr]

    # -- Its arguments -----------------------------------------------------------------------------------------------

    def arguments(self, data: Any) -> dict[str, Any]:
        """The model's arguments for a table, or for public people: without the outcome, if `data` have none.

        A row in which a value is missing is masked. One with a value that was not said to be public (outside of its
        range, not among the levels), or that the law cannot have, gets an outcome that no law has: it says nothing
        either, but noisy counts see it, and the posterior is not vouched for where there are many (where NumPyro
        validates values: before 0.22, or without validation, it is masked). Without an outcome ``observed`` tells of
        both, and a warning says that there are such rows.

        :param data: a pandas, Polars or Arrow table, a mapping from names to arrays, or a `numpyro_dp.scan`, whose rows
            are coded in each pass.
        :raises ValueError: if a column is missing or of another length, or if the outcome is of texts or
            categories without `levels`.
        """
        if callable(getattr(data, "computed", None)):  # a column of that name is not
            return self._streamed_arguments(data)
        has_outcome = self._outcome.column in names_of(data)
        if has_outcome:
            self._check_type_of_outcome(_type_of(data[self._outcome.column]))
        found: dict[str, Any] = self._arguments_of_rows(data)
        if self.unit:
            units = _units(self.unit, read(data, [self.unit])[self.unit])
            if len(units) != len(found["observed"]):
                raise ValueError(f"columns {self.unit!r} and {self.columns[-1]!r} are not of the same length")
            found[self.unit_argument] = units
            if self._has_unit_effects:
                found["num_units"] = int(units.max(initial=-1)) + 1
        if not has_outcome and not found["observed"].all():
            warnings.warn(
                "some rows have a missing value, or one that was not said to be public (outside of its range, not "
                "among the levels): what is predicted for them is for somebody in the middle of the range, of the "
                "first level. The argument `observed` is False for them",
                stacklevel=2,
            )
        return found

    def _streamed_arguments(self, table: Any) -> dict[str, Any]:
        """`arguments` for a table that is read in pieces: each of its rows is coded by itself, wherever it is read."""
        require_each_once(self.columns, table.column_names)
        self._check_type_of_outcome(str(table.type_of(self._outcome.column)))
        of_rows = [name for name in self.columns if name != self.unit]
        one_row: dict[str, Any] = {name: [1.0] for name in of_rows}
        for name, column in self._public.items():
            one_row[name] = [column.low if isinstance(column, Range) else column.values[0]]
        found = dict(table.computed(of_rows, self._arguments_of_rows, self._arguments_of_rows(one_row)))
        if self.unit:
            units = table.unit(self.unit)
            found[self.unit_argument] = units
            if self._has_unit_effects:
                found["num_units"] = units.num_units
        return found

    def _arguments_of_rows(self, data: Any) -> dict[str, np.ndarray]:
        """The arguments that have an entry for each row, but for whose it is."""
        has_outcome = self._outcome.column in names_of(data)
        wanted = [name for name in self.columns if name != self.unit and (has_outcome or name != self.columns[-1])]
        table = read(data, wanted)
        num_rows = len(next(iter(table.values()))) if table else num_rows_of(data)
        silent = _Silent(num_rows)
        coded = {
            name: silent.code(table[name], self._public[name])
            for name in {name for design in (self._design, *self._designs) for name in design.columns}
        }
        found: dict[str, Any] = {}
        for effect, design in zip(self._effects, self._designs, strict=True):
            name = _name(effect.group)
            if effect.group != self.unit:
                found[name] = silent.code(table[effect.group], self._public[effect.group])
            if design.names != ["Intercept"]:
                found[f"X_{name}"] = silent.finite(_columns(design, coded, num_rows))
        if self._offset:
            values = silent.code(table[self._offset.column], self._public[self._offset.column])
            found["offset"] = silent.finite(self._offset(values))
        found["X"] = silent.finite(_columns(self._design, coded, num_rows))
        if has_outcome:
            found["y"] = self._outcomes(table[self._outcome.column], silent)
        says_nothing = silent.missing if has_outcome and self._refuses_outcomes() else silent.missing | silent.outside
        found["observed"] = ~says_nothing
        return {name: _narrow(value) for name, value in found.items()}

    def _check_type_of_outcome(self, kind: str) -> None:
        """By the column's type, which is public. What the values are, may follow from one row."""
        column, kind = self._outcome.column, kind.lower()
        if isinstance(self._public.get(column), Levels):
            return
        levels = f"`levels={{{column!r}: ['no', 'yes']}}` (the second counts as 1)"
        of_texts = kind.startswith(("<u", "str", "large_string"))
        if of_texts or kind.startswith(("categor", "enum", "dictionary")):
            what = "texts" if of_texts else "categories"
            raise ValueError(f"the outcome {column!r} is a column of {what}: say which there are, {levels}")
        if kind == "object":
            warnings.warn(
                f"the outcome {column!r} is a column of objects. Texts among them say nothing, and cost as much: "
                f"say which there are, {levels}, or make it a column of numbers",
                stacklevel=3,
            )

    def _refuses_outcomes(self) -> bool:
        """Whether what stands for an outcome that the law cannot have has no density: NaN never has."""
        has_levels = isinstance(self._public.get(self._outcome.column), Levels)
        return (not has_levels and math.isnan(CANNOT_BE.get(self._law.outcomes, -1))) or law_refuses()

    def _outcomes(self, values: np.ndarray, silent: "_Silent") -> np.ndarray:
        """What the law can have; of rows that are outside, something that it cannot."""
        column, law = self._outcome.column, self._law
        given: Public | None = self._public.get(column)
        if isinstance(given, Levels):
            coded = silent.code(values, given)
            return np.where(silent.is_outside, len(given.values), coded)
        silent.missing |= are_missing(values)
        values = self._outcome(numbers(values))
        with quietly():
            possible = CAN_BE[law.outcomes](values.astype(np.float32).astype(float))  # as the model meets them
            possible &= CAN_BE[law.outcomes](values)
        silent.outside |= ~possible
        harmless = np.where(possible, values, 0.5)
        if law.outcomes in ("counts", "yes or no"):
            harmless = harmless.astype(np.int64)
        return np.where(silent.is_outside, CANNOT_BE[law.outcomes], harmless)


def _type_of(column: Any) -> str:
    return str(getattr(column, "dtype", getattr(column, "type", "")))


class _Silent:
    """Which rows of a table say nothing.

    :ivar missing: where a value is missing.
    :ivar outside: where one is not what was said to be public.
    """

    def __init__(self, num_rows: int):
        self.missing, self.outside = np.zeros(num_rows, bool), np.zeros(num_rows, bool)

    @property
    def is_outside(self) -> np.ndarray:
        return self.outside & ~self.missing

    def code(self, values: np.ndarray, column: Public) -> np.ndarray:
        found = code(values, column)
        self.missing |= found.missing
        self.outside |= found.outside
        return found.values

    def finite(self, values: np.ndarray) -> np.ndarray:
        """In single precision; 0 where it is not finite."""
        with quietly():
            single = values.astype(np.float32)
        is_finite = np.isfinite(single)
        self.outside |= ~is_finite.all(tuple(range(1, single.ndim)))
        return np.where(is_finite, single, np.float32(0))


def _require_printable(public: Mapping[str, Public], *texts: str) -> None:
    """:raises ValueError: if something could not become a part of the model's text."""
    names = [*(" ".join(text.split()) for text in texts), *public]
    levels = [str(value) for column in public.values() if isinstance(column, Levels) for value in column.values]
    for text in names + levels:
        if not text.isprintable():
            raise ValueError(f"{text!r}: use printable characters, in one line")
    for text in names:
        if (usual := unicodedata.normalize("NFKC", text)) != text:
            raise ValueError(f"{text!r}: Python reads it as {usual!r} (NFKC). Write that, and rename the column")


def _compiled(source: str) -> Callable:
    """The function, whose lines tracebacks show."""
    import jax
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist

    name = f"<formula {hash(source):x}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    names: dict[str, Any] = {"jax": jax, "jnp": jnp, "numpyro": numpyro, "dist": dist}
    exec(compile(source, name, "exec"), names)
    return names["model"]


def _units(name: str, ids: np.ndarray) -> np.ndarray:
    """0, 1, 2, ..., in the order in which they come.

    :raises ValueError: if one is missing: nobody knows whose row that is.
    """
    import pandas as pd

    if are_missing(ids).any():
        raise ValueError(
            f"unit={name!r}: some rows have no id there, and nobody knows whose they are. Leave these rows out, or "
            "give each an id of its own"
        )
    return pd.factorize(ids)[0].astype(np.int32)


_TAKEN = {"X", "y", "offset", "observed", "num_units", "jax", "jnp", "numpyro", "dist", "model"} | {
    *("eta", "slopes", "intercept", "sigma", "df", "shape", "precision", "concentration", "first", "cuts")
}


def _name(column: str) -> str:
    """Of an argument."""
    return f"{column}_" if column in _TAKEN or keyword.iskeyword(column) else column


def _site(name: str) -> str:
    return re.sub(r'["\\]', "'", name)


def _short(value: float) -> str:
    return _with_point(f"{float(value):.4g}")


def _exact(value: float) -> str:
    return _with_point(f"{float(value):.12g}")


def _with_point(text: str) -> str:
    return text if any(mark in text for mark in ".en") else f"{text}.0"


def _columns(design: Design, coded: Mapping[str, np.ndarray], num_rows: int) -> np.ndarray:
    """The design less its centres, without the intercept."""
    of_x = [k for k, name in enumerate(design.names) if name != "Intercept"]
    return (design.matrix(coded, num_rows) - design.center)[:, of_x]


def _narrow(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    return value if value.dtype == bool else value.astype(np.float32 if value.dtype.kind == "f" else np.int32)
