"""Questions about columns whose numbers may mean something else than amounts."""

import re

import numpy as np
import pandas as pd

from trainkit.reading.frames import as_text
from trainkit.tables.columns import Column, parse_cells
from trainkit.tables.marks import TableMark, find_marks
from trainkit.text import count

# Numbers that stand for a missing value: 99 or -999, which surveys number down to 97 or up to
# -997, limits of integers, and what netCDF and rasters are filled with.
REPEATED = [int(digit * width) for digit in "789" for width in range(2, 8)]
SURVEYS = [number - less for number in (99, 999, 9999) for less in (1, 2, 3)]
FILLS = [32767, 32768, 65535, 2**31 - 1, 2**31, 1e20, 1e30, 1e34, 1e35, 1e36, 9.96921e36]
POSITIVE = [*REPEATED, *SURVEYS, *FILLS, 99.9, 999.9, 9999.9, 99.99, 999.99, 9999.99]
NUMBERS = np.array(sorted([*POSITIVE, *(-number for number in POSITIVE), -7.0, -8.0, -9.0]))
# Numbers that mean it where all others are 0 or more, if they occur much more often than these.
BELOW_ZERO = np.arange(-9.0, 0.0)
MIN_OTHERS = 10  # different numbers above 0, or they are counts or marks
TIMES = 3  # as often as other numbers
GAP = 0.05  # from the others to a number above them, in parts of their range
# The same of dates, in days since 1970: 9999-12-31 and the days before it, 2099-12-31, and the
# first days of 1, 1582, 1753, 1899, 1900 and 1970, which are zero in files of many programs.
DAYS = np.array([-719162.0, -141427, -79257, -25569, -25568, -25567, 0, 47481, 2932895, 2932896])
# Names of columns of whole numbers that are codes.
CODED = re.compile(r"(?i)(^|_|\b)(zip|plz|cep|fips|postal|post_?code|zip_?code|code)(_|\b|$)")
YEARS = (1800, 2200)
MAX_CODES = 0.2  # different numbers for each row, above which they hardly repeat
MIN_WIDTH = 4  # digits


def ask_missing(values: pd.Series, column: Column) -> dict[str, int]:
    """Return cells that repeat, lie outside all others and read as a code, with their counts.

    They probably mean a missing value. They are further away than the range of the others, or they
    are much more frequent than those: see find_spikes.
    """
    numbers = parse_cells(values, column)
    different, counts = np.unique(numbers.dropna().to_numpy(), return_counts=True)
    like_a_code = is_like(different, DAYS if column.days else NUMBERS)
    others = different[~like_a_code]
    found = np.zeros(len(different), dtype=bool)
    if len(others) >= 2 and like_a_code.any():
        low, high = others[0], others[-1]
        distance = np.maximum(low - different, different - high)
        found = like_a_code & (counts > 1) & (distance > high - low)
    if not column.days:
        found |= find_spikes(different, counts)
    if not found.any():
        return {}
    return values[numbers.isin(different[found])].map(as_text).value_counts().to_dict()


def find_spikes(different: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return which numbers read as a code, lie outside all others and are much more frequent.

    That is -1 where all else is 0 or more, and 99 where all else is below 80. The others must
    differ: -1 beside 0 and 1 is a number as they are. How often 0 occurs says nothing unless all
    are whole: many amounts are mostly zero. Amounts that have fractions are not cut at -1, so that
    it need only be more frequent than most of them. different: sorted. counts: of each.
    """
    is_code = is_like(different, NUMBERS) | np.isin(different, BELOW_ZERO)
    others, usual = different[~is_code], counts[~is_code]
    if not is_code.any() or (others > 0).sum() < MIN_OTHERS:
        return np.zeros(len(different), dtype=bool)
    are_whole = (others % 1 == 0).all()
    most, half = np.quantile(usual if are_whole else usual[others > 0], (0.99, 0.5))
    low, high = others[0], others[-1]
    is_below = (different < 0) & (low >= 0) & (counts >= TIMES * (most if are_whole else half))
    is_above = (different - high > GAP * (high - low)) & (counts >= TIMES * most)
    return is_code & (is_below | is_above)


def is_like(numbers: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Return which numbers are one of these, which are sorted, but for rounding to float32."""
    after = np.searchsorted(codes, numbers).clip(1, len(codes) - 1)
    near = np.minimum(np.abs(codes[after] - numbers), np.abs(codes[after - 1] - numbers))
    return near <= 1e-6 * np.abs(numbers)


def ask_codes(values: pd.Series, column: Column) -> str:
    """Return what looks like codes in a column of plain whole numbers, or "".

    They have leading zeros, or a width of four digits or more and many repeats, or a telling name.
    """
    if column.unit is not None or column.days:
        return ""
    numbers = parse_cells(values, column)
    present = numbers.dropna().to_numpy()
    if not len(present) or present.min() < 0 or (present % 1 != 0).any():
        return ""
    different = np.unique(present)
    if len(different) < 3:
        return ""
    texts = values[numbers.notna()].astype(str) if values.dtype.kind == "O" else pd.Series()
    widths = {len(str(int(number))) for number in different}
    has_zeros = bool(texts.str.fullmatch(r"0\d+").any()) if len(texts) else False
    if has_zeros:
        widths = {*texts.str.len()}
    are_years = YEARS[0] <= different[0] and different[-1] <= YEARS[1]
    repeat = len(different) <= MAX_CODES * values.count()
    # Amounts are often round, so that all of them are multiples of 10 or more.
    are_round = np.gcd.reduce(different.astype(np.int64)) >= 10
    looks_so = len(widths) == 1 and max(widths) >= MIN_WIDTH and repeat
    looks_so = looks_so and not are_years and not are_round
    if not (has_zeros or looks_so or CODED.search(column.name)):
        return ""
    width = f" of {max(widths)} digits" if len(widths) == 1 else ""
    return f"{count(len(different), 'whole number')}{width}"


def ask_mark(values: pd.Series, column: Column, table: TableMark) -> str:
    """Ask what the mark means that stands before three digits in a column, or return "".

    Nothing is asked if the column itself or the other columns tell, unless whole numbers beside
    those with the mark say the reverse; nor about three decimals with a point, as in English.
    """
    marks = None if column.holds_texts or column.days else find_marks(values)
    if marks is None or marks.proof:
        return ""
    is_usual = table.is_proven or (table.is_assumed and marks.mark == ".")
    if is_usual and (marks.is_fixed or column.decimal == marks.likely):
        return ""
    if column.decimal != marks.mark:
        return f"or is {marks.mark} the decimal mark?"
    which = "with three decimals" if marks.is_fixed else "whole or with three decimals"
    return f"{which}: is {marks.mark} a thousands separator?"
