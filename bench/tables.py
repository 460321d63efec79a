"""Results of the side-by-side benchmark as tables: on the terminal, in README.md, and as figures in results.json."""

import datetime
import importlib.metadata
import json
import statistics
from pathlib import Path
from typing import Any

from common import RESULTS, machine

README = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
HOW = ("processes", "threads")  # the options that tables tell
VERSIONS = ("fedsieve", "torch", "flwr", "ray", "pfl")


def show(name: str, result: dict[str, Any]) -> None:
    print(f"\n{name}: {result['title']} ({result['data']})")
    for contender, *cells in lines(result):
        print(f"  {contender:36} {cells[0]:>26}  {'  '.join(cells[1:])}")
    for bar in result["bars"]:
        print(f"  {marked(bar, result['unit'])}")
    print(flush=True)


def show_all_bars(results: dict[str, dict[str, Any]]) -> None:
    """Every bar of every case, at the end of a long run."""
    for name, result in results.items():
        for bar in result["bars"]:
            print(f"{name:9} {marked(bar, result['unit'])}")


def marked(bar: dict[str, Any], unit: str) -> str:
    return f"{'met   ' if bar['met'] else 'MISSED'} {judgement(bar, unit)}"


def lines(result: dict[str, Any]) -> list[list[str]]:
    """Each contender's name, its median with the spread, how it ran, and whether it reached the same weights."""
    rows = []
    for name, one in result["contenders"].items():
        middle, low, high = (pick(one["values"]) for pick in (statistics.median, min, max))
        unit = one.get("unit", result["unit"])
        spread = f"{figure(middle)} {unit} ({figure(low)} to {figure(high)})"
        how = ", ".join(f"{value} {key}" for key, value in one.get("options", {}).items() if key in HOW)
        same = f"{one['frozen']:.0%} frozen, " if "frozen" in one else ""
        if "same" in one:
            same += f"{'same' if one['same'] else 'OTHER'} weights ({one['difference']:.0e}, {one['relative']:.0e})"
        rows.append([name, spread, how, same])
    return rows


def figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def judgement(bar: dict[str, Any], unit: str) -> str:
    if bar["to"] is None:
        return f"{bar['what']}: {figure(bar['ratio'])} {unit}, asked {bar['bar']} {unit}"
    return f"{bar['what']} / {bar['to']}: {bar['ratio']:.2f}, asked {bar['bar']}"


def keep(name: str, result: dict[str, Any]) -> None:
    """Put a case's figures into results.json, and all tables into README.md."""
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    versions = {one: importlib.metadata.version(one) for one in VERSIONS}
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    about = {"machine": machine() | versions, "date": day}
    kept.setdefault("peers", {})[name] = result | about
    RESULTS.write_text(json.dumps(kept, indent=2, default=str) + "\n")
    text = README.read_text()
    before, after = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    README.write_text(f"{before}\n{markdown(kept['peers'])}{after}")


def markdown(cases: dict[str, Any]) -> str:
    parts = []
    for name, result in cases.items():
        parts += [f"### `{name}`: {result['title']}\n", "| | median (min to max) | | weights |", "|---|---|---|---|"]
        parts += [f"| {' | '.join(row)} |" for row in lines(result)]
        parts += [""] + [f"- {'✓' if bar['met'] else '✗'} {judgement(bar, result['unit'])}" for bar in result["bars"]]
        about = result["machine"]
        software = ", ".join(f"{one} {about[one]}" for one in VERSIONS)
        parts.append(
            f"\n{result['date']}, {about['processor']}, {about['cores']} cores, {software}; {result['data']}.\n"
        )
    return "\n".join(parts)
