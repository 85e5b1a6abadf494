from __future__ import annotations

from accounting.values.tenant_types import ApiKeyInfo
from accounting.values.types import Limits, Principal, Usage


def principal(**changes) -> Principal:
    return Principal(kind="tenant", tenant_id="t", key_id="k", scopes=frozenset(), **changes)


def test_a_principal_can_be_hashed():
    assert hash(principal(model_limits=(("m", Limits(1)),)))


def test_prompt_and_total_are_sums_of_disjoint_parts():
    usage = Usage(1, 2, 4, 8)
    assert (usage.prompt, usage.total) == (7, 15)


def test_a_redacted_key_shows_its_id_and_nothing_of_the_secret():
    info = ApiKeyInfo(
        id="key_1",
        public_id="AAAAAAAAAA",
        kind="test",
        tenant_id="t",
        service_account_id=None,
        name=None,
        scopes=frozenset(),
        models=None,
        created_at=0,
        expires_at=None,
        last_used_at=None,
        revoked_at=None,
        limits=Limits(),
    )
    assert info.redacted_value == "hg_test_AAAAAAAAAA_***"
