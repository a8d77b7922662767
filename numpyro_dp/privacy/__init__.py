"""The trusted core: if what is in this folder is right, eps holds, whatever the rest of the package does.

It imports nothing else of the package (a contract in `pyproject.toml`, checked in CI).
"""
