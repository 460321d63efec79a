"""The pictures in docs/: the top of a report on runs, and of the page about digits.

make browser
for seed in 42 43 44; do for preset in digits-noniid digits-edit-noniid digits-edit-iid; do
    fedsieve run $preset seed=$seed evaluate.clients=true --out runs/pages/$preset/seed-$seed; done; done
python scripts/screenshots.py runs/pages
"""

import argparse
import io
import os
import shutil
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

from fedsieve.analysis.collection import find_runs
from fedsieve.analysis.report.exploration import exploration
from fedsieve.analysis.report.overview import overview
from fedsieve.analysis.report.page import page
from fedsieve.config.data_settings import DataSettings
from fedsieve.data.load import load

COLOURS = 128  # enough for pages, and a third of the bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders of runs, or with runs below them")
    parser.add_argument("--out", type=Path, default=Path("docs"), help="where report.png and explore.png go")
    arguments = parser.parse_args()
    found = exploration(load(DataSettings(name="digits")), "digits")
    about_runs = overview(find_runs(arguments.runs)[0], title="Sparse and dense fine-tuning of pico on digits")
    options = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=options)
        draw(browser, page(about_runs["title"], "report", about_runs), arguments.out / "report.png", 3140)
        draw(browser, page(found["title"], "explore", found), arguments.out / "explore.png", 1450)
        browser.close()


def draw(browser: Browser, text: str, picture: Path, height: int) -> None:
    """The first `height` pixels of a page."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "page.html"
        file.write_text(text, encoding="utf-8")
        view = browser.new_page(viewport={"width": 1200, "height": height}, color_scheme="light")
        view.goto(file.as_uri())
        shot = Image.open(io.BytesIO(view.screenshot()))
    shot.convert("RGB").quantize(COLOURS).save(picture, optimize=True)
    print(f"{picture}: {picture.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
