"""The report in a real browser: it draws, zooms, fits, follows a run, and asks nobody for anything."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from told_runs import Told, leg, tell

from samestep.events import Notice, RunStarted
from samestep.track.folder import RECIPE, RunFolder
from samestep.track.record import RunRecord
from samestep.track.report import REPORT, Report, write_page, write_report

sync_api = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: pip install 'samestep[browser]'"
)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium")
PROBE = """() => ({
    wide: document.documentElement.scrollWidth - window.innerWidth,
    charts: document.querySelectorAll('.chart svg .line').length,
    unlabelled: [...document.querySelectorAll('svg[role=img], button, input')].filter((node) =>
        !(node.getAttribute('aria-label') || node.textContent.trim() || node.closest('label'))).length,
    paper: getComputedStyle(document.body).backgroundColor,
    ink: getComputedStyle(document.body).color,
})"""
CONTRAST = """() => {
    const parse = (text) => text.match(/[\\d.]+/g).map(Number);
    const light = (colour) => {
        const [r, g, b] = colour.slice(0, 3).map((part) => part / 255)
            .map((part) => (part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const behind = (node) => {
        for (; node; node = node.parentElement) {
            const colour = parse(getComputedStyle(node).backgroundColor);
            if (colour.length === 3 || colour[3] === 1) return colour;
        }
        return [255, 255, 255];
    };
    const weak = [];
    for (const node of document.querySelectorAll('body *')) {
        const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
        if (!own || ['SCRIPT', 'NOSCRIPT'].includes(node.tagName) || !node.getClientRects().length) continue;
        const style = getComputedStyle(node);
        const drawn = node.namespaceURI.endsWith('svg') ? style.fill : style.color;
        const [one, other] = [light(parse(drawn)), light(behind(node))].sort((a, b) => b - a);
        const ratio = (one + 0.05) / (other + 0.05);
        if (ratio < 4.5) weak.push(`${node.tagName} ${node.textContent.slice(0, 20)} ${ratio}`);
    }
    return weak;
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Start Chromium once."""
    with sync_api.sync_playwright() as playwright:
        # The sandbox cannot be had as root, and nothing here comes from outside.
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with one of everything, drawn."""
    folder = tell(tmp_path_factory.mktemp("runs") / "a-run", steps=1700, stop=1000)
    write_report(folder)
    return folder


class Opened:
    """A page that is open, and what it did that it must not do."""

    def __init__(
        self, browser: Any, folder: Path, *, width: int = 1400, scheme: str = "light", clock: bool = False
    ) -> None:
        size = {"width": width, "height": 900}
        self.context = browser.new_context(viewport=size, color_scheme=scheme, has_touch=width < 600)
        self.errors: list[str] = []
        self.asked: list[str] = []
        self.page = self.context.new_page()
        self.page.on("console", lambda message: self.errors.append(message.text))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.context.on("request", lambda request: self.asked.append(request.url))
        if clock:
            self.page.clock.install()  # from here on the page's time moves when the test moves it
        self.page.goto((folder / REPORT).as_uri())

    def __enter__(self) -> Any:
        return self.page

    def __exit__(self, kind: object, *_: object) -> None:
        self.context.close()
        if kind is None:
            assert self.errors == []
            assert {url.split(":")[0] for url in self.asked} <= {"file", "data"}


@pytest.mark.parametrize("width", [390, 1400])
def test_it_fits_reads_well_and_asks_nobody(browser: Any, done: Path, width: int) -> None:
    papers = set()
    for scheme in ("light", "dark"):
        with Opened(browser, done, width=width, scheme=scheme) as page:
            found = page.evaluate(PROBE)
            assert found["wide"] <= 0
            assert found["charts"] > 20
            assert found["unlabelled"] == 0
            assert width < 1000 or page.evaluate(CONTRAST) == []
            papers.add((found["paper"], found["ink"]))
            page.locator("details").evaluate_all("all => all.forEach((one) => { one.open = true; })")
            assert page.evaluate(PROBE)["wide"] <= 0
    assert len(papers) == 2


def view(page: Any) -> tuple[int, int]:
    return int(page.locator("#from").input_value()), int(page.locator("#to").input_value())


def drag(page: Any, start: float, end: float) -> None:
    """Drag over the first curve, from one share of its width to another."""
    box = page.locator(".plot svg").first.bounding_box()
    left, right = box["x"] + 54, box["x"] + box["width"] - 10
    middle = box["y"] + box["height"] / 2
    page.mouse.move(left + start * (right - left), middle)
    page.mouse.down()
    page.mouse.move(left + end * (right - left), middle, steps=4)
    page.mouse.up()


def test_a_drag_zooms_every_curve_and_a_double_click_resets(browser: Any, done: Path) -> None:
    with Opened(browser, done) as page:
        assert view(page) == (0, 1699)
        before = page.locator(".chart .line").evaluate_all(
            "lines => lines.map((line) => line.getAttribute('d'))"
        )
        drag(page, 0.6, 0.25)
        low, high = view(page)
        assert (low, high) == (pytest.approx(425, abs=5), pytest.approx(1020, abs=5))
        after = page.locator(".chart .line").evaluate_all(
            "lines => lines.map((line) => line.getAttribute('d'))"
        )
        assert all(old != new for old, new in zip(before, after, strict=True))
        page.locator(".plot").first.dblclick()
        assert view(page) == (0, 1699)


def test_the_fields_zoom_too(browser: Any, done: Path) -> None:
    with Opened(browser, done, width=390) as page:
        page.locator("#from").fill("1200")
        page.locator("#to").fill("900")
        page.get_by_role("button", name="Show").click()
        assert view(page) == (900, 1200)
        page.reload()
        assert view(page) == (900, 1200)
        page.get_by_role("button", name="All steps").click()
        assert view(page) == (0, 1699)


def test_pointing_and_arrow_keys_read_values(browser: Any, done: Path) -> None:
    with Opened(browser, done) as page:
        plot = page.locator(".plot").first
        plot.hover()
        assert page.locator(".tip").inner_text().startswith("step 7")
        page.mouse.move(0, 0)
        assert page.locator(".tip").count() == 0
        plot.focus()
        page.keyboard.press("End")
        last = page.locator(".tip").inner_text()
        page.keyboard.press("ArrowLeft")
        assert page.locator(".tip").inner_text() != last


def test_a_touch_reads_values_until_another_place_is_touched(browser: Any, done: Path) -> None:
    with Opened(browser, done, width=390) as page:
        page.locator(".plot").first.scroll_into_view_if_needed()
        box = page.locator(".plot").first.bounding_box()
        page.touchscreen.tap(box["x"] + 200, box["y"] + 80)
        assert page.locator(".tip").inner_text().startswith("step ")
        page.locator("#marks-note").tap()
        assert page.locator(".tip").count() == 0


def test_a_logarithm_is_kept_over_a_reload(browser: Any, done: Path) -> None:
    with Opened(browser, done) as page:
        before = page.locator(".chart .line").first.get_attribute("d")
        page.get_by_role("button", name="log").first.click()
        assert page.locator(".chart .line").first.get_attribute("d") != before
        page.reload()
        assert page.get_by_role("button", name="log").first.get_attribute("aria-pressed") == "true"


def test_events_are_chosen_by_kind(browser: Any, done: Path) -> None:
    with Opened(browser, done) as page:
        rows = page.locator(".event tbody tr")
        assert rows.count() > 10
        page.get_by_role("button", name="quarantine 1").click()
        assert rows.count() == 1
        assert "3 samples (10233, 481, 77120)" in rows.first.inner_text()


def test_text_of_a_run_is_shown_and_not_run(browser: Any, tmp_path: Path) -> None:
    attack = (
        "</script><script>document.title = 'taken'</script><img src='x' onerror=\"document.title = 'taken'\">"
    )
    with RunFolder(tmp_path) as keep:
        keep(RunStarted(world_size=1, steps=1, facts={attack: attack}))
        keep(Notice(level="warning", message=attack))
    (tmp_path / RECIPE).write_text(attack)
    write_report(tmp_path)
    with Opened(browser, tmp_path) as page:
        assert page.title() != "taken"
        assert page.locator("#recipe-text pre").inner_text() == attack
        assert page.locator("img").count() == 0


@pytest.mark.parametrize("content", ["", "one"])
def test_a_run_that_has_hardly_begun_is_drawn(browser: Any, tmp_path: Path, content: str) -> None:
    if content:
        leg(tmp_path, Told(), range(1), 10, 1, end="running")
    else:
        with RunFolder(tmp_path) as keep:
            keep(RunStarted(world_size=1, steps=None, facts={}))
    write_report(tmp_path)
    with Opened(browser, tmp_path, width=390) as page:
        assert page.evaluate(PROBE)["wide"] <= 0
        assert page.locator(".tiles .value").first.inner_text() == ("1" if content else "0")


@pytest.fixture
def going_on(tmp_path: Path) -> tuple[Path, Told]:
    """Return the folder of a run that goes on, drawn, and its clock."""
    told = Told()
    folder = tell(tmp_path / "run", steps=300, stop=100, end="running", told=told)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("time.time", told)
        write_page(RunRecord(folder), every=5.0)
    return folder, told


def test_a_page_of_a_run_that_goes_on_follows_it(browser: Any, going_on: tuple[Path, Told]) -> None:
    folder, told = going_on
    with Opened(browser, folder, clock=True) as page:
        assert page.locator("#pill").inner_text() == "running"
        drag(page, 0.5, 0.9)
        zoomed = view(page)
        page.mouse.move(0, 0)
        leg(folder, told, range(270, 300), 300, 2, end="done")
        with Report(folder):
            pass
        page.clock.fast_forward(5_100)
        sync_api.expect(page.locator("#pill")).to_have_text("done", timeout=10_000)
        assert page.locator(".tiles .value").first.inner_text() == "300"
        assert view(page) == zoomed
        assert not page.locator("#fresh").is_visible()


def test_updates_can_be_paused(browser: Any, going_on: tuple[Path, Told]) -> None:
    with Opened(browser, going_on[0], clock=True) as page:
        page.get_by_role("button", name="Pause updates").click()
        page.evaluate("document.title = 'not loaded again'")
        page.clock.fast_forward(600_000)
        assert page.title() == "not loaded again"
        assert page.locator("#age").inner_text().startswith("No news for")
        page.get_by_role("button", name="Go on updating").click()
        page.clock.fast_forward(5_100)
        sync_api.expect(page).not_to_have_title("not loaded again", timeout=10_000)
