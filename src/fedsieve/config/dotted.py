"""Settings by dotted key, as overrides name them."""

import json
from typing import Any


def flat(value: Any, key: str = "") -> dict[str, Any]:
    """Nested settings by dotted key, such as `phases.0.local.lr`."""
    items = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())
    if not items:
        return {key: value}
    return {name: leaf for part, inner in items for name, leaf in flat(inner, f"{key}.{part}".lstrip(".")).items()}


def as_text(value: Any) -> str:
    return "–" if value is None else value if isinstance(value, str) else json.dumps(value)
