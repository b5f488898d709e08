"""What the quick run leaves out."""

from itertools import combinations, product

from sampling import NUM_CASES, _sample, cover, sizes


def is_slow(case: object) -> bool:
    return bool(getattr(case, "marks", ()))


def test_the_first_example_of_each_class_is_quick() -> None:
    cases = cover([("a", int), ("b", int), ("c", str), ("d", str), ("e", float)])
    assert [is_slow(case) for case in cases] == [False, True, False, True, False]


def test_every_aspect_is_covered() -> None:
    pairs = list(product("abc", "xy"))
    cases = cover((pair, *pair) for pair in pairs)
    quick = [pair for pair, case in zip(pairs, cases, strict=True) if not is_slow(case)]
    assert quick == [("a", "x"), ("a", "y"), ("b", "x"), ("c", "x")]
    assert cases[3].values == ("b", "y")  # one for each parameter


def test_sizes_that_resemble_others_are_slow() -> None:
    cases = sizes(range(1, 18))
    assert [case for case in cases if not is_slow(case)] == [1, 2, 3, 4, 5, 7, 8, 9, 16, 17]
    assert len(cases) == 17


def test_a_sample_holds_every_value() -> None:
    values = [[(0, str(a)), (1, str(b)), (2, str(c))] for a, b, c in product(range(30), "xyz", "p")]
    cases = {f"test[{number}]": case for number, case in enumerate(values)}
    chosen = _sample(cases)
    assert 30 <= len(chosen) <= 32
    assert {v for name in chosen for v in cases[name]} == {v for case in values for v in case}


def test_a_sample_of_a_small_product_holds_every_pair_of_values() -> None:
    values = [list(enumerate(case)) for case in product("ab", "cd", "ef", "gh")]
    cases = {f"test[{number}]": case for number, case in enumerate(values)}
    chosen = _sample(cases)
    assert len(chosen) <= NUM_CASES
    pairs = {pair for name in chosen for pair in combinations(cases[name], 2)}
    assert pairs == {pair for case in values for pair in combinations(case, 2)}
