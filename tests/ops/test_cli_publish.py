"""Publishing from the command line: packing, uploading, and what an adapter looks like."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from ..models import make_tiny_base
from .command import COMMITTED, POLICY, Done, Roost
from .stub_gateway import StubGateway, error, stub_gateway
from .stub_hub import COMMIT, stub_hub


def publishing(folder: Path, known: bool) -> dict[str, tuple[int, Any]]:
    config = base64.b64encode((folder / "base/config.json").read_bytes()).decode()
    answers: dict[str, tuple[int, Any]] = {
        "GET /roost/v1/bases/smol": (200, {"name": "smol", "config": config}),
        "POST /roost/v1/policies/acme/support/revisions": (200, COMMITTED),
    }
    if known:
        answers["GET /roost/v1/policies/acme/support"] = (200, POLICY)
    return answers


def publish(roost: Roost, folder: Path, gateway: StubGateway, *options: str) -> Done:
    packed = roost("pack", "adapter", "--base-config", "base/config.json", "-o", "r.safetensors", "--json", cwd=folder)
    digest = json.loads(packed.stdout)["digest"]
    gateway.answers[f"PUT /roost/v1/artifacts/{digest}"] = (201, {"digest": digest, "size": 1})
    return roost("publish", "acme/support", "adapter", *options, cwd=folder, url=gateway.url)


def test_publish_packs_uploads_and_names(roost: Roost, adapter: Path) -> None:
    with stub_gateway(publishing(adapter, known=True)) as gateway:
        done = publish(roost, adapter, gateway, "--expect", "3", "--note", "tuned")
    assert done.returncode == 0, done.stderr
    assert "Published acme/support@2" in done.stdout
    upload, named = gateway.asked[-2:]
    assert upload.body == (adapter / "r.safetensors").read_bytes()
    assert upload.path.endswith(named.json["digest"])
    assert named.json["expected_version"] == 3
    assert named.json["provenance"]["note"] == "tuned"


def test_what_was_published_is_told_though_another_host_does_not_have_it_yet(roost: Roost, adapter: Path) -> None:
    late = {"GET /roost/v1/catalog/position": (504, error("deadline", "the view is not there yet"))}
    with stub_gateway(publishing(adapter, known=True) | late) as gateway:
        done = publish(roost, adapter, gateway, "--wait", gateway.url)
    assert done.stdout.startswith("Published acme/support@2")
    assert (done.returncode, "not there yet" in done.stderr) == (7, True)


def test_publish_takes_an_adapter_of_the_hub(roost: Roost, adapter: Path) -> None:
    files = {("acme/lora", file.name): file.read_bytes() for file in (adapter / "adapter").iterdir()}
    with stub_gateway(publishing(adapter, known=True)) as gateway, stub_hub(files) as hub:
        folder = publish(roost, adapter, gateway)
        done = roost("publish", "acme/support", "hf:acme/lora@v1", cwd=adapter, url=gateway.url, HF_ENDPOINT=hub.url)
    assert (folder.returncode, done.returncode) == (0, 0), done.stderr
    first, second = (asked.json for asked in gateway.asked if asked.method == "POST")
    assert first["digest"] == second["digest"]
    assert second["provenance"]["source"].endswith(f": hf:acme/lora@{COMMIT}")


def test_publish_uploads_again_where_the_store_asks_for_a_moment(
    roost: Roost, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr("ops.cli.publish.time.sleep", waited.append)
    with stub_gateway(publishing(adapter, known=True)) as gateway:
        assert publish(roost, adapter, gateway).returncode == 0
        upload = next(name for name in gateway.answers if name.startswith("PUT"))
        gateway.answers[upload] = (503, error("artifact_unavailable", "the object store is too busy"))
        busy = roost("publish", "acme/support", "adapter", cwd=adapter, url=gateway.url)
        gateway.answers[upload] = (502, error("artifact_unavailable", "the object store refuses us"))
        refused = roost("publish", "acme/support", "adapter", cwd=adapter, url=gateway.url)
    assert (busy.returncode, refused.returncode) == (7, 1)
    assert "too busy" in busy.stderr
    assert waited == [7.0, 7.0]
    assert sum(asked.method == "PUT" for asked in gateway.asked) == 1 + 3 + 1


def test_a_publish_that_could_not_wait_says_what_it_published(roost: Roost, adapter: Path) -> None:
    with stub_gateway(publishing(adapter, known=True)) as gateway:
        nowhere = publish(roost, adapter, gateway, "--wait", "http://127.0.0.1:9")
        gateway.answers["GET /roost/v1/catalog/position"] = (401, error("unauthenticated", "no such key"))
        stranger = publish(roost, adapter, gateway, "--wait", gateway.url)
        sent = len(gateway.asked)
        wrong = publish(roost, adapter, gateway, "--wait", "host:80")
    assert nowhere.returncode == 3
    assert "error: published as acme/support@2; could not wait for http://127.0.0.1:9: " in nowhere.stderr
    assert stranger.returncode == 4
    assert f"published as acme/support@2; could not wait for {gateway.url}: no such key" in stranger.stderr
    assert (wrong.returncode, len(gateway.asked)) == (2, sent)


def test_publishing_to_a_new_policy_needs_its_base(roost: Roost, adapter: Path) -> None:
    with stub_gateway(publishing(adapter, known=False)) as gateway:
        refused = publish(roost, adapter, gateway)
        done = publish(roost, adapter, gateway, "--create-over", "smol")
    assert refused.returncode == 5
    assert "--create-over" in refused.stderr
    assert done.returncode == 0, done.stderr
    assert gateway.asked[-1].json["create_over"] == "smol"


def test_an_adapter_that_does_not_fit_is_not_uploaded(roost: Roost, adapter: Path, tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    folder.mkdir()
    for file in (adapter / "adapter").iterdir():
        (folder / file.name).write_bytes(file.read_bytes()[:200])
    with stub_gateway(publishing(adapter, known=True)) as gateway:
        done = roost("publish", "acme/support", str(folder), cwd=tmp_path, url=gateway.url)
    assert done.returncode in {2, 6}
    assert done.stderr.count("\n") == 1
    assert all(asked.method == "GET" for asked in gateway.asked)


def test_what_was_packed_comes_back_bit_for_bit(roost: Roost, adapter: Path, tmp_path: Path) -> None:
    file = tmp_path / "r.safetensors"
    config = str(adapter / "base/config.json")
    assert (
        roost("pack", str(adapter / "adapter"), "--base-config", config, "-o", str(file), cwd=tmp_path).returncode == 0
    )
    assert roost("unpack", str(file), "back", cwd=tmp_path).returncode == 0
    before, after = (
        load_file(folder / "adapter_model.safetensors") for folder in (adapter / "adapter", tmp_path / "back")
    )
    assert before.keys() == after.keys()
    assert all((before[name] == after[name]).all() for name in before)


def test_inspect_shows_a_folder_and_the_revision_file_that_it_becomes(
    roost: Roost, adapter: Path, tmp_path: Path
) -> None:
    file = tmp_path / "r.safetensors"
    config = ("--base-config", str(adapter / "base/config.json"))
    roost("pack", str(adapter / "adapter"), *config, "-o", str(file), cwd=tmp_path)
    folder, packed = (
        json.loads(roost("inspect", str(path), *config, "--json", cwd=tmp_path).stdout)
        for path in (adapter / "adapter", file)
    )
    assert (folder["kind"], packed["kind"]) == ("PEFT folder", "revision file")
    assert folder["facts"] == packed["facts"]
    assert folder["modules"] == packed["modules"]
    done = roost("inspect", str(adapter / "adapter"), cwd=tmp_path)
    assert done.returncode == 0
    assert folder["facts"]["digest"] in done.stdout
    assert "--base-config" in done.stdout
    assert "Would be taken" in roost("inspect", str(file), *config, cwd=tmp_path).stdout


def test_inspect_says_why_an_adapter_would_be_refused(roost: Roost, adapter: Path, tmp_path: Path) -> None:
    other = make_tiny_base(tmp_path / "other", layers=1)
    done = roost("inspect", str(adapter / "adapter"), "--base-config", str(other / "config.json"), cwd=tmp_path)
    assert done.returncode == 6
    assert "Would be refused" in done.stdout
    assert "layers.1" in done.stdout
    assert roost("inspect", "nothing", cwd=tmp_path).returncode == 5


def test_an_adapter_is_explained_before_it_is_packed(roost: Roost, adapter: Path, tmp_path: Path) -> None:
    folder, config = str(adapter / "adapter"), str(adapter / "base/config.json")
    told = roost("pack", folder, "--inspect", "--base-config", config, cwd=tmp_path).stdout
    assert "PEFT folder" in told
    assert "Would be taken" in told
    assert json.loads(roost("pack", folder, "--inspect", "--json", cwd=tmp_path).stdout)["refusal"] == ""
    (tmp_path / "broken").mkdir()
    done = roost("pack", "broken", "--inspect", cwd=tmp_path)
    assert "Would be refused" in done.stdout
    assert done.returncode == 6
    assert roost("pack", "nothing", "--inspect", cwd=tmp_path).returncode == 5
    assert "packing needs --base-config" in roost("pack", folder, cwd=tmp_path).stderr
    assert "packing needs --output" in roost("pack", folder, "--base-config", config, cwd=tmp_path).stderr
