"""The columns that a formula means (its design), with a coding that rests on public ranges and levels alone.

formulaic reads the formula and codes it. It learns levels, knots and centres from the table that it is given first:
that is a made-up one here, which covers what is public evenly. The people's table is coded by what was learned, row by
row: only operations that keep rows apart are allowed in a formula, and of those that learn, one in a factor. (A second
one of the same text, or one inside of another, would learn from whichever table it meets.)
"""

import ast
import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from numpyro_dp.formula.columns import Levels, Public, Range, made_up, quietly, require_public

MADE_UP_ROWS = 5_040  # up to ten levels are equally frequent
_UNARY, _BINARY = "abs cos exp expm1 log log10 log1p log2 sin sqrt tanh", "maximum minimum"
ELEMENTWISE = {name: getattr(np, name) for name in f"{_UNARY} {_BINARY}".split()}
_SPLINES = {"bs": {"df", "degree", "include_intercept", "knots"}} | {
    name: {"df", "knots"} for name in ("cr", "cs", "cc")
}
_LEARNING = _SPLINES | {"poly": {"degree", "raw"}, "center": set(), "scale": set(), "standardize": set()}
"""Codings of formulaic's that learn from the made-up table, with the options that they may have here.

Others would let a row decide: whether a value is beyond a bound, or whether there are enough values.
"""
_CONTRASTS = {"Treatment", "Poly", "Sum", "Helmert", "Diff"}
_FUNCTIONS = {"C", "I", "np", "contr", *_LEARNING, *_CONTRASTS, *ELEMENTWISE}
_ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow)  # `@` adds up over rows
_ALONE = (1, 3)  # so many made-up rows by themselves must be coded as they are among all
_GROUP = re.compile(r"(?:^|\+)\s*\(([^()|]*)\|([^()|]*)\)\s*(?=\+|-|$)")


def formulaic() -> Any:
    """:raises ImportError: with the way out, if it is not installed."""
    try:
        import formulaic
    except ImportError as error:
        raise ImportError("formulas are read by formulaic: pip install 'numpyro_dp[formula]'") from error
    return formulaic


@dataclass(frozen=True)
class Effects:
    """``(terms | group)``.

    :ivar terms: a formula's right-hand side, as written.
    """

    terms: str
    group: str

    def __str__(self) -> str:
        return f"{self.terms}|{self.group}"


def split(formula: str) -> tuple[str, str, list[Effects]]:
    """Outcome, population terms, and effects of groups.

    :raises ValueError: if it is no formula with an outcome.
    """
    if formula.count("~") != 1:
        raise ValueError(f"a formula is 'outcome ~ terms', got {formula!r}")
    outcome, terms = (" ".join(side.split()) for side in formula.split("~"))
    if not (outcome and terms):
        raise ValueError(f"a formula is 'outcome ~ terms', got {formula!r}")
    effects = [Effects(of.strip(), group.strip()) for of, group in _GROUP.findall(terms)]
    rest = _GROUP.sub("", terms).strip().removeprefix("+").strip()
    if "|" in rest:
        raise ValueError(
            f"cannot read {rest!r}: effects of groups are written + (1 | group) or + (0 + x | group), without further "
            "brackets, and one group at a time. With one |, too, effects are independent of one another"
        )
    for effect in effects:
        if not effect.group.isidentifier():
            raise ValueError(f"({effect}): a group is one column; for groups in groups make a column of both names")
        if effect.terms in ("", "0"):
            raise ValueError(f"({effect}): no effect of the group is named; (1 | {effect.group}) has one")
    return outcome, rest or "1", effects


class Design:
    """Columns of numbers for the terms of a formula.

    :ivar names: of the columns, as formulaic names them.
    :ivar center: mean of each over the made-up table, which an intercept makes up for; 0 without one.
    :ivar spread: standard deviation of each over it; 1 for an intercept.
    """

    def __init__(self, terms: str, public: Mapping[str, Public]):
        formula = formulaic().Formula(terms)
        factors = [_Factor(str(factor.expr)) for factor in {factor for term in formula for factor in term.factors}]
        self.columns = sorted({name for factor in factors for name in factor.columns})
        require_public(self.columns, public)
        for factor in factors:
            factor.require_kinds(public)
        self._public = {name: public[name] for name in self.columns}
        template = made_up(self._public, MADE_UP_ROWS)
        with quietly():
            matrix = formula.get_model_matrix(self._frame(template), na_action="ignore", context=ELEMENTWISE)
        self._spec = matrix.model_spec
        values = np.asarray(matrix, float)
        self.names = list(matrix.columns)
        if not (is_finite := np.isfinite(_single(values)).all(0)).all():
            bad = self.names[int(np.argmin(is_finite))]
            raise ValueError(f"{bad} is not finite on all of the public range: narrow the range, or shift the argument")
        for some in _ALONE:
            alone = self.matrix({name: column[:some] for name, column in template.items()}, some)
            if not np.allclose(alone, values[:some], rtol=1e-9, atol=1e-12):
                raise ValueError(
                    f"{terms!r}: not known to keep rows apart. One row is coded otherwise than among others"
                )
        is_constant = np.array([name == "Intercept" for name in self.names], bool)
        means = np.where(np.abs(values.mean(0)) < 1e-12 * np.abs(values).max(0), 0.0, values.mean(0))  # rounding
        self.center = np.where(is_constant, 0.0, means) * is_constant.any()
        self.spread = np.where(is_constant, 1.0, np.sqrt(np.mean((values - self.center) ** 2, 0)))
        if not (values.std(0) + is_constant > 0).all():
            bad = self.names[int(np.argmin(values.std(0) + is_constant))]
            raise ValueError(f"{bad} is the same on all of the public range: leave it out")

    def matrix(self, columns: Mapping[str, np.ndarray], num_rows: int) -> np.ndarray:
        """For coded columns (see `numpyro_dp.formula.columns.code`), shape (n, number of names)."""
        frame = self._frame({name: columns[name] for name in self.columns}, num_rows)
        with quietly():
            try:
                return np.asarray(self._spec.get_model_matrix(frame, context=ELEMENTWISE), float)
            except Exception as error:  # what it says could tell of a row
                kind = type(error).__name__
        raise RuntimeError(f"formulaic could not code the table ({kind}): make these columns beforehand, row by row")

    def _frame(self, columns: Mapping[str, np.ndarray], num_rows: int = MADE_UP_ROWS) -> Any:
        import pandas as pd

        found = {}
        for name, values in columns.items():
            column = self._public[name]
            if isinstance(column, Levels):
                found[name] = pd.Categorical.from_codes(values, categories=list(column.values))
            else:
                found[name] = values
        return pd.DataFrame(found, index=range(num_rows))


def _single(values: np.ndarray) -> np.ndarray:
    with quietly():
        return values.astype(np.float32)


class _Factor:
    """A part of a term, of which it is known that it keeps rows apart.

    :ivar columns: names of those that it uses.
    :raises ValueError: if nothing is known of it.
    """

    def __init__(self, text: str, may_learn: bool = True):
        self.text, self.columns = text, set[str]()
        self._learns = not may_learn  # whether it may no more
        self._kinds: dict[str, type] = {}  # of the columns of which it must be one
        try:
            tree = ast.parse(text, mode="eval").body
        except SyntaxError:
            raise ValueError(f"{text!r} is not the name of a column: rename it to letters, digits and _") from None
        if may_learn and _called(tree) == "C":
            self._read_category(tree)  # type: ignore[arg-type]
        else:
            self._read(tree)
            if not isinstance(tree, ast.Name):
                self._kinds = dict.fromkeys(self.columns, Range)

    def require_kinds(self, public: Mapping[str, Public]) -> None:
        """:raises ValueError: if a category has a range, or a number levels."""
        for name, kind in self._kinds.items():
            if isinstance(public[name], kind):
                continue
            if kind is Levels:
                raise ValueError(f"{self.text}: a category needs levels={{{name!r}: [...]}}, not a range")
            raise ValueError(f"{self.text}: a number needs ranges={{{name!r}: (lowest, highest)}}, not levels")

    def _read(self, node: ast.AST) -> None:
        """Arithmetic with columns and numbers, value by value; and one coding that learns."""
        called = _called(node)
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            return
        if isinstance(node, ast.Name):
            if node.id in _FUNCTIONS:
                raise self._refusal(node.id)
            self.columns.add(node.id)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, _ARITHMETIC):
            self._read(node.left)
            self._read(node.right)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.UAdd, ast.USub)):
            self._read(node.operand)
        elif isinstance(node, ast.Call) and called in {"I", *ELEMENTWISE}:
            if node.keywords or len(node.args) != (2 if called in _BINARY.split() else 1):
                raise self._refusal(ast.unparse(node))
            for part in node.args:
                self._read(part)
        elif isinstance(node, ast.Call) and called in _LEARNING:
            self._read_coding(node, called)
        else:
            raise self._refusal(ast.unparse(node))

    def _read_coding(self, node: ast.Call, called: str) -> None:
        if self._learns:
            raise self._refusal(ast.unparse(node), "only one coding that learns in a factor: write terms, or products")
        options = {option.arg: option.value for option in node.keywords}
        are_constant = all(map(_is_constant, [*node.args[1:], *options.values()]))
        if not (node.args and len(node.args) <= 2 and options.keys() <= _LEARNING[called] and are_constant):
            raise self._refusal(ast.unparse(node), f"options may be {', '.join(sorted(_LEARNING[called])) or 'none'}")
        column = node.args[0]
        if called in _SPLINES and not isinstance(column, ast.Name):  # its values could be beyond the outer knots
            raise self._refusal(ast.unparse(node), f"{called} is of a column, without arithmetic")
        self._learns = True
        self._read(column)

    def _read_category(self, node: ast.Call) -> None:
        options = [*node.args[1:], *(option.value for option in node.keywords if option.arg == "contrasts")]
        are_contrasts = all(_is_contrast(option) for option in options)
        is_column = bool(node.args) and isinstance(node.args[0], ast.Name) and node.args[0].id not in _FUNCTIONS
        if not (is_column and are_contrasts and len(options) == len(node.args) - 1 + len(node.keywords) <= 1):
            raise self._refusal(ast.unparse(node), "C is of a column, with its contrasts: C(arm, contr.sum)")
        name = node.args[0].id  # type: ignore[attr-defined]
        self.columns.add(name)
        self._kinds[name] = Levels

    def _refusal(self, what: str, why: str = "") -> ValueError:
        if _called(ast.parse(what, mode="eval").body) == "offset":
            return ValueError(f"{what!r}: give glm (or FormulaModel) the argument offset='...'")
        allowed = f"A formula may use arithmetic and {', '.join(sorted(_FUNCTIONS - _CONTRASTS - {'np', 'contr'}))}"
        return ValueError(
            f"{what!r} in {self.text!r}: not known to keep rows apart{f' ({why})' if why else ''}. {allowed}; compute "
            "other columns beforehand, row by row"
        )


def _called(node: ast.AST) -> str:
    """The name of the function that is called, without `np`; empty, if none is."""
    if not isinstance(node, ast.Call):
        return ""
    of = node.func
    if isinstance(of, ast.Attribute) and isinstance(of.value, ast.Name) and of.value.id == "np":
        return of.attr if of.attr in ELEMENTWISE else ""
    return of.id if isinstance(of, ast.Name) else ""


def _is_constant(node: ast.AST) -> bool:
    """A number, true or false, or a list of numbers."""
    with contextlib.suppress(ValueError, TypeError):
        value = ast.literal_eval(node)  # type: ignore[arg-type]
        values = value if isinstance(value, list | tuple) else [value]
        return all(type(x) in (int, float, bool) for x in values)
    return False


def _is_contrast(node: ast.AST) -> bool:
    """``contr.sum``, ``contr.treatment(base='b')``, ``Treatment('b')``."""
    if isinstance(node, ast.Call):
        options = [*node.args, *(option.value for option in node.keywords)]
        return _is_contrast(node.func) and all(isinstance(option, ast.Constant) for option in options)
    if isinstance(node, ast.Attribute):
        return isinstance(node.value, ast.Name) and node.value.id == "contr"
    return isinstance(node, ast.Name) and node.id in _CONTRASTS


class Outcome:
    """A column, or arithmetic with one (``log(earnings)``): the left-hand side of a formula, or an offset.

    :ivar text: as written.
    :ivar column: its one column.
    """

    def __init__(self, text: str):
        self.text = " ".join(text.split())
        names = sorted(_Factor(self.text, may_learn=False).columns)
        if len(names) != 1:
            raise ValueError(f"{self.text!r} must be one column, or arithmetic with one")
        (self.column,) = names

    def __call__(self, values: np.ndarray) -> np.ndarray:
        """For the values of the column, value by value."""
        if self.text == self.column:
            return values
        with quietly():
            names = {"__builtins__": {}, "np": np, "I": lambda x: x, **ELEMENTWISE}
            return np.asarray(eval(self.text, names, {self.column: values}), float)

    def require_finite(self, column: Range) -> None:
        """:raises ValueError: if it is not finite on all of the public range."""
        if not np.isfinite(_single(self(np.linspace(*column.ends, MADE_UP_ROWS)))).all():
            raise ValueError(
                f"{self.text} is not finite on all of the public range of {self.column!r}, {column.low!r} to "
                f"{column.high!r}: narrow the range, or shift the argument"
            )
