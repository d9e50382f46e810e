"""How often may one look at pairs that come one by one? Group-sequential looks, and a test by betting after every pair.

In: numbers of pairs, or which side was slower. Out: what a look may spend of the error, or how strong the evidence is.

Source: Jennison and Turnbull, "Group sequential methods" (2000), chapter 7, error spending in its simplest form;
Ville's inequality; Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting" (2024).
"""

from __future__ import annotations

from dataclasses import dataclass, field

PARTS = (0.3, 0.6, 0.9)
"""What part of what they have three gamblers bet, each on his own: little for a small difference in much noise, nearly
all for a clear one. Nine pairs of nine multiply what they have by a hundred."""


@dataclass(frozen=True, slots=True)
class Looks:
    """After how many pairs a comparison is looked at, each time to end it or to go on; at the last it ends.

    Every look is a chance to be wrong, so each has an equal share of the errors that are allowed
    (`flatout.judge.stats.ERRORS`, Bonferroni): the interval of whichever look ends the comparison then covers the truth
    as often as that of a comparison with a single look.
    """

    at: tuple[int, ...]

    @classmethod
    def alike(cls, *at: int) -> Looks:
        """Looks at these numbers; one that would come after the last is left out.

        >>> Looks.alike(16, 28)
        Looks(at=(16, 28))
        >>> Looks.alike(4, 4)
        Looks(at=(4,))
        """
        return cls(tuple(sorted({num for num in at if num <= at[-1]})))

    def share(self, num_pairs: int) -> float:
        """What the look after so many pairs may spend; 0 where there is none."""
        return (num_pairs in self.at) / len(self.at)

    def left(self, num_pairs: int) -> float:
        """What is left for a judgement after so many pairs where the looks up to there ended nothing.

        That a measurement was cut short must not depend on what it showed.

        >>> Looks.alike(16, 28).left(20)
        0.5
        """
        return sum(at >= num_pairs for at in self.at) / len(self.at)


@dataclass(slots=True)
class BettingTest:
    """What the bets on one outcome have come to.

    Where neither side is slower, each pair is as likely to come out one way as the other, because the lot says which of
    its windows goes first. Whoever bets a part of what he has on *slower* then gains nothing on average, and the chance
    that he ever has `n` times what he began with is at most 1/n, however often one looks.

    >>> bets = BettingTest()
    >>> for _ in range(9):
    ...     bets.place(won=True)
    >>> bets.wealth > 100, bets.num_won
    (True, 9)
    """

    num: int = 0
    num_won: int = 0
    _each: list[float] = field(default_factory=lambda: [1.0] * len(PARTS))

    def place(self, *, won: bool) -> None:
        """A pair has come out this way or the other."""
        self.num += 1
        self.num_won += won
        self._each = [had * (1 + part if won else 1 - part) for had, part in zip(self._each, PARTS, strict=True)]

    @property
    def wealth(self) -> float:
        """How many times what was there at first: the evidence, whatever the number of looks."""
        return sum(self._each) / len(self._each)


def needed(error: float, number: int) -> float:
    """The wealth at which the bets of the `number`-th question (from 1) are won, where all questions may err so often.

    What they may spend of the error sums to it, however many there will be.

    >>> round(needed(0.01, 1)), round(needed(0.01, 3))
    (200, 1200)
    """
    return number * (number + 1) / error
