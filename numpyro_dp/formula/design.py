"""The columns that a formula means (its design), with a coding that rests on public ranges and levels alone.

formulaic reads the formula and codes it. It learns levels, knots and centres from the table that it is given first:
that is a made-up one here, which covers what is public evenly. The people's table is coded by what was learned, row by
row: only operations that keep rows apart are allowed in a formula.
"""

import ast
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from numpyro_dp.formula.columns import Levels, Public, made_up, quietly, require_public

MADE_UP_ROWS = 5_040  # up to ten levels are equally frequent
_NAMES = "abs cos exp expm1 log log10 log1p log2 maximum minimum sin sqrt tanh"
ELEMENTWISE = {name: getattr(np, name) for name in _NAMES.split()}
CODINGS = {"C", "I", "bs", "cr", "cs", "cc", "poly", "center", "scale", "standardize"}
"""Those of formulaic that code each row by itself, once they have learned levels, knots and centres."""
_CONTRASTS = {"contr", "Treatment", "Poly", "Sum", "Helmert", "Diff"}
# Not `@`, which adds up over rows.
_ARITHMETIC = (
    ast.Add,
    ast.Sub,
    ast.Mult,
    ast.Div,
    ast.FloorDiv,
    ast.Mod,
    ast.Pow,
    ast.UAdd,
    ast.USub,
)  # not age @ dose
_SYNTAX = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.Constant, ast.Load, ast.keyword, ast.Call, ast.List, ast.Tuple)
_GROUP = re.compile(r"\+?\s*\(([^()|]*)\|([^()|]*)\)")


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
    outcome, terms = (side.strip() for side in formula.split("~"))
    effects = [Effects(terms.strip(), group.strip()) for terms, group in _GROUP.findall(terms)]
    rest = _GROUP.sub("", terms).strip().removeprefix("+").strip()
    if "|" in rest:
        raise ValueError(
            f"cannot read {rest!r}: effects of groups are written + (1 | group) or + (0 + x | group), without further "
            "brackets, and one group at a time"
        )
    for effect in effects:
        if not effect.group.isidentifier():
            raise ValueError(f"({effect}): a group is one column; for groups in groups make a column of both names")
    return outcome, rest or "1", effects


class Design:
    """Columns of numbers for the terms of a formula.

    :ivar names: of the columns, as formulaic names them.
    :ivar center: mean of each over the made-up table, which an intercept makes up for; 0 without one.
    :ivar spread: standard deviation of each over it; 1 for an intercept.
    """

    def __init__(self, terms: str, public: Mapping[str, Public]):
        formula = formulaic().Formula(terms)
        self.columns = sorted(_columns_of(formula))
        require_public(self.columns, public)
        for name in re.findall(r"\bC\(\s*(\w+)", terms):
            if not isinstance(public[name], Levels):
                raise ValueError(f"C({name}): a category needs levels={{{name!r}: [...]}}, not a range")
        self._public = {name: public[name] for name in self.columns}
        template = made_up(self._public, MADE_UP_ROWS)
        with quietly():
            matrix = formula.get_model_matrix(self._frame(template), na_action="ignore", context=ELEMENTWISE)
        self._spec = matrix.model_spec
        values = np.asarray(matrix, float)
        self.names = list(matrix.columns)
        if not np.isfinite(values).all():
            bad = self.names[int(np.argmin(np.isfinite(values).all(0)))]
            raise ValueError(f"{bad} is not finite on all of the public range: narrow the range, or shift the argument")
        is_constant = np.array([name == "Intercept" for name in self.names], bool)
        self.center = np.where(is_constant, 0.0, values.mean(0)) * is_constant.any()
        self.spread = np.where(is_constant, 1.0, values.std(0))
        if not (self.spread > 0).all():
            bad = self.names[int(np.argmin(self.spread))]
            raise ValueError(f"{bad} is the same on all of the public range: leave it out")

    def matrix(self, columns: Mapping[str, np.ndarray], num_rows: int) -> np.ndarray:
        """For coded columns (see `numpyro_dp.formula.columns.code`), shape (n, number of names)."""
        with quietly():
            frame = self._frame({name: columns[name] for name in self.columns}, num_rows)
            return np.asarray(self._spec.get_model_matrix(frame, context=ELEMENTWISE), float)

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


def _columns_of(formula: Iterable[Any]) -> set[str]:
    """Names of the columns that a formula uses.

    :raises ValueError: if it would do anything that may not keep rows apart.
    """
    found = set()
    for factor in {factor for term in formula for factor in term.factors}:
        text = str(factor.expr)
        try:
            tree = ast.parse(text, mode="eval")
        except SyntaxError:
            raise ValueError(f"{text!r} is not the name of a column: rename it to letters, digits and _") from None
        called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        for node in ast.walk(tree):
            found |= _names_in(node, text, called)
    return found


def _names_in(node: ast.AST, text: str, called: set[int]) -> set[str]:
    if isinstance(node, ast.Name):
        if id(node) in called:
            if node.id not in ELEMENTWISE.keys() | CODINGS | _CONTRASTS:
                raise ValueError(_not_allowed(node.id, text))
            return set()
        return set() if node.id in ("np", "contr") else {node.id}
    if isinstance(node, ast.Attribute):
        of = node.value.id if isinstance(node.value, ast.Name) else None
        if not (of == "contr" or (of == "np" and node.attr in ELEMENTWISE)):
            raise ValueError(_not_allowed(ast.unparse(node), text))
        return set()
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CODINGS:
        # Knots, degrees and levels are constants: those that a column gave would be made of all rows.
        for option in (*node.args[1:], *node.keywords):
            if any(isinstance(part, ast.Name) and part.id not in _CONTRASTS for part in ast.walk(option)):
                raise ValueError(_not_allowed(ast.unparse(option), text))
    if not isinstance(node, (*_ARITHMETIC, *_SYNTAX)):
        raise ValueError(_not_allowed(type(node).__name__.lower(), text))
    return set()


def _not_allowed(what: str, text: str) -> str:
    return (
        f"{what!r} in {text!r}: not known to keep rows apart. A formula may use arithmetic and "
        f"{', '.join(sorted(CODINGS | ELEMENTWISE.keys()))}; compute other columns beforehand, row by row"
    )


class Outcome:
    """The left-hand side of a formula: a column, or arithmetic with one (``log(earnings)``).

    :ivar text: as written.
    :ivar column: its one column.
    """

    def __init__(self, text: str):
        (term,) = formulaic().Formula(f"0 + I({text})")
        names = sorted(_columns_of([term]))
        called = {node.func for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)}
        codings = CODINGS & {node.id for node in called if isinstance(node, ast.Name)}
        if len(names) != 1 or codings:
            raise ValueError(f"the outcome {text!r} must be one column, or arithmetic with one")
        self.text, (self.column,) = text, names

    def __call__(self, values: np.ndarray) -> np.ndarray:
        """For the values of the column, row by row."""
        if self.text == self.column:
            return values
        with quietly():
            names = {"__builtins__": {}, "np": np, **ELEMENTWISE}
            return np.asarray(eval(self.text, names, {self.column: values}), float)
