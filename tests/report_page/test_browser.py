"""The page in a real browser: no error, no request, curves with points, videos that play, legible in light and dark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from embodied_rl.reports import write_report
from tests.browser import Browser, find_browser
from tests.report_page.pages import write_run

pytestmark = pytest.mark.skipif(find_browser() is None, reason="no Chromium here (apt-get install chromium)")

WIDTH, HEIGHT = 1280, 1000


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    executable = find_browser()
    assert executable is not None
    with Browser(executable) as opened:
        opened.resize(WIDTH, HEIGHT)
        yield opened


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report([write_run(tmp_path_factory.mktemp("single") / "run", video=True)])


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("several")
    return write_report([write_run(folder / f"seed{seed}", seed=seed, video=True) for seed in (1, 2)])


def shown(browser: Browser, page: Path, scheme: str = "light") -> None:
    browser.console.clear()
    browser.requests.clear()
    browser.prefer(scheme)
    browser.open(page)


@pytest.mark.parametrize("kind", ["single", "several"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_quiet_complete_and_legible(
    browser: Browser, kind: str, scheme: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    shown(browser, request.getfixturevalue(kind), scheme)
    browser.until("document.querySelectorAll('video').length && [...document.querySelectorAll('video')].every(v => v.readyState >= 2)")
    # A chart is empty or has a curve of several points, and no number stands outside of its drawing.
    charts = browser.run(
        "[...document.querySelectorAll('figure.chart svg')].map(svg => ({"
        "points: [...svg.querySelectorAll('path.line,path.dots')].map(p => p.getTotalLength()).concat("
        "[...svg.querySelectorAll('circle.dot,rect.area')].map(() => 1)).filter(n => n > 0).length,"
        "outside: [...svg.querySelectorAll('text')].filter(t => { const a = t.getBBox(), b = svg.viewBox.baseVal;"
        "return a.x < -1 || a.x + a.width > b.width + 1 || a.y + a.height > b.height + 1; }).map(t => t.textContent)}))"
    )
    assert len(charts) >= 4
    assert all(chart["points"] > 0 for chart in charts), charts
    # The curve of the success rate has its twelve points.
    assert browser.run("document.querySelector('#curves path.line').getAttribute('d').split('L').length") == 12
    assert all(chart["outside"] == [] for chart in charts), charts
    assert browser.run("document.documentElement.scrollWidth") <= WIDTH, "nothing runs out to the right"
    assert browser.console == []
    assert browser.requests == []
    contrast = browser.run(CONTRAST)
    assert len(contrast) > 20
    too_weak = {text: round(ratio, 2) for text, ratio in contrast if ratio < 4.5}
    assert not too_weak, "WCAG AA asks for 4.5"
    picture = browser.screenshot(tmp_path / f"{kind}_{scheme}.png")
    with Image.open(picture) as image:
        pixels = np.asarray(image.convert("L"))
    assert pixels.shape[1] == WIDTH
    assert pixels.shape[0] > 1500
    assert (np.median(pixels) > 200) == (scheme == "light")


CONTRAST = """(() => {
  const channel = (v) => { v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; };
  const parts = (c) => c.match(/[\\d.]+/g).map(Number);
  const light = (c) => { const [r, g, b] = parts(c); return 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b); };
  const behind = (e) => { for (let n = e; n; n = n.parentElement) { const c = getComputedStyle(n).backgroundColor;
    if (parts(c)[3] !== 0) return c; } return "rgb(255, 255, 255)"; };
  const own = (e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
  return [...document.querySelectorAll("main *")].filter((e) => own(e) && e.getClientRects().length && !e.closest("script")).map((e) => {
    const style = getComputedStyle(e), ink = e.closest("svg") ? style.fill : style.color;
    const a = light(ink), b = light(behind(e));
    return [e.textContent.trim().slice(0, 40), (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)];
  });
})()"""
"""[text, contrast] of every visible text, by WCAG's formula."""


def test_the_video_plays(browser: Browser, single: Path) -> None:
    shown(browser, single)
    browser.until("document.querySelector('video').readyState === 4")
    assert browser.run("[document.querySelector('video').videoWidth, document.querySelector('video').videoHeight]") == [64, 64]
    # Twenty pictures at ten a second, over and over.
    assert browser.run("document.querySelector('video').duration") == pytest.approx(2.0, abs=0.15)
    browser.run("document.querySelector('video').play()")
    browser.until("document.querySelector('video').currentTime > 0.1")
    assert browser.console == []


def test_pointing_at_a_curve_shows_its_values(browser: Browser, single: Path) -> None:
    shown(browser, single)
    browser.run("document.querySelector('#curves').scrollIntoView()")
    left, top, width, height = browser.run(
        "(() => { const box = document.querySelector('figure.chart svg').getBoundingClientRect();"
        "return [box.left, box.top, box.width, box.height]; })()"
    )
    # Half way between the first point, at 1,000 steps, and the last, at 12,000, lies 6,500: the nearest points are 6,000 and 7,000.
    plot_left, plot_right = left + 50 / 420 * width, left + (420 - 12) / 420 * width
    browser.point_at((plot_left + plot_right) / 2 + 2, top + height / 2)
    tip = browser.run("document.querySelector('.tip').innerText").splitlines()
    # Of the training curve, n / 10 at n thousand steps; held out, n / 9 every third: 6,000 is the nearest.
    assert tip == ["7,000 environment steps", "training: 70.0%", "interim evaluation: 66.7% (at 6,000)"]
    inside = browser.run(
        "(() => { const tip = document.querySelector('.tip').getBoundingClientRect(),"
        "figure = document.querySelector('figure.chart').getBoundingClientRect();"
        "return tip.left >= figure.left && tip.right <= figure.right; })()"
    )
    assert inside, "the values run out of their figure"
    browser.point_at(left - 30, top - 30)
    browser.until("!document.querySelector('.tip')")
    assert browser.console == []


def test_light_and_dark_can_be_switched(browser: Browser, single: Path) -> None:
    shown(browser, single, "dark")
    background = "getComputedStyle(document.body).backgroundColor"
    dark = browser.run(background)
    assert browser.run("document.querySelector('button.theme').textContent") == "Light"
    browser.run("document.querySelector('button.theme').click()")
    light = browser.run(background)
    assert light != dark
    assert browser.run("document.querySelector('button.theme').textContent") == "Dark"
    browser.run("document.querySelector('button.theme').click()")
    assert browser.run(background) == dark


def test_a_narrow_window_is_enough(browser: Browser, several: Path) -> None:
    browser.resize(340, 800)
    try:
        shown(browser, several)
        assert browser.run("document.documentElement.scrollWidth") <= 340
    finally:
        browser.resize(WIDTH, HEIGHT)


def test_a_script_that_a_file_smuggles_in_does_not_run(browser: Browser, tmp_path: Path) -> None:
    page = write_report([write_run(tmp_path / "run")])
    # As if escaping had failed somewhere: the page's own policy is the second wall.
    page.write_text(
        page.read_text(encoding="utf-8").replace("</main>", "<script>document.title = 'taken'</script></main>"), encoding="utf-8"
    )
    shown(browser, page)
    assert browser.run("document.title") == "Toy-v0"
    assert any("Content Security Policy" in line for line in browser.console)
