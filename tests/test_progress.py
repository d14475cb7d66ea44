"""Progress off a terminal."""

from auraflux.progress import Lines


def test_a_line_every_ten_seconds_says_how_long_it_takes():
    now, lines = [0.0], list[str]()
    report = Lines(lines.append, lambda: now[0])
    for second in range(0, 26, 5):
        now[0] = second
        report("loading", second * 40_000_000, 3_000_000_000)
    assert lines == ["loading: 400 MB of 3.00 GB, 1 min 5 s left", "loading: 800 MB of 3.00 GB, 55 s left"]


def test_work_that_is_done_soon_leaves_no_line():
    lines = list[str]()
    report = Lines(lines.append, lambda: 5.0)
    report("loading", 1, 2)
    report("loading", 2, 2)
    assert lines == []


def test_counted_items_are_named():
    now, lines = [0.0], list[str]()
    report = Lines(lines.append, lambda: now[0])
    report("compiling kernels: attend", 0, 12)
    now[0] = 12.0
    report("compiling kernels: linear", 4, 12)
    assert lines == ["compiling kernels: linear, 4 of 12, 24 s left"]
