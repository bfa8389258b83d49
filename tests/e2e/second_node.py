"""A second node of a mesh: a sidecar of its own with one engine, on the same host and the same artifact store."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from backends.process import stop_recorded
from tests.e2e.mesh import ENGINE, Mesh

NAME = "there"


class SecondNode:
    """``engine`` overrides what the mesh's own engine is told. ``address`` is for the mesh, before it starts."""

    def __init__(self, root: Path, engine: dict[str, Any]) -> None:
        root.mkdir(parents=True)
        self._root, self._engine = root, engine
        self.address = {
            "name": NAME, "endpoint": f"ipc://{root}/node.sock", "feed_endpoint": f"ipc://{root}/feed.sock",
        }  # fmt: skip
        self._sidecar: subprocess.Popen[bytes] | None = None

    def up(self, mesh: Mesh) -> None:
        """Start the sidecar beside ``mesh``, told as the mesh's own is; wait until its engine is ready."""
        settings = json.loads((mesh.state / "run" / "sidecar.json").read_text())
        own = {"run_dir": str(self._root / "run"), "log_dir": str(self._root / "logs"), "disk_dir": str(self._root)}
        own["bytes_endpoint"] = f"ipc://{self._root}/bytes.sock"
        settings |= {"node": NAME, **{name: self.address[name] for name in ("endpoint", "feed_endpoint")}, **own}
        settings["engines"] = [{**settings["engines"][0], **self._engine}]
        file = self._root / "sidecar.json"
        file.write_text(json.dumps(settings))
        with (self._root / "sidecar.log").open("wb") as log:
            argv = [sys.executable, "-m", "sidecar", "--settings", str(file)]
            self._sidecar = subprocess.Popen(argv, stdout=log, stderr=log)
        mesh.wait("the second node serves", 400, lambda: self._ready(mesh))

    def _ready(self, mesh: Mesh) -> bool:
        node = mesh.nodes().get(NAME, {})
        return bool(node.get("heard")) and [one["health"] for one in node["engines"]] == ["ready"]

    def engine_pid(self) -> int:
        """The process of its engine."""
        return int(json.loads((self._root / "run" / "engines" / f"{ENGINE}.json").read_text())["pid"])

    def down(self) -> None:
        if self._sidecar is not None:
            self._sidecar.send_signal(signal.SIGTERM)
            self._sidecar.wait(30)
        stop_recorded(self._root / "run", grace_s=5)
