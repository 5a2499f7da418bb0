"""The web page in a real headless Chromium: generate, stop, fill-mask, similarity, errors, keyboard, phone,
dark.

Needs the package playwright and the system's Chromium (its executable is driven directly, nothing is
downloaded).
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def browser() -> Iterator:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    names = ("chromium", "chromium-browser", "google-chrome")
    executable = next((found for name in names if (found := shutil.which(name))), None)
    if executable is None:
        pytest.skip("needs Chromium on the PATH")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def address(gpt_onnx: Path, bert_onnx: Path, start_server) -> Iterator[str]:
    with start_server(f"gpt={gpt_onnx}", f"bert={bert_onnx}") as (_, base):
        yield base


@pytest.fixture
def page(browser, address: str) -> Iterator:
    context = browser.new_context()
    page = context.new_page()
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.goto(address)
    page.wait_for_selector("#complete option", state="attached")
    page.evaluate("document.querySelector('#complete details').open = true")  # length and sampling
    yield page
    context.close()
    assert faults == []


def test_generate_shows_the_answer_and_its_tokens(page) -> None:
    page.fill("#complete [name=max_tokens]", "30")
    page.fill("#complete [name=temperature]", "0")
    page.click("#complete button.main")
    page.wait_for_selector("#complete [role=status]:has-text('ended: token limit')")
    plain = page.inner_text("#complete .out")
    assert plain.startswith("Once upon a time") and len(plain) > 30
    page.check("#complete [name=tokens]")
    page.click("#complete button.main")
    page.wait_for_selector("#complete [role=status]:has-text('ended: token limit')")
    assert page.locator("#complete .token").count() == 30
    page.locator("#complete .token").first.focus()
    assert "most probable" in page.inner_text("#complete [role=status]")


def test_stop_keeps_what_was_made(page) -> None:
    # the server's pace is not ours to choose: answers are slowed down in the page
    page.evaluate("""() => { const usual = events; events = async function* (answer) {
        for await (const event of usual(answer)) {
            await new Promise((done) => setTimeout(done, 50)); yield event; } } }""")
    page.fill("#complete [name=max_tokens]", "140")
    page.fill("#complete [name=temperature]", "0")  # drawn tokens may end the text early
    page.click("#complete button.main")
    page.wait_for_selector("#complete [role=status]:has-text('tokens/s')")
    page.click("[data-do=stop]")
    page.wait_for_selector("#complete [role=status]:has-text('stopped after')")
    assert page.is_enabled("#complete button.main")


def test_fill_mask_and_similarity(page) -> None:
    page.click("#tab-fill")
    page.click("#fill button.main")
    page.wait_for_selector("#fill table")
    assert page.locator("#fill tbody tr").count() == 5
    page.click("#tab-similar")
    page.click("#similar button.main")
    page.wait_for_selector("#similar table")
    diagonal = [page.inner_text(f"#similar tbody tr:nth-child({i}) td:nth-of-type({i})") for i in (1, 2, 3)]
    assert diagonal == ["1.000"] * 3


def test_chat_classify_and_rerank(browser, chat_dir: Path, judge_dir: Path, start_server) -> None:
    """A conversation goes on where it was and begins anew; classes and documents stand in the order of their shares."""
    with start_server(f"chat={chat_dir}", f"judge={judge_dir}") as (_, base):
        page = browser.new_page()
        asked: list[dict] = []
        page.on("request", lambda one: asked.append(one.post_data_json) if one.method == "POST" else None)
        page.goto(base)
        page.wait_for_selector("#chat option", state="attached")
        assert page.inner_text("#chat select") == "chat (torch, cpu, fp32, 160 tokens)"
        page.click("#tab-chat")
        page.evaluate("document.querySelector('#chat details').open = true")
        page.fill("#chat [name=max_tokens]", "5")
        page.fill("#chat [name=temperature]", "0")
        for number, text in enumerate(("Hello", "Again"), 1):
            page.fill("#chat [name=prompt]", text)
            page.click("#chat button.main")
            page.wait_for_function(f"document.querySelectorAll('#chat .said').length === {2 * number}")
            page.wait_for_selector("#chat [role=status]:has-text('ended')")
            assert page.input_value("#chat [name=prompt]") == ""
        assert [one["role"] for one in asked[-1]["messages"]] == ["user", "assistant", "user"]
        page.click("#chat [data-do=anew]")
        assert page.inner_text("#chat .out") == ""
        page.fill("#chat [name=max_tokens]", "9000")
        page.fill("#chat [name=prompt]", "kept")
        page.click("#chat button.main")
        page.wait_for_selector("#chat .error:has-text('longer than the model')")
        assert page.input_value("#chat [name=prompt]") == "kept" and page.inner_text("#chat .out") == ""
        for tab, rows in (("classify", 2 * 2), ("rerank", 3)):
            page.click(f"#tab-{tab}")
            page.click(f"#{tab} button.main")
            page.wait_for_selector(f"#{tab} table")
            figures = page.locator(f"#{tab} td.number").all_inner_texts()
            values = [float(figure.rstrip("%")) for figure in figures]
            assert len(values) == rows and values[0] >= values[1]
            if tab == "classify":
                assert sum(values) == pytest.approx(200, abs=0.1)
        page.close()


def test_an_error_is_shown_in_words(page) -> None:
    page.fill("#complete [name=max_tokens]", "5000")
    page.click("#complete button.main")
    page.wait_for_selector("#complete .error:has-text('longer than the model')")
    page.click("#tab-fill")
    page.fill("#fill [name=input]", "nothing is missing")
    page.click("#fill button.main")
    page.wait_for_selector("#fill .error:has-text('no mask')")


def test_everything_by_keyboard(page) -> None:
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "tab-complete"
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.id") == "tab-chat" and page.is_visible("#chat")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.id") == "tab-fill" and page.is_visible("#fill")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.name") == "input"
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("#fill table")


def test_copy_as_curl_gives_a_command(browser, address: str) -> None:
    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
    page = context.new_page()
    page.goto(address)
    page.wait_for_selector("#complete option", state="attached")
    page.fill("#complete [name=prompt]", "it's")
    page.click("#complete [data-do=curl]")
    page.wait_for_selector("#complete [role=status]:has-text('copied')")
    command = page.evaluate("navigator.clipboard.readText()")
    assert command.startswith(f"curl {address}v1/completions") and "it'\\''s" in command
    context.close()


def test_a_key_is_asked_for_and_sent(
    browser, gpt_onnx: Path, start_server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THROUGHLINE_API_KEYS", "sesame")
    with start_server(f"gpt={gpt_onnx}") as (_, base):
        context = browser.new_context()
        page = context.new_page()
        page.goto(base)
        page.fill("#key", "sesame")
        page.keyboard.press("Tab")
        page.wait_for_selector("#complete option", state="attached")
        assert page.is_hidden("#locked")
        page.click("#complete button.main")
        page.wait_for_selector("#complete [role=status]:has-text('ended')")
        context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_it_without_scrolling_sideways(
    browser, address: str, scheme: str, tmp_path: Path
) -> None:
    context = browser.new_context(viewport={"width": 360, "height": 740}, color_scheme=scheme)
    page = context.new_page()
    page.goto(address)
    page.wait_for_selector("#complete option", state="attached")
    for tab in ("complete", "chat", "fill", "similar", "classify", "rerank"):
        page.click(f"#tab-{tab}")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") == (scheme == "light")
    context.close()
