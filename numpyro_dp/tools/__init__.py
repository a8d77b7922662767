"""Beside a run: plan it, rehearse it, audit it, release one more sum."""
