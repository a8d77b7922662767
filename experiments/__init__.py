"""The experiments of the papers that this package comes from, and what this package does on them.

python -m experiments --list
"""
