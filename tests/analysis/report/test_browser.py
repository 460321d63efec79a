"""The pages as a reader has them, in a real browser: opened from disk, in both themes, on a phone, pointed at."""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsieve.analysis.report import page as paging
from fedsieve.analysis.report.tables import with_margin
from fedsieve.analysis.statistics import Interval
from fedsieve.cli import main
from fedsieve.config.experiment_file import parse_experiment
from fedsieve.experiment import run
from fedsieve.federate.traffic import size
from fedsieve.observe.numbers import duration, number, percent

HOSTILE = "</script><img src=x onerror=alert(1)> & \"quoted\" 'too'"  # a folder '<' with a folder in it
SMALL = """
seed: 1
device: cpu
threads: 1
data: {name: digits, image_size: 16, validation: 0.2}
model: {backbone: pico}
clients: {count: 4, fraction: 0.5, split: {kind: classes, per_client: 3}}
phases:
  - {name: head, train: head, rounds: 3, local: {epochs: 1, batch_size: 32, lr: 0.1}}
  - {name: edit, train: backbone, rounds: 2, local: {steps: 1, batch_size: 8, lr: 0.5, clip_norm: 1.0}}
evaluate: {clients: true, sample: 60}
"""
MASK = "phases.1.mask={sparsity: 0.9, calibration_rounds: 1, fisher: {samples: 8}, scope: server}"
CHARTS = ["accuracy", "loss", "drift", "cosine", "bytes", "seconds", "phases"]  # that show every run
CONTRASTS = """
(selectors) => {  // of text on what is behind it, as WCAG has it: (lighter + 0.05) / (darker + 0.05)
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const luminance = (colour) => {
    canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3)
      .map((k) => k / 255).map((k) => k <= 0.04045 ? k / 12.92 : ((k + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ratio = (ink, paper) => {
    const [dark, bright] = [luminance(ink), luminance(paper)].sort((one, other) => one - other);
    return (bright + 0.05) / (dark + 0.05);
  };
  const style = (one) => getComputedStyle(one), paper = style(document.body).backgroundColor;
  const found = selectors.map((selector) => {
    const one = document.querySelector(selector);
    return [selector, ratio(one.ownerSVGElement ? style(one).fill : style(one).color, paper)];
  });
  const cells = [...document.querySelectorAll('rect.cell:not(.none)')];  // each with its number right behind it
  return [...found, ...cells.map((cell) => ['cell', ratio(style(cell.nextSibling).fill, style(cell).fill)])];
}
"""


def browser_file() -> str | None:
    """A Chromium that is installed; None lets Playwright take its own, if it has one."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next(filter(None, map(shutil.which, names)), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright; pip install -e '.[dev]'")
    options = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium refuses to be root in its sandbox
    with playwright.sync_playwright() as started:
        try:
            chromium = started.chromium.launch(executable_path=browser_file(), args=options)
        except playwright.Error as error:
            if os.environ.get("FEDSIEVE_BROWSER") == "required":
                raise
            pytest.skip(f"no browser to test pages in; `make browser` gets one ({str(error).splitlines()[0]})")
        yield chromium
        chromium.close()


def without_digests(run: Path) -> None:
    """As runs were finished before there were digests; then their files may be edited."""
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps({k: v for k, v in result.items() if k not in ("files", "digest")}))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seeds with masks, one run without, one that is not finished, one with a hostile name."""
    folder = tmp_path_factory.mktemp("pages") / "runs"
    for seed in (1, 2):
        run(parse_experiment(SMALL, "small.yaml", [MASK, f"seed={seed}"]), folder / f"sparse/seed-{seed}")
    run(parse_experiment(SMALL, "small.yaml", []), folder / "dense")
    for name, rate in (("stopped", 0.25), (HOSTILE, 0.125)):
        copied = folder / name
        shutil.copytree(folder / "dense", copied)
        changed = parse_experiment(SMALL, "small.yaml", [f"phases.1.local.lr={rate}"]).resolved()
        (copied / "experiment.yaml").write_text(changed.to_yaml())
        without_digests(copied)
    stopped = folder / "stopped"
    (stopped / "result.json").unlink()
    lines = (stopped / "metrics.jsonl").read_text().splitlines(keepends=True)
    (stopped / "metrics.jsonl").write_text("".join(lines[:2]))
    return folder


@pytest.fixture(scope="module")
def report(runs: Path) -> Path:
    out = runs.parent / "report.html"
    assert called("report", str(runs), "--out", str(out)) == 0
    return out


def called(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return int(ended.value.code or 0)


@pytest.fixture
def opened(browser: Any) -> Iterator[Callable[..., Any]]:
    """Open a file or an address; whatever the browser complains of, or asks of a network, fails the test."""
    trouble: list[str] = []
    pages = []

    def open_page(where: Path | str, width: int = 1200, scheme: str = "light", touch: bool = False) -> Any:
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme, has_touch=touch)
        page.on("console", lambda message: trouble.append(message.text) if message.type != "log" else None)
        page.on("pageerror", lambda error: trouble.append(str(error)))
        page.on("dialog", lambda dialog: (trouble.append(dialog.message), dialog.dismiss()))  # a hostile name's
        address = where.as_uri() if isinstance(where, Path) else where
        page.on(
            "request", lambda asked: None if asked.url.startswith((address, "data:")) else trouble.append(asked.url)
        )
        page.goto(address)
        pages.append(page)
        return page

    yield open_page
    for page in pages:
        page.close()
    assert not trouble


def data_in(page: Any) -> dict[str, Any]:
    return json.loads(page.locator("#data").text_content())


@pytest.fixture
def changed(report: Path, tmp_path: Path) -> Callable[[Callable[[dict[str, Any]], object]], Path]:
    """The report after a function has had its way with what it shows."""

    def made(change: Callable[[dict[str, Any]], object]) -> Path:
        text = re.search(r'<script[^>]*id="data"[^>]*>(.*?)</script>', report.read_text(), re.DOTALL)
        assert text is not None
        data = json.loads(text[1])
        change(data)
        (tmp_path / "changed.html").write_text(paging.page("changed", "report", data))
        return tmp_path / "changed.html"

    return made


def drag(page: Any, chart: str, start: float, stop: float) -> None:
    """Over a chart of a page, from one share of its width to another."""
    page.locator(f"figure[data-chart='{chart}']").scroll_into_view_if_needed()
    box = page.locator(f"figure[data-chart='{chart}'] svg").bounding_box()
    page.mouse.move(box["x"] + box["width"] * start, box["y"] + 100)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * stop, box["y"] + 100, steps=4)
    page.mouse.up()


def toggle(page: Any, *names: str) -> None:
    for name in names:
        page.get_by_role("button", name=name, exact=True).click()


# ---------------------------------------------------------------------------------------------------- report


def test_every_section_has_its_charts_and_they_are_not_empty(report: Path, opened: Callable[..., Any]) -> None:
    page = opened(report)
    counts = {"learning": 2, "drifting": 2, "cost": 3, "masks": 1, "holdings": 1, "clients": 3}
    for section, count in counts.items():
        figures = page.locator(f"#{section} figure[data-chart]")
        assert figures.count() == count, section
        for figure in figures.all():
            marks = figure.locator("svg >> css=path, rect.bar, rect.cell").count()
            box = figure.locator(".plot svg").first.bounding_box()
            assert marks > 0 and box["width"] > 200 and box["height"] > 40
    for chart in CHARTS:
        assert page.locator(f"figure[data-chart='{chart}'] g.series").count() == 4, chart
    assert page.locator("figure[data-chart='accuracy'] .band").count() == 1  # only one has several seeds
    assert page.locator("figure[data-chart='accuracy'] .phase-name").all_text_contents() == ["head", "edit"]


def test_the_table_says_what_the_runs_say(report: Path, runs: Path, opened: Callable[..., Any]) -> None:
    page = opened(report)
    rows = {row.locator("td").first.inner_text(): row.inner_text() for row in page.locator("#results tbody tr").all()}
    result = json.loads((runs / "dense/result.json").read_text())
    assert f"{100 * result['test_accuracy']:.1f}%" in rows["dense"] and "finished" in rows["dense"]
    assert "unfinished: round 2 of 5" in rows["stopped"] and "±" in rows["sparse"]
    settings = page.locator("#settings table").first.inner_text()
    assert "phases.1.mask.sparsity" in settings and "data.name" not in settings


def test_numbers_are_rounded_as_in_the_terminal(report: Path, opened: Callable[..., Any]) -> None:
    """Those just between two as well: 81.25% of 16 samples."""
    page = opened(report)
    values = [k / 16 for k in range(33)] + [k / 2000 for k in range(0, 2000, 37)] + [0.15, 2.5, 0.0005, 12.3456]
    large = [*values, 59.94, 59.96, 62.5, 63.5, 3599.5, 3600, 86399, 999, 999.96, 1250, 1e6, 964.85e6, 1.25e12, 4e15]
    formats = {"percent": percent, "decimals": number, "duration": duration, "bytes": size}
    for name, in_python in formats.items():
        assert page.evaluate(f"all => all.map({name})", large) == list(map(in_python, large)), name
    pairs = [(0.8125, 0.0625), (0.5, 0.0), (0.5, None), (100.0, 2.0), (30.0, 1.0)]
    for name, in_python in formats.items():
        there = [with_margin(Interval(mean, 2, margin), in_python) for mean, margin in pairs]
        assert page.evaluate(f"all => all.map(([mean, margin]) => withMargin(mean, margin, {name}))", pairs) == there


def test_each_phase_has_its_gain_and_its_costs(report: Path, runs: Path, opened: Callable[..., Any]) -> None:
    page = opened(report)
    result = json.loads((runs / "dense/result.json").read_text())
    lines = [json.loads(line) for line in (runs / "dense/metrics.jsonl").read_text().splitlines()]
    head, edit = result["phases"]
    rows = [row.locator("td").all_inner_texts() for row in page.locator("#gains tbody tr").all()]
    place = next(k for k, row in enumerate(rows) if row[0].strip() == "dense")
    val, test = (lines[2]["val_accuracy"], lines[4]["val_accuracy"]), (head["test_accuracy"], edit["test_accuracy"])
    gains = [f"{100 * (after - before):+.1f}" for before, after in (val, test)]
    assert rows[place][1:6] == ["head", "3", "–", percent(val[0]), "–"]
    assert rows[place + 1] == [
        *("", "edit", "2", percent(val[0]), percent(val[1]), gains[0], percent(test[0]), percent(test[1]), gains[1]),
        *(size(edit["bytes_up"]), size(edit["bytes_down"]), duration(edit["seconds"])),
    ]
    toggle(page, "dense")
    assert len(page.locator("#gains tbody tr").all()) == len(rows) - 2


def test_unfinished_runs_show_their_latest_figures(report: Path, runs: Path, opened: Callable[..., Any]) -> None:
    page = opened(report)
    lines = [json.loads(line) for line in (runs / "stopped/metrics.jsonl").read_text().splitlines()]
    row = page.locator("#results tbody tr", has_text="stopped").locator("td").all_inner_texts()
    assert row[4] == percent(lines[-1]["val_accuracy"]) and row[6] == size(sum(line["bytes_up"] for line in lines))
    assert page.locator("#results td.latest").count() == 6
    assert "Figures in italics" in page.locator("#results .note").inner_text()


def test_equal_curves_are_told_apart(changed: Callable, opened: Callable[..., Any]) -> None:
    """`stopped` and the hostile one are copies of `dense`; all three have the same first rounds."""

    def plain(data: dict[str, Any]) -> None:
        next(group for group in data["groups"] if group["name"] == HOSTILE)["name"] = "copy"

    page = opened(changed(plain))
    figure = page.locator("figure[data-chart='accuracy']")
    names = figure.locator("g.series").evaluate_all("all => all.map(one => one.dataset.series)")
    dashes = "all => all.map(one => one.getAttribute('stroke-dasharray')).filter(Boolean).length"
    dashed = {name: figure.locator(f"g.series[data-series='{name}'] .curve").evaluate_all(dashes) > 0 for name in names}
    first, second = (name for name in names if name in ("dense", "copy"))
    assert not dashed["sparse"] and not dashed[first] and dashed[second]
    assert f"{second} is the same as {first}." in figure.locator("p").inner_text()
    places = [
        figure.locator(f"g.series[data-series='{name}'] .marker").evaluate_all(
            "all => all.map(one => one.getAttribute('transform').split(' ')[0])"
        )
        for name in (first, second)
    ]
    assert not set(places[0]) & set(places[1]) and all(places)
    toggle(page, second, "stopped")
    assert figure.locator("p").count() == 0


def test_losses_have_a_logarithmic_scale(changed: Callable, opened: Callable[..., Any]) -> None:
    def losses(*values: float) -> Callable[[dict[str, Any]], None]:
        def change(data: dict[str, Any]) -> None:
            for group in data["groups"]:
                group["curves"]["val_loss"] = {"x": [1, 2, 3], "y": list(values)}

        return change

    def heights(page: Any) -> list[float]:
        markers = page.locator("figure[data-chart='loss'] .marker").evaluate_all(
            "all => all.map(one => one.getAttribute('transform').match(/ ([\\d.]+)\\)/)[1])"
        )
        return sorted({round(float(one)) for one in markers})

    top, middle, bottom = heights(opened(changed(losses(100.0, 1.0, 0.01))))
    assert middle - top == pytest.approx(bottom - middle, abs=2)
    top, middle, bottom = heights(opened(changed(losses(100.0, 1.0, 0.0))))  # which no logarithm shows
    assert middle - top > 20 * (bottom - middle)


def test_phases_are_named_below_their_bars(report: Path, opened: Callable[..., Any]) -> None:
    page = opened(report)
    groups = data_in(page)["groups"]
    named = page.locator("figure[data-chart='phases'] text.part").all_text_contents()
    assert named == [f"{name} {duration(seconds)}" for group in groups for name, seconds in group["time"]]


@pytest.mark.parametrize("width", [1200, 360])
def test_classes_are_named_and_not_over_each_other(width: int, changed: Callable, opened: Callable[..., Any]) -> None:
    names = ["a rather long name of a class", "bee", "automobile", *(f"class-{k}" for k in range(40))]

    def rename(data: dict[str, Any]) -> None:
        data["splits"][0]["classes"] = names

    page = opened(changed(rename), width=width)
    figure = page.locator("#holdings figure").first
    texts = figure.locator("text.name").all()
    assert texts[0].text_content() == "a rather long n…"
    boxes = [text.bounding_box() for text in texts]
    for one, other in pairwise(boxes):
        assert one["x"] + one["width"] <= other["x"] + 1
    axis = figure.locator("text", has_text=re.compile("^class$")).bounding_box()
    assert max(box["y"] + box["height"] for box in boxes) <= axis["y"] + 1


@pytest.mark.parametrize(
    "names",
    [["no finding", "pneumonia"], ["a rather long name of a class", "bee"], [f"class-{k}" for k in range(15)]],
)
def test_names_of_classes_lie_where_there_is_room(
    names: list[str], changed: Callable, opened: Callable[..., Any]
) -> None:
    def rename(data: dict[str, Any]) -> None:
        for split in data["splits"]:
            split |= {"classes": names, "rows": [",".join("1" for _ in names)]}

    figure = opened(changed(rename), width=1200).locator("#holdings figure").first
    boxes = [text.bounding_box() for text in figure.locator("text.name").all()]
    assert len(boxes) == len(names) and all(box["width"] > box["height"] for box in boxes)
    for one, other in pairwise(boxes):
        assert one["x"] + one["width"] <= other["x"] + 1


def test_cosine_is_not_called_agreement(report: Path, opened: Callable[..., Any]) -> None:
    """`agreement` is another measure, in metrics.jsonl: whether clients move a weight the same way."""
    page = opened(report)
    assert "Cosine of clients' updates" in page.locator("figure[data-chart='cosine'] figcaption").inner_text()
    assert "agreement" not in page.locator("#drifting").inner_text().lower()


def test_the_legend_hides_a_run_in_all_charts_and_shows_it_again(report: Path, opened: Callable[..., Any]) -> None:
    page = opened(report)
    button = page.get_by_role("button", name="sparse", exact=True)
    button.focus()
    page.keyboard.press("Enter")
    assert button.get_attribute("aria-pressed") == "false"
    for chart in CHARTS:
        names = page.locator(f"figure[data-chart='{chart}'] g.series").evaluate_all(
            "all => all.map(g => g.dataset.series)"
        )
        assert names and "sparse" not in names, chart
    assert page.locator("#masks figure").count() == 0 and page.locator("#clients figure").count() == 2
    assert page.evaluate("document.activeElement.dataset.key") == "legend sparse"  # the reader is where they were
    page.keyboard.press("Enter")
    assert page.locator("figure[data-chart='loss'] g.series[data-series='sparse']").count() == 1


def test_with_everything_hidden_or_nothing_done_yet_there_is_still_a_page(
    report: Path, runs: Path, tmp_path: Path, opened: Callable[..., Any]
) -> None:
    page = opened(report)
    for button in page.locator(".legend button").all():
        button.click()
    assert page.locator("g.series").count() == 0 and page.locator("#results tbody tr").count() == 4
    (tmp_path / "begun").mkdir()
    shutil.copy(runs / "dense/experiment.yaml", tmp_path / "begun")
    assert called("report", str(tmp_path / "begun"), "--out", str(tmp_path / "page.html")) == 0
    page = opened(tmp_path / "page.html")
    assert page.locator("#results td.text").inner_text() == "unfinished: round 0 of 5"
    assert page.locator("g.series").count() == 0


def test_pointing_at_a_chart_tells_the_datas_values(report: Path, opened: Callable[..., Any]) -> None:
    page = opened(report)
    figure = page.locator("figure[data-chart='accuracy']")
    groups = {group["name"]: group for group in data_in(page)["groups"]}
    figure.scroll_into_view_if_needed()
    box = figure.locator("svg").bounding_box()
    page.mouse.move(box["x"] + box["width"] - 14, box["y"] + 120)  # the last round
    tip = figure.locator(".tip")
    assert tip.locator("b").inner_text() == "round 5, edit"
    told = {row.get_attribute("data-series"): row.inner_text() for row in tip.locator("div").all()}
    assert told.keys() == set(groups) - {"stopped"}
    for name, text in told.items():
        assert f"\n{100 * groups[name]['curves']['val_accuracy']['y'][-1]:.1f}" in text
    assert re.search(r"\d ± \d+\.\d%", told["sparse"])
    page.mouse.move(5, 5)
    assert tip.is_hidden()


def test_arrow_keys_tell_the_same_values(report: Path, opened: Callable[..., Any]) -> None:
    page = opened(report)
    figure = page.locator("figure[data-chart='accuracy']")
    figure.locator("svg").first.focus()
    page.keyboard.press("ArrowLeft")
    assert figure.locator(".tip b").inner_text() == "round 5, edit"
    page.keyboard.press("ArrowLeft")
    assert figure.locator(".tip b").inner_text() == "round 4, edit"
    page.keyboard.press("Escape")
    assert figure.locator(".tip").is_hidden()


def test_dragging_over_rounds_looks_closer_at_them(report: Path, opened: Callable[..., Any]) -> None:
    page = opened(report)
    ticks = "figure[data-chart='loss'] text"
    before = page.locator(ticks).all_text_contents()
    drag(page, "accuracy", 0.6, 0.95)
    assert page.locator(ticks).all_text_contents() != before
    page.get_by_role("button", name="Show all rounds").click()
    assert page.locator(ticks).all_text_contents() == before


def test_where_no_round_has_a_value_a_chart_says_so(changed: Callable, opened: Callable[..., Any]) -> None:
    """A range that only a hidden run has rounds in, and one between two evaluations with `evaluate.every: 3`."""
    page = opened(changed(lambda data: None))
    drag(page, "accuracy", 0.6, 0.95)
    toggle(page, "dense", "sparse", HOSTILE)
    for chart in ("accuracy", "loss", "drift", "seconds"):
        assert page.locator(f"figure[data-chart='{chart}'] .plot").inner_text() == "No value in these rounds."
    page.locator("figure[data-chart='accuracy'] svg").dblclick()
    assert page.locator("figure[data-chart='accuracy'] .marker").count() == 2

    def rarely(data: dict[str, Any]) -> None:
        for group in data["groups"]:
            whole = group["curves"]["val_accuracy"]
            third = {key: values[2:3] for key, values in whole.items()}
            group["curves"]["val_accuracy"] = third if third["x"] else None

    page = opened(changed(rarely))
    drag(page, "drift", 0.15, 0.35)
    assert page.locator("figure[data-chart='accuracy'] .plot").inner_text() == "No value in these rounds."
    figure = page.locator("figure[data-chart='drift']")
    assert figure.locator("g.series").count() == 4
    assert all(text.isdecimal() for text in figure.locator("text[text-anchor=middle]").all_text_contents())
    figure.locator("svg").first.hover(position={"x": 1, "y": 100})
    assert figure.locator(".tip b").inner_text() == "round 2, head"  # the one in sight, not the first


def test_only_phases_in_sight_are_named_and_not_over_each_other(changed: Callable, opened: Callable[..., Any]) -> None:
    names = [f"phase number {place}" for place in range(1, 6)]

    def many(data: dict[str, Any]) -> None:
        for group in data["groups"]:
            group["phases"] = [[name, place] for place, name in enumerate(names, start=1)]

    page = opened(changed(many))
    named = page.locator("figure[data-chart='accuracy'] .phase-name")

    def told() -> list[str]:
        boxes = [one.bounding_box() for one in named.all()]
        for one, other in pairwise(boxes):
            assert one["x"] + one["width"] <= other["x"]
        return named.all_text_contents()

    assert told()[0] == names[0] and 2 <= len(told()) < 5
    drag(page, "accuracy", 0.5, 0.97)  # from the middle of the third
    assert told() == names[2:]


def test_no_band_where_one_seed_is_left_and_the_tip_says_so(changed: Callable, opened: Callable[..., Any]) -> None:
    def gap(data: dict[str, Any]) -> None:
        curve = next(group for group in data["groups"] if group["name"] == "sparse")["curves"]["val_accuracy"]
        curve["margin"][2], curve["n"][2] = None, 1

    page = opened(changed(gap))
    figure = page.locator("figure[data-chart='accuracy']")
    bands = figure.locator(".band").evaluate_all("all => all.map(one => one.getAttribute('d').split('L').length)")
    assert bands == [4, 4]  # corners, of rounds 1 and 2, and of 4 and 5
    figure.locator("svg").first.focus()
    for place, said in ((1, False), (2, False), (3, True)):
        page.keyboard.press("ArrowRight")
        row = figure.locator(".tip div[data-series=sparse]").inner_text()
        assert (", 1 of 2 seeds" in row, "±" in row) == (said, not said), place


def test_bytes_are_told_with_each_runs_own_round(changed: Callable, opened: Callable[..., Any]) -> None:
    def later(data: dict[str, Any]) -> None:
        groups = {group["name"]: group for group in data["groups"]}
        groups["sparse"]["sent"] = {**groups["dense"]["sent"], "round": [11, 12, 13, 14, 15]}

    page = opened(changed(later))
    figure = page.locator("figure[data-chart='bytes']")
    figure.locator("svg").first.focus()
    page.keyboard.press("ArrowLeft")
    assert "round" not in figure.locator(".tip b").inner_text()
    for name, place in (("dense", 5), ("sparse", 15)):
        assert figure.locator(f".tip div[data-series={name}]").inner_text().endswith(f", round {place}")


def test_a_choice_that_no_shown_run_has_is_kept_for_later(changed: Callable, opened: Callable[..., Any]) -> None:
    def tested(data: dict[str, Any]) -> None:
        for group in data["groups"]:
            curves = group["curves"]
            curves["test_accuracy"] = curves["val_accuracy"] if group["name"] == "dense" else None

    page = opened(changed(tested))
    figure = page.locator("figure[data-chart='accuracy']")
    figure.get_by_role("button", name="test").click()
    assert figure.locator("g.series").count() == 1
    toggle(page, "dense")
    assert figure.locator("g.series").count() == 3 and "validation" in figure.locator("figcaption").inner_text()
    toggle(page, "dense")
    assert figure.get_by_role("button", name="test").get_attribute("aria-pressed") == "true"


def test_a_heat_map_tells_who_holds_what(report: Path, runs: Path, opened: Callable[..., Any]) -> None:
    page = opened(report)
    split = json.loads((runs / "dense/split.json").read_text())
    figure = page.locator("#holdings figure").first
    figure.scroll_into_view_if_needed()
    cells = figure.locator("rect.none").bounding_box()
    for client, label in ((0, 0), (3, 9), (1, 4)):
        page.mouse.move(
            cells["x"] + (label + 0.5) * cells["width"] / 10, cells["y"] + (client + 0.5) * cells["height"] / 4
        )
        count = split["clients"][client].get(str(label), 0)
        assert figure.locator(".tip").inner_text().split() == [
            "client",
            str(client),
            f"{label}:",
            str(count),
            "samples",
        ]


def test_a_tap_tells_values_until_the_next_elsewhere(report: Path, opened: Callable[..., Any]) -> None:
    page = opened(report, width=390, touch=True)
    places = {
        "figure[data-chart='accuracy']": "svg",
        "figure[data-chart='phases']": "rect.bar",
        "#masks figure": "rect.cell",
        "#holdings figure": "rect.none",
        "#clients figure": "g.column",
    }
    tips = page.locator(".tip:visible")
    for chart, part in places.items():
        part_of_it = page.locator(chart).first.locator(part).first
        part_of_it.scroll_into_view_if_needed()
        part_of_it.tap(force=True)  # cells lie above the map's own rectangle
        assert tips.count() == 1 and page.locator(chart).first.locator(".tip:visible").inner_text(), chart
    page.locator("#clients h2").tap()
    assert tips.count() == 0


def test_both_themes_can_be_read(report: Path, opened: Callable[..., Any]) -> None:
    backgrounds = set()
    for scheme in ("light", "dark"):
        page = opened(report, scheme=scheme)
        for _ in range(2):  # as the system says, and the other by the button
            backgrounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
            texts = ["h1", ".note", "td", "th", "figcaption", ".plot text", "summary", ".badge"]
            found = page.evaluate(CONTRASTS, texts)
            assert len(found) > 50 and min(ratio for _, ratio in found) >= 4.5, found
            page.locator("button.theme").click()
    assert len(backgrounds) == 2
    page = opened(report, scheme="light")
    page.locator("button.theme").click()
    page.emulate_media(media="print")  # on white paper, whatever was chosen
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(253, 253, 251)"
    assert min(ratio for _, ratio in page.evaluate(CONTRASTS, texts)) >= 4.5


def test_the_same_map_is_drawn_once(changed: Callable, opened: Callable[..., Any]) -> None:
    def more(data: dict[str, Any]) -> None:
        sparse = next(group for group in data["groups"] if group["name"] == "sparse")
        denser = [{**one, "rest": {**one["rest"], "all": 0.5}} for one in sparse["density"]]
        data["groups"] += [{**sparse, "name": "twin"}, {**sparse, "name": "denser", "density": denser}]

    page = opened(changed(more))
    phase = page.locator("#masks figcaption .named").first.inner_text().removeprefix("sparse")
    captions = [one.locator(".named").all_inner_texts() for one in page.locator("#masks figcaption").all()]
    assert captions == [[f"sparse{phase}", f"twin{phase}"], [f"denser{phase}"]]


def test_only_gains_with_an_interval_are_coloured(changed: Callable, opened: Callable[..., Any]) -> None:
    def surely(data: dict[str, Any]) -> None:
        for group in data["groups"]:
            several = len(group["seeds"]) > 1
            for phase in group["gains"]:
                phase["val"]["gain"] = phase["test"]["gain"] = [0.2, 0.1, 2] if several else [0.2, None, 1]

    page = opened(changed(surely))
    coloured = page.locator("#gains td.better").all_inner_texts()
    assert coloured and all(text == "+20.0 ± 10.0" for text in coloured)
    assert page.locator("#gains td", has_text="+20.0").count() > len(coloured)


def test_the_state_of_runs_has_a_column_only_if_it_tells_something(
    changed: Callable, opened: Callable[..., Any]
) -> None:
    def finish(data: dict[str, Any]) -> None:
        data["groups"] = [group for group in data["groups"] if group["finished"]]

    assert opened(changed(lambda data: None)).locator("#results th").all_inner_texts()[-1] == "state"
    page = opened(changed(finish))
    assert page.locator("#results th").all_inner_texts()[-1] == "time"
    assert {row.locator("td").count() for row in page.locator("#results tbody tr").all()} == {8}


@pytest.mark.parametrize("width", [360, 768])
def test_a_narrow_screen_never_scrolls_sideways(width: int, report: Path, opened: Callable[..., Any]) -> None:
    page = opened(report, width=width)
    for details in page.locator("summary").all():
        details.click()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("figure[data-chart='accuracy'] svg").bounding_box()["width"] > width / 2.5


def test_many_groups_with_long_names_fit_a_phone(changed: Callable, opened: Callable[..., Any]) -> None:
    def many(data: dict[str, Any]) -> None:
        unfinished = next(group for group in data["groups"] if group["name"] == "stopped")
        names = [f"a-rather-long-name-of-a-run-that-says-all-of-its-settings-{place}" for place in range(10)]
        data["groups"] = [{**unfinished, "name": name} for name in names]

    page = opened(changed(many), width=360)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.locator("#holdings figcaption .named").all_inner_texts() == ["all runs"]
    cell = page.locator("#results tbody td").first.bounding_box()
    badge = page.locator("#results tbody td").first.locator(".badge").bounding_box()
    assert (
        cell["width"] < 0.5 * 360 and badge["x"] + badge["width"] <= cell["x"] + cell["width"] and badge["height"] > 10
    )
    boxes = {".legend": "scrollTop", "#results .scroll": "scrollLeft"}
    for place, side in boxes.items():
        page.locator(place).evaluate(f"one => {{ one.{side} = 60 }}")
    page.locator(".legend button").nth(3).evaluate("one => one.click()")
    for place, side in boxes.items():
        assert page.locator(place).evaluate(f"one => one.{side}") == 60
    caption = page.locator("#holdings figcaption")  # of all but one
    assert caption.locator(".named").count() == 9 and caption.bounding_box()["height"] < 9 * 80


def test_charts_fit_anew_when_the_window_changes(report: Path, opened: Callable[..., Any]) -> None:
    page = opened(report)
    page.set_viewport_size({"width": 360, "height": 700})
    page.wait_for_function("document.querySelector('figure[data-chart=loss] svg').clientWidth < 340")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_hostile_names_are_text(report: Path, opened: Callable[..., Any]) -> None:
    page = opened(report)
    assert page.locator("#results td", has_text=HOSTILE).count() == 1
    assert page.get_by_role("button", name=HOSTILE).count() == 1
    page.get_by_role("button", name=HOSTILE).click()
    assert page.locator("img[src='x']").count() == 0


def test_the_commands_can_be_read_and_the_file_saved(report: Path, opened: Callable[..., Any]) -> None:
    page = opened(report)
    page.locator("#commands summary", has_text="dense").first.click()
    opened_one = page.locator("#commands details[open]")
    assert "fedsieve run dense.yaml --out runs/dense" in opened_one.inner_text()
    with page.expect_download() as saving:
        opened_one.get_by_role("link").click()
    assert saving.value.suggested_filename == "dense.yaml"
    assert parse_experiment(Path(saving.value.path()).read_text(), "dense.yaml").data.name == "digits"


def test_what_an_older_run_lacks_is_left_out_with_a_note(
    runs: Path, tmp_path: Path, opened: Callable[..., Any]
) -> None:
    old = tmp_path / "old"
    shutil.copytree(runs / "dense", old)
    (old / "split.json").unlink()
    without_digests(old)
    result = json.loads((old / "result.json").read_text())
    del result["clients"]
    (old / "result.json").write_text(json.dumps(result))
    assert called("report", str(old), "--out", str(tmp_path / "page.html")) == 0
    page = opened(tmp_path / "page.html")
    assert "Not known of old" in page.locator("#holdings").inner_text()
    assert "evaluate.clients" in page.locator("#clients").inner_text()
    assert page.locator("figure[data-chart='accuracy'] .curve").count() == 1


# ------------------------------------------------------------------------------------------- watch, explore


def test_a_watched_page_follows_the_runs_and_stays_as_it_was_left(
    runs: Path, served: Callable, tmp_path: Path, opened: Callable[..., Any]
) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    with served(folder) as address:
        page = opened(address)
        assert "Waiting for a run" in page.locator("#waiting").inner_text()
        for name in ("stopped", "dense"):
            shutil.copytree(runs / name, folder / name)
        page.locator("#results tbody tr").nth(1).wait_for()
        page.get_by_role("button", name="dense", exact=True).click()
        page.locator("summary", has_text="in common").click()
        third = (folder / "dense/metrics.jsonl").read_text().splitlines(keepends=True)[2]
        with (folder / "stopped/metrics.jsonl").open("a") as file:
            file.write(third)
        page.locator("td.text", has_text="unfinished: round 3 of 5").wait_for()
        assert page.get_by_role("button", name="dense", exact=True).get_attribute("aria-pressed") == "false"
        assert page.locator("figure[data-chart='accuracy'] g.series").count() == 1
        assert page.locator("details[open]").count() == 1
        assert page.locator("figure[data-chart='accuracy'] g.series .marker").count() == 3


@pytest.fixture(scope="module")
def explored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("explored") / "explore.html"
    assert called("explore", "digits", "--out", str(out)) == 0
    return out


def test_the_page_about_data_shows_it(explored: Path, opened: Callable[..., Any]) -> None:
    page = opened(explored)
    for place, count in {"sample": 16, "reference": 1, "nearest": 8, "farthest": 8}.items():
        pictures = page.locator(f"#{place} img")
        assert pictures.count() == count
        assert pictures.evaluate_all("all => all.every(one => one.complete && one.naturalWidth === 8)")
    for chart in ("balance", "spread", "outliers"):
        assert page.locator(f"figure[data-chart='{chart}'] g.column").count() == 10
    data = data_in(page)
    page.locator("figure[data-chart='balance']").scroll_into_view_if_needed()
    page.locator("figure[data-chart='balance'] g.column").nth(3).hover()
    tip = page.locator("figure[data-chart='balance'] .tip").inner_text()
    assert tip.split() == f"3 {data['train'][3]} for training, {data['test'][3]} for testing".split()
    about = page.locator("#outliers .note").inner_text()
    assert "1 degree of freedom" in about and "singular" not in about  # a single channel, and it varies


def test_the_page_says_why_a_covariance_is_singular(tmp_path: Path, opened: Callable[..., Any]) -> None:
    """Colours of three classes: one has its own, one is grey, and one has too few images for three channels."""
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, size=(23, 4, 4, 3), dtype=np.uint8)
    pixels[10:20] = pixels[10:20, ..., :1]
    labels = np.repeat([0, 1, 2], [10, 10, 3])
    np.savez(tmp_path / "few.npz", x_train=pixels, y_train=labels, x_test=pixels, y_test=labels)
    out = tmp_path / "explore.html"
    assert called("explore", "npz", "--path", str(tmp_path / "few.npz"), "--out", str(out)) == 0
    about = opened(out).locator("#outliers .note").inner_text()
    assert "1 or 2 or 3 degrees of freedom" in about
    assert "(in 1 class colours vary in fewer directions than there are channels, as grey ones do; " in about
    assert "1 class has no more images than channels)" in about


def test_the_page_about_data_can_be_read_anywhere(explored: Path, opened: Callable[..., Any]) -> None:
    for scheme in ("light", "dark"):
        page = opened(explored, width=360, scheme=scheme)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        texts = ["h1", ".note", "h3", ".facts dt", ".pictures p", ".plot text"]
        assert min(ratio for _, ratio in page.evaluate(CONTRASTS, texts)) >= 4.5


def test_hostile_class_names_are_text(tmp_path: Path, images: Path, opened: Callable[..., Any]) -> None:
    with np.load(images) as file:
        np.savez(tmp_path / "hostile.npz", **file, names=np.array([HOSTILE, "b", "c", "d"]))
    out = tmp_path / "explore.html"
    assert called("explore", "npz", "--path", str(tmp_path / "hostile.npz"), "--out", str(out)) == 0
    page = opened(out)
    assert page.locator(".pictures p", has_text=HOSTILE).count() > 0
    assert page.locator("img[src='x']").count() == 0
