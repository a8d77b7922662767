"""What the user asks of a kernel: checked once, without a table, and frozen."""

import dataclasses
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpyro.infer.initialization import init_to_median

from numpyro_dp.model.units import without_names
from numpyro_dp.privacy.batches import Batches, FixedBatches, as_batches, shareable
from numpyro_dp.privacy.clipping import OwnerIndex
from numpyro_dp.privacy.mechanisms import check_relation, size_is_public
from numpyro_dp.privacy.release import Exchange

DEFAULT_CLIP = 1.0
"""For rows whose log densities have slopes of about 1 in unconstrained space; the report says where it was used."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Settings:
    """Arguments of a kernel. `KernelOptions` and `MetropolisOptions` tell what those of all kernels mean.

    :param noise_multipliers: of each kind of release, where they were given instead of `eps`.
    :param clips: of each kind; None where the user has given none.
    :param shares: of each kind in the budget.
    :param batch_size: what the user has given.
    :param shared: eps and delta of the `PrivacyBudget` that the run is charged to.
    :param seed_is_short: whether the noise has a seed that can be found by trying.
    :ivar default_clips: for which kinds `DEFAULT_CLIP` took the place of the user's.
    :ivar batches: what `batch_size` means.
    """

    model: Callable
    eps: float | None
    delta: float | None
    noise_multipliers: Mapping[str, float | None]
    clips: Mapping[str, Any]
    shares: Mapping[str, float] = dataclasses.field(default_factory=dict)
    batch_size: "float | Batches | None" = None
    step_size: Any = None
    power: float = 1.0
    n0: float | None = None
    neighboring_relation: str = "replace_one"
    num_iterations: int | None = None
    num_chains: int = 1
    inverse_mass_matrix: Any = None
    dense_mass: bool = False
    adapt_step_size: bool = True
    adapt_mass_matrix: bool = False
    target_accept_prob: float = 0.5
    init_strategy: Callable | None = None
    row_plate: str | None = None
    private_args: Sequence[str] | None = None
    unit: Any = None
    max_rows_per_unit: int | None = None
    owners: "OwnerIndex | Exchange | None" = None
    shared: tuple[float, float] | None = None
    seed_is_short: bool = False
    default_clips: tuple[str, ...] = dataclasses.field(init=False)
    batches: Batches = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        if not callable(self.model):
            raise TypeError(f"model must be a NumPyro model (a callable), got {type(self.model).__name__}")

        def fix(**values: Any) -> None:
            for name, value in values.items():
                object.__setattr__(self, name, value)

        for name in ("eps", "delta"):
            if isinstance(value := getattr(self, name), bool | str):
                raise TypeError(f"{name} must be a number, got {value!r}")
        # Of numbers of lower precision the accounting would be in theirs.
        fix(
            eps=_as_float(self.eps),
            delta=_as_float(self.delta),
            noise_multipliers={kind: _as_float(value) for kind, value in self.noise_multipliers.items()},
            default_clips=tuple(kind for kind, clip in self.clips.items() if clip is None),
            clips={kind: _as_clip(kind, clip) for kind, clip in self.clips.items()},
        )
        self._check_budget()
        self._check_positive_int("num_iterations", optional=True)
        self._check_positive_int("num_chains")
        for kind, clip in self.clips.items():
            if callable(clip):
                continue
            if not clip > 0:
                raise ValueError(f"clip_{kind} must be positive, got {clip}")
            if math.isinf(clip) and self.eps != math.inf:
                raise ValueError(f"clip_{kind}=inf bounds no row's influence: it is for eps=inf (no privacy) only")
        if self.step_size is not None and not callable(self.step_size) and not 0 < self.step_size < math.inf:
            raise ValueError(f"step_size must be positive, got {self.step_size}")
        if not 0 < self.target_accept_prob < 1:
            raise ValueError(f"target_accept_prob must lie strictly between 0 and 1, got {self.target_accept_prob}")
        self._check_power()
        self._check_unit()
        fix(
            shares=dict(self.shares or dict.fromkeys(self.noise_multipliers, 1.0)),
            batches=as_batches(self.batch_size),
            power=float(self.power),
            n0=_as_float(self.n0),
            target_accept_prob=float(self.target_accept_prob),
            init_strategy=init_to_median if self.init_strategy is None else self.init_strategy,
            unit=self.unit if self.unit is None or isinstance(self.unit, str) else without_names(np.array(self.unit)),
        )
        if isinstance(self.batches, FixedBatches) and self.clips.get("ratio") == math.inf:
            raise ValueError("batches of a fixed size need a finite clip_ratio, also without privacy")
        fix(owners=self._known_owners())

    def _check_positive_int(self, name: str, optional: bool = False) -> None:
        value = getattr(self, name)
        if optional and value is None:
            return
        if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} must be a positive integer, got {value!r}")

    def _check_budget(self) -> None:
        given = self.given_noise_multipliers
        names = ", ".join(f"noise_multiplier_{kind}" for kind in self.noise_multipliers)
        if self.eps is None and len(given) < len(self.noise_multipliers):
            raise ValueError(
                f"give the budget, eps=1.0 say; or, to choose the noise yourself, all of {names} (standard deviation "
                "over L2 sensitivity)"
            )
        if self.eps is not None and given:
            raise ValueError(f"give either `eps` or {names}, not both: each follows from the other")
        if self.eps is not None and not self.eps > 0:
            raise ValueError(f"eps must be positive (inf runs without noise, and is not private), got {self.eps}")
        for value in given.values():
            if not 0 < value < math.inf:
                raise ValueError(f"noise multipliers must be positive, got {value}")
        check_relation(self.neighboring_relation)
        if self.delta is not None and not 0 < self.delta < 1:
            raise ValueError(f"delta must lie strictly between 0 and 1, got {self.delta}")
        if self.delta is None and not self.size_is_public:
            raise ValueError(
                "under 'add_or_remove_one' the number of rows is private, so there is no default delta: give one that "
                "is far below 1 over the order of magnitude of the table's size"
            )

    def _check_power(self) -> None:
        if not 0 < self.power < math.inf:
            raise ValueError(f"power must be positive, got {self.power}")
        if self.n0 is None:
            return
        if self.power != 1:
            raise ValueError("give either power or n0, not both: power = n0 / n")
        if not 0 < self.n0 < math.inf:
            raise ValueError(f"n0 must be positive, got {self.n0}")
        if not self.size_is_public:
            raise ValueError("n0 needs n, which is private under 'add_or_remove_one': give power")

    def _check_unit(self) -> None:
        self._check_positive_int("max_rows_per_unit", optional=True)
        if self.max_rows_per_unit is not None and not isinstance(self.unit, str):
            raise ValueError(
                "max_rows_per_unit makes it private which rows are whose, so the kernel must not keep that: give "
                "`unit` as the name of the model's argument that says it"
            )
        if self.unit is None:
            return
        if not self.size_is_public and self.max_rows_per_unit is None:
            raise ValueError(
                "unit tells n, which is private under 'add_or_remove_one': give max_rows_per_unit, and it does not"
            )
        if not self.table_size_is_public and getattr(self.model, "tells_num_units", False):
            raise ValueError(
                f"{self.model!r} tells how many units there are (num_units), which is private here: copy the model "
                "that it prints, and give it a public number of units of your own"
            )
        if self.n0 is not None:
            raise ValueError("n0 counts rows, and with a unit those of one person count together: give power")
        if self.owners is not None:
            raise ValueError("unit and owners cannot be combined")
        if np.ma.isMaskedArray(self.unit):
            raise ValueError("unit must say of each row whose it is: masked values are nobody's")

    def _known_owners(self) -> "OwnerIndex | Exchange | None":
        owners: Any = self.owners
        if owners is None:
            return None
        if hasattr(owners, "exchange"):
            if self.eps == math.inf:
                raise ValueError("eps=inf would send exact sums of rows to the other owners: give a finite eps")
            if not shareable(self.batches) or getattr(self.batches, "batch_size", None) is not None:
                raise ValueError(
                    "data owners in separate processes draw batches of their own rows, at a rate that all know: "
                    f"give batch_size=PoissonBatches(rate=...), got {self.batches}"
                )
            if self.n0 is not None:
                raise ValueError("n0 needs the number of rows of all owners, which is not known here: give power")
            if callable(self.clips.get("ratio")):
                raise ValueError("owners compare their numbers, and not functions: give clip_ratio as a number")
            return owners
        if not self.size_is_public:
            raise ValueError("an index of owners tells n, which is private under 'add_or_remove_one'")
        index = np.asarray(owners)
        if index.ndim != 1 or not np.issubdtype(index.dtype, np.integer) or index.size == 0 or index.min() < 0:
            raise ValueError(
                "owners must be each row's owner as integers from 0, shape (n,), or an exchange such as "
                f"numpyro_dp.owners.JaxOwners(); got {type(owners).__name__} of shape {index.shape}, {index.dtype}"
            )
        if not shareable(self.batches):
            raise ValueError(
                "each data owner draws from its own rows, whatever the others draw: give a number as batch_size "
                f"(Poisson batches) or PoissonBatches without max_batch_size, got {self.batches}"
            )
        found = np.unique(index)
        if found[-1] >= len(found):  # whoever has no row would add noise, too
            missing = int(np.argmax(found != np.arange(len(found))))
            raise ValueError(
                f"owners are counted from 0 without gaps, and no row belongs to {missing}: make such numbers of others "
                "by np.unique(owners, return_inverse=True)[1]"
            )
        return OwnerIndex(index.astype(np.int32), len(found))

    # -- What follows from them --------------------------------------------------------------------------------------

    @property
    def size_is_public(self) -> bool:
        """Whether neighbouring tables have as many units."""
        return size_is_public(self.neighboring_relation)

    @property
    def table_size_is_public(self) -> bool:
        """Whether they have as many rows, too: not if a unit may have more of them."""
        return self.size_is_public and self.max_rows_per_unit is None

    @property
    def has_exchange(self) -> bool:
        """Whether data owners in other processes take part."""
        return hasattr(self.owners, "exchange")

    @property
    def is_tempered(self) -> bool:
        return self.n0 is not None or self.power != 1

    def power_for(self, num_rows: int) -> float:
        """Exponent of the likelihood."""
        if self.n0 is None:
            return self.power
        if self.n0 > num_rows:
            raise ValueError(f"n0 is {self.n0:g}, more than the {num_rows} rows: give at most as many")
        return self.n0 / num_rows

    def delta_for(self, num_rows: int) -> float:
        """What was given, or a tenth of a row's share."""
        return 0.1 / num_rows if self.delta is None else self.delta

    def width_for(self, num_rows: int) -> float:
        """Of a posterior whose rows each have information of about 1; a guess where their number is private."""
        return 1 / math.sqrt(self.power_for(num_rows) * num_rows) if self.size_is_public else 0.01

    @property
    def plain(self) -> list[tuple[str, Any]]:
        """Settings that decide what is asked of a table. A plan has the others: the run's length, and the chains."""
        of_the_plan = ("num_iterations", "num_chains", "shared")
        named = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        named["clips"] = {kind: "a function" if callable(clip) else clip for kind, clip in self.clips.items()}
        if isinstance(self.owners, OwnerIndex):  # of a long array `repr` shows the ends
            named["owners"] = hashlib.sha256(self.owners.of_row.tobytes()).hexdigest(), self.owners.num_owners
        return sorted((name, value) for name, value in named.items() if is_plain(value) and name not in of_the_plan)

    @property
    def given_noise_multipliers(self) -> dict[str, float]:
        return {kind: value for kind, value in self.noise_multipliers.items() if value is not None}


def _as_clip(kind: str, clip: Any) -> float | Callable:
    if kind == "ratio" and callable(clip):
        return clip
    return DEFAULT_CLIP if clip is None else float(clip)


def is_plain(value: Any) -> bool:
    """Whether `repr` tells all about it."""
    return isinstance(value, (int, float, str, dict, tuple, type(None), *Batches.__args__))


def _as_float(value: Any) -> float | None:
    return None if value is None else float(value)
