"""What the tables and pages of `throughline bench` say of given figures."""

from throughline.cli.bench import latency_page, plotted, verdicts


def test_the_plot_has_a_bar_for_every_row() -> None:
    row = {"model": "m", "backend": "a<b", "what": "encode", "batch": 1, "tokens": 8, "p50_ms": 2.0}
    row |= {"p95_ms": 2.0, "p99_ms": 2.0, "tokens_per_s": 4000.0}
    plot = latency_page([row, row | {"p50_ms": 1.0}])
    assert (
        plot.count('class="bar" style="width:50.0%"') == plot.count('class="bar" style="width:100.0%"') == 1
    )
    assert "a&lt;b" in plot and "a<b" not in plot and "1.00 ms" in plot


def test_what_is_not_worth_it_is_said() -> None:
    """Against the first of the table, over the cases that both have."""
    sizes = (("encode", 1, 32), ("encode", 8, 32))
    given = {"torch": (10.0, 40.0), "openvino": (5.0, 10.0), "torch-compiled": (9.0, 42.0)}
    rows = [
        {"model": "m", "backend": name, "what": what, "batch": batch, "tokens": tokens, "p50_ms": p50}
        for name, times in given.items()
        for (what, batch, tokens), p50 in zip(sizes, times)
    ]
    assert verdicts(rows) == [
        "openvino has 2.83 times the speed of torch",  # sqrt(2 x 4)
        "torch-compiled has 1.03 times the speed of torch: not worth it here",  # sqrt(10 / 9 x 40 / 42)
    ]
    assert verdicts(rows[:2]) == []


def test_the_page_shows_every_row_and_curve() -> None:
    figures = {f"{name}_p{share}_ms": 1.5 for name in ("first", "gap", "total") for share in (50, 99)}
    rates = {"requests_per_s": 1.0, "generated_per_s": 2.0, "tokens_per_s": 1234.6}
    rows = [{"clients": n, "answered": 3, "not": {}, **rates, **figures} for n in (1, 2)]
    html = plotted(rows, "a & b")
    assert html.count('class="plot"') == 4 and html.count("1,235") == 2 and "a &amp; b" in html
