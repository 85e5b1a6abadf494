from __future__ import annotations

import pytest

from cache.tree import hashing
from cache.tree.hashing import group_hashes, region_id

SECRET, ROOT, REGION, OTHER = b"deployment secret", b"model/rev", b"r" * 16, b"o" * 16
PINNED_REGION = "0bd0362e11893a4daa291f9b1d6236af"
PINNED_GROUPS = [("cb465461aff443c014e9b801f95c3d2d", 64), ("2eac41949bd8a26a1ba9a39e26e2343c", 128)]


def groups(
    path: list[tuple[bytes, int]], tokens: list[int], secret: bytes = SECRET, root: bytes = ROOT
) -> list[tuple[bytes, int]]:
    return group_hashes(secret, root, path, tokens, block_size=16)


def test_a_region_id_is_16_bytes_and_stable() -> None:
    """Pinned: gateways of different versions must agree during a rollout."""
    assert region_id(b"secret", b"tenant", b"t1").hex() == PINNED_REGION
    assert len(region_id(b"secret", b"tenant", b"t1")) == 16


def test_parts_are_length_framed() -> None:
    assert region_id(SECRET, b"org_1", b"2345") != region_id(SECRET, b"org_12345", b"")
    assert region_id(SECRET, b"org_1", b"2345") != region_id(SECRET, b"org_12345")
    assert region_id(SECRET) != region_id(SECRET, b"")


def test_the_secret_decides_however_long_it_is() -> None:
    ids = {region_id(secret, b"t") for secret in (b"a", b"b", b"c" * 64, b"c" * 65, b"c" * 66)}
    assert len(ids) == 5


def test_an_empty_secret_is_refused() -> None:
    with pytest.raises(ValueError, match="secret"):
        region_id(b"", b"tenant")


def test_group_hashes_are_stable() -> None:
    assert [(h.hex(), end) for h, end in groups([(REGION, -1)], list(range(128)))] == PINNED_GROUPS


def test_the_last_group_of_all_is_left_out_unless_whole() -> None:
    assert [end for _, end in groups([(REGION, -1)], list(range(127)))] == [64]
    assert [end for _, end in groups([(REGION, -1)], list(range(128)))] == [64, 128]
    assert groups([(REGION, -1)], list(range(63))) == []


def test_groups_restart_where_a_region_begins_and_its_last_may_be_shorter() -> None:
    path = [(REGION, 100), (OTHER, -1)]
    assert [end for _, end in groups(path, list(range(300)))] == [64, 96, 160, 224, 288]


def test_a_region_that_the_prompt_does_not_fill_has_whole_groups_only() -> None:
    path = [(REGION, 200), (OTHER, -1)]
    assert [end for _, end in groups(path, list(range(150)))] == [64, 128]


def test_a_longer_prompt_keeps_the_hashes_of_the_shorter() -> None:
    path = [(REGION, 100), (OTHER, -1)]
    assert groups(path, list(range(300)))[:3] == groups(path, list(range(160)))


@pytest.mark.parametrize("identity", ["secret", "root", "region", "token", "earlier token"])
def test_every_part_of_the_identity_changes_the_hash(identity: str) -> None:
    tokens = list(range(128))
    base = groups([(REGION, -1)], tokens)[1][0]
    changed = {
        "secret": lambda: groups([(REGION, -1)], tokens, secret=b"another"),
        "root": lambda: groups([(REGION, -1)], tokens, root=b"model/rev2"),
        "region": lambda: groups([(OTHER, -1)], tokens),
        "token": lambda: groups([(REGION, -1)], [*tokens[:127], 0]),
        "earlier token": lambda: groups([(REGION, -1)], [9, *tokens[1:]]),
    }[identity]()
    assert changed[1][0] != base


def test_the_public_part_hashes_alike_for_all_tenants_and_the_rest_does_not() -> None:
    tokens = list(range(192))
    anna = groups([(REGION, 128), (b"anna", -1)], tokens)
    bert = groups([(REGION, 128), (b"bert", -1)], tokens)
    assert anna[:2] == bert[:2]
    assert anna[2] != bert[2]


def test_a_block_size_that_does_not_divide_a_group_is_refused() -> None:
    with pytest.raises(ValueError, match="blocks of 48"):
        group_hashes(SECRET, ROOT, [(REGION, -1)], [], block_size=48)


def test_the_bytes_hashed_do_not_depend_on_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the other byte order tokens are swapped before hashing, so its hashes of swapped tokens are ours."""
    ours = groups([(REGION, -1)], [1] * 64)
    monkeypatch.setattr(hashing.sys, "byteorder", "big")
    assert groups([(REGION, -1)], [1 << 24] * 64) == ours
