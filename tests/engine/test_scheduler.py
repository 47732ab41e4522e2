"""`schedule` as a table: views in, plans out. No device, no threads."""

from __future__ import annotations

from pie_xla.engine.api import EngineOptions
from pie_xla.engine.buckets import Bucket, Buckets
from pie_xla.engine.scheduler import Item, PassView, RowView, View, schedule

OPTIONS = EngineOptions(decode_rows=(1, 2, 4, 8), prefill=((1, 16), (1, 64), (4, 16)))
BUCKETS = Buckets(OPTIONS)
ALL = frozenset(BUCKETS.all)
PAGE = 4


def row(remaining: int, cells: int = 0, held: int = 0, last: int = 1, shared: int = 0) -> RowView:
    return RowView(remaining, last, cells, {"full": held}, {"full": shared})


def one(id: int, *rows: RowView, served: int = 0, readouts: int | None = None) -> PassView:
    return PassView(id, id, served, rows, len(rows) if readouts is None else readouts)


def plan(*passes: PassView, ready: frozenset[Bucket] = ALL, free: int = 1000):
    return schedule(View(passes, ready, {"full": free}, PAGE), BUCKETS)


def shape(launch) -> tuple[int, int]:
    return launch.bucket.rows, launch.bucket.tokens


def test_one_token_rows_share_the_smallest_bucket_that_holds_them():
    made = plan(*(one(i, row(1, 8, 2)) for i in range(5)))
    assert [shape(x) for x in made.launches] == [(8, 1)]
    assert {i.pass_id for i in made.launches[0].items} == set(range(5))
    assert all(i.final for i in made.launches[0].items)


def test_a_long_prompt_is_chunked_and_leaves_its_last_token():
    made = plan(one(1, row(200)))
    assert shape(made.launches[0]) == (1, 64)
    assert made.launches[0].items == (Item(1, 0, 64, False),)
    end = plan(one(1, row(200 - 64 * 3, 192, 48)))
    assert end.launches[0].items == (Item(1, 0, 8, True),)


def test_decode_and_prefill_go_side_by_side():
    made = plan(one(1, row(200)), one(2, row(1, 9, 3)))
    assert [shape(x) for x in made.launches] == [(1, 1), (1, 64)]


def test_readout_positions_stay_in_the_final_launch():
    made = plan(one(1, row(70, last=10)))
    assert made.launches[0].items == (Item(1, 0, 60, False),)


def test_rows_of_one_pass_end_together():
    made = plan(one(1, row(3), row(70)))
    assert made.launches[0].items == (Item(1, 1, 64, False),)
    final = plan(one(1, row(3), row(6, 64, 16)))
    assert {(i.row, i.count, i.final) for i in final.launches[0].items} == {(0, 3, True), (1, 6, True)}


def test_short_prompts_share_a_launch():
    made = plan(*(one(i, row(9)) for i in range(4)))
    assert [shape(x) for x in made.launches] == [(4, 16)]
    assert len(made.launches[0].items) == 4


def test_an_uncompiled_bucket_is_wished_for_and_smaller_ones_serve():
    ready = frozenset({Bucket(1, 1, 1), Bucket(2, 1, 2)})
    made = plan(*(one(i, row(1, 8, 2)) for i in range(5)), ready=ready)
    assert [shape(x) for x in made.launches] == [(2, 1)]
    assert Bucket(8, 1, 8) in made.wishes


def test_nothing_compiled_means_wait_and_wish():
    made = plan(one(1, row(1, 8, 2)), one(2, row(10)), ready=frozenset())
    assert made.launches == () and set(made.wishes) >= {Bucket(1, 1, 1), Bucket(1, 16, 1)}


def test_a_prompt_runs_in_chunks_of_the_compiled_bucket():
    made = plan(one(1, row(60)), ready=frozenset({Bucket(1, 16, 1)}))
    assert made.launches[0].items == (Item(1, 0, 16, False),)


def test_the_least_served_client_goes_first():
    made = plan(*(one(i, row(1, 8, 2), served=100 - i) for i in range(12)))
    assert {i.pass_id for i in made.launches[0].items} == set(range(4, 12))


def test_memory_admits_who_fits_and_names_who_waits():
    made = plan(one(1, row(1, 8, 2)), one(2, row(1, 9, 3)), free=0)
    assert [i.pass_id for i in made.launches[0].items] == [2]  # its page has room; the first needs a new one
    assert made.starved == (1,)


def test_a_shared_tail_page_costs_a_copy():
    assert plan(one(1, row(1, 9, 3, shared=1)), free=0).starved == (1,)
    assert plan(one(1, row(1, 9, 3, shared=1)), free=1).launches


def test_padding_never_exceeds_the_planned_buckets():
    for n in range(1, 40):
        for launch in plan(*(one(i, row(1 + (i * 7) % 30, 4, 1)) for i in range(n))).launches:
            assert launch.bucket in ALL
            assert len(launch.items) <= launch.bucket.rows
            assert all(i.count <= launch.bucket.tokens for i in launch.items)


def test_the_same_view_gives_the_same_plan():
    passes = [one(i, row(1 + i % 5, 4, 1), served=i % 3) for i in range(20)]
    assert plan(*passes) == plan(*reversed(passes))


def test_strict_has_one_decode_and_one_prefill_shape():
    strict = Buckets(EngineOptions(decode_rows=(1, 2, 4), prefill=((1, 16), (1, 64), (4, 16)), strict=True))
    assert [(b.rows, b.tokens) for b in strict.all] == [(4, 1), (1, 64)]
