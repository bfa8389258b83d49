"""What a caller is told where the registrar's answer never comes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from catalog.checks import WriteCommand
from catalog.client import OutcomeUnknown, RegistrarClient
from wire.events import ArtifactFacts
from wire.outcomes import JournalUnavailable
from wire.registrar import AnyAnswer, AnyCommand, CreatePolicy, PublishRevision, Rollback
from wire.sockets import Responder

FACTS = ArtifactFacts("d" * 64, 4, 8, ("q",), "bf16", 2, 64)


@pytest.mark.parametrize(
    ("command", "advice"),
    [
        (CreatePolicy(policy="acme/a", base="tiny"), "repeating it is safe"),
        (Rollback(policy="acme/a", to=3), "repeating it is safe"),
        (PublishRevision(policy="acme/a", artifact=FACTS), "repeating it is safe unless somebody else has published"),
        (PublishRevision(policy="acme/a", artifact=FACTS, expected_version=3), "repeating it is safe$"),
        (Rollback(policy="acme/a"), "look where the channel points before repeating it"),
    ],
)
async def test_a_command_whose_answer_is_lost_may_have_had_its_effect(
    tmp_path: Path, command: WriteCommand, advice: str
) -> None:
    endpoint = f"ipc://{tmp_path}/registrar.sock"
    came = asyncio.Event()
    responder: Responder[AnyCommand, AnyAnswer] = Responder(endpoint, AnyCommand, AnyAnswer, lambda *_: came.set())
    client = RegistrarClient(endpoint)
    try:
        waiting = asyncio.create_task(client.run(command, timeout_s=30))
        await came.wait()
        responder.close()
        with pytest.raises(OutcomeUnknown, match=f"the registrar went away: .* effect or not; {advice}") as lost:
            await waiting
        assert lost.value.retry_after_s is not None
        with pytest.raises(JournalUnavailable, match="does not answer") as absent:
            await client.run(command, timeout_s=30)
        assert not isinstance(absent.value, OutcomeUnknown), "it was never sent"
    finally:
        client.close()
        responder.close()
