"""Sequences of commands against a model that fits in a head; at the end, replay equals the view."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from catalog.batch import BatchCommand
from catalog.replay import check_environment
from tests.catalog.harness import BASE, Catalog, add_base, upload
from tests.catalog.postgres.harness import PostgresCatalog
from wire.events import Split
from wire.outcomes import Outcome, RoostError
from wire.registrar import (
    Committed,
    CreatePolicy,
    MoveChannel,
    PublishRevision,
    RemoveChannel,
    RetirePolicy,
    Rollback,
)

POLICIES = st.sampled_from(["acme/a", "acme/b", "zeta/a"])
CHANNELS = st.sampled_from(["stable", "canary"])
CONTENTS = [b"zero", b"one", b"two"]


@dataclasses.dataclass
class Modelled:
    """A policy as the design's words have it."""

    digests: list[str] = dataclasses.field(default_factory=list)
    channels: dict[str, int] = dataclasses.field(default_factory=lambda: {"stable": 0})
    before: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    retired: bool = False
    version: int = 1

    def at(self, channel: str) -> int:
        return self.channels[channel] or len(self.digests)

    def leaves(self, channel: str, revision: int) -> None:
        """The channel served ``revision`` until now."""
        self.before[channel] = [*self.before.get(channel, []), revision][-8:]


class CatalogMachine(RuleBasedStateMachine):
    """Every rule predicts the outcome of a command, queues it, and some queues run as one batch."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="catalog-"))
        self.catalog = self.make(self.folder)
        self.policies: dict[str, Modelled] = {}
        self.queue: list[tuple[BatchCommand, Outcome, Modelled | None]] = []

    def make(self, folder: Path) -> Catalog:
        return Catalog(folder)

    @initialize()
    def begin(self) -> None:
        self.catalog.run(add_base())
        self.facts = [upload(self.catalog.store, content) for content in CONTENTS]

    def expect(self, command: BatchCommand, outcome: Outcome, policy: Modelled | None = None) -> None:
        self.queue.append((command, outcome, dataclasses.replace(policy) if policy else None))

    def live(self, name: str, command: BatchCommand, expected: int | None = None) -> Modelled | None:
        """The policy, or None after the refusal that all commands on an absent or retired one get."""
        policy = self.policies.get(name)
        if policy is None:
            self.expect(command, Outcome.NOT_FOUND)
        elif policy.retired:
            self.expect(command, Outcome.RETIRED)
        elif expected is not None and expected != policy.version:
            self.expect(command, Outcome.VERSION_CONFLICT)
        else:
            return policy
        return None

    def moved(self, command: BatchCommand, policy: Modelled, channel: str, revision: int) -> None:
        if policy.channels.get(channel) != revision:
            if channel in policy.channels and policy.at(channel) != (revision or len(policy.digests)):
                policy.leaves(channel, policy.at(channel))
            policy.channels[channel] = revision
            policy.version += 1
        self.expect(command, Outcome.OK, policy)

    @rule(name=POLICIES)
    def create(self, name: str) -> None:
        policy = self.policies.setdefault(name, Modelled())
        command = CreatePolicy(policy=name, base=BASE)
        self.expect(command, Outcome.RETIRED if policy.retired else Outcome.OK, policy)

    @rule(name=POLICIES, content=st.sampled_from([0, 1, 2]), over=st.booleans())
    def publish(self, name: str, content: int, over: bool) -> None:
        facts = self.facts[content]
        command = PublishRevision(policy=name, artifact=facts, create_over=BASE if over else "")
        if over:
            self.policies.setdefault(name, Modelled())
        policy = self.live(name, command)
        if policy is not None:
            if policy.digests[-1:] != [facts.digest]:
                for channel in policy.before:
                    if policy.before[channel] and not policy.channels[channel]:
                        policy.leaves(channel, len(policy.digests))
                policy.digests.append(facts.digest)
                policy.version += 1
            self.expect(command, Outcome.OK, policy)

    @rule(name=POLICIES, channel=CHANNELS, revision=st.integers(0, 4), version=st.none() | st.integers(1, 6))
    def move(self, name: str, channel: str, revision: int, version: int | None) -> None:
        target = (Split(revision),) if revision else ()
        command = MoveChannel(policy=name, channel=channel, target=target, expected_version=version)
        policy = self.live(name, command, version)
        if policy is not None:
            if revision > len(policy.digests):
                self.expect(command, Outcome.NOT_FOUND)
            else:
                self.moved(command, policy, channel, revision)

    @rule(name=POLICIES, channel=CHANNELS)
    def roll_back(self, name: str, channel: str) -> None:
        command = Rollback(policy=name, channel=channel)
        policy = self.live(name, command)
        if policy is not None:
            before = policy.before.get(channel, [])
            if channel not in policy.channels or (not before and policy.at(channel) <= 1):
                self.expect(command, Outcome.NOT_FOUND)
            else:
                policy.channels[channel] = before.pop() if before else policy.at(channel) - 1
                policy.version += 1
                self.expect(command, Outcome.OK, policy)

    @rule(name=POLICIES)
    def remove_canary(self, name: str) -> None:
        command = RemoveChannel(policy=name, channel="canary")
        policy = self.live(name, command)
        if policy is not None:
            if "canary" in policy.channels:
                del policy.channels["canary"]
                policy.before.pop("canary", None)
                policy.version += 1
                self.expect(command, Outcome.OK, policy)
            else:
                self.expect(command, Outcome.NOT_FOUND)

    @rule(name=POLICIES, sure=st.integers(0, 3))
    def retire(self, name: str, sure: int) -> None:
        command = RetirePolicy(policy=name)
        policy = self.policies.get(name)
        if policy is None:
            self.expect(command, Outcome.NOT_FOUND)
        elif sure == 0 or policy.retired:
            policy.version += not policy.retired
            policy.retired = True
            self.expect(command, Outcome.OK, policy)

    @rule()
    def commit(self) -> None:
        """Run what is queued as one batch: each answer is as if the commands had come one by one."""
        answers = self.catalog.answers(*(command for command, _, _ in self.queue)) if self.queue else []
        for answer, (command, outcome, policy) in zip(answers, self.queue, strict=True):
            if isinstance(answer, Committed):
                assert outcome is Outcome.OK, command
                assert policy is not None
                assert answer.version == policy.version, command
            else:
                assert answer.outcome is outcome, (command, answer)  # type: ignore[union-attr]
        self.queue.clear()
        for name, policy in self.policies.items():
            self.agrees(name, policy)

    def agrees(self, name: str, policy: Modelled) -> None:
        record = self.catalog.view.policy(name)
        assert record is not None
        assert (record.latest, record.version, record.retired) == (len(policy.digests), policy.version, policy.retired)
        assert [row.artifact.digest for row in self.catalog.view.revisions(name)] == policy.digests
        assert len(self.catalog.view.history(name)) == policy.version
        references = {f":{channel}": policy.at(channel) for channel in policy.channels}
        references |= {f"@{number}": number for number in range(1, len(policy.digests) + 1)}
        references |= {":latest": len(policy.digests), "": policy.at("stable"), ":never": 0, "@99": 0}
        for suffix, revision in references.items():
            expected = (revision, policy.digests[revision - 1]) if revision else Outcome.NOT_FOUND
            assert self.resolved(name + suffix) == (Outcome.RETIRED if policy.retired else expected), suffix

    def resolved(self, text: str) -> tuple[int, str] | Outcome:
        try:
            found = self.catalog.resolve(text)
        except RoostError as error:
            return error.outcome
        return found.revision, found.digest

    def teardown(self) -> None:
        self.commit()
        assert check_environment(self.catalog.environment).differences == ()
        self.catalog.close()
        shutil.rmtree(self.folder)


class PostgresCatalogMachine(CatalogMachine):
    """The same rules, with the journal in PostgreSQL."""

    url = ""

    def make(self, folder: Path) -> Catalog:
        return PostgresCatalog(folder, self.url)


class LongerCatalogMachine(CatalogMachine):
    """The same rules at length."""


TestSequences = CatalogMachine.TestCase
TestSequences.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


def test_sequences_over_postgres(shared_database: str) -> None:
    PostgresCatalogMachine.url = shared_database
    run_state_machine_as_test(
        PostgresCatalogMachine, settings=settings(max_examples=40, stateful_step_count=30, deadline=None)
    )


TestLongerSequences = pytest.mark.timeout(1800)(pytest.mark.soak(LongerCatalogMachine.TestCase))
TestLongerSequences.settings = settings(max_examples=500, stateful_step_count=60, deadline=None)
