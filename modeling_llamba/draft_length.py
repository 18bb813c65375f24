"""When drafting pays: what a verified draft brings, what it costs, and the length that follows.

Where each drafted token is right with probability a, given that those before it are, a pass that verifies K of them
yields (Leviathan et al. 2023, arXiv 2211.17192, equation 1)

    tokens(a, K) = 1 + a + ... + a^K = (1 - a^(K+1)) / (1 - a)

and takes, with plain decoding's seconds per token `step`, what a pass over several tokens takes beyond that `several`,
what each further token adds to it `token`, and what it takes to draft one `draft`,

    seconds(K) = step + several + K (token + draft)          seconds(0) = step

so that it is tokens(a, K) step / seconds(K) times as fast as plain decoding. Leviathan's theorem 3.8 is the case
several = token = 0, of a machine that waits for its weights. On a CPU `several` decides: a matrix times a few vectors
takes up to twice as long as times one, and then each further vector little.
"""

from dataclasses import dataclass, field

FORGET = 0.9  # weight of what was measured a round ago against now: the last ten rounds or so count
PROBE_EVERY = 16  # rounds without a draft, until one is tried again
FIRST_LENGTHS = (0, 4, 2)  # two lengths tell `token` from `several`


@dataclass(frozen=True)
class CostModel:
    """Seconds of a plain step, of several tokens in a pass beyond that, of each of them, and of drafting one."""

    step: float
    several: float
    token: float
    draft: float

    @staticmethod
    def tokens(acceptance: float, length: int) -> float:
        """Expected tokens of a pass that verifies `length` drafted ones."""
        return sum(acceptance**i for i in range(length + 1))

    def seconds(self, length: int) -> float:
        """Of drafting and verifying so many."""
        return self.step + (self.several + length * (self.token + self.draft) if length else 0.0)

    def speedup(self, acceptance: float, length: int) -> float:
        """Over plain decoding; 1 at length 0."""
        return self.tokens(acceptance, length) * self.step / self.seconds(length)

    def best(self, acceptance: float, longest: int) -> int:
        """The fastest length up to `longest`; 0 where no draft pays."""
        return max(range(longest + 1), key=lambda length: self.speedup(acceptance, length))

    def break_even(self, length: int) -> float | None:
        """The acceptance above which drafts of this length pay; None where not even perfect ones do."""
        if self.speedup(1.0, length) <= 1:
            return None
        low, high = 0.0, 1.0
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (low, middle) if self.speedup(middle, length) > 1 else (middle, high)
        return high


@dataclass
class DraftLength:
    """Chooses the length of each draft, from how the last ones fared."""

    longest: int = 8
    rounds: int = 0
    without: int = 0
    steps: list[float] = field(default_factory=lambda: [0.0, 0.0])
    sums: list[float] = field(default_factory=lambda: [0.0] * 5)
    drafting: list[float] = field(default_factory=lambda: [0.0, 0.0])
    trials: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def next(self) -> int:
        """How many tokens to draft now."""
        if self.rounds < len(FIRST_LENGTHS):
            return min(FIRST_LENGTHS[self.rounds], self.longest)
        length = self.cost().best(self.acceptance(), self.longest)
        if length == 0 and self.without >= PROBE_EVERY:
            return min(2, self.longest)
        return length

    def note(self, length: int, accepted: int, rejected: int, draft_seconds: float, verify_seconds: float) -> None:
        """What became of a round: tokens verified beside the first, and over all rows how many were right or wrong.

        A row has at most one wrong one: those behind it were not judged.
        """
        self.rounds += 1
        self.without = 0 if length else self.without + 1
        if length:
            new = (1.0, length, length**2, verify_seconds, length * verify_seconds)
            self.sums = [FORGET * old + value for old, value in zip(self.sums, new, strict=True)]
            self.drafting = [FORGET * self.drafting[0] + draft_seconds, FORGET * self.drafting[1] + length]
        else:
            self.steps = [FORGET * self.steps[0] + verify_seconds, FORGET * self.steps[1] + 1]
        if accepted + rejected:
            self.trials = [FORGET * self.trials[0] + accepted, FORGET * self.trials[1] + accepted + rejected]

    def acceptance(self) -> float:
        """The chance of a drafted token, 1/2 before anything is known."""
        return (self.trials[0] + 1) / (self.trials[1] + 2)

    def cost(self) -> CostModel:
        """A plain step's mean, and least squares of the other passes' seconds over their lengths."""
        weight, k, kk, seconds, k_seconds = self.sums
        spread = weight * kk - k * k
        token = max((weight * k_seconds - k * seconds) / spread, 0.0) if spread > 1e-9 * weight * kk else 0.0
        whole = (seconds - token * k) / weight if weight else 0.0
        step = self.steps[0] / self.steps[1] if self.steps[1] else max(whole, 1e-9)
        return CostModel(step, max(whole - step, 0.0), token, self.drafting[0] / max(self.drafting[1], 1e-9))
