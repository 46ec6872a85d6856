import pytest
from hypothesis import given
from hypothesis import strategies as st

from fibottention.sequences import fibonacci, head_window, modified_wythoff_row, wythoff_row


def test_first_rows_of_the_wythoff_array():
    # OEIS A035513, the Wythoff array.
    rows = [(1, 2, 3, 5, 8, 13), (4, 7, 11, 18, 29, 47), (6, 10, 16, 26, 42, 68), (9, 15, 24, 39, 63, 102)]
    for i, row in enumerate(rows, 1):
        assert fibonacci(*wythoff_row(i), row[-1]) == row


def test_rows_are_disjoint_and_complete_to_100_000():
    limit = 10**5
    seen = []
    i = 1
    while wythoff_row(i)[0] <= limit:
        seen += fibonacci(*wythoff_row(i), limit)
        i += 1
    assert sorted(seen) == list(range(1, limit + 1))


@given(st.integers(1, 10**30))
def test_wythoff_row_is_exact_for_large_indices(i):
    # a = floor(floor(i phi) phi): the defining inequalities in integers, with phi = (1 + sqrt 5) / 2.
    a, b = wythoff_row(i)
    f = b - a
    for value, base in ((f, i), (a, f)):
        assert (2 * value - base) ** 2 <= 5 * base**2 or 2 * value < base
        assert (2 * (value + 1) - base) ** 2 > 5 * base**2


@given(st.integers(1, 10**6))
def test_modified_row_precedes_the_wythoff_row(i):
    p, q = modified_wythoff_row(i)
    a, b = wythoff_row(i)
    assert (p, q) == (2 * a - b, b - a)
    assert (p + q, p + 2 * q) == (a, b)


@pytest.mark.parametrize(
    ("a", "b", "limit", "terms"),
    [
        (0, 1, 5, (0, 1, 1, 2, 3, 5)),
        (1, 3, 7, (1, 3, 4, 7)),
        (30, 49, 20, ()),
        (5, 1, 3, (1,)),
        (4, 7, 4, (4,)),
        (0, 1, 0, (0,)),
    ],
)
def test_fibonacci_keeps_the_terms_within_the_limit(a, b, limit, terms):
    assert fibonacci(a, b, limit) == terms


def test_head_windows_of_the_paper():
    windows = [head_window(i, 12, 5, 65) for i in range(1, 13)]
    assert windows == [5, 10, 15, 21, 26, 32, 37, 43, 48, 54, 59, 65]
    assert head_window(1, 1, 5, 65) == 65


@pytest.mark.parametrize(
    "call",
    [
        lambda: fibonacci(-1, 2, 5),
        lambda: fibonacci(0, 0, 5),
        lambda: wythoff_row(0),
        lambda: modified_wythoff_row(-3),
        lambda: head_window(0, 4, 1, 2),
        lambda: head_window(5, 4, 1, 2),
        lambda: head_window(1, 4, 3, 2),
    ],
)
def test_bad_arguments_name_the_value(call):
    with pytest.raises(ValueError, match="got"):
        call()
