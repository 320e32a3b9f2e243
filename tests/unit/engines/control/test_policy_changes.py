import pytest

from engines.control.errors import RefusedError
from engines.control.policy_changes import change_of


@pytest.mark.parametrize("number", [b"NaN", b"-Infinity", b"1e400"])
def test_a_parameter_that_is_not_finite_is_refused_by_its_name(number: bytes) -> None:
    with pytest.raises(RefusedError, match=r"params\.small is no finite number; allowed are finite numbers"):
        change_of(b'{"kind": "eviction", "name": "s3fifo", "params": {"small": %s}}' % number)


@pytest.mark.parametrize("body", [b"{", b"[" * 100_000, b'{"kind": 1, "name": "lru"}', b"\xff"])
def test_other_bodies_that_are_no_change_are_refused(body: bytes) -> None:
    with pytest.raises(RefusedError, match="invalid body"):
        change_of(body)
