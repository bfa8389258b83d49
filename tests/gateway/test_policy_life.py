"""The admin API over a policy's life, as a client sees it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from wire.events import Scope
from wire.node import Residency

from .fleet_states import BASE, FINGERPRINT
from .mesh import Mesh, Told, until

ADMIN = "/roost/v1"
POLICY = f"{ADMIN}/policies/acme/bot"


async def post(mesh: Mesh, path: str, **body: Any) -> Told:
    return await mesh.ask("POST", f"{POLICY}/{path}", json=body)


async def changed(mesh: Mesh, path: str, **body: Any) -> dict[str, Any]:
    told = await post(mesh, path, **body)
    assert told.status == 200, told.body
    return told.json  # type: ignore[no-any-return]


def published(mesh: Mesh, count: int) -> list[str]:
    """Digests of so many new revisions."""
    references = [mesh.publish("acme/bot", b"content %d" % number) for number in range(count)]
    return [mesh.catalog.resolve(reference).digest for reference in references]


async def holding(mesh: Mesh, digest: str, state: Residency = Residency.RESIDENT) -> None:
    """The node says that it has this artifact."""
    if state is Residency.ABSENT:
        mesh.sidecar.resident.pop(digest)
    else:
        mesh.sidecar.resident[digest] = state
    mesh.sidecar.announce()
    nodes = mesh.gateways[0].nodes
    await until(lambda: all((digest in node.resident) == (state is not Residency.ABSENT) for node in nodes))


async def test_promote_retire_and_restore(tmp_path: Path) -> None:
    async with Mesh(tmp_path) as mesh:
        published(mesh, 3)
        body = {"target": [{"revision": 1}, {"revision": 2, "weight": 3}], "seed": 5}
        told = await mesh.ask("PUT", f"{POLICY}/channels/canary", json=body)
        assert told.json["changed"]
        assert (await mesh.ask("GET", POLICY)).json["seeds"] == {"canary": 5}
        refused = await post(mesh, "promote", source="canary")
        assert (refused.status, refused.error["param"]) == (400, "source")
        assert (await changed(mesh, "promote", revision=2))["revision"] == 2
        assert (await mesh.chat("acme/bot")).json["model"] == "acme/bot@2"
        assert (await changed(mesh, "promote", source="latest", channel="next"))["revision"] == 3
        await changed(mesh, "retire")
        assert (await mesh.chat("acme/bot")).status == 410
        assert (await post(mesh, "restore", expected_version=1)).status == 412
        await changed(mesh, "restore")
        assert (await mesh.chat("acme/bot")).json["model"] == "acme/bot@2"


async def test_a_renamed_policy_answers_to_both_names(tmp_path: Path) -> None:
    async with Mesh(tmp_path) as mesh:
        (digest,) = published(mesh, 1)
        assert (await changed(mesh, "rename", to="acme/helper"))["policy"] == "acme/helper"
        for name in ("acme/bot", "acme/helper"):
            assert (await mesh.chat(name)).json["model"] == "acme/helper@1"
            shown = (await mesh.ask("GET", f"{ADMIN}/policies/{name}")).json
            assert (shown["policy"], shown["former"]) == ("acme/helper", ["acme/bot"])
        # an engine knows it by tenant and digest: nothing was loaded anew
        assert {asked.digest for asked in mesh.sidecar.acquired} == {digest}
        taken = await mesh.ask("POST", f"{ADMIN}/policies", json={"policy": "acme/bot", "base": BASE})
        assert (taken.status, "forwards to" in taken.error["message"]) == (412, True)
        history = (await mesh.ask("GET", f"{POLICY}/history")).json["events"]
        assert [event["body"]["t"] for event in history] == ["PolicyRenamed", "RevisionPublished", "PolicyCreated"]
        assert history[0]["actor"] == "anonymous"
        assert (await mesh.ask("DELETE", f"{ADMIN}/policies/acme/helper/forwards/none")).status == 404
        assert (await mesh.ask("DELETE", f"{ADMIN}/policies/acme/helper/forwards/bot")).status == 200
        assert (await mesh.chat("acme/bot")).status == 404


async def test_labels_are_searched_within_what_a_key_reaches(tmp_path: Path) -> None:
    async with Mesh(tmp_path, anonymous=False) as mesh:
        acme = mesh.key("acme", Scope.PUBLISH)
        everyone = mesh.key("*", Scope.ADMIN)
        for name in ("acme/a", "acme/b", "acme/c", "rival/a"):
            mesh.publish(name)
            labels = {"team": "search", "stage": "live" if name.endswith("a") else "beta"}
            told = await mesh.ask("POST", f"{ADMIN}/policies/{name}/labels", json={"labels": labels}, headers=everyone)
            assert told.status == 200

        async def found(query: str, headers: dict[str, str]) -> list[str]:
            told = await mesh.ask("GET", f"{ADMIN}/policies?{query}", headers=headers)
            return [policy["policy"] for policy in told.json["policies"]]

        assert await found("label=team=search", everyone) == ["acme/a", "acme/b", "acme/c", "rival/a"]
        assert await found("label=team=search", acme) == ["acme/a", "acme/b", "acme/c"]
        assert await found("label=team=search&label=stage=live", acme) == ["acme/a"]
        assert await found(f"base={BASE}&prefix=rival/", acme) == []
        assert await found(f"base={BASE}&prefix=rival/", everyone) == ["rival/a"]
        page = (await mesh.ask("GET", f"{ADMIN}/policies?label=stage=beta&limit=1", headers=acme)).json
        assert (page["has_more"], page["policies"][0]["labels"]) == (True, {"team": "search", "stage": "beta"})
        assert await found(f"label=stage=beta&limit=1&after={page['after']}", acme) == ["acme/c"]
        for query in ("label=team", "label=a%20b=c", "label=a=1&label=a=2", "base=a/b"):
            assert (await mesh.ask("GET", f"{ADMIN}/policies?{query}", headers=acme)).status == 400


async def test_training_records_are_kept_and_released(tmp_path: Path) -> None:
    async with Mesh(tmp_path) as mesh:
        published(mesh, 1)
        kept = {"kind": "checkpoint", "uri": "s3://runs/7?step=40", "digest": "ab", "step": 40, "revision": 1}
        await changed(mesh, "training", **kept)
        (record,) = (await mesh.ask("GET", f"{POLICY}/training")).json["records"]
        assert {name: record[name] for name in kept} == kept
        refused = await post(mesh, "training", kind="other", uri="x")
        assert (refused.status, refused.error["param"]) == (400, "kind")
        assert (await mesh.ask("DELETE", f"{POLICY}/training/other?uri=x")).status == 400
        assert (await mesh.ask("DELETE", f"{POLICY}/training/rollout?uri=x")).status == 404
        params = {"uri": kept["uri"]}
        assert (await mesh.ask("DELETE", f"{POLICY}/training/checkpoint", params=params)).status == 200
        assert (await mesh.ask("GET", f"{POLICY}/training")).json == {"records": []}


async def test_pruning_keeps_what_a_node_holds(tmp_path: Path) -> None:
    async with Mesh(tmp_path) as mesh:
        digests = published(mesh, 4)
        told = await mesh.ask("PUT", f"{POLICY}/retention", json={"retention": {"keep_last": 1}})
        assert told.json["changed"]
        await holding(mesh, digests[1])
        assert (await changed(mesh, "prune"))["count"] == 2
        shown = (await mesh.ask("GET", POLICY)).json
        assert shown["retention"] == {"keep_last": 1}
        assert [bool(revision["retired_ms"]) for revision in shown["revisions"]] == [True, False, True, False]
        assert (await mesh.chat("acme/bot@1")).status == 410
        assert (await mesh.chat("acme/bot@2")).status == 200
        refused = await mesh.ask("PUT", f"{POLICY}/retention", json={"retention": {"keep_last": 0}})
        assert (refused.status, refused.error["param"]) == (400, "keep_last")


async def test_single_revisions_go_and_come_back(tmp_path: Path) -> None:
    async with Mesh(tmp_path) as mesh:
        published(mesh, 2)
        assert (await post(mesh, "revisions/2/retire")).status == 412
        await changed(mesh, "revisions/1/retire")
        assert (await mesh.chat("acme/bot@1")).status == 410
        await changed(mesh, "revisions/1/restore")
        assert (await mesh.chat("acme/bot@1")).status == 200
        assert (await post(mesh, "revisions/x/retire")).status == 400
        assert (await post(mesh, "revisions/3/retire")).status == 404


async def test_artifacts_go_after_their_grace_unless_a_node_holds_them(tmp_path: Path) -> None:
    async with Mesh(tmp_path) as mesh:
        digests = published(mesh, 3)
        for revision in (1, 2):
            await changed(mesh, f"revisions/{revision}/retire")

        async def collect(**body: Any) -> dict[str, int]:
            told = await mesh.ask("POST", f"{ADMIN}/artifacts/collect", json={"grace_s": 0, **body})
            assert told.status == 200, told.body
            return {name: told.json[name] for name in ("condemned", "forgotten", "removed")}

        await holding(mesh, digests[0], Residency.FETCHING)
        assert await collect() == {"condemned": 1, "forgotten": 0, "removed": 0}
        assert await collect(grace_s=3600) == {"condemned": 0, "forgotten": 0, "removed": 0}
        await holding(mesh, digests[1])
        assert await collect() == {"condemned": 0, "forgotten": 0, "removed": 0}
        await holding(mesh, digests[1], Residency.ABSENT)
        assert await collect() == {"condemned": 0, "forgotten": 1, "removed": 1}
        assert [mesh.catalog.store.size(digest) is not None for digest in digests] == [True, False, True]
        # what was condemned in between comes back when a revision names it again
        await holding(mesh, digests[0], Residency.ABSENT)
        assert (await collect())["condemned"] == 1
        await changed(mesh, "revisions/1/restore")
        assert await collect() == {"condemned": 0, "forgotten": 0, "removed": 0}
        assert (await mesh.chat("acme/bot@1")).status == 200


async def test_nothing_is_collected_while_a_node_is_silent(tmp_path: Path) -> None:
    async with Mesh(tmp_path) as mesh:
        published(mesh, 1)
        for node in mesh.gateways[0].nodes:
            node.fall_silent()
        told = await mesh.ask("POST", f"{ADMIN}/artifacts/collect")
        assert (told.status, told.error["type"]) == (503, "no_healthy_node")
        told = await mesh.ask("POST", f"{POLICY}/prune", json={})
        assert (told.status, told.error["type"]) == (503, "no_healthy_node")
        told = await mesh.ask("POST", f"{ADMIN}/artifacts/collect", json={"ignore_silent": True})
        assert told.status == 200


async def test_where_answers_the_four_questions(tmp_path: Path) -> None:
    async with Mesh(tmp_path) as mesh:
        digests = published(mesh, 2)
        for kind, step, revision in (("checkpoint", 40, 2), ("checkpoint", 20, 1), ("rollout", 21, 1)):
            await changed(mesh, "training", kind=kind, uri=f"s3://{kind}/{step}", step=step, revision=revision)
        await changed(mesh, "promote", revision=1, channel="evaluation")
        await holding(mesh, digests[0])
        told = (await mesh.ask("GET", f"{POLICY}/where")).json
        assert (told["base"]["name"], told["base"]["fingerprint"]) == (BASE, FINGERPRINT)
        (deployment,) = told["base"]["deployments"]
        assert (deployment["node"], deployment["engine"], deployment["health"]) == ("n0", "n0e0", "ready")
        assert deployment["unfit"] == []
        assert (told["checkpoint"]["uri"], told["checkpoint"]["step"]) == ("s3://checkpoint/40", 40)
        assert told["channels"] == {
            "stable": [{"revision": 2, "digest": digests[1], "weight": 1}],
            "evaluation": [{"revision": 1, "digest": digests[0], "weight": 1}],
            "latest": [{"revision": 2, "digest": digests[1], "weight": 1}],
        }
        assert [(record["uri"], record["revision"]) for record in told["rollouts"]] == [("s3://rollout/21", 1)]
        assert [(row["in_store"], [node["residency"] for node in row["nodes"]]) for row in told["revisions"]] == [
            (True, ["resident"]),
            (True, []),
        ]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("promote", b'{"channel": "no/channel", "revision": 1}', "channel"),
        ("promote", b'{"revision": "1"}', "revision"),
        ("rename", b"{}", "to"),
        ("rename", b'{"to": "rival/bot"}', "to"),
        ("labels", b"{}", "labels"),
        ("labels", b'{"labels": {"a": 1}}', "labels"),
        ("training", b'{"kind": "rollout"}', "uri"),
        ("retire", b'{"extra": 1}', "extra"),
    ],
)
async def test_a_bad_field_is_named(tmp_path: Path, path: str, body: bytes, field: str) -> None:
    async with Mesh(tmp_path) as mesh:
        published(mesh, 1)
        told = await mesh.ask("POST", f"{POLICY}/{path}", data=body)
        assert (told.status, told.error["param"]) == (400, field), told.body
