"""Which cases of a parametrized test run in the quick run; the others are marked `slow`.

A test with one parameter runs with all of its values, unless its list comes from `cover` or
`sizes`. Of a product of parameters the quick run takes cases in which every value of every
parameter occurs, and of a small product cases in which every pair of values occurs; of a test that
is marked `few`, the first cases. The choice depends on the names and the order of the cases alone.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from itertools import combinations
from typing import Any
from zlib import crc32

import pytest

NUM_CASES = 8  # of a product of parameters, unless one of them has more values
SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 16, 17)  # numbers of workers that differ in kind


def slow(*values: Any) -> Any:
    """A case for `parametrize` that the quick run leaves out."""
    return pytest.param(*values, marks=pytest.mark.slow)


def sizes(numbers: Iterable[int]) -> list[Any]:
    """Numbers of workers for `parametrize`: those that resemble another one are slow."""
    return [number if number in SIZES else slow(number) for number in numbers]


def cover(cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Values for `parametrize`, each given with its aspects: (value, aspect, ...).

    A value is slow if all of its aspects occurred before. With its class as the only aspect, the
    first example of each class is quick. A tuple holds the values of several parameters.
    """
    seen: set[tuple[int, Hashable]] = set()
    values = []
    for value, *aspects in cases:
        numbered = set(enumerate(aspects))
        arguments = value if isinstance(value, tuple) else (value,)
        values.append(slow(*arguments) if numbered <= seen else value)
        seen |= numbered
    return values


def mark_further_cases(items: Sequence[pytest.Item]) -> None:
    """Mark as slow what the quick run leaves out of the products of parameters.

    Of a test with the mark `few` it takes the first case, or as many as the mark says.
    """
    products = defaultdict(list)
    for item in items:
        is_quick = not any(item.get_closest_marker(name) for name in ("slow", "long"))
        if hasattr(item, "callspec") and is_quick:
            products[item.nodeid.partition("[")[0]].append(item)
    for cases in products.values():
        few = cases[0].get_closest_marker("few")
        if few is not None:
            (count,) = few.args or (1,)
            for case in cases[count:]:
                case.add_marker(pytest.mark.slow)
        elif len(cases) > NUM_CASES:
            chosen = _sample({case.nodeid: _values(case) for case in cases})
            for case in cases:
                if case.nodeid not in chosen:
                    case.add_marker(pytest.mark.slow)


def _values(case: Any) -> list[tuple[int, str]]:
    """One for each `parametrize`: its number and the name of the value."""
    return list(enumerate(case.callspec._idlist))


def _sample(cases: dict[str, list[tuple[int, str]]]) -> set[str]:
    """Names of cases that hold every value, and of pairs of values as many as there is room for."""
    names = sorted(cases, key=lambda name: crc32(name.encode()))
    held = {name: {*cases[name], *combinations(cases[name], 2)} for name in names}
    chosen: set[str] = set()
    seen: set[Hashable] = set()

    def take(name: str) -> None:
        chosen.add(name)
        seen.update(held[name])

    for _ in range(NUM_CASES):
        best = max(names, key=lambda name: len(held[name] - seen))
        if not held[best] <= seen:
            take(best)
    for name in names:
        if not seen.issuperset(cases[name]):
            take(name)
    return chosen
