"""Each public name of the trusted core is on a page that proves what is claimed; each page names tests that exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE = sorted(path for path in (ROOT / "numpyro_dp" / "privacy").glob("*.py") if path.name != "__init__.py")
PAGES = sorted(path for path in (ROOT / "docs" / "proofs").glob("*.md") if path.name != "index.md")


@pytest.mark.parametrize("path", CORE, ids=lambda path: path.stem)
def test_each_public_name_of_the_core_is_on_a_page_that_its_module_names(path):
    tree = ast.parse(path.read_text())
    named = re.findall(r"docs/proofs/\w+\.md", ast.get_docstring(tree).rsplit("Proof", 1)[1])
    assert named
    text = " ".join((ROOT / page).read_text() for page in named)
    definitions = (ast.FunctionDef, ast.ClassDef)
    public = {node.name for node in tree.body if isinstance(node, definitions) and not node.name.startswith("_")}
    assert not {name for name in public if not re.search(rf"`(\w+\.)?{name}(\.\w+)?`", text)}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_each_page_says_what_is_claimed_what_is_assumed_why_it_holds_and_what_would_fail(path):
    text = path.read_text()
    assert [
        part
        for part in ("**Claim.**", "**Assumptions.**", "**Proof", "**Where.**", "**What would fail.**")
        if part not in text
    ] == []
    files = re.findall(r"`((?:numpyro_dp|tests)/[\w/]+\.py)`", text)
    assert len(files) > 1
    assert [file for file in files if not (ROOT / file).exists()] == []
    links = re.findall(r"\]\((\w+\.md)\)", text)
    assert [link for link in links if not (path.parent / link).exists()] == []
    assert path.stem in (path.parent / "index.md").read_text()
