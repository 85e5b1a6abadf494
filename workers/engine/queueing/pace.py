"""Time that a step takes, learned from the steps that ran, and the number of tokens that the next step may therefore
have. The module is pure.

The model is t = a + b * tokens + c * kv_tokens, fitted by least squares over recent steps (engine.md 3.2). A step makes
the fit forget older steps of its own size only. While all steps have the same size, as in a flood, the fixed costs are
known from before, and are not estimated anew from steps that cannot show them (the idea is directional forgetting,
Kulhavy and Karny 1984). The load may have changed, because there was a rest, or because sizes come again that did not
for long. Then old steps get a small weight: they still tell the terms apart, and what is seen now outweighs them. The
module knows numbers only; the planner knows whose tokens they are.
"""

from __future__ import annotations

RECOVERY_STEPS = 64
"""Number of steps after which a budget that was cut is doubled."""

LEAST_BUDGET = 256
"""Least number of tokens of a step, however slow it is. With fewer, fixed costs would be most of its time."""

LEAST_SHORT = 64
"""Least number of tokens of a step that is kept short for a possible arrival, however cheap a step by itself is
estimated to be."""

SHORT_COSTS = 4
"""Fixed costs are at most a 1 / `SHORT_COSTS` part of a short step."""

LEAST_ROWS = 32
"""Least number of streams of a step, however slow it is. With fewer, the weights are read for too few of them, which
does not show in the fixed costs."""

FORGET = 0.97
"""Factor for the weight of all earlier steps of one size, applied at each step of that size. About thirty of them
count."""

STALL = 4.0
"""Multiple of the predicted time above which a step counts as just this multiple, because something else held it up."""

MIN_STEPS = 8
"""Least number of steps from which anything is predicted."""

STALE_STEPS = 1000
"""Number of steps after which a size that none of them had is old. When an old size is seen again, another load has
come, and all old sizes get a small weight. Until then they still tell fixed costs from those of tokens."""

FAINT = 1 / 256
"""Weight, relative to one step, of all steps of one size together when their weight was reduced."""

UNITS = (1.0, 256.0, 65536.0)
"""Units of the three terms, which bring the equations to a common scale."""

RIDGE = 1e-4
"""Weight of the ridge term. Where steps are too much alike to tell the terms apart, it selects the smallest
coefficients that fit."""

Sums = tuple[float, ...]
"""Sums of 1, x, y, x², xy, y², t, xt, yt over steps with x tokens and y KV tokens (in `UNITS`) that took t."""
_NOTHING: Sums = (0.0,) * 9
_PRODUCTS = ((0, 1, 2), (1, 3, 4), (2, 4, 5))
_RESULTS = (6, 7, 8)
_TIME = _RESULTS[0]


class StepTime:
    """The fitted step time. `add` and the first query after it are O(1): sums of products, three equations."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_since_rest = 0
        self.largest = 0.0
        """Number of tokens of the largest step that is not forgotten."""
        self._sums = _NOTHING
        self._of_size: dict[int, Sums] = {}
        """Parts of the sums, keyed by the size of steps. A size goes from one power of two to the next."""
        self._last: dict[int, int] = {}
        """Number of the last step of each size. Sizes with reduced weight have none."""
        self._fit: tuple[float, float, float] | None = None

    def add(self, num_tokens: int, num_kv_tokens: int, seconds: float) -> None:
        """Adds a step. A step that took no time at all (the clock stands still) is ignored."""
        if seconds <= 0:
            return
        if self.num_steps >= MIN_STEPS:
            bound = STALL * self.predict(num_tokens, num_kv_tokens)
            seconds = min(seconds, bound or seconds)  # a fit may predict 0
        self.num_steps += 1
        self.num_since_rest += 1
        self.largest = max(self.largest * FORGET, float(num_tokens))
        one, x, y = 1.0, num_tokens / UNITS[1], num_kv_tokens / UNITS[2]
        told = (one, x, y, x * x, x * y, y * y, seconds, x * seconds, y * seconds)
        size = num_tokens.bit_length()
        if size in self._last and self._is_old(size):  # another load
            self._make_faint([one for one in self._last if self._is_old(one)])
        before = self._of_size.get(size, _NOTHING)
        now = tuple(FORGET * old + new for old, new in zip(before, told, strict=True))
        self._of_size[size] = now
        self._last[size] = self.num_steps
        self._sums = tuple(total - old + new for total, old, new in zip(self._sums, before, now, strict=True))
        self._fit = None

    def rest(self) -> None:
        """Notes that nothing was computed for a while. Another load may come, on a machine that others use less, or
        more."""
        if self.num_since_rest:
            self.num_since_rest = 0
            self._make_faint(list(self._last))

    def has_seen(self, num_tokens: int) -> bool:
        """Returns whether a step of half this size or more was seen that is not old."""
        least = (num_tokens // 2).bit_length()
        return any(size >= least and not self._is_old(size) for size in self._last)

    @property
    def fit(self) -> tuple[float, float, float]:
        """Coefficients (a, b, c) in seconds, seconds per token and seconds per KV token. None is negative."""
        if self._fit is None:
            terms = [0, 1, 2]
            while True:
                found = self._solve(terms)
                worst = min(terms, key=lambda term: found[term])
                if found[worst] >= 0:
                    break
                terms.remove(worst)
            self._fit = (found[0], found[1] / UNITS[1], found[2] / UNITS[2])
        return self._fit

    @property
    def costs(self) -> tuple[float, float]:
        """Fixed seconds of a step, and seconds of a token. Steps that are all large and nearly alike leave it to chance
        how the fit divides their time. But a step of any size has the fixed costs, so they are no more than the mean of
        the quickest size, and what is more belongs to the tokens."""
        fixed, token, _ = self.fit
        most = min((sums[_TIME] / sums[0] for sums in self._of_size.values()), default=fixed)
        if fixed > most:
            mean_tokens = UNITS[1] * self._sums[1] / self._sums[0]
            fixed, token = most, token + (fixed - most) / mean_tokens
        return fixed, token

    def predict(self, num_tokens: int, num_kv_tokens: int) -> float:
        a, b, c = self.fit
        return a + b * num_tokens + c * num_kv_tokens

    def tokens_within(self, seconds: float, num_kv_tokens: int) -> float:
        """Returns the tokens of the largest step that should end in time. It is at most twice the largest step that was
        seen."""
        a, b, c = self.fit
        left = seconds - a - c * num_kv_tokens
        bound = 2 * self.largest
        return min(bound, left / b) if b > 0 else bound

    def _is_old(self, size: int) -> bool:
        return self.num_steps - self._last[size] > STALE_STEPS

    def _make_faint(self, sizes: list[int]) -> None:
        for size in sizes:
            sums = self._of_size[size]
            self._of_size[size] = tuple(value * min(1.0, FAINT / sums[0]) for value in sums)
            del self._last[size]
        self._sums = tuple(map(sum, zip(*self._of_size.values(), strict=True)))
        self._fit = None

    def _solve(self, terms: list[int]) -> list[float]:
        """Solves for the given terms by Gaussian elimination; the other terms are 0. The matrix holds sums of squares,
        so pivots are positive."""
        sums, ridge = self._sums, RIDGE * self._sums[0]
        rows = [
            [sums[_PRODUCTS[r][c]] + (ridge if r == c else 0.0) for c in terms] + [sums[_RESULTS[r]]] for r in terms
        ]
        size = len(terms)
        for pivot in range(size):
            for below in range(pivot + 1, size):
                factor = rows[below][pivot] / rows[pivot][pivot]
                rows[below] = [x - factor * y for x, y in zip(rows[below], rows[pivot], strict=True)]
        found = [0.0] * 3
        for row in reversed(range(size)):
            known = sum(rows[row][k] * found[terms[k]] for k in range(row + 1, size))
            found[terms[row]] = (rows[row][size] - known) / rows[row][row]
        return found


class TokenBudget:
    """Number of tokens of a step. It is the limit, or less to keep the pace, or less for a while after the device ran
    out of memory."""

    def __init__(self, limit: int, target_s: float) -> None:
        """Creates the budget. `target_s` is the time that a step may take while an interactive sequence waits for its
        next token."""
        self.num_tokens = limit
        self.step_time = StepTime()
        self._ceiling = limit
        self._limit = limit
        self._target_s = target_s
        self._num_steps = 0

    def pace(self, num_kv_tokens: int, *, hurried: bool) -> int:
        """Sets and returns the budget of the next step, which is expected to read `num_kv_tokens` tokens of KV."""
        self.num_tokens = self.hurried(num_kv_tokens) if hurried else self._ceiling
        return self.num_tokens

    def hurried(self, num_kv_tokens: int) -> int:
        """Returns the budget of a step for which an interactive sequence waits."""
        if self.step_time.num_steps < MIN_STEPS:
            return self._ceiling
        within = self.step_time.tokens_within(self._target_s, num_kv_tokens)
        return min(self._ceiling, max(LEAST_BUDGET, int(within)))

    @property
    def slack(self) -> int:
        """Number of tokens that the device's memory takes beyond those of the pace."""
        return self._ceiling - self.num_tokens

    @property
    def num_short(self) -> int:
        """Number of tokens of a step for which a tenant that asks seldom may have to wait. It is as small as fixed
        costs allow, and half the budget at most. A short step costs a slow device little, and there it is worth
        most."""
        half = -(-self.num_tokens // 2)
        if self.step_time.num_steps < MIN_STEPS:
            return half
        fixed_s, token_s = self.step_time.costs
        if token_s <= 0:
            return half
        return min(half, max(LEAST_SHORT, int((SHORT_COSTS - 1) * fixed_s / token_s)))

    def num_rows(self, num_kv_tokens: float) -> int:
        """Returns the streams of a step for which an interactive sequence waits, if each reads `num_kv_tokens` tokens
        of KV. They are as many as keep the step within its target, and more where fixed costs would be more than a 1 /
        `SHORT_COSTS` part of it."""
        if self.step_time.num_steps < MIN_STEPS:
            return self._ceiling
        fixed_s, token_s, kv_s = self.step_time.fit
        row_s = token_s + kv_s * num_kv_tokens
        if row_s <= 0:
            return self._ceiling
        within = (self._target_s - fixed_s) / row_s
        cheap = (SHORT_COSTS - 1) * fixed_s / row_s
        return min(self._ceiling, max(LEAST_ROWS, int(within), int(cheap)))

    def cut(self, num_tokens: int) -> None:
        """Reduces the budget after a step of `num_tokens` was too large."""
        self._ceiling = self.num_tokens = max(1, min(self._ceiling, num_tokens // 2))
        self._num_steps = 0

    def step_ran(self, num_tokens: int, num_kv_tokens: int, seconds: float) -> None:
        self.step_time.add(num_tokens, num_kv_tokens, seconds)
        if self._ceiling == self._limit:
            return
        self._num_steps += 1
        if self._num_steps == RECOVERY_STEPS:
            self._num_steps = 0
            self._ceiling = self.num_tokens = min(self._limit, 2 * self._ceiling)
