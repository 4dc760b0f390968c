"""Regular expressions of the decimal spellings of numbers in a range, exact for numbers of any size."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal

# Exponents are short, so that every number is finite in double precision.
NUMBER = r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]{1,2})?"
INTEGER = r"-?(0|[1-9][0-9]*)"
# Numbers that are no integers, with so few digits that they are none in double precision either.
FRACTION = r"-?(0|[1-9][0-9]{0,8})\.[0-9]{0,5}[1-9]0*"
_FRACTION = r"(\.[0-9]+)?"
# Numbers without exponents that double precision tells apart.
PLAIN = r"-?(0|[1-9][0-9]{0,8})(\.[0-9]{1,6})?"
# Larger exponents would make the expressions too long.
_MAX_DIGITS = 400
_EXACT = Context(prec=2 * _MAX_DIGITS)


@dataclass(frozen=True, slots=True)
class Range:
    """A range of numbers. None means no bound.

    Attributes:
        is_low_open: Whether the lower bound itself is excluded; likewise `is_high_open`.
    """

    low: Decimal | None = None
    high: Decimal | None = None
    is_low_open: bool = False
    is_high_open: bool = False

    def raised(self, low: Decimal, *, is_open: bool) -> Range:
        """Return the part of the range above `low`."""
        if self.low is not None and (low < self.low or (low == self.low and not is_open)):
            return self
        return Range(low, self.high, is_open, self.is_high_open)

    def lowered(self, high: Decimal, *, is_open: bool) -> Range:
        """Return the part of the range below `high`."""
        if self.high is not None and (high > self.high or (high == self.high and not is_open)):
            return self
        return Range(self.low, high, self.is_low_open, is_open)

    @property
    def is_empty(self) -> bool:
        if self.low is None or self.high is None:
            return False
        return self.low > self.high or (self.low == self.high and (self.is_low_open or self.is_high_open))

    @property
    def is_whole(self) -> bool:
        """Whether the range has no bounds."""
        return self.low is None and self.high is None

    def integers(self) -> tuple[int | None, int | None]:
        """Return the lowest and the highest integer in the range."""
        low = high = None
        if self.low is not None:
            low = int(self.low.to_integral_value(ROUND_CEILING, _EXACT))
            low += self.is_low_open and low == self.low
        if self.high is not None:
            high = int(self.high.to_integral_value(ROUND_FLOOR, _EXACT))
            high -= self.is_high_open and high == self.high
        return low, high

    def negated(self) -> Range:
        """Return the range of the negatives of its numbers."""
        low = None if self.high is None else self.high.copy_negate()
        high = None if self.low is None else self.low.copy_negate()
        return Range(low, high, self.is_high_open, self.is_low_open)


def is_too_long(number: Decimal) -> bool:
    """Return whether the decimal spelling of a number has too many digits."""
    return not number.is_finite() or abs(number.adjusted()) > _MAX_DIGITS or len(number.as_tuple().digits) > _MAX_DIGITS


def integers(low: int | None, high: int | None) -> list[str]:
    """Return expressions, of which one matches each integer in a range; none if the range is empty."""
    if low is None and high is None:
        return [INTEGER]
    if low is not None and high is not None and low > high:
        return []
    found = []
    if high is None or high >= 0:
        found.append(_natural(max(low or 0, 0), high))
    if low is None or low < 0:
        # The magnitudes of the negative numbers.
        found.append("-" + _group(_natural(max(-high, 1) if high is not None else 1, None if low is None else -low)))
    return found


def decimals(numbers: Range) -> list[list[str]]:
    """Return the spellings of the numbers in a range, without exponents: alternatives, each of which is a list of
    expressions that all must match.
    """
    if numbers.is_empty:
        return []
    if numbers.is_whole:
        return [[NUMBER]]
    positive = _magnitudes(numbers, "")
    negative = numbers.negated().raised(Decimal(0), is_open=True)
    return [*positive, *([] if negative.is_empty else _magnitudes(negative, "-"))]


def _magnitudes(numbers: Range, sign: str) -> list[list[str]]:
    """Return the spellings of the numbers of a range that are not negative."""
    numbers = numbers.raised(Decimal(0), is_open=False)
    if numbers.is_empty:
        return []
    assert numbers.low is not None
    parts = [sign + _group(_at_least(numbers.low, is_open=numbers.is_low_open))]
    if numbers.high is not None:
        parts.append(sign + _group(_at_most(numbers.high, is_open=numbers.is_high_open)))
    return [parts]


def _at_least(low: Decimal, *, is_open: bool) -> str:
    whole, fraction = _digits(low)
    options = [_natural(int(whole) + 1, None) + _FRACTION]
    positive = "[0-9]*[1-9][0-9]*"
    if not fraction:
        options.append(whole + (rf"\.{positive}" if is_open else _FRACTION))
    else:
        rest = [fraction + (positive if is_open else "[0-9]*")]
        rest += [f"{fraction[:i]}[{int(digit) + 1}-9][0-9]*" for i, digit in enumerate(fraction) if digit != "9"]
        options.append(rf"{whole}\.({'|'.join(rest)})")
    return "|".join(options)


def _at_most(high: Decimal, *, is_open: bool) -> str:
    whole, fraction = _digits(high)
    options = [_natural(0, int(whole) - 1) + _FRACTION] if whole != "0" else []
    if not fraction:
        options += [] if is_open else [rf"{whole}(\.0+)?"]
    else:
        rest = [fraction[:i] for i in range(1, len(fraction))]
        rest += [f"{fraction[:i]}[0-{int(digit) - 1}][0-9]*" for i, digit in enumerate(fraction) if digit != "0"]
        rest += [] if is_open else [fraction + "0*"]
        options.append(rf"{whole}(\.({'|'.join(rest)}))?")
    return "|".join(options)


def _digits(number: Decimal) -> tuple[str, str]:
    """Return the digits before and after the point, without trailing zeros."""
    whole, _, fraction = f"{number:f}".partition(".")
    return whole, fraction.rstrip("0")


def spellings(number: Decimal | int) -> str:
    """Return the expression of the spellings of a number, without exponents."""
    whole, fraction = _digits(abs(Decimal(number)))
    sign = "-?" if number == 0 else "-" if number < 0 else ""
    return sign + whole + (rf"\.{fraction}0*" if fraction else r"(\.0+)?")


def _natural(low: int, high: int | None) -> str:
    """Return the expression of the integers from `low`, which is not negative, to `high`."""
    first, options = str(low), []
    if high is None:
        if low == 0:
            return "(0|[1-9][0-9]*)"
        options = [_between(first, "9" * len(first)), f"[1-9][0-9]{{{len(first)},}}"]
        return _group("|".join(options))
    last = str(high)
    for size in range(len(first), len(last) + 1):
        begin = first if size == len(first) else "1" + "0" * (size - 1)
        options.append(_between(begin, last if size == len(last) else "9" * size))
    return _group("|".join(options))


def _between(first: str, last: str) -> str:
    """Return the expression of the numbers between two of the same number of digits."""
    if not first:
        return ""
    if first[0] == last[0]:
        return first[0] + _between(first[1:], last[1:])
    size, low, high = len(first) - 1, int(first[0]), int(last[0])
    options = []
    if first[1:] != "0" * size:
        options.append(first[0] + _between(first[1:], "9" * size))
        low += 1
    is_whole = last[1:] == "9" * size
    top = high if is_whole else high - 1
    if low <= top:
        options.append(f"[{low}-{top}]" + (f"[0-9]{{{size}}}" if size else ""))
    if not is_whole:
        options.append(last[0] + _between("0" * size, last[1:]))
    return _group("|".join(options)) if len(options) > 1 else options[0]


def _group(expression: str) -> str:
    return f"({expression})"
