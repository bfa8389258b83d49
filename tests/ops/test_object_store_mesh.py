"""The whole of a deployment whose artifacts lie in an object store: real processes, a real S3-speaking server."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.models import make_adapter, make_tiny_base
from tests.object_storage import REGION, SECRET, ObjectServer

ROOT = Path(__file__).resolve().parents[2]
Command = Callable[..., str]


@pytest.fixture
def bucket(s3: ObjectServer) -> str:
    return s3.new_bucket()


@pytest.fixture
def roost(tmp_path: Path, s3: ObjectServer, bucket: str, s3_keys: None) -> Iterator[Command]:
    """Runs a command against a mesh that is up."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    (tmp_path / "roost.toml").write_text(
        f'store = "s3://{bucket}/roost"\nstore_endpoint = "{s3.endpoint}"\nstore_region = "{REGION}"\n'
        f"[gateway]\nport = {port}\n[node]\narena_bytes = 67108864\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ROOST_")}
    environment |= {"PYTHONPATH": str(ROOT), "AWS_ENDPOINT_URL": s3.endpoint, "AWS_REGION": REGION}

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "ops.cli", *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("up", "--detach")
    try:
        yield run
    finally:
        run("down")


def test_adapters_are_published_from_a_folder_and_from_a_bucket(
    roost: Command, tmp_path: Path, s3: ObjectServer, bucket: str
) -> None:
    make_tiny_base(tmp_path / "base", "llama")
    make_adapter(tmp_path / "adapter", tmp_path / "base")
    source = s3.new_bucket()
    for file in (tmp_path / "adapter").iterdir():
        s3.client.put_object(Bucket=source, Key=f"mine/{file.name}", Body=file.read_bytes())
    roost("base", "add", "tiny", str(tmp_path / "base"))
    assert "Published acme/bot@1" in roost("publish", "acme/bot", "adapter", "--create-over", "tiny")
    assert "latest already: acme/bot@1" in roost("publish", "acme/bot", f"s3://{source}/mine")
    (key,) = s3.keys(bucket)
    assert key.startswith("roost/blobs/")
    written = [file for file in (tmp_path / ".roost").rglob("*") if file.is_file()]
    assert written
    assert not any(SECRET.encode() in file.read_bytes() for file in written), "a key lies in the state folder"
    assert not any((tmp_path / ".roost/store").rglob("*")), "artifacts lie in the folder too"
