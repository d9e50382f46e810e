"""After how many pairs is a comparison looked at, and what may each look spend of the error? In and out: numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Looks:
    """After how many pairs a comparison is looked at, each time to end it or to go on.

    Every look is a chance to be wrong, so each has a share of the errors that are allowed (Bonferroni): the interval of
    whichever look ends the comparison then covers the truth as often as that of a comparison with a single look.

    Attributes:
        at: Numbers of pairs, rising; the last ends the comparison whatever it shows.
        shares: The part of the errors (`flatout.judge.stats.ERRORS`) that each look may spend; their sum is 1.

    Source: Jennison and Turnbull, "Group sequential methods" (2000), chapter 7, error spending in its simplest form.
    """

    at: tuple[int, ...]
    shares: tuple[float, ...]

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in zip((0, *self.at), self.at, strict=False))
        if not (self.at and rising and len(self.at) == len(self.shares) and min(self.shares) > 0):
            raise ValueError(f"no looks at {self.at} with shares {self.shares}")
        if abs(sum(self.shares) - 1) > 1e-9:
            raise ValueError(f"the shares {self.shares} sum to {sum(self.shares)}, not to 1")

    @classmethod
    def once(cls, num_pairs: int) -> Looks:
        """One look, at the end.

        >>> Looks.once(8)
        Looks(at=(8,), shares=(1.0,))
        """
        return cls(at=(num_pairs,), shares=(1.0,))

    @classmethod
    def alike(cls, *at: int) -> Looks:
        """Looks of equal shares; one that would come after the last is left out.

        >>> Looks.alike(16, 28)
        Looks(at=(16, 28), shares=(0.5, 0.5))
        >>> Looks.alike(4, 4)
        Looks(at=(4,), shares=(1.0,))
        """
        distinct = tuple(sorted({num for num in at if num <= at[-1]}))
        return cls(at=distinct, shares=(1 / len(distinct),) * len(distinct))

    def share(self, num_pairs: int) -> float:
        """What the look after so many pairs may spend; 0 where there is none."""
        return dict(zip(self.at, self.shares, strict=True)).get(num_pairs, 0.0)

    def left(self, num_pairs: int) -> float:
        """What is left for a judgement after so many pairs where the looks up to there ended nothing.

        That a measurement was cut short must not depend on what it showed.

        >>> Looks.alike(16, 28).left(20)
        0.5
        """
        return 1.0 - sum(share for at, share in zip(self.at, self.shares, strict=True) if at < num_pairs)
