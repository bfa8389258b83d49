"""A whole mesh for a test: real processes under the real supervisor, driven as a user drives them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import tomli_w
from blake3 import blake3

# through the interpreter, so that no PATH is needed
ROOST = (sys.executable, "-m", "ops.cli")
ENGINE = "tiny-0"
BASE = "tiny"
# backends that a fleet's node may have
ENGINES = ("vllm", "sglang")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class Reply:
    """What a client saw: ``status`` 0 means that the connection broke."""

    status: int
    text: str
    model: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    error: str = ""


class Mesh:
    """One mesh on loopback with one node. ``root`` holds its state; ``engine`` and ``sidecar`` override settings.

    ``others`` are nodes besides, as in the nodes file: they are started by somebody else. With ``store_bytes`` its
    artifact store is a disk of that size, which only the mesh sees.
    """

    def __init__(
        self,
        root: Path,
        base: Path,
        *,
        engine: Mapping[str, Any],
        sidecar: Mapping[str, Any],
        others: Sequence[Mapping[str, str]] = (),
        store_bytes: int = 0,
    ) -> None:
        self.root = root
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.config = root / "roost.toml"
        self.state = root / "state"
        self._store_bytes = store_bytes
        root.mkdir(parents=True, exist_ok=True)
        told = {"name": ENGINE, "base": BASE, "model_path": str(base), "dtype": "float32", "max_model_len": 256}
        self.config.write_text(
            tomli_w.dumps(
                {
                    "state_dir": str(self.state),
                    "gateway": {"port": self.port, "anonymous": True, "nodes": [*others]},
                    "node": {"name": "here", "engines": [{**told, **engine}], **sidecar},
                }
            )
        )

    def up(self) -> None:
        store = self.state / "store"
        store.mkdir(parents=True, exist_ok=True)
        disk: list[str] = []
        if self._store_bytes:
            mount = f'mount -t tmpfs -o size={self._store_bytes} tmpfs "{store}" && exec "$@"'
            namespace = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]
            disk = [*namespace, "sh", "-c", mount, "sh"]
        self.roost("up", "--config", str(self.config), "--detach", wrapped=disk)

    def down(self) -> None:
        self.roost("down")

    def roost(self, *words: str, check: bool = True, wrapped: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
        """Run the command as a user would, under another command if one is given."""
        command = [*wrapped, *ROOST, "--state-dir", str(self.state), "--url", self.url, *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if check and done.returncode != 0:
            said = f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
            raise AssertionError(f"roost {' '.join(words)}: {said}\n{self.tails()}")
        return done

    def json(self, *words: str) -> Any:
        return json.loads(self.roost(*words, "--json").stdout)

    def publish(self, policy: str, adapter: Path) -> dict[str, Any]:
        """Publish as a user would; returns what the registrar acknowledged."""
        found: dict[str, Any] = self.json("publish", policy, str(adapter), "--create-over", BASE)
        return found

    def node(self) -> dict[str, Any]:
        """The mesh's own node as the gateway sees it."""
        return self.nodes()["here"]

    def nodes(self) -> dict[str, dict[str, Any]]:
        """All nodes by name, as the gateway sees them."""
        return {one["node"]: one for one in self.json("status")["fleet"]["nodes"]}

    def pid(self, process: str) -> int:
        """The process id of ``registrar``, ``gateway`` or ``sidecar``, or of the engine under its name."""
        if process == ENGINE:
            record = self.engine_record()
            assert record is not None, "no engine was started"
            return int(record["pid"])
        processes = {one["name"]: one for one in self.json("status")["supervisor"]["processes"]}
        return int(processes[process]["identity"]["pid"])

    def engine_record(self) -> dict[str, Any] | None:
        """What the node wrote down of its engine's process; None while it has none."""
        try:
            found: dict[str, Any] = json.loads((self.state / "run" / "engines" / f"{ENGINE}.json").read_text())
        except FileNotFoundError:
            return None
        return found

    def kill(self, process: str) -> int:
        """SIGKILL; returns the process id that is gone."""
        pid = self.pid(process)
        os.kill(pid, signal.SIGKILL)
        return pid

    def wait(self, what: str, seconds: float, condition: Callable[[], bool]) -> float:
        """Wait until ``condition()`` holds; returns how long it took in seconds."""
        begun = time.monotonic()
        while time.monotonic() - begun < seconds:
            if condition():
                return time.monotonic() - begun
            time.sleep(0.1)
        raise AssertionError(f"{what}: not within {seconds} s\n{self.tails()}")

    def tails(self) -> str:
        """The ends of all logs, for a failure's message."""
        parts = []
        for log in sorted(self.state.rglob("*.log")):
            lines = log.read_text(errors="replace").splitlines()[-15:]
            parts.append(f"--- {log.name}\n" + "\n".join(lines))
        return "\n".join(parts)


async def ask(
    session: aiohttp.ClientSession, url: str, model: str, prompt: str, *, max_tokens: int = 8, **extra: Any
) -> Reply:
    """One completion, not streamed."""
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **extra}
    try:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            answer = await response.json(content_type=None)
            if response.status != 200:
                return Reply(response.status, "", headers=response.headers, error=answer["error"]["message"])
            return Reply(200, answer["choices"][0]["text"], answer["model"], response.headers)
    except aiohttp.ClientError as broken:
        return Reply(0, "", error=repr(broken))


async def upload(mesh: Mesh, data: bytes, digest: str | None = None) -> tuple[int, dict[str, Any]]:
    """Put ``data`` into the store under its digest, or under the one given: (status, answer)."""
    digest = digest or blake3(data).hexdigest()
    async with (
        aiohttp.ClientSession() as session,
        session.put(f"{mesh.url}/roost/v1/artifacts/{digest}", data=data) as answer,
    ):
        return answer.status, await answer.json()
