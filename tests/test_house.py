"""Modules know of one another what is public: no private name of another file, but for these. And what is imported."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "numpyro_dp"
FILES = sorted(PACKAGE.rglob("*.py"))
NAMEDTUPLE = {"_replace", "_fields", "_asdict"}

ALLOWED = {
    "arviz.py": {"_args", "_kwargs"},  # of NumPyro's MCMC
    "model/latents.py": {"_mask"},  # of NumPyro's MaskedDistribution, which tells it nobody else
    "privacy/release.py": {"_mechanism", "_with", "_take", "_take_one", "_closed", "_opened"},  # of draws.py: one lock
    "tools/auditing.py": {"_ledger", "_noise"},  # it puts a ledger of its own in the place of the kernel's
}


def foreign_private_names(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    nodes = list(ast.walk(tree))
    imported = {name.name for node in nodes if isinstance(node, ast.ImportFrom) for name in node.names}
    mine = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    attributes = [(node, ast.unparse(node.value)) for node in nodes if isinstance(node, ast.Attribute)]
    mine |= {node.attr for node, of in attributes if isinstance(node.ctx, ast.Store) and of in ("self", "cls", "own")}
    mine |= {node.target.id for node in nodes if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
    used = {node.attr for node, of in attributes if of not in ("self", "cls", "super()")}
    private = {name for name in imported | (used - mine) if name.startswith("_") and not name.startswith("__")}
    return private - NAMEDTUPLE


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_private_name_of_another_module(path):
    assert foreign_private_names(path) <= ALLOWED.get(str(path.relative_to(PACKAGE)), set())


def test_a_private_name_would_be_seen(tmp_path):
    file = tmp_path / "module.py"
    file.write_text("from numpyro_dp.privacy.noise import _quantile\n\ndef read(ledger):\n    return ledger._plan\n")
    assert foreign_private_names(file) == {"_quantile", "_plan"}


def attributes_of(tree):
    """Of each class: its bases, and what its methods assign to `self`."""
    found = {}
    for of in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        stored = {node.attr for node in ast.walk(of) if isinstance(node, ast.Attribute) and is_stored(node)}
        found[of.name] = [base.id for base in of.bases if isinstance(base, ast.Name)], stored
    return found


def is_stored(node):
    return isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name) and node.value.id == "self"


def shared_attributes(classes, name):
    """Private attributes of a class that one of its bases has, too, under the same name."""
    above, todo = set(), list(classes[name][0])
    while todo:
        if (base := todo.pop()) in classes and base != name:
            above |= classes[base][1]
            todo += classes[base][0]
    return {attribute for attribute in classes[name][1] & above if attribute.startswith("_")}


def test_no_class_keeps_something_else_under_a_name_of_its_base():
    classes = {}
    for path in FILES:
        classes |= attributes_of(ast.parse(path.read_text()))
    found = {name: shared for name in classes if (shared := shared_attributes(classes, name))}
    assert found == {"_Repeated": {"_spent"}}  # a ledger that forgets what it has spent, for audits


def test_a_name_that_is_kept_twice_would_be_seen():
    text = "class A:\n  def f(self):\n    self._x = 1\n\nclass B(A):\n  def g(self):\n    self._x, self.y = 2, 3\n"
    assert shared_attributes(attributes_of(ast.parse(text)), "B") == {"_x"}


def test_what_few_need_is_imported_on_demand():
    """ArviZ and Matplotlib take seconds, `scipy.stats` half of one; dp_accounting is an extra."""
    late = {"arviz", "dp_accounting", "matplotlib", "pandas", "xarray", "funsor", "scipy.stats"}
    code = f"import sys, numpyro_dp; print(sorted({late} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]", found.stdout
