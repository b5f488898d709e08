"""The page of the report in Chromium: what readers can do with it."""

import math
from pathlib import Path

import pytest

from gradwire.experiment.report.page import write_report
from report import report_runs
from report.browser import Page, browser

NAMES = list(report_runs.METHODS)


@pytest.fixture(scope="module")
def chromium():
    with browser() as page:
        yield page


@pytest.fixture(scope="module")
def written(chromium, tmp_path_factory) -> Path:  # no runs where there is no browser
    folder = tmp_path_factory.mktemp("browser")
    return write_report([report_runs.make_runs(folder / "sweep")], folder / "page.html")


@pytest.fixture
def page(chromium, written):
    """The page, newly opened. It asks for nothing, and the console stays empty."""
    chromium.requests()
    yield chromium.open(written)
    assert chromium.messages() == []
    assert {address.partition(":")[0] for address in chromium.requests()} <= {"file", "data"}


def pareto_points(page: Page) -> dict[str, list[float]]:
    """The time and the score of each method in the chart."""
    return page.run(
        "return Object.fromEntries(pareto.chart().data.datasets.filter((d) => d.method)"
        ".map((d) => [d.method.name, [d.data[0].x, d.data[0].y]]))"
    )


def pareto_front(page: Page) -> list[str]:
    return page.run(
        "return pareto.chart().data.datasets.filter((d) => d.isFront).map((d) => d.method.name)"
    )


def front_by_hand(points: dict[str, list[float]]) -> set[str]:
    def is_beaten(name: str) -> bool:
        time, score = points[name]
        return any(
            (t <= time and s >= score and (t, s) != (time, score)) for t, s in points.values()
        )

    return {name for name in points if not is_beaten(name)}


def set_rate(page: Page, rate: float) -> None:
    page.slide("#rate", math.log10(rate))


def point_at(page: Page, chart: str, method: str, index: int = 0) -> tuple[float, float]:
    """Where a point of a method is on the screen."""
    return page.run(
        "const [chart, name, index] = arguments;"
        "const own = { curves, pareto, layers }[chart].chart();"
        "own.canvas.scrollIntoView({ block: 'center' });"
        "const number = own.data.datasets.findIndex((d) => d.method?.name === name);"
        "const point = own.getDatasetMeta(number).data[index];"
        "const box = own.canvas.getBoundingClientRect();"
        "return [box.left + point.x, box.top + point.y]",
        chart,
        method,
        index,
    )


def hover(page: Page, x: float, y: float) -> None:
    where = {"type": "mouseMoved", "x": x, "y": y}
    page.driver.execute_cdp_cmd("Input.dispatchMouseEvent", where)


def tooltip(page: Page, chart: str) -> list[str]:
    """The lines of the tooltip; none if it is not shown."""
    lines = page.run(
        "const tooltip = { curves, pareto, layers }[arguments[0]].chart().tooltip;"
        "return tooltip.opacity ? [...tooltip.title, ...tooltip.body.flatMap((b) => b.lines)] : []",
        chart,
    )
    return [line.replace("\u00a0", " ") for line in lines]


def test_the_page_shows_all_methods_and_asks_for_nothing(page):
    assert page.methods() == NAMES
    assert page.texts("#count") == ["4 of 4 methods"]
    assert page.column("runs") == ["2"] * 4
    assert page.texts("#subtitle")[0].startswith("mlp((8,)) on digits · 4 workers · 12 steps")
    assert len(page.all("canvas")) == 4
    for canvas in page.all("canvas"):
        assert canvas.get_attribute("role") == "img"
        assert len(canvas.get_attribute("aria-label")) > 20


def test_the_table_is_sorted_by_its_buttons_in_both_directions(page):
    head = "#table th[data-key=bytes]"
    assert page.find(head).get_attribute("aria-sort") is None
    page.find(f"{head} .sort").click()
    assert page.find(head).get_attribute("aria-sort") == "ascending"
    ascending = page.methods()
    values = page.run("return figures().all.map((each) => [each.bytes, each.method.name])")
    assert ascending == [name for _, name in sorted(values)]
    page.find(f"{head} .sort").click()
    assert page.find(head).get_attribute("aria-sort") == "descending"
    assert page.methods() == ascending[::-1]
    page.find("#table th[data-key=name] .sort").click()
    assert page.methods() == sorted(NAMES)


def test_methods_without_a_value_are_sorted_to_the_end(page):
    page.slide("#target-slider", page.run("return 100 * figures().all[1].score"))
    page.find("#table th[data-key=target] .sort").click()
    empty = [text.startswith("–") or "of" in text for text in page.column("target")]
    assert empty == sorted(empty)
    page.find("#table th[data-key=target] .sort").click()
    empty = [text.startswith("–") or "of" in text for text in page.column("target")]
    assert empty == sorted(empty)


def test_words_filter_the_table_and_the_charts(page):
    page.find("#filter").send_keys("TOPK")
    page.wait(lambda: page.methods() == ["largest 5%"])  # its setting has the word
    assert page.texts("#count") == ["1 of 4 methods"]
    assert list(pareto_points(page)) == ["largest 5%"]
    assert page.texts("#legend button") == ["largest 5%"]
    page.find("#filter").send_keys(" nothing")
    page.wait(lambda: page.methods() == [])
    assert "No method is left" in page.texts("#table tbody")[0]
    page.write("#filter", "")
    page.wait(lambda: page.methods() == NAMES)


def test_the_filter_of_the_front_leaves_the_front(page):
    whole = front_by_hand(pareto_points(page))
    page.choose("#only", "front")
    page.wait(lambda: set(page.methods()) == whole)
    page.choose("#only", "target")
    reached = page.run("return figures().all.filter((e) => e.target !== null).length")
    page.wait(lambda: len(page.methods()) == reached)


def test_a_target_that_nobody_reaches_is_said(page):
    page.write("#target", "100")
    page.press("\ue007")  # Enter
    page.wait(lambda: "No method reaches 100%" in page.texts("#summary")[0])
    assert set(page.column("target")) == {"–"}


def test_the_target_is_the_first_evaluation_that_reaches_it(page):
    lowest = page.run("return Math.min(...figures().all.map((each) => each.score))")
    goal = math.floor(100 * lowest)
    page.slide("#target-slider", goal)
    found = page.run(
        "return figures().all.map((each) => [each.method.name, each.target, each.method.runs.map("
        "(run) => { const { course, times } = courseAt(run);"
        "  return times.find((_, row) => course.score[row] >= arguments[0]) ?? null; })])",
        goal / 100,
    )
    for _, target, times in found:
        assert target == (None if None in times else pytest.approx(sum(times) / len(times)))
    assert any(target is not None for _, target, _ in found)
    assert page.find("#target").get_attribute("value") == str(goal)


def test_buttons_of_the_legend_hide_and_show_methods(page):
    first = page.find("#legend button")
    assert first.get_attribute("aria-pressed") == "true"
    first.click()
    assert page.find("#legend button").get_attribute("aria-pressed") == "false"
    assert set(pareto_points(page)) == set(NAMES[1:])
    assert page.methods() == NAMES  # the table has it, as hidden
    assert page.find("#table .toggle").get_attribute("aria-pressed") == "false"
    page.find("#table .toggle").click()
    assert page.find("#legend button").get_attribute("aria-pressed") == "true"
    assert set(pareto_points(page)) == set(NAMES)


def test_all_none_and_the_front_are_one_button_each(page):
    every, none, front = page.all("#legend-actions button")
    none.click()
    assert page.driver.switch_to.active_element == none  # the focus stays
    for figure in ("curves", "pareto", "layers"):
        assert "No method is chosen" in page.texts(f"#{figure} .empty")[0]
    front.click()
    shown = set(pareto_points(page))
    every.click()
    assert set(pareto_points(page)) == set(NAMES)
    assert shown == front_by_hand(pareto_points(page))


@pytest.mark.parametrize("chart", ["curves", "pareto", "layers"])
def test_a_point_tells_its_values_when_hovered(page, chart):
    assert tooltip(page, chart) == []
    hover(page, *point_at(page, chart, "fp16"))
    lines = page.wait(lambda: tooltip(page, chart))
    assert lines[0] in NAMES
    if chart == "curves":
        assert lines[1].startswith("test accuracy ")
        assert lines[2].startswith("step 2, ")
    elif chart == "pareto":
        assert " per worker and step" in lines[2]
    else:
        assert lines[1].endswith(" per worker and step")


@pytest.mark.parametrize("rate", [10e6, 30e6, 100e6, 1e9])
def test_the_slider_moves_the_front(page, rate):
    set_rate(page, rate)
    points = pareto_points(page)
    assert set(pareto_front(page)) == front_by_hand(points)
    is_recorded = rate != 30e6
    assert ("interpolated" in page.texts("#rate-value")[0]) == (not is_recorded)
    assert all(text.startswith("≈ ") != is_recorded for text in page.column("time"))
    label = {10e6: "10 Mbit/s", 30e6: "30 Mbit/s", 100e6: "100 Mbit/s", 1e9: "1 Gbit/s"}[rate]
    assert label in page.texts("#table th[data-key=time]")[0]
    assert points["fp32"][0] == pytest.approx(
        page.run("return figures().all[0].time"),
    )


def test_slow_networks_move_methods_of_many_bytes_most(page):
    set_rate(page, 1e9)
    fast = pareto_points(page)
    set_rate(page, 10e6)
    slow = pareto_points(page)
    growth = {name: slow[name][0] / fast[name][0] for name in NAMES}
    assert growth["fp32"] > growth["fp16"] > growth["largest 5%"] >= 1


def test_times_are_interpolated_between_neighbours_and_never_beyond(page):
    rates, times = page.run(
        "const course = state.task.methods[0].runs[0].courses[0];"
        "const sorted = [...course.networks].sort((a, b) => a.rate - b.rate);"
        "return [sorted.map((n) => n.rate), sorted.map((n) => n.times.at(-1))]"
    )
    assert rates == [10e6, 100e6, 1e9]

    def at(rate: float) -> float | None:
        return page.run(
            "return courseAt(state.task.methods[0].runs[0], arguments[0])?.times.at(-1) ?? null",
            rate,
        )

    for low, high, slow, fast in zip(rates, rates[1:], times, times[1:]):
        middle = 2 / (1 / low + 1 / high)  # half of the way in seconds for each bit
        assert at(middle) == pytest.approx((slow + fast) / 2)
        assert at(low) == slow
    assert at(rates[0] * 0.99) is None
    assert at(rates[-1] * 1.01) is None
    set_rate(page, 1)  # the slider ends at what was recorded
    assert page.run("return state.rate") == 10e6


def test_buttons_go_to_recorded_bandwidths(page):
    pills = page.texts(".pills .pill")
    assert pills == ["10 Mbit/s", "100 Mbit/s", "1 Gbit/s"]
    page.all(".pills .pill")[2].click()
    pressed = [pill.get_attribute("aria-pressed") for pill in page.all(".pills .pill")]
    assert pressed == ["false", "false", "true"]
    assert page.texts("#rate-value") == ["1 Gbit/s"]


def test_curves_are_drawn_against_what_the_reader_chooses(page):
    titles = []
    for kind in ("step", "epoch", "bytes", "virtual"):
        page.choose("#curve-x", kind)
        titles.append(page.run("return curves.chart().options.scales.x.title.text"))
        data = page.run("return curves.chart().data.datasets[0].data.map((point) => point.x)")
        assert data == sorted(data)
        assert len(data) == 6
    assert [title.replace("\u00a0", " ") for title in titles] == [
        "steps",
        "epochs",
        "bytes sent per worker",
        "virtual time at 100 Mbit/s",
    ]
    page.choose("#curve-y", "train_loss")
    assert page.run("return curves.chart().options.scales.y.title.text") == "training loss"


def test_every_run_has_a_curve_of_its_own_if_asked_for(page):
    count = "return curves.chart().data.datasets.filter((d) => d.method).length"
    assert page.run(count) == 4
    page.choose("#curve-x", "step")
    log, every = page.all("#curves input[type=checkbox]")
    every.click()
    assert page.run(count) == 8
    log.click()
    assert page.run("return curves.chart().options.scales.x.type") == "logarithmic"


def test_charts_have_the_same_values_as_tables(page):
    for figure in ("curves", "pareto", "layers", "timeline"):
        assert page.texts(f"#{figure} td") == []
        page.find(f"#{figure} summary").click()
        page.wait(lambda name=figure: page.texts(f"#{name} td"))
    assert page.texts("#pareto tbody tr")[0].count("%") >= 1
    names = page.texts("#layers tbody td:first-child")
    assert names == ["1.bias", "1.weight", "3.bias", "3.weight"]
    before = page.texts("#pareto tbody td:nth-child(3)")
    set_rate(page, 10e6)
    assert page.texts("#pareto tbody td:nth-child(3)") != before  # open tables follow


def test_a_step_of_the_timeline_can_be_chosen(page):
    assert page.texts("#timeline output") == ["step 1"]
    page.slide("#timeline-step", 2)
    assert page.texts("#timeline output") == ["step 3"]
    kinds = page.run("return timeline.chart().data.datasets.map((d) => d.label)")
    assert {"backward", "send", "receive"} <= set(kinds)


def test_the_theme_is_that_of_the_system_until_it_is_chosen(page, written):
    def ground() -> str:
        return page.run("return getComputedStyle(document.body).backgroundColor")

    light = ground()
    page.open(written, theme="dark")
    dark = ground()
    assert dark != light
    assert page.run("return styleOf(state.task.methods[0]).colour") == "#0072b2"
    page.find("#theme").click()
    assert ground() == light
    page.driver.refresh()
    assert ground() == light  # it is kept
    assert page.texts("#theme") == ["Dark theme"]


def test_all_can_be_reached_and_done_by_keyboard(page):
    from selenium.webdriver.common.keys import Keys

    seen: list[str] = []
    page.find("body").click()
    for _ in range(60):
        page.press(Keys.TAB)
        seen.append(
            page.run(
                "const e = document.activeElement;"
                "return e.id || e.closest('th')?.dataset.key || e.closest('[id]')?.id || ''"
            )
        )
    for wanted in ("theme", "rate", "target", "filter", "only", "bytes", "legend", "curve-x"):
        assert wanted in seen, f"{wanted} cannot be reached"
    page.run("document.querySelector('#table th[data-key=bytes] .sort').focus()")
    page.press(Keys.ENTER)
    assert page.find("#table th[data-key=bytes]").get_attribute("aria-sort") == "ascending"
    page.press(Keys.ENTER)  # the focus is still there
    assert page.find("#table th[data-key=bytes]").get_attribute("aria-sort") == "descending"
    page.run("document.querySelector('#legend button').focus()")
    page.press(Keys.SPACE)
    assert page.find("#legend button").get_attribute("aria-pressed") == "false"
    page.press(Keys.SPACE)
    assert page.find("#legend button").get_attribute("aria-pressed") == "true"
    page.run("document.querySelector('#rate').focus()")
    page.press(Keys.ARROW_RIGHT)
    assert page.run("return state.rate") == pytest.approx(100e6 * 10**0.05)
    assert "interpolated" in page.find("#rate").get_attribute("aria-valuetext")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_phone_shows_it_without_scrolling_sideways(page, written, theme):
    page.open(written, width=390, height=844, theme=theme)
    width, seen = page.run("return [document.documentElement.scrollWidth, innerWidth]")
    assert (width, seen) == (390, 390)
    small = page.run(
        "return [...document.querySelectorAll('button:not(.sort):not(.toggle):not(.pill)')]"
        ".filter((e) => e.getBoundingClientRect().height < 26).map((e) => e.textContent)"
    )
    assert small == []


def contrast(page: Page, ink: str, ground: str) -> float:
    """The ratio of luminances, as the Web Content Accessibility Guidelines define it."""

    def luminance(name: str) -> float:
        text = page.run(f"return colourOf('{name}')")
        parts = [int(text[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        red, green, blue = (
            part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
        )
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted((luminance(ink), luminance(ground)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_has_enough_contrast(page, written, theme):
    page.open(written, theme=theme)
    for ink in ("--ink", "--quiet", "--accent", "--bad"):
        for ground in ("--ground", "--panel"):
            assert contrast(page, ink, ground) >= 4.5, (ink, ground)
    assert contrast(page, "--on-accent", "--accent") >= 4.5
