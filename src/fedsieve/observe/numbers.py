"""Numbers in readable form."""


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}%"


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
