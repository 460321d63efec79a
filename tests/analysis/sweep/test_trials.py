"""Names of arms."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from fedsieve.analysis.sweep.trials import arm_name

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)


def test_names_say_what_the_values_are() -> None:
    assert arm_name({}) == "as-it-is"
    assert arm_name({"a": "iid", "b": 0.9}) == "iid-0.9"
    assert arm_name({"a": {"kind": "classes", "per_client": 5}, "b": "random"}).startswith("classes-5-random-")


@given(st.dictionaries(st.sampled_from(["clients.split", "phases.1.mask"]), values))
def test_names_are_names_of_folders(point: dict[str, Any]) -> None:
    name = arm_name(point)
    assert 0 < len(name) <= 65 and name.isascii() and "/" not in name and name[0] not in ".-"


def test_values_that_read_alike_have_folders_of_their_own() -> None:
    alike = [["classes", 5], {"kind": "classes", "per_client": 5}, "classes-5", "classes 5", {"x": ["classes", 5]}]
    assert len({arm_name({"key": value}) for value in alike}) == len(alike)
