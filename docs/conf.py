"""The site: README, SECURITY.md, docs/ and notebooks/ where they stand, and the API from the docstrings.

The source folder is the repository's root, so that links between pages are the ones that work in the repository. Built
by the command in CONTRIBUTING.md, where warnings are errors.
"""

import ast
import inspect
import itertools
import re
import textwrap
from pathlib import Path

import numpyro_dp

project = "numpyro_dp"
author = copyright = "The numpyro_dp developers"
version = release = numpyro_dp.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
root_doc = "docs/index"
include_patterns = ["README.md", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md"]
include_patterns += ["docs/*.md", "docs/proofs/*.md", "notebooks/*.ipynb"]
exclude_patterns = [".*", "build", "dist", "demo-output"]  # folders that are not even looked into

reading_order = ["quickstart", "planning", "choosing", "diagnosing", "hierarchical", "prediction", "owners", "papers"]

html_theme = "furo"
html_title = f"numpyro_dp {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False

nb_execution_mode = "off"  # `.ci/run` executes the notebooks in a step of its own
myst_heading_anchors = 4

default_role = "py:obj"  # single backquotes in docstrings; a name without an entry is shown as code
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # docstrings say in words what a union of types would
autodoc_preserve_defaults = True


def split_fields(app, what, name, obj, options, lines: list[str]) -> None:
    """A field that documents several names (``:param eps, delta:``) becomes one for each, as Sphinx knows them."""
    split, waiting = [], []
    for line in [*lines, ""]:
        if not line.startswith(" "):  # what the field before had to say has ended
            split, waiting = split + waiting, []
        field = re.fullmatch(r":(param|ivar) (\w+), (\w+(?:, \w+)*): (.*)", line)
        if field:
            kind, first, others, text = field.groups()
            line = f":{kind} {first}: {text}"
            waiting = [f":{kind} {other}: see `{first}`." for other in others.split(", ")]
        split.append(line)
    lines[:] = split


def show_code(app, what, name, obj, options, lines: list[str]) -> None:
    """An indented block of a docstring that is Python is shown as such; formulas and lists stay quotations."""
    shown = []
    for start, block in itertools.groupby(lines, lambda line: not line or line.startswith("    ")):
        block = list(block)
        code = textwrap.dedent("\n".join(block)).strip()
        before = shown[-1] if shown else ""
        if start and code and not block[0] and "``" not in code and not before.endswith("::") and is_python(code):
            shown += ["", ".. code-block:: python"]
        shown += block
    lines[:] = shown


def is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def list_notebooks(app, docname: str, source: list[str]) -> None:
    """All notebooks that there are, in the order in which they are best read; new ones come last."""
    if docname == root_doc:
        found = sorted(path.stem for path in (Path(app.srcdir) / "notebooks").glob("*.ipynb"))
        ordered = [name for name in reading_order if name in found]
        ordered += [name for name in found if name not in reading_order]
        source[0] = source[0].replace("(all notebooks)", "\n".join(f"/notebooks/{name}" for name in ordered))


def unlink_folders(app, docname: str, source: list[str]) -> None:
    """Links to folders, which a site has no page for, become their text."""
    folder = Path(app.srcdir, docname).parent

    def text_of(link: re.Match) -> str:
        return link[1] if (folder / link[2]).is_dir() else link[0]

    source[0] = re.sub(r"\[([^]]+)\]\(([\w./-]+)\)", text_of, source[0])


def add_public_names_without_a_place(app, docname: str, source: list[str]) -> None:
    """Public names that docs/api.md does not mention yet stand at its end, so that none is ever left out."""
    if docname != "docs/api":
        return
    placed = set(re.findall(r"auto(?:class|function|exception):: numpyro_dp\.(\w+)$", source[0], re.MULTILINE))
    directives = []
    for name in sorted(set(numpyro_dp.__all__) - placed):
        value = getattr(numpyro_dp, name)
        kind = "function" if not inspect.isclass(value) else "exception" if issubclass(value, Exception) else "class"
        directives.append(f".. auto{kind}:: numpyro_dp.{name}\n   :members:\n")
    if directives:
        source[0] += "\n## Further names\n\n```{eval-rst}\n" + "\n".join(directives) + "```\n"


def lead_to_the_front_page(app, exception) -> None:
    """An index.html at the top, as the front page is in docs/."""
    if exception is None and app.builder.format == "html":
        target = f"{root_doc}.html"
        page = f'<!doctype html><meta http-equiv="refresh" content="0; url={target}"><a href="{target}">{project}</a>\n'
        (Path(app.outdir) / "index.html").write_text(page)


def setup(app) -> None:
    app.connect("autodoc-process-docstring", split_fields)
    app.connect("autodoc-process-docstring", show_code)
    app.connect("source-read", unlink_folders)
    app.connect("source-read", list_notebooks)
    app.connect("source-read", add_public_names_without_a_place)
    app.connect("build-finished", lead_to_the_front_page)
