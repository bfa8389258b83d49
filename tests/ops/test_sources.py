"""Adapters from folders, object stores, web servers and a model hub: two files of each, and nothing else."""

from __future__ import annotations

import http.server
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ops.sources import bucket as bucket_module
from ops.sources.source import CONFIG_NAME, FILES, opened
from packer.peft import TENSORS_NAME
from tests.object_storage import REGION, SECRET, FaultyProxy, ObjectServer, answer, cut
from wire.outcomes import ArtifactUnavailable, Forbidden, InvalidRequest, NotFound, RoostError, TooLarge

from .stub_hub import COMMIT, StubHub, stub_hub

CONTENT = {CONFIG_NAME: b'{"r": 8}', TENSORS_NAME: bytes(range(256)) * 40_000}
TEMPTING = {"adapter_model.bin": b"a pickle", "modeling.py": b"import os", "pytorch_model.pt": b"a pickle"}
REPO = "acme/support-lora"


class Bars:
    """Records what the bars were told."""

    def __init__(self) -> None:
        self.told: dict[str, list[tuple[int, int]]] = {}

    @contextmanager
    def __call__(self, description: str) -> Iterator[Callable[[int, int], None]]:
        steps = self.told.setdefault(description, [])
        yield lambda done, total: steps.append((done, total))


@pytest.fixture
def bars() -> Bars:
    return Bars()


def fetched(source: str, bars: Bars) -> tuple[dict[str, bytes], str]:
    """The files that were fetched, and the origin."""
    with opened(source, bars) as adapter:
        assert adapter.folder.stat().st_mode & 0o077 == 0
        found = {file.name: file.read_bytes() for file in adapter.folder.iterdir() if file.is_file()}
    assert not adapter.folder.exists()
    return found, adapter.origin


def test_a_folder_is_taken_as_it_is(tmp_path: Path, bars: Bars) -> None:
    with opened(str(tmp_path), bars) as adapter:
        assert adapter == (tmp_path, tmp_path.name)
    assert tmp_path.exists()


class TestBucket:
    @pytest.fixture
    def url(self, s3: ObjectServer, proxy: FaultyProxy, s3_keys: None, monkeypatch: pytest.MonkeyPatch) -> str:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        monkeypatch.setenv("AWS_REGION", REGION)
        bucket = s3.new_bucket()
        for name, content in (CONTENT | TEMPTING).items():
            s3.client.put_object(Bucket=bucket, Key=f"adapters/one/{name}", Body=content)
        return f"s3://{bucket}/adapters/one"

    def test_its_two_files_are_fetched_and_no_other(self, url: str, proxy: FaultyProxy, bars: Bars) -> None:
        found, origin = fetched(url + "/", bars)
        assert found == CONTENT
        assert origin == url
        assert {seen.path.rpartition("/")[2] for seen in proxy.seen} == set(CONTENT)
        for name, content in CONTENT.items():
            assert bars.told[f"Fetching {name}"][-1] == (len(content), len(content))

    def test_a_missing_file_is_named(self, url: str, bars: Bars) -> None:
        with pytest.raises(NotFound, match=CONFIG_NAME), opened(url + "/elsewhere", bars):
            pass

    def test_what_is_too_large_is_not_fetched(self, url: str, bars: Bars, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(bucket_module, "FILES", FILES | {TENSORS_NAME: 1000})
        with pytest.raises(TooLarge, match="at most 1000"), opened(url, bars):
            pass
        assert bars.told[f"Fetching {TENSORS_NAME}"] == []

    def test_a_fault_on_the_way_is_tried_again(self, url: str, proxy: FaultyProxy, bars: Bars) -> None:
        proxy.inject(answer(503, "SlowDown"), times=1)
        proxy.inject(cut(100_000), path=TENSORS_NAME, times=1)
        assert fetched(url, bars)[0] == CONTENT

    def test_a_refusal_is_told_without_secrets(self, url: str, proxy: FaultyProxy, bars: Bars) -> None:
        proxy.inject(answer(403, "AccessDenied"))
        with pytest.raises(ArtifactUnavailable, match="refuses our credentials") as told, opened(url, bars):
            pass
        assert SECRET not in str(told.value)


class TestWebServer:
    def test_a_folder_behind_http_on_loopback(self, tmp_path: Path, bars: Bars) -> None:
        for name, content in (CONTENT | TEMPTING).items():
            (tmp_path / name).write_bytes(content)

        class Handler(http.server.SimpleHTTPRequestHandler):
            def __init__(self, *args: object) -> None:
                super().__init__(*args, directory=str(tmp_path))  # type: ignore[arg-type]

            def log_message(self, *_: object) -> None:
                """Keep the tests' output clean."""

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        try:
            found, _ = fetched(f"http://127.0.0.1:{server.server_address[1]}/", bars)
        finally:
            server.shutdown()
            server.server_close()
        assert found == CONTENT

    @pytest.mark.parametrize(
        "url", ["http://example.com/adapter", "ftp://example.com/a", "s3://key:secret@bucket/a", "https://h/a?token=x"]
    )
    def test_other_addresses_are_refused_before_anything_is_asked(self, url: str, bars: Bars) -> None:
        with pytest.raises(InvalidRequest, match=r"source|https"), opened(url, bars):
            pass

    @pytest.mark.parametrize(
        "url", ["http://user:secret@example.com/a", "ftp://user:secret@host/a", "http://h/a?t=secret"]
    )
    def test_a_secret_in_an_address_is_not_repeated(self, url: str, bars: Bars) -> None:
        with pytest.raises(InvalidRequest) as caught, opened(url, bars):
            pass
        assert "secret" not in str(caught.value)


class TestHub:
    @pytest.fixture
    def hub(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[StubHub]:
        with stub_hub({(REPO, name): content for name, content in (CONTENT | TEMPTING).items()}) as hub:
            monkeypatch.setenv("HF_ENDPOINT", hub.url)
            yield hub

    @pytest.fixture
    def impatient(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The hub's client tries again at once."""
        monkeypatch.setattr(time, "sleep", lambda _: None)

    def test_its_two_files_are_fetched_of_one_commit_and_no_other(self, hub: StubHub, bars: Bars) -> None:
        found, origin = fetched(f"hf:{REPO}", bars)
        assert found == CONTENT
        assert origin == f"hf:{REPO}@{COMMIT}"
        fetches = {path.rpartition("/")[2] for _, path in hub.asked if "/resolve/" in path}
        assert fetches == set(CONTENT)
        assert bars.told[f"Fetching {TENSORS_NAME}"][-1] == (len(CONTENT[TENSORS_NAME]),) * 2

    def test_a_branch_that_moves_meanwhile_mixes_nothing(self, hub: StubHub, bars: Bars) -> None:
        hub.moves = True
        assert fetched(f"hf:{REPO}@main", bars)[1] == f"hf:{REPO}@{COMMIT}"
        assert all(f"/resolve/{COMMIT}/" in path for method, path in hub.asked if method == "GET")

    def test_a_revision_is_asked_for(self, hub: StubHub, bars: Bars) -> None:
        assert fetched(f"hf:{REPO}@v1", bars)[1] == f"hf:{REPO}@{COMMIT}"
        with pytest.raises(NotFound, match="no such revision"), opened(f"hf:{REPO}@v2", bars):
            pass

    def test_a_download_that_breaks_off_goes_on(self, hub: StubHub, bars: Bars) -> None:
        hub.cuts = 1
        assert fetched(f"hf:{REPO}", bars)[0] == CONTENT

    def test_pickled_weights_are_not_taken_instead(self, hub: StubHub, bars: Bars) -> None:
        del hub.files[REPO, TENSORS_NAME]
        with pytest.raises(NotFound, match="pickled weights are not read"), opened(f"hf:{REPO}", bars):
            pass
        assert not any(path.endswith((".bin", ".pt", ".py")) for _, path in hub.asked)

    def test_what_is_too_large_is_not_fetched(self, hub: StubHub, bars: Bars) -> None:
        hub.announced[CONFIG_NAME] = FILES[CONFIG_NAME] + 1
        with pytest.raises(TooLarge, match=CONFIG_NAME), opened(f"hf:{REPO}", bars):
            pass
        assert all(method == "HEAD" for method, _ in hub.asked)

    def test_more_than_was_announced_is_not_taken(self, hub: StubHub, bars: Bars) -> None:
        hub.announced[TENSORS_NAME] = 100
        with pytest.raises((TooLarge, ArtifactUnavailable)), opened(f"hf:{REPO}", bars):
            pass

    @pytest.mark.parametrize(
        ("status", "code", "expected"),
        [(403, "GatedRepo", Forbidden), (401, "RepoNotFound", NotFound), (500, "", ArtifactUnavailable)],
    )
    def test_what_the_hub_says_is_passed_on(
        self, hub: StubHub, bars: Bars, impatient: None, status: int, code: str, expected: type[RoostError]
    ) -> None:
        hub.refused[REPO] = (status, code)
        with pytest.raises(expected, match=REPO), opened(f"hf:{REPO}", bars):
            pass

    def test_a_hub_that_is_not_there_is_said_so(
        self, bars: Bars, impatient: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
        with pytest.raises(ArtifactUnavailable, match="hub"), opened(f"hf:{REPO}", bars):
            pass

    @pytest.mark.parametrize("name", ["", "acme", "../../etc", "acme/../x", "a/b/c", "a/b@", "acme/b@../x", "a/b --x"])
    def test_only_a_name_is_asked_for(self, hub: StubHub, bars: Bars, name: str) -> None:
        with pytest.raises((InvalidRequest, NotFound)), opened(f"hf:{name}", bars):
            pass
        assert all(".." not in path for _, path in hub.asked)
