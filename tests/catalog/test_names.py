from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catalog.names import (
    Reference,
    adapter_name,
    check_base,
    check_part,
    check_policy,
    parse_reference,
    split_adapter_name,
)
from wire.outcomes import InvalidRequest

PARTS = st.from_regex(r"[a-z0-9][a-z0-9._-]{0,62}", fullmatch=True).filter(str.isascii)

MALICIOUS = [
    "",
    "/",
    "acme",
    "acme/",
    "/acme",
    "acme//x",
    "acme/x/y",
    "../etc/passwd",
    "acme/..",
    "acme/../other",
    "./x",
    "acme/x\0",
    "acme/x\n",
    "acme/x ",
    " acme/x",
    "Acme/x",
    "acme/X",
    "acme/\u00e9t\u00e9",
    "acme/\uff41",
    "acme/x\u200b",
    "\u0661/x",
    "acme/x@",
    "acme/x@0",
    "acme/x@-1",
    "acme/x@01",
    "acme/x@\u0661",
    "acme/x@7@8",
    "acme/x@99999999999",
    "acme/x:",
    "acme/x:A",
    "acme/x:stable:latest",
    "acme/x@7:stable",
    "acme/" + "x" * 64,
    "x" * 10_000,
    "acme/x:" + "y" * 10_000,
    "%2e%2e/x",
    "acme\\x",
    "\ud800/x",
]


@pytest.mark.parametrize("text", MALICIOUS)
def test_refuses_what_names_no_policy(text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_reference(text)
    assert caught.value.field == "model"
    assert caught.value.message.isascii()
    assert len(caught.value.message) < 400


@given(PARTS, PARTS, PARTS, st.integers(1, 9_999_999_999))
def test_reads_the_three_forms(tenant: str, name: str, channel: str, revision: int) -> None:
    policy = f"{tenant}/{name}"
    assert parse_reference(policy) == Reference(policy, 0, "stable")
    assert parse_reference(f"{policy}@{revision}") == Reference(policy, revision, "stable")
    assert parse_reference(f"{policy}:{channel}") == Reference(policy, 0, channel)
    assert parse_reference(policy).tenant == tenant
    assert check_policy(policy) == policy


@given(st.text(max_size=80))
def test_what_is_accepted_is_never_normalised(text: str) -> None:
    try:
        reference = parse_reference(text)
    except InvalidRequest:
        return
    forms = {reference.policy, f"{reference.policy}@{reference.revision}", f"{reference.policy}:{reference.channel}"}
    assert text in forms


@pytest.mark.parametrize("text", ["", "a/b", "..", ".hidden", "a b", "x" * 128, "\u00e9"])
def test_a_base_has_no_slash_and_so_never_collides_with_a_policy(text: str) -> None:
    with pytest.raises(InvalidRequest):
        check_base(text)
    assert check_base("Qwen3-0.6B") == "Qwen3-0.6B"


@pytest.mark.parametrize("text", ["", "a/b", "..", "A", "x" * 64])
def test_a_part_is_one_part(text: str) -> None:
    with pytest.raises(InvalidRequest, match="tenant"):
        check_part(text, "tenant")


@given(PARTS, st.from_regex(r"[0-9a-f]{64}", fullmatch=True).filter(lambda text: len(text) == 64))
def test_an_adapter_name_holds_tenant_and_digest(tenant: str, digest: str) -> None:
    assert split_adapter_name(adapter_name(tenant, digest)) == (tenant, digest)


@pytest.mark.parametrize("name", ["", "tiny", "acme/x", "acme@abc", "@" + "0" * 64, "acme@" + "0" * 63 + "G"])
def test_other_names_are_not_adapter_names(name: str) -> None:
    assert split_adapter_name(name) is None
