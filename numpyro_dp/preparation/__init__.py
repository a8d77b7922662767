"""The default: where the posterior is found privately, and the likelihood is released once.

`begin` reads the model, without a look at the table; `prepare` asks the table. In it, `search` finds a frame in which
the posterior is about normal; `last_release` spends the bulk of the budget there, and makes a `surrogate` of the
likelihood; after a `last_look`, `verdict` says whether released numbers vouch for it. `chains` draws from it, or walks.
Each look at the rows is one of `survey`, which adds up what `row_scores` says of each. The `fund` pays.
"""

from numpyro_dp.preparation.options import MODES, Preparation

__all__ = ["MODES", "Preparation"]
