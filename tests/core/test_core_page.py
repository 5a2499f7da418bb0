"""Pages: whole in one file, safe with any text, and drawn by a real browser without overflow at both widths."""

import json
import re
from pathlib import Path

import pytest
from throughline.core.page import POINTS, Bar, Chart, Part, page, thin

NASTY = "</script><script>alert(1)</script>"


def test_text_cannot_end_the_element_that_it_stands_in() -> None:
    part = Part(
        NASTY, NASTY, (NASTY,), [(NASTY,)], [Chart(NASTY, [(NASTY, [(1, 2.0)])])], [Bar(NASTY, 0.5)], NASTY
    )
    html = page(NASTY, [part], NASTY)
    assert "alert(1)</script>" not in html
    assert json.loads(re.findall(r'<script type="application/json">(.*?)</script>', html)[0])["names"] == [
        NASTY
    ]


def test_series_of_other_steps_share_one_axis() -> None:
    chart = Chart(
        "loss", [("train", [(1, 3.0), (2, 2.0)]), ("none", []), ("validation", [(2, 2.5), (4, 1.5)])]
    )
    found = json.loads(chart.data)
    assert found["names"] == ["train", "validation"]
    assert found["data"] == [[1, 2, 4], [3.0, 2.0, None], [None, 2.5, 1.5]]


def test_a_band_lies_around_its_series() -> None:
    """Bounds stand behind all series, null where there is no error or no value."""
    points = [("a", [(1, 3.0), (2, 2.0)]), ("b", [(2, 2.5), (4, 1.5)])]
    found = json.loads(Chart("loss", points, errors={"b": [(2, 0.5), (1, 9.0)], "a": []}).data)
    assert found["bands"] == [1]
    assert found["data"][3:] == [[None, 3.0, None], [None, 2.0, None]]


def test_a_long_series_is_averaged() -> None:
    points = [(float(step), float(step % 7)) for step in range(10_000)]
    assert len(thin(points)) == POINTS and thin(points)[0] == (4.5, sum(i % 7 for i in range(10)) / 10)


def test_empty_parts_are_left_out() -> None:
    html = page("t", [Part("nothing", charts=[Chart("c", [("a", [])])]), Part("rows", rows=[("a", 1)])])
    assert "nothing" not in html and "<h2>rows</h2>" in html and "uPlot" not in html


@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 375])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_browser_draws_it_without_overflow(tmp_path: Path, width: int, theme: str) -> None:
    """Axis labels lie inside their box, nothing is wider than the window, the legend has the last values without a
    pointer and others under it.
    """
    sync_api = pytest.importorskip("playwright.sync_api")
    steps = range(0, 5_000_000, 250_000)
    charts = [
        Chart("large", [("a series", [(s, 1e6 + s) for s in steps]), ("another", [(s, 2e6) for s in steps])]),
        Chart("small", [("", [(s, 1e-7 * s) for s in steps])]),
        Chart("one point", [("", [(1, 2.0)])]),
        Chart("constant", [("", [(1, 0.0), (2, 0.0)])]),
    ]
    table = Part("table", header=[f"column {i}" for i in range(15)], rows=[[12345.678] * 15] * 3)
    figures = Part("load", header=["between p99 ms"] * 12, rows=[[12345.678] * 12])  # as bench serve's
    bars = [Bar("a_task_with_a_long_name_indeed", 0.4, 0.3, 0.5, 0.25)]
    html = page(
        "a/very/long/path/" + "x" * 90,
        [Part("curves", charts=charts), table, figures, Part("bars", bars=bars)],
    )
    (tmp_path / "page.html").write_text(html)
    with sync_api.sync_playwright() as driver:
        try:
            browser = driver.chromium.launch(executable_path=_chromium())
        except sync_api.Error as error:
            pytest.skip(f"no browser: {str(error).splitlines()[0]}")
        tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=theme)
        errors: list[str] = []
        tab.on("pageerror", lambda error: errors.append(str(error)))
        tab.goto((tmp_path / "page.html").as_uri())
        tab.wait_for_selector(".uplot canvas")
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        wide = tab.evaluate(
            "[...document.querySelectorAll('.wide')].map(box => box.scrollWidth - box.clientWidth)"
        )
        assert width < 1280 or wide[1] <= 0, "a table of twelve figures is cut"
        boxes = tab.evaluate(
            "[...document.querySelectorAll('.plot')].map(p => [p.clientWidth, p.querySelector('.uplot').offsetWidth])"
        )
        assert len(boxes) == len(charts) and all(inner <= outer for outer, inner in boxes)
        legend = tab.locator(".u-legend >> nth=0")
        tab.wait_for_timeout(200)  # without a pointer, and on a phone: the last values
        assert re.search(r"a series:?\s*5750000", legend.inner_text()), legend.inner_text()
        assert re.search(r"small:?\s*0.475", tab.locator(".u-legend >> nth=1").inner_text()), (
            "by the chart's title"
        )
        tab.hover(".u-over >> nth=0")
        shown = tab.locator(".u-legend >> nth=0").inner_text()
        assert re.search(r"another:?\s*2000000", shown), shown
        assert errors == []
        browser.close()


def _chromium() -> str | None:
    import shutil

    return shutil.which("chromium") or shutil.which("chromium-browser")
