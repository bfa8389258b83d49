"""What the commands do, as a reader of the catalog sees it."""

from __future__ import annotations

import itertools
import time

import msgspec
import pytest

from catalog.names import parse_reference
from tests.catalog.harness import (
    BASE,
    BASE_FINGERPRINT,
    POLICY,
    TARGETS,
    Catalog,
    add_base,
    facts_of,
    upload,
    with_revisions,
)
from wire.events import ChannelMoved, PolicyCreated, Provenance, RevisionPublished, Split
from wire.outcomes import (
    ArtifactUnavailable,
    InvalidRequest,
    NotFound,
    Retired,
    RoostError,
    TooLarge,
    VersionConflict,
)
from wire.registrar import (
    AddBase,
    CreatePolicy,
    MoveChannel,
    PublishRevision,
    RemoveChannel,
    RetirePolicy,
    Rollback,
)

DIGEST = "d" * 64


@pytest.fixture
def published(catalog: Catalog) -> Catalog:
    return with_revisions(catalog, b"one", b"two", b"three")


class TestBases:
    def test_a_base_is_found_by_name(self, catalog: Catalog) -> None:
        record = catalog.view.base(BASE)
        assert record is not None
        assert (record.fingerprint, record.path, record.config) == (BASE_FINGERPRINT, "/models/tiny", b"{}")
        assert catalog.view.bases() == [record]
        assert catalog.view.base("other") is None

    def test_adding_it_again_changes_nothing(self, catalog: Catalog) -> None:
        assert not catalog.run(add_base()).changed

    def test_another_fingerprint_needs_another_name(self, catalog: Catalog) -> None:
        with pytest.raises(VersionConflict, match="another fingerprint"):
            catalog.run(add_base(fingerprint="c" * 64))
        assert catalog.run(add_base("tiny-tuned", fingerprint="c" * 64)).changed

    def test_its_files_may_move(self, catalog: Catalog) -> None:
        before = catalog.view.base(BASE)
        moved = msgspec.structs.replace(add_base(), path="/elsewhere")
        assert catalog.run(moved).changed
        record = catalog.view.base(BASE)
        assert before is not None
        assert record is not None
        assert (record.path, record.created_ms) == ("/elsewhere", before.created_ms)

    @pytest.mark.parametrize(
        ("changes", "error", "field"),
        [
            ({"name": "a/b"}, InvalidRequest, "name"),
            ({"fingerprint": "abc"}, InvalidRequest, "fingerprint"),
            ({"path": ""}, InvalidRequest, "path"),
            ({"path": "/a\nb"}, InvalidRequest, "path"),
            ({"config": b" " * ((1 << 20) + 1)}, TooLarge, "config"),
            ({"group": "a b"}, InvalidRequest, "group"),
            ({"actor": "x" * 2000}, InvalidRequest, "actor"),
        ],
    )
    def test_refuses_a_base_that_is_none(
        self, catalog: Catalog, changes: dict[str, object], error: type[RoostError], field: str
    ) -> None:
        valid: dict[str, object] = {"name": "new", "fingerprint": "0" * 64, "path": "/m", "config": b"{}"}
        with pytest.raises(error) as caught:
            catalog.run(AddBase(**{**valid, **changes}))  # type: ignore[arg-type]
        assert caught.value.field == field
        assert [record.name for record in catalog.view.bases()] == [BASE]


class TestPolicies:
    def test_a_policy_exists_before_its_first_revision(self, catalog: Catalog) -> None:
        answer = catalog.run(CreatePolicy(policy=POLICY, base=BASE))
        assert (answer.changed, answer.policy, answer.version, answer.revision) == (True, POLICY, 1, 0)
        record = catalog.view.policy(POLICY)
        assert record is not None
        assert (record.base, record.latest, record.channels, record.retired) == (BASE, 0, {"stable": ()}, False)
        with pytest.raises(NotFound, match="no revision yet"):
            catalog.resolve(POLICY)

    def test_creating_it_again_changes_nothing_and_never_its_base(self, catalog: Catalog) -> None:
        catalog.run(add_base("other", fingerprint="c" * 64))
        catalog.run(CreatePolicy(policy=POLICY, base=BASE))
        assert not catalog.run(CreatePolicy(policy=POLICY, base=BASE)).changed
        with pytest.raises(VersionConflict, match="over base tiny"):
            catalog.run(CreatePolicy(policy=POLICY, base="other"))

    @pytest.mark.parametrize("policy", ["acme", "acme/..", "../x", "a/b/c", "A/b", "a/b@1", "x" * 10_000, "a/\u00e9"])
    def test_refuses_names_that_are_none(self, catalog: Catalog, policy: str) -> None:
        facts = upload(catalog.store, b"one")
        for command in (
            CreatePolicy(policy=policy, base=BASE),
            PublishRevision(policy=policy, artifact=facts, create_over=BASE),
            MoveChannel(policy=policy, channel="canary"),
            Rollback(policy=policy),
            RemoveChannel(policy=policy, channel="canary"),
            RetirePolicy(policy=policy),
        ):
            with pytest.raises(InvalidRequest) as caught:
                catalog.run(command)
            assert caught.value.field == "policy"
        assert catalog.view.policies() == []
        assert catalog.view.policy(policy) is None
        assert catalog.view.history(policy) == []
        assert catalog.view.revisions(policy) == []

    def test_a_base_that_is_not_there_is_told(self, catalog: Catalog) -> None:
        with pytest.raises(NotFound) as caught:
            catalog.run(CreatePolicy(policy=POLICY, base="missing"))
        assert caught.value.field == "base"

    def test_are_listed_in_pages(self, catalog: Catalog) -> None:
        names = [f"{tenant}/p{number}" for tenant in ("acme", "acme-labs", "zeta") for number in range(5)]
        for name in reversed(names):
            catalog.run(CreatePolicy(policy=name, base=BASE))
        in_order = sorted(names)
        assert [record.policy for record in catalog.view.policies()] == in_order
        assert [record.policy for record in catalog.view.policies(prefix="acme/")] == [
            name for name in in_order if name.startswith("acme/")
        ]
        seen: list[str] = []
        while page := catalog.view.policies(after=seen[-1] if seen else "", limit=4):
            seen += [record.policy for record in page]
        assert seen == in_order
        assert catalog.view.policies(prefix="acme/", after="zeta/p0") == []
        assert catalog.view.policies(prefix="nobody/") == []
        assert catalog.view.policies(prefix="x" * 1000, after="y" * 1000) == []


class TestPublish:
    def test_answers_what_is_now_named(self, catalog: Catalog) -> None:
        facts = upload(catalog.store, b"one")
        answer = catalog.run(PublishRevision(policy=POLICY, artifact=facts, create_over=BASE))
        assert (answer.policy, answer.revision, answer.digest, answer.changed) == (POLICY, 1, facts.digest, True)
        found = catalog.resolve(POLICY)
        assert (found.reference, found.tenant, found.digest) == (f"{POLICY}@1", "acme", facts.digest)
        assert (found.size, found.rank, found.targets) == (3, 8, TARGETS)
        assert (found.base, found.base_fingerprint) == (BASE, BASE_FINGERPRINT)
        assert answer.seq == catalog.view.position()

    def test_every_name_of_a_revision_resolves(self, published: Catalog) -> None:
        for text, revision in [
            (POLICY, 3),
            (f"{POLICY}:stable", 3),
            (f"{POLICY}:latest", 3),
            (f"{POLICY}@1", 1),
            (f"{POLICY}@3", 3),
        ]:
            assert published.resolve(text).revision == revision
        for text in (f"{POLICY}@4", f"{POLICY}@9999999999", f"{POLICY}:canary", "acme/other", "acme/other@1"):
            with pytest.raises(NotFound):
                published.resolve(text)

    def test_what_latest_has_is_that_revision(self, published: Catalog) -> None:
        answer = published.publish(POLICY, b"three")
        assert (answer.revision, answer.changed, answer.seq) == (3, False, published.view.position())
        assert published.resolve(POLICY).revision == 3

    def test_an_older_digest_makes_a_new_revision_over_the_same_artifact(self, published: Catalog) -> None:
        answer = published.publish(POLICY, b"one")
        assert (answer.revision, answer.changed) == (4, True)
        assert published.resolve(f"{POLICY}@4").digest == published.resolve(f"{POLICY}@1").digest
        artifact = published.view.artifact(answer.digest)
        first = published.view.revision(POLICY, 1)
        assert artifact is not None
        assert first is not None
        assert artifact.seq == first.seq

    def test_needs_the_bytes_first(self, catalog: Catalog) -> None:
        facts = upload(catalog.store, b"one")
        catalog.store.path(facts.digest).unlink()
        command = PublishRevision(policy=POLICY, artifact=facts, create_over=BASE)
        with pytest.raises(ArtifactUnavailable, match="not in the store"):
            catalog.run(command)
        assert catalog.view.policy(POLICY) is None
        upload(catalog.store, b"one")
        assert catalog.run(command).revision == 1

    def test_needs_all_of_the_bytes(self, catalog: Catalog) -> None:
        facts = msgspec.structs.replace(upload(catalog.store, b"one"), size=4)
        with pytest.raises(ArtifactUnavailable, match="has 3 bytes in the store, not 4"):
            catalog.run(PublishRevision(policy=POLICY, artifact=facts, create_over=BASE))

    def test_needs_a_policy_or_a_base_to_make_it_over(self, catalog: Catalog) -> None:
        facts = upload(catalog.store, b"one")
        with pytest.raises(NotFound, match="no policy acme/support"):
            catalog.run(PublishRevision(policy=POLICY, artifact=facts))
        with pytest.raises(NotFound) as caught:
            catalog.run(PublishRevision(policy=POLICY, artifact=facts, create_over="missing"))
        assert caught.value.field == "create_over"

    def test_never_moves_a_policy_to_another_base(self, published: Catalog) -> None:
        published.run(add_base("other", fingerprint="c" * 64))
        with pytest.raises(VersionConflict, match="over base tiny, not other"):
            published.publish(POLICY, b"four", create_over="other")

    def test_the_same_bytes_have_the_same_facts(self, published: Catalog) -> None:
        with published.store.writer() as writer:
            writer.write(b"one")
            lying = facts_of(writer.commit(), rank=16)
        with pytest.raises(InvalidRequest, match="other facts"):
            published.run(PublishRevision(policy=POLICY, artifact=lying))

    def test_provenance_is_kept_beside_the_digest(self, catalog: Catalog) -> None:
        facts = upload(catalog.store, b"one")
        origin = Provenance(source="adapter/", format="peft", run="r1", step=40, note="first")
        catalog.run(PublishRevision(policy=POLICY, artifact=facts, provenance=origin, create_over=BASE, actor="k1"))
        record = catalog.view.revision(POLICY, 1)
        assert record is not None
        assert (record.provenance, record.actor, record.artifact) == (origin, "k1", facts)
        assert catalog.view.revisions(POLICY) == [record]

    @pytest.mark.parametrize(
        ("changes", "field"),
        [
            ({"digest": "../x"}, "digest"),
            ({"size": 0}, "size"),
            ({"rank": -1}, "rank"),
            ({"tensors": 1 << 60}, "tensors"),
            ({"parameters": 0}, "parameters"),
            ({"dtype": ""}, "dtype"),
            ({"targets": ()}, "targets"),
            ({"targets": ("q", "a/b")}, "targets"),
            ({"targets": tuple(f"m{n}" for n in range(300))}, "targets"),
        ],
    )
    def test_refuses_facts_that_are_none(self, catalog: Catalog, changes: dict[str, object], field: str) -> None:
        facts = msgspec.structs.replace(upload(catalog.store, b"one"), **changes)
        with pytest.raises(InvalidRequest) as caught:
            catalog.run(PublishRevision(policy=POLICY, artifact=facts, create_over=BASE))
        assert caught.value.field == field

    @pytest.mark.parametrize(("changes", "field"), [({"note": "n" * 2000}, "note"), ({"step": -1}, "step")])
    def test_refuses_provenance_without_bounds(self, catalog: Catalog, changes: dict[str, object], field: str) -> None:
        facts = upload(catalog.store, b"one")
        origin = msgspec.structs.replace(Provenance(), **changes)
        with pytest.raises(InvalidRequest) as caught:
            catalog.run(PublishRevision(policy=POLICY, artifact=facts, provenance=origin, create_over=BASE))
        assert caught.value.field == field


class TestRetire:
    def test_a_retired_policy_answers_so_and_takes_nothing(self, published: Catalog) -> None:
        assert published.run(RetirePolicy(policy=POLICY)).changed
        for text in (POLICY, f"{POLICY}@1", f"{POLICY}:latest", f"{POLICY}:nothing"):
            with pytest.raises(Retired):
                published.resolve(text)
        for content in (b"three", b"four"):
            with pytest.raises(Retired):
                published.publish(POLICY, content)
        for command in (
            CreatePolicy(policy=POLICY, base=BASE),
            MoveChannel(policy=POLICY, channel="canary", target=(Split(1),)),
            Rollback(policy=POLICY),
            RemoveChannel(policy=POLICY, channel="stable"),
        ):
            with pytest.raises(Retired):
                published.run(command)

    def test_again_changes_nothing(self, published: Catalog) -> None:
        published.run(RetirePolicy(policy=POLICY))
        assert not published.run(RetirePolicy(policy=POLICY)).changed

    def test_keeps_the_record_and_its_history(self, published: Catalog) -> None:
        published.run(RetirePolicy(policy=POLICY))
        record = published.view.policy(POLICY)
        assert record is not None
        assert (record.retired, record.latest) == (True, 3)
        assert len(published.view.revisions(POLICY)) == 3

    def test_of_what_is_not_there_is_told(self, catalog: Catalog) -> None:
        with pytest.raises(NotFound):
            catalog.run(RetirePolicy(policy=POLICY))


class TestVersions:
    def test_each_change_is_one_version(self, catalog: Catalog) -> None:
        assert catalog.publish(POLICY, b"one").version == 2
        assert catalog.publish(POLICY, b"one").version == 2
        assert catalog.publish(POLICY, b"two").version == 3
        assert catalog.run(Rollback(policy=POLICY)).version == 4
        assert catalog.run(RetirePolicy(policy=POLICY)).version == 5

    @pytest.mark.parametrize(
        "command",
        [
            MoveChannel(policy=POLICY, channel="canary", target=(Split(1),), expected_version=3),
            Rollback(policy=POLICY, expected_version=3),
            RemoveChannel(policy=POLICY, channel="stable", expected_version=3),
            RetirePolicy(policy=POLICY, expected_version=3),
        ],
    )
    def test_a_command_for_another_version_is_refused(
        self, published: Catalog, command: MoveChannel | Rollback | RemoveChannel | RetirePolicy
    ) -> None:
        with pytest.raises(VersionConflict, match="at version 4, not 3"):
            published.run(command)
        assert published.view.position() == 5

    def test_a_publish_may_demand_that_it_is_the_first(self, catalog: Catalog) -> None:
        first, second = upload(catalog.store, b"one"), upload(catalog.store, b"two")
        publish = PublishRevision(policy=POLICY, artifact=first, create_over=BASE, expected_version=0)
        assert catalog.run(publish).revision == 1
        with pytest.raises(VersionConflict):
            catalog.run(msgspec.structs.replace(publish, artifact=second))
        assert catalog.run(msgspec.structs.replace(publish, artifact=second, expected_version=2)).revision == 2


def test_history_tells_who_did_what_when(catalog: Catalog) -> None:
    catalog.publish("acme/other", b"other")
    facts = upload(catalog.store, b"one")
    catalog.run(PublishRevision(policy=POLICY, artifact=facts, create_over=BASE, actor="ann"))
    catalog.publish("acme/support-2", b"another")
    catalog.run(Rollback(policy=POLICY, to=1, actor="bob"))
    history = catalog.view.history(POLICY)
    assert [(type(event.body), event.actor) for event in history] == [
        (PolicyCreated, "ann"),
        (RevisionPublished, "ann"),
        (ChannelMoved, "bob"),
    ]
    assert [event.seq for event in history] == sorted(event.seq for event in history)
    assert all(earlier.at_ms < later.at_ms for earlier, later in itertools.pairwise(history))


def test_a_reader_may_ask_for_anything(catalog: Catalog) -> None:
    for text in ("", "\0", "x" * 10_000, "\ud800", "acme/x\0\0\0\0\0\0\0\0\1"):
        assert catalog.view.base(text) is None
        assert catalog.view.policy(text) is None
        assert catalog.view.key(text) is None
        assert catalog.view.artifact(text) is None
        assert catalog.view.revision(text, 1) is None
        assert catalog.view.history(text) == []
    assert catalog.view.revision(POLICY, 10**30) is None
    assert catalog.view.revision(POLICY, -1) is None


def test_a_resolution_is_a_matter_of_microseconds(catalog: Catalog) -> None:
    """A bound with room for a busy machine; the figure itself is a benchmark's."""
    for number in range(200):
        catalog.publish(f"acme/p{number}", b"one")
    times = []
    for number in range(2000):
        text = f"acme/p{number % 200}"
        begin = time.perf_counter()
        catalog.view.resolve(parse_reference(text))
        times.append(time.perf_counter() - begin)
    assert sorted(times)[len(times) // 2] < 60e-6
