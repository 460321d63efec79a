"""The federation of a run, as its folder remembers it: whose name has which number, and what all must know."""

import json
from pathlib import Path

from fedsieve.data.manifest import Federation, federation_in
from fedsieve.errors import InputError

ROSTER = "roster.json"


def federation_of(run: Path) -> Federation:
    """InputError if the file is damaged or gone."""
    path = run / ROSTER
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))["federation"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise InputError(f"{path} is damaged ({type(error).__name__}); get a copy of it") from None
    return federation_in(json.dumps(saved), str(path))
