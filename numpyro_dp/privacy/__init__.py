"""The trusted core: eps rests on this folder, and on the four things outside of it that SECURITY.md names.

It imports nothing else of the package (a contract in `pyproject.toml`, checked in CI).
"""
