"""What the control plane lists, page by page, and how a model is found."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from .admin import ADMIN
from .fleet_states import BASE
from .mesh import Mesh


async def test_models_come_in_pages_bases_first(tmp_path: Path) -> None:
    async with Mesh(tmp_path) as mesh:
        names = sorted(f"acme/bot{number}" for number in range(25))
        for name in names:
            mesh.publish(name)
        mesh.publish("rival/bot")
        seen: list[str] = []
        after = ""
        while True:
            page = (await mesh.ask("GET", f"/v1/models?limit=10&after={after}")).json
            assert page["object"] == "list"
            assert len(page["data"]) <= 10
            seen += [model["id"] for model in page["data"]]
            assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
            if not page["has_more"]:
                break
            after = page["last_id"]
        assert seen == [BASE, *names, "rival/bot"]
        own = (await mesh.ask("GET", "/v1/models", headers=mesh.key("rival"))).json
        assert [model["id"] for model in own["data"]] == [BASE, "rival/bot"]
        assert own["data"][1] == {
            "id": "rival/bot", "object": "model", "created": own["data"][1]["created"], "owned_by": "rival",
            "parent": BASE,
        }  # fmt: skip


async def test_a_page_is_bounded(tmp_path: Path) -> None:
    async with Mesh(tmp_path) as mesh:
        for limit in ("0", "1001", "x", "-1", "9" * 40, "1e3"):
            told = await mesh.ask("GET", f"/v1/models?limit={limit}")
            assert (told.status, told.error["param"]) == (400, "limit")
        for number in range(105):
            mesh.publish(f"acme/bot{number}")
        page = (await mesh.ask("GET", "/v1/models")).json
        assert (len(page["data"]), page["has_more"]) == (100, True)
        assert (await mesh.ask("GET", f"/v1/models?after={page['last_id']}")).json["has_more"] is False


async def test_retired_policies_are_not_listed(tmp_path: Path) -> None:
    async with Mesh(tmp_path) as mesh:
        for name in ("acme/a", "acme/b", "acme/c"):
            mesh.publish(name)
        await mesh.ask("POST", f"{ADMIN}/policies/acme/b/retire")
        page = (await mesh.ask("GET", "/v1/models?limit=2")).json
        assert ([model["id"] for model in page["data"]], page["has_more"]) == ([BASE, "acme/a"], True)
        page = (await mesh.ask("GET", "/v1/models?limit=2&after=acme/a")).json
        assert ([model["id"] for model in page["data"]], page["has_more"]) == (["acme/c"], False)


async def test_a_page_of_models_looks_at_a_bounded_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("catalog.search._MOST_LOOKED_AT", 3)
    async with Mesh(tmp_path) as mesh:
        for name in ("acme/a", "acme/b", "acme/c", "acme/d", "acme/e"):
            mesh.publish(name)
            if name < "acme/e":
                await mesh.ask("POST", f"{ADMIN}/policies/{name}/retire")
        pages: list[dict[str, Any]] = []
        after = ""
        while not pages or pages[-1]["has_more"]:
            pages.append((await mesh.ask("GET", f"/v1/models?after={after}")).json)
            after = pages[-1]["last_id"]
        assert [[model["id"] for model in page["data"]] for page in pages] == [[BASE], ["acme/e"]]


async def test_a_page_that_ends_with_the_bases_says_whether_policies_follow(tmp_path: Path) -> None:
    async with Mesh(tmp_path) as mesh:
        assert (await mesh.ask("GET", "/v1/models?limit=1")).json["has_more"] is False
        mesh.publish("acme/bot")
        page = (await mesh.ask("GET", "/v1/models?limit=1")).json
        assert (page["last_id"], page["has_more"]) == (BASE, True)
        page = (await mesh.ask("GET", f"/v1/models?limit=1&after={BASE}")).json
        assert (page["last_id"], page["has_more"]) == ("acme/bot", False)


async def test_every_model_that_is_listed_is_found(tmp_path: Path) -> None:
    async with Mesh(tmp_path) as mesh:
        mesh.publish("acme/bot")
        await mesh.ask("POST", f"{ADMIN}/policies", json={"policy": "acme/new", "base": BASE})
        listed = (await mesh.ask("GET", "/v1/models")).json["data"]
        assert [model["id"] for model in listed] == [BASE, "acme/bot", "acme/new"]
        for model in listed:
            found = await mesh.ask("GET", f"/v1/models/{model['id']}")
            assert (found.status, found.json["id"]) == (200, model["id"])
        assert (await mesh.ask("GET", "/v1/models/acme/new@1")).status == 404


async def test_a_policys_history_comes_in_pages_from_the_newest_on(tmp_path: Path) -> None:
    async with Mesh(tmp_path) as mesh:
        for content in (b"one", b"two", b"three"):
            mesh.publish("acme/bot", content)
        mesh.publish("rival/bot")
        path = f"{ADMIN}/policies/acme/bot/history"
        whole = (await mesh.ask("GET", path)).json
        assert (whole["has_more"], whole["after"]) == (False, 0)
        seqs = [event["seq"] for event in whole["events"]]
        assert seqs == sorted(seqs, reverse=True)
        paged: list[dict[str, Any]] = []
        page = {"has_more": True, "after": 0}
        while page["has_more"]:
            page = (await mesh.ask("GET", f"{path}?limit=2&after={page['after']}")).json
            assert len(page["events"]) <= 2
            paged += page["events"]
        assert paged == whole["events"]
        for query, field in (
            ("limit=0", "limit"),
            ("after=x", "after"),
            (f"after={mesh.catalog.view.position()}", "after"),
        ):
            told = await mesh.ask("GET", f"{path}?{query}")
            assert (told.status, told.error["param"]) == (400, field)


async def test_keys_come_in_pages(tmp_path: Path) -> None:
    async with Mesh(tmp_path) as mesh:
        for _ in range(5):
            mesh.key("acme")
            mesh.key("rival")
        told: list[dict[str, Any]] = []
        page = {"has_more": True, "after": ""}
        while page["has_more"]:
            page = (await mesh.ask("GET", f"{ADMIN}/keys?tenant=acme&limit=2&after={page['after']}")).json
            told += page["keys"]
        assert len({key["key_id"] for key in told}) == len(told) == 5
        assert {key["tenant"] for key in told} == {"acme"}
        refused = await mesh.ask("GET", f"{ADMIN}/keys?limit=x")
        assert (refused.status, refused.error["param"]) == (400, "limit")


async def test_a_request_is_served_while_scans_take_their_time(tmp_path: Path) -> None:
    async with Mesh(tmp_path) as mesh:
        mesh.publish("acme/bot")
        scans = mesh.gateways[0]._scans
        go_on = threading.Event()
        busy = [asyncio.ensure_future(scans.run(go_on.wait)) for _ in range(2)]
        waiting = [
            asyncio.ensure_future(mesh.ask("GET", path))
            for path in ("/v1/models", *(f"{ADMIN}/{path}" for path in (
                "bases", "keys", "policies", "policies/acme/bot", "policies/acme/bot/history",
                "policies/acme/bot/where", "policies/acme/bot/training",
            )))
        ]  # fmt: skip
        try:
            assert (await mesh.chat("acme/bot")).status == 200
            assert not any(one.done() for one in waiting)
        finally:
            go_on.set()
        assert [told.status for told in await asyncio.gather(*waiting)] == [200] * len(waiting)
        await asyncio.gather(*busy)


@pytest.mark.parametrize(
    ("name", "root"),
    [
        ("acme/bot", "acme/bot@2"),
        ("acme/bot@1", "acme/bot@1"),
        ("acme/bot:stable", "acme/bot@2"),
        ("acme%2Fbot%401", "acme/bot@1"),
    ],
)
async def test_any_model_is_found_by_its_name(tmp_path: Path, name: str, root: str) -> None:
    async with Mesh(tmp_path) as mesh:
        mesh.publish("acme/bot", b"one")
        mesh.publish("acme/bot", b"two")
        told = await mesh.ask("GET", f"/v1/models/{name}")
        assert (told.status, told.json["root"], told.json["parent"]) == (200, root, BASE)
        assert (await mesh.ask("GET", f"/v1/models/{BASE}")).json["id"] == BASE


@pytest.mark.parametrize(
    ("name", "status"),
    [("acme/none", 404), ("nobase", 404), ("acme/bot@7", 404), ("acme/bot/x", 400), ("%C3%A9", 400), ("ACME/x", 400)],
)
async def test_a_model_that_is_not_there(tmp_path: Path, name: str, status: int) -> None:
    async with Mesh(tmp_path) as mesh:
        mesh.publish("acme/bot")
        told = await mesh.ask("GET", f"/v1/models/{name}")
        assert (told.status, told.error["param"]) == (status, "model")
