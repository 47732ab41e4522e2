"""The ledger of pages and slots: exact accounting under random operations, copy on write, windows."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from pie_xla.engine.state import StateLedger
from pie_xla.engine.words import WordFile
from poem.spec import Leaf, StateGroup, StateKind

PAGE = 4
FULL = StateGroup("full", StateKind.PAGED, 1, {"k": Leaf((PAGE,), "float32", (None,))}, page_size=PAGE)
WINDOW = StateGroup("window", StateKind.PAGED, 1, {"k": Leaf((PAGE,), "float32", (None,))}, window=6, page_size=PAGE)
SLOTS = StateGroup("recurrent", StateKind.RECURRENT, 1, {"s": Leaf((2,), "float32", (None,))})


def ledger(units: int = 50) -> StateLedger:
    return StateLedger((FULL, WINDOW, SLOTS), {"full": units, "window": units, "recurrent": units}, PAGE)


def test_fork_shares_pages_and_the_writer_copies_the_tail():
    books = StateLedger((FULL,), {"full": 10}, PAGE)
    parent = books.new()
    assert books.append(parent, 6) == []
    child = books.fork(parent)
    assert child.pages == parent.pages and books.balance()["full"] == (7, 2, 9)
    (copy,) = books.append(child, 1)
    assert copy.source == parent.pages["full"][1] and copy.target == child.pages["full"][1]
    assert child.pages["full"][0] == parent.pages["full"][0]
    assert books.append(parent, 1) == []  # the page is its own again
    books.drop(parent)
    books.drop(child)
    assert books.balance()["full"] == (9, 0, 9)


def test_a_full_tail_page_is_not_copied():
    books = StateLedger((FULL,), {"full": 10}, PAGE)
    parent = books.new()
    books.append(parent, 4)
    child = books.fork(parent)
    assert books.needs(child, 1).pages == {"full": 1}
    assert books.append(child, 1) == []


def test_window_pages_go_back_when_no_position_can_see_them():
    books = StateLedger((WINDOW,), {"window": 10}, PAGE)
    one = books.new()
    for _ in range(5):
        books.append(one, 4)
        books.slide(one, one.cells)
    # 20 cells, window 6: the next query (position 20) sees 15..20, so page 3 (12..15) is the first that is kept.
    assert one.pages["window"][:3] == [0, 0, 0] and all(one.pages["window"][3:])
    assert books.balance()["window"] == (7, 2, 9)


def test_slots_are_replaced_not_overwritten():
    books = StateLedger((SLOTS,), {"recurrent": 5}, PAGE)
    one = books.new()
    assert books.next_slot(one)[0] == 0
    first = one.slot
    before, after = books.next_slot(one)
    assert before == first and after == one.slot != first
    books.give_slot(before)
    books.drop(one)
    assert books.balance()["slots"] == (4, 0, 4)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["new", "append", "fork", "truncate", "drop", "slide", "evict"]), st.integers(0, 99)),
        max_size=60,
    )
)
def test_free_plus_used_is_total_whatever_happens(steps: list[tuple[str, int]]):
    books = ledger()
    live = [books.new()]
    for what, n in steps:
        state = live[n % len(live)] if live else None
        if what == "new" or state is None:
            live.append(books.new())
        elif what == "append":
            count = n % 7
            need = books.needs(state, count)
            free = {name: pool.free for name, pool in books.paged.items()}
            if books.fits(need) and count:
                books.append(state, count)
                assert {name: free[name] - pool.free for name, pool in books.paged.items()} == need.pages
                before, _ = books.next_slot(state)
                books.give_slot(before)
        elif what == "fork" and len(live) < 12:
            live.append(books.fork(state))
        elif what == "truncate":
            books.truncate(state, min(n, state.length))
            assert state.length <= n or n > 99
        elif what == "evict":
            length = state.length
            books.evict(state, [(n % 13, n)])
            assert state.length == length
        elif what == "slide":
            books.slide(state, state.length)
        elif what == "drop":
            books.drop(state)
            live.remove(state)
        for one in live:
            pages = -(-one.cells // PAGE)
            assert {len(table) for table in one.pages.values()} == {pages} == {len(one.bases)} == {len(one.live)}
            assert all(b - a >= PAGE for a, b in itertools.pairwise(one.bases))
            assert not one.bases or one.bases[-1] + one.cells - PAGE * (pages - 1) <= one.length
        for free_units, used, total in books.balance().values():
            assert free_units + used == total
    for state in live:
        books.drop(state)
    for free_units, used, total in books.balance().values():
        assert used == 0 and free_units == total


def test_words_come_back_and_never_overlap():
    words = WordFile(64)
    spans = [(words.allocate(n), n) for n in (1, 5, 1, 30)]
    taken = [w for at, n in spans for w in range(at, at + n)]
    assert len(set(taken)) == len(taken) and 0 not in taken
    assert words.allocate(60) is None
    for at, n in spans:
        words.release(at, n)
    assert words.used == 0 and words.allocate(60) is not None


def test_sizes_that_come_and_go_leave_the_file_whole():
    words = WordFile(1000)
    keep = words.allocate(3)
    for n in range(100, 160):
        at = words.allocate(n)
        assert at is not None
        words.release(at, n)
    assert words.used == 3 and keep is not None
    assert words.allocate(996) is not None
